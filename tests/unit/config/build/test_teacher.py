"""The teacher of a configuration: which model it is, and that its token ids mean what the policy's do."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_run import record_run
from small_run import small_run
from tokenizers import Tokenizer

from gspo_gym.config.build.preflight import rehearse
from gspo_gym.config.build.reference import check_teacher, load_teacher
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import missing_machinery
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.policy.load import load_policy, load_tokenizer, save_policy, vocabulary_digest


def config_of(teacher: str, **sections: Any) -> RunConfig:
    return RunConfig.from_dict(small_run(distillation={"teacher": teacher}, **sections))


def test_without_the_section_there_is_no_teacher() -> None:
    config = RunConfig.from_dict(small_run())
    check_teacher(config, "tiny:qwen3-64")
    assert load_teacher(config, load_policy("tiny:qwen3-64"), "cpu") is None


def test_a_folders_weights_are_the_teachers(tmp_path: Path) -> None:
    saved = load_policy("tiny:qwen3-64@5")
    save_policy(saved, tmp_path / "teacher")
    config = config_of(str(tmp_path / "teacher"))
    check_teacher(config, "tiny:qwen3-64")
    teacher = load_teacher(config, load_policy("tiny:qwen3-64"), "cpu")
    assert teacher is not None
    weights = dict(teacher.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in saved.model.named_parameters())


def test_another_vocabulary_is_refused_before_and_when_it_is_loaded() -> None:
    config = config_of("tiny:qwen3-64-v2")
    reason = r"distillation\.teacher: tiny:qwen3-64-v2.* has another vocabulary than the model \(\d+ and \d+ tokens"
    with pytest.raises(ConfigError, match=reason):
        check_teacher(config, "tiny:qwen3-64")
    with pytest.raises(ConfigError, match=reason):
        load_teacher(config, load_policy("tiny:qwen3-64"), "cpu")


def test_a_teacher_that_is_not_there_is_named() -> None:
    with pytest.raises(UnknownNameError, match="no-such-run"):
        check_teacher(config_of("no-such-run"), "tiny:qwen3-64")


def test_a_teacher_that_reads_less_than_an_episode_is_refused(tmp_path: Path) -> None:
    save_policy(load_policy("tiny:qwen3-64@5"), tmp_path / "teacher")
    path = tmp_path / "teacher" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 255}))
    with pytest.raises(ConfigError, match=r"reads 255 tokens, and rollout\.max_model_len = 256: lower that"):
        check_teacher(config_of(str(tmp_path / "teacher")), "tiny:qwen3-64")


def test_vocabularies_are_compared_by_what_ids_mean_and_not_by_names() -> None:
    """Two ids exchanged, or two merges: as many tokens of the same texts, and another digest."""
    tokenizer = load_tokenizer("tiny:qwen3-64")
    digest = vocabulary_digest(tokenizer)
    renamed = load_tokenizer("tiny:qwen3-128")
    renamed.name_or_path = "another"
    assert vocabulary_digest(renamed) == digest
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "ba": 3}, "merges": [["a", "b"], ["b", "a"]]}
    base = json.loads(Tokenizer.from_str(json.dumps(whole(model))).to_str())
    digests = [vocabulary_digest(Bare(base))]
    for change in ({"vocab": {"a": 1, "b": 0, "ab": 2, "ba": 3}}, {"merges": [["b", "a"], ["a", "b"]]}):
        other = copy.deepcopy(base)
        other["model"] |= change
        digests.append(vocabulary_digest(Bare(other)))
    assert len(set(digests)) == 3


def whole(model: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json around its model."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    return {"version": "1.0", "added_tokens": [], **dict.fromkeys(names), "model": model}


class Bare:
    """A tokenizer of transformers, as far as its tables go."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self.backend_tokenizer = Tokenizer.from_str(json.dumps(tables))

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary


def test_several_ranks_have_no_teacher_yet() -> None:
    ranks = {"type": "cluster", "gpus_for_vllm": 1, "gpus_for_training": 2}
    config = config_of("tiny:qwen3-64", compute={"gpu_count": 0}, topology=ranks)
    (problem,) = [text for text in missing_machinery(config.sections) if "teacher" in text]
    assert problem.startswith("distillation.teacher: topology.gpus_for_training = 2 processes cannot share a teacher")


def test_a_rehearsal_in_a_folder_of_its_own_finds_the_run_that_teaches(tmp_path: Path) -> None:
    folder = {"folder": str(tmp_path)}
    record_run(RunConfig.from_dict(small_run(run=folder)))
    assert len(asyncio.run(rehearse(config_of("test", run=folder, model={"label": "next"}))).episodes) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["test"]


def test_a_policy_that_teaches_itself_is_loaded_once_and_rehearsed(tmp_path: Path) -> None:
    sections = {"run": {"folder": str(tmp_path)}, "distillation": {"teacher": "self", "feedback": "environment"}}
    config = RunConfig.from_dict(small_run(**sections))
    check_teacher(config, "tiny:qwen3-64")
    assert load_teacher(config, load_policy("tiny:qwen3-64"), "cpu") is None
    assert len(asyncio.run(rehearse(config)).episodes) == 1
