"""Players of `toy_text.py` with the best play on average, computed from the environment's state and probabilities."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message

# Gymnasium's `P`: for each state and action, the outcomes (probability, next state, reward, terminated).
Transitions = Mapping[int, Mapping[int, Sequence[tuple[float, int, float, bool]]]]

_DRAWN = {**dict.fromkeys(range(1, 10), 1 / 13), 10: 4 / 13}  # ten and face cards count 10; the deck is endless


@dataclass(frozen=True, slots=True)
class Table:
    """Gymnasium's transition table as arrays [states, actions, outcomes]; missing outcomes have probability 0."""

    probs: np.ndarray[Any, Any]
    next_states: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    go_on: np.ndarray[Any, Any]  # 0.0 where the outcome ends the episode, else 1.0

    @classmethod
    def of(cls, transitions: Transitions) -> Table:
        """Return the table of an environment's `P`."""
        num_outcomes = max(len(outcomes) for moves in transitions.values() for outcomes in moves.values())
        missing = (0.0, 0, 0.0, True)
        rows = [
            [
                [*map(tuple, transitions[state][move]), *[missing] * (num_outcomes - len(transitions[state][move]))]
                for move in sorted(transitions[state])
            ]
            for state in sorted(transitions)
        ]
        array = np.array(rows, dtype=np.float64)
        return cls(array[..., 0], array[..., 1].astype(int), array[..., 2], 1.0 - array[..., 3])


@dataclass(frozen=True, slots=True)
class BestMoves:
    """`moves[k - 1, state]` is the best with k steps left, int [steps, states]; `values` are the returns with all
    steps.
    """

    moves: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def best_moves(table: Table, num_steps: int) -> BestMoves:
    """Return the moves of the largest expected undiscounted return within a number of steps.

    Backward induction over the finite horizon (Puterman 1994, section 4.5), exact for the table; of equally good moves,
    the lowest number.
    """
    values = np.zeros(len(table.probs))
    moves = np.zeros((num_steps, len(values)), dtype=np.int64)
    for step in range(num_steps):
        expected = (table.probs * (table.rewards + table.go_on * values[table.next_states])).sum(axis=2)
        best = expected.max(axis=1)
        moves[step] = (expected >= best[:, None] - 1e-12).argmax(axis=1)  # sums of equal terms may differ by rounding
        values = best
    return BestMoves(moves, values)


def play_table(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of best moves in a `ToyTextEnv` whose game has a table of transitions."""
    moves = best_moves(Table.of(env.inner.P), env.steps_left).moves

    def play(_messages: Sequence[Message]) -> str:
        return str(env.actions.name(int(moves[env.steps_left - 1][env.observation])))

    return play


def best_hand(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player of Blackjack that hits if that is expected to earn more than to stick.

    Exact except for the bonus of a natural, which is paid for sticking to the first two cards: they sum to 21, and this
    player sticks to 21.
    """

    def play(_messages: Sequence[Message]) -> str:
        total, shown, has_usable_ace = (int(part) for part in env.observation)
        stick, hit = value_of_stick(total, shown), value_of_hit(total, bool(has_usable_ace), shown)
        return "hit" if hit > stick else "stick"

    return play


def value_of_stick(total: int, shown: int) -> float:
    """Return the expected reward of stopping at a sum when the dealer shows a card (1 is an ace)."""
    return sum(
        prob * (1.0 if dealt > 21 or total > dealt else -1.0 if total < dealt else 0.0)
        for dealt, prob in _dealer(shown, shown == 1)
    )


@functools.cache
def value_of_hit(total: int, has_usable_ace: bool, shown: int) -> float:
    """Return the expected reward of drawing a card and playing best from there."""
    expected = 0.0
    for card, prob in _DRAWN.items():
        new_total, new_ace = _with_card(total, has_usable_ace, card)
        if new_total > 21:
            expected -= prob
        else:
            expected += prob * max(value_of_stick(new_total, shown), value_of_hit(new_total, new_ace, shown))
    return expected


@functools.cache
def _dealer(shown: int, has_ace: bool) -> tuple[tuple[int, float], ...]:
    """Return (final sum, probability) pairs of a dealer that shows a card; 22 stands for all sums above 21."""
    return _dealt(shown + 10 if has_ace else shown, has_ace)


@functools.cache
def _dealt(total: int, has_usable_ace: bool) -> tuple[tuple[int, float], ...]:
    if total >= 17:
        return ((min(total, 22), 1.0),)
    found: dict[int, float] = {}
    for card, prob in _DRAWN.items():
        for final, chance in _dealt(*_with_card(total, has_usable_ace, card)):
            found[final] = found.get(final, 0.0) + prob * chance
    return tuple(sorted(found.items()))


def _with_card(total: int, has_usable_ace: bool, card: int) -> tuple[int, bool]:
    """Return the sum after a card and whether an ace in it counts 11, which it does unless the sum goes above 21."""
    if card == 1 and total + 11 <= 21:
        return total + 11, True
    total += card
    if total > 21 and has_usable_ace:
        return total - 10, False
    return total, has_usable_ace
