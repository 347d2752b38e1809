"""The generated data: a tiny zoo of one-column tables, or a shop whose tables and columns are named anew each time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .database import Column, Row, Table

_ANIMALS = ("cat", "dog", "fox", "hen", "owl", "pig")
_NUM_ANIMAL_TABLES = 3
_SYNONYMS = {
    "customers": ("customers", "clients", "buyers"),
    "products": ("products", "items", "goods"),
    "orders": ("orders", "sales", "purchases"),
    "city": ("city", "town"),
    "category": ("category", "kind"),
    "price": ("price", "unit_price"),
    "quantity": ("quantity", "units", "pieces"),
    "day": ("day", "ordered_on"),
}
_PEOPLE = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Ines",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Ned",
    "Olga",
)
_CITIES = ("Bergen", "Cork", "Graz", "Lyon", "Porto", "Turin")
_GOODS = {
    "toys": ("ball", "kite", "puzzle", "robot"),
    "garden": ("hose", "rake", "seeds", "spade"),
    "kitchen": ("kettle", "knife", "pan", "whisk"),
    "office": ("folder", "lamp", "pen", "stapler"),
}


@dataclass(frozen=True, slots=True)
class World:
    """The tables, and what questions need: their name for each role, and the values that occur.

    `words` maps a role ("customers", "city", ...) to this world's name of the table or column.
    """

    tables: tuple[Table, ...]
    words: Mapping[str, str]
    cities: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


def draw_zoo(rng: np.random.Generator) -> World:
    """Three tables named after animals, each with one column `n` of two to five numbers from 1 to 9."""
    names = sorted(str(name) for name in rng.choice(_ANIMALS, _NUM_ANIMAL_TABLES, replace=False))
    tables = []
    for name in names:
        numbers = rng.integers(1, 10, size=int(rng.integers(2, 6)))
        tables.append(Table(name, (Column("n", "INTEGER"),), tuple((int(n),) for n in numbers)))
    return World(tuple(tables), words={})


def draw_shop(rng: np.random.Generator) -> World:
    """Customers, products and their orders in the first half of 2024; every customer and product has orders."""
    words = {role: str(rng.choice(names)) for role, names in _SYNONYMS.items()}
    cities = _some(rng, _CITIES, 4)
    categories = _some(rng, tuple(_GOODS), 3)
    customers = _numbered((name, str(rng.choice(cities))) for name in _some(rng, _PEOPLE, int(rng.integers(8, 13))))
    goods = [(name, category) for category in categories for name in _some(rng, _GOODS[category], 3)]
    products = _numbered((name, kind, int(rng.integers(100, 9000)) / 100) for name, kind in goods)
    orders = _orders(rng, len(customers), len(products))
    columns = {
        "customers": (("id", "INTEGER"), ("name", "TEXT"), (words["city"], "TEXT")),
        "products": (("id", "INTEGER"), ("name", "TEXT"), (words["category"], "TEXT"), (words["price"], "REAL")),
        "orders": (
            *((name, "INTEGER") for name in ("id", "customer_id", "product_id", words["quantity"])),
            (words["day"], "TEXT"),
        ),
    }
    tables = tuple(
        Table(words[role], tuple(Column(*column) for column in columns[role]), rows)
        for role, rows in (("customers", customers), ("products", products), ("orders", orders))
    )
    occurring = tuple(sorted({str(row[2]) for row in customers}))
    return World(tables, words, cities=occurring, categories=categories)


def _orders(rng: np.random.Generator, num_customers: int, num_products: int) -> tuple[Row, ...]:
    """Twenty more than the larger of both, the first of which go round all customers and all products."""
    count = max(num_customers, num_products) + 20
    customers = [*range(num_customers), *rng.integers(num_customers, size=count)][:count]
    products = [*range(num_products), *rng.integers(num_products, size=count)][:count]
    return _numbered(
        (
            int(customer) + 1,
            int(product) + 1,
            int(rng.integers(1, 10)),
            f"2024-{int(rng.integers(1, 7)):02d}-{int(rng.integers(1, 29)):02d}",
        )
        for customer, product in zip(customers, products, strict=True)
    )


def _numbered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows with an id in front, from 1."""
    return tuple((number, *row) for number, row in enumerate(rows, start=1))


def _some(rng: np.random.Generator, values: Sequence[str], count: int) -> tuple[str, ...]:
    """So many different ones of the values, in their order."""
    chosen = sorted(int(index) for index in rng.choice(len(values), count, replace=False))
    return tuple(values[index] for index in chosen)
