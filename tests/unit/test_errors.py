"""The exception tree, and the hint for misspelt names."""

from __future__ import annotations

import inspect

import pytest

from gspo_gym import errors

# Written out, so that changing a base class is a decision and not a slip: callers catch these.
TREE = {
    "ConfigError": ("GymError", ValueError),
    "UnknownNameError": ("GymError", LookupError),
    "MissingExtraError": ("GymError", ImportError),
    "ContractError": ("GymError", ValueError),
    "TemplateError": ("GymError", ValueError),
    "ContextOverflowError": ("GymError", ValueError),
    "RecordError": ("GymError", ValueError),
    "UnscoredError": ("GymError", ValueError),
    "UsageError": ("GymError", RuntimeError),
    "EnvError": ("GymError", RuntimeError),
    "EnvTimeoutError": ("EnvError", TimeoutError),
    "EnvDiedError": ("EnvError", RuntimeError),
    "ActionLimitError": ("EnvError", RuntimeError),
    "EngineError": ("GymError", RuntimeError),
    "EngineTimeoutError": ("EngineError", TimeoutError),
    "EngineLostError": ("EngineError", RuntimeError),
    "EngineMismatchError": ("EngineError", RuntimeError),
    "EnginePoisonedError": ("EngineError", RuntimeError),
    "ServiceError": ("GymError", RuntimeError),
    "PlacementError": ("GymError", RuntimeError),
    "RolloutError": ("GymError", RuntimeError),
    "StuckError": ("GymError", RuntimeError),
    "NonFiniteError": ("GymError", ArithmeticError),
    "CheckpointError": ("GymError", OSError),
    "StorageError": ("GymError", OSError),
}


def test_every_error_is_also_the_standard_error_that_it_refines() -> None:
    found = {name: value for name, value in vars(errors).items() if inspect.isclass(value) and name != "GymError"}
    found = {name: value for name, value in found.items() if issubclass(value, errors.GymError)}
    assert set(found) == set(TREE)
    for name, (parent, standard) in TREE.items():
        assert getattr(errors, parent) in found[name].__mro__
        assert issubclass(found[name], standard)


@pytest.mark.parametrize("name", TREE)
def test_every_error_stands_in_the_tree_that_the_docstring_draws(name: str) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if f" {name} " in line)
    assert TREE[name][1].__name__ in line


@pytest.mark.parametrize("name", TREE)
def test_an_error_says_its_message_and_nothing_else(name: str) -> None:
    assert str(getattr(errors, name)("what was expected, what came")) == "what was expected, what came"


def test_the_nearest_name_is_offered_and_if_none_is_near_all_are_listed_in_order() -> None:
    assert errors.nearest_name("gropu_size", ["group_size", "batch_size"]) == "did you mean 'group_size'?"
    assert errors.nearest_name("x", ["b", "a"]) == "known: a, b"
    assert errors.nearest_name("x", []) == "known: (none)"
