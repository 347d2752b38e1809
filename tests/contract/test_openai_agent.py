"""An agent written only against the openai package, trained without a line of ours in it: which calls, and why.

The agent is `examples/openai_agent.py`; the model is a script that reads what it is shown. It fails now and then, so
that the openai package tries again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import served_gateway as gw

from gspo_gym.engine.scripted import Failures
from gspo_gym.remote.apps.client import TaskAppClient
from gspo_gym.remote.apps.episodes import AppEpisodes, AppEpisodeSettings
from gspo_gym.remote.gateway.app import rollout_url
from gspo_gym.remote.gateway.capture import Capture
from gspo_gym.remote.gateway.capture_build import CaptureBuild, build_trajectory_parts
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.types import Outcome, Task, ToolCall, Trajectory

Played = tuple[dict[str, Any], Capture]

EXAMPLE = Path(__file__).parents[2] / "examples/openai_agent.py"
TITLE = "Halving to the Number"
SEED = 0  # the number is found with the sixth guess


def load_agent() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_agent", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(agent: ModuleType) -> Any:
    """Says what a good model would, from the text of its prompt alone."""

    def reply(prompt: str) -> gw.Said:
        if agent.EDITOR in prompt:
            return TITLE
        if agent.ADVISER in prompt:
            return "Say 32." if "tool\n32" in prompt else ToolCall("call_0", "middle", {"low": 1, "high": 64})
        return str(middle_of(prompt))

    return reply


def middle_of(prompt: str) -> int:
    """The middle of what the hints leave of 1 to 64; they stand in the order of the guesses, compacted or not."""
    low, high = 1, 64
    for guess, hint in re.findall(r"(\d+)(?: -> |<.*>\n<.*>user\n)My number is (higher|lower)", prompt):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return (low + high) // 2


@pytest.fixture(scope="module")
def played() -> Played:
    """What the app answers to /rollout, and what the gateway has captured of it."""
    agent = load_agent()
    answers: dict[str, Any] = {}
    captures: list[Capture] = []

    async def check() -> None:
        engine = gw.replying(model(agent), failures=Failures(every=4))
        async with gw.served(engine) as served:
            session = served.open()
            policy = {"model": "policy", "temperature": 1.0, "inference_url": rollout_url(served.url, session.id)}
            request = {"run_id": "r", "env": {"seed": SEED}, "policy": {"config": policy}, "ops": [], "mode": "rl"}
            answers.update(await asyncio.to_thread(agent.rollout, request))
            captures.append(await session.freeze())

    gw.run(check)
    return answers, captures[0]


def described(capture: Capture, build: CaptureBuild) -> list[tuple[str, str, str]]:
    """Of every call: the beginning of its system message, how its prompt came about, and what became of it."""
    systems: dict[int, str] = {}
    for call in capture.calls:
        systems[call.index] = systems[call.parent] if call.parent is not None else call.new_messages[0].content
    who = {"You play": "player", "You advi": "adviser", "Write a ": "editor"}
    return [
        (
            who[systems[use.index][:8]] if use.kind != "failed" else "",
            use.kind,
            "trained" if use.untrained is None else use.untrained.value,
        )
        for use in build.uses
    ]


def test_its_calls_are_trained_but_for_the_title_and_what_failed(played: Played) -> None:
    answer, capture = played
    build = build_trajectory_parts(capture)
    uses = [use for use in described(capture, build) if use[1] != "failed"]
    assert uses == [
        ("adviser", "root", "trained"),  # a sub-agent: a conversation of its own, with a tool
        ("adviser", "extends", "trained"),  # after its tool has answered
        ("player", "root", "trained"),
        ("player", "extends", "trained"),
        ("player", "extends", "trained"),
        ("player", "extends", "trained"),
        ("player", "root", "trained"),  # after compaction: a new beginning under the same system message
        ("player", "extends", "trained"),
        ("editor", "root", "auxiliary"),  # the title: one call without tools beside longer conversations
    ]
    assert build.counts == {"trained": 8, "auxiliary": 1, "failed": len(capture.failed)}
    assert len(build.segments) == 3
    # Every fourth call of the engine fails and is asked again by the openai package: 9 answers take 11 calls.
    assert [failed.index for failed in capture.failed] == [3, 7]
    assert {failed.kind for failed in capture.failed} == {"engine"}
    assert answer["metrics"]["details"]["title"] == TITLE


def test_every_token_that_counts_is_one_that_was_sampled_in_its_place(played: Played) -> None:
    _, capture = played
    build = build_trajectory_parts(capture)
    sampled = {call.index: call.completion.token_ids.tolist() for call in capture.calls}
    for turn, index in zip(build.turns, build.turn_calls, strict=True):
        start, stop = turn.action_span
        segment = build.segments[turn.segment]
        assert segment.token_ids[start:stop].tolist() == sampled[index]
        assert segment.action_mask[start:stop].all()
    num_trained = sum(int(segment.action_mask.sum()) for segment in build.segments)
    title = len(TITLE) + 1  # a token is a byte, and the stop token
    assert num_trained == build.num_trained_tokens == sum(map(len, sampled.values())) - title
    assert build.trained_fraction == num_trained / (num_trained + title)


def test_the_game_was_played_to_its_end(played: Played) -> None:
    answer, _ = played
    steps = answer["trajectories"][0]["steps"]
    assert steps[0]["info"]["guess"] == "32"
    assert len(steps) == 6
    assert answer["metrics"]["mean_return"] == sum(step["reward"] for step in steps) == 1.0
    assert [step["done"] for step in steps] == [False] * 5 + [True]


def test_as_a_task_app_it_gives_the_trainer_an_episode_with_its_return() -> None:
    agent = load_agent()
    server = agent.task_app(0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    trajectories: list[Trajectory] = []

    async def check() -> None:
        url = f"http://127.0.0.1:{server.server_port}"
        async with gw.served(gw.replying(model(agent))) as served, TaskAppClient(url) as app:
            await app.health()
            assert [info.task_metadata["seed"] for info in await app.task_info([3, 5])] == [3, 5]
            settings = AppEpisodeSettings(
                env_name="guessing", session=gw.SETTINGS, model="policy", gateway_url=served.url, max_turns=7
            )
            episodes = AppEpisodes(app, served.gateway, settings)
            task = Task("guessing", SEED)
            trajectories.append(await episodes.play(EpisodeRequest("t", task, sampling_seed=1)))
            assert episodes.counters.calls == {"trained": 8, "auxiliary": 1}

    try:
        gw.run(check)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    (trajectory,) = trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TERMINATED, 1.0)
    assert (len(trajectory.turns), len(trajectory.segments)) == (8, 3)


def test_nothing_of_ours_is_in_it() -> None:
    imported = {
        name: re.findall(r"^(?:import|from) (\w+)", (EXAMPLE.parent / name).read_text(), re.MULTILINE)
        for name in (EXAMPLE.name, "json_server.py")
    }
    assert imported == {
        EXAMPLE.name: ["json", "sys", "gymnasium", "json_server", "openai"],
        "json_server.py": ["json", "re", "http", "urllib"],
    }
