"""The hosted trainer's nested form means the same as the flat one, and its errors name keys as they are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gspo_gym.config.nested import HOSTED_ONLY, POLICY_CONFIG, flatten, nested_names
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError

FLAT: dict[str, Any] = {
    "algorithm": {"type": "online", "method": "policy_gradient", "variety": "gspo"},
    "services": {"task_url": "https://crafter.example.com", "judge_url": "https://judge.example.com/api"},
    "compute": {"gpu_type": "H200", "gpu_count": 4, "nodes": 1},
    "topology": {
        "type": "single_node_split",
        "gpus_for_vllm": 2,
        "gpus_for_training": 1,
        "gpus_for_ref": 1,
        "tensor_parallel": 2,
    },
    "vllm": {"tensor_parallel_size": 2, "max_model_len": 8192},
    "reference": {"placement": "dedicated", "port": 8002, "tp": 1},
    "loss": {"kl_coef": 0.01},
    "model": {"base": "Qwen/Qwen3-4B", "trainer_mode": "lora", "label": "crafter"},
    "rollout": {
        "env_name": "crafter",
        "policy_name": "crafter-react",
        "max_turns": 10,
        "max_output_tokens": 512,
        "temperature": 0.6,
        "episodes_per_batch": 4,
        "max_concurrent_rollouts": 8,
    },
    "evaluation": {"instances": 2, "every_n_iters": 10, "seeds": [0, 1]},
    "training": {
        "num_epochs": 1,
        "iterations_per_epoch": 10,
        "max_turns": 10,
        "batch_size": 4,
        "group_size": 4,
        "learning_rate": 5e-5,
        "step_rewards_enabled": True,
        "step_rewards_mode": "decision_stepwise",
        "step_rewards_indicator_lambda": 1.0,
        "step_rewards_strategy": "consistent",
        "event_rewards_kind": "unique",
        "lora": {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj"]},
    },
    "judge": {
        "enabled": True,
        "type": "synth",
        "timeout_s": 45,
        "reward_blend": {"env": 0.3, "event": 0.3, "outcome": 0.4},
        "options": {"event": True, "outcome": True, "provider": "openai", "model": "some-120b"},
    },
}


def nested() -> dict[str, Any]:
    """The same in the nested form."""
    values = copy.deepcopy(FLAT)
    model, rollout, training, judge = (values[name] for name in ("model", "rollout", "training", "judge"))
    values["policy"] = {
        "model_name": model["base"],
        "trainer_mode": model["trainer_mode"],
        "label": model["label"],
        "temperature": rollout.pop("temperature"),
        "max_tokens": rollout.pop("max_output_tokens"),
    }
    del values["model"]
    values["compute"]["topology"] = {**values.pop("topology"), "reference_placement": "dedicated"}
    del values["reference"]["placement"]
    values["lora"] = training.pop("lora")
    training["rewards"] = {
        name: training.pop(name) for name in list(training) if name.startswith(("step_rewards_", "event_rewards_"))
    }
    judge["options"]["timeout_s"] = judge.pop("timeout_s")
    return values


def test_both_forms_are_the_same_configuration() -> None:
    assert RunConfig.from_dict(nested()) == RunConfig.from_dict(FLAT)


def test_the_forms_may_be_mixed() -> None:
    mixed = nested()
    mixed["model"] = {"base": mixed["policy"].pop("model_name")}
    mixed["training"]["step_rewards_strategy"] = mixed["training"]["rewards"].pop("step_rewards_strategy")
    assert RunConfig.from_dict(mixed) == RunConfig.from_dict(FLAT)


def test_every_nested_name_leads_to_a_key_that_there_is() -> None:
    assert set(nested_names().values()) <= {*leaf_keys(), *HOSTED_ONLY}
    assert set(FLAT["training"]["lora"]) <= {name.removeprefix("lora.") for name in nested_names() if "lora." in name}


def problems(change: Any) -> list[str]:
    values = nested()
    change(values)
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(values, source="test")
    lines = str(caught.value).splitlines()
    return [line.strip().removeprefix("test: ") for line in (lines[1:] if len(lines) > 1 else lines)]


def test_errors_name_keys_as_they_are_written() -> None:
    def spoil(values: dict[str, Any]) -> None:
        values["policy"] |= {"model_name": 7, "temprature": 0.5}
        values["compute"]["topology"]["gpus_for_vllm"] = 0
        values["compute"]["topology"]["gpus"] = 1
        values["training"]["rewards"]["step_rewards_mode"] = "on"
        values["lora"]["r"] = 0
        values["judge"]["options"]["timeout_s"] = -1

    assert problems(spoil) == [
        "policy.temprature: unknown key; did you mean 'temperature'?",
        "compute.topology.gpus: unknown key; known: gpus_for_ref, gpus_for_training, gpus_for_vllm, "
        "group_timeout_seconds, heartbeat_seconds, max_restarts, reference_placement, tensor_parallel, "
        "type",
        "compute.topology.gpus_for_vllm: expected an integer > 0, got 0",
        "policy.model_name: expected a non-empty string, got 7",
        'training.rewards.step_rewards_mode: expected "off", "decision_stepwise" or "env_sparse", got "on"',
        "lora.r: expected an integer > 0, got 0",
        "judge.options.timeout_s: expected a number > 0, got -1",
    ]


def test_a_contradiction_and_a_missing_key_are_named_as_they_are_written() -> None:
    def spoil(values: dict[str, Any]) -> None:
        values["compute"]["topology"]["tensor_parallel"] = 3
        del values["compute"]["topology"]["gpus_for_training"]

    assert problems(spoil) == [
        "compute.topology.gpus_for_training: required, but not given: expected an integer > 0 (processes "
        "that share the learner's model, each on a GPU; more than 1 is refused with type colocated)",
        "compute.topology.tensor_parallel: expected a divisor of topology.gpus_for_vllm = 2, got 3",
        "vllm.tensor_parallel_size: expected topology.tensor_parallel = 3, got 2",
    ]


def test_a_key_in_both_forms_is_an_error_unless_they_agree() -> None:
    assert problems(lambda values: values.update(model={"base": "other"})) == [
        "policy.model_name: is model.base in the flat form, which is given, too: remove one of them"
    ]
    agreeing = nested() | {"model": {"base": "Qwen/Qwen3-4B"}}
    assert RunConfig.from_dict(agreeing) == RunConfig.from_dict(FLAT)


def test_the_reference_that_the_hosted_client_writes_in_yields_to_the_files_own() -> None:
    values = copy.deepcopy(FLAT)
    assert values["reference"]["placement"] == "dedicated"
    values["compute"]["topology"] = {"reference_placement": "none"}  # synth-ai 0.2.24, for want of another
    assert RunConfig.from_dict(values) == RunConfig.from_dict(FLAT)
    without = {
        name: section for name, section in values.items() if name not in ("topology", "vllm", "reference", "loss")
    }
    without["rollout"] = without["rollout"] | {"engine": "local", "max_model_len": 2048}
    config = RunConfig.from_dict(without)
    assert (config.topology, config.reference.placement) == (None, "none")
    contradiction = nested() | {"reference": {**FLAT["reference"], "placement": "none"}}
    with pytest.raises(
        ConfigError, match=r"compute\.topology\.reference_placement: is reference\.placement in the flat"
    ):
        RunConfig.from_dict(contradiction)


@pytest.mark.parametrize("term", ["loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef"])
def test_the_reference_that_the_hosted_client_writes_in_counts_as_absent_beside_a_kl_term(
    term: str, changed: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    section, _, _ = term.partition(".")
    silent = changed({term: 0.1})
    sent = silent | {"compute": {"topology": {"reference_placement": "none"}}}
    config, path = RunConfig.from_dict(sent), tmp_path / "run.toml"
    assert config == RunConfig.from_dict(silent)
    assert config.reference.placement == "shared"  # as a KL term sets it
    own = {notice.key: notice.text for notice in config.notices}
    assert own.pop("compute.topology.reference_placement").endswith('counts as absent: reference.placement is "shared"')
    assert own == {notice.key: notice.text for notice in RunConfig.from_dict(silent).notices}
    path.write_text(tomli_w.dumps(sent | {section: {}}), encoding="utf-8")
    assert load_config(path).reference.placement == "none"
    assert load_config(path, [f"{term}=0.1"]) == config
    refused = 'expected "shared" or "dedicated"'
    with pytest.raises(ConfigError, match=refused):  # no client wrote these
        load_config(path, [f"{term}=0.1", "compute.topology.reference_placement=none"])
    with pytest.raises(ConfigError, match=refused):
        RunConfig.from_dict(sent | {"reference": {"placement": "none"}})


@pytest.mark.parametrize(
    ("section", "in_file", "override", "expected"),
    [
        ("model", {"source": "ft:earlier"}, "model.base=tiny:qwen3-64", {"base": "tiny:qwen3-64", "source": None}),
        ("model", {"source": "ft:earlier"}, "policy.model_name=m", {"base": "m", "source": None}),
        ("model", {"base": "m"}, "model.source=ft:earlier", {"base": None, "source": "ft:earlier"}),
        (
            "model", {"base": "o/m", "revision": "v2"}, "policy.source=ft:earlier",
            {"base": None, "source": "ft:earlier", "revision": None},
        ),
    ],
)  # fmt: skip
def test_a_text_of_the_command_line_goes_over_what_else_the_file_says_of_the_same_thing(
    section: str, in_file: dict[str, Any], override: str, expected: dict[str, Any], tmp_path: Path,
    changed: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:  # fmt: skip
    path = tmp_path / "run.toml"
    values = changed({})
    values[section] = ({"label": "later"} if section == "model" else {}) | in_file
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    config = load_config(path, [override])
    assert {key: attrgetter(f"{section}.{key}")(config) for key in expected} == expected


def test_a_file_itself_still_names_one_origin_of_the_model(
    changed: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(changed({"model.source": "ft:earlier"})), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"contradicts model\.source"):
        load_config(path, ["rollout.max_turns=3"])


@pytest.mark.parametrize("theirs", POLICY_CONFIG)
def test_a_text_of_the_command_line_goes_over_the_files_other_name_for_it(theirs: str, tmp_path: Path) -> None:
    path, ours = tmp_path / "run.toml", POLICY_CONFIG[theirs]
    written, wanted = (0.5, 0.25) if theirs in ("temperature", "top_p") else (5, 3)
    values = copy.deepcopy(FLAT)
    for name in ("temperature", "max_output_tokens"):
        values["rollout"].pop(name)
    names = {
        f"rollout.{ours}": {ours: written},
        f"rollout.policy_config.{theirs}": {"policy_config": {theirs: written}},
    }
    overrides = [f"rollout.{ours}={wanted}", f"rollout.policy_config.{theirs}={wanted}"]
    overrides.append(f"rollout.policy_config={{{theirs} = {wanted}}}")
    more = ['algorithm.acknowledge=["truncated_sampling"]'] if theirs in ("top_p", "top_k") else []
    for in_file in names.values():
        path.write_text(tomli_w.dumps(values | {"rollout": values["rollout"] | in_file}), encoding="utf-8")
        for override in overrides:
            assert getattr(load_config(path, [override, *more]).rollout, ours) == wanted


def test_a_nested_section_that_is_no_table_is_an_error() -> None:
    assert problems(lambda values: values.update(lora=5)) == ["lora: expected a table, got 5"]
    lines = problems(lambda values: values["training"].update(rewards="on"))
    assert lines == ['training.rewards: expected a table, got "on"']


def test_the_input_is_left_as_it_was() -> None:
    values = nested()
    before = copy.deepcopy(values)
    flatten(values)
    assert values == before


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_the_command_line_goes_over_either_form_in_either_form(form: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(FLAT if form == "flat" else nested()), encoding="utf-8")
    by_flat = ["model.base=other", "rollout.temperature=0.9", "training.lora.r=4", "training.step_rewards_beta=0.5"]
    by_nested = ["policy.model_name=other", "policy.temperature=0.9", "lora.r=4"]
    by_nested += ["training.rewards={step_rewards_beta = 0.5}"]
    config = load_config(path, by_flat)
    assert load_config(path, by_nested) == config
    assert (config.model.base, config.rollout.temperature) == ("other", 0.9)
    assert config.training.lora is not None
    assert (config.training.lora.r, config.training.lora.alpha) == (4, 32)
    assert (config.training.step_rewards_beta, config.training.step_rewards_strategy) == (0.5, "consistent")


def test_a_wrong_nested_key_on_the_command_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(FLAT), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^command line: policy\.modle_name: unknown key; did you mean 'model_name'"):
        load_config(path, ["policy.modle_name=x"])
    with pytest.raises(ConfigError, match=r"^command line: training\.lora\.r: expected an integer > 0, got 0"):
        load_config(path, ["lora.r=0"])
