"""Files of other trainers, made of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.agilerl import AGILERL
from gspo_gym.config.foreign.reader import System
from gspo_gym.config.words import SYSTEMS

# The name of its command, and a version of a system.
TABLES = [(command, table) for command, newest in SYSTEMS.items() for table in newest.tables]
IDS = [table.source for _, table in TABLES]


def file_with(table: System, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file with keys that are named as in a table: flat, or in a manifest's sections."""
    if table is not AGILERL:
        return dict(keys)
    sections: dict[str, Any] = {"algorithm": {}}
    for key, value in keys.items():
        section, _, name = key.rpartition(".")
        if section or key not in ("mutation", "replay_buffer", "selection_strategy", "tournament_selection"):
            sections.setdefault(section or "algorithm", {})[name] = value
        else:
            sections[key] = value
    return sections
