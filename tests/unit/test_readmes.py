"""The pages (each README.md, and docs/): links lead somewhere, commands exist, and every command is on a page."""

import argparse
import re
import runpy
from pathlib import Path

import pytest

from gspo_gym.cli.main import command_parser
from gspo_gym.cli.runs import retired_command

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (*ROOT.rglob("README.md"), *(ROOT / "docs").rglob("*.md"))
    if not {"runs", "node_modules"} & set(path.parts) and not any(part.startswith(".") for part in path.parts)
)
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(#[^)\s]+)?\)")
COMMAND = re.compile(r"^gspo-gym((?: [a-z][a-z-]*)+)", re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, only letters, digits, hyphens and spaces, which become -."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands() -> set[tuple[str, ...]]:
    """Every command that takes no further command and was not retired, as words: ("env", "check"), ("train",), ..."""

    def leaves(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> set[tuple[str, ...]]:
        if parser.get_default("run") is retired_command:
            return set()
        parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not parts:
            return {words}
        return {leaf for name, part in parts[0].choices.items() for leaf in leaves(part, (*words, name))}

    return leaves(command_parser(), ())


def test_there_are_pages_to_read() -> None:
    assert {ROOT / "README.md", ROOT / "configs" / "README.md", ROOT / "gspo_gym" / "env" / "README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            broken += [target + anchor] * (anchor[1:] not in map(slug, headings))
    assert broken == []


def test_every_command_is_shown_on_a_page_and_every_command_shown_exists() -> None:
    known = commands()
    shown = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for line in [*COMMAND.findall(text), *re.findall(r"`gspo-gym((?: [a-z][a-z-]*)+)", text)]:
            words = tuple(line.split())
            leaf = next((words[:length] for length in range(len(words), 0, -1) if words[:length] in known), None)
            is_group = any(command[: len(words)] == words for command in known)
            assert leaf is not None or is_group, f"{page}: gspo-gym{line}: there is no such command"
            shown.add(leaf)
    assert sorted(known - shown) == []


def test_git_ignores_what_the_makefile_installs() -> None:
    """Else the next `make lint` reads all packages of an environment; the list of this checkout alone must say so."""
    root = Path(__file__).parents[2]
    made = set(re.findall(r"^\w+ := (\.\S+)$", (root / "Makefile").read_text(), flags=re.MULTILINE))
    assert {".venv", ".venv-more", ".openai-2"} <= made
    assert {f"{name}/" for name in made} <= set((root / ".gitignore").read_text().splitlines())


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_page_of_a_room_is_a_page() -> None:
    """What is longer is reference, which stands in docstrings; the pages of configs/ are lists."""
    rooms = [page for page in PAGES if page.parent != ROOT]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in rooms if page.name == "README.md"}
    lists = {ROOT / "configs" / "README.md"}
    assert {page for page, count in words.items() if count > 1200} <= lists


def test_the_page_of_measurements_is_made_of_its_lines() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "measured.py"))["page"]()
    assert (ROOT / "docs" / "measured.md").read_text(encoding="utf-8") == page, "run python docs/measured.py"


def test_the_page_beside_peers_counts_their_programs() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "side_by_side.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run python docs/side_by_side.py"
    assert script["num_lines"]('"""About."""\n\nx = [\n    1,  # one\n]\n# end\n') == 3


def test_the_page_of_credit_is_made_of_its_lines() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "credit_bench.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run python docs/credit_bench.py"
    assert script["FIGURE"].is_file()


def test_the_page_of_a_night_is_made_of_its_lines() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "night.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run python docs/night.py"


def test_the_level_that_chooses_itself_is_compared_with_the_better_one_set_by_set() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "credit_bench.py"))
    names = script["LEVELS"]

    def sets(game: str, *correlations: tuple[float, float, float]) -> list[dict]:
        values = [
            [{"name": name, "correlation": value} for name, value in zip(names, row, strict=True)]
            for row in correlations
        ]
        return [{"environment": f"gspo_gym/{game}-v0", "rows": rows} for rows in values]

    # "turn" is better in A, on average, and auto below it by 0.1 in both sets; in B auto is on both sides of the other
    lines = sets("A", (0.2, 0.5, 0.4), (0.4, 0.3, 0.2)) + sets("B", (0.6, 0.2, 0.7), (0.6, 0.2, 0.5))
    rows = [line for line in script["_auto"](lines).splitlines() if line.startswith(("| A", "| B"))]
    assert rows == [
        "| A | 0.30 | 0.40 | 0.30 | -0.10 (-0.10 to -0.10) | worse |",
        "| B | 0.60 | 0.20 | 0.60 | +0.00 (-0.10 to +0.10) | not worse beyond its interval |",
    ]
    assert script["_auto"]([]) == ""
