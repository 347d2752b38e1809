"""A small SQLite database in memory on which SQL written by a model can do no harm.

Reading is all there is: an authorizer admits nothing but SELECT over the tables given and a list of functions, whatever
the statement is called; SQLite's own limits bound how large a value or statement may be, a count of virtual machine
instructions and a clock bound how long a query runs, and only the first rows of a result are fetched. The clock is not
looked at inside of a function, so those that could run long are bounded, and a worker process is killed at the limit.
Not a defence against bugs of SQLite itself.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gspo_gym.env.workers.limits import killed_after

Value = str | int | float | bytes | None
Row = tuple[Value, ...]

_ALLOWED_ACTIONS = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE})
_SCHEMA_TABLES = frozenset({"sqlite_master", "sqlite_schema"})
# Left out on purpose: load_extension, whatever depends on chance (random, randomblob) or on the clock by its name
# alone (current_date and its like), and whatever makes large values from small ones (zeroblob).
_ALLOWED_FUNCTIONS = frozenset(
    """
    abs avg ceil ceiling char coalesce concat concat_ws count cume_dist date datetime dense_rank first_value floor
    format glob group_concat hex ifnull iif instr julianday lag last_value lead length like likely log lower ltrim
    max min mod nth_value ntile nullif octet_length percent_rank pow power printf quote rank replace round
    row_number rtrim sign sqrt strftime string_agg substr substring sum time total trim trunc typeof unicode
    unixepoch unlikely upper
    """.split()  # noqa: SIM905 - as a list it would fill a page
)
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000,  # bytes of a value or row: ours have tens
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 20,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
_MAX_INSTRUCTIONS = 1_000_000  # of SQLite's virtual machine, some hundredths of a second; the same on any machine
_INSTRUCTIONS_PER_CHECK = 10_000
_MAX_FORMAT_WIDTH = 1_000  # of printf: '%.2147483647c' runs for seconds, whatever the limit on values
_CONVERSION = re.compile(r"%[-+ #!,0]*([0-9]+|\*)?(?:\.([0-9]+|\*)?)?[lh]*(.)", re.DOTALL)  # width, precision, kind
_GRACE_SECONDS = 0.5  # beyond the limit of a query, for a machine that is busy


class QueryError(Exception):
    """The SQL was refused or failed; the text is meant for the model that wrote it."""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: str  # INTEGER, REAL or TEXT


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The first rows of a result, whether there were more, and the tables of ours that the statement reads."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    has_more: bool
    tables_read: frozenset[str]


class ReadOnlyDatabase:
    """The given tables in a fresh SQLite database in memory that can only be queried.

    May be closed from another thread than the one that queries it, but not while it does.
    """

    def __init__(self, tables: Sequence[Table], *, max_rows: int, max_query_seconds: float) -> None:
        self.tables = {table.name: table for table in tables}
        self._max_rows = max_rows
        self._max_query_seconds = max_query_seconds
        self._tables_read: set[str] = set()
        self._deadline = 0.0
        self._checks_left = 0
        # No statement cache: the authorizer, which notes the tables, runs only when a statement is compiled.
        self._connection = sqlite3.connect(
            ":memory:", check_same_thread=False, isolation_level=None, cached_statements=0
        )
        self._printf = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        for table in tables:
            self._fill(table)
        self._lock_down()

    def query(self, sql: str) -> QueryResult:
        """Runs one SELECT statement.

        Raises:
            QueryError: it is no single SELECT, reads what it may not, fails, or takes too long.
        """
        self._tables_read.clear()
        self._deadline = time.monotonic() + self._max_query_seconds
        self._checks_left = _MAX_INSTRUCTIONS // _INSTRUCTIONS_PER_CHECK
        try:
            with killed_after(self._max_query_seconds + _GRACE_SECONDS):
                cursor = self._connection.execute(sql)
                try:
                    rows = cursor.fetchmany(self._max_rows + 1)
                    description = cursor.description
                finally:
                    cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            # Warning: several statements (from Python 3.12 on an Error); ValueError: a NUL or a lone surrogate.
            raise QueryError(self._explain(error)) from error
        if description is None:
            raise QueryError("not a SELECT")
        return QueryResult(
            columns=tuple(column[0] for column in description),
            rows=tuple(rows[: self._max_rows]),
            has_more=len(rows) > self._max_rows,
            tables_read=frozenset(self._tables_read),
        )

    def close(self) -> None:
        """Frees the database; doing it again changes nothing."""
        self._connection.close()
        self._printf.close()

    def _fill(self, table: Table) -> None:
        columns = ", ".join(f"{column.name} {column.type}" for column in table.columns)
        self._connection.execute(f"CREATE TABLE {table.name} ({columns})")
        marks = ", ".join("?" for _ in table.columns)
        self._connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.rows)

    def _lock_down(self) -> None:
        self._connection.execute("PRAGMA query_only = ON")  # a second lock, should the authorizer let a write pass
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
            self._printf.setlimit(limit, value)
        for name in ("printf", "format"):
            self._connection.create_function(name, -1, self._format, deterministic=True)
        self._connection.set_progress_handler(self._is_over_limit, _INSTRUCTIONS_PER_CHECK)
        self._connection.set_authorizer(self._authorize)

    def _authorize(
        self, action: int, first: str | None, second: str | None, _database: str | None, _trigger: str | None
    ) -> int:
        if action in _ALLOWED_ACTIONS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and first in self.tables:
            self._tables_read.add(first)
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ and (first in _SCHEMA_TABLES or second == ""):
            return sqlite3.SQLITE_OK  # no column: rows of a subquery or a WITH table are counted
        if action == sqlite3.SQLITE_FUNCTION and second is not None and second.lower() in _ALLOWED_FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _format(self, *values: Value) -> Value:
        """SQLite's printf, for widths and precisions that are not absurd."""
        given = iter(values[1:])
        for *widths, conversion in _CONVERSION.findall(str(values[0]) if values else ""):
            for width in widths:
                number = next(given, 0) if width == "*" else width or 0
                if abs(int(number or 0)) > _MAX_FORMAT_WIDTH:
                    raise ValueError(f"a width above {_MAX_FORMAT_WIDTH}")
            if conversion != "%":
                next(given, None)
        (made,) = self._printf.execute(f"SELECT printf({','.join('?' * len(values))})", values).fetchone()
        result: Value = made
        return result

    def _is_over_limit(self) -> bool:
        """Return whether to interrupt the query; SQLite asks every so many instructions."""
        self._checks_left -= 1
        return self._checks_left < 0 or time.monotonic() > self._deadline

    @staticmethod
    def _explain(error: Exception) -> str:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError) and text == "interrupted":
            return "took too long"
        if text == "not authorized":
            return "not allowed, SELECT only"
        if "one statement at a time" in text:
            return "one statement only"
        if text == "user-defined function raised exception":
            return f"printf: bad arguments, or a width above {_MAX_FORMAT_WIDTH}"
        return text
