"""Alarms, which watch every step of a run while it goes on: each is an event, a note, and a finding of the doctor.

`ALARMS` has a finding for each kind of event; what showed it stands in the event. Engine and learner are compared here,
attempts in `selection.py`, the judge with gold in `judge/gold.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from gspo_gym.diagnosis.view import Finding, RunView
from gspo_gym.errors import EngineMismatchError
from gspo_gym.types import Sampling

# In float32 two implementations of a model differ by some 1e-5 nats at most (1e-6 for small ones). In 16 bits the
# largest of a batch's differences grows with the batch, so its mean is judged: prime-rl's limit for the KL between
# engine and learner.
MAX_GAP_FLOAT32 = 1e-4
MAX_KL_16_BITS = 0.01

# By kind of event, without the evidence.
ALARMS: Mapping[str, Finding] = {
    "mismatch": Finding(
        "warning",
        "Engine and learner gave the same tokens other logprobs under the same weights.",
        "",
        "correction.max_engine_gap",
        "it is the limit; look for a temperature or a truncation that the engine applies by itself, another precision, "
        "keys and values kept over an update, or an update that never arrived",
        "logprobs_disagree",
    ),
    "teacher_disagrees": Finding(
        "warning",
        "The teacher is worse than the student: with feedback, the policy prefers the episodes that earn less.",
        "",
        "distillation.feedback",
        "take another source, mend what the feedback says (tokens/*.feedback.jsonl), or remove [distillation]; a model "
        "that does not understand feedback learns better from rewards alone",
        "teacher_is_worse",
    ),
    "feedback_leaks": Finding(
        "warning",
        "Feedback says the hidden answer: a teacher that reads it knows what the policy cannot, and it is not used.",
        "",
        "distillation.feedback",
        "let the environment or the judge's rubric say what was wrong and not what would have been right, or take "
        "another source",
        "feedback_says_the_answer",
    ),
    "selection": Finding(
        "serious",
        "The environment fails because of what the policy does, and such episodes are played again: what is learned "
        "from are those that did not do it, and nothing teaches the policy to leave it.",
        "",
        "rollout.env_name",
        "let the environment answer the action that it fails at with a text and a reward, or raise ActionLimitError, "
        "which scores the episode; the ledger's reasons say where it raises",
        "failures_follow_actions",
    ),
    "attempts_lost": Finding(
        "serious",
        "The task app loses many attempts after the policy has answered, and they are played again: if it fails at "
        "what the policy says, what is learned from are the episodes without that.",
        "",
        "services.task_url",
        "play `gspo-gym app check URL`, which sends nonsense and empty answers, and mend what it names: a bad answer "
        "is a step with a reward, and HTTP 500 is for what the policy did not cause",
        "apps_lose_attempts",
    ),
    "return_selection": Finding(
        "serious",
        "The episodes that are kept return something else than all that were played, so that the policy is trained on "
        "a selection by outcome.",
        "",
        "services.task_url",
        "the ledger has the reasons of what was dropped or played again: mend in the app what fails by outcome",
        "returns_are_selected",
    ),
    "judge_drift": Finding(
        "serious",
        "The judge's scores no longer mean what they meant: they and gold's have drifted apart.",
        "",
        "judge.options.rubric_id",
        "tighten the rubric where the best-scored episodes are not good; `gspo-gym judge audit` says how far the judge "
        "can be trusted at all",
        "judge_drifted",
    ),
    "judge_gold_failed": Finding(
        "warning",
        "A comparison of the judge with gold came to nothing, so that a drift would not be noticed.",
        "",
        "judge.gold",
        "mend what the reason says, or name another gold judge",
        "gold_fails",
    ),
    "sink_failed": Finding(
        "note",
        "A sink raised and got nothing more. The run's own files are complete.",
        "",
        "tracking.report_to",
        "leave it out, or mend the connection (WANDB_MODE=offline keeps a run here for a later `wandb sync`)",
        "sink_failed",
    ),
}


def alarms_sounded(run: RunView) -> list[Finding]:
    """Return a finding for each kind of alarm that sounded, with the last one's reason."""
    return [
        replace(finding, evidence=_evidence(events))
        for kind, finding in ALARMS.items()
        if (events := run.events_of(kind))
    ]


def _evidence(events: list[Mapping[str, Any]]) -> str:
    data = events[-1]["data"]
    reason = data.get("reason") or f"{data.get('sink')}: {data.get('error')}"
    times = f"{len(events)} times, the last in " if len(events) > 1 else ""
    return f"{times}step {data.get('of_step', events[-1]['step'])}: {reason}"


def note_of(kind: str, step: int, reason: str) -> str:
    """Return the sentence that a running run shows for an alarm."""
    return f"step {step}: {reason}; {ALARMS[kind].key}: {ALARMS[kind].suggestion}"


def differ_on_purpose(sampling: Sampling, *, is_cut_when_scored: bool, dropout: float) -> bool:
    """Return whether settings make the engine's logprobs and the learner's those of different distributions.

    They do where the engine truncates or reshapes a distribution that the learner scores whole, and where an adapter's
    `dropout` acts while the learner scores. `is_cut_when_scored`: the learner truncates, too.
    """
    return sampling.is_reshaped or dropout > 0 or (sampling.is_truncated and not is_cut_when_scored)


def disagreement(gap: float, kl: float, *, max_gap: float | None, has_16_bits: bool) -> str | None:
    """Return how far engine and learner are apart, in a sentence; None: as far as precision explains.

    Args:
        gap: largest difference of a token's logprobs, nats. kl: mean divergence, nats.
        max_gap: None: `MAX_GAP_FLOAT32`, or with weights in 16 bits `MAX_KL_16_BITS` of the mean instead.
    """
    if max_gap is None and has_16_bits:
        if kl <= MAX_KL_16_BITS:  # written so that NaN is an alarm
            return None
        return f"the engine's KL divergence from the learner is {kl:.3g} nats; expected at most {MAX_KL_16_BITS:g}"
    limit = MAX_GAP_FLOAT32 if max_gap is None else max_gap
    if gap <= limit:
        return None
    return f"a logprob of the engine is {gap:.3g} nats from the learner's; expected at most {limit:g}"


class MismatchAlarm:
    """Alarm for batches that were sampled and labelled under the same weights, with different logprobs.

    Stale keys and values, another temperature, precision or adapter, an update that was skipped, sampling truncated by
    a default: each changes the logprobs of the first batch it touches, and none raises anything by itself.

    Args:
        max_gap, has_16_bits: see `disagreement`.
        patience: alarms in a row that are only reported; the next is an error. A batch without gaps ends the row.
        num_in_a_row: alarms when an earlier part of the run stopped.
    """

    def __init__(
        self, *, max_gap: float | None = None, patience: int = 2, has_16_bits: bool = False, num_in_a_row: int = 0
    ) -> None:
        self._max_gap, self._has_16_bits, self._patience = max_gap, has_16_bits, patience
        self.num_in_a_row = num_in_a_row

    def check(self, metrics: Mapping[str, float], *, sampled_under: Collection[int], version: int) -> str | None:
        """Return the fault of a batch, in a sentence; None: there is none, or it cannot be judged.

        `metrics` are the update's.

        Raises:
            EngineMismatchError: it was wrong more than `patience` times in a row.
        """
        # With older tokens in the batch a difference is what an update is for.
        if set(sampled_under) != {version} or "kl/rollout_max_gap" not in metrics:
            return None
        gap, kl = metrics["kl/rollout_max_gap"], metrics["kl/rollout_k3"]
        reason = disagreement(gap, kl, max_gap=self._max_gap, has_16_bits=self._has_16_bits)
        self.num_in_a_row = 0 if reason is None else self.num_in_a_row + 1
        if self.num_in_a_row > self._patience:
            finding = ALARMS["mismatch"]
            raise EngineMismatchError(
                f"in {self.num_in_a_row} batches in a row {reason}; {finding.key}: {finding.suggestion}"
            )
        return reason
