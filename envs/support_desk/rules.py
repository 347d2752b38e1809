"""The policy of the shop: as text for the model, and as the decisions and violations that follow from it."""

from __future__ import annotations

import datetime
from typing import Literal

from .shop import TODAY, Purchase

REFUND_DAYS = 30
AUTHORITY_CENTS = 20_000  # larger refunds are a supervisor's
MAX_CREDIT_CENTS = 1_000

Step = Literal["restart", "check_cable", "update_firmware", "factory_reset"]
STEPS: tuple[Step, ...] = ("restart", "check_cable", "update_firmware", "factory_reset")
TicketKind = Literal["carrier", "paid_repair"]
Reason = Literal["identity", "large_refund", "safety"]
Resolution = Literal["resolved", "declined", "handed_over"]

POLICY = f"""\
You serve the customers of an online shop. Today is {TODAY}. Talk to the customer in plain text; act with the tools.
1. Identity: ask for e-mail and postcode and verify them before anything is looked up or changed. If they do not match,
do nothing but escalate (identity).
2. Look the order up before you decide about it. Change nothing that was not asked for.
3. Refunds: the full price, for articles that came at most {REFUND_DAYS} days ago; later than that, decline.
Above {AUTHORITY_CENTS} cents escalate (large_refund) instead.
4. Damaged on arrival: replace, if it came at most {REFUND_DAYS} days ago.
5. Late: if the promised day is over and nothing came, credit of 10% of the price, at most {MAX_CREDIT_CENTS} cents;
if not, decline.
6. Address: change it while the order is not shipped; if it is shipped, open a ticket (carrier).
7. Faulty devices: guide the customer through {", ".join(STEPS)},
in this order, until one helps. If none does, replace within the warranty, else open a ticket (paid_repair).
8. Danger (smoke, heat, a swollen battery): no steps; verify the identity and escalate (safety).
9. "When will it come?": send a notice with the promised day.
Close the case once: resolved if the wish was met, declined if the policy forbids it, handed_over after an escalation
or a ticket."""


def days_since_delivery(purchase: Purchase) -> int:
    """Days, 0 on the day itself; for what has come."""
    return (TODAY - datetime.date.fromisoformat(purchase.delivered_on)).days


def is_recent(purchase: Purchase) -> bool:
    """It came, and at most `REFUND_DAYS` days ago."""
    return bool(purchase.delivered_on) and days_since_delivery(purchase) <= REFUND_DAYS


def is_in_warranty(purchase: Purchase) -> bool:
    """It came, and its warranty is not over."""
    return bool(purchase.delivered_on) and days_since_delivery(purchase) <= purchase.warranty_days


def late_credit_cents(purchase: Purchase) -> int:
    """What a late delivery is worth; 0 if it is not late."""
    is_late = not purchase.delivered_on and purchase.promised_on < str(TODAY)
    return min(purchase.price_cents // 10, MAX_CREDIT_CENTS) if is_late else 0


def forbids_refund(purchase: Purchase, amount_cents: int) -> str | None:
    """The rule that a refund breaks; None: none."""
    if not is_recent(purchase):
        return "refund_window"
    return "authority" if amount_cents > AUTHORITY_CENTS else None


def forbids_replacement(purchase: Purchase, taken: list[Step], *, works: bool) -> str | None:
    """The rule that a replacement breaks; a device is replaced after all steps, another article as damaged."""
    if not purchase.is_device:
        return None if is_recent(purchase) else "replacement"
    return None if is_in_warranty(purchase) and set(taken) == set(STEPS) and not works else "replacement"


def forbids_step(step: Step, taken: list[Step]) -> str | None:
    """The rule that a step breaks after those taken."""
    return "step_order" if any(earlier not in taken for earlier in STEPS[: STEPS.index(step)]) else None
