"""An engine whose answer is one of given texts, picked by the prompt and the seed, as a model's would be.

Which text and the logprobs of its tokens are functions of (prompt, seed) alone, so that two players who ask for the
same get the same, and whoever asks for another prompt or seed is found out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.seeding import generator
from gspo_gym.types import Completion, FinishReason

Pick = Callable[[np.random.Generator], str]


class SeededEngine(ScriptedEngine):
    """Answers with what `pick` makes of a generator; a text that is to be cut off is longer than max_tokens.

    `arrived` gets the number of every call that comes in. `ended` are the sessions that were ended, `aborted` those
    whose calls were given up. `waits` maps the number of a call to what it waits for before it answers; `failing` to
    what it raises.
    """

    def __init__(self, tokenizer: Any, pick: Pick, *, stop_token: str = "<|im_end|>", **settings: Any) -> None:
        super().__init__(lambda prompt, turn: [0], **settings)
        self._tokenizer = tokenizer
        self._pick = pick
        self._stop = tokenizer.convert_tokens_to_ids(stop_token)
        self.arrived: asyncio.Queue[int] = asyncio.Queue()
        self.ended: list[str] = []
        self.aborted: list[str] = []
        self.waits: dict[int, asyncio.Event] = {}
        self.failing: dict[int, BaseException] = {}

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session_id: str | None = None,
        deadline_seconds: float | None = None,
    ) -> Completion:
        number = len(self.calls)
        await super().generate(prompt_token_ids, replace(sampling, json_schema=None), session_id=session_id)
        self.arrived.put_nowait(number)
        if number in self.waits:
            await self.waits[number].wait()
        if number in self.failing:
            raise self.failing[number]
        random = generator(sampling.seed, *map(int, prompt_token_ids))
        ids = [*self._tokenizer(self._pick(random), add_special_tokens=False)["input_ids"], self._stop]
        ids = ids[: sampling.max_tokens]
        return Completion(
            token_ids=np.array(ids),
            logprobs=-random.exponential(1.0, len(ids)),
            finish_reason=FinishReason.STOP if ids[-1] in sampling.stop_token_ids else FinishReason.LENGTH,
            weight_version=np.full(len(ids), self.weight_version),
        )

    async def abort(self, session_id: str) -> None:
        self.aborted.append(session_id)
        await super().abort(session_id)

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)
        await super().end_session(session_id)


def any_of(*texts: str) -> Pick:
    """One of the texts."""
    return lambda random: texts[int(random.integers(len(texts)))]
