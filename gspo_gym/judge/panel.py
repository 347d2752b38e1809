"""Judges made of others (a panel), and judges that are a function of the operator.

A function, `module:function`, plain or async, is called with one argument, the payload: what an HTTP judge is sent
(`policy_name`, `task_app`, `trace`, `options`, `rubric`; see `judge/http.py`) and `seed`, `prompt` (the
messages before the first turn), `completion` (the model's last message) and `messages`. It returns the outcome's total
as a number, or an HTTP judge's answer, in which totals may stand without scores of criteria. The payload holds no
rewards, and no reasoning.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gspo_gym.base.messages import message_to_wire
from gspo_gym.env.workers.threads import OwnThread
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
    all_or_none,
    load_function,
    review_of,
)
from gspo_gym.judge.http import Json, judgement_from_wire, request_to_wire
from gspo_gym.judge.model.transcript import read_transcript, suspicions


class PanelJudge:
    """Judge that asks all members at once; several samples of one model are members with different `sample`.

    Scores and totals are means over the members.
    """

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = tuple(judges)

    @property
    def name(self) -> str:
        """Return a name such as "panel(openai:gpt-5-mini, groq:qwen3-32b)"."""
        return f"panel({', '.join(judge.name for judge in self._judges)})"

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Return the mean of the members' judgements (`Judge.judge`).

        Raises:
            JudgeBudgetError, JudgeDeniedError, JudgeDownError: an answer is missing, and a member has such a reason.
            JudgeError: an answer is missing for another reason.
        """

        async def answer(judge: Judge) -> Judgement | JudgeError:
            try:
                return await judge.judge(request)
            except JudgeError as error:
                return error

        answers = await all_or_none([answer(judge) for judge in self._judges])
        # All must answer: a mean over other members is another measure, and equal episodes would get unequal scores.
        if errors := [answer for answer in answers if isinstance(answer, JudgeError)]:
            # A member's outage or empty budget is the panel's: another episode would fare no better.
            kinds: tuple[type[JudgeError], ...] = (JudgeBudgetError, JudgeDeniedError, JudgeDownError, JudgeError)
            kind = next(kind for kind in kinds if any(isinstance(error, kind) for error in errors))
            num_members = len(answers)
            raise kind(
                f"{num_members - len(errors)} of {num_members} judges have answered, {num_members} must: "
                + "; ".join(map(str, errors))
            )
        return self._aggregated([answer for answer in answers if isinstance(answer, Judgement)])

    async def close(self) -> None:
        for judge in self._judges:
            await judge.close()

    def _aggregated(self, judgements: Sequence[Judgement]) -> Judgement:
        numbers_of_turns = {len(judgement.event_reviews) for judgement in judgements}
        outcomes = [j.outcome_review for j in judgements if j.outcome_review is not None]
        if len(numbers_of_turns) > 1 or len(outcomes) not in (0, len(judgements)):
            raise JudgeError(f"{self.name}: the members have not judged the same turns: {sorted(numbers_of_turns)}")
        totals = [review.total for review in outcomes] or [judgement.event_total for judgement in judgements]
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
        common_ids = [id_ for id_ in reviews[0].criteria if all(id_ in review.criteria for review in reviews)]
        criteria = {}
        for id_ in common_ids:
            scores = [review.criteria[id_] for review in reviews]
            reasons = " | ".join(score.reason for score in scores)
            criteria[id_] = CriterionScore(statistics.fmean([score.score for score in scores]), reasons)
        summary = " | ".join(review.summary for review in reviews if review.summary)
        # The total is aggregated apart: it differs from the total of aggregated scores where a criterion is required.
        return Review(criteria, statistics.fmean([review.total for review in reviews]), summary)


JudgeFunction = Callable[[Json], Any]  # the payload -> a number, or a mapping of the contract; or an awaitable of one


class PythonJudge:
    """Judge that calls a function of the operator. Use it within one event loop, and close it.

    The function is not sandboxed. A plain one runs in a thread and may block; after its time it is abandoned, since
    nothing can end a thread.

    Args:
        function: "module:function", or the function itself.
    """

    def __init__(
        self,
        function: str | JudgeFunction,
        *,
        max_concurrency: int = 8,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._function = load_function(function, of="judge") if isinstance(function, str) else function
        self.name = f"python:{function if isinstance(function, str) else getattr(function, '__qualname__', 'function')}"
        self._timeout_seconds = timeout_seconds
        self._places = asyncio.Semaphore(max_concurrency)

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Score with the function (`Judge.judge`). An episode without any answer gets the lowest scores without a call.

        Raises:
            JudgeError: the function raised, took too long, or returned something else.
        """
        transcript = read_transcript(request.trajectory)
        flags = suspicions(request.trajectory)
        if all(transcript.is_empty_turn(turn) for turn in range(transcript.num_turns)):
            event, outcome = request.rubrics.event, request.rubrics.outcome
            events = (review_of(event, None, BY_RULE),) * transcript.num_turns if event else ()
            return Judgement(self.name, events, review_of(outcome, None, BY_RULE) if outcome else None, flags)
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
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            if request.rubrics.event is not None:
                raise JudgeError(f"{self.name}: gave one number, but turns are judged, too: give event_totals")
            answer = {"outcome_review": {"total": answer}}
        if not isinstance(answer, Mapping):
            raise JudgeError(f"{self.name}: expected a number or a mapping, got {answer!r:.120}")
        judgement = judgement_from_wire(dict(answer), request, request.rubrics.parts, judge=self.name)
        return replace(judgement, flags=(*judgement.flags, *flags), cost=JudgeCost())

    async def close(self) -> None:
        """Close nothing; a thread that never ends is not waited for."""

    async def _call(self, payload: Json) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(payload)
        thread = OwnThread()  # a daemon, because the function may never end
        try:
            result = await thread.call_async(lambda: self._function(payload), timeout_seconds=None)
        except asyncio.CancelledError:
            thread.abandon()
            raise
        thread.release()
        answer = result.unwrap()
        return await answer if inspect.isawaitable(answer) else answer

    def _payload(self, request: JudgeRequest) -> Json:
        messages = request.trajectory.messages
        body = request_to_wire(request, request.rubrics.parts, options={})
        by_policy = [index for index, message in enumerate(messages) if message.role == "assistant"]
        # The first of the last so many: those before it are examples in the task.
        first, last = by_policy[-len(request.trajectory.turns)], by_policy[-1]
        return {
            **body,
            "seed": request.trajectory.task.seed,
            "prompt": "\n\n".join(message.content for message in messages[:first]),
            "completion": messages[last].content,
            "messages": [message_to_wire(message) for message in messages],
        }
