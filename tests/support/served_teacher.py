"""`gspo-gym models serve` in a process, and a relay before it that a test can let fail, or change what it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import programs

Json = Any


@contextlib.contextmanager
def serving(model: str, *options: str, **variables: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the URL of a served model, up to and with /v1, and its process, which ends with the block."""
    command = [sys.executable, "-m", "gspo_gym.cli", "models", "serve", model, "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with programs.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"serving \S+ at (http://\S+/v1)\n", line)
            assert found is not None, line
            yield found[1], process
        finally:
            process.terminate()
            process.wait(30)


class Relay:
    """A server on loopback that asks another one.

    Attributes:
        target: the other's URL, up to and with /v1.
        prompts: the prompts that were to be scored, in their order.
        change_card: changes the entries of /v1/models. change_answer: changes an answer of /v1/completions.
        change_request: changes its request. on_prompt: is called before a prompt is passed on, with its number from 0.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.prompts: list[list[int]] = []
        self.change_card: Callable[[Json], None] = lambda _: None
        self.change_answer: Callable[[Json], None] = lambda _: None
        self.change_request: Callable[[Json], None] = lambda _: None
        self.on_prompt: Callable[[int], None] = lambda _: None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Yield the URL, up to and with /v1."""
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(*relay._pass_on("GET", self.path, None, dict(self.headers)))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self._answer(*relay._pass_on("POST", self.path, body, dict(self.headers)))

            def _answer(self, status: int, value: Json) -> None:
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _pass_on(self, method: str, path: str, body: Json, headers: dict[str, str]) -> tuple[int, Json]:
        if body is not None:
            with self._lock:
                number = len(self.prompts)
                self.prompts.append(body["prompt"])
                self.on_prompt(number)
            self.change_request(body)
        request = urllib.request.Request(
            self.target + path.removeprefix("/v1"),
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json", "authorization": headers.get("Authorization", "")},
            method=method,
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                value = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError as error:
            return 502, {"error": str(error)}
        (self.change_card if body is None else self.change_answer)(value)
        return 200, value
