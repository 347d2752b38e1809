"""One question to a judging model as a chat completion: request, structured output, and the strict reading of it.

What an endpoint can do is found out by asking it: whether it holds answers to a JSON schema (`structured_output =
"auto"`) and takes a seed and a temperature. What it refuses, and accepts a request without, it is not sent again. What
makes a verdict is decided by `verdict.py` either way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gspo_gym.base.chat_fields import RefusedFields, refused_fields, without
from gspo_gym.base.endpoint import OpenAIClient, RefusedError
from gspo_gym.base.retries import AttemptError, RetryCounters, Sleep
from gspo_gym.errors import ServiceError
from gspo_gym.judge.asking import Asking, Clock
from gspo_gym.judge.base import JudgeCost, JudgeDeniedError, JudgeError
from gspo_gym.judge.budget import JudgeBudget
from gspo_gym.judge.model.prompt import Question, build_messages
from gspo_gym.judge.model.settings import ModelJudgeSettings
from gspo_gym.judge.model.verdict import NONCE_DIGITS, Verdict, VerdictError, parse_verdict, verdict_schema
from gspo_gym.seeding import child_seed

_SCHEMA = "response_format"
_NO_NONCE = "0" * NONCE_DIGITS
_ABOUT_THE_REQUEST = (400, 404, 415, 422, 501)
_DENIED = (402, 404)  # no money; no such model or address
_SEED_LIMIT = 2**31  # what servers of C's int accept
_TOKENS_OF_A_MESSAGE = 64  # what templates put around one, at most


class JudgeAnswerError(AttemptError):
    """An answer that is no chat completion with a text."""


class ChatJudgeModel:
    """Asks the model. See `ModelJudge` for the arguments."""

    def __init__(
        self,
        settings: ModelJudgeSettings,
        *,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._settings = settings
        client = OpenAIClient(
            settings.url, api_key=settings.read_key(), timeout_seconds=settings.asking.timeout_seconds
        )
        self._asking = Asking(client, settings.asking, budget=budget, clock=clock, sleep=sleep)
        self._fields = RefusedFields(settings.name, {_SCHEMA} if settings.structured_output == "text" else ())

    @property
    def counters(self) -> RetryCounters:
        """Questions, attempts and failures by kind so far."""
        return self._asking.counters

    async def ask(self, question: Question, *, nonce_of: Callable[[int], str], seed: int) -> tuple[Verdict, JudgeCost]:
        """The verdict, and what all attempts at it have cost. Every answer has a nonce and a seed of its own.

        Raises:
            JudgeDownError, JudgeBudgetError, JudgeDeniedError: see `Asking.ask`; the last for want of money (402) or
                of such a model (404), too. JudgeError: it refused, or gave no verdict.
        """

        def is_about(error: RefusedError, refused: frozenset[str]) -> frozenset[str]:
            return self._is_about(error, self._request(question, _NO_NONCE, seed, refused))

        try:
            return await self._fields.ask(
                lambda refused: self._ask(question, nonce_of, seed, refused), is_about, (RefusedError,)
            )
        except JudgeError:
            raise
        except ServiceError as error:
            is_denied = isinstance(error, RefusedError) and error.status in _DENIED
            kind = JudgeDeniedError if is_denied else JudgeError
            raise kind(f"{self._settings.name}: {error}") from error

    async def close(self) -> None:
        """Give the connections back."""
        await self._asking.close()

    async def _ask(
        self, question: Question, nonce_of: Callable[[int], str], seed: int, refused: Collection[str]
    ) -> tuple[Verdict, JudgeCost]:
        nonce = ""

        def body(num_answers: int) -> Mapping[str, Any]:
            nonlocal nonce
            nonce = nonce_of(num_answers)
            return self._request(question, nonce, child_seed(seed, "answer", num_answers), refused)

        def read(answer: Any) -> Verdict:
            return parse_verdict(_text_of(answer), nonce=nonce, parts=question.parts)

        return await self._asking.ask("/chat/completions", body, read, self._cost_of, most=self._most(question))

    def _request(self, question: Question, nonce: str, seed: int, refused: Collection[str]) -> dict[str, Any]:
        settings = self._settings
        schema = {"name": "verdict", "strict": True, "schema": verdict_schema(nonce, question.parts)}
        request: dict[str, Any] = {
            "model": settings.model,
            "messages": build_messages(question, nonce),
            settings.max_tokens_field: settings.max_output_tokens,
            "seed": seed % _SEED_LIMIT,
            _SCHEMA: {"type": "json_schema", "json_schema": schema},
        }
        if settings.temperature is not None:
            request["temperature"] = settings.temperature
        return without(request, refused)

    def _is_about(self, error: RefusedError, request: Mapping[str, Any]) -> frozenset[str]:
        """Which fields of the request a refusal may be about: those that the refusal names, or else the schema."""
        if error.status not in _ABOUT_THE_REQUEST:
            return frozenset()
        optional = {"seed"} if self._settings.must_take_temperature else {"seed", "temperature"}
        named = refused_fields(error.answer, request, optional=optional)
        return named or frozenset({_SCHEMA} if self._settings.structured_output == "auto" else ())

    def _most(self, question: Question) -> JudgeCost:
        """What one attempt costs at most: no token has fewer bytes than one."""
        messages = build_messages(question, _NO_NONCE)
        num_bytes = sum(len(message["content"].encode()) for message in messages)
        tokens = num_bytes + _TOKENS_OF_A_MESSAGE * (len(messages) + 1)
        return self._settings.prices.cost_of(tokens, self._settings.max_output_tokens)

    def _cost_of(self, answer: Any) -> JudgeCost | None:
        usage = _usage_of(answer)
        return None if usage is None else self._settings.prices.cost_of(*usage)


def _text_of(answer: Any) -> str:
    """What the model says (Any: an endpoint may answer with anything).

    Raises:
        JudgeAnswerError: it refuses, was cut off, or the answer has another shape.
    """
    choices = answer.get("choices") if isinstance(answer, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or not isinstance(message, Mapping):
        raise JudgeAnswerError(f"expected a chat completion with a message, got {answer!r:.120}", kind="answer")
    if message.get("refusal") or choice.get("finish_reason") == "content_filter":
        raise JudgeAnswerError(f"the judge refused: {message.get('refusal')!r:.120}", kind="refusal")
    if choice.get("finish_reason") == "length":
        raise JudgeAnswerError("the verdict was cut off; raise max_output_tokens", kind="length")
    text = message.get("content")
    if not isinstance(text, str):
        raise VerdictError(f"expected a text, got {text!r:.120}")
    return text


def _usage_of(answer: Any) -> tuple[int, int] | None:
    """Tokens read and written, where the answer says so in whole numbers >= 0."""
    usage = answer.get("usage") if isinstance(answer, Mapping) else None
    if not isinstance(usage, Mapping):
        return None
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if type(read) is int and type(written) is int and read >= 0 and written >= 0:
        return read, written
    return None
