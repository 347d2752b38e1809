"""Runs the model's module in the sandbox and compares its answers here, where the expected ones are.

The child (`runner.py`) is told the calls only. Whatever the module does to its process, it can only answer wrongly or
not at all; it can patch what it likes, exit, or print "OK", and none of that is a right value.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_gym_envs.code_repair.sandbox.confinement import interpreter
from gspo_gym_envs.code_repair.sandbox.run import SandboxLimits, SandboxResult, run_sandboxed

from .runner import __file__ as _runner_file
from .syntax import literal
from .tasks import Test, is_right, shown_answer, shown_call
from .trusted import Answer, answers_of

LIMITS = SandboxLimits(
    max_seconds=15.0,  # the CPU seconds decide; a busy machine must not
    max_cpu_seconds=2,
    max_memory_bytes=256 * 2**20,
    max_file_bytes=2**20,
    max_processes=1,
    max_output_bytes=2**18,
)
_RUNNER = Path(_runner_file).read_text(encoding="utf-8")
_MAX_LINE = 200  # characters of one failed test that are shown
_MAX_FAILURES = 5  # failed tests that are shown
_MAX_PRINTED = 300  # characters of what the module printed


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What became of the tests.

    Attributes:
        passed: one a test, in order.
        failures: the failed ones, one line each, for the model.
        printed: what the module wrote to its output, its beginning.
    """

    passed: tuple[bool, ...]
    failures: tuple[str, ...]
    printed: str

    @property
    def text(self) -> str:
        """For the model: how many pass, the first failures, what was printed."""
        lines = [f"{sum(self.passed)} of {len(self.passed)} tests pass", *self.failures[:_MAX_FAILURES]]
        if len(self.failures) > _MAX_FAILURES:
            lines.append(f"... and {len(self.failures) - _MAX_FAILURES} more")
        if self.printed:
            lines.append(f"printed: {self.printed}")
        return "\n".join(lines)


def run_tests(
    name: str,
    source: str,
    tests: Sequence[Test],
    *,
    wrapper: Sequence[str] = (),
    python: str | None = None,
    allow_unconfined: bool = False,
) -> Verdicts:
    """Run the tests on a module's text; every test that is not answered rightly has failed.

    Args:
        wrapper: put in front of the program, such as a container (`sandbox/run.py`).
        python: the interpreter, where the wrapper has another than this one.
        allow_unconfined: run it also where nothing confines it.

    Raises:
        ConfigError: nothing here confines it.
        EnvError: the sandbox cannot be started.
    """
    nonce = secrets.token_hex(8)  # tells the answers from what the module writes to the same output
    result = run_sandboxed(
        [python or interpreter(), "-I", "-S", "-B", "-u", "-X", "utf8", "run_calls.py"],
        files={"run_calls.py": _RUNNER, f"{name}.py": source},
        stdin=repr((nonce, name, [test.call for test in tests])),
        limits=LIMITS,
        wrapper=wrapper,
        allow_unconfined=allow_unconfined,
    )
    answers, problem = _answers(result, nonce, len(tests))
    printed = _cut(result.stderr.strip(), _MAX_PRINTED) if result.ok else ""
    return _verdicts(tests, answers, problem=problem, printed=printed)


def run_own_tests(source: str, tests: Sequence[Test]) -> Verdicts:
    """Return the verdicts of `run_tests` without a sandbox, for a text that this package wrote, byte for byte."""
    answers = answers_of(source, [test.call for test in tests])
    assert answers is not None, "a text of our own loads and ends"
    return _verdicts(tests, dict(enumerate(answers)), problem="", printed="")


def _verdicts(tests: Sequence[Test], answers: Mapping[int, Answer], *, problem: str, printed: str) -> Verdicts:
    passed, failures = [], []
    for index, test in enumerate(tests):
        answer = answers.get(index)
        passed.append(answer is not None and is_right(answer, test))
        if not passed[-1]:
            got = shown_answer(answer) if answer is not None else problem
            failures.append(
                _cut(f"{shown_call(test.call)}: expected {shown_answer(test.expected)}, got {got}", _MAX_LINE)
            )
    if not answers:
        failures = [problem]
    return Verdicts(tuple(passed), tuple(failures), printed)


def _answers(result: SandboxResult, nonce: str, num_tests: int) -> tuple[dict[int, Answer], str]:
    """The answers by the number of their call, and why there are no more."""
    answers: dict[int, Answer] = {}
    numbers = {str(number): number for number in range(num_tests)}
    problem = "no answer: the program ended"
    if result.timed_out or result.signal is not None:
        problem = "no answer: it took too long"
    for line in result.stdout.split("\n"):
        marked, _, rest = line.partition(" ")
        index, _, text = rest.partition(" ")
        if marked != nonce:
            continue
        try:
            value = literal(text)
            repr(value)  # what reads 0xfff... need not be able to write it: such a number has too many digits
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue  # cut by the limit of the output, or not written by the runner
        if index == "import":
            problem = f"the module cannot be imported: {_cut(str(value), _MAX_LINE)}"
        elif index in numbers and isinstance(value, tuple) and len(value) == 2:
            answers[numbers[index]] = value
    return answers, problem


def _cut(text: str, length: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates are no text for a tokenizer
    return text if len(text) <= length else text[: length - 3] + "..."
