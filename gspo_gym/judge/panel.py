"""Judges made of others (a panel), and judges that are a function of the operator.

A function, `module:function`, plain or async, is called with one argument, the payload: what an HTTP judge is sent
(`policy_name`, `task_app`, `trace`, `options`, `rubric`; see `judge/service/contract.py`) and `seed`, `prompt` (the
messages before the first turn), `completion` (the model's last message) and `messages`. It returns the outcome's total
as a number, or an HTTP judge's answer, in which totals may stand without scores of criteria. The payload holds no
rewards, and reasoning only on request.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import (
    BY_RULE,
    CriterionScore,
    Judge,
    JudgeBudgetError,
    JudgeCost,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Review,
    review_of,
)
from gspo_gym.judge.model.transcript import read_transcript, suspicions
from gspo_gym.judge.service.contract import Json, judgement_from_wire, request_to_wire, shown_message

Aggregate = Literal["mean", "median"]

_AGGREGATES: dict[Aggregate, Callable[[list[float]], float]] = {"mean": statistics.fmean, "median": statistics.median}


class PanelJudge:
    """Judge that asks all members at once.

    Attributes:
        num_missing: answers of members that were missing so far.

    Args:
        judges: the members; several samples of one model are members with different `sample`.
        aggregate: of scores and totals.
        quorum: how many members must have an answer; None: all.
    """

    def __init__(self, judges: Sequence[Judge], *, aggregate: Aggregate = "mean", quorum: int | None = None) -> None:
        self._judges = tuple(judges)
        # All by default: a mean over other members is another measure, and equal episodes would get unequal scores.
        self._quorum = len(self._judges) if quorum is None else quorum
        if aggregate not in _AGGREGATES:
            raise ConfigError(f"PanelJudge: expected aggregate mean or median, got {aggregate!r}")
        if not 1 <= self._quorum <= len(self._judges):
            raise ConfigError(f"PanelJudge: expected a quorum of 1 to {len(self._judges)} judges, got {self._quorum}")
        self._aggregate = _AGGREGATES[aggregate]
        self.num_missing = 0

    @property
    def name(self) -> str:
        """Return a name such as "panel(openai:gpt-5-mini, groq:qwen3-32b)"."""
        return f"panel({', '.join(judge.name for judge in self._judges)})"

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Return the aggregate of the members' judgements (`Judge.judge`).

        Raises:
            JudgeBudgetError, JudgeDeniedError, JudgeDownError: too few answers, and a member has such a reason.
            JudgeError: too few answers, for other reasons.
        """
        calls = [asyncio.ensure_future(judge.judge(request)) for judge in self._judges]
        try:
            results = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, JudgeError):
                raise result
        judgements = [result for result in results if isinstance(result, Judgement)]
        missing = [result for result in results if isinstance(result, JudgeError)]
        if len(judgements) < self._quorum:
            raise self._too_few(missing)
        self.num_missing += len(missing)
        return self._aggregated(judgements)

    async def close(self) -> None:
        for judge in self._judges:
            await judge.close()

    def _too_few(self, errors: Sequence[JudgeError]) -> JudgeError:
        # A member's outage or empty budget is the panel's: another episode would fare no better.
        kinds: tuple[type[JudgeError], ...] = (JudgeBudgetError, JudgeDeniedError, JudgeDownError)
        kind = next((kind for kind in kinds if any(isinstance(error, kind) for error in errors)), JudgeError)
        num_answers = len(self._judges) - len(errors)
        return kind(
            f"{num_answers} of {len(self._judges)} judges have answered, {self._quorum} must: "
            + "; ".join(map(str, errors))
        )

    def _aggregated(self, judgements: Sequence[Judgement]) -> Judgement:
        numbers_of_turns = {len(judgement.event_reviews) for judgement in judgements}
        if len(numbers_of_turns) > 1 or len({j.outcome_review is None for j in judgements}) > 1:
            raise JudgeError(f"{self.name}: the members have not judged the same turns: {sorted(numbers_of_turns)}")
        outcomes = [j.outcome_review for j in judgements if j.outcome_review is not None]
        totals = [j.event_total if j.outcome_review is None else j.outcome_review.total for j in judgements]
        by_turn = zip(*(judgement.event_reviews for judgement in judgements), strict=True)
        return Judgement(
            judge=self.name,
            event_reviews=tuple(self._review(reviews) for reviews in by_turn),
            outcome_review=self._review(outcomes) if outcomes else None,
            flags=tuple(dict.fromkeys(flag for judgement in judgements for flag in judgement.flags)),
            cuts=tuple(dict.fromkeys(cut for judgement in judgements for cut in judgement.cuts)),
            disagreement=statistics.pstdev(totals),
            cost=sum((judgement.cost for judgement in judgements), JudgeCost()),
        )

    def _review(self, reviews: Sequence[Review]) -> Review:
        """Aggregate reviews of one turn or of the outcome; criteria that a member left out are dropped, totals not."""
        shared = [id_ for id_ in reviews[0].criteria if all(id_ in review.criteria for review in reviews)]
        criteria = {
            id_: CriterionScore(
                self._aggregate([review.criteria[id_].score for review in reviews]),
                " | ".join(review.criteria[id_].reason for review in reviews),
            )
            for id_ in shared
        }
        summary = " | ".join(review.summary for review in reviews if review.summary)
        # The total is aggregated apart: it differs from the total of aggregated scores where a criterion is required.
        return Review(criteria, self._aggregate([review.total for review in reviews]), summary)


JudgeFunction = Callable[[Json], Any]  # the payload -> a number, or a mapping of the contract; or an awaitable of one


class PythonJudge:
    """Judge that calls a function of the operator. Use it within one event loop, and close it.

    The function is not sandboxed. A plain one runs in a thread and may block; after its time it is abandoned, since
    nothing can end a thread.

    Args:
        function: "module:function", or the function itself.
        options: further keyword arguments of the function.
        show_reasoning: whether the payload holds the policy's reasoning.
    """

    def __init__(
        self,
        function: str | JudgeFunction,
        *,
        options: Mapping[str, Any] | None = None,
        max_concurrency: int = 8,
        timeout_seconds: float = 60.0,
        show_reasoning: bool = False,
    ) -> None:
        self._function = load_function(function) if isinstance(function, str) else function
        self.name = f"python:{function if isinstance(function, str) else getattr(function, '__qualname__', 'function')}"
        self._options = dict(options or {})
        self._timeout_seconds = timeout_seconds
        self._show_reasoning = show_reasoning
        self._places = asyncio.Semaphore(max_concurrency)

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Score with the function (`Judge.judge`). An episode without any answer gets the lowest scores without a call.

        Raises:
            JudgeError: the function raised, took too long, or returned something else.
        """
        whole = read_transcript(request.trajectory, show_reasoning=self._show_reasoning)
        if all(whole.is_empty_turn(turn) for turn in range(whole.num_turns)):
            return self._lowest(request, whole.num_turns)
        payload = self._payload(request)
        try:
            async with self._places, asyncio.timeout(self._timeout_seconds):
                answer = await self._call(payload)
        except TimeoutError as error:
            raise JudgeError(f"{self.name}: no answer within {self._timeout_seconds:g} seconds") from error
        except JudgeError:
            raise
        except (Exception, SystemExit) as error:  # it is a stranger's function
            raise JudgeError(f"{self.name}: {type(error).__name__}: {error}") from error
        judgement = self._read(answer, request)
        return replace(judgement, flags=(*judgement.flags, *suspicions(request.trajectory)), cost=JudgeCost())

    async def close(self) -> None:
        """Close nothing; a thread that never ends is not waited for."""

    async def _call(self, payload: Json) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(payload, **self._options)
        thread = OwnThread()  # a daemon, because the function may never end
        try:
            returned = await thread.call_async(lambda: self._function(payload, **self._options), timeout_seconds=None)
        except asyncio.CancelledError:
            thread.abandon()
            raise
        thread.release()
        answer = returned.unwrap()
        return await answer if inspect.isawaitable(answer) else answer

    def _payload(self, request: JudgeRequest) -> Json:
        rubrics, messages = request.rubrics, request.trajectory.messages
        body = request_to_wire(
            request,
            options={},
            event=rubrics.event is not None,
            outcome=rubrics.outcome is not None,
            show_reasoning=self._show_reasoning,
        )
        said = [index for index, message in enumerate(messages) if message.role == "assistant"]
        # The first of the last so many: those before it are examples in the task.
        first, last = said[-len(request.trajectory.turns)], said[-1]
        return {
            **body,
            "seed": request.trajectory.task.seed,
            "prompt": "\n\n".join(message.content for message in messages[:first]),
            "completion": messages[last].content,
            "messages": [shown_message(message, show_reasoning=self._show_reasoning) for message in messages],
        }

    def _read(self, answer: Any, request: JudgeRequest) -> Judgement:
        rubrics = request.rubrics
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            if rubrics.event is not None:
                raise JudgeError(f"{self.name}: gave one number, but turns are judged, too: give event_totals")
            answer = {"outcome_review": {"total": answer}}
        if not isinstance(answer, Mapping):
            raise JudgeError(f"{self.name}: expected a number or a mapping, got {answer!r:.120}")
        return judgement_from_wire(
            dict(answer),
            judge=self.name,
            num_turns=len(request.trajectory.turns),
            event=rubrics.event is not None,
            outcome=rubrics.outcome is not None,
            rubrics=rubrics,
        )

    def _lowest(self, request: JudgeRequest, num_turns: int) -> Judgement:
        event, outcome = request.rubrics.event, request.rubrics.outcome

        return Judgement(
            judge=self.name,
            event_reviews=tuple(review_of(event, None, BY_RULE) for _ in range(num_turns)) if event else (),
            outcome_review=None if outcome is None else review_of(outcome, None, BY_RULE),
            flags=suspicions(request.trajectory),
        )


def load_function(name: str) -> JudgeFunction:
    """Import the function "module:function"; a ConfigError if there is none."""
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ConfigError(f'judge: expected a function as "module:function", got {name!r}')
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"judge: there is no {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"judge: {name} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]  # what is callable here is what the operator says
