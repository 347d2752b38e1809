"""`gspo-gym verify RUN --step N`: recompute a training step from the run's files, and name the first difference.

Files are read and compared here; `diagnosis/oracle.py` computes. Neither has code of the learner: transformers loads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gspo_gym.base.files import flat_items
from gspo_gym.base.tables import folded, table
from gspo_gym.cli.command_line import add_run
from gspo_gym.cli.verify_models import read_model, uses_reference, why_no_teacher
from gspo_gym.diagnosis.oracle import (
    SKIPPED,
    Bools,
    Floats,
    Indices,
    Model,
    State,
    StepRecords,
    batch_of,
    metrics_of,
    terms_of,
    units_of_loss,
)
from gspo_gym.diagnosis.oracle_feedback import Taught, taught_log_ratios
from gspo_gym.diagnosis.oracle_teacher import is_exact
from gspo_gym.errors import ConfigError, RecordError, UsageError
from gspo_gym.rollout.episode_files import episode_paths, read_episodes
from gspo_gym.run.feedback_files import feedback_path, read_feedback
from gspo_gym.run.folders import find_run
from gspo_gym.run.records import read_config, read_events, read_metrics
from gspo_gym.types import Trajectory

# The keys of the objective, and their values; None: any. Others, which a later version may add, are refused by name.
_KNOWN: Mapping[str, tuple[Any, ...] | None] = {
    "algorithm.variety": ("gspo", "gspo_token", "grpo"),
    "loss.unit": ("trajectory", "segment", "turn", "token"),
    "loss.surrogate": ("clip", "cispo", "sapo", "gmpo", "dppo", "vespo"),
    "loss.aggregation": (
        *("seq-mean-token-mean", "turn-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        *("grpo", "bnpo", "dr_grpo", "dapo"),
    ),
    **dict.fromkeys(("loss.norm_length", "loss.clip_low", "loss.clip_high", "loss.dual_clip", "loss.entropy_coef")),
    **dict.fromkeys(("loss.kl_coef", "loss.kl_clamp", "loss.kl_importance_weighted", "loss.sapo_temperatures")),
    "loss.kl_estimator": ("k1", "k2", "k3"),
    "advantages.level": ("trajectory", "turn", "auto"),
    **dict.fromkeys(("advantages.discount", "advantages.clip", "advantages.filter_eps", "correction.max_engine_gap")),
    "rewards.overlong": ("keep", "mask"),
    "correction.old_logprobs": ("recompute", "rollout"),
    "correction.level": ("none", "token", "turn", "trajectory"),
    "correction.mode": ("truncate", "mask"),
    **dict.fromkeys(("correction.low", "correction.high", "correction.off_policy_threshold")),
    "advantages.baseline": ("group", "leave_one_out", "batch", "running", "role", "none"),
    "advantages.scale": ("group", "batch", "running", "mean", "none"),
    "advantages.whiten": ("none", "tokens", "trajectories"),
    **dict.fromkeys(("advantages.kl_shaping_coef", "rewards.kl_coef", "rewards.kl_target", "rewards.clip")),
    **dict.fromkeys(
        f"distillation.{name}"
        for name in (
            *("teacher", "teacher_model", "teacher_tokenizer", "api_key_env"),
            *("coefficient", "baseline", "reward"),
        )
    ),
    "distillation.feedback": ("none", "environment", "judge", "sibling"),
    "distillation.divergence": ("sampled", "reverse_kl", "forward_kl"),
    "training.constant_groups": ("keep", "drop", "refill"),
    "training.step_rewards_mode": (None, "off", "env_sparse", "decision_stepwise"),
    "training.step_rewards_strategy": (None, "consistent", "per_achievement"),
    "training.event_rewards_kind": (None, "unique", "absolute"),
}
# Keys under which the weights can be replayed with some values only, and why; `--help` lists them.
_REPLAYED: Mapping[str, tuple[Any, ...]] = {
    "optimizer.kind": ("adamw", "adamw_fused"),
    "training.lora.dropout": (None, 0),
}
_WHY = {
    "optimizer.kind": "a moment near the middle of two 8-bit codes is rounded by the last digit of a gradient",
    "training.lora.dropout": "masks depend on how a batch was divided, which no file holds",
}
# Quantities that a rounding of the models may move.
_OF_MODELS = (
    *("old_logprob", "ref_logprob", "teacher_log_ratio", "teacher_kl", "teacher_divergence"),
    *("logprob", "entropy", "grad_norm"),
)
# How far the learner may be from us, in largest distances that were seen between two precisions of ours. Roundings
# grow up to sixfold with every step of AdamW, each program's by its own draw: runs of 0.1M weights at rates of 2e-3 and
# 1e-2 were up to 11 of these distances away from us.
_ALLOWED = 16


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
    in_part = "; ".join(
        f"{key} other than {' or '.join(str(value) for value in values if value is not None)}"
        for key, values in _REPLAYED.items()
    )
    parser.epilog = (
        "Exits 0 if all agrees, 1 for a difference, 2 if something could not be recomputed. "
        f"Without logprobs, entropy and gradients: {in_part}. "
        "Running baselines and scales, and a KL coefficient that adapts, are those of the newest checkpoint before the "
        "step, and of the episodes of the steps since."
    )
    add_run(parser)
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
        whole_steps, in_part = _verifiable(folder)
        if not in_part:
            raise RecordError(
                f"{folder}: no step has both tokens and episodes; run.log_tokens_every_n_iters writes them"
            )
        step = (whole_steps or in_part)[-1]
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
    # Files of older runs have no such keys.
    config = {"loss.surrogate": "clip", "distillation.divergence": "sampled", "distillation.feedback": "none"}
    config |= dict(flat_items(read_config(folder)))
    sections = {key.partition(".")[0] for key in _KNOWN} - {"algorithm", "training"}
    strange = [key for key in config if key.partition(".")[0] in sections and key not in _KNOWN]
    # A number in place of a name is known, too: the penalty of an overlong episode.
    named = ((key, config.get(key), names) for key, names in _KNOWN.items() if names is not None)
    strange += [f"{key} = {v!r}" for key, v, names in named if v not in names and not isinstance(v, float)]
    if strange:
        raise ConfigError(f"{folder}: verify does not know {', '.join(strange)}")
    result = _verify(folder, config, Verification(step), tolerance, in_float64=False)
    first = result.difference
    if first is not None and first.quantity in _OF_MODELS:
        result = _verify(folder, config, Verification(step), tolerance, in_float64=True)
    return result


def _verify(
    folder: Path, config: Mapping[str, Any], result: Verification, tolerance: float, *, in_float64: bool
) -> Verification:
    from gspo_gym.config.build.threads import computing_elsewhere, use_learners_threads  # loads torch

    records, metrics = _read_step(folder, config, result.step), _read_metrics(folder, result)
    try:
        state = _state_before(folder, config, result)
        with computing_elsewhere("cpu") as num_threads, np.errstate(all="ignore"):  # a damaged number is named only
            models = _read_models(folder, records, result, in_float64=in_float64)
            if models:
                longest = max(len(segment) for episode in records.episodes for segment in episode.segments)
                use_learners_threads(folder, models[0].modules["policy"], (1, longest), num_threads)
            taught = read_feedback(feedback_path(folder, result.step))
            _Comparison(records, models, taught, result, tolerance).follow(metrics, state)
    except _DifferenceError as error:
        (result.difference,) = error.args
    return result


class _Comparison:
    """Compares recorded with recomputed numbers, in order, and raises for the first difference.

    Each number is recomputed from recorded ones that were compared before. The first of `models` computes in float32,
    as the learner's: many layers add up its rounding, and where a gradient is near 0, it decides AdamW's step. A second
    one in float64 (of 16 bits in float32), which takes the same steps, says by how much. None: weights are not known.
    """

    def __init__(
        self,
        records: StepRecords,
        models: Sequence[Model],
        taught: Sequence[Taught],
        result: Verification,
        tolerance: float,
    ) -> None:
        self._taught = taught
        self._records, self._models, self._result, self._tolerance = records, models, result, tolerance
        self._config, self._columns, self._owner = records.config, records.columns, records.units["trajectory"]

    def follow(self, metrics: Mapping[str, float] | None, state: State) -> None:
        """Compare everything; without `metrics`, all but these. `state` is that before the step."""
        records, columns, every = self._records, self._columns, np.arange(len(self._owner))
        for name, array in (("rollout_logprob", "rollout_logprobs"), ("weight_version", "weight_version")):
            self._compare(name, columns[name], _token_values(records.episodes, array), every)
        for episode in records.episodes:
            for turn in (turn for turn in episode.turns if turn.reward is not None and turn.reward_terms):
                terms, name = sum(turn.reward_terms.values()), episode.trajectory_id
                self._compare("reward", turn.reward, terms, episode=name, turn=turn.index)
        if self._config["rewards.kl_coef"] > 0 and metrics is not None:
            self._compare("shaping/kl_coef", metrics.get("shaping/kl_coef", state.kl_coef), state.kl_coef)
        batch = batch_of(records, state)
        is_seen, is_counted = batch.is_trained[self._owner], batch.is_counted[self._owner]
        # Before advantages, which KL to the reference may be a part of.
        at = np.flatnonzero(is_seen & (columns["optimizer_step"].max(0)[self._owner] >= 0))
        if self._config["correction.old_logprobs"] == "rollout":
            self._compare("old_logprob", columns["old_logprob"][at], columns["rollout_logprob"][at], at)
        elif self._models:
            self._compare_scores("old_logprob", at, "policy")
        if self._models and "reference" in self._models[0].modules:
            self._compare_scores("ref_logprob", at, "reference")
        if self._models and "teacher_log_ratio" in columns and "teacher" in self._models[0].modules:
            scores = self._first([model.forward("policy", at, against="teacher") for model in self._models])
            for name, values in zip(("teacher_log_ratio", "teacher_kl"), scores, strict=True):
                if name in columns:
                    self._compare(name, columns[name][at], values, at, slack=self._result.rounding)
        if self._models and self._config.get("distillation.teacher") == "self":
            scores = self._first([taught_log_ratios(model, self._records, self._taught, at) for model in self._models])
            self._compare("teacher_log_ratio", self._of_teacher()[at], scores, at, slack=self._result.rounding)
        self._compare("advantage", columns["advantage"], np.where(is_counted, batch.advantages, np.nan), every)
        for epoch, updates in enumerate(columns["optimizer_step"][:, self._owner]):
            expected_updates = np.where(is_seen, np.maximum(updates, 0), np.where(is_counted, updates, -1))
            self._compare("optimizer_step", updates, expected_updates, every, epoch=epoch)
        fates, step_terms, norms = self._follow_updates(is_seen, int(is_counted.sum()), batch.fates[self._owner])
        unseen_at = np.flatnonzero(~is_seen)
        for name, value in (("logprob", np.nan), ("entropy", np.nan), ("ratio", np.nan), ("clip", 0.0), ("share", 0.0)):
            for epoch, column in enumerate(columns[name]):
                self._compare(name, column[unseen_at], np.full(len(unseen_at), value), unseen_at, epoch=epoch)
        self._compare("fate", columns["fate"], fates, every)
        if step_terms and metrics is not None:
            all_terms = {name: np.concatenate([part[name] for part in step_terms], -1) for name in step_terms[0]}
            for name, (number, size) in metrics_of(records, all_terms, norms).items():
                self._compare(name, metrics.get(name, np.nan), number, unit=size)

    def _follow_updates(
        self, is_seen: Bools, num_batch_tokens: int, fates: Indices
    ) -> tuple[Indices, list[dict[str, Floats]], Floats]:
        """Compare what each optimizer step computed, in order.

        Return [A] the fates, of which `fates` are those of tokens not in `is_seen`, and the terms and norms of the
        steps that were taken.
        """
        updates = self._columns["optimizer_step"][:, self._owner]
        norms = self._columns.get("grad_norm", np.zeros(int(updates.max(initial=-1)) + 1))  # older files have none
        are_taken = ~np.isnan(norms)
        step_terms: list[dict[str, Floats]] = []
        self._compare("number of optimizer steps", updates.max(initial=-1) + 1, len(norms))
        for update, is_taken in enumerate(are_taken.tolist()):
            epochs = np.flatnonzero((updates == update).any(1))
            self._compare("passes of an optimizer step", len(epochs), 1, update=update)
            epoch = int(epochs[0])
            place: dict[str, Any] = {"update": update, "epoch": epoch}
            at = np.flatnonzero((updates[epoch] == update) & is_seen)
            rows = {name: column[epoch][at] for name, column in self._columns.items() if column.shape == updates.shape}
            unit = units_of_loss(self._records, updates[epoch] == update, num_batch_tokens)[at]
            num_tokens = int((updates[epoch] == update).sum())
            if self._config.get("distillation.teacher") == "self":  # its own denominator: turns with feedback
                num_tokens = max(int(np.isfinite(self._of_teacher()[at]).sum()), 1)
            terms = terms_of(self._records, at, rows, unit, max(int(are_taken.sum()), 1), num_tokens)
            if self._models:
                model_values = self._first([model.forward("policy", at, terms["slopes"]) for model in self._models])
                names = ("logprob", "entropy", "teacher_divergence")[: len(model_values)]
                for name, values in zip(names, model_values, strict=True):
                    self._compare(name, rows[name], values, at, slack=self._result.rounding, **place)
            full_rows = {"correction": np.ones(len(at))} | rows
            for name in ("ratio", "correction", "clip"):
                self._compare(name, full_rows[name], terms[name], at, **place)
            self._compare("share", rows["share"], is_taken * terms["share"], at, terms["unit"], **place)
            fates[at] = np.minimum(fates[at], terms["fate"] if is_taken else SKIPPED)
            if is_taken:
                step_terms.append(terms)
            if self._models:
                norm = self._first([np.array(model.grad_norm()) for model in self._models])
                norm = norm if is_taken or np.isfinite(norm) else np.array(np.nan)  # so a skipped step is recorded
                self._compare("grad_norm", norms[update], norm, slack=self._result.rounding, **place)
                for model in self._models:
                    model.step(self._columns["learning_rate"][update], is_taken=is_taken)
        return fates, step_terms, norms[are_taken]

    def _of_teacher(self) -> Floats:  # NaN: not taught; a column of nothing else is left out
        return self._columns.get("teacher_log_ratio", np.full(len(self._owner), np.nan))

    def _compare_scores(self, name: str, at: Indices, module: str) -> None:
        scores = self._first([model.forward(module, at)[0] for model in self._models])
        self._compare(name, self._columns[name][at], scores, at, slack=self._result.rounding)

    def _first(self, model_values: Sequence[Floats]) -> Floats:
        """Return the first model's numbers, and note how far the other's are from them."""
        for values in model_values[1:]:
            distance = np.abs(model_values[0] - values) / np.maximum(1.0, np.abs(model_values[0]))
            self._result.rounding = max(self._result.rounding, _ALLOWED * float(distance.max(initial=0.0)))
        return model_values[0]

    def _compare(
        self,
        quantity: str,
        recorded: Any,
        recomputed: Any,
        at: Indices | None = None,
        unit: Any = 1.0,
        slack: float = 0.0,
        **place: Any,
    ) -> None:  # Any: numbers, or arrays of them
        """Compare numbers of the tokens `at`; up to `unit` a difference counts by it, and `slack` is allowed more."""
        recorded, recomputed = np.atleast_1d(recorded).astype(float), np.atleast_1d(recomputed).astype(float)
        same = (recorded == recomputed) | (np.isnan(recorded) & np.isnan(recomputed))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(recorded - recomputed) / np.maximum(unit, np.abs(recomputed)))
        gap = np.where(np.isnan(gap), np.inf, gap)
        count, largest = self._result.compared.get(quantity, (0, 0.0))
        self._result.compared[quantity] = count + len(gap), max(largest, float(gap.max(initial=0.0)))
        for k in np.flatnonzero(gap > self._tolerance + slack)[:1]:
            if at is not None:
                token = int(at[k])
                i = int(self._owner[token])
                place |= {"episode": self._records.episodes[i].trajectory_id, "turn": int(self._records.turn[token])}
                place["token"] = token - int(np.flatnonzero(self._owner == i)[0])
            pair = float(recorded[k]), float(recomputed[k])
            raise _DifferenceError(Difference(self._result.step, quantity, *pair, **place))


def _checkpoint(folder: Path, step: int) -> Path:  # the weights before the step
    return folder / "checkpoints" / f"step_{step - 1:06d}"


def _verifiable(folder: Path) -> tuple[list[int], list[int]]:
    """Return the steps that can be verified whole, and at least in part."""
    episode_stems = {path.name.partition(".")[0] for path in episode_paths(folder, "step_")}
    in_part = sorted(int(p.stem[5:]) for p in (folder / "tokens").glob("step_*.safetensors") if p.stem in episode_stems)
    return [step for step in in_part if (_checkpoint(folder, step) / "manifest.json").exists()], in_part


def _state_before(folder: Path, config: Mapping[str, Any], result: Verification) -> State:
    """Return what the step inherits from those before.

    It is that of the newest checkpoint before the step, as the weights are: its digests are compared, and a long run
    need not be read from its beginning. From there on it is recomputed from the episodes of the steps since.

    Raises:
        RecordError: these are not recorded; names the steps, and what records them.
    """
    state, first = State(kl_coef=config["rewards.kl_coef"]), 1
    has_returns = bool({"running", "role"} & {config["advantages.baseline"], config["advantages.scale"]})
    if not has_returns and config.get("rewards.kl_target") is None:
        return state
    steps = [step for step in range(result.step, 0, -1) if (_checkpoint(folder, step) / "manifest.json").exists()]
    if steps:
        first, checkpoint = steps[0], _checkpoint(folder, steps[0])
        _compare_digests(folder, checkpoint, result)
        try:
            values = json.loads((checkpoint / "resume" / "state.json").read_text(encoding="utf-8"))
            running, beta = values["trainer"]["running"], values["counters"].get("shaping.kl_coef", state.kl_coef)
            names = ("count", "mean", "squared_deviations", "magnitude")
            number, mean, squares, size = (float(running[name]) for name in names)
            state = State(number, mean, squares, size, float(beta), tuple(running.get("role_means", {}).items()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{checkpoint / 'resume' / 'state.json'}: is damaged: {error!r}") from error
    elif config.get("run.restore"):
        raise RecordError(
            f"{folder}: a restored run's first checkpoint is needed; a large training.keep_last keeps all"
        )
    for step in range(first, result.step):
        try:
            records = _read_step(folder, config, step, needs_tokens=config.get("rewards.kl_target") is not None)
            state = batch_of(records, state).state
        except RecordError as error:
            raise RecordError(
                f"advantages of step {result.step} go by all returns, or by the KL, since the checkpoint before step "
                f"{first}: {error}; training.checkpoint_every_n_iters = 1 with training.keep_last, or "
                "run.log_tokens_every_n_iters = 1 and run.log_episodes_every_n_iters = 1, record what is needed"
            ) from error
    return state


def _read_step(folder: Path, config: Mapping[str, Any], step: int, *, needs_tokens: bool = True) -> StepRecords:
    """Return the records of a step; without its tokens those from which only its returns can be recomputed."""
    name = f"step_{step:06d}"
    path, paths = folder / "tokens" / f"{name}.safetensors", episode_paths(folder, f"{name}.")
    is_known = path.exists() or not needs_tokens
    if not is_known or not paths:
        missing = "episodes" if is_known else "tokens"
        raise RecordError(f"{folder}: no {missing} of step {step} are recorded; verifiable: {_verifiable(folder)[1]}")
    episodes = read_episodes(paths[0])
    ids, counts = [episode.trajectory_id for episode in episodes], [episode.num_actions for episode in episodes]
    if not path.exists():
        if any((event["kind"], event["step"]) == ("uncommitted", step) for event in read_events(folder)):
            raise RecordError(f"{folder}: no tokens of step {step} are recorded, and some were of uncommitted weights")
        columns = {name: np.zeros(sum(counts)) for name in ("fate", "old_logprob", "ref_logprob")}
        return StepRecords(config, episodes, columns | {"optimizer_step": np.zeros((1, len(ids)))}, **_arrays(episodes))
    num_tokens, columns = _read_tokens(path)
    if num_tokens != dict(zip(ids, counts, strict=True)):
        raise RecordError(f"{path}: its episodes or their lengths are not those of {paths[0].name}")
    return StepRecords(config, episodes, columns, **_arrays(episodes))


def _read_tokens(path: Path) -> tuple[dict[str, int], dict[str, Floats]]:
    """Return the numbers of tokens by trajectory, and the columns, of each token but for `optimizer_step`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            columns = {each: file.get_tensor(each).astype(np.float64) for each in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        names = json.loads(metadata["trajectories"])
        if metadata["schema"] == "1":
            return {name: length for name, (_, length) in names.items()}, columns
        counts = columns.pop("num_tokens").astype(np.int64)
        for name in metadata["by_trajectory"].split():
            columns[name] = np.repeat(columns[name], counts, axis=-1)
        ids = [before + after for before, each in names for after in each]
        return dict(zip(ids, counts.tolist(), strict=True)), columns
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise RecordError(f"{path}: no file of tokens: {error}") from error


def _read_metrics(folder: Path, result: Verification) -> dict[str, Any] | None:
    metrics = next((line for line in read_metrics(folder) if line["step"] == result.step), None)
    if metrics is None:
        result.missing.append("the metrics: metrics.jsonl has no line of the step")
    return metrics


def _arrays(episodes: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the arrays of a `StepRecords` over the sampled tokens."""
    segments = [segment for episode in episodes for segment in episode.segments]
    lengths = [int(segment.action_mask.sum()) for segment in segments]
    owners = [i for i, episode in enumerate(episodes) for _ in episode.segments]
    turn, trajectory = _token_values(episodes, "turn_index").astype(np.int64), np.repeat(owners, lengths)
    units = {"trajectory": trajectory, "segment": np.repeat(np.arange(len(segments)), lengths)}
    units |= {"turn": trajectory * (turn.max(initial=0) + 1) + turn, "token": np.arange(len(turn))}
    return {"units": units, "turn": turn}


def _token_values(episodes: Sequence[Trajectory], name: str) -> Floats:
    """Return [A] an array of the segments, of sampled tokens."""
    segments = [segment for episode in episodes for segment in episode.segments]
    parts = [getattr(segment, name)[segment.action_mask].astype(np.float64) for segment in segments]
    return np.concatenate([np.zeros(0), *parts])


def _compare_digests(folder: Path, checkpoint: Path, result: Verification) -> None:
    try:
        files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{checkpoint / 'manifest.json'}: is damaged: {error!r}") from error
    for name, entry in files.items():
        digest = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        if digest != entry["sha256"]:
            where = f"SHA-256 of {(checkpoint / name).relative_to(folder)}"
            raise _DifferenceError(Difference(result.step, where, entry["sha256"], digest))
    result.compared["SHA-256 of the checkpoint's files"] = len(files), 0.0


def _read_models(folder: Path, records: StepRecords, result: Verification, *, in_float64: bool) -> list[Model]:
    """Return the models before the step, or add to `result.missing` why they are not known."""
    checkpoint = _checkpoint(folder, result.step)
    config = records.config
    strange = {key: values for key, values in _REPLAYED.items() if config.get(key) not in values}
    reasons = [
        f"with {key} = {config[key]!r}, {_WHY[key]}; of a run with {key} = {values[-1]!r} they can be"
        for key, values in strange.items()
    ]
    if config["model.trainer_mode"] == "qlora" and str(config["model.base"]).startswith("tiny:"):
        reasons.append(f"no file holds model.base = {config['model.base']!r}; of one that is a folder they can be")
    if not (checkpoint / "manifest.json").exists():
        reasons.append(f"there is no {checkpoint}; steps that have one: {_verifiable(folder)[0] or 'none'}")
    if "grad_norm" not in records.columns:
        reasons.append("an earlier version recorded the tokens, without learning rates")
    if reasons:
        result.missing += [f"logprobs, entropy and gradients: {reason}" for reason in reasons]
        return []
    _compare_digests(folder, checkpoint, result)
    dtype, in_float64 = config["model.dtype"], in_float64 and config["model.trainer_mode"] != "qlora"
    # In 16 bits a row's numbers depend on those beside it: the distance to float32 says by how much.
    dtypes = (dtype, "float32") if dtype != "float32" else ("float32", "float64") if in_float64 else ("float32",)
    models = [read_model(checkpoint, records, dtype) for dtype in dtypes]
    if uses_reference(config) and "reference" not in models[0].modules:
        result.missing.append(f"logprobs of the reference: {checkpoint} has no weights of one")
    if config.get("distillation.teacher", "self") != "self" and "teacher" not in models[0].modules:
        why = why_no_teacher(config)
        result.missing.append(f"logprobs of the teacher: {why}")
        if is_exact(config):  # then each token's gradient is of all that the teacher says
            result.missing.append(f"logprobs, entropy and gradients: of the teacher's divergence, and {why}")
            return []
    return models


def _text(folder: Path, result: Verification, tolerance: float) -> str:
    rows = [(name, str(count), f"{gap:.1e}") for name, (count, gap) in result.compared.items()]
    lines = [*folded(f"{folder}, step {result.step}"), table(("compared", "numbers", "largest difference"), rows)]
    lines += [f"not recomputed: {quantity}" for quantity in result.missing]
    if result.rounding:
        apart = result.rounding / _ALLOWED
        lines += [f"rounding: two precisions are {apart:.1e} apart, {_ALLOWED} times that is allowed"]
    first = result.difference
    if first is None:
        return "\n".join([*lines, f"{'what was compared' if result.missing else 'all'} agrees to {tolerance:g}"])
    places = {"step": first.step, "optimizer step": first.update, "epoch": first.epoch, "episode": first.episode}
    places |= {"turn": first.turn, "token": first.token}
    place = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
    lines += [f"first difference: {first.quantity}", f"  at: {place}"]
    return "\n".join([*lines, f"  recorded {first.recorded}, recomputed {first.recomputed}"])
