"""Choose the settings of a first run: what trains this model on this environment, on this machine.

`gspo-gym config new` writes them. The environment's hand-written players are played through the model's own template,
and what they take says how long a turn, a conversation and an episode may be. Rates, clip ranges and the warm-up are
those with which the files of configs/ learned: one set for random weights, one for pretrained ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo_gym.base.loops import run_to_end
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cluster.memory import USABLE
from gspo_gym.env.core import PolicyFactory, SmallTask
from gspo_gym.env.playing import spoken_by
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.session import looking_at
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, GymError, shortened
from gspo_gym.policy.bases import TINY_PREFIX, check_base, known_context
from gspo_gym.policy.load import load_skeleton, load_tokenizer
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest, run_episode
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message, Task, Trajectory

Sections = dict[str, dict[str, Any]]  # Any: JSON

_NUM_PLAYED = 6  # episodes of each player
_MAX_TURNS = 64
_NUM_FORGIVEN = 2
_BRIEF = 8  # tokens of an answer that is a word; longer ones are calls or lists
_NO_LIMIT = 1_000_000  # tokens: hand-written players read nothing
_MAX_CONTEXT = 8192
# Above so many weights a processor trains an adapter: AdamW's 16 bytes a weight, and a backward pass through all.
_LORA_FROM = 50_000_000
_BYTES_A_WEIGHT = 16
# The ratio is a mean over an episode's sampled tokens: the fewer, the wider it spreads. Up to so many tokens an
# episode, the clip range that learned in configs/ (8 in quickstart.toml; 24 to 140 in wordle.toml, sql_analyst.toml).
_CLIPS = ((16, 3e-2, 4e-2), (256, 1e-2, 1.3e-2), (2048, 3e-3, 4e-3))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model without its weights.

    Attributes:
        num_parameters, context: None where nothing here says so.
        tokenizer: a transformers tokenizer (Any: untyped); of a model that is not here, one of bytes.
        is_here: whether the tokenizer is the model's own.
    """

    base: str
    num_parameters: int | None
    context: int | None
    tokenizer: Any
    is_here: bool = True

    @property
    def is_tiny(self) -> bool:
        """Return whether the weights are random."""
        return self.base.startswith(TINY_PREFIX)

    def learns_by_adapter(self, gpu_bytes: int | None) -> bool:
        """Return whether all weights are too many to be trained on a GPU of that size; None: on the processor."""
        if self.num_parameters is None:
            return True
        if gpu_bytes is None:
            return self.num_parameters > _LORA_FROM
        return self.num_parameters * _BYTES_A_WEIGHT > USABLE * gpu_bytes / 2  # half is for activations and sampling


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the environment's players take, in the model's tokens.

    Attributes:
        num_turns: of the longest episode.
        output: most tokens of a legal answer, the one that ends the turn included.
        sampled: tokens of answers in an episode, on average.
        context: tokens of the longest conversation beside its answers, and the answers in it.
        succeeds: whether an episode says if it succeeded.
    """

    num_turns: int
    output: int
    sampled: float
    context: tuple[int, int]
    succeeds: bool


@dataclass(slots=True)
class FirstRun:
    """Sections of a configuration, and what a reader should know of them, in sentences."""

    sections: Sections
    notes: list[str] = field(default_factory=list)


def first_run_of_app(
    env_name: str, *, model: str, label: str, max_turns: int | None = None, max_output_tokens: int | None = None
) -> Sections:
    """Return the settings of a first run on a task app, of which only the limits of an episode are known.

    Raises:
        UnknownNameError, CheckpointError: there is no such model.
    """
    facts, gpu_bytes = facts_of(model), _gpu_bytes()
    guess = _unknown_lengths(facts)
    num_turns, output = max_turns or guess.num_turns, max_output_tokens or guess.output
    lengths = replace(
        guess, num_turns=num_turns, output=output, sampled=num_turns * output, context=(guess.context[0], num_turns)
    )
    sections = _sections(facts, lengths, gpu_bytes, None)
    sections["model"] |= {"base": model, "label": label}
    sections["rollout"] |= {"env_name": env_name}
    return sections


def first_run(env_name: str, *, model: str, label: str, options: Mapping[str, Any] | None = None) -> FirstRun:
    """Return the settings of a first run; `options` go over the environment's arguments.

    Nothing is downloaded, and no weights are read.

    Raises:
        UnknownNameError, CheckpointError: there is no such environment or model.
        ConfigError: the environment does not take these options.
    """
    facts = facts_of(model)
    gpu_bytes = _gpu_bytes()
    env_id = resolve(env_name)
    small = SmallTask()
    policies: Mapping[str, PolicyFactory] = {}
    can_be_made = True
    notes = [] if facts.is_here else [f"{model} is not on this machine yet: lengths are counted in bytes"]
    try:
        small, policies = run_to_end(_look_at(env_id, options or {}))
    except ConfigError as error:
        if options:
            raise
        fault = shortened(str(error), 200)
        notes.append(fault if "--option" in fault else f"{fault}; give --option, or fill rollout.env_config")
        can_be_made = False
    # On a processor, steps of a larger task take too long to see them help.
    config = {**(small.style if facts.is_tiny else {}), **(small.options if facts.is_tiny or not gpu_bytes else {})}
    config |= options or {}
    teacher = next((name for name in (small.policy, "random", *policies) if name in policies), None)
    if teacher is None and facts.is_tiny:
        notes.append(f"{env_name} has no hand-written player, and random weights learn nothing without a warm-up")
    lengths = _unknown_lengths(facts)
    if can_be_made:
        measure = partial(_measure, env_id, config, policies, teacher)
        try:
            lengths = run_to_end(measure(facts.tokenizer))
        except GymError as error:
            notes.append(f"lengths are counted in bytes, because {error}")
            lengths = run_to_end(measure(_bytes()))
    sections = _sections(facts, lengths, gpu_bytes, teacher)
    sections["model"] |= {"base": model, "label": label}
    sections["rollout"] |= {"env_name": env_name} | ({"env_config": config} if config else {})
    return FirstRun(sections, notes)


def _gpu_bytes() -> int | None:
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def _unknown_lengths(facts: ModelFacts) -> Lengths:
    return Lengths(8, 64 if facts.is_tiny else 256, 512.0, (1024, 8), succeeds=False)


def facts_of(base: str) -> ModelFacts:
    """Return what is known of the model that `base` names; of one of the hub's, what was downloaded before.

    Raises:
        UnknownNameError, CheckpointError: as `load_policy`.
    """
    check_base(base)
    is_of_hub = "/" in base and not Path(base).expanduser().exists()
    if is_of_hub and not _is_downloaded(base):
        return ModelFacts(base, None, None, _bytes(), is_here=False)
    model = load_skeleton(base).model
    context = known_context(base)[1] or getattr(model.config, "max_position_embeddings", None)
    return ModelFacts(base, sum(p.numel() for p in model.parameters()), context, load_tokenizer(base))


def _bytes() -> Any:
    """Return a tokenizer with which no text has fewer tokens than with another."""
    return tiny_tokenizer("qwen3-64-v2")


def _is_downloaded(base: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return all(isinstance(try_to_load_from_cache(base, f), str) for f in ("config.json", "tokenizer_config.json"))
    except ValueError as error:  # huggingface_hub's own error of a name that cannot be an id
        raise ConfigError(f"model {base!r}: {error}") from error


async def _look_at(env_id: str, options: Mapping[str, Any]) -> tuple[SmallTask, Mapping[str, PolicyFactory]]:
    try:
        async with looking_at(isolated_factory(env_id, options, "thread"), env_id) as env:
            return getattr(env, "small_task", None) or SmallTask(), getattr(env, "policies", None) or {}
    except GymError:
        raise
    except Exception as error:  # an author's constructor may raise anything
        options_text = f" with {dict(options)}" if options else ""
        raise ConfigError(f"{env_id} cannot be made{options_text}: {type(error).__name__}: {error}") from error


async def _measure(
    env_id: str,
    config: Mapping[str, Any],
    policies: Mapping[str, PolicyFactory],
    teacher: str | None,
    tokenizer: Any,
) -> Lengths:
    """Play the teacher, the reference, and answers that are not legal, which make the longest episodes."""
    names = dict.fromkeys(name for name in (teacher, "reference") if name in policies)
    by_policy = {name: await _play(env_id, config, tokenizer, policies[name]) for name in names if name is not None}
    lost = list(await _play(env_id, config, tokenizer, lambda _env, _generator: lambda _messages: "?"))
    if teacher is not None:
        # A hand-written player that reads its own answers cannot go on from such ones.
        with contextlib.suppress(ConfigError):
            lost += await _play(env_id, config, tokenizer, _clumsy(policies[teacher]))
    legal = [trajectory for episodes in by_policy.values() for trajectory in episodes]
    spans = [turn.action_span for trajectory in legal for turn in trajectory.turns]
    examples = by_policy[teacher] if teacher is not None else lost
    segments = [
        (int((~segment.action_mask).sum()), sum(turn.segment == index for turn in trajectory.turns))
        for trajectory in [*legal, *lost]
        for index, segment in enumerate(trajectory.segments)
    ]
    return Lengths(
        num_turns=max(len(trajectory.turns) for trajectory in [*legal, *lost]),
        output=max((stop - start for start, stop in spans), default=256),
        sampled=sum(trajectory.num_actions for trajectory in examples) / len(examples),
        context=(max(size for size, _ in segments), max(count for _, count in segments)),
        succeeds=any(trajectory.success is not None for trajectory in legal),
    )


def _clumsy(factory: PolicyFactory) -> PolicyFactory:
    """Return the player that answers illegally before it plays: many environments forgive two such answers."""

    def policy(env: Any, generator: Any) -> Any:
        player = factory(env, generator)

        async def play(messages: Sequence[Message]) -> Message | str:
            num_answers = sum(message.role == "assistant" for message in messages)
            return "?" if num_answers < _NUM_FORGIVEN else await spoken_by(player, messages)

        return play

    return policy


async def _play(env_id: str, config: Mapping[str, Any], tokenizer: Any, policy: PolicyFactory) -> Sequence[Trajectory]:
    limits = EpisodeLimits(max_turns=_MAX_TURNS, max_output_tokens=_NO_LIMIT - 1, max_model_len=_NO_LIMIT)
    actor, renderers, episodes = ScriptedActor(policy), RendererCache(tokenizer), []
    for index in range(_NUM_PLAYED):
        request = EpisodeRequest(str(index), Task(env_id, FIRST_TRAINING_SEED + index), sampling_seed=index)
        trajectory = await run_episode(
            request, make_env=partial(_make_env, dict(config)), act=actor, renderers=renderers, limits=limits
        )
        if trajectory.error is not None or not trajectory.turns:
            raise ConfigError(trajectory.error or "an episode had no turn")
        episodes.append(trajectory)
    return episodes


def _make_env(config: Mapping[str, Any], task: Task) -> Any:
    return make(task.env_id, **config)


def _sections(facts: ModelFacts, lengths: Lengths, gpu_bytes: int | None, teacher: str | None) -> Sections:
    # A pretrained model is wordier than a hand-written player, also once it has imitated one.
    spare = lengths.output // 8 + 1 if facts.is_tiny else lengths.output
    output = lengths.output + spare
    beside, num_answers = lengths.context
    length = 64 * math.ceil((1.125 * beside + num_answers * output) / 64)  # other seeds have longer texts
    length = min(length, _MAX_CONTEXT, facts.context or _MAX_CONTEXT)
    clip = next((clip[1:] for clip in _CLIPS if lengths.sampled <= clip[0]), None)
    policy_sections = (
        _random_weights(lengths, length) if facts.is_tiny else _pretrained_sections(facts, lengths, gpu_bytes)
    )
    sections: Sections = {
        "run": {"seed": 0, "log_tokens_every_n_iters": 10},  # a run that is begun here can be looked at and verified
        "algorithm": {"variety": "gspo_token"},
        **policy_sections,
    }
    sections["rollout"] |= {"max_turns": lengths.num_turns, "max_output_tokens": output, "max_model_len": length}
    sections["training"] |= {"max_tokens_per_microbatch": max(4096, length)}
    if clip is not None:
        sections["loss"] |= {"clip_low": clip[0], "clip_high": clip[1]}
    if lengths.num_turns > 1:
        sections["advantages"] = {"level": "turn"}
    if lengths.succeeds:
        sections["training"] |= {"stop_at_success_rate": 0.97 if facts.is_tiny else 0.95}
    if teacher is None:
        del sections["warmup"]
    else:
        sections["warmup"]["policy"] = teacher
    return sections


def _random_weights(lengths: Lengths, length: int) -> Sections:
    """Return what learned in configs/quickstart.toml, and with long answers in configs/sql_analyst.toml."""
    is_brief = lengths.output <= _BRIEF
    episodes = 192 if length <= 1024 else 64
    num_taught = 1024 if lengths.sampled <= _CLIPS[0][0] else 2048
    return {
        "model": {},
        "rollout": {"episodes_per_batch": episodes, "max_concurrent_rollouts": episodes},
        "training": {
            "iterations_per_epoch": 60,
            "group_size": 8,
            "batch_size": episodes // 4,
            "update_epochs": 3 if is_brief else 2,
            "learning_rate": 1.5e-3 if is_brief else 1e-3,
        },
        "loss": {"entropy_coef": 0.02},
        "evaluation": {"seeds": "0:200", "every_n_iters": 10},
        # At its full height the first steps break the form of a call. A fraction (40 of the 480 steps), so that a run
        # with fewer iterations is possible.
        "optimizer": {"schedule": "linear"} | ({} if is_brief else {"warmup_steps": 0.083}),
        "warmup": {
            # One pass over at most a million tokens of conversations: minutes on two cores.
            "num_episodes": min(num_taught, max(64, 2**20 // length // 64 * 64)),
            "num_epochs": 4,
            "learning_rate": 3e-3,
            "batch_size": 16,
        },
    }


def _pretrained_sections(facts: ModelFacts, lengths: Lengths, gpu_bytes: int | None) -> Sections:
    """Return what learned with SmolLM2-135M-Instruct and LoRA; without an adapter, the rate of full training."""
    has_adapter, is_long = facts.learns_by_adapter(gpu_bytes), lengths.sampled > _CLIPS[1][0]
    episodes = 32 if is_long and gpu_bytes is None else 96
    lora: Sections = {"training.lora": {"r": 16, "alpha": 32, "target_modules": "all-linear"}}
    return {
        "model": {"trainer_mode": "lora" if has_adapter else "full"}
        | ({} if gpu_bytes is None else {"dtype": "bfloat16"}),
        "rollout": {"episodes_per_batch": episodes, "max_concurrent_rollouts": episodes},
        "training": {
            "iterations_per_epoch": 40,
            "group_size": 8,
            "batch_size": episodes // 4,
            "learning_rate": 3e-4 if has_adapter else 1e-5,
            "checkpoint_every_n_iters": 5,
        },
        "loss": {"entropy_coef": 0.01},
        "evaluation": {"seeds": "0:64", "every_n_iters": 5},
        "warmup": {
            "num_episodes": 96,
            "num_epochs": 1,
            "learning_rate": 1e-3 if has_adapter else 1e-5,
            "batch_size": 16,
        },
        **(lora if has_adapter else {}),
    }
