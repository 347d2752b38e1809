"""Limits on the cost of judging (calls, tokens, money), over all judges that share one budget."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import JudgeBudgetError, JudgeCost


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits of a whole run. None: no limit. Repeated requests count, and money as far as prices are known."""

    max_calls: int | None = None
    max_tokens: int | None = None
    max_usd: float | None = None

    def __post_init__(self) -> None:
        limits = (self.max_calls, self.max_tokens, self.max_usd)
        if any(limit is not None and not limit >= 0 for limit in limits):  # NaN, too, is none
            raise ConfigError(f"BudgetLimits: expected limits >= 0 or none, got {limits}")


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens; 0 if not known."""

    usd_per_million_input_tokens: float = 0.0
    usd_per_million_output_tokens: float = 0.0

    def __post_init__(self) -> None:
        prices = (self.usd_per_million_input_tokens, self.usd_per_million_output_tokens)
        if not all(math.isfinite(price) and price >= 0 for price in prices):
            raise ConfigError(f"Prices: expected numbers >= 0, got {prices}")

    def cost_of(self, input_tokens: int, output_tokens: int) -> JudgeCost:
        read, written = self.usd_per_million_input_tokens, self.usd_per_million_output_tokens
        return JudgeCost(1, input_tokens, output_tokens, (read * input_tokens + written * output_tokens) / 1e6)


class Reservation:
    """A call under way. If nothing settles it, it costs its most, because its provider may charge for it."""

    def __init__(self, most: JudgeCost) -> None:
        self.cost = most

    def settle(self, cost: JudgeCost) -> None:
        self.cost = cost


class JudgeBudget:
    """Lets calls through and adds up their cost. Use it within one event loop at a time.

    Attributes:
        limits: may be replaced at any time; calls that were refused may then be made again.
        spent: so far, including what earlier processes of the same run have spent.
    """

    def __init__(self, limits: BudgetLimits | None = None, *, spent: JudgeCost | None = None) -> None:
        self.limits = limits or BudgetLimits()
        self.spent = spent or JudgeCost()
        self._under_way = JudgeCost()
        self._ended = asyncio.Event()
        self._ended.set()

    @contextlib.asynccontextmanager
    async def call(self, most: JudgeCost) -> AsyncIterator[Reservation]:
        """Reserve one call that costs at most `most`; wait while only calls under way stand against it.

        Raises:
            JudgeBudgetError: a limit is reached.
        """
        # A call is let through while the cost so far, plus the most that the calls under way can still cost, is below
        # every limit: the whole is at most the limit plus one call, however many are under way.
        while (reached := self._reached(self.spent + self._under_way)) is not None:
            if self._reached(self.spent) is not None or self._under_way.num_calls == 0:
                raise JudgeBudgetError(f"judging has reached its limit: {reached}; raise it to go on")
            if self._ended.is_set():
                self._ended = asyncio.Event()  # a fresh one belongs to the loop that waits
            await self._ended.wait()
        self._under_way = self._under_way + most
        reservation = Reservation(most)
        try:
            yield reservation
        finally:
            self._under_way = _less(self._under_way, most)
            self.spent = self.spent + reservation.cost
            self._ended.set()

    def _reached(self, cost: JudgeCost) -> str | None:
        limits = self.limits
        if limits.max_calls is not None and cost.num_calls >= limits.max_calls:
            return f"max_calls = {limits.max_calls}, spent {self.spent.num_calls}"
        if limits.max_tokens is not None and cost.input_tokens + cost.output_tokens >= limits.max_tokens:
            return f"max_tokens = {limits.max_tokens}, spent {self.spent.input_tokens + self.spent.output_tokens}"
        if limits.max_usd is not None and cost.usd >= limits.max_usd:
            return f"max_usd = {limits.max_usd:g}, spent {self.spent.usd:.4f}"
        return None


def _less(cost: JudgeCost, part: JudgeCost) -> JudgeCost:
    num_calls = cost.num_calls - part.num_calls
    if num_calls == 0:
        return JudgeCost()  # and not what rounding has left of the money
    input_tokens, output_tokens = cost.input_tokens - part.input_tokens, cost.output_tokens - part.output_tokens
    return JudgeCost(num_calls, input_tokens, output_tokens, max(0.0, cost.usd - part.usd))
