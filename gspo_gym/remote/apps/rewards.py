"""Read an episode's return, the rewards of its decisions and its achievements from a task app's answer. No I/O.

The return is the first of these that the app gives: `metrics.mean_return`, `metrics.outcome_score`, the sum of the
steps' rewards (generation B: `outcome_reward`). If the steps' rewards sum to something else, a warning says so; a score
beside a return may be on another scale. A decision is one call of the model with the steps that it sets off;
`Turn.events` gets the achievements that became true in it. Decision rewards that an app computed itself are not used as
rewards: the names in them are events, from which the learner computes rewards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gspo_gym.base.messages import messages_from_wire
from gspo_gym.errors import RecordError
from gspo_gym.remote.apps.contracts import (
    EXTENSION,
    AppAnswerError,
    EpisodeDetails,
    OutcomeResponse,
    RolloutRequest,
    RolloutResponse,
    RolloutStep,
    StepDetails,
)
from gspo_gym.types import Message, Outcome, Turn

_TOLERANCE = 1e-6  # of the largest sum of absolute rewards: below it, two sums of the same rewards do not differ
_MAX_SHOWN = 200  # characters of an app's error
_MAX_UNNAMED = 1_000  # achievements of one decision that have no names
_ENDINGS = {outcome.value: outcome for outcome in Outcome if not outcome.is_infrastructure_failure}


@dataclass(frozen=True, slots=True)
class AppDecision:
    """One call of the model as the app saw it. `reward` None means not scored, which is not 0.

    `reward_terms` sum to `reward`, if the app gives them.
    """

    reward: float | None = None
    reward_terms: Mapping[str, float] = field(default_factory=dict)
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AppRollout:
    """A task app's answer about one episode, read and checked.

    Attributes:
        generation: of the answer.
        episode_return: None if the app scored nothing.
        return_source: the field that it is from, such as "metrics.mean_return"; "" without one.
        decisions: in order; () if the app lists no steps.
        outcome: the end of the episode as the answer gives it: TERMINATED, TRUNCATED, MAX_TURNS (it goes on, but the
            ops were used up) or, from a server of this library, CONTEXT_OVERFLOW.
        success: `metrics.details.success`, or else `.correct`, if that is a truth value.
        aborted: the app was told to stop, so its answer is no result.
        errors: texts of `info.error` of its steps and `metrics.details.error`: often the only trace of a failed call of
            the model.
        ends_in_error: the last step or `metrics.details` has one; the app went on from an earlier one.
        warnings: what does not fit together, one line each; the part before the colon names the kind.
        reports_events: the app reports what its decisions achieved: a step has `decision_rewards`, `stepwise` or the
            events of a server of this library, which may all be empty. Without it, there are no step rewards.
        details: `metrics.details` unchanged.
        final_messages: the environment's answer to the last action, which no model read; () from apps that are not
            servers of this library: their last observation may be anything.
    """

    generation: Literal["A", "B"]
    episode_return: float | None
    return_source: str
    decisions: tuple[AppDecision, ...] = ()
    outcome: Outcome = Outcome.TERMINATED
    success: bool | None = None
    aborted: bool = False
    errors: tuple[str, ...] = ()
    ends_in_error: bool = False
    warnings: tuple[str, ...] = ()
    reports_events: bool = False
    details: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    final_messages: tuple[Message, ...] = ()

    @property
    def turn_rewards(self) -> tuple[float | None, ...]:
        """Return the reward of each decision; None if it was not scored."""
        return tuple(decision.reward for decision in self.decisions)


def read_rollout(response: RolloutResponse | OutcomeResponse, request: RolloutRequest) -> AppRollout:
    """Read the episode of an answer.

    Raises:
        AppAnswerError: it has several episodes, or something that rewards depend on cannot be read.
        pydantic.ValidationError: the details of a server of this library are wrong.
    """
    if isinstance(response, OutcomeResponse):
        return _read_outcome_response(response)
    return _read_rollout_response(response, request)


def _read_outcome_response(response: OutcomeResponse) -> AppRollout:
    info = response.reward_info
    decisions = tuple(AppDecision(reward) for reward in info.event_rewards or ())
    sources = [("outcome_reward", info.outcome_reward), *_sum_of(decisions, "the sum of event_rewards")]
    warnings: list[str] = []
    episode_return, source = _first_of(sources, warnings, decisions)
    return AppRollout(
        generation="B",
        episode_return=episode_return,
        return_source=source,
        decisions=decisions,
        success=_success_in(info.details),
        errors=_errors_in([info.details]),
        ends_in_error=bool(_errors_in([info.details])),
        warnings=tuple(warnings),
        details=info.details,
    )


def _read_rollout_response(response: RolloutResponse, request: RolloutRequest) -> AppRollout:
    if len(response.trajectories) > 1:
        raise AppAnswerError(
            f"/rollout {request.run_id}: expected one trajectory, got {len(response.trajectories)}: one rollout is one "
            "episode, and nothing says which call of the model belongs to which"
        )
    steps = [step for trajectory in response.trajectories for step in trajectory.steps]
    metrics = response.metrics
    warnings: list[str] = []
    decisions = _decisions_of(steps, warnings)
    returns = metrics.episode_returns or []
    if len(returns) > 1 or metrics.num_episodes > 1:
        warnings.append(
            f"several episodes: the app played {max(len(returns), metrics.num_episodes)} in one rollout although "
            f"on_done is {request.on_done!r}; the return is their mean"
        )
    expected_id, answered_id = request.trace_correlation_id, response.trace_correlation_id
    # The app may have mixed up two rollouts.
    if None not in (expected_id, answered_id) and expected_id != answered_id:
        warnings.append("correlation ids differ: the app answers with another one than it was given")
    is_ours = EXTENSION in metrics.details  # then a score beside no return is a success of an episode not scored
    sources = [
        ("metrics.mean_return", metrics.mean_return),
        ("metrics.outcome_score", None if is_ours else metrics.outcome_score),
        *_sum_of(decisions, "the sum of the steps' rewards"),
    ]
    episode_return, source = _first_of(sources, warnings, decisions)
    return AppRollout(
        generation="A",
        episode_return=episode_return,
        return_source=source,
        decisions=decisions,
        outcome=_outcome_of(steps, metrics.details),
        success=_success_in(metrics.details),
        aborted=response.aborted,
        errors=_errors_in([*(step.info for step in steps), metrics.details]),
        ends_in_error=bool(_errors_in([*(step.info for step in steps[-1:]), metrics.details])),
        warnings=tuple(warnings),
        reports_events=any(map(_reports_events, steps)),
        details=metrics.details,
        final_messages=_final_messages(response) if is_ours else (),
    )


def _success_in(details: Mapping[str, Any]) -> bool | None:
    return next((value for key in ("success", "correct") if isinstance(value := details.get(key), bool)), None)


def _final_messages(response: RolloutResponse) -> tuple[Message, ...]:
    final = response.trajectories[0].final if response.trajectories else None
    if final is None:
        return ()
    try:
        return messages_from_wire(final["observation"]["messages"], where="trajectories[0].final.observation.messages")
    except (KeyError, TypeError, RecordError) as error:
        raise AppAnswerError(f"trajectories[0].final: {type(error).__name__}: {error}") from error


def _errors_in(places: Sequence[Mapping[str, Any] | None]) -> tuple[str, ...]:
    errors = ((place or {}).get("error") for place in places)
    return tuple(error[:_MAX_SHOWN] for error in errors if isinstance(error, str) and error)


def _sum_of(decisions: Sequence[AppDecision], name: str) -> list[tuple[str, float | None]]:
    rewards = [decision.reward for decision in decisions if decision.reward is not None]
    if not math.isfinite(sum(rewards)):
        raise AppAnswerError(f"{name}: expected a finite number, got {sum(rewards)}")
    return [(name, sum(rewards))] if rewards else []


def _first_of(
    sources: Sequence[tuple[str, float | None]], warnings: list[str], decisions: Sequence[AppDecision]
) -> tuple[float | None, str]:
    parts = [decision.reward for decision in decisions if decision.reward is not None]
    present = [(name, value) for name, value in sources if value is not None]
    if not present:
        return None, ""
    (source, first), (last_source, last) = present[0], present[-1]
    # Twice: the turns' rewards will be these and, in the last turn, the rest of the return.
    if not math.isfinite(2 * (abs(first) + sum(map(abs, parts)))):
        raise AppAnswerError(f"{source} and the steps' rewards: expected a finite sum of sizes, got {first:g} and more")
    if last_source.startswith("the sum") and not _is_close(first, last, parts):
        warnings.append(f"returns differ: {source} is {first:g} and counts, but {last_source} is {last:g}")
    return first, source


def _is_close(a: float, b: float, parts: Iterable[float]) -> bool:
    scale = max(abs(a), abs(b), sum(map(abs, parts)))
    return math.isfinite(scale) and abs(a - b) <= _TOLERANCE * scale


def _outcome_of(steps: Sequence[RolloutStep], details: Mapping[str, Any]) -> Outcome:
    outcome_name = EpisodeDetails.model_validate(details.get(EXTENSION) or {}).outcome
    if outcome_name is not None:
        if outcome_name not in _ENDINGS:
            raise AppAnswerError(
                f"metrics.details.{EXTENSION}.outcome: expected one of {list(_ENDINGS)}, got {outcome_name!r}"
            )
        return _ENDINGS[outcome_name]
    # Truncated and done: the limit was reached.
    if not steps or (steps[-1].done and not steps[-1].truncated):
        return Outcome.TERMINATED
    return Outcome.TRUNCATED if steps[-1].truncated else Outcome.MAX_TURNS


def _decisions_of(steps: Sequence[RolloutStep], warnings: list[str]) -> tuple[AppDecision, ...]:
    made_up_names: list[str] = []
    single = [_decision_of(step, number, made_up_names) for number, step in enumerate(steps)]
    if made_up_names:
        warnings.append("achievements without names: they are counted, and names were made up for them")
    turns = [_decision_block(step).get("turn") for step in steps]
    # `type` and not isinstance: True is no turn.
    numbers = [turn for turn in turns if type(turn) is int]
    # Only if every step names its turn, in order, do steps of one turn belong together.
    if len(numbers) < len(turns) or numbers != sorted(numbers):
        return tuple(single)
    decisions_by_turn: dict[int, list[AppDecision]] = defaultdict(list)
    for number, decision in zip(numbers, single, strict=True):
        decisions_by_turn[number].append(decision)
    return tuple(_merge(decisions) for decisions in decisions_by_turn.values())


def _decision_of(step: RolloutStep, number: int, made_up_names: list[str]) -> AppDecision:
    details = StepDetails.model_validate((step.info or {}).get(EXTENSION) or {})
    terms = details.reward_terms.values()
    if terms and not _is_close(sum(terms), step.reward or 0.0, terms):
        raise AppAnswerError(f"step {number}: expected reward_terms that sum to the reward, {step.reward}")
    return AppDecision(
        step.reward, details.reward_terms, tuple(details.events) or _achievements(step, number, made_up_names)
    )


def _merge(decisions: Sequence[AppDecision]) -> AppDecision:
    if len(decisions) == 1:
        return decisions[0]
    rewards = [decision.reward for decision in decisions if decision.reward is not None]
    terms: dict[str, float] = defaultdict(float)
    for decision in decisions:
        for name, value in decision.reward_terms.items():
            terms[name] += value
    events = dict.fromkeys(event for decision in decisions for event in decision.events)
    return AppDecision(sum(rewards) if rewards else None, dict(terms), tuple(events))


def _achievements(step: RolloutStep, number: int, made_up_names: list[str]) -> tuple[str, ...]:
    """Return the names that became true in a step: `decision_rewards.all`, or what stands in for it.

    If there are only counts, names are made up and added to `made_up_names`: `unique_delta` new ones, and of those
    before as many as `ach_delta` is more.
    """
    # Both kinds of counting then give the app's numbers.
    block, stepwise = _decision_block(step), _part(step.info, "stepwise")
    places = ((block, "all"), (block, "unique"), (stepwise, "new_achievements"))
    for holder, key in places:
        names = holder.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise AppAnswerError(f"step {number}: {key}: expected a list of names, got {names!r:.{_MAX_SHOWN}}")
        return tuple(dict.fromkeys(names))
    num_all, num_new = (_count(block, key, number) for key in ("ach_delta", "unique_delta"))
    again = made_up_names[: max(0, num_all - num_new)]
    new = [f"unnamed {len(made_up_names) + k + 1}" for k in range(num_new)]
    made_up_names += new
    return (*again, *new)


def _count(block: Mapping[str, Any], key: str, number: int) -> int:
    count = block.get(key) or 0
    is_whole = type(count) is int or (type(count) is float and count.is_integer())
    if not is_whole or not 0 <= count <= _MAX_UNNAMED:
        raise AppAnswerError(f"step {number}: {key}: expected a count to {_MAX_UNNAMED}, got {count!r:.{_MAX_SHOWN}}")
    return int(count)


def _reports_events(step: RolloutStep) -> bool:
    ours = (step.info or {}).get(EXTENSION)
    return bool(_decision_block(step) or _part(step.info, "stepwise") or isinstance(ours, Mapping))


def _decision_block(step: RolloutStep) -> Mapping[str, Any]:
    return _part(_part(step.info, "meta"), "decision_rewards")


def _part(holder: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    part = (holder or {}).get(key)
    return part if isinstance(part, Mapping) else {}


@dataclass(frozen=True, slots=True)
class JoinedTurns:
    """Turns with the app's rewards and events; `warning` if they could not be told apart."""

    turns: tuple[Turn, ...]
    warning: str | None = None


def join_rewards(
    turns: Sequence[Turn], rollout: AppRollout, decision_turns: Sequence[int | None] | None = None
) -> JoinedTurns:
    """Return the captured turns with the app's rewards and events; their rewards sum to its return.

    If the app lists as many decisions as there are turns, the k-th belongs to the k-th turn; the difference between its
    return and their sum is the last turn's, as a separate reward term. If it lists as many as `decision_turns` (see
    `CaptureBuild`; None: the turns), a decision without a turn counts with the turn before it, or the first one.
    Otherwise the last turn gets the whole return, and all events.
    """
    if not turns:
        return JoinedTurns(())
    warning = None
    if len(rollout.decisions) == len(turns):
        decisions = list(rollout.decisions)
    elif decision_turns is not None and len(rollout.decisions) == len(decision_turns):
        decisions = _fold_into_turns(rollout.decisions, decision_turns, len(turns))
    else:
        events = dict.fromkeys(event for decision in rollout.decisions for event in decision.events)
        decisions = [*[AppDecision()] * (len(turns) - 1), AppDecision(rollout.episode_return, {}, tuple(events))]
        if rollout.decisions:
            # Which decision is which call cannot be told, and a wrong guess would teach the wrong turn.
            warning = (
                f"steps are not calls: the app lists {len(rollout.decisions)} decisions and {len(turns)} calls of the "
                "model are trained on; the last of them gets the whole return"
            )
    if rollout.episode_return is not None:
        decisions[-1] = _with_rest(decisions, rollout.episode_return)
    new_turns = (
        replace(turn, reward=decision.reward, reward_terms=decision.reward_terms, events=decision.events)
        for turn, decision in zip(turns, decisions, strict=True)
    )
    return JoinedTurns(tuple(new_turns), warning)


def _fold_into_turns(
    decisions: Sequence[AppDecision], decision_turns: Sequence[int | None], num_turns: int
) -> list[AppDecision]:
    of_turn: list[list[AppDecision]] = [[] for _ in range(num_turns)]
    latest = 0
    for decision, turn in zip(decisions, decision_turns, strict=True):
        latest = latest if turn is None else turn
        of_turn[latest].append(decision)
    return [_merge(together) for together in of_turn]


def _with_rest(decisions: Sequence[AppDecision], episode_return: float) -> AppDecision:
    # If no decision was scored, the last one gets the whole return, 0 included, because the episode was scored.
    last = decisions[-1]
    rewards = [decision.reward for decision in decisions if decision.reward is not None]
    if rewards and _is_close(episode_return, sum(rewards), rewards):
        return last
    rest = episode_return - sum(rewards)
    if last.reward is None:
        return replace(last, reward=rest)
    terms = dict(last.reward_terms) or {"step": last.reward}
    return replace(last, reward=last.reward + rest, reward_terms={**terms, "rest_of_return": rest})
