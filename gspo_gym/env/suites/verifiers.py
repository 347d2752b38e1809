"""`VerifiersEnv`: an environment of the package `verifiers`, one turn at a time.

In verifiers, the environment's rollout loop calls a client for each answer of the model, and a rubric scores the end.
Here that loop runs unchanged as a task, with a client that passes each prompt to the episode as an observation and
waits until `step` brings the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import ResetNeeded

from gspo_gym.env.core import Info, TextEnv
from gspo_gym.env.data.splits import next_seed
from gspo_gym.env.rewards import Reward
from gspo_gym.env.suites.verifiers_bridge import Bridge, Loaded, Request, as_message, load
from gspo_gym.errors import ConfigError, ContractError, EnvError, GymError
from gspo_gym.types import Message

StepTuple = tuple[Sequence[Message] | str, Reward | None, bool, bool, Info]

# Stop conditions that are limits, not ends of the task. (`is_truncated` only says that an answer was cut off.)
_LIMITS = ("timeout_reached", "max_total_completion_tokens_reached", "prompt_too_long")
_UNMADE = "error: the episode is over, this call was not made"


class VerifiersEnv(TextEnv):
    """An environment that `verifiers.load_environment` finds. Needs `pip install 'gspo-gym[envs-verifiers]'`.

    A seed below 2**31 names a row of its evaluation data, one from 2**31 up a row of its training data; as many
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
        if not isinstance(total, int | float) or not math.isfinite(total):
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
