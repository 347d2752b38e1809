"""A served environment as a task app: its documents, its rollouts in both modes, its limits and its failures.

The model is an endpoint on loopback that says what the test wants. Pinned here:

1.  /, /health, /info, /task_info and /done say what the contract asks for.
2.  A rollout plays the conversation that `run_episode` plays, and tells of it field by field.
3.  What the environment's author would call an invalid action reaches `invalid_action`.
4.  Ops, on_done, max_ops, max_time_s, abort and a client that leaves end a rollout as they should.
5.  A failure is an HTTP error with a code: never an answer with a reward.
6.  URLs and constructor arguments that a request brings are the operator's to allow.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from ending_env import Ending
from moved_clock import ServersClock
from pydantic import BaseModel
from scripted_model import Json, Say, ScriptedModel, calls, in_turn, text

from gspo_gym.env.core import TextEnv, ToolEnv
from gspo_gym.env.rewards import Achievements, Reward
from gspo_gym.env.tools import tool
from gspo_gym.errors import ConfigError
from gspo_gym.remote.apps.contracts import RolloutRequest, RolloutResponse, read_response
from gspo_gym.remote.apps.rewards import read_rollout
from gspo_gym.remote.serve.task_app_rollout import seed_of
from gspo_gym.remote.serve.task_app_server import TaskAppLimits, create_task_app, rubrics_of
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import SAMPLING_NAMES, Outcome


class Stage:
    """A served environment, a model, and requests between them."""

    def __init__(self, app_url: str, model: ScriptedModel, model_url: str, clock: ServersClock) -> None:
        self.url, self.model, self.model_url, self.clock = app_url, model, model_url, clock

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=30)

    def post(self, path: str, body: Json) -> httpx.Response:
        return httpx.post(self.url + path, json=body, trust_env=False, timeout=30)

    def request(self, **changes: Any) -> Json:
        """A rollout's request; `env`, `policy` and `safety` are added to, everything else replaced."""
        policy = {"model": "m", "inference_url": f"{self.model_url}/t/id/v1/chat/completions?cid=id"}
        request: Json = {
            "run_id": "run-1",
            "env": {"env_name": None, "seed": 0, **changes.pop("env", {})},
            "policy": {"policy_name": "p", "config": {**policy, **changes.pop("policy", {})}},
            "ops": ["agent", "env"] * 6,
            "on_done": "terminate",
            "mode": "rl",
        }
        return {**request, **changes}

    def rollout(self, **changes: Any) -> RolloutResponse:
        """What a rollout answers, read as strictly as a trainer reads it."""
        answer = self.post("/rollout", self.request(**changes))
        assert answer.status_code == 200, answer.text
        response = read_response(answer.json())
        assert isinstance(response, RolloutResponse)
        return response

    def refused(self, **changes: Any) -> tuple[int, str]:
        """Status and code of a rollout that is not played."""
        answer = self.post("/rollout", self.request(**changes))
        return answer.status_code, answer.json()["detail"]["error"]["code"]


Make = Callable[..., Stage]


class Unscored(TextEnv):
    """Scores nothing, and never ends."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action: Any) -> Any:
        return "Go on.", None, False, False, {}


class Numbered(TextEnv):
    """Says which task it is."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"task {seed}", {}

    def step(self, action: Any) -> Any:
        return "The end.", 1.0, True, False, {}


class Library(TextEnv):
    """Has a split of its own."""

    def __init__(self, split: str = "novels") -> None:
        self._split = split

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"{self._split} {seed}", {}

    def step(self, action: Any) -> Any:
        return "The end.", 1.0, True, False, {}


@pytest.fixture
def stage() -> Iterator[Make]:
    """Makes stages: what the model says, the environment, and arguments of `create_task_app`."""
    with ExitStack() as stack:

        def make(
            say: Say | ScriptedModel, env: Any = "GuessNumber", *, clock: ServersClock | None = None, **settings: Any
        ) -> Stage:
            model = say if isinstance(say, ScriptedModel) else ScriptedModel(say)
            clock = clock or ServersClock()
            if env == "GuessNumber":
                settings["config"] = {"style": "terse"} | settings.get("config", {})
            clock.app = create_task_app(env, isolation="thread", **settings)
            app = stack.enter_context(BackgroundServer(clock))
            return Stage(app.url, model, stack.enter_context(BackgroundServer(model)).url, clock)

        yield make


def nothing(_body: Json) -> Json:
    raise AssertionError("the model was asked")


# -- 1. documents ---------------------------------------------------------------------------------------------------


def test_it_says_what_is_served(stage: Make) -> None:
    app = stage(nothing, "GuessNumber", rubrics=rubrics_of("GuessNumber"))
    assert app.get("/").json() == {"status": "ok", "service": "GuessNumber"}
    assert httpx.head(app.url, trust_env=False).status_code == 200
    assert app.get("/health").json() == {"healthy": True, "status": "healthy", "auth": {"required": False}}
    info = app.get("/info").json()
    assert set(info) == {"service", "dataset", "rubrics", "inference", "limits"}
    assert (info["service"]["task"]["id"], info["service"]["env_id"]) == ("GuessNumber", "gspo_gym/GuessNumber-v0")
    assert app.post("/done", {}).json() == {"ok": True, "service": "GuessNumber"}


def test_rubrics_are_told_as_their_file_has_them(stage: Make) -> None:
    app = stage(nothing, "GuessNumber", rubrics=rubrics_of("GuessNumber"))
    rubric = app.get("/info").json()["rubrics"]["outcome"]
    weights = {criterion["id"]: criterion["weight"] for criterion in rubric["criteria"]}
    assert weights == {"outcome.found": 0.6, "process.consistent": 0.2, "process.legal": 0.2}  # envs/guess_number
    assert app.get("/task_info?seed=3").json()["rubric"]["outcome"] == rubric
    assert stage(nothing, "GuessNumber").get("/info").json()["rubrics"] is None


def test_task_info_is_a_set_a_task_or_a_list(stage: Make) -> None:
    app = stage(nothing)
    taskset = app.get("/task_info").json()["taskset"]
    assert (taskset["id"], taskset["splits"], taskset["seed_range"]) == (
        "GuessNumber",
        ["held_out", "train"],
        [0, 2**32 - 1],
    )
    one = app.get("/task_info?seed=5").json()
    assert (one["task_metadata"]["seed"], one["dataset"]["split"], one["environment"]) == (5, "held_out", "GuessNumber")
    many = app.get(f"/task_info?seed=0&seed={2**31}&seeds=7,8").json()
    assert [task["task_metadata"]["seed"] for task in many] == [0, 2**31, 7, 8]
    assert [task["dataset"]["split"] for task in many] == ["held_out", "train", "held_out", "held_out"]
    assert [app.get(f"/task_info?seed={seed}").status_code for seed in ("-1", "x", str(2**32))] == [422] * 3


# -- 2. rollouts ----------------------------------------------------------------------------------------------------


def test_a_rollout_is_told_field_by_field(stage: Make) -> None:
    app = stage(in_turn(text("4"), text("6"), text("7")))  # 7 is the number of seed 0
    answer = app.post("/rollout", app.request()).json()
    url = f"{app.model_url}/t/id/v1/chat/completions?cid=id"
    assert (answer["run_id"], answer["aborted"], answer["ops_executed"], answer["branches"]) == ("run-1", False, 6, {})
    assert answer["trace_correlation_id"] == "id"
    assert answer["pipeline_metadata"] == {"inference_url": url, "trace_correlation_id": "id"}
    (trajectory,) = answer["trajectories"]
    assert (trajectory["env_id"], trajectory["policy_id"], trajectory["length"]) == ("GuessNumber", "p", 3)
    assert (trajectory["inference_url"], trajectory["trace_correlation_id"]) == (url, "id")
    steps = trajectory["steps"]
    assert [step["obs"]["text"] for step in steps] == ["Guess 1-8. 4 tries.", "higher", "higher"]
    assert [step["output"] for step in steps] == ["4", "6", "7"]
    assert [step["reward"] for step in steps] == [0.0, 0.0, 1.0]
    assert [step["done"] for step in steps] == [False, False, True]
    assert [step["info"]["gspo_gym"] for step in steps] == [
        {"reward_terms": {}, "events": []},
        {"reward_terms": {}, "events": []},
        {"reward_terms": {"found": 1.0}, "events": ["found"]},
    ]
    assert all(step["info"]["meta"]["inference_url"] == url for step in steps)
    assert "decision_rewards" not in steps[0]["info"]["meta"]  # step rewards are off
    final = trajectory["final"]
    assert (final["observation"]["text"], final["success"], final["outcome"]) == ("correct", True, "terminated")
    metrics = answer["metrics"]
    assert (metrics["episode_returns"], metrics["mean_return"], metrics["num_steps"]) == ([1.0], 1.0, 3)
    assert (metrics["num_episodes"], metrics["outcome_score"], metrics["events_score"]) == (1, 1.0, None)
    assert metrics["details"] == {
        "reward_terms": {"found": 1.0},
        "achievements": ["found"],
        "gspo_gym": {"outcome": "terminated"},
        "success": True,
    }


def test_the_model_is_asked_what_the_policy_says_and_nothing_else(stage: Make) -> None:
    app = stage(in_turn(text("4"), text("7")))
    app.rollout(policy={"temperature": 0.5, "max_tokens": 9, "system_prompt": "Be brief.", "thinking_mode": "no"})
    first, second = app.model.asked
    assert (first.path, first.query) == ("/t/id/v1/chat/completions", "cid=id")
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess 1-8. 4 tries."}]
    sampling = {"model": "m", "temperature": 0.5, "max_tokens": 9}
    assert first.body == {**sampling, "messages": opening}
    answer = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "higher"}]
    assert second.body == {**sampling, "messages": opening + answer}


def test_every_sampling_setting_of_the_policy_reaches_the_model(stage: Make) -> None:
    ours = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 3}
    assert tuple(ours) == SAMPLING_NAMES
    openais = {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": {"7": 5}, "seed": 3, "stop": ["x"]}
    app = stage(in_turn(text("4"), text("7")))
    app.rollout(policy=ours | openais)
    assert all(asked.body.items() >= (ours | openais).items() for asked in app.model.asked)


class Fetch(ToolEnv):
    """Fetch the ball.

    Its first tool call must name it.
    """

    def start(self, options: Any) -> Any:
        return [{"role": "system", "content": "You fetch."}, {"role": "user", "content": "What is it?"}]

    @tool
    def fetch(self, thing: str) -> str:
        """Fetch a thing."""
        if thing == "ball":
            self.finish(Reward({"fetched": 1.0}, success=True))
        return f"fetched {thing}"

    def no_tool_call(self, text: str) -> Any:
        self.add_reward(Reward({"talk": -0.5}))
        return "Fetch."

    def invalid_action(self, error: str) -> Any:
        return f"unreadable: {error}", -0.25, False, False, {}


def test_tools_are_offered_and_their_answers_named_after_the_calls(stage: Make) -> None:
    app = stage(in_turn(text("hm"), calls(("fetch", '{"thing": "box"}')), calls(("fetch", '{"thing": "ball"}'))), Fetch)
    response = app.rollout(policy={"system_prompt": "Be brief."})
    assert [step.reward for step in response.trajectories[0].steps] == [-0.5, 0.0, 1.0]
    assert response.trajectories[0].steps[1].tool_calls == [
        {"id": "id_0", "type": "function", "function": {"name": "fetch", "arguments": '{"thing": "box"}'}}
    ]
    assert response.metrics.details["reward_terms"] == {"talk": -0.5, "fetched": 1.0}
    last = app.model.asked[-1].body
    assert last["tools"][0]["function"]["name"] == "fetch"
    assert last["messages"][0] == {"role": "system", "content": "Be brief.\n\nYou fetch."}
    assert last["messages"][-1] == {"role": "tool", "content": "fetched box", "tool_call_id": "id_0", "name": "fetch"}


@pytest.mark.parametrize("in_config", ["policy", "env"])
def test_decisions_are_rewarded_as_task_apps_reward_them(stage: Make, in_config: str) -> None:
    """Values by hand: wood weighs 0.8, drink the default 1; a second wood is beyond its limit of 1."""
    rewards = {
        "enabled": True,
        "mode": "decision_stepwise",
        "strategy": "per_achievement",
        "indicator_lambda": 0.5,
        "weights": {"wood": 0.8},
    }
    app = stage(in_turn(text("wood drink"), text("wood"), text("end")), Unlocks)
    given = (
        {"policy": {"step_rewards": rewards}}
        if in_config == "policy"
        else {"env": {"config": {"step_rewards": rewards}}}
    )
    response = app.rollout(**given)
    infos = [step.info or {} for step in response.trajectories[0].steps]
    assert [info["meta"]["decision_rewards"] for info in infos] == [
        {"turn": 1, "ach_delta": 2, "unique_delta": 2, "all": ["wood", "drink"], "unique": ["wood", "drink"]},
        {"turn": 2, "ach_delta": 1, "unique_delta": 0, "all": ["wood"], "unique": []},
        {"turn": 3, "ach_delta": 0, "unique_delta": 0, "all": [], "unique": []},
    ]
    assert [info["stepwise"]["reward"] for info in infos] == [pytest.approx(0.5 * 1.8), 0.0, 0.0]
    assert [info["stepwise"]["indicator"] for info in infos] == [1, 1, 0]
    assert response.metrics.events_score == pytest.approx(0.9)
    assert response.metrics.details["stepwise"]["unique_achievements"] == ["wood", "drink"]
    samples = response.trajectories[0].decision_samples or []
    assert [sample["r_i"] for sample in samples] == [pytest.approx(0.9), 0.0, 0.0]
    assert [step.reward for step in response.trajectories[0].steps] == [0.0, 0.0, 0.0]  # its own are as they were


class Unlocks(TextEnv):
    """Unlocks what is said."""

    def __init__(self) -> None:
        self.achievements = Achievements(["wood", "drink"])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.achievements.reset()
        return "go", {}

    def step(self, action: str) -> Any:
        for name in action.split():
            if name != "end":
                self.achievements.unlock(name)
        return "on", Reward({}, events=self.achievements.turn_events()), action == "end", False, {}


def test_unknown_step_rewards_are_refused(stage: Make) -> None:
    app = stage(nothing)
    for wrong in ({"strategy": "per_decision"}, {"mode": "sometimes"}, {"lambda": 1.0}):
        assert app.refused(policy={"step_rewards": {"enabled": True, **wrong}}) == (422, "bad_step_rewards")


def test_unscored_is_null_and_never_zero(stage: Make) -> None:
    class Unscored(TextEnv):
        """Nobody knows."""

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return "go", {}

        def step(self, action: str) -> Any:
            return "done", None, True, False, {}

    response = stage(in_turn(text("x")), Unscored).rollout()
    assert response.trajectories[0].steps[0].reward is None
    assert (response.metrics.mean_return, response.metrics.episode_returns) == (None, [])
    assert (response.metrics.outcome_score, "success" in response.metrics.details) == (None, False)


def test_a_trace_is_given_when_asked_for_short_or_whole(stage: Make) -> None:
    def play(**record: Any) -> Json:
        app = stage(in_turn(text("4"), text("7")))
        answer: Json = app.post("/rollout", app.request(record=record)).json()
        return answer

    assert play()["trace"] is None
    short = play(return_trace=True)["trace"]
    assert set(short) == {
        "session_id",
        "created_at",
        "metadata",
        "events_count",
        "messages_count",
        "lm_calls",
        "decision_rewards",
    }
    assert (short["events_count"], short["messages_count"], len(short["lm_calls"])) == (4, 4, 2)
    assert (short["lm_calls"][0]["input_tokens"], short["lm_calls"][0]["output_tokens"]) == (7, 3)
    whole = play(return_trace=True, trace_format="full")["trace"]
    assert [event["event_type"] for event in whole["event_history"]] == ["cais", "environment"] * 2
    said = [message["content"] for message in whole["markov_blanket_message_history"]]
    assert said == ["Guess 1-8. 4 tries.", "4", "higher", "7", "correct"]
    assert whole["event_history"][0]["call_records"][0]["output_messages"] == [{"role": "assistant", "content": "4"}]
    structured = play(return_trace=True, trace_format="structured")["trace"]
    same = [name for name in whole if name not in ("created_at", "event_history", "markov_blanket_message_history")]
    assert {name: structured[name] for name in same} == {name: whole[name] for name in same}
    history = structured["markov_blanket_message_history"]
    assert [message["content"] for message in history] == [{"text": one, "json_payload": None} for one in said]
    assert [message["message_type"] for message in history] == ["user", "assistant", "user", "assistant", "user"]
    assert [message["time_record"]["message_time"] for message in history] == [0, 1, 2, 3, 4]
    bare = play(trajectories=False)
    assert (bare["trajectories"], bare["metrics"]["mean_return"]) == ([], 1.0)


def test_a_structured_trace_holds_calls_and_their_results_as_json(stage: Make) -> None:
    """As `_markov_message_from_dict` of synth-ai 0.2.24 reads it: `content` is a table of two texts."""
    app = stage(in_turn(calls(("fetch", '{"thing": "ball"}'))), env=Fetch)
    record = {"return_trace": True, "trace_format": "structured"}
    history = app.post("/rollout", app.request(record=record)).json()["trace"]["markov_blanket_message_history"]
    assert [message["message_type"] for message in history] == ["system", "user", "assistant", "tool_result"]
    assert [message["content"]["json_payload"] for message in history[:2]] == [None, None]
    said, result = (json.loads(message["content"]["json_payload"]) for message in history[2:])
    assert said["tool_calls"][0]["function"] == {"name": "fetch", "arguments": '{"thing": "ball"}'}
    assert (result["content"], result["tool_call_id"]) == ("fetched ball", said["tool_calls"][0]["id"])


def test_logprobs_are_asked_for_and_told_when_they_are_wanted(stage: Make) -> None:
    app = stage(in_turn(text("7")))
    response = app.rollout(record={"logprobs": True})
    assert app.model.asked[0].body["logprobs"] is True
    assert (response.trajectories[0].steps[0].info or {})["logprobs"] == [-0.25]


def test_evaluation_needs_no_correlation_id_and_training_does(stage: Make) -> None:
    app = stage(in_turn(text("7")))
    bare = {"inference_url": f"{app.model_url}/v1"}
    assert app.refused(policy=bare) == (422, "missing_correlation_id")
    assert app.rollout(policy=bare, mode="eval").trace_correlation_id is None
    assert app.model.asked[0].path == "/v1/chat/completions"


def test_a_seed_that_is_not_given_comes_from_the_run_id(stage: Make) -> None:
    """Two rollouts of one id play one task; it is that of the seed which the id gives."""
    seen = []
    for env in ({"seed": None}, {"seed": seed_of("run-1", is_evaluation=False)}):
        app = stage(lambda _body: text("1"))
        response = app.rollout(env=env)
        seen.append([(step.obs, step.reward) for step in response.trajectories[0].steps])
    assert seen[0] == seen[1]
    first, second = (seed_of(run_id, is_evaluation=False) for run_id in ("run-1", "run-2"))
    assert 2**31 <= first < 2**32
    assert first != second


# -- 3. what is no action -------------------------------------------------------------------------------------------


def test_what_the_gateway_could_not_parse_is_the_environments_to_answer(stage: Make) -> None:
    broken = {"content": "<tool_call>{", "gspo_gym": {"call": 0, "parse": "bad_tool_call", "error": "expected JSON"}}
    app = stage(in_turn(broken, calls(("fetch", '{"thing": "ball"}'))), Fetch)
    response = app.rollout()
    steps = response.trajectories[0].steps
    assert [step.reward for step in steps] == [-0.25, 1.0]
    assert (steps[0].info or {})["meta"]["parse"] == "bad_tool_call"
    assert app.model.asked[1].body["messages"][-2:] == [
        {"role": "assistant", "content": "<tool_call>{"},
        {"role": "user", "content": "unreadable: expected JSON"},
    ]


def test_arguments_that_are_no_json_are_the_environments_to_answer(stage: Make) -> None:
    app = stage(in_turn(calls(("fetch", '{"thing": ')), calls(("fetch", '{"thing": "ball"}'))), Fetch)
    steps = app.rollout().trajectories[0].steps
    assert [step.reward for step in steps] == [-0.25, 1.0]
    assert "not JSON" in app.model.asked[1].body["messages"][-1]["content"]


def test_reasoning_is_sent_back_only_to_our_gateway(stage: Make) -> None:
    thought = {"content": "4", "reasoning_content": "half"}
    foreign = stage(in_turn(thought, text("7")))
    foreign.rollout()
    assert foreign.model.asked[1].body["messages"][1] == {"role": "assistant", "content": "4"}
    ours = stage(in_turn({**thought, "gspo_gym": {"call": 0, "parse": "ok", "error": None}}, text("7")))
    ours.rollout()
    assert ours.model.asked[1].body["messages"][1]["reasoning_content"] == "half"


# -- 4. where it ends -----------------------------------------------------------------------------------------------


def test_it_ends_with_the_ops(stage: Make) -> None:
    app = stage(lambda _body: text("1"))
    response = app.rollout(ops=["agent", "env"] * 2)
    assert (response.ops_executed, response.metrics.num_steps) == (4, 2)
    assert response.metrics.details["gspo_gym"] == {"outcome": "max_turns"}
    assert not response.trajectories[0].steps[-1].done
    assert app.rollout(safety={"max_ops": 3}).ops_executed == 2  # only whole decisions
    as_objects = [{"type": "agent"}, {"type": "env"}]
    assert app.rollout(ops=as_objects).ops_executed == 2


@pytest.mark.parametrize("ops", [[], ["agent"], ["env", "agent"], ["agent", "agent"], ["agent", "env", "agent"]])
def test_other_ops_are_refused(stage: Make, ops: list[str]) -> None:
    assert stage(nothing).refused(ops=ops) == (422, "bad_ops")


def test_reset_on_done_plays_the_task_again_while_there_are_ops(stage: Make) -> None:
    app = stage(in_turn(text("7"), text("1"), text("7"), text("1")))
    response = app.rollout(ops=["agent", "env"] * 4, on_done="reset")
    assert [len(trajectory.steps) for trajectory in response.trajectories] == [1, 2, 1]
    assert response.metrics.episode_returns == [1.0, 1.0, 0.0]
    assert response.metrics.num_episodes == 3
    assert response.metrics.mean_return == pytest.approx(2 / 3)
    assert [len(asked.body["messages"]) for asked in app.model.asked] == [1, 1, 3, 1]
    assert app.refused(on_done="again") == (422, "bad_on_done")


def test_a_conversation_that_no_longer_fits_ends_the_episode(stage: Make) -> None:
    app = stage(in_turn(text("1"), {"overflow": True}))
    response = app.rollout()
    assert (response.metrics.num_steps, response.aborted) == (1, False)
    assert response.metrics.details["gspo_gym"] == {"outcome": "context_overflow"}
    assert stage(in_turn({"overflow": True})).refused() == (500, "no_steps_executed")


@pytest.mark.parametrize("word", ["refuse", "wait"])
def test_an_action_that_exceeds_a_limit_is_answered_at_the_floor_and_read_as_such(stage: Make, word: str) -> None:
    env = partial(Ending, on_hang=lambda: clock.move(30.0))
    clock, limits = ServersClock(), TaskAppLimits(step_timeout_seconds=30.0)
    app = stage(in_turn(text("good"), text(word)), env, clock=clock, limits=limits)
    response = app.rollout()
    assert [step.reward for step in response.trajectories[0].steps] == [0.5, -3.5]  # -3 is the environment's lowest
    assert response.metrics.details["gspo_gym"] == {"outcome": "action_limit"}
    read = read_rollout(response, RolloutRequest.model_validate(app.request()))
    assert (read.outcome, read.episode_return) == (Outcome.ACTION_LIMIT, -3.0)


def test_actions_that_use_the_time_up_are_answered_at_the_floor_and_hide_no_bad_episode(stage: Make) -> None:
    """Each action takes 0.4 s, so that three are more than half of 1.5 s; an empty one takes none."""
    app = stage(in_turn(*[text("slow")] * 9), partial(Ending, place="loop"))
    response = app.rollout(safety={"max_time_s": 1.5})
    assert not response.aborted
    assert response.metrics.details["gspo_gym"] == {"outcome": "action_limit"}
    assert (response.metrics.mean_return, response.trajectories[0].steps[-1].done) == (-3.0, True)
    assert app.get("/run/status/run-1").json()["status"] == "succeeded"


def test_an_environment_that_is_as_slow_without_the_actions_aborts_the_rollout(stage: Make) -> None:
    app = stage(in_turn(text("good")), partial(Ending, place="loop", hangs_always=True))
    assert app.rollout(safety={"max_time_s": 0.6}).aborted


def test_a_failure_that_does_not_come_again_is_an_error(stage: Make, tmp_path: Path) -> None:
    env = partial(Ending, mark=str(tmp_path / "mark"), on_hang=lambda: clock.move(30.0))
    clock, limits = ServersClock(), TaskAppLimits(step_timeout_seconds=30.0)
    app = stage(in_turn(text("wait once")), env, clock=clock, limits=limits)
    assert app.refused() == (500, "env_step_failed")


def test_a_rollout_that_takes_too_long_is_aborted_and_keeps_what_it_played(stage: Make) -> None:
    model = ScriptedModel(in_turn(text("1")))

    def say(body: Json) -> Json:
        model.hangs = True  # from the next request on
        return text("1")

    model.say, model.on_hang = say, lambda: app.clock.move(60.0)
    app = stage(model)
    response = app.rollout(safety={"max_time_s": 60.0})
    assert (response.aborted, len(response.trajectories[0].steps)) == (True, 1)
    assert response.metrics.details["gspo_gym"] == {"outcome": None}
    assert model.is_left.wait(30)  # and the model is no longer asked
    assert app.get("/run/status/run-1").json()["status"] == "aborted"


class _HostedStep(BaseModel):
    """As the contract's own package reads a step; what it does not demand is left out here and below."""

    obs: dict[str, Any]
    tool_calls: list[dict[str, Any]]
    reward: float | None
    done: bool
    truncated: bool | None
    info: dict[str, Any] | None


class _HostedTrajectory(BaseModel):
    env_id: str
    policy_id: str
    steps: list[_HostedStep]
    final: dict[str, Any] | None
    length: int
    inference_url: str
    decision_samples: list[dict[str, Any]] | None


class _HostedMetrics(BaseModel):
    episode_returns: list[float]
    mean_return: float
    num_steps: int
    num_episodes: int
    outcome_score: float | None
    events_score: float | None
    details: dict[str, Any]


class _HostedAnswer(BaseModel):
    run_id: str
    trajectories: list[_HostedTrajectory]
    branches: dict[str, list[str]]
    metrics: _HostedMetrics
    aborted: bool
    ops_executed: int
    trace_correlation_id: str | None
    trace: dict[str, Any] | None
    pipeline_metadata: dict[str, Any]


@pytest.mark.parametrize("num_answers", [0, 1])
def test_an_aborted_rollouts_answer_is_valid_in_the_hosted_contract(num_answers: int, stage: Make) -> None:
    """Nothing was scored, and the contract wants a number; a trainer of ours believes none of an aborted rollout."""
    release = threading.Event()
    said = iter([text("3")] * num_answers)

    def say(_body: Json) -> Json:
        answer = next(said, None)
        if answer is None:
            app.clock.move(60.0)
            release.wait()
        return answer or text("late")

    app = stage(say, Unscored)
    try:
        answer = app.post("/rollout", app.request(safety={"max_time_s": 60.0})).json()
    finally:
        release.set()
    read = _HostedAnswer.model_validate(answer)
    assert (read.aborted, read.metrics.mean_return, read.metrics.num_steps) == (True, 0.0, num_answers)
    assert read_response(answer).aborted  # type: ignore[union-attr]  # of generation A


def test_a_rollout_can_be_aborted_by_its_id(stage: Make) -> None:
    app = stage(ScriptedModel(nothing, hangs=True))
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(app.post("/rollout", app.request())))
    thread.start()
    assert app.model.is_asked.wait(30)
    assert app.get("/run/status/run-1").json()["status"] == "running"
    assert app.post("/run/abort", {"run_id": "run-1"}).json()["ok"] is True
    thread.join(30)
    assert (answers[0].status_code, answers[0].json()["aborted"]) == (200, True)
    status = app.get("/run/status/run-1").json()
    assert status["status"] == "aborted"
    assert status["started_at"] <= status["finished_at"]
    assert app.get("/run/status/run-2").status_code == 404
    assert app.post("/run/abort", {"run_id": "run-2"}).status_code == 404


def test_a_run_id_names_one_rollout_at_a_time(stage: Make) -> None:
    app = stage(ScriptedModel(nothing, hangs=True))
    thread = threading.Thread(target=lambda: app.post("/rollout", app.request()))
    thread.start()
    assert app.model.is_asked.wait(30)
    assert app.refused() == (409, "run_exists")
    app.post("/run/abort", {"run_id": "run-1"})
    thread.join(30)


def test_a_client_that_leaves_stops_its_rollout(stage: Make) -> None:
    app = stage(ScriptedModel(nothing, hangs=True))

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            asking = asyncio.create_task(client.post(f"{app.url}/rollout", json=app.request()))
            assert await asyncio.to_thread(app.model.is_asked.wait, 30)
            asking.cancel()

    asyncio.run(ask_and_leave())
    assert app.model.is_left.wait(30)


def test_rollouts_wait_for_a_place_and_too_many_are_turned_away(stage: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo_gym.remote.serve.task_app_server._MAX_WAITING", 1)
    app = stage(ScriptedModel(nothing, hangs=True), limits=TaskAppLimits(max_concurrent_rollouts=1))
    requests = [app.request(run_id=run_id) for run_id in ("playing", "waiting")]
    threads = [threading.Thread(target=app.post, args=("/rollout", request)) for request in requests]
    threads[0].start()
    assert app.model.is_asked.wait(30)
    threads[1].start()
    while app.get("/run/status/waiting").status_code == 404:
        pass
    assert app.get("/run/status/waiting").json()["status"] == "waiting"
    answer = app.post("/rollout", app.request(run_id="one-too-many"))
    assert (answer.status_code, answer.json()["detail"]["error"]["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    for run_id in ("waiting", "playing"):
        app.post("/run/abort", {"run_id": run_id})
    for thread in threads:
        thread.join(30)


# -- 5. failures ----------------------------------------------------------------------------------------------------


class Breaks(TextEnv):
    """Breaks where it is told to."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        if where == "init":
            raise RuntimeError("no")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.where == "reset":
            raise RuntimeError("no")
        return "go", {}

    def step(self, action: str) -> Any:
        if self.where == "step":
            raise RuntimeError("no")
        return "done", 1.0, True, False, {}

    def close(self) -> None:
        if self.where == "close":
            raise RuntimeError("no")


@pytest.mark.parametrize("where", ["init", "reset", "step", "close"])
def test_a_broken_environment_is_an_error_and_no_reward(stage: Make, where: str) -> None:
    app = stage(lambda _body: text("x"), Breaks, client_options=["where"])
    assert app.refused(env={"config": {"where": where}}) == (500, f"env_{where}_failed")
    assert app.get("/run/status/run-1").json()["status"] == "failed"
    assert app.rollout().metrics.mean_return == 1.0  # the next one is played


@pytest.mark.parametrize("say", [401, 404, 500, {"content": None, "tool_calls": [{"function": None}]}])
def test_a_failed_model_is_an_error_and_no_reward(stage: Make, say: Json | int) -> None:
    assert stage(lambda _body: say).refused() == (502, "policy_step_failed")


def test_an_unreachable_model_is_an_error_and_no_reward(stage: Make) -> None:
    assert stage(nothing).refused(policy={"inference_url": "http://127.0.0.1:9/v1?cid=x"}) == (
        502,
        "policy_step_failed",
    )


def test_a_wrong_request_is_refused_before_anything_is_played(stage: Make) -> None:
    app = stage(nothing)
    assert app.refused(env={"env_name": "FrozenLake"}) == (404, "unknown_env")
    assert app.refused(env={"seed": -1}) == (422, "bad_seed")
    assert app.refused(policy={"inference_url": None}) == (422, "missing_inference_url")
    assert app.refused(policy={"system_prompt": 3}) == (422, "bad_system_prompt")
    for broken in ({"mode": "train"}, {"ops": "agent"}, {"record": {"trace_format": "odd"}}, {"run_id": ""}):
        assert app.post("/rollout", app.request(**broken)).status_code == 422
    assert app.model.asked == []


@pytest.mark.parametrize("name", ["GuessNumber", "GuessNumber-v0", "gspo_gym/GuessNumber-v0"])
def test_an_environment_is_asked_for_by_any_of_its_names(stage: Make, name: str) -> None:
    assert stage(in_turn(text("7"))).rollout(env={"env_name": name}).metrics.mean_return == 1.0


# -- 6. what a request may bring ------------------------------------------------------------------------------------


def test_only_allowed_inference_urls_are_called(stage: Make) -> None:
    app = stage(nothing, inference_hosts=["gateway.example"])
    assert app.refused() == (422, "inference_url_not_allowed")  # loopback is not, unless it is named
    app = stage(nothing)
    for url in ("http://169.254.169.254/latest?cid=x", "http://example.com/v1?cid=x", "file:///etc/passwd?cid=x"):
        assert app.refused(policy={"inference_url": url}) == (422, "inference_url_not_allowed")
    assert app.model.asked == []


def test_a_model_that_redirects_is_not_followed(stage: Make) -> None:
    other = stage(nothing)
    app = stage(lambda _body: 307)
    assert app.refused() == (502, "policy_step_failed")
    assert other.model.asked == []


def test_the_callers_key_is_not_the_models(stage: Make) -> None:
    app = stage(in_turn(text("7")), api_key="callers", inference_api_key="models")
    headers = {"Authorization": "Bearer callers"}
    answer = httpx.post(f"{app.url}/rollout", json=app.request(), headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert app.model.asked[0].headers["authorization"] == "Bearer models"
    assert "callers" not in answer.text
    assert "models" not in answer.text


@pytest.mark.parametrize(
    ("env", "seed"),
    [
        ({"seed": None, "config": {"split": "test", "index": 3}}, 3),
        ({"seed": None, "config": {"split": "Train", "index": 3}}, 2**31 + 3),
        ({"seed": 3, "config": {"split": "train", "index": 3}}, 2**31 + 3),  # as the hosted command sends it
        ({"seed": 3, "config": {"split": "held_out"}}, 3),
        ({"seed": None, "config": {"index": 3}}, 3),
        ({"seed": 2**31 + 3, "config": {"split": "train", "index": 3}}, 2**31 + 3),
    ],
)
def test_a_task_is_named_by_split_and_index_as_the_hosted_evaluation_does(env: Json, seed: int, stage: Make) -> None:
    app = stage(lambda _body: text("1"), Numbered)
    answer = app.post("/rollout", app.request(env=env, record={"return_trace": True})).json()
    assert answer["trajectories"][0]["steps"][0]["obs"]["text"] == f"task {seed}"
    assert answer["trace"]["metadata"]["seed"] == seed


@pytest.mark.parametrize(
    ("env", "code"),
    [
        ({"config": {"split": "second", "index": 0}}, "bad_split"),
        ({"config": {"split": ["train"]}}, "bad_split"),
        ({"seed": None, "config": {"index": -1}}, "bad_index"),
        ({"seed": None, "config": {"index": True}}, "bad_index"),
        ({"seed": 4, "config": {"split": "test", "index": 3}}, "bad_index"),
    ],
)
def test_a_split_or_index_that_names_no_task_is_refused(env: Json, code: str, stage: Make) -> None:
    assert stage(nothing).refused(env=env) == (422, code)


def test_an_environment_that_has_a_split_of_its_own_is_given_it(stage: Make) -> None:
    app = stage(in_turn(text("x")), Library, client_options=["split"])
    told = app.rollout(env={"seed": 5, "config": {"split": "poems", "index": 5}})
    assert told.trajectories[0].steps[0].obs["text"] == "poems 5"


def test_clients_set_only_the_arguments_that_the_operator_names(stage: Make) -> None:
    app = stage(lambda _body: text("3"), "GuessNumber", config={"high": 4}, client_options=["low"])
    assert (
        app.rollout(env={"config": {"high": 4, "low": 2}}).trajectories[0].steps[0].obs["text"] == "Guess 2-4. 4 tries."
    )
    assert app.refused(env={"config": {"high": 5}}) == (422, "env_config_not_allowed")
    assert app.refused(env={"config": {"tries": 5}}) == (422, "env_config_not_allowed")
    open_to_all = stage(lambda _body: text("3"), "GuessNumber", client_options=["*"])
    assert open_to_all.refused(env={"config": {"hihg": 4}}) == (422, "env_config_unknown")


def test_limits_and_keys_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="counts >= 1"):
        TaskAppLimits(max_sessions=0)
    with pytest.raises(ConfigError, match="printable text without spaces"):
        create_task_app("GuessNumber", api_key="two words")
    with pytest.raises(ConfigError, match="a name or an address"):
        create_task_app("GuessNumber", inference_hosts=["not a host"])
