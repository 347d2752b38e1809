"""No key is accepted and ignored: for every leaf key, another value changes what is built.

What is built is looked at here as a whole: the plan, the limits, the settings that the learner, the warm-up and the
engine's players are given, the policy's own weights, the environment. What each of those does is tested beside it.
"""

import asyncio

import pytest
from pydantic import BaseModel

from gspo_gym import build
from gspo_gym.config import RunConfig
from gspo_gym.env.registry import make

BASE = {
    "algorithm": {"variety": "gspo_token"},
    "model": {"base": "tiny:qwen3-64", "label": "effects", "trainer_mode": "lora"},
    "rollout": {
        "env_name": "GuessNumber",
        "max_turns": 4,
        "max_output_tokens": 3,
        "max_model_len": 256,
        "episodes_per_batch": 16,
    },
    "training": {"iterations_per_epoch": 4, "group_size": 4, "batch_size": 8, "learning_rate": 1e-3},
    "optimizer": {"schedule": "cosine"},
    "evaluation": {"seeds": "0:4"},
    "warmup": {"num_episodes": 16, "learning_rate": 1e-3},
}

# Every leaf key with another value, and what else has to change for that value to be valid.
OTHER = {
    "run.seed": (1, {}),
    "run.folder": ("elsewhere", {}),
    "algorithm.variety": ("grpo", {}),
    "model.base": ("tiny:qwen3-128", {}),
    "model.trainer_mode": ("full", {}),
    "model.label": ("other", {}),
    "model.dtype": ("bfloat16", {}),
    "model.device": ("cuda", {}),
    "rollout.env_name": ("FrozenLake", {"warmup": {"policy": "reference"}}),
    "rollout.env_config": ({"high": 5}, {}),
    "rollout.max_turns": (3, {}),
    "rollout.max_output_tokens": (2, {}),
    "rollout.max_model_len": (128, {}),
    "rollout.temperature": (0.7, {}),
    "rollout.episodes_per_batch": (32, {}),
    "rollout.max_concurrent_rollouts": (5, {}),
    "limits.step_timeout_seconds": (1.0, {}),
    "limits.episode_timeout_seconds": (2.0, {}),
    "limits.max_attempts": (1, {}),
    "limits.min_group_fraction": (0.5, {}),
    "training.num_epochs": (2, {}),
    "training.iterations_per_epoch": (5, {}),
    "training.group_size": (8, {}),
    "training.batch_size": (4, {}),
    "training.update_epochs": (2, {}),
    "training.learning_rate": (2e-3, {}),
    "training.max_tokens_per_microbatch": (512, {}),
    "training.scoring_chunk_tokens": (64, {}),
    "training.max_nonfinite_steps": (1, {}),
    "training.log_interval": (2, {}),
    "training.checkpoint_every_n_iters": (7, {}),
    "training.stop_at_success_rate": (0.5, {}),
    "training.lora.r": (8, {}),
    "training.lora.alpha": (16.0, {}),
    "training.lora.target_modules": (["q_proj"], {}),
    "loss.unit": ("turn", {}),
    "loss.clip_low": (1e-3, {}),
    "loss.clip_high": (1e-3, {}),
    "loss.kl_coef": (0.1, {}),
    "advantages.level": ("trajectory", {}),
    "advantages.normalize_std": (False, {}),
    "advantages.discount": (0.9, {}),
    "optimizer.betas": ([0.8, 0.9], {}),
    "optimizer.eps": (1e-6, {}),
    "optimizer.weight_decay": (0.1, {}),
    "optimizer.max_grad_norm": (0.5, {}),
    "optimizer.num_warmup_steps": (2, {}),
    "optimizer.schedule": ("constant", {}),
    "optimizer.min_lr_fraction": (0.5, {}),
    "evaluation.instances": (4, {"evaluation": {"seeds": None}}),
    "evaluation.seeds": ("1:5", {}),
    "evaluation.every_n_iters": (3, {}),
    "evaluation.temperature": (0.5, {}),
    "warmup.policy": ("reference", {}),
    "warmup.num_episodes": (8, {}),
    "warmup.num_epochs": (2, {}),
    "warmup.learning_rate": (2e-3, {}),
    "warmup.batch_size": (16, {}),
}

# Keys with a single legal value: they state what the run is, and any other value is refused (test_config.py).
ONE_VALUE = {"algorithm.type", "algorithm.method", "rollout.engine"}


def leaves(model, prefix=""):
    for name, field in model.model_fields.items():
        inner = next((t for t in (field.annotation, *getattr(field.annotation, "__args__", ())) if is_section(t)), None)
        if inner is None:
            yield prefix + name
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def is_section(annotation):
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def changed(key, value, more):
    values = {section: dict(keys) for section, keys in BASE.items()}
    *path, name = key.split(".")
    section = values.setdefault(path[0], {})
    if len(path) == 2:
        section = section.setdefault(path[1], {})
    section[name] = value
    for other, keys in more.items():
        values.setdefault(other, {}).update(keys)
    return RunConfig.from_dict({s: {k: v for k, v in keys.items() if v is not None} for s, keys in values.items()})


def what_is_built(config):
    if config.model.device == "cuda":
        return "a policy on the GPU, or a refusal where there is none"
    policy = build.build_policy(config)
    player = build.build_player(config, policy)
    try:
        learner = build.build_learner(config, policy)
        pool = build.build_pool(config, player.renderers, act=None, seed_name="rollout")
        warmup_pool, warmup_plan = build.build_warmup(config, player)
        policy_of_warmup = warmup_pool._act._make_policy
        evaluator = build.build_evaluation_actor(config, player)
    finally:
        asyncio.run(player.engine.close())
    env = make(config.rollout.env_name, **config.rollout.env_config)
    weights = [(name, p.dtype, p.requires_grad, p.double().sum().item()) for name, p in policy.model.named_parameters()]
    adapter = getattr(policy.model, "peft_config", None)
    return (
        build.build_plan(config),
        (pool._episode_limits, pool._pool_limits, pool._run_seed, type(env), env.reset(seed=0)[0]),
        (
            learner._loss,
            learner._settings,
            learner._optimizer._settings,
            learner._optimizer._total_steps,
            learner._seed,
        ),
        (learner._scorer.temperature, evaluator._temperature, config.evaluation_seeds, config.run_folder),
        (warmup_plan, policy_of_warmup, player.engine.capabilities),
        (weights, adapter and [(c.r, c.lora_alpha, sorted(c.target_modules)) for c in adapter.values()]),
    )


@pytest.fixture(scope="module")
def built():
    return what_is_built(RunConfig.from_dict(BASE))


def test_every_leaf_key_is_tried():
    assert set(leaves(RunConfig)) == set(OTHER) | ONE_VALUE


def test_the_same_config_builds_the_same_things(built):
    assert what_is_built(RunConfig.from_dict(BASE)) == built


@pytest.mark.parametrize("key", sorted(set(OTHER) - {"evaluation.instances"}))
def test_another_value_builds_something_else(key, built):
    assert what_is_built(changed(key, *OTHER[key])) != built


def test_instances_alone_count_from_seed_0():
    assert changed("evaluation.instances", *OTHER["evaluation.instances"]).evaluation_seeds == (0, 1, 2, 3)
