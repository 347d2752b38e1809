"""SqlAnalyst: exact transcripts, what earns and costs, the safety of the data, and what scripted play reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence

import gymnasium
import numpy as np
import pytest
from gspo_gym_envs.sql_analyst.env import SqlAnalyst
from gspo_gym_envs.sql_analyst.grading import is_correct
from gymnasium.utils.env_checker import check_env

from gspo_gym.env.rewards import Reward
from gspo_gym.types import Message, ToolCall

Call = tuple[str, dict[str, object]]


def calls(*wanted: Call) -> Message:
    return Message(
        "assistant", "", tool_calls=tuple(ToolCall(f"c{i}", name, args) for i, (name, args) in enumerate(wanted))
    )


def query(sql: str) -> Message:
    return calls(("query", {"sql": sql}))


def answer(value: str) -> Message:
    return calls(("answer", {"value": value}))


def heard(observation: str | Sequence[Message]) -> list[str]:
    return [observation] if isinstance(observation, str) else [message.content for message in observation]


def turn(env: SqlAnalyst, action: Message | str) -> tuple[list[str], dict[str, float], bool, bool]:
    """(texts heard, reward terms, terminated, truncated)"""
    observation, reward, terminated, truncated, _ = env.step(action)
    return heard(observation), dict(reward.terms), terminated, truncated


def zoo(question: str, **kwargs: object) -> SqlAnalyst:
    """An environment of level tiny at the first seed that asks the question."""
    env = SqlAnalyst(style="terse", level="tiny", **kwargs)
    for seed in range(10_000):
        if env.reset(seed=seed)[0] == question:
            return env
    raise AssertionError(f"no seed asks {question!r}")


def play(env: SqlAnalyst, policy: str, seed: int) -> tuple[list[Message], list[Reward], bool]:
    """(conversation, rewards, truncated) of a hand-written player."""
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
            return messages, rewards, truncated


def numbers_in(env: SqlAnalyst, table: str) -> list[int]:
    return [int(row[0]) for row in env.tables[table].rows]


def test_a_won_tiny_episode_reads_exactly_so() -> None:
    env = zoo("sum of cat?")
    total = sum(numbers_in(env, "cat"))
    assert turn(env, calls(("list_tables", {}))) == ([", ".join(sorted(env.tables))], {}, False, False)
    assert turn(env, calls(("describe", {"table": "cat"}))) == (["n INTEGER"], {}, False, False)
    assert turn(env, query("SELECT sum(n) FROM cat")) == ([str(total)], {"progress": 0.1}, False, False)
    assert turn(env, answer(str(total))) == (["correct"], {"correct": 0.9}, True, False)


def test_a_wrong_answer_ends_the_episode_with_nothing() -> None:
    env = zoo("max of dog?")
    observation, reward, terminated, truncated, _ = env.step(answer("0"))
    assert heard(observation) == [f"wrong: {max(numbers_in(env, 'dog'))}"]
    assert (float(reward), reward.success, terminated, truncated) == (0.0, False, True, False)


def test_a_right_guess_without_looking_earns_less_than_the_top() -> None:
    env = zoo("count of owl?")
    assert turn(env, answer(str(len(numbers_in(env, "owl"))))) == (["correct"], {"correct": 0.9}, True, False)


def test_the_first_observation_is_the_question_and_verbose_adds_instructions() -> None:
    terse, verbose = SqlAnalyst(style="terse", level="easy"), SqlAnalyst(level="easy", style="verbose", max_steps=5)
    assert verbose.reset(seed=3)[0] == (
        "Answer the question below from the database. Look at it with the tools; then call `answer` once, with the "
        f"bare value, or several values separated by commas. You have 5 turns.\n{terse.reset(seed=3)[0]}"
    )


def test_progress_is_paid_once_and_only_for_the_tables_that_matter() -> None:
    env = zoo("min of cat?")
    other = next(name for name in env.tables if name != "cat")
    assert turn(env, query(f"SELECT min(n) FROM {other}"))[1] == {}
    assert turn(env, query("SELECT count(*) FROM cat"))[1] == {"progress": 0.1}
    assert turn(env, query("SELECT min(n) FROM cat"))[1] == {}


@pytest.mark.parametrize(
    ("action", "texts"),
    [
        (query("SELEC 1"), ['error: near "SELEC": syntax error']),
        (query("SELECT m FROM cat"), ["error: no such column: m"]),
        (calls(("describe", {"table": "cow"})), ["error: no such table: cow"]),
        (
            calls(("describe", {"table": "cat"}), ("describe", {"table": "cow"})),
            ["n INTEGER", "error: no such table: cow"],
        ),
        ("the answer is 7", ["call a tool"]),
        (Message("assistant", "the answer is 7"), ["call a tool"]),
    ],
)
def test_a_turn_with_a_failed_call_or_none_costs_a_little_and_is_explained(
    action: Message | str, texts: list[str]
) -> None:
    assert turn(zoo("sum of cat?"), action) == (texts, {"error": -0.05}, False, False)


@pytest.mark.parametrize(
    "call", [("qury", {"sql": "SELECT 1"}), ("query", {"sql": 3}), ("query", {}), ("answer", {"text": "7"})]
)
def test_unknown_tools_and_wrong_arguments_cost_the_same(call: Call) -> None:
    texts, terms, terminated, truncated = turn(zoo("sum of cat?"), calls(call))
    assert texts[0].startswith("error: ")
    assert (terms, terminated, truncated) == ({"error": -0.05}, False, False)


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("SELECT 1 WHERE 1 < 0", "no rows"),
        ("SELECT NULL", "NULL"),
        ("SELECT 0.1 + 0.2", "0.3"),
        ("SELECT x'00ff' AS a, 'b|c' AS b", "a|b\nx'00ff'|b|c"),
    ],
)
def test_cells_are_shown_plainly(sql: str, text: str) -> None:
    assert turn(zoo("sum of cat?"), query(sql)) == ([text], {}, False, False)


def test_an_answer_that_could_not_be_read_costs_a_turn() -> None:
    env = zoo("sum of cat?", max_steps=2)
    observation, reward, terminated, truncated, _ = env.invalid_action("bad JSON")
    assert "bad JSON" in heard(observation)[0]
    assert (dict(reward.terms), terminated, truncated) == ({"error": -0.05}, False, False)
    *_, truncated, _ = env.invalid_action("bad JSON")
    assert truncated


def test_two_failed_calls_in_one_turn_cost_once_and_calls_after_the_answer_are_not_made() -> None:
    env = zoo("sum of cat?")
    assert turn(env, calls(("query", {"sql": "x"}), ("query", {"sql": "y"})))[1] == {"error": -0.05}
    texts, terms, terminated, _ = turn(env, calls(("answer", {"value": "x"}), ("answer", {"value": "7"})))
    assert texts[0].startswith("wrong")
    assert texts[1].startswith("error: ")
    assert (terms, terminated) == ({}, True)


def test_running_out_of_turns_is_a_truncation() -> None:
    env = zoo("sum of cat?", max_steps=2)
    assert turn(env, query("SELECT 1")) == (["1"], {}, False, False)
    observation, reward, terminated, truncated, _ = env.step(query("SELECT 1"))
    assert (heard(observation), reward.success, terminated, truncated) == (["1"], False, False, True)


def test_answering_in_the_last_turn_is_no_truncation() -> None:
    env = zoo("sum of cat?", max_steps=1)
    assert turn(env, answer("0"))[2:] == (True, False)


def test_a_result_is_shown_as_lines_of_cells_and_cut_at_the_row_limit() -> None:
    env = SqlAnalyst(style="terse", level="easy", max_rows=10)
    env.reset(seed=0)
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    assert turn(env, query(f"{endless} SELECT x FROM c"))[0] == ["1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n... more rows"]
    assert turn(env, query(f"{endless} SELECT x AS a, x * x AS b FROM c LIMIT 2"))[0] == ["a|b\n1|1\n2|4"]
    [text] = turn(env, query(f"{endless} SELECT printf('%500d', x) FROM c"))[0]
    assert len(text) == 2_000 + len("\n... cut")


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO {t} VALUES (1)",
        "UPDATE {t} SET n = 0",
        "DROP TABLE {t}",
        "ATTACH 'x.db' AS x",
        "PRAGMA query_only = OFF",
        "SELECT 1; DROP TABLE {t}",
        "SELECT load_extension('x')",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c",
    ],
)
def test_attacks_are_answered_with_an_error_and_the_answer_stays_the_same(sql: str) -> None:
    env = zoo("sum of cat?")
    total = str(sum(numbers_in(env, "cat")))
    texts, terms, *_ = turn(env, query(sql.format(t="cat")))
    assert texts[0].startswith("error: ")
    assert terms == {"error": -0.05}
    assert turn(env, query("SELECT sum(n) FROM cat"))[0] == [total]
    assert turn(env, answer(total))[0] == ["correct"]


LEVELS = ["tiny", "easy", "medium", "hard", "mixed"]


@pytest.mark.parametrize("level", LEVELS)
def test_reference_earns_exactly_the_top_on_200_seeds(level: str) -> None:
    env = SqlAnalyst(style="terse", level=level)
    for seed in range(200):
        _, rewards, truncated = play(env, "reference", seed)
        assert sum(rewards) == env.reward_range[1] == 1.0
        assert (rewards[-1].success, truncated) == (True, False)
        assert len(rewards) <= 6


@pytest.mark.parametrize("level", LEVELS)
def test_random_play_is_legal_and_far_from_the_top(level: str) -> None:
    env = SqlAnalyst(style="terse", level=level)
    wins = 0
    for seed in range(200):
        messages, rewards, _ = play(env, "random", seed)
        assert all("error" not in reward.terms for reward in rewards)
        assert messages[-2].tool_calls[0].arguments == {"value": messages[-3].content}
        wins += rewards[-1].success is True
    assert wins < 50  # tiny: one of 12 pairs of table and aggregate, and coincidences; others less


@pytest.mark.parametrize("level", LEVELS)
def test_the_player_of_the_needed_table_reads_one_that_the_question_needs(level: str) -> None:
    env = SqlAnalyst(style="terse", level=level)
    for seed in range(40):
        messages, _, _ = play(env, "needed_table", seed)
        table = str(messages[1].tool_calls[0].arguments["sql"]).split()[-1]
        assert table in env.needed_tables


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_seed_gives_the_same_episode(level: str) -> None:
    first, second = SqlAnalyst(style="terse", level=level), SqlAnalyst(style="terse", level=level)
    second.reset(seed=77)
    for seed in range(10):
        assert play(first, "reference", seed)[0] == play(second, "reference", seed)[0]


def test_a_thousand_random_episodes_stay_in_the_stated_range() -> None:
    env = SqlAnalyst(style="terse", level="tiny", max_steps=4)
    low, high = env.reward_range
    rng = np.random.default_rng(0)
    seen = set()
    for seed in range(1000):
        env.reset(seed=seed)
        names = [*env.tables, "cow"]
        total, done = 0.0, False
        while not done:
            moves = [
                calls(("list_tables", {})),
                calls(("describe", {"table": str(rng.choice(names))})),
                query(f"SELECT {rng.choice(['sum', 'max', 'mux'])}(n) FROM {rng.choice(names)}"),
                calls(("query", {"sql": f"SELECT sum(n) FROM {names[0]}"}), ("query", {})),
                answer(str(rng.integers(1, 10))),
                Message("assistant", "7"),
            ]
            _, reward, terminated, truncated, _ = env.step(moves[int(rng.integers(len(moves)))])
            total, done = total + reward, terminated or truncated
        assert low - 1e-12 <= total <= high + 1e-12  # a few decimal fractions: rounding below 1e-15
        seen.add(round(total, 2))
    assert {0.0, -0.2, 0.1, 0.9} <= seen


def test_the_tools_offered_can_be_fewer_and_the_players_keep_to_them() -> None:
    env = SqlAnalyst(style="terse", level="tiny", tools=["query", "answer"])
    for policy in ("reference", "random"):
        messages, rewards, _ = play(env, policy, 0)
        assert len(rewards) == 2
        assert [m.tool_calls[0].name for m in messages if m.role == "assistant"] == ["query", "answer"]
    assert [tool.name for tool in env.tools] == ["query", "answer"]
    env.reset(seed=0)
    assert turn(env, calls(("list_tables", {})))[1] == {"error": -0.05}


def test_the_last_error_that_is_allowed_ends_the_episode() -> None:
    env = SqlAnalyst(style="terse", level="tiny", max_errors=2)
    for seed in (0, 1):  # errors are counted anew in each episode
        env.reset(seed=seed)
        assert turn(env, Message("assistant", "7"))[1:] == ({"error": -0.05}, False, False)
        assert turn(env, query("SELECT 1"))[1:] == ({}, False, False)
        _, reward, terminated, truncated, _ = env.step(query("SELECT sum(n) FROM cow"))
        assert (dict(reward.terms), reward.success) == ({"error": -0.05}, False)
        assert (terminated, truncated) == (True, False)


def test_the_tools_take_few_bytes_of_a_prompt() -> None:
    schemas = [tool.schema for tool in SqlAnalyst(style="terse").tools]
    assert [schema["function"]["name"] for schema in schemas] == ["list_tables", "describe", "query", "answer"]
    assert len(json.dumps(schemas)) < 800
    assert all(len(schema["function"]["description"]) <= 24 for schema in schemas)


def test_the_gold_answer_is_read_from_the_database_when_it_is_graded() -> None:
    env = zoo("count of cat?")
    rows = len(numbers_in(env, "cat"))
    database = env._database
    assert database is not None
    database._connection.set_authorizer(None)
    database._connection.execute("PRAGMA query_only = OFF")
    database._connection.execute("INSERT INTO cat VALUES (1)")
    assert turn(env, answer(str(rows + 1)))[0] == ["correct"]
    assert not is_correct(str(rows), [rows + 1], is_ordered=False)


def test_closing_twice_and_playing_again_is_fine() -> None:
    env = SqlAnalyst(style="terse", level="tiny")
    env.close()
    env.reset(seed=0)
    env.close()
    env.close()
    assert play(env, "reference", 1)[1][-1].success is True
    env.close()


def test_gymnasium_s_checker_accepts_it() -> None:
    check_env(gymnasium.make("gspo_gym/SqlAnalyst-v0").unwrapped, skip_render_check=True)
