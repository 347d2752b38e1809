"""What a worker process is to make, as JSON.

It shares no memory with the program: an environment is named by the place that its class or function is imported from,
and the program's main file by its path, as in `multiprocessing`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from gspo_gym.env.registry import make_from, resolve
from gspo_gym.env.workers.wire import require_json
from gspo_gym.errors import ConfigError, ContractError

_MAIN = "__main__"
_MAIN_OF_WORKER = "__mp_main__"  # as in multiprocessing: `if __name__ == "__main__"` must not hold in a worker


@dataclass(frozen=True, slots=True)
class ProcessTarget:
    """What a worker makes.

    Attributes:
        name: the id of a registered environment, or a name for errors.
        entry_point: "package.module:Class", or a function instead of the class.
        main_path: the program's main file if `entry_point` is in it, else None.
        is_registered: whether it is made as by `registry.make`, with checked arguments, or only called.
        max_episode_steps: Gymnasium's time limit, if registered with one.
    """

    name: str
    entry_point: str
    main_path: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_registered: bool = False
    max_episode_steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessTarget:
        return cls(**value)

    def make(self) -> Any:
        """Return a fresh environment; called in the worker. A ConfigError if it cannot be imported."""
        creator = self._creator()
        if not self.is_registered:
            return creator(**self.kwargs)
        spec = EnvSpec(self.name, entry_point=creator, max_episode_steps=self.max_episode_steps)
        return make_from(spec, **self.kwargs)

    def _creator(self) -> Any:
        module, _, qualname = self.entry_point.partition(":")
        try:
            creator: Any = _main_module(self.main_path) if self.main_path else importlib.import_module(module)
            for name in qualname.split("."):
                creator = getattr(creator, name)
        except (ImportError, AttributeError, OSError) as error:
            raise ConfigError(
                f"{self.name}: a worker process cannot import {self.entry_point!r} ({error}); put it into a module "
                'that can be imported, or set isolation to "thread"'
            ) from error
        return creator


def target_of(env: str | Callable[..., Any], kwargs: Mapping[str, Any]) -> ProcessTarget:
    """Return the target of a registered name, or of a class or function.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: a worker could not import it, or an argument is no JSON.
    """
    arguments = _as_json(kwargs, "arguments")
    if not isinstance(env, str):
        entry_point, main_path = entry_point_of(env)
        return ProcessTarget(getattr(env, "__name__", "environment"), entry_point, main_path, arguments)
    spec = gymnasium.registry[resolve(env)]
    if spec.additional_wrappers:
        raise ConfigError(f'{spec.id}: is registered with wrappers, which need isolation = "thread"')
    if spec.entry_point is None:
        raise ConfigError(f"environment {spec.id!r} is registered without an entry_point for single environments")
    main_path = None
    if isinstance(spec.entry_point, str):
        entry_point = spec.entry_point
    else:
        entry_point, main_path = entry_point_of(spec.entry_point)
    spec_arguments = _as_json(spec.kwargs, f"registered arguments of {spec.id}")
    return ProcessTarget(spec.id, entry_point, main_path, {**spec_arguments, **arguments}, True, spec.max_episode_steps)


def entry_point_of(creator: Any) -> tuple[str, str | None]:
    """Return the import path of a class or function, and the program's main file if it is defined there."""
    module, qualname = getattr(creator, "__module__", None), getattr(creator, "__qualname__", None)
    value: Any = sys.modules.get(module) if module else None
    for name in (qualname or "").split("."):
        value = getattr(value, name, None)
    if value is not creator or module is None or qualname is None:
        raise ConfigError(
            f"{creator!r}: expected a class or function at the top of a module, which a worker process can import; "
            'got one that is local or made on the fly. Move it, or set isolation to "thread"'
        )
    if module != _MAIN:
        return f"{module}:{qualname}", None
    main: Any = sys.modules[_MAIN]
    if getattr(main, "__spec__", None) is not None:  # python -m package.module
        return f"{main.__spec__.name}:{qualname}", None
    path = getattr(main, "__file__", None)
    if path is None or not os.path.isfile(path):
        raise ConfigError(
            f"{qualname}: expected it in a file, which a worker process can import, got one typed into a shell or "
            'notebook. Write it to a file, or set isolation to "thread"'
        )
    return f"{_MAIN}:{qualname}", os.path.abspath(path)


def _main_module(path: str) -> types.ModuleType:  # run once in this process
    module = sys.modules.get(_MAIN_OF_WORKER)
    if module is None or getattr(module, "__file__", None) != path:
        module = types.ModuleType(_MAIN_OF_WORKER)
        sys.modules[_MAIN] = sys.modules[_MAIN_OF_WORKER] = module
        module.__dict__.update(runpy.run_path(path, run_name=_MAIN_OF_WORKER))
    return module


def _as_json(kwargs: Mapping[str, Any], where: str) -> dict[str, Any]:
    try:
        json_arguments: dict[str, Any] = require_json(dict(kwargs), where=where)
    except ContractError as error:
        raise ConfigError(f'{error}; a worker process is given JSON only: set isolation to "thread"') from error
    return json_arguments
