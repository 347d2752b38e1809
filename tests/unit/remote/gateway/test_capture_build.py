"""What becomes of the calls of a session: segments, turns, and which are not trained on and why.

Conversations are spoken by a client written here, which only sends messages. Expected tokens are put together in the
tests from what the engine was given and what it sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seeded_engine import SeededEngine, any_of

from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import ConfigError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.remote.gateway.capture import Capture, CapturedCall, ChatCall, CompletionCall, Untrained
from gspo_gym.remote.gateway.capture_build import CaptureBuild, build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySession, GatewaySessionSettings
from gspo_gym.types import Message, Sampling

TOKENIZER = tiny_tokenizer()
QWEN3 = (Path(__file__).parents[2] / "chat/templates/qwen3.jinja").read_text()
SYSTEM = Message("system", "You play.")
HELPER = Message("system", "You help.")
TITLE = Message("system", "You write titles.")
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}},)
WORDS = ("red", "green", "blue", "yellow and so on", "a")

Talk = Callable[[GatewaySession], Awaitable[Any]]


def user(text: str) -> Message:
    return Message("user", text)


def session_settings(**changes: Any) -> GatewaySessionSettings:
    base = {"name": "g/0", "sampling_seed": 5, "max_output_tokens": 12, "max_model_len": 400}
    return GatewaySessionSettings(**(base | changes))


def engine_of_words() -> SeededEngine:
    return SeededEngine(TOKENIZER, any_of(*WORDS))


def captured(talk: Talk, engine: SeededEngine | None = None, **changes: Any) -> Capture:
    async def run() -> Capture:
        gateway = Gateway(engine or engine_of_words(), TOKENIZER)
        session = gateway.open_session(session_settings(**changes))
        await talk(session)
        return await session.freeze()

    return asyncio.run(run())


def built(talk: Talk, engine: SeededEngine | None = None, **changes: Any) -> CaptureBuild:
    return build_trajectory_parts(captured(talk, engine, **changes))


async def ask(session: GatewaySession, *messages: Message, **fields: Any) -> CapturedCall:
    return await session.chat(ChatCall(messages, **fields))


def reasons(build: CaptureBuild) -> list[str]:
    return ["trained" if use.untrained is None else use.untrained.value for use in build.uses]


def kinds(build: CaptureBuild) -> list[str]:
    return [use.kind for use in build.uses]


def sampled(capture: Capture, *indices: int) -> list[list[int]]:
    calls = {call.index: call for call in capture.calls}
    return [calls[index].completion.token_ids.tolist() for index in indices]


def actions(build: CaptureBuild) -> list[list[int]]:
    """The ids of each turn, read off the segments by the turns' spans."""
    return [build.segments[t.segment].token_ids[slice(*t.action_span)].tolist() for t in build.turns]


def trained_in(build: CaptureBuild) -> list[list[int]]:
    """The turns of each segment, in the order of their tokens."""
    return [list(dict.fromkeys(s.turn_index[s.action_mask].tolist())) for s in build.segments]


def test_an_extension_is_one_segment_of_the_exact_tokens() -> None:
    asked: list[Message] = [SYSTEM, user("one")]

    async def talk(session: GatewaySession) -> None:
        for text in ("two", "three", "four"):
            call = await ask(session, *asked)
            asked.extend((call.answer, user(text)))

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    assert kinds(build) == ["root", "extends", "extends"]
    assert reasons(build) == ["trained"] * 3
    [segment] = build.segments
    expected = [i for call in capture.calls for i in (*call.context_ids.tolist(), *call.completion.token_ids.tolist())]
    assert segment.token_ids.tolist() == expected
    # Here the answers are spelled as the template spells them, so that a full rendering is a second witness.
    rendered = TOKENIZER.apply_chat_template(
        [message.to_dict() for message in asked[:-1]], tokenize=True, return_dict=False
    )
    assert expected == rendered[: len(expected)]
    assert actions(build) == sampled(capture, 0, 1, 2)
    assert build.messages == tuple(asked[:-1])
    assert build.turn_calls == (0, 1, 2)


def test_a_branch_trains_what_is_common_once() -> None:
    async def talk(session: GatewaySession) -> None:
        first = await ask(session, user("one"))
        for text in ("left", "right"):
            second = await ask(session, user("one"), first.answer, user(text))
            await ask(session, user("one"), first.answer, user(text), second.answer, user("go on"))

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    assert reasons(build) == ["trained"] * 5
    assert trained_in(build) == [[0, 1, 2], [3, 4]]
    assert actions(build) == sampled(capture, 0, 1, 2, 3, 4)
    # The second segment begins with the first call's prompt and answer, as context.
    first = [*capture.calls[0].context_ids.tolist(), *sampled(capture, 0)[0]]
    assert build.segments[1].token_ids[: len(first)].tolist() == first
    assert build.turns[3].observation_span[0] == 0


def test_equal_calls_whose_answers_were_delivered_are_turns_whichever_the_conversation_goes_on_from() -> None:
    """An agent that draws twice and goes on from the second: both draws are the policy's, and led to the return."""

    async def talk(session: GatewaySession) -> None:
        await ask(session, user("one"))
        second = await ask(session, user("one"))
        await ask(session, user("one"), second.answer, user("two"))

    build = built(talk)
    assert reasons(build) == ["trained"] * 3
    assert trained_in(build) == [[0], [1, 2]]


@pytest.mark.parametrize("count", [2, 3])
def test_an_agent_that_asks_the_same_thing_again_and_again_is_trained_on_every_answer(count: int) -> None:
    async def talk(session: GatewaySession) -> None:
        for _ in range(count):
            await ask(session, SYSTEM, user("one"))

    build = built(talk)
    assert build.counts == {"trained": count}
    assert trained_in(build) == [[turn] for turn in range(count)]
    assert build.trained_fraction == 1.0


@pytest.mark.parametrize("fields", [{"sampling": {"temperature": 0.5}}, {"is_trained": False}])
def test_an_episode_of_which_nothing_can_be_trained_on_has_masked_turns(fields: dict[str, Any]) -> None:
    async def talk(session: GatewaySession) -> None:
        first = await ask(session, SYSTEM, user("one"), **fields)
        await ask(session, SYSTEM, user("one"), first.answer, user("two"), **fields)
        lost = await ask(session, SYSTEM, user("lost"), **fields)
        session.note_delivery(lost.index, is_delivered=False)

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    assert build.turn_calls == (0, 1)
    assert build.decision_turns == (0, 1)
    assert actions(build) == sampled(capture, 0, 1)
    [segment] = build.segments
    assert not segment.action_mask.any()
    assert (segment.turn_index == -1).all()
    assert (build.num_trained_tokens, build.trained_fraction) == (0, 0.0)
    assert "trained" not in build.counts


def test_a_player_without_a_memory_is_the_task_beside_a_sub_agent_with_tools() -> None:
    """Its calls are conversations of one call each, as a title is, but several under one system message."""

    async def talk(session: GatewaySession) -> None:
        await ask(session, HELPER, user("please"), tools=TOOLS)
        await ask(session, SYSTEM, user("door"))
        await ask(session, SYSTEM, user("wall"))
        await ask(session, TITLE, user("A game about colours"))

    build = built(talk)
    assert reasons(build) == ["trained"] * 3 + ["auxiliary"]
    assert build.decision_turns == (0, 1, 2)


def test_a_call_that_is_not_trained_on_is_a_decision_without_a_turn_beside_others_that_are() -> None:
    async def talk(session: GatewaySession) -> None:
        await ask(session, SYSTEM, user("one"), sampling={"temperature": 0.5})
        await ask(session, SYSTEM, user("two"))
        await ask(session, SYSTEM, user("three"), sampling={"temperature": 0.5})

    assert built(talk).decision_turns == (None, 0, None)


def test_an_agent_that_shows_only_the_present_state_may_meet_a_state_again() -> None:
    async def talk(session: GatewaySession) -> None:
        for state in ("door", "wall", "door"):
            await ask(session, SYSTEM, user(state))

    build = built(talk)
    assert reasons(build) == ["trained"] * 3
    assert trained_in(build) == [[0], [1], [2]]


def test_an_answer_that_reached_nobody_is_left_out_unless_something_followed() -> None:
    async def talk(session: GatewaySession) -> None:
        first = await ask(session, user("one"))
        session.note_delivery(first.index, is_delivered=False)
        second = await ask(session, user("one"), first.answer, user("two"))
        session.note_delivery(second.index, is_delivered=False)
        third = await ask(session, user("one"), first.answer, user("three"))
        session.note_delivery(third.index, is_delivered=False)
        session.note_delivery(third.index, is_delivered=True)

    assert reasons(built(talk)) == ["trained", "undelivered", "trained"]


def test_a_retry_of_an_answer_that_reached_nobody_is_trained_alone() -> None:
    async def talk(session: GatewaySession) -> None:
        lost = await ask(session, user("one"))
        session.note_delivery(lost.index, is_delivered=False)
        await ask(session, user("one"))

    assert reasons(built(talk)) == ["undelivered", "trained"]


def test_a_sub_agent_is_trained_in_its_own_segment_and_turns_stand_in_the_order_of_the_calls() -> None:
    async def talk(session: GatewaySession) -> None:
        first = await ask(session, SYSTEM, user("one"))
        inner = await ask(session, HELPER, user("please"))
        await ask(session, HELPER, user("please"), inner.answer, user("thanks"))
        await ask(session, SYSTEM, user("one"), first.answer, user("two"))

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    assert reasons(build) == ["trained"] * 4
    assert trained_in(build) == [[0, 3], [1, 2]]
    assert [turn.segment for turn in build.turns] == [0, 1, 1, 0]
    assert actions(build) == sampled(capture, 0, 1, 2, 3)


def test_a_compacted_context_under_the_same_system_message_is_a_new_segment() -> None:
    async def talk(session: GatewaySession) -> None:
        first = await ask(session, SYSTEM, user("one"))
        await ask(session, SYSTEM, user("one"), first.answer, user("two"))
        await ask(session, SYSTEM, user("So far: one, two. Go on."))

    build = built(talk)
    assert kinds(build) == ["root", "extends", "root"]
    assert reasons(build) == ["trained"] * 3
    assert trained_in(build) == [[0, 1], [2]]


@pytest.mark.parametrize("has_tools", [False, True])
def test_a_title_is_beside_the_task(has_tools: bool) -> None:
    """The task is a conversation of several calls, or of one with tools."""

    async def talk(session: GatewaySession) -> None:
        await ask(session, TITLE, user("A game about colours"))
        first = await ask(session, SYSTEM, user("one"), tools=TOOLS if has_tools else ())
        if not has_tools:
            await ask(session, SYSTEM, user("one"), first.answer, user("two"))

    build = built(talk)
    assert reasons(build)[0] == "auxiliary"
    assert set(reasons(build)[1:]) == {"trained"}


def test_single_calls_alone_are_the_task() -> None:
    async def talk(session: GatewaySession) -> None:
        await ask(session, TITLE, user("A game about colours"))
        await ask(session, SYSTEM, user("one"))

    assert reasons(built(talk)) == ["trained"] * 2


def test_a_compaction_stays_the_task_beside_a_sub_agent_with_another_system_message() -> None:
    async def talk(session: GatewaySession) -> None:
        for system in (SYSTEM, HELPER):
            first = await ask(session, system, user("one"))
            await ask(session, system, user("one"), first.answer, user("two"))
        await ask(session, SYSTEM, user("So far: one, two."))

    assert reasons(built(talk)) == ["trained"] * 5


def test_the_caller_has_the_last_word_where_tokens_allow_it() -> None:
    async def talk(session: GatewaySession) -> None:
        await ask(session, TITLE, user("A game about colours"), is_trained=True)
        first = await ask(session, SYSTEM, user("one"), is_trained=False)
        await ask(session, SYSTEM, user("one"), first.answer, user("two"))
        await ask(session, SYSTEM, user("again"), sampling={"temperature": 0.5}, is_trained=True)

    build = built(talk)
    assert reasons(build) == ["trained", "untrained by request", "trained", "other sampling"]
    # What was not trained on is context of what followed on it.
    assert build.segments[1].action_mask.sum() == build.uses[2].num_sampled_tokens


@pytest.mark.parametrize("override", [{"temperature": 0.3}, {"top_p": 0.5}, {"top_k": 7}, {"min_tokens": 2}])
def test_sampling_of_its_own_is_not_trained_on_and_reaches_the_engine(override: dict[str, float]) -> None:
    async def talk(session: GatewaySession) -> None:
        await ask(session, user("one"), sampling=override)
        await ask(session, user("two"), sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0})

    engine = engine_of_words()
    assert reasons(built(talk, engine)) == ["other sampling", "trained"]
    [(name, value)] = override.items()
    assert [getattr(call.sampling, name) for call in engine.calls] == [value, getattr(Sampling(), name)]


def test_raw_completions_extend_each_other_by_exact_tokens_only() -> None:
    async def talk(session: GatewaySession) -> None:
        first = await session.complete(CompletionCall([72, 105]))
        tokens = [72, 105, *first.completion.token_ids.tolist()]
        await session.complete(CompletionCall([*tokens, 33]))
        await session.complete(CompletionCall("Hi" + first.answer.content))  # the same bytes, which nobody sampled
        await ask(session, user("Hi"))

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    assert kinds(build) == ["root", "extends", "root", "root"]
    assert trained_in(build)[0] == [0, 1]
    assert actions(build) == sampled(capture, 0, 1, 2, 3)
    assert capture.calls[2].context_ids.tolist() == list(b"Hi" + capture.calls[0].answer.content.encode())
    assert [call.appends for call in capture.calls] == [False, True, False, False]


def test_a_raw_prompt_that_ends_with_a_known_answer_adds_nothing_and_of_equal_calls_continues_the_first() -> None:
    async def talk(session: GatewaySession) -> None:
        first, second = [await session.complete(CompletionCall([72, 105])) for _ in range(2)]
        assert first.completion.token_ids.tolist() == second.completion.token_ids.tolist()
        await session.complete(CompletionCall([72, 105, *first.completion.token_ids.tolist()]))

    capture = captured(talk, SeededEngine(TOKENIZER, any_of("red")))
    assert [(call.parent, call.context_ids.tolist()) for call in capture.calls] == [
        (None, [72, 105]), (None, [72, 105]), (0, [])
    ]  # fmt: skip
    assert [len(call.new_messages) for call in capture.calls] == [1, 1, 0]
    # The second call trains the same tokens in a segment of its own.
    assert trained_in(build_trajectory_parts(capture)) == [[0, 2], [1]]


def test_a_sampled_id_that_the_tokenizer_does_not_have_comes_back_in_a_raw_prompt_and_no_other_may() -> None:
    beyond = len(TOKENIZER) + 5  # a row that fills a vocabulary up

    async def talk(session: GatewaySession) -> None:
        await session.complete(CompletionCall([72, 105]))
        await session.complete(CompletionCall([72, 105, beyond, 65, 33]))
        for prompt in ([beyond], [72, 105, beyond, 65, beyond]):
            with pytest.raises(ConfigError, match=rf"expected token ids in \[0, {len(TOKENIZER)}\), got {beyond}"):
                await session.complete(CompletionCall(prompt))

    capture = captured(talk, ScriptedEngine([[beyond, 65], [66]]))  # type: ignore[arg-type]
    assert [(call.parent, call.context_ids.tolist()) for call in capture.calls] == [(None, [72, 105]), (0, [33])]


def test_what_the_model_said_elsewhere_is_told_as_context() -> None:
    example = Message("assistant", "like this")

    async def talk(session: GatewaySession) -> None:
        first = await ask(session, SYSTEM, user("so?"), example, user("one"))
        second = await ask(session, SYSTEM, user("one"), example, user("two"), is_trained=False)
        await ask(session, SYSTEM, user("one"), example, user("two"), second.answer, user("three"))
        await ask(session, SYSTEM, user("so?"), example, user("one"), first.answer, user("two"), example, user("three"))

    capture = captured(talk)
    build = build_trajectory_parts(capture)
    first, second, third, last = (call.answer.content for call in capture.calls)
    assert [(m.role, m.content) for m in build.messages] == [
        ("system", "You play."), ("user", "so?"), ("assistant", "like this"), ("user", "one"), ("assistant", first),
        ("system", "You play."), ("user", "one"), ("user", "(earlier) like this"), ("user", "two"),
        ("user", f"(earlier) {second}"), ("user", "three"), ("assistant", third),
        ("user", "two"), ("user", "(earlier) like this"), ("user", "three"), ("assistant", last),
    ]  # fmt: skip


def test_a_rewritten_prompt_begins_a_segment_that_grows_by_itself() -> None:
    """Qwen3's template drops what was thought before a user speaks."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN3
    texts = ("<think>\nhm\n</think>\n\nred", "green", "blue")
    engine = ScriptedEngine([[*tokenizer(text)["input_ids"], 258] for text in texts])

    async def run() -> Capture:
        session = Gateway(engine, tokenizer).open_session(session_settings(max_output_tokens=40))
        asked = [user("one")]
        for text in ("two", "three", "four"):
            call = await ask(session, *asked)
            asked += [call.answer, user(text)]
        return await session.freeze()

    build = build_trajectory_parts(asyncio.run(run()))
    assert kinds(build) == ["root", "rewrites", "extends"]
    assert trained_in(build) == [[0], [1, 2]]
    for turn, read in zip(build.turns, engine.calls, strict=True):
        tokens = build.segments[turn.segment].token_ids[: turn.action_span[0]]
        assert tuple(tokens.tolist()) == read.prompt_token_ids
    assert "hm" not in tokenizer.decode(build.segments[1].token_ids)
    assert [message.reasoning_content for message in build.messages if message.role == "assistant"] == [
        "hm",
        None,
        None,
    ]


def test_an_empty_session_has_no_parts() -> None:
    async def talk(session: GatewaySession) -> None:
        pass

    build = built(talk)
    assert (build.segments, build.turns, build.messages, build.uses) == ((), (), (), ())
    assert build.trained_fraction == 0.0


# -- any tree of calls -------------------------------------------------------------------------------------------------

# Each step of a random agent: (which earlier call it continues, modulo their number plus one for "none"; under which
# system message; with which words; and what it says about training).
STEPS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.sampled_from([SYSTEM, HELPER, TITLE]),
        st.sampled_from(["go", "stop", "turn"]),
        st.sampled_from([None, None, None, True, False]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_an_agent_does_each_trained_completion_counts_exactly_once(steps: list[Any]) -> None:
    async def talk(session: GatewaySession) -> None:
        conversations: list[tuple[Message, ...]] = []
        for choice, system, text, is_trained, is_delivered in steps:
            chosen = choice % (len(conversations) + 1)
            before = conversations[chosen - 1] if chosen else (system,)
            call = await ask(session, *before, user(text), is_trained=is_trained)
            session.note_delivery(call.index, is_delivered=is_delivered)
            conversations.append((*before, user(text), call.answer))

    capture = captured(talk, max_model_len=2000)
    build = build_trajectory_parts(capture)
    calls = {call.index: call for call in capture.calls}
    assert [use.index for use in build.uses] == list(calls)
    # Every trained call is one turn, in the order of the calls, with its tokens, logprobs and versions. Where none is
    # trained on, the answers that the agent had are the turns: the episode was played, and keeps what it earned.
    trained = [use for use in build.uses if use.untrained is None]
    assert [use.turn for use in trained] == list(range(len(trained)))
    continued = {call.parent for call in capture.calls}
    had = [
        use
        for use, (*_, is_delivered) in zip(build.uses, steps, strict=True)
        if (is_delivered or use.index in continued) and use.untrained is not Untrained.AUXILIARY
    ]
    turns = trained or had
    assert build.turn_calls == tuple(use.index for use in turns)
    for turn, use in zip(build.turns, turns, strict=True):
        segment, completion = build.segments[turn.segment], calls[use.index].completion
        span = slice(*turn.action_span)
        assert segment.token_ids[span].tolist() == completion.token_ids.tolist()
        if trained:
            assert segment.rollout_logprobs[span].tolist() == completion.logprobs.tolist()
            assert set(segment.turn_index[span].tolist()) == {turn.index}
        # What stands before it is exactly what the engine read.
        assert turn.action_span[0] == calls[use.index].num_prompt_tokens
    # Nothing else carries a mask; nothing does where none is trained on.
    num_masked = sum(int(segment.action_mask.sum()) for segment in build.segments)
    assert num_masked == sum(use.num_sampled_tokens for use in trained) == build.num_trained_tokens
    assert sum(build.counts.values()) == len(steps)
    # Said and trained on are different things only for a stated reason.
    for use, (_, _, _, wanted, _) in zip(build.uses, steps, strict=True):
        assert (use.untrained is Untrained.UNTRAINED_BY_REQUEST) == (wanted is False)
        assert not (wanted is True and use.untrained is not None)
    # Whoever reads the messages finds the turns in them.
    said = [message.content for message in build.messages if message.role == "assistant"]
    answers = [calls[use.index].answer.content for use in turns]
    assert said[len(said) - len(answers) :] == answers


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=1, max_size=10))
def test_what_the_engine_reads_is_the_segment_up_to_there(choices: list[int]) -> None:
    """Against the engine's own list of calls, for trees in which all is trained on."""

    async def talk(session: GatewaySession) -> None:
        conversations: list[tuple[Message, ...]] = [(SYSTEM,)]
        for number, choice in enumerate(choices):
            before = conversations[choice % len(conversations)]
            call = await ask(session, *before, user(f"step {number}"), is_trained=True)
            conversations.append((*before, user(f"step {number}"), call.answer))

    engine = engine_of_words()
    build = built(talk, engine, max_model_len=2000)
    assert build.trained_fraction == 1.0
    for turn, read in zip(build.turns, engine.calls, strict=True):
        tokens = build.segments[turn.segment].token_ids[: turn.action_span[0]]
        assert tuple(tokens.tolist()) == read.prompt_token_ids
    assert np.concatenate([s.action_mask for s in build.segments]).sum() == build.num_sampled_tokens
