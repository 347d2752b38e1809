"""A model that is shared out over real processes on loopback learns what it learns in one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_gym.cluster.sharding import shard_model
from gspo_gym.errors import ConfigError
from tests.support import learner_ranks
from tests.support.learner_ranks import (
    CASES,
    NARROW,
    REPEATED,
    SAVED,
    TOGETHER,
    build_learner,
    build_model,
    narrowed,
    score,
    start_ranks,
    train,
)
from tests.support.thread_ranks import largest_difference, weights_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders in which one, two, three and four ranks left weights, reports, a checkpoint and what else they found."""
    folder = tmp_path_factory.mktemp("ranks")
    save_alone(folder / "one")
    start_ranks(2, folder / "two", *WORKS_OF_TWO)
    start_ranks(3, folder / "three", "train_cases", "go_on_from_two")
    start_ranks(4, folder / "four", "train_together", "train_four_together")
    return {number: folder / name for number, name in enumerate(("one", "two", "three", "four"), 1)}


WORKS_OF_TWO = (
    "train_cases",
    "repeat_a_case",
    "save",
    "go_on_from_one",
    "count_bytes",
    "compute_in_16_bits",
    "take_the_plan_of_transformers",
    "train_together",
    "score_together",
)


def save_alone(folder):
    """Leave what one process learned in two updates as `learner_ranks.save` does."""
    model = build_model(CASES[SAVED])
    learner = build_learner(CASES[SAVED], model)
    train(learner, 2)
    for name in ("policy", "resume"):
        (folder / name).mkdir(parents=True)
    save_file(weights_of(model), folder / "policy" / "model.safetensors")
    save_file(
        {name: tensor.clone() for name, tensor in learner.tensors().items()}, folder / "saved_learner.safetensors"
    )
    (folder / "counters.json").write_text(json.dumps(learner.counters()), encoding="utf-8")
    learner.copy_state()(folder / "resume")


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_two_and_three_ranks_learn_what_one_process_does(folders, name):
    model = build_model(CASES[name])
    before = weights_of(model)
    expected = train(build_learner(CASES[name], model), CASES[name].num_updates)
    weights = weights_of(model)
    assert largest_difference(before, weights) > 1e-2
    for world_size in (2, 3):
        folder = folders[world_size]
        assert largest_difference(load_file(folder / f"{name}.safetensors"), weights) <= 5e-6
        reports = [read_json(folder / f"{name}.rank{rank}.json") for rank in range(world_size)]
        assert all(each == reports[0] for each in reports)
        for found, wanted in zip(reports[0], expected, strict=True):
            changing = {"batch/padding_fraction"}  # of other micro-batches
            assert {k: v for k, v in found.items() if k not in changing} == pytest.approx(
                {k: v for k, v in wanted.items() if k not in changing}, rel=1e-2, abs=1e-3
            )


def test_as_many_ranks_learn_the_same_bit_for_bit_again(folders):
    first, second = (load_file(folders[2] / f"{name}.safetensors") for name in (REPEATED, "repeated"))
    assert largest_difference(first, second) == 0.0


@pytest.mark.parametrize("name", TOGETHER)
def test_ranks_that_compute_rows_together_learn_what_one_process_does(folders, name):
    model = build_model(TOGETHER[name])
    before = weights_of(model)
    train(build_learner(TOGETHER[name], model), TOGETHER[name].num_updates)
    weights = weights_of(model)
    assert largest_difference(before, weights) > 3e-3  # a step of AdamW moves a weight by up to 1e-3
    files = [folder / f"{name}.safetensors" for folder in (folders[2], folders[4])]
    if name == "rows":  # by four ranks, of which two have the same head of keys
        files.append(folders[4] / "rows_by_four.safetensors")
    for file in files:
        assert largest_difference(load_file(file), weights) <= 5e-6
        reports = [read_json(path) for path in file.parent.glob(f"{file.stem}.rank?.json")]
        assert len(reports) in (2, 4)
        assert all(each == reports[0] for each in reports)


@pytest.mark.parametrize("name", TOGETHER)
def test_logprobs_and_gradients_of_rows_that_ranks_compute_together_are_those_of_one(folders, name):
    expected = score(TOGETHER[name], build_model(TOGETHER[name], dtype=torch.float64))
    found = load_file(folders[2] / f"{name}.scores.safetensors")
    assert largest_difference(found, expected) <= 1e-12
    assert sum(float(value.abs().max()) > 1e-2 for value in expected.values()) > 10


def test_what_ranks_cannot_compute_together_is_refused_by_all_of_them_with_a_reason(folders):
    refused = [read_json(folders[2] / f"refused{rank}.json") for rank in range(2)]
    assert refused[0] == refused[1]
    wanted = (
        "Qwen3Model cannot be computed by 2 ranks together: the dropout of its adapter draws by row; set 1",
        "expected a divisor of 2 ranks, got 3",
        "MistralModel cannot be computed by 2 ranks together: it failed with a sliding window; set 1",
        "the load of this model's routers is counted by row, and ranks would have parts of rows; set 1",
        "Qwen3Model cannot be computed by 2 ranks together: its 3 heads cannot be shared out evenly; set 1",
    )
    assert refused[0] == [f"learner.sequence_parallel: {text}" for text in wanted]


def test_each_of_two_ranks_holds_half(folders):
    model = build_model(CASES[SAVED])
    alone = learner_ranks.bytes_of_a_step(model, build_learner(CASES[SAVED], model))
    for rank in range(2):
        assert read_json(folders[2] / f"bytes{rank}.json") <= 0.55 * alone


def test_weights_are_gathered_in_16_bits_and_kept_in_32(folders):
    model = build_model(CASES[SAVED])
    exact = train(build_learner(CASES[SAVED], model), 1)[0]["optim/grad_norm"]
    (mixed, adapter), dtypes = read_json(folders[2] / "norms0.json")
    assert dtypes == ["torch.float32"]
    assert mixed == pytest.approx(exact, rel=0.1)  # 8 bits of mantissa, two layers
    assert mixed != exact
    assert adapter > 0
    assert read_json(folders[2] / "norms1.json") == read_json(folders[2] / "norms0.json")


def test_two_ranks_that_compute_in_16_bits_have_the_gradients_of_one_process_with_copies_in_16_bits(folders):
    found = load_file(folders[2] / "narrow0")  # of the same rows on both ranks, so that gradients are twice as large
    assert largest_difference(found, load_file(folders[2] / "narrow1")) == 0.0
    exact = score(NARROW, build_model(NARROW))
    narrow = {
        name.replace("parametrizations.", "").removesuffix(".original"): value
        for name, value in score(NARROW, narrowed(build_model(NARROW))).items()
    }
    assert found.keys() == narrow.keys() == exact.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        value = value if name in ("logprobs", "entropy") else value / 2
        apart, rounding = ((other - narrow[name]).norm() / narrow[name].norm() for other in (value, exact[name]))
        assert apart < 0.05 * rounding  # it was 0, and `rounding` 0.02


def test_what_two_ranks_saved_goes_on_bit_for_bit_with_one_two_and_three(folders):
    two = folders[2]
    files = [f"learner-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert sorted(path.name for path in (two / "resume").iterdir()) == files
    held = [sum(load_file(two / "resume" / name)[key].numel() for key in KEYS) for name in files]
    assert held == [32 * (31 + 24), 32 * (30 + 24)]  # a tensor of 61 rows and one of 48, of 32 numbers each
    saved, saved_learner = load_file(two / "policy/model.safetensors"), load_file(two / "saved_learner.safetensors")
    assert largest_difference(load_file(folders[3] / "weights_of_two.safetensors"), saved) == 0.0
    assert largest_difference(load_file(folders[3] / "learner_of_two.safetensors"), saved_learner) == 0.0
    assert largest_difference(load_file(two / "resumed.safetensors"), load_file(two / "went_on.safetensors")) == 0.0
    learner = learner_ranks.go_on(two)
    model = learner_ranks._WENT_ON.pop()
    assert largest_difference(weights_of(model), saved) == 0.0
    assert largest_difference(learner.tensors(), saved_learner) == 0.0
    train(learner, 2, first=2)
    assert largest_difference(weights_of(model), load_file(two / "went_on.safetensors")) <= 5e-6


KEYS = ("optimizer.exp_avg.model.embed_tokens.weight", "optimizer.exp_avg.model.layers.1.mlp.up_proj.weight")


def test_what_one_process_saved_goes_on_bit_for_bit_with_two_ranks(folders):
    one, two = folders[1], folders[2]
    saved, saved_learner = load_file(one / "policy/model.safetensors"), load_file(one / "saved_learner.safetensors")
    assert largest_difference(load_file(two / "weights_of_one.safetensors"), saved) == 0.0
    assert largest_difference(load_file(two / "learner_of_one.safetensors"), saved_learner) == 0.0


def test_transformers_own_plan_is_still_stale_where_ranks_do_not_divide_a_tied_vocabulary(folders):
    """If this fails, transformers has mended it: the reason for `shard_model` to wrap the layers itself is gone."""
    errors = read_json(folders[2] / "errors0.json")
    assert max(*errors["60"], errors["61"][0]) < 1e-4
    assert errors["61"][1] > 0.01


def test_sharing_out_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        shard_model(torch.nn.Linear(2, 2))
