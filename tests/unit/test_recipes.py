"""Each recipe of `configs/recipes` is valid as it stands and trains: two iterations on a tiny model.

Only sizes, names and the place of work are replaced; every setting of the objective stays the recipe's own.
"""

import json
import math
import tomllib
from pathlib import Path

import gymnasium
import pytest

from gspo_gym import Reward, TextEnv
from gspo_gym.cli.config import Wanted, translate
from gspo_gym.cli.train import run_training
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.env.registry import register
from gspo_gym.run.records import read_metrics

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
ELSEWHERE = ("services", "compute", "topology", "vllm")  # machinery of several machines


class Letters(TextEnv):
    """Four turns of saying anything; the length of the text is an event and a reward, which random bytes earn, too."""

    reward_range = (0.0, 4.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turns_left = 4
        return "Say something.", {}

    def step(self, action):
        self.turns_left -= 1
        kind = len(action) % 3
        reward = Reward({"length": kind / 2}, events=(f"kind {kind}",))
        return "And now?", reward, self.turns_left == 0, False, {}


@pytest.fixture(autouse=True)
def letters():
    register("tests/Letters-v0", Letters)
    yield
    gymnasium.registry.pop("tests/Letters-v0")


def shrunk(path, folder):
    """The recipe on a tiny model and a game of four turns, with two groups a step and at most two steps a batch."""
    values = {name: keys for name, keys in tomllib.loads(path.read_text()).items() if name not in ELSEWHERE}
    group = values["training"]["group_size"]
    values["run"] = {**values.get("run", {}), "folder": str(folder)}
    values["model"]["base"] = "tiny:qwen3-moe-64" if "A3B" in values["model"]["base"] else "tiny:qwen3-64"
    values["rollout"] |= {"env_name": "Letters", "max_turns": 4, "max_output_tokens": 3}
    values["rollout"] |= {"max_model_len": 192, "episodes_per_batch": 2 * group}
    values["rollout"].pop("batches_per_step", None)
    values["training"] |= {"num_epochs": 1, "iterations_per_epoch": 2, "batch_size": group}
    values["training"] |= {"max_turns": 4, "gradient_accumulation_steps": 1}
    values["evaluation"] = {"seeds": "0:4"}
    if "norm_length" in values.get("loss", {}):
        values["loss"]["norm_length"] = 12
    values.pop("tracking", None)
    return RunConfig.from_dict(values, source=path.name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_valid_as_it_stands(path):
    assert load_config(path).model.label == tomllib.loads(path.read_text())["model"]["label"]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_on_a_tiny_model(path, tmp_path):
    config = shrunk(path, tmp_path)
    summary = run_training(config, console=None)
    assert (summary["status"], summary["steps"]) == ("completed", 2)
    metrics = read_metrics(config.run_folder)
    assert len(metrics) == 2
    trained = [line for line in metrics if line.get("batch/trained_tokens", 0) > 0]
    assert trained, "random bytes differ in length, so that there is something to compare"
    assert all(math.isfinite(line["loss/total"]) for line in trained)
    assert all(line["optim/num_steps"] >= 1 and line["optim/grad_norm"] > 0 for line in trained)


def settings_of(path):
    """What a recipe says about learning: everything but where it runs, on what, and how long."""
    values = load_config(path).model_dump(mode="json")
    kept = ("algorithm", "loss", "rewards", "advantages", "optimizer", "correction")
    return json.loads(json.dumps({name: values[name] for name in kept}))


# The tables of stateset-agents' guide, each with the model that its title asks for, and the length of the guide's run.
STATESET = {
    "small": {"model_name": "Qwen/Qwen3-0.6B", "num_generations": 4, "learning_rate": 1e-5, "lora_r": 8},
    "large": {
        "model_name": "Qwen/Qwen3-4B",
        "clip_range_left": 2e-4,
        "clip_range_right": 3e-4,
        "learning_rate": 5e-6,
        "gradient_checkpointing": True,
    },
    "moe": {
        "model_name": "Qwen/Qwen3-30B-A3B",
        "num_generations": 6,
        "clip_range_left": 2e-4,
        "clip_range_right": 3e-4,
        "learning_rate": 3e-6,
        "lora_r": 32,
    },
}


@pytest.mark.parametrize("size", STATESET)
def test_statesets_recipes_are_exactly_its_settings(size):
    """Every key of the translation, and nothing besides but what the learner's record is written for."""
    given = {**STATESET[size], "num_outer_iterations": 100}
    wanted = Wanted(env="SqlAnalyst", max_turns=4, label=f"stateset-{size}")
    translated = RunConfig.from_dict(translate("stateset", given, wanted).values).model_dump(mode="json")
    recipe = load_config(FOLDER / f"stateset_{size}.toml").model_dump(mode="json")
    recipe["run"]["log_tokens_every_n_iters"] = translated["run"]["log_tokens_every_n_iters"]
    assert recipe == translated
    rollout = recipe["rollout"]
    sampling = [rollout[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")]
    assert sampling == [0.7, 0.9, 50, 1.1]  # GSPOConfig of 0.69, which its entry point gives the agent


@pytest.mark.parametrize(
    ("stem", "system", "given"),
    [
        ("agilerl_gspo", "agilerl", {}),
        (
            "roll_gspo",
            "roll",
            {
                "adv_estimator": "reinforce",
                "importance_sampling": "seq",
                "use_kl_loss": True,
                "kl_loss_coef": 0.001,
                "loss_agg_mode": "seq-mean-token-sum",
                "whiten_advantages": True,
                "advantage_clip": 2.0,
                "dual_clip_loss": True,
                "reward_clip": 10,
                "top_p": 1.0,
                "top_k": 0,
            },
        ),
    ],
)
def test_recipe_is_what_the_translation_of_its_origin_gives(stem, system, given, tmp_path):
    """Two ways to the same settings: the file written by hand, and the translator."""
    recipe = FOLDER / f"{stem}.toml"
    wanted = Wanted(env="SqlAnalyst", model="tiny:qwen3-64", max_turns=4)
    if system == "roll":
        given = given | {"rollout_batch_size": 64, "num_return_sequences_in_group": 8}
    translated = tmp_path / "translated.toml"
    translated.write_text(RunConfig.from_dict(translate(system, given, wanted).values).to_toml())
    assert settings_of(translated) == settings_of(recipe)
