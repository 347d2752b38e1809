"""check_env: the whole environment contract, executed. A command (`gspo-gym env check`) and a test.

The checks themselves are in `checks.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.env.checks import CHECKS
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.subject import Findings, Problem, Subject
from gspo_gym.env.workers import OwnThread
from gspo_gym.errors import ConfigError, ContractError, GymError


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check_env` found.

    Attributes:
        name: of the environment.
        checks: the checks that ran, by name; the rest had nothing to judge.
        problems: broken promises, of which the first three of each check are told.
        notes: worth knowing, and break nothing.
    """

    name: str
    checks: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    def raise_if_failed(self) -> None:
        """Raise what was found.

        Raises:
            ContractError: with every problem in its message.
        """
        if self.problems:
            raise ContractError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.name}: {'passed' if self.passed else 'FAILED'}"]
        for name, (promise, _) in CHECKS.items():
            problems = [problem.text for problem in self.problems if problem.check == name]
            state = "FAIL" if problems else "ok" if name in self.checks else "-"
            lines.append(f"  {state:<4} {name}: {promise}")
            lines += [f"         {text}" for text in problems]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def check_env(
    env: str | Callable[[], Any],
    *,
    seeds: Sequence[int] = range(10),
    max_turns: int = 200,
    step_timeout_seconds: float = 30.0,
    reference: str = "reference",
    random: str = "random",
) -> CheckReport:
    """Check an environment against the contract of `TextEnv`; works inside a running event loop too, which it blocks.

    Args:
        env: a registered name, or a class or function without arguments that gives a fresh instance (Any: authors need
            not subclass anything).
        seeds: tasks to try, at least two.
        max_turns: longer episodes are cut off here.
        step_timeout_seconds: for each call of a method.
        reference, random: names of the environment's policies that play these roles.

    Raises:
        UnknownNameError: a name that is not registered.
        ConfigError: fewer than two seeds.

    >>> check_env("GuessNumber", seeds=range(2)).passed
    True
    """
    if len(seeds) < 2:
        raise ConfigError(f"check_env: expected at least 2 seeds, because tasks are compared, got {len(seeds)}")
    name = resolve(env) if isinstance(env, str) else getattr(env, "__name__", "environment")
    factory = (lambda: make(name)) if isinstance(env, str) else env
    subject = Subject(factory, name, tuple(seeds), max_turns, step_timeout_seconds, reference, random)
    thread = OwnThread()  # a loop of our own, wherever we are called from
    try:
        report: CheckReport = thread.call(lambda: asyncio.run(_run(subject)), timeout_seconds=None).unwrap()
    finally:
        thread.release()
    return report


async def _run(subject: Subject) -> CheckReport:
    findings = Findings()
    ran: list[str] = []
    for name, (_, check) in CHECKS.items():
        findings.check = name
        ran.append(name)
        try:
            if check is not None:
                await check(subject, findings)
        except GymError as error:
            findings.fail(f"{type(error).__name__}: {error}")
        if (name == "construction" and findings.problems) or (name == "play" and not subject.runs):
            break
    findings.close()
    return CheckReport(subject.name, tuple(ran), tuple(findings.problems), tuple(dict.fromkeys(findings.notes)))
