"""The gateway over real HTTP: answers, streams, errors and secrets, as OpenAI's client and bare requests see them."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest
import served_gateway as gw

from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.errors import RecordError, TemplateError
from gspo_gym.remote.gateway.capture_build import build_trajectory_parts
from gspo_gym.remote.gateway.replay import failure_reply
from gspo_gym.types import Message, ToolCall

LOOK_AT_DOOR = ToolCall("call_0", "look", {"at": "door"})
HELLO = {"messages": gw.user("Hello.")}


def test_a_conversation_through_openais_client_continues_its_own_tokens() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("I look.", LOOK_AT_DOOR, "A door.")) as served:
            session = served.open()
            client = served.client(session)
            messages: list[Any] = [{"role": "system", "content": "Be brief."}, *gw.user("Hi.")]
            first = await client.chat.completions.create(model="any", messages=messages, tools=[gw.LOOK])
            assert (first.object, first.model) == ("chat.completion", "policy")
            assert first.choices[0].message.content == "I look."
            assert first.choices[0].finish_reason == "stop"
            messages += [first.choices[0].message.model_dump(), *gw.user("Do.")]
            second = await client.chat.completions.create(model="any", messages=messages, tools=[gw.LOOK])
            said = second.choices[0].message
            assert said.content is None
            assert second.choices[0].finish_reason == "tool_calls"
            assert said.tool_calls is not None
            assert said.tool_calls[0].to_dict() == {
                "id": "call_0",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at": "door"}'},
            }
            messages += [said.model_dump(), {"role": "tool", "content": "oak", "tool_call_id": "call_0"}]
            third = await client.chat.completions.create(model="any", messages=messages, tools=[gw.LOOK])
            capture = await session.freeze()
            assert [(call.parent, call.appends) for call in capture.calls] == [(None, False), (0, True), (1, True)]
            assert len(build_trajectory_parts(capture).segments) == 1
            assert third.usage is not None
            assert third.usage.prompt_tokens == capture.calls[2].num_prompt_tokens
            assert third.usage.completion_tokens == len("A door.") + 1  # a token is a byte, and the stop token
            assert len({first.id, second.id, third.id}) == 3

    gw.run(check)


def test_text_that_is_no_action_is_answered_with_what_is_wrong_with_it() -> None:
    async def check() -> None:
        broken = '<tool_call>{"name": "look", "arguments": {</tool_call>'
        async with gw.served(gw.saying(broken)) as served:
            answer = (await served.post(served.open(), HELLO | {"tools": [gw.LOOK]})).json()
            choice = answer["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (broken, "stop")
            assert "tool_calls" not in choice["message"]
            assert answer["gspo_gym"]["parse"] == "bad_tool_call"
            assert answer["gspo_gym"]["error"].startswith("tool call 1: not valid JSON")

    gw.run(check)


def test_reasoning_is_given_apart_from_the_answer() -> None:
    async def check() -> None:
        async with gw.served(gw.saying(Message("assistant", "Seven.", reasoning_content="3 + 4"))) as served:
            message = (await served.post(served.open(), HELLO)).json()["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("Seven.", "3 + 4")

    gw.run(check)


@pytest.mark.parametrize(
    "said", ["Größe: 7", LOOK_AT_DOOR, Message("assistant", "x", reasoning_content="hm"), "ab\ufffd"]
)
def test_a_stream_says_what_the_answer_says_and_ends_as_streams_do(said: gw.Said) -> None:
    async def check() -> None:
        async with gw.served(gw.saying(said, said)) as served:
            body = HELLO | {"tools": [gw.LOOK], "logprobs": True}
            whole = (await served.post(served.open(), body)).json()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await served.post(served.open(), body | options)
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = answer.text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == whole["usage"]
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
            assert finishes == [None] * (len(chunks) - 2) + [whole["choices"][0]["finish_reason"]]
            assert assembled(chunks) == whole["choices"][0]["message"] | {"content": content_of(whole)}
            logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1] if chunk["choices"][0]["logprobs"]]
            assert logprobs == [whole["choices"][0]["logprobs"]]

    gw.run(check)


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from deltas."""
    message: dict[str, Any] = {"content": "", "refusal": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message |= {key: delta[key] for key in ("role", "reasoning_content") if key in delta}
            message["content"] += delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({key: value for key, value in part.items() if key != "index"})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


def content_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def test_openais_client_reads_the_stream() -> None:
    async def check() -> None:
        async with gw.served(gw.saying(LOOK_AT_DOOR)) as served:
            client = served.client(served.open())
            strict: Any = gw.LOOK | {"function": gw.LOOK["function"] | {"strict": True}}  # openai 2 streams no other
            async with client.chat.completions.stream(model="any", messages=gw.user("Hi."), tools=[strict]) as stream:
                final = await stream.get_final_completion()
            assert final.choices[0].finish_reason == "tool_calls"
            assert final.choices[0].message.tool_calls is not None
            assert final.choices[0].message.tool_calls[0].function.arguments == '{"at": "door"}'

    gw.run(check)


def test_logprobs_are_those_that_were_sampled() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("Hi é", logprob=-0.25)) as served:
            session = served.open()
            answer = await served.client(session).chat.completions.create(
                model="any", messages=gw.user("Hi."), logprobs=True, top_logprobs=2
            )
            assert answer.choices[0].logprobs is not None
            tokens = answer.choices[0].logprobs.content
            assert tokens is not None
            call = (await session.freeze()).calls[0]
            assert [token.logprob for token in tokens] == call.completion.logprobs.tolist() == [-0.25] * 6
            assert [token.bytes for token in tokens[:3]] == [[72], [105], [32]]
            assert tokens[3].bytes is None  # half of é, which is no text

    gw.run(check)


def test_text_completions_continue_a_prompt_as_it_stands() -> None:
    async def check() -> None:
        async with gw.served(gw.saying(" upon a time", " more", " ids")) as served:
            session = served.open()
            client = served.client(session)
            answer = await client.completions.create(model="any", prompt="Once", logprobs=1)
            assert (answer.object, answer.choices[0].text) == ("text_completion", " upon a time")
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.text_offset is not None
            assert answer.choices[0].logprobs.text_offset[:3] == [0, 1, 2]
            stream = await client.completions.create(model="any", prompt="Once more", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == " more"
            assert (await client.completions.create(model="any", prompt=[72, 105])).choices[0].text == " ids"
            assert (await session.freeze()).calls[2].context_ids.tolist() == [72, 105]

    gw.run(check)


def test_responses_are_answered_with_items_and_continue_each_other() -> None:
    async def check() -> None:
        async with gw.served(gw.saying(LOOK_AT_DOOR, "Oak.")) as served:
            session = served.open()
            client = served.client(session)
            tool = {"type": "function", **gw.LOOK["function"], "strict": False}
            first = await client.responses.create(model="any", input="Look.", instructions="Brief.", tools=[tool])
            (call,) = first.output
            assert (call.type, call.status, first.status) == ("function_call", "completed", "completed")
            assert call.type == "function_call"
            assert (call.call_id, call.name, call.arguments) == ("call_0", "look", '{"at": "door"}')
            second = await client.responses.create(
                model="any",
                instructions="Brief.",
                previous_response_id=first.id,
                input=[{"type": "function_call_output", "call_id": call.call_id, "output": "oak"}],
                tools=[tool],
            )
            assert second.output_text == "Oak."
            assert second.usage is not None
            capture = await session.freeze()
            assert second.usage.total_tokens == capture.calls[1].num_prompt_tokens + len("Oak.") + 1
            assert [(c.parent, c.appends) for c in capture.calls] == [(None, False), (0, True)]

    gw.run(check)


def test_responses_are_streamed_as_events() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("Oak.", LOOK_AT_DOOR)) as served:
            client = served.client(served.open())
            async with client.responses.stream(model="any", input="Look.") as stream:
                kinds = [event.type async for event in stream]
                assert (await stream.get_final_response()).output_text == "Oak."
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            tool: Any = {"type": "function", **gw.LOOK["function"], "strict": False}
            async with client.responses.stream(model="any", input="Again.", tools=[tool]) as stream:
                (call,) = (await stream.get_final_response()).output
            assert call.type == "function_call"
            assert call.arguments == '{"at": "door"}'

    gw.run(check)


def test_a_response_that_was_cut_off_is_incomplete() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("A long answer.")) as served:
            client = served.client(served.open())
            answer = await client.responses.create(model="any", input="Talk.", max_output_tokens=6)
            assert (answer.status, answer.output_text) == ("incomplete", "A long")
            assert answer.incomplete_details is not None
            assert answer.incomplete_details.reason == "max_output_tokens"

    gw.run(check)


def test_models_lists_the_policy() -> None:
    async def check() -> None:
        async with gw.served(gw.saying()) as served:
            session = served.open()
            assert [model.id async for model in served.client(session).models.list()] == ["policy"]
            for url in (f"{served.url}/v1/models", f"{served.url}/models?cid={session.id}/v1/models"):
                assert (await served.http.get(url)).json()["data"][0]["id"] == "policy"
            assert (await served.http.get(f"{served.url}/t/other/v1/models")).status_code == 404
            assert (await served.http.get(f"{served.url}/t/{session.id}")).status_code == 404

    gw.run(check)


async def status_and_error(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error["code"], answer.headers.get("x-should-retry", "")


@pytest.mark.parametrize(
    ("engine", "body", "expected"),
    [
        (gw.saying, {"messages": gw.user("Hi."), "n": 2}, (400, "unsupported_value", "false")),
        (gw.saying, {}, (400, "invalid_value", "false")),
        (gw.saying, HELLO | {"max_tokens": 0}, (400, "invalid_value", "false")),
        (gw.saying, {"messages": gw.user("long " * 99)}, (400, "context_length_exceeded", "false")),
        (gw.saying, HELLO | {"response_format": {"type": "json_object"}}, (400, "unsupported_value", "false")),
        (lambda: ScriptedEngine([], failures=Failures(every=1)), HELLO, (503, "engine_error", "")),
        (
            lambda: gw.saying("x", latency=Latency(1.0), failures=Failures(every=1, kind="hang")),
            HELLO,
            (503, "engine_timeout", ""),
        ),
        (
            lambda: gw.saying('no", "arguments": {}'),
            HELLO | {"tools": [gw.LOOK], "tool_choice": "required"},
            (422, "invalid_tool_call", "false"),
        ),
    ],
)
def test_errors_are_openais_and_say_whether_to_try_again(
    engine: Any, body: Any, expected: tuple[int, str, str]
) -> None:
    async def check() -> None:
        async with gw.served(engine()) as served:
            session = served.open(
                max_model_len=320, call_timeout_seconds=0.05 if "engine_timeout" in expected else 60.0
            )
            assert await status_and_error(await served.post(session, body)) == expected

    gw.run(check)


@pytest.mark.parametrize("error", [TemplateError("no"), RecordError("no")])
def test_what_the_caller_said_wrong_is_400_for_good(error: Exception) -> None:
    reply = failure_reply(error)
    assert (reply.status, dict(reply.headers)) == (400, {"x-should-retry": "false"})


def test_a_poisoned_engine_is_503_for_good() -> None:
    async def check() -> None:
        engine = gw.saying("x")
        async with gw.served(engine) as served:
            engine.poison("an update failed half-way")
            answer = await served.post(served.open(), HELLO)
            assert await status_and_error(answer) == (503, "engine_poisoned", "false")

    gw.run(check)


def test_a_session_that_is_over_is_409_and_one_that_is_full_429() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("a", "b")) as served:
            session = served.open(max_calls=1)
            assert (await served.post(session, HELLO)).status_code == 200
            full = await served.post(session, HELLO | {"max_tokens": 5})
            assert await status_and_error(full) == (429, "session_limit_exceeded", "false")
            await session.freeze()
            for _ in range(2):  # also what was answered before
                assert await status_and_error(await served.post(session, HELLO)) == (409, "session_closed", "false")
            with pytest.raises(openai.ConflictError):
                await served.client(session, max_retries=3).chat.completions.create(model="x", messages=gw.user("Hi."))

    gw.run(check)


def test_other_methods_and_paths_are_refused() -> None:
    async def check() -> None:
        async with gw.served(gw.saying()) as served:
            url = f"{served.url}/t/{served.open().id}/v1"
            put = await served.http.put(f"{url}/chat/completions", json=HELLO)
            assert await status_and_error(put) == (405, "method_not_allowed", "false")
            embeddings = await served.http.post(f"{url}/embeddings", json=HELLO)
            assert await status_and_error(embeddings) == (404, "not_found", "false")
            garbage = await served.http.post(url, content=b"{not json")
            assert await status_and_error(garbage) == (400, "invalid_json", "false")
            assert (await served.http.get(f"{served.url}/health")).json() == {"status": "ok"}

    gw.run(check)


def test_what_nobody_foresaw_is_500_and_its_text_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    class Surprising(ScriptedEngine):
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise KeyError("a secret of ours")

    async def check() -> None:
        async with gw.served(Surprising([])) as served:
            answer = await served.post(served.open(), HELLO)
            assert await status_and_error(answer) == (500, "internal_error", "")
            assert "secret" not in answer.text

    gw.run(check)
    assert "a secret of ours" in caplog.text


def test_a_foreign_key_is_neither_needed_nor_repeated_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="gspo_gym")
    caplog.set_level(logging.DEBUG, logger="uvicorn")
    key = "sk-FOREIGN-0123456789"
    headers = {"authorization": f"Bearer {key}", "x-api-key": key, "cookie": f"session={key}"}

    async def check() -> None:
        async with gw.served(ScriptedEngine([gw.ids_of("Hi.")], failures=Failures(every=2))) as served:
            session = served.open()
            answers = [
                await served.post(session, HELLO, headers=headers),
                await served.post(session, HELLO | {"n": 2}, headers=headers),
                await served.post(session, HELLO | {"max_tokens": 7}, headers=headers),
                await served.http.post(f"{served.url}/t/x/v1", json=HELLO, headers=headers),
                await served.http.get(f"{served.url}/v1/models", headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [200, 400, 503, 404, 200]
            for answer in answers:
                assert key[:9] not in answer.text + str(answer.headers)

    gw.run(check)
    assert key[:9] not in caplog.text


def test_pages_in_browsers_are_kept_out_and_long_conversations_are_let_in() -> None:
    async def check() -> None:
        async with gw.served(gw.saying("x")) as served:
            session = served.open()
            page = await served.post(session, HELLO, headers={"origin": "https://evil.example"})
            assert (page.status_code, page.json()["error"]["code"]) == (403, "unknown_origin")
            deep = await served.http.post(f"{served.url}/t/{session.id}", content=b"[" * 5000 + b"]" * 5000)
            assert (deep.status_code, deep.json()["error"]["code"]) == (400, "body_too_deep")
            long = await served.post(
                session, HELLO | {"user": "x" * 2_000_000}
            )  # the limit of other servers here is 1 MB
            assert long.status_code == 200

    gw.run(check)


@pytest.mark.parametrize(
    ("headers", "metadata", "is_trained"),
    [
        ({}, None, None),
        ({"x-gspo-gym-trained": "false"}, None, False),
        ({"x-gspo-gym-trained": "True"}, None, True),
        ({}, {"gspo_gym_trained": "false"}, False),
        ({"x-gspo-gym-trained": "true"}, {"gspo_gym_trained": "false"}, True),
    ],
)
def test_a_caller_can_say_whether_a_call_is_trained_on(
    headers: dict[str, str], metadata: Any, is_trained: bool | None
) -> None:
    async def check() -> None:
        async with gw.served(gw.saying("x")) as served:
            session = served.open()
            body = HELLO if metadata is None else HELLO | {"metadata": metadata}
            assert (await served.post(session, body, headers=headers)).status_code == 200
            assert (await session.freeze()).calls[0].is_trained is is_trained

    gw.run(check)
