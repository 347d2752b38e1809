"""The hand-written players of SupportDesk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message, ToolCall

from .rules import STEPS, Resolution

Move = str | tuple[str, Mapping[str, Any]]  # words, or a call


def by_the_book(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Asks, verifies, does what the policy asks for and closes.

    `env` is a `SupportDesk` after `reset` (Any: `PolicyFactory` fixes the type).
    """
    return _plan([*_asking(env), *env.case.calls, _close(env, env.case.resolution)])


def random_clerk(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Verifies, looks the order up, does one random thing for it with one chance in two, and closes in a random way.

    At level "tiny" it makes a random call for the order and closes in a random way.
    """
    moves = _random_moves(env, rng)
    return _plan([*moves, _close(env, str(rng.choice(get_args(Resolution))))])


def apprentice(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Does what the policy asks for with one chance in three, else what `random_clerk` does; then closes so, too."""
    is_right, closes_right = rng.random(2) < 1 / 3
    case = env.case
    moves = [*_asking(env), *case.calls] if is_right else _random_moves(env, rng)
    return _plan([*moves, _close(env, case.resolution if closes_right else str(rng.choice(get_args(Resolution))))])


def _random_moves(env: Any, rng: np.random.Generator) -> list[Move]:
    if env.level == "tiny":
        action = str(rng.choice(["look", "refund", "replace", "credit", "escalate"]))
        return [(action, {"id": env.case.order_id})]
    order = {"order_id": env.case.order_id}
    price = env.price_cents
    things: list[Move] = [
        ("refund", {**order, "amount_cents": price}),
        ("give_credit", {**order, "amount_cents": max(1, price // 10)}),
        ("replace_article", order),
        ("update_address", {**order, "address": "1 Main Street"}),
        ("create_ticket", {**order, "kind": str(rng.choice(["carrier", "paid_repair"]))}),
        ("escalate", {"reason": str(rng.choice(["identity", "large_refund", "safety"]))}),
        ("guide_customer", {"step": STEPS[0]}),
    ]
    moves = [*_asking(env), ("get_order", order)]
    if rng.random() < 0.5:
        moves.append(things[int(rng.integers(len(things)))])
    return moves


def _close(env: Any, resolution: str) -> Move:
    return ("close", {"how": resolution}) if env.level == "tiny" else ("close_case", {"resolution": resolution})


def _asking(env: Any) -> list[Move]:
    """Asks for what is needed, and verifies what was said; at level "tiny" the customer is known."""
    if env.level == "tiny":
        return []
    email, postcode = env.case.caller
    return [
        "What is your e-mail, please?",
        "And your postcode?",
        "Which order is it about, and is there a new address?",
        ("verify_identity", {"email": email, "postcode": postcode}),
    ]


def _plan(moves: Sequence[Move]) -> ScriptedPolicy:
    def play(messages: Sequence[Message]) -> Message:
        turn = sum(message.role == "assistant" for message in messages)
        move = moves[min(turn, len(moves) - 1)]
        if isinstance(move, str):
            return Message("assistant", move)
        return Message("assistant", "", tool_calls=(ToolCall(f"call_{turn}", move[0], move[1]),))

    return play
