"""A model of the hub at a branch, from a cache of the hub with two commits of one repository; no network."""

from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from small_run import small_run

from gspo_gym.config.build.trainer import build_policy
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import UnknownNameError
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.bases import adapter_base, check_base
from gspo_gym.policy.facts import facts_of
from gspo_gym.policy.load import (
    Policy,
    adapt_policy,
    for_other_programs,
    load_policy,
    load_skeleton,
    load_tokenizer,
    save_policy,
)
from gspo_gym.run.models import find_model

NAME = "someone/a-model"
MAIN, OTHER = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main branch has the seed 1, the branch `v2` the seed 2."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(cache))
    repository = cache / "models--someone--a-model"
    (repository / "refs").mkdir(parents=True)
    for branch, commit, seed in (("main", MAIN, 1), ("v2", OTHER, 2)):
        (repository / "refs" / branch).write_text(commit)
        save_policy(load_policy("tiny:qwen3-64", seed=seed), repository / "snapshots" / commit)


def weight(policy: Policy) -> torch.Tensor:
    found: torch.Tensor = policy.model.get_input_embeddings().weight.detach()
    return found


@pytest.mark.parametrize(("name", "seed"), [(NAME, 1), (f"{NAME}@v2", 2), (f"{NAME}@{OTHER}", 2)])
def test_a_revision_after_an_at_sign_is_the_one_that_is_loaded(name: str, seed: int) -> None:
    check_base(name)
    policy = load_policy(name)
    assert torch.equal(weight(policy), weight(load_policy("tiny:qwen3-64", seed=seed)))
    assert policy.base == name
    assert policy.model.name_or_path == NAME  # which PEFT and transformers know
    assert len(load_tokenizer(name)) == 263
    assert load_skeleton(name).model.config.hidden_size == 64
    assert facts_of(name).num_token_ids == 263
    assert find_model(name).base == name
    folder = for_other_programs(name)
    assert folder == name if name == NAME else (Path(folder) / "config.json").is_file()


def test_the_config_key_says_the_same() -> None:
    config = RunConfig.from_dict(small_run(model={"base": NAME, "revision": "v2"}))
    assert torch.equal(weight(build_policy(config)), weight(load_policy("tiny:qwen3-64", seed=2)))


def test_a_branch_that_is_not_there_is_an_error_and_not_the_main_one() -> None:
    with pytest.raises(UnknownNameError, match="a-model@v3"):
        load_policy(f"{NAME}@v3")


def test_an_adapter_names_the_revision_of_its_base_in_pefts_own_key(tmp_path: Path) -> None:
    settings = LoraSettings(r=2)
    policy = adapt_policy(load_policy(f"{NAME}@v2"), settings, seed=0)
    save_policy(policy, tmp_path / "first")
    assert adapter_base(tmp_path / "first") == f"{NAME}@v2"
    loaded = load_policy(str(tmp_path / "first"))
    assert torch.equal(weight(loaded), weight(load_policy("tiny:qwen3-64", seed=2)))
    # and again after it was trained on
    save_policy(adapt_policy(loaded, settings, seed=0), tmp_path / "second")
    assert adapter_base(tmp_path / "second") == f"{NAME}@v2"
