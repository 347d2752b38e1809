"""From rollout.engine, [vllm] and services.engine_urls to an engine; vLLM itself is started in tests/vllm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hash_model
import pytest
import torch
from agreement import nudge
from faulty_server import FaultyServer
from transformers import AutoModelForCausalLM

from gspo_gym.cluster.placement import Part, Resources
from gspo_gym.config.build import engines as build_engines
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.base import Engine, SamplingParams
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import ConfigError, EngineError
from gspo_gym.policy.load import Policy, load_policy, save_base

Make = Callable[[dict[str, Any]], RunConfig]
LORA = {"model.trainer_mode": "lora", "training.lora": {"r": 12}}
OF_AN_APP = {"services.task_url": "http://127.0.0.1:1"}
HANDED_OVER = {"training.weight_sync": {"direct": "shared_memory"}}


def settings_of(config: RunConfig, folder: Path = Path("weights")) -> VllmSettings:
    return build_engines.vllm_settings(config, build.build_policy(config), folder)


def run(config: RunConfig, use: Callable[[Engine, Policy], Any]) -> Any:
    """Build the engine that the config names, use it and close it."""

    async def main() -> Any:
        policy = build.load_policy("tiny:qwen3-64")
        engine = await build_engines.build_engine(config, policy)
        try:
            return await use(engine, policy)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_vllm_on_a_processor_runs_as_the_learner_does_in_a_gibibyte(make: Make) -> None:
    config = make({"rollout.engine": "vllm", "run.seed": 3, "rollout.max_concurrent_rollouts": 9})
    assert settings_of(config) == VllmSettings(
        model="weights",
        max_model_len=512,
        dtype="float32",
        max_num_seqs=9,
        gpu_memory_utilization=0.4,
        kv_cache_gib=1.0,
        enforce_eager=True,
        seed=3,
        max_loras=2,
    )


def on_gpus(config: RunConfig) -> VllmSettings:
    """As if the policy were on a GPU, of which the settings ask for nothing else."""
    policy = build.build_policy(config.model_copy(update={"compute": None}))
    policy.model.to("meta")
    return build_engines.vllm_settings(config, policy, Path("weights"))


def test_vllm_takes_a_part_of_the_gpu_that_it_shares_and_most_of_its_own(make: Make) -> None:
    topology = {"gpus_for_vllm": 4, "gpus_for_training": 1, "tensor_parallel": 2}
    split = on_gpus(make({"compute": {"gpu_count": 5}, "topology": topology}))
    assert (split.tensor_parallel_size, split.data_parallel_size, split.device_ids) == (2, 2, (0, 1, 2, 3))
    shared = on_gpus(make({"compute": {"gpu_count": 2}, "vllm": {"tensor_parallel_size": 2}}))
    assert (shared.tensor_parallel_size, shared.data_parallel_size, shared.device_ids) == (2, 1, ())
    assert (split.gpu_memory_utilization, shared.gpu_memory_utilization) == (0.9, 0.4)
    assert (split.kv_cache_gib, split.enforce_eager) == (None, False)


def test_vllm_that_is_to_sleep_can_give_memory_back_on_a_gpu_and_waits_on_a_processor(make: Make) -> None:
    config = make({"vllm": {"sleep_while_learning": True}})
    assert on_gpus(config).enable_sleep_mode
    assert not on_gpus(make({"vllm": {}})).enable_sleep_mode
    assert not settings_of(config).enable_sleep_mode


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("tensor_parallel_size", 2, "tensor_parallel_size"),
        ("max_model_len", 600, "max_model_len"),
        ("dtype", "bfloat16", "dtype"),
        ("gpu_memory_utilization", 0.7, "gpu_memory_utilization"),
        ("kv_cache_gib", 0.5, "kv_cache_gib"),
    ],
)
def test_each_key_of_vllm_reaches_its_settings(key: str, value: Any, field: str, make: Make) -> None:
    without, given = settings_of(make({"vllm": {}})), settings_of(make({"vllm": {key: value}}))
    assert getattr(given, field) == value != getattr(without, field)


@pytest.mark.parametrize(
    ("changes", "obeys"),
    [({}, False), (OF_AN_APP, True), ({**OF_AN_APP, "rollout.min_output_tokens": 1}, False)],
)
def test_vllm_obeys_schemas_where_apps_may_ask_and_end_tokens_are_not_withheld(
    changes: dict[str, Any], obeys: bool, make: Make
) -> None:
    assert settings_of(make({"vllm": {}, **changes})).structured_output is obeys


def test_vllm_of_a_cluster_has_the_sizes_of_its_servers_and_is_handed_weights_by_its_process(make: Make) -> None:
    topology = {"type": "cluster", "gpus_for_vllm": 8, "gpus_for_training": 1, "tensor_parallel": 2}
    config = make({"compute": {"gpu_count": 0}, "topology": topology})
    settings = settings_of(config)
    assert (settings.tensor_parallel_size, settings.data_parallel_size, settings.device_ids) == (2, 1, ())
    assert settings.transfer == "shared_memory"
    # 8 / 2 servers, each with a core for each of its processes.
    assert build_engines.sampling_parts(config) == [Part("replica", 4, Resources(cores=2))]
    alone = make({"compute": {"gpu_count": 0}, "topology": {**topology, "gpus_for_vllm": 2}})
    assert build_engines.sampling_parts(alone) == []


def test_vllm_in_an_actor_takes_most_of_its_own_gpus_beside_weights_on_the_processor(make: Make) -> None:
    topology = {"gpus_for_vllm": 4, "gpus_for_training": 2, "tensor_parallel": 2}
    config = make({"compute": {"gpu_count": 6}, "topology": topology, "vllm": {}})
    settings = build_engines.vllm_settings(config, load_policy("tiny:qwen3-64"), Path("weights"))
    assert (settings.tensor_parallel_size, settings.data_parallel_size, settings.device_ids) == (2, 2, ())
    assert (settings.gpu_memory_utilization, settings.kv_cache_gib, settings.enforce_eager) == (0.9, None, False)
    # One server of both copies: each rank of vLLM has a GPU and a core.
    assert build_engines.sampling_parts(config) == [Part("replica", 1, Resources(gpus=4, cores=4))]


def test_an_evaluation_of_a_run_with_replicas_has_one_engine_in_this_process(make: Make) -> None:
    topology = {"type": "cluster", "gpus_for_vllm": 2, "gpus_for_training": 1}

    async def kind(engine: Engine, _: Policy) -> type[Engine]:
        return type(engine)

    config = make({"compute": {"gpu_count": 0}, "topology": topology, "rollout.engine": "local"})
    assert run(config, kind) is LocalEngine


def test_vllm_is_started_for_adapters_of_the_next_rank_that_it_knows(make: Make) -> None:
    direct = {"training.weight_sync": {"mode": "direct"}}
    assert settings_of(make({"vllm": {}, **LORA, **direct})).max_lora_rank == 16
    assert settings_of(make({"vllm": {}, **direct})).max_lora_rank == 0  # there is none


def test_an_adapter_is_merged_for_vllm_on_a_processor_unless_mode_is_direct(make: Make) -> None:
    def ranks(**sync: str) -> tuple[int, int]:
        config = make({"vllm": {}, **LORA, "training.weight_sync": sync})
        return settings_of(config).max_lora_rank, on_gpus(config).max_lora_rank

    assert ranks() == ranks(mode="auto") == (0, 16)
    assert ranks(mode="direct") == (16, 16)
    assert ranks(mode="full") == (0, 0)
    # A GPU's vLLM that is handed whole models has no place for an adapter either.
    assert on_gpus(make({"vllm": {}, **LORA, **HANDED_OVER})).max_lora_rank == 0


def test_vllm_on_a_processor_has_the_smallest_blocks_and_elsewhere_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = VllmSettings(model="weights", max_model_len=512)
    assert settings.engine_args()["block_size"] == 32
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "block_size" not in settings.engine_args()


def test_weights_can_be_handed_to_vllm_as_far_as_the_machine_can_do_that(make: Make) -> None:
    def handed_over(transfer: str) -> RunConfig:
        return make({"vllm": {}, "training.weight_sync": {"direct": transfer}})

    assert settings_of(make({"vllm": {}})).transfer == "files"
    assert settings_of(handed_over("shared_memory")).transfer == "shared_memory"
    policy = build.load_policy("tiny:qwen3-64")  # on the processor, whatever else is there
    with pytest.raises(
        ConfigError, match='"ipc" is from GPU to GPU, but the policy is on the cpu; set "shared_memory"'
    ):
        build_engines.vllm_settings(handed_over("ipc"), policy, Path("weights"))


def test_only_vllm_that_is_handed_weights_is_told_of_transfers() -> None:
    def fields(**changes: Any) -> dict[str, Any]:
        return VllmSettings(model="weights", max_model_len=512, **changes).engine_args()

    assert "weight_transfer_config" not in fields()
    for transfer, backend in (("nccl", "nccl"), ("ipc", "gspo_gym_ipc"), ("shared_memory", "gspo_gym_shared_memory")):
        assert fields(transfer=transfer)["weight_transfer_config"] == {"backend": backend}
    with pytest.raises(
        ConfigError, match="expected 'files' with max_lora_rank = 8, got 'nccl': adapters are read from"
    ):
        fields(transfer="nccl", max_lora_rank=8)


def test_the_base_of_adapters_is_the_model_without_them(make: Make, tmp_path: Path) -> None:
    policy = build.build_policy(make({"vllm": {}, **LORA}))
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        expected = policy.model(ids).logits  # a new adapter adds nothing
    nudge(policy.model, seed=0)  # and this one does
    save_base(policy, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert (policy.model(ids).logits - expected).abs().max() > 0.01
        torch.testing.assert_close(base(ids).logits, expected, rtol=0, atol=1e-6)


def test_a_context_longer_than_the_models_is_refused_and_named(make: Make) -> None:
    policy = build.load_policy("tiny:qwen3-64")
    longest = policy.model.config.max_position_embeddings
    for key, changes in {
        "rollout.max_model_len": {"rollout.max_model_len": longest + 1},
        "vllm.max_model_len": {"vllm": {"max_model_len": longest + 1}},
    }.items():
        with pytest.raises(ConfigError, match=rf"{key}: tiny:qwen3-64.* reads at most {longest} tokens, got"):
            asyncio.run(build_engines.build_engine(make(changes), policy))


def of_servers(servers: list[FaultyServer]) -> dict[str, Any]:
    urls = [server.base_url.removesuffix("/v1") for server in servers]
    return {"rollout.engine": "http", "services": {"engine_urls": urls}}


def test_an_endpoint_samples_and_its_weights_stay_its_own(make: Make) -> None:
    with FaultyServer() as server:

        async def use(engine: Engine, policy: Policy) -> Any:
            assert engine.capabilities.update_kinds == ()
            assert engine.capabilities.max_model_len == 512
            sampling = SamplingParams(max_tokens=5, stop_token_ids=(), seed=9)
            return await engine.generate([1, 2, 3], sampling)

        completion = run(make(of_servers([server])), use)
    assert completion.token_ids.tolist() == hash_model.sample([1, 2, 3], seed=9, max_tokens=5).token_ids
    assert completion.weight_version.tolist() == [-1] * 5


def test_an_endpoint_is_asked_for_the_model_that_is_named_or_the_base(make: Make) -> None:
    async def use(engine: Engine, policy: Policy) -> None:
        pass  # starting it asks enough

    for changes, name in (({}, "tiny:qwen3-64"), ({"services.engine_model": "teacher"}, "teacher")):
        with FaultyServer() as server:
            run(make({**of_servers([server]), **changes}), use)
        assert {seen.body["model"] for seen in server.seen if seen.body} == {name}


def test_several_urls_share_the_work(make: Make) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(FaultyServer()) for _ in range(2)]

        async def use(engine: Engine, policy: Policy) -> None:
            before = [len(server.seen) for server in servers]
            sampling = SamplingParams(max_tokens=2, stop_token_ids=(), seed=0)
            await asyncio.gather(*(engine.generate([k], sampling, session_id=str(k)) for k in range(16)))
            assert [len(server.seen) > seen for server, seen in zip(servers, before, strict=True)] == [True, True]

        run(make(of_servers(servers)), use)


def test_nobody_at_a_url_is_an_error(make: Make) -> None:
    with FaultyServer() as server:
        gone = server
    with pytest.raises(EngineError):
        run(make(of_servers([gone])), None)  # type: ignore[arg-type]
