"""ChatModel against a real endpoint on loopback: what it sends, what it reads, and what it refuses to guess."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_model import Say, ScriptedModel, calls, in_turn, text

from gspo_gym.env.chat_model import ChatModel, ChatModelSettings
from gspo_gym.errors import ConfigError, EnvError
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Message, ToolCall

HISTORY = (
    Message("system", "Be brief."),
    Message("user", "Look."),
    Message("assistant", "", (ToolCall("c1", "look", {"at": "Tür"}),), reasoning_content="hm"),
    Message("tool", "oak", tool_call_id="c1", name="look"),
)


def reply(say: Say, messages: tuple[Message, ...] = HISTORY, **options: Any) -> tuple[Message, dict[str, Any]]:
    """The model's answer, and the body of the request that asked for it."""
    model = ScriptedModel(say)

    async def ask(url: str) -> Message:
        chat = ChatModel(ChatModelSettings("m", base_url=f"{url}/v1", api_key_env="NO_SUCH_KEY", max_retries=0))
        try:
            return await chat.reply(messages, **options)
        finally:
            await chat.close()

    with BackgroundServer(model) as server:
        said = asyncio.run(ask(server.url))
    return said, model.asked[0].body


def test_the_conversation_goes_out_as_openai_has_it() -> None:
    said, body = reply(in_turn(text("A door.")), seed=2**31 + 5)
    assert said == Message("assistant", "A door.")
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "Tür"}'}}
            ],
        },
        {"role": "tool", "content": "oak", "tool_call_id": "c1", "name": "look"},
    ]
    assert (body["model"], body["seed"]) == ("m", 5)


def test_calls_come_back_with_their_arguments_read() -> None:
    said, _ = reply(in_turn(calls(("look", '{"at": "door"}'), ("wait", ""))))
    assert said == Message("assistant", "", (ToolCall("id_0", "look", {"at": "door"}), ToolCall("id_1", "wait", {})))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (calls(("look", '{"at":')), "the arguments of 'look' are not JSON"),
        (calls(("look", "[1]")), "expected a tool call"),
        (text(""), "expected a text or a tool call, got an empty message"),
        (500, "InternalServerError"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_empty_answer(answer: Any, problem: str) -> None:
    with pytest.raises(EnvError, match="m at http") as raised:
        reply(in_turn(answer))
    assert problem in str(raised.value)


def test_openais_own_endpoint_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="expected an API key in the variable NO_SUCH_KEY"):
        ChatModel(ChatModelSettings("m", api_key_env="NO_SUCH_KEY"))
