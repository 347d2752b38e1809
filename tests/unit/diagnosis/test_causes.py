"""The doctor's ranking: faults planted one at a time in a good run, and which cause it names first.

The runs are recorded: `tests/support/doctor_faults.py` says which overrides of the quickstart made each, and makes them
again. The slow stage plays a few of them anew.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from doctor_faults import BASE, FAULTS, FOLDER, GOOD, ROOT, Fault, load, play

from gspo_gym.diagnosis import learning as causes
from gspo_gym.diagnosis.alarms import ALARMS
from gspo_gym.diagnosis.findings import CHECKS, CONSEQUENCES, diagnose, findings_of
from gspo_gym.diagnosis.view import RunView


def is_found(run: RunView, fault: Fault) -> bool:
    found = [(finding.check, finding.key) for finding in diagnose(run)]
    return (fault.cause, fault.key) in (found[:1] if fault.is_alone else found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_comes_first(name: str) -> None:
    run = load(name)
    assert is_found(run, FAULTS[name]), [(finding.check, finding.key) for finding in diagnose(run)]


# Planted in other tests, where no small run has them: the finding is the alarm's own text.
ELSEWHERE = {
    "logprobs_disagree": "tests/unit/run/test_engine_disagreement.py",
    "failures_follow_actions": "tests/unit/run/test_run.py",
    "apps_lose_attempts": "tests/fault/test_kept_against_played.py",
    "returns_are_selected": "tests/unit/config/build/test_apps.py",
    "judge_drifted": "tests/unit/judge/test_gold.py",
    "gold_fails": "tests/unit/judge/test_gold.py",
    "teacher_is_worse": "tests/unit/learning/test_feedback_teacher.py",
    "feedback_says_the_answer": "tests/unit/run/test_feedback.py",
    "sink_failed": "tests/unit/run/test_sinks.py",
    "answers_do_not_parse": "tests/unit/diagnosis/test_doctor.py",
    "tools_fail": "tests/unit/diagnosis/test_doctor.py",
}


def test_every_finding_has_a_planted_fault() -> None:
    names = {check.__name__ for check in (*causes.CAUSES, *CHECKS)} - {"alarms_sounded"}
    names |= {finding.check for finding in ALARMS.values()}
    assert {fault.cause for fault in FAULTS.values()} | set(ELSEWHERE) == names
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("name", GOOD)
def test_a_good_run_has_no_finding(name: str) -> None:
    assert diagnose(load(name)) == []


@pytest.mark.parametrize("name", [*GOOD, *FAULTS])
def test_a_recorded_run_is_the_one_that_the_script_would_make(name: str) -> None:
    overrides = GOOD[name] if name in GOOD else FAULTS[name].overrides
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    assert recorded["made_by"][1:] == [*BASE, *overrides]
    for override in overrides:
        key, _, value = override.partition("=")
        table = recorded["config"]
        for name_of_table in key.split("."):
            table = table[name_of_table]
        expected = tomllib.loads(f"x = {value}")["x"]
        assert (table | expected if isinstance(expected, dict) else expected) == table  # a table has defaults beside


@pytest.mark.parametrize("name", FAULTS)
def test_no_advice_is_what_is_there_already(name: str) -> None:
    run = load(name)
    for finding in diagnose(run):
        now = run.setting(finding.key)
        texts = {str(now), f"{now:g}" if isinstance(now, float) else str(now)}
        assert not any(f"set it to {text}," in finding.suggestion + "," for text in texts)


def test_a_learning_rate_that_explodes_is_never_told_to_rise() -> None:
    (finding, *_) = diagnose(load("lr_1"))
    # log s varied by 8.66 nats at a rate of 1; ten clip ranges are 0.03, so 0.03 / 8.66 = 0.0035
    assert "lower it to 0.003" in finding.suggestion
    assert "the ratio exploded in step 1" in finding.evidence


def test_a_cause_hides_what_follows_from_it_and_nothing_else() -> None:
    recorded = load("lr_1")
    silent = {finding.check for finding in diagnose(recorded)}
    assert not silent & CONSEQUENCES
    run = RunView(
        config=recorded.config,
        metrics=recorded.metrics,
        events=[{"step": 1, "kind": "sink_failed", "data": {"sink": "wandb", "error": "gone"}}],
        outcomes={"terminated": 60, "env_error": 40},
    )
    assert [finding.check for finding in diagnose(run)] == ["steps_too_large", "infrastructure_fails", "sink_failed"]


def test_every_consequence_is_a_check() -> None:
    names = {check.__name__ for check in CHECKS}
    assert names >= CONSEQUENCES


@pytest.mark.parametrize("check", causes.CAUSES)
def test_a_cause_is_silent_about_metrics_that_the_run_has_not(check: Any) -> None:
    assert check(RunView(config={})) is None
    assert check(RunView(config={}, metrics=[{"step": 1}])) is None


def steps(metrics: dict[str, float], settings: dict[str, Any]) -> RunView:
    config: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    return RunView(config=config, metrics=[{"step": step, **metrics} for step in range(1, 41)])


# check, metrics and settings of which it is silent, and the one metric or setting that is changed so that it speaks
ALIKE = {"batch/constant_group_fraction": 1.0}
SHRINKING = {"optimizer.weight_decay": 0.49, "training.learning_rate": 0.01}
THRESHOLDS: list[tuple[Any, dict[str, float], dict[str, Any], dict[str, Any]]] = [
    (
        causes.sampling_is_greedy,
        {"batch/constant_group_fraction": 0.89},
        {"rollout.top_k": 1},
        {"batch/constant_group_fraction": 0.91},
    ),
    (causes.sampling_is_greedy, ALIKE, {"rollout.top_p": 0.25}, {"rollout.top_p": 0.15}),
    (causes.sampling_is_greedy, ALIKE, {"rollout.min_p": 0.75}, {"rollout.min_p": 0.85}),
    (causes.sampling_is_greedy, ALIKE, {"rollout.temperature": 0.25}, {"rollout.temperature": 0.15}),
    (causes.sampling_is_uniform, {"policy/entropy": 2.9}, {"rollout.temperature": 5.0}, {"policy/entropy": 3.1}),
    (causes.sampling_is_uniform, {"policy/entropy": 5.0}, {"rollout.temperature": 2.0}, {"rollout.temperature": 2.1}),
    # 0.01 x 0.49 x 40 = 0.196 of log(weight), and 0.204
    (causes.weights_decay, {"optim/num_steps": 1}, SHRINKING, {"optimizer.weight_decay": 0.51}),
    (
        causes.entropy_bonus_dominates,
        {"policy/entropy": 2.0, "advantage/std": 1.0},
        {"loss.entropy_coef": 0.49},
        {"loss.entropy_coef": 0.51},
    ),
    # sqrt(2 x 0.001) = 0.0447: 22.3 times that is 0.997, and 22.4 times 1.0018
    (causes.kl_term_dominates, {"advantage/std": 1.0}, {"loss.kl_coef": 22.3}, {"loss.kl_coef": 22.4}),
    (causes.kl_term_dominates, {"advantage/std": 1.0}, {"rewards.kl_coef": 22.3}, {"rewards.kl_coef": 22.4}),
    (causes.steps_too_large, {"ratio/log_std": 0.49, "kl/old_k3": 0.49}, {}, {"ratio/log_std": 0.51}),
    (causes.steps_too_large, {"ratio/log_std": 0.49, "kl/old_k3": 0.49}, {}, {"kl/old_k3": 0.51}),
    (causes.clip_is_shut, {"ratio/log_std": 0.1}, {"loss.clip_low": 0.0021}, {"loss.clip_low": 0.0019}),
    (causes.steps_too_small, {"ratio/is_constant": 0, "optim/num_steps": 4}, {}, {"ratio/is_constant": 1}),
    (causes.steps_too_small, {"ratio/is_constant": 1, "optim/num_steps": 1}, {}, {"optim/num_steps": 2}),
]


@pytest.mark.parametrize(("check", "metrics", "settings", "change"), THRESHOLDS)
def test_each_cause_is_silent_below_its_threshold_and_speaks_above(
    check: Any, metrics: dict[str, float], settings: dict[str, Any], change: dict[str, Any]
) -> None:
    assert check(steps(metrics, settings)) is None
    changed_metrics = {name: value for name, value in change.items() if "/" in name}
    changed_settings = {key: value for key, value in change.items() if "/" not in key}
    (finding,) = findings_of(check, steps(metrics | changed_metrics, settings | changed_settings))
    assert (finding.check, finding.severity) == (check.__name__, "serious")


def test_an_explosion_is_found_beside_values_that_were_not_finite_and_where_all_ratios_are_alike() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "ratio/log_std": None, "kl/old_k3": None, "batch/constant_group_fraction": None},  # null: NaN
        {"step": 2, "ratio/log_std": 0.0, "kl/old_k3": 0.51, "ratio/min": 0.25, "ratio/max": None},
    ]
    settings = {"training": {"learning_rate": 1e-3}, "loss": {"clip_low": 3e-4}}
    assert causes.steps_too_large(RunView(config=settings, metrics=lines[:1])) is None
    finding = causes.steps_too_large(RunView(config=settings, metrics=lines))
    assert finding is not None
    assert finding.evidence.startswith("the ratio exploded in step 2, from 0.25 to inf (")
    assert finding.suggestion.startswith("lower it to 0.0001,")  # a tenth, the least that is advised


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lr_1", "max_turns_1"])
def test_a_planted_fault_is_found_in_a_run_played_now(name: str, tmp_path: Path) -> None:
    assert is_found(play(FAULTS[name], tmp_path), FAULTS[name])


@pytest.mark.slow
def test_a_good_run_played_now_has_no_finding(tmp_path: Path) -> None:
    assert diagnose(play(None, tmp_path)) == []


def test_the_script_names_the_configuration_that_it_plays() -> None:
    assert (ROOT / "configs" / "quickstart.toml").is_file()
