"""A rank of a learner on loopback, and the cases that ranks train: `python -m tests.support.learner_ranks`.

What ranks find, they write into a folder, for the test that started them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from gspo_gym.cluster.sharding import full_tensors, shard_model, whole
from gspo_gym.errors import ConfigError
from gspo_gym.learning.batching import TrainBatch, build_batch
from gspo_gym.learning.collective import Collective, place_of
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.optimizer import StepReport
from gspo_gym.learning.saved import PartsOfTensors, SavedTensors
from gspo_gym.learning.settings import (
    DEFAULT_LOGITS_BYTES,
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
    num_heads: int = 4
    loss: Mapping[str, Any] = field(default_factory=dict)
    update: Mapping[str, Any] = field(default_factory=dict)
    rewards: Mapping[str, Any] = field(default_factory=dict)
    advantages: Mapping[str, Any] = field(default_factory=dict)
    reference: Mapping[str, Any] | None = None
    minibatch_size: int | None = None
    checkpoints_layers: bool = False
    dtype: torch.dtype = torch.float32
    num_updates: int = 12
    logits_bytes: int = DEFAULT_LOGITS_BYTES


# 66 is divided by 2 and 3, 61 by neither. Two epochs, and micro-batches of about two trajectories.
_TWO_EPOCHS = {"update_epochs": 2}
_IN_PARTS = {"max_tokens_per_microbatch": 40}
_ACCUMULATES = {**_IN_PARTS, **_TWO_EPOCHS}
CASES = {
    "tied_uneven_kl": Case(
        loss={"kl_coef": 0.1}, reference={"update_every_n_iters": 3}, update=_ACCUMULATES, minibatch_size=6
    ),
    "untied_even": Case(66, is_tied=False, update=_ACCUMULATES, loss={"entropy_coef": 0.01}, checkpoints_layers=True),
    "tied_even_shared_prefixes": Case(66, update={"share_prefixes": True}),
    "untied_uneven_shaped": Case(
        is_tied=False, rewards={"kl_coef": 0.05}, advantages={"whiten": "tokens"}, reference={}, update=_TWO_EPOCHS
    ),
    "lora_tied_uneven_kl": Case(
        lora={"dropout": 0.1}, loss={"kl_coef": 0.1}, reference={"source": "base"}, update=_IN_PARTS
    ),
    "lora_untied_uneven_adapter": Case(
        is_tied=False, lora={}, loss={"kl_coef": 0.1}, reference={"source": "adapter"}, update=_TWO_EPOCHS
    ),
}
# Whose rows several ranks compute together: attention by rows or over a trie, logits in chunks of some tokens.
_FEWER = 4  # updates: `CASES` show that a difference does not grow
TOGETHER = {
    # In float64, because AdamW makes a whole step of a gradient that is rounding alone: with other chunks of logits,
    # one number of the embedding was 2e-5 off in float32, where all others were within 2e-6.
    "rows": Case(
        dtype=torch.float64,
        loss={"kl_coef": 0.1},
        reference={"update_every_n_iters": 3},
        update={**_ACCUMULATES, "share_prefixes": False},
        logits_bytes=5_000,
        minibatch_size=6,
        checkpoints_layers=True,
        num_updates=_FEWER,
    ),
    "trie": Case(
        66,
        is_tied=False,
        loss={"entropy_coef": 0.01},
        update={"share_prefixes": True, **_TWO_EPOCHS},
        num_updates=_FEWER,
    ),
    "adapter": Case(
        lora={},
        loss={"kl_coef": 0.1},
        reference={"source": "adapter"},
        update={"share_prefixes": False},
        num_updates=_FEWER,
    ),
}
# Cases that two ranks cannot share as they are told to.
REFUSED: tuple[tuple[Case, dict[str, Any]], ...] = (
    (Case(lora={"dropout": 0.1}), {"sequence_parallel": 2}),
    (Case(), {"sequence_parallel": 3}),
    (Case(kind="mistral"), {"sequence_parallel": 2}),
    (Case(kind="qwen3_moe"), {"sequence_parallel": 2}),
    (Case(num_heads=3), {"sequence_parallel": 2}),
)


def build_model(case: Case, *, dtype: torch.dtype | None = None) -> Any:  # Any: transformers and peft are untyped
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        case.kind,
        vocab_size=case.vocab_size,
        tie_word_embeddings=case.is_tied,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=case.num_heads,
        num_key_value_heads=max(1, case.num_heads // 2),
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,  # logits differ by some units, as a trained model's do
    )
    torch.default_generator.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype or case.dtype)
    if case.lora is not None:
        model = add_lora(model, LoraSettings(r=4, alpha=8, **case.lora), seed=0)
    if case.checkpoints_layers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_learner(case: Case, model: Any, collective: Collective | None = None) -> Learner:
    return Learner(
        model,
        # AdamW makes a whole step of a gradient that is rounding alone: with its usual eps of 1e-8, one number of
        # 17,504 was 7.5e-6 off on three ranks, and all others at most 4.7e-7.
        optimizer=OptimizerSettings(eps=1e-5),
        loss=LossSettings(**case.loss),
        update=UpdateSettings(**{"learning_rate": 1e-3} | dict(case.update)),
        minibatch_size=case.minibatch_size,
        rewards=RewardSettings(**case.rewards),
        advantages=AdvantageSettings(**case.advantages),
        reference=None if case.reference is None else ReferenceSettings(**case.reference),
        logits_bytes=case.logits_bytes,
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
    command = [sys.executable, "-m", "tests.support.learner_ranks", str(world_size), str(folder), *works]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(max_seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert code == 0, "\n".join(log.read_text(errors="replace")[-3000:] for log in sorted(folder.glob("rank*.log")))


def write_weights(model: Any, file: Path) -> None:
    weights = {name: value.clone() for name, value in full_tensors(model)}
    if dist.get_rank() == 0:
        save_file(weights, file)


def train_case(folder: Path, case: Case, file: str, **options: Any) -> None:  # Any: those of `shard_model`
    model = build_model(case)
    learner = build_learner(case, model, shard_model(model, **options))
    metrics = train(learner, case.num_updates)
    write_weights(model, folder / f"{file}.safetensors")
    (folder / f"{file}.rank{dist.get_rank()}.json").write_text(json.dumps(metrics))


def train_cases(folder: Path) -> None:
    for name, case in CASES.items():
        train_case(folder, case, name)


def repeat_a_case(folder: Path) -> None:
    train_case(folder, CASES[REPEATED], "repeated")


def train_together(folder: Path) -> None:
    for name, case in TOGETHER.items():
        train_case(folder, case, name, sequence_parallel=2)


def train_four_together(folder: Path) -> None:
    """Train with more ranks than heads of keys."""
    train_case(folder, TOGETHER["rows"], "rows_by_four", sequence_parallel=4)
    ranks = shard_model(build_model(TOGETHER["rows"]), sequence_parallel=2)
    assert place_of(ranks) == {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}


def score_together(folder: Path) -> None:
    """Write logprobs and gradients of rows that all ranks compute, and what is refused."""
    for name, case in TOGETHER.items():
        model = build_model(case, dtype=torch.float64)
        ranks = shard_model(model, sequence_parallel=dist.get_world_size())
        found = score(case, model, ranks)
        if ranks.sequence is not None and ranks.sequence.rank == 0:
            save_file(found, folder / f"{name}.scores.safetensors")
    refused = []
    for case, options in REFUSED:
        try:
            model = build_model(case)
            build_learner(case, model, shard_model(model, **options))
        except ConfigError as error:
            refused.append(str(error))
    (folder / f"refused{dist.get_rank()}.json").write_text(json.dumps(refused))


def score(case: Case, model: Any, collective: Collective | None = None) -> dict[str, Tensor]:
    """Return logprobs, entropies and the gradients of a sum of them in which each has a weight of its own."""
    update = UpdateSettings(**{"learning_rate": 1e-3} | dict(case.update))
    computer = LogprobComputer(
        model, logits_bytes=case.logits_bytes, share_prefixes=update.share_prefixes, collective=collective
    )
    batch = build_batch_of(0)
    found = computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask)
    (found.logprobs * torch.linspace(-1, 1, found.logprobs.numel()).view_as(found.logprobs)).sum().backward()
    gradients = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": found.logprobs.detach(), "entropy": found.entropy.detach(), **gradients}


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


class _Narrow(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.to(torch.bfloat16)


def narrowed(model: Any) -> Any:
    """Return the model, which computes with copies of its weights in 16 bits from now on; gradients come in 32."""
    for module in [*model.modules()]:
        for name, _ in [*module.named_parameters(recurse=False)]:
            parametrize.register_parametrization(module, name, _Narrow(), unsafe=True)
    return model


def compute_in_16_bits(folder: Path) -> None:
    """Train in mixed precision, and an adapter of 32 bits on a base of 16."""
    wide = build_model(NARROW)
    save_file(score(NARROW, wide, shard_model(wide, compute_dtype=torch.bfloat16)), folder / f"narrow{dist.get_rank()}")
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
NARROW = CASES["untied_even"]
WORKS: dict[str, Callable[[Path], None]] = {
    each.__name__: each
    for each in (
        train_cases,
        repeat_a_case,
        train_together,
        train_four_together,
        score_together,
        save,
        go_on_from_one,
        go_on_from_two,
        count_bytes,
        compute_in_16_bits,
        take_the_plan_of_transformers,
    )
}


def main(world_size: str, folder: str, *works: str) -> None:
    """Be all ranks: forks of one process, so that the imports take their seconds once."""
    pids = []
    for rank in range(int(world_size)):
        pids.append(os.fork())
        if pids[-1] == 0:
            log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            be_rank(rank, int(world_size), Path(folder), works)
            return
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(max(map(abs, codes)))


def be_rank(rank: int, world_size: int, folder: Path, works: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    for work in works:
        WORKS[work](folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
