"""API keys by the environment variable that holds them, and addresses that only this machine can reach.

A key is named by its variable and so stands in no file, argument or log.
"""

from __future__ import annotations

import ipaddress
import os
import re
from typing import overload

from gspo_gym.errors import ConfigError

_URL = re.compile(r"https?://(?P<user>[^/@\s]*@)?[^/@\s]+(/\S*)?")


@overload
def read_key(variable: str, where: str) -> str: ...
@overload
def read_key(variable: None, where: str) -> None: ...
@overload
def read_key(variable: str | None, where: str) -> str | None: ...
def read_key(variable: str | None, where: str) -> str | None:
    """Return the key in an environment variable; None if no variable is named.

    Args:
        variable: its name.
        where: the option or setting that names it, for the error.

    Raises:
        ConfigError: it is not set, or empty.

    >>> read_key("NOT_SET_ANYWHERE", "--api-key-env")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: --api-key-env: expected a key in the variable NOT_SET_ANYWHERE, it is not set
    """
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"{where}: expected a key in the variable {variable}, it is not set")
    return key


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach that address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("localhost.evil.org")
    (True, True, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # any other name may resolve to any address
        return False


def checked_url(url: str) -> str:
    """A base URL without its last slash.

    Raises:
        ValueError: it is none, or it holds a secret.
    """
    match = _URL.fullmatch(url)
    if match is None or match["user"]:
        raise ValueError("expected a URL that begins with http:// or https:// and holds no user or password")
    return url.rstrip("/")
