"""Two vLLM engines in processes of their own behind the router, started by Ray: played, updated, killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from agreement import nudge, plain_logprobs

from gspo_gym.base.leftovers import descendants
from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig
from gspo_gym.policy.load import Policy
from gspo_gym.run.records import read_events
from gspo_gym.types import Completion
from tests.cluster.test_replicas import play, replicas_here, routed, sampling, until_all_take_part

pytestmark = pytest.mark.nightly  # the router is the same with other engines

TOLERANCE = 1e-4  # nats, in float32


def configure(folder: Path, **topology: int) -> RunConfig:
    return RunConfig.from_dict(
        {
            "run": {"folder": str(folder)},
            "model": {"base": "tiny:qwen3-64", "label": "two"},
            "rollout": {
                "env_name": "GuessNumber",
                "env_config": {"style": "terse"},
                "max_turns": 4,
                "max_output_tokens": 3,
                "max_model_len": 256,
                "episodes_per_batch": 32,
            },
            "training": {
                "iterations_per_epoch": 2,
                "group_size": 8,
                "batch_size": 16,
                "learning_rate": 1e-2,
                "weight_sync": {"verify_every_k": 1},
            },
            "evaluation": {"seeds": "0:4"},
            "compute": {"gpu_count": 0},
            "topology": {"type": "cluster", "gpus_for_vllm": 2, "gpus_for_training": 1, **topology},
            "vllm": {"kv_cache_gib": 0.25, "max_model_len": 256},
        }
    )


def require_of(policy: Policy, sampled: list[Completion], version: int) -> None:
    for number, one in enumerate(sampled):
        assert {*one.weight_version.tolist()} == {version}
        expected = plain_logprobs(policy.model, [number % 200, 5, 6], one.token_ids.tolist())
        np.testing.assert_allclose(one.logprobs, expected, rtol=0, atol=TOLERANCE)


def _wait_until_ended(pids: list[int]) -> None:
    """The system ends a child at its parent's death, which takes a moment; a number may be used again by then."""
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if b"VLLM" in _command(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_one_of_two_is_killed_and_comes_back_with_the_committed_weights_while_the_other_plays_on(
    tmp_path: Path,
) -> None:
    config = configure(tmp_path)
    policy = build_policy(config)

    async def run() -> None:
        async with sampling(config, policy) as (engine, weight_sync):
            await weight_sync.attest()
            require_of(policy, await play(engine, range(8)), 0)
            nudge(policy.model, seed=1)
            await weight_sync.publish(1)  # each is attested before any samples
            require_of(policy, await play(engine, range(8)), 1)
            first = replicas_here()
            assert len(first) == 2
            its_own = [pid for pid in descendants(first[0]) if b"VLLM" in _command(pid)]
            assert its_own
            playing = asyncio.create_task(play(engine, range(4), max_tokens=200))
            await asyncio.sleep(0)
            async with asyncio.timeout(60):
                while not all(replica.num_in_flight for replica in routed(engine).replicas):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            os.kill(first[0], signal.SIGKILL)
            require_of(policy, await playing, 1)
            assert first[1] in replicas_here()  # which has played on
            await until_all_take_part(engine, seconds=1.0)
            assert len({*first} & {*replicas_here()}) == 1
            await asyncio.to_thread(_wait_until_ended, its_own)
            for replica in routed(engine).replicas:
                require_of(policy, await play(replica.engine, range(2)), 1)
            nudge(policy.model, seed=2)
            await weight_sync.publish(2)
            require_of(policy, await play(engine, range(4)), 2)

    asyncio.run(run())
    restored = [event for event in read_events(config.run_folder) if event["kind"] == "engine_restored"]
    assert [event["data"]["version"] for event in restored] == [1]
