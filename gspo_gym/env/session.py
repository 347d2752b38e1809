"""`EnvSession`: the only caller of an environment's methods, which checks everything they return.

All environments look the same through it: plain or async, subclass or any object, text or tools. Plain methods run in
the session's thread, so a slow or hanging environment blocks no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sysconfig
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from gspo_gym.base.loops import retrieve_exception
from gspo_gym.base.messages import message_from_wire, require_encodable, text_of_part
from gspo_gym.env.core import price_of_unreadable
from gspo_gym.env.rewards import Reward
from gspo_gym.env.watchdog import AnnouncedSteps, announced
from gspo_gym.env.workers.making import Making
from gspo_gym.env.workers.threads import OwnThread, QuickCalls, Returned
from gspo_gym.errors import (
    ActionLimitError,
    ContractError,
    EnvDiedError,
    EnvError,
    EnvTimeoutError,
    GymError,
    RecordError,
    UsageError,
    described,
    nearest_name,
)
from gspo_gym.types import Message, StepResult, is_finite

_RETURN_TOLERANCE = 1e-6  # relative to the larger bound, because rewards may be float32 sums
_KEEP_REWARDS = (OrderEnforcing, PassiveEnvChecker, TimeLimit)  # the wrappers of `gymnasium.make`
_ANSWERS_ACTION = ("step", "invalid_action")


class EnvSession:
    """One environment instance, driven through episodes, one call at a time.

    A plain method is called in the session's thread, always the same one; if the environment says `any_thread`, and its
    calls are quick, in the thread of `quick`. An async method, or an awaitable that a plain one returns, is awaited in
    the event loop. After a call that missed its deadline or was cancelled, the environment may only be closed. A plain
    `close` waits in the environment's thread for the call before it; async code is cancelled, and has
    `step_timeout_seconds` to stop.

    Args:
        env: a `TextEnv`, a `ToolEnv`, a Gymnasium wrapper around one, or any object with `reset` and `step`.
        env_id: its name in errors.
        step_timeout_seconds: limit of each call of a method; None for no limit.
        thread: the thread in which the environment was made, which the session gives back; None leases one.
        checks_returns: False accepts a return outside `reward_range`, for a caller that looks for such returns.
        quick: makes the quick calls of many sessions; None: all calls are made in this session's thread.

    Attributes:
        env: the unwrapped environment, for hand-written policies that read hidden state.
        tool_schemas: its tools as OpenAI function schemas; () for plain text environments.

    Raises:
        ContractError: the object has no `reset` or `step`.
    """

    def __init__(
        self,
        env: Any,
        *,
        env_id: str,
        step_timeout_seconds: float | None = None,
        thread: OwnThread | None = None,
        checks_returns: bool = True,
        quick: QuickCalls | None = None,
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
        self._quick = quick if quick is not None and self._may_share(quick) else None
        if self._quick is not None and self._quick.is_quick(env_id):
            self._thread.release()  # its calls go to the shared thread
        self._checks_returns = checks_returns
        self._episode_return = self._unreadable_return = 0.0
        self._unanswered_method: str | None = None  # the method whose answer was given up
        self._is_thread_busy = False
        self._has_missed_deadline = False
        self._cancelled_call: asyncio.Future[Any] | None = None  # a cancelled async call, which may still be running
        self._is_closed = False

    @property
    def step_timeout_seconds(self) -> float | None:
        """Return the limit of each call of a method; None for no limit."""
        return self._timeout

    @property
    def is_sharing(self) -> bool:
        """Return whether quick calls of it are made in a thread of many sessions."""
        return self._quick is not None

    async def reset(self, seed: int, options: Mapping[str, Any] | None = None) -> StepResult:
        """Start an episode and return the first observation, without a reward.

        `options` are passed only if there are any. A plain object may lack `options`, but not `seed`: the episodes of a
        group are compared because they play the same task.

        Raises:
            EnvError, EnvTimeoutError: it raised, or did not answer in time.
            ContractError: the answer is not (observation, info), or `reset` does not take its arguments.
        """
        keywords: dict[str, Any] = {"seed": seed}
        if options:
            keywords["options"] = dict(options)
        self._require_keywords(keywords)
        self._episode_return = self._unreadable_return = 0.0
        answer = await self._call("reset", partial(self._outer.reset, **keywords))
        return as_reset_result(answer, where=f"{self.env_id}: reset()")

    async def step(self, action: Message) -> StepResult:
        """Return the answer to an action, passed as a message if the environment `takes_messages`, else as text.

        Raises:
            ActionLimitError: the action exceeded a limit that the environment sets for actions.
            EnvError, EnvTimeoutError: it raised, or did not answer in time.
            ContractError: the answer is not (observation, reward, terminated, truncated, info), or a part is wrong; or
                with this reward the episode's return overflows or leaves the declared `reward_range`.
        """
        argument = action if self._takes_messages else action.content
        answer = await self._call("step", partial(self._outer.step, argument))
        return self._add_to_return(as_step_result(answer, where=f"{self.env_id}: step()"), "step")

    async def invalid_action(self, error: str) -> StepResult:
        """Return the answer to text that could not be parsed; without such a method, that of `TextEnv`."""
        # Called on the unwrapped environment: Gymnasium's wrappers do not know this method.
        method = getattr(self.env, "invalid_action", None)
        if method is None:
            price = price_of_unreadable(declared_reward_range(self._outer, where=self.env_id))
            result = StepResult((Message("user", error),), reward=price)
        else:
            answer = await self._call("invalid_action", partial(method, error))
            result = as_step_result(answer, where=f"{self.env_id}: invalid_action()")
        self._unreadable_return += min(0.0, result.reward or 0.0)
        return self._add_to_return(result, "invalid_action")

    async def close(self) -> None:
        """Close the environment, if it can be closed, and give the thread back; again does nothing.

        If a plain method hangs, a plain `close` runs when it returns, and is not waited for.

        Raises:
            EnvError, EnvTimeoutError: it raised, or did not return in time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        close = getattr(self._outer, "close", None)
        if self._cancelled_call is not None:  # async code usually stops at once
            await asyncio.wait({self._cancelled_call}, timeout=self._timeout)
        # Without a thread, the late call waits or runs in the shared one, and `close` comes after it there.
        is_stuck = self._has_missed_deadline and self._is_thread_busy and self._thread.has_thread
        if is_stuck and not inspect.iscoroutinefunction(close):
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

    def _add_to_return(self, result: StepResult, method: str) -> StepResult:
        if result.reward is None or not self._checks_returns:
            return result
        self._episode_return += result.reward
        low, high = declared_reward_range(self._outer, where=self.env_id)
        # Limits of the rollout may end an episode after any turn, so every partial sum must be a possible return.
        # Before the environment's own end, so is the 0 of having earned nothing yet.
        if not result.done:
            low, high = min(low, 0.0), max(high, 0.0)
        low += self._unreadable_return  # what unreadable text costs lies beside the range
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

    # Any: what the environment answers is checked by the caller.
    async def _call(self, method: str, call: Callable[[], Any]) -> Any:
        if self._is_closed:
            raise UsageError(f"{self.env_id}: {method}() after close()")
        if self._unanswered_method is not None:
            raise UsageError(
                f"{self.env_id}: {method}() after {self._unanswered_method}() was given up; make a new environment"
            )
        return await self._answer_of(method, call)

    async def _answer_of(self, method: str, call: Callable[[], Any]) -> Any:
        seconds, late = self._deadline_of(method)
        watchdog = asyncio.timeout(seconds)
        try:
            async with watchdog:
                outcome = await self._returned_by(call, announcement=f"{self.env_id}\n{method}()")
        except TimeoutError as error:
            if not watchdog.expired():
                _raise_failure(self.env_id, method, error)
            self._unanswered_method, self._has_missed_deadline = method, True
            raise late(f"{self.env_id}: {method}() did not answer within {seconds:g} seconds") from None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # not our cancellation, but the environment's
                _raise_failure(self.env_id, method, error)
            self._unanswered_method = method
            raise
        except Exception as error:
            _raise_failure(self.env_id, method, error)
        if outcome.error is not None:
            _raise_failure(self.env_id, method, outcome.error)
        return outcome.value

    def _deadline_of(self, method: str) -> tuple[float | None, type[EnvError]]:
        # The environment's own limit on actions is the action's doing, the caller's is not.
        action_limit = self._max_action_seconds if method in _ANSWERS_ACTION else None
        if action_limit is not None and (self._timeout is None or action_limit < self._timeout):
            return action_limit, ActionLimitError
        return self._timeout, EnvTimeoutError

    async def _returned_by(self, call: Callable[[], Any], *, announcement: str) -> Returned:
        if inspect.iscoroutinefunction(call):
            return await self._in_own_task(AnnouncedSteps(call(), announcement))
        outcome = await self._in_thread(partial(_announce_and_call, announcement, call))
        if inspect.isawaitable(outcome.value):
            return await self._in_own_task(AnnouncedSteps(outcome.value, announcement))
        return outcome

    async def _in_thread(self, call: Callable[[], Any]) -> Returned:
        self._is_thread_busy = True
        if self._quick is None:
            outcome = await self._thread.call_async(call, timeout_seconds=None)  # the caller has the deadline
        else:
            outcome = await self._quick.call(self._thread, self.env_id, call)
        self._is_thread_busy = False
        return outcome

    def _may_share(self, quick: QuickCalls) -> bool:
        if self._max_action_seconds is not None:  # the time of others would count as the action's
            return False
        # Another wrapper may hold what is tied to a thread, so its own declaration counts.
        declares = bool(getattr(_without_plain_wrappers(self._outer), "any_thread", False))
        return declares and quick.allows(self._timeout)

    async def _in_own_task(self, awaitable: Awaitable[Any]) -> Returned:
        # A cancellation is passed on without waiting for it to take effect.
        task = asyncio.ensure_future(_contain(awaitable))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            task.add_done_callback(retrieve_exception)
            self._cancelled_call = task
            raise
        return task.result()

    def _require_keywords(self, keywords: Mapping[str, Any]) -> None:
        try:
            parameters = inspect.signature(self._outer.reset).parameters.values()
        except (TypeError, ValueError):  # written in C: the call itself will raise
            return
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return
        parameter_names = {
            parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY
        }
        for name in keywords:
            if name not in parameter_names:
                raise ContractError(
                    f"{self.env_id}: expected reset(*, seed=None, options=None), got a reset that takes no {name!r} "
                    f"but {sorted(parameter_names) or 'nothing'}"
                )


def declared_reward_range(env: Any, *, where: str) -> tuple[float, float]:
    """Return the smallest and the largest return that an environment declares; infinite without a declaration.

    Anything but two numbers in order is a ContractError that starts with `where`.
    """
    # Any other wrapper may change rewards, so its own declaration counts.
    bounds = getattr(_without_plain_wrappers(env), "reward_range", (-math.inf, math.inf))
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError, OverflowError):
        low, high = math.nan, math.nan
    if not low <= high:
        raise ContractError(f"{where}: expected reward_range to be (smallest, largest return), got {bounds!r}")
    return low, high


def _without_plain_wrappers(env: Any) -> Any:
    while isinstance(env, _KEEP_REWARDS):
        env = env.env
    return env


def _announce_and_call(text: str, call: Callable[[], Any]) -> Any:
    with announced(text):
        return call()


async def _contain(awaitable: Awaitable[Any]) -> Returned:
    # SystemExit, or a panic in Rust, would end the event loop. KeyboardInterrupt may be the user's second Ctrl-C.
    try:
        return Returned(await awaitable, None)
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        return Returned(None, error)


async def open_session(
    factory: Callable[[], Any],
    *,
    env_id: str,
    step_timeout_seconds: float | None,
    checks_returns: bool = True,
    quick: QuickCalls | None = None,
) -> EnvSession:
    """Open a session on a fresh environment, which is made in the session's thread, or quickly in that of `quick`.

    A slow constructor therefore blocks no other environment, and what it ties to its thread (an sqlite3 connection)
    works in the methods. If cancelled, it waits until the environment is made, and closes it.

    `step_timeout_seconds` is also the limit of making it, unless `factory` allows more (`workers/making.py`).
    Raises:
        EnvError, EnvTimeoutError: `factory` raised, or did not return in time.
        ContractError: what it made is no environment.
    """
    making = Making(step_timeout_seconds)
    opening = asyncio.create_task(
        _open_session(factory, env_id, step_timeout_seconds, making, checks_returns=checks_returns, quick=quick)
    )
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        making.give_up()
        with contextlib.suppress(GymError):  # the caller has left
            await (await opening).close()
        raise


async def _open_session(
    factory: Callable[[], Any],
    env_id: str,
    step_timeout_seconds: float | None,
    making: Making,
    *,
    checks_returns: bool,
    quick: QuickCalls | None,
) -> EnvSession:
    thread = OwnThread()
    envs: list[Any] = []

    def make() -> None:
        envs.append(making.run(factory))

    try:
        async with making.timeout:
            # Quick calls of that name say that its environments may change threads.
            if quick is not None and quick.is_quick(env_id) and quick.allows(step_timeout_seconds):
                outcome = await quick.call(thread, f"{env_id}()", make)
            else:
                outcome = await thread.call_async(make, timeout_seconds=None)
    except TimeoutError:
        # Closes an environment that comes late.
        if quick is not None and thread.num_shared:
            quick.post(thread, env_id, lambda: _close_if_possible(envs))
        else:
            thread.abandon(lambda: _close_if_possible(envs))
        raise EnvTimeoutError(f"{env_id}: making the environment took longer than {making.seconds:g} seconds") from None
    if outcome.error is not None:
        thread.release()
        if isinstance(outcome.error, EnvError):
            raise outcome.error  # the error of a worker process is complete
        text = f"{env_id}: making the environment raised {type(outcome.error).__name__}: {outcome.error}"
        text += place_of(outcome.error)
        raise EnvError(text) from outcome.error
    was_made_there = thread.has_thread
    session = EnvSession(
        envs[0],
        env_id=env_id,
        step_timeout_seconds=step_timeout_seconds,
        thread=thread,
        checks_returns=checks_returns,
        quick=quick,
    )
    if was_made_there or session.is_sharing:
        return session
    with contextlib.suppress(GymError):  # unlike others of its name it may not change threads, and has
        await session.close()
    again = Making(step_timeout_seconds)
    return await _open_session(factory, env_id, step_timeout_seconds, again, checks_returns=checks_returns, quick=None)


def _close_if_possible(envs: list[Any]) -> None:
    for env in envs:
        close = getattr(env, "close", None)
        if callable(close) and not inspect.iscoroutinefunction(close):
            close()


@contextlib.asynccontextmanager
async def looking_at(factory: Callable[[], Any], env_id: str) -> AsyncIterator[Any]:
    """Yield a fresh environment to read its declarations, and close it; without playing, no session is needed.

    Raises:
        EnvError: its `close` raised, unless the caller did.
    """
    try:
        env = factory()
    except EnvDiedError:  # its process was killed, perhaps for memory that others took
        env = factory()
    try:
        yield env
    except BaseException:
        with contextlib.suppress(GymError):
            await _close_unplayed(env, env_id)
        raise
    await _close_unplayed(env, env_id)


async def _close_unplayed(env: Any, env_id: str) -> None:
    try:
        closing = env.close() if callable(getattr(env, "close", None)) else None
        if inspect.isawaitable(closing):
            await closing
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:
        _raise_failure(env_id, "close", error)


def _raise_failure(env_id: str, method: str, error: BaseException) -> NoReturn:
    if isinstance(error, ContractError | EnvError):
        raise error  # an adapter of a foreign environment has said what went wrong, and why
    if isinstance(error, MemoryError):
        raise EnvDiedError(f"{env_id}: {method}() raised MemoryError: {error}") from error
    raise EnvError(f"{env_id}: {method}() raised {type(error).__name__}: {error}{place_of(error)}") from error


_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = (*(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")), "<frozen")


def as_reset_result(answer: object, *, where: str) -> StepResult:
    """Return the result of an answer of `reset`, (observation, info); a ContractError that starts with `where` else."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ContractError(f"{where}: expected (observation, info), got {described(answer)}")
    observation, info = answer
    messages = as_messages(observation, where=where)
    if not messages:
        raise ContractError(f"{where}: expected at least one message for the model, got none")
    return StepResult(messages, info=_as_info(info, where))


def as_step_result(answer: object, *, where: str) -> StepResult:
    """Return the result of an answer of `step`, which must be (observation, reward, terminated, truncated, info).

    The terms, events and success of a `Reward` are kept. A ContractError starts with `where`.
    """
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise ContractError(
            f"{where}: expected (observation, reward, terminated, truncated, info), got {described(answer)}"
        )
    observation, reward, terminated, truncated, info = answer
    is_terminated = _as_flag(terminated, "terminated", where)
    is_truncated = _as_flag(truncated, "truncated", where)
    # An empty text that ends an episode is no message.
    is_last_word = isinstance(observation, str) and not observation and (is_terminated or is_truncated)
    rich = reward if isinstance(reward, Reward) else Reward({})
    try:
        return StepResult(
            () if is_last_word else as_messages(observation, where=where),
            reward=_as_reward(reward, where),
            reward_terms=rich.terms,
            terminated=is_terminated,
            truncated=is_truncated,
            success=rich.success,
            events=rich.events,
            info=_as_info(info, where),
        )
    except RecordError as error:
        raise ContractError(f"{where}: {error}") from error


def as_messages(observation: object, *, where: str) -> tuple[Message, ...]:
    """Return an observation as messages: a string as one user message, or a sequence of messages or OpenAI mappings.

    Content may be a list of text parts, which become lines of one text (as vLLM shows them to a text model). Anything
    else, an image, or a text that cannot be encoded is a ContractError that starts with `where`.
    >>> as_messages([{"role": "user", "content": "Hi."}], where="here")[0].content
    'Hi.'
    """
    if isinstance(observation, str):
        return (_check_message(Message("user", str(observation)), where),)
    if isinstance(observation, Message | Mapping):
        raise ContractError(f"{where}: expected text or a sequence of messages, got one message; put it into a list")
    if not isinstance(observation, Sequence) or isinstance(observation, bytes | bytearray):
        raise ContractError(f"{where}: expected text or a sequence of messages, got {described(observation)}")
    return tuple(_as_message(item, f"{where}: message {index}") for index, item in enumerate(observation))


def _as_message(item: object, where: str) -> Message:
    if isinstance(item, Message):
        return _check_message(item, where)
    if not isinstance(item, Mapping):
        raise ContractError(f"{where}: expected a Message or a mapping with role and content, got {described(item)}")
    try:
        if "role" not in item and isinstance(item.get("type"), str):
            text_of_part(item, where=where)  # raises for an image, and says so
            raise RecordError(
                f'{where}: expected a message, got a part of one; put it into {{"role", "content": [...]}}'
            )
        for key in item:
            if key not in _KEYS:
                raise RecordError(f"{where}: unknown key {key!r}; {nearest_name(str(key), _KEYS)}")
        # the OpenAI API allows null only beside calls
        if item.get("content") is None and not item.get("tool_calls"):
            raise RecordError(f"{where}: expected content as text or a list of text parts, got NoneType None")
        return _check_message(message_from_wire(item, where=where), where)
    except RecordError as error:
        raise ContractError(str(error)) from error


def _check_message(message: Message, where: str) -> Message:
    if message.role == "tool" and not message.tool_call_id:
        raise ContractError(f"{where}: expected a tool message to name its call in tool_call_id, got none")
    try:
        require_encodable(message.content, where=where)
    except RecordError as error:
        raise ContractError(str(error)) from error
    return message


def _as_reward(reward: object, where: str) -> float | None:
    if reward is None:
        return None
    if not isinstance(reward, int | float | np.integer | np.floating | np.bool_):
        raise ContractError(f"{where}: expected a number or None as the reward, got {described(reward)}")
    if not is_finite(reward):
        raise ContractError(f"{where}: expected a finite reward, got {described(reward)}; None means not scored")
    return float(reward)


def _as_flag(flag: object, name: str, where: str) -> bool:
    if not isinstance(flag, bool | np.bool_):
        raise ContractError(f"{where}: expected {name} as a bool, got {described(flag)}")
    return bool(flag)


def _as_info(info: object, where: str) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        raise ContractError(f"{where}: expected info as a mapping, got {described(info)}")
    return dict(info)


def place_of(error: BaseException) -> str:
    """Return where the author's code raised, as " (folder/file.py:41, in step: the line)"; "" if unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    # The innermost line outside this library, Python's own and installed packages; if the environment itself is an
    # installed package, the outermost line outside this library.
    foreign = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    author_frames = [frame for frame in foreign if not frame.filename.startswith(_INSTALLED)]
    frame = (author_frames or foreign[:1] or frames)[-1]
    return f" ({'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}, in {frame.name}: {frame.line})"
