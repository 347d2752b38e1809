"""Mutated requests to every HTTP server of this project: an answer each time, and never a 5xx because of their form.

Over real HTTP on loopback. A server that is not in SERVERS, or a file that makes one and is not in SOURCES, fails here.
"""

from __future__ import annotations

import ast
import contextlib
import http.client
import itertools
import json
import logging
import random
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import served_jobs
import websockets.sync.client
from nightly_seed import FIRST_SEED
from request_fuzz import Good, Spoilt, spoilt_requests, spoilt_text, status_of
from rule_judge import RuleJudge
from scripted_model import ScriptedModel, calls, text
from served_gateway import LOOK, SETTINGS, replying, user

from gspo_gym.cli.view import create_app as create_view_app
from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.tools import tool
from gspo_gym.judge.model.prompt import Question, build_messages
from gspo_gym.judge.model.transcript import Piece, Transcript
from gspo_gym.judge.rubric import Criterion
from gspo_gym.judge.server import create_fake_judge_app, create_judge_app
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.remote.gateway.app import create_gateway_app, rollout_url
from gspo_gym.remote.gateway.model_app import Served, create_model_app
from gspo_gym.remote.gateway.session import Gateway
from gspo_gym.remote.serve.agent_app import AgentTask, agent_app
from gspo_gym.remote.serve.openenv_server import create_openenv_app
from gspo_gym.remote.serve.task_app_server import ServedEnv, create_task_app, served_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode_files import write_episodes
from gspo_gym.types import Message, Outcome, Sampling, Task, Trajectory

ROOT = Path(__file__).parents[2]
Server = Callable[[], AbstractContextManager[tuple[str, list[Good]]]]


class Echo(ToolEnv):
    """Answers with what it is given, so that what was read is written again."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix

    def start(self, options: Any) -> str:
        return f"{self.prefix} {options}"

    @tool
    def echo(self, text: str, times: float = 1.0) -> str:
        """Say it again.

        Args:
            text: what.
            times: how often.
        """
        return f"{text} {times}"


class Parrot(TextEnv):
    """Says what it hears, for six turns."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.turns = 0
        return f"{self.prefix}{seed} {options}", {}

    def step(self, action: str) -> Any:
        self.turns += 1
        return action, 0.5, self.turns == 6, False, {}


def play(policy: str, name: str, given: Any) -> list[Good]:
    """Requests of the task app's contract; `given` are arguments of the environment."""
    config = {"model": "m", "inference_url": f"{policy}/v1?cid=x", "temperature": 0.5, "max_tokens": 9}
    rollout = {
        "run_id": "run",
        "env": {"env_name": name, "seed": 3, "config": {**given, "step_rewards": {"enabled": True}}},
        "policy": {"policy_name": "p", "config": {**config, "system_prompt": "s", "step_rewards": {"mode": "off"}}},
        "ops": ["agent", "env", "agent", "env"],
        "record": {"logprobs": True, "return_trace": True, "trace_format": "full"},
        "on_done": "terminate",
        "safety": {"max_ops": 8, "max_time_s": 20.0},
        "mode": "rl",
    }
    return [
        Good("/rollout", rollout),
        Good("/task_info?seed=0&seed=1", method="GET"),
        Good("/run/abort", {"run_id": "run"}),
        Good("/run/status/run", method="GET"),
        Good("/info", method="GET"),
        Good("/done", {}),
    ]


def openenv(*, has_tools: bool) -> list[Good]:
    """Requests of OpenEnv's protocol over HTTP."""
    action = {"type": "call_tool", "tool_name": "echo", "arguments": {"text": "a"}} if has_tools else {"message": "a"}
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": {"text": "a"}}}
    return [
        Good("/reset", {"seed": 3, "episode_id": "e", "a": [1, {"b": 2}]}),
        Good("/step", {"action": action}),
        Good("/mcp", rpc),
        Good("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}),
        Good("/schema", method="GET"),
        Good("/state", method="GET"),
    ]


def _asked_for(body: Any) -> Any:
    return calls(("echo", '{"text": "a"}')) if body.get("tools") else text("hello")


@contextlib.contextmanager
def task_app(env: Any = Parrot) -> Iterator[tuple[str, list[Good]]]:
    app = create_task_app(env, isolation="thread", client_options=["*"])
    with BackgroundServer(ScriptedModel(_asked_for)) as model, BackgroundServer(app) as server:
        yield server.url, play(model.url, env.__name__, {"prefix": "p"})


@contextlib.contextmanager
def agent() -> Iterator[tuple[str, list[Good]]]:
    async def greeting(client: Any, task: AgentTask) -> float:
        answer = await client.chat.completions.create(**task.policy, messages=user("Hi."))
        return float(len(answer.choices[0].message.content or ""))

    with BackgroundServer(ScriptedModel(_asked_for)) as model, BackgroundServer(agent_app(greeting)) as server:
        yield server.url, play(model.url, "greeting", {"loud": True})


@contextlib.contextmanager
def openenv_server() -> Iterator[tuple[str, list[Good]]]:
    with BackgroundServer(create_openenv_app(Echo, isolation="thread")) as server:
        created = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        session = _post(server.url, Good("/mcp", created))["result"]["session_id"]
        params = {"session_id": session, "name": "echo", "arguments": {"text": "a", "times": 1.0}}
        call = Good("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        yield server.url, [*openenv(has_tools=True), call]


@contextlib.contextmanager
def both_protocols() -> Iterator[tuple[str, list[Good]]]:
    app = served_app(ServedEnv("GuessNumber", protocol="all", client_options=["*"]))
    with BackgroundServer(ScriptedModel(_asked_for)) as model, BackgroundServer(app) as server:
        yield server.url, [*play(model.url, "GuessNumber", {"low": 2, "high": 9}), *openenv(has_tools=False)]


@contextlib.contextmanager
def gateway() -> Iterator[tuple[str, list[Good]]]:
    engine = replying(lambda prompt: "Fine.")
    made = Gateway(engine, tiny_tokenizer())
    with BackgroundServer(create_gateway_app(made)) as server:
        session = made.open_session(SETTINGS)
        base = rollout_url("", session.id).partition("/v1")[0]
        options = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "metadata": {"a": "b"}, "stream": False}
        chat = {"model": "m", "messages": user("Hi.", "There."), "max_tokens": 4, **options}
        said = {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}]}  # fmt: skip
        history = [*user("Hi."), said, {"role": "tool", "tool_call_id": "c", "content": "A tree."}]
        yield server.url, [
            Good(f"{base}/v1/chat/completions", {**chat, "logprobs": True}),
            Good(f"{base}/v1/chat/completions", {**chat, "messages": history, "tools": [LOOK], "tool_choice": "auto"}),
            Good(f"{base}/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}),
            Good(f"{base}/v1/chat/completions", {**chat, "tools": [LOOK], "tool_choice": "none"}),
            Good(f"{base}/v1/completions", {"model": "m", "prompt": "Once", "max_tokens": 4, "logprobs": 1, **options}),
            Good(f"{base}/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4}),
            Good(f"{base}/v1/responses", {"model": "m", "input": "Hi.", "max_output_tokens": 4, "instructions": "Be."}),
            Good(f"{base}/v1/responses", {"model": "m", "input": user("Hi."), "text": {"format": {"type": "text"}}}),
            Good("/v1/models", method="GET"),
            Good(f"/v1/chat/completions?cid={session.id}", {**chat, "response_format": {"type": "text"}}),
        ]  # fmt: skip


@contextlib.contextmanager
def model() -> Iterator[tuple[str, list[Good]]]:
    served = Served(replying(lambda prompt: "Fine."), tiny_tokenizer(), "m", 16, Sampling(), {})
    with BackgroundServer(create_model_app(served)) as server:
        options = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 3, "n": 2}
        chat = {"model": "m", "messages": user("Hi.", "There."), "max_tokens": 4, **options}
        path = "/v1/chat/completions"
        yield server.url, [
            Good(path, {**chat, "logprobs": True}),
            Good(path, {**chat, "stream": True, "stream_options": {"include_usage": True}, "tools": [LOOK]}),
            Good("/v1/completions", {"model": "m", "prompt": "Once", "max_tokens": 4, "logprobs": 1}),
            Good("/v1/responses", {"model": "m", "input": "Hi.", "max_output_tokens": 4, "instructions": "Be."}),
            Good("/v1/models/m", method="GET"),
        ]  # fmt: skip


@contextlib.contextmanager
def judge() -> Iterator[tuple[str, list[Good]]]:
    criteria = [{"id": "a.b", "description": "x", "weight": 0.5, "scale": "binary"}, {"id": "c.d", "description": "y"}]
    events = [
        {"observation": {"messages": user("Hi.")}, "info": {"message": {"role": "assistant", "content": "Hello."}}},
        {"observation": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}], "reward": 0.5},
        {"observation": {"health": 3}, "text": "I stop.", "truncated": True},
    ]
    record = {"input_messages": [{"role": "user", "parts": [{"type": "text", "text": "Hi."}]}], "output_text": "Ok."}
    body = {
        "policy_name": "p",
        "task_app": {"id": "t"},
        "trace": {"event_history": events, "metadata": {"env_id": "e"}},
        "options": {"event": True, "outcome": True, "rubric_overrides": {"event": {"version": "2"}}},
        "rubric": {"event": criteria, "outcome": {"criteria": criteria, "goal_text": "g", "aggregation": "sum"}},
    }
    trace = {"event_history": [{"call_records": [record]}, {"system_state_after": {"a": 1}, "reward": 1.0}]}
    with BackgroundServer(create_judge_app(RuleJudge(lambda *_: 1.0))) as server:
        yield (
            server.url,
            [
                Good("/judge/v1/score", body),
                Good("/api/judge/v1/score", {**body, "trace": trace}),
                Good("/api/graphs/verifiers/completions", {**body, "options": {"event": False}}),
                Good("/health", method="GET"),
            ],
        )


@contextlib.contextmanager
def fake_judge() -> Iterator[tuple[str, list[Good]]]:
    shown = Transcript((Piece("user", -1, "Hi."), Piece("assistant", 0, "Hello.")), 1)
    messages = build_messages(Question(shown, outcome=(Criterion("a", 'Says "hello".'),)), "ab" * 10)
    with BackgroundServer(create_fake_judge_app()) as server:
        yield (
            server.url,
            [
                Good("/v1/chat/completions", {"model": "fake-judge", "messages": messages, "seed": 3}),
                Good("/v1/models", method="GET"),
            ],
        )


@contextlib.contextmanager
def jobs() -> Iterator[tuple[str, list[Good]]]:
    key = {"x-api-key": served_jobs.KEY}
    with tempfile.TemporaryDirectory() as folder:
        served = served_jobs.IdleJobs(Path(folder), max_queued=50)
        with BackgroundServer(served.guarded) as server:
            job_id = served.trained(served_jobs.Client(server.url), steps=2)
            one, model = f"/api/rl/jobs/{job_id}", f"models/rl:tiny:qwen3-64:{job_id}"
            asked = [
                *("", "/status", "/events?since_seq=1&limit=9", "/metrics?after_step=1&limit=9", "/timeline"),
                *("/config", "/stream?since_id=1&heartbeat=3"),
            ]
            body = served_jobs.body_of({"difficulty": "easy"})
            yield (
                server.url,
                [
                    *[Good("/api/rl/jobs", body, headers={**key, "idempotency-key": name}) for name in ("a", "b")],
                    Good("/api/rl/jobs", body, headers=key),
                    *[Good(f"{one}{path}", method="GET", headers=key) for path in asked],
                    Good(f"{one}/cancel", headers=key),
                    Good("/api/learning/jobs?status=queued&type=rl&limit=9", method="GET", headers=key),
                    Good(f"/api/learning/{model}", method="GET", headers=key),
                    Good(f"/api/learning/{model}/archive", method="GET", headers=key),
                    Good("/api/artifacts?type=rl&limit=5", method="GET", headers=key),
                    Good("/api/rl/verify_task_app", {"endpoint_base_url": "http://127.0.0.1:1"}, headers=key),
                    Good(
                        "/api/inference/v1/chat/completions",
                        {"model": job_id, "messages": [{"role": "user", "content": "a"}]},
                        headers=key,
                    ),
                    Good("/api/learning/exports/hf", {"repo_id": "a/b", "key": "c", "visibility": "x"}, headers=key),
                ],
            )


@contextlib.contextmanager
def view() -> Iterator[tuple[str, list[Good]]]:
    with tempfile.TemporaryDirectory() as name:
        write_small_run(Path(name) / "small")
        with BackgroundServer(create_view_app(Path(name), "token", threading.Event())) as server:
            cookie = {"cookie": f"gspo_gym_{server.url.rpartition(':')[2]}=token"}
            asked = ("/", "/runs", "/run?run=small", "/run?run=small&beside=1", "/step?run=small&name=step_000001")
            yield server.url, [Good(path, method="GET", headers=cookie) for path in asked]


def write_small_run(folder: Path) -> None:
    """Write the folder of a run with one episode."""
    (folder / "episodes").mkdir(parents=True)
    (folder / "config.toml").write_text("# run 0123\n[model]\nlabel = 'small'\n", encoding="utf-8")
    started = {"schema": 1, "seq": 1, "time": 0.0, "step": 0, "kind": "started", "data": {"run": "0123"}}
    (folder / "events.jsonl").write_text(json.dumps(started) + "\n", encoding="utf-8")
    metrics = {"schema": 1, "step": 1, "time": 0.0, "rollout/reward_mean": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    episode = Trajectory(
        trajectory_id="step_000001/group_0000/0",
        attempt=0,
        task=Task("Parrot", 0),
        sampling_seed=0,
        segments=(),
        turns=(),
        messages=(Message("user", "Hi."),),
        outcome=Outcome.ENV_ERROR,
        success=None,
        error="gone",
    )
    write_episodes(folder / "episodes" / "step_000001.jsonl.gz", [episode])


@contextlib.contextmanager
def example_app() -> Iterator[tuple[str, list[Good]]]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples/openai_agent.py"), str(port)]
    with (
        BackgroundServer(ScriptedModel(lambda _: text("3"))) as model,
        subprocess.Popen(command, stderr=subprocess.DEVNULL) as process,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_for(url, process)
            goods = play(model.url, "x", {})
            yield url, [good for good in goods if good.path.startswith(("/rollout", "/task_info", "/info"))]
        finally:
            process.terminate()


SERVERS: dict[str, Server] = {
    "gateway": gateway,
    "model": model,
    "task app, text": task_app,
    "task app, tools": lambda: task_app(Echo),
    "agent": agent,
    "OpenEnv": openenv_server,
    "both protocols on one port": both_protocols,
    "judge": judge,
    "fake judge": fake_judge,
    "jobs": jobs,
    "view": view,
    "example of a task app": example_app,
}

SLOW = ("example of a task app",)  # plays an episode with sub-agents for each request that it takes

# Files in which an application is made, or which read HTTP themselves -> the servers here that are made of it.
SOURCES: dict[str, tuple[str, ...]] = {
    "gspo_gym/remote/serve/task_app_server.py": ("task app, text", "task app, tools", "both protocols on one port"),
    "gspo_gym/remote/serve/agent_app.py": ("agent",),
    "gspo_gym/remote/serve/openenv_server.py": ("OpenEnv", "both protocols on one port"),
    "gspo_gym/remote/guard.py": ("gateway", "OpenEnv"),
    "gspo_gym/remote/gateway/app.py": ("gateway",),
    "gspo_gym/remote/gateway/model_app.py": ("model",),
    "gspo_gym/judge/server.py": ("judge", "fake judge"),
    "gspo_gym/cli/jobs/app.py": ("jobs",),
    "gspo_gym/cli/jobs/inference.py": ("jobs",),
    "gspo_gym/cli/view.py": ("view",),
    "examples/json_server.py": ("example of a task app",),
    "examples/openai_agent.py": ("example of a task app",),
}
_MAKERS = ("FastAPI", "Starlette", "joined_app", "start_server", "serve_forever")


def makes_a_server(tree: ast.AST) -> bool:
    """Whether a module makes a web application, handles requests itself, or listens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in _MAKERS or name.endswith("HTTPServer"):
                return True
        if isinstance(node, ast.ClassDef) and any("RequestHandler" in ast.unparse(base) for base in node.bases):
            return True
        if isinstance(node, ast.AsyncFunctionDef) and _takes_a_scope(node):
            return True
    return False


def _takes_a_scope(function: ast.AsyncFunctionDef) -> bool:
    return function.name == "__call__" and "scope" in [argument.arg for argument in function.args.args]


def test_every_server_of_the_project_is_in_the_list_of_those_that_are_flooded() -> None:
    files = [path for folder in ("gspo_gym", "envs", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if makes_a_server(ast.parse(path.read_text("utf-8")))}
    assert found == set(SOURCES), "add a server to SERVERS, and the file that makes it to SOURCES"
    assert {name for names in SOURCES.values() for name in names} == set(SERVERS)


def _post(url: str, good: Good) -> Any:
    body = json.dumps(good.body).encode()
    headers = (("content-type", "application/json"), ("content-length", str(len(body))))
    status, answer = status_of(url, Spoilt("POST", good.path, headers, body))
    assert status == 200, answer
    return json.loads(answer)


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(OSError):
            status_of(url, Spoilt("GET", "/health", (), b""))
            return
    raise AssertionError("it did not start")


def flood(name: str, count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Sends `count` mutated requests and asserts that each is answered below 500, and that no server logs an error."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    with SERVERS[name]() as (url, goods):
        for request in spoilt_requests(goods, count=count, seed=seed):
            status, answer = answer_to(url, request)
            statuses[status] += 1
            if status >= 500:
                wrong.append(f"{status} {answer[:300]!r}\n    {_told(request)}")
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    print(name, dict(statuses))
    assert not wrong, f"{len(wrong)} of {count} from seed {seed}:\n" + "\n".join(wrong[:20])
    assert not logged, logged[:3]
    assert sum(n for status, n in statuses.items() if status < 300) > count / 50, "hardly a request was understood"


def answer_to(url: str, request: Spoilt) -> tuple[int, bytes]:
    """The status and body of the answer; 599 where there is none, and 400 where a false length explains that.

    A server that refuses a request before it has read the body closes the connection with bytes unread, and the reset
    may come before the answer is read: whether it does is a matter of timing, so such a request is sent again.
    """
    error: Exception | None = None
    for _ in range(5):
        try:
            return status_of(url, request)
        except ConnectionError as reset:
            error = reset
        except (OSError, http.client.HTTPException) as other:
            error = other
            break
    has_length = ("content-length", str(len(request.body))) in request.headers
    return (599 if has_length else 400), f"no answer: {error!r}".encode()


def _told(request: Spoilt) -> str:
    return f"{request.method} {request.target} {dict(request.headers)} {request.body[:400]!r}"


@pytest.mark.parametrize("name", [name for name in SERVERS if name not in SLOW])
def test_none_of_many_mutated_requests_makes_a_server_fail(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flood(name, 140, 2, caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SERVERS)
def test_none_of_many_new_mutated_requests_makes_a_server_fail(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flood(name, 1_000, FIRST_SEED, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_none_of_many_mutated_requests_makes_a_slow_server_fail(name: str, caplog: pytest.LogCaptureFixture) -> None:
    flood(name, 400, 2, caplog)


CONTENT_TYPES = (
    "application/json",
    "application/json; charset=utf-16",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/octet-stream",
    "text/plain",
    "image/png",
    "",
    None,
)
NO_TEXTS = (b"\xff", b'{"a": "\xa2"}', b'"\xed\xa0\x80"', b"\xff\xfe{\x00}\x00")


@pytest.mark.parametrize("name", [name for name in SERVERS if name not in SLOW])
def test_a_body_that_is_no_text_is_refused_whatever_its_content_type_says(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with SERVERS[name]() as (url, goods):
        posted = {good.path: good for good in goods if good.method == "POST"}.values()
        for good, kind, body in itertools.product(posted, CONTENT_TYPES, NO_TEXTS):
            own = {key: value for key, value in good.headers.items() if key != "content-type"}
            headers = own | ({} if kind is None else {"content-type": kind}) | {"content-length": str(len(body))}
            status, answer = answer_to(url, Spoilt("POST", good.path, tuple(headers.items()), body))
            assert 400 <= status < 500, (status, answer[:300], good.path, kind, body)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "name", ["/etc", "**", "***", "[", "../episodes/step_000001", "a\0b", "*", "step_000001.jsonl", ""]
)
def test_the_page_is_told_that_there_are_no_episodes_of_such_a_name(name: str) -> None:
    with view() as (url, goods):
        headers = tuple(goods[0].headers.items())
        for query in (f"/step?run=small&name={quote(name)}", f"/group?run=small&name={quote(name)}&number=0"):
            status, answer = answer_to(url, Spoilt("GET", query, headers, b""))
            assert (status, b"has no episodes" in answer) == (404, True), answer


@pytest.mark.parametrize("number", ["1", "-1", "x", "9" * 5000, "\u0663"])
def test_the_page_is_told_that_there_is_no_such_group(number: str) -> None:
    with view() as (url, goods):
        query = f"/group?run=small&name=step_000001&number={quote(number)}"
        status, answer = answer_to(url, Spoilt("GET", query, tuple(goods[0].headers.items()), b""))
        assert (status, b"has no group" in answer) == (404, True), answer


FRAMES: list[Any] = [
    {"type": "reset", "data": {"seed": 3, "episode_id": "e", "a": [1, {"b": 2}]}},
    {"type": "step", "data": {"type": "call_tool", "tool_name": "echo", "arguments": {"text": "a", "times": 2.0}}},
    {"type": "step", "data": {"message": "hello", "tool_calls": [{"name": "echo", "arguments": {"text": "a"}}]}},
    {"type": "step", "data": {"type": "list_tools"}},
    {"type": "state"},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}},
    {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo"}}},
]


def test_four_hundred_mutated_frames_are_each_answered_by_one_frame(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    kinds: Counter[str] = Counter()
    with BackgroundServer(create_openenv_app(Echo, isolation="thread")) as server:
        address = server.url.replace("http", "ws", 1) + "/ws"
        with websockets.sync.client.connect(address, proxy=None) as session:
            for number in range(400):
                session.send(spoilt_text(FRAMES[number % len(FRAMES)], rng))
                answer = json.loads(session.recv(timeout=30))
                kinds[answer["data"]["code"] if answer["type"] == "error" else answer["type"]] += 1
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert kinds["observation"] > 8, kinds
    assert "SESSION_ERROR" not in kinds, kinds
