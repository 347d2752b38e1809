"""Environments by name, on top of Gymnasium's registry.

Packages announce environments by the `gymnasium.envs` entry point, which Gymnasium 1.4 no longer reads; it is read here
once, before the first lookup.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, parse_env_id

from gspo_gym.base.modules import file_hint, named_module
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

_NAMESPACE = "gspo_gym"
_ENTRY_POINT_GROUP = "gymnasium.envs"
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def register(env_id: str, entry_point: Callable[..., Any] | str, **kwargs: Any) -> None:
    """Register an environment under NAME-vN or NAMESPACE/NAME-vN, replacing an earlier one of the same id.

    `kwargs` are as in `gymnasium.register`, such as `kwargs={...}` for the constructor. A ConfigError says that the id
    is malformed or contradicts another one.
    """
    # Gymnasium warns of a replacement, which is intended here (in a notebook, for example).
    gymnasium.registry.pop(env_id, None)
    # Gymnasium's checker applies rules for arrays, and would do so in every episode; `check_env` checks once.
    settings = {"disable_env_checker": True, "order_enforce": False, **kwargs}
    try:
        gymnasium.register(env_id, entry_point=entry_point, **settings)
    except gymnasium.error.Error as error:
        raise ConfigError(f"cannot register environment {env_id!r}: {error}") from error


def make(env_id: str, /, **kwargs: Any) -> Any:
    """Return a fresh environment; keyword arguments go to its constructor.

    Of Gymnasium's wrappers it has only the time limit, if registered with `max_episode_steps`. A class that does not
    subclass `gymnasium.Env` gives a plain instance without wrappers.

    Raises:
        UnknownNameError: there is no environment of that name. ConfigError: the constructor takes no such argument, or
            needs another one.
    """
    return make_from(gymnasium.registry[resolve(env_id)], **kwargs)


def make_from(spec: EnvSpec, **kwargs: Any) -> Any:
    """Return a fresh environment of a specification, registered or not; otherwise like `make`."""
    spec = copy.copy(spec)
    spec.disable_env_checker, spec.order_enforce = True, False
    creator: Any = spec.entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    if creator is None:
        raise ConfigError(f"environment {spec.id!r} is registered without an entry_point for single environments")
    require_arguments(spec.id, creator, {**spec.kwargs, **kwargs})
    if isinstance(creator, type) and not issubclass(creator, gymnasium.Env):
        if spec.max_episode_steps is not None:
            raise ConfigError(
                f"environment {spec.id!r}: max_episode_steps needs a subclass of gymnasium.Env, got {creator.__name__}"
            )
        return creator(**(copy.deepcopy(spec.kwargs) | kwargs))
    return gymnasium.make(spec, **kwargs)


def resolve(env_id: str) -> str:
    """Return the full id of a name.

    Without a namespace, the name is looked up in all: first in ours, then in others' (where it must be the only match),
    then in Gymnasium's suite. Without a version, the newest is taken. "package.module:Env-v0" first imports the module,
    which may register the environment. "package.module:Class" is that class, or a function that makes an instance,
    under the id that the module registers for it, or else under that text.

    Raises:
        UnknownNameError: there is none, or several namespaces have one.

    >>> resolve("GuessNumber")
    'gspo_gym/GuessNumber-v0'
    """
    failed_plugins = _load_plugins()
    if env_id in gymnasium.registry:
        return env_id
    module_name, colon, name = env_id.rpartition(":")
    if colon:
        module = named_module(f"environment {env_id!r}", module_name)
    if name in gymnasium.registry:
        return name
    if colon and callable(creator := getattr(module, name, None)):
        return _id_of(creator, f"{module_name}:{name}")
    matches = _matches(name)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UnknownNameError(
            f"environment {env_id!r} is in several namespaces: {', '.join(matches)}; give the full id"
        )
    hint = "".join(f"; the plugin {plugin} could not be loaded: {error}" for plugin, error in failed_plugins)
    raise UnknownNameError(f"there is no environment {env_id!r}; {_nearest(name)}{hint}{file_hint(env_id)}")


def _id_of(creator: Callable[..., Any], text: str) -> str:
    specs = [spec for spec in gymnasium.registry.values() if spec.entry_point in (creator, text)]
    if specs:
        return max(specs, key=_age).id
    register(text, text)
    return text


def list_environments(*, include_gymnasium: bool = False) -> tuple[str, ...]:
    """Return the sorted full ids, without or with Gymnasium's own suite."""
    _load_plugins()
    specs = gymnasium.registry.values()
    return tuple(sorted(spec.id for spec in specs if include_gymnasium or not _is_gymnasiums_own(spec)))


@dataclass(frozen=True, slots=True)
class Entry:
    """What can be said of a registered environment before it is imported.

    Attributes:
        summary: the first sentence of its docstring; "" without one.
        extra: the extra of this project that installs the packages of a suite; None: it needs none.
        missing: the packages of the extra that are not installed.
    """

    env_id: str
    summary: str
    extra: str | None = None
    missing: tuple[str, ...] = ()


def entry_of(env_id: str) -> Entry:
    """Return what is known of a registered environment, whose full id this is.

    The extra of gspo_gym_envs.suites.NAME is envs-NAME, if this project has one of that name.
    """
    creator = gymnasium.registry[env_id].entry_point
    if not isinstance(creator, str):
        return Entry(env_id, "" if creator is None else _first_sentence(inspect.getdoc(creator)))
    module_name, _, name = creator.partition(":")
    summary = _first_sentence(_docstring_in_source(module_name, name))
    extra = f"envs-{module_name.rpartition('.')[2].replace('_', '-')}"
    requirements = _requirements_of(extra) if module_name.startswith("gspo_gym_envs.suites.") else None
    if requirements is None:
        return Entry(env_id, summary)
    return Entry(env_id, summary, extra, tuple(name for name in requirements if not _is_installed(name)))


def _docstring_in_source(module_name: str, name: str) -> str | None:
    # Read and not imported: a module may need packages that are not installed, or seconds.
    try:
        spec = importlib.util.find_spec(module_name)
        text = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin is not None else ""
        body = ast.parse(text).body
    except Exception:  # packages above the module are imported, and do as they like
        return None
    kinds = (ast.ClassDef, ast.FunctionDef)
    return next((ast.get_docstring(node) for node in body if isinstance(node, kinds) and node.name == name), None)


def _first_sentence(docstring: str | None) -> str:
    paragraphs = [text for text in (docstring or "").split("\n\n") if not text.startswith("#")]  # a title says nothing
    return re.split(r"(?<=\.)\s", " ".join(paragraphs[0].split()), maxsplit=1)[0] if paragraphs else ""


def _requirements_of(extra: str) -> list[str] | None:
    """Return the names of the packages that an extra installs; None: there is no such extra."""
    try:
        lines = importlib.metadata.requires("gspo-gym") or []
    except importlib.metadata.PackageNotFoundError:  # imported without an installation
        return None
    named = [line for line in lines if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", line)]
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in named] or None


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _load_plugins() -> tuple[tuple[str, str], ...]:
    """Run every entry point once; return (name, error) of those that failed, for the errors of failed lookups."""
    failures = []
    for plugin in importlib.metadata.entry_points(group=_ENTRY_POINT_GROUP):
        try:
            plugin.load()()
        except Exception as error:  # another package must not break ours
            failures.append((plugin.name, f"{type(error).__name__}: {error}"))
    return tuple(failures)


def _matches(name: str) -> list[str]:  # with its namespace and version, if given; the newest of a namespace
    try:
        namespace, spec_name, version = parse_env_id(name)
    except gymnasium.error.Error:
        return []
    newest: dict[str | None, EnvSpec] = {}
    for spec in gymnasium.registry.values():
        if spec.name != spec_name or namespace not in (None, spec.namespace) or version not in (None, spec.version):
            continue
        newest_spec = newest.get(spec.namespace)
        if newest_spec is None or _age(spec) > _age(newest_spec):
            newest[spec.namespace] = spec
    if _NAMESPACE in newest:
        return [newest[_NAMESPACE].id]
    strangers = [spec.id for spec in newest.values() if not _is_gymnasiums_own(spec)]
    return sorted(strangers or [spec.id for spec in newest.values()])


def _age(spec: EnvSpec) -> int:
    return -1 if spec.version is None else spec.version


def _nearest(name: str) -> str:  # with as many parts as `name` has, or at all
    ids = list_environments()
    if "/" not in name:
        ids = tuple(env_id.rpartition("/")[2] for env_id in ids)
        if "-v" not in name:
            ids = tuple(parse_env_id(env_id)[1] for env_id in ids)
    return nearest_name(name, set(ids))


def require_arguments(env_id: str, creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise a ConfigError if the class or function does not take an argument or lacks one, before anything is made."""
    try:
        parameters = inspect.signature(creator).parameters.values()
    except (TypeError, ValueError):  # written in C: the call itself will raise
        return
    for parameter in parameters:
        is_needed = parameter.default is parameter.empty and parameter.kind not in _VARIADIC
        if is_needed and parameter.name not in kwargs:
            raise ConfigError(
                f"environment {env_id!r} needs an argument {parameter.name!r}: give it as rollout.env_config, or with "
                f"--option {parameter.name}=..."
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    parameter_names = {parameter.name for parameter in parameters}
    for name in kwargs:
        if name not in parameter_names:
            raise ConfigError(
                f"environment {env_id!r} takes no argument {name!r}; {nearest_name(name, parameter_names)}"
            )


def _is_gymnasiums_own(spec: EnvSpec) -> bool:
    creator = spec.entry_point or spec.vector_entry_point
    where = creator if isinstance(creator, str) else getattr(creator, "__module__", "")
    return where.startswith("gymnasium.")
