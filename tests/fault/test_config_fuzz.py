"""Spoilt configurations: each is a valid run plan with nothing lost, or a ConfigError that names its key."""

from __future__ import annotations

import copy
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tomli_w
import yaml
from nightly_seed import FIRST_SEED

from gspo_gym.config.nested import flatten, nested_names
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.services import missing_machinery
from gspo_gym.config.words import HINTS
from gspo_gym.errors import ConfigError

ROOT = Path(__file__).parents[2]
NUM_CONFIGS = 400
NUM_PARTS = 4  # so that one failure does not hide the others, and parts can run side by side
LINE = re.compile(r"(?P<source>command line|/\S+): (?P<key>[^:]+): .+")
LEAVES = leaf_keys()
FREE = ("env_config", "chat_template_kwargs", "rubric_overrides", "step_rewards_weights", "step_rewards_k_limits")
JUNK: list[Any] = ["text", "", -1, 0, 1, 2.5, 10**12, -0.0, True, False, [], [1, "x"], {}, {"a": {"b": 1}}, 1e-300]

Rng = np.random.Generator
Values = dict[str, Any]


class Spoilt(NamedTuple):
    """What a mutation did: the dotted key as it is written, and whether it is wrong whatever else is said."""

    key: str
    is_surely_wrong: bool


def bases() -> list[Values]:
    values = [tomllib.loads(path.read_text()) for path in sorted((ROOT / "configs").rglob("*.toml"))]
    return [*values, *(as_nested(each) for each in values)]


def as_nested(flat: Values) -> Values:
    """The same configuration in the nested form."""
    values = copy.deepcopy(flat)
    for nested, target in nested_names().items():
        *above, name = target.split(".")
        table = look_up(values, above)
        if isinstance(table, dict) and name in table:
            put(values, nested, table.pop(name))
    return values


def look_up(values: Any, path: list[str]) -> Any:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def put(values: Values, key: str, value: Any) -> None:
    *above, name = key.split(".")
    for part in above:
        if not isinstance(values.setdefault(part, {}), dict):
            values[part] = {}
        values = values[part]
    values[name] = value


def keys_of(values: Values, prefix: str = "") -> Iterator[str]:
    """The dotted keys of values that are not tables; what is inside a free table is its own affair."""
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            yield from keys_of(value, f"{prefix}{name}.")
        elif name not in FREE:
            yield f"{prefix}{name}"


def pick(rng: Rng, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


# --- mutations --------------------------------------------------------------------------------------------------------


def misspell(values: Values, rng: Rng) -> Spoilt:
    key = pick(rng, [k for k in keys_of(values) if "." in k])
    *above, name = key.split(".")
    table = look_up(values, above)
    at = int(rng.integers(len(name)))
    slip = pick(rng, [f"{name[:at]}q{name[at:]}", f"{name}_x", name.upper() + "_", f"x{name}"])
    table[slip] = table.pop(name)
    return Spoilt(".".join([*above, slip]), is_surely_wrong=True)


def give_junk(values: Values, rng: Rng) -> Spoilt:
    key = pick(rng, list(keys_of(values)))
    put(values, key, copy.deepcopy(pick(rng, JUNK)))
    return Spoilt(key, is_surely_wrong=False)


def give_another_type(values: Values, rng: Rng) -> Spoilt:
    key = pick(rng, [k for k in keys_of(values) if "." in k and not k.startswith(("env.", "evaluation.seeds"))])
    put(values, key, {"no": {"such": ["type"]}})
    return Spoilt(key, is_surely_wrong=True)


def use_a_foreign_name(values: Values, rng: Rng) -> Spoilt:
    section = pick(rng, ["training", "loss", "rollout", "advantages", "optimizer", "model"])
    key = f"{section}.{pick(rng, list(HINTS))}"
    put(values, key, copy.deepcopy(pick(rng, [8, 0.2, True, "sequence", [0.8, 1.2]])))
    return Spoilt(key, is_surely_wrong=True)


def remove(values: Values, rng: Rng) -> Spoilt:
    key = pick(rng, list(keys_of(values)))
    *above, name = key.split(".")
    del look_up(values, above)[name]
    return Spoilt(key, is_surely_wrong=False)


def remove_a_section(values: Values, rng: Rng) -> Spoilt:
    name = pick(rng, list(values))
    del values[name]
    return Spoilt(name, is_surely_wrong=False)


def flatten_a_section(values: Values, rng: Rng) -> Spoilt:
    name = pick(rng, list(values))
    values[name] = pick(rng, [5, "text", [1], True])
    return Spoilt(name, is_surely_wrong=True)


def invent_a_section(values: Values, rng: Rng) -> Spoilt:
    name = pick(rng, ["trainig", "policies", "gpu", "sampling", "x"])
    values[name] = {"a": 1}
    return Spoilt(name, is_surely_wrong=True)


def set_any_key(values: Values, rng: Rng) -> Spoilt:
    """A key of ours with a value that another key may not like."""
    key = pick(rng, LEAVES)
    words = [
        "shared",
        "dedicated",
        "none",
        "token",
        "turn",
        "grpo",
        "dapo",
        "mask",
        "qlora",
        "cosine",
        "running",
        "off",
    ]
    put(values, key, copy.deepcopy(pick(rng, [1, 2, 3, 7, 64, 0.05, 0.5, True, False, "batch", "drop", *words])))
    return Spoilt(key, is_surely_wrong=False)


def nudge(values: Values, rng: Rng) -> Spoilt:
    """A number doubled or halved, or a truth value turned round."""
    numbers = [k for k in keys_of(values) if isinstance(look_up(values, k.split(".")), int | float)]
    if not numbers:
        return give_junk(values, rng)
    key = pick(rng, numbers)
    value = look_up(values, key.split("."))
    half = value // 2 if isinstance(value, int) else value / 2
    put(values, key, not value if isinstance(value, bool) else pick(rng, [2 * value, half]))
    return Spoilt(key, is_surely_wrong=False)


def say_it_twice(values: Values, rng: Rng) -> Spoilt:
    nested, flat = pick(rng, list(nested_names().items()))
    here = look_up(values, flat.split("."))
    put(values, nested, "another" if here is None else here)
    put(values, flat, "one" if here is None else here)
    return Spoilt(nested, is_surely_wrong=False)


def hide_a_secret(values: Values, rng: Rng) -> Spoilt:
    key = pick(rng, ["services.api_key", "tracking.wandb_api_key", "rollout.env_config.api_key", "judge.password"])
    put(values, key, "s3cr3t-s3cr3t")
    return Spoilt(key, is_surely_wrong=True)


MUTATIONS: list[Callable[[Values, Rng], Spoilt]] = [
    misspell,
    give_junk,
    give_another_type,
    use_a_foreign_name,
    remove,
    remove_a_section,
    flatten_a_section,
    invent_a_section,
    set_any_key,
    set_any_key,
    *[nudge] * 8,
    say_it_twice,
    hide_a_secret,
]


# --- the claim --------------------------------------------------------------------------------------------------------


def read(values: Values, rng: Rng, folder: Path) -> RunConfig:
    """The configuration by way of a file in either format."""
    if rng.random() < 0.5:
        path = folder / "spoilt.toml"
        path.write_text(tomli_w.dumps(values), encoding="utf-8")
    else:
        path = folder / "spoilt.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load_config(path)


def require_plan(config: RunConfig, values: Values) -> None:
    """A valid configuration is a plan, reads back, and has every value that was given."""
    assert config.size.num_iterations * config.size.steps_per_iteration == config.size.num_optimizer_steps > 0
    assert config.size.groups_per_iteration * config.training.group_size == config.rollout.episodes_per_batch
    assert len(config.evaluation_seeds) > 0
    assert config.training_limits.max_turns <= config.episode_limits.max_turns
    assert config.step_reward_settings.mode in (config.training.step_rewards_mode, "off", "env_sparse")
    missing_machinery(config.sections)
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config
    resolved = config.model_dump(mode="json")
    for key, value in ((k, look_up(flatten(values).values, k.split("."))) for k in keys_of(flatten(values).values)):
        kept = look_up(resolved, key.split("."))
        if key.startswith("services.") and isinstance(value, str):
            value = value.rstrip("/")
        if key == "training.lora.target_modules" and value == ["all-linear"]:
            value = "all-linear"
        if key.endswith(".panel"):  # tables, of which the resolved ones have all keys
            kept = [{name: table[name] for name in given} for table, given in zip(kept, value, strict=True)]
        assert kept == value, f"{key} = {value!r} was lost: {kept!r}"


def require_names(error: ConfigError, spoilt: list[Spoilt]) -> None:
    """Every line has a source and a key; what is surely wrong is named, under its key or under a table around it."""
    lines = str(error).splitlines()
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
        lines = [line.removeprefix("  ") for line in lines[1:]]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    named = [match["key"] for match in matches if match]
    for each in spoilt:
        if each.is_surely_wrong:
            assert any(each.key == key or each.key.startswith(f"{key}.") for key in named), (each, lines)
    assert "s3cr3t" not in str(error)


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_spoilt_configuration_is_a_plan_or_an_error_that_names_its_key(part: int, tmp_path: Path) -> None:
    check_spoilt(20_250_718, range(part, NUM_CONFIGS, NUM_PARTS), tmp_path)


@pytest.mark.nightly
def test_every_new_spoilt_configuration_is_a_plan_or_an_error_that_names_its_key(tmp_path: Path) -> None:
    check_spoilt(FIRST_SEED, range(10 * NUM_CONFIGS), tmp_path)


def check_spoilt(seed: int, numbers: range, folder: Path) -> None:
    originals = bases()
    counts: Counter[str] = Counter()
    for number in numbers:
        rng = np.random.default_rng([seed, number])
        values = copy.deepcopy(pick(rng, originals))
        num_mutations = int(rng.integers(1, 4))
        spoilt: list[Spoilt] = []
        for _ in range(num_mutations):
            if any(isinstance(section, dict) and section for section in values.values()):
                spoilt.append(pick(rng, MUTATIONS)(values, rng))
        where = f"seed {seed}, configuration {number}: {spoilt}"
        try:
            config = read(values, rng, folder)
        except ConfigError as error:
            counts["refused"] += 1
            counts["problems"] += max(1, len(str(error).splitlines()) - 1)
            require_names(error, spoilt if num_mutations == 1 else [])
        else:
            counts["valid"] += 1
            assert not (num_mutations == 1 and any(each.is_surely_wrong for each in spoilt)), where
            require_plan(config, values)
    print(f"seed {seed}, {numbers}: {dict(counts)}")
    assert counts["valid"] + counts["refused"] == len(numbers)
    assert counts["valid"] > len(numbers) / 8
