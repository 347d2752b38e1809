"""Findings on episodes, rewards, evaluations, failures of attempts, and the judge."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from gspo_gym.base.settings import parse_seeds
from gspo_gym.diagnosis.view import Check, Finding, RunView
from gspo_gym.rollout.summary import TOOL_PREFIX

# Of the attempts: retries hide one failure in twenty; one in four is a broken environment or machine.
_MAX_FAILURES, _SERIOUS_FAILURES = 0.05, 0.25
# Of the episodes that an action ended by exceeding a limit: a beginner does so now and then; one in ten is a habit,
# or a limit that good actions exceed; with half of them, the lowest return is most of what the policy learns from.
_MAX_ACTION_LIMITS, _SERIOUS_ACTION_LIMITS = 0.1, 0.5
# Of the groups: beyond a half, most of what is sampled teaches nothing (DAPO refills from the first constant one on).
_MAX_CONSTANT_GROUPS = 0.5
# Training steps, and standard errors: with fewer steps, or a smaller gain, no trend can be told from noise.
_MIN_STEPS_FOR_A_TREND, _MIN_GAIN_IN_STANDARD_ERRORS = 30, 2.0
# Of the episodes that our limits cut off. Some are normal for a beginner; one in five shapes what is learned. If so few
# end by themselves that nearly all are cut off, the policy cannot learn the end.
_MAX_CUT_OFF, _NEARLY_ALL = 0.2, 0.9
# Of the episodes whose context overflowed, and of the turns that could not be parsed: both should be rare accidents.
_MAX_OVERFLOWS, _MAX_PARSE_FAILURES = 0.05, 0.1
# Of the calls of one tool: a beginner gets many wrong; with nine of ten, nothing can be learned of the tool.
_MAX_TOOL_FAILURES = 0.9
# Of the run's time without scores: one tenth is a nuisance, with one half there is no run any more.
_MAX_PAUSED, _SERIOUS_PAUSED = 0.1, 0.5
# Of the episodes: each one that gets no score was played, and perhaps judged, for nothing.
_MAX_UNSCORED = 0.05
# Of the episodes: odd text now and then is normal for a beginner; one in ten that looks like an attack is a habit.
_MAX_FLAGGED = 0.1

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
        "the app could not use the model: see whether it reaches the gateway there, and makes fewer than 1000 calls",
    ),
}
# Metric, limit, what happens, and the key of the limit of ours that does it.
_CUTS = (
    ("rollout/max_turns_fraction", _MAX_CUT_OFF, "episodes end at the limit on turns", "rollout.max_turns"),
    ("rollout/context_overflow_fraction", _MAX_OVERFLOWS, "episodes outgrow the context", "rollout.max_model_len"),
    (
        "rollout/max_output_tokens_fraction",
        _MAX_CUT_OFF,
        "turns run out of output tokens",
        "rollout.max_output_tokens",
    ),
)


def run_failed(run: RunView) -> Finding | None:
    """Find a run that ended with an error, or without a summary."""
    if run.status == "completed":
        return None
    key = "training.checkpoint_every_n_iters"
    if run.status is None:
        return Finding(
            "note",
            "There is no summary.json: the run is still going on, or was killed.",
            f"the last metrics are of step {run.num_steps}",
            key,
            "a killed run goes on from its last checkpoint with --resume; a smaller number loses less",
        )
    return Finding(
        "serious" if run.status == "failed" else "note",
        f"The run ended early: {run.status}.",
        f"after step {run.num_steps}" + (f": {run.error}" if run.error else ""),
        key,
        "mend what its error said, and go on with --resume from the last checkpoint",
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


def evaluation_fell(run: RunView) -> Finding | None:
    """Find a last evaluation clearly below the best one."""
    scores = _scores(run)
    if len(scores) < 2:
        return None
    best, last = max(scores, key=lambda score: score.value), scores[-1]
    if last.high >= best.low:  # the intervals overlap: the difference may be chance
        return None
    return Finding(
        "serious",
        "The policy was better before: the last evaluation is clearly below the best one.",
        f"{best} against {last} (95% intervals that do not overlap)",
        "training.learning_rate",
        f"lower it to {run.number('training.learning_rate') / 2:.2g}, or go on from the checkpoint before step "
        f'{best.step} with it; optimizer.schedule = "cosine" lowers it by itself',
    )


def evaluation_does_not_improve(run: RunView) -> Finding | None:
    """Find a run in which no evaluation is clearly better than the first."""
    scores = _scores(run)
    if len(scores) < 3 or run.num_steps < _MIN_STEPS_FOR_A_TREND:
        return None
    first, best = scores[0], max(scores, key=lambda score: score.value)
    if best.low > first.value or first.value >= 0.9:  # improved, or hardly any room to
        return None
    seeds = run.setting("evaluation.seeds")
    num = None if seeds is None else len(parse_seeds(seeds))
    return Finding(
        "warning",
        "No evaluation is clearly better than the one before training.",
        f"{first}; the best is {best}",
        "evaluation.seeds",
        "if training returns do rise, take more seeds"
        + (f" than {num}" if num else "")
        + " (four times as many halve the interval); if they do not, see the other findings",
    )


def reward_does_not_rise(run: RunView) -> Finding | None:
    """Find training returns that do not rise."""
    # Tasks that are chosen for being neither too easy nor too hard are never mastered: only the uniform slice rises.
    is_adaptive = run.all("rollout/uniform_reward_mean") is not None
    name = "rollout/uniform_reward_mean" if is_adaptive else "rollout/reward_mean"
    reward = run.all(name)
    if reward is None or len(reward.values) < _MIN_STEPS_FOR_A_TREND or run.is_succeeding or run.is_rescored:
        return None
    # Thirds: means at both ends of the run, with enough steps each for a standard error.
    third = len(reward.values) // 3
    first, last = reward.values[:third], reward.values[-third:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = ((statistics.variance(first) + statistics.variance(last)) / third) ** 0.5
    if gain > _MIN_GAIN_IN_STANDARD_ERRORS * error:
        return None
    has_fallen = gain < -_MIN_GAIN_IN_STANDARD_ERRORS * error
    return Finding(
        "serious",
        f"The return of training episodes has {'fallen' if has_fallen else 'not risen'}.",
        f"{name} was {statistics.fmean(first):.3f} in the first third of {reward.steps} and "
        f"{statistics.fmean(last):.3f} in the last: a gain of {gain:+.3f} with a standard error of {error:.3f}",
        "training.learning_rate",
        _other_rate(run, has_fallen),
    )


def _other_rate(run: RunView, has_fallen: bool) -> str:
    """Return advice on the learning rate; larger steps only if the ratios are known to stay within the clip range."""
    rate, spread = run.number("training.learning_rate"), run.recent("ratio/log_std")
    if has_fallen:
        return (
            f"lower it to {rate / 2:.2g}, and look at whether policy/entropy or clip/low_fraction changed when it fell"
        )
    if spread is not None and run.clips_the_ratio and spread.mean > run.number("loss.clip_low"):
        return f"try {rate / 3:.2g}: the ratios go beyond the clip range as it is; then look at single episodes"
    return f"try {3 * rate:.2g}; if that makes it worse, {rate / 3:.2g}; then look at single episodes"


def groups_are_constant(run: RunView) -> Finding | None:
    """Find groups in which all episodes earn the same, so nothing can be compared."""
    fraction, success = run.recent("batch/constant_group_fraction"), run.recent("rollout/success_rate")
    if (
        fraction is None
        or fraction.mean <= _MAX_CONSTANT_GROUPS
        or run.is_succeeding
        or run.number("distillation.coefficient")
    ):
        return None
    num_idle, size = len(run.events_of("no_update")), run.setting("training.group_size", 0)
    evidence = f"{fraction.mean:.0%} of the groups in {fraction.steps}"
    evidence += f", and {num_idle} steps without an update" if num_idle else ""
    evidence += "" if success is None else f"; success {success.mean:.0%}"
    larger = f"and training.group_size to {2 * size}, so that one of a group succeeds" if size else "or warm up longer"
    key, advice = "training.constant_groups", f'set it to "refill", {larger}; or give rewards for partial progress'
    if fraction.mean >= 1:
        advice = (
            "nothing to refill them with: make tasks that succeed sometimes (rollout.env_config), or give rewards for "
            "partial progress; `gspo-gym env card` shows what play earns"
        )
    elif run.setting(key) == "refill":
        key, advice = "rollout.env_config", f"choose tasks that succeed sometimes, {larger}: refilling samples more"
    return Finding(
        "serious" if fraction.mean >= _NEARLY_ALL else "warning",
        "In most groups all episodes earn the same, so that there is nothing to learn from them: the tasks are too "
        "hard or too easy, or the reward does not tell good play from bad.",
        evidence,
        key,
        advice,
    )


def episodes_are_cut_off(run: RunView) -> list[Finding]:
    """Find limits of ours that end many episodes or turns."""
    is_kept = run.setting("rewards.overlong", "keep") == "keep"
    return [
        Finding(
            "serious" if fraction.mean >= _NEARLY_ALL else "warning",
            f"Many {episodes_text}, so that their reward says less about how good they were.",
            f"{metric} is {fraction.mean:.0%} in {fraction.steps}; more than {limit:.0%} is many",
            key,
            f"raise it from {run.setting(key)} to {2 * (run.setting(key) or 1)}"
            + (', or set rewards.overlong to "mask" or to a penalty' if is_kept else ""),
        )
        for metric, limit, episodes_text, key in _CUTS
        if (fraction := run.recent(metric)) is not None and fraction.mean > limit
    ]


def answers_do_not_parse(run: RunView) -> Finding | None:
    """Find many turns from which the environment could not read an action."""
    fraction, cut = run.recent("rollout/parse_failure_fraction"), run.recent("rollout/max_output_tokens_fraction")
    if fraction is None or fraction.mean <= _MAX_PARSE_FAILURES:
        return None
    key, advice = "warmup.num_epochs", "teach the format first with [warmup], or with an example in the first message"
    if cut is not None and cut.mean >= fraction.mean / 2:
        key, advice = "rollout.max_output_tokens", f"raise it: {cut.mean:.0%} of the turns are cut off in the middle"
    return Finding(
        "warning",
        "Many answers could not be parsed as an action.",
        f"rollout/parse_failure_fraction is {fraction.mean:.0%} in {fraction.steps}; more than "
        f"{_MAX_PARSE_FAILURES:.0%} is many",
        key,
        advice,
    )


def tools_fail(run: RunView) -> list[Finding]:
    """Find tools that answer nearly every call with an error."""
    names = sorted({name for line in run.metrics for name in line if name.startswith(TOOL_PREFIX)})
    return [
        Finding(
            "warning",
            f"Nearly every call of the tool {name.removeprefix(TOOL_PREFIX)} is answered with an error.",
            f"{name} is {fraction.mean:.0%} in {fraction.steps}; {_MAX_TOOL_FAILURES:.0%} or more is too much",
            "rollout.env_name",
            "read its answers in the transcripts, and run `gspo-gym env check`: the tool raises, or its schema does "
            "not say what it takes",
        )
        for name in names
        if (fraction := run.recent(name)) is not None and fraction.mean >= _MAX_TOOL_FAILURES
    ]


def actions_exceed_limits(run: RunView) -> Finding | None:
    """Find many episodes that an action ended by exceeding a limit of the environment."""
    fraction, earlier = run.recent("rollout/action_limit_fraction"), run.early("rollout/action_limit_fraction")
    if fraction is None or earlier is None or fraction.mean <= _MAX_ACTION_LIMITS:
        return None
    reason = run.reasons.get("action_limit", "")
    is_late, is_slow = reason.startswith("EnvTimeout"), reason.startswith(("TimeoutError", "_EpisodeTimeout"))
    key, advice = (
        "rollout.env_name",
        "raise the environment's limits on actions if good actions exceed them; else let it answer such an action with "
        "a text and a reward, from which the policy learns more than from an end",
    )
    if is_late or is_slow:
        key = "limits.step_timeout_seconds" if is_late else "limits.episode_timeout_seconds"
        advice = (
            f"now {run.setting(key)}: raise it if good actions take so long; else let the environment answer such an "
            "action at once, with a text"
        )
    is_rising = fraction.mean > earlier.mean + _MAX_ACTION_LIMITS
    return Finding(
        "serious" if fraction.mean > _SERIOUS_ACTION_LIMITS else "warning",
        "Many episodes end because an action hangs, kills or overloads the environment; each is scored at its lowest "
        "return" + (", and the policy does so more and more." if is_rising else "."),
        f"rollout/action_limit_fraction is {fraction.mean:.0%} in {fraction.steps} and was {earlier.mean:.0%} in "
        f"{earlier.steps}; more than {_MAX_ACTION_LIMITS:.0%} is many" + (f"; most often: {reason}" if reason else ""),
        key,
        advice,
    )


def infrastructure_fails(run: RunView) -> list[Finding]:
    """Find frequent failures that say nothing about the policy, one finding for each outcome."""
    total = sum(run.outcomes.values())
    failures = {**_FAILURES, **(_FAILURES_OF_APPS if run.setting("services.task_url") else {})}
    shares = {outcome: run.outcomes.get(outcome, 0) / max(total, 1) for outcome in failures}
    return [
        Finding(
            "serious" if shares[outcome] > _SERIOUS_FAILURES else "warning",
            f"Many attempts at an episode end as {outcome}; they are retried or dropped, and cost time.",
            f"{run.outcomes[outcome]} of {total} attempts ({shares[outcome]:.0%})"
            + (f"; most often: {run.reasons[outcome]}" if outcome in run.reasons else ""),
            key,
            f"now {run.setting(key)}: {advice}",
        )
        for outcome, (key, advice) in failures.items()
        if shares[outcome] > _MAX_FAILURES
    ]


def judge_was_down(run: RunView) -> Finding | None:
    """Find a run that waited for the judge during a large part of its time."""
    pauses, steps = run.all("judge/pause_seconds"), run.all("time/step_seconds")
    fraction = 0.0 if pauses is None or steps is None else sum(pauses.values) / max(sum(steps.values), 1e-9)
    if pauses is None or steps is None or fraction <= _MAX_PAUSED:
        return None
    reasons = run.events_of("judge_paused")
    return Finding(
        "serious" if fraction > _SERIOUS_PAUSED else "warning",
        "The run stood still for a good part of its time, because the judge did not answer.",
        f"{sum(pauses.values):.0f} seconds of {sum(steps.values):.0f} in {pauses.steps}"
        + (f"; the last reason: {reasons[-1]['data']['reason']}" if reasons else ""),
        "judge.options.max_concurrency",
        "lower it if the judge breaks down under the load; else see to the judge, or name another",
    )


def judge_leaves_unscored(run: RunView) -> Finding | None:
    """Find many episodes without a score."""
    unscored_counts, judged_counts = run.recent("judge/unscored"), run.recent("judge/num_judged")
    if unscored_counts is None or judged_counts is None:
        return None
    fraction = sum(unscored_counts.values) / max(sum(unscored_counts.values) + sum(judged_counts.values), 1.0)
    if fraction <= _MAX_UNSCORED:
        return None
    return Finding(
        "warning",
        "Many episodes get no score, and are played again or dropped.",
        f"{fraction:.0%} of the episodes in {unscored_counts.steps}",
        "judge.options.max_output_tokens",
        "raise it if verdicts are cut off, and judge.timeout_s if they come too late; the ledger has the reasons",
    )


def judge_is_played(run: RunView) -> Finding | None:
    """Find text of episodes that looks like an attack on the judge."""
    flags, counts = run.recent("judge/flags"), run.recent("judge/num_judged")
    fraction = 0.0 if flags is None or counts is None else sum(flags.values) / max(sum(counts.values), 1.0)
    if flags is None or fraction <= _MAX_FLAGGED:
        return None
    return Finding(
        "warning",
        "Many episodes hold text that looks as if it were meant for the judge: forged verdicts, instructions, hidden "
        "characters.",
        f"{fraction:.0%} of the episodes in {flags.steps}; judgements.jsonl says which and why",
        "judge.gold",
        "compare the judge with a better one or with labels, if it is not; and read what is flagged",
    )


PLAY: tuple[Check, ...] = (
    run_failed,
    evaluation_fell,
    evaluation_does_not_improve,
    reward_does_not_rise,
    groups_are_constant,
    episodes_are_cut_off,
    answers_do_not_parse,
    tools_fail,
    actions_exceed_limits,
    infrastructure_fails,
    judge_was_down,
    judge_leaves_unscored,
    judge_is_played,
)
