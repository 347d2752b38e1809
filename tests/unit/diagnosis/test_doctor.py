"""The doctor: every check on both sides of its threshold, what a run's folder tells it, and what it prints.

The runs are made up, of 40 steps with the same values (so that the windows, the first and the last ten, have them as
their means) unless a test is about a change.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.main import main
from gspo_gym.cli.report import report_text
from gspo_gym.config.run_config import RunConfig
from gspo_gym.diagnosis import learning, playing
from gspo_gym.diagnosis.alarms import ALARMS, alarms_sounded
from gspo_gym.diagnosis.findings import CHECKS, consequences, diagnose, findings_of
from gspo_gym.diagnosis.view import Check, Finding, RunView
from gspo_gym.errors import RecordError
from gspo_gym.rollout.ledger import Dispatched, Disposition, Ledger, Terminal
from gspo_gym.rollout.summary import rollout_metrics
from gspo_gym.run.recording import EVENTS, METRICS, RunRecorder
from gspo_gym.run.records import read_view
from gspo_gym.types import Message, Outcome, ParseStatus, ToolCall, TrajectoryGroup

ROOT = Path(__file__).parents[3]

CONFIG: dict[str, dict[str, Any]] = {
    "rollout": {"episodes_per_batch": 128, "max_turns": 4, "max_output_tokens": 3, "max_model_len": 256},
    "training": {"batch_size": 32, "update_epochs": 1, "group_size": 8, "learning_rate": 2e-3},
    "loss": {"unit": "trajectory", "clip_low": 3e-3, "clip_high": 4e-3},
    "optimizer": {"max_grad_norm": 1.0},
    "limits": {"step_timeout_seconds": 30.0},
}


def configured(changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections = {name: dict(section) for name, section in CONFIG.items()}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return sections


def a_run(
    metrics: Mapping[str, float | Sequence[float]], settings: Mapping[str, Any] | None = None, **fields: Any
) -> RunView:
    """40 steps; a metric is one number for all of them, or a list of 40."""
    lines = [
        {
            "step": step,
            **{name: value if isinstance(value, int | float) else value[step - 1] for name, value in metrics.items()},
        }
        for step in range(1, 41)
    ]
    return RunView(config=configured(settings or {}), metrics=lines, **fields)


def quarters(first: float, last: float) -> list[float]:
    """40 values: 20 times the first and 20 times the last, so that each window sees one of them."""
    return [first] * 20 + [last] * 20


def only(found: Finding | list[Finding] | None) -> Finding:
    assert found
    if isinstance(found, list):
        (finding,) = found
        return finding
    return found


def test_where_a_teacher_alone_is_learned_from_rewards_that_do_not_differ_are_no_finding() -> None:
    metrics = {"batch/constant_group_fraction": 1.0, "ratio/is_constant": 1.0, "advantage/std": 0.0}
    metrics |= {"policy/entropy": 1.0, "rollout/success_rate": 0.1}
    settings = {"rollout.top_k": 1, "loss.entropy_coef": 0.01}
    alone = {"distillation.teacher": "t", "distillation.coefficient": 1.0, "distillation.reward": False}
    for check in (
        learning.sampling_is_greedy,
        learning.entropy_bonus_dominates,
        learning.ratio_is_constant,
        playing.groups_are_constant,
    ):
        assert check(a_run(metrics, settings)), check.__name__
        assert not check(a_run(metrics, settings | alone)), check.__name__


def test_many_passes_over_a_batch_are_no_finding_where_an_exact_divergence_alone_is_learned_from() -> None:
    metrics = {"ratio/log_std": 0.6}  # nats, and more than 0.5
    teacher = {"distillation.teacher": "t", "distillation.reward": False}
    exact = {**teacher, "distillation.divergence": "forward_kl"}
    many = {"training.update_epochs": 32}
    assert not learning.steps_too_large(a_run(metrics, exact | many))
    # These have a ratio in their loss.
    for settings in ({}, teacher, exact | {"distillation.reward": True}):
        assert only(learning.steps_too_large(a_run(metrics, settings | many))).key == "training.update_epochs"


# name, check, metrics and settings that it is silent about, metrics and settings that it reports, severity, key
CASES: list[tuple[Check, tuple[dict[str, Any], dict[str, Any]], tuple[dict[str, Any], dict[str, Any]], str, str]] = [
    (
        learning.ratio_is_constant,
        ({"ratio/is_constant": quarters(1, 0)}, {}),
        ({"ratio/is_constant": 1}, {}),
        "warning",
        "training.batch_size",
    ),
    (  # half of the smaller clip, 3e-3, is 1.5e-3
        learning.noise_reaches_the_clip,
        ({"ratio/noise_floor": 1.4e-3}, {}),
        ({"ratio/noise_floor": 1.6e-3}, {}),
        "serious",
        "model.dtype",
    ),
    (
        learning.noise_reaches_the_clip,
        ({"ratio/noise_clip_fraction": 0.09, "ratio/predicted_noise": 2e-3}, {"correction.old_logprobs": "rollout"}),
        ({"ratio/noise_clip_fraction": 0.11, "ratio/predicted_noise": 2e-3}, {"correction.old_logprobs": "rollout"}),
        "serious",
        "correction.old_logprobs",
    ),
    (
        learning.clips_too_much,
        ({"clip/low_fraction": 0.3, "clip/high_fraction": 0.29}, {}),
        ({"clip/low_fraction": 0.3, "clip/high_fraction": 0.31}, {}),
        "warning",
        "loss.clip_low",
    ),
    (
        learning.clips_too_much,
        ({"clip/low_fraction": 0.1, "clip/high_fraction": 0.09}, {"loss.unit": "token"}),
        ({"clip/low_fraction": 0.1, "clip/high_fraction": 0.11}, {"loss.unit": "token"}),
        "warning",
        "loss.clip_low",
    ),
    (  # of the last ten norms, eight or nine are above 1
        learning.gradient_always_clipped,
        ({"optim/grad_norm": [2.0] * 30 + [2.0] * 8 + [0.5] * 2}, {}),
        ({"optim/grad_norm": [2.0] * 30 + [2.0] * 9 + [0.5]}, {}),
        "warning",
        "optimizer.max_grad_norm",
    ),
    (
        learning.steps_not_finite,
        ({"optim/num_nonfinite_steps": 0, "optim/num_steps": 4}, {}),
        ({"optim/num_nonfinite_steps": [1] + [0] * 39, "optim/num_steps": 4}, {}),
        "warning",
        "training.learning_rate",
    ),
    (  # 8 of 160 attempted steps are 5%, 9 more
        learning.steps_not_finite,
        ({"optim/num_nonfinite_steps": 0, "optim/num_steps": 4}, {}),
        ({"optim/num_nonfinite_steps": [1] * 9 + [0] * 31, "optim/num_steps": [3] * 9 + [4] * 31}, {}),
        "serious",
        "training.learning_rate",
    ),
    (
        learning.far_from_the_reference,
        ({"kl/ref_k3": quarters(0.0, 0.49)}, {"loss.kl_coef": 0.01}),
        ({"kl/ref_k3": quarters(0.0, 0.51)}, {"loss.kl_coef": 0.01}),
        "warning",
        "loss.kl_coef",
    ),
    (
        learning.far_from_the_reference,
        ({"kl/ref_k3": quarters(0.0, 0.49)}, {"rewards.kl_coef": 0.01}),
        ({"kl/ref_k3": quarters(0.0, 0.51)}, {"rewards.kl_coef": 0.01}),
        "warning",
        "rewards.kl_coef",
    ),
    (
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": 0.9e-3}, {}),
        ({"kl/rollout_k3": 1.1e-3}, {}),
        "warning",
        "correction.level",
    ),
    (  # three times what it was
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": quarters(1e-4, 2.9e-4)}, {}),
        ({"kl/rollout_k3": quarters(1e-4, 3.1e-4)}, {}),
        "warning",
        "correction.level",
    ),
    (
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": quarters(1e-8, 9e-5)}, {}),
        ({"kl/rollout_k3": 1.1e-2}, {}),
        "serious",
        "correction.level",
    ),
    (  # older weights sampled them: what learning moved is no fault of the engine
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": 0.9e-3, "rollout/staleness_mean": 0.5}, {}),
        ({"kl/rollout_k3": 6e-2, "rollout/staleness_mean": 0.5}, {}),
        "warning",
        "correction.level",
    ),
    (
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": 0.9e-3, "rollout/staleness_mean": 0.5}, {"correction.level": "token"}),
        ({"kl/rollout_k3": 6e-2, "rollout/staleness_mean": 0.5}, {"correction.level": "token"}),
        "warning",
        "training.max_staleness",
    ),
    (  # beside which a level is refused
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": 0.9e-3, "rollout/staleness_mean": 0.5}, {"correction.old_logprobs": "rollout"}),
        ({"kl/rollout_k3": 6e-2, "rollout/staleness_mean": 0.5}, {"correction.old_logprobs": "rollout"}),
        "warning",
        "training.max_staleness",
    ),
    (
        learning.engine_differs_from_learner,
        ({"kl/rollout_k3": 0.9e-3}, {"correction.level": "token"}),
        ({"kl/rollout_k3": 1.1e-2}, {"correction.level": "token"}),
        "warning",
        "model.dtype",
    ),
    (
        learning.few_effective_samples,
        ({"correction/masked_fraction": 0.1, "correction/off_policy_fraction": 0.09}, {}),
        ({"correction/masked_fraction": 0.1, "correction/off_policy_fraction": 0.11}, {}),
        "warning",
        "correction.mode",
    ),
    (
        playing.groups_are_constant,
        ({"batch/constant_group_fraction": 0.49, "rollout/success_rate": 0.05}, {}),
        ({"batch/constant_group_fraction": 0.51, "rollout/success_rate": 0.05}, {}),
        "warning",
        "training.constant_groups",
    ),
    (
        playing.groups_are_constant,
        ({"batch/constant_group_fraction": 0.49}, {}),
        ({"batch/constant_group_fraction": 1.0}, {}),
        "serious",
        "training.constant_groups",
    ),
    (
        playing.groups_are_constant,
        ({"batch/constant_group_fraction": 0.49}, {"training.constant_groups": "refill"}),
        ({"batch/constant_group_fraction": 0.51}, {"training.constant_groups": "refill"}),
        "warning",
        "rollout.env_config",
    ),
    (
        playing.episodes_are_cut_off,
        ({"rollout/max_turns_fraction": 0.19}, {}),
        ({"rollout/max_turns_fraction": 0.21}, {}),
        "warning",
        "rollout.max_turns",
    ),
    (
        playing.episodes_are_cut_off,
        ({"rollout/context_overflow_fraction": 0.04}, {}),
        ({"rollout/context_overflow_fraction": 0.06}, {}),
        "warning",
        "rollout.max_model_len",
    ),
    (
        playing.episodes_are_cut_off,
        ({"rollout/max_output_tokens_fraction": 0.19}, {}),
        ({"rollout/max_output_tokens_fraction": 0.21}, {}),
        "warning",
        "rollout.max_output_tokens",
    ),
    (
        playing.answers_do_not_parse,
        ({"rollout/parse_failure_fraction": 0.09, "rollout/max_output_tokens_fraction": 0.0}, {}),
        ({"rollout/parse_failure_fraction": 0.11, "rollout/max_output_tokens_fraction": 0.0}, {}),
        "warning",
        "warmup.num_epochs",
    ),
    (
        playing.answers_do_not_parse,
        ({"rollout/parse_failure_fraction": 0.09, "rollout/max_output_tokens_fraction": 0.1}, {}),
        ({"rollout/parse_failure_fraction": 0.11, "rollout/max_output_tokens_fraction": 0.1}, {}),
        "warning",
        "rollout.max_output_tokens",
    ),
    (
        playing.tools_fail,
        ({"tools/failure_fraction": 0.5, "tools/failure_fraction/look": 0.89}, {}),
        ({"tools/failure_fraction": 0.5, "tools/failure_fraction/look": 0.91}, {}),
        "warning",
        "rollout.env_name",
    ),
    (
        playing.actions_exceed_limits,
        ({"rollout/action_limit_fraction": 0.09}, {}),
        ({"rollout/action_limit_fraction": 0.11}, {}),
        "warning",
        "rollout.env_name",
    ),
    (
        playing.actions_exceed_limits,
        ({"rollout/action_limit_fraction": quarters(0.9, 0.0)}, {}),
        ({"rollout/action_limit_fraction": quarters(0.0, 0.51)}, {}),
        "serious",
        "rollout.env_name",
    ),
]


@pytest.mark.parametrize(
    ("check", "fine", "wrong", "severity", "key"), CASES, ids=[f"{c[0].__name__}-{i}" for i, c in enumerate(CASES)]
)
def test_each_check_is_silent_below_its_threshold_and_speaks_above(check, fine, wrong, severity, key):
    assert not check(a_run(*fine))
    (finding,) = findings_of(check, a_run(*wrong))
    assert (finding.severity, finding.key, finding.check) == (severity, key, check.__name__)


@pytest.mark.parametrize("check", [*learning.CAUSES, *CHECKS])
def test_each_check_is_silent_about_metrics_that_the_run_has_not(check):
    assert not check(a_run({}))
    assert not check(RunView(config={}))


def test_every_check_has_its_thresholds_tested():
    tested = {case[0] for case in CASES}
    # these are about status, trends, outcomes and events, and have tests of their own below, or in the judge's file
    others = {
        playing.run_failed, playing.reward_does_not_rise, playing.evaluation_fell, playing.evaluation_does_not_improve,
        playing.infrastructure_fails, alarms_sounded, playing.judge_was_down, playing.judge_leaves_unscored,
        playing.judge_is_played,
    }  # fmt: skip
    assert tested | others == set(CHECKS)


@pytest.mark.parametrize("kind", ALARMS)
def test_an_alarm_that_sounded_is_a_finding_with_the_last_reason(kind):
    assert alarms_sounded(a_run({})) == []
    data = {"sink": "wandb", "error": "gone"} if kind == "sink_failed" else {"reason": "gone"}
    reason = "wandb: gone" if kind == "sink_failed" else "gone"
    first, last = ({"kind": kind, "step": step, "data": data} for step in (3, 7))
    (finding,) = alarms_sounded(a_run({}, events=[first]))
    assert (finding.check, finding.evidence) == (ALARMS[kind].check, f"step 3: {reason}")
    (finding,) = alarms_sounded(a_run({}, events=[first, last]))
    assert finding.evidence == f"2 times, the last in step 7: {reason}"


def test_alarms_are_events_and_differ_in_name():
    assert set(ALARMS) <= set(EVENTS)
    assert len({finding.check for finding in ALARMS.values()} | {check.__name__ for check in CHECKS}) == len(
        ALARMS
    ) + len(CHECKS)


def test_answers_that_do_not_parse_and_a_tool_that_fails_are_found_in_episodes_that_have_them(rich_trajectory):
    call = Message("assistant", "", (ToolCall("call_0", "look", {}),))
    messages = (call, Message("tool", "error: KeyError: 'door'", tool_call_id="call_0"))
    turns = tuple(dataclasses.replace(turn, parse=ParseStatus.BAD_TOOL_CALL) for turn in rich_trajectory.turns)
    episode = dataclasses.replace(rich_trajectory, messages=messages, turns=turns)
    metrics = rollout_metrics([TrajectoryGroup(episode.task, (episode,), 1, ())], seconds=1.0)
    found = {finding.check for finding in diagnose(a_run(metrics))}
    assert {"answers_do_not_parse", "tools_fail"} <= found


def test_logprobs_that_disagree_say_more_than_their_mean():
    event = {"kind": "mismatch", "step": 7, "data": {"reason": "a gap"}}
    found = diagnose(a_run({"kl/rollout_k3": 1.0}, events=[event]))
    assert [finding.check for finding in found] == ["logprobs_disagree"]


def test_a_noise_floor_with_the_engines_own_logprobs_is_the_engines_and_not_of_scoring_twice():
    run = a_run({"ratio/noise_floor": 1.0}, {"correction.old_logprobs": "rollout"})
    assert learning.noise_reaches_the_clip(run) is None


def test_advice_on_a_constant_ratio_is_a_quarter_of_the_batch():
    finding = only(learning.ratio_is_constant(a_run({"ratio/is_constant": 1}, {"training.batch_size": 128})))
    assert "128 episodes a batch, 128 a step, 1 pass" in finding.evidence
    assert "set it to 32" in finding.suggestion  # 128 / 4


def test_a_clip_that_binds_too_often_is_widened_and_the_ratios_are_shown():
    metrics = {"clip/low_fraction": 0.4, "clip/high_fraction": 0.4, "ratio/q05": 0.95, "ratio/q95": 1.05}
    finding = only(learning.clips_too_much(a_run(metrics)))
    assert "80% of the trained tokens in steps 31 to 40" in finding.evidence
    assert "between 0.9500 and 1.0500" in finding.evidence
    assert "widen it to 0.009, and loss.clip_high to 0.012" in finding.suggestion  # 3 x 3e-3, 3 x 4e-3


def test_values_that_were_not_finite_are_left_out_of_a_window():
    run = RunView(config={}, metrics=[{"step": 1, "loss/total": None}, {"step": 2, "loss/total": 3.0}])
    window = run.all("loss/total")
    assert window is not None
    assert (window.values, window.steps) == ((3.0,), "step 2")
    assert run.all("kl/ref_k3") is None


def test_a_window_is_a_quarter_of_the_run_and_at_least_ten_lines():
    run = RunView(config={}, metrics=[{"step": step, "loss/total": 0.0} for step in range(1, 101)])
    windows = run.early("loss/total"), run.recent("loss/total")
    assert [window and window.steps for window in windows] == ["steps 1 to 25", "steps 76 to 100"]
    short = RunView(config={}, metrics=run.metrics[:12])
    windows = short.early("loss/total"), short.recent("loss/total")
    assert [window and window.steps for window in windows] == ["steps 1 to 10", "steps 3 to 12"]


def with_noise(start: float, slope: float, num_steps: int = 40) -> list[dict[str, Any]]:
    """Rewards on a line, plus and minus 0.1 by turns."""
    return [
        {"step": step, "rollout/reward_mean": start + slope * step + 0.1 * (-1) ** step}
        for step in range(1, num_steps + 1)
    ]


def test_a_flat_reward_is_told_from_a_rising_and_from_a_falling_one():
    # thirds of 13 steps, noise of standard deviation 0.1: the error of the gain is about sqrt(2 x 0.01 / 13) = 0.04,
    # and twice that 0.08; the thirds' middles are 27 steps apart
    def check(slope: float) -> Finding | None:
        found = playing.reward_does_not_rise(RunView(config=CONFIG, metrics=with_noise(0.2, slope)))
        assert not isinstance(found, list)
        return found

    assert check(0.10 / 27) is None
    flat, falling = only(check(0.04 / 27)), only(check(-0.12 / 27))
    assert "not risen" in flat.problem
    assert "try 0.006" in flat.suggestion  # 3 x 2e-3
    assert "fallen" in falling.problem
    assert "lower it to 0.001" in falling.suggestion  # 2e-3 / 2


def test_of_tasks_that_are_chosen_the_uniform_slice_must_rise():
    def check(slope_of_all: float, slope_of_slice: float) -> Finding | None:
        lines = zip(with_noise(0.2, slope_of_all), with_noise(0.2, slope_of_slice), strict=True)
        metrics = [line | {"rollout/uniform_reward_mean": own["rollout/reward_mean"]} for line, own in lines]
        found = playing.reward_does_not_rise(RunView(config=CONFIG, metrics=metrics))
        assert not isinstance(found, list)
        return found

    assert check(-0.12 / 27, 0.10 / 27) is None
    assert "rollout/uniform_reward_mean was" in only(check(0.10 / 27, 0.0)).evidence


def test_a_flat_reward_is_no_news_in_a_short_run_or_at_the_top():
    assert playing.reward_does_not_rise(RunView(config=CONFIG, metrics=with_noise(0.2, 0.0, num_steps=29))) is None
    assert playing.reward_does_not_rise(RunView(config=CONFIG, metrics=with_noise(0.2, 0.0, num_steps=30))) is not None
    at_the_top = [line | {"rollout/success_rate": 0.95} for line in with_noise(0.9, 0.0)]
    assert playing.reward_does_not_rise(RunView(config=CONFIG, metrics=at_the_top)) is None


def test_what_an_endpoints_episodes_earn_is_not_taken_for_the_policys():
    flat = with_noise(0.2, 0.0)
    assert playing.reward_does_not_rise(RunView(config=CONFIG, metrics=flat)) is not None
    rescored = RunView(config=configured({"rollout.rescore": True}), metrics=flat)
    assert playing.reward_does_not_rise(rescored) is None


def evaluations(*scores: tuple[float, float, float], name: str = "success") -> list[dict[str, Any]]:
    """Evaluation events at steps 0, 20, 40, ... with these (value, low, high)."""
    keys = ("success_rate", "success_interval") if name == "success" else ("mean_return", "mean_return_interval")
    return [
        {"kind": "evaluation", "step": 20 * i, "data": {keys[0]: value, keys[1]: [low, high]}}
        for i, (value, low, high) in enumerate(scores)
    ]


@pytest.mark.parametrize("name", ["success", "mean_return"])
def test_an_evaluation_that_fell_is_one_whose_interval_lies_below_the_best_ones(name):
    good, overlapping, below = (0.9, 0.85, 0.93), (0.8, 0.74, 0.86), (0.7, 0.63, 0.76)
    assert playing.evaluation_fell(a_run({}, events=evaluations(good, overlapping, name=name))) is None
    finding = only(playing.evaluation_fell(a_run({}, events=evaluations(good, below, name=name))))
    assert finding.severity == "serious"
    assert "0.900 at step 0 (0.850 to 0.930) against" in finding.evidence
    assert "lower it to 0.001" in finding.suggestion


def test_all_scores_of_a_run_are_in_the_unit_of_its_first_evaluation():
    # no success was declared at first, so the mean return counts: 2.0 that fell to 0.9, whatever the success rate says
    undecided = {"score": "mean_return", "success_rate": None, "success_interval": None}
    later = {"score": "mean_return", "success_rate": 0.9, "success_interval": [0.8, 0.95]}
    run = a_run(
        {},
        events=[
            {
                "kind": "evaluation",
                "step": 0,
                "data": {**undecided, "mean_return": 2.0, "mean_return_interval": [1.8, 2.2]},
            },
            {
                "kind": "evaluation",
                "step": 20,
                "data": {**later, "mean_return": 0.9, "mean_return_interval": [0.7, 1.1]},
            },
        ],
    )
    evidence = only(playing.evaluation_fell(run)).evidence
    assert "mean return 2.000 at step 0 (1.800 to 2.200) against mean return 0.900" in evidence
    # and the other way round: success at first, and then nothing decided is a success rate of 0, not a mean return
    decided = {"score": "success_rate", "mean_return": 0.9, "mean_return_interval": [0.8, 1.0]}
    rates = [(0.9, [0.8, 0.95]), (0.0, [0.0, 0.1])]
    data = [{**decided, "success_rate": rate, "success_interval": interval} for rate, interval in rates]
    events = [{"kind": "evaluation", "step": 20 * i, "data": each} for i, each in enumerate(data)]
    assert "success rate 0.900 at step 0" in only(playing.evaluation_fell(a_run({}, events=events))).evidence


def test_actions_that_exceed_limits_are_told_with_which_limit_and_explain_a_return_that_stays_low():
    hanging = "EnvTimeoutError: Ending: step() did not answer within 30 seconds"
    for reason, key in ((hanging, "limits.step_timeout_seconds"), ("ActionLimitError: a query", "rollout.env_name")):
        metrics = {"rollout/action_limit_fraction": quarters(0.2, 0.6)}
        run = a_run(metrics, reasons={"action_limit": reason})
        (finding,) = findings_of(playing.actions_exceed_limits, run)
        assert (finding.key, reason in finding.evidence) == (key, True)
        assert "does so more and more" in finding.problem
        assert "is 60% in steps 31 to 40 and was 20% in steps 1 to 10" in finding.evidence
        assert {"groups_are_constant", "reward_does_not_rise"} <= consequences([finding])


def test_a_run_that_failed_is_told_with_its_error():
    failed = {"kind": "finished", "step": 3, "data": {"status": "failed", "error": "RolloutError: all were dropped"}}
    run = a_run({}, events=[failed])
    run = RunView(config=run.config, metrics=run.metrics, events=run.events, status="failed")
    assert only(playing.run_failed(run)).evidence.endswith(": RolloutError: all were dropped")


def test_evaluations_that_do_not_improve_are_those_whose_best_interval_holds_the_first_score():
    first, same, better = (0.4, 0.33, 0.47), (0.45, 0.38, 0.52), (0.5, 0.41, 0.57)
    assert playing.evaluation_does_not_improve(a_run({}, events=evaluations(first, same, same))) is not None
    assert playing.evaluation_does_not_improve(a_run({}, events=evaluations(first, same, better))) is None
    assert playing.evaluation_does_not_improve(a_run({}, events=evaluations(first, same))) is None  # too few
    at_the_top = (0.95, 0.91, 0.97)
    assert (
        playing.evaluation_does_not_improve(a_run({}, events=evaluations(at_the_top, at_the_top, at_the_top))) is None
    )


def test_failures_are_told_apart_and_graded_by_their_share_of_all_attempts():
    outcomes = {"terminated": 90, "env_error": 4, "env_timeout": 6}
    finding = only(
        playing.infrastructure_fails(a_run({}, outcomes=outcomes, reasons={"env_timeout": "no answer in 30 s"}))
    )
    assert (finding.severity, finding.key) == ("warning", "limits.step_timeout_seconds")
    assert finding.evidence == "6 of 100 attempts (6%); most often: no answer in 30 s"
    assert playing.infrastructure_fails(a_run({}, outcomes={"terminated": 95, "env_error": 5})) == []
    serious = only(playing.infrastructure_fails(a_run({}, outcomes={"terminated": 74, "env_error": 26})))
    assert (serious.severity, serious.key) == ("serious", "rollout.env_name")


def test_failures_of_episodes_that_an_app_plays_point_to_the_app():
    app = {"services.task_url": "http://127.0.0.1:8114"}
    for outcome, key in {
        "env_error": "services.task_url",
        "engine_error": "gateway.public_url",
        "episode_timeout": "limits.episode_timeout_seconds",
    }.items():
        finding = only(playing.infrastructure_fails(a_run({}, app, outcomes={"terminated": 50, outcome: 50})))
        assert (finding.severity, finding.key) == ("serious", key)


def test_a_run_that_failed_is_serious_and_one_that_goes_on_is_not():
    severities = {status: playing.run_failed(a_run({}, status=status)) for status in ("failed", "interrupted", None)}
    assert {status: only(found).severity for status, found in severities.items()} == {
        "failed": "serious",
        "interrupted": "note",
        None: "note",
    }
    assert playing.run_failed(a_run({}, status="completed")) is None


def test_findings_come_with_the_worst_first():
    sink = {"kind": "sink_failed", "step": 7, "data": {"sink": "wandb", "error": "ConnectionError('down')"}}
    run = a_run({"ratio/is_constant": 1, "kl/rollout_k3": 1.0}, events=[sink])
    assert [finding.severity for finding in diagnose(run)] == ["serious", "warning", "note"]


def code_of_findings() -> str:
    names = ("alarms", "findings", "learning", "playing")
    return "".join((ROOT / "gspo_gym" / "diagnosis" / f"{name}.py").read_text() for name in names)


def texts_of(pattern: str) -> set[str]:
    """Quoted texts of this form in the doctor's code."""
    return set(re.findall(rf'["`]({pattern})["`]', code_of_findings()))


def test_every_metric_and_event_that_is_looked_at_exists():
    names = texts_of(r"[a-z]+/[a-z0-9_]+")
    assert len(names) > 20
    assert names <= set(METRICS)
    assert set(re.findall(r'events_of\("(\w+)"\)', code_of_findings())) <= set(EVENTS)


def test_every_key_that_is_named_exists():
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    known = {
        f"{name}.{key}"
        for name, annotation in sections.items()
        for model in (annotation, *getattr(annotation, "__args__", ()))  # an optional section is X | None
        for key in getattr(model, "model_fields", {})
    }
    texts = " ".join(re.findall(r'"[^"\n]*"', code_of_findings()))  # quoted ones
    named = re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z_]+\b", texts)
    keys = {key for key in named if not key.startswith("run.")}  # `run` is a variable there, in f-strings too
    assert len(keys) > 20
    assert keys <= known


def test_the_report_names_problem_evidence_and_key_with_its_present_value():
    run = a_run({"rollout/max_turns_fraction": 0.3}, {"rollout.max_turns": 4})
    text = " ".join(report_text(Path("runs/x"), run, diagnose(run)).split())
    assert text.startswith("runs/x: 40 steps; findings: 1 warning. WARNING Many episodes end at the limit on turns")
    assert "seen: rollout/max_turns_fraction is 30% in steps 31 to 40" in text
    assert "key: rollout.max_turns (now 4): raise it from 4 to 8" in text


def write_run(folder: Path, metrics: Mapping[str, float], *, failures: int = 0) -> None:
    """A run's folder as a recorder and a ledger leave it: 40 steps, and as many attempts."""
    recorder = RunRecorder.create(folder, "[training]\nlearning_rate = 0.002\n")
    ledger = Ledger(folder / "ledger.jsonl")
    for step in range(1, 41):
        recorder.metrics(step, metrics)
        ledger.dispatch(Dispatched(f"{step}", 0, "task", step, step))
        fails = step <= failures
        outcome = Outcome.ENV_ERROR if fails else Outcome.TERMINATED
        kind, reason = (Disposition.DROPPED, "EnvError: boom") if fails else (Disposition.KEPT, None)
        ledger.settle(Terminal(f"{step}", 0, outcome, kind, reason))
    evaluation = {"step": 40}
    recorder.summary(
        {
            "status": "completed", "policy_name": "policy", "rescored": False, "steps": 40, "episodes": 40,
            "wall_seconds": 1.0, "initial_eval": evaluation, "final_eval": evaluation, "best_eval": evaluation,
            "sampled_tokens": 1, "trained_tokens": 1, "gradient_steps": 1, "curve": [], "score": "success_rate",
            "error": None,
        }
    )  # fmt: skip
    recorder.close()


def test_a_clean_run_says_so_and_exits_with_0(tmp_path, capsys):
    write_run(tmp_path / "run", {"policy/entropy": 1.0})
    assert main(["doctor", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run'}: 40 steps, and nothing is wrong.\n"


def test_something_serious_exits_with_1_and_json_says_the_same(tmp_path, capsys):
    write_run(tmp_path, {"rollout/reward_mean": 0.5, "ratio/is_constant": 1}, failures=11)
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["steps"], report["is_healthy"]) == (40, False)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert set(found) == {"reward_does_not_rise", "infrastructure_fails", "ratio_is_constant"}
    assert found["infrastructure_fails"]["evidence"] == "11 of 40 attempts (28%); most often: EnvError: boom"
    assert set(found["ratio_is_constant"]) == {"severity", "check", "problem", "evidence", "key", "suggestion"}


def test_notes_and_warnings_alone_exit_with_0(tmp_path):
    write_run(tmp_path, {"ratio/is_constant": 1})
    assert main(["doctor", str(tmp_path)]) == 0


def test_a_folder_without_a_run_is_the_callers_mistake(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "there is no such run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("= =")
    with pytest.raises(RecordError, match=r"config\.toml: cannot be read: Invalid statement \(at line 1, column 1\)"):
        read_view(tmp_path)
