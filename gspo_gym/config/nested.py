"""Names of the hosted trainer's files, and their nested form: [policy], [compute.topology], [training.rewards], [lora].

`flatten` turns a file into the flat form before anything is checked, and keeps the name under which each key was
written, for errors. A file may mix the two forms; a key given in both is an error. `apply_override` puts the texts of
the command line over a file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.config.sections import ModelSection, RolloutSection
from gspo_gym.config.services import TopologySection
from gspo_gym.config.words import Problem, explain, look_up, show
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.types import SAMPLING_NAMES

_SAMPLING = [name for name in SAMPLING_NAMES if name in RolloutSection.model_fields]
# What the hosted file calls the fields of `StepRewardSettings`, in [training].
STEP_REWARDS = {
    **{
        name: f"step_rewards_{name}" for name in ("mode", "beta", "indicator_lambda", "strategy", "weights", "k_limits")
    },
    "kind": "event_rewards_kind",
}
# What the hosted file calls keys of [rollout], in [rollout.policy_config].
POLICY_CONFIG = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_tokens": "max_output_tokens"}

# Tables of the nested form only: each of their keys, and its place in the flat form.
_TABLES: Mapping[str, Mapping[str, str]] = {
    "policy": {
        "model_name": "model.base",
        **{name: f"model.{name}" for name in ModelSection.model_fields if name != "base"},
        **{name: f"rollout.{name}" for name in _SAMPLING},
        # Not rollout.top_p: there the sampling is scored under the truncation that it asks for.
        **{name: f"rollout.policy_config.{name}" for name in ("top_p", "top_k")},
        "max_tokens": "rollout.max_output_tokens",
        "system_prompt": "rollout.policy_config.system_prompt",
    },
    "compute.topology": {
        **{name: f"topology.{name}" for name in TopologySection.model_fields},
        "reference_placement": "reference.placement",
    },
    "training.rewards": {name: f"training.{name}" for name in ("step_rewards_enabled", *STEP_REWARDS.values())},
    "lora": {name: f"training.lora.{name}" for name in LoraSettings.model_fields},
    "rubric.weights": {name: f"judge.reward_blend.{name}" for name in ("env", "event", "outcome")},
    "rubric": {"enabled": "judge.enabled"},
}
# Those that are a whole section of the flat form.
_SECTIONS = {"compute.topology": "topology", "lora": "training.lora"}
# Keys of the nested form in tables that both forms have.
_KEYS: Mapping[str, str] = {
    "topology.reference_placement": "reference.placement",
    "judge.options.timeout_s": "judge.timeout_s",
    "training.weight_sync.weight_sync_interval": "training.weight_sync_interval",
    "tags": "run.tags",
}
# Switches of the hosted trainer, and the parts of the blend that each of them keeps.
_ONLY_REWARDS: Mapping[str, tuple[str, ...]] = {
    "task_app_origin_rewards_only": ("env",),
    "rubric_rewards_only": ("event", "outcome"),
}

# What the hosted trainer's client writes into every file that does not say it: as good as an absent key.
INSERTED: Mapping[str, str] = {"reference.placement": "none"}

# Keys that say the same thing as another one, or belong to it: a text of the command line with the first replaces them.
_REPLACED: Mapping[str, Sequence[str]] = {
    **{f"rollout.policy_config.{theirs}": (f"rollout.{ours}",) for theirs, ours in POLICY_CONFIG.items()},
    **{f"rollout.{ours}": (f"rollout.policy_config.{theirs}",) for theirs, ours in POLICY_CONFIG.items()},
    "model.base": ("model.source",),
    "model.source": ("model.base", "model.revision"),
    "optimizer.num_warmup_steps": ("optimizer.warmup_fraction",),
    "optimizer.warmup_fraction": ("optimizer.num_warmup_steps",),
    "judge.options.rubric_id": ("judge.options.rubric_file",),
    "judge.options.rubric_file": ("judge.options.rubric_id",),
}

_MAX_DEPTH = 64  # as of the bodies that servers take


@dataclass
class Flat:
    """A configuration in the flat form.

    Attributes:
        values: as read (hence Any), without the tables of the nested form.
        written: for each key or section that was elsewhere, how it was written.
        problems: what was wrong with the nested form itself.
        inserted: for each key that only has the value that the hosted trainer's client inserts, how it was written.
    """

    values: dict[str, Any]
    written: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    inserted: dict[str, str] = field(default_factory=dict)

    def name(self, key: str) -> str:
        return self.written.get(key, key)


def flatten(values: Mapping[str, Any]) -> Flat:
    """Return the flat form of a file (Any: as read); the input is not changed.

    Raises:
        ConfigError: it is nested too deeply.
    """
    flat = Flat(_copy(values))
    if flat.values.get("type") == "rl":  # the kind of job; the hosted trainer's runner reads it, and nothing here
        del flat.values["type"]
    for table, moves in _TABLES.items():
        _move_table(flat, table, moves)
    # Both look at keys of the flat form, so after the tables; the single keys do not matter to them.
    _take_smaller_semaphore(flat)
    _take_only_rewards(flat)
    for key, target in _KEYS.items():
        above, _, name = key.rpartition(".")
        holder = look_up(flat.values, above) if above else flat.values
        if isinstance(holder, dict) and name in holder:
            _put(flat, target, holder.pop(name), nested_key=key)
    return flat


def _move_table(flat: Flat, table: str, moves: Mapping[str, str]) -> None:
    above, _, name = table.rpartition(".")
    holder = look_up(flat.values, above) if above else flat.values
    if not isinstance(holder, dict) or name not in holder:
        return
    entries = holder.pop(name)
    if not isinstance(entries, dict):
        flat.problems.append(Problem(table, f"expected a table, got {show(entries)}"))
        return
    # An empty table still says that its section is there, such as [lora] for training.lora.
    _keep_section(flat, table, entries)
    for key, value in entries.items():
        if key in moves:
            _put(flat, moves[key], value, nested_key=f"{table}.{key}")
        else:  # reported here, because the flat form, which the models check, no longer has the key
            text = explain(f"{table}.{key}", value) or f"unknown key; {nearest_name(str(key), moves)}"
            flat.problems.append(Problem(f"{table}.{key}", text))
    if not holder and entries and all(moves.get(key) in flat.inserted for key in entries):
        del flat.values[above]  # a section that is there for what was inserted


def _take_smaller_semaphore(flat: Flat) -> None:
    # Both bound the episodes in flight there, so both are kept by the smaller one.
    training = flat.values.get("training")
    if not isinstance(training, dict) or "async_semaphore_max" not in training:
        return
    limit = training.pop("async_semaphore_max")
    rollout = flat.values.setdefault("rollout", {})
    if not isinstance(rollout, dict):
        return  # reported as a wrong section
    max_concurrent = rollout.get("max_concurrent_rollouts", limit)
    if isinstance(max_concurrent, int) and isinstance(limit, int):
        limit = min(max_concurrent, limit)
    rollout["max_concurrent_rollouts"] = limit
    flat.written["rollout.max_concurrent_rollouts"] = "training.async_semaphore_max"


def _take_only_rewards(flat: Flat) -> None:
    # The blend says the same here: a switch may agree with it, and changes nothing.
    rollout = flat.values.get("rollout")
    for name, alone in _ONLY_REWARDS.items():
        if not isinstance(rollout, dict) or name not in rollout:
            continue
        key, is_on = f"rollout.{name}", rollout.pop(name)
        blend = look_up(flat.values, "judge.reward_blend") or {"env": 1.0}
        has_judge = look_up(flat.values, "judge.enabled") is True
        other_parts = [part for part in ("env", "event", "outcome") if part not in alone and isinstance(blend, dict)]
        if not isinstance(is_on, bool):
            flat.problems.append(Problem(key, f"expected true or false, got {show(is_on)}"))
        elif is_on and not has_judge and "env" not in alone:
            flat.problems.append(Problem(key, "true needs a judge: set judge.enabled = true, with its options"))
        elif is_on and has_judge and any(blend.get(part) for part in other_parts):
            weights = ", ".join(f"judge.reward_blend.{part} = 0" for part in other_parts)
            flat.problems.append(Problem(key, f"true contradicts [judge.reward_blend]: set {weights}, or remove this"))


def _keep_section(flat: Flat, table: str, entries: Mapping[str, Any]) -> None:
    section = _SECTIONS.get(table)
    if section is None:
        return
    # A table of nothing but another section's keys, which the hosted trainer's client makes, does not say so.
    if entries and not any(_TABLES[table].get(key, f"{section}.").startswith(f"{section}.") for key in entries):
        return
    above, _, name = section.rpartition(".")
    holder = flat.values.setdefault(above, {}) if above else flat.values
    if isinstance(holder, dict) and name not in holder:
        holder[name] = {}
        flat.written[section] = table
        # Defaults of the section are errors of the name that the file has.
        flat.written |= {target: f"{table}.{key}" for key, target in _TABLES[table].items()}


def _put(flat: Flat, key: str, value: Any, *, nested_key: str) -> None:
    """Set a key of the flat form (Any: as read), unless it has a value, or this is one that says nothing."""
    if value == INSERTED.get(key):
        flat.inserted[key] = nested_key
        return
    *above, name = key.split(".")
    table = flat.values
    for part in above:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return  # the flat form's own table is none, which is reported there
    if name in table and table[name] != value:
        flat.problems.append(Problem(nested_key, f"is {key} in the flat form, which is given, too: remove one of them"))
        return
    table[name] = value
    flat.written[key] = nested_key


def _copy(value: Any, room: int = _MAX_DEPTH) -> Any:
    if not isinstance(value, (Mapping, list)):
        return value
    if room == 0:  # whatever reads and writes the values later recurses, too
        raise ConfigError(f"the configuration: expected tables and lists at most {_MAX_DEPTH} deep, got deeper ones")
    if isinstance(value, list):
        return [_copy(entry, room - 1) for entry in value]
    return {key: _copy(entry, room - 1) for key, entry in value.items()}


def nested_names() -> dict[str, str]:
    """Return the keys that differ in the nested form, with their names in the flat form."""
    tables = {f"{table}.{name}": flat for table, moves in _TABLES.items() for name, flat in moves.items()}
    return tables | dict(_KEYS)


_ABSENT = object()  # where None may be a value
_OVERRIDE = re.compile(r"\s*(?P<key>[\w-]+(\.[\w-]+)+)\s*=(?P<value>.*)", re.DOTALL)


def apply_override(values: dict[str, Any], text: str) -> tuple[str, Problem | None]:
    """Set one `section.key=value` in `values` (the flat form); return its key and the problem, if any.

    A key of the nested form goes where the flat form has it.
    """
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        return text, Problem(text, "expected section.key=value")
    key, value = match["key"], _parse_value(match["value"].strip())
    nested_values: Any = value
    for part in reversed(key.split(".")):
        nested_values = {part: nested_values}
    flat = flatten(nested_values)  # alone, to find where a key of the nested form goes
    for target, name in flat.inserted.items():  # no client inserts it here
        _set(flat.values, target, INSERTED[target])
        flat.written[target] = name
    if flat.problems:
        return key, flat.problems[0]
    targets = [target for target in flat.written if _has(flat.values, target)] or [key]
    for target in targets:
        entry = look_up(flat.values, target)
        if isinstance(entry, dict) and target != key and _has(values, target):
            continue  # the section itself, whose keys follow
        if (problem := _set(values, target, entry)) is not None:
            return targets[-1], problem
    obsolete = {old_key for name, names in _REPLACED.items() if _has(flat.values, name) for old_key in names}
    for old_key in obsolete:  # of the file, which would contradict it
        if not _has(flat.values, old_key):
            _remove(values, old_key)
    return targets[-1], None


def _has(values: dict[str, Any], key: str) -> bool:
    return look_up(values, key, _ABSENT) is not _ABSENT


def _remove(values: dict[str, Any], key: str) -> None:
    above, _, name = key.rpartition(".")
    if isinstance(table := look_up(values, above), dict):
        table.pop(name, None)


def _set(values: dict[str, Any], key: str, value: Any) -> Problem | None:
    *above, name = key.split(".")
    table = values
    for part in above:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Problem(key, f"{part} is not a table that could hold it, but {show(table)}")
    table[name] = value
    return None


def _parse_value(text: str) -> Any:
    # Names and paths need no quotes on a command line.
    try:
        document = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    # More keys: the text had a line break and brought TOML of its own, so it is text.
    return document["value"] if list(document) == ["value"] else text
