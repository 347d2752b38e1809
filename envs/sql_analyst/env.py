"""SqlAnalyst: answer a business question over a small generated SQLite database by calling tools.

Schema, rows and question follow from the seed. SQL runs in the real SQLite, read-only and limited (`database.py`); the
answer is graded by running the gold SQL and comparing values (`grading.py`). `README.md` beside this file has the
rules, the rewards and a transcript.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from gspo_gym.env.core import PolicyFactory, SmallTask, ToolEnv
from gspo_gym.env.rewards import Reward
from gspo_gym.env.tools import Tool, ToolError, tool
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name

from .database import QueryError, QueryResult, ReadOnlyDatabase, Table, Value
from .grading import is_correct
from .policies import aggregate_of_needed_table, look_up_and_answer, random_aggregate
from .questions import LEVELS, Level, Question, draw_question
from .tables import draw_shop, draw_zoo

Style = Literal["terse", "verbose"]

_MAX_RESULT_CHARS = 2_000  # of one query's result as the model sees it


class SqlAnalyst(ToolEnv):
    """A question, a database, and the tools list_tables, describe, query and answer.

    The first call of `answer` terminates the episode; after `max_steps` turns without one it is truncated.

    Args:
        level: "tiny" (one-column tables, one aggregate; a few bytes a turn, for byte-level models), "easy" (one table),
            "medium" (a date range, a join), "hard" (rankings and lists over joins), or "mixed": easy to hard.
        max_steps: turns before truncation; the reference needs 6.
        max_rows: rows of a result that are shown, at least 10 (the longest gold answer has fewer).
        max_query_seconds: time limit of a query, > 0.
        tools: names of the tools to offer; None: all. "answer" must be among them. Fewer make the prompt shorter.
        correct_reward: for the right answer, > 0.
        progress_reward: for the first query that reads every table the answer depends on, >= 0.
        error_penalty: subtracted in a turn with a failed call or without any, >= 0.
        max_errors: such turns, the last of which ends the episode, at least 1; None: they do not end it.
        style: "verbose" (with instructions) or "terse" (the question alone).

    Attributes (read by the scripted policies):
        question: with its gold SQL. tables: of the database, by name. needed_tables: those that the gold SQL reads.
    """

    policies: ClassVar[Mapping[str, PolicyFactory]] = {
        "reference": look_up_and_answer,
        "random": random_aggregate,
        "needed_table": aggregate_of_needed_table,
    }
    small_task: ClassVar[SmallTask | None] = SmallTask(
        {
            "level": "tiny",
            "tools": ["query", "answer"],
            "max_steps": 2,
            "max_errors": 1,
            "progress_reward": 0.3,
            "correct_reward": 0.7,
        },
        policy="needed_table",
        style={"style": "terse"},
    )
    isolation = "process"  # it runs what a model wrote

    def __init__(
        self,
        *,
        level: Level = "mixed",
        max_steps: int = 8,
        max_rows: int = 20,
        max_query_seconds: float = 1.0,
        tools: Sequence[str] | None = None,
        correct_reward: float = 0.9,
        progress_reward: float = 0.1,
        error_penalty: float = 0.05,
        max_errors: int | None = None,
        style: Style = "verbose",
    ) -> None:
        if level not in LEVELS:
            raise UnknownNameError(f"SqlAnalyst: unknown level {level!r}; {nearest_name(level, LEVELS)}")
        if max_steps < 1 or max_rows < 10 or not max_query_seconds > 0:
            raise ConfigError(
                "SqlAnalyst: expected max_steps >= 1, max_rows >= 10 and max_query_seconds > 0, got "
                f"max_steps={max_steps}, max_rows={max_rows}, max_query_seconds={max_query_seconds}"
            )
        if max_errors is not None and max_errors < 1:
            raise ConfigError(f"SqlAnalyst: expected max_errors >= 1 or none, got {max_errors}")
        if not (correct_reward > 0 and progress_reward >= 0 and error_penalty >= 0):
            raise ConfigError(
                "SqlAnalyst: expected correct_reward > 0, progress_reward >= 0 and error_penalty >= 0, got "
                f"correct_reward={correct_reward}, progress_reward={progress_reward}, error_penalty={error_penalty}"
            )
        if style not in ("terse", "verbose"):
            raise ConfigError(f"SqlAnalyst: expected style 'terse' or 'verbose', got {style!r}")
        self.level, self.max_steps, self.style = level, max_steps, style
        self._max_errors, self._num_errors = max_errors, 0
        self._max_rows, self._max_query_seconds = max_rows, max_query_seconds
        self._offered = self._checked_tools(tools)
        self._weights = {"correct": correct_reward, "progress": progress_reward, "error": -error_penalty}
        self.reward_range = (-error_penalty * max_steps, correct_reward + progress_reward)
        self._database: ReadOnlyDatabase | None = None  # None: before the first reset, and after close
        self.question = Question(text="", gold_sql="")
        self.tables: Mapping[str, Table] = {}
        self.needed_tables: frozenset[str] = frozenset()
        self._has_progressed = False

    # -- tools ------------------------------------------------------------------------------------------------------

    @tool
    def list_tables(self) -> str:
        """Table names."""
        return ", ".join(self.tables)

    @tool
    def describe(self, table: str) -> str:
        """Columns of a table."""
        found = self.tables.get(table)
        if found is None:
            raise ToolError(f"no such table: {table}")
        return ", ".join(f"{column.name} {column.type}" for column in found.columns)

    @tool
    def query(self, sql: str) -> str:
        """Run a SELECT."""
        try:
            result = self._open_database().query(sql)
        except QueryError as error:
            raise ToolError(str(error)) from error
        if not self._has_progressed and result.tables_read >= self.needed_tables:
            self._has_progressed = True
            self.add_reward(Reward.weighted({"progress": 1.0}, self._weights, events=("looked_it_up",)))
        return _as_text(result)

    @tool
    def answer(self, value: str) -> str:
        """Give the final answer."""
        gold = [row[0] for row in self._open_database().query(self.question.gold_sql).rows]
        if is_correct(value, gold, is_ordered=self.question.is_ordered):
            self.finish(Reward.weighted({"correct": 1.0}, self._weights, events=("answered",), success=True))
            return "correct"
        self.finish(Reward({}, success=False))
        return f"wrong: {', '.join(_cell(item) for item in gold)}"

    # -- the episode ------------------------------------------------------------------------------------------------

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(each for each in super().tools if each.name in self._offered)

    def start(self, options: Mapping[str, Any]) -> str:
        if options:
            raise ConfigError(f"SqlAnalyst.reset: expected no options, got {sorted(options)}")
        self._close_database()
        world = draw_zoo(self.np_random) if self.level == "tiny" else draw_shop(self.np_random)
        database = ReadOnlyDatabase(world.tables, max_rows=self._max_rows, max_query_seconds=self._max_query_seconds)
        self._database, self.tables = database, database.tables
        self.question = draw_question(self.level, world, self.np_random, database.query)
        self.needed_tables = database.query(self.question.gold_sql).tables_read
        self._has_progressed, self._num_errors = False, 0
        if self.style == "terse":
            return self.question.text
        return (
            "Answer the question below from the database. Look at it with the tools; then call `answer` once, with the "
            f"bare value, or several values separated by commas. You have {self.max_steps} turns.\n{self.question.text}"
        )

    def no_tool_call(self, text: str) -> str:
        return "call a tool" if self.style == "terse" else str(super().no_tool_call(text))

    def end_turn(self) -> None:
        if self.num_failed_calls or not self.num_calls:
            self.add_reward(Reward.weighted({"error": 1.0}, self._weights))
            self._num_errors += 1
            if self._num_errors == self._max_errors:
                self.finish(Reward({}, success=False))
                return
        if self.num_turns >= self.max_steps:
            self.finish(Reward({}, success=False), truncated=True)

    def close(self) -> None:
        self._close_database()
        super().close()

    def _open_database(self) -> ReadOnlyDatabase:
        assert self._database is not None, "tools are called only while an episode is played"
        return self._database

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _checked_tools(self, names: Sequence[str] | None) -> frozenset[str]:
        known = [each.name for each in super().tools]
        if names is None:
            return frozenset(known)
        for name in names:
            if name not in known:
                raise UnknownNameError(f"SqlAnalyst: unknown tool {name!r}; {nearest_name(name, known)}")
        if "answer" not in names:
            raise ConfigError(f"SqlAnalyst: expected 'answer' among the tools, got {list(names)}")
        return frozenset(names)


def _as_text(result: QueryResult) -> str:
    """One row a line, cells separated by "|", with a line of names above if there are several columns."""
    if not result.rows:
        return "no rows"
    lines = ["|".join(map(_cell, row)) for row in result.rows]
    if len(result.columns) > 1:
        lines.insert(0, "|".join(result.columns))
    text = "\n".join(lines)
    if len(text) > _MAX_RESULT_CHARS:
        return text[:_MAX_RESULT_CHARS] + "\n... cut"
    return text + "\n... more rows" if result.has_more else text


def _cell(value: Value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, float):
        return f"{value:.10g}"  # without the rounding error of the last digits: 3916.44, not 3916.4400000000005
    return str(value)
