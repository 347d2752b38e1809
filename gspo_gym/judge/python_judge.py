"""A judge that is a function of the operator's: `module:function`, plain or async.

It is called with one argument, the payload: what an HTTP judge is sent (`policy_name`, `task_app`, `trace`, `options`,
`rubric`; see `http_contract.py`), and besides it `seed`, `prompt` (what was said before the first turn), `completion`
(what the model said in the last one) and `messages`. It gives the outcome's total as a number, or what an HTTP judge
answers. Rewards are not in the payload, and reasoning is only where it is asked for.

A plain function runs in a thread, so it may block; one that runs out of time is not waited for any longer, but nothing
can end it. The function is the operator's own code and is not shut off from anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import JudgeCost, JudgeError, Judgement, JudgeRequest, Review
from gspo_gym.judge.model.judge import BY_RULE, review_of
from gspo_gym.judge.model.suspicion import suspicions
from gspo_gym.judge.model.transcript import read_transcript
from gspo_gym.judge.service.contract import Json, judgement_from_wire, request_to_wire, shown_message

# The payload -> a number, or a mapping of the contract; or an awaitable of one (Any: it is a stranger's function).
JudgeFunction = Callable[[Json], Any]


class PythonJudge:
    """Scores episodes by calling the function. Use it within one event loop, and close it.

    Args:
        function: "module:function", or the function itself.
        options: further keyword arguments of the function (Any: its own).
        max_concurrency: calls at once. timeout_seconds: for one call.
        show_reasoning: whether the payload holds what the policy thought.

    Raises:
        ConfigError: there is no such function.
    """

    def __init__(
        self,
        function: str | JudgeFunction,
        *,
        options: Mapping[str, Any] | None = None,
        max_concurrency: int = 8,
        timeout_seconds: float = 60.0,
        show_reasoning: bool = False,
    ) -> None:
        self._function = load_function(function) if isinstance(function, str) else function
        self.name = f"python:{function if isinstance(function, str) else getattr(function, '__qualname__', 'function')}"
        self._options = dict(options or {})
        self._timeout_seconds = timeout_seconds
        self._show_reasoning = show_reasoning
        self._places = asyncio.Semaphore(max_concurrency)

    async def judge(self, request: JudgeRequest) -> Judgement:
        """See `Judge.judge`. An episode that says nothing gets the lowest scores and the function is not called.

        Raises:
            JudgeError: the function raised, took too long, or gave something else.
        """
        whole = read_transcript(request.trajectory, show_reasoning=self._show_reasoning)
        if all(whole.is_empty_turn(turn) for turn in range(whole.num_turns)):
            return self._lowest(request, whole.num_turns)
        payload = self._payload(request)
        try:
            async with self._places, asyncio.timeout(self._timeout_seconds):
                answer = await self._call(payload)
        except TimeoutError as error:
            raise JudgeError(f"{self.name}: no answer within {self._timeout_seconds:g} seconds") from error
        except JudgeError:
            raise
        except Exception as error:  # it is a stranger's function
            raise JudgeError(f"{self.name}: {type(error).__name__}: {error}") from error
        judgement = self._read(answer, request)
        return replace(judgement, flags=(*judgement.flags, *suspicions(request.trajectory)), cost=JudgeCost())

    async def close(self) -> None:
        """Nothing is held; a thread that never ends is not waited for."""

    async def _call(self, payload: Json) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(payload, **self._options)
        answer = await _in_thread(lambda: self._function(payload, **self._options))
        return await answer if inspect.isawaitable(answer) else answer

    def _payload(self, request: JudgeRequest) -> Json:
        rubrics, messages = request.rubrics, request.trajectory.messages
        body = request_to_wire(
            request,
            options={},
            event=rubrics.event is not None,
            outcome=rubrics.outcome is not None,
            show_reasoning=self._show_reasoning,
        )
        said = [index for index, message in enumerate(messages) if message.role == "assistant"]
        first, last = said[-len(request.trajectory.turns)], said[-1]
        return {
            **body,
            "seed": request.trajectory.task.seed,
            "prompt": "\n\n".join(message.content for message in messages[:first]),
            "completion": messages[last].content,
            "messages": [shown_message(message, show_reasoning=self._show_reasoning) for message in messages],
        }

    def _read(self, answer: Any, request: JudgeRequest) -> Judgement:
        rubrics = request.rubrics
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            if rubrics.event is not None:
                raise JudgeError(f"{self.name}: gave one number, but turns are judged, too: give event_totals")
            answer = {"outcome_review": {"total": float(answer)}}
        if not isinstance(answer, Mapping):
            raise JudgeError(f"{self.name}: expected a number or a mapping, got {answer!r:.120}")
        return judgement_from_wire(
            dict(answer),
            judge=self.name,
            num_turns=len(request.trajectory.turns),
            event=rubrics.event is not None,
            outcome=rubrics.outcome is not None,
        )

    def _lowest(self, request: JudgeRequest, num_turns: int) -> Judgement:
        event, outcome = request.rubrics.event, request.rubrics.outcome

        def lowest(rubric: Any) -> Review:
            return review_of(rubric, None, BY_RULE)

        return Judgement(
            judge=self.name,
            event_reviews=tuple(lowest(event) for _ in range(num_turns)) if event else (),
            outcome_review=None if outcome is None else lowest(outcome),
            flags=suspicions(request.trajectory),
        )


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """What the function gives (Any: its own), from a thread that keeps nothing alive: it may never end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: Exception | None) -> None:
        if future.done():
            return  # it was given up
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any longer
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, daemon=True, name="judge").start()
    return future


def load_function(name: str) -> JudgeFunction:
    """The function "module:function".

    Raises:
        ConfigError: there is none.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise ConfigError(f'judge: expected a function as "module:function", got {name!r}')
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"judge: there is no {name}: {error}") from error
    if not callable(found):
        raise ConfigError(f"judge: {name} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]  # what is callable here is what the operator says
