"""gspo_gym: a gym of multi-turn text environments for language-model agents, and a GSPO trainer for them.

Public names load their modules when first used, so writing an environment does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from gspo_gym.cli.evaluate import run_evaluation as run_evaluation
    from gspo_gym.cli.gspo_trainer import GSPOTrainer as GSPOTrainer
    from gspo_gym.cli.gspo_trainer import evaluate as evaluate
    from gspo_gym.cli.notebook import Run as Run
    from gspo_gym.cli.notebook import card as card
    from gspo_gym.cli.notebook import open_run as open_run
    from gspo_gym.cli.train import run_training as run_training
    from gspo_gym.config.build.episode_collection import collect_episodes as collect_episodes
    from gspo_gym.config.run_config import RunConfig as RunConfig
    from gspo_gym.config.run_config import load_config as load_config
    from gspo_gym.engine.local.engine import LocalEngine as LocalEngine
    from gspo_gym.engine.scripted import ScriptedEngine as ScriptedEngine
    from gspo_gym.env.checks.checker import check_env as check_env
    from gspo_gym.env.core import TextEnv as TextEnv
    from gspo_gym.env.core import ToolEnv as ToolEnv
    from gspo_gym.env.data.dataset import DatasetEnv as DatasetEnv
    from gspo_gym.env.plain import as_gymnasium as as_gymnasium
    from gspo_gym.env.registry import make as make
    from gspo_gym.env.registry import register as register
    from gspo_gym.env.rewards import Achievements as Achievements
    from gspo_gym.env.rewards import Reward as Reward
    from gspo_gym.env.rewards import RewardTerms as RewardTerms
    from gspo_gym.env.tasks import TaskSource as TaskSource
    from gspo_gym.env.tools import tool as tool
    from gspo_gym.env.vector import make_vec as make_vec
    from gspo_gym.policy.load import load_policy as load_policy
    from gspo_gym.remote.serve.agent_app import AgentTask as AgentTask
    from gspo_gym.remote.serve.agent_app import agent_app as agent_app
    from gspo_gym.rollout.adapter import TokenObservationWrapper as TokenObservationWrapper
    from gspo_gym.rollout.episode_files import load_episodes as load_episodes
    from gspo_gym.rollout.episode_files import save_episodes as save_episodes
    from gspo_gym.run.sinks import Sink as Sink
    from gspo_gym.types import Message as Message
    from gspo_gym.types import ToolCall as ToolCall

_SERVED = "remote.serve.agent_app"  # needs an extra
_HOMES = {
    "Achievements": "env.rewards",
    "AgentTask": _SERVED,
    "DatasetEnv": "env.data.dataset",
    "GSPOTrainer": "cli.gspo_trainer",
    "LocalEngine": "engine.local.engine",
    "Message": "types",
    "Reward": "env.rewards",
    "RewardTerms": "env.rewards",
    "Run": "cli.notebook",
    "RunConfig": "config.run_config",
    "ScriptedEngine": "engine.scripted",
    "Sink": "run.sinks",
    "TaskSource": "env.tasks",
    "TextEnv": "env.core",
    "TokenObservationWrapper": "rollout.adapter",
    "ToolCall": "types",
    "ToolEnv": "env.core",
    "agent_app": _SERVED,
    "as_gymnasium": "env.plain",
    "card": "cli.notebook",
    "check_env": "env.checks.checker",
    "collect_episodes": "config.build.episode_collection",
    "evaluate": "cli.gspo_trainer",
    "load_config": "config.run_config",
    "load_episodes": "rollout.episode_files",
    "load_policy": "policy.load",
    "make": "env.registry",
    "make_vec": "env.vector",
    "open_run": "cli.notebook",
    "register": "env.registry",
    "run_evaluation": "cli.evaluate",
    "run_training": "cli.train",
    "save_episodes": "rollout.episode_files",
    "tool": "env.tools",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("gspo_gym.cli.command_line").package_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'gspo_gym' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"gspo_gym.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if _HOMES[name] != _SERVED or (error.name or "").startswith("gspo_gym"):
            raise
        from gspo_gym.errors import MissingExtraError

        raise MissingExtraError(f"gspo_gym.{name} needs {error.name}: pip install 'gspo-gym[serve]'") from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
