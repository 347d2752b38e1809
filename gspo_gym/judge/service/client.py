"""Judge behind the HTTP contract: send episodes to `{judge_url}/judge/v1/score`, read reviews.

Reviews and their totals are checked for completeness and taken as they are. Signs of manipulation are looked for on
this side, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_gym.base.http import HttpClient, RefusedError
from gspo_gym.base.keys import read_key
from gspo_gym.base.retries import AttemptError, RetryCounters, Sleep
from gspo_gym.errors import ServiceError
from gspo_gym.judge.asking import Asking, AskingSettings, Clock, JudgeBudget
from gspo_gym.judge.base import JudgeBudgetError, JudgeCost, JudgeError, Judgement, JudgeRequest
from gspo_gym.judge.cache import Json, JudgementCache, digest_of
from gspo_gym.judge.model.transcript import suspicions
from gspo_gym.judge.service.contract import judgement_from_wire, request_to_wire, score_url
from gspo_gym.judge.settings import require_plain_url

_PAYMENT_REQUIRED = 402  # how our server says that its own budget is spent


@dataclass(frozen=True, slots=True)
class HttpJudgeSettings:
    """The service's URL, and what to send.

    Attributes:
        api_key_env: the environment variable with the bearer's key; None: none is sent.
        provider, model, rubric_id: passed on; with a rubric_id the rubric itself is not sent.
        rubric_overrides, tracks, weights: JSON about the rubric that the service has under rubric_id: changes of it,
            the tracks to judge, and their weights. A rubric that is sent has them in it.
        event, outcome: whether to ask about it; None: if there is a rubric for it.
        asking: `timeout_seconds` is passed on as well.
    """

    url: str
    api_key_env: str | None = None
    provider: str | None = None
    model: str | None = None
    rubric_id: str | None = None
    rubric_overrides: Mapping[str, Any] = field(default_factory=dict)
    tracks: Sequence[str] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    event: bool | None = None
    outcome: bool | None = None
    policy_name: str = "policy"
    show_reasoning: bool = False
    asking: AskingSettings = field(default_factory=AskingSettings)

    def __post_init__(self) -> None:
        require_plain_url("HttpJudgeSettings.url", self.url)

    @property
    def rubric_options(self) -> Json:
        """Return the options about a rubric that the service has itself."""
        given = {"rubric_overrides": self.rubric_overrides, "tracks": list(self.tracks), "weights": self.weights}
        return {name: value for name, value in given.items() if value}


class HttpJudge:
    """Scores episodes by asking the service. Use it within one event loop, and close it.

    The budget counts requests, and the tokens and money that the service reports.

    Raises:
        ConfigError: the key's variable is not set. MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        settings: HttpJudgeSettings,
        *,
        cache: JudgementCache | None = None,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self._url = score_url(settings.url)
        self._cache = cache
        key = read_key(settings.api_key_env, "the judge's api_key_env")
        client = HttpClient(self._url, api_key=key, timeout_seconds=settings.asking.timeout_seconds)
        self._asking = Asking(client, settings.asking, budget=budget, clock=clock, sleep=sleep)

    @property
    def name(self) -> str:
        return self._url

    @property
    def retry_counters(self) -> RetryCounters:
        """Return the number of questions, attempts and failures by kind."""
        return self._asking.counters

    async def judge(self, request: JudgeRequest) -> Judgement:
        settings = self.settings
        named = {"provider": settings.provider, "model": settings.model, "rubric_id": settings.rubric_id}
        options: Json = {name: value for name, value in named.items() if value is not None}
        if settings.rubric_id is not None or not request.rubrics.parts:
            options |= settings.rubric_options
        body = request_to_wire(
            request,
            options={**options, "timeout_s": settings.asking.timeout_seconds},
            **self._asked(request),
            policy_name=settings.policy_name,
            show_reasoning=settings.show_reasoning,
        )
        costs: list[JudgeCost] = []

        async def ask() -> Json:
            answer, cost = await self._ask(body, request)
            costs.append(cost)
            return answer

        # The metadata says which episode of which run it is, which a score must not depend on.
        about = {name: value for name, value in body["options"].items() if name != "metadata"}
        key = digest_of([self._url, {**body, "options": about}])
        answer = await (ask() if self._cache is None else self._cache.get_or_ask(key, ask))
        judgement = self._read(answer, request)
        flags = tuple(dict.fromkeys([*judgement.flags, *suspicions(request.trajectory)]))
        return replace(judgement, flags=flags, cost=sum(costs, JudgeCost()))

    async def close(self) -> None:
        """Close the connections; the cache belongs to the caller."""
        await self._asking.close()

    async def _ask(self, body: Json, request: JudgeRequest) -> tuple[Json, JudgeCost]:
        def read(answer: Any) -> Any:
            try:
                self._read(answer, request)
            except JudgeError as error:
                raise AttemptError(str(error), kind="answer") from error
            return answer

        def cost_of(answer: Any) -> JudgeCost:
            try:
                return replace(self._read(answer, request).cost, num_calls=1)
            except JudgeError:
                return JudgeCost(num_calls=1)

        try:
            return await self._asking.ask(self._url, lambda _: body, read, cost_of, most=JudgeCost(num_calls=1))
        except RefusedError as error:
            kind = JudgeBudgetError if error.status == _PAYMENT_REQUIRED else JudgeError
            raise kind(str(error)) from error
        except JudgeError:
            raise
        except ServiceError as error:
            raise JudgeError(str(error)) from error

    def _read(self, answer: Any, request: JudgeRequest) -> Judgement:
        num_turns = len(request.trajectory.turns)
        return judgement_from_wire(answer, judge=self.name, num_turns=num_turns, **self._asked(request))

    def _asked(self, request: JudgeRequest) -> dict[str, bool]:
        event, outcome = self.settings.event, self.settings.outcome
        return {
            "event": request.rubrics.event is not None if event is None else event,
            "outcome": request.rubrics.outcome is not None if outcome is None else outcome,
        }
