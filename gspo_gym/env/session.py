"""EnvSession: the only caller of an environment's methods, and the border at which what it says is checked.

It makes every environment look the same to a rollout: plain or async, subclass or any object, text or tools. Plain
methods run in a thread of the session's own, so a slow or hanging environment holds up nobody else. Called by
`rollout/adapter.py` and `env/playing.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from gspo_gym.base.loops import retrieve_exception
from gspo_gym.env.answers import as_reset_result, as_step_result, described, place_of
from gspo_gym.env.workers.announcements import announced, announcing
from gspo_gym.env.workers.loading import Making
from gspo_gym.env.workers.threads import OwnThread, Returned
from gspo_gym.errors import (
    ActionLimitError,
    ContractError,
    EnvDiedError,
    EnvError,
    EnvTimeoutError,
    GymError,
    UsageError,
)
from gspo_gym.types import Message, StepResult

_RETURN_TOLERANCE = 1e-6  # of the larger bound: rewards may be float32 sums
_KEEP_REWARDS = (OrderEnforcing, PassiveEnvChecker, TimeLimit)  # what `gymnasium.make` puts around an environment
_ANSWERS_ACTION = ("step", "invalid_action")


class EnvSession:
    """One environment instance, driven through episodes, one call at a time.

    A plain method is called in the session's thread, always the same, which other sessions use after `close`. An async
    method is awaited in the event loop, as is whatever awaitable a plain one returns. After a call that missed its
    deadline or was cancelled, the environment may only be closed. A plain `close` never runs beside another call: it
    waits its turn in the environment's thread. Async code is cancelled, and gets `step_timeout_seconds` to give in.

    Args:
        env: a `TextEnv`, a `ToolEnv`, a Gymnasium wrapper around one, or any object with `reset` and `step`.
        env_id: its name in errors.
        step_timeout_seconds: for each call of a method; None waits for ever.
        thread: the session's thread, if the environment was made in it; the session gives it back. None leases one.
        checks_returns: False: a return outside `reward_range` is answered, for one that plays to find such returns.

    Attributes:
        env: the environment below Gymnasium's wrappers, for hand-written policies that look at hidden state.
        tool_schemas: the tools it offers, as OpenAI function schemas; () for plain text environments.

    Raises:
        ContractError: the object has no `reset` or `step`.
    """

    # Any: authors need not subclass anything.
    def __init__(
        self,
        env: Any,
        *,
        env_id: str,
        step_timeout_seconds: float | None = None,
        thread: OwnThread | None = None,
        checks_returns: bool = True,
    ) -> None:
        for method in ("reset", "step"):
            if not callable(getattr(env, method, None)):
                raise ContractError(f"{env_id}: expected an object with reset and step, got {described(env)}")
        self.env_id = env_id
        self.env = getattr(env, "unwrapped", env)
        self._outer = env
        self._timeout = step_timeout_seconds
        self._max_action_seconds: float | None = getattr(self.env, "max_action_seconds", None)
        self._takes_messages = bool(getattr(self.env, "takes_messages", False))
        self.tool_schemas: tuple[Mapping[str, Any], ...] = tuple(getattr(self.env, "tool_schemas", ()))
        self._thread = thread or OwnThread()
        self._checks_returns = checks_returns
        self._episode_return = 0.0
        self._left: str | None = None  # the method whose answer was not awaited to the end
        self._is_thread_busy = False
        self._has_missed_deadline = False
        self._cancelled: asyncio.Future[Any] | None = None  # an async call that was told to stop, and may not have yet
        self._is_closed = False

    @property
    def step_timeout_seconds(self) -> float | None:
        """Of each call of a method; None: for ever."""
        return self._timeout

    async def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> StepResult:
        """Start an episode; the first observation, without a reward.

        `options` are given only if there are any. A plain object may do without `options`, but not without `seed`: the
        episodes of a group are compared because they play the same task.

        Raises:
            EnvError, EnvTimeoutError: it raised, or did not answer in time.
            ContractError: the answer is not (observation, info), or `reset` does not take what it is given.
        """
        given: dict[str, Any] = {"seed": seed}
        if options:
            given["options"] = dict(options)
        self._require_keywords(given)
        self._episode_return = 0.0
        answer = await self._call("reset", partial(self._outer.reset, **given))
        return as_reset_result(answer, where=f"{self.env_id}: reset()")

    async def step(self, action: Message) -> StepResult:
        """Answer one action: an environment that `takes_messages` is given the message, any other its text.

        Raises:
            ActionLimitError: the action exceeded a limit that the environment sets for actions.
            EnvError, EnvTimeoutError: it raised, or did not answer in time.
            ContractError: the answer is not (observation, reward, terminated, truncated, info), or a part is wrong; or
                with this reward the episode's return overflows or leaves the declared `reward_range`.
        """
        given = action if self._takes_messages else action.content
        answer = await self._call("step", partial(self._outer.step, given))
        return self._added(as_step_result(answer, where=f"{self.env_id}: step()"), "step")

    async def invalid_action(self, error: str) -> StepResult:
        """Answer text that could not be parsed as an action; an object without that method shows `error`, reward 0.

        Gymnasium's wrappers do not know of it, so it goes past them.

        Raises:
            as `step`.
        """
        method = getattr(self.env, "invalid_action", None)
        if method is None:
            return StepResult((Message("user", error),), reward=0.0)
        answer = await self._call("invalid_action", partial(method, error))
        return self._added(as_step_result(answer, where=f"{self.env_id}: invalid_action()"), "invalid_action")

    async def close(self) -> None:
        """Close the environment, if it can be closed, and give the thread back. Closing again does nothing.

        Where a plain method hangs, a plain `close` follows if it ever returns, and nobody waits for that.

        Raises:
            EnvError, EnvTimeoutError: it raised, or did not return in time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        close = getattr(self._outer, "close", None)
        if self._cancelled is not None:  # async code usually gives in at once
            await asyncio.wait({self._cancelled}, timeout=self._timeout)
        if self._has_missed_deadline and self._is_thread_busy and not inspect.iscoroutinefunction(close):
            self._thread.abandon(close)
            return
        try:
            if callable(close):
                await self._answer_of("close", close)
        finally:
            if self._is_thread_busy:
                self._thread.abandon()
            else:
                self._thread.release()

    def _added(self, result: StepResult, method: str) -> StepResult:
        """The result, once the return with its reward was found possible.

        Our limits may end an episode after any turn, so every sum on the way must be a possible return; only before the
        environment itself ends it, the 0 of having earned nothing yet is possible, too.
        """
        if result.reward is None or not self._checks_returns:
            return result
        self._episode_return += result.reward
        low, high = declared_reward_range(self._outer, where=self.env_id)
        if not result.done:
            low, high = min(low, 0.0), max(high, 0.0)
        finite = [abs(bound) for bound in (low, high) if math.isfinite(bound)]
        rounding = _RETURN_TOLERANCE * max([1.0, *finite])
        if not math.isfinite(self._episode_return):
            raise ContractError(f"{self.env_id}: {method}(): the sum of the episode's rewards overflows; scale them")
        if not low - rounding <= self._episode_return <= high + rounding:
            raise ContractError(
                f"{self.env_id}: {method}() gave reward {result.reward:g}, with which the episode's return is "
                f"{self._episode_return:g}; expected it in the declared reward_range, ({low:g}, {high:g}). Correct "
                "the reward, or declare what the environment can give"
            )
        return result

    # Any, here and below: what the environment answers is checked only afterwards.
    async def _call(self, method: str, call: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise UsageError(f"{self.env_id}: {method}() after close()")
        if self._left is not None:
            raise UsageError(f"{self.env_id}: {method}() after {self._left}() was given up; make a new environment")
        return await self._answer_of(method, call)

    async def _answer_of(self, method: str, call: Callable[[], Any]) -> Any:
        """What the call answers in time; what it raises becomes an EnvError."""
        seconds, late = self._deadline_of(method)
        watchdog = asyncio.timeout(seconds)
        try:
            async with watchdog:
                told = f"{self.env_id}\n{method}()"
                if inspect.iscoroutinefunction(call):
                    return await self._in_own_task(announcing(call(), told))
                answer = await self._in_thread(partial(_announced, told, call))
                return await self._in_own_task(announcing(answer, told)) if inspect.isawaitable(answer) else answer
        except TimeoutError as error:
            if not watchdog.expired():
                self._raise_failure(method, error)
            self._left, self._has_missed_deadline = method, True
            raise late(f"{self.env_id}: {method}() did not answer within {seconds:g} seconds") from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # nobody cancelled us: it is the environment's own
                self._raise_failure(method, error)
            self._left = method
            raise
        except (Exception, SystemExit) as error:
            self._raise_failure(method, error)

    def _deadline_of(self, method: str) -> tuple[float | None, type[EnvError]]:
        """How long a call may take, and what a later one is: the environment's limit on actions, or the caller's."""
        declared = self._max_action_seconds if method in _ANSWERS_ACTION else None
        if declared is not None and (self._timeout is None or declared < self._timeout):
            return declared, ActionLimitError
        return self._timeout, EnvTimeoutError

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        self._is_thread_busy = True
        returned = await self._thread.call_async(call, timeout_seconds=None)  # the deadline is the caller's
        self._is_thread_busy = False
        return returned.unwrap()

    async def _in_own_task(self, awaitable: Awaitable[Any]) -> Any:
        """The awaitable's result; a cancellation reaches it but does not wait until it gives in."""
        task = asyncio.ensure_future(_contained(awaitable))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(retrieve_exception)
            self._cancelled = task
            raise
        return task.result().unwrap()

    def _raise_failure(self, method: str, error: BaseException) -> NoReturn:
        if isinstance(error, ContractError | EnvError):
            raise error  # an adapter of a foreign environment knows better than we what went wrong, and what caused it
        if isinstance(error, MemoryError):
            raise EnvDiedError(f"{self.env_id}: {method}() raised MemoryError: {error}") from error
        raise EnvError(f"{self.env_id}: {method}() raised {type(error).__name__}: {error}{place_of(error)}") from error

    def _require_keywords(self, given: Mapping[str, Any]) -> None:
        try:
            parameters = inspect.signature(self._outer.reset).parameters.values()
        except (TypeError, ValueError):  # written in C: it will say itself what it does not take
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = {parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY}
        for name in given:
            if name not in known:
                raise ContractError(
                    f"{self.env_id}: expected reset(*, seed=None, options=None), got a reset that takes no {name!r} "
                    f"but {sorted(known) or 'nothing'}"
                )


def declared_reward_range(env: Any, *, where: str) -> tuple[float, float]:
    """Return the smallest and the largest return that an environment declares; infinite where it declares nothing.

    A wrapper may change rewards, so what is below one counts only where the wrapper is known to leave them alone.

    Raises:
        ContractError: `reward_range` is not two numbers in order. Starts with `where`.
    """
    while isinstance(env, _KEEP_REWARDS):
        env = env.env
    declared = getattr(env, "reward_range", (-math.inf, math.inf))
    try:
        low, high = map(float, declared)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not low <= high:
        raise ContractError(f"{where}: expected reward_range to be (smallest, largest return), got {declared!r}")
    return low, high


def _announced(told: str, call: Callable[[], Any]) -> Any:
    with announced(told):
        return call()


async def _contained(awaitable: Awaitable[Any]) -> Returned:
    """What becomes of it. A SystemExit that leaves a task ends the event loop, so it is kept from leaving."""
    try:
        return Returned(await awaitable, None)
    except SystemExit as error:
        return Returned(None, error)


async def open_session(
    factory: Callable[[], Any], *, env_id: str, step_timeout_seconds: float | None, checks_returns: bool = True
) -> EnvSession:
    """A session around a fresh environment, which is made in the session's own thread.

    So a slow constructor holds up nobody else, and what it ties to a thread (an sqlite3 connection) is tied to the one
    in which the methods will run. Cancelled, it waits until the environment is made, and closes it.
    `step_timeout_seconds` None waits for ever; what is loaded once for many environments does not count (`loading.py`).
    `checks_returns`: see `EnvSession`.

    Raises:
        EnvError, EnvTimeoutError: `factory` raised, or did not return in time.
        ContractError: what it made is no environment.
    """
    making = Making(step_timeout_seconds)
    opening = asyncio.create_task(
        _open_session(factory, env_id, step_timeout_seconds, making, checks_returns=checks_returns)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        making.give_up()
        with contextlib.suppress(GymError):  # nobody is left to whom it would matter
            await (await opening).close()
        raise


async def _open_session(
    factory: Callable[[], Any],
    env_id: str,
    step_timeout_seconds: float | None,
    making: Making,
    *,
    checks_returns: bool,
) -> EnvSession:
    thread = OwnThread()
    made: list[Any] = []
    try:
        async with making.timeout:
            returned = await thread.call_async(lambda: made.append(making.run(factory)), timeout_seconds=None)
    except TimeoutError:
        making.give_up()
        thread.abandon(lambda: _close_if_possible(made))  # should it come after all
        text = f"{env_id}: making the environment took longer than {step_timeout_seconds:g} seconds"
        raise EnvTimeoutError(text) from None
    if returned.error is not None:
        thread.release()
        if isinstance(returned.error, EnvError):
            raise returned.error  # a worker process says all there is to say
        text = f"{env_id}: making the environment raised {type(returned.error).__name__}: {returned.error}"
        text += place_of(returned.error)
        raise EnvError(text) from returned.error
    return EnvSession(
        made[0],
        env_id=env_id,
        step_timeout_seconds=step_timeout_seconds,
        thread=thread,
        checks_returns=checks_returns,
    )


def _close_if_possible(made: list[Any]) -> None:
    for env in made:
        close = getattr(env, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()


@contextlib.asynccontextmanager
async def looking_at(factory: Callable[[], Any]) -> AsyncIterator[Any]:
    """A fresh environment whose declarations are read; it is not played, so no session is needed, and closed after."""
    env = factory()
    try:
        yield env
    finally:
        closed = env.close() if callable(getattr(env, "close", None)) else None
        if inspect.isawaitable(closed):
            await closed
