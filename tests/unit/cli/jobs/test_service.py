"""`gspo-gym jobs serve` as a process: lost connections, killed services, and a real training."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import socket
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import TOKEN, fake_hub
from fake_task_app import FakeTaskApp
from served_jobs import HOSTED, KEY, Client, ServiceProcess, body_of

from gspo_gym.cli.main import main
from gspo_gym.policy.load import load_policy
from gspo_gym.remote.serving import BackgroundServer

SHORT = ("rollout.max_model_len=512", "rollout.max_output_tokens=8")  # the tiny model's texts

pytestmark = pytest.mark.slow


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    made = ServiceProcess(tmp_path / "jobs")
    yield made
    made.end()


def starts(tmp_path: Path) -> list[str]:
    return (tmp_path / "starts").read_text(encoding="utf-8").splitlines()


def test_two_thousand_events_come_in_order_none_twice_over_seven_dropped_connections(service: ServiceProcess) -> None:
    client = service.start()
    job_id = client.create({"events": 2_000})
    got: list[dict[str, Any]] = []
    drops = [1, 10, 200, 201, 600, 1_000, 1_999]
    for drop in drops:  # in the middle of an answer: after so many events in all
        with contextlib.closing(client.stream(job_id, after=len(got))) as stream:
            while len(got) < drop:
                got.append(next(stream))
    got += client.stream(job_id, after=len(got))
    assert [event["seq"] for event in got] == list(range(1, len(got) + 1))
    numbers = [event["data"]["number"] for event in got if event["type"] == "rl.run.judge_paused"]
    assert numbers == list(range(2_000))
    assert got[-1]["type"] == "rl.job.completed"
    print(f"{len(got)} events over {len(drops)} dropped connections")


def test_a_service_that_is_killed_finds_its_jobs_again_and_starts_none_twice(
    service: ServiceProcess, tmp_path: Path
) -> None:
    pipe, log = tmp_path / "pipe", str(tmp_path / "starts")
    os.mkfifo(pipe)
    client = service.start()
    running, waiting = client.create({"pause": str(pipe), "starts": log}), client.create({"starts": log})
    before = client.until(running, "rl.train.started")
    service.kill()
    client = service.start()
    states = [client.call("GET", f"/api/rl/jobs/{job_id}")[1]["status"] for job_id in (running, waiting)]
    assert states == ["training", "queued"]
    pipe.write_bytes(b"")
    after = list(client.stream(running, after=before["seq"]))
    assert [event["seq"] for event in after] == list(range(before["seq"] + 1, before["seq"] + 1 + len(after)))
    assert after[-1]["type"] == "rl.job.completed"
    assert client.ended(waiting)["status"] == "succeeded"
    assert starts(tmp_path) == [running, waiting]


@pytest.mark.nightly
def test_a_service_that_is_killed_at_random_moments_starts_each_job_once(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "jobs", "--max-running", "2")
    rng, log = random.Random(5), str(tmp_path / "starts")
    jobs: list[str] = []
    for _ in range(6):
        client = service.start()
        jobs += [client.create({"starts": log, "events": 50}) for _ in range(3)]
        # A moment in the life of a job: after one of its first events was seen.
        with contextlib.closing(client.stream(jobs[-rng.randint(1, 3)])) as stream:
            for _ in zip(range(rng.randint(1, 6)), stream, strict=False):
                pass
        service.kill()
    client = service.start()
    for job_id in jobs:
        assert client.ended(job_id)["status"] == "succeeded"
        events = list(client.stream(job_id))
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert [e["data"]["number"] for e in events if e["type"] == "rl.run.judge_paused"] == list(range(50))
    assert sorted(starts(tmp_path)) == sorted(jobs)
    print(f"{len(jobs)} jobs over 6 kills of the service, each started once")
    service.end()


def test_a_stream_goes_on_with_a_restarted_service_and_ends_with_one_that_is_told_to_stop(
    service: ServiceProcess, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    client = service.start()
    job_id = client.create({"pause": str(pipe)})
    stream = client.stream(job_id)
    seen = next(event["seq"] for event in stream if event["type"] == "rl.train.started")
    assert service.kill(signal.SIGTERM) == -signal.SIGTERM
    assert list(stream) == [], "the stream ends, and does not hold the service up"
    client = service.start()
    pipe.write_bytes(b"")
    assert [event["seq"] for event in client.stream(job_id, after=seen)][:1] == [seen + 1]


def test_a_folder_has_one_service(service: ServiceProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    service.start()
    assert main(["jobs", "serve", "--folder", str(tmp_path / "jobs"), "--port", "0"]) == 2
    assert "another service has these jobs" in capfd.readouterr().err


def test_a_key_is_made_and_printed_once_and_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "jobs", has_key=False)
    url = service.start().url
    path = tmp_path / "jobs" / "api-key"
    key = path.read_text(encoding="utf-8").strip()
    assert (len(key) >= 40, path.stat().st_mode & 0o777) == (True, 0o600)
    assert key in service.said
    assert Client(url, key).call("GET", "/health")[0] == 200
    assert Client(url, KEY).call("GET", "/health")[0] == 401
    service.kill()
    again = service.start()
    assert key not in service.said
    assert Client(again.url, key).call("GET", "/health")[0] == 200
    service.end()


def test_a_hosted_file_is_trained_as_it_stands_and_its_model_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the model and the URL of the client's command line, on a machine without a GPU."""
    service = ServiceProcess(tmp_path / "jobs", "--local", *SHORT, trainer=None)
    known = {"/info": {"service": {"task": {"id": "math"}}}, "/task_info": {"task": {"id": "math"}}}
    answers = {path: (200, answer) for path, answer in {"/health": {"healthy": True}, **known}.items()}
    quiz = FakeTaskApp(num_turns=1, answers=answers)
    with BackgroundServer(quiz) as app, fake_hub() as hub, contextlib.ExitStack() as stack:
        stack.callback(service.end)
        for name, value in {
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }.items():
            monkeypatch.setenv(name, value)
        client = service.start()
        assert client.call("POST", "/api/rl/verify_task_app", {"endpoint_base_url": app.url})[1]["any_ok"] is True
        body = body_of({})
        body["data"] |= {"config": HOSTED.read_text(encoding="utf-8"), "endpoint_base_url": app.url}
        status, job = client.call("POST", "/api/rl/jobs", body)
        assert status == 201, job
        events = list(client.stream(job["job_id"]))
        asked = {"repo_id": "me/quiz", "key": f"rl:tiny:qwen3-64:{job['job_id']}", "artifact_kind": "lora"}
        status, exported = client.call("POST", "/api/learning/exports/hf", {**asked, "visibility": "private"})
        export_id = exported["export_id"]
        assert export_id.startswith("export_")
        while status == 202 and exported["status"] == "running":  # a busy machine takes longer than an answer may
            time.sleep(0.5)
            exported = client.call("GET", f"/api/learning/exports/{export_id}")[1]
        done = {"status": "succeeded", "repo_id": "me/quiz", "repo_url": f"{hub.url}/me/quiz"}
        assert exported == {"export_id": export_id, **done}
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(hub.repos["me/quiz"])
        _, job = client.call("GET", f"/api/rl/jobs/{job['job_id']}")
        said = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5, "temperature": 0, "logprobs": True}
        status, answer = client.call(
            "POST", "/api/inference/v1/chat/completions", {"model": job["model_id"], **said, "thinking_budget": 256}
        )
        assert status == 200, answer
        _, raw = client.call("GET", f"/api/learning/models/{job['model_id']}/archive")
    assert job["status"] == "succeeded", job["error"]
    types = [event["type"] for event in events]
    assert types.count("rl.train.step") == 10
    assert [event["data"]["step"] for event in events if event["type"] == "rl.eval.summary"] == [0, 10]
    assert job["results"]["checkpoints"][-1]["step"] == 10
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        tar.extractall(tmp_path / "model", filter="data")
    policy = load_policy(str(tmp_path / "model" / job["job_id"]), dtype="float32", device="cpu")
    prompt = policy.tokenizer.apply_chat_template(said["messages"], add_generation_prompt=True, return_tensors="pt")
    ids = torch.as_tensor(prompt["input_ids"])
    made = policy.model.generate(
        ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    sampled = made.sequences[0, ids.shape[1] :]
    expected = [float(row[0].log_softmax(-1)[token]) for row, token in zip(made.logits, sampled, strict=True)]
    assert [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]] == pytest.approx(expected, abs=1e-5)


def test_exports_to_a_hub_that_does_not_answer_hold_up_neither_requests_nor_the_services_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub, ThreadPoolExecutor(8) as threads:
        values = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        for name, value in {**values, "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}"}.items():
            monkeypatch.setenv(name, value)
        service = ServiceProcess(tmp_path / "jobs")
        client = service.start()
        job_id = client.create({"model": "tiny:qwen3-64"})
        assert client.ended(job_id)["status"] == "succeeded"
        asked = {"repo_id": "me/x", "key": f"rl:tiny:qwen3-64:{job_id}"}
        exports = [threads.submit(client.call, "POST", "/api/learning/exports/hf", asked) for _ in range(8)]
        hub.settimeout(120)
        pushing, _ = hub.accept()
        status, other = client.call("POST", "/api/rl/jobs", body_of({}))
        assert (status, client.ended(other["job_id"])["status"]) == (201, "succeeded")
        service.kill(signal.SIGTERM)
        with pushing:
            while pushing.recv(65_536):  # until the process that pushes has ended
                pass
        assert {one.result()[0] for one in exports} <= {202, 503}  # 202: it took longer than a client waits
