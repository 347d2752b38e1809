"""Collected data sets: what any policy plays is kept exactly, in both file formats, and a failure is told, not hidden.

The endpoint is a real HTTP server on loopback that speaks the OpenAI chat protocol and plays GuessNumber by the rule
"halve the range", so every game must end in success.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.main import main
from gspo_gym.config.build.episode_collection import CollectSettings, collect_episodes
from gspo_gym.config.run_config import load_config
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import ConfigError, RecordError, RolloutError, UnknownNameError
from gspo_gym.rollout.episode_files import load_episodes, save_episodes, trajectory_to_json
from gspo_gym.types import Message, Outcome


class Halving(BaseHTTPRequestHandler):
    """An OpenAI-compatible model that finds a number from 1 to 8; every third request gets a 500 first."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Any = self.server
        server.requests.append((self.path, body))
        if len(server.requests) % 3 == 0:
            self._answer(500, {"error": {"message": "as planned"}})
            return
        low, high = 1, 8
        said = [message for message in body["messages"] if message["role"] == "assistant"]
        heard = [message for message in body["messages"] if message["role"] == "user"][1:]
        for guess, hint in zip(said, heard, strict=True):
            number = int(guess["content"])
            low, high = (number + 1, high) if hint["content"] == "higher" else (low, number - 1)
        message = {"role": "assistant", "content": str((low + high) // 2)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._answer(
            200, {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def endpoint() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Halving)
    server.requests = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Moody(TextEnv):
    """Raises for seed 2, scores nothing for seed 3, and is polite otherwise."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed
        return "hello", {}

    def step(self, action: str) -> Any:
        if self.seed == 2:
            raise ValueError("bad mood")
        return "", None if self.seed == 3 else 0.25, True, False, {}


@pytest.fixture
def moody() -> Iterator[str]:
    import gymnasium

    register("test_collection/Moody-v0", Moody)
    yield "test_collection/Moody-v0"
    gymnasium.registry.pop("test_collection/Moody-v0")


def test_a_scripted_policy_is_collected_seed_by_seed() -> None:
    collected = collect_episodes(
        "GuessNumber", "scripted:reference", seeds=range(5), settings=CollectSettings(episodes_per_seed=2)
    )
    assert [t.task.seed for t in collected.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert {t.reward for t in collected.trajectories} == {1.0}  # 2 ** 4 > 8: halving finds every number in four tries
    assert collected.dropped == ()
    assert (collected.env_id, collected.policy_name, collected.tools) == (
        "gspo_gym/GuessNumber-v0",
        "scripted:reference",
        (),
    )


def test_a_model_is_collected_with_the_tokens_that_it_sampled() -> None:
    settings = CollectSettings(max_output_tokens=3, max_turns=2)
    collected = collect_episodes("GuessNumber", "tiny:qwen3-64@1", seeds=[0, 1], settings=settings)
    for trajectory in collected.trajectories:
        [segment] = trajectory.segments
        sampled = segment.action_mask
        assert sampled.any()
        assert (segment.rollout_logprobs[sampled] < 0).all()  # a random model is sure of nothing
        assert (segment.weight_version[sampled] == 0).all()


def test_an_endpoint_is_evaluated_over_seeds_as_a_model_here_is(endpoint: Any) -> None:
    config = load_config(Path(__file__).parents[4] / "configs" / "quickstart.toml", ["evaluation.seeds=0:6"])
    evaluation = run_evaluation(config, f"openai:halver@http://127.0.0.1:{endpoint.server_port}/v1")
    # 2 ** 4 > 8, so halving finds every number within four guesses
    assert (evaluation.success_rate, [row.seed for row in evaluation.rows]) == (1.0, list(range(6)))
    assert {body["model"] for _, body in endpoint.requests} == {"halver"}


def test_an_endpoint_plays_and_its_500s_are_retried(endpoint: Any) -> None:
    url = f"http://127.0.0.1:{endpoint.server_port}/v1"
    collected = collect_episodes("GuessNumber", f"openai:halver@{url}", seeds=range(6), env_config={"style": "terse"})
    assert [t.success for t in collected.trajectories] == [True] * 6
    assert {path for path, _ in endpoint.requests} == {"/v1/chat/completions"}
    assert {body["model"] for _, body in endpoint.requests} == {"halver"}
    # nobody knows its tokens: what is stored must not pass for something that could be reinforced
    assert all((s.weight_version[s.action_mask] == -1).all() for t in collected.trajectories for s in t.segments)


def test_a_function_plays() -> None:
    def ones(env: Any, rng: np.random.Generator) -> Any:
        return lambda messages: "1"

    collected = collect_episodes("GuessNumber", ones, seeds=[0], env_config={"low": 1, "high": 1})
    assert [t.messages[-1] for t in collected.trajectories] == [Message("user", "Correct.")]
    assert collected.policy_name == "ones"


def test_failures_are_told_and_unscored_episodes_are_kept(moody: str) -> None:
    collected = collect_episodes(moody, lambda env, rng: lambda messages: "hi", seeds=range(4))
    assert [t.task.seed for t in collected.trajectories] == [0, 1, 3]
    assert [t.is_scored for t in collected.trajectories] == [True, True, False]
    [dropped] = collected.dropped
    assert (dropped.trajectory_id, dropped.outcome) == ("seed2/0/0", Outcome.ENV_ERROR)
    assert "ValueError: bad mood" in dropped.reason
    with pytest.raises(RolloutError, match="bad mood"):
        collect_episodes(moody, lambda env, rng: lambda messages: "hi", seeds=[2])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_both_file_formats_give_back_every_bit(tmp_path: Path, suffix: str) -> None:
    settings = CollectSettings(max_output_tokens=3, max_turns=2)
    by_model = collect_episodes("GuessNumber", "tiny:qwen3-64@1", seeds=[0, 1], settings=settings)
    by_hand = collect_episodes("SqlAnalyst", "scripted:reference", seeds=[0])
    written = [*by_model.trajectories, *by_hand.trajectories]
    path = tmp_path / f"episodes{suffix}"
    save_episodes(path, written, policy_name="both", tools=by_hand.tools)
    assert [trajectory_to_json(t) for t in load_episodes(path)] == [trajectory_to_json(t) for t in written]


def test_the_command_writes_a_file_and_says_how_it_went(tmp_path: Path, capsys: Any, moody: str) -> None:
    path = tmp_path / "e.jsonl"
    arguments = ["env", "collect", "GuessNumber", "--out", str(path), "--seeds", "0:20"]
    assert main([*arguments, "--policy", "scripted:random", "--only-successes"]) == 0
    out = capsys.readouterr().out
    episodes = load_episodes(path)
    assert {t.success for t in episodes} == {True}
    assert f"{len(episodes)} episodes of gspo_gym/GuessNumber-v0 by scripted:random" in out
    assert f"{20 - len(episodes)} without success left out" in out
    assert main([*arguments, "--policy", "scripted:random"]) == 2
    assert "there is such a file already" in capsys.readouterr().err


@pytest.mark.slow  # five processes that load torch
def test_ctrl_c_keeps_every_episode_that_is_over_and_resume_plays_the_others(tmp_path: Path) -> None:
    support = Path(__file__).parents[3] / "support"
    environ = os.environ | {"PYTHONPATH": str(support)}
    command = [
        sys.executable,
        "-m",
        "gspo_gym.cli",
        "env",
        "collect",
        "held_env:Held-v0",
        "--policy",
        "scripted:random",
    ]
    command += ["--policy", "scripted:random", "--seeds", "0:10", "--concurrent", "3", "--out", "e.jsonl"]
    part = tmp_path / "e.jsonl.part"
    running = programs.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    # Seeds 8 and 9 wait, the others end in the third slot: a line for each, below that of what was asked.
    while not part.exists() or len(part.read_text().splitlines()) < 9:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    (tmp_path / "go").touch()  # threads of Python cannot be stopped: those that play are let go
    told = running.communicate(timeout=60)[1]
    assert running.returncode == 130
    assert "of 10 episodes are in e.jsonl.part; go on with --resume" in told
    assert not (tmp_path / "e.jsonl").exists()

    def again(*more: str) -> subprocess.CompletedProcess[str]:
        return programs.run([*command, *more], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)

    refused = again()
    assert (refused.returncode, "add --resume, or remove it" in refused.stderr) == (2, True)
    other = again("--resume", "--max-turns", "7")
    assert (other.returncode, "is of another collection" in other.stderr) == (2, True)
    (tmp_path / "played.txt").unlink()
    with part.open("a") as file:
        file.write('{"schema": 1, "traj')  # as a killed process leaves it
    resumed = again("--resume")
    assert resumed.returncode == 0, resumed.stderr
    replayed = {int(seed) for seed in (tmp_path / "played.txt").read_text().split()}
    assert not replayed & set(range(8)) - {0}  # 0 is also played to see where the environment is to run
    episodes = load_episodes(tmp_path / "e.jsonl")
    assert [episode.task.seed for episode in episodes] == list(range(10))
    assert [episode.reward for episode in episodes] == [float(seed) for seed in range(10)]
    assert not part.exists()


def test_episodes_that_are_there_count_also_where_all_that_was_missing_fails(moody: str) -> None:
    def chatter(env: Any, rng: np.random.Generator) -> Any:
        return lambda messages: "hi"

    already = collect_episodes(moody, chatter, seeds=[0]).trajectories
    collected = collect_episodes(moody, chatter, seeds=[0, 2], already=already)
    assert collected.trajectories == already
    assert len(collected.dropped) == 1  # seed 2


LIMITED = """
import resource, signal
from gspo_gym.cli.main import main

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
raise SystemExit(main(["env", "collect", "GuessNumber", "--policy", "scripted:random", "--out", "e.jsonl"]))
"""


def test_a_file_that_cannot_grow_ends_a_collection_before_its_first_episode(tmp_path: Path) -> None:
    """As on a full disk: a file of the process may have 64 bytes (-B: its bytecode would be cut off, too)."""
    command = [sys.executable, "-B", "-c", LIMITED]
    done = programs.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "e.jsonl.part: cannot be written: File too large" in done.stderr
    assert not (tmp_path / "e.jsonl").exists()


def test_the_command_names_what_it_cannot_write_before_it_plays(tmp_path: Path, capsys: Any) -> None:
    arguments = ["env", "collect", "GuessNumber", "--policy", "scripted:reference", "--out"]
    assert main([*arguments, str(tmp_path / "e.csv")]) == 2
    assert ".jsonl.gz or .parquet" in capsys.readouterr().err
    assert main([*arguments, str(tmp_path / "no" / "e.jsonl")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no scripted policy 'refrence'; did you mean 'reference'"):
        collect_episodes("GuessNumber", "scripted:refrence", seeds=[0])
    with pytest.raises(ConfigError, match="at least one seed"):
        collect_episodes("GuessNumber", "scripted:reference", seeds=[])
    with pytest.raises(ConfigError, match="at least 1 episode a seed, got 0"):
        CollectSettings(episodes_per_seed=0)
    with pytest.raises(ConfigError, match="there is no such file"):
        load_episodes(tmp_path / "none.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(RecordError, match=r"broken.jsonl:1: episode: expected schema 1"):
        load_episodes(broken)
