"""What `config check` accepts is what can be built: choices of the learning sections, alone and a few at a time.

A rule over several keys that a record has and the check has not would end a run after its warm-up.
"""

from __future__ import annotations

import asyncio
import copy
import random
import types
import typing
from collections.abc import Sequence
from typing import Any

import pytest

from gspo_gym.config.build.preflight import find_obstacles
from gspo_gym.config.build.trainer import build_learner, build_plan
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.policy.load import Policy, load_policy

BASE: dict[str, dict[str, Any]] = {
    "algorithm": {},
    "model": {"base": "tiny:qwen3-64", "label": "x"},
    "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                "max_turns": 2, "max_output_tokens": 4, "max_model_len": 512,
                "episodes_per_batch": 8},
    "training": {"iterations_per_epoch": 4, "learning_rate": 1e-3, "group_size": 4, "batch_size": 4},
    "evaluation": {"seeds": "0:4"},
}  # fmt: skip
SECTIONS = ("algorithm", "loss", "rewards", "advantages", "correction", "reference", "optimizer", "training")
# Values of keys that are no choices, so that the rules about them are met, too: 4 iterations have 8 optimizer steps.
NUMBERS: dict[str, Sequence[Any]] = {
    "acknowledge": (["wide_clip"], ["length_weighting"], ["truncated_sampling"]),
    "clip": (2.0,), "clip_high": (0.3,), "clip_low": (0.2,), "discount": (0.9,),
    "dual_clip": (1.0004, 1.3, 3.0), "filter_eps": (0.0,), "high": (3.0,),
    "kl_clamp": (5.0,), "kl_coef": (0.01,), "kl_shaping_coef": (0.1,), "kl_target": (0.1,),
    "low": (0.3,), "max_staleness": (1, 2),
    "min_p": (0.1,), "norm_length": (100,), "warmup_steps": (1, 8, 9, 0.3, 0.9), "off_policy_threshold": (1.0,),
    "overlong": (0.5,), "repetition_penalty": (1.1,), "step_rewards_beta": (0.5,), "top_k": (5,),
    "step_rewards_k_limits": ({"a": 2},), "step_rewards_weights": ({"a": 2.0},), "top_p": (0.9,), "update_epochs": (2,),
    "update_every_n_iters": (2,), "weight_sync_interval": (2, 3),
}  # fmt: skip
Change = tuple[str, str, Any]


def choices(annotation: Any) -> list[Any]:
    """The values of a Literal or a switch, also below a union."""
    if annotation is bool:
        return [True, False]
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(annotation) for value in choices(part)]
    return []


def changes() -> list[Change]:
    sampling = ("top_p", "top_k", "min_p", "repetition_penalty", "rescore")
    names = {section: RunConfig.model_fields[section].annotation.model_fields for section in (*SECTIONS, "rollout")}  # type: ignore[union-attr]
    return [
        (section, name, value)
        for section, fields in names.items()
        for name, field in fields.items()
        if section != "rollout" or name in sampling
        for value in (*choices(field.annotation), *NUMBERS.get(name, ()))
    ]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("tiny:qwen3-64")


def refused_after_the_check(mutated: Sequence[Sequence[Change]], policy: Policy) -> tuple[int, list[str]]:
    """How many were accepted, and what could not be built of those although nothing had stood in the way."""
    accepted, wrong = 0, []
    for some in mutated:
        values = copy.deepcopy(BASE)
        for section, name, value in some:
            values.setdefault(section, {})[name] = value
        try:
            config = RunConfig.from_dict(values)
        except ConfigError:
            continue
        accepted += 1
        try:
            build_plan(config)
            build_learner(config, policy)
        except ConfigError as error:
            if not asyncio.run(find_obstacles(config)):
                wrong.append(f"{some}: {error}")
    return accepted, wrong


@pytest.mark.parametrize("section", [*SECTIONS, "rollout"])
def test_every_choice_that_the_check_accepts_can_be_built(section: str, policy: Policy) -> None:
    alone = [[change] for change in changes() if change[0] == section]
    assert len(alone) >= 6
    accepted, wrong = refused_after_the_check(alone, policy)
    assert accepted > 1
    assert wrong == []


@pytest.mark.parametrize("seed", range(6))
def test_choices_that_the_check_accepts_together_can_be_built_together(seed: int, policy: Policy) -> None:
    generator, table = random.Random(seed), changes()
    some = [generator.sample(table, generator.choice((2, 2, 3, 4))) for _ in range(120)]
    accepted, wrong = refused_after_the_check(some, policy)
    assert accepted > 20
    assert wrong == []
