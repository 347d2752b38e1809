"""Serve an agent as a task app: an async function that plays one task with an OpenAI client and returns its reward.

The function owns its loop, its tools and its sub-agents. The server around it has the routes and limits of
`task_app_server.py`; the trainer's gateway records what the client samples.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from gspo_gym.env.data.rows import (
    Row,
    RowSource,
    Sides,
    checked_fraction,
    content_hash,
    in_order,
    read_rows,
    split_by_content,
    without,
)
from gspo_gym.errors import ConfigError, ContractError, nearest_name, shortened
from gspo_gym.judge.base import Rubrics
from gspo_gym.remote.apps.contracts import EXTENSION, EpisodeDetails, RolloutRequest
from gspo_gym.remote.apps.urls import UrlPolicy
from gspo_gym.remote.guard import Guard, RefusalError
from gspo_gym.remote.serve.agent_loop import is_overflow, openai_client, policy_arguments
from gspo_gym.remote.serve.env_source import addressed_seed
from gspo_gym.remote.serve.openenv_server import joined_app
from gspo_gym.remote.serve.task_app_rollout import (
    InferenceSettings,
    Run,
    checked_url,
    inference_of,
    num_turns_of,
    task_seed,
    until_stopped,
)
from gspo_gym.remote.serve.task_app_server import LOOPBACK_HOSTS, AppFacts, Json, TaskApp, TaskAppLimits, runs_within
from gspo_gym.types import Outcome

_DEFAULT_FRACTION = 0.1
_MAX_SHOWN = 500  # characters of an error


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of one rollout; `task["question"]` is a column of its row.

    Attributes:
        seed: of the task; held out below 2**31, for training from there up.
        row: the columns of the row that the seed names; {} without rows.
        options: the trainer's `rollout.env_config`.
        policy: arguments for the client: the model's name, and how to sample as the trainer says. Use them unchanged
            where the answer is to be trained on: `client.chat.completions.create(**task.policy, messages=...)`.
        max_turns: the answers that the trainer plans for (`rollout.max_turns`); nothing here counts them.
    """

    seed: int
    row: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 1

    def __getitem__(self, column: str) -> Any:
        if column not in self.row:
            raise KeyError(f"there is no column {column!r}; {nearest_name(column, self.row)}")
        return self.row[column]


AgentFunction = Callable[[Any, AgentTask], Awaitable[float | bool | None]]  # Any: an openai.AsyncOpenAI


def agent_app(
    rollout: AgentFunction,
    rows: RowSource | None = None,
    *,
    held_out: RowSource | None = None,
    held_out_fraction: float | None = None,
    name: str | None = None,
    reward_at_limit: float | None = None,
    limits: TaskAppLimits | None = None,
    inference_hosts: Iterable[str] = LOOPBACK_HOSTS,
    inference_api_key: str | None = None,
    api_key: str | Iterable[str] | None = None,
    allowed_origins: Iterable[str] = (),
    allowed_hosts: Iterable[str] | None = None,
) -> AgentApp:
    """Return an ASGI application that serves an agent to a trainer, as a task app.

    `GSPOTrainer(env=agent_app(rollout))` serves and trains in one program; `gspo-gym app serve MODULE:ROLLOUT` serves
    to a trainer elsewhere.

    Args:
        rollout: `async def rollout(client, task)`: plays one task with an `openai.AsyncOpenAI` and an `AgentTask`, and
            returns the reward of the whole rollout, or a bool (right or wrong, also the success), or None if it cannot
            be scored, after which it is not trained on. An exception fails the rollout, and another one is played.
        rows: tasks, one a row, in any form that `DatasetEnv` reads; None: the seed alone names the task.
        held_out: rows for evaluation; None holds out a part of `rows`.
        held_out_fraction: size of that part, in (0, 1); default 0.1.
        name: of the agent, which the trainer's records show; None: the function's.
        reward_at_limit: of a rollout that ends because the model refuses a further answer (the conversation is full, or
            there were too many calls) and the agent lets that exception pass; None: it is not scored.
        limits: None: the defaults.
        inference_hosts, inference_api_key: the only hosts with inference URLs that are called, and their key.
        api_key, allowed_origins, allowed_hosts: see `Guard`.

    Raises:
        MissingExtraError: the openai package is not installed.
        ConfigError: `rollout` is not async, the rows cannot be read, or a limit, a key or a host is invalid.
    """
    limits = limits or TaskAppLimits()
    sides = None if rows is None and held_out is None else _sides(rows, held_out, held_out_fraction)
    inference = InferenceSettings(UrlPolicy(inference_hosts, is_public_allowed=False), inference_api_key)
    player = _AgentRollouts(rollout, sides, limits, name=name, inference=inference, reward_at_limit=reward_at_limit)
    read_facts = partial(player.read_facts, has_key=api_key is not None)
    return AgentApp(
        TaskApp(player.name, player, player.runs, read_facts=read_facts, limits=limits),
        api_key=api_key,
        allowed_origins=allowed_origins,
        allowed_hosts=allowed_hosts,
    )


class AgentApp(Guard):
    """The ASGI application that `agent_app` makes; any server of such applications serves it.

    Attributes:
        name: of the agent.
    """

    def __init__(self, task_app: TaskApp, **guard: Any) -> None:
        app = joined_app([task_app], title=f"{task_app.name}, an agent")
        super().__init__(app, max_concurrent_requests=task_app.max_concurrent_requests, **guard)
        self.name = task_app.name


class _AgentRollouts:
    """Plays the rollouts of one agent: the `RolloutPlayer` of its app."""

    def __init__(
        self,
        rollout: AgentFunction,
        sides: Sides[Row] | None,
        limits: TaskAppLimits,
        *,
        name: str | None,
        inference: InferenceSettings,
        reward_at_limit: float | None,
    ) -> None:
        if not (inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(type(rollout).__call__)):
            raise ConfigError(f"agent_app: expected `async def rollout(client, task)`, got {rollout!r:.80}")
        try:
            inspect.signature(rollout).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"agent_app: expected `async def rollout(client, task)`, which is called with two arguments; "
                f"{rollout!r:.80}: {error}"
            ) from None
        self.name = name or str(getattr(rollout, "__name__", "agent"))
        self.runs = runs_within(limits)
        self._rollout, self._sides, self._limits = rollout, sides, limits
        self._inference, self._reward_at_limit = inference, reward_at_limit

    async def read_facts(self, *, has_key: bool) -> AppFacts:
        """Return what /info tells; `has_key`: whether callers need one."""
        return AppFacts(
            name=self.name,
            env_id=self.name,
            description=(self._rollout.__doc__ or self.name).strip().partition("\n")[0],
            tool_schemas=(),
            rubrics=Rubrics(),
            timeout_seconds=self._limits.rollout_timeout_seconds,
            max_concurrent_rollouts=self._limits.max_concurrent_rollouts,
            has_key=has_key,
        )

    async def answer(self, request: RolloutRequest, *, client_left: Coroutine[Any, Any, Any]) -> Json:
        """Play a rollout and return the answer; `client_left` returns when its client has gone.

        Raises:
            RefusalError: the request is wrong, or there is no place for it, or the rollout failed.
        """
        scores: list[_Score] = []
        try:
            url, correlation_id = inference_of(request)
            task = self._task(request)
            pinned_url = await checked_url(self._inference.urls, url)

            async def play(run: Run) -> None:
                async with self.runs.place(run), self._client(pinned_url) as client:
                    scores.append(await self._score(client, task))

            async with self.runs.begin(request.run_id) as run:
                is_over = await until_stopped(
                    play(run),
                    run.abort_requested.wait(),
                    client_left,
                    timeout_seconds=min(request.safety.max_time_s, self._limits.rollout_timeout_seconds),
                )
                run.status = "succeeded" if is_over else "aborted"
        finally:
            client_left.close()  # or asyncio warns that it was never awaited
        score = scores[0] if is_over else _Score(None, None)
        return _answer(score, request, self.name, url, correlation_id, aborted=not is_over)

    def _client(self, url: Any) -> Any:
        inference = self._inference
        return openai_client(
            url,
            api_key=inference.api_key,
            timeout_seconds=inference.timeout_seconds,
            max_retries=inference.max_retries,
        )

    def _task(self, request: RolloutRequest) -> AgentTask:
        seed = task_seed(request, addressed_seed(request.env.config, request.env.seed))
        return AgentTask(
            seed=seed,
            row={} if self._sides is None else self._sides.of_seed(seed).values,
            options=request.env.config,
            policy=policy_arguments(request.policy.config),
            max_turns=num_turns_of(request.ops, request.safety.max_ops),
        )

    async def _score(self, client: Any, task: AgentTask) -> _Score:
        try:
            return _score_of(await self._rollout(client, task))
        except Exception as error:  # an author's function may raise anything
            outcome = _limit_in(error)
            if outcome is None:
                raise _refusal_of(error) from error
            return _Score(self._reward_at_limit, None, outcome)


@dataclass(frozen=True, slots=True)
class _Score:
    """What a rollout came to; `reward` None: it is not scored."""

    reward: float | None
    success: bool | None
    outcome: Outcome = Outcome.TERMINATED


def _limit_in(error: Exception) -> Outcome | None:
    """Return the outcome of a rollout whose model refuses a further answer; None: that is not what happened."""
    import openai

    if not isinstance(error, openai.APIStatusError):
        return None
    if is_overflow(error.status_code, error.body, str(error)):
        return Outcome.CONTEXT_OVERFLOW
    return Outcome.MAX_TURNS if error.code == "session_limit_exceeded" else None


def _refusal_of(error: Exception) -> RefusalError:
    import openai

    is_model = isinstance(error, openai.OpenAIError)
    cause = "the model" if is_model else "the agent"
    text = shortened(f"{cause} failed: {type(error).__name__}: {error}", _MAX_SHOWN)
    return RefusalError(*((502, "policy_step_failed") if is_model else (500, "rollout_failed")), text)


def _score_of(value: object) -> _Score:
    """Return the score that an agent returned.

    Raises:
        ContractError: it is no finite number, bool or None.
    """
    if value is None:
        return _Score(None, None)
    if isinstance(value, bool | np.bool_):
        return _Score(float(value), bool(value))
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ContractError(f"expected the agent to return a finite number, a bool or None, got {value!r:.80}")
    return _Score(float(value), None)


def _answer(
    score: _Score, request: RolloutRequest, name: str, url: str, correlation_id: str | None, *, aborted: bool
) -> Json:
    """Return the answer to /rollout, of generation A: no steps, because the agent tells of none, and the return."""
    details: Json = {EXTENSION: EpisodeDetails(outcome=score.outcome.value).model_dump()}
    if score.success is not None:
        details["success"] = score.success
    return {
        "run_id": request.run_id,
        "trajectories": [
            {
                "env_id": name,
                "policy_id": request.policy.policy_id or request.policy.policy_name or "policy",
                "steps": [],
                "length": 0,
                "inference_url": url,
                "trace_correlation_id": correlation_id,
            }
        ],
        "metrics": {
            "episode_returns": [] if score.reward is None else [score.reward],
            "mean_return": 0.0 if aborted else score.reward,  # the contract demands a number of an aborted one, too
            "num_steps": 0,
            "num_episodes": 1,
            "details": details,
        },
        "branches": {},
        "aborted": aborted,
        "ops_executed": 0,
        "trace_correlation_id": correlation_id,
        "trace": None,
        "pipeline_metadata": {"inference_url": url, "trace_correlation_id": correlation_id},
    }


def _sides(rows: RowSource | None, held_out: RowSource | None, fraction: float | None) -> Sides[Row]:
    """Return the rows split by their content: equal rows are on one side.

    Raises:
        ConfigError: a side has no row.
    """
    if rows is None:
        raise ConfigError("agent_app: held_out goes with rows, which are trained on")
    fraction = checked_fraction(fraction, _DEFAULT_FRACTION, has_own_held_out=held_out is not None, where="agent_app")
    entries = _entries(rows)
    if held_out is None:
        train, held_out_entries = split_by_content(entries, fraction)
    else:
        held_out_entries = _entries(held_out)
        train = without(entries, held_out_entries)
    for side, members in (("training", train), ("held-out", held_out_entries)):
        if not members:
            raise ConfigError(f"agent_app: expected a {side} row, got none of {len(entries)}; give more rows")
    return Sides(in_order(train), in_order(held_out_entries))


def _entries(rows: RowSource) -> list[tuple[int, int, Row]]:
    return [
        (content_hash(json.dumps(row.values, sort_keys=True, default=str), 0), index, row)
        for index, row in enumerate(read_rows(rows))
    ]
