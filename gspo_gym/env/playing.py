"""Whole episodes of hand-written players, without a model or tokens, for the checker and for score tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo_gym.env.core import PolicyFactory, ScriptedPolicy
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import shortened
from gspo_gym.types import Message, StepResult, ToolCall

_COMPARED = ("messages", "reward", "reward_terms", "terminated", "truncated", "success", "events")

Watch = Callable[[str, int], AbstractContextManager[None]]  # around each call: its method, and the turn (-1 at first)


class PlayerError(Exception):
    """A hand-written player raised."""


@dataclass(frozen=True, slots=True)
class Playthrough:
    """One episode: its messages and the answer to each turn."""

    seed: int
    opening: tuple[Message, ...]
    actions: tuple[Message, ...]
    answers: tuple[StepResult, ...]

    @property
    def is_over(self) -> bool:
        return bool(self.answers) and self.answers[-1].done

    @property
    def episode_return(self) -> float | None:
        """Return the sum of the rewards; None if no turn had one."""
        rewards = [answer.reward for answer in self.answers if answer.reward is not None]
        return float(sum(rewards)) if rewards else None

    @property
    def success(self) -> bool | None:
        """Return the last declared success."""
        declarations = [answer.success for answer in self.answers if answer.success is not None]
        return declarations[-1] if declarations else None

    def difference_from(self, other: Playthrough) -> str | None:
        """Return the first difference in words, or None. `info`, which is for people, is not compared."""
        if self.opening != other.opening:
            return f"reset: expected the observation {_contents_of(self.opening)}, got {_contents_of(other.opening)}"
        for turn, (mine, theirs) in enumerate(zip(self.answers, other.answers, strict=False)):
            for field in _COMPARED:
                a, b = getattr(mine, field), getattr(theirs, field)
                if a != b:
                    a, b = (_contents_of(a), _contents_of(b)) if field == "messages" else (a, b)
                    return f"turn {turn}: expected {field} {a}, got {b}"
        if len(self.answers) != len(other.answers):
            return f"expected {len(self.answers)} turns, got {len(other.answers)}"
        return None


async def play(
    factory: Callable[[], Any],
    policy: PolicyFactory,
    *,
    seed: int,
    name: str,
    max_turns: int,
    step_timeout_seconds: float,
) -> Playthrough:
    """Play one episode in a fresh environment, at most `max_turns` long; the player's generator derives from the seed.

    Raises:
        EnvError, EnvTimeoutError, ContractError: the environment failed.
        PlayerError: the player failed.
    """
    session = await open_session(factory, env_id=name, step_timeout_seconds=step_timeout_seconds)
    try:
        return await play_in(session, policy, seed=seed, max_turns=max_turns)
    finally:
        await session.close()


async def play_in(
    session: EnvSession,
    policy: PolicyFactory,
    *,
    seed: int,
    max_turns: int,
    watch: Watch | None = None,
    options: Mapping[str, Any] | None = None,
) -> Playthrough:
    """Play one episode in an open session, which stays open; otherwise like `play`. `options` are those of `reset`."""
    watch = watch or (lambda _method, _turn: nullcontext())
    with watch("reset", -1):
        opening = (await session.reset(seed, options)).messages
    try:
        player = policy(session.env, np.random.default_rng((seed, 1)))
    except Exception as error:
        raise PlayerError(f"making the player raised {type(error).__name__}: {error}") from error
    messages = list(opening)
    actions: list[Message] = []
    answers: list[StepResult] = []
    while len(answers) < max_turns and not (answers and answers[-1].done):
        try:
            reply = await spoken_by(player, messages)
        except Exception as error:
            raise PlayerError(f"turn {len(answers)}: the player raised {type(error).__name__}: {error}") from error
        actions.append(Message("assistant", reply) if isinstance(reply, str) else reply)
        with watch("step", len(answers)):
            answers.append(await session.step(actions[-1]))
        messages += [actions[-1], *answers[-1].messages]
    return Playthrough(seed, opening, tuple(actions), tuple(answers))


async def play_unreadable(session: EnvSession, error: str, *, seed: int, max_turns: int) -> Playthrough:
    """Play one episode in which no turn's text can be read as an action, in an open session; `error` says why."""
    opening = (await session.reset(seed)).messages
    answers: list[StepResult] = []
    while len(answers) < max_turns and not (answers and answers[-1].done):
        answers.append(await session.invalid_action(error))
    return Playthrough(seed, opening, (), tuple(answers))


async def spoken_by(player: ScriptedPolicy, messages: Sequence[Message]) -> Message | str:
    """Return the next action of a player, plain or async."""
    reply = player(tuple(messages))
    return reply if isinstance(reply, str | Message) else await reply


def tool_calling_policy(env: Any, rng: np.random.Generator) -> ScriptedPolicy:
    """Return a player that calls random tools with random arguments, or without tools says random digits."""
    schemas = schemas_of(env)

    def play(messages: Sequence[Message]) -> Message | str:
        if not schemas:
            return str(rng.integers(100))
        schema = schemas[int(rng.integers(len(schemas)))]
        call = ToolCall(f"call_{len(messages)}", schema["name"], arguments_for(schema, rng))
        return Message("assistant", "", (call,))

    return play


def schemas_of(env: Any) -> tuple[Mapping[str, Any], ...]:
    """Return name, description and parameters of each tool; () for an environment that takes text only."""
    if not getattr(env, "takes_messages", False):
        return ()
    return tuple(schema["function"] for schema in getattr(env, "tool_schemas", ()))


def arguments_for(schema: Mapping[str, Any], rng: np.random.Generator, *, text: str | None = None) -> dict[str, Any]:
    """Return small values for the required arguments of a tool, and `text`, if given, for each string."""
    parameters = schema.get("parameters") or {}
    properties = parameters.get("properties", {})
    required_names = sorted(name for name in parameters.get("required", ()) if name in properties)
    values = {name: _value(properties[name], rng) for name in required_names}
    if text is not None:
        values |= {name: text for name, kind in properties.items() if _is_free_text(kind)}
    return values


def _is_free_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string" and "enum" not in schema


def _value(schema: Mapping[str, Any], rng: np.random.Generator) -> Any:  # as far as the first alternative tells
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for alternatives in ("anyOf", "oneOf"):
        if alternatives in schema:
            return _value(schema[alternatives][0], rng)
    kind = schema.get("type", "string")
    number = int(rng.integers(10))
    values: dict[str, Any] = {"string": str(number), "integer": number, "number": float(number)}
    values |= {"boolean": number % 2 == 0, "array": [], "object": {}, "null": None}
    return values.get(kind if isinstance(kind, str) else kind[0])


def replaying(actions: Sequence[Message]) -> PolicyFactory:
    """Return a player that repeats these actions."""

    def policy(env: Any, rng: np.random.Generator) -> ScriptedPolicy:  # noqa: ARG001 - a PolicyFactory
        remaining = iter(actions)
        return lambda _messages: next(remaining)

    return policy


def _contents_of(messages: Sequence[Message]) -> str:
    return shortened(repr([message.content for message in messages]), 200)
