"""`python -m gspo_gym.policy.reference.server --model FOLDER`: a frozen policy in a process, which scores tokens.

It answers on the loopback interface only: other machines need a tunnel. Runs with reference.placement = "dedicated"
start it; for [services] reference_url it is started by hand. The protocol is in `policy/reference/wire.py`.
"""

from __future__ import annotations

import argparse
import errno
import hmac
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from gspo_gym.base.http import read_json
from gspo_gym.errors import GymError, RecordError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.lora import moving_parameters
from gspo_gym.policy.reference.wire import MAX_BODY_BYTES, TOKEN_HEADER, TOKEN_VARIABLE, ScoringSettings, check_inputs


class ReferenceModel:
    """The model that is served, one request at a time; until `load` has ended it answers nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._info: Mapping[str, Any] = {"status": "loading"}  # Any: JSON values

    def load(self, base: str, *, dtype: str, device: str) -> None:
        """Load what `models.load_policy` takes, and raise as it does."""
        policy = load_policy(base, dtype=dtype, device=device)
        self._moving = moving_parameters(policy.model)
        self._model = policy.model.requires_grad_(False)
        self._computers: dict[ScoringSettings, LogprobComputer] = {}
        self._info = {
            "status": "ready",
            "model": policy.base,
            "pid": os.getpid(),
            "dtype": dtype,
            "vocab_size": policy.model.get_input_embeddings().weight.shape[0],
            "num_parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
            "version": 0,
        }

    def info(self) -> Mapping[str, Any]:
        """Return the answer of `/health` (Any: JSON)."""
        return self._info

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor], settings: ScoringSettings) -> Tensor:
        """Return [B, T] logprobs, on the processor.

        Raises:
            RecordError, ConfigError: the request cannot be scored.
        """
        check_inputs(tensors, self._info["vocab_size"])
        device = next(self._model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in tensors.items()}
        with self._lock:
            if settings not in self._computers:
                self._computers[settings] = LogprobComputer(
                    self._model, sampling=settings.sampling, logits_bytes=settings.logits_bytes
                )
            return self._computers[settings].compute(**inputs).logprobs.cpu()

    @torch.no_grad()
    def replace(self, file: Path, version: int) -> None:
        """Take other parameters, of an adapter if the model has one, from a safetensors file with the model's names.

        Raises:
            RecordError: the file holds others, or cannot be read.
        """
        own = self._moving
        try:
            with self._lock, safe_open(file, framework="pt") as tensors:
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
                if shapes != {name: tuple(parameter.shape) for name, parameter in own.items()}:
                    raise RecordError(f"/load: {file} holds other parameters than the model's {len(own)}")
                for name, parameter in own.items():
                    parameter.copy_(tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RecordError(f"/load: {file} cannot be read: {error}") from error
        self._info = {**self._info, "version": version}


def make_server(port: int, model: ReferenceModel, token: str | None) -> ThreadingHTTPServer:
    """Make a server on the loopback interface; requests with `token` may `/load`, none if it is None.

    Raises:
        OSError: the port is taken.
    """

    class Handler(_Handler):
        served, secret = model, token

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


class _Handler(BaseHTTPRequestHandler):
    served: ReferenceModel
    secret: str | None
    timeout = 60.0  # seconds without a byte from the client

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/health":
            self._say(HTTPStatus.NOT_FOUND, "expected /health")
            return
        info = self.served.info()
        is_ready = info["status"] == "ready"
        self._answer(HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE, json.dumps(info).encode())

    def do_POST(self) -> None:
        given = self.headers.get("Content-Length", "")
        length = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else -1
        if not 0 <= length <= MAX_BODY_BYTES:
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected 0 to {MAX_BODY_BYTES} bytes and their number")
            return
        body = self.rfile.read(length)
        try:
            self._serve(urlsplit(self.path).path, urlsplit(self.path).query, body)
        except (GymError, SafetensorError, ValueError, KeyError, TypeError) as error:
            self._say(HTTPStatus.BAD_REQUEST, f"{type(error).__name__}: {error}")
        except Exception as error:  # a client is told; the next request may be answered
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
            raise

    def _serve(self, path: str, query: str, body: bytes) -> None:
        if self.served.info()["status"] != "ready":
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, "the model is being loaded")
        elif path == "/score":
            logprobs = self.served.score(load(body), ScoringSettings.from_query(query))
            self._answer(HTTPStatus.OK, save({"logprobs": logprobs.contiguous()}), "application/octet-stream")
        elif path == "/load" and self._is_owner():
            wanted = read_json(body)
            self.served.replace(Path(wanted["file"]), int(wanted["version"]))
            self._answer(HTTPStatus.OK, json.dumps(self.served.info()).encode())
        else:
            self._say(HTTPStatus.FORBIDDEN if path == "/load" else HTTPStatus.NOT_FOUND, f"POST {path}: not here")

    def _is_owner(self) -> bool:
        given = self.headers.get(TOKEN_HEADER, "")
        return self.secret is not None and hmac.compare_digest(given.encode(), self.secret.encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002  # the base class has it
        """Answer requests outside this protocol as the base class does, but unknown methods with 405, not 501."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection = True  # the stream goes on with the request that was not read
        self._say(status, message or status.phrase)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, json.dumps({"error": text}).encode())

    def _answer(self, status: HTTPStatus, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: requests come by the thousand."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; 1 if the port is taken or the model cannot be loaded."""
    arguments = _parser().parse_args(argv)
    if arguments.num_threads:
        torch.set_num_threads(arguments.num_threads)
    model = ReferenceModel()
    if arguments.ends_with_stdin:
        threading.Thread(target=_end_with_stdin, daemon=True).start()  # also while the model is loaded
    try:
        server = make_server(arguments.port, model, os.environ.get(TOKEN_VARIABLE))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        print(f"reference server: port {arguments.port} is taken: choose another one", file=sys.stderr)
        return 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        model.load(arguments.model, dtype=arguments.dtype, device=arguments.device)
    except GymError as error:
        print(f"reference server: {error}", file=sys.stderr)
        return 1
    print(f"reference server: {arguments.model} at http://127.0.0.1:{server.server_port}", flush=True)
    threading.Event().wait()  # the other threads serve
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m gspo_gym.policy.reference.server", description="Serve a frozen policy."
    )
    parser.add_argument("--model", required=True, help="a folder, tiny:NAME@SEED, or a model id of the hub")
    parser.add_argument("--port", type=int, default=8002)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", help="a torch device")
    parser.add_argument("--num-threads", type=int, default=0, help="of torch; 0: its own choice")
    parser.add_argument("--ends-with-stdin", action="store_true", help="exit when the standard input is closed")
    return parser


def _end_with_stdin() -> None:
    # A run that is killed cannot stop it otherwise.
    while sys.stdin.buffer.read(1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
