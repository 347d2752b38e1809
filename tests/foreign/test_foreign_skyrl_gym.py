"""skyrl-gym's environments over rows in SkyRL's form; search needs a retrieval server and is left out."""

from __future__ import annotations

import json
import sqlite3
from importlib.metadata import version

import pytest

from gspo_gym.env.registry import make
from gspo_gym.errors import EnvError, UnknownNameError

# A shop with 3 customers, for text2sql: its data sets keep each database in a folder of its own.
DATABASE = "spider/database/shop/shop.sqlite"


def rows_of(game: str) -> list[dict]:
    """40 rows each; the answers are sums, three digits or less."""
    rows = []
    for number in range(40):
        question = f"What is {number} + {2 * number}?"
        row = {"prompt": [{"role": "user", "content": question}], "extra_info": {"index": number}}
        truth = {"ground_truth": str(3 * number)}
        if game == "aime":
            row["reward_model"] = truth
        elif game == "lcb":
            tests = [{"input": f"{number}\n", "output": f"{3 * number}\n", "testtype": "stdin", "metadata": {}}]
            row["reward_spec"] = {"ground_truth": json.dumps(tests)}
        elif game == "text2sql":
            truth = {"ground_truth": f"select count(*) + {number} from customers"}
            row |= {"db_id": "shop", "data": "spider", "reward_spec": truth}
        else:
            row["reward_spec"] = truth
        rows.append(row)
    return rows


@pytest.fixture
def config_of(tmp_path):
    """Arguments for a game, with its rows in a file."""
    path = tmp_path / DATABASE
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as database:
        database.execute("create table customers (name text)")
        database.executemany("insert into customers values (?)", [("Ada",), ("Bo",), ("Cy",)])
    database.close()

    def config(game: str) -> dict:
        rows = tmp_path / f"{game}.jsonl"
        rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(game)))
        settings = {"env_config": {"db_path": str(tmp_path)}} if game == "text2sql" else {}
        return {"game": game, "rows": str(rows), "held_out_fraction": 0.5, **settings}

    return config


@pytest.mark.parametrize("game", ["gsm8k", "gsm8k_multi_turn", "aime", "text2sql", "lcb"])
def test_it_keeps_the_contract(game, config_of, check_into_table):
    report = check_into_table("skyrl-gym", game, "SkyRLGym", config_of(game))
    assert report.passed, str(report)


def test_search_needs_a_server(foreign_table):
    for game in ("search", "searchcode"):
        foreign_table("skyrl-gym", version("skyrl-gym"), game, False, "needs a retrieval server; not tried")


def test_a_query_is_answered_and_a_solution_scored(config_of):
    env = make("SkyRLGym", **config_of("text2sql"))
    env.reset(seed=0)
    truth = env.unwrapped.row["reward_spec"]["ground_truth"]
    messages, reward, terminated, _, _ = env.step(f"<think>Count.</think><sql>{truth}</sql>")
    assert (float(reward), terminated) == (0.0, False)
    assert messages[0]["role"] == "user"
    assert "observation" in messages[0]["content"]
    _, reward, terminated, truncated, _ = env.step(f"<think>Done.</think><solution>{truth}</solution>")
    assert (float(reward), terminated, truncated) == (1.0, True, False)


def test_a_class_of_one_s_own_is_named_by_its_module(config_of):
    config = config_of("gsm8k") | {"game": "skyrl_gym.envs.gsm8k.env:GSM8kEnv", "success_reward": 1.0}
    env = make("SkyRLGym", **config)
    env.reset(seed=0)
    assert env.step("#### " + env.unwrapped.row["reward_spec"]["ground_truth"])[1].success is True


def test_rows_that_lack_what_a_game_wants_and_unknown_games_are_errors_that_say_where(config_of):
    config = config_of("gsm8k")
    with pytest.raises(EnvError, match=r"skyrl-gym aime, .*gsm8k.jsonl:\d+: make raised AssertionError: reward_model"):
        make("SkyRLGym", **config | {"game": "aime"}).reset(seed=0)
    with pytest.raises(UnknownNameError, match="did you mean 'gsm8k'"):
        make("SkyRLGym", **config | {"game": "gsm8"})
