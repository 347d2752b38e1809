"""Names from other trainers are errors that give our key and value, all of which must exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import HINTS, RETIRED, describe, explain, sections_of

KEYS = set(leaf_keys())
SECTIONS = {key.rsplit(".", 1)[0] for key in KEYS}


def test_every_key_that_is_recommended_exists() -> None:
    for name, (_, row) in HINTS.items():
        texts = [
            *row.ours,
            *row.also,
            *([row.advice] if isinstance(row.advice, str) else row.advice.values()),
            row.remark,
        ]
        named = [key for text in texts for key in re.findall(r"\b[a-z]+\.[a-z_]+(?:\.[a-z_]+)*(?= =|\b)", text)]
        assert row.ours or row.advice or row.remark, name
        assert [key for key in named if key not in {*SECTIONS, *KEYS, "metrics.jsonl"}] == [], name


def test_no_foreign_name_is_also_a_key_of_the_section_that_it_would_stand_in() -> None:
    known = {key.rsplit(".", 1)[1] for key in KEYS} | {section.split(".")[0] for section in SECTIONS}
    assert set(HINTS) & known == {"teacher"}  # ROLL's stands at the top of a file, ours in [distillation]
    assert len(HINTS) >= 400


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("training.num_generations", 8, "num_generations is what TRL calls it: write training.group_size = 8"),
        (
            "training.scoring_chunk_tokens",
            1024,
            "scoring_chunk_tokens is of an earlier version: logits take at most 512 MiB at once: remove it",
        ),
        ("num_generations", 8, "num_generations is what TRL calls it: write training.group_size = 8"),
        ("loss.epsilon", 0.2, "epsilon is what TRL calls it: write loss.clip_low = 0.2, loss.clip_high = 0.2"),
        ("loss.epsilon_high", 4e-4, "epsilon_high is what TRL calls it: write loss.clip_high = 0.0004"),
        (
            "loss.clip_range_left",
            3e-4,
            "clip_range_left is what stateset-agents calls it: write loss.clip_low = 0.0003",
        ),
        (
            "loss.clip_coef",
            [0.8, 1.2],
            "clip_coef is what AgileRL calls it: write loss.clip_low and loss.clip_high (two numbers are the ratio's "
            "bounds there, distances here)",
        ),
        (
            "algorithm.importance_sampling_level",
            "sequence",
            'importance_sampling_level is what TRL calls it: write algorithm.variety = "gspo"',
        ),
        ("training.use_kl_loss", True, "use_kl_loss is what ROLL calls it: write loss.kl_coef = kl_loss_coef"),
        (
            "training.use_kl_loss",
            False,
            "use_kl_loss is what ROLL calls it: write nothing: loss.kl_coef is 0 by default",
        ),
        (
            "advantages.reward_norm",
            "batch",
            'reward_norm is what ROLL calls it: write advantages.baseline = "batch", advantages.scale = "batch"',
        ),
        (
            "loss.loss_type",
            "dr_grpo",
            'loss_type is what TRL calls it: write loss.aggregation = "dr_grpo", loss.norm_length = '
            "max_completion_length",
        ),
        ("loss.loss_type", "sapo", 'loss_type is what TRL calls it: write loss.surrogate = "sapo"'),
        (
            "advantages.normalize_std",
            False,
            'normalize_std is what an earlier version calls it: write advantages.scale = "none"',
        ),
        ("optimizer.warmup_ratio", 0.1, "warmup_ratio is what TRL calls it: write optimizer.warmup_steps = 0.1"),
        (
            "model.cast_logprobs_to_fp32",
            True,
            "cast_logprobs_to_fp32 is of AgileRL: logprobs are always computed in float32: remove it",
        ),
        (
            "hyperparams",
            {"lr": 1.0},
            "hyperparams is of the hosted trainer's old form: write [training] and [loss]",
        ),
        ("training.lr", 1e-5, "lr is what AgileRL calls it: write training.learning_rate = 1e-05"),
    ],
)
def test_a_foreign_name_gives_our_key_and_value(
    key: str, value: Any, problem: str, problems: Callable[..., list[str]]
) -> None:
    assert problems({key: value}) == [f"{key}: {problem}"]


def test_a_name_that_nobody_uses_is_not_explained() -> None:
    assert explain("training.group_sise", 8) is None


def field(key: str) -> FieldInfo:
    section, name = key.rsplit(".", 1)
    return dict(sections_of(RunConfig))[section].model_fields[name]


def sample(key: str) -> Any:
    """A value that the key takes."""
    described = describe(field(key))
    if described.startswith('"'):
        return re.findall(r'"([^"]+)"', described)[0]
    number = 1.5 if "> 1" in described else 0.5
    for noun, value in (("an integer", 4), ("a number", number), ("true or false", True), ("a string", "text")):
        if described.startswith((noun, f"a non-empty {noun.split()[-1]}")):
            return value
    return ["text"]


def assignments(text: str) -> list[tuple[str, Any]]:
    """What a sentence says to write: keys, and values as TOML reads them."""
    literal = r'"[^"]*"|\["[^\]]*\]|-?\d[\d.e+-]*|true|false'
    found = re.findall(rf"([a-z]+(?:\.[a-z_]+)+) = ({literal})(?=[,;)]| \(|$)", text)
    return [(key, tomllib.loads(f"x = {value}")["x"]) for key, value in found]


def test_following_the_advice_is_always_valid() -> None:
    """For each foreign name, each of its own values and one of a renamed key: what is advised is what our key takes."""
    advised = 0
    for name, (_, row) in HINTS.items():
        values = [*row.values, *(() if isinstance(row.advice, str) else row.advice)]
        for value in values or ([sample(row.ours[0])] if row.ours else [True]):
            text = explain(f"training.{name}", value)
            assert text is not None
            assert text.startswith(name)
            for key, advice in assignments(text):
                info = field(key)
                given = tuple(advice) if isinstance(advice, list) else advice
                takes = Annotated[info.annotation, "what the key takes", *info.metadata]
                TypeAdapter(takes, config=ConfigDict(strict=True)).validate_python(given)
                advised += 1
    assert advised > 150


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}])
def test_a_value_that_no_key_of_ours_takes_is_not_repeated_as_advice(value: Any) -> None:
    assert explain("training.warmup_ratio", value) == (
        "warmup_ratio is what TRL calls it: write optimizer.warmup_steps"
    )


@pytest.mark.parametrize("key", RETIRED)
def test_a_key_of_an_earlier_version_is_an_error_that_says_what_to_do_with_keys_that_exist(
    key: str, problems: Callable[..., list[str]]
) -> None:
    assert key not in KEYS
    assert f"{key}: {key.rpartition('.')[2]} is of an earlier version: {RETIRED[key]}" in problems({key: 1})
    sections = {name.partition(".")[0] for name in KEYS}
    named = re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", RETIRED[key])
    assert [name for name in named if name.partition(".")[0] in sections and name not in KEYS] == []
