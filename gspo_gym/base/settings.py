"""The base class of settings records, and the notation for lists of seeds.

A settings record stands beside the code that it governs; `RunConfig` composes them into the user's file.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict

from gspo_gym.base.files import as_toml_holds_it
from gspo_gym.base.keys import checked_url
from gspo_gym.errors import ConfigError

Url = Annotated[str, AfterValidator(checked_url)]
# As config.toml beside a run will hold it: what TOML cannot hold is an error at once, not at the end of the start.
TomlTable = Annotated[dict[str, Any], AfterValidator(as_toml_holds_it)]

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
        held = {name: getattr(section, name) for section in reversed(sections) for name in type(section).model_fields}
        return cls(**{name: held[name] for name in cls.model_fields if name in held})


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
        listed = [seed for part in seeds.split(",") for seed in _parse_part(part)]
    else:
        listed = seeds = list(seeds)
    wrong = [seed for seed in listed if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0]
    if wrong:
        raise ConfigError(f"seeds: expected integers >= 0, got {wrong[0]!r} in {seeds!r}")
    if not listed:
        raise ConfigError(f"seeds: {seeds!r} names no seed")
    repeated = [seed for seed, count in Counter(listed).items() if count > 1]
    if repeated:
        raise ConfigError(f"seeds: {repeated[0]} occurs more than once in {seeds!r}")
    return tuple(listed)


def _parse_part(part: str) -> Sequence[int]:
    try:
        numbers = [int(number) for number in part.split(":")]
        seeds = numbers if len(numbers) == 1 else range(*numbers)
    except (TypeError, ValueError):
        raise ConfigError(f'seeds: expected "start:stop", "start:stop:step" or a number, got {part!r}') from None
    if len(seeds) > _MAX_NUM_SEEDS:
        raise ConfigError(f"seeds: expected at most {_MAX_NUM_SEEDS} at once, got {len(seeds)} in {part!r}")
    return seeds
