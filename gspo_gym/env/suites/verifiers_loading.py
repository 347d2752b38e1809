"""Loads a verifiers environment once in a process, and makes it fit to be driven. Called by `verifiers.py`.

One loaded environment serves all episodes at once, as in verifiers, where what belongs to a rollout is in its state.
(Each environment also stays alive until the process ends, because it registers a clean-up for then.)
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError
from gspo_gym.seeding import FIRST_TRAINING_SEED

_MODEL = "policy"  # the name of the model in a rollout's state; there is only one
_Failures = list[tuple[str, Exception]]

_loading = threading.RLock()
_failures: ContextVar[_Failures] = ContextVar("_failures")  # of reward functions, in the rollout that is being scored


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A verifiers environment (Any: the package is untyped).

    Attributes:
        package: the module `verifiers`.
        environment: what `load_environment` gave.
        name: its env_id, for errors.
        tool_schemas: its tools as OpenAI function schemas.
        weights: of the reward functions that have one, by name. is_scored: it scores rollouts at all.
    """

    package: Any
    environment: Any
    name: str
    tool_schemas: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, float]
    is_scored: bool

    def row(self, seed: int) -> tuple[dict[str, Any], bool]:
        """The row of the data that a seed names, and whether it is held out from training.

        Raises:
            ConfigError: there is no row on that side.
        """
        is_training = seed >= FIRST_TRAINING_SEED
        with _loading:  # the data are built when they are first asked for
            held_out = None if is_training else self.environment.build_eval_dataset()
            try:
                rows = self.environment.get_dataset() if held_out is None else held_out
            except ValueError as error:
                raise ConfigError(f"Verifiers: {self.name} has no training rows, only evaluation rows") from error
            if len(rows) == 0:
                raise ConfigError(f"Verifiers: {self.name} has no {'training' if is_training else 'evaluation'} rows")
            return dict(rows[(seed % FIRST_TRAINING_SEED if is_training else seed) % len(rows)]), held_out is not None

    async def rollout(self, row: dict[str, Any], client: Any) -> Mapping[str, Any]:
        """One rollout with its score, as verifiers gives it out.

        Raises:
            EnvError: a reward function raised, which verifiers would count as 0.
        """
        failures: _Failures = []
        _failures.set(failures)  # a rollout is a task of its own, so this is seen in it alone
        output: Mapping[str, Any] = await self.environment.run_rollout(row, client, _MODEL, {})
        if failures:
            name, error = failures[0]
            text = f"Verifiers: {self.name}: reward function {name} raised {type(error).__name__}: {error}"
            raise EnvError(text) from error
        return output


def load(env_id: str, env_args: Mapping[str, Any]) -> Loaded:
    """The environment of that name with these arguments; the same one for the same arguments, if they are JSON.

    Raises:
        MissingExtraError, ConfigError: as `VerifiersEnv`.
    """
    try:
        key = json.dumps(env_args, sort_keys=True)
    except TypeError:  # objects of the caller's own: nobody can say whether two are the same
        return _load(env_id, env_args)
    with _loading:
        return _load_once(env_id, key)


@functools.cache
def _load_once(env_id: str, arguments: str) -> Loaded:
    return _load(env_id, json.loads(arguments))


def forget_loaded() -> None:
    """Loads every environment anew from now on, for a program that edits one while it runs."""
    _load_once.cache_clear()


def _load(env_id: str, env_args: Mapping[str, Any]) -> Loaded:
    try:
        package = importlib.import_module("verifiers")
        core = importlib.import_module("verifiers.envs.environment")
    except ImportError as error:
        raise MissingExtraError("verifiers' environments need: pip install 'gspo-gym[envs-verifiers]'") from error
    try:
        with _loading, _signals_left_alone(core):
            environment = package.load_environment(env_id, **env_args)
    except Exception as error:
        cause = f" (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        raise ConfigError(f"Verifiers: cannot load {env_id!r}: {type(error).__name__}: {error}{cause}") from error
    if environment.requires_group_rollouts or environment.provides_advantages:
        raise ConfigError(
            f"Verifiers: {env_id} scores the rollouts of a group against each other, and an episode here is scored by "
            "itself; remove its group reward functions, or give a judge that ranks groups"
        )
    weights: dict[str, float] = {}
    for rubric in _rubrics(environment):
        rubric.funcs = [_telling(function) for function in rubric.funcs]
        weights |= {_name(f): float(w) for f, w in zip(rubric.funcs, rubric.weights, strict=True) if w}
    schemas = tuple(schema_of(tool) for tool in environment.tool_defs or ())
    return Loaded(package, environment, env_id, schemas, weights, bool(environment.score_rollouts))


def schema_of(tool: Any) -> dict[str, Any]:
    """A `verifiers.Tool` as an OpenAI function schema.

    Raises:
        ContractError: it has no name or no parameters.
    """
    try:
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    except (AttributeError, TypeError) as error:
        raise ContractError(f"Verifiers: expected a tool with name, description, parameters, got {tool!r}") from error
    return {"type": "function", "function": function}


def _rubrics(environment: Any) -> Iterator[Any]:
    """All that hold reward functions: groups hold rubrics, and groups of environments hold environments."""
    waiting = [environment.rubric, *(child.rubric for child in getattr(environment, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        waiting += getattr(rubric, "rubrics", ())
        yield rubric


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reward function, telling of what it raises: verifiers logs that and goes on with a score of 0.

    `functools.wraps` keeps its signature, by which verifiers decides what it is given.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            _tell(function, error)
            raise
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            _tell(function, error)
            raise

    return call


def _tell(function: Callable[..., Any], error: Exception) -> None:
    _failures.get([]).append((_name(function), error))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


@contextmanager
def _signals_left_alone(core: Any) -> Iterator[None]:
    """Inside, verifiers installs no signal handlers.

    Each environment would replace the process's handlers of SIGINT and SIGTERM by its own, which ends the process
    without the checkpoint that a run writes then; and outside the main thread, where environments are made, Python
    refuses it.
    """
    real = core.signal
    quiet = {name: getattr(real, name) for name in ("SIGINT", "SIGTERM", "default_int_handler")}
    core.signal = SimpleNamespace(signal=lambda *_: None, **quiet)
    try:
        yield
    finally:
        core.signal = real
