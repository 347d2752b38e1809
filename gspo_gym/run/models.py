"""The models of runs: find the checkpoint that a name means, read its facts from the records, write its model card.

A card is README.md with the hub's metadata, made from the run's records alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gspo_gym.errors import CheckpointError, ConfigError, UnknownNameError
from gspo_gym.policy.bases import CARD, SMOLLM2, SUMS, TINY_PREFIX, adapter_base, check_base, layout_of, parse_hub_id
from gspo_gym.policy.checkpoint_folder import CheckpointFolder
from gspo_gym.policy.manifest import RetentionSettings, read_manifest, step_of
from gspo_gym.run.folders import find_run, run_folders
from gspo_gym.run.records import read_config, read_events, read_run_id, read_teacher, teacher_text

if TYPE_CHECKING:
    from gspo_gym.policy.export import Weights

LATEST, BEST = "latest", "best"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_MERGED = {
    "lora": "A LoRA adapter, merged into its base in float32 and rounded once.",
    "nf4": "A LoRA adapter (QLoRA), merged into the NF4 weights that it was trained on, dequantized: merged into the "
    "original weights it would be another model.",
    "int8": "A LoRA adapter, merged into the int8 weights that it was trained on, dequantized. In training those also "
    "rounded their inputs to 8 bits, which these do not: logprobs agree less closely than for other bases.",
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model found by name.

    Attributes:
        base: for `load_policy`: a checkpoint's folder, or the name as it was given.
        run: the folder of the run that trained it; None: no run did.
        step: of the checkpoint; None without a run.
        evaluation: the run's evaluation at this step, as in its event (JSON); None: there was none.
    """

    base: str
    run: Path | None = None
    step: int | None = None
    evaluation: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """Return a name for cards and lists."""
        return self.base if self.run is None else f"{self.run.absolute().name}@{self.step}"

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the run's settings (JSON values, hence Any); {} without a run.

        Raises:
            RecordError: the run's config.toml cannot be read.
        """
        return {} if self.run is None else read_config(self.run)

    @property
    def dtype(self) -> str:
        """Return the dtype in which the run loads weights; float32 without a run."""
        return str(self.config.get("model", {}).get("dtype", "float32"))

    def to_json(self) -> dict[str, Any]:
        """Return the facts about the model, with the evaluation's totals only."""
        folder = Path(self.base).expanduser()
        about: dict[str, Any] = {"name": self.name, "path": self.base, "run": None, "step": self.step}
        if folder.is_dir():
            about |= {"layout": layout_of(folder), "adapter_base": adapter_base(folder)}
        if self.run is not None:
            manifest = read_manifest(folder)
            about |= {"run": str(self.run), "run_id": manifest.run, "base": self.config.get("model", {}).get("base")}
            about["bytes"] = sum(entry["bytes"] for entry in manifest.files.values())
        evaluation = None if self.evaluation is None else without_rows(self.evaluation)
        return about | {"evaluation": evaluation}


def find_model(name: str, *, runs: Path = Path("runs")) -> Model:
    """Return the model that `name` means.

    A run (as in `folders.find_run`) and `RUN@latest` mean its newest checkpoint, `RUN@best` the one with the best
    evaluation (the first of equal ones), `RUN@20` that of step 20. A checkpoint's folder
    and any name for `load_policy` mean themselves. A bare word is a run or a folder here, and never looked for on the
    hub.

    Raises:
        UnknownNameError: there is no such run, step or model.
        CheckpointError: the run has no complete checkpoint, or for "best" none that was evaluated, or the checkpoint is
            another step's or another run's.
    """
    if name.startswith(TINY_PREFIX) or name == SMOLLM2:
        check_base(name)
        return Model(name)
    label, at, step_name = name.rpartition("@")
    try:
        return _of_run(find_run(name, runs), LATEST)
    except ConfigError as error:
        no_run = str(error)
    if Path(name).expanduser().is_dir():
        return _of_folder(name)
    if not Path(name).expanduser().is_file():
        hub = parse_hub_id(name)
        try:
            if at:
                return _of_run(find_run(label, runs), step_name)
        except ConfigError as error:
            if hub is None:
                raise UnknownNameError(str(error)) from None
        # A misspelt run is not looked for on the hub, which may have a model of that name.
        if "/" not in name or get_close_matches(name, [path.name for path in runs.glob("*")]):
            raise UnknownNameError(
                f"{no_run}; a model is a folder, a GGUF file, {SMOLLM2}, {TINY_PREFIX}NAME, or OWNER/NAME of the hub"
            )
    check_base(name)
    return Model(name)


def list_models(runs: Path) -> list[tuple[Model, frozenset[str]]]:
    """Return the complete checkpoints of all runs in a folder, each marked "latest" and "best" where that applies.

    Raises:
        ConfigError: there is no such folder.
        RecordError, CheckpointError: the records of a run are damaged.
    """
    if not runs.is_dir():
        raise ConfigError(f"{runs}: there is no such folder")
    models = []
    for folder in sorted(run_folders(runs)):
        steps, best = _store(folder).steps(), _best_of(folder)
        for step in steps:
            marks = {LATEST: step == steps[-1], BEST: step == best}
            models.append((_at_step(folder, step), frozenset(mark for mark, holds in marks.items() if holds)))
    return models


def without_rows(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation, and its parts, without single episodes (JSON values, hence Any)."""
    totals = {key: value for key, value in evaluation.items() if key not in ("rows", "parts")}
    parts = {name: without_rows(part) for name, part in evaluation.get("parts", {}).items()}
    return {**totals, "parts": parts} if parts else totals


def _of_folder(name: str) -> Model:
    """Return the model in a folder: a run's checkpoint, if the folder lies where checkpoints do, or other weights."""
    folder = Path(name).expanduser()
    run, step = folder.absolute().parent.parent, step_of(folder)
    if step is not None and folder.absolute().parent.name == "checkpoints" and (run / "config.toml").is_file():
        return _at_step(run, step)
    if (checkpoints := folder / "checkpoints").is_dir():  # what is left of a run whose records are gone
        return Model(str(CheckpointFolder(checkpoints, run_id=read_run_id(folder)).newest()))
    check_base(name)
    return Model(name)


def _of_run(folder: Path, step_name: str) -> Model:
    store = _store(folder)
    step = _step_called(step_name, folder, store.steps())
    store.at(step)  # the run's own, or an error
    return _at_step(folder, step)


def _step_called(step_name: str, folder: Path, steps: Sequence[int]) -> int:
    if not steps:
        raise CheckpointError(f"{folder}: there is no complete checkpoint yet")
    if step_name == LATEST:
        return steps[-1]
    if step_name == BEST and (best := _best_of(folder)) is not None:
        return best
    if step_name == BEST:
        raise CheckpointError(
            f"{folder}: none of its checkpoints (steps {list(steps)}) was evaluated; take @{steps[-1]}"
        )
    if not step_name.isdecimal() or int(step_name) not in steps:
        raise UnknownNameError(
            f"{folder}@{step_name}: expected {LATEST}, {BEST} or a step with a checkpoint, which are {list(steps)}"
        )
    return int(step_name)


def _at_step(folder: Path, step: int) -> Model:
    rows = (event["data"] for event in read_events(folder) if (event["kind"], event["step"]) == ("evaluation", step))
    *_, last = (None, *rows)  # of an evaluation that was made again after a resume, the last
    return Model(str(folder / "checkpoints" / f"step_{step:06d}"), folder, step, last)


def _best_of(folder: Path) -> int | None:
    """Return the step with the best evaluation, by the run's keep_best settings; None if none was evaluated."""
    best = _store(folder).best()
    return None if best is None else step_of(best)


def _store(folder: Path) -> CheckpointFolder:
    training = Model(str(folder), folder).config.get("training", {})
    retention = RetentionSettings(**{key: training[key] for key in RetentionSettings.model_fields if key in training})
    return CheckpointFolder(folder / "checkpoints", run_id=read_run_id(folder), retention=retention)


# The settings that say what was learned, and how; all others are in the run's config.toml.
_SETTINGS = (
    *("algorithm.variety", "loss.unit", "loss.surrogate", "loss.clip_low", "loss.clip_high", "advantages.level"),
    *(f"distillation.{name}" for name in ("teacher", "feedback", "divergence", "coefficient", "baseline", "reward")),
    *("training.learning_rate", "training.batch_size", "training.group_size", "training.lora"),
    *("model.trainer_mode", "model.dtype", "rollout.max_turns", "rollout.max_output_tokens", "rollout.max_model_len"),
    *("evaluation.temperature", "run.seed"),
)


def model_card(model: Model, weights: Weights, *, version: str) -> str:
    """Return the card's text: YAML metadata for the hub, then the same for people.

    Args:
        model: that was exported.
        weights: as they were written.
        version: of this package.
    """
    config = model.config
    base, evaluation = _base(model), model.evaluation
    tags = ["gspo-gym"] if model.run is None else ["gspo-gym", *_methods(config)]
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
    text += _opening(model, base, weights)
    if evaluation is not None:
        text += f"\n## Evaluation\n\n{_evaluation_table(evaluation)}"
        if weights.merged_from is not None or weights.dtype is not None:
            text += "\nMeasured in the run, before the weights were merged or rounded as above.\n"
    if config:
        rows = "".join(f"| `{key}` | {value} |\n" for key, value in _settings(config))
        text += f"\n## Settings\n\n| key | value |\n|---|---|\n{rows}"
    return text + "\n## Lineage\n\n" + "".join(f"- {line}\n" for line in _lineage(model, weights, version))


def _methods(config: Mapping[str, Any]) -> list[str]:
    """Return what a run learned by, as tags of the hub."""
    teacher = config.get("distillation") or {}
    learns_from_rewards = not teacher or teacher.get("reward", True)
    return ["gspo", "reinforcement-learning"] * learns_from_rewards + ["distillation"] * bool(teacher)


def _opening(model: Model, base: str | None, weights: Weights) -> str:
    if model.run is None:
        text = f"The weights of `{model.base}`, written by gspo-gym. No run here trained them.\n"
    else:
        how = "trained with GSPO" if "gspo" in _methods(model.config) else "distilled"
        text = f"A language model {how} by gspo-gym{_on(model.config)}.\n"
        if base is not None:
            kind = "random weights, drawn from its seed" if base.startswith(TINY_PREFIX) else "the base"
            text += f"It began as `{base}` ({kind}).\n"
    if weights.merged_from is not None:
        text += f"\n{_MERGED[weights.merged_from]}\n"
    dtype = "as in the checkpoint, byte for byte" if weights.dtype is None else weights.dtype
    return f"{text}\nWeights: {weights.layout} layout, dtype {dtype}.\n"


def lineage_in_card(folder: Path) -> str | None:
    """Return what an exported folder's card says of the run that trained the model; None: it is of no run."""
    path = folder / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.search(r"^## Lineage\n\n- (run `.+` \(id \S+\), checkpoint of step \d+)$", text, re.MULTILINE)
    return None if match is None else match[1]


def _on(config: Mapping[str, Any]) -> str:
    rollout = config.get("rollout", {})
    mixture_names = [source["env_name"] for source in rollout.get("mixture", []) if "env_name" in source]
    names = [name for name in (rollout.get("env_name"), *mixture_names) if name]
    if not names:
        return ""
    options = ", ".join(f"{key} = {value!r}" for key, value in rollout.get("env_config", {}).items())
    return f" on {', '.join(f'`{name}`' for name in names)}{options and f' with {options}'}"


def _base(model: Model) -> str | None:
    section = model.config.get("model", {})
    base: str | None = section.get("base") or section.get("source") or adapter_base(Path(model.base))
    return base


def _parts(evaluation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = evaluation.get("parts") or {}
    return [{"env_id": env_id, **part} for env_id, part in parts.items()] or [evaluation]


def _numbers(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, float, list[float] | None]]:
    """Yield each measure's name, value and 95% interval."""
    for name, interval in (("success_rate", "success_interval"), ("mean_return", "mean_return_interval")):
        if evaluation.get(name) is not None:
            yield name, evaluation[name], evaluation.get(interval)
    for rate in evaluation.get("pass_rates", ()):
        yield f"pass@{rate['k']}", rate["pass_at"], rate["pass_at_interval"]
        yield f"pass^{rate['k']}", rate["pass_hat"], rate["pass_hat_interval"]


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
            ends = "" if interval is None else f"{interval[0]:.6g} to {interval[1]:.6g}"
            where = f"{part['num_episodes']} episodes, seeds {_ranges(part['seeds'])}"
            rows.append(f"| {part['env_id']} | {name} | {value:.6g} | {ends} | {where} |\n")
    head = "| environment | measure | value | 95% interval | of |\n|---|---|---|---|---|\n"
    num_failed = evaluation.get("num_failed")
    note = f"\n{num_failed} episodes failed for reasons of the machine and are left out.\n" if num_failed else ""
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


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _SETTINGS:
        section, _, name = key.partition(".")
        value = config.get(section, {}).get(name)
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} = {item}" for key, item in value.items())
        if value is not None:
            yield key, str(value)


def _lineage(model: Model, weights: Weights, version: str) -> Iterator[str]:
    if model.run is not None:
        manifest = read_manifest(Path(model.base))
        yield f"run `{model.run.absolute().name}` (id {manifest.run}), checkpoint of step {model.step}"
        origin = manifest.origin
        if origin.parent is not None:
            yield f"begun from the checkpoint of step {origin.parent.get('step')} of run {origin.parent.get('run')}"
        if (teacher := read_teacher(model.run)) is not None:
            yield f"taught by {teacher_text(teacher)}"
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
