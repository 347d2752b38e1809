"""The reference server over real HTTP, in this process: what it scores, what it refuses, who may change it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save, save_file

from gspo_gym.errors import CheckpointError, ConfigError, RecordError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.reference.client import ReferenceClient, ServedReference
from gspo_gym.policy.reference.server import ReferenceModel, make_server
from gspo_gym.policy.reference.wire import MAX_BODY_BYTES, TOKEN_HEADER, ScoringSettings
from gspo_gym.types import Sampling

BASE = "tiny:qwen3-64@5"
TOKEN = "of this test"
PLAIN = ScoringSettings(Sampling(temperature=1.0), 1024)


@pytest.fixture
def batch() -> TokenBatch:
    """Two rows of 12 and 7 tokens; what follows the fourth one was sampled."""
    attention_mask = torch.arange(12) < torch.tensor([[12], [7]])
    action_mask = attention_mask & (torch.arange(12) >= 4)
    return TokenBatch(
        token_ids=torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(1)) * attention_mask,
        attention_mask=attention_mask,
        action_mask=action_mask,
        turn_index=action_mask.long() - 1,
        trajectory_index=torch.arange(2),
        rollout_logprobs=torch.zeros(2, 12),
    )


def inputs(batch: TokenBatch) -> dict[str, torch.Tensor]:
    return {"token_ids": batch.token_ids, "attention_mask": batch.attention_mask, "action_mask": batch.action_mask}


@pytest.fixture
def served() -> Iterator[tuple[ReferenceModel, int]]:
    """A server that is still loading, and its port."""
    model = ReferenceModel()
    server = make_server(0, model, TOKEN)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield model, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def port(served: tuple[ReferenceModel, int]) -> int:
    model, port = served
    model.load(BASE, dtype="float32", device="cpu")
    return port


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def own_logprobs(model: Any, batch: TokenBatch, settings: ScoringSettings) -> torch.Tensor:
    computer = LogprobComputer(model, sampling=settings.sampling, logits_bytes=settings.logits_bytes)
    with torch.no_grad():
        return computer.compute(**inputs(batch)).logprobs


@pytest.mark.parametrize(
    "settings",
    [
        PLAIN,
        ScoringSettings(Sampling(temperature=0.7), 1024),
        ScoringSettings(Sampling(temperature=1.3, min_p=0.1, top_k=9, top_p=0.9), 3),
    ],
)
def test_logprobs_are_those_of_the_scorer_here_bit_for_bit(
    settings: ScoringSettings, port: int, batch: TokenBatch
) -> None:
    client = ReferenceClient(f"http://127.0.0.1:{port}")
    expected = own_logprobs(load_policy(BASE).model, batch, settings)
    actual = client.score(batch, settings)
    assert actual.dtype == torch.float32
    assert actual.equal(expected)
    assert not actual[~batch.action_mask].any()
    assert bool((actual[batch.action_mask] < 0).all())


def test_settings_survive_the_address_exactly() -> None:
    settings = ScoringSettings(Sampling(temperature=0.1 + 0.2, min_p=1 / 3, top_k=5, top_p=0.95), 77)
    assert ScoringSettings.from_query(settings.to_query()) == settings


@pytest.mark.parametrize("query", ["", "temperature=1", PLAIN.to_query() + "&beam=4", PLAIN.to_query() + "x"])
def test_settings_that_are_not_all_known_are_refused(query: str) -> None:
    with pytest.raises(RecordError, match="/score"):
        ScoringSettings.from_query(query)


def test_health_says_what_is_served_once_it_is_loaded(served: tuple[ReferenceModel, int], batch: TokenBatch) -> None:
    model, port = served
    client = ReferenceClient(f"http://127.0.0.1:{port}")
    assert client.health() is None
    assert ask(port, "GET", "/health") == (503, b'{"status": "loading"}')
    with pytest.raises(ServiceError, match=r"refused /score \(503\): .*being loaded"):
        client.score(batch, PLAIN)
    model.load(BASE, dtype="float32", device="cpu")
    health = client.health()
    assert health is not None
    assert (health["status"], health["model"], health["version"]) == ("ready", BASE, 0)
    assert health["vocab_size"] == load_policy(BASE).model.config.vocab_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.full((2, 12), 10**6)}, "expected token ids from 0 to"),
        ({"token_ids": torch.full((2, 12), -1)}, "expected token ids from 0 to"),
        ({"token_ids": torch.ones(2, 12, dtype=torch.int32)}, r"token_ids: expected torch\.int64"),
        ({"action_mask": torch.ones(2, 11, dtype=torch.bool)}, r"action_mask: expected torch\.bool \[B, T\]"),
        ({"action_mask": torch.ones(2, 12, dtype=torch.bool)}, "no sampled token in it"),
        ({"more": torch.ones(1)}, "expected token_ids, attention_mask, action_mask, got"),
    ],
)
def test_what_cannot_be_scored_is_said(
    change: dict[str, torch.Tensor], message: str, port: int, batch: TokenBatch
) -> None:
    status, body = ask(port, "POST", f"/score?{PLAIN.to_query()}", save({**inputs(batch), **change}))
    assert status == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(json.loads(body)["error"])
    good, _ = ask(port, "POST", f"/score?{PLAIN.to_query()}", save(inputs(batch)))
    assert good == 200  # it still serves


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", f"/score?{PLAIN.to_query()}", b"not safetensors", 400),
        ("POST", "/score?temperature=0", b"", 400),
        ("POST", "/other", b"", 404),
        ("GET", "/score", b"", 404),
        ("POST", "/load", b'{"file": "/etc/passwd", "version": 1}', 403),
    ],
)
def test_requests_that_are_none_of_the_protocol_are_refused(
    method: str, path: str, body: bytes, status: int, port: int
) -> None:
    assert ask(port, method, path, body)[0] == status


def test_a_body_that_is_too_long_is_not_read(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("POST", "/score")
    connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_only_who_knows_the_token_changes_the_weights(port: int, batch: TokenBatch, tmp_path: Path) -> None:
    other = load_policy("tiny:qwen3-64@6").model
    file = tmp_path / "other.safetensors"
    save_file({name: p.detach().contiguous() for name, p in other.named_parameters()}, file)
    url = f"http://127.0.0.1:{port}"
    before = ReferenceClient(url).score(batch, PLAIN)
    for token in (None, "guessed"):
        with pytest.raises(ServiceError, match=r"refused /load \(403\)"):
            ReferenceClient(url, token=token).load(file, 1)
    assert ReferenceClient(url).score(batch, PLAIN).equal(before)
    ReferenceClient(url, token=TOKEN).load(file, 1)
    after = ReferenceClient(url).score(batch, PLAIN)
    assert after.equal(own_logprobs(other, batch, PLAIN))
    assert not after.equal(before)


def test_other_parameters_than_the_models_are_refused(port: int, tmp_path: Path) -> None:
    client = ReferenceClient(f"http://127.0.0.1:{port}", token=TOKEN)
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ServiceError, match="holds other parameters"):
        client.load(tmp_path / "other.safetensors", 1)
    with pytest.raises(ServiceError, match="cannot be read"):
        client.load(tmp_path / "none.safetensors", 1)
    status, _ = ask(port, "POST", "/load", b"[]", **{TOKEN_HEADER: TOKEN})
    assert status == 400


def test_a_reference_follows_the_policy_and_is_given_back_what_it_was(
    port: int, batch: TokenBatch, tmp_path: Path
) -> None:
    model = load_policy(BASE).model
    client = ReferenceClient(f"http://127.0.0.1:{port}", token=TOKEN)
    reference = ServedReference(client, model, PLAIN, folder=tmp_path)
    at_first = reference.logprobs(batch)
    saved = load(save(dict(reference.tensors())))
    assert saved.keys() == {f"reference.{name}" for name, _ in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    assert reference.logprobs(batch).equal(at_first)  # frozen while the policy moves
    reference.refresh()
    moved = reference.logprobs(batch)
    assert moved.equal(own_logprobs(model, batch, PLAIN))
    assert not moved.equal(at_first)
    reference.restore(saved)
    assert reference.logprobs(batch).equal(at_first)
    assert len(list(tmp_path.iterdir())) == 1  # the one that is held
    with pytest.raises(CheckpointError, match="reference policy"):
        reference.restore({})


def test_a_reference_that_never_changes_needs_nothing_for_a_restart(port: int, batch: TokenBatch) -> None:
    client = ReferenceClient(f"http://127.0.0.1:{port}")
    reference = ServedReference(client, load_policy(BASE).model, PLAIN, folder=None)
    assert reference.tensors() == {}
    reference.restore({})
    with pytest.raises(ConfigError, match="this reference cannot change"):
        reference.refresh()


def test_an_answer_that_does_not_come_is_an_error_with_an_explanation(batch: TokenBatch) -> None:
    server = make_server(0, ReferenceModel(), None)
    server.server_close()  # nobody listens at its port any more
    client = ReferenceClient(f"http://127.0.0.1:{server.server_port}", explain=lambda: "what the log says")
    with pytest.raises(ServiceError, match=r"does not answer /score: ConnectionRefusedError(.|\n)*what the log says"):
        client.score(batch, PLAIN)
