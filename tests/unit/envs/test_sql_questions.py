"""The generated questions have one answer, which an implementation without SQL finds too; grading compares values."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest
from gspo_gym_envs.sql_analyst.database import ReadOnlyDatabase, Value
from gspo_gym_envs.sql_analyst.grading import is_correct
from gspo_gym_envs.sql_analyst.questions import FAMILIES, LEVELS, Question, draw_question
from gspo_gym_envs.sql_analyst.tables import World, draw_shop, draw_zoo


def drawn(level: str, seed: int) -> tuple[World, Question, list[Value]]:
    """(world, question, gold values) of a seed."""
    rng = np.random.default_rng(seed)
    world = draw_zoo(rng) if level == "tiny" else draw_shop(rng)
    database = ReadOnlyDatabase(world.tables, max_rows=20, max_query_seconds=1.0)
    question = draw_question(level, world, rng, database.query)
    gold = [value for (value,) in database.query(question.gold_sql).rows]
    database.close()
    return world, question, gold


def answer_in_python(world: World, text: str) -> list[Value]:
    """The answer from the question's English and the rows as tuples: no SQL, no names of columns."""
    if match := re.fullmatch(r"(count|max|min|sum) of (\w+)\?", text):
        numbers = [row[0] for table in world.tables if table.name == match[2] for row in table.rows]
        return [{"count": len, "max": max, "min": min, "sum": sum}[match[1]](numbers)]
    customers, products, orders = (table.rows for table in world.tables)
    if match := re.fullmatch(r"How many customers are from (\w+)\?", text):
        return [sum(city == match[1] for _, _, city in customers)]
    if match := re.fullmatch(r"How many products cost more than (\d+)\?", text):
        return [sum(price > int(match[1]) for *_, price in products)]
    if match := re.fullmatch(r"What is the (\w+) price in the category (\w+)\?", text):
        prices = [price for _, _, category, price in products if category == match[2]]
        return [{"highest": max, "lowest": min, "average": np.mean}[match[1]](prices)]
    if match := re.fullmatch(r"How many orders were placed from (\S+) to (\S+), both days included\?", text):
        return [sum(match[1] <= day <= match[2] for *_, day in orders)]
    units_by_city, units_by_product, units_by_month = defaultdict(int), defaultdict(int), defaultdict(int)
    spent_by_customer, revenue_by_category = defaultdict(float), defaultdict(float)
    for _, customer, product, units, day in orders:
        _, name, city = customers[customer - 1]
        _, product_name, category, price = products[product - 1]
        units_by_city[city] += units
        units_by_product[product_name] += units
        units_by_month[day[:7]] += units
        spent_by_customer[name] += units * price
        revenue_by_category[category] += units * price
    if match := re.fullmatch(r"How many units did customers from (\w+) order in total\?", text):
        return [units_by_city[match[1]]]
    if match := re.fullmatch(r"What is the total revenue \(price times units\) of the category (\w+)\?", text):
        return [revenue_by_category[match[1]]]
    if match := re.fullmatch(r"Which customer spent the (most|least) in total \(price times units\)\?", text):
        return [{"most": max, "least": min}[match[1]](spent_by_customer, key=spent_by_customer.get)]
    if match := re.match(
        r"In which month \(YYYY-MM\) of those with orders were the (most|fewest) units ordered\?", text
    ):
        return [{"most": max, "fewest": min}[match[1]](units_by_month, key=units_by_month.get)]
    if match := re.match(r"Customers of which cities ordered more than (\d+) units in total\?", text):
        return [city for city, units in units_by_city.items() if units > int(match[1])]
    match = re.match(r"Which (\d) products sold the most units\?", text)
    assert match is not None, text
    return sorted(units_by_product, key=lambda name: -units_by_product[name])[: int(match[1])]


@pytest.mark.parametrize("level", LEVELS)
def test_the_gold_sql_answers_what_the_question_asks(level: str) -> None:
    families = set()
    for seed in range(150):
        world, question, gold = drawn(level, seed)
        expected = answer_in_python(world, question.text)
        if not question.is_ordered:
            gold, expected = sorted(gold), sorted(expected)
        for value, other in zip(gold, expected, strict=True):
            # Sums of prices in two orders of addition: doubles of size 1e4 agree far below a millionth.
            assert value == other or abs(value - other) < 1e-6, (question, gold, expected)
        families.add(re.sub(r"\b(\d\S*|[A-Z]\w+|toys|garden|kitchen|office)\b", "_", question.text))
    assert len(families) >= len(FAMILIES[level])


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_seed_gives_the_same_task_and_others_give_others(level: str) -> None:
    assert drawn(level, 5) == drawn(level, 5)
    assert len({(drawn(level, seed)[0].tables, drawn(level, seed)[1].text) for seed in range(40)}) == 40


def test_no_question_is_empty_zero_or_tied() -> None:
    for seed in range(300):
        world, question, gold = drawn("hard", seed)
        assert gold
        assert 0 not in gold
        assert None not in gold
        if question.text.startswith("Which customer"):
            flipped = question.text.replace("most", "x").replace("least", "most").replace("x", "least")
            assert answer_in_python(world, flipped) != gold


@pytest.mark.parametrize(
    ("answer", "gold", "is_ordered"),
    [
        ("7", [7], False),
        (" 7 \n", [7], False),
        ("+7", [7], False),
        ("7.0", [7], False),
        ("\u22127.5", [-7.5], False),
        ("'7'", [7], False),
        ("[7]", [7], False),
        ("12.34", [12.3449], False),
        ("12.35", [12.345], False),
        ("12.34", [12.345], False),
        ("12", [12.0], False),
        ("ada", ["Ada"], False),
        ('"Ada"', ["Ada"], False),
        ("new  york", ["New York"], False),
        ("Graz, Lyon", ["Lyon", "Graz"], False),
        ("Lyon\nGraz", ["Lyon", "Graz"], False),
        ('["Lyon", "Graz"]', ["Lyon", "Graz"], True),
        ("a; b; a", ["a", "a", "b"], False),
    ],
)
def test_right_answers_count(answer: str, gold: list[Value], is_ordered: bool) -> None:
    assert is_correct(answer, gold, is_ordered=is_ordered)


@pytest.mark.parametrize(
    ("answer", "gold", "is_ordered"),
    [
        ("", [7], False),
        ("8", [7], False),
        ("7.004", [7], False),
        ("7 8", [7], False),
        ("6, 7", [7], False),
        ("seven", [7], False),
        ("nan", [7.0], False),
        ("inf", [7.0], False),
        ("1e400", [7.0], False),
        ("7e0", [7], False),
        ("٧", [7], False),
        ("12.36", [12.345], False),
        ("SELECT 7", [7], False),
        ("Ada, Ben", ["Ada"], False),
        ("Ad", ["Ada"], False),
        ("", ["Ada"], False),
        ("Graz", ["Lyon", "Graz"], False),
        ("Graz, Graz", ["Lyon", "Graz"], False),
        ("Graz, Lyon, Cork", ["Lyon", "Graz"], False),
        ("a; b; b", ["a", "a", "b"], False),
        ("Graz, Lyon", ["Lyon", "Graz"], True),
    ],
)
def test_wrong_answers_do_not(answer: str, gold: list[Value], is_ordered: bool) -> None:
    assert not is_correct(answer, gold, is_ordered=is_ordered)
