"""Fields of a chat completion that not every endpoint takes: which one a refusal is about, and the request without it.

OpenAI's reasoning models refuse `max_tokens` and any temperature but 1, Gemini's endpoint has refused `seed`, and some
know no `max_completion_tokens`. No table of models stays true, so an endpoint is asked, and what it refuses by name is
left out. Who asks does the I/O: judging models and `env.chat_model`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Refusal = TypeVar("Refusal", bound=Exception)

_log = logging.getLogger(__name__)

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")  # two names of the same
_MAX_READ = 4000  # characters of a refusal: some repeat the whole request after what they have to say


class RefusedFields:
    """What one endpoint refuses, as far as it is known: remembered once a request without it was accepted.

    Args:
        name: of who is asked, for the log.
        refused: what is known from the start.
    """

    def __init__(self, name: str, refused: Collection[str] = ()) -> None:
        self._name = name
        self._refused = frozenset(refused)

    async def ask(
        self,
        send: Callable[[frozenset[str]], Awaitable[Answer]],
        is_about: Callable[[Refusal, frozenset[str]], frozenset[str]],
        refusals: tuple[type[Refusal], ...],
    ) -> Answer:
        """The answer to a request, which is sent again without the fields that a refusal of it is about.

        Args:
            send: sends it without these fields.
            is_about: the fields that a refusal, of the request without these, may be about; none: it stands.
            refusals: the exceptions that are one; the last is raised where it stands.
        """
        refused = self._refused
        while True:
            try:
                answer = await send(refused)
            except refusals as error:
                more = is_about(error, refused) - refused
                if not more:
                    raise
                refused |= more
            else:
                self._remember(refused)
                return answer

    def _remember(self, refused: frozenset[str]) -> None:
        if new := refused - self._refused:
            self._refused |= new
            _log.warning("%s refuses %s and is asked without", self._name, ", ".join(sorted(new)))


def without(request: Mapping[str, Any], refused: Collection[str]) -> dict[str, Any]:
    """The request less these fields; a refused limit of tokens stays in it by its other name (Any: JSON).

    >>> without({"model": "m", "max_tokens": 9, "seed": 1}, {"max_tokens", "seed"})
    {'model': 'm', 'max_completion_tokens': 9}
    """
    kept = (name for name in request if name not in refused or name in _TOKEN_LIMITS)
    return {_other_name(name) if name in refused else name: request[name] for name in kept}


def refused_fields(refusal: str, request: Mapping[str, Any], *, optional: Collection[str]) -> frozenset[str]:
    """Which fields of the request the refusal names: of the optional ones, and the limit of tokens.

    Args:
        refusal: the text of an HTTP 4xx.
        request: as it was sent (Any: JSON).
        optional: what may be left out of it.

    >>> sorted(refused_fields("Unknown name \\"seed\\": Cannot find field.", {"seed": 1}, optional=["seed"]))
    ['seed']
    """
    candidates = {*optional, *_TOKEN_LIMITS} & request.keys()
    return frozenset(name for name in candidates if re.search(rf"\b{name}\b", refusal[:_MAX_READ]))


def _other_name(name: str) -> str:
    first, second = _TOKEN_LIMITS
    return second if name == first else first
