"""The doctor's checks of a judge, each on both sides of its threshold. The runs are made up, of 40 equal steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gspo_gym.cli.report import report_text
from gspo_gym.diagnosis import playing as judge
from gspo_gym.diagnosis.findings import CHECKS, diagnose, findings_of
from gspo_gym.diagnosis.view import Check, Finding, RunView
from gspo_gym.run.recording import METRICS

CONFIG = {"judge": {"options": {"max_concurrency": 8}}}


def a_run(metrics: Mapping[str, float], events: Sequence[Mapping[str, Any]] = ()) -> RunView:
    assert set(metrics) <= set(METRICS)
    return RunView(CONFIG, [{"step": step, **metrics} for step in range(1, 41)], events)


def only(found: Any) -> Finding:
    assert isinstance(found, Finding)
    return found


# Just inside and just outside: 1 of 10 seconds; 5 of 100 episodes; 10 of 100 episodes.
CASES: list[tuple[Check, dict[str, float], dict[str, float], str, str]] = [
    (judge.judge_was_down, {"judge/pause_seconds": 0.99, "time/step_seconds": 10},
     {"judge/pause_seconds": 1.01, "time/step_seconds": 10}, "warning", "judge.options.max_concurrency"),
    (judge.judge_was_down, {"judge/pause_seconds": 0.0, "time/step_seconds": 10},
     {"judge/pause_seconds": 5.1, "time/step_seconds": 10}, "serious", "judge.options.max_concurrency"),
    (judge.judge_leaves_unscored, {"judge/unscored": 5, "judge/num_judged": 95},
     {"judge/unscored": 6, "judge/num_judged": 94}, "warning", "judge.options.max_output_tokens"),
    (judge.judge_is_played, {"judge/flags": 10, "judge/num_judged": 100},
     {"judge/flags": 11, "judge/num_judged": 100}, "warning", "judge.gold"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "fine", "wrong", "severity", "key"), CASES)
def test_each_check_is_silent_below_its_threshold_and_speaks_above(
    check: Check, fine: dict[str, float], wrong: dict[str, float], severity: str, key: str
) -> None:
    assert check(a_run(fine)) is None
    (finding,) = findings_of(check, a_run(wrong))
    assert (finding.severity, finding.key, finding.check) == (severity, key, check.__name__)


def test_the_last_reason_of_a_pause_is_shown() -> None:
    events = [{"kind": "judge_paused", "step": 3, "data": {"judge": "j", "reason": "no connection"}}]
    finding = only(judge.judge_was_down(a_run({"judge/pause_seconds": 9, "time/step_seconds": 10}, events)))
    assert "360 seconds of 400 in steps 1 to 40; the last reason: no connection" in finding.evidence


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_is_silent_about_a_run_without_a_judge(check: Check) -> None:
    assert not check(a_run({}))
    assert not check(RunView(config={}))


def test_the_doctor_runs_them_and_shows_a_key_below_a_table(tmp_path: Any) -> None:
    run = a_run({"judge/pause_seconds": 9, "time/step_seconds": 10})
    findings = [finding for finding in diagnose(run) if finding.check == "judge_was_down"]
    assert len(findings) == 1
    assert "judge.options.max_concurrency (now 8):" in report_text(tmp_path, run, findings)
