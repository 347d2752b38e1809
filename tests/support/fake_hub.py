"""A stand-in of the hub's HTTP API on loopback, as huggingface_hub calls it to push: repositories, commits, LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


@dataclass
class FakeHub:
    """What was pushed, and what is to go wrong.

    Attributes:
        repos: files by path, by repository. objects: LFS contents by their SHA-256.
        failures: [part of a path, status] of requests to come; each is answered once. 0: the connection is cut.
        asked: method and path of every request.
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    failures: list[tuple[str, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        """Status and JSON of an answer (Any: headers; JSON)."""
        self.asked.append(f"{method} {path}")
        for index, (part, status) in enumerate(self.failures):
            if part in path:
                del self.failures[index]
                return status, {"error": f"planned {status}"}
        if path.startswith("/lfs/"):  # storage, which takes no token
            digest = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == digest
            self.objects[digest] = body
            return 200, {}
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        repo = "/".join(path.removeprefix("/api/models/").lstrip("/").split("/")[:2]).removesuffix(".git")
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(one) for one in json.loads(body)["objects"]]}
        if "/preupload/" in path:
            return 200, {"files": [self._preupload(file) for file in json.loads(body)["files"]]}
        if "/commit/" in path:
            return self._commit(repo, [json.loads(line) for line in body.splitlines()])
        return 404, {"error": path}

    def _create(self, asked: Any) -> tuple[int, Any]:
        repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
        status = 409 if repo in self.repos else 200
        self.repos.setdefault(repo, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(repo)
        return status, {"url": f"{self.url}/{repo}"}

    def _upload(self, one: Any) -> Any:
        return {**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}}

    def _preupload(self, file: Any) -> Any:
        is_large = file["path"].endswith(".safetensors")
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _commit(self, repo: str, lines: list[Any]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.objects[value["oid"]]
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1", "success": True}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serve for the length of a block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_POST(self) -> None:  # http.server's
            body = self._body()
            status, value = hub.answer(self.command, self.path, self.headers, body)
            if not status:
                self.close_connection = True
                return
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
