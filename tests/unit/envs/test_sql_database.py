"""The read-only database: whatever is tried, the data stay as they were and the answer is an error text."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator

import pytest
from gspo_gym_envs.sql_analyst.database import Column, QueryError, ReadOnlyDatabase, Table

CATS = Table("cat", (Column("n", "INTEGER"), Column("name", "TEXT")), ((3, "Tom"), (5, "Kit"), (9, None)))
DOGS = Table("dog", (Column("n", "INTEGER"),), tuple((number,) for number in range(30)))


@pytest.fixture
def database() -> Iterator[ReadOnlyDatabase]:
    made = ReadOnlyDatabase([CATS, DOGS], max_rows=20, max_query_seconds=1.0)
    yield made
    made.close()


def contents(database: ReadOnlyDatabase) -> list[str]:
    """Everything in it, read past the locks: the statements that would rebuild it, for the main and the temp schema."""
    connection = database._connection
    connection.set_authorizer(None)
    try:
        temp = connection.execute("SELECT * FROM sqlite_temp_master").fetchall()
        attached = connection.execute("PRAGMA database_list").fetchall()
        return [*connection.iterdump(), str(temp), str(attached)]
    finally:
        connection.set_authorizer(database._authorize)


def test_a_select_gives_columns_rows_and_the_tables_it_reads(database: ReadOnlyDatabase) -> None:
    result = database.query("SELECT n + 1 AS more, name FROM cat WHERE n > 4")
    assert result.columns == ("more", "name")
    assert result.rows == ((6, "Kit"), (10, None))
    assert (result.has_more, result.tables_read) == (False, {"cat"})


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT COUNT(*) FROM cat", {"cat"}),
        ("SELECT 1", set()),
        ("SELECT cat.n FROM cat JOIN DOG ON dog.n = cat.n", {"cat", "dog"}),
        ("WITH few AS (SELECT n FROM dog) SELECT COUNT(*) FROM few", {"dog"}),
        ("SELECT COUNT(*) FROM (SELECT 1)", set()),
        ("SELECT name FROM sqlite_master", set()),
    ],
)
def test_the_tables_read_are_known_again_when_a_query_is_repeated(
    database: ReadOnlyDatabase, sql: str, tables: set[str]
) -> None:
    assert database.query(sql).tables_read == tables
    assert database.query(sql).tables_read == tables


NOT_ALLOWED = "not allowed, SELECT only"
ANY_TEXT = ""  # the wording is SQLite's or Python's and differs between versions


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("INSERT INTO cat VALUES (1, 'x')", NOT_ALLOWED),
        ("REPLACE INTO cat VALUES (1, 'x')", NOT_ALLOWED),
        ("UPDATE cat SET n = 0", NOT_ALLOWED),
        ("DELETE FROM cat", NOT_ALLOWED),
        ("WITH x AS (SELECT 1) DELETE FROM cat", NOT_ALLOWED),
        ("DROP TABLE cat", NOT_ALLOWED),
        ("ALTER TABLE cat RENAME TO cow", NOT_ALLOWED),
        ("CREATE TABLE x (a)", NOT_ALLOWED),
        ("CREATE TEMP TABLE x (a)", NOT_ALLOWED),
        ("CREATE VIEW v AS SELECT 1", NOT_ALLOWED),
        ("CREATE INDEX i ON cat (n)", NOT_ALLOWED),
        ("ATTACH ':memory:' AS x", NOT_ALLOWED),
        ("DETACH main", NOT_ALLOWED),
        ("PRAGMA query_only = OFF", NOT_ALLOWED),
        ("PRAGMA writable_schema = ON", NOT_ALLOWED),
        ("PRAGMA table_info(cat)", NOT_ALLOWED),
        ("SELECT * FROM pragma_table_info('cat')", NOT_ALLOWED),
        ("BEGIN", NOT_ALLOWED),
        ("SAVEPOINT s", NOT_ALLOWED),
        ("ANALYZE", NOT_ALLOWED),
        ("VACUUM INTO '/tmp/copy.db'", ANY_TEXT),
        ("SELECT load_extension('x')", "not authorized to use function: load_extension"),
        ("SELECT random()", "not authorized to use function: random"),
        ("SELECT current_timestamp", "not authorized to use function: current_timestamp"),
        ("SELECT writefile('/tmp/x', 'y')", "no such function: writefile"),
        ("SELECT zeroblob(1000000000)", "not authorized to use function: zeroblob"),
        ("SELECT 1; DROP TABLE cat", "one statement only"),
        ("SELECT 1; SELECT 2", "one statement only"),
        ("", "not a SELECT"),
        ("-- SELECT 1", "not a SELECT"),
        ("REINDEX", "not a SELECT"),
        ("SELECT * FROM cow", "no such table: cow"),
        ("SELECT m FROM cat", "no such column: m"),
        ("SELEC n FROM cat", 'near "SELEC": syntax error'),
        ("SELECT \x00", ANY_TEXT),
        ("SELECT '\ud800'", ANY_TEXT),
        ("SELECT replace(hex(printf('%400d', 1)), '2', printf('%400d', 1))", "string or blob too big"),
        ("SELECT '" + "x" * 5000 + "'", ANY_TEXT),
    ],
)
def test_what_is_not_one_harmless_select_is_refused_and_changes_nothing(
    database: ReadOnlyDatabase, sql: str, error: str
) -> None:
    before = contents(database)
    with pytest.raises(QueryError) as caught:
        database.query(sql)
    assert str(caught.value) == error or (error == ANY_TEXT and str(caught.value))
    assert contents(database) == before
    assert database.query("SELECT COUNT(*) FROM cat").rows == ((3,),)


def test_query_only_holds_even_where_the_authorizer_does_not(database: ReadOnlyDatabase) -> None:
    database._connection.set_authorizer(None)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        database._connection.execute("DELETE FROM cat")


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS,
        "WITH RECURSIVE c(x, y) AS (SELECT 1, printf('%900d', 1) UNION SELECT x + 1, y FROM c) SELECT MAX(y) FROM c",
        "SELECT COUNT(*) FROM dog a, dog b, dog c, dog d, dog e, dog f",
        "SELECT a.n FROM dog a, dog b, dog c, dog d, dog e ORDER BY a.n + b.n * c.n",
    ],
)
def test_an_endless_query_is_stopped_by_the_count_of_instructions(database: ReadOnlyDatabase, sql: str) -> None:
    database._max_query_seconds = 3600.0  # the clock cannot be what stops it
    with pytest.raises(QueryError, match="took too long"):
        database.query(sql)
    assert database.query("SELECT COUNT(*) FROM dog").rows == ((30,),)


def test_an_endless_query_is_stopped_by_the_clock() -> None:
    database = ReadOnlyDatabase([CATS], max_rows=20, max_query_seconds=0.0)
    with pytest.raises(QueryError, match="took too long"):
        database.query(ENDLESS)
    database.close()


def test_only_the_first_rows_of_a_huge_result_are_fetched(database: ReadOnlyDatabase) -> None:
    result = database.query("WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c")
    assert result.rows == tuple((number,) for number in range(1, 21))
    assert result.has_more


def test_exactly_as_many_rows_as_allowed_is_not_more(database: ReadOnlyDatabase) -> None:
    result = database.query("SELECT n FROM dog LIMIT 20")
    assert (len(result.rows), result.has_more) == (20, False)


def test_closing_twice_and_from_another_thread_is_fine() -> None:
    database = ReadOnlyDatabase([CATS], max_rows=1, max_query_seconds=1.0)
    thread = threading.Thread(target=database.close)
    thread.start()
    thread.join()
    database.close()
    with pytest.raises(QueryError, match="closed database"):
        database.query("SELECT 1")


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT printf('%.2147483647c', 'a')",  # 8 s in one function, in which no clock is looked at
        "SELECT format('%.*c', 2147483647, 'a')",
        "SELECT printf('%2147483647d', 1)",
    ],
)
def test_a_function_that_would_run_past_every_limit_is_refused(database: ReadOnlyDatabase, sql: str) -> None:
    with pytest.raises(QueryError, match="width above 1000"):
        database.query(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "printf('in 2024: %.2f and %05d, %s, %d%%', 1.005, 42, 'a', NULL)",
        "format('%-8s|%,d|%*d|%.*f', 'left', 1234567, 6, 7, 2, 3.14159)",
        "printf(NULL)",
        "printf('%c%q', 'xyz', 'it''s')",
    ],
)
def test_an_ordinary_printf_is_sqlites_own(database: ReadOnlyDatabase, sql: str) -> None:
    expected = sqlite3.connect(":memory:").execute(f"SELECT {sql}").fetchone()
    assert database.query(f"SELECT {sql}").rows == (expected,)
