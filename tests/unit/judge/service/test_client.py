"""The HTTP judge's client: what it sends, which answers it believes, and what failures mean."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fastapi
import pytest
from fastapi.responses import JSONResponse, RedirectResponse
from judged_episodes import BOTH, EVENT, episode, request

from gspo_gym.base.retries import RetrySettings
from gspo_gym.errors import ConfigError
from gspo_gym.judge.asking import AskingSettings, BudgetLimits, JudgeBudget, JudgementCache
from gspo_gym.judge.base import (
    JudgeBudgetError,
    JudgeCost,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Rubrics,
)
from gspo_gym.judge.http import HttpJudge, judgement_from_wire, score_url
from gspo_gym.judge.settings import JudgeOptions
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message, ToolCall

Json = dict[str, Any]


def turn_review(bird: float, marks: float, total: float) -> Json:
    criteria = {"progress.bird": {"score": bird, "reason": "new", "weight": 3.0, "description": "d"}}
    return {"criteria": {**criteria, "progress.marks": {"score": marks, "reason": ""}}, "total": total}


# As the hosted trainer's service answers, for two turns by `BOTH`: (3 * 1 + 1 * 0) / 4 and (3 * 0 + 1 * 1) / 4.
ANSWER: Json = {
    "status": "ok",
    "event_reviews": [turn_review(1.0, 0, 0.75), turn_review(0, 1, 0.25)],
    "outcome_review": {"criteria": {"outcome.names": {"score": 0.5, "reason": ""}}, "total": 0.5, "summary": None},
    "event_totals": [0.75, 0.25],
    "details": {"provider_latency_ms": 3},
    "metadata": {},
}  # fmt: skip


class Service:
    """A judge that answers what it is told to and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Any = copy.deepcopy(ANSWER)
        self.status = 200
        self.seen: list[tuple[str, Mapping[str, str], Json]] = []
        self.app = fastapi.FastAPI()

        @self.app.post("/{path:path}")
        async def score(path: str, http: fastapi.Request) -> Any:
            self.seen.append((f"/{path}", dict(http.headers), await http.json()))
            if self.status == 307:
                return RedirectResponse("/elsewhere")
            return JSONResponse(self.answer, self.status)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def url(service: Service) -> Iterator[str]:
    with BackgroundServer(service.app) as server:
        yield server.url


def judge(
    url: str,
    asked: JudgeRequest | None = None,
    *,
    budget: JudgeBudget | None = None,
    cache: JudgementCache | None = None,
    **changes: Any,
) -> Judgement:
    retries = RetrySettings(max_attempts=2, first_delay_seconds=0.0, max_delay_seconds=0.0)
    asking = AskingSettings(retries=retries, timeout_seconds=30.0, failures_to_open=2)

    async def play() -> Judgement:
        sent = asked or request("a heron", "dot")
        parts = {"event": sent.rubrics.event is not None, "outcome": sent.rubrics.outcome is not None}
        options = JudgeOptions(**{**parts, **changes})
        client = HttpJudge(url, options, asking=asking, budget=budget, cache=cache)
        try:
            return await client.judge(sent)
        finally:
            await client.close()

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:1", "http://h:1/api/judge/v1/score"),
        ("http://h:1/", "http://h:1/api/judge/v1/score"),
        ("https://h/api", "https://h/api/judge/v1/score"),
        ("https://h/api/", "https://h/api/judge/v1/score"),
        ("https://h/deep/base", "https://h/deep/base/judge/v1/score"),
        ("https://h/judge/v1/score", "https://h/judge/v1/score"),
        ("https://h/api/graphs/verifiers/completions", "https://h/api/graphs/verifiers/completions"),
    ],
)
def test_urls_are_joined_by_one_rule(given: str, asked: str) -> None:
    assert score_url(given) == asked


def test_the_request_is_the_contracts_without_rewards_and_reasoning(
    url: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "k-1")
    call = Message("assistant", "I look.", (ToolCall("c1", "look", {"at": 1}),), reasoning_content="secret plan")
    asked = JudgeRequest(episode(call, "heron"), BOTH, task_app="shop")
    judge(url, asked, api_key_env="JUDGE_KEY", provider="groq", model="big")
    ((path, headers, body),) = service.seen
    assert path == "/api/judge/v1/score"
    assert headers["authorization"] == "Bearer k-1"
    assert (body["policy_name"], body["task_app"]) == ("policy", {"id": "shop"})
    first, last = body["trace"]["event_history"]
    wire_call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    assert first == {
        "observation": {
            "messages": [{"role": "system", "content": "You name things."}, {"role": "user", "content": "Name them."}]
        },
        "tool_calls": [wire_call],
        "reward": None,
        "done": False,
        "truncated": False,
        "info": {"turn": 0, "message": {"role": "assistant", "content": "I look.", "tool_calls": [wire_call]}},
    }
    assert last["observation"] == {"messages": [{"role": "user", "content": "go on"}]}
    assert (last["done"], last["truncated"]) == (True, False)
    assert last["info"]["answer"] == [{"role": "user", "content": "go on"}]
    assert body["trace"]["metadata"] == {"env_id": "Naming-v0", "policy_id": "policy", "length": 2}
    options = body["options"]
    assert (options["provider"], options["model"], options["timeout_s"]) == ("groq", "big", 30)
    assert (options["event"], options["outcome"]) == (True, True)
    assert body["rubric"]["event"][0] == {
        "id": "progress.bird",
        "description": 'The policy says "heron".',
        "weight": 3.0,
        "scale": "binary",
    }
    assert options["rubric_overrides"]["event"]["goal_text"] == EVENT.goal_text
    text = json.dumps(body)
    assert "secret plan" not in text
    assert "0.125" not in text


def test_a_rubric_that_the_service_knows_is_named_and_not_sent(url: str, service: Service) -> None:
    asked = JudgeRequest(episode("heron", "dot"), Rubrics())
    judged = judge(url, asked, rubric_id="crafter/bundle@v1", event=True, outcome=False)
    body = service.seen[0][2]
    assert body["options"]["rubric_id"] == "crafter/bundle@v1"
    assert (body["options"]["event"], body["options"]["outcome"]) == (True, False)
    assert "rubric" not in body
    assert (judged.event_total, judged.outcome_review) == (0.75 + 0.25, None)


def test_reviews_are_read_with_the_totals_that_the_rubric_makes_of_the_scores(url: str, service: Service) -> None:
    # A service may round its totals: 0.5 to 0.504 is one number, and the rubric's is taken.
    service.answer["outcome_review"]["total"] = 0.504
    judged = judge(url)
    assert judged.judge == f"{url}/api/judge/v1/score"
    assert judged.event_totals == (0.75, 0.25)
    assert judged.outcome_total == 0.5
    assert judged.event_reviews[0].criteria["progress.bird"].score == 1.0
    assert judged.event_reviews[0].criteria["progress.bird"].reason == "new"
    assert judged.cost == JudgeCost(num_calls=1)


def changed(**fields: Any) -> Json:
    answer = {**copy.deepcopy(ANSWER), **fields}
    return {key: value for key, value in answer.items() if value is not ...}


@pytest.mark.parametrize(
    ("answer", "event_totals", "outcome"),
    [
        (changed(outcome_review=None, aggregate_score=0.625), (0.75, 0.25), 0.625),
        (changed(event_totals=..., outcome_review=..., outcome_reward=0.5), (0.75, 0.25), 0.5),
        (changed(event_reviews=..., event_totals=..., event_rewards=[1, 2]), (1.0, 2.0), 0.5),
        (changed(outcome_review=None, reward_info={"outcome_reward": 0.375}), (0.75, 0.25), 0.375),
        (changed(outcome_review={"criteria": {"its.own": {"score": 7}}, "total": 7}), (0.75, 0.25), 7.0),
    ],
)
def test_later_forms_of_the_answer_are_read_from_a_judge_with_a_rubric_of_its_own(
    url: str, service: Service, answer: Json, event_totals: tuple[float, ...], outcome: float
) -> None:
    service.answer = answer
    asked = JudgeRequest(episode("heron", "dot"), Rubrics())
    judged = judge(url, asked, rubric_id="crafter/bundle@v1", event=True, outcome=True)
    assert (judged.event_totals, judged.outcome_total) == (event_totals, outcome)


def of_turn(review: Json, *, total: float | None = None) -> Json:
    """The answer with another review of the first turn."""
    totals = [review["total"] if total is None else total, 0.25]
    return changed(event_reviews=[review, turn_review(0, 1, 0.25)], event_totals=totals)


def without(name: str) -> Json:
    review = turn_review(1, 0, 0.75)
    return of_turn(review | {"criteria": {key: value for key, value in review["criteria"].items() if key != name}})


def of_outcome(total: float, **criteria: float) -> Json:
    scores = {name.replace("_", "."): {"score": score} for name, score in criteria.items()}
    return changed(outcome_review={"criteria": scores, "total": total})


def weighing(weight: float) -> Json:
    criteria = {"outcome.names": {"score": 0.5, "weight": weight}}
    return changed(outcome_review={"criteria": criteria, "total": 0.5})


# Of what the rubrics say: a binary bird of weight 3 and a count of marks of weight 1; a bounded outcome.
ALTERED: dict[str, tuple[Json, str]] = {
    "an outcome of 1000": (of_outcome(1000.0, outcome_names=0.5), "contradicts the 0.5 that its criteria make"),
    "an outcome of 1e308": (of_outcome(1e308, outcome_names=0.5), "contradicts"),
    "an outcome below 0": (of_outcome(-0.5, outcome_names=0.5), "contradicts"),
    "an outcome a little off": (of_outcome(0.51, outcome_names=0.5), "contradicts"),
    "a turn of 1000": (of_turn(turn_review(1, 0, 1000.0)), "turn 1: the total 1000 contradicts the 0.75"),
    "a turn of 1e308": (of_turn(turn_review(1, 0, 1e308)), "contradicts"),
    "totals of turns beside others in the reviews": (changed(event_totals=[0.25, 0.75]), "contradicts"),
    "totals of turns under two names": (changed(event_rewards=[0.75, 0.5]), "turn 2: the total 0.5 contradicts"),
    "reviews' totals beside others": (of_turn(turn_review(1, 0, 0.0), total=0.75), "contradicts"),
    "an aggregate beside another outcome": (changed(aggregate_score=0.1), "outcome: the total 0.1 contradicts"),
    "an outcome's reward beside another outcome": (changed(outcome_reward=1.0), "contradicts"),
    "a later reward beside another outcome": (changed(reward_info={"outcome_reward": 1}), "contradicts"),
    "later rewards of turns beside others": (
        changed(reward_info={"event_rewards": [0.75, 0.5]}), "turn 2: the total 0.5 contradicts"),
    "a later reward as text": (changed(reward_info={"outcome_reward": "0.5"}), "not of the contract: reward_info"),
    "a later reward of true": (changed(reward_info={"outcome_reward": True}), "not of the contract: reward_info"),
    "turns in another order": (changed(metadata={"event_indices": [1, 0]}), "events 0 to 1 in order"),
    "turns of another episode": (changed(metadata={"event_indices": [5, 9]}), "events 0 to 1 in order"),
    "reviews that number themselves otherwise": (
        changed(event_reviews=[turn_review(1, 0, 0.75) | {"event_index": 1}, turn_review(0, 1, 0.25)]), "in order"),
    "another weight": (weighing(2.0), "outcome: expected the weight 1 of 'outcome.names', got 2"),
    "a foreign criterion": (of_outcome(0.5, outcome_names=0.5, quality=1), "'quality' is the id of no criterion"),
    "foreign criteria alone": (of_outcome(1.0, quality=1), "'outcome.names' has no score"),
    "a missing criterion of weight": (without("progress.bird"), "turn 1: criterion 'progress.bird' has no score"),
    "a missing criterion of no worth": (without("progress.marks"), "'progress.marks' has no score"),
    "a renamed criterion": (of_outcome(0.5, Outcome_Names=0.5), "has no score"),
    "no criteria of a turn": (of_turn({"criteria": {}, "total": 0.75}), "every criterion, got a total alone"),
    "no criteria of the outcome": (of_outcome(0.5), "every criterion, got a total alone"),
    "totals alone": (changed(event_reviews=..., outcome_review=..., aggregate_score=0.5), "got a total alone"),
    "a binary score of a half": (of_turn(turn_review(0.5, 0, 0.375)), r"\(binary\): expected 0 or 1, got 0.5"),
    "a bounded score of 2": (of_outcome(2.0, outcome_names=2.0), "expected 0 to 1, got 2.0"),
    "a count below 0": (of_turn(turn_review(1, -3, 0.0)), "a whole number from 0 to 1,000,000, got -3"),
    "a count of a half": (of_turn(turn_review(0, 0.5, 0.125)), "a whole number"),
    "a count above a judging model's": (of_turn(turn_review(0, 4e6, 1e6)), "from 0 to 1,000,000, got 4000000"),
    "a count of 1e308": (of_turn(turn_review(0, 1e308, 2.5e307)), "from 0 to 1,000,000"),
    "another episode's turns": (changed(event_reviews=ANSWER["event_reviews"] * 2), "got 4 reviews and 2 totals"),
}  # fmt: skip


@pytest.mark.parametrize("altered", ALTERED)
def test_where_the_rubric_is_known_an_altered_answer_is_an_error_and_no_number(
    url: str, service: Service, altered: str
) -> None:
    service.answer, message = ALTERED[altered]
    with pytest.raises(JudgeError, match=message) as raised:
        judge(url)
    assert type(raised.value) is JudgeError
    assert len(service.seen) == 2  # it was asked again


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (changed(status="failed", details={"error": "model overloaded"}), "could not judge this episode"),
        (changed(event_totals=[0.75]), "for each of 2 turns, got 2 reviews and 1 totals"),
        (changed(event_reviews=[], event_totals=[]), "for each of 2 turns, got 0"),
        (changed(outcome_review=None), "expected a finite total, got None"),
        (changed(outcome_review={"criteria": {"outcome.names": {"score": 0.5}}}), "expected a finite total, got None"),
        (
            changed(outcome_review={"criteria": {"outcome.names": {"score": "0.5"}}, "total": 1}),
            "not of the contract: outcome_review",
        ),
        (changed(outcome_review={"total": "1"}), "not of the contract"),
        (changed(event_totals=["0.9", 0.25]), "not of the contract: event_totals.0"),
        (changed(event_totals=[True, 0.25]), "not of the contract: event_totals.0"),
        (changed(status="done"), "not of the contract: status"),
        ({}, "for each of 2 turns"),
    ],
)
def test_an_answer_that_is_not_complete_is_an_error_and_no_number(
    url: str, service: Service, answer: Json, message: str
) -> None:
    service.answer = answer
    with pytest.raises(JudgeError, match=message) as raised:
        judge(url)
    assert type(raised.value) is JudgeError
    assert len(service.seen) == 2  # it was asked again


def test_numbers_that_json_has_no_name_for_are_no_scores() -> None:
    asked = JudgeRequest(episode("heron", "dot"), Rubrics())
    for wrong in (math.nan, math.inf):
        for answer in (changed(event_totals=[wrong, 0.0]), changed(outcome_review={"total": wrong})):
            with pytest.raises(JudgeError):
                judgement_from_wire(answer, asked, ("event", "outcome"), judge="j")


@pytest.mark.parametrize(
    ("status", "kind", "num_asked"),
    [
        (400, JudgeError, 1), (401, JudgeDeniedError, 1), (403, JudgeError, 1), (404, JudgeError, 1),
        (422, JudgeError, 1), (307, JudgeError, 1), (402, JudgeBudgetError, 1), (429, JudgeError, 2),
        (500, JudgeDownError, 2), (503, JudgeDownError, 2),
    ],
)  # fmt: skip
def test_what_will_not_get_better_is_not_asked_again_and_what_is_down_says_so(
    url: str, service: Service, status: int, kind: type, num_asked: int
) -> None:
    service.status = status
    with pytest.raises(JudgeError) as raised:
        judge(url)
    assert type(raised.value) is kind
    assert len(service.seen) == num_asked


def test_nobody_there_is_down() -> None:
    with pytest.raises(JudgeDownError, match="connection failed"):
        judge("http://127.0.0.1:9")


def test_failed_episodes_are_not_sent(url: str, service: Service) -> None:
    with pytest.raises(JudgeError, match="did not fail"):
        judge(url, JudgeRequest(episode(), BOTH))
    assert service.seen == []


def test_answers_are_kept_requests_are_limited_and_flags_are_added(tmp_path: Path, url: str, service: Service) -> None:
    service.answer["metadata"] = {
        "judge": "openai:x",
        "flags": ["turn 1: padding"],
        "cost": {"input_tokens": 7, "usd": 0.5},
    }
    budget = JudgeBudget(BudgetLimits(max_calls=1))
    asked = request("heron <|im_end|>", "dot")
    first = judge(url, asked, cache=JudgementCache(tmp_path), budget=budget)
    again = judge(url, asked, cache=JudgementCache(tmp_path), budget=budget)
    assert first.flags == again.flags == ("turn 1: padding", "turn 1: a control token")
    assert (first.cost, again.cost) == (JudgeCost(1, 7, 0, 0.5), JudgeCost())
    assert len(service.seen) == 1
    with pytest.raises(JudgeBudgetError):
        judge(url, cache=JudgementCache(tmp_path), budget=budget)


def test_a_query_in_the_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a query"):
        HttpJudge("http://host/api?key=1", JudgeOptions(), asking=AskingSettings())
