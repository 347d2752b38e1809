"""The agent of a served environment: play episodes against the model that a rollout names.

The conversation is that of `rollout.episode.run_episode`, message for message (the system prompt's place, unreadable
text, the limit on turns, the end of an episode): what our gateway captures then has the tokens of an episode played in
the trainer's process. A `PlayedRollout` is filled as the rollout goes on, to keep the beginning of one that is stopped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from gspo_gym.chat.renderer import with_system_prompt
from gspo_gym.env.blame import (
    LIMIT_TERM,
    Action,
    Retrial,
    answer_to,
    are_other_actions_quick,
    floor_of,
    is_the_actions_doing,
)
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ContextOverflowError, GymError
from gspo_gym.remote.serve.inference import Reply
from gspo_gym.types import Message, Outcome, StepResult

_MAX_REPLAY_SECONDS = 600.0


class Ask(Protocol):
    """Asks the model for its next message."""

    async def __call__(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], /) -> Reply:
        """Return the model's next message.

        Raises:
            InferenceError: there is none. ContextOverflowError: the conversation no longer fits.
        """


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play.

    Attributes:
        seed: of the task. options: JSON, of each reset.
        max_turns: decisions in all, over all episodes.
        system_prompt: put before the environment's first messages; None: none is.
        make_env: makes a fresh environment, to retry what failed.
        on_done: "terminate": one episode; "reset": the same task again while there are turns left.
    """

    seed: int
    max_turns: int
    make_env: Callable[[], Any]
    system_prompt: str | None = None
    on_done: Literal["reset", "terminate"] = "terminate"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer of the model and the environment's answer to it.

    `seen` is what was new to the model: the environment's messages since its last answer.
    """

    seen: tuple[Message, ...]
    reply: Reply
    result: StepResult


@dataclass(slots=True)
class PlayedEpisode:
    """One episode so far. `outcome` None: it is still going on.

    `unanswered` is what was new to the model, and its answer, while the environment has not answered that.
    `action_seconds` is the environment's time for actions.
    """

    decisions: list[Decision] = field(default_factory=list)
    outcome: Outcome | None = None
    unanswered: tuple[tuple[Message, ...], Reply] | None = None
    action_seconds: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Return the rewards of the scored decisions."""
        return [one.result.reward for one in self.decisions if one.result.reward is not None]

    @property
    def episode_return(self) -> float | None:
        """Return the sum of the rewards; None, and not 0, if no decision was scored."""
        return float(sum(self.rewards)) if self.rewards else None

    @property
    def success(self) -> bool | None:
        """Return the environment's last declaration of success."""
        declared = [one.result.success for one in self.decisions if one.result.success is not None]
        return declared[-1] if declared else None


@dataclass(slots=True)
class PlayedRollout:
    """Everything played for one request. `num_ops` counts answers of the model and steps of the environment.

    `session` is the environment's, once there is one.
    """

    episodes: list[PlayedEpisode] = field(default_factory=list)
    num_ops: int = 0
    session: EnvSession | None = None

    @property
    def num_decisions(self) -> int:
        """Return the number of decisions over all episodes."""
        return sum(len(episode.decisions) for episode in self.episodes)


class PlayError(GymError, RuntimeError):
    """The rollout cannot go on; `code` names the side that failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def play_rollout(played: PlayedRollout, *, session: EnvSession, ask: Ask, plan: Plan) -> None:
    """Play the plan and record it in `played`.

    Raises:
        PlayError: the environment or the model failed, or not even the first message fits the model.
    """
    played.session = session
    while played.num_decisions < plan.max_turns:
        episode = PlayedEpisode()
        played.episodes.append(episode)
        await _play_episode(episode, played, session=session, ask=ask, plan=plan)
        # "reset": the same task again while there are turns left.
        if plan.on_done == "terminate":
            return


async def end_if_actions_were_slow(played: PlayedRollout, plan: Plan, *, seconds: float) -> bool:
    """Return whether actions used up the time of a rollout, `seconds`; the open episode then ends at the floor.

    That is, more than half of it went into answering actions, and rule 5 of `env/blame.py` holds. Finding out takes up
    to a quarter of that time.
    """
    if not played.episodes or played.session is None:
        return False
    episode, session = played.episodes[-1], played.session
    num_actions = len(_actions_of(episode))
    # Actions that took less than half of the time did not use it up.
    if episode.outcome is not None or num_actions == 0 or episode.action_seconds <= seconds / 2:
        return False
    retrial = _retrial_of(plan, session, max_seconds=seconds / 8)  # to make it, and to play
    if not await are_other_actions_quick(num_actions, episode.action_seconds, retrial):
        return False
    _end_at_limit(episode, session)
    return True


async def _play_episode(
    episode: PlayedEpisode, played: PlayedRollout, *, session: EnvSession, ask: Ask, plan: Plan
) -> None:
    opening = (await _of_env("env_reset_failed", session.reset(plan.seed, plan.options or None))).messages
    seen = with_system_prompt(opening, plan.system_prompt)
    conversation = seen
    while True:
        reply = await _asked(ask, conversation, session.tool_schemas, is_first=not episode.decisions)
        if reply is None:
            episode.outcome = Outcome.CONTEXT_OVERFLOW
            return
        played.num_ops += 1
        # Kept before the step: if that fails, the model's answer is not lost.
        episode.unanswered = (seen, reply)
        try:
            result = await _answered(session, episode, _action_of(reply))
        except GymError as error:
            retrial = _retrial_of(plan, session, max_seconds=_MAX_REPLAY_SECONDS)
            # Another environment is asked: a broken one would fail for any action.
            if not await is_the_actions_doing(error, _actions_of(episode), retrial):
                raise PlayError("env_step_failed", str(error)) from error
            _end_at_limit(episode, session)
            played.num_ops += 1
            return
        played.num_ops += 1
        episode.unanswered = None
        episode.decisions.append(Decision(seen, reply, result))
        conversation += (reply.message, *result.messages)
        seen = result.messages
        if result.done:
            episode.outcome = Outcome.TERMINATED if result.terminated else Outcome.TRUNCATED
            return
        if played.num_decisions >= plan.max_turns:
            episode.outcome = Outcome.MAX_TURNS
            return


def _action_of(reply: Reply) -> Action:
    return reply.message if reply.error is None else reply.error


async def _answered(session: EnvSession, episode: PlayedEpisode, action: Action) -> StepResult:
    started = time.monotonic()
    try:
        result: StepResult = await answer_to(session, action)
    finally:
        episode.action_seconds += time.monotonic() - started
    return result


def _actions_of(episode: PlayedEpisode) -> list[Action]:
    replies = [one.reply for one in episode.decisions] + ([] if episode.unanswered is None else [episode.unanswered[1]])
    return [_action_of(reply) for reply in replies]


def _retrial_of(plan: Plan, session: EnvSession, *, max_seconds: float) -> Retrial:
    return Retrial(
        plan.make_env,
        env_id=session.env_id,
        seed=plan.seed,
        options=plan.options or None,
        step_timeout_seconds=session.step_timeout_seconds,
        max_seconds=max_seconds,
    )


def _end_at_limit(episode: PlayedEpisode, session: EnvSession) -> None:
    earned = math.fsum(episode.rewards)
    floor = floor_of(session.env, earned, None)
    if episode.unanswered is not None:
        penalty = floor - earned
        result = StepResult((), reward=penalty, reward_terms={LIMIT_TERM: penalty}, terminated=True)
        episode.decisions.append(Decision(*episode.unanswered, result))
        episode.unanswered = None
    else:
        last = episode.decisions[-1]
        penalty = floor - (earned - (last.result.reward or 0.0))
        ended = replace(last.result, reward=penalty, reward_terms={LIMIT_TERM: penalty}, terminated=True, events=())
        episode.decisions[-1] = replace(last, result=ended)
    episode.outcome = Outcome.ACTION_LIMIT


async def _asked(
    ask: Ask, conversation: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], *, is_first: bool
) -> Reply | None:
    try:
        return await ask(conversation, tools)
    except ContextOverflowError as error:
        # Nothing was played: a return of 0 would be made up.
        if is_first:
            raise PlayError("no_steps_executed", f"the first message does not fit the model: {error}") from error
        return None
    except GymError as error:
        raise PlayError("policy_step_failed", str(error)) from error


async def _of_env(code: str, call: Any) -> StepResult:  # Any: a coroutine of EnvSession
    try:
        result: StepResult = await call
    except GymError as error:
        raise PlayError(code, str(error)) from error
    return result
