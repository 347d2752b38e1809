"""Checks of episodes, rewards and evaluations, in the form of `checks.py`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from gspo_gym.rollout.summary import TOOL_PREFIX
from gspo_gym.run.doctor import checks_attempts
from gspo_gym.run.doctor.view import Check, Finding, RunView

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
    """Find groups in which all episodes earn the same, which leaves nothing to compare."""
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
    """Find training returns that do not rise; those of an endpoint need not."""
    reward = run.all("rollout/reward_mean")
    if reward is None or len(reward.values) < MIN_STEPS_FOR_A_TREND or run.is_succeeding or run.is_rescored:
        return None
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
    if last.high >= best.low:
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
    """Find a lack of evaluations clearly better than the first."""
    scores = _scores(run)
    if len(scores) < 3 or run.num_steps < MIN_STEPS_FOR_A_TREND:
        return None
    first, best = scores[0], max(scores, key=lambda score: score.value)
    if best.low > first.value or first.value >= 0.9:
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
    """Find our limits that end many episodes or turns."""
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
    """Find many turns without an action that the environment could read."""
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
    """Find padding that is most of a forward pass."""
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
    *checks_attempts.CHECKS,
    padding_is_high,
    sink_failed,
)
