"""For the tests of configurations: the smallest valid one, with changes, and what errors say about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError

# Nothing but what has no default.
MINIMAL: dict[str, Any] = {
    "model": {"base": "tiny:qwen3-64", "label": "quickstart"},
    "rollout": {
        "env_name": "GuessNumber",
        "env_config": {"style": "terse"},
        "max_turns": 8,
        "max_output_tokens": 8,
        "max_model_len": 512,
        "episodes_per_batch": 64,
    },
    "training": {"iterations_per_epoch": 10, "group_size": 8, "batch_size": 16, "learning_rate": 1e-3},
    "evaluation": {"seeds": "0:100"},
}

Changed = Callable[[Mapping[str, Any]], dict[str, Any]]
Make = Callable[[Mapping[str, Any]], RunConfig]
Problems = Callable[[Mapping[str, Any]], list[str]]


@pytest.fixture
def changed() -> Changed:
    """The minimal sections with these dotted keys set; a value of ... removes the key."""

    def change(changes: Mapping[str, Any]) -> dict[str, Any]:
        values = copy.deepcopy(MINIMAL)
        for key, value in changes.items():
            *above, name = key.split(".")
            table = values
            for part in above:
                table = table.setdefault(part, {})
            if value is ...:
                del table[name]
            else:
                table[name] = value
        return values

    return change


@pytest.fixture
def make(changed: Changed) -> Make:
    """The configuration of the minimal sections with changes."""
    return lambda changes: RunConfig.from_dict(changed(changes))


@pytest.fixture
def problems(changed: Changed) -> Problems:
    """The lines of the error about the minimal sections with changes, without where they come from."""

    def find(changes: Mapping[str, Any]) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            RunConfig.from_dict(changed(changes), source="test")
        lines = str(caught.value).splitlines()
        if len(lines) > 1:
            head, *lines = lines
            assert head == f"{len(lines)} problems in the configuration:"
            lines = [line.removeprefix("  ") for line in lines]
        assert all(line.startswith("test: ") for line in lines)
        return [line.removeprefix("test: ") for line in lines]

    return find
