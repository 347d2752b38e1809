"""The strategies of task apps: values by hand, and those that their own implementation gives."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gspo_gym.remote.serve.rollout_answer import AppStepRewards, DecisionRewards, step_rewards_of

ON = {"enabled": True, "mode": "decision_stepwise"}


def rewards_of(settings: dict[str, object], *decisions: tuple[str, ...]) -> list[float]:
    rewards = DecisionRewards(AppStepRewards.model_validate({**ON, **settings}))
    return [rewards.of_decision(events)["stepwise"]["reward"] for events in decisions]


@pytest.mark.parametrize(
    ("settings", "decisions", "expected"),
    [
        ({"indicator_lambda": 1.0}, [("wood",)], [1.0]),
        ({"indicator_lambda": 1.0}, [("wood", "drink")], [1.0]),  # two are still one decision
        ({"indicator_lambda": 0.5}, [("wood", "drink"), ()], [0.5, 0.0]),
        ({"indicator_lambda": 0.0}, [("wood",)], [1.0]),  # 0 counts as 1
        ({"strategy": "per_achievement", "weights": {"wood": 0.8}}, [("wood", "drink")], [1.8]),
        ({"strategy": "per_achievement"}, [("wood",), ("wood",)], [1.0, 0.0]),  # beyond the limit of 1
        ({"strategy": "per_achievement", "k_limits": {"wood": 2}}, [("wood",)] * 3, [1.0, 1.0, 0.0]),
        ({"strategy": "per_achievement", "k_limits": {"wood": 0}}, [("wood",)] * 3, [1.0, 1.0, 1.0]),  # no limit
        ({"strategy": "per_achievement", "indicator_lambda": 0.5}, [("wood", "wood")], [0.5]),  # once a decision
    ],
)
def test_a_decision_is_worth_what_its_strategy_says(
    settings: dict[str, object], decisions: list[tuple[str, ...]], expected: list[float]
) -> None:
    assert rewards_of(settings, *decisions) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        *[(other, "consistent") for other in ("", "simple", "Consistent_Stepwise", "decision_consistent")],
        *[(other, "per_achievement") for other in ("per-achievement", "perachievement", "complex")],
    ],
)
def test_strategies_are_known_by_the_names_that_task_apps_have(other: str, name: str) -> None:
    assert AppStepRewards.model_validate({"strategy": other}).strategy == name


def test_absolute_and_unique_counts_differ_where_something_is_reached_again() -> None:
    rewards = DecisionRewards(AppStepRewards.model_validate(ON))
    counts = [rewards.of_decision(events)["decision_rewards"] for events in (("a", "b"), ("b", "c"), ())]
    assert [(one["turn"], one["ach_delta"], one["unique_delta"]) for one in counts] == [(1, 2, 2), (2, 2, 1), (3, 0, 0)]
    summary = rewards.summary()
    assert (summary["indicator_sum"], summary["reward_sum"], summary["new_achievements_total"]) == (2, 2.0, 3)
    assert (summary["unique_achievements"], summary["unique_achievements_total"]) == (["a", "b", "c"], 3)


def test_the_policys_settings_come_before_the_environments() -> None:
    policy = {"step_rewards": {**ON, "indicator_lambda": 0.25}}
    env = {"step_rewards": {**ON, "indicator_lambda": 0.75}}
    assert step_rewards_of(policy, env).indicator_lambda == 0.25
    assert step_rewards_of({}, env).indicator_lambda == 0.75
    assert not step_rewards_of({}, {}).is_active
    assert not AppStepRewards(enabled=True, mode="env_sparse").is_active
    assert not AppStepRewards(mode="decision_stepwise").is_active


@pytest.mark.parametrize(
    "wrong", [{"strategy": "per_decision"}, {"mode": "on"}, {"lambda": 1}, {"weights": {"a": "b"}}]
)
def test_unknown_names_are_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AppStepRewards.model_validate(wrong)
