"""SupportDesk: a customer of a shop writes; talk to them, and act with tools on a real database within a policy.

What happened counts, not how it was said: the final database, the rules kept on the way, and how the case was closed.
Cases are in `cases.py`, the policy in `rules.py`, the database in `shop.py`, the customer in `customer.py`. `README.md`
beside this file has the rewards, a transcript and the known cheats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from gspo_gym.env.chat_model import ChatModelSettings
from gspo_gym.env.core import PolicyFactory, SmallTask, ToolEnv
from gspo_gym.env.data.rows import is_held_out_generator
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import Tool, ToolError, tool
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name
from gspo_gym.types import Message

from . import rules, tiny
from .cases import SCENARIOS, Case, Task, draw_case, facts_of_order
from .customer import ModelCustomer, ScriptedCustomer
from .policies import apprentice, by_the_book, random_clerk
from .rules import Reason, Resolution, Step, TicketKind
from .shop import Purchase, Shop, ShopError

Level = Literal["full", "tiny"]
_LEVELS = get_args(Level)
_TASKS = (*SCENARIOS, "mixed")
_MAX_TEXT = 200  # characters of an address or a day

_SMALL = SmallTask({"level": "tiny", "max_steps": 2, "max_errors": 1, "violation_penalty": 0}, policy="apprentice")


class SupportDesk(ToolEnv):
    """One customer with one case. A message without a call is heard by the customer; `close_case` ends the episode.

    Args:
        level: "full", or "tiny": one message says everything, and six short tools; a few bytes a turn, for byte-level
            models (`tiny.py`).
        task: "customer_service", "technical_support" or "mixed"; at level "full" only.
        max_steps: turns before truncation; the reference needs at most 11.
        user: None: a scripted customer. Otherwise a model plays one: {"model": ..., "base_url": ...} and the other
            fields of `ChatModelSettings`; episodes then depend on what it says.
        solved_reward: for a case closed rightly, with the database as the policy wants it and no rule broken, > 0.
        identity_reward: for the first check of what the customer said, >= 0; at level "tiny", where the customer is
            known, for the first call about their order.
        violation_penalty: subtracted in a turn in which a rule was broken, >= 0.
        error_penalty: subtracted in a turn with a failed call, >= 0.
        max_errors: such turns, the last of which ends the episode, at least 1; None: they do not end it.

    Attributes: case, with what is right; price_cents, of its article; violations, the rules broken so far.
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {
        "reference": by_the_book,
        "random": random_clerk,
        "apprentice": apprentice,
    }
    small_task = _SMALL
    isolation = "thread"
    case: Case
    price_cents: int = 0
    violations: list[str]
    _verified: int | None
    _is_identity_paid: bool
    _works: bool
    _steps: list[Step]
    _looked_up: set[int]

    def __init__(
        self,
        *,
        level: Level = "full",
        task: Task = "mixed",
        max_steps: int = 16,
        user: Mapping[str, Any] | None = None,
        solved_reward: float = 0.9,
        identity_reward: float = 0.1,
        violation_penalty: float = 0.1,
        error_penalty: float = 0.02,
        max_errors: int | None = None,
    ) -> None:
        if level not in _LEVELS:
            raise UnknownNameError(f"SupportDesk: unknown level {level!r}; {nearest_name(level, _LEVELS)}")
        if task not in _TASKS:
            raise UnknownNameError(f"SupportDesk: unknown task {task!r}; {nearest_name(task, _TASKS)}")
        if level == "tiny" and task != "mixed":
            raise ConfigError(f"SupportDesk: task={task!r} has no effect at level 'tiny'; remove it")
        if max_steps < 1:
            raise ConfigError(f"SupportDesk: expected max_steps >= 1, got {max_steps}")
        if max_errors is not None and max_errors < 1:
            raise ConfigError(f"SupportDesk: expected max_errors >= 1 or none, got {max_errors}")
        if not (solved_reward > 0 and identity_reward >= 0 and violation_penalty >= 0 and error_penalty >= 0):
            raise ConfigError(
                "SupportDesk: expected solved_reward > 0 and the others >= 0, got "
                f"solved_reward={solved_reward}, identity_reward={identity_reward}, "
                f"violation_penalty={violation_penalty}, error_penalty={error_penalty}"
            )
        self.level, self.task, self.max_steps, self._max_errors = level, task, max_steps, max_errors
        self._weights = {
            "solved": solved_reward,
            "identity": identity_reward,
            "violation": -violation_penalty,
            "error": -error_penalty,
        }
        self.reward_range = (-(violation_penalty + error_penalty) * max_steps, solved_reward + identity_reward)
        self._user = None if user is None else _settings_of(user)
        if self._user is not None:
            # async, so that the episode awaits it
            self.no_tool_call = self._answer_of_model  # type: ignore[method-assign, assignment]
        self._shop: Shop | None = None  # None: before the first reset, and after close
        self._customer: ScriptedCustomer | ModelCustomer | None = None
        self._forget()

    # -- tools: looking --------------------------------------------------------------------------------------------

    @tool
    def verify_identity(self, email: str, postcode: str) -> str:
        """Check who the customer is."""
        self._verified = self._open_shop().customer_of(email, postcode)
        self._has_checked = True
        if (email.strip().lower(), postcode.strip()) == self.case.caller and not self._is_identity_paid:
            self._is_identity_paid = True
            self.add_reward(Reward.weighted({"identity": 1.0}, self._weights, events=("identity_checked",)))
        return "they do not match" if self._verified is None else f"verified: customer {self._verified}"

    @tool
    def list_orders(self) -> str:
        """Orders of the verified customer."""
        if self._verified is None:
            self._violate("identity")
            raise ToolError("nobody is verified")
        orders = self._open_shop().orders_of(self._verified)
        return "\n".join(facts_of_order(self._open_shop().purchase(order)) for order in orders)

    @tool
    def get_order(self, order_id: int) -> str:
        """One order."""
        purchase = self._purchase(order_id)
        self._looked_up.add(order_id)
        return facts_of_order(purchase)

    # -- tools: acting ---------------------------------------------------------------------------------------------

    @tool
    def refund(self, order_id: int, amount_cents: int) -> str:
        """Pay money back."""
        self._check(rules.forbids_refund(self._purchase(order_id), amount_cents))
        self._in_shop(lambda shop: shop.refund(order_id, amount_cents))
        return f"paid back {amount_cents} cents"

    @tool
    def replace_article(self, order_id: int) -> str:
        """Send the article of an order again."""
        purchase = self._purchase(order_id)
        self._check(rules.forbids_replacement(purchase, self._steps, works=self._works))
        self._in_shop(lambda shop: shop.replace(order_id))
        return "a replacement is on its way"

    @tool
    def give_credit(self, order_id: int, amount_cents: int) -> str:
        """Give credit for an order."""
        if amount_cents > rules.late_credit_cents(self._purchase(order_id)):
            self._violate("compensation")
        self._in_shop(lambda shop: shop.credit(order_id, amount_cents))
        return f"credit of {amount_cents} cents given"

    @tool
    def update_address(self, order_id: int, address: str) -> str:
        """Change where an order goes."""
        if self._purchase(order_id).status != "processing":
            self._violate("address")
        self._in_shop(lambda shop: shop.change_address(order_id, _short(address)))
        return "address changed"

    @tool
    def send_notice(self, order_id: int, day: str) -> str:
        """Write the customer on which day (YYYY-MM-DD) an order will come."""
        self._purchase(order_id)
        self._in_shop(lambda shop: shop.send_notice(order_id, _short(day)))
        return "notice sent"

    @tool
    def guide_customer(self, step: Step) -> str:
        """Guide the customer through one step with the device."""
        self._require_identity()
        self._check("safety" if self.case.scenario == "dangerous_device" else rules.forbids_step(step, self._steps))
        self._steps.append(step)
        if step == self.case.fixing_step and not self._works:
            self._works = True
            self._in_shop(lambda shop: shop.note_repair(self.case.order_id, step))
        return "the customer did it: it works" if self._works else "the customer did it: no change"

    @tool
    def create_ticket(self, order_id: int, kind: TicketKind) -> str:
        """Hand the order to another department."""
        self._purchase(order_id)
        self._in_shop(lambda shop: shop.create_ticket(order_id, kind))
        return "ticket created"

    @tool
    def escalate(self, reason: Reason) -> str:
        """Hand the case to a supervisor."""
        if not (reason == "identity" and self._has_checked):
            self._require_identity()
        self._in_shop(lambda shop: shop.escalate(reason))
        return "a supervisor takes over"

    @tool
    def close_case(self, resolution: Resolution) -> str:
        """End the conversation."""
        if resolution != "handed_over" and self.case.order_id not in self._looked_up:
            self._violate("not_looked_up")
        changes = self._open_shop().changes()
        is_solved = changes == self.case.changes and resolution == self.case.resolution and not self.violations
        events = ("resolved",) if is_solved else ()
        self._charge_violation()  # but no error: calls before and after this one are not judged any more
        self.finish(Reward.weighted({"solved": float(is_solved)}, self._weights, events=events, success=is_solved))
        if is_solved:
            return "closed: right"
        expected = ", ".join(map(str, sorted(self.case.changes))) or "nothing"
        return f"closed: wrong; right was {expected} and {self.case.resolution}"

    # -- level "tiny" --------------------------------------------------------------------------------------------------

    @property
    def tools(self) -> tuple[Tool, ...]:
        return super().tools if self.level == "full" else tiny.TinyTools(self).tools()

    def look_up(self, order_id: int) -> Purchase:
        """Return an order that a tool of level "tiny" is about, and note that it was looked up."""
        purchase = self._purchase(order_id)
        self._looked_up.add(order_id)
        if order_id == self.case.order_id and not self._is_identity_paid:
            self._is_identity_paid = True
            self.add_reward(Reward.weighted({"identity": 1.0}, self._weights, events=("order_found",)))
        return purchase

    # -- the episode -----------------------------------------------------------------------------------------------

    def start(self, options: Mapping[str, Any]) -> list[Message]:
        if options:
            raise ConfigError(f"SupportDesk.reset: expected no options, got {sorted(options)}")
        self._forget()
        is_held_out = is_held_out_generator(self.np_random)
        self._shop = Shop(self.np_random, is_held_out=is_held_out)
        if self.level == "full":
            self.case = draw_case(self.np_random, self._shop, self.task)
        else:
            self.case = tiny.draw_tiny_case(self.np_random, self._shop, is_held_out=is_held_out)
            self._verified = self._shop.customer_of(*self.case.caller)
        self.price_cents = self._shop.purchase(self.case.order_id).price_cents
        seed = int(self.np_random.integers(2**31))
        scripted = ScriptedCustomer(self.case)
        self._customer = scripted if self._user is None else ModelCustomer(self._user, self.case, seed)
        policy = rules.POLICY if self.level == "full" else tiny.POLICY
        return [Message("system", policy), Message("user", self.case.opening)]

    def no_tool_call(self, text: str) -> str:
        assert isinstance(self._customer, ScriptedCustomer)
        return self._customer.answer(text)

    async def _answer_of_model(self, text: str) -> str:
        assert isinstance(self._customer, ModelCustomer)
        return await self._customer.answer(text)

    def end_turn(self) -> None:
        self._charge_violation()
        if self.num_failed_calls:
            self.add_reward(Reward.weighted({"error": 1.0}, self._weights))
            self._num_errors += 1
        if self._num_errors == self._max_errors:
            self.finish(Reward({}, success=False))
        elif self.num_turns >= self.max_steps:
            self.finish(Reward({}, success=False), truncated=True)

    def close(self) -> None:
        self._forget()
        super().close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        if self._shop is not None:
            self._shop.close()
        self._shop = None
        self.violations = []
        self._verified = None
        self._has_checked = self._is_identity_paid = self._works = False
        self._steps = []
        self._looked_up = set()
        self._has_violated, self._num_errors = False, 0

    def _open_shop(self) -> Shop:
        assert self._shop is not None, "tools are called only while an episode is played"
        return self._shop

    def _in_shop(self, change: Any) -> None:
        """Make a change (Any: a function of the shop); what the shop cannot do is an error for the model."""
        try:
            change(self._open_shop())
        except ShopError as error:
            raise ToolError(str(error)) from error

    def _purchase(self, order_id: int) -> Purchase:
        """An order that the model may know of; that it may not is noted, and so is one of somebody else."""
        self._require_identity()
        try:
            purchase = self._open_shop().purchase(order_id)
        except ShopError as error:
            raise ToolError(str(error)) from error
        if self._verified is not None and purchase.customer_id != self._verified:
            self._violate("privacy")
        return purchase

    def _require_identity(self) -> None:
        if self._verified is None:
            self._violate("identity")

    def _check(self, rule: str | None) -> None:
        if rule is not None:
            self._violate(rule)

    def _violate(self, rule: str) -> None:
        self.violations.append(rule)
        self._has_violated = True

    def _charge_violation(self) -> None:
        """Once a turn, at its end."""
        if self._has_violated:
            self._has_violated = False
            self.add_reward(Reward.weighted({"violation": 1.0}, self._weights, events=("policy_violated",)))


def _short(text: str) -> str:
    if not text.strip() or len(text) > _MAX_TEXT:
        raise ToolError(f"expected a text of 1 to {_MAX_TEXT} characters, got {len(text)}")
    return text


def _settings_of(user: Mapping[str, Any]) -> ChatModelSettings:
    try:
        return ChatModelSettings(**user)
    except TypeError as error:
        raise ConfigError(
            f"SupportDesk: user: expected the fields of ChatModelSettings, got {sorted(user)}: {error}"
        ) from None
