"""A session call by call: what the engine is asked for, what the caller gets, and what is kept when something fails."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from seeded_engine import SeededEngine, any_of

from gspo_gym.chat.plain import ToolsIn
from gspo_gym.engine.base import Capabilities
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import (
    ConfigError,
    ContextOverflowError,
    EngineError,
    EnginePoisonedError,
    EngineTimeoutError,
    TemplateError,
    UnknownNameError,
)
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.remote.gateway.capture import (
    Capture,
    CapturedCall,
    ChatCall,
    CompletionCall,
    ForcedCallError,
    SessionClosedError,
    SessionLimitError,
)
from gspo_gym.remote.gateway.capture_build import build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySession, GatewaySessionSettings
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, Message, ParseStatus, Sampling, ToolCall

TOKENIZER = tiny_tokenizer()
QWEN3 = (Path(__file__).parents[2] / "chat/templates/qwen3.jinja").read_text()
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    for name in ("look", "jump")
)


def user(text: str) -> Message:
    return Message("user", text)


def on(engine: Any, **changes: Any) -> GatewaySession:
    base = {"name": "g/0", "sampling_seed": 5, "max_output_tokens": 40, "max_model_len": 400}
    return Gateway(engine, TOKENIZER).open_session(GatewaySessionSettings(**(base | changes)))


def says(*texts: str, **settings: Any) -> ScriptedEngine:
    """Answers with the texts in turn, each closed."""
    return ScriptedEngine([[*TOKENIZER(text)["input_ids"], 258] for text in texts], **settings)


def drive(talk: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(talk())  # type: ignore[arg-type]


async def ask(session: GatewaySession, *messages: Message, **fields: Any) -> CapturedCall:
    return await session.chat(ChatCall(messages, **fields))


# -- what is sampled ---------------------------------------------------------------------------------------------------


def test_each_call_has_its_own_seed_and_the_limits_of_its_place() -> None:
    engine = says("one", "two")

    async def talk() -> None:
        session = on(engine, max_model_len=70, sampling=Sampling(temperature=0.7, top_k=3, min_tokens=2))
        first = await ask(session, user("Hi"), max_tokens=8)
        await ask(session, user("Hi"), first.answer, user("And?"))

    drive(talk)
    first, second = (call.sampling for call in engine.calls)
    assert (first.seed, second.seed) == (child_seed(5, "turn", 0), child_seed(5, "turn", 1))
    # "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" is 1 + 5 + 2 + 1 + 1 + 1 + 10 = 21 tokens, the answer 4,
    # and then "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n": 1 + 1 + 5 + 4 + 1 + 1 + 1 + 10 = 24.
    assert [len(call.prompt_token_ids) for call in engine.calls] == [21, 49]
    assert (first.max_tokens, second.max_tokens) == (8, 70 - 49)
    assert {(s.temperature, s.top_k, s.min_tokens, s.stop_token_ids) for s in (first, second)} == {(0.7, 3, 2, (258,))}
    assert {call.session_id for call in engine.calls} == {"g/0"}


def test_what_the_caller_gets_says_how_it_ended_and_what_it_cost() -> None:
    engine = says(
        "one", "<tool_call>\n{}\n</tool_call>", '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    )

    async def talk() -> list[CapturedCall]:
        session = on(engine, max_model_len=800)
        return [
            await ask(session, user("Hi"), max_tokens=2),
            await ask(session, user("Hi"), tools=TOOLS),
            await ask(session, user("Ho"), tools=TOOLS),
        ]

    short, bad, good = drive(talk)
    assert (short.answer.content, short.finish_reason, short.parse) == ("on", "length", ParseStatus.OK)
    assert (short.num_prompt_tokens, short.num_sampled_tokens) == (21, 2)
    assert repr(short) == "CapturedCall(<0, chat, 21 tokens read, 2 sampled, length>)"
    assert (bad.answer.content, bad.finish_reason) == ("<tool_call>\n{}\n</tool_call>", "stop")
    assert (bad.parse, bad.answer.tool_calls) == (ParseStatus.BAD_TOOL_CALL, ())
    assert bad.error is not None
    assert "name" in bad.error
    assert (good.answer.tool_calls, good.finish_reason) == ((ToolCall("call_0", "look", {}),), "tool_calls")


def test_an_answer_cut_at_a_stop_string_is_trained_on_and_closed_by_what_follows() -> None:
    async def talk() -> Capture:
        session = on(says("seven. Eight.", "more"))
        call = await ask(session, user("Hi"), stop=(". ",))
        assert (call.answer.content, call.finish_reason) == ("seven", "stop")
        await ask(session, user("Hi"), call.answer, user("And?"))
        return await session.freeze()

    capture = drive(talk)
    assert capture.calls[1].context_ids[0] == 258
    assert capture.calls[1].appends
    build = build_trajectory_parts(capture)
    assert build.trained_fraction == 1.0
    assert build.turns[0].finish_reason.value == "stop"


def test_a_plain_completion_is_cut_at_its_stop_strings_too() -> None:
    async def talk() -> CapturedCall:
        return await on(says("seven")).complete(CompletionCall("Hi", stop=("v",)))

    call = drive(talk)
    assert (call.answer.content, call.finish_reason, call.parse) == ("se", "stop", ParseStatus.OK)


# -- tools that must be called -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, QWEN3], ids=["tiny", "qwen3"])
def test_a_forced_call_is_begun_by_the_prompt_and_ended_by_the_model(template: str | None) -> None:
    engine = says(' {"far": 1}}\n</tool_call>', "fine")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template

    async def talk() -> Capture:
        settings = GatewaySessionSettings("g/0", 5, max_output_tokens=40, max_model_len=1500)
        session = Gateway(engine, tokenizer).open_session(settings)
        call = await ask(session, user("Go."), tools=TOOLS, tool_choice="jump")
        assert call.answer.tool_calls == (ToolCall("call_0", "jump", {"far": 1}),)
        assert (call.finish_reason, call.error) == ("tool_calls", None)
        result = Message("tool", "You jumped.", tool_call_id="call_0")
        await ask(session, user("Go."), call.answer, result, tools=TOOLS)
        return await session.freeze()

    capture = drive(talk)
    opening = TOKENIZER('<tool_call>\n{"name": "jump", "arguments":')["input_ids"]
    assert capture.calls[0].context_ids[-len(opening) :].tolist() == opening
    build = build_trajectory_parts(capture)
    [segment] = build.segments
    # Only what the model said of the call is trained on.
    assert TOKENIZER.decode(segment.token_ids[segment.turn_index == 0]) == ' {"far": 1}}\n</tool_call><|im_end|>'
    assert build.trained_fraction == 1.0
    # A full rendering of the same conversation is what the model read.
    text = tokenizer.apply_chat_template(
        [message.to_dict() for message in build.messages[:-1]],
        tools=list(TOOLS),
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.decode(segment.token_ids[: build.turns[1].action_span[0]]) == text


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        (" {oops", "JSON"),
        (' "no object"}\n</tool_call>', "arguments"),
        (" {}}", "</tool_call>"),
        (" {}}\n</tool_call>\n<tool_call>\n{}\n</tool_call>", "name"),
    ],
)
def test_a_forced_call_that_is_none_is_an_error_and_captured(rest: str, problem: str) -> None:
    async def talk() -> tuple[ForcedCallError, Capture]:
        session = on(says(rest), max_model_len=800)
        with pytest.raises(ForcedCallError, match=problem) as caught:
            await ask(session, user("Go."), tools=TOOLS, tool_choice="jump")
        return caught.value, await session.freeze()

    error, capture = drive(talk)
    assert capture.calls == (error.call,)
    assert error.call.parse is ParseStatus.BAD_TOOL_CALL
    assert str(error).startswith("tool_choice 'jump': ")
    assert build_trajectory_parts(capture).counts == {"trained": 1}  # the model made the mistake


def test_a_required_call_may_be_any_that_is_offered() -> None:
    async def talk() -> None:
        session = on(says(' "look", "arguments": {}}\n</tool_call>', ' "fly", "arguments": {}}\n</tool_call>'))
        call = await ask(session, user("Go."), tools=TOOLS, tool_choice="required")
        assert [called.name for called in call.answer.tool_calls] == ["look"]
        with pytest.raises(ForcedCallError, match=r"one of look, jump, got a call of fly"):
            await ask(session, user("Ho."), tools=TOOLS, tool_choice="required")

    drive(talk)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": TOOLS, "tool_choice": "jumpp"}, "did you mean 'jump'"),
        ({"tool_choice": "jump"}, "got none"),
        ({"tool_choice": "required"}, "got none"),
        ({"json_schema": "{}"}, "schema"),
        ({"tools": TOOLS, "tool_choice": "jump", "json_schema": "{}"}, "beside a tool"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": {"temperature": -1.0}}, "temperature"),
        ({"sampling": {"top_p": 0.0}}, "top_p"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sampled(fields: dict[str, Any], problem: str) -> None:
    engine = says("one")

    async def talk() -> Capture:
        session = on(engine)
        with pytest.raises(ConfigError, match=problem):
            await ask(session, user("Hi"), **fields)
        return await session.freeze()

    capture = drive(talk)
    assert engine.calls == []
    assert [failed.kind for failed in capture.failed] == ["config"]


class Obedient(SeededEngine):
    """An engine that says it obeys schemas."""

    schemas: list[str | None]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(True, True, True, 4096, structured_output=True)

    async def generate(self, prompt: Any, sampling: Any, **rest: Any) -> Completion:  # type: ignore[override]
        self.schemas = [*getattr(self, "schemas", []), sampling.json_schema]
        return await super().generate(prompt, sampling, **rest)


def test_a_schema_reaches_an_engine_that_obeys_it_and_is_not_trained_on() -> None:
    engine = Obedient(TOKENIZER, any_of("{}"))
    schema = json.dumps({"type": "object"})

    async def talk() -> Capture:
        session = on(engine)
        await ask(session, user("Hi"), json_schema=schema)
        await ask(session, user("Ho"))
        return await session.freeze()

    build = build_trajectory_parts(drive(talk))
    assert engine.schemas == [schema, None]
    assert build.counts == {"constrained": 1, "trained": 1}


def test_a_schema_beside_a_least_length_is_refused() -> None:
    async def talk() -> Capture:
        session = on(Obedient(TOKENIZER, any_of("{}")))
        with pytest.raises(ConfigError, match=r"response_format: .* which min_tokens = 2 withholds"):
            await ask(session, user("Hi"), json_schema="{}", sampling={"min_tokens": 2})
        return await session.freeze()

    assert [failed.kind for failed in drive(talk).failed] == ["config"]


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("broken"), "engine"),
        (EngineTimeoutError("late"), "engine"),
        (EnginePoisonedError("poisoned"), "poisoned"),
        (ZeroDivisionError("a bug"), "engine"),
    ],
)
def test_a_failed_call_is_no_turn_and_asking_again_gives_what_it_would_have_given(error: Exception, kind: str) -> None:
    engine = SeededEngine(TOKENIZER, any_of("one", "two", "three", "four"))

    async def talk(fails: bool) -> Capture:
        engine.calls.clear()
        engine.failing = {1: error} if fails else {}
        session = on(engine)
        first = await ask(session, user("Hi"))
        if fails:
            with pytest.raises(type(error)):
                await ask(session, user("Hi"), first.answer, user("And?"))
        await ask(session, user("Hi"), first.answer, user("And?"))
        return await session.freeze()

    bumpy, smooth = asyncio.run(talk(True)), asyncio.run(talk(False))
    assert [(failed.index, failed.kind, failed.error) for failed in bumpy.failed] == [(1, kind, str(error))]
    ours, theirs = build_trajectory_parts(bumpy), build_trajectory_parts(smooth)
    assert [s.token_ids.tolist() for s in ours.segments] == [s.token_ids.tolist() for s in theirs.segments]
    assert [use.turn for use in ours.uses] == [0, None, 1]
    assert ours.num_sampled_tokens == theirs.num_sampled_tokens
    assert ours.counts == {"trained": 2, "failed": 1}


def test_an_answer_that_cannot_be_right_is_the_engines_failure() -> None:
    class Overeager(SeededEngine):
        async def generate(self, prompt: Any, sampling: Any, **rest: Any) -> Completion:  # type: ignore[override]
            return Completion([5] * 41, [-1.0] * 41, sampling, [0] * 41)  # type: ignore[arg-type]

    async def talk() -> Capture:
        session = on(Overeager(TOKENIZER, any_of("x")))
        with pytest.raises(EngineError, match="1 to 40"):
            await ask(session, user("Hi"))
        return await session.freeze()

    assert [failed.kind for failed in drive(talk).failed] == ["engine"]


def test_a_conversation_that_does_not_fit_is_refused_at_any_size() -> None:
    engine = says("one", "two")

    async def talk() -> Capture:
        session = on(engine, max_model_len=60)
        first = await ask(session, user("Hi"))
        for text, size in (("x" * 61, "[0-9]+ tokens"), ("x" * 10_000_000, "10000000 characters")):
            with pytest.raises(ContextOverflowError, match=f"has {size}, .* max_model_len = 60"):
                await ask(session, user("Hi"), first.answer, user(text))
            with pytest.raises(ContextOverflowError, match=f"has {size}, .* max_model_len = 60"):
                await session.complete(CompletionCall(text))
        with pytest.raises(ContextOverflowError, match="60 tokens"):
            await session.complete(CompletionCall([7] * 60))
        return await session.freeze()

    assert [failed.kind for failed in drive(talk).failed] == ["overflow"] * 5
    assert len(engine.calls) == 1


def test_what_no_template_or_tokenizer_can_show_is_refused() -> None:
    async def talk() -> Capture:
        session = on(says("one"))
        with pytest.raises(TemplateError, match="surrogate"):
            await ask(session, user("\ud83d"))
        await session.complete(CompletionCall([0, 262]))  # the first id and the last
        for prompt in ([], "", [263], [-1], [True], ["a"]):
            with pytest.raises(ConfigError, match="prompt"):
                await session.complete(CompletionCall(prompt))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="messages"):
            await ask(session)
        return await session.freeze()

    assert [failed.kind for failed in drive(talk).failed] == ["template", *["config"] * 7]


# -- calls that overlap ------------------------------------------------------------------------------------------------


def test_overlapping_calls_are_the_same_in_whatever_order_they_end() -> None:
    def play(order: list[int]) -> list[Any]:
        engine = SeededEngine(TOKENIZER, any_of("one", "two", "three", "four"))

        async def talk() -> Capture:
            engine.waits = {number: asyncio.Event() for number in range(3)}
            session = on(engine)
            calls = [asyncio.create_task(ask(session, user(f"agent {number}"))) for number in range(3)]
            await asyncio.sleep(0)
            for number in order:
                engine.waits[number].set()
                await calls[number]
            return await session.freeze()

        capture = asyncio.run(talk())
        build = build_trajectory_parts(capture)
        return [call.number for call in capture.calls], [s.token_ids.tolist() for s in build.segments], build.turns

    first = play([0, 1, 2])
    assert first[0] == [0, 1, 2]
    assert play([2, 0, 1]) == first


def test_a_number_that_a_failed_call_gave_back_is_taken_by_the_next() -> None:
    engine = SeededEngine(TOKENIZER, any_of("one", "two"))

    async def talk() -> list[int]:
        engine.waits, engine.failing = {0: asyncio.Event(), 1: asyncio.Event()}, {0: EngineError("broken")}
        session = on(engine)
        calls = [asyncio.create_task(ask(session, user(f"agent {number}"))) for number in range(2)]
        await asyncio.sleep(0)
        engine.waits[0].set()
        await asyncio.wait(calls[:1])
        third = await ask(session, user("agent 2"))
        engine.waits[1].set()
        second = await calls[1]
        calls[0].exception()
        return [second.number, third.number]

    assert drive(talk) == [1, 0]


# -- the end of a session ----------------------------------------------------------------------------------------------


def test_a_frozen_session_refuses_and_gives_the_same_capture_again() -> None:
    engine = SeededEngine(TOKENIZER, any_of("one"))

    async def talk() -> None:
        session = on(engine)
        await ask(session, user("Hi"))
        capture = await session.freeze()
        assert session.is_closed
        assert await session.freeze() is capture
        await session.abort()
        for call in (session.chat(ChatCall((user("Hi"),))), session.complete(CompletionCall("Hi"))):
            with pytest.raises(SessionClosedError):
                await call

    drive(talk)
    assert engine.ended == ["g/0"]
    assert engine.aborted == []
    assert len(engine.calls) == 1


@pytest.mark.parametrize("end", ["freeze", "abort"])
def test_calls_in_flight_are_given_up_when_the_session_ends(end: str) -> None:
    engine = SeededEngine(TOKENIZER, any_of("one"))

    async def talk() -> Capture | None:
        session = on(engine)
        await ask(session, user("Hi"))
        engine.waits = {1: asyncio.Event()}
        late = asyncio.create_task(ask(session, user("Ho")))
        await asyncio.sleep(0)
        capture = await getattr(session, end)()
        engine.waits[1].set()  # it comes after all
        with pytest.raises(SessionClosedError):
            await late
        return capture

    capture = drive(talk)
    assert (engine.aborted, engine.ended) == (["g/0"], ["g/0"])
    if capture is not None:
        assert [call.index for call in capture.calls] == [0]
        assert [(failed.index, failed.kind) for failed in capture.failed] == [(1, "open")]


def test_an_aborted_session_has_no_capture() -> None:
    async def talk() -> None:
        session = on(SeededEngine(TOKENIZER, any_of("one")))
        await ask(session, user("Hi"))
        await session.abort()
        await session.abort()
        with pytest.raises(SessionClosedError):
            await session.freeze()

    drive(talk)


def test_a_caller_that_gives_up_leaves_a_failed_call_and_no_number() -> None:
    engine = SeededEngine(TOKENIZER, any_of("one"))

    async def talk() -> Capture:
        session = on(engine)
        engine.waits = {0: asyncio.Event()}
        call = asyncio.create_task(ask(session, user("Hi")))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert (await ask(session, user("Hi"))).number == 0
        return await session.freeze()

    assert [failed.kind for failed in drive(talk).failed] == ["cancelled"]


# -- bounds and addresses ----------------------------------------------------------------------------------------------


def test_a_session_holds_as_many_calls_and_tokens_as_it_may() -> None:
    async def talk() -> None:
        calls = on(says("one", "two", "three"), max_calls=2)
        for text in ("a", "b"):
            await ask(calls, user(text))
        with pytest.raises(SessionLimitError, match="max_calls"):
            await ask(calls, user("c"))
        # "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" is 20 tokens, and 4 are sampled: 24 are held. Another
        # call reserves 20 + 10.
        tokens = on(says("one", "two"), max_captured_tokens=53, max_output_tokens=10)
        await ask(tokens, user("a"))
        with pytest.raises(SessionLimitError, match="holds 24 tokens, and 30 more"):
            await ask(tokens, user("b"))
        assert (await ask(tokens, user("b"), max_tokens=9)).num_sampled_tokens == 4
        assert [failed.kind for failed in (await tokens.freeze()).failed] == ["limit"]

    drive(talk)


def test_a_gateway_knows_its_sessions_by_unguessable_ids() -> None:
    async def talk() -> None:
        gateway = Gateway(says("one"), TOKENIZER, max_sessions=3)
        base = {"sampling_seed": 5, "max_output_tokens": 40, "max_model_len": 400}
        sessions = [gateway.open_session(GatewaySessionSettings("same name", **base)) for _ in range(3)]  # type: ignore[arg-type]
        assert len({session.id for session in sessions}) == 3
        for session in sessions:
            assert re.fullmatch(r"[A-Za-z0-9_-]{32}", session.id)  # 6 bits a letter: 192
            assert gateway.session(session.id) is session
        with pytest.raises(SessionLimitError, match="max_sessions"):
            gateway.open_session(GatewaySessionSettings("one more", **base))  # type: ignore[arg-type]
        await sessions[0].freeze()
        await sessions[1].abort()
        for closed in sessions[:2]:
            with pytest.raises(SessionClosedError):
                gateway.session(closed.id)
        with pytest.raises(UnknownNameError) as caught:
            gateway.session(sessions[2].id[:-1])
        assert sessions[2].id[:8] not in str(caught.value)
        gateway.open_session(GatewaySessionSettings("one more", **base))  # type: ignore[arg-type]
        await gateway.close()
        assert gateway.num_sessions == 0

    drive(talk)


def test_a_session_may_have_template_arguments_of_its_own() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = QWEN3
    engine = says("one", "two")

    async def talk() -> None:
        gateway = Gateway(engine, tokenizer, template_kwargs={"enable_thinking": False})
        base = {"sampling_seed": 5, "max_output_tokens": 40, "max_model_len": 400}
        for kwargs in (None, {}):
            settings = GatewaySessionSettings("g/0", chat_template_kwargs=kwargs, **base)  # type: ignore[arg-type]
            await ask(gateway.open_session(settings), user("Hi"))

    drive(talk)
    prompts = [tokenizer.decode(list(call.prompt_token_ids)) for call in engine.calls]
    assert [prompt.endswith("<think>\n\n</think>\n\n") for prompt in prompts] == [True, False]


@pytest.mark.parametrize("wrong", [{"max_output_tokens": 0}, {"max_model_len": 1}, {"max_calls": 0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        on(says("one"), **wrong)


def test_tools_and_the_date_reach_a_template_that_shows_no_tools() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') + '\n' }}" + (
        Path(__file__).parents[2] / "chat/templates/chatml.jinja"
    ).read_text(encoding="utf-8")
    said = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    day = datetime.date(2001, 2, 3)

    async def talk(tools_in: ToolsIn) -> tuple[str, CapturedCall]:
        engine = says(said)
        gateway = Gateway(engine, tokenizer, tools_in=tools_in, date=day)
        session = gateway.open_session(GatewaySessionSettings("g/0", 5, max_output_tokens=99, max_model_len=2000))
        call = await ask(session, user("Hi"), tools=TOOLS)
        return tokenizer.decode(list(engine.calls[0].prompt_token_ids)), call

    prompt, call = drive(lambda: talk("auto"))
    assert prompt.startswith("2001-02-03\n<|im_start|>system\n# Tools\n")
    assert [(each.name, each.arguments) for each in call.answer.tool_calls] == [("look", {"at": "it"})]
    with pytest.raises(TemplateError, match="does not show tools"):
        drive(lambda: talk("template"))
