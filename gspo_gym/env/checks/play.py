"""Checks of play: episodes alone, beside others, and again in the same instance.

Every player first plays every seed alone; later checks replay those actions. An environment that declares it, or that
changes what a process shares (random generators, working directory, environment variables), is played in worker
processes throughout: it would disturb its neighbours (`TextEnv.isolation`).
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.env.checks.subject import Findings, Subject
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, Watch, play_in, replaying
from gspo_gym.errors import EnvTimeoutError, GymError


@dataclass(frozen=True, slots=True)
class _Touch:
    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place} changed {self.name}, which all episodes of a process share"


async def plays(subject: Subject, findings: Findings) -> None:
    """Play every seed with every player; once more in worker processes if the environment turns out to need them."""
    touches: list[_Touch] = []
    obstacle = await _enter_worker(subject) if subject.isolation == "process" else None
    failures = await _play_all(subject, touches)
    if touches and subject.isolation is None:
        obstacle = await _enter_worker(subject)
        if obstacle is None:
            failures = await _play_all(subject, [])
    for text in failures:
        findings.fail(text)
    findings.check = "isolation"
    _tell_where(subject, findings, touches, obstacle)


async def _enter_worker(subject: Subject) -> str | None:
    """Play in worker processes from here on; if that fails, stay in this one and return the reason."""
    subject.needs_worker = True
    try:
        await (await subject.open()).close()
    except GymError as error:
        subject.needs_worker = False
        return str(error)
    return None


async def _play_all(subject: Subject, touches: list[_Touch]) -> list[str]:
    subject.runs.clear()
    subject.calls.clear()
    failures = []
    hung: set[str] = set()  # an environment that hangs costs one deadline per player, not one per seed
    for (player, policy), seed in itertools.product(subject.players.items(), subject.seeds):
        if player in hung:
            continue
        try:
            subject.runs[player, seed] = await _play_alone(subject, player, policy, seed, touches)
        except (GymError, PlayerError) as error:
            failures.append(f"{player}, seed {seed}: {type(error).__name__}: {error}")
            if isinstance(error, EnvTimeoutError):
                hung.add(player)
    return failures


async def _play_alone(
    subject: Subject, player: str, policy: PolicyFactory, seed: int, touches: list[_Touch]
) -> Playthrough:
    watch = _watch(subject, f"{player}, seed {seed}", touches)
    with watch("__init__", -1):
        session = await subject.open()
    try:
        return await play_in(session, policy, seed=seed, max_turns=subject.settings.max_turns, watch=watch)
    finally:
        with watch("close", -1):
            await session.close()


def _watch(subject: Subject, where: str, touches: list[_Touch]) -> Watch:
    """Return a watch that times `reset` and `step`, and appends each call's changes of shared state to `touches`."""

    @contextmanager
    def watch(method: str, turn: int) -> Iterator[None]:
        place = f"{where}: {method}()" if turn < 0 else f"{where}: {method}(), turn {turn},"
        changed_names: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(watching(changed_names))
            if method in ("reset", "step"):
                stack.enter_context(subject.timing(method, place.rstrip(",")))
            yield
        touches.extend(_Touch(place, name) for name in changed_names)

    return watch


def _tell_where(subject: Subject, findings: Findings, touches: list[_Touch], obstacle: str | None) -> None:
    if subject.isolation == "thread":
        for touch in touches:
            findings.fail(f"{touch}, but it declares isolation = 'thread'; declare 'process', or leave it alone")
        return
    if subject.isolation == "process":
        reason = "it declares isolation = 'process'"
    elif touches:
        reason = str(touches[0])
    else:
        return
    if obstacle is not None and subject.isolation == "process":
        findings.notes.append(f"{reason}, but was played in this one: {obstacle}")
    elif obstacle is not None:
        findings.fail(f"{reason}, but no worker process can play it: {obstacle}")
    elif subject.isolation == "process":
        findings.tell("played in worker processes, as it declares")
    else:
        findings.notes.append(
            f"{reason}; it was played in worker processes therefore: declare isolation = 'process', so that rollouts "
            "do so without having to find out, or draw from self.np_random"
        )


async def is_deterministic(subject: Subject, findings: Findings) -> None:
    """Check that replays beside other episodes get the answers recorded alone."""
    runs = [run for run in subject.runs.values() for _ in range(2)]
    again = await subject.replay_all([(run.actions, run.seed) for run in runs])
    for run, other_run in zip(runs, again, strict=True):
        if isinstance(other_run, BaseException):
            findings.fail(
                f"seed {run.seed}: played alone it worked, beside others {type(other_run).__name__}: {other_run}"
            )
        elif (difference := run.difference_from(other_run)) is not None:
            findings.fail(f"seed {run.seed}: alone and beside others differ: {difference}")
    await _count_tasks(subject, findings)


async def _count_tasks(subject: Subject, findings: Findings) -> None:
    # The same actions are played under every seed, so only the tasks can make a difference.
    action_lists = [run.actions for run in subject.runs.values() if run.seed == subject.seeds[0]]
    replays = await subject.replay_all([(actions, seed) for seed in subject.seeds for actions in action_lists])
    texts = [repr((run.opening, run.answers) if isinstance(run, Playthrough) else run) for run in replays]
    tasks = {
        tuple(texts[start : start + len(action_lists)]) for start in range(0, len(texts), max(1, len(action_lists)))
    }
    findings.tell(f"{len(subject.seeds)} seeds gave at least {len(tasks)} different task{'s' * (len(tasks) != 1)}")
    findings.measurements["num_tasks"] = len(tasks)


async def resets(subject: Subject, findings: Findings) -> None:
    """Check that a played and reset instance plays like a fresh one."""
    first_runs = [run for run in subject.runs.values() if run.seed in subject.seeds[:2]]
    session = await subject.open()
    try:
        for run in [*first_runs, *first_runs[:1]]:
            again = await play_in(session, replaying(run.actions), seed=run.seed, max_turns=len(run.actions))
            if (difference := run.difference_from(again)) is not None:
                findings.fail(f"seed {run.seed}: a fresh instance and one that was reset differ: {difference}")
    finally:
        await session.close()


GENERATOR = "the generator of "


def global_state() -> Mapping[str, Any]:
    """Return the process-wide state by name, to be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        f"{GENERATOR}random": random.getstate(),
        f"{GENERATOR}numpy.random": (kind, np.asarray(keys).tobytes(), *rest),
        "the working directory": _working_directory(),
        "the environment variables": dict(os.environ),
    }
    torch: Any = sys.modules.get("torch")  # not imported for this: without it loaded, its generator is untouched
    if hasattr(torch, "get_rng_state"):
        state[f"{GENERATOR}torch"] = torch.get_rng_state().numpy().tobytes()
    return state


@contextmanager
def watching(changed: list[str]) -> Iterator[None]:
    """Append to `changed` the names of process-wide state that the block changes."""
    before = global_state()
    yield
    after = global_state()
    changed += [name for name, value in after.items() if name in before and value != before[name]]


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the directory was removed
        return None
