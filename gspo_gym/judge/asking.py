"""Ask a judge over HTTP: concurrency, retries, budget, and waiting while the endpoint is down.

An answer that cannot be read is paid for and asked again. During an outage nothing gets a score, and therefore nothing
is trained.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gspo_gym.base.http import HttpClient, call_headers
from gspo_gym.base.retries import AttemptError, CircuitBreaker, Retries, RetryCounters, RetrySettings, Sleep
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import Judge, JudgeCost, JudgeDeniedError, JudgeDownError, JudgeError, Judgement, JudgeRequest
from gspo_gym.judge.budget import JudgeBudget, Reservation

Result = TypeVar("Result")
Clock = Callable[[], float]

# What an attempt may have cost although there is no answer: its time ran out, or what came cannot be read.
_ANSWERED_KINDS = ("timeout", "json", "content")
_UNAUTHORISED = 401  # not 403, with which some providers refuse what one episode says


@dataclass(frozen=True, slots=True)
class AskingSettings:
    """Concurrency, timeout and retries of a judge's requests.

    Attributes:
        timeout_seconds: for one attempt, its last byte included.
        retries: an unreadable verdict counts as a failed attempt, too.
        failures_to_open, cool_down_seconds: after so many failures in a row without an answer (no connection, timeout,
            5xx), nothing is asked for so long; then a single request decides.
        seed: of the jitter between retries.
    """

    max_concurrency: int = 8
    timeout_seconds: float = 60.0
    retries: RetrySettings = field(
        default_factory=lambda: RetrySettings(max_attempts=5, first_delay_seconds=0.5, max_delay_seconds=20.0)
    )
    failures_to_open: int = 10
    cool_down_seconds: float = 15.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrency < 1 or not self.timeout_seconds > 0:
            raise ConfigError(
                "AskingSettings: expected max_concurrency >= 1 and timeout_seconds > 0, got "
                f"{self.max_concurrency} and {self.timeout_seconds}"
            )


class Asking:
    """Client of one judge endpoint, with no limit where there is no budget. Use it in one event loop, and close it."""

    def __init__(
        self,
        client: HttpClient,
        settings: AskingSettings,
        *,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.budget = budget or JudgeBudget()
        self._client = client
        self._clock = clock
        self._retries = Retries(settings.retries, gives_up_with=JudgeError, seed=settings.seed, sleep=sleep)
        self._breaker = CircuitBreaker(
            failures_to_open=settings.failures_to_open, cool_down_seconds=settings.cool_down_seconds
        )
        self._places = asyncio.Semaphore(settings.max_concurrency)
        self._num_in_flight = 0

    @property
    def counters(self) -> RetryCounters:
        return self._retries.counters

    @property
    def is_down(self) -> bool:
        """Return whether the endpoint was found down; after the cool-down the next question finds out."""
        return self._breaker.state(self._clock()) != "closed"

    async def ask(
        self,
        url: str,
        body_of: Callable[[int], Mapping[str, Any]],
        read: Callable[[Any], Result],
        cost_of: Callable[[Any], JudgeCost | None],
        *,
        most: JudgeCost,
    ) -> tuple[Result, JudgeCost]:
        """Ask until an answer can be read; return `read`'s result and the cost of all attempts.

        Args:
            url: a path below the client's base URL, or complete.
            body_of: the request's JSON, given the number of unreadable answers so far.
            read: raises an AttemptError for an unreadable answer.
            cost_of: the cost of an answer; None if it does not say.
            most: the most that one attempt can cost.

        Raises:
            JudgeDownError: the endpoint does not answer. JudgeBudgetError: a limit is reached.
            JudgeDeniedError: it does not accept the key (401).
            JudgeError: the last attempt failed. RefusedError: it refuses the request (any other 4xx).
        """
        call_id = uuid.uuid4().hex  # an identity, not randomness
        attempts: list[Reservation] = []
        num_answers = 0

        async def attempt(number: int) -> Result:
            nonlocal num_answers
            self._require_up(None)
            async with self._places, self.budget.call(most) as reservation:
                self._require_up(reservation)  # it may have gone down while this waited
                attempts.append(reservation)
                # Until an answer came that cannot be read, the same request is sent under the same `Idempotency-Key`.
                body, key = body_of(num_answers), f"{call_id}-{num_answers}"
                answer = await self._post(url, body, key, number, reservation)
                num_answers += 1
                if (cost := cost_of(answer)) is not None:  # else it is charged at its most
                    reservation.settle(cost)
            return read(answer)

        try:
            result = await self._retries.run(attempt)
        except JudgeDownError:
            raise
        except JudgeError as error:
            if self.is_down:  # then an outage is the reason, and not this episode
                raise JudgeDownError(str(error)) from error
            raise
        return result, sum((reservation.cost for reservation in attempts), JudgeCost())

    async def close(self) -> None:
        await self._client.close()

    def _require_up(self, reservation: Reservation | None) -> None:
        if not self._breaker.allows(self._clock(), self._num_in_flight):
            if reservation is not None:
                reservation.settle(JudgeCost())  # nothing was asked
            raise JudgeDownError(
                f"the judge at {self._client.base_url} answers nobody; it is tried again when its cool-down is over"
            )

    async def _post(self, url: str, body: Mapping[str, Any], key: str, number: int, reservation: Reservation) -> Any:
        self._num_in_flight += 1
        try:
            answer = await self._client.post_object(url, body, headers=call_headers(key, number))
        except AttemptError as error:
            # A failure counts towards an outage, unless it shows that the endpoint answers (429, an unreadable answer).
            if error.kind in ("timeout", "connection") or error.kind.startswith("5"):
                self._breaker.fail(self._clock())
            else:
                self._breaker.succeed()
            if error.kind not in _ANSWERED_KINDS:
                reservation.settle(JudgeCost(num_calls=1))
            raise
        except self._client.refused_error as error:
            self._breaker.succeed()
            reservation.settle(JudgeCost(num_calls=1))
            if error.status == _UNAUTHORISED:
                raise JudgeDeniedError(f"{error}; expected a key that it accepts, see api_key_env") from None
            raise
        finally:
            self._num_in_flight -= 1
        self._breaker.succeed()
        return answer


# Called with "judge_paused" or "judge_resumed" and JSON values (hence Any).
OnEvent = Callable[[str, Mapping[str, Any]], None]
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Pause:
    over: asyncio.Event
    started: float


class PausingJudge:
    """Judge that waits while the judge behind it is down, then goes on. Use it within one event loop at a time.

    `on_event` receives the begin of a pause, with its reason, and its end.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        on_event: OnEvent = lambda _kind, _data: None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._judge = judge
        self._on_event = on_event
        self._clock = clock
        self._sleep = sleep
        self._pause: _Pause | None = None
        self._past_seconds = 0.0

    @property
    def name(self) -> str:
        return self._judge.name

    @property
    def pause_seconds(self) -> float:
        """Return the total length of the pauses so far, one in progress included."""
        return self._past_seconds + (0.0 if self._pause is None else self._clock() - self._pause.started)

    async def judge(self, request: JudgeRequest) -> Judgement:
        """Judge as the judge behind it, waiting while that is down.

        Raises:
            JudgeError: this episode has no score; JudgeStoppedError: nor will any other have one.
        """
        # An outage is the same for all episodes: one of them asks again, and the others wait for it.
        while True:
            if self._pause is not None:
                await self._pause.over.wait()
                continue
            try:
                return await self._judge.judge(request)
            except JudgeDownError as error:
                reason = error
            if self._pause is None:  # else another one asks already
                with self._paused(reason):
                    return await self._ask_until_it_answers(request)

    async def close(self) -> None:
        await self._judge.close()

    async def _ask_until_it_answers(self, request: JudgeRequest) -> Judgement:
        wait = _FIRST_WAIT_SECONDS
        while True:
            await self._sleep(wait)
            try:
                return await self._judge.judge(request)
            except JudgeDownError:
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    @contextlib.contextmanager
    def _paused(self, reason: JudgeDownError) -> Iterator[None]:
        """Hold the other callers until the block ends."""
        pause = self._pause = _Pause(asyncio.Event(), self._clock())
        self._on_event("judge_paused", {"judge": self.name, "reason": str(reason)})
        answered = True
        try:
            yield
        except JudgeError:  # an answer, too, although not a score
            raise
        except BaseException:  # cancelled: the next caller asks instead
            answered = False
            raise
        finally:
            seconds = self._clock() - pause.started
            self._past_seconds += seconds
            self._pause = None
            pause.over.set()
            if answered:
                self._on_event("judge_resumed", {"judge": self.name, "seconds": round(seconds, 3)})
