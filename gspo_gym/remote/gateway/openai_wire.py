"""Read OpenAI's requests as the gateway's calls: lenient about unknown fields, strict where they change the answer.

A field that would change the answer and cannot be honoured (n > 1, an image, a penalty that no engine here has) is
refused. No I/O. `openai_wire_answers.py` writes the answers, and reads and writes the Responses API.

Read are

    chat completions    messages, tools, tool_choice (also forced), max_tokens, max_completion_tokens, temperature,
                        top_p, stop, response_format, logprobs, stream, stream_options; n is 1; of vLLM's fields
                        top_k, min_p, repetition_penalty, min_tokens
    completions         one prompt, as text or token ids; the fields above that apply; prompt_logprobs, which is 0,
                        with max_tokens 0, where the model's weights are here
    responses           input, instructions, function tools, tool_choice, previous_response_id within the session,
                        text.format, max_output_tokens, stream

Of OpenAI's fields these have no effect: `function_call`, `include`, `max_tool_calls`, `metadata` (but for
`gspo_gym_trained`), `model`, `moderation`, `parallel_tool_calls`, `prediction`, `prompt_cache_key`,
`prompt_cache_options`, `prompt_cache_retention`, `reasoning`, `reasoning_effort`, `safety_identifier`, `seed` (an
episode's own decides), `service_tier`, `store`, `top_logprobs` (only the sampled token's logprob is known),
`truncation`, `user`, `verbosity`; of the Responses API also `access_programs`, `background_options`, `image` and
`stream_options`. Of the fields of vLLM, SGLang, llama.cpp, Ollama and text-generation-inference those that change the
prompt or what is sampled are refused; names that none of them has are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gspo_gym.base.http import read_json
from gspo_gym.base.messages import ConversationReader, require_encodable
from gspo_gym.errors import ConfigError, GymError, RecordError, shortened
from gspo_gym.remote.gateway.capture import REQUIRED, ChatCall, CompletionCall
from gspo_gym.types import SAMPLING_NAMES, Message, Sampling

Json = Any  # a JSON value

TRAINED_KEY = "gspo_gym_trained"
"""In a request's `metadata`, "true" or "false": whether its caller wants it trained on."""

_MAX_STOPS = 16
_MAX_COUNT = 2**31 - 1
_DEFAULTS = Sampling()
_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0)}  # OpenAI's; `Sampling` has those of the others
# Fields that would change an answer and that nothing here can do, in every API; with the value that asks for nothing,
# as null does. The second part are names of vLLM, SGLang, llama.cpp, Ollama and others.
_UNSUPPORTED: Mapping[str, Json] = {
    "audio": None,
    "background": False,
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "suffix": "",
    "web_search_options": None,
    "adapter_id": None,
    "add_generation_prompt": True,
    "allowed_token_ids": None,
    "bad_words": [],
    "chat_template": None,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "custom_logit_processor": None,
    "do_sample": True,
    "documents": [],
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "ebnf": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "format": None,
    "grammar": None,
    "guidance_scale": 1,
    "guided_choice": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "ignore_eos": False,
    "json_schema": None,
    "length_penalty": 1,
    "logits_processors": None,
    "lora_path": None,
    "max_new_tokens": None,
    "min_new_tokens": 0,
    "mirostat": 0,
    "n_predict": None,
    "negative_prompt": None,
    "no_repeat_ngram_size": 0,
    "num_predict": None,
    "options": {},
    "penalty_alpha": 0,
    "regex": None,
    "repeat_penalty": 1,
    "sampling_params": None,
    "sampling_seed": None,
    "smoothing_factor": 0,
    "stop_token_ids": [],
    "structural_tag": None,
    "structured_outputs": None,
    "tfs_z": 1,
    "top_a": 0,
    "top_n_sigma": -1,
    "truncate_prompt_tokens": None,
    "typ_p": 1,
    "typical_p": 1,
    "use_beam_search": False,
    "vllm_xargs": None,
    "watermark": False,
    "xtc_probability": 0,
}


class RequestError(GymError, ValueError):
    """A request is refused; `code` and `param` as in OpenAI's error objects."""

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The form of an answer.

    Attributes:
        stream: as server-sent events. include_usage: with a last event that counts tokens.
        logprobs: with those of the sampled tokens.
    """

    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request to /v1/chat/completions."""

    call: ChatCall
    options: AnswerOptions


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request to /v1/completions."""

    call: CompletionCall
    options: AnswerOptions


def read_body(body: bytes) -> Mapping[str, Json]:
    """Return the JSON object of a request.

    Raises:
        RequestError: it is not one.
    """
    try:
        value = read_json(body)
    except RecordError as error:
        raise RequestError(f"expected a JSON object as the body: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object as the body, got {shown(value)}", code="invalid_json")
    return value


def read_chat_request(
    body: Mapping[str, Json], *, max_choices: int = 1, reader: ConversationReader | None = None
) -> ChatRequest:
    """Read a request to /v1/chat/completions; the caller reads `n` if it allows several choices.

    `reader` has read the conversation's earlier requests; None: there were none.

    Raises:
        RequestError: a needed field is missing or wrong, or asks for something unsupported.
    """
    require_supported(body, {"best_of": 1})
    if max_choices == 1:
        require_one_choice(body)
    elif (read_count(body, "n") or 1) > max_choices:
        raise RequestError(f"n: expected at most {max_choices}, got {body['n']}", param="n")
    tools = read_tools(body.get("tools"))
    call = ChatCall(
        messages=read_messages(body.get("messages"), param="messages", reader=reader),
        tools=() if body.get("tool_choice") == "none" else tools,
        max_tokens=_max_tokens(body),
        sampling=read_sampling(body),
        stop=_stops(body.get("stop")),
        tool_choice=read_tool_choice(body.get("tool_choice"), tools),
        json_schema=read_schema(body.get("response_format"), param="response_format"),
        is_trained=wants_training(body),
    )
    return ChatRequest(call, _options(body, logprobs=bool(body.get("logprobs"))))


def read_completion_request(body: Mapping[str, Json]) -> CompletionRequest:
    """Read a request to /v1/completions.

    Raises:
        RequestError: as for `read_chat_request`; or several prompts, or an echo.
    """
    require_supported(body, {"response_format": {"type": "text"}})
    require_one_choice(body)
    call = CompletionCall(
        prompt=_prompt(body.get("prompt")),
        max_tokens=_max_tokens(body),
        sampling=read_sampling(body),
        stop=_stops(body.get("stop")),
        is_trained=wants_training(body),
    )
    logprobs = body.get("logprobs")
    has_logprobs = logprobs is not None and logprobs is not False  # 0 asks for the sampled tokens' own
    return CompletionRequest(call, _options(body, logprobs=has_logprobs))


def read_scored_prompt(body: Mapping[str, Json]) -> tuple[int, ...]:
    """Read a request to /v1/completions for the logprobs of its prompt alone, as vLLM calls them.

    Raises:
        RequestError: the prompt is a text, or alternatives are asked for, or an answer is to be sampled, too.
    """
    others = {name: value for name, value in body.items() if name not in ("prompt_logprobs", "max_tokens")}
    read_completion_request(others)
    for name, reason in (("prompt_logprobs", "of the prompt's own tokens"), ("max_tokens", "nothing is sampled, too")):
        value = body.get(name)
        if type(value) is not int or value != 0:
            raise RequestError(f"{name}: expected 0 with prompt_logprobs ({reason}), got {shown(value)}", param=name)
    prompt = _prompt(body.get("prompt"))
    if isinstance(prompt, str):
        raise RequestError("prompt: expected token ids with prompt_logprobs, got a text", param="prompt")
    return prompt


def _options(body: Mapping[str, Json], *, logprobs: bool) -> AnswerOptions:
    stream_options = body.get("stream_options")
    include_usage = isinstance(stream_options, Mapping) and bool(stream_options.get("include_usage"))
    return AnswerOptions(bool(body.get("stream")), include_usage, logprobs)


def require_supported(body: Mapping[str, Json], more: Mapping[str, Json] = MappingProxyType({})) -> None:
    """Refuse what would change the answer and cannot be had; `more` are fields that have this meaning in one API only.

    Raises:
        RequestError: such a field asks for something.
    """
    for name, neutral_value in {**_UNSUPPORTED, **more}.items():
        value = body.get(name)
        if value is not None and value != neutral_value:
            raise RequestError(
                f"{name}: not supported here, got {shown(value)}; leave it out",
                code="unsupported_parameter",
                param=name,
            )


def read_sampling(body: Mapping[str, Json]) -> dict[str, Any]:
    """Read the fields of `Sampling` that a request sets, under our names, which are vLLM's.

    Raises:
        RequestError: a value is not a number, or out of range.
    """
    return {name: _read_setting(body, name) for name in SAMPLING_NAMES if body.get(name) is not None}


def require_one_choice(body: Mapping[str, Json]) -> None:
    """Refuse several answers to one request: each is a separate call.

    Raises:
        RequestError: n or best_of is not 1.
    """
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise RequestError(
                f"{name}: expected 1, got {shown(body[name])}; ask once for each answer",
                code="unsupported_value",
                param=name,
            )


def read_messages(value: Json, *, param: str, reader: ConversationReader | None = None) -> tuple[Message, ...]:
    """Read the conversation, at least one message long; `reader` as for `read_chat_request`.

    Raises:
        RequestError: it is invalid, or holds anything but text.
    """
    try:
        messages = (reader or ConversationReader()).read(value, where=param)
        for index, message in enumerate(messages):
            require_encodable(message.content, where=f"{param}[{index}]")
    # JSON can spell a lone surrogate, and the tokenizer would raise.
    except RecordError as error:
        raise RequestError(str(error), param=param) from error
    if not messages:
        raise RequestError(f"{param}: expected at least one message, got none", param=param)
    return messages


def read_tools(value: Json) -> tuple[Mapping[str, Json], ...]:
    """Read function schemas in the form of the chat API.

    Raises:
        RequestError: one is invalid, or has no name.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(f"tools: expected a list, got {shown(value)}", param="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{index}]: expected {{"type": "function", "function": {{"name": ...}}}}, got {shown(tool)}',
                param="tools",
            )
    return tuple(value)


def read_tool_choice(value: Json, tools: Sequence[Mapping[str, Json]]) -> str | None:
    """Read a `capture.ToolChoice`; "none" is None (the caller offers no tools then).

    Raises:
        RequestError: it is not understood, or names a tool that is not offered.
    """
    if value in (None, "auto", "none"):
        return None
    if value == "required":
        if not tools:
            raise RequestError("tool_choice: 'required' without tools", param="tool_choice")
        return REQUIRED
    if isinstance(value, Mapping) and value.get("type") == "function":
        # The chat API nests the name, the Responses API does not.
        function = value.get("function") if isinstance(value.get("function"), Mapping) else value
        name = function.get("name") if isinstance(function, Mapping) else None
        offered_names = [tool["function"]["name"] for tool in tools]
        if isinstance(name, str) and name in offered_names:
            return name
        raise RequestError(
            f"tool_choice: expected one of the tools {offered_names}, got {shown(name)}", param="tool_choice"
        )
    raise RequestError(
        f"tool_choice: expected 'none', 'auto', 'required' or a function, got {shown(value)}", param="tool_choice"
    )


def read_schema(value: Json, *, param: str) -> str | None:
    """Return the JSON schema that an answer must obey, as JSON text; None if it may be any text.

    Raises:
        RequestError: it is not a response format.
    """
    kind = value.get("type", "text") if isinstance(value, Mapping) else value
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return '{"type": "object"}'
    if kind == "json_schema" and isinstance(value, Mapping):
        definition = value.get("json_schema", value)
        schema = definition.get("schema") if isinstance(definition, Mapping) else None
        if isinstance(schema, Mapping):
            return json.dumps(schema)
    raise RequestError(
        f"{param}: expected the type text, json_object or json_schema with a schema, got {shown(value)}", param=param
    )


def read_number(body: Mapping[str, Json], name: str, *, low: float, high: float) -> float | None:
    """Read a number in [low, high]; None if it is missing.

    Raises:
        RequestError: it is not a number, or outside.
    """
    value = body.get(name)
    if value is None:
        return None
    # True is an int in Python, and no number in JSON.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RequestError(f"{name}: expected a number from {low:g} to {high:g}, got {shown(value)}", param=name)
    return float(value)


def read_count(body: Mapping[str, Json], name: str) -> int | None:
    """Read a whole number of at least 1; None if it is missing.

    Raises:
        RequestError: it is not one, or less.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name}: expected a whole number of at least 1, got {shown(value)}", param=name)
    return value


def wants_training(body: Mapping[str, Json]) -> bool | None:
    """Read what `metadata` says about training; None if nothing.

    Raises:
        RequestError: it says neither "true" nor "false".
    """
    metadata = body.get("metadata")
    flag_text = metadata.get(TRAINED_KEY) if isinstance(metadata, Mapping) else None
    return None if flag_text is None else read_flag(flag_text, name=f"metadata.{TRAINED_KEY}")


def read_flag(text: Json, *, name: str) -> bool:
    """Return whether a text or bool says true.

    Raises:
        RequestError: it is neither "true" nor "false".
    """
    value = {"true": True, "false": False}.get(str(text).strip().lower())
    if value is None:
        raise RequestError(f"{name}: expected true or false, got {shown(text)}", param=name)
    return value


def shown(value: object) -> str:
    """Format a wrong value for an error."""
    return shortened(repr(value))


def _read_setting(body: Mapping[str, Json], name: str) -> float:
    value = body[name]
    is_whole = isinstance(getattr(_DEFAULTS, name), int)
    if name in _RANGES:
        low, high = _RANGES[name]
        value = read_number(body, name, low=low, high=high)
    elif isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise RequestError(f"{name}: expected a {'whole ' * is_whole}number, got {shown(value)}", param=name)
    elif is_whole and value > _MAX_COUNT:
        raise RequestError(f"{name}: expected at most {_MAX_COUNT}, got {shown(value)}", param=name)
    if name == "top_k" and value == -1:  # vLLM's and SGLang's word for all
        value = 0
    try:
        read: float = getattr(Sampling(**{name: value}), name)
    except ConfigError as error:
        raise RequestError(str(error).removeprefix("Sampling."), param=name) from None
    return read


def _max_tokens(body: Mapping[str, Json]) -> int | None:
    # The older name is deprecated, and some clients send both.
    newer = read_count(body, "max_completion_tokens")
    return read_count(body, "max_tokens") if newer is None else newer


def _stops(value: Json) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop: expected a text or up to {_MAX_STOPS} of them, got {shown(value)}", param="stop")
    return tuple(stops)


def _prompt(value: Json) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        value = value[0]  # one prompt in a list of prompts
    if isinstance(value, str) and value:
        try:
            require_encodable(value, where="prompt")
        except RecordError as error:
            raise RequestError(str(error), param="prompt") from error
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise RequestError(f"prompt: expected one text, or one list of token ids, got {shown(value)}", param="prompt")
