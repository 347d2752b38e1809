"""FrozenLake: Gymnasium's own FrozenLake as text, on a fixed map or on a random one per seed.

The dynamics are Gymnasium's `FrozenLakeEnv`, run inside; this file adds the text, the legal moves, the turn-level
rewards and the step limit. `README.md` beside it has the rules, the rewards and a transcript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, PolicyFactory, SmallTask, TextEnv
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

from .lake import MOVE_NAMES, Transitions, checked_lake, distances_to_goal, neighbour
from .policies import best_play, random_moves

Style = Literal["terse", "verbose"]
StepTuple = tuple[str, Reward, bool, bool, Info]

_MOVES = {name: move for move, name in enumerate(MOVE_NAMES)} | {name[0]: move for move, name in enumerate(MOVE_NAMES)}
_DEFAULT_RANDOM_SIZE = 4
_POTENTIAL_UNIT = 2.0**-20  # potentials are multiples of it, so that their differences add up without rounding error


class FrozenLake(TextEnv):
    """Walk from A to the goal G over ice F without stepping into a hole H; one move a turn.

    An action is a move if the text, stripped of white space and in any case, is left, down, right, up or its first
    letter. Anything else is illegal, and so is a move off the lake unless the ice is slippery (there, pushing against
    the edge is a way to slide along it); an illegal answer costs a step and the agent stays. The episode terminates in
    a hole and at a goal, and is truncated after `max_steps`.

    Args:
        map: "4x4" or "8x8" (Gymnasium's), "random" (Gymnasium's `generate_random_map` with the episode's seed), or rows
            of S, F, H, G with one S and a G that can be reached.
        size: rows and columns of a random map, at least 2; None: 4. Only with map="random".
        is_slippery: whether a move goes sideways two times out of three.
        max_steps: None: as many as the map has cells, always enough on firm ice. A random map whose shortest path is
            longer than a smaller limit cannot be solved.
        goal_reward: for reaching a goal, > 0; also the top return.
        progress_reward: scale of the potential that pays for coming nearer, >= 0 and < goal_reward (see `README.md`:
            it adds nothing to an episode that terminates).
        illegal_penalty: subtracted for an illegal answer, >= 0.
        style: "verbose" (sentences) or "terse" (a few bytes beside the map).

    Attributes (read by the scripted policies):
        lake: the rows of the map. cell: where the agent stands, row * num_columns + column.
        steps_left: steps before truncation. transitions: Gymnasium's transition table `P`.

    >>> env = FrozenLake(style="terse", map=["SF", "HG"])
    >>> print(env.reset(seed=0)[0])
    A to G, not H.
    AF
    HG
    d/r
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {"reference": best_play, "random": random_moves}
    small_task: ClassVar[SmallTask | None] = SmallTask({"map": "random", "size": 3}, style={"style": "terse"})
    isolation = "thread"
    any_thread = True

    def __init__(
        self,
        *,
        map: str | Sequence[str] = "4x4",
        size: int | None = None,
        is_slippery: bool = False,
        max_steps: int | None = None,
        goal_reward: float = 1.0,
        progress_reward: float = 0.25,
        illegal_penalty: float = 0.05,
        style: Style = "verbose",
    ) -> None:
        if not (0 <= progress_reward < goal_reward and illegal_penalty >= 0):
            raise ConfigError(
                "FrozenLake: expected 0 <= progress_reward < goal_reward and illegal_penalty >= 0, got "
                f"progress_reward={progress_reward}, goal_reward={goal_reward}, illegal_penalty={illegal_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"FrozenLake: expected style 'terse' or 'verbose', got {style!r}")
        self._map = _map_setting(map, size)
        self.max_steps = _step_limit(self._map, max_steps)
        self.is_slippery, self.style = is_slippery, style
        self._goal_reward, self._progress_reward = goal_reward, progress_reward
        self._illegal_penalty = illegal_penalty
        self.reward_range = (-illegal_penalty * self.max_steps, goal_reward)
        self.lake: tuple[str, ...] = ()
        self.cell = 0
        self.steps_left = 0
        self.transitions: Transitions = {}
        self._inner: gymnasium.Env[Any, Any] | None = None  # None: no episode is being played
        self._distances: dict[int, int] = {}

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        if options:
            raise ConfigError(f"FrozenLake.reset: expected no options, got {sorted(options)}")
        super().reset(seed=seed)
        # A seed of its own for the ice: with the episode's, the slips would repeat the draws that made the map.
        ice_seed = int(self.np_random.integers(2**31, size=2)[1])
        if isinstance(self._map, int):
            map_seed = next_seed(self.np_random) if seed is None else seed
            self.lake = tuple(generate_random_map(self._map, seed=map_seed))
        else:
            self.lake = self._map
        inner = FrozenLakeEnv(desc=list(self.lake), is_slippery=self.is_slippery)
        self.cell = int(inner.reset(seed=ice_seed)[0])
        self._inner, self.transitions = inner, inner.P
        self._distances = distances_to_goal(self.lake)
        self.steps_left = self.max_steps
        return f"{self._rules()}\n{self._view()}", {}

    def step(self, action: str) -> StepTuple:
        inner = self._playing()
        move = _MOVES.get(action.strip().lower())
        if move is None or move not in self.legal_moves():
            return self._stay("illegal")
        potential_before = self._potential()
        self.steps_left -= 1
        cell, _, terminated, _, _ = inner.step(move)
        self.cell = int(cell)
        terms = {"progress": self._potential() - potential_before}
        if terminated:
            return self._end(terms)
        return self._go_on(self._view(), terms)

    def invalid_action(self, error: str) -> StepTuple:
        """An answer that could not even be read costs a step, like any other illegal answer."""
        self._playing()
        return self._stay(error)

    def legal_moves(self) -> list[int]:
        """The moves that are not illegal where the agent stands, in Gymnasium's numbers."""
        if self.is_slippery:
            return list(range(len(MOVE_NAMES)))
        return [move for move in range(len(MOVE_NAMES)) if neighbour(self.lake, self.cell, move) is not None]

    def _playing(self) -> gymnasium.Env[Any, Any]:
        if self._inner is None:
            raise ResetNeeded("FrozenLake: no episode is being played; call reset first")
        return self._inner

    def _stay(self, error: str) -> StepTuple:
        self.steps_left -= 1
        return self._go_on(f"{error}\n{self._view()}", {"illegal": -self._illegal_penalty})

    def _go_on(self, observation: str, terms: Mapping[str, float]) -> StepTuple:
        if self.steps_left > 0:
            return observation, Reward(terms), False, False, {}
        self._inner = None
        return observation, Reward(terms, success=False), False, True, {}

    def _end(self, terms: Mapping[str, float]) -> StepTuple:
        self._inner = None
        if self._letter() == "H":
            return "hole", Reward(terms, success=False), True, False, {}
        reward = Reward({"goal": self._goal_reward, **terms}, events=("goal",), success=True)
        return "goal", reward, True, False, {}

    def _potential(self) -> float:
        """How near the goal, from 0 (the start and whatever is farther) up to `progress_reward`, excluded.

        0 in terminal states, as shaping must be to change nothing in episodes that terminate (Ng, Harada and Russell,
        ICML 1999; Grzes, AAMAS 2017, for the terminal states), with discount 1.
        """
        if self._letter() in "GH" or self.cell not in self._distances:
            return 0.0
        start = "".join(self.lake).index("S")
        nearness = max(0.0, 1.0 - self._distances[self.cell] / self._distances[start])
        return round(self._progress_reward * nearness / _POTENTIAL_UNIT) * _POTENTIAL_UNIT

    def _letter(self) -> str:
        return "".join(self.lake)[self.cell]

    def _rules(self) -> str:
        if self.style == "terse":
            return "A to G, not H."
        slippery = " The ice is slippery: you often slide to a side." if self.is_slippery else ""
        return (
            "You stand on a frozen lake, at A on the map. F is ice, H is a hole, G is the goal. Reach the goal without "
            f"falling into a hole, in at most {self.max_steps} moves.{slippery} "
            "Answer with one move: left, down, right or up."
        )

    def _view(self) -> str:
        """The map with the agent's place, and the legal moves."""
        letters = "".join(self.lake)
        marked = f"{letters[: self.cell]}A{letters[self.cell + 1 :]}"
        width = len(self.lake[0])
        rows = "\n".join(marked[start : start + width] for start in range(0, len(marked), width))
        names = [MOVE_NAMES[move] for move in self.legal_moves()]
        if self.style == "terse":
            return f"{rows}\n{'/'.join(name[0] for name in names)}"
        return f"{rows}\nMoves: {', '.join(names)}. Steps left: {self.steps_left}."


def _map_setting(map: str | Sequence[str], size: int | None) -> tuple[str, ...] | int:
    """The rows of a fixed map, or the size of the random ones."""
    if map == "random":
        size = _DEFAULT_RANDOM_SIZE if size is None else size
        if size < 2:
            raise ConfigError(f"FrozenLake: expected size >= 2, got {size}")
        return size
    if size is not None:
        raise ConfigError(f"FrozenLake: size only goes with map='random', got size={size} and map={map!r}")
    if not isinstance(map, str):
        return checked_lake(map)
    if map not in MAPS:
        raise UnknownNameError(f"FrozenLake: unknown map {map!r}; {nearest_name(map, [*MAPS, 'random'])}")
    return checked_lake(MAPS[map])


def _step_limit(lake: tuple[str, ...] | int, max_steps: int | None) -> int:
    """The resolved `max_steps`.

    Raises:
        ConfigError: so few that not even the shortest path fits (of a random map: the shortest that any map can have).
    """
    if isinstance(lake, int):
        num_cells, shortest = lake * lake, 2 * (lake - 1)
    else:
        letters = "".join(lake)
        num_cells, shortest = len(letters), distances_to_goal(lake)[letters.index("S")]
    limit = num_cells if max_steps is None else max_steps
    if limit < shortest:
        raise ConfigError(f"FrozenLake: the shortest path has {shortest} moves, got max_steps={max_steps}")
    return limit
