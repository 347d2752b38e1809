"""The doctor's view of a run, its findings, and the checks of the objective, the optimizer and the judge.

A check maps a run to a finding, several, or None; it is silent about metrics that the run does not have. Each threshold
is a constant with its reason.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["serious", "warning", "note"]

# A quarter of the run shows how the run is now, not how it was on average; a mean of less than 10 steps says little,
# because one batch is a sample of a few dozen episodes.
_WINDOW_FRACTION = 0.25
_MIN_WINDOW = 10
# Of the trained tokens. A trajectory's ratio clips whole trajectories: the GSPO paper (section 5.1) sees 15% of all
# tokens clipped and calls it harmless; short episodes learn well at 40%. Beyond 60% most of a batch teaches nothing.
MAX_SHARED_CLIP_FRACTION = 0.6
# With a ratio per token the same paper sees 0.13%; PPO's habit is to keep it below 20%.
MAX_TOKEN_CLIP_FRACTION = 0.2
# Of what can be clipped at all.
MAX_SHARE_OF_ATTAINABLE = 0.9
# Fewer than one token in a thousand under a shared ratio: the clip is there in name only.
MIN_SHARED_CLIP_FRACTION = 1e-3
# Of the units that scoring noise alone carries out of the clip range: at 10% it is a regular part of the clipping.
MAX_NOISE_CLIP_FRACTION = 0.1
# Of the clip range: scoring twice may differ by this much before the clip acts on the difference.
MAX_NOISE_SHARE_OF_CLIP = 0.5
# Of the entropy at the beginning: with less, a batch of a few hundred episodes hardly tries anything new.
MIN_ENTROPY_SHARE = 0.1
# Of the steps: if the gradient is nearly always clipped, its length carries no information any more.
MAX_CLIPPED_GRADIENT_FRACTION = 0.9
# Of the optimizer steps: one in twenty lost is no accident.
MAX_NONFINITE_FRACTION = 0.05
# Nats per token, k3: 0.5 is a factor of 2 to 3 in a sampled token's probability; 0.01 to 0.1 is usual.
MAX_REFERENCE_KL = 0.5
# Nats per token, k3, between engine and learner under the same weights. The same arithmetic gives 1e-7 and less,
# bfloat16 kernels 1e-4 to 1e-3; at 1e-2 single tokens differ by a seventh (exp(sqrt(2 * 0.01)) = 1.15).
MAX_ROLLOUT_KL = 1e-3
SERIOUS_ROLLOUT_KL = 1e-2
# In the runs that it ends, the mismatch grows with the weights: this many times the early one, and no longer tiny.
MAX_ROLLOUT_KL_GROWTH = 3.0
MIN_GROWN_ROLLOUT_KL = 1e-4
# Kish's share: below a half, more than half of the episodes' worth is lost to unequal weights.
MIN_EFFECTIVE_SAMPLES = 0.5
# Of the trained tokens that a correction leaves out; more is a bias and not a safeguard.
MAX_CORRECTED_AWAY = 0.2
# Of the run's time without scores: one tenth is a nuisance, with one half there is no run any more.
MAX_PAUSED = 0.1
SERIOUS_PAUSED = 0.5
# Of the episodes: each one that gets no score was played, and perhaps judged, for nothing.
MAX_UNSCORED = 0.05
# Of the episodes: odd text now and then is normal for a beginner; one in ten that looks like an attack is a habit.
MAX_FLAGGED = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a run.

    Attributes:
        severity: "serious": the run fails its purpose; "warning": it could do better; "note": good to know.
        check: the check's name.
        problem: a sentence.
        evidence: the numbers and steps that show it.
        key: the configuration key to change first.
        suggestion: its new value, and what else could be done.
    """

    severity: Severity
    check: str
    problem: str
    evidence: str
    key: str
    suggestion: str


Check = Callable[["RunView"], Finding | list[Finding] | None]


@dataclass(frozen=True, slots=True)
class Window:
    """The finite values of a metric over some steps, at least one.

    Attributes:
        first_step, last_step: of the first and the last value.
        values: in the order of the steps.
    """

    first_step: int
    last_step: int
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def steps(self) -> str:
        """Return "steps 3 to 12", or "step 3"."""
        if self.first_step == self.last_step:
            return f"step {self.first_step}"
        return f"steps {self.first_step} to {self.last_step}"


@dataclass(frozen=True, slots=True)
class RunView:
    """The contents of a run's folder, for checks.

    Attributes:
        config: the sections of config.toml.
        metrics, events: the lines of metrics.jsonl and events.jsonl, oldest first.
        status: of summary.json; None without one, if the run goes on or was killed.
        outcomes: number of attempts at training episodes, by outcome.
        reasons: most frequent reason, for outcomes that are failures and for actions that exceeded a limit.
    """

    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]] = ()
    events: Sequence[Mapping[str, Any]] = ()
    status: str | None = "completed"
    outcomes: Mapping[str, int] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Return the last step with a line of metrics, or 0."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of "section.key", or `default`; config.toml leaves out None."""
        *above, name = key.split(".")
        table: Any = self.config
        for part in above:
            table = table.get(part, {})
        return table.get(name, default)

    def all(self, name: str) -> Window | None:
        """Return a metric over the whole run; None if no line has it."""
        return _window(self.metrics, name)

    def recent(self, name: str) -> Window | None:
        """Return a metric over the last quarter of the run, at least 10 lines; None if none of them has it."""
        return _window(self.metrics[-self._window_size :], name)

    def early(self, name: str) -> Window | None:
        """Return a metric over the first quarter of the run, at least 10 lines; None if none of them has it."""
        return _window(self.metrics[: self._window_size], name)

    def events_of(self, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def error(self) -> str | None:
        """Return the error in the last "finished" event, or None."""
        ended = self.events_of("finished")
        return ended[-1]["data"].get("error") if ended else None

    @property
    def score_name(self) -> str:
        """Return the unit of the run's scores."""
        # By the last evaluation: the first ones may not have decided it yet.
        last: Mapping[str, Any] = next((event["data"] for event in reversed(self.events_of("evaluation"))), {})
        return str(last.get("score", "mean_return" if last.get("success_rate") is None else "success_rate"))

    @property
    def is_succeeding(self) -> bool:
        """Return whether nine of ten recent episodes succeed; False if rescored."""
        success = self.recent("rollout/success_rate")
        # Above 0.9, little is left to learn, so that flat curves are no problem.
        return success is not None and success.mean >= 0.9 and not self.is_rescored

    @property
    def is_rescored(self) -> bool:
        """Return whether an endpoint plays the training episodes; their returns then say nothing about the policy."""
        return bool(self.setting("rollout.rescore", False))

    @property
    def _window_size(self) -> int:
        return max(_MIN_WINDOW, round(_WINDOW_FRACTION * len(self.metrics)))


def _window(lines: Sequence[Mapping[str, Any]], name: str) -> Window | None:
    points = [(line["step"], float(line[name])) for line in lines if line.get(name) is not None]
    return Window(points[0][0], points[-1][0], tuple(value for _, value in points)) if points else None


def ratio_is_constant(run: RunView) -> Finding | None:
    """Find ratios that are all 1: GSPO, GSPO-token and GRPO are then the same, and no clip acts."""
    constant = run.recent("ratio/is_constant")
    if constant is None or min(constant.values) < 1:
        return None
    batch, size, epochs = (
        run.setting("rollout.episodes_per_batch", 0),
        run.setting("training.batch_size", 0),
        run.setting("training.update_epochs", 1),
    )
    return Finding(
        "warning",
        "ratio_is_constant",
        "The importance ratio is 1 everywhere: old and new policy are the same at every optimizer step, so that the "
        "clip cannot act and the unit of the ratio makes no difference.",
        f"ratio/is_constant is 1 in {constant.steps}; {batch} episodes a batch, {size} a step, {epochs} pass(es)",
        "training.batch_size",
        f"set it to {max(1, batch // 4)} (the paper takes 4 steps a batch), or training.update_epochs to 2 or more",
    )


def noise_reaches_the_clip(run: RunView) -> Finding | None:
    """Find noise between two scorings of the same tokens that is not small against the clip range."""
    clip = min(run.setting("loss.clip_low", 0.0), run.setting("loss.clip_high", 0.0))
    is_rescored = run.setting("correction.old_logprobs", "recompute") == "recompute"
    floor = run.recent("ratio/noise_floor")
    if is_rescored and clip and floor is not None and floor.mean > MAX_NOISE_SHARE_OF_CLIP * clip:
        return Finding(
            "serious",
            "noise_reaches_the_clip",
            "Scoring the same tokens twice under the same weights gives ratios that differ by as much as the clip "
            "allows, so that the clip acts on noise.",
            f"ratio/noise_floor is {floor.mean:.2g} in {floor.steps}, the clip range {clip:.2g}",
            "model.dtype",
            'set it to "float32"; if it is, widen loss.clip_low and loss.clip_high beyond '
            f"{floor.mean / MAX_NOISE_SHARE_OF_CLIP:.2g}",
        )
    noise, sigma = run.recent("ratio/noise_clip_fraction"), run.recent("ratio/predicted_noise")
    if noise is None or sigma is None or noise.mean <= MAX_NOISE_CLIP_FRACTION:
        return None
    evidence = (
        f"noise of {sigma.mean:.2g} nats in log s against a clip range of {clip:.2g}, beyond which it carries "
        f"{noise.mean:.0%} of the ratios ({noise.steps})"
    )
    if not is_rescored:
        return Finding(
            "serious",
            "noise_reaches_the_clip",
            "The engine's logprobs are taken as the old ones, and their noise alone clips a good part of the batch.",
            evidence,
            "correction.old_logprobs",
            'set it to "recompute", or widen loss.clip_low and loss.clip_high to several times the noise',
        )
    return Finding(
        "note",
        "noise_reaches_the_clip",
        "The engine's logprobs are too noisy for this clip range; the run is safe because it scores the old ones "
        "itself.",
        evidence,
        "correction.old_logprobs",
        'leave it at "recompute"',
    )


def clips_too_much(run: RunView) -> Finding | None:
    """Find a clip that removes the gradient of most tokens."""
    fraction = _clip_fraction(run)
    unit = run.setting("loss.unit", "trajectory")
    limit = MAX_TOKEN_CLIP_FRACTION if unit == "token" else MAX_SHARED_CLIP_FRACTION
    if (steps := run.recent("optim/num_steps")) is not None and steps.mean > 1:
        # The first step on a batch has every ratio at 1, where no clip binds.
        limit = min(limit, MAX_SHARE_OF_ATTAINABLE * (1 - 1 / steps.mean))
    if fraction is None or fraction.mean <= limit:
        return None
    low, high = run.setting("loss.clip_low", 0.0), run.setting("loss.clip_high", 0.0)
    rate = run.setting("training.learning_rate", 0.0)
    return Finding(
        "warning",
        "clips_too_much",
        "The clip takes the gradient from a large part of every batch.",
        f"{fraction.mean:.0%} of the trained tokens in {fraction.steps}, with a ratio per {unit} and a range of "
        f"-{low:g} to +{high:g}; more than {limit:.0%} is too many{_ratio_range(run)}",
        "loss.clip_low",
        f"widen it to {3 * low:.2g}, and loss.clip_high to {3 * high:.2g}: the shorter the {unit}, the more its ratio "
        f"varies; or lower training.learning_rate to {rate / 2:.2g}",
    )


def clips_nothing(run: RunView) -> Finding | None:
    """Find a moving ratio that never reaches the clip."""
    fraction, constant = _clip_fraction(run), run.recent("ratio/is_constant")
    q05, q95 = run.recent("ratio/q05"), run.recent("ratio/q95")
    if fraction is None or q05 is None or q95 is None or run.setting("loss.unit", "trajectory") == "token":
        return None
    if fraction.mean >= MIN_SHARED_CLIP_FRACTION or (constant is not None and min(constant.values) >= 1):
        return None
    return Finding(
        "note",
        "clips_nothing",
        "The clip range is wider than anything the ratio does, so that nothing limits a step.",
        f"{fraction.mean:.2%} of the trained tokens clipped in {fraction.steps}{_ratio_range(run)}",
        "loss.clip_low",
        f"set it to about {max(1 - q05.mean, 0.0):.1g}, and loss.clip_high to about {max(q95.mean - 1, 0.0):.1g}, or "
        "take larger steps",
    )


def entropy_collapsed(run: RunView) -> Finding | None:
    """Find a policy that stopped exploring before it was good."""
    early, recent = run.early("policy/entropy"), run.recent("policy/entropy")
    if early is None or recent is None or run.is_succeeding or recent.mean >= MIN_ENTROPY_SHARE * early.mean:
        return None
    coefficient, rate = run.setting("loss.entropy_coef", 0.0), run.setting("training.learning_rate", 0.0)
    return Finding(
        "serious",
        "entropy_collapsed",
        "The policy has stopped exploring before it became good: it samples nearly the same tokens every time.",
        f"policy/entropy fell from {early.mean:.2g} nats in {early.steps} to {recent.mean:.2g} in {recent.steps}",
        "loss.entropy_coef",
        f"set it to {2 * coefficient or 0.01:g}, start again from an earlier checkpoint, and if that is not enough "
        f"lower training.learning_rate to {rate / 2:.2g}",
    )


def gradient_always_clipped(run: RunView) -> Finding | None:
    """Find gradients that are clipped in nearly every step."""
    limit, norms = run.setting("optimizer.max_grad_norm"), run.recent("optim/grad_norm")
    if limit is None or norms is None:
        return None
    fraction = sum(norm > limit for norm in norms.values) / len(norms.values)
    if fraction < MAX_CLIPPED_GRADIENT_FRACTION:
        return None
    return Finding(
        "warning",
        "gradient_always_clipped",
        "The gradient is clipped in nearly every step, so that one bad batch moves the weights as much as a good one.",
        f"optim/grad_norm is above {limit:g} in {fraction:.0%} of {norms.steps}, {norms.mean:.2g} on average",
        "optimizer.max_grad_norm",
        f"raise it to {2 * norms.mean:.2g}; if the norm grows over the run, lower training.learning_rate instead",
    )


def steps_not_finite(run: RunView) -> Finding | None:
    """Find optimizer steps that were skipped for a NaN or infinity."""
    skipped, taken = run.all("optim/num_nonfinite_steps"), run.all("optim/num_steps")
    if skipped is None or taken is None or not sum(skipped.values):
        return None
    num_skipped = round(sum(skipped.values))
    fraction = num_skipped / (num_skipped + sum(taken.values))
    rate = run.setting("training.learning_rate", 0.0)
    return Finding(
        "serious" if fraction > MAX_NONFINITE_FRACTION else "warning",
        "steps_not_finite",
        "Optimizer steps were skipped, because their loss or gradient was not finite.",
        f"{num_skipped} of {num_skipped + round(sum(taken.values))} steps ({fraction:.1%}) in {skipped.steps}",
        "training.learning_rate",
        f'lower it to {rate / 2:.2g}, and use model.dtype = "float32"',
    )


def far_from_the_reference(run: RunView) -> Finding | None:
    """Find a policy that has left its reference despite a KL term."""
    kl, early = run.recent("kl/ref_k3"), run.early("kl/ref_k3")
    if kl is None or early is None or kl.mean <= MAX_REFERENCE_KL:
        return None
    key = "loss.kl_coef" if run.setting("loss.kl_coef", 0.0) or not run.setting("rewards.kl_coef", 0.0) else None
    key = key or "rewards.kl_coef"
    return Finding(
        "warning",
        "far_from_the_reference",
        "The policy is far from its reference, although a KL term holds it.",
        f"kl/ref_k3 went from {early.mean:.2g} nats a token in {early.steps} to {kl.mean:.2g} in {kl.steps}; more than "
        f"{MAX_REFERENCE_KL:g} is far",
        key,
        f"raise it from {run.setting(key, 0.0):g} to {2 * run.setting(key, 0.0):g}, or move the reference along with "
        "reference.update_every_n_iters",
    )


def engine_differs_from_learner(run: RunView) -> Finding | None:
    """Find an engine that samples from another distribution than the learner computes."""
    kl, early = run.recent("kl/rollout_k3"), run.early("kl/rollout_k3")
    if kl is None or early is None:
        return None
    has_grown = kl.mean > MAX_ROLLOUT_KL_GROWTH * early.mean and kl.mean > MIN_GROWN_ROLLOUT_KL
    if kl.mean <= MAX_ROLLOUT_KL and not has_grown:
        return None
    is_corrected = run.setting("correction.level", "none") != "none"
    age = run.recent("rollout/staleness_mean")
    if age is not None and age.mean > 0:
        # Learning itself moves the policy away from older weights, so nothing is known about the engine.
        is_handled = is_corrected or run.setting("correction.old_logprobs", "recompute") == "rollout"
        return Finding(
            "warning",
            "engine_differs_from_learner",
            "The policy has moved away from the older weights that sampled the episodes.",
            f"kl/rollout_k3 is {kl.mean:.2g} nats a token in {kl.steps}, whose episodes are {age.mean:.2g} versions "
            f"old on average (rollout/staleness_mean); {MAX_ROLLOUT_KL:g} is what bfloat16 explains",
            "training.max_staleness" if is_handled else "correction.level",
            f"lower it from {run.setting('training.max_staleness', 0):g}, or take smaller steps"
            if is_handled
            else 'set it to "trajectory" (a geometric mean, cut at correction.high), or lower training.max_staleness',
        )
    return Finding(
        "serious" if kl.mean > SERIOUS_ROLLOUT_KL and not is_corrected else "warning",
        "engine_differs_from_learner",
        "The engine samples from another distribution than the learner computes for the same weights"
        + (", and the difference grows." if has_grown else "."),
        f"kl/rollout_k3 was {early.mean:.2g} nats a token in {early.steps} and is {kl.mean:.2g} in {kl.steps}; "
        f"{MAX_ROLLOUT_KL:g} is what bfloat16 explains",
        "model.dtype" if is_corrected else "correction.level",
        'set it to "float32": the correction treats the symptom only'
        if is_corrected
        else 'set it to "trajectory" (a geometric mean, cut at correction.high), and look for the cause: dtype, '
        "truncated sampling, weights that were not published",
    )


def few_effective_samples(run: RunView) -> Finding | None:
    """Find unequal weights, or a correction that leaves tokens out, which waste a large part of the batch."""
    samples = run.recent("correction/effective_sample_fraction")
    if samples is not None and samples.mean < MIN_EFFECTIVE_SAMPLES:
        return Finding(
            "warning",
            "few_effective_samples",
            "A few episodes stand for the whole batch: the engine's probabilities are too far from the learner's.",
            f"correction/effective_sample_fraction is {samples.mean:.2f} in {samples.steps}, less than "
            f"{MIN_EFFECTIVE_SAMPLES:g}",
            "correction.high",
            "with correction.level set, lower it towards 1.2, so that no episode counts for many; the cause is the "
            "mismatch of kl/rollout_k3",
        )
    masked = run.recent("correction/masked_fraction")
    off_policy = run.recent("correction/off_policy_fraction")
    fraction = sum(window.mean for window in (masked, off_policy) if window is not None)
    if masked is None or fraction <= MAX_CORRECTED_AWAY:
        return None
    return Finding(
        "warning",
        "few_effective_samples",
        "The correction leaves a good part of the batch out of the loss.",
        f"{fraction:.0%} of the trained tokens in {masked.steps}, more than {MAX_CORRECTED_AWAY:.0%}",
        "correction.mode",
        'set it to "truncate", which keeps them with a smaller weight, or widen correction.low and correction.high',
    )


def _clip_fraction(run: RunView) -> Window | None:
    """Return the fraction of trained tokens that a clip binds, step by step."""
    low, high = run.recent("clip/low_fraction"), run.recent("clip/high_fraction")
    if low is None or high is None or len(low.values) != len(high.values):
        return None
    values = tuple(a + b for a, b in zip(low.values, high.values, strict=True))
    return Window(low.first_step, low.last_step, values)


def _ratio_range(run: RunView) -> str:
    q05, q95 = run.recent("ratio/q05"), run.recent("ratio/q95")
    return "" if q05 is None or q95 is None else f"; nine ratios of ten lie between {q05.mean:.4f} and {q95.mean:.4f}"


def judge_drifted(run: RunView) -> Finding | None:
    """Find a drift between the judge used in training and gold."""
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
    """Find a run that waited for the judge during a large part of its time."""
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


CHECKS: tuple[Check, ...] = (
    ratio_is_constant,
    noise_reaches_the_clip,
    clips_too_much,
    clips_nothing,
    entropy_collapsed,
    gradient_always_clipped,
    steps_not_finite,
    far_from_the_reference,
    engine_differs_from_learner,
    few_effective_samples,
    judge_drifted,
    gold_fails,
    judge_was_down,
    judge_leaves_unscored,
    judge_is_played,
)
