"""`gspo-gym judge check RUBRIC`: list everything that is wrong with a rubric, or describe it; nothing is judged."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_gym.judge.rubric import Rubric


def add_command(commands: Any) -> None:
    """Add `check` to the commands of `judge`."""
    check = commands.add_parser("check", help="say everything that is wrong with a rubric, or what it will do")
    check.add_argument("rubric", help="a YAML, TOML or JSON file, or an id such as support_desk/bundle@v1")
    check.add_argument(
        "--folder", action="append", default=[], type=Path, metavar="DIR", help="where ids are looked for, too"
    )
    check.add_argument("--task-app", action="store_true", help="a task app's rubric: one, without event and outcome")
    check.add_argument(
        "--strict", action="store_true", help="also ask for what hosted judges ask for; exit status 1 without it"
    )
    check.set_defaults(run=check_rubric)


def check_rubric(arguments: argparse.Namespace) -> int:
    """Print VALID, the criteria and notes; an invalid rubric is one error that lists all its problems."""
    from gspo_gym.judge.rubric import strict_problems
    from gspo_gym.judge.rubric_files import find_rubrics, load_rubrics, read_task_app_rubric

    path = find_rubrics(arguments.rubric, arguments.folder)
    parts = {"rubric": read_task_app_rubric(path)} if arguments.task_app else load_rubrics(str(path)).parts
    print(f"VALID: {path}")
    for name, rubric in parts.items():
        print("\n".join(describe_rubric(name, rubric)))
    for name, rubric in parts.items():
        for note in rubric_notes(rubric, is_event=name == "event"):
            print(f"note: {name}: {note}")
    if not arguments.task_app and len(parts) == 1:
        (name,) = parts
        other = "outcome" if name == "event" else "event"
        print(f"note: there is no {other} part, so judge.reward_blend.{other} must be 0")
    if not arguments.strict:
        return 0
    problems = [f"{name}: {problem}" for name, rubric in parts.items() for problem in strict_problems(rubric)]
    print("STRICT: yes" if not problems else "\n  ".join([f"STRICT: no, {len(problems)} problems:", *problems]))
    return 1 if problems else 0


def describe_rubric(name: str, rubric: Rubric) -> Iterator[str]:
    """Yield lines about a part of the rubric: its goal, and its criteria with their shares of the total."""
    yield f"{name}: version {rubric.version}, {rubric.aggregation}, total {_range_of(rubric)}"
    if rubric.goal_text:
        yield f"  goal: {' '.join(rubric.goal_text.split())}"
    width = max(len("criterion"), *(len(id_) for id_ in rubric.ids))
    yield f"  {'criterion':<{width}}  {'scale':<16}  {'weight':>6}  {'share':>6}  required"
    weights = sum(criterion.weight for criterion in rubric.criteria)
    for c in rubric.criteria:
        scale = f"custom {c.minimum:g} to {c.maximum:g}" if c.scale == "custom" else c.scale
        share = f"{c.weight / weights:6.1%}" if rubric.aggregation in ("weighted_sum", "inherit") else "     -"
        required = f"at least {c.threshold:g}" if c.required else ""
        yield f"  {c.id:<{width}}  {scale:<16}  {c.weight:>6g}  {share}  {required}".rstrip()


def rubric_notes(rubric: Rubric, *, is_event: bool) -> Iterator[str]:
    """Yield a sentence about each thing that is allowed but perhaps not intended."""
    graded = [c.id for c in rubric.criteria if c.scale in ("bounded", "custom")]
    if graded:
        yield f"judges agree with themselves better on yes or no: split into binary criteria {', '.join(graded)}"
    counts = [c.id for c in rubric.criteria if c.scale == "count"]
    if counts and rubric.aggregation != "custom":
        yield f"a count has no upper end, so neither has the total: {', '.join(counts)}"
    if rubric.aggregation == "sum" and len({c.weight for c in rubric.criteria}) > 1:
        yield "under sum weights count for nothing"
    if rubric.aggregation == "custom":
        yield "custom: there is no total until the operator names a function"
    if is_event and len(rubric.criteria) > 1 and not any(c.required for c in rubric.criteria):
        yield (
            "totals of turns are added up, and no criterion is required, so a turn that does nothing may earn and "
            "longer episodes earn more; make the criterion of progress required"
        )


def _range_of(rubric: Rubric) -> str:
    """Format the lowest and the highest total, as far as they are known."""
    if rubric.aggregation == "custom":
        return "from a function"
    low = rubric.total(rubric.lowest_scores)
    highest = {c.id: c.highest for c in rubric.criteria if c.highest is not None}
    return f"{low:g} to {rubric.total(highest):g}" if len(highest) == len(rubric.criteria) else f"{low:g} and up"
