"""Settings of a run that its loop reads: sections of a configuration file or parts of them, and the plan made of them.

Reading a configuration loads neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from gspo_gym.base.files import as_toml_holds_it
from gspo_gym.base.settings import Settings, parse_seeds
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings, SupervisedSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.seeding import FIRST_TRAINING_SEED

ConstantGroups = Literal["keep", "drop", "refill"]


class RunSettings(Settings):
    """[run]: seed, folder and labels of a run, and what it takes over from another one."""

    seed: int = Field(default=0, ge=0, description="everything random in the run derives from it")
    folder: str = Field(default="runs", min_length=1, description="runs are written into FOLDER/LABEL")
    tags: dict[str, Any] = Field(  # Any: texts, numbers and switches
        default={}, description="labels of the run: kept in its config.toml, and tags in W&B"
    )
    log_episodes_every_n_iters: int = Field(
        default=1, ge=0, description="iterations between files of training episodes; 0: only evaluations' are written"
    )
    log_tokens_every_n_iters: int = Field(
        default=0,
        ge=0,
        description="iterations between files of what the learner saw of every sampled token: advantage, logprobs, "
        "ratio, clip, share of the loss; also of each iteration after a checkpoint; 0: none",
    )
    stop_grace_seconds: float = Field(
        default=30.0,
        gt=0,
        description="from SIGTERM, SIGHUP, Ctrl-C or another request to stop until the run ends, saved or not",
    )

    restore: tuple[Literal["weights", "optimizer", "tasks", "step"], ...] = Field(
        default=(),
        description="parts of another run's checkpoint that a new run begins with: weights (in place of model.base), "
        "optimizer (moments, running returns, adaptive coefficient), tasks (those after its last), step (the numbers "
        "of iterations and of the schedule)",
    )
    restore_from: str | None = Field(
        default=None,
        min_length=1,
        description="the folder of that run, for its newest sound checkpoint, or of a checkpoint; absent: none",
    )

    @field_validator("tags")
    @classmethod
    def _can_be_recorded(cls, tags: dict[str, Any]) -> dict[str, Any]:
        return as_toml_holds_it(tags)


class BatchSettings(Settings):
    """The keys of [training] for the number and size of batches."""

    num_epochs: int = Field(default=1, gt=0, description="iterations in all = num_epochs x iterations_per_epoch")
    iterations_per_epoch: int = Field(gt=0, description="batches of episodes per epoch")
    max_turns: int | None = Field(
        default=None,
        gt=0,
        description="actions per training episode, at most rollout.max_turns, which evaluations use; absent: that many",
    )
    group_size: int = Field(
        gt=0,
        description=(
            "episodes of the same task, each other's baseline (the paper's G); 1 only with a baseline and a scale that "
            "need no siblings"
        ),
    )
    batch_size: int = Field(
        gt=0,
        description=(
            "trajectories per optimizer step, a divisor of the iteration's episodes; if equal to them, with one of "
            "update_epochs, the ratio is 1 everywhere and no clip acts (the paper takes 4 steps a batch)"
        ),
    )


class LoopSettings(Settings):
    """The keys of [training] for the loop around the updates."""

    log_interval: int = Field(default=1, gt=0, description="iterations between lines in metrics.jsonl")
    checkpoint_every_n_iters: int = Field(
        default=50, gt=0, description="iterations between checkpoints; the last one is saved in any case"
    )
    stop_at_success_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="an evaluation that reaches this success rate, with episodes that could not be scored as failures, "
        "ends the run; absent: none does",
    )
    constant_groups: ConstantGroups = Field(
        default="keep",
        description=(
            "groups whose episodes all earned the same, and so teach nothing: they stay in the denominators, or leave "
            "the batch, or are replaced by groups of fresh tasks in at most ten rounds (arXiv 2503.14476, section 3.2)"
        ),
    )
    adaptive_tasks: int | None = Field(
        default=None,
        ge=0,
        description="how many tasks of each environment, such as the rows of a data set, groups choose from, "
        "those more often whose episodes lately did not all earn the same (rollout/sampler.py); 0: the environments of "
        "[[rollout.mixture]] are chosen from, such as a game at several sizes; absent: every task in turn",
    )
    weight_sync_interval: int = Field(
        default=1,
        gt=0,
        description="iterations between new weights for the engine; 1 with the local one; samples in between are stale",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="weight versions a sample may lie behind (TRL); above 0, episodes are played while the learner "
        "works, and the local engine keeps its own copy of the weights: twice the memory; 0: strictly on-policy",
    )

    @property
    def num_ahead(self) -> int:
        """Return for how many iterations episodes are played in advance; negative: no sample could be fresh enough."""
        # Just before an update is sent, the engine's weights are interval - 1 versions behind.
        return self.max_staleness - (self.weight_sync_interval - 1)


class EvaluationSettings(Settings):
    """[evaluation]: seeded episodes without learning: before the first iteration, regularly, and after the last."""

    seeds: tuple[int, ...] | str | None = Field(
        default=None, description='a list of integers, or text like "0:100" (100 left out) or "1,5,20:25"'
    )
    samples_per_task: int = Field(
        default=1,
        gt=0,
        description="episodes of each task; above 1 also pass@k (one of k samples succeeds) and pass^k (all do), "
        "for k = 2, 4, 8 ... (arXiv 2107.03374, eq. 1; 2406.12045)",
    )
    every_n_iters: int = Field(default=10, gt=0, description="iterations between evaluations")
    temperature: float = Field(
        default=1.0, ge=0, description="divides the logits; 0 is greedy; all other sampling is as in [rollout]"
    )

    @field_validator("seeds")
    @classmethod
    def _are_held_out_seeds(cls, seeds: tuple[int, ...] | str | None) -> tuple[int, ...] | str | None:
        if seeds is not None and max(parse_seeds(seeds)) >= FIRST_TRAINING_SEED:
            raise ValueError(
                f"expected seeds below 2**31 (from there up they are trained on), got {max(parse_seeds(seeds))}"
            )
        return seeds


class DemonstrationSettings(Settings):
    """The keys of [warmup] for the episodes to imitate."""

    policy: str = Field(default="random", min_length=1, description="a name in the environment's `policies`")
    num_episodes: int = Field(gt=0, description="demonstrations that the policy plays")


class WarmupSettings(SupervisedSettings, DemonstrationSettings):
    """[warmup]: supervised learning of a scripted policy's episodes before reinforcement; without the section, none."""


@dataclass(frozen=True, slots=True)
class RunSize:
    """The arithmetic of a run: episodes per iteration, trajectories per optimizer step, optimizer steps in all.

    The fields are named as in the configuration file.

    >>> size = RunSize(num_epochs=2, iterations_per_epoch=9, episodes_per_batch=64, batch_size=16)
    >>> size.num_iterations, size.steps_per_iteration, size.num_optimizer_steps
    (18, 4, 72)
    """

    num_epochs: int
    iterations_per_epoch: int
    episodes_per_batch: int
    batch_size: int
    update_epochs: int = 1
    forks_per_episode: int = 0
    group_size: int = 1

    @property
    def num_iterations(self) -> int:
        return self.num_epochs * self.iterations_per_epoch

    @property
    def groups_per_iteration(self) -> int:
        """Return the tasks that one iteration plays, each `group_size` times."""
        return self.episodes_per_batch // self.group_size

    @property
    def minibatch_size(self) -> int:
        """Return the most trajectories of an optimizer step, forks included; those of an iteration are split evenly."""
        return self.batch_size * (1 + self.forks_per_episode)

    @property
    def steps_per_iteration(self) -> int:
        """Return the optimizer steps between two batches of episodes."""
        return -(-self.episodes_per_batch // self.batch_size) * self.update_epochs

    @property
    def num_optimizer_steps(self) -> int:
        """Return the optimizer steps of a whole run in which no group is dropped."""
        return self.num_iterations * self.steps_per_iteration


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """Settings of a training loop; a step (an iteration of the configuration) is one batch of episodes and its updates.

    There is always an evaluation before the first step and one after the last, and a checkpoint after the last.

    Attributes:
        env_id: the environment trained on, or the main one of several.
        size: the number of steps, of groups per step, and of episodes per group.
        run: the seed, and when training episodes are written.
        loop: what happens around the updates, and how old samples may be.
        evaluation: when the run evaluates.
        advantages: how the episodes of a group are compared.
        rewards, step_rewards: applied to rewards before episodes are compared.
        mixture: further environments, and the fraction of groups of each; the rest plays `env_id`.

    Raises:
        ConfigError: constant groups are to be left out, or tasks chosen by whether their groups are constant, although
            constant groups teach something; there is nothing to choose from; forks are not compared as the advantages
            say; or samples would be older than they may be from the start.
    """

    env_id: str
    size: RunSize
    run: RunSettings = field(default_factory=RunSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    step_rewards: StepRewardSettings = field(default_factory=StepRewardSettings)
    mixture: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        adaptive = self.loop.adaptive_tasks, self.advantages.baseline
        for key, problem in (
            ("training.max_staleness", staleness_problem(self.loop)),
            ("training.constant_groups", constant_groups_problem(self.loop.constant_groups, self.advantages.baseline)),
            ("training.adaptive_tasks", adaptive_tasks_problem(*adaptive, has_mixture=bool(self.mixture))),
            ("rollout.forks_per_episode", forks_problem(self.size.forks_per_episode, self.advantages)),
        ):
            if problem is not None:
                raise ConfigError(f"{key}: {problem}")


def staleness_problem(loop: LoopSettings) -> str | None:
    """Return why samples would be older than they may be from the start; None if they would not."""
    # A run that samples k iterations under old weights must allow samples of that age.
    if loop.num_ahead >= 0:
        return None
    return (
        f"expected at least training.weight_sync_interval - 1 = {loop.weight_sync_interval - 1}, which samples lie "
        f"behind before new weights are sent, got {loop.max_staleness}"
    )


def constant_groups_problem(constant_groups: ConstantGroups, baseline: str) -> str | None:
    """Return why groups of equal rewards cannot be left out under this baseline; None if they can, or stay."""
    # Only a baseline of siblings makes equal rewards advantages of 0.
    if constant_groups == "keep" or baseline in ("group", "leave_one_out"):
        return None
    return (
        f'"{constant_groups}" leaves out groups that teach nothing, but with advantages.baseline "{baseline}" they do: '
        'set "keep"'
    )


def adaptive_tasks_problem(num_tasks: int | None, baseline: str, *, has_mixture: bool) -> str | None:
    """Return why tasks cannot be chosen by whether their groups are informative; None if they can, or are not."""
    if num_tasks is None:
        return None
    if baseline not in ("group", "leave_one_out"):
        return (
            "chooses tasks of which the episodes of a group do not all earn the same, but with advantages.baseline "
            f'"{baseline}" the others teach, too: set "leave_one_out", or remove this'
        )
    if num_tasks == 0 and not has_mixture:
        return (
            "0 chooses from the environments of [[rollout.mixture]], and there is none: give the number of training "
            "tasks, such as the rows of the data set, or remove this"
        )
    return None


def forks_problem(forks_per_episode: int, advantages: AdvantageSettings) -> str | None:
    """Return why forks cannot be compared under these settings; None if they can, or there are none."""
    needed = {"level": "trajectory", "baseline": "leave_one_out", "scale": "none"}
    if forks_per_episode == 0 or all(getattr(advantages, name) == value for name, value in needed.items()):
        return None
    keys = ", ".join(f'advantages.{name} = "{value}"' for name, value in needed.items())
    return f"forks are compared with their siblings by returns, unscaled: set {keys}, or remove this"
