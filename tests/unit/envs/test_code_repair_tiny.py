"""CodeRepair at level tiny: exact transcripts, what each repair earns, what is held out, and cheats."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from gspo_gym_envs.code_repair import grading
from gspo_gym_envs.code_repair.env import CodeRepair
from gspo_gym_envs.code_repair.tiny import FAMILIES, FUNCTIONS, OF_LIST, OF_TWO, operator_in, wrong_operators

from gspo_gym.errors import ConfigError, UnknownNameError
from gspo_gym.types import Message, ToolCall

FIRST_TRAINING_SEED = 2**31

# What the names say, in words of our own: the operator that belongs into each function.
RIGHT = {
    "sum": "+",
    "difference": "-",
    "product": "*",
    "quotient": "//",
    "remainder": "%",
    "below": "<",
    "above": ">",
    "same": "==",
    "largest": "max",
    "smallest": "min",
    "total": "sum",
    "length": "len",
}


def turn(env: CodeRepair, name: str, **arguments: object) -> tuple[str, dict[str, float], bool]:
    """(what was said, reward terms, terminated)"""
    [message], reward, terminated, _, _ = env.step(Message("assistant", "", (ToolCall("c", name, arguments),)))
    return message.content, dict(reward.terms), terminated


TWO_TOOLS = ("replace", "submit")


def tiny(function: str = "difference", seed: int = 0, **kwargs: object) -> CodeRepair:
    env = CodeRepair(style="terse", level="tiny", **kwargs)
    env.reset(seed=seed, options={"function": function})
    return env


def earned_by(env: CodeRepair, new: str) -> float:
    """What the operator in the wrong one's place earns."""
    return turn(env, "fix", new=new)[1].get("solved", 0.0)


def earned_by_text(env: CodeRepair, text: str) -> float:
    """What the whole file earns."""
    turn(env, "write_file", path="f.py", text=text)
    return turn(env, "submit")[1].get("solved", 0.0)


@pytest.mark.parametrize("function", RIGHT)
def test_the_right_operator_earns_everything_and_each_other_one_nothing(function: str) -> None:
    family = [operator for name, operator in RIGHT.items() if FAMILIES[name] is FAMILIES[function]]
    earned = {operator: earned_by(tiny(function, seed=FIRST_TRAINING_SEED), operator) for operator in family}
    assert earned == {operator: float(operator == RIGHT[function]) for operator in family}


def test_the_file_and_its_failing_test_are_shown_at_once() -> None:
    env = CodeRepair(style="terse", level="tiny")
    assert env.reset(seed=1)[0] == "f.py:\ndef below(p, v):\n    return p + v\nfails below(1, 1) -> False"
    assert [each.name for each in env.tools] == ["fix"]
    assert turn(env, "fix", new="<") == ("all tests pass", {"solved": 1.0}, True)
    said = CodeRepair(level="tiny", style="verbose").reset(seed=1)[0]
    assert said.startswith("f.py:\ndef below(p, v):\n    return p + v\nfails below(1, 1) -> False\n")
    assert "You have 12 turns." in said


def test_the_tools_of_the_full_level_repair_it_too() -> None:
    env = tiny("below", seed=1, tools=TWO_TOOLS)
    assert turn(env, "replace", path="f.py", old="-", new="<")[1] == {"error": -0.02}
    assert turn(env, "replace", path="f.py", old="+", new="<") == ("written", {}, False)
    assert turn(env, "submit") == ("all tests pass", {"solved": 1.0}, True)


def test_a_repair_in_other_words_goes_through_the_sandbox_and_is_right() -> None:
    env = tiny("product", tools=["write_file", "submit"])
    assert earned_by_text(env, "def product(a, b): return sum([a] * b)") == 1.0


def test_only_texts_of_this_package_are_run_without_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxed = []
    run = grading.run_sandboxed
    monkeypatch.setattr(grading, "run_sandboxed", lambda *args, **kwargs: sandboxed.append(1) or run(*args, **kwargs))
    assert earned_by(tiny(), "-") == 1.0
    assert earned_by(tiny(), "*") == 0.0
    assert len(sandboxed) == 0
    assert earned_by(tiny(), "- 0 -") == 1.0  # one character more, and it is the model's
    assert len(sandboxed) == 1


@pytest.mark.parametrize("function", ["quotient", "length"])
def test_the_sandbox_says_of_each_of_our_texts_what_is_said_without_it(function: str) -> None:
    task = tiny(function).task
    tests = (*task.visible, *task.hidden)
    assert len(task.own_texts) == len(FAMILIES[function].operators)
    for text in task.own_texts:
        assert grading.run_own_tests(text, tests) == grading.run_tests("f", text, tests)


CHEATS = {
    "leaving with success": "raise SystemExit(0)",
    "leaving at the first call": "import os\ndef difference(a, b): os._exit(0)",
    "printing a verdict": "print('all tests pass')\ndef difference(a, b): print('ok')",
    "objects that equal everything": (
        "class Any(int):\n    __eq__ = lambda *a: True\n    __ne__ = lambda *a: False\n    __hash__ = lambda *a: 0\n"
        "    __repr__ = lambda *a: repr(object)\n"
        "def difference(a, b): return Any()"
    ),
    "patching the runner": (
        "import __main__, builtins\n__main__.answer = lambda *a: ('returned', 1)\nbuiltins.repr = lambda x: '1'\n"
        "def difference(a, b): return 1"
    ),
    "reading the bundled code": (
        "from gspo_gym_envs.code_repair.tiny import FAMILIES\ndef difference(a, b): return a - b"
    ),
    "no Python": "all tests pass",
    "an empty file": "",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing(name: str) -> None:
    assert earned_by_text(tiny(tools=["write_file", "submit"]), CHEATS[name]) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_returning_what_the_shown_test_expects_earns_nothing(seed: int) -> None:
    env = tiny("difference", seed=seed, tools=["write_file", "submit", "run_tests"])
    [shown] = env.task.visible
    turn(env, "write_file", path="f.py", text=f"def difference(a, b): return {shown.expected[1]!r}")
    assert turn(env, "run_tests") == ("1 of 1 tests pass", {"progress": 0.3}, False)
    assert turn(env, "submit")[1] == {"progress": -0.3, "solved": 0.0}


@pytest.mark.parametrize("operator", ["+", "==", "max"])
def test_the_same_repair_for_every_task_earns_as_little_as_random_play(operator: str) -> None:
    env = CodeRepair(style="terse", level="tiny")
    solved = 0
    for seed in range(120):
        env.reset(seed=seed)
        solved += operator_in(env.task.solution) == operator
    assert solved / 120 < 0.2  # one function in twelve; random play within a family: 8/12 * 1/7 + 4/12 * 1/3 = 0.21


@pytest.mark.parametrize(
    ("functions", "kind"),
    [
        (("sum", "difference", "product", "quotient", "remainder"), {"+", "-", "*", "//", "%"}),
        (("below", "above", "same"), {"<", ">", "=="}),
        (("largest", "smallest", "total", "length"), {"max", "min", "sum", "len"}),
    ],
)
def test_the_player_of_the_right_kind_tries_every_other_operator_of_its_kind(
    functions: tuple[str, ...], kind: set[str]
) -> None:
    env, rng = CodeRepair(style="terse", level="tiny"), np.random.default_rng(0)
    for function in functions:
        env.reset(seed=FIRST_TRAINING_SEED, options={"function": function})
        [call] = {env.policies["right_kind"](env, rng)([]).tool_calls[0].name for _ in range(3)}
        tried = {env.policies["right_kind"](env, rng)([]).tool_calls[0].arguments["new"] for _ in range(100)}
        assert call == "fix"
        assert tried == kind - {operator_in(env.source)}


def test_held_out_bugs_are_never_seen_in_training_but_their_operators_are() -> None:
    assert {name: family.operators[name] for name, family in FAMILIES.items()} == RIGHT
    for family in (OF_TWO, OF_LIST):
        seen = {wrong for name in family.operators for wrong in wrong_operators(name, is_held_out=False)}
        held_out = {wrong for name in family.operators for wrong in wrong_operators(name, is_held_out=True)}
        assert seen == held_out == set(family.operators.values())
    env = CodeRepair(style="terse", level="tiny")
    sides: list[set[tuple[str, str]]] = []
    for first in (0, FIRST_TRAINING_SEED):
        sides.append(set())
        for seed in range(first, first + 150):
            env.reset(seed=seed)
            sides[-1].add((env.task.visible[0].call[0], operator_in(env.task.source)))
    assert len(sides[0]) == len(FUNCTIONS) == 12
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("seed", [0, 1, FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 1])
@pytest.mark.parametrize("tools", [None, TWO_TOOLS])
def test_the_reference_earns_the_top_and_random_play_is_legal(seed: int, tools: tuple[str, ...] | None) -> None:
    num_turns = 2 if tools else 1
    for policy, top in (("reference", 1.0), ("random", None), ("right_kind", None)):
        env = CodeRepair(style="terse", level="tiny", tools=tools)
        messages = [Message("user", env.reset(seed=seed)[0])]
        player = env.policies[policy](env, np.random.default_rng((seed, 1)))
        total = 0.0
        for number in range(num_turns):
            action = player(messages)
            observation, reward, terminated, _, _ = env.step(action)
            messages += [action, *observation]
            total += float(reward)
            assert not observation[0].content.startswith("error")
            assert terminated == (number == num_turns - 1)
        assert total in ((top,) if top else (0.0, 1.0))


# Of openings, files, bugs and tests on these seeds, taken before there was a level.
DIGESTS = {
    1: "29ec43ce8a94c9a027fd93f4c619ecc3d2a8993b4c94f5288520d2d630a14415",
    2: "8192fbbe4ce9c67cb3844106b1dd338287892602887755f46bcc6afc844449ec",
}


@pytest.mark.parametrize("num_bugs", DIGESTS)
def test_the_full_level_is_what_it_was_before_there_were_levels(num_bugs: int) -> None:
    env = CodeRepair(style="terse", num_bugs=num_bugs)
    digest = hashlib.sha256()
    for seed in (*range(4), *range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 4)):
        said, task = env.reset(seed=seed)[0], env.task
        tests = [[(test.call, test.expected) for test in side] for side in (task.visible, task.hidden)]
        facts = (said, task.name, task.source, task.solution, task.bugs, *tests, task.num_passing)
        digest.update(repr(facts).encode())
    assert digest.hexdigest() == DIGESTS[num_bugs]


def test_options_of_the_other_level_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown options \\['module'\\]; known: function"):
        CodeRepair(style="terse", level="tiny").reset(seed=0, options={"module": "roman"})
    with pytest.raises(UnknownNameError, match="did you mean 'sum'"):
        CodeRepair(style="terse", level="tiny").reset(seed=0, options={"function": "sums"})
