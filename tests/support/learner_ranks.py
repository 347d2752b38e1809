"""A rank of a learner on loopback, and the cases that ranks train: `python -m tests.support.learner_ranks`.

What ranks find, they write into a folder, for the test that started them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from gspo_gym.cluster.sharding import full_tensors, shard_model, whole
from gspo_gym.learning.batching import TrainBatch, build_batch
from gspo_gym.learning.collective import Collective
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.saved import PartsOfTensors, SavedTensors
from gspo_gym.learning.settings import (
    AdvantageSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    UpdateSettings,
)
from gspo_gym.learning.update import Learner
from gspo_gym.policy.load import read_weights
from gspo_gym.policy.lora import add_lora
from gspo_gym.types import FinishReason, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

ROOT = Path(__file__).parents[2]
TASK = Task("test/Env-v0", 7)


@dataclass(frozen=True)
class Case:
    """A learner of a tiny model: what is trained, and under which settings."""

    vocab_size: int = 61
    is_tied: bool = True
    lora: Mapping[str, Any] | None = None
    kind: str = "qwen3"
    loss: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Any] = field(default_factory=dict)
    advantages: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None
    minibatch_size: int | None = None
    checkpoints_layers: bool = False
    num_updates: int = 20


# 66 is divided by 2 and 3, 61 by neither. Two epochs, and micro-batches of about two trajectories.
_ACCUMULATES = {"max_tokens_per_microbatch": 40, "update_epochs": 2}
CASES = {
    "tied_uneven_kl": Case(
        loss={"kl_coef": 0.1}, reference={"update_every_n_iters": 3}, update=_ACCUMULATES, minibatch_size=6
    ),
    "untied_even": Case(66, is_tied=False, update=_ACCUMULATES, loss={"entropy_coef": 0.01}, checkpoints_layers=True),
    "tied_even_shared_prefixes": Case(66, update={"share_prefixes": True}),
    "untied_uneven_shaped": Case(
        is_tied=False, rewards={"kl_coef": 0.05}, advantages={"whiten": "tokens"}, reference={}, update=_ACCUMULATES
    ),
    "lora_tied_uneven_kl": Case(
        lora={"dropout": 0.1}, loss={"kl_coef": 0.1}, reference={"source": "base"}, update=_ACCUMULATES
    ),
    "lora_untied_uneven_adapter": Case(
        is_tied=False, lora={}, loss={"kl_coef": 0.1}, reference={"source": "adapter"}, update=_ACCUMULATES
    ),
}


def build_model(case: Case, *, dtype: torch.dtype = torch.float32) -> Any:  # Any: transformers and peft are untyped
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.kind,
        vocab_size=case.vocab_size,
        tie_word_embeddings=case.is_tied,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,  # logits differ by some units, as a trained model's do
    )
    torch.default_generator.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    if case.lora is not None:
        model = add_lora(model, LoraSettings(r=4, alpha=8, **case.lora), seed=0)
    if case.checkpoints_layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_learner(case: Case, model: Any, collective: Collective | None = None) -> Learner:
    return Learner(
        model,
        optimizer=OptimizerSettings(),
        loss=LossSettings(**case.loss),
        update=UpdateSettings(**{"learning_rate": 1e-3} | dict(case.update)),
        minibatch_size=case.minibatch_size,
        rewards=RewardSettings(**case.rewards),
        advantages=AdvantageSettings(**case.advantages),
        reference=None if case.reference is None else ReferenceSettings(**case.reference),
        collective=collective,
    )


def build_batch_of(seed: int) -> TrainBatch:
    """Return a batch of three groups of four episodes, ragged; those of a group begin alike."""
    groups = []
    for g, returns in enumerate([(0.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 1.0), (-1.0, 0.0, 0.5, 0.0)]):
        prompt = np.random.default_rng([seed, g]).integers(3, 61, 4)
        groups.append(TrajectoryGroup(TASK, tuple(_episode(prompt, i, seed, r) for i, r in enumerate(returns)), 4))
    batch = build_batch(groups, AdvantageSettings()).batch
    assert batch is not None
    return batch


def _episode(prompt: np.ndarray, number: int, seed: int, reward: float) -> Trajectory:
    generator = np.random.default_rng([seed, number, *prompt])
    sampled = 2 + (number + seed) % 3
    token_ids = np.concatenate([prompt, generator.integers(3, 61, sampled)])
    mask = np.arange(len(token_ids)) >= len(prompt)
    logprobs = np.where(mask, -generator.random(len(mask)) - 0.1, 0.0)
    segment = Segment(token_ids, mask, logprobs, np.where(mask, 0, -1), np.where(mask, 0, -1))
    turn = Turn(0, 0, (0, len(prompt)), (len(prompt), len(mask)), FinishReason.STOP, reward=reward)
    return Trajectory("t", 0, TASK, number, (segment,), (turn,), (), Outcome.TERMINATED)


def train(learner: Learner, num_updates: int, *, first: int = 0) -> list[dict[str, float]]:
    """Return each update's metrics, but for the seconds."""
    reports = [learner.update(build_batch_of(k)).metrics for k in range(first, first + num_updates)]
    return [{name: value for name, value in m.items() if not name.startswith("time/")} for m in reports]


def start_ranks(world_size: int, folder: Path, *works: str, max_seconds: float = 900) -> None:
    """Let as many processes do the works one after the other; an AssertionError shows what one that failed printed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    ranks = []
    for rank, log in enumerate(logs):
        arguments = [str(rank), str(world_size), str(folder), *works]
        command = [sys.executable, "-m", "tests.support.learner_ranks", *arguments]
        with log.open("wb") as output:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
    try:
        codes = [process.wait(max_seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world_size, "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


def write_weights(model: Any, file: Path) -> None:
    weights = {name: value.clone() for name, value in full_tensors(model)}
    if dist.get_rank() == 0:
        save_file(weights, file)


def train_case(folder: Path, name: str, file: str) -> None:
    model = build_model(CASES[name])
    learner = build_learner(CASES[name], model, shard_model(model))
    metrics = train(learner, CASES[name].num_updates)
    write_weights(model, folder / f"{file}.safetensors")
    (folder / f"{file}.rank{dist.get_rank()}.json").write_text(json.dumps(metrics))


def train_cases(folder: Path) -> None:
    for name in CASES:
        train_case(folder, name, name)


def repeat_a_case(folder: Path) -> None:
    train_case(folder, REPEATED, "repeated")


def save(folder: Path) -> None:
    """Save what two updates learned, while and after two more are taken; go on from it."""
    case = CASES[SAVED]
    model = build_model(case)
    learner = build_learner(case, model, shard_model(model))
    train(learner, 2)
    write = learner.copy_state()
    counters = learner.counters()
    for name in ("policy", "resume"):
        (folder / name).mkdir(exist_ok=True)
    write_weights(model, folder / "policy" / "model.safetensors")
    write_learner(learner, folder / "saved_learner.safetensors")
    (folder / "counters.json").write_text(json.dumps(counters))
    train(learner, 2, first=2)
    write(folder / "resume")
    write_weights(model, folder / "went_on.safetensors")
    dist.barrier()
    train(go_on(folder), 2, first=2)
    write_weights(_WENT_ON[-1], folder / "resumed.safetensors")


_WENT_ON: list[Any] = []


def go_on(folder: Path) -> Learner:
    """Return a learner that goes on from what any number of processes left in a folder."""
    case = CASES[SAVED]
    model = build_model(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    learner = build_learner(case, model, shard_model(model) if dist.is_initialized() else None)
    read_weights(model, folder / "policy")
    counters = json.loads((folder / "counters.json").read_text())
    learner.restore(PartsOfTensors(SavedTensors.of_learner(folder / "resume"), model), counters)
    _WENT_ON.append(model)
    return learner


def go_on_from_two(folder: Path) -> None:
    _show_what_went_on(folder.parent / "two", folder)


def go_on_from_one(folder: Path) -> None:
    _show_what_went_on(folder.parent / "one", folder)


def _show_what_went_on(saved: Path, folder: Path) -> None:
    learner = go_on(saved)
    write_weights(_WENT_ON[-1], folder / f"weights_of_{saved.name}.safetensors")
    write_learner(learner, folder / f"learner_of_{saved.name}.safetensors")
    train(learner, 1, first=2)


def write_learner(learner: Learner, file: Path) -> None:
    tensors = {name: whole(tensor).clone() for name, tensor in learner.tensors().items()}
    if dist.get_rank() == 0:
        save_file(tensors, file)


def count_bytes(folder: Path) -> None:
    model = build_model(CASES[SAVED])
    learner = build_learner(CASES[SAVED], model, shard_model(model))
    held = bytes_of_a_step(model, learner)
    (folder / f"bytes{dist.get_rank()}.json").write_text(json.dumps(held))


def bytes_of_a_step(model: Any, learner: Learner) -> int:
    """Return this process's bytes of parameters and gradients when a step begins, and of the optimizer after it."""
    optimizer, held = learner._optimizer, 0
    take_step = optimizer.step

    def step(loss: float) -> StepReport:
        nonlocal held
        held = sum(_local_bytes(tensor) for p in model.parameters() for tensor in (p, p.grad))
        return take_step(loss)

    optimizer.step = step  # type: ignore[method-assign]
    train(learner, 1)
    return held + sum(_local_bytes(tensor) for tensor in optimizer.tensors().values())


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.numel() * local.element_size())


def compute_in_16_bits(folder: Path) -> None:
    """Train in mixed precision, and an adapter of 32 bits on a base of 16."""
    model = build_model(CASES[SAVED])
    learner = build_learner(CASES[SAVED], model, shard_model(model, compute_dtype=torch.bfloat16))
    narrow = build_model(Case(lora={}), dtype=torch.bfloat16)
    adapter = build_learner(Case(), narrow, shard_model(narrow))
    norms = [train(each, 1)[0]["optim/grad_norm"] for each in (learner, adapter)]
    dtypes = {str(p.dtype) for p in model.parameters()}
    (folder / f"norms{dist.get_rank()}.json").write_text(json.dumps([norms, sorted(dtypes)]))


def take_the_plan_of_transformers(folder: Path) -> None:
    """Write the largest relative error of the gradients of two steps, by the size of a tied vocabulary."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    rank, world_size = dist.get_rank(), dist.get_world_size()
    errors = {}
    for vocab_size in (60, 61):
        saved = folder / f"vocabulary{vocab_size}"
        if rank == 0:
            build_model(Case(vocab_size)).save_pretrained(saved)
        dist.barrier()
        plan = DistributedConfig(fsdp_size=world_size)
        shared = AutoModelForCausalLM.from_pretrained(saved, distributed_config=plan, dtype=torch.float32)
        alone = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
        ids = torch.from_numpy(np.random.default_rng(0).integers(3, 60, (2, 2 * world_size, 24)))
        found = _two_steps(shared, [tokens.chunk(world_size)[rank] for tokens in ids])
        expected = _two_steps(alone, list(ids))
        errors[vocab_size] = [
            max(float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)
            for got, want in zip(found, expected, strict=True)
        ]
    (folder / f"errors{rank}.json").write_text(json.dumps(errors))


def _two_steps(model: Any, batches: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    gradients = []
    for tokens in batches:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append({name: whole(p.grad).clone() for name, p in model.named_parameters()})
        optimizer.step()
    return gradients


REPEATED = SAVED = "tied_uneven_kl"
WORKS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        train_cases,
        repeat_a_case,
        save,
        go_on_from_one,
        go_on_from_two,
        count_bytes,
        compute_in_16_bits,
        take_the_plan_of_transformers,
    )
}


def main(rank: str, world_size: str, folder: str, *works: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=120),
    )
    for work in works:
        WORKS[work](Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
