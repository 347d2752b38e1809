"""Checks that an engine holds the weights it was given, by its samples and by digests.

A canary is a handful of short completions, sampled between an update and its commit and scored by the learner. The
prompts are the same for every version and each keeps its session: if the engine used keys and values of an earlier
version, this would show.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gspo_gym.engine.base import Engine, SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.seeding import child_seed, generator
from gspo_gym.types import Float32Array

# Token ids of some sequences -> for each, the learner's logprobs of all tokens but the first, [T - 1], nats, of the
# distribution that rollouts are sampled from, under its present weights.
Score = Callable[[Sequence[Sequence[int]]], Sequence[Float32Array]]

# Largest difference of a logprob that is still rounding. float32: two implementations of tiny models differ by 1e-6, of
# large ones by some 1e-5. In 16 bits a logit between 16 and 32 is rounded by half of its spacing of 1/8 (bfloat16, 8
# significant bits) or 1/64 (float16, 11), on both sides, and so is the hidden state it comes from: twice the spacing.
# Such a canary sees wrong weights and wrong temperatures, but not one small step missed; checksums do.
TOLERANCES = {"float32": 1e-4, "float16": 1 / 32, "bfloat16": 1 / 4}

_EMPTY = hashlib.sha256(b"").hexdigest()  # what an engine says of a tensor that it repacked elsewhere: nothing


@dataclass(frozen=True, slots=True)
class Canary:
    """Completions by which an engine shows what it samples from.

    Attributes:
        prompts: token ids; each is answered in two turns, the second extending the first.
        score: the learner's view.
        tolerance: largest difference of a logprob; `TOLERANCES` has it by dtype of the weaker side.
        temperature: that rollouts are sampled with.
        max_tokens: sampled in each turn.
        deadline_seconds: for one completion.
    """

    prompts: Sequence[Sequence[int]]
    score: Score
    tolerance: float = TOLERANCES["float32"]
    temperature: float = 1.0
    max_tokens: int = 8
    deadline_seconds: float = 120.0

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts):
            raise ConfigError("Canary.prompts: expected one at least, of one token at least")

    async def check(self, engine: Engine) -> float:
        """Return the largest difference between the engine's and the learner's logprobs, in nats, over all prompts.

        If there are more copies of the model than prompts, prompts are asked again until every copy has answered.

        Raises:
            EngineError: it is beyond the tolerance, or the engine does not answer.
        """
        num_asked = max(len(self.prompts), engine.capabilities.num_copies)
        with probing():
            answers = await asyncio.gather(*(self._answer(engine, number) for number in range(num_asked)))
        logprob_rows = await asyncio.to_thread(self.score, [tokens for tokens, _ in answers])
        worst = 0.0
        for number, ((tokens, sampled_logprobs), logprobs) in enumerate(zip(answers, logprob_rows, strict=True)):
            for position, logprob in sampled_logprobs.items():
                gap = abs(float(logprobs[position - 1]) - logprob)
                # Not `>`: NaN is beyond every tolerance.
                if not gap <= self.tolerance:
                    raise EngineError(
                        f"canary {number}: token {tokens[position]} at position {position} of {len(tokens)}: the "
                        f"engine says {logprob:.6f} nats, the learner {logprobs[position - 1]:.6f}; expected a "
                        f"difference of at most {self.tolerance:g}"
                    )
                worst = max(worst, gap)
        return worst

    async def _answer(self, engine: Engine, number: int) -> tuple[list[int], Mapping[int, float]]:
        # The second turn extends the first: an engine that kept keys of an earlier version would show it.
        prompt = self.prompts[number % len(self.prompts)]
        tokens = [int(token) for token in prompt]
        logprobs: dict[int, float] = {}
        for turn in range(2):
            sampling = SamplingParams(
                max_tokens=self.max_tokens,
                stop_token_ids=(),
                seed=child_seed(number, "canary", turn),
                temperature=self.temperature,
            )
            completion = await engine.generate(
                tokens, sampling, session_id=f"canary-{number}", deadline_seconds=self.deadline_seconds
            )
            logprobs |= {len(tokens) + k: float(value) for k, value in enumerate(completion.logprobs)}
            tokens += [int(token) for token in completion.token_ids]
            tokens += [int(token) for token in prompt[:2]]  # an environment's answer would stand here
        return tokens, logprobs


def canary_prompts(vocab_size: int, max_model_len: int, *, max_tokens: int = 8) -> tuple[tuple[int, ...], ...]:
    """Return a short, a middling and a long prompt of token ids below vocab_size, the same ones for the same numbers.

    The long one is longer than the blocks of 128 tokens in which engines keep keys and values, if the context allows.

    Raises:
        ConfigError: the context leaves no room.
    """
    room = max_model_len - 2 * (max_tokens + 2)
    if room < 1:
        raise ConfigError(f"canary: expected max_model_len of at least {2 * (max_tokens + 2) + 1}, got {max_model_len}")
    lengths = sorted({min(length, room) for length in (3, 24, 160)})
    rng = generator(0, "canary prompts")
    return tuple(tuple(int(token) for token in rng.integers(vocab_size, size=length)) for length in lengths)


# Digests of the tensors of an update, as they were staged and as an engine holds them.
@dataclass(frozen=True, slots=True)
class _Held:
    update: WeightUpdate
    staged: Mapping[str, str]
    digests: Mapping[str, str]


class ChecksumLog:
    """Digests of what engines hold, from one verified update to the next."""

    def __init__(self) -> None:
        self._before: _Held | None = None
        self._present: _Held | None = None

    async def check(self, engine: Engine, update: WeightUpdate, staged: Mapping[str, str]) -> None:
        """Compare an engine's digests with the staged tensors', with other engines' and with those of the last check.

        An engine may hold tensors in another layout than the staged ones (fused, repacked): what it has under a staged
        name must be equal, all engines must hold the same, and they must hold something else than at the last check if
        something else was staged. Digests of nothing attest nothing and are left out.

        Raises:
            EngineError: says which tensor.
        """
        if not engine.capabilities.has_checksums:
            return
        digests = {name: digest for name, digest in (await engine.checksums()).items() if digest != _EMPTY}
        _require_equal(digests, {name: staged[name] for name in digests.keys() & staged.keys()}, "was staged")
        if self._present is not None and self._present.update is not update:
            self._before, self._present = self._present, None
        if self._present is not None:
            _require_equal(digests, self._present.digests, "another engine holds")
        before = self._before
        if digests and before is not None and before.digests == digests and before.staged != staged:
            raise EngineError(
                f"the engine holds under version {update.version} what it held under version {before.update.version}, "
                "although other weights were staged: the update was skipped"
            )
        self._present = _Held(update, staged, digests)


def _require_equal(digests: Mapping[str, str], expected: Mapping[str, str], what: str) -> None:
    wrong = sorted(name for name, digest in expected.items() if digests.get(name) != digest)
    if wrong:
        raise EngineError(
            f"{wrong[0]} (of {len(wrong)} tensors): expected digest {expected[wrong[0]]}, which {what}, got "
            f"{digests.get(wrong[0])}"
        )
