"""All that reads a checkpoint's folder, on one that two ranks wrote and on the same one as one process writes it.

Each reader says the same of both, but for the names, sizes and digests of the learner's files.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.jobs.records import checkpoints_of, model_files_of
from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.config.build.continuation import find_restored
from gspo_gym.config.build.trainer import build_learner, build_policy
from gspo_gym.config.run_config import RunConfig, load_config, model_name
from gspo_gym.learning.saved import SavedTensors, copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore, load_checkpoint
from gspo_gym.policy.export import Weights, export, file_digests
from gspo_gym.policy.load import adapt_policy, load_policy
from gspo_gym.policy.manifest import is_complete, read_manifest, seal, verify
from gspo_gym.run.models import find_model, list_models, model_card
from gspo_gym.run.records import read_metrics, read_run_id
from tests.cluster.test_learner_ranks import configure
from tests.support.learner_ranks import bytes_of_a_step

pytestmark = pytest.mark.usefixtures("own_ray")

SMALL = [
    "training.iterations_per_epoch=2",
    "training.checkpoint_every_n_iters=1",
    "rollout.episodes_per_batch=16",
    "training.batch_size=16",
    "evaluation.seeds=0:4",
    "evaluation.every_n_iters=2",
    "warmup.num_episodes=16",
    "loss.kl_coef=0.1",
    "run.log_tokens_every_n_iters=1",
]
PARTS = [f"learner-0000{rank}-of-00002.safetensors" for rank in range(2)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, both called "run": in ranks/ that of two ranks, in alone/ the same with whole files."""
    folder = tmp_path_factory.mktemp("runs")
    run_training(configure(folder / "ranks", "topology.gpus_for_training=2", "model.label=run", *SMALL))
    shutil.copytree(folder / "ranks", folder / "alone")
    for checkpoint in (folder / "alone/run/checkpoints").iterdir():
        make_whole(checkpoint)
    return folder


def make_whole(checkpoint: Path) -> None:
    resume, manifest = checkpoint / "resume", read_manifest(checkpoint)
    write = copy_state(SavedTensors.of_learner(resume))
    for name in PARTS:
        (resume / name).unlink()
    write(resume)
    (checkpoint / "manifest.json").unlink()
    seal(checkpoint, step=manifest.step, origin=manifest.origin, evaluation=manifest.evaluation)


def config_of(run: Path, *more: str) -> RunConfig:
    return load_config(run / "config.toml", [f"run.folder={run.parent}", *more])


def step_of(run: Path, step: int = 2) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"


def numbers(tensors: Any) -> dict[str, list[float]]:
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def of_a_store(run: Path, _: Path) -> object:
    store = CheckpointStore(run / "checkpoints", run_id=read_run_id(run))
    latest, best = store.load_latest(), store.best()
    assert store.newest() == latest.folder == step_of(run)
    assert load_checkpoint(step_of(run)).learner_counters == latest.learner_counters
    assert best is not None
    found = numbers(latest.learner_tensors), latest.learner_counters, latest.trainer_state, latest.origin
    return found, store.steps(), store.load_newest_sound().step, best.name, store.num_updates(2), latest.damaged


def of_a_manifest(run: Path, _: Path) -> object:
    manifest = verify(step_of(run))
    return manifest.step, manifest.origin, manifest.evaluation, is_complete(step_of(run))


def of_models(run: Path, _: Path) -> object:
    listed = [(model.name, model.step, model.evaluation, marks) for model, marks in list_models(run.parent)]
    model = find_model("run@best", runs=run.parent)
    card = model_card(model, Weights("transformers", None, None, {}), version="1")
    return listed, card, find_model(str(run)).base.removeprefix(str(run))


def of_an_export(run: Path, folder: Path) -> object:
    model = find_model("run", runs=run.parent)
    export(model.base, folder / "out", describe=lambda weights: "")
    assert not (folder / "out" / "resume").exists()
    return file_digests(folder / "out")


def of_a_policy(run: Path, _: Path) -> object:
    config = load_config(run / "config.toml", [f"run.folder={run.parent}"])
    named = config.model_copy(update={"model": config.model.model_copy(update={"base": None, "source": "run"})})
    assert model_name(named) == str(step_of(run))
    return numbers(dict(load_policy(str(step_of(run))).model.named_parameters()))


def of_an_evaluation(run: Path, _: Path) -> object:
    found = run_evaluation(config_of(run), str(run))
    return found.score, [(row.seed, row.episode_return, row.num_turns) for row in found.rows]


def of_a_chat(run: Path, _: Path) -> object:
    """It runs the engine that `models serve` runs."""
    before, sys.stdin, told = sys.stdin, io.StringIO("hello\n"), io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            arguments = ["models", "chat", "run", "--folder", str(run.parent), "--max-tokens", "8"]
            assert main(arguments) == 0
    finally:
        sys.stdin = before
    return told.getvalue().replace(str(run), "RUN").partition("model>")[0]  # what it says is drawn anew


def of_verify(run: Path, _: Path) -> object:
    found = verify_step(run, 2)
    assert found.exit_code == 0, found
    assert "reference" not in str(found.missing)
    return {name: gap for name, gap in found.compared.items() if not name.startswith("SHA-256")}


def of_a_start_from_it(run: Path, folder: Path) -> object:
    parts = 'run.restore=["weights","optimizer","step"]'
    config = config_of(run, f"run.restore_from={run}", parts, "model.label=new", "training.iterations_per_epoch=4")
    restored = find_restored(config)
    assert restored is not None
    learner = build_learner(config, build_policy(config, restored.base))
    restored.restore(learner)
    taken = {name: tensor for name, tensor in learner.tensors().items() if name.startswith("optimizer.")}
    assert len(taken) > 3
    return numbers(taken), restored.state.step, learner.counters()


def of_jobs(run: Path, _: Path) -> object:
    return [each["step"] for each in checkpoints_of(run)], model_files_of(step_of(run))


def of_a_resumed_run(run: Path, folder: Path) -> object:
    """On one process from the parts, on two ranks from the whole: the optimizer, the weights and all else go on."""
    shutil.copytree(run, folder / "run")
    number = 1 if run.parent.name == "ranks" else 2
    more = [f"topology.gpus_for_training={number}", "training.iterations_per_epoch=3"]
    summary = run_training(config_of(folder / "run", *more), resume=True)
    assert len(list((step_of(folder / "run", 3) / "resume").glob("learner*"))) == number
    return summary["status"], [round(score, 6) for _, score in summary["curve"]], summary["trained_tokens"]


READERS: list[Callable[[Path, Path], object]] = [
    of_a_store, of_a_manifest, of_models, of_an_export, of_a_policy, of_an_evaluation, of_verify, of_a_start_from_it,
    of_jobs, of_a_chat, of_a_resumed_run,
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_says_the_same_of_parts_as_of_whole_files(
    reader: Callable[[Path, Path], object], runs: Path, tmp_path: Path
) -> None:
    found = []
    for form in ("ranks", "alone"):
        (tmp_path / form).mkdir()
        found.append(reader(runs / form / "run", tmp_path / form))
    assert found[0] == found[1]


def test_a_rank_of_two_holds_half_of_what_one_process_does(runs: Path) -> None:
    config = config_of(runs / "ranks/run")
    policy = build_policy(config)
    learner = build_learner(config, policy)
    alone = bytes_of_a_step(policy.model, learner)
    alone += sum(tensor.nbytes for name, tensor in learner.tensors().items() if name.startswith("reference."))
    held = [metrics["memory/rank_mib"] * 2**20 for metrics in read_metrics(runs / "ranks/run")]
    assert len(held) == 2
    assert 0.5 * alone <= max(held) <= 0.55 * alone
    print(f"a rank of two: {max(held) / 2**20:.3f} MiB, one process: {alone / 2**20:.3f} MiB, {max(held) / alone:.3f}")


class TwoRanks:
    """Has tensors of which each of two ranks writes its rows."""

    def counters(self) -> dict[str, int]:
        return {"learner.num_updates": 1}

    def copy_state(self) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            for rank, rows in enumerate((slice(0, 2), slice(2, 3))):
                first = {"first_rows": json.dumps({"optimizer.exp_avg.w": rows.start})}
                save_file({"optimizer.exp_avg.w": torch.ones(3, 2)[rows].clone()}, folder / PARTS[rank], first)

        return write


def test_an_adapter_is_merged_from_either_form(tmp_path: Path) -> None:
    policy = adapt_policy(load_policy("tiny:qwen3-64", seed=1), LoraSettings(), seed=2)
    checkpoint = CheckpointStore(tmp_path).save(1, policy=policy, learner=TwoRanks(), trainer_state={})
    found = []
    for form in ("parts", "whole"):
        export(str(checkpoint), tmp_path / form, describe=lambda weights: "", is_merged=True)
        found.append(file_digests(tmp_path / form))
        if form == "parts":
            make_whole(checkpoint)
    assert found[0] == found[1]
