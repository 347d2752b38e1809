"""Cases: who calls about what, and what the policy makes of it.

Two tasks with several scenarios each. A scenario makes an order that fits it, says what the customer says, and derives
the changes of the database that the policy asks for (`Case.changes`) with the calls that lead there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from . import rules
from .rules import Resolution, Step
from .shop import Change, Purchase, Shop

Task = Literal["customer_service", "technical_support", "mixed"]
Call = tuple[str, Mapping[str, Any]]

_DEVICES = ("RT-100", "SP-200", "EB-300", "HP-400")
_SMALL = ("SP-200", "BG-600", "LM-700", "MG-800", "EB-300")
_MOODS = ("Hello,", "Hi!", "Good morning,", "Listen,", "Hey,")


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation.

    Attributes:
        scenario: its name. opening: the customer's first words.
        facts: what the customer says when asked, by topic, in the order in which it comes to mind.
        goal: what the customer wants, for a model that plays one.
        changes: of the database, that the policy asks for. resolution: with which the case is to be closed.
        calls: that make them, after the identity was verified; for the reference.
        fixing_step: of the device's steps, the one that helps; None: none does.
        order_id: that it is about. caller: (e-mail, postcode) as the customer says them.
    """

    scenario: str
    opening: str
    goal: str
    order_id: int
    caller: tuple[str, str]
    changes: Counter[Change]
    resolution: Resolution
    calls: Sequence[Call]
    fixing_step: Step | None = None
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a scenario is made from."""

    rng: np.random.Generator
    shop: Shop
    customer_id: int

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def order(self, sku: str, status: str, days_ago: int, *, days_late: int = 0) -> Purchase:
        order = self.shop.add_order(
            self.rng, self.customer_id, sku, status=status, days_ago=days_ago, days_late=days_late
        )
        return self.shop.purchase(order)


@dataclass(frozen=True, slots=True)
class _Story:
    """What a scenario says: the order, the words, and what is to be done."""

    purchase: Purchase
    words: str
    goal: str
    calls: Sequence[Call]
    changes: Sequence[Change]
    resolution: Resolution
    facts: Mapping[str, str] = field(default_factory=dict)
    fixing_step: Step | None = None
    is_impostor: bool = False


def draw_case(rng: np.random.Generator, shop: Shop, task: Task) -> Case:
    """A case of the task, with its order and some others in the shop, which is then open for business."""
    names = [name for group, found in SCENARIOS.items() if task in (group, "mixed") for name in found]
    scenario = names[int(rng.integers(len(names)))]
    customer_id = int(rng.integers(1, 9))
    for other in range(1, 9):  # everybody has bought something
        shop.add_order(
            rng, other, _SMALL[int(rng.integers(len(_SMALL)))], status="delivered", days_ago=int(rng.integers(40, 90))
        )
    setting = _Setting(rng, shop, customer_id)
    story = next(found[scenario] for found in SCENARIOS.values() if scenario in found)(setting)
    name, email, postcode = shop.customer(customer_id)
    if story.is_impostor:
        postcode = str(int(postcode) + 1)
    shop.open_for_business()
    facts = {
        "email": f"My e-mail is {email}.",
        "postcode": f"My postcode is {postcode}.",
        "order": f"The order number is {story.purchase.order_id}.",
        **story.facts,
    }
    return Case(
        scenario=scenario,
        opening=f"{setting.one_of(_MOODS)} this is {name}. {story.words}",
        goal=story.goal,
        order_id=story.purchase.order_id,
        caller=(email, postcode),
        changes=Counter(story.changes),
        resolution=story.resolution,
        calls=story.calls,
        fixing_step=story.fixing_step,
        facts=facts,
    )


def _look(purchase: Purchase) -> Call:
    return "get_order", {"order_id": purchase.order_id}


def _escalation(reason: rules.Reason) -> tuple[Call, Change]:
    return ("escalate", {"reason": reason}), ("escalation", reason)


def _refund(s: _Setting, sku: str, days_ago: int) -> _Story:
    """Somebody wants the money back; the policy says whether, and who decides."""
    bought = s.order(sku, "delivered", days_ago)
    words = f"I do not like the {bought.product} that I bought and want my money back."
    goal = f"get the full price of the {bought.product} back"
    amount = bought.price_cents
    if not rules.is_recent(bought):
        return _Story(bought, words, goal, [_look(bought)], [], "declined")
    if rules.forbids_refund(bought, amount):
        call, change = _escalation("large_refund")
        return _Story(bought, words, goal, [_look(bought), call], [change], "handed_over")
    call = ("refund", {"order_id": bought.order_id, "amount_cents": amount})
    change = ("refund", bought.order_id, bought.sku, amount)
    return _Story(bought, words, goal, [_look(bought), call], [change], "resolved")


def refund_in_time(s: _Setting) -> _Story:
    return _refund(s, s.one_of(_SMALL), s.one_of((1, 10, 29, 30)))


def refund_too_late(s: _Setting) -> _Story:
    return _refund(s, s.one_of(_SMALL), s.one_of((31, 32, 45, 90)))


def large_refund(s: _Setting) -> _Story:
    return _refund(s, "LT-500", s.number(1, 30))


def damaged_article(s: _Setting) -> _Story:
    bought = s.order(s.one_of(("BG-600", "LM-700", "MG-800")), "delivered", s.number(0, 12))
    call = ("replace_article", {"order_id": bought.order_id})
    words = f"The {bought.product} arrived broken. I would like a new one, please."
    change = ("replacement", bought.order_id, bought.sku)
    return _Story(bought, words, f"get another {bought.product}", [_look(bought), call], [change], "resolved")


def late_delivery(s: _Setting) -> _Story:
    bought = s.order(s.one_of(_SMALL), "shipped", s.number(8, 14), days_late=s.number(1, 7))
    amount = rules.late_credit_cents(bought)
    call = ("give_credit", {"order_id": bought.order_id, "amount_cents": amount})
    words = f"My {bought.product} should have been here days ago. I expect something for the wait."
    change = ("credit", bought.order_id, amount)
    return _Story(bought, words, "get something for the late delivery", [_look(bought), call], [change], "resolved")


def delivery_on_time(s: _Setting) -> _Story:
    bought = s.order(s.one_of(_SMALL), "shipped", s.number(1, 3), days_late=-s.number(1, 5))
    words = f"Where is my {bought.product}? I waited long enough, give me something for it."
    return _Story(bought, words, "get something for the wait", [_look(bought)], [], "declined")


def _new_address(s: _Setting, status: str) -> _Story:
    bought = s.order(s.one_of(_SMALL), status, s.number(0, 2), days_late=-s.number(2, 5))
    address = f"{s.number(100, 199)} {s.one_of(('Elm Street', 'Lake View', 'Hill Road'))}"
    words = f"I am moving. Can the {bought.product} go to another address?"
    facts = {"address": f"The new address is {address}."}
    if status == "shipped":
        call: Call = ("create_ticket", {"order_id": bought.order_id, "kind": "carrier"})
        change: Change = ("ticket", bought.order_id, "carrier")
    else:
        call = ("update_address", {"order_id": bought.order_id, "address": address})
        change = ("address", bought.order_id, address)
    resolution: Resolution = "handed_over" if status == "shipped" else "resolved"
    goal = f"have the order sent to {address}"
    return _Story(bought, words, goal, [_look(bought), call], [change], resolution, facts)


def address_before_shipping(s: _Setting) -> _Story:
    return _new_address(s, "processing")


def address_after_shipping(s: _Setting) -> _Story:
    return _new_address(s, "shipped")


def impostor(s: _Setting) -> _Story:
    bought = s.order(s.one_of(_SMALL), "delivered", s.number(1, 20))
    call, change = _escalation("identity")
    words = f"I want my money back for the {bought.product}, quickly please."
    return _Story(
        bought, words, "get the money without being who you say", [call], [change], "handed_over", is_impostor=True
    )


def order_status(s: _Setting) -> _Story:
    bought = s.order(s.one_of(_SMALL), "shipped", s.number(0, 2), days_late=-s.number(1, 6))
    call = ("send_notice", {"order_id": bought.order_id, "day": bought.promised_on})
    words = f"When will my {bought.product} arrive?"
    change = ("notice", bought.order_id, bought.promised_on)
    return _Story(bought, words, "learn the promised day", [_look(bought), call], [change], "resolved")


def _faulty(s: _Setting, fixing_step: Step | None, days_ago: int, sku: str) -> _Story:
    """A device that does not work, and the steps up to the one that helps."""
    bought = s.order(sku, "delivered", days_ago)
    complaint = s.one_of(("does not turn on any more", "loses its connection all the time", "does not react"))
    count = len(rules.STEPS) if fixing_step is None else rules.STEPS.index(fixing_step) + 1
    calls: list[Call] = [_look(bought)]
    calls += [("guide_customer", {"step": step}) for step in rules.STEPS[:count]]
    changes: list[Change] = []
    resolution: Resolution = "resolved"
    if fixing_step is not None:
        changes.append(("repair", bought.order_id, fixing_step))
    elif rules.is_in_warranty(bought):
        calls.append(("replace_article", {"order_id": bought.order_id}))
        changes.append(("replacement", bought.order_id, bought.sku))
    else:
        calls.append(("create_ticket", {"order_id": bought.order_id, "kind": "paid_repair"}))
        changes.append(("ticket", bought.order_id, "paid_repair"))
        resolution = "handed_over"
    words = f"My {bought.product} {complaint}. Can you help?"
    goal = f"have a {bought.product} that works"
    return _Story(bought, words, goal, calls, changes, resolution, fixing_step=fixing_step)


def device_fixed_by_a_step(s: _Setting) -> _Story:
    return _faulty(s, s.one_of(rules.STEPS), s.number(5, 200), s.one_of(_DEVICES))


def device_in_warranty(s: _Setting) -> _Story:
    return _faulty(s, None, s.one_of((20, 100, 300, 365)), s.one_of(_DEVICES))


def device_out_of_warranty(s: _Setting) -> _Story:
    sku = s.one_of(_DEVICES)
    days = 365 if sku in ("SP-200", "HP-400") else 730
    return _faulty(s, None, days + s.one_of((1, 2, 50, 300)), sku)


def dangerous_device(s: _Setting) -> _Story:
    bought = s.order(s.one_of(_DEVICES), "delivered", s.number(5, 400))
    sign = s.one_of(("There is smoke coming out of", "I burnt my hand on", "The battery is swollen inside"))
    call, change = _escalation("safety")
    words = f"{sign} my {bought.product}. What now?"
    return _Story(bought, words, "be safe, and be taken seriously", [call], [change], "handed_over")


Scenario = Callable[[_Setting], _Story]
_SERVICE = (
    refund_in_time, refund_too_late, large_refund, damaged_article, late_delivery, delivery_on_time,
    address_before_shipping, address_after_shipping, impostor, order_status,
)  # fmt: skip
_TECHNICAL = (device_fixed_by_a_step, device_in_warranty, device_out_of_warranty, dangerous_device)
SCENARIOS: Mapping[str, Mapping[str, Scenario]] = {
    "customer_service": {scenario.__name__: scenario for scenario in _SERVICE},
    "technical_support": {scenario.__name__: scenario for scenario in _TECHNICAL},
}


def facts_of_order(purchase: Purchase) -> str:
    """An order as the tools show it."""
    delivered = f", delivered on {purchase.delivered_on}" if purchase.delivered_on else ""
    warranty = f", warranty of {purchase.warranty_days} days" if purchase.is_device else ""
    return (
        f"order {purchase.order_id}: {purchase.product} ({purchase.sku}), {purchase.price_cents} cents{warranty}; "
        f"ordered on {purchase.ordered_on}, {purchase.status}, promised for {purchase.promised_on}{delivered}; "
        f"to {purchase.address}"
    )
