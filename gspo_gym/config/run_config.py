"""RunConfig: the file that a user writes, read strictly.

Files are TOML or YAML with the sections of `sections.py` and `services.py`, flat or in the hosted trainer's nested
form; `section.key=value` on the command line goes over them. Unknown and foreign keys, wrong types, values out of range
and contradictions are found before anything heavy loads, and all are reported at once. Nothing here imports torch;
`config/build/trainer.py` turns a RunConfig into live objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import BaseModel, PrivateAttr, ValidationError, model_validator

from gspo_gym.base.files import read_file
from gspo_gym.base.settings import Settings, parse_seeds
from gspo_gym.config.nested import INSERTED, STEP_REWARDS, Flat, apply_override, flatten
from gspo_gym.config.rules.objective import OTHER_KEYS, with_derived_defaults
from gspo_gym.config.rules.rules import find_contradictions, find_notices
from gspo_gym.config.sections import (
    SIZE_KEYS,
    AlgorithmSection,
    GatewaySection,
    ModelSection,
    RolloutSection,
    TaskSource,
    TrainingSection,
    parse_source,
    task_sources,
)
from gspo_gym.config.services import (
    ComputeSection,
    LearnerSection,
    ServicesSection,
    TopologySection,
    TrackingSection,
    VllmSection,
)
from gspo_gym.config.words import (
    Problem,
    field_of,
    find_nul,
    find_problems,
    find_secrets,
    look_up,
    section_model,
    show,
    with_known_spelling,
)
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.judge.settings import JudgeSettings
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    StepRewardSettings,
)
from gspo_gym.rollout.limits import EpisodeLimits, LimitSettings
from gspo_gym.run.settings import EvaluationSettings, RunSettings, RunSize, WarmupSettings
from gspo_gym.types import Sampling

__all__ = ["RunConfig", "load_config", "load_sections", "model_name", "read_file"]


class RunConfig(Settings):
    """Settings of a whole run, with the numbers and records that follow from them.

    Build it with `load_config` or `from_dict`: their errors name every problem; the constructor takes the same values
    and raises pydantic's error.
    """

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
    optimizer: OptimizerSettings
    evaluation: EvaluationSettings
    warmup: WarmupSettings | None = None
    tracking: TrackingSection
    judge: JudgeSettings | None = None
    _of_the_file: tuple[Problem, ...] = PrivateAttr(())  # notices of how it is written, which is no setting

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and dict(self) == dict(other)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | Flat, *, source: str = "configuration") -> RunConfig:
        """Return the configuration of these sections (Any: unchecked), flat already or not.

        Errors name `source` as their origin.

        Raises:
            ConfigError: lists everything that is wrong.
        """
        return _check(values if isinstance(values, Flat) else flatten(values), lambda _: source, ())

    def to_toml(self) -> str:
        """Return every key with the value that is used, as TOML that reads back to an equal RunConfig."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

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
        url = None if self.services is None else self.services.task_url
        return task_sources(rollout.env_name, rollout.env_config, url, rollout.mixture)

    @property
    def size(self) -> RunSize:
        """Return the numbers of iterations, optimizer steps and trajectories of the run."""
        return RunSize(*attrgetter(*SIZE_KEYS, "training.group_size")(self))

    @property
    def evaluation_seeds(self) -> tuple[int, ...]:
        """Return the seeds of the evaluation's tasks: the first `instances` where there are more."""
        seeds, instances = self.evaluation.seeds, self.evaluation.instances
        return tuple(range(instances or 0)) if seeds is None else parse_seeds(seeds)[:instances]

    @property
    def evaluation_sampling(self) -> Sampling:
        """Return the sampling of an evaluation: that of [rollout] at the evaluation's temperature."""
        return replace(self.rollout.sampling, temperature=self.evaluation.temperature)

    @property
    def notices(self) -> tuple[Problem, ...]:
        """Return the keys that have no effect, or another effect than they seem to."""
        return (*self._of_the_file, *find_notices(_valid_values(RunConfig, self.model_dump(), frozenset())))

    @property
    def has_reference(self) -> bool:
        """Return whether a term compares with a reference policy."""
        return self.loss.kl_coef > 0 or self.rewards.kl_coef > 0 or self.advantages.kl_shaping_coef > 0

    @property
    def episode_limits(self) -> EpisodeLimits:
        """Return the limits of an evaluation's episodes and of demonstrations."""
        num_pairs = len(self.rollout.ops) // 2
        # One pair is repeated up to max_turns; a longer list of ops is played once.
        limits = EpisodeLimits.of(self.rollout, self.limits)
        return limits if num_pairs == 1 else limits.model_copy(update={"max_turns": num_pairs})

    @property
    def training_limits(self) -> EpisodeLimits:
        """Return the limits of the episodes to learn from, which training.max_turns may shorten."""
        limits = self.episode_limits
        max_turns = min(limits.max_turns, self.training.max_turns or limits.max_turns)
        return limits.model_copy(update={"max_turns": max_turns})

    @property
    def step_reward_settings(self) -> StepRewardSettings:
        """Return how turns earn rewards; keys that are absent, or of another mode, have their defaults."""
        training = self.training
        # Keys of another mode stand in the hosted trainer's files, and may have values that this one refuses.
        mode = "off" if training.step_rewards_enabled is False else training.step_rewards_mode
        read = ["mode"]
        if mode == "decision_stepwise":
            is_per_achievement = training.step_rewards_strategy == "per_achievement"
            read += ["strategy", "indicator_lambda", "beta"]
            read += ["weights", "k_limits"] if is_per_achievement else ["kind"]
        given = {name: getattr(training, STEP_REWARDS[name]) for name in read} | {"mode": mode}
        return StepRewardSettings(**{name: value for name, value in given.items() if value is not None})

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(values, Mapping):
            return values
        return with_derived_defaults(with_known_spelling(values, cls), _required_sections())

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        # Also for a RunConfig that was constructed directly; `_check` asks again to report the problems one by one.
        values = _valid_values(RunConfig, self.model_dump(), frozenset())
        if problems := find_contradictions(values):
            raise ValueError("; ".join(f"{problem.key}: {problem.text}" for problem in problems))
        return self


def config_file(name: str | Path) -> Path:
    """Return the file that `name` means: its path, or `quickstart` for the quickstart.toml that the package holds.

    Raises:
        ConfigError: it has no suffix, and neither a file nor a configuration of the package has this name.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return path
    held = {file.stem: file for file in Path(str(files("gspo_gym_configs"))).glob("*.toml")}
    if str(name) not in held:
        raise ConfigError(
            f"{name}: there is no such file, and the package holds no configuration of that name; "
            f"{nearest_name(str(name), held)}"
        )
    return held[str(name)]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML, YAML or JSON file, with `section.key=value` texts going over it in order.

    `path` may name a configuration that the package holds (`config_file`). A value is TOML (`7`, `true`, `[1, 2]`,
    `"text"`); anything else is taken as text: names and paths need no quotes.

    Raises:
        ConfigError: there is no such file, it is not of that format, or its content is wrong: then everything that is.
    """
    flat, overridden, problems = _read(config_file(path), overrides)

    def source_of(key: str) -> str:
        # A key of a table that was given, or a table with a key that was given.
        on_command_line = any(f"{key}.".startswith(f"{o}.") or f"{o}.".startswith(f"{key}.") for o in overridden)
        return "command line" if on_command_line else str(path)

    return _check(flat, source_of, problems)


def load_sections(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of file and command line, in the flat form and unchecked.

    Raises:
        ConfigError: there is no such file, or its format is wrong.
    """
    return _read(config_file(path), overrides)[0].values


# Returns the file with the overrides applied, the keys that these set, and the problems with them.
def model_name(config: RunConfig) -> str:
    """Return the model name for `load_policy`, from model.base or model.source.

    Raises:
        ConfigError: model.source names a run or a checkpoint that is not there.
    """
    if config.model.base is not None:
        revision = config.model.revision
        return config.model.base if revision is None else f"{config.model.base}@{revision}"
    label, step = parse_source(config.model.source or "")
    folder = Path(config.run.folder) / label / "checkpoints"
    # A checkpoint without a manifest was not finished.
    found = sorted(path.name for path in folder.glob("step_*") if (path / "manifest.json").is_file())
    if not found or (step is not None and step not in found):
        there = f"the checkpoints there are {', '.join(found)}" if found else "there is none"
        raise ConfigError(f"model.source: {config.model.source!r}: expected a checkpoint in {folder}; {there}")
    return str(folder / (step or found[-1]))


def _read(path: Path, overrides: Sequence[str]) -> tuple[Flat, list[str], list[Problem]]:
    flat = flatten(read_file(path))
    overridden: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        key, problem = apply_override(flat.values, text)
        overridden.append(key)
        problems += [] if problem is None else [problem]
    return flat, overridden, problems


def _check(flat: Flat, source_of: Callable[[str], str], known: Sequence[Problem]) -> RunConfig:
    flat.values = with_known_spelling(flat.values, RunConfig)
    filled = {
        name: _as_tuples(section) for name, section in with_derived_defaults(flat.values, _required_sections()).items()
    }
    problems = [*known, *flat.problems, *find_secrets(flat.values), *find_nul(flat.values)]
    config = None
    try:
        config = RunConfig.model_validate(filled)
    except ValidationError as error:
        secret = {problem.key for problem in problems}  # these are not repeated: pydantic's sentences show values
        problems += [p for p in find_problems(error, RunConfig, flat.values) if p.key not in secret]
        wrong = frozenset(field_of(problem.key) for problem in problems)
        problems += find_contradictions(_valid_values(RunConfig, filled, wrong))
    if config is None or problems:
        lines = [f"{source_of(p.key)}: {flat.name(p.key)}: {p.text}" for p in problems]
        listed = f"{len(lines)} problems in the configuration:\n  " + "\n  ".join(lines)
        raise ConfigError(lines[0] if len(lines) == 1 else listed)
    config._of_the_file = tuple(_inserted(flat, config))
    return config


def _inserted(flat: Flat, config: RunConfig) -> Iterator[Problem]:
    for key, written in flat.inserted.items():
        used = look_up(config.model_dump(), key)
        if look_up(flat.values, key) is None and used != INSERTED[key]:
            text = f"{show(INSERTED[key])}, which a client inserts, counts as absent: {key} is {show(used)}"
            yield Problem(written, text)


def _required_sections() -> list[str]:
    """Return the sections that always exist: their missing keys are reported one by one."""
    return [name for name, info in RunConfig.model_fields.items() if info.is_required()]


def _valid_values(model: type[BaseModel], values: Any, wrong: frozenset[str], prefix: str = "") -> dict[str, Any]:
    # By dotted key, given or by default. An optional section has its own name as a key, too: whether it is there. If it
    # is not, its keys are None.
    valid: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        is_given = isinstance(values, Mapping) and name in values
        # A required key that is missing is reported as such, and no rule may read it.
        if key in wrong or (not is_given and info.is_required() and values is not None):
            continue
        value = values[name] if is_given else None if values is None else info.default
        section = section_model(info.annotation)
        if section is None:
            valid[key] = value
            continue
        if not info.is_required():
            valid[key] = value is not None
        valid |= _valid_values(section, value, wrong, f"{key}.")
        if section.model_config.get("extra") == "allow":
            others = {} if not isinstance(value, Mapping) else value
            valid[key + OTHER_KEYS] = {n: v for n, v in others.items() if n not in section.model_fields}
    return valid


def _as_tuples(value: Any) -> Any:
    # A strict tuple field takes no list, and TOML has nothing else.
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(value) if isinstance(value, list) else value
