"""`VerifiersEnv`: an environment of the package `verifiers`, one turn at a time.

In verifiers, the environment's rollout loop calls a client for each answer of the model, and a rubric scores the end.
Here that loop runs unchanged as a task, with a client that passes each prompt to the episode as an observation and
waits until `step` brings the answer.

One loaded environment serves all episodes at once, as in verifiers, where a rollout's data are in its state. (It lives
until the process ends, because verifiers registers a clean-up for then.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gspo_gym_envs.suites.packages import import_package
from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, TextEnv
from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, ContractError, EnvError, GymError
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message, ToolCall, is_finite

StepTuple = tuple[Sequence[Message] | str, Reward | None, bool, bool, Info]

# Stop conditions that are limits, not ends of the task. (`is_truncated` only says that an answer was cut off.)
_LIMITS = ("timeout_reached", "max_total_completion_tokens_reached", "prompt_too_long")
_UNMADE = "error: the episode is over, this call was not made"


class VerifiersEnv(TextEnv):
    """An environment that `verifiers.load_environment` finds. Needs `pip install 'gspo-gym[envs-verifiers]'`.

    A seed below 2**31 names a row of the evaluation data, one from 2**31 up a row of the training data; as many
    consecutive seeds as there are rows name each once. Without evaluation data the training rows serve for both, as in
    verifiers; then `info["is_held_out"]` is False.

    The observation is the part of a prompt after the conversation so far. An environment that rewrites the conversation
    (drops or changes an earlier message) or asks for several answers at once is refused with a ContractError, because
    the model would be trained on a conversation that it never saw.

    Only the end is scored. Its reward has a term of weight x score for each reward function with a weight, or the
    single term "reward" if a rubric computes it in another way. Functions without a weight are metrics, in
    `info["metrics"]`. verifiers has no notion of success. It scores a reward function that raises with 0; here that is
    an EnvError, as is every error that ends a rollout. Rubrics that compare rollouts are refused in the constructor.

    An answer that could not be read is not shown to the environment: the model is told why, unscored, and tries again.

    Args:
        env_id: as in `verifiers.load_environment`: an installed environment package, or any module with a function
            `load_environment`.
        env_args: arguments of that function.
        max_unread_answers: unreadable answers in a row that truncate the episode, at least 1.

    Raises:
        MissingExtraError: verifiers is not installed.
        ConfigError: the environment cannot be loaded, or its rubric scores groups.
    """

    takes_messages = True

    def __init__(self, *, env_id: str, env_args: Mapping[str, Any] | None = None, max_unread_answers: int = 8) -> None:
        if max_unread_answers < 1:
            raise ConfigError(f"Verifiers: expected max_unread_answers >= 1, got {max_unread_answers}")
        self._where = f"Verifiers: {env_id}"
        self._loaded: Loaded = load(env_id, dict(env_args or {}))
        self._max_unread_answers = max_unread_answers
        self._num_unread_answers = 0
        self._bridge: Bridge | None = None
        self._rollout: asyncio.Task[Mapping[str, Any]] | None = None
        self._said: list[Message] = []  # the conversation, as the model has it
        self._is_held_out = True

    @property
    def tool_schemas(self) -> tuple[Mapping[str, Any], ...]:
        return self._loaded.tool_schemas

    # type: ignores: the methods are async, which Gymnasium's are not.
    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, Info]:
        """Start a rollout of the seed's row (without a seed: `splits.next_seed`), up to its first prompt."""
        super().reset(seed=seed)
        if options:
            raise ConfigError(f"Verifiers.reset: expected no options, got {sorted(options)}")
        await self._stop()
        if seed is None:
            seed = next_seed(self.np_random)
        row, self._is_held_out = self._loaded.row(seed)
        self._bridge, self._said, self._num_unread_answers = Bridge(self._loaded.package, name=self._where), [], 0
        self._rollout = asyncio.create_task(self._loaded.rollout(row, self._bridge.client))
        request = await self._next_request()
        if request is None:
            output = await self._output()
            text = f"{self._where}: the rollout of seed {seed} asked for no answer at all"
            raise EnvError(f"{text}: stop condition {output.get('stop_condition')!r}")
        return self._news(request), {"example_id": row.get("example_id"), "is_held_out": self._is_held_out}

    async def step(self, action: Message | str) -> StepTuple:  # type: ignore[override]
        """Answer the rollout, and return its next prompt or its end."""
        if self._bridge is None:
            raise ResetNeeded("Verifiers.step: no rollout is going on; call reset first")
        message = action if isinstance(action, Message) else Message("assistant", action)
        self._num_unread_answers = 0
        self._said.append(message)
        self._bridge.answer(message)
        request = await self._next_request()
        if request is None:
            return await self._end()
        return self._news(request), None, False, False, {}

    async def invalid_action(self, error: str) -> StepTuple:
        """Show `error` to the model; the rollout still waits for an answer."""
        if self._bridge is None:
            raise ResetNeeded("Verifiers.invalid_action: no rollout is going on; call reset first")
        self._num_unread_answers += 1
        is_hopeless = self._num_unread_answers >= self._max_unread_answers
        if is_hopeless:
            await self._stop()
        return error, None, False, is_hopeless, {}

    async def close(self) -> None:  # type: ignore[override]
        await self._stop()

    async def _next_request(self) -> Request | None:  # None: the rollout has ended, well or badly
        assert self._bridge is not None, "there is a bridge as long as there is a rollout"
        assert self._rollout is not None, "a rollout was started"
        asking = asyncio.ensure_future(self._bridge.next_request())
        try:
            await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()

    def _news(self, request: Request) -> list[Message]:
        """Return what the prompt adds to the conversation, and take it over."""
        prompt = request.messages
        start = len(self._said)
        where = self._where
        for index, (known, shown) in enumerate(zip(self._said, prompt, strict=False)):
            if _essence(known) != _essence(shown):
                raise ContractError(
                    f"{where}: message {index} was {known.content!r:.80} and is now {shown.content!r:.80}; an "
                    "environment that rewrites the conversation cannot be trained turn by turn"
                )
        if request.tool_schemas != self.tool_schemas:
            names = [schema["function"]["name"] for schema in request.tool_schemas]
            raise ContractError(f"{where}: expected the same tools in every rollout, got {names} in this one")
        if len(prompt) <= start:
            raise ContractError(f"{where}: expected a prompt of more than {start} messages, got {len(prompt)}")
        news = list(prompt[start:])
        if start and any(message.role == "assistant" for message in news):
            raise ContractError(f"{where}: expected what the environment says, got a message in the model's name")
        self._said = list(prompt)
        return news

    async def _end(self) -> StepTuple:
        output = await self._output()
        if output.get("error"):
            raise EnvError(f"{self._where}: the rollout failed: {_told(output['error'])}")
        reason = output.get("stop_condition")
        metrics = dict(output.get("metrics") or {})
        info = {"stop_condition": reason, "metrics": metrics, "is_held_out": self._is_held_out}
        truncated = reason in _LIMITS
        reward = self._reward(output.get("reward"), metrics) if self._loaded.is_scored else None
        return self._last_words(output), reward, not truncated, truncated, info

    def _reward(self, total: object, metrics: Mapping[str, float]) -> Reward:
        if not isinstance(total, int | float) or not is_finite(total):
            raise ContractError(f"{self._where}: expected a finite reward, got {total!r:.80}")
        terms = {name: weight * metrics[name] for name, weight in self._loaded.weights.items() if name in metrics}
        if math.isclose(math.fsum(terms.values()), total, rel_tol=1e-6, abs_tol=1e-9):
            return Reward(terms)
        return Reward({"reward": float(total)})

    def _last_words(self, output: Mapping[str, Any]) -> list[Message]:
        # The environment's messages after the last answer; calls that it left open are answered here.
        said = list(output.get("completion") or ())
        words: list[Message] = []
        while said and said[-1].get("role") != "assistant":
            words.insert(0, as_message(said.pop(), where=self._where))
        answered = {message.tool_call_id for message in words}
        unmade = [call for call in self._said[-1].tool_calls if call.id not in answered]
        return [*(Message("tool", _UNMADE, tool_call_id=call.id, name=call.name) for call in unmade), *words]

    async def _output(self) -> Mapping[str, Any]:
        assert self._rollout is not None, "a rollout was started"
        rollout, self._rollout, self._bridge = self._rollout, None, None
        try:
            return await rollout
        except GymError:
            raise
        except Exception as error:
            raise EnvError(f"{self._where}: the rollout raised {type(error).__name__}: {error}") from error

    async def _stop(self) -> None:
        rollout, self._rollout, self._bridge = self._rollout, None, None
        if rollout is not None:
            rollout.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # its result is not wanted any more
                await rollout


def _essence(message: Message) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    # What must not change. Reasoning and the spelling of arguments differ between the forms of one message.
    return message.role, message.content.strip(), tuple((call.id, call.name) for call in message.tool_calls)


def _told(error: object) -> str:
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("error") or error)
    return str(error)


# (prompt, sampling_args, tools or None, state) -> a `verifiers.types.Response`
Respond = Callable[[Sequence[Any], Mapping[str, Any], Sequence[Any] | None, Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """A rollout's request to the model: the whole conversation, and the tools offered."""

    messages: tuple[Message, ...]
    tool_schemas: tuple[Mapping[str, Any], ...]


class Bridge:
    """Passes each request of one rollout to the episode, and the episode's answer back, by `client`."""

    def __init__(self, package: Any, *, name: str) -> None:
        self.client = client_asking(self._ask)
        self._package = package
        self._name = name
        self._requests: asyncio.Queue[Request | ContractError] = asyncio.Queue()
        self._answer: asyncio.Future[Message] | None = None  # None unless the rollout waits

    async def next_request(self) -> Request:
        """Return the rollout's next request; a ContractError if it cannot be shown to the model."""
        asked = await self._requests.get()
        if isinstance(asked, ContractError):
            raise asked
        return asked

    def answer(self, message: Message) -> None:
        """Give the model's answer to the last request."""
        assert self._answer is not None, "there is an answer to every request and no other"
        self._answer.set_result(message)

    async def _ask(self, prompt: Sequence[Any], _sampling: object, tools: Sequence[Any] | None, _state: object) -> Any:
        try:
            if self._answer is not None:
                raise ContractError(
                    f"{self._name}: asked for another answer before it had the first; an environment that talks to the "
                    "model in several conversations at once cannot be trained turn by turn"
                )
            messages = tuple(as_message(message, where=self._name) for message in prompt)
            request = Request(messages, tuple(schema_of(tool) for tool in tools or ()))
        except ContractError as error:
            self._requests.put_nowait(error)  # raised in the episode, whatever the rollout makes of it
            raise
        self._answer = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        try:
            return response(self._package, await self._answer)
        finally:
            self._answer = None


def as_message(message: Any, *, where: str) -> Message:
    """Return a message of verifiers, or a mapping in the OpenAI shape, as a `Message`, which has text only."""
    get = message.get
    role = get("role")
    if role not in ("system", "user", "assistant", "tool"):
        raise ContractError(
            f"{where}: expected a chat message, got one of role {role!r}; completions are not supported"
        )
    calls = tuple(_as_call(call) for call in get("tool_calls") or ())
    content = _content(get("content"), where)
    if role == "assistant":
        return Message("assistant", content, calls, reasoning_content=get("reasoning_content"))
    return Message(role, content, tool_call_id=get("tool_call_id"))


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") != "text":
            raise ContractError(f"{where}: expected text, got a part of type {part.get('type')!r}; no engine reads it")
        texts.append(str(part.get("text")))
    return "\n".join(texts)


def _as_call(call: Any) -> ToolCall:  # arguments are JSON text
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError:
        arguments = {"arguments": call.arguments}  # not written by our model, so kept as it is
    return ToolCall(call.id, call.name, arguments if isinstance(arguments, dict) else {"arguments": arguments})


def response(package: Any, message: Message, *, is_cut_off: bool = False, tokens: Any = None, usage: Any = None) -> Any:
    """Return a `verifiers.types.Response` with `message`, which the limit on tokens may have ended."""
    types = package.types
    calls = [
        types.ToolCall(id=call.id, name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False))
        for call in message.tool_calls
    ]
    said = types.ResponseMessage(
        content=message.content,
        reasoning_content=message.reasoning_content,
        tool_calls=calls or None,
        finish_reason="length" if is_cut_off else "tool_calls" if calls else "stop",
        is_truncated=is_cut_off,
        tokens=tokens,
    )
    return types.Response(id="turn", created=0, model="policy", message=said, usage=usage)


def client_asking(respond: Respond) -> Any:
    """Return a `verifiers.clients.Client` that asks `respond` instead of a server."""
    base: Any = importlib.import_module("verifiers.clients.client").Client

    class AskingClient(base):  # type: ignore[misc]  # an untyped package, imported only here
        async def get_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any = None, **_: Any
        ) -> Any:
            """Return the response of `respond`."""
            del model
            return await self.client(prompt, sampling_args, tools, state)

        def _never(self, *_args: Any, **_kwargs: Any) -> Any:
            raise AssertionError("only get_response is called from outside, and here it calls nothing of these")

        setup_client = to_native_tool = to_native_prompt = get_native_response = _never
        raise_from_native_response = from_native_response = _never

        async def close(self) -> None: ...

    return AskingClient(respond)


_MODEL = "policy"  # name of the only model in a rollout's state
_Failures = list[tuple[str, Exception]]

_loading = threading.RLock()
_failures: ContextVar[_Failures] = ContextVar("_failures")  # of reward functions in the rollout being scored


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A loaded verifiers environment.

    Attributes:
        name: its env_id, for errors.
        weights: of the reward functions that have one, by name.
        is_scored: whether it scores rollouts at all.
    """

    package: Any
    environment: Any
    name: str
    tool_schemas: tuple[Mapping[str, Any], ...]
    weights: Mapping[str, float]
    is_scored: bool

    def row(self, seed: int) -> tuple[dict[str, Any], bool]:
        """Return the row that a seed names, and whether it is held out from training; a ConfigError without rows."""
        is_training = seed >= FIRST_TRAINING_SEED
        with _loading:  # data that could not be built are tried again
            held_out = None if is_training else self.environment.build_eval_dataset()
            try:
                rows = self.environment.get_dataset() if held_out is None else held_out
            except ValueError as error:
                raise ConfigError(f"Verifiers: {self.name} has no training rows, only evaluation rows") from error
            if len(rows) == 0:
                raise ConfigError(f"Verifiers: {self.name} has no {'training' if is_training else 'evaluation'} rows")
            return dict(rows[(seed % FIRST_TRAINING_SEED if is_training else seed) % len(rows)]), held_out is not None

    async def rollout(self, row: dict[str, Any], client: Any) -> Mapping[str, Any]:
        """Run and score one rollout; return verifiers' output."""
        failures: _Failures = []
        _failures.set(failures)  # a context variable of this rollout's task, so others do not see it
        output: Mapping[str, Any] = await self.environment.run_rollout(row, client, _MODEL, {})
        if failures:  # which verifiers would count as 0
            name, error = failures[0]
            text = f"Verifiers: {self.name}: reward function {name} raised {type(error).__name__}: {error}"
            raise EnvError(text) from error
        return output


def load(env_id: str, env_args: Mapping[str, Any]) -> Loaded:
    """Return the environment of that name with these arguments; equal JSON arguments share one."""
    try:
        key = json.dumps(env_args, sort_keys=True)
    except TypeError:  # other objects cannot be compared, so they share nothing
        return _load(env_id, env_args)
    with _loading:
        return _load_once(env_id, key)


@functools.cache
def _load_once(env_id: str, arguments: str) -> Loaded:
    return _load(env_id, json.loads(arguments))


def forget_loaded() -> None:
    """Drop the loaded environments, for a program that edits one while it runs."""
    _load_once.cache_clear()


def _load(env_id: str, env_args: Mapping[str, Any]) -> Loaded:
    names = ("load_environment", "types.Response", "types.ResponseMessage", "types.ToolCall")
    others = ("verifiers.envs.environment:signal", "verifiers.clients.client:Client")
    modules = [*(f"verifiers:{name}" for name in names), *others]
    package = import_package("Verifiers", "verifiers", *modules, extra="envs-verifiers")
    core = importlib.import_module("verifiers.envs.environment")
    try:
        with _loading, _signals_left_alone(core):
            environment = package.load_environment(env_id, **env_args)
    except Exception as error:
        cause = f" (from {type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ else ""
        raise ConfigError(f"Verifiers: cannot load {env_id!r}: {type(error).__name__}: {error}{cause}") from error
    if environment.requires_group_rollouts or environment.provides_advantages:
        raise ConfigError(
            f"Verifiers: {env_id} scores the rollouts of a group against each other, and an episode here is scored by "
            "itself; remove its group reward functions, or give a judge that ranks groups"
        )
    weights: dict[str, float] = {}
    for rubric in _rubrics(environment):
        rubric.funcs = [_telling(function) for function in rubric.funcs]
        weights |= {_name(f): float(w) for f, w in zip(rubric.funcs, rubric.weights, strict=True) if w}
    schemas = tuple(schema_of(tool) for tool in environment.tool_defs or ())
    with _loading:
        for build in (environment.build_eval_dataset, environment.get_dataset):
            # Data of a large set take longer than a reset may. What fails here fails again in `row`, where it is told.
            with suppress(Exception):
                build()
    return Loaded(package, environment, env_id, schemas, weights, bool(environment.score_rollouts))


def schema_of(tool: Any) -> dict[str, Any]:
    """Return a `verifiers.Tool` as an OpenAI function schema; a ContractError without a name or parameters."""
    try:
        function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    except (AttributeError, TypeError) as error:
        raise ContractError(f"Verifiers: expected a tool with name, description, parameters, got {tool!r}") from error
    return {"type": "function", "function": function}


def _rubrics(environment: Any) -> Iterator[Any]:  # groups hold rubrics, and groups of environments hold environments
    waiting = [environment.rubric, *(child.rubric for child in getattr(environment, "envs", ()))]
    while waiting:
        rubric = waiting.pop()
        waiting += getattr(rubric, "rubrics", ())
        yield rubric


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    # verifiers logs an exception of a reward function and goes on with a score of 0: it is recorded here.

    # verifiers decides by the signature which arguments to pass; functools.wraps keeps it.
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            _tell(function, error)
            raise
        return awaited(result) if inspect.isawaitable(result) else result

    async def awaited(result: Any) -> Any:
        try:
            return await result
        except Exception as error:
            _tell(function, error)
            raise

    return call


def _tell(function: Callable[..., Any], error: Exception) -> None:
    _failures.get([]).append((_name(function), error))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


@contextmanager
def _signals_left_alone(core: Any) -> Iterator[None]:
    # Each environment would replace the handlers of SIGINT and SIGTERM by one that ends the process without the
    # run's last checkpoint. Outside the main thread, where environments are made, Python refuses it.
    real = core.signal
    quiet = {name: getattr(real, name) for name in ("SIGINT", "SIGTERM", "default_int_handler")}
    core.signal = SimpleNamespace(signal=lambda *_: None, **quiet)
    try:
        yield
    finally:
        core.signal = real
