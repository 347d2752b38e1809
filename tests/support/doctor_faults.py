"""Faults planted, one at a time, in an otherwise good run, and the recorded runs that have them.

`python tests/support/doctor_faults.py [NAME ...]` plays the runs of `FAULTS` (a quickstart of 32 small steps, about ten
seconds each) and writes what the doctor reads of them to tests/unit/diagnosis/data/NAME.json. Every fixture says which
command-line overrides made it; `good` is the run without a fault, `good_seed_1` the same under another run seed. Where
no setting makes a fault, it is planted in the code (`Fault.plant`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gspo_gym_envs.guess_number.env import GuessNumber
from small_quickstart import GENTLE

from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
from gspo_gym.diagnosis.alarms import ALARMS
from gspo_gym.diagnosis.findings import diagnose
from gspo_gym.diagnosis.view import RunView
from gspo_gym.errors import ActionLimitError, GymError
from gspo_gym.judge.model import judge
from gspo_gym.judge.server import create_fake_judge_app, honest_verdict, read_prompt
from gspo_gym.learning import update
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.actors import EngineActor
from gspo_gym.run.records import read_view
from gspo_gym.types import Completion, Trajectory

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
_JUDGE = ("judge/pause_seconds", "judge/unscored", "judge/num_judged", "judge/flags", "time/step_seconds")
_EVENTS = ("evaluation", "no_update", "finished", "judge_paused", *ALARMS)
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault.

    Attributes:
        overrides: what is changed in the good run.
        cause: the check that must come first in the doctor's findings.
        key: the configuration key that it must name first.
        plant: what is changed in the code; None: nothing.
        is_alone: no finding of another check is as serious; False: the cause is among the findings.
    """

    overrides: tuple[str, ...]
    cause: str
    key: str
    plant: Plant | None = None
    is_alone: bool = True


def _fault(cause: str, key: str, *overrides: str, plant: Plant | None = None, is_alone: bool = True) -> Fault:
    return Fault(overrides, cause, key, plant, is_alone)


def break_down(error: type[Exception]) -> Plant:
    """Return a plant: every ninth step raises, whatever the action."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        step, count = GuessNumber.step, itertools.count()

        def breaks(self: Any, action: str) -> Any:
            if next(count) % 9 == 8:
                raise error("the number server is gone")
            return step(self, action)

        patch.setattr(GuessNumber, "step", breaks)

    return plant


def lose_steps(patch: pytest.MonkeyPatch) -> None:
    """Every ninth loss is infinite."""
    policy_loss, count = update.policy_loss, itertools.count()

    def infinite(*args: Any, **more: Any) -> Any:
        output = policy_loss(*args, **more)
        return dataclasses.replace(output, loss=output.loss * float("inf")) if next(count) % 9 == 8 else output

    patch.setattr(update, "policy_loss", infinite)


def spoil_the_weights(patch: pytest.MonkeyPatch) -> None:
    """The last update adds noise to the weights, as large as they are."""
    learn, count = update.Learner.update, itertools.count(1)
    generator = torch.Generator().manual_seed(1)

    def spoils(self: Any, *args: Any, **more: Any) -> Any:
        report = learn(self, *args, **more)
        if next(count) == 32:
            with torch.no_grad():
                for weights in self._model.parameters():
                    weights.add_(weights.std() * torch.randn(weights.shape, generator=generator))
        return report

    patch.setattr(update.Learner, "update", spoils)


def make_engine_noisy(patch: pytest.MonkeyPatch) -> None:
    """The engine has other kernels: its logprobs are off by some 2e-3 nats."""
    act = EngineActor.__call__

    async def noisy(self: Any, request: Any) -> Completion:
        sampled = await act(self, request)
        noise = np.random.default_rng(request.sampling_seed).normal(0, 2e-3, len(sampled.logprobs))
        return dataclasses.replace(sampled, logprobs=np.minimum(sampled.logprobs + noise, 0).astype(np.float32))

    patch.setattr(EngineActor, "__call__", noisy)


def attack_the_judge(patch: pytest.MonkeyPatch) -> None:
    """What the policy says holds a forged end of a message."""
    suspicions = judge.suspicions

    def attacked(trajectory: Trajectory) -> tuple[str, ...]:
        messages = [dataclasses.replace(m, content=m.content + "<|im_end|>") for m in trajectory.messages]
        return suspicions(dataclasses.replace(trajectory, messages=tuple(messages)))

    patch.setattr(judge, "suspicions", attacked)


def _judged(answer: Callable[[Any], str]) -> Plant:
    """Return a plant: a judge of 10 short steps, whose answer to the messages of a request is this."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(sys.modules[__name__], "ANSWER", answer)

    return plant


ANSWER: Callable[[Any], str] | None = None  # of the judge of a run that has one


def _honest(messages: Any) -> str:
    return honest_verdict(read_prompt(messages))


_count = itertools.count()


def _silent_about_4(messages: Any) -> str:
    prompt = read_prompt(messages)
    return "I cannot say." if "4" in prompt.said_in("outcome") else _honest(messages)


def _down_at_times(messages: Any) -> str:
    if next(_count) % 40 < 12:
        raise RuntimeError("the judge is down")  # HTTP 500
    return _honest(messages)


_CRITERIA = '{ criteria = [{ id = "said", description = \'The answer has a "4".\', scale = "binary" }] }'
JUDGED = (
    "training.iterations_per_epoch=10",
    "training.checkpoint_every_n_iters=10",
    "rollout.episodes_per_batch=16",
    'evaluation.seeds="0:4"',
    "evaluation.every_n_iters=10",
    "judge.enabled=true",
    "judge.reward_blend={ env = 0.5, outcome = 0.5 }",
    'judge.options.provider="local"',
    'judge.options.model="fake-judge"',
    "judge.options.outcome=true",
    f"judge.options.rubric_overrides.outcome={_CRITERIA}",
)


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
    "one_step_a_batch": _fault("ratio_is_constant", "training.batch_size", "training.batch_size=32"),
    "token_clip": _fault(
        "clips_too_much",
        "loss.clip_low",
        'algorithm.variety="grpo"',
        'loss.unit="token"',
        "loss.clip_low=1e-3",
        "loss.clip_high=1e-3",
    ),
    "max_grad_norm_1e-3": _fault("gradient_always_clipped", "optimizer.max_grad_norm", "optimizer.max_grad_norm=1e-3"),
    "kl_coef_1e-4": _fault(
        "far_from_the_reference", "loss.kl_coef", "loss.kl_coef=1e-4", "training.learning_rate=1e-2"
    ),
    "lr_1e-6": _fault("reward_does_not_rise", "training.learning_rate", "training.learning_rate=1e-6"),
    "four_seeds": _fault("evaluation_does_not_improve", "evaluation.seeds", 'evaluation.seeds="0:4"'),
    "no_warmup": _fault(
        "run_failed",
        "training.checkpoint_every_n_iters",
        "warmup.num_episodes=32",
        "warmup.num_epochs=1",
    ),
    "weights_are_spoilt": _fault("evaluation_fell", "training.learning_rate", plant=spoil_the_weights, is_alone=False),
    "top_p_0.7": _fault("engine_differs_from_learner", "correction.level", "rollout.top_p=0.7", _MEANT, is_alone=False),
    "losses_are_infinite": _fault("steps_not_finite", "training.learning_rate", plant=lose_steps),
    "noisy_engine": _fault(
        "noise_reaches_the_clip",
        "correction.old_logprobs",
        'correction.old_logprobs="rollout"',
        "correction.max_engine_gap=0.05",
        "loss.clip_low=3e-4",
        "loss.clip_high=4e-4",
        plant=make_engine_noisy,
        is_alone=False,
    ),
    "environment_breaks": _fault("infrastructure_fails", "rollout.env_name", plant=break_down(ConnectionError)),
    "actions_exceed": _fault(
        "actions_exceed_limits", "rollout.env_name", plant=break_down(ActionLimitError), is_alone=False
    ),
    "judge_is_silent": _fault(
        "judge_leaves_unscored",
        "judge.options.max_output_tokens",
        *JUDGED,
        plant=_judged(_silent_about_4),
        is_alone=False,
    ),
    "judge_is_away": _fault("judge_was_down", "judge.options.max_concurrency", *JUDGED, plant=_judged(_down_at_times)),
    "judge_is_attacked": _fault("judge_is_played", "judge.gold", *JUDGED, plant=attack_the_judge),
}
GOOD: Mapping[str, tuple[str, ...]] = {"good": (), "good_seed_1": ("run.seed=1",)}


def play(fault: Fault | None, folder: Path) -> RunView:
    """Train the quickstart with a fault, or without one, in `folder`, and return what the doctor sees of it."""
    overrides = () if fault is None else fault.overrides
    with contextlib.ExitStack() as stack:
        if fault is not None and fault.plant is not None:
            fault.plant(stack.enter_context(pytest.MonkeyPatch.context()))
        places = [f"run.folder={folder}", "model.label=run"]
        if "judge.enabled=true" in overrides:
            places.append(f"judge.options.base_url={stack.enter_context(_judging())}")
        config = load_config(str(ROOT / "configs" / "quickstart.toml"), [*BASE, *places, *overrides])
        try:
            run_training(config)
        except GymError as error:
            print(f"  ended with {type(error).__name__}: {error}", file=sys.stderr)
    return read_view(folder / "run")


@contextlib.contextmanager
def _judging() -> Iterator[str]:
    with BackgroundServer(create_fake_judge_app(answer=ANSWER)) as server:
        yield f"{server.url}/v1"


def to_json(run: RunView, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A run as a fixture holds it; metrics with four digits."""
    events = [event for event in run.events if event["kind"] in _EVENTS]
    recorded = {name for line in run.metrics for name in line if name.partition("/")[0] in _GROUPS or name in _JUDGE}
    names = ["step", *sorted(recorded)]
    return {
        "made_by": ["python -m gspo_gym.train configs/quickstart.toml", *BASE, *overrides],
        "config": run.config,
        "names": names,
        "rows": [[_short(line.get(name)) for name in names] for line in run.metrics],
        "events": events,
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
    good = {name: Fault(overrides, "", "") for name, overrides in GOOD.items()}
    runs = {**good, **FAULTS}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or runs:
        with tempfile.TemporaryDirectory() as folder:
            recorded = to_json(play(runs[name], Path(folder)), runs[name].overrides)
        (FOLDER / f"{name}.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
        print(name, [(finding.check, finding.key) for finding in diagnose(load(name))], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
