"""What `gspo-gym config from-...` believes of other trainers, compared with the packages themselves.

A file that is silent and a file that spells every default out, as the installed package has it, are the same settings.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

import pytest
from foreign_files import file_with

from gspo_gym.cli.config import Wanted, translate
from gspo_gym.config.foreign import agilerl, stateset
from gspo_gym.config.foreign.reader import System
from gspo_gym.config.foreign.trl import TRL
from gspo_gym.config.run_config import RunConfig

WANTED = Wanted(env="GuessNumber", model="tiny:qwen3-64", iterations=10, max_turns=4)


def fields_of(*where: str) -> dict[str, Any]:
    """The defaults of dataclasses, each named as "module:class"; those that are made by a factory are called."""
    found: dict[str, Any] = {}
    for name in where:
        module, _, attribute = name.partition(":")
        for field in dataclasses.fields(getattr(importlib.import_module(module), attribute)):
            if field.default is not dataclasses.MISSING:
                found[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                found[field.name] = field.default_factory()
    return found


@pytest.fixture(scope="module")
def trl() -> dict[str, Any]:
    return fields_of("trl.trainer.grpo_config:GRPOConfig", "trl.trainer.model_config:ModelConfig")


def test_the_packages_are_those_whose_source_was_read() -> None:
    assert {name: version(name) for name in ("trl", "agilerl", "stateset-agents")} == {
        "trl": "1.16.0", "agilerl": "2.58.0", "stateset-agents": "0.69.0",
    }  # fmt: skip


def test_every_default_of_trl_is_the_packages(trl: dict[str, Any]) -> None:
    assert {key: trl[key] for key in TRL.defaults} == TRL.defaults
    ours = {key: default for key, (default, _) in TRL.without_counterpart.items() if key in trl}
    assert len(ours) > 120
    assert {key: trl[key] for key in ours} == ours


def test_every_key_of_trl_is_known_and_its_defaults_change_nothing(trl: dict[str, Any]) -> None:
    silent, spelled = translate("trl", {}, WANTED), translate("trl", trl, WANTED)
    assert spelled.values == silent.values
    assert spelled.left_out == ()


def test_the_arguments_of_trls_scripts_are_known() -> None:
    scripts = fields_of("trl.scripts.utils:ScriptArguments", "trl.scripts.utils:DatasetMixtureConfig")
    assert len(scripts) >= 6
    translation = translate("trl", dict.fromkeys(scripts, "given"), WANTED)
    assert [line for line in translation.left_out if "not a key that is known" in line] == []


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "loss_type": "grpo"},
        {"importance_sampling_level": "sequence", "loss_type": "luspo", "steps_per_generation": 4},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": 4, "beta": 0.04},
        {"loss_type": "dr_grpo", "scale_rewards": False, "generation_batch_size": 64, "num_iterations": 2},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.1, "optim": "adamw_torch", "top_p": 0.9, "entropy_coef": 0.1},
    ],
)
def test_a_translation_says_what_trls_own_object_says(given: dict[str, Any], tmp_path: Path) -> None:
    """TRL resolves its defaults (batches, clips, switches) into an object; ours is made of the same file."""
    from trl.trainer.grpo_config import GRPOConfig

    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    ours = RunConfig.from_dict(translate("trl", given, WANTED).values)
    assert ours.rollout.episodes_per_batch == theirs.generation_batch_size
    assert ours.training.group_size == theirs.num_generations
    assert ours.training.batch_size == theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert ours.training.update_epochs == theirs.num_iterations
    assert (ours.loss.clip_low, ours.loss.clip_high) == (
        theirs.epsilon, theirs.epsilon if theirs.epsilon_high is None else theirs.epsilon_high,
    )  # fmt: skip
    assert ours.loss.kl_coef == theirs.beta
    assert ours.loss.kl_importance_weighted is (theirs.beta > 0 and theirs.use_bias_correction_kl)
    assert ours.loss.entropy_coef == theirs.entropy_coef
    assert ours.rollout.max_output_tokens == theirs.max_completion_length
    assert (ours.rollout.temperature, ours.rollout.top_p) == (theirs.temperature, theirs.top_p)
    assert ours.training.learning_rate == theirs.learning_rate
    assert ours.optimizer.betas == (theirs.adam_beta1, theirs.adam_beta2)
    assert ours.optimizer.schedule == str(theirs.lr_scheduler_type).rpartition(".")[2].lower()
    if theirs.loss_type != "dr_grpo":  # Unsloth's and the paper's form leaves the std out
        assert ours.advantages.scale == theirs.scale_rewards


def signature_of(path: Path, name: str, function: str = "__init__") -> dict[str, Any]:
    """The defaults of a function's arguments, read without running a line of it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == name:
            (found,) = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == function]
            names = [argument.arg for argument in found.args.args]
            defaults = [ast.literal_eval(value) for value in found.args.defaults]
            return dict(zip(names[-len(defaults) :], defaults, strict=True))
    raise AssertionError(f"{path} has no class {name}")


def file_of(package: str, path: str) -> Path:
    return Path(str(distribution(package).locate_file(path)))


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """Every field of a GSPO manifest with its default, under the names of our table."""
    from agilerl.arena.models.algorithms import GSPOSpec
    from agilerl.arena.models.env import LLMEnvSpec
    from agilerl.arena.models.training import TrainingSpec

    keys = {"mutation": None, "replay_buffer": None, "name": "GSPO"}
    for prefix, spec in (("", GSPOSpec), ("training.", TrainingSpec), ("environment.", LLMEnvSpec)):
        for name, field in spec.model_fields.items():
            if not field.is_required():
                keys[prefix + name] = field.get_default(call_default_factory=True)
    return keys


def test_every_default_of_agilerl_is_the_manifests_and_the_constructors(manifest: dict[str, Any]) -> None:
    own = signature_of(file_of("agilerl", "agilerl/algorithms/grpo.py"), "GRPO")
    table = agilerl.AGILERL
    defaults = {key: default for key, (default, _) in table.without_counterpart.items()} | table.defaults
    for source in (manifest, own):
        theirs = {key: list(value) if isinstance(value, tuple) else value for key, value in source.items()}
        shared = [
            key for key in defaults if key in theirs and not key.startswith("environment.e")
        ]  # which is given here
        assert len(shared) > 30
        assert {key: theirs[key] for key in shared} == {key: defaults[key] for key in shared}


def test_every_key_of_an_agilerl_manifest_is_known_and_its_defaults_change_nothing(manifest: dict[str, Any]) -> None:
    table = agilerl.AGILERL
    silent, spelled = (
        translate("agilerl", file_with(table, {}), WANTED),
        translate("agilerl", file_with(table, manifest), WANTED),
    )
    assert len(manifest) > 150
    assert spelled.values == silent.values
    assert spelled.left_out == ()


def test_an_adapter_without_a_word_is_agilerls_own() -> None:
    base = ast.parse(file_of("agilerl", "agilerl/algorithms/core/base.py").read_text(encoding="utf-8"))
    (call,) = [
        {word.arg: ast.literal_eval(word.value) for word in node.keywords}
        for node in ast.walk(base)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LoraConfig" and node.keywords[0].arg == "r"
    ]
    assert {key: call[key] for key in agilerl.OWN_LORA} == agilerl.OWN_LORA
    from agilerl.arena.models.networks import LoraConfigDict, default_colocated_vllm_config

    theirs = LoraConfigDict().model_dump()
    assert {key: theirs["lora_r" if key == "r" else key] for key in agilerl.OWN_LORA} == agilerl.OWN_LORA
    vllm = default_colocated_vllm_config().model_dump()
    assert {key: vllm[key] or 1 for key in agilerl.COLOCATED_VLLM} == agilerl.COLOCATED_VLLM
    of_peft = fields_of("peft:LoraConfig")
    assert {key: of_peft[key] for key in agilerl.PEFT_LORA} == agilerl.PEFT_LORA


def test_what_peft_adapts_of_most_models_is_what_the_translation_writes() -> None:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MODULES

    from gspo_gym.config.foreign.readings import PEFT_MODULES

    for model in ("qwen2", "qwen3", "llama", "mistral", "gemma2"):
        assert tuple(MODULES[model]) == PEFT_MODULES, model


@pytest.fixture(scope="module")
def stateset_agents() -> dict[str, Any]:
    from stateset_agents.training.gspo_config import GSPOConfig

    return dataclasses.asdict(GSPOConfig())


def test_every_default_of_stateset_is_the_packages(stateset_agents: dict[str, Any]) -> None:
    known = stateset.STATESET
    ours = {key: default for key, (default, _) in known.without_counterpart.items()} | known.defaults
    assert {key: stateset_agents[key] for key in ours} == ours


def test_every_key_of_stateset_is_known_and_its_defaults_change_nothing(stateset_agents: dict[str, Any]) -> None:
    silent, spelled = translate("stateset", {}, WANTED), translate("stateset", stateset_agents, WANTED)
    assert len(stateset_agents) == 118
    assert spelled.values == silent.values
    assert spelled.left_out == ()


def other_values(default: Any) -> list[Any]:
    """Values of the same kind that are not the default."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1]
    return [default / 2 or 0.5] if isinstance(default, float) else []


@pytest.mark.parametrize("table", [TRL, agilerl.AGILERL, stateset.STATESET], ids=lambda table: table.source)
def test_a_default_beside_any_other_key_is_as_good_as_silence(
    table: System, trl: dict[str, Any], stateset_agents: dict[str, Any], manifest: dict[str, Any]
) -> None:
    """An object of theirs with one setting of one's own, all its fields written down, is a file with that one key."""
    command, theirs = {
        "TRL": ("trl", trl), "AgileRL": ("agilerl", manifest), "stateset-agents": ("stateset", stateset_agents)
    }[table.name]  # fmt: skip
    pairs = [(key, value) for key, default in theirs.items() for value in other_values(default)]
    assert len(pairs) > 25
    differing = []
    for key, value in pairs:
        silent = translate(command, file_with(table, {key: value}))
        spelled = translate(command, file_with(table, {**theirs, key: value}))
        if (silent.values, silent.left_out) != (spelled.values, spelled.left_out):
            differing.append((key, silent.values, silent.left_out, spelled.values, spelled.left_out))
    assert differing == []


def test_every_key_that_statesets_trainer_says_it_ignores_is_left_out() -> None:
    from stateset_agents.training import gspo_config

    assert set(gspo_config._GSPO_IGNORED_FIELDS) <= set(stateset.STATESET.without_counterpart)


def test_stateset_samples_as_its_entry_point_makes_the_agent_sample() -> None:
    from stateset_agents.training.gspo_config import GSPOConfig
    from stateset_agents.training.gspo_entrypoints import ROLLOUT_SAMPLING_FIELDS

    theirs = {name: getattr(GSPOConfig(), name) for name in ROLLOUT_SAMPLING_FIELDS}
    assert theirs == {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}
    ours = RunConfig.from_dict(translate("stateset", {}, WANTED).values).rollout
    assert {name: getattr(ours, name) for name in theirs} == theirs
