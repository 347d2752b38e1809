"""Warm-up: demonstrations played by an environment's own scripted policy, imitated before reinforcement starts.

A randomly initialised model does not know the format of an answer; after warm-up on random legal play it does, and the
strategy is left to reinforcement. Not for distilling a good player, although the "reference" policy may be named too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo_gym.learning.settings import OptimizerSettings, SupervisedSettings
from gspo_gym.learning.supervised import SupervisedReport, supervised_epochs
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.run.report.progress import Progress
from gspo_gym.seeding import child_seed, training_seed
from gspo_gym.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class WarmupPlan:
    """What is imitated, and how hard."""

    env_id: str
    run_seed: int
    num_episodes: int
    optimizer: OptimizerSettings
    settings: SupervisedSettings


async def warm_up(model: Any, pool: RolloutPool, plan: WarmupPlan, progress: Progress) -> SupervisedReport:
    """Play the demonstrations with the pool's scripted actor, and train `model` in place on them.

    Their tasks are those of the training step 0, which no training step plays, so no evaluation task is seen. Any:
    transformers and peft are untyped.

    Raises:
        RolloutError: no demonstration could be played; the scripted policy's error is in the message.
        NonFiniteError: too many steps in a row had a NaN or infinite loss or gradient.
    """
    demonstrations = await play_demonstrations(pool, plan)
    report = supervised_epochs(
        model,
        demonstrations,
        optimizer=plan.optimizer,
        settings=plan.settings,
        seed=child_seed(plan.run_seed, "warmup"),
    )
    progress.note(
        f"warm-up: {len(demonstrations)} demonstrations, loss per token "
        f"{report.epoch_losses[0]:.3f} in the first pass, {report.epoch_losses[-1]:.3f} in the last"
    )
    return report


async def play_demonstrations(pool: RolloutPool, plan: WarmupPlan) -> list[Trajectory]:
    """One episode for each of `num_episodes` training tasks."""
    requests = [
        GroupRequest(
            f"warmup/{i:06d}", Task(plan.env_id, training_seed(child_seed(plan.run_seed, "warmup"), i)), size=1
        )
        for i in range(plan.num_episodes)
    ]
    groups = await pool.collect(requests)
    return [trajectory for group in groups for trajectory in group.trajectories]
