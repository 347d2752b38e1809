"""The environment that a server plays, and the arguments that a client may set.

The constructor's arguments are the operator's, because one of them may be a file or a URL. A client may repeat them,
and set those that the operator names.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator

from gspo_gym.env.registry import resolve
from gspo_gym.env.workers.isolation import IsolatedFactory, isolated_factory
from gspo_gym.errors import ConfigError
from gspo_gym.remote.guard import RefusalError
from gspo_gym.seeding import FIRST_TRAINING_SEED

ANY_OPTION = "*"
_NOT_OF_THE_CONSTRUCTOR = ("step_rewards",)  # what else a task app's env.config holds
_ADDRESS = ("split", "index")  # of a task, as the hosted evaluation command names it
_SIDES = {
    **dict.fromkeys(("held_out", "test", "validation", "val", "dev", "eval"), 0),
    **dict.fromkeys(("train", "training"), FIRST_TRAINING_SEED),
}  # of a split: the seed of its first task
_MAX_KEPT = 64


class EnvSource:
    """Makes factories of one environment.

    Args:
        env: a registered name, or a class or function without arguments that returns a fresh instance; it need not
            subclass anything.
        config: arguments of the constructor.
        client_options: names of those that a client may set; "*" allows all.
        isolation: "thread", "process", or "auto" for the environment's own choice.

    Attributes:
        env_id: the full id of a registered environment, else the name of the class or function.
        name: the id without namespace and version.

    Raises:
        UnknownNameError: a name that is not registered. ConfigError: no such argument, or no such isolation.
    """

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        config: Mapping[str, Any] | None = None,
        client_options: Collection[str] = (),
        isolation: str = "auto",
    ) -> None:
        self.env_id = resolve(env) if isinstance(env, str) else getattr(env, "__name__", "environment")
        self.name = self.env_id.rpartition("/")[2].partition("-v")[0]
        self.description = description_of(env)
        self._env, self._config, self._isolation = env, dict(config or {}), isolation
        self._client_options = frozenset(client_options)
        self.factory = isolated_factory(env, self._config, isolation)
        self._factories: dict[str, IsolatedFactory] = {}
        parameters = inspect.signature(_creator_of(env)).parameters
        # Keys that the constructor takes are arguments, and name no task.
        self._address_keys = tuple(key for key in _ADDRESS if key not in parameters)

    def seed_of(self, config: Mapping[str, Any], seed: int | None) -> int | None:
        """Return `addressed_seed`; keys that the environment's constructor takes are its own, and name no task."""
        return addressed_seed({key: config[key] for key in self._address_keys if key in config}, seed)

    def is_called(self, name: str | None) -> bool:
        """Return whether a client means this environment; None means any."""
        short = self.env_id.rpartition("/")[2]
        return name is None or name in (self.env_id, short, self.name)

    def factory_of(self, config: Mapping[str, Any]) -> IsolatedFactory:
        """Return a factory of the environment with a client's arguments.

        Raises:
            RefusalError: it may not set one, or there is no such argument.
        """
        # What names the task, or is for the trainer, is no argument of the constructor.
        ignored_keys = (*_NOT_OF_THE_CONSTRUCTOR, *self._address_keys)
        client_config = {key: value for key, value in config.items() if key not in ignored_keys}
        for key, value in client_config.items():
            is_repeated = key in self._config and self._config[key] == value
            if not (is_repeated or key in self._client_options or ANY_OPTION in self._client_options):
                raise RefusalError(
                    422,
                    "env_config_not_allowed",
                    f"env.config: {key!r} is not this server's setting, and clients may not set it; serve with it "
                    f"(--option {key}=VALUE), or let clients set it (--client-option {key})",
                )
        key = json.dumps(client_config, sort_keys=True)
        if key not in self._factories:
            # The oldest goes: a client could make any number of them.
            if len(self._factories) >= _MAX_KEPT:
                del self._factories[next(iter(self._factories))]
            try:
                self._factories[key] = isolated_factory(self._env, {**self._config, **client_config}, self._isolation)
            except ConfigError as error:
                raise RefusalError(422, "env_config_unknown", str(error)) from error
        return self._factories[key]


def addressed_seed(config: Mapping[str, Any], seed: int | None) -> int | None:
    """Return the seed of the task that a request names by `seed`, or by `split` and `index` in its env.config.

    The index counts the tasks of a split: held-out ones (also called test, validation, val, dev or eval) from seed 0,
    training ones from 2**31. The hosted evaluation command sends the index as the seed, too. None: it names none.

    Raises:
        RefusalError: no such split, an invalid index, or one that is not the seed.
    """
    split, index = config.get("split"), config.get("index")
    first = None if split is None else _SIDES.get(str(split).lower())
    # A task of the wrong split would be held-out data in training.
    if split is not None and first is None:
        raise RefusalError(422, "bad_split", f"env.config.split: expected one of {list(_SIDES)}, got {split!r:.80}")
    if index is not None and (type(index) is not int or not 0 <= index < FIRST_TRAINING_SEED):
        raise RefusalError(
            422, "bad_index", f"env.config.index: expected a number from 0 to 2**31 - 1, got {index!r:.80}"
        )
    requested_seed = seed if index is None else (first or 0) + index
    if seed is None or requested_seed == seed:
        return requested_seed
    # The hosted evaluation command sends the index as the seed, too.
    if index is not None and index != seed:
        raise RefusalError(
            422, "bad_index", f"env.config.index and env.seed: expected the same task, got {index} and {seed}"
        )
    return requested_seed


def description_of(env: str | Callable[[], Any]) -> str:
    """Return the first line of its docstring, or ""."""
    return (inspect.getdoc(_creator_of(env)) or "").partition("\n")[0]


def _creator_of(env: str | Callable[[], Any]) -> Any:
    creator: Any = gymnasium.registry[resolve(env)].entry_point if isinstance(env, str) else env
    return load_env_creator(creator) if isinstance(creator, str) else creator
