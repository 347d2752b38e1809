"""A model over OpenAI's protocol, asked by OpenAI's own client: choices, streams, stops, logprobs, tools, refusals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from agreement import plain_logprobs
from chat_families import FAMILIES, tokenizer_of
from served_gateway import LOOK, RENDERER, TOKENIZER, Said, ids_of, run, until, user

from gspo_gym.chat.renderer import Renderer
from gspo_gym.cli.models_serve import PromptScorer
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.remote.gateway.model_app import Served, create_model_app
from gspo_gym.remote.gateway.slices import GrowingText, SlicedEngine
from gspo_gym.remote.serving import LoopServer
from gspo_gym.types import Message, Sampling, ToolCall

MODEL = "tiny@3"


@contextlib.asynccontextmanager
async def asking(
    engine: Engine, *, key: str | None = None, max_tokens: int = 64, **more: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a server with that engine, which tries nothing twice."""
    served = Served(engine, TOKENIZER, MODEL, max_tokens, Sampling(), {}, **more)
    server = LoopServer(create_model_app(served, api_key=key), host="127.0.0.1", port=0)
    await server.start()
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0, http_client=http)
    async with client:
        try:
            yield client
        finally:
            await engine.close()
            await server.stop()


def saying(reply: Callable[[str], Said]) -> ScriptedEngine:
    """An engine that answers what it reads, and goes on where an answer was begun."""
    opening = TOKENIZER.encode("<|im_start|>assistant\n", add_special_tokens=False)

    def go_on(prompt: Sequence[int], _turn: int) -> list[int]:
        begins = max(i for i in range(len(prompt)) if list(prompt[i : i + len(opening)]) == opening) + len(opening)
        return ids_of(reply(TOKENIZER.decode(list(prompt[:begins]))))[len(prompt) - begins :]

    return ScriptedEngine(go_on)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("tiny:qwen3-64", seed=3)


def local(policy: Policy) -> LocalEngine:
    return LocalEngine(policy.model, max_model_len=512, max_batch_size=8)


def test_several_choices_streamed_or_not_are_the_same_samples_with_the_models_own_logprobs(policy: Policy) -> None:
    async def test() -> None:
        async with asking(local(policy)) as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": user("Hi."), "n": 3, "seed": 5, "logprobs": True}
            whole = await client.chat.completions.create(**asked, max_tokens=40)
            texts, logprobs, ends = ["", "", ""], [[], [], []], [None, None, None]
            num_chunks, usage = 0, None
            options = {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await client.chat.completions.create(**asked, **options, max_tokens=40):
                num_chunks, usage = num_chunks + 1, chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
                    ends[choice.index] = choice.finish_reason or ends[choice.index]
            assert texts == [choice.message.content for choice in whole.choices]
            assert ends == [choice.finish_reason for choice in whole.choices]
            assert len(set(texts)) == 3
            assert usage == whole.usage
            assert sum(map(len, logprobs)) == whole.usage.completion_tokens
            assert num_chunks > 3 * 4  # three slices of 16 tokens each, and not one lump
            first = [token.logprob for tokens in logprobs for token in tokens]
            second = [token.logprob for choice in whole.choices for token in choice.logprobs.content]
            np.testing.assert_allclose(first, second, atol=1e-5)  # float32, in batches of other shapes

    run(test)


def test_sliced_samples_have_the_logprobs_of_a_plain_forward(policy: Policy) -> None:
    prompt, seen = [72, 105], []

    async def test() -> None:
        engine = local(policy)
        sliced = SlicedEngine(engine, grown=lambda ids: seen.append(len(ids)))
        sampling = SamplingParams(max_tokens=40, stop_token_ids=(), seed=1)
        answer = await sliced.generate(prompt, sampling, session_id="s")
        await engine.close()
        assert seen == [16, 32, 40]
        expected = plain_logprobs(policy.model, prompt, answer.token_ids.tolist())
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5)
        assert engine.counters.num_read_tokens < 2 + 40  # the slices read what is new, and not the prompt again

    run(test)


def test_an_answer_ends_at_a_stop_string_which_is_no_part_of_it() -> None:
    async def test() -> None:
        async with asking(saying(lambda _: "One, two, three.")) as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": user("Count."), "stop": [", th"]}
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert whole.choices[0].message.content == said == "One, two"
            assert whole.choices[0].finish_reason == "stop"

    run(test)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma 4", "muse", "mistral nemo", "seed oss"])
def test_a_familys_headers_and_tags_are_never_shown_as_its_answer_grows(name: str) -> None:
    renderer = Renderer(tokenizer_of(next(family for family in FAMILIES if family.name == name).template))
    ids = renderer.action_ids(Message("assistant", "Seven, a < b [c].", reasoning_content="hm"))[:-1]
    growing = GrowingText(renderer)
    pieces = [growing.grow(ids[:count]) for count in range(1, len(ids) + 1)]
    assert ["".join(each).strip("\n") for each in zip(*pieces, strict=True)] == ["hm", "Seven, a < b [c]."]


@pytest.mark.parametrize(
    ("text", "stops", "reasoning", "content"),
    [
        ("Zwölf Boxkämpfer 🥊 jagen", (), "", "Zwölf Boxkämpfer 🥊 jagen"),
        ("One, two, three.", (", th",), "", "One, two"),
        ("One, two, t", (", th",), "", "One, two, t"),
        ("<think>\nhm, a < b\n</think>\n\nNo.", (), "hm, a < b", "No."),
        ("1 < 2 and </tool", (), "", "1 < 2 and </tool"),
    ],
)
def test_pieces_of_a_text_that_grows_by_single_tokens_are_never_taken_back(
    text: str, stops: tuple[str, ...], reasoning: str, content: str
) -> None:
    # Each character by itself: tags, too, come in parts.
    ids = [token for character in text for token in TOKENIZER.encode(character, add_special_tokens=False)]
    growing, pieces = GrowingText(RENDERER, stops), []
    for count in range(1, len(ids) + 1):
        pieces.append(growing.grow(ids[:count]))
        holds_stop = any(stop in TOKENIZER.decode(ids[:count]) for stop in stops)
        assert growing.ends(ids[:count]) is holds_stop
        if holds_stop:
            break
    shown = ["".join(each) for each in zip(*pieces, strict=True)]
    assert content.startswith(shown[1])  # all that was shown is a part of the answer
    assert len(shown[1]) >= len(content) - len("</tool_call>")  # and little of it had to wait
    last = growing.rest(Message("assistant", content, reasoning_content=reasoning))
    assert [shown[0] + last[0], shown[1] + last[1]] == [reasoning, content]


@pytest.mark.parametrize(
    ("text", "stops", "num_waiting"),
    [
        ("One, two", (), 0),
        ("One, two", ("!",), 0),
        ("One, two", ("six", "three"), 4),  # the next letter may complete a "three"
        ("1 <", (), 1),
        ("1 < 2, and so on", (), 0),  # 14 characters: no tag is that long
    ],
)
def test_no_more_of_a_text_waits_than_may_be_a_tag_or_a_stop(
    text: str, stops: tuple[str, ...], num_waiting: int
) -> None:
    growing = GrowingText(RENDERER, stops)
    growing.grow(TOKENIZER.encode(text, add_special_tokens=False))
    assert growing.content == text[: len(text) - num_waiting]


def test_tools_are_called_and_reasoning_is_apart_also_in_a_stream() -> None:
    call = ToolCall("call_0", "look", {"at": "the door"})

    async def test() -> None:
        async with asking(
            saying(lambda prompt: call if "Look" in prompt else "<think>\nhm\n</think>\n\nNo.")
        ) as client:
            asked: dict[str, Any] = {"model": MODEL, "messages": user("Look!"), "tools": [LOOK]}
            whole = await client.chat.completions.create(**asked)
            (tool,) = whole.choices[0].message.tool_calls
            assert (tool.function.name, tool.function.arguments) == ("look", '{"at": "the door"}')
            assert whole.choices[0].finish_reason == "tool_calls"
            stream = await client.chat.completions.create(**asked, stream=True)
            calls = [call for chunk in [c async for c in stream] for call in chunk.choices[0].delta.tool_calls or []]
            assert calls[0].function.name == "look"
            assert "".join(call.function.arguments for call in calls) == '{"at": "the door"}'
            asked = {"model": MODEL, "messages": user("Think!")}
            deltas = [
                chunk.choices[0].delta async for chunk in await client.chat.completions.create(**asked, stream=True)
            ]
            assert "".join(delta.content or "" for delta in deltas) == "No."
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"

    run(test)


def test_models_are_listed_and_other_apis_answer() -> None:
    async def test() -> None:
        async with asking(saying(lambda _: "Fine.")) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            assert (await client.models.retrieve(MODEL)).owned_by == "gspo-gym"
            assert (await client.responses.create(model=MODEL, input="Hi.")).output_text == "Fine."

    run(test)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"model": "gpt-5"}, 404, "expected 'tiny@3'"),
        ({"messages": []}, 400, "at least one message"),
        ({"temperature": 3}, 400, "from 0 to 2"),
        ({"n": 65}, 400, "at most 64"),
        ({"n": 0}, 400, "at least 1"),
        ({"seed": -1}, 400, "whole number"),
        ({"stream": True, "messages": user("word " * 600)}, 400, "no room"),
        ({"response_format": {"type": "json_object"}}, 400, "cannot obey"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_with_a_reason(
    policy: Policy, change: dict[str, Any], status: int, message: str
) -> None:
    async def test() -> None:
        async with asking(local(policy)) as client:
            with pytest.raises(openai.APIStatusError, match=message) as caught:
                await client.chat.completions.create(**{"model": MODEL, "messages": user("Hi."), **change})
            assert caught.value.status_code == status

    run(test)


def test_where_a_key_is_set_only_those_who_have_it_may_ask() -> None:
    async def test() -> None:
        async with asking(saying(lambda _: "Fine."), key="right") as client:
            assert (await client.chat.completions.create(model=MODEL, messages=user("Hi."))).choices
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").chat.completions.create(model=MODEL, messages=user("Hi."))

    run(test)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_frees_the_engine(policy: Policy, streams: bool) -> None:
    async def test() -> None:
        engine = local(policy)
        async with asking(engine, max_tokens=160) as client, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            body = {"model": MODEL, "messages": user("Hi."), "n": 4, "stream": False, "seed": 1}
            whole = (await http.post(f"{client.base_url}chat/completions", json=body)).json()["usage"]
            begun = engine.counters.num_sampled_tokens
            body["stream"] = streams
            asked = asyncio.create_task(http.post(f"{client.base_url}chat/completions", json=body))
            await until(lambda: engine.counters.num_sampled_tokens > begun + 8)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            while (await engine.health()).num_in_flight:  # noqa: ASYNC110  # nothing says so by an event
                await asyncio.sleep(0)
            before = engine.counters.num_sampled_tokens
            assert before - begun < whole["completion_tokens"] / 2
            answer = await client.chat.completions.create(model=MODEL, messages=user("Hi."), max_tokens=50)
            # Since then this answer was sampled, and nothing for the client that has gone but the step that was
            # in work, a token for each of its four answers.
            more = engine.counters.num_sampled_tokens - before - answer.usage.completion_tokens
            assert 0 <= more <= 4

    run(test)


def test_a_prompts_logprobs_are_those_of_a_plain_forward_and_nothing_is_sampled(policy: Policy) -> None:
    ids, facts = [72, 105, 33, 9, 72], {"root": "folder", "weights_sha256": "ab12"}

    async def test() -> None:
        engine = local(policy)
        scores = {"score": PromptScorer(engine), "facts": facts, "fingerprint": "ab12"}
        async with asking(engine, **scores) as client:
            scored: dict[str, Any] = {"model": MODEL, "prompt": ids, "max_tokens": 0}
            answer = await client.completions.create(**scored, extra_body={"prompt_logprobs": 0})
            (choice,) = answer.choices
            expected = plain_logprobs(policy.model, ids[:1], ids[1:])
            first, *others = choice.prompt_logprobs
            assert first is None
            assert [list(entries) for entries in others] == [[str(token)] for token in ids[1:]]
            found = [entry["logprob"] for entries in others for entry in entries.values()]
            np.testing.assert_allclose(found, expected, atol=1e-5)  # float32, computed by other code
            assert (choice.prompt_token_ids, answer.usage.completion_tokens) == (ids, 0)
            assert (answer.system_fingerprint, engine.counters.num_read_tokens) == ("ab12", 0)
            (card,) = (await client.models.list()).data
            assert {name: getattr(card, name) for name in facts} == facts
            refusals = [
                ({"extra_body": {"prompt_logprobs": 5}}, "prompt_logprobs: expected 0"),
                ({"max_tokens": 1, "extra_body": {"prompt_logprobs": 0}}, "max_tokens: expected 0"),
                ({"prompt": "Hi.", "extra_body": {"prompt_logprobs": 0}}, "prompt: expected token ids"),
                ({"prompt": [5] * 513, "extra_body": {"prompt_logprobs": 0}}, "prompt: expected at most 512 tokens"),
                ({"echo": True, "extra_body": {"prompt_logprobs": 0}}, "echo: not supported here"),
            ]
            for changes, reason in refusals:
                with pytest.raises(openai.BadRequestError, match=reason):
                    await client.completions.create(**{**scored, **changes})
        async with asking(saying(lambda _: "Hi.")) as client:
            with pytest.raises(
                openai.BadRequestError, match="prompt_logprobs: not known here; serve with --engine local"
            ):
                await client.completions.create(**scored, extra_body={"prompt_logprobs": 0})

    run(test)
