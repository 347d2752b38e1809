"""`SkyRLGymEnv`: the environments of skyrl-gym on the rows of their data sets, and players for those with an answer.

A row is one task in SkyRL's form: its column "prompt" has the opening messages, the other columns are the environment's
`extras`. In a config: `rollout.env_name = "SkyRLGym"` with `rollout.env_config = { game = "gsm8k", rows =
"train.parquet" }`.
"""

from __future__ import annotations

import copy
import importlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gspo_gym_envs.suites.packages import import_package
from gymnasium.error import ResetNeeded

from gspo_gym.base.modules import named_object
from gspo_gym.env.core import Info, ScriptedPolicy, TextEnv
from gspo_gym.env.data.rows import (
    ConversationTemplate,
    Questions,
    Reading,
    RowSource,
    checked_fraction,
    load_questions,
    next_seed,
)
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import (
    ConfigError,
    ContractError,
    EnvError,
    UnknownNameError,
    described,
    nearest_name,
)
from gspo_gym.types import Message

StepTuple = tuple[Any, Reward, bool, bool, Info]

_DEFAULT_FRACTION = 0.1
_GRADERS = {"gsm8k": (0.0, 1.0), "gsm8k_multi_turn": (0.0, 1.2), "aime": (-1.0, 1.0)}  # ranges of returns by id
_SILENCE = "(no observation)"
_registering = threading.Lock()


class SkyRLGymEnv(TextEnv):
    """A skyrl-gym environment with one row an episode; answers, observations and rewards pass unchanged.

    Seeds below 2**31 name held-out rows, those above, which training draws, training rows: see `Questions.of_seed`.
    SkyRL only says that an episode is done, which counts as terminated. Its postprocessed action goes to `info`:
    training uses the tokens that the model sampled.

    Policies "reference" and "random" exist for gsm8k, gsm8k_multi_turn and aime, which have the answer in their rows.

    Args:
        game: an id of skyrl-gym, or "MODULE:CLASS" of another environment.
        rows, held_out, held_out_fraction, split_seed: as in `DatasetEnv`.
        env_config: settings that the environment reads as attributes, such as {"db_path": ...} for text2sql.
        success_reward: a last reward of at least this is a success. None is 1 for gsm8k, gsm8k_multi_turn and aime, and
            declares no success for others.
        reward_range: smallest and largest return, if known.

    Raises:
        MissingExtraError: skyrl-gym is not installed.
        UnknownNameError: there is no such environment; names the nearest.
        ConfigError: the rows cannot be read, or lack a prompt.
    """

    def __init__(
        self,
        game: str,
        rows: RowSource,
        *,
        held_out: RowSource | None = None,
        held_out_fraction: float | None = None,
        split_seed: int = 0,
        env_config: Mapping[str, Any] | None = None,
        success_reward: float | None = None,
        reward_range: Sequence[float] | None = None,
    ) -> None:
        fraction = checked_fraction(
            held_out_fraction, _DEFAULT_FRACTION, has_own_held_out=held_out is not None, where="SkyRLGymEnv"
        )
        self._package = _package()
        self.game = _registered(self._package, game)
        self._env_config = dict(env_config or {})
        # Only the prompt decides the side of a row, so rows with equal prompts stay together.
        reading = Reading(ConversationTemplate.of([{"role": "user", "content": "{prompt}"}]), frozenset())
        self.questions: Questions = load_questions(
            rows, held_out, reading, held_out_fraction=fraction, split_seed=split_seed
        )
        self._success_reward = success_reward
        # The others run code or queries that the model wrote.
        self.isolation = None if game in _GRADERS else "process"
        if game in _GRADERS:
            self._success_reward = 1.0 if success_reward is None else success_reward
            self.reward_range = _GRADERS[game]
            # Here wrong answers in the right form, before the right one, earn something too.
            self.reference_is_perfect = game != "gsm8k_multi_turn"
            self.policies = {"reference": right_answer, "random": wrong_answer}  # type: ignore[misc]  # on the instance
        elif game == "text2sql":
            self.reward_range = (-1.0, 1.0)  # an answer in another form, and rows that are the right ones
        if reward_range is not None:
            self.reward_range = (float(reward_range[0]), float(reward_range[1]))
        self.inner: Any = None  # skyrl-gym's environment, made for each episode
        self.row: Mapping[str, Any] = {}  # of the current episode; read by the players
        self._is_playing = False

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, Info]:
        """Make the environment of the seed's row, or of one drawn by `splits.next_seed`."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"SkyRLGymEnv.reset: expected no options, got {sorted(options)}")
        if seed is None:
            seed = next_seed(self.np_random)
        self.close()
        row = self.questions.of_seed(seed)
        self.row = copy.deepcopy(dict(row.values))
        extras = {name: value for name, value in self.row.items() if name != "prompt"}
        config = importlib.import_module("omegaconf").OmegaConf.create(self._env_config)
        self.inner = self._called(
            "make", row.where, lambda: self._package.make(self.game, env_config=config, extras=extras)
        )
        prompt = copy.deepcopy(self.row["prompt"])
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages, info = self._called("init", row.where, lambda: self.inner.init(prompt))
        self._is_playing = True
        return _as_sequence(messages), {"row": row.where, **dict(info)}

    def step(self, action: str) -> StepTuple:
        """Return the environment's answer to a text."""
        if not self._is_playing:
            raise ResetNeeded("SkyRLGymEnv.step: no episode is being played; call reset first")
        answer = self._called("step", self.game, lambda: self.inner.step(action))
        if not isinstance(answer, Mapping) or not {"observations", "reward", "done"} <= set(answer):
            raise ContractError(
                f"skyrl-gym {self.game}: expected observations, reward and done from step, got {described(answer)}"
            )
        done = bool(answer["done"])
        self._is_playing = not done
        success = None
        if done and self._success_reward is not None:
            success = bool(answer["reward"] >= self._success_reward)
        info = {"metadata": answer.get("metadata"), "postprocessed_action": answer.get("postprocessed_action")}
        # Some tools answer with nothing, but two turns of the model need an observation between them.
        messages = _as_sequence(answer["observations"]) or ("" if done else _SILENCE)
        return messages, Reward({"reward": answer["reward"]}, success=success), done, False, info

    def invalid_action(self, error: str) -> StepTuple:
        """Let the environment judge an unreadable answer as an empty one."""
        del error
        return self.step("")

    def close(self) -> None:
        """Close the environment, if there is one."""
        inner, self.inner, self._is_playing = self.inner, None, False
        if inner is not None:
            inner.close()

    def _called(self, what: str, where: str, call: Any) -> Any:
        try:
            return call()
        except Exception as error:  # environments may raise anything
            raise EnvError(f"skyrl-gym {self.game}, {where}: {what} raised {type(error).__name__}: {error}") from error


def _as_sequence(messages: Any) -> tuple[Any, ...]:  # of plain dicts
    return tuple({**message} for message in messages)


def _registered(package: Any, game: str) -> str:  # a "MODULE:CLASS" under that name
    known = importlib.import_module("skyrl_gym.envs.registration").registry
    with _registering:  # skyrl-gym refuses a second registration
        if game not in known and ":" in game:
            package.register(id=game, entry_point=named_object(game, "game"))
    if game not in known:
        raise UnknownNameError(f"SkyRLGymEnv: there is no environment {game!r}; {nearest_name(game, known)}")
    return game


def _package() -> Any:
    modules = ("skyrl_gym:make", "skyrl_gym:register", "skyrl_gym.envs", "skyrl_gym.envs.registration:registry")
    return import_package("SkyRLGym", "skyrl-gym", *modules, extra="envs-skyrl-gym")


_FORMS = {"aime": "Answer: {}"}  # form of an answer by id; the others use GSM8K's
_GSM8K = "#### {}"


def right_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says the row's answer in a `SkyRLGymEnv`."""
    row = env.row
    answer = row["reward_model" if env.game == "aime" else "reward_spec"]["ground_truth"]
    return lambda _messages: _FORMS.get(env.game, _GSM8K).format(answer)


def wrong_answer(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that says random numbers of three digits in the right form."""

    def play(_messages: Sequence[Message]) -> str:
        return _FORMS.get(env.game, _GSM8K).format(rng.integers(100, 1000))

    return play
