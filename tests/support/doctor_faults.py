"""Faults planted, one at a time, in an otherwise good run, and the recorded runs that have them.

`python tests/support/doctor_faults.py [NAME ...]` plays the runs of `FAULTS` (a quickstart of 40 small steps, about ten
seconds each) and writes what the doctor reads of them to tests/unit/diagnosis/data/NAME.json. Every fixture says which
command-line overrides made it; `good` is the run without a fault, `good_seed_1` the same under another run seed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_quickstart import GENTLE

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.diagnosis.view import RunView
from gspo_gym.errors import GymError
from gspo_gym.run.records import read_view

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "unit" / "diagnosis" / "data"

BASE = (
    "training.iterations_per_epoch=32",
    "training.batch_size=8",
    "rollout.episodes_per_batch=32",
    "rollout.max_concurrent_rollouts=32",
    "training.checkpoint_every_n_iters=32",
    "evaluation.seeds=0:64",
    "evaluation.every_n_iters=16",
    "warmup.num_episodes=512",
    *GENTLE,
)
# What the doctor looks at; times and counts of the machine would only make fixtures large.
_GROUPS = ("batch", "advantage", "loss", "ratio", "clip", "kl", "policy", "optim", "rollout", "correction", "shaping")


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault.

    Attributes:
        overrides: what is changed in the good run.
        cause: the check that must come first in the doctor's findings.
        key: the configuration key that it must name first.
    """

    overrides: tuple[str, ...]
    cause: str
    key: str


def _fault(cause: str, key: str, *overrides: str) -> Fault:
    return Fault(overrides, cause, key)


_MEANT = 'algorithm.acknowledge=["truncated_sampling"]'
FAULTS: Mapping[str, Fault] = {
    "lr_1": _fault("steps_too_large", "training.learning_rate", "training.learning_rate=1"),
    "lr_0.1": _fault("steps_too_large", "training.learning_rate", "training.learning_rate=0.1"),
    "lr_1e-9": _fault("steps_too_small", "training.learning_rate", "training.learning_rate=1e-9"),
    "clip_1e-9": _fault("clip_is_shut", "loss.clip_low", "loss.clip_low=1e-9", "loss.clip_high=1e-9"),
    "temperature_5": _fault("sampling_is_uniform", "rollout.temperature", "rollout.temperature=5"),
    "temperature_0.05": _fault("sampling_is_greedy", "rollout.temperature", "rollout.temperature=0.05"),
    "top_k_1": _fault("sampling_is_greedy", "rollout.top_k", "rollout.top_k=1", _MEANT),
    "top_p_0.01": _fault("sampling_is_greedy", "rollout.top_p", "rollout.top_p=0.01", _MEANT),
    "kl_coef_100": _fault("kl_term_dominates", "loss.kl_coef", "loss.kl_coef=100"),
    "kl_reward_100": _fault("kl_term_dominates", "rewards.kl_coef", "rewards.kl_coef=100"),
    "entropy_coef_10": _fault("entropy_bonus_dominates", "loss.entropy_coef", "loss.entropy_coef=10"),
    "update_epochs_50": _fault("steps_too_large", "training.update_epochs", "training.update_epochs=50"),
    "weight_decay_100": _fault("weights_decay", "optimizer.weight_decay", "optimizer.weight_decay=100"),
    "evaluation_temperature_5": _fault(
        "training_is_not_evaluation", "evaluation.temperature", "evaluation.temperature=5"
    ),
    "max_turns_1": _fault("episodes_are_cut_off", "rollout.max_turns", "rollout.max_turns=1"),
    "reward_clip_0": _fault("returns_are_clipped", "rewards.clip", "rewards.clip=1e-9"),
    "one_guess_of_99": _fault(
        "groups_are_constant",
        "training.constant_groups",
        "rollout.env_config={ low = 1, high = 99, max_guesses = 1, inconsistent_penalty = 0, illegal_penalty = 0 }",
    ),
    "advantage_clip_0": _fault("steps_too_small", "advantages.clip", "advantages.clip=1e-12"),
    "everything_masked": _fault(
        "episodes_are_cut_off", "rollout.max_turns", "rollout.max_turns=1", 'rewards.overlong="mask"'
    ),
    "correction_masks_all": _fault(
        "few_effective_samples",
        "correction.mode",
        'correction.level="token"',
        'correction.mode="mask"',
        "correction.low=0.9999999",
        "correction.high=1.0000001",
    ),
}
GOOD: Mapping[str, tuple[str, ...]] = {"good": (), "good_seed_1": ("run.seed=1",)}


def play(overrides: tuple[str, ...], folder: Path) -> RunView:
    """Train the quickstart with these overrides in `folder`, and return what the doctor sees of it."""
    config = load_config(
        str(ROOT / "configs" / "quickstart.toml"),
        [*BASE, f"run.folder={folder}", "model.label=run", *overrides],
    )
    try:
        run_training(config)
    except GymError as error:
        print(f"  ended with {type(error).__name__}: {error}", file=sys.stderr)
    return read_view(folder / "run")


def to_json(run: RunView, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run as a fixture holds it; metrics with four digits."""
    kept = [event for event in run.events if event["kind"] in ("evaluation", "no_update", "selection", "failed")]
    names = ["step", *sorted({name for line in run.metrics for name in line if name.partition("/")[0] in _GROUPS})]
    return {
        "made_by": ["python -m gspo_gym.train configs/quickstart.toml", *BASE, *overrides],
        "config": run.config,
        "names": names,
        "rows": [[_short(line.get(name)) for name in names] for line in run.metrics],
        "events": kept,
        "status": run.status,
        "outcomes": run.outcomes,
        "reasons": run.reasons,
    }


def _short(value: float | None) -> float | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def load(name: str) -> RunView:
    """Return a recorded run."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    metrics = [
        {metric: value for metric, value in zip(recorded["names"], row, strict=True) if value is not None}
        for row in recorded["rows"]
    ]
    fields = {field: recorded[field] for field in ("config", "events", "status", "outcomes", "reasons")}
    return RunView(metrics=metrics, **fields)


def main(names: list[str]) -> None:
    """Record the named runs, or all."""
    runs = {**GOOD, **{name: fault.overrides for name, fault in FAULTS.items()}}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or runs:
        with tempfile.TemporaryDirectory() as folder:
            recorded = to_json(play(runs[name], Path(folder)), runs[name])
        (FOLDER / f"{name}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
