"""`gspo-gym env new NAME` writes a package with a small environment; `gspo-gym env card NAME` describes an environment.

A new package's files are in `templates/`, with placeholders such as $package and $class_name. A card describes the
interface of any registered environment and the scores of its scripted players, as Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import keyword
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import Any

import gymnasium
import numpy as np

from gspo_gym.base.files import make_folder, write_output
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, play, schemas_of, tool_calling_policy
from gspo_gym.env.registry import list_environments, make, resolve
from gspo_gym.env.session import looking_at
from gspo_gym.errors import ConfigError, GymError, UnknownNameError, nearest_name
from gspo_gym.rollout.evaluation import Interval, bootstrap_mean_interval, wilson_interval
from gspo_gym.types import Message

KINDS = ("text", "tool")
_TEMPLATES = resources.files("gspo_gym.cli") / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# What the files of a package define or import themselves, and a folder that it has.
_TAKEN = ("Achievements", "Reward", "RewardTerms", "Task", "TaskSource", "TextEnv", "ToolEnv", "Tests")


def add_commands(subparsers: Any) -> None:  # Any: argparse does not name the type of what add_subparsers gives
    """Add the commands `env new` and `env card`."""
    new = subparsers.add_parser("new", help="write a package with an environment that works, to be made yours")
    new.add_argument("name", help="WordSort or word_sort")
    new.add_argument("--kind", default="text", help="text (default) or tool: how the model acts")
    new.add_argument("--folder", type=Path, default=Path(), help="where to put it (default: here)")
    new.set_defaults(run=write_new)

    card = subparsers.add_parser("card", help="describe an environment: spaces, tools, rewards, a transcript, scores")
    add_environment(card)
    card.add_argument("--seeds", type=int, default=100, metavar="N", help="play the seeds 0 to N - 1 (default 100)")
    card.add_argument("--max-turns", type=int, default=200, help="longer episodes are cut off here (default 200)")
    card.add_argument("--markdown", type=Path, metavar="FILE", help="write it to a file instead of the terminal")
    card.set_defaults(run=print_card)


def write_new(arguments: argparse.Namespace) -> int:
    """Write the package; print its files and the next commands to run."""
    new = new_environment(arguments.name, kind=arguments.kind, folder=arguments.folder)
    print(f"{new.env_id} is in {new.folder}:")
    for path in new.files:
        print(f"  {path}")
    folder = shlex.quote(str(new.folder))
    print(f"Next:\n  cd {folder} && pip install -e .\n  gspo-gym env check {new.env_id}\n  gspo-gym train train.toml")
    return 0


def print_card(arguments: argparse.Namespace) -> int:
    """Print the card or write it to a file; return 1 if an episode could not be played."""
    options = env_config_of(arguments.option)
    card = make_card(arguments.name, options, num_seeds=arguments.seeds, max_turns=arguments.max_turns)
    text = card_as_markdown(card)
    if arguments.markdown is None:
        sys.stdout.write(text)
    else:
        make_folder(arguments.markdown.parent)
        write_output(arguments.markdown, text)
        print(f"wrote {arguments.markdown}")
    return 1 if any(record.failures for record in card.records) else 0


@dataclass(frozen=True, slots=True)
class NewEnvironment:
    """A written project: its folder, its files in the order in which to read them, and its id once it is installed."""

    folder: Path
    files: tuple[Path, ...]
    env_id: str


def new_environment(name: str, *, kind: str = "text", folder: Path = Path()) -> NewEnvironment:
    """Write the project `folder`/NAME-env: a package to install, with its tasks, players, README, test and config.

    The result passes `check_env` unchanged. No existing file is touched.

    Args:
        name: WordSort or word_sort: the package is `word_sort`, the class `WordSort`, the project `word-sort-env`.
        kind: "text" (the model answers in text) or "tool" (it calls tools).
        folder: created if missing.

    Raises:
        UnknownNameError: no such kind.
        ConfigError: the name is not a Python name, or is taken by a folder, module or environment.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"there is no kind {kind!r} of environment; {nearest_name(kind, KINDS)}")
    words = _names_of(name)
    project = folder / words["distribution"]
    if project.exists():
        raise ConfigError(f"{project} exists already; choose another name or another --folder")
    package = words["package"]
    sources = {f"{package}/{name}": name for name in ("env.py", "tasks.py", "rewards.py", "policies.py", "__init__.py")}
    templates = {"README.md": "README.md", **sources, f"tests/test_{package}.py": "test_env.py"}
    templates |= {name: name for name in ("train.toml", "pyproject.toml")}
    texts: dict[Path, str] = {}
    for path, name in templates.items():
        own, shared_template = (_TEMPLATES / folder / f"{name}.template" for folder in (kind, "any"))
        template = (own if own.is_file() else shared_template).read_text(encoding="utf-8")
        texts[Path(path)] = Template(template).substitute(words)
    # After all texts are there: an error leaves no half-written project.
    for target, text in texts.items():
        make_folder((project / target).parent)
        write_output(project / target, text)
    return NewEnvironment(project, tuple(texts), words["env_id"])


def _names_of(name: str) -> dict[str, str]:
    """Return the values of the templates' placeholders.

    Raises:
        ConfigError: the name is not a valid one, or is taken.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"expected a name of letters, digits and _ that begins with a letter, got {name!r}")
    package = _WORD_BEGINS.sub("_", name).lower()
    class_name = "".join(word.capitalize() for word in package.split("_"))
    if keyword.iskeyword(package) or keyword.iskeyword(class_name) or class_name in _TAKEN:
        raise ConfigError(
            f"{name!r} means something else in Python or in the files of the package; choose another name"
        )
    for env_id in list_environments(include_gymnasium=True):
        if re.sub(r"-v\d+$", "", env_id.rpartition("/")[2]) == class_name:  # without namespace and version
            raise ConfigError(f"there is an environment {env_id!r} already; choose another name than {name!r}")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"there is a module {package!r} already, which would be hidden; choose another name")
    return {
        "name": name,
        "package": package,
        # Of the folder, too: one named like the package would hide it from a Python started beside it.
        "distribution": package.strip("_").replace("_", "-") + "-env",
        "class_name": class_name,
        "env_id": f"{package}/{class_name}-v0",
    }


REFERENCE, RANDOM = "reference", "random"
_STAND_IN = "arbitrary actions"  # where an environment has no random player
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class PlayerRecord:
    """The episodes of one player, by seed, and what went wrong in those that could not be played."""

    player: str
    runs: tuple[Playthrough, ...]
    failures: tuple[str, ...]

    @property
    def returns(self) -> tuple[float, ...]:
        """Return the return of each episode in which a turn had a reward."""
        return tuple(run.episode_return for run in self.runs if run.episode_return is not None)

    @property
    def turns(self) -> tuple[int, ...]:
        """Return the number of actions in each episode."""
        return tuple(len(run.answers) for run in self.runs)

    @property
    def success_rate(self) -> float | None:
        """Return the fraction of all episodes that succeeded, or None if no episode declared success or failure."""
        if all(run.success is None for run in self.runs):
            return None
        return sum(run.success is True for run in self.runs) / len(self.runs)

    @property
    def success_interval(self) -> Interval | None:
        """Return the 95% Wilson interval of the success rate."""
        rate, num_runs = self.success_rate, len(self.runs)
        return None if rate is None else wilson_interval(round(rate * num_runs), num_runs)

    @property
    def mean_terms(self) -> Mapping[str, float]:
        """Return the sum of each reward term over an episode, averaged over all episodes."""
        totals: Counter[str] = Counter()
        for run in self.runs:
            for answer in run.answers:
                totals.update(answer.reward_terms)
        return {name: total / len(self.runs) for name, total in totals.items()}

    @property
    def event_rates(self) -> Mapping[str, float]:
        """Return the fraction of the episodes in which each event occurred."""
        counts = Counter(name for run in self.runs for name in {e for answer in run.answers for e in answer.events})
        return {name: count / len(self.runs) for name, count in counts.items()}


@dataclass(frozen=True)
class EnvironmentCard:
    """The contents of a card.

    Attributes:
        summary: the first paragraph of the docstring.
        options: the constructor's arguments with the values used here, as Python literals.
        facts: spaces, isolation, limits and the like, by name.
        tools: what the model may call: name, description, parameters (Any: JSON schemas).
        reward_range: as declared.
        records: of the reference and of the random player, where the environment has them.
    """

    env_id: str
    summary: str
    options: Mapping[str, str]
    facts: Mapping[str, str]
    tools: tuple[Mapping[str, Any], ...]
    reward_range: tuple[float, float]
    records: tuple[PlayerRecord, ...]


def make_card(
    name: str, env_config: Mapping[str, Any] | None = None, *, num_seeds: int = 100, max_turns: int = 200
) -> EnvironmentCard:
    """Play a registered environment and return its card.

    Args:
        name: the environment.
        env_config: arguments for the constructor (Any: each environment defines them).
        num_seeds: the seeds 0 to num_seeds - 1 are played, which are evaluation tasks.
        max_turns: longer episodes are cut off here.

    Raises:
        UnknownNameError: there is no such environment.
        ConfigError: the constructor refuses the arguments, or there are no seeds.
    """
    if num_seeds < 1:
        raise ConfigError(f"card: expected at least one seed, got {num_seeds}")
    return run_to_end(_make_card(resolve(name), dict(env_config or {}), range(num_seeds), max_turns))


async def _make_card(env_id: str, config: dict[str, Any], seeds: Sequence[int], max_turns: int) -> EnvironmentCard:
    factory = partial(make, env_id, **config)
    # Only to read its declarations: the episodes below are played on other instances.
    async with looking_at(factory, env_id) as wrapper:
        env = getattr(wrapper, "unwrapped", wrapper)
        policies: Mapping[str, PolicyFactory] = getattr(env, "policies", {})
        low, high = getattr(env, "reward_range", (-math.inf, math.inf))
        card = partial(
            EnvironmentCard,
            env_id=env_id,
            summary=inspect.cleandoc(type(env).__doc__ or "").partition("\n\n")[0],
            options=_options(type(env), config),
            facts=_facts(env_id, env),
            tools=schemas_of(env),
            reward_range=(float(low), float(high)),
        )
    players = {REFERENCE: policies[REFERENCE]} if REFERENCE in policies else {}
    players |= {RANDOM: policies[RANDOM]} if RANDOM in policies else {_STAND_IN: tool_calling_policy}
    play_one = partial(play, factory, name=env_id, max_turns=max_turns, step_timeout_seconds=_TIMEOUT_SECONDS)
    records = []
    for player, policy in players.items():
        runs: list[Playthrough] = []
        failures: list[str] = []
        # One after another: an environment's player may be expensive.
        for seed in seeds:
            try:
                runs.append(await play_one(policy, seed=seed))
            except (GymError, PlayerError) as error:
                failures.append(f"seed {seed}: {type(error).__name__}: {error}")
        records.append(PlayerRecord(player, tuple(runs), tuple(failures)))
    return card(records=tuple(records))


def _options(env_class: type, config: Mapping[str, Any]) -> dict[str, str]:
    parameters = inspect.signature(env_class).parameters.values()
    defaults = {
        p.name: "required" if p.default is p.empty else repr(p.default)
        for p in parameters
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return defaults | {name: repr(value) for name, value in config.items()}


def _facts(env_id: str, env: Any) -> dict[str, str]:
    limit = gymnasium.registry[env_id].max_episode_steps
    return {
        "acts by": "tool calls" if getattr(env, "takes_messages", False) else "text",
        "observation space": str(getattr(env, "observation_space", "not said")),
        "action space": str(getattr(env, "action_space", "not said")),
        "isolation": getattr(env, "isolation", None) or "not said (a thread of the episode's own)",
        **({"code of the model": env.confinement} if getattr(env, "confinement", None) else {}),
        "time limit": "none from outside" if limit is None else f"{limit} steps, then truncated",
        "players": ", ".join(getattr(env, "policies", {})) or "none",
    }


_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MAX_LINES = 10  # of a histogram
_BAR = 40  # characters of its longest bar
_MAX_CHARACTERS = 1_000  # of a message in the transcript


def card_as_markdown(card: EnvironmentCard) -> str:
    """Format the card as Markdown that ends with a newline."""
    sections = [f"# {card.env_id}", card.summary, _table(("", ""), card.facts.items())]
    if card.options:
        options = [(f"`{name}`", f"`{value}`") for name, value in card.options.items()]
        sections += ["## Options", _table(("argument", "value"), options)]
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
    values = [value for record in card.records for value in record.returns]
    no_reward_text = "none: only a judge can score it"
    range_seen = f"between {min(values):g} and {max(values):g} over these episodes" if values else no_reward_text
    players = [record.player for record in card.records]
    sections = ["## Rewards", f"Return of an episode: declared from {low:g} to {high:g}; {range_seen}."]
    for title, tables in (
        ("term, its mean over the episodes", [record.mean_terms for record in card.records]),
        ("event, share of the episodes", [record.event_rates for record in card.records]),
    ):
        names = sorted({name for by_name in tables for name in by_name})
        rows = [(f"`{name}`", *(f"{by_name.get(name, 0.0):.3g}" for by_name in tables)) for name in names]
        sections.append(_table((title, *players), rows) if rows else f"No {title.partition(',')[0]} was seen.")
    return sections


def _play_sections(records: Sequence[PlayerRecord]) -> list[str]:
    rows = [
        (
            record.player,
            str(len(record.runs)),
            _with_interval(record.success_rate, record.success_interval),
            _with_interval(
                float(np.mean(record.returns)) if record.returns else None, bootstrap_mean_interval(record.returns)
            ),
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
            sections.append(f"Returns of {record.player}:\n\n{_fence(histogram(record.returns))}")
    return sections


def histogram(values: Sequence[float]) -> str:
    """Draw the counts of values as bars: one line per value, or ten lines of equal ranges if there are more than ten.

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
    messages = [*run.opening]
    for action, answer in zip(run.actions, run.answers, strict=True):
        messages += [action, *answer.messages]
    outcome = f"return {run.episode_return:g}" if run.episode_return is not None else "not scored"
    turns = "1 turn" if len(run.answers) == 1 else f"{len(run.answers)} turns"
    return _fence("\n".join(map(_message_text, messages))) + f"\n\n{outcome}, {turns}."


def _message_text(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
    text = "\n".join([message.content] * bool(message.content) + calls)
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS]}\n... and {len(text) - _MAX_CHARACTERS} more characters"
    return f"{message.role:<9}  " + text.replace("\n", "\n" + " " * 11)


def _tool_line(tool: Mapping[str, Any]) -> str:
    properties = (tool.get("parameters") or {}).get("properties", {})
    arguments = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in properties.items())
    return f"- `{tool['name']}({arguments})`: {tool.get('description') or 'no description'}"


def _with_interval(value: float | None, interval: Interval | None) -> str:
    if value is None:
        return "not declared" if interval is None else "-"
    return f"{value:.3f}" if interval is None else f"{value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _fence(text: str) -> str:
    """Return text as a code block with a fence longer than any inside it."""
    # A transcript may hold code blocks.
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
