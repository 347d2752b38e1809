"""Judge behind the HTTP contract: send episodes to `{judge_url}/judge/v1/score`, read reviews.

Reviews and their totals are checked for completeness and taken as they are. Signs of manipulation are looked for on
this side, too.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import Any

from gspo_gym.base.http import HttpClient, RefusedError
from gspo_gym.base.keys import read_key
from gspo_gym.base.retries import AttemptError, RetryCounters, Sleep
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.judge.asking import Asking, AskingSettings, Clock, JudgeBudget
from gspo_gym.judge.base import JudgeBudgetError, JudgeCost, JudgeError, Judgement, JudgeRequest
from gspo_gym.judge.cache import Json, JudgementCache, digest_of
from gspo_gym.judge.model.transcript import suspicions
from gspo_gym.judge.service.contract import judgement_from_wire, request_to_wire, score_url
from gspo_gym.judge.settings import JudgeOptions

_JUDGE_KEY = "JUDGE_API_KEY"
_PAYMENT_REQUIRED = 402  # how our server says that its own budget is spent


class HttpJudge:
    """Scores episodes by asking the service. Use it within one event loop, and close it.

    The budget counts requests, and the tokens and money that the service reports.

    Args:
        url: of the service.
        options: `provider`, `model` and `rubric_id` are passed on; with a rubric_id the rubric itself is not sent, but
            what is laid over it is. Without `api_key_env` the key is in JUDGE_API_KEY, if anywhere.
        asking: its timeout is passed on as well.
        policy_name: of the trajectories' policy, for the service.

    Raises:
        ConfigError: the key's variable is not set. MissingExtraError: httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        options: JudgeOptions,
        *,
        asking: AskingSettings,
        policy_name: str = "policy",
        cache: JudgementCache | None = None,
        budget: JudgeBudget | None = None,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if set(url) & set("?#"):
            raise ConfigError(f"services.judge_url: expected a URL without a query or a fragment, got {url!r}")
        self._options, self._policy_name = options, policy_name
        self._timeout_seconds = asking.timeout_seconds
        self._url = score_url(url)
        self._cache = cache
        variable = options.api_key_env or (_JUDGE_KEY if os.environ.get(_JUDGE_KEY) else None)
        key = read_key(variable, "the judge's api_key_env")
        client = HttpClient(self._url, api_key=key, timeout_seconds=asking.timeout_seconds)
        self._asking = Asking(client, asking, budget=budget, clock=clock, sleep=sleep)

    @property
    def name(self) -> str:
        return self._url

    @property
    def retry_counters(self) -> RetryCounters:
        """Return the number of questions, attempts and failures by kind."""
        return self._asking.counters

    async def judge(self, request: JudgeRequest) -> Judgement:
        # All of it is sent with every call, because the judge behind the URL reads no file of ours.
        given = self._options
        named: Json = {"provider": given.provider, "model": given.model, "rubric_id": given.rubric_id}
        if given.rubric_id is not None or not request.rubrics.parts:
            over = {"rubric_overrides": given.rubric_overrides, "tracks": list(given.tracks), "weights": given.weights}
            named |= {name: value or None for name, value in over.items()}
        options = {name: value for name, value in named.items() if value is not None}
        body = request_to_wire(
            request,
            options={**options, "timeout_s": self._timeout_seconds},
            **self._asked,
            policy_name=self._policy_name,
            show_reasoning=given.show_reasoning,
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
        return judgement_from_wire(answer, judge=self.name, num_turns=num_turns, **self._asked)

    @property
    def _asked(self) -> dict[str, bool]:
        return {"event": bool(self._options.event), "outcome": bool(self._options.outcome)}
