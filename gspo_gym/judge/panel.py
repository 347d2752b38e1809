"""Several judges, or several samples of one, as one judge.

Scores and totals are aggregated each for itself, by mean or median: the total is the aggregate of the members' totals,
not the total of aggregated scores (they differ where a criterion is required). A member without an answer is left out
while `quorum` members have one; by default all must have, because a mean over other members is another measure, and
equal episodes would stop being equal.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import (
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
)

Aggregate = Literal["mean", "median"]

_AGGREGATES: dict[Aggregate, Callable[[list[float]], float]] = {"mean": statistics.fmean, "median": statistics.median}


class PanelJudge:
    """Asks all members at once.

    Attributes:
        num_missing: answers of members that were done without, so far.

    Args:
        judges: the members; several samples of one model are members whose `sample` differs.
        aggregate: of scores and totals.
        quorum: how many members must have an answer; None: all.

    Raises:
        ConfigError: no member, or a quorum that is no number of them.
    """

    def __init__(self, judges: Sequence[Judge], *, aggregate: Aggregate = "mean", quorum: int | None = None) -> None:
        self._judges = tuple(judges)
        self._quorum = len(self._judges) if quorum is None else quorum
        if aggregate not in _AGGREGATES:
            raise ConfigError(f"PanelJudge: expected aggregate mean or median, got {aggregate!r}")
        if not 1 <= self._quorum <= len(self._judges):
            raise ConfigError(f"PanelJudge: expected a quorum of 1 to {len(self._judges)} judges, got {self._quorum}")
        self._aggregate = _AGGREGATES[aggregate]
        self.num_missing = 0

    @property
    def name(self) -> str:
        """Such as "panel(openai:gpt-5-mini, groq:qwen3-32b)"."""
        return f"panel({', '.join(judge.name for judge in self._judges)})"

    async def judge(self, request: JudgeRequest) -> Judgement:
        """See `Judge.judge`.

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
        """Close the members."""
        for judge in self._judges:
            await judge.close()

    def _too_few(self, errors: Sequence[JudgeError]) -> JudgeError:
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
        """Of one turn or of the outcome; criteria that not all members have scored are left out, totals never."""
        shared = [id_ for id_ in reviews[0].criteria if all(id_ in review.criteria for review in reviews)]
        criteria = {
            id_: CriterionScore(
                self._aggregate([review.criteria[id_].score for review in reviews]),
                " | ".join(review.criteria[id_].reason for review in reviews),
            )
            for id_ in shared
        }
        summary = " | ".join(review.summary for review in reviews if review.summary)
        return Review(criteria, self._aggregate([review.total for review in reviews]), summary)
