"""The command itself: its version, and completion for shells."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import gspo_gym
from gspo_gym.cli.main import main


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert gspo_gym.__version__ == version("gspo-gym")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"gspo-gym {version('gspo-gym')} (Python ")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_completion_script_names_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert all(name in script for name in ("evaluate", "doctor", "--set-aside"))


def test_bash_takes_the_completion_script() -> None:
    program = (
        f'eval "$({sys.executable} -m gspo_gym.cli --print-completion bash)"; '
        "COMP_WORDS=(gspo-gym doc); COMP_CWORD=1; _shtab_gspo_gym 2>/dev/null; "
        'echo "${COMPREPLY[@]}"; complete -p gspo-gym'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("doctor\n"), done.stderr
    assert "-F _shtab_gspo_gym gspo-gym" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'?"),
        (["runs", "lst"], "there is no command 'lst'; did you mean 'list'?"),
        ([], "expected a command: train, evaluate, "),
        (["app"], "expected a command: check, serve"),
        (["zzz"], "there is no command 'zzz'; known: app, cluster, config"),
    ],
)
def test_a_misspelt_command_names_the_nearest(words: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed_for_each_shell(shell: str, capsys) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as caught:
        main(["--print-completion", shell])
    assert caught.value.code == 0
    assert "doctor" in capsys.readouterr().out
