"""The base class of settings records, the notation for lists of seeds, API keys, and addresses.

A settings record stands beside the code that it governs; `RunConfig` composes them into the user's file. A key is named
by the environment variable that holds it and so stands in no file, argument or log.
"""

from __future__ import annotations

import copy
import datetime
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Self, overload

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from gspo_gym.base.files import as_toml_holds_it
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


Url = Annotated[str, AfterValidator(checked_url)]
# As config.toml beside a run will hold it: what TOML cannot hold is an error at once, not at the end of the start.
TomlTable = Annotated[dict[str, Any], AfterValidator(as_toml_holds_it)]


def _day(value: Any) -> Any:  # Any: pydantic hands over whatever it was given
    # TOML and YAML read a date without quotes as one.
    return value.isoformat() if type(value) is datetime.date else value


def _checked_day(day: str) -> str:
    return datetime.date.fromisoformat(day).isoformat()


Day = Annotated[str, BeforeValidator(_day), AfterValidator(_checked_day)]

_MAX_NUM_SEEDS = 1_000_000  # more is a typing error, which would fill the memory


class Settings(BaseModel):
    """A frozen record of settings; unknown keys and values of another type or out of range are errors.

    Nothing is converted ("8" is not 8, and True is not 1), except that an integer may stand for a number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)

    @classmethod
    def of(cls, *sections: BaseModel) -> Self:
        """Return such a record with the values that these sections have under the names of its fields.

        The first section that has a field gives it.
        """
        # A section of a file may hold settings of several rooms, and a record may need those of several sections.
        values = {name: getattr(section, name) for section in reversed(sections) for name in type(section).model_fields}
        return cls(**{name: values[name] for name in cls.model_fields if name in values})


def same(settings: type[BaseModel], name: str) -> Any:
    """Return the definition of a field of other settings."""
    return copy.copy(settings.model_fields[name])


def parse_seeds(seeds: str | Sequence[int]) -> tuple[int, ...]:
    """Return seeds from a list of integers or from text: "0:100" (without 100), "0:100:10", "7", "1,5,20:25".

    Raises:
        ConfigError: there is none, or something negative, repeated or not an integer.

    >>> parse_seeds("1,5,20:23")
    (1, 5, 20, 21, 22)
    """
    if isinstance(seeds, str):
        seed_list = [seed for part in seeds.split(",") for seed in _parse_part(part)]
    else:
        seed_list = seeds = list(seeds)
    wrong = [seed for seed in seed_list if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0]
    if wrong:
        raise ConfigError(f"seeds: expected integers >= 0, got {wrong[0]!r} in {seeds!r}")
    if not seed_list:
        raise ConfigError(f"seeds: {seeds!r} names no seed")
    duplicates = [seed for seed, count in Counter(seed_list).items() if count > 1]
    if duplicates:
        raise ConfigError(f"seeds: {duplicates[0]} occurs more than once in {seeds!r}")
    return tuple(seed_list)


def _parse_part(part: str) -> Sequence[int]:
    try:
        numbers = [int(number) for number in part.split(":")]
        seeds = numbers if len(numbers) == 1 else range(*numbers)
    except (TypeError, ValueError):
        raise ConfigError(f'seeds: expected "start:stop", "start:stop:step" or a number, got {part!r}') from None
    if len(seeds) > _MAX_NUM_SEEDS:
        raise ConfigError(f"seeds: expected at most {_MAX_NUM_SEEDS} at once, got {len(seeds)} in {part!r}")
    return seeds
