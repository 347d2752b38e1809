"""Write a played rollout as the answer to POST /rollout: trajectories, metrics and traces. Pure functions.

A missing reward is null, never 0. What the contract has no field for stands under `EXTENSION`.

A decision is one answer of the model with the steps that it sets off. `decision_rewards` counts its achievements, for a
trainer that composes the reward itself (as `learning` does); `stepwise` holds a composed reward. Definitions and names
of the strategies are those of the task apps of the `synth-ai` package; its tables of resource shaping belong to one
game and are not here. No setting here changes the environment's own reward.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field, field_validator

from gspo_gym.base.messages import message_to_wire
from gspo_gym.base.settings import Settings
from gspo_gym.env.workers.wire import json_safe
from gspo_gym.remote.apps.contracts import EXTENSION, EpisodeDetails, RolloutRequest, StepDetails
from gspo_gym.remote.serve.agent_loop import Decision, PlayedEpisode, PlayedRollout
from gspo_gym.types import Message

_SAME_STRATEGY = {
    "": "consistent",
    "simple": "consistent",
    "consistent_stepwise": "consistent",
    "decision_consistent": "consistent",
    "per-achievement": "per_achievement",
    "perachievement": "per_achievement",
    "achievement_weighted": "per_achievement",
    "complex": "per_achievement",
}


class AppStepRewards(Settings):
    """`step_rewards` in a rollout's policy.config or env.config; the former wins. Unknown names are refused."""

    enabled: bool = Field(default=False, description="whether decisions are rewarded at all")
    mode: Literal["off", "decision_stepwise", "env_sparse"] = Field(
        default="off", description="only decision_stepwise is computed here; env_sparse is the step's own reward"
    )
    strategy: Literal["consistent", "per_achievement"] = Field(
        default="consistent", description="1 for a decision with any achievement, or the weights of them"
    )
    indicator_lambda: float = Field(default=0.0, ge=0, description="times the strategy's value; 0 counts as 1")
    step_beta: float = Field(default=0.0, description="of time shaping, which the trainer does; only repeated")
    weights: dict[str, float] = Field(default_factory=dict, description="of an achievement; 1 where none is given")
    k_limits: dict[str, int] = Field(
        default_factory=dict, description="how often an achievement counts in an episode; default 1, <= 0 always"
    )

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_by_other_names(cls, value: Any) -> Any:
        return _SAME_STRATEGY.get(value.lower(), value.lower()) if isinstance(value, str) else value

    @property
    def is_active(self) -> bool:
        """Return whether decisions carry rewards."""
        return self.enabled and self.mode == "decision_stepwise"


class DecisionRewards:
    """Counts the achievements of one episode, decision by decision.

    >>> rewards = DecisionRewards(AppStepRewards(enabled=True, mode="decision_stepwise", indicator_lambda=0.5))
    >>> rewards.of_decision(["wood", "drink"])["stepwise"]["reward"]
    0.5
    """

    def __init__(self, settings: AppStepRewards) -> None:
        self._settings = settings
        self._seen_names: dict[str, None] = {}  # in the order in which they were reached first
        self._counts: Counter[str] = Counter()
        self._stepwise: list[dict[str, Any]] = []

    def of_decision(self, events: Sequence[str]) -> dict[str, Any]:
        """Return `decision_rewards` and `stepwise` of the next decision, which reached these achievements."""
        # Once each: an environment may report an event twice in one step.
        settings, achievements = self._settings, list(dict.fromkeys(events))
        unique = [name for name in achievements if name not in self._seen_names]
        self._seen_names.update(dict.fromkeys(unique))
        indicator = int(bool(achievements))
        base = float(indicator) if settings.strategy == "consistent" else self._weight_of(achievements)
        stepwise = {
            "decision_index": len(self._stepwise),
            "indicator": indicator,
            "new_achievements": unique,
            # 0 stands for no factor.
            "reward": (settings.indicator_lambda or 1.0) * base,
            "strategy": settings.strategy,
            "base_reward": base,
        }
        self._stepwise.append(stepwise)
        counts = {"turn": len(self._stepwise), "ach_delta": len(achievements), "unique_delta": len(unique)}
        return {"decision_rewards": {**counts, "all": achievements, "unique": unique}, "stepwise": stepwise}

    def samples(self) -> list[dict[str, Any]]:
        return [
            {
                "decision_index": stepwise["decision_index"],
                "indicator": stepwise["indicator"],
                "r_i": stepwise["reward"],
                "base": stepwise["base_reward"],
                "strategy": stepwise["strategy"],
            }
            for stepwise in self._stepwise
        ]

    def summary(self) -> dict[str, Any]:
        """Return `metrics.details.stepwise`."""
        settings = self._settings
        return {
            "indicator_sum": sum(stepwise["indicator"] for stepwise in self._stepwise),
            "reward_sum": self.reward_sum,
            "resource_reward": 0.0,
            "new_achievements_total": sum(len(stepwise["new_achievements"]) for stepwise in self._stepwise),
            "mode": settings.mode,
            "strategy": settings.strategy,
            "indicator_lambda": settings.indicator_lambda,
            "step_beta": settings.step_beta,
            "weights": dict(settings.weights),
            "k_limits": dict(settings.k_limits),
            "unique_achievements_total": len(self._seen_names),
            "unique_achievements": list(self._seen_names),
            "final_achievements": list(self._seen_names),
        }

    @property
    def reward_sum(self) -> float:
        """Return the reward of all decisions so far."""
        return float(sum(stepwise["reward"] for stepwise in self._stepwise))

    def _weight_of(self, achievements: Sequence[str]) -> float:
        value = 0.0
        for name in achievements:
            limit = self._settings.k_limits.get(name, 1)
            if limit <= 0 or self._counts[name] < limit:
                value += self._settings.weights.get(name, 1.0)
                self._counts[name] += 1
        return value


def step_rewards_of(policy_config: Mapping[str, Any], env_config: Mapping[str, Any]) -> AppStepRewards:
    """Read the settings in a rollout's request.

    Raises:
        pydantic.ValidationError: one is unknown or wrong.
    """
    settings = policy_config.get("step_rewards") or env_config.get("step_rewards") or {}
    return AppStepRewards.model_validate(settings)


Json = dict[str, Any]  # Any: JSON
_MIN_LOGPROB = -9999.0  # for -inf, which JSON does not have


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The parts of a request that its answer repeats.

    Attributes:
        request: the request.
        env_id: of the environment. policy_id: of the player.
        inference_url, correlation_id: the model's URL, and the id that it was called under.
        step_rewards: how decisions are rewarded beside the environment.
        seed: of the played task, which the request may name in other ways.
    """

    request: RolloutRequest
    env_id: str
    policy_id: str
    inference_url: str
    correlation_id: str | None
    step_rewards: AppStepRewards
    seed: int


def rollout_answer(played: PlayedRollout, context: AnswerContext, *, aborted: bool, created_at: str) -> Json:
    """Return the whole answer, of generation A; `created_at` is when the rollout began."""
    wire_episodes = [_Told(episode, context) for episode in played.episodes]
    request = context.request
    answer: Json = {
        "run_id": request.run_id,
        "trajectories": [wire_episode.trajectory for wire_episode in wire_episodes]
        if request.record.trajectories
        else [],
        "metrics": _metrics(played, wire_episodes, context, aborted=aborted),
        "branches": {},
        "aborted": aborted,
        "ops_executed": played.num_ops,
        "trace_correlation_id": context.correlation_id,
        "trace": None,
        "pipeline_metadata": {"inference_url": context.inference_url, "trace_correlation_id": context.correlation_id},
    }
    if request.record.return_trace:
        is_compact = request.record.trace_format == "compact"
        answer["trace"] = (_compact_trace if is_compact else _full_trace)(wire_episodes, context, created_at)
    return answer


class _Told:
    """One episode in the contract's words."""

    def __init__(self, episode: PlayedEpisode, context: AnswerContext) -> None:
        self.episode = episode
        self.rewards = DecisionRewards(context.step_rewards)
        self.steps = [_step(decision, index, self.rewards, context) for index, decision in enumerate(episode.decisions)]
        self.trajectory: Json = {
            "env_id": context.env_id,
            "policy_id": context.policy_id,
            "steps": self.steps,
            "final": self._final(),
            "length": len(self.steps),
            "inference_url": context.inference_url,
            "decision_samples": self._samples() if context.step_rewards.is_active else None,
            "trace_correlation_id": context.correlation_id,
        }

    def _final(self) -> Json | None:
        if not self.episode.decisions:
            return None
        last = self.episode.decisions[-1].result
        outcome = self.episode.outcome
        return {
            "observation": _observation(last.messages),
            "reward": last.reward,
            "done": last.done,
            "truncated": last.truncated,
            "success": self.episode.success,
            "outcome": None if outcome is None else outcome.value,
            "info": json_safe(dict(last.info)),
        }

    def _samples(self) -> list[Json]:
        actions = [[call["function"]["name"] for call in step["tool_calls"]] for step in self.steps]
        return [{**sample, "actions": names} for sample, names in zip(self.rewards.samples(), actions, strict=True)]


def _step(decision: Decision, index: int, rewards: DecisionRewards, context: AnswerContext) -> Json:
    reply, result = decision.reply, decision.result
    meta: Json = {"inference_url": context.inference_url, "trace_correlation_id": context.correlation_id}
    meta |= {"turn": index + 1, "parse": reply.parse, "parse_error": reply.error, "finish_reason": reply.finish_reason}
    details = StepDetails(reward_terms=dict(result.reward_terms), events=list(result.events))
    info: Json = {"meta": meta, EXTENSION: details.model_dump()}
    if context.step_rewards.is_active:
        reward_fields = rewards.of_decision(result.events)
        meta["decision_rewards"], info["stepwise"] = reward_fields["decision_rewards"], reward_fields["stepwise"]
    if reply.logprobs is not None and context.request.record.logprobs:
        info["logprobs"] = [value if math.isfinite(value) else _MIN_LOGPROB for value in reply.logprobs]
    message_wire = message_to_wire(reply.message)
    return {
        "obs": _observation(decision.seen),
        "tool_calls": message_wire.get("tool_calls", []),
        "output": reply.message.content,
        "output_mode": "tool_calls" if reply.message.tool_calls else "text",
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "info": info,
    }


def _observation(messages: Sequence[Message]) -> Json:
    text = "\n\n".join(message.content for message in messages)
    return {"messages": [message_to_wire(message) for message in messages], "text": text}


def _metrics(rollout: PlayedRollout, wire_episodes: Sequence[_Told], context: AnswerContext, *, aborted: bool) -> Json:
    episodes = rollout.episodes
    returns = [value for episode in episodes if (value := episode.episode_return) is not None]
    successes = [episode.success for episode in episodes if episode.success is not None]
    terms: Counter[str] = Counter()
    for decision in (one for episode in episodes for one in episode.decisions):
        for name, value in decision.result.reward_terms.items():
            terms[name] += value  # type: ignore[assignment]  # a counter of floats
    # An aborted rollout has no ending of its own.
    outcome = episodes[-1].outcome if episodes and not aborted else None
    details: Json = {
        "reward_terms": dict(terms),
        "achievements": list(dict.fromkeys(_events(episodes))),
        EXTENSION: EpisodeDetails(outcome=None if outcome is None else outcome.value).model_dump(),
    }
    if successes:
        details["success"] = all(successes)
    if context.step_rewards.is_active and wire_episodes:
        details["stepwise"] = wire_episodes[-1].rewards.summary()
    is_active = context.step_rewards.is_active
    return {
        "episode_returns": returns,
        "mean_return": _mean_return(returns, aborted=aborted),
        "num_steps": rollout.num_decisions,
        "num_episodes": len(episodes),
        "outcome_score": sum(successes) / len(successes) if successes else None,
        "events_score": float(sum(one.rewards.reward_sum for one in wire_episodes)) if is_active else None,
        "details": details,
    }


def _mean_return(returns: Sequence[float], *, aborted: bool) -> float | None:
    # None if nothing was scored. The contract demands a number, so an aborted rollout has one, too, although it has no
    # result.
    if returns:
        return sum(returns) / len(returns)
    return 0.0 if aborted else None


def _events(episodes: Sequence[PlayedEpisode]) -> list[str]:
    return [name for episode in episodes for decision in episode.decisions for name in decision.result.events]


def _compact_trace(wire_episodes: Sequence[_Told], context: AnswerContext, created_at: str) -> Json:
    decisions = [one for wire_episode in wire_episodes for one in wire_episode.episode.decisions]
    rewards = [
        step["info"]["meta"].get("decision_rewards") for wire_episode in wire_episodes for step in wire_episode.steps
    ]
    return {
        "session_id": context.request.run_id,
        "created_at": created_at,
        "metadata": _trace_metadata(context),
        "events_count": 2 * len(decisions),
        "messages_count": sum(len(one.seen) + 1 for one in decisions),
        "lm_calls": [_model_call(one, context) for one in decisions],
        "decision_rewards": [one for one in rewards if one is not None],
    }


def _full_trace(wire_episodes: Sequence[_Told], context: AnswerContext, created_at: str) -> Json:
    decisions = [decision for wire_episode in wire_episodes for decision in wire_episode.episode.decisions]
    events: list[Json] = []
    history: list[Message] = []
    for turn, decision in enumerate(decisions, start=1):
        result, call = decision.result, _model_call(decision, context)
        events.append({"event_type": "cais", "turn": turn, **call, "call_records": [_call_record(decision, context)]})
        events.append(
            {
                "event_type": "environment",
                "turn": turn,
                "reward": result.reward,
                "terminated": result.terminated,
                "truncated": result.truncated,
                "system_state_before": _observation(decision.seen),
                "system_state_after": _observation(result.messages),
            }
        )
        history += [*decision.seen, decision.reply.message]  # once each: `seen` is what was new to the model
    if decisions:
        history += decisions[-1].result.messages
    turns = range(1, len(decisions) + 1)
    steps = [{"step_id": f"turn_{turn}", "step_index": turn - 1, "turn_number": turn} for turn in turns]
    return {
        "session_id": context.request.run_id,
        "created_at": created_at,
        "session_time_steps": steps,
        "event_history": events,
        "markov_blanket_message_history": _history(history, context, created_at),
        "metadata": _trace_metadata(context),
        "session_metadata": [],
    }


def _history(messages: Sequence[Message], context: AnswerContext, created_at: str) -> list[Json]:
    wires = [message_to_wire(message) for message in messages]
    if context.request.record.trace_format == "full":
        return wires
    began_at = datetime.fromisoformat(created_at).timestamp()
    return [
        {
            "content": {"text": message.content, "json_payload": _more_than_text(wire)},
            "message_type": "tool_result" if message.role == "tool" else message.role,
            "time_record": {"event_time": began_at, "message_time": number},
            "metadata": {},
        }
        for number, (message, wire) in enumerate(zip(messages, wires, strict=True))
    ]


def _more_than_text(wire: Json) -> str | None:
    return json.dumps(wire, ensure_ascii=False) if wire.keys() - {"role", "content"} else None


def _trace_metadata(context: AnswerContext) -> Json:
    names = {"env_id": context.env_id, "policy_id": context.policy_id, "run_id": context.request.run_id}
    return {**names, "trace_correlation_id": context.correlation_id, "seed": context.seed}


def _model_call(decision: Decision, context: AnswerContext) -> Json:
    reply = decision.reply
    usage: Mapping[str, int] = reply.usage
    return {
        "model_name": str(context.request.policy.config.get("model") or "policy"),
        "provider": "openai-compatible",
        "input_tokens": usage.get("prompt_tokens"),
        "output_tokens": usage.get("completion_tokens"),
        "total_tokens": usage.get("total_tokens"),
        "latency_ms": round(1000 * reply.seconds, 3),
        "finish_reason": reply.finish_reason,
    }


def _call_record(decision: Decision, context: AnswerContext) -> Json:
    message_wire = message_to_wire(decision.reply.message)
    calls = [
        {"name": call["function"]["name"], "arguments_json": call["function"]["arguments"]}
        for call in message_wire.get("tool_calls", ())
    ]
    sampling = {key: context.request.policy.config.get(key) for key in ("temperature", "top_p", "max_tokens")}
    return {
        "request_params": sampling,
        "input_messages": [message_to_wire(message) for message in decision.seen],
        "output_messages": [message_wire],
        "output_tool_calls": calls,
        "usage": dict(decision.reply.usage),
        "finish_reason": decision.reply.finish_reason,
    }
