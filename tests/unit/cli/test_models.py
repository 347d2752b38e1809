"""`gspo-gym models ...`, as somebody types it: lists, exports, talks, plays and serves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import openai
import programs
import pytest
import torch
from huggingface_hub import ModelCard
from small_quickstart import QUICKSTART, SMALLER
from transformers import GenerationConfig

from gspo_gym.cli.main import command_parser, main
from gspo_gym.cli.models import chat_command
from gspo_gym.cli.models_serve import settings_of
from gspo_gym.policy.load import load_policy, save_policy

TINY = "tiny:qwen3-64@3"
ROOT = Path(__file__).parents[3]


def chat(capsys: pytest.CaptureFixture[str], words: list[str], *lines: str) -> str:
    """What is printed when these lines are typed."""
    parser = command_parser("models")
    typed: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        print(prompt, end="")
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    arguments: argparse.Namespace = parser.parse_args(["models", "chat", *words])
    assert chat_command(arguments, read) == 0
    return capsys.readouterr().out


def test_talking_shows_what_the_model_says_and_reset_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--temperature", "0", "--max-tokens", "20"]
    said = chat(capsys, words, "Hi.", "/reset", "Hi.", "/quit", "never read")
    policy = load_policy(TINY)
    messages = [{"role": "user", "content": "Hi."}]
    prompt = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    ids = torch.as_tensor(prompt["input_ids"])
    greedy = policy.model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    expected = policy.tokenizer.decode(greedy)
    assert said.count(f"model> {expected}") == 2
    assert "forgotten" in said
    assert said.count("you> ") == 4
    assert chat(capsys, [*words, "--system", "Be brief."], "Hi.") != said


def test_help_is_answered_and_not_said_to_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--max-tokens", "3"]
    said = chat(capsys, words, "/help", "/halp", "/quit")
    assert said.count("/reset forgets the conversation, /help shows this, /quit ends") == 3
    assert "model> " not in said
    played = chat(capsys, [*words, "--env", "GuessNumber", "--option", "high=4"], "/help", "/quit")
    assert "Enter lets the model act, a line of yours acts for it; /help shows this, /quit ends" in played
    assert "reward" not in played


def test_a_conversation_is_sampled_as_the_generation_config_says_and_options_win(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = load_policy(TINY)
    policy.model.generation_config = GenerationConfig(do_sample=True, temperature=0.25, top_p=0.9)
    save_policy(policy, tmp_path / "model")
    words = [str(tmp_path / "model"), "--seed", "1", "--max-tokens", "12"]
    assert "(temperature 0.25, top_p 0.9)" in chat(capsys, words, "/quit")
    assert "(temperature 0.75, top_p 0.9)" in chat(capsys, [*words, "--temperature", "0.75"], "/quit")
    by_config, by_options = (
        chat(capsys, words, "Hi."),
        chat(capsys, [TINY, "--seed", "1", "--max-tokens", "12", "--temperature", "0.25", "--top-p", "0.9"], "Hi."),
    )
    answers = [said.split("model> ")[1] for said in (by_config, by_options)]
    assert answers[0] == answers[1]
    assert answers[0] != chat(capsys, [*words, "--temperature", "1", "--top-p", "1"], "Hi.").split("model> ")[1]


def test_a_conversation_that_is_full_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--max-tokens", "4", "--temperature", "0"]  # else the model may end before the limit
    said = chat(capsys, words, "word " * 5000, "/reset", "Hi.")
    assert "ContextOverflowError: the prompt has" in said
    assert "(/reset begins anew)" in said
    assert "[cut off at --max-tokens]" in said


def test_a_model_plays_to_the_end_where_no_one_types_and_a_seed_repeats_the_episode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [TINY, "--env", "GuessNumber", "--option", "high=4", "--max-turns", "3", "--max-tokens", "3"]
    first, again, other = (chat(capsys, [*words, "--seed", seed]) for seed in ("5", "5", "6"))
    assert first == again != other
    assert first.count("model> ") == 3
    assert re.search(r"(terminated|max_turns), return [-+]\d", first)


def test_a_person_may_take_over_any_turn_and_is_told_what_cannot_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = [TINY, "--env", "GuessNumber", "--option", "high=4", "--option", "max_guesses=9", "--max-tokens", "3"]
    said = chat(capsys, [*words, "--seed", "5"], "", "much too long for three tokens", "1", "2", "3", "4")
    assert said.count("model> ") == 1  # Enter
    assert "expected 1 to 3 sampled ids" in said
    assert "terminated, return" in said  # one of the four was the number
    assert "stopped, return +0.000" in chat(capsys, words, "/quit")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", TINY, "--env"], "is of no run, which would say what it plays"),
        (["chat", TINY, "--max-turns", "3"], "expected only with --env"),
        (["serve", TINY, "--host", "0.0.0.0"], "can be reached from other machines: give a key (--api-key-env NAME)"),
        (["merge", TINY, "--out", "out"], "has no adapter to merge"),
        (["export", "runs/no-such-run", "--out", "out"], "no-such-run"),
        (["push", "no-such-folder", "me/x"], "expected a folder that `gspo-gym models export`"),
        (["show", "no-such-model"], "there is no such run, neither here nor in runs"),
        (["show", "no-such-owner/no-such-model"], "the hub has no such model or cannot be reached"),
        (["show", "tiny:no-such-shape"], "there is no tiny model of that name"),
    ],
)
def test_a_mistake_is_answered_with_a_reason_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["models", *words]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_no_run_is_exported_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["models", "export", TINY, "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert f"{TINY}: transformers layout, dtype bfloat16 -> {out}" in capsys.readouterr().out
    assert load_policy(str(out), dtype="bfloat16").base == str(out)
    assert main(["models", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["layout"], shown["dtype"], shown["trained_here"]) == ("transformers", "bfloat16", None)
    assert main(["models", "show", str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +parameters +115,584$", text, re.MULTILINE)
    assert "trained here  not by any run that is known of it" in text
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "trained with GSPO" not in card
    assert "No run here trained them" in card
    assert "reinforcement-learning" not in card
    (tmp_path / "runs").mkdir()
    assert main(["models", "list", "--folder", str(tmp_path / "runs")]) == 0
    assert "no run there has a checkpoint" in capsys.readouterr().out


@pytest.mark.slow
def test_from_the_quickstart_to_playing_with_what_was_trained_are_three_commands(tmp_path: Path) -> None:
    """`make quickstart`, with fewer steps; then the two lines below it in README.md; then an export and its card."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    few = ["training.iterations_per_epoch=4", "training.checkpoint_every_n_iters=2", "evaluation.every_n_iters=2"]
    settings = [*SMALLER, *few, "evaluation.seeds=0:40", "model.label=quickstart"]

    def run(*words: str) -> str:
        done = programs.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment, input="", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    report = run("gspo_gym.train", str(QUICKSTART), "--set-aside", *settings)
    (line,) = (line for line in report.splitlines() if "models chat" in line)
    told = shlex.split(line, comments=True)
    assert told[1:] == ["models", "chat", "quickstart", "--env"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "after `. .venv/bin/activate`, `gspo-gym models chat quickstart\n--env`" in readme
    played = run("gspo_gym.cli", "models", "chat", "quickstart", "--env")  # an episode of the run's own environment
    assert played.startswith("user> Guess 1-4. 3 tries.")
    assert ", return " in played.splitlines()[-1]

    run("gspo_gym.cli", "models", "export", "quickstart", "--out", "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    values = {result.metric_type: result for result in card.data.eval_results}
    final = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())["final_eval"]
    assert final["step"] == 4
    assert values["success_rate"].metric_value == final["success_rate"]
    assert values["mean_return"].metric_value == final["mean_return"]
    assert values["success_rate"].metric_args == {"num_episodes": 40, "interval_95": final["success_interval"]}


@pytest.mark.slow
def test_a_served_model_answers_openais_client_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "gspo_gym.cli", "models", "serve", TINY, "--port", "0", "--api-key-env", "A_KEY"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "A_KEY": "right"}
    with programs.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"serving {TINY} at (http://127\.0\.0\.1:\d+/v1)\n", line)
        assert found is not None, line
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(base_url=found[1], api_key="right", max_retries=0, http_client=http) as client:
            answer = client.chat.completions.create(
                model=TINY, messages=[{"role": "user", "content": "Hi."}], max_tokens=5
            )
            assert answer.usage.completion_tokens <= 5
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--max-model-len 600", "max_model_len", 600),
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--max-num-seqs 5", "max_num_seqs", 5),
        ("--tensor-parallel-size 2", "tensor_parallel_size", 2),
        ("--data-parallel-size 3", "data_parallel_size", 3),
        ("--device-ids 5", "device_ids", (5,)),
        ("--gpu-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--kv-cache-gib 0.25", "kv_cache_gib", 0.25),
        ("--enforce-eager", "enforce_eager", True),
        ("--no-prefix-caching", "enable_prefix_caching", False),
        ("--structured-output", "structured_output", True),
    ],
)
def test_each_option_of_the_engine_is_a_setting_of_vllm(option: str, field: str, value: object) -> None:
    parser = command_parser("models")
    without, changed = (
        settings_of(parser.parse_args(["models", "serve", "policy", *words])) for words in ([], option.split())
    )
    assert getattr(changed, field) == value != getattr(without, field)
    assert changed == dataclasses.replace(without, **{field: value})
