"""`DiscreteEnv`: any Gymnasium environment with numbered actions, played in words.

`describe` puts an observation into words, `parse` reads an action from an answer. Both have defaults, so
`make("Discrete", env="CartPole-v1")` works. In a config: `rollout.env_name = "Discrete"`, `rollout.env_config = { env =
"CartPole-v1", observation_names = [...] }`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Discrete, MultiDiscrete

from gspo_gym.base.modules import named_object
from gspo_gym.env.core import Info, PolicyFactory, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.registry import make
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name
from gspo_gym.types import Message

# Observations and actions are Any here: they are what the environment's spaces hold.
Describe = Callable[[Any, Any], str]  # (observation, unwrapped environment) -> text for the model
Parse = Callable[[str], Any]  # answer -> action for `step`, or None
Succeeded = Callable[[float, bool], bool | None]  # (last reward, terminated) of a finished episode -> success
StepTuple = tuple[str, Reward, bool, bool, Info]

_MAX_NUMBERS = 64  # a larger observation needs a `describe` function

# Names of the numbers in Gymnasium's classic control: (observation, actions).
CLASSIC_CONTROL: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "CartPole": (
        ("cart position", "cart velocity", "pole angle", "pole angular velocity"),
        ("push left", "push right"),
    ),
    "MountainCar": (("position", "velocity"), ("accelerate left", "coast", "accelerate right")),
    "Acrobot": (
        (
            *("cosine of joint 1", "sine of joint 1", "cosine of joint 2", "sine of joint 2"),
            *("angular velocity of joint 1", "angular velocity of joint 2"),
        ),
        ("torque -1", "torque 0", "torque +1"),
    ),
}


class DiscreteEnv(TextEnv):
    """A Gymnasium environment with a Discrete or MultiDiscrete action space, in words.

    An answer is an action if `parse` reads one; by default its name or number in any case and white space, and for
    several dimensions one of each, separated by commas. Anything else is illegal: the inner environment is not stepped,
    the model is told the legal actions, and the answer costs `illegal_penalty`. The inner rewards pass unchanged as the
    term "reward".

    Args:
        env: a registered id, or a function that makes the environment.
        env_kwargs: arguments of its constructor; only with an id.
        describe: (observation, environment) -> text, or "MODULE:NAME" of such a function. None writes names and
            numbers.
        parse: answer -> action or None, or "MODULE:NAME". None reads names or numbers.
        action_names: of each action in order; for MultiDiscrete a list per dimension. None takes those of classic
            control, else the numbers.
        observation_names: of the observation's numbers, for the default `describe`. None takes those of classic
            control, else x0, x1.
        rules: beginning of the first observation. None says that an action must be chosen.
        illegal_penalty: subtracted for an illegal answer, >= 0.
        max_steps: answers, illegal ones included, until truncation. None takes the registered time limit; without one
            the inner environment ends the episode.
        reward_range: smallest and largest return, if known.
        success: (last reward, terminated) -> success of a finished episode, or "MODULE:NAME". None declares no success.

    Attributes (read by scripted policies):
        inner: the unwrapped environment.
        observation: its last observation.
        actions: names and numbers.
        steps_left: answers before truncation; None for no limit.

    Raises:
        ConfigError: the action space is not discrete, or an argument does not fit the environment.

    >>> env = DiscreteEnv("CartPole-v1")
    >>> print(env.reset(seed=0)[0])
    Choose an action.
    cart position = 0.01370, cart velocity = -0.02302, pole angle = -0.04590, pole angular velocity = -0.04835
    Actions: push left, push right.
    >>> float(env.step("push left")[1])
    1.0
    """

    def __init__(
        self,
        env: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        describe: str | Describe | None = None,
        parse: str | Parse | None = None,
        action_names: Sequence[Any] | None = None,
        observation_names: Sequence[str] | None = None,
        rules: str | None = None,
        illegal_penalty: float = 0.0,
        max_steps: int | None = None,
        reward_range: Sequence[float] | None = None,
        success: str | Succeeded | None = None,
    ) -> None:
        if illegal_penalty < 0 or (max_steps is not None and max_steps < 1):
            raise ConfigError(
                f"DiscreteEnv: expected illegal_penalty >= 0 and max_steps >= 1, got {illegal_penalty} and {max_steps}"
            )
        self._outer = _made(env, env_kwargs)
        self.inner: Any = self._outer.unwrapped
        self.max_steps = _registered_limit(self._outer) if max_steps is None else max_steps
        known = CLASSIC_CONTROL.get(self._outer.spec.name if self._outer.spec else "", (None, None))
        self.actions = Actions.of(self._outer.action_space, action_names or known[1])
        names = observation_names or known[0]
        self._describe = _function(describe, "describe") or (lambda seen, _env: in_numbers(seen, names))
        self._parse: Parse = _function(parse, "parse") or self.actions.parse
        self._succeeded: Succeeded = _function(success, "success") or (lambda _reward, _terminated: None)
        self._rules = "Choose an action." if rules is None else rules
        self._illegal_penalty = illegal_penalty
        if reward_range is not None:
            self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        self.policies: Mapping[str, PolicyFactory] = {"random": random_actions}  # type: ignore[misc]  # suites add more
        self.observation: Any = None
        self.steps_left: int | None = None
        self._is_playing = False

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, Info]:
        """Reset the inner environment with the options and the seed, or one drawn by `splits.next_seed`."""
        super().reset(seed=seed)
        seed = next_seed(self.np_random) if seed is None else seed
        self.observation, info = self._outer.reset(seed=seed, options=dict(options) if options else None)
        self.steps_left = self.max_steps
        self._is_playing = True
        return f"{self._rules}\n{self._view()}\nActions: {self.actions}.", dict(info)

    def step(self, action: str) -> StepTuple:
        """Play the action that the answer names."""
        self._require_reset("step")
        chosen = self._parse(action)
        if chosen is None:
            return self._illegal(f"That is no action. Actions: {self.actions}.")
        self.observation, reward, terminated, truncated, info = self._outer.step(chosen)
        return self._answered(self._view(), {"reward": float(reward)}, bool(terminated), bool(truncated), dict(info))

    def invalid_action(self, error: str) -> StepTuple:
        """Treat an unreadable answer as an illegal one."""
        self._require_reset("invalid_action")
        return self._illegal(f"{error}\nActions: {self.actions}.")

    def close(self) -> None:
        self._outer.close()

    def _require_reset(self, method: str) -> None:
        if not self._is_playing:
            raise ResetNeeded(f"{type(self).__name__}.{method}: no episode is being played; call reset first")

    def _illegal(self, text: str) -> StepTuple:
        return self._answered(f"{text}\n{self._view()}", {"illegal": -self._illegal_penalty}, False, False, {})

    def _answered(
        self, text: str, terms: Mapping[str, float], terminated: bool, truncated: bool, info: Info
    ) -> StepTuple:
        if self.steps_left is not None:
            self.steps_left -= 1
            truncated = truncated or (self.steps_left == 0 and not terminated)
        success = None
        if terminated or truncated:
            self._is_playing = False
            success = self._succeeded(terms.get("reward", 0.0), terminated)
        return text, Reward(terms, success=success), terminated, truncated, info

    def _view(self) -> str:
        return self._describe(self.observation, self.inner)


def random_actions(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that draws actions uniformly; needs a `parse` that takes names."""

    def play(_messages: Sequence[Message]) -> str:
        return str(env.actions.sample(rng))

    return play


def in_numbers(observation: Any, names: Sequence[str] | None = None) -> str:
    """Return the numbers of an observation with their names: x0, x1, ... or the keys of a Dict space.
    >>> in_numbers(np.array([0.5, -1.0]))
    'x0 = 0.5000, x1 = -1.000'
    >>> in_numbers({"speed": 3, "doors": np.array([1, 0])})
    'speed = 3, doors 0 = 1, doors 1 = 0'
    """
    found = _numbers(observation, "x" if names is None else "")
    if len(found) > _MAX_NUMBERS:
        raise ConfigError(f"DiscreteEnv: an observation of {len(found)} numbers needs a describe function of its own")
    if names is None:
        return ", ".join(f"{name} = {_written(value)}" for name, value in found)
    if len(names) != len(found):
        raise ConfigError(f"DiscreteEnv: expected {len(found)} observation_names, one for each number, got {names}")
    return ", ".join(f"{name} = {_written(value)}" for name, (_, value) in zip(names, found, strict=True))


def _numbers(observation: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(observation, Mapping):
        return [pair for key, part in observation.items() for pair in _numbers(part, str(key))]
    if isinstance(observation, tuple | list):
        parts = enumerate(observation)
    else:
        array = np.asarray(observation)
        if array.ndim == 0:
            return [(name, array.item())]
        parts = enumerate(array.ravel().tolist())
    separator = "" if name == "x" else " "
    return [pair for index, part in parts for pair in _numbers(part, f"{name}{separator}{index}".strip())]


def _written(value: Any) -> str:
    return f"{value:#.4g}" if isinstance(value, float) else str(value)


def _made(env: Any, env_kwargs: Mapping[str, Any] | None) -> Any:
    if not isinstance(env, str):
        if env_kwargs:
            raise ConfigError("DiscreteEnv: env_kwargs go with the id of an environment, not with a function")
        return env()
    try:
        made = make(env, **(env_kwargs or {}))
    except UnknownNameError as error:
        if ":" in env or env in gymnasium.registry:  # a module, or something in the environment itself
            raise
        known = [name for name in gymnasium.registry if "/" not in name]  # Gymnasium's own have no namespace
        raise UnknownNameError(
            f"DiscreteEnv: Gymnasium has no environment {env!r}; {nearest_name(env, known)}"
        ) from error
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(f"DiscreteEnv: expected env to name a gymnasium.Env, got {env!r}, a {type(made).__name__}")
    return made


def _registered_limit(env: Any) -> int | None:
    return None if env.spec is None else env.spec.max_episode_steps


def _function(given: Any, what: str) -> Any:
    return named_object(given, what) if isinstance(given, str) else given


@dataclass(frozen=True)
class Actions:
    """The choices in each dimension of an action; a Discrete space has one dimension.

    `names` and `starts` are for each dimension the names in the order of their numbers, and the number of the first;
    `is_single`: an action is one number (Discrete), not an array (MultiDiscrete).
    >>> actions = Actions.of(Discrete(3), ["left", "stay", "right"])
    >>> actions.parse(" Right "), actions.parse("1"), actions.parse("jump")
    (2, 1, None)
    >>> Actions.of(MultiDiscrete([2, 2]), [["up", "down"], ["open", "close"]]).parse("down, open")
    array([1, 0])
    """

    names: tuple[tuple[str, ...], ...]
    starts: tuple[int, ...]
    is_single: bool

    @classmethod
    def of(cls, space: Any, names: Sequence[Any] | None) -> Actions:
        """Return the actions of a space (else a ConfigError); without names, they are called by their numbers."""
        counts: tuple[int, ...]
        starts: tuple[int, ...]
        if isinstance(space, Discrete):
            counts, starts, is_single = (int(space.n),), (int(space.start),), True
            names = None if names is None else [names]
        elif isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
            counts, starts, is_single = tuple(map(int, space.nvec)), tuple(map(int, space.start)), False
        else:
            raise ConfigError(f"DiscreteEnv: expected a Discrete action space, or a flat MultiDiscrete, got {space}")
        if names is None:
            names = [
                [str(start + index) for index in range(count)] for count, start in zip(counts, starts, strict=True)
            ]
        given = tuple(tuple(str(name) for name in dimension) for dimension in names)
        if tuple(map(len, given)) != counts or any(len(set(map(_folded, d))) != len(d) for d in given):
            raise ConfigError(f"DiscreteEnv: expected different action_names, {counts} of them, got {names}")
        return cls(given, starts, is_single)

    def parse(self, text: str) -> Any:
        """Return the action that a text names by names or numbers, or None."""
        parts = [text] if self.is_single else text.split(",")
        if len(parts) != len(self.names):
            return None
        chosen = [self._number(dimension, part) for dimension, part in enumerate(parts)]
        if None in chosen:
            return None
        return chosen[0] if self.is_single else np.array(chosen)

    def sample(self, rng: np.random.Generator) -> str:
        return ", ".join(dimension[int(rng.integers(len(dimension)))] for dimension in self.names)

    def name(self, number: int) -> str:
        """Return the name of a number in the first dimension."""
        return self.names[0][number - self.starts[0]]

    def __str__(self) -> str:
        if self.is_single:
            return ", ".join(self.names[0])
        return "one of each, separated by commas: " + " - ".join("/".join(dimension) for dimension in self.names)

    def _number(self, dimension: int, text: str) -> int | None:
        names, start = self.names[dimension], self.starts[dimension]
        folded = _folded(text)
        for index, name in enumerate(names):
            if folded == _folded(name):
                return start + index
        # After the names, which may look like numbers too.
        if re.fullmatch(r"-?\d{1,9}", folded) and start <= int(folded) < start + len(names):
            return int(folded)
        return None


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
