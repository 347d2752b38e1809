"""The process of a reference server: started, watched and ended by the run that it belongs to."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_gym.errors import ServiceError
from gspo_gym.policy.reference.wire import TOKEN_VARIABLE

_END_SECONDS = 5.0  # to end when it is told to, before its group is killed
_DYING_SECONDS = 1.0  # a process that dies breaks its connections a moment before it is gone


class ReferenceProcess:
    """`python -m gspo_gym.policy.reference.server` with these arguments, in a process group of its own.

    It also ends when this process does, however that is.

    Args:
        log: the file that its output is written to.
        visible_gpus: what CUDA_VISIBLE_DEVICES lists; None: as here.

    Attributes:
        token: lets its client change the weights.
    """

    def __init__(self, arguments: Sequence[str], *, log: Path, visible_gpus: Sequence[str] | None = None) -> None:
        self.token = secrets.token_hex(16)
        self._log = log
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
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def require_alive(self) -> None:
        """Raise if it has ended.

        Raises:
            ServiceError: says what it said last.
        """
        if self._process.poll() is not None:
            raise ServiceError(f"the reference server could not run\n{self.explain()}")

    def explain(self) -> str:
        """How it is, and the last lines of its log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_SECONDS)
        code = self._process.poll()
        state = "it is running" if code is None else f"it has ended with status {code}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:]
        return "\n".join([f"({state}; the last lines of {self._log}:)", *lines])

    def close(self) -> None:
        """End it and all that it started. Closing twice is fine."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
