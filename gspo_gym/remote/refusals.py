"""What a server of ours answers when it does not do what was asked: one exception, one shape on the wire.

The shape is FastAPI's with a code inside, {"detail": {"error": {"code", "message"}}}, as task apps have it. Called by
the routes of `task_app_server.py`.
"""

from __future__ import annotations

from collections.abc import Collection

from fastapi import Request
from fastapi.responses import JSONResponse

from gspo_gym.env.workers.wire import refusal_in
from gspo_gym.errors import GymError

_RETRY_AFTER_SECONDS = 1


class RefusalError(GymError, RuntimeError):
    """A request is not done, and why; 503 also says when to come again."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def failure_status(error: BaseException, given: Collection[str]) -> int:
    """Return 422 if an environment failed because it refuses values that the client has `given`, else 500.

    It refuses them by a ValueError, TypeError or LookupError of its own, as constructors and `reset` do.
    """
    return 422 if given and refusal_in(error) is not None else 500


async def answer_refusal(_: Request, refusal: Exception) -> JSONResponse:
    """The answer to a request that was refused: FastAPI's handler for `RefusalError`."""
    assert isinstance(refusal, RefusalError)
    error = {"code": refusal.code, "message": str(refusal)}
    headers = {"retry-after": str(_RETRY_AFTER_SECONDS)} if refusal.status == 503 else None
    return JSONResponse({"detail": {"error": error}}, refusal.status, headers)
