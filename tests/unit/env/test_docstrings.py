"""parse_docstring: the two styles, and what is not taken for a parameter."""

from __future__ import annotations

import pytest

from gspo_gym.env.tools import Docstring, parse_docstring


@pytest.mark.parametrize("text", [None, "", "   \n  "])
def test_no_text_says_nothing(text: str | None) -> None:
    assert parse_docstring(text) == Docstring("", {})


def test_paragraphs_stay_apart_and_their_lines_are_joined() -> None:
    assert parse_docstring("Run a\n    query.\n\n    Only SELECT.").description == "Run a query.\nOnly SELECT."


def test_google_sections_end_where_the_next_begins() -> None:
    parsed = parse_docstring("""Move.

        Args:
            dx, dy (int): steps along an axis;
                negative is back: left or up
            fast: hurry

        Returns:
            where: the new place
        """)
    axis = "steps along an axis; negative is back: left or up"
    assert parsed == Docstring("Move.", {"dx": axis, "dy": axis, "fast": "hurry"})


def test_rest_fields_with_and_without_types() -> None:
    parsed = parse_docstring(
        "Move.\n\n:param dx: steps,\n    maybe negative\n:param int dy: more\n:type dx: int\n:rtype: str"
    )
    assert parsed == Docstring("Move.", {"dx": "steps, maybe negative", "dy": "more"})


def test_a_sentence_with_a_colon_is_no_parameter() -> None:
    assert parse_docstring("Note this: it is slow.").parameters == {}
