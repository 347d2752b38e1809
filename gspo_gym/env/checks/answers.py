"""Does a text say the hidden answer of a task? Found out by playing, as `score.py` does for a first observation.

A text says the answer if repeating a part of it (all of it, a line, what follows a label, a word) wins the task from
its beginning, or if it has what is particular to this task in an action of the reference player that wins so: what
differs from the same action in another task, such as a name in a sentence or a tool's argument. What the player was
shown before is no secret. A text that says which of a few moves is right *now* does not win by itself, and is advice.
What only several hints together say ("more than 6", "less than 8") is not found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gspo_gym.env.checks.contract import TOLERANCE
from gspo_gym.env.checks.score import repeating, saying, says
from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.playing import PlayerError, Playthrough, play_in
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import GymError
from gspo_gym.types import Message, Task

_REFERENCE = "reference"
_MAX_TURNS = 20  # of an episode that repeats one action, as in `score.py`
_NUM_OTHERS = 3  # tasks, of which one has another answer: a small set of answers has equal ones
# What is particular to a task in an action of the reference, with that action.
Pieces = tuple[tuple[str, Message], ...]
_LABEL = re.compile(r"^\s*.{1,40}?\s*[:=]\s*(\S.*?)\s*$")
_MARKS = ".,;!?()[]{}<>\"'`*_"


class UncheckableError(GymError):
    """The environment says neither when a task is won nor what the largest return is: no text can be checked."""


class AnswerCheck:
    """Checks of texts against the tasks of one environment.

    Verdicts are kept for the tasks of one step: `forget` them before the next.

    Args:
        make_env: makes a fresh environment; called off the event loop.
        max_turns: of a run's episodes.
    """

    def __init__(
        self, make_env: Callable[[], Any], *, env_id: str, max_turns: int, step_timeout_seconds: float | None
    ) -> None:
        self._make_env, self._env_id, self._step_timeout_seconds = make_env, env_id, step_timeout_seconds
        self._max_turns = min(max_turns, _MAX_TURNS)
        self._references: dict[str, tuple[Playthrough | None, Pieces]] = {}
        self._verdicts: dict[tuple[str, str], bool] = {}

    def forget(self) -> None:
        """Forget the verdicts on the tasks so far."""
        self._references, self._verdicts = {}, {}

    async def leak(
        self,
        task: Task,
        text: str,
        *,
        shown: Sequence[Message],
        actions: Sequence[Message] = (),
        declares_success: bool = False,
    ) -> str | None:
        """Return the part of a text that says the answer; None: no part does.

        Args:
            shown: the conversation before the place where the text is to stand; what stands there is no secret.
            actions: of another episode, which the text tells; each is tried as it is, whatever was shown.
            declares_success: whether episodes of the task are known to say if they succeeded.

        Raises:
            UncheckableError: nobody can say what wins.
        """
        shown_text = "\n".join(message.content for message in shown)
        candidates = [part for part in parts_of(text) if not _as_word(part).search(shown_text)]
        if task.task_id in self._references:
            reference, pieces = self._references[task.task_id]
            candidates = [part for part in candidates if says(reference, part)]
            if not (candidates or actions or _said_of(pieces, text, shown_text)):
                return None
        session = await open_session(
            self._make_env, env_id=self._env_id, step_timeout_seconds=self._step_timeout_seconds, checks_returns=False
        )
        try:
            reference, pieces = await self._reference(session, task)
            target = math.inf if declares_success else _target(session.env, reference)
            for action in actions:
                if await self._wins(session, task, repr(action), repeating(action), target):
                    return _words_of(action)
            for part in candidates:
                if says(reference, part) and await self._wins(session, task, part, _saying(part), target):
                    return part
            for piece, action in _said_of(pieces, text, shown_text):
                if await self._wins(session, task, repr(action), repeating(action), target):
                    return piece
        finally:
            await session.close()
        return None

    async def _reference(self, session: EnvSession, task: Task) -> tuple[Playthrough | None, Pieces]:
        """Return the reference player's episode of the task, and what is particular in its actions; None: no player."""
        if task.task_id not in self._references:
            if _REFERENCE not in getattr(session.env, "policies", {}):
                self._references[task.task_id] = None, ()
                return None, ()
            seeds = (task.seed, *range(task.seed + 1, task.seed + 1 + _NUM_OTHERS))
            tasks = [replace(task, seed=seed) for seed in seeds]
            own, *others = [await self._play(session, each, _as_reference) for each in tasks]
            self._references[task.task_id] = own, _pieces(own, [other for other in others if other is not None])
        return self._references[task.task_id]

    async def _wins(self, session: EnvSession, task: Task, name: str, policy: PolicyFactory, target: float) -> bool:
        key = task.task_id, name
        if key not in self._verdicts:
            run = await self._play(session, task, policy)
            self._verdicts[key] = run is not None and _has_won(run, target)
        return self._verdicts[key]

    async def _play(self, session: EnvSession, task: Task, policy: PolicyFactory) -> Playthrough | None:
        try:
            return await play_in(
                session, policy, seed=task.seed, max_turns=self._max_turns, options=task.options or None
            )
        except (GymError, PlayerError):  # `env check` reports it; an action that fails does not win
            return None


def parts_of(text: str) -> list[str]:
    """Return all of a text, its lines, what follows labels in them, and its words, each once.

    >>> parts_of("wrong. Answer: 42")
    ['wrong. Answer: 42', '42', 'wrong', 'Answer']
    """
    return list(dict.fromkeys(part for part in _parts(text) if part))


def _parts(text: str) -> Iterator[str]:
    yield text.strip()
    lines = [line.strip() for line in text.splitlines()]
    yield from lines
    for line in lines:
        if match := _LABEL.match(line):
            yield match[1]
    for word in re.split(r"[\s:=]+", text):
        yield word.strip(_MARKS) or word


def _saying(text: str) -> PolicyFactory:
    return saying(lambda _env, _messages: text)


def _as_reference(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    policy: PolicyFactory = env.policies[_REFERENCE]
    return policy(env, rng)


def _pieces(own: Playthrough | None, others: Sequence[Playthrough]) -> Pieces:
    """Return what differs between each action and the same one, counted from the end, in the first task where it does.

    An action of another kind, or none there, says nothing of what is particular.
    """
    found: list[tuple[str, Message]] = []
    for place, action in enumerate([] if own is None else own.actions[::-1]):
        for other in others:
            texts = _differences(action, other.actions[-1 - place]) if place < len(other.actions) else []
            if texts:
                found += [(text, action) for text in texts]
                break
    return tuple(found)


def _differences(action: Message, other: Message) -> list[str]:
    pairs = [(action.content, other.content)]
    for call, its_call in zip(action.tool_calls, other.tool_calls, strict=False):
        if call.name == its_call.name:
            pairs += [(str(value), str(its_call.arguments.get(name, ""))) for name, value in call.arguments.items()]
    return [text for text in (_between(*pair) for pair in pairs) if text]


def _between(text: str, other: str) -> str:
    """Return what is left of a text without the words that it begins and ends with as another one does.

    >>> _between("It is Mexico City.", "It is Lima.")
    'Mexico City'
    """
    words, its_words = (re.findall(r"\w+|\W", each) for each in (text, other))
    while words and its_words and words[0] == its_words[0]:
        del words[0], its_words[0]
    while words and its_words and words[-1] == its_words[-1]:
        del words[-1], its_words[-1]
    return "".join(words).strip()


def _said_of(pieces: Pieces, text: str, shown: str) -> Pieces:
    """Return the pieces that a text says, and that were not shown."""
    words = [(_as_word(piece), piece, action) for piece, action in pieces]
    return tuple((piece, action) for word, piece, action in words if word.search(text) and not word.search(shown))


def _target(env: Any, reference: Playthrough | None) -> float:
    """Return the return from which on an episode without a declared success is won.

    Raises:
        UncheckableError: there is none, and no success is declared either, as far as the reference shows.
    """
    if reference is not None and (reference.success is not None or reference.episode_return is not None):
        return math.inf if reference.episode_return is None else reference.episode_return
    top = float(getattr(env, "reward_range", (-math.inf, math.inf))[1])
    if not math.isfinite(top):
        raise UncheckableError(
            f"{type(env).__name__}: expected a reference player or a largest return (reward_range), by which it could "
            "be found out whether a text says the answer"
        )
    return top


def _has_won(run: Playthrough, target: float) -> bool:
    if run.success is not None:
        return run.success
    return run.episode_return is not None and run.episode_return >= target - TOLERANCE


def _as_word(text: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(text)}(?!\w)", re.IGNORECASE)


def _words_of(action: Message) -> str:
    calls = (f"{call.name}({dict(call.arguments)})" for call in action.tool_calls)
    return " ".join(filter(None, [action.content, *calls]))
