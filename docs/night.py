"""The page of a night of trainings, from docs/night.jsonl: `python docs/night.py` writes it.

A line of the file is one run, as `python -m benchmarks night` keeps it in cells.jsonl of its folder; `python
docs/night.py FOLDER` takes these first. A test fails while the page is not what the lines say.
"""

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = ROOT / "docs" / "night.jsonl"
PAGE = ROOT / "docs" / "explanations" / "night.md"


def page() -> str:
    """Return the text of the page."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from benchmarks import night_page

    return night_page.page(night_page.read_cells(LINES))


if __name__ == "__main__":
    if sys.argv[1:]:
        shutil.copyfile(Path(sys.argv[1]) / "cells.jsonl", LINES)
    PAGE.write_text(page(), encoding="utf-8")
