"""SEARCH.toml is read strictly: everything that is wrong is told at once, with the key and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.search.study import FOREIGN, ParameterRange, load_search
from gspo_gym.errors import ConfigError

ROOT = Path(__file__).parents[4]
GOOD = """
[search]
base = "{root}/configs/quickstart.toml"
label = "s"
num_trials = 4
"""
RATE = "[parameters]\ntraining.learning_rate = { low = 1e-4, high = 1e-2, log = true }\n"


def load(folder: Path, text: str, search: str = "") -> Any:
    path = folder / "search.toml"
    path.write_text(GOOD.replace("{root}", str(ROOT)) + search + "\n" + text)
    return load_search(path)


def problem(folder: Path, text: str, search: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, search)
    return str(caught.value)


def test_the_example_is_a_search_over_a_configuration_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = load_search("examples/search.toml")
    assert settings.search.base == "configs/dataset.toml"
    assert set(settings.parameters) == {"training.learning_rate", "training.group_size", "loss.clip_high"}


def test_parameters_may_be_nested_or_dotted_and_a_key_may_be_called_low(tmp_path: Path) -> None:
    nested = "[parameters.training]\nlearning_rate = { low = 1e-4, high = 1e-2 }\n"
    dotted = '[parameters]\n"training.learning_rate" = { low = 1e-4, high = 1e-2 }\n'
    assert load(tmp_path, nested).parameters == load(tmp_path, dotted).parameters
    low = load(tmp_path, "[parameters.loss]\nclip_low.choices = [1e-4, 3e-4]\n").parameters
    assert low["loss.clip_low"].choices == (1e-4, 3e-4)


def test_what_is_written_out_reads_the_same(tmp_path: Path) -> None:
    modules = 'training.lora.target_modules = { choices = [["q_proj", "v_proj"], "all-linear"] }'
    settings = load(tmp_path, f'[sampler]\ntype = "tpe"\n{RATE}{modules}', 'overrides = ["model.trainer_mode=lora"]')
    path = tmp_path / "again.toml"
    path.write_text(settings.to_toml())
    assert load_search(path) == settings


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = '[sampler]\ntype = "evolve"\n[pruner]\ntpe = 1\n[parameters]\nloss.clip_low = { low = 2, hihg = 3 }\n'
    said = problem(tmp_path, text, "num_trails = 3\nmax_parallel = 0")
    for part in (
        "5 problems:",
        "search.num_trails: unknown key; did you mean 'num_trials'?",
        "search.max_parallel: expected an integer > 0, got 0",
        'sampler.type: expected "evolution", "tpe", "random" or "grid", got "evolve"',
        "pruner.tpe: unknown key; did you mean 'type'?",
        "parameters.loss.clip_low.hihg: unknown key; did you mean 'high'?",
    ):
        assert part in said


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_others_are_refused_with_ours(tmp_path: Path, name: str) -> None:
    assert f"unknown key: {FOREIGN[name]}" in problem(tmp_path, f"[sampler]\n{name} = 2\n{RATE}")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ('[sampler]\ntype = "tpe"\npopulation_size = 4', "population_size belongs to type 'evolution'"),
        ('[sampler]\ntype = "random"\nmutation_prob = 0.1', "has no effect with 'random'; remove it"),
        ('[sampler]\ntype = "grid"\ncrossover_prob = 0.1', "crossover_prob belongs to type 'evolution'"),
        ("[sampler]\nnum_startup_trials = 1", "num_startup_trials belongs to type 'tpe'"),
        ("[pruner]\nmin_iterations = 1", "min_iterations belongs to type 'successive_halving'"),
        ('[pruner]\ntype = "median"\nreduction_factor = 2', "reduction_factor belongs to type 'successive_halving'"),
        ('[pruner]\ntype = "successive_halving"\nnum_warmup_iterations = 2', "belongs to type 'median'"),
    ],
)
def test_a_key_that_would_have_no_effect_is_an_error(tmp_path: Path, section: str, message: str) -> None:
    assert message in problem(tmp_path, f"{section}\n{RATE}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{ low = 1.0, high = 1.0 }", "expected choices, or low < high, got low 1.0 and high 1.0"),
        ("{ low = 1.0 }", "expected choices, or low < high, got low 1.0 and high None"),
        ("{ low = 0.0, high = 1.0, log = true }", "log = true: expected low > 0 and no step"),
        ("{ low = 1, high = 9, step = 0.5 }", "expected an integer step between integers, got 0.5"),
        ("{ choices = [1] }", "expected at least two different choices, got [1]"),
        ("{ choices = [1, 1] }", "expected at least two different choices"),
        ("{ choices = [1, 2], log = true }", "expected choices alone, or low and high"),
        ("0.1", "parameters.training: expected low and high, or choices, got {'learning_rate': 0.1}"),
        ("{}", "expected low and high, or choices, got {}"),
    ],
)
def test_a_range_that_is_none_is_refused(tmp_path: Path, values: str, message: str) -> None:
    said = problem(tmp_path, f"[parameters]\ntraining.learning_rate = {values}")
    assert message in said
    assert "parameters.training" in said


def test_values_that_the_configuration_does_not_take_are_told_before_anything_runs(tmp_path: Path) -> None:
    text = (
        "[parameters]\ntraining.learning_rat = { low = 0.1, high = 0.2 }\nloss.clip_low = { low = 0.1, high = 1.5 }\n"
    )
    said = problem(tmp_path, text + "training.group_size = { choices = [8, 7] }")
    assert "parameters.training.learning_rat = 0.1, with all else as in the base:" in said
    assert "parameters.loss.clip_low = 1.5, with all else as in the base:" in said
    assert "parameters.training.group_size = 7, with all else as in the base:" in said
    assert "group_size = 8," not in said


@pytest.mark.parametrize("key", ["run.folder", "model.label", "evaluation.seeds"])
def test_what_would_make_trials_incomparable_cannot_be_varied(tmp_path: Path, key: str) -> None:
    said = problem(tmp_path, f'[parameters]\n{key} = {{ choices = ["a", "b"] }}')
    assert f"parameters.{key}: cannot be varied" in said


def test_a_grid_needs_countable_values_and_no_more_trials_than_there_are(tmp_path: Path) -> None:
    grid = '[sampler]\ntype = "grid"\n'
    assert "a grid needs choices, integers or a step" in problem(tmp_path, grid + RATE)
    small = grid + "[parameters]\ntraining.group_size = { choices = [8, 16] }\n"
    assert "search.num_trials: expected at most 2, the whole grid, got 4" in problem(tmp_path, small)


def test_without_parameters_there_is_nothing_to_search(tmp_path: Path) -> None:
    assert "parameters: expected at least one key to vary, got none" in problem(tmp_path, "")


def test_a_base_that_is_wrong_is_told_with_its_own_errors(tmp_path: Path) -> None:
    said = problem(tmp_path, RATE, 'overrides = ["training.group_size=0"]')
    assert "search.base: " in said
    assert "training.group_size" in said


def test_a_file_that_is_not_there_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: there is no such file"):
        load_search(tmp_path / "nothing.toml")
    assert "cannot be read as TOML" in problem(tmp_path, "[sampler\n")


@pytest.mark.parametrize("label", ["", "../up", "a b", "-a"])
def test_a_label_that_is_no_file_name_is_refused(tmp_path: Path, label: str) -> None:
    path = tmp_path / "search.toml"
    path.write_text(GOOD.replace("{root}", str(ROOT)).replace('"s"', f'"{label}"') + RATE)
    with pytest.raises(ConfigError, match=r"search\.label"):
        load_search(path)


def test_the_values_of_a_range_end_where_it_says() -> None:
    assert ParameterRange(low=1, high=6, step=2).all_values() == (1, 3, 5)
    assert ParameterRange(low=2, high=4).all_values() == (2, 3, 4)
    steps = ParameterRange(low=0.0, high=0.3, step=0.1).all_values()
    assert steps == pytest.approx((0.0, 0.1, 0.2, 0.3))
    assert ParameterRange(low=0.0, high=0.3).all_values() is None
