"""Feedback about turns: where its texts come from, and the prompts in which a teacher reads it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, ClassVar

import pytest
from gspo_gym_envs.guess_number.env import GuessNumber

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.core import ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.errors import TemplateError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ActRequest, ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, episode_player
from gspo_gym.rollout.feedback import (
    answers_of,
    conversation_before,
    prompt_with,
    require_recorded,
    siblings_success,
    told_of,
    with_feedback,
)
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Completion, FinishReason, Message, Task, ToolCall, Trajectory

HIGH, WORDS = "Too high, and too hasty.", "Feedback on an earlier try of this turn:\n"


class Lamp(ToolEnv):
    """A lamp that the third call of a tool switches on."""

    policies: ClassVar = {
        "reference": lambda env, rng: lambda messages: Message("assistant", "", (ToolCall("call_0", "press", {}),))
    }

    def start(self, options: Any) -> str:
        self.presses = 0
        return "Switch the lamp on."

    @tool
    def press(self) -> str:
        """Press the button."""
        self.presses += 1
        if self.presses == 3:
            self.finish(Reward({"on": 1.0}, success=True))
        return f"pressed {self.presses} times"


def says(numbers: list[int]) -> Any:
    return lambda env, rng: lambda messages: str(numbers[sum(message.role == "assistant" for message in messages)])


class Cut:
    """Says a digit of one token, at which max_output_tokens cuts it off."""

    async def __call__(self, request: ActRequest) -> Completion:
        ids = request.renderer.action_ids(Message("assistant", str(1 + request.turn_index)))[:1]
        return Completion(ids, [-0.1], FinishReason.LENGTH, [0])

    async def end_session(self, session_id: str) -> None:
        pass


def played(
    make_env: Any, policy: Any, *, renderers: RendererCache, name: str = "a/0", max_output_tokens: int = 200
) -> Trajectory:
    play = episode_player(
        make_env=lambda _task: make_env(),
        act=policy if isinstance(policy, Cut) else ScriptedActor(policy),
        renderers=renderers,
        limits=EpisodeLimits(max_turns=4, max_model_len=4096, max_output_tokens=max_output_tokens),
    )
    return asyncio.run(play(EpisodeRequest(name, Task("test/Env-v0", 3), sampling_seed=0)))


@pytest.fixture
def renderers() -> RendererCache:
    return RendererCache(tiny_tokenizer())


def numbers_around(seed: int) -> tuple[int, list[int]]:
    env = GuessNumber(style="terse")
    env.reset(seed=seed)
    number = env._number
    assert number is not None
    return number, [n for n in range(1, 9) if n != number]


def test_without_feedback_the_prompts_are_the_recorded_ones(renderers: RendererCache) -> None:
    """Of turns that append and of those behind tools; an answer that was cut off is closed as it was."""
    _, others = numbers_around(3)
    guesses = played(lambda: GuessNumber(style="terse"), says(others), renderers=renderers)
    presses = played(Lamp, Lamp.policies["reference"], renderers=renderers)
    cut = played(lambda: GuessNumber(low=10, high=20), Cut(), renderers=renderers, max_output_tokens=1)
    assert [len(t.turns) for t in (guesses, presses, cut)] == [4, 3, 4]
    assert {turn.finish_reason for turn in cut.turns} == {FinishReason.LENGTH}
    for trajectory, tools in ((guesses, ()), (presses, Lamp().tool_schemas), (cut, ())):
        renderer = renderers.for_tools(tools)
        require_recorded(renderer, trajectory)
        for turn in trajectory.turns:
            recorded = trajectory.segments[turn.segment].token_ids[: turn.action_span[0]].tolist()
            assert prompt_with(renderer, trajectory, turn.index, None) == recorded


def test_feedback_stands_at_the_end_of_what_was_said_last_and_only_there(renderers: RendererCache) -> None:
    _, others = numbers_around(3)
    trajectory = played(lambda: GuessNumber(style="terse"), says(others), renderers=renderers)
    renderer = renderers.for_tools(())
    for turn in trajectory.turns:
        recorded = renderer.decode(trajectory.segments[turn.segment].token_ids[: turn.action_span[0]])
        text = renderer.decode(prompt_with(renderer, trajectory, turn.index, HIGH))
        before, closing = recorded.rsplit("<|im_end|>", 1)
        assert text == f"{before}\n\n{WORDS}{HIGH}<|im_end|>{closing}"


def test_behind_a_tools_result_feedback_is_a_message_of_its_own(renderers: RendererCache) -> None:
    trajectory = played(Lamp, Lamp.policies["reference"], renderers=renderers)
    shown = with_feedback(conversation_before(trajectory, 1), HIGH)
    assert [message.role for message in shown[-3:]] == ["assistant", "tool", "user"]
    assert shown[-1].content == WORDS + HIGH
    renderer = renderers.for_tools(Lamp().tool_schemas)
    assert renderer.decode(prompt_with(renderer, trajectory, 1, HIGH)).count(HIGH) == 1


def test_what_the_environment_answered_to_each_turn(renderers: RendererCache) -> None:
    number, others = numbers_around(3)
    lost = played(lambda: GuessNumber(style="terse"), says(others), renderers=renderers)
    hints = ["lower" if guess > number else "higher" for guess in others[:3]]
    assert answers_of(lost) == [*hints, f"lost: {number}"]
    silent = dataclasses.replace(lost, messages=lost.messages[:-1])
    assert answers_of(silent) == [*hints, None], "a limit of ours ended it: there was no answer"
    example = (Message("user", "An example."), Message("assistant", "5"))
    assert answers_of(dataclasses.replace(lost, messages=(*example, *lost.messages))) == answers_of(lost)


def test_a_siblings_success_is_another_episodes_and_told_from_its_first_action(renderers: RendererCache) -> None:
    number, others = numbers_around(3)
    make = lambda: GuessNumber(style="terse")  # noqa: E731 - as short as it is used
    lost = played(make, says(others), renderers=renderers, name="a/0")
    won = played(make, says([others[0], number]), renderers=renderers, name="a/1")
    assert siblings_success(lost, [lost, won]) is won
    assert siblings_success(won, [lost, won]) is None
    hint = "lower" if others[0] > number else "higher"
    assert told_of(won).startswith(f"assistant: {others[0]}\nuser: {hint}\nassistant: {number}")
    assert told_of(played(Lamp, Lamp.policies["reference"], renderers=renderers)).startswith(
        "assistant: press({})\ntool: pressed 1 times"
    )


def test_an_episode_of_other_messages_than_its_tokens_is_refused(renderers: RendererCache) -> None:
    _, others = numbers_around(3)
    trajectory = played(lambda: GuessNumber(style="terse"), says(others), renderers=renderers)
    first, *rest = trajectory.messages
    changed = dataclasses.replace(trajectory, messages=(Message(first.role, "Guess 1-9."), *rest))
    with pytest.raises(TemplateError, match=r"a/0 \(test/Env-v0#3\): its messages make another first prompt"):
        require_recorded(renderers.for_tools(()), changed)
