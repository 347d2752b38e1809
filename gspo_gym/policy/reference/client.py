"""The client of a reference server, and the server's process, which belongs to the run.

Scoring is one synchronous request with tensors as its body, so this is not `base.http`'s client for JSON: that one is
asynchronous, and the learner scores in a thread without a loop. Nothing is retried: a server that fails on this
machine's loopback has died.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import end_with_us, has_ended
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.reference import check_same_reference
from gspo_gym.policy.lora import moving_parameters
from gspo_gym.policy.reference.wire import TOKEN_HEADER, TOKEN_VARIABLE, ScoringSettings

_SCORE_SECONDS = 600.0  # one micro-batch; what takes longer hangs
_HEALTH_SECONDS = 5.0


class ReferenceClient:
    """Talks to one reference server.

    Args:
        url: of the server. token: allows changing its weights; None for servers of others.
        explain: returns the last lines of the server's log, for errors; "" if not known.
    """

    def __init__(self, url: str, *, token: str | None = None, explain: Callable[[], str] = lambda: "") -> None:
        self._url = urlsplit(url)
        self._token = token
        self._explain = explain

    def health(self) -> Mapping[str, Any] | None:
        """Return the server's description of itself (Any: JSON); None while it does not answer or is loading.

        Raises:
            ServiceError: the answer is not that of a reference server.
        """
        try:
            status, body = self._request("GET", "/health", b"", _HEALTH_SECONDS)
        except (OSError, http.client.HTTPException):
            return None  # it is not there yet, or is gone
        return self._read_json(body) if status == http.client.OK else None

    def wait_until_healthy(
        self,
        *,
        max_wait_seconds: float,
        interval_seconds: float,
        require_alive: Callable[[], None] = lambda: None,
        pid: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> Mapping[str, Any]:
        """Return the server's description of itself once it is ready (Any: JSON).

        Raises:
            ServiceError: it is not ready in time; or `require_alive`, called before each check, raises it; or another
                process than `pid` answers, where that is known.
        """
        begun = clock()
        while True:
            require_alive()
            health = self.health()
            # A server that was left from an earlier run would score with another model.
            if health is not None and pid not in (None, health.get("pid")):
                raise self._error(f"cannot be reached: another server answers at its port, process {health.get('pid')}")
            if health is not None:
                return health
            if clock() - begun >= max_wait_seconds:
                raise self._error(f"is not ready after reference.health_max_wait_s = {max_wait_seconds:g} seconds")
            sleep(interval_seconds)

    def score(self, batch: TokenBatch, settings: ScoringSettings) -> Tensor:
        """Return [B, T] logprobs of the sampled tokens, on the batch's device.

        Raises:
            ServiceError: the server does not answer, or refuses.
        """
        tensors = {
            "token_ids": batch.token_ids,
            "attention_mask": batch.attention_mask,
            "action_mask": batch.action_mask,
        }
        body = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        answer = self._post(f"/score?{settings.to_query()}", body)
        try:
            logprobs: Tensor = load(answer)["logprobs"]
        except (SafetensorError, KeyError) as error:
            raise self._error(f"gave no logprobs: {error}") from error
        # A NaN would reach the loss as a KL term.
        if logprobs.shape != batch.token_ids.shape or not bool(torch.isfinite(logprobs).all()):
            raise self._error(
                f"gave logprobs {list(logprobs.shape)}, expected finite ones {list(batch.token_ids.shape)}"
            )
        return logprobs.to(batch.token_ids.device)

    def load(self, file: Path, version: int) -> None:
        """Give the server other parameters, from a file that it can read.

        Raises:
            ServiceError: it does not answer, or refuses.
        """
        self._post("/load", json.dumps({"file": str(file.absolute()), "version": version}).encode())

    def _post(self, path: str, body: bytes) -> bytes:
        try:
            status, answer = self._request("POST", path, body, _SCORE_SECONDS)
        except (OSError, http.client.HTTPException) as error:
            raise self._error(f"does not answer {path.split('?')[0]}: {type(error).__name__}: {error}") from error
        if status != http.client.OK:
            raise self._error(f"refused {path.split('?')[0]} ({status}): {answer.decode(errors='replace')[:500]}")
        return answer

    def _request(self, method: str, path: str, body: bytes, timeout_seconds: float) -> tuple[int, bytes]:
        secure = self._url.scheme == "https"
        make = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = make(self._url.hostname or "", self._url.port, timeout=timeout_seconds)
        headers = {} if self._token is None else {TOKEN_HEADER: self._token}
        try:
            connection.request(method, self._url.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()  # one connection a request: a server that restarts leaves none half open

    def _read_json(self, body: bytes) -> Mapping[str, Any]:
        try:
            value = json.loads(body)
        except ValueError as error:
            raise self._error(f"says {body[:80]!r} of its health, expected JSON") from error
        if not isinstance(value, dict) or "vocab_size" not in value:
            raise self._error(f"says {body[:80]!r} of its health: this is no reference server")
        return value

    def _error(self, what: str) -> ServiceError:
        explanation = self._explain()
        return ServiceError(
            f"the reference server at {self._url.geturl()} {what}" + (f"\n{explanation}" if explanation else "")
        )


class ServedReference:
    """The reference of a learner, at a server; see `learning.reference.ReferencePolicy`.

    Args:
        model: the policy that is trained; its parameters become the reference's in `refresh`.
        settings: the distribution of the logprobs.
        folder: for the parameters of a reference that is a copy of the policy; None: it never changes, and restarts
            need nothing.
    """

    def __init__(
        self, client: ReferenceClient, model: nn.Module, settings: ScoringSettings, *, folder: Path | None
    ) -> None:
        self._client = client
        self._model = model
        self._settings = settings
        self._folder = folder
        self._file: Path | None = None
        self._version = 0
        if folder is not None:
            self._hold(self._live())

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Return [B, T] logprobs of the sampled tokens.

        Raises:
            ServiceError: the server does not answer, or refuses.
        """
        return self._client.score(batch, self._settings)

    def refresh(self) -> None:
        """Make the reference the policy as it is now.

        Raises:
            ConfigError: it never changes. ServiceError: the server does not take it.
        """
        if self._folder is None:
            raise ConfigError("reference.update_every_n_iters: this reference cannot change: set it to 0")
        self._hold(self._live())
        self._send()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters that the server holds, named `reference.<parameter>`; empty if they never change."""
        if self._file is None:
            return {}
        return {f"reference.{name}": tensor for name, tensor in load_file(self._file).items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back the tensors of `tensors()`, also those of a reference in the learner's process.

        Raises:
            CheckpointError: the copy of other parameters. ServiceError: the server does not take it.
        """
        check_same_reference(tensors, self.tensors())
        if self._file is not None:
            self._hold({name: tensors[f"reference.{name}"] for name in self._live()})
            self._send()

    def _live(self) -> Mapping[str, Tensor]:
        return moving_parameters(self._model)

    def _hold(self, parameters: Mapping[str, Tensor]) -> None:
        # A fresh name each time: the server may still read the last one.
        assert self._folder is not None
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".safetensors", delete=False) as file:
                path = Path(file.name)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in parameters.items()}, path)
        if self._file is not None:  # only now: a full disk leaves the old one
            self._file.unlink()
        self._file = path

    def _send(self) -> None:
        assert self._file is not None
        self._version += 1
        self._client.load(self._file, self._version)


_END_SECONDS = 5.0  # to end when it is told to, before its group is killed
_DYING_SECONDS = 1.0  # a process that dies breaks its connections a moment before it is gone


class ReferenceProcess:
    """`python -m gspo_gym.policy.reference.server` with these arguments, in a separate process group.

    It also ends when this process ends or is killed.

    Args:
        log: the file for its output.
        visible_gpus: for CUDA_VISIBLE_DEVICES; None: as here.

    Attributes:
        token: lets its client change the weights.
    """

    def __init__(self, arguments: Sequence[str], *, log: Path, visible_gpus: Sequence[str] | None = None) -> None:
        self.token = secrets.token_hex(16)
        self._log = log
        # In the environment, because arguments can be read by every program of this machine.
        environment = {**os.environ, TOKEN_VARIABLE: self.token}
        if visible_gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gspo_gym.policy.reference.server", "--ends-with-stdin", *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # its own group, to be ended with its ranks
            )
        end_with_us(self._process.pid, is_group=True)  # its ranks, too, whatever they wait for

    @property
    def pid(self) -> int:
        return self._process.pid

    def require_alive(self) -> None:
        """Raise if it has ended.

        Raises:
            ServiceError: repeats the last lines of the log.
        """
        if self._process.poll() is not None:
            raise ServiceError(f"the reference server could not run\n{self.explain()}")

    def explain(self) -> str:
        """Return its state and the last lines of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        code = self._process.poll()
        state = "it is running" if code is None else f"it has ended with status {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        return "\n".join([f"({state}; the last lines of {self._log}:)", *lines])

    def close(self) -> None:
        """End it and its children. Closing twice is fine."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # it ends when its standard input closes
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        has_ended(self._process.pid, is_group=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
