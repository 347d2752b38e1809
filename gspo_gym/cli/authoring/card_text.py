"""An environment's card as Markdown, which a terminal shows as well as a README does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gspo_gym.cli.authoring.card import EnvironmentCard, PlayerRecord
from gspo_gym.env.playing import Playthrough
from gspo_gym.rollout.statistics import Interval
from gspo_gym.types import Message

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MAX_LINES = 10  # of a histogram
_BAR = 40  # characters of its longest bar
_MAX_CHARACTERS = 1_000  # of a message in the transcript


def card_as_markdown(card: EnvironmentCard) -> str:
    """The whole card; ends with a newline."""
    sections = [f"# {card.env_id}", card.summary, _table(("", ""), card.facts.items())]
    if card.options:
        sections += ["## Options", _table(("argument", "value"), _coded(card.options.items()))]
    if card.tools:
        sections += ["## Tools", "\n".join(map(_tool_line, card.tools))]
    sections += _reward_sections(card)
    sections += _play_sections(card.records)
    if card.records and card.records[0].runs:
        record = card.records[0]
        sections += [f"## Transcript: {record.player}, seed {record.runs[0].seed}", _transcript(record.runs[0])]
    return "\n\n".join(section for section in sections if section) + "\n"


def _reward_sections(card: EnvironmentCard) -> list[str]:
    low, high = card.reward_range
    seen = [value for record in card.records for value in record.returns]
    told = f"between {min(seen):g} and {max(seen):g} over these episodes" if seen else "none: only a judge can score it"
    players = [record.player for record in card.records]
    sections = ["## Rewards", f"Return of an episode: declared from {low:g} to {high:g}; {told}."]
    for title, values in (
        ("term, its mean over the episodes", [record.mean_terms for record in card.records]),
        ("event, share of the episodes", [record.event_rates for record in card.records]),
    ):
        names = sorted({name for by_name in values for name in by_name})
        rows = [(f"`{name}`", *(f"{by_name.get(name, 0.0):.3g}" for by_name in values)) for name in names]
        sections.append(_table((title, *players), rows) if rows else f"No {title.partition(',')[0]} was seen.")
    return sections


def _play_sections(records: Sequence[PlayerRecord]) -> list[str]:
    rows = [
        (
            record.player,
            str(len(record.runs)),
            _with_interval(record.success_rate, record.success_interval),
            _with_interval(float(np.mean(record.returns)) if record.returns else None, record.mean_interval),
            " ".join(f"{q:.3g}" for q in np.quantile(record.returns, _QUANTILES)) if record.returns else "-",
            f"{np.mean(record.turns):.3g} ({min(record.turns)} to {max(record.turns)})" if record.runs else "-",
        )
        for record in records
    ]
    quantiles = "/".join(f"{100 * q:g}" for q in _QUANTILES)
    head = ("player", "episodes", "success (95%)", "mean return (95%)", f"return at {quantiles}%", "turns")
    sections = ["## Play", _table(head, rows)]
    for record in records:
        if record.failures:
            sections.append(f"{len(record.failures)} episodes of {record.player} failed; {record.failures[0]}")
        if record.returns:
            sections.append(f"Returns of {record.player}:\n\n{_fenced(histogram(record.returns))}")
    return sections


def histogram(values: Sequence[float]) -> str:
    """One line a value, or one a tenth of the range where there are more than ten values, with its count as a bar.

    >>> print(histogram([0.0, 1.0, 1.0, 1.0]))
    0  1 #############
    1  3 ########################################
    """
    distinct, counts = np.unique(values, return_counts=True)
    labels = [f"{value:.4g}" for value in distinct]
    if len(distinct) > _MAX_LINES:
        counts, edges = np.histogram(values, bins=_MAX_LINES)
        labels = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    width, digits = max(map(len, labels)), len(str(max(counts)))
    return "\n".join(
        f"{label:<{width}}  {count:>{digits}} {'#' * round(_BAR * count / max(counts))}".rstrip()
        for label, count in zip(labels, counts, strict=True)
    )


def _transcript(run: Playthrough) -> str:
    said = [*run.opening]
    for action, answer in zip(run.actions, run.answers, strict=True):
        said += [action, *answer.messages]
    outcome = f"return {run.episode_return:g}" if run.episode_return is not None else "not scored"
    turns = "1 turn" if len(run.answers) == 1 else f"{len(run.answers)} turns"
    return _fenced("\n".join(map(_spoken, said))) + f"\n\n{outcome}, {turns}."


def _spoken(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
    text = "\n".join([message.content] * bool(message.content) + calls)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}\n... and {len(text) - _MAX_CHARACTERS} more characters"
    return f"{message.role:<9}  " + text.replace("\n", "\n" + " " * 11)


def _tool_line(tool: Mapping[str, Any]) -> str:
    """Any: JSON."""
    properties = (tool.get("parameters") or {}).get("properties", {})
    given = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties.items())
    return f"- `{tool['name']}({given})`: {tool.get('description') or 'no description'}"


def _with_interval(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "not declared" if interval is None else "-"
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _coded(rows: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    return [tuple(f"`{cell}`" for cell in row) for row in rows]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _fenced(text: str) -> str:
    """As a code block, whatever fences it holds itself."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
