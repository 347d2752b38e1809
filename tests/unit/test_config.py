"""The configuration file: what it takes, what follows from it, and what its errors say."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import BaseModel, ValidationError

from gspo_gym.config import RunConfig, load_config
from gspo_gym.config_problems import sections_of
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import LoraSettings, OptimizerSettings, SupervisedSettings, UpdateSettings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits

# Nothing but what has no default.
MINIMAL: dict[str, Any] = {
    "model": {"base": "tiny:qwen3-64", "label": "quickstart"},
    "rollout": {
        "env_name": "GuessNumber",
        "max_turns": 8,
        "max_output_tokens": 8,
        "max_model_len": 512,
        "episodes_per_batch": 64,
    },
    "training": {"iterations_per_epoch": 10, "group_size": 8, "batch_size": 16, "learning_rate": 1e-3},
    "evaluation": {"instances": 100},
}
WARMUP = {"num_episodes": 10, "learning_rate": 1e-2}


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """MINIMAL with these dotted keys set; a value of ... removes the key."""
    values = copy.deepcopy(MINIMAL)
    for key, value in changes.items():
        *above, name = key.split(".")
        table = values
        for part in above:
            table = table.setdefault(part, {})
        if value is ...:
            del table[name]
        else:
            table[name] = value
    return values


def config(**changes: Any) -> RunConfig:
    """The configuration of MINIMAL with changes; `training__group_size` is training.group_size."""
    return RunConfig.from_dict(changed({key.replace("__", "."): value for key, value in changes.items()}))


def problems(changes: Mapping[str, Any]) -> list[str]:
    """The lines of the error about MINIMAL with these changes, without "test: "."""
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(changed(changes), source="test")
    lines = str(caught.value).splitlines()
    if len(lines) > 1:
        head, *lines = lines
        assert head == f"{len(lines)} problems in the configuration:"
        lines = [line.removeprefix("  ") for line in lines]
    assert all(line.startswith("test: ") for line in lines)
    return [line.removeprefix("test: ") for line in lines]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(MINIMAL), encoding="utf-8")
    return path


# --- what it means ----------------------------------------------------------------------------------------------------


def test_a_minimal_file_has_these_defaults(file: Path) -> None:
    assert tomllib.loads(load_config(file).to_toml()) == {
        "run": {"seed": 0, "folder": "runs"},
        "algorithm": {"type": "online", "method": "policy_gradient", "variety": "gspo"},
        "model": {
            "base": "tiny:qwen3-64",
            "trainer_mode": "full",
            "label": "quickstart",
            "dtype": "float32",
            "device": "auto",
        },
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {},
            "engine": "local",
            "max_turns": 8,
            "max_output_tokens": 8,
            "max_model_len": 512,
            "temperature": 1.0,
            "episodes_per_batch": 64,
            "max_concurrent_rollouts": 64,
        },
        "limits": {
            "step_timeout_seconds": 30.0,
            "episode_timeout_seconds": 600.0,
            "max_attempts": 3,
            "min_group_fraction": 0.75,
        },
        "training": {
            "num_epochs": 1,
            "iterations_per_epoch": 10,
            "group_size": 8,
            "batch_size": 16,
            "update_epochs": 1,
            "learning_rate": 0.001,
            "max_tokens_per_microbatch": 16384,
            "scoring_chunk_tokens": 1024,
            "max_nonfinite_steps": 5,
            "log_interval": 1,
            "checkpoint_every_n_iters": 50,
        },
        "loss": {"unit": "trajectory", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0},
        "advantages": {"level": "trajectory", "normalize_std": True, "discount": 1.0},
        "optimizer": {
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "num_warmup_steps": 0,
            "schedule": "constant",
            "min_lr_fraction": 0.1,
        },
        "evaluation": {"instances": 100, "every_n_iters": 10, "temperature": 1.0},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"warmup": WARMUP, "training.stop_at_success_rate": 0.9},
        {
            "model.trainer_mode": "lora",
            "model.dtype": "bfloat16",
            "training.lora": {"target_modules": ["q_proj", "v_proj"]},
        },
        {"rollout.env_config": {"size": 4, "slippery": False, "maps": [["SF", "FG"], []], "nested": {"x": 0.1}}},
        {"evaluation.seeds": "0:50,60", "evaluation.instances": 51, "optimizer.betas": [0.8, 0.99]},
        {"evaluation.seeds": [3, 5], "evaluation.instances": ..., "algorithm.variety": "grpo"},
        {"rollout.env_config": {"pair": (1, 2)}},
        {"training.learning_rate": 1 / 3, "optimizer.eps": 1e-300, "run.seed": 2**62},
    ],
)
def test_the_resolved_file_reads_back_to_an_equal_configuration(changes: dict[str, Any], tmp_path: Path) -> None:
    original = RunConfig.from_dict(changed(changes))
    path = tmp_path / "config.toml"
    path.write_text(original.to_toml(), encoding="utf-8")
    assert load_config(path) == original


@pytest.mark.parametrize(
    ("variety", "unit", "level", "clips"),
    [
        ("gspo", "trajectory", "trajectory", (3e-4, 4e-4)),  # arXiv 2507.18071, section 5.1
        ("gspo_token", "trajectory", "turn", (3e-4, 4e-4)),
        ("grpo", "token", "trajectory", (0.2, 0.27)),  # the same section, for its comparison
    ],
)
def test_the_variety_supplies_ratio_unit_advantage_level_and_clip_range(
    variety: str, unit: str, level: str, clips: tuple[float, float]
) -> None:
    resolved = config(algorithm__variety=variety)
    assert (resolved.loss.unit, resolved.advantages.level) == (unit, level)
    assert (resolved.loss.clip_low, resolved.loss.clip_high) == clips


def test_what_a_variety_leaves_open_can_be_chosen() -> None:
    chosen = config(algorithm__variety="gspo_token", loss__unit="turn", loss__clip_low=0.01, advantages__discount=0.9)
    assert (chosen.loss.unit, chosen.loss.clip_low, chosen.advantages.level) == ("turn", 0.01, "turn")
    assert config(algorithm__variety="grpo", loss__clip_high=0.3).loss.clip_low == 0.2


def test_the_numbers_that_follow() -> None:
    follows = config(training__num_epochs=3, training__update_epochs=2)
    assert follows.num_iterations == 3 * 10
    assert follows.groups_per_batch == 64 // 8
    assert follows.num_optimizer_steps == 3 * 10 * (64 // 16) * 2
    assert follows.run_folder == Path("runs/quickstart")
    assert follows.evaluation_seeds == tuple(range(100))
    assert config(evaluation__seeds="5:8,20", evaluation__instances=4).evaluation_seeds == (5, 6, 7, 20)
    assert config(evaluation__seeds=[9, 2], evaluation__instances=2).evaluation_seeds == (9, 2)


def test_sections_become_the_settings_of_the_parts_that_they_govern() -> None:
    values = changed(
        {
            "rollout.max_concurrent_rollouts": 7,
            "limits": {
                "step_timeout_seconds": 1.5,
                "episode_timeout_seconds": 2.5,
                "max_attempts": 9,
                "min_group_fraction": 0.5,
            },
            "training.update_epochs": 2,
            "training.max_tokens_per_microbatch": 11,
            "training.scoring_chunk_tokens": 12,
            "training.max_nonfinite_steps": 13,
            "optimizer": {
                "betas": [0.1, 0.2],
                "eps": 1e-3,
                "weight_decay": 0.3,
                "max_grad_norm": 0.4,
                "num_warmup_steps": 5,
                "schedule": "cosine",
                "min_lr_fraction": 0.6,
            },
            "warmup": {"num_episodes": 3, "num_epochs": 4, "learning_rate": 0.5, "batch_size": 6},
        }
    )
    built = RunConfig.from_dict(values)
    assert built.episode_limits.model_dump() == {
        "max_turns": 8,
        "max_output_tokens": 8,
        "max_model_len": 512,
        "step_timeout_seconds": 1.5,
        "episode_timeout_seconds": 2.5,
    }
    assert built.pool_limits.model_dump() == {
        "max_concurrent_rollouts": 7,
        "max_attempts": 9,
        "min_group_fraction": 0.5,
    }
    memory = {"max_tokens_per_microbatch": 11, "scoring_chunk_tokens": 12, "max_nonfinite_steps": 13}
    assert built.update_settings.model_dump() == {"minibatch_size": 16, "num_epochs": 2, **memory}
    adamw = {"betas": (0.1, 0.2), "eps": 1e-3, "weight_decay": 0.3, "max_grad_norm": 0.4}
    schedule = {"num_warmup_steps": 5, "schedule": "cosine", "min_lr_fraction": 0.6}
    assert built.optimizer_settings.model_dump() == {"learning_rate": 1e-3, **adamw, **schedule}
    assert built.warmup_settings is not None
    assert built.warmup_settings.model_dump() == {"num_epochs": 4, "batch_size": 6, **memory}
    assert built.warmup_optimizer_settings == OptimizerSettings(learning_rate=0.5, **adamw)
    assert config().warmup_settings is None
    assert config().warmup_optimizer_settings is None


def test_no_knob_of_the_parts_is_out_of_reach() -> None:
    keys = {key for _, section in sections_of(RunConfig) for key in section.model_fields}
    renamed = {"minibatch_size": "batch_size", "num_epochs": "update_epochs"}
    for settings in (EpisodeLimits, PoolLimits, UpdateSettings, OptimizerSettings, SupervisedSettings, LoraSettings):
        assert {renamed.get(name, name) for name in settings.model_fields} <= keys


def test_every_key_says_what_it_means() -> None:
    for name, section in sections_of(RunConfig):
        assert section.__doc__, name
        for key, info in section.model_fields.items():
            assert info.description, f"{name}.{key}"


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_goes_over_the_file_in_order(file: Path) -> None:
    loaded = load_config(
        file,
        [
            "run.seed=1",
            "run.seed = 2",
            "model.base=Qwen/Qwen3-0.6B",
            'model.label="7"',
            "rollout.env_config.size=4",
            "rollout.env_config.name=a=b",
            "rollout.env_config.flags=[true, 1.5]",
            "evaluation.seeds=0:50",
            "evaluation.instances=50",
            "training.learning_rate=1e-4",
            "warmup.num_episodes=5",
            "warmup.learning_rate=1",
            "model.trainer_mode=lora",
            "training.lora.r=4",
        ],
    )
    assert (loaded.run.seed, loaded.model.base, loaded.model.label) == (2, "Qwen/Qwen3-0.6B", "7")
    assert loaded.rollout.env_config == {"size": 4, "name": "a=b", "flags": [True, 1.5]}
    assert loaded.evaluation_seeds == tuple(range(50))
    assert loaded.training.learning_rate == 1e-4
    assert loaded.warmup is not None
    assert loaded.warmup.learning_rate == 1.0
    assert loaded.training.lora == LoraSettings(r=4)


def test_a_value_cannot_smuggle_in_a_second_key(file: Path) -> None:
    smuggled = load_config(file, ['model.base=1\nlabel = "x"'])
    assert smuggled.model.base == '1\nlabel = "x"'
    assert smuggled.model.label == "quickstart"


def test_errors_say_whether_a_key_came_from_the_file_or_the_command_line(file: Path) -> None:
    file.write_text(tomli_w.dumps(changed({"training.group_sise": 8, "rollout.max_turns": 0})), encoding="utf-8")
    overrides = ["training.lr=1", "run.seed=x", "seed=3", "model.base.x=1", "loss.clip_low=2", "nowhere.x=1"]
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert str(caught.value).splitlines() == [
        "8 problems in the configuration:",
        "  command line: seed=3: expected section.key=value",
        '  command line: model.base.x: base is not a table that could hold it, but "tiny:qwen3-64"',
        '  command line: run.seed: expected an integer >= 0, got "x"',
        f"  {file}: rollout.max_turns: expected an integer > 0, got 0",
        f"  {file}: training.group_sise: unknown key; did you mean 'group_size'?",
        "  command line: training.lr: unknown key; did you mean 'lora'?",
        "  command line: loss.clip_low: expected a number > 0 and < 1, got 2",
        "  command line: nowhere: unknown section; known: advantages, algorithm, evaluation, limits, loss, model, "
        "optimizer, rollout, run, training, warmup",
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("run.seed", -1, "expected an integer >= 0, got -1"),
        ("run.seed", True, "expected an integer >= 0, got true"),
        ("run.seed", 1.0, "expected an integer >= 0, got 1.0"),
        ("run.folder", "", 'expected a non-empty string, got ""'),
        ("algorithm.type", "offline", 'expected "online", got "offline"'),
        ("algorithm.method", "ppo", 'expected "policy_gradient", got "ppo"'),
        ("algorithm.variety", "gsp", 'expected "gspo", "gspo_token" or "grpo", got "gsp"'),
        ("model.base", ..., "required, but not given: expected a non-empty string (hub id, folder, or tiny:NAME for a "
                            "small model with random weights)"),
        ("model.base", 7, "expected a non-empty string, got 7"),
        ("model.label", "a/b", "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a "
                               "folder), got 'a/b'"),
        ("model.label", "..", "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a "
                              "folder), got '..'"),
        ("model.dtype", "float16", 'expected "float32" or "bfloat16", got "float16"'),
        ("model.device", "tpu", 'expected "auto", "cpu" or "cuda", got "tpu"'),
        ("model.source", "ft:x", "unknown key; known: base, device, dtype, label, trainer_mode"),
        ("rollout.max_turns", "8", 'expected an integer > 0, got "8"'),
        ("rollout.max_model_len", 1, "expected an integer > 1, got 1"),
        ("rollout.temperature", 0, "expected a number > 0, got 0"),
        ("rollout.temperature", float("nan"), "expected a number > 0, got NaN"),
        ("rollout.env_config", 3, "expected a table, got 3"),
        ("rollout.engine", "vllm", 'expected "local", got "vllm"'),
        ("training.max_turn", 1, "unknown key; did you mean 'rollout.max_turns'?"),
        ("rollout.learning_rate", 1, "unknown key; did you mean 'training.learning_rate' or 'warmup.learning_rate'?"),
        ("limits.min_group_fraction", 1.5, "expected a number > 0 and <= 1, got 1.5"),
        ("training.group_size", 1, "expected an integer > 1, got 1"),
        ("training.learning_rate", 0.0, "expected a number > 0, got 0.0"),
        ("training.stop_at_success_rate", 1.01, "expected a number > 0 and <= 1, got 1.01"),
        ("training.lora", 5, "expected a table, got 5"),
        ("loss.kl_coef", float("inf"), "expected a number >= 0, got Infinity"),
        ("loss.unit", "sequence", 'expected "trajectory", "turn" or "token", got "sequence"'),
        ("advantages.normalize_std", 1, "expected true or false, got 1"),
        ("optimizer.betas", [0.9], "expected a list of 2 numbers, got [0.9]"),
        ("optimizer.betas", [0.9, "x"], 'expected a list of 2 numbers, got [0.9, "x"]'),
        ("evaluation.seeds", [1.5], "expected a list of integers or a string, got [1.5]"),
        ("evaluation.seeds", "0:x", "expected \"start:stop\", \"start:stop:step\" or a number, got '0:x'"),
        ("evaluation.seeds", [1, 1], "1 occurs more than once in [1, 1]"),
        ("evaluation.seeds", [], "[] names no seed"),
        ("evaluation.seeds", [2**31], "expected seeds below 2**31 (from there up they are trained on), got 2147483648"),
        ("evaluation.seeds", "0:9999999999", "expected at most 1000000 at once, got 9999999999 in '0:9999999999'"),
        ("training", 5, "expected a table, got 5"),
        ("trainig", {}, "unknown section; did you mean 'training'?"),
        ("group_size", 8, "unknown key; did you mean 'training.group_size'?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_was_expected(key: str, value: Any, problem: str) -> None:
    assert problems({key: value}) == [f"{key}: {problem}"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"loss.unit": "token"},
            'loss.unit: algorithm.variety "gspo" takes "trajectory", got "token", which belongs to variety "grpo"',
        ),
        (
            {"loss.unit": "turn"},
            'loss.unit: algorithm.variety "gspo" takes "trajectory", got "turn", which belongs to variety "gspo_token"',
        ),
        (
            {"algorithm.variety": "grpo", "loss.unit": "trajectory"},
            'loss.unit: algorithm.variety "grpo" takes "token", got "trajectory", which belongs to variety "gspo" or '
            '"gspo_token"',
        ),
        (
            {"advantages.level": "turn"},
            'advantages.level: algorithm.variety "gspo" takes "trajectory", got "turn", which belongs to variety '
            '"gspo_token" or "grpo"',
        ),
        (
            {"advantages.discount": 0.5},
            "advantages: discount is used at level 'turn' only (an episode's return is undiscounted), got 0.5 at level "
            "'trajectory'",
        ),
        (
            {"training.group_size": 6, "training.batch_size": 16},
            "rollout.episodes_per_batch: expected a multiple of training.group_size = 6, got 64",
        ),
        (
            {"training.batch_size": 24},
            "training.batch_size: expected a divisor of rollout.episodes_per_batch = 64, got 24",
        ),
        (
            {"training.batch_size": 128},
            "training.batch_size: expected a divisor of rollout.episodes_per_batch = 64, got 128",
        ),
        (
            {"rollout.max_output_tokens": 512},
            "rollout.max_output_tokens: expected less than rollout.max_model_len = 512 (a prompt needs room), got 512",
        ),
        (
            {"training.lora": {"r": 8}},
            'training.lora: has no effect with model.trainer_mode "full": set that to "lora", or remove this',
        ),
        (
            {"model.dtype": "bfloat16"},
            'model.dtype: "bfloat16" weights cannot be trained (steps smaller than 1/256 of a weight round away): '
            'set "float32", or model.trainer_mode = "lora", whose own weights are float32',
        ),
        (
            {"evaluation.instances": ...},
            'evaluation.instances: required, but not given: a number of evaluation tasks (or evaluation.seeds, such as '
            '"0:100")',
        ),
        (
            {"evaluation.seeds": "0:10"},
            "evaluation.instances: expected the number of evaluation.seeds, which are 10, got 100",
        ),
        (
            {"optimizer.min_lr_fraction": 0.5},
            'optimizer.min_lr_fraction: has no effect with optimizer.schedule "constant": set that to "cosine", or '
            "remove this",
        ),
        (
            {"optimizer.schedule": "cosine", "optimizer.num_warmup_steps": 40},
            "optimizer.schedule: no step is left for the cosine: optimizer.num_warmup_steps = 40, and the run has 40 "
            "optimizer steps",
        ),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_on_both_sides(changes: dict[str, Any], problem: str) -> None:
    assert problems(changes) == [problem]


def test_just_inside_every_contradiction_is_fine() -> None:
    assert config(optimizer__schedule="cosine", optimizer__num_warmup_steps=39).num_optimizer_steps == 40
    assert config(optimizer__schedule="cosine", optimizer__min_lr_fraction=0.5).optimizer.min_lr_fraction == 0.5
    assert config(training__batch_size=64).num_optimizer_steps == 10
    assert config(rollout__max_output_tokens=511).rollout.max_output_tokens == 511
    assert config(evaluation__seeds=[2**31 - 1], evaluation__instances=1).evaluation_seeds == (2**31 - 1,)
    assert config(model__trainer_mode="lora", model__dtype="bfloat16").training.lora == LoraSettings()


def test_everything_that_is_wrong_is_reported_at_once_values_and_contradictions() -> None:
    changes = {
        "model.base": ...,
        "model.label": "x y",
        "rollout.max_turns": None,
        "training.group_size": 7,
        "training.batch_size": 60,
        "training.lora": {"rank": 4},
        "optimizer.eps": "small",
        "optimizer.min_lr_fraction": 0.3,
        "evaluation.seeds": "0:3",
        "vllm": {"max_model_len": 10},
    }
    keys = [line.split(": ")[0] for line in problems(changes)]
    assert keys == [
        "model.base",
        "model.label",
        "rollout.max_turns",
        "training.lora.rank",
        "optimizer.eps",
        "vllm",
        "rollout.episodes_per_batch",
        "training.batch_size",
        "evaluation.instances",
        "optimizer.min_lr_fraction",
    ]


def test_a_rule_is_silent_where_one_of_its_keys_is_wrong_itself() -> None:
    assert problems({"training.group_size": "six"}) == ['training.group_size: expected an integer > 1, got "six"']


@pytest.mark.parametrize("value", [None, object(), {"x": None}, [1, None], {1: 2}])
def test_an_environment_is_given_only_what_the_recorded_configuration_can_hold(value: Any) -> None:
    (line,) = problems({"rollout.env_config": {"argument": value}})
    assert line.startswith("rollout.env_config: expected values that TOML can hold (config.toml will hold them)")


def test_the_constructor_checks_contradictions_too() -> None:
    with pytest.raises(ValidationError, match=r"training\.batch_size: expected a divisor"):
        RunConfig(**changed({"training.batch_size": 24}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[run\n", r"run\.toml: cannot be read as TOML: .*line 1"),
        (b"[run]\nseed = 1\nseed = 2\n", r"run\.toml: cannot be read as TOML: Cannot overwrite a value"),
        (b"\xff\xfe", r"run\.toml: cannot be read as TOML: 'utf-8' codec"),
        (b"[run]\nseed = " + b"9" * 5000, r"run\.toml: cannot be read as TOML: Exceeds the limit"),
    ],
)
def test_a_file_that_is_not_toml_is_an_error_that_says_where(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_config(file)


def test_a_missing_file_offers_the_nearest_one(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"rum\.toml: there is no such file; did you mean '.*run\.toml'"):
        load_config(file.with_name("rum.toml"))
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        load_config(file.parent)


# --- no slip goes unnoticed -------------------------------------------------------------------------------------------


def leaves(model: type[BaseModel]) -> list[str]:
    """Every dotted key of the configuration."""
    sections = dict(sections_of(model))
    return [
        f"{name}.{key}"
        for name, section in sections.items()
        for key in section.model_fields
        if f"{name}.{key}" not in sections
    ]


@pytest.mark.parametrize("key", leaves(RunConfig))
def test_a_slip_in_any_key_and_a_wrong_type_of_any_value_name_that_key(key: str) -> None:
    name = key.rsplit(".", 1)[1]
    base: dict[str, Any] = {"warmup": dict(WARMUP), "model.trainer_mode": "lora"}
    slip = f"{key[: -len(name)]}{name[0]}q{name[1:]}"
    lines = problems({**base, slip: 1})
    assert lines[0].startswith(f"{slip}: unknown key; ")
    assert len(lines) == 1
    wrong: Any = {"no": "such type"} if key != "rollout.env_config" else "no table"
    lines = problems({**base, key: wrong})
    assert [line.split(":")[0] for line in lines if line.startswith(key)] == [key]
    assert "got" in lines[0]
