"""Checks of a judge, in the form of `checks.py`."""

from __future__ import annotations

from gspo_gym.run.doctor.view import Check, Finding, RunView

# Of the run's time without scores: one tenth is a nuisance, with one half there is no run any more.
MAX_PAUSED = 0.1
SERIOUS_PAUSED = 0.5
# Of the episodes: each one that gets no score was played, and perhaps judged, for nothing.
MAX_UNSCORED = 0.05
# Of the episodes: odd text now and then is normal for a beginner; one in ten that looks like an attack is a habit.
MAX_FLAGGED = 0.1


def judge_drifted(run: RunView) -> Finding | None:
    """Find a drift between the judge that is trained against and gold."""
    alarms = run.events_of("judge_drift")
    if not alarms:
        return None
    last = alarms[-1]["data"]
    return Finding(
        "serious",
        "judge_drifted",
        "The judge's scores no longer mean what they meant: they and gold's have drifted apart.",
        f"{len(alarms)} alarms, the last about step {last['of_step']}: {last['reason']}",
        "judge.options.rubric_file",
        "tighten the rubric where the best-scored episodes are not good; `gspo-gym judge audit` says how far the judge "
        "can be trusted at all",
    )


def gold_fails(run: RunView) -> Finding | None:
    """Find failed comparisons of the judge with gold."""
    failed, done = run.events_of("judge_gold_failed"), run.events_of("judge_gold")
    if not failed or len(failed) <= len(done):
        return None
    return Finding(
        "warning",
        "gold_fails",
        "Most comparisons of the judge with gold came to nothing, so that a drift would not be noticed.",
        f"{len(failed)} of {len(failed) + len(done)}, the last about step {failed[-1]['data']['of_step']}: "
        f"{failed[-1]['data']['reason']}",
        "judge.gold",
        "mend what the reason says, or name another gold judge",
    )


def judge_was_down(run: RunView) -> Finding | None:
    """Find a good part of the run's time spent waiting for the judge."""
    paused, steps = run.all("judge/pause_seconds"), run.all("time/step_seconds")
    if paused is None or steps is None:
        return None
    fraction = sum(paused.values) / max(sum(steps.values), 1e-9)
    if fraction <= MAX_PAUSED:
        return None
    reasons = run.events_of("judge_paused")
    reason = f"; the last reason: {reasons[-1]['data']['reason']}" if reasons else ""
    return Finding(
        "serious" if fraction > SERIOUS_PAUSED else "warning",
        "judge_was_down",
        "The run stood still for a good part of its time, because the judge answered nobody.",
        f"{sum(paused.values):.0f} seconds of {sum(steps.values):.0f} in {paused.steps}{reason}",
        "judge.options.max_concurrency",
        "lower it if the judge breaks down under the load; else see to the judge, or name another",
    )


def judge_leaves_unscored(run: RunView) -> Finding | None:
    """Find many episodes without a score."""
    unscored, judged = run.recent("judge/unscored"), run.recent("judge/num_judged")
    if unscored is None or judged is None:
        return None
    fraction = sum(unscored.values) / max(sum(unscored.values) + sum(judged.values), 1.0)
    if fraction <= MAX_UNSCORED:
        return None
    return Finding(
        "warning",
        "judge_leaves_unscored",
        "Many episodes get no score, and are played again or dropped.",
        f"{fraction:.0%} of the episodes in {unscored.steps}",
        "judge.options.max_output_tokens",
        "raise it if verdicts are cut off, and judge.timeout_s if they come too late; the ledger has the reasons",
    )


def judge_is_played(run: RunView) -> Finding | None:
    """Find text of episodes that looks like an attack on the judge."""
    flags, judged = run.recent("judge/flags"), run.recent("judge/num_judged")
    if flags is None or judged is None:
        return None
    fraction = sum(flags.values) / max(sum(judged.values), 1.0)
    if fraction <= MAX_FLAGGED:
        return None
    return Finding(
        "warning",
        "judge_is_played",
        "Many episodes hold text that looks as if it were meant for the judge: forged verdicts, instructions, hidden "
        "characters.",
        f"{fraction:.0%} of the episodes in {flags.steps}; judgements.jsonl says which and why",
        "judge.gold",
        "compare the judge with a better one or with labels, if it is not; and read what is flagged",
    )


CHECKS: tuple[Check, ...] = (judge_drifted, gold_fails, judge_was_down, judge_leaves_unscored, judge_is_played)
