"""How a task app fails, as exceptions::

    ServiceError
    └── AppError                  RuntimeError  the app failed, or cannot be reached
        ├── AppAttemptError       (AttemptError) another attempt may succeed: no connection, 429, 5xx
        ├── AppTimeoutError       TimeoutError  no complete answer before the deadline
        ├── AppUnauthorisedError                the app takes no call of ours; says what to set
        ├── AppRefusedError                     the app understood the request and will not do it (4xx, redirects)
        └── AppAnswerError                      the answer is too long, no JSON, or not of the contract

No key, nor the beginning of one, is in any of their texts.
"""

from __future__ import annotations

from gspo_gym.base.retries import AttemptError
from gspo_gym.errors import ServiceError


class AppError(ServiceError):
    """A task app failed."""


class AppAttemptError(AttemptError, AppError):
    """One request failed in a way that another one may not. Whether the app has begun something is not known."""


class AppTimeoutError(AppError, TimeoutError):
    """A task app did not answer completely before the deadline."""


class AppUnauthorisedError(AppError):
    """A task app takes no call of ours: the key is missing or wrong, here or there."""


class AppRefusedError(AppError):
    """A task app understood the request and will not do it; asking again changes nothing."""


class AppAnswerError(AppError):
    """An answer that cannot be believed."""
