"""[training.weight_sync], correction.max_engine_gap and what else decides how weights are sent, seen in what happens.

The engine is a real one on the policy's own weights which says that it reads folders: what it is sent is looked at, and
canaries are answered truly.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_run import small_run

from gspo_gym.config.build.engines import build_alarm, build_canary, build_weight_sync, learner_score
from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Capabilities, Engine, PauseMode, WeightUpdate
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.replicas.router import RoutedEngine
from gspo_gym.errors import ConfigError, EnginePoisonedError
from gspo_gym.policy.attestation import TOLERANCES
from gspo_gym.policy.load import Policy
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events

Values = dict[str, Any]
STALE = {"training.max_staleness": 2, "correction.level": "trajectory"}


def make_config(folder: Path, changes: Values) -> RunConfig:
    values: Values = small_run(
        run={"folder": str(folder)},
        algorithm={"variety": "gspo_token"},
        model={"label": "sync", "trainer_mode": "lora"},
        rollout={"episodes_per_batch": 16},
        training={"iterations_per_epoch": 4, "batch_size": 8, "checkpoint_every_n_iters": 4},
        evaluation={"every_n_iters": 4},
        vllm={},
    )
    for key, value in changes.items():
        *above, name = key.split(".")
        table = values
        for part in above:
            table = table.setdefault(part, {})
        table[name] = value
    return RunConfig.from_dict(values)


class Reader(LocalEngine):
    """Says what it takes, notes what it is sent, and samples from the policy's own weights."""

    def __init__(self, policy: Policy, **changes: Any) -> None:
        super().__init__(policy.model, max_model_len=256)
        self.changes = {"update_kinds": ("full", "adapter"), **changes}
        self.updates: list[WeightUpdate] = []
        self.modes: list[str] = []
        self.held: dict[str, str] = {"w": "as ever"}

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self.changes)

    async def pause(self, mode: PauseMode) -> None:
        self.modes.append(mode)
        await super().pause("wait")

    async def apply_weights(self, update: WeightUpdate) -> None:
        self.updates.append(update)
        await super().apply_weights(WeightUpdate(update.version, "shared"))

    async def checksums(self) -> dict[str, str]:
        return self.held


Body = Callable[[WeightSync, Reader, Policy], Any]


def run(folder: Path, changes: Values, body: Body, **capabilities: Any) -> RunConfig:
    config = make_config(folder, changes)
    policy = build_policy(config)
    recorder = RunRecorder.create(folder / "sync", "")

    async def main() -> None:
        engine = Reader(policy, **capabilities)
        sync = build_weight_sync(config, policy, engine, recorder)
        try:
            await body(sync, engine, policy)
        finally:
            await engine.close()
            sync.close()
            recorder.close()

    asyncio.run(main())
    return config


def sent(folder: Path, changes: Values, **capabilities: Any) -> WeightUpdate:
    """What an engine with these capabilities is sent by one update."""
    updates = []

    async def body(sync: WeightSync, engine: Reader, _: Policy) -> None:
        await sync.publish(1)
        updates.extend(engine.updates)

    run(folder, changes, body, **capabilities)
    return updates[0]


@pytest.mark.parametrize(("mode", "kind"), [("direct", "adapter"), ("full", "full")])
def test_mode_decides_whether_an_adapter_is_sent_alone(mode: str, kind: str, tmp_path: Path) -> None:
    assert sent(tmp_path, {"training.weight_sync.mode": mode}).kind == kind


def test_direct_goes_through_memory_and_otherwise_through_the_runs_folder(tmp_path: Path) -> None:
    by_disk = sent(tmp_path / "a", {"training.weight_sync.direct": False})
    assert by_disk.folder is not None
    assert by_disk.folder.is_relative_to(tmp_path / "a" / "sync")
    in_memory = sent(tmp_path / "b", {})
    assert in_memory.folder is not None
    expected = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    assert in_memory.folder.is_relative_to(expected)
    assert sent(tmp_path / "c", {}, update_kinds=("shared", "full")).kind == "shared"
    assert sent(tmp_path / "d", {"training.weight_sync.direct": False}, update_kinds=("shared", "full")).kind == "full"


HANDED_OVER = {"training.weight_sync": {"mode": "full", "direct": "shared_memory"}}


def test_transfer_hands_the_policys_tensors_over_and_writes_nothing(tmp_path: Path) -> None:
    """In vLLM's precision, with the adapter merged: what a file would hold, which transformers can be asked for."""

    async def body(sync: WeightSync, engine: Reader, policy: Policy) -> None:
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.01)
        await sync.publish(1)
        (update,) = engine.updates
        assert (update.kind, update.folder) == ("transfer", None)
        merged = copy.deepcopy(policy.model).merge_and_unload().state_dict()
        tensors = dict(update.tensors or ())
        assert tensors.keys() == merged.keys() - {"lm_head.weight"}  # tied to the embeddings
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, merged[name].to(torch.bfloat16))
        assert list((tmp_path / "sync").glob(".weights*")) == []

    kinds = ("full", "transfer")
    run(tmp_path, {**HANDED_OVER, "vllm.dtype": "bfloat16"}, body, update_kinds=kinds)
    assert sent(tmp_path / "files", {"training.weight_sync.mode": "full"}, update_kinds=kinds).kind == "full"
    with pytest.raises(ConfigError, match=r"takes new weights as one of transfer, got one that takes \['full'\]"):
        sent(tmp_path / "none", HANDED_OVER, update_kinds=("full",))


def test_checksums_are_compared_every_kth_update_and_by_default_never(tmp_path: Path) -> None:
    """An engine that holds the same under every version, although the adapter changes: seen at the second check."""

    def body(fails_at: int | None) -> Body:
        async def publish(sync: WeightSync, _: Reader, policy: Policy) -> None:
            for version in range(1, 7):
                with torch.no_grad():
                    for name, parameter in policy.model.named_parameters():
                        if "lora_B" in name:
                            parameter.fill_(version / 1000)
                if version == fails_at:
                    with pytest.raises(EnginePoisonedError, match="the update was skipped"):
                        await sync.publish(version)
                    return
                await sync.publish(version)

        return publish

    run(tmp_path / "never", {}, body(None), has_checksums=True)
    run(tmp_path / "twice", {"training.weight_sync.verify_every_k": 3}, body(6), has_checksums=True)


def test_weights_are_sent_every_interval_iterations(tmp_path: Path) -> None:
    async def body(sync: WeightSync, engine: Reader, _: Policy) -> None:
        for step in (1, 2, 3, 4):
            await sync.after_step(step)
        assert [update.version for update in engine.updates] == [2, 4]

    run(tmp_path, {**STALE, "training.weight_sync_interval": 2}, body)


def test_stale_samples_let_updates_happen_in_flight_and_keep_more_versions(tmp_path: Path) -> None:
    """max_staleness 2 keeps 4 versions, and one that goes a commit later."""

    async def body(sync: WeightSync, engine: Reader, _: Policy) -> None:
        for version in range(1, 9):
            await sync.publish(version)
        assert set(engine.modes) == {"keep"}
        folder = engine.updates[-1].folder
        assert folder is not None
        there = sorted(path.name for path in folder.parent.iterdir())
        assert there == [f"policy-v{version}" for version in (4, 5, 6, 7, 8)]

    run(tmp_path, STALE, body, pause_modes=("wait", "keep"))

    async def waits(sync: WeightSync, engine: Reader, _: Policy) -> None:
        await sync.publish(1)
        assert engine.modes == ["wait"]

    run(tmp_path / "fresh", {}, waits, pause_modes=("wait", "keep"))


def test_weights_are_staged_in_the_precision_of_vllm(tmp_path: Path) -> None:
    async def body(sync: WeightSync, engine: Reader, _: Policy) -> None:
        await sync.publish(1)
        folder = engine.updates[0].folder
        assert folder is not None
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"

    changes = {"vllm.dtype": "bfloat16", "training.weight_sync.mode": "full"}
    config = run(tmp_path, changes, body)
    assert build_canary(config, build_policy(config)).tolerance == TOLERANCES["bfloat16"]


def test_an_engine_that_samples_something_else_is_poisoned_before_it_samples_for_anybody(tmp_path: Path) -> None:
    config = make_config(tmp_path, {})
    policy, other = build_policy(config), build_policy(make_config(tmp_path, {"run.seed": 5}))
    recorder = RunRecorder.create(tmp_path / "sync", "")

    async def main() -> None:
        engine = Reader(other)
        sync = build_weight_sync(config, policy, engine, recorder)
        with pytest.raises(EnginePoisonedError, match=r"canary 0: .* expected a difference of at most 0\.0001"):
            await sync.publish(1)
        await engine.close()
        sync.close()
        recorder.close()

    asyncio.run(main())


def test_a_canary_is_at_the_temperature_of_rollouts(tmp_path: Path) -> None:
    """The learner's logprobs are then those of a plain forward whose logits are divided by 0.7."""
    config = make_config(tmp_path, {"rollout.temperature": 0.7})
    policy = build_policy(config)
    canary = build_canary(config, policy)
    assert canary.temperature == 0.7
    rows = [[3, 4, 5, 6, 7], [8, 9]]
    for row, logprobs in zip(rows, learner_score(policy.model, 0.7)(rows), strict=True):
        with torch.no_grad():
            logits = policy.model(torch.tensor([row])).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1)[range(len(row) - 1), row[1:]]
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


def test_an_engine_that_can_be_rebuilt_is_and_the_record_says_so(tmp_path: Path) -> None:
    config = make_config(tmp_path, {})
    policy = build_policy(config)
    recorder = RunRecorder.create(tmp_path / "sync", "")

    class Broken(Reader):
        async def apply_weights(self, update: WeightUpdate) -> None:
            raise OSError("the folder is not where it was")

    async def make() -> Engine:
        return Reader(policy)

    async def main() -> None:
        engine = RebuildableEngine(Broken(policy), make)
        sync = build_weight_sync(config, policy, engine, recorder)
        await sync.publish(1)
        assert (engine.weight_version, engine.num_rebuilds) == (1, 1)
        assert engine.bring_up == sync.restore
        await engine.close()
        sync.close()

    asyncio.run(main())
    recorder.close()
    (event,) = [event for event in read_events(tmp_path / "sync") if event["kind"] == "update_failed"]
    assert event["step"] == 1
    assert event["data"]["reason"].endswith("OSError: the folder is not where it was")


def test_every_replica_behind_a_router_is_asked_for_its_canary(tmp_path: Path) -> None:
    """The second replica samples from other weights; a call through the router could have met the first alone."""
    config = make_config(tmp_path, {})
    policy, other = build_policy(config), build_policy(make_config(tmp_path, {"run.seed": 5}))
    recorder = RunRecorder.create(tmp_path / "sync", "")

    async def main() -> None:
        sound, wrong = Reader(policy), Reader(other)
        routed = RoutedEngine([sound, wrong])
        sync = build_weight_sync(config, policy, routed, recorder)
        await sync.publish(1)
        assert ((await sound.health()).is_poisoned, (await wrong.health()).is_poisoned) == (False, True)
        await routed.close()
        sync.close()
        recorder.close()

    asyncio.run(main())


def test_an_engine_that_takes_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an engine that takes new weights as one of shared, adapter, full"):
        sent(tmp_path, {}, update_kinds=())


@pytest.mark.parametrize(
    ("changes", "is_armed"),
    [
        ({}, True),
        ({"rollout.top_p": 0.9, "algorithm.acknowledge": ["truncated_sampling"]}, False),
        ({"rollout.top_p": 0.9}, True),
        ({"training.lora": {"dropout": 0.1}}, False),
        ({"training.lora": {"dropout": 0.1}, "correction.max_engine_gap": 0.5}, True),
    ],
)
def test_the_alarm_is_armed_where_the_two_distributions_are_meant_to_be_one(
    changes: Values, is_armed: bool, tmp_path: Path
) -> None:
    assert (build_alarm(make_config(tmp_path, changes)) is not None) == is_armed


def test_a_given_gap_is_the_alarms_limit(tmp_path: Path) -> None:
    metrics = {"kl/rollout_max_gap": 0.2, "kl/rollout_k3": 0.0}
    alarms = [build_alarm(make_config(tmp_path, {"correction.max_engine_gap": gap})) for gap in (0.1, 0.3)]
    reasons = [alarm and alarm.check(metrics, sampled_under={0}, version=0) for alarm in alarms]
    assert reasons == ["a logprob of the engine is 0.2 nats from the learner's; expected at most 0.1", None]
