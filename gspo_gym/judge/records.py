"""Score finished episodes with a judge, blend and record them in the run's judgements.jsonl.

An episode without a score raises `UnscoredError`, and the pool retries or drops it; it never becomes 0. A judge that is
down is waited for (`PausingJudge`); one with a spent budget or a refused key ends the run, which can go on from its
checkpoint.

The file has one object per line, appended in the order of judging; readers leave out a torn last line. A resumed run
judges the episodes after its checkpoint again and appends: of an episode's lines the last counts, and all of them were
paid for.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gspo_gym.base.files import append_line, cut_torn_line, whole_lines
from gspo_gym.errors import RecordError, UnscoredError
from gspo_gym.judge.base import (
    Judge,
    JudgeBudgetError,
    JudgeCost,
    JudgeError,
    Judgement,
    JudgeRequest,
    JudgeStoppedError,
    Rubrics,
)
from gspo_gym.judge.blend import EnvRewards, RewardBlend, blend, env_rewards, unjudged
from gspo_gym.types import Outcome, Task, Trajectory

JUDGEMENTS_FILE = "judgements.jsonl"
# Raise it when a reader of the old shape would misread the new one.
JUDGEMENTS_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class JudgedEpisode:
    """A judgement with its episode and the reward made of both.

    Attributes:
        env_rewards: the environment's rewards (or their step rewards), one per turn; None where it gave none.
        episode_return: the blended return.
        spent: the cost of judging in the run until then, calls without a score included.
    """

    trajectory_id: str
    attempt: int
    env_id: str
    seed: int
    judgement: Judgement
    env_rewards: tuple[float | None, ...]
    blend: RewardBlend
    episode_return: float
    spent: JudgeCost = field(default_factory=JudgeCost)

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        judgement: Judgement,
        rewards: Sequence[float | None],
        blend: RewardBlend,
        reward: float,
    ) -> JudgedEpisode:
        """Return the record of an episode with these rewards of its environment and this blended return."""
        task = trajectory.task
        names = trajectory.trajectory_id, trajectory.attempt, task.env_id, task.seed
        return cls(*names, judgement, tuple(rewards), blend, reward)

    @property
    def env_return(self) -> float | None:
        """Return the sum of the environment's rewards; None if it gave none."""
        rewards = [reward for reward in self.env_rewards if reward is not None]
        return float(sum(rewards)) if rewards else None

    @property
    def event_total(self) -> float | None:
        """Return the sum of the turns' totals; None, and not 0, if turns were not judged."""
        return self.judgement.event_total if self.judgement.event_reviews else None

    @property
    def outcome_total(self) -> float | None:
        """Return the outcome's total; None if it was not judged."""
        return None if self.judgement.outcome_review is None else self.judgement.outcome_total


_LINE = TypeAdapter(JudgedEpisode)


def judged_to_json(judged: JudgedEpisode) -> dict[str, Any]:
    """Return a line's JSON object. The parts before weights are for people; they follow from the reviews."""
    values = {**asdict(judged), "blend": judged.blend.model_dump()}
    judgement = values.pop("judgement")
    totals = {name: getattr(judged, name) for name in ("env_return", "event_total", "outcome_total")}
    return {"schema": JUDGEMENTS_SCHEMA, **values, **totals, "judgement": judgement}


def judged_from_json(values: Mapping[str, Any]) -> JudgedEpisode:
    """Read a line's object; a RecordError for another schema, or a field that is missing or has the wrong type."""
    if values.get("schema") != JUDGEMENTS_SCHEMA:
        raise RecordError(f"expected schema {JUDGEMENTS_SCHEMA}, got {values.get('schema')!r}")
    try:
        episode = _LINE.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RecordError(f"not a judged episode: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    # What has a default in Python has none in a file, but for `cuts`, which files of earlier versions lack.
    missing = {f.name for f in fields(JudgedEpisode)} - set(values)
    missing |= {f.name for f in fields(Judgement)} - {"cuts", *values["judgement"]}
    if missing:
        raise RecordError(f"not a judged episode: {min(missing)} is missing")
    return episode


class JudgementRecorder:
    """Appends judgements to a file and removes only a torn last line of earlier processes. The folder must exist."""

    def __init__(self, path: Path) -> None:
        cut_torn_line(path)
        self._path = path

    def __call__(self, judged: JudgedEpisode) -> None:
        """Append one line; a RecordError if it holds a number that JSON cannot express."""
        try:
            append_line(self._path, json.dumps(judged_to_json(judged), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise RecordError(f"judgement of {judged.trajectory_id} cannot be written as JSON: {error}") from error


def read_judgements(path: Path) -> list[JudgedEpisode]:
    """Return the lines of a judgements.jsonl in order; none if there is no file.

    Raises:
        RecordError: a line other than a torn last one is not a judgement; names file and line.
    """
    judgements = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            judgements.append(judged_from_json(json.loads(line)))
        except (ValueError, AttributeError) as error:  # RecordError included
            raise RecordError(f"{path}:{number}: {error}") from error
    return judgements


def latest_judgements(judged: Iterable[JudgedEpisode]) -> dict[tuple[str, int], JudgedEpisode]:
    """Return the last judgement, the one that counts, by trajectory id and attempt."""
    return {(line.trajectory_id, line.attempt): line for line in judged}


Groups = Mapping[str, tuple[Trajectory, ...]]  # by the id of the group


def groups_of(episodes: Iterable[Trajectory]) -> Groups:
    """Return stored episodes by their group, the part of their ids before the last slash."""
    groups: dict[str, tuple[Trajectory, ...]] = {}
    for trajectory in episodes:
        groups[trajectory.group_id] = (*groups.get(trajectory.group_id, ()), trajectory)
    return groups


def group_with(trajectory: Trajectory, groups: Groups) -> tuple[Trajectory, ...]:
    """Return the episode's group, with this episode in the place of the stored one of its id."""
    own_id = trajectory.trajectory_id
    return tuple(trajectory if one.trajectory_id == own_id else one for one in groups[trajectory.group_id])


# The rubrics of a task; a task app may have its own for every one. Raises JudgeError if they cannot be had.
RubricsOf = Callable[[Task], Awaitable[Rubrics]]
OnJudged = Callable[[Trajectory, JudgedEpisode], None]  # of an episode that got a score, as it was before

_JUDGED = "mean over the episodes judged since the last line"
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "judge/env": f"environment's own return, before the blend's weight: {_JUDGED}",
        "judge/event": f"sum of event totals, before the blend's weight: {_JUDGED}; absent if events are not judged",
        "judge/outcome": f"outcome's total, before the blend's weight: {_JUDGED}; absent if it is not judged",
        "judge/num_judged": "episodes that got a score since the last line",
        "judge/unscored": "episodes that got no score since the last line; none of them is trained on",
        "judge/flags": "episodes since the last line in which the judge suspects manipulation",
        "judge/num_cut": "episodes judged since the last line of which the judge was not shown all, for their length",
        "judge/disagreement": f"standard deviation of the panel's totals, {_JUDGED}; absent with a single judge",
        "judge/calls": "calls of the judge since the last line, those without a score and evaluations' included",
        "judge/input_tokens": "tokens that the judge read in these calls",
        "judge/output_tokens": "tokens that the judge wrote in these calls",
        "judge/cost_usd": "US dollars of these calls, at the prices of judge.options",
        "judge/pause_seconds": "seconds since the last line in which the judge was down and nothing could be scored",
        "judge/gold_gap": "mean score of the judge minus gold's, over the episodes of the last check",
        "judge/gold_correlation": "between the judge's scores and gold's in the last check",
    }
)


@dataclass(slots=True)
class _Tally:
    """Counts since the last `drain`."""

    env_returns: list[float]
    judgements: list[Judgement]
    num_unscored: int = 0


class EpisodeScorer:
    """Gives episodes the blended reward of environment and judge.

    Args:
        rewards: replace the environment's rewards in the blend.
        may_score: raises if nothing may be scored any more.
        on_judged: receives every score.
    """

    def __init__(
        self,
        judge: Judge,
        rubrics_of: RubricsOf,
        weights: RewardBlend,
        *,
        rewards: EnvRewards = env_rewards,
        may_score: Callable[[], None] = lambda: None,
        on_judged: Sequence[OnJudged] = (),
    ) -> None:
        self._judge = judge
        self._rubrics_of = rubrics_of
        self._weights = weights
        self._rewards = rewards
        self._may_score = may_score
        self._on_judged = tuple(on_judged)
        self._tally = _Tally([], [])

    async def __call__(self, trajectory: Trajectory, group: tuple[Trajectory, ...] = ()) -> Trajectory:
        """Return the episode with blended rewards; a judge of groups compares it with its `group`.

        Raises:
            UnscoredError: the judge has no score for it.
            JudgeStoppedError: nor will it have one for any other. JudgeDriftError: its scores are not to be trusted.
        """
        self._may_score()
        if trajectory.outcome is Outcome.ACTION_LIMIT:  # it is scored, and no judge may find it worth more
            return unjudged(trajectory, self._weights, self._rewards)
        try:
            # An episode that exceeded a limit is scored by rule, so it is compared with none.
            compared = tuple(one for one in group if one.outcome is not Outcome.ACTION_LIMIT)
            result, judgement = await self._ask(trajectory, compared)
        except UnscoredError:
            self._tally.num_unscored += 1
            raise
        record = JudgedEpisode.of(trajectory, judgement, self._rewards(trajectory), self._weights, result.reward)
        self._tally.judgements.append(judgement)
        if (env_return := record.env_return) is not None:
            self._tally.env_returns.append(env_return)
        for receive in self._on_judged:
            receive(trajectory, record)
        return result

    def drain(self) -> dict[str, float]:
        """Return those of METRICS that are about scores, since the last call."""
        tally, self._tally = self._tally, _Tally([], [])
        judgements = tally.judgements
        means = {
            "judge/env": tally.env_returns,
            "judge/event": [judgement.event_total for judgement in judgements if judgement.event_reviews],
            "judge/outcome": [judgement.outcome_total for judgement in judgements if judgement.outcome_review],
            "judge/disagreement": [j.disagreement for j in judgements if j.disagreement is not None],
        }
        return {
            **{name: sum(values) / len(values) for name, values in means.items() if values},
            "judge/num_judged": float(len(judgements)),
            "judge/unscored": float(tally.num_unscored),
            "judge/flags": float(sum(bool(judgement.flags) for judgement in judgements)),
            "judge/num_cut": float(sum(bool(judgement.cuts) for judgement in judgements)),
        }

    async def _ask(self, trajectory: Trajectory, group: tuple[Trajectory, ...]) -> tuple[Trajectory, Judgement]:
        task = trajectory.task
        # Asked once: `Asking` retries a failed call or an unreadable answer within one bound, so an episode that cannot
        # be scored costs so many calls as a failing one has tries.
        try:
            rubrics = await self._rubrics_of(task)
            judgement = await self._judge.judge(JudgeRequest(trajectory, rubrics, task.env_id, group))
            return blend(trajectory, judgement, self._weights, self._rewards), judgement
        except JudgeStoppedError as error:
            is_spent = isinstance(error, JudgeBudgetError)
            advice = "raise judge.options.max_calls or max_cost_usd" if is_spent else "mend that"
            raise type(error)(f"{error}: {advice}, and go on with --resume") from error
        except JudgeError as error:
            raise UnscoredError(f"{self._judge.name}: {error}") from error
