"""The wire format between a trainer and an HTTP judge, in both directions, and the judge that is asked in this format.

The hosted trainer's contract (synth-ai 0.2.24 of PyPI, MIT), `POST {judge_url}/judge/v1/score`. Answers of its later
form, which calls a judge a verifier, are read as well. Reading is lenient where foreign clients or servers differ in
what they leave out; a score is never guessed. Where the rubric is at hand, an answer is checked as a judging model's
verdict is: every criterion has a score on its scale, there is no other one, and the totals are what the rubric makes of
the scores. Signs of manipulation are looked for on this side, too.

An event is one turn: what the model saw (`observation`), the tools that it called, and in `info.message` its whole
message (ours: the contract has no place for text).
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from gspo_gym.base.http import HttpClient, RefusedError
from gspo_gym.base.messages import message_to_wire
from gspo_gym.base.retries import AttemptError, Sleep
from gspo_gym.base.settings import read_key
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.judge.asking import Asking, AskingSettings, Clock, JudgeBudget, JudgementCache, digest_of
from gspo_gym.judge.base import (
    CriterionScore,
    JudgeBudgetError,
    JudgeCost,
    JudgeError,
    Judgement,
    JudgeRequest,
    Review,
    review_of,
)
from gspo_gym.judge.model.transcript import suspicions
from gspo_gym.judge.rubric import Rubric
from gspo_gym.judge.settings import JudgeOptions
from gspo_gym.types import Outcome, Trajectory, is_finite

ROUTE = "/judge/v1/score"
LATER_ROUTE = "/graphs/verifiers/completions"

Json = dict[str, Any]

# Two totals that differ by less are one: services round them, most to two decimals.
_ROUNDING, _RELATIVE_ROUNDING = 0.005 + 1e-9, 1e-6

_MAX_COST = 1e12  # tokens, calls or dollars of one answer

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # a JSON number: no text, no boolean, no infinity


class WireTaskApp(BaseModel):
    """The task app that played the episode."""

    id: str = ""


class WireTrace(BaseModel):
    """The episode, with one entry of `event_history` per turn."""

    event_history: list[Json]
    metadata: Json = Field(default={})


class WireOptions(BaseModel):
    """What to judge; further fields are ignored."""

    rubric_id: str | None = None
    event: bool = True
    outcome: bool = True
    rubric_overrides: Json | None = None
    tracks: list[str] | None = None
    weights: dict[str, Number] | None = None


class ScoreRequest(BaseModel):
    """The body of a request; `rubric` has lists of criteria under "event" and "outcome"."""

    task_app: WireTaskApp = Field(default=WireTaskApp())
    trace: WireTrace
    options: WireOptions = Field(default=WireOptions())
    rubric: Json | None = None


class WireScore(BaseModel):
    """One criterion's score, and the weight that it was given, if the judge says so."""

    score: Number
    reason: str | None = ""
    weight: Number | None = None


class WireReview(BaseModel):
    """One event's review, or the outcome's."""

    criteria: dict[str, WireScore] = Field(default={})
    total: Number | None = None
    summary: str | None = None
    event_index: int | None = None


class WireRewards(BaseModel):
    """The totals under the names of the later form."""

    event_rewards: list[Number] | None = None
    outcome_reward: Number | None = None


class ScoreResponse(WireRewards):
    """The body of an answer. The rewards and the last two fields are other clients' and the later form's names."""

    status: Literal["ok", "failed"] = "ok"
    event_reviews: list[WireReview] = Field(default=[])
    outcome_review: WireReview | None = None
    event_totals: list[Number] | None = None
    details: Json | None = Field(default={})
    metadata: Json | None = Field(default={})
    aggregate_score: Number | None = None
    reward_info: WireRewards | None = None


def explained(error: ValidationError) -> str:
    """Return the first problem with its place, such as "options.event: Input should be ..."."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the body'}: {first['msg']}"


def score_url(judge_url: str) -> str:
    """Return the scoring URL: a URL with the whole route as it is, others with the missing parts of /api and the route.

    >>> score_url("http://127.0.0.1:9000"), score_url("https://judge.example/api/")
    ('http://127.0.0.1:9000/api/judge/v1/score', 'https://judge.example/api/judge/v1/score')
    """
    url = judge_url.rstrip("/")
    if url.endswith((ROUTE, LATER_ROUTE)):
        return url
    return f"{url}{ROUTE}" if urlsplit(url).path else f"{url}/api{ROUTE}"


def request_to_wire(
    request: JudgeRequest,
    parts: Collection[str],
    *,
    options: Mapping[str, Any],
    policy_name: str = "policy",
) -> Json:
    """Return the body of a request about these parts, "event", "outcome" or both.

    `options` is JSON such as provider, model and rubric_id; with a rubric_id the rubrics are not sent.

    Raises:
        JudgeError: the episode failed or has no turn.
    """
    trajectory, rubrics = request.trajectory, request.rubrics.parts
    body: Json = {
        "policy_name": policy_name,
        "task_app": {"id": request.task_app or trajectory.task.env_id},
        "trace": {
            "event_history": _events(trajectory),
            "markov_blanket_message_history": [],
            "metadata": {"env_id": trajectory.task.env_id, "policy_id": policy_name, "length": len(trajectory.turns)},
        },
        "options": {**{part: part in parts for part in ("event", "outcome")}, **options},
    }
    if rubrics and "rubric_id" not in options:
        wire = {part: rubric.to_dict() for part, rubric in rubrics.items()}
        body["rubric"] = {part: rubric.pop("criteria") for part, rubric in wire.items()}
        body["options"]["rubric_overrides"] = wire  # the rest of it: the criteria have a field of their own
    return body


def judgement_from_wire(value: Any, request: JudgeRequest, parts: Collection[str], *, judge: str) -> Judgement:
    """Read a judge's answer about these parts, "event", "outcome" or both, with the totals in it.

    The totals of a part are the judge's if the request has no rubric for it, because the judge has one of its own, or
    if it scores no criteria.

    Raises:
        JudgeError: it failed; what was asked for is missing, of another length, or not finite; scores are not those of
            the rubric's criteria; or totals contradict these or each other.
    """
    try:
        response = ScoreResponse.model_validate(value)
    except ValidationError as error:
        raise JudgeError(f"{judge}: the answer is not of the contract: {explained(error)}") from error
    if response.status != "ok":
        raise JudgeError(f"{judge}: it could not judge this episode: {response.details!r:.200}")
    metadata, rubrics = response.metadata or {}, request.rubrics
    num_turns = len(request.trajectory.turns)
    return Judgement(
        judge=str(metadata.get("judge", judge)),
        event_reviews=_read_events(response, judge, num_turns, rubrics.event) if "event" in parts else (),
        outcome_review=_read_outcome(response, judge, rubrics.outcome) if "outcome" in parts else None,
        flags=_texts(metadata.get("flags")),
        cuts=_texts(metadata.get("cuts")),
        disagreement=_number_or_none(metadata.get("disagreement")),
        cost=_cost(metadata.get("cost")),
    )


def judgement_to_wire(judgement: Judgement, request: JudgeRequest, *, event_indices: Sequence[int]) -> Json:
    """Return the body of an answer; `event_indices` gives the request's event of each turn."""
    rubrics = request.rubrics
    metadata = asdict(replace(judgement, event_reviews=(), outcome_review=None))
    del metadata["event_reviews"], metadata["outcome_review"]
    return {
        "status": "ok",
        "event_reviews": [_review(review, rubrics.event) for review in judgement.event_reviews],
        "outcome_review": judgement.outcome_review and _review(judgement.outcome_review, rubrics.outcome),
        "event_totals": list(judgement.event_totals),
        "details": {},
        "metadata": {**metadata, "event_indices": list(event_indices)},
    }


def _events(trajectory: Trajectory) -> list[Json]:
    messages, num_turns = trajectory.messages, len(trajectory.turns)
    by_policy = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if trajectory.outcome.is_infrastructure_failure or not 0 < num_turns <= len(by_policy):
        raise JudgeError(
            f"episode {trajectory.trajectory_id} ({trajectory.outcome.value}): expected an episode that did not fail, "
            f"with a message for each of its turns, got {num_turns} turns and {len(by_policy)} messages of the model"
        )
    events: list[Json] = []
    before = 0
    # The last ones: messages of the assistant before the first turn belong to the prompt.
    for turn, index in enumerate(by_policy[-num_turns:]):
        message = message_to_wire(messages[index])
        is_last = turn == num_turns - 1
        answer = {"answer": [message_to_wire(after) for after in messages[index + 1 :]]} if is_last else {}
        events.append(
            {
                "observation": {"messages": [message_to_wire(m) for m in messages[before:index]]},
                "tool_calls": message.get("tool_calls", []),
                "reward": None,  # a judge that sees rewards repeats them
                "done": is_last,
                "truncated": is_last and trajectory.outcome != Outcome.TERMINATED,
                "info": {"turn": turn, "message": message, **answer},
            }
        )
        before = index + 1
    return events


def _read_events(response: ScoreResponse, judge: str, num_turns: int, rubric: Rubric | None) -> tuple[Review, ...]:
    # Clients differ in where they put totals: beside the reviews, under the later form's name, or in them.
    later = response.reward_info or WireRewards()
    totals_given = [totals for totals in (response.event_totals, response.event_rewards, later.event_rewards) if totals]
    # Totals alone, without reviews, are an answer of the contract, too.
    reviews = response.event_reviews or [WireReview() for _ in (totals_given[0] if totals_given else ())]
    if {len(reviews), *map(len, totals_given)} != {num_turns}:
        numbers = ", ".join(f"{len(totals)} totals" for totals in totals_given) or "no totals"
        raise JudgeError(
            f"{judge}: expected a review and a total for each of {num_turns} turns, got {len(reviews)} reviews and "
            f"{numbers}"
        )
    turn_numbers = [turn if review.event_index is None else review.event_index for turn, review in enumerate(reviews)]
    indices = (response.metadata or {}).get("event_indices") or turn_numbers
    if not indices == turn_numbers == list(range(num_turns)):
        raise JudgeError(f"{judge}: expected reviews of the events 0 to {num_turns - 1} in order, got {indices!r:.80}")
    return tuple(
        _read_review(
            f"{judge}: turn {turn + 1}", review, [*(totals[turn] for totals in totals_given), review.total], rubric
        )
        for turn, review in enumerate(reviews)
    )


def _read_outcome(response: ScoreResponse, judge: str, rubric: Rubric | None) -> Review:
    review, later = response.outcome_review or WireReview(), response.reward_info or WireRewards()
    totals_given = [review.total, response.aggregate_score, response.outcome_reward, later.outcome_reward]
    return _read_review(f"{judge}: outcome", review, totals_given, rubric)


def _read_review(where: str, review: WireReview, totals_given: Sequence[float | None], rubric: Rubric | None) -> Review:
    """Return a review with the total of the rubric, or without rubric or scores with the first of `totals_given`."""
    totals = [total for total in totals_given if total is not None]
    if not all(map(is_finite, totals)):
        raise JudgeError(f"{where}: expected finite totals, got {totals}")
    scores = {id_: CriterionScore(score.score, score.reason or "") for id_, score in review.criteria.items()}
    read_review, source = None, "the same answer says"
    if rubric is not None and scores:
        for criterion in rubric.criteria:
            weight = review.criteria[criterion.id].weight if criterion.id in review.criteria else None
            if weight is not None and not math.isclose(weight, criterion.weight):
                expectation = f"expected the weight {criterion.weight:g} of {criterion.id!r}"
                raise JudgeError(f"{where}: {expectation}, got {weight:g}")
        try:
            read_review, source = review_of(rubric, scores, review.summary or ""), "its criteria make"
        except JudgeError as error:
            raise JudgeError(f"{where}: {error}") from error
    if not totals:
        raise JudgeError(f"{where}: expected a finite total, got None")
    read_review = read_review or Review(scores, float(totals[0]), review.summary or "")
    for total in totals:
        if not math.isclose(total, read_review.total, abs_tol=_ROUNDING, rel_tol=_RELATIVE_ROUNDING):
            raise JudgeError(f"{where}: the total {total:g} contradicts the {read_review.total:g} that {source}")
    return read_review


def _review(review: Review, rubric: Rubric | None) -> Json:
    plain: Json = {"weight": 1.0, "description": ""}
    criteria = {id_: asdict(score) | plain for id_, score in review.criteria.items()}
    for criterion in rubric.criteria if rubric else ():
        if criterion.id in criteria:
            criteria[criterion.id] |= {"weight": criterion.weight, "description": criterion.description}
    return {"criteria": criteria, "total": review.total, "summary": review.summary}


def _texts(value: Any) -> tuple[str, ...]:
    # A foreign judge may write anything into its metadata.
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _cost(value: Any) -> JudgeCost:
    if not isinstance(value, Mapping):  # a foreign judge
        return JudgeCost(num_calls=1)
    # A negative cost would give back a part of the budget, and two of 1e308 are no number.
    num_calls, num_input_tokens, num_output_tokens, usd = (
        min(max(0.0, _number_or_none(value.get(name)) or 0.0), _MAX_COST)
        for name in ("num_calls", "input_tokens", "output_tokens", "usd")
    )
    return JudgeCost(int(num_calls), int(num_input_tokens), int(num_output_tokens), usd)


def _number_or_none(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
    return float(value) if is_number else None


_JUDGE_KEY = "JUDGE_API_KEY"
_READING_VERSION = 2  # of what is refused: answers that an earlier version kept may be none
_PAYMENT_REQUIRED = 402  # how our server says that its own budget is spent


class HttpJudge:
    """Scores episodes by asking the service. Use it within one event loop, and close it.

    The budget counts requests, and the tokens and money that the service reports.

    Args:
        url: of the service.
        options: `provider`, `model` and `rubric_id` are passed on; with a rubric_id the rubric itself is not sent, but
            what is laid over it is. Without `api_key_env` the key is in JUDGE_API_KEY, if anywhere.
        asking: its timeout is passed on as well.
        policy_name: of the trajectories' policy, for the service.

    Raises:
        ConfigError: the key's variable is not set. MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        options: JudgeOptions,
        *,
        asking: AskingSettings,
        policy_name: str = "policy",
        cache: JudgementCache | None = None,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if set(url) & set("?#"):
            raise ConfigError(f"services.judge_url: expected a URL without a query or a fragment, got {url!r}")
        self._options, self._policy_name = options, policy_name
        self._parts = [part for part in ("event", "outcome") if getattr(options, part)]
        self._timeout_seconds = asking.timeout_seconds
        self._url = score_url(url)
        self._cache = cache
        variable = options.api_key_env or (_JUDGE_KEY if os.environ.get(_JUDGE_KEY) else None)
        key = read_key(variable, "the judge's api_key_env")
        client = HttpClient(self._url, api_key=key, timeout_seconds=asking.timeout_seconds, has_unique_keys=True)
        self._asking = Asking(client, asking, budget=budget, clock=clock, sleep=sleep)

    @property
    def name(self) -> str:
        return self._url

    async def judge(self, request: JudgeRequest) -> Judgement:
        # All of it is sent with every call, because the judge behind the URL reads no file of ours.
        settings = self._options
        options: Json = {"provider": settings.provider, "model": settings.model, "rubric_id": settings.known_rubric}
        options["timeout_s"] = self._timeout_seconds
        if settings.known_rubric is not None or not request.rubrics.parts:
            options |= {"rubric_overrides": settings.rubric_overrides or None, "tracks": list(settings.tracks) or None}
            options |= {"weights": settings.weights or None}
        body = request_to_wire(
            request,
            self._parts,
            options={name: value for name, value in options.items() if value is not None},
            policy_name=self._policy_name,
        )
        costs: list[JudgeCost] = []

        async def ask() -> Json:
            answer, cost = await self._ask(body, request)
            costs.append(cost)
            return answer

        key = digest_of([_READING_VERSION, self._url, body])
        answer = await (ask() if self._cache is None else self._cache.get_or_ask(key, ask))
        judgement = self._read(answer, request)
        flags = tuple(dict.fromkeys([*judgement.flags, *suspicions(request.trajectory)]))
        return replace(judgement, flags=flags, cost=sum(costs, JudgeCost()))

    async def close(self) -> None:
        """Close the connections; the cache belongs to the caller."""
        await self._asking.close()

    async def _ask(self, body: Json, request: JudgeRequest) -> tuple[Json, JudgeCost]:
        def read(answer: Any) -> Any:
            try:
                self._read(answer, request)
            except JudgeError as error:
                raise AttemptError(str(error), kind="answer") from error
            return answer

        def cost_of(answer: Any) -> JudgeCost:
            try:
                return replace(self._read(answer, request).cost, num_calls=1)
            except JudgeError:
                return JudgeCost(num_calls=1)

        try:
            return await self._asking.ask(self._url, lambda _: body, read, cost_of, most=JudgeCost(num_calls=1))
        except JudgeError:
            raise
        except ServiceError as error:
            is_spent = isinstance(error, RefusedError) and error.status == _PAYMENT_REQUIRED
            raise (JudgeBudgetError if is_spent else JudgeError)(str(error)) from error

    def _read(self, answer: Any, request: JudgeRequest) -> Judgement:
        judgement, rubrics = judgement_from_wire(answer, request, self._parts, judge=self.name), request.rubrics
        totals_alone = any(not review.criteria for review in judgement.event_reviews)
        outcome = judgement.outcome_review
        if (rubrics.event and totals_alone) or (rubrics.outcome and outcome is not None and not outcome.criteria):
            raise JudgeError(
                f"{self.name}: expected a score of every criterion, got a total alone; for a judge with a rubric of "
                "its own, name that as judge.options.rubric_id, or give no rubric here"
            )
        return judgement
