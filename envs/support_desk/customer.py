"""The simulated customer: scripted, or played by a model behind any OpenAI-compatible endpoint.

The scripted one says what it is asked for and, if it does not understand the question, what comes to its mind next, so
that any way of asking gets on. It says nothing new to an empty message.
"""

from __future__ import annotations

import re

from gspo_gym.env.chat_model import ChatModel, ChatModelSettings
from gspo_gym.types import Message

from .cases import Case

_TOPICS = {
    "email": r"e-?mail",
    "postcode": r"post ?code|postal|zip",
    "order": r"order|number|purchase",
    "address": r"address|where .*(send|deliver|ship)",
}
_MAX_WORDS = 2_000  # characters of an agent's message that a model is shown


class ScriptedCustomer:
    """Answers by the case's facts."""

    def __init__(self, case: Case) -> None:
        self._facts = dict(case.facts)
        self._said: list[str] = []

    def answer(self, text: str) -> str:
        """What the customer says to a message."""
        if not text.strip():
            return "Hello? Are you there?"
        asked = [topic for topic, pattern in _TOPICS.items() if re.search(pattern, text, re.IGNORECASE)]
        wanted = [topic for topic in asked if topic in self._facts]
        if not wanted:
            wanted = [topic for topic in self._facts if topic not in self._said][:1]
        if not wanted:
            return "That is all I know. Please go on."
        self._said += wanted
        return " ".join(self._facts[topic] for topic in wanted)


class ModelCustomer:
    """A model in the customer's place, told the same facts."""

    def __init__(self, settings: ChatModelSettings, case: Case, seed: int) -> None:
        self._settings, self._seed = settings, seed
        facts = "\n".join(f"- {fact}" for fact in case.facts.values())
        self._messages = [
            Message(
                "system",
                "You play a customer who writes to the support of a shop. Stay in this role, write one or two short "
                f"sentences, and say only what you are asked for. You want to: {case.goal}.\nYou know:\n{facts}\n"
                "Make nothing else up. If you are asked for something else, say that you do not know.",
            ),
            Message("user", "(The support agent has joined.)"),
            Message("assistant", case.opening),
        ]

    async def answer(self, text: str) -> str:
        """What the customer says to a message.

        Raises:
            EnvError, EnvTimeoutError: the endpoint failed.
        """
        self._messages.append(Message("user", text[:_MAX_WORDS] or "(silence)"))
        model = ChatModel(self._settings)  # one a message, because it must not outlive the loop of the episode
        try:
            said = await model.reply(self._messages, seed=self._seed)
        finally:
            await model.close()
        self._messages.append(Message("assistant", said.content or "..."))
        return self._messages[-1].content
