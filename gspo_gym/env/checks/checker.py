"""`check_env` and the ordered table of its checks, for `gspo-gym env check` and for an author's tests; and the checks
of what an environment costs: step times, and what each episode leaves behind.

Some episodes warm up caches and pools, then two equal halves are measured; only what grows in both is a leak, memory
line by line of the code that allocates it. A small leak ends a training run after some ten thousand episodes.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.tables import ShownAsText
from gspo_gym.env.checks import contract, play, score
from gspo_gym.env.checks.subject import CheckSettings, Fact, Findings, Problem, Subject
from gspo_gym.env.playing import play_in, replaying
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.workers.env import ProcessEnv
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError, ContractError, GymError

# Bytes per episode. Some hundred bytes are noise. A long run of 100,000 episodes loses 200 MB at this rate.
MIN_BYTES = 2_048
# Halves are this much longer when memory is measured again, line by line. Noise comes at once, not with every episode:
# 28 KB in each of two halves of eight episodes were seen, from different lines, as interpreter tables double now and
# then. A leak is at the same line each time.
_AGAIN = 4
_GRACE_SECONDS = 1.0  # threads and processes that were told to end may take this long
_POLL_SECONDS = 0.05
_MEMORY = "bytes of memory"


@dataclass(frozen=True, slots=True)
class Holdings:
    """What this process holds at one moment: a description by identity, for each kind."""

    files: Mapping[str, str]
    threads: Mapping[str, str]
    children: Mapping[str, str]

    @classmethod
    def now(cls) -> Holdings:
        """Return the current holdings; files and children are empty without /proc."""
        threads = {str(thread.ident): thread.name for thread in threading.enumerate()}
        return cls(_open_files(), threads, _children())


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that every episode leaves behind.

    `per_episode` is the smaller amount of the two halves; of memory, `examples` are the lines of code that allocate
    most.
    """

    kind: str
    per_episode: float
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f", such as {', '.join(self.examples)}" if self.examples else ""
        number = f"{self.per_episode:.3g}" if self.per_episode < 100 else f"{self.per_episode:,.0f}"
        return f"{number} {self.kind} an episode{names}"


async def find_leaks(play: Callable[[], Awaitable[None]], *, num_episodes: int) -> list[Leak]:
    """Return what `play`, which plays and closes one episode, leaves behind each time.

    A file, thread or child process counts if at least every second episode leaves one, memory from `MIN_BYTES` an
    episode. Memory is what tracemalloc sees: Python objects and numpy arrays, no allocations of foreign code. Nothing
    else may run in this process meanwhile. `num_episodes` are measured, in two halves; half as many warm up before.
    """
    half = max(1, num_episodes // 2)
    with _tracing(), _older_objects_set_aside():
        for _ in range(half):
            await play()
        leaks, num_bytes = await _find_in_halves(play, half)
        if num_bytes >= MIN_BYTES * half:  # four times as many follow, to find the lines of code that allocate it
            leaks += await _find_memory(play, _AGAIN * half)
    return leaks


def can_count_files() -> bool:
    """Return whether /proc lists open files and child processes, as on Linux."""
    return Path("/proc/self/fd").is_dir()


async def _find_in_halves(play: Callable[[], Awaitable[None]], half: int) -> tuple[list[Leak], int]:
    gc.collect()
    marks = [Holdings.now()]
    growths = []
    for _ in range(2):
        before = tracemalloc.get_traced_memory()[0]  # read before the next mark, which allocates too
        for _ in range(half):
            await play()
        mark, num_bytes = await _steady_holdings(marks[0])
        marks.append(mark)
        growths.append(num_bytes - before)
    return _leaks(marks, half), min(growths)


async def _find_memory(play: Callable[[], Awaitable[None]], half: int) -> list[Leak]:
    first = Holdings.now()
    marks = [_bytes_by_line()]
    for _ in range(2):
        for _ in range(half):
            await play()
        await _steady_holdings(first)
        marks.append(_bytes_by_line())
    growth_by_line = {
        line: min(after[line] - before[line] for before, after in pairwise(marks))
        for line in marks[0].keys() | marks[1].keys()
    }
    growing = sorted(
        (line for line in growth_by_line if growth_by_line[line] > 0), key=lambda line: (-growth_by_line[line], line)
    )
    num_bytes = sum(growth_by_line[line] for line in growing)
    if num_bytes < MIN_BYTES * half:
        return []
    return [Leak(_MEMORY, num_bytes / half, tuple(growing[:2]))]


def _bytes_by_line() -> Counter[str]:
    measuring = [
        tracemalloc.Filter(inclusive=False, filename_pattern=file) for file in (tracemalloc.__file__, __file__)
    ]
    statistics = tracemalloc.take_snapshot().filter_traces(measuring).statistics("lineno")
    frames = [(statistic.traceback[0], statistic.size) for statistic in statistics]
    return Counter({f"{frame.filename}:{frame.lineno}": size for frame, size in frames})


async def _steady_holdings(first: Holdings) -> tuple[Holdings, int]:
    # Once threads and processes that are ending have ended.
    deadline = asyncio.get_running_loop().time() + _GRACE_SECONDS
    while True:
        gc.collect()
        num_bytes = tracemalloc.get_traced_memory()[0]
        holdings = Holdings.now()
        is_steady = len(holdings.threads) <= len(first.threads) and len(holdings.children) <= len(first.children)
        if is_steady or asyncio.get_running_loop().time() >= deadline:
            return holdings, num_bytes
        del holdings  # its memory would be counted in the next round
        await asyncio.sleep(_POLL_SECONDS)


def _leaks(marks: list[Holdings], half: int) -> list[Leak]:
    leaks = []
    for kind, snapshots in {
        "files": [mark.files for mark in marks],
        "threads": [mark.threads for mark in marks],
        "child processes": [mark.children for mark in marks],
    }.items():
        growth = min(len(after) - len(before) for before, after in pairwise(snapshots))
        if growth >= max(1, half // 2):
            new = dict.fromkeys(words for key, words in snapshots[2].items() if key not in snapshots[0])
            leaks.append(Leak(kind, growth / half, tuple(new)[:2]))
    return leaks


@contextmanager
def _tracing() -> Iterator[None]:
    """Run the block with tracemalloc on, and leave it as it was."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        yield
    finally:
        if not was_tracing:
            tracemalloc.stop()


@contextmanager
def _older_objects_set_aside() -> Iterator[None]:
    """Run the block with existing objects frozen, so `gc.collect` visits new ones only."""
    # In a process with torch, one full collection takes a second. An existing freeze is left to its owner.
    are_set_aside = gc.get_freeze_count() > 0
    if not are_set_aside:
        gc.freeze()
    try:
        yield
    finally:
        if not are_set_aside:
            gc.unfreeze()


def _open_files() -> dict[str, str]:
    files: dict[str, str] = {}
    with suppress(OSError):  # no /proc
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile, like the descriptor of this listing
                files[name] = os.readlink(f"/proc/self/fd/{name}")
    return files


def _children() -> dict[str, str]:  # zombies included
    children: dict[str, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            # The name stands in parentheses and may contain spaces and parentheses itself.
            head, _, rest = stat.read_text(errors="replace").rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                children[stat.parent.name] = head.partition("(")[2]
    return children


_MAX_TURNS = 20  # of a leak episode
_NUM_RUNS = 2  # played in turn: a leak of one of them still shows in every second episode, the threshold


async def answers_in_time(subject: Subject, findings: Findings) -> None:
    """Report the times of `reset` and `step`; a call over `max_step_seconds` is a problem."""
    limit = subject.settings.max_step_seconds
    texts = []
    for method in ("reset", "step"):
        seconds = [call.seconds for call in subject.calls if call.method == method]
        if not seconds:
            continue
        median, p99, longest = (float(np.quantile(seconds, q)) for q in (0.5, 0.99, 1.0))
        texts.append(f"{method} {median * 1e3:.3g} / {p99 * 1e3:.3g} / {longest * 1e3:.3g} ms")
        findings.measurements[f"{method}_seconds"] = {
            "median": median,
            "p99": p99,
            "max": longest,
            "num_calls": len(seconds),
        }
    findings.tell(f"{', '.join(texts)} (median / 99% / longest)")
    for call in subject.calls:
        if limit is not None and call.seconds > limit:
            findings.fail(f"{call.where}: expected an answer within {limit:g} seconds, it took {call.seconds:.3g}")


async def leaks_nothing(subject: Subject, findings: Findings) -> None:
    """Check that episodes leave nothing behind after close."""
    num_episodes = subject.settings.num_leak_episodes
    if num_episodes == 0:
        findings.notes.append("leaks were not looked for")
        return
    if not can_count_files():
        findings.notes.append("there is no /proc here: open files and child processes were not counted")
    runs = list(subject.runs.values())
    step = math.ceil(len(runs) / _NUM_RUNS)
    in_turn = itertools.cycle(runs[::step])

    async def play() -> None:
        run = next(in_turn)
        # In this process: what a worker process leaves cannot be seen from here.
        session = await subject.open_here()
        try:
            await play_in(session, replaying(run.actions), seed=run.seed, max_turns=min(_MAX_TURNS, len(run.actions)))
        finally:
            await session.close()

    leaks = await find_leaks(play, num_episodes=num_episodes)
    for leak in leaks:
        findings.fail(f"expected an episode to leave nothing behind after close, got {leak}")
    findings.measurements["leaks_per_episode"] = {leak.kind: leak.per_episode for leak in leaks}


@dataclass(frozen=True, slots=True)
class CheckReport(ShownAsText):
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
            findings: list[Problem | Fact] = [*self.problems, *self.facts]
            lines += [f"         {finding.text}" for finding in findings if finding.check == name]
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
        reference: name of the environment's policy that plays best.
        random: name of its policy that plays legally and at random.
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
    subject = _subject(*_env_and_config(env, dict(env_config or {})), settings)
    thread = OwnThread()  # asyncio.run needs a thread without a running loop, and the caller's may have one
    try:
        report: CheckReport = thread.call(lambda: asyncio.run(_run(subject)), timeout_seconds=None).unwrap()
    finally:
        thread.release()
    return report


_OF_A_REPLAY = ("construction", "play", "isolation", "determinism", "reset")  # checks without which no fork is one


def require_replayable(env: str, *, env_config: Mapping[str, Any], seeds: Sequence[int], max_turns: int) -> None:
    """Raise a ContractError if `check_env` does not find that an environment answers a replay as it did at first."""
    report = check_env(env, env_config=env_config, seeds=seeds[:2], max_turns=max_turns, num_leak_episodes=0)
    problems = [problem for problem in report.problems if problem.check in _OF_A_REPLAY]
    if problems and problems[0].check == "construction":
        raise ContractError(f"{report.name}: {problems[0].text}")
    if problems:
        raise ContractError(
            f"{report.name}: a replay must be answered as the episode was, or it cannot be forked; the check "
            f'"{problems[0].check}" fails: {problems[0].text} (`gspo-gym env check` has all)'
        )


def _env_and_config(
    env: str | Callable[..., Any], config: dict[str, Any]
) -> tuple[str | Callable[..., Any], dict[str, Any]]:
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
    "time": ("reset and step answer within max_step_seconds, if that is given", answers_in_time),
    "leaks": ("episodes leave no files, threads, child processes or memory behind", leaks_nothing),
    "reference": ("the reference policy earns the top score", score.reference_is_best),
    "tricks": ("no trick succeeds, and neither tricks nor random play earn as much", score.tricks_do_not_pay),
    "copying": ("the answer stands nowhere in the first observation or info", score.nothing_shown_is_the_answer),
    "gymnasium": ("Gymnasium's own checker accepts it", contract.gymnasium_agrees),
}
