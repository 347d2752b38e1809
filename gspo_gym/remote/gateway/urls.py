"""The URL of a rollout: what is handed out, and what is understood of what programs make of it.

Client code appends to URLs, and some of it to the query. So the id stands in the path and again in the query, and every
way of putting `/v1` and `/chat/completions` behind it is answered; an id that was itself changed is known to nobody,
which is loud. Pure functions. Called by `gateway_app.py`, and by whoever hands a rollout's URL to a task app.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

Api = Literal["chat", "completions", "responses", "models", "unknown"]

_IN_PATH = re.compile(r"/t/([^/]*)(/.*|$)")
# The names under which programs pass the id on in a query, in the order in which they look for it.
_IN_QUERY = ("cid", "trace_correlation_id", "trace")
_ENDS_ID = re.compile(r"[/?&]")
# A base URL, with or without its version and the path of the chat API; programs may append both once more.
_CHAT = re.compile(r"(/v1)*(/chat/completions)*(/v1/chat/completions)?/?")
_OTHERS: tuple[tuple[Api, re.Pattern[str]], ...] = tuple(
    (api, re.compile(rf"(/v1)*/{api}/?")) for api in ("completions", "responses", "models")
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is for. `session_id` is None if its URL names none; `api` is "unknown" if it has no such route."""

    session_id: str | None
    api: Api


def rollout_url(base_url: str, session_id: str) -> str:
    """What a task app gets as its inference URL: it survives all the known ways of changing it.

    >>> rollout_url("http://127.0.0.1:8003", "Xy_1")
    'http://127.0.0.1:8003/t/Xy_1/v1/chat/completions?cid=Xy_1'
    """
    return f"{openai_base_url(base_url, session_id)}/chat/completions?cid={session_id}"


def openai_base_url(base_url: str, session_id: str) -> str:
    """The same session as `base_url` of an OpenAI client.

    >>> openai_base_url("http://127.0.0.1:8003/", "Xy_1")
    'http://127.0.0.1:8003/t/Xy_1/v1'
    """
    return f"{base_url.rstrip('/')}/t/{session_id}/v1"


def read_target(path: str, query: str) -> Target:
    """The session and the API of a request; the id in the path goes before one in the query.

    >>> read_target("/t/Xy_1/v1/v1/chat/completions", "")
    Target(session_id='Xy_1', api='chat')
    >>> read_target("/v1", "cid=Xy_1/v1/chat/completions")
    Target(session_id='Xy_1', api='chat')
    """
    found = _IN_PATH.fullmatch(path)
    if found:
        return Target(found[1], _api_of(found[2]))
    return Target(_id_in_query(query), _api_of(path))


def _id_in_query(query: str) -> str | None:
    values = dict(reversed(parse_qsl(query)))  # reversed: the first of each name counts
    for name in _IN_QUERY:
        if name in values:
            return _ENDS_ID.split(values[name], maxsplit=1)[0]
    return None


def _api_of(tail: str) -> Api:
    if _CHAT.fullmatch(tail):
        return "chat"
    return next((api for api, pattern in _OTHERS if pattern.fullmatch(tail)), "unknown")
