"""A learner whose model two processes share: a run is that of one process, and lost ranks cost no batch."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_gym.base.leftovers import descendants
from gspo_gym.cli.train import run_training
from gspo_gym.cli.verify import verify_step
from gspo_gym.cluster.learner import LearnerOnRanks
from gspo_gym.config.build import processes
from gspo_gym.config.build.trainer import build_learner, build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import CheckpointError, ConfigError, ServiceError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.policy.manifest import Origin, seal
from gspo_gym.run.records import read_events
from tests.support.learner_ranks import build_batch_of
from tests.support.saved_steps import require_same
from tests.support.small_quickstart import QUICKSTART, SMALLER

pytestmark = pytest.mark.usefixtures("own_ray")

ON_RANKS = ["compute.gpu_count=0", "topology.type=cluster", "topology.gpus_for_vllm=1", "rollout.engine=local"]


def configure(folder: Path, *more: str) -> RunConfig:
    return load_config(QUICKSTART, [*SMALLER, *ON_RANKS, f"run.folder={folder}", *more])


def episodes_of(run: Path) -> list[list[Any]]:
    """The sampled tokens and rewards of every episode of training and evaluations."""
    return [
        [episode["trajectory_id"], episode["reward"], [segment["token_ids"] for segment in episode["segments"]]]
        for path in sorted(run.glob("episodes/*.jsonl.gz"))
        for episode in map(json.loads, gzip.open(path, "rt", encoding="utf-8"))
    ]


def actors_of(kind: str) -> list[int]:
    """The processes of Ray that are actors of a class, of the Ray that was started from here: others are not ours."""
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.append(pid)
    return sorted(found)


def require_no_actors(kind: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while (left := actors_of(kind)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@contextlib.contextmanager
def learning(config: RunConfig, policy: Policy, told: list[str] | None = None) -> Iterator[LearnerOnRanks]:
    """The learner of a configuration; `told` gets the reasons for which its ranks were started again."""
    told = [] if told is None else told
    with (
        processes.launching(config) as cluster,
        processes.learning(
            config, policy, None, cluster=cluster, num_threads=2, on_restart=lambda _, reason: told.append(reason)
        ) as learner,
    ):
        yield learner  # type: ignore[misc]  # of one process where the configuration says so


def test_a_run_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    runs = []
    for number in (1, 2):
        steps = ["training.iterations_per_epoch=3", "training.checkpoint_every_n_iters=2", "evaluation.seeds=0:20"]
        config = configure(tmp_path, f"topology.gpus_for_training={number}", f"model.label=of{number}", *steps)
        runs.append((run_training(config), tmp_path / f"of{number}"))
    (alone, one), (shared, two) = runs
    assert episodes_of(two) == episodes_of(one)
    assert len(episodes_of(two)) == 3 * 64 + 2 * 20
    assert (shared["curve"], shared["trained_tokens"]) == (alone["curve"], alone["trained_tokens"])
    assert shared["gradient_steps"] == 3
    require_same(two / "checkpoints/step_000003", one / "checkpoints/step_000003")
    tables = [load_file(run / "tokens/step_000001.safetensors") for run in (one, two)]
    for name, column in tables[0].items():
        assert column.double().nan_to_num(7.0).allclose(tables[1][name].double().nan_to_num(7.0), atol=1e-4), name
    verified = verify_step(two, 3)  # from the optimizer's parts, of which each rank wrote one
    assert (verified.difference, verified.missing) == (None, [])
    assert verified.compared["grad_norm"][0] > 0
    assert not any(event["kind"] == "ranks_lost" for event in read_events(two))
    assert not (two / "learner").exists()
    require_no_actors("LearnerRank")


@pytest.mark.nightly
def test_the_section_of_the_learner_reaches_its_ranks(tmp_path: Path) -> None:
    def first_update(*more: str) -> float:
        config = configure(tmp_path, *more)
        with learning(config, build_policy(config)) as learner:
            return learner.update(build_batch_of(0)).metrics["optim/grad_norm"]

    two = "topology.gpus_for_training=2"
    exact = first_update("topology.gpus_for_training=1")
    assert first_update(two, "learner.sequence_parallel=2") == pytest.approx(exact, rel=1e-5)
    narrow = first_update(two, "learner.compute_dtype=bfloat16")
    assert narrow == pytest.approx(exact, rel=0.1)
    assert narrow != pytest.approx(exact, rel=1e-5)
    with pytest.raises(ConfigError, match=r"^learner\.sequence_parallel: the load of this model's routers is counted"):
        first_update(two, "learner.sequence_parallel=2", "model.base=tiny:qwen3-moe-64")


def test_ranks_that_are_killed_or_hang_learn_their_batches_again(tmp_path: Path) -> None:
    config = configure(tmp_path, "topology.gpus_for_training=2", "topology.heartbeat_seconds=10")
    told = list[str]()
    policy, store = build_policy(config), CheckpointStore(config.run_folder / "checkpoints")
    with learning(config, policy, told) as learner:
        learner.update(build_batch_of(0))
        os.kill(learner.pids[0], signal.SIGKILL)  # there is no checkpoint that holds the first batch
        with pytest.raises(ServiceError, match=r"\(process \d+\): \w*Actor.* before the first checkpoint$"):
            learner.update(build_batch_of(1))
    require_no_actors("LearnerRank")

    alone = build_policy(config)
    expected = build_learner(config, alone)
    policy = build_policy(config)
    with learning(config, policy, told) as learner:
        store.save(0, policy=policy, learner=learner, trainer_state={})
        learner.update(build_batch_of(0))
        os.kill(killed := learner.pids[1], signal.SIGKILL)
        learner.update(build_batch_of(1))  # from the weights of step 0: the first batch is learned again before
        store.save(2, policy=policy, learner=learner, trainer_state={})
        os.kill(stopped := learner.pids[0], signal.SIGSTOP)
        report = learner.update(build_batch_of(2))
        store.save(3, policy=policy, learner=learner, trainer_state={})
        # Step 0 was there until now, from which all batches would be needed if the newer ones were damaged.
        assert len(list((config.run_folder / "learner").iterdir())) == 3
        cut = config.run_folder / "checkpoints/step_000003/resume/learner-00001-of-00002.safetensors"
        cut.write_bytes(cut.read_bytes()[:-1])
        os.kill(lost := learner.pids[1], signal.SIGKILL)
        learner.update(build_batch_of(3))  # from step 2: the batch since then is kept, because step 3 may be damaged
        assert len(list((config.run_folder / "learner").iterdir())) == 2
        store.save(3, policy=policy, learner=learner, trainer_state={})
        store.load(3)
    metrics = [expected.update(build_batch_of(number)).metrics for number in range(4)]
    assert report.metrics["loss/total"] == pytest.approx(metrics[2]["loss/total"], abs=1e-6)
    store.save(4, policy=alone, learner=expected, trainer_state={})
    require_same(config.run_folder / "checkpoints/step_000003", config.run_folder / "checkpoints/step_000004")
    assert learner.counters() == expected.counters()
    assert len(told) == 3  # of the ranks for which others were started
    assert f"(process {killed}): Actor" in told[0]
    assert f"(process {stopped}) was not heard of for 10 seconds" in told[1]
    assert f"(process {lost}): Actor" in told[2]
    assert f"passed over a checkpoint: {cut}: expected" in told[2]
    require_no_actors("LearnerRank")


@pytest.mark.nightly
def test_ranks_begin_with_the_drivers_weights_also_the_frozen_ones_and_the_reference(tmp_path: Path) -> None:
    """Their files hold other weights. Nothing of them may be left, also where a checkpoint's adapter is read again."""
    more = ["topology.gpus_for_training=2", "model.trainer_mode=lora", "loss.kl_coef=0.1", "reference.source=adapter"]
    config = configure(tmp_path, *more)
    policy, alone = build_policy(config), build_policy(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for ours, theirs in zip(policy.model.parameters(), alone.model.parameters(), strict=True):
            ours.add_(torch.randn(ours.shape, generator=generator), alpha=0.02)
            theirs.copy_(ours)
    expected = build_learner(config, alone)
    told = list[str]()
    with learning(config, policy, told) as learner:
        first, second = learner.update(build_batch_of(0)).metrics, expected.update(build_batch_of(0)).metrics
        assert (first["kl/ref_k3"], second["kl/ref_k3"]) == (0.0, 0.0)
        assert first["loss/total"] == pytest.approx(second["loss/total"], abs=1e-6)
        folder = CheckpointStore(config.run_folder / "checkpoints").save(
            1, policy=policy, learner=learner, trainer_state={}
        )
        base = folder / "base/model.safetensors"
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(base).items()}, base, {"format": "pt"})
        (folder / "manifest.json").unlink()
        seal(folder, step=1, origin=Origin())
        os.kill(learner.pids[0], signal.SIGKILL)
        first, second = learner.update(build_batch_of(1)).metrics, expected.update(build_batch_of(1)).metrics
        for name in ("loss/total", "kl/ref_k3"):
            assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6), name
        with pytest.raises(TypeError, match="expected a TokenTable"):
            learner.update(build_batch_of(2), print)  # type: ignore[arg-type]  # a sink, but no table
        tensors = folder / "resume/learner-00001-of-00002.safetensors"
        tensors.write_bytes(bytes(tensors.stat().st_size))
        os.kill(learner.pids[0], signal.SIGKILL)
        with pytest.raises(ServiceError, match=r"no checkpoint is sound: .*learner-00001-of-00002\.safetensors"):
            learner.update(build_batch_of(2))
    assert len(told) == 1


@pytest.mark.nightly
def test_the_settings_bound_how_long_and_how_often_ranks_are_waited_for(tmp_path: Path) -> None:
    two = "topology.gpus_for_training=2"
    hasty = configure(tmp_path, two, "topology.group_timeout_seconds=0.0001", "topology.max_restarts=1")
    with pytest.raises(
        ServiceError, match=r"lost 2 times in a row.*(was not done after 0\.0001 s|timed out after 0ms)"
    ):
        learning(hasty, build_policy(hasty)).__enter__()
    strict = configure(tmp_path, two, "topology.max_restarts=0", "topology.heartbeat_seconds=3")
    with learning(strict, build_policy(strict)) as learner:
        os.kill(learner.pids[1], signal.SIGSTOP)
        with pytest.raises(ServiceError, match=r"topology\.max_restarts = 0: rank \d .* was not heard of for 3 sec"):
            learner.update(build_batch_of(0))


def test_a_disk_that_refuses_one_rank_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    config = configure(tmp_path, "topology.gpus_for_training=2")
    policy, store = build_policy(config), CheckpointStore(config.run_folder / "checkpoints")
    with learning(config, policy) as learner:
        learner.update(build_batch_of(0))
        store.save(1, policy=policy, learner=learner, trainer_state={})
        learner.update(build_batch_of(1))
        resource.prlimit(learner.pids[1], resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"step_000002: could not be saved: rank 1: .*File too large"):
            store.save(2, policy=policy, learner=learner, trainer_state={})
        assert [path.name for path in (config.run_folder / "checkpoints").iterdir()] == ["step_000001"]
        assert store.load_latest().step == 1
        resource.prlimit(learner.pids[1], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store.save(2, policy=policy, learner=learner, trainer_state={})
        draft = store.copy(3, policy=policy, learner=learner, trainer_state={})
        os.kill(learner.pids[0], signal.SIGKILL)
        with pytest.raises(CheckpointError, match=r"step_000003: could not be saved: .* ranks were lost while they wr"):
            store.write(draft)
        learner.update(build_batch_of(2))
        store.save(3, policy=policy, learner=learner, trainer_state={})
        assert store.load_latest().step == 3
    files = [path.name for path in (store.newest() / "resume").iterdir()]
    assert sorted(files) == [*(f"learner-0000{rank}-of-00002.safetensors" for rank in range(2)), "state.json"]
    assert not any(path.read_bytes().startswith(b"\x80") for path in store.newest().rglob("*") if path.is_file())
