"""The one rule by which a system prompt of the trainer's meets what an environment says first."""

from __future__ import annotations

from gspo_gym.types import Message


def with_system_prompt(messages: tuple[Message, ...], prompt: str | None) -> tuple[Message, ...]:
    """The first messages with the prompt before them; templates take one system message, so two become one.

    >>> with_system_prompt((Message("system", "Be fair."), Message("user", "Go.")), "Be brief.")[0].content.split()
    ['Be', 'brief.', 'Be', 'fair.']
    """
    if prompt is None:
        return messages
    if messages and messages[0].role == "system":
        return (Message("system", f"{prompt}\n\n{messages[0].content}"), *messages[1:])
    return (Message("system", prompt), *messages)
