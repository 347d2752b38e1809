"""What an app's answer is worth, and how it is joined to the turns that the gateway captured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gspo_gym.remote.apps.contracts import AppAnswerError, RolloutEnv, RolloutPolicy, RolloutRequest, read_response
from gspo_gym.remote.apps.rewards import AppDecision, AppRollout, join_rewards, read_rollout
from gspo_gym.types import FinishReason, Message, Outcome, Turn

DATA = Path(__file__).parent / "data"
REQUEST = RolloutRequest(
    run_id="step-3-0-attempt-0",
    env=RolloutEnv(seed=7),
    policy=RolloutPolicy(),
    ops=["agent", "env"],
    on_done="terminate",
    mode="rl",
    trace_correlation_id="trace_5f",
)


def told(value: dict[str, Any]) -> AppRollout:
    return read_rollout(read_response(value), REQUEST)


def stored(name: str) -> AppRollout:
    return told(json.loads((DATA / f"{name}.json").read_text()))


def answer(
    rewards: list[float | None] = (),
    *,
    infos: list[dict[str, Any]] | None = None,
    last: dict[str, Any] | None = None,
    **metrics: Any,
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"reward": reward} for reward in rewards]
    for step, info in zip(steps, infos or [], strict=False):
        step["info"] = info
    if steps:
        steps[-1] |= {"done": True} if last is None else last
    return {"run_id": REQUEST.run_id, "trajectories": [{"steps": steps}], "metrics": metrics}


def turns(count: int) -> list[Turn]:
    return [Turn(k, 0, (10 * k, 10 * k + 5), (10 * k + 5, 10 * k + 10), FinishReason.STOP) for k in range(count)]


def test_the_stored_answer_of_generation_a_is_read() -> None:
    rollout = stored("rollout_response_a")
    assert rollout == AppRollout(
        generation="A",
        episode_return=2.5,
        return_source="metrics.mean_return",
        # What became true in a decision, also again: whether it counts twice is the training's to say.
        decisions=(AppDecision(1.0, {}, ("collect_wood",)), AppDecision(1.5, {}, ("collect_wood", "place_table"))),
        outcome=Outcome.TERMINATED,
        success=True,
        reports_events=True,
        details=rollout.details,
    )
    assert rollout.details["stepwise"]["reward_sum"] == 2.0


def test_the_stored_answer_with_a_made_up_reward_says_what_failed() -> None:
    rollout = stored("rollout_response_a_made_up")
    assert rollout.episode_return == -1.0
    assert rollout.errors == ("inference request failed: 502",)


def test_the_stored_answers_of_generation_b_are_read() -> None:
    older, later = stored("rollout_response_b_metrics"), stored("rollout_response_b_reward_info")
    assert (older.generation, older.episode_return, older.return_source) == ("B", 0.75, "outcome_reward")
    assert older.turn_rewards == (0.25, None, 0.5)  # 0.25 + 0.5 = 0.75: nothing to warn of
    assert (older.success, older.warnings) == (False, ())
    assert (later.episode_return, later.decisions, later.success) == (1.0, (), None)


@pytest.mark.parametrize(
    ("metrics", "rewards", "expected"),
    [
        ({"mean_return": 1.0, "outcome_score": 2.0}, [3.0], (1.0, "metrics.mean_return")),
        ({"outcome_score": 2.0}, [3.0], (2.0, "metrics.outcome_score")),
        ({"mean_return": None, "outcome_score": 0}, [3.0], (0.0, "metrics.outcome_score")),
        ({}, [1.0, None, 2.5], (3.5, "the sum of the steps' rewards")),
        ({"mean_return": 0.0}, [], (0.0, "metrics.mean_return")),
    ],
)
def test_the_return_is_the_first_that_the_app_gives(
    metrics: dict[str, float], rewards: list[float | None], expected: tuple[float, str]
) -> None:
    rollout = told(answer(rewards, **metrics))
    assert (rollout.episode_return, rollout.return_source) == expected


def test_an_app_that_scores_nothing_gives_no_return_and_not_0() -> None:
    rollout = told(answer([None, None]))
    assert rollout.episode_return is None
    assert join_rewards(turns(2), rollout).turns == tuple(turns(2))


def test_a_success_is_no_return_of_an_episode_that_a_server_of_this_library_did_not_score() -> None:
    metrics: dict[str, Any] = {"mean_return": None, "outcome_score": 1.0, "details": {"gspo_gym": {}, "success": True}}
    rollout = told(answer([None], **metrics))
    assert (rollout.episode_return, rollout.success) == (None, True)


@pytest.mark.parametrize(
    ("rewards", "mean_return"),
    [([1e308, 1e308], 1.0), ([1e308, -1e308, 1e308, -1e308], 0.0), ([1e308], -1e308), ([1.6e308], 1.6e308)],
)
def test_rewards_whose_sum_of_sizes_overflows_are_refused(rewards: list[float], mean_return: float) -> None:
    with pytest.raises(AppAnswerError, match="finite"):
        told(answer(rewards, mean_return=mean_return))


def test_reward_terms_whose_sum_overflows_do_not_pass_for_the_reward() -> None:
    response = answer([1.0])
    response["trajectories"][0]["steps"][0]["info"] = {"gspo_gym": {"reward_terms": {"a": 1e308, "b": 1e308}}}
    with pytest.raises(AppAnswerError, match="expected reward_terms that sum to the reward"):
        told(response)


def test_returns_that_differ_are_warned_of_and_rounding_is_not() -> None:
    assert told(answer([0.1] * 10, mean_return=1.0)).warnings == ()  # 0.1 ten times is 0.9999999999999999
    assert told(answer([7.0], mean_return=7.0, outcome_score=1.0)).warnings == ()  # a success beside a return
    (warning,) = told(answer([0.5, 0.25], mean_return=1.0, outcome_score=0.5)).warnings
    assert warning == ("returns differ: metrics.mean_return is 1 and counts, but the sum of the steps' rewards is 0.75")


@pytest.mark.parametrize(
    ("details", "success"),
    [
        ({"correct": True}, True),
        ({"correct": False}, False),
        ({"success": False, "correct": True}, False),
        ({"success": "yes", "correct": True}, True),
        ({"correct": 1}, None),
        ({}, None),
    ],
)
def test_what_an_app_calls_correct_is_a_success(details: dict[str, Any], success: bool | None) -> None:
    assert told(answer([1.0], details=details)).success is success
    reward_info = {"outcome_reward": 1.0, "details": details}
    assert told({"trace_correlation_id": "trace_5f", "reward_info": reward_info}).success is success


def test_several_episodes_in_one_rollout_are_warned_of() -> None:
    (warning,) = told(answer([2.0], mean_return=2.0, episode_returns=[1.0, 3.0])).warnings
    assert warning.startswith("several episodes: the app played 2 ")


def test_several_trajectories_are_refused() -> None:
    with pytest.raises(AppAnswerError, match="expected one trajectory, got 2"):
        told({**answer(mean_return=1.0), "trajectories": [{"steps": []}, {"steps": []}]})


def test_another_correlation_id_is_warned_of() -> None:
    assert told({**answer([1.0]), "trace_correlation_id": "trace_5f"}).warnings == ()
    (warning,) = told({**answer([1.0]), "trace_correlation_id": "trace_60"}).warnings
    assert warning.startswith("correlation ids differ")


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        ({"done": True}, Outcome.TERMINATED),
        ({"done": True, "truncated": False}, Outcome.TERMINATED),
        ({"done": True, "truncated": True}, Outcome.TRUNCATED),
        ({"truncated": True}, Outcome.TRUNCATED),
        ({"done": False}, Outcome.MAX_TURNS),
    ],
)
def test_the_last_step_says_how_the_episode_ended(last: dict[str, bool], outcome: Outcome) -> None:
    assert told(answer([1.0, 1.0], last=last)).outcome is outcome


def test_a_server_of_this_library_says_more() -> None:
    infos = [{"gspo_gym": {"reward_terms": {"found": 2.0, "slow": -0.5}, "events": ["found"]}}]
    rollout = told(answer([1.5], infos=infos, mean_return=1.5, details={"gspo_gym": {"outcome": "context_overflow"}}))
    assert rollout.outcome is Outcome.CONTEXT_OVERFLOW
    assert rollout.decisions == (AppDecision(1.5, {"found": 2.0, "slow": -0.5}, ("found",)),)


def with_final(final: Any, *, details: dict[str, Any]) -> AppRollout:
    whole = answer([1.0], details=details)
    whole["trajectories"][0]["final"] = final
    return told(whole)


def test_what_follows_the_last_action_is_read_from_servers_of_this_library_alone() -> None:
    final = {"observation": {"messages": [{"role": "tool", "content": "closed", "tool_call_id": "call_0"}]}}
    expected = (Message("tool", "closed", tool_call_id="call_0"),)
    assert with_final(final, details={"gspo_gym": {}}).final_messages == expected
    assert with_final(final, details={}).final_messages == ()
    assert with_final(None, details={"gspo_gym": {}}).final_messages == ()
    for wrong in ({"observation": "closed"}, {"observation": {"messages": [{"role": "tool", "content": 7}]}}):
        with pytest.raises(AppAnswerError, match=r"trajectories\[0\].final"):
            with_final(wrong, details={"gspo_gym": {}})


@pytest.mark.parametrize(
    ("infos", "details", "match"),
    [
        ([{"gspo_gym": {"reward_terms": {"found": 2.0}}}], {}, "terms that sum to the reward"),
        ([{}], {"gspo_gym": {"outcome": "env_error"}}, "expected one of"),
    ],
)
def test_a_server_of_this_library_that_contradicts_itself_is_refused(
    infos: list[dict[str, Any]], details: dict[str, Any], match: str
) -> None:
    with pytest.raises(AppAnswerError, match=match):
        told(answer([1.5], infos=infos, details=details))


@pytest.mark.parametrize(
    ("info", "events"),
    [
        ({"meta": {"decision_rewards": {"all": ["a", "b", "a"], "unique": ["b"]}}}, ("a", "b")),
        ({"meta": {"decision_rewards": {"unique": ["b"]}}}, ("b",)),
        ({"stepwise": {"new_achievements": ["c"]}}, ("c",)),
        ({"meta": {"decision_rewards": {"all": []}}, "stepwise": {"new_achievements": ["c"]}}, ()),
        ({"meta": "none", "stepwise": None}, ()),
        (None, ()),
    ],
)
def test_achievements_become_events(info: dict[str, Any] | None, events: tuple[str, ...]) -> None:
    (decision,) = told(answer([1.0], infos=[info])).decisions
    assert decision.events == events


def test_achievements_that_are_no_names_are_refused() -> None:
    with pytest.raises(AppAnswerError, match="step 0: all: expected a list of names"):
        told(answer([1.0], infos=[{"meta": {"decision_rewards": {"all": [1]}}}]))


def test_achievements_without_names_count_as_the_app_counts_them() -> None:
    """Two new ones; then three, of which one is new; then one that is not new. By kind 2 + 1 + 0 and 2 + 3 + 1."""
    blocks = [{"turn": k + 1, "ach_delta": a, "unique_delta": u} for k, (a, u) in enumerate([(2, 2), (3, 1), (1.0, 0)])]
    rollout = told(answer([None] * 3, infos=[{"meta": {"decision_rewards": block}} for block in blocks]))
    assert [len(decision.events) for decision in rollout.decisions] == [2, 3, 1]
    seen: set[str] = set()
    num_new = []
    for decision in rollout.decisions:
        num_new.append(len(set(decision.events) - seen))
        seen |= set(decision.events)
    assert num_new == [2, 1, 0]
    assert [warning.partition(":")[0] for warning in rollout.warnings] == ["achievements without names"]


@pytest.mark.parametrize("count", ["2", True, 0.5, -1, 10**9])
def test_achievements_without_names_need_a_count(count: Any) -> None:
    with pytest.raises(AppAnswerError, match="step 0: unique_delta: expected a count"):
        told(answer([1.0], infos=[{"meta": {"decision_rewards": {"unique_delta": count}}}]))


@pytest.mark.parametrize(
    ("info", "reports"),
    [
        (None, False),
        ({"meta": {"inference_url": "http://gw"}}, False),
        ({"meta": {"decision_rewards": {"turn": 1, "all": []}}}, True),
        ({"stepwise": {"new_achievements": []}}, True),
        ({"gspo_gym": {}}, True),
    ],
)
def test_an_app_reports_step_rewards_if_a_step_has_them_though_they_be_none(info: Any, reports: bool) -> None:
    assert told(answer([0.0, 0.0], infos=[None, info])).reports_events is reports


def test_steps_of_one_decision_are_one() -> None:
    """Two steps of turn 1 earn 1 + 2 = 3, and an achievement of both is one event; turn 2 is not scored."""
    infos = [
        {"meta": {"decision_rewards": {"turn": turn, "all": names}}}
        for turn, names in ((1, ["a"]), (1, ["a", "b"]), (2, []))
    ]
    rollout = told(answer([1.0, 2.0, None], infos=infos))
    assert rollout.decisions == (AppDecision(3.0, {}, ("a", "b")), AppDecision(None, {}, ()))


@pytest.mark.parametrize("numbers", [[2, 1], [1, None], ["1", "2"], [True, True]])
def test_steps_whose_turns_make_no_sense_are_decisions_each(numbers: list[Any]) -> None:
    infos = [{"meta": {"decision_rewards": {"turn": number}}} for number in numbers]
    assert told(answer([1.0, 2.0], infos=infos)).turn_rewards == (1.0, 2.0)


def rollout_of(episode_return: float | None, *decisions: AppDecision) -> AppRollout:
    return AppRollout("A", episode_return, "metrics.mean_return", decisions)


def test_decisions_join_turns_in_order() -> None:
    joined = join_rewards(
        turns(2), rollout_of(0.5, AppDecision(0.5, {"win": 0.5}, ("won",)), AppDecision(None, {}, ("a",)))
    )
    assert joined.warning is None
    assert [turn.reward for turn in joined.turns] == [0.5, None]
    assert [turn.reward_terms for turn in joined.turns] == [{"win": 0.5}, {}]
    assert [turn.events for turn in joined.turns] == [("won",), ("a",)]
    assert [turn.action_span for turn in joined.turns] == [turn.action_span for turn in turns(2)]


def test_what_the_steps_do_not_sum_to_is_the_last_turns() -> None:
    """Return 1; the steps earned 0.25 + 0.25; the rest is 1 - 0.5 = 0.5."""
    joined = join_rewards(turns(2), rollout_of(1.0, AppDecision(0.25), AppDecision(0.25)))
    assert [turn.reward for turn in joined.turns] == [0.25, 0.75]
    assert joined.turns[1].reward_terms == {"step": 0.25, "rest_of_return": 0.5}


def test_rounding_is_no_rest() -> None:
    """A tenth ten times is 1 but for rounding; each turn keeps exactly what its step earned."""
    joined = join_rewards(turns(10), rollout_of(1.0, *[AppDecision(0.1)] * 10))
    assert [turn.reward for turn in joined.turns] == [0.1] * 10


def test_a_return_that_no_step_earned_is_the_last_turns() -> None:
    joined = join_rewards(turns(2), rollout_of(1.0, AppDecision(), AppDecision()))
    assert [turn.reward for turn in joined.turns] == [None, 1.0]
    assert joined.warning is None


@pytest.mark.parametrize("num_turns", [1, 3])
def test_with_other_calls_than_decisions_the_last_turn_gets_all(num_turns: int) -> None:
    joined = join_rewards(
        turns(num_turns), rollout_of(1.5, AppDecision(1.0, {}, ("a", "b")), AppDecision(0.5, {}, ("b", "c")))
    )
    assert [turn.reward for turn in joined.turns] == [None] * (num_turns - 1) + [1.5]
    assert [turn.events for turn in joined.turns] == [()] * (num_turns - 1) + [("a", "b", "c")]
    assert joined.warning is not None
    assert joined.warning.startswith("steps are not calls: the app lists 2 decisions")


def test_an_app_without_steps_gives_its_return_to_the_last_turn_without_a_warning() -> None:
    joined = join_rewards(turns(2), rollout_of(1.0))
    assert [turn.reward for turn in joined.turns] == [None, 1.0]
    assert joined.warning is None


@pytest.mark.parametrize("generation", ["A", "B"])
@pytest.mark.parametrize("num_steps", [0, 2, 3])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, -3.5, 1e300])
def test_a_return_beside_null_step_rewards_is_the_episodes_whatever_number_it_is(
    value: float, num_steps: int, generation: str
) -> None:
    """Two turns were captured. Nothing but the return was scored, so their rewards sum to it, 0 included."""
    rewards: list[float | None] = [None] * num_steps
    if generation == "A":
        rollout = told(answer(rewards, mean_return=value))
    else:
        reward_info = {"outcome_reward": value, "event_rewards": rewards}
        rollout = told({"trace_correlation_id": "trace_5f", "reward_info": reward_info})
    assert [turn.reward for turn in join_rewards(turns(2), rollout).turns] == [None, value]


def test_a_small_return_beside_rewards_of_0_is_no_rounding() -> None:
    """0 + 0 has no rounding: what a return of 1e-9 is more is the last turn's, and said."""
    rollout = told(answer([0.0, 0.0], mean_return=1e-9))
    assert rollout.warnings[0].startswith("returns differ")
    assert [turn.reward for turn in join_rewards(turns(2), rollout).turns] == [0.0, 1e-9]


def test_rewards_that_cancel_are_0_but_for_rounding() -> None:
    """0.1 + 0.2 - 0.3 is 5.6e-17 in floating point, and 0 is what the app says."""
    rollout = told(answer([0.1, 0.2, -0.3], mean_return=0.0))
    assert rollout.warnings == ()
    assert [turn.reward for turn in join_rewards(turns(3), rollout).turns] == [0.1, 0.2, -0.3]


def test_a_decision_without_a_turn_counts_with_the_turn_before_it_or_the_first() -> None:
    """Five decisions, of which the second and the fourth are turns: 1 + 2 + 4 and 8 + 16 of a return of 31."""
    decisions = [AppDecision(float(2**k), {}, (f"event {k}",)) for k in range(5)]
    joined = join_rewards(turns(2), rollout_of(31.0, *decisions), (None, 0, None, 1, None))
    assert [turn.reward for turn in joined.turns] == [7.0, 24.0]
    assert [turn.events for turn in joined.turns] == [("event 0", "event 1", "event 2"), ("event 3", "event 4")]
    assert joined.warning is None


def test_no_turns_join_to_none() -> None:
    assert join_rewards([], rollout_of(1.0)).turns == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, part in inner for place in ((*at, key), *places(part, (*at, key)))]


@pytest.mark.parametrize("name", ["rollout_response_a", "rollout_response_b_metrics"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_stands_in_a_field_there_is_a_finite_return_or_an_error(name: str, data: st.DataObject) -> None:
    value = json.loads((DATA / f"{name}.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        *outer, last = data.draw(st.sampled_from(places(value)))
        at = value
        for key in outer:
            at = at[key]
        at[last] = data.draw(JSON)
    try:
        rollout = told(value)
    except (AppAnswerError, ValidationError):
        return
    numbers = [rollout.episode_return, *rollout.turn_rewards]
    assert all(number is None or (type(number) is float and math.isfinite(number)) for number in numbers)
    for num_turns in (1, 2):
        join_rewards(turns(num_turns), rollout)
