"""What a run uses of Ray's module, with actors in this process; `tests/cluster` has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """The base of Ray's errors."""


class RayTaskError(RayError):
    """A method of an actor has raised `cause`; its text is a stack."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("ray::Actor.method() (pid=1)\n  File somewhere")
        self.cause = cause


class GetTimeoutError(RayError):
    """A result did not come in time."""


class _Method:
    def __init__(self, name: str, method: Any) -> None:
        self._name, self._method = name, method

    def options(self, **_: object) -> _Method:
        return self

    def remote(self, *arguments: object) -> Any:
        return self._name, lambda: self._method(*arguments)


class _Actor:
    def __init__(self, instance: object) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> _Method:
        return _Method(name, getattr(self._instance, name))


class LocalRay:
    """Ray's module.

    Attributes:
        failures: raised by `get` in place of the results of these methods.
        timeouts: of the calls of `get`.
    """

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.timeouts: list[float] = []

    def remote(self, **_: object) -> Any:
        def decorate(kind: Any) -> Any:
            return SimpleNamespace(remote=lambda *arguments, **options: _Actor(kind(*arguments, **options)))

        return decorate

    def get(self, result: Any, *, timeout: float) -> Any:
        self.timeouts.append(timeout)
        name, work = result
        if name in self.failures:
            raise self.failures[name]
        return work()
