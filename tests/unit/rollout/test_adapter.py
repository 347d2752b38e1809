"""TokenObservationWrapper, against episodes written out by hand.

Pinned here:

1.  Ids, mask, turn index, logprobs, versions, spans and rewards of a two-turn ChatML episode.
2.  A turn cut off by the limit gets its closing token appended and masked.
3.  A template that strips earlier reasoning starts a new segment; the old one keeps what was sampled.
4.  A padding token that the policy samples stays in the mask; padding itself never is.
5.  The order of limits: the environment's end, then max_turns, then the context.
6.  max_turns and a full context truncate, and `outcome` tells them apart.
7.  A first prompt that does not fit is an error with both numbers; ten megabytes are refused without being encoded.
8.  Text that cannot be parsed goes to `invalid_action`, never to `step`.
9.  What cannot have been sampled is refused, and the turn stays open.
10. The synchronous forms drive async environments, and say what to do inside an event loop.
11. A failing environment leaves the sampled tokens in the record, unscored.
12. "Not scored" stays apart from 0, and success is what was declared last.
13. Tools: their schemas are in the prompt, calls are dispatched, results come back as masked tool messages.
14. Drift: whatever is said, each prompt is what rendering the whole conversation from nothing gives.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import tool
from gspo_gym.errors import ConfigError, ContextOverflowError, EnvError, RecordError, UsageError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.types import FinishReason, Outcome, ParseStatus

START, END, PAD = 257, 258, 256  # <|im_start|>, <|im_end|>, <|endoftext|>; 0..255 are bytes
TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"


def say(text: str) -> list[int]:
    return list(text.encode())


def user(text: str) -> list[int]:
    """A user message and the opening of the model's turn, as ChatML writes them."""
    return [START, *say("user\n" + text), END, *say("\n"), START, *say("assistant\n")]


class Talk(TextEnv):
    """Answers with the given step results, in order, and remembers what it was told."""

    def __init__(self, *answers: Any, first: str = "hi") -> None:
        self.answers = list(answers)
        self.first = first
        self.actions: list[str] = []
        self.num_closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.first, {}

    def step(self, action: str) -> Any:
        self.actions.append(action)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.num_closed += 1


def wrap(env: Any, **changes: Any) -> TokenObservationWrapper:
    limits = {"max_turns": 8, "pad_id": PAD, "max_model_len": 512, "max_output_tokens": 32} | changes
    tokenizer = limits.pop("tokenizer", None) or tiny_tokenizer()
    return TokenObservationWrapper(env, tokenizer, **limits)


def test_two_turns_of_chatml_are_recorded_token_by_token() -> None:
    env = Talk(
        ("more", Reward({"polite": 0.5, "slow": -0.25}, events=("greeted",)), False, False, {}),
        ("bye", 1.0, True, False, {}),
    )
    with wrap(env) as wrapper:
        first, _ = wrapper.reset(seed=3)
        second, reward, terminated, truncated, _ = wrapper.step([*say("yo"), END], [-0.5, -0.25, -0.125], 7)
        assert (reward, terminated, truncated) == (0.25, False, False)
        last, reward, terminated, truncated, _ = wrapper.step([*say("k"), END], [-1.0, -2.0], [7, 8])
        assert (reward, terminated, truncated) == (1.0, True, False)
        record = wrapper.episode()

    # By hand: user(..) is 1 + 5 + text + 1 + 1 + 1 + 10 tokens = 19 + text; the template closes a turn with "\n".
    prompt = [257, 117, 115, 101, 114, 10, 104, 105, 258, 10, 257, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10]
    assert prompt == user("hi")  # user \n h i ... a s s i s t a n t \n
    between = [10, *user("more")]
    assert first.dtype == np.int32
    assert first.tolist() == prompt
    assert second.tolist() == [*prompt, 121, 111, 258, *between]
    assert last.tolist() == [*prompt, 121, 111, 258, *between, 107, 258]  # "bye" is never read by the model

    (segment,) = record.segments
    num_prompt, num_between = 21, 24
    assert segment.token_ids.tolist() == last.tolist()
    assert segment.action_mask.tolist() == [False] * num_prompt + [True] * 3 + [False] * num_between + [True] * 2
    assert segment.turn_index.tolist() == [-1] * num_prompt + [0] * 3 + [-1] * num_between + [1] * 2
    assert segment.weight_version.tolist() == [-1] * num_prompt + [7] * 3 + [-1] * num_between + [7, 8]
    assert segment.rollout_logprobs.tolist() == (
        [0.0] * num_prompt + [-0.5, -0.25, -0.125] + [0.0] * num_between + [-1.0, -2.0]
    )
    assert [turn.observation_span for turn in record.turns] == [(0, 21), (24, 48)]
    assert [turn.action_span for turn in record.turns] == [(21, 24), (48, 50)]
    assert [turn.finish_reason for turn in record.turns] == [FinishReason.STOP, FinishReason.STOP]
    assert record.turns[0].reward_terms == {"polite": 0.5, "slow": -0.25}
    assert record.turns[0].events == ("greeted",)
    assert record.rewards == (0.25, 1.0)
    assert record.outcome is Outcome.TERMINATED
    assert [(m.role, m.content) for m in record.messages] == [
        ("user", "hi"),
        ("assistant", "yo"),
        ("user", "more"),
        ("assistant", "k"),
        ("user", "bye"),
    ]
    assert env.actions == ["yo", "k"]
    assert env.num_closed == 1


def test_a_turn_cut_off_by_its_limit_is_closed_with_a_masked_token() -> None:
    env = Talk(("more", 0.0, False, False, {}), ("", 0.0, True, False, {}))
    with wrap(env, max_output_tokens=2) as wrapper:
        wrapper.reset(seed=0)
        prompt, *_ = wrapper.step(say("yo"))
        record = wrapper.episode()
    # "yo" without its <|im_end|>: the wrapper appends it, and it belongs to the next turn's observation.
    assert prompt.tolist() == [*user("hi"), *say("yo"), END, *say("\n"), *user("more")]
    mask = record.segments[0].action_mask
    assert np.flatnonzero(mask).tolist() == [21, 22]
    assert not mask[23]
    assert record.turns[0].finish_reason is FinishReason.LENGTH
    assert record.turns[0].action_span == (21, 23)


def test_a_template_that_strips_reasoning_starts_a_new_segment() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (TEMPLATES / "qwen3.jinja").read_text()
    think, unthink = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    sampled = [think, *say("\nhm\n"), unthink, *say("\n\nyo"), END]
    env = Talk(("more", 0.0, False, False, {}), ("", 1.0, True, False, {}))
    with wrap(env, tokenizer=tokenizer) as wrapper:
        wrapper.reset(seed=0)
        prompt, *_ = wrapper.step(sampled)
        wrapper.step([*say("k"), END])
        record = wrapper.episode()

    # Qwen3 shows the first answer without its reasoning once a user has spoken again.
    rewritten = [*user("hi"), *say("yo"), END, *say("\n"), *user("more")]
    assert prompt.tolist() == rewritten
    first, second = record.segments
    assert first.token_ids.tolist() == [*user("hi"), *sampled]
    assert first.action_mask.tolist() == [False] * 21 + [True] * len(sampled)
    assert second.token_ids.tolist() == [*rewritten, *say("k"), END]
    assert second.action_mask.tolist() == [False] * len(rewritten) + [True] * 2  # the old "yo" is context here
    assert [turn.segment for turn in record.turns] == [0, 1]
    assert second.turn_index[-1] == 1
    assert record.turns[1].observation_span == (0, len(rewritten))
    assert record.messages[1].reasoning_content == "hm"
    assert env.actions == ["yo", "k"]


def test_padding_that_equals_a_sampled_token_does_not_touch_the_mask() -> None:
    env = Talk(("", 1.0, True, False, {}))
    with wrap(env, pad_id=END) as wrapper:  # pad == eos == end of turn
        wrapper.reset(seed=0)
        wrapper.step([*say("a"), END])
        padded = wrapper.episode().padded(26)
    assert padded.ids.tolist() == [[*user("hi"), *say("a"), END, END, END, END]]
    assert padded.action_mask.tolist() == [[False] * 21 + [True, True] + [False] * 3]
    assert padded.turn_index.tolist() == [[-1] * 21 + [0, 0] + [-1] * 3]
    assert padded.rewards.tolist() == [1.0]


def test_padding_refuses_to_cut_and_marks_unscored_turns_with_nan() -> None:
    env = Talk(("more", None, False, False, {}), ("", 0.0, True, False, {}))
    with wrap(env) as wrapper:
        wrapper.reset(seed=0)
        wrapper.step([*say("a"), END])
        wrapper.step([*say("b"), END])
        record = wrapper.episode()
    assert record.rewards == (None, 0.0)
    np.testing.assert_array_equal(record.padded(64).rewards, np.array([np.nan, 0.0], np.float32))
    with pytest.raises(RecordError, match=r"padded\(length=48\): a segment has 49 tokens"):
        record.padded(48)  # 21 + 2 + 24 + 2


def test_the_limit_on_turns_truncates_after_the_last_answer() -> None:
    env = Talk(("a", 0.5, False, False, {}), ("b", 0.25, False, False, {}))
    with wrap(env, max_turns=2) as wrapper:
        wrapper.reset(seed=0)
        assert wrapper.step([END])[2:4] == (False, False)
        _, reward, terminated, truncated, info = wrapper.step([END])
        assert (reward, terminated, truncated) == (0.25, False, True)
        assert info["outcome"] is Outcome.MAX_TURNS
        with pytest.raises(UsageError, match="call reset"):
            wrapper.step([END])
        record = wrapper.episode()
    assert record.outcome is Outcome.MAX_TURNS
    assert record.messages[-1].content == "b"  # kept for people, not among the tokens
    assert record.segments[0].token_ids[-1] == END


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [(True, False, Outcome.TERMINATED), (False, True, Outcome.TRUNCATED), (True, True, Outcome.TERMINATED)],
)
def test_the_end_of_the_environment_comes_before_all_limits(
    terminated: bool, truncated: bool, expected: Outcome
) -> None:
    env = Talk(("x" * 9999, 0.0, terminated, truncated, {}))  # also beyond max_turns and the context
    with wrap(env, max_turns=1) as wrapper:
        wrapper.reset(seed=0)
        assert wrapper.step([END])[2:4] == (terminated, truncated)
        assert wrapper.outcome is expected


def test_the_limit_on_turns_comes_before_the_context() -> None:
    with wrap(Talk(("x" * 9999, 0.0, False, False, {})), max_turns=1) as wrapper:
        wrapper.reset(seed=0)
        wrapper.step([END])
        assert wrapper.outcome is Outcome.MAX_TURNS


@pytest.mark.parametrize(("max_model_len", "expected"), [(44, None), (43, Outcome.CONTEXT_OVERFLOW)])
def test_the_next_prompt_must_leave_room_for_one_token(max_model_len: int, expected: Outcome | None) -> None:
    # 21 prompt + 1 sampled + 1 line break + 19 + len("m") = 43 tokens
    with wrap(Talk(("m", 0.5, False, False, {})), max_model_len=max_model_len) as wrapper:
        wrapper.reset(seed=0)
        ids, reward, terminated, truncated, _ = wrapper.step([END])
        assert wrapper.outcome is expected
        assert (reward, terminated, truncated) == (0.5, False, expected is not None)
        assert len(ids) == (43 if expected is None else 22)
        assert wrapper.episode().rewards == (0.5,)
        if expected is None:
            assert wrapper.max_tokens == 1


def test_a_first_prompt_that_does_not_fit_is_an_error_with_both_numbers() -> None:
    with (
        wrap(Talk(), max_model_len=21, env_id="Talk-v0") as wrapper,
        pytest.raises(ContextOverflowError, match=r"Talk-v0: the first prompt has 21 tokens.*max_model_len = 21"),
    ):
        wrapper.reset(seed=0)


def test_ten_megabytes_are_refused_without_being_encoded() -> None:
    huge = "x" * 10_000_000
    tokenizer = tiny_tokenizer()
    lengths: list[int] = []

    class Counting(type(tokenizer)):  # type: ignore[misc]  # made at run time
        def __call__(self, text: str, **options: Any) -> Any:
            lengths.append(len(text))
            return super().__call__(text, **options)

    tokenizer.__class__ = Counting
    with wrap(Talk((huge, 0.0, False, False, {})), tokenizer=tokenizer) as wrapper:
        wrapper.reset(seed=0)
        wrapper.step([END])
        assert wrapper.outcome is Outcome.CONTEXT_OVERFLOW
    with (
        wrap(Talk(first=huge), tokenizer=tokenizer) as wrapper,
        pytest.raises(ContextOverflowError, match="the first prompt has 10000000 characters"),
    ):
        wrapper.reset(seed=0)
    assert 0 < max(lengths) < 1000


def test_unparsable_text_goes_to_invalid_action() -> None:
    class Strict(Talk):
        def invalid_action(self, error: str) -> Any:
            self.actions.append("invalid")
            return f"not understood: {error}", -0.5, False, False, {}

    tokenizer = tiny_tokenizer()
    (think,) = tokenizer.convert_tokens_to_ids(["<think>"])
    env = Strict()
    with wrap(env, tokenizer=tokenizer) as wrapper:
        wrapper.reset(seed=0)
        _, reward, *_ = wrapper.step([think, *say("hm"), END])
        assert reward == -0.5
        _, _, _, _, info = wrapper.step([think, *say("hm")])
        record = wrapper.episode()
    assert env.actions == ["invalid", "invalid"]
    assert [turn.parse for turn in record.turns] == [ParseStatus.BAD_REASONING, ParseStatus.TRUNCATED]
    assert info["parse"] is ParseStatus.TRUNCATED
    assert record.messages[1].content == "<think>hm"  # the text as it was sampled
    assert record.messages[2].content.startswith("not understood: ")


def test_a_prompt_is_extended_in_place_and_one_given_out_before_stays_as_it_was() -> None:
    answer = ("x" * 300, 0.0, False, False, {})
    with wrap(Talk(*[answer] * 8), max_model_len=4096) as wrapper:  # beyond the first array's room, too
        prompts = [wrapper.reset(seed=0)[0]]
        copies = [prompts[0].copy()]
        for _ in range(7):
            prompts.append(wrapper.step([*say("yo"), END])[0])
            copies.append(prompts[-1].copy())
        assert np.shares_memory(prompts[-1], wrapper.prompt)
        assert np.shares_memory(prompts[0], prompts[1])
        assert not any(prompt.flags.writeable for prompt in prompts)
        for shorter, longer in itertools.pairwise(copies):
            assert longer[: len(shorter) + 3].tolist() == [*shorter, *say("yo"), END]
        assert [prompt.tolist() for prompt in prompts] == [copy.tolist() for copy in copies]


def test_an_id_that_the_tokenizer_does_not_have_is_recorded_and_says_nothing() -> None:
    env = Talk(("more", 0.0, False, False, {}), ("", 1.0, True, False, {}))
    with wrap(env) as wrapper:
        wrapper.reset(seed=0)
        ids, *_ = wrapper.step([*say("a"), 9999, *say("b"), END])
        wrapper.step([9999, END])
        record = wrapper.episode()
    assert env.actions == ["ab", ""]
    assert [message.content for message in record.messages if message.role == "assistant"] == ["ab", ""]
    assert ids[len(user("hi")) :].tolist() == [*say("a"), 9999, *say("b"), END, *say("\n"), *user("more")]


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "expected 1 to 4 sampled ids in this turn, got 0"),
        ([1, 2, 3, 4, 5], "expected 1 to 4 sampled ids in this turn, got 5"),
        ([-1], "expected ids of at least 0, got -1"),
        ([1.0], "token_ids: expected ints, got an array of float64"),
        ([True], "token_ids: expected ints, got an array of bool"),
        (["1"], "token_ids: expected ints"),
        ([[1, 2]], r"token_ids: expected one a sampled token, shape \(1,\), got \(1, 2\)"),
        ([END, 1, END], "token 0 is the stop token 258, but 2 more follow"),
    ],
)
def test_ids_that_cannot_have_been_sampled_are_refused(token_ids: Any, message: str) -> None:
    env = Talk(("", 0.0, True, False, {}))
    with wrap(env, max_output_tokens=4) as wrapper:
        wrapper.reset(seed=0)
        with pytest.raises(RecordError, match=message):
            wrapper.step(token_ids)
        assert env.actions == []
        wrapper.step([END])  # the turn is still open
        assert wrapper.outcome is Outcome.TERMINATED


@pytest.mark.parametrize(
    ("logprobs", "weight_version", "message"),
    [
        ([-1.0], 0, r"logprobs: expected one a sampled token, shape \(2,\), got \(1,\)"),
        ([-1.0, float("nan")], 0, "logprobs: expected finite values <= 0, got nan"),
        ([-1.0, 0.5], 0, "logprobs: expected finite values <= 0, got 0.5"),
        ([-1.0, -float("inf")], 0, "logprobs: expected finite values <= 0, got -inf"),
        ([-1.0, -1.0], [0], r"weight_version: expected one a sampled token, shape \(2,\), got \(1,\)"),
        ([-1.0, -1.0], 0.5, "weight_version: expected ints"),
    ],
)
def test_logprobs_and_versions_that_do_not_fit_are_refused(logprobs: Any, weight_version: Any, message: str) -> None:
    with wrap(Talk()) as wrapper:
        wrapper.reset(seed=0)
        with pytest.raises(RecordError, match=message):
            wrapper.step([1, END], logprobs, weight_version)


def test_limits_out_of_range_are_configuration_errors() -> None:
    for name, value in [("max_turns", 0), ("max_model_len", 1), ("max_output_tokens", 0), ("pad_id", 263)]:
        with pytest.raises(ConfigError, match=f"TokenObservationWrapper.{name}: expected an integer"):
            wrap(Talk(), **{name: value})


class AsyncTalk:
    """Not a subclass of anything, and async."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return f"seed {seed}", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return action[::-1], 1.0, action == "end", False, {}


def test_the_synchronous_forms_drive_async_environments() -> None:
    with wrap(AsyncTalk()) as wrapper:
        assert wrapper.reset(seed=5)[0].tolist() == user("seed 5")
        assert wrapper.step([*say("ab"), END])[0].tolist()[-len(user("ba")) :] == user("ba")
        assert wrapper.step([*say("end"), END])[2] is True


def test_without_a_seed_one_is_drawn_and_told() -> None:
    with wrap(AsyncTalk()) as wrapper:
        ids, info = wrapper.reset()
        assert ids.tolist() == user(f"seed {info['seed']}")


def test_episodes_without_a_seed_follow_from_the_last_given_one() -> None:
    def seeds(wrapper: TokenObservationWrapper, *given: int | None) -> list[int]:
        return [wrapper.reset(seed)[1]["seed"] for seed in given]

    drawn = np.random.default_rng(5).integers(2**31, size=1), np.random.default_rng(6)
    with wrap(AsyncTalk()) as wrapper:
        first = seeds(wrapper, 5, None, 6, None, None, 6, None)
        assert first[1] == drawn[0][0]  # held out, as 5 is
        expected = [int(drawn[1].integers(2**31)) for _ in range(2)]
        assert first[3:5] == expected  # 6 replaces 5, and both follow from it
        assert first[6] == expected[0]  # a seed given again starts again


def test_the_synchronous_forms_refuse_to_block_an_event_loop() -> None:
    async def inside() -> None:
        wrapper = wrap(AsyncTalk())
        for method, arguments in [("reset", ()), ("step", ([END],)), ("close", ())]:
            with pytest.raises(UsageError, match=rf"{method}\(\) was called inside a running.*{method}_async"):
                getattr(wrapper, method)(*arguments)
        ids, _ = await wrapper.reset_async(seed=1)
        assert ids.tolist() == user("seed 1")
        await wrapper.close_async()

    asyncio.run(inside())


def test_a_failing_environment_leaves_the_sampled_tokens_unscored() -> None:
    with wrap(Talk(ValueError("broken inside")), env_id="Talk-v0") as wrapper:
        wrapper.reset(seed=0)
        with pytest.raises(EnvError, match="Talk-v0"):
            wrapper.step([*say("yo"), END])
        record = wrapper.episode()
        with pytest.raises(UsageError, match="call reset"):
            wrapper.step([END])
    assert record.segments[0].token_ids.tolist() == [*user("hi"), *say("yo"), END]
    assert record.rewards == (None,)
    assert record.outcome is None


@pytest.mark.parametrize(("max_model_len", "room"), [(16, 16), (64, 32)])
def test_before_reset_there_is_nothing_to_read_and_all_the_room(max_model_len: int, room: int) -> None:
    with wrap(Talk(), max_model_len=max_model_len) as wrapper:
        assert (wrapper.prompt.tolist(), wrapper.max_tokens) == ([], room)
        assert (wrapper.env_seconds, wrapper.action_seconds) == (0.0, 0.0)


def test_a_reset_that_fails_leaves_no_turn_open() -> None:
    env = Talk()
    with wrap(env) as wrapper:
        wrapper.reset(seed=0)
        env.first = "x" * 9999
        with pytest.raises(ContextOverflowError):
            wrapper.reset(seed=0)
        with pytest.raises(UsageError, match="call reset"):
            wrapper.step([END])
    assert env.actions == []


def test_time_is_counted_from_the_last_reset_and_apart_for_answers() -> None:
    now = 0.0

    class Slow(AsyncTalk):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            nonlocal now
            now += 1.0
            return await super().reset(seed=seed)

        async def step(self, action: str) -> Any:
            nonlocal now
            now += 2.0
            return await super().step(action)

    with wrap(Slow(), clock=lambda: now) as wrapper:
        for num_steps in (2, 1):  # 1 second for the reset and 2 for each step
            wrapper.reset(seed=0)
            for _ in range(num_steps):
                wrapper.step([*say("yo"), END])
            assert (wrapper.env_seconds, wrapper.action_seconds) == (1.0 + 2.0 * num_steps, 2.0 * num_steps)


@pytest.mark.parametrize(("declared", "success"), [(None, None), (True, False), (False, False)])
def test_an_episode_that_a_limit_ends_after_its_answer_has_the_stated_return(
    declared: bool | None, success: bool | None
) -> None:
    # The second turn was not scored, or was and declared something.
    second = None if declared is None else Reward({"r": 0.25}, success=declared, events=("found",))
    with wrap(Talk(("a", 0.5, False, False, {}), ("b", second, False, False, {}))) as wrapper:
        wrapper.reset(seed=0)
        wrapper.step([END])
        wrapper.step([END])
        wrapper.end_at_limit(-2.0)
        record = wrapper.episode()
    # The second turn takes what is missing: 0.5 - 2.5 = -2.
    assert record.rewards == (0.5, -2.5)
    assert [turn.index for turn in record.turns] == [0, 1]
    assert (record.turns[1].reward_terms, record.turns[1].events) == ({"action_limit": -2.5}, ())
    assert (record.outcome, record.success) == (Outcome.ACTION_LIMIT, success)


def test_a_step_before_reset_says_so() -> None:
    with wrap(Talk()) as wrapper, pytest.raises(UsageError, match="call reset"):
        wrapper.step([END])


def test_success_is_what_was_declared_last_and_a_new_reset_forgets_it() -> None:
    env = Talk(
        ("a", Reward({"r": 0.0}, success=False), False, False, {}),
        ("b", Reward({"r": 1.0}, success=True), False, False, {}),
        ("c", 0.0, True, False, {}),
    )
    with wrap(env) as wrapper:
        wrapper.reset(seed=0)
        declared = []
        for _ in range(3):
            wrapper.step([END])
            declared.append(wrapper.episode().success)
        assert declared == [False, True, True]
        wrapper.reset(seed=0)
        fresh = wrapper.episode()
    assert fresh.success is None
    assert fresh.turns == ()
    assert fresh.segments[0].token_ids.tolist() == user("hi")


def test_a_record_does_not_change_when_the_episode_goes_on() -> None:
    with wrap(Talk(("a", 0.0, False, False, {}))) as wrapper:
        wrapper.reset(seed=0)
        before = wrapper.episode()
        wrapper.step([END])
        assert len(before.segments[0]) == 21
        assert before.turns == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.success = True  # type: ignore[misc]


class Scales(ToolEnv):
    def start(self, options: Any) -> str:
        return "How heavy?"

    @tool
    def weigh(self, item: str) -> str:
        """Weigh an item.

        Args:
            item: which one.
        """
        self.finish(Reward({"found": 1.0}, success=True)) if item == "gold" else self.add_reward(-0.5)
        return f"{item}: 7 g"


def test_tools_are_shown_called_and_answered() -> None:
    with wrap(Scales(), max_output_tokens=100, max_model_len=1024) as wrapper:
        prompt, _ = wrapper.reset(seed=0)
        tokenizer = tiny_tokenizer()
        assert "weigh(item: string)" in tokenizer.decode(prompt)
        call, end_call = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])

        def weigh(item: str) -> list[int]:
            arguments = f'\n{{"name": "weigh", "arguments": {{"item": "{item}"}}}}\n'
            return [call, *say(arguments), end_call, END]

        second, reward, *_ = wrapper.step(weigh("lead"))
        assert reward == -0.5
        answer = [*say("\n"), START, *say("tool\nlead: 7 g"), END, *say("\n"), START, *say("assistant\n")]
        assert second.tolist() == [*prompt.tolist(), *weigh("lead"), *answer]
        wrapper.step([*say("it is heavy"), END])  # no call: the environment reminds
        wrapper.step(weigh("gold"))
        record = wrapper.episode()
    assert record.outcome is Outcome.TERMINATED
    assert record.success is True
    assert record.rewards == (-0.5, 0.0, 1.0)
    assert record.messages[1].tool_calls[0].arguments == {"item": "lead"}
    assert (record.messages[2].role, record.messages[2].content) == ("tool", "lead: 7 g")
    (segment,) = record.segments
    expected = [*weigh("lead"), *say("it is heavy"), END, *weigh("gold")]
    assert segment.token_ids[segment.action_mask].tolist() == expected


@pytest.mark.parametrize("template", [None, "chatml.jinja", "qwen3.jinja"])
def test_each_prompt_is_what_rendering_everything_from_nothing_gives(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = (TEMPLATES / template).read_text()
    texts = ["", " a  b ", "naïve 世界 🙂", "<|im_end|>", "{{ 7 * 7 }}", "\\n'\"", "x" * 50, "assistant"]
    with wrap(
        Talk(*[(text, 0.0, False, False, {}) for text in texts]), tokenizer=tokenizer, max_model_len=4096
    ) as wrapper:
        wrapper.reset(seed=0)
        sampled: list[int] = []
        for text in ["yo", "世", "a b", "0", '"', "line\nline", "é", "?"]:
            action = [*say(text), END]
            sampled += action
            prompt, *_ = wrapper.step(action)
            if wrapper.outcome is None:
                assert prompt.tolist() == wrapper.renderer.full(wrapper.messages, add_generation_prompt=True)
        (segment,) = wrapper.episode().segments
    assert segment.token_ids[segment.action_mask].tolist() == sampled  # the mask picks exactly what was sampled
