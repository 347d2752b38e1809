"""The level "tiny": one message says everything, a call acts, a call closes; for models of single bytes.

The shop, its rules and the grading are those of the full level. The customer is known, amounts follow from the order,
and the tools have short names and one argument each.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gspo_gym.env.tools import Tool

from . import rules
from .cases import Case
from .rules import Reason, Resolution
from .shop import Change, Purchase, Shop

POLICY = """\
Broken: replace. Late: credit. Unwanted: refund, after months declined.
Asked where: look. Danger: escalate, handed_over. Close, else resolved."""

_GREETINGS = ("", "Hi! ", "Hello, ")
_ARTICLES = ("BG-600", "LM-700", "MG-800")  # no devices, so that a broken one is replaced without steps
_DEVICES = ("RT-100", "SP-200", "EB-300", "HP-400")
_NUMBERS = range(1, 10)
_CALLER = 1  # the customer who writes; the others have an order each


@dataclass(frozen=True, slots=True)
class _Scenario:
    """What a customer says, what the order is like, and what is right.

    Attributes:
        sayings: of which one is said, with # and the order's number in place of {}.
        days: since delivery, or since the order if it was not delivered; both ends included.
        days_late: of an order under way, both ends included; negative before the promised day; None: it came.
        action: the tool to call.
    """

    sayings: Sequence[str]
    skus: Sequence[str]
    days: tuple[int, int]
    days_late: tuple[int, int] | None
    action: str
    resolution: Resolution


SCENARIOS: dict[str, _Scenario] = {
    "broken": _Scenario(
        ("It came broken: {}", "In pieces: order {}", "There is a crack in {}"), _ARTICLES, (0, 12), None, "replace",
        "resolved",
    ),
    "late": _Scenario(
        ("It is late: {}", "Still no sign of {}", "I wait too long for {}"), _ARTICLES, (8, 14), (1, 7), "credit",
        "resolved",
    ),
    "unwanted": _Scenario(
        ("I do not want {}", "Money back, please, for {}", "It is not for me: {}"), _ARTICLES, (1, 30), None, "refund",
        "resolved",
    ),
    "unwanted_for_months": _Scenario(
        ("After months I do not want {}", "Months old, money back for {}", "It is not for me after months: {}"),
        _ARTICLES, (60, 300), None, "look", "declined",
    ),
    "question": _Scenario(
        ("Where is {}", "When will it come? {}", "Is it on its way? {}"), _ARTICLES, (0, 2), (-6, -1), "look",
        "resolved",
    ),
    "danger": _Scenario(
        ("It smokes! {}", "I burnt my hand on {}", "Fire came out of {}"), _DEVICES, (5, 400), None, "escalate",
        "handed_over",
    ),
}  # fmt: skip


def draw_tiny_case(rng: np.random.Generator, shop: Shop, *, is_held_out: bool) -> Case:
    """Draw a case of the level, with its order and three others in the shop, which is then open for business."""
    name = list(SCENARIOS)[int(rng.integers(len(SCENARIOS)))]
    scenario = SCENARIOS[name]
    saying = scenario.sayings[int(rng.integers(len(scenario.sayings)))]
    number = int(rng.choice(order_numbers(saying, is_held_out=is_held_out)))
    others = [int(other) for other in rng.permutation(_NUMBERS) if other != number]
    for customer_id, other in enumerate(others[:3], _CALLER + 1):
        shop.add_order(rng, customer_id, _ARTICLES[0], status="delivered", days_ago=20, order_id=other)
    is_delivered = scenario.days_late is None
    order_id = shop.add_order(
        rng,
        _CALLER,
        scenario.skus[int(rng.integers(len(scenario.skus)))],
        status="delivered" if is_delivered else "shipped",
        days_ago=_between(rng, scenario.days),
        days_late=0 if scenario.days_late is None else _between(rng, scenario.days_late),
        order_id=number,
    )
    shop.open_for_business()
    greeting = _GREETINGS[int(rng.integers(len(_GREETINGS)))]
    _, email, postcode = shop.customer(_CALLER)
    return Case(
        scenario=name,
        opening=greeting + saying.format(f"#{order_id}"),
        goal=f"settle what is wrong with order {order_id} ({name.replace('_', ' ')})",
        order_id=order_id,
        caller=(email, postcode),
        changes=Counter(_changes(scenario.action, shop.purchase(order_id))),
        resolution=scenario.resolution,
        calls=[(scenario.action, {"id": order_id})],
        facts={"order": f"The order number is {order_id}."},
    )


def order_numbers(saying: str, *, is_held_out: bool) -> list[int]:
    """Return the numbers, of one digit, that orders have in this saying: three in held-out seeds, the rest in training.

    Each number is in sayings of both sides, because a model cannot say a digit that it has never been taught to say.

    >>> order_numbers("It came broken: {}", is_held_out=True), order_numbers("It is late: {}", is_held_out=False)
    ([3, 6, 9], [1, 2, 4, 5, 7, 8])
    """
    place = [each for scenario in SCENARIOS.values() for each in scenario.sayings].index(saying)
    return [number for number in _NUMBERS if ((number + place) % 3 == 0) == is_held_out]


class Desk(Protocol):
    """What the tools of the level need of the environment, whose methods say what each does."""

    def look_up(self, order_id: int) -> Purchase: ...
    def refund(self, order_id: int, amount_cents: int) -> str: ...
    def replace_article(self, order_id: int) -> str: ...
    def give_credit(self, order_id: int, amount_cents: int) -> str: ...
    def escalate(self, reason: Reason) -> str: ...
    def close_case(self, resolution: Resolution) -> str: ...


class TinyTools:
    """The tools of the level: those of the full level, with amounts and reasons filled in."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def tools(self) -> tuple[Tool, ...]:
        """Return them as a model sees them: without descriptions, whose bytes a byte-level model would have to read."""
        functions = (self.look, self.refund, self.replace, self.credit, self.escalate, self.close)
        return tuple(dataclasses.replace(Tool.from_function(function), description="") for function in functions)

    def look(self, id: int) -> str:
        """Tell where an order is."""
        purchase = self._desk.look_up(id)
        return f"came {purchase.delivered_on}" if purchase.delivered_on else f"due {purchase.promised_on}"

    def refund(self, id: int) -> str:
        """Pay the full price back."""
        self._desk.refund(id, self._desk.look_up(id).price_cents)
        return "ok"

    def replace(self, id: int) -> str:
        """Send the article again."""
        self._desk.look_up(id)
        self._desk.replace_article(id)
        return "ok"

    def credit(self, id: int) -> str:
        """Give a tenth of the price as credit."""
        self._desk.give_credit(id, self._desk.look_up(id).price_cents // 10)
        return "ok"

    def escalate(self, id: int) -> str:
        """Hand a danger to a supervisor."""
        self._desk.look_up(id)
        self._desk.escalate("safety")
        return "ok"

    def close(self, how: Resolution) -> str:
        """End the conversation."""
        return self._desk.close_case(how)


def _changes(action: str, purchase: Purchase) -> list[Change]:
    """Return what the action changes in the database, from the policy and not from the tool."""
    order_id, sku, price = purchase.order_id, purchase.sku, purchase.price_cents
    changes: dict[str, list[Change]] = {
        "look": [],
        "refund": [("refund", order_id, sku, price)],
        "replace": [("replacement", order_id, sku)],
        "credit": [("credit", order_id, rules.late_credit_cents(purchase))],
        "escalate": [("escalation", "safety")],
    }
    return changes[action]


def _between(rng: np.random.Generator, ends: tuple[int, int]) -> int:
    return int(rng.integers(ends[0], ends[1] + 1))
