"""A search: its file SEARCH.toml, and its trials in Optuna (proposal, pruning, a journal to go on from).

The file is read strictly; nothing here imports torch. The base is an ordinary configuration file. [parameters] names
keys of it and the values to try:

    [parameters]
    training.learning_rate = { low = 1e-4, high = 1e-2, log = true }
    training.group_size = { choices = [4, 8, 16] }

AgileRL 2.7's population training corresponds to the sampler "evolution", with these differences:

| AgileRL 2.7 | here |
|---|---|
| hp_config, RLParameter(min, max): lr, beta, clip_coef, ... | [parameters] low, high or choices, of any key |
| RLParameter(grow_factor, shrink_factor) | none: a mutated value is drawn anew from its range |
| population size | sampler.population_size |
| TournamentSelection(tournament_size, elitism) | tournaments of 2 among the best so far; elitism always |
| Mutations(rl_hp, no_mutation) | sampler.mutation_prob, for each parameter; and crossover, which it lacks |
| Mutations(architecture, parameters, activation) | none (its language-model agents have none either) |
| evo_steps: selection every so many steps | selection between whole runs |
| a child goes on with its parent's weights | no: every trial starts from the base, because a run must be repeatable |
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from gspo_gym.base.files import flat_items, read_file
from gspo_gym.base.settings import Settings
from gspo_gym.config.run_config import load_config
from gspo_gym.config.sections import is_safe_label
from gspo_gym.config.words import find_problems
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.seeding import child_seed

if TYPE_CHECKING:
    import optuna

_INTERRUPTED = "interrupted"


def require_optuna() -> Any:
    """Import and return optuna.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError as error:
        raise MissingExtraError("a search needs Optuna: pip install 'gspo-gym[search]'") from error


class SearchStudy:
    """The trials of one search.

    Args:
        settings: the search.
        journal: the file that keeps the trials; created if missing.
    """

    def __init__(self, settings: SearchSettings, journal: Path) -> None:
        self._optuna = require_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)  # `cli/search/command.py` says what happens
        self._settings = settings
        self._distributions = {key: _distribution(values) for key, values in settings.parameters.items()}
        backend = self._optuna.storages.journal.JournalFileBackend(str(journal))
        self._storage = self._optuna.storages.JournalStorage(backend)
        self.study: optuna.Study = self._optuna.create_study(
            storage=self._storage,
            study_name=settings.search.label,
            direction="maximize",
            pruner=_pruner(settings.pruner),
            load_if_exists=True,
        )

    def restart_interrupted(self) -> int:
        """Queue the trials of an interrupted search again, as new ones with the same values; return their number.

        Call it before the first `ask`: afterwards this process has running trials, too.
        """
        states = self._optuna.trial.TrialState
        running = self.study.get_trials(deepcopy=False, states=[states.RUNNING])
        study_id = self._storage.get_study_id_from_name(self._settings.search.label)
        for trial in running:
            self.study.enqueue_trial(trial.params)
            trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
            self._storage.set_trial_user_attr(trial_id, _INTERRUPTED, True)
            self.study.tell(trial.number, state=states.FAIL)
        return len(running)

    def ask(self) -> optuna.Trial | None:
        """Return the next trial with its values, or None when all have been given out."""
        trials = self.trials()
        if sum(trial.state is not self._optuna.trial.TrialState.WAITING for trial in trials) >= (
            self._settings.search.num_trials
        ):
            return None
        # A seed per trial: one generator would begin anew when a search goes on, and propose the first values again.
        seed = child_seed(self._settings.search.seed, "search", len(trials)) % 2**32
        self.study.sampler = _sampler(self._settings.sampler, seed)
        # Optuna's own grid sampler expects to run the loop.
        if self._settings.sampler.type == "grid":
            self._enqueue_next_of_grid()
        return self.study.ask(self._distributions)

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return all trials by number, except the interrupted ones."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if _INTERRUPTED not in trial.user_attrs]

    def twin_of(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial | None:
        """Return an earlier trial with the same values that finished or was pruned, or None."""
        states = self._optuna.trial.TrialState
        return next(
            (
                earlier_trial
                for earlier_trial in self.trials()
                if earlier_trial.number < trial.number
                and earlier_trial.params == trial.params
                and earlier_trial.state in (states.COMPLETE, states.PRUNED)
            ),
            None,
        )

    def values_of(self, trial: optuna.Trial | optuna.trial.FrozenTrial) -> dict[str, Any]:
        """Return a trial's values by configuration key."""
        ranges = self._settings.parameters
        return {
            key: json.loads(value) if ranges[key].choices is not None else value for key, value in trial.params.items()
        }

    def _enqueue_next_of_grid(self) -> None:
        """Queue the first combination that no trial has tried."""
        ranges = self._settings.parameters
        axes = [[_optuna_value(ranges[key], value) for value in ranges[key].all_values() or ()] for key in ranges]
        tried_params = [dict(trial.system_attrs.get("fixed_params", {})) | trial.params for trial in self.trials()]
        for combination in itertools.product(*axes):
            params = dict(zip(ranges, combination, strict=True))
            if params not in tried_params:
                self.study.enqueue_trial(params)
                return


def _optuna_value(values: ParameterRange, value: Any) -> Any:
    """Return a value as Optuna holds it; a choice is held as JSON."""
    # Optuna takes only scalar choices; ours may be lists or tables.
    return json.dumps(value) if values.choices is not None else value


def _distribution(values: ParameterRange) -> optuna.distributions.BaseDistribution:
    distributions = require_optuna().distributions
    distribution: optuna.distributions.BaseDistribution
    high = values.high if values.step is None else (values.all_values() or ())[-1]  # Optuna warns of a part of a step
    if values.choices is not None:
        distribution = distributions.CategoricalDistribution([json.dumps(choice) for choice in values.choices])
    elif values.is_integer:
        distribution = distributions.IntDistribution(values.low, high, log=values.log, step=values.step or 1)
    else:
        distribution = distributions.FloatDistribution(values.low, high, log=values.log, step=values.step)
    return distribution


def _sampler(settings: SamplerSection, seed: int) -> optuna.samplers.BaseSampler:
    samplers = require_optuna().samplers
    sampler: optuna.samplers.BaseSampler
    if settings.type == "evolution":
        sampler = samplers.NSGAIISampler(
            population_size=8 if settings.population_size is None else settings.population_size,
            crossover_prob=0.9 if settings.crossover_prob is None else settings.crossover_prob,
            mutation_prob=settings.mutation_prob,
            seed=seed,
        )
    elif settings.type == "tpe":
        startup = 10 if settings.num_startup_trials is None else settings.num_startup_trials
        # constant_liar: without it, trials that run in parallel would all be drawn from the same place.
        sampler = samplers.TPESampler(n_startup_trials=startup, constant_liar=True, seed=seed)
    else:  # a grid is enqueued, and draws nothing
        sampler = samplers.RandomSampler(seed=seed)
    return sampler


def _pruner(settings: PrunerSection) -> optuna.pruners.BasePruner:
    pruners = require_optuna().pruners
    pruner: optuna.pruners.BasePruner
    if settings.type == "median":
        pruner = pruners.MedianPruner(
            n_startup_trials=settings.num_startup_trials or 4, n_warmup_steps=settings.num_warmup_iterations or 0
        )
    elif settings.type == "successive_halving":
        pruner = pruners.SuccessiveHalvingPruner(
            min_resource=settings.min_iterations or 1, reduction_factor=settings.reduction_factor or 3
        )
    else:
        pruner = pruners.NopPruner()
    return pruner


_GIVEN_BY_THE_SEARCH = ("run.folder", "model.label")
_FREE_ON_RESUME = ("num_trials", "max_parallel", "trial_timeout_seconds")

# What others call these things, by the last part of the name.
FOREIGN = MappingProxyType(
    {
        "pop_size": "AgileRL's name for sampler.population_size",
        "tournament_size": "AgileRL's; Optuna's genetic sampler has tournaments of 2, always; remove it",
        "elitism": "AgileRL's; here the best population_size trials so far are the parents, always; remove it",
        "hp_config": "AgileRL's name for [parameters]",
        "mutation": "AgileRL's; here sampler.mutation_prob, the chance that a parameter is drawn anew from its range",
        "rand_seed": "AgileRL's name for search.seed",
        "n_trials": "Optuna's name for search.num_trials",
        "n_jobs": "Optuna's name for search.max_parallel",
        "direction": "every metric here is to be as large as possible; remove it",
    }
)

Metric = Literal["final_success_rate", "best_success_rate", "final_mean_return", "best_mean_return"]


class SearchSection(Settings):
    """[search]: the base configuration, the number of runs, and the metric that ranks them."""

    base: str = Field(min_length=1, description="the configuration file that every trial starts from")
    overrides: tuple[str, ...] = Field(default=(), description='over the base in every trial: "section.key=value"')
    label: str = Field(description="the search's folder is FOLDER/LABEL: letters, digits, '.', '_' and '-', at most 64")
    folder: str = Field(default="runs", min_length=1, description="see label")
    seed: int = Field(default=0, ge=0, description="of the choice of values; a run's own seed is run.seed")
    num_trials: int = Field(gt=0, description="runs in all, pruned and failed ones included")
    max_parallel: int = Field(default=1, gt=0, description="runs at a time, each in a process of its own")
    metric: Metric = Field(
        default="final_success_rate",
        description="over the evaluation seeds, in the last evaluation or in the best one; larger is better",
    )
    trial_timeout_seconds: float | None = Field(
        default=None, gt=0, description="a run that takes longer is stopped and has failed; absent: none is"
    )

    @field_validator("label")
    @classmethod
    def _is_safe_file_name(cls, label: str) -> str:
        if not is_safe_label(label):
            raise ValueError(f"expected 1 to 64 letters, digits, '.', '_' or '-' (it names a folder), got {label!r}")
        return label


class SamplerSection(Settings):
    """[sampler]: the Optuna sampler that proposes values."""

    type: Literal["evolution", "tpe", "random", "grid"] = Field(
        default="evolution",
        description=(
            "evolution: NSGA-II with one objective (doi 10.1109/4235.996017): tournaments of 2 choose parents among "
            "the best so far, which are crossed and mutated; tpe: tree-structured Parzen estimator (NeurIPS 2011); "
            "random; grid: every combination once"
        ),
    )
    population_size: int | None = Field(
        default=None, ge=2, description="evolution: trials of a generation, at random in the first; 8 by default"
    )
    crossover_prob: float | None = Field(
        default=None, ge=0, le=1, description="evolution: a child has two parents and not one; 0.9 by default"
    )
    mutation_prob: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="evolution: a parameter is drawn anew from its range; 1 / number of parameters by default",
    )
    num_startup_trials: int | None = Field(
        default=None, ge=0, description="tpe: trials at random before it estimates; 10 by default"
    )

    @model_validator(mode="after")
    def _keys_belong(self) -> SamplerSection:
        owners = dict.fromkeys(("population_size", "crossover_prob", "mutation_prob"), "evolution")
        _require_owner(self, {**owners, "num_startup_trials": "tpe"}, self.type)
        return self


class PrunerSection(Settings):
    """[pruner]: the rule that stops runs early, by the search's metric at their evaluations."""

    type: Literal["none", "median", "successive_halving"] = Field(
        default="none",
        description=(
            "median: a run whose best evaluation is worse than the median of the others' at the same iteration (a run "
            "that was stopped is no parent in an evolution); "
            "successive_halving: all but the best 1 / reduction_factor at each rung (arXiv 1810.05934)"
        ),
    )
    num_startup_trials: int | None = Field(
        default=None, ge=1, description="median: complete trials before any is stopped; 4 by default"
    )
    num_warmup_iterations: int | None = Field(
        default=None, ge=0, description="median: iterations that every run may take; 0 by default"
    )
    min_iterations: int | None = Field(
        default=None, ge=1, description="successive_halving: iterations to the first rung; 1 by default"
    )
    reduction_factor: int | None = Field(
        default=None, ge=2, description="successive_halving: see type, and from rung to rung; 3 by default"
    )

    @model_validator(mode="after")
    def _keys_belong(self) -> PrunerSection:
        median = dict.fromkeys(("num_startup_trials", "num_warmup_iterations"), "median")
        halving = dict.fromkeys(("min_iterations", "reduction_factor"), "successive_halving")
        _require_owner(self, {**median, **halving}, self.type)
        return self


class ParameterRange(Settings):
    """The values to try: `choices`, or all from `low` to `high`, both included.

    Two integers are a range of integers, anything else one of floats (write 1.0 and not 1 for a float).
    """

    low: int | float | None = Field(default=None, description="smallest value")
    high: int | float | None = Field(default=None, description="largest value")
    log: bool = Field(default=False, description="every factor is as likely as any other, as for learning rates")
    step: int | float | None = Field(default=None, gt=0, description="low, low + step, low + 2 step, ...")
    choices: tuple[Any, ...] | None = Field(default=None, description="values of any type")  # any key may be varied

    @model_validator(mode="after")
    def _is_one_of_two_kinds(self) -> ParameterRange:
        if self.choices is not None:
            if self.log or any(value is not None for value in (self.low, self.high, self.step)):
                raise ValueError("expected choices alone, or low and high")
            if len(self.choices) < 2 or len(set(map(json.dumps, self.choices))) < len(self.choices):
                raise ValueError(f"expected at least two different choices, got {list(self.choices)}")
            return self
        if self.low is None or self.high is None or not self.low < self.high:
            raise ValueError(f"expected choices, or low < high, got low {self.low} and high {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"log = true: expected low > 0 and no step, got low {self.low} and step {self.step}")
        if self.is_integer and isinstance(self.step, float):
            raise ValueError(f"expected an integer step between integers, got {self.step}")
        return self

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def all_values(self) -> tuple[Any, ...] | None:
        """Return every value, for a grid; None if there are infinitely many."""
        if self.choices is not None:
            return self.choices
        assert self.low is not None and self.high is not None  # noqa: PT018 - checked above
        if self.step is None and not self.is_integer:
            return None
        step = self.step or 1
        count = math.floor((self.high - self.low) / step + 1e-9) + 1  # 1e-9: 0.3 / 0.1 is a little less than 3
        return tuple(min(self.low + index * step, self.high) for index in range(count))  # 0.1 + 2 * 0.1 > 0.3

    def extremes(self) -> tuple[Any, ...]:
        """Return values to try the configuration with: all choices, or both ends."""
        return (self.low, self.high) if self.choices is None else self.choices


class SearchSettings(Settings):
    """All settings of a search; `load_search` reads them from a file."""

    search: SearchSection
    sampler: SamplerSection = Field(default_factory=SamplerSection)
    pruner: PrunerSection = Field(default_factory=PrunerSection)
    parameters: dict[str, ParameterRange] = Field(default={}, description="configuration keys to vary")

    @property
    def search_folder(self) -> Path:
        return Path(self.search.folder) / self.search.label

    def to_toml(self) -> str:
        """Return the resolved settings as TOML that reads back equal."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


def load_search(path: str | Path) -> SearchSettings:
    """Read SEARCH.toml; check the base with every choice and both ends of every range, one at a time.

    Raises:
        ConfigError: lists everything that is wrong.
    """
    path = Path(path)
    values = read_file(path)
    ranges, problems = _ranges(values.pop("parameters", {}))
    settings = None
    try:
        settings = SearchSettings.model_validate({"search": {}, **_as_tuples(values), "parameters": ranges})
    except ValidationError as error:
        problems += [f"{key}: {text}" for key, text in _texts(error, values)]
    if settings is not None:
        problems += [] if problems else _contradictions(settings)
    if settings is None or problems:
        raise ConfigError(
            f"{path}: {problems[0]}"
            if len(problems) == 1
            else f"{path}: {len(problems)} problems:" + _problem_list(problems)
        )
    return settings


def require_same_search(began: SearchSettings, now: SearchSettings) -> None:
    """Check that a resumed search has the settings it began with, but for number of trials, parallel runs and timeout.

    Raises:
        ConfigError: names the keys that differ.
    """
    before, after = (dict(flat_items(settings.model_dump())) for settings in (began, now))
    free = [f"search.{key}" for key in _FREE_ON_RESUME]
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    if fixed_keys := [key for key in differing if key not in free]:
        changes = "; ".join(f"{key}: {before.get(key)!r} became {after.get(key)!r}" for key in fixed_keys)
        raise ConfigError(f"a resumed search must go on as it began, but {changes}. Start another search instead")


def as_override(key: str, value: Any) -> str:
    """Return `section.key=value` as a configuration reads it.

    >>> as_override("training.learning_rate", 1e-05), as_override("model.dtype", "float32")
    ('training.learning_rate=1e-05', 'model.dtype="float32"')
    """
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _contradictions(settings: SearchSettings) -> list[str]:
    """Return problems of settings that are valid one by one: with each other and with the base."""
    search, problems = settings.search, []
    if not settings.parameters:
        return ["parameters: expected at least one key to vary, got none"]
    for key, values in settings.parameters.items():
        if key in _GIVEN_BY_THE_SEARCH or key.startswith("evaluation."):
            problems.append(f"parameters.{key}: cannot be varied: trials would overwrite or not compare to each other")
        if settings.sampler.type == "grid" and values.all_values() is None:
            problems.append(f'parameters.{key}: a grid needs choices, integers or a step (sampler.type = "grid")')
    if not problems and settings.sampler.type == "grid":
        size = math.prod(len(values.all_values() or ()) for values in settings.parameters.values())
        if search.num_trials > size:
            problems.append(f"search.num_trials: expected at most {size}, the whole grid, got {search.num_trials}")
    return problems or _base_problems(settings)


def _base_problems(settings: SearchSettings) -> list[str]:
    search = settings.search
    try:
        load_config(search.base, search.overrides)
    except ConfigError as error:
        return [f"search.base: {error}"]
    problems = []
    for key, values in settings.parameters.items():
        for value in values.extremes():
            try:
                load_config(search.base, [*search.overrides, as_override(key, value)])
            except ConfigError as error:
                problems.append(f"parameters.{key} = {value!r}, with all else as in the base: {error}")
    return problems


def _require_owner(section: Settings, owners: Mapping[str, str], type_name: str) -> None:
    for key, owner in owners.items():
        if getattr(section, key) is not None and owner != type_name:
            raise ValueError(f"{key} belongs to type {owner!r} and has no effect with {type_name!r}; remove it")


def _ranges(values: Any) -> tuple[dict[str, ParameterRange], list[str]]:
    """Return the ranges by dotted key, for any nesting, and their problems."""
    ranges, problems = {}, []
    for key, table in _leaves(values):
        if not isinstance(table, dict) or not set(table) & set(ParameterRange.model_fields):
            problems.append(f"parameters.{key}: expected low and high, or choices, got {table!r}")
            continue
        try:
            ranges[key] = ParameterRange.model_validate(_as_tuples(table))
        except ValidationError as error:
            problems += [f"parameters.{'.'.join(filter(None, (key, at)))}: {text}" for at, text in _texts(error, table)]
    return ranges, problems


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each range with its dotted key: a table without a table in it is a range, any other is a section."""
    if not isinstance(values, dict) or (prefix and not any(isinstance(value, dict) for value in values.values())):
        yield prefix, values
        return
    for name, value in values.items():
        yield from _leaves(value, f"{prefix}.{name}" if prefix else name)


def _texts(error: ValidationError, values: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, problem); the key is empty for a problem of the whole table."""
    model = SearchSettings if error.title == SearchSettings.__name__ else ParameterRange
    for problem in find_problems(error, model, values if isinstance(values, Mapping) else {}):
        name = problem.key.rpartition(".")[2]
        text = f"unknown key: {FOREIGN[name]}" if name in FOREIGN else problem.text  # none is a key here
        yield problem.key, text if model is SearchSettings else text.replace("unknown section", "unknown key")
    for detail in error.errors(include_url=False):
        if not detail["loc"]:
            yield "", str(detail["ctx"]["error"]) if "ctx" in detail else f"expected a table, got {values!r}"


def _as_tuples(value: Any) -> Any:
    """Replace lists by tuples."""
    # TOML has only lists, and a strict tuple field takes none.
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value


def _problem_list(problems: Sequence[str]) -> str:
    return "".join(f"\n  {problem}" for problem in problems)
