"""Checks of what an environment costs: the time of a step, and what every episode leaves behind."""

from __future__ import annotations

import itertools
import math

import numpy as np

from gspo_gym.env.checks.leaks import can_count_files, find_leaks
from gspo_gym.env.checks.subject import Findings, Subject
from gspo_gym.env.playing import play_in, replaying

_MAX_TURNS = 20  # of an episode that looks for leaks
_NUM_RUNS = 2  # are played in turn, so what only one of them leaks is still left every second time


async def answers_in_time(subject: Subject, findings: Findings) -> None:
    """Tells how long `reset` and `step` took alone; longer than the limit, if there is one, is a problem."""
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
    """Episodes opened, played and closed one after another, in this process, where what they leave can be seen."""
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
        session = await subject.open_here()
        try:
            await play_in(session, replaying(run.actions), seed=run.seed, max_turns=min(_MAX_TURNS, len(run.actions)))
        finally:
            await session.close()

    leaks = await find_leaks(play, num_episodes=num_episodes)
    for leak in leaks:
        findings.fail(f"expected an episode to leave nothing behind after close, got {leak}")
    findings.measurements["leaks_per_episode"] = {leak.kind: leak.per_episode for leak in leaks}
