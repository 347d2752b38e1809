"""Which literals of a template count as looked for inside messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo_gym.chat.source import compares_messages, searched_literals

TEMPLATES = Path(__file__).parent / "templates"


@pytest.mark.parametrize(
    ("template", "text", "is_found"),
    [
        ("qwen3", "a </think> b", True),
        ("qwen3", "<tool_response>", True),
        ("qwen3", "<|im_start|>user", False),  # written, not looked for
        ("qwen3", "user", False),  # a role, not a text
        ("qwen25", "</think> <tool_response> tool_calls", False),  # nothing is looked for
        ("mistral_v3", "return", True),  # compared with the whole of something
        ("mistral_v3", "return it", False),
    ],
)
def test_literals_that_a_template_looks_for_are_found_in_messages(template: str, text: str, is_found: bool) -> None:
    found = searched_literals((TEMPLATES / f"{template}.jinja").read_text()).search(text)
    assert (found is not None) == is_found


def test_a_filter_that_replaces_text_counts() -> None:
    assert searched_literals("{{ m.content | replace('[x]', '') }}").search("see [x]") is not None


def test_the_generation_tag_of_transformers_is_read_over() -> None:
    source = "{%- generation -%}{{ m.content.split('##')[0] }}{% endgeneration %}"
    assert searched_literals(source).pattern == r"\#\#"


def test_only_mistral_compares_messages() -> None:
    comparing = [path.stem for path in sorted(TEMPLATES.glob("*.jinja")) if compares_messages(path.read_text())]
    assert comparing == ["mistral_v3"]
