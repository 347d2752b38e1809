"""The page of measurements, docs/measured.md, from docs/measured.jsonl: `python docs/measured.py` writes it.

A line of the file is one measurement: topic, what, result, machine, date (the day on which it was published) and the
command that repeats it. A test fails while the page is not what the lines say.
"""

import json
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
INTRODUCTION = """# Measured

This page is generated from [measured.jsonl](measured.jsonl) by `python docs/measured.py`. Each row has the command that
repeats it. Trust ratios more than seconds: a ratio compares two programs in one run, on one machine.
`make bench` compares the quick ones with the last time on your machine.
"""


def page() -> str:
    """Return the text of the page."""
    rows = [json.loads(line) for line in (HERE / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [INTRODUCTION]
    for topic, group in groupby(rows, key=lambda row: row["topic"]):
        lines += [f"## {topic}", "", "| what | result | command | machine, date |", "|---|---|---|---|"]
        lines += [
            f"| {row['what']} | {row['result']} | {row['command']} | {row['machine']}, {row['date']} |" for row in group
        ]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "measured.md").write_text(page(), encoding="utf-8")
