"""What a step is said to take, before it is taken."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo_gym.config.build import estimate as estimating
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.estimate import Estimate, StepShape, estimate_step
from gspo_gym.config.build.rollouts import build_training_player
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.engine.base import SamplingParams
from gspo_gym.policy.load import load_policy

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.toml"
FACTOR = 1.5  # within which an estimate is right
# Short and long answers, few turns and many, several passes over a batch, rows of a thousand tokens.
SHAPES: dict[str, tuple[str, ...]] = {
    "quickstart": (),
    "frozen_lake": (),
    "tic_tac_toe": ("training.update_epochs=2", "warmup.num_epochs=4"),
    "countdown": ("warmup.num_epochs=2",),
    "homestead": ("warmup.num_epochs=4",),
}
_FEWER = ("training.iterations_per_epoch=3", "evaluation.seeds=0:4", "evaluation.every_n_iters=3")
_RUN = """
import sys
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import load_config
run_training(load_config(sys.argv[1], sys.argv[2:]))
print("peak", next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""

Make = Callable[[Mapping[str, Any]], RunConfig]


def estimated(config: RunConfig, *, then: Callable[[Any, Any], object] | None = None) -> Estimate | None:
    """The estimate of a run that is built and not begun; `then` looks at policy and engine afterwards."""

    async def body() -> Estimate | None:
        policy = build.build_policy(config)
        player = await build_training_player(config, policy)

        async def here(work: Callable[[], Any], /) -> Any:
            return work()

        try:
            estimate = await estimate_step(config, player, here)
            if then is not None:
                result = then(policy, player.engine)
                if asyncio.iscoroutine(result):
                    await result
            return estimate
        finally:
            await player.close()

    return asyncio.run(body())


def test_a_teacher_in_this_process_takes_the_memory_of_its_weights_and_one_elsewhere_none(make: Make) -> None:
    policy = load_policy("tiny:qwen3-64").model
    shape = StepShape(episodes=8, turns=2, tokens=40, sampled=8, is_bound=False, play_seconds=0.0)

    def peak(changes: Mapping[str, Any]) -> int:
        num_bytes = estimating._peak_bytes(make(changes), policy, shape, 0)
        assert num_bytes is not None
        return num_bytes

    alone = peak({})
    teacher = sum(parameter.nbytes for parameter in load_policy("tiny:qwen3-256").model.parameters())
    assert peak({"distillation.teacher": "tiny:qwen3-256"}) - alone == teacher > 2**20
    assert peak({"distillation.teacher": "http://127.0.0.1:9/v1"}) == alone
    halved = {"model.dtype": "bfloat16", "model.trainer_mode": "lora"}
    assert peak({**halved, "distillation.teacher": "tiny:qwen3-256"}) - peak(halved) == teacher // 2


def test_tokens_are_those_of_the_player_that_the_policy_imitates() -> None:
    estimate = estimated(load_config(QUICKSTART))
    assert estimate is not None
    # Of 8 numbers, whatever was heard: a fourth guess is made with (7/8)^3. A guess is a digit and the end of the turn.
    turns = 1 + 7 / 8 + (7 / 8) ** 2 + (7 / 8) ** 3
    assert estimate.sampled_tokens / (192 * turns * 2) == pytest.approx(1, abs=0.2)  # 32 episodes were played
    # A message is its text and 4 tokens (begin, role, line, end and line: the end is sampled in an answer): the first
    # has 19 bytes, "higher" and "lower" 6 or 5, and an answer 4 around what is sampled.
    tokens = (19 + 5) + (turns - 1) * (5.5 + 5) + turns * (2 + 4)
    assert estimate.tokens / (192 * tokens) == pytest.approx(1, abs=0.2)
    assert not estimate.is_bound


def test_without_a_warm_up_every_answer_may_fill_its_limit(make: Make) -> None:
    estimate = estimated(make({"rollout.max_output_tokens": 7}))
    assert estimate is not None
    assert estimate.is_bound
    assert str(estimate).startswith("a step: at most ")
    # At least one answer of 7 tokens in each of 64 episodes, at most 4.
    assert 64 * 7 <= estimate.sampled_tokens <= 64 * 7 * 4


def test_nothing_is_said_of_what_a_task_app_plays(make: Make) -> None:
    config = make({"services.task_url": "http://127.0.0.1:9"})
    assert asyncio.run(estimate_step(config, None, None)) is None  # type: ignore[arg-type]  # neither is looked at


def test_weights_gradients_and_later_samples_stay_as_they_were(make: Make) -> None:
    config = make({"model.base": "tiny:qwen3-64@3"})
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(), seed=5)
    before = {name: p.clone() for name, p in build.build_policy(config).model.named_parameters()}
    drawn: list[list[int]] = []

    async def look(policy: Any, engine: Any) -> None:
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is None, name
            assert torch.equal(parameter, before[name]), name
        drawn.append((await engine.generate([72, 105], sampling)).token_ids.tolist())

    state = torch.get_rng_state()
    estimated(config, then=look)
    assert torch.equal(torch.get_rng_state(), state)
    fresh = asyncio.run(_sampled(config, sampling))
    assert drawn == [fresh]


async def _sampled(config: RunConfig, sampling: SamplingParams) -> list[int]:
    player = await build_training_player(config, build.build_policy(config))
    try:
        return (await player.engine.generate([72, 105], sampling)).token_ids.tolist()
    finally:
        await player.close()


@pytest.mark.parametrize(
    ("estimate", "text"),
    [
        (
            Estimate(12_345, 678, False, 4.2, 7.9, 3 * 2**30),
            "a step: about 12,000 tokens, of which 680 are sampled; 12 s (4.2 s of playing); "
            "3.0 GiB of memory at its peak",
        ),
        (Estimate(90, 9, True, None, None, None), "a step: at most 90 tokens, of which 9 are sampled"),
        (
            Estimate(90, 9, False, 60, 240, None),
            "a step: about 90 tokens, of which 9 are sampled; 5 min (60 s of playing)",
        ),
    ],
)
def test_an_estimate_says_no_more_digits_than_it_knows(estimate: Estimate, text: str) -> None:
    assert str(estimate) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_and_memory_of_a_run_are_as_estimated(name: str, tmp_path: Path) -> None:
    """Seconds are printed: they are as estimated where nothing else runs."""
    path = QUICKSTART.with_name(f"{name}.toml")
    overrides = [*SHAPES[name], *_FEWER, f"run.folder={tmp_path}", f"model.label={name}"]
    check = [sys.executable, "-m", "gspo_gym.cli", "config", "check", "--deep", str(path), *overrides]
    said = _output(check).splitlines()[-1]
    tokens, sampled, total, unit, memory = re.findall(
        r"([\d,]+) tokens, of which ([\d,]+) are sampled; ([\d.e+]+) (s|min) .*; ([\d.]+) GiB", said
    )[0]
    peak = int(_output([sys.executable, "-c", _RUN, str(path), *overrides]).split()[-1]) * 1024
    steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    seconds = min(step["time/step_seconds"] for step in steps)
    mean = sum(step["rollout/sampled_tokens"] for step in steps) / len(steps)
    print(
        f"{name}: {said}; measured {mean:,.0f} sampled, {seconds:.2f} s (predicted {total} {unit}), "
        f"{peak / 2**30:.2f} GiB, {tokens} tokens predicted"
    )
    assert 1 / FACTOR <= mean / int(sampled.replace(",", "")) <= FACTOR
    assert 1 / FACTOR <= peak / 2**30 / float(memory) <= FACTOR


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
