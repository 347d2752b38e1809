"""Thousands of judgements over real HTTP while three requests in ten go wrong: what is scored is scored rightly, what
is not is an error and never a number, and no limit is passed by more than one call. One judge scores episodes by a
rubric, one compares those of a group.

The judging model follows the fake judge's rule, so every right score is known beforehand. Beside the faults of HTTP
(5xx, 429, timeouts, resets, half a body) it refuses, breaks its verdicts off, and answers to another call. Nothing
waits between retries here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from faulty_server import FaultPlan, FaultyServer, mixed
from judged_episodes import BOTH, OUTCOME, episode, model_settings

from gspo_gym.base.retries import RetrySettings
from gspo_gym.judge.asking import AskingSettings, BudgetLimits, JudgeBudget
from gspo_gym.judge.base import (
    JudgeBudgetError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
    Rubrics,
)
from gspo_gym.judge.model.judge import ModelJudge
from gspo_gym.judge.server import completion, honest_verdict, read_prompt

CONCURRENCY = 16
RETRIES = RetrySettings(max_attempts=4, budget_fraction=0.6, budget_reserve=64)
PRICES = {"usd_per_million_tokens": (2.0, 8.0)}

Json = dict[str, Any]


class FaultyJudge(FaultyServer):
    """Answers as the fake judge does; `spoils` is the share of complete answers that are no verdict, in four ways.

    `tokens` are those read and written for every answer that was made, whether or not it arrived.
    """

    def __init__(self, plan: FaultPlan, *, spoils: float = 0.0) -> None:
        super().__init__(plan)
        self.spoils = spoils
        self.num_spoilt: Counter[str] = Counter()
        self.tokens = [0, 0]

    def _respond(self, method: str, path: str, body: Json) -> tuple[int, Json]:
        answer = completion(honest_verdict(read_prompt(body["messages"])), body["messages"])
        draw = np.random.default_rng([17, len(self.seen)])
        if draw.random() < self.spoils:
            self._break(answer, str(draw.choice(["refusal", "half", "length", "stale"])))
        self.tokens[0] += answer["usage"]["prompt_tokens"]
        self.tokens[1] += answer["usage"]["completion_tokens"]
        return 200, answer

    def _break(self, answer: Json, how: str) -> None:
        self.num_spoilt[how] += 1
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if how == "refusal":
            choice["message"] |= {"content": None, "refusal": "I cannot judge this."}
        elif how == "length":
            choice |= {"finish_reason": "length"}
        else:
            choice["message"]["content"] = (
                text[: len(text) // 2] if how == "half" else text.replace("verdict_", "verdict_0")
            )


@dataclass
class Run:
    answers: list[Judgement | JudgeError]
    budget: JudgeBudget
    most_under_way: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def judged(self) -> dict[int, Judgement]:
        return {number: answer for number, answer in enumerate(self.answers) if isinstance(answer, Judgement)}


def said(number: int) -> str:
    """An answer, different in each episode, of one of four worths."""
    return f"{number}: " + ("a heron" if number % 2 else "a bird") + (", cobalt" if number % 4 < 2 else "")


def expected(number: int) -> tuple[float, float]:
    """Event total and outcome: 3 * 1 / 4 for heron (no dots), and half for each of the two words."""
    has_heron, has_cobalt = number % 2 == 1, number % 4 < 2
    return 0.75 * has_heron, 0.5 * has_heron + 0.5 * has_cobalt


async def judge_many(
    server: FaultyServer,
    num_episodes: int,
    limits: BudgetLimits,
    *,
    timeout_seconds: float,
    group_size: int = 1,
    retries: RetrySettings = RETRIES,
) -> Run:
    budget = JudgeBudget(limits)
    asking = AskingSettings(
        max_concurrency=CONCURRENCY, timeout_seconds=timeout_seconds, retries=retries, failures_to_open=50
    )
    mode = "auto" if group_size == 1 else "group"
    settings = model_settings(
        "stub", base_url=server.base_url, mode=mode, max_output_tokens=400, asking=asking, **PRICES
    )
    episodes = [episode(said(number), trajectory_id=str(number)) for number in range(num_episodes)]
    groups = [tuple(episodes[first : first + group_size]) for first in range(0, num_episodes, group_size)]

    async def no_sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    judge = ModelJudge(settings, budget=budget, sleep=no_sleep)

    async def ask(number: int) -> Judgement | JudgeError:
        request = JudgeRequest(episodes[number], BOTH)
        if group_size > 1:
            request = JudgeRequest(episodes[number], Rubrics(outcome=OUTCOME), group=groups[number // group_size])
        try:
            return await judge.judge(request)
        except JudgeError as error:
            return error

    answers = await asyncio.gather(*(ask(number) for number in range(num_episodes)))
    counters = judge._model._asking._retries.counters
    await judge.close()
    assert counters.num_attempts == counters.num_calls + counters.num_retries
    return Run(list(answers), budget, failures=counters.failures)


def check_scores(run: Run) -> None:
    for number, judgement in run.judged.items():
        event_total, outcome_total = expected(number)
        assert judgement.outcome_total == outcome_total, number
        if judgement.event_reviews:  # a group is compared by its outcomes alone
            assert judgement.event_total == event_total, number
            assert set(judgement.event_reviews[0].criteria) == {"progress.bird", "progress.marks"}


@pytest.mark.parametrize(
    ("num_episodes", "group_size"), [(300, 1), (600, 2), pytest.param(2_000, 1, marks=pytest.mark.slow)]
)
def test_of_many_judgements_with_faults_none_is_wrong_and_the_unscored_say_so(
    num_episodes: int, group_size: int
) -> None:
    # A quarter of the requests fails over HTTP, and of the rest 7% is no verdict: together 30%.
    with FaultyJudge(mixed(0.25, seed=3, hanging_weight=0.02), spoils=0.07) as server:
        asking = judge_many(server, num_episodes, BudgetLimits(), timeout_seconds=3.0, group_size=group_size)
        run = asyncio.run(asking)
        num_faults = sum(server.faults.values()) + sum(server.num_spoilt.values())
        num_requests = server._num_completions
    judged = run.judged
    print(
        f"\n{num_requests} requests, {num_faults / num_requests:.0%} of them bad: {dict(server.faults)}, "
        f"{dict(server.num_spoilt)}; {len(judged)} of {num_episodes} scored, failures seen {dict(run.failures)}"
    )
    assert 0.25 < num_faults / num_requests < 0.35
    assert set(server.num_spoilt) == {"refusal", "half", "length", "stale"}
    assert len(judged) + sum(isinstance(answer, JudgeError) for answer in run.answers) == num_episodes
    # Four attempts fail together with 0.3**4 = 0.8%: 16 of 2,000, and hardly more than 40; of 300 perhaps none.
    assert 0.98 * num_episodes <= len(judged) < num_episodes + (num_episodes < 2_000)
    check_scores(run)
    num_scored = Counter(number // group_size for number in judged)
    assert set(num_scored.values()) == {group_size}  # of a group all are scored, or none


LIMITS: dict[str, tuple[BudgetLimits, Callable[[FaultyJudge], tuple[float, float]]]] = {
    # What the server has done, and how much one call can add to it at most.
    "calls": (BudgetLimits(max_calls=300), lambda server: (server._num_completions, 0)),
    "money": (BudgetLimits(max_usd=0.5), lambda server: ((server.tokens[0] * 2 + server.tokens[1] * 8) / 1e6, 0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("limit", LIMITS)
def test_spending_stays_within_its_limit_and_one_call_under_faults(limit: str, group_size: int) -> None:
    limits, spent_by = LIMITS[limit]
    with FaultyJudge(mixed(0.25, seed=4, hanging_weight=0.02), spoils=0.07) as server:
        run = asyncio.run(judge_many(server, 600 * group_size, limits, timeout_seconds=3.0, group_size=group_size))
        spent, most = spent_by(server)
    cap = limits.max_calls or limits.max_usd or 0
    print(f"\n{limit}: the server has spent {spent:g} of {cap:g}; {len(run.judged)} scored, booked {run.budget.spent}")
    assert 0.3 * cap < spent <= cap + most
    assert any(isinstance(answer, JudgeBudgetError) for answer in run.answers)
    assert 50 < len(run.judged) < 600 * group_size
    check_scores(run)


def test_a_judge_that_is_gone_is_down_at_once_for_everybody_and_scores_again_when_it_is_back() -> None:
    now = [0.0]

    async def play(server: FaultyJudge) -> None:
        asking = AskingSettings(
            max_concurrency=4, timeout_seconds=5.0, retries=RetrySettings(max_attempts=4), failures_to_open=6,
            cool_down_seconds=15.0,
        )  # fmt: skip
        settings = model_settings("stub", base_url=server.base_url, asking=asking)

        async def no_sleep(seconds: float) -> None:
            await asyncio.sleep(0)

        budget = JudgeBudget()
        judge = ModelJudge(settings, budget=budget, sleep=no_sleep, clock=lambda: now[0])

        async def outcomes(first: int, count: int) -> Counter[str]:
            requests = [JudgeRequest(episode(said(n)), BOTH) for n in range(first, first + count)]
            answers = await asyncio.gather(*(judge.judge(r) for r in requests), return_exceptions=True)
            return Counter(type(answer).__name__ for answer in answers)

        server.plan = FaultPlan({"502": 1.0})
        assert await outcomes(0, 20) == {"JudgeDownError": 20}
        num_asked = server._num_completions
        # 6 failures in a row open the circuit; 4 at once may have been under way, the 6th among them: no more than 10.
        assert 6 <= num_asked <= 10
        assert await outcomes(20, 20) == {"JudgeDownError": 20}
        assert server._num_completions == num_asked  # nothing is asked while it cools down
        now[0] = 15.0
        assert await outcomes(40, 5) == {"JudgeDownError": 5}
        assert server._num_completions == num_asked + 1  # one request finds out that it is still down
        server.plan = FaultPlan()
        assert await outcomes(45, 5) == {"JudgeDownError": 5}
        now[0] = 30.0
        assert (await outcomes(50, 1))["Judgement"] == 1
        assert await outcomes(51, 20) == {"Judgement": 20}
        assert budget.spent.num_calls == server._num_completions  # and who was not asked costs nothing
        await judge.close()

    with FaultyJudge(FaultPlan()) as server:
        asyncio.run(play(server))


@pytest.mark.parametrize("group_size", [1, 3])
def test_a_judge_that_gives_no_verdict_is_not_down_and_its_episode_is_unscored(group_size: int) -> None:
    with FaultyJudge(FaultPlan(), spoils=1.0) as server:
        run = asyncio.run(judge_many(server, 30, BudgetLimits(), timeout_seconds=60.0, group_size=group_size))
    assert [type(answer) for answer in run.answers] == [JudgeError] * 30
    # A group is asked about once, however many of its episodes wait: at most 4 attempts of each call.
    assert run.budget.spent.num_calls <= 4 * 30 // group_size
    assert not any(isinstance(answer, JudgeDownError) for answer in run.answers)
    # What was answered is paid for, although nothing could be made of it.
    assert run.budget.spent.input_tokens == server.tokens[0] > 0
    assert run.budget.spent.output_tokens == server.tokens[1]
