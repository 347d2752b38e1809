"""How fast engines sample multi-turn episodes: `python -m benchmarks engines`.

One table from one run: transformers' `generate` once a turn, the local engine, and vLLM where it is installed, on the
same model and the same episodes. Environments answer at once, so this is sampling and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.record import Value
from gspo_gym.config.build.threads import compute_in, computing_elsewhere, set_threads
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.policy.load import Policy, load_policy, save_policy
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
    """The runs of one engine; `rounds` are their seconds."""

    sampled_tokens: int
    rounds: tuple[float, ...]

    @property
    def wall_seconds(self) -> float:
        """The median run."""
        return statistics.median(self.rounds)


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


def sample_with_local_engine(model: Any, plans: Sequence[EpisodePlan]) -> int:
    """`LocalEngine`, one coroutine an episode."""
    return asyncio.run(_run_local_engine(model, plans))


async def _run_local_engine(model: Any, plans: Sequence[EpisodePlan]) -> int:
    with computing_elsewhere("cpu") as num_threads:
        engine = LocalEngine(model, max_model_len=max(plan.num_tokens for plan in plans) + 1)
        try:
            await compute_in(engine, model, num_threads)
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

_GENERATE, _OURS = "model.generate, once a turn", "LocalEngine"
ENGINES: Mapping[str, Sample] = {
    _GENERATE: sample_with_generate,
    _OURS: sample_with_local_engine,
}


def measure(
    model: Any, plans: Sequence[EpisodePlan], *, repeats: int, engines: Mapping[str, Sample] = ENGINES
) -> dict[str, Measurement]:
    """Return the runs of each engine. They take turns, so that a busy moment of the machine hits all of them."""
    for sample in engines.values():
        _in_a_thread(sample, model, plans[:4])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    sampled: dict[str, int] = {}
    for _ in range(repeats):
        for name, sample in engines.items():
            start = time.perf_counter()
            sampled[name] = _in_a_thread(sample, model, plans)
            seconds[name].append(time.perf_counter() - start)
    return {name: Measurement(sampled[name], tuple(runs)) for name, runs in seconds.items()}


# Runs what samples from an engine to its end, and gives the number of tokens sampled.
RunWithEngine = Callable[[Callable[[Engine], Awaitable[int]]], int]


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


@contextlib.contextmanager
def running_vllm(policy: Policy, *, max_model_len: int, dtype: Any) -> Iterator[RunWithEngine]:
    """vLLM on a copy of the policy's weights (Any: a name of torch's; vLLM refuses what it has not)."""
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder, asyncio.Runner() as runner:
        save_policy(policy, Path(folder) / "policy")
        on_processor = policy.model.device.type == "cpu"
        settings = VllmSettings(
            model=str(Path(folder) / "policy"),
            max_model_len=max_model_len,
            dtype=dtype,
            gpu_memory_utilization=0.5,  # beside the other engines' model
            kv_cache_gib=1.0 if on_processor else None,
            enforce_eager=on_processor,
        )
        engine = runner.run(VllmEngine.start(settings))

        async def use(sample: Callable[[Engine], Awaitable[int]]) -> int:
            return await sample(engine)

        try:
            yield lambda sample: runner.run(use(sample))
        finally:
            runner.run(engine.close())


def _in_a_thread(sample: Sample, model: Any, plans: Sequence[EpisodePlan]) -> int:
    # With which torch's workers end: they would slow those of the next one (see config/build/threads.py).
    with ThreadPoolExecutor(1, initializer=set_threads, initargs=(torch.get_num_threads(),)) as executor:
        return executor.submit(sample, model, plans).result()


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


def run_engines(base: str, *, dtype: str, num_episodes: int, repeats: int) -> list[Value]:
    """Measure and print; return our engine's cost beside that of `generate`."""
    with computing_elsewhere("cpu"):
        policy = load_policy(base, dtype=dtype)
    plans = make_workload(num_episodes)
    turns = [len(plan.num_sampled) for plan in plans]
    parameters = sum(p.numel() for p in policy.model.parameters())
    console = Console()
    console.print(
        f"{base}, {parameters / 1e6:.1f}M parameters, {dtype}; {len(plans)} episodes of {min(turns)} to {max(turns)} "
        f"turns, {sum(sum(plan.num_sampled) for plan in plans):,} tokens to sample; median of {repeats}"
    )
    engines = dict(ENGINES)
    with contextlib.ExitStack() as stack:
        if has_vllm():
            longest = max(plan.num_tokens for plan in plans) + 1
            vllm = stack.enter_context(running_vllm(policy, max_model_len=longest, dtype=dtype))
            engines["VllmEngine"] = lambda _, episodes: vllm(lambda engine: sample_episodes(engine, episodes))
        measured = measure(policy.model, plans, repeats=repeats, engines=engines)
    console.print(render(measured))
    ours, peer = (measured[name].rounds for name in (_OURS, _GENERATE))
    return [Value(f"{num_episodes} ragged episodes, {base}, {dtype}", ours, peer, _GENERATE)]
