"""What cannot work on a system says so when it is imported, and all else works there."""

from __future__ import annotations

import subprocess
import sys

# What Windows does not have, hidden from a process of its own.
WITHOUT_POSIX = """
import sys
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
import gspo_gym
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_POSIX + program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_code_repair_says_at_import_which_systems_it_runs_on() -> None:
    done = run("import gspo_gym_envs.code_repair.env")
    assert done.returncode == 1
    assert "MissingExtraError: running what a model wrote" in done.stderr
    assert "use Linux or macOS, on Windows the Windows Subsystem for Linux" in done.stderr
    done = run("from gspo_gym.cli.main import main; raise SystemExit(main(['env', 'card', 'CodeRepair']))")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


def test_other_environments_are_made_and_played_without_what_windows_lacks() -> None:
    names = ["GuessNumber", "FrozenLake", "Countdown", "Wordle", "TicTacToe", "Homestead"]
    program = (
        f"for name in {names}:\n"
        "    env = gspo_gym.make(name)\n"
        "    env.reset(seed=0)\n"
        "    env.step('1')\n"
        "    env.close()\n"
        "import gspo_gym.rollout.pool, gspo_gym.judge.http, gspo_gym.config.run_config\n"
        "import pathlib, tempfile\n"
        "from gspo_gym.base.files import replace_file\n"
        "replace_file(pathlib.Path(tempfile.mkdtemp()) / 'file', 'text')\n"
        "print('played')"
    )
    done = run(program)
    assert done.stdout == "played\n", done.stderr
