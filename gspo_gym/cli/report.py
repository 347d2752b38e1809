"""`gspo-gym report RUN`: one HTML file that shows a run, its curves, and its episodes token by token. `gspo-gym doctor
RUN`: name a run's problems, and the keys to change.

Both only read the files in the run's folder, which may belong to a run in progress. The findings are in `diagnosis/`.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import webbrowser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gspo_gym.base.files import flat_items, replace_file
from gspo_gym.cli.command_line import add_run
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import section_model
from gspo_gym.diagnosis.findings import ORDER, diagnose
from gspo_gym.diagnosis.view import Finding, RunView
from gspo_gym.rollout.episode_files import episode_paths
from gspo_gym.run.folders import find_run
from gspo_gym.run.records import read_config, read_view
from gspo_gym.run.tokens import token_steps

Json = Any  # the values of json.loads
# Of where a run is, and of what is known of it elsewhere on the page.
_NO_SETTINGS = ("run.folder", "model.label", "model.base", "rollout.env_name")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    add_run(parser)
    parser.add_argument("--beside", action="append", default=[], metavar="RUN", help="draw its curves, too; repeatable")
    parser.add_argument("--step", type=int, action="append", metavar="N", help="episodes of this step; repeatable")
    parser.add_argument("--episodes", type=int, default=128, help="at most this many in the file (128)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where it is written (report.html in the run)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Write the page; print where it is, and what contradicts itself in its data."""
    folder = find_run(arguments.run_name, arguments.folder)
    other_folders = [find_run(name, arguments.folder) for name in arguments.beside]
    path = arguments.output or folder / "report.html"
    steps = None if arguments.step is None else [f"step_{step:06d}" for step in arguments.step]
    page = page_of(folder, others=other_folders, steps=steps, max_episodes=arguments.episodes)
    replace_file(path, page.html)
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    print(page.checked)
    run = read_view(folder)
    for finding in page.findings:
        print(f"\n{paragraph(run, finding)}")
    if arguments.open:
        webbrowser.open(path.absolute().as_uri())
    return 0


@dataclass(frozen=True, slots=True)
class Page:
    """A run's page, what its checked data contradict, and a line on what was `checked`, and what was not."""

    html: str
    checked: str
    findings: Sequence[Finding]


def page_of(
    folder: Path,
    *,
    others: Sequence[Path] = (),
    steps: Sequence[str] | None = None,
    max_episodes: int = 128,
    status: str | None = None,
) -> Page:
    """Return the page of a run; its findings come before those of the doctor.

    Args:
        folder: of the run.
        others: runs whose curves are drawn beside its own.
        steps: names of the files of episodes that are in it, such as "step_000012"; None: the last training step of
            which tokens are recorded, before it the first one, and the last evaluation, as far as `max_episodes` goes.
        max_episodes: whole groups are left out until no more episodes are left, but one group a file.
        status: of the run, where its own process writes the page and is about to end; None: as its folder says.

    Raises:
        RecordError: a file of a run is damaged, or a step has no episodes.
    """
    from gspo_gym.config.build.threads import computing_elsewhere
    from gspo_gym.diagnosis.tokens import page_findings  # loads torch, which `doctor` does without
    from gspo_gym.run.report.page_data import run_values, saved_page, step_values

    runs = [described_run(folder), *(run_values(run_folder) for run_folder in others)]
    if status is not None:
        runs[0]["run"] |= {"status": status, "doing": None}  # the run itself asks, at its end
    step_pages: list[dict[str, Json]] = []
    max_left = max_episodes
    for name in _default_steps(folder) if steps is None else steps:
        if max_left > 0:
            step_pages.append(step_values(folder, name, max_episodes=max_left))
            max_left -= sum(len(group["episodes"]) for group in step_pages[-1]["groups"])
    step_pages.sort(key=lambda step: (step["name"].startswith("step_"), step["step"]))
    with computing_elsewhere("cpu"):
        findings = page_findings(runs[0], step_pages)
    runs[0]["findings"] = [*map(asdict, findings), *runs[0]["findings"]]
    runs[0]["checked"] = _check_text(runs[0], step_pages, findings)
    return Page(saved_page(runs, step_pages), runs[0]["checked"], findings)


def _check_text(run: Mapping[str, Json], steps: Sequence[Mapping[str, Json]], findings: Sequence[Finding]) -> str:
    from gspo_gym.diagnosis.tokens import unknown_settings

    num_episodes = sum(len(group["episodes"]) for step in steps for group in step["groups"])
    if not num_episodes:
        return "no episodes are recorded: nothing was checked"
    if unknown := unknown_settings(run):
        return f"{num_episodes} episodes: this version does not know {', '.join(unknown)}: not checked"
    result = f"{num_episodes} episodes checked: " + ("WRONG DATA" if findings else "their numbers agree")
    if all(step["update"] is None for step in steps):
        return f"{result}; no tokens are recorded: only episodes were checked"
    # Evaluations have none to record.
    bare = [step["name"] for step in steps if step["update"] is None and step["name"].startswith("step_")]
    return result + (f"; no tokens are recorded of {', '.join(bare)}: only episodes were checked there" if bare else "")


def described_run(folder: Path) -> dict[str, Json]:
    """Return `run_values` with what the doctor says and the settings that differ from their defaults."""
    from gspo_gym.run.report.page_data import run_values

    findings = [asdict(finding) for finding in diagnose(read_view(folder))]
    # The live page loads episodes when they are looked at: checking all would delay its first picture.
    check_text = "whether the episodes' numbers agree is not checked here, but by gspo-gym report"
    return run_values(folder) | {"findings": findings, "checked": check_text, "settings": changed_settings(folder)}


def changed_settings(folder: Path) -> list[tuple[str, Json, Json]]:
    """Return key, value and default of the run's settings that differ from their defaults; None: it has no default.

    Raises:
        RecordError: config.toml cannot be read.
    """
    usual = dict(_defaults(RunConfig))
    settings = [(key, value) for key, value in flat_items(read_config(folder)) if key not in _NO_SETTINGS]
    return [(key, value, usual.get(key)) for key, value in settings if key not in usual or usual[key] != value]


def _defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield key and default of all that has one; a table that is absent by default has those of its keys."""
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if default is not None:
            yield from flat_items({f"{prefix}{name}": _as_toml(default)})
        elif (section := section_model(field.annotation)) is not None:
            yield from _defaults(section, f"{prefix}{name}.")


def _as_toml(value: Json) -> Json:
    """Return values as a TOML file gives them back: without None, tuples as lists."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {key: _as_toml(item) for key, item in value.items() if item is not None}
    return [_as_toml(item) for item in value] if isinstance(value, tuple | list) else value


def _default_steps(folder: Path) -> list[str]:
    names = [path.name.partition(".")[0] for path in episode_paths(folder)]
    step_names = [name for name in names if name.startswith("step_")]
    with_tokens = [name for step in token_steps(folder) if (name := f"step_{step:06d}") in step_names] or step_names
    evaluations = [name for name in names if name.startswith("eval_")]
    return list(dict.fromkeys([*with_tokens[-1:], *with_tokens[:1], *evaluations[-1:]]))


_WIDTH = 110


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=doctor_command)


def doctor_command(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0 if none is serious, else 1."""
    folder = find_run(arguments.run_name, arguments.folder)
    run = read_view(folder)
    findings = diagnose(run)
    is_healthy = all(finding.severity != "serious" for finding in findings)
    if arguments.json:
        report = {"run": str(folder), "steps": run.num_steps, "is_healthy": is_healthy}
        print(json.dumps(report | {"findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(report_text(folder, run, findings))
    return 0 if is_healthy else 1


def report_text(folder: Path, run: RunView, findings: Sequence[Finding]) -> str:
    """Format the findings for people."""
    if not run.metrics:
        head = f"{folder}: no step has been recorded yet."
    elif not findings:
        head = f"{folder}: {run.num_steps} steps, and nothing is wrong."
    else:
        counts: Counter[str] = Counter(finding.severity for finding in findings)
        severity_counts = ", ".join(f"{counts[severity]} {severity}" for severity in ORDER if counts[severity])
        head = f"{folder}: {run.num_steps} steps; findings: {severity_counts}."
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
    first, *more_lines = (
        textwrap.fill(line, _WIDTH, initial_indent="" if i == 0 else "  ", subsequent_indent="        ")
        for i, line in enumerate(lines)
    )
    return "\n".join([first, *more_lines])
