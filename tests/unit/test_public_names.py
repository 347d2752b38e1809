"""The names that users import from `gspo_gym`, and nothing else."""

import importlib
import subprocess
import sys

import pytest

import gspo_gym


def test_every_public_name_is_what_its_home_calls_it():
    homes = {name: getattr(gspo_gym, name).__module__ for name in gspo_gym.__all__}
    assert all(home.startswith("gspo_gym.") for home in homes.values())
    for name, home in homes.items():
        assert getattr(importlib.import_module(home), name) is getattr(gspo_gym, name)


def test_the_list_of_names_is_a_promise():
    assert gspo_gym.__all__ == [
        "Achievements",
        "AgentTask",
        "DatasetEnv",
        "GSPOTrainer",
        "LocalEngine",
        "Message",
        "Reward",
        "RewardTerms",
        "Run",
        "RunConfig",
        "ScriptedEngine",
        "Sink",
        "TaskSource",
        "TextEnv",
        "TokenObservationWrapper",
        "ToolCall",
        "ToolEnv",
        "agent_app",
        "as_gymnasium",
        "card",
        "check_env",
        "collect_episodes",
        "evaluate",
        "load_config",
        "load_episodes",
        "load_policy",
        "make",
        "make_vec",
        "open_run",
        "register",
        "run_evaluation",
        "run_training",
        "save_episodes",
        "tool",
    ]


def test_completion_offers_the_public_names_alone():
    assert [name for name in dir(gspo_gym) if not name.startswith("_")] == gspo_gym.__all__


@pytest.mark.parametrize(
    "names",
    [
        "gspo_gym import TextEnv, ToolEnv, Reward, RewardTerms, TaskSource, Achievements",
        "gspo_gym import tool, make, make_vec, check_env",
        "gspo_gym import open_run",
        "gspo_gym.cli.report import doctor_command",
        "gspo_gym.cli.notebook import episodes_command",
    ],
)
def test_writing_an_environment_and_looking_at_a_run_need_no_torch(names):
    code = f"import sys; from {names}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
