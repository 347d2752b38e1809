"""The verifiers adapter over a stand-in of the package (`fake_verifiers`): rows, prompts, scores, failures, signals.

Real environments are played by tests/foreign.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gspo_gym_envs.suites import verifiers as verifiers_loading
from gspo_gym_envs.suites.verifiers import VerifiersEnv
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.session import open_session
from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError
from gspo_gym.types import Message, StepResult, ToolCall

FIRST = 2**31  # the first training seed


@pytest.fixture(autouse=True)
def fake_verifiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_verifiers"))
    verifiers_loading.forget_loaded()
    _forget_modules()
    yield
    verifiers_loading.forget_loaded()
    _forget_modules()


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "vf_counting")]:
        del sys.modules[name]


async def opened(**env_args: Any) -> Any:
    return await open_session(
        lambda: VerifiersEnv(env_id="vf-counting", env_args=env_args), env_id="Verifiers", step_timeout_seconds=20.0
    )


def played(*texts: str | Message, seed: int = FIRST, **env_args: Any) -> list[StepResult]:
    """The observations and answers of an episode in which the model says these texts."""

    async def play() -> list[StepResult]:
        session = await opened(**env_args)
        try:
            results = [await session.reset(seed)]
            for text in texts:
                message = text if isinstance(text, Message) else Message("assistant", text)
                results.append(await session.step(message))
            return results
        finally:
            await session.close()

    return asyncio.run(play())


def test_a_prompt_s_new_messages_are_the_observation() -> None:
    opening, first, _ = played("1", "2")
    assert opening.messages == (Message("system", "Count."), Message("user", "From 0."))
    assert opening.info == {"example_id": 0, "is_held_out": False}
    assert first.messages == (Message("user", "next"),)
    assert (first.reward, first.done) == (None, False)


def test_the_end_is_scored_with_a_term_for_each_function_that_has_a_weight() -> None:
    last = played("1", "2", functions=["right", "num_answers"], weights=[0.5, 0.25])[-1]
    # right: 0.5 x 1; two answers: 0.25 x 2
    assert (last.reward, dict(last.reward_terms)) == (1.0, {"right": 0.5, "num_answers": 0.5})
    assert (last.terminated, last.truncated, last.success) == (True, False, None)
    assert last.messages == (Message("user", "That is it."),)
    assert last.info["metrics"] == {"right": 1.0, "num_answers": 2.0}
    assert last.info["stop_condition"] == "has_final_env_response"


def test_a_function_without_a_weight_is_a_metric_and_no_term() -> None:
    last = played("1", "2")[-1]
    assert dict(last.reward_terms) == {"right": 1.0}
    assert last.info["metrics"]["num_answers"] == 2.0


def test_a_reward_that_is_no_weighted_sum_is_one_term() -> None:
    assert dict(played("1", "2", kind="other sum")[-1].reward_terms) == {"reward": 0.25}


def test_seeds_name_evaluation_rows_below_and_training_rows_above_the_border() -> None:
    asked = [played(seed=seed)[0].messages[1].content for seed in (0, 1, 2, 3, FIRST, FIRST + 3, FIRST + 4)]
    assert asked == [f"From {number}." for number in (100, 101, 102, 100, 0, 3, 0)]
    assert played(seed=0)[0].info["is_held_out"] is True


def test_without_evaluation_rows_nothing_is_held_out() -> None:
    opening = played(seed=1, has_eval=False)[0]
    assert opening.messages[1].content == "From 1."
    assert opening.info["is_held_out"] is False


def test_a_training_seed_without_training_rows_is_an_error() -> None:
    with pytest.raises(EnvError, match="has no training rows"):
        played(kind="no training")


def test_a_limit_on_turns_is_a_rule_of_the_environment_and_a_timeout_is_not() -> None:
    last = played("9", max_turns=1)[-1]
    assert (last.terminated, last.truncated, last.reward) == (True, False, 0.0)
    assert last.messages == ()
    late = played("9", kind="slow", timeout_seconds=0.05)[-1]
    assert (late.terminated, late.truncated, late.info["stop_condition"]) == (False, True, "timeout_reached")


def test_a_reward_function_that_raises_is_an_error_and_not_a_zero() -> None:
    text = "reward function raising raised ZeroDivisionError: division by zero"
    with pytest.raises(EnvError, match=text):
        played("9", functions=["right", "raising"], weights=[1.0, 0.1], max_turns=1)


def test_what_a_rollout_fails_with_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(EnvError, match="the rollout raised ZeroDivisionError: division by zero"):
        played("9", kind="raises")
    with pytest.raises(EnvError, match="the rollout failed: the sandbox is gone"):
        played("9", kind="fails")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rewrites", "message 0 was 'Count.' and is now 'Summary: you counted.'"),
        ("impostor", "got a message in the model's name"),
        ("picture", "got a part of type 'image_url'"),
        ("other tools", r"expected the same tools in every rollout, got \['other'\]"),
    ],
)
def test_a_prompt_that_the_model_did_not_have_this_way_is_refused(kind: str, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        played("9", kind=kind)


def test_parts_of_text_are_one_text() -> None:
    assert played("9", kind="parts")[-1].messages == (Message("user", "a\nb"),)


def test_tools_are_offered_and_their_calls_answered_by_id() -> None:
    call = ToolCall("call_7", "add", {"a": 1, "b": "é"})
    [_, answer] = played(Message("assistant", "", (call,)), kind="tools")
    assert answer.messages == (Message("tool", '{"a": 1, "b": "é"}', tool_call_id="call_7"),)
    env = VerifiersEnv(env_id="vf-counting", env_args={"kind": "tools"})
    parameters = {"type": "object", "properties": {}}
    function = {"name": "add", "description": "Adds.", "parameters": parameters}
    assert env.tool_schemas == ({"type": "function", "function": function},)


def test_a_call_that_the_end_leaves_open_is_answered_as_not_made() -> None:
    call = ToolCall("call_7", "add", {"a": 1})
    last = played(Message("assistant", "", (call,)), kind="tools", max_turns=1)[-1]
    said = "error: the episode is over, this call was not made"
    assert last.messages == (Message("tool", said, tool_call_id="call_7", name="add"),)


def test_an_answer_that_could_not_be_read_is_told_and_the_rollout_waits() -> None:
    async def play() -> tuple[StepResult, StepResult]:
        session = await opened()
        await session.reset(FIRST)
        told = await session.invalid_action("expected a closing tag")
        answered = await session.step(Message("assistant", "1"))
        await session.close()
        return told, answered

    told, answered = asyncio.run(play())
    assert (told.messages, told.reward, told.done) == ((Message("user", "expected a closing tag"),), None, False)
    assert answered.messages == (Message("user", "next"),)


def test_after_so_many_unread_answers_in_a_row_the_episode_is_truncated() -> None:
    async def play() -> list[bool]:
        env = VerifiersEnv(env_id="vf-counting", max_unread_answers=2)
        await env.reset(seed=FIRST)
        flags = []
        for method, said in ((env.invalid_action, "?"), (env.step, "7"), (env.invalid_action, "?")) * 2:
            flags.append((await method(said))[3])
            if flags[-1]:
                break
        return flags

    assert asyncio.run(play()) == [False, False, False, True]


def test_a_rollout_that_scores_nothing_gives_no_reward() -> None:
    last = played("1", "2", kind="unscored")[-1]
    assert (last.reward, last.terminated) == (None, True)


def test_rewards_of_a_group_are_refused_when_the_environment_is_made() -> None:
    with pytest.raises(ConfigError, match="scores the rollouts of a group against each other"):
        VerifiersEnv(env_id="vf-counting", env_args={"functions": ["best_of"], "weights": [1.0]})


def test_what_cannot_be_loaded_says_why() -> None:
    with pytest.raises(ConfigError, match="cannot load 'nowhere': ValueError: Could not import 'nowhere'"):
        VerifiersEnv(env_id="nowhere")
    with pytest.raises(ConfigError, match="no such level"):
        VerifiersEnv(env_id="vf-counting", env_args={"kind": "unloadable"})


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-verifiers\]'"):
        VerifiersEnv(env_id="vf-counting")


def test_the_process_keeps_its_signal_handlers() -> None:
    def mine(*_: object) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        VerifiersEnv(env_id="vf-counting")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_environment_serves_all_episodes_with_the_same_arguments() -> None:
    first, same, other = (VerifiersEnv(env_id="vf-counting", env_args={"max_turns": n}) for n in (2, 2, 3))
    assert first._loaded is same._loaded
    assert first._loaded is not other._loaded


def test_closing_or_resetting_in_the_middle_lets_the_rollout_clean_up() -> None:
    async def play() -> list[Any]:
        env = VerifiersEnv(env_id="vf-counting")
        await env.reset(seed=FIRST)
        await env.reset(seed=FIRST + 1)
        await env.step("2")
        await env.close()
        return [row["example_id"] for row in env._loaded.environment.cleaned_up]

    assert asyncio.run(play()) == [0, 1]


def test_a_step_without_a_rollout_is_refused() -> None:
    env = VerifiersEnv(env_id="vf-counting")
    for call in (env.step("1"), env.invalid_action("?")):
        with pytest.raises(ResetNeeded):
            asyncio.run(call)
    with pytest.raises(ConfigError, match="expected no options"):
        asyncio.run(env.reset(seed=0, options={"level": 1}))
    with pytest.raises(ConfigError, match="max_unread_answers >= 1"):
        VerifiersEnv(env_id="vf-counting", max_unread_answers=0)


def test_many_episodes_at_once_keep_to_themselves() -> None:
    async def one(number: int) -> float | None:
        session = await opened()
        await session.reset(FIRST + number)
        await session.step(Message("assistant", "x"))
        last = await session.step(Message("assistant", str(number % 4 + 2)))
        await session.close()
        return last.reward

    async def all_of_them() -> list[float | None]:
        return await asyncio.gather(*(one(number) for number in range(40)))

    assert asyncio.run(all_of_them()) == [1.0] * 40


def make_counting() -> VerifiersEnv:
    return VerifiersEnv(env_id="vf-counting", env_args={"max_turns": 3})


def test_the_contract_is_kept() -> None:
    report = check_env(make_counting, seeds=range(3), max_turns=6, num_leak_episodes=0)
    assert report.passed, str(report)
