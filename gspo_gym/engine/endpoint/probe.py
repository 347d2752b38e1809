"""What an endpoint can do, found out by asking: whether it takes token ids, obeys seeds, and of which distribution its
logprobs are.

Nothing that a server says about itself is believed where a few short requests can show it. Called once, by
`HttpEngine.start`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.endpoint.client import OpenAIClient, RefusedError
from gspo_gym.engine.endpoint.routes import Route
from gspo_gym.engine.endpoint.wire import AnswerError
from gspo_gym.errors import EngineError
from gspo_gym.types import Completion

# (prompt, sampling) -> a completion; retried as the engine's own requests are.
Ask = Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]

_PROMPT = tuple(range(11, 19))  # any vocabulary has these, and no sane text: the next token is anybody's guess
_LENGTH = 8
_PLAIN = SamplingParams(max_tokens=_LENGTH, stop_token_ids=(), seed=1)
_NUM_PAIRS = 8
# Of a logit difference d at temperature 1, in nats: too small to see a temperature act on it, or too large for float32
# to hold the logprob of the likelier token.
_MIN_DIFFERENCE, _MAX_DIFFERENCE = 0.1, 9.0


@dataclass(frozen=True, slots=True)
class LogprobFacts:
    """Of which distribution an endpoint's logprobs are.

    Attributes:
        mode: "processed": after the temperature. "raw": the model's own. "none": it gives none.
        is_renormalised: of what top_p, top_k and min_p leave; otherwise truncated samples have no known logprobs.
    """

    mode: Literal["processed", "raw", "none"]
    is_renormalised: bool


async def model_length(client: OpenAIClient, model: str) -> int | None:
    """The longest prompt plus completion as `/v1/models` says (vLLM and SGLang do); None if it does not.

    Raises:
        EngineAttemptError: there is no answer.
    """
    try:
        answer = await client.get("/models")
    except RefusedError:
        return None
    listed = answer.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    lengths = [card.get("max_model_len") for card in cards if card.get("id") == model]
    return lengths[0] if len(lengths) == 1 and type(lengths[0]) is int and lengths[0] > 1 else None


async def why_not(route: Route, call_id: str, attempt: int) -> str | None:
    """Why the endpoint cannot be used by this route; None if it can.

    Raises:
        EngineAttemptError: there is no answer to judge by.
    """
    try:
        await route.sample(_PROMPT, _PLAIN, max_tokens=_LENGTH, call_id=call_id, attempt=attempt)
    except (RefusedError, AnswerError) as error:
        return f"{route.name}: {error}"
    return None


async def obeys_seeds(ask: Ask) -> bool:
    """Whether equal seeds sample equal tokens and others other tokens."""
    hot = replace(_PLAIN, temperature=2.0)
    first, again, other = [await ask(_PROMPT, replace(hot, seed=seed)) for seed in (1, 1, 2)]
    return _same(first, again) and not _same(first, other)


async def find_logprob_facts(ask: Ask) -> LogprobFacts:
    """Of which distribution the logprobs are, from three identities that need no model to compare with.

    With top_k = 1 one token is left, whose logprob is 0 if it is of what is left. With top_k = 2 two are left, and the
    difference of their logits, ln(p / (1 - p)), is halved when the temperature is doubled, if it acts on the logprobs.
    Greedily chosen tokens have equal logprobs at temperatures 1 and 2 if it does not; if it does, lower ones at 2.

    Raises:
        EngineError: none of these holds, so that they are of no distribution that can be trained on.
    """
    greedy = replace(_PLAIN, top_k=1)
    cold, hot = [await ask(_PROMPT, replace(greedy, temperature=t)) for t in (1.0, 2.0)]
    if _same(cold, hot) and (cold.logprobs > -1e-3).all() and (hot.logprobs > -1e-3).all():
        if await _temperature_halves_differences(ask):
            return LogprobFacts("processed", is_renormalised=True)
        raise EngineError(
            "the endpoint's logprobs follow top_k but not the temperature: they are not of the distribution that is "
            "sampled from"
        )
    if _same(cold, hot) and np.abs(cold.logprobs - hot.logprobs).max() < 0.02:
        return LogprobFacts("raw", is_renormalised=False)
    if _same(cold, hot) and (hot.logprobs < cold.logprobs + 1e-3).all():
        return LogprobFacts("processed", is_renormalised=False)
    raise EngineError(
        "the endpoint's logprobs are of no known distribution: the likeliest tokens have "
        f"{cold.logprobs.tolist()} at temperature 1 and {hot.logprobs.tolist()} at 2"
    )


async def _temperature_halves_differences(ask: Ask) -> bool:
    one = replace(_PLAIN, max_tokens=1, top_k=2)
    num_seen = 0
    for number in range(_NUM_PAIRS):
        prompt = (*_PROMPT, *range(21, 21 + number))
        at_1, at_2 = [abs(_logit(await ask(prompt, replace(one, temperature=t)))) for t in (1.0, 2.0)]
        if _MIN_DIFFERENCE <= at_1 <= _MAX_DIFFERENCE:
            num_seen += 1
            if abs(2 * at_2 - at_1) > max(0.02, 0.1 * at_1):
                return False
    if num_seen == 0:
        raise EngineError(
            f"the endpoint's logprobs cannot be told apart: after {_NUM_PAIRS} prompts the two likeliest tokens were "
            "always equally likely or one of them certain"
        )
    return True


def _logit(completion: Completion) -> float:
    """ln(p / (1 - p)) of the first token; infinite if p is 1."""
    logprob = min(float(completion.logprobs[0]), 0.0)
    return math.inf if logprob > -1e-7 else logprob - math.log(-math.expm1(logprob))


def _same(first: Completion, second: Completion) -> bool:
    return bool(np.array_equal(first.token_ids, second.token_ids))
