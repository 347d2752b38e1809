"""`check_env` and the ordered table of its checks, for `gspo-gym env check` and for an author's tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gspo_gym.env.checks import contract, leaks, play, score
from gspo_gym.env.checks.subject import CheckSettings, Fact, Findings, Problem, Subject
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError, ContractError, GymError


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of `check_env`.

    Attributes:
        checks: names of the checks that ran.
        problems: broken promises; each check details its first three and counts the rest.
        facts: measurements in words.
        notes: weaknesses that break no promise, and what could not be checked.
        measurements: the facts' numbers by name (seconds, returns, counts).
    """

    name: str
    checks: tuple[str, ...]
    problems: tuple[Problem, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    measurements: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.problems

    def raise_if_failed(self) -> None:
        """Raise every problem in one ContractError."""
        if self.problems:
            raise ContractError(str(self))

    def state_of(self, check: str) -> str:
        """Return "FAIL", "ok", or "-" for a check that did not run."""
        if any(problem.check == check for problem in self.problems):
            return "FAIL"
        return "ok" if check in self.checks else "-"

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.name,
            "passed": self.passed,
            "checks": {
                name: {
                    "promise": promise,
                    "state": self.state_of(name),
                    "problems": [problem.text for problem in self.problems if problem.check == name],
                }
                for name, (promise, _) in CHECKS.items()
            },
            "notes": list(self.notes),
            "measurements": dict(self.measurements),
        }

    def __str__(self) -> str:
        lines = [f"{self.name}: {'passed' if self.passed else 'FAILED'}"]
        for name, (promise, _) in CHECKS.items():
            lines.append(f"  {self.state_of(name):<4} {name}: {promise}")
            found: list[Problem | Fact] = [*self.problems, *self.facts]
            lines += [f"         {each.text}" for each in found if each.check == name]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def check_env(
    env: str | Callable[[], Any],
    *,
    env_config: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = range(10),
    max_turns: int = 200,
    step_timeout_seconds: float = 30.0,
    reference: str = "reference",
    random: str = "random",
    max_step_seconds: float | None = None,
    num_leak_episodes: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> CheckReport:
    """Check an environment against the contract of `TextEnv`.

    It may be called inside a running event loop, and blocks it.

    Args:
        env: a registered name, or a class or function that returns a fresh instance (any class with `reset` and
            `step`).
        env_config: keyword arguments of its constructor; must be JSON values if it has to run in worker processes.
        seeds: seeds of the tasks to play, at least two.
        max_turns: turns after which an episode is cut off.
        step_timeout_seconds: limit for each call of a method.
        reference, random: names of the environment's policies that play these roles.
        max_step_seconds: a slower `reset` or `step` is a problem; None only reports the times.
        num_leak_episodes: episodes watched for leaks, at least 4; 0 skips that check.
        clock: monotonic seconds; measures `reset` and `step`.

    Raises:
        UnknownNameError: the name is not registered.
        ConfigError: fewer than two seeds, or one to three leak episodes.

    >>> check_env("GuessNumber", seeds=range(2)).passed
    True
    """
    if len(seeds) < 2:
        raise ConfigError(f"check_env: expected at least 2 seeds, because tasks are compared, got {len(seeds)}")
    if num_leak_episodes not in (0, *range(4, 1_000_001)):
        raise ConfigError(f"check_env: expected num_leak_episodes = 0 or at least 4, got {num_leak_episodes}")
    settings = CheckSettings(
        tuple(seeds), max_turns, step_timeout_seconds, reference, random, max_step_seconds, num_leak_episodes, clock
    )
    subject = _subject(*_named(env, dict(env_config or {})), settings)
    thread = OwnThread()  # asyncio.run needs a thread without a running loop, and the caller's may have one
    try:
        report: CheckReport = thread.call(lambda: asyncio.run(_run(subject)), timeout_seconds=None).unwrap()
    finally:
        thread.release()
    return report


def _named(env: str | Callable[..., Any], config: dict[str, Any]) -> tuple[str | Callable[..., Any], dict[str, Any]]:
    # A worker process imports its environment by name; a partial has none, but the function it wraps does.
    if isinstance(env, partial) and env.func is make and len(env.args) == 1:
        return env.args[0], {**env.keywords, **config}
    if isinstance(env, partial) and not env.args:
        return env.func, {**env.keywords, **config}
    return env, config


def _subject(env: str | Callable[..., Any], config: dict[str, Any], settings: CheckSettings) -> Subject:
    if isinstance(env, str):
        name = resolve(env)
        return Subject(name, partial(make, name, **config), partial(ProcessEnv, name, config), settings)
    name = getattr(env, "__name__", "environment")
    return Subject(name, partial(env, **config), partial(ProcessEnv, env, config), settings)


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
    return CheckReport(
        subject.name,
        tuple(ran),
        tuple(findings.problems),
        tuple(findings.facts),
        tuple(dict.fromkeys(findings.notes)),
        findings.measurements,
    )


Check = Callable[[Subject, Findings], Awaitable[None]]

# After a failed "construction" or "play" nothing is left to judge. "isolation" is reported by `play.plays`.
CHECKS: Mapping[str, tuple[str, Check | None]] = {
    "construction": ("every call of the factory makes a fresh, well-declared environment", contract.constructs),
    "play": ("reset and step answer in the agreed types and shapes, in time", play.plays),
    "isolation": ("nothing that a process shares is touched, or it runs in a process of its own", None),
    "messages": (
        "every call is answered, none of a tool only by errors, and nothing in the model's name",
        contract.speaks,
    ),
    "determinism": ("instances under one seed play alike while others run beside them", play.is_deterministic),
    "reset": ("an instance that was played and reset plays like a fresh one", play.resets),
    "reward range": ("returns stay in reward_range", contract.rewards_in_range),
    "end": ("time limits hold, and reset follows the end", contract.ends),
    "invalid action": ("text that could not be read is answered", contract.takes_invalid_actions),
    "close": ("closing twice is fine, before and after an episode", contract.closes),
    "time": ("reset and step answer within max_step_seconds, if that is given", leaks.answers_in_time),
    "leaks": ("episodes leave no files, threads, child processes or memory behind", leaks.leaks_nothing),
    "reference": ("the reference policy earns the top score", score.reference_is_best),
    "tricks": ("no trick succeeds, and neither tricks nor random play earn as much", score.tricks_do_not_pay),
    "copying": ("the answer stands nowhere in the first observation or info", score.nothing_shown_is_the_answer),
    "gymnasium": ("Gymnasium's own checker accepts it", contract.gymnasium_agrees),
}
