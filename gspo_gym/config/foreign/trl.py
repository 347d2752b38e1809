"""Rules of TRL's keys that depend on each other; trl.toml has the others."""

from __future__ import annotations

import math

from gspo_gym.config.foreign.reader import Draft, read_system
from gspo_gym.errors import ConfigError

_SURROGATES = ("cispo", "sapo", "vespo")  # loss types that are another surrogate than the clipped one
_NO_BOUND = 1e6  # a ratio that no episode reaches
_OF_GKD = ("teacher_model_name_or_path", "lmbda", "seq_kd")


def batches(draft: Draft) -> None:
    """Set how many episodes a batch has, how they are learned from, and how long the run is.

    Raises:
        ConfigError: the file is one of GKD, whose beta mixes two divergences and is no weight of a KL term.
    """
    if of_gkd := [key for key in _OF_GKD if key in draft.entries]:
        raise ConfigError(
            f"TRL: {', '.join(of_gkd)}: settings of GKDConfig are not translated; write [distillation] with a teacher "
            "and a divergence, see docs/explanations/distillation.md"
        )
    size, accumulation_steps = (
        draft.require_count("per_device_train_batch_size"),
        draft.require_count("gradient_accumulation_steps"),
    )
    micro = size * draft.devices
    draft.note(
        f"per_device_train_batch_size = {size} is of each device there; {draft.devices} counted here (--devices)"
    )
    generation, micro_per_batch = draft.count("generation_batch_size"), draft.count("steps_per_generation")
    episodes = generation or micro * (micro_per_batch or accumulation_steps)
    updates = draft.require_count("num_iterations")
    draft.set("training.batch_size", micro * accumulation_steps)
    draft.set("training.update_epochs", updates)
    draft.set("rollout.episodes_per_batch", episodes)
    steps = max(1, episodes // (micro * accumulation_steps)) * updates
    max_steps, epochs = draft.count("max_steps"), draft.require_number("num_train_epochs")
    if max_steps is not None and max_steps > 0:
        draft.set("training.iterations_per_epoch", math.ceil(max_steps / steps))
    else:
        draft.set("training.num_epochs", max(1, round(epochs)))
        draft.note(
            f"num_train_epochs = {epochs:g} counts passes over a data set; here an epoch is "
            "training.iterations_per_epoch batches, which --iterations sets"
        )


def objective(draft: Draft) -> None:
    """Set the aggregation, and what else the loss type decides."""
    kind, low, high = draft.get("loss_type"), draft.number("epsilon"), draft.number("epsilon_high")
    taus = draft.number("sapo_temperature_pos"), draft.number("sapo_temperature_neg")
    aggregation = draft.choice("loss_type", draft.values("loss_type"))
    draft.set("loss.aggregation", aggregation)
    if kind == "sapo" and taus != (None, None):
        draft.set("loss.sapo_temperatures", [1.0 if taus[0] is None else taus[0], 1.05 if taus[1] is None else taus[1]])
    if kind in _SURROGATES:
        _surrogate(draft, str(kind), low if high is None else high)
        return
    draft.set("loss.clip_low", low)
    draft.set("loss.clip_high", low if high is None else high)
    if aggregation == "dr_grpo":
        draft.set("loss.norm_length", draft.count("max_completion_length"))
        if draft.is_default("scale_rewards"):
            draft.set("advantages.scale", "none")
            draft.note(
                "loss_type = 'dr_grpo': advantages are not divided by a std (arXiv 2503.20783; Unsloth forces it)"
            )
    if draft.get("importance_sampling_level") == "sequence":
        draft.note(
            "the ratio has a stop-gradient form here; its value and gradient are the same for one advantage an episode"
        )


def _surrogate(draft: Draft, kind: str, cap: float | None) -> None:
    """Set another surrogate than the clipped one; `cap` is the most that a weight of CISPO counts as."""
    draft.set("loss.surrogate", kind)
    draft.leave_out("epsilon", f"{kind} has no floor of the ratio")
    if kind == "cispo" and cap is not None and cap > 1:
        draft.set("loss.clip_high", round(cap - 1, 12))
        draft.note(f"epsilon_high = {cap:g} is the largest weight itself there, and its distance from 1 here")
    elif kind == "cispo":
        draft.note(f"a largest weight of {cap:g} (epsilon_high, else epsilon) would be below 1: ours is 5")
    else:
        draft.leave_out("epsilon_high", f"{kind} has no ceiling of the ratio")
    if kind == "vespo":
        draft.set("algorithm.variety", "gspo")
        draft.note("vespo weighs a whole episode by the product of its tokens' ratios, which is loss.unit 'trajectory'")


def lengths(draft: Draft) -> None:
    """Set the lengths of an answer and of an episode, and its turns."""
    prompt, completion = draft.count("max_prompt_length"), draft.require_count("max_completion_length")
    draft.set("rollout.max_output_tokens", completion)
    draft.set("rollout.max_model_len", completion + (prompt or 1024))
    if draft.flag("use_vllm"):
        draft.set("rollout.max_model_len", draft.count("vllm_max_model_length"))
    draft.note(
        f"max_completion_length = {completion} is one budget for all turns and their tool results there, and the most "
        "tokens of one turn here; rollout.max_model_len bounds the whole episode"
    )
    turns = draft.count("max_tool_calling_iterations")
    draft.set("rollout.max_turns", None if turns is None else turns + 1)


def correction(draft: Draft) -> None:
    """Set the correction for a sampler with logprobs that are not quite the trainer's."""
    level, mode = draft.choice("vllm_importance_sampling_mode", draft.values("vllm_importance_sampling_mode"))
    cap, low = draft.number("vllm_importance_sampling_cap"), draft.number("vllm_importance_sampling_clip_min")
    high = draft.number("vllm_importance_sampling_clip_max")
    if draft.is_null("vllm_importance_sampling_clip_max"):
        high = _NO_BOUND
    if not (draft.flag("use_vllm") and draft.flag("vllm_importance_sampling_correction")):
        return
    draft.set("correction.level", level)
    draft.set("correction.mode", mode)
    draft.set("correction.high", high if cap is None else cap)  # as in TRL, the older name wins
    if mode == "mask":
        draft.set("correction.low", low or 0.0)
    else:
        draft.leave_out("vllm_importance_sampling_clip_min", "a ratio that is truncated has no lower bound here")
    if level == "trajectory":
        draft.note(f"{mode} weights of a sequence are the product of its tokens' there, and their geometric mean here")


def schedule(draft: Draft) -> None:
    """Set where the learning rate's decay ends."""
    options, rate = draft.part("lr_scheduler_kwargs"), draft.require_number("learning_rate")
    floor, least = options.number("min_lr_rate"), options.number("min_lr")
    draft.set("optimizer.min_lr_fraction", least / rate if floor is None and least is not None and rate else floor)
    draft.report_rest("lr_scheduler_kwargs", options, "has no counterpart")


def checkpoints(draft: Draft) -> None:
    """Set how often the run evaluates and saves, and which checkpoints stay."""
    evaluations, steps = draft.number("eval_steps"), draft.require_number("save_steps")
    if evaluations is not None and evaluations >= 1:
        draft.set("evaluation.every_n_iters", int(evaluations))
    else:
        draft.leave_out("eval_steps", "a fraction of all steps: write evaluation.every_n_iters")
    if draft.choice("save_strategy", dict.fromkeys(("no", "epoch", "best"), True) | {"steps": False}):
        draft.leave_out(
            "save_strategy", "checkpoints are saved every training.checkpoint_every_n_iters, and at the end"
        )
        draft.leave_out("save_steps", "acts with save_strategy = 'steps' only")
    elif steps < 1:
        draft.leave_out("save_steps", "a fraction of all steps: write training.checkpoint_every_n_iters")
    else:
        draft.set("training.checkpoint_every_n_iters", draft.count("save_steps"))
    if draft.flag("load_best_model_at_end"):
        draft.set("training.keep_best", 1)


TRL = read_system(
    "trl", batches, objective, lengths, correction, schedule, checkpoints,
)  # fmt: skip
