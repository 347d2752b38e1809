"""A served environment's description of itself: the answers of /, /health, /info and /task_info. Pure functions."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Rubric
from gspo_gym.seeding import FIRST_TRAINING_SEED

Json = dict[str, Any]  # Any: JSON

_NUM_SEEDS = 2 * FIRST_TRAINING_SEED  # environments seed generators that take 32 bits
_MAX_SEEDS_ASKED = 1_000


@dataclass(frozen=True, slots=True)
class AppFacts:
    """The facts about a served environment.

    Attributes:
        name: of the environment, without namespace and version. env_id: the whole of it.
        description: one line.
        tool_schemas: the tools offered to the model, as OpenAI function schemas.
        rubrics: to judge its episodes by.
        timeout_seconds: of one rollout. max_concurrent_rollouts: played at once.
        has_key: whether callers need one.
    """

    name: str
    env_id: str
    description: str
    tool_schemas: tuple[Mapping[str, Any], ...]
    rubrics: Rubrics
    timeout_seconds: float
    max_concurrent_rollouts: int
    has_key: bool


def health(facts: AppFacts) -> Json:
    """Answer /health, in the words of task apps and of OpenEnv; of the key it tells only whether there is one."""
    return {"healthy": True, "status": "healthy", "auth": {"required": facts.has_key}}


def info(facts: AppFacts) -> Json:
    """Answer /info."""
    return {
        "service": {"task": _task(facts), "version": _version(), "env_id": facts.env_id},
        "dataset": _dataset(facts),
        "rubrics": _rubrics(facts),
        "inference": _inference(facts),
        "limits": _limits(facts),
    }


def taskset(facts: AppFacts) -> Json:
    """Answer /task_info without a seed."""
    return {"taskset": {**_dataset(facts), "seed_range": [0, _NUM_SEEDS - 1]}}


def task_info(facts: AppFacts, seed: int) -> Json:
    """Answer /task_info of one seed."""
    return {
        "task": _task(facts),
        "environment": facts.name,
        "dataset": {**_dataset(facts), "split": "held_out" if seed < FIRST_TRAINING_SEED else "train"},
        "rubric": _rubrics(facts) or {},
        "inference": _inference(facts),
        "limits": _limits(facts),
        "task_metadata": {"seed": seed, "task_id": f"{facts.name}#{seed}"},
    }


def task_infos(facts: AppFacts, seeds: Sequence[int]) -> Json | list[Json]:
    """Answer /task_info: one task for one seed, a list for several, and the set of tasks without any.

    Raises:
        ValueError: a seed out of range, or too many of them.
    """
    if not seeds:
        return taskset(facts)
    wrong = [seed for seed in seeds if not 0 <= seed < _NUM_SEEDS]
    if wrong or len(seeds) > _MAX_SEEDS_ASKED:
        asked = f"got {wrong[0]}" if wrong else f"got {len(seeds)} of them"
        raise ValueError(f"seed: expected at most {_MAX_SEEDS_ASKED} numbers from 0 to {_NUM_SEEDS - 1}, {asked}")
    infos = [task_info(facts, seed) for seed in seeds]
    return infos[0] if len(infos) == 1 else infos


def _task(facts: AppFacts) -> Json:
    return {"id": facts.name, "name": facts.name, "description": facts.description, "version": _version()}


def _dataset(facts: AppFacts) -> Json:
    return {
        "id": facts.name,
        "name": facts.name,
        "splits": ["held_out", "train"],  # the sides of `seeding.FIRST_TRAINING_SEED`
        "default_split": "held_out",
        "sizes": {"held_out": FIRST_TRAINING_SEED, "train": FIRST_TRAINING_SEED},
    }


def _inference(facts: AppFacts) -> Json:
    return {"supports_tools": bool(facts.tool_schemas), "tools": [dict(schema) for schema in facts.tool_schemas]}


def _limits(facts: AppFacts) -> Json:
    return {
        "timeout_seconds": facts.timeout_seconds,
        "max_concurrent_rollouts": facts.max_concurrent_rollouts,
    }


def _rubrics(facts: AppFacts) -> Json | None:
    outcome, event = facts.rubrics.outcome, facts.rubrics.event
    if outcome is None and event is None:
        return None
    return {"outcome": _rubric(facts, outcome, "outcome"), "events": _rubric(facts, event, "events")}


def _rubric(facts: AppFacts, rubric: Rubric | None, kind: str) -> Json | None:
    if rubric is None:
        return None
    return {"name": f"{facts.name}/{kind}", **rubric.to_dict()}


def _version() -> str:
    return importlib.metadata.version("gspo-gym")
