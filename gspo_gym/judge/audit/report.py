"""What an audit found, as a record, as JSON and as lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gspo_gym.judge.audit.statistics import Agreement, Calibration, PositionBias, Slope
from gspo_gym.judge.base import JudgeCost

Part = Literal["event", "outcome"]


@dataclass(frozen=True, slots=True)
class AttackReport:
    """What attacks did to the totals of episodes, compared with the same episodes without them.

    Attributes:
        num_attempts: attacks times episodes that were scored; num_unscored: that were not, and so earn nothing.
        num_raised: those that earned more than without the attack.
        mean_gain, max_gain: of the total.
        raised_by: the attacks that earned more, and the most that each did, the worst first.
        flagged_fraction: of the attempts, in which the judge suspects manipulation.
    """

    num_attempts: int
    num_unscored: int
    num_raised: int
    mean_gain: float
    max_gain: float
    raised_by: Mapping[str, float]
    flagged_fraction: float


@dataclass(frozen=True, slots=True)
class AuditReport:
    """See `audit.py`; None: there was nothing to tell it from, or nothing was asked for it.

    Attributes:
        judge: its name.
        num_episodes: labelled ones; num_unscored: those of them that got no score, by reason in `unscored`.
        flagged_fraction: of the scored episodes, in which the judge suspects manipulation.
        outcome, events: agreement of the totals, of episodes and of turns.
        criteria: agreement of one criterion, by names such as "outcome: process.tone".
        calibration, length: of the outcome's totals, or of the turns' where no outcome is labelled.
        position: of the outcome's criteria, or of the turns' where there are not two of them (`position_part`).
        flip_rate: the chance that two judgements of the same criterion of the same episode differ.
        repeat_deviation: mean over episodes of the standard deviation of the total over repeats.
        attacks: the battery.
        cost: of all of it.
    """

    judge: str
    num_episodes: int
    num_unscored: int
    unscored: Mapping[str, int] = field(default_factory=dict)
    flagged_fraction: float | None = None
    outcome: Agreement | None = None
    events: Agreement | None = None
    criteria: Mapping[str, Agreement] = field(default_factory=dict)
    calibration: Calibration | None = None
    length: Slope | None = None
    position: PositionBias | None = None
    position_part: Part | None = None
    flip_rate: float | None = None
    repeat_deviation: float | None = None
    attacks: AttackReport | None = None
    cost: JudgeCost = field(default_factory=JudgeCost)

    def as_json(self) -> dict[str, Any]:
        """JSON values (hence Any), for machines."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: AuditReport) -> Iterator[str]:
    scored = report.num_episodes - report.num_unscored
    yield f"audit of {report.judge}: {scored} of {report.num_episodes} labelled episodes scored"
    for reason, count in report.unscored.items():
        yield f"  unscored {count}: {reason}"
    yield from _agreement_lines(report)
    yield from _bias_lines(report)
    if report.attacks is not None:
        yield from _attack_lines(report.attacks)
    if report.flagged_fraction is not None:
        yield f"flagged: {report.flagged_fraction:.1%} of the episodes as they are"
    cost = report.cost
    tokens = f"{cost.input_tokens:,} tokens read, {cost.output_tokens:,} written, {cost.usd:.4f} USD"
    yield f"cost: {cost.num_calls:,} calls, {tokens}"


def _agreement_lines(report: AuditReport) -> Iterator[str]:
    rows = {"outcome": report.outcome, "turns": report.events, **report.criteria}
    shown = {name: row for name, row in rows.items() if row is not None}
    if not shown:
        return
    width = max(map(len, [*shown, "agreement"]))
    heads = "  ".join(f"{head:>6}" for head in ("judge", "gold", "equal", "error", "kappa", "corr."))
    yield f"{'agreement':<{width}}  {'n':>5}  {heads}"
    for name, row in shown.items():
        yield (
            f"{name:<{width}}  {row.num:>5}  {row.judge_mean:>6.3f}  {row.gold_mean:>6.3f}  {row.equal_fraction:>6.1%}"
            f"  {row.mean_absolute_error:>6.3f}  {_number(row.kappa)}  {_number(row.correlation)}"
        )


def _bias_lines(report: AuditReport) -> Iterator[str]:
    if (calibration := report.calibration) is not None:
        yield f"calibration: expected error {calibration.expected_error:.3f}, Brier score {calibration.brier:.3f}"
        for each in calibration.bins:
            yield (
                f"  judged {each.low:.1f} to {each.high:.1f}: {each.num} with mean {each.judge_mean:.3f}, labelled "
                f"{each.gold_mean:.3f}"
            )
    if (length := report.length) is not None:
        yield (
            f"length: {length.value:+.4f} of the total for every 1,000 characters of the policy (standard error "
            f"{length.standard_error:.4f})"
        )
    if (position := report.position) is not None:
        effects = " ".join(f"{effect:+.3f}" for effect in position.effects)
        yield f"position ({report.position_part}, {position.num_episodes} episodes in every order): {effects} by place"
        yield (
            f"  a criterion gains or loses up to {position.fixed_order_bias:.3f} in one order for all episodes, "
            f"{position.permuted_bias:.3f} where orders alternate"
        )
    if report.flip_rate is not None:
        yield (
            f"repeats: two judgements of a criterion differ with a chance of {report.flip_rate:.1%}; totals deviate by "
            f"{report.repeat_deviation or 0.0:.3f}"
        )


def _attack_lines(attacks: AttackReport) -> Iterator[str]:
    yield (
        f"attacks: {attacks.num_raised} of {attacks.num_attempts} raised the total (mean gain "
        f"{attacks.mean_gain:+.3f}, highest {attacks.max_gain:+.3f}); {attacks.num_unscored} more got no score; "
        f"{attacks.flagged_fraction:.1%} were flagged"
    )
    for name, gain in attacks.raised_by.items():
        yield f"  {gain:+.3f} {name}"


def _number(value: float | None) -> str:
    return "     -" if value is None else f"{value:>6.3f}"
