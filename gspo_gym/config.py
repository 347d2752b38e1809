"""RunConfig: the file that a user writes, read strictly.

A file is TOML with the sections of `config_sections.py`; `section.key=value` on the command line goes over it. Every
unknown key, wrong type, value out of range and contradiction is found before anything heavy loads, and all of them are
reported at once. Nothing here imports torch; `build.py` turns a RunConfig into live objects.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import ValidationError, model_validator

from gspo_gym.config_problems import Problem, find_problems, show
from gspo_gym.config_rules import find_contradictions, num_optimizer_steps, with_derived_defaults
from gspo_gym.config_sections import (
    AlgorithmSection,
    EvaluationSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    RolloutSection,
    RunSection,
    TrainingSection,
    WarmupSection,
)
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.settings import (
    AdvantageSettings,
    LossSettings,
    OptimizerSettings,
    SupervisedSettings,
    UpdateSettings,
)
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.settings import Settings, parse_seeds

_OVERRIDE = re.compile(r"\s*(?P<key>[\w-]+(\.[\w-]+)+)\s*=(?P<value>.*)", re.DOTALL)


class RunConfig(Settings):
    """A whole run: what a configuration file says, and what follows from it.

    Build it with `load_config` or `from_dict`, whose errors name every problem; the constructor takes the same values
    and raises pydantic's error.
    """

    run: RunSection
    algorithm: AlgorithmSection
    model: ModelSection
    rollout: RolloutSection
    limits: LimitsSection
    training: TrainingSection
    loss: LossSettings
    advantages: AdvantageSettings
    optimizer: OptimizerSection
    evaluation: EvaluationSection
    warmup: WarmupSection | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "configuration") -> RunConfig:
        """The configuration that these sections give (Any: unchecked). `source` says in errors where they come from.

        Raises:
            ConfigError: lists everything that is wrong.
        """
        return _check(values, lambda _: source, ())

    def to_toml(self) -> str:
        """The resolved configuration: every key with the value that is used. Reading it gives an equal RunConfig."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @property
    def run_folder(self) -> Path:
        """Where the run writes."""
        return Path(self.run.folder) / self.model.label

    @property
    def num_iterations(self) -> int:
        """Batches of episodes in the whole run."""
        return self.training.num_epochs * self.training.iterations_per_epoch

    @property
    def groups_per_batch(self) -> int:
        """Tasks per iteration."""
        return self.rollout.episodes_per_batch // self.training.group_size

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, where the cosine schedule ends; fewer are taken if groups are dropped."""
        return num_optimizer_steps(
            num_epochs=self.training.num_epochs,
            iterations_per_epoch=self.training.iterations_per_epoch,
            episodes_per_batch=self.rollout.episodes_per_batch,
            batch_size=self.training.batch_size,
            update_epochs=self.training.update_epochs,
        )

    @property
    def evaluation_seeds(self) -> tuple[int, ...]:
        """The seeds of the evaluation's tasks."""
        seeds = self.evaluation.seeds
        return tuple(range(self.evaluation.instances or 0)) if seeds is None else parse_seeds(seeds)

    @property
    def episode_limits(self) -> EpisodeLimits:
        return EpisodeLimits(
            max_turns=self.rollout.max_turns,
            max_output_tokens=self.rollout.max_output_tokens,
            max_model_len=self.rollout.max_model_len,
            step_timeout_seconds=self.limits.step_timeout_seconds,
            episode_timeout_seconds=self.limits.episode_timeout_seconds,
        )

    @property
    def pool_limits(self) -> PoolLimits:
        return PoolLimits(
            max_concurrent_rollouts=self.rollout.max_concurrent_rollouts,
            max_attempts=self.limits.max_attempts,
            min_group_fraction=self.limits.min_group_fraction,
        )

    @property
    def update_settings(self) -> UpdateSettings:
        return UpdateSettings(
            minibatch_size=self.training.batch_size,
            num_epochs=self.training.update_epochs,
            max_tokens_per_microbatch=self.training.max_tokens_per_microbatch,
            scoring_chunk_tokens=self.training.scoring_chunk_tokens,
            max_nonfinite_steps=self.training.max_nonfinite_steps,
        )

    @property
    def optimizer_settings(self) -> OptimizerSettings:
        return OptimizerSettings(learning_rate=self.training.learning_rate, **self.optimizer.model_dump())

    @property
    def warmup_settings(self) -> SupervisedSettings | None:
        """How the demonstrations are learned; None: there is no warm-up."""
        if self.warmup is None:
            return None
        return SupervisedSettings(
            num_epochs=self.warmup.num_epochs,
            batch_size=self.warmup.batch_size,
            max_tokens_per_microbatch=self.training.max_tokens_per_microbatch,
            scoring_chunk_tokens=self.training.scoring_chunk_tokens,
            max_nonfinite_steps=self.training.max_nonfinite_steps,
        )

    @property
    def warmup_optimizer_settings(self) -> OptimizerSettings | None:
        """[optimizer] with the warm-up's own rate, held constant: its schedule is reinforcement's. None: no warm-up."""
        if self.warmup is None:
            return None
        same = self.optimizer.model_dump(include={"betas", "eps", "weight_decay", "max_grad_norm"})
        return OptimizerSettings(learning_rate=self.warmup.learning_rate, **same)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        return with_derived_defaults(values, _required_sections()) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        values = {f"{name}.{key}": value for name, section in self if section is not None for key, value in section}
        if problems := find_contradictions(values):
            raise ValueError("; ".join(f"{problem.key}: {problem.text}" for problem in problems))
        return self


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, with `section.key=value` texts going over it in order.

    A value is TOML (`7`, `true`, `[1, 2]`, `"text"`); what is not is taken as text: names and paths need no quotes.

    Raises:
        ConfigError: there is no such file, it is not TOML, or its content is wrong: then everything that is.
    """
    path = Path(path)
    values = _read_toml(path)
    overridden: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        problem = _apply_override(values, text, overridden)
        if problem is not None:
            problems.append(problem)

    def source_of(key: str) -> str:
        on_command_line = any(f"{key}.".startswith(f"{o}.") or f"{o}.".startswith(f"{key}.") for o in overridden)
        return "command line" if on_command_line else str(path)

    return _check(values, source_of, problems)


def _check(values: Mapping[str, Any], source_of: Callable[[str], str], known: Sequence[Problem]) -> RunConfig:
    """The valid configuration, or an error with the `known` problems and all others."""
    filled = {
        name: _as_tuples(section) for name, section in with_derived_defaults(values, _required_sections()).items()
    }
    problems = list(known)
    config = None
    try:
        config = RunConfig.model_validate(filled)
    except ValidationError as error:
        problems += find_problems(error, RunConfig, values)
        problems += find_contradictions(_valid_values(filled, {problem.key for problem in problems}))
    if config is None or problems:
        raise ConfigError(_report([f"{source_of(problem.key)}: {problem.key}: {problem.text}" for problem in problems]))
    return config


def _report(lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} problems in the configuration:\n  " + "\n  ".join(lines)


def _required_sections() -> list[str]:
    """Sections that always exist, so that their missing keys are reported one by one."""
    return [name for name, info in RunConfig.model_fields.items() if info.is_required()]


def _valid_values(values: Mapping[str, Any], wrong: set[str]) -> dict[str, Any]:
    """The values that are valid by themselves, given or by default, by dotted key."""
    valid = {}
    for name, info in RunConfig.model_fields.items():
        section = values.get(name)
        if name in wrong or not isinstance(section, Mapping) or not isinstance(info.annotation, type):
            continue
        for key, field in info.annotation.model_fields.items():
            is_wrong = any(f"{problem}.".startswith(f"{name}.{key}.") for problem in wrong)
            if not is_wrong and (key in section or not field.is_required()):
                valid[f"{name}.{key}"] = section.get(key, field.default)
    return valid


def _as_tuples(value: Any) -> Any:
    """Tables with tuples for lists: a strict tuple field takes no list, and TOML has nothing else."""
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        siblings = [str(path.parent / p.name) for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise ConfigError(f"{path}: there is no such file; {nearest_name(str(path), siblings)}") from None
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from error


def _apply_override(values: dict[str, Any], text: str, overridden: list[str]) -> Problem | None:
    """Put one `section.key=value` into `values` and its key into `overridden`, or say why not."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        overridden.append(text)
        return Problem(text, "expected section.key=value")
    key = match["key"]
    overridden.append(key)
    *above, name = key.split(".")
    table = values
    for part in above:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(key, f"{part} is not a table that could hold it, but {show(table)}")
    table[name] = _parse_value(match["value"].strip())
    return None


def _parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return parsed["value"] if list(parsed) == ["value"] else text
