"""Values of another trainer's file: read with their type, shown in a line, and filled in where they refer to others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.errors import ConfigError, shortened

# What peft adapts of most models (Qwen, Llama, Mistral, Gemma) if no modules are named.
PEFT_MODULES = ("q_proj", "v_proj")
_MAX_SHOWN = 200  # characters of a value
_SECRET = re.compile(r"(key|token|secret|passw\w*)$", re.I)
_RESOLVER = re.compile(r"\$\{[\w.]+:")  # such as ${oc.env:NAME}, which would read a variable of this machine


@dataclass
class Reading:
    """A table of a file, with the names of the keys that were read.

    Every method that reads a key raises a ConfigError that names system, key and value if the value is of a wrong type.

    Attributes:
        name: of the system, and of the table in its file, for messages.
        entries: the table.
        defaults: values of keys that it lacks.
        read: keys that were read.
    """

    name: str
    entries: Mapping[str, Any]
    defaults: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def get(self, theirs: str) -> Any:
        """Return their value, or the default of their system if the file has none or None."""
        self.read.add(theirs)
        value = self.entries.get(theirs)
        # YAML's null is a key that is not set.
        return self.defaults.get(theirs) if value is None else value

    def is_default(self, theirs: str) -> bool:
        """Return whether the file is silent about a key, or spells its default out."""
        return self.entries.get(theirs) is None or same(self.entries[theirs], self.defaults.get(theirs))

    def is_null(self, theirs: str) -> bool:
        """Return whether the file gives their key the value None, which may mean another thing than an absent key."""
        self.read.add(theirs)
        return theirs in self.entries and self.entries[theirs] is None

    def error(self, theirs: str, expected: str, value: Any) -> ConfigError:
        """Return the error of a value of the wrong type."""
        return ConfigError(f"{self.name}: {theirs}: expected {expected}, got {value!r}")

    def number(self, theirs: str) -> float | None:
        """Return their number, None if it is absent."""
        value = self.get(theirs)
        return None if value is None else self.as_number(theirs, value)

    def as_number(self, theirs: str, value: Any) -> float:
        """Return the value of a key as a number, or of a text such as "5e-6", which YAML 1.1 takes for no number."""
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise TypeError
            if math.isfinite(number := float(value)):
                return number
            raise ValueError
        except (TypeError, ValueError):
            raise self.error(theirs, "a number", value) from None

    def count(self, theirs: str) -> int | None:
        """Return their whole number."""
        value = self.number(theirs)
        if value is not None and not value.is_integer():
            raise self.error(theirs, "a whole number", value)
        return None if value is None else int(value)

    def positive(self, theirs: str) -> int | None:
        """Return their whole number, at least 1."""
        value = self.count(theirs)
        if value is not None and value < 1:
            raise self.error(theirs, "at least 1", value)
        return value

    def require_number(self, theirs: str) -> float:
        """Return the number of a key that `defaults` holds."""
        value = self.number(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def require_count(self, theirs: str) -> int:
        """Return the whole number, at least 1, of a key that `defaults` holds."""
        value = self.positive(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def names(self, theirs: str) -> list[str]:
        """Return their list of names, one name as a list, [] if it is absent or false."""
        value = self.get(theirs)
        names = [value] if isinstance(value, str) else value or []
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise self.error(theirs, "a list of names", value)
        return list(names)

    def table(self, theirs: str) -> Mapping[str, Any] | None:
        """Return their table or the JSON of one, as a command line takes it; None if it is absent or empty."""
        value = self.get(theirs)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise self.error(theirs, "a table or its JSON", value) from None
        if value is not None and not isinstance(value, Mapping):
            raise self.error(theirs, "a table", value)
        return value or None

    def flag(self, theirs: str) -> bool:
        """Return their truth value, false if it is absent."""
        value = self.get(theirs)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.error(theirs, "true or false", value)

    def choice(self, theirs: str, meanings: Mapping[Any, Any]) -> Any:
        """Return the meaning of their value, None if it is absent."""
        value = self.get(theirs)
        if value is None:
            return None  # an absent key changes nothing here
        if isinstance(value, Mapping | list) or value not in meanings:  # a list cannot be looked up
            raise self.error(theirs, f"one of {', '.join(repr(name) for name in meanings)}", value)
        return meanings[value]

    def modules(self, theirs: str) -> str | list[str]:
        """Return the modules of an adapter; those that peft chooses, if none are named."""
        value = self.get(theirs)
        return list(PEFT_MODULES) if value is None else value if value == "all-linear" else self.names(theirs)


# The types of values that rows name.
TYPES: Mapping[str, Callable[[Reading, str], Any]] = {
    "any": Reading.get, "number": Reading.number, "count": Reading.count, "names": Reading.names,
    "table": Reading.table, "modules": Reading.modules,
    "label": lambda reading, theirs: None if reading.get(theirs) is None else label_of(str(reading.get(theirs))),
}  # fmt: skip


def label_of(text: str) -> str:
    """Return a run label made of a path or a name.

    >>> label_of("./outputs/my run")
    'my-run'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.rstrip("/").rsplit("/", 1)[-1]).strip("-._")
    return name[:64] or "run"


def same(value: Any, other: Any) -> bool:
    """Return whether two values of a file are the same; a tuple is a list, and true is not 1.

    >>> same((0.5, 5), [0.5, 5.0]), same(True, 1)
    (True, False)
    """
    values = [list(side) if isinstance(side, tuple) else side for side in (value, other)]
    return bool(values[0] == values[1]) and isinstance(value, bool) == isinstance(other, bool)


def shown(value: Any, *, name: str = "") -> str:
    """Return a value in one line, shortened, and without what looks like a secret.

    >>> shown({"project": "p", "api_key": "abc"})
    "{'project': 'p', 'api_key': '***'}"
    """
    return shortened(repr(_without_secrets(value, name)), _MAX_SHOWN)


def _without_secrets(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_secrets(part, str(key)) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_secrets(part, name) for part in value]
    return "***" if isinstance(value, str) and value and _SECRET.search(name) else value


def variables(values: Mapping[str, Any]) -> set[str]:
    """Return the keys at a file's top that its `${...}` refer to, which may be there for no other purpose."""
    return set(re.findall(r"\$\{(\w+)", repr(values)))


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's tables with what its `${...}` stand for, as OmegaConf resolves them.

    One that refers to another file, or to a variable of the environment, stays a text.

    Raises:
        ConfigError: OmegaConf cannot read it.
    """
    if "${" not in repr(values):
        return dict(values)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def fill(config: Any, key: Any, raw: Any) -> Any:
        try:
            value = config[key]
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException:
            if isinstance(raw, str):
                return raw.replace("\\${", "${")
        return resolve_parts(config[key], raw)

    def resolve_parts(config: Any, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            return {key: fill(config, key, part) for key, part in raw.items()}
        return [fill(config, number, part) for number, part in enumerate(raw)]

    escaped_values = _escape(values)
    try:
        return dict(resolve_parts(OmegaConf.create(escaped_values), escaped_values))
    except OmegaConfBaseException as error:
        raise ConfigError(f"OmegaConf cannot read the file: {str(error).splitlines()[0]}") from None


def _escape(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_escape(part) for part in value]
    return value.replace("${", "\\${") if isinstance(value, str) and _RESOLVER.search(value) else value
