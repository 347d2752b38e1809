"""Rejudge stored episodes, by another rubric or another judge, beside the run's own judgements.

No model plays and nothing of the run changes: the answers go into another file of the same form as judgements.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gspo_gym.base.tables import table
from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.judge.audit import agreement
from gspo_gym.judge.base import (
    Judge,
    JudgeCost,
    JudgeDownError,
    JudgeError,
    JudgeRequest,
    JudgeStoppedError,
    Rubrics,
    all_or_none,
)
from gspo_gym.judge.blend import RewardBlend, blend, env_rewards
from gspo_gym.judge.records import (
    JUDGEMENTS_FILE,
    JudgedEpisode,
    group_with,
    groups_of,
    latest_judgements,
    read_judgements,
)
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.types import Trajectory

Key = tuple[str, int]  # trajectory id and attempt


@dataclass(frozen=True, slots=True)
class Rescored:
    """An episode with its judgements then and now.

    `before` is None if the run's judge did not score it; `after` is None if it got no score now, and `reason` says why.
    """

    trajectory: Trajectory
    before: JudgedEpisode | None
    after: JudgedEpisode | None
    reason: str = ""

    @property
    def change(self) -> float | None:
        """Return by how much the return changed; None if one of the judges gave none."""
        if self.before is None or self.after is None:
            return None
        return self.after.episode_return - self.before.episode_return


def stored_episodes(source: Path, prefix: str = "") -> list[Trajectory]:
    """Return the episodes of a run folder in files that begin with `prefix` ("eval_000010"), or those of one file.

    Raises:
        ConfigError: there are none.
        RecordError: a line is not an episode.
    """
    files = [source] if source.is_file() else episode_paths(source, prefix)
    episodes = [trajectory for path in files for trajectory in read_episodes(path)]
    if not episodes:
        raise ConfigError(
            f"{source}: expected a run's folder with episodes/{prefix}*.jsonl.gz, or a file of episodes; found none"
        )
    return episodes


def stored_judgements(source: Path) -> dict[Key, JudgedEpisode]:
    """Return the run's last judgement of each episode; empty if nothing was judged."""
    return latest_judgements(read_judgements(source / JUDGEMENTS_FILE)) if source.is_dir() else {}


def new_file(source: Path, label: str) -> Path:
    """Return the path of the answers: judgements-LABEL.jsonl in the run's folder, or beside a file of episodes.

    Raises:
        ConfigError: it exists already, or the label cannot be part of a file name.
    """
    # No dots or slashes, so that the file cannot lie in another folder.
    if not label.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--label: expected letters, digits, - and _, got {label!r}")
    path = (source if source.is_dir() else source.parent) / f"judgements-{label}.jsonl"
    if path.exists():
        raise ConfigError(f"{path}: there is such a file already; remove it, or choose another --label")
    return path


async def rescore(
    judge: Judge,
    rubrics: Rubrics,
    episodes: Sequence[Trajectory],
    weights: RewardBlend,
    *,
    before: Mapping[Key, JudgedEpisode] | None = None,
    on_judged: Callable[[JudgedEpisode], None] | None = None,
) -> list[Rescored]:
    """Rejudge every episode and return them in order; `on_judged` gets each at once, to lose none.

    Raises:
        ConfigError: a part that has a weight is in no rubric.
        JudgeDownError, JudgeStoppedError: the judge cannot go on.
        RecordError: an episode's rewards are blended already, and its original rewards are not known.
    """
    for part, weight in (("event", weights.event), ("outcome", weights.outcome)):
        if weight > 0 and part not in rubrics.parts:
            raise ConfigError(
                f"judge.reward_blend.{part} is {weight:g}, but the rubric has no part {part!r}; set the weight to 0, "
                "or add the part"
            )

    groups = groups_of(episodes)

    async def rescore_one(trajectory: Trajectory) -> Rescored:
        old = (before or {}).get((trajectory.trajectory_id, trajectory.attempt))
        episode = _as_played(trajectory, old)
        try:
            judgement = await judge.judge(
                JudgeRequest(episode, rubrics, episode.task.env_id, group_with(episode, groups))
            )
            reward = blend(episode, judgement, weights).reward
        # These are about the judge and not about this episode: the next one would fail alike.
        except (JudgeDownError, JudgeStoppedError):
            raise
        except (JudgeError, UnscoredError) as error:
            return Rescored(trajectory, old, None, str(error))
        after = JudgedEpisode.of(episode, judgement, env_rewards(episode), weights, reward)
        if on_judged is not None:
            on_judged(after)
        return Rescored(trajectory, old, after)

    return await all_or_none([rescore_one(trajectory) for trajectory in episodes])


def side_by_side(rescored: Sequence[Rescored], *, max_rows: int = 30) -> Iterator[str]:
    """Yield lines: the episodes whose return changed most, then means, agreement and cost."""
    scored_episodes = [episode for episode in rescored if episode.after is not None]
    # An episode that was not judged before has no change and comes after those that have one.
    rows = sorted(scored_episodes, key=lambda episode: -abs(episode.change or 0.0))[:max_rows]
    heads = ("env", "event then", "now", "outcome then", "now", "return then", "now", "change")
    cells = [(episode.trajectory.trajectory_id, *_cells(episode)) for episode in rows]
    yield from table(("episode", *heads), cells).splitlines()
    if len(scored_episodes) > len(rows):
        yield f"... and {len(scored_episodes) - len(rows)} more, which changed less"
    yield from _summary(rescored)


def _as_played(trajectory: Trajectory, judged_episode: JudgedEpisode | None) -> Trajectory:
    """Return the episode with the environment's own rewards, which a blended one has only in its judgement."""
    if judged_episode is None:
        return trajectory
    if len(judged_episode.env_rewards) != len(trajectory.turns):
        raise RecordError(
            f"{trajectory.trajectory_id}: expected a reward for each of {len(trajectory.turns)} turns in "
            f"{JUDGEMENTS_FILE}, got {len(judged_episode.env_rewards)}"
        )
    pairs = zip(trajectory.turns, judged_episode.env_rewards, strict=True)
    turns = tuple(replace(turn, reward=reward, reward_terms={}) for turn, reward in pairs)
    return replace(trajectory, turns=turns)


def _cells(episode: Rescored) -> Iterator[str]:
    then, now = episode.before, episode.after
    values = [getattr(now, "env_return", None)]
    for part in ("event_total", "outcome_total", "episode_return"):
        values += [getattr(then, part, None), getattr(now, part, None)]
    yield from ("-" if value is None else f"{value:.3f}" for value in values)
    yield "-" if episode.change is None else f"{episode.change:+.3f}"


def _summary(rescored: Sequence[Rescored]) -> Iterator[str]:
    for part in ("event", "outcome"):
        total = f"{part}_total"
        pairs = [(getattr(row.before, total, None), getattr(row.after, total, None)) for row in rescored]
        complete_pairs = [(then, now) for then, now in pairs if then is not None and now is not None]
        if complete_pairs:
            numbers = agreement([now for _, now in complete_pairs], [then for then, _ in complete_pairs])
            measures = {"kappa": numbers.kappa, "correlation": numbers.correlation}
            more = [f", {key} {value:.3f}" for key, value in measures.items() if value is not None]
            means = f"mean {numbers.gold_mean:.3f} then, {numbers.judge_mean:.3f} now"
            yield f"{part}: {means}, {numbers.equal_fraction:.1%} equal{''.join(more)}"
    after = [row.after for row in rescored if row.after is not None]
    cost = sum((judged_episode.judgement.cost for judged_episode in after), JudgeCost())
    yield f"{len(after)} of {len(rescored)} episodes scored; {cost}"
    for reason, count in Counter(row.reason for row in rescored if row.after is None).most_common():
        yield f"  unscored {count}: {reason}"
