"""What a rule between keys is; the rules themselves are in `rules.py` and its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo_gym.config.words import Problem, show

OTHER_KEYS = ".*"  # after the name of an open table: those of its keys that are not ours, as a table


@dataclass(frozen=True, slots=True)
class Rule:
    """Looks at a few keys and says what is wrong, or None. The problem, if there is one, is the first key's.

    It is asked only if all of its keys are valid by themselves, so that all problems of a file can be reported at once.

    Attributes:
        keys: dotted. The keys of a section that is not there are None; an optional section's own name says whether it
            is there, and with `OTHER_KEYS` after it what an open one holds besides our keys.
        check: takes the values of all keys.
    """

    keys: tuple[str, ...]
    check: Callable[..., str | None]


def find_problem(rule: Rule, values: Mapping[str, Any]) -> Problem | None:
    """What the rule says about values (Any: of all their types) that are valid by themselves."""
    if any(key not in values for key in rule.keys):
        return None
    text = rule.check(*(values[key] for key in rule.keys))
    return None if text is None else Problem(rule.keys[0].removesuffix(OTHER_KEYS), text)


def no_effect(key: str, default: Any, other: str, acts: Callable[[Any], bool], advice: str) -> Rule:
    """The rule that `key` keeps its default (Any: of its type) unless `acts` is true of the other key's value.

    A key that would be accepted and do nothing is taken for a mistake.
    """

    def check(value: Any, other_value: Any) -> str | None:
        if value is None or value == default or acts(other_value):
            return None
        return f"has no effect with {other} = {show(other_value)}: {advice}, or remove this"

    return Rule((key, other), check)
