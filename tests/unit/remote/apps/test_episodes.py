"""Episodes that an app plays: what it is asked, what becomes of its answer, and that no failure is a reward."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from ending_env import Ending
from fake_task_app import MADE_UP, FakeTaskApp, quiz_engine, worth
from moved_clock import move_clock
from served_gateway import SETTINGS, Served, replying, run, served

from gspo_gym.engine.base import Engine
from gspo_gym.engine.scripted import Latency
from gspo_gym.errors import ConfigError, EnginePoisonedError
from gspo_gym.remote.apps.client import TaskAppClient
from gspo_gym.remote.apps.episodes import AppEpisodes, AppEpisodeSettings
from gspo_gym.remote.serve.task_app_server import create_task_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.seeding import child_seed
from gspo_gym.types import Outcome, Task, Trajectory

TASK = Task("quiz", seed=7)
EPISODE_SECONDS, HANG_SECONDS = 20.0, 30.0  # which pass at once on the client's clock where the app hangs


class OnStage:
    """Serves whichever app is on it, elsewhere than the gateway: in a thread, for all tests here."""

    app: FakeTaskApp | None = None
    url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (self.app or FakeTaskApp())(scope, receive, send)


ON_STAGE = OnStage()


@pytest.fixture(scope="module", autouse=True)
def _on_stage() -> Iterator[None]:
    with BackgroundServer(ON_STAGE) as server:
        ON_STAGE.url = server.url
        yield


@dataclass
class Stage:
    episodes: AppEpisodes
    gateway: Served
    waits: list[float]

    async def play(self, attempt: int = 0, task: Task = TASK) -> Trajectory:
        return await self.episodes.play(EpisodeRequest("step-3/0", task, 11, attempt))


@contextlib.asynccontextmanager
async def staged(app: FakeTaskApp, engine: Engine | None = None, **changes: Any) -> AsyncIterator[Stage]:
    """The app, a gateway and who lets it play (Any: fields of the settings)."""
    waits: list[float] = []

    async def no_sleep(seconds: float) -> None:
        waits.append(seconds)

    ON_STAGE.app = app
    app.on_hang = partial(move_clock, asyncio.get_running_loop(), HANG_SECONDS)
    async with served(engine or quiz_engine()) as gateway, TaskAppClient(ON_STAGE.url) as client:
        settings = AppEpisodeSettings(
            **({"env_name": "quiz", "session": SETTINGS, "model": "policy", "max_turns": 3} | changes),
            gateway_url=gateway.url,
        )
        yield Stage(AppEpisodes(client, gateway.gateway, settings, sleep=no_sleep), gateway, waits)
        assert gateway.gateway.num_sessions == 0  # however an attempt ended


def played(app: FakeTaskApp, engine: Engine | None = None, **changes: Any) -> Trajectory:
    """One attempt at one episode."""
    trajectories: list[Trajectory] = []

    async def test() -> None:
        async with staged(app, engine, **changes) as stage:
            trajectories.append(await stage.play())

    run(test)
    return trajectories[0]


def said(trajectory: Trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "assistant"]


@pytest.mark.parametrize("generation", ["A", "B"])
def test_an_episode_has_the_apps_rewards_on_the_turns_that_earned_them(generation: Any) -> None:
    trajectory = played(FakeTaskApp(generation=generation))
    assert (trajectory.outcome, trajectory.error) == (Outcome.TERMINATED, None)
    assert (trajectory.trajectory_id, trajectory.attempt, trajectory.task) == ("step-3/0", 0, TASK)
    assert [turn.reward for turn in trajectory.turns] == [worth(text) for text in said(trajectory)]
    assert len(trajectory.turns) == 2
    assert trajectory.num_actions > 0
    assert trajectory.timing.total_seconds >= trajectory.timing.engine_seconds >= 0


def test_the_request_is_the_contracts() -> None:
    app = FakeTaskApp()
    policy_config = {"thinking_mode": "no_think", "max_tokens": 16}
    trajectory_ids: list[str] = []

    async def test() -> None:
        async with staged(
            app,
            env_config={"split": "train"},
            policy_name="react",
            policy_config=policy_config,
            episode_timeout_seconds=60.0,
        ) as stage:
            await stage.play(attempt=2, task=Task("quiz", seed=7, options={"level": 3}))
            trajectory_ids.append(stage.gateway.url)

    run(test)
    (asked,) = app.asked
    body = asked.body
    session = body["trace_correlation_id"]
    assert re.fullmatch(r"[A-Za-z0-9_-]{22,}", session)  # 128 bits in base 64 are 22 characters
    assert re.fullmatch(r"step-3-0-2-[0-9a-f]{8}", body.pop("run_id"))
    assert body == {
        "env": {"env_name": "quiz", "config": {"split": "train", "level": 3}, "seed": 7},
        "policy": {
            "policy_name": "react",
            "config": {
                "thinking_mode": "no_think",
                "model": "policy",
                "inference_url": f"{trajectory_ids[0]}/t/{session}/v1/chat/completions?cid={session}",
                "trace_correlation_id": session,
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": 16,
            },
        },
        "ops": ["agent", "env"] * 3,
        "record": {
            "trajectories": True,
            "logprobs": False,
            "value": False,
            "return_trace": False,
            "trace_format": "compact",
        },
        "on_done": "terminate",
        "safety": {"max_ops": 6, "max_time_s": 60.0},
        "mode": "rl",
        "trace_correlation_id": session,
    }


def test_members_of_a_group_are_calls_of_their_own_with_one_seed() -> None:
    app = FakeTaskApp()

    async def test() -> None:
        async with staged(app) as stage:
            await asyncio.gather(
                *(
                    stage.episodes.play(EpisodeRequest(f"step-0/{member}", TASK, sampling_seed=member))
                    for member in range(8)
                )
            )

    run(test)
    bodies = [asked.body for asked in app.asked]
    assert [body["env"]["seed"] for body in bodies] == [7] * 8
    assert len({body["run_id"] for body in bodies}) == len({body["trace_correlation_id"] for body in bodies}) == 8


def test_the_sampling_seed_of_turn_k_is_the_rollouts() -> None:
    """The same seeds as `EngineActor` gives, so that an app samples what a local episode does."""
    engine = quiz_engine()
    played(FakeTaskApp(num_turns=3), engine)
    assert [call.sampling.seed for call in engine.calls] == [child_seed(11, "turn", turn) for turn in range(3)]
    assert {call.session_id for call in engine.calls} == {"step-3/0/0"}


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("fault", ["made_up", "made_up_late", "made_up_unseen"])
def test_a_reward_that_was_made_up_after_a_failed_call_is_a_failure_of_the_engine(fault: Any, generation: Any) -> None:
    app = FakeTaskApp(generation=generation, fault=lambda number: fault)
    trajectory = played(app)
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert not trajectory.is_scored
    assert all(turn.reward is None for turn in trajectory.turns)
    assert "its model did not play" in (trajectory.error or "")
    assert "inference request failed" in (trajectory.error or "")  # what the app says of it


def test_what_was_captured_before_a_failure_is_kept() -> None:
    trajectory = played(FakeTaskApp(fault=lambda number: "made_up_late"))
    assert len(trajectory.turns) == 1
    assert said(trajectory)[0].startswith("answer to question 0")
    assert "the last call failed (engine): broken on purpose" in (trajectory.error or "")


def test_an_app_that_never_called_the_model_has_no_reward() -> None:
    trajectory = played(FakeTaskApp(num_turns=0))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "it was never called" in (trajectory.error or "")


def test_an_episode_whose_time_its_actions_used_up_is_scored_though_the_model_was_being_asked() -> None:
    """Four actions take 0.4 s each, more than half of 2.4 s; the fifth answer of the model would take 4 s."""

    def reply(prompt: str) -> str:
        return "slow" if prompt.count("slow") < 4 else "x" * 200

    async def test() -> None:
        app = create_task_app(partial(Ending, place="loop"), isolation="thread")
        engine = replying(reply, latency=Latency(per_token_seconds=0.02))
        with BackgroundServer(app) as server:
            async with served(engine) as gateway, TaskAppClient(server.url) as client:
                settings = AppEpisodeSettings(
                    env_name="environment",
                    session=SETTINGS,
                    model="policy",
                    max_turns=9,
                    gateway_url=gateway.url,
                    episode_timeout_seconds=2.4,
                )
                episodes = AppEpisodes(client, gateway.gateway, settings)
                played = await episodes.play(EpisodeRequest("t", Task("Ending", 3), sampling_seed=1))
        assert (played.outcome, played.error) == (Outcome.ACTION_LIMIT, None)
        assert [turn.reward for turn in played.turns] == [0.25, 0.25, 0.25, -3.75]  # -3 is the environment's lowest

    run(test)


def test_an_app_that_did_not_wait_for_the_models_answer_has_no_reward() -> None:
    trajectory = played(FakeTaskApp(fault=lambda number: "timed_out"))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    # whether its call was given up before its result came, or was still open, depends on which arrives first
    assert re.search(r"the last call failed \((cancelled|open)\)", trajectory.error or "")
    assert not trajectory.is_scored


@pytest.mark.parametrize("generation", ["A", "B"])
def test_an_episode_that_the_app_ended_while_its_last_call_was_open_is_kept_without_that_call(generation: Any) -> None:
    begun = threading.Event()
    trajectories: list[Trajectory] = []

    async def test() -> None:
        app = FakeTaskApp(generation=generation, leaves_open=begun)
        async with staged(app, quiz_engine(begun)) as stage:
            trajectories.append(await stage.play())
            assert stage.episodes.counters.calls == {"trained": 1, "not awaited": 1}

    run(test)
    (trajectory,) = trajectories
    assert (trajectory.outcome, trajectory.error) == (Outcome.TERMINATED, None)
    (answer,) = said(trajectory)
    assert trajectory.reward == worth(answer)


def test_an_app_that_ended_before_the_model_said_anything_has_no_reward() -> None:
    begun = threading.Event()
    trajectory = played(FakeTaskApp(num_turns=1, leaves_open=begun), quiz_engine(begun))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "the last call failed (open)" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("fault", "outcome", "says"),
    [
        ("500_late", Outcome.ENV_ERROR, "policy_step_failed"),
        ("garbage", Outcome.ENV_ERROR, "the answer is no JSON"),
        ("garbage_json", Outcome.ENV_ERROR, "expected a JSON object"),
        ("half", Outcome.ENV_ERROR, "RemoteProtocolError"),
        ("half_json", Outcome.ENV_ERROR, "the answer is no JSON"),
        ("stale", Outcome.ENV_ERROR, "is to another attempt"),
        ("nan", Outcome.ENV_ERROR, "finite number"),
        ("aborted", Outcome.ENV_ERROR, "the app aborted the rollout"),
        ("hang", Outcome.EPISODE_TIMEOUT, "no complete answer within"),
    ],
)
def test_every_failure_of_the_app_is_a_record_and_no_reward(fault: Any, outcome: Outcome, says: str) -> None:
    app = FakeTaskApp(fault=lambda number: fault)
    trajectory = played(app, episode_timeout_seconds=EPISODE_SECONDS)
    assert trajectory.outcome is outcome
    assert says in (trajectory.error or "")
    assert not trajectory.is_scored
    assert app.num_rollouts == 1  # the pool's next attempt has other answers; the same ones would fail again


def test_an_app_that_plays_on_after_its_time_is_up_samples_nothing() -> None:
    app = FakeTaskApp(fault=lambda number: "hang" if number == 0 else None)
    engine = quiz_engine()

    async def test() -> None:
        async with staged(app, engine, episode_timeout_seconds=EPISODE_SECONDS) as stage:
            late = await stage.play()
            assert late.outcome is Outcome.EPISODE_TIMEOUT
            await asyncio.to_thread(app.has_played_on.wait)  # it notices that its client has gone
            assert app.after_hanging == [409]
            assert engine.calls == []

    run(test)


@pytest.mark.parametrize("fault", ["500", "503", "reset"])
def test_an_app_that_turns_a_rollout_away_is_asked_again_with_a_fresh_session(fault: Any) -> None:
    app = FakeTaskApp(fault=lambda number: fault if number < 2 else None)

    async def test() -> None:
        async with staged(app) as stage:
            trajectory = await stage.play()
            assert trajectory.is_scored
            assert stage.episodes.counters.num_attempts == 3
            assert len(stage.waits) == 2

    run(test)
    bodies = [asked.body for asked in app.asked]
    assert len({body["run_id"] for body in bodies}) == len({body["trace_correlation_id"] for body in bodies}) == 3


def test_an_app_that_turns_every_rollout_away_is_a_failure_after_max_tries() -> None:
    app = FakeTaskApp(fault=lambda number: "503")
    trajectory = played(app, max_tries=4)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "(4 attempts)" in (trajectory.error or "")
    assert app.num_rollouts == 4


def test_an_app_may_be_away_for_half_a_minute() -> None:
    app = FakeTaskApp(fault=lambda number: "reset" if number < 7 else None)

    async def test() -> None:
        async with staged(app) as stage:
            assert (await stage.play()).is_scored
            # The k-th wait is drawn from [d / 2, d] with d = 0.5 * 2**k, at most 30.
            for k, wait in enumerate(stage.waits):
                longest = min(0.5 * 2**k, 30.0)
                assert longest / 2 <= wait <= longest
            assert sum(stage.waits) > 30.0  # 61.5 / 2

    run(test)


def test_an_app_that_takes_no_key_of_ours_is_a_failure_that_says_what_to_set() -> None:
    trajectory = played(FakeTaskApp(keys=("other",)))
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "set ENVIRONMENT_API_KEY" in (trajectory.error or "")


def test_a_context_that_ran_out_ends_the_episode_with_what_the_app_gave() -> None:
    """The second prompt does not fit: no failure of the app, and what it says is the episode's result."""
    session = replace(SETTINGS, max_output_tokens=48, max_model_len=120)
    trajectory = played(FakeTaskApp(num_turns=5), session=session)
    assert trajectory.outcome is Outcome.CONTEXT_OVERFLOW
    assert trajectory.error is None
    assert trajectory.turns
    assert trajectory.reward == pytest.approx(sum(map(worth, said(trajectory))) + MADE_UP)


def test_a_first_prompt_that_does_not_fit_is_an_overflow_without_turns() -> None:
    session = replace(SETTINGS, max_output_tokens=4, max_model_len=8)
    trajectory = played(FakeTaskApp(), session=session)
    assert trajectory.outcome is Outcome.CONTEXT_OVERFLOW
    assert trajectory.turns == ()
    assert trajectory.error is not None


def test_an_engine_that_will_never_answer_again_ends_the_run() -> None:
    def poisoned(prompt: str) -> str:
        raise EnginePoisonedError("a weight update failed half-way")

    with pytest.raises(EnginePoisonedError, match="half-way"):
        played(FakeTaskApp(), replying(poisoned))


def test_a_cancelled_episode_closes_its_session() -> None:
    app = FakeTaskApp(fault=lambda number: "hang")

    async def test() -> None:
        async with staged(app) as stage:
            playing = asyncio.create_task(stage.play())
            await asyncio.to_thread(app.is_hanging.wait)
            assert stage.gateway.gateway.num_sessions == 1
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing

    run(test)


def test_what_does_not_fit_together_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    def doubled(told: dict[str, Any]) -> dict[str, Any]:
        told["metrics"]["mean_return"] += 2.0
        return told

    async def test() -> None:
        async with staged(FakeTaskApp(spoil=doubled)) as stage:
            for _ in range(3):
                trajectory = await stage.play()
                real = sum(map(worth, said(trajectory)))
                assert trajectory.reward == real + 2.0
                assert trajectory.turns[-1].reward_terms["rest_of_return"] == 2.0
            assert stage.episodes.counters.warnings == {"returns differ": 3}

    with caplog.at_level(logging.WARNING, logger="gspo_gym.remote.apps.episodes"):
        run(test)
    assert len([record for record in caplog.records if "returns differ" in record.message]) == 1


def test_steps_that_are_not_calls_give_the_whole_return_to_the_last_turn() -> None:
    def one_step(told: dict[str, Any]) -> dict[str, Any]:
        told["trajectories"][0]["steps"] = told["trajectories"][0]["steps"][-1:]
        return told

    trajectory = played(FakeTaskApp(spoil=one_step))
    assert [turn.reward for turn in trajectory.turns] == [None, sum(map(worth, said(trajectory)))]


def test_tokens_that_reach_training_are_counted() -> None:
    async def test() -> None:
        async with staged(FakeTaskApp()) as stage:
            trajectory = await stage.play()
            counters = stage.episodes.counters
            assert counters.num_sampled_tokens == counters.num_trained_tokens == trajectory.num_actions
            assert counters.trained_fraction == 1.0
            assert counters.calls == {"trained": 2}

    run(test)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy_config": {"model": "mine", "inference_url": "http://x"}}, "inference_url, model is set"),
        ({"policy_config": {"temperature": 0.2}}, "temperature is 0.2 and the episodes are sampled with 1.0"),
        ({"max_turns": 0}, "max_turns"),
        ({"gateway_url": "127.0.0.1:8003"}, "expected a URL"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], says: str) -> None:
    given = {"env_name": "quiz", "session": SETTINGS, "model": "m", "gateway_url": "http://gw", "max_turns": 3}
    with pytest.raises(ConfigError, match=re.escape(says)):
        AppEpisodeSettings(**(given | changes))
