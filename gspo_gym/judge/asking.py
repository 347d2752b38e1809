"""Ask a judge over HTTP: concurrency, retries, waiting while the endpoint is down, a budget that judges share, a cache.

An answer that cannot be read is paid for and asked again. During an outage nothing gets a score, and therefore nothing
is trained. Judgements are cached in memory and in files, by a key of everything that they depend on; a file holds one
answer and its digest, and a torn or changed file counts as missing and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gspo_gym.base.http import HttpClient, call_headers
from gspo_gym.base.retries import AttemptError, CircuitBreaker, Retries, RetrySettings, Sleep
from gspo_gym.errors import ConfigError
from gspo_gym.judge.base import (
    Judge,
    JudgeBudgetError,
    JudgeCost,
    JudgeDeniedError,
    JudgeDownError,
    JudgeError,
    Judgement,
    JudgeRequest,
)

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
        has_answer = True
        try:
            yield
        except JudgeError:  # an answer, too, although not a score
            raise
        except BaseException:  # cancelled: the next caller asks instead
            has_answer = False
            raise
        finally:
            seconds = self._clock() - pause.started
            self._past_seconds += seconds
            self._pause = None
            pause.over.set()
            if has_answer:
                self._on_event("judge_resumed", {"judge": self.name, "seconds": round(seconds, 3)})


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Limits of a whole run. None: no limit. Repeated requests count, and money as far as prices are known."""

    max_calls: int | None = None
    max_usd: float | None = None

    def __post_init__(self) -> None:
        limits = (self.max_calls, self.max_usd)
        if any(limit is not None and not limit >= 0 for limit in limits):  # NaN, too, is none
            raise ConfigError(f"BudgetLimits: expected limits >= 0 or none, got {limits}")


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per million tokens; 0 if not known."""

    usd_per_million_input_tokens: float = 0.0
    usd_per_million_output_tokens: float = 0.0

    def cost_of(self, input_tokens: int, output_tokens: int) -> JudgeCost:
        input_price, output_price = self.usd_per_million_input_tokens, self.usd_per_million_output_tokens
        return JudgeCost(
            1, input_tokens, output_tokens, (input_price * input_tokens + output_price * output_tokens) / 1e6
        )


class Reservation:
    """A call under way. If nothing settles it, it costs its most, because its provider may charge for it."""

    def __init__(self, most: JudgeCost) -> None:
        self.cost = most

    def settle(self, cost: JudgeCost) -> None:
        self.cost = cost


class JudgeBudget:
    """Lets calls through and adds up their cost. Use it within one event loop at a time.

    Attributes:
        limits: may be replaced at any time; calls that were refused may then be made again.
        spent: so far, including what earlier processes of the same run have spent.
    """

    def __init__(self, limits: BudgetLimits | None = None, *, spent: JudgeCost | None = None) -> None:
        self.limits = limits or BudgetLimits()
        self.spent = spent or JudgeCost()
        self._under_way = JudgeCost()
        self._end_event = asyncio.Event()
        self._end_event.set()

    @contextlib.asynccontextmanager
    async def call(self, most: JudgeCost) -> AsyncIterator[Reservation]:
        """Reserve one call that costs at most `most`; wait while only calls under way stand against it.

        Raises:
            JudgeBudgetError: a limit is reached.
        """
        # A call is let through while the cost so far, plus the most that the calls under way can still cost, is below
        # every limit: the whole is at most the limit plus one call, however many are under way.
        while (limit_text := self._limit_text(self.spent + self._under_way)) is not None:
            if self._limit_text(self.spent) is not None or self._under_way.num_calls == 0:
                raise JudgeBudgetError(f"judging has reached its limit: {limit_text}; raise it to go on")
            if self._end_event.is_set():
                self._end_event = asyncio.Event()  # a fresh one belongs to the loop that waits
            await self._end_event.wait()
        self._under_way = self._under_way + most
        reservation = Reservation(most)
        try:
            yield reservation
        finally:
            self._under_way = _less(self._under_way, most)
            self.spent = self.spent + reservation.cost
            self._end_event.set()

    def _limit_text(self, cost: JudgeCost) -> str | None:
        limits = self.limits
        if limits.max_calls is not None and cost.num_calls >= limits.max_calls:
            return f"max_calls = {limits.max_calls}, spent {self.spent.num_calls}"
        if limits.max_usd is not None and cost.usd >= limits.max_usd:
            return f"max_usd = {limits.max_usd:g}, spent {self.spent.usd:.4f}"
        return None


def _less(cost: JudgeCost, part: JudgeCost) -> JudgeCost:
    num_calls = cost.num_calls - part.num_calls
    if num_calls == 0:
        return JudgeCost()  # and not what rounding has left of the money
    input_tokens, output_tokens = cost.input_tokens - part.input_tokens, cost.output_tokens - part.output_tokens
    return JudgeCost(num_calls, input_tokens, output_tokens, max(0.0, cost.usd - part.usd))


_MAX_IN_MEMORY = 8192

Json = Any  # a JSON value


def digest_of(value: Json) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of keys; 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


class JudgementCache:
    """Answers by key; without a folder, in memory alone. Use it in one event loop; processes may share a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: OrderedDict[str, Json] = OrderedDict()
        self._being_asked: dict[str, asyncio.Task[Json]] = {}

    async def get_or_ask(self, key: str, ask: Callable[[], Awaitable[Json]]) -> Json:
        """Return the answer kept under the key, or ask for it and keep it.

        An error of `ask` is raised to all callers, and nothing is kept.
        """
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        # Equal questions at the same time are asked once: equal episodes get equal scores even from a judge that would
        # answer twice differently.
        task = self._being_asked.get(key)
        if task is None:
            task = asyncio.ensure_future(self._read_or_ask(key, ask))
            self._being_asked[key] = task
            task.add_done_callback(lambda finished_task: self._end(key, finished_task))
        return await asyncio.shield(task)  # a cancelled caller must not end the question of the others

    async def close(self) -> None:
        """Cancel open questions."""
        tasks = list(self._being_asked.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_or_ask(self, key: str, ask: Callable[[], Awaitable[Json]]) -> Json:
        answer_on_disk = None if self._folder is None else await asyncio.to_thread(self._read, key)
        if answer_on_disk is None:
            answer = await ask()
            if self._folder is not None:
                await asyncio.to_thread(self._write, key, answer)
        else:
            answer = answer_on_disk[0]
        self._memory[key] = answer
        if len(self._memory) > _MAX_IN_MEMORY:
            self._memory.popitem(last=False)
        return answer

    def _end(self, key: str, task: asyncio.Task[Json]) -> None:
        del self._being_asked[key]
        if not task.cancelled():
            task.exception()  # seen: there may be nobody left who waits for it

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"

    def _read(self, key: str) -> tuple[Json] | None:
        """Return the answer in the key's file; None for a missing, torn or changed one."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            entry = json.loads(self._path(key).read_text(encoding="utf-8"))
            if entry["key"] == key and entry["digest"] == digest_of(entry["answer"]):
                return (entry["answer"],)
        return None

    def _write(self, key: str, answer: Json) -> None:
        path = self._path(key)
        entry = json.dumps({"key": key, "digest": digest_of(answer), "answer": answer})
        with contextlib.suppress(OSError):  # a full disk costs no score
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as draft:
                draft.write(entry)
            os.replace(draft.name, path)  # not synced: the digest finds what a power cut tears
