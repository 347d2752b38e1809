"""`PlainEnv`: any environment as a plain synchronous `gymnasium.Env` with strings in and out.

It is for code that knows no messages: wrappers, vector environments, other libraries' loops. Text, tool, async and
process-isolated environments look the same. Rollouts use `EnvSession` instead.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium

from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.errors import ConfigError, UsageError
from gspo_gym.types import Message, StepResult, ToolCall

_MAX_LENGTH = 1_000_000  # characters of an observation or action in the spaces
_PRINTABLE = "".join(map(chr, range(32, 127)))
_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)  # Hermes' form, as in Qwen's templates


class AnyText(gymnasium.spaces.Text):
    """The space of all texts up to a length; Gymnasium's `Text` would have to list the characters of Unicode."""

    def __init__(self, max_length: int = _MAX_LENGTH) -> None:
        super().__init__(max_length, min_length=0, charset=_PRINTABLE)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return up to 8 printable ASCII characters."""
        del mask, probability
        length = int(self.np_random.integers(0, 9))
        return "".join(_PRINTABLE[int(i)] for i in self.np_random.integers(len(_PRINTABLE), size=length))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"


def as_gymnasium(env: str | Callable[[], Any] | Any, **kwargs: Any) -> PlainEnv:
    """Return a plain Gymnasium environment; close it, because it keeps a thread.

    Args:
        env: a registered name, which runs where `TextEnv.isolation` says; a function or class that makes an
            environment; or an instance.
        **kwargs: arguments of the constructor; only with a name.

    Raises:
        UnknownNameError: the name is not registered.
        ConfigError: arguments without a name.
        EnvError, ContractError: the environment cannot be made, or is none.

    >>> with as_gymnasium("GuessNumber", style="terse") as env:
    ...     env.reset(options={"number": 6})[0]
    ...     env.step("4")[:3]
    'Guess 1-8. 4 tries.'
    ('higher', 0.0, False)
    """
    if isinstance(env, str):
        name = resolve(env)
        return PlainEnv(isolated_factory(name, kwargs), name=name)
    if kwargs:
        raise ConfigError(f"as_gymnasium: arguments {sorted(kwargs)} go with an environment's name, got {env!r:.80}")
    if inspect.isclass(env) or not hasattr(env, "step"):
        return PlainEnv(env, name=getattr(env, "__name__", "environment"))
    return PlainEnv(lambda: env, name=type(env).__name__)


class PlainEnv(gymnasium.Env[str, str]):
    """The environment that `factory` makes, driven by an event loop in another thread.

    An observation is the contents of the turn's new messages, separated by blank lines. An action is text; with tools
    also calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (any number, beside text), or one such JSON
    object alone. Unreadable calls go to the environment's `invalid_action`.

    A turn without a score has reward 0.0, because Gymnasium requires a number; `info["is_scored"]` tells the
    difference. `info` also has the messages (OpenAI's shape), reward_terms, events, and is_success once it is decided;
    after `reset` the messages and tool_schemas.

    Raises:
        EnvError, EnvTimeoutError, ContractError: the environment failed, in the constructor or any method.
        UsageError: it was closed.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # Gymnasium has it unmarked

    def __init__(self, factory: Callable[[], Any], *, name: str, step_timeout_seconds: float = 60.0) -> None:
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self._name = name
        self._num_calls = 0
        self._loop: asyncio.AbstractEventLoop | None = asyncio.new_event_loop()
        thread = threading.Thread(target=_run_loop, args=(self._loop,), daemon=True, name="gspo-gym-plain")
        thread.start()
        self._stop = weakref.finalize(self, _stop_loop, self._loop, thread)
        try:
            self.session: EnvSession = self._run(
                open_session(factory, env_id=name, step_timeout_seconds=step_timeout_seconds)
            )
        except BaseException:
            self._stop()
            raise

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; without a seed, of a task drawn by `splits.next_seed`."""
        super().reset(seed=seed)
        self._num_calls = 0
        random_seed = next_seed(self.np_random)
        result = self._run(self.session.reset(random_seed if seed is None else seed, options))
        schemas = [dict(schema) for schema in self.session.tool_schemas]
        return _text(result), {"messages": _messages(result), "tool_schemas": schemas}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        try:
            message = self._message(str(action))
        except ValueError as error:
            result = self._run(self.session.invalid_action(f"error: {error}"))
        else:
            result = self._run(self.session.step(message))
        info = {
            "messages": _messages(result),
            "is_scored": result.reward is not None,
            "reward_terms": dict(result.reward_terms),
            "events": list(result.events),
        }
        if result.success is not None:
            info["is_success"] = result.success
        reward = 0.0 if result.reward is None else float(result.reward)
        return _text(result), reward, result.terminated, result.truncated, info

    def close(self) -> None:
        """Close the environment and end the thread; again does nothing."""
        if self._loop is None:
            return
        try:
            self._run(self.session.close())
        finally:
            self._loop = None
            self._stop()

    def _run(self, answer: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            answer.close()  # else Python warns that it was never awaited
            raise UsageError(f"{self._name}: the environment is closed")
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    def _message(self, text: str) -> Message:  # the text of a ValueError is for the model
        if not self.session.tool_schemas:
            return Message("assistant", text)
        read = read_tool_calls(text)
        if read is None:
            return Message("assistant", text)
        content, calls = read
        tool_calls = [
            ToolCall(f"call_{self._num_calls + index}", name, arguments)
            for index, (name, arguments) in enumerate(calls)
        ]
        self._num_calls += len(tool_calls)
        return Message("assistant", content, tuple(tool_calls))


def read_tool_calls(text: str) -> tuple[str, list[tuple[str, Mapping[str, Any]]]] | None:
    """Return the text beside the calls, and the calls as (name, arguments); None without a call, a ValueError for one
    that cannot be read.
    >>> read_tool_calls('Look. <tool_call>{"name": "query", "arguments": {"sql": "SELECT 1"}}</tool_call>')
    ('Look.', [('query', {'sql': 'SELECT 1'})])
    >>> read_tool_calls("42") is None
    True
    """
    if "<tool_call>" not in text:
        alone = _as_call(text)
        return None if alone is None else ("", [alone])
    calls = []
    for block in _TOOL_CALL.findall(text):
        call = _as_call(block)
        if call is None:
            raise ValueError(
                f'expected {{"name": ..., "arguments": {{...}}}} in a tool call, got {block.strip()!r:.80}'
            )
        calls.append(call)
    content = _TOOL_CALL.sub("", text).strip()
    if "<tool_call>" in content:
        raise ValueError("expected </tool_call> after a tool call")
    return content, calls


def _as_call(text: str) -> tuple[str, Mapping[str, Any]] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= {"name", "arguments"}:
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _text(result: StepResult) -> str:
    return "\n\n".join(message.content for message in result.messages)


def _messages(result: StepResult) -> list[dict[str, Any]]:
    return [message.to_dict() for message in result.messages]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks: Sequence[asyncio.Task[Any]] = tuple(asyncio.all_tasks(loop))
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)
