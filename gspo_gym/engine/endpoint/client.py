"""The client for OpenAI-compatible endpoints (`gspo_gym/base/endpoint.py`) with an engine's errors."""

from __future__ import annotations

from gspo_gym.base import endpoint as openai_client
from gspo_gym.engine.endpoint.wire import EngineAttemptError
from gspo_gym.errors import EngineError


class RefusedError(openai_client.RefusedError, EngineError):
    """The endpoint understood the request and will not do it (4xx): asking again changes nothing."""


class OpenAIClient(openai_client.OpenAIClient):
    """Raises EngineAttemptError, RefusedError and EngineError."""

    attempt_error = EngineAttemptError
    refused_error = RefusedError
    failed_error = EngineError
