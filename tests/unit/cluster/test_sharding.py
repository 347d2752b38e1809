"""A model that is shared out over real processes on loopback learns what it learns in one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from gspo_gym.cluster.checkpoints import export_policy, restore
from gspo_gym.cluster.sharding import shard_model
from gspo_gym.errors import CheckpointError, ConfigError
from gspo_gym.policy.load import Policy, load_policy
from gspo_gym.policy.tiny import tiny_tokenizer
from tests.support import learner_ranks
from tests.support.learner_ranks import CASES, REPEATED, SAVED, Case, build_learner, build_model, start_ranks, train
from tests.support.thread_ranks import largest_difference, weights_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders in which two and three ranks left the weights and reports of each case."""
    folder = tmp_path_factory.mktemp("trained")
    start_ranks(2, folder / "two", "train_cases", "repeat_a_case")
    start_ranks(3, folder / "three", "train_cases")
    return {2: folder / "two", 3: folder / "three"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders in which two ranks left a checkpoint and what else they found, and three what they read of it."""
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(2, folder / "two", "save", "count_bytes", "compute_in_16_bits", "take_the_plan_of_transformers")
    start_ranks(3, folder / "three", "resume")
    return {2: folder / "two", 3: folder / "three"}


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_two_and_three_ranks_learn_what_one_process_does(trained, name):
    model = build_model(CASES[name])
    before = weights_of(model)
    expected = train(build_learner(CASES[name], model), CASES[name].num_updates)
    weights = weights_of(model)
    assert largest_difference(before, weights) > 1e-2
    for world_size, folder in trained.items():
        assert largest_difference(load_file(folder / f"{name}.safetensors"), weights) <= 5e-6
        reports = [read_json(folder / f"{name}.rank{rank}.json") for rank in range(world_size)]
        assert all(each == reports[0] for each in reports)
        for found, wanted in zip(reports[0], expected, strict=True):
            changing = {"batch/padding_fraction"}  # of other micro-batches
            assert {k: v for k, v in found.items() if k not in changing} == pytest.approx(
                {k: v for k, v in wanted.items() if k not in changing}, rel=1e-2, abs=1e-3
            )


def test_as_many_ranks_learn_the_same_bit_for_bit_again(trained):
    first, second = (load_file(trained[2] / f"{name}.safetensors") for name in (REPEATED, "repeated"))
    assert largest_difference(first, second) == 0.0


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


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit_with_one_two_and_three(folders):
    two = folders[2]
    saved, saved_learner = load_file(two / "saved.safetensors"), load_file(two / "saved_learner.safetensors")
    for file, expected in (("saved", saved), ("saved_learner", saved_learner)):
        assert largest_difference(load_file(folders[3] / f"{file}.safetensors"), expected) == 0.0
    assert largest_difference(load_file(two / "resumed.safetensors"), load_file(two / "went_on.safetensors")) == 0.0
    model = build_model(CASES[SAVED])
    learner = build_learner(CASES[SAVED], model)
    assert restore(two / "checkpoints" / "step_000002", model=model, learner=learner) == {"seen": 2}
    assert largest_difference(weights_of(model), saved) == 0.0
    assert largest_difference(learner.tensors(), saved_learner) == 0.0
    train(learner, 2, first=2)
    assert largest_difference(weights_of(model), load_file(two / "went_on.safetensors")) <= 5e-6


def test_a_checkpoint_of_ranks_has_no_pickle_and_is_verified(folders, tmp_path):
    folder = folders[2] / "checkpoints" / "step_000002"
    files = sorted(path.name for path in folder.iterdir())
    ranks = [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert files == ["manifest.json", *ranks, "state.json"]
    assert not any((folder / name).read_bytes().startswith(b"\x80") for name in files)
    assert [path.name for path in folder.parent.iterdir()] == ["step_000002"], "no draft is left"
    torn = tmp_path / "step_000002"
    torn.mkdir()
    for name in files:
        (torn / name).write_bytes((folder / name).read_bytes()[: -1 if name == ranks[1] else None])
    model = build_model(CASES[SAVED])
    with pytest.raises(CheckpointError, match=ranks[1]):
        restore(torn, model=model, learner=build_learner(CASES[SAVED], model))


def test_a_checkpoint_of_ranks_becomes_a_policy(folders, tmp_path):
    folder = folders[2] / "checkpoints" / "step_000002"
    export_policy(folder, Policy(build_model(CASES[SAVED]), tiny_tokenizer(), "here"), tmp_path / "policy")
    exported = weights_of(load_policy(str(tmp_path / "policy")).model)
    assert largest_difference(exported, load_file(folders[2] / "saved.safetensors")) == 0.0
    wider = build_model(Case(66))
    with pytest.raises(CheckpointError, match=r"expected \[66, 32\], got \[61, 32\]"):
        export_policy(folder, Policy(wider, tiny_tokenizer(), "here"), tmp_path / "wider")
    other = build_model(CASES["untied_even"])
    with pytest.raises(CheckpointError, match=r"other parameters: \['lm_head.weight'\]"):
        export_policy(folder, Policy(other, tiny_tokenizer(), "here"), tmp_path / "other")


def test_transformers_own_plan_is_still_stale_where_ranks_do_not_divide_a_tied_vocabulary(folders):
    """If this fails, transformers has mended it: the reason for `shard_model` to wrap the layers itself is gone."""
    errors = read_json(folders[2] / "errors0.json")
    assert max(*errors["60"], errors["61"][0]) < 1e-4
    assert errors["61"][1] > 0.01


def test_sharing_out_needs_a_process_group():
    with pytest.raises(ConfigError, match="init_process_group"):
        shard_model(torch.nn.Linear(2, 2))
