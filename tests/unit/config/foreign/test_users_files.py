"""Files as the other trainers' users write them, ten a system, and what each becomes by its system's documentation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.base.files import read_file
from gspo_gym.cli.config import Wanted, translate
from gspo_gym.config.foreign.reader import Translation
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import look_up
from gspo_gym.errors import ConfigError

FILES = Path(__file__).parent / "files"
GONE = None  # a key of ours that is not set
Q_TO_O = ["q_proj", "k_proj", "v_proj", "o_proj"]
GAME = {"environment.env_type", "environment.entrypoint"}  # of an AgileRL manifest
WORKERS = {"actor_train"}  # how ROLL places them
# A file, what it becomes, and its keys that are left out.
BECOMES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "trl/reasoning_recipe.yaml": (
        {
            "model.base": "Qwen/Qwen2.5-1.5B-Instruct",
            "model.trainer_mode": "full",
            "model.dtype": GONE,  # trained weights stay float32, with which flash attention does not compute
            "model.attn_implementation": GONE,
            "model.label": "Qwen2.5-1.5B-GRPO",
            "rollout.engine": "vllm",
            "vllm.gpu_memory_utilization": 0.7,
            "rollout.episodes_per_batch": 16 * 4,  # one generation for the accumulated steps
            "training.batch_size": 16 * 4,
            "rollout.max_model_len": 512 + 2048,
            "optimizer.schedule": "cosine",
            "optimizer.min_lr_fraction": 0.1,  # min_lr_rate
            "optimizer.warmup_steps": 0.1,
            "rollout.policy_config.system_prompt": "Think first, then answer in \\boxed{}.",
            "training.checkpoint_every_n_iters": GONE,
            "tracking.report_to": ["wandb"],
        },
        {
            "attn_implementation",
            "dataset_name",
            "reward_funcs",
            "log_level",
            "gradient_checkpointing_kwargs",
            "save_strategy",
        },
    ),
    "trl/gspo_paper.yaml": (
        {
            "algorithm.variety": "gspo",
            "algorithm.acknowledge": GONE,
            "loss.clip_low": 3e-4,
            "loss.clip_high": 4e-4,
            "loss.aggregation": "grpo",
            "rollout.episodes_per_batch": 8 * 4,
            "training.iterations_per_epoch": 400 // 4,  # four optimizer steps a batch
            "training.learning_rate": 1e-6,
        },
        set(),
    ),
    "trl/lora.yaml": (
        {
            "model.trainer_mode": "lora",
            "model.dtype": "bfloat16",  # torch_dtype
            "training.lora": {"r": 32, "alpha": 64.0, "dropout": 0.0, "target_modules": Q_TO_O},
            "optimizer.kind": "paged_adamw_8bit",
            "optimizer.schedule": "constant",
            "optimizer.warmup_steps": 20,
            "rollout.episodes_per_batch": 32,
        },
        {"use_rslora"},
    ),
    "trl/qlora.json": (
        {
            "model.trainer_mode": "qlora",
            "model.quantization": "int8",
            "training.lora.target_modules": "all-linear",
            "training.batch_size": 2 * 8,
            "advantages.scale": "batch",
            "optimizer.schedule": GONE,
        },
        {"lr_scheduler_type", "lr_scheduler_kwargs.power"},
    ),
    "trl/tools.toml": (
        {
            "rollout.max_turns": 6 + 1,
            "rollout.policy_config.chat_template_kwargs": {"enable_thinking": False},
            "rollout.top_p": 0.95,
            "rollout.min_p": 0.02,
            "rewards.overlong": "mask",
            "algorithm.acknowledge": ["truncated_sampling"],
            "run.log_episodes_every_n_iters": 1,
        },
        {"num_completions_to_print"},
    ),
    "trl/vllm_server.yaml": (
        {
            "rollout.max_model_len": 8192,
            "correction": {"level": "token", "mode": "truncate", "high": 2.0},
            "algorithm.variety": "gspo_token",
            "rollout.engine": "vllm",
            "vllm": GONE,
        },
        {"vllm_server_host", "vllm_server_port", "vllm_server_timeout"},
    ),
    "trl/unsloth_notebook.json": (
        {
            "loss": {"aggregation": "dr_grpo", "norm_length": 768, "clip_low": 0.2, "clip_high": 0.2},
            "advantages.scale": "none",
            "optimizer.kind": "adamw_8bit",
            "optimizer.betas": [0.9, 0.99],
            "training.iterations_per_epoch": 250,  # one optimizer step a batch of 1 x 4
            "training.num_epochs": GONE,
            "tracking.report_to": GONE,
        },
        set(),
    ),
    "trl/best_checkpoint.yaml": (
        {
            "training.keep_best": 1,
            "training.keep_last": 3 - 1,
            "evaluation.every_n_iters": 50,
            "training.checkpoint_every_n_iters": 50,
        },
        {"eval_strategy", "greater_is_better", "metric_for_best_model", "push_to_hub", "hub_model_id"},
    ),
    "trl/moving_reference.yaml": (
        {
            "loss.kl_coef": 0.04,
            "loss.kl_importance_weighted": GONE,
            "reference": {"source": "copy", "update_every_n_iters": 64},
            "training.update_epochs": 2,
            "optimizer.min_lr_fraction": 1e-7 / 1e-6,  # min_lr
        },
        set(),
    ),
    "trl/eight_devices.yaml": (
        {
            "training.batch_size": 4 * 8 * 2,
            "rollout.episodes_per_batch": 4 * 8 * 8,
            "training.group_size": 16,
            "loss.aggregation": "dapo",
            "loss.surrogate": "cispo",
            "loss.clip_low": GONE,
            "loss.clip_high": 4.0,  # epsilon_high is the cap itself there
            "loss.entropy_coef": 0.001,
            "model.liger_kernels": True,
        },
        {"deepspeed", "vllm_device"},
    ),
    "roll/gspo_example.yaml": (
        {
            "algorithm.variety": "gspo",
            "loss.unit": "trajectory",
            "loss.aggregation": "seq-mean-token-mean",
            "loss.kl_coef": 0.001,
            "loss.dual_clip": 1 + 2 * 0.2,
            "rollout.episodes_per_batch": 64 * 8,
            "training.batch_size": 16 // 2 * 32,  # devices of which two share a model, one episode each, 32 times
            "rollout.max_output_tokens": 4096,
            "rollout.max_model_len": 2048 + 4096,
            "rollout.temperature": 0.99,
            "rollout.top_k": 100,
            "rewards.clip": 10.0,
            "advantages": {"baseline": "none", "scale": "none", "whiten": "tokens", "clip": 2.0},
            "model.base": "Qwen/Qwen2.5-7B",
            "optimizer.warmup_steps": 20,
        },
        {
            "hydra",
            "checkpoint_config",
            "track_with",
            "num_gpus_per_node",
            "reward_pretrain",
            "validation",
            "num_train_epochs",
            "rewards",
        }
        | WORKERS,
    ),
    "roll/agentic_sokoban.yaml": (
        {
            "rollout.episodes_per_batch": 1024,  # episodes, not prompts
            "training.group_size": 8,
            "training.batch_size": 2 * 8 * 64,
            "rollout.max_output_tokens": 128,  # of a turn
            "rollout.max_model_len": 8192,
            "advantages": {"baseline": "group", "scale": "group", "whiten": "tokens", "clip": 0.2},
            "optimizer.schedule": "cosine",
            "model.attn_implementation": GONE,
        },
        {
            "defaults",
            "val_batch_size",
            "custom_envs",
            "attn_implementation",
            "train_env_manager.format_penalty",
            "train_env_manager.num_env_groups",
            "train_env_manager.tags",
        }
        | WORKERS,
    ),
    "roll/agentic_environment_sampling.yaml": (
        {
            "rollout.max_output_tokens": 512,  # ${max_tokens_per_step}, of train_env_manager.generating_args
            "rollout.temperature": 1.0,
            "rollout.top_p": GONE,
            "rollout.top_k": GONE,
            "algorithm.acknowledge": GONE,
            "loss.unit": "turn",
            "loss.clip_low": 3e-4,
            "training.group_size": 4,
            "advantages": {"baseline": "batch", "scale": "batch"},
        },
        set(),
    ),
    "roll/lora.yaml": (
        {
            "model.trainer_mode": "lora",
            "model.dtype": "bfloat16",
            "model.gradient_checkpointing": GONE,
            "training.lora": {
                "r": 32,
                "alpha": 32.0,
                "dropout": 0.0,
                "target_modules": ["o_proj", "q_proj", "k_proj", "v_proj"],
            },
            "training.batch_size": 4 * 64,
            "advantages": {"baseline": "group", "scale": "group", "clip": 10.0},
            "rewards.clip": GONE,
        },
        WORKERS,
    ),
    "roll/ppo.yaml": (
        {"advantages.baseline": "none", "loss.entropy_coef": 0.01, "rollout.episodes_per_batch": 128 * 2},
        {"gamma", "lambd", "value_clip", "critic_warmup", "critic"},
    ),
    "roll/reinforce_plus_plus.yaml": (
        {
            "advantages": {"baseline": "batch", "scale": "batch", "whiten": "tokens"},
            "rewards": {"kl_coef": 0.01, "kl_target": 0.1, "overlong": "mask"},
            "loss.clip_low": 0.2,
            "loss.clip_high": 0.28,
            "loss.norm_length": 1024 + 1024,
            "training.keep_last": 2,
        },
        {"kl_horizon"},
    ),
    "roll/steps.yaml": (
        {
            "advantages": {"baseline": "none", "scale": "none", "level": "turn", "discount": 0.9},
            "evaluation.every_n_iters": GONE,
            "training.group_size": 2,
        },
        {"batch_adjust_mode", "eval_steps", "stop_strings"},
    ),
    "roll/gigpo.yaml": (
        {
            "advantages": {"baseline": "group", "scale": "none"},
            "training.batch_size": 16 * (4 + 4) * 8,
            "optimizer.schedule": GONE,
        },
        {"adv_estimator", "step_reward_weight", "lr_scheduler_type"} | WORKERS,
    ),
    "roll/environment_variables.yaml": (
        {
            "model.base": "given",
            "model.label": "lora-7",
            "run.seed": 7,  # the pipeline's, not the worker's
            "training.iterations_per_epoch": 20,
            "optimizer.schedule": "constant",
        },
        {"pretrain", "output_dir", "track_with", "tracker_kwargs"},
    ),
    "roll/page.toml": (
        {
            "advantages": {"baseline": "group", "scale": "none"},
            "training.batch_size": 16 * 8,
            "loss.unit": "trajectory",
        },
        {"use_topr_loss"},
    ),
    "agilerl/gspo_manifest.yaml": (
        {
            "algorithm.variety": "gspo",
            "loss": {
                "aggregation": "token-mean",
                "clip_low": 0.2,
                "clip_high": 0.2,
                "kl_coef": 0.0005,
                "kl_importance_weighted": True,
            },
            "rollout.episodes_per_batch": 16 * 4,  # batch_size counts prompts
            "training.batch_size": 16,
            "training.lora": {"r": 16, "alpha": 64.0, "dropout": 0.05, "target_modules": Q_TO_O},
            "vllm": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.85, "sleep_while_learning": True},
            "correction": {"level": "token", "mode": "truncate", "high": 2.0, "off_policy_threshold": 0.03},
            "evaluation.every_n_iters": 10,
            "rollout.top_p": GONE,
            "rollout.top_k": 50,
            "advantages.scale": "none",
        },
        GAME | {"environment.factory", "environment.max_reward", "vllm_config.max_num_seqs"},
    ),
    "agilerl/smallest_manifest.json": (
        {
            "rollout.max_model_len": 4096,
            "training.batch_size": 16 * 8,
            "vllm": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "sleep_while_learning": True},
            "training.lora.alpha": 32.0,
        },
        {"environment.entrypoint"},
    ),
    "agilerl/grpo_turns.yaml": (
        {
            "algorithm.variety": "gspo_token",
            "loss": {"unit": "turn", "aggregation": "seq-mean-token-mean", "clip_low": 4e-4, "clip_high": 4e-4},
            "advantages": {"baseline": "group", "scale": "group", "level": "turn"},
            "correction": GONE,
            "reference": GONE,
            "rollout.max_turns": 12,
        },
        GAME,
    ),
    "agilerl/cispo_quantized.yaml": (
        {
            "algorithm.variety": "grpo",
            "loss.surrogate": "cispo",
            "loss.clip_low": GONE,
            "loss.clip_high": 0.2,
            "model.trainer_mode": "qlora",
            "training.lora": {"r": 2, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"},
            "loss.aggregation": "seq-mean-token-mean",
            "advantages.filter_eps": 0.0,
            "advantages.level": GONE,
            "rollout.episodes_per_batch": 2 * 5,
        },
        GAME | {"use_sequence_packing", "attn_implementation", "chunk_rows", "training.max_wall_seconds"},
    ),
    "agilerl/async.yaml": (
        {
            "rollout.episodes_per_batch": 16 * 8,  # rollout_batch_size counts groups
            "training.batch_size": 8 * 4,  # of each of the four trainers
            "correction": {"old_logprobs": "rollout", "off_policy_threshold": 0.03},
            "reference.source": "base",
            "loss.kl_clamp": 1e6,
        },
        {"environment.entrypoint", "training.rollout_mode", "training.rollout_engines_per_agent", "replay_buffer"},
    ),
    "agilerl/population.toml": (
        {
            "advantages": {
                "baseline": "group",
                "scale": "none",
                "whiten": "trajectories",
                "clip": 3.0,
                "kl_shaping_coef": 0.001,
            },
            "loss.kl_coef": GONE,
        },
        {"environment.entrypoint", "mutation", "training.pop_size", "training.hpo", "training.evo_steps"},
    ),
    "agilerl/schedule.yaml": (
        {
            "optimizer.schedule": "cosine",
            "optimizer.min_lr_fraction": 0.1,  # its default
            "optimizer.warmup_steps": 0.05,
            "correction.old_logprobs": "rollout",
            "correction.level": GONE,
            "training.batch_size": 8,
            "model.gradient_checkpointing": GONE,
            "rollout.policy_config.chat_template_kwargs": {"enable_thinking": False},
        },
        {"environment.entrypoint"},
    ),
    "agilerl/init_hp.yaml": (
        {
            "training.batch_size": 4,
            "training.group_size": 16,
            "rollout.episodes_per_batch": 16,  # the least that both divide
            "training.lora": {"r": 16, "alpha": 64.0, "dropout": 0.05, "target_modules": Q_TO_O},
            "advantages.kl_shaping_coef": 1e-3,
            "rollout.engine": "vllm",
            "loss.kl_coef": GONE,
        },
        {"tourn_size", "pop_size", "mutation_params"},
    ),
    "agilerl/constructor.json": (
        {
            "loss.clip_low": 3e-4,
            "loss.clip_high": 4e-4,
            "rollout.episodes_per_batch": 10 * 8,
            "training.batch_size": 16,
            "training.lora": {"r": 8, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"},  # peft's dropout
            "rollout.top_k": GONE,
        },
        {"reduce_memory_peak"},
    ),
    "agilerl/grpo_2_7.toml": (
        {
            "algorithm.variety": "grpo",
            "model.base": "Qwen/Qwen2.5-0.5B",
            "advantages.filter_eps": 0.05,
            "advantages.scale": "group",
            "optimizer.min_lr_fraction": 0.0,
            "rollout.top_p": 0.95,
        },
        {"separate_reference"},
    ),
    "stateset/guide.json": (
        {
            "rollout.episodes_per_batch": 32 * 4,
            "training.batch_size": 32 * 4,
            "training.lora.target_modules": Q_TO_O,
            "training.iterations_per_epoch": 50,
            "rollout.max_model_len": 512 + 256,
            "rollout.top_k": 50,
            "rollout.repetition_penalty": 1.1,
            "tracking": {"report_to": ["wandb"], "wandb_project": "support-agent"},
            "model.label": "gspo",
        },
        set(),
    ),
    "stateset/token_level.yaml": (
        {
            "algorithm.variety": "gspo_token",
            "algorithm.acknowledge": GONE,
            "advantages.level": "turn",
            "training.update_epochs": 4,
            "rollout.top_p": GONE,
        },
        set(),
    ),
    "stateset/qlora.toml": (
        {
            "model.trainer_mode": "qlora",
            "model.dtype": "bfloat16",
            "training.lora": {"r": 64, "alpha": 16.0, "dropout": 0.1, "target_modules": ["q_proj", "v_proj"]},
            "optimizer.kind": "paged_adamw_8bit",
            "training.checkpoint_every_n_iters": 25,
        },
        set(),
    ),
    "stateset/full.yaml": (
        {
            "model.base": "given",  # gpt2 is what its silence means, too
            "model.trainer_mode": "full",
            "training.lora": GONE,
            "optimizer.schedule": "cosine",
            "optimizer.min_lr_fraction": 0.0,
            "optimizer.warmup_steps": 0.05,
        },
        set(),
    ),
    "stateset/vllm.json": (
        {
            "rollout.engine": "vllm",
            "vllm": {"gpu_memory_utilization": 0.6, "tensor_parallel_size": 2},
            "rollout.max_model_len": 4096,
            "rollout.top_p": 0.9,
            "rollout.top_k": GONE,  # its vLLM takes temperature and top_p
            "rollout.temperature": 0.6,
        },
        {"vllm_enable_prefix_caching"},
    ),
    "stateset/reference.yaml": (
        {
            "loss.kl_coef": 0.02,
            "model.revision": "v1.1",
            "rollout.policy_config": {
                "system_prompt": "You are a patient clerk.",
                "chat_template_kwargs": {"enable_thinking": False},
            },
        },
        set(),
    ),
    "stateset/sampled_logprobs.yaml": (
        {
            "correction.old_logprobs": "rollout",
            "model.dtype": "bfloat16",
            "training.lora.target_modules": ["q_proj", "v_proj"],
            "tracking": GONE,  # without a project nothing is logged
        },
        set(),
    ),
    "stateset/quantized_without_adapter.json": (
        {"model.trainer_mode": "qlora", "model.quantization": "int8", "training.lora.r": 16},
        set(),
    ),
    "stateset/ignored.yaml": (
        {
            "training.batch_size": 100 * 4,
            "run": GONE,
            "rewards": GONE,
            "loss.kl_coef": GONE,
        },
        {
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "lr_scheduler_type",
            "seed",
            "reward_clip",
            "eval_steps",
            "num_epochs",
        },
    ),
    "stateset/misspelt.yaml": (
        {"training.group_size": 4, "rollout.max_model_len": 128 + 128},
        {"num_generation", "objective"},
    ),
}


def translated(name: str, values: Any) -> Translation:
    devices = 8 if name == "trl/eight_devices.yaml" else 1
    return translate(name.split("/")[0], values, Wanted(env="GuessNumber", model="given", devices=devices))


def test_every_system_has_ten_files() -> None:
    names = sorted(str(path.relative_to(FILES)) for path in FILES.glob("*/*"))
    assert names == sorted(BECOMES)
    assert [name.split("/")[0] for name in names] == sorted(["trl", "roll", "agilerl", "stateset"] * 10)


@pytest.mark.parametrize("name", BECOMES)
def test_a_users_file_becomes_what_its_documentation_says_and_is_valid(name: str) -> None:
    expected, left_out = BECOMES[name]
    translation = translated(name, read_file(FILES / name))
    assert {key: look_up(translation.values, key) for key in expected} == expected
    assert {line.split(" = ")[0] for line in translation.left_out} == left_out
    assert RunConfig.from_dict(translation.values).rollout.env_name == "GuessNumber"


def paths(values: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield from paths(value, (*above, key)) if isinstance(value, dict) and value else [(*above, key)]


# Keys whose other value means the same: -1 and 0 are none, other groupings are of the task, fp16 is on besides.
ALIKE = {
    "trl/reasoning_recipe.yaml": "max_steps",
    "roll/agentic_sokoban.yaml": "grouping",
    "roll/gigpo.yaml": "grouping",
    "roll/agentic_environment_sampling.yaml": "top_k",
    "roll/environment_variables.yaml": "api_key",  # which is not shown
    "stateset/sampled_logprobs.yaml": "bf16",
}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 if value > 3 and value % 2 == 0 else value + 1
    if isinstance(value, float):
        return value / 2 or 0.5
    return value[:-1] if isinstance(value, list) else f"{value}x"


@pytest.mark.parametrize("name", BECOMES)
def test_no_key_of_a_users_file_is_lost_without_a_line(name: str) -> None:
    """With another value, another configuration, another key that is left out, another remark, or an error."""
    values = read_file(FILES / name)
    whole, lost = translated(name, values), []
    for *above, key in paths(values):
        changed: Any = copy.deepcopy(values)
        table = changed
        for part in above:
            table = table[part]
        table[key] = other(table[key])
        with contextlib.suppress(ConfigError):
            if translated(name, changed) == whole and key != ALIKE.get(name):
                lost.append(".".join([*above, key]))
    assert lost == []


@pytest.mark.parametrize(
    "name", ["trl/lora.yaml", "roll/lora.yaml", "agilerl/gspo_manifest.yaml", "stateset/guide.json"]
)
def test_the_models_option_counts_only_where_the_file_names_none(name: str) -> None:
    values = read_file(FILES / name)
    translation = translated(name, values)
    assert translation.values["model"]["base"] != "given"
    assert any("'given' of the command line is not used: the file has" in note for note in translation.notes)


def test_what_looks_like_a_secret_is_not_shown() -> None:
    """A translation is a file that is kept beside the run."""
    translation = translated("roll/environment_variables.yaml", read_file(FILES / "roll/environment_variables.yaml"))
    assert "not-to-be-shown" not in str(translation)
    assert any(
        line.startswith("tracker_kwargs = {'api_key': '***', 'project': 'mine'}: ") for line in translation.left_out
    )


def test_a_variable_of_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_PATH", "/secret/model")
    translation = translated("roll/environment_variables.yaml", read_file(FILES / "roll/environment_variables.yaml"))
    assert "/secret/model" not in str(translation)
