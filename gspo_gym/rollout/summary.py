"""The metrics of a batch of episodes, and the mixture of environments where a run has several."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from gspo_gym.env.core import count_calls
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.rollout.episode import EpisodeRequest, PlayEpisode
from gspo_gym.types import FinishReason, Outcome, ParseStatus, Trajectory, TrajectoryGroup

METRICS: Mapping[str, str] = MappingProxyType(
    {
        "rollout/reward_mean": "mean return over kept episodes",
        "rollout/reward_std": "population standard deviation of the return over kept episodes",
        "rollout/uniform_reward_mean": "mean return over kept episodes of the groups whose tasks were not chosen by "
        "training.adaptive_tasks, every eighth; absent without it, and where a step has none",
        "rollout/success_rate": "share of kept episodes that achieved the task, over environments that say so; absent "
        "where none does",
        "rollout/num_episodes": "kept episodes; forks of others count in the next metric and the sampled tokens alone",
        "rollout/num_forks": "kept episodes that repeat the first turns of another (rollout.forks_per_episode); absent "
        "without any",
        "rollout/num_dropped": "episodes asked for and not kept, whatever the reason",
        "rollout/num_dropped_groups": "groups of which no episode was kept",
        "rollout/turns_mean": "mean number of turns over kept episodes",
        "rollout/tokens_per_turn": "mean number of sampled tokens over the turns of kept episodes",
        "rollout/sampled_tokens": "sampled tokens of kept episodes and forks, replayed ones not",
        "rollout/sampled_tokens_per_second": "sampled tokens over the seconds that episodes were being played in",
        "rollout/max_turns_fraction": "share of kept episodes that ended at the limit on turns",
        "rollout/context_overflow_fraction": "share of kept episodes whose next observation did not fit the model",
        "rollout/action_limit_fraction": "share of kept episodes whose last action exceeded a limit of the environment",
        "rollout/parse_failure_fraction": "share of turns whose text could not be parsed as an action",
        "rollout/max_output_tokens_fraction": "share of turns that ran out of output tokens",
        "rollout/events_mean": "mean over kept episodes of how many different events (achievements) each reached",
        "tools/failure_fraction": "share of the calls of known tools in kept episodes that were answered with an "
        'error; absent where none was made; "tools/failure_fraction/<tool>" is that of one tool',
    }
)
TOOL_PREFIX = "tools/failure_fraction/"
# Reward terms are named by the environments: "reward/<term>" is the mean over kept episodes of the term's sum.
TERM_PREFIX = "reward/"
# Where a run has several environments: "source/<environment>/<name>" is "rollout/<name>" of its episodes alone.
SOURCE_PREFIX = "source/"
_SOURCE_METRICS = ("reward_mean", "success_rate", "turns_mean", "num_episodes", "num_dropped", "num_dropped_groups")


def rollout_metrics(
    groups: Sequence[TrajectoryGroup], *, seconds: float, success_of: Collection[str] = ()
) -> dict[str, float]:
    """Return means over the kept episodes of these groups, one at least, which were collected in so many seconds.

    `success_of` are the environments that say whether a task was achieved; there an episode that was cut off undecided
    is no success. (): those that say so in one of these episodes.
    """
    every = [trajectory for group in groups for trajectory in group.trajectories]
    episodes = _without_forks(every)
    turns = [turn for episode in episodes for turn in episode.turns]
    returns = [episode.reward for episode in episodes]
    mean = sum(returns) / len(returns)
    num_sampled, num_forks = sum(episode.num_new_actions for episode in every), len(every) - len(episodes)
    metrics = {
        "rollout/reward_mean": mean,
        "rollout/reward_std": (sum((r - mean) ** 2 for r in returns) / len(returns)) ** 0.5,
        "rollout/num_episodes": float(len(episodes)),
        **({"rollout/num_forks": float(num_forks)} if num_forks else {}),
        **_losses(groups),
        "rollout/turns_mean": len(turns) / len(episodes),
        "rollout/tokens_per_turn": sum(episode.num_actions for episode in episodes) / len(turns),
        "rollout/sampled_tokens": float(num_sampled),
        "rollout/sampled_tokens_per_second": num_sampled / seconds,
        "rollout/max_turns_fraction": sum(e.outcome is Outcome.MAX_TURNS for e in episodes) / len(episodes),
        "rollout/context_overflow_fraction": sum(e.outcome is Outcome.CONTEXT_OVERFLOW for e in episodes)
        / len(episodes),
        "rollout/action_limit_fraction": sum(e.outcome is Outcome.ACTION_LIMIT for e in episodes) / len(episodes),
        "rollout/parse_failure_fraction": sum(turn.parse is not ParseStatus.OK for turn in turns) / len(turns),
        "rollout/max_output_tokens_fraction": sum(t.finish_reason is FinishReason.LENGTH for t in turns) / len(turns),
        "rollout/events_mean": sum(len({name for turn in e.turns for name in turn.events}) for e in episodes)
        / len(episodes),
    }
    declaring = success_of or {episode.task.env_id for episode in episodes if episode.success is not None}
    if successes := [episode.success is True for episode in episodes if episode.task.env_id in declaring]:
        metrics["rollout/success_rate"] = sum(successes) / len(successes)
    terms: defaultdict[str, float] = defaultdict(float)
    for turn in turns:
        for name, value in turn.reward_terms.items():
            terms[name] += value
    metrics |= {TERM_PREFIX + name: total / len(episodes) for name, total in sorted(terms.items())}
    return metrics | _tool_failures(episodes)


def uniform_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Return the mean return of the groups whose tasks were not chosen by what they teach; {} for none."""
    returns = [episode.reward for group in groups for episode in _without_forks(group.trajectories)]
    return {"rollout/uniform_reward_mean": sum(returns) / len(returns)} if returns else {}


def source_metrics(groups: Sequence[TrajectoryGroup], *, success_of: Collection[str] = ()) -> dict[str, float]:
    """Return the main metrics of each environment by itself; only its losses where no episode was kept."""
    by_env: defaultdict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        by_env[group.task.env_id].append(group)
    metrics: dict[str, float] = {}
    for env_id, own in sorted(by_env.items()):
        if any(group.trajectories for group in own):
            values = rollout_metrics(own, seconds=math.inf, success_of={env_id} & set(success_of))
        else:
            values = {"rollout/num_episodes": 0.0, **_losses(own)}
        source_values = {name: values[f"rollout/{name}"] for name in _SOURCE_METRICS if f"rollout/{name}" in values}
        metrics |= {f"{SOURCE_PREFIX}{env_id}/{name}": value for name, value in source_values.items()}
    return metrics


def _without_forks(episodes: Sequence[Trajectory]) -> list[Trajectory]:
    # A fork begins with turns that were drawn before, and would count them again.
    return [episode for episode in episodes if episode.forked_from is None]


def _tool_failures(episodes: Sequence[Trajectory]) -> dict[str, float]:
    calls_by_tool: Counter[str] = Counter()
    failures_by_tool: Counter[str] = Counter()
    for episode in episodes:
        counts = count_calls(episode.messages)
        calls_by_tool += counts.made
        failures_by_tool += counts.failed
    if not calls_by_tool:
        return {}
    by_tool = {TOOL_PREFIX + name: failures_by_tool[name] / calls_by_tool[name] for name in sorted(calls_by_tool)}
    return {"tools/failure_fraction": failures_by_tool.total() / calls_by_tool.total(), **by_tool}


def _losses(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    return {
        "rollout/num_dropped": float(sum(len(group.dropped) for group in groups)),
        "rollout/num_dropped_groups": float(sum(not group.trajectories for group in groups)),
    }


class Mixture:
    """Allotment of groups to environments, by the number of a group and the shares alone.

    Group after group goes to the environment that is furthest behind its share, the earlier one of equals. So none is
    ever a whole group ahead of it, and after any number of groups that gives each a whole number, each has exactly that
    (the smooth weighted round robin of load balancers, which spreads each server's requests evenly).

    Args:
        env_id: the main environment, which gets what the others leave.
        others: the fraction of groups that each further environment gets, above 0 and below 1 in sum.

    >>> mixture = Mixture("a", {"b": 0.25})
    >>> [mixture.env_of(number) for number in range(8)]
    ['a', 'a', 'b', 'a', 'a', 'a', 'b', 'a']
    """

    def __init__(self, env_id: str, others: Mapping[str, float]) -> None:
        if sum(others.values()) >= 1 or any(share <= 0 for share in others.values()) or env_id in others:
            raise ConfigError(
                f"mixture: expected fractions > 0 of other environments than {env_id!r}, below 1 in sum, got "
                f"{dict(others)}"
            )
        shares = {name: Fraction(str(share)) for name, share in others.items()}  # 0.1 is a tenth, so that ties are ties
        self._shares = {env_id: 1 - sum(shares.values()), **shares}
        self._counts: Counter[str] = Counter()
        self._env_ids: list[str] = []

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Return the environments, the main one first."""
        return tuple(self._shares)

    def env_of(self, number: int) -> str:
        """Return the environment of the group with that number, from 0."""
        # Allotted from the beginning each time a run starts: a resumed run and a pipelined one play what an
        # uninterrupted one plays.
        while len(self._env_ids) <= number:
            num_groups = len(self._env_ids) + 1
            behind = {name: num_groups * share - self._counts[name] for name, share in self._shares.items()}
            env_id = max(behind, key=behind.__getitem__)
            self._counts[env_id] += 1
            self._env_ids.append(env_id)
        return self._env_ids[number]


def play_by_environment(players: Mapping[str, PlayEpisode]) -> PlayEpisode:
    """Return a player that picks the player of an episode's environment; `players` are by environment id."""
    if len(players) == 1:
        return next(iter(players.values()))

    async def play(request: EpisodeRequest) -> Trajectory:
        env_id = request.task.env_id
        if env_id not in players:
            raise ConfigError(f"nobody here plays {env_id!r}; {nearest_name(env_id, players)}")
        return await players[env_id](request)

    return play


@dataclass(frozen=True, slots=True)
class PlayedReturns:
    """The returns that apps stated for the finished attempts at a step's episodes.

    Attributes:
        kept: of those that are in the step's groups.
        lost: of the others: dropped, dropped with their group, or played again.
    """

    kept: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()

    @property
    def mean_played(self) -> float | None:
        return _mean((*self.kept, *self.lost))

    @property
    def mean_kept(self) -> float | None:
        return _mean(self.kept)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
