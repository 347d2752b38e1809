"""The table of other trainers' keys: the systems that are translated, and names that only a hint knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gspo_gym.config.foreign.agilerl import AGILERL
from gspo_gym.config.foreign.draft import Row, System
from gspo_gym.config.foreign.roll import ROLL
from gspo_gym.config.foreign.stateset import STATESET
from gspo_gym.config.foreign.trl import TRL

SYSTEMS: Mapping[str, System] = {"trl": TRL, "roll": ROLL, "agilerl": AGILERL, "stateset": STATESET}

_CLIPS = Row(("loss.clip_low", "loss.clip_high"))
_IMAGES = Row(note="policies here read and write text, so that images are refused: remove it")
_SWITCH_SCALE = Row(("advantages.scale",), values={True: "group", False: "none"})


def _renamed(ours: str) -> Row:
    return Row((ours,))


# Names that no translated file has, by origin. "Form" is a file format.
OTHERS: Mapping[str, Mapping[str, Row]] = {
    "verl": {
        "n_sample": _renamed("training.group_size"),
        "ppo_mini_batch_size": _renamed("training.batch_size"),
        "clip_ratio": _CLIPS,
        "clip_ratio_low": _renamed("loss.clip_low"),
        "clip_ratio_high": _renamed("loss.clip_high"),
        "clip_ratio_c": _renamed("loss.dual_clip"),
        "kl_loss_type": Row(("loss.kl_estimator",), values={"low_var_kl": "k3", "kl": "k1", "mse": "k2"}),
    },
    "an earlier checkout": {
        "scoring_chunk_tokens": Row(
            ("training.logits_memory_mib",),
            advice="remove it, or write training.logits_memory_mib, the memory of the logits in MiB",
        ),
    },
    "the paper": {"G": _renamed("training.group_size")},
    "others": {
        "gradient_accumulation": _renamed("training.gradient_accumulation_steps"),
        "epsilon_low": _renamed("loss.clip_low"),
        "clip_range": _CLIPS,
        "kl_penalty": _renamed("loss.kl_coef"),
        "gamma": _renamed("advantages.discount"),
        "dynamic_sampling": Row(("training.constant_groups",), values={True: "refill"}),
        "seed_count": _renamed("evaluation.instances"),
    },
    "transformers": {
        "max_new_tokens": _renamed("rollout.max_output_tokens"),
        "torch_dtype": _renamed("model.dtype"),
    },
    "Unsloth": {"max_seq_length": _renamed("rollout.max_model_len")},
    "AgileRL": {
        "old_logprobs_source": Row(
            ("correction.old_logprobs",),
            values={"trainer": "recompute", "recompute": "recompute", "rollout": "rollout", "sampler": "rollout"},
        ),
        "warmup_proportion": _renamed("optimizer.warmup_fraction"),
        "merge_lora_configs": Row(
            ("training.lora.on_mismatch",), values={True: "merge"},
            advice={False: "nothing: a mismatch is an error by default"},
        ),
    },
    "stateset-agents": {
        "num_gradient_updates": _renamed("training.update_epochs"),
        "objective": _renamed("algorithm.variety"),
    },
    "an earlier version": {"normalize_std": _SWITCH_SCALE},
    "the hosted trainer": {
        "smoke": Row(note="settings of its smoke command: remove it"),
        **dict.fromkeys(("supports_vision", "max_images_per_message", "limit_mm_per_prompt"), _IMAGES),
    },
    "the hosted trainer's old form": {
        "num_inner_steps": _renamed("training.update_epochs"),
        "clip_epsilon": _CLIPS,
        "update_reference_interval": _renamed("reference.update_every_n_iters"),
        "group_normalization": Row(("advantages.baseline",), values={True: "group", False: "none"}),
        "advantage_normalization": _SWITCH_SCALE,
        "max_completion_tokens": _renamed("rollout.max_output_tokens"),
        "data": Row(note="write what the app reads into [rollout.env_config]"),
        "inference_url": Row(note="each rollout is told its own URL: remove it"),
        "hyperparams": Row(note="write [training] and [loss]"),
        "step_rewards": Row(note="write training.step_rewards_mode and so on"),
        "checkpoint": Row(note="write training.checkpoint_every_n_iters"),
    },
    "the hosted trainer's later form": {"verifier": Row(note="write [judge]")},
}  # fmt: skip
# Names without a counterpart that are ours in another section, or nearly ours.
_NEARLY_OURS = ("device", "reference", "reward", "rewards", "validation")


def _hints() -> Iterator[tuple[str, tuple[str, Row]]]:
    named = list(OTHERS.items())
    for system in SYSTEMS.values():
        reasons = {key: Row(note=why) for key, (_, why) in system.without_counterpart.items()}
        named.append((system.name, {**system.rows, **reasons}))
    for origin, rows in reversed(named):  # the last wins in the dict: of a name in several systems, the first
        for key, row in rows.items():
            if key not in _NEARLY_OURS and key not in {ours.rpartition(".")[2] for ours in row.ours}:
                yield key, (origin, row)


# Name -> its origin and its row. Names that are also ours are left out.
HINTS: Mapping[str, tuple[str, Row]] = dict(_hints())
