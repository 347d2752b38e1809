"""A judging model behind HTTP that favours the criterion it reads first: found out; shuffling takes the bias away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence

import pytest
from judged_episodes import model_settings
from rule_judge import spoken_episode

from gspo_gym.judge.attacks import attacks
from gspo_gym.judge.audit import AuditReport, AuditSettings, JudgeAudit
from gspo_gym.judge.base import JudgeRequest, Rubrics
from gspo_gym.judge.gold import Label
from gspo_gym.judge.model.judge import ModelJudge
from gspo_gym.judge.model.prompt import verdict_key
from gspo_gym.judge.rubric import Criterion, Rubric
from gspo_gym.judge.server import create_fake_judge_app, read_prompt
from gspo_gym.remote.serving import BackgroundServer

BIAS = 0.2
RUBRIC = Rubric(tuple(Criterion(letter, f"about {letter}") for letter in "abcd"))
NUM_EPISODES = 240


def favours_the_first(messages: Sequence[Mapping[str, str]]) -> str:
    """Everything is worth 0.3, and what stands first 0.2 more."""
    prompt = read_prompt(messages)
    parts = {
        part: {c.id: {"reason": "", "score": 0.3 + BIAS * (place == 0)} for place, c in enumerate(criteria)}
        for part, criteria in prompt.parts.items()
    }
    return json.dumps({verdict_key(prompt.nonce): {**parts, "summary": ""}})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with BackgroundServer(create_fake_judge_app(answer=favours_the_first)) as server:
        yield f"{server.url}/v1"


def means_by_criterion(url: str, *, shuffles: bool) -> dict[str, float]:
    """Over different episodes, of equal worth."""

    async def ask() -> list[Mapping[str, float]]:
        judge = ModelJudge(model_settings("fake", base_url=url, shuffles_criteria=shuffles))
        requests = [
            JudgeRequest(spoken_episode(str(n), [f"I say {n}"]), Rubrics(outcome=RUBRIC)) for n in range(NUM_EPISODES)
        ]
        try:
            judgements = await asyncio.gather(*(judge.judge(request) for request in requests))
        finally:
            await judge.close()
        reviews = [judgement.outcome_review for judgement in judgements]
        return [{id_: score.score for id_, score in review.criteria.items()} for review in reviews if review]

    scores = asyncio.run(ask())
    assert len(scores) == NUM_EPISODES
    return {id_: sum(each[id_] for each in scores) / NUM_EPISODES for id_ in RUBRIC.ids}


def spread(means: Mapping[str, float]) -> float:
    return max(means.values()) - min(means.values())


@pytest.mark.slow
def test_shuffled_criteria_shrink_the_bias_fivefold(url: str) -> None:
    fixed = means_by_criterion(url, shuffles=False)
    assert fixed == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.3, "d": 0.3})
    # Shuffled, each stands first in a quarter of the episodes, give or take sqrt(3/16 / 240) = 0.028 of them.
    shuffled = means_by_criterion(url, shuffles=True)
    assert shuffled == pytest.approx(dict.fromkeys("abcd", 0.3 + BIAS / 4), abs=4 * 0.028 * BIAS)
    assert spread(shuffled) <= spread(fixed) / 5


def test_the_audit_estimates_the_bias_of_the_model_itself_although_the_judge_shuffles(url: str) -> None:
    labelled = [(spoken_episode(str(n), [f"I say {n}"]), Label(str(n), None, 0.35)) for n in range(4)]
    settings = AuditSettings(num_repeats=0, num_position_episodes=4, num_attacked_episodes=0)

    async def run() -> tuple[float, ...]:
        usual = ModelJudge(model_settings("fake", base_url=url))
        in_given_order = ModelJudge(model_settings("fake", base_url=url, shuffles_criteria=False))
        audit = JudgeAudit(usual, Rubrics(outcome=RUBRIC), settings=settings, in_given_order=in_given_order)
        try:
            report = await audit.run(labelled)
        finally:
            await usual.close()
            await in_given_order.close()
        assert report.position is not None
        assert report.outcome is not None
        assert report.outcome.equal_fraction == 1.0  # 0.3 + 0.2 / 4, whoever stands first
        return report.position.effects

    # The first place has 0.2 more than the others, so 3/4 of it above the mean.
    assert asyncio.run(run()) == pytest.approx((0.15, -0.05, -0.05, -0.05))


def test_the_audit_of_a_judge_of_groups_compares_labelled_siblings_and_finds_the_favoured_place() -> None:
    def favours_the_first_episode(messages: Sequence[Mapping[str, str]]) -> str:
        prompt = read_prompt(messages)
        parts = {
            part: {"comparison": {"reason": "", "score": 0.3 + BIAS * (part == "episode_1")}} for part in prompt.parts
        }
        return json.dumps({verdict_key(prompt.nonce): {**parts, "summary": ""}})

    names = [f"g{group}/{member}" for group in range(3) for member in range(4)]
    labelled = [(spoken_episode(name, [f"I say {name}"]), Label(name, None, 0.3)) for name in [*names, "alone/0"]]
    settings = AuditSettings(num_repeats=0, num_position_episodes=12, num_attacked_episodes=1)

    async def run(url: str) -> AuditReport:
        usual = ModelJudge(model_settings("fake", base_url=url, mode="group"))
        in_given_order = ModelJudge(model_settings("fake", base_url=url, mode="group", shuffles_criteria=False))
        rubrics = Rubrics(outcome=RUBRIC)
        few = {name: attack for name, attack in attacks(rubrics).items() if name.startswith("verdicts")}
        try:
            return await JudgeAudit(usual, rubrics, settings, (), in_given_order, few).run(labelled)
        finally:
            await usual.close()
            await in_given_order.close()

    with BackgroundServer(create_fake_judge_app(answer=favours_the_first_episode)) as server:
        report = asyncio.run(run(f"{server.url}/v1"))
    assert (report.num_episodes, report.num_unscored) == (13, 1)
    assert next(iter(report.unscored)).startswith("no other episode of its group")
    assert report.outcome is not None
    assert report.outcome.judge_mean == pytest.approx(0.3 + BIAS / 4)  # one of each four stands first
    assert (report.position_part, report.position and report.position.num_episodes) == ("group", 3)
    # The first place has 0.2 more than the others, so 3/4 of it above the mean.
    assert report.position is not None
    assert report.position.effects == pytest.approx((0.15, -0.05, -0.05, -0.05))
    assert "position (group, 3 groups in every order)" in str(report)
    # One call for each of three groups, four orders of each, and one for each attack.
    assert report.attacks is not None
    assert report.cost.num_calls == 3 + 4 * 3 + report.attacks.num_attempts
