"""The questions: each family draws one about a given world, with the SQL whose result is the answer.

A question is only used if the data decide it: its result is not empty, NULL or 0, and nothing that it ranks is tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .database import QueryResult
from .tables import World

Level = Literal["tiny", "easy", "medium", "hard", "mixed"]
LEVELS: tuple[str, ...] = get_args(Level)


@dataclass(frozen=True, slots=True)
class Question:
    """A question in English and the gold SQL, whose one column holds the answer, in one row or several.

    `is_ordered`: the order of several values matters. `scores_sql`: what a ranking ranks by, None if nothing is ranked.
    """

    text: str
    gold_sql: str
    is_ordered: bool = False
    scores_sql: str | None = None


Family = Callable[[World, np.random.Generator], Question]
_MAX_DRAWS = 200
_MONEY = "o.{quantity} * p.{price}"
_JOIN_CUSTOMERS = "{orders} o JOIN {customers} c ON c.id = o.customer_id"
_JOIN_PRODUCTS = "{orders} o JOIN {products} p ON p.id = o.product_id"


def draw_question(level: str, world: World, rng: np.random.Generator, run: Callable[[str], QueryResult]) -> Question:
    """A question of the level that the data decide; `run` executes SQL on the world's database."""
    families = FAMILIES[level]
    for _ in range(_MAX_DRAWS):
        question = families[int(rng.integers(len(families)))](world, rng)
        if _is_decided(question, run):
            return question
    raise AssertionError(f"no decidable question of level {level!r} in {_MAX_DRAWS} draws")


def _is_decided(question: Question, run: Callable[[str], QueryResult]) -> bool:
    gold = run(question.gold_sql)
    if not gold.rows or gold.has_more or any(value in (None, 0) for (value,) in gold.rows):
        return False
    if question.scores_sql is None:
        return True
    scores = [round(float(score), 2) for (score,) in run(question.scores_sql).rows if isinstance(score, int | float)]
    return len(set(scores)) == len(scores)


def _aggregate_of_animal(world: World, rng: np.random.Generator) -> Question:
    aggregate = _one(rng, ("count", "max", "min", "sum"))
    table = _one(rng, tuple(table.name for table in world.tables))
    return Question(f"{aggregate} of {table}?", f"SELECT {aggregate}(n) FROM {table}")


def _customers_in_city(world: World, rng: np.random.Generator) -> Question:
    city = _one(rng, world.cities)
    return _question(
        world, f"How many customers are from {city}?", f"SELECT COUNT(*) FROM {{customers}} WHERE {{city}} = '{city}'"
    )


def _products_above_price(world: World, rng: np.random.Generator) -> Question:
    price = int(rng.integers(5, 80))
    return _question(
        world,
        f"How many products cost more than {price}?",
        f"SELECT COUNT(*) FROM {{products}} WHERE {{price}} > {price}",
    )


def _price_in_category(world: World, rng: np.random.Generator) -> Question:
    word, aggregate = (("highest", "MAX"), ("lowest", "MIN"), ("average", "AVG"))[int(rng.integers(3))]
    category = _one(rng, world.categories)
    return _question(
        world,
        f"What is the {word} price in the category {category}?",
        f"SELECT {aggregate}({{price}}) FROM {{products}} WHERE {{category}} = '{category}'",
    )


def _orders_between(world: World, rng: np.random.Generator) -> Question:
    first, last = (f"2024-{month:02d}-{int(rng.integers(1, 29)):02d}" for month in _months(rng))
    return _question(
        world,
        f"How many orders were placed from {first} to {last}, both days included?",
        f"SELECT COUNT(*) FROM {{orders}} WHERE {{day}} BETWEEN '{first}' AND '{last}'",
    )


def _units_by_city(world: World, rng: np.random.Generator) -> Question:
    city = _one(rng, world.cities)
    return _question(
        world,
        f"How many units did customers from {city} order in total?",
        f"SELECT SUM(o.{{quantity}}) FROM {_JOIN_CUSTOMERS} WHERE c.{{city}} = '{city}'",
    )


def _revenue_of_category(world: World, rng: np.random.Generator) -> Question:
    category = _one(rng, world.categories)
    return _question(
        world,
        f"What is the total revenue (price times units) of the category {category}?",
        f"SELECT SUM({_MONEY}) FROM {_JOIN_PRODUCTS} WHERE p.{{category}} = '{category}'",
    )


def _best_customer(world: World, rng: np.random.Generator) -> Question:
    word, order = (("most", "DESC"), ("least", "ASC"))[int(rng.integers(2))]
    tables = f"{_JOIN_CUSTOMERS} JOIN {{products}} p ON p.id = o.product_id GROUP BY c.id"
    return _question(
        world,
        f"Which customer spent the {word} in total (price times units)?",
        f"SELECT c.name FROM {tables} ORDER BY SUM({_MONEY}) {order} LIMIT 1",
        scores_sql=f"SELECT SUM({_MONEY}) FROM {tables}",
    )


def _best_month(world: World, rng: np.random.Generator) -> Question:
    word, order = (("most", "DESC"), ("fewest", "ASC"))[int(rng.integers(2))]
    return _question(
        world,
        f"In which month (YYYY-MM) of those with orders were the {word} units ordered?",
        f"SELECT substr({{day}}, 1, 7) FROM {{orders}} GROUP BY 1 ORDER BY SUM({{quantity}}) {order} LIMIT 1",
        scores_sql="SELECT SUM({quantity}) FROM {orders} GROUP BY substr({day}, 1, 7)",
    )


def _cities_above(world: World, rng: np.random.Generator) -> Question:
    units = int(rng.integers(2, 9)) * 10
    return _question(
        world,
        f"Customers of which cities ordered more than {units} units in total? List the cities.",
        f"SELECT c.{{city}} FROM {_JOIN_CUSTOMERS} GROUP BY 1 HAVING SUM(o.{{quantity}}) > {units}",
    )


def _best_products(world: World, rng: np.random.Generator) -> Question:
    count = int(rng.integers(2, 4))
    tables = f"{_JOIN_PRODUCTS} GROUP BY p.id"
    return _question(
        world,
        f"Which {count} products sold the most units? List their names, most units first.",
        f"SELECT p.name FROM {tables} ORDER BY SUM(o.{{quantity}}) DESC LIMIT {count}",
        is_ordered=True,
        scores_sql=f"SELECT SUM(o.{{quantity}}) FROM {tables} ORDER BY 1 DESC LIMIT {count + 1}",
    )


_SHOP_FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "easy": (_customers_in_city, _products_above_price, _price_in_category),
    "medium": (_orders_between, _units_by_city, _revenue_of_category),
    "hard": (_best_customer, _best_month, _cities_above, _best_products),
}
FAMILIES: Mapping[str, tuple[Family, ...]] = {
    "tiny": (_aggregate_of_animal,),
    **_SHOP_FAMILIES,
    "mixed": tuple(family for families in _SHOP_FAMILIES.values() for family in families),
}


def _question(
    world: World, text: str, gold_sql: str, *, is_ordered: bool = False, scores_sql: str | None = None
) -> Question:
    """The question with this world's names put in for the roles in braces."""
    return Question(
        text=text,
        gold_sql=gold_sql.format_map(world.words),
        is_ordered=is_ordered,
        scores_sql=None if scores_sql is None else scores_sql.format_map(world.words),
    )


def _one(rng: np.random.Generator, values: tuple[str, ...]) -> str:
    return values[int(rng.integers(len(values)))]


def _months(rng: np.random.Generator) -> tuple[int, int]:
    """Two different months of the first half of the year, the earlier first."""
    first, last = sorted(int(month) for month in rng.choice(6, 2, replace=False))
    return first + 1, last + 1
