"""Checks of attempts that never became episodes: failures, and the selection by retries. Rules as in `checks.py`."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_gym.run.doctor.view import Check, Finding, RunView

# Of the attempts: retries hide one failure in twenty; one in four is a broken environment or machine.
MAX_FAILURES = 0.05
SERIOUS_FAILURES = 0.25
# Of the episodes that an action ended by exceeding a limit: a beginner does so now and then; one in ten is a habit,
# or a limit that good actions exceed; with half of them, the lowest return is most of what the policy learns from.
MAX_ACTION_LIMITS = 0.1
SERIOUS_ACTION_LIMITS = 0.5

# Outcomes that say nothing about the policy, with the key that governs them and what to do.
_FAILURES: Mapping[str, tuple[str, str]] = {
    "env_error": ("rollout.env_name", "mend the environment: `gspo-gym env check` finds most of what can be wrong"),
    "env_timeout": ("limits.step_timeout_seconds", "raise it, or make the environment's steps faster"),
    "engine_error": ("rollout.max_concurrent_rollouts", "lower it, if memory ran out; else see the reason"),
    "episode_timeout": ("limits.episode_timeout_seconds", "raise it, or lower rollout.max_turns"),
}
# The same for a task app: the fault is in the app, or between it and this machine.
_FAILURES_OF_APPS: Mapping[str, tuple[str, str]] = {
    "env_error": ("services.task_url", "look into the app's own log: it turned rollouts away, or failed in them"),
    "engine_error": (
        "gateway.public_url",
        "the app could not use the model: see whether it reaches the gateway there, and gateway.max_calls",
    ),
}


def actions_exceed_limits(run: RunView) -> Finding | None:
    """Find many episodes that an action ended by exceeding a limit of the environment."""
    fraction, earlier = run.recent("rollout/action_limit_fraction"), run.early("rollout/action_limit_fraction")
    if fraction is None or earlier is None or fraction.mean <= MAX_ACTION_LIMITS:
        return None
    reason = run.reasons.get("action_limit", "")
    is_late, is_slow = reason.startswith("EnvTimeout"), reason.startswith(("TimeoutError", "_EpisodeTimeout"))
    is_rising = fraction.mean > earlier.mean + MAX_ACTION_LIMITS
    if is_late or is_slow:
        key = "limits.step_timeout_seconds" if is_late else "limits.episode_timeout_seconds"
        advice = f"now {run.setting(key)}: raise it if good actions take so long; else let the environment answer such "
        advice += "an action at once, with a text"
    else:
        key = "rollout.env_name"
        advice = "raise the environment's limits on actions if good actions exceed them; else let it answer such an "
        advice += "action with a text and a reward, from which the policy learns more than from an end"
    return Finding(
        "serious" if fraction.mean > SERIOUS_ACTION_LIMITS else "warning",
        "actions_exceed_limits",
        "Many episodes end because an action hangs, kills or overloads the environment; each is scored at its lowest "
        "return" + (", and the policy does so more and more." if is_rising else "."),
        f"rollout/action_limit_fraction is {fraction.mean:.0%} in {fraction.steps} and was {earlier.mean:.0%} in "
        f"{earlier.steps}; more than {MAX_ACTION_LIMITS:.0%} is many" + (f"; most often: {reason}" if reason else ""),
        key,
        advice,
    )


def infrastructure_fails(run: RunView) -> list[Finding]:
    """Find frequent outcomes that say nothing about the policy, one finding for each."""
    total = sum(run.outcomes.values())
    findings = []
    failures = {**_FAILURES, **(_FAILURES_OF_APPS if run.setting("services.task_url") else {})}
    for outcome, (key, advice) in failures.items():
        count = run.outcomes.get(outcome, 0)
        if not total or count / total <= MAX_FAILURES:
            continue
        reason = run.reasons.get(outcome)
        findings.append(
            Finding(
                "serious" if count / total > SERIOUS_FAILURES else "warning",
                "infrastructure_fails",
                f"Many attempts at an episode end as {outcome}; they are retried or dropped, and cost time.",
                f"{count} of {total} attempts ({count / total:.0%})" + (f"; most often: {reason}" if reason else ""),
                key,
                f"now {run.setting(key)}: {advice}",
            )
        )
    return findings


def failures_follow_actions(run: RunView) -> Finding | None:
    """Find failures of the environment that depend on the policy's actions, so retries select episodes without them."""
    alarms = run.events_of("selection")
    if not alarms:
        return None
    return Finding(
        "serious",
        "failures_follow_actions",
        "The environment fails because of what the policy does, and such episodes are played again: what is learned "
        "from are those that did not do it, and nothing teaches the policy to leave it.",
        f"step {alarms[-1]['step']}: {alarms[-1]['data']['reason']}",
        "rollout.env_name",
        "let the environment answer the action that it fails at with a text and a reward, or raise ActionLimitError, "
        "which scores the episode; the ledger's reasons say where it raises",
    )


def apps_lose_attempts(run: RunView) -> Finding | None:
    """Find task apps that lose so many attempts after an answer that the kept ones may be a selection."""
    alarms = run.events_of("attempts_lost")
    if not alarms:
        return None
    return Finding(
        "serious",
        "apps_lose_attempts",
        "The task app loses many attempts after the policy has answered, and they are played again: if it fails at "
        "what the policy says, what is learned from are the episodes without that.",
        f"step {alarms[-1]['step']}: {alarms[-1]['data']['reason']}",
        "services.task_url",
        "play `gspo-gym app check URL`, which sends nonsense and empty answers, and mend what it names: a bad answer "
        "is a step with a reward, and HTTP 500 is for what the policy did not cause",
    )


CHECKS: tuple[Check, ...] = (
    actions_exceed_limits,
    infrastructure_fails,
    failures_follow_actions,
    apps_lose_attempts,
)
