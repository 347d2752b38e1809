"""Build a request's token ids: the tokens of the call that it continues, and those of its new messages.

Nothing that was sampled is encoded again. Where the chat template rewrites earlier turns, or nothing is continued, the
whole prompt is rendered afresh; `capture_build.py` begins a new segment there, as a rollout does.

For a tool call that the caller insists on, the prompt begins the call as the template would write it, and the model
samples the rest. The opening counts as context, so such an answer can be trained on; it may fail to be a call, which is
an error and never repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.chat.renderer import Renderer, cannot_fit
from gspo_gym.errors import ConfigError, ContextOverflowError, nearest_name
from gspo_gym.remote.gateway.capture import REQUIRED, CapturedCall, ChatCall, CompletionCall
from gspo_gym.remote.gateway.capture_matching import Conversations
from gspo_gym.types import Int32Array, Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one call.

    Attributes:
        parent, appends, new_messages: as in `CapturedCall`.
        token_ids: all of it.
        context_ids: all of it, or if `appends`, what follows the parent's prompt and sampled tokens.
        opening: the last of `context_ids`, if they begin the answer itself (a forced tool call).
        digest: equal for the same conversation.
    """

    parent: CapturedCall | None
    appends: bool
    new_messages: tuple[Message, ...]
    token_ids: Int32Array
    context_ids: Int32Array
    opening: list[int]
    digest: bytes


def chat_prompt(
    call: ChatCall,
    tools_key: str,
    *,
    renderer: Renderer,
    conversations: Conversations,
    tokenizer: Any,  # transformers is untyped
    max_model_len: int,
) -> Prompt:
    """Return the prompt of a conversation.

    Raises:
        ContextOverflowError: it leaves no room for one token. TemplateError: the template cannot render it.
        ConfigError: there are no messages, or the tool that must be called is not offered, or cannot be called in an
            answer that must be JSON.
    """
    if not call.messages:
        raise ConfigError("messages: expected at least one, got none")
    if call.tool_choice is not None and call.json_schema is not None:
        raise ConfigError("response_format: expected none beside a tool that must be called, got a JSON schema")
    found = conversations.find(call.messages, tools_key)
    if cannot_fit(found.new, tokenizer, max_model_len):
        raise overflow(f"{sum(len(message.content) for message in found.new)} characters", max_model_len)
    opening = renderer.call_opening(forced_tool(call.tool_choice, call.tools)) if call.tool_choice else []
    if found.parent is None:
        added, appends = renderer.start(found.new), False
    else:
        is_closed = int(found.parent.completion.token_ids[-1]) in renderer.stop_token_ids
        continuation = renderer.continue_from(found.known, found.new, closed=is_closed)
        added, appends = continuation.token_ids, not continuation.is_new_segment
    whole = context = np.array([*added, *opening], dtype=np.int32)
    if found.parent is not None and appends:
        whole = np.concatenate([conversations.tokens_of(found.parent), context])
    prompt = Prompt(found.parent, appends, found.new, whole, context, opening, found.request_digest)
    return _fitting(prompt, max_model_len)


def raw_prompt(
    call: CompletionCall,
    *,
    renderer: Renderer,
    conversations: Conversations,
    tokenizer: Any,
    max_model_len: int,
) -> Prompt:
    """Return the prompt of a request without a template; it continues a call if it begins with exactly its tokens.

    Raises:
        ContextOverflowError: as for `chat_prompt`. ConfigError: the prompt is empty, or holds an invalid id.
    """
    if isinstance(call.prompt, str):
        if cannot_fit([Message("user", call.prompt)], tokenizer, max_model_len):
            raise overflow(f"{len(call.prompt)} characters", max_model_len)
        ids = [int(token_id) for token_id in tokenizer(call.prompt)["input_ids"]]
    else:
        ids = _checked_ids(call.prompt, len(tokenizer))
    if not ids:
        raise ConfigError("prompt: expected a text or token ids, got nothing")
    whole = np.array(ids, dtype=np.int32)
    parent, num_known = _longest_beginning(whole, conversations)
    context = whole[num_known:]
    new = (Message("user", renderer.decode(context)),) if len(context) else ()
    digest = b",".join(str(token_id).encode() for token_id in ids)
    return _fitting(Prompt(parent, parent is not None, new, whole, context, [], digest), max_model_len)


def overflow(size: str, max_model_len: int) -> ContextOverflowError:
    """Return the error for a prompt of so many tokens or characters."""
    return ContextOverflowError(
        f"the prompt has {size}, which leaves no room for an answer in max_model_len = {max_model_len}; shorten the "
        "conversation"
    )


def _fitting(prompt: Prompt, max_model_len: int) -> Prompt:
    if len(prompt.token_ids) >= max_model_len:
        raise overflow(f"{len(prompt.token_ids)} tokens", max_model_len)
    return prompt


def _checked_ids(ids: Iterable[Any], vocab_size: int) -> list[int]:  # Any: whatever a client sent
    listed = list(ids)
    wrong = [i for i in listed if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size]
    if wrong:
        raise ConfigError(f"prompt: expected token ids in [0, {vocab_size}), got {wrong[0]!r}")
    return listed


def _longest_beginning(ids: Int32Array, conversations: Conversations) -> tuple[CapturedCall | None, int]:
    """Return the raw call with the most tokens with which `ids` begins, and their number; of equals the first."""
    known = [(call, conversations.tokens_of(call)) for call in conversations.raw_calls()]
    beginnings = [(call, len(tokens)) for call, tokens in known if np.array_equal(ids[: len(tokens)], tokens)]
    return max(beginnings, key=lambda found: found[1], default=(None, 0))


def forced_tool(tool_choice: str, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the tool that must be called; None if it may be any of several.

    Raises:
        ConfigError: no tool of that name is offered, or none at all.
    """
    names = tool_names(tools)
    if not names:
        raise ConfigError(f"tool_choice {tool_choice!r}: expected tools to choose from, got none; send them in `tools`")
    if tool_choice == REQUIRED:
        return names[0] if len(names) == 1 else None
    if tool_choice not in names:
        raise ConfigError(f"tool_choice: no tool {tool_choice!r} is offered; {nearest_name(tool_choice, names)}")
    return tool_choice


def call_problem(answer: Message, name: str | None, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Explain what is wrong with an answer that had to call the tool `name` (None: any); None if nothing."""
    wanted = f"a call of {name}" if name is not None else "a call of one of " + ", ".join(tool_names(tools))
    called = [call.name for call in answer.tool_calls]
    if not called:
        return f"expected {wanted}, got a text"
    allowed = tool_names(tools) if name is None else [name]
    if called[0] not in allowed:
        return f"expected {wanted}, got a call of {called[0]}"
    return None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of OpenAI function schemas, in order."""
    return [str(tool.get("function", tool).get("name")) for tool in tools]
