"""A vLLM server without vLLM, over real HTTP on loopback: the routes that we use, written after those of vLLM 0.32.

Its "model" is a table of logits by the last token and by the weights it was told to read, sampled by NumPy, so that
seeds, temperature and top_k act as they do in vLLM. Faults are set as attributes while it runs. Run as a program, it
takes `--port` and answers until it is told to stop, as vLLM's own server does.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from gspo_gym.remote.serving import BackgroundServer

VOCAB_SIZE = 64
WORKERS = "gspo_gym.engine.vllm.worker.WorkerExtension"
EMPTY_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

Message = MutableMapping[str, Any]
Reply = tuple[int, Any]  # status, and JSON or None for an empty body


@dataclass
class FakeVllm:
    """ASGI application. Attributes that are set by tests say how it was started, and what goes wrong.

    `seen` is every request as (method, path, query, body); `fail` maps a path to the reply that it gives instead.
    """

    is_dev: bool = True
    has_generate: bool = True
    logprobs_mode: str = "processed_logprobs"
    max_lora_rank: int = 0
    loads_adapters: bool = True
    workers: str = WORKERS
    device: str = "cpu"
    model_folder: str = "/nowhere/model"
    skip_tokenizer_init: bool = True
    generation_config: str = "/nowhere/empty"
    resets_cache: bool = True
    keeps_label: bool = False
    fail: dict[str, Reply] = field(default_factory=dict)
    hang: set[str] = field(default_factory=set)
    seen: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    label: str = "default"
    weights: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    is_paused: bool = False
    num_disconnects: int = 0

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        try:
            parsed = json.loads(body) if body else None
        except ValueError:
            parsed = body
        self.seen.append((scope["method"], path, query, parsed))
        self.headers.append({name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]})
        while path in self.hang:
            if (await receive())["type"] == "http.disconnect":
                self.num_disconnects += 1
                return
        try:
            status, answer = self.fail[path] if path in self.fail else self._answer(path, query, parsed)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            status, answer = 400, {"error": {"message": f"not a request of ours: {error!r}"}}
        content = b"" if answer is None else json.dumps(answer).encode()
        kind = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": kind})
        await send({"type": "http.response.body", "body": content})

    def paths(self, prefix: str = "/") -> list[str]:
        """Of the requests so far, in their order."""
        return [path for _, path, _, _ in self.seen if path.startswith(prefix)]

    def _answer(self, path: str, query: dict[str, str], body: Any) -> Reply:
        routes: dict[str, Callable[[dict[str, str], Any], Reply]] = {
            "/health": lambda *_: (200, None),
            "/v1/models": self._models,
            "/v1/completions": self._completions,
        }
        if self.has_generate:
            routes["/inference/v1/generate"] = self._generate
        if self.max_lora_rank and self.loads_adapters:
            routes["/v1/load_lora_adapter"], routes["/v1/unload_lora_adapter"] = self._load, self._unload
        if self.is_dev:
            routes |= self._control_routes()
        if path in routes:
            return routes[path](query, body)
        status = 403 if path == "/inference/v1/generate" else 404
        return status, {"error": {"message": "Scale-out endpoints are disabled." if status == 403 else "Not Found"}}

    def _control_routes(self) -> dict[str, Callable[[dict[str, str], Any], Reply]]:
        return {
            "/server_info": self._server_info,
            "/pause": self._pause,
            "/resume": self._resume,
            "/is_paused": lambda *_: (200, {"is_paused": self.is_paused}),
            "/collective_rpc": self._collective_rpc,
            "/reset_prefix_cache": lambda *_: (200, {"success": self.resets_cache}),
            "/update_weight_version": self._update_label,
            "/weight_info": lambda *_: (200, {"weight_version": self.label}),
            "/weight_checker": self._checksums,
        }

    def _models(self, *_: Any) -> Reply:
        card = {"id": "policy", "parent": None, "max_model_len": 128}
        return 200, {"data": [card, *({"id": name, "parent": "policy"} for name in self.adapters)]}

    def _server_info(self, query: dict[str, str], _: Any) -> Reply:
        assert query == {"config_format": "json"}
        model = {
            "model": self.model_folder,
            "dtype": "torch.float32",
            "logprobs_mode": self.logprobs_mode,
            "skip_tokenizer_init": self.skip_tokenizer_init,
            "generation_config": self.generation_config,
        }
        config = {
            "model_config": model,
            "cache_config": {"enable_prefix_caching": True},
            "lora_config": {"max_lora_rank": self.max_lora_rank} if self.max_lora_rank else None,
            "parallel_config": {"worker_extension_cls": self.workers},
            "device_config": {"device": self.device},
        }
        return 200, {"vllm_config": config, "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": self.loads_adapters}}

    def _pause(self, query: dict[str, str], _: Any) -> Reply:
        assert query["mode"] in ("wait", "keep")
        self.is_paused = True
        return 200, {"status": "paused"}

    def _resume(self, *_: Any) -> Reply:
        self.is_paused = False
        return 200, {"status": "resumed"}

    def _collective_rpc(self, _: dict[str, str], body: Any) -> Reply:
        self.weights = body["kwargs"]["weights_path"]
        return 200, {"results": [None]}

    def _update_label(self, _: dict[str, str], body: Any) -> Reply:
        if not self.keeps_label:
            self.label = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def _checksums(self, _: dict[str, str], body: Any) -> Reply:
        assert body == {"action": "checksum"}
        digest = f"{zlib.crc32(self.weights.encode()):064x}"
        return 200, {"checksums": {"tp0:embed": digest, "tp0:linear": EMPTY_DIGEST}}

    def _load(self, _: dict[str, str], body: Any) -> Reply:
        assert body["load_inplace"] is False
        if body["lora_name"] in self.adapters:
            return 400, {"error": {"message": "has already been loaded"}}
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' added successfully."

    def _unload(self, _: dict[str, str], body: Any) -> Reply:
        if self.adapters.pop(body["lora_name"], None) is None:
            return 404, {"error": {"message": "cannot be found"}}
        return 200, "Success"

    def _generate(self, _: dict[str, str], body: Any) -> Reply:
        if (model := body["model"]) not in ("policy", *self.adapters):
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        ids, logprobs, reason = self._sample(body["token_ids"], body["sampling_params"], model)
        content = [{"token_id": token, "logprob": p, "rank": 1} for token, p in zip(ids, logprobs, strict=True)]
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": ids,
            "weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        return 200, {"model": model, "prompt_token_ids": body["token_ids"], "choices": [choice]}

    def _completions(self, _: dict[str, str], body: Any) -> Reply:
        ids, logprobs, reason = self._sample(body["prompt"], body, body["model"])
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": reason,
            "token_ids": ids,
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
        }
        return 200, {"model": body["model"], "choices": [choice]}

    def _sample(self, prompt: list[int], params: Any, model: str) -> tuple[list[int], list[float], str]:
        assert params["max_tokens"] <= 128, params["max_tokens"]
        rng = np.random.default_rng(params["seed"])
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < params["max_tokens"]:
            raw = np.array(self.logits([*prompt, *ids], model))
            for token, bias in params.get("logit_bias", {}).items():
                raw[int(token)] += bias
            scaled = raw / params["temperature"] if params["temperature"] else raw
            if 0 < params["top_k"] < len(raw):
                scaled = np.where(scaled >= np.sort(scaled)[-params["top_k"]], scaled, -np.inf)
            processed = _log_softmax(scaled)
            last = int(processed.argmax()) if not params["temperature"] else _draw(rng, processed)
            ids.append(last)
            reported = processed if self.logprobs_mode == "processed_logprobs" else _log_softmax(raw)
            logprobs.append(float(reported[last]))
            if last in params["stop_token_ids"]:
                return ids, logprobs, "stop"
        return ids, logprobs, "length"

    def logits(self, context: list[int], model: str) -> Any:
        """[V] of what follows, under the present weights of the model."""
        return logits_of(f"{self.weights} {self.adapters.get(model, '')}", context[-1])


@dataclass
class Stage:
    """One server on which the fakes of many tests appear one after another: starting one takes longer than a test."""

    fake: FakeVllm = field(default_factory=FakeVllm)
    url: str = ""

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        await self.fake(scope, receive, send)


@contextmanager
def served(fake: FakeVllm | None = None) -> Iterator[Stage]:
    """A stage, on loopback, for as long as the block lasts."""
    stage = Stage(fake or FakeVllm())
    with BackgroundServer(stage) as server:
        stage.url = server.url
        yield stage


def logits_of(weights: str, token: int) -> Any:
    """[VOCAB_SIZE] of what follows a token, under weights of that name."""
    return np.random.default_rng([zlib.crc32(weights.encode()), token]).normal(0.0, 2.0, VOCAB_SIZE)


def _log_softmax(logits: Any) -> Any:
    return logits - np.logaddexp.reduce(logits)


def _draw(rng: np.random.Generator, logprobs: Any) -> int:
    return int(rng.choice(len(logprobs), p=np.exp(logprobs)))


async def _lifespan(receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def main(argv: list[str]) -> None:
    """Serve at `--host` and `--port`, or `--uds`."""
    import uvicorn

    options = dict(itertools.pairwise(argv))
    where: dict[str, Any] = (
        {"uds": options["--uds"]} if "--uds" in options else {"host": options["--host"], "port": int(options["--port"])}
    )
    config = uvicorn.Config(FakeVllm(), log_level="warning", **where)
    asyncio.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main(sys.argv[1:])
