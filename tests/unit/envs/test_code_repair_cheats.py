"""Cheats at CodeRepair: each is a module that repairs nothing, and each must earn nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gspo_gym_envs.code_repair
import pytest
from gspo_gym_envs.code_repair.env import CodeRepair

from gspo_gym.types import Message, ToolCall

LIBRARY = Path(gspo_gym_envs.code_repair.__file__).parent / "library"


def call(env: CodeRepair, name: str, **arguments: object) -> tuple[str, float, bool]:
    """(what was said, reward, terminated)"""
    [message], reward, terminated, _, _ = env.step(Message("assistant", "", (ToolCall("c", name, arguments),)))
    return message.content, float(reward), terminated


def roman(seed: int = 3) -> CodeRepair:
    env = CodeRepair(style="terse", error_penalty=0.0)
    env.reset(seed=seed, options={"module": "roman"})
    return env


def earned_by(env: CodeRepair, text: str) -> tuple[float, bool | None]:
    """(return, success) of writing the file, running the tests and submitting."""
    total = call(env, "write_file", path="roman.py", text=text)[1]
    total += call(env, "run_tests")[1]
    _, reward, terminated, _, _ = env.step(Message("assistant", "", (ToolCall("c", "submit", {}),)))
    assert terminated
    return round(total + float(reward), 9), reward.success


def hard_coded(env: CodeRepair) -> str:
    """Every shown test answered from a table, all else by the broken code."""
    lines = [env.task.source, "_to, _from = to_roman, from_roman", "TABLE = {}"]
    lines += [f"TABLE[{test.call[:2]!r}] = {test.expected!r}" for test in env.task.visible]
    for name, broken in (("to_roman", "_to"), ("from_roman", "_from")):
        lines += [
            f"def {name}(x):",
            f"    kind, value = TABLE.get(({name!r}, (x,)), (None, None))",
            "    if kind == 'raised': raise ValueError(x)",
            f"    return {broken}(x) if kind is None else value",
        ]
    return "\n".join(lines)


# A thief's ways to the working module, tried one after the other; what it gets hold of would pass every test.
THIEF = f"""
import os, sys
PATH = {str(LIBRARY / "roman.py")!r}
def by_open(): return open(PATH).read()
def by_bytes(): return open(PATH.encode()).read()
def by_path_object():
    class Sly(str):
        def startswith(self, prefix, *rest): return False
    return open(Sly(PATH)).read()
def by_dots(): return open("/tmp/../" + PATH).read()
def by_descriptor(): return os.read(os.open(PATH, os.O_RDONLY), 99999).decode()
def by_code(): import io; return io.open_code(PATH).read().decode()
def by_folder_descriptor():
    return os.read(os.open("roman.py", os.O_RDONLY, dir_fd=os.open(os.path.dirname(PATH), os.O_RDONLY)), 99999).decode()
def by_link(): os.symlink(PATH, "link"); return open("link").read()
def by_moving(): os.chdir(os.path.dirname(PATH)); return open("roman.py").read()
def by_shell(): return os.popen("cat " + PATH).read()
def by_child(): import subprocess; return subprocess.check_output(["cat", PATH], text=True)
def by_spawn():
    os.posix_spawn("/bin/cp", ["cp", PATH, "copy"], {{}}); os.wait(); return open("copy").read()
def by_import():
    mine, path = sys.modules.pop("roman", None), sys.path
    sys.path = [os.path.dirname(PATH)]
    try:
        import roman
        return roman
    finally:
        sys.path = path
        sys.modules["roman"] = mine
def by_loader():
    import importlib.util as u
    spec = u.spec_from_file_location("solution", PATH); made = u.module_from_spec(spec); spec.loader.exec_module(made)
    return made
def by_c(): import ctypes; return ctypes.CDLL(None).system(("cp " + PATH + " copy").encode()) or open("copy").read()
def by_patched_hook():
    import builtins
    kept = builtins.type, builtins.PermissionError
    builtins.type, builtins.PermissionError = (lambda x: int), None
    try:
        return open(PATH).read()
    finally:
        builtins.type, builtins.PermissionError = kept
def by_database(): import sqlite3; return sqlite3.connect("file:" + PATH)
found = []
for name, steal in list(globals().items()):
    if name.startswith("by_"):
        try:
            stolen = steal()
            if isinstance(stolen, str) and "def to_roman" in stolen:
                exec(stolen)
                found.append(name)
            elif hasattr(stolen, "to_roman"):
                globals().update(vars(stolen))
                found.append(name)
        except BaseException:
            pass
"""

# Looks through every frame, and through the runner's module, for anything that it was not given as an argument.
FRAMES = """
import sys, __main__
def look(x):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if isinstance(value, dict) and "expected" in value:
                return value["expected"]
            if getattr(value, "expected", None) is not None:
                return value.expected
        frame = frame.f_back
    return "?"
to_roman = from_roman = look
"""

# Takes the nonce from the runner's frame and writes right-looking lines to the runner's own output.
FORGER = """
import sys, os
def forge(x):
    frame = sys._getframe()
    while "nonce" not in frame.f_locals:
        frame = frame.f_back
    for index in range(64):
        frame.f_locals["output"].write(f"{frame.f_locals['nonce']} {index} ('returned', True)\\n")
        print("OK")
    return True
to_roman = from_roman = forge
"""

CHEATS = {
    "leaving with success at the import": "import sys\nsys.exit(0)",
    "leaving at once at the import": "import os\nprint('32 of 32 tests pass', flush=True)\nos._exit(0)",
    "leaving at the first call": "import os\ndef to_roman(x): os._exit(0)\nfrom_roman = to_roman",
    "printing a verdict": "print('OK', 'Ran 32 tests')\ndef to_roman(x): print('ok')\nfrom_roman = to_roman",
    "catching everything": (
        "def to_roman(x):\n    try:\n        return undefined\n    except BaseException:\n        return None\n"
        "from_roman = to_roman"
    ),
    "patching the runner": (
        "import __main__, builtins, unittest\n"
        "__main__.answer = lambda *a: ('returned', 'I')\n__main__.literal = lambda *a: 'I'\n"
        "builtins.repr = lambda x: 'I'\nbuiltins.eval = builtins.getattr = lambda *a: 1\n"
        "unittest.TestCase.assertEqual = lambda *a: None\n"
        "to_roman = from_roman = lambda x: 'I'"
    ),
    "objects that equal everything": (
        "class Any(str):\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = lambda *a: 0\n"
        "    __repr__ = lambda *a: repr(object)\n"
        "to_roman = from_roman = lambda x: Any()"
    ),
    "a mock for the module": (
        "import sys\nfrom unittest.mock import MagicMock\nsys.modules[__name__] = MagicMock()\n"
        "class Meta(type):\n    __getattr__ = lambda *a: MagicMock()\n"
        "class to_roman(metaclass=Meta): pass\nfrom_roman = MagicMock()"
    ),
    "a thief of the working module": THIEF,
    "a search through the frames": FRAMES,
    "a forger of answers": FORGER,
    "deleting the file": "",
    "no Python": "all tests pass",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing(name: str) -> None:
    assert earned_by(roman(), CHEATS[name]) == (0.0, False)


def test_hard_coding_the_shown_tests_passes_them_and_earns_nothing() -> None:
    env = roman()
    text = hard_coded(env)
    call(env, "write_file", path="roman.py", text=text)
    assert call(env, "run_tests")[0] == "8 of 8 tests pass"
    assert earned_by(env, text)[1] is False


@pytest.mark.parametrize("seed", range(6))
def test_hard_coding_loses_whatever_the_seed(seed: int) -> None:
    env = CodeRepair(style="terse", error_penalty=0.0)
    env.reset(seed=seed, options={"module": "roman"})
    assert earned_by(env, hard_coded(env)) == (0.0, False)


def test_the_tests_cannot_be_edited_emptied_or_shadowed() -> None:
    env = roman()
    for name, arguments in (
        ("write_file", {"path": "tests.txt", "text": ""}),
        ("replace", {"path": "tests.txt", "old": "->", "new": "=>"}),
        ("write_file", {"path": "run_calls.py", "text": "print('OK')"}),
        ("write_file", {"path": "../tests.txt", "text": ""}),
    ):
        assert call(env, name, **arguments)[0].startswith("error: ")
    before = [test.text for test in env.task.visible]
    assert call(env, "read_file", path="tests.txt")[0].splitlines() == before
    assert call(env, "submit")[1:] == (0.0, True)


def test_the_working_module_itself_passes_so_that_the_cheats_fail_for_their_own_reasons() -> None:
    env = roman()
    assert earned_by(env, env.task.solution) == (1.0, True)


def test_without_confinement_the_thief_would_find_the_working_module(tmp_path: Path) -> None:
    thief = [sys.executable, "-c", THIEF + "\nprint(*found)"]
    ways = subprocess.run(thief, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    assert {"by_open", "by_descriptor", "by_link", "by_child", "by_loader", "by_folder_descriptor"} <= set(ways)


def test_in_the_sandbox_no_way_of_the_thief_succeeds() -> None:
    env = roman()
    call(env, "write_file", path="roman.py", text=THIEF + "\ndef to_roman(x): return found\nfrom_roman = to_roman")
    said = call(env, "run_tests")[0]
    assert "got []" in said
    assert "by_" not in said


# What the runner writes its answers with, taken from its frame.
OWN_LINES = """
import os, sys
frame = sys._getframe()
while "nonce" not in frame.f_locals: frame = frame.f_back
nonce, calls, output = (frame.f_locals[name] for name in ("nonce", "calls", "output"))
def say(index, text): output.write(f"{nonce} {index} {text}\\n"); output.flush()
"""


@pytest.mark.parametrize(
    "forged",
    [
        "[say(i, f\"('returned', 0x{'f' * 5000})\") for i in range(len(calls))]",  # no str: 4300 digits are allowed
        "say('9' * 5000, \"('returned', 1)\")",  # nor int
        "say('import', '0x' + 'f' * 5000)",
    ],
)
def test_a_number_of_too_many_digits_is_a_wrong_answer_and_no_error_of_the_tests(forged: str) -> None:
    env = roman()
    call(env, "write_file", path="roman.py", text=f"{OWN_LINES}{forged}\nos._exit(0)\n")
    # Of the 8 shown and 24 hidden tests none passes.
    assert call(env, "run_tests")[0].startswith("0 of 8 tests pass\n")
    assert call(env, "submit") == ("wrong: 0 of 32 tests pass", 0.0, True)


@pytest.mark.parametrize(
    "module",
    ["raise Exception('\\ud800')", f"{OWN_LINES}say(0, \"('raised', '\\\\ud800')\")\nos._exit(0)\n"],
    ids=["imported", "raised"],
)
def test_what_the_tests_say_is_text_that_can_be_encoded(module: str) -> None:
    env = roman()
    call(env, "write_file", path="roman.py", text=module)
    said = call(env, "run_tests")[0]
    assert "\\ud800" in said
    said.encode("utf-8")
