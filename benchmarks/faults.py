"""What becomes of episodes whose environments fail: `python -m benchmarks faults`.

One attempt in ten each raises, hangs cooperatively, hangs in a C loop, leaks, dies by SIGKILL, returns wrong types and
returns 10 MB of text, all in worker processes; which, its sampling seed decides. So what should become of every attempt
is known beforehand, and is compared with what does.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.faulty import Faulty, answer_of, opening_of
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.env.workers.limits import WorkerLimits
from gspo_gym.env.workers.pool import POOL
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.seeding import generator
from gspo_gym.types import Message, Outcome, Task, Trajectory

# What is told to one attempt in ten each, and the outcome that it calls for.
WANTED = {
    "raise": Outcome.ENV_ERROR,
    "wait": Outcome.ACTION_LIMIT,  # it is the action that does it, as a second try shows
    "loop": Outcome.ACTION_LIMIT,
    "leak": Outcome.TERMINATED,  # the episode is good; its process is not used again
    "die": Outcome.ACTION_LIMIT,
    "types": Outcome.ENV_ERROR,
    "text": Outcome.ENV_ERROR,
    "fine": Outcome.TERMINATED,
}
TOLD = (*list(WANTED)[:-1], "fine", "fine", "fine")
_GROUP_SIZE = 4


@dataclass(frozen=True, slots=True)
class FaultReport:
    """What the run came to; all but `attempts`, `workers` and `wall_seconds` is empty or 0 if all is well.

    Attributes:
        attempts: number of attempts by fault and outcome.
        workers: what became of worker processes; see `ProcessPool.counts`.
        num_lost: samples that were asked for and neither kept nor dropped with a reason.
        num_duplicated: samples or attempts that came back more than once.
        num_placeholders: failed attempts that carry a reward.
        unwanted: attempts that ended otherwise than their fault calls for, and how.
        disturbed: healthy attempts whose messages or reward are not what they are without any faults.
        wall_seconds: of the whole run.
    """

    attempts: dict[tuple[str, Outcome], int]
    workers: dict[str, int]
    num_lost: int
    num_duplicated: int
    num_placeholders: int
    unwanted: list[str] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        wrong = (self.num_lost, self.num_duplicated, self.num_placeholders)
        return not any(wrong) and not self.unwanted and not self.disturbed


def fault_of(sampling_seed: int) -> str:
    """What the attempt with this sampling seed is told to do."""
    return _draw(generator(sampling_seed, "policy"))


def play_with_faults(
    num_episodes: int,
    *,
    run_seed: int = 0,
    max_attempts: int = 3,
    max_concurrent_rollouts: int = 32,
    step_timeout_seconds: float = 4.0,
) -> FaultReport:
    """Play `num_episodes` samples (a multiple of 4), each with up to `max_attempts` attempts, and account for them."""
    finished: list[Trajectory] = []
    make_env = isolated_factory(
        Faulty,
        isolation="process",
        limits=WorkerLimits(max_growth_mb=32, max_episodes=2**31),
        start_timeout_seconds=10 * step_timeout_seconds,
    )
    pool = RolloutPool(
        ledger=Ledger(keeps_entries=True),
        play=episode_player(
            make_env=lambda _task: make_env(),
            act=ScriptedActor(_teller),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(
                max_turns=4,
                max_output_tokens=16,
                max_model_len=256,
                step_timeout_seconds=step_timeout_seconds,
                episode_timeout_seconds=600,
            ),
        ),
        pool_limits=PoolLimits(
            max_concurrent_rollouts=max_concurrent_rollouts, max_attempts=max_attempts, min_group_fraction=0.5
        ),
        run_seed=run_seed,
        on_episode=lambda trajectory, _what: finished.append(trajectory),
    )
    requests = [GroupRequest(f"g{k}", Task("Faulty", k), _GROUP_SIZE) for k in range(num_episodes // _GROUP_SIZE)]
    before, started = Counter(POOL.counts), time.perf_counter()
    groups = asyncio.run(pool.collect(requests))
    wall_seconds = time.perf_counter() - started
    came_back = [kept.trajectory_id for group in groups for kept in group.trajectories]
    came_back += [dropped.trajectory_id for group in groups for dropped in group.dropped]
    wanted = [f"{request.group_id}/{member}" for request in requests for member in range(request.size)]
    pool.ledger.assert_balanced()
    dispatched = [entry for entry in pool.ledger.entries if isinstance(entry, Dispatched)]
    ended = [entry for entry in pool.ledger.entries if isinstance(entry, Terminal)]
    return FaultReport(
        attempts=dict(Counter((fault_of(t.sampling_seed), t.outcome) for t in finished)),
        workers=dict(POOL.counts - before),
        num_lost=len(set(wanted) - set(came_back)) + len(dispatched) - len(ended),
        num_duplicated=len(came_back) - len(set(came_back)) + _num_repeated(ended) + _num_repeated(finished),
        num_placeholders=_num_placeholders(finished, ended),
        unwanted=[_told_of(t) for t in finished if t.outcome is not WANTED[fault_of(t.sampling_seed)]],
        disturbed=[difference for t in finished if (difference := _difference(t))],
        wall_seconds=wall_seconds,
    )


def run_faults(num_episodes: int) -> int:
    """Play and print; 1 if anything is not as it should be."""
    report = play_with_faults(num_episodes)
    table, console = Table("told to", "came to", "attempts"), Console()
    for (fault, outcome), count in sorted(report.attempts.items()):
        table.add_row(fault, outcome.value, f"{count:,}")
    console.print(table)
    console.print(f"{num_episodes:,} episodes, {sum(report.attempts.values()):,} attempts, {report.wall_seconds:.1f} s")
    console.print(
        f"lost {report.num_lost}, duplicated {report.num_duplicated}, failures with a reward "
        f"{report.num_placeholders}, ended otherwise than told {len(report.unwanted)}, healthy ones disturbed "
        f"{len(report.disturbed)}"
    )
    console.print("worker processes: " + ", ".join(f"{count:,} {fate}" for fate, count in report.workers.items()))
    for line in (*report.unwanted[:5], *report.disturbed[:5]):
        console.print(line)
    return 0 if report.passed else 1


def _draw(rng: np.random.Generator) -> str:
    return TOLD[int(rng.integers(len(TOLD)))]


def _teller(_env: object, rng: np.random.Generator) -> ScriptedPolicy:
    """A player that begins well, and then tells the environment the fault of this attempt."""
    fault = _draw(rng)

    def play(messages: Sequence[Message]) -> str:
        return "ready" if len(messages) == 1 else fault

    return play


def _told_of(trajectory: Trajectory) -> str:
    where = f"{trajectory.trajectory_id}, attempt {trajectory.attempt}, told to {fault_of(trajectory.sampling_seed)}"
    return f"{where}: {trajectory.outcome.value}: {trajectory.error}"


def _difference(trajectory: Trajectory) -> str | None:
    """How an attempt that came to its end differs from what it is without any faults around it; None if not at all."""
    if trajectory.outcome is not Outcome.TERMINATED:
        return None
    fault, seed = fault_of(trajectory.sampling_seed), trajectory.task.seed
    wanted = [opening_of(seed), "ready", answer_of(1, "ready"), fault, answer_of(2, fault)]
    said = [message.content for message in trajectory.messages]
    reward = 0.125 + (seed % 7) / 8
    if said == wanted and trajectory.reward == reward:
        return None
    where = f"{trajectory.trajectory_id}, attempt {trajectory.attempt}"
    return f"{where}: expected {wanted} and {reward}, got {said} and {trajectory.reward}"


def _num_placeholders(finished: Sequence[Trajectory], ended: Sequence[Terminal]) -> int:
    kept = sum(e.disposition is Disposition.KEPT and e.outcome.is_infrastructure_failure for e in ended)
    return kept + sum(t.outcome.is_infrastructure_failure and t.is_scored for t in finished)


def _num_repeated(attempts: Sequence[Trajectory | Terminal]) -> int:
    return len(attempts) - len({(attempt.trajectory_id, attempt.attempt) for attempt in attempts})
