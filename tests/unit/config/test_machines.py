"""What a configuration demands of machines: parts, memory, and what does not fit, without any machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.cli.cluster import shape_of, table
from gspo_gym.cli.main import main
from gspo_gym.cluster.memory import SHAPES, Learning, ModelShape, rank_memory
from gspo_gym.cluster.placement import GIB, Offer
from gspo_gym.config.machines import (
    Machines,
    Paper,
    check,
    describe,
    learning_of,
    machines_of,
    parse_nodes,
    with_all_gpus,
)
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.policy.tiny import build_tiny

Make = Callable[[dict[str, Any]], RunConfig]
TINY = ModelShape.from_config(build_tiny("qwen3-64", 0).config.to_dict())


def topology(kind: str, for_vllm: int, for_training: int, **more: int) -> dict[str, Any]:
    return {"type": kind, "gpus_for_vllm": for_vllm, "gpus_for_training": for_training, **more}


def cluster(gpu_count: int, nodes: int, *counts: int, **more: int) -> dict[str, Any]:
    return {"compute": {"gpu_count": gpu_count, "nodes": nodes}, "topology": topology("cluster", *counts, **more)}


def run_check(config: RunConfig, *nodes: str, shape: ModelShape = TINY) -> Paper:
    return check(config, shape, parse_nodes(nodes, machines_of(config)))


def parts_of(paper: Paper) -> list[tuple[str, int, int]]:
    return [(part.role, part.count, part.each.gpus) for part in paper.parts]


# A configuration, its parts (role, count, GPUs of each), and the GPUs of all places by node.
PLACED: dict[str, tuple[dict[str, Any], list[tuple[str, int, int]], dict[str, int]]] = {
    "one process": ({}, [("learner", 1, 0)], {"node-0": 0}),
    "one GPU": ({"compute": {"gpu_count": 1}}, [("learner", 1, 1)], {"node-0": 1}),
    "vLLM on the learner's": (
        {"compute": {"gpu_count": 4}, "vllm": {"tensor_parallel_size": 2}},
        [("learner and replica", 2, 2)],
        {"node-0": 4},
    ),
    "a split of one machine": (
        {"compute": {"gpu_count": 6}, "topology": topology("single_node_split", 4, 2, tensor_parallel=2)},
        [("learner", 2, 1), ("replica", 1, 4)],
        {"node-0": 6},
    ),
    "two machines": (
        cluster(16, 2, 8, 8, tensor_parallel=2),
        [("learner", 8, 1), ("replica", 4, 2)],
        {"node-0": 8, "node-1": 8},
    ),
    "the same GPUs, and more that learn": (
        {"compute": {"gpu_count": 6, "nodes": 2}, "topology": topology("colocated", 4, 6, tensor_parallel=2)},
        [("learner and replica", 2, 2), ("learner", 2, 1)],
        {"node-0": 3, "node-1": 3},
    ),
    "with a reference": (
        {
            **cluster(8, 1, 4, 3, gpus_for_ref=1),
            "reference": {"placement": "dedicated"},
            "loss": {"kl_coef": 0.1},
        },
        [("learner", 3, 1), ("replica", 4, 1), ("reference", 1, 1)],
        {"node-0": 8},
    ),
}


@pytest.mark.parametrize("case", PLACED)
def test_each_part_of_a_configuration_has_its_gpus(case: str, make: Make) -> None:
    changes, parts, gpus = PLACED[case]
    paper = run_check(make(changes))
    assert parts_of(paper) == parts
    assert paper.problems == ()
    taken = {name: sum(len(place.gpus) for place in paper.places if place.node == name) for name in gpus}
    assert taken == gpus


def test_512_gpus_are_placed_by_the_numbers_alone(make: Make) -> None:
    changes = {**cluster(512, 64, 256, 256, tensor_parallel=4), "compute.gpu_type": "H100"}
    # 16,384 tokens x 36 layers x (6 x 4096 + 4 x 4096 + 4 x 1024 + 4 x 12,288 and some) x 4 bytes
    (problem,) = run_check(make(changes), shape=SHAPES["Qwen3-8B"]).problems
    assert "(activations 207.7 GiB, gathered" in problem
    assert problem.endswith("; it fits with model.gradient_checkpointing = true")
    config = make({**changes, "model.gradient_checkpointing": True})
    paper = run_check(config, shape=SHAPES["Qwen3-8B"])
    assert parts_of(paper) == [("learner", 256, 1), ("replica", 64, 4)]
    assert len({place.node for place in paper.places}) == 64
    assert paper.problems == ()
    assert paper.replica is not None
    # 72 GiB of 80 are vLLM's; a token takes 2 x 36 layers x 2 of 8 heads x 128 numbers of 4 bytes.
    assert paper.replica.token == 2 * 36 * 2 * 128 * 4
    assert paper.replica.cache == int(0.9 * 80 * GIB) - paper.replica.weights
    assert paper.rank == rank_memory(SHAPES["Qwen3-8B"], learning_of(config), 256)
    assert paper.refused == ()


@pytest.mark.parametrize(
    ("changes", "nodes", "shape", "problems"),
    [
        (
            cluster(32, 8, 16, 16, tensor_parallel=8),
            ("8x4::48",),
            TINY,
            [
                "no room for the run: replica: 2 x (8 GPUs, 8 cores), each on one node: no node has that: 4 GPUs more "
                "needed on node-0 with 4 GPUs, 48 cores free. Free: 4 GPUs, 48 cores each on node-0, node-1, node-2, "
                "node-3 and 4 more"
            ],
        ),
        (
            {"compute": {"gpu_count": 6}, "topology": topology("single_node_split", 4, 2)},
            ("2x4",),  # eight GPUs, but four of one machine
            TINY,
            ["no room for the run: 6 GPUs are needed in all and 4 GPUs free: 2 GPUs missing. Free: 4 GPUs on node-0"],
        ),
        (
            {**cluster(9, 1, 4, 4, gpus_for_ref=1), "reference": {"placement": "dedicated"}, "loss": {"kl_coef": 0.1}},
            ("1x9:80GiB",),
            SHAPES["Llama-3.3-70B-Instruct"],
            [
                "a learner rank: ",
                "a replica's GPU: its part of the weights takes 262.8 GiB, which leaves room for 0",
                "the reference: 262.8 GiB of weights a GPU, and 80.0 GiB are there",
            ],
        ),
        (
            {**cluster(0, 2, 1, 3), "rollout.engine": "local"},
            ("2x0::8:1GiB",),  # a rank takes half a GiB, and a replica 1 GiB for keys and values
            TINY,
            ["no room for the run: "],
        ),
    ],
)
def test_what_does_not_fit_is_said_with_what_is_missing(
    changes: dict[str, Any], nodes: tuple[str, ...], shape: ModelShape, problems: list[str], make: Make
) -> None:
    paper = run_check(make(changes), *nodes, shape=shape)
    assert len(paper.problems) == len(problems)
    assert all(found.startswith(begins) for found, begins in zip(paper.problems, problems, strict=True))


def test_without_compute_a_gpu_is_taken_if_there_is_one(make: Make) -> None:
    assert parts_of(run_check(make({}), "1x1:80GiB")) == [("learner", 1, 1)]
    assert parts_of(run_check(make({"compute": {"gpu_count": 0}}), "1x1:80GiB")) == [("learner", 1, 0)]


@pytest.mark.parametrize(("num_gpus", "num_sample", "num_learn"), [(2, 1, 1), (3, 2, 1), (4, 2, 2), (8, 4, 4)])
def test_what_says_nothing_of_machines_takes_all_gpus_half_of_them_to_learn(
    num_gpus: int, num_sample: int, num_learn: int, make: Make
) -> None:
    config, line = with_all_gpus(make({}), num_gpus)
    counted_config, same_line = with_all_gpus(make({"compute": {"gpu_count": num_gpus}}), 0)
    assert (counted_config, same_line) == (config, line)
    assert line is not None
    assert line.startswith(f"{num_gpus} GPUs: {num_sample} sample and {num_learn} learn")
    paper = run_check(config, f"1x{num_gpus}:80GiB")
    assert parts_of(paper) == [("learner", num_learn, 1), ("replica", num_sample, 1)]
    assert sorted(gpu for place in paper.places for gpu in place.gpus) == list(range(num_gpus))
    assert (paper.problems, paper.refused) == ((), ())


@pytest.mark.parametrize(
    ("changes", "num_gpus", "reason"),
    [
        ({}, 1, None),
        ({"compute": {"gpu_count": 1}}, 4, None),
        ({"vllm": {"tensor_parallel_size": 2}}, 4, None),  # which takes two of them
        ({"model.trainer_mode": "qlora"}, 4, "cannot share quantized weights"),
        ({"optimizer.kind": "adamw_8bit"}, 4, "cannot share moments in 8 bits"),
    ],
)
def test_what_says_which_gpus_it_takes_or_cannot_be_spread_stays_as_it_is(
    changes: dict[str, Any], num_gpus: int, reason: str | None, make: Make
) -> None:
    config = make(changes)
    same, line = with_all_gpus(config, num_gpus)
    assert same is config
    assert (line is None) == (reason is None)
    assert reason is None or (line is not None and line.startswith("one of 4 GPUs is used") and reason in line)


def test_processes_take_memory_of_their_node_and_share_its_cores(make: Make) -> None:
    config = make({**cluster(0, 2, 2, 2), "rollout.engine": "local"})
    paper = run_check(config, "2x0::1:8GiB")
    assert [(part.role, part.count) for part in paper.parts] == [("learner", 2), ("replica", 2), ("driver", 1)]
    assert paper.parts[0].each.memory_bytes == paper.rank.total
    assert paper.parts[1].each.memory_bytes == TINY.num_parameters * 4 + GIB
    assert paper.parts[2].each.memory_bytes == TINY.num_parameters * 4  # the driver's, which attests the replicas
    assert paper.problems == ()


def test_where_the_driver_samples_there_is_no_replica_and_its_model_is_counted_once(make: Make) -> None:
    model = TINY.num_parameters * 4
    alone = run_check(make({**cluster(0, 1, 1, 1), "rollout.engine": "local"}), "1x0::2:8GiB")
    [learner] = alone.parts  # the learner's own model samples
    assert (learner.role, learner.each.memory_bytes) == ("learner", alone.rank.total + GIB)
    beside = run_check(make({**cluster(0, 1, 1, 2), "rollout.engine": "local"}), "1x0::2:8GiB")
    assert [(part.role, part.count, part.each.memory_bytes) for part in beside.parts] == [
        ("learner", 2, beside.rank.total),
        ("driver", 1, model + GIB),
    ]
    ahead = {"training.max_staleness": 1, "correction.old_logprobs": "rollout"}
    copied = run_check(make({**cluster(0, 1, 1, 2), "rollout.engine": "local", **ahead}), "1x0::2:8GiB")
    assert copied.parts[1].each.memory_bytes == 2 * model + GIB
    for paper, says in (
        (alone, "the engine, in the driver's process, takes 0 MiB of weights"),
        (beside, "the engine, "),
    ):
        assert any(line.startswith(says) for line in describe(paper, make({}), Machines(())))


def test_vllms_processes_are_counted_by_server(make: Make) -> None:
    paper = run_check(make(cluster(0, 1, 8, 1, tensor_parallel=2)))
    assert [(part.role, part.count) for part in paper.parts] == [("learner", 1), ("replica", 4)]
    assert paper.refused == ()


def test_memory_is_asked_for_what_the_configuration_trains(make: Make) -> None:
    assert learning_of(make({"loss": {"kl_coef": 0.1}, "optimizer.kind": "adamw_8bit"})) == Learning(
        has_8bit_moments=True, keeps_reference=True
    )
    # The base is the reference of an adapter, and no copy is kept. A row of more tokens is a micro-batch by itself.
    changes = {"model.dtype": "bfloat16", "model.gradient_checkpointing": True, "training.lora": {"r": 4}}
    changes |= {"training.max_tokens_per_microbatch": 64}
    config = make({"loss": {"kl_coef": 0.1}, "model.trainer_mode": "lora", **changes})
    assert learning_of(config) == Learning(
        trained="lora",
        dtype="bfloat16",
        lora_rank=4,
        gradient_checkpointing=True,
        num_tokens=config.rollout.max_model_len,
    )


@pytest.mark.parametrize(
    ("vllm", "cache"),
    [
        ({}, int(0.4 * 80 * GIB) - 4 * TINY.num_parameters),  # beside the learner
        ({"gpu_memory_utilization": 0.25}, 20 * GIB - 4 * TINY.num_parameters),
        ({"kv_cache_gib": 3}, 3 * GIB),
    ],
)
def test_a_replica_has_the_memory_that_its_settings_say(vllm: dict[str, Any], cache: int, make: Make) -> None:
    config = make({"compute": {"gpu_count": 1, "gpu_type": "h100"}, "vllm": vllm})
    replica = run_check(config).replica
    assert replica is not None
    assert replica.cache == cache


def test_a_gpu_of_both_has_room_for_both_and_one_that_sleeps_gives_its_room_away(make: Make) -> None:
    shared: dict[str, Any] = {"compute": {"gpu_count": 1, "gpu_type": "H100"}, "vllm": {"gpu_memory_utilization": 0.5}}
    # 1.7 billion weights of 16 bytes are 25.6 GiB, with activations more than the 32 GiB that vLLM leaves of 72.
    (problem,) = run_check(make(shared), shape=SHAPES["Qwen3-1.7B"]).problems
    assert "32.0 GiB of 80.0 GiB are there, of which vLLM on the same GPU takes 40.0 GiB" in problem
    shared["vllm"] = {"gpu_memory_utilization": 0.5, "sleep_while_learning": True}
    shared["model.gradient_checkpointing"] = True
    assert run_check(make(shared), shape=SHAPES["Qwen3-1.7B"]).problems == ()


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8x8:80", "8x8:80GB", "-1x8", "8x8:80GiB:96:1TiB"])
def test_machines_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes: expected NODESxGPUS"):
        parse_nodes([text], Machines(()))


def test_machines_are_counted_and_the_smallest_gpu_is_the_measure() -> None:
    assert parse_nodes(["1x2:80GiB:96:1.5GiB", "2x1:40GiB:8:1GiB"], Machines(())) == Machines(
        (Offer("node-0", (0, 1), 96, 3 * 2**29), Offer("node-1", (0,), 8, GIB), Offer("node-2", (0,), 8, GIB)), 40 * GIB
    )
    with pytest.raises(ConfigError, match="for all nodes or for none"):
        parse_nodes(["1x8:80GiB", "1x8"], Machines(()))


def test_the_command_prints_places_and_memory_and_its_status_says_whether_all_fits(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(make(cluster(16, 2, 8, 8, tensor_parallel=2)).to_toml())
    assert main(["cluster", "check", str(file), "--nodes", "2x8:80GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        f"FITS: {file}",
        "nodes: 2, with 16 GPUs of 80.0 GiB in all",
        "learner: 8 x 1 GPU, 1 core on node-0 (GPUs 0-7)",
        "replica: 4 x 2 GPUs, 2 cores on node-1 (GPUs 0-7)",
    ]
    begins = ("a learner rank takes ", "a replica takes on each GPU ")
    assert all(line.startswith(begin) for line, begin in zip(lines[4:], begins, strict=True))
    two_kinds = ["--nodes", "1x8:80GiB", "--nodes", "2x4:40GiB"]
    assert main(["cluster", "check", str(file), *two_kinds, "topology.tensor_parallel=4"]) == 0
    assert "replica: 2 x 4 GPUs, 4 cores on node-1 (GPUs 0-3), node-2 (GPUs 0-3)" in capsys.readouterr().out
    assert main(["cluster", "check", str(file), "--nodes", "1x8:80GiB", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["problems"] == [
        "no room for the run: 16 GPUs are needed in all and 8 GPUs free: 8 GPUs missing. Free: 8 GPUs on node-0"
    ]
    assert told["rank"]["total"] == sum(size for name, size in told["rank"].items() if name != "total")
    assert told["parts"][1] == {"role": "replica", "count": 4, "gpus": 2, "cores": 2, "memory_bytes": 0}


def test_the_command_says_what_becomes_of_gpus_of_which_the_file_says_nothing(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(make({}).to_toml())
    assert main(["cluster", "check", str(file), "--nodes", "2x2:80GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "4 GPUs: 2 sample and 2 learn, as [topology] can say; compute.gpu_count = 1 takes one"
    assert lines[3:5] == [
        "learner: 2 x 1 GPU, 1 core on node-0 (GPUs 0-1)",
        "replica: 2 x 1 GPU, 1 core on node-1 (GPUs 0-1)",
    ]


def test_a_model_is_known_by_its_name_its_folder_or_as_a_tiny_one(make: Make, tmp_path: Path) -> None:
    assert shape_of(make({"model.base": "Qwen/Qwen3-8B"})) == SHAPES["Qwen3-8B"]
    assert shape_of(make({"model.base": "tiny:qwen3-64"})) == TINY
    (tmp_path / "config.json").write_text(json.dumps(build_tiny("qwen3-64", 0).config.to_dict()))
    assert shape_of(make({"model.base": str(tmp_path)})) == TINY
    with pytest.raises(ConfigError, match=r"model\.base: the sizes of 'nobody/nothing' are not known here"):
        shape_of(make({"model.base": "nobody/nothing"}))


def test_the_table_has_a_row_for_each_model_and_way_to_learn_on_each_number_of_gpus() -> None:
    rows = [line.split(" | ") for line in table().splitlines()[2:]]
    assert len(rows) == 3 * 2 * len(SHAPES)
    (row,) = [row for row in rows if row[:3] == ["| 8", "Qwen3-0.6B", "full"]]
    # A rank of four has a quarter of 596,049,920 weights of 4 bytes, gradients as large and moments twice as large.
    assert row[3:7] == ["4", "0.6", "0.6", "1.1"]


def test_a_line_says_what_a_gpu_holds(make: Make) -> None:
    config = make({**cluster(8, 1, 4, 4), "compute.gpu_type": "H100"})
    machines = machines_of(config)
    (line,) = [text for text in describe(check(config, TINY, machines), config, machines) if "a replica takes" in text]
    # 72 GiB for 115,584 weights of 4 bytes, and 512 bytes a token: 2 x 2 layers x 32 numbers of 4 bytes.
    num_tokens = (int(0.9 * 80 * GIB) - 115_584 * 4) // 512
    length = config.rollout.max_model_len
    assert f"{num_tokens} tokens, {num_tokens // length} episodes of {length} at once" in line
