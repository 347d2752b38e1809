"""How many small faults the tests notice: `python -m benchmarks mutants FILE...`, in the root of a checkout.

Every mutant is one small change of a file (see `mutations`), written into a temporary copy of the checkout, where the
tests of that file run until the first failure, one test file after another. A mutant dies if a test fails, if nothing
can be imported, or if the tests take longer than `TIMEOUT_FACTOR` times what they take without it (times in which no
core was free are not counted). Those that only a time-out ended are counted apart: that proves less than a failure.
One process at a time.

The tests of `gspo_gym/room/name.py` are, in this order: the doctests of the file; `tests/**/test_name.py` and
`test_name_*.py`; the test files that import the module, those that import the fewest other modules first; the same of
the modules that import it, those of its folder first, one test file of each in turn. At most `MAX_TEST_FILES` in all.
Left out are tests marked `slow` and those of a folder with requirements of its own.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from benchmarks.mutations import Mutant, draw_mutants
from gspo_gym.cli.command_line import interrupted_by_signals
from gspo_gym.errors import UsageError

MAX_TEST_FILES = 6
TIMEOUT_FACTOR = 5.0
_TIMEOUT_FLOOR_SECONDS = 20.0
_BASELINE_SECONDS = 600.0
TIMED_OUT = 124
_NO_TESTS = 5  # pytest's exit status where it collected none
# Bytecode is written, for all but one file of ours are the same in every run.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
_LEFT_OUT = (".*", "__pycache__", "node_modules", "*.egg-info")
_LEFT_OUT_AT_TOP = ("runs", "build")  # deeper folders of these names are code: gspo_gym/config/build


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of one file's mutants.

    Attributes:
        path: the file, relative to the checkout.
        tests: the test files that ran until no mutant was left, relative to the checkout.
        num_mutants: mutants that were tried.
        num_timed_out: those that died only because their tests took too long.
        survivors: those that no test noticed.
    """

    path: Path
    tests: tuple[Path, ...]
    num_mutants: int
    num_timed_out: int
    survivors: tuple[Mutant, ...]

    @property
    def num_died(self) -> int:
        return self.num_mutants - len(self.survivors)

    @property
    def died_fraction(self) -> float:
        """The share of the mutants that died; 1 where the file has none."""
        return self.num_died / self.num_mutants if self.num_mutants else 1.0


def find_tests(path: Path, root: Path) -> tuple[Path, ...]:
    """Return the tests of the module at `path` by the rule above; both paths and results are relative to `root`."""
    files = [file for file in (root / "tests").rglob("test_*.py") if not any(file.parent.glob("requirements*.txt"))]
    imports = {file.relative_to(root): _imports(file) for file in sorted(files)}
    doctests = [path] if ">>> " in (root / path).read_text(encoding="utf-8") else []
    found = [*doctests, *_direct_tests(path, imports)]
    if len(found) < MAX_TEST_FILES:
        users = [_direct_tests(user, imports) for user in _users(path, root)]
        found += [test for same_rank in zip_longest(*users) for test in same_rank if test is not None]
    return tuple(dict.fromkeys(found))[:MAX_TEST_FILES]


def _direct_tests(path: Path, imports: Mapping[Path, set[str]]) -> list[Path]:
    """The tests that are named after a module or import it, in the order of the rule; `imports` are those of tests."""
    mirrors, importers = [], []
    for test, imported in imports.items():
        is_imported = _is_imported(path, imported)
        is_named = test.stem == f"test_{path.stem}" or test.stem.startswith(f"test_{path.stem}_")
        is_elsewhere = path.parent.name not in test.parent.parts
        # A file of that name in another room's folder mirrors another module, unless it imports this one.
        if is_named and (is_imported or not is_elsewhere):
            mirrors.append((is_elsewhere, test.stem != f"test_{path.stem}", len(imported), test))
        elif is_imported:
            importers.append((len(imported), test))
    return [test for *_, test in sorted(mirrors)] + [test for _, test in sorted(importers)]


def _users(path: Path, root: Path) -> list[Path]:
    """The modules that import the one at `path`: those in its folder first, then those that import the fewest."""
    last_name = module_name(path).rpartition(".")[2]
    users = []
    for room in ("gspo_gym", "envs"):
        for file in (root / room).rglob("*.py"):
            imported = _imports(file) if last_name in file.read_text(encoding="utf-8") else set()  # parsing is slow
            if _is_imported(path, imported):
                user = file.relative_to(root)
                users.append((user.parent != path.parent, len(imported), user))
    return [user for *_, user in sorted(users)]


def _is_imported(path: Path, imported: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{module_name(path)}.") for name in imported)


def module_name(path: Path) -> str:
    """Return the import name of the file at `path`; `envs/` is the folder of `gspo_gym_envs`.

    >>> module_name(Path("envs/wordle/env.py"))
    'gspo_gym_envs.wordle.env'
    """
    parts = path.with_suffix("").parts
    parts = ("gspo_gym_envs", *parts[1:]) if parts[0] == "envs" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(file: Path) -> set[str]:
    """Our modules that a file imports, and for `from a import b` both `a` and `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower())}
    return {name for name in found if name.startswith("gspo_gym")}


@dataclass(frozen=True, slots=True)
class TestRun:
    """How tests ended: pytest's exit status, or `TIMED_OUT`, and the seconds that they took."""

    __test__ = False  # no test class

    status: int
    seconds: float


class CheckoutCopy:
    """A copy of a checkout and the process which runs tests in it; see `copied_checkout`."""

    def __init__(self, server: subprocess.Popen[str], copy: Path, output: Path) -> None:
        self._server = server
        self._output = output
        self._num_written = 0
        self._started = int(time.time())
        self.copy = copy

    def write(self, path: Path, text: str) -> None:
        """Replace a file of the copy. Its time is new every time, for by time and size Python finds old bytecode."""
        self._num_written += 1
        (self.copy / path).write_text(text, encoding="utf-8")
        os.utime(self.copy / path, (self._started + self._num_written,) * 2)

    def run(self, tests: Sequence[Path], *, seconds: float) -> TestRun:
        """Run tests until the first failure, for at most `seconds`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        options = [
            "-q",
            "-x",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            f"--basetemp={self._output.parent / 'tmp'}",
        ]
        request = {"arguments": [*options, *map(str, tests)], "seconds": seconds, "output": str(self._output)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise UsageError(f"the process that runs the tests ended, with status {self._server.wait()}")
        return TestRun(**json.loads(answer))

    def output_tail(self) -> str:
        """Return the last 30 lines that the last run printed."""
        return "\n".join(self._output.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])


@contextmanager
def copied_checkout(root: Path) -> Iterator[CheckoutCopy]:
    """Copy a checkout to a temporary folder, start the process that tests it, and end both, also after SIGTERM."""
    with interrupted_by_signals(), tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "checkout"
        at_top, below = shutil.ignore_patterns(*_LEFT_OUT, *_LEFT_OUT_AT_TOP), shutil.ignore_patterns(*_LEFT_OUT)
        shutil.copytree(root, copy, ignore=lambda at, names: (at_top if Path(at) == root else below)(at, names))
        if (copy / "envs").is_dir():
            (copy / "gspo_gym_envs").symlink_to("envs")  # before the checkout's own, which an installation points to
        server = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("mutants_server.py"))],
            cwd=copy,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(copy)},
            start_new_session=True,  # Ctrl-C is for this process alone, which then ends the other
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield CheckoutCopy(server, copy, Path(folder) / "output.txt")
        finally:
            server.terminate()
            server.communicate()


def try_mutants(copied: CheckoutCopy, path: Path, *, tests: Sequence[Path], count: int, seed: int) -> FileReport:
    """Try `count` mutants of one file of the copy, and put the file back.

    A test file runs for the mutants that survived those before it: nearly all die in the nearest one, and to collect
    the others would take most of the time.

    Raises:
        UsageError: there are no tests, or they fail without a mutant.
    """
    text = (copied.copy / path).read_text(encoding="utf-8")
    mutants = survivors = draw_mutants(text, path.as_posix(), count=count, seed=seed)
    ran: list[Path] = []
    num_timed_out = 0
    for test in tests:
        whole = copied.run([test], seconds=_BASELINE_SECONDS)
        if whole.status == _NO_TESTS:
            continue
        if whole.status:
            raise UsageError(f"{path}: {test} ends with status {whole.status} without a mutant\n{copied.output_tail()}")
        ran.append(test)
        limit = max(_TIMEOUT_FLOOR_SECONDS, TIMEOUT_FACTOR * whole.seconds)
        statuses = []
        for mutant in survivors:
            copied.write(path, mutant.text)
            statuses.append(copied.run([test], seconds=limit).status)
        copied.write(path, text)
        num_timed_out += statuses.count(TIMED_OUT)
        survivors = [mutant for mutant, status in zip(survivors, statuses, strict=True) if status == 0]
        if not survivors:
            break
    if not ran:
        raise UsageError(f"{path}: no test imports {module_name(path)} or is named after it; name some with --tests")
    return FileReport(path, tuple(ran), len(mutants), num_timed_out, tuple(survivors))


def render(reports: Sequence[FileReport]) -> Table:
    """Return the table of shares."""
    table = Table(Column("file", overflow="fold"))
    for heading in ("test files", "mutants", "died", "share", "by time-out"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        counts = map(str, (len(report.tests), report.num_mutants, report.num_died))
        table.add_row(str(report.path), *counts, f"{report.died_fraction:.2f}", str(report.num_timed_out))
    return table


def run_mutants(files: Sequence[str], *, count: int, seed: int, tests: Sequence[str], root: Path | None = None) -> int:
    """Try mutants of every file, print survivors as they are found and the shares at the end."""
    root = (root or Path.cwd()).resolve()
    paths = [_inside(file, root) for file in files]
    if not paths:
        raise UsageError("mutants: name the files to mutate, such as gspo_gym/learning/credit.py")
    named = [_inside(test, root) for test in tests]
    console = Console(soft_wrap=True)
    reports: list[FileReport] = []
    problems: list[str] = []
    with copied_checkout(root) as copied:
        for path in paths:
            started = time.monotonic()
            chosen = named or find_tests(path, root)
            try:
                report = try_mutants(copied, path, tests=chosen, count=count, seed=seed)
            except UsageError as error:  # the other files can be tried all the same
                problems.append(str(error))
                console.print(escape(str(error)), highlight=False)
                continue
            reports.append(report)
            share = f"{report.num_died} of {report.num_mutants} died, {report.num_timed_out} by time-out"
            console.print(f"{path}: {share}, {time.monotonic() - started:.0f} s; {' '.join(map(str, report.tests))}")
            for mutant in report.survivors:
                console.print(escape(f"  {path}:{mutant.line} {mutant.kind}\n{mutant.diff}"), highlight=False)
    console.print(render(reports))
    if problems:
        raise UsageError(f"{len(problems)} of {len(paths)} files were not tried: " + "; ".join(problems))
    return 0


def _inside(file: str, root: Path) -> Path:
    path = (root / file).resolve()
    if not path.is_file() or root not in path.parents or path.suffix != ".py":
        raise UsageError(f"{file}: expected a Python file below {root}, the checkout that the command runs in")
    return path.relative_to(root)
