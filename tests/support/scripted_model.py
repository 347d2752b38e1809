"""An OpenAI-compatible endpoint that says what a test wants, and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refused:
    """HTTP 400 with this body (Any: providers have forms of their own)."""

    answer: Any


Say = Callable[[Json], Json | int | Refused]


@dataclass(slots=True)
class Asked:
    """One request as it came in."""

    path: str
    query: str
    headers: dict[str, str]
    body: Json


def text(content: str) -> Json:
    """A message without tool calls."""
    return {"content": content}


def calls(*made: tuple[str, str]) -> Json:
    """A message of tool calls: names, and arguments as JSON text."""
    listed = [
        {"id": f"id_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(made)
    ]
    return {"content": None, "tool_calls": listed}


@dataclass(slots=True)
class ScriptedModel:
    """An ASGI application.

    Attributes:
        say: gives the message for a request, the status of an error, or a refusal; a message may hold `gspo_gym`,
            `overflow` and `finish_reason`.
        asked: the requests.
        is_asked: set when one comes in. hangs: answers nothing until its client leaves, and sets `is_left` then;
            `on_hang` is called before.
    """

    say: Say
    hangs: bool = False
    on_hang: Callable[[], object] = int
    asked: list[Asked] = field(default_factory=list)
    is_asked: threading.Event = field(default_factory=threading.Event)
    is_left: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = Asked(scope["path"], scope["query_string"].decode(), headers, json.loads(body))
        self.asked.append(asked)
        self.is_asked.set()
        if self.hangs:
            self.on_hang()
            message = await receive()  # the body is read: what comes now is that the client left
            assert message["type"] == "http.disconnect"
            self.is_left.set()
            return
        status, answer = self._answer(asked.body)
        content = json.dumps(answer).encode()
        wire = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": wire})
        await send({"type": "http.response.body", "body": content})

    def _answer(self, body: Json) -> tuple[int, Any]:
        said = self.say(body)
        if isinstance(said, Refused):
            return 400, said.answer
        if isinstance(said, int):
            return said, {"error": {"message": "on purpose", "type": "server_error", "code": None}}
        if said.get("overflow"):
            error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
            return 400, {"error": error}
        about = ("gspo_gym", "finish_reason")
        extra = {"gspo_gym": said["gspo_gym"]} if "gspo_gym" in said else {}
        message = {"role": "assistant", **{key: value for key, value in said.items() if key not in about}}
        reason = said.get("finish_reason") or ("tool_calls" if said.get("tool_calls") else "stop")
        choice: Json = {"index": 0, "message": message, "finish_reason": reason}
        if body.get("logprobs"):
            token = {"token": "x", "logprob": -0.25, "bytes": None, "top_logprobs": []}
            choice["logprobs"] = {"content": [token], "refusal": None}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        head: Json = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": body["model"]}
        return 200, {**head, "choices": [choice], "usage": usage, **extra}


def in_turn(*messages: Json | int | Refused) -> Say:
    """These answers, in the order of the requests."""
    remaining = iter(messages)
    return lambda _body: next(remaining)
