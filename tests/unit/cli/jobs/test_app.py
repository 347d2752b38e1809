"""The routes of the jobs service, over real HTTP: keys, creating, refusing, reading and exporting. No trainer runs."""

from __future__ import annotations

import asyncio
import io
import tarfile
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_task_app import FakeTaskApp
from forked import forked
from full_disk import small_disk
from served_jobs import HOSTED, Client, IdleJobs, body_of

from gspo_gym.cli.jobs.records import Export, Machine, parse_request, toml_of
from gspo_gym.cli.jobs.store import Event
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ServiceError
from gspo_gym.remote.serving import BackgroundServer


def code_of(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["detail"]["error"]["code"]


def test_every_route_refuses_a_request_without_the_key(served: IdleJobs, client: Client) -> None:
    routes = [(method, route.path) for route in served.app.routes for method in route.methods]  # type: ignore[attr-defined]
    assert len(routes) > 30
    for key in (None, "another"):
        stranger = Client(client.url, key)
        for method, path in routes:
            assert code_of(stranger.call(method, path.replace("{", "").replace("}", ""))) == (401, "unauthorised"), path


def test_twenty_requests_at_once_with_one_key_make_one_job(served: IdleJobs, client: Client) -> None:
    with ThreadPoolExecutor(20) as threads:
        asked = [
            threads.submit(client.call, "POST", "/api/rl/jobs", body_of({}), Idempotency_Key="k") for _ in range(20)
        ]
        answers = [one.result() for one in asked]
    assert sorted(status for status, _ in answers) == [200] * 19 + [201]
    assert len({job["job_id"] for _, job in answers}) == len(served.store.jobs()) == 1


def test_a_key_of_another_request_is_refused_and_without_a_key_each_request_is_a_job(client: Client) -> None:
    client.create({}, Idempotency_Key="k")
    assert code_of(client.call("POST", "/api/rl/jobs", body_of({"a": 1}), Idempotency_Key="k")) == (409, "key_conflict")
    assert client.create({}) != client.create({})


def test_the_model_and_the_url_beside_the_configuration_go_over_those_in_it(client: Client) -> None:
    job_id = client.create({})
    _, answer = client.call("GET", f"/api/rl/jobs/{job_id}/config")
    assert answer["config"]["model"]["base"] == "Qwen/Qwen3-4B"
    trained = RunConfig.from_dict(tomllib.loads(answer["resolved_toml"]))
    assert (trained.model.base, trained.model.label) == ("tiny:qwen3-64", job_id)
    assert trained.services is not None
    assert trained.services.task_url == "http://127.0.0.1:8001"
    assert trained.run_folder.parts[-2:] == ("runs", job_id)


def changed(path: str, value: Any) -> dict[str, Any]:
    """A good body with one value changed."""
    body = holder = body_of({})
    *above, name = path.split("/")
    for part in above:
        holder = holder[part]
    holder[name] = value
    return body


REFUSED: list[tuple[Any, str]] = [
    ([], "expected a JSON object"),
    ({"data": []}, "data: expected an object"),
    ({}, "data.config: expected the configuration"),
    ({"data": {}}, "data.config: expected the configuration"),
    ({"data": {"config": "a = "}}, "expected TOML"),
    ({"data": {"config": f"[{chr(46).join(5_000 * chr(97))}]"}}, "at most 64 deep"),
    (changed("job_type", "sft"), 'expected "rl"'),
    (changed("tags", "mine"), "tags: expected an object"),
    (changed("data/model", 3), "data.model: expected a text"),
    (changed("data/config/model", "x"), "model: expected a table"),
    (changed("data/config/training/learning_rate", -1.0), "training.learning_rate"),
    (changed("data/config/training/lerning_rate", 0.1), "did you mean 'learning_rate'"),
    (changed("data/config/topology", {"type": "single_node_split", "gpus_for_training": 3}), "topology"),
]


def test_a_request_that_cannot_be_trained_is_refused_by_name_and_makes_no_job(served: IdleJobs, client: Client) -> None:
    for body, said in REFUSED:
        status, answer = client.call("POST", "/api/rl/jobs", body)
        assert status in (400, 422), answer
        assert said in answer["detail"]["error"]["message"]
    assert served.store.jobs() == []


def test_a_number_that_is_none_is_refused(client: Client) -> None:
    path = f"/api/rl/jobs/{client.create({})}"
    for asked in (
        "events?since_seq=-1",
        "events?limit=0",
        "events?since_seq=1e3",
        "metrics?after_step=x",
        "stream?heartbeat=0",
        "stream?since_id=99999999999999999999",
    ):
        assert code_of(client.call("GET", f"{path}/{asked}")) == (400, "invalid_number"), asked
    assert code_of(client.call("GET", f"{path}/stream", Last_Event_ID="one")) == (400, "invalid_number")


def test_a_full_queue_takes_no_more(tmp_path: Path) -> None:
    with BackgroundServer(IdleJobs(tmp_path, max_queued=2).guarded) as server:
        client = Client(server.url)
        first, _ = client.create({}, Idempotency_Key="k"), client.create({})
        assert code_of(client.call("POST", "/api/rl/jobs", body_of({}))) == (429, "queue_full")
        status, again = client.call("POST", "/api/rl/jobs", body_of({}), Idempotency_Key="k")
        assert (status, again["job_id"]) == (200, first), "a repeated request needs no room"
        client.call("POST", f"/api/rl/jobs/{first}/cancel")
        client.create({})


def test_a_queued_job_is_cancelled_at_once_and_an_ended_one_stays_as_it_is(served: IdleJobs, client: Client) -> None:
    job_id, done = client.create({}), served.trained(client)
    for _ in range(2):
        assert client.call("POST", f"/api/rl/jobs/{job_id}/cancel")[1]["status"] == "cancelled"
        assert client.call("POST", f"/api/rl/jobs/{done}/cancel")[1]["status"] == "succeeded"
    assert [event["type"] for event in client.stream(job_id)] == ["rl.job.created", "rl.job.cancelled"]


def test_a_client_that_has_the_last_event_is_told_to_stop_asking(served: IdleJobs, client: Client) -> None:
    job_id = served.trained(client)
    assert client.call("GET", f"/rl/jobs/{job_id}/stream", Last_Event_ID="2") == (204, b"")


def test_all_three_names_of_a_job_answer_alike(served: IdleJobs, client: Client) -> None:
    job_id = served.trained(client)
    for what in ("", "/status", "/events", "/metrics", "/timeline"):
        answers = [
            client.call("GET", f"/api/{kind}/jobs/{job_id}{what}") for kind in ("rl", "learning", "orchestration")
        ]
        assert answers[0][0] == 200
        assert answers[0] == answers[1] == answers[2]


def test_events_are_paged_by_their_numbers(served: IdleJobs, client: Client) -> None:
    job_id = client.create({})
    served.store.record(job_id, [Event("rl.run.x", str(number)) for number in range(2, 451)])
    seqs: list[int] = []
    while page := client.call("GET", f"/api/rl/jobs/{job_id}/events?since_seq={len(seqs)}")[1]["events"]:
        assert len(page) <= 200
        seqs += [event["seq"] for event in page]
    assert seqs == list(range(1, 451))


def test_metrics_are_paged_by_whole_steps(served: IdleJobs, client: Client) -> None:
    job_id = served.trained(client, steps=5)
    points: list[Any] = []
    while page := client.call(
        "GET", f"/api/rl/jobs/{job_id}/metrics?limit=4&after_step={points[-1]['step'] if points else -1}"
    )[1]["points"]:
        points += page
    # Of a step: its loss under two names, and its return; of the last, two numbers of the evaluation, one under two.
    named = [(point["name"], point["step"]) for point in points]
    assert len(named) == len(set(named)) == 5 * 3 + 3
    assert [point["value"] for point in points if point["name"] == "train.loss"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [point["value"] for point in points if point["name"] == "eval.reward_mean"] == [0.75]


def test_a_trained_model_is_listed_and_another_job_begins_from_it(served: IdleJobs, client: Client) -> None:
    assert client.call("GET", "/api/learning/models")[1]["models"] == []
    job_id = served.trained(client)
    model = f"rl:tiny:qwen3-64:{job_id}"
    _, status = client.call("GET", f"/api/rl/jobs/{job_id}")
    assert (status["status"], status["fine_tuned_model"], status["results"]["final_reward"]) == (
        "succeeded",
        model,
        0.5,
    )
    for path in ("/api/learning/models", "/api/learning/models/rl", "/api/models"):
        assert [row["id"] for row in client.call("GET", path)[1]["models"]] == [model]
    _, artifacts = client.call("GET", "/api/artifacts?type=rl&status=succeeded&limit=5")
    assert (artifacts["rl_models"][0]["job_id"], artifacts["summary"]["total_count"]) == (job_id, 1)
    for path in ("learning", "artifacts"):
        assert client.call("GET", f"/api/{path}/models/{model}")[1]["checkpoints"][0]["step"] == 1
    body = changed("data/model", model)
    _, answer = client.call("POST", "/api/rl/jobs", body)
    toml = client.call("GET", f"/api/rl/jobs/{answer['job_id']}/config")[1]["resolved_toml"]
    assert tomllib.loads(toml)["model"]["source"] == f"rl:{job_id}"


def test_a_models_archive_holds_what_the_model_is_and_not_what_the_run_needs(served: IdleJobs, client: Client) -> None:
    job_id = served.trained(client)
    status, raw = client.call("GET", f"/api/learning/models/rl:tiny:qwen3-64:{job_id}/archive")
    assert status == 200
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert held == {f"{job_id}/config.json": b"{}", f"{job_id}/model.safetensors": b"w" * 700}


@pytest.mark.parametrize(
    "path", ["../../../../jobs.sqlite3", "/etc/passwd", "model.safetensors"], ids=["above", "absolute", "link"]
)
def test_an_archive_holds_no_file_from_outside_the_checkpoint(served: IdleJobs, client: Client, path: str) -> None:
    job_id = served.trained(client)
    folder = served.folder / "runs" / job_id / "checkpoints" / "step_000001"
    if path == "model.safetensors":
        (folder / path).unlink()
        (served.folder / "secret").write_text("SQLite" + "s" * 694, encoding="utf-8")  # as long as it was
        (folder / path).symlink_to(served.folder / "secret")
    else:
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"model.safetensors"', f'"{path}"'), encoding="utf-8")
    status, answer = client.call("GET", f"/api/learning/models/{job_id}/archive")
    assert status in (404, 500), answer
    assert b"SQLite" not in str(answer).encode()


@pytest.mark.parametrize("may_mount", [True, False])
@forked
def test_a_full_disk_is_an_answer_and_reading_goes_on(tmp_path: Path, may_mount: bool) -> None:
    with (
        small_disk(tmp_path / "disk", 8_000_000, may_mount=may_mount) as disk,
        BackgroundServer(IdleJobs(disk.folder).guarded) as server,
    ):
        client = Client(server.url)
        job_id = client.create({})
        disk.fill()
        large = body_of({"text": "x" * 500_000})
        assert code_of(client.call("POST", "/api/rl/jobs", large, Idempotency_Key="k")) == (507, "storage")
        assert client.call("GET", f"/api/rl/jobs/{job_id}/events")[0] == 200
        disk.free()
        assert client.call("POST", "/api/rl/jobs", large, Idempotency_Key="k")[0] == 201
        assert len(client.call("GET", "/api/jobs")[1]["jobs"]) == 2


def test_what_is_not_there_is_404(client: Client) -> None:
    for path in (
        "rl/jobs/job_0",
        "rl/jobs/..%2f..%2fetc/events",
        "learning/models/rl:a:job_000000000000000000000000",
        "learning/models/..%2f..%2fetc%2fpasswd/archive",
        "artifacts/models/x",
    ):
        assert client.call("GET", f"/api/{path}")[0] == 404, path


def test_an_export_of_no_model_or_to_no_repository_is_refused(client: Client) -> None:
    path = "/api/learning/exports/hf"
    assert code_of(client.call("POST", path, {"repo_id": "a/b", "key": "rl:x:y"})) == (404, "unknown_model")
    assert code_of(client.call("POST", path, {"repo_id": "../b", "key": "x"})) == (422, "invalid_request")


class SlowHub:
    """A hub that takes a model when it is told to, as `push` of the service."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, bool, bool]] = []
        self.takes = threading.Event()
        self.refuses = False

    async def __call__(self, export: Export) -> str:
        assert export.folder.name.startswith("job_")
        self.pushed.append((export.repo, export.is_private, export.is_merged))
        await asyncio.to_thread(self.takes.wait, 60)
        if self.refuses:
            raise ServiceError("the hub says no")
        return f"https://hub/{export.repo}"


def test_an_export_that_takes_long_is_answered_as_a_job_and_goes_on(tmp_path: Path) -> None:
    hub = SlowHub()
    served = IdleJobs(tmp_path, push=hub, export_answer_seconds=0.01)
    with BackgroundServer(served.guarded) as server:
        client = Client(server.url)
        asked = {"repo_id": "me/x", "key": served.trained(client), "artifact_kind": "training_file"}
        status, begun = client.call("POST", "/api/learning/exports/hf", asked)
        assert (status, begun["status"], begun["repo_url"]) == (202, "running", None)
        status, again = client.call("POST", "/api/learning/exports/hf", asked)  # joins the one that is under way
        assert (status, again["export_id"]) == (202, begun["export_id"])
        where = f"/api/learning/exports/{begun['export_id']}"
        assert client.call("GET", where) == (200, begun)
        hub.takes.set()
        while (ended := client.call("GET", where)[1])["status"] == "running":
            pass
        assert (ended["status"], ended["repo_url"]) == ("succeeded", "https://hub/me/x")
        assert hub.pushed == [("me/x", True, True)]
        assert code_of(client.call("GET", "/api/learning/exports/export_0")) == (404, "unknown_export")


def test_an_export_that_ends_in_time_is_answered_with_its_end(tmp_path: Path) -> None:
    hub = SlowHub()
    hub.takes.set()
    served = IdleJobs(tmp_path, push=hub)
    with BackgroundServer(served.guarded) as server:
        client = Client(server.url)
        asked = {"repo_id": "me/x", "key": served.trained(client), "visibility": "public"}
        status, answer = client.call("POST", "/api/learning/exports/hf", asked)
        assert (status, answer["status"], answer["repo_url"]) == (200, "succeeded", "https://hub/me/x")
        assert hub.pushed == [("me/x", False, False)]
        hub.refuses = True
        assert code_of(client.call("POST", "/api/learning/exports/hf", asked)) == (424, "export_failed")


def test_exports_end_with_the_service(tmp_path: Path) -> None:
    ended = []

    async def hang(export: Export) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append((export.folder.name.startswith("job_"), export.repo))
        return export.repo

    served = IdleJobs(tmp_path, push=hang, export_answer_seconds=0.01)
    with BackgroundServer(served.guarded) as server:
        client = Client(server.url)
        asked = {"repo_id": "me/x", "key": served.trained(client)}
        assert client.call("POST", "/api/learning/exports/hf", asked)[0] == 202
        assert ended == []
    assert ended == [(True, "me/x")]


def test_a_task_app_is_verified_before_a_job_is_sent(client: Client) -> None:
    path = "/api/rl/verify_task_app"
    with BackgroundServer(FakeTaskApp(answers={"/health": (200, {"healthy": True})})) as app:
        assert client.call("POST", path, {"endpoint_base_url": app.url})[1]["any_ok"] is True
    status, answer = client.call("POST", path, {"endpoint_base_url": "http://127.0.0.1:1"})
    assert (status, answer["any_ok"]) == (200, False)
    assert code_of(client.call("POST", path, {"endpoint_base_url": "file:///etc/passwd"})) == (422, "invalid_request")


def test_a_configuration_may_be_sent_as_toml(served: IdleJobs, client: Client) -> None:
    body = body_of({})
    body["data"]["config"] = HOSTED.read_text(encoding="utf-8")
    status, job = client.call("POST", "/api/rl/jobs", body)
    assert (status, job["base_model"], job["status"]) == (201, "tiny:qwen3-64", "queued")


def test_jobs_are_listed_newest_first_by_status_and_time(served: IdleJobs, client: Client) -> None:
    served.now = 1795457324.6659114  # told as .665911, although this float times 10**6 ends in .5 and rounds up
    first = served.trained(client)
    served.now += 1e-3
    second = client.create({})
    created = client.call("GET", f"/api/rl/jobs/{first}")[1]["created_at"].replace("+", "%2B")
    for query, wanted in {
        "": [second, first],
        "?limit=1": [second],
        "?status=succeeded": [first],
        f"?created_after={created}": [second],
        "?created_after=9999999999": [],
        "?created_after=1": [second, first],
        "?type=sft": [],
    }.items():
        assert [job["job_id"] for job in client.call("GET", f"/api/learning/jobs{query}")[1]["jobs"]] == wanted, query
    assert code_of(client.call("GET", "/api/rl/jobs?created_after=today")) == (400, "invalid_time")


def test_a_file_is_taken_as_the_hosted_client_sends_it(client: Client) -> None:
    body = body_of({})
    config = body["data"]["config"]
    config["reference"] = {**config.get("reference", {}), "placement": "dedicated"}
    config["topology"]["gpus_for_ref"] = 1
    config["compute"]["gpu_count"] += 1
    config["compute"]["topology"] = {"reference_placement": "none"}  # which the client writes in for want of another
    status, job = client.call("POST", "/api/rl/jobs", body)
    assert status == 201, job
    resolved = tomllib.loads(client.call("GET", f"/api/rl/jobs/{job['job_id']}/config")[1]["resolved_toml"])
    assert resolved["reference"]["placement"] == "dedicated"


def test_what_the_hosted_client_writes_in_is_no_contradiction_to_a_kl_term(tmp_path: Path) -> None:
    body = body_of({})
    config = body["data"]["config"]
    config.pop("reference", None)
    config["loss"] = {**config.get("loss", {}), "kl_coef": 0.1}
    config["compute"]["topology"] = {"reference_placement": "none"}
    machine = Machine(is_local=True, overrides=["rollout.max_output_tokens=8"])
    resolved = toml_of(parse_request(body, runs=tmp_path, machine=machine), "job_1")
    assert tomllib.loads(resolved)["reference"]["placement"] == "shared"
    assert '# compute.topology.reference_placement: "none", which a client inserts, counts as absent' in resolved


def test_the_services_own_limit_goes_over_the_files_other_name_for_it(tmp_path: Path) -> None:
    body = body_of({})
    body["data"]["config"]["rollout"]["policy_config"] = {"max_tokens": 4096, "temperature": 0.5}
    machine = Machine(is_local=True, overrides=["rollout.max_output_tokens=256"])
    config = parse_request(body, runs=tmp_path, machine=machine)
    assert (config.rollout.max_output_tokens, config.rollout.temperature) == (256, 0.5)


def test_a_machine_without_gpus_trains_what_was_written_for_some(tmp_path: Path) -> None:
    machine = Machine(is_local=True, overrides=["rollout.max_output_tokens=8"])
    config = parse_request(body_of({}), runs=tmp_path, machine=machine)
    assert (config.compute, config.topology, config.vllm, config.rollout.engine) == (None, None, None, "local")
    assert (config.rollout.max_model_len, config.rollout.max_output_tokens) == (8_192, 8)
