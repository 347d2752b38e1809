"""A wrong value is named with what was expected and what came, and everything that is wrong is named at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

SINKS = '"wandb", "tensorboard", "trackio" or "mlflow"'
Problems = Callable[[dict[str, Any]], list[str]]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("run.seed", -1, "expected an integer >= 0, got -1"),
        ("run.seed", True, "expected an integer >= 0, got true"),
        ("run.seed", 1.0, "expected an integer >= 0, got 1.0"),
        ("run.folder", "", 'expected a non-empty string, got ""'),
        ("run.folder", "a\0b", 'expected a text without the character NUL, got "a\\u0000b"'),
        ("run.log_episodes_every_n_iters", -1, "expected an integer >= 0, got -1"),
        ("run.stop_grace_seconds", 0, "expected a number > 0, got 0"),
        ("algorithm.type", "offline", 'expected "online", got "offline"'),
        ("algorithm.method", "gspo", 'expected "policy_gradient" or "ppo", got "gspo"'),
        ("algorithm.variety", "gsp", 'expected "gspo", "gspo_token" or "grpo", got "gsp"'),
        ("algorithm.acknowledge", ["all"], 'expected a list of "length_weighting", "wide_clip" or '
                                           '"truncated_sampling", got ["all"]'),
        ("services.task_url", "localhost:80", "expected a URL that begins with http:// or https:// and holds no "
                                              "user or password"),
        ("services.judge_url", "https://me:pw@x.org", "expected a URL that begins with http:// or https:// and holds "
                                                      "no user or password"),
        ("compute", {"gpu_count": "2"}, 'expected an integer >= 0, got "2"'),
        ("compute", {}, "required, but not given: expected an integer >= 0 (GPUs in all; 0: the processor, although "
                        "there may be GPUs)"),
        ("reference.placement", "cpu", 'expected "none", "shared" or "dedicated", got "cpu"'),
        ("reference.port", 0, "expected a number > 0, got 0"),
        ("model.base", ..., "required, but not given: a hub id, a folder, or tiny:NAME (or model.source, an earlier "
                            "run)"),
        ("model.base", 7, "expected a non-empty string, got 7"),
        ("model.label", "a/b", "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a "
                               "folder), got 'a/b'"),
        ("model.label", "..", "expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first (it names a "
                              "folder), got '..'"),
        ("model.dtype", "float16", 'expected "float32" or "bfloat16", got "float16"'),
        ("model.trainer_mode", "lorra", 'expected "full", "lora" or "qlora", got "lorra"'),
        ("rollout.max_turns", "8", 'expected an integer > 0, got "8"'),
        ("rollout.max_model_len", 1, "expected an integer > 1, got 1"),
        ("rollout.temperature", 0, "expected a number > 0, got 0"),
        ("rollout.temperature", float("nan"), "expected a number > 0, got NaN"),
        ("rollout.top_p", 1.5, "expected a number > 0 and <= 1, got 1.5"),
        ("rollout.env_config", 3, "expected a table, got 3"),
        ("services.engine_urls", ["localhost:80"],
         "expected a URL that begins with http:// or https:// and holds no user or password"),
        ("services.engine_urls", ["http://a", "http://a/"], "names a server twice: http://a, http://a"),
        ("rollout.engine", "sglang", 'expected "local", "vllm" or "http", got "sglang"'),
        ("rollout.ops", ["env"], 'expected "agent" and "env" in turns, "agent" first, got ["env"]'),
        ("rollout.ops", ["agent"], 'expected "agent" and "env" in turns, "agent" first, got ["agent"]'),
        ("rollout.ops", ["wait"], 'expected "agent" and "env" in turns, "agent" first, got ["wait"]'),
        ("rollout.policy_config.chat_template_kwargs", 0, "expected a table, got 0"),
        ("training.max_turn", 1, "unknown key; did you mean 'max_turns'?"),
        ("rollout.learning_rate", 1, "unknown key; did you mean 'training.learning_rate' or 'warmup.learning_rate'?"),
        ("training.stop_at_success_rate", 1.5, "expected a number > 0 and <= 1, got 1.5"),
        ("training.group_size", 0, "expected an integer > 0, got 0"),
        ("training.learning_rate", 0.0, "expected a number > 0 and <= 1, got 0.0"),
        ("training.stop_at_success_rate", 1.01, "expected a number > 0 and <= 1, got 1.01"),
        ("training.lora", 5, "expected a table, got 5"),
        ("training.constant_groups", "skip", 'expected "keep", "drop" or "refill", got "skip"'),
        ("training.step_rewards_mode", "on", 'expected "off", "decision_stepwise" or "env_sparse", got "on"'),
        ("training.step_rewards_strategy", "per_decision", 'expected "consistent" or "per_achievement", got '
                                                           '"per_decision"'),
        ("training.event_rewards_kind", "all", 'expected "unique" or "absolute", got "all"'),
        ("training.step_rewards_weights", {"a": "x"}, 'expected a table of numbers, got {"a": "x"}'),
        ("training.step_rewards_k_limits", {"a": 1.5}, 'expected a table of integers, got {"a": 1.5}'),
        ("training.weight_sync.targets", ["judge"], 'expected ["policy"], which is all that samples, got ["judge"]'),
        ("loss.kl_coef", float("inf"), "expected a number >= 0, got Infinity"),
        ("loss.unit", "sequence", 'expected "trajectory", "segment", "turn" or "token", got "sequence"'),
        ("loss.dual_clip", 1, "expected a number > 1, got 1"),
        ("optimizer.betas", [0.9], "expected a list of 2 numbers, got [0.9]"),
        ("optimizer.betas", [0.9, 1.0], "expected a list of 2 numbers, each < 1, got [0.9, 1.0]"),
        ("optimizer.betas", [0.9, "x"], 'expected a list of 2 numbers, got [0.9, "x"]'),
        ("optimizer.warmup_steps", -1, "expected an integer or a number >= 0, got -1"),
        ("tracking.report_to", ["comet"], f'expected a list of {SINKS}, got ["comet"]'),
        ("tracking.report_to", "wandb", f'expected a list of {SINKS}, got "wandb"'),
        ("judge.options.provider", "anthropic", 'expected "openai", "groq", "gemini" or "local", got "anthropic"'),
        ("judge.options.rubric_overrides", {"turn": {}}, "expected tables event and outcome, got 'turn'"),
        ("judge.reward_blend.event", -0.1, "expected a number >= 0, got -0.1"),
        ("evaluation.seeds", [1.5], "expected a list of integers or a string, got [1.5]"),
        ("evaluation.seeds", "0:x", "expected \"start:stop\", \"start:stop:step\" or a number, got '0:x'"),
        ("evaluation.seeds", [1, 1], "1 occurs more than once in [1, 1]"),
        ("evaluation.seeds", [], "[] names no seed"),
        ("evaluation.seeds", [2**31], "expected seeds below 2**31 (from there up they are trained on), got 2147483648"),
        ("evaluation.seeds", "0:9999999999", "expected at most 1000000 at once, got 9999999999 in '0:9999999999'"),
        ("training", 5, "expected a table, got 5"),
        ("trainig", {}, "unknown section; did you mean 'training'?"),
        ("group_size", 8, "unknown key; did you mean 'training.group_size'?"),
        ("report_to", "wandb", "unknown key; did you mean 'tracking.report_to'?"),
        ("training.report_to", "wandb", "unknown key; did you mean 'tracking.report_to'?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_was_expected(key: str, value: Any, problem: str, problems: Problems) -> None:
    named = "compute.gpu_count" if key == "compute" else key
    assert problems({key: value}) == [f"{named}: {problem}"]


@pytest.mark.parametrize(
    "source", ["", "a/b", "ft:", "ft:a:step", "ft:a:b:step_1", "x:a:step_0001", "ft:a:step_1:", ".hidden"]
)
def test_a_source_names_a_run_and_at_most_a_checkpoint(source: str, problems: Problems) -> None:
    text = f'expected "LABEL", "ft:LABEL" or "ft:LABEL:step_000100", got {source!r}'
    assert problems({"model.base": ..., "model.source": source}) == [f"model.source: {text}"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"advantages.discount": 0.5},
            "advantages.discount: discount is used at level 'turn' only (an episode's return is undiscounted), got 0.5 "
            "at level 'trajectory'",
        ),
        (
            {"loss.norm_length": 7},
            "loss.norm_length: has no effect with aggregation 'seq-mean-token-mean'; remove it",
        ),
        (
            {"loss.kl_clamp": 5.0},
            "loss.kl_clamp: has no effect, because kl_coef is 0 (no such term); remove it or set kl_coef",
        ),
        (
            {"algorithm.variety": "grpo", "loss.aggregation": "dr_grpo"},
            "loss.norm_length: aggregation 'dr_grpo' divides by it, got none",
        ),
        (
            {"correction.level": "token", "correction.old_logprobs": "rollout"},
            "correction.level: 'token' compares recomputed old logprobs with the engine's, but old_logprobs is "
            "'rollout': set one of them to its default",
        ),
        (
            {"rewards.kl_target": 0.1},
            "rewards.kl_target: adapts kl_coef, which is 0 and would stay 0; set kl_coef or remove kl_target",
        ),
        (
            {"judge.options.weights": {"a": 0.0}},
            "judge.options.weights: expected one weight > 0 at least, got zeros only",
        ),
        ({"judge.options.weights": {"a": -1.0}}, "judge.options.weights: expected numbers >= 0, got {'a': -1.0}"),
    ],
)  # fmt: skip
def test_a_contradiction_within_a_section_names_its_key(
    changes: dict[str, Any], problem: str, problems: Problems
) -> None:
    assert problems(changes) == [problem]


@pytest.mark.parametrize("value", [None, object(), {"x": None}, [1, None], {1: 2}])
@pytest.mark.parametrize("key", ["rollout.env_config", "rollout.policy_config.chat_template_kwargs"])
def test_free_tables_hold_only_what_the_recorded_configuration_can_hold(
    key: str, value: Any, problems: Problems
) -> None:
    (line,) = problems({key: {"argument": value}})
    assert line.startswith(f"{key}: expected values that TOML can hold (config.toml will hold them)")


def test_everything_that_is_wrong_is_reported_at_once_values_and_contradictions(problems: Problems) -> None:
    changes = {
        "model.base": ...,
        "model.label": "x y",
        "rollout.max_turns": None,
        "training.group_size": 7,
        "training.batch_size": 60,
        "training.lora": {"rank": 4},
        "training.num_generations": 8,
        "optimizer.eps": "small",
        "optimizer.min_lr_fraction": 0.3,
        "evaluation.seeds": "0:3",
        "vlm": {"max_model_len": 10},
    }
    assert [line.split(": ")[0] for line in problems(changes)] == [
        "model.label",
        "rollout.max_turns",
        "training.lora.rank",
        "training.num_generations",
        "optimizer.eps",
        "vlm",
        "rollout.episodes_per_batch",
        "training.batch_size",
        "model.base",
        "training.lora",
        "optimizer.min_lr_fraction",
    ]


def test_a_rule_is_silent_where_one_of_its_keys_is_wrong_itself(problems: Problems) -> None:
    assert problems({"training.group_size": "six"}) == ['training.group_size: expected an integer > 0, got "six"']


@pytest.mark.parametrize(
    ("key", "variable"),
    [
        ("judge.options.openai_api_key", "OPENAI_API_KEY"),
        ("judge.api_key", "JUDGE_API_KEY"),
        ("services.api_key", "ENVIRONMENT_API_KEY"),
        ("services.environment_api_key", "ENVIRONMENT_API_KEY"),
        ("tracking.wandb_api_key", "WANDB_API_KEY"),
        ("tracking.api_key", "WANDB_API_KEY"),
        ("rollout.env_config.password", "PASSWORD"),
        ("rollout.env_config.deep.hf_token", "HF_TOKEN"),
        ("GROQ_API_KEY", "GROQ_API_KEY"),
        ("run.tags.token", "TOKEN"),
        ("run.tags.wandb-api-key", "WANDB_API_KEY"),
    ],
)
def test_a_secret_is_refused_without_showing_it(key: str, variable: str, problems: Problems) -> None:
    (line,) = problems({key: "zq81-very-secret"})
    assert line == (
        f"{key}: a secret does not belong into a configuration, which is copied beside the run: set the environment "
        f"variable {variable}"
    )


def test_a_value_that_looks_like_a_key_is_refused_whatever_its_name(problems: Problems) -> None:
    (line,) = problems({"rollout.env_config": {"credential": "sk-0123456789abcdef0123"}})
    assert line.startswith("rollout.env_config.credential: a secret does not belong")
    assert "0123456789" not in line


def test_names_that_only_sound_like_secrets_are_fine(make: Callable[..., Any]) -> None:
    config = make({"rollout.env_config": {"max_tokens": 3, "num_token": 1, "keys": "abc", "secretary": "x"}})
    assert len(config.rollout.env_config) == 4


@pytest.mark.parametrize(
    "value", ["sk-zq81{}", ["fine", "sk-zq81{}"], "my key is sk-zq81{} or so", {"deep": ["hf_zq81{}"]}]
)
def test_a_key_is_refused_wherever_it_stands_in_the_tags_of_a_run(value: object, problems: Problems) -> None:
    secret = json.loads(json.dumps(value).replace("{}", "abcdefghijklmnop"))
    (line,) = problems({"run.tags": {"note": secret}})
    assert line.startswith("run.tags.note")
    assert ": a secret does not belong into a configuration" in line
    assert "zq81" not in line
