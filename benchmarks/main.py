"""How fast engines sample multi-turn episodes: `python -m benchmarks engines`.

`faults`, `isolation`, `pipeline`, `gateway`, `weights`, `checkpoints`, `mutants`, `runs`, `crash`, `stops`, `soak`,
`tokens`, `page`, `head` and `prefixes` are other measurements, each in a file of its name.

One table from one run: transformers' `generate` once a turn, transformers' continuous batching, the local engine, and
vLLM where it is installed, on the same model and the same episodes. Environments answer at once, so this is sampling
and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.checkpoints import run_checkpoints
from benchmarks.crash import run_crash
from benchmarks.faults import run_faults
from benchmarks.head import run_head
from benchmarks.isolation import run_isolation
from benchmarks.mutants import run_mutants
from benchmarks.page import run_page
from benchmarks.pipeline import Workload, run_pipeline
from benchmarks.prefixes import run_prefixes
from benchmarks.runs import run_runs
from benchmarks.soak import run_soak
from benchmarks.stops import run_stops
from benchmarks.tokens import run_tokens
from benchmarks.vllm import has_vllm, running_vllm
from benchmarks.weights import run_weights
from gspo_gym.cli.command_line import Parser, parse_and_run
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import EngineError, UsageError
from gspo_gym.policy.load import load_policy
from gspo_gym.seeding import child_seed, generator

_NO_TOKEN = 1 << 30  # as end of sequence for `generate`, which would fall back on the model's own if given none


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One episode whose shape is fixed beforehand, so that every engine does the same work.

    `num_sampled[t]` tokens are sampled in turn t and answered by `observations[t]`.
    """

    prompt: tuple[int, ...]
    num_sampled: tuple[int, ...]
    observations: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """The episode's length at its end."""
        return len(self.prompt) + sum(self.num_sampled) + sum(len(o) for o in self.observations)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one engine."""

    sampled_tokens: int
    wall_seconds: float


def make_workload(num_episodes: int, *, group_size: int = 8, seed: int = 0) -> tuple[EpisodePlan, ...]:
    """Episodes of 3 to 6 turns: a prompt of 40 to 80 tokens, shared by a group; 8 to 64 sampled tokens and an
    observation of 20 to 30 tokens a turn. All drawn uniformly; token ids are bytes."""
    plans = []
    for episode in range(num_episodes):
        shared = generator(seed, "prompt", episode // group_size)
        own = generator(seed, "episode", episode)
        num_turns = int(own.integers(3, 7))
        plans.append(
            EpisodePlan(
                prompt=tuple(shared.integers(0, 256, int(shared.integers(40, 81))).tolist()),
                num_sampled=tuple(own.integers(8, 65, num_turns).tolist()),
                observations=tuple(
                    tuple(own.integers(0, 256, int(own.integers(20, 31))).tolist()) for _ in range(num_turns)
                ),
            )
        )
    return tuple(plans)


def sample_with_generate(model: Any, plans: Sequence[EpisodePlan]) -> int:
    """`model.generate` once a turn, over all episodes that are still going on, left-padded; returns tokens sampled.

    Every turn reads the whole history again, and lasts as long as its longest row. (Any: transformers is untyped.)
    """
    histories = [list(plan.prompt) for plan in plans]
    config = GenerationConfig(do_sample=True, eos_token_id=_NO_TOKEN, pad_token_id=0, max_new_tokens=4096, top_k=0)
    num_sampled = 0
    for turn in range(max(len(plan.num_sampled) for plan in plans)):
        alive = [i for i, plan in enumerate(plans) if turn < len(plan.num_sampled)]
        width = max(len(histories[i]) for i in alive)
        ids = torch.zeros(len(alive), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(alive):
            ids[row, width - len(histories[i]) :] = torch.tensor(histories[i])
            mask[row, width - len(histories[i]) :] = 1
        wanted = torch.tensor([plans[i].num_sampled[turn] for i in alive])
        stop = StoppingCriteriaList([_StopRows(width + wanted)])
        output = model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=stop)
        for row, i in enumerate(alive):
            sampled = output[row, width : width + plans[i].num_sampled[turn]].tolist()
            histories[i] += [*sampled, *plans[i].observations[turn]]
            num_sampled += len(sampled)
    return num_sampled


def sample_with_continuous_batching(model: Any, plans: Sequence[EpisodePlan]) -> int:
    """Transformers' continuous batching, one request a turn, each as soon as its episode can go on.

    Prefix sharing is off: with it, keys of earlier weights would be used again after an update. On a CPU its attention
    runs over the whole pool of blocks, so the pool is kept small: 128 blocks of 32 tokens and 256 tokens a batch were
    the fastest of the sizes tried (64 to 1024 blocks, 128 to 1024 tokens).
    """
    longest = max(plan.num_tokens for plan in plans)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, eos_token_id=-1, pad_token_id=0, top_k=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=max(128, longest // 32 + 1),
            max_batch_tokens=256,
            allow_block_sharing=False,
            return_logprobs=True,
            auto_switch_to_flash=False,
        ),
    )
    histories = [list(plan.prompt) for plan in plans]
    turns = [0] * len(plans)
    num_sampled = 0
    manager.start()
    try:
        for i, plan in enumerate(plans):
            manager.add_request(histories[i], request_id=f"{i}.0", max_new_tokens=plan.num_sampled[0])
        unfinished = len(plans)
        while unfinished:
            result = manager.get_result(timeout=60)
            if result is None or result.error:
                raise EngineError(f"transformers' continuous batching failed: {result and result.error}")
            i = int(result.request_id.split(".")[0])
            histories[i] += [*result.generated_tokens, *plans[i].observations[turns[i]]]
            num_sampled += len(result.generated_tokens)
            turns[i] += 1
            if turns[i] == len(plans[i].num_sampled):
                unfinished -= 1
                continue
            wanted = plans[i].num_sampled[turns[i]]
            manager.add_request(histories[i], request_id=f"{i}.{turns[i]}", max_new_tokens=wanted)
    finally:
        manager.stop(block=True)
        manager.destroy()
    return num_sampled


def sample_with_local_engine(model: Any, plans: Sequence[EpisodePlan]) -> int:
    """`LocalEngine`, one coroutine an episode."""
    return asyncio.run(_run_local_engine(model, plans))


async def _run_local_engine(model: Any, plans: Sequence[EpisodePlan]) -> int:
    engine = LocalEngine(model, max_model_len=max(plan.num_tokens for plan in plans) + 1)
    try:
        return await sample_episodes(engine, plans)
    finally:
        await engine.close()


async def sample_episodes(engine: Engine, plans: Sequence[EpisodePlan]) -> int:
    """All episodes at once, one coroutine each; returns tokens sampled."""

    async def run_episode(index: int, plan: EpisodePlan) -> int:
        history, session_id = list(plan.prompt), f"episode-{index}"
        for turn, (wanted, observation) in enumerate(zip(plan.num_sampled, plan.observations, strict=True)):
            sampling = SamplingParams(max_tokens=wanted, stop_token_ids=(), seed=child_seed(0, index, turn))
            completion = await engine.generate(history, sampling, session_id=session_id)
            history += [*completion.token_ids.tolist(), *observation]
        await engine.end_session(session_id)
        return sum(plan.num_sampled)

    return sum(await asyncio.gather(*(run_episode(index, plan) for index, plan in enumerate(plans))))


class _StopRows(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped
    """Stops each row at its own length, `ends` [B], counted with the padding."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._ends


# (model, plans) -> tokens sampled. Any: transformers is untyped.
Sample = Callable[[Any, Sequence[EpisodePlan]], int]

ENGINES: Mapping[str, Sample] = {
    "model.generate, once a turn": sample_with_generate,
    "transformers continuous batching": sample_with_continuous_batching,
    "LocalEngine": sample_with_local_engine,
}


def measure(
    model: Any, plans: Sequence[EpisodePlan], *, repeats: int, engines: Mapping[str, Sample] = ENGINES
) -> dict[str, Measurement]:
    """The median run of each engine. They take turns, so that a busy moment of the machine hits all of them."""
    for sample in engines.values():
        sample(model, plans[:4])
    runs: dict[str, list[Measurement]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, sample in engines.items():
            start = time.perf_counter()
            num_sampled = sample(model, plans)
            runs[name].append(Measurement(num_sampled, time.perf_counter() - start))
    return {
        name: Measurement(of_engine[0].sampled_tokens, statistics.median(run.wall_seconds for run in of_engine))
        for name, of_engine in runs.items()
    }


def render(measurements: dict[str, Measurement]) -> Table:
    """The table; ratios are to the first row."""
    table = Table("engine")
    for heading in ("sampled", "seconds", "tokens/s", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    baseline = next(iter(measurements.values())).wall_seconds
    for name, run in measurements.items():
        rate, ratio = run.sampled_tokens / run.wall_seconds, baseline / run.wall_seconds
        table.add_row(name, f"{run.sampled_tokens:,}", f"{run.wall_seconds:.2f}", f"{rate:,.0f}", f"{ratio:.2f}x")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    choices = [
        "engines",
        "faults",
        "isolation",
        "pipeline",
        "gateway",
        "weights",
        "checkpoints",
        "mutants",
        "runs",
        "crash",
        "stops",
        "soak",
        "tokens",
        "page",
        "head",
        "prefixes",
    ]
    parser.add_argument("what", choices=choices, help="what to measure")
    parser.add_argument(
        "files", nargs="*", help="mutants: the files to mutate, in the root of a checkout; prefixes: episodes"
    )
    parser.add_argument(
        "--count",
        type=int,
        help="mutants: how many a file (20); runs: how many (200); crash: kills (50); stops: how many (30)",
    )
    parser.add_argument("--steps", type=int, help="steps of the run: 20 for crash and tokens, 2000 for soak")
    parser.add_argument("--seed", type=int, default=0, help="mutants, crash, stops: which ones (default: %(default)s)")
    parser.add_argument(
        "--tests",
        nargs="+",
        action="extend",
        default=[],
        help="mutants: test files instead of those which import the module",
    )
    parser.add_argument("--model", default="tiny:qwen3-256", help="hub id, folder or tiny:NAME (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--episodes", type=int, help="default: 64 for engines, 2000 for faults, 200 for isolation")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="runs of each engine, updates or visits, median kept (default: %(default)s; tokens: at least 30)",
    )
    parser.add_argument(
        "--groups", type=int, default=16, help="pipeline: groups of 8 episodes a step; more make learning longer"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print."""
    if arguments.what == "mutants":
        return run_mutants(arguments.files, count=arguments.count or 20, seed=arguments.seed, tests=arguments.tests)
    if arguments.what == "prefixes":
        torch.set_num_threads(arguments.threads)
        return run_prefixes(arguments.model, arguments.files, repeats=arguments.repeats)
    if arguments.files:
        raise UsageError(f"{arguments.what} takes no files, got {' '.join(arguments.files)}")
    if arguments.what == "pipeline":
        torch.set_num_threads(arguments.threads)
        return run_pipeline(Workload(num_groups=arguments.groups), repeats=arguments.repeats)
    if arguments.what == "faults":
        return run_faults(arguments.episodes or 2000)
    if arguments.what == "runs":
        return run_runs(arguments.count or 200)
    if arguments.what == "gateway":
        from benchmarks.gateway import run_gateway  # needs the packages of an extra

        return run_gateway()
    if arguments.what == "crash":
        return run_crash(arguments.count or 50, arguments.seed, num_steps=arguments.steps or 20)
    if arguments.what == "soak":
        return run_soak(arguments.steps or 2000)
    if arguments.what == "stops":
        return run_stops(arguments.count or 30, arguments.seed)
    if arguments.what == "head":
        return run_head(repeats=arguments.repeats, threads=arguments.threads)
    if arguments.what == "isolation":
        return run_isolation(arguments.episodes or 200)
    torch.set_num_threads(arguments.threads)
    if arguments.what == "tokens":
        return run_tokens(num_steps=arguments.steps or 20, repeats=max(arguments.repeats, 30))
    if arguments.what == "page":
        return run_page(repeats=arguments.repeats)
    if arguments.what == "weights":
        return run_weights(arguments.model, dtype=arguments.dtype, num_updates=arguments.repeats)
    if arguments.what == "checkpoints":
        return run_checkpoints(arguments.model, repeats=arguments.repeats)
    policy = load_policy(arguments.model, dtype=arguments.dtype)
    plans = make_workload(arguments.episodes or 64)
    turns = [len(plan.num_sampled) for plan in plans]
    parameters = sum(p.numel() for p in policy.model.parameters())
    console = Console()
    console.print(
        f"{arguments.model}, {parameters / 1e6:.1f}M parameters, {arguments.dtype}, "
        f"{arguments.threads} torch thread(s); {len(plans)} episodes of {min(turns)} to {max(turns)} turns, "
        f"{sum(sum(plan.num_sampled) for plan in plans):,} tokens to sample; median of {arguments.repeats}"
    )
    engines = dict(ENGINES)
    with contextlib.ExitStack() as stack:
        if has_vllm():
            longest = max(plan.num_tokens for plan in plans) + 1
            vllm = stack.enter_context(running_vllm(policy, max_model_len=longest, dtype=arguments.dtype))
            engines["VllmEngine"] = lambda _, episodes: vllm(lambda engine: sample_episodes(engine, episodes))
        console.print(render(measure(policy.model, plans, repeats=arguments.repeats, engines=engines)))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = Parser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    add_arguments(parser)
    return parse_and_run(parser, argv)
