"""Which values the samplers propose and whom the pruners stop: each setting changes what Optuna does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.search.study import (
    ParameterRange,
    PrunerSection,
    SamplerSection,
    SearchSection,
    SearchSettings,
    SearchStudy,
)

XY = {"x": ParameterRange(low=0.0, high=1.0), "y": ParameterRange(low=0.0, high=1.0)}


def settings(
    sampler: dict[str, Any], *, parameters: Any = XY, pruner: Any = None, num_trials: int = 20, seed: int = 0
) -> SearchSettings:
    return SearchSettings(
        search=SearchSection(base="base.toml", label="s", num_trials=num_trials, seed=seed),
        sampler=SamplerSection(**sampler),
        pruner=PrunerSection(**(pruner or {})),
        parameters=parameters,
    )


def played(folder: Path, given: SearchSettings) -> list[dict[str, Any]]:
    """The values of all trials, whose score is the sum of their numbers."""
    study = SearchStudy(given, folder / "journal.log")
    values = []
    while (trial := study.ask()) is not None:
        values.append(study.values_of(trial))
        study.study.tell(trial, sum(value for value in values[-1].values() if isinstance(value, int | float)))
    return values


def test_the_same_seed_proposes_the_same_values_and_another_one_others(tmp_path: Path) -> None:
    runs = []
    for number, seed in enumerate((0, 0, 1)):
        (tmp_path / str(number)).mkdir()
        runs.append(played(tmp_path / str(number), settings({"type": "evolution", "population_size": 4}, seed=seed)))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]
    assert len(runs[0]) == 20


def test_a_search_that_goes_on_proposes_what_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = played(tmp_path / "whole", settings({"type": "tpe", "num_startup_trials": 3}, num_trials=8))
    parts = played(tmp_path, settings({"type": "tpe", "num_startup_trials": 3}, num_trials=5))
    parts += played(tmp_path, settings({"type": "tpe", "num_startup_trials": 3}, num_trials=8))
    assert parts == whole


def test_without_mutation_and_crossover_every_child_is_one_of_the_best_before_it(tmp_path: Path) -> None:
    sampler = {"type": "evolution", "population_size": 5, "crossover_prob": 0.0, "mutation_prob": 0.0}
    values = played(tmp_path, settings(sampler))
    assert len({value["x"] for value in values[:5]}) == 5  # the first generation is random
    assert all(value in values[:5] for value in values[5:])


def test_crossover_alone_mixes_the_parents_values(tmp_path: Path) -> None:
    sampler = {"type": "evolution", "population_size": 5, "crossover_prob": 1.0, "mutation_prob": 0.0}
    values = played(tmp_path, settings(sampler))
    xs, ys = ([value[name] for value in values[:5]] for name in "xy")
    # untransforming may move the last digit of a parent's value
    assert all(any(abs(value["x"] - x) < 1e-12 for x in xs) for value in values[5:])
    assert all(any(abs(value["y"] - y) < 1e-12 for y in ys) for value in values[5:])
    assert any(value not in values[:5] for value in values[5:])


def test_mutation_draws_a_value_anew(tmp_path: Path) -> None:
    sampler = {"type": "evolution", "population_size": 5, "mutation_prob": 1.0}
    values = played(tmp_path, settings(sampler))
    assert len({value["x"] for value in values}) == 20


def test_evolution_prefers_what_scored_well(tmp_path: Path) -> None:
    values = played(tmp_path, settings({"type": "evolution", "population_size": 5}, num_trials=40))
    first, last = (sum(value["x"] + value["y"] for value in part) / len(part) for part in (values[:5], values[-10:]))
    assert last > first


def test_tpe_draws_at_random_until_it_has_seen_enough(tmp_path: Path) -> None:
    runs = {}
    for name, sampler in {
        "random": {"type": "random"},
        "late": {"type": "tpe", "num_startup_trials": 20},
        "early": {"type": "tpe", "num_startup_trials": 5},
    }.items():
        (tmp_path / name).mkdir()
        runs[name] = played(tmp_path / name, settings(sampler))
    assert runs["late"] == runs["random"]
    assert runs["early"][:5] == runs["random"][:5]
    assert runs["early"] != runs["random"]


def test_a_grid_tries_every_combination_once(tmp_path: Path) -> None:
    parameters = {
        "a": ParameterRange(choices=(("q", "k"), "all")),
        "b": ParameterRange(low=1, high=6, step=2),
        "c": ParameterRange(low=0.1, high=0.3, step=0.1),
    }
    values = played(tmp_path, settings({"type": "grid"}, parameters=parameters, num_trials=18))
    expected = [(a, b, c) for a in (["q", "k"], "all") for b in (1, 3, 5) for c in (0.1, 0.2, 0.3)]
    assert [tuple(value.values()) for value in values] == expected


def test_ranges_keep_their_type_their_ends_and_their_steps(tmp_path: Path) -> None:
    parameters = {
        "rate": ParameterRange(low=1e-5, high=1e-1, log=True),
        "size": ParameterRange(low=2, high=10, step=4),
        "flag": ParameterRange(choices=(True, False, None)),
    }
    values = played(tmp_path, settings({"type": "random"}, parameters=parameters, num_trials=60))
    assert {value["size"] for value in values} == {2, 6, 10}
    assert {value["flag"] for value in values} == {True, False, None}
    below = sum(value["rate"] < 1e-3 for value in values)
    # 1e-3 is the middle of the logarithms: Binomial(60, 1/2), standard deviation 3.87; five deviations of slack
    assert abs(below - 30) < 5 * 3.87


def finish(study: SearchStudy, *values: float) -> None:
    trial = study.ask()
    assert trial is not None
    for number, value in enumerate(values, start=1):
        trial.report(value, 10 * number)
        trial.should_prune()  # successive halving counts who was asked about
    study.study.tell(trial, values[-1])


def stopped_at(study: SearchStudy, *values: float) -> int | None:
    """The iteration at which a run with these evaluations is stopped."""
    trial = study.ask()
    assert trial is not None
    for number, value in enumerate(values, start=1):
        trial.report(value, 10 * number)
        if trial.should_prune():
            return 10 * number
    return None


@pytest.mark.parametrize(
    ("pruner", "expected"),
    [
        ({"type": "none"}, None),
        ({"type": "median", "num_startup_trials": 2}, 10),
        ({"type": "median", "num_startup_trials": 3}, None),  # there are two
        ({"type": "median", "num_startup_trials": 2, "num_warmup_iterations": 20}, 20),
        ({"type": "successive_halving", "min_iterations": 10, "reduction_factor": 2}, 10),
        ({"type": "successive_halving", "min_iterations": 20, "reduction_factor": 2}, 20),
    ],
)
def test_a_run_that_is_behind_is_stopped_when_the_pruner_says(
    tmp_path: Path, pruner: Any, expected: int | None
) -> None:
    study = SearchStudy(settings({"type": "random"}, pruner=pruner), tmp_path / "journal.log")
    finish(study, 0.5, 0.6, 0.7)
    finish(study, 0.6, 0.7, 0.8)
    assert stopped_at(study, 0.1, 0.1, 0.1) == expected


@pytest.mark.parametrize(("factor", "expected"), [(2, 20), (3, 30)])
def test_the_next_rung_is_the_reduction_factor_times_the_last(tmp_path: Path, factor: int, expected: int) -> None:
    pruner = {"type": "successive_halving", "min_iterations": 10, "reduction_factor": factor}
    study = SearchStudy(settings({"type": "random"}, pruner=pruner), tmp_path / "journal.log")
    finish(study, 0.5, 0.6, 0.7)
    finish(study, 0.6, 0.7, 0.8)
    assert stopped_at(study, 0.9, 0.1, 0.1) == expected  # the best of three at the first rung
