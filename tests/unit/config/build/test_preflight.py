"""What stands in the way of a run is found before anything is loaded, the same by `config check` as by training."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from fake_task_app import FakeTaskApp

from gspo_gym.cli.evaluate import run_evaluation
from gspo_gym.cli.main import main
from gspo_gym.cli.train import run_training
from gspo_gym.config.build.preflight import find_obstacles, rehearse
from gspo_gym.config.run_config import RunConfig
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import register
from gspo_gym.errors import EnvError, GymError
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.types import Outcome

Make = Callable[[dict[str, Any]], RunConfig]

JUDGED = {
    "judge": {
        "enabled": True,
        "reward_blend": {"env": 0.5, "outcome": 0.5},
        "options": {"outcome": True, "provider": "groq", "model": "m", "rubric_id": "support_desk/bundle@v1"},
    }
}

# What is wrong, and a part of what is said about it.
STOPPED: dict[str, tuple[dict[str, Any], str]] = {
    "an environment that nobody registered": ({"rollout.env_name": "GuesNumber"}, "did you mean"),
    "an argument that the environment does not take": ({"rollout.env_config": {"hig": 4}}, "did you mean 'high'"),
    "an argument of the wrong type": (
        {"rollout.env_config": {"high": "ten"}}, "rollout.env_config: GuessNumber cannot be made with",
    ),
    "an argument of the wrong type in a worker process": (
        {"rollout.env_config": {"high": "ten"}, "rollout.isolation": "process"}, "making the environment raised",
    ),
    "an environment of a mixture": (
        {"rollout.mixture": [{"env_name": "Nowhere", "share": 0.5}], "training.group_size": 8}, "Nowhere",
    ),
    "a model's folder that is not there": ({"model.base": "./no/such/model"}, "not a folder here"),
    "a tiny model that is not there": ({"model.base": "tiny:qwen9-64"}, "there is no tiny model of that name"),
    "a run to go on from that is not there": (
        {"model.base": ..., "model.source": "ft:earlier:step_000100"}, "model.source: 'ft:earlier:step_000100'",
    ),
    "a key of the judging model": (JUDGED, "expected a key in the variable GROQ_API_KEY"),
    "a rubric that nobody has": (
        {"judge": {**JUDGED["judge"], "options": {**JUDGED["judge"]["options"], "rubric_id": "no/such@v1"}}}, "no/such",
    ),
    "a key of an app of a mixture": (
        {"rollout.mixture": [{"env_name": "quiz", "share": 0.5, "task_url": "http://127.0.0.1:9",
                              "api_key_env": "QUIZ_KEY"}]},
        "rollout.mixture.0.api_key_env: expected a key in the variable QUIZ_KEY",
    ),
    "a key of W&B": ({"tracking.report_to": ["wandb"]}, "W&B has no key: set WANDB_API_KEY"),
    "an engine that is not installed": ({"rollout.engine": "vllm"}, "vLLM is not installed"),
    "a GPU where there is none": ({"compute": {"gpu_count": 1}}, "compute.gpu_count: expected a CUDA device"),
    "a demonstrator that the environment has not": (
        {"warmup": {"num_episodes": 8, "learning_rate": 1e-3, "policy": "referens"}},
        "has no scripted policy 'referens'",
    ),
    "a machine of another kind": ({"compute": {"gpu_count": 0, "nodes": 2}}, "training takes one machine"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No keys, no vLLM, no GPU, and runs in a folder of the test."""
    for name in ("GROQ_API_KEY", "QUIZ_KEY", "WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "vllm" else find_spec(name))


def obstacles(config: RunConfig) -> list[str]:
    return [str(obstacle) for obstacle in asyncio.run(find_obstacles(config))]


@pytest.mark.parametrize("case", STOPPED)
def test_what_would_stop_a_run_is_found_and_stops_the_run_in_the_same_words(case: str, make: Make) -> None:
    changes, said = STOPPED[case]
    config = make(changes)
    (found,) = obstacles(config)
    assert said in found
    with pytest.raises(GymError) as caught:
        run_training(config)
    assert str(caught.value) == found
    assert not config.run_folder.exists(), "a run that cannot start leaves nothing behind"


def test_nothing_stands_in_the_way_of_a_run_that_can_start(make: Make) -> None:
    assert obstacles(make({})) == []


def test_all_obstacles_are_told_at_once(make: Make) -> None:
    config = make({"model.base": "tiny:qwen9-64", "rollout.env_config": {"hig": 4}, "rollout.engine": "vllm"})
    parts = ("environment 'gspo_gym/GuessNumber-v0' takes", "model 'tiny:qwen9-64': there", 'rollout.engine = "vllm": ')
    assert [line[: len(part)] for line, part in zip(sorted(obstacles(config)), parts, strict=True)] == list(parts)
    with pytest.raises(GymError, match=r"^3 things stand in the way:"):
        run_training(config)


def test_a_folder_without_a_model_is_told_from_one_that_has_it(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "notes.txt").write_text("nothing")
    (found,) = obstacles(make({"model.base": str(folder)}))
    assert "expected config.json (transformers), adapter_config.json (PEFT) or a GGUF file, found notes.txt" in found
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    (found,) = obstacles(make({"model.base": str(folder)}))
    assert found == f"rollout.max_model_len: {folder} reads at most 256 tokens, got 512"
    assert obstacles(make({"model.base": str(folder), "rollout.max_model_len": 256})) == []


def test_an_adapters_folder_needs_the_model_below_it(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./gone/model"}))
    config = make({"model.base": str(folder), "model.trainer_mode": "lora"})
    (found,) = obstacles(config)
    assert found.startswith("model './gone/model': not a folder here")


@pytest.mark.parametrize("rate", [1000.0, 1.5, 0.0])
def test_a_learning_rate_that_leaves_no_weight_as_it_was_is_an_error(
    rate: float, problems: Callable[..., list[str]]
) -> None:
    assert problems({"training.learning_rate": rate}) == [
        f"training.learning_rate: expected a number > 0 and <= 1, got {rate}"
    ]


@pytest.fixture
def file(tmp_path: Path, changed: Callable[..., Any]) -> Callable[..., str]:
    def write(changes: dict[str, Any]) -> str:
        path = tmp_path / "run.toml"
        path.write_text(tomli_w.dumps(changed(changes)), encoding="utf-8")
        return str(path)

    return write


def test_config_check_fails_where_the_run_would_and_says_all_of_it(
    file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file({"rollout.env_config": {"hig": 4}, "model.base": "tiny:qwen9-64"})
    assert main(["config", "check", path]) == 1
    first, _plan, *lines = capsys.readouterr().out.splitlines()
    assert first == f"VALID, BUT IT CANNOT RUN: {path}"
    assert [line.split(":")[0] for line in lines] == ["cannot run"] * 2
    assert main(["config", "check", "--elsewhere", path]) == 0, "a file for a machine that has them"


def test_a_deep_check_builds_everything_and_plays_an_episode(
    file: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = file({"loss.kl_coef": 0.1, "warmup": {"num_episodes": 8, "learning_rate": 1e-3}})
    before = {child.name for child in tmp_path.iterdir()}
    assert main(["config", "check", "--deep", path]) == 0
    played, estimate = capsys.readouterr().out.splitlines()[-2:]
    assert estimate.startswith("estimate: a step: about ")
    assert played.startswith("played: gspo_gym/GuessNumber-v0, a scripted episode of ")
    assert played.endswith(" turns, terminated, return 1"), "its reference finds every number"
    assert {child.name for child in tmp_path.iterdir()} == before, "no run's folder is made"


def test_a_deep_check_finds_an_environment_that_fails_when_it_is_played(make: Make) -> None:
    class Broken(TextEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return "Say hello.", {}

        def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
            raise KeyError("the second turn")

    register("test_preflight/Broken-v0", Broken)
    changes = {"rollout.env_name": "test_preflight/Broken-v0", "rollout.env_config": {}, "rollout.isolation": "thread"}
    config = make(changes)
    assert obstacles(config) == []
    with pytest.raises(GymError, match=r"a scripted episode of test_preflight/Broken-v0 ended as env_error.*KeyError"):
        asyncio.run(rehearse(config))


@pytest.mark.parametrize("isolation", ["thread", "auto"])
def test_an_environment_that_cannot_be_closed_before_it_is_played_is_named(isolation: str, make: Make) -> None:
    class Unclosable(TextEnv):
        isolation = "thread"
        connection: Any = None

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return "Say hello.", {}

        def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {}

        def close(self) -> None:
            self.connection.close()

    name = f"test_preflight/Unclosable{isolation}-v0"
    register(name, Unclosable)
    config = make({"rollout.env_name": name, "rollout.env_config": {}, "rollout.isolation": isolation})
    said = f"{name}: close() raised AttributeError: 'NoneType' object has no attribute 'close' ("
    (found,) = obstacles(config)
    assert found.startswith(said)
    with pytest.raises(EnvError, match=re.escape(said)):
        run_training(config)


def test_a_deep_check_asks_the_apps_whether_they_can_be_used(make: Make) -> None:
    answers = {
        "/health": (200, {"healthy": True}),
        "/info": (200, {"service": {"task": {"id": "quiz"}}}),
        "/task_info": (200, {"task": {"id": "quiz"}}),
    }
    app = FakeTaskApp(answers=answers)
    mixture = {"env_name": "quiz", "share": 0.5, "env_config": {}}
    with BackgroundServer(app) as server:
        seen = asyncio.run(rehearse(make({"rollout.mixture": [{**mixture, "task_url": server.url}]})))
    assert seen.notes[0] == f"task app {server.url}: plays 'quiz' as quiz"
    assert "/rollout" in [asked.path for asked in app.asked], "the probe that training begins with"
    assert [played.outcome for played in seen.episodes] == [Outcome.TERMINATED]
    with pytest.raises(GymError, match="Is the app running there"):
        asyncio.run(rehearse(make({"rollout.mixture": [{**mixture, "task_url": server.url}]})))


@pytest.mark.parametrize(
    ("player", "changes", "said"),
    [
        ("./no/such/model", {}, "not a folder here"),
        ("tiny:qwen9-64", {}, "there is no tiny model of that name"),
        ("tiny:qwen3-64", {"rollout.engine": "vllm"}, "vLLM is not installed"),
        ("tiny:qwen3-64", {"compute": {"gpu_count": 1}}, "compute.gpu_count: expected a CUDA device"),
        ("scripted:referens", {}, "has no scripted policy 'referens'"),
        ("scripted:reference", {"model.base": "tiny:qwen9-64"}, "there is no tiny model of that name"),
        ("openai:some-model", {}, "expected an API key in the variable OPENAI_API_KEY"),
        ("openai:some-model@http://127.0.0.1:9/v1", {"rollout.env_config": {"hig": 4}}, "did you mean 'high'"),
        (
            "openai:some-model@http://127.0.0.1:9/v1",
            {"rollout.min_output_tokens": 2},
            "leave min_tokens at the default",
        ),
        ("scripted:reference", {"judge": JUDGED["judge"]}, "expected a key in the variable GROQ_API_KEY"),
    ],
)
def test_what_would_stop_an_evaluation_is_found_before_anything_is_loaded_or_played(
    player: str, changes: dict[str, Any], said: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for loads in ("gspo_gym.policy.load.load_policy", "gspo_gym.policy.load.load_tokenizer"):
        monkeypatch.setattr(loads, lambda *_, **__: pytest.fail("it is loaded"))
    with pytest.raises(GymError, match=re.escape(said)):
        run_evaluation(make({"evaluation": {"seeds": "0:2"}, **changes}), player)


def test_the_second_model_of_an_evaluation_is_looked_at_before_the_first_one_plays(
    file: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo_gym.policy.load.load_tokenizer", lambda *_: pytest.fail("the first one plays"))
    path = file({"evaluation": {"seeds": "0:2"}})
    assert main(["evaluate", path, "--model", "scripted:reference", "--against", "./no/such/model"]) == 2
    assert "model './no/such/model': not a folder here" in capsys.readouterr().err


def test_a_run_says_first_what_has_no_effect(
    file: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        "rollout.episodes_per_batch": 8, "training.iterations_per_epoch": 1, "training.batch_size": 8,
        "evaluation": {"seeds": "0:2"}, "run.folder": str(tmp_path / "runs"), "training.max_turns": 9,
    }  # fmt: skip
    assert main(["train", file(small)]) == 0
    assert "training.max_turns: 9 is more than rollout.max_turns = 8" in " ".join(capsys.readouterr().out.split())


def test_a_folder_that_holds_a_run_is_said_before_the_run_is_refused_for_it(
    file: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file({})
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart/config.toml").write_text("")
    assert main(["config", "check", path]) == 0, "it can be moved away"
    said = capsys.readouterr().out.splitlines()[-1].removeprefix("note: ")
    assert said.startswith(
        "runs/quickstart already holds a run: it has no checkpoint to go on from, move it away first"
    )
    assert main(["train", path]) == 2
    assert capsys.readouterr().err == f"ConfigError: {said}\n"


class Dice(TextEnv):
    """Says what no seed decides."""

    num_rolls = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "roll", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Dice.num_rolls += 1
        return "", float(Dice.num_rolls % 7), True, False, {}


def test_forks_are_refused_where_the_seed_does_not_decide_what_an_environment_says(make: Make) -> None:
    register("test_preflight/Dice-v0", Dice)
    advantages = {"level": "trajectory", "baseline": "leave_one_out", "scale": "none"}
    changes = {"rollout.forks_per_episode": 1, "advantages": advantages}
    dice = {"rollout.env_name": "test_preflight/Dice-v0", "rollout.env_config": {}, "rollout.isolation": "thread"}
    (found,) = obstacles(make({**changes, **dice}))
    assert found.startswith("test_preflight/Dice-v0: a replay must be answered as the episode was")
    assert '"determinism"' in found
    assert obstacles(make(changes)) == obstacles(make(dice)) == []
