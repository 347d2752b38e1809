"""The served reference of a run: waiting for it, what is refused, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.build.reference import scoring_settings, serving_reference
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.policy.reference.client import ReferenceClient, ReferenceProcess
from gspo_gym.policy.reference.server import ReferenceModel, make_server
from gspo_gym.policy.reference.wire import ScoringSettings
from gspo_gym.types import Sampling


def make_config(folder: Path, *, url: str | None = None, **reference: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"folder": str(folder)},
        "algorithm": {"variety": "gspo_token"},
        "model": {"base": "tiny:qwen3-64", "label": "test"},
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {"style": "terse"},
            "max_turns": 3,
            "max_output_tokens": 3,
            "max_model_len": 256,
            "episodes_per_batch": 8,
            "temperature": 0.7,
        },
        "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 4, "learning_rate": 1e-3},
        "loss": {"kl_coef": 0.3},
        "reference": {"placement": "dedicated", **reference},
        "evaluation": {"seeds": "0:2"},
    }
    return RunConfig.from_dict(values | ({} if url is None else {"services": {"reference_url": url}}))


@pytest.fixture
def policy() -> Policy:
    return load_policy("tiny:qwen3-64", seed=3)


@contextlib.contextmanager
def serving(base: str | None) -> Iterator[str]:
    """The address of a server in this process; of one that never ends loading if `base` is None."""
    model = ReferenceModel()
    if base is not None:
        model.load(base, dtype="float32", device="cpu")
    server = make_server(0, model, None)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)


def test_health_is_asked_at_the_interval_until_the_wait_is_over() -> None:
    clock = Clock()
    with serving(None) as url, pytest.raises(ServiceError, match=r"not ready after reference\.health_max_wait_s = 2 "):
        ReferenceClient(url).wait_until_healthy(
            max_wait_seconds=2.0, interval_seconds=0.5, sleep=clock.sleep, clock=lambda: clock.now
        )
    assert clock.slept == [0.5] * 4  # 2 / 0.5


def test_the_wait_and_the_interval_are_those_of_the_config(policy: Policy, tmp_path: Path) -> None:
    with serving(None) as url:
        config = make_config(tmp_path, url=url, health_max_wait_s=0.02, health_interval_ms=10)
        with (
            pytest.raises(ServiceError, match=r"health_max_wait_s = 0\.02 "),
            serving_reference(config, policy, "cpu"),
        ):
            pass


def test_a_server_that_runs_already_is_used(policy: Policy, tmp_path: Path) -> None:
    with serving("tiny:qwen3-64@9") as url:
        with serving_reference(make_config(tmp_path, url=url), policy, "cpu") as reference:
            assert reference is not None
            assert reference.tensors() == {}
        assert ReferenceClient(url).health() is not None  # it goes on
    assert not (tmp_path / "test").exists()  # and nothing was started


def test_a_server_of_another_vocabulary_is_refused(policy: Policy, tmp_path: Path) -> None:
    from gspo_gym.policy.tiny import build_tiny

    other = build_tiny("qwen3-64", 0)
    other.resize_token_embeddings(other.config.vocab_size + 64)
    load_policy("tiny:qwen3-64").tokenizer.save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with (
        serving(str(tmp_path / "other")) as url,
        pytest.raises(ConfigError, match=r"services\.reference_url: .*other knows \d+ tokens, tiny:qwen3-64@3 knows"),
        serving_reference(make_config(tmp_path, url=url), policy, "cpu"),
    ):
        pass


def test_something_else_that_answers_there_is_no_reference(policy: Policy, tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"hello")

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    config = make_config(tmp_path, url=f"http://127.0.0.1:{server.server_port}")
    try:
        with (
            pytest.raises(ServiceError, match="says b'hello' of its health"),
            serving_reference(config, policy, "cpu"),
        ):
            pass
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_port_that_is_taken_is_said_and_nothing_is_left(policy: Policy, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config(tmp_path, port=port, health_interval_ms=50)
        with (
            pytest.raises(ServiceError, match=f"could not run(.|\n)*port {port} is taken"),
            serving_reference(config, policy, "cpu"),
        ):
            pass
    assert sorted(path.name for path in (tmp_path / "test").iterdir()) == ["reference_server.log"]


def test_a_server_is_never_taken_for_another_that_holds_its_port(policy: Policy, tmp_path: Path) -> None:
    with serving("tiny:qwen3-64@9") as url:
        config = make_config(tmp_path, port=int(url.rsplit(":", 1)[1]), health_interval_ms=50)
        with (
            pytest.raises(ServiceError, match=f"another server answers at its port, process {os.getpid()}"),
            serving_reference(config, policy, "cpu"),
        ):
            pass


def test_a_process_ends_with_its_whole_group(tmp_path: Path) -> None:
    process = ReferenceProcess(["--model", "tiny:none", "--port", "0"], log=tmp_path / "log")
    process.close()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    with pytest.raises(ServiceError, match="could not run"):
        process.require_alive()


def test_without_a_server_nothing_is_served(policy: Policy, tmp_path: Path) -> None:
    with serving_reference(make_config(tmp_path, placement="shared"), policy, "cpu") as reference:
        assert reference is None
    assert list(tmp_path.iterdir()) == []


def test_the_distribution_is_the_learners(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert scoring_settings(config) == ScoringSettings(Sampling(temperature=0.7), 512 << 20)
