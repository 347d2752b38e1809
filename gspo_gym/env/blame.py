"""Decide whether a failure while an environment answered is due to the action or to the machine.

The rules, for everything that plays episodes:

1. An environment or tool that raises `ActionLimitError`, takes longer than its `max_action_seconds`, or is killed by
   `killed_after` declares that the action exceeded a limit: the action is at fault.
2. A step that misses its deadline, or kills its process, declares nothing. The same actions are played again in a fresh
   environment of the same task: if the same action fails again, it is at fault; if it does not, or an earlier action
   fails, the machine is. A first action is also replaced by an empty one: an environment that fails at that fails at
   any.
3. A failure before an action is delivered (a constructor, a reset) or after it was answered (a close) is the machine's.
4. An episode that ran out of time after more than half of it went to answering actions is treated as in 2: the actions
   are at fault if answering them again takes as long.
5. A server with a client that waits for the end of such an episode has no time for that. There the actions are at fault
   if a fresh environment of the same task answers an empty action in less than half of their mean time.

So one long wait and many short ones end an episode in the same way: scored at the floor. Ours, because no signal tells
a query that is too large from a machine that is too small, but a second try does. It costs a failed episode one more
failure, and successful episodes nothing.
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

Action = Message | str  # what an environment was given: a message for `step`, or the error text for `invalid_action`
LIMIT_TERM = "action_limit"  # the reward term of a turn whose action exceeded a limit

_NOTHING = Message("assistant", "")
_LIMIT_CODE, _LOST_CODE = "action_limit", "env_step_lost"


@dataclass(frozen=True, slots=True)
class Retrial:
    """What it takes to play actions again: `max_seconds` limit one replay, `step_timeout_seconds` each call."""

    factory: Callable[[], Any]
    env_id: str
    seed: int
    options: Mapping[str, Any] | None
    step_timeout_seconds: float | None
    max_seconds: float
    clock: Callable[[], float] = time.monotonic


async def is_the_actions_doing(error: BaseException, actions: Sequence[Action], retrial: Retrial) -> bool:
    """Return whether the last action is at fault for `error`, by rules 1 and 2."""
    if isinstance(error, ActionLimitError):
        return True
    if not isinstance(error, EnvTimeoutError | EnvDiedError):
        return False
    again = await _played_again(actions, retrial)
    return again.failed_at == len(actions) - 1 and not await _fails_at_any(actions, retrial)


async def are_the_actions_slow(actions: Sequence[Action], retrial: Retrial) -> bool:
    """Return whether answering the actions again takes more than half of `max_seconds`, by rule 4."""
    again = await _played_again(actions, retrial)
    is_slow = again.failed_at is not None or again.action_seconds > retrial.max_seconds / 2
    return is_slow and not await _fails_at_any(actions, retrial)


async def are_other_actions_quick(num_actions: int, action_seconds: float, retrial: Retrial) -> bool:
    """Return whether actions that took `action_seconds` in all are at fault for it, by rule 5."""
    control = await _played_again([_NOTHING], retrial)
    return control.num_answered == 1 and control.action_seconds < action_seconds / num_actions / 2


def failure_code(error: BaseException) -> str:
    """Return the code of a failed step that a server sends, for `failure_of`."""
    if isinstance(error, ActionLimitError):
        return _LIMIT_CODE
    return _LOST_CODE if isinstance(error, EnvTimeoutError | EnvDiedError) else "env_step_failed"


def failure_of(code: object) -> type[EnvError]:
    """Return the error class that a client raises for a `failure_code`, or for anything else."""
    if code == _LIMIT_CODE:
        return ActionLimitError
    return EnvDiedError if code == _LOST_CODE else EnvError


async def _fails_at_any(actions: Sequence[Action], retrial: Retrial) -> bool:
    if len(actions) > 1:
        return False
    control = await _played_again([_NOTHING], retrial)
    return control.failed_at is not None or control.action_seconds > retrial.max_seconds / 2


@dataclass(slots=True)
class _Again:
    """Progress of a replay; `failed_at` is None unless an action failed by a limit."""

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
        start = clock()
        try:
            result = await answer_to(session, action)
        except (EnvTimeoutError, EnvDiedError, ActionLimitError):
            again.failed_at = index
            return
        finally:
            again.action_seconds += clock() - start
        again.num_answered += 1
        if result.done:
            return


async def answer_to(session: EnvSession, action: Action) -> Any:
    """Return the environment's answer to an action, or to the error text of one that could not be read."""
    return await (session.invalid_action(action) if isinstance(action, str) else session.step(action))


def floor_of(env: Any, earned: float, stated: float | None) -> float:
    """Return the return of an episode that ended because an action exceeded a limit.

    `env.reward_range` declares the lowest return, and the floor is never above what was `earned` so far; `stated` is
    the return that the configuration states instead, or None.
    >>> floor_of(object(), 0.5, None), floor_of(object(), 0.5, 0.0)
    (-1.0, 0.0)
    """
    if stated is not None:
        return min(stated, earned)
    low = float(getattr(env, "reward_range", (-float("inf"), 0.0))[0])
    return min(low, earned) if low > -float("inf") else min(0.0, earned) - 1.0
