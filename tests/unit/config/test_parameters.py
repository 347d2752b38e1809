"""configs/recipes/PARAMETERS.md is what the table of other trainers' keys says, and every row says what is so."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from foreign_files import IDS, TABLES, file_with

from gspo_gym.cli.config import translate
from gspo_gym.config.foreign.reader import System
from gspo_gym.config.nested import HOSTED_ONLY, flatten, nested_names
from gspo_gym.config.reference import leaf_keys, parameters
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import HINTS, explain, look_up, secret_problem
from gspo_gym.errors import ConfigError

ROOT = Path(__file__).parents[3]
README = (ROOT / "configs" / "recipes" / "README.md").read_text(encoding="utf-8")
HOSTED_FILES = sorted((Path(__file__).parent / "hosted_configs").glob("*.toml"))
Values = dict[str, Any]

# Sections and keys of the hosted trainer's reference.
HOSTED = {
    "algorithm": ("type", "method", "variety"),
    "services": ("task_url", "judge_url"),
    "compute": ("gpu_type", "gpu_count", "nodes"),
    "topology": ("type", "gpus_for_vllm", "gpus_for_training", "gpus_for_ref", "tensor_parallel"),
    "vllm": ("tensor_parallel_size", "max_model_len"),
    "reference": ("placement", "port", "tp", "health_max_wait_s", "health_interval_ms"),
    "model": ("base", "source", "trainer_mode", "label"),
    "rollout": ("env_name", "policy_name", "max_turns", "episodes_per_batch", "max_concurrent_rollouts",
                "batches_per_step", "ops", "env_config", "policy_config"),
    "rollout.policy_config": ("temperature", "top_p", "max_tokens"),
    "evaluation": ("instances", "every_n_iters", "seeds"),
    "training": ("num_epochs", "iterations_per_epoch", "max_turns", "batch_size", "group_size", "learning_rate",
                 "gradient_accumulation_steps", "max_accumulated_minibatch", "log_interval", "weight_sync_interval",
                 "step_rewards_enabled", "step_rewards_mode", "step_rewards_beta", "step_rewards_indicator_lambda",
                 "step_rewards_strategy", "step_rewards_weights", "step_rewards_k_limits", "event_rewards_kind"),
    "training.weight_sync": ("enable", "targets", "mode", "direct", "verify_every_k"),
    "training.lora": ("r", "alpha", "dropout", "target_modules"),
    "judge": ("enabled", "type", "timeout_s"),
    "judge.reward_blend": ("env", "event", "outcome"),
    "judge.options": ("event", "outcome", "provider", "model", "rubric_id", "rubric_overrides", "tracks", "weights",
                      "max_concurrency"),
}  # fmt: skip
HOSTED_KEYS = [f"{section}.{key}" for section, keys in HOSTED.items() for key in keys]

# Keys of ROLL that choose its agentic pipeline, which reads other keys in its own way.
AGENTIC = ("val_env_manager", "custom_envs")

# Values that are tried of any key: texts, numbers, switches and lists, of which one at least is no default.
TRIES = (True, False, 7, 64, 0.5, 1.5, "text", ["up_proj"])
# Of keys that take none of them, or of which they do not show everything.
OWN_TRIES: Mapping[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({"enable_thinking": False},),
    "environment.chat_template_kwargs": ({"enable_thinking": False},),
    "report_to": ("wandb", "tensorboard"),
    "warmup_steps": (5, 0.5),
    "save_strategy": ("no",),
    "max_completion_length": (100,),
    "max_prompt_length": (100,),
    "prompt_length": (100,),
    "vllm_importance_sampling_correction": (False,),
    "dtype": ("bfloat16", "fp16", "bf16", "fp32"),
    "torch_dtype": ("bfloat16",),
    "train_env_manager": ({"group_size": 8},),
    "reward_normalization": ({"method": "mean_std"},),
    "model_config": ({"dtype": "bfloat16"},),
    "clip_coef": ([0.5, 1.5],),
    "lora_config": ({"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"]},),
    "vllm_config": (
        {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5, "sleep_mode": True, "dtype": "bfloat16"},
        {"sleep_mode": False},
    ),
    "cosine_lr_schedule_config": ({"num_epochs": 10, "warmup_proportion": 0.05},),
    "lr_scheduler_kwargs": ({"min_lr_rate": 0.05},),
    "quantization": ("int8", "nf4"),
}


# What a key acts with that its row does not say, such as any key of ROLL's agentic pipeline.
BESIDE: Mapping[str, Values] = {
    "max_new_tokens": {"train_env_manager": {"group_size": 8}},
    "importance_sampling_level": {"name": "GRPO"},
    "fp16": {"bf16": False},
    **{key: {"lora_target_modules": ["q_proj"]} for key in ("lora_r", "lora_alpha", "lora_dropout")},
    **{key: {"report_to": "wandb", "wandb_project": "p"} for key in ("run_name", "wandb_run_name", "wandb_tags")},
}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of sections by their dotted names; a departure that is acknowledged follows from the others."""
    for key, value in values.items():
        if isinstance(value, dict) and prefix + key in ("rollout.policy_config", "training.lora", "training"):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, dict) and not prefix:
            yield from flat(value, f"{key}.")
        elif prefix + key != "algorithm.acknowledge":
            yield prefix + key, value


def tried(command: str, key: str, table: System, beside: Mapping[str, Any]) -> Iterator[tuple[Any, Values, Values]]:
    """A value of their key, our keys that it changes with what they become, and all our keys."""
    without = dict(flat(translate(command, file_with(table, beside)).values))
    for value in (*table.rows[key].values, *OWN_TRIES.get(key, TRIES)):
        try:
            translation = translate(command, file_with(table, {**beside, key: value}))
        except ConfigError:
            continue
        if any("computes in 16 bits only" in line for line in translation.left_out):  # these weights have 32
            continue
        with_it = dict(flat(translation.values))
        names = [name for name in {**without, **with_it} if without.get(name) != with_it.get(name)]
        yield value, {name: with_it.get(name) for name in names}, with_it


def test_the_page_is_current() -> None:
    page = (ROOT / "configs" / "recipes" / "PARAMETERS.md").read_text(encoding="utf-8")
    assert page == parameters(), "run: gspo-gym config parameters > configs/recipes/PARAMETERS.md"


@pytest.mark.parametrize(("command", "table"), TABLES, ids=IDS)
def test_a_translated_key_changes_what_its_row_names_and_nothing_else(command: str, table: System) -> None:
    wrong: dict[str, Any] = {}
    silent = table.draft(file_with(table, {}))
    for key, row in table.rows.items():
        changed: set[str] = set()
        beside = {**row.when, **{name: value for name, value in BESIDE.get(key, {}).items() if name in table.rows}}
        for value, changes, ours in tried(command, key, table, beside):
            changed |= set(changes)
            if value in (None, *row.values):
                expected = row.assigned(value)
            else:
                is_taken = not row.rule and not row.values and row.read in ("any", "number", "count")
                expected = dict.fromkeys(row.ours, value) if is_taken and value not in row.off else {}
            if any(ours.get(name) != meant for name, meant in expected.items()):
                wrong[f"{key} = {value!r}"] = {name: ours.get(name) for name in expected}
        if changed != {*row.ours, *row.also}:
            wrong[key] = changed
        if silent.missing(row) and any(changes for _, changes, _ in tried(command, key, table, {})):
            wrong[f"{key} alone"] = "acts"
    assert wrong == {}


@pytest.mark.parametrize(("command", "table"), TABLES, ids=IDS)
def test_a_key_that_is_left_out_is_left_out_with_that_reason_and_changes_nothing(command: str, table: System) -> None:
    silent = translate(command, file_with(table, {}))
    agentic = translate("roll", {"ratio_type": "token"})
    for key, (default, why) in table.without_counterpart.items():
        translation = translate(command, file_with(table, {key: {"a": 1}}))
        assert translation.left_out == (f"{key} = {{'a': 1}}: {why}",)
        assert translation.values == (agentic if key in AGENTIC else silent).values
        assert translate(command, file_with(table, {key: default})).left_out == ()


def test_a_foreign_name_in_a_file_of_ours_is_an_error_that_says_what_the_table_says(
    problems: Callable[[Values], list[str]],
) -> None:
    given = {f"training.{name}": "text" for name in HINTS if secret_problem(name, "text") is None}
    assert sorted(problems(given)) == sorted(f"{key}: {explain(key, 'text')}" for key in given)


# Keys that another one of the hosted trainer's multiplies.
FACTORS = {
    "rollout.episodes_per_batch": "rollout.batches_per_step",
    "training.batch_size": "training.gradient_accumulation_steps",
}


def test_every_key_of_the_hosted_trainer_is_taken_as_it_is(make: Callable[[Values], RunConfig]) -> None:
    taken: set[str] = set()
    tracks = make({"judge": {"options": {"tracks": ["progress"]}}}).model_dump(mode="json", exclude_unset=True)
    valid = [path for path in HOSTED_FILES if path.stem not in ("crafter_vision_model", "math_any_case")]
    for sections in (tracks, *(tomllib.loads(path.read_text(encoding="utf-8")) for path in valid)):
        config, given = RunConfig.from_dict(sections).model_dump(mode="json"), flatten(sections).values
        for name in HOSTED_KEYS:
            key = nested_names().get(name, name)
            if (value := look_up(given, key)) is not None:
                kept = look_up(config, key)
                if key in FACTORS:
                    value *= look_up(given, FACTORS[key], 1)
                kept = {entry: kept[entry] for entry in value} if key == "rollout.policy_config" else kept
                # a list of one name, "all-linear", is that name
                assert name in HOSTED_ONLY or value in (kept, [kept]), name
                taken.add(name)
    assert set(HOSTED_KEYS) - taken == set()


def test_every_key_and_every_name_of_code_that_the_recipes_pages_name_exists() -> None:
    """PARAMETERS.md, and the hand-written table of what is no key: methods, classes and options."""
    table = README.split("## What is no key")[1].split("## Papers")[0]
    rows = [line.rpartition(" | ")[2] for line in (parameters() + table).splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`([a-z]+(?:\.[a-z_0-9]+)+)`", row)]
    assert len(named) > 150
    assert [name for name in named if not any(f"{key}.".startswith(f"{name}.") for key in leaf_keys())] == []
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "gspo_gym").rglob("*.py"))
    source += (ROOT / "envs" / "__init__.py").read_text(encoding="utf-8")
    code = set(re.findall(r"`([A-Z]\w+|[a-z]+_\w+)(?:\.\w+)?`", table))
    assert len(code) >= 8
    assert [name for name in sorted(code) if not re.search(rf"(?:(?:def|class) |gspo_gym/){name}\b", source)] == []
