"""A search's trials in Optuna: who proposes the next one, who is stopped, and where they are kept.

Optuna keeps them in a journal of JSON lines, so that a search can go on after whatever ended it. Called by `search.py`,
which runs the trials; the only module that imports optuna.
"""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.cli.search.settings import ParameterRange, PrunerSection, SamplerSection, SearchSettings
from gspo_gym.errors import MissingExtraError
from gspo_gym.seeding import child_seed

if TYPE_CHECKING:
    import optuna

_INTERRUPTED = "interrupted"


def require_optuna() -> Any:
    """The optuna package (Any: loaded only where a search runs).

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
        settings: what is searched.
        journal: the file that keeps the trials; made if it is not there.
    """

    def __init__(self, settings: SearchSettings, journal: Path) -> None:
        self._optuna = require_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)  # `search.py` says what happens
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
        """Put trials that nobody runs any more back into the queue, as new ones with the same values; says how many.

        To be called before the first `ask`: afterwards a running trial is one of ours.
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
        """The next trial, with its values; None: all have been given out.

        Each draws from a generator of its own: one that all share would begin anew when a search goes on, and propose
        the first values again.
        """
        trials = self.trials()
        if sum(trial.state is not self._optuna.trial.TrialState.WAITING for trial in trials) >= (
            self._settings.search.num_trials
        ):
            return None
        seed = child_seed(self._settings.search.seed, "search", len(trials)) % 2**32
        self.study.sampler = _sampler(self._settings.sampler, seed)
        if self._settings.sampler.type == "grid":
            self._enqueue_next_of_grid()
        return self.study.ask(self._distributions)

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All trials that count, by number: not those that an interruption ended."""
        return [trial for trial in self.study.get_trials(deepcopy=False) if _INTERRUPTED not in trial.user_attrs]

    def twin_of(self, trial: optuna.Trial) -> optuna.trial.FrozenTrial | None:
        """An earlier trial with the same values that came to its end or was stopped as behind; None: there is none."""
        states = self._optuna.trial.TrialState
        return next(
            (
                other
                for other in self.trials()
                if other.number < trial.number
                and other.params == trial.params
                and other.state in (states.COMPLETE, states.PRUNED)
            ),
            None,
        )

    def values_of(self, trial: optuna.Trial | optuna.trial.FrozenTrial) -> dict[str, Any]:
        """A trial's values by configuration key (Any: as the configuration takes them)."""
        ranges = self._settings.parameters
        return {
            key: json.loads(value) if ranges[key].choices is not None else value for key, value in trial.params.items()
        }

    def _enqueue_next_of_grid(self) -> None:
        """The first combination that no trial has (Optuna's own grid sampler stops a loop that is not running here)."""
        ranges = self._settings.parameters
        axes = [[_stored(ranges[key], value) for value in ranges[key].all_values() or ()] for key in ranges]
        tried = [dict(trial.system_attrs.get("fixed_params", {})) | trial.params for trial in self.trials()]
        for combination in itertools.product(*axes):
            params = dict(zip(ranges, combination, strict=True))
            if params not in tried:
                self.study.enqueue_trial(params)
                return


def _stored(values: ParameterRange, value: Any) -> Any:
    """As Optuna holds it: a choice may be anything, so it is held as JSON (Any: a configuration's value)."""
    return json.dumps(value) if values.choices is not None else value


def _distribution(values: ParameterRange) -> optuna.distributions.BaseDistribution:
    distributions = require_optuna().distributions
    made: optuna.distributions.BaseDistribution
    high = values.high if values.step is None else (values.all_values() or ())[-1]  # Optuna warns of a part of a step
    if values.choices is not None:
        made = distributions.CategoricalDistribution([json.dumps(choice) for choice in values.choices])
    elif values.is_integer:
        made = distributions.IntDistribution(values.low, high, log=values.log, step=values.step or 1)
    else:
        made = distributions.FloatDistribution(values.low, high, log=values.log, step=values.step)
    return made


def _sampler(settings: SamplerSection, seed: int) -> optuna.samplers.BaseSampler:
    samplers = require_optuna().samplers
    made: optuna.samplers.BaseSampler
    if settings.type == "evolution":
        made = samplers.NSGAIISampler(
            population_size=8 if settings.population_size is None else settings.population_size,
            crossover_prob=0.9 if settings.crossover_prob is None else settings.crossover_prob,
            mutation_prob=settings.mutation_prob,
            seed=seed,
        )
    elif settings.type == "tpe":
        startup = 10 if settings.num_startup_trials is None else settings.num_startup_trials
        made = samplers.TPESampler(n_startup_trials=startup, constant_liar=True, seed=seed)
    else:  # a grid is enqueued, and draws nothing
        made = samplers.RandomSampler(seed=seed)
    return made


def _pruner(settings: PrunerSection) -> optuna.pruners.BasePruner:
    pruners = require_optuna().pruners
    made: optuna.pruners.BasePruner
    if settings.type == "median":
        made = pruners.MedianPruner(
            n_startup_trials=settings.num_startup_trials or 4, n_warmup_steps=settings.num_warmup_iterations or 0
        )
    elif settings.type == "successive_halving":
        made = pruners.SuccessiveHalvingPruner(
            min_resource=settings.min_iterations or 1, reduction_factor=settings.reduction_factor or 3
        )
    else:
        made = pruners.NopPruner()
    return made
