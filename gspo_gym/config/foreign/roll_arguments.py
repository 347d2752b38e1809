"""The settings of ROLL that `roll.py` reads, what ROLL does where a file is silent, and those without a counterpart.

ROLL is not on PyPI. Read in alibaba/ROLL, main of 2026: roll/configs/base_config.py at 0a6a47e5,
roll/pipeline/rlvr/rlvr_config.py at 2f732c04, roll/configs/model_args.py at 1d3b9ae2; training_args.py and
generating_args.py of roll/configs as a copy of that state holds them (jangyicheng/SE-ROLLGUI, ed0657e2). Where the
rewards, advantages and losses are computed: roll/utils/functionals.py at 090ac946 and roll/pipeline/base_worker.py at
015a111b. `response_length` and `sequence_length` have no default: ROLL refuses a file with neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    # BaseConfig
    "max_steps": 500,
    "save_steps": 50,
    "logging_steps": 1,
    "eval_steps": 10,
    "seed": 42,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    # PPOConfig
    "adv_estimator": "gae",
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "pg_clip": 0.2,
    "pg_clip_low": 0.2,
    "pg_clip_high": 0.2,
    "kl_loss_coef": 0.0,
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    # RLVRConfig
    "importance_sampling": "token",
    "num_return_sequences_in_group": 1,
    # TrainingArguments
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    # GeneratingArguments
    "temperature": 0.95,
    "top_p": 0.7,
    "top_k": 50,
    "max_new_tokens": 8192,
    # ModelArguments
    "dtype": "bf16",
    "lora_rank": 8,
    "lora_dropout": 0.0,
}
# Fields of its tables that ROLL overwrites with those of the pipeline, so that a file's have no effect.
OVERWRITTEN = ("max_steps", "seed", "output_dir", "num_return_sequences")
_LAUNCHER = "belongs to its launcher"
_VALIDATION = "an evaluation plays each of evaluation.seeds once; [evaluation] has its sampling"
_LOSS = "belongs to a loss that is not here"
_STEPS = "belongs to GiGPO and step_reinforce, which are not here"
_LAUNCHED = (
    "tracker_kwargs", "logging_dir", "output_dir", "base_dir", "rollout_dump_dir", "hydra", "defaults", "strategy_args",
    "checkpoint_config", "system_envs", "model_download_type", "rollout_mock", "router_args", "save_logging_board_dir",
    "render_save_dir", "metrics_dump_dir", "user_defined_rollout_loop_cls", "local_rank", "num_nodes", "rpc_timeout",
    "profiler_timeline", "profiler_memory", "profiler_output_dir", "length_profiler_dir", "report_length_and_rewards",
    "is_offload_states", "is_offload_optimizer_states_in_train_step", "model_update_buffer_size_mb",
    "num_gpus_per_node", "max_ckpt_to_keep", "resume_from_checkpoint", "track_with",
)  # fmt: skip
# Of keys without a counterpart: what they are if nobody sets them, and why there is none.
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(_LAUNCHED, (None, _LAUNCHER)),
    **dict.fromkeys(
        ("validation", "val_batch_size", "val_prompt_length", "val_sequence_length", "val_greedy", "val_env_manager"),
        (None, _VALIDATION),
    ),
    "val_n_sample": (1, _VALIDATION),
    "gamma": (1, "an episode's return is undiscounted; between turns advantages.discount is (level 'turn')"),
    "lambd": (0.95, "belongs to a value function, which is not here"),
    "value_clip": (None, "belongs to a value function, which is not here"),
    "critic": (None, "there is no value function here"),
    "critic_warmup": (0, "there is no value function here"),
    "whiten_rewards": (False, "rewards of tokens are not whitened here; advantages.whiten whitens advantages"),
    "use_reward_scaling": (False, "without effect there, too"),
    "use_reward_norm": (False, "without effect there, too"),
    "add_len_reward": (False, "without effect there, too"),
    "l2": (0.0, "without effect there, too: write weight_decay"),
    "train_infer_correction": (None, "write [correction]"),
    "async_generation_ratio": (0, "write training.max_staleness: episodes are played while the learner works"),
    "enable_reference": (False, "a KL term asks for the reference by itself"),
    "reference": (None, "write [reference]"),
    "enable_old_logprobs_recompute": (False, "the trainer always scores the old logprobs"),
    "force_disable_old_logprobs_recompute": (False, "the trainer always scores the old logprobs"),
    "generate_opt_level": (1, _LAUNCHER),
    "is_num_return_sequences_expand": (False, _LAUNCHER),
    "max_running_requests": (128, "rollout.max_concurrent_rollouts bounds what is played at once"),
    "is_use_additional_prompts": (False, "write training.constant_groups"),
    "max_additional_running_prompts": (16, "acts with is_use_additional_prompts only"),
    "reward": (None, "the environment rewards"),
    "rewards": (None, "the environment rewards"),
    "reward_model": (None, "the environment rewards, or a [judge]"),
    "reward_pretrain": (None, "the environment rewards, or a [judge]"),
    "custom_envs": (None, "rollout.env_name and rollout.max_turns take its place: --env, --max-turns"),
    "global_template": (None, "the model's own chat template is used"),
    "dataset_filter": (None, "an environment takes the data set's place"),
    "vlm_filter": (None, "policies read text"),
    "use_policy_loss_type": ("PPO", _LOSS),
    "use_topr_loss": (False, _LOSS),
    "use_topr_neg_loss_coef": (0.0, _LOSS),
    "postive_loss_coef": (0, _LOSS),
    "rl_loss_coef": (1.0, "has no counterpart: scale the other terms' coefficients"),
    "difficulty_loss_weight": (False, "has no counterpart: one episode weighs one"),
    "length_loss_weight": (False, "has no counterpart: one episode weighs one"),
    "difficulty_mask": (False, "write training.constant_groups"),
    "difficulty_low_threshold": (0.0, "acts with difficulty_mask only"),
    "difficulty_high_threshold": (1.0, "acts with difficulty_mask only"),
    "error_max_len_clip": (False, "has no counterpart"),
    "error_max_len_threshold": (9999999999, "acts with error_max_len_clip only"),
    "mask_type": ("loss", "a masked episode stays in the statistics of its group here"),
    "balance_length": (False, _LAUNCHER),
    "minibatch_data_iter_num": (1, _LAUNCHER),
    "batch_adjust_mode": ("copy", "batches need not be divisible here, so that no episode is copied"),
    "episode_reward_weight": (1.0, _STEPS),
    "step_reward_weight": (1.0, _STEPS),
    "step_reward_gamma": (0.95, _STEPS),
    # TrainingArguments, GeneratingArguments, ModelArguments
    "num_train_epochs": (1.0, "max_steps decides there, too"),
    "data_seed": (None, "run.seed draws the tasks"),
    "dataloader_num_workers": (0, "an environment takes the data set's place"),
    "fp16": (False, "16-bit floats with a loss scale are not supported; use bfloat16"),
    "bf16": (False, "model.dtype chooses"),
    "tf32": (None, "has no counterpart: set it in torch"),
    "do_sample": (True, "rollouts are always sampled"),
    "num_beams": (1, "rollouts are always sampled"),
    "max_length": (8192, "acts without max_new_tokens only"),
    "length_penalty": (1.0, "belongs to beam search"),
    "stop_strings": (None, "has no counterpart: a turn ends with the template's stop tokens"),
    "include_stop_str_in_output": (None, "what was sampled is kept whole"),
    "attn_implementation": (None, "transformers chooses"),
    "additional_target": (None, "an adapter is all that is trained"),
    "autocast_adapter_dtype": (True, "adapters are trained in float32"),
    "adapter_name_or_path": (None, "write model.base = the adapter's folder"),
    "moe_aux_loss_coef": (None, "has no counterpart: there is no auxiliary loss of routers"),
    "gradient_checkpointing_use_reentrant": (None, "never reentrant here"),
    "device_map": ("balanced", "model.device chooses"),
    "model_type": (None, "policies are causal language models"),
    "num_labels": (1, "policies are causal language models"),
    "model_config_kwargs": (None, "has no counterpart"),
    "freeze_module_prefix": (None, "has no counterpart: all weights are trained, or an adapter"),
    "ulysses_size": (1, _LAUNCHER),
    "vision_dp": (False, _LAUNCHER),
}  # fmt: skip
