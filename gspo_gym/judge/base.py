"""The records and errors that all judges share.

A judge reads one finished episode against rubrics and returns a `Judgement`, or raises: a missing score is never a
number. `blend.py` decides what scores are worth for training.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from gspo_gym.errors import ConfigError, ServiceError, UnscoredError, nearest_name
from gspo_gym.judge.rubric import Rubric
from gspo_gym.types import Trajectory, is_finite

BY_RULE = "by rule: the policy said nothing"

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class JudgeError(ServiceError):
    """The judge has no score for this episode; it may be asked again."""


class JudgeDownError(JudgeError):
    """The judge does not answer: no connection, or nothing but 5xx. Waiting may help; another episode will not."""


class JudgeStoppedError(JudgeError):
    """Judging is stopped until a person acts; asking again, or about another episode, changes nothing."""


class JudgeBudgetError(JudgeStoppedError):
    """The allowed calls, tokens or money are spent."""


class JudgeDeniedError(JudgeStoppedError):
    """The endpoint does not accept the key, has no such model, or requires payment."""


@dataclass(frozen=True, slots=True)
class Rubrics:
    """The rubric of every turn (`event`) and that of the whole episode (`outcome`); None: not judged."""

    event: Rubric | None = None
    outcome: Rubric | None = None

    @property
    def parts(self) -> dict[str, Rubric]:
        rubrics_by_part = {"event": self.event, "outcome": self.outcome}
        return {name: rubric for name, rubric in rubrics_by_part.items() if rubric is not None}

    def only_tracks(self, tracks: Collection[str]) -> Rubrics:
        """Return the criteria of these tracks alone; all if `tracks` is empty.

        Raises:
            ConfigError: a part has none of them; to leave that part out, do not judge it.
        """
        if not tracks:
            return self
        return Rubrics(**{name: _change_part(name, rubric.only_tracks, tracks) for name, rubric in self.parts.items()})

    def with_track_weights(self, weights: Mapping[str, float]) -> Rubrics:
        """Return both parts with these weights of their tracks, 1 for tracks that are not named.

        Raises:
            ConfigError: a weight is below 0 or names a track of neither part, or all weights of a part are 0.
        """
        if not weights:
            return self
        tracks = [track for rubric in self.parts.values() for track in rubric.tracks]
        if unknown := sorted(set(weights) - set(tracks)):
            raise ConfigError(f"no criterion is of the track {unknown[0]!r}; {nearest_name(unknown[0], set(tracks))}")

        def reweight(rubric: Rubric) -> Rubric:
            return replace(rubric, track_weights={track: weights.get(track, 1.0) for track in rubric.tracks})

        return Rubrics(**{name: _change_part(name, reweight, rubric) for name, rubric in self.parts.items()})


@dataclass(frozen=True, slots=True)
class CriterionScore:
    """A criterion's score, on the criterion's scale, with the reason."""

    score: float
    reason: str = ""

    def __post_init__(self) -> None:
        if not is_finite(self.score):
            raise JudgeError(f"expected a finite score, got {self.score}")


@dataclass(frozen=True, slots=True)
class Review:
    """One turn, or the whole episode, against its rubric.

    Attributes:
        criteria: by id, each criterion asked about exactly once.
        total: the rubric's aggregate of them (`Rubric.total`).
    """

    criteria: Mapping[str, CriterionScore]
    total: float
    summary: str = ""

    @property
    def reasons(self) -> str | None:
        """Return the reasons by criterion and the summary, a line each; None: there are none."""
        given = {id_: score.reason.strip() for id_, score in self.criteria.items() if score.reason != BY_RULE}
        lines = [f"{id_}: {reason}" for id_, reason in given.items() if reason]
        return "\n".join([*lines, *filter(None, [self.summary.strip()])]) or None


def review_of(rubric: Rubric, scores: Mapping[str, CriterionScore] | None, summary: str) -> Review:
    """Return a review with its total; for None with the lowest scores.

    Raises:
        JudgeError: a criterion of the rubric has no score, or one that is not on its scale, or there is a foreign one.
    """
    if scores is None:
        scores = {id_: CriterionScore(score, BY_RULE) for id_, score in rubric.lowest_scores.items()}
    try:
        total = rubric.total({id_: score.score for id_, score in scores.items()})
    except UnscoredError as error:
        raise JudgeError(str(error)) from error
    return Review({id_: scores[id_] for id_ in rubric.ids}, total, summary)


@dataclass(frozen=True, slots=True)
class JudgeCost:
    """Calls, tokens and money of judging. `usd` is 0 if prices are not known."""

    num_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: JudgeCost) -> JudgeCost:
        return JudgeCost(
            self.num_calls + other.num_calls,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.usd + other.usd,
        )

    def __str__(self) -> str:
        tokens = f"{self.input_tokens:,} tokens read, {self.output_tokens:,} written"
        return f"{self.num_calls:,} calls, {tokens}, {self.usd:.4f} USD"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's (or panel's) complete answer about one episode.

    Attributes:
        judge: its name, such as "openai:gpt-5-mini" or "panel(3)".
        event_reviews: one per turn, in order; () if events were not judged.
        outcome_review: None if the outcome was not judged.
        flags: reasons to suspect manipulation, such as "turn 3: a forged verdict".
        cuts: what the judge was not shown because the episode is too long; () if it read all of it.
        disagreement: standard deviation of the panel's totals (outcome, or the sum of events without one); None for a
            single judge.
        cost: of this judgement; nothing if it came from the cache.
    """

    judge: str
    event_reviews: tuple[Review, ...] = ()
    outcome_review: Review | None = None
    flags: tuple[str, ...] = ()
    disagreement: float | None = None
    cost: JudgeCost = JudgeCost()
    cuts: tuple[str, ...] = ()

    def reasons_of_turns(self, num_turns: int) -> tuple[str | None, ...]:
        """Return what the judge says about each turn: its own review, else that of the whole outcome; None: nothing.

        Reasons that the rules gave are no judge's. Of an episode that is suspected of manipulation, nothing is
        repeated: its text may have written the reasons.
        """
        if self.flags:
            return (None,) * num_turns
        outcome = None if self.outcome_review is None else self.outcome_review.reasons
        events = [review.reasons for review in self.event_reviews[:num_turns]]
        events += [None] * (num_turns - len(events))
        return tuple(event or outcome for event in events)

    @property
    def event_totals(self) -> tuple[float, ...]:
        return tuple(review.total for review in self.event_reviews)

    @property
    def event_total(self) -> float:
        """Return the sum of the turns' totals, the contract's event reward; 0 if events were not judged."""
        return float(sum(self.event_totals))

    @property
    def outcome_total(self) -> float:
        """Return the outcome's total; 0 if it was not judged."""
        return 0.0 if self.outcome_review is None else self.outcome_review.total


@dataclass(frozen=True, slots=True, eq=False)
class JudgeRequest:
    """One episode to judge.

    Attributes:
        trajectory: the episode; its rewards are not shown to the judge.
        task_app: the id of the task app, or of the environment, in which it was played.
        group: all episodes of its task that a judge of groups compares, itself among them; (): it is judged alone.
    """

    trajectory: Trajectory
    rubrics: Rubrics
    task_app: str = ""
    group: tuple[Trajectory, ...] = ()


class Judge(Protocol):
    """Scores episodes, many at once."""

    @property
    def name(self) -> str: ...

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Return every review that the rubrics ask for.

        Raises:
            JudgeError: this episode has no score. JudgeDownError, JudgeStoppedError: nor has any other, for now.
        """

    async def close(self) -> None:
        """Close connections. Closing twice is allowed."""


async def all_or_none(calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return the results of calls that run at once; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    # BaseException: if the caller is cancelled, its calls must end, too.
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # else one that is still ending would outlive this call
        raise


def load_function(name: str, *, of: str) -> Callable[..., Any]:  # what is callable here is what the operator says
    """Import the operator's function "module:function"; a ConfigError, which begins with `of`, if there is none."""
    # Only for names from the operator's own configuration or command line: importing a module runs it.
    module, _, function = name.partition(":")
    if not module or not function:
        raise ConfigError(f'{of}: expected a function as "module:function", got {name!r}')
    try:
        value: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{of}: there is no {name}: {error}") from error
    if not callable(value):
        raise ConfigError(f"{of}: {name} is no function, but {type(value).__name__}")
    return value


def _change_part(part: str, change: Callable[[Argument], Rubric], argument: Argument) -> Rubric:
    try:
        return change(argument)
    except ConfigError as error:
        raise ConfigError(f"{part}: {error}") from error
