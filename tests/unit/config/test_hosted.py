"""Files as the hosted trainer's public examples are written: `config check` takes them or says what cannot run."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from gspo_gym.cli.main import main
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.services import missing_machinery
from gspo_gym.errors import ConfigError
from gspo_gym.types import Sampling

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "hosted_configs").glob("*.toml"))}

Make = Callable[[dict[str, Any]], RunConfig]
Problems = Callable[[dict[str, Any]], list[str]]

# What truly cannot be done: a policy that sees images.
REFUSED = {
    "crafter_vision_model": "model.supports_vision: supports_vision is of the hosted trainer: policies here read and "
    "write text, so that images are refused: remove it",
}
# Valid, but this version has not the machinery.
MISSING = {
    "enron_judge_off": 'model.trainer_mode = "qlora": vLLM would sample from other weights than the quantized; use '
    '"lora"',
    "swe_eight_gpus": 'reference.placement = "dedicated": topology.gpus_for_training = 3 processes hold the reference '
    'themselves; set "shared"',
}
# Keys that a notice is about.
NOTICED = {
    "crafter_outcome": ["training.step_rewards_strategy", "training.event_rewards_kind"],
    "enron_judge_off": ["judge.reward_blend.env", "judge.reward_blend.outcome"],
    "math_dedicated_reference": ["evaluation.instances", "reference.placement"],
    "math_thinking": ["rollout.policy_config"],
    "sokoban_react": ["training.step_rewards_strategy", "training.event_rewards_kind"],
    "swe_eight_gpus": ["reference.placement"],
    "verilog_judge_bundle": ["training.max_turns", "rollout.policy_config"],
}


def test_the_tables_name_files_that_there_are() -> None:
    assert {*REFUSED, *MISSING, *NOTICED} <= set(FILES)


@pytest.mark.parametrize("name", sorted(set(FILES) - set(REFUSED)))
def test_a_hosted_file_is_valid_and_what_has_no_effect_is_said(name: str) -> None:
    config = load_config(FILES[name])
    assert [notice.key for notice in config.notices] == NOTICED.get(name, [])
    assert missing_machinery(config.sections) == ([MISSING[name]] if name in MISSING else [])


@pytest.mark.parametrize("name", sorted(set(FILES) - set(REFUSED)))
def test_a_hosted_file_reads_back_from_the_runs_folder_as_it_was(name: str) -> None:
    config = load_config(FILES[name])
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_here_is_refused_and_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(FILES[name])
    assert str(caught.value) == f"{FILES[name]}: {REFUSED[name]}"


@pytest.mark.parametrize("name", FILES)
def test_config_check_takes_a_file_that_can_run_and_no_other(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["config", "check", "--elsewhere", str(FILES[name])])
    assert status == (2 if name in REFUSED else 1 if name in MISSING else 0)
    notes = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note for note in notes if " " not in note] == NOTICED.get(name, [])


def test_names_of_choices_may_have_any_case_and_all_other_texts_keep_theirs() -> None:
    config = load_config(FILES["math_any_case"])
    assert config.algorithm.variety == "gspo"
    assert config.model.trainer_mode == "lora"
    assert config.training.lora is not None, "the default that follows from the mode follows from LoRA, too"
    assert config.training.step_rewards_mode == "off"
    assert config.model.base == "Qwen/Qwen3-4B"


def test_a_name_that_is_no_choice_in_any_case_stays_an_error(problems: Problems) -> None:
    assert problems({"algorithm.variety": "GSPOO"}) == [
        'algorithm.variety: expected "gspo", "gspo_token" or "grpo", got "GSPOO"'
    ]


def test_the_record_itself_takes_any_case_too(make: Make) -> None:
    values = make({}).model_dump(exclude_none=True)
    values["model"]["trainer_mode"] = "LORA"
    assert RunConfig(**values).training.lora is not None


def test_other_keys_of_the_policy_are_the_apps_and_reach_it_whole(make: Make) -> None:
    own = {"max_llm_calls": 10, "use_vision": False, "provider": "groq", "thinking_mode": "think",
           "retry": {"codes": [429, 500], "wait_s": 0.5}}  # fmt: skip
    config = make({"services.task_url": "http://a", "rollout.policy_config": {**own, "temperature": 0.5}})
    assert config.rollout.policy_config is not None
    assert config.rollout.policy_config.others == own
    assert config.rollout.temperature == 0.5
    assert RunConfig.from_dict(tomllib.loads(config.to_toml())) == config


def test_our_keys_of_the_policy_are_checked_beside_the_apps(problems: Problems) -> None:
    changes = {"services.task_url": "http://a", "rollout.policy_config": {"temperature": -1.0, "max_llm_calls": 3}}
    assert problems(changes)[0] == "rollout.policy_config.temperature: expected a number > 0, got -1.0"


def test_without_an_app_other_keys_of_the_policy_have_no_reader(problems: Problems) -> None:
    assert problems({"rollout.policy_config": {"temperatur": 0.5}}) == [
        "rollout.policy_config: temperatur: unknown key; did you mean 'temperature'? (only a task app has others)"
    ]


def test_a_secret_among_the_apps_keys_is_refused(problems: Problems) -> None:
    changes = {"services.task_url": "http://a", "rollout.policy_config": {"openai_api_key": "x"}}
    assert len(problems(changes)) == 1
    assert "OPENAI_API_KEY" in problems(changes)[0]


def test_a_truncation_is_scored_under_unless_the_bias_is_meant(make: Make) -> None:
    for key in ("rollout.policy_config.top_p", "rollout.top_p"):
        assert make({key: 0.9}).scored_sampling == Sampling(top_p=0.9)
        assert make({key: 0.9, "algorithm.acknowledge": ["truncated_sampling"]}).scored_sampling == Sampling()
        assert make({key: 1.0, "rollout.temperature": 0.5}).scored_sampling == Sampling(temperature=0.5)


def test_tags_are_kept_with_the_run(make: Make, changed: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    tags = {"experiment": "e1", "turns": 10, "is_vision": False}
    path = tmp_path / "tagged.toml"
    path.write_text(tomli_w.dumps(changed({"tags": tags})))
    config = load_config(path)
    assert tomllib.loads(config.to_toml())["run"]["tags"] == tags


@pytest.mark.parametrize(("limit", "expected"), [(4, 4), (20, 8)])
def test_both_bounds_of_what_runs_at_once_hold(limit: int, expected: int, make: Make) -> None:
    config = make({"rollout.max_concurrent_rollouts": 8, "training.async_semaphore_max": limit})
    assert config.rollout.max_concurrent_rollouts == expected


def test_a_group_may_lie_across_the_batches_of_one_iteration(make: Make, problems: Problems) -> None:
    changes = {"rollout.episodes_per_batch": 4, "training.batch_size": 8}
    merged = make({**changes, "rollout.batches_per_step": 2})
    assert merged.size.groups_per_iteration == 1  # 4 x 2 episodes in groups of 8
    assert "rollout.episodes_per_batch: expected a multiple of training.group_size = 8, got 4" in problems(changes)


def test_without_vllm_a_topology_still_means_its_context_of_8192(make: Make) -> None:
    absent = {"rollout.max_model_len": ..., "rollout.max_output_tokens": ...}
    config = make({**absent, "compute.gpu_count": 2, "topology": {"gpus_for_vllm": 1, "gpus_for_training": 1}})
    assert config.rollout.max_model_len == 8192
