"""The budget of processor time: what fails a run, on this machine and on a slower one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import processor_time
import pytest
from processor_time import BUDGET_SECONDS, ProcessorTime

LISTED = {"tests/unit/test_dear.py": 8.0, "tests/unit/test_other.py::test_dear": 5.0}


def run_of(seconds: dict[str, float]) -> Any:
    """Return a session whose tests passed and took so many seconds, as the plugin leaves it."""
    plugin = ProcessorTime(LISTED)
    for name, taken in seconds.items():
        plugin.pytest_runtest_logreport(
            SimpleNamespace(nodeid=name, user_properties=[("processor_seconds", taken)])  # type: ignore[arg-type]
        )
    session: Any = SimpleNamespace(config=object(), exitstatus=pytest.ExitCode.OK)
    plugin.pytest_sessionfinish(session)
    return session


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("tests/unit/test_cheap.py::test_it[3]", BUDGET_SECONDS),
        ("tests/unit/test_dear.py::test_it", 8.0),
        ("tests/unit/test_other.py::test_dear[a]", 5.0),
        ("tests/unit/test_other.py::test_cheap", BUDGET_SECONDS),
    ],
)
def test_a_test_over_its_limit_fails_the_run_by_more_than_the_noise(name: str, limit: float) -> None:
    assert run_of({name: limit * 1.95}).exitstatus == pytest.ExitCode.OK
    assert run_of({name: limit * 2.05}).exitstatus == pytest.ExitCode.TESTS_FAILED


def test_what_is_allowed_more_is_there(request: pytest.FixtureRequest) -> None:
    plugin = next(each for each in request.config.pluginmanager.get_plugins() if isinstance(each, ProcessorTime))
    for name in plugin.allowed:
        file, _, test = name.partition("::")
        path = request.config.rootpath / file
        assert path.is_file(), name
        assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), name


def test_a_machine_of_half_the_pace_has_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loop is timed three times: 0.064, 0.064 and 0.9 s, of which the median is twice the 0.032 of the limits.
    readings = iter([0.0, 0.064, 1.0, 1.064, 2.0, 2.9])
    monkeypatch.setattr(processor_time.time, "process_time", lambda: next(readings))
    assert processor_time.pace() == pytest.approx(2.0)
    readings = iter([0.0, 0.001] * 3)
    assert processor_time.pace() == 1.0  # a faster machine keeps the limits
