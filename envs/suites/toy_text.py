"""`ToyTextEnv`: Gymnasium's toy text suite (Blackjack, CliffWalking, FrozenLake, Taxi) in words.

Gymnasium's own games run inside, and their rewards and ends pass unchanged. pygame is not needed. In a config:
`rollout.env_name = "ToyText"` with `rollout.env_config = { game = "Taxi-v4" }`. The reference players play best on
average, which they compute from the environment's state and probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name
from gspo_gym.types import Message

from .discrete import DiscreteEnv, Succeeded

_CARDS = {1: "an ace"}
_STANDS = ("red", "green", "yellow", "blue")
_ROWS, _COLUMNS = 4, 12  # of the cliff


@dataclass(frozen=True, slots=True)
class Game:
    """Words, limits and reference player for a game of the suite.

    Attributes:
        env_id: Gymnasium's id, with its version.
        actions: names, in the order of their numbers.
        rules: text, given the environment.
        describe: text, given (observation, environment).
        success: (last reward, terminated) -> whether the episode was won.
        reward_range: of a whole episode, given (environment, max_steps).
        reference: player with the best play on average, without foresight of chance.
        illegal_penalty: large enough that answers without an action earn no more than the worst play: the cost of a
            step where steps cost something.
        max_steps: limit if Gymnasium registers none.
    """

    env_id: str
    actions: tuple[str, ...]
    rules: Callable[[Any], str]
    describe: Callable[[Any, Any], str]
    success: Succeeded
    reward_range: Callable[[Any, int], tuple[float, float]]
    reference: PolicyFactory
    illegal_penalty: float = 0.0
    max_steps: int | None = None


class ToyTextEnv(DiscreteEnv):
    r"""One game of Gymnasium's toy text suite; the first observation has the rules.

    Answers are read as in `DiscreteEnv`: an action by its name or number; anything else costs `illegal_penalty` and a
    step. An episode is a success if Blackjack is won, the goal reached, or the passenger delivered.

    The policy "reference" plays best on average: by backward induction over Gymnasium's transition table, or over the
    endless deck of Blackjack. Its return still depends on chance.

    Args:
        game: "Blackjack-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "FrozenLake-v1", "FrozenLake8x8-v1" or
            "Taxi-v4"; the version may be left out.
        max_steps: answers until truncation. None takes Gymnasium's limit (FrozenLake 100, 8x8 200, Taxi 200), or 200
            for CliffWalking and 20 for Blackjack, which have none.
        illegal_penalty: subtracted for an answer that is no action, >= 0. None is what the worst action costs, 100 in
            CliffWalking and 10 in Taxi, 0.05 in Blackjack, where 20 such answers cost what losing costs, and 0 in
            FrozenLake.
        **env_kwargs: arguments of Gymnasium's constructor, such as `is_slippery=False`, `is_rainy=True` or
        `natural=True`.

    Raises:
        UnknownNameError: there is no such game; names the nearest.

    >>> env = ToyTextEnv("CliffWalking")
    >>> print(env.reset(seed=0)[0].partition("\n")[2])
    . . . . . . . . . . . .
    . . . . . . . . . . . .
    . . . . . . . . . . . .
    A C C C C C C C C C C G
    Actions: up, right, down, left.
    >>> float(env.step("right")[1])
    -100.0
    """

    # The return of best play depends on the cards, the ice and the place of the passenger.
    reference_is_perfect = False

    def __init__(
        self, game: str, *, max_steps: int | None = None, illegal_penalty: float | None = None, **env_kwargs: Any
    ) -> None:
        self.game = _game(game)
        if "render_mode" in env_kwargs:
            raise ConfigError("ToyTextEnv: nothing is drawn, so render_mode has no effect; remove it")
        penalty = self.game.illegal_penalty if illegal_penalty is None else illegal_penalty
        super().__init__(
            self.game.env_id,
            env_kwargs=env_kwargs,
            describe=self.game.describe,
            action_names=self.game.actions,
            illegal_penalty=penalty,
            max_steps=max_steps,
            success=self.game.success,
        )
        self.max_steps = self.max_steps or self.game.max_steps
        assert self.max_steps is not None, f"{self.game.env_id} needs a limit on its steps"
        self._rules = self.game.rules(self.inner)
        low, high = self.game.reward_range(self.inner, self.max_steps)
        self.reward_range = (low - penalty * self.max_steps, high)
        self.policies = {"reference": self.game.reference, **self.policies}  # type: ignore[misc]  # on the instance


def _game(name: str) -> Game:
    for short, game in GAMES.items():
        if name in (short, game.env_id):
            return game
    known = [game.env_id for game in GAMES.values()]
    raise UnknownNameError(f"ToyTextEnv: there is no game {name!r}; {nearest_name(name, known)}")


# --- Blackjack --------------------------------------------------------------------------------------------------------


def _blackjack_rules(env: Any) -> str:
    bonus = " A win with an ace and a ten from the start counts one and a half." if env.natural and not env.sab else ""
    return (
        "Blackjack. Come nearer to 21 than the dealer, but not above it. An ace counts 11 or 1, face cards 10. "
        f"Hit to draw a card, stick to stop; the dealer then draws up to 17.{bonus}"
    )


def _hand(observation: Any, _env: Any) -> str:
    total, shown, has_usable_ace = observation
    ace = ", counting an ace as 11" if has_usable_ace else ""
    return f"Your cards sum to {total}{ace}. The dealer shows {_CARDS.get(int(shown), f'a {shown}')}."


def _blackjack_range(env: Any, _max_steps: int) -> tuple[float, float]:
    return -1.0, 1.5 if env.natural and not env.sab else 1.0


# --- CliffWalking and FrozenLake --------------------------------------------------------------------------------------


def _cliff_rules(env: Any) -> str:
    slippery = " The ground is slippery: two moves out of three go to a side." if env.is_slippery else ""
    return (
        "Walk from A to the goal G. Every move costs 1; stepping onto the cliff C costs 100 and takes you back to the "
        f"lower left corner.{slippery}"
    )


def _cliff(observation: Any, _env: Any) -> str:
    letters = "." * _COLUMNS * (_ROWS - 1) + "." + "C" * (_COLUMNS - 2) + "G"
    return _map(letters, int(observation), _COLUMNS)


def _cliff_range(_env: Any, max_steps: int) -> tuple[float, float]:
    return -100.0 * max_steps, -13.0  # one up, eleven to the right, one down


def _lake_rules(env: Any) -> str:
    slippery = any(len(outcomes) > 1 for moves in env.P.values() for outcomes in moves.values())
    slides = " The ice is slippery: you often slide to a side." if slippery else ""
    return f"Walk over the frozen lake from A to the goal G. F is ice; falling into a hole H ends the game.{slides}"


def _lake(observation: Any, env: Any) -> str:
    letters = b"".join(env.desc.ravel()).decode().replace("S", "F")
    return _map(letters, int(observation), env.ncol)


def _lake_range(env: Any, max_steps: int) -> tuple[float, float]:
    paid = {reward for moves in env.P.values() for outcomes in moves.values() for _, _, reward, _ in outcomes}
    return max_steps * min(0.0, *paid), float(max(paid))  # a goal and a hole end the episode


def _map(letters: str, place: int, num_columns: int) -> str:
    marked = f"{letters[:place]}A{letters[place + 1 :]}"
    return "\n".join(" ".join(marked[start : start + num_columns]) for start in range(0, len(marked), num_columns))


# --- Taxi -------------------------------------------------------------------------------------------------------------


def _taxi_rules(env: Any) -> str:
    lines = "\n".join(b"".join(row).decode() for row in env.desc)
    return (
        "Drive the taxi T on this map. | is a wall, : can be crossed; R, G, Y and B are the red, green, yellow and "
        f"blue stand.\n{lines}\nPick up the passenger and drop them off at their destination, which earns 20. Every "
        "step costs 1; picking up or dropping off where that cannot be done costs 10."
    )


def _taxi(observation: Any, env: Any) -> str:
    row, column, passenger, destination = (int(part) for part in env.decode(int(observation)))
    rows = [b"".join(line).decode() for line in env.desc]
    line = rows[1 + row]
    rows[1 + row] = f"{line[: 2 * column + 1]}T{line[2 * column + 2 :]}"
    where = "in the taxi" if passenger == len(_STANDS) else f"at the {_STANDS[passenger]} stand"
    at_stand = f", at the {_STANDS[env.locs.index((row, column))]} stand" if (row, column) in env.locs else ""
    return (
        "\n".join(rows)
        + f"\nThe taxi is in row {row + 1}, column {column + 1}{at_stand}. The passenger is {where} and "
        f"wants to go to the {_STANDS[destination]} stand."
    )


def _taxi_range(env: Any, max_steps: int) -> tuple[float, float]:
    # The most: from where the passenger waits, straight to the nearest other stand.
    values = best_moves(Table.of(env.P), max_steps).values
    return -10.0 * max_steps, float(max(values[env.initial_state_distrib > 0]))


def _is_positive(reward: float, _terminated: bool) -> bool:
    return reward > 0


def _is_terminated(_reward: float, terminated: bool) -> bool:
    return terminated


_CLIFF = ("up", "right", "down", "left")
_LAKE = ("left", "down", "right", "up")
_TAXI = ("south", "north", "east", "west", "pick up", "drop off")


def _games() -> dict[str, Game]:
    hand = Game("Blackjack-v1", ("stick", "hit"), _blackjack_rules, _hand, _is_positive, _blackjack_range, best_hand)
    cliff = Game("CliffWalking-v1", _CLIFF, _cliff_rules, _cliff, _is_terminated, _cliff_range, play_table)
    cliff = replace(cliff, illegal_penalty=100.0, max_steps=200)
    lake = Game("FrozenLake-v1", _LAKE, _lake_rules, _lake, _is_positive, _lake_range, play_table)
    taxi = Game("Taxi-v4", _TAXI, _taxi_rules, _taxi, _is_terminated, _taxi_range, play_table, illegal_penalty=10.0)
    return {
        "Blackjack": replace(hand, illegal_penalty=0.05, max_steps=20),
        "CliffWalking": cliff,
        "CliffWalkingSlippery": replace(cliff, env_id="CliffWalkingSlippery-v1"),
        "FrozenLake": lake,
        "FrozenLake8x8": replace(lake, env_id="FrozenLake8x8-v1"),
        "Taxi": taxi,
    }


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
    """Best moves [steps, states] int: `moves[k - 1, state]` with k steps left; `values` are returns with all steps."""

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
    """Return a player of best moves in a `ToyTextEnv` for a game with a table of transitions."""
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
def _dealer(shown: int, has_ace: bool) -> tuple[tuple[int, float], ...]:  # (final sum, probability); 22: above 21
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
    if card == 1 and total + 11 <= 21:
        return total + 11, True
    total += card
    if total > 21 and has_usable_ace:
        return total - 10, False
    return total, has_usable_ace


GAMES: Mapping[str, Game] = _games()
