"""`gspo-gym doctor RUN`: name a run's problems, and the keys to change.

It only reads the files in the run's folder, which may belong to a run in progress. The checks are in `run/doctor`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gspo_gym.errors import ConfigError
from gspo_gym.rollout.ledger import Disposition, Terminal, read_ledger
from gspo_gym.run.doctor import causes, checks, checks_play
from gspo_gym.run.doctor.checks import Finding, RunView
from gspo_gym.types import Outcome

_ORDER = ("serious", "warning", "note")
_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run's folder, such as runs/quickstart")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if none is serious, else 1."""
    run = read_run(arguments.folder)
    findings = diagnose(run)
    is_healthy = all(finding.severity != "serious" for finding in findings)
    if arguments.json:
        report = {"run": str(arguments.folder), "steps": run.num_steps, "is_healthy": is_healthy}
        print(json.dumps(report | {"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(report_text(arguments.folder, run, findings))
    return 0 if is_healthy else 1


def read_run(folder: Path) -> RunView:
    """Read what the checks need from a run's folder; a line that a run in progress has half written is left out.

    Raises:
        ConfigError: the folder holds no run.
        RecordError: a file is damaged.
    """
    from gspo_gym.run.records import read_events, read_metrics, read_summary

    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder}: expected the folder of a run, and found no config.toml in it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.toml'}: cannot be read as TOML: {error}") from error
    entries = read_ledger(folder / "ledger.jsonl") if (folder / "ledger.jsonl").exists() else ()
    ends = [entry for entry in entries if isinstance(entry, Terminal)]
    failed = [end for end in ends if end.outcome.is_infrastructure_failure and end.disposition is not Disposition.KEPT]
    # `actions_exceed_limits` quotes the reason of action limits, which are no failures.
    explained = [*failed, *(end for end in ends if end.outcome is Outcome.ACTION_LIMIT)]
    reasons = {
        outcome: Counter(end.reason for end in explained if end.outcome.value == outcome and end.reason).most_common(1)
        for outcome in {end.outcome.value for end in explained}
    }
    return RunView(
        config=config,
        metrics=read_metrics(folder),
        events=read_events(folder),
        status=read_summary(folder)["status"] if (folder / "summary.json").exists() else None,
        outcomes=Counter(end.outcome.value for end in ends),
        reasons={outcome: common[0][0] for outcome, common in reasons.items() if common and common[0][0]},
    )


def diagnose(run: RunView) -> list[Finding]:
    """Return the findings, worst first; leave out those that follow from another finding."""
    # In the order from sampling to the step: a broken link shows symptoms in all later ones.
    cause = next((found for check in causes.CAUSES if isinstance(found := check(run), Finding)), None)
    findings = [] if cause is None else [cause]
    for check in (*checks_play.CHECKS, *checks.CHECKS):
        found = check(run)
        findings += found if isinstance(found, list) else [found] if found is not None else []
    hidden = causes.consequences(findings)
    kept = [finding for finding in findings if finding.check not in hidden]
    return sorted(kept, key=lambda finding: _ORDER.index(finding.severity))


def report_text(folder: Path, run: RunView, findings: Sequence[Finding]) -> str:
    """Format the findings for people."""
    if not run.metrics:
        head = f"{folder}: no step has been recorded yet."
    elif not findings:
        head = f"{folder}: {run.num_steps} steps, and nothing is wrong."
    else:
        counts: Counter[str] = Counter(finding.severity for finding in findings)
        told = ", ".join(f"{counts[severity]} {severity}" for severity in _ORDER if counts[severity])
        head = f"{folder}: {run.num_steps} steps; findings: {told}."
    return "\n\n".join([head, *(paragraph(run, finding) for finding in findings)])


def paragraph(run: RunView, finding: Finding) -> str:
    """Format a finding for people."""
    now = run.setting(finding.key)
    lines = (
        f"{finding.severity.upper()}  {finding.problem}",
        f"seen: {finding.evidence}",
        f"key:  {finding.key}" + (f" (now {now!r})" if now is not None else "") + f": {finding.suggestion}"
        if finding.key
        else f"do:   {finding.suggestion}",
    )
    first, *others = (
        textwrap.fill(line, _WIDTH, initial_indent="" if i == 0 else "  ", subsequent_indent="        ")
        for i, line in enumerate(lines)
    )
    return "\n".join([first, *others])
