"""The arithmetic of a run: episodes an iteration, trajectories an optimizer step, optimizer steps in all.

One place for the rules, which judge it, and for `config.RunConfig`, which hands it on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The numbers that decide how many optimizer steps a run takes; names as in the file.

    >>> plan = RunPlan(num_epochs=2, iterations_per_epoch=9, episodes_per_batch=64, batch_size=16)
    >>> plan.num_iterations, plan.steps_per_iteration, plan.num_optimizer_steps
    (18, 4, 72)
    """

    num_epochs: int
    iterations_per_epoch: int
    episodes_per_batch: int
    batch_size: int
    batches_per_step: int = 1
    update_epochs: int = 1
    gradient_accumulation_steps: int | None = None
    max_accumulated_minibatch: int | None = None

    @property
    def num_iterations(self) -> int:
        """Iterations of the whole run."""
        return self.num_epochs * self.iterations_per_epoch

    @property
    def episodes_per_iteration(self) -> int:
        """Episodes that one iteration learns from, if none is dropped."""
        return self.episodes_per_batch * self.batches_per_step

    @property
    def num_accumulated(self) -> int:
        """Batches of batch_size trajectories whose gradients are summed before one optimizer step."""
        if self.gradient_accumulation_steps is not None:
            return min(
                self.gradient_accumulation_steps, self.max_accumulated_minibatch or self.gradient_accumulation_steps
            )
        batches = self.episodes_per_iteration // self.batch_size
        return max(1, min(self.max_accumulated_minibatch or 1, batches))

    @property
    def minibatch_size(self) -> int:
        """Most trajectories of an optimizer step; the iteration's are split evenly."""
        return self.batch_size * self.num_accumulated

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps between two batches of episodes."""
        return -(-self.episodes_per_iteration // self.minibatch_size) * self.update_epochs

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of a whole run in which no group is dropped."""
        return self.num_iterations * self.steps_per_iteration


# The keys of a RunPlan's fields, in their order.
PLAN_KEYS = (
    "training.num_epochs",
    "training.iterations_per_epoch",
    "rollout.episodes_per_batch",
    "training.batch_size",
    "rollout.batches_per_step",
    "training.update_epochs",
    "training.gradient_accumulation_steps",
    "training.max_accumulated_minibatch",
)
