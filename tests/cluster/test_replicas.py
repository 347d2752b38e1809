"""Processes that sample behind a router: a run with them is that of one process, and lost ones cost no call.

Each has the local engine and a copy of the model. They are killed and stopped while calls are in flight.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import nudge, plain_logprobs
from engine_contract import until_in_flight

from gspo_gym.base.leftovers import descendants
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import engines
from gspo_gym.config.build.engines import _base_now, build_engine, build_weight_sync
from gspo_gym.config.build.processes import launching
from gspo_gym.config.build.trainer import build_learner, build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.engine.base import Engine, SamplingParams, TensorMeta, WeightUpdate
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import EngineError, EnginePoisonedError, UnknownNameError
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events
from gspo_gym.types import Completion
from tests.cluster.test_learner_ranks import actors_of, episodes_of, require_no_actors
from tests.cluster.test_ray import require_gone
from tests.support.saved_steps import require_same
from tests.support.small_quickstart import QUICKSTART, SMALLER

pytestmark = pytest.mark.usefixtures("own_ray")

TWO = [
    "compute.gpu_count=0",
    "topology.type=cluster",
    "topology.gpus_for_vllm=2",
    "topology.gpus_for_training=1",
    "rollout.engine=local",
    "topology.heartbeat_seconds=15",
]

STALE = ["training.max_staleness=1", "correction.old_logprobs=rollout"]


def configure(folder: Path, *more: str) -> RunConfig:
    return load_config(QUICKSTART, [*SMALLER, *TWO, f"run.folder={folder}", "model.label=two", *more])


def replicas_here() -> list[int]:
    """The processes that sample."""
    return actors_of("SamplingActor")


@contextlib.asynccontextmanager
async def sampling(config: RunConfig, policy: Policy) -> AsyncIterator[tuple[Engine, WeightSync]]:
    """The engine of a run and what publishes its weights; nothing is left of either."""
    recorder = RunRecorder.create(config.run_folder, config.to_toml())
    with launching(config) as cluster:
        engine = await build_engine(config, policy, cluster)
        weight_sync = build_weight_sync(config, policy, engine, recorder)
        try:
            yield engine, weight_sync
        finally:
            weight_sync.close()
            await engine.close()
            recorder.close()
    require_no_actors("SamplingActor")


async def started(config: RunConfig, policy: Policy) -> None:
    with launching(config) as cluster:
        engine = await build_engine(config, policy, cluster)
        await engine.close()


async def play(engine: Engine, numbers: Sequence[int], max_tokens: int = 40) -> list[Completion]:
    """A call each, all at once; one that fails is made again, as the pool does with an episode."""

    async def call(number: int) -> Completion:
        params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(), seed=number)
        for _ in range(20):
            with contextlib.suppress(EngineError):
                completion = await engine.generate([number % 200, 5, 6], params, session_id=f"{number}")
                await engine.end_session(f"{number}")  # or it would stay where it was last
                return completion
        raise AssertionError(f"call {number} failed 20 times")

    return await asyncio.gather(*(call(number) for number in numbers))


def routed(engine: Engine) -> RoutedEngine:
    assert isinstance(engine, RebuildableEngine)
    assert isinstance(engine.engine, RoutedEngine)
    return engine.engine


async def until_all_take_part(engine: Engine, seconds: float = 0.05) -> None:
    """Play on until no replica is left out, which needs calls: nothing is watched without."""
    number = 1000
    async with asyncio.timeout(300):
        while any(replica.left_out for replica in routed(engine).replicas):
            await play(engine, [number])
            await asyncio.sleep(seconds)
            number += 1


def test_a_run_on_two_replicas_and_two_learner_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """The batches of a replica are others than those of one engine, which changes a logit's last bits."""
    steps = ["training.iterations_per_epoch=4", "training.checkpoint_every_n_iters=4", "evaluation.seeds=0:20"]
    topologies = {"one": ["topology.gpus_for_vllm=1"], "many": ["topology.gpus_for_training=2"]}
    runs = {}
    for name, more in topologies.items():
        arguments = [line for line in TWO if name == "many" or "heartbeat" not in line]
        config = load_config(
            QUICKSTART, [*SMALLER, *arguments, f"run.folder={tmp_path}", f"model.label={name}", *steps, *more]
        )
        runs[name] = run_training(config)
    one, many = tmp_path / "one", tmp_path / "many"
    assert episodes_of(many) == episodes_of(one)
    assert len(episodes_of(many)) == 4 * 64 + 2 * 20
    assert runs["many"]["curve"] == runs["one"]["curve"]
    require_same(many / "checkpoints/step_000004", one / "checkpoints/step_000004")
    require_no_actors("SamplingActor")


def test_replicas_that_are_killed_or_stand_still_cost_no_call_and_come_back_with_the_committed_weights(
    tmp_path: Path,
) -> None:
    config = configure(tmp_path, "training.weight_sync.verify_every_k=1")
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, weight_sync):
            await weight_sync.attest()
            nudge(policy.model, seed=1)
            await weight_sync.publish(1)
            alone = LocalEngine(policy.model, max_model_len=config.rollout.max_model_len)
            expected = await play(alone, range(48))
            await alone.close()
            for number, sign in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                first = replicas_here()
                playing = asyncio.create_task(play(engine, range(48)))
                await asyncio.sleep(0)
                async with asyncio.timeout(100):
                    while not all(replica.num_in_flight for replica in routed(engine).replicas):  # noqa: ASYNC110
                        await asyncio.sleep(0)
                os.kill(first[number], sign)
                for got, want in zip(await playing, expected, strict=True):
                    assert got.token_ids.tolist() == want.token_ids.tolist()
                    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=1e-4)
                    assert set(got.weight_version.tolist()) == {1}
                await until_all_take_part(engine)
                assert len(replicas_here()) == 2
                assert len({*first} - {*replicas_here()}) == 1
            for replica in routed(engine).replicas:  # each has the weights, and takes the next
                assert dict(await replica.engine.checksums()) == dict(await engine.checksums())
            nudge(policy.model, seed=2)
            await weight_sync.publish(2)
            await play(engine, range(4))

    asyncio.run(run())
    restored = [event for event in read_events(config.run_folder) if event["kind"] == "engine_restored"]
    assert [event["data"]["version"] for event in restored] == [1, 1]


@pytest.mark.nightly
def test_when_all_are_lost_before_an_update_others_get_its_weights(tmp_path: Path) -> None:
    config = configure(tmp_path)
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, weight_sync):
            for pid in replicas_here():
                os.kill(pid, signal.SIGKILL)
            nudge(policy.model, seed=1)
            await weight_sync.publish(1)
            [sampled] = await play(engine, [3])
            assert set(sampled.weight_version.tolist()) == {1}
            expected = plain_logprobs(policy.model, [3, 5, 6], sampled.token_ids.tolist())
            np.testing.assert_allclose(sampled.logprobs, expected, rtol=0, atol=1e-4)
            assert weight_sync.num_rebuilds == 1
            assert len(replicas_here()) == 2

    asyncio.run(run())


@pytest.mark.parametrize("in_flight", ["wait", "keep"])
def test_calls_in_flight_at_an_update_end_before_it_or_go_on_under_the_new_weights(
    in_flight: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_pause_mode", lambda config, engine: in_flight)  # vLLM keeps them, these wait
    config = configure(tmp_path, *STALE)
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, weight_sync):
            longest = config.rollout.max_model_len - 3
            calls = asyncio.create_task(play(engine, range(2), max_tokens=longest))  # one on each
            await until_in_flight(routed(engine), 2)
            nudge(policy.model, seed=1)
            await weight_sync.publish(1)
            assert in_flight == "keep" or calls.done()
            for each in await calls:
                versions = each.weight_version.tolist()
                assert versions == sorted(versions)
                assert {*versions} == ({0} if in_flight == "wait" else {*versions[:1], 1})
                assert len(versions) == longest
            # A prompt that begins as those did is read again: nothing that the old weights computed is left.
            [after] = await play(engine, [0])
            expected = plain_logprobs(policy.model, [0, 5, 6], after.token_ids.tolist())
            np.testing.assert_allclose(after.logprobs, expected, rtol=0, atol=1e-4)
            assert set(after.weight_version.tolist()) == {1}

    asyncio.run(run())


def test_a_replica_that_cannot_be_built_says_why_and_nothing_is_left(tmp_path: Path) -> None:
    config = configure(tmp_path)
    policy = build_policy(config)
    elsewhere = Policy(policy.model, policy.tokenizer, str(tmp_path / "gone"))
    with pytest.raises(UnknownNameError, match=r"gone': not a folder here"):  # as if it were built in this process
        asyncio.run(started(config, elsewhere))
    require_no_actors("SamplingActor")


@pytest.mark.nightly
def test_a_replica_is_built_from_the_newest_checkpoint_when_that_of_the_resumed_run_is_gone(tmp_path: Path) -> None:
    """Retention removes it while the run goes on; one that is lost later found no folder, again and again."""
    config = configure(tmp_path)
    policy = build_policy(config)
    learner, store = build_learner(config, policy), CheckpointStore(config.run_folder / "checkpoints")
    folders = [store.save(step, policy=policy, learner=learner, trainer_state={}) for step in (1, 2)]
    resumed = build_policy(config, str(folders[0]))
    shutil.rmtree(folders[0])
    assert _base_now(config, resumed.base) == str(folders[1])
    assert _base_now(config, policy.base) == policy.base


@pytest.mark.nightly
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_replicas_that_are_killed_while_they_start_are_started_again_so_often(
    max_restarts: int, tmp_path: Path
) -> None:
    config = configure(tmp_path, f"topology.max_restarts={max_restarts}")
    policy = build_policy(config)
    killed: set[int] = set()

    async def kill(num: int) -> None:
        while len(killed) < num:
            for pid in {*replicas_here()} - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.05)

    async def run() -> None:
        killing = asyncio.create_task(kill(max_restarts or 1))  # both may be there at once
        try:
            if not max_restarts:
                with pytest.raises(EngineError, match=r"replica [01] did not start: .*Actor"):
                    await started(config, policy)
                return
            with launching(config) as cluster:
                engine = await build_engine(config, policy, cluster)
                assert not killed & {*replicas_here()}
                await play(engine, range(4))
                await engine.close()
        finally:
            killing.cancel()

    asyncio.run(run())
    assert len(killed) >= max(1, max_restarts)
    require_no_actors("SamplingActor")


@pytest.mark.nightly
def test_a_replica_that_is_lost_more_often_than_allowed_is_left_out_until_all_are(tmp_path: Path) -> None:
    config = configure(tmp_path, "topology.max_restarts=0")
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, weight_sync):
            os.kill(replicas_here()[0], signal.SIGKILL)
            for version in (1, 2):
                nudge(policy.model, seed=version)
                await weight_sync.publish(version)
                for sampled in await play(engine, range(4)):
                    assert set(sampled.weight_version.tolist()) == {version}
            assert len(replicas_here()) == 1
            os.kill(replicas_here()[0], signal.SIGKILL)
            with pytest.raises(EnginePoisonedError, match="the engine was rebuilt 0 times"):
                await weight_sync.publish(3)

    asyncio.run(run())


@dataclass(frozen=True, slots=True)
class FailingTensors:
    """A source whose second tensor cannot be read, as when a GPU has no memory for a copy."""

    metas: Sequence[TensorMeta]
    device = torch.device("cpu")

    def metadata(self) -> Sequence[TensorMeta]:
        return self.metas

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        meta = self.metas[0]
        yield meta.name, torch.zeros(meta.shape, dtype=meta.dtype)
        raise RuntimeError("CUDA error: out of memory")


def test_tensors_that_cannot_be_read_poison_the_engine_at_once(tmp_path: Path) -> None:
    config = configure(tmp_path)
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, _):
            metas = [TensorMeta(name, each.dtype, tuple(each.shape)) for name, each in policy.model.named_parameters()]
            replica = routed(engine).replicas[0].engine
            assert isinstance(replica, RebuildableEngine)
            await replica.pause("wait")
            with pytest.raises(EngineError, match="did not get all tensors: RuntimeError: CUDA error: out of memory"):
                await replica.apply_weights(WeightUpdate(1, "transfer", tensors=FailingTensors(metas)))
            assert "out of memory" in str((await replica.engine.health()).reason)

    asyncio.run(run())


def test_sigterm_ends_a_run_whose_replicas_do_not_come_up_and_nothing_is_left(tmp_path: Path) -> None:
    config = configure(tmp_path)
    file = tmp_path / "two.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    driver = subprocess.Popen([sys.executable, "-m", "gspo_gym.cli", "train", str(file)], env=environment)
    stopped_pids: set[int] = set()
    while len(stopped_pids) < 2:
        assert driver.poll() is None
        for pid in {*replicas_here()} & descendants(driver.pid) - stopped_pids:
            os.kill(pid, signal.SIGSTOP)
            stopped_pids.add(pid)
    pids = descendants(driver.pid)
    driver.terminate()
    assert driver.wait() == 128 + signal.SIGTERM
    require_gone(pids, set())
