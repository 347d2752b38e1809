"""Fields of a chat completion that an endpoint refuses, and requests without them.

OpenAI's reasoning models refuse `max_tokens` and any temperature but 1, Gemini's endpoint has refused `seed`, and some
know no `max_completion_tokens`. A table of models would soon be wrong, so the endpoint is asked, and fields that it
refuses by name are left out. No I/O.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Refusal = TypeVar("Refusal", bound=Exception)

_log = logging.getLogger(__name__)

_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")  # two names of one field
_MAX_READ = 4000  # characters of a refusal; some repeat the whole request after the message


class RefusedFields:
    """The fields that one endpoint refuses; remembered once a request without them was accepted.

    Args:
        name: of the endpoint, for the log.
        refused: fields known from the start.
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
        """Send a request, again without the fields that a refusal is about, and return the answer.

        Args:
            send: sends the request without these fields.
            is_about: returns the fields that a refusal of the request without these may be about; empty raises the
                refusal.
            refusals: exceptions that are refusals.
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
    """Return the request without these fields; a refused limit of tokens gets its other name.

    >>> without({"model": "m", "max_tokens": 9, "seed": 1}, {"max_tokens", "seed"})
    {'model': 'm', 'max_completion_tokens': 9}
    """
    kept = (name for name in request if name not in refused or name in _TOKEN_LIMITS)
    return {_other_name(name) if name in refused else name: request[name] for name in kept}


def refused_fields(refusal: str, request: Mapping[str, Any], *, optional: Collection[str]) -> frozenset[str]:
    """Return the fields of the request that the refusal names, among the optional ones and the limit of tokens.

    Args:
        refusal: text of an HTTP 4xx.
        request: as it was sent.
        optional: fields that may be left out.

    >>> sorted(refused_fields('Unknown name "seed": Cannot find field.', {"seed": 1}, optional=["seed"]))
    ['seed']
    """
    candidates = {*optional, *_TOKEN_LIMITS} & request.keys()
    return frozenset(name for name in candidates if re.search(rf"\b{name}\b", refusal[:_MAX_READ]))


def _other_name(name: str) -> str:
    first, second = _TOKEN_LIMITS
    return second if name == first else first
