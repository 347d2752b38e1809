"""The records that engines and their callers exchange: the limits that they hold, and the promises left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sleepy_engine import SleepyEngine

from gspo_gym.engine.base import (
    Capabilities,
    SamplingParams,
    WeightUpdate,
    num_tokens_to_sample,
    refuse_schema,
    require_sleeping,
    require_vocabulary,
    token_list,
)
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import ConfigError, ContextOverflowError, EngineError
from gspo_gym.types import Sampling


def params(max_tokens: int, min_tokens: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=(), seed=0)


def test_a_completion_has_at_least_one_token_and_may_have_to_have_all_of_them() -> None:
    assert params(1, 1).max_tokens == 1
    with pytest.raises(ConfigError, match="max_tokens: expected at least 1, got 0"):
        params(0)
    with pytest.raises(ConfigError, match="min_tokens: expected 0 <= min_tokens <= max_tokens = 2, got 3"):
        params(2, 3)


def test_the_parameters_of_one_completion_are_the_runs_with_a_minimum_that_fits() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, min_tokens=5)
    made = SamplingParams.of(sampling, max_tokens=3, stop_token_ids=(2,), seed=4, json_schema="{}")
    assert made == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        min_tokens=3,
        max_tokens=3,
        stop_token_ids=(2,),
        seed=4,
        json_schema="{}",
    )
    assert SamplingParams.of(sampling, max_tokens=9, stop_token_ids=(), seed=0).min_tokens == 5


def test_an_engine_that_says_nothing_promises_no_more_than_the_plainest() -> None:
    said = Capabilities(is_trainable=True, seeds_per_request=True, reuses_prefixes=False, max_model_len=8)
    optional = (said.has_checksums, said.structured_output, said.can_sleep, said.num_copies)
    assert optional == (False, False, False, 1)
    assert (said.update_kinds, said.pause_modes, said.reports_versions) == (("shared",), ("wait",), True)


@pytest.mark.parametrize("kind", ["full", "adapter", "shared", "transfer"])
def test_an_update_brings_what_its_kind_needs_and_nothing_else(kind: str) -> None:
    brought = {"folder": Path("weights")} if kind in ("full", "adapter") else {}
    brought = {"tensors": object()} if kind == "transfer" else brought
    assert WeightUpdate(version=3, kind=kind, **brought).version == 3
    for wrong in ({"folder": Path("weights")}, {"tensors": object()}, {}):
        if wrong.keys() != brought.keys():
            with pytest.raises(ConfigError, match="WeightUpdate 3: expected"):
                WeightUpdate(version=3, kind=kind, **wrong)


def test_only_an_engine_that_can_sleep_is_taken_for_one() -> None:
    sleepy = SleepyEngine(lambda prompt, turn: [5])
    assert require_sleeping(sleepy) is sleepy
    with pytest.raises(ConfigError, match="got one that cannot"):
        require_sleeping(ScriptedEngine([]))


def test_what_is_left_of_the_context_bounds_a_completion_and_a_prompt_needs_a_token_and_room_for_one() -> None:
    asked = [num_tokens_to_sample(length, params(3), max_model_len=5) for length in (1, 2, 3, 4)]
    assert asked == [3, 3, 2, 1]
    with pytest.raises(ContextOverflowError, match="5 tokens leaves no room in a context of 5"):
        num_tokens_to_sample(5, params(3), max_model_len=5)
    with pytest.raises(EngineError, match="at least one token, got none"):
        num_tokens_to_sample(0, params(3), max_model_len=5)


def test_tokens_of_the_vocabulary_are_taken_from_the_first_to_the_last() -> None:
    require_vocabulary(0, 9, 10)
    for lowest, highest in ((-1, 9), (0, 10)):
        with pytest.raises(EngineError, match=rf"must be in \[0, 10\), got {lowest}..{highest}"):
            require_vocabulary(lowest, highest, 10)


def test_a_schema_is_refused_by_the_engines_name_and_none_is_fine() -> None:
    refuse_schema(params(1), "ThisEngine")
    with pytest.raises(ConfigError, match=r"ThisEngine cannot obey SamplingParams\.json_schema"):
        refuse_schema(replace(params(1), json_schema="{}"), "ThisEngine")


@pytest.mark.parametrize("token_ids", [(3, 4), [np.int32(3), np.int32(4)], np.array([3, 4], np.int32)], ids=repr)
def test_token_ids_become_integers_that_json_can_write(token_ids: object) -> None:
    found = token_list(token_ids)
    assert (found, [type(token) for token in found]) == ([3, 4], [int, int])
