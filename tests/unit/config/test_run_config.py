"""The configuration: its defaults, what follows from it, the command line, and that no slip goes unnoticed."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig, load_config, load_sections
from gspo_gym.config.words import sections_of
from gspo_gym.errors import ConfigError
from gspo_gym.learning.settings import (
    AdvantageSettings,
    CorrectionSettings,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardSettings,
    SupervisedSettings,
    UpdateSettings,
)
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits

WARMUP = {"num_episodes": 10, "learning_rate": 1e-2}


@pytest.fixture
def file(tmp_path: Path, changed: Callable[..., Any]) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(changed({})), encoding="utf-8")
    return path


# --- what it means ----------------------------------------------------------------------------------------------------


def test_a_minimal_file_has_these_defaults(file: Path) -> None:
    assert tomllib.loads(load_config(file).to_toml()) == {
        "run": {
            "seed": 0,
            "folder": "runs",
            "tags": {},
            "log_episodes_every_n_iters": 1,
            "log_tokens_every_n_iters": 0,
            "stop_grace_seconds": 30.0,
            "restore": [],
        },
        "algorithm": {"variety": "gspo", "acknowledge": []},
        "reference": {
            "placement": "none",
            "source": "auto",
            "update_every_n_iters": 0,
        },
        "model": {
            "base": "tiny:qwen3-64",
            "trainer_mode": "full",
            "quantization": "nf4",
            "label": "quickstart",
            "dtype": "float32",
            "gradient_checkpointing": False,
            "torch_compile": False,
            "liger_kernels": False,
        },
        "rollout": {
            "env_name": "GuessNumber",
            "env_config": {"style": "terse"},
            "mixture": [],
            "isolation": "auto",
            "tools_in": "auto",
            "env_memory_limit_mb": 8192,
            "env_variables": [],
            "policy_name": "policy",
            "engine": "local",
            "rescore": False,
            "max_turns": 8,
            "max_output_tokens": 8,
            "min_output_tokens": 0,
            "max_model_len": 512,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "episodes_per_batch": 64,
            "forks_per_episode": 0,
            "max_concurrent_rollouts": 64,
        },
        "limits": {
            "step_timeout_seconds": 30.0,
            "episode_timeout_seconds": 600.0,
        },
        "training": {
            "num_epochs": 1,
            "iterations_per_epoch": 10,
            "group_size": 8,
            "batch_size": 16,
            "update_epochs": 1,
            "learning_rate": 0.001,
            "max_tokens_per_microbatch": 16384,
            "share_prefixes": "auto",
            "log_interval": 1,
            "checkpoint_every_n_iters": 50,
            "keep_last": 2,
            "keep_best": 1,
            "constant_groups": "keep",
            "max_staleness": 0,
            "weight_sync_interval": 1,
            "step_rewards_weights": {},
            "step_rewards_k_limits": {},
        },
        "loss": {
            "unit": "trajectory",
            "surrogate": "clip",
            "aggregation": "seq-mean-token-mean",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "sapo_temperatures": [1.0, 1.05],
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "kl_clamp": 10.0,
            "kl_importance_weighted": False,
            "entropy_coef": 0.0,
        },
        "advantages": {
            "level": "trajectory",
            "baseline": "group",
            "scale": "group",
            "discount": 1.0,
            "whiten": "none",
            "kl_shaping_coef": 0.0,
        },
        "rewards": {"overlong": "keep", "kl_coef": 0.0},
        "correction": {"old_logprobs": "recompute", "level": "none", "mode": "truncate", "low": 0.5, "high": 2.0},
        "optimizer": {
            "kind": OptimizerSettings.model_fields["kind"].default,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "warmup_steps": 0,
            "schedule": "constant",
            "min_lr_fraction": 0.1,
        },
        "learner": {"sequence_parallel": 1},
        "evaluation": {"seeds": "0:100", "samples_per_task": 1, "every_n_iters": 10, "temperature": 1.0},
        "tracking": {"report_to": []},
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
        {"evaluation.seeds": "0:50,60", "optimizer.betas": [0.8, 0.99]},
        {"evaluation.seeds": [3, 5], "algorithm.variety": "grpo"},
        {"rollout.env_config": {"pair": (1, 2)}},
        {"training.learning_rate": 1 / 3, "optimizer.eps": 1e-300, "run.seed": 2**62},
        {"algorithm.variety": "gspo_token", "advantages": {"baseline": "running"}},
        {"loss.kl_coef": 0.1, "rewards.kl_coef": 0.2, "rewards.kl_target": 0.1, "optimizer.warmup_steps": 0.1},
        {"vllm": {}, "rollout.max_model_len": ..., "rollout.max_output_tokens": ...},
        {
            "rollout.policy_config": {"temperature": 0.5, "max_tokens": 7, "chat_template_kwargs": {"a": True}},
            "rollout.max_output_tokens": ...,
        },
        {
            "training.step_rewards_mode": "decision_stepwise",
            "training.step_rewards_strategy": "per_achievement",
            "training.step_rewards_weights": {"collect wood": 0.5},
        },
        {"judge": {"enabled": False, "reward_blend": {}, "options": {"event": True, "weights": {"a.b": 0.5}}}},
        {"services": {}, "compute": {"gpu_count": 0}, "tracking": {"report_to": ["wandb"], "wandb_project": "a"}},
    ],
)
def test_the_resolved_file_reads_back_to_an_equal_configuration(
    changes: dict[str, Any], tmp_path: Path, make: Callable[..., RunConfig]
) -> None:
    original = make(changes)
    path = tmp_path / "config.toml"
    path.write_text(original.to_toml(), encoding="utf-8")
    assert load_config(path) == original


@pytest.mark.parametrize(
    ("variety", "unit", "level", "baseline", "clips"),
    [
        ("gspo", "trajectory", "trajectory", "group", (3e-4, 4e-4)),  # arXiv 2507.18071, section 5.1
        ("gspo_token", "trajectory", "turn", "leave_one_out", (3e-4, 4e-4)),
        ("grpo", "token", "trajectory", "group", (0.2, 0.27)),  # the same section, for its comparison
    ],
)
def test_the_variety_supplies_ratio_unit_advantage_level_and_clip_range(
    variety: str, unit: str, level: str, baseline: str, clips: tuple[float, float], make: Callable[..., RunConfig]
) -> None:
    resolved = make({"algorithm.variety": variety})
    assert (resolved.loss.unit, resolved.advantages.level, resolved.advantages.baseline) == (unit, level, baseline)
    assert (resolved.loss.clip_low, resolved.loss.clip_high) == clips


def test_what_a_variety_leaves_open_can_be_chosen(make: Callable[..., RunConfig]) -> None:
    choice = {"loss.unit": "turn", "loss.clip_low": 0.01, "advantages.discount": 0.9}
    chosen = make({"algorithm.variety": "gspo_token", **choice})
    assert (chosen.loss.unit, chosen.loss.clip_low, chosen.advantages.level) == ("turn", 0.01, "turn")
    assert make({"algorithm.variety": "grpo", "loss.clip_high": 0.3}).loss.clip_low == 0.2


def test_the_numbers_that_follow(make: Callable[..., RunConfig]) -> None:
    follows = make({"training.num_epochs": 3, "training.update_epochs": 2})
    assert follows.size.num_iterations == 3 * 10
    assert follows.size.groups_per_iteration == 64 // 8
    assert follows.size.num_optimizer_steps == 3 * 10 * (64 // 16) * 2
    assert follows.run_folder == Path("runs/quickstart")
    assert follows.evaluation_seeds == tuple(range(100))
    assert make({"evaluation.seeds": "5:8,20"}).evaluation_seeds == (5, 6, 7, 20)
    assert make({"evaluation.seeds": [9, 2]}).evaluation_seeds == (9, 2)


@pytest.mark.parametrize(
    ("changes", "minibatch", "steps"),
    [
        ({}, 16, 4),  # 64 episodes / 16
        ({"rollout.batches_per_step": 3}, 16, 12),  # 192 / 16
        ({"training.gradient_accumulation_steps": 2}, 32, 2),
        ({"training.gradient_accumulation_steps": 4, "training.max_accumulated_minibatch": 4}, 64, 1),
        ({"training.max_accumulated_minibatch": 3}, 32, 2),  # 3 x 16 do not divide 64
        ({"training.max_accumulated_minibatch": 100}, 64, 1),  # there are 4 batches and no more
        ({"training.update_epochs": 3}, 16, 12),
    ],
)
def test_batches_accumulate_to_optimizer_steps(
    changes: dict[str, Any], minibatch: int, steps: int, make: Callable[..., RunConfig]
) -> None:
    config = make(changes)
    assert config.training.batch_size == minibatch
    assert config.size.steps_per_iteration == steps
    assert config.size.num_optimizer_steps == 10 * steps
    assert config.size.groups_per_iteration == 8 * changes.get("rollout.batches_per_step", 1)


def test_training_episodes_may_be_shorter_than_evaluations(make: Callable[..., RunConfig]) -> None:
    shorter = make({"training.max_turns": 3})
    assert (shorter.training_limits.max_turns, shorter.episode_limits.max_turns) == (3, 8)
    assert make({}).training_limits == make({}).episode_limits
    bounded = make({"rollout.ops": ["agent", "env"] * 5})
    assert (bounded.training_limits.max_turns, bounded.episode_limits.max_turns) == (5, 5)
    both = make({"rollout.ops": ["agent", "env"] * 5, "training.max_turns": 6})
    assert both.training_limits.max_turns == 5


def test_a_fraction_of_warm_up_becomes_steps_rounded_up(make: Callable[..., RunConfig]) -> None:
    config = make({"optimizer.warmup_steps": 0.06})
    assert config.optimizer.num_warmup_steps(config.size.num_optimizer_steps) == 3  # 0.06 x 40 steps = 2.4


def test_step_rewards_keep_their_own_defaults_where_nothing_is_said(make: Callable[..., RunConfig]) -> None:
    assert make({}).step_reward_settings == StepRewardSettings()
    assert make({"training.step_rewards_enabled": False}).step_reward_settings == StepRewardSettings(mode="off")
    said = {
        "enabled": True,
        "mode": "decision_stepwise",
        "beta": 0.1,
        "indicator_lambda": 0.2,
        "strategy": "per_achievement",
        "weights": {"a": 2.0},
        "k_limits": {"a": 3},
    }
    settings = make({f"training.step_rewards_{name}": value for name, value in said.items()}).step_reward_settings
    assert (settings.mode, settings.beta, settings.indicator_lambda) == ("decision_stepwise", 0.1, 0.2)
    assert (settings.strategy, settings.weights, settings.k_limits) == ("per_achievement", {"a": 2.0}, {"a": 3})
    absolute = make({"training.step_rewards_mode": "decision_stepwise", "training.event_rewards_kind": "absolute"})
    assert absolute.step_reward_settings == StepRewardSettings(mode="decision_stepwise", kind="absolute")


def test_a_kl_term_asks_for_a_reference(make: Callable[..., RunConfig]) -> None:
    assert make({}).reference.placement == "none"
    for key in ("loss.kl_coef", "rewards.kl_coef", "advantages.kl_shaping_coef"):
        assert make({key: 0.1}).reference.placement == "shared"


def test_sections_become_the_settings_of_the_parts_that_they_govern(make: Callable[..., RunConfig]) -> None:
    built = make(
        {
            "rollout.max_concurrent_rollouts": 7,
            "limits": {
                "step_timeout_seconds": 1.5,
                "episode_timeout_seconds": 2.5,
            },
            "training.update_epochs": 2,
            "training.max_tokens_per_microbatch": 11,
            "optimizer": {
                "kind": "adamw",
                "betas": [0.1, 0.2],
                "eps": 1e-3,
                "weight_decay": 0.3,
                "max_grad_norm": 0.4,
                "warmup_steps": 5,
                "schedule": "cosine",
                "min_lr_fraction": 0.6,
            },
            "warmup": {"num_episodes": 3, "num_epochs": 4, "learning_rate": 0.5, "batch_size": 6},
            "model.trainer_mode": "lora",
            "loss.kl_coef": 0.1,
            "reference": {"source": "adapter", "update_every_n_iters": 4},
        }
    )
    assert built.episode_limits.model_dump() == {
        "max_turns": 8,
        "max_output_tokens": 8,
        "max_model_len": 512,
        "step_timeout_seconds": 1.5,
        "episode_timeout_seconds": 2.5,
        "action_limit_return": None,
    }
    assert PoolLimits.of(built.rollout, built.limits).model_dump() == {
        "max_concurrent_rollouts": 7,
        "max_attempts": 3,
        "min_group_fraction": 0.75,
    }
    memory = {"max_tokens_per_microbatch": 11}
    once = {"update_epochs": 2, "learning_rate": 1e-3, "share_prefixes": "auto"}
    assert UpdateSettings.of(built.training).model_dump() == {**once, **memory}
    assert built.training.batch_size == 16
    adamw = {"kind": "adamw", "betas": (0.1, 0.2), "eps": 1e-3, "weight_decay": 0.3, "max_grad_norm": 0.4}
    assert built.optimizer.at_constant_rate() == OptimizerSettings(**adamw)
    assert (built.reference.source, built.reference.update_every_n_iters) == ("adapter", 4)


def test_no_knob_of_the_parts_is_out_of_reach() -> None:
    keys = {key for _, section in sections_of(RunConfig) for key in section.model_fields}
    of_python = {
        "action_limit_return",
        "max_attempts",
        "min_group_fraction",
    }  # what the package and its tests set, and no file
    renamed = {
        name: "event_rewards_kind" if name == "kind" else f"step_rewards_{name}"
        for name in StepRewardSettings.model_fields
    }
    for settings in (
        EpisodeLimits,
        PoolLimits,
        UpdateSettings,
        OptimizerSettings,
        SupervisedSettings,
        LoraSettings,
        LossSettings,
        AdvantageSettings,
        RewardSettings,
        CorrectionSettings,
        ReferenceSettings,
    ):
        assert set(settings.model_fields) <= keys | of_python, settings
    assert {renamed[name] for name in StepRewardSettings.model_fields} <= keys


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
            "training.learning_rate=1e-4",
            "warmup.num_episodes=5",
            "warmup.learning_rate=1",
            "model.trainer_mode=lora",
            "training.lora.r=4",
        ],
    )
    assert (loaded.run.seed, loaded.model.base, loaded.model.label) == (2, "Qwen/Qwen3-0.6B", "7")
    assert loaded.rollout.env_config == {"style": "terse", "size": 4, "name": "a=b", "flags": [True, 1.5]}
    assert loaded.evaluation_seeds == tuple(range(50))
    assert loaded.training.learning_rate == 1e-4
    assert loaded.warmup is not None
    assert loaded.warmup.learning_rate == 1.0
    assert loaded.training.lora == LoraSettings(r=4)


def test_a_value_cannot_smuggle_in_a_second_key(file: Path) -> None:
    smuggled = load_config(file, ['model.base=1\nlabel = "x"'])
    assert smuggled.model.base == '1\nlabel = "x"'
    assert smuggled.model.label == "quickstart"


def test_errors_say_whether_a_key_came_from_the_file_or_the_command_line(
    file: Path, changed: Callable[..., Any]
) -> None:
    file.write_text(tomli_w.dumps(changed({"training.group_sise": 8, "rollout.max_turns": 0})), encoding="utf-8")
    overrides = ["training.lorra=1", "run.seed=x", "seed=3", "model.base.x=1", "loss.clip_low=2", "nowhere.x=1"]
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert str(caught.value).splitlines() == [
        "8 problems in the configuration:",
        "  command line: seed=3: expected section.key=value",
        '  command line: model.base.x: base is not a table that could hold it, but "tiny:qwen3-64"',
        '  command line: run.seed: expected an integer >= 0, got "x"',
        f"  {file}: rollout.max_turns: expected an integer > 0, got 0",
        f"  {file}: training.group_sise: unknown key; did you mean 'group_size'?",
        "  command line: training.lorra: unknown key; did you mean 'lora'?",
        "  command line: loss.clip_low: expected a number > 0 and < 1, got 2",
        "  command line: nowhere: unknown section; known: advantages, algorithm, compute, correction, distillation, "
        "evaluation, gateway, judge, learner, limits, loss, model, optimizer, reference, rewards, rollout, run, "
        "services, topology, tracking, training, vllm, warmup",
    ]


def test_what_was_given_can_be_told_from_what_follows(file: Path) -> None:
    sections = load_sections(file, ["run.seed=3", "policy.temperature=0.5"])
    assert sections["run"] == {"seed": 3}
    assert sections["rollout"]["temperature"] == 0.5
    assert "loss" not in sections


# --- no slip goes unnoticed -------------------------------------------------------------------------------------------


def test_the_constructor_checks_contradictions_too(changed: Callable[..., Any]) -> None:
    with pytest.raises(ValidationError, match=r"training\.batch_size: expected a divisor"):
        RunConfig(**changed({"training.batch_size": 24}))


SPLIT = {"gpus_for_vllm": 1, "gpus_for_training": 1}


@pytest.mark.parametrize("key", leaf_keys())
def test_a_slip_in_any_key_and_a_wrong_type_of_any_value_name_that_key(key: str, problems: Callable[..., Any]) -> None:
    name = key.rsplit(".", 1)[1]
    base: dict[str, Any] = {"warmup": dict(WARMUP), "model.trainer_mode": "lora", "compute": {"gpu_count": 2}}
    base |= {"topology": dict(SPLIT), "vllm": {}, "judge": {}, "services": {"task_url": "http://a"}, "gateway": {}}
    base |= {"distillation": {"teacher": "tiny:qwen3-64"}}
    slip = f"{key[: -len(name)]}{name[0]}q{name[1:]}"
    if not key.startswith("rollout.policy_config."):  # an app's, too: see test_config_hosted.py
        lines = problems({**base, slip: 1})
        assert lines[0].startswith(f"{slip}: unknown key; ")
        assert len(lines) == 1
    tables = ("env_config", "chat_template_kwargs", "rubric_overrides", "tags")
    wrong: Any = {"no": "such type"} if name not in tables else "no table"
    lines = problems({**base, key: wrong})
    assert [line.split(":")[0] for line in lines if line.startswith(f"{key}:")] == [key]
    assert "got" in lines[0]


def test_the_length_of_the_engine_is_the_rollouts_default(make: Callable[..., RunConfig]) -> None:
    absent = {"rollout.max_model_len": ..., "rollout.max_output_tokens": ...}
    assert make({**absent, "vllm.max_model_len": 700}).rollout.max_model_len == 700
    assert make({**absent, "vllm.max_model_len": 700}).rollout.max_output_tokens == 699  # a prompt has a token at least
