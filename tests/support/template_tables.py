"""The tables of docs/templates.md: the formats, and which templates are read in which of them.

`python tests/support/template_tables.py` writes them anew, with trl installed; tests compare the page with them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chat_families import FAMILIES, tokenizer_of

from gspo_gym.chat.formats import FORMATS
from gspo_gym.chat.plain import ToolsIn
from gspo_gym.chat.renderer import Renderer
from gspo_gym.errors import TemplateError

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"
_TOOL = {
    "name": "look",
    "description": "Look.",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "What for."}}},
}
TOOLS: Sequence[dict[str, Any]] = ({"type": "function", "function": _TOOL},)


def formats_table() -> list[str]:
    """Return a row for each format."""
    rows = [
        (
            form.name,
            form.models,
            form.arguments.value,
            _code("".join((form.section[0], form.calls[0], form.section[1]))),
        )
        for form in FORMATS
    ]
    return _table(("format", "written by", "arguments", "a call"), rows)


def families_table() -> list[str]:
    """Return a row for each reduced template of `chat_families.py`."""
    return _outcomes({family.name: family.template for family in FAMILIES})


def trl_table() -> list[str]:
    """Return a row for each original template that the installed trl ships."""
    return _outcomes({path.stem: path.read_text(encoding="utf-8") for path in trl_templates()})


def trl_templates() -> list[Path]:
    """Return the files of the original templates of the installed trl; none if there is no trl."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return []
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return sorted(path for path in folder.glob("*.jinja") if not path.stem.endswith("_training"))


def outcome(template: str, tools_in: ToolsIn) -> str:
    """Return the format in which a template's calls are read, or why it is refused."""
    try:
        return Renderer(tokenizer_of(template), tool_schemas=TOOLS, tools_in=tools_in).format.name
    except TemplateError as error:
        reason = str(error).removeprefix("the chat template of this tokenizer ")
        return "refused: " + re.split(r"[.;:]\s|, (?:expected|which|although)", reason)[0].replace("|", r"\|")


def section(heading: str) -> list[str]:
    """Return the lines of the table below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("|")]


def counts(table: Sequence[str]) -> str:
    """Return how many of the templates of a table are read in the template's own words, and how many are refused."""
    cells = [line.split(" | ")[1] for line in table[2:]]
    refused = sum(cell.startswith("refused") for cell in cells)
    return f"{len(cells)} templates: {len(cells) - refused} read back, {refused} refused"


def _outcomes(templates: dict[str, str]) -> list[str]:
    kinds: tuple[ToolsIn, ToolsIn] = ("template", "system_message")
    rows = [(name, *(outcome(template, kind) for kind in kinds)) for name, template in templates.items()]
    return _table(("template", "tools in the template", "tools in the system message"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(head), "|" + "---|" * len(head), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(pattern: str) -> str:
    fence = "````" if "`" in pattern else "`"
    shown = pattern.replace("\n", "⏎").replace("|", r"\|")
    return f"{fence}{shown}{fence}"


def write() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for heading, table in (
        ("The formats", formats_table()),
        ("Reduced templates", families_table()),
        ("Templates of trl", trl_table()),
    ):
        before, _, rest = text.partition(f"\n## {heading}\n")
        own, following, after = rest.partition("\n## ")
        prose = [line for line in own.splitlines() if not line.startswith("|")]
        while prose and not prose[-1]:
            prose.pop()
        prose = [re.sub(r"\d+ templates: .* refused", counts(table), line) for line in prose]
        text = f"{before}\n## {heading}\n" + "\n".join([*prose, "", *table, ""]) + following + after
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
