"""Trajectories written by hand and models of a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.learning.batching import TrainBatch, build_batch
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.types import FinishReason, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

TrajectoryFactory = Callable[..., Trajectory]
GroupFactory = Callable[..., TrajectoryGroup]
VOCABULARY = 61


@pytest.fixture
def make_trajectory() -> TrajectoryFactory:
    """`make(rewards, observation=3, action=2, segments=1, ...)`: one turn per reward, cut into that many segments.

    A turn is `observation` tokens of context, then `action` sampled ones; ids come from the seed.
    """

    def make(
        rewards: Sequence[float | None],
        *,
        observation: int = 3,
        action: int | Sequence[int] = 2,
        num_segments: int = 1,
        seed: int = 0,
        outcome: Outcome = Outcome.TERMINATED,
        name: str = "t",
    ) -> Trajectory:
        generator = np.random.default_rng(seed)
        lengths = [action] * len(rewards) if isinstance(action, int) else list(action)
        turns: list[Turn] = []
        segments: list[Segment] = []
        for part in np.array_split(np.arange(len(rewards)), num_segments):
            mask: list[bool] = []
            turn_index: list[int] = []
            for k in part.tolist():
                start = len(mask)
                mask += [False] * observation + [True] * lengths[k]
                turn_index += [-1] * observation + [k] * lengths[k]
                spans = (start, start + observation), (start + observation, len(mask))
                turns.append(Turn(k, len(segments), *spans, FinishReason.STOP, reward=rewards[k]))
            closing = 2  # tokens that the environment or the template added after the last action
            mask, turn_index = mask + [False] * closing, turn_index + [-1] * closing
            logprobs = np.where(mask, -generator.random(len(mask)) - 0.1, 0.0)
            versions = np.where(mask, 0, -1)
            token_ids = generator.integers(3, VOCABULARY, len(mask))
            segments.append(Segment(token_ids, np.array(mask), logprobs, np.array(turn_index), versions))
        error = "it broke" if outcome.is_infrastructure_failure else None
        return Trajectory(
            name, 0, Task("test/Env-v0", 7), seed, tuple(segments), tuple(turns), (), outcome, error=error
        )

    return make


@pytest.fixture
def make_group() -> GroupFactory:
    def make(*trajectories: Trajectory) -> TrajectoryGroup:
        return TrajectoryGroup(Task("test/Env-v0", 7), trajectories, len(trajectories))

    return make


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """`make(kind="qwen3", dtype=float32, **config)`: an untrained transformers model, the same at each call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(kind: str = "qwen3", *, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
        config = {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            # wide enough that logits differ by some units, as a trained model's do
            "initializer_range": 0.3,
        }
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(config | overrides))).to(dtype)

    return make


@pytest.fixture
def make_batch(make_trajectory: TrajectoryFactory, make_group: GroupFactory) -> Callable[..., TrainBatch]:
    """`make(seed)`: three groups of four episodes, ragged, some in two segments; the middle group is constant."""

    def make(seed: int = 0) -> TrainBatch:
        groups = []
        for g, returns in enumerate([(0.0, 1.0, 1.0, 3.0), (1.0, 1.0, 1.0, 1.0), (-1.0, 0.0, 0.5, 0.0)]):
            members = [
                make_trajectory(
                    [None] * (i % 3) + [reward],
                    observation=2 + (g + i) % 3,
                    action=1 + (i + seed) % 3,
                    num_segments=1 + (i % 3 == 2),
                    seed=100 * seed + 10 * g + i,
                )
                for i, reward in enumerate(returns)
            ]
            groups.append(make_group(*members))
        batch = build_batch(groups, AdvantageSettings()).batch
        assert batch is not None
        return batch

    return make
