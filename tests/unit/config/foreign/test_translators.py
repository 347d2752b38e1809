"""Other trainers' settings as ours: the five documents' own examples, key for key, and every departure said aloud."""

import pytest
from foreign_files import IDS, TABLES, file_with

from gspo_gym.cli.config import Wanted, translate
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError

# Unsloth's page, as printed there.
UNSLOTH = {
    "output_dir": "vlm-grpo-unsloth",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "optim": "adamw_8bit",
    "importance_sampling_level": "sequence",
    "loss_type": "dr_grpo",
    "epsilon": 3e-4,
    "epsilon_high": 4e-4,
    "num_generations": 8,
    "max_prompt_length": 1024,
    "max_completion_length": 1024,
    "log_completions": True,
    "max_grad_norm": 0.1,
    "temperature": 0.9,
    "num_train_epochs": 2,
    "report_to": "wandb",
}
# ROLL's page, as printed there.
ROLL = {
    "adv_estimator": "reinforce",
    "importance_sampling": "seq",
    "rollout_batch_size": 64,
    "num_return_sequences_in_group": 8,
    "prompt_length": 2048,
    "response_length": 4096,
    "ppo_epochs": 1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "loss_agg_mode": "seq-mean-token-sum",
    "whiten_advantages": True,
    "advantage_clip": 2.0,
    "dual_clip_loss": True,
    "reward_clip": 10,
    "reward_norm": None,
    "reward_shift": False,
    "reward_scale": False,
    "add_token_level_kl": False,
}
# The essential parameters of stateset-agents' guide.
STATESET = {
    "num_generations": 4,
    "clip_range_left": 3e-4,
    "clip_range_right": 4e-4,
    "beta": 0.0,
    "num_outer_iterations": 100,
    "generations_per_iteration": 100,
    "learning_rate": 1e-5,
    "use_lora": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "gradient_checkpointing": True,
    "use_8bit": False,
    "use_4bit": False,
    "max_prompt_length": 256,
    "max_completion_length": 256,
    "temperature": 0.7,
    "top_p": 0.9,
    "output_dir": "./outputs/gspo",
    "report_to": "wandb",
    "wandb_project": "my-gspo-project",
    "wandb_tags": ["gspo", "customer-service"],
    "run_name": "gspo-exp-001",
}
EXAMPLES = {"trl": UNSLOTH, "roll": ROLL, "stateset": STATESET, "agilerl": {}}


def said(translation, *words):
    return any(all(word in note for word in words) for note in translation.notes)


@pytest.mark.parametrize(("system", "known"), TABLES, ids=IDS)
def test_a_file_that_spells_every_default_out_is_the_silent_one(system, known):
    """tests/foreign has the same with the defaults of the installed packages; ROLL is not in the package registry."""
    without_counterpart = {key: default for key, (default, _) in known.without_counterpart.items()}
    spelled = translate(system, file_with(known, {**without_counterpart, **known.defaults}))
    assert spelled.values == translate(system, file_with(known, {})).values
    assert spelled.left_out == ()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("mini_batch_size", 8, "full batch"),  # the first four: `_GSPO_IGNORED_FIELDS` of 0.69.0
        ("gradient_accumulation_steps", 2, "full batch"),
        ("lr_scheduler_type", "linear", "cosine"),
        ("reward_clip", 5.0, "clips no rewards"),
        ("batch_size", 8, "full batch"),
        ("per_device_train_batch_size", 8, "full batch"),
        ("seed", 7, "seeds nothing"),
        ("logging_steps", 3, "ignores this key"),
    ],
)
def test_a_key_that_their_trainer_ignores_is_left_out_and_changes_nothing(key, value, reason):
    translation = translate("stateset", {key: value})
    (line,) = translation.left_out
    assert line.startswith(f"{key} = {value!r}: its GSPO trainer ignores this key")
    assert reason in line
    assert translation.values == translate("stateset", {}).values
    assert translation.values["training"]["batch_size"] == 100 * 4  # prompts x episodes of each, in one step
    optimizer = translation.values["optimizer"]
    assert (optimizer["schedule"], optimizer["min_lr_fraction"]) == ("cosine", 0.0)
    assert "rewards" not in translation.values


@pytest.mark.parametrize("system", sorted(EXAMPLES))
def test_the_documents_own_example_is_a_valid_config(system):
    translation = translate(system, EXAMPLES[system], Wanted(env="GuessNumber", model="tiny:qwen3-64"))
    assert RunConfig.from_dict(translation.values).rollout.env_name == "GuessNumber"


def test_unsloths_example_key_for_key():
    translation = translate("trl", UNSLOTH, Wanted(env="SqlAnalyst", model="m", iterations=100, max_turns=4))
    assert translation.left_out == ()
    assert translation.values == {
        "algorithm": {"variety": "gspo", "acknowledge": ["length_weighting"]},
        "model": {
            "base": "m",
            "label": "vlm-grpo-unsloth",
            "trainer_mode": "full",
            "gradient_checkpointing": True,
        },
        "run": {"seed": 42, "log_episodes_every_n_iters": 1},
        "rollout": {
            "env_name": "SqlAnalyst",
            "max_turns": 4,
            "max_output_tokens": 1024,
            "max_model_len": 2048,
            "temperature": 0.9,
            "episodes_per_batch": 32,
        },
        "training": {
            "num_epochs": 2,
            "iterations_per_epoch": 100,
            "group_size": 8,
            "batch_size": 8 * 4,
            "update_epochs": 1,
            "learning_rate": 5e-6,
            "log_interval": 10,
            "checkpoint_every_n_iters": 500,
        },
        "loss": {"aggregation": "dr_grpo", "norm_length": 1024, "clip_low": 3e-4, "clip_high": 4e-4},
        "advantages": {"scale": "none"},
        "optimizer": {
            "kind": "adamw_8bit",
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "max_grad_norm": 0.1,
            "warmup_steps": 0.1,
            "schedule": "cosine",
            "min_lr_fraction": 0.0,
        },
        "tracking": {"report_to": ["wandb"]},
        "evaluation": {"seeds": "0:100"},
    }
    assert said(translation, "the ratio is 1"), "32 = 8 x 4 episodes are one step"
    assert said(translation, "weighs an episode by its length")
    assert said(translation, "max_prompt_length = 1024", "not cut")


def test_rolls_example_key_for_key():
    """The page lists neither optimizer nor sampler, for which ROLL's own defaults count (see test_roll_defaults.py)."""
    translation = translate("roll", ROLL, Wanted(env="SqlAnalyst", model="m", label="r", iterations=200, max_turns=8))
    assert translation.left_out == ()
    assert translation.values == {
        "algorithm": {"variety": "gspo", "acknowledge": ["wide_clip", "length_weighting", "truncated_sampling"]},
        "model": {"base": "m", "label": "r", "gradient_checkpointing": True},
        "run": {"seed": 42},
        "rollout": {
            "env_name": "SqlAnalyst",
            "max_turns": 8,
            "max_output_tokens": 4096,
            "max_model_len": 2048 + 4096,
            "episodes_per_batch": 64 * 8,
            "temperature": 0.95,
            "top_p": 0.7,
            "top_k": 50,
        },
        "training": {
            "iterations_per_epoch": 200,
            "group_size": 8,
            "batch_size": 8,
            "update_epochs": 1,
            "learning_rate": 5e-5,
            "log_interval": 1,
            "checkpoint_every_n_iters": 50,
        },
        "loss": {
            "unit": "trajectory",
            "aggregation": "seq-mean-token-sum",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "dual_clip": 1 + 2 * 0.2,
            "kl_coef": 0.001,
        },
        "rewards": {"clip": 10.0},
        "advantages": {"baseline": "none", "scale": "none", "whiten": "tokens", "clip": 2.0},
        "optimizer": {
            "betas": [0.9, 0.999],
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "schedule": "linear",
            "min_lr_fraction": 0.0,
        },
        "evaluation": {"seeds": "0:100", "every_n_iters": 10},
    }
    assert said(translation, "defaults of ROLL", "learning_rate = 5e-05"), "it is not in ROLL's listing"
    assert said(translation, "no group baseline")


def test_agilerls_defaults_are_translated_where_the_file_is_silent():
    values = translate("agilerl", {}, Wanted(env="SqlAnalyst", model="m", max_turns=4)).values
    assert values["training"] == {
        "group_size": 8,
        "batch_size": 16,
        "update_epochs": 1,
        "learning_rate": 5e-7,
        "iterations_per_epoch": 100,
        "lora": {"r": 16, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"},
    }
    assert values["loss"] == {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.001}
    assert values["rollout"]["top_k"] == 50
    assert values["algorithm"]["acknowledge"] == ["wide_clip", "truncated_sampling"]
    assert values["reference"] == {"source": "adapter"}


def test_stateset_example_key_for_key():
    translation = translate("stateset", STATESET, Wanted(env="SqlAnalyst", model="gpt2", max_turns=1))
    assert translation.left_out == ()
    assert translation.values["training"] == {
        "group_size": 4,
        "batch_size": 400,
        "update_epochs": 1,
        "iterations_per_epoch": 100,
        "learning_rate": 1e-5,
        "checkpoint_every_n_iters": 100,
        "lora": {"r": 16, "alpha": 32.0, "dropout": 0.05, "target_modules": ["c_attn", "c_proj"]},
    }
    assert translation.values["loss"] == {"clip_low": 3e-4, "clip_high": 4e-4}
    assert translation.values["rollout"] == {
        "env_name": "SqlAnalyst",
        "max_turns": 1,
        "max_output_tokens": 256,
        "max_model_len": 512,
        "episodes_per_batch": 400,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,  # these two are not in the guide's listing
        "repetition_penalty": 1.1,
    }
    assert translation.values["tracking"] == {
        "report_to": ["wandb"],
        "wandb_project": "my-gspo-project",
    }
    assert translation.values["run"]["tags"] == {"gspo": True, "customer-service": True}


@pytest.mark.parametrize(
    ("system", "given", "key", "expected"),
    [
        ("trl", {"epsilon": 0.1}, "loss.clip_high", 0.1),  # epsilon_high is epsilon where it is not given
        ("trl", {"importance_sampling_level": "token"}, "algorithm.variety", "grpo"),
        ("trl", {"importance_sampling_level": "sequence_token"}, "algorithm.variety", "gspo_token"),
        ("trl", {"delta": 1.5}, "loss.dual_clip", 1.5),
        ("trl", {"beta": 0.04}, "loss.kl_coef", 0.04),
        ("trl", {"scale_rewards": "batch"}, "advantages.scale", "batch"),
        ("trl", {"scale_rewards": False}, "advantages.scale", "none"),
        ("trl", {"mask_truncated_completions": True}, "rewards.overlong", "mask"),
        ("trl", {"sync_ref_model": True, "ref_model_sync_steps": 64}, "reference.update_every_n_iters", 64),
        ("trl", {"num_iterations": 3}, "training.update_epochs", 3),
        ("trl", {"steps_per_generation": 4}, "rollout.episodes_per_batch", 32),
        ("trl", {"max_steps": 7, "steps_per_generation": 4}, "training.iterations_per_epoch", 2),  # 4 steps a batch
        ("trl", {"use_liger_kernel": True}, "model.liger_kernels", True),
        ("trl", {"warmup_steps": 5}, "optimizer.warmup_steps", 5),
        ("trl", {"top_k": -1}, "rollout.top_k", None),
        ("trl", {"save_total_limit": 3}, "training.keep_last", 3),
        ("trl", {"save_total_limit": 3}, "training.keep_best", 0),
        ("trl", {"save_total_limit": 3, "load_best_model_at_end": True}, "training.keep_last", 2),  # and the best
        ("trl", {"save_total_limit": 1, "load_best_model_at_end": True}, "training.keep_last", 1),  # and the best
        ("trl", {"save_total_limit": 0}, "training.keep_last", None),
        ("trl", {"save_steps": 0.1}, "training.checkpoint_every_n_iters", None),
        ("trl", {"save_strategy": "epoch", "save_steps": 7}, "training.checkpoint_every_n_iters", None),
        ("roll", {"max_ckpt_to_keep": 3}, "training.keep_last", 3),
        ("roll", {"max_ckpt_to_keep": 0}, "training.keep_last", None),
        ("trl", {"epsilon": 0.0}, "loss.clip_low", 0.0),  # which our checks refuse, and nothing replaces
        ("trl", {}, "loss.clip_high", 0.2),
        ("trl", {}, "rollout.max_output_tokens", 512),
        ("trl", {}, "training.num_epochs", 3),
        ("trl", {}, "model.trainer_mode", "full"),
        ("trl", {"beta": 0.04}, "loss.kl_importance_weighted", True),
        ("trl", {"beta": 0.04, "use_bias_correction_kl": False}, "loss.kl_importance_weighted", None),
        ("trl", {"model_name_or_path": "Qwen/Qwen3-8B"}, "model.base", "Qwen/Qwen3-8B"),
        ("trl", {"use_peft": True}, "model.trainer_mode", "lora"),
        ("trl", {"use_peft": True, "lora_r": 8}, "training.lora.r", 8),
        ("trl", {"use_peft": True, "lora_r": 8}, "training.lora.alpha", 32.0),
        ("trl", {"use_peft": True}, "training.lora.dropout", 0.05),
        ("trl", {"use_peft": True}, "training.lora.target_modules", ["q_proj", "v_proj"]),
        ("trl", {"use_peft": True, "lora_target_modules": "all-linear"}, "training.lora.target_modules", "all-linear"),
        ("trl", {"lora_r": 8}, "training.lora.r", None),  # without use_peft there is no adapter
        ("trl", {"use_peft": True, "load_in_4bit": True}, "model.trainer_mode", "qlora"),
        ("trl", {"use_peft": True, "load_in_8bit": True}, "model.quantization", "int8"),
        ("trl", {"use_peft": True, "dtype": "bfloat16"}, "model.dtype", "bfloat16"),
        ("trl", {"loss_type": "luspo"}, "loss.aggregation", "seq-mean-token-sum"),
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, "loss.clip_high", 4.0),  # 5 is no distance from 1
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, "loss.surrogate", "cispo"),
        ("trl", {"loss_type": "cispo", "epsilon_high": 5.0}, "loss.clip_low", None),
        ("trl", {"loss_type": "cispo"}, "loss.clip_high", None),  # a cap of 0.2, which no user can mean
        ("trl", {"loss_type": "sapo"}, "loss.aggregation", "grpo"),
        ("trl", {"loss_type": "sapo"}, "loss.surrogate", "sapo"),
        ("trl", {"loss_type": "sapo"}, "loss.clip_high", None),
        ("trl", {"loss_type": "sapo", "sapo_temperature_neg": 2}, "loss.sapo_temperatures", [1.0, 2.0]),
        ("trl", {"sapo_temperature_neg": 2}, "loss.sapo_temperatures", None),
        ("trl", {"loss_type": "vespo"}, "loss.surrogate", "vespo"),
        ("trl", {"loss_type": "vespo"}, "algorithm.variety", "gspo"),
        ("trl", {"loss_type": "vespo"}, "loss.aggregation", "dapo"),
        ("trl", {}, "loss.surrogate", None),
        ("trl", {"entropy_coef": 0.01}, "loss.entropy_coef", 0.01),
        (
            "trl",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "rollout.policy_config.chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("trl", {"chat_template_kwargs": '{"a": 1}'}, "rollout.policy_config.chat_template_kwargs", {"a": 1}),
        ("trl", {"max_tool_calling_iterations": 3}, "rollout.max_turns", 4),
        ("trl", {"warmup_steps": 0.1}, "optimizer.warmup_steps", 0.1),  # transformers 5
        ("trl", {"use_vllm": True}, "rollout.engine", "vllm"),
        ("trl", {"use_vllm": True}, "vllm.gpu_memory_utilization", 0.3),
        ("trl", {"use_vllm": True, "vllm_enable_sleep_mode": True}, "vllm.sleep_while_learning", True),
        ("trl", {"use_vllm": True, "vllm_mode": "server"}, "rollout.engine", "vllm"),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_clip_max": 2.0}, "correction.high", 2.0),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_cap": 4.0}, "correction.high", 4.0),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_clip_max": None}, "correction.high", 1e6),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_clip_min": 0.5}, "correction.low", 0.5),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_correction": False}, "correction.level", None),
        ("agilerl", {"lora_config": {"r": 8}}, "training.lora.alpha", 8.0),  # peft's own defaults beside it
        ("agilerl", {"lora_config": {"r": 8}}, "training.lora.dropout", 0.0),
        ("agilerl", {"lora_config": {"r": 8}}, "training.lora.target_modules", ["q_proj", "v_proj"]),
        ("agilerl", {"INIT_HP": {"LORA_TARGET_MODULES": ["q_proj"]}}, "training.lora.alpha", 64.0),
        ("agilerl", {"INIT_HP": {"LORA_R": 4}}, "training.lora.r", 16),  # acts with target modules only
        ("agilerl", {"actor_network": "Qwen/Qwen2.5-3B"}, "model.base", "Qwen/Qwen2.5-3B"),
        ("agilerl", {"model_config": {"torch_dtype": "bfloat16"}}, "model.dtype", "bfloat16"),
        ("agilerl", {"system_prompt": "Be brief."}, "rollout.policy_config.system_prompt", "Be brief."),
        ("agilerl", {"use_vllm": True, "vllm_config": {"tensor_parallel_size": 2}}, "vllm.tensor_parallel_size", 2),
        ("agilerl", {"use_vllm": True}, "vllm.gpu_memory_utilization", 0.3),
        ("roll", {"reward_clip": 10}, "rewards.clip", 10.0),  # of raw rewards: nothing is normalised
        ("roll", {"reward_clip": 10, "norm_mean_type": "group"}, "rewards.clip", None),
        ("roll", {"reward_clip": 10, "norm_mean_type": "group"}, "advantages.clip", 10.0),
        ("roll", {"reward_clip": 10, "adv_estimator": "grpo", "advantage_clip": 2.0}, "advantages.clip", 2.0),
        ("stateset", {}, "training.learning_rate", 5e-6),
        ("stateset", {"system_prompt": "Be kind."}, "rollout.policy_config.system_prompt", "Be kind."),
        ("agilerl", {"clip_coef": 0.0}, "loss.clip_low", 0.0),
        ("roll", {"adam_beta1": 0.8}, "optimizer.betas", [0.8, 0.999]),
        ("roll", {"sequence_length": 700, "prompt_length": 100}, "rollout.max_model_len", 700),
        ("trl", {"learning_rate": "5e-6"}, "training.learning_rate", 5e-6),  # YAML 1.1 reads 5e-6 as a text
        ("roll", {"adv_estimator": "grpo"}, "advantages.baseline", "group"),
        ("roll", {"ratio_type": "segment"}, "loss.unit", "turn"),
        ("roll", {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.3}, "loss.clip_high", 0.3),
        ("roll", {"pg_clip": 3e-4, "dual_clip_loss": True}, "loss.dual_clip", 1.0006),
        ("roll", {"add_token_level_kl": True}, "rewards.kl_coef", 0.2),
        ("roll", {"add_token_level_kl": True, "init_kl_coef": 0.1, "target_kl": 0.5}, "rewards.kl_target", 0.5),
        ("roll", {"norm_mean_type": "batch", "adv_estimator": "reinforce"}, "advantages.baseline", "batch"),
        ("roll", {"norm_std_type": "running", "adv_estimator": "reinforce"}, "advantages.scale", "running"),
        ("roll", {"entropy_loss_coef": 0.01}, "loss.entropy_coef", 0.01),
        ("roll", {"actor_train": {"training_args": {"learning_rate": 2e-6}}}, "training.learning_rate", 2e-6),
        ("roll", {"actor_infer": {"generating_args": {"temperature": 0.8}}}, "rollout.temperature", 0.8),
        ("agilerl", {"clip_coef": [0.9997, 1.0004]}, "loss.clip_high", 0.0004),  # bounds there, distances here
        ("agilerl", {"use_kl_advantage_shaping": True}, "advantages.kl_shaping_coef", 0.001),
        ("agilerl", {"filter_zero_adv": True, "adv_filter_eps": 0.1}, "advantages.filter_eps", 0.1),
        ("agilerl", {"whiten_advantages": True}, "advantages.whiten", "trajectories"),
        ("agilerl", {"adv_clip_range": 3.0}, "advantages.clip", 3.0),
        ("agilerl", {"adv_norm": "mean_only"}, "advantages.scale", "none"),
        ("agilerl", {"micro_batch_size_per_gpu": 4}, "training.batch_size", 4),
        ("agilerl", {"data_batch_size_per_gpu": 4}, "rollout.episodes_per_batch", 32),
        ("agilerl", {"min_output_tokens": 2}, "rollout.min_output_tokens", 2),
        ("agilerl", {"use_liger_loss": True}, "model.liger_kernels", True),
        ("agilerl", {"torch_compiler": "default"}, "model.torch_compile", True),
        ("agilerl", {"lora_config": {"r": 4, "lora_dropout": 0.0}}, "training.lora.r", 4),
        (
            "agilerl",
            {"cosine_lr_schedule_config": {"num_epochs": 10, "warmup_proportion": 0.05}},
            "optimizer.warmup_steps",
            0.05,
        ),
        ("agilerl", {"INIT_HP": {"BATCH_SIZE": 32}}, "training.batch_size", 32),
        ("stateset", {"use_gspo_token": True}, "advantages.level", "turn"),
        ("stateset", {"use_4bit": True}, "model.trainer_mode", "qlora"),
        ("stateset", {"use_8bit": True}, "model.quantization", "int8"),
        ("stateset", {"use_lora": False}, "model.trainer_mode", "full"),
        ("stateset", {"lora_target_modules": "q_proj"}, "training.lora.target_modules", ["q_proj"]),  # not its letters
        ("stateset", {"wandb_run_name": "a", "wandb_project": "p"}, "model.label", "a"),
        ("stateset", {"report_to": "wandb"}, "tracking.report_to", None),  # logs nothing without wandb_project
        ("stateset", {"rescore_old_log_probs": False}, "correction.old_logprobs", "rollout"),
        ("stateset", {"use_vllm": True}, "vllm.gpu_memory_utilization", 0.85),
        ("stateset", {"use_vllm": True}, "rollout.top_k", None),  # its vLLM backend takes temperature and top_p only
        ("stateset", {"use_vllm": True}, "rollout.repetition_penalty", None),
        ("stateset", {"use_vllm": True, "vllm_max_model_len": 2048}, "rollout.max_model_len", 2048),
        ("stateset", {}, "model.dtype", "bfloat16"),
        ("stateset", {"bf16": False}, "model.dtype", None),
        ("stateset", {"fp16": True}, "model.dtype", "bfloat16"),  # the only one of 16 bits here
        ("stateset", {"use_lora": False}, "model.dtype", None),  # weights that are trained stay float32
        ("stateset", {}, "model.base", "openai-community/gpt2"),
        ("stateset", {"model_name": "mistral"}, "training.lora.target_modules", ["q_proj", "v_proj"]),
        ("stateset", {"beta": 0.01, "use_reference_model": True}, "loss.kl_coef", 0.01),
        ("stateset", {"beta": 0.01}, "loss.kl_coef", None),
        ("trl", {"model_revision": "v2"}, "model.revision", "v2"),
        (
            "trl",
            {"model_revision": "main"},
            "model.revision",
            None,
        ),  # it is loaded anyway
        ("stateset", {"model_revision": "v2"}, "model.revision", "v2"),
        ("trl", {"attn_implementation": "eager"}, "model.attn_implementation", "eager"),
        ("roll", {"attn_implementation": "sdpa"}, "model.attn_implementation", "sdpa"),
    ],
)
def test_one_key(system, given, key, expected):
    found = translate(system, given).values
    for part in key.split("."):
        found = found.get(part) if found is not None else None
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize(
    ("given", "baseline", "scale"),
    [
        ({"reward_norm": "group"}, "group", "group"),
        ({"reward_norm": "batch", "reward_shift": True}, "batch", "none"),
        ({"reward_norm": "running", "reward_scale": True}, "none", "running"),
        ({"reward_norm": None}, "none", "none"),
    ],
)
def test_rolls_older_reward_keys_have_the_meaning_they_had(given, baseline, scale):
    advantages = translate("roll", {"adv_estimator": "reinforce", **given}).values["advantages"]
    assert (advantages["baseline"], advantages["scale"]) == (baseline, scale)


def test_a_key_nobody_knows_is_reported_with_the_nearest_one():
    translation = translate("trl", {"num_generation": 4})
    assert translation.left_out == (
        "num_generation = 4: not a key that is known of TRL; did you mean 'num_generations'?",
    )


def test_a_key_that_is_near_none_is_reported_without_a_list_of_all():
    translation = translate("trl", {"zzz": 4})
    assert translation.left_out == (
        "zzz = 4: not a key that is known of TRL; `gspo-gym config parameters` lists those that are",
    )


def test_their_defaults_that_decided_are_listed():
    notes = translate("trl", {}).notes
    assert any("defaults of TRL" in note and "loss_type = 'dapo'" in note for note in notes)


@pytest.mark.parametrize(
    ("system", "given", "message"),
    [
        ("trl", {"num_generations": "many"}, "TRL: num_generations: expected a number, got 'many'"),
        ("trl", {"num_generations": 2.5}, "TRL: num_generations: expected a whole number, got 2.5"),
        (
            "trl",
            {"loss_type": "gspo"},
            "TRL: loss_type: expected one of 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'luspo', 'cispo', 'sapo', 'vespo', got "
            "'gspo'",
        ),
        # of another trainer, in which beta mixes two divergences; it was taken for the weight of a KL term
        ("trl", {"beta": 0.5, "lmbda": 1.0, "seq_kd": False}, "TRL: lmbda, seq_kd: settings of GKDConfig are not"),
        ("trl", {"gradient_checkpointing": "yes"}, "TRL: gradient_checkpointing: expected true or false, got 'yes'"),
        ("roll", {"actor_train": {"training_args": 3}}, "ROLL: actor_train.training_args: expected a table, got 3"),
        ("agilerl", {"clip_coef": [1.1, 1.2]}, "AgileRL: clip_coef: expected a number or two bounds around 1"),
        ("trl", {"num_train_epochs": float("inf")}, "TRL: num_train_epochs: expected a number, got inf"),
        ("agilerl", {1: 2}, "AgileRL: expected a file of AgileRL 2.58.0 or AgileRL 2.7.0, got one of neither: 1"),
        # of a wrong type: these ended with a traceback
        ("trl", {"loss_type": ["grpo"]}, "TRL: loss_type: expected one of 'grpo', "),
        ("trl", {"report_to": 3}, "TRL: report_to: expected a list of names, got 3"),
        ("roll", {"lora_target": 3}, "ROLL: lora_target: expected a list of names, got 3"),
        ("agilerl", {"clip_coef": ["low", "high"]}, "AgileRL: clip_coef: expected a number, got 'low'"),
        ("agilerl", {"lora_config": {"lora_alpha": "x"}}, "AgileRL: lora_alpha: expected a number, got 'x'"),
    ],
)
def test_a_value_that_makes_no_sense_is_an_error(system, given, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[").replace(".", r"\.")):
        translate(system, given)


@pytest.mark.parametrize(
    ("system", "given", "reason"),
    [
        ("agilerl", {"use_memory_efficient_params": False}, "vllm.sleep_while_learning"),
        ("agilerl", {"reduce_memory_peak": True}, "without effect there, too"),
        ("agilerl", {"clone": True}, "internal"),
        ("agilerl", {"wrap": False}, "internal"),
        ("agilerl", {"pad_token_id": 5}, "padding is by mask here"),
        ("agilerl", {"device": "cuda"}, "compute.gpu_count chooses here"),
        ("agilerl", {"hp_config": {"lr": [1e-6, 1e-4]}}, "gspo-gym search"),
        ("agilerl", {"cast_logprobs_to_fp32": False}, "always computed in float32"),
        ("trl", {"vespo_k_pos": 3.0}, "a constant of surrogate vespo"),
        ("trl", {"use_dora": True}, "has no counterpart"),
        ("trl", {"save_steps": 0.1}, "a fraction of all steps"),
        ("trl", {"save_strategy": "best"}, "every training.checkpoint_every_n_iters"),
        ("trl", {"dataset_name": "trl-lib/math"}, "an environment takes the data set's place"),
        ("trl", {"use_adaptive_entropy": True}, "loss.entropy_coef is constant"),
        ("trl", {"top_entropy_quantile": 0.2}, "has no counterpart"),
        ("roll", {"num_gpus_per_node": 8}, "belongs to its launcher"),
        ("agilerl", {"actor_network": {"a": "model"}}, "a model in memory cannot be in a file"),
        ("trl", {"shuffle_dataset": False}, "tasks are drawn by seed"),  # a switch that is on by default
        ("roll", {"episode_reward_weight": 0}, "belongs to GiGPO"),  # 0 is no switch
        ("stateset", {"entropy_coef": 0.1}, "its GSPO trainer ignores this key; write loss.entropy_coef"),
        ("stateset", {"objective": "dapo"}, "write algorithm.variety"),
    ],
)
def test_what_has_no_counterpart_is_left_out_aloud(system, given, reason):
    ((key, value),) = given.items()
    (line,) = translate(system, given).left_out
    assert line.startswith(f"{key} = {value!r}: ")
    assert reason in line


@pytest.mark.parametrize(
    ("system", "given", "needed"),
    [
        ("trl", {"vllm_gpu_memory_utilization": 0.5}, "use_vllm"),
        ("trl", {"vllm_importance_sampling_mode": "token_mask"}, "use_vllm"),
        ("trl", {"vllm_mode": "server"}, "use_vllm"),
        ("trl", {"lora_r": 8}, "use_peft"),
        ("trl", {"ref_model_sync_steps": 64}, "sync_ref_model"),
        ("roll", {"pg_clip_low": 0.1}, "use_pg_clip_range"),
        ("roll", {"kl_loss_coef": 0.01}, "use_kl_loss"),
        ("roll", {"lora_rank": 4}, "lora_target"),
        ("agilerl", {"adv_filter_eps": 0.1}, "filter_zero_adv"),
        ("agilerl", {"vllm_config": {"tensor_parallel_size": 2}}, "use_vllm"),
        ("stateset", {"beta": 0.01}, "use_reference_model"),
        ("stateset", {"vllm_tensor_parallel_size": 2}, "use_vllm"),
    ],
)
def test_a_key_without_what_it_acts_with_changes_nothing_and_is_noted(system, given, needed):
    """Nothing is lost, so that it is not left out; but its reader did not know that it has no effect there."""
    translation, (key, value) = translate(system, given), list(given.items())[-1]
    assert f"{key} = {value!r} has no effect there: it acts with {needed} only" in translation.notes
    assert translation.left_out == ()
    assert translation.values == translate(system, {}).values


@pytest.mark.parametrize(
    ("system", "given"),
    [
        ("trl", {"use_bias_correction_kl": True, "beta": 0.0}),
        ("trl", {"use_liger_kernel": True, "use_liger_loss": True}),
        ("roll", {"pretrain": "m", "model_name_or_path": "m"}),
        ("roll", {"sequence_length": 700, "prompt_length": 100, "response_length": 600}),
        ("stateset", {"use_lora": False, "lora_target_modules": ["q_proj"]}),
        ("agilerl", {"model_name": "m", "pretrained_model_name_or_path": "m"}),
    ],
)
def test_a_known_key_is_never_taken_for_an_unknown_one(system, given):
    """Not even where another key decides, so that it has no effect."""
    assert translate(system, given).left_out == ()


def test_a_large_model_with_an_adapter_does_not_become_a_small_one_without():
    theirs = {"model_name_or_path": "Qwen/Qwen3-8B", "use_peft": True, "lora_r": 8, "lora_alpha": 16}
    config = RunConfig.from_dict(translate("trl", theirs, Wanted(env="GuessNumber")).values)
    assert (config.model.base, config.model.trainer_mode) == ("Qwen/Qwen3-8B", "lora")
    assert (config.training.lora.r, config.training.lora.alpha) == (8, 16.0)


def test_a_clip_of_normalised_rewards_before_whitening_has_no_counterpart():
    translation = translate("roll", {"reward_clip": 10, "norm_mean_type": "group", "whiten_advantages": True})
    assert translation.left_out == (
        "reward_clip = 10: cuts normalised rewards before they are whitened; advantages are cut after that here",
    )
    assert "rewards" not in translation.values
    assert "clip" not in translation.values["advantages"]


def test_parts_of_a_table_without_a_counterpart_are_named():
    translation = translate("agilerl", {"lora_config": {"r": 4, "use_dora": True}, "model_config": {"rope_theta": 1e6}})
    assert translation.left_out == (
        "model_config.rope_theta = 1000000.0: belongs to transformers' from_pretrained",
        "lora_config.use_dora = True: has no counterpart",
    )


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        (
            {"loss_type": "cispo", "epsilon": 0.1, "epsilon_high": 5.0},
            ["epsilon = 0.1: cispo has no floor of the ratio"],
        ),
        ({"loss_type": "sapo", "epsilon_high": 0.3}, ["epsilon_high = 0.3: sapo has no ceiling of the ratio"]),
        ({"loss_type": "vespo"}, []),
    ],
)
def test_bounds_that_a_loss_type_of_trl_does_not_read_are_left_out(given, lines):
    assert list(translate("trl", given).left_out) == lines
