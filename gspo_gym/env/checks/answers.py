"""Does a text say the hidden answer of a task? Found out by playing, as `score.py` does for a first observation.

A part of the text (all of it, a line, what follows a label, a word) says the answer if repeating that part, alone or in
the form in which the reference player acts, wins the task from its beginning. What the player was shown before is no
secret. A text that says which of a few moves is right *now* does not win by itself, and is advice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gspo_gym.env.checks.contract import TOLERANCE
from gspo_gym.env.checks.score import fill_gaps, form_of, repeating, saying, says
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, play_in, schemas_of
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import GymError
from gspo_gym.types import Message, Task

_REFERENCE = "reference"
_MAX_TURNS = 20  # of an episode that repeats one action, as in `score.py`
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
        self._references: dict[str, Playthrough | None] = {}
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
            candidates = [part for part in candidates if says(self._references[task.task_id], part)]
        if not candidates and not actions:
            return None
        session = await open_session(
            self._make_env, env_id=self._env_id, step_timeout_seconds=self._step_timeout_seconds, checks_returns=False
        )
        try:
            reference = await self._reference(session, task)
            target = math.inf if declares_success else _target(session.env, reference)
            for action in actions:
                if await self._wins(session, task, repr(action), repeating(action), target):
                    return _words_of(action)
            for part in candidates:
                if says(reference, part) and await self._says_it(session, task, part, reference, target):
                    return part
        finally:
            await session.close()
        return None

    async def _says_it(
        self, session: EnvSession, task: Task, part: str, reference: Playthrough | None, target: float
    ) -> bool:
        if await self._wins(session, task, part, saying(lambda _env, _messages: part), target):
            return True
        choices = frozenset(
            (schema["name"], name)
            for schema in schemas_of(session.env)
            for name, kind in (schema.get("parameters") or {}).get("properties", {}).items()
            if "enum" in kind or kind.get("type") == "boolean"
        )
        for action in reversed([] if reference is None else reference.actions):
            form = form_of(action, part, choices)
            if form != action:  # the reference says this part here
                filled = fill_gaps(form, part)
                return await self._wins(session, task, repr(filled), repeating(filled), target)
        return False

    async def _reference(self, session: EnvSession, task: Task) -> Playthrough | None:
        """Return the reference player's episode of the task, of at most a run's turns; None: it has none."""
        if task.task_id not in self._references:
            policies: Mapping[str, PolicyFactory] = getattr(session.env, "policies", {})
            played = None
            if _REFERENCE in policies:
                played = await self._play(session, task, lambda env, rng: env.policies[_REFERENCE](env, rng))
            self._references[task.task_id] = played
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
        yield word.strip(_MARKS)


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
