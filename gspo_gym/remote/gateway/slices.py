"""Sample an answer a few tokens at a time, to show it as it grows and to end it at a stop string.

Each slice continues the prompt and what was sampled so far, which an engine that keeps a session's keys and values does
not compute again; every token is drawn as in one long call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from gspo_gym.chat.parsing import ParseFailure
from gspo_gym.chat.renderer import Renderer
from gspo_gym.engine.base import Capabilities, Engine, SamplingParams, token_list
from gspo_gym.seeding import child_seed
from gspo_gym.types import Completion, FinishReason, Message, TokenIds

_SLICE = 16  # tokens: a few times a second even on a slow processor, and little beside a prompt
_UNREADABLE = "\ufffd"

# What slices draw as one call would: it looks at prompt and sampled tokens together, or at the logits alone; each slice
# is given the rest of `min_tokens`. Anything else may count sampled tokens, and starts anew in each slice.
_SLICED_ALIKE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"})

Grown = Callable[[Sequence[int]], None]
"""Told all tokens so far, after each slice."""


class SlicedEngine:
    """The part of an engine that a session uses; `generate` samples in slices.

    Args:
        engine: samples.
        grown: is told what there is; None: nobody.
        ends: returns whether these tokens hold a stop string, which ends the answer.
    """

    def __init__(
        self, engine: Engine, *, grown: Grown | None = None, ends: Callable[[Sequence[int]], bool] | None = None
    ) -> None:
        self._engine = engine
        self._grown, self._ends = grown, ends

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def generate(
        self,
        prompt_token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        """Sample one completion; see `Engine.generate`. The deadline is each slice's."""
        prompt, ids, parts = token_list(prompt_token_ids), list[int](), list[Completion]()
        num_left = min(sampling.max_tokens, self.capabilities.max_model_len - len(prompt))
        # A schema is obeyed from the beginning of a call on, so an answer under one is one call.
        is_whole = sampling.json_schema is not None or not _SLICED_ALIKE.issuperset(sampling.changed())
        size = sampling.max_tokens if is_whole else _SLICE
        while True:
            count = max(1, min(size, num_left - len(ids)))  # 1: the engine says why there is no room for one
            own = replace(
                sampling,
                max_tokens=count,
                min_tokens=min(count, max(0, sampling.min_tokens - len(ids))),
                seed=child_seed(sampling.seed, "slice", len(parts)),
            )
            part = await self._engine.generate(
                [*prompt, *ids], own, session_id=session_id, deadline_seconds=deadline_seconds
            )
            parts.append(part)
            ids += part.token_ids.tolist()
            is_over = part.finish_reason is FinishReason.STOP or len(ids) >= num_left
            is_over = is_over or (self._ends is not None and self._ends(ids))
            if self._grown is not None:
                self._grown(ids)
            if is_over:
                return Completion(
                    token_ids=np.concatenate([part.token_ids for part in parts]),
                    logprobs=np.concatenate([part.logprobs for part in parts]),
                    finish_reason=part.finish_reason,
                    weight_version=np.concatenate([part.weight_version for part in parts]),
                )

    async def abort(self, session_id: str) -> None:
        """Give up the session's calls in flight."""
        await self._engine.abort(session_id)

    async def end_session(self, session_id: str) -> None:
        await self._engine.end_session(session_id)


class GrowingText:
    """Turn growing token ids into pieces of reasoning and content that are never taken back.

    A piece waits while it may still turn out to be something else: a part of a character, of a tag or of a stop string.

    Args:
        renderer: of the conversation.
        stops: texts that end the answer and are not part of it.
        has_tools: content then waits for the end, because it may be a call.
    """

    def __init__(self, renderer: Renderer, stops: Sequence[str] = (), *, has_tools: bool = False) -> None:
        self._renderer = renderer
        self._stops = [stop for stop in stops if stop]
        self._has_tools = has_tools
        self.reasoning = self.content = ""

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether the text of these tokens holds a stop string."""
        if not self._stops:
            return False
        text = self._renderer.decode(token_ids)
        return any(stop in text for stop in self._stops)

    def grow(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Return what is new of reasoning and content, after all tokens so far."""
        text = self._settled_text(self._renderer.decode(token_ids))
        result = self._renderer.parse(text, is_truncated=True)
        if isinstance(result, ParseFailure):
            return "", ""
        return self.rest(
            Message("assistant", "", reasoning_content=result.reasoning_content) if self._has_tools else result
        )

    def rest(self, message: Message) -> tuple[str, str]:
        """Return what of a message was not returned yet; nothing of a part that does not continue what was."""
        reasoning, content = message.reasoning_content or "", message.content
        new_reasoning = reasoning.removeprefix(self.reasoning) if reasoning.startswith(self.reasoning) else ""
        new_content = content.removeprefix(self.content) if content.startswith(self.content) else ""
        self.reasoning, self.content = self.reasoning + new_reasoning, self.content + new_content
        return new_reasoning, new_content

    def _settled_text(self, text: str) -> str:
        ends = [text.find(stop) for stop in self._stops if stop in text]
        if ends:
            return text[: min(ends)]
        length = len(text.rstrip(_UNREADABLE))
        length -= _num_begun(text[:length], self._renderer.format.tags)
        longest = max((len(stop) for stop in self._stops), default=1)
        return text[: max(0, min(length, len(text) - longest + 1))]


def _num_begun(text: str, tags: Sequence[str]) -> int:
    """Return how many of the last characters may be the beginning of a tag."""
    longest = max((len(tag) for tag in tags), default=1)
    sizes = range(min(longest - 1, len(text)), 0, -1)
    return next((size for size in sizes if any(tag.startswith(text[-size:]) for tag in tags)), 0)
