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
    def __init__(self, ray: LocalRay, method: Any) -> None:
        self._ray, self._method = ray, method

    def remote(self, *arguments: object) -> Any:
        return lambda: self._method(*arguments)


class _Actor:
    def __init__(self, ray: LocalRay, instance: object) -> None:
        self._ray, self._instance = ray, instance

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._ray, getattr(self._instance, name))


class LocalRay:
    """Ray's module.

    Attributes:
        failure: raised by the next `get` in place of its result.
        timeouts: of the calls of `get`.
    """

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.timeouts: list[float] = []

    def remote(self, kind: Any) -> Any:
        def make(*arguments: object, **options: object) -> _Actor:
            return _Actor(self, kind(*arguments, **options))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def get(self, result: Any, *, timeout: float) -> Any:
        self.timeouts.append(timeout)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return result()
