"""`TextEnv` and `ToolEnv`, the base classes of environments, and counts of tool calls.

The interface is Gymnasium's. An observation is a string (shown to the model as a user message) or a sequence of
messages; an action is the model's text. Methods may be `async`. One instance plays one episode at a time; the rollout
makes a fresh one per episode.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

import gymnasium
import numpy as np

from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import Tool, ToolError, require_distinct_names, text_of, tools_of
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import GymError, UsageError, nearest_name
from gspo_gym.types import Message, ToolCall

Observation = str | Sequence[Message | Mapping[str, Any]]
Info = dict[str, Any]
# Where an environment's methods run: see `TextEnv.isolation`.
Isolation = Literal["thread", "process"]


class ScriptedPolicy(Protocol):
    """A player other than the trained model: conversation to next message or text, or an awaitable of it."""

    def __call__(self, messages: Sequence[Message], /) -> Message | str | Awaitable[Message | str]: ...


# Gets the instance that is played (a reference may read the hidden answer) and a generator.
PolicyFactory = Callable[[Any, np.random.Generator], ScriptedPolicy]


class Conversation(gymnasium.Space[Any]):
    """The space of observations and actions: any string or message, or any non-empty sequence of messages."""

    def contains(self, x: Any) -> bool:
        if isinstance(x, str | Message):
            return True
        return isinstance(x, Sequence) and bool(x) and all(isinstance(m, Message | Mapping) for m in x)

    def sample(self, mask: Any = None, probability: Any = None) -> str:  # noqa: ARG002 - Gymnasium's signature
        """Return a short random string of printable ASCII."""
        length = int(self.np_random.integers(1, 9))
        return "".join(chr(int(c)) for c in self.np_random.integers(32, 127, size=length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conversation)

    def __hash__(self) -> int:
        return hash(Conversation)

    def __repr__(self) -> str:
        return "Conversation()"


@dataclass(frozen=True, slots=True)
class SmallTask:
    """A task of an environment that a small model learns within minutes, with which a first run begins.

    Attributes:
        options: arguments of the constructor.
        policy: name of the hand-written player that a warm-up imitates.
        style: arguments besides, for a model of random weights that reads bytes.
    """

    options: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    policy: str = "random"
    style: Mapping[str, Any] = field(default_factory=dict)


class TextEnv(gymnasium.Env[Any, Any]):
    """An environment that talks: override `reset` and `step`, plain or as `async def`.

    `reset(*, seed=None, options=None) -> (observation, info)` starts an episode; everything random must come from
    `self.np_random` (call `super().reset(seed=seed)` first).

    `step(action: str) -> (observation, reward, terminated, truncated, info)` answers one action. `reward` is a number,
    a `Reward` with named terms, or None for "not scored here". `info` is for people only.

    Attributes:
        policies: hand-written players by name. "reference" earns the top score (it may read hidden state); "random"
            plays legal moves at random, for warm-up to imitate.
        reward_range: smallest and largest possible return of an episode, not counting what unreadable text costs; a
            rollout treats any other return as an error of the environment. Set it on the instance if it depends on the
            constructor's arguments. Declare it if a turn can cost something: without it, unreadable text costs nothing.
        reference_is_perfect: False if the best return depends on luck or on the task (dice, a distance): "reference"
            then need not earn the top score or succeed, but only beat other play on average.
        isolation: where rollouts run it. "thread": plain methods in a thread of the episode (async ones in the event
            loop); "process": in a worker process, which contains crashes, hangs and changed global generators. None: a
            thread, unless it is found to touch process-wide state.
        any_thread: whether its plain methods may be called in different threads, one after another: it holds nothing
            that is tied to a thread (an sqlite3 connection, thread-local state). While its calls take less than a
            millisecond, a rollout then makes those of all episodes in one thread, which makes short turns fast, unless
            `max_action_seconds` is set.
        confinement: how model-written code is confined, in words; None if it runs none. A class that runs some sets a
            text, its instances the actual one; `env check`, the card and a run's first lines show it.
        max_action_seconds: limit of answering one action; a slower one ends the episode at the lowest return, like
            `errors.ActionLimitError`. None leaves the run's limit for any call.
        takes_messages: whether `step` gets the `Message` with its tool calls or only its text.
        small_task: with which `gspo-gym config new` begins on a processor; None: the constructor's defaults.
    """

    observation_space: gymnasium.Space[Any] = Conversation()
    action_space: gymnasium.Space[Any] = Conversation()
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # Gymnasium has it unmarked
    policies: ClassVar[Mapping[str, PolicyFactory]] = {}
    reward_range: tuple[float, float] = (-float("inf"), float("inf"))
    reference_is_perfect: bool = True
    isolation: Isolation | None = None
    any_thread: bool = False
    confinement: str | None = None
    max_action_seconds: float | None = None
    takes_messages: bool = False
    small_task: ClassVar[SmallTask | None] = None

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return OpenAI function schemas of the tools; () for a plain text environment."""
        return ()

    # Any, because an async override returns an awaitable.
    def invalid_action(self, error: str) -> Any:
        """Answer text that could not be read as an action, in place of `step`.

        The default shows `error` (written for the model), costs `price_of_unreadable` and goes on.
        """
        return error, price_of_unreadable(self.reward_range), False, False, {}


def price_of_unreadable(reward_range: Sequence[float]) -> float:
    """Return the reward of a turn with unreadable text: the smallest return, as far as it is declared and negative.

    No turn that was read can cost more, so a policy never gains by what cannot be read.

    >>> price_of_unreadable((-1.0, 1.0)), price_of_unreadable((0.0, 1.0)), price_of_unreadable((-float("inf"), 1.0))
    (-1.0, 0.0, 0.0)
    """
    low = float(reward_range[0])
    return min(0.0, low) if math.isfinite(low) else 0.0


@dataclass(slots=True)
class _OpenTurn:
    terms: dict[str, float] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    success: bool | None = None
    is_scored: bool = False
    terminated: bool = False
    truncated: bool = False

    @property
    def is_last(self) -> bool:
        return self.terminated or self.truncated


class _TimeLimitError(Exception): ...


# Set in a thread that runs a tool with a time limit; the event is set when the limit has passed.
_given_up: ContextVar[threading.Event | None] = ContextVar("_given_up", default=None)


class ToolEnv(TextEnv):
    """An environment in which the model acts by calling tools: write `start` and methods marked `@tool`.

    A turn is one assistant message. Its calls are made in order, each answered by one tool message; a failed call (an
    unknown tool, wrong arguments, an exception, the time limit) by a text that starts with "error: ". Tools, `end_turn`
    and `no_tool_call` score the turn with `add_reward` and end the episode with `finish`. Rewards of one turn add up by
    term.

    Any tool or hook may be `async def`; then `reset` and `step` return awaitables and plain methods run in a thread.

    Attributes:
        num_turns: actions taken in this episode, including the current one.
        num_calls: calls of this turn so far, including the current one. Text that could not be read as an action counts
            as one failed call.
        num_failed_calls: those that were answered with an error. An `end_turn` that reads it sets the price of a call
            that could not be read; any other costs at least `price_of_unreadable`.
        reset_seed: seed of this episode's `reset`, or None.
        is_scored: whether a turn without a reward earned 0. Set it to False if a judge scores: such a turn then has no
            reward (None).

    >>> from gspo_gym.env.tools import tool
    >>> class Door(ToolEnv):
    ...     def start(self, options):
    ...         return "Open the door."
    ...     @tool
    ...     def turn_key(self, times: int) -> str:
    ...         if times == 2:
    ...             self.finish(Reward({"opened": 1.0}, success=True))
    ...             return "It opens."
    ...         return "Still locked."
    >>> env = Door()
    >>> env.reset(seed=0)[0]
    'Open the door.'
    >>> call = ToolCall("call_0", "turn_key", {"times": 2})
    >>> [message], reward, terminated, _, _ = env.step(Message("assistant", "", tool_calls=(call,)))
    >>> message.content, float(reward), terminated
    ('It opens.', 1.0, True)
    """

    is_scored: ClassVar[bool] = True
    takes_messages = True
    num_turns: int = 0
    num_calls: int = 0
    _num_failed_calls: int = 0
    _prices_failures: bool = False  # whether the hooks of this turn asked for failed calls
    reset_seed: int | None = None
    _own_tools: ClassVar[tuple[Tool, ...]] = ()
    _tools_by_name: Mapping[str, Tool] = {}
    _turn: _OpenTurn | None = None  # None between episodes
    _is_async: bool = False
    _thread: OwnThread | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Build the tools, so a wrong one is a ContractError where the class is defined."""
        super().__init_subclass__(**kwargs)
        cls._own_tools = tuple(require_distinct_names(tools_of(cls)).values())

    def start(self, options: Mapping[str, Any]) -> Any:
        """Begin an episode and return its first observation; `self.np_random` is seeded."""
        raise NotImplementedError(f"{type(self).__name__} must define start(options)")

    def no_tool_call(self, text: str) -> Any:
        """Return the observation after a message without any call; the default is a reminder."""
        del text
        return "Call a tool. Tools: " + ", ".join(self._tools_by_name) + "."

    def end_turn(self) -> Any:
        """Hook after each answered turn that has not ended the episode, for step costs and turn limits."""

    def add_reward(self, reward: Reward | float) -> None:
        """Add to the reward of this turn, term by term; a plain number is the term "reward".

        Raises:
            UsageError: no episode is being played, or this call was given up at its time limit.
            ContractError: the number is not finite.
        """
        turn = self._open_turn("add_reward")
        if not isinstance(reward, Reward):
            reward = Reward({"reward": reward})
        for name, value in reward.terms.items():
            turn.terms[name] = turn.terms.get(name, 0.0) + value
        turn.events += reward.events
        turn.success = turn.success if reward.success is None else reward.success
        turn.is_scored = True

    def finish(self, reward: Reward | float | None = None, *, truncated: bool = False) -> None:
        """End the episode with this turn: the task is over, or, if `truncated`, it is cut off from outside."""
        if reward is not None:
            self.add_reward(reward)
        turn = self._open_turn("finish")
        turn.truncated |= truncated
        turn.terminated |= not truncated

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Return the tools of this instance, read when the episode starts; override to offer others."""
        return tuple(tool.bound_to(self) for tool in self._own_tools)

    @property
    def num_failed_calls(self) -> int:
        """Return how many calls of this turn were answered with an error."""
        self._prices_failures = True
        return self._num_failed_calls

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        """Return the schemas of `tools`, in the same order."""
        return tuple(tool.schema for tool in self.tools)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        """Start an episode: (observation, info), or an awaitable of it if `start` is async."""
        super().reset(seed=seed)
        self._turn, self.num_turns, self.reset_seed = None, 0, seed
        self._tools_by_name = require_distinct_names(self.tools)
        hooks_and_tools = [
            self.start,
            self.no_tool_call,
            self.end_turn,
            *(t.function for t in self._tools_by_name.values()),
        ]
        self._is_async = any(map(inspect.iscoroutinefunction, hooks_and_tools))
        return driven(self._start(options or {}), is_async=self._is_async)

    def step(self, action: Message | str) -> Any:
        """Answer one turn: Gymnasium's 5-tuple, or an awaitable of it if a tool or hook is async.

        Raises:
            gymnasium.error.ResetNeeded: no episode is being played.
        """
        self._begin_turn("step")
        return driven(self._play(action), is_async=self._is_async)

    def invalid_action(self, error: str) -> Any:
        """Show `error` and count a turn, which costs at least `price_of_unreadable`, with what `end_turn` subtracts.

        For another price, let `end_turn` charge `num_failed_calls`, or call `add_reward` with a negative one, then
        `super().invalid_action(error)`.
        """
        self._begin_turn("invalid_action")
        self.num_calls = self._num_failed_calls = 1
        return driven(self._play(None, error), is_async=self._is_async)

    def close(self) -> None:
        """Return the thread of limited tools. Call `super().close()` if you override it."""
        if self._thread is not None:
            self._thread.release()

    def _open_turn(self, method: str) -> _OpenTurn:
        late = _given_up.get()
        if late is not None and late.is_set():
            raise UsageError(f"{type(self).__name__}.{method}: this call was given up at its time limit")
        if self._turn is None:
            raise UsageError(f"{type(self).__name__}.{method}: no episode is being played")
        return self._turn

    def _begin_turn(self, method: str) -> None:
        if self._turn is None:
            raise gymnasium.error.ResetNeeded(f"{type(self).__name__}.{method}: no episode is being played; call reset")
        self.num_turns += 1
        self.num_calls = self._num_failed_calls = 0
        self._prices_failures = False

    async def _start(self, options: Mapping[str, Any]) -> Any:
        observation = await self._call(self.start, options)
        self._turn = _OpenTurn()
        return observation, {}

    async def _observe(self, action: Message | str) -> Any:
        if isinstance(action, Message) and action.tool_calls:
            return [await self._answer(call) for call in action.tool_calls]
        return await self._call(self.no_tool_call, action.content if isinstance(action, Message) else action)

    async def _play(self, action: Message | str | None, error: str = "") -> Any:  # without an action, only show `error`
        turn = self._open_turn("step")
        was_charged = math.fsum(turn.terms.values()) < 0  # by an override of `invalid_action`
        try:
            observation = error if action is None else await self._observe(action)
            if not turn.is_last:
                await self._call(self.end_turn)
            if action is None:
                turn_reward, price = math.fsum(turn.terms.values()), price_of_unreadable(self.reward_range)
                has_own_price = turn_reward < 0 and (was_charged or self._prices_failures)
                if price < min(0.0, turn_reward) and not has_own_price:
                    self.add_reward(Reward({"unreadable": price - turn_reward}))
        except BaseException:
            self._turn = None  # the turn was played in part, so the episode cannot go on
            raise
        self._turn = None if turn.is_last else _OpenTurn()
        reward = None
        if turn.is_scored or self.is_scored:
            reward = Reward(turn.terms, events=tuple(turn.events), success=turn.success)
        return observation, reward, turn.terminated, turn.truncated, {}

    async def _answer(self, call: ToolCall) -> Message:
        self.num_calls += 1
        try:
            content = await self._result(call)
        except GymError:
            raise  # the author's mistake, such as a NaN reward, is not for the model to read
        except Exception as error:
            self._num_failed_calls += 1
            kind = "" if isinstance(error, ToolError) else f"{type(error).__name__}: "
            content = f"{CALL_FAILED}{kind}{error}"
        return Message("tool", content, tool_call_id=call.id, name=call.name)

    async def _result(self, call: ToolCall) -> str:
        if self._open_turn("step").is_last:
            raise ToolError("the episode is over, this call was not made")
        tool = self._tools_by_name.get(call.name)
        if tool is None:
            raise ToolError(f"unknown tool {call.name!r}; {nearest_name(call.name, self._tools_by_name)}")
        arguments = tool.check_arguments(call.arguments)
        try:
            result = await self._call(partial(tool.function, **arguments), time_limit_seconds=tool.time_limit_seconds)
        except _TimeLimitError:
            raise ToolError(f"{tool.name}: no result within {tool.time_limit_seconds:g} seconds") from None
        return text_of(result, where=f"{type(self).__name__}: tool {tool.name}")

    async def _call(self, function: Callable[..., Any], *args: Any, time_limit_seconds: float | None = None) -> Any:
        if inspect.iscoroutinefunction(function):
            watchdog = asyncio.timeout(time_limit_seconds)
            try:
                async with watchdog:
                    return await function(*args)
            except TimeoutError:
                if watchdog.expired():
                    raise _TimeLimitError from None
                raise  # the tool's TimeoutError, not ours
        if time_limit_seconds is None and not self._is_async:
            return function(*args)
        return await self._call_in_thread(partial(function, *args), time_limit_seconds)

    async def _call_in_thread(self, function: Callable[[], Any], time_limit_seconds: float | None) -> Any:
        given_up = threading.Event()

        def call() -> Any:
            token = _given_up.set(given_up)
            try:
                return function()
            finally:
                _given_up.reset(token)

        self._thread = self._thread or OwnThread()
        try:
            if self._is_async:
                outcome = await self._thread.call_async(call, timeout_seconds=time_limit_seconds)
            else:
                outcome = self._thread.call(call, timeout_seconds=time_limit_seconds)
        except BaseException as error:  # the limit or a cancellation: the thread is still busy
            given_up.set()
            self._thread.abandon()
            raise (_TimeLimitError() if isinstance(error, TimeoutError) else error) from None
        return outcome.unwrap()


def driven(answer: Coroutine[Any, Any, Any], *, is_async: bool) -> Any:
    """Return a coroutine's result if it has nothing to await, else the coroutine."""
    if is_async:
        return answer
    try:
        answer.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a coroutine of plain functions has nothing to wait for")


CALL_FAILED = "error: "  # beginning of the answer to any failed call, also of other processes and servers
_UNKNOWN_TOOL = f"{CALL_FAILED}unknown tool "


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls and failed calls by tool; calls of unknown tools are in neither."""

    made: Counter[str]
    failed: Counter[str]


def count_calls(messages: Sequence[Message]) -> CallCounts:
    """Count the answered calls in a conversation; the text of an answer says whether the call failed.

    >>> from gspo_gym.types import ToolCall
    >>> call = Message("assistant", "", (ToolCall("c0", "look", {}),))
    >>> count_calls([call, Message("tool", "error: KeyError: 'x'", tool_call_id="c0")]).failed
    Counter({'look': 1})
    """
    calls_by_tool: Counter[str] = Counter()
    failures_by_tool: Counter[str] = Counter()
    names: dict[str, str] = {}
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        name = names.get(message.tool_call_id or "")
        if message.role == "tool" and name is not None and not message.content.startswith(_UNKNOWN_TOOL):
            calls_by_tool[name] += 1
            failures_by_tool[name] += message.content.startswith(CALL_FAILED)
    return CallCounts(calls_by_tool, failures_by_tool)
