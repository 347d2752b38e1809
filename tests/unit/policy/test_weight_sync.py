"""Publishing weights: which engine gets what, what attests it, and what becomes of an engine that fails.

Engines here are scripted ones whose "weights" are the version they loaded last, said by their logprobs: the canary's
learner knows which to expect.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gspo_gym.engine.base import Capabilities, SamplingParams, WeightUpdate
from gspo_gym.engine.gate import probing
from gspo_gym.engine.replicas.rebuildable import RebuildableEngine
from gspo_gym.engine.scripted import Failures, Latency, ScriptedEngine
from gspo_gym.errors import ConfigError, EngineError, EnginePoisonedError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.attestation import TOLERANCES, Canary, ChecksumLog, canary_prompts
from gspo_gym.policy.load import Policy, adapt_policy, load_policy
from gspo_gym.policy.staging import Handover, Staging
from gspo_gym.policy.weight_sync import Target, WeightSync, choose_kind, require_committed
from gspo_gym.types import Completion, DroppedEpisode, Outcome, Segment, Task, Trajectory, TrajectoryGroup

SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(), seed=0)


class Versioned(ScriptedEngine):
    """Its logprobs are -(1 + what it loaded last): a canary sees what an engine really holds."""

    def __init__(self, *, loads: Callable[[int], int] = lambda version: version, **capabilities: Any) -> None:
        super().__init__(lambda prompt, turn: [5, 6, 7, 8, 9, 10, 11, 12])
        self.loads = loads
        self.loaded = 0
        self.digest = "0"
        self.changes = capabilities

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, **self.changes)

    async def apply_weights(self, update: WeightUpdate) -> None:
        await super().apply_weights(update)
        self.loaded = self.loads(update.version)
        self.digest = str(self.loaded)

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        completion = await super().generate(*args, **kwargs)
        return replace(completion, logprobs=np.full(len(completion.token_ids), -1.0 - self.loaded, np.float32))

    async def checksums(self) -> Mapping[str, str]:
        return {"w": self.digest, "packed": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}


class Learner:
    """Knows the version it is at."""

    version = 0

    def score(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
        return [np.full(len(row) - 1, -1.0 - self.version, np.float32) for row in rows]


def canary_of(learner: Learner) -> Canary:
    return Canary([[1, 2, 3]], learner.score)


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    policy = adapt_policy(load_policy("tiny:qwen3-64", seed=1), LoraSettings(r=1, alpha=1), seed=0)
    return Staging(policy, tmp_path / "weights", keep=2)


def test_a_canary_passes_the_paused_gate_and_nobody_else_does() -> None:
    async def main() -> None:
        engine = Versioned()
        await engine.pause("wait")
        stranger = asyncio.create_task(engine.generate([1], SAMPLING))
        with probing():
            assert (await engine.generate([1], SAMPLING)).logprobs[0] == -1
        assert not stranger.done()
        await engine.resume(1)
        assert (await stranger).weight_version.tolist() == [1] * 4

    asyncio.run(main())


def test_an_answer_kept_over_an_update_comes_out_after_the_commit_or_never() -> None:
    async def main(is_committed: bool) -> Any:
        wake = asyncio.Event()

        async def sleep(_: float) -> None:
            await wake.wait()

        engine = ScriptedEngine([[5]], latency=Latency(1.0), sleep=sleep)
        call = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        await engine.pause("keep")
        await engine.apply_weights(WeightUpdate(1, "shared"))
        wake.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not call.done()
        if is_committed:
            await engine.resume(1)
        else:
            engine.poison("not attested")
        return (await asyncio.gather(call, return_exceptions=True))[0]

    assert asyncio.run(main(True)).token_ids.tolist() == [5]
    assert isinstance(asyncio.run(main(False)), EnginePoisonedError)


def test_a_canary_compares_every_sampled_token_of_both_turns() -> None:
    """The learner disagrees at one position only: 3 prompt tokens, 8 sampled, 2 said, 8 sampled; position 15 of 23."""

    async def main(position: int, tolerance: float = 1e-4) -> float:
        def score(rows: Sequence[Sequence[int]]) -> Any:
            assert [len(row) for row in rows] == [23]
            logprobs = np.full(22, -1.0, np.float32)
            logprobs[position - 1] -= 2e-4
            return [logprobs]

        engine = Versioned()
        await engine.pause("wait")
        return await Canary([[1, 2, 3]], score, tolerance=tolerance).check(engine)

    with pytest.raises(EngineError, match="at position 15 of 23"):
        asyncio.run(main(15))
    assert asyncio.run(main(15, tolerance=3e-4)) == pytest.approx(2e-4, rel=1e-2)
    for environment_token in (11, 12, 21, 22):  # nothing was sampled there
        assert asyncio.run(main(environment_token)) == 0


@pytest.mark.parametrize(("num_copies", "num_asked"), [(1, 2), (2, 2), (5, 5)])
def test_a_canary_asks_every_copy_and_every_prompt(num_copies: int, num_asked: int) -> None:
    engine = Versioned(num_copies=num_copies)
    asyncio.run(Canary([[1, 2, 3], [4]], Learner().score).check(engine))
    first = [call.prompt_token_ids for call in engine.calls if len(call.prompt_token_ids) < 4]
    assert sorted(first) == sorted([(1, 2, 3), (4,), (1, 2, 3), (4,), (1, 2, 3)][:num_asked])
    assert len({call.session_id for call in engine.calls}) == num_asked


def test_a_canary_asks_for_eight_untempered_tokens_within_two_minutes_and_for_something() -> None:
    asked: list[tuple[int, float, float]] = []

    class Noting(Versioned):
        async def generate(self, tokens: Any, sampling: SamplingParams, **options: Any) -> Completion:
            asked.append((sampling.max_tokens, sampling.temperature, options["deadline_seconds"]))
            return await super().generate(tokens, sampling, **options)

    asyncio.run(Canary([[1]], Learner().score).check(Noting()))
    assert asked == [(8, 1.0, 120.0)] * 2
    for prompts in ([], [[1], []]):
        with pytest.raises(ConfigError, match="of one token at least"):
            Canary(prompts, Learner().score)


def test_tolerances_are_twice_the_spacing_of_numbers_between_16_and_32() -> None:
    """In 16 bits; float32 has room for what different implementations add."""
    for dtype in (torch.float16, torch.bfloat16):
        sixteen = torch.tensor(16.0, dtype=dtype)
        spacing = float(torch.nextafter(sixteen, torch.tensor(32.0, dtype=dtype)) - sixteen)
        assert TOLERANCES[str(dtype).removeprefix("torch.")] == 2 * spacing
    assert TOLERANCES["float32"] == 1e-4


def test_nan_is_no_agreement() -> None:
    async def main() -> None:
        engine = Versioned()
        await Canary([[1]], lambda rows: [np.full(len(row) - 1, np.nan, np.float32) for row in rows]).check(engine)

    with pytest.raises(EngineError, match="canary 0"):
        asyncio.run(main())


def test_prompts_are_fixed_in_the_vocabulary_and_one_is_longer_than_a_block() -> None:
    prompts = canary_prompts(100, 4096)
    assert prompts == canary_prompts(100, 4096)
    assert [len(prompt) for prompt in prompts] == [3, 24, 160]
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)
    assert [len(prompt) for prompt in canary_prompts(100, 64)] == [3, 24, 64 - 2 * (8 + 2)]
    assert [len(prompt) for prompt in canary_prompts(100, 21)] == [1]
    with pytest.raises(ConfigError, match="at least 21, got 20"):
        canary_prompts(100, 20)


def test_a_skipped_update_is_seen_by_the_canary_and_poisons() -> None:
    async def main() -> None:
        learner, engine = Learner(), Versioned(loads=lambda version: min(version, 1))
        sync = WeightSync(engine, canary=canary_of(learner))
        learner.version = 1
        await sync.publish(1)
        learner.version = 2
        with pytest.raises(EnginePoisonedError, match="update to version 2 failed: EngineError: canary 0"):
            await sync.publish(2)
        assert engine.weight_version == 1
        assert not sync.is_committed(2)
        assert sync.is_committed(1)

    asyncio.run(main())


def test_a_run_does_not_begin_with_an_engine_that_holds_other_weights() -> None:
    async def main() -> None:
        learner, engine = Learner(), Versioned()
        await WeightSync(engine, canary=canary_of(learner)).attest()
        await WeightSync(engine).attest()  # which has no canary, because it shares the learner's memory
        learner.version = 1
        with pytest.raises(EngineError, match="canary 0"):
            await WeightSync(engine, canary=canary_of(learner)).attest()

    asyncio.run(main())


def test_engines_commit_together_or_not_at_all() -> None:
    """The second fails its attestation: the first, although sound, never samples under the version."""

    async def main() -> None:
        learner, good, bad = Learner(), Versioned(), Versioned(loads=lambda version: 7)
        sync = WeightSync([Target(good), Target(bad)], canary=canary_of(learner))
        learner.version = 1
        call = asyncio.create_task(good.generate([1], SAMPLING))
        with pytest.raises(EnginePoisonedError):
            await sync.publish(1)
        assert (await asyncio.gather(call, return_exceptions=True))[0].__class__ in (Completion, EnginePoisonedError)
        assert (good.weight_version, bad.weight_version) == (0, 0)
        with pytest.raises(EnginePoisonedError):
            await good.generate([1], SAMPLING)

    asyncio.run(main())


def test_an_engine_that_can_be_rebuilt_is_and_gets_the_new_version_once() -> None:
    async def main() -> None:
        learner, made = Learner(), []
        events: list[str] = []

        async def make() -> Versioned:
            made.append(Versioned())
            return made[-1]

        broken = Versioned(loads=lambda version: 0)
        engine = RebuildableEngine(broken, make)
        other = Versioned()
        sync = WeightSync(
            [Target(engine, engine.rebuild), Target(other)],
            canary=canary_of(learner),
            on_event=lambda name, values: events.append(f"{name} {values['version']}"),
        )
        learner.version = 1
        await sync.publish(1)
        assert (len(made), engine.num_rebuilds, sync.num_rebuilds, events) == (1, 1, 1, ["update_failed 1"])
        assert (engine.weight_version, other.weight_version, broken.weight_version) == (1, 1, 0)
        assert (await engine.generate([1], SAMPLING)).logprobs[0] == -2
        assert (await broken.health()).is_poisoned

    asyncio.run(main())


def test_an_engine_that_fails_again_after_its_rebuild_ends_the_run() -> None:
    async def main() -> None:
        learner = Learner()

        async def make() -> Versioned:
            return Versioned(loads=lambda version: 0)

        engine = RebuildableEngine(await make(), make)
        sync = WeightSync([Target(engine, engine.rebuild)], canary=canary_of(learner))
        learner.version = 1
        with pytest.raises(EnginePoisonedError, match="cannot be rebuilt: EngineError: canary 0"):
            await sync.publish(1)
        assert engine.num_rebuilds == 1
        with pytest.raises(EnginePoisonedError):
            await engine.generate([1], SAMPLING)

    asyncio.run(main())


def test_calls_wait_for_a_rebuild_and_those_in_flight_fail_as_calls_not_as_runs() -> None:
    async def main() -> None:
        made = asyncio.Event()

        async def make() -> Versioned:
            await made.wait()
            return Versioned()

        hanging = ScriptedEngine([[1]], failures=Failures(every=1, kind="hang"))
        engine = RebuildableEngine(hanging, make)
        in_flight = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)

        async def bring_up(fresh: Any) -> None:
            await WeightSync(fresh).publish(4)

        async def mend() -> None:
            engine.poison("a failed update")
            await engine.rebuild(bring_up)

        rebuilding = asyncio.create_task(mend())
        with pytest.raises(EngineError, match="was replaced while it answered") as caught:
            await in_flight
        assert not isinstance(caught.value, EnginePoisonedError)  # that would end the run
        waiting = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0)
        made.set()
        await rebuilding
        assert (await waiting).weight_version.tolist() == [4] * 4

    asyncio.run(main())


def test_weights_that_cannot_be_staged_leave_the_engine_as_it_is(staging: Staging) -> None:
    async def main() -> None:
        engine, events = Versioned(), list[tuple[str, Any]]()
        sync = WeightSync(engine, kind="adapter", staging=staging, on_event=lambda *event: events.append(event))
        await sync.publish(1)
        staging.root.rename(staging.root.with_name("gone"))
        staging.root.write_text("a file where a folder should be")
        with pytest.raises(EngineError, match="could not be staged") as caught:
            await sync.publish(2)
        assert not isinstance(caught.value, EnginePoisonedError)
        [(name, values)] = events  # of the first attempt; the second one's failure is raised
        assert (name, values["version"]) == ("staging_failed", 2)
        assert "could not be staged" in values["reason"]
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1] * 4

    asyncio.run(main())


def test_staged_weights_reach_the_engine_with_their_folder_and_digests(staging: Staging) -> None:
    async def main() -> None:
        engine = Versioned()
        sync = WeightSync(engine, kind="adapter", staging=staging)
        for version in (1, 2, 3, 4):
            await sync.publish(version)
        last = engine.updates[-1]
        assert (last.version, last.kind, last.folder) == (4, "adapter", staging.root / "policy-v4")
        assert "adapter_model.safetensors" in last.checksums
        assert sorted(path.name for path in staging.root.iterdir()) == ["policy-v2", "policy-v3", "policy-v4"]
        sync.close()
        assert not staging.root.exists()

    asyncio.run(main())


def test_checksums_are_compared_every_k_updates(staging: Staging) -> None:
    """k = 2, and an engine without a canary that loads nothing after the first: seen at the fourth update."""

    async def main() -> None:
        engine = Versioned(loads=lambda version: min(version, 1), has_checksums=True)
        sync = WeightSync(engine, kind="full", staging=staging, verify_every_k=2)
        for version in range(1, 5):
            with_change(staging, version)
            if version == 4:
                with pytest.raises(EnginePoisonedError, match="holds under version 4 what it held under version 2"):
                    await sync.publish(version)
                return
            await sync.publish(version)

    asyncio.run(main())


def with_change(staging: Staging, version: int) -> None:
    """Make the staged policy another one."""
    with torch.no_grad():
        next(p for name, p in staging._policy.model.named_parameters() if "lora_B" in name).fill_(float(version))


class Taker(Versioned):
    """Is handed tensors, and holds copies of them; breaks off after the first of the version that it is told."""

    def __init__(self, breaks_at: int = 0) -> None:
        super().__init__(update_kinds=("transfer",), has_checksums=True)
        self.breaks_at = breaks_at
        self.held: dict[str, torch.Tensor] = {}

    async def apply_weights(self, update: WeightUpdate) -> None:
        assert update.tensors is not None
        for name, tensor in update.tensors:
            self.held[name] = tensor.clone()
            if update.version == self.breaks_at:
                raise EngineError("the connection broke after the first tensor")
        await super().apply_weights(update)

    async def checksums(self) -> Mapping[str, str]:
        return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in self.held.items()}


def change(policy: Policy, value: float) -> None:
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(value)


def held_value(engine: Taker) -> float:
    """Of the tied head, under the name of the embeddings."""
    return float(engine.held["model.embed_tokens.weight"][0, 0])


def test_an_engine_that_broke_off_a_transfer_is_replaced_by_one_that_gets_it_whole() -> None:
    async def main() -> None:
        policy, made = load_policy("tiny:qwen3-64", seed=1), []

        async def make() -> Taker:
            made.append(Taker(breaks_at=2 if not made else 0))
            return made[-1]

        engine = RebuildableEngine(await make(), make)
        sync = WeightSync([Target(engine, engine.rebuild)], kind="transfer", staging=Handover(policy), verify_every_k=1)
        for version in (1, 2, 3):
            change(policy, version)
            await sync.publish(version)
        broken, fresh = made
        assert (await broken.health()).is_poisoned
        assert (broken.weight_version, held_value(broken), len(broken.held)) == (1, 2.0, 24)  # a mixture of two
        assert (fresh.weight_version, held_value(fresh), len(fresh.held)) == (3, 3.0, 24)
        assert fresh.held.keys() == dict(Handover(policy).stage(4, "transfer").tensors or ()).keys()

    asyncio.run(main())


def test_a_transfer_that_an_engine_skips_is_seen_by_its_checksums() -> None:
    class Sleepy(Taker):
        async def apply_weights(self, update: WeightUpdate) -> None:
            held = self.held
            self.held = {}
            await super().apply_weights(update)
            self.held = {f"fused.{name}": tensor for name, tensor in self.held.items()} if update.version < 2 else held

    async def main() -> None:
        policy = load_policy("tiny:qwen3-64", seed=1)
        sync = WeightSync(Sleepy(), kind="transfer", staging=Handover(policy), verify_every_k=1)
        await sync.publish(1)
        change(policy, 2)
        with pytest.raises(EnginePoisonedError, match="holds under version 2 what it held under version 1"):
            await sync.publish(2)

    asyncio.run(main())


def test_a_dead_engine_is_handed_the_learners_weights_only_if_they_are_the_committed_ones() -> None:
    """Else it stays dead until the next version, which brings a fresh one up."""

    async def main() -> None:
        policy, made = load_policy("tiny:qwen3-64", seed=1), []

        async def make() -> Taker:
            made.append(Taker())
            return made[-1]

        engine = RebuildableEngine(await make(), make)
        sync = WeightSync([Target(engine, engine.rebuild)], kind="transfer", staging=Handover(policy))
        engine.bring_up = sync.restore
        change(policy, 1)
        await sync.publish(1)
        for version, is_ahead in ((1, False), (2, True)):
            if is_ahead:
                change(policy, version)
            await made[-1].close()
            with pytest.raises(EngineError, match="closed"):
                await engine.generate([1], SAMPLING)
            if is_ahead:
                with pytest.raises(EnginePoisonedError, match="cannot be rebuilt: EngineError: the policy's weights"):
                    await engine.generate([1], SAMPLING)
                await sync.publish(version)
            assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [version] * 4
            assert held_value(made[-1]) == version
        await made[-1].close()  # the rebuilt one is as good as the first
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], SAMPLING)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [2] * 4

    asyncio.run(main())


def test_an_engine_that_dies_before_the_first_update_is_rebuilt_and_samples_under_version_0() -> None:
    async def main() -> None:
        made: list[Versioned] = []

        async def make() -> Versioned:
            made.append(Versioned())
            return made[-1]

        events: list[str] = []
        engine = RebuildableEngine(await make(), make)
        sync = WeightSync([Target(engine, engine.rebuild)], on_event=lambda name, _: events.append(name))
        engine.bring_up = sync.restore
        await made[0].close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1], SAMPLING)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [0] * 4
        assert (len(made), made[1].updates, events) == (2, [], [])  # nothing to give it: it begins with version 0
        await sync.publish(1)
        assert (await engine.generate([1], SAMPLING)).weight_version.tolist() == [1] * 4

    asyncio.run(main())


def test_an_engine_that_is_restored_while_a_version_is_committed_gets_that_one() -> None:
    class Slow(Versioned):
        async def apply_weights(self, update: WeightUpdate) -> None:
            begun.set()
            await committed.wait()
            await super().apply_weights(update)

    begun, committed = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        engine, fresh = Versioned(), Slow()
        staging, events = Handover(load_policy("tiny:qwen3-64", seed=1)), []
        sync = WeightSync(
            engine, kind="transfer", staging=staging, on_event=lambda name, values: events.append((name, dict(values)))
        )
        await sync.publish(1)
        restoring = asyncio.create_task(sync.restore(fresh))
        await begun.wait()
        await sync.publish(2)
        committed.set()
        await restoring
        assert (fresh.weight_version, fresh.loaded) == (2, 2)
        assert events == [("engine_restored", {"version": 1}), ("engine_restored", {"version": 2})]

    asyncio.run(main())


def test_an_engine_is_not_restored_from_memory_that_the_learner_has_gone_on_with() -> None:
    async def main() -> None:
        sync, fresh = WeightSync(Versioned()), Versioned()
        await sync.after_step(1)  # every step, unless told otherwise
        with pytest.raises(EngineError, match="were shared, not staged"):
            await sync.restore(fresh)
        assert fresh.updates == []

    asyncio.run(main())


def test_an_engine_that_cannot_commit_is_replaced_by_one_under_the_version_of_the_others() -> None:
    class Uncommitting(Versioned):
        async def resume(self, version: int) -> None:
            raise EngineError("it died")

    async def main() -> None:
        async def make() -> Versioned:
            return Versioned()

        engine, other = RebuildableEngine(Uncommitting(), make), Versioned()
        await WeightSync([Target(engine, engine.rebuild), Target(other)]).publish(1)
        assert (engine.num_rebuilds, engine.weight_version, other.weight_version) == (1, 1, 1)

    asyncio.run(main())


def test_a_file_that_changed_after_staging_is_seen_when_it_is_verified(staging: Staging) -> None:
    class Meddling(Staging):
        def stage(self, version: int, kind: Any) -> WeightUpdate:
            update = super().stage(version, kind)
            assert update.folder is not None
            (update.folder / "adapter_config.json").write_text("{}")
            return update

    async def main() -> None:
        sync = WeightSync(
            Versioned(), kind="adapter", staging=Meddling(staging._policy, staging.root), verify_every_k=1
        )
        with pytest.raises(EnginePoisonedError, match=r"adapter_config\.json: is missing or was changed"):
            await sync.publish(1)

    asyncio.run(main())


def test_a_digest_must_be_the_staged_one_and_that_of_the_other_engines() -> None:
    async def main() -> None:
        one, other = Versioned(has_checksums=True), Versioned(has_checksums=True)
        one.digest, other.digest = "a", "b"
        update = WeightUpdate(1, "full", Path("x"))
        with pytest.raises(EngineError, match=r"w .*expected digest c, which was staged, got a"):
            await ChecksumLog().check(one, update, {"w": "c", "packed": "d"})
        log = ChecksumLog()
        await log.check(one, update, {"w": "a"})
        with pytest.raises(EngineError, match="expected digest a, which another engine holds, got b"):
            await log.check(other, update, {})
        await ChecksumLog().check(Versioned(has_checksums=False), update, {"w": "c"})

    asyncio.run(main())


def test_an_interval_publishes_every_kth_step_only() -> None:
    async def main() -> None:
        engine = Versioned()
        sync = WeightSync(engine, interval=3)
        seen = []
        for step in range(1, 8):
            await sync.after_step(step)
            seen.append(engine.weight_version)
        assert seen == [0, 0, 3, 3, 3, 6, 6]
        assert sorted(sync.committed) == [0, 3, 6]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("kinds", "is_adapter", "mode", "direct", "expected"),
    [
        (("shared",), False, "direct", True, "shared"),
        (("shared", "full"), True, "full", True, "shared"),
        (("shared", "full"), True, "direct", False, "full"),
        (("full", "adapter"), True, "direct", True, "adapter"),
        (("full", "adapter"), True, "full", True, "full"),
        (("full", "adapter"), False, "direct", True, "full"),
        (("full",), True, "direct", True, "full"),
        (("adapter",), False, "direct", True, None),
        (("shared",), False, "direct", False, None),
        ((), True, "direct", True, None),
    ],
)
def test_weights_go_the_way_that_copies_least(
    kinds: tuple[Any, ...], is_adapter: bool, mode: Any, direct: bool, expected: str | None
) -> None:
    engine = Versioned(update_kinds=kinds)
    if expected is None:
        with pytest.raises(ConfigError, match="expected an engine that takes new weights as one of"):
            choose_kind(engine, is_adapter=is_adapter, mode=mode, direct=direct)
    else:
        assert choose_kind(engine, is_adapter=is_adapter, mode=mode, direct=direct) == expected


def test_an_engine_that_cannot_do_what_is_asked_is_refused_before_anything_happens() -> None:
    learner = Learner()
    with pytest.raises(ConfigError, match="pauses by 'keep'"):
        WeightSync(Versioned(pause_modes=("wait",)), mode="keep")
    with pytest.raises(ConfigError, match="needs a staging"):
        WeightSync(Versioned(), kind="full")
    with pytest.raises(ConfigError, match="'raw'"):
        WeightSync(Versioned(logprob_mode="raw"), canary=canary_of(learner))
    with pytest.raises(ConfigError, match="one engine at least"):
        WeightSync([])


def episode(name: str, versions: Sequence[int]) -> Trajectory:
    """One prompt token, and a sampled one of each version."""
    count = len(versions)
    segment = Segment(
        np.arange(count + 1, dtype=np.int32),
        np.array([False] + [True] * count),
        np.array([0.0] + [-1.0] * count, np.float32),
        np.array([-1] + [0] * count),
        np.array([-1, *versions]),
    )
    return Trajectory(name, 0, Task("e", 0), 0, (segment,), (), (), Outcome.TERMINATED)


def test_a_trajectory_with_one_uncommitted_token_is_dropped_and_counted() -> None:
    lost = DroppedEpisode("lost", Outcome.ENV_ERROR, "earlier")
    group = TrajectoryGroup(
        Task("e", 0), (episode("a", [0, 2]), episode("b", [0, 3, 2]), episode("c", [-1])), 4, (lost,)
    )
    checked = require_committed([group], {0, 2}.__contains__)
    (kept,) = checked.groups
    assert [t.trajectory_id for t in kept.trajectories] == ["a"]
    assert checked.num_dropped == 2
    assert [(d.trajectory_id, d.reason) for d in kept.dropped[1:]] == [
        ("b", "sampled under weights that were never committed: version 3"),
        ("c", "sampled under weights that were never committed: version -1"),
    ]
