"""stateset-agents' GSPOConfig (read in 0.69.0): the keys of the guide, ignored ones among them."""

from __future__ import annotations

from collections.abc import Mapping

from gspo_gym.config.foreign.draft import (
    LORA_DEFAULTS,
    OF_BATCHES,
    POLICY,
    REPORTING,
    TRAINER_ARGUMENTS,
    Draft,
    Row,
    System,
    by,
    count,
    plain,
    take_clip,
    take_single_step_note,
    with_defaults,
)

_IGNORED_THERE = "its GSPO trainer ignores this key"


def _take_variety(draft: Draft) -> None:
    is_token = draft.flag("use_gspo_token")
    draft.set("algorithm.variety", "gspo_token" if is_token else "gspo")
    if is_token:
        draft.set("advantages.level", "turn")
        draft.note("use_gspo_token: every token has its episode's advantage there; here each turn has its own")
    take_clip(
        draft, draft.require_number("clip_range_left"), draft.require_number("clip_range_right"), is_sequence=True
    )


def _take_kl(draft: Draft) -> None:
    beta = draft.require_number("beta")
    if beta:
        draft.set("loss.kl_coef", beta)
        draft.note(
            f"beta = {beta:g} weighs the k3 estimate of an episode's mean log-ratio there, and the mean of its tokens' "
            "estimates here, which is much larger: choose it anew"
        )


def _take_reward_clip(draft: Draft) -> None:
    draft.set("rewards.clip", draft.number("reward_clip"))
    if draft.given.get("reward_clip") is not None:
        draft.note(f"reward_clip: {_IGNORED_THERE}; it acts here")


def _take_tags(draft: Draft) -> None:
    draft.set("tracking.wandb_tags", draft.names("wandb_tags") or None)


def _take_batches(draft: Draft) -> None:
    group, prompts = draft.require_count("num_generations"), draft.require_count("generations_per_iteration")
    episodes = group * prompts
    step = draft.first_count("mini_batch_size", "per_device_train_batch_size")
    accumulated = draft.first_count("gradient_accumulation_steps")
    draft.set("training.group_size", group)
    draft.set("rollout.episodes_per_batch", episodes)
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
    modules = draft.names("lora_target_modules")
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
    draft.set("training.lora.target_modules", modules or None)


def _take_lengths(draft: Draft) -> None:
    prompt, completion = draft.require_count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    draft.set("rollout.max_model_len", prompt + completion)
    draft.note(f"max_prompt_length = {prompt}: a longer prompt is not cut here; it counts towards max_model_len")


_EPISODES = "rollout.episodes_per_batch"
_LORA_KEYS = ("training.lora.r", "training.lora.alpha", "training.lora.dropout")
ROWS: Mapping[str, Row] = {
    "model_name": plain("model.base"),
    "use_gspo_token": by(
        _take_variety, "algorithm.variety", values={True: "gspo_token", False: "gspo"}, also=("advantages.level",),
        note="each turn has its own advantage",
    ),
    "clip_range_left": by(_take_variety, "loss.clip_low", default=3e-4),
    "clip_range_right": by(_take_variety, "loss.clip_high", default=4e-4),
    **with_defaults(
        TRAINER_ARGUMENTS, learning_rate=5e-6, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.01, max_grad_norm=1.0,
        warmup_ratio=0.1, lr_scheduler_type="cosine", gradient_checkpointing=True,
    ),
    **REPORTING,
    "num_generations": by(_take_batches, "training.group_size", also=(_EPISODES, "training.batch_size"), default=4),
    "generations_per_iteration": by(
        _take_batches, _EPISODES, also=("training.batch_size",), note=OF_BATCHES, default=100
    ),
    "mini_batch_size": by(_take_batches, "training.batch_size"),
    "per_device_train_batch_size": by(_take_batches, "training.batch_size"),
    "gradient_accumulation_steps": by(
        _take_batches, "training.gradient_accumulation_steps", beside={"mini_batch_size": 50}
    ),
    "num_iterations": by(_take_batches, "training.update_epochs", default=1),
    "num_outer_iterations": count("training.iterations_per_epoch"),
    "use_lora": by(
        _take_model, "model.trainer_mode", values={True: "lora", False: "full"}, also=_LORA_KEYS, default=True
    ),
    "use_4bit": by(_take_model, "model.trainer_mode", values={True: "qlora"}),
    "use_8bit": by(_take_model, "model.quantization", "model.trainer_mode", values={True: ("int8", "qlora")}),
    **{
        f"lora_{name}": by(_take_model, f"training.lora.{name}", default=default)
        for name, default in LORA_DEFAULTS.items()
    },
    **with_defaults(POLICY, temperature=0.7, top_p=0.9),
    "max_completion_length": by(
        _take_lengths, "rollout.max_output_tokens", also=("rollout.max_model_len",), default=256
    ),
    "max_prompt_length": by(_take_lengths, "rollout.max_model_len", note="prompts are not cut", default=256),
    "beta": by(_take_kl, "loss.kl_coef", note="our estimate of the KL is much larger: choose it anew", default=0.0),
    "reward_clip": by(_take_reward_clip, "rewards.clip", note="ignored there"),
    "wandb_project": plain("tracking.wandb_project"),
    "wandb_tags": by(_take_tags, "tracking.wandb_tags"),
}  # fmt: skip
STATESET = System("stateset-agents", ROWS)
