"""The installed command `gspo-gym` in a folder with a module of the user's: every MODULE:NAME is found there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = str(Path(sys.executable).with_name("gspo-gym"))
MODULE = '''
from gspo_gym.env.core import TextEnv

class GuessNumber(TextEnv):
    """The bundled environment of that name is another one."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "This one is mine.", {}

    def step(self, action):
        return "no", 1.0, True, False, {}

class Apart(GuessNumber):
    isolation = "process"

def make():
    return GuessNumber()

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(20)]

def right(completion, answer, **_):
    return float(completion.strip() == answer)

def rate(payload):
    return 0.5
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["env", "card", "mine:GuessNumber"], "This one is mine."),
        (["env", "card", "mine:Apart"], "This one is mine."),
        (["env", "card", "mine:make"], "This one is mine."),
        (["env", "card", "Dataset", "--option", "rows=mine:ROWS", "--option", "reward=mine:right"], "return 1"),
    ],
)
def test_a_module_of_the_present_folder_is_found_and_its_class_needs_no_registration(
    arguments: list[str], said: str, folder: Path
) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_judging_function_of_the_present_folder_is_found(folder: Path) -> None:
    address = ("--host", "256.0.0.1", "--api-key-env", "A_KEY")
    done = run(folder, "judge", "serve", "--python", "mine:rate", *address, A_KEY="k")
    assert "cannot serve on 256.0.0.1" in done.stderr  # what it says once it has the function


def test_where_python_may_not_look_in_the_present_folder_the_command_does_not(folder: Path) -> None:
    done = run(folder, "env", "card", "mine:GuessNumber", PYTHONSAFEPATH="1")
    assert done.returncode == 2
    assert "cannot import 'mine'" in done.stderr


def test_a_reader_that_has_ended_is_no_traceback(folder: Path) -> None:
    """As in `gspo-gym config reference | head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [COMMAND, "config", "reference"]
    finished = subprocess.run(command, cwd=folder, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (finished.returncode, finished.stderr) == (128 + signal.SIGPIPE, "")
