"""CodeRepair: exact transcripts, what earns and costs, limits of the runs, and what scripted play reaches."""

from __future__ import annotations

import numpy as np
import pytest
from gspo_gym_envs.code_repair.env import CodeRepair
from gspo_gym_envs.code_repair.tasks import HELD_OUT, TRAINING

from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.types import Message, ToolCall

# Every function of `lists`, right, in words of our own.
LISTS = """
def chunks(items, size):
    if size < 1:
        raise ValueError
    return [items[:size], *chunks(items[size:], size)] if items else []
def rotate(items, steps):
    return [items[(i - steps) % len(items)] for i in range(len(items))]
def unique(items):
    return list(dict.fromkeys(items))
def pairs_with_sum(items, total):
    return sum(items[i] + items[j] == total for j in range(len(items)) for i in range(j))
"""


def turn(env: CodeRepair, name: str, **arguments: object) -> tuple[str, dict[str, float], bool, bool]:
    """(what was said, reward terms, terminated, truncated)"""
    action = Message("assistant", "", (ToolCall("c", name, arguments),))
    [message], reward, terminated, truncated, _ = env.step(action)
    return message.content, dict(reward.terms), terminated, truncated


def lists(seed: int = 0, **kwargs: object) -> CodeRepair:
    env = CodeRepair(style="terse", **kwargs)
    env.reset(seed=seed, options={"module": "lists"})
    return env


def play(env: CodeRepair, policy: str, seed: int) -> tuple[list[Message], list[Reward]]:
    messages = [Message("user", env.reset(seed=seed)[0])]
    player = env.policies[policy](env, np.random.default_rng((seed, 1)))
    rewards: list[Reward] = []
    while True:
        action = player(tuple(messages))
        assert isinstance(action, Message)
        observation, reward, terminated, truncated, _ = env.step(action)
        messages += [action, *observation]
        rewards.append(reward)
        if terminated or truncated:
            return messages, rewards


def test_a_repair_in_other_words_than_the_original_s_is_right() -> None:
    env = lists()
    assert turn(env, "list_files")[0] == "lists.py, tests.txt (read-only)"
    assert turn(env, "read_file", path="lists.py")[0] == env.task.source
    assert turn(env, "write_file", path="lists.py", text=LISTS) == ("written", {}, False, False)
    assert turn(env, "run_tests") == ("8 of 8 tests pass", {"progress": 0.3}, False, False)
    assert turn(env, "submit") == ("all tests pass", {"progress": -0.3, "solved": 1.0}, True, False)


def test_the_opening_counts_the_failing_tests_and_they_are_those_shown() -> None:
    env = CodeRepair(style="terse")
    said = env.reset(seed=4)[0]
    failing = len(env.task.visible) - env.task.num_passing
    assert said == f"{env.path}: {failing} of 8 tests fail. Repair it."
    assert turn(env, "run_tests")[0].startswith(f"{8 - failing} of 8 tests pass\n")
    assert "You have 12 turns." in CodeRepair(style="verbose").reset(seed=4)[0]


def test_progress_is_a_potential_that_cannot_be_farmed() -> None:
    env = lists()
    broken = env.task.source
    total = 0.0
    for text in (LISTS, broken, LISTS, "", LISTS):
        turn(env, "write_file", path="lists.py", text=text)
        terms = turn(env, "run_tests")[1]
        total += terms.get("progress", 0.0)
        assert -1e-9 <= total <= 0.3 + 1e-9
    assert turn(env, "run_tests")[1] == {}  # nothing changed
    assert total == pytest.approx(0.3)


def test_running_out_of_turns_pays_the_progress_back() -> None:
    env = lists(max_steps=3)
    turn(env, "write_file", path="lists.py", text=LISTS)
    assert turn(env, "run_tests")[1] == {"progress": 0.3}
    assert turn(env, "list_files")[1:] == ({"progress": -0.3}, False, True)


def test_submitting_the_broken_file_earns_nothing_and_says_so() -> None:
    env = lists()
    said, terms, terminated, truncated = turn(env, "submit")
    assert said.startswith("wrong: ")
    assert said.endswith(" of 32 tests pass")
    assert (terms, terminated, truncated) == ({"solved": 0.0}, True, False)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("read_file", {"path": "/etc/passwd"}, "error: no such file: /etc/passwd"),
        ("replace", {"path": "lists.py", "old": "nowhere", "new": ""}, "error: old: there is no such text in the file"),
        ("replace", {"path": "lists.py", "old": "", "new": "x"}, "error: old: there is no such text in the file"),
        ("write_file", {"path": "tests.txt", "text": ""}, "error: tests.txt is read-only"),
        ("write_file", {"path": "lists.py", "text": "#" * 20_001}, "error: the file would have 20001 characters"),
        ("replace", {"path": "lists.py", "old": "items", "new": "x"}, "error: old: the text occurs "),
        ("run_test", {}, "error: unknown tool 'run_test'"),
    ],
)
def test_failed_calls_cost_a_little_and_change_nothing(name: str, arguments: dict[str, object], said: str) -> None:
    env = lists()
    answer, terms, terminated, truncated = turn(env, name, **arguments)
    assert answer.startswith(said)
    assert (terms, terminated, truncated) == ({"error": -0.02}, False, False)
    assert env.source == env.task.source


def test_a_message_without_a_call_costs_the_same() -> None:
    observation, reward, *_ = lists().step("I have repaired it.")
    assert (observation, dict(reward.terms)) == ("call a tool", {"error": -0.02})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def chunks(:", "the module cannot be imported: SyntaxError: invalid syntax (line 1)"),
        ("import nothing_like_this", "the module cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "the module cannot be imported: ZeroDivisionError: division by zero"),
        ("while True: pass", "no answer: it took too long"),
        ("x = [0] * 10**9", "the module cannot be imported: MemoryError"),
        ("import os; os._exit(3)", "no answer: the program ended"),
    ],
)
def test_a_file_that_cannot_be_used_is_explained(text: str, said: str) -> None:
    env = lists()
    turn(env, "write_file", path="lists.py", text=text)
    answer = turn(env, "run_tests")[0]
    assert answer.startswith(f"0 of 8 tests pass\n{said}")
    assert "/tmp" not in answer


def test_what_the_file_prints_is_shown_and_cut() -> None:
    env = lists()
    turn(env, "write_file", path="lists.py", text=LISTS + "print('x' * 10_000)")
    assert turn(env, "run_tests")[0] == f"8 of 8 tests pass\nprinted: {'x' * 297}..."


def test_values_of_other_types_are_wrong() -> None:
    env = lists()
    turn(env, "write_file", path="lists.py", text=LISTS.replace("return list(", "return tuple("))
    assert turn(env, "submit")[1] == {"solved": 0.0}


def test_the_reference_earns_the_top_on_both_sides() -> None:
    env = CodeRepair(style="terse")
    for seed in (0, 1, 2, 3, 2**31, 2**31 + 1, 2**31 + 2, 2**31 + 3):
        messages, rewards = play(env, "reference", seed)
        assert sum(rewards) == pytest.approx(1.0)
        assert (rewards[-1].success, len(rewards)) == (True, 4)
        assert not any(message.content.startswith("error") for message in messages)
        assert env.task.name in (HELD_OUT if seed < 2**31 else TRAINING)


@pytest.mark.slow
def test_random_play_is_legal() -> None:
    env = CodeRepair(style="terse", num_bugs=2)
    for seed in range(4):
        messages, rewards = play(env, "random", seed)
        assert not any(message.content.startswith("error") for message in messages)
        assert sum(rewards) <= 1.0


def test_unknown_options_and_modules_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown options \\['modul'\\]; known: module"):
        CodeRepair(style="terse").reset(seed=0, options={"modul": "x"})
    with pytest.raises(UnknownNameError, match="did you mean 'roman'"):
        CodeRepair(style="terse").reset(seed=0, options={"module": "romans"})
