"""The loop in which an environment and an actor meet; it retries nothing (the pool does)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.blame import Retrial, are_the_actions_slow, is_the_actions_doing
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.env.workers.threads import QuickCalls
from gspo_gym.errors import ContextOverflowError, EnginePoisonedError, EnvTimeoutError, RecordError, shortened
from gspo_gym.rollout.actors import Actor, ActRequest
from gspo_gym.rollout.adapter import TokenObservationWrapper
from gspo_gym.rollout.forks import Replay, ReplayingActor
from gspo_gym.rollout.limits import EpisodeLimits
from gspo_gym.types import Completion, Outcome, Task, Timing, Trajectory

_log = logging.getLogger(__name__)

MakeEnv = Callable[[Task], Any]  # Any: an environment may be any object with reset and step
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One attempt at one episode. `trajectory_id` is the same for all attempts, `sampling_seed` after a loss only.

    `replay` are the turns of another episode that it begins with; None: it is played from the beginning.
    """

    trajectory_id: str
    task: Task
    sampling_seed: int
    attempt: int = 0
    replay: Replay | None = None

    @property
    def session_id(self) -> str:
        """The name of this attempt at the engine."""
        return f"{self.trajectory_id}/{self.attempt}"


# Plays one attempt to its end; a failure of the episode is a record with an outcome, never an exception.
PlayEpisode = Callable[[EpisodeRequest], Awaitable[Trajectory]]


async def run_episode(
    request: EpisodeRequest,
    *,
    make_env: MakeEnv,
    act: Actor,
    renderers: RendererCache,
    limits: EpisodeLimits,
    clock: Clock = time.monotonic,
    quick: QuickCalls | None = None,
) -> Trajectory:
    """Play one episode from reset to close.

    An episode's failure is never an exception: the record says what happened in `outcome` and, in one line, `error`,
    and keeps the turns played until then. A first prompt that does not fit is a record with CONTEXT_OVERFLOW, no turns
    and an error. The environment and the engine's session are closed however it ends.

    Args:
        make_env: a fresh environment for the task; called off the event loop.
        renderers: of the player's tokenizer.
        limits: see `limits.py`, which also states their order.
        quick: makes the quick calls of the episodes of one `make_env`; None: each has a thread.

    Raises:
        asyncio.CancelledError: cancelled from outside, after closing.
        EnginePoisonedError: no episode can be played with this engine any more; after closing.
        ContractError: the environment answered a replay otherwise than it is recorded; after closing.
    """
    replaying = None if request.replay is None else ReplayingActor(act, request.replay)
    episode = _Episode(request, act=replaying or act, limits=limits, clock=clock, quick=quick)
    outcome, error = await episode.play_and_close(make_env, renderers)
    wrapper = episode.wrapper
    record = wrapper.episode() if wrapper is not None else None
    timing = Timing(
        total_seconds=clock() - episode.started,
        env_seconds=wrapper.env_seconds if wrapper is not None else 0.0,
        engine_seconds=episode.engine_seconds,
    )
    trajectory = Trajectory(
        trajectory_id=request.trajectory_id,
        attempt=request.attempt,
        task=request.task,
        sampling_seed=request.sampling_seed,
        segments=record.segments if record else (),
        turns=record.turns if record else (),
        messages=record.messages if record else (),
        outcome=outcome,
        success=record.success if record else None,
        error=error,
        timing=timing,
        forked_from=None if request.replay is None else request.replay.point,
    )
    if replaying is not None:
        replaying.require_replayed(trajectory)
    return trajectory


def episode_player(
    *,
    make_env: MakeEnv,
    act: Actor,
    renderers: RendererCache,
    limits: EpisodeLimits,
    clock: Clock = time.monotonic,
) -> PlayEpisode:
    """Return a player of episodes in environments here, for a pool; see `run_episode`."""

    quick = QuickCalls(clock=clock)

    async def play(request: EpisodeRequest) -> Trajectory:
        return await run_episode(
            request, make_env=make_env, act=act, renderers=renderers, limits=limits, clock=clock, quick=quick
        )

    return play


class _EpisodeTimeoutError(Exception):
    """The episode's own deadline passed between two waits."""


class _Episode:
    """State of one episode: what has to be closed, and which side a failure belongs to."""

    def __init__(
        self, request: EpisodeRequest, *, act: Actor, limits: EpisodeLimits, clock: Clock, quick: QuickCalls | None
    ) -> None:
        self.request = request
        self.started = clock()
        self._opened_at: float  # set when there is an environment
        self.session: EnvSession | None = None
        self.wrapper: TokenObservationWrapper | None = None
        self.engine_seconds = 0.0
        self._act = act
        self._limits = limits
        self._clock = clock
        self._quick = quick
        self._culprit = Outcome.ENV_ERROR  # the side that is being waited for

    async def play_and_close(self, make_env: MakeEnv, renderers: RendererCache) -> tuple[Outcome, str | None]:
        """Return how the episode ended, and in one line why if it failed."""
        try:
            outcome, error = await self._play(make_env, renderers)
        except BaseException:
            await self._close()  # its own failure would only hide the first
            raise
        failure = await self._close()
        # Where closing fails after an otherwise good episode, that is the episode's failure.
        return (outcome, error) if failure is None or error is not None else failure

    async def _play(self, make_env: MakeEnv, renderers: RendererCache) -> tuple[Outcome, str | None]:
        seconds = self._limits.episode_timeout_seconds
        watchdog = asyncio.timeout(seconds)
        try:
            await self._make(make_env)
            self._opened_at = self._clock()  # making an environment may load what all share, which has its own limit
            async with watchdog:
                wrapper = await self._reset(renderers)
                while wrapper.outcome is None:
                    await self._play_turn(wrapper)
                return wrapper.outcome, None
        except (EnginePoisonedError, asyncio.CancelledError):
            raise
        except Exception as error:
            _log.debug("episode %s failed", self.request.session_id, exc_info=True)
            is_late = watchdog.expired() or isinstance(error, _EpisodeTimeoutError)
            last_wrapper = self.wrapper
            if last_wrapper is not None and await self._is_the_actions_doing(
                error, last_wrapper, make_env, is_late=is_late
            ):
                last_wrapper.end_at_limit(self._limits.action_limit_return)
                return Outcome.ACTION_LIMIT, _said_by(error)
            if is_late:
                assert last_wrapper is not None, "the deadline begins when the environment is there"
                place = "the engine" if self._culprit is Outcome.ENGINE_ERROR else "the environment"
                where = f"at last in {place} after {last_wrapper.num_turns} turns"
                return Outcome.EPISODE_TIMEOUT, f"the episode took longer than {seconds:g} seconds, {where}"
            return self._outcome_of(error), _said_by(error)

    async def _make(self, make_env: MakeEnv) -> None:
        task = self.request.task
        self.session = await open_session(
            lambda: make_env(task),
            env_id=task.env_id,
            step_timeout_seconds=self._limits.step_timeout_seconds,
            quick=self._quick,
        )

    async def _reset(self, renderers: RendererCache) -> TokenObservationWrapper:
        task, limits = self.request.task, self._limits
        assert self.session is not None, "it was made"
        tokenizer = renderers.tokenizer
        self.wrapper = TokenObservationWrapper(
            self.session,
            tokenizer,
            limits.max_turns,
            0,  # pads exported arrays, and the record of an episode holds none
            limits.max_model_len,
            limits.max_output_tokens,
            renderer=renderers.for_tools(self.session.tool_schemas),
            system_prompt=renderers.system_prompt,
            clock=self._clock,
        )
        await self.wrapper.reset_async(task.seed, task.options or None)
        return self.wrapper

    async def _play_turn(self, wrapper: TokenObservationWrapper) -> None:
        # asyncio's time-out needs a wait to act in, and an instant engine and environment have none.
        if self._clock() - self._opened_at >= self._limits.episode_timeout_seconds:
            raise _EpisodeTimeoutError
        self._culprit = Outcome.ENGINE_ERROR
        completion = await self._ask(wrapper)
        self._culprit = Outcome.ENV_ERROR
        await wrapper.step_async(completion)

    async def _is_the_actions_doing(
        self, error: Exception, wrapper: TokenObservationWrapper, make_env: MakeEnv, *, is_late: bool
    ) -> bool:
        limits, task = self._limits, self.request.task
        retrial = Retrial(
            lambda: make_env(task),
            env_id=task.env_id,
            seed=task.seed,
            options=task.options or None,
            step_timeout_seconds=limits.step_timeout_seconds,
            max_seconds=limits.episode_timeout_seconds,
            clock=self._clock,
        )
        if is_late:
            # Where most of the time went elsewhere, the actions are not the cause.
            is_slow = wrapper.action_seconds > limits.episode_timeout_seconds / 2
            return is_slow and await are_the_actions_slow(wrapper.actions, retrial)
        is_answering = bool(wrapper.actions) and self._culprit is Outcome.ENV_ERROR
        return is_answering and await is_the_actions_doing(error, wrapper.actions, retrial)

    async def _ask(self, wrapper: TokenObservationWrapper) -> Completion:
        request = ActRequest(
            session_id=self.request.session_id,
            turn_index=wrapper.num_turns,
            prompt_token_ids=wrapper.prompt,
            max_tokens=wrapper.max_tokens,
            messages=wrapper.messages,
            sampling_seed=self.request.sampling_seed,
            renderer=wrapper.renderer,
            env=wrapper.session.env,
        )
        start = self._clock()
        try:
            return await self._act(request)
        finally:
            self.engine_seconds += self._clock() - start

    def _outcome_of(self, error: Exception) -> Outcome:
        if isinstance(error, ContextOverflowError) and self._culprit is Outcome.ENV_ERROR:  # an engine's is a failure
            return Outcome.CONTEXT_OVERFLOW
        if isinstance(error, EnvTimeoutError):
            return Outcome.ENV_TIMEOUT
        if isinstance(error, RecordError) and self.wrapper is not None and self.wrapper.is_turn_open:
            return Outcome.ENGINE_ERROR  # `step_async` refused what the engine claims to have sampled
        return self._culprit

    async def _close(self) -> tuple[Outcome, str] | None:
        """Close the environment and the engine's session; return the first failure, None if there is none."""
        # In a separate task: a cancellation that arrives meanwhile must wait until both are closed.
        closing = asyncio.create_task(self._close_both())
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close_both(self) -> tuple[Outcome, str] | None:
        failures = []
        for culprit, close in ((Outcome.ENGINE_ERROR, self._end_session), (Outcome.ENV_ERROR, self._close_env)):
            self._culprit = culprit
            try:
                await close()
            except Exception as error:
                _log.debug("closing episode %s failed", self.request.session_id, exc_info=True)
                failures.append((self._outcome_of(error), f"while closing: {_said_by(error)}"))
        return failures[0] if failures else None

    async def _end_session(self) -> None:
        async with asyncio.timeout(self._limits.step_timeout_seconds):
            await self._act.end_session(self.request.session_id)

    async def _close_env(self) -> None:
        if self.session is not None:
            await self.session.close()  # which has its own deadline


def one_line(text: str) -> str:
    """Return a text on one line of readable length."""
    return shortened(" ".join(text.split()), 500)


def _said_by(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    if error.__cause__ is not None and str(error.__cause__) not in text:  # often the only part that names the trouble
        text += f" (from {type(error.__cause__).__name__}: {error.__cause__})"
    return one_line(text)
