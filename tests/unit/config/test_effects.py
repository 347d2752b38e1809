"""No key is accepted and ignored: for every leaf key, another value changes what is built, or a named test shows what.

What is built is looked at here as a whole: the plan, the limits, the settings that the learner, the warm-up and the
engine's players are given, the policy's own weights, the environment, where metrics go. A refusal is an answer, too:
on a machine without a GPU, asking for one is an error. What each of those parts does is tested beside it.
"""

import ast
import asyncio
import copy
import functools
import inspect
import json
import re
from pathlib import Path

import pytest
from small_run import small_run

from gspo_gym.config.build import rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.reference import entries_of, leaf_keys
from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.services import missing_machinery
from gspo_gym.env.registry import make
from gspo_gym.errors import GymError
from gspo_gym.judge.settings import PanelEntry
from gspo_gym.policy.manifest import RetentionSettings

ROOT = Path(__file__).parents[3]

BASE = small_run(
    algorithm={"variety": "gspo_token"},
    model={"label": "effects", "trainer_mode": "lora"},
    rollout={"episodes_per_batch": 16},
    training={"iterations_per_epoch": 4, "batch_size": 8},
    optimizer={"schedule": "cosine"},
    warmup={"num_episodes": 16, "learning_rate": 1e-3},
)
DECISIONS = {"training.step_rewards_mode": "decision_stepwise"}
ACHIEVEMENTS = {**DECISIONS, "training.step_rewards_strategy": "per_achievement"}
KL = {"loss.kl_coef": 0.1}
TAUGHT = {"distillation.teacher": "tiny:qwen3-64"}
TAUGHT_ELSEWHERE = {"distillation.teacher": "http://127.0.0.1:9/v1"}
FORKED = {"advantages.level": "trajectory", "advantages.baseline": "leave_one_out", "advantages.scale": "none"}
MEANT = {"algorithm.acknowledge": ["truncated_sampling"], "rollout.top_k": 7}
WANDB = {"tracking.report_to": ["wandb"]}

# Keys with another value, and what else must be said for it to be valid; the comparison is with that alone.
OTHER = {
    "run.seed": (1, {}),
    "run.folder": ("elsewhere", {}),
    "run.tags": ({"a": True, "b": 1}, WANDB),
    "run.log_episodes_every_n_iters": (0, {}),
    "run.log_tokens_every_n_iters": (1, {}),
    "algorithm.variety": ("grpo", {}),
    "compute.gpu_count": (1, {"compute.gpu_count": 0}),
    "model.base": ("tiny:qwen3-128", {}),
    "model.chat_template": (str(ROOT / "tests/unit/chat/templates/chatml.jinja"), {}),
    "model.template_date": ("2024-07-26", {}),
    "model.trainer_mode": ("full", {}),
    "model.label": ("other", {}),
    "model.dtype": ("bfloat16", {}),
    "model.quantization": ("int8", {"model.trainer_mode": "qlora"}),
    "model.attn_implementation": ("eager", {}),
    "model.gradient_checkpointing": (True, {}),
    "model.torch_compile": (True, {}),
    "model.liger_kernels": (True, {}),
    "rollout.env_name": ("FrozenLake", {"warmup.policy": "reference"}),
    "rollout.env_config": ({"high": 5}, {}),
    "rollout.isolation": ("process", {}),
    "rollout.env_memory_limit_mb": (0, {}),
    "rollout.env_variables": (["NLTK_DATA"], {}),
    "rollout.policy_config.system_prompt": ("Be brief.", {}),
    "rollout.policy_config.chat_template_kwargs": ({"enable_thinking": False}, {}),
    "rollout.tools_in": ("system_message", {}),
    "rollout.max_turns": (3, {}),
    "rollout.max_output_tokens": (2, {}),
    "rollout.min_output_tokens": (1, {}),
    "rollout.max_model_len": (128, {}),
    "rollout.temperature": (0.7, {}),
    "rollout.top_p": (0.7, MEANT),
    "rollout.top_k": (5, MEANT),
    "rollout.min_p": (0.2, MEANT),
    "rollout.repetition_penalty": (1.2, MEANT),
    "rollout.episodes_per_batch": (32, {}),
    "rollout.forks_per_episode": (1, FORKED),
    "rollout.max_concurrent_rollouts": (5, {}),
    "limits.step_timeout_seconds": (1.0, {}),
    "limits.episode_timeout_seconds": (2.0, {}),
    "training.num_epochs": (2, {}),
    "training.iterations_per_epoch": (5, {}),
    "training.max_turns": (2, {}),
    "training.group_size": (8, {}),
    "training.batch_size": (4, {}),
    "training.update_epochs": (2, {}),
    "training.learning_rate": (2e-3, {}),
    "training.max_tokens_per_microbatch": (512, {}),
    "training.share_prefixes": (False, {}),
    "training.log_interval": (2, {}),
    "training.checkpoint_every_n_iters": (7, {}),
    "training.stop_at_success_rate": (0.5, {}),
    "training.constant_groups": ("drop", {}),
    "training.max_staleness": (1, {"correction.old_logprobs": "rollout"}),
    "training.adaptive_tasks": (5, {}),
    "training.step_rewards_mode": ("off", {}),
    "training.step_rewards_beta": (0.1, DECISIONS),
    "training.step_rewards_indicator_lambda": (0.1, DECISIONS),
    "training.step_rewards_strategy": ("consistent", DECISIONS),
    "training.step_rewards_weights": ({"win": 2.0}, ACHIEVEMENTS),
    "training.step_rewards_k_limits": ({"win": 2}, ACHIEVEMENTS),
    "training.event_rewards_kind": ("absolute", DECISIONS),
    "training.lora.r": (8, {}),
    "training.lora.alpha": (16.0, {}),
    "training.lora.dropout": (0.1, {}),
    "training.lora.target_modules": (["q_proj"], {}),
    "loss.unit": ("turn", {}),
    "loss.surrogate": ("cispo", {}),
    "loss.sapo_temperatures": ([1.0, 2.0], {"loss.surrogate": "sapo"}),
    "loss.aggregation": ("turn-mean-token-mean", {}),
    "loss.norm_length": (
        9, {"loss.aggregation": "dr_grpo", "loss.norm_length": 8, "algorithm.acknowledge": ["length_weighting"]}
    ),
    "loss.clip_low": (1e-3, {}),
    "loss.clip_high": (1e-3, {}),
    "loss.dual_clip": (2.0, {}),
    "loss.kl_coef": (0.1, {}),
    "loss.kl_estimator": ("k2", KL),
    "loss.kl_clamp": (5.0, KL),
    "loss.kl_importance_weighted": (True, KL),
    "loss.entropy_coef": (0.1, {}),
    "advantages.level": ("auto", {}),
    "advantages.baseline": ("group", {}),
    "advantages.scale": ("none", {}),
    "advantages.discount": (0.9, {}),
    "advantages.whiten": ("tokens", {}),
    "advantages.clip": (2.0, {}),
    "advantages.filter_eps": (0.0, {}),
    "advantages.kl_shaping_coef": (0.1, {}),
    "rewards.clip": (1.0, {}),
    "rewards.overlong": ("mask", {}),
    "rewards.kl_coef": (0.1, {}),
    "rewards.kl_target": (0.1, {"rewards.kl_coef": 0.1}),
    "correction.old_logprobs": ("rollout", {}),
    "correction.level": ("token", {}),
    "correction.mode": ("mask", {"correction.level": "token"}),
    "correction.low": (0.1, {"correction.level": "token", "correction.mode": "mask"}),
    "correction.high": (3.0, {"correction.level": "token"}),
    "correction.off_policy_threshold": (0.1, {}),
    "reference.source": ("copy", KL),
    "reference.update_every_n_iters": (2, {**KL, "reference.source": "adapter"}),
    "distillation.teacher": ("tiny:qwen3-64", {}),
    "distillation.feedback": ("environment", {"distillation.teacher": "self", "distillation.feedback": "sibling"}),
    "distillation.teacher_model": ("big", TAUGHT_ELSEWHERE),
    "distillation.teacher_tokenizer": ("tiny:qwen3-64", TAUGHT_ELSEWHERE),
    "distillation.api_key_env": ("A_KEY", TAUGHT_ELSEWHERE),
    "distillation.coefficient": (0.5, TAUGHT),
    "distillation.divergence": ("reverse_kl", TAUGHT),
    "distillation.baseline": (True, TAUGHT),
    "distillation.reward": (False, TAUGHT),
    "optimizer.kind": ("adamw", {}),
    "optimizer.betas": ([0.8, 0.9], {}),
    "optimizer.eps": (1e-6, {}),
    "optimizer.weight_decay": (0.1, {}),
    "optimizer.max_grad_norm": (0.5, {}),
    "optimizer.warmup_steps": (2, {}),
    "optimizer.schedule": ("constant", {}),
    "optimizer.min_lr_fraction": (0.5, {}),
    "evaluation.seeds": ("1:5", {}),
    "evaluation.every_n_iters": (3, {}),
    "evaluation.temperature": (0.5, {}),
    "warmup.policy": ("reference", {}),
    "warmup.num_episodes": (8, {}),
    "warmup.num_epochs": (2, {}),
    "warmup.learning_rate": (2e-3, {}),
    "warmup.batch_size": (16, {}),
    "tracking.report_to": (["tensorboard"], {}),
    "tracking.wandb_project": ("mine", WANDB),
}  # fmt: skip

# Keys of machinery that is not in this version: a run with them is refused, and says why.
REFUSED = {
    "compute.nodes": (2, {"compute.gpu_count": 0}),
}

# Keys whose effect another test shows, and why it cannot be seen here.
RULES = "tests/unit/config/rules/test_rules.py::"
ENGINES = "tests/unit/config/build/test_engines.py::"
APPS = "tests/unit/config/build/test_apps.py::"
SYNC = "tests/unit/config/build/test_weight_sync_settings.py::"
SHOWN_BY = {
    "evaluation.samples_per_task": "tests/unit/cli/test_evaluate_save.py::"
    "test_a_suite_goes_on_where_it_was_interrupted_and_is_one_table",
    "run.stop_grace_seconds": "tests/unit/run/test_stopping.py::test_a_run_that_hangs_leaves_when_its_grace_is_over",
    # they decide what is refused
    "algorithm.acknowledge": RULES + "test_a_contradiction_is_named_on_both_sides",
    # they need a task app
    "services.task_url": APPS + "test_an_app_is_asked_for_what_the_configuration_says",
    **dict.fromkeys(
        ("gateway.address", "gateway.public_url"),
        APPS + "test_the_gateway_listens_and_is_told_of_where_the_section_says",
    ),
    **dict.fromkeys(
        (
            "rollout.mixture",
            "rollout.mixture.env_name",
            "rollout.mixture.share",
            "rollout.mixture.env_config",
            "rollout.mixture.task_url",
        ),
        APPS + "test_a_mixed_run_trains_and_evaluates_on_every_environment",
    ),
    "rollout.mixture.api_key_env": APPS + "test_each_app_of_a_mixture_is_sent_its_own_key",
    # they need a server, or vLLM
    "rollout.engine": ENGINES + "test_an_endpoint_samples_and_its_weights_stay_its_own",
    "services.engine_urls": ENGINES + "test_several_urls_share_the_work",
    "services.engine_model": ENGINES + "test_an_endpoint_is_asked_for_the_model_that_is_named_or_the_base",
    "rollout.rescore": "tests/unit/run/test_rescored_runs.py::test_every_record_says_who_sampled",
    **{
        f"vllm.{name}": ENGINES + "test_each_key_of_vllm_reaches_its_settings"
        for name in (
            "tensor_parallel_size",
            "max_model_len",
            "dtype",
            "gpu_memory_utilization",
            "sleep_while_learning",
            "kv_cache_gib",
        )
    },
    # they need several devices
    **dict.fromkeys(
        ("topology.gpus_for_vllm", "topology.gpus_for_ref", "topology.tensor_parallel"),
        "tests/unit/config/test_devices.py::test_each_part_has_the_gpus_that_the_table_says",
    ),
    **dict.fromkeys(
        ("topology.heartbeat_seconds", "topology.group_timeout_seconds", "topology.max_restarts"),
        "tests/cluster/test_learner_ranks.py::test_the_settings_bound_how_long_and_how_often_ranks_are_waited_for",
    ),
    **dict.fromkeys(
        ("learner.sequence_parallel", "learner.compute_dtype"),
        "tests/cluster/test_learner_ranks.py::test_the_section_of_the_learner_reaches_its_ranks",
    ),
    **dict.fromkeys(
        ("topology.type", "topology.gpus_for_training"),
        "tests/unit/config/build/test_processes.py::test_the_ray_that_is_joined_is_the_environments",
    ),
    # they need a device, an earlier run, or a whole run
    "compute.gpu_type": "tests/unit/config/test_services.py::test_another_gpu_than_the_one_that_is_named_is_an_error",
    "model.revision": "tests/unit/policy/test_revisions.py::test_a_revision_after_an_at_sign_is_the_one_that_is_loaded",
    "model.source": "tests/unit/config/test_services.py::"
    "test_a_source_is_the_last_checkpoint_of_a_run_or_the_one_that_it_names",
    "rollout.policy_name": "tests/unit/run/test_run_settings.py::test_a_run_records_who_played_and_what_it_was_told",
    # they need an engine that is sent its weights
    "training.weight_sync_interval": SYNC + "test_weights_are_sent_every_interval_iterations",
    "training.weight_sync.mode": ENGINES + "test_an_adapter_is_merged_for_vllm_on_a_processor_unless_mode_is_direct",
    "training.weight_sync.direct": SYNC + "test_direct_goes_through_memory_and_otherwise_through_the_runs_folder",
    "training.weight_sync.verify_every_k": SYNC + "test_checksums_are_compared_every_kth_update_and_by_default_never",
    "correction.max_engine_gap": SYNC + "test_a_given_gap_is_the_alarms_limit",
    # they need a server
    "reference.placement": "tests/cluster/test_reference.py::test_a_dedicated_reference_trains_to_the_same_weights",
    # they need a judge
    **dict.fromkeys(
        ("services.judge_url", *(key for key in leaf_keys() if key.startswith("judge."))),
        "tests/unit/config/build/test_judge.py::test_another_value_builds_another_judge",
    ),
    **dict.fromkeys(
        (f"judge.panel.{name}" for name in PanelEntry.model_fields),
        "tests/unit/config/build/test_judge.py::test_another_value_of_a_member_builds_another_panel",
    ),
    # they need an earlier run
    **dict.fromkeys(
        ("run.restore", "run.restore_from"),
        "tests/unit/run/test_restored_runs.py::test_a_run_that_begins_with_all_of_another_ends_with_its_weights",
    ),
    # they decide what stays on the disk
    **dict.fromkeys(
        (f"training.{name}" for name in RetentionSettings.model_fields),
        "tests/unit/run/test_run.py::test_a_run_keeps_its_newest_and_its_best_checkpoints",
    ),
}


def changed(changes):
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        *above, name = key.split(".")
        table = values
        for part in above:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(name, None)
        else:
            table[name] = copy.deepcopy(value)
    return RunConfig.from_dict(values)


@functools.cache
def policy_of(text):
    """The policy, which depends on these settings only: building it is most of the time."""
    return build.build_policy(RunConfig.from_dict(json.loads(text)))


def what_is_built(config, monkeypatch):
    try:
        return _what_is_built(config, monkeypatch)
    except GymError as error:
        return str(error)


def _what_is_built(config, monkeypatch):
    monkeypatch.setattr(build, "open_sinks", lambda *names, **settings: (names, settings))
    # compiling takes half a minute, and Liger's kernels a GPU: here it is enough that they are asked for
    monkeypatch.setattr(build, "check_options", lambda **_: None)
    monkeypatch.setattr(build, "prepare_for_training", lambda model, **options: setattr(model, "_options", options))
    relevant = changed(
        {"run.seed": config.run.seed, "model": config.model.model_dump(exclude_none=True) | {"label": "x"}}
        | ({"training.lora": config.training.lora.model_dump()} if config.training.lora else {})
        | ({"compute": config.compute.model_dump(exclude_none=True)} if config.compute else {})
    )
    policy = policy_of(relevant.model_dump_json(exclude_none=True))
    player = asyncio.run(rollouts.build_player(config, policy))
    try:
        learner = build.build_learner(config, policy)
        pool = rollouts.build_training_pool(config, player)
        evaluation_pool = rollouts.build_pool(
            config, rollouts.build_play(config, player, mode="eval"), seed_name="evaluation"
        )
        warmup_pool, warmup_plan = asyncio.run(rollouts.build_warmup(config, player))
    finally:
        asyncio.run(player.engine.close())
    env = make(config.rollout.env_name, **config.rollout.env_config)
    make_env = rollouts.build_environment(config)
    sinks, settings = build.build_sinks(config)
    adapter = getattr(policy.model, "peft_config", None)
    return (
        what_the_trainer_reads(build.build_plan(config)),
        (told(pool)["limits"], pool._pool_limits, pool._run_seed, type(env), env.reset(seed=0)[0], make_env),
        (told(evaluation_pool)["limits"], player.renderers.system_prompt, player.renderers._template_kwargs),
        (player.renderers._tools_in, player.renderers._date, policy.tokenizer.chat_template),
        (learner._loss, learner._settings, learner._correction, learner._reference_settings, learner._seed),
        learner._distillation,
        (learner._shaper._advantages, learner._shaper._rewards, learner._computer.sampling),
        (learner._minibatch_size, learner._optimizer._settings, learner._optimizer._total_steps),
        (plain(told(pool)["act"]), plain(told(evaluation_pool)["act"]), config.evaluation_seeds, config.run_folder),
        (
            warmup_plan.warmup.model_copy(update={"policy": ""}),
            warmup_plan.update,
            told(warmup_pool)["act"]._make_policy,
            player.engine.capabilities,
        ),
        (sinks, {name: value for name, value in settings.items() if name != "config"}),
        [(name, p.dtype, p.requires_grad, p.double().sum().item()) for name, p in policy.model.named_parameters()],
        (policy.model._options, attention_of(policy.model)),
        adapter and [(c.r, c.lora_alpha, c.lora_dropout, sorted(c.target_modules)) for c in adapter.values()],
    )


def attention_of(model):
    """By transformers' name, under an adapter too."""
    return getattr(model, "get_base_model", lambda: model)().config._attn_implementation


def what_the_trainer_reads(plan):
    """The plan without the fields of its records that only others act on, whose effect must be seen there."""
    size = (plan.size.num_iterations, plan.size.groups_per_iteration, plan.size.group_size)
    run = (
        plan.run.seed,
        plan.run.log_episodes_every_n_iters,
        plan.run.log_tokens_every_n_iters,
        plan.evaluation.every_n_iters,
    )
    return (size, run, plan.loop, plan.env_id, plan.mixture, plan.advantages, plan.rewards, plan.step_rewards)


def told(pool):
    """What the pool's player of episodes was told."""
    return inspect.getclosurevars(pool._play_episode).nonlocals


def plain(actor):
    """How an actor samples, without the engine."""
    return {name: value for name, value in vars(actor).items() if name != "_engine"}


def test_every_leaf_key_is_tried_once():
    entries = [f"{name}.{key}" for name, entry in entries_of() for key in entry.model_fields]
    assert sorted([*OTHER, *REFUSED, *SHOWN_BY]) == sorted([*leaf_keys(), *entries])


@pytest.mark.parametrize("key", OTHER)
def test_another_value_builds_something_else(key, monkeypatch):
    value, more = OTHER[key]
    without = what_is_built(changed(more), monkeypatch)
    assert not isinstance(without, str), without
    assert what_is_built(changed({**more, key: value}), monkeypatch) != without


def test_the_same_config_builds_the_same_things(monkeypatch):
    assert what_is_built(changed({}), monkeypatch) == what_is_built(changed({}), monkeypatch)


@pytest.mark.parametrize("key", REFUSED)
def test_what_this_version_cannot_do_is_refused(key):
    value, more = REFUSED[key]
    assert missing_machinery(changed({**more, key: value}).sections)


@pytest.mark.slow
def test_the_test_that_shows_an_effect_speaks_of_the_key():
    """It is there, and its file names the key, or the setting that the key becomes."""
    silent = []
    for key, test in SHOWN_BY.items():
        path, name = test.split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        functions = [node.name for node in ast.walk(ast.parse(text)) if hasattr(node, "name")]
        assert name in functions, test
        leaf = key.rpartition(".")[2]
        if not re.search(rf"\b{leaf}\b", text):
            silent.append(key)
    assert silent == []
