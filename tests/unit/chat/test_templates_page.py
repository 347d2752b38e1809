"""The page of chat templates has the tables of `template_tables.py`; `make foreign` compares those of trl."""

from __future__ import annotations

from template_tables import PAGE, counts, families_table, formats_table, section


def test_the_page_lists_every_format() -> None:
    assert section("The formats") == formats_table()


def test_the_page_says_what_becomes_of_each_family() -> None:
    table = families_table()
    assert section("Reduced templates") == table
    assert counts(table) in PAGE.read_text(encoding="utf-8")
