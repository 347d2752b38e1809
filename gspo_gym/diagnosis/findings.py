"""The diagnosis of a run: every finding, without those that follow from another one, the worst first.

To add one, write a function of the view in `learning.py` or `playing.py`, or the text of an alarm in `alarms.py`, and
plant its fault in tests/support/doctor_faults.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gspo_gym.diagnosis import learning, playing
from gspo_gym.diagnosis.alarms import alarms_sounded
from gspo_gym.diagnosis.view import Check, Finding, RunView

ORDER = ("serious", "warning", "note")
CHECKS: tuple[Check, ...] = (*playing.PLAY, alarms_sounded, *learning.OTHERS)

# What a broken link of the chain shows further down. Failures of the infrastructure and the judge have other causes.
CONSEQUENCES = frozenset(
    {
        *(check.__name__ for check in learning.OTHERS),
        "answers_do_not_parse",
        "episodes_are_cut_off",
        "evaluation_does_not_improve",
        "evaluation_fell",
        "groups_are_constant",
        "reward_does_not_rise",
    }
)
# A serious one of these hides the later ones and the trends.
_CHAIN = (
    "actions_exceed_limits",
    "answers_do_not_parse",
    "episodes_are_cut_off",
    "groups_are_constant",
    "steps_not_finite",
)
_TRENDS = frozenset(
    {"evaluation_does_not_improve", "evaluation_fell", "reward_does_not_rise"}
    | {"gradient_always_clipped", "ratio_is_constant"}
)


def diagnose(run: RunView) -> list[Finding]:
    """Return the findings, worst first; leave out those that follow from another finding."""
    # In the order from sampling to the step: a broken link shows symptoms in all later ones.
    cause = next((finding for check in learning.CAUSES for finding in findings_of(check, run)), None)
    findings = [] if cause is None else [cause]
    findings += [finding for check in CHECKS for finding in findings_of(check, run)]
    hidden_checks = CONSEQUENCES if cause is not None else consequences(findings)
    visible_findings = [finding for finding in findings if finding is cause or finding.check not in hidden_checks]
    return sorted(visible_findings, key=lambda finding: ORDER.index(finding.severity))


def findings_of(check: Check, run: RunView) -> Iterator[Finding]:
    """Yield what one check finds, with its name."""
    findings = check(run)
    for finding in findings if isinstance(findings, list) else [findings] if findings is not None else []:
        yield finding if finding.check else replace(finding, check=check.__name__)


def consequences(findings: Sequence[Finding]) -> frozenset[str]:
    """Return the names of checks with findings that follow from others in `findings`, of which none is a cause."""
    hidden_checks = {"engine_differs_from_learner"} if any(f.check == "logprobs_disagree" for f in findings) else set()
    serious = {finding.check for finding in findings if finding.severity == "serious"}
    first = next((i for i, name in enumerate(_CHAIN) if name in serious), None)
    return frozenset(hidden_checks if first is None else {*hidden_checks, *_TRENDS, *_CHAIN[first + 1 :]})
