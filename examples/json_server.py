"""Serve JSON over HTTP with nothing but the standard library: the plumbing of `openai_agent.py`.

Loopback only, so without a key. What cannot be read is answered 422, and work that fails 500: the trainer then tries
again, or drops the episode.
"""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs


def json_server(port, *, gets, posts):
    """Return a server on this port of the loopback address.

    `gets` are functions of the query, by path; `posts` are pairs of functions of the request's JSON, by path: one that
    raises what is wrong with it, and one that returns the answer.
    """
    handler = type("Handler", (JsonHandler,), {"gets": gets, "posts": posts})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path not in self.gets:
            return self.answer(404, {"detail": "not found"})
        try:
            return self.answer(200, self.gets[path](parse_qs(query)))
        except ValueError as error:
            return self.answer(422, {"detail": str(error)})

    def do_POST(self):
        length = self.headers.get("content-length", "")
        if not re.fullmatch("[0-9]{1,8}", length):
            self.close_connection = True  # what else is sent on it cannot be told from the body
            return self.answer(411, {"detail": "expected a body and its length"})
        body = self.rfile.read(int(length))
        if self.path not in self.posts:
            return self.answer(404, {"detail": "not found"})
        check, work = self.posts[self.path]
        try:
            request = json.loads(body)
            check(request)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            return self.answer(422, {"detail": f"{type(error).__name__}: {error}"})
        try:
            return self.answer(200, work(request))
        except Exception as error:
            return self.answer(500, {"detail": f"{type(error).__name__}: {error}"})

    def send_error(self, code, *_):  # 501 is what the base class says of methods that are not served
        self.answer(405 if code == 501 else code, {"detail": "there is no such request"})

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
