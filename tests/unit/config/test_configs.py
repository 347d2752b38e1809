"""Every committed config is read, and built into live objects, with a tiny stand-in for a hub model."""

import asyncio
import tomllib
from pathlib import Path

import pytest

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.first_run import first_run
from gspo_gym.config.run_config import RunConfig, load_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))  # the recipes have tests of their own
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))


def stand_in(path):
    """Overrides that keep everything but the download, the length of the context, and a run as a teacher."""
    values = tomllib.loads(path.read_text())
    own = values["model"]["base"]
    base = own if own.startswith("tiny:") else "tiny:qwen3-64"
    teacher = [f"distillation.teacher={base}"] if "distillation" in values else []
    return teacher if base == own else [f"model.base={base}", "rollout.max_model_len=4096", *teacher]


def test_there_are_configs_for_each_bundled_environment_and_a_hub_model():
    configs = [load_config(path) for path in CONFIGS]
    assert {config.rollout.env_name for config in configs} == {
        "CodeRepair",
        "Countdown",
        "Dataset",
        "FrozenLake",
        "GuessNumber",
        "Homestead",
        "SqlAnalyst",
        "SupportDesk",
        "TicTacToe",
        "Wordle",
    }
    assert "Qwen/Qwen3-0.6B" in {config.model.base for config in configs}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_is_built_as_it_says(path):
    config = load_config(path, stand_in(path))
    policy = build.build_policy(config)
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    everything = sum(p.numel() for p in policy.model.parameters())
    assert (trainable < everything) == (config.model.trainer_mode == "lora")
    player = asyncio.run(rollouts.build_player(config, policy))
    try:
        assert player.engine.capabilities.max_model_len == config.rollout.max_model_len
        assert (asyncio.run(rollouts.build_warmup(config, player)) is None) == (config.warmup is None)
        build.build_learner(config, policy)
        plan = build.build_plan(config)
    finally:
        asyncio.run(player.engine.close())
    assert plan.size.groups_per_iteration * plan.size.group_size == config.rollout.episodes_per_batch


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_says_what_it_shows_and_on_what_hardware(path):
    header = path.read_text().split("\n\n")[0]
    for word in ("What it shows:", "Hardware:", "Expected", "Source:"):
        assert word in header, f"{path.name}: the header lacks {word!r}"


@pytest.mark.parametrize("path", [*CONFIGS, *RECIPES], ids=lambda path: path.stem)
def test_a_config_that_one_begins_with_records_what_the_learner_saw(path):
    assert load_config(path).run.log_tokens_every_n_iters == 10


def test_nothing_is_recorded_of_tokens_unless_a_config_says_so():
    values = first_run("GuessNumber", model="tiny:qwen3-64", label="test").sections
    assert values["run"].pop("log_tokens_every_n_iters") == 10
    assert RunConfig.from_dict(values).run.log_tokens_every_n_iters == 0
