"""Checks of attempts (failures, selection by retries), episodes, rewards and evaluations, as in `checks.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_gym.rollout.summary import TOOL_PREFIX
from gspo_gym.run.doctor.checks import Check, Finding, RunView

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
    """Find frequent failures that say nothing about the policy, one finding for each outcome."""
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
    """Find environment failures that depend on the policy's actions: retries then select episodes without them."""
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
    """Find task apps that lose many attempts after an answer: the episodes that are kept may be a selection."""
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


# Of the groups: beyond a half, most of what is sampled teaches nothing (DAPO refills from the first constant one
# on).
MAX_CONSTANT_GROUPS = 0.5
# Training steps, and standard errors: with fewer steps, or a smaller gain, no trend can be told from noise.
MIN_STEPS_FOR_A_TREND = 30
MIN_GAIN_IN_STANDARD_ERRORS = 2.0
# Of the episodes that our limits cut off. Some are normal for a beginner; one in five shapes what is learned.
MAX_CUT_OFF = 0.2
# Of the episodes: if so few end by themselves, the policy cannot learn the end.
NEARLY_ALL = 0.9
# Of the episodes whose context overflowed, and of the turns that could not be parsed: both should be rare accidents.
MAX_OVERFLOWS = 0.05
MAX_PARSE_FAILURES = 0.1
# Of the calls of one tool: a beginner gets many wrong; with nine of ten, nothing can be learned of the tool.
MAX_TOOL_FAILURES = 0.9
# Of the token slots of a micro-batch: with more than half of padding, most of the forward pass is wasted.
MAX_PADDING = 0.5


def run_failed(run: RunView) -> Finding | None:
    """Find a run that ended with an error, or without a summary."""
    if run.status == "completed":
        return None
    if run.status is None:
        return Finding(
            "note",
            "run_failed",
            "There is no summary.json: the run is still going on, or was killed.",
            f"the last metrics are of step {run.num_steps}",
            "training.checkpoint_every_n_iters",
            "a killed run goes on from its last checkpoint with --resume; a smaller number loses less",
        )
    return Finding(
        "serious" if run.status == "failed" else "note",
        "run_failed",
        f"The run ended early: {run.status}.",
        f"after step {run.num_steps}" + (f": {run.error}" if run.error else ""),
        "training.checkpoint_every_n_iters",
        "mend what its error said, and go on with --resume from the last checkpoint",
    )


def groups_are_constant(run: RunView) -> Finding | None:
    """Find groups in which all episodes earn the same, so nothing can be compared."""
    fraction, success = run.recent("batch/constant_group_fraction"), run.recent("rollout/success_rate")
    if fraction is None or fraction.mean <= MAX_CONSTANT_GROUPS:
        return None
    size, mode = run.setting("training.group_size", 0), run.setting("training.constant_groups", "keep")
    evidence = f"{fraction.mean:.0%} of the groups in {fraction.steps}"
    num_idle = len(run.events_of("no_update"))
    evidence += f", and {num_idle} steps without an update" if num_idle else ""
    if run.is_succeeding and success is not None:
        return Finding(
            "note",
            "groups_are_constant",
            "Nearly every episode succeeds, so that most groups teach nothing: the task is learned, or too easy.",
            f"{evidence}; success {success.mean:.0%}",
            "training.stop_at_success_rate",
            "let it end the run, or make rollout.env_config harder",
        )
    suggestion = f"and training.group_size to {2 * size}, so that one of a group succeeds" if size else ""
    if mode == "refill":
        return Finding(
            "warning",
            "groups_are_constant",
            "Most groups teach nothing and are replaced, which multiplies the sampling.",
            evidence,
            "rollout.env_config",
            f"choose tasks that succeed sometimes, {suggestion or 'or warm up longer'}",
        )
    return Finding(
        "serious" if fraction.mean >= NEARLY_ALL else "warning",
        "groups_are_constant",
        "In most groups all episodes earn the same, so that there is nothing to learn from them: the tasks are too "
        "hard or too easy, or the reward does not tell good play from bad.",
        evidence if success is None else f"{evidence}; success {success.mean:.0%}",
        "training.constant_groups",
        "nothing to refill them with: make tasks that succeed sometimes (rollout.env_config), or give rewards for "
        "partial progress; `gspo-gym env card` shows what play earns"
        if fraction.mean >= 1
        else f'set it to "refill", {suggestion}; or give the environment rewards for partial progress',
    )


def reward_does_not_rise(run: RunView) -> Finding | None:
    """Find training returns that do not rise."""
    reward = run.all("rollout/reward_mean")
    if reward is None or len(reward.values) < MIN_STEPS_FOR_A_TREND or run.is_succeeding or run.is_rescored:
        return None
    # Thirds: means at both ends of the run, with enough steps each for a standard error.
    third = len(reward.values) // 3
    first, last = reward.values[:third], reward.values[-third:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = ((statistics.variance(first) + statistics.variance(last)) / third) ** 0.5
    if gain > MIN_GAIN_IN_STANDARD_ERRORS * error:
        return None
    has_fallen = gain < -MIN_GAIN_IN_STANDARD_ERRORS * error
    return Finding(
        "serious",
        "reward_does_not_rise",
        f"The return of training episodes has {'fallen' if has_fallen else 'not risen'}.",
        f"rollout/reward_mean was {statistics.fmean(first):.3f} in the first third of {reward.steps} and "
        f"{statistics.fmean(last):.3f} in the last: a gain of {gain:+.3f} with a standard error of {error:.3f}",
        "training.learning_rate",
        _other_rate(run, has_fallen),
    )


def _other_rate(run: RunView, has_fallen: bool) -> str:
    """Return advice on the learning rate; larger steps only if the ratios are known to stay within the clip range."""
    rate, low = run.setting("training.learning_rate", 0.0), run.setting("loss.clip_low", 0.0)
    if has_fallen:
        return (
            f"lower it to {rate / 2:.2g}, and look at whether policy/entropy or clip/low_fraction changed when it fell"
        )
    spread = run.recent("ratio/log_std")
    if spread is not None and spread.mean > low:
        return f"try {rate / 3:.2g}: the ratios go beyond the clip range as it is; then look at single episodes"
    return f"try {3 * rate:.2g}; if that makes it worse, {rate / 3:.2g}; then look at single episodes"


def episodes_are_an_endpoints(run: RunView) -> Finding | None:
    """Find training episodes that were sampled by other weights, which never change."""
    if not run.is_rescored:
        return None
    success = run.recent("rollout/success_rate")
    return Finding(
        "note",
        "episodes_are_an_endpoints",
        "The training episodes are an endpoint's, trained on without correction: what they earn says how good that is, "
        "and only the evaluations say how good the policy is.",
        "rollout.rescore is true" + ("" if success is None else f"; success {success.mean:.0%} in {success.steps}"),
        "rollout.engine",
        'when an evaluation comes near to it, set "local" or "vllm" without rollout.rescore, and go on from the last '
        "checkpoint (model.source) with the policy's own samples",
    )


def evaluation_fell(run: RunView) -> Finding | None:
    """Find a last evaluation clearly below the best one."""
    scores = _scores(run)
    if len(scores) < 2:
        return None
    best, last = max(scores, key=lambda score: score.value), scores[-1]
    if last.high >= best.low:  # the intervals overlap: the difference may be chance
        return None
    rate = run.setting("training.learning_rate", 0.0)
    return Finding(
        "serious",
        "evaluation_fell",
        "The policy was better before: the last evaluation is clearly below the best one.",
        f"{best} against {last} (95% intervals that do not overlap)",
        "training.learning_rate",
        f"lower it to {rate / 2:.2g}, or go on from the checkpoint before step {best.step} with it; "
        'optimizer.schedule = "cosine" lowers it by itself',
    )


def evaluation_does_not_improve(run: RunView) -> Finding | None:
    """Find a run in which no evaluation is clearly better than the first."""
    scores = _scores(run)
    if len(scores) < 3 or run.num_steps < MIN_STEPS_FOR_A_TREND:
        return None
    first, best = scores[0], max(scores, key=lambda score: score.value)
    if best.low > first.value or first.value >= 0.9:  # improved, or hardly any room to
        return None
    num = run.setting("evaluation.instances")
    return Finding(
        "warning",
        "evaluation_does_not_improve",
        "No evaluation is clearly better than the one before training.",
        f"{first}; the best is {best}",
        "evaluation.seeds",
        "if training returns do rise, take more seeds"
        + (f" than {num}" if num else "")
        + " (four times as many halve the interval); if they do not, see the other findings",
    )


def episodes_are_cut_off(run: RunView) -> list[Finding]:
    """Find limits of ours that end many episodes or turns."""
    cases = (
        ("rollout/max_turns_fraction", MAX_CUT_OFF, "episodes end at the limit on turns", "rollout.max_turns"),
        ("rollout/context_overflow_fraction", MAX_OVERFLOWS, "episodes outgrow the context", "rollout.max_model_len"),
        (
            "rollout/max_output_tokens_fraction",
            MAX_CUT_OFF,
            "turns run out of output tokens",
            "rollout.max_output_tokens",
        ),
    )
    findings, overlong = [], run.setting("rewards.overlong", "keep")
    for metric, limit, what, key in cases:
        fraction = run.recent(metric)
        if fraction is None or fraction.mean <= limit:
            continue
        findings.append(
            Finding(
                "serious" if fraction.mean >= NEARLY_ALL else "warning",
                "episodes_are_cut_off",
                f"Many {what}, so that their reward says less about how good they were.",
                f"{metric} is {fraction.mean:.0%} in {fraction.steps}; more than {limit:.0%} is many",
                key,
                f"raise it from {run.setting(key)} to {2 * (run.setting(key) or 1)}"
                + (', or set rewards.overlong to "mask" or "penalize"' if overlong == "keep" else ""),
            )
        )
    return findings


def answers_do_not_parse(run: RunView) -> Finding | None:
    """Find many turns from which the environment could not read an action."""
    fraction, cut = run.recent("rollout/parse_failure_fraction"), run.recent("rollout/max_output_tokens_fraction")
    if fraction is None or fraction.mean <= MAX_PARSE_FAILURES:
        return None
    is_cut = cut is not None and cut.mean >= fraction.mean / 2
    return Finding(
        "warning",
        "answers_do_not_parse",
        "Many answers could not be parsed as an action.",
        f"rollout/parse_failure_fraction is {fraction.mean:.0%} in {fraction.steps}; more than "
        f"{MAX_PARSE_FAILURES:.0%} is many",
        "rollout.max_output_tokens" if is_cut else "warmup.num_epochs",
        f"raise it: {cut.mean:.0%} of the turns are cut off in the middle of the answer"
        if is_cut and cut is not None
        else "teach the format first with [warmup], or with an example in the environment's first message",
    )


def tools_fail(run: RunView) -> list[Finding]:
    """Find tools that answer nearly every call with an error."""
    findings = []
    for name in sorted({name for line in run.metrics for name in line if name.startswith(TOOL_PREFIX)}):
        fraction = run.recent(name)
        if fraction is None or fraction.mean < MAX_TOOL_FAILURES:
            continue
        tool = name.removeprefix(TOOL_PREFIX)
        findings.append(
            Finding(
                "warning",
                "tools_fail",
                f"Nearly every call of the tool {tool} is answered with an error.",
                f"{name} is {fraction.mean:.0%} in {fraction.steps}; {MAX_TOOL_FAILURES:.0%} or more is too much",
                "rollout.env_name",
                "read its answers in the transcripts, and run `gspo-gym env check`: the tool raises, or its schema "
                "does not say what it takes",
            )
        )
    return findings


def padding_is_high(run: RunView) -> Finding | None:
    """Find forward passes that are mostly padding."""
    fraction = run.recent("batch/padding_fraction")
    if fraction is None or fraction.mean <= MAX_PADDING:
        return None
    tokens = run.setting("training.max_tokens_per_microbatch", 0)
    return Finding(
        "note",
        "padding_is_high",
        "More than half of what the model reads in training is padding.",
        f"batch/padding_fraction is {fraction.mean:.0%} in {fraction.steps}",
        "training.max_tokens_per_microbatch",
        f"lower it to {max(1, tokens // 2)}: smaller micro-batches hold episodes of more similar length",
    )


def sink_failed(run: RunView) -> Finding | None:
    """Find a sink (W&B, TensorBoard) that stopped receiving numbers."""
    events = run.events_of("sink_failed")
    if not events:
        return None
    sinks = ", ".join(sorted({str(event["data"].get("sink")) for event in events}))
    return Finding(
        "note",
        "sink_failed",
        f"A sink raised and got nothing more: {sinks}. The run's own files are complete.",
        f"step {events[0]['step']}: {events[0]['data'].get('error')}",
        "tracking.report_to",
        "leave it out, or mend the connection (WANDB_MODE=offline keeps a run here for a later `wandb sync`)",
    )


@dataclass(frozen=True, slots=True)
class _Score:
    """An evaluation's score in the run's unit, with its 95% interval."""

    step: int
    name: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f} at step {self.step} ({self.low:.3f} to {self.high:.3f})"


def _scores(run: RunView) -> list[_Score]:
    """Return the scores of all evaluations in the run's unit, without those of too few episodes for an interval."""
    name = run.score_name
    interval = "success_interval" if name == "success_rate" else "mean_return_interval"
    return [
        _Score(event["step"], name.replace("_", " "), event["data"][name], *event["data"][interval])
        for event in run.events_of("evaluation")
        if event["data"].get(name) is not None and event["data"].get(interval) is not None
    ]


CHECKS: tuple[Check, ...] = (
    run_failed,
    evaluation_fell,
    evaluation_does_not_improve,
    reward_does_not_rise,
    episodes_are_an_endpoints,
    groups_are_constant,
    episodes_are_cut_off,
    answers_do_not_parse,
    tools_fail,
    actions_exceed_limits,
    infrastructure_fails,
    failures_follow_actions,
    apps_lose_attempts,
    padding_is_high,
    sink_failed,
)
