"""CodeRepair: edit a small Python file until its tests pass; hidden tests decide.

The file is a real module (`library/`) with one or more bugs that a generator put in (`mutations.py`, `tasks.py`). What
the model writes runs in the sandbox only (`grading.py`). `README.md` beside this file has the rules, the rewards, a
transcript and the known cheats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gspo_gym.env.core import PolicyFactory, ToolEnv
from gspo_gym.env.data.rows import is_held_out_generator
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import ToolError, tool
from gspo_gym.env.workers.sandbox import require_confinement
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

from .grading import Verdicts, run_tests
from .policies import random_change, undo_the_bugs
from .tasks import CASES, HELD_OUT, TRAINING, Task, Test, draw_task

Style = Literal["terse", "verbose"]

TESTS_FILE = "tests.txt"
_MAX_SOURCE_CHARS = 20_000


class CodeRepair(ToolEnv):
    """A broken module, its tests, and the tools list_files, read_file, replace, write_file, run_tests and submit.

    `submit` terminates the episode; after `max_steps` turns without it, it is truncated. Held-out tasks (seeds below
    2**31) are of other modules than training tasks.

    Args:
        num_bugs: put into the module, 1 to 3.
        max_steps: turns before truncation; the reference needs 4.
        progress_weight: the potential of the shown tests that pass, >= 0: a run of them that passes more than the last
            earns the difference, one that passes fewer pays it, and the end pays all of it back.
        solved_reward: for submitting a module that passes every test, > 0; also the top return.
        error_penalty: subtracted in a turn with a failed call or without any, >= 0.
        style: "terse" or "verbose" (with instructions).
        wrapper: program and arguments that go before every run, such as a container, with {folder} for the folder.
        python: the interpreter inside the wrapper; None: this one.
        allow_unconfined: run what the model wrote even where nothing confines it
            (`gspo_gym.env.workers.confinement`): it can then read the solution, and do all that this user can.

    Reset options: `module`, to choose the module instead of drawing it.

    Attributes (read by the scripted policies):
        task: with its solution and hidden tests. path: the file that may be edited. source: its text now.
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {"reference": undo_the_bugs, "random": random_change}
    isolation = "process"  # it reads what comes out of a sandbox
    confinement = "run in a sandbox"

    def __init__(
        self,
        *,
        num_bugs: int = 1,
        max_steps: int = 12,
        progress_weight: float = 0.3,
        solved_reward: float = 1.0,
        error_penalty: float = 0.02,
        style: Style = "terse",
        wrapper: Sequence[str] = (),
        python: str | None = None,
        allow_unconfined: bool = False,
    ) -> None:
        if not 1 <= num_bugs <= 3 or max_steps < 1:
            raise ConfigError(
                f"CodeRepair: expected num_bugs from 1 to 3 and max_steps >= 1, got {num_bugs} and {max_steps}"
            )
        if not (solved_reward > 0 and progress_weight >= 0 and error_penalty >= 0):
            raise ConfigError(
                "CodeRepair: expected solved_reward > 0, progress_weight >= 0 and error_penalty >= 0, got "
                f"solved_reward={solved_reward}, progress_weight={progress_weight}, error_penalty={error_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"CodeRepair: expected style 'terse' or 'verbose', got {style!r}")
        self.num_bugs, self.max_steps, self.style = num_bugs, max_steps, style
        if not isinstance(allow_unconfined, bool):
            raise ConfigError(f"CodeRepair: expected allow_unconfined to be true or false, got {allow_unconfined!r}")
        if not wrapper:
            self.confinement = str(require_confinement("CodeRepair", allow_unconfined=allow_unconfined))
        else:
            self.confinement = f"confined by the wrapper {' '.join(wrapper)!r}, which nothing here looks at"
        self._sandbox: dict[str, Any] = {
            "wrapper": tuple(wrapper),
            "python": python,
            "allow_unconfined": allow_unconfined,
        }
        self._weights = {"solved": solved_reward, "progress": progress_weight, "error": -error_penalty}
        self.reward_range = (-error_penalty * max_steps, solved_reward)
        self.task = Task("", "", "", (), (), (), 0)
        self.source = ""
        self._potential = 0.0
        self._last_run: tuple[str, Verdicts] | None = None  # the text and what became of the shown tests
        self._has_passed_all = False

    @property
    def path(self) -> str:
        """The file that may be edited."""
        return f"{self.task.name}.py"

    # -- tools -------------------------------------------------------------------------------------------------------

    @tool
    def list_files(self) -> str:
        """Names of the files."""
        return f"{self.path}, {TESTS_FILE} (read-only)"

    @tool
    def read_file(self, path: str) -> str:
        """Show a file."""
        if path not in (self.path, TESTS_FILE):
            raise ToolError(f"no such file: {path}")
        return self.source if path == self.path else "\n".join(test.text for test in self.task.visible)

    @tool
    def replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once."""
        self._require_writable(path)
        if not old or (count := self.source.count(old)) == 0:
            raise ToolError("old: there is no such text in the file")
        if count > 1:
            raise ToolError(f"old: the text occurs {count} times; give more lines around it")
        return self._written(self.source.replace(old, new))

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Write the whole file anew."""
        self._require_writable(path)
        return self._written(text)

    @tool
    def run_tests(self) -> str:
        """Run the tests of tests.txt."""
        if self._last_run is None or self._last_run[0] != self.source:  # the same text is not run twice
            self._last_run = self.source, self._run(self.task.visible)
        verdicts = self._last_run[1]
        potential = self._potential_of(verdicts)
        if potential != self._potential:
            self.add_reward(Reward.weighted({"progress": potential - self._potential}, self._weights))
            self._potential = potential
        if all(verdicts.passed) and not self._has_passed_all:
            self._has_passed_all = True
            self.add_reward(Reward({}, events=("tests_passed",)))
        return verdicts.text

    @tool
    def submit(self) -> str:
        """Hand the file in. Hidden tests decide."""
        tests = (*self.task.visible, *self.task.hidden)
        passed = self._run(tests).passed
        is_solved = all(passed)
        events = ("solved",) if is_solved else ()
        self._pay_back()
        self.finish(Reward.weighted({"solved": float(is_solved)}, self._weights, events=events, success=is_solved))
        return "all tests pass" if is_solved else f"wrong: {sum(passed)} of {len(tests)} tests pass"

    # -- the episode -------------------------------------------------------------------------------------------------

    def start(self, options: Mapping[str, Any]) -> str:
        names = self._modules_from(options)
        self.task = draw_task(self.np_random, names, num_bugs=self.num_bugs)
        self.source = self.task.source
        self._potential, self._last_run, self._has_passed_all = 0.0, None, False
        failing = len(self.task.visible) - self.task.num_passing
        text = f"{self.path}: {failing} of {len(self.task.visible)} tests fail. Repair it."
        if self.style == "terse":
            return text
        return (
            f"{text}\nLook at {self.path} and {TESTS_FILE} with the tools, edit {self.path}, run the tests, and call "
            "`submit` once when it is right: hidden tests of the same functions decide. "
            f"You have {self.max_steps} turns."
        )

    def no_tool_call(self, text: str) -> str:
        return "call a tool" if self.style == "terse" else str(super().no_tool_call(text))

    def end_turn(self) -> None:
        if self.num_failed_calls or not self.num_calls:
            self.add_reward(Reward.weighted({"error": 1.0}, self._weights))
        if self.num_turns >= self.max_steps:
            self._pay_back()
            self.finish(Reward({}, success=False), truncated=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _run(self, tests: Sequence[Test]) -> Verdicts:
        return run_tests(self.task.name, self.source, tests, **self._sandbox)

    def _potential_of(self, verdicts: Verdicts) -> float:
        """From 0 (no better than at the start) to 1 (every shown test passes)."""
        at_start = self.task.num_passing
        return max(0.0, (sum(verdicts.passed) - at_start) / (len(verdicts.passed) - at_start))

    def _pay_back(self) -> None:
        """The end of an episode has no potential, so progress adds up to nothing: only the hidden outcome counts."""
        if self._potential:
            self.add_reward(Reward.weighted({"progress": -self._potential}, self._weights))
            self._potential = 0.0

    def _require_writable(self, path: str) -> None:
        if path == TESTS_FILE:
            raise ToolError(f"{TESTS_FILE} is read-only")
        if path != self.path:
            raise ToolError(f"no such file: {path}")

    def _written(self, text: str) -> str:
        if len(text) > _MAX_SOURCE_CHARS:
            raise ToolError(f"the file would have {len(text)} characters, {_MAX_SOURCE_CHARS} are allowed")
        self.source = text
        return "written"

    def _modules_from(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        unknown = sorted(set(options) - {"module"})
        if unknown:
            raise ConfigError(f"CodeRepair.reset: unknown options {unknown}; known: module")
        if "module" in options:
            name = options["module"]
            if name not in CASES:
                raise UnknownNameError(f"CodeRepair.reset: unknown module {name!r}; {nearest_name(str(name), CASES)}")
            return (name,)
        return HELD_OUT if is_held_out_generator(self.np_random) else TRAINING
