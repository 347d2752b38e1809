"""stateset-agents' GSPOConfig (read in 0.69.0): the keys of its guide, those that its trainer ignores among them."""

from __future__ import annotations

from gspo_gym.config.foreign.draft import (
    Draft,
    take_clip,
    take_policy_config,
    take_reporting,
    take_sampling,
    take_single_step_note,
    take_trainer_arguments,
)

DEFAULTS = {
    "num_generations": 4,
    "clip_range_left": 3e-4,
    "clip_range_right": 4e-4,
    "beta": 0.0,
    "generations_per_iteration": 100,
    "num_iterations": 1,
    "learning_rate": 5e-6,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "gradient_checkpointing": True,
    "use_lora": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "max_prompt_length": 256,
    "max_completion_length": 256,
    "temperature": 0.7,
    "top_p": 0.9,
}
_IGNORED_THERE = "its GSPO trainer ignores this key"


def translate(draft: Draft) -> None:
    """Read every key out of the draft and set ours."""
    draft.set("model.base", draft.get("model_name"))
    is_token = draft.flag("use_gspo_token")
    draft.set("algorithm.variety", "gspo_token" if is_token else "gspo")
    if is_token:
        draft.set("advantages.level", "turn")
        draft.note("use_gspo_token: every token has its episode's advantage there; here each turn has its own")
    take_clip(
        draft, draft.require_number("clip_range_left"), draft.require_number("clip_range_right"), is_sequence=True
    )
    take_trainer_arguments(draft)
    take_reporting(draft)
    take_policy_config(draft)
    _take_batches(draft)
    _take_model(draft)
    take_sampling(draft)
    _take_lengths(draft)
    beta = draft.require_number("beta")
    if beta:
        draft.set("loss.kl_coef", beta)
        draft.note(
            f"beta = {beta:g} weighs the k3 estimate of an episode's mean log-ratio there, and the mean of its tokens' "
            "estimates here, which is much larger: choose it anew"
        )
    draft.set("rewards.clip", draft.number("reward_clip"))
    if draft.given.get("reward_clip") is not None:
        draft.note(f"reward_clip: {_IGNORED_THERE}; it acts here")
    draft.set("tracking.wandb_project", draft.get("wandb_project"))
    tags = draft.get("wandb_tags")
    draft.set("tracking.wandb_tags", list(tags) if tags else None)


def _take_batches(draft: Draft) -> None:
    group, prompts = draft.require_count("num_generations"), draft.require_count("generations_per_iteration")
    episodes = group * prompts
    step = draft.first_count("mini_batch_size", "per_device_train_batch_size")
    accumulated = draft.first_count("gradient_accumulation_steps")
    draft.set("training.group_size", group)
    draft.set("rollout.episodes_per_batch", episodes)
    draft.set("training.iterations_per_epoch", draft.count("num_outer_iterations"))
    updates = draft.require_count("num_iterations")
    draft.set("training.update_epochs", updates)
    draft.set("training.batch_size", step or episodes)
    draft.set("training.gradient_accumulation_steps", accumulated if step else None)
    if step:
        draft.note(f"mini_batch_size and gradient_accumulation_steps: {_IGNORED_THERE}; they act here")
    steps = max(1, episodes // ((step or episodes) * ((accumulated if step else None) or 1)))
    take_single_step_note(draft, num_steps=steps * updates)


def _take_model(draft: Draft) -> None:
    r, alpha, dropout = draft.count("lora_r"), draft.number("lora_alpha"), draft.number("lora_dropout")
    modules = draft.get("lora_target_modules")
    in_8_bits = draft.flag("use_8bit")
    if draft.flag("use_4bit") or in_8_bits:
        draft.set("model.trainer_mode", "qlora")
        draft.set("model.quantization", "int8" if in_8_bits else None)
    elif draft.flag("use_lora"):
        draft.set("model.trainer_mode", "lora")
    else:
        draft.set("model.trainer_mode", "full")
        return
    draft.set("training.lora.r", r)
    draft.set("training.lora.alpha", alpha)
    draft.set("training.lora.dropout", dropout)
    draft.set("training.lora.target_modules", list(modules) if modules else None)


def _take_lengths(draft: Draft) -> None:
    prompt, completion = draft.require_count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    draft.set("rollout.max_model_len", prompt + completion)
    draft.note(f"max_prompt_length = {prompt}: a longer prompt is not cut here; it counts towards max_model_len")
