"""Names of the hosted trainer's files, and their nested form: [policy], [compute.topology], [training.rewards], [lora].

`flatten` turns a file into the flat form before anything is checked, and keeps the name under which each key was
written, for errors. A file may mix the two forms; a key given in both is an error. `apply_override` puts the texts of
the command line over a file.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.base.settings import parse_seeds
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
    **{f"rollout.policy_config.{theirs}": f"rollout.{ours}" for theirs, ours in POLICY_CONFIG.items()},
}
# Switches of the hosted trainer, and the parts of the blend that each of them keeps.
_ONLY_REWARDS: Mapping[str, tuple[str, ...]] = {
    "task_app_origin_rewards_only": ("env",),
    "rubric_rewards_only": ("event", "outcome"),
}

# Keys of its files with one value here, and why there is no other.
_ONE_VALUE: Mapping[str, tuple[Any, str]] = {
    "algorithm.type": ("online", ""),
    "training.weight_sync.enable": (True, ", without which the policy that samples never learns"),
    "training.weight_sync.targets": (["policy"], ", which is all that samples"),
    "reference.tp": (1, ", because one process scores the reference"),
}
# Keys of its scoring server, with the values that its files have by default.
_OF_ITS_SERVER = {"reference.port": 8002, "reference.health_interval_ms": 300, "reference.health_max_wait_s": 180}
_METHODS = ("policy_gradient", "ppo")
# What the page of all keys says of them, in the order in which they are taken.
HOSTED_ONLY: Mapping[str, str] = {
    **{key: f"only {show(value)}{reason}" for key, (value, reason) in _ONE_VALUE.items()},
    **dict.fromkeys(_OF_ITS_SERVER, "a number > 0 without effect: Ray reaches the reference, and says if it is lost"),
    "judge.type": 'only "synth", the judge at services.judge_url, which must be given',
    "training.step_rewards_enabled": 'false sets training.step_rewards_mode to "off"; true demands another mode',
    "evaluation.instances": "so many of evaluation.seeds are played, the first; without them, the seeds from 0 on",
    "rollout.ops": '"agent" and "env" in turns; more than one pair sets rollout.max_turns to the number of pairs',
    "rollout.batches_per_step": "multiplies rollout.episodes_per_batch",
    "training.max_accumulated_minibatch": "the most training.gradient_accumulation_steps; without those, as many as "
    "split the iteration's episodes evenly",
    "training.gradient_accumulation_steps": "multiplies training.batch_size",
    "algorithm.method": f"{' or '.join(map(show, _METHODS))}; neither has a value function, and with ppo, whose clip "
    "is meant to act, a batch must be used for more than one optimizer step",
}

# What the hosted trainer's client writes into every file that does not say it: as good as an absent key.
INSERTED: Mapping[str, str] = {"reference.placement": "none"}

# Keys that say the same thing as another one, or belong to it: a text of the command line with the first replaces them.
_REPLACED: Mapping[str, Sequence[str]] = {
    "model.base": ("model.source",),
    "model.source": ("model.base", "model.revision"),
    "evaluation.seeds": ("evaluation.instances",),
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
        notices: what has no effect of the file's own form.
    """

    values: dict[str, Any]
    written: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    inserted: dict[str, str] = field(default_factory=dict)
    notices: list[Problem] = field(default_factory=list)

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


def take_hosted_only(flat: Flat) -> None:
    """Check the keys of `HOSTED_ONLY`, and take them out of the values, which are spelled and have all overrides."""
    for key in HOSTED_ONLY:
        above, _, name = key.rpartition(".")
        holder = look_up(flat.values, above)
        if isinstance(holder, dict) and name in holder:
            value = holder.pop(name)
            if key in _ONE_VALUE:
                _check_one_value(flat, key, value)
            elif key in _OF_ITS_SERVER:
                _check_server(flat, key, value)
            else:
                _TAKE[name](flat, key, value, holder)


def _check_one_value(flat: Flat, key: str, value: Any) -> None:
    expected, reason = _ONE_VALUE[key]
    if type(value) is not type(expected) or _lower(value) != expected:
        flat.problems.append(Problem(key, f"expected {show(expected)}{reason}, got {show(value)}"))


def _check_server(flat: Flat, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        flat.problems.append(Problem(key, f"expected a number > 0, got {show(value)}"))
    elif value != _OF_ITS_SERVER[key]:
        text = "has no effect: Ray reaches the reference, and says if it is lost"
        flat.notices.append(Problem(key, text))


def _check_method(flat: Flat, key: str, value: Any, _: dict[str, Any]) -> None:
    if _lower(value) not in _METHODS:
        flat.problems.append(Problem(key, f"expected {' or '.join(map(show, _METHODS))}, got {show(value)}"))
        return
    episodes, size = (look_up(flat.values, name) for name in ("rollout.episodes_per_batch", "training.batch_size"))
    is_one_step = episodes == size is not None and look_up(flat.values, "training.update_epochs", 1) == 1
    if _lower(value) == "ppo" and is_one_step:
        text = (
            '"ppo" says that the clip acts, but each batch is used for one optimizer step, in which the ratio is 1: '
            'lower training.batch_size, raise training.update_epochs, or set "policy_gradient"'
        )
        flat.problems.append(Problem(key, text))


def _check_judge(flat: Flat, key: str, value: Any, _: dict[str, Any]) -> None:
    if _lower(value) != "synth":
        text = f'expected "synth", got {show(value)}: remove it, for a model or a function is what judge.options says'
        flat.problems.append(Problem(key, text))
    elif look_up(flat.values, "services.judge_url") is None:
        text = (
            '"synth" needs services.judge_url, where that judge answers; for a model behind an OpenAI-compatible '
            "endpoint leave this out"
        )
        flat.problems.append(Problem(key, text))


def _take_ops(flat: Flat, key: str, ops: Any, rollout: dict[str, Any]) -> None:
    max_turns = rollout.get("max_turns")
    if not isinstance(ops, list) or not ops or _lower(ops) != ["agent", "env"] * (len(ops) // 2):
        text = f'expected "agent" and "env" in turns, "agent" first, got {show(ops)}'
        flat.problems.append(Problem(key, text))
    elif (num_pairs := len(ops) // 2) > 1:  # one pair is repeated max_turns times
        if isinstance(max_turns, int) and max_turns < num_pairs:
            text = f"expected at most rollout.max_turns = {max_turns} pairs, got {num_pairs}"
            flat.problems.append(Problem(key, text))
        rollout["max_turns"] = num_pairs


def _take_instances(flat: Flat, key: str, value: Any, evaluation: dict[str, Any]) -> None:
    if (num := _count(flat, key, value)) is None:
        return
    seeds = evaluation.setdefault("seeds", f"0:{num}")
    try:
        known_seeds = parse_seeds(seeds)
    except (ConfigError, TypeError, ValueError):
        return  # reported at evaluation.seeds
    if (num_seeds := len(known_seeds)) == num:
        return
    if num < num_seeds:
        evaluation["seeds"] = list(known_seeds[:num])
    consequence = f"the first {num} are played" if num < num_seeds else f"each of these {num_seeds} is played once"
    text = f"{num}, but evaluation.seeds has {num_seeds} seeds: {consequence}"
    flat.notices.append(Problem(key, text))


def _merge_batches(flat: Flat, key: str, value: Any, rollout: dict[str, Any]) -> None:
    if (num := _count(flat, key, value)) is not None:
        _multiply(flat, "rollout.episodes_per_batch", rollout, num, key)


def _bound_accumulation(flat: Flat, key: str, value: Any, training: dict[str, Any]) -> None:
    if (most := _count(flat, key, value)) is None:
        return
    num_steps, size = training.get("gradient_accumulation_steps"), training.get("batch_size")
    episodes = look_up(flat.values, "rollout.episodes_per_batch")
    if num_steps is None and isinstance(episodes, int) and isinstance(size, int) and size > 0:
        num_batches = episodes // size
        training["gradient_accumulation_steps"] = max(
            (num for num in range(1, min(most, num_batches) + 1) if num_batches % num == 0), default=1
        )
    elif isinstance(num_steps, int) and num_steps > most:
        training["gradient_accumulation_steps"] = most
        text = f"training.gradient_accumulation_steps = {num_steps} is cut to {most}"
        flat.notices.append(Problem(key, text))


def _accumulate(flat: Flat, key: str, value: Any, training: dict[str, Any]) -> None:
    if (num := _count(flat, key, value)) is not None:
        _multiply(flat, "training.batch_size", training, num, key)


def _count(flat: Flat, key: str, value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    flat.problems.append(Problem(key, f"expected an integer > 0, got {show(value)}"))
    return None


def _multiply(flat: Flat, target: str, holder: dict[str, Any], factor: int, key: str) -> None:
    name = target.rpartition(".")[2]
    if factor > 1 and isinstance(holder.get(name), int):  # another type is reported there
        holder[name] *= factor
        flat.written[target] = f"{flat.name(target)} x {key}"


def _lower(value: Any) -> Any:
    if isinstance(value, list):
        return [_lower(entry) for entry in value]
    return value.lower() if isinstance(value, str) else value


def _switch_step_rewards(flat: Flat, key: str, is_on: Any, training: dict[str, Any]) -> None:
    mode = training.get("step_rewards_mode")
    if not isinstance(is_on, bool):
        flat.problems.append(Problem(key, f"expected true or false, got {show(is_on)}"))
    elif is_on and mode in (None, "off"):
        text = 'true demands training.step_rewards_mode "decision_stepwise" or "env_sparse", got '
        flat.problems.append(Problem(key, text + show(mode)))
    elif not is_on:  # the switch wins, as in the hosted trainer
        if mode not in (None, "off"):
            text = f"false switches step rewards off, so that training.step_rewards_mode = {show(mode)} has no effect"
            flat.notices.append(Problem(key, text))
        training["step_rewards_mode"] = "off"


# What becomes of the others, by the key's name: (flat form, key, value, the table that held it) -> None.
_TAKE: Mapping[str, Callable[[Flat, str, Any, dict[str, Any]], None]] = {
    "type": _check_judge,
    "step_rewards_enabled": _switch_step_rewards,
    "instances": _take_instances,
    "ops": _take_ops,
    "batches_per_step": _merge_batches,
    "max_accumulated_minibatch": _bound_accumulation,
    "gradient_accumulation_steps": _accumulate,
    "method": _check_method,
}


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
