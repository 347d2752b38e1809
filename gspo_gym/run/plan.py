"""The plan of a run: the records of its settings, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings, StepRewardSettings
from gspo_gym.run.settings import EvaluationSettings, LoopSettings, RunSettings, RunSize


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
        ConfigError: constant groups are to be left out although they teach something, or samples would be older than
            they may be from the start.
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
        loop, baseline = self.loop, self.advantages.baseline
        if loop.num_ahead < 0:
            raise ConfigError(
                f"max_staleness: expected at least weight_sync_interval - 1 = {loop.weight_sync_interval - 1}, which "
                f"samples are behind before their update, got {loop.max_staleness}"
            )
        if loop.constant_groups != "keep" and baseline not in ("group", "leave_one_out"):
            raise ConfigError(
                f"constant_groups: {loop.constant_groups!r} leaves out groups whose episodes all earned the same, but "
                f"with baseline {baseline!r} they do have advantages; compare within the group "
                "(baseline 'group' or 'leave_one_out') or keep them"
            )
