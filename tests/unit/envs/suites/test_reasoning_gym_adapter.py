"""The reasoning-gym adapter over a stand-in of the package (`fake_suites`): questions, sides, scores, failures.

The real generators are played by tests/foreign.
"""

from __future__ import annotations

import random
import sys

import pytest
from gspo_gym_envs.suites.reasoning_gym import ReasoningGymEnv
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.data.rows import content_hash, is_held_out_content
from gspo_gym.errors import ConfigError, EnvError, MissingExtraError, UnknownNameError

pytestmark = pytest.mark.usefixtures("fake_suites")


def right(question: str) -> str:
    a, _, b = question.rstrip("?").split()
    return str(int(a) + int(b))


@pytest.mark.parametrize("dataset", ["sum", "listed", "numeric", "open"])
def test_a_question_is_asked_and_its_answer_scored(dataset: str) -> None:
    env = ReasoningGymEnv(dataset)
    for seed in (0, 1, 2**31, 2**32 - 1):
        system, question = env.reset(seed=seed)[0]
        assert (system.role, system.content) == ("system", "Answer in <answer> tags.")
        text = f"<answer>1</answer> or rather <answer> {right(question.content)} </answer>."
        observation, reward, terminated, truncated, info = env.step(text)
        assert (observation, float(reward), dict(reward.terms)) == ("", 1.0, {"score": 1.0})
        assert (reward.success, terminated, truncated, info["answer"]) == (True, True, False, right(question.content))


def test_partial_scores_are_passed_on_and_no_tags_are_no_answer() -> None:
    env = ReasoningGymEnv("sum", prompt="simple")
    env.reset(seed=0)
    _, reward, _, _, _ = env.step("<answer>-1</answer>")
    assert (float(reward), reward.success) == (0.01, False)
    question = env.reset(seed=0)[0][-1].content
    _, reward, _, _, info = env.step(right(question))
    assert (float(reward), info["answer"]) == (0.0, None)
    env.reset(seed=0)
    assert float(env.invalid_action("unreadable")[1]) == 0.0


def test_without_instructions_the_whole_text_is_the_answer() -> None:
    env = ReasoningGymEnv("sum", prompt=None)
    messages, _ = env.reset(seed=0)
    assert [message.role for message in messages] == ["user"]
    assert env.step(f" {right(messages[0].content)}\n")[1].success is True


@pytest.mark.parametrize("dataset", ["sum", "listed"])
def test_no_question_is_on_both_sides_however_few_there_are(dataset: str) -> None:
    env = ReasoningGymEnv(dataset, most=8, held_out_fraction=0.3)
    held_out = {env.reset(seed=seed)[0][-1].content for seed in range(150)}
    training = {env.reset(seed=2**31 + seed)[0][-1].content for seed in range(300)}
    assert not held_out & training
    # 64 questions: each is held out with probability 0.3, so 19 on average, within four deviations of 3.7.
    assert 5 <= len(held_out) <= 34
    assert len(training) > len(held_out)


def test_a_side_without_questions_is_an_error_and_not_an_endless_search() -> None:
    env = ReasoningGymEnv("sum", most=1)
    # There is one question, "0 + 0?", and its hash decides on which side.
    content = content_hash("0 + 0?", 0)
    side, other = (0, 2**31) if is_held_out_content(content, 0.1) else (2**31, 0)
    assert env.reset(seed=side)[0][-1].content == "0 + 0?"
    with pytest.raises(ConfigError, match="200 draws from 'sum' gave no"):
        env.reset(seed=other)


def test_a_scorer_that_raises_on_an_answer_has_refused_it_but_one_that_raises_on_its_own_is_broken() -> None:
    env = ReasoningGymEnv("numeric", prompt=None)
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step("many")
    assert (float(reward), terminated) == (0.0, True)
    assert info["refused"].startswith("ValueError: invalid literal")
    with pytest.raises(EnvError, match="reasoning-gym broken: score_answer raised KeyError"):
        ReasoningGymEnv("broken")


def test_a_generator_that_draws_from_the_process_s_generator_is_given_its_own() -> None:
    random.seed(5)
    before = random.getstate()
    asked = [ReasoningGymEnv("shared").reset(seed=seed)[0][-1].content for seed in (1, 2, 1)]
    assert random.getstate() == before
    random.seed(6)
    assert ReasoningGymEnv("shared").reset(seed=2)[0][-1].content == asked[1]
    assert asked[0] == asked[2] != asked[1]


def test_a_reference_exists_where_an_own_answer_or_an_example_scores() -> None:
    assert all("reference" in ReasoningGymEnv(name).policies for name in ("sum", "open", "listed"))


def test_it_keeps_the_contract() -> None:
    for dataset in ("sum", "listed"):
        report = check_env(lambda dataset=dataset: ReasoningGymEnv(dataset), seeds=range(3), num_leak_episodes=4)
        assert report.passed, str(report)


def test_wrong_settings_are_refused_with_what_there_is() -> None:
    with pytest.raises(UnknownNameError, match="there is no dataset 'sums'; did you mean 'sum'"):
        ReasoningGymEnv("sums")
    with pytest.raises(UnknownNameError, match="there is no prompt 'simpel'; did you mean 'simple'"):
        ReasoningGymEnv("sum", prompt="simpel")
    with pytest.raises(ConfigError, match=r"sum refused \{'most': 0\}: most must be positive"):
        ReasoningGymEnv("sum", most=0)
    with pytest.raises(ConfigError, match="size has no effect"):
        ReasoningGymEnv("sum", size=3)
    with pytest.raises(ConfigError, match=r"held_out_fraction in \(0, 1\), got 1"):
        ReasoningGymEnv("sum", held_out_fraction=1)
    with pytest.raises(ConfigError, match="expected no options"):
        ReasoningGymEnv("sum").reset(seed=0, options={"x": 1})


def test_a_step_outside_an_episode_is_an_error() -> None:
    env = ReasoningGymEnv("sum")
    with pytest.raises(ResetNeeded):
        env.step("1")
    env.reset(seed=0)
    env.step("1")
    with pytest.raises(ResetNeeded):
        env.step("1")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-reasoning-gym\]'"):
        ReasoningGymEnv("sum")
