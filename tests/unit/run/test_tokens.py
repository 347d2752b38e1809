"""Files of tokens: what a run writes is what its episodes and its metrics say, and is read back piece by piece."""

from __future__ import annotations

import ast
import dataclasses
import gzip
import hashlib
import io
import json
import math
import shutil
import subprocess
import sys
import tokenize
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from forked import forked
from full_disk import small_disk
from gguf_files import llama, write_gguf
from safetensors import numpy as tensors
from safetensors import safe_open

from gspo_gym.cli import verify as cli_verify
from gspo_gym.cli import verify_models
from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import Difference, verify_step
from gspo_gym.config.build.trainer import build_plan
from gspo_gym.config.run_config import RunConfig
from gspo_gym.diagnosis import oracle, oracle_forks, oracle_teacher
from gspo_gym.errors import ConfigError, RecordError
from gspo_gym.learning.advantages import RunningReturns
from gspo_gym.learning.batching import BatchCounts, BuiltBatch
from gspo_gym.learning.tokens import Fate, TokenTable
from gspo_gym.policy.load import load_policy, save_policy
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.collect import Collected
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder, read_events, read_metrics
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.tokens import TokenFile, open_tokens, pack_columns, pack_tokens, token_steps
from gspo_gym.types import (
    DroppedEpisode,
    FinishReason,
    Outcome,
    Segment,
    Task,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

NO_PENALTIES = {"inconsistent_penalty": 0.0, "illegal_penalty": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "played ahead, an adapter, KL": {
        "training": {"max_staleness": 1, "update_epochs": 2},
        "warmup": {"num_episodes": 16, "num_epochs": 1},
        "model": {"trainer_mode": "lora"},
        "loss": {"kl_coef": 0.1},
        "correction": {"old_logprobs": "rollout"},
    },
    "forks": {
        "rollout": {"forks_per_episode": 2},
        "advantages": {"level": "trajectory", "baseline": "leave_one_out", "scale": "none"},
    },
}


def config_of(folder: Path, changes: dict[str, Any]) -> RunConfig:
    values: dict[str, dict[str, Any]] = {
        "run": {"folder": str(folder), "log_tokens_every_n_iters": 1},
        "algorithm": {"variety": "gspo_token"},
        "model": {"base": "tiny:qwen3-64", "label": "test"},
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {"style": "terse", "low": 1, "high": 4, "max_guesses": 3},
            "max_turns": 3,
            "max_output_tokens": 3,
            "max_model_len": 256,
            "episodes_per_batch": 16,
        },
        "training": {"iterations_per_epoch": 2, "group_size": 4, "batch_size": 4, "learning_rate": 1e-2},
        "evaluation": {"seeds": "0:2", "every_n_iters": 2},
        "warmup": {"num_episodes": 128, "num_epochs": 3, "learning_rate": 3e-3, "batch_size": 16},
    }
    for section, keys in changes.items():
        values.setdefault(section, {}).update(keys)
    return RunConfig.from_dict(values)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_the_tokens_of_a_run_are_those_of_its_episodes_and_sum_to_its_loss(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    run_training(config_of(tmp_path, changes))
    folder = tmp_path / "test"
    assert token_steps(folder) == [1, 2]
    num_passes = changes.get("training", {}).get("update_epochs", 1)
    lines = read_metrics(folder)
    assert all("loss/total" in line for line in lines), "every step teaches something"
    for line in lines:
        tokens = open_tokens(folder, line["step"])
        every = tokens.columns()
        episodes = read_episodes(folder / "episodes" / f"step_{line['step']:06d}.jsonl.gz")
        assert list(tokens.spans) == [episode.trajectory_id for episode in episodes]
        assert tokens.num_passes == num_passes == len(every["share"])
        assert math.fsum(every["share"].ravel().tolist()) == pytest.approx(line["loss/total"], abs=1e-6)
        passed = ~np.isnan(every["logprob"])
        assert passed.sum() == line["batch/trained_tokens"]
        verified = verify_step(folder, line["step"])
        assert verified.difference is None
        has_weights = line["step"] == 1  # after which there is a checkpoint again
        assert verified.exit_code == (0 if has_weights else 2), verified.missing
        assert (passed.all(0) == (every["fate"] == Fate.TRAINED)).all()
        assert np.isnan(every["ref_logprob"][every["fate"] == Fate.TRAINED]).all() == ("loss" not in changes)
        assert any(episode.forked_from for episode in episodes) == ("rollout" in changes)
        for number, episode in enumerate(episodes):
            own = tokens.columns(episode.trajectory_id)
            masks = [segment.action_mask for segment in episode.segments]
            for name, column in (("rollout_logprobs", "rollout_logprob"), ("weight_version", "weight_version")):
                arrays = [getattr(segment, name) for segment in episode.segments]
                assert own[column].tolist() == [x for a, m in zip(arrays, masks, strict=True) for x in a[m].tolist()]
            start, stop = tokens.spans[episode.trajectory_id]
            for name, values in every.items():
                part = values[:, number] if name == "optimizer_step" else values[..., start:stop]
                np.testing.assert_array_equal(own[name], part, err_msg=name)
            for p in range(num_passes):
                if own["optimizer_step"][p] >= 0 and not np.isnan(own["logprob"][p]).any():
                    gap = own["logprob"][p].astype(float) - own["old_logprob"].astype(float)
                    assert own["ratio"][p] == pytest.approx(math.exp(gap.mean()), rel=2e-6)


TAUGHT: list[dict[str, Any]] = [
    {"baseline": True},
    {"reward": False, "coefficient": 0.5},
    {"divergence": "reverse_kl", "coefficient": 0.5},
    {"divergence": "forward_kl", "reward": False},
]


@pytest.mark.parametrize("distillation", TAUGHT)
def test_a_step_with_a_teacher_is_verified_by_its_weights(tmp_path: Path, distillation: dict[str, Any]) -> None:
    save_policy(load_policy("tiny:qwen3-64@5"), tmp_path / "teacher")
    changes = {
        "distillation": {"teacher": str(tmp_path / "teacher"), **distillation},
        "training": {"iterations_per_epoch": 1, "update_epochs": 2},
        "warmup": {"num_episodes": 16, "num_epochs": 1},
        "rollout": {"episodes_per_batch": 8},
    }
    run_training(config_of(tmp_path, changes))
    verified = verify_step(tmp_path / "test", 1)
    assert (verified.difference, verified.missing) == (None, [])
    names = {"loss/distillation", "share", "grad_norm"}
    if "divergence" in distillation:
        names |= {"teacher_divergence", "distillation/divergence"}
    else:
        names |= {"teacher_log_ratio", "distillation/advantage", "distillation/kl", "distillation/dropped_fraction"}
    names |= {"teacher_kl"} if "baseline" in distillation else set()
    assert names <= set(verified.compared)
    recorded = {name for name in open_columns(tmp_path) if name.startswith("teacher_")}
    assert recorded == {name for name in names if name.startswith("teacher_")}
    shutil.rmtree(tmp_path / "teacher")
    assert "logprobs of the teacher" in verify_step(tmp_path / "test", 1).missing[0]


def open_columns(folder: Path) -> list[str]:
    """The columns that the first step's file of a run has."""
    with safe_open(folder / "test" / "tokens" / "step_000001.safetensors", framework="np") as file:
        names: list[str] = file.keys()
    return names


def trajectory(name: str, num_tokens: int, *, slope: float = 0.0) -> Trajectory:
    mask = np.array([False] + [True] * num_tokens)
    index, versions = np.where(mask, 0, -1), np.where(mask, 3, -1)
    logprobs = np.where(mask, -0.5 - slope * np.arange(len(mask)), 0.0)
    segment = Segment(np.arange(len(mask)), mask, logprobs, index, versions)
    turns = (Turn(0, 0, (0, 1), (1, 1 + num_tokens), FinishReason.STOP, reward=1.0),)
    return Trajectory(name, 0, Task("test", 1), 0, (segment,), turns, (), Outcome.TERMINATED)


def test_tokens_that_the_learner_never_saw_say_why(tmp_path: Path) -> None:
    """No trajectory is in the batch: one is of a constant group, one within filter_eps, one of unknown weights."""
    constant, filtered, uncommitted = trajectory("a", 2), trajectory("b", 1), trajectory("c", 3)
    task = constant.task
    groups = (TrajectoryGroup(task, (constant,), 1), TrajectoryGroup(task, (filtered, uncommitted), 2))
    dropped = DroppedEpisode("c", Outcome.TERMINATED, "its weights")
    kept = (TrajectoryGroup(task, (filtered,), 2, (dropped,)),)
    collected = Collected(groups, kept, num_dropped=1, num_refilled=0, failures=())
    path = tmp_path / "step_000007.safetensors"
    path.write_bytes(pack_tokens(7, collected, BuiltBatch(None, BatchCounts(), RunningReturns(), 1.0), TokenTable()))
    tokens = TokenFile(path)
    assert (tokens.step, tokens.num_tokens, tokens.num_passes) == (7, 6, 1)
    assert tokens.spans == {"a": (0, 2), "b": (2, 3), "c": (3, 6)}
    columns = tokens.columns()
    assert columns["fate"].tolist() == [Fate.CONSTANT_GROUP] * 2 + [Fate.FILTERED] + [Fate.UNCOMMITTED] * 3
    assert (columns["rollout_logprob"].tolist(), columns["weight_version"].tolist()) == ([-0.5] * 6, [3] * 6)
    assert (columns["share"].tolist(), columns["clip"].tolist()) == ([[0.0] * 6], [[0] * 6])
    assert columns["optimizer_step"].tolist() == [[-1] * 3]
    assert all(np.isnan(columns[name]).all() for name in ("advantage", "old_logprob", "ref_logprob"))
    assert all(np.isnan(columns[name]).all() for name in ("logprob", "ratio", "correction", "entropy"))
    with pytest.raises(RecordError, match="step 7: no tokens of a trajectory 'd'"):
        tokens.columns("d")


def test_a_file_has_numbers_of_trajectories_once_and_gives_back_every_bit(tmp_path: Path) -> None:
    """Trajectories of 3, 0 and 2 tokens, two passes; 300 needs 16 bits, and -0.0 is not 0.0."""
    nan = np.nan
    columns: dict[str, Any] = {
        "advantage": np.array([1, 1, 1, -2, -2], np.float32),
        "rollout_logprob": np.array([-1, -2, -3, -4, -5], np.float32),
        "old_logprob": np.array([nan] * 3 + [-4, -4], np.float32),
        "weight_version": np.array([300, 300, 300, 2, 2], np.int32),
        "fate": np.array([3, 3, 3, 0, 1], np.uint8),
        "logprob": np.array([[nan] * 3 + [-4, -4.5], [nan] * 3 + [-4, -4]], np.float32),
        "ratio": np.array([[nan] * 3 + [1.5, 1.5], [nan] * 3 + [0.5, 0.5]], np.float32),
        "clip": np.array([[0, 0, 0, 2, 2], [0, 0, 0, 1, 1]], np.uint8),
        "entropy": np.array([[nan] * 3 + [1, 2]] * 2, np.float32),
        "share": np.array([[0, 0, -0.0, 3, 3], [0] * 5], np.float32),
        "optimizer_step": np.array([[-1, -1, 0], [-1, -1, 1]], np.int32),
    }
    path = tmp_path / "step_000001.safetensors"
    path.write_bytes(pack_columns(1, {"s/g/0": 3, "s/g/1": 0, "t": 2}, columns, {"grad_norm": np.ones(2)}))
    with safe_open(path, framework="np") as file:
        shapes = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["trajectories"] == '[["s/g/",["0","1"]],["",["t"]]]'
        narrow = {name: str(file.get_tensor(name).dtype) for name in ("weight_version", "optimizer_step", "num_tokens")}
    assert narrow == {"weight_version": "int16", "optimizer_step": "int8", "num_tokens": "int8"}
    by_trajectory = {name for name, shape in shapes.items() if shape in ((3,), (2, 3))}
    assert by_trajectory == {
        "advantage",
        "old_logprob",
        "weight_version",
        "ratio",
        "clip",
        "optimizer_step",
        "num_tokens",
    }
    tokens = TokenFile(path)
    assert (tokens.spans, tokens.num_passes) == ({"s/g/0": (0, 3), "s/g/1": (3, 3), "t": (3, 5)}, 2)
    whole = tokens.columns()
    for name, expected in columns.items():
        assert whole[name].dtype == expected.dtype
        assert whole[name].tobytes() == expected.tobytes(), name
        for number, (trajectory_id, span) in enumerate(tokens.spans.items()):
            part = expected[:, number] if name == "optimizer_step" else expected[..., slice(*span)]
            assert tokens.columns(trajectory_id)[name].tobytes() == part.tobytes(), name


def test_headers_are_written_in_one_order_so_that_equal_columns_are_equal_files(tmp_path: Path) -> None:
    """safetensors itself writes the metadata in another order in each file."""
    columns: dict[str, Any] = {"logprob": np.zeros((1, 2), np.float32), "fate": np.zeros(2, np.uint8)}
    files = {pack_columns(1, {"s/g/0": 2}, columns, {"grad_norm": np.ones(1)}) for _ in range(8)}
    (file,) = files
    end = 8 + int.from_bytes(file[:8], "little")
    header = json.loads(file[8:end])
    assert end % 8 == 0
    assert file[8:end].rstrip(b" ") == json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert list(header["__metadata__"]) == ["by_trajectory", "schema", "step", "trajectories"]
    assert tensors.load(file)["grad_norm"].tolist() == [1.0]


def test_a_file_of_a_later_version_is_refused_with_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.safetensors"
    path.write_bytes(tensors.save({"logprob": np.zeros((1, 1))}, {"schema": "3", "step": "1"}))
    with pytest.raises(RecordError, match=r"of schema 1 or 2, got '3'; read it with the version"):
        TokenFile(path)


@pytest.mark.parametrize("may_mount", [True, False])
@forked
def test_a_disk_that_takes_no_tokens_is_told_and_the_next_step_is_recorded_when_there_is_room(
    tmp_path: Path, may_mount: bool
) -> None:
    """30,000 tokens, none in the batch, each with an engine's logprob of 4 bytes, on a disk that has room for 64 kB."""
    plan = build_plan(config_of(tmp_path, {"run": {"log_episodes_every_n_iters": 0}}))
    groups = (TrajectoryGroup(Task("test", 1), (trajectory("a", 30_000, slope=1e-4),), 1),)
    collected = Collected(groups, groups, num_dropped=0, num_refilled=0, failures=())
    built = BuiltBatch(None, BatchCounts(), RunningReturns(), 1.0)
    told: list[str] = []
    with small_disk(tmp_path / "disk", 2**16, may_mount=may_mount) as disk:
        folder = disk.folder / "run"
        recorder = RunRecorder.create(folder, "")
        journal = Journal(plan, recorder, QuietProgress(told.append))
        journal.stepped(1, collected, built, {"loss/total": 1.0}, TokenTable())
        assert list((folder / "tokens").iterdir()) == []
        disk.grow(2**20)
        journal.stepped(2, collected, built, {"loss/total": 2.0}, TokenTable())
        assert token_steps(folder) == [2]
        assert [line["step"] for line in read_metrics(folder)] == [1, 2]
        failed = [event for event in read_events(folder) if event["kind"] == "tokens_failed"]
        recorder.close()
    (event,) = failed
    assert event["step"] == 1
    assert "step_000001.safetensors: cannot be written" in event["data"]["reason"]
    assert told == [f"step 1: what the learner saw is not recorded: {event['data']['reason']}"]


def test_a_file_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"step_000001\.safetensors: no file of tokens"):
        open_tokens(tmp_path, 1)
    (tmp_path / "x").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(RecordError, match="x: no file of tokens"):
        TokenFile(tmp_path / "x")


def test_reading_tokens_loads_no_torch() -> None:
    code = "import sys, gspo_gym.run.tokens; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with clipping, KL, entropy, four minibatches, two passes, old samples and masked episodes."""
    folder = tmp_path_factory.mktemp("verified")
    changes: dict[str, Any] = {
        "training": {"max_staleness": 1, "update_epochs": 2, "checkpoint_every_n_iters": 1, "keep_last": 9},
        "loss": {"kl_coef": 0.1, "entropy_coef": 0.01, "clip_low": 3e-3, "clip_high": 4e-3, "dual_clip": 1.02},
        "rewards": {"overlong": "mask"},
        "correction": {"level": "token"},
        "optimizer": {"weight_decay": 0.1, "max_grad_norm": 0.1},
    }
    changes["training"]["learning_rate"] = 2e-3
    run_training(config_of(folder, changes))
    return folder / "test"


def test_an_adapter_on_a_file_that_only_we_read_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does not know the GGUF file's name: it reads the folder that the file was converted to."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "small.gguf", llama())
    model = {"base": str(tmp_path / "small.gguf"), "trainer_mode": "lora"}
    config = config_of(tmp_path, {"model": model, "training": {"iterations_per_epoch": 1}, "warmup": {"num_epochs": 1}})
    run_training(config)
    verified = verify_step(tmp_path / "test", 1)
    assert verified.exit_code == 0, (verified.difference, verified.missing)
    assert verified.compared["logprob"][0] > 0


def imports_of(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return modules | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def num_lines_of_code(path: Path) -> int:
    """The lines that are neither blank, nor comments, nor docstrings."""
    text = path.read_text()
    told = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type not in told]
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    firsts = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    prose = {line for first in firsts for line in range(first.lineno, (first.end_lineno or 0) + 1)}
    return len({line for each in tokens for line in range(each.start[0], each.end[0] + 1)} - prose)


def test_the_second_path_is_short_and_shares_no_code_with_the_learner() -> None:
    modules = (oracle, oracle_forks, oracle_teacher, cli_verify, verify_models)
    path, forks, teacher, *readers = (Path(str(module.__file__)) for module in modules)
    assert num_lines_of_code(path) <= 400  # with a line or two for each of six surrogates, level "auto", RAE
    assert num_lines_of_code(forks) <= 50
    assert num_lines_of_code(teacher) <= 50
    third_party = {"numpy", "numpy.typing", "torch"}
    of_python = {"collections", "collections.abc", "dataclasses", "typing", "__future__"}
    own = {"gspo_gym.types", "gspo_gym.diagnosis.oracle_forks", "gspo_gym.diagnosis.oracle_teacher"}
    assert imports_of(path) | imports_of(forks) | imports_of(teacher) <= own | of_python | third_party
    assert not [name for reader in readers for name in imports_of(reader) if "learning" in name]
    every = [node for reader in readers for node in ast.walk(ast.parse(reader.read_text()))]
    of_policy = [node for node in every if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in of_policy if "policy" in (node.module or "") for alias in node.names}
    assert names == {"below_adapter", "for_other_programs"}, "a base's folder is looked up; transformers loads it"
    attributes = {node.attr for node in every if isinstance(node, ast.Attribute)}
    computes = {"exp", "log", "log_softmax", "sqrt", "mean", "std", "clip", "backward", "bincount", "grad"}
    assert not attributes & computes, "the equations stand in the path, and not beside the reading of files"


def choices(annotation: Any) -> set[Any]:
    """The members of a Literal, also of one in a union."""
    every = typing.get_args(annotation)
    return set(every) if typing.get_origin(annotation) is Literal else set().union(*map(choices, every))


def test_help_names_every_choice_that_verify_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for key, known in {**cli_verify._KNOWN, **cli_verify._REPLAYED}.items():
        annotation: Any = RunConfig
        for name in key.split("."):
            annotation = annotation.model_fields[name].annotation
            annotation = next((c for c in typing.get_args(annotation) if hasattr(c, "model_fields")), annotation)
        told = f"{key} other than {' or '.join(str(value) for value in known or () if value is not None)}"
        assert choices(annotation) <= set(known or ()) or told in shown
    assert "entropy and gradients: optimizer.kind other than adamw or adamw_fused;" in shown


def test_a_step_is_verified_from_its_files_by_a_path_that_loads_no_learner(recorded: Path) -> None:
    code = (
        "import sys; from gspo_gym.cli.main import main; code = main(['verify', sys.argv[1], '--step', '2', '--json']);"
        "print([name for name in sys.modules if name.startswith(('gspo_gym.learning', 'gspo_gym.policy'))]);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(recorded)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report, _, modules = done.stdout.rpartition("[")
    assert modules == "]\n", "no module of the learner is loaded"
    told = json.loads(report)
    assert (told["step"], told["difference"], told["missing"]) == (2, None, [])
    columns = open_tokens(recorded, 2).columns()
    num_tokens = len(columns["fate"])
    for name in ("advantage", "logprob", "ratio", "clip", "share", "entropy", "correction"):
        number, gap = told["compared"][name]
        assert number >= num_tokens if name == "advantage" else number > num_tokens  # each pass
        assert gap < 1e-5
    assert told["compared"]["grad_norm"][0] == 8
    assert {Fate.TRAINED, Fate.OVERLONG} <= set(columns["fate"].tolist())
    assert len(set(columns["clip"].ravel().tolist())) > 2, "the clip binds on both sides"
    assert set(columns["weight_version"].tolist()) == {0}, "the second step's samples are of the first weights"


VARIANTS: dict[str, dict[str, Any]] = {
    "a ratio a token, k2 by importance, a constant length, weights outside a range masked": {
        "algorithm": {"variety": "grpo"},
        "loss": {"aggregation": "dr_grpo", "norm_length": 7, "kl_coef": 0.1, "kl_estimator": "k2"}
        | {"kl_importance_weighted": True, "clip_low": 0.02, "clip_high": 0.02},
        "correction": {"level": "turn", "mode": "mask", "low": 0.99999999, "high": 1.00000001},
        "training": {"constant_groups": "drop"},
        "advantages": {"baseline": "leave_one_out", "filter_eps": 0.1},
    },
    "a ratio and an advantage a turn, k1, an episode weighs its turns": {
        "loss": {"unit": "turn", "aggregation": "turn-mean-token-mean", "kl_coef": 0.05, "kl_estimator": "k1"},
        "advantages": {"level": "turn", "discount": 0.9, "clip": 1.0},
        "rewards": {"overlong": 1.0, "clip": 0.5},
        "rollout": {"temperature": 0.8},
        "optimizer": {"schedule": "cosine", "warmup_steps": 1},
    },
    "a ratio a segment of the engine's logprobs, the batch as baseline, by tokens of the batch": {
        "algorithm": {"acknowledge": ["length_weighting"]},
        "loss": {"unit": "segment", "aggregation": "dapo"},
        "advantages": {"baseline": "batch"},
        "correction": {"old_logprobs": "rollout", "off_policy_threshold": 0.001},
        "training": {"step_rewards_mode": "off"},
    },
    "cispo": {"algorithm": {"variety": "grpo"}, "loss": {"surrogate": "cispo", "clip_high": 0.05}},
    "sapo": {"loss": {"surrogate": "sapo", "sapo_temperatures": (1.0, 2.0)}},
    "gmpo": {"loss": {"surrogate": "gmpo", "unit": "turn", "clip_low": 0.02, "clip_high": 0.02}},
    "dppo": {
        "algorithm": {"variety": "grpo"},
        "loss": {"surrogate": "dppo", "clip_low": 0.01, "clip_high": 0.01},
        "correction": {"old_logprobs": "rollout"},
    },
    "vespo": {"loss": {"surrogate": "vespo"}},
    "maxrl": {
        "algorithm": {"variety": "gspo"},
        "advantages": {"scale": "mean"},
        "rollout": {"env_config": {"low": 1, "high": 4, "max_guesses": 3, **NO_PENALTIES}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_of_the_objective_is_verified(tmp_path: Path, changes: dict[str, Any]) -> None:
    common = {"update_epochs": 2, "checkpoint_every_n_iters": 1, "keep_last": 9, "learning_rate": 2e-3}
    run_training(config_of(tmp_path, changes | {"training": common | changes.get("training", {})}))
    for step in (1, 2):
        result = verify_step(tmp_path / "test", step)
        assert (result.difference, result.missing) == (None, [])
        assert result.compared["grad_norm"][0] > 1


def sealed(folder: Path, name: str) -> None:
    """Give the manifest of step 1's checkpoint the digest that a file of it has now."""
    checkpoint = folder / "checkpoints" / "step_000001"
    told = json.loads((checkpoint / "manifest.json").read_text())
    told["files"][name]["sha256"] = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(told))


def alter_episodes(folder: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = folder / "episodes" / f"step_{step:06d}.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    change(lines)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def more_reward(lines: list[dict[str, Any]]) -> None:
    """Give the third episode's last scored turn 0.25 more, with a term that says so."""
    turn = next(turn for turn in reversed(lines[2]["turns"]) if turn["reward_terms"])
    turn["reward"] += 0.25
    turn["reward_terms"]["more"] = 0.25


def event_taken(lines: list[dict[str, Any]]) -> None:
    """Take the last event of the step away."""
    turn = next(turn for line in reversed(lines) for turn in reversed(line["turns"]) if turn["events"])
    turn["events"] = []


def plant(folder: Path, column: str, change: float) -> dict[str, Any]:
    """Alter a number of the last trained token of step 2; return its place."""
    token, place = trained_token(folder)

    def alter(values: Any) -> None:
        values[token] += change

    altered(column, alter)(folder)
    return {name: place[name] for name in ("episode", "turn", "token")}


def of_training(**changes: Any) -> dict[str, Any]:
    common = {"update_epochs": 2, "checkpoint_every_n_iters": 1, "keep_last": 9, "learning_rate": 2e-3}
    return {"training": common | changes}


@pytest.mark.slow
def test_a_moving_mean_of_the_environment_goes_on_from_the_checkpoint_or_from_the_episodes(tmp_path: Path) -> None:
    changes = of_training(iterations_per_epoch=3) | {"advantages": {"level": "trajectory", "baseline": "role"}}
    run_training(config_of(tmp_path, changes))
    folder, mean = tmp_path / "test", 0.0
    for step in (1, 2, 3):
        assert verify_step(folder, step).difference is None
        # Independent: an advantage is the return less the mean before the step, which moves by a twentieth an episode.
        tokens = open_tokens(folder, step)
        returns = {t.trajectory_id: t.reward for t in read_episodes(folder / "episodes" / f"step_{step:06d}.jsonl.gz")}
        assert len(tokens.spans) == len(returns)
        for name in tokens.spans:
            assert tokens.columns(name)["advantage"] == pytest.approx(returns[name] - mean, rel=1e-5, abs=1e-6)
        for earned in returns.values():
            mean = 0.95 * mean + 0.05 * earned
        state = json.loads((folder / "checkpoints" / f"step_{step:06d}" / "resume" / "state.json").read_text())
        assert state["trainer"]["running"]["role_means"] == {"gspo_gym/GuessNumber-v0": pytest.approx(mean)}
    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    assert verify_step(folder, 3).difference is None
    alter_episodes(folder, 1, more_reward)
    found = verify_step(folder, 3).difference
    assert (found and (found.quantity, found.token)) == ("advantage", 0)


@pytest.mark.slow
def test_a_running_baseline_goes_on_from_the_checkpoint_or_from_the_episodes_of_all_steps(tmp_path: Path) -> None:
    changes = of_training(iterations_per_epoch=3) | {"advantages": {"level": "trajectory", "baseline": "running"}}
    run_training(config_of(tmp_path, changes))
    folder = tmp_path / "test"
    for step in (1, 2, 3):
        result = verify_step(folder, step)
        assert (result.difference, result.missing) == (None, [])
    # Independent: all returns of steps 1 to 3, of numpy.
    files = [folder / "episodes" / f"step_{step:06d}.jsonl.gz" for step in (1, 2, 3)]
    returns = [[episode.reward for episode in read_episodes(path)] for path in files]
    every = np.concatenate(returns)
    advantages = (np.array(returns[2]) - every.mean()) / every.std(ddof=1)
    tokens = open_tokens(folder, 3)
    for name, advantage in zip(tokens.spans, advantages, strict=True):
        assert tokens.columns(name)["advantage"] == pytest.approx(advantage, rel=1e-6)

    wrong = shutil.copytree(folder, tmp_path / "state")
    path = wrong / "checkpoints" / "step_000001" / "resume" / "state.json"
    saved = json.loads(path.read_text())
    saved["trainer"]["running"]["mean"] += 0.01
    path.write_text(json.dumps(saved))
    found = verify_step(wrong, 2).difference
    assert (found and found.quantity) == "SHA-256 of checkpoints/step_000001/resume/state.json"
    sealed(wrong, "resume/state.json")
    found = verify_step(wrong, 2).difference
    assert (found and (found.quantity, found.token)) == ("advantage", 0)

    for checkpoint in (folder / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    result = verify_step(folder, 3)
    assert result.difference is None
    assert result.compared["advantage"][0] == tokens.num_tokens, "without any checkpoint"
    (folder / "tokens" / "step_000001.safetensors").unlink()
    assert verify_step(folder, 3).difference is None, "returns need no tokens"
    alter_episodes(folder, 1, more_reward)
    found = verify_step(folder, 3).difference
    assert (found and (found.quantity, found.token)) == ("advantage", 0)
    files[0].unlink()
    with pytest.raises(RecordError, match=r"go by all returns.*no episodes of step 1 are.*checkpoint_every_n_"):
        verify_step(folder, 3)


SHAPED: dict[str, tuple[dict[str, Any], Callable[[Path], dict[str, Any] | None], str]] = {
    "whitened by tokens": (
        {"advantages": {"level": "turn", "whiten": "tokens", "clip": 1.2}},
        lambda folder: plant(folder, "advantage", 1e-4),
        "advantage",
    ),
    "whitened by episodes, of what is not masked": (
        {"advantages": {"baseline": "none", "whiten": "trajectories"}, "rewards": {"overlong": "mask"}},
        lambda folder: alter_episodes(folder, 2, more_reward),
        "advantage",
    ),
    "an adaptive KL in the reward, whitened": (
        {
            "advantages": {"whiten": "trajectories"},
            "rewards": {"kl_coef": 0.3, "kl_target": 1e-3},
        },
        lambda folder: plant(folder, "ref_logprob", 1e-4),
        "ref_logprob",
    ),
    "KL shaping and KL in the reward": (
        {"advantages": {"kl_shaping_coef": 0.5, "clip": 0.9}, "rewards": {"kl_coef": 0.1}},
        lambda folder: plant(folder, "advantage", -1e-4),
        "advantage",
    ),
    "decisions": (
        {
            "advantages": {"level": "turn"},
            **of_training(
                step_rewards_mode="decision_stepwise", step_rewards_indicator_lambda=0.5, step_rewards_beta=0.1
            ),
        },
        lambda folder: alter_episodes(folder, 2, event_taken),
        "advantage",
    ),
    "scored as truncated": (
        {"rollout": {"top_p": 0.9, "top_k": 40, "min_p": 0.01}, "loss": {"entropy_coef": 0.01}},
        lambda folder: plant(folder, "old_logprob", 1e-4),
        "old_logprob",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "alter", "quantity"), SHAPED.values(), ids=SHAPED.keys())
def test_what_shapes_advantages_and_logprobs_is_recomputed_and_a_planted_error_found(
    tmp_path: Path, changes: dict[str, Any], alter: Callable[[Path], dict[str, Any] | None], quantity: str
) -> None:
    run_training(config_of(tmp_path, of_training() | changes))
    folder = tmp_path / "test"
    for step in (1, 2):
        result = verify_step(folder, step)
        assert (result.difference, result.missing) == (None, [])
        assert result.compared["grad_norm"][0] > 1
    place = alter(folder)
    found = verify_step(folder, 2).difference
    assert found is not None
    assert found.quantity == quantity
    if place is not None:
        assert (found.episode, found.turn, found.token) == tuple(place.values())


# From the third turn on, messages before the last three are written in another way: the turn begins a new segment.
_REWRITES = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('past ' if loop.revindex > 3 else '') + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


@pytest.mark.slow
def test_a_step_of_episodes_with_several_segments_is_verified_token_by_token(tmp_path: Path) -> None:
    policy = load_policy("tiny:qwen3-64")
    policy.tokenizer.chat_template = _REWRITES
    save_policy(policy, tmp_path / "base")
    run_training(config_of(tmp_path, of_training() | {"model": {"base": str(tmp_path / "base")}}))
    folder = tmp_path / "test"
    episodes = {each.trajectory_id: each for each in read_episodes(folder / "episodes" / "step_000002.jsonl.gz")}
    assert max(len(episode.segments) for episode in episodes.values()) == 2
    result = verify_step(folder, 2)
    assert (result.difference, result.missing) == (None, [])
    assert result.compared["old_logprob"][0] > 10
    place = plant(folder, "old_logprob", 1e-4)
    found = verify_step(folder, 2).difference
    assert (found and (found.quantity, found.episode, found.token)) == ("old_logprob", place["episode"], place["token"])


@pytest.mark.slow
def test_a_coefficient_that_adapts_is_followed_through_steps_without_a_checkpoint(tmp_path: Path) -> None:
    """Independent: arXiv 1909.08593, section 2.2, on the KL that metrics.jsonl tells; 16 episodes a step."""
    rewards = {"kl_coef": 0.3, "kl_target": 1e-3}
    run_training(config_of(tmp_path, of_training(iterations_per_epoch=3) | {"rewards": rewards}))
    folder = tmp_path / "test"
    beta = 0.3
    for line in read_metrics(folder):
        assert line["shaping/kl_coef"] == pytest.approx(beta, rel=1e-12)
        counted = (open_tokens(folder, line["step"]).columns()["optimizer_step"].max(0) >= 0).sum()
        beta *= 1 + min(max(line["shaping/kl"] / 1e-3 - 1, -0.2), 0.2) * min(counted / 10_000, 1)
    assert beta != pytest.approx(0.3)
    shutil.rmtree(folder / "checkpoints" / "step_000001")
    shutil.rmtree(folder / "checkpoints" / "step_000002")
    result = verify_step(folder, 3)
    assert (result.difference, result.compared["shaping/kl_coef"][0]) == (None, 1)
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["shaping/kl_coef"] *= 1.001
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = verify_step(folder, 3).difference
    assert (found and found.quantity) == "shaping/kl_coef"
    (folder / "tokens" / "step_000002.safetensors").unlink()
    with pytest.raises(RecordError, match=r"no tokens of step 2 are recorded.*log_tokens_every_n_iters = 1"):
        verify_step(folder, 3)


def episode_with(*events: tuple[str, ...], outcome: Outcome = Outcome.TERMINATED) -> Trajectory:
    """A turn for each tuple of events; the first turn earns 2, the others nothing."""
    plain = trajectory("a", 2)
    turns = [
        Turn(i, 0, (0, 1), (1, 2), FinishReason.STOP, reward=2.0 * (not i), events=e) for i, e in enumerate(events)
    ]
    return dataclasses.replace(plain, turns=tuple(turns), outcome=outcome)


PLAYED = (("a", "b"), ("a",), ("c", "a"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # New names of each turn, plus 0.5 where there is one, plus 0.1 times the turns that are left, itself included.
        ({"indicator_lambda": 0.5, "beta": 0.1}, [2 + 0.5 + 0.3, 0.0, 1 + 0.5 + 0.1]),
        ({"kind": "absolute"}, [2.0, 1.0, 2.0]),
        ({"strategy": "consistent", "indicator_lambda": 0.5}, [0.5, 0.0, 0.5]),
        ({"strategy": "consistent", "kind": "absolute"}, [1.0, 1.0, 1.0]),
        # a twice at most, worth 3; b has no limit and no weight; c once; a lambda of 2 multiplies.
        (
            {
                "strategy": "per_achievement",
                "indicator_lambda": 2.0,
                "weights.a": 3.0,
                "k_limits.a": 2,
                "k_limits.b": 0,
            },
            [8.0, 6.0, 2.0],
        ),
    ],
)
def test_rewards_of_decisions_are_those_counted_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    names = {"kind": "training.event_rewards_kind"}
    config = {names.get(key, f"training.step_rewards_{key}"): value for key, value in options.items()}
    config["training.step_rewards_mode"] = "decision_stepwise"
    assert oracle._rewards(config, episode_with(*PLAYED)) == pytest.approx(expected)
    cut = episode_with(*PLAYED, outcome=Outcome.ACTION_LIMIT)
    assert sum(oracle._rewards(config, cut)) == pytest.approx(0.0), "it pays no more than nothing"
    assert oracle._rewards(config, cut)[:2] == pytest.approx(expected[:2])
    silent = dataclasses.replace(episode_with(*PLAYED), reports_events=False)
    assert oracle._rewards(config, silent) == [0.0, 0.0, 2.0]
    assert oracle._rewards(config | {"judge.enabled": True}, episode_with(*PLAYED)) == [2.0, 0.0, 0.0]


@pytest.mark.slow
def test_steps_that_were_skipped_for_an_infinite_gradient_are_recomputed_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A penalty of 1e30 gives gradients with squares that float32 does not hold."""
    monkeypatch.setattr("gspo_gym.learning.optimizer.MAX_NONFINITE_STEPS", 99)
    game = {"low": 1, "high": 4, "max_guesses": 3, "inconsistent_penalty": 1e30}
    changes = of_training() | {"rollout": {"env_config": game}, "advantages": {"scale": "none"}}
    run_training(config_of(tmp_path, changes))
    folder = tmp_path / "test"
    skipped = [bool(np.isnan(step_columns(folder, step)["grad_norm"]).any()) for step in (1, 2)]
    assert any(skipped)
    for step in (1, 2):
        result = verify_step(folder, step)
        assert (result.difference, result.missing) == (None, [])


def step_columns(folder: Path, step: int) -> dict[str, Any]:
    with safe_open(folder / "tokens" / f"step_{step:06d}.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in ("learning_rate", "grad_norm")}


@pytest.mark.slow
def test_an_adapter_on_a_tiny_model_is_verified_on_the_base_in_its_checkpoint(tmp_path: Path) -> None:
    run_training(config_of(tmp_path, of_training() | {"model": {"trainer_mode": "lora"}, "loss": {"kl_coef": 0.1}}))
    folder = tmp_path / "test"
    result = verify_step(folder, 2)
    assert (result.difference, result.missing) == (None, [])
    assert min(result.compared[name][0] for name in ("ref_logprob", "grad_norm")) > 1
    path = folder / "checkpoints" / "step_000001" / "adapter_model.safetensors"
    values = tensors.load(path.read_bytes())
    name = next(name for name in sorted(values) if "lora_B" in name)
    values[name] += 0.05
    path.write_bytes(tensors.save(values, {"format": "pt"}))
    sealed(folder, "adapter_model.safetensors")
    found = verify_step(folder, 2).difference
    assert (found and found.quantity) == "old_logprob"


@pytest.mark.slow
@pytest.mark.parametrize("model", [{"trainer_mode": "qlora"}, {"trainer_mode": "lora", "dtype": "bfloat16"}])
def test_an_adapter_on_weights_of_4_or_16_bits_is_verified(
    recorded: Path, tmp_path: Path, model: dict[str, Any]
) -> None:
    base = recorded / "checkpoints" / "step_000002"
    changes = of_training() | {"model": model | {"base": str(base)}, "loss": {"kl_coef": 0.1}}
    run_training(config_of(tmp_path, changes | {"warmup": {"num_episodes": 4, "num_epochs": 1}}))
    folder = tmp_path / "test"
    result = verify_step(folder, 2)
    assert (result.difference, result.missing) == (None, [])
    assert min(result.compared[name][0] for name in ("ref_logprob", "grad_norm")) > 1
    # 16 times what two precisions are apart: bfloat16 holds 8 bits of a logprob, which is about that of 1 token of 259.
    assert result.rounding < 16 * math.log(259) / 2**8 < 0.5
    place = plant(folder, "old_logprob", 0.5)
    found = verify_step(folder, 2).difference
    assert (found and (found.quantity, found.token)) == ("old_logprob", place["token"])


@pytest.mark.slow
def test_an_adapter_is_verified_on_its_frozen_base_which_is_the_reference(recorded: Path, tmp_path: Path) -> None:
    base = recorded / "checkpoints" / "step_000002"
    changes: dict[str, Any] = {
        "model": {"base": str(base), "trainer_mode": "lora"},
        "loss": {"kl_coef": 0.1},
        "training": {"checkpoint_every_n_iters": 1, "keep_last": 9, "update_epochs": 2},
        "warmup": {"num_episodes": 4, "num_epochs": 1},
    }
    run_training(config_of(tmp_path, changes))
    result = verify_step(tmp_path / "test", 2)
    assert (result.difference, result.missing) == (None, [])
    assert result.compared["ref_logprob"][0] > 10
    adapter = tmp_path / "test" / "checkpoints" / "step_000001" / "adapter_config.json"
    adapter.write_text(adapter.read_text().replace('"r": 16', '"r": 8'))
    found = verify_step(tmp_path / "test", 2).difference
    assert found is not None
    assert found.quantity == "SHA-256 of checkpoints/step_000001/adapter_config.json"


def test_tokens_are_also_recorded_of_the_step_after_a_checkpoint(tmp_path: Path) -> None:
    """Of 12 steps every tenth, and the one that goes on from the weights of each fourth."""
    changes = {"run": {"log_tokens_every_n_iters": 10}, "training": {"checkpoint_every_n_iters": 4}}
    recorder = RunRecorder.create(tmp_path / "run", "")
    journal = Journal(build_plan(config_of(tmp_path, changes)), recorder, QuietProgress(print))
    assert [step for step in range(1, 13) if journal.token_table(step) is not None] == [1, 5, 9, 10]
    recorder.close()


@pytest.mark.slow
def test_float32_rounding_of_a_model_is_no_difference_of_its_logprobs(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tolerance below what float32 holds of this model stands for 1e-5 and a model of 30 layers."""
    plain = verify_step(recorded, 2)
    tolerance = min(plain.compared[name][1] for name in ("old_logprob", "ref_logprob")) / 2
    assert 0 < tolerance < 1e-6
    result = verify_step(recorded, 2, tolerance=tolerance)
    assert plain.rounding == 0 < result.rounding < 4e-5
    assert {"old_logprob", "ref_logprob", "logprob", "entropy"} < set(result.compared), "update 0 was reached"
    main(["verify", str(recorded), "--step", "2", "--tolerance", str(tolerance)])
    assert f"two precisions are {result.rounding / 16:.1e} apart, 16 times that is allowed" in capsys.readouterr().out


@pytest.mark.parametrize(("loss", "is_wrong"), [(0.0035, False), (0.0055, True)])
def test_a_recorded_loss_is_compared_by_the_sizes_of_terms_that_cancel(loss: float, is_wrong: bool) -> None:
    """Terms of +200 and -200 in float32 sum to 0 within 1e-5 of 400: 0.004."""
    records = oracle.StepRecords({}, [], {}, {}, np.zeros(0, np.int64))
    taken = {"loss/total": np.array([200.0, -200.0]), "unit": np.ones(2), "clip": np.zeros(2)}
    taken |= {"drift": np.zeros(2), "H": np.zeros(2)}
    number, size = oracle.metrics_of(records, taken, np.ones(1))["loss/total"]
    assert (number, size) == (0.0, 400.0)
    assert (abs(loss - number) / size > 1e-5) == is_wrong


def altered(column: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        path = folder / "tokens" / "step_000002.safetensors"
        with safe_open(path, framework="np") as file:
            steps = {name: file.get_tensor(name) for name in ("learning_rate", "grad_norm")}
        columns = open_tokens(folder, 2).columns() | steps
        change(columns[column])
        path.write_bytes(as_schema_1(path, columns))

    return alter


def as_schema_1(path: Path, columns: dict[str, Any]) -> bytes:
    """The file of an earlier version, in which each column has a number a token."""
    tokens = TokenFile(path)
    spans = {name: [start, stop - start] for name, (start, stop) in tokens.spans.items()}
    metadata = {"schema": "1", "step": str(tokens.step), "trajectories": json.dumps(spans)}
    return tensors.save({name: np.ascontiguousarray(column) for name, column in columns.items()}, metadata)


def trained_token(folder: Path) -> tuple[int, dict[str, Any]]:
    """The last token of step 2 that is trained on, and its place in the second pass."""
    tokens = open_tokens(folder, 2)
    token = int(np.flatnonzero(tokens.columns()["fate"] == Fate.TRAINED)[-1])
    name, (start, _) = next((name, span) for name, span in tokens.spans.items() if span[0] <= token < span[1])
    episodes = read_episodes(folder / "episodes" / "step_000002.jsonl.gz")
    (episode,) = (each for each in episodes if each.trajectory_id == name)
    turns = [turn for s in episode.segments for turn in s.turn_index[s.action_mask].tolist()]
    place = {"episode": name, "turn": turns[token - start], "token": token - start}
    return token, place | {"epoch": 1, "update": int(tokens.columns(name)["optimizer_step"][1])}


@pytest.mark.parametrize(
    ("column", "change", "quantity"),
    [
        ("logprob", 1e-4, "logprob"),
        ("ratio", 1e-4, "ratio"),
        ("share", 1e-4, "share"),
        ("entropy", -1e-4, "entropy"),
        ("clip", 1, "clip"),
        ("advantage", 1e-4, "advantage"),
        ("old_logprob", 1e-4, "old_logprob"),
        ("ref_logprob", 1e-4, "ref_logprob"),
        ("rollout_logprob", 1e-4, "rollout_logprob"),
        ("fate", 1, "fate"),
    ],
)
def test_one_altered_number_of_a_token_is_named_with_its_place(
    recorded: Path, tmp_path: Path, column: str, change: float, quantity: str
) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(recorded, folder)
    token, place = trained_token(recorded)

    def alter(values: Any) -> None:
        values[(1, token) if values.ndim == 2 else token] += change

    altered(column, alter)(folder)
    found = verify_step(folder, 2).difference
    assert found is not None
    assert found.quantity == quantity
    assert found.recorded == pytest.approx(found.recomputed + change, abs=1e-5)  # type: ignore[operator]
    if column in PASSES:
        assert (found.update, found.epoch) == (place["update"], 1)
    assert (found.episode, found.turn, found.token) == (place["episode"], place["turn"], place["token"])


PASSES = ("logprob", "ratio", "share", "entropy", "clip")


def alter_weight(folder: Path, *, name: str, is_sealed: bool) -> None:
    """Move one number of a checkpoint; sealed: its manifest, too."""
    path = folder / "checkpoints" / "step_000001" / name
    values = tensors.load(path.read_bytes())
    key = next(key for key in sorted(values) if values[key].ndim == 2 and "embed" not in key)
    values[key][0, 0] += 0.5
    path.write_bytes(tensors.save(values, {"format": "pt"}))
    if is_sealed:
        manifest = folder / "checkpoints" / "step_000001" / "manifest.json"
        told = json.loads(manifest.read_text())
        told["files"][name]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest.write_text(json.dumps(told))


def alter_loss(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["loss/total"] += 1e-4
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def alter_reward(folder: Path, *, with_terms: bool) -> None:
    """Give the third episode's last turn 0.25 more; with its terms, only the advantages of its group say so."""
    path = folder / "episodes" / "step_000002.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    turn = next(turn for turn in reversed(lines[2]["turns"]) if turn["reward_terms"])
    turn["reward"] += 0.25
    if with_terms:
        turn["reward_terms"]["more"] = 0.25
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def rate_of_0(values: Any) -> None:
    values[3] = 0.0


def last_rate_of_0(values: Any) -> None:
    values[-1] = 0.0


def old_is_nan(values: Any) -> None:
    values[np.isfinite(values)] = np.nan


@pytest.mark.parametrize(
    ("alter", "quantity", "place"),
    [
        (lambda folder: alter_reward(folder, with_terms=False), "reward", {"episode": 2}),
        (lambda folder: alter_reward(folder, with_terms=True), "advantage", {"group": 0}),
        (
            lambda folder: alter_weight(folder, name="model.safetensors", is_sealed=False),
            "SHA-256 of checkpoints/step_000001/model.safetensors",
            {},
        ),
        (lambda folder: alter_weight(folder, name="model.safetensors", is_sealed=True), "old_logprob", {}),
        (
            lambda folder: alter_weight(folder, name="resume/learner.safetensors", is_sealed=True),
            "logprob",
            {"update": 1},
        ),
        (altered("learning_rate", rate_of_0), "logprob", {"update": 4}),
        (altered("learning_rate", last_rate_of_0), "optim/learning_rate", {}),
        (altered("old_logprob", old_is_nan), "old_logprob", {}),
        (alter_loss, "loss/total", {}),
    ],
)
def test_one_altered_number_of_another_file_is_named(
    recorded: Path,
    tmp_path: Path,
    alter: Callable[[Path], None],
    quantity: str,
    place: dict[str, int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(recorded, folder)
    alter(folder)
    assert main(["verify", str(folder), "--step", "2", "--json"]) == 1
    found = Difference(**json.loads(capsys.readouterr().out)["difference"])
    assert found.quantity == quantity
    names = list(open_tokens(recorded, 2).spans)
    if "episode" in place:
        assert found.episode == names[place["episode"]]
    elif "group" in place:
        assert str(found.episode).rpartition("/")[0] == names[0].rpartition("/")[0]
    elif "update" in place:
        assert found.update == place["update"]


def test_what_cannot_be_verified_is_said_and_is_no_success(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "altered"
    shutil.copytree(recorded, folder)
    shutil.rmtree(folder / "checkpoints" / "step_000001")
    assert main(["verify", str(folder), "--step", "2"]) == 2
    shown = capsys.readouterr().out
    assert "step_000001; steps that have one: [1]" in shown
    assert "what was compared agrees to 1e-05" in shown
    assert main(["verify", str(folder), "--step", "7"]) == 2
    assert "no tokens of step 7 are recorded" in capsys.readouterr().err
    token, place = trained_token(recorded)

    def alter(values: Any) -> None:
        values[1, token] += 1e-3

    altered("ratio", alter)(folder)
    found = verify_step(folder, 2).difference  # also without weights
    assert found is not None
    assert (found.quantity, found.episode) == ("ratio", place["episode"])
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('whiten = "none"', 'whiten = "turns"\nsoftened = 1'))
    with pytest.raises(ConfigError, match=r"does not know advantages\.softened, advantages\.whiten = 'turns'"):
        verify_step(folder, 2)
