"""A task app as somebody else would write it: its own agent loop behind the contract's HTTP, and faults on purpose.

The app knows nothing of this library but the contract. An episode is `num_turns` questions, each of which names the
run, so that no two episodes say the same; an answer is worth what `worth` says, so that a test can tell a real reward
from one that was made up. Both generations, every way of asking for a key, and every fault of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import zlib
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from served_gateway import TOKENIZER, replying

from gspo_gym.engine.scripted import Latency, ScriptedEngine
from gspo_gym.errors import EngineError

Json = dict[str, Any]
Scope = MutableMapping[str, Any]
Fault = Literal[
    "reset",  # the connection is reset instead of an answer
    "500",  # before anything was played
    "503",  # the same, with Retry-After
    "500_late",  # after the first call of the model
    "hang",  # never answers; plays on once its client has gone
    "garbage",  # 200 and a page of HTML
    "garbage_json",  # 200 and JSON that is no answer
    "oversized",  # 200 and more bytes than anybody wants
    "half",  # the connection ends half-way through the answer
    "half_json",  # a complete answer that is half an object
    "stale",  # a good answer to another attempt
    "nan",  # a return that is no number
    "made_up",  # its first call of the model fails (the message says BREAK), and it answers 200 with a reward
    "made_up_late",  # the same with its last call
    "made_up_unseen",  # the same, but the call never arrives
    "timed_out",  # it does not wait for its last answer (the message says SLOW), and makes up a reward
    "aborted",  # 200, aborted
]
FAULTS: tuple[Fault, ...] = Fault.__args__  # type: ignore[attr-defined]  # typing has no public way
MADE_UP = -1.0  # which `worth` never says
HUGE = 3_000_000  # bytes of an oversized answer


def worth(answer: str) -> float:
    """What an answer earns, in eighths so that sums are exact; 0 to 0.875."""
    return zlib.crc32(answer.encode()) % 8 / 8


class _NoModelError(Exception):
    """A call of the model failed, after so many answers."""

    def __init__(self, message: str, said: list[str]) -> None:
        super().__init__(message)
        self.said = said


@dataclass(slots=True)
class Asked:
    """One request as it came in."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: Any


@dataclass(slots=True)
class FakeTaskApp:
    """An ASGI application.

    Attributes:
        generation: of its answers.
        num_turns: of an episode.
        keys: it wants one of; () for none. None: it was started without one, and says so.
        refuse: how it says that a key is wrong: status and body.
        fault: which fault a rollout meets, by its number in the order of arrival; None for none.
        answers: what other requests are answered, by path: status, body and perhaps headers, or a function of `Asked`.
        asked: the requests that came in. faults: how many there were.
        is_hanging: set when a client waits in vain, and `on_hang` is called. has_played_on: set when one has gone and
            the app has called the model after that; after_hanging: what it was answered.
        leaves_open: it ends its rollout without its last call of the model (the message says SLOW) once this is set.
        spoil: changes an answer to POST /rollout before it is sent.
    """

    generation: Literal["A", "B"] = "A"
    num_turns: int = 2
    keys: tuple[str, ...] | None = ()
    refuse: tuple[int, Json] = (400, {"detail": {"error": {"code": "unauthorised", "message": "no"}}})
    fault: Callable[[int], Fault | None] = lambda number: None
    leaves_open: threading.Event | None = None
    answers: dict[str, Any] = field(default_factory=dict)
    spoil: Callable[[Json], Any] = lambda answer: answer
    asked: list[Asked] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    after_hanging: list[int] = field(default_factory=list)
    is_hanging: threading.Event = field(default_factory=threading.Event)
    on_hang: Callable[[], object] = int
    has_played_on: threading.Event = field(default_factory=threading.Event)
    num_rollouts: int = 0
    _left_open: list[asyncio.Task[None]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(scope["method"], scope["path"], scope["query_string"].decode(), headers, json.loads(body or "{}"))
        self.asked.append(asked)
        if (refused := self._refusal(asked)) is not None:
            await _send(send, *refused)
        elif asked.path == "/rollout":
            await self._rollout(asked.body, receive, send)
        else:
            answer = self.answers.get(asked.path, (404, {"detail": "Not Found"}))
            await _send(send, *(answer(asked) if callable(answer) else answer))

    async def _live(self, receive: Any, send: Any) -> None:
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return

    def _refusal(self, asked: Asked) -> tuple[int, Json] | None:
        if self.keys == () or asked.path == "/":
            return None
        if self.keys is None:
            return 503, {"detail": {"error": {"code": "missing_environment_api_key", "message": "not configured"}}}
        given = {asked.headers.get("x-api-key", ""), asked.headers.get("authorization", "").removeprefix("Bearer ")}
        given |= {key.strip() for key in asked.headers.get("x-api-keys", "").split(",")}
        return None if given & set(self.keys) else self.refuse

    async def _rollout(self, request: Json, receive: Any, send: Any) -> None:
        fault = self.fault(self.num_rollouts)
        self.num_rollouts += 1
        if fault is not None:
            self.faults[fault] += 1
        if fault == "reset":
            await _hang_up(receive, send.__self__.transport.abort)
            return
        if fault in ("500", "503"):
            headers = {"retry-after": "0"} if fault == "503" else {}
            await _send(send, int(fault), {"detail": "on purpose"}, headers=headers)
            return
        if fault == "hang":
            self.is_hanging.set()
            self.on_hang()
            await _disconnected(receive)
            async with _http() as http:
                response = await self._call(http, request, [{"role": "user", "content": "late"}])
            self.after_hanging.append(response.status_code)
            self.has_played_on.set()
            return
        try:
            async with _http() as http:
                said = await self._play(http, request, fault)
        except _NoModelError as error:
            await _send(send, 200, self._made_up(request, error.said, str(error)))
            return
        if fault == "500_late":
            error = {"error": {"code": "policy_step_failed", "message": "policy_step_failed: on purpose"}}
            await _send(send, 500, {"detail": error})
            return
        answer = self.spoil(self._answer(request, said))
        await self._send_answer(receive, send, answer, fault)

    async def _play(self, http: httpx.AsyncClient, request: Json, fault: str | None) -> list[str]:
        """What the model said in each turn."""
        messages: list[Json] = [{"role": "system", "content": "Answer."}]
        said: list[str] = []
        for turn in range(1 if fault == "500_late" else self.num_turns):
            is_last = turn == self.num_turns - 1
            is_broken = fault == "made_up" or (fault == "made_up_late" and is_last)
            is_slow = is_last and (fault == "timed_out" or self.leaves_open is not None)
            mark = " BREAK" if is_broken else " SLOW" if is_slow else ""
            messages.append({"role": "user", "content": f"question {turn} of {request['run_id']}{mark}"})
            if is_slow and self.leaves_open is not None:
                self._left_open.append(asyncio.create_task(self._call_alone(request, messages)))
                await asyncio.to_thread(self.leaves_open.wait)
                return said
            timeout = 0.1 if is_slow else 30.0
            try:
                response = await self._call(
                    http, request, messages, is_lost=fault == "made_up_unseen" and is_last, timeout=timeout
                )
            except httpx.HTTPError as error:
                raise _NoModelError(f"inference request failed: {type(error).__name__}", said) from error
            if response.status_code != 200:
                raise _NoModelError(f"inference request failed: {response.status_code}", said)
            message = response.json()["choices"][0]["message"]
            messages.append(message)
            said.append(message["content"])
        return said

    async def _call_alone(self, request: Json, messages: list[Json]) -> None:
        """A call with a connection of its own, of whose answer nothing becomes."""
        async with _http() as http:
            await self._call(http, request, messages)

    async def _call(
        self,
        http: httpx.AsyncClient,
        request: Json,
        messages: list[Json],
        *,
        is_lost: bool = False,
        timeout: float = 30.0,
    ) -> httpx.Response:
        config = request["policy"]["config"]
        body = {"model": config["model"], "messages": messages, "temperature": config["temperature"]}
        url = "http://127.0.0.1:1/v1/chat/completions" if is_lost else config["inference_url"]
        return await http.post(url, json=body, timeout=timeout)

    def _answer(self, request: Json, said: list[str]) -> Json:
        rewards = [worth(text) for text in said]
        config = request["policy"]["config"]
        if self.generation == "B":
            return {
                "trace_correlation_id": request["trace_correlation_id"],
                "reward_info": {"outcome_reward": sum(rewards), "event_rewards": rewards, "details": {}},
                "inference_url": config["inference_url"],
            }
        steps = [
            {"obs": {}, "tool_calls": [], "reward": reward, "done": turn == len(rewards) - 1}
            for turn, reward in enumerate(rewards)
        ]
        return self._generation_a(request, steps, sum(rewards))

    def _made_up(self, request: Json, said: list[str], error: str) -> Json:
        rewards = [*map(worth, said), MADE_UP]
        if self.generation == "B":
            reward_info = {"outcome_reward": sum(rewards), "event_rewards": rewards, "details": {"error": error}}
            return {"trace_correlation_id": request["trace_correlation_id"], "reward_info": reward_info}
        steps: list[Json] = [{"obs": {}, "tool_calls": [], "reward": reward} for reward in rewards]
        steps[-1] |= {"done": True, "info": {"error": error}}
        return self._generation_a(request, steps, sum(rewards))

    def _generation_a(self, request: Json, steps: list[Json], total: float) -> Json:
        url = request["policy"]["config"]["inference_url"]
        return {
            "run_id": request["run_id"],
            "trajectories": [
                {"env_id": "quiz", "policy_id": "agent", "steps": steps, "length": len(steps), "inference_url": url}
            ],
            "metrics": {"episode_returns": [total], "mean_return": total, "num_steps": len(steps), "num_episodes": 1},
            "aborted": False,
            "ops_executed": 2 * len(steps),
            "trace_correlation_id": request["trace_correlation_id"],
            "pipeline_metadata": {"inference_url": url},
        }

    async def _send_answer(self, receive: Any, send: Any, answer: Any, fault: str | None) -> None:
        if fault == "stale":
            answer = {**answer, "run_id": "another", "trace_correlation_id": "another"}
        elif fault == "nan":
            key = "reward_info" if self.generation == "B" else "metrics"
            answer = {**answer, key: {"outcome_reward": float("nan"), "mean_return": float("nan")}}
        elif fault == "aborted":
            answer = {**answer, "aborted": True} if self.generation == "A" else {}
        elif fault == "garbage_json":
            answer = ["not", "an", "answer"]
        whole = json.dumps(answer).encode()
        if fault == "garbage":
            whole = b"<html>a login page</html>"
        elif fault == "half_json":
            whole = whole[: len(whole) // 2]
        elif fault == "oversized":
            whole = b'{"padding": "' + b"x" * HUGE + b'"}'
        if fault != "half":
            await _send_bytes(send, 200, whole)
            return
        await _start(send, 200, length=len(whole), headers={})
        await send({"type": "http.response.body", "body": whole[: len(whole) // 2], "more_body": True})
        await _hang_up(receive, send.__self__.transport.close)


_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and slow to make


def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=60, verify=_TLS)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _hang_up(receive: Any, how: Callable[[], None]) -> None:
    """End the connection as uvicorn's own transport can; ASGI has no way to."""
    how()
    await _disconnected(receive)


async def _start(send: Any, status: int, *, length: int, headers: dict[str, str]) -> None:
    fields = {"content-type": "application/json", "content-length": str(length), **headers}
    wire = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": wire})


async def _send_bytes(send: Any, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    await _start(send, status, length=len(body), headers=headers or {})
    await send({"type": "http.response.body", "body": body})


async def _send(send: Any, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
    await _send_bytes(send, status, json.dumps(answer).encode(), headers)


def quiz_engine(slow_begun: threading.Event | None = None) -> ScriptedEngine:
    """Says something of its own to each question; fails at BREAK, and never answers SLOW, of which the event tells."""

    def answer(prompt: str) -> str:
        question = question_in(prompt)
        if question.endswith("BREAK"):
            raise EngineError("broken on purpose")
        return f"answer to {question}"

    async def hang_if_slow(seconds: float) -> None:
        prompt = TOKENIZER.decode(list(engine.calls[-1].prompt_token_ids))
        if question_in(prompt).endswith("SLOW"):
            if slow_begun is not None:
                slow_begun.set()
            await asyncio.Event().wait()

    engine = replying(answer, latency=Latency(), sleep=hang_if_slow)
    return engine


def question_in(prompt: str) -> str:
    """The last one."""
    found: list[str] = re.findall(r"question [^<]*", prompt)
    return found[-1].strip()
