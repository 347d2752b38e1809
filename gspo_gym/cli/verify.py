"""`gspo-gym verify RUN --step N`: recompute a training step from the run's files, and name the first difference.

Nothing here or in `run/verify.py` is the learner's: the model is loaded by transformers, and AdamW (arXiv 1711.05101,
algorithm 2) is taken by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gspo_gym.base.files import flat_items
from gspo_gym.errors import ConfigError, RecordError, UsageError
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.run.records import read_config, read_metrics
from gspo_gym.run.registry import find_run
from gspo_gym.run.verify import Floats, Indices, SecondPath, StepRecords
from gspo_gym.types import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

# The keys of the objective, and the values that the second path knows; None: all. Others are refused by name.
_KNOWN: Mapping[str, tuple[Any, ...] | None] = {
    "algorithm.method": ("policy_gradient", "ppo"),
    "algorithm.variety": ("gspo", "gspo_token", "grpo"),
    "loss.unit": ("trajectory", "segment", "turn", "token"),
    "loss.aggregation": (
        *("seq-mean-token-mean", "turn-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        *("grpo", "bnpo", "dr_grpo", "dapo"),
    ),
    **dict.fromkeys(("loss.norm_length", "loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.entropy_coef")),
    **dict.fromkeys(("loss.kl_coef", "loss.kl_clamp", "loss.kl_importance_weighted")),
    "loss.kl_estimator": ("k1", "k2", "k3"),
    "advantages.level": ("trajectory", "turn"),
    "advantages.baseline": ("group", "leave_one_out", "batch", "none"),
    "advantages.scale": ("group", "batch", "none"),
    "advantages.whiten": ("none",),
    "advantages.kl_shaping_coef": (0,),
    **dict.fromkeys(("advantages.discount", "advantages.clip", "advantages.filter_eps")),
    "rewards.overlong": ("keep", "mask", "penalize"),
    "rewards.kl_coef": (0,),
    **dict.fromkeys(("rewards.clip", "rewards.overlong_penalty", "rewards.kl_horizon")),
    "correction.old_logprobs": ("recompute", "rollout"),
    "correction.level": ("none", "token", "turn", "trajectory"),
    "correction.mode": ("truncate", "mask"),
    **dict.fromkeys(("correction.low", "correction.high", "correction.off_policy_threshold")),
    "correction.max_engine_gap": None,
    "training.step_rewards_mode": (None, "off", "env_sparse"),
    "training.constant_groups": ("keep", "drop", "refill"),
}
# Those under which the weights can be replayed.
_REPLAYED: Mapping[str, tuple[Any, ...]] = {
    "model.trainer_mode": ("full", "lora"),
    "model.dtype": ("float32",),
    "optimizer.kind": ("adamw", "adamw_fused"),
    "training.score_truncated": (False,),
    "training.lora.dropout": (None, 0),
    "reference.placement": (None, "none", "shared"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that is recorded and recomputed differently; None: the quantity has no such place.

    Attributes:
        update: optimizer step of the training step, from 0. epoch: pass over the batch, from 0.
        token: from 0, among the episode's sampled tokens.
    """

    step: int
    quantity: str
    recorded: float | str
    recomputed: float | str
    update: int | None = None
    epoch: int | None = None
    episode: str | None = None
    turn: int | None = None
    token: int | None = None


class _DifferenceError(Exception):
    """Raised for the first difference, its only argument."""


@dataclass(slots=True)
class Verification:
    """What was compared in a step.

    Attributes:
        compared: by quantity, how many numbers were compared, and their largest difference.
        difference: the first one; None: all agree. Nothing after it is compared.
        missing: what could not be recomputed, and why.
        rounding: where it exceeds the tolerance, the allowance for it in logprobs, entropy and gradient norms; else 0.
    """

    step: int
    compared: dict[str, tuple[int, float]] = field(default_factory=dict)
    difference: Difference | None = None
    missing: list[str] = field(default_factory=list)
    rounding: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: all agrees, 1: something differs, 2: what was compared agrees, but not all could be."""
        return 1 if self.difference is not None else 2 if self.missing else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify`."""
    parser.add_argument("run_name", metavar="RUN", help="its folder, its name in runs/, or the start of its id")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where runs are looked for (runs)")
    parser.add_argument("--step", type=int, metavar="N", help="a training step (the last one that can be verified)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of numbers up to 1; relative above (1e-5)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run_command)


def run_command(arguments: argparse.Namespace) -> int:
    """Print what was compared; return 0 if all agrees, 1 for a difference, 2 if something could not be recomputed."""
    if not 0 < arguments.tolerance < 1:
        raise UsageError(f"--tolerance: expected a number between 0 and 1, got {arguments.tolerance}")
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = find_run(arguments.run_name, arguments.folder)
    step = arguments.step
    if step is None:
        whole, in_part = _verifiable(folder)
        if not in_part:
            raise RecordError(
                f"{folder}: no step has both tokens and episodes; run.log_tokens_every_n_iters writes them"
            )
        step = (whole or in_part)[-1]
    result = verify_step(folder, step, tolerance=arguments.tolerance)
    if arguments.json:
        values = json.dumps({"run": str(folder), **asdict(result)})
        print(json.dumps(json.loads(values, parse_constant=str), indent=2))  # NaN, for which JSON has no name, as text
    else:
        print(_text(folder, result, arguments.tolerance))
    return result.exit_code


def verify_step(folder: Path, step: int, *, tolerance: float = 1e-5) -> Verification:
    """Recompute a step of a run.

    Raises:
        ConfigError: the run uses what is not known here; names it.
        RecordError: tokens or episodes of the step are not recorded, or a file is damaged.
    """
    config = dict(flat_items(read_config(folder)))
    sections = {key.partition(".")[0] for key in _KNOWN} - {"algorithm", "training"}
    strange = [key for key in config if key.partition(".")[0] in sections and key not in _KNOWN]
    if strange := [*strange, *_others(config, {key: values for key, values in _KNOWN.items() if values is not None})]:
        raise ConfigError(f"{folder}: verify does not know {', '.join(strange)}")
    result = _verify(folder, config, Verification(step), tolerance, measures_rounding=False)
    found = result.difference
    if found is not None and found.quantity in ("old_logprob", "ref_logprob", "logprob", "entropy", "grad_norm"):
        result = _verify(folder, config, Verification(step), tolerance, measures_rounding=True)
    return result


def _verify(
    folder: Path, config: Mapping[str, Any], result: Verification, tolerance: float, *, measures_rounding: bool
) -> Verification:
    records = _read_step(folder, config, result)
    try:
        records = _with_weights(folder, records, result, measures_rounding=measures_rounding)
        with np.errstate(all="ignore"):  # a damaged number is named, not warned of
            SecondPath(records, _Comparison(records, result, tolerance)).follow()
    except _DifferenceError as found:
        (result.difference,) = found.args
    if records.weights is not None:
        result.rounding = records.weights.rounding
    return result


def _others(config: Mapping[str, Any], known: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [f"{key} = {config.get(key)!r}" for key, values in known.items() if config.get(key) not in values]


class _Comparison:
    """The function that compares, and raises for the first difference; see `SecondPath`."""

    def __init__(self, records: StepRecords, result: Verification, tolerance: float) -> None:
        self._records, self._result, self._tolerance = records, result, tolerance

    def __call__(
        self,
        quantity: str,
        recorded: Any,
        recomputed: Any,
        at: Indices | None = None,
        unit: Any = 1.0,
        slack: float = 0.0,
        **place: Any,
    ) -> None:  # Any: numbers, or arrays of them
        recorded, recomputed = np.atleast_1d(recorded).astype(float), np.atleast_1d(recomputed).astype(float)
        same = (recorded == recomputed) | (np.isnan(recorded) & np.isnan(recomputed))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(recorded - recomputed) / np.maximum(unit, np.abs(recomputed)))
        gap = np.where(np.isnan(gap), np.inf, gap)
        count, largest = self._result.compared.get(quantity, (0, 0.0))
        self._result.compared[quantity] = count + len(gap), max(largest, float(gap.max(initial=0.0)))
        for k in np.flatnonzero(gap > self._tolerance + slack)[:1]:
            if at is not None:
                token, records = int(at[k]), self._records
                i = int(records.units["trajectory"][token])
                place |= {"episode": records.episodes[i].trajectory_id, "turn": int(records.turn[token])}
                place["token"] = token - int(records.starts[i])
            found = float(recorded[k]), float(recomputed[k])
            raise _DifferenceError(Difference(self._result.step, quantity, *found, **place))


def _checkpoint(folder: Path, step: int) -> Path:  # the weights before the step
    return folder / "checkpoints" / f"step_{step - 1:06d}"


def _verifiable(folder: Path) -> tuple[list[int], list[int]]:
    """Return the steps that can be verified whole, and at least in part."""
    played = {path.name.partition(".")[0] for path in episode_paths(folder, "step_")}
    in_part = sorted(int(p.stem[5:]) for p in (folder / "tokens").glob("step_*.safetensors") if p.stem in played)
    return [step for step in in_part if (_checkpoint(folder, step) / "manifest.json").exists()], in_part


def _read_step(folder: Path, config: Mapping[str, Any], result: Verification) -> StepRecords:
    from safetensors import SafetensorError, safe_open

    name = f"step_{result.step:06d}"
    path, paths = folder / "tokens" / f"{name}.safetensors", episode_paths(folder, f"{name}.")
    if not path.exists() or not paths:
        missing = "tokens" if not path.exists() else "episodes"
        raise RecordError(
            f"{folder}: no {missing} of step {result.step} are recorded; verifiable: {_verifiable(folder)[1]}"
        )
    episodes = read_episodes(paths[0])
    try:
        with safe_open(path, framework="np") as file:
            columns = {each: file.get_tensor(each).astype(np.float64) for each in file.keys()}  # noqa: SIM118
            spans = json.loads(file.metadata()["trajectories"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RecordError(f"{path}: no file of tokens: {error}") from error
    starts = np.cumsum([0, *(episode.num_actions for episode in episodes)])
    told = {e.trajectory_id: [int(a), e.num_actions] for e, a in zip(episodes, starts[:-1], strict=True)}
    if told != spans:
        raise RecordError(f"{path}: its episodes or their lengths are not those of {paths[0].name}")
    metrics = next((line for line in read_metrics(folder) if line["step"] == result.step), None)
    if metrics is None:
        result.missing.append("the metrics: metrics.jsonl has no line of the step")
    return StepRecords(config, episodes, columns, metrics, starts, weights=None, **_arrays(episodes))


def _arrays(episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the arrays of a `StepRecords` over the sampled tokens."""
    owners = [i for i, episode in enumerate(episodes) for _ in episode.segments]
    segments = [segment for episode in episodes for segment in episode.segments]
    lengths = [int(segment.action_mask.sum()) for segment in segments]

    def joined(name: str) -> Floats:
        parts = [getattr(segment, name)[segment.action_mask].astype(np.float64) for segment in segments]
        return np.concatenate([np.zeros(0), *parts])

    turn, trajectory = joined("turn_index").astype(np.int64), np.repeat(owners, lengths)
    units = {"trajectory": trajectory, "segment": np.repeat(np.arange(len(segments)), lengths)}
    units |= {"turn": trajectory * (turn.max(initial=0) + 1) + turn, "token": np.arange(len(turn))}
    logprobs, versions = joined("rollout_logprobs"), joined("weight_version")
    return {"units": units, "turn": turn, "rollout_logprob": logprobs, "weight_version": versions}


def _with_weights(folder: Path, records: StepRecords, result: Verification, *, measures_rounding: bool) -> StepRecords:
    """Return the records with the weights before the step, or add to `result.missing` why they are not known."""
    checkpoint = _checkpoint(folder, result.step)
    reasons = [f"with {each}" for each in _others(records.config, _REPLAYED)]
    base = str(records.config.get("model.base"))
    if records.config["model.trainer_mode"] == "lora" and base.startswith("tiny:"):
        reasons.append(f"transformers cannot load the frozen model.base = {base!r}")
    if not (checkpoint / "manifest.json").exists():
        reasons.append(f"there is no {checkpoint}; steps that have one: {_verifiable(folder)[0] or 'none'}")
    if "grad_norm" not in records.columns:
        reasons.append("an earlier version recorded the tokens, without learning rates")
    elif np.isnan(records.columns["grad_norm"]).any():
        reasons.append("an optimizer step was not finite, and skipped")
    if reasons:
        result.missing += [f"logprobs, entropy and gradients: {reason}" for reason in reasons]
        return records
    try:
        files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{checkpoint / 'manifest.json'}: is damaged: {error!r}") from error
    for name, told in files.items():
        digest = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        if digest != told["sha256"]:
            where = f"SHA-256 of {(checkpoint / name).relative_to(folder)}"
            raise _DifferenceError(Difference(result.step, where, told["sha256"], digest))
    result.compared["SHA-256 of the checkpoint's files"] = len(files), 0.0
    weights = Weights(
        checkpoint, records, twin=Weights(checkpoint, records, is_double=True) if measures_rounding else None
    )
    if records.config["loss.kl_coef"] > 0 and weights.reference is None:
        result.missing.append(f"logprobs of the reference: {checkpoint} has no weights of one")
    return replace(records, weights=weights)


class Weights:
    """The model of a checkpoint, its reference, and AdamW; moved by `step`.

    All of it is in float32, as the learner's: many layers add up its rounding, and where a gradient is nearly 0, it
    decides AdamW's step. A twin in float64 that takes the same steps says by how much.

    Attributes:
        reference: None: the checkpoint has none.
        rounding: twice the largest distance from the twin so far; 0 without one.
    """

    def __init__(
        self, checkpoint: Path, records: StepRecords, *, is_double: bool = False, twin: Weights | None = None
    ) -> None:
        from safetensors.torch import load_file

        self._twin, self.rounding = twin, 0.0
        saved = load_file(checkpoint / "resume" / "learner.safetensors")
        self._config = records.config
        self._moments = {name: value for name, value in saved.items() if name.startswith("optimizer.")}
        self._policy, self.reference = _load(checkpoint, is_adapted=True), None
        if is_double:
            self._policy.double()
            self._moments = {name: value.double() for name, value in self._moments.items()}
        held = {name.removeprefix("reference."): v for name, v in saved.items() if name.startswith("reference.")}
        if records.config["loss.kl_coef"] > 0 and (held or records.config["model.trainer_mode"] == "lora"):
            self.reference = _load(checkpoint, is_adapted=bool(held))  # nothing held: the model without its adapter
            for name, parameter in self.reference.named_parameters():
                parameter.data = held.get(name, parameter.data)
            if is_double:
                self.reference.double()
        self._segments = [segment for episode in records.episodes for segment in episode.segments]
        self._row = records.units["segment"]
        positions = [np.flatnonzero(segment.action_mask) for segment in self._segments]
        self._position = np.concatenate([np.zeros(0, np.int64), *positions])

    def score(self, at: Indices) -> Floats:
        """Return the logprobs of the tokens `at`."""
        found = self._forward(self._policy, at, None)[0]
        if self._twin is not None:
            self._are_apart(found, self._twin.score(at))
        return found

    def score_reference(self, at: Indices) -> Floats:
        """Return the reference's logprobs of the tokens `at`."""
        found = self._forward(self.reference, at, None)[0]
        if self._twin is not None:
            self._are_apart(found, self._twin.score_reference(at))
        return found

    def backward(self, at: Indices, slope: Floats, entropy_slope: Floats) -> tuple[Floats, Floats]:
        """Return logprobs and entropies, after adding up gradients by these slopes of the loss in both."""
        found = self._forward(self._policy, at, (slope, entropy_slope))
        if self._twin is not None:
            for mine, other in zip(found, self._twin.backward(at, slope, entropy_slope), strict=True):
                self._are_apart(mine, other)
        return found

    def grad_norm(self) -> float:
        """Return the L2 norm of all gradients."""
        norm = float(sum(float((p.grad**2).sum()) for p in self._policy.parameters() if p.grad is not None) ** 0.5)
        if self._twin is not None:
            self._are_apart(np.array([norm]), np.array([self._twin.grad_norm()]))
        return norm

    def _are_apart(self, mine: Floats, other: Floats) -> None:
        distance = np.abs(mine - other) / np.maximum(1.0, np.abs(mine))
        self.rounding = max(self.rounding, 2 * float(distance.max(initial=0.0)))

    def step(self, *, rate: float, norm: float) -> None:
        """Take a step of AdamW on the gradients, cut to optimizer.max_grad_norm, and forget them."""
        import torch

        if self._twin is not None:
            self._twin.step(rate=rate, norm=self._twin.grad_norm())
        (beta1, beta2), decay = self._config["optimizer.betas"], self._config["optimizer.weight_decay"]
        scale = min(1.0, self._config["optimizer.max_grad_norm"] / (norm + 1e-6))
        for name, parameter in self._policy.named_parameters():
            if parameter.grad is None:
                continue
            zero = torch.zeros_like(parameter.grad)
            keys = [f"optimizer.{what}.{name}" for what in ("exp_avg", "exp_avg_sq", "step")]
            mean, square, count = (self._moments.get(key, zero) for key in keys)
            count, gradient = count.max() + 1, parameter.grad * scale
            mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
            self._moments |= zip(keys, (mean, square, count), strict=True)
            if parameter.dim() >= 2:  # not norms, not biases
                parameter.data -= rate * decay * parameter.data
            root = (square / (1 - beta2**count)).sqrt() + self._config["optimizer.eps"]
            parameter.data -= rate * mean / (1 - beta1**count) / root
            parameter.grad = None

    def _forward(self, model: Any, at: Indices, slopes: tuple[Floats, Floats] | None) -> tuple[Floats, Floats]:
        """Row by row: no padding, no parts."""
        import torch

        found = np.zeros((2, len(at)))
        for row in np.unique(self._row[at]):
            here = np.flatnonzero(self._row[at] == row)
            position = torch.from_numpy(self._position[at[here]])
            ids = torch.from_numpy(self._segments[row].token_ids[: int(position.max()) + 1].astype(np.int64))
            with torch.set_grad_enabled(slopes is not None):
                logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, position - 1]
                every: Tensor = torch.log_softmax(logits / self._config["rollout.temperature"], -1)
                both = every.gather(-1, ids[position, None])[:, 0], -(every.exp() * every).sum(-1)
                if slopes is not None:
                    given = (torch.from_numpy(slope[here]).to(logits) for slope in slopes)
                    torch.autograd.backward(both, list(given))
            for values, mine in zip(found, both, strict=True):
                values[here] = mine.detach().numpy()
        return found[0], found[1]


def _load(checkpoint: Path, *, is_adapted: bool) -> Any:  # Any: transformers and peft are untyped
    import torch
    from transformers import AutoModelForCausalLM

    folder, adapter = str(checkpoint), checkpoint / "adapter_config.json"
    if adapter.exists():
        folder = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RecordError(f"{folder}: transformers cannot load it: {error}") from error
    if not (adapter.exists() and is_adapted):
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, checkpoint, is_trainable=True).eval()


def _text(folder: Path, result: Verification, tolerance: float) -> str:
    lines = [f"{folder}, step {result.step}", f"{'compared':32}{'numbers':>9}  largest difference"]
    lines += [f"{name:32}{count:9d}  {gap:.1e}" for name, (count, gap) in result.compared.items()]
    lines += [f"not recomputed: {each}" for each in result.missing]
    if result.rounding:
        lines += [f"rounding: float32 and float64 are {result.rounding / 2:.1e} apart, twice that is allowed"]
    found = result.difference
    if found is None:
        return "\n".join([*lines, f"{'what was compared' if result.missing else 'all'} agrees to {tolerance:g}"])
    places = {"step": found.step, "optimizer step": found.update, "epoch": found.epoch, "episode": found.episode}
    places |= {"turn": found.turn, "token": found.token}
    place = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    lines += [f"first difference: {found.quantity}", f"  at: {place}"]
    return "\n".join([*lines, f"  recorded {found.recorded}, recomputed {found.recomputed}"])
