"""The records that pass between environments, chat, engines, rollouts, judges and the learner.

All are frozen and check themselves when built. numpy only: no torch and no I/O. T is the tokens of a segment, G the
trajectories of a group.
"""

from __future__ import annotations

import enum
import html
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from gspo_gym.errors import ConfigError, RecordError, UnscoredError, described

Role = Literal["system", "user", "assistant", "tool"]
Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
TokenIds = Sequence[int] | Int32Array


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One parsed tool call of the model; `arguments` are JSON values by parameter name."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in the shape of the OpenAI chat API.

    `reasoning_content` is the reasoning before the answer (Qwen3's `<think>` block), or None. A tool message has the id
    of its call in `tool_call_id`, and may have the tool's name in `name`.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ("system", "user", "assistant", "tool"):
            raise RecordError(f"Message.role: expected system, user, assistant or tool, got {self.role!r}")
        if not isinstance(self.content, str):
            raise RecordError(f"Message.content: expected str, got {type(self.content).__name__}")
        if self.tool_calls and self.role != "assistant":
            raise RecordError(f"Message.tool_calls: only an assistant calls tools, got role {self.role!r}")
        if self.reasoning_content is not None and self.role != "assistant":
            raise RecordError(f"Message.reasoning_content: only an assistant reasons, got role {self.role!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the OpenAI wire shape without absent fields, tool arguments as a mapping (as templates want)."""
        wire: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            wire["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            wire["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.tool_calls
            ]
        for key in ("tool_call_id", "name"):
            if (value := getattr(self, key)) is not None:
                wire[key] = value
        return wire


@dataclass(frozen=True, slots=True)
class Task:
    """One task: an environment, the seed that picks the instance, and the options of `reset`.

    `task_id` depends on nothing else, so it names the same task in every run.
    """

    env_id: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task_id(self) -> str:
        return f"{self.env_id}#{self.seed}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: the sampling keys of [rollout], passed whole to everything that samples.

    In vLLM's order: `min_tokens`, `repetition_penalty`, `temperature`, `min_p`, `top_k`, `top_p`. Each acts on what
    those before it left, and logprobs are of the remaining tokens, renormalised. (transformers applies `min_p` last,
    which differs only if `top_p` truncates too.)

    Attributes:
        temperature: > 0 divides the logits; 0 is greedy, with the logprobs of temperature 1, not truncated.
        top_p: keep the smallest set of tokens with at least this probability, renormalised; 1 keeps all.
        top_k: keep this many tokens, renormalised; 0 keeps all.
        min_p: keep tokens with at least this share of the likeliest one's probability (arXiv 2407.01082); 0 keeps all.
        repetition_penalty: logits of tokens in the prompt or among the sampled ones are divided by this if positive,
            multiplied if negative (CTRL, arXiv 1909.05858, section 4.1); 1 changes nothing. Greedy obeys it too.
        min_tokens: no stop token is among the first `min_tokens` sampled ones, so the completion is longer than this
            unless its limit or the context cuts it off. Greedy obeys it too.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        expected = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "0 < top_p <= 1"),
            "top_k": (self.top_k >= 0, ">= 0 (0 keeps all)"),
            "min_p": (0 <= self.min_p <= 1, "0 <= min_p <= 1 (0 keeps all)"),
            "repetition_penalty": (
                0 < self.repetition_penalty < math.inf,
                "a finite number > 0 (1 changes nothing)",
            ),
            "min_tokens": (self.min_tokens >= 0, ">= 0"),
        }
        for name, (is_fine, words) in expected.items():
            if not is_fine:
                raise ConfigError(f"{type(self).__name__}.{name}: expected {words}, got {getattr(self, name)}")

    def values(self) -> dict[str, Any]:
        """Return the parameters by name, as vLLM names them too (Any: integers and floats)."""
        return {name: getattr(self, name) for name in SAMPLING_NAMES}

    def changed(self) -> tuple[str, ...]:
        """Return the names of the parameters that differ from their defaults."""
        defaults = {parameter.name: parameter.default for parameter in fields(self)}
        return tuple(name for name, value in self.values().items() if value != defaults[name])

    def require_only(self, names: Collection[str], *, where: str) -> None:
        """Refuse changed parameters that have no name at an endpoint, which would drop them silently.

        Raises:
            ConfigError: a parameter outside `names` differs from its default.
        """
        if wrong := [name for name in self.changed() if name not in names]:
            raise ConfigError(f"{where} takes {', '.join(names)} only; leave {', '.join(wrong)} at the default")

    @property
    def is_truncated(self) -> bool:
        """Return whether `top_p`, `top_k` or `min_p` makes some tokens impossible."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def is_reshaped(self) -> bool:
        """Return whether a penalty or a least length changes the distribution beyond the logits."""
        return self.repetition_penalty != 1 or self.min_tokens > 0


SAMPLING_NAMES = tuple(parameter.name for parameter in fields(Sampling))


class FinishReason(enum.Enum):
    """Reason why a generation ended."""

    STOP = "stop"  # the last of token_ids is a stop token, or completes a stop string of the caller
    LENGTH = "length"  # max_tokens ran out


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """Exactly what an engine sampled for one prompt.

    Attributes:
        token_ids: [T] int32, the sampled ids, including the stop token.
        logprobs: [T] float32, nats, of each sampled id under the distribution really sampled from (temperature applied,
            truncation renormalised).
        finish_reason: why it ended.
        weight_version: [T] int32, the version of the weights that sampled each token.
    """

    token_ids: Int32Array
    logprobs: Float32Array
    finish_reason: FinishReason
    weight_version: Int32Array

    def __post_init__(self) -> None:
        _freeze(self, token_ids=np.int32, logprobs=np.float32, weight_version=np.int32)
        _require_equal_lengths("Completion", self, "token_ids", "logprobs", "weight_version")
        if len(self.token_ids) == 0:
            raise RecordError("Completion.token_ids: expected at least one sampled token, got none")
        if not (self.logprobs.min() > -np.inf and self.logprobs.max() <= 1e-3):  # NaN is the least and the largest
            bad = int(np.flatnonzero(~(np.isfinite(self.logprobs) & (self.logprobs <= 1e-3)))[0])
            raise RecordError(
                f"Completion.logprobs: expected finite values <= 0, got {self.logprobs[bad]} at token {bad}"
            )


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to one action, or to reset.

    Attributes:
        messages: what the model sees next; may be empty when the episode is over.
        reward: of this turn; None means "not scored (yet)", which is not 0.
        reward_terms: the weighted contributions that sum to `reward`, by name.
        terminated: the task itself ended.
        truncated: the episode was cut off from outside.
        success: whether the task was achieved; None while undecided or without such a notion.
        events: names of achievements reached in this turn.
        info: for people; no library code reads it.
    """

    messages: tuple[Message, ...]
    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    events: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_finite_reward("StepResult", self.reward, self.reward_terms)
        if not self.done and not self.messages:
            raise RecordError(
                "StepResult.messages: the episode goes on, so the model must be shown at least one message"
            )

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class ParseStatus(enum.Enum):
    """How the text that the model sampled in a turn was parsed."""

    OK = "ok"
    TRUNCATED = "truncated"  # cut off by max_tokens inside a block that had to be closed
    BAD_TOOL_CALL = "bad_tool_call"  # a tool call, or a block of an answer, that is not of the template's format
    BAD_REASONING = "bad_reasoning"  # an unclosed or repeated reasoning block


@dataclass(frozen=True, slots=True)
class Turn:
    """One observation and the action that answered it. Spans are [start, stop) in the token_ids of `segment`.

    `observation_span` has only the tokens that are new in this turn. `reward` is None until scored.
    """

    index: int
    segment: int
    observation_span: tuple[int, int]
    action_span: tuple[int, int]
    finish_reason: FinishReason
    parse: ParseStatus = ParseStatus.OK
    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        (a, b), (c, d) = self.observation_span, self.action_span
        if not 0 <= a <= b <= c < d:
            raise RecordError(
                f"Turn {self.index}: expected observation before a non-empty action, "
                f"got observation_span {self.observation_span}, action_span {self.action_span}"
            )
        _require_finite_reward(f"Turn {self.index}", self.reward, self.reward_terms)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens that the model read as one sequence; turns only append to it.

    A new segment starts where the chat template cannot extend (it rewrites earlier turns). All arrays are [T].

    Attributes:
        token_ids: int32.
        action_mask: bool, True where the policy sampled the token. Environment, template and appended end-of-turn
            tokens are False.
        rollout_logprobs: float32, from the engine; 0 where the mask is False, and everywhere if it gives none.
        turn_index: int32, the turn that sampled the token; -1 where the mask is False.
        weight_version: int32, of the weights that sampled the token; -1 where the mask is False or the version is
            unknown.
    """

    token_ids: Int32Array
    action_mask: BoolArray
    rollout_logprobs: Float32Array
    turn_index: Int32Array
    weight_version: Int32Array

    def __post_init__(self) -> None:
        _freeze(
            self,
            token_ids=np.int32,
            action_mask=np.bool_,
            rollout_logprobs=np.float32,
            turn_index=np.int32,
            weight_version=np.int32,
        )
        _require_equal_lengths(
            "Segment", self, "token_ids", "action_mask", "rollout_logprobs", "turn_index", "weight_version"
        )
        outside = ~self.action_mask
        if (self.turn_index[outside] != -1).any() or (self.turn_index[self.action_mask] < 0).any():
            raise RecordError("Segment.turn_index: expected -1 exactly where action_mask is False")
        if (self.rollout_logprobs[outside] != 0).any():
            raise RecordError("Segment.rollout_logprobs: expected 0 where action_mask is False")
        if len(self.token_ids) and self.action_mask[0]:
            raise RecordError("Segment.action_mask: the first token has no context to be sampled from")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Segment(<{len(self)} tokens, {int(self.action_mask.sum())} sampled>)"


class Outcome(enum.Enum):
    """How an episode ended. Infrastructure failures say nothing about the policy and never become a reward."""

    TERMINATED = "terminated"  # the environment says the task is over
    TRUNCATED = "truncated"  # the environment cut it off
    MAX_TURNS = "max_turns"  # our limit on turns
    CONTEXT_OVERFLOW = "context_overflow"  # the next observation does not fit the model
    ACTION_LIMIT = "action_limit"  # the last action exceeded a limit of the environment: scored at its floor
    ENV_ERROR = "env_error"  # the environment raised or broke its contract
    ENV_TIMEOUT = "env_timeout"  # the environment did not answer in time
    ENGINE_ERROR = "engine_error"  # no completion
    EPISODE_TIMEOUT = "episode_timeout"  # the episode's own deadline
    CANCELLED = "cancelled"  # the run was stopped

    @property
    def is_infrastructure_failure(self) -> bool:
        return self in _INFRASTRUCTURE_FAILURES


_INFRASTRUCTURE_FAILURES = frozenset(
    {Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT, Outcome.ENGINE_ERROR, Outcome.EPISODE_TIMEOUT, Outcome.CANCELLED}
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall-clock time of an episode by use."""

    total_seconds: float = 0.0
    env_seconds: float = 0.0
    engine_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The place where an episode leaves another one of its group: the turns before `turn` are replayed from that."""

    trajectory_id: str
    turn: int


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode as it happened.

    Attributes:
        trajectory_id: the same over retries, which differ in `attempt`.
        error: one-line reason of a failure, or of the limit that an action exceeded; else None.
        success: as the environment declared last; None if it never did.
        reports_events: False for a task app that does not report what its decisions achieved: turns without events are
            then no sign of failure.
        forked_from: the episode whose first turns this one repeated, with their tokens, logprobs and versions; None: it
            was played from the beginning.
    """

    trajectory_id: str
    attempt: int
    task: Task
    sampling_seed: int
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    outcome: Outcome
    success: bool | None = None
    error: str | None = None
    timing: Timing = Timing()
    reports_events: bool = True
    forked_from: ForkPoint | None = None

    def __post_init__(self) -> None:
        if self.outcome.is_infrastructure_failure and self.error is None:
            raise RecordError(f"Trajectory {self.trajectory_id}: outcome {self.outcome.value} needs an error text")
        for turn in self.turns:
            if not 0 <= turn.segment < len(self.segments):
                raise RecordError(f"Trajectory {self.trajectory_id}: turn {turn.index} names segment {turn.segment}")
            if turn.action_span[1] > len(self.segments[turn.segment]):
                raise RecordError(f"Trajectory {self.trajectory_id}: turn {turn.index} reaches past its segment")
        if not is_finite(sum(abs(turn.reward or 0.0) for turn in self.turns)):
            raise RecordError(f"Trajectory {self.trajectory_id}: the sum of its turns' rewards overflows; scale them")

    # short, because asyncio prints results in places, which took a second for 1,000 episodes
    def __repr__(self) -> str:
        return f"Trajectory(<{self.trajectory_id}, attempt {self.attempt}, {self.outcome.value}, {self.segments}>)"

    def _repr_html_(self) -> str:
        """Return the conversation, with the reward of each turn, for a notebook."""
        turns = iter(self.turns)
        lines = []
        for message in self.messages:
            turn = next(turns, None) if message.role == "assistant" else None
            reward = "" if turn is None or turn.reward is None else f"{turn.reward:+.2f}"
            calls = [f"{call.name}({json.dumps(dict(call.arguments), default=str)})" for call in message.tool_calls]
            text = html.escape("\n".join(filter(None, [message.content, *calls]))).replace("\n", "<br>")
            lines.append(f"<tr><td>{message.role}</td><td style='text-align: left'>{text}</td><td>{reward}</td></tr>")
        verdict = {True: "success", False: "no success", None: self.outcome.value}[self.success]
        score = f"return {self.reward:+.2f}" if self.is_scored else "not scored"
        caption = html.escape(f"{self.task.task_id}: {verdict}, {score}")
        return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"

    @property
    def group_id(self) -> str:
        """Return what the ids of the episodes of its group have in common: what stands before the last slash."""
        return self.trajectory_id.rpartition("/")[0]

    @property
    def reward(self) -> float:
        """Return the episode's undiscounted return, the sum of its turns' rewards.

        Raises:
            UnscoredError: no turn has a reward, or the episode failed before it could be scored.
        """
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        if not rewards or self.outcome.is_infrastructure_failure:
            raise UnscoredError(
                f"trajectory {self.trajectory_id} ({self.outcome.value}) has no reward: "
                f"{self.error or 'its environment gave None at every turn and no judge scored it'}"
            )
        return float(sum(rewards))

    @property
    def is_scored(self) -> bool:
        return not self.outcome.is_infrastructure_failure and any(t.reward is not None for t in self.turns)

    @property
    def num_actions(self) -> int:
        """Return the number of tokens that the policy sampled, over all segments."""
        return int(sum(int(s.action_mask.sum()) for s in self.segments))

    @property
    def num_new_actions(self) -> int:
        """Return the number of tokens that were sampled for this episode, and not replayed from another one."""
        first = 0 if self.forked_from is None else self.forked_from.turn
        return int(sum(int((s.turn_index >= first).sum()) for s in self.segments))


@dataclass(frozen=True, slots=True)
class DroppedEpisode:
    """A requested episode that will not be trained on, with the reason."""

    trajectory_id: str
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """The episodes of one task that are compared with each other: kept + dropped = requested."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    requested_size: int
    dropped: tuple[DroppedEpisode, ...] = ()

    def __post_init__(self) -> None:
        if len(self.trajectories) + len(self.dropped) != self.requested_size:
            raise RecordError(
                f"TrajectoryGroup {self.task.task_id}: requested {self.requested_size}, but kept "
                f"{len(self.trajectories)} and dropped {len(self.dropped)}"
            )
        strangers = {t.task.task_id for t in self.trajectories} - {self.task.task_id}
        if strangers:
            raise RecordError(f"TrajectoryGroup {self.task.task_id}: also holds trajectories of {sorted(strangers)}")


def _freeze(record: Any, **dtypes: type[np.generic]) -> None:
    """Convert the named fields to read-only one-dimensional arrays of the given dtypes."""
    for name, dtype in dtypes.items():
        value = np.asarray(getattr(record, name))
        if value.ndim != 1:
            raise RecordError(f"{type(record).__name__}.{name}: expected one dimension, got shape {value.shape}")
        array = value.astype(dtype, copy=True)
        if value.dtype != dtype and dtype is not np.float32 and not np.array_equal(array, value):
            raise RecordError(f"{type(record).__name__}.{name}: values do not fit {np.dtype(dtype).name}")
        array.setflags(write=False)
        object.__setattr__(record, name, array)


def is_finite(value: SupportsFloat) -> bool:
    """Return whether a number is finite as a float: NaN, infinities and an int of 400 digits are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _require_finite_reward(kind: str, reward: float | None, terms: Mapping[str, float]) -> None:
    for name, value in {"reward": 0.0 if reward is None else reward, **terms}.items():
        if not is_finite(value):
            raise RecordError(f"{kind}.{name}: expected a finite number or None, got {described(value)}")


def _require_equal_lengths(kind: str, record: Any, *names: str) -> None:
    lengths = {name: len(getattr(record, name)) for name in names}
    if len(set(lengths.values())) > 1:
        raise RecordError(f"{kind}: expected equal lengths, got {lengths}")
