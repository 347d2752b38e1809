"""Whose doing a failure is that came while an environment answered an action: the action's, or the machine's.

The rule, for everything that plays episodes:

1. An environment or tool that raises `ActionLimitError`, takes longer than its `max_action_seconds`, or is killed by
   `action_limits.killed_after` says itself that the action exceeded a limit. That is the action's doing.
2. A step that misses its deadline, or kills the process that it runs in, does not say so. The same actions are played
   again in a fresh environment of the same task: where the same action fails again, it is the action's doing; where it
   does not, or where not even the actions before it can be played, it is the machine's. Where it is the first action,
   an empty one takes its place once more: an environment that fails at that too fails at any.
3. Whatever fails before an action is delivered (a constructor, a reset) or after it was answered (a close) is the
   machine's.
4. An episode whose own deadline passed, more than half of it spent on answering actions, is treated as in 2: it is the
   actions' doing where answering them again takes as long again.
5. A server whose client waits for the end of such an episode has no time for that. There it is the actions' doing where
   a fresh environment of the same task answers an empty action in less than half the time that these took on average.

So an action that waits, and many that each wait a little, end an episode the same way: scored at the floor.

Our own, because no signal tells a query that is too large from a machine that is too small, but a second try does. It
costs a failed episode one more failure, and no episode that goes well anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.errors import ActionLimitError, EnvDiedError, EnvError, EnvTimeoutError, GymError
from gspo_gym.types import Message

# What an environment was given: a message for `step`, or for `invalid_action` why there is none.
Action = Message | str
LIMIT_TERM = "action_limit"  # the reward term of a turn whose action exceeded a limit


_NOTHING = Message("assistant", "")
_LIMIT_CODE, _LOST_CODE = "action_limit", "env_step_lost"


@dataclass(frozen=True, slots=True)
class Retrial:
    """What is needed to play actions again.

    Attributes:
        factory: makes a fresh environment (Any: authors need not subclass anything).
        env_id: its name in errors.
        seed, options: of the task.
        step_timeout_seconds: for each call; None: for ever.
        max_seconds: for each time that they are played.
        clock: seconds, monotonic.
    """

    factory: Callable[[], Any]
    env_id: str
    seed: int
    options: Mapping[str, Any] | None
    step_timeout_seconds: float | None
    max_seconds: float
    clock: Callable[[], float] = time.monotonic


async def is_the_actions_doing(error: BaseException, actions: Sequence[Action], retrial: Retrial) -> bool:
    """Whether the failure of the last action's answer is the action's doing, by the rules 1 and 2 above."""
    if isinstance(error, ActionLimitError):
        return True
    if not isinstance(error, EnvTimeoutError | EnvDiedError):
        return False
    again = await _played_again(actions, retrial)
    return again.failed_at == len(actions) - 1 and not await _fails_at_any(actions, retrial)


async def are_the_actions_slow(actions: Sequence[Action], retrial: Retrial) -> bool:
    """Whether answering the actions takes more than half of `max_seconds` once more: rule 4."""
    again = await _played_again(actions, retrial)
    is_slow = again.failed_at is not None or again.action_seconds > retrial.max_seconds / 2
    return is_slow and not await _fails_at_any(actions, retrial)


async def are_other_actions_quick(num_actions: int, action_seconds: float, retrial: Retrial) -> bool:
    """Whether actions that took so long in all are to blame for that: rule 5."""
    control = await _played_again([_NOTHING], retrial)
    return control.num_answered == 1 and control.action_seconds < action_seconds / num_actions / 2


def failure_code(error: BaseException) -> str:
    """Return what a server tells of a step that failed, from which `failure_of` reads whose doing it may be."""
    if isinstance(error, ActionLimitError):
        return _LIMIT_CODE
    return _LOST_CODE if isinstance(error, EnvTimeoutError | EnvDiedError) else "env_step_failed"


def failure_of(code: object) -> type[EnvError]:
    """Return the error that a client raises for a `failure_code`, or for anything else."""
    if code == _LIMIT_CODE:
        return ActionLimitError
    return EnvDiedError if code == _LOST_CODE else EnvError


async def _fails_at_any(actions: Sequence[Action], retrial: Retrial) -> bool:
    """Whether it was the first action, and the environment answers an empty one no better."""
    if len(actions) > 1:
        return False
    control = await _played_again([_NOTHING], retrial)
    return control.failed_at is not None or control.action_seconds > retrial.max_seconds / 2


@dataclass(slots=True)
class _Again:
    """How the actions went once more; `failed_at` None: none of them failed by a limit."""

    failed_at: int | None = None
    num_answered: int = 0
    action_seconds: float = 0.0


async def _played_again(actions: Sequence[Action], retrial: Retrial) -> _Again:
    again = _Again()
    with contextlib.suppress(GymError, TimeoutError):
        async with asyncio.timeout(retrial.max_seconds):
            session = await open_session(
                retrial.factory, env_id=retrial.env_id, step_timeout_seconds=retrial.step_timeout_seconds
            )
        try:
            async with asyncio.timeout(retrial.max_seconds):
                await session.reset(retrial.seed, retrial.options)
                await _answer_all(session, actions, again, retrial.clock)
        finally:
            await session.close()
    return again


async def _answer_all(
    session: EnvSession, actions: Sequence[Action], again: _Again, clock: Callable[[], float]
) -> None:
    for index, action in enumerate(actions):
        started = clock()
        try:
            result = await answer_to(session, action)
        except (EnvTimeoutError, EnvDiedError, ActionLimitError):
            again.failed_at = index
            return
        finally:
            again.action_seconds += clock() - started
        again.num_answered += 1
        if result.done:
            return


async def answer_to(session: EnvSession, action: Action) -> Any:
    """What the environment answers to an action (Any: a `StepResult`)."""
    return await (session.invalid_action(action) if isinstance(action, str) else session.step(action))


def floor_of(env: Any, earned: float, stated: float | None) -> float:
    """The return of an episode that an action ended by exceeding a limit (Any: authors need not subclass anything).

    Args:
        env: its `reward_range` says what the lowest return is.
        earned: the return up to then; the floor is never above it.
        stated: the return that a configuration states in its place; None: it states none.

    >>> floor_of(object(), 0.5, None), floor_of(object(), 0.5, 0.0)
    (-1.0, 0.0)
    """
    if stated is not None:
        return min(stated, earned)
    low = float(getattr(env, "reward_range", (-float("inf"), 0.0))[0])
    return min(low, earned) if low > -float("inf") else min(0.0, earned) - 1.0
