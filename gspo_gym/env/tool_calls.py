"""What became of tool calls, read from the conversation: the text that answers a call says whether it failed.

So it is the same for tools of ours, of a worker process and of an environment that is served elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_gym.types import Message

CALL_FAILED = "error: "  # what the answer to a call starts with that went wrong, whatever the reason
_UNKNOWN_TOOL = f"{CALL_FAILED}unknown tool "


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of tools by name, and how many were answered with an error; those of unknown tools are in neither."""

    made: Counter[str]
    failed: Counter[str]


def count_calls(messages: Sequence[Message]) -> CallCounts:
    """Count the calls in a conversation that were answered, by the text that answers them.

    >>> from gspo_gym.types import ToolCall
    >>> call = Message("assistant", "", (ToolCall("c0", "look", {}),))
    >>> count_calls([call, Message("tool", "error: KeyError: 'x'", tool_call_id="c0")]).failed
    Counter({'look': 1})
    """
    made: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id or "")
        if message.role == "tool" and name is not None and not message.content.startswith(_UNKNOWN_TOOL):
            made[name] += 1
            failed[name] += message.content.startswith(CALL_FAILED)
    return CallCounts(made, failed)
