"""ChatModel against a real endpoint on loopback: what it sends, what it reads, and what it refuses to guess."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from provider_refusals import gemini_unknown, openai_parameter, openai_value
from scripted_model import Refused, Say, ScriptedModel, calls, in_turn, text

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

FIELDS = ("max_tokens", "max_completion_tokens", "seed", "temperature")


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


def test_a_seed_and_a_name_for_the_limit_that_an_endpoint_refuses_are_left_out_from_then_on() -> None:
    def say(body: dict[str, Any]) -> Any:
        if "max_tokens" in body:
            return Refused(openai_parameter("max_tokens", "max_completion_tokens"))
        return Refused(gemini_unknown("seed")) if "seed" in body else text("A door.")

    model = ScriptedModel(say)

    async def ask_twice(url: str) -> None:
        chat = ChatModel(ChatModelSettings("m", base_url=f"{url}/v1", api_key_env="NO_SUCH_KEY", max_tokens=9))
        try:
            for _ in range(2):
                assert (await chat.reply(HISTORY, seed=3)).content == "A door."
        finally:
            await chat.close()

    with BackgroundServer(model) as server:
        asyncio.run(ask_twice(server.url))
    sent = [{name: asked.body.get(name) for name in FIELDS} for asked in model.asked]
    last = {"max_tokens": None, "max_completion_tokens": 9, "seed": None, "temperature": 1.0}
    assert sent == [
        {"max_tokens": 9, "max_completion_tokens": None, "seed": 3, "temperature": 1.0},
        {**last, "seed": 3},
        last,
        last,
    ]


def test_openais_own_endpoint_is_told_the_limit_by_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "k")
    model = ScriptedModel(in_turn(text("A door.")))

    async def ask(url: str) -> None:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")  # which the package takes for OpenAI's
        chat = ChatModel(ChatModelSettings("m", api_key_env="A_KEY", max_tokens=9))
        try:
            await chat.reply(HISTORY)
        finally:
            await chat.close()

    with BackgroundServer(model) as server:
        asyncio.run(ask(server.url))
    (asked,) = model.asked
    assert {name: asked.body.get(name) for name in FIELDS} == {
        "max_tokens": None, "max_completion_tokens": 9, "seed": None, "temperature": 1.0
    }  # fmt: skip


def test_a_temperature_that_is_refused_is_an_error() -> None:
    with pytest.raises(EnvError, match=r"'temperature' does not support 1\.0"):
        reply(lambda body: Refused(openai_value("temperature", body["temperature"])))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (calls(("look", '{"at":')), "the arguments of 'look' are not JSON"),
        (calls(("look", "[1]")), "expected a tool call"),
        (text(""), "expected a text or a tool call, got an empty message"),
        (text("") | {"finish_reason": "length"}, "got an empty message, cut off at 512 tokens: it needs more of them"),
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
