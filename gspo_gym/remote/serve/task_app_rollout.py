"""POST /rollout of a served environment: read the request, play it with the model that it names, and answer.

`Runs` bounds how many play at once and stops them. A failed rollout is an HTTP error with a code, never an answer with
a made-up reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import numpy as np
from pydantic import ValidationError

from gspo_gym.env.data.rows import next_seed
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import GymError
from gspo_gym.remote.apps.contracts import RolloutRequest
from gspo_gym.remote.apps.urls import PinnedUrl, UrlError, UrlPolicy
from gspo_gym.remote.guard import RefusalError, failure_status
from gspo_gym.remote.serve.agent_loop import (
    InferenceClient,
    Plan,
    PlayedRollout,
    PlayError,
    end_if_actions_were_slow,
    play_rollout,
)
from gspo_gym.remote.serve.env_source import EnvSource
from gspo_gym.remote.serve.rollout_answer import AnswerContext, AppStepRewards, rollout_answer, step_rewards_of

_log = logging.getLogger(__name__)

_ID_NAMES = ("cid", "trace_correlation_id", "trace")  # in the query of an inference URL, in this order
_STATUS = {"policy_step_failed": 502}  # of a PlayError; else 500


@dataclass(frozen=True, slots=True)
class InferenceSettings:
    """How a rollout may call its model.

    Attributes:
        urls: allows or refuses the URL in a request.
        api_key: sent there as a bearer; None sends none. It goes to every allowed URL: allow few.
        timeout_seconds: for one answer of the model. max_retries: by the `openai` package.
    """

    urls: UrlPolicy
    api_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 600.0
    max_retries: int = 2


class Rollouts:
    """Plays rollouts of one environment.

    Args:
        source: the environment. runs: limits the rollouts that play at once.
        inference: how the model is called.
        step_timeout_seconds: for each call of an environment's method.
        max_seconds: of one rollout, for every request.
    """

    def __init__(
        self,
        source: EnvSource,
        runs: Runs,
        *,
        inference: InferenceSettings,
        step_timeout_seconds: float,
        max_seconds: float,
    ) -> None:
        self._source, self._runs, self._inference = source, runs, inference
        self._step_timeout, self._max_seconds = step_timeout_seconds, max_seconds

    async def answer(self, request: RolloutRequest, *, client_left: Coroutine[Any, Any, Any]) -> dict[str, Any]:
        """Play a rollout and return the answer; `client_left` returns when its client has gone.

        Raises:
            RefusalError: the request is wrong, or there is no place for it, or the rollout failed.
        """
        try:
            factory = self._source.factory_of(request.env.config)
            plan, context = self._read(request, factory)
            url = await checked_url(self._inference.urls, context.inference_url)
        except BaseException:
            client_left.close()  # or asyncio warns that it was never awaited
            raise
        rollout = PlayedRollout()
        try:
            async with self._runs.begin(request.run_id) as run:
                playing = self._play(rollout, run, plan, request, url, factory)
                seconds = min(request.safety.max_time_s, self._max_seconds)
                # Whatever ends first: the episode, an abort, the client's connection, or the time.
                is_over = await until_stopped(playing, run.abort_requested.wait(), client_left, timeout_seconds=seconds)
                # Slow actions are the model's doing and are scored, while an abort has no result.
                if not (is_over or run.abort_requested.is_set()):
                    is_over = await end_if_actions_were_slow(rollout, plan, seconds=seconds)
                run.status = "succeeded" if is_over else "aborted"
        except PlayError as error:
            _log.info("rollout %s: %s: %s", request.run_id, error.code, error)
            raise RefusalError(_status_of(error, request), error.code, str(error)) from error
        finally:
            client_left.close()
        return rollout_answer(rollout, context, aborted=not is_over, created_at=run.started_at)

    async def _play(
        self, rollout: PlayedRollout, run: Run, plan: Plan, request: RolloutRequest, url: PinnedUrl, factory: Any
    ) -> None:
        async with self._runs.place(run):
            model = InferenceClient(
                url,
                request.policy.config,
                api_key=self._inference.api_key,
                with_logprobs=request.record.logprobs,
                timeout_seconds=self._inference.timeout_seconds,
                max_retries=self._inference.max_retries,
            )
            try:
                session = await self._open_session(factory)
                await _play_and_close(rollout, session, model, plan)
            finally:
                await model.close()

    async def _open_session(self, factory: Any) -> EnvSession:
        try:
            return await open_session(factory, env_id=self._source.env_id, step_timeout_seconds=self._step_timeout)
        except GymError as error:
            raise PlayError("env_init_failed", str(error)) from error

    def _read(self, request: RolloutRequest, factory: Any) -> tuple[Plan, AnswerContext]:
        env, policy = request.env, request.policy.config
        for name in (env.env_name, env.env_id):
            if not self._source.is_called(name):
                raise RefusalError(404, "unknown_env", f"{name!r} is not served here; {self._source.name} is")
        url, correlation_id = inference_of(request)
        seed = task_seed(request, self._source.seed_of(env.config, env.seed))
        plan = Plan(
            make_env=factory,
            seed=seed,
            max_turns=num_turns_of(request.ops, request.safety.max_ops),
            system_prompt=_system_prompt_of(policy),
            on_done=_on_done_of(request.on_done),
        )
        policy_id = request.policy.policy_id or request.policy.policy_name or "policy"
        rewards = _step_rewards(policy, env.config)
        return plan, AnswerContext(request, self._source.name, policy_id, url, correlation_id, rewards, seed)


def _status_of(error: PlayError, request: RolloutRequest) -> int:
    # Before the first step, the request's own values may be the cause.
    if error.code in ("env_init_failed", "env_reset_failed"):
        return failure_status(error, request.env.config)
    return _STATUS.get(error.code, 500)


def inference_of(request: RolloutRequest) -> tuple[str, str | None]:
    """Return the URL of a rollout's model, and the id by which the trainer finds its calls; None outside of training.

    Raises:
        RefusalError: there is no URL, or no id in training.
    """
    policy = request.policy.config
    url = policy.get("inference_url")
    if not isinstance(url, str) or not url:
        raise RefusalError(422, "missing_inference_url", "policy.config.inference_url: expected a URL, got none")
    correlation_id = correlation_id_of(policy, url)
    if correlation_id is None and request.mode == "rl":
        raise RefusalError(
            422,
            "missing_correlation_id",
            'mode "rl" needs policy.config.trace_correlation_id, or ?cid= in policy.config.inference_url',
        )
    return url, correlation_id


async def checked_url(urls: UrlPolicy, url: str) -> PinnedUrl:
    """Return the URL with an address at which it may be called.

    Raises:
        RefusalError: the operator does not allow it.
    """
    try:
        return await urls.check(url)
    except UrlError as error:
        text = f"{error} (the operator allows hosts with --inference-host)"
        raise RefusalError(422, "inference_url_not_allowed", text) from error


def task_seed(request: RolloutRequest, requested_seed: int | None) -> int:
    """Return the seed of the task that a request names, or draw one for its run id if it names none.

    Raises:
        RefusalError: the seed is negative.
    """
    if requested_seed is None:
        return seed_of(request.run_id, is_evaluation=request.mode == "eval")
    if requested_seed < 0:
        raise RefusalError(422, "bad_seed", f"env.seed: expected a number >= 0, got {requested_seed}")
    return requested_seed


def correlation_id_of(policy: Mapping[str, Any], url: str) -> str | None:
    """Return the id by which the trainer looks for this rollout, or None.

    >>> correlation_id_of({}, "http://gw/t/x/v1/chat/completions?cid=x")
    'x'
    """
    # In the policy first, because a URL may have been changed on the way.
    for name in ("trace_correlation_id", "trace"):
        if isinstance(policy.get(name), str) and policy[name]:
            return str(policy[name])
    query = parse_qs(urlsplit(url).query)
    return next((query[name][0] for name in _ID_NAMES if name in query), None)


def num_turns_of(ops: Sequence[str | Mapping[str, Any]], max_ops: int) -> int:
    """Return the decisions that the ops ask for: "agent" and "env" in turn, as text or as {"type": ...}.

    Raises:
        RefusalError: they are anything else, or too few for one decision.

    >>> num_turns_of(["agent", "env", "agent", "env"], 100), num_turns_of(["agent", "env"] * 9, 5)
    (2, 2)
    """
    names = [op if isinstance(op, str) else op.get("type") for op in ops]
    if names != ["agent", "env"] * (len(names) // 2):
        ops_text = f"{names[:6]}{'...' if len(names) > 6 else ''}"
        raise RefusalError(422, "bad_ops", f'ops: expected "agent" and "env" in turn, got {ops_text}')
    num_turns = min(len(names), max_ops) // 2
    if num_turns < 1:
        raise RefusalError(422, "bad_ops", f"ops: expected at least one decision, got {len(names)} ops of {max_ops}")
    return num_turns


def seed_of(run_id: str, *, is_evaluation: bool) -> int:
    """Draw the seed of a rollout that brings none, the same one for the same id: held out in an evaluation only.

    >>> seed_of("a", is_evaluation=True) < 2**31 <= seed_of("a", is_evaluation=False)
    True
    """
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(run_id.encode()).digest(), "big"))
    return next_seed(rng, is_held_out=is_evaluation)


def _system_prompt_of(policy: Mapping[str, Any]) -> str | None:
    prompt = policy.get("system_prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise RefusalError(422, "bad_system_prompt", f"policy.config.system_prompt: expected text, got {prompt!r:.80}")
    return prompt


def _on_done_of(on_done: str) -> Any:  # Any: one of two texts
    if on_done not in ("reset", "terminate"):
        raise RefusalError(422, "bad_on_done", f'on_done: expected "reset" or "terminate", got {on_done!r:.80}')
    return on_done


def _step_rewards(policy: Mapping[str, Any], env: Mapping[str, Any]) -> AppStepRewards:
    try:
        return step_rewards_of(policy, env)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise RefusalError(422, "bad_step_rewards", f"step_rewards: {reasons}") from error


async def _play_and_close(rollout: PlayedRollout, session: EnvSession, model: InferenceClient, plan: Plan) -> None:
    try:
        await play_rollout(rollout, session=session, ask=model.ask, plan=plan)
    # The environment is closed also if the client has gone.
    except BaseException:
        with contextlib.suppress(GymError):  # it would only hide the first
            await asyncio.shield(session.close())
        raise
    try:
        await asyncio.shield(session.close())
    # An error of closing after a good rollout is the rollout's failure: what it did may not have been kept.
    except GymError as error:
        raise PlayError("env_close_failed", str(error)) from error


Status = Literal["waiting", "running", "succeeded", "failed", "aborted"]
_MAX_REMEMBERED = 10_000  # ended runs


@dataclass(slots=True, eq=False)
class Run:
    """One rollout. `abort_requested` is set when it should stop; times are the wall clock's, for people."""

    run_id: str
    status: Status = "waiting"
    started_at: str = field(default_factory=lambda: _now())
    finished_at: str | None = None
    abort_requested: asyncio.Event = field(default_factory=asyncio.Event)

    def to_wire(self) -> dict[str, Any]:
        """Return the answer to GET /run/status/{run_id}."""
        times = {"started_at": self.started_at, "finished_at": self.finished_at}
        return {"run_id": self.run_id, "status": self.status, **times}


class Runs:
    """The rollouts under way, and those that ended not long ago.

    Args:
        max_running: at once. max_waiting: for a place; one more is turned away.
    """

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._runs: OrderedDict[str, Run] = OrderedDict()

    @contextlib.asynccontextmanager
    async def begin(self, run_id: str) -> AsyncIterator[Run]:
        """Register a run that ends with the block; `place` then waits for its turn.

        Raises:
            RefusalError: that run is under way already, or too many are waiting.
        """
        earlier_run = self._runs.get(run_id)
        # A client that asks again after a lost answer would play the same attempt twice.
        if earlier_run is not None and earlier_run.finished_at is None:
            raise RefusalError(409, "run_exists", f"run {run_id!r} is under way; a run id names one attempt")
        if self._num_waiting >= self._max_waiting:
            raise RefusalError(503, "overloaded", f"{self._num_waiting} rollouts are waiting for a place; try again")
        run = self._runs[run_id] = Run(run_id)
        self._runs.move_to_end(run_id)
        try:
            yield run
        finally:
            run.finished_at = _now()
            if run.status in ("waiting", "running"):  # it left the block by an exception
                run.status = "failed"
            self._forget_old()

    @contextlib.asynccontextmanager
    async def place(self, run: Run) -> AsyncIterator[None]:
        """Wait until the run may be played."""
        self._num_waiting += 1
        try:
            await self._places.acquire()
        # Cancelled or placed, it waits no longer.
        finally:
            self._num_waiting -= 1
        try:
            run.status = "running"
            yield
        finally:
            self._places.release()

    def get(self, run_id: str) -> Run:
        """Return a run that is under way or ended not long ago.

        Raises:
            RefusalError: there is none.
        """
        if run_id not in self._runs:
            raise RefusalError(404, "unknown_run", f"there is no run {run_id!r}")
        return self._runs[run_id]

    async def stop_all(self) -> None:
        for run in self._runs.values():
            run.abort_requested.set()

    def _forget_old(self) -> None:
        # The oldest first; those under way stay.
        for run_id in list(self._runs)[: max(0, len(self._runs) - _MAX_REMEMBERED)]:
            if self._runs[run_id].finished_at is not None:
                del self._runs[run_id]


async def until_stopped(
    playing: Coroutine[Any, Any, None], *stops: Coroutine[Any, Any, Any], timeout_seconds: float
) -> bool:
    """Return whether `playing` finished; it is cancelled if one of `stops` ends first, or the time is up.

    Raises:
        Exception: what `playing` raised, or one of `stops`.
    """
    task = asyncio.ensure_future(playing)
    watching = [asyncio.ensure_future(stop) for stop in stops]
    try:
        await asyncio.wait({task, *watching}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done, done_stops = task.done(), [stop for stop in watching if stop.done()]
        for future in (task, *watching):
            future.cancel()
        await asyncio.gather(task, *watching, return_exceptions=True)  # until the environment is closed
    for future in (task,) if is_done else done_stops:
        future.result()
    return is_done


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
