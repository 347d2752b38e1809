"""From services.task_url, [gateway] and [[rollout.mixture]] to apps that play: asked first, then trained on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_task_app import FakeTaskApp

from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import app_players, rollouts
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.build.judge import build_rubrics
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.errors import ConfigError, UnknownNameError, UsageError
from gspo_gym.judge.rubric_files import load_rubrics
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.remote.guard import App
from gspo_gym.remote.serve.task_app_server import ServedEnv, create_task_app, served_app
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.rollout.limits import PoolLimits
from gspo_gym.rollout.pool import GroupRequest
from gspo_gym.run.records import read_metrics, read_summary
from gspo_gym.types import Task, TrajectoryGroup

Make = Callable[[dict[str, Any]], RunConfig]

GUESS = "gspo_gym/GuessNumber-v0"
SMALL = {
    "rollout.episodes_per_batch": 8,
    "rollout.max_turns": 3,
    "rollout.max_output_tokens": 6,
    "training.iterations_per_epoch": 2,
    "training.group_size": 4,
    "training.batch_size": 8,
    "evaluation": {"seeds": "0:3", "every_n_iters": 2},
}
WELL = {
    "/health": (200, {"healthy": True}),
    "/info": (200, {"service": {"task": {"id": "quiz"}}}),
    "/task_info": (200, {"task": {"id": "quiz"}}),
}


def quiz(**settings: Any) -> FakeTaskApp:
    return FakeTaskApp(answers=dict(WELL), **settings)


@contextmanager
def serving(app: App) -> Iterator[str]:
    with BackgroundServer(app) as server:
        yield server.url


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture(scope="module")
def policy() -> Policy:
    return build.build_policy(RunConfig.from_dict({
        "model": {"base": "tiny:qwen3-64", "label": "apps"},
        "rollout": {"env_name": "GuessNumber", "env_config": {"style": "terse"},
                    "max_turns": 1, "max_output_tokens": 1, "max_model_len": 64,
                    "episodes_per_batch": 8},
        "training": {"iterations_per_epoch": 1, "group_size": 4, "batch_size": 8, "learning_rate": 1e-3},
        "evaluation": {"seeds": "0:4"},
    }))  # fmt: skip


def start(config: RunConfig, policy: Policy) -> tuple[str, ...]:
    """Start a player and end it."""

    async def go() -> tuple[str, ...]:
        player = await rollouts.build_player(config, policy)
        try:
            return await player.start()
        finally:
            await player.close()

    return asyncio.run(go())


def collect(config: RunConfig, policy: Policy, *tasks: Task) -> tuple[TrajectoryGroup, ...]:
    """A group of two episodes of each task, as training plays them."""

    async def go() -> tuple[TrajectoryGroup, ...]:
        player = await rollouts.build_player(config, policy)
        try:
            await player.start()
            pool = rollouts.build_training_pool(config, player)
            groups = [GroupRequest(f"g{number}", task, 2) for number, task in enumerate(tasks)]
            played = await pool.collect(groups)
            pool.ledger.assert_balanced()
            return played
        finally:
            await player.close()

    return asyncio.run(go())


# --- what environments are called -------------------------------------------------------------------------------------


def test_an_environment_has_one_name_wherever_it_is_played(make: Make) -> None:
    assert environment_ids(make({})) == (GUESS,)
    assert environment_ids(make({"services.task_url": "http://a"})) == (GUESS,)
    assert environment_ids(make({"services.task_url": "http://a", "rollout.env_name": "bank"})) == ("bank",)


def test_environments_that_a_run_has_twice_are_numbered(make: Make) -> None:
    entries = [
        {"env_name": "GuessNumber", "env_config": {"style": "terse"}, "share": 0.1, "task_url": "http://a"},
        {"env_name": "bank", "share": 0.1, "task_url": "http://a"},
        {"env_name": "GuessNumber-v0", "share": 0.1, "env_config": {"high": 9}},
        {"env_name": "bank", "share": 0.1, "task_url": "http://b"},
    ]
    config = make({"rollout.mixture": entries})
    assert environment_ids(config) == (GUESS, f"{GUESS} (2)", "bank", f"{GUESS} (3)", "bank (2)")
    assert build.build_plan(config).mixture == dict.fromkeys(environment_ids(config)[1:], 0.1)


def test_an_environment_that_is_to_be_played_here_must_be_here(make: Make) -> None:
    with pytest.raises(UnknownNameError, match="there is no environment 'bank'"):
        environment_ids(make({"rollout.mixture": [{"env_name": "bank", "share": 0.5}]}))


# --- before anything is paid for --------------------------------------------------------------------------------------


def test_an_app_that_can_be_used_is_announced(make: Make, policy: Policy) -> None:
    with serving(quiz()) as url:
        assert start(make({"services.task_url": url}), policy) == (f"task app {url}: plays 'GuessNumber' as quiz",)


def test_an_apps_own_rubric_lies_over_the_configurations(make: Make, policy: Policy) -> None:
    """What the environment's own server says of its tasks: the bundled rubric, whose event part is not asked for."""
    mine = {"outcome": {"criteria": [{"id": "outcome.mine", "description": "It is mine.", "scale": "binary"}]}}
    judge = {
        "enabled": True,
        "reward_blend": {"env": 0.5, "outcome": 0.5},
        "options": {"outcome": True, "provider": "local", "model": "m", "base_url": "http://127.0.0.1:1/v1"}
        | {"rubric_overrides": mine},
    }

    async def go(config: RunConfig) -> list[str]:
        player = await rollouts.build_player(config, policy)
        try:
            await player.start()
            assert player.apps is not None
            rubrics = await build_rubrics(config, player.apps.rubric_of)(Task(GUESS, 3))
        finally:
            await player.close()
        assert rubrics.event is None
        assert rubrics.outcome is not None
        return [criterion.id for criterion in rubrics.outcome.criteria]

    bundled = load_rubrics("guess_number/bundle@v1").outcome
    assert bundled is not None
    with serving(served_app(ServedEnv("GuessNumber"))) as url:
        found = asyncio.run(go(make({"services.task_url": url, "judge": judge})))
    assert sorted(found) == sorted(["outcome.mine", *(criterion.id for criterion in bundled.criteria)])
    with serving(quiz()) as url:  # which says nothing of rubrics
        assert asyncio.run(go(make({"services.task_url": url, "judge": judge}))) == ["outcome.mine"]


@pytest.mark.parametrize("of_task", [None, {}, {"outcome": None}, "outcome"])
def test_the_rubrics_of_info_hold_where_task_info_has_none(of_task: Any, make: Make, policy: Policy) -> None:
    """Both parts stand in /info; what /task_info says of a part goes over it."""

    def rubric(name: str) -> dict[str, Any]:
        return {"version": "1", "criteria": [{"id": name, "description": f"It is {name}.", "weight": 1.0}]}

    app = quiz()
    app.answers["/info"] = (200, {"rubrics": {"outcome": rubric("of.all"), "events": "<circular type=dict>"}})
    own = {"outcome": rubric("of.task")} if of_task == "outcome" else of_task
    app.answers["/task_info"] = (200, {"task": {"id": "quiz"}, "rubric": own})

    async def go(url: str) -> Any:
        player = await rollouts.build_player(make({"services.task_url": url}), policy)
        try:
            await player.start()
            assert player.apps is not None
            return await player.apps.rubric_of(Task(GUESS, 3))
        finally:
            await player.close()

    with serving(app) as url:
        assert asyncio.run(go(url)) == {"outcome": rubric("of.task" if of_task == "outcome" else "of.all")}


def test_an_app_that_is_not_there_stops_a_run_before_it_has_a_folder(make: Make, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = make({"services.task_url": url, "run.folder": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=rf"services\.task_url: {url}/health: .*Is the app running there\?"):
        run_training(config)
    assert not (tmp_path / "runs").exists()


def test_an_app_of_a_mixture_is_asked_too_and_named(make: Make, policy: Policy) -> None:
    ill = quiz()
    ill.answers["/health"] = (200, {"healthy": False})
    with serving(quiz()) as url, serving(ill) as ill_url:
        entry = {"env_name": "bank", "share": 0.5, "task_url": ill_url}
        with pytest.raises(ConfigError, match=r"rollout\.mixture\.0\.task_url: .*says that it is not healthy"):
            start(make({"services.task_url": url, "rollout.mixture": [entry]}), policy)


def test_a_wrong_key_is_named_by_its_variable_and_never_shown(
    make: Make, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENVIRONMENT_API_KEY", raising=False)
    with serving(quiz(keys=("the-right-key",))) as url:
        config = make({"services.task_url": url})
        with pytest.raises(ConfigError, match="wants a key and none was sent; set ENVIRONMENT_API_KEY"):
            start(config, policy)
        monkeypatch.setenv("ENVIRONMENT_API_KEY", "the-wrong-key")
        with pytest.raises(ConfigError, match="does not take the key that was sent; set ENVIRONMENT_API_KEY") as caught:
            start(config, policy)
        assert "the-wrong" not in str(caught.value)
        assert "running" not in str(caught.value)
        monkeypatch.setenv("ENVIRONMENT_API_KEY", "the-right-key")
        start(config, policy)
        monkeypatch.delenv("ENVIRONMENT_API_KEY")
        monkeypatch.setenv("DEV_ENVIRONMENT_API_KEY", "the-right-key")
        start(config, policy)


def test_each_app_of_a_mixture_is_sent_its_own_key(make: Make, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVIRONMENT_API_KEY", "key-of-the-first")
    apps = [quiz(keys=("key-of-the-first",)), quiz(keys=("key-of-the-second",))]
    with serving(apps[0]) as first, serving(apps[1]) as second:
        entry = {"env_name": "bank", "share": 0.5, "task_url": second, "api_key_env": "BANK_KEY"}
        config = make({"services.task_url": first, "rollout.mixture": [entry]})
        with pytest.raises(ConfigError, match=r"rollout\.mixture\.0\.api_key_env: .* in the variable BANK_KEY"):
            start(config, policy)
        monkeypatch.setenv("BANK_KEY", "key-of-the-second")
        assert len(start(config, policy)) == 2
    assert {asked.headers["x-api-key"] for asked in apps[1].asked} == {"key-of-the-second"}
    assert {asked.headers["x-api-key"] for asked in apps[0].asked} == {"key-of-the-first"}


def test_an_app_elsewhere_needs_a_gateway_that_it_can_reach(make: Make, policy: Policy) -> None:
    config = make({"services.task_url": "http://192.0.2.1:8114"})  # an address of examples: nobody is asked
    with pytest.raises(ConfigError, match=r"gateway\.address: '127\.0\.0\.1' is reached from this machine only"):
        start(config, policy)


def test_a_player_that_was_not_started_says_so(make: Make, policy: Policy) -> None:
    config = make({"services.task_url": "http://127.0.0.1:1"})

    async def go() -> None:
        player = await rollouts.build_player(config, policy)
        try:
            await rollouts.build_training_pool(config, player).collect([GroupRequest("g", Task(GUESS, 0), 1)])
        finally:
            await player.close()

    with pytest.raises(UsageError, match=r"services\.task_url: start the player"):
        asyncio.run(go())


# --- what an app is asked, and where it may call ----------------------------------------------------------------------


def test_an_app_is_asked_for_what_the_configuration_says(make: Make, policy: Policy) -> None:
    app = quiz()
    own = {"max_llm_calls": 10, "use_vision": False, "provider": "groq", "retry": {"codes": [429, 500]}}
    with serving(app) as url:
        changes = {
            **SMALL,
            "services.task_url": url,
            "rollout.env_config": {"high": 9, "env_params": {"tiers": ["easy", "hard"], "max_steps": 5}},
            "rollout.temperature": 0.7,
            "rollout.policy_name": "learner",
            "rollout.policy_config": {"system_prompt": "Be brief.", "top_p": 1.0, "model": "not this one", **own},
        }
        collect(make(changes), policy, Task(GUESS, 41))
    request = next(asked.body for asked in app.asked if asked.path == "/rollout")
    assert request["env"]["env_name"] == "GuessNumber"
    assert request["env"]["seed"] == 41
    assert {"high": 9, "env_params": {"tiers": ["easy", "hard"], "max_steps": 5}}.items() <= (
        request["env"]["config"].items()
    )
    assert request["ops"] == ["agent", "env"] * 3
    assert (request["mode"], request["policy"]["policy_name"]) == ("rl", "learner")
    config = request["policy"]["config"]
    assert (config["temperature"], config["max_tokens"], config["system_prompt"]) == (0.7, 6, "Be brief.")
    assert {name: config[name] for name in own} == own, "an app's own keys arrive whole"
    assert config["model"] == "policy", "where and whom to ask is the trainer's to say"


def test_an_evaluation_is_asked_for_in_its_own_mode_and_temperature(make: Make, policy: Policy) -> None:
    app = quiz()
    with serving(app) as url:
        config = make(
            {
                **SMALL,
                "services.task_url": url,
                "evaluation": {"seeds": "0:3", "temperature": 0.3},
                "training.max_turns": 1,
            }
        )

        async def go() -> float:
            player = await rollouts.build_player(config, policy)
            try:
                await player.start()
                return (await rollouts.build_evaluate(config, player)("label")).mean_turns
            finally:
                await player.close()

        assert asyncio.run(go()) == 2  # which is what this app always plays
    requests = [asked.body for asked in app.asked if asked.path == "/rollout"]
    assert sorted(request["env"]["seed"] for request in requests) == [0, 1, 2]
    assert {request["mode"] for request in requests} == {"eval"}
    assert {request["policy"]["config"]["temperature"] for request in requests} == {0.3}
    assert {len(request["ops"]) for request in requests} == {6}  # rollout.max_turns, not training's


def test_the_gateway_listens_and_is_told_of_where_the_section_says(make: Make, policy: Policy) -> None:
    app, port = quiz(), free_port()
    told = []
    with serving(app) as url:
        for section in (
            {"address": f"127.0.0.1:{port}"},
            {"address": f"127.0.0.2:{port}"},
            {"address": f"127.0.0.1:{port}", "public_url": f"http://localhost:{port}"},
        ):
            (group,) = collect(make({**SMALL, "services.task_url": url, "gateway": section}), policy, Task(GUESS, 0))
            assert len(group.trajectories) == 2
            told.append(app.asked[-1].body["policy"]["config"]["inference_url"].split("/t/")[0])
    assert told == [f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port}", f"http://localhost:{port}"]


def test_a_rollout_that_calls_too_often_is_refused_and_is_no_episode(
    make: Make, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_players, "_MAX_CALLS", 2)
    with serving(quiz(num_turns=2)) as few, serving(quiz(num_turns=3)) as many:
        entry = {"env_name": "long", "share": 0.5, "task_url": many}
        services = {"services.task_url": few, "rollout.mixture": [entry]}
        short, long = collect(make({**SMALL, **services}), policy, Task(GUESS, 0), Task("long", 0))
    assert len(short.trajectories) == 2
    assert not long.trajectories
    assert all("429" in dropped.reason for dropped in long.dropped), long.dropped


@pytest.mark.parametrize("how", ["--task-url", "TASK_APP_URL"])
def test_the_commands_play_at_the_app_that_they_are_told_of(
    how: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(make({**SMALL, "run.folder": str(tmp_path), "rollout.env_name": "quiz"}).to_toml(), "utf-8")
    app = quiz()
    with serving(app) as url:
        if how == "TASK_APP_URL":
            monkeypatch.setenv(how, url)
        option = [how, url] if how == "--task-url" else []
        assert main(["evaluate", str(path), "--json", "-", *option]) == 0
        (result,) = json.loads(capsys.readouterr().out)["evaluations"].values()
        assert (result["env_id"], result["num_episodes"], app.num_rollouts) == ("quiz", 3, 3)
        assert main(["train", str(path), *option]) == 0
        assert app.num_rollouts == 3 + 1 + 3 + 2 * 8 + 3  # a probe, an evaluation, two steps, an evaluation
    assert load_config(tmp_path / "quickstart" / "config.toml").sources[0].task_url == url


# --- several environments in one run ----------------------------------------------------------------------------------


def test_a_mixed_run_trains_and_evaluates_on_every_environment(make: Make, tmp_path: Path) -> None:
    """One environment here and two apps, in shares 1/2, 1/4, 1/4: a b c a in each step of four groups, by the
    deficits of `test_mixture`.
    """
    own = create_task_app("GuessNumber", config={"high": 3, "style": "terse"})
    with serving(quiz()) as quiz_url, serving(own) as own_url:
        changes = {
            **SMALL,
            "run.folder": str(tmp_path),
            "rollout.episodes_per_batch": 16,
            "rollout.env_config": {"high": 9, "max_guesses": 3, "style": "terse"},
            "training.iterations_per_epoch": 3,
            "evaluation": {"seeds": "0:3", "every_n_iters": 3},
            "rollout.mixture": [
                {"env_name": "quiz", "share": 0.25, "task_url": quiz_url},
                {"env_name": "GuessNumber", "share": 0.25, "task_url": own_url},
            ],
        }
        config = make(changes)
        summary = run_training(config)
    names = (GUESS, "quiz", f"{GUESS} (2)")
    num_calls = []
    for step in (1, 2, 3):
        episodes = read_episodes(config.run_folder / "episodes" / f"step_{step:06d}.jsonl.gz")
        assert Counter(e.task.env_id for e in episodes) == dict(zip(names, (8, 4, 4), strict=True))
        num_calls.append(sum(len(e.turns) for e in episodes if e.task.env_id != GUESS))
        for episode in episodes:
            assert ("question 0 of" in episode.messages[1].content) == (episode.task.env_id == "quiz")
            hint = {GUESS: "Guess 1-9.", names[2]: "Guess 1-3."}.get(episode.task.env_id, "")
            assert any(hint in message.content for message in episode.messages)
    for line, calls in zip(read_metrics(config.run_folder), num_calls, strict=True):
        counts = [line[f"source/{name}/num_episodes"] for name in names]
        assert counts == [8, 4, 4]
        means = [line[f"source/{name}/reward_mean"] for name in names]
        assert np.dot(means, counts) / 16 == pytest.approx(line["rollout/reward_mean"])
        assert f"source/{GUESS}/success_rate" in line
        assert "source/quiz/success_rate" not in line  # that app never says
        # Every turn of an app's episode is a call, and all of its tokens are trained on.
        assert (line["gateway/app_requests"], line["gateway/calls"], line["gateway/untrained_calls"]) == (8, calls, 0)
        assert line["gateway/trained_fraction"] == 1
    parts = summary["final_eval"]["parts"]
    assert [(name, part["num_episodes"], part["seeds"]) for name, part in parts.items()] == [
        (name, 3, [0, 1, 2]) for name in names
    ]
    assert summary["final_eval"]["num_episodes"] == 9
    mean = sum(part["mean_return"] for part in parts.values()) / 3
    assert summary["final_eval"]["mean_return"] == pytest.approx(mean)
    assert read_summary(config.run_folder)["status"] == "completed"


def test_a_run_goes_on_although_its_app_has_moved(make: Make, tmp_path: Path) -> None:
    changes = {**SMALL, "run.folder": str(tmp_path), "training.checkpoint_every_n_iters": 1}
    with serving(quiz()) as url:
        run_training(make({**changes, "services.task_url": url}))
    app = quiz()
    with serving(app) as url:
        longer = {
            **changes,
            "services.task_url": url,
            "training.iterations_per_epoch": 4,
            "gateway": {"address": "127.0.0.1:0"},
        }
        assert run_training(make(longer), resume=True)["steps"] == 4
    assert app.num_rollouts == 2 * 8 + 3  # the episodes of two steps, and of the last evaluation


def test_app_episodes_are_played_ahead_and_carry_their_versions(make: Make, tmp_path: Path) -> None:
    changes = {
        **SMALL,
        "run.folder": str(tmp_path),
        "training.iterations_per_epoch": 4,
        "training.max_staleness": 1,
        "correction.old_logprobs": "rollout",
        "evaluation": {"seeds": "0:3", "every_n_iters": 4},
    }
    with serving(create_task_app("GuessNumber", config={"style": "terse"})) as url:
        config = make({**changes, "services.task_url": url, "rollout.env_config": {}})
        run_training(config)
    lines = read_metrics(config.run_folder)
    assert [line["rollout/staleness_max"] <= 1 for line in lines] == [True] * 4
    oldest = []
    for step in range(1, 5):
        episodes = read_episodes(config.run_folder / "episodes" / f"step_{step:06d}.jsonl.gz")
        sampled = [segment.weight_version[segment.action_mask] for e in episodes for segment in e.segments]
        oldest.append(int(min(versions.min() for versions in sampled)))
    assert oldest[0] == 0
    assert all(step - 2 <= version <= step - 1 for step, version in enumerate(oldest, start=1))
    assert oldest[-1] > 0


RECIPE = load_config(Path(__file__).parents[4] / "configs/recipes/hosted_crafter.toml")
STEP_REWARDS = {
    f"training.{name}": value
    for name, value in RECIPE.training.model_dump(exclude_none=True).items()
    if name.startswith(("step_rewards", "event_rewards")) and value != {}
}


def stepwise(told: dict[str, Any]) -> dict[str, Any]:
    """The answer of a hosted app that was asked for step rewards: an achievement in its first decision, none later."""
    for number, step in enumerate(told["trajectories"][0]["steps"]):
        names = ["collect_wood"] if number == 0 else []
        block = {"turn": number + 1, "ach_delta": len(names), "unique_delta": len(names), "all": names, "unique": names}
        step["info"] = {"meta": {"decision_rewards": block}}
    return told


def test_an_app_is_told_of_step_rewards_as_the_hosted_trainer_tells_it(make: Make, policy: Policy) -> None:
    """Under the recipe of the hosted example, in the shape of its app's `env.config.step_rewards`."""
    app = quiz()
    expected = {"enabled": True, "mode": "decision_stepwise", "strategy": "consistent", "indicator_lambda": 1.0}
    with serving(app) as url:
        changes = {**SMALL, **STEP_REWARDS, "services.task_url": url, "rollout.env_config": {"level": 2}}
        collect(make(changes), policy, Task(GUESS, 41))
        own = {"step_rewards": {"enabled": False}}
        collect(make({**changes, "rollout.env_config": own}), policy, Task(GUESS, 41))
        collect(make({**SMALL, "services.task_url": url, "rollout.env_config": {}}), policy, Task(GUESS, 41))
    asked = [asked.body["env"]["config"] for asked in app.asked if asked.path == "/rollout"]
    assert asked == [{"step_rewards": {**expected, "step_beta": 0.0}, "level": 2}] * 2 + [own] * 2 + [{}] * 2


@pytest.mark.parametrize("reports", [True, False])
def test_step_rewards_of_an_app_are_what_it_reports_or_else_its_return_and_never_a_silent_0(
    reports: bool, make: Make, tmp_path: Path
) -> None:
    """Of the recipe: an achievement in one decision earns lambda = 1; without reports, the episode earns its return."""
    changes = {**SMALL, **STEP_REWARDS, "run.folder": str(tmp_path), "training.iterations_per_epoch": 1}
    with serving(quiz(spoil=stepwise if reports else lambda told: told)) as url:
        config = make({**changes, "services.task_url": url})
        run_training(config)
    (line,) = read_metrics(config.run_folder)
    assert line["rollout/reward_mean"] > 0
    assert line["batch/mean_return"] == pytest.approx(1.0 if reports else line["rollout/reward_mean"])
    assert line["gateway/app_warnings"] == (0 if reports else 8)
    episodes = read_episodes(config.run_folder / "episodes" / "step_000001.jsonl.gz")
    assert [episode.reports_events for episode in episodes] == [reports] * 8


def unscored(told: dict[str, Any]) -> dict[str, Any]:
    """An app that scores nothing."""
    told["metrics"] = {}
    for step in told["trajectories"][0]["steps"]:
        step["reward"] = None
    return told


def test_an_app_whose_episodes_cannot_be_trained_on_is_refused_before_there_is_a_folder(
    make: Make, tmp_path: Path
) -> None:
    changes = {**SMALL, "run.folder": str(tmp_path), "training.iterations_per_epoch": 1}
    app = quiz(spoil=unscored)
    with serving(app) as url, pytest.raises(ConfigError, match=r"services.task_url: no return.*in 2 probe rollouts"):
        run_training(make({**changes, "services.task_url": url}))
    assert app.num_rollouts == 2
    assert not any(tmp_path.iterdir())


def test_a_probe_says_what_may_not_be_meant_and_that_a_failure_is_tried_again(make: Make, policy: Policy) -> None:
    def probed(app: FakeTaskApp, **changes: Any) -> tuple[str, ...]:
        async def go() -> tuple[str, ...]:
            with serving(app) as url:
                player = await rollouts.build_player(make({**SMALL, **changes, "services.task_url": url}), policy)
                try:
                    await player.start()
                    return await player.probe_apps()
                finally:
                    await player.close()

        return asyncio.run(go())

    assert probed(quiz()) == ()
    (line,) = probed(quiz(), **STEP_REWARDS)
    assert "probe rollout: no step rewards: the app was asked for them and reports none" in line
    (line,) = probed(quiz(fault=lambda number: "500_late"))
    assert "probe rollout failed, which training would try again" in line
    assert "policy_step_failed" in line


class _Patient(PoolLimits):
    """So many tries that each sample is kept in the end."""

    max_attempts: int = 9


def test_a_run_says_that_what_is_kept_is_not_what_was_played(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other attempt loses its last call and is worth 1 less: 8 of 16 attempts are kept, the better half."""
    monkeypatch.setattr(rollouts, "PoolLimits", _Patient)
    app = quiz(fault=lambda number: "made_up_unseen" if number > 3 and number % 2 == 0 else None)
    with serving(app) as url:
        changes = {**SMALL, "run.folder": str(tmp_path), "services.task_url": url}
        changes["evaluation"] = {"seeds": "0:3", "every_n_iters": 9}
        for step in (1, 2):  # the alarm counts on after a resume
            config = make({**changes, "training.iterations_per_epoch": step})
            run_training(config, resume=step == 2)
            state = CheckpointStore(config.run_folder / "checkpoints").load_latest().trainer_state
            assert state["selection"] == {"num_tests": step, "recent": []}  # an alarm uses the returns up
    line = read_metrics(config.run_folder)[0]
    assert line["gateway/kept_return_mean"] == line["rollout/reward_mean"]
    assert line["gateway/kept_return_mean"] > line["gateway/played_return_mean"]
    events = [json.loads(text) for text in (config.run_folder / "events.jsonl").read_text().splitlines()]
    data, _ = [event["data"] for event in events if event["kind"] == "return_selection"]
    assert (data["num_kept"], data["num_steps"]) == (8, 1)
    assert data["mean_kept"] == line["gateway/kept_return_mean"]


# --- what needs an environment here -----------------------------------------------------------------------------------


def test_demonstrations_are_played_here_and_not_by_the_app(make: Make, policy: Policy) -> None:
    app = quiz()
    with serving(app) as url:
        warmup = {"num_episodes": 4, "learning_rate": 1e-3}
        config = make({**SMALL, "services.task_url": url, "warmup": warmup})

        async def go() -> list[str]:
            player = await rollouts.build_player(config, policy)
            try:
                await player.start()
                built = await rollouts.build_warmup(config, player)
                assert built is not None
                pool, plan = built
                groups = await pool.collect([GroupRequest("w", Task(plan.env_id, 0), 2)])
                return [t.messages[0].content for t in groups[0].trajectories]
            finally:
                await player.close()

        openings = asyncio.run(go())
    assert all(opening.startswith("Guess 1-") for opening in openings)
    assert app.num_rollouts == 0


def test_demonstrations_of_an_environment_that_only_the_app_has_are_refused(make: Make, policy: Policy) -> None:
    warmup = {"num_episodes": 4, "learning_rate": 1e-3}
    config = make({"services.task_url": "http://127.0.0.1:1", "rollout.env_name": "bank", "warmup": warmup})

    async def go() -> None:
        player = await rollouts.build_player(config, policy)
        try:
            await rollouts.build_warmup(config, player)
        finally:
            await player.close()

    with pytest.raises(ConfigError, match=r"warmup: demonstrations are played in this process.*Remove \[warmup\], or"):
        asyncio.run(go())


def test_a_hand_written_policy_does_not_play_in_an_app(make: Make, policy: Policy) -> None:
    config = make({"services.task_url": "http://127.0.0.1:1"})
    renderers = rollouts.build_renderers(config, policy.tokenizer)
    with pytest.raises(ConfigError, match=r"services\.task_url: a task app asks the model that is trained"):
        asyncio.run(rollouts.build_scripted_evaluate(config, renderers, "reference"))
