"""How many small faults the tests notice: `python -m benchmarks mutants FILE...`, in the root of a checkout.

Every mutant is one small change of a file (see `mutations`), written into a temporary copy of the checkout, where the
tests of that file run until the first failure, one test file after another. A mutant dies if a test fails, if nothing
can be imported, or if the tests take longer than `TIMEOUT_FACTOR` times what they take without it. Those that only a
time-out ended are counted apart: that proves less than a failure. Times in which no core was free are not counted.

The tests of `gspo_gym/room/name.py` are, in this order: the doctests of the file; the test files in a folder `room`
which are called `test_name.py` or `test_name_*.py`, and the golden cases that import the module, then those that import
or name it, the fewest other modules first; such test files elsewhere. The same of the modules that import the module
follow, then of those that import these, until the processor time for the file is spent: then no further test file
begins. Left out are tests that need other software, those that the expression for pytest's `-m` leaves out, and test
files that fail without a mutant.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from benchmarks.mutations import Mutant, draw_mutants
from gspo_gym.cli.command_line import interrupted_by_signals
from gspo_gym.errors import UsageError
from gspo_gym.seeding import child_seed

TIMEOUT_FACTOR = 5.0
_TIMEOUT_FLOOR_SECONDS = 20.0
_BASELINE_SECONDS = 300.0
_GRACE_SECONDS = 300.0  # removing the copies takes long on a busy machine
TIMED_OUT = 124
_NO_TESTS = 5  # pytest's exit status where it collected none
_MIN_SAMPLE_LINES = 80
QUICK = "not slow and not nightly"
PRELOADED = ("torch", "transformers", "pydantic", "numpy", "pytest")
# Bytecode is written, for all but one file of ours are the same in every run.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": ""}
_OTHER_SOFTWARE = ("browser", "cluster", "foreign", "vllm")  # folders of tests that have an environment of their own
# As an editable installation does: nothing else is found in the checkout, and the path of a file is its own.
_FINDER = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = {{"gspo_gym": "gspo_gym", "gspo_gym_envs": "envs"}}.get(name)
        return folder and spec_from_file_location(name, f"{root}/{{folder}}/__init__.py")

sys.meta_path.append(Finder)
"""
_COMMAND = "#!{python}\nimport sys\nfrom gspo_gym.cli.main import main\nsys.exit(main())\n"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is tried of every file.

    Attributes:
        count: mutants of a file.
        seed: which ones.
        seconds: processor time after which no further test file begins, for each file.
        expression: pytest's `-m`, of the tests that run; empty: all.
        tests: test files that run instead of the nearest ones, relative to the checkout.
    """

    count: int = 20
    seed: int = 0
    seconds: float = 60.0
    expression: str = QUICK
    tests: tuple[Path, ...] = ()


@dataclass(slots=True)
class Trial:
    """A mutant and the test file which noticed it, if one did."""

    mutant: Mutant
    noticed_by: Path | None = None
    timed_out: bool = False


@dataclass(slots=True)
class FileReport:
    """What is known of one file's mutants; it is filled while tests run.

    Attributes:
        path: the file, relative to the checkout.
        trials: its mutants.
        tests: the test files that ran, relative to the checkout.
        skipped: the test files that cannot run without a mutant, and why.
        seconds: processor time of all runs.
        is_complete: nothing is left to try.
    """

    path: Path
    trials: list[Trial] = field(default_factory=list)
    tests: list[Path] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    is_complete: bool = False

    @property
    def survivors(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.noticed_by is None]

    @property
    def num_died(self) -> int:
        return len(self.trials) - len(self.survivors)

    @property
    def num_timed_out(self) -> int:
        return sum(trial.timed_out for trial in self.trials)

    def __str__(self) -> str:
        ending = "" if self.is_complete else ", stopped"
        lines = [
            f"{self.path}: {self.num_died} of {len(self.trials)} died, {self.num_timed_out} by time-out, "
            f"{self.seconds:.0f} s{ending}; {' '.join(map(str, self.tests)) or 'no test ran: name some with --tests'}"
        ]
        lines += [f"  skipped {test}, which {reason}" for test, reason in self.skipped.items()]
        lines += [f"  {self.path}:{t.mutant.line} {t.mutant.kind}\n{t.mutant.diff}" for t in self.survivors]
        return "\n".join(lines)

    def show(self, kept: Path | None) -> None:
        """Print what is known, and append it to `kept` as a line of JSON."""
        print(self, flush=True)
        if kept is not None:
            values = asdict(self)
            for trial in values["trials"]:
                del trial["mutant"]["text"]  # the seed draws it again
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values, default=str) + "\n")


def find_tests(path: Path, root: Path) -> Iterator[Path]:
    """Yield the test files of the module at `path` by the rule above; both paths and results are relative to `root`."""
    if ">>> " in (root / path).read_text(encoding="utf-8"):
        yield path
    imports = _imports(root)
    modules, seen = {path}, {path}
    while modules:
        imported = {module_name(module) for module in modules}
        importers = {file for file, names in imports.items() if not names.isdisjoint(imported)}
        ranks = []
        for test in (file for file in imports if _is_test(file) and file not in seen):
            namesakes = [module for module in modules if f"{test.stem}_".startswith(f"test_{module.stem}_")]
            is_golden = "golden" in test.parts and test in importers  # small arithmetic: the quickest to find a fault
            # A file of that name in another room's folder mirrors another module, unless it imports this one.
            is_mirror = is_golden or any(test in importers or _is_near(module, test) for module in namesakes)
            if is_mirror or test in importers:
                is_near = is_golden or _is_near(path, test)
                is_exact = is_golden or any(test.stem == f"test_{module.stem}" for module in namesakes)
                ranks.append((not is_near, not is_mirror, not is_exact, len(imports[test]), test))
        yield from (test for *_, test in sorted(ranks))
        modules = {file for file in importers - seen if file.parts[0] != "tests"}
        seen |= modules | {test for *_, test in ranks}


def _is_near(module: Path, test: Path) -> bool:
    return module.parent.name in test.parent.parts


def _is_test(file: Path) -> bool:
    return file.parts[0] == "tests" and file.parts[1] not in _OTHER_SOFTWARE and file.name.startswith("test_")


def module_name(path: Path) -> str:
    """Return the import name of the file at `path`; `envs/` is the folder of `gspo_gym_envs`.

    >>> module_name(Path("envs/wordle/env.py"))
    'gspo_gym_envs.wordle.env'
    """
    parts = path.with_suffix("").parts
    parts = ("gspo_gym_envs", *parts[1:]) if parts[0] == "envs" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports(root: Path) -> dict[Path, set[str]]:
    """Our modules and packages that each file of a checkout imports or, to import or run them later, names."""
    found: dict[Path, set[str]] = {}
    for file in sorted(file for folder in ("gspo_gym", "envs", "tests") for file in (root / folder).rglob("*.py")):
        path = file.relative_to(root)
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower())}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names |= set(re.findall(r"\bgspo_gym(?:_envs)?\.[\w.]*\w", node.value))
                names |= {module_name(path.with_name(script)) for script in re.findall(r"^\w+\.py$", node.value)}
        whole = [name.split(".") for name in names if name.startswith("gspo_gym")]
        found[path] = {".".join(parts[: i + 1]) for parts in whole for i in range(len(parts))}
    return found


@dataclass(frozen=True, slots=True)
class RunResult:
    """How tests ended: pytest's exit status, or `TIMED_OUT`; the seconds and the processor time that they took."""

    status: int
    seconds: float
    processor_seconds: float


class CheckoutCopy:
    """A copy of what git does not ignore in a checkout, which has all that tests see, and the process that runs them.

    Args:
        root: the checkout.
        folder: an empty folder for the copy and for what tests write.
        expression: pytest's `-m`, of the tests that run; empty: all.
    """

    def __init__(self, root: Path, folder: Path, expression: str = QUICK) -> None:
        self.copy = folder / "checkout"
        self._output = folder / "output.txt"
        self._expression = expression
        self._server: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._num_written = 0
        self._started = int(time.time())
        _copy_repository(root, self.copy)
        _install(self.copy)

    def write(self, path: Path, text: str) -> None:
        """Replace a file of the copy. Its time is new every time, for by time and size Python finds old bytecode."""
        self._num_written += 1
        (self.copy / path).write_text(text, encoding="utf-8")
        os.utime(self.copy / path, (self._started + self._num_written,) * 2)

    def run(self, test: Path, *, seconds: float) -> RunResult:
        """Run a test file until the first failure, for at most `seconds`.

        If the process that runs tests ends meanwhile, that is a failure, and the next run has a new one.
        """
        options = ["-q", "-x", "-m", self._expression, "-p", "no:cacheprovider", f"--basetemp={self._output}.tmp"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        request = {"arguments": [*options, str(test)], "seconds": seconds, "output": str(self._output)}
        self._output.write_text("")
        server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            if self._is_closed:
                raise UsageError("stopped")
            self._end()
            return RunResult(server.returncode, 0.0, 0.0)
        return RunResult(**json.loads(answer))

    def reason(self, run: RunResult) -> str:
        """Say how the last run failed."""
        lines = [line for line in self._output.read_text(encoding="utf-8", errors="replace").splitlines() if line]
        failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), (lines or [""])[-1])
        return f"ends with status {run.status} after {run.seconds:.0f} s without a mutant: {failed}"

    def _start(self) -> subprocess.Popen[str]:
        if self._is_closed:
            raise UsageError("stopped")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        script = Path(__file__).with_name("mutants_server.py")
        self._server = subprocess.Popen(
            [self.copy / ".venv/bin/python", "-P", script, *PRELOADED],
            cwd=self.copy,
            env={**environment, **_ENVIRONMENT},
            start_new_session=True,  # Ctrl-C is for this process alone, which then ends the other
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self._server

    def close(self) -> None:
        """End the process and what it runs; a thread that waits for it gets a UsageError."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with suppress(BrokenPipeError), server:  # its pipes are closed, and it is waited for
                server.terminate()


def _copy_repository(root: Path, copy: Path) -> None:
    copy.mkdir(parents=True)
    git = ["git", "-C", str(copy), "-c", "user.name=mutants", "-c", "user.email=", "-c", "commit.gpgsign=false"]
    of_root = [f"--git-dir={copy / '.git'}", f"--work-tree={root}"]
    committed = ["commit", "--quiet", "--no-verify", "--allow-empty", "--message=copy"]
    for command in (["init", "--quiet"], [*of_root, "add", "--all"], committed, ["reset", "--quiet", "--hard"]):
        subprocess.run([*git, *command], check=True)


def _install(copy: Path) -> None:
    """Give a copy a `.venv` that has the packages of this interpreter and finds ours in the copy."""
    venv.create(copy / ".venv", symlinks=True)
    (site,) = copy.glob(".venv/lib/python*/site-packages")
    for folder in (Path(folder) for folder in sys.path if folder.endswith("-packages")):
        for entry in folder.iterdir():
            if not entry.name.startswith("__editable__") and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    (site / "_copied_checkout.py").write_text(_FINDER.format(root=copy))
    (site / "_copied_checkout.pth").write_text("import _copied_checkout\n")
    command = copy / ".venv/bin/gspo-gym"
    command.write_text(_COMMAND.format(python=copy / ".venv/bin/python"))
    command.chmod(0o755)


def try_mutants(copied: CheckoutCopy, report: FileReport, effort: Effort) -> None:
    """Try mutants of one file of the copy, fill its report, and put the file back.

    A test file runs for the mutants that survived those before it: nearly all die in the nearest one, and to collect
    the others would take most of the time.
    """
    path = report.path
    text = (copied.copy / path).read_text(encoding="utf-8")
    drawn = draw_mutants(text, path.as_posix(), count=effort.count, seed=effort.seed)
    report.trials = [Trial(mutant) for mutant in drawn]
    try:
        for test in effort.tests or find_tests(path, copied.copy):
            if not report.survivors or report.seconds >= effort.seconds:
                break
            whole = copied.run(test, seconds=_BASELINE_SECONDS)
            report.seconds += whole.processor_seconds
            if whole.status == _NO_TESTS:
                continue
            if whole.status:
                report.skipped[str(test)] = copied.reason(whole)
                continue
            report.tests.append(test)
            for trial in report.survivors:
                copied.write(path, trial.mutant.text)
                run = copied.run(test, seconds=max(_TIMEOUT_FLOOR_SECONDS, TIMEOUT_FACTOR * whole.seconds))
                report.seconds += run.processor_seconds
                if run.status:
                    trial.noticed_by, trial.timed_out = test, run.status == TIMED_OUT
            copied.write(path, text)
        report.is_complete = True
    finally:
        copied.write(path, text)


def run_mutants(
    paths: Sequence[Path], effort: Effort, *, root: Path, processes: int = 1, kept: Path | None = None
) -> int:
    """Try mutants of every file; return 1 if there is a file of which no test could run.

    The result of a file is printed, and appended to `kept` as a line of JSON, as soon as it is known; of files whose
    trials were interrupted, what is known then.
    """
    reports = [FileReport(path) for path in paths]
    copies: SimpleQueue[CheckoutCopy] = SimpleQueue()

    def try_in_a_copy(report: FileReport) -> None:
        copied = copies.get()
        try:
            try_mutants(copied, report, effort)
        finally:
            copies.put(copied)

    with (
        interrupted_by_signals(_GRACE_SECONDS),
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(processes) as pool,
        ExitStack() as servers,  # ended before the threads, which wait for them
    ):
        for i in range(processes):
            copied = CheckoutCopy(root, Path(folder) / str(i), effort.expression)
            copies.put(servers.enter_context(closing(copied)))
        pending = {pool.submit(try_in_a_copy, report): report for report in reports}
        try:
            for future in as_completed(list(pending)):
                pending.pop(future).show(kept)
                future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for report in pending.values():
                if report.trials:
                    report.show(kept)
            num, num_died = (sum(n) for n in zip(*((len(r.trials), r.num_died) for r in reports), strict=True))
            print(f"all files: {num_died} of {num} died, {sum(r.num_timed_out for r in reports)} by time-out")
    return 0 if all(report.tests or not report.trials for report in reports) else 1


def choose_files(files: Sequence[str], root: Path, *, sample: int, seed: int) -> list[Path]:
    """Return the files that are named, and a sample of the modules over 80 lines, all relative to `root`.

    A module that comes or goes does not change which of the others are drawn first.
    """
    named = [inside(file, root) for file in files]
    modules = [path.relative_to(root) for path in (root / "gspo_gym").rglob("*.py") if path.name != "__init__.py"]
    long = [path for path in modules if (root / path).read_bytes().count(b"\n") > _MIN_SAMPLE_LINES]
    drawn = sorted(long, key=lambda path: child_seed(seed, "mutants", path.as_posix()))[:sample]
    if not named + drawn:
        raise UsageError("mutants: name the files to mutate, such as gspo_gym/learning/credit.py, or draw a --sample")
    print(f"{len(named + drawn)} files: {' '.join(map(str, named + drawn))}")
    return named + drawn


def inside(file: str, root: Path) -> Path:
    """Return the path of a Python file relative to `root`.

    Raises:
        UsageError: it is none, or not below `root`.
    """
    path = (root / file).resolve()
    if not path.is_file() or root not in path.parents or path.suffix != ".py":
        raise UsageError(f"{file}: expected a Python file below {root}, the checkout whose tests run")
    return path.relative_to(root)
