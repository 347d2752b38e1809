"""The hand-written players of SqlAnalyst. They call only the tools that the environment offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo_gym.env.core import ScriptedPolicy
from gspo_gym.types import Message, ToolCall

Call = tuple[str, Mapping[str, Any]]

_AGGREGATES = ("count", "max", "min", "sum")


def look_up_and_answer(env: Any, _rng: np.random.Generator) -> ScriptedPolicy:
    """Lists the tables, describes those it needs, runs the gold SQL and answers what that shows.

    `env` is a `SqlAnalyst` after `reset` (Any: `PolicyFactory` fixes the type).
    """
    describe = [("describe", {"table": table}) for table in sorted(env.needed_tables)]
    return _plan(env, [("list_tables", {}), *describe, ("query", {"sql": env.question.gold_sql})])


def random_aggregate(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Queries a random aggregate of a random column and answers what that shows; legal throughout, aimed at nothing.

    Before it, each with one chance in two, it lists the tables and describes a random one.
    """
    calls: list[Call] = []
    if rng.random() < 0.5:
        calls.append(("list_tables", {}))
    if rng.random() < 0.5:
        calls.append(("describe", {"table": str(rng.choice(sorted(env.tables)))}))
    return _plan(env, [*calls, _aggregate_of_one(sorted(env.tables), env, rng)])


def aggregate_of_needed_table(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Queries a random aggregate of a random column of a table that the question needs, and answers what that shows."""
    return _plan(env, [_aggregate_of_one(sorted(env.needed_tables), env, rng)])


def _aggregate_of_one(tables: Sequence[str], env: Any, rng: np.random.Generator) -> Call:
    table = env.tables[str(rng.choice(tables))]
    column = str(rng.choice([column.name for column in table.columns if column.type != "TEXT"]))
    return "query", {"sql": f"SELECT {rng.choice(_AGGREGATES)}({column}) FROM {table.name}"}


def _plan(env: Any, calls: Sequence[Call]) -> ScriptedPolicy:
    """Makes the calls one a turn, then answers with what the last one showed; leaves out tools that are not offered."""
    offered = {tool.name for tool in env.tools}
    planned = [call for call in calls if call[0] in offered]

    def play(messages: Sequence[Message]) -> Message:
        turn = sum(message.role == "assistant" for message in messages)
        if turn < len(planned):
            name, arguments = planned[turn]
        else:
            name, arguments = "answer", {"value": ", ".join(messages[-1].content.splitlines())}
        return Message("assistant", "", tool_calls=(ToolCall(f"call_{turn}", name, arguments),))

    return play
