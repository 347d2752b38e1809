"""Let a task app play episodes, and make of the gateway's capture the trajectory that `run_episode` would make.

One attempt is one gateway session and one request. Failures are in the record; what an app says after its model failed
is no reward. An attempt that the app turned away (no connection, 429, 5xx) is made again with a fresh session and a
fresh run id: if the earlier one was begun after all, it talks to a closed session and its answer is lost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gspo_gym.base.retries import Retries, RetrySettings, Sleep
from gspo_gym.errors import ConfigError, EnginePoisonedError
from gspo_gym.remote.apps.client import TaskAppClient
from gspo_gym.remote.apps.contracts import (
    AppAttemptError,
    AppError,
    AppTimeoutError,
    PolicyInjection,
    RolloutEnv,
    RolloutPolicy,
    RolloutRecord,
    RolloutRequest,
    RolloutSafety,
)
from gspo_gym.remote.apps.rewards import AppRollout, join_rewards
from gspo_gym.remote.apps.urls import operator_url
from gspo_gym.remote.gateway.app import rollout_url
from gspo_gym.remote.gateway.capture import Capture, FailedCall
from gspo_gym.remote.gateway.capture_build import CaptureBuild, build_trajectory_parts
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.rollout.episode import EpisodeRequest, one_line
from gspo_gym.types import Message, Outcome, Task, Timing, Trajectory, Turn

_log = logging.getLogger(__name__)

# Refusals that the episode's own limits are: what the app makes of them is a result.
_OUR_LIMITS: Mapping[str, Outcome] = {"overflow": Outcome.CONTEXT_OVERFLOW, "limit": Outcome.MAX_TURNS}
# Refusals of what the app asked for, which asking again does not change: the app decides how to go on.
_REFUSALS = ("template", "config")
_ANSWER_FRACTION = 0.25  # of an episode's time
_MAX_RETURNS = 65_536  # attempts whose returns are remembered until their step has ended
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")  # run ids stand in URLs and file names of some apps


@dataclass(frozen=True, slots=True)
class AppEpisodeSettings:
    """The app's environment and policy, and limits of the episodes.

    Attributes:
        env_name: the app's name of the environment.
        session: of the gateway; name and sampling seed are those of each attempt.
        model: the name under which the app asks the gateway for the model.
        gateway_url: base URL under which the app reaches the gateway.
        max_turns: decisions of an episode; the app is sent "agent" and "env" for each.
        env_config, policy_name, policy_config: passed to the app unchanged.
        mode: "rl" to train, "eval" to measure.
        episode_timeout_seconds: of one attempt, and a quarter of it more until the answer's last byte: in that time a
            server of this library finds out whether the actions used the time up, which it then scores.
        max_tries: requests of one attempt at an episode that the app turns away. Eight wait half a minute to a minute
            in all, enough to restart an app under a run.
    """

    env_name: str
    session: GatewaySessionSettings
    model: str
    gateway_url: str
    max_turns: int
    env_config: Mapping[str, Any] = field(default_factory=dict)
    policy_name: str | None = None
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    mode: Literal["rl", "eval"] = "rl"
    episode_timeout_seconds: float = 600.0
    max_tries: int = 8

    def __post_init__(self) -> None:
        operator_url(self.gateway_url)
        if self.max_turns < 1 or self.max_tries < 1 or not self.episode_timeout_seconds > 0:
            raise ConfigError(
                "AppEpisodeSettings: expected max_turns, max_tries and episode_timeout_seconds > 0, got "
                f"{self.max_turns}, {self.max_tries} and {self.episode_timeout_seconds}"
            )
        ours = sorted({"model", "inference_url", "trace_correlation_id"} & set(self.policy_config))
        if ours:
            raise ConfigError(f"rollout.policy_config: {', '.join(ours)} is set for each rollout; leave it out")
        for name in ("temperature", "top_p"):
            policy_value, session_value = self.policy_config.get(name), getattr(self.session.sampling, name)
            if policy_value is not None and policy_value != session_value:
                raise ConfigError(
                    f"rollout.policy_config.{name} is {policy_value!r} and the episodes are sampled with "
                    f"{session_value!r}; the learner scores under one, so make them equal or leave it out"
                )


@dataclass(slots=True)
class AppCounters:
    """Counts so far; mutable.

    `num_attempts` counts requests to the app, `calls` the calls of the model by their use ("trained", or the reason
    against it), `warnings` by kind, `first_warnings` the whole text of the first of each kind; tokens are those sampled
    in episodes that were not failures. `num_untrained_episodes` have a return and no token that is trained on.
    `returns` are the app's returns of every attempt that it finished, used or not, by trajectory and attempt; the
    oldest are forgotten.
    """

    num_attempts: int = 0
    num_sampled_tokens: int = 0
    num_trained_tokens: int = 0
    num_untrained_episodes: int = 0
    returns: dict[tuple[str, int], float] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    warnings: Counter[str] = field(default_factory=Counter)
    first_warnings: dict[str, str] = field(default_factory=dict)

    def note_return(self, trajectory_id: str, attempt: int, episode_return: float) -> None:
        """Keep the return that the app gave for an attempt."""
        self.returns[trajectory_id, attempt] = episode_return
        # Attempts of episodes that no step ever takes would stay for ever.
        if len(self.returns) > _MAX_RETURNS:
            del self.returns[next(iter(self.returns))]

    @property
    def trained_fraction(self) -> float:
        """Return the share of sampled tokens that reach training; 0 if none was sampled."""
        return self.num_trained_tokens / max(1, self.num_sampled_tokens)


@dataclass(frozen=True, slots=True)
class _Played:
    capture: Capture
    rollout: AppRollout | None
    error: AppError | None = None


@dataclass(frozen=True, slots=True)
class _Ending:
    outcome: Outcome
    error: str | None = None  # of a failure


class AppEpisodes:
    """Episodes of one app. Attempts may overlap; use it within one event loop, the gateway's.

    Args:
        client: of the app.
        gateway: records the model's calls.
        settings: the app's environment, policy and limits.
        retry_seed: of the jitter between tries.
        clock, sleep: seconds, monotonic.
        on_answer: receives the app's answer to each rollout before it is judged; None: nothing does.

    Attributes:
        counters: counts so far.
    """

    def __init__(
        self,
        client: TaskAppClient,
        gateway: Gateway,
        settings: AppEpisodeSettings,
        *,
        retry_seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        on_answer: Callable[[AppRollout], None] | None = None,
    ) -> None:
        self.settings = settings
        self._on_answer = on_answer
        self.counters = AppCounters()
        self._client = client
        self._gateway = gateway
        self._clock = clock
        retries = RetrySettings(
            max_attempts=settings.max_tries,
            first_delay_seconds=0.5,
            max_delay_seconds=30.0,
            budget_fraction=settings.max_tries,  # no budget: an episode holds its slot while it waits
        )
        self._retries = Retries(retries, gives_up_with=AppError, seed=retry_seed, sleep=sleep)

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Play one attempt. Its failure is a record and no exception, and keeps what was captured until then.

        Raises:
            asyncio.CancelledError: cancelled from outside; the session is closed.
            EnginePoisonedError: no episode can be played with this engine any more.
        """
        start = self._clock()
        capture, parts, success, reports_events = None, None, None, True
        final_messages: tuple[Message, ...] = ()
        try:
            attempt = await self._play(request)
            capture, rollout = attempt.capture, attempt.rollout
            if rollout is not None and self._on_answer is not None:
                self._on_answer(rollout)
            if rollout is not None and rollout.episode_return is not None and not rollout.aborted:
                self.counters.note_return(request.trajectory_id, request.attempt, rollout.episode_return)
            parts = build_trajectory_parts(capture)
            ending = _ending_of(attempt, parts)
            if rollout is not None and ending.error is None:
                parts = replace(parts, turns=self._score_turns(parts, rollout))
                success, final_messages, reports_events = (
                    rollout.success,
                    rollout.final_messages,
                    rollout.reports_events,
                )
        except EnginePoisonedError:
            raise
        # Any error of reading or building is the rollout's: the run goes on with another attempt.
        except Exception as error:  # a bad rollout is a record, whatever was bad about it
            _log.debug("episode %s failed", request.session_id, exc_info=True)
            ending = _Ending(Outcome.ENGINE_ERROR, one_line(f"{type(error).__name__}: {error}"))
        total_seconds = self._clock() - start
        engine_seconds = capture.engine_seconds if capture is not None else 0.0
        return Trajectory(
            trajectory_id=request.trajectory_id,
            attempt=request.attempt,
            task=request.task,
            sampling_seed=request.sampling_seed,
            segments=parts.segments if parts is not None else (),
            turns=parts.turns if parts is not None else (),
            messages=(*parts.messages, *final_messages) if parts is not None else (),
            outcome=ending.outcome,
            success=success,
            error=ending.error,
            timing=Timing(total_seconds, max(0.0, total_seconds - engine_seconds), engine_seconds),
            reports_events=reports_events,
        )

    async def _play(self, request: EpisodeRequest) -> _Played:
        attempts: list[_Played] = []
        deadline = self._clock() + self.settings.episode_timeout_seconds

        # A fresh name per try, because an earlier one may be running after all.
        async def ask(number: int) -> None:
            name = f"{request.session_id}/{number}" if number else request.session_id
            session = replace(self.settings.session, name=name, sampling_seed=request.sampling_seed)
            seconds_left = max(0.0, deadline - self._clock())
            attempt = await self._play_once(
                session, request.task, timeout_seconds=seconds_left * (1 + _ANSWER_FRACTION)
            )
            attempts.append(attempt)
            # Once the model was called, the same answers would lead to the same failure: another attempt has others.
            if isinstance(attempt.error, AppAttemptError) and not (attempt.capture.calls or attempt.capture.failed):
                raise attempt.error

        try:
            await self._retries.run(ask)
        except AppError as error:
            return replace(attempts[-1], error=error)
        return attempts[-1]

    async def _play_once(self, settings: GatewaySessionSettings, task: Task, *, timeout_seconds: float) -> _Played:
        rollout, error = None, None
        self.counters.num_attempts += 1
        session = self._gateway.open_session(settings)
        try:
            try:
                request = self._request(settings.name, session.id, task)
                rollout = await self._client.rollout(request, timeout_seconds=timeout_seconds)
            except AppError as failure:
                error = failure
            return _Played(await session.freeze(), rollout, error)
        finally:
            # Also after a success: a late call of the agent must find no session.
            await session.abort()

    def _request(self, name: str, session_id: str, task: Task) -> RolloutRequest:
        settings = self.settings
        # The same name comes again in another run, and an app may know answers by run id.
        run_id = f"{_UNSAFE.sub('-', name)}-{secrets.token_hex(4)}"
        injection = PolicyInjection(
            model=settings.model,
            inference_url=rollout_url(settings.gateway_url, session_id),
            trace_correlation_id=session_id,
            temperature=settings.session.sampling.temperature,
            top_p=settings.session.sampling.top_p,
            max_tokens=settings.session.max_output_tokens,
        )
        # What the operator wrote of sampling stands: it says the same (see AppEpisodeSettings), or asks for less.
        policy_config = {**injection.model_dump(), **settings.policy_config}
        ops = ["agent", "env"] * settings.max_turns
        return RolloutRequest(
            run_id=run_id,
            env=RolloutEnv(env_name=settings.env_name, config={**settings.env_config, **task.options}, seed=task.seed),
            policy=RolloutPolicy(policy_name=settings.policy_name, config=policy_config),
            ops=ops,
            record=RolloutRecord(),
            on_done="terminate",  # one rollout is one episode
            safety=RolloutSafety(max_ops=len(ops), max_time_s=settings.episode_timeout_seconds),
            mode=settings.mode,
            trace_correlation_id=session_id,
        )

    def _score_turns(self, parts: CaptureBuild, rollout: AppRollout) -> tuple[Turn, ...]:
        joined_turns = join_rewards(parts.turns, rollout, parts.decision_turns)
        warnings = [*rollout.warnings, *([joined_turns.warning] if joined_turns.warning else [])]
        if "step_rewards" in self.settings.env_config and self.settings.mode == "rl" and not rollout.reports_events:
            warnings.append("no step rewards: the app was asked for them and reports none; its return counts instead")
        # The kind is counted and the first text logged: thousands of episodes may say the same.
        for warning in warnings:
            kind = warning.partition(":")[0]
            self.counters.warnings[kind] += 1
            if self.counters.warnings[kind] == 1:
                self.counters.first_warnings[kind] = warning
                _log.warning("%s: %s (said once; all are counted)", self._client.url, warning)
        self.counters.calls.update(parts.counts)
        self.counters.num_sampled_tokens += parts.num_sampled_tokens
        self.counters.num_trained_tokens += parts.num_trained_tokens
        self.counters.num_untrained_episodes += parts.num_trained_tokens == 0
        return joined_turns.turns


def _ending_of(attempt: _Played, parts: CaptureBuild) -> _Ending:
    """Return the end of the attempt: what the gateway saw first, else what the app says.

    Raises:
        EnginePoisonedError: a call met an engine that will never answer again.
    """
    capture, rollout = attempt.capture, attempt.rollout
    poisoned_call = next((failed_call for failed_call in capture.failed if failed_call.kind == "poisoned"), None)
    if poisoned_call is not None:
        raise EnginePoisonedError(poisoned_call.error)
    failed_call = _last_unanswered_call(capture)
    # The agent went on, or its turns before count all the same.
    if failed_call is not None and failed_call.kind in _REFUSALS and parts.turns:
        failed_call = None
    if rollout is None:
        return _failure_of(attempt.error, failed_call)
    if failed_call is not None and failed_call.kind == "cancelled" and rollout.outcome is Outcome.ACTION_LIMIT:
        failed_call = None  # the time was up while the model was asked
    if failed_call is not None and not rollout.ends_in_error and _went_on_without(failed_call, parts):
        failed_call = None
    # Its return is of an unfinished episode.
    if rollout.aborted:
        return _Ending(Outcome.ENV_ERROR, "the app aborted the rollout")
    if failed_call is not None and failed_call.kind in _OUR_LIMITS:
        error = None if parts.turns else one_line(f"the first call of the model was refused: {failed_call.error}")
        return _Ending(_OUR_LIMITS[failed_call.kind], error)
    cause = _why_made_up(capture, failed_call, rollout)
    if cause is not None:
        app_error = "".join(f"; the app says: {error}" for error in rollout.errors[-1:])
        text = (
            f"the app answers with a return of {rollout.episode_return}, but its model did not play: {cause}{app_error}"
        )
        return _Ending(Outcome.ENGINE_ERROR, one_line(text))
    return _Ending(rollout.outcome)


def _why_made_up(capture: Capture, failed_call: FailedCall | None, rollout: AppRollout) -> str | None:
    if failed_call is not None:
        return f"the last call failed ({failed_call.kind}): {failed_call.error}"
    if not capture.calls:
        return "it was never called"
    num_decisions = len(rollout.decisions)
    if rollout.ends_in_error and num_decisions > len(capture.calls):  # a call of which nothing arrived here
        return f"it answered {len(capture.calls)} calls, and the app lists {num_decisions} decisions, with an error"
    return None


def _failure_of(error: AppError | None, failed_call: FailedCall | None) -> _Ending:
    text = f"{type(error).__name__}: {error}"
    if failed_call is not None:
        text += f"; the last call of the model had failed ({failed_call.kind}): {failed_call.error}"
    if isinstance(error, AppTimeoutError):
        return _Ending(Outcome.EPISODE_TIMEOUT, one_line(text))
    # The engine's failure is the cause, the app's error its consequence.
    is_engine = failed_call is not None and failed_call.kind == "engine"
    return _Ending(Outcome.ENGINE_ERROR if is_engine else Outcome.ENV_ERROR, one_line(text))


def _last_unanswered_call(capture: Capture) -> FailedCall | None:
    answered_keys = {call.request_key for call in capture.calls if call.is_delivered}
    lost_calls = [
        FailedCall(call.index, "cancelled", "its answer reached nobody")
        for call in capture.calls
        if not call.is_delivered and call.request_key not in answered_keys
    ]
    # A call after the last answered one decides; earlier failures were survived.
    last_answered = max((call.index for call in capture.calls if call.is_delivered), default=-1)
    later = [failed_call for failed_call in (*capture.failed, *lost_calls) if failed_call.index > last_answered]
    return max(later, key=lambda failed_call: failed_call.index, default=None)


def _went_on_without(failed_call: FailedCall, parts: CaptureBuild) -> bool:
    # It asked twice at once and took one answer, gave its last call up, or ended its rollout while that was open. Its
    # result then follows from what the model did before. An app for which that was a failure says so
    # (`AppRollout.ends_in_error`).
    return failed_call.kind in ("cancelled", "open") and bool(parts.turns)
