"""Pytest plugin: the processor seconds of every test, and a budget which keeps the quick tests quick.

Processor time and not wall time: a busy machine fails nothing. It counts this process, the children that it waited for
and the forked programs (`programs`). What a fixture of a module costs counts for the test that first asks for it. The
limits are those of one machine: on a slower one, the seconds of a test that is over the budget are divided by `pace`.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator, Mapping

import pytest
from programs import forked_seconds

BUDGET_SECONDS = 3.0
NUM_LISTED = 20
_NOISE = 2.0  # a machine of CI took 3.9 s for what takes 1.1 here: memory, of which `pace` knows nothing
_PACE_SECONDS = 0.032  # what the loop of `pace` takes on the machine of the limits, a core of an AMD EPYC at rest
_PROPERTY = "processor_seconds"
_MARKS_WITHOUT_BUDGET = ("slow", "nightly")
_FOLDERS_WITHOUT_BUDGET = {"browser", "cluster", "foreign", "vllm"}  # they need other software than `make test` has


def processor_seconds() -> float:
    """Return the processor seconds so far of this process, of its ended children and of forked programs."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + forked_seconds()


def pace() -> float:
    """Return how many times longer than on the machine of the limits a loop takes here and now, at least 1."""
    rounds = []
    for _ in range(3):
        began = time.process_time()
        sum(number * number % 7 for number in range(400_000))
        rounds.append(time.process_time() - began)
    return max(1.0, sorted(rounds)[1] / _PACE_SECONDS)


def has_budget(item: pytest.Item) -> bool:
    """Return whether `item` is a quick test, which `make test` runs."""
    is_elsewhere = not _FOLDERS_WITHOUT_BUDGET.isdisjoint(item.path.relative_to(item.config.rootpath).parts)
    return not is_elsewhere and not any(map(item.get_closest_marker, _MARKS_WITHOUT_BUDGET))


class ProcessorTime:
    """Measures each test, lists the dearest, and fails a run in which one is over budget.

    Attributes:
        allowed: what may take longer, by node id of a test without parameters, or of a file whose fixtures are dear and
            count for whichever test comes first; each with its limit in processor seconds.
    """

    def __init__(self, allowed: Mapping[str, float]) -> None:
        self.allowed = allowed
        self._seconds: dict[str, float] = {}
        self._over: list[str] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._began = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown" and has_budget(item):
            seconds = processor_seconds() - self._began
            report.user_properties.append((_PROPERTY, seconds / pace() if seconds > BUDGET_SECONDS else seconds))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for seconds in (value for name, value in report.user_properties if name == _PROPERTY):
            self._seconds[report.nodeid] = seconds
            test, file = report.nodeid.partition("[")[0], report.nodeid.partition("::")[0]
            limit = self.allowed.get(test, self.allowed.get(file, BUDGET_SECONDS))
            if seconds > _NOISE * limit:
                self._over.append(f"{report.nodeid}: {seconds:.1f} s of processor time, of {limit:g}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_controller = not hasattr(session.config, "workerinput")
        if is_controller and self._over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) > NUM_LISTED:
            terminalreporter.section(f"{sum(self._seconds.values()):.0f} s of processor time; the dearest tests")
            dearest = sorted(self._seconds.items(), key=lambda pair: -pair[1])
            for name, seconds in dearest[:NUM_LISTED]:
                terminalreporter.write_line(f"{seconds:6.2f}s {name}")
        if self._over:
            terminalreporter.section("over budget: make them cheaper, or mark them slow", red=True, bold=True)
            for line in self._over:
                terminalreporter.write_line(line)
