"""Every field of OpenAI's three requests is used, refused, or named by `openai_wire` as one without effect.

The fields are those of the installed `openai` package; what happens to each is observed and not looked up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat
from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completions
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Responses
from served_gateway import LOOK, user

from gspo_gym.remote.gateway import openai_wire
from gspo_gym.remote.gateway.openai_wire import RequestError, read_chat_request, read_completion_request
from gspo_gym.remote.gateway.openai_wire_answers import read_responses_request
from gspo_gym.types import SAMPLING_NAMES, Message

Json = Any
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
# A value that asks for something, of every field; any text where nothing is expected of it.
VALUES: Mapping[str, Json] = {
    "audio": {"voice": "ash", "format": "wav"},
    "background": True,
    "best_of": 2,
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "echo": True,
    "frequency_penalty": 0.5,
    "functions": [FUNCTION],
    "input": "Ho.",
    "instructions": "Be brief.",
    "logit_bias": {"7": 5},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "messages": user("Ho."),
    "metadata": {"gspo_gym_trained": "false"},
    "modalities": ["text", "audio"],
    "n": 2,
    "presence_penalty": 0.5,
    "previous_response_id": "resp_1",
    "prompt": "Ho",
    "response_format": {"type": "json_object"},
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "x",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "tool_choice": "required",
    "top_p": 0.5,
    "web_search_options": {},
}
TOOLS = {"chat": [LOOK], "responses": [{"type": "function", **FUNCTION}]}
BODIES: Mapping[str, dict[str, Json]] = {
    "chat": {"messages": user("Hi.")},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi."},
}
READERS: Mapping[str, Callable[[Json], Any]] = {
    "chat": read_chat_request,
    "completions": read_completion_request,
    "responses": lambda body: read_responses_request(body, previous={"resp_1": (Message("user", "Ho."),)}),
}
FIELDS = [
    (api, name)
    for api, schema in (("chat", Chat), ("completions", Completions), ("responses", Responses))
    for name in sorted(schema.__annotations__)
]


def without_effect() -> tuple[set[str], set[str]]:
    """The fields that `openai_wire` says to be without effect: in all APIs, and in the Responses API."""
    page = openai_wire.__doc__ or ""
    said = re.search(r"these have no effect: (.*?); of the Responses API also (.*?)\.\sOf\sthe", page, re.DOTALL)
    assert said is not None
    everywhere, in_responses = (set(re.findall(r"`(\w+)`", names)) for names in said.groups())
    return everywhere - {"metadata", "gspo_gym_trained"}, in_responses


def body_with(api: str, name: str) -> dict[str, Json]:
    body = dict(BODIES[api])
    if name in ("tools", "tool_choice"):
        body["tools"] = TOOLS[api]
    if name == "tools":
        return body
    value = {"id": "pmpt_1"} if (api, name) == ("responses", "prompt") else VALUES.get(name, "something")
    return body | {name: value}


@pytest.mark.parametrize(("api", "name"), FIELDS)
def test_a_field_changes_what_is_read_or_is_refused_or_is_named_as_without_effect(api: str, name: str) -> None:
    everywhere, in_responses = without_effect()
    read = READERS[api]
    plain, body = read(BODIES[api]), body_with(api, name)
    if name in everywhere or (api == "responses" and name in in_responses):
        assert read(body) == plain
        return
    try:
        changed = read(body)
    except RequestError as error:
        assert error.param == name  # noqa: PT017  # fields that are used do not raise
    else:
        assert changed != plain


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize(
    ("name", "nothing"),
    [
        ("best_of", 1),
        ("frequency_penalty", 0.0),
        ("functions", []),
        ("logit_bias", {}),
        ("n", 1),
        ("stop_token_ids", []),
        ("suffix", ""),
    ],
)
def test_a_field_that_asks_for_nothing_is_taken(api: str, name: str, nothing: Json) -> None:
    for value in (nothing, None):
        assert READERS[api](BODIES[api] | {name: value}) == READERS[api](BODIES[api])


# Of other servers, each with a value that would change the prompt or what is sampled.
FOREIGN: Mapping[str, Json] = {
    "chat_template_kwargs": {"enable_thinking": False},  # vLLM, SGLang
    "continue_final_message": True,
    "truncate_prompt_tokens": 5,
    "logits_processors": ["x"],
    "vllm_xargs": {"a": 1},
    "regex": "a+",  # SGLang
    "ebnf": "root ::= x",
    "min_new_tokens": 4,
    "no_repeat_ngram_size": 2,
    "custom_logit_processor": "x",
    "lora_path": "x",
    "sampling_params": {"top_k": 1},
    "repeat_penalty": 1.2,  # llama.cpp
    "mirostat": 2,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "top_n_sigma": 1.0,
    "tfs_z": 0.5,
    "grammar": "root ::= x",
    "json_schema": {"type": "object"},
    "typical_p": 0.5,  # text-generation-inference
    "watermark": True,
    "adapter_id": "x",
    "do_sample": False,
    "add_generation_prompt": False,
    "guidance_scale": 1.5,
    "sampling_seed": 3,
    "options": {"num_predict": 3},  # Ollama
    "num_predict": 3,
    "format": "json",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("api", READERS)
def test_a_field_of_another_server_that_changes_what_is_sampled_is_refused(api: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: not supported here") as refused:
        READERS[api](BODIES[api] | {name: FOREIGN[name]})
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("api", "name"), [("completions", "response_format"), ("responses", "best_of"), ("chat", "best_of")]
)
def test_a_field_of_one_api_is_refused_in_another(api: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}: "):
        READERS[api](BODIES[api] | {name: VALUES[name]})


@pytest.mark.parametrize("api", READERS)
def test_every_sampling_setting_of_ours_may_be_asked_for(api: str) -> None:
    asked = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 3}
    assert tuple(asked) == SAMPLING_NAMES
    assert READERS[api](BODIES[api] | asked).call.sampling == asked
    assert READERS[api](BODIES[api] | {"top_k": -1}).call.sampling == {"top_k": 0}
