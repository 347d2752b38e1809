"""Checks of what is rewarded: the reference reaches the top, and neither chance nor a trick gets there.

The check that no answer is shown: nothing that stands in the first observation or in info is enough to be paid.

A *place* names a part of what `reset` answers, such as info['answer'], the word after "is", or the second line. One
whose text wins in every task, and differs between tasks, is the answer. That a text wins in some tasks (the letter of
a choice, a cell of a board) is no leak, so a place is asked in further tasks before it is reported.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo_gym.env.checks.contract import TOLERANCE
from gspo_gym.env.checks.probes import probes, saying
from gspo_gym.env.checks.subject import Findings, Subject, mean_return
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, play_in, schemas_of
from gspo_gym.errors import GymError
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message

_WIDTH = 100  # of the mean returns, which are many


async def reference_is_best(subject: Subject, findings: Findings) -> None:
    """The reference earns the largest return there is."""
    reference = subject.settings.reference
    if reference not in subject.policies:
        findings.notes.append(f"no policy {reference!r}: whether the task can be solved was not checked")
        return
    if not subject.reference_is_perfect:
        findings.tell(f"{reference!r} need not be perfect here: it only has to beat other play on average")
        return
    top = subject.reward_range[1]
    for run in subject.runs_of(reference):
        if run.success is False or not run.is_over:
            state = "failed" if run.is_over else f"was not done after {len(run.answers)} turns"
            findings.fail(f"seed {run.seed}: expected {reference!r} to succeed, it {state}")
        elif math.isfinite(top) and not math.isclose(run.episode_return or 0.0, top, abs_tol=TOLERANCE):
            findings.fail(f"seed {run.seed}: expected {reference!r} to earn {top}, got {run.episode_return}")
    if not math.isfinite(top):
        findings.notes.append("reward_range has no largest return, so the reference's was not compared with it")
    if any(run.success is None for run in subject.runs_of(reference)):
        findings.notes.append("no Reward(..., success=True) from the reference: there will be no success rate")


async def tricks_do_not_pay(subject: Subject, findings: Findings) -> None:
    """No trick succeeds, and neither a trick nor random play earns what the reference does on average.

    Without a reference, what they earn is compared with the largest return, if there is one.
    """
    settings = subject.settings
    returns = {}
    for player in (settings.random, settings.reference):
        if subject.runs_of(player):
            returns[player] = subject.mean_return(player)
    for player, policy in probes(_rubric(subject)).items():
        runs = await _played(subject, findings, player, policy)
        if not runs:
            continue
        returns[player] = mean_return(runs)
        for run in runs:
            if run.success and subject.reference_is_perfect:  # else it may be luck, and the average counts
                findings.fail(f"seed {run.seed}: expected {player} to fail, it succeeded")
    best, whose = returns.get(settings.reference, subject.reward_range[1]), "the largest return"
    if settings.reference in returns:
        whose = f"{settings.reference!r} on average"
    for player, mean in returns.items():
        if player != settings.reference and mean >= best - TOLERANCE and not _is_unscored(subject):
            findings.fail(f"expected {player} to earn less than {whose} ({best:g}), got {mean:g}")
    told = "mean return: " + ", ".join(f"{player} {mean:.3g}" for player, mean in returns.items())
    for line in textwrap.wrap(told, _WIDTH):
        findings.tell(line)
    findings.measurements["mean_returns"] = returns


async def _played(subject: Subject, findings: Findings, player: str, policy: PolicyFactory) -> list[Playthrough]:
    """The player's episodes, one after another; its first failure is a problem and the end of it."""
    runs = []
    for seed in subject.seeds:
        try:
            session = await subject.open()
            try:
                runs.append(await play_in(session, policy, seed=seed, max_turns=subject.settings.max_turns))
            finally:
                await session.close()
        except (GymError, PlayerError) as error:
            findings.fail(f"{player}, seed {seed}: {type(error).__name__}: {error}")
            break
    return runs


def _rubric(subject: Subject) -> str:
    """What the environment says of its grading, and the names of the terms that rewards had."""
    terms = {name for run in subject.runs.values() for answer in run.answers for name in answer.reward_terms}
    return "\n".join([subject.rubric, *sorted(terms)])


def _is_unscored(subject: Subject) -> bool:
    """Whether only a judge scores these episodes, so that returns say nothing."""
    return all(run.episode_return is None for run in subject.runs.values())


_FURTHER_SEEDS = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 10)  # confirm a place: other tasks for sure
_MAX_TURNS = 20  # of an episode that says one thing again and again
_MAX_PLACES = 40  # that are played
_MAX_WORDS = 400  # of one text that are named
_MARKS = ".,;!?()[]{}<>\"'`*_"
_BETWEEN = re.compile(r"[\s:=]+")  # words
_LABEL = re.compile(r"^\s*(.{1,40}?)\s*[:=]\s*(\S.*?)\s*$")

_GAP, _NUMBER_GAP = "\0", "\1"  # in a form: for a text, and for a whole number

Places = Mapping[str, str]  # what stands there, by the place's name


@dataclass(frozen=True, slots=True)
class _Task:
    """One task: what its reset showed, the reference's episode, and the (tool, argument) that are choices offered."""

    seed: int
    places: Places
    reference: Playthrough | None
    choices: frozenset[tuple[str, str]]


async def nothing_shown_is_the_answer(subject: Subject, findings: Findings) -> None:
    """No place of the first observation or of info holds what wins in every task."""
    if not _can_win(subject):
        findings.notes.append("neither success nor a largest return: whether the answer is shown was not checked")
        return
    tasks = [await _task(subject, seed) for seed in subject.seeds]
    suspects = _suspects(tasks)
    further: list[_Task] = []
    for place in suspects[:_MAX_PLACES]:
        for form in _forms(tasks[0], place):
            if not await _always_wins(subject, tasks, place, form):
                continue
            further = further or [await _task(subject, seed) for seed in _FURTHER_SEEDS]
            if await _always_wins(subject, further, place, form):
                shown = ", ".join(repr(task.places[place])[:40] for task in tasks[:3])
                findings.fail(
                    f"expected {place} to say nothing of the answer; repeating what stands there ({shown}, ...) won "
                    f"all {len(tasks) + len(further)} tasks"
                )
                return
    findings.tell(f"{len(suspects)} places of the first observation and info were suspected, none is the answer")


def places(opening: Sequence[Message], info: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands in each place of a first observation and of `info` (Any: an author's).

    >>> places([Message("user", "Add 1 and 2.")], {"sum": 3})["info['sum']"]
    '3'
    """
    found = dict(_leaves("info", info))
    for name, text in list(found.items()):
        found.update(_parts(name, text))
    found.update(_parts("the first observation", "\n".join(message.content for message in opening)))
    return {name: text for name, text in found.items() if text}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Any: what an author put into info."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(f"{name}[{index}]", part)
    elif value is not None:
        yield name, str(value).strip()


def _parts(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Labelled lines first: they say the most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if match := _LABEL.match(line):
            yield f"what follows {match[1]!r} in {name}", match[2]
    words = [word.strip(_MARKS) for word in _BETWEEN.split(text)][:_MAX_WORDS]
    folded = [word.casefold() for word in words]
    for before, word in zip(folded, words[1:], strict=False):
        if folded.count(before) == 1:
            yield f"the word after {before!r} in {name}", word
    for kind, parts in (("line", lines), ("word", words)):
        if len(parts) > 1:
            for index, part in enumerate(parts):
                yield f"{kind} {index + 1} of {name}", part
                yield f"{kind} {len(parts) - index} from the end of {name}", part


def _suspects(tasks: Sequence[_Task]) -> list[str]:
    """Places that every task has, with a text that is not always the same, and that the reference says.

    Info's own values are suspected whatever the reference says. Of places with the same texts, the first is kept.
    """
    common = [name for name in tasks[0].places if all(name in task.places for task in tasks)]
    seen: set[tuple[str, ...]] = set()
    found = []
    for name in common:
        texts = tuple(task.places[name] for task in tasks)
        if len(set(texts)) == 1 or texts in seen:
            continue
        if _is_info(name) or all(_says(task.reference, task.places[name]) for task in tasks):
            seen.add(texts)
            found.append(name)
    return sorted(found, key=lambda name: not _is_info(name))


def _is_info(name: str) -> bool:
    return name.startswith("info[")


def _says(reference: Playthrough | None, text: str) -> bool:
    """Whether the reference says it, as a word or as an argument; without a reference anything may be it."""
    if reference is None:
        return True
    said = (
        part
        for action in reference.actions
        for part in (action.content, *(str(value) for call in action.tool_calls for value in call.arguments.values()))
    )
    return any(_as_word(text).search(part) for part in said)


def _forms(task: _Task, place: str) -> list[Message | None]:
    """How a text is said: alone (None), and in the words in which the reference says that of this task."""
    said = [] if task.reference is None else list(task.reference.actions)
    forms = [_form(action, task.places[place], task.choices) for action in said]
    return [None, *[form for form in forms if form not in said][-1:]]


def _form(action: Message, text: str, choices: frozenset[tuple[str, str]]) -> Message:
    """The action with a gap where the text is; not in arguments that a tool offers a choice of, which hide nothing."""
    calls = []
    for call in action.tool_calls:
        given = call.arguments.items()
        calls.append(replace(call, arguments={n: v if (call.name, n) in choices else _gap(v, text) for n, v in given}))
    content = _as_word(text).sub(lambda _: _GAP, action.content)
    return replace(action, content=content, tool_calls=tuple(calls))


def _gap(value: Any, text: str) -> Any:
    if str(value).strip().casefold() != text.casefold():
        return value
    return _NUMBER_GAP if isinstance(value, int) and not isinstance(value, bool) else _GAP


def _filled(form: Message, text: str) -> Message:
    """The form with a text in its gap."""
    is_number = re.fullmatch(r"-?\d{1,18}", text) is not None
    values = {_GAP: text, _NUMBER_GAP: int(text) if is_number else text}
    calls = [
        replace(call, arguments={n: values.get(v, v) if isinstance(v, str) else v for n, v in call.arguments.items()})
        for call in form.tool_calls
    ]
    return replace(form, content=form.content.replace(_GAP, text), tool_calls=tuple(calls))


def _as_word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)


async def _task(subject: Subject, seed: int) -> _Task:
    session = await subject.open()
    try:
        opening = await session.reset(seed)
        choices = frozenset(
            (schema["name"], name)
            for schema in schemas_of(session.env)
            for name, kind in (schema.get("parameters") or {}).get("properties", {}).items()
            if "enum" in kind or kind.get("type") == "boolean"
        )
    finally:
        await session.close()
    reference = subject.runs.get((subject.settings.reference, seed))
    return _Task(seed, places(opening.messages, opening.info), reference, choices)


async def _always_wins(subject: Subject, tasks: Sequence[_Task], place: str, form: Message | None) -> bool:
    """Whether what stands in the place is paid in every task, and is not one text for all of them."""
    for task in tasks:
        if place not in task.places or not await _wins(subject, task, task.places[place], form):
            return False
    return len({task.places[place] for task in tasks}) > 1


async def _wins(subject: Subject, task: _Task, text: str, form: Message | None) -> bool:
    policy = saying(lambda _env, _messages: text) if form is None else _repeating(_filled(form, text))
    try:
        session = await subject.open()
        try:
            turns = min(_MAX_TURNS, subject.settings.max_turns)
            run = await play_in(session, policy, seed=task.seed, max_turns=turns)
        finally:
            await session.close()
    except (GymError, PlayerError):  # what breaks it is not its answer; other checks tell of it
        return False
    if run.success is not None:
        return run.success
    return run.episode_return is not None and run.episode_return >= _target(subject) - TOLERANCE


def _repeating(action: Message) -> PolicyFactory:
    return lambda _env, _rng: lambda _messages: action


def _target(subject: Subject) -> float:
    """The return of a task that is solved, where no success is declared; infinite: nobody can say."""
    references = [run.episode_return for run in subject.runs_of(subject.settings.reference)]
    earned = [value for value in references if value is not None]
    return min(earned, default=subject.reward_range[1])


def _can_win(subject: Subject) -> bool:
    declares = any(run.success is not None for run in subject.runs.values())
    return declares or math.isfinite(_target(subject))
