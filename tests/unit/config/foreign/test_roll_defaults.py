"""ROLL's defaults and meanings, each with the place in its source where it was read.

ROLL is no package, so that no test can ask it: the table is the reading of alibaba/ROLL at the commits named here.
"""

import pytest

from gspo_gym.cli.config import Wanted, translate
from gspo_gym.config.foreign.roll import ROLL
from gspo_gym.errors import ConfigError

BASE = "roll/configs/base_config.py@0a6a47e5afdc97749b353425b54f45296d9df3ff"
RLVR = "roll/pipeline/rlvr/rlvr_config.py@2f732c04305e3c76c74cad5c698dc7165ad1aa46"
AGENT = "roll/pipeline/agentic/agentic_config.py@51e53586d87babf0bf02716eb6b77f4ee3de2e97"
MODEL = "roll/configs/model_args.py@1d3b9ae2143882388f6b2dc1e60f021526ecf7ea"
# As a copy of ROLL's main holds them, jangyicheng/SE-ROLLGUI:
TRAINING = "roll/configs/training_args.py@ed0657e2d4b67e46651f04670152ba023f94eeeb"
SAMPLING = "roll/configs/generating_args.py@ed0657e2d4b67e46651f04670152ba023f94eeeb"
# Their key, its default, where it stands, and what an empty file becomes here.
READ = [
    ("max_steps", 500, BASE, {"training.iterations_per_epoch": 500}),
    ("save_steps", 50, BASE, {"training.checkpoint_every_n_iters": 50}),
    ("logging_steps", 1, BASE, {"training.log_interval": 1}),
    ("eval_steps", 10, BASE, {"evaluation.every_n_iters": 10}),
    ("seed", 42, BASE, {"run.seed": 42}),
    ("rollout_batch_size", 128, BASE, {"rollout.episodes_per_batch": 128}),
    ("prompt_length", 1024, BASE, {"rollout.max_model_len": 1024 + 1024}),  # and a placeholder of the answer
    ("adv_estimator", "gae", BASE, {"advantages.baseline": "none", "advantages.scale": "none"}),
    ("ppo_epochs", 1, BASE, {"training.update_epochs": 1}),
    ("max_grad_norm", 1.0, BASE, {"optimizer.max_grad_norm": 1.0}),
    ("pg_clip", 0.2, BASE, {"loss.clip_low": 0.2, "loss.clip_high": 0.2}),
    ("pg_clip_low", 0.2, BASE, {}),
    ("pg_clip_high", 0.2, BASE, {}),
    ("kl_loss_coef", 0, BASE, {"loss.kl_coef": None}),
    ("init_kl_coef", 0.2, BASE, {"rewards.kl_coef": None}),  # add_token_level_kl is false
    ("entropy_loss_coef", 0, BASE, {"loss.entropy_coef": None}),
    ("loss_agg_mode", "seq-mean-token-mean", BASE, {"loss.aggregation": "seq-mean-token-mean"}),
    ("importance_sampling", "token", RLVR, {"loss.unit": "token", "algorithm.variety": "grpo"}),
    ("num_return_sequences_in_group", 1, RLVR, {"training.group_size": 1}),
    ("step_reward_gamma", 0.95, AGENT, {"advantages.discount": None}),  # adv_estimator is no step_reinforce
    ("learning_rate", 5e-5, TRAINING, {"training.learning_rate": 5e-5}),
    ("lr_scheduler_type", "linear", TRAINING, {"optimizer.schedule": "linear", "optimizer.min_lr_fraction": 0.0}),
    ("weight_decay", 0.0, TRAINING, {"optimizer.weight_decay": 0.0}),
    ("adam_beta1", 0.9, TRAINING, {"optimizer.betas": [0.9, 0.999]}),
    ("adam_beta2", 0.999, TRAINING, {"optimizer.betas": [0.9, 0.999]}),
    ("per_device_train_batch_size", 8, TRAINING, {"training.batch_size": 8}),
    ("gradient_accumulation_steps", 1, TRAINING, {"training.batch_size": 8}),
    ("temperature", 0.95, SAMPLING, {"rollout.temperature": 0.95}),
    ("top_p", 0.7, SAMPLING, {"rollout.top_p": 0.7}),
    ("top_k", 50, SAMPLING, {"rollout.top_k": 50}),
    ("max_new_tokens", 8192, SAMPLING, {"rollout.max_output_tokens": 1024}),  # overwritten: what the prompt leaves
    ("dtype", "bf16", MODEL, {"model.dtype": None}),  # weights that are trained stay float32
    ("lora_rank", 8, MODEL, {"training.lora": None}),  # lora_target is None
    ("lora_dropout", 0.0, MODEL, {"training.lora": None}),
]


def value_at(values, key):
    for part in key.split("."):
        values = values.get(part) if values is not None else None
    return values


@pytest.mark.parametrize(("theirs", "default", "source", "ours"), READ, ids=[row[0] for row in READ])
def test_an_empty_file_becomes_what_rolls_source_says(theirs, default, source, ours):
    values = translate("roll", {}).values
    assert ROLL.defaults[theirs] == default, source
    for key, expected in ours.items():
        assert value_at(values, key) == expected, f"{key}: {source}"


def test_every_default_that_is_translated_was_read_somewhere():
    assert set(ROLL.defaults) == {theirs for theirs, *_ in READ}


LORA = {"actor_train": {"model_args": {"lora_target": "q_proj, v_proj"}}}
AGENTIC = {"adv_estimator": "grpo", "rollout_batch_size": 128, "train_env_manager": {"group_size": 8}}


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        # BaseConfig.__post_init__ and RLVRConfig.__post_init__: an answer has what the prompt leaves of the sequence
        ({"sequence_length": 700, "prompt_length": 100}, "rollout.max_output_tokens", 600),
        ({"sequence_length": 700, "prompt_length": 100, "response_length": 50}, "rollout.max_output_tokens", 600),
        ({"response_length": 50, "max_new_tokens": 9000}, "rollout.max_output_tokens", 50),
        # reward_postprocess: grpo sets both to group
        ({"adv_estimator": "grpo", "norm_mean_type": "batch"}, "advantages.baseline", "group"),
        ({"adv_estimator": "grpo", "norm_std_type": "batch"}, "advantages.scale", "group"),
        # reward_postprocess: `if pipeline_config.reward_clip`
        ({"reward_clip": 0}, "rewards.clip", None),
        # loss_func: each end of the range has a default of its own
        ({"use_pg_clip_range": True, "pg_clip": 0.1, "pg_clip_high": 0.3}, "loss.clip_low", 0.2),
        # get_sample_level_mask: answers of the greatest length leave the loss
        ({"max_len_mask": True}, "rewards.overlong", "mask"),
        # set_max_steps and BaseConfig.__post_init__ overwrite these of the worker's
        ({"actor_train": {"training_args": {"max_steps": 7}}}, "training.iterations_per_epoch", 500),
        ({"actor_train": {"training_args": {"seed": 7}}}, "run.seed", 42),
        # model_args.py: checkpointing unless it is disabled, and LoRA where modules are named
        ({}, "model.gradient_checkpointing", True),
        ({"disable_gradient_checkpointing": True}, "model.gradient_checkpointing", None),
        ({}, "model.trainer_mode", None),  # ours is "full", too
        (LORA, "model.trainer_mode", "lora"),
        (LORA, "training.lora.r", 8),
        (LORA, "training.lora.alpha", 16),  # lora_rank * 2
        (LORA, "training.lora.dropout", 0.0),
        (LORA, "training.lora.target_modules", ["q_proj", "v_proj"]),
        (LORA, "model.dtype", "bfloat16"),
        ({"lora_target": "all-linear"}, "training.lora.target_modules", "all-linear"),
        # agentic_config.py: episodes are counted, and groups are of the environment manager
        (AGENTIC, "rollout.episodes_per_batch", 128),
        (AGENTIC, "training.group_size", 8),
        (AGENTIC, "advantages.baseline", "none"),  # compute_response_level_rewards knows no grpo
        (AGENTIC | {"actor_infer": {"generating_args": {"max_new_tokens": 128}}}, "rollout.max_output_tokens", 128),
        (
            AGENTIC | {"reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"}},
            "advantages.scale",
            "group",
        ),
        (AGENTIC | {"reward_normalization": {"grouping": "batch", "method": "mean"}}, "advantages.baseline", "batch"),
        (AGENTIC | {"reward_normalization": {"grouping": "batch", "method": "mean"}}, "advantages.scale", "none"),
        (AGENTIC | {"reward_normalization": {"norm_mean_type": "group"}}, "advantages.baseline", "group"),
    ],
)
def test_a_setting_means_what_rolls_source_does_with_it(given, key, expected):
    assert value_at(translate("roll", given).values, key) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"gamma": 0.9}, "gamma = 0.9: an episode's return is undiscounted"),
        ({"whiten_rewards": True}, "whiten_rewards = True: rewards of tokens are not whitened here"),
        ({"use_topr_loss": True}, "use_topr_loss = True: belongs to a loss that is not here"),
        ({"add_token_level_kl": True, "kl_penalty": "mse"}, "kl_penalty = 'mse': the penalty is log(old / reference)"),
        ({"actor_train": {"pg_variant": "topr"}}, "actor_train = {'pg_variant': 'topr'}: "),  # it was lost in silence
        ({"rewards": {"math": {}}}, "rewards = {'math': {}}: the environment rewards"),
    ],
)
def test_what_roll_has_and_we_have_not_is_named_with_its_reason(given, reason):
    (line,) = translate("roll", given).left_out
    assert line.startswith(reason)


def test_a_file_in_which_rolls_own_defaults_are_written_out_has_nothing_left_out():
    given = {"gamma": 1, "lambd": 0.95, "use_policy_loss_type": "PPO", "kl_penalty": "kl", "val_n_sample": 1}
    assert translate("roll", given, Wanted(env="GuessNumber")).left_out == ()


def test_a_pattern_of_modules_is_refused():
    with pytest.raises(ConfigError, match="lora_target: a pattern has no counterpart"):
        translate("roll", {"lora_target": ".*_proj$"})
