"""What goes to vLLM and what is made of its answers, without vLLM."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gspo_gym.engine.base import SamplingParams
from gspo_gym.engine.vllm.engine import VllmEngine
from gspo_gym.engine.vllm.requests import completion_of, finish_reason_of, sampling_fields, versions_of
from gspo_gym.engine.vllm.settings import VllmSettings
from gspo_gym.errors import ConfigError, EngineError, MissingExtraError
from gspo_gym.types import FinishReason

SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=(2, 3), seed=7)


@dataclass(frozen=True)
class Labelled:
    version: str
    start: int
    end: int


def test_every_field_that_changes_a_sample_is_sent_whatever_its_value() -> None:
    fields = sampling_fields(SAMPLING, max_new=5)
    ours = {field.name for field in dataclasses.fields(SamplingParams)} - {"json_schema"}
    assert ours <= fields.keys()
    assert (fields["max_tokens"], fields["stop_token_ids"], fields["ignore_eos"]) == (5, [2, 3], True)
    assert (fields["presence_penalty"], fields["frequency_penalty"], fields["n"]) == (0.0, 0.0, 1)


def test_a_schema_is_sent_in_vllms_words_and_only_if_there_is_one() -> None:
    assert "structured_outputs" not in sampling_fields(SAMPLING, max_new=5)
    schema = '{"type": "object"}'
    fields = sampling_fields(dataclasses.replace(SAMPLING, json_schema=schema), max_new=5)
    assert fields["structured_outputs"] == {"json": schema}


@pytest.mark.parametrize("structured_output", [False, True])
def test_a_tokenizer_is_loaded_only_for_schemas(structured_output: bool) -> None:
    settings = VllmSettings(model="policy", max_model_len=512, structured_output=structured_output)
    assert settings.engine_args()["skip_tokenizer_init"] is not structured_output


def test_no_seed_is_the_one_that_vllm_takes_for_none() -> None:
    for seed, sent in ((-1, 2**63 - 1), (2**63 - 2, 2**63 - 2), (2**63 + 5, 5)):
        assert sampling_fields(dataclasses.replace(SAMPLING, seed=seed), max_new=1)["seed"] == sent


def test_min_tokens_is_cut_to_what_the_context_leaves() -> None:
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(), seed=0, min_tokens=6)
    assert sampling_fields(sampling, max_new=2)["min_tokens"] == 2


@pytest.mark.parametrize(
    ("temperature", "is_refused"), [(0.0, False), (0.009, True), (0.01, False), (2.0, False), (2.1, True)]
)
def test_a_temperature_that_vllm_would_change_is_refused(temperature: float, is_refused: bool) -> None:
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    if is_refused:
        with pytest.raises(ConfigError, match="temperature"):
            sampling_fields(sampling, max_new=1)
    else:
        assert sampling_fields(sampling, max_new=1)["temperature"] == temperature


def test_spans_become_the_version_of_each_token() -> None:
    assert versions_of([Labelled("3", 0, 2), Labelled("4", 2, 5)], 5) == [3, 3, 4, 4, 4]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [],
        [Labelled("3", 0, 4)],  # one token has none
        [Labelled("3", 0, 6)],  # one too many
        [Labelled("3", 1, 5)],
        [Labelled("3", 0, 3), Labelled("4", 2, 5)],
        [Labelled("4", 3, 5), Labelled("3", 0, 3)],
        [Labelled("3", 0, 5), Labelled("4", 5, 5)],
        [Labelled("default", 0, 5)],  # somebody else's weights
    ],
    ids=str,
)
def test_spans_that_do_not_cover_the_tokens_in_order_are_refused(spans: list[Labelled] | None) -> None:
    with pytest.raises(EngineError, match="5 tokens"):
        versions_of(spans, 5)


@pytest.mark.parametrize(
    ("reason", "token_ids", "expected"),
    [
        ("stop", [5, 2], FinishReason.STOP),
        ("length", [5, 6, 7, 8], FinishReason.LENGTH),
        ("stop", [5, 6], "contradicts"),  # a stop that we did not ask for
        ("stop", [], "contradicts"),
        ("length", [5, 6, 7], "contradicts"),  # tokens are missing
        ("abort", [5, 6], "gave the request up"),
        ("error", [], "gave the request up"),
        ("repetition", [5, 6], "contradicts"),
        (None, [5, 6, 7, 8], "contradicts"),
    ],
)
def test_a_finish_reason_is_believed_if_the_tokens_agree(
    reason: str | None, token_ids: list[int], expected: FinishReason | str
) -> None:
    if isinstance(expected, FinishReason):
        assert finish_reason_of(reason, token_ids, stop_token_ids=(2, 3), max_new=4) is expected
    else:
        with pytest.raises(EngineError, match=expected):
            finish_reason_of(reason, token_ids, stop_token_ids=(2, 3), max_new=4)


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "reason"),
    [
        ([1, 10], [-1.0, -1.0], r"\[0, 10\), got 10"),
        ([-1, 1], [-1.0, -1.0], "got -1"),
        ([1, 2], [-1.0, float("nan")], "finite"),
        ([1, 2], [-1.0, float("-inf")], "finite"),
        ([1, 2], [-1.0, 0.5], "got 0.5"),
        ([1, 2], [-1.0], "logprobs"),
    ],
)
def test_an_answer_that_cannot_be_true_is_an_engines_error(
    token_ids: list[int], logprobs: list[float], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        completion_of(
            token_ids, logprobs, finish_reason=FinishReason.LENGTH, versions=[0] * len(token_ids), vocab_size=10
        )


def test_the_first_and_the_last_token_of_a_vocabulary_are_taken() -> None:
    completion = completion_of([0, 9], [-1.0, -2.0], finish_reason=FinishReason.LENGTH, versions=[3, 4], vocab_size=10)
    assert completion.token_ids.tolist() == [0, 9]
    assert completion.logprobs.tolist() == [-1.0, -2.0]
    assert completion.weight_version.tolist() == [3, 4]


def test_settings_leave_no_sampling_default_to_the_models_files() -> None:
    fields = VllmSettings(model="org/name", max_model_len=64, kv_cache_gib=0.5).engine_args()
    assert (fields["logprobs_mode"], fields["generation_config"]) == ("processed_logprobs", "vllm")
    assert fields["kv_cache_memory_bytes"] == 2**29
    assert "enable_lora" not in fields
    assert (fields["max_num_seqs"], fields["tensor_parallel_size"], fields["data_parallel_size"]) == (256, 1, 1)
    if not torch.cuda.is_available():  # prompts are read whole, however long
        assert (fields["enable_chunked_prefill"], fields["max_num_batched_tokens"] >= 64) == (False, True)


def test_the_smallest_settings_and_every_rank_that_vllm_knows_are_taken() -> None:
    least = VllmSettings(model="m", max_model_len=2, max_num_seqs=1, max_loras=1, gpu_memory_utilization=1.0)
    assert least.engine_args()["max_model_len"] == 2
    assert VllmSettings(model="m", max_model_len=2).max_loras == 2
    for rank in (0, 1, 8, 16, 32, 64, 128, 256, 320, 512):
        assert dataclasses.replace(least, max_lora_rank=rank).max_lora_rank == rank


def test_gpus_are_passed_on_as_vllm_numbers_them_and_otherwise_left_to_it() -> None:
    settings = VllmSettings(
        model="org/name", max_model_len=64, tensor_parallel_size=2, data_parallel_size=2, device_ids=(4, 5, 6, 7)
    )
    fields = settings.engine_args()
    assert (fields["tensor_parallel_size"], fields["data_parallel_size"]) == (2, 2)
    assert fields["device_ids"] == [4, 5, 6, 7]
    assert "device_ids" not in VllmSettings(model="org/name", max_model_len=64).engine_args()


def variables_of(**changes: Any) -> set[str]:
    """What decides how vLLM's processes run, besides the one variable that is always there."""
    variables = VllmSettings(model="org/name", max_model_len=64, **changes).environment()
    assert variables.pop("VLLM_NO_USAGE_STATS") == "1"
    return set(variables)


def test_on_a_processor_one_process_schedules_and_computes_unless_the_user_binds_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    on_gpus = torch.cuda.is_available()  # where none of this is needed
    one = {"VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"}
    assert variables_of() == (set() if on_gpus else one)
    uncompiled = {"TORCHDYNAMO_DISABLE"}
    assert variables_of(enforce_eager=True) == (set() if on_gpus else uncompiled | one)
    two = variables_of(enforce_eager=True, tensor_parallel_size=2)
    assert two == (set() if on_gpus else uncompiled | {"VLLM_CPU_OMP_THREADS_BIND"})
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert variables_of() == set()


def test_settings_with_a_rank_make_room_for_one_adapter_more_than_are_in_work() -> None:
    fields = VllmSettings(model="org/name", max_model_len=64, max_lora_rank=16, max_loras=3).engine_args()
    assert (fields["enable_lora"], fields["max_lora_rank"], fields["max_loras"]) == (True, 16, 3)
    assert fields["max_cpu_loras"] == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 1},
        {"max_num_seqs": 0},
        {"tensor_parallel_size": 0},
        {"data_parallel_size": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.1},
        {"kv_cache_gib": 0.0},
        {"max_lora_rank": 12},
        {"max_loras": 0},
        {"device_ids": (0, 1)},
        {"device_ids": (1, 1), "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        VllmSettings(**{"model": "org/name", "max_model_len": 64, **changes})  # type: ignore[arg-type]


def test_an_engine_without_vllm_names_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"gspo-gym\[vllm\]"):
        asyncio.run(VllmEngine.start(VllmSettings(model="org/name", max_model_len=64)))
