"""What the settings of different sections have to do with each other: defaults that follow, and contradictions.

A rule looks at a few keys and says what is wrong, or None. It is asked only if all of its keys are valid by
themselves, so that every problem of a file can be reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.config_problems import Problem, show
from gspo_gym.learning.settings import LoraSettings, OptimizerSettings
from gspo_gym.settings import parse_seeds

# What `algorithm.variety` means. A key that is not here is free; the first value is the default.
# The clip ranges of GRPO are those that the GSPO paper compares with (section 5.1); GSPO's own are LossSettings'.
_VARIETIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gspo": {"loss.unit": ("trajectory",), "advantages.level": ("trajectory",)},
    "gspo_token": {"loss.unit": ("trajectory", "turn"), "advantages.level": ("turn", "trajectory")},
    "grpo": {"loss.unit": ("token",), "advantages.level": ("trajectory", "turn")},
}
_GRPO_CLIPS = {"clip_low": 0.2, "clip_high": 0.27}


def with_derived_defaults(values: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """A copy of what was read (hence Any), with these sections present and the defaults that depend on other keys.

    Nothing that was given is changed, and nothing is judged: values may be of any type.
    """
    filled = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    filled = {name: {} for name in sections} | filled
    algorithm, model, training = filled["algorithm"], filled["model"], filled["training"]
    variety = algorithm.get("variety", "gspo") if isinstance(algorithm, dict) else None
    for key, allowed in _VARIETIES.get(variety, {}).items() if isinstance(variety, str) else ():
        section, name = key.split(".")
        if isinstance(filled[section], dict):
            filled[section].setdefault(name, allowed[0])
    if variety == "grpo" and isinstance(filled["loss"], dict):
        filled["loss"] = _GRPO_CLIPS | filled["loss"]
    if isinstance(model, dict) and isinstance(training, dict) and model.get("trainer_mode") == "lora":
        training.setdefault("lora", {})
    return filled


def find_contradictions(values: Mapping[str, Any]) -> list[Problem]:
    """The problems between keys. `values` holds what is valid by itself, by dotted key (Any: of all their types)."""
    problems = []
    for rule in _RULES:
        if all(key in values for key in rule.keys):
            text = rule.check(*(values[key] for key in rule.keys))
            if text is not None:
                problems.append(Problem(rule.keys[0], text))
    return problems


def num_optimizer_steps(
    *, num_epochs: int, iterations_per_epoch: int, episodes_per_batch: int, batch_size: int, update_epochs: int
) -> int:
    """Optimizer steps of a whole run in which no group is dropped.

    >>> num_optimizer_steps(num_epochs=2, iterations_per_epoch=9, episodes_per_batch=64, batch_size=16, update_epochs=1)
    72
    """
    return num_epochs * iterations_per_epoch * (episodes_per_batch // batch_size) * update_epochs


@dataclass(frozen=True, slots=True)
class _Rule:
    """The problem, if there is one, is the first key's; `check` takes the values of all keys."""

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def _unit_fits_variety(unit: str, variety: str) -> str | None:
    return _fits_variety("loss.unit", unit, variety)


def _level_fits_variety(level: str, variety: str) -> str | None:
    return _fits_variety("advantages.level", level, variety)


def _fits_variety(key: str, value: str, variety: str) -> str | None:
    allowed = _VARIETIES[variety][key]
    if value in allowed:
        return None
    others = [show(name) for name, keys in _VARIETIES.items() if value in keys[key]]
    return (
        f"algorithm.variety {show(variety)} takes {' or '.join(map(show, allowed))}, got {show(value)}, which belongs "
        f"to variety {' or '.join(others)}"
    )


def _batch_holds_whole_groups(episodes_per_batch: int, group_size: int) -> str | None:
    if episodes_per_batch % group_size == 0:
        return None
    return f"expected a multiple of training.group_size = {group_size}, got {episodes_per_batch}"


def _batch_splits_evenly(batch_size: int, episodes_per_batch: int) -> str | None:
    if episodes_per_batch % batch_size == 0:
        return None
    return f"expected a divisor of rollout.episodes_per_batch = {episodes_per_batch}, got {batch_size}"


def _output_leaves_room_for_a_prompt(max_output_tokens: int, max_model_len: int) -> str | None:
    if max_output_tokens < max_model_len:
        return None
    return f"expected less than rollout.max_model_len = {max_model_len} (a prompt needs room), got {max_output_tokens}"


def _lora_is_asked_for(lora: Mapping[str, Any] | LoraSettings | None, trainer_mode: str) -> str | None:
    if lora is None or trainer_mode == "lora":
        return None
    return f'has no effect with model.trainer_mode {show(trainer_mode)}: set that to "lora", or remove this'


def _trained_weights_are_float32(dtype: str, trainer_mode: str) -> str | None:
    if dtype == "float32" or trainer_mode == "lora":
        return None
    return (
        f"{show(dtype)} weights cannot be trained (steps smaller than 1/256 of a weight round away): set "
        '"float32", or model.trainer_mode = "lora", whose own weights are float32'
    )


def _evaluation_has_seeds(instances: int | None, seeds: tuple[int, ...] | list[int] | str | None) -> str | None:
    if instances is None and seeds is None:
        return 'required, but not given: a number of evaluation tasks (or evaluation.seeds, such as "0:100")'
    if instances is not None and seeds is not None and len(parse_seeds(seeds)) != instances:
        return f"expected the number of evaluation.seeds, which are {len(parse_seeds(seeds))}, got {instances}"
    return None


def _floor_of_the_rate_is_used(min_lr_fraction: float, schedule: str) -> str | None:
    default = OptimizerSettings.model_fields["min_lr_fraction"].default
    if schedule == "cosine" or min_lr_fraction == default:
        return None
    return f'has no effect with optimizer.schedule {show(schedule)}: set that to "cosine", or remove this'


def _cosine_has_room(
    schedule: str,
    num_warmup_steps: int,
    num_epochs: int,
    iterations_per_epoch: int,
    episodes_per_batch: int,
    batch_size: int,
    update_epochs: int,
) -> str | None:
    steps = num_optimizer_steps(
        num_epochs=num_epochs,
        iterations_per_epoch=iterations_per_epoch,
        episodes_per_batch=episodes_per_batch,
        batch_size=batch_size,
        update_epochs=update_epochs,
    )
    if schedule == "constant" or steps > num_warmup_steps:
        return None
    return (
        f"no step is left for the cosine: optimizer.num_warmup_steps = {num_warmup_steps}, and the run has {steps} "
        "optimizer steps"
    )


_RULES = (
    _Rule(("loss.unit", "algorithm.variety"), _unit_fits_variety),
    _Rule(("advantages.level", "algorithm.variety"), _level_fits_variety),
    _Rule(("rollout.episodes_per_batch", "training.group_size"), _batch_holds_whole_groups),
    _Rule(("training.batch_size", "rollout.episodes_per_batch"), _batch_splits_evenly),
    _Rule(("rollout.max_output_tokens", "rollout.max_model_len"), _output_leaves_room_for_a_prompt),
    _Rule(("training.lora", "model.trainer_mode"), _lora_is_asked_for),
    _Rule(("model.dtype", "model.trainer_mode"), _trained_weights_are_float32),
    _Rule(("evaluation.instances", "evaluation.seeds"), _evaluation_has_seeds),
    _Rule(("optimizer.min_lr_fraction", "optimizer.schedule"), _floor_of_the_rate_is_used),
    _Rule(
        (
            "optimizer.schedule",
            "optimizer.num_warmup_steps",
            "training.num_epochs",
            "training.iterations_per_epoch",
            "rollout.episodes_per_batch",
            "training.batch_size",
            "training.update_epochs",
        ),
        _cosine_has_room,
    ),
)
