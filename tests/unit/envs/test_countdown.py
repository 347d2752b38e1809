"""Countdown: exact transcripts, a strict expression reader, solvable tasks, and what a return can be."""

from __future__ import annotations

import ast
import itertools
import operator
from fractions import Fraction

import numpy as np
import pytest
from gspo_gym_envs.countdown.arithmetic import ExpressionError, read_expression, solve, without
from gspo_gym_envs.countdown.env import Countdown
from gspo_gym_envs.countdown.tasks import Task, TaskRanges

from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError

TASK = {"numbers": [2, 3, 7, 8], "target": 59}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def answers(env: Countdown, *actions: str) -> list[tuple[str, dict[str, float], bool]]:
    """Each answer to the actions on `TASK`: (text, reward terms, terminated)."""
    env.reset(seed=0, options=TASK)
    heard = []
    for action in actions:
        text, reward, terminated, truncated, _ = env.step(action)
        assert not truncated
        heard.append((text, dict(reward.terms), terminated))
    return heard


def python_value(text: str) -> Fraction | None:
    """The value of an expression by Python's own parser, in fractions; None: a step of it is not a natural number."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        result = Fraction(OPERATORS[type(node.op)](left, right))
        if result < 1 or result.denominator != 1:
            raise ArithmeticError
        return result

    try:
        return value(ast.parse(text, mode="eval").body)
    except ArithmeticError:
        return None


def test_a_won_episode_reads_exactly_so() -> None:
    # At the start 8 is nearest to 59, so D = 51; after 7*8 it is 56, d = 3; closer = 0.2 * (1 - 3/51).
    near = 0.2 * (1 - 3 / 51)
    assert answers(Countdown(style="terse"), "7*8", "56+3") == [
        ("56. Left 2 3 56.", {"closer": pytest.approx(near)}, False),
        ("reached", {"reached": 0.8, "closer": pytest.approx(0.2 - near)}, True),
    ]


def test_a_lost_episode_is_terminated_and_shows_one_way() -> None:
    env = Countdown(style="terse", max_turns=3)
    assert answers(env, "2*3", "6/4", "x")[-1] == ("lost: 8*7, 56+3", {"illegal": -0.05}, True)


def test_a_verbose_episode_reads_exactly_so() -> None:
    env = Countdown(style="verbose", max_turns=3)
    assert env.reset(seed=0, options=TASK)[0] == (
        "Make 59 from the numbers 2 3 7 8, each used at most once. Answer with an expression over the numbers left, "
        "such as 2*3 or (2+3)*4; its value then takes their place. Operations are + - * /, and every result must be a "
        "whole number of at least 1. Answer undo to take the last expression back. You have 3 turns."
    )
    assert [text for text, *_ in answers(env, "7*8", "56/3", "0")] == [
        "56. The numbers left are 2 3 56; the target is 59. You have 2 turns.",
        "56/3 is not whole. The numbers left are 2 3 56; the target is 59. You have 1 turn.",
        "You have no turns left. One way: 8*7, 56+3.",
    ]


def test_a_whole_expression_wins_in_one_turn_with_the_top_return() -> None:
    [(text, terms, terminated)] = answers(Countdown(style="terse"), "(7 * 8) + 3")
    assert (text, terminated, sum(terms.values())) == ("reached", True, pytest.approx(1.0))


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("59", "no operation"),
        ("(7)", "no operation"),
        ("", "not an expression"),
        ("58+1", "there is no 58"),
        ("7*7", "no 7 left"),
        ("2-8", "2-8 is below 1"),
        ("8/3", "8/3 is not whole"),
        ("2-3+8", "2-3 is below 1"),
        ("(7*8)+3)", "not an expression"),
        ("(7*8+3", "not an expression"),
        ("7*8 3+2", "not an expression"),
        ("7*8\n3+2", "not an expression"),
        ("-2+8", "not an expression"),
        ("2**3", "not an expression"),
        ("7//2", "not an expression"),
        ("7*8=56", "not an expression"),
        ("07_0+8", "not an expression"),
        ("7*٨", "not an expression"),
        ("0+8", "not an expression"),
        ("8.0+2", "not an expression"),
        ("__import__('os')", "not an expression"),
        ("9999999999+1", "not an expression"),
        ("(" * 12 + "7+8" + ")" * 12, "not an expression"),
        ("7+" * 60 + "8", "too long"),
    ],
)
def test_everything_else_is_illegal_says_why_and_changes_nothing(action: str, error: str) -> None:
    env = Countdown(style="terse")
    assert answers(env, action) == [(f"{error}. Left 2 3 7 8.", {"illegal": -0.05}, False)]
    assert env.pool == (2, 3, 7, 8)


def test_what_was_used_is_gone_and_undo_brings_it_back() -> None:
    heard = answers(Countdown(style="terse"), "7+8", "7+2", "undo", "7+2", "undo", "undo")
    assert [text for text, *_ in heard] == [
        "15. Left 2 3 15.",
        "there is no 7. Left 2 3 15.",
        "undone. Left 2 3 7 8.",
        "9. Left 3 8 9.",
        "undone. Left 2 3 7 8.",
        "lost: 8*7, 56+3",
    ]
    assert heard[-1][1] == {"illegal": -0.05}  # there was nothing to undo


def test_going_back_and_forth_earns_nothing_together() -> None:
    heard = answers(Countdown(style="terse", max_turns=10), *["7*8", "undo"] * 4)
    assert sum(value for _, terms, _ in heard for value in terms.values()) == pytest.approx(0.0, abs=1e-12)


def test_random_expressions_are_read_as_python_reads_them() -> None:
    rng = np.random.default_rng(0)

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return str(int(rng.integers(1, 13)))
        text = f"{expression(depth - 1)}{rng.choice(list('+-*/'))}{expression(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else text

    num_legal = 0
    for _ in range(2000):
        text = expression(3)
        expected = python_value(text)
        if expected is None or not set(text) & set("+-*/"):
            with pytest.raises(ExpressionError):
                read_expression(text)
        else:
            num_legal += 1
            assert read_expression(text).value == expected, text
    assert num_legal > 300


def test_numbers_are_taken_as_often_as_they_are_there() -> None:
    assert without([2, 2, 3], [2, 3]) == (2,)
    with pytest.raises(ExpressionError, match="no 2 left"):
        without([2, 3], [2, 2])


def reachable(numbers: tuple[int, ...]) -> set[int]:
    """All that can be made of some of the numbers, by splitting them in two in every way (not by merging pairs)."""
    found = set(numbers[:1]) if len(numbers) == 1 else set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = tuple(numbers[i] for i in chosen)
            right = tuple(n for i, n in enumerate(numbers) if i not in chosen)
            for a, b in itertools.product(reachable(left), reachable(right)):
                found |= {a, b, a + b, a * b} | ({a - b} if a > b else set()) | ({a // b} if a % b == 0 else set())
    return found


def test_the_solver_finds_exactly_what_can_be_made() -> None:
    for numbers in ((2, 3, 7), (1, 5, 5), (4, 6, 8), (1, 1, 9)):
        assert {t for t in range(1, 600) if solve(numbers, t) is not None} == {t for t in reachable(numbers) if t < 600}


def test_the_solver_takes_the_fewest_operations() -> None:
    assert solve([2, 3, 4, 6], 24) == [(6, "*", 4)]
    assert solve([5, 5], 11) is None


def test_every_drawn_task_can_be_solved_and_lies_in_its_ranges() -> None:
    ranges = TaskRanges(num_numbers=4, max_number=10, min_target=20, max_target=60)
    rng = np.random.default_rng(0)
    for _ in range(100):
        task = ranges.draw(rng)
        assert len(task.numbers) == 4
        assert set(task.numbers) <= set(range(1, 11))
        assert 20 <= task.target <= 60
        assert task.target not in task.numbers
        assert task.target in reachable(task.numbers)


def test_ranges_without_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="found none in 10000"):
        Countdown(style="terse", min_target=10**8, max_target=10**8).reset(seed=0)


def tasks_of(env: Countdown, seeds: range) -> set[Task]:
    found = set()
    for seed in seeds:
        env.reset(seed=seed)
        found.add(Task(env.pool, env.target))
    return found


def test_training_meets_no_task_of_the_evaluation() -> None:
    env = Countdown(
        style="terse", num_numbers=3, max_number=5, max_target=20
    )  # few enough tasks that both sides come back to theirs
    held_out, train = tasks_of(env, range(300)), tasks_of(env, range(2**31, 2**31 + 300))
    assert len(held_out) >= 5
    assert len(train) >= 20
    assert not held_out & train


def test_the_reference_earns_the_top_and_random_play_does_not() -> None:
    env = Countdown(style="terse")
    returns: dict[str, list[float]] = {"reference": [], "random": []}
    for name, seed in itertools.product(returns, range(60)):
        env.reset(seed=seed)
        player = env.policies[name](env, np.random.default_rng((seed, 1)))
        rewards: list[Reward] = []
        terminated = False
        while not terminated:
            _, reward, terminated, _, _ = env.step(str(player(())))
            rewards.append(reward)
        returns[name].append(float(sum(rewards)))
    assert returns["reference"] == [pytest.approx(1.0, abs=1e-12)] * 60
    assert np.mean(returns["random"]) < 0.5
    assert min(returns["random"]) >= env.reward_range[0]


def test_the_lowest_return_is_that_of_illegal_answers_only() -> None:
    env = Countdown(style="terse")
    heard = answers(env, *["x"] * 6)
    assert heard[-1][2]
    assert sum(terms["illegal"] for _, terms, _ in heard) == pytest.approx(env.reward_range[0])


def test_an_answer_that_could_not_be_read_uses_up_a_turn() -> None:
    env = Countdown(style="terse", max_turns=3)
    env.reset(seed=0, options=TASK)
    text, reward, terminated, _, _ = env.invalid_action("unclosed <think>")
    assert (text, dict(reward.terms), terminated) == ("unclosed <think>. Left 2 3 7 8.", {"illegal": -0.05}, False)
