"""`gspo-gym env check`, as somebody types it: exit statuses, the report for machines, and the picture of the mask."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from gspo_gym.cli.command_line import parse_and_run
from gspo_gym.cli.env import add_arguments
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register


class Constant(TextEnv):
    """Pays whatever is done."""

    policies = {"reference": lambda env, rng: lambda messages: "x"}

    def __init__(self, reward: float = 1.0) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "hello", {}

    def step(self, action: str) -> Any:
        return "bye", self.reward, True, False, {}


class Hopeless(TextEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise OSError("no data")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register("test_env_check/Constant-v0", entry_point=Constant)
    register("test_env_check/Hopeless-v0", entry_point=Hopeless)
    yield
    del gymnasium.registry["test_env_check/Constant-v0"]
    del gymnasium.registry["test_env_check/Hopeless-v0"]


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parse_and_run(parser, ["check", *words, "--leak-episodes", "0"])


def test_a_healthy_environment_is_status_0_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("GuessNumber", "--num-seeds", "3", "--option", "high=12") == 0
    out = capsys.readouterr().out
    assert out.startswith("gspo_gym/GuessNumber-v0: passed")
    assert len(out.splitlines()) <= 24 + 1  # a screen, and the note that leaks were not looked for


def test_a_broken_one_is_status_1_and_says_what_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("test_env_check/Constant-v0", "--num-seeds", "3") == 1
    out = capsys.readouterr().out
    assert "FAIL tricks" in out
    assert "expected an empty answer to earn less than 'reference' on average (1), got 1" in out


def test_mistakes_of_the_caller_are_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("GuesNumber") == 2
    assert run("GuessNumber", "--option", "high") == 2
    assert run("GuessNumber", "--num-seeds", "1") == 2
    error = capsys.readouterr().err
    assert "did you mean 'GuessNumber'" in error
    assert "expected KEY=JSON, got 'high'" in error
    assert "expected at least 2 seeds" in error


def test_a_limit_on_steps_that_nothing_can_meet_fails_and_a_generous_one_does_not() -> None:
    assert run("GuessNumber", "--num-seeds", "2", "--max-step-seconds", "0") == 1
    assert run("GuessNumber", "--num-seeds", "2", "--max-step-seconds", "60") == 0


def test_the_report_is_written_for_machines_whether_it_passed_or_not(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run("GuessNumber", "--num-seeds", "2", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert (report["environment"], report["passed"], report["tokens"]) == ("gspo_gym/GuessNumber-v0", True, None)
    assert report["measurements"]["mean_returns"]["reference"] == 1.0
    assert run("test_env_check/Constant-v0", "--num-seeds", "2", "--option", "reward=2", "--json", str(file)) == 1
    report = json.loads(file.read_text())
    assert report["passed"] is False
    assert report["checks"]["tricks"]["state"] == "FAIL"
    assert report["measurements"]["mean_returns"]["claiming success"] == 2.0


def test_with_a_model_tokens_are_audited_and_the_mask_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    options = ["--option", "low=5", "--option", "high=5", "--option", "max_guesses=1"]
    words = ["GuessNumber", *options, "--num-seeds", "2", "--model", "tiny:qwen3-64", "--turns", "2"]
    run(*words, "--json", str(file))  # with one number to guess random play is as good as the reference: status 1
    out = capsys.readouterr().out
    assert "tokens of gspo_gym/GuessNumber-v0 with tiny:qwen3-64: passed" in out
    assert "sample: reference; trained on is what is in [[ ]]" in out
    assert "<|im_start|>assistant\n[[5<|im_end|>]]" in out
    tokens = json.loads(file.read_text())["tokens"]
    assert tokens["passed"] is True
    assert [player["player"] for player in tokens["players"]][:3] == ["tiny:qwen3-64", "reference", "random"]


def test_drift_alone_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gspo_gym.policy.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    # What was said long ago and at length is shortened.
    said = "(message.content if loop.last or message.content | length < 60 else '[...]')"
    tokenizer.chat_template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + " + said + " + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    words = ["GuessNumber", "--num-seeds", "2", "--turns", "2", "--model", str(tmp_path)]
    assert run(*words, "--option", "style=terse") == 0
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert "gspo_gym/GuessNumber-v0: passed" in out
    assert "FAIL reference, seed 0, turn 1: another text" in out


def test_what_does_not_even_play_is_not_audited(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("test_env_check/Hopeless-v0", "--num-seeds", "2", "--model", "tiny:qwen3-64") == 1
    assert "tokens of" not in capsys.readouterr().out
