"""DatasetEnv as an environment: the contract, its turns, its players, and that registering one shares the rows."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from gspo_gym.env.checks.checker import check_env
from gspo_gym.env.core import TextEnv
from gspo_gym.env.data.dataset import DatasetEnv
from gspo_gym.env.registry import make, register
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Chad": "N'Djamena",
}
ROWS = [{"question": f"Capital of {country}?", "answer": city} for country, city in CAPITALS.items()]
TRAIN, HELD_OUT = ROWS[:4], ROWS[4:]
FIRST = 2**31  # the first training seed
TERSE = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Q: {question}"}]


async def slow_exact(completion: str, answer: str) -> bool:
    await asyncio.sleep(0)
    return completion == answer


def partly(completion: str, answer: str) -> dict[str, float]:
    return {"correct": 0.75 * (completion == answer), "short": 0.25 * (len(completion) < 12)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reward": "contains", "conversation": TERSE},
        {"reward": slow_exact, "reward_range": (0.0, 1.0)},
        {"reward": partly, "reward_range": [0.0, 1.0]},
    ],
    ids=["exact", "contains", "async", "terms"],
)
def test_the_contract_is_kept(settings: dict[str, Any]) -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT, **settings)
    report = check_env(env.another, seeds=[0, 1, FIRST, FIRST + 1, FIRST + 2, FIRST + 3])
    assert report.passed, str(report)
    assert "6 seeds gave at least 6 different tasks" in [fact.text for fact in report.facts]
    assert not any("success" in note or "reference" in note for note in report.notes)


def test_an_episode_is_one_question_one_answer_and_the_end() -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT, conversation=[{"role": "user", "content": "Q: {question}\nA:"}])
    for seed, rows in ((FIRST, TRAIN), (0, HELD_OUT)):
        (message,), info = env.reset(seed=seed)
        asked = [row for row in rows if message.content == f"Q: {row['question']}\nA:"]
        assert len(asked) == 1
        assert info["row"].startswith("rows[")
        observation, reward, terminated, truncated, _ = env.step(asked[0]["answer"])
        assert (observation, float(reward), reward.success, terminated, truncated) == ("", 1.0, True, True, False)
        with pytest.raises(ResetNeeded):
            env.step("again")


def test_an_answer_that_could_not_be_read_earns_the_least() -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT, reward=lambda completion: 1.0, reward_range=(-0.5, 1.0))
    env.reset(seed=0)
    _, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (dict(reward.terms), reward.success, terminated) == ({"unreadable": -0.5}, False, True)
    unbounded = DatasetEnv(TRAIN, held_out=HELD_OUT, reward=lambda completion: 1.0)
    unbounded.reset(seed=0)
    reward = unbounded.invalid_action("unclosed <think>")[1]
    assert (float(reward), reward.success) == (0.0, None)


def test_a_reset_without_a_seed_draws_a_row_of_the_side_that_was_played() -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT)
    env.reset(seed=FIRST + 3)
    asked = {env.reset()[0][0].content for _ in range(100)}
    assert asked == {row["question"] for row in TRAIN}  # 100 draws miss one of 4 with probability 4 x 0.75^100
    env.reset(seed=3)
    asked = {env.reset()[0][0].content for _ in range(100)}
    assert asked == {row["question"] for row in HELD_OUT}
    with pytest.raises(ConfigError, match=r"expected no options, got \['row'\]"):
        env.reset(seed=0, options={"row": 1})


def test_the_reference_knows_the_answer_and_the_random_player_another_one_s() -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT, reward="boxed")
    (message,), _ = env.reset(seed=0)
    answer = next(row["answer"] for row in HELD_OUT if row["question"] == message.content)
    assert env.policies["reference"](env, np.random.default_rng(0))([message]) == f"\\boxed{{{answer}}}"
    player = env.policies["random"](env, np.random.default_rng(0))
    assert {player([message]) for _ in range(100)} == {f"\\boxed{{{row['answer']}}}" for row in TRAIN}


def test_rows_without_answers_have_no_players_but_a_reward() -> None:
    env = DatasetEnv(
        [{"question": "Say ha."}], held_out=[{"question": "Say ho."}], reward=lambda completion: len(completion)
    )
    env.reset(seed=0)
    assert env.policies == {}
    assert TextEnv.policies == {}
    assert float(env.step("ho")[1]) == 2.0


def test_a_reward_function_s_column_must_be_in_every_row() -> None:
    with pytest.raises(ConfigError, match=r"rows\[0\]: there is no column 'level'"):
        DatasetEnv(TRAIN, held_out=HELD_OUT, reward=lambda completion, level: 0.0)


def test_it_is_made_by_name_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("q,a\n" + "".join(f"{n}+1,{n + 1}\n" for n in range(50)))
    env = make("Dataset", rows=str(path), reward="number", columns={"question": "q", "answer": "a"})
    (message,), info = env.reset(seed=FIRST)
    assert info["row"].startswith(f"{path}:")
    number = int(message.content.partition("+")[0])
    assert env.step(f"That is {number + 1}.")[1].success is True


def test_the_split_is_as_large_and_as_shuffled_as_asked() -> None:
    rows = [{"question": f"q{index}", "answer": "x"} for index in range(1000)]
    sizes = [len(DatasetEnv(rows, held_out_fraction=fraction).questions.held_out) for fraction in (0.05, 0.5)]
    default = DatasetEnv(rows)
    # Binomial(1000, p) with p = 0.05, 0.5 and the default 0.1: standard deviations 6.9, 15.8, 9.5; five of slack each
    for size, mean, deviation in zip(
        [*sizes, len(default.questions.held_out)], (50, 500, 100), (6.9, 15.8, 9.5), strict=True
    ):
        assert abs(size - mean) < 5 * deviation
    other = DatasetEnv(rows, split_seed=1)
    assert other.questions.held_out[0] != default.questions.held_out[0]


def test_registering_another_shares_the_rows_instead_of_copying_them(request: pytest.FixtureRequest) -> None:
    env = DatasetEnv(TRAIN, held_out=HELD_OUT)
    register("Capitals-v0", entry_point=env.another)
    request.addfinalizer(lambda: gymnasium.registry.pop("Capitals-v0"))
    first, second = make("Capitals-v0").unwrapped, make("Capitals-v0").unwrapped
    assert first is not second
    assert first.questions is second.questions is env.questions
    first.reset(seed=0)
    with pytest.raises(ResetNeeded):
        second.step("x")


def test_an_async_reward_makes_every_answer_awaitable() -> None:
    async def play() -> Reward:
        env = DatasetEnv(TRAIN, held_out=HELD_OUT, reward=slow_exact)
        reset = env.reset(seed=0)
        assert inspect.isawaitable(reset)
        (message,), _ = await reset
        reward: Reward = (await env.step(next(r["answer"] for r in HELD_OUT if r["question"] == message.content)))[1]
        await env.reset(seed=0)
        assert (await env.invalid_action("unreadable"))[2] is True
        return reward

    assert asyncio.run(play()).success is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"held_out": HELD_OUT, "held_out_fraction": 0.2}, "held_out_fraction has no effect; remove it"),
        ({"held_out_fraction": 1.0}, r"expected held_out_fraction in \(0, 1\), got 1.0"),
        ({"max_prompt_characters": 0}, "expected max_prompt_characters >= 1, got 0"),
        ({"reward_range": [1.0, 0.0]}, r"expected reward_range to be \(least, most\), got \[1.0, 0.0\]"),
        ({"max_prompt_characters": 1}, "expected a training row, got none .6 too long"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DatasetEnv(ROWS, **settings)
