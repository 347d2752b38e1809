"""The model card of an exported model: README.md with the hub's metadata, made from the run's records alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from gspo_gym.policy.export import SUMS, Weights, adapter_base
from gspo_gym.policy.manifest import read_manifest
from gspo_gym.policy.tiny import TINY_PREFIX
from gspo_gym.run.models import Model

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# The settings that say what was learned, and how; all others are in the run's config.toml.
_SETTINGS = (
    "algorithm.variety",
    "loss.unit",
    "loss.clip_low",
    "loss.clip_high",
    "advantages.level",
    "training.learning_rate",
    "training.batch_size",
    "training.group_size",
    "training.lora",
    "model.trainer_mode",
    "model.dtype",
    "rollout.max_turns",
    "rollout.max_output_tokens",
    "rollout.max_model_len",
    "evaluation.temperature",
    "run.seed",
)
_MERGED = {
    "lora": "A LoRA adapter, merged into its base in float32 and rounded once.",
    "nf4": "A LoRA adapter (QLoRA), merged into the NF4 weights that it was trained on, dequantized: merged into the "
    "original weights it would be another model.",
    "int8": "A LoRA adapter, merged into the int8 weights that it was trained on, dequantized. In training those also "
    "rounded their inputs to 8 bits, which these do not: logprobs agree less closely than for other bases.",
}


def model_card(model: Model, weights: Weights, *, version: str) -> str:
    """Return the card's text: YAML metadata for the hub, then the same for people.

    Args:
        model: that was exported.
        weights: as they were written.
        version: of this package.
    """
    config = model.config
    base, evaluation = _base(model), model.evaluation
    tags = ["gspo", "gspo-gym", "reinforcement-learning"]
    about: dict[str, Any] = {  # YAML values
        "library_name": "peft" if weights.layout == "peft" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags + (["lora"] if weights.layout == "peft" else []),
    }
    if base is not None and _HUB_ID.fullmatch(base) and not Path(base).exists():
        about["base_model"] = base
    name = re.sub(r"[^\w.-]+", "-", model.name)
    if evaluation is not None:
        about["model-index"] = [{"name": name, "results": [_result(part) for part in _parts(evaluation)]}]
    text = f"---\n{yaml.safe_dump(about, sort_keys=False, allow_unicode=True)}---\n\n# {name}\n\n"
    text += _opening(base, config, weights)
    if evaluation is not None:
        text += f"\n## Evaluation\n\n{_evaluation_table(evaluation)}"
        if weights.merged_from is not None or weights.dtype is not None:
            text += "\nMeasured in the run, before the weights were merged or rounded as above.\n"
    if config:
        rows = "".join(f"| `{key}` | {_shown(value)} |\n" for key, value in _settings(config))
        text += f"\n## Settings\n\n| key | value |\n|---|---|\n{rows}"
    return text + "\n## Lineage\n\n" + "".join(f"- {line}\n" for line in _lineage(model, weights, version))


def _opening(base: str | None, config: Mapping[str, Any], weights: Weights) -> str:
    text = f"A language model trained with GSPO by gspo-gym{_on(config)}.\n"
    if base is not None:
        kind = "random weights, drawn from its seed" if base.startswith(TINY_PREFIX) else "the base"
        text += f"It began as `{base}` ({kind}).\n"
    if weights.merged_from is not None:
        text += f"\n{_MERGED[weights.merged_from]}\n"
    dtype = "as in the checkpoint, byte for byte" if weights.dtype is None else weights.dtype
    return f"{text}\nWeights: {weights.layout} layout, dtype {dtype}.\n"


def _on(config: Mapping[str, Any]) -> str:
    rollout = config.get("rollout", {})
    others = [source["env_name"] for source in rollout.get("mixture", []) if "env_name" in source]
    names = [name for name in (rollout.get("env_name"), *others) if name]
    if not names:
        return ""
    options = rollout.get("env_config", {})
    told = " with " + ", ".join(f"{key} = {value!r}" for key, value in options.items()) if options else ""
    return f" on {', '.join(f'`{name}`' for name in names)}{told}"


def _base(model: Model) -> str | None:
    named = model.config.get("model", {})
    below: str | None = adapter_base(Path(model.base))
    base: str | None = named.get("base") or named.get("source")
    return base or below


def _parts(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the evaluation of each environment."""
    parts = evaluation.get("parts") or {}
    return [{"env_id": env_id, **part} for env_id, part in parts.items()] or [evaluation]


def _numbers(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float, list[float] | None]]:
    """Yield each measure's name, value and 95% interval."""
    for name, interval in (("success_rate", "success_interval"), ("mean_return", "mean_return_interval")):
        if evaluation.get(name) is not None:
            yield name, evaluation[name], evaluation.get(interval)


def _result(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    env_id = str(evaluation["env_id"])
    metrics = []
    for name, value, interval in _numbers(evaluation):
        arguments = {"num_episodes": evaluation["num_episodes"], "interval_95": interval}
        metrics.append({"type": name, "name": name.replace("_", " "), "value": value, "args": arguments})
    return {
        "task": {"type": "reinforcement-learning", "name": env_id},
        "dataset": {"type": env_id, "name": env_id, "args": {"seeds": _ranges(evaluation["seeds"])}},
        "metrics": metrics,
    }


def _evaluation_table(evaluation: Mapping[str, Any]) -> str:
    rows = []
    for part in _parts(evaluation):
        for name, value, interval in _numbers(part):
            told = "" if interval is None else f"{interval[0]:.6g} to {interval[1]:.6g}"
            where = f"{part['num_episodes']} episodes, seeds {_ranges(part['seeds'])}"
            rows.append(f"| {part['env_id']} | {name} | {value:.6g} | {told} | {where} |\n")
    head = "| environment | measure | value | 95% interval | of |\n|---|---|---|---|---|\n"
    failed = evaluation.get("num_failed")
    note = f"\n{failed} episodes failed for reasons of the machine and are left out.\n" if failed else ""
    return head + "".join(rows) + note


def _ranges(seeds: list[int]) -> str:
    """Return seeds in the notation of settings.

    >>> _ranges([0, 1, 2, 7])
    '0:3,7'
    """
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([seed, seed + 1])
    return ",".join(f"{first}:{end}" if end - first > 1 else str(first) for first, end in runs)


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _SETTINGS:
        section, _, name = key.partition(".")
        if (value := config.get(section, {}).get(name)) is not None:
            yield key, value


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items())
    return str(value)


def _lineage(model: Model, weights: Weights, version: str) -> Iterator[str]:
    if model.run is not None:
        manifest = read_manifest(Path(model.base))
        yield f"run `{model.run.absolute().name}` (id {manifest.run}), checkpoint of step {model.step}"
        origin = manifest.origin
        if origin.parent is not None:
            yield f"begun from the checkpoint of step {origin.parent.get('step')} of run {origin.parent.get('run')}"
        if origin.config is not None:
            yield f"resolved configuration: sha256 {origin.config}"
        if origin.git is not None:
            yield f"git revision: {origin.git}"
        if origin.packages:
            yield "packages: " + ", ".join(f"{package} {number}" for package, number in origin.packages.items())
        for name, entry in sorted(manifest.files.items()):
            if name.endswith("model.safetensors"):
                yield f"in the checkpoint: `{name}`, sha256 {entry['sha256']}"
    else:
        yield f"exported from `{model.base}`, which is no checkpoint of a run here"
    for name, digest in weights.sha256.items():
        yield f"here: `{name}`, sha256 {digest}"
    yield f"written by gspo-gym {version}; `sha256sum --check {SUMS}` verifies every file"
