"""A disk that is really full while weights are staged or saved: our errors, nothing left behind, and it goes on.

Once on a file system of a few kilobytes, where this process may mount one, and once under a limit on the size of files:
the libraries that write tensors say neither as an OSError.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import forked
from full_disk import SmallDisk, small_disk

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import CheckpointError, EngineError, EnginePoisonedError, StorageError
from gspo_gym.learning.saved import copy_state
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy, adapt_policy, load_policy, save_base, save_policy
from gspo_gym.policy.staging import Staging
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.run.settings import LoopSettings
from gspo_gym.run.state import Saver, TrainState

ROOM = 16_000_000  # for everything that is written here
SAMPLING = SamplingParams(max_tokens=1, stop_token_ids=(), seed=0)
FULL = "No space left on device|File too large"


@pytest.fixture(params=["mounted", "limited"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AbstractContextManager[SmallDisk]]:
    """Room for a configuration, and for no weights; made in the test's own process."""
    return partial(small_disk, tmp_path / "disk", 24_000, may_mount=request.param == "mounted")


def on_the_disk(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test in a process of its own, with the disk that its fixture describes."""

    @forked
    @wraps(test)
    def run(*, disk: Callable[[], AbstractContextManager[SmallDisk]], **kwargs: Any) -> None:
        with disk() as made:
            test(disk=made, **kwargs)

    return run


class Optimizer:
    """What a learner saves: as much as is asked for."""

    def __init__(self, num_bytes: int) -> None:
        self._state = torch.zeros(num_bytes // 4)

    def copy_state(self) -> Callable[[Path], None]:
        return copy_state({"state": self._state})

    def counters(self) -> Mapping[str, int]:
        return {"steps": 1}

    def load(self, tensors: Any, counters: Any) -> None:
        raise AssertionError("nothing is loaded here")


def policy_of(kind: str) -> Policy:
    policy = load_policy("tiny:qwen3-64", seed=1)
    return policy if kind == "full" else adapt_policy(policy, LoraSettings(r=32), seed=0)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["full", "adapter"])
@on_the_disk
def test_weights_that_do_not_fit_are_an_engine_error_and_leave_nothing(kind: Any, disk: SmallDisk) -> None:
    staging = Staging(policy_of(kind), disk.folder / "staged")
    with pytest.raises(EngineError, match=f"version 1 could not be staged: .*({FULL})") as caught:
        staging.stage(1, kind)
    assert not isinstance(caught.value, EnginePoisonedError)
    assert names(disk.folder / "staged") == []
    disk.grow(ROOM)
    assert staging.stage(1, kind).checksums


@on_the_disk
def test_an_update_is_staged_again_when_there_is_room_again(disk: SmallDisk) -> None:
    """As documented: once more at once; who is told of the first failure may make room."""
    events: list[str] = []

    def make_room(name: str, values: Mapping[str, Any]) -> None:
        events.append(f"{name} {values['version']}")
        if events == ["staging_failed 2", "staging_failed 3"]:
            disk.grow(ROOM)

    async def main() -> None:
        engine = ScriptedEngine(lambda prompt, turn: [5])
        sync = WeightSync(
            engine, kind="full", staging=Staging(policy_of("full"), disk.folder / "w"), on_event=make_room
        )
        with pytest.raises(EngineError, match=FULL) as caught:
            await sync.publish(2)
        assert not isinstance(caught.value, EnginePoisonedError)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [0]  # it goes on under what it has
        await sync.publish(3)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [3]
        assert sync.committed == {0, 3}

    asyncio.run(main())
    assert events == ["staging_failed 2", "staging_failed 3"]


@pytest.mark.parametrize("kind", ["full", "adapter"])
@on_the_disk
def test_a_checkpoint_that_does_not_fit_is_a_checkpoint_error_and_the_one_before_stays(
    kind: str, disk: SmallDisk
) -> None:
    """At whatever file the room ends: of the policy, of the optimizer, or after them."""
    policy, small, large = policy_of(kind), Optimizer(4_000), Optimizer(3_000_000)
    store = CheckpointStore(disk.folder / "checkpoints")
    disk.grow(ROOM)
    store.save(1, policy=policy, learner=small, trainer_state={})
    used = sum(path.stat().st_size for path in disk.folder.rglob("*") if path.is_file())
    for room in (50_000, 200_000, 1_000_000):
        disk.grow(used + room if disk.is_mounted else room)
        with pytest.raises(CheckpointError, match=f"step_000002: could not be saved: .*({FULL})"):
            store.save(2, policy=policy, learner=large, trainer_state={})
        assert names(disk.folder / "checkpoints") == ["step_000001"]
        assert store.load_latest().step == 1
    disk.grow(ROOM)
    store.save(2, policy=policy, learner=large, trainer_state={})
    assert store.load_latest().step == 2


@on_the_disk
def test_a_policy_that_does_not_fit_is_a_storage_error_wherever_it_is_saved(disk: SmallDisk) -> None:
    with pytest.raises(StorageError, match=FULL):
        save_policy(policy_of("full"), disk.folder / "policy")
    with pytest.raises(StorageError, match=FULL):
        save_base(policy_of("adapter"), disk.folder / "base")


@pytest.mark.parametrize(
    ("trouble", "disk"), [("full", "mounted"), ("full", "limited"), ("read-only", "mounted")], indirect=["disk"]
)
@on_the_disk
def test_a_run_goes_on_while_the_disk_refuses_and_ends_at_the_third_checkpoint_in_a_row(
    trouble: str, disk: SmallDisk, tmp_path: Path
) -> None:
    """The policy's folder is the disk; what happens is recorded elsewhere."""
    if trouble == "read-only" and not disk.is_mounted:
        pytest.skip("nothing can be mounted here, and nothing else refuses root")
    policy, events = policy_of("full"), []
    store = CheckpointStore(disk.folder / "checkpoints")

    def copy(state: TrainState) -> Callable[[], Path]:
        draft = store.copy(state.step, policy=policy, learner=Optimizer(4_000), trainer_state=state.to_dict())
        return partial(store.write, draft)

    def set_trouble(is_there: bool) -> None:
        used = sum(path.stat().st_size for path in disk.folder.rglob("*")) if disk.is_mounted else 0
        disk.grow(used + 200_000 if is_there and trouble == "full" else ROOM)
        if trouble == "read-only":
            disk.set_read_only(is_there)

    async def main() -> None:
        saver = Saver(
            copy,
            LoopSettings(checkpoint_every_n_iters=4),
            on_event=lambda kind, step, data: events.append((kind, step, data.get("reason", ""))),
        )

        async def step(number: int) -> None:
            await saver.after_step(TrainState(step=number))
            await saver.wait()

        set_trouble(False)
        for number in range(1, 5):
            await step(number)
        set_trouble(True)
        for number in range(5, 10):
            await step(number)
        set_trouble(False)
        await step(10)
        set_trouble(True)
        for number in range(11, 14):
            await step(number)
        with pytest.raises(CheckpointError, match="3 checkpoints in a row could not be saved"):
            await step(14)

    asyncio.run(main())
    failed = "checkpoint_failed"
    assert [event[:2] for event in events] == [
        ("checkpoint", 4), (failed, 8), (failed, 9), ("checkpoint", 10), (failed, 12), (failed, 13), (failed, 14),
    ]  # fmt: skip
    refusal = "Read-only file system" if trouble == "read-only" else FULL
    assert all(re.search(refusal, reason) for kind, _, reason in events if kind == failed)
    set_trouble(False)
    assert names(disk.folder / "checkpoints") == ["step_000004", "step_000010"]
    assert store.load_latest().step == 10
