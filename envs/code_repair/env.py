"""CodeRepair: edit a small Python file until its tests pass; hidden tests decide.

The file is a real module (`library/`) with one or more bugs that a generator put in (`mutations.py`, `tasks.py`). What
the model writes runs in the sandbox only (`grading.py`). `README.md` beside this file has the rules, the rewards, a
transcript and the known cheats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gspo_gym_envs.code_repair.sandbox.run import require_confinement

from gspo_gym.env.core import PolicyFactory, SmallTask, ToolEnv
from gspo_gym.env.data.rows import is_held_out_generator
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import Tool, ToolError, tool
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

from .grading import Verdicts, run_own_tests, run_tests
from .policies import random_change, right_kind, undo_the_bugs
from .tasks import CASES, HELD_OUT, TRAINING, Task, Test, draw_task
from .tiny import FUNCTIONS, draw_tiny_task, operator_in

Level = Literal["full", "tiny"]
Style = Literal["terse", "verbose"]

LEVELS: tuple[Level, ...] = ("full", "tiny")
TESTS_FILE = "tests.txt"
_MAX_SOURCE_CHARS = 20_000


class CodeRepair(ToolEnv):
    """A broken module, its tests, and the tools list_files, read_file, replace, write_file, run_tests and submit.

    `submit` terminates the episode; after `max_steps` turns without it, it is truncated. Held-out tasks (seeds below
    2**31) are of other modules than training tasks, at level tiny of other bugs.

    Args:
        level: "full" (modules of the library) or "tiny" (a function of two lines with a wrong operator, which is shown
            at once; for byte-level models).
        num_bugs: put into the module, 1 to 3; 1 at level tiny.
        max_steps: turns before truncation; the reference needs 4, at level tiny 1.
        tools: names of the tools to offer: submit and one that edits among them, or fix; None: all but fix, at level
            tiny fix alone. Fewer make the prompt shorter. Only level tiny has fix, which replaces the wrong operator of
            the original file and submits.
        progress_weight: the potential of the shown tests that pass, >= 0: a run of them that passes more than the last
            earns the difference, one that passes fewer pays it, and the end pays all of it back.
        solved_reward: for submitting a module that passes every test, > 0; also the top return.
        error_penalty: subtracted in a turn with a failed call or without any, >= 0.
        style: "verbose" (with instructions) or "terse".
        wrapper: program and arguments that go before every run, such as a container, with {folder} for the folder.
        python: the interpreter inside the wrapper; None: this one.
        allow_unconfined: run what the model wrote even where nothing confines it (`sandbox/confinement.py`): it can
            then read the solution, and do all that this user can.

    Reset options: `module`, to choose the module instead of drawing it; at level tiny `function`.

    Attributes (read by the scripted policies):
        task: with its solution and hidden tests. path: the file that may be edited. source: its text now.
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {
        "reference": undo_the_bugs,
        "random": random_change,
        "right_kind": right_kind,
    }
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {"level": "tiny", "tools": ["fix"], "max_steps": 1, "error_penalty": 0.1},
        policy="right_kind",
        style={"style": "terse"},
    )
    isolation = "process"  # it reads what comes out of a sandbox
    confinement = "run in a sandbox"

    def __init__(
        self,
        *,
        level: Level = "full",
        num_bugs: int = 1,
        max_steps: int = 12,
        tools: Sequence[str] | None = None,
        progress_weight: float = 0.3,
        solved_reward: float = 1.0,
        error_penalty: float = 0.02,
        style: Style = "verbose",
        wrapper: Sequence[str] = (),
        python: str | None = None,
        allow_unconfined: bool = False,
    ) -> None:
        if level not in LEVELS:
            raise UnknownNameError(f"CodeRepair: unknown level {level!r}; {nearest_name(str(level), LEVELS)}")
        if level == "tiny" and num_bugs != 1:
            raise ConfigError(f"CodeRepair: expected num_bugs=1 at level 'tiny', got {num_bugs}")
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
        self.level, self.num_bugs, self.max_steps, self.style = level, num_bugs, max_steps, style
        self._offered_tools = self._checked_tools(tools)
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
        return self._hand_in()

    @tool
    def fix(self, new: str) -> str:
        """Replace the wrong operator and submit."""
        self._written(self.task.source.replace(operator_in(self.task.source), new))
        return self._hand_in()

    def _hand_in(self) -> str:
        tests = (*self.task.visible, *self.task.hidden)
        passed = self._run(tests).passed
        is_solved = all(passed)
        events = ("solved",) if is_solved else ()
        self._pay_back()
        self.finish(Reward.weighted({"solved": float(is_solved)}, self._weights, events=events, success=is_solved))
        return "all tests pass" if is_solved else f"wrong: {sum(passed)} of {len(tests)} tests pass"

    # -- the episode -------------------------------------------------------------------------------------------------

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(each for each in super().tools if each.name in self._offered_tools)

    def start(self, options: Mapping[str, Any]) -> str:
        chosen = self._chosen(options)
        is_held_out = is_held_out_generator(self.np_random)
        if self.level == "tiny":
            names = (chosen,) if chosen else FUNCTIONS
            self.task = draw_tiny_task(self.np_random, names, is_held_out=is_held_out)
        else:
            names = (chosen,) if chosen else HELD_OUT if is_held_out else TRAINING
            self.task = draw_task(self.np_random, names, num_bugs=self.num_bugs)
        self.source = self.task.source
        self._potential, self._last_run, self._has_passed_all = 0.0, None, False
        return self._tiny_opening() if self.level == "tiny" else self._full_opening()

    def _tiny_opening(self) -> str:
        [shown] = self.task.visible
        text = f"{self.path}:\n{self.source}fails {shown.text}"
        if self.style == "terse":
            return text
        return (
            f"{text}\nOne operator or function in {self.path} is wrong: its name says what it should return, and the "
            "test above fails. Repair it with the tools; hidden tests decide. "
            f"You have {self.max_steps} turns."
        )

    def _full_opening(self) -> str:
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
        if self.source in self.task.own_texts:  # not the model's code, but ours: it needs no sandbox
            return run_own_tests(self.source, tests)
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

    def _chosen(self, options: Mapping[str, Any]) -> str | None:
        """The module or function that the options name, None if they name none."""
        key, known = ("function", FUNCTIONS) if self.level == "tiny" else ("module", tuple(CASES))
        unknown = sorted(set(options) - {key})
        if unknown:
            raise ConfigError(f"CodeRepair.reset: unknown options {unknown}; known: {key}")
        name = options.get(key)
        if key in options and name not in known:
            raise UnknownNameError(f"CodeRepair.reset: unknown {key} {name!r}; {nearest_name(str(name), known)}")
        return name

    def _checked_tools(self, names: Sequence[str] | None) -> frozenset[str]:
        is_tiny = self.level == "tiny"
        known = [each.name for each in super().tools if is_tiny or each.name != "fix"]
        if names is None:
            return frozenset(("fix",) if is_tiny else known)
        for name in names:
            if name not in known:
                raise UnknownNameError(f"CodeRepair: unknown tool {name!r}; {nearest_name(name, known)}")
        if "fix" not in names and ("submit" not in names or not {"replace", "write_file"} & set(names)):
            raise ConfigError(
                "CodeRepair: expected 'submit' and 'replace' or 'write_file' among the tools (at level 'tiny' 'fix' is "
                f"enough), got {list(names)}"
            )
        return frozenset(names)
