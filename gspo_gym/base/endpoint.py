"""One JSON request to an OpenAI-compatible endpoint through the `openai` package, with its failures as our exceptions.

Releases 2.x of the package use httpx and 3.x httpx2, so neither is named here. Retries are `retries.py`'s, not the
package's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from gspo_gym.base.retries import AttemptError
from gspo_gym.errors import GymError, MissingExtraError, ServiceError, shortened

if TYPE_CHECKING:
    import openai


class RefusedError(ServiceError):
    """The endpoint refuses the request (4xx); asking again changes nothing.

    Attributes:
        status: HTTP's; 0 if unknown.
        answer: the whole answer, of which the message repeats only a part. No error shows it.
    """

    def __init__(self, message: str, *, status: int = 0, answer: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class OpenAIClient:
    """Sends JSON and returns JSON. Use one within one event loop, and close it.

    Proxies and `.netrc` of the environment are not used and redirects not followed, so prompts and keys go only to
    `base_url`.

    Attributes:
        attempt_error, refused_error, failed_error: exceptions to raise; a subclass may set others.

    Args:
        base_url: such as "http://127.0.0.1:8000/v1".
        api_key: sent as the bearer token; None sends the word "none". It appears in no error.
        timeout_seconds: limit of one request, to the last byte of the answer.

    Raises:
        MissingExtraError: the openai package is not installed.
    """

    attempt_error: type[AttemptError] = AttemptError
    refused_error: type[RefusedError] = RefusedError
    failed_error: type[GymError] = ServiceError

    def __init__(self, base_url: str, *, api_key: str | None, timeout_seconds: float) -> None:
        try:
            import openai
        except ImportError as error:
            raise MissingExtraError("asking an endpoint needs: pip install 'gspo-gym[openai]'") from error
        self.base_url = base_url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._api_key = api_key
        is_encrypted = self.base_url.startswith("https:")  # else the slow loading of certificates is skipped
        self._client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=api_key or "none",
            max_retries=0,
            timeout=timeout_seconds,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False, follow_redirects=False, verify=is_encrypted),
        )

    async def get(self, path: str) -> Any:
        """Return the JSON at `path` below the base URL; see `post`."""
        return await self._send("GET", path, None, {})

    async def post(self, url: str, body: Mapping[str, Any], *, call_id: str, attempt: int) -> Any:
        """Return the JSON that answers.

        `url` is a path below the base URL, or complete. `call_id` is sent as the `Idempotency-Key`, the same for all
        attempts of a call, so a gateway that supports such keys samples once; with `attempt` it is the `X-Request-Id`.

        Raises:
            GymError: `attempt_error` for no connection, no complete answer in time, 429, 5xx, or no JSON: try again;
                `refused_error` for any other status; `failed_error` for a failure inside the openai package.
        """
        headers = {"Idempotency-Key": call_id, "X-Request-Id": f"{call_id}-{attempt}"}
        return await self._send("POST", url, body, headers)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _send(self, method: str, url: str, body: Mapping[str, Any] | None, headers: dict[str, str]) -> Any:
        import openai

        try:
            # The package's timeout is for each read, so a body that drips would never end.
            async with asyncio.timeout(self._timeout_seconds):
                if method == "GET":
                    answer = await self._client.get(url, cast_to=object)
                else:
                    answer = await self._client.post(url, cast_to=object, body=body, options={"headers": headers})
        except (TimeoutError, openai.APITimeoutError) as error:
            raise self.attempt_error(
                f"{self.base_url}: no complete answer within {self._timeout_seconds:g} seconds", kind="timeout"
            ) from error
        except openai.APIConnectionError as error:
            cause = type(error.__cause__).__name__
            raise self.attempt_error(f"{self.base_url}: connection failed ({cause})", kind="connection") from error
        except openai.APIStatusError as error:
            raise self._status_error(error) from None  # its text may repeat the key
        except openai.OpenAIError as error:
            raise self.failed_error(f"{self.base_url}: {type(error).__name__}: {self._readable(str(error))}") from None
        except ValueError as error:  # from json or a text decoder
            raise self.attempt_error(
                f"{self.base_url}: the answer is not complete JSON: {error}", kind="json"
            ) from error
        if not isinstance(answer, dict):  # the package returns text if the content type is not JSON
            raise self.attempt_error(f"{self.base_url}: expected a JSON object, got {answer!r:.120}", kind="content")
        return answer

    def _status_error(self, error: openai.APIStatusError) -> GymError:
        status = error.status_code
        text = str(error)
        if text == f"Error code: {status}":  # the package reads only OpenAI's form of an error
            text = f"{text} {error.response.text}".strip()
        message = f"{self.base_url}: HTTP {status}: {self._readable(text)}"
        if status != 429 and status < 500:
            return self.refused_error(message, status=status, answer=error.response.text)
        return self.attempt_error(
            message, kind=str(status), retry_after_seconds=retry_after_seconds(error.response.headers)
        )

    def _readable(self, text: str) -> str:
        if self._api_key:
            text = text.replace(self._api_key, "***")
        return shortened(text, 300)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return how long a server asks to wait: `retry-after-ms`, or `retry-after` in seconds or as a date (RFC 9110,
    10.2.3).

    None if it does not say, or not readably.

    >>> retry_after_seconds({"retry-after": "2"}), retry_after_seconds({"retry-after-ms": "1500"})
    (2.0, 1.5)
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers[name]) * unit
        except (KeyError, ValueError):
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    # A date counts from the answer's own `date`, because clocks may differ.
    try:
        then, now = parsedate_to_datetime(headers["retry-after"]), parsedate_to_datetime(headers["date"])
        return max(0.0, (then - now).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None
