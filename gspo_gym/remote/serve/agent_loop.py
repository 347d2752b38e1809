"""The agent of a served environment: plays episodes against the model that a rollout brings along.

The conversation is that of `rollout.episode.run_episode`, message for message (the system prompt's place, text that is
no action, the limit on turns, what ends an episode), so that what our gateway captures has the tokens of an episode
played in the trainer's process. What was played is written into a `PlayedRollout` as it happens, so that a rollout that
is stopped half-way still has its beginning. Called by `task_app_rollout.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gspo_gym.chat.system_prompt import with_system_prompt
from gspo_gym.env.blame import LIMIT_TERM, Action, Retrial, answer_to, floor_of, is_the_actions_doing
from gspo_gym.env.session import EnvSession
from gspo_gym.errors import ContextOverflowError, GymError
from gspo_gym.remote.serve.inference import Reply
from gspo_gym.types import Message, Outcome, StepResult

_MAX_REPLAY_SECONDS = 600.0


class Ask(Protocol):
    """Asks the model for its next message."""

    async def __call__(self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], /) -> Reply:
        """What it said; raises InferenceError, or ContextOverflowError where the conversation no longer fits."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is played.

    Attributes:
        seed: of the task. options: of each reset (Any: JSON).
        max_turns: decisions in all, over all episodes.
        system_prompt: put before what the environment says first; None: nothing is.
        make_env: makes the environment afresh, to try again what failed (Any: authors need not subclass anything).
        on_done: "terminate": one episode; "reset": the same task anew while there are turns left.
    """

    seed: int
    max_turns: int
    make_env: Callable[[], Any]
    system_prompt: str | None = None
    on_done: Literal["reset", "terminate"] = "terminate"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """One answer of the model and what the environment made of it.

    `seen` is what was new to the model: the environment's messages since its last answer.
    """

    seen: tuple[Message, ...]
    reply: Reply
    result: StepResult


@dataclass(slots=True)
class PlayedEpisode:
    """One episode, as far as it was played. `outcome` None: it was still going on."""

    decisions: list[Decision] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def rewards(self) -> list[float]:
        """Of the decisions that were scored."""
        return [one.result.reward for one in self.decisions if one.result.reward is not None]

    @property
    def episode_return(self) -> float | None:
        """The sum of the rewards; None if no decision was scored, which is not 0."""
        return float(sum(self.rewards)) if self.rewards else None

    @property
    def success(self) -> bool | None:
        """What the environment declared last."""
        declared = [one.result.success for one in self.decisions if one.result.success is not None]
        return declared[-1] if declared else None


@dataclass(slots=True)
class PlayedRollout:
    """All that was played for one request. `num_ops` counts answers of the model and steps of the environment."""

    episodes: list[PlayedEpisode] = field(default_factory=list)
    num_ops: int = 0

    @property
    def num_decisions(self) -> int:
        """Over all episodes."""
        return sum(len(episode.decisions) for episode in self.episodes)


class PlayError(GymError, RuntimeError):
    """The rollout cannot go on. `code` says which side failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def play_rollout(played: PlayedRollout, *, session: EnvSession, ask: Ask, plan: Plan) -> None:
    """Play the plan, and note it in `played`.

    Raises:
        PlayError: the environment or the model failed, or not even the first message fits the model.
    """
    while played.num_decisions < plan.max_turns:
        episode = PlayedEpisode()
        played.episodes.append(episode)
        await _play_episode(episode, played, session=session, ask=ask, plan=plan)
        if plan.on_done == "terminate":
            return


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
        call = answer_to(session, _action_of(reply))
        try:
            result = await call
        except GymError as error:
            actions = [_action_of(one.reply) for one in episode.decisions] + [_action_of(reply)]
            if not await is_the_actions_doing(error, actions, _retrial_of(plan, session)):
                raise PlayError("env_step_failed", str(error)) from error
            _end_at_limit(episode, seen, reply, session)
            played.num_ops += 1
            return
        played.num_ops += 1
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


def _retrial_of(plan: Plan, session: EnvSession) -> Retrial:
    return Retrial(
        plan.make_env,
        env_id=session.env_id,
        seed=plan.seed,
        options=plan.options or None,
        step_timeout_seconds=session.step_timeout_seconds,
        max_seconds=_MAX_REPLAY_SECONDS,
    )


def _end_at_limit(episode: PlayedEpisode, seen: tuple[Message, ...], reply: Reply, session: EnvSession) -> None:
    """End the episode at the action that exceeded a limit, at the environment's lowest return."""
    earned = math.fsum(one.result.reward for one in episode.decisions if one.result.reward is not None)
    penalty = floor_of(session.env, earned, None) - earned
    result = StepResult((), reward=penalty, reward_terms={LIMIT_TERM: penalty}, terminated=True)
    episode.decisions.append(Decision(seen, reply, result))
    episode.outcome = Outcome.ACTION_LIMIT


async def _asked(
    ask: Ask, conversation: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], *, is_first: bool
) -> Reply | None:
    """The model's answer; None: the conversation no longer fits it."""
    try:
        return await ask(conversation, tools)
    except ContextOverflowError as error:
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
