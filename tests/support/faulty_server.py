"""A real inference server on loopback that answers by `hash_model`, and fails on purpose.

HTTP/1.1 with keep-alive, in a thread with an event loop of its own. What it speaks, what its logprobs are, and which
requests fail how is the constructor's to say; what came in and went out is kept for the test to count.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import hash_model
import numpy as np

Json = dict[str, Any]

MODEL = "hash-64"
MAX_MODEL_LEN = 512

# What can go wrong with one attempt. After those marked *, the server has made the sample: a client that gives up on
# the answer and asks again must not end up with two.
FAULTS = (
    "500",
    "502",
    "429",  # with Retry-After
    "reset_early",  # before the request's body is read
    "reset_late",  # * instead of an answer
    "truncated_json",  # * complete by its length, half an object
    "cut_body",  # * the connection ends before the announced length
    "slow_body",  # * half an answer, then nothing
    "timeout",  # * accepted, then nothing
    "content_type",  # 200 with a page of HTML
    "stale",  # * a good answer, after which the connection that was kept alive is dead
)
HANGING = ("slow_body", "timeout")
# What will not get better: a wrong key, which the answer repeats, and a redirect to another host.
REFUSALS = ("401", "307")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which requests fail: each by a draw from (seed, its number), so that a plan is the same whoever asks when.

    `rates` is the share of requests by fault; the rest are answered.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        assert set(self.rates) <= {*FAULTS, *REFUSALS}, self.rates
        assert sum(self.rates.values()) <= 1 + 1e-9

    def fault_of(self, number: int) -> str | None:
        """The fault of the request of that number, from 0; None if it is answered."""
        at = float(np.random.default_rng([self.seed, number]).random())
        for fault, rate in self.rates.items():
            at -= rate
            if at < 0:
                return fault
        return None


def mixed(rate: float, *, seed: int, hanging_weight: float = 0.25) -> FaultPlan:
    """All kinds, together at that rate; one that costs the client its whole timeout so much as often as another one."""
    weights = {fault: hanging_weight if fault in HANGING else 1.0 for fault in FAULTS}
    return FaultPlan({fault: rate * weight / sum(weights.values()) for fault, weight in weights.items()}, seed)


@dataclass(slots=True)
class Seen:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: Json


class FaultyServer:
    """`with FaultyServer() as server:` listens at `server.base_url` until the block ends.

    Attributes:
        seen: the requests that were read, in order. faults: how many failed, by kind.
        num_samples: samples made, by `Idempotency-Key`. num_answers: complete good answers, by the same.
        is_hanging: set as soon as one request has been accepted and will never be answered.
    """

    def __init__(
        self,
        plan: FaultPlan | None = None,
        *,
        dialect: Literal["vllm", "sglang", "text", "chat"] = "vllm",
        logprobs: Literal["processed", "scaled", "raw"] = "processed",
        spoil: Callable[[Json], Json] = lambda answer: answer,
        retry_after: str = "0.5",
        has_seeds: bool = True,
        write: Callable[[Json], str] | None = None,
        vocab_size: int = hash_model.VOCAB_SIZE,
    ) -> None:
        """`spoil` changes the JSON of a completion before it is sent. `plan` is of completions only.

        `write` is another model in dialect "text": what it makes of a request is the whole text, which then stops.
        Prompts have token ids below `vocab_size`; those of the model's own are sampled.
        """
        self.plan = plan or FaultPlan()
        self.seen: list[Seen] = []
        self.faults: Counter[str] = Counter()
        self.num_samples: Counter[str] = Counter()
        self.num_answers: Counter[str] = Counter()
        self.is_hanging = threading.Event()
        self.spoil = spoil
        self._dialect = dialect
        self._logprobs = logprobs
        self._retry_after = retry_after
        self._has_seeds = has_seeds
        self._write = write
        self._vocab_size = vocab_size
        self._num_completions = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections[self._loop.create_task(self._answer_all(reader, writer))] = writer

        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=512)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        for listening in server.sockets:  # closing it under a connection that is being accepted would leave that open
            self._loop.remove_reader(listening.fileno())
        for _ in range(10):
            await asyncio.sleep(0)
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        for writer in connections.values():  # also of a task that was cancelled before it began
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client hung up
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection can be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        is_completion = method == "POST"
        fault = None
        if is_completion:
            fault = self.plan.fault_of(self._num_completions)
            self._num_completions += 1
        if fault is not None:
            self.faults[fault] += 1
        if fault == "reset_early":
            _reset(writer)
            return False
        body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
        self.seen.append(Seen(path, headers, body))
        status, answer = self._respond(method, path, body)
        key = headers.get("idempotency-key", "")
        if fault in ("500", "502", "429", "content_type", *REFUSALS):
            return await self._send_error(writer, fault, headers.get("authorization", ""))
        if is_completion and status == 200:
            self.num_samples[key] += 1
            answer = self.spoil(answer)
        sent = json.dumps(answer).encode()
        if fault in (None, "stale"):
            self.num_answers[key] += is_completion and status == 200  # before the client can look
            await _send(writer, status, sent)
            return fault is None
        return await self._break_off(reader, writer, fault, sent)

    async def _send_error(self, writer: asyncio.StreamWriter, fault: str, authorization: str) -> bool:
        if fault == "content_type":
            await _send(writer, 200, b"<html>a login page</html>", kind="text/html")
            return True
        extra = {"429": {"retry-after": self._retry_after}, "307": {"location": f"{self.base_url}/elsewhere"}}
        message = f"wrong key: {authorization}" if fault == "401" else "on purpose"
        body = json.dumps({"error": {"message": message}}).encode()
        await _send(writer, int(fault), body, headers=extra.get(fault))
        return True

    async def _break_off(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: str, sent: bytes
    ) -> bool:
        half = sent[: len(sent) // 2]
        if fault == "reset_late":
            _reset(writer)
        elif fault == "truncated_json":
            await _send(writer, 200, half)
            return True
        else:
            if fault != "timeout":
                await _send(writer, 200, half, length=len(sent))
            if fault != "cut_body":
                self.is_hanging.set()
                await reader.read()  # until the client hangs up
        return False

    def _respond(self, method: str, path: str, body: Json) -> tuple[int, Json]:
        if method == "GET" and path == "/v1/models":
            card: Json = {"id": MODEL, "object": "model"}
            return 200, {"data": [card if self._dialect == "text" else card | {"max_model_len": MAX_MODEL_LEN}]}
        ids = body.get("prompt", body.get("input_ids", []))
        if isinstance(ids, list) and not all(0 <= token < self._vocab_size for token in ids):
            return 400, {"error": {"message": "a token is not in the vocabulary"}}
        if path == "/v1/completions" and self._dialect == "vllm":
            return 200, self._vllm(body)
        if path == "/generate" and self._dialect == "sglang":
            return 200, self._sglang(body)
        if path == "/v1/completions" and self._dialect == "text":
            return self._text(body)
        return 404, {"error": {"message": f"no route {path}"}}

    def _sample(self, prompt: list[int], fields: Json, *, seed: str, max_tokens: str) -> hash_model.Sample:
        return hash_model.sample(
            [token % hash_model.VOCAB_SIZE for token in prompt],
            seed=fields[seed] if self._has_seeds else len(self.seen),
            max_tokens=fields[max_tokens],
            stop_token_ids=fields["stop_token_ids"],
            temperature=fields["temperature"],
            top_k=max(fields["top_k"], 0),
            top_p=fields["top_p"],
            min_p=fields["min_p"],
            repetition_penalty=fields["repetition_penalty"],
            min_tokens=fields["min_tokens" if "min_tokens" in fields else "min_new_tokens"],
        )

    def _logprobs_of(self, sample: hash_model.Sample) -> list[float]:
        return {"processed": sample.processed, "scaled": sample.scaled, "raw": sample.raw}[self._logprobs]

    def _vllm(self, body: Json) -> Json:
        sample = self._sample(body["prompt"], body, seed="seed", max_tokens="max_tokens")
        choice = {
            "index": 0,
            "text": hash_model.write(sample.token_ids),
            "token_ids": sample.token_ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": self._logprobs_of(sample)},
            "finish_reason": sample.finish_reason,
        }
        return {"id": body["request_id"], "object": "text_completion", "choices": [choice]}

    def _sglang(self, body: Json) -> Json:
        sample = self._sample(
            body["input_ids"], body["sampling_params"], seed="sampling_seed", max_tokens="max_new_tokens"
        )
        rows = [[value, token, None] for value, token in zip(self._logprobs_of(sample), sample.token_ids, strict=True)]
        return {
            "text": hash_model.write(sample.token_ids),
            "output_ids": sample.token_ids,
            "meta_info": {
                "id": body["rid"],
                "finish_reason": {"type": sample.finish_reason},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(sample.token_ids),
                "output_token_logprobs": rows,
            },
        }

    def _text(self, body: Json) -> tuple[int, Json]:
        known = {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "n", "stop"}
        if unknown := sorted(set(body) - known):
            return 400, {"error": {"message": f"Unrecognized request arguments supplied: {', '.join(unknown)}"}}
        if self._write is not None:
            written = {"index": 0, "text": self._write(body), "finish_reason": "stop", "logprobs": None}
            return 200, {"object": "text_completion", "choices": [written]}
        stops = [hash_model.read(stop)[0] for stop in body.get("stop", [])]
        sample = hash_model.sample(
            hash_model.read(body["prompt"]),
            seed=body["seed"],
            max_tokens=body["max_tokens"],
            stop_token_ids=stops,
            temperature=body["temperature"],
            top_p=body["top_p"],
        )
        ids = sample.token_ids[:-1] if sample.finish_reason == "stop" else sample.token_ids
        choice = {"index": 0, "text": hash_model.write(ids), "finish_reason": sample.finish_reason, "logprobs": None}
        return 200, {"object": "text_completion", "choices": [choice]}


async def _send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    *,
    kind: str = "application/json",
    headers: Mapping[str, str] | None = None,
    length: int | None = None,
) -> None:
    fields = {"content-type": kind, "content-length": str(len(body) if length is None else length), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"HTTP/1.1 {status} On-Purpose\r\n{head}\r\n".encode() + body)
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST and not with FIN."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
