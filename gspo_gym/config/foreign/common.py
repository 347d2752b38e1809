"""What several translators have in common: learning rates, optimizers, model and LoRA, sampling, reporting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gspo_gym.config.foreign.draft import Draft, label_of
from gspo_gym.errors import ConfigError

# What peft adapts of most models (Qwen, Llama, Mistral, Gemma) where nobody names modules.
PEFT_MODULES = ("q_proj", "v_proj")

_OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def take_trainer_arguments(draft: Draft) -> None:
    """The keys of transformers' TrainingArguments that mean the same everywhere."""
    draft.set("training.learning_rate", draft.number("learning_rate"))
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    if beta1 is not None or beta2 is not None:  # the one that is missing is transformers' default
        draft.set("optimizer.betas", [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2])
    draft.set("optimizer.eps", draft.number("adam_epsilon"))
    draft.set("optimizer.weight_decay", draft.number("weight_decay"))
    draft.set("optimizer.max_grad_norm", draft.number("max_grad_norm"))
    draft.set("optimizer.kind", draft.choice("optim", _OPTIMIZERS))
    take_schedule(draft)
    draft.set("training.log_interval", draft.count("logging_steps"))
    draft.set("training.checkpoint_every_n_iters", draft.count("save_steps"))
    draft.set("run.seed", draft.count("seed"))
    if draft.flag("gradient_checkpointing"):
        draft.set("model.gradient_checkpointing", True)


def take_schedule(draft: Draft) -> None:
    """Warm-up and decay of the learning rate."""
    schedule = draft.choice("lr_scheduler_type", _SCHEDULES)
    draft.set("optimizer.schedule", schedule)
    if schedule in ("linear", "cosine"):
        draft.set("optimizer.min_lr_fraction", 0.0)  # transformers' schedules end at 0; ours has 0.1 by default
    fraction, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    if steps is not None and 0 < steps < 1:  # transformers 5 takes a ratio under this name, too
        fraction, steps = steps, None
    if steps:
        draft.set("optimizer.num_warmup_steps", draft.count("warmup_steps"))
    elif fraction:
        draft.set("optimizer.warmup_fraction", fraction)


def take_policy_config(draft: Draft) -> None:
    """Take how the policy is asked: its system message, and what its chat template is told."""
    draft.set("rollout.policy_config.system_prompt", draft.get("system_prompt"))
    kwargs = draft.get("chat_template_kwargs")
    if isinstance(kwargs, str):  # as a command line takes it
        kwargs = _parsed(draft, "chat_template_kwargs", kwargs)
    draft.set("rollout.policy_config.chat_template_kwargs", kwargs or None)


def _parsed(draft: Draft, theirs: str, text: str) -> Any:
    """Return the JSON of a text (Any: as it is)."""
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{draft.system}: {theirs}: expected a table or its JSON, got {text!r}") from None


def take_reporting(draft: Draft) -> None:
    """Where metrics go."""
    report_to = draft.get("report_to")
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    for name in names:
        if name not in ("none", "wandb", "tensorboard"):
            draft.note(f"report_to: {name!r} has no sink here; metrics are always in metrics.jsonl")
    draft.set("tracking.report_to", [name for name in names if name in ("wandb", "tensorboard")] or None)
    draft.set("tracking.run_name", draft.get("run_name"))
    output = draft.get("output_dir")
    if output is not None:
        draft.set("model.label", label_of(str(output)))
        draft.note(f"output_dir = {str(output)!r} names the run: it is written to [run] folder / model.label")


def take_clip(draft: Draft, low: float, high: float, *, is_sequence: bool) -> None:
    """The clip range, as distances from 1."""
    from gspo_gym.config.rules.objective import WIDE_CLIP  # here: --help need not wait for pydantic

    draft.set("loss.clip_low", low)
    draft.set("loss.clip_high", high)
    if is_sequence and max(low, high) >= WIDE_CLIP:
        draft.acknowledge("wide_clip")
        draft.note(
            f"a sequence ratio stays within about 1e-3 of 1, so that a clip of {low:g} / {high:g} never acts; the "
            "paper's is 3e-4 / 4e-4"
        )


def take_aggregation(draft: Draft, aggregation: str, *, is_sequence: bool, norm_length: int | None = None) -> None:
    """How token terms become a loss."""
    from gspo_gym.config.rules.objective import LENGTH_WEIGHTED

    draft.set("loss.aggregation", aggregation)
    if aggregation in ("dr_grpo", "seq-mean-token-sum-norm"):
        draft.set("loss.norm_length", norm_length)
    if is_sequence and aggregation in LENGTH_WEIGHTED:
        draft.acknowledge("length_weighting")
        draft.note(
            f"aggregation {aggregation!r} with a sequence ratio weighs an episode by its length; the paper's is "
            "'seq-mean-token-mean', in which each weighs one"
        )


def take_sampling(draft: Draft) -> None:
    """temperature, top_p, top_k, min_p and repetition_penalty under their usual names."""
    draft.set("rollout.temperature", draft.number("temperature"))
    active: Mapping[str, float | None] = {
        "top_p": _unless(draft.number("top_p"), 1.0),
        "top_k": _unless(draft.number("top_k"), 0.0, -1.0),
        "min_p": _unless(draft.number("min_p"), 0.0),
        "repetition_penalty": _unless(draft.number("repetition_penalty"), 1.0),
    }
    for name, value in active.items():
        draft.set(f"rollout.{name}", int(value) if name == "top_k" and value is not None else value)
    cut = [name for name, value in active.items() if value is not None]
    if cut:
        draft.acknowledge("truncated_sampling")
        draft.note(
            f"{', '.join(cut)}: rollouts come from a changed distribution, which {draft.system} does not score under; "
            "training.score_truncated = true does, for top_p, top_k and min_p"
        )


def take_single_step_note(draft: Draft, *, num_steps: int) -> None:
    """Say it where old and present policy are the same in every update."""
    if num_steps == 1:
        draft.note(
            "each batch is used for one optimizer step, so that the ratio is 1 and no clip acts; lower "
            "training.batch_size (the paper takes 4 steps a batch)"
        )


def _unless(value: float | None, *off: float) -> float | None:
    return None if value is None or value in off else value
