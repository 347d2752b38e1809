"""The keys of task apps: where they come from, in which headers they travel, and how an app says that it wants others.

A key is in no error, log or repr. Called by `client.py`; a server of ours reads the same environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_gym.errors import ConfigError

KEY_VARIABLES = ("ENVIRONMENT_API_KEY", "DEV_ENVIRONMENT_API_KEY")  # the first that is set counts
ALIASES_VARIABLE = "ENVIRONMENT_API_KEY_ALIASES"  # more keys, parted by commas
_MIN_SHOWN_PREFIX = 4  # characters: shorter beginnings of a key are in any text


class AppKeys:
    """The keys that are sent to an app, all of them with every request; none is fine on loopback.

    Args:
        keys: the first is the key, the others are its aliases.

    Raises:
        ConfigError: a key could not stand in a header.

    >>> AppKeys(["secret"])
    AppKeys(<1 key>)
    """

    def __init__(self, keys: tuple[str, ...] | list[str]) -> None:
        self._keys = tuple(dict.fromkeys(keys))
        for number, key in enumerate(self._keys):
            if not key or not all("!" <= c <= "~" and c != "," for c in key):
                raise ConfigError(
                    f"key {number + 1} of the task app: expected printable ASCII without spaces and commas, got "
                    f"{len(key)} characters of which some are not; look at {KEY_VARIABLES[0]} and {ALIASES_VARIABLE}"
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AppKeys:
        """The keys that the environment variables hold.

        Raises:
            ConfigError: a key could not stand in a header.

        >>> AppKeys.from_environment({"ENVIRONMENT_API_KEY": "a", "ENVIRONMENT_API_KEY_ALIASES": "b, c"})
        AppKeys(<3 keys>)
        """
        first = next((environ[name].strip() for name in KEY_VARIABLES if environ.get(name, "").strip()), "")
        aliases = (alias.strip() for alias in environ.get(ALIASES_VARIABLE, "").split(","))
        return cls([key for key in (first, *aliases) if key])

    def __repr__(self) -> str:
        return f"AppKeys(<{len(self)} key{'' if len(self) == 1 else 's'}>)"

    def __len__(self) -> int:
        return len(self._keys)

    def headers(self) -> dict[str, str]:
        """The three headers in which apps look for a key."""
        if not self._keys:
            return {}
        first = self._keys[0]
        return {"x-api-key": first, "x-api-keys": ",".join(self._keys), "authorization": f"Bearer {first}"}

    def redacted(self, text: str) -> str:
        """The text without our keys and their beginnings, which some apps write into their answers."""
        for key in self._keys:
            for length in range(len(key), _MIN_SHOWN_PREFIX - 1, -1):
                text = text.replace(key[:length], "***")
        return text

    def what_to_set(self, *, app_has_no_key: bool) -> str:
        """What to do about an app that takes no call of ours."""
        name = KEY_VARIABLES[0]
        if app_has_no_key:
            return f"the app was started without a key; set {name} where the app runs, and to the same here"
        if not self._keys:
            return f"it wants a key and none was sent; set {name} here to the app's key"
        return f"it does not take the key that was sent; set {name} here to the app's key"


def is_missing_key(status: int, code: str) -> bool:
    """Whether an app says that it was started without a key."""
    return status == 503 and code == "missing_environment_api_key"


def is_unauthorised(status: int, code: str) -> bool:
    """Whether an app says, in one of the ways that there are, that it does not take our key.

    >>> is_unauthorised(400, "unauthorised"), is_unauthorised(400, "bad_seed"), is_unauthorised(401, "")
    (True, False, True)
    """
    return status in (401, 403) or (status == 400 and code in ("unauthorised", "unauthorized"))


def error_of(answer: Any) -> tuple[str, str]:
    """The code and the message of an error answer (Any: JSON); "" where there is none.

    >>> error_of({"detail": {"error": {"code": "unknown_env", "message": "no crafter"}}})
    ('unknown_env', 'no crafter')
    >>> error_of({"detail": [{"loc": ["body", "mode"], "msg": "Field required"}]})
    ('', 'body.mode: Field required')
    """
    detail = answer.get("detail", answer) if isinstance(answer, dict) else answer
    if isinstance(detail, dict):
        error = detail.get("error", detail)
        if isinstance(error, dict):
            code, message = error.get("code"), error.get("message")
            return (code if isinstance(code, str) else "", message if isinstance(message, str) else "")
        return "", error if isinstance(error, str) else ""
    if isinstance(detail, list):
        rows = [row for row in detail if isinstance(row, dict)]
        return "", "; ".join(f"{'.'.join(map(str, row.get('loc') or ()))}: {row.get('msg')}" for row in rows)
    return "", detail if isinstance(detail, str) else ""
