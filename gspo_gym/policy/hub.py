"""Push an exported folder to the hub, or to what speaks its API at HF_ENDPOINT; refusals become our errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gspo_gym.errors import ConfigError, ServiceError, shortened
from gspo_gym.policy.export import require_sums

Result = TypeVar("Result")

# At making the repository and at the push, whose first and last requests the library does not try again itself.
_ATTEMPTS = 3
_ADVICE = {
    401: "the token is missing or wrong: set HF_TOKEN, or run `hf auth login`",
    403: "the token may not write there: create one with the right to write to this repository",
    404: "there is no such owner, or the token does not show it",
    409: "another commit was made at the same moment, or the name is taken: push again, or choose another name",
    413: "it is larger than the hub takes at once",
}


def push(
    folder: Path,
    repo: str,
    *,
    is_private: bool = False,
    token: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Push a folder that `export` wrote; return the URL of the repository, which is made if missing.

    One commit holds all files; those that the repository held before and the folder does not stay.

    Args:
        repo: OWNER/NAME.
        token: None: HF_TOKEN, or that of `hf auth login`.
        sleep: waits between attempts, in seconds.

    Raises:
        ConfigError: `repo` is no name that the hub takes.
        StorageError: the folder is not as it was exported.
        ServiceError: the hub refuses or cannot be reached; says what to do.
    """
    import huggingface_hub

    require_sums(folder)
    # Read here and not by the library, which reads it when it is imported.
    api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)

    def create() -> str:
        return str(api.create_repo(repo, private=is_private or None, exist_ok=True))

    def upload() -> None:
        message = f"Upload {folder.name} from gspo-gym"
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)

    url = _trying(create, f"create {repo}", sleep)
    _trying(upload, f"push to {repo}", sleep)
    return url


def _trying(call: Callable[[], Result], doing: str, sleep: Callable[[float], None]) -> Result:
    """Return the call's result; server errors and lost connections are tried again.

    Raises:
        ConfigError, ServiceError: it failed for good.
    """
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    failure: Exception
    for attempt in range(_ATTEMPTS):
        if attempt:
            sleep(2.0 ** (attempt - 1))
        try:
            return call()
        except HFValidationError as error:
            raise ConfigError(f"OWNER/NAME: {error}") from error
        except LocalTokenNotFoundError as error:
            raise ServiceError(f"{doing}: {_ADVICE[401]}") from error
        except (OSError, RuntimeError) as error:  # the library's errors of HTTP are OSErrors, or the cause of another
            failure = error
            status = _status_of(error)
            if status is not None and status < 500:
                told = _ADVICE.get(status, shortened(str(error), 300))
                raise ServiceError(f"{doing}: the hub answered {status}: {told}") from error
        except Exception as error:
            if not type(error).__module__.startswith("httpx"):  # httpx or httpx2, by the library's version
                raise
            failure = error
    status = _status_of(failure)
    reason = shortened(": ".join(str(error) for error in (failure, failure.__cause__) if error is not None), 300)
    told = f"answered {status}" if status else f"cannot be reached ({reason})"
    raise ServiceError(f"{doing}: the hub {told}; the export is whole in its folder: push it again later") from failure


def _status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status that an error, or its cause, carries; None without one."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None
