"""Prints at the end of a session what the engine contract excused, and why."""

from __future__ import annotations

import pytest
from engine_contract import Excuses

EXCUSES = pytest.StashKey[Excuses]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[EXCUSES] = Excuses()


@pytest.fixture(scope="session")
def excuses(pytestconfig: pytest.Config) -> Excuses:
    """Where clauses that an engine need not keep are noted."""
    return pytestconfig.stash[EXCUSES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash[EXCUSES].lines():
        terminalreporter.write_line(f"engine contract: {line}")
