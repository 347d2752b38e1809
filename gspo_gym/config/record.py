"""The record of a whole run's settings, and `Rule`, a function of it.

A rule between keys is stated once: between sections as a `Rule` in `rules/`, within one section as a validator of its
record. What the learner or a plan refuses, too, is a function of their settings, which the rule calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from gspo_gym.base.settings import Settings, parse_seeds
from gspo_gym.config.nested import STEP_REWARDS
from gspo_gym.config.sections import (
    SIZE_KEYS,
    AlgorithmSection,
    GatewaySection,
    ModelSection,
    RolloutSection,
    TaskSource,
    TrainingSection,
    WeightSyncSection,
    task_sources,
)
from gspo_gym.config.services import (
    ComputeSection,
    LearnerSection,
    ServicesSection,
    TopologySection,
    TrackingSection,
    VllmSection,
    has_replicas,
)
from gspo_gym.config.words import Problem, entry_model, section_model, show
from gspo_gym.judge.settings import JudgeSettings
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    DistillationSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
)
from gspo_gym.learning.step_rewards import StepRewardSettings, idle_step_rewards
from gspo_gym.rollout.limits import EpisodeLimits, LimitSettings
from gspo_gym.run.settings import EvaluationSettings, RunSettings, RunSize, WarmupSettings
from gspo_gym.types import Sampling

_Model = TypeVar("_Model", bound=BaseModel)


class RunRecord(Settings):
    """The sections of a configuration, with the numbers and records that follow from them."""

    run: RunSettings
    algorithm: AlgorithmSection
    services: ServicesSection | None = None
    gateway: GatewaySection | None = None
    compute: ComputeSection | None = None
    topology: TopologySection | None = None
    learner: LearnerSection
    vllm: VllmSection | None = None
    reference: ReferenceSettings
    model: ModelSection
    rollout: RolloutSection
    limits: LimitSettings
    training: TrainingSection
    loss: LossSettings
    advantages: AdvantageSettings
    rewards: RewardSettings
    correction: CorrectionSettings
    distillation: DistillationSettings | None = None
    optimizer: OptimizerSettings
    evaluation: EvaluationSettings
    warmup: WarmupSettings | None = None
    tracking: TrackingSection
    judge: JudgeSettings | None = None

    @property
    def sections(self) -> dict[str, Any]:
        """Return the sections by name (Any: records of many types); None for an absent one."""
        return dict(self)

    @property
    def run_folder(self) -> Path:
        return Path(self.run.folder) / self.model.label

    @property
    def sources(self) -> tuple[TaskSource, ...]:
        """Return the environments and task apps that play the episodes, the main one first."""
        rollout = self.rollout
        return task_sources(rollout.env_name, rollout.env_config, self.endpoints.task_url, rollout.mixture)

    @property
    def size(self) -> RunSize:
        """Return the numbers of iterations, optimizer steps and trajectories of the run."""
        return RunSize(*attrgetter(*SIZE_KEYS, "training.group_size")(self))

    @property
    def evaluation_seeds(self) -> tuple[int, ...]:
        """Return the seeds of the evaluation's tasks."""
        return () if self.evaluation.seeds is None else parse_seeds(self.evaluation.seeds)

    @property
    def num_evaluation_episodes(self) -> int:
        """Return how many episodes an evaluation plays, over all environments and samples."""
        return len(self.sources) * len(self.evaluation_seeds) * self.evaluation.samples_per_task

    @property
    def evaluation_sampling(self) -> Sampling:
        """Return the sampling of an evaluation: that of [rollout] at the evaluation's temperature."""
        return replace(self.rollout.sampling, temperature=self.evaluation.temperature)

    @property
    def scores_truncated(self) -> bool:
        """Return whether the learner scores under the truncation that [rollout] samples with."""
        return self.rollout.sampling.is_truncated and "truncated_sampling" not in self.algorithm.acknowledge

    @property
    def scored_sampling(self) -> Sampling:
        """Return the part of the sampling under which the learner computes logprobs."""
        sampling = self.rollout.sampling
        return sampling if self.scores_truncated else Sampling(temperature=sampling.temperature)

    @property
    def has_reference(self) -> bool:
        """Return whether a term compares with a reference policy."""
        return self.loss.kl_coef > 0 or self.rewards.kl_coef > 0 or self.advantages.kl_shaping_coef > 0

    @property
    def episode_limits(self) -> EpisodeLimits:
        """Return the limits of an evaluation's episodes and of demonstrations."""
        return EpisodeLimits.of(self.rollout, self.limits)

    @property
    def training_limits(self) -> EpisodeLimits:
        """Return the limits of the episodes to learn from, which training.max_turns may shorten."""
        limits = self.episode_limits
        max_turns = min(limits.max_turns, self.training.max_turns or limits.max_turns)
        return limits.model_copy(update={"max_turns": max_turns})

    @property
    def step_rewards_mode(self) -> str:
        """Return how turns earn rewards."""
        return self.training.step_rewards_mode or str(StepRewardSettings.model_fields["mode"].default)

    @property
    def step_reward_settings(self) -> StepRewardSettings:
        """Return how turns earn rewards; keys that are absent, or of another mode, have their defaults."""
        # Keys of another mode stand in the hosted trainer's files, and may have values that this one refuses.
        idle = idle_step_rewards(self.step_rewards_mode, self.training.step_rewards_strategy)
        values = {name: getattr(self.training, key) for name, key in STEP_REWARDS.items() if name not in idle}
        values["mode"] = self.step_rewards_mode
        return StepRewardSettings(**{name: value for name, value in values.items() if value is not None})

    # Of a section that may be left out, as if it were there and empty.
    @property
    def endpoints(self) -> ServicesSection:
        """Return [services], or one that names nothing."""
        return self.services or ServicesSection()

    @property
    def judging(self) -> JudgeSettings:
        """Return [judge], or one that is off."""
        return self.judge or JudgeSettings()

    @property
    def weight_sync(self) -> WeightSyncSection:
        """Return [training.weight_sync], or its defaults."""
        return self.training.weight_sync or WeightSyncSection()

    @property
    def gpu_count(self) -> int | None:
        """Return compute.gpu_count; None: any device is fine."""
        return None if self.compute is None else self.compute.gpu_count

    @property
    def has_replicas(self) -> bool:
        """Return whether several engines sample, each in a process of its own."""
        return has_replicas(self.sections)

    @property
    def has_app(self) -> bool:
        """Return whether a task app plays a part of the episodes."""
        return self.endpoints.task_url is not None or any(entry.task_url for entry in self.rollout.mixture)


@dataclass(frozen=True, slots=True)
class Rule:
    """A check of keys against each other.

    Attributes:
        key: dotted; where the problem is reported.
        check: returns the problem as a sentence, or None.
    """

    key: str
    check: Callable[[RunRecord], str | None]


def rule(key: str) -> Callable[[Callable[[RunRecord], str | None]], Rule]:
    """Make a function of the record the rule whose problem is reported at `key`."""
    return lambda check: Rule(key, check)


def rules_in(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules that a module has defined so far, in their order (Any: its names)."""
    return tuple(value for value in module.values() if isinstance(value, Rule))


def idle(
    key: str,
    acts: Callable[[RunRecord], bool],
    problem: str | Callable[[RunRecord], str],
    *,
    default: Any = Ellipsis,
) -> Rule:
    """Return the rule that `key` keeps its default unless it acts: a key without effect is considered a mistake.

    `default`: where a key that is left out is None, what that means (Any: of any field).
    """
    default = default_of(key) if default is Ellipsis else default

    def check(c: RunRecord) -> str | None:
        if value_at(c, key) in (None, default) or acts(c):
            return None
        return problem if isinstance(problem, str) else problem(c)

    return Rule(key, check)


def no_effect(key: str, other: str, acts: Callable[[Any], bool], advice: str, *, default: Any = Ellipsis) -> Rule:
    """Return the rule that `key` keeps its default unless `acts` is true of the other key's value."""
    return idle(
        key,
        lambda c: acts(value_at(c, other)),
        lambda c: f"has no effect with {other} = {show(value_at(c, other))}: {advice}, or remove this",
        default=default,
    )


def acts_with(key: str, other: str, value: str, *, default: Any = Ellipsis) -> Rule:
    """Return the rule that `key` keeps its default unless the other key has this value."""
    return no_effect(key, other, lambda current: current == value, f"set that to {show(value)}", default=default)


def value_at(record: BaseModel, key: str) -> Any:
    """Return the value at a dotted key (Any: of any field); None where its section is absent."""
    value: Any = record
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def default_of(key: str) -> Any:
    """Return the default of a dotted key (Any: of any field)."""
    *above, name = key.split(".")
    model: type[BaseModel] = RunRecord
    for part in above:
        section = section_model(model.model_fields[part].annotation)
        assert section is not None, key
        model = section
    return model.model_fields[name].default


def problems_of(rules: Iterable[Rule], record: RunRecord) -> list[Problem]:
    """Return what the rules find; a rule that reads what `partial_record` left out finds nothing."""
    problems = []
    for rule in rules:
        try:
            text = rule.check(record)
        except AttributeError as error:
            if isinstance(error.obj, BaseModel) and error.name in type(error.obj).model_fields:
                continue
            raise
        if text is not None:
            problems.append(Problem(rule.key, text))
    return problems


def partial_record(model: type[_Model], values: Mapping[str, Any], wrong: frozenset[str], prefix: str = "") -> _Model:
    """Return a record of those values (Any: unchecked) that are valid by themselves; reading others is an error.

    `wrong` are the dotted keys of the others. So all problems of a file are reported at once.
    """
    known_values = {}
    for name, value in values.items():
        key, info = f"{prefix}{name}", model.model_fields.get(name)
        section = None if info is None else section_model(info.annotation)
        entry = None if info is None else entry_model(info.annotation)
        if key in wrong:
            continue
        if section is not None and isinstance(value, Mapping):
            value = partial_record(section, value, wrong, f"{key}.")
        elif entry is not None:
            value = tuple(partial_record(entry, row, frozenset()) if isinstance(row, Mapping) else row for row in value)
        known_values[name] = value
    record = model.model_construct(**known_values)
    for name in model.model_fields:
        if f"{prefix}{name}" in wrong:
            record.__dict__.pop(name, None)  # its default
    return record
