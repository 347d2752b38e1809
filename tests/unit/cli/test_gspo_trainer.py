"""`GSPOTrainer`: what it makes of its arguments, and a run that its callbacks see and stop."""

from __future__ import annotations

import asyncio
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import agent
import gymnasium
import pytest
from transformers import AutoModelForCausalLM

import gspo_gym
from gspo_gym import GSPOTrainer, Sink, TextEnv
from gspo_gym.errors import CheckpointError, ConfigError, UnknownNameError, UsageError
from gspo_gym.run.callbacks import StepReport

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(20)]
SMALL = {
    "training": {"iterations_per_epoch": 3, "batch_size": 8},
    "rollout.episodes_per_batch": 16,
    "warmup.num_episodes": 16,
    "warmup.num_epochs": 1,
    "evaluation.seeds": "0:4",
}


def right(completion: str, answer: str) -> bool:
    return answer in completion


def brief(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """As TRL calls it: lists in, a list out."""
    return [
        0.5 / len(completion) + 0.25 * prompt.endswith("?")
        for completion, prompt in zip(completions, prompts, strict=True)
    ]


class Doubling(TextEnv):
    """One number to double."""

    reward_range = (0.0, 1.0)
    policies = {"random": lambda env, rng: lambda messages: "9", "reference": lambda env, rng: lambda messages: "8"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "Double 4.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == "8"), True, False, {}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder in which runs/ is made; environments that a test registers go with it."""
    monkeypatch.chdir(tmp_path)
    yield
    for env_id in [name for name in gymnasium.registry if name.startswith(("Doubled-v", "DatasetEnv-v"))]:
        del gymnasium.registry[env_id]


def test_rewards_of_several_functions_are_added_each_under_its_name() -> None:
    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=[right, brief], eval_dataset=ROWS[:1])
    env = gspo_gym.make(trainer.config.rollout.env_name)
    assert env.reset(seed=0)[0][-1].content == "0+1?"  # the held-out row
    reward = env.step("10")[1]
    assert dict(reward.terms) == {"right": 1.0, "brief": 0.5 / 2 + 0.25}


@pytest.mark.parametrize(
    ("functions", "terms"),
    [
        ([right, lambda completions, **_: [None]], {"right": 1.0}),
        ([lambda completion: None, lambda answer: None], None),
    ],
)
def test_a_function_that_answers_none_has_no_part_in_a_reward(functions: Any, terms: dict[str, float] | None) -> None:
    """As in TRL; where none of them says anything, the episode is unscored and not worth 0."""
    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=functions, eval_dataset=ROWS[:1])
    env = gspo_gym.make(trainer.config.rollout.env_name)
    env.reset(seed=0)
    reward = env.step("10")[1]
    assert (reward if terms is None else dict(reward.terms)) == terms


def test_several_reward_functions_may_be_async() -> None:
    """Each in its own form: with a completion, and with lists as TRL calls it."""

    async def late(completion: str, answer: str) -> bool:
        await asyncio.sleep(0)
        return answer in completion

    async def long(completions: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.25 * len(completion) for completion in completions]

    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=[right, late, long], eval_dataset=ROWS[:1])
    env = gspo_gym.make(trainer.config.rollout.env_name)

    async def play() -> Mapping[str, float]:
        await env.reset(seed=0)
        terms: Mapping[str, float] = (await env.step("10"))[1].terms
        return terms

    assert dict(asyncio.run(play())) == {"right": 1.0, "late": 1.0, "long": 0.25 * 2}


def test_rows_of_a_file_may_have_the_column_prompt_as_those_of_a_list_may() -> None:
    Path("rows.jsonl").write_text('{"prompt": "0+1?", "answer": "1"}\n{"prompt": "0+2?", "answer": "2"}\n')
    Path("held_out.jsonl").write_text('{"prompt": "0+3?", "answer": "3"}\n')
    trainer = GSPOTrainer(train_dataset="rows.jsonl", eval_dataset="held_out.jsonl", reward_funcs=right)
    assert gspo_gym.make(trainer.config.rollout.env_name).reset(seed=0)[0][-1].content == "0+3?"


def test_two_trainers_in_one_program_keep_their_rows() -> None:
    held_out = (ROWS[0], {**ROWS[0], "question": "0 and 1?"})
    trainers = [GSPOTrainer(train_dataset=ROWS[1:], eval_dataset=[row], reward_funcs=right) for row in held_out]
    envs = [gspo_gym.make(trainer.config.rollout.env_name) for trainer in trainers]
    assert [env.reset(seed=0)[0][-1].content for env in envs] == ["0+1?", "0 and 1?"]
    assert trainers[0].config.run_folder != trainers[1].config.run_folder


@pytest.mark.parametrize(
    ("args", "clips", "level"),
    [
        ({}, (0.03, 0.04), "turn"),  # as the first run of GuessNumber has them
        ({"loss.surrogate": "clip"}, (0.03, 0.04), "turn"),
        ({"algorithm.variety": "gspo"}, (0.03, 0.04), "trajectory"),
        ({"loss": {"surrogate": "sapo"}}, (3e-4, 4e-4), "turn"),  # which has no clip
        (
            {"loss.surrogate": "gmpo", "advantages.level": "trajectory"},
            (1 - math.exp(-0.4), math.expm1(0.4)),
            "trajectory",
        ),
        ({"distillation": {"teacher": "tiny:qwen3-64", "reward": False}}, (3e-4, 4e-4), "turn"),
        ({"distillation": {"teacher": "tiny:qwen3-64"}}, (0.03, 0.04), "turn"),
    ],
)
def test_what_follows_from_another_objective_is_its_own(
    args: dict[str, Any], clips: tuple[float, float], level: str
) -> None:
    config = GSPOTrainer("tiny:qwen3-64", "GuessNumber", args=args).config
    assert (config.loss.clip_low, config.loss.clip_high) == pytest.approx(clips)
    assert config.advantages.level == level
    assert gspo_gym.RunConfig.from_dict(config.model_dump(exclude_none=True)) == config


def test_keys_go_over_the_defaults_nested_and_dotted() -> None:
    trainer = GSPOTrainer("tiny:qwen3-64-v2", Doubling, args={**SMALL, "training.learning_rate": 2e-4})
    config = trainer.config
    assert (config.rollout.env_name, config.model.label) == (f"{__name__}:Doubling", f"{__name__}-doubling".lower())
    assert (config.training.batch_size, config.training.learning_rate, config.training.group_size) == (8, 2e-4, 8)
    # The same keys as a file for `gspo-gym train`.
    assert gspo_gym.RunConfig.from_dict(config.model_dump(exclude_none=True)) == config


def test_a_class_of_a_module_has_a_name_that_another_process_finds(tmp_path: Path, monkeypatch: Any) -> None:
    """And one that only this program knows has a name of its own."""
    (tmp_path / "safe_of_mine.py").write_text(
        "from gspo_gym import TextEnv\nclass Safe(TextEnv):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n        return 'Say 1.', {}\n"
        "    def step(self, action):\n        return '', float(action == '1'), True, False, {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = GSPOTrainer(env=importlib.import_module("safe_of_mine").Safe).config.rollout.env_name
    command = [sys.executable, "-c", f"import gspo_gym; print(gspo_gym.make({name!r}).reset(seed=0)[0])"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.stdout == "Say 1.\n", finished.stderr

    class Doubled(Doubling):
        pass

    names = [GSPOTrainer(env=Doubled).config.rollout.env_name for _ in range(2)]
    assert names == ["Doubled-v0", "Doubled-v1"]


@pytest.mark.parametrize(("num_iterations", "num_warmup_steps"), [(60, 40), (4, 3)])
def test_a_short_run_of_long_answers_has_room_for_its_schedule(num_iterations: int, num_warmup_steps: int) -> None:
    """8 optimizer steps an iteration; 0.083 x 480 = 39.84 and 0.083 x 32 = 2.66, rounded up."""
    config = GSPOTrainer(env="SqlAnalyst", args={"training.iterations_per_epoch": num_iterations}).config
    assert config.size.num_optimizer_steps == 8 * num_iterations
    assert config.optimizer.num_warmup_steps(config.size.num_optimizer_steps) == num_warmup_steps


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, UsageError, "expected either env or train_dataset, got neither"),
        ({"env": Doubling, "train_dataset": ROWS}, UsageError, "expected either env or train_dataset, got both"),
        ({"env": Doubling, "reward_funcs": right}, UsageError, "go with train_dataset, not with env"),
        ({"train_dataset": ROWS}, UsageError, "train_dataset needs reward_funcs"),
        ({"train_dataset": [{"text": "a"}], "reward_funcs": right}, ConfigError, r"got \['text'\]"),
        ({"env": Doubling, "args": {"training.learning_rat": 1.0}}, ConfigError, "learning_rate"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GSPOTrainer(**arguments)


def test_a_callback_sees_each_step_and_stops_the_run_which_goes_on_afterwards() -> None:
    reports: list[StepReport] = []

    def stop_after_two(report: StepReport) -> None:
        reports.append(report)
        if report.step == 2 and len(reports) < 5:
            report.stop()

    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=right, args=SMALL, callbacks=[stop_after_two])
    summary = trainer.train()
    assert (summary["status"], summary["steps"]) == ("interrupted", 2)
    assert [report.step for report in reports] == [0, 1, 2]  # the evaluation before, and two steps
    assert reports[0].metrics["evaluation/num_episodes"] == 4.0
    assert reports[2].metrics["rollout/reward_mean"] == trainer.run.metrics.loc[2, "rollout/reward_mean"]
    reports += reports  # so that step 2 stops nothing again
    summary = trainer.train(resume=True)
    assert (summary["status"], summary["steps"]) == ("completed", 3)

    assert trainer.evaluate("0:2").num_episodes == 2
    model = AutoModelForCausalLM.from_pretrained(trainer.save("saved"))
    assert model.num_parameters() > 0


class Steps(Sink):
    """A logger of the caller's own."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.num_closed = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.num_closed += 1


def test_loggers_are_named_or_given() -> None:
    own = Steps()
    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=right, args=SMALL, loggers=["tensorboard", own])
    assert trainer.config.tracking.report_to == ("tensorboard",)
    trainer.train()
    assert own.steps == [0, 1, 2, 3, 3]  # the evaluations before and after three steps
    assert own.num_closed == 1
    assert list((trainer.run.folder / "tensorboard").iterdir())
    for loggers, error, message in (
        ("tensorbord", ConfigError, "tensorbord"),
        ([object()], UsageError, r"object lacks name, write, episodes, report, close: make it a subclass"),
    ):
        with pytest.raises(error, match=message):
            GSPOTrainer(train_dataset=ROWS, reward_funcs=right, loggers=loggers)


def test_an_agent_is_served_while_it_is_trained_and_evaluated() -> None:
    args = {**SMALL, "rollout.max_turns": 2, "rollout.max_output_tokens": 2, "rollout.max_model_len": 128}
    args = {key: value for key, value in args.items() if not key.startswith("warmup")}
    trainer = GSPOTrainer(env=gspo_gym.agent_app(agent.rollout), args=args)
    assert (trainer.config.rollout.env_name, trainer.config.model.label) == ("rollout", "rollout")
    assert trainer.config.endpoints.task_url == "http://127.0.0.1:8000"  # where `gspo-gym app serve` serves
    assert trainer.train()["steps"] == 3
    episodes = trainer.run.episodes()
    assert {len(episode.turns) for episode in episodes} == {2}
    assert {episode.reward for episode in episodes} <= {0.0, 0.5, 1.0, 2.0}  # no digit, one, two, and in order
    assert trainer.evaluate("0:3").num_episodes == 3


def test_evaluate_plays_an_environment_without_a_file() -> None:
    assert gspo_gym.evaluate(Doubling, "scripted:reference", "0:3").mean_return == 1.0
    assert gspo_gym.evaluate(Doubling, "scripted:random", range(3)).mean_return == 0.0
    assert gspo_gym.evaluate(Doubling, "tiny:qwen3-64-v2", "0:3").num_episodes == 3
    with pytest.raises(UnknownNameError, match="referense"):
        gspo_gym.evaluate(Doubling, "scripted:referense", "0:3")
    assert not Path("runs").exists()


def test_an_error_of_a_callback_is_raised_after_the_run_was_saved() -> None:
    def fail(report: StepReport) -> None:
        if report.step == 1:
            raise ZeroDivisionError("mine")

    trainer = GSPOTrainer(train_dataset=ROWS, reward_funcs=right, args=SMALL, callbacks=[fail])
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.train()
    assert (trainer.run.info.status, trainer.run.info.step) == ("interrupted", 1)
    assert [path.name for path in (trainer.run.folder / "checkpoints").glob("step_*")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": ["training.group_size=8"]}, "args: expected a mapping"),
        ({"callbacks": [3]}, "callbacks: expected functions of a StepReport, got 3"),
        ({"env": Doubling()}, "env is a name, a class or a function, not one Doubling"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_trains(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GSPOTrainer(**{"env": "GuessNumber", **arguments})


def test_one_callback_needs_no_list() -> None:
    GSPOTrainer(env="GuessNumber", callbacks=lambda report: None)


def test_what_needs_a_trained_model_says_that_there_is_none(tmp_path: Path) -> None:
    trainer = GSPOTrainer(env="GuessNumber")
    for call in (lambda: trainer.save(tmp_path / "saved"), lambda: trainer.evaluate("0:2"), lambda: trainer.run):
        with pytest.raises(CheckpointError, match=r"nothing was trained yet; call train\(\) first"):
            call()
    assert not (tmp_path / "saved").exists()
