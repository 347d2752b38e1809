"""The skyrl-gym adapter over a stand-in of the package (`fake_suites`): rows, messages, rewards, failures.

The real environments are played by tests/foreign.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gspo_gym_envs.suites.skyrl_gym import SkyRLGymEnv
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.errors import ConfigError, ContractError, EnvError, MissingExtraError, UnknownNameError

pytestmark = pytest.mark.usefixtures("fake_suites")


def row(number: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": f"After {number - 1}?"}],
        "reward_spec": {"ground_truth": str(number)},
        "extra_info": {"index": number},
    }


ROWS = [row(number) for number in range(40)]


def test_a_row_is_asked_and_its_other_columns_reach_the_environment() -> None:
    env = SkyRLGymEnv("gsm8k", ROWS)
    messages, info = env.reset(seed=0)
    number = env.row["extra_info"]["index"]
    assert messages == tuple(ROWS[number]["prompt"])
    assert info == {"row": f"rows[{number}]", "extras": ["extra_info", "reward_spec"]}
    observation, reward, terminated, truncated, info = env.step(f"#### {number}")
    assert (observation, dict(reward.terms), reward.success) == ("", {"reward": 1.0}, True)
    assert (terminated, truncated, info["metadata"]) == (True, False, {"said": f"#### {number}"})
    with pytest.raises(ResetNeeded):
        env.step("x")


def test_the_sides_go_through_all_rows_and_share_no_prompt() -> None:
    # The same question again, with another index: it has to be on the same side.
    env = SkyRLGymEnv("gsm8k", [*ROWS, *(r | {"extra_info": {"index": 99}} for r in ROWS)], held_out_fraction=0.4)
    held_out, train = env.questions.held_out, env.questions.train
    assert len(held_out) + len(train) == 80
    asked = [{json.dumps(found.values["prompt"]) for found in side} for side in (held_out, train)]
    assert not asked[0] & asked[1]
    assert [len(side) for side in asked] == [len(held_out) / 2, len(train) / 2]
    seen = {json.dumps(env.reset(seed=2**31 + seed)[0]) for seed in range(len(train))}
    assert seen == asked[1]


def test_rows_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    env = SkyRLGymEnv("gsm8k", str(path))
    assert env.reset(seed=1)[1]["row"].startswith(f"{path}:")


def test_observations_are_shown_and_silence_is_said_aloud() -> None:
    env = SkyRLGymEnv("tool", ROWS, env_config={"greeting": "Hello"}, reward_range=(0, 9))
    assert (env.isolation, env.reward_range) == ("process", (0.0, 9.0))
    env.reset(seed=0)
    messages, reward, terminated, truncated, info = env.step("you")
    assert messages == ({"role": "user", "content": "Hello you"},)
    assert (float(reward), reward.success, terminated, truncated) == (0.5, None, False, False)
    assert info["postprocessed_action"] == "cut"
    assert env.step("quiet")[0] == "(no observation)"
    assert env.invalid_action("unreadable")[0] == ({"role": "user", "content": "Hello "},)


def test_success_is_told_where_its_reward_is_known() -> None:
    env = SkyRLGymEnv("skyrl_gym.envs.registration:Graded", ROWS, success_reward=0.5)
    for answer, expected in (("right", True), ("wrong", False)):
        env.reset(seed=0)
        truth = env.row["reward_spec"]["ground_truth"]
        assert env.step(f"#### {truth if answer == 'right' else 'x'}")[1].success is expected


def test_a_class_of_one_s_own_may_be_made_many_times() -> None:
    for _ in range(2):
        assert SkyRLGymEnv("skyrl_gym.envs.registration:Graded", ROWS).reset(seed=0)


def test_what_an_episode_does_to_its_row_stays_in_it() -> None:
    env = SkyRLGymEnv("gsm8k", ROWS)
    first = env.reset(seed=0)[0]
    env.inner.extras["reward_spec"]["ground_truth"] = "changed"
    env.row["prompt"].clear()
    assert env.reset(seed=0)[0] == first
    assert env.row["reward_spec"]["ground_truth"] != "changed"


def test_it_keeps_the_contract() -> None:
    report = check_env(lambda: SkyRLGymEnv("gsm8k", ROWS), seeds=range(3), num_leak_episodes=4)
    assert report.passed, str(report)


def test_failures_say_which_row_and_what() -> None:
    with pytest.raises(EnvError, match=r"skyrl-gym gsm8k, rows\[\d+\]: make raised AssertionError: reward_spec"):
        SkyRLGymEnv("gsm8k", [{"prompt": f"{n}?"} for n in range(40)]).reset(seed=0)
    env = SkyRLGymEnv("wrong", ROWS)
    env.reset(seed=0)
    with pytest.raises(ContractError, match="expected observations, reward and done from step, got NoneType"):
        env.step("x")
    with pytest.raises(ConfigError, match="there is no column 'prompt'"):
        SkyRLGymEnv("gsm8k", [{"question": "?"}] * 40)


def test_unknown_ids_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gsm8k'"):
        SkyRLGymEnv("gsm8", ROWS)
    with pytest.raises(UnknownNameError, match="cannot import 'no_such_module'"):
        SkyRLGymEnv("no_such_module:Env", ROWS)
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'gspo-gym\[envs-skyrl-gym\]'"):
        SkyRLGymEnv("gsm8k", ROWS)
