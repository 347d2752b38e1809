"""Apps whose failing episodes call the model in other ways than succeeding ones: what is kept is what was played.

The agents below know the contract and OpenAI's protocol. Each asks once, and is worth what the answer is; if that is
bad, it goes on in the way that its name says. Selection by outcome would keep the good ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from fake_task_app import FakeTaskApp
from seeded_engine import SeededEngine, any_of
from served_gateway import LOOK, SETTINGS, TOKENIZER, run, served, user

from gspo_gym.diagnosis.selection import AttemptWatch, SelectionAlarm
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.settings import AdvantageSettings
from gspo_gym.remote.apps.client import TaskAppClient
from gspo_gym.remote.apps.episodes import AppEpisodes, AppEpisodeSettings
from gspo_gym.remote.apps.metrics import take_returns
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.limits import PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.types import Task, TrajectoryGroup

Json = dict[str, Any]
NUM_GROUPS, GROUP_SIZE = 6, 4
SYSTEM = {"role": "system", "content": "You play."}
FIRST, RETRY = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
MAX_CALLS = 6
HAS_BEGUN: set[str] = set()  # the slow and held questions that have reached the engine
_MARKS = itertools.count()


@dataclass
class Model:
    """What an agent has of the model: its URLs, and how it asks."""

    http: httpx.AsyncClient
    url: str
    temperature: float
    said: list[str] = field(default_factory=list)

    async def ask(self, messages: list[Json], headers: Json | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "policy", "messages": messages, "temperature": self.temperature, **fields}
        response = await self.http.post(self.url, json=body, headers=headers, timeout=30.0)
        if response.status_code == 200:
            self.said.append(response.json()["choices"][0]["message"]["content"])
        return response

    async def post(self, route: str, body: Json) -> httpx.Response:
        base = self.url.partition("/chat/completions")[0]
        return await self.http.post(f"{base}/{route}", json={"temperature": self.temperature, **body}, timeout=30.0)


START = [SYSTEM, *user("start")]
Agent = Callable[[Model], Awaitable[None]]
AGENTS: dict[str, Agent] = {}


def agent(play: Agent) -> Agent:
    AGENTS[play.__name__.replace("_", " ")] = play
    return play


@agent
async def goes_on(model: Model) -> None:
    await model.ask([*START, {"role": "assistant", "content": model.said[0]}, *user("and now?")])


@agent
async def asks_the_same_again(model: Model) -> None:
    for _ in range(2):
        await model.ask(START, FIRST)


@agent
async def asks_the_same_again_unmarked(model: Model) -> None:
    for _ in range(2):
        await model.ask(START)


@agent
async def asks_the_same_three_times_at_once(model: Model) -> None:
    await asyncio.gather(*(model.ask(START) for _ in range(3)))


@agent
async def goes_on_from_the_second_of_two(model: Model) -> None:
    await model.ask(START, FIRST)
    await model.ask([*START, {"role": "assistant", "content": model.said[1]}, *user("and now?")])


@agent
async def shows_only_the_present_state(model: Model) -> None:
    for state in ("door", "wall", "door"):
        await model.ask([SYSTEM, *user(state)])


@agent
async def tries_again_although_it_was_answered(model: Model) -> None:
    assert (await model.ask(START, RETRY)).status_code == 200


@agent
async def uses_one_key_twice(model: Model) -> None:
    for _ in range(2):
        await model.ask(START, {"idempotency-key": "again"})


@agent
async def hangs_up_and_asks_again(model: Model) -> None:
    """The connection is closed before the answer is there, by a client that says nothing of retries."""
    messages = await hung_up(model, "SLOW")
    await model.ask(messages)


async def hung_up(model: Model, word: str) -> list[Json]:
    """Ask, hang up when the engine has begun, and return what was asked; `word` tells the engine how to answer."""
    mark = f"{word} {next(_MARKS)}."
    messages = [SYSTEM, *user(mark)]
    asking = asyncio.ensure_future(model.ask(messages))
    while mark not in HAS_BEGUN:  # noqa: ASYNC110  # it is another thread's
        await asyncio.sleep(0.002)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return messages


@agent
async def gives_its_last_call_up(model: Model) -> None:
    await hung_up(model, "HELD")


@agent
async def takes_the_first_of_two_equal_answers(model: Model) -> None:
    """The other one is being sampled when the episode ends."""
    mark = f"HEDGED {next(_MARKS)}."
    await hedged(model, [SYSTEM, *user(mark)], [SYSTEM, *user(mark)])


@agent
async def takes_the_first_of_two_answers(model: Model) -> None:
    mark = f"HEDGED {next(_MARKS)}."
    await hedged(model, [SYSTEM, *user(mark)], [SYSTEM, *user(f"{mark} Or else?")])


async def hedged(model: Model, *questions: list[Json]) -> None:
    """All are asked at once, and what is not answered first is given up."""
    asking = [asyncio.ensure_future(model.ask(messages)) for messages in questions]
    _, open_ones = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    for one in open_ones:
        one.cancel()
    await asyncio.gather(*open_ones, return_exceptions=True)


@agent
async def has_a_title_written(model: Model) -> None:
    await model.ask([*START, {"role": "assistant", "content": model.said[0]}, *user("and now?")])
    await model.ask([{"role": "system", "content": "You write titles."}, *user("a title, please")])


@agent
async def asks_a_sub_agent_with_a_tool(model: Model) -> None:
    await model.ask([{"role": "system", "content": "You advise."}, *user("start")], tools=[LOOK])


@agent
async def has_a_temperature_of_its_own(model: Model) -> None:
    await model.ask([SYSTEM, *user("be careful")], temperature=0.25)


@agent
async def asks_for_a_schema_that_the_engine_cannot_obey(model: Model) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    assert (await model.ask(START, response_format=schema)).status_code == 400


@agent
async def asks_for_what_there_is_not(model: Model) -> None:
    assert (await model.ask(START, n=2)).status_code == 400


@agent
async def says_that_a_call_is_not_to_be_trained_on(model: Model) -> None:
    await model.ask(START, {"x-gspo-gym-trained": "false"})


@agent
async def must_call_a_tool_and_does_not(model: Model) -> None:
    assert (await model.ask(START, tools=[LOOK], tool_choice="required")).status_code == 422


@agent
async def runs_out_of_context(model: Model) -> None:
    response = await model.ask([SYSTEM, *user("so much " * 1000)])
    assert response.json()["error"]["code"] == "context_length_exceeded"


@agent
async def runs_out_of_calls(model: Model) -> None:
    codes = [(await model.ask([SYSTEM, *user(f"{number}")])).status_code for number in range(MAX_CALLS)]
    assert codes[-1] == 429


@agent
async def continues_a_text(model: Model) -> None:
    await model.post("completions", {"prompt": "Once upon a time"})


@agent
async def asks_for_a_response(model: Model) -> None:
    await model.post("responses", {"input": "Hello."})


@dataclass(slots=True)
class PlayingApp(FakeTaskApp):
    """Its episodes are worth 1 if the first answer is good, else 0; its steps are scored nowhere.

    Attributes:
        agent: how an episode goes on whose first answer is bad.
        says_error: the bad ones end in an error.
        masks: the bad ones are played at a temperature of their own, so that no token of them can be trained on.
        played: what each rollout was worth, by run id.
    """

    agent: Agent = goes_on
    says_error: bool = False
    masks: bool = False
    played: dict[str, float] = field(default_factory=dict)

    async def _play(self, http: httpx.AsyncClient, request: Json, fault: str | None) -> list[str]:
        config = request["policy"]["config"]
        model = Model(http, config["inference_url"], config["temperature"])
        if self.masks and self.num_rollouts % 2:
            model.temperature = 0.25
        await model.ask(START, FIRST)
        is_good = model.temperature == 1.0 if self.masks else model.said[0] == "good"
        self.played[request["run_id"]] = float(is_good)
        if not is_good:
            await self.agent(model)
        return [str(is_good)]

    def _answer(self, request: Json, said: list[str]) -> Json:
        steps: list[Json] = [{"obs": {}, "tool_calls": [], "reward": None, "done": True}]
        if self.says_error and not self.played[request["run_id"]]:
            steps[-1]["info"] = {"error": "the model did not answer in time"}
        return self._generation_a(request, steps, self.played[request["run_id"]])


class OnStage:
    """Serves whichever app is on it, elsewhere than the gateway: in a thread, for all tests here."""

    app: PlayingApp
    url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await FakeTaskApp()(scope, receive, send)
        else:
            await self.app(scope, receive, send)


ON_STAGE = OnStage()


@pytest.fixture(scope="module", autouse=True)
def _on_stage() -> Iterator[None]:
    with BackgroundServer(ON_STAGE) as server:
        ON_STAGE.url = server.url
        yield


class SlowIfAsked(SeededEngine):
    """Takes a while where the prompt says SLOW, holds a HELD one until its episode ends, and notes that it has begun.

    Of two prompts that say HEDGED, it answers the first when the second has come, and the second never.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._hedges: dict[str, asyncio.Event] = {}
        self._has_ended: dict[str | None, asyncio.Event] = defaultdict(asyncio.Event)

    async def generate(self, prompt_token_ids: Any, sampling: Any, **options: Any) -> Any:
        prompt = TOKENIZER.decode(list(prompt_token_ids))
        for mark in re.findall(r"SLOW \d+\.", prompt):
            HAS_BEGUN.add(mark)
            await asyncio.sleep(0.2)
        for mark in re.findall(r"HELD \d+\.", prompt):
            HAS_BEGUN.add(mark)
            await self._has_ended[options["session_id"]].wait()
        for mark in re.findall(r"HEDGED \d+\.", prompt):
            if mark not in self._hedges:
                self._hedges[mark] = asyncio.Event()
                await self._hedges[mark].wait()
            else:
                self._hedges[mark].set()
                await self._has_ended[options["session_id"]].wait()
        return await super().generate(prompt_token_ids, sampling, **options)

    async def end_session(self, session_id: str) -> None:
        self._has_ended[session_id].set()
        await super().end_session(session_id)


@contextlib.asynccontextmanager
async def playing(app: PlayingApp) -> AsyncIterator[AppEpisodes]:
    ON_STAGE.app = app
    engine = SlowIfAsked(TOKENIZER, any_of("good", "bad"), max_model_len=SETTINGS.max_model_len)
    async with served(engine) as gateway, TaskAppClient(ON_STAGE.url) as client:
        settings = AppEpisodeSettings(
            env_name="quiz",
            session=replace(SETTINGS, max_calls=MAX_CALLS),
            model="policy",
            max_turns=8,
            gateway_url=gateway.url,
        )
        yield AppEpisodes(client, gateway.gateway, settings)


async def collected(episodes: AppEpisodes, watch: AttemptWatch | None = None) -> tuple[TrajectoryGroup, ...]:
    limits = PoolLimits(max_concurrent_rollouts=8, max_attempts=3)
    pool = RolloutPool(play=episodes.play, pool_limits=limits, run_seed=5, on_episode=watch)
    requests = [GroupRequest(f"g{number}", Task("quiz", number), GROUP_SIZE) for number in range(NUM_GROUPS)]
    return await pool.collect(requests)


@pytest.mark.parametrize("name", AGENTS)
def test_what_is_kept_is_what_was_played_however_the_failing_episodes_call_the_model(name: str) -> None:
    async def check() -> None:
        app = PlayingApp(agent=AGENTS[name])
        async with playing(app) as episodes:
            groups = await collected(episodes)
            kept = [trajectory.reward for group in groups for trajectory in group.trajectories]
            assert app.num_rollouts == NUM_GROUPS * GROUP_SIZE  # nothing was played again
            assert sorted(kept) == sorted(app.played.values())
            assert {0.0, 1.0} <= set(kept)
            returns = take_returns([episodes.counters], groups)
            assert (sorted(returns.kept), returns.lost) == (sorted(kept), ())
            assert SelectionAlarm(seed=0).check(returns) is None
            assert episodes.counters.num_untrained_episodes == 0

    run(check)


def test_failing_episodes_of_which_no_token_can_be_trained_on_still_count_in_their_groups() -> None:
    """Half of a group of 4 fails at a temperature of its own: mean 0.5, std of 0, 0, 1, 1 with Bessel 1/sqrt(3)."""

    async def check() -> None:
        app = PlayingApp(masks=True)
        async with playing(app) as episodes:
            groups = await collected(episodes)
            kept = [trajectory for group in groups for trajectory in group.trajectories]
            assert sorted(t.reward for t in kept) == sorted(app.played.values()) == [0.0] * 12 + [1.0] * 12
            assert [t.num_actions > 0 for t in kept] == [t.reward == 1.0 for t in kept]
            assert episodes.counters.num_untrained_episodes == 12
            for group in groups:
                mean = sum(t.reward for t in group.trajectories) / GROUP_SIZE
                num_good = round(mean * GROUP_SIZE)
                if num_good == 0:
                    continue
                built = build_batch([group], AdvantageSettings())
                assert (built.counts.num_trajectories, built.counts.num_untrained) == (num_good, GROUP_SIZE - num_good)
                assert built.batch is not None
                std = math.sqrt(sum((t.reward - mean) ** 2 for t in group.trajectories) / (GROUP_SIZE - 1))
                expected = (1 - mean) / std if std else 0.0
                advantages = built.batch.advantages[built.batch.action_mask]
                assert advantages.tolist() == pytest.approx([expected] * len(advantages), rel=1e-4)

    run(check)


def test_failing_episodes_that_are_played_again_until_they_succeed_sound_the_alarm() -> None:
    """An app that gives up on the model, and says that it failed and 0: made up, but only failing episodes do it."""

    async def check() -> None:
        app = PlayingApp(agent=gives_its_last_call_up, says_error=True)
        async with playing(app) as episodes:
            groups = await collected(episodes)
            returns = take_returns([episodes.counters], groups)
            assert set(returns.kept) == {1.0}
            assert 0.0 in returns.lost  # and what was dropped with its group
            assert sorted((*returns.kept, *returns.lost)) == sorted(app.played.values())
            selection = SelectionAlarm(seed=0).check(returns)
            assert selection is not None
            assert selection.mean_kept == 1.0 > 0.7 > selection.mean_played

    run(check)


async def breaks(_: Model) -> None:
    raise RuntimeError("the app cannot read this")


def test_failing_episodes_that_an_app_answers_with_500_sound_the_alarm_although_no_return_is_known() -> None:
    """Episodes of two bad answers of three are lost: their returns are not known, how many they are is."""

    async def check() -> None:
        app, watch = PlayingApp(agent=breaks), AttemptWatch()
        async with playing(app) as episodes:
            groups = await collected(episodes, watch)
            returns = take_returns([episodes.counters], groups)
            assert set(returns.kept) == {1.0}
            assert SelectionAlarm(seed=0).check(returns) is None  # nothing of what was lost was ever said
            num_lost = sum(worth == 0.0 for worth in app.played.values())
            assert watch.metrics()["rollout/lost_after_action"] == num_lost / app.num_rollouts
            reason = watch.app_alarm()
            assert reason is not None
            assert reason.startswith(f"{num_lost} of {app.num_rollouts} attempts (")
            assert watch.app_alarm() is None  # it is told once

    run(check)
