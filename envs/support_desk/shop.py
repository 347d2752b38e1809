"""The shop: a real SQLite database in memory, drawn from a generator, and what the tools do to it.

It knows nothing of rules and rewards: it refuses only what no shop could do, such as paying back more than was paid.
"""

from __future__ import annotations

import datetime
import sqlite3
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

TODAY = datetime.date(2025, 6, 30)

_SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, email TEXT UNIQUE, postcode TEXT);
CREATE TABLE products (sku TEXT PRIMARY KEY, name TEXT, price_cents INTEGER, warranty_days INTEGER, is_device INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers, ordered_on TEXT, address TEXT);
CREATE TABLE items (order_id INTEGER REFERENCES orders, sku TEXT REFERENCES products, price_cents INTEGER);
CREATE TABLE shipments (order_id INTEGER REFERENCES orders, status TEXT, promised_on TEXT, delivered_on TEXT);
CREATE TABLE refunds (order_id INTEGER REFERENCES orders, sku TEXT REFERENCES products, amount_cents INTEGER);
CREATE TABLE replacements (order_id INTEGER REFERENCES orders, sku TEXT REFERENCES products);
CREATE TABLE credits (order_id INTEGER REFERENCES orders, amount_cents INTEGER);
CREATE TABLE tickets (order_id INTEGER REFERENCES orders, kind TEXT);
CREATE TABLE escalations (reason TEXT);
CREATE TABLE notices (order_id INTEGER REFERENCES orders, day TEXT);
CREATE TABLE repairs (order_id INTEGER REFERENCES orders, step TEXT);
"""
# What a case may change, and how a change reads: (kind, values ...).
_CHANGES = {
    "refund": "SELECT order_id, sku, amount_cents FROM refunds",
    "replacement": "SELECT order_id, sku FROM replacements",
    "credit": "SELECT order_id, amount_cents FROM credits",
    "ticket": "SELECT order_id, kind FROM tickets",
    "escalation": "SELECT reason FROM escalations",
    "notice": "SELECT order_id, day FROM notices",
    "repair": "SELECT order_id, step FROM repairs",
    "address": "SELECT id, address FROM orders",
}
Change = tuple[Any, ...]  # Any: SQLite's values

_FIRST = ("Ada", "Ben", "Chloe", "Dev", "Elif", "Finn", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
_LAST = {
    "training": ("Adler", "Brook", "Castro", "Dunn", "Eklund", "Fischer", "Gupta", "Hayes"),
    "held-out": ("Iwata", "Jensen", "Kowal", "Lopez", "Moreau", "Novak", "Okoye", "Petrov"),
}
_STREETS = ("Oak Street", "Mill Lane", "Harbour Road", "Station Road", "Church Hill", "Park Avenue")
_PRODUCTS = (
    # sku, name, price in cents, days of warranty, whether it is a device
    ("RT-100", "router", 7_990, 730, 1),
    ("SP-200", "smart speaker", 5_950, 365, 1),
    ("EB-300", "e-book reader", 11_900, 730, 1),
    ("HP-400", "headphones", 15_900, 365, 1),
    ("LT-500", "laptop", 89_900, 730, 1),
    ("BG-600", "backpack", 4_490, 0, 0),
    ("LM-700", "desk lamp", 3_250, 0, 0),
    ("MG-800", "set of mugs", 2_480, 0, 0),
)


class ShopError(Exception):
    """The shop cannot do that; the text is for the model."""


@dataclass(frozen=True, slots=True)
class Purchase:
    """One order of one article, with all that belongs to it. Dates are ISO texts; `delivered_on` is "" if it is not."""

    order_id: int
    customer_id: int
    sku: str
    product: str
    price_cents: int
    warranty_days: int
    is_device: bool
    address: str
    ordered_on: str
    status: str
    promised_on: str
    delivered_on: str


class Shop:
    """The database of one episode. Close it."""

    def __init__(self, rng: np.random.Generator, *, is_held_out: bool) -> None:
        # Episodes may be closed by another thread than the one that played them, never by two at once.
        self._connection = sqlite3.connect(":memory:", check_same_thread=False)
        self._connection.executescript(_SCHEMA)
        self._connection.executemany("INSERT INTO products VALUES (?, ?, ?, ?, ?)", _PRODUCTS)
        last = _LAST["held-out" if is_held_out else "training"]
        names = rng.permutation([f"{first} {name}" for first in _FIRST for name in last])[:8]
        for number, name in enumerate(map(str, names), 1):
            email = f"{name.lower().replace(' ', '.')}@example.com"
            postcode = f"{int(rng.integers(10_000, 99_999))}"
            self._write("INSERT INTO customers VALUES (?, ?, ?, ?)", (number, name, email, postcode))
        self._before: Counter[Change] = Counter()

    def add_order(
        self,
        rng: np.random.Generator,
        customer_id: int,
        sku: str,
        *,
        status: str,
        days_ago: int,
        days_late: int = 0,
        order_id: int | None = None,
    ) -> int:
        """A new order of a case's making; `days_ago` is since delivery, or since the order if nothing was delivered.

        `order_id` is its number, which must be free; None: one is drawn.
        """
        if order_id is None:
            order_id = int(rng.integers(10_000, 99_999))
            while self._rows("SELECT 1 FROM orders WHERE id = ?", (order_id,)):
                order_id += 1
        delivered = TODAY - datetime.timedelta(days=days_ago)
        is_delivered = status == "delivered"
        ordered = delivered - datetime.timedelta(days=4 if is_delivered else 0)
        promised = (delivered if is_delivered else TODAY) - datetime.timedelta(days=days_late)
        address = f"{int(rng.integers(1, 99))} {_STREETS[int(rng.integers(len(_STREETS)))]}"
        [(price,)] = self._rows("SELECT price_cents FROM products WHERE sku = ?", (sku,))
        self._write("INSERT INTO orders VALUES (?, ?, ?, ?)", (order_id, customer_id, str(ordered), address))
        self._write("INSERT INTO items VALUES (?, ?, ?)", (order_id, sku, price))
        shipment = (order_id, status, str(promised), str(delivered) if is_delivered else "")
        self._write("INSERT INTO shipments VALUES (?, ?, ?, ?)", shipment)
        return order_id

    def open_for_business(self) -> None:
        """From here on changes count."""
        self._before = self._everything()

    def changes(self) -> Counter[Change]:
        """What has been changed since, each as (kind, values ...)."""
        return self._everything() - self._before

    # -- reading -----------------------------------------------------------------------------------------------------

    def customer(self, customer_id: int) -> tuple[str, str, str]:
        """(name, email, postcode)"""
        [row] = self._rows("SELECT name, email, postcode FROM customers WHERE id = ?", (customer_id,))
        return row[0], row[1], row[2]

    def customer_of(self, email: str, postcode: str) -> int | None:
        """The customer with both; None: there is none."""
        found = self._rows(
            "SELECT id FROM customers WHERE email = lower(trim(?)) AND postcode = trim(?)", (email, postcode)
        )
        return int(found[0][0]) if found else None

    def orders_of(self, customer_id: int) -> list[int]:
        """The numbers of a customer's orders, the latest first."""
        rows = self._rows("SELECT id FROM orders WHERE customer_id = ? ORDER BY ordered_on DESC, id", (customer_id,))
        return [int(row[0]) for row in rows]

    def purchase(self, order_id: int) -> Purchase:
        """An order.

        Raises:
            ShopError: there is none with that number.
        """
        rows = self._rows(
            "SELECT o.id, o.customer_id, p.sku, p.name, i.price_cents, p.warranty_days, p.is_device, o.address, "
            "o.ordered_on, s.status, s.promised_on, s.delivered_on FROM orders o JOIN items i ON i.order_id = o.id "
            "JOIN products p ON p.sku = i.sku JOIN shipments s ON s.order_id = o.id WHERE o.id = ?",
            (order_id,),
        )
        if not rows:
            raise ShopError(f"there is no order {order_id}")
        values = list(rows[0])
        values[6] = bool(values[6])
        return Purchase(*values)

    # -- changing ----------------------------------------------------------------------------------------------------

    def refund(self, order_id: int, amount_cents: int) -> None:
        """Pay money back.

        Raises:
            ShopError: nothing to pay, or more than was paid less what was paid back.
        """
        purchase = self.purchase(order_id)
        [(paid_back,)] = self._rows(
            "SELECT coalesce(sum(amount_cents), 0) FROM refunds WHERE order_id = ?", (order_id,)
        )
        if not 0 < amount_cents <= purchase.price_cents - paid_back:
            raise ShopError(
                f"amount_cents: at most {purchase.price_cents - paid_back} can be paid back, and at least 1"
            )
        self._write("INSERT INTO refunds VALUES (?, ?, ?)", (order_id, purchase.sku, amount_cents))

    def replace(self, order_id: int) -> None:
        """Send the article again."""
        self._write("INSERT INTO replacements VALUES (?, ?)", (order_id, self.purchase(order_id).sku))

    def credit(self, order_id: int, amount_cents: int) -> None:
        """Give credit for later purchases.

        Raises:
            ShopError: no amount, or a senseless one.
        """
        self.purchase(order_id)
        if not 0 < amount_cents <= 100_000:
            raise ShopError("amount_cents: expected 1 to 100000")
        self._write("INSERT INTO credits VALUES (?, ?)", (order_id, amount_cents))

    def change_address(self, order_id: int, address: str) -> None:
        """Send an order elsewhere."""
        self.purchase(order_id)
        self._write("UPDATE orders SET address = ? WHERE id = ?", (" ".join(address.split()), order_id))

    def create_ticket(self, order_id: int, kind: str) -> None:
        """Hand work to another department."""
        self.purchase(order_id)
        self._write("INSERT INTO tickets VALUES (?, ?)", (order_id, kind))

    def escalate(self, reason: str) -> None:
        """Hand the case to a supervisor."""
        self._write("INSERT INTO escalations VALUES (?)", (reason,))

    def send_notice(self, order_id: int, day: str) -> None:
        """Write the customer on which day an order will come."""
        self.purchase(order_id)
        self._write("INSERT INTO notices VALUES (?, ?)", (order_id, day.strip()))

    def note_repair(self, order_id: int, step: str) -> None:
        """The customer repaired the device by this step."""
        self._write("INSERT INTO repairs VALUES (?, ?)", (order_id, step))

    def close(self) -> None:
        """Give the database up; twice is fine."""
        self._connection.close()

    def _everything(self) -> Counter[Change]:
        return Counter((kind, *row) for kind, sql in _CHANGES.items() for row in self._rows(sql, ()))

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def _write(self, sql: str, values: tuple[Any, ...]) -> None:
        self._connection.execute(sql, values)
