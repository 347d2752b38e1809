"""A rule between keys is stated in one place, and a caller of Python gets the sentence that a file gets.

A refusal in a room is an `if` that reads settings and raises. If it reads the key that a rule of `config/rules` reports
and another one that the rule reads, too, the rule stands in two places. What a room refuses, too, is a function of its
settings, which the rule calls.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.rules.rules import CONTRADICTIONS
from gspo_gym.errors import ConfigError
from gspo_gym.learning.optimizer import check_schedule
from gspo_gym.learning.settings import AdvantageSettings, LossSettings, OptimizerSettings
from gspo_gym.run.settings import LoopSettings, RunSize, TrainPlan

ROOT = Path(__file__).parents[4] / "gspo_gym"
ROOMS = ("engine", "learning", "rollout", "policy", "judge", "run")  # whose records are sections, or made of them
LEAVES = {key.rpartition(".")[2] for key in leaf_keys()}


def keys_of_rules() -> dict[str, frozenset[str]]:
    """The names of keys that each rule reads, by its key and number."""
    return {
        f"{rule.key}: rule {number}": frozenset(names_in(rule.check) & LEAVES)
        for number, rule in enumerate(CONTRADICTIONS)
    }


def names_in(function: Callable[..., Any]) -> set[str]:
    """The attributes that a function reads, and those that it calls of its own module or was given."""
    names = {name for code in codes(function.__code__) for name in code.co_names}
    parts = [cell.cell_contents for cell in function.__closure__ or ()]
    parts += [function.__globals__[name] for name in names if name in function.__globals__]
    names |= {part.rpartition(".")[2] for part in parts if isinstance(part, str)}
    own = [part for part in parts if inspect.isfunction(part) and part.__module__.startswith("gspo_gym.config.rules")]
    return names.union(*map(names_in, own))


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def refusals(tree: ast.AST) -> Iterator[tuple[int, frozenset[str]]]:
    """The line of each `if` that raises, and the names of keys in its condition."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        meaning: dict[str, set[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name | ast.Tuple):
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                for part, value in zip(parts, values, strict=False):
                    meaning.setdefault(ast.unparse(part), set()).update(attributes(value))
        for node in ast.walk(function):
            if isinstance(node, ast.If) and any(isinstance(statement, ast.Raise) for statement in node.body):
                named = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
                names = attributes(node.test).union(*(meaning.get(name, set()) for name in named))
                yield node.lineno, frozenset(names & LEAVES)


def attributes(node: ast.AST) -> set[str]:
    return {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def stated_twice(tree: ast.AST, rules: dict[str, frozenset[str]]) -> list[tuple[int, str]]:
    return [
        (line, rule)
        for line, names in refusals(tree)
        for rule, keys in rules.items()
        if len(names) > 1 and names <= keys and rule.partition(":")[0].rpartition(".")[2] in names
    ]


def test_no_room_refuses_what_a_rule_refuses() -> None:
    rules, places = keys_of_rules(), []
    reported = {rule.key.rpartition(".")[2] for rule in CONTRADICTIONS}
    for path in (ROOT / "types.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))):
        text = path.read_text(encoding="utf-8")
        if any(key in text for key in reported) and ("raise ConfigError" in text or "raise ValueError" in text):
            places += [
                f"{path.relative_to(ROOT)}:{line}: {rule}" for line, rule in stated_twice(ast.parse(text), rules)
            ]
    assert places == []


RULE = {"training.constant_groups: a rule": frozenset({"constant_groups", "baseline"})}


def test_a_rule_that_a_room_repeats_is_found() -> None:
    repeated = """
def __post_init__(self):
    loop, baseline = self.loop, self.advantages.baseline
    if loop.constant_groups != "keep" and baseline not in ("group", "leave_one_out"):
        raise ConfigError("constant_groups: ...")
"""
    assert stated_twice(ast.parse(repeated), RULE) == [(4, *RULE)]


def plan(**settings: Any) -> TrainPlan:
    return TrainPlan("GuessNumber", RunSize(1, 1, 8, 8, group_size=4), **settings)


DIRECT: dict[str, tuple[dict[str, Any], Callable[[], object]]] = {
    "groups that teach are left out": (
        {"training.constant_groups": "drop", "advantages.baseline": "batch"},
        lambda: plan(
            loop=LoopSettings(constant_groups="drop"), advantages=AdvantageSettings(baseline="batch", scale="batch")
        ),
    ),
    "samples are older than they may be": (
        {"training.weight_sync_interval": 2, "training.checkpoint_every_n_iters": 2, "vllm": {}},
        lambda: plan(loop=LoopSettings(weight_sync_interval=2)),
    ),
    "a dual clip at the clip": (
        {"loss.dual_clip": 1.01, "loss.clip_high": 0.01},
        lambda: LossSettings(dual_clip=1.01, clip_high=0.01),
    ),
    "a decay without a step": (
        {"optimizer.schedule": "cosine", "optimizer.num_warmup_steps": 40},
        lambda: check_schedule(OptimizerSettings(schedule="cosine", num_warmup_steps=40), 40),
    ),
}


@pytest.mark.parametrize("case", DIRECT)
def test_a_caller_of_python_is_refused_in_the_words_of_the_file(
    case: str, problems: Callable[[dict[str, Any]], list[str]]
) -> None:
    changes, call = DIRECT[case]
    (problem,) = problems(changes)
    with pytest.raises((ConfigError, ValueError)) as error:
        call()
    assert problem.partition(": ")[2] in str(error.value)
