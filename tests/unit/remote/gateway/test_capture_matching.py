"""Which call a conversation continues: what clients may change when they repeat it, and what they may not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gspo_gym.base.messages import message_from_wire, message_to_wire
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.remote.gateway.capture import CapturedCall, ChatCall
from gspo_gym.remote.gateway.session import Gateway, GatewaySession, GatewaySessionSettings
from gspo_gym.types import Message, ToolCall

TOKENIZER = tiny_tokenizer()
ASKED = (Message("system", "You play."), Message("user", "Go."))
TOOLS = ({"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}},)
CALL = '<tool_call>\n{"name": "look", "arguments": %s}\n</tool_call>'
CALLS = "<think>\nhm\n</think>\n\nI look. \n" + CALL % '{"far": 2.0, "at": "x"}' + "\n" + CALL % "{}"
RESULTS = (Message("tool", "A", tool_call_id="call_0"), Message("tool", "B", tool_call_id="call_1"))

Change = Callable[[Message], Message]


def saying(*answers: str) -> ScriptedEngine:
    return ScriptedEngine([[*TOKENIZER(text)["input_ids"], 258] for text in answers])


def talk(engine: ScriptedEngine, run: Callable[[GatewaySession], Awaitable[Any]]) -> Any:
    async def play() -> Any:
        settings = GatewaySessionSettings("g/0", 5, max_output_tokens=200, max_model_len=2000)
        return await run(Gateway(engine, TOKENIZER).open_session(settings))

    return asyncio.run(play())


async def ask(session: GatewaySession, *messages: Message, **fields: Any) -> CapturedCall:
    return await session.chat(ChatCall(messages, tools=TOOLS, **fields))


def parent_after(change: Change, *, asked: Change = lambda message: message) -> int | None:
    """Whether the second call continues the first, if the client changes the answer so, and what it had asked so."""

    async def run(session: GatewaySession) -> int | None:
        first = await ask(session, *ASKED)
        assert len(first.answer.tool_calls) == 2
        second = await ask(session, *map(asked, ASKED), change(first.answer), *RESULTS)
        return second.parent

    found: int | None = talk(saying(CALLS, "done"), run)
    return found


def with_calls(answer: Message, **changes: Any) -> Message:
    return dataclasses.replace(
        answer, tool_calls=(dataclasses.replace(answer.tool_calls[0], **changes), *answer.tool_calls[1:])
    )


SAME: dict[str, Change] = {
    "itself": lambda answer: answer,
    "over the wire": lambda answer: message_from_wire(message_to_wire(answer), where="here"),
    "as JSON of a language with one kind of number": lambda answer: with_calls(
        answer, arguments={"at": "x", "far": json.loads("2")}
    ),
    "without its reasoning": lambda answer: dataclasses.replace(answer, reasoning_content=None),
    "with white space trimmed": lambda answer: dataclasses.replace(answer, content=answer.content.strip()),
    "with white space added": lambda answer: dataclasses.replace(answer, content=f"\n {answer.content}\n"),
}
OTHER: dict[str, Change] = {
    "another text": lambda answer: dataclasses.replace(answer, content="I do not look."),
    "no text": lambda answer: dataclasses.replace(answer, content=""),
    "another tool": lambda answer: with_calls(answer, name="jump"),
    "other arguments": lambda answer: with_calls(answer, arguments={"far": 2.5, "at": "x"}),
    "one call less": lambda answer: dataclasses.replace(answer, tool_calls=answer.tool_calls[:1]),
    "the calls in another order": lambda answer: dataclasses.replace(answer, tool_calls=answer.tool_calls[::-1]),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_an_answer_is_recognised(change: Change) -> None:
    assert parent_after(change) == 0


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_another_answer_is_a_conversation_of_its_own(change: Change) -> None:
    assert parent_after(change) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda message: dataclasses.replace(message, content=message.content + " "),
        lambda message: dataclasses.replace(message, name="somebody"),
        lambda message: dataclasses.replace(message, role="user"),
    ],
    ids=["content", "name", "role"],
)
def test_what_the_caller_said_itself_must_be_the_same(change: Change) -> None:
    assert parent_after(lambda answer: answer, asked=lambda m: change(m) if m.role == "system" else m) is None


def test_other_tools_are_another_conversation() -> None:
    async def run(session: GatewaySession) -> int | None:
        first = await ask(session, *ASKED)
        second = await session.chat(ChatCall((*ASKED, first.answer, Message("user", "And?"))))
        return second.parent

    assert talk(saying("one", "two"), run) is None


def test_the_longest_known_conversation_is_continued() -> None:
    async def run(session: GatewaySession) -> list[int | None]:
        first = await ask(session, *ASKED)
        longer = (*ASKED, first.answer, Message("user", "And?"))
        second = await ask(session, *longer)
        third = await ask(session, *longer, second.answer, Message("user", "And then?"))
        branch = await ask(session, *longer, Message("assistant", "made up"), Message("user", "And then?"))
        same = await ask(session, *ASKED, first.answer)  # nothing follows on the answer: the model is asked to speak on
        return [call.parent for call in (second, third, branch, same)]

    assert talk(saying("one", "two", "three", "four", "five"), run) == [0, 1, 0, None]


def test_results_of_tools_are_shown_under_the_ids_that_the_model_knows() -> None:
    """A client that gives the calls ids of its own, and answers them in another order, changes no token."""

    async def run(session: GatewaySession) -> tuple[tuple[Message, ...], int | None]:
        first = await ask(session, *ASKED)

        def answered(ids: dict[str, str]) -> list[Message]:
            calls = tuple(dataclasses.replace(call, id=ids[call.id]) for call in first.answer.tool_calls)
            results = [dataclasses.replace(m, tool_call_id=ids[m.tool_call_id or ""]) for m in RESULTS[::-1]]
            return [*ASKED, dataclasses.replace(first.answer, tool_calls=calls), *results]

        second = await ask(session, *answered({"call_0": "0xbeef", "call_1": "0xcafe"}))
        again = answered({"call_0": "7", "call_1": "8"})  # as a client that makes them up for every request
        third = await ask(session, *again, second.answer, Message("user", "And?"))
        return second.new_messages, third.parent

    new, parent = talk(saying(CALLS, "done", "well"), run)
    assert [message.tool_call_id for message in new] == ["call_1", "call_0"]
    assert parent == 1


def test_results_that_are_swapped_are_another_conversation() -> None:
    async def run(session: GatewaySession) -> int | None:
        first = await ask(session, *ASKED)
        second = await ask(session, *ASKED, first.answer, *RESULTS)
        swapped = [
            dataclasses.replace(a, tool_call_id=b.tool_call_id) for a, b in zip(RESULTS, RESULTS[::-1], strict=True)
        ]
        third = await ask(session, *ASKED, first.answer, *swapped, second.answer, Message("user", "And?"))
        return third.parent

    assert talk(saying(CALLS, "done", "well"), run) == 0


def test_of_equal_answers_the_one_with_the_repeated_reasoning_is_continued_else_the_last() -> None:
    answers = tuple(f"<think>\n{thought}\n</think>\n\nseven" for thought in ("a", "b", "c"))

    async def run(session: GatewaySession) -> list[int | None]:
        calls = [await ask(session, *ASKED) for _ in answers]
        assert {call.answer.content for call in calls} == {"seven"}
        thought = await ask(session, *ASKED, calls[1].answer, Message("user", "And?"))
        silent = dataclasses.replace(calls[1].answer, reasoning_content=None)
        last = await ask(session, *ASKED, silent, Message("user", "And then?"))
        return [thought.parent, last.parent]

    assert talk(saying(*answers, "one", "two"), run) == [1, 2]


def test_an_answer_that_could_not_be_read_is_recognised_by_its_text() -> None:
    async def run(session: GatewaySession) -> tuple[int | None, bool]:
        first = await ask(session, *ASKED)
        assert first.error is not None
        echoed = Message("assistant", first.answer.content)
        second = await ask(session, *ASKED, echoed, Message("user", "That was no call."))
        return second.parent, second.appends

    assert talk(saying("<tool_call>\n{oops", "sorry"), run) == (0, True)


def test_what_the_model_said_stays_as_sampled_whatever_the_client_repeats() -> None:
    """White space, a number's spelling and reasoning that a client changed do not reach the next prompt."""

    async def run(session: GatewaySession) -> list[int]:
        first = await ask(session, *ASKED)
        calls = tuple(
            ToolCall(call.id, call.name, json.loads(json.dumps(call.arguments))) for call in first.answer.tool_calls
        )
        changed = Message("assistant", first.answer.content.strip(), tool_calls=calls)
        await ask(session, *ASKED, changed, *RESULTS)
        return [*first.context_ids.tolist(), *first.completion.token_ids.tolist()]

    engine = saying(CALLS, "done")
    before = talk(engine, run)
    assert list(engine.calls[1].prompt_token_ids[: len(before)]) == before


@pytest.mark.parametrize(("repeated", "parent"), [([1.0, 2.0], 0), ([1, 3], None), ([1], None)])
def test_lists_in_arguments_are_compared_item_by_item(repeated: list[float], parent: int | None) -> None:
    async def run(session: GatewaySession) -> int | None:
        first = await ask(session, *ASKED)
        (call,) = first.answer.tool_calls
        changed = dataclasses.replace(call, arguments={"at": repeated})
        answer = dataclasses.replace(first.answer, tool_calls=(changed,))
        return (await ask(session, *ASKED, answer, RESULTS[0])).parent

    assert talk(saying(CALL % '{"at": [1, 2]}', "done"), run) == parent
