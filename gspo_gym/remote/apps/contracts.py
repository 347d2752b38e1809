"""The wire format of task apps, in both generations of the contract, and the errors of an app. No I/O.

The contract is that of the `synth-ai` package, releases 0.2.16 to 0.4.1 (generation A: run id, ops, trajectories,
metrics), with requests that are sent and served here; answers of later releases (generation B: `outcome_reward` in
`metrics` or `reward_info`) are read, too. Unknown fields are ignored on both sides. Everything that a reward depends on
is read strictly: a number is a finite number, neither text nor a truth value.

The exceptions::

    ServiceError
    └── AppError                  RuntimeError  the app failed, or cannot be reached
        ├── AppAttemptError       (AttemptError) another attempt may succeed: no connection, 429, 5xx
        ├── AppTimeoutError       TimeoutError  no complete answer before the deadline
        ├── AppUnauthorisedError                the app refuses our key; says what to set
        ├── AppRefusedError                     the app understood the request and refuses it (4xx, redirects)
        └── AppAnswerError                      the answer is too long, no JSON, or not of the contract

None of their texts holds a key, nor the beginning of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gspo_gym.base.retries import AttemptError
from gspo_gym.errors import ServiceError

EXTENSION = "gspo_gym"  # key of what only servers of this library say: in a step's info, and in metrics.details

Json = dict[str, Any]  # Any: JSON
# Strict: "1.0", true and NaN are no rewards, whatever an app in another language takes for one.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Answer(_Wire):
    """An app's answer: null stands for an absent field, because many languages write an empty list or map so."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: part for key, part in value.items() if part is not None}


class RolloutEnv(_Wire):
    """The environment to play. `config` is `[rollout.env_config]` unchanged; the app chooses a missing seed."""

    env_id: str | None = None
    env_name: str | None = None
    config: Json = Field(default_factory=dict)
    seed: int | None = None


class RolloutPolicy(_Wire):
    """The policy. `config` is `[rollout.policy_config]` and the model's URL: see `PolicyInjection`."""

    policy_id: str | None = None
    policy_name: str | None = None
    config: Json = Field(default_factory=dict)


class RolloutRecord(_Wire):
    """What the answer should hold. "compact" is a summary of the trace; the others are the whole of it."""

    trajectories: bool = True
    logprobs: bool = False
    value: bool = False
    return_trace: bool = False
    trace_format: Literal["compact", "full", "structured"] = "compact"


class RolloutSafety(_Wire):
    """Limits that the app is asked to keep."""

    max_ops: int = 100_000
    max_time_s: float = 3600.0


class RolloutRequest(_Wire):
    """POST /rollout: play one episode.

    Attributes:
        run_id: of this attempt; the answer repeats it.
        ops: "agent" and "env" in turn, once per decision.
        on_done: "terminate" ends the rollout with the episode; "reset" begins another one with the ops that are left.
        mode: "rl" demands a correlation id; "eval" does not.
        trace_correlation_id: not of generation A, which ignores it; an app of generation B demands it.
    """

    run_id: str = Field(min_length=1)
    env: RolloutEnv
    policy: RolloutPolicy
    ops: list[str] | list[Json]
    record: RolloutRecord = RolloutRecord()
    on_done: str = "reset"
    safety: RolloutSafety = RolloutSafety()
    mode: Literal["rl", "eval"]
    training_session_id: str | None = None
    synth_base_url: str | None = None
    trace_correlation_id: str | None = None


class PolicyInjection(_Wire):
    """The trainer's entries in `policy.config`, over what stands there.

    Attributes:
        model: name to ask the inference server for.
        inference_url: the model's URL for this rollout alone.
        trace_correlation_id: the same id that stands in `inference_url`.
        temperature, top_p, max_tokens: how to sample; None sends nothing.
    """

    model: str
    inference_url: str
    trace_correlation_id: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None


class RolloutStep(_Answer):
    """One step of the environment. `reward` None means not scored, which is not 0.

    `info` may hold `meta.decision_rewards`, `stepwise` (see `remote/apps/rewards.py`) and, from servers of this
    library, a `StepDetails` under `EXTENSION`.
    """

    obs: Any = None  # what the environment shows; nothing here depends on it
    tool_calls: list[Any] = Field(default_factory=list)
    reward: Number | None = None
    done: Flag = False
    truncated: Flag | None = None
    info: Json | None = None


class StepDetails(_Answer):
    """Fields of a step beyond the contract, sent by servers of this library to lose nothing on the way."""

    reward_terms: dict[str, Number] = Field(default_factory=dict)
    events: list[Text] = Field(default_factory=list)


class EpisodeDetails(_Answer):
    """Fields of an episode beyond the contract, sent by servers of this library. `outcome` is an `Outcome`'s value."""

    outcome: Text | None = None


class RolloutTrajectory(_Answer):
    """The episode as the app saw it. The contract demands `inference_url`; it is not needed here."""

    env_id: str | None = None
    policy_id: str | None = None
    steps: list[RolloutStep] = Field(default_factory=list)
    final: Any = None  # the last observation, in any shape
    length: Count | None = None
    inference_url: str | None = None
    decision_samples: list[Json] | None = None
    trace: Json | None = None


class RolloutMetrics(_Answer):
    """The rollout's return. The contract demands the first three; apps of other languages leave some out."""

    episode_returns: list[Number] | None = None
    mean_return: Number | None = None
    num_steps: Count | None = None
    num_episodes: Count = 0
    outcome_score: Number | None = None
    events_score: Number | None = None
    details: Json = Field(default_factory=dict)


class RolloutResponse(_Answer):
    """The answer to POST /rollout, generation A."""

    run_id: Text
    trajectories: list[RolloutTrajectory]
    metrics: RolloutMetrics
    branches: Json = Field(default_factory=dict)  # lists of names; nothing here depends on them
    aborted: Flag = False
    ops_executed: Count = 0
    trace_correlation_id: str | None = None
    trace: Json | None = None
    pipeline_metadata: Json = Field(default_factory=dict)


class OutcomeMetrics(_Answer):
    """The rollout's return, generation B."""

    outcome_reward: Number
    event_rewards: list[Number | None] | None = None
    outcome_objectives: Json | None = None
    event_objectives: list[Json] | None = None
    details: Json = Field(default_factory=dict)


class OutcomeResponse(_Answer):
    """The answer to POST /rollout, generation B; `reward_info` is called `metrics` in its first releases."""

    trace_correlation_id: Text
    reward_info: OutcomeMetrics
    trace: Json | None = None
    inference_url: str | None = None


class TaskInfo(_Answer):
    """GET /task_info?seed=N: one task. Unknown fields are kept for a judge."""

    model_config = ConfigDict(extra="allow", frozen=True)

    task: Json = Field(default_factory=dict)
    environment: str | None = None
    dataset: Json = Field(default_factory=dict)
    rubric: Json | None = None
    inference: Json = Field(default_factory=dict)
    limits: Json = Field(default_factory=dict)
    task_metadata: Json = Field(default_factory=dict)


class AppInfo(_Wire):
    """GET /info, read leniently: anything but an object counts as empty."""

    service: Json = Field(default_factory=dict)
    dataset: Json = Field(default_factory=dict)
    rubrics: Json = Field(default_factory=dict)
    inference: Json = Field(default_factory=dict)
    limits: Json = Field(default_factory=dict)

    @property
    def task_id(self) -> str | None:
        """Return the app's name of the task; None if it has none."""
        task = self.service.get("task")
        name = task.get("id") if isinstance(task, Mapping) else None
        return name if isinstance(name, str) else None


def read_info(value: Mapping[str, Any]) -> AppInfo:
    """Return the readable parts of an /info answer.

    >>> read_info({"service": {"task": {"id": "math"}}, "dataset": "<circular type=dict>"}).task_id
    'math'
    """
    # An app of the contract's own server may write "<circular type=dict>" where an object belongs.
    return AppInfo(**{name: part for name in AppInfo.model_fields if isinstance(part := value.get(name), dict)})


def read_response(value: Mapping[str, Any]) -> RolloutResponse | OutcomeResponse:
    """Read an answer to POST /rollout, in the generation of its keys.

    Raises:
        pydantic.ValidationError: it is of neither, or a needed field is wrong.
    """
    metrics = value.get("metrics")
    if "reward_info" in value:
        # The generations are told apart by their keys: no answer names its own.
        return OutcomeResponse.model_validate(value)
    if isinstance(metrics, Mapping) and "outcome_reward" in metrics:
        return OutcomeResponse.model_validate({**value, "reward_info": metrics})
    return RolloutResponse.model_validate(value)


class AppError(ServiceError):
    """A task app failed."""


class AppAttemptError(AttemptError, AppError):
    """One request failed in a way that another one may not. It is not known whether the app has begun something."""


class AppTimeoutError(AppError, TimeoutError):
    """A task app did not answer completely before the deadline."""


class AppUnauthorisedError(AppError):
    """A task app refuses our calls: the key is missing or wrong, here or there."""


class AppRefusedError(AppError):
    """A task app understood the request and refuses it; asking again changes nothing."""


class AppAnswerError(AppError):
    """An answer that is not of the contract."""
