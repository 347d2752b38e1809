"""Talking with what jobs have trained, over real HTTP: which model answers, when it is replaced, and when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from served_jobs import KEY, Client, IdleJobs

from gspo_gym.cli.jobs.inference import Inference, ModelToServe
from gspo_gym.remote.guard import RefusalError
from gspo_gym.remote.serving import BackgroundServer

CHAT = "/api/inference/v1/chat/completions"


def body_for(model: Any, said: str = "Hi.") -> dict[str, Any]:
    # `thinking_budget` as the hosted trainer's client adds it.
    return {"model": model, "messages": [{"role": "user", "content": said}], "thinking_budget": 256}


def ask(client: Client, model: Any, said: str = "Hi.", path: str = CHAT) -> tuple[int, Any]:
    return client.call("POST", path, body_for(model, said))


def answered(client: Client, model: str, said: str = "Hi.") -> dict[str, Any]:
    status, answer = ask(client, model, said)
    assert status == 200, answer
    return dict(answer)


def refused(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["detail"]["error"]["code"]


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_model_is_started_once_and_replaced_when_another_is_asked_for(served: IdleJobs, client: Client) -> None:
    one, other = served.trained(client), served.trained(client)
    first = answered(client, f"rl:tiny:qwen3-64:{one}")
    assert (first["model"], first["path"]) == (f"rl:tiny:qwen3-64:{one}:step_000001", "/v1/chat/completions")
    assert first["served"] == f"{served.folder}/runs/{one}@1"
    for name in (one, f"ft:x:{one}", f"{one}@1", f"{one}@latest", f"rl:a:b:{one}:step_000001"):
        assert answered(client, name) == first, name
    second = answered(client, other)
    assert second["served"] == f"{served.folder}/runs/{other}@1"
    assert not lives(first["pid"])
    assert answered(client, "tiny:qwen3-64")["served"] == "tiny:qwen3-64"
    for path in ("/api/v1/chat/completions", "/api/v1/responses", "/api/inference/v1/completions"):
        assert ask(client, other, path=path)[1]["path"] == path[path.index("/v1") :]


def test_a_model_ends_with_the_service(served: IdleJobs) -> None:
    with BackgroundServer(served.guarded) as server:
        client = Client(server.url)
        pid = answered(client, served.trained(client))["pid"]
        assert lives(pid)
    assert not lives(pid)


def test_a_name_that_means_no_model_is_refused_and_the_present_one_goes_on(served: IdleJobs, client: Client) -> None:
    job_id, queued = served.trained(client), client.create({})
    first = answered(client, job_id)
    unknown = (404, "unknown_model")
    for name in (None, 3, "", "nope", "../x", "Qwen/Qwen3-4B", f"{job_id}@7", "job_" + "0" * 24, queued):
        assert refused(ask(client, name)) == unknown, name
    served.store.update(job_id, status="training")
    assert refused(ask(client, job_id)) == (409, "job_runs")
    served.store.update(job_id, status="cancelled")
    assert answered(client, job_id) == first


def test_a_model_that_cannot_be_served_says_why_and_another_still_can(served: IdleJobs, client: Client) -> None:
    job_id = served.trained(client)
    status, answer = ask(client, f"{job_id}@best")
    assert (status, answer["detail"]["error"]["message"]) == (
        424,
        f"rl:tiny:qwen3-64:{job_id}@best: CheckpointError: none of its checkpoints was evaluated",
    )
    answered(client, job_id)


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    served = IdleJobs(tmp_path, inference=["/no/such/command"])
    with BackgroundServer(served.guarded) as server:
        client = Client(server.url)
        status, answer = ask(client, served.trained(client))
    assert status == 424
    assert "/no/such/command" in answer["detail"]["error"]["message"]


def test_a_model_that_has_died_is_started_again_and_what_it_was_asked_is_not_asked_twice(
    served: IdleJobs, client: Client
) -> None:
    job_id = served.trained(client)
    first = answered(client, job_id)
    assert refused(ask(client, job_id, "die")) == (424, "model_failed")
    second = answered(client, job_id)
    os.kill(second["pid"], 9)
    while lives(second["pid"]):  # before its end it might take the request
        pass
    third = answered(client, job_id)
    assert len({first["pid"], second["pid"], third["pid"]}) == 3


def test_a_refusal_of_the_model_is_passed_on(served: IdleJobs, client: Client) -> None:
    status, answer = ask(client, served.trained(client), "refuse")
    assert (status, answer["path"]) == (400, "/v1/chat/completions")


def test_a_model_is_replaced_after_it_has_answered(served: IdleJobs, client: Client, tmp_path: Path) -> None:
    one, other, pipe = served.trained(client), served.trained(client), tmp_path / "pipe"
    os.mkfifo(pipe)
    first = answered(client, one)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(answered, client, one, f"wait {pipe}")
        writing = os.open(pipe, os.O_WRONLY)  # when the model reads from it
        following = threads.submit(answered, client, other)
        os.close(writing)
        assert waiting.result()["pid"] == first["pid"]
        assert following.result()["served"] == f"{served.folder}/runs/{other}@1"


def test_more_requests_than_there_is_room_for_are_refused(served: IdleJobs, client: Client, tmp_path: Path) -> None:
    job_id, pipe = served.trained(client), tmp_path / "pipe"
    os.mkfifo(pipe)
    answered(client, job_id)
    with ThreadPoolExecutor(65) as threads:
        waiting = [threads.submit(ask, client, job_id, f"wait {pipe}") for _ in range(65)]
        done, _ = wait(waiting, return_when=FIRST_COMPLETED)
        assert [refused(one.result()) for one in done] == [(503, "overloaded")]
        while not all(one.done() for one in waiting):  # each opening wakes those that read by then
            with contextlib.suppress(OSError):
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    assert sorted(one.result()[0] for one in waiting) == [200] * 64 + [503]
    answered(client, job_id)


@pytest.mark.parametrize("said", ["wait", "stream"])
def test_a_client_that_hangs_up_holds_no_model(served: IdleJobs, client: Client, tmp_path: Path, said: str) -> None:
    one, other, pipe = served.trained(client), served.trained(client), tmp_path / "pipe"
    os.mkfifo(pipe)
    first = answered(client, one)
    connection = http.client.HTTPConnection(urlsplit(client.url).netloc)
    connection.request("POST", CHAT, json.dumps(body_for(one, f"{said} {pipe}")), {"X-API-Key": KEY})
    writing = os.open(pipe, os.O_WRONLY)  # when the model reads from it
    connection.close()
    assert answered(client, other)["served"] == f"{served.folder}/runs/{other}@1"
    os.close(writing)
    assert not lives(first["pid"])


def test_requests_that_wait_for_a_model_that_loads_are_counted_and_it_ends_with_them(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loading = ["sh", "-c", f"echo $$ > {pipe}; exec sleep 3600"]  # never says that it serves
    models = [ModelToServe(f"model {number}", f"name {number}") for number in range(65)]

    async def play() -> None:
        inference = Inference(loading, os.environ, tmp_path / "log")
        request: Any = None  # which is looked at when the model is there
        waiting = [asyncio.create_task(inference.answer(model, "completions", {}, request)) for model in models[:64]]
        pid = int(await asyncio.to_thread(pipe.read_text))
        with pytest.raises(RefusalError, match="64 requests"):
            await inference.answer(models[64], "completions", {}, request)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await inference.close()
        assert not lives(pid)

    asyncio.run(asyncio.wait_for(play(), 30))
