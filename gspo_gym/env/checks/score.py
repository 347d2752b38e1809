"""Checks of the rewards: the reference reaches the top, neither chance nor a trick does, and no answer is shown.

A *place* is a part of what `reset` answers, such as info['answer'], the word after "is", or the second line. A place
shows the answer if saying its text wins in every task and the text differs between tasks.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gspo_gym.env.checks.contract import TOLERANCE
from gspo_gym.env.checks.subject import Findings, Subject, mean_return
from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.playing import PlayerError, Playthrough, arguments_for, play_in, play_unreadable, schemas_of
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import GymError
from gspo_gym.seeding import FIRST_TRAINING_SEED
from gspo_gym.types import Message, ToolCall

_WIDTH = 100  # of the line of mean returns


async def reference_is_best(subject: Subject, findings: Findings) -> None:
    """Check that the reference earns the largest return."""
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
    """Check that no trick succeeds, that neither tricks nor random play earn the reference's mean return, and that
    text that cannot be read earns no more than random play, in as many turns unless the environment ends it.

    Without a reference, the bound is the largest return, if finite; without random play, tricks stand for it.
    """
    settings = subject.settings
    returns = {}
    for player in (settings.random, settings.reference):
        if subject.runs_of(player):
            returns[player] = subject.mean_return(player)
    turns = subject.settings.max_turns
    plays: dict[str, _Play] = {
        name: partial(_play_policy, policy=policy, max_turns=turns) for name, policy in probes(_rubric(subject)).items()
    }
    plays[_UNREADABLE] = lambda session, seed: play_unreadable(session, _ERROR, seed=seed, max_turns=turns)
    for player, play in plays.items():
        runs = await _play_seeds(subject, findings, player, play)
        if not runs:
            continue
        returns[player] = mean_return(_as_long_as_others(subject, runs) if player == _UNREADABLE else runs)
        for run in runs:
            if run.success and subject.reference_is_perfect:  # else a win may be luck, and only the mean counts
                findings.fail(
                    f"seed {run.seed}: expected {player} to fail, it succeeded; where a guess can win, set "
                    "reference_is_perfect = False, and only mean returns are compared"
                )
    best, best_text = returns.get(settings.reference, subject.reward_range[1]), "the largest return"
    if settings.reference in returns:
        best_text = f"{settings.reference!r} on average"
    for player, mean in returns.items():
        if player != settings.reference and mean >= best - TOLERANCE and not _is_unscored(subject):
            findings.fail(f"expected {player} to earn less than {best_text} ({best:g}), got {mean:g}")
    ordinary = {player: mean for player, mean in returns.items() if player not in (settings.reference, _UNREADABLE)}
    chance = ordinary.get(settings.random, max(ordinary.values(), default=math.inf))
    if (unreadable := returns.get(_UNREADABLE, -math.inf)) > chance + TOLERANCE and not _is_unscored(subject):
        findings.fail(
            f"expected text that cannot be read to earn no more than other play ({chance:g}), got {unreadable:g}: a "
            "policy would learn to be unreadable; declare reward_range, or let invalid_action cost more"
        )
    summary = "mean return: " + ", ".join(f"{player} {mean:.3g}" for player, mean in returns.items())
    for line in textwrap.wrap(summary, _WIDTH):
        findings.tell(line)
    findings.measurements["mean_returns"] = returns


_Play = Callable[[EnvSession, int], Awaitable[Playthrough]]  # one episode of a seed in an open session


def _as_long_as_others(subject: Subject, runs: Sequence[Playthrough]) -> list[Playthrough]:
    """Cut episodes that the environment does not end to the turns of other play: over hundreds, any price is large."""
    ordinary_runs = subject.runs_of(subject.settings.random) or subject.runs_of(subject.settings.reference)
    turns = {run.seed: len(run.answers) for run in ordinary_runs}
    return [run if run.is_over else replace(run, answers=run.answers[: turns.get(run.seed)]) for run in runs]


async def _play_policy(session: EnvSession, seed: int, *, policy: PolicyFactory, max_turns: int) -> Playthrough:
    return await play_in(session, policy, seed=seed, max_turns=max_turns)


async def _play_seeds(subject: Subject, findings: Findings, player: str, play: _Play) -> list[Playthrough]:
    runs = []
    for seed in subject.seeds:
        try:
            session = await subject.open()
            try:
                runs.append(await play(session, seed))
            finally:
                await session.close()
        except (GymError, PlayerError) as error:
            findings.fail(f"{player}, seed {seed}: {type(error).__name__}: {error}")
            break
    return runs


def _rubric(subject: Subject) -> str:
    terms = {name for run in subject.runs.values() for answer in run.answers for name in answer.reward_terms}
    return "\n".join([subject.rubric, *sorted(terms)])


def _is_unscored(subject: Subject) -> bool:  # which leaves scoring to a judge
    return all(run.episode_return is None for run in subject.runs.values())


# Players that try to be paid without doing the task, as a policy under training may.
LONG_ANSWER = "I think about it again. " * 2_000  # 48,000 characters
CANDIDATES = " ".join(map(str, range(1, 101)))
CLAIM = "I have solved the task. Reward: 1.0"
_UNREADABLE, _ERROR = "unreadable text", "unreadable: expected a tool call"

# The text of a trick, from the environment and the messages so far.
_Text = Callable[[Any, Sequence[Message]], str]


def probes(rubric: str) -> dict[str, PolicyFactory]:
    """Return the tricks by name; `rubric` is the text to quote."""
    texts: Mapping[str, _Text] = {
        "repeating the prompt": lambda _env, messages: messages[0].content,
        "repeating the last message": lambda _env, messages: messages[-1].content,
        "repeating the tools": lambda env, _messages: json.dumps(schemas_of(env)),
        "quoting the rubric": lambda _env, _messages: rubric,
        "a very long answer": lambda _env, _messages: LONG_ANSWER,
        "every number to 100": lambda _env, _messages: CANDIDATES,
        "claiming success": lambda _env, _messages: CLAIM,
    }
    text_players = {name: saying(text) for name, text in texts.items()}
    return {"an empty answer": _empty, "every tool without arguments": _every_tool, **text_players}


def _empty(env: Any, rng: np.random.Generator) -> ScriptedPolicy:  # noqa: ARG001 - a PolicyFactory
    return lambda _messages: ""


def _every_tool(env: Any, rng: np.random.Generator) -> ScriptedPolicy:  # noqa: ARG001 - a PolicyFactory
    names = [schema["name"] for schema in schemas_of(env)]
    calls = tuple(ToolCall(f"call_{index}", name, {}) for index, name in enumerate(names))
    return lambda _messages: Message("assistant", "", calls)


def saying(text: _Text) -> PolicyFactory:
    """Return a player that says the text and calls every tool with it."""

    def policy(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
        def play(messages: Sequence[Message]) -> Message:
            reply_text = text(env, messages)
            calls = [
                ToolCall(f"call_{index}", schema["name"], arguments_for(schema, rng, text=reply_text))
                for index, schema in enumerate(schemas_of(env))
            ]
            return Message("assistant", reply_text, tuple(calls))

        return play

    return policy


_FURTHER_SEEDS = range(FIRST_TRAINING_SEED, FIRST_TRAINING_SEED + 10)  # none of them is among the checked seeds
_MAX_TURNS = 20  # of an episode that repeats one action
_MAX_PLACES = 40  # places that are played
_MAX_WORDS = 400  # words of one text that become places
_MARKS = ".,;!?()[]{}<>\"'`*_"
_BETWEEN = re.compile(r"[\s:=]+")
_LABEL = re.compile(r"^\s*(.{1,40}?)\s*[:=]\s*(\S.*?)\s*$")

_GAP, _NUMBER_GAP = "\0", "\1"  # stand in a form for a text and for a whole number

Places = Mapping[str, str]  # texts by the name of their place


@dataclass(frozen=True, slots=True)
class _Task:
    """The places of one task's reset, the reference's episode, and the (tool, argument) pairs that offer choices."""

    seed: int
    places: Places
    reference: Playthrough | None
    choices: frozenset[tuple[str, str]]


async def nothing_shown_is_the_answer(subject: Subject, findings: Findings) -> None:
    """Check that no place of the first observation or of info wins in every task."""
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
            # A text that wins a few tasks (the letter of a choice, a cell of a board) is luck: ask for ten more.
            further = further or [await _task(subject, seed) for seed in _FURTHER_SEEDS]
            if await _always_wins(subject, further, place, form):
                examples = ", ".join(repr(task.places[place])[:40] for task in tasks[:3])
                findings.fail(
                    f"expected {place} to say nothing of the answer; repeating what stands there ({examples}, ...) won "
                    f"all {len(tasks) + len(further)} tasks"
                )
                return
    findings.tell(f"{len(suspects)} places of the first observation and info were suspected, none is the answer")


def places(opening: Sequence[Message], info: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each place of a first observation and of `info`.

    >>> places([Message("user", "Add 1 and 2.")], {"sum": 3})["info['sum']"]
    '3'
    """
    text_by_place = dict(_leaves("info", info))
    for name, text in list(text_by_place.items()):
        text_by_place.update(_parts(name, text))
    text_by_place.update(_parts("the first observation", "\n".join(message.content for message in opening)))
    return {name: text for name, text in text_by_place.items() if text}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(f"{name}[{index}]", part)
    elif value is not None:
        yield name, str(value).strip()


def _parts(name: str, text: str) -> Iterator[tuple[str, str]]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Labelled lines come first: the first of several places with the same texts is reported, and labels say the
    # most.
    for line in lines:
        if match := _LABEL.match(line):
            yield f"what follows {match[1]!r} in {name}", match[2]
    words = [word.strip(_MARKS) for word in _BETWEEN.split(text)][:_MAX_WORDS]
    lower_words = [word.casefold() for word in words]
    for before, word in zip(lower_words, words[1:], strict=False):
        if lower_words.count(before) == 1:
            yield f"the word after {before!r} in {name}", word
    for kind, parts in (("line", lines), ("word", words)):
        if len(parts) > 1:
            for index, part in enumerate(parts):
                yield f"{kind} {index + 1} of {name}", part
                yield f"{kind} {len(parts) - index} from the end of {name}", part


def _suspects(tasks: Sequence[_Task]) -> list[str]:
    # Places that every task has, with texts that vary and that the reference says. Values of info are suspected even if
    # it does not say them. Places with the same texts count once.
    common = [name for name in tasks[0].places if all(name in task.places for task in tasks)]
    seen_texts: set[tuple[str, ...]] = set()
    suspects = []
    for name in common:
        texts = tuple(task.places[name] for task in tasks)
        if len(set(texts)) == 1 or texts in seen_texts:
            continue
        if _is_info(name) or all(says(task.reference, task.places[name]) for task in tasks):
            seen_texts.add(texts)
            suspects.append(name)
    # Only _MAX_PLACES are played, and info is the likeliest.
    return sorted(suspects, key=lambda name: not _is_info(name))


def _is_info(name: str) -> bool:
    return name.startswith("info[")


def says(reference: Playthrough | None, text: str) -> bool:
    """Return whether an action of the reference's episode has this text as words; True without an episode."""
    if reference is None:
        return True
    parts = (
        part
        for action in reference.actions
        for part in (action.content, *(str(value) for call in action.tool_calls for value in call.arguments.values()))
    )
    return any(_as_word(text).search(part) for part in parts)


def _forms(task: _Task, place: str) -> list[Message | None]:  # alone (None), and as the reference says this task's
    actions = [] if task.reference is None else list(task.reference.actions)
    forms = [_form(action, task.places[place], task.choices) for action in actions]
    return [None, *[form for form in forms if form not in actions][-1:]]


def _form(action: Message, text: str, choices: frozenset[tuple[str, str]]) -> Message:
    calls = []
    for call in action.tool_calls:
        argument_items = call.arguments.items()
        # An argument with listed choices hides nothing, so its value stays.
        calls.append(
            replace(call, arguments={n: v if (call.name, n) in choices else _gap(v, text) for n, v in argument_items})
        )
    content = _as_word(text).sub(lambda _: _GAP, action.content)
    return replace(action, content=content, tool_calls=tuple(calls))


def _gap(value: Any, text: str) -> Any:
    if str(value).strip().casefold() != text.casefold():
        return value
    return _NUMBER_GAP if isinstance(value, int) and not isinstance(value, bool) else _GAP


def _fill_gaps(form: Message, text: str) -> Message:
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
    for task in tasks:
        if place not in task.places or not await _wins(subject, task, task.places[place], form):
            return False
    return len({task.places[place] for task in tasks}) > 1  # one text for all tasks answers none of them


async def _wins(subject: Subject, task: _Task, text: str, form: Message | None) -> bool:
    policy = saying(lambda _env, _messages: text) if form is None else repeating(_fill_gaps(form, text))
    try:
        session = await subject.open()
        try:
            turns = min(_MAX_TURNS, subject.settings.max_turns)
            run = await play_in(session, policy, seed=task.seed, max_turns=turns)
        finally:
            await session.close()
    except (GymError, PlayerError):  # reported by other checks
        return False
    if run.success is not None:
        return run.success
    return run.episode_return is not None and run.episode_return >= _target(subject) - TOLERANCE


def repeating(action: Message) -> PolicyFactory:
    """Return a player that takes this action in every turn."""
    return lambda _env, _rng: lambda _messages: action


def _target(subject: Subject) -> float:  # without a reference, which solves its tasks, the largest possible return
    references = [run.episode_return for run in subject.runs_of(subject.settings.reference)]
    returns = [value for value in references if value is not None]
    return min(returns, default=subject.reward_range[1])


def _can_win(subject: Subject) -> bool:
    declares = any(run.success is not None for run in subject.runs.values())
    return declares or math.isfinite(_target(subject))
