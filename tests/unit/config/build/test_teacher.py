"""The teacher of a configuration: which model it is, and that its token ids mean what the policy's do."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_run import record_run
from small_run import small_run
from tokenizers import Tokenizer

from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.config.build.preflight import rehearse
from gspo_gym.config.build.reference import check_teacher, load_teacher
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import missing_machinery
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.policy.export import Weights
from gspo_gym.policy.load import load_policy, load_tokenizer, save_policy, vocabulary_digest
from gspo_gym.policy.manifest import sha256_of, weights_digest
from gspo_gym.run.models import find_model, model_card
from gspo_gym.run.records import read_run_id, read_teacher
from gspo_gym.run.report.page_data import run_values


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
    with pytest.raises(UnknownNameError, match=r"^distillation\.teacher: no-such-run: there is no such run"):
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


@pytest.mark.slow
def test_a_run_records_which_checkpoint_taught_it_and_goes_on_with_no_other(tmp_path: Path) -> None:
    both = {"checkpoint_every_n_iters": 1, "keep_last": 3}
    moves = {"entropy_coef": 0.1}  # every step's weights, whatever is earned
    record_run(RunConfig.from_dict(small_run(run={"folder": str(tmp_path)}, training=both, loss=moves)))
    checkpoint = tmp_path / "test" / "checkpoints" / "step_000002"
    digest = sha256_of(checkpoint / "model.safetensors")

    def student(steps: int, teacher: str) -> RunConfig:
        training = both | {"iterations_per_epoch": steps}
        model = {"label": "student"}
        run = {"folder": str(tmp_path), "log_tokens_every_n_iters": 1}
        return config_of(teacher, run=run, model=model, training=training)

    run_training(student(1, "test"))
    run = tmp_path / "student"
    facts = read_teacher(run)
    assert facts == {
        "teacher": "test",
        "base": str(checkpoint),
        "run": "test",
        "run_id": read_run_id(tmp_path / "test"),
        "step": 2,
        "vocabulary_sha256": vocabulary_digest(load_tokenizer("tiny:qwen3-64")),
        "weights_sha256": digest,
    }
    text = f"test, checkpoint of step 2 of run test, weights of SHA-256 {digest[:12]}"
    assert run_values(run)["about"]["teacher"] == text
    card = model_card(find_model("student", runs=tmp_path), Weights("transformers", None, None, {}), version="1")
    assert f"\n- taught by {text}\n" in card
    verified = verify_step(run, 1)
    assert (verified.difference, verified.missing) == (None, [])
    assert verified.compared["teacher_log_ratio"][0] > 0
    shutil.rmtree(checkpoint)  # and the name means the checkpoint before
    (missing,) = verify_step(run, 1).missing
    assert missing == "logprobs of the teacher: test is no model in a folder here, or not with the weights that taught"
    with pytest.raises(ConfigError, match=r"is not the one that this run began with \(weights_sha256 '.*test@2"):
        run_training(student(2, "test"), resume=True)
    with pytest.raises(ConfigError, match=r"is not the one that this run began with"):
        run_training(student(2, "tiny:qwen3-64@7"), resume=True)


def test_the_digest_of_weights_is_the_files_or_of_the_list_of_several(tmp_path: Path) -> None:
    assert weights_digest(tmp_path) is None
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / "learner.safetensors").write_bytes(b"moments")
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    two = hashlib.sha256(b"two").hexdigest()
    assert weights_digest(tmp_path) == two
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    one = hashlib.sha256(b"one").hexdigest()
    text = f'[["model-1.safetensors", "{one}"], ["model-2.safetensors", "{two}"]]'
    assert weights_digest(tmp_path) == hashlib.sha256(text.encode()).hexdigest()


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


def test_a_template_that_cannot_show_feedback_is_refused_in_a_rehearsal_and_before_a_warmup(tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if 'Feedback' in m.content %}{{ raise_exception('none here') }}{% endif %}"
    template = tmp_path / "no_feedback.jinja"
    template.write_text(refuses + "{% endfor %}" + load_tokenizer("tiny:qwen3-64").chat_template)
    sections = {
        "run": {"folder": str(tmp_path / "runs")},
        "model": {"chat_template": str(template)},
        "distillation": {"teacher": "self", "feedback": "environment"},
        "warmup": {"policy": "random", "num_episodes": 4, "learning_rate": 1e-3},
    }
    config = RunConfig.from_dict(small_run(**sections))
    for go in (lambda: asyncio.run(rehearse(config)), lambda: run_training(config)):
        with pytest.raises(ConfigError, match=r"distillation\.feedback: the chat template .* none here"):
            go()
    assert not config.run_folder.exists()
