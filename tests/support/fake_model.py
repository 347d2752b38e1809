"""Stand-in for `gspo-gym models serve MODEL --name NAME ...`, whose answers say who answered.

A request's last message tells what to do: "die"; "wait PIPE", which reads from a named pipe first; "stream PIPE", which
sends half an answer and then reads from it. MODEL@best cannot be served.

Only the standard library, since tests start many.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:  # http.server's
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {os.environ['GSPO_GYM_INFERENCE_KEY']}":
            self.send_error(401)
            return
        try:
            verb, _, pipe = body["messages"][-1]["content"].partition(" ")
        except (AttributeError, LookupError, TypeError):
            verb, pipe = "refuse", ""
        if verb == "die":
            os._exit(3)
        if verb == "wait":
            Path(pipe).read_bytes()
        self.send_response(400 if verb == "refuse" else 200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        answer = json.dumps({"model": body["model"], "served": sys.argv[1], "path": self.path, "pid": os.getpid()})
        self.wfile.write(answer[:9].encode())
        self.wfile.flush()
        if verb == "stream":
            Path(pipe).read_bytes()
        self.wfile.write(answer[9:].encode())


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    if sys.argv[1].endswith("@best"):
        sys.exit("CheckpointError: none of its checkpoints was evaluated")
    server = Server(("127.0.0.1", 0), Handler)
    name = sys.argv[sys.argv.index("--name") + 1]
    print(f"serving {name} at http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()
