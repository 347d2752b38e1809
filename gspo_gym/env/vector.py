"""`make_vec`: many text environments stepped at once, with the interface of `gymnasium.vector.VectorEnv`.

For evolution, search or imitation loops that run in lockstep. Training does not use it: its rollout pool plays each
episode at its pace (`rollout/pool.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from gspo_gym.env.core import Conversation
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ConfigError, ContractError, EnvError, GymError, UsageError
from gspo_gym.types import Message, StepResult

_Result = TypeVar("_Result")
TextObservation = str | tuple[Message, ...]
Infos = dict[str, Any]


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    isolation: str = "auto",
    step_timeout_seconds: float = 30.0,
    **kwargs: Any,
) -> TextVectorEnv:
    """Return `num_envs` environments of one name, stepped concurrently; `kwargs` go to each constructor.

    Args:
        env_id: a registered name.
        num_envs: at least 1.
        autoreset_mode: "NextStep", "SameStep" or "Disabled", as in Gymnasium.
        isolation: "thread", "process", or "auto", which follows `TextEnv.isolation`.
        step_timeout_seconds: limit of making an environment, and of each of its resets and steps.

    Raises:
        UnknownNameError: no environment of that name.
        ConfigError: an argument is out of range.

    >>> envs = make_vec("GuessNumber", 2, low=1, high=4, style="terse")
    >>> envs.reset(seed=0)[0]
    ('Guess 1-4. 4 tries.', 'Guess 1-4. 4 tries.')
    >>> envs.step(["2", "0"])[0]
    ('higher', 'not a number 1-4')
    >>> envs.close()
    """
    env_id = resolve(env_id)
    factory = isolated_factory(env_id, kwargs, isolation=isolation)
    return TextVectorEnv(
        factory,
        num_envs,
        env_id=env_id,
        autoreset_mode=AutoresetMode(autoreset_mode),
        step_timeout_seconds=step_timeout_seconds,
    )


class TextVectorEnv(VectorEnv[tuple[TextObservation, ...], Sequence[Message | str], NDArray[Any]]):
    """Environments stepped concurrently; every episode is played in a fresh instance.

    An observation is the text of a single user message, or else a tuple of messages. Rewards are [num_envs] float64,
    NaN (never 0) if not scored. The infos have "success", "reward_terms" and "events".

    An environment that raises, hangs or breaks its contract disturbs no other: its turn is truncated with reward NaN
    and the reason in infos["error"], and its next episode is played in a fresh instance as usual.

    The first episode of environment i under `reset(seed=s)` has seed s + i; the seeds of later ones derive from it and
    stay on its side, held-out or training (see `splits.next_seed`). Calls work inside a running event loop too, and
    block it.

    """

    def __init__(
        self,
        factory: Callable[[], Any],
        num_envs: int,
        *,
        env_id: str,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
        step_timeout_seconds: float = 30.0,
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"make_vec: expected num_envs >= 1, got {num_envs}")
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": autoreset_mode}
        self.single_observation_space, self.single_action_space = Conversation(), Conversation()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.env_id = env_id
        self._factory = factory
        self._mode = autoreset_mode
        self._timeout = step_timeout_seconds
        self._thread = OwnThread()
        self._runner = asyncio.Runner()
        self._sessions: list[EnvSession | None] = [None] * num_envs
        self._generators = [np.random.default_rng() for _ in range(num_envs)]  # draw the seeds of unseeded episodes
        self._was_reset = [False] * num_envs
        self._is_over: NDArray[np.bool_] = np.ones(num_envs, dtype=bool)
        self._observations: list[TextObservation] = [""] * num_envs

    @property
    def tool_schemas(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """Return OpenAI function schemas of the tools in each environment's current episode."""
        return tuple(() if session is None else session.tool_schemas for session in self._sessions)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[TextObservation, ...], Infos]:
        """Begin an episode in every environment, or in those of options["reset_mask"] ([num_envs] bool).
        A ConfigError: not one seed an environment, or a mask of another shape. An EnvError names an environment that
        could not be made or reset; the others were reset.
        """
        seeds = self._seeds_from(seed)
        reset_options = dict(options or {})
        mask = np.asarray(reset_options.pop("reset_mask", np.ones(self.num_envs, dtype=bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
            raise ConfigError(
                f"{self.env_id}: expected reset_mask [{self.num_envs}] bool, got {mask.dtype} {mask.shape}"
            )
        indices = np.flatnonzero(mask).tolist()
        outcomes = self._run(_all(self._begin(index, reset_options, seeds[index]) for index in indices))
        for index, error in zip(indices, outcomes, strict=True):
            if isinstance(error, BaseException):
                raise EnvError(f"{self.env_id}: environment {index} could not be reset: {error}") from error
        return tuple(self._observations), {}

    def step(
        self, actions: Sequence[Message | str]
    ) -> tuple[tuple[TextObservation, ...], NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Infos]:
        """Answer one action each: (observations, rewards, terminations, truncations, infos).

        Raises:
            ContractError: not one action, a text or a message, for each environment.
            UsageError: an environment was never reset, or its episode is over and autoreset is disabled.
        """
        if isinstance(actions, str | Message) or len(actions) != self.num_envs:
            raise ContractError(f"{self.env_id}: expected {self.num_envs} actions, got {actions!r:.100}")
        never = [index for index, was_reset in enumerate(self._was_reset) if not was_reset]
        over = np.flatnonzero(self._is_over).tolist() if self._mode is AutoresetMode.DISABLED else []
        if never or over:
            raise UsageError(f"{self.env_id}: environments {never or over} must be reset before they are stepped")
        answers = self._run(_all(self._turn(index, action) for index, action in enumerate(actions)))
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros(self.num_envs, dtype=bool), np.zeros(self.num_envs, dtype=bool)
        infos: Infos = {}
        for index, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                rewards[index], truncations[index] = np.nan, True
                infos = self._add_info(infos, {"error": str(answer)}, index)
            elif answer is not None:
                rewards[index] = np.nan if answer.reward is None else answer.reward
                terminations[index], truncations[index] = answer.terminated, answer.truncated
                infos = self._add_info(infos, _facts(answer), index)
        self._is_over = terminations | truncations
        if self._mode is AutoresetMode.SAME_STEP and self._is_over.any():
            infos = self._begin_at_once(infos)
        return tuple(self._observations), rewards, terminations, truncations, infos

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002 - Gymnasium's signature
        """Close every environment."""
        self._run(_all(self._end(index) for index in range(self.num_envs)))
        self._thread.call(self._runner.close, timeout_seconds=None).unwrap()
        self._thread.release()

    def _seeds_from(self, seed: int | Sequence[int] | None) -> Sequence[int | None]:
        if seed is None:
            return [None] * self.num_envs
        seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int) else list(seed)
        if len(seeds) != self.num_envs:
            raise ConfigError(f"{self.env_id}: expected {self.num_envs} seeds, got {len(seeds)}")
        super().reset(seed=seeds[0])
        return seeds

    async def _begin(self, index: int, options: Mapping[str, Any], seed: int | None = None) -> None:
        await self._end(index)
        self._was_reset[index] = True
        if seed is None:
            seed = next_seed(self._generators[index])
        else:
            self._generators[index] = np.random.default_rng(seed)
        session = await open_session(self._factory, env_id=self.env_id, step_timeout_seconds=self._timeout)
        self._sessions[index] = session
        opening = await session.reset(seed, options)
        self._observations[index] = _observation(opening)
        self._is_over[index] = False

    async def _turn(self, index: int, action: Message | str) -> StepResult | None:
        # None if the episode was over, in which case a new one has begun.
        session = self._sessions[index]
        if self._is_over[index] or session is None:
            await self._begin(index, {})
            return None
        message = Message("assistant", action) if isinstance(action, str) else action
        answer = await session.step(message)
        self._observations[index] = _observation(answer)
        return answer

    async def _end(self, index: int) -> None:
        session, self._sessions[index] = self._sessions[index], None
        if session is not None:
            with suppress(GymError):  # its answers were delivered, and it is not used again
                await session.close()

    def _begin_at_once(self, infos: Infos) -> Infos:
        over = np.flatnonzero(self._is_over).tolist()
        for index in over:
            infos = self._add_info(infos, {"final_obs": self._observations[index]}, index)
        for index, error in zip(over, self._run(_all(self._begin(index, {}) for index in over)), strict=True):
            if isinstance(error, BaseException):  # the next step tries again
                infos = self._add_info(infos, {"error": str(error)}, index)
                self._sessions[index] = None
        return infos

    def _run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        result: _Result = self._thread.call(lambda: self._runner.run(coroutine), timeout_seconds=None).unwrap()
        return result


async def _all(calls: Any) -> list[Any]:  # the failures of environments are results, other errors are raised
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, GymError):
            raise result
    return results


def _observation(answer: StepResult) -> TextObservation:
    messages = answer.messages
    if not messages:
        return ""
    return messages[0].content if len(messages) == 1 and messages[0].role == "user" else messages


def _facts(answer: StepResult) -> Infos:
    facts: Infos = {"reward_terms": dict(answer.reward_terms), "events": answer.events}
    return facts if answer.success is None else facts | {"success": answer.success}
