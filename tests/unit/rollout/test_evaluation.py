"""Seeded evaluation and paired comparison.

Pinned here: 1. every number of an evaluation, by hand; 2. failures are counted and excluded, never 0; 3. success is
None only for environments that never declare it; 4. the same seeds give the same rows, alone or among others; 5. a
comparison by hand, pair by pair; 6. seeds as text and their errors; 7. the tables; 8. the
reference policies of the bundled environments always succeed, tokens and all.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from gspo_gym.base.settings import parse_seeds
from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.core import TextEnv
from gspo_gym.env.registry import make, resolve
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, RolloutError
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.rollout.actors import ScriptedActor, policy_of
from gspo_gym.rollout.comparison import compare, comparison_table
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.evaluation import (
    Evaluation,
    EvaluationRow,
    PlayedRow,
    ScoreUnit,
    evaluate,
    evaluation_of_rows,
    evaluation_table,
    in_one_unit,
    join,
    pass_table,
    restated,
)
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import RolloutPool
from gspo_gym.rollout.statistics import Interval, bootstrap_mean_interval, share_interval, wilson_interval
from gspo_gym.types import Outcome


class Dice(TextEnv):
    """Roll one die until it shows more than 3; each roll costs 1/8. Seed 13 always breaks."""

    says_success = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed == 13:
            raise OSError("unlucky")
        return "roll", {}

    def step(self, action: str) -> Any:
        shown = int(self.np_random.integers(1, 7))
        success = (True if shown > 3 else None) if self.says_success else None
        return f"{shown}", Reward({"rolls": -1 / 8}, success=success), shown > 3, False, {}


class SilentDice(Dice):
    says_success = False


def pool_for(
    env_type: type[Dice] = Dice,
    *,
    max_turns: int = 2,
    policy: Any = lambda env, rng: lambda messages: "go",
    on_episode: Any = None,
) -> RolloutPool:
    return RolloutPool(
        play=episode_player(
            make_env=lambda task: env_type(),
            act=ScriptedActor(policy),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=max_turns, max_output_tokens=8, max_model_len=256),
        ),
        pool_limits=PoolLimits(max_attempts=2),
        run_seed=0,
        on_episode=on_episode,
    )


def rolls_of(seed: int, *, max_turns: int = 2) -> tuple[int, bool]:
    """How many rolls that seed takes and whether it gets there, from the environment alone."""
    env = Dice()
    env.reset(seed=seed)
    for turn in range(1, max_turns + 1):
        if env.step("go")[2]:
            return turn, True
    return max_turns, False


def test_every_number_follows_from_the_seeds() -> None:
    seeds = range(20, 36)
    result = asyncio.run(evaluate(pool_for(), "Dice-v0", seeds))
    rolls = [rolls_of(seed) for seed in seeds]
    num_successes = sum(success for _, success in rolls)
    assert 0 < num_successes < 16  # so that both kinds of end are here
    assert [row.num_turns for row in result.rows] == [turns for turns, _ in rolls]
    assert result.mean_return == -sum(turns for turns, _ in rolls) / 8 / 16
    assert result.mean_turns == sum(turns for turns, _ in rolls) / 16
    assert result.success_rate == num_successes / 16  # an episode cut off undecided is no success
    assert result.success_interval == wilson_interval(num_successes, 16)
    assert result.mean_return_interval == bootstrap_mean_interval([-turns / 8 for turns, _ in rolls])
    assert (result.num_episodes, result.num_failed, result.seeds) == (16, 0, tuple(seeds))


def test_failures_are_counted_and_excluded() -> None:
    result = asyncio.run(evaluate(pool_for(), "Dice-v0", [13, 2, 3]))
    turns = [rolls_of(seed)[0] for seed in (2, 3)]
    assert result.mean_return == -sum(turns) / 8 / 2
    assert (result.num_episodes, result.num_failed) == (2, 1)
    assert result.seeds == (13, 2, 3)
    failed = result.rows[0]
    assert (failed.episode_return, failed.success, failed.outcome) == (None, None, Outcome.ENV_ERROR)
    assert failed.error is not None
    assert "unlucky" in failed.error
    assert result.sentence().endswith("2 episodes, 1 failed and left out, 1 failed attempts played again")
    with pytest.raises(RolloutError, match="unlucky"):
        asyncio.run(evaluate(pool_for(), "Dice-v0", [13]))


def test_an_environment_without_success_has_no_success_rate() -> None:
    result = asyncio.run(evaluate(pool_for(SilentDice), "Dice-v0", "0:4"))
    assert result.success_rate is None
    assert result.success_interval is None
    assert result.to_dict()["success_rate"] is None


def test_the_same_seeds_give_the_same_rows_alone_or_among_others() -> None:
    pool = pool_for()

    async def three() -> list[Evaluation]:
        return [
            await evaluate(pool, "Dice-v0", range(20), label="all"),
            await evaluate(pool, "Dice-v0", [7, 3], label="some"),
            await evaluate(pool_for(), "Dice-v0", range(20)),
        ]

    everything, some, again = asyncio.run(three())
    assert some.rows == (everything.rows[7], everything.rows[3])
    assert again.rows == everything.rows


def test_the_dictionary_is_json_and_holds_the_summary() -> None:
    result = asyncio.run(evaluate(pool_for(), "Dice-v0", [2, 13]))
    data = json.loads(json.dumps(result.to_dict()))
    assert data["seeds"] == [2, 13]
    assert data["mean_return"] == result.mean_return
    assert data["success_rate"] == result.success_rate
    assert (data["num_episodes"], data["num_failed"]) == (1, 1)
    assert data["mean_return_interval"] is None  # one episode shows no spread
    assert data["rows"][1]["episode_return"] is None
    assert data["rows"][1]["outcome"] == "env_error"
    assert data.pop("num_retries") == 1
    assert Evaluation.from_dict(data).num_retries == 0  # of records that do not say


@pytest.mark.parametrize("name", ["GuessNumber", "FrozenLake", "SqlAnalyst"])
def test_the_reference_policy_of_each_bundled_environment_always_succeeds(name: str) -> None:
    env_id = resolve(name)
    pool = RolloutPool(
        play=episode_player(
            make_env=lambda task: make(task.env_id),
            act=ScriptedActor(policy_of(make(env_id), "reference")),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=50, max_output_tokens=2048, max_model_len=32_768),
        ),
        pool_limits=PoolLimits(max_attempts=1),
        run_seed=0,
    )
    result = asyncio.run(evaluate(pool, env_id, "0:12"))
    assert result.sentence().startswith("success 1.000")
    assert result.num_failed == 0


def row(seed: int, episode_return: float | None, success: bool | None = None) -> EvaluationRow:
    outcome = Outcome.TERMINATED if episode_return is not None else Outcome.ENV_ERROR
    return EvaluationRow(seed, episode_return, success, 1, outcome)


def evaluation(*rows: EvaluationRow, env_id: str = "Dice-v0") -> Evaluation:
    return Evaluation(env_id, rows)


def played(env_id: str, seed: int, episode_return: float, num_retries: int = 0) -> PlayedRow:
    return PlayedRow(env_id, row(seed, episode_return), num_retries)


def test_a_row_comes_back_from_its_json() -> None:
    one = PlayedRow("Dice-v0", EvaluationRow(3, 0.5, False, 2, Outcome.TERMINATED, env_return=0.25), 4)
    assert PlayedRow.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_rows_that_are_there_are_not_played_again_and_those_of_others_are_left_out() -> None:
    found = [played("Test-v0", 5, -7.0, 2), played("Other-v0", 6, -8.0), played("Test-v0", 7, -9.0)]
    result = asyncio.run(evaluate(pool_for(), "Test-v0", [5, 6], found=found))
    first, second = result.rows
    assert (first.seed, first.episode_return) == (5, -7.0)
    assert (second.seed, second.episode_return) == (6, -rolls_of(6)[0] / 8)
    assert result.num_retries == 2


def test_an_evaluation_is_made_of_rows_that_are_all_there() -> None:
    found = [played("A-v0", 1, 0.5, 1), played("B-v0", 1, 0.25), played("A-v0", 2, 1.0, 2), played("A-v0", 3, 9.0)]
    alone = evaluation_of_rows(["A-v0"], [1, 2], found)
    assert alone is not None
    assert [(each.seed, each.episode_return) for each in alone.rows] == [(1, 0.5), (2, 1.0)]
    assert (alone.env_id, alone.num_retries) == ("A-v0", 3)
    joined = evaluation_of_rows(["A-v0", "B-v0"], [1], found)
    assert joined is not None
    assert [part.env_id for part in joined.parts] == ["A-v0", "B-v0"]
    assert evaluation_of_rows(["A-v0", "B-v0"], [1, 2], found) is None


def test_a_comparison_pair_by_pair() -> None:
    first = evaluation(
        row(0, 0.0, False), row(1, 1.0, True), row(2, 0.0, False), row(3, 0.5, None), row(4, None), row(5, 0.0, False)
    )
    second = evaluation(  # in another order
        row(5, 1.0, True),
        row(4, 1.0, True),
        row(3, 1.0, True),
        row(2, 1.0, True),
        row(1, 0.0, False),
        row(0, 1.0, True),
    )
    result = compare(first, second)
    # Seeds 0, 1, 2, 3, 5: differences 1, -1, 1, 0.5, 1, of which the mean is 2.5 / 5.
    assert (result.num_pairs, result.num_unpaired) == (5, 1)
    assert result.mean_difference == 0.5
    assert result.difference_interval == bootstrap_mean_interval([1.0, -1.0, 1.0, 0.5, 1.0])
    assert (result.num_only_first, result.num_only_second) == (1, 4)
    assert result.success_p_value == 0.375  # 2 (1 + 5) / 2^5
    assert result.to_dict()["success_p_value"] == 0.375


def test_a_comparison_without_success_has_no_test() -> None:
    result = compare(evaluation(row(0, 0.0)), evaluation(row(0, 2.0)))
    assert (result.mean_difference, result.difference_interval) == (2.0, None)
    assert (result.num_only_first, result.num_only_second, result.success_p_value) == (None, None, None)


def test_several_environments_are_joined_episode_by_episode() -> None:
    dice = evaluation(row(0, 1.0, True), row(1, 0.0, False), row(2, None))
    maze = evaluation(row(0, 0.5), row(1, 1.5), env_id="Maze-v0")  # has no notion of success
    both = join([dice, maze])
    assert (both.env_id, both.seeds) == ("Dice-v0 + Maze-v0", (0, 1, 2))
    assert (both.num_episodes, both.num_failed, both.mean_return) == (4, 1, 0.75)
    assert (both.num_successes, both.success_rate, both.score) == (1, 0.5, 0.5)  # of the two episodes of dice
    assert both.success_interval == wilson_interval(1, 2)
    assert both.summary()["parts"] == {"Dice-v0": dice.summary(), "Maze-v0": maze.summary()}
    assert both.to_dict()["parts"]["Maze-v0"] == maze.to_dict()
    assert both.sentence().endswith(f"; Dice-v0: {dice.sentence()}; Maze-v0: {maze.sentence()}")
    assert join([maze, maze]).success_rate is None
    assert join([dice]) is dice


def test_joined_evaluations_are_compared_by_environment_and_seed() -> None:
    def joined(dice: float, maze: float) -> Evaluation:
        return join([evaluation(row(7, dice)), evaluation(row(7, maze), env_id="Maze-v0")])

    result = compare(joined(0.0, 10.0), joined(1.0, 13.0))
    assert (result.num_pairs, result.mean_difference) == (2, 2.0)  # 1 and 3, not 13 and -9
    with pytest.raises(ConfigError, match="different environments"):
        compare(joined(0.0, 1.0), evaluation(row(7, 0.0)))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (evaluation(row(0, 1.0), env_id="Other-v0"), "different environments, Dice-v0 and Other-v0"),
        (evaluation(row(1, 1.0)), r"different seeds; only one side has \[0, 1\]"),
        (evaluation(row(0, None)), "no seed was scored in both"),
    ],
)
def test_what_cannot_be_compared_is_refused(second: Evaluation, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(evaluation(row(0, 1.0)), second)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("0:4", (0, 1, 2, 3)),
        ("10:20:5", (10, 15)),
        ("7", (7,)),
        ("1, 5,20:22", (1, 5, 20, 21)),
        ([3, 1], (3, 1)),
        (range(2), (0, 1)),
    ],
)
def test_seeds_are_read(given: Any, expected: tuple[int, ...]) -> None:
    assert parse_seeds(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", 'expected "start:stop", "start:stop:step" or a number, got \'\''),
        ("a:b", 'expected "start:stop"'),
        ("1:2:3:4", 'expected "start:stop"'),
        ("1:2:0", 'expected "start:stop"'),
        ("5:5", "names no seed"),
        ([], "names no seed"),
        ("-3", "expected integers >= 0, got -3"),
        ([1.5], "expected integers >= 0, got 1.5"),
        ([True], "expected integers >= 0, got True"),
        ("0:4,2", "2 occurs more than once"),
    ],
)
def test_seeds_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_seeds(given)


def shown(table: str) -> list[list[str]]:
    """The columns of a table, without their heads."""
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[1:]]
    return [list(column) for column in zip(*rows, strict=True)]


def test_the_tables_say_what_the_records_say() -> None:
    before = evaluation(row(0, 0.0, False), row(1, 1.0, True), row(2, None))
    after = evaluation(row(0, 1.0, True), row(1, 1.0, True), row(2, 1.0, True))
    columns = shown(evaluation_table({"before": before, "after": after}, width=200))
    assert columns[0] == ["before", "after"]
    assert columns[1] == ["0.500", "1.000"]
    assert columns[6:] == [["2", "3"], ["1", "0"]]
    assert "failed" not in evaluation_table({"after": after}, width=200)  # nothing has
    compared = comparison_table(compare(before, after), first="before", second="after", width=200)
    names, values = shown(compared.replace("  95% interval", "95% interval"))
    facts = dict(zip(names, values, strict=True))
    assert facts["mean return, difference"] == "+0.500"
    assert facts["after succeeded more often"] == "1"
    assert facts["p-value (McNemar, exact)"] == "1"
    assert facts["tasks left out (failed)"] == "1"


def test_the_score_is_the_success_rate_or_else_the_mean_return() -> None:
    assert evaluation(row(0, 5.0, True), row(1, 2.0, False)).score == 0.5
    assert evaluation(row(0, 5.0), row(1, 2.0)).score == 3.5


def test_the_unit_of_a_run_is_what_its_first_evaluation_with_a_decided_episode_declares() -> None:
    declared, silent = evaluation(row(0, 2.0, False)), evaluation(row(0, 2.0), env_id="Maze-v0")
    assert ScoreUnit.of_first(declared, has_success_goal=False) == ScoreUnit("success_rate", ("Dice-v0",))
    assert ScoreUnit.of_first(silent, has_success_goal=False) == ScoreUnit("mean_return")
    # who stops at a success rate says that there is one: these episodes were cut off before it showed
    assert ScoreUnit.of_first(silent, has_success_goal=True) == ScoreUnit("success_rate", ("Maze-v0",))
    both = join([declared, silent])
    assert ScoreUnit.of_first(both, has_success_goal=True) == ScoreUnit("success_rate", ("Dice-v0",))
    # of what was cut off everywhere nothing is known, also beside an environment of which all is
    cut_off = evaluation(EvaluationRow(0, 2.0, None, 1, Outcome.MAX_TURNS), row(1, None), env_id="Maze-v0")
    assert ScoreUnit.of_first(cut_off, has_success_goal=False) is None
    assert ScoreUnit.of_first(join([declared, cut_off]), has_success_goal=False) is None


def test_an_evaluation_before_the_unit_was_decided_is_measured_in_it_afterwards() -> None:
    dice = evaluation(row(0, 1.0, True), row(1, 0.5, False))
    maze = Evaluation("Maze-v0", tuple(EvaluationRow(seed, 2.0, None, 1, Outcome.MAX_TURNS) for seed in range(3)))
    summary = json.loads(json.dumps(join([dice, maze]).summary()))
    both = ScoreUnit("success_rate", ("Dice-v0", "Maze-v0"))
    for unit in (both, ScoreUnit("success_rate", ("Dice-v0",))):
        assert restated(summary, unit) == json.loads(json.dumps(join([dice, maze]).in_unit(unit).summary()))
    assert restated(summary, both)["success_rate"] == 1 / 5


def test_an_evaluation_keeps_the_unit_of_its_run_whatever_its_episodes_declare() -> None:
    cut_off, good = evaluation(row(0, 2.0), row(1, 2.0)), evaluation(row(0, 0.9, True), row(1, 0.9, None))
    by_success, by_return = ScoreUnit("success_rate", ("Dice-v0",)), ScoreUnit("mean_return")
    assert [each.in_unit(by_success).score for each in (cut_off, good)] == [0.0, 0.5]  # undecided is no success
    assert cut_off.in_unit(by_success).success_rate == 0.0
    assert [each.in_unit(by_return).score for each in (cut_off, good)] == [2.0, 0.9]
    assert good.in_unit(by_return).success_rate == 0.5  # it is told all the same


def test_a_success_rate_over_several_environments_is_always_over_the_same_ones() -> None:
    unit = ScoreUnit("success_rate", ("Dice-v0",))
    dice, maze = evaluation(row(0, 1.0, True), row(1, 0.0)), evaluation(row(0, 5.0, False), env_id="Maze-v0")
    both = join([dice, maze]).in_unit(unit)  # the maze declares something now, which it did not at the start
    assert (both.score, both.success_rate) == (0.5, 0.5)
    assert [part.score for part in both.parts] == [0.5, 5.0]
    assert both.parts[1].success_rate == 0.0


def test_models_that_are_compared_are_shown_in_one_unit() -> None:
    shown = in_one_unit({"cut off": evaluation(row(0, 2.0)), "good": evaluation(row(0, 0.9, True))})
    assert {name: each.success_rate for name, each in shown.items()} == {"cut off": 0.0, "good": 1.0}
    assert in_one_unit({"a": evaluation(row(0, 2.0))})["a"].success_rate is None


def test_the_summary_holds_the_four_facts_and_the_sentence_says_them() -> None:
    result = evaluation(row(0, 1.0, True), row(1, None), row(2, 0.5, False))
    interval = wilson_interval(1, 2)
    assert result.summary() == {
        "score": "success_rate",
        "mean_return": 0.75,
        "success_rate": 0.5,
        "success_interval": [interval.low, interval.high],
        "num_episodes": 2,
        "num_failed": 1,
        "seeds": [0, 1, 2],
    }
    # Wilson for 1 of 2 is symmetric about 1/2: half width 1.96 sqrt(1/8 + 3.8415/16) / (1 + 1.9207) = 0.4055.
    assert (
        str(result)
        == result.sentence()
        == ("success 0.500 (95% 0.095 to 0.905), mean return 0.750, 1.00 turns, 2 episodes, 1 failed and left out")
    )


def test_intervals_are_records() -> None:
    assert evaluation(row(0, 1.0), row(1, 1.0)).mean_return_interval == Interval(1.0, 1.0)


class Digits(Dice):
    """One turn, worth the digit that was said, and won by more than 4."""

    def step(self, action: str) -> Any:
        return "", Reward({"digit": float(action)}, success=int(action) > 4), True, False, {}


def says_digits(env: Any, rng: Any) -> Any:
    return lambda messages: str(int(rng.integers(10)))


def test_samples_of_a_task_differ_and_the_first_is_the_same_however_many_follow() -> None:
    one = asyncio.run(evaluate(pool_for(Digits, policy=says_digits), "Dice-v0", range(5)))
    many = asyncio.run(evaluate(pool_for(Digits, policy=says_digits), "Dice-v0", range(5), samples_per_task=4))
    assert [(each.seed, each.sample) for each in many.rows] == [(seed, n) for seed in range(5) for n in range(4)]
    assert many.rows[::4] == one.rows
    assert len({each.episode_return for each in many.rows}) > 5
    again = asyncio.run(evaluate(pool_for(Digits, policy=says_digits), "Dice-v0", [3], samples_per_task=2))
    assert again.rows == many.rows[12:14]


def test_only_missing_samples_are_played_again() -> None:
    found = [PlayedRow("Dice-v0", sampled(3, sample, -7.0), 1) for sample in (0, 2, 9)]
    episodes: list[str] = []
    pool = pool_for(Digits, policy=says_digits, on_episode=lambda episode, _: episodes.append(episode.trajectory_id))
    result = asyncio.run(evaluate(pool, "Dice-v0", [3], samples_per_task=3, found=found))
    assert episodes == ["evaluation/Dice-v0#3/1"]
    assert [each.episode_return == -7.0 for each in result.rows] == [True, False, True]
    assert result.num_retries == 2
    whole = [*found, PlayedRow("Dice-v0", result.rows[1], 0)]
    assert evaluation_of_rows(["Dice-v0"], [3], whole, samples_per_task=3) == result
    assert evaluation_of_rows(["Dice-v0"], [3], found, samples_per_task=3) is None


def test_a_sample_that_fails_is_counted_and_the_others_stay() -> None:
    result = asyncio.run(evaluate(pool_for(Digits, policy=says_digits), "Dice-v0", [13, 2], samples_per_task=2))
    assert [(each.seed, each.sample, each.error is None) for each in result.rows] == [
        *((13, 0, False), (13, 1, False), (2, 0, True), (2, 1, True)),
    ]
    assert (result.num_episodes, result.num_failed, len(result.tasks)) == (2, 2, 1)


def sampled(seed: int, sample: int, episode_return: float | None, success: bool | None = None) -> EvaluationRow:
    outcome = Outcome.TERMINATED if episode_return is not None else Outcome.ENV_ERROR
    return EvaluationRow(seed, episode_return, success, 1, outcome, sample=sample)


def task(seed: int, successes: str) -> list[EvaluationRow]:
    """Samples of a task: 1 succeeded, 0 did not, x failed; the return is what success is worth."""
    signs = enumerate(successes)
    return [sampled(seed, n, None) if sign == "x" else sampled(seed, n, float(sign), sign == "1") for n, sign in signs]


def test_pass_rates_by_hand() -> None:
    # 1 of 4, 3 of 4. pass@2: 1 - C(3,2)/6 = 1/2 and 1 - 0; pass^2: 0 and C(3,2)/6 = 1/2.
    result = evaluation(*task(0, "1000"), *task(1, "0111"))
    assert [(rate.k, rate.num_tasks, rate.pass_at, rate.pass_hat) for rate in result.pass_rates] == [
        *((2, 2, 3 / 4, 1 / 4), (4, 2, 1.0, 0.0)),
    ]
    assert result.success_rate == 1 / 2
    assert result.success_interval == share_interval([1 / 4, 3 / 4], [4, 4])
    assert result.pass_rates[0].pass_at_interval == share_interval([1 / 2, 1.0], [4, 4], is_weighted=False)
    assert result.pass_rates[1].pass_at_interval == wilson_interval(2, 2)
    assert result.mean_return_interval == bootstrap_mean_interval([1 / 4, 3 / 4])
    assert result.sentence().startswith("success 0.500 (95% ")
    assert ", pass@4 1.000, pass^4 0.000, mean return 0.500" in result.sentence()
    data = json.loads(json.dumps(result.to_dict()))
    assert [rate["pass_at"] for rate in data["pass_rates"]] == [3 / 4, 1.0]
    assert Evaluation.from_dict(data) == result
    shown_rates = shown(pass_table({"a": result, "b": evaluation(row(0, 1.0, True))}, width=200))
    assert shown_rates[:3] == [["a", "a"], ["2", "4"], ["0.750", "1.000"]]
    assert pass_table({"b": evaluation(row(0, 1.0, True))}) == ""


def test_pass_rates_leave_out_tasks_with_fewer_samples_and_are_of_every_power_of_two() -> None:
    # Of task 0 three samples count, 1 of them a success: pass@2 = 1 - C(2,2)/C(3,2) = 2/3.
    result = evaluation(*task(0, "x100"), *task(1, "1111"))
    rates = [(rate.k, rate.num_tasks, rate.pass_at) for rate in result.pass_rates]
    assert rates == [(2, 2, (2 / 3 + 1) / 2), (4, 1, 1.0)]
    assert [rate.k for rate in evaluation(*task(0, "1" * 11)).pass_rates] == [2, 4, 8, 11]
    assert evaluation(*task(0, "1")).pass_rates == ()
    assert evaluation(sampled(0, 0, 1.0), sampled(0, 1, 2.0)).pass_rates == ()  # no notion of success
    both = join([evaluation(*task(0, "10")), evaluation(*task(0, "11"), env_id="Maze-v0")])
    assert [(rate.k, rate.num_tasks, rate.pass_hat) for rate in both.pass_rates] == [(2, 2, 1 / 2)]


def test_a_comparison_of_several_samples_pairs_tasks() -> None:
    first = evaluation(*task(0, "1000"), *task(1, "0111"), *task(2, "xxxx"), *task(3, "0000"))
    second = evaluation(*task(0, "1110"), *task(1, "x010"), *task(2, "1111"), *task(3, "0000"))
    result = compare(first, second)
    # Tasks 0, 1 and 3: means differ by 3/4 - 1/4, 1/3 - 3/4 and 0; one side is better on the first, one on the second.
    assert (result.num_pairs, result.num_unpaired) == (3, 1)
    assert result.mean_difference == pytest.approx((1 / 2 - 5 / 12) / 3)
    assert (result.num_only_first, result.num_only_second, result.success_p_value) == (1, 1, 1.0)


def test_a_restated_evaluation_of_several_samples_has_the_interval_of_its_tasks() -> None:
    summary = evaluation(*task(0, "1010"), *task(1, "1010")).summary()
    restated_summary = restated(summary, ScoreUnit("success_rate", ("Dice-v0",)))
    assert restated_summary["success_rate"] == 1 / 2
    interval = wilson_interval(1, 2)  # two tasks
    assert restated_summary["success_interval"] == [interval.low, interval.high]
