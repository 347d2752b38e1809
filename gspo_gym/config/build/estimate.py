"""Estimate a step before it is taken: its tokens, its seconds and the process's peak of memory.

Tokens are those of episodes that a hand-written player plays through the model's template: the one of [warmup], whose
length the policy then has. Seconds are extrapolated from a probe of about a second: requests of a few tokens to the
engine, a forward and a backward pass of the learner over a group, and what playing costs without a model. Memory is
what the process holds now and what `cluster.memory` counts on top. Weights, gradients and random numbers stay as they
are.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gspo_gym.base.loops import Compute
from gspo_gym.cluster.memory import BYTES, ModelShape, rank_memory
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.build.rollouts import Player, build_environment, local_play, looking_at_source
from gspo_gym.config.build.teacher import teachers_model
from gspo_gym.config.machines import learning_of
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.core import PolicyFactory
from gspo_gym.errors import ConfigError
from gspo_gym.learning.batching import batch_tokens, to_device
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import UpdateSettings
from gspo_gym.policy.load import load_skeleton
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.seeding import FIRST_TRAINING_SEED, child_seed
from gspo_gym.types import Task, Trajectory

_MAX_PLAYED, _MAX_IN_PROCESSES = 32, 8  # episodes; those of worker processes take longer
_NUM_DECODED = 8  # tokens of a request of the probe
_MOST_REQUESTS = 64  # at once
_PROBE_SECONDS, _NUM_REPEATED = 0.5, 5  # of each part, if it is short
_ASSUMED_FLOPS = 5e10  # a second, of a core: says how much is small enough to be tried


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class StepShape:
    """The episodes of a step.

    Attributes:
        episodes: played.
        turns, tokens, sampled: of an episode, on average.
        is_bound: whether they are the most that the limits allow, because nothing says how long answers are.
        play_seconds: of an episode's environment and conversation, without a model.
    """

    episodes: int
    turns: float
    tokens: float
    sampled: float
    is_bound: bool
    play_seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step takes; None where nothing here can tell.

    Attributes:
        tokens, sampled_tokens: of all episodes of a step.
        sampling_seconds, learning_seconds: of its two halves.
        peak_bytes: of this process, its environments' workers not counted.
    """

    tokens: int
    sampled_tokens: int
    is_bound: bool
    sampling_seconds: float | None
    learning_seconds: float | None
    peak_bytes: int | None

    def __str__(self) -> str:
        most = "at most " if self.is_bound else "about "
        parts = [f"a step: {most}{_count(self.tokens)} tokens, of which {_count(self.sampled_tokens)} are sampled"]
        if self.sampling_seconds is not None and self.learning_seconds is not None:
            total = self.sampling_seconds + self.learning_seconds
            parts.append(f"{_seconds(total)} ({_seconds(self.sampling_seconds)} of playing)")
        if self.peak_bytes is not None:
            parts.append(f"{self.peak_bytes / 2**30:.1f} GiB of memory at its peak")
        return "; ".join(parts)


def _count(number: int) -> str:
    """Return a number with two digits that count.

    >>> _count(12_345), _count(87)
    ('12,000', '87')
    """
    digits = max(0, len(str(number)) - 2)
    return f"{round(number, -digits):,}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds / 60:.0f} min"


async def estimate_step(
    config: RunConfig, player: Player, compute: Compute, *, clock: Clock = time.perf_counter
) -> Estimate | None:
    """Return what a step of this run takes; `compute` runs the learner's work in its thread.

    None where a task app plays or several processes share the work, of which nothing is known here, and where the
    hand-written player needs more tokens than the limits allow.
    """
    source = config.sources[0]
    if source.task_url is not None or config.topology is not None:
        return None
    resident_bytes = _resident_bytes()
    episodes = await _episodes(config, player)
    if episodes is None:
        return None
    trajectories, shape = episodes
    sampling = learning = None
    if isinstance(player.engine, LocalEngine) and player.endpoint is None:
        sampling = await _sampling_seconds(config, player.engine, trajectories, shape, clock)
        await player.engine.forget_ended()  # the run begins with an engine that has read nothing
        learning = await compute(lambda: _learning_seconds(config, player.policy.model, trajectories, shape, clock))
    return Estimate(
        tokens=round(shape.episodes * shape.tokens),
        sampled_tokens=round(shape.episodes * shape.sampled),
        is_bound=shape.is_bound,
        sampling_seconds=sampling,
        learning_seconds=learning,
        peak_bytes=None if resident_bytes is None else _peak_bytes(config, player.policy.model, shape, resident_bytes),
    )


async def _episodes(config: RunConfig, player: Player) -> tuple[list[Trajectory], StepShape] | None:
    """Play the episodes of a mini-batch, or as many of them as is enough; return them, and the means.

    None if one failed.
    """
    source, env_id = config.sources[0], environment_ids(config)[0]
    async with looking_at_source(config, source) as env:
        policies: dict[str, PolicyFactory] = dict(getattr(env, "policies", None) or {})
    default_policies = ("random", *policies)
    name = config.warmup.policy if config.warmup is not None else next(filter(policies.get, default_policies), "")
    policy = policies.get(name, _says_nothing)
    play = local_play(config, player.renderers, ScriptedActor(policy), source=source)
    has_processes = build_environment(config, source).decision.isolation == "process"
    most = _MAX_IN_PROCESSES if has_processes else _MAX_PLAYED
    began, trajectories = time.thread_time(), []
    for index, seed in enumerate(_seeds(config, most)):
        sampling_seed = child_seed(config.run.seed, "estimate", index)
        trajectories.append(await play(EpisodeRequest(f"estimate/{index}", Task(env_id, seed), sampling_seed)))
    seconds = time.thread_time() - began
    if any(trajectory.error is not None or not trajectory.segments for trajectory in trajectories):
        return None
    turns, tokens, num_sampled = (
        sum(counts) / len(trajectories)
        for counts in (
            [len(trajectory.turns) for trajectory in trajectories],
            [sum(map(len, trajectory.segments)) for trajectory in trajectories],
            [trajectory.num_actions for trajectory in trajectories],
        )
    )
    is_bound = config.warmup is None
    if is_bound:  # a pretrained model's own answers, or those of random weights
        longest = min(turns * config.rollout.max_output_tokens, config.rollout.max_model_len - (tokens - num_sampled))
        tokens, num_sampled = tokens - num_sampled + max(num_sampled, longest), max(num_sampled, longest)
    return trajectories, StepShape(
        episodes=config.rollout.episodes_per_batch,
        turns=turns,
        tokens=tokens,
        sampled=num_sampled,
        is_bound=is_bound,
        play_seconds=seconds / len(trajectories),
    )


def _seeds(config: RunConfig, most: int) -> list[int]:
    """Return the seeds of a mini-batch's tasks: of a group, it has as many episodes as of all groups of a step."""
    size, rows = config.rollout.episodes_per_batch, config.training.batch_size or config.rollout.episodes_per_batch
    mates = max(1, round(rows * config.training.group_size / size))
    return [FIRST_TRAINING_SEED + index // mates for index in range(min(rows, most))]


def _says_nothing(_env: Any, _generator: Any) -> Callable[[Sequence[Any]], str]:
    return lambda _messages: "?"


async def _sampling_seconds(
    config: RunConfig, engine: LocalEngine, trajectories: Sequence[Trajectory], shape: StepShape, clock: Clock
) -> float:
    """Return the seconds of playing a step's episodes: prompts, tokens one by one, and everything around the model.

    A step of decoding takes a + b x requests. One request, and many, tell a and b; many of one token tell what prompts
    take.
    """
    prompts = [t.segments[0].token_ids[: t.turns[0].action_span[0]] for t in trajectories]
    num_decoded = max(2, min(_NUM_DECODED, config.rollout.max_model_len - max(map(len, prompts))))

    async def fastest_call(requests: int, tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, stop_token_ids=(), seed=0)
        seconds: list[float] = []
        # The shortest of several, if they are short: others take the processor now and then.
        while not seconds or (len(seconds) < _NUM_REPEATED and sum(seconds) < _PROBE_SECONDS / 4):
            indices = [len(seconds) * requests + k for k in range(requests)]
            began = clock()
            await asyncio.gather(
                *(engine.generate(_changed_prompt(prompts[k % len(prompts)], k), params) for k in indices)
            )
            seconds.append(clock() - began)
        return min(seconds)

    await fastest_call(1, 2)  # whatever the first call prepares
    seconds_of_one = await fastest_call(1, num_decoded)
    at_once = min(config.rollout.max_concurrent_rollouts, shape.episodes)
    many = max(2, min(at_once, _MOST_REQUESTS, int(_PROBE_SECONDS / max(seconds_of_one, 1e-6))))
    prefill_seconds, decode_seconds = await fastest_call(many, 1), await fastest_call(many, num_decoded)
    prompt_seconds = prefill_seconds / sum(len(prompts[k % len(prompts)]) for k in range(many))
    step_of_one = max(0.0, seconds_of_one - prompt_seconds * len(prompts[0])) / (num_decoded - 1)
    step_of_many = max(1e-6, decode_seconds - prefill_seconds) / (num_decoded - 1)
    seconds_per_request = max(0.0, step_of_many - step_of_one) / (many - 1)
    # Episodes end one after another, so that a batch is two thirds full, about.
    batch = min(shape.episodes, max(1.0, at_once * 2 / 3))
    step = max(step_of_many, min(step_of_one, step_of_many) + seconds_per_request * (batch - 1))
    decoding = shape.episodes * shape.sampled / batch * step
    # An equal beginning is read once, and the answers were sampled.
    sequences = [t.token_ids for trajectory in trajectories for t in trajectory.segments]
    new = max(0.0, shape.episodes * (num_nodes(sequences) / len(trajectories) - shape.sampled))
    return decoding + new * prompt_seconds + shape.episodes * shape.play_seconds


def _changed_prompt(prompt: Any, index: int) -> Any:
    """Return a prompt of the same length that begins otherwise: the engine reads an equal beginning once only."""
    other_prompt = prompt.copy()
    other_prompt[: len(other_prompt) // 2] = other_prompt[index % len(other_prompt)]
    other_prompt[0] = prompt[(index * 7 + 1) % len(prompt)]
    return other_prompt


def _learning_seconds(
    config: RunConfig, model: Any, trajectories: Sequence[Trajectory], shape: StepShape, clock: Clock
) -> float:
    """Return the seconds of a step's learning: old logprobs once, and each epoch forward and backward."""
    update = UpdateSettings.of(config.training)
    computer = LogprobComputer(
        model,
        sampling=config.scored_sampling,
        entropy_has_gradient=config.loss.entropy_coef > 0,
        share_prefixes=update.share_prefixes,
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    small = max(256, int(_PROBE_SECONDS * _ASSUMED_FLOPS * torch.get_num_threads() / (6 * weights)))
    rows = _first(trajectories, min(small, update.max_tokens_per_microbatch), at_least=2)  # two can share a beginning
    batch = to_device(batch_tokens(rows), next(model.parameters()).device)
    shares = computer.prefixes.pays(batch.token_ids, batch.attention_mask)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward() -> torch.Tensor:
        scores = computer.compute(batch.token_ids, batch.attention_mask, batch.action_mask)
        return scores.logprobs.sum() + scores.entropy.sum() * (config.loss.entropy_coef > 0)

    def score() -> None:
        with torch.no_grad():
            forward()

    def backward() -> None:
        torch.autograd.grad(forward(), parameters, allow_unused=True)

    num_scored = (config.correction.old_logprobs == "recompute") + config.has_reference
    # A teacher of the same size; one behind an endpoint takes the time of another machine, which is not known.
    if config.distillation is not None and not config.distillation.is_endpoint:
        num_scored += 1 if config.distillation.divergence == "sampled" else update.update_epochs
    seconds_per_batch = num_scored * _per_call(score, clock) + update.update_epochs * _per_call(backward, clock)
    # Rows of a micro-batch that begin alike are computed once.
    micro = _first(trajectories, update.max_tokens_per_microbatch)
    work = _num_computed(micro, shares=shares) / len(micro) * shape.tokens / _mean_tokens(trajectories)
    return shape.episodes * seconds_per_batch * work / _num_computed(rows, shares=shares)


def _first(trajectories: Sequence[Trajectory], max_tokens: int, *, at_least: int = 1) -> Sequence[Trajectory]:
    """Return the first episodes whose padded tokens fill no more than a micro-batch."""
    longest = 0
    for count, trajectory in enumerate(trajectories):
        longest = max(longest, *map(len, trajectory.segments))
        if count >= at_least and longest * (count + 1) > max_tokens:
            return trajectories[:count]
    return trajectories


def _mean_tokens(trajectories: Sequence[Trajectory]) -> float:
    return sum(len(segment) for trajectory in trajectories for segment in trajectory.segments) / len(trajectories)


def _num_computed(trajectories: Sequence[Trajectory], *, shares: bool) -> float:
    segments = [segment.token_ids for trajectory in trajectories for segment in trajectory.segments]
    return num_nodes(segments) if shares else sum(map(len, segments))


def num_nodes(sequences: Sequence[Any]) -> int:
    """Return how many tokens remain of sequences whose equal beginnings are there once (Any: arrays of token ids).

    >>> num_nodes([[1, 2, 3], [1, 2, 4], [5]])
    5
    """
    sorted_sequences = sorted([int(token) for token in sequence] for sequence in sequences)
    num_shared = sum(
        next((k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
        for first, second in itertools.pairwise(sorted_sequences)
    )
    return sum(map(len, sorted_sequences)) - num_shared


def _per_call(work: Callable[[], object], clock: Clock) -> float:
    """Return the seconds of a call, the shortest of several if it is short."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < _NUM_REPEATED and sum(seconds) < _PROBE_SECONDS):
        began = clock()
        work()
        seconds.append(clock() - began)
    return min(seconds)


def _peak_bytes(config: RunConfig, model: Any, shape: StepShape, resident_bytes: int) -> int | None:
    """Return what the process holds now, and what a step adds: gradients, moments, and a pass or the engine's cache."""
    try:
        sizes = ModelShape.from_config(model.config.to_dict())
    except ConfigError:  # a kind of model that is not counted
        return None
    full_learning = learning_of(config)
    batch = math.ceil(min(config.training.batch_size or shape.episodes, shape.episodes) * shape.tokens)
    learning = replace(full_learning, num_tokens=min(full_learning.num_tokens, batch))
    memory = rank_memory(sizes, learning)
    at_once = min(config.rollout.max_concurrent_rollouts, shape.episodes)
    cache = at_once * shape.tokens * 2 * sizes.num_layers * sizes.kv_size * BYTES[config.model.dtype]
    # Logits, their softmax and its gradient: no more than the sampled tokens of a micro-batch have.
    logits = min(
        memory.logits, 3 * 4 * sizes.vocab_size * math.ceil(learning.num_tokens * shape.sampled / shape.tokens)
    )
    passing = memory.activations + logits
    frozen = memory.reference + _teacher_bytes(config)
    return resident_bytes + memory.gradients + memory.optimizer + frozen + passing + math.ceil(cache)


def _teacher_bytes(config: RunConfig) -> int:
    """Return what the weights of a teacher take, which is loaded later; 0 if it is elsewhere, or the policy."""
    if config.distillation is None or not config.distillation.is_model_here:
        return 0
    model = load_skeleton(teachers_model(config).base, dtype=config.model.dtype).model
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _resident_bytes() -> int | None:
    """Return the memory that this process holds, in bytes; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
