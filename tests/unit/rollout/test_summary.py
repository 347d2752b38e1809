from __future__ import annotations

import dataclasses

import pytest

from gspo_gym.rollout.summary import METRICS, TERM_PREFIX, TOOL_PREFIX, rollout_metrics, source_metrics, uniform_metrics
from gspo_gym.types import DroppedEpisode, ForkPoint, Message, Outcome, ToolCall, TrajectoryGroup


@pytest.fixture
def groups(rich_trajectory):
    """Two episodes and a dropped one; then a group of which nothing is left.

    The first has 3 turns, 4 sampled tokens, rewards 0.1 + 1/3, events a and b, one turn cut by the token limit and not
    parsed, and no success. The second is its first turn alone, at the limit on turns, with success.
    """
    turn = dataclasses.replace(rich_trajectory.turns[0], reward=1.0, reward_terms={"found": 1.0}, events=("a", "a"))
    segment = rich_trajectory.segments[0]
    cut = dataclasses.replace(
        segment,
        **{
            name: getattr(segment, name)[:4]
            for name in ("token_ids", "action_mask", "rollout_logprobs", "turn_index", "weight_version")
        },
    )
    second = dataclasses.replace(
        rich_trajectory, turns=(turn,), segments=(cut,), outcome=Outcome.MAX_TURNS, success=True
    )
    dropped = DroppedEpisode("x", Outcome.ENV_ERROR, "it broke")
    task = rich_trajectory.task
    return [TrajectoryGroup(task, (rich_trajectory, second), 3, (dropped,)), TrajectoryGroup(task, (), 1, (dropped,))]


def test_every_number_by_hand(groups):
    metrics = rollout_metrics(groups, seconds=2.0)
    first = 0.1 + 1 / 3
    assert metrics == pytest.approx(
        {
            "rollout/reward_mean": (first + 1) / 2,
            "rollout/reward_std": (1 - first) / 2,
            "rollout/success_rate": 1 / 2,
            "rollout/num_episodes": 2,
            "rollout/num_dropped": 2,
            "rollout/num_dropped_groups": 1,
            "rollout/turns_mean": (3 + 1) / 2,
            "rollout/tokens_per_turn": (4 + 2) / (3 + 1),
            "rollout/sampled_tokens": 6,
            "rollout/sampled_tokens_per_second": 3,
            "rollout/max_turns_fraction": 1 / 2,
            "rollout/context_overflow_fraction": 0,
            "rollout/action_limit_fraction": 0,
            "rollout/parse_failure_fraction": 1 / 4,
            "rollout/max_output_tokens_fraction": 1 / 4,
            "rollout/events_mean": (2 + 1) / 2,
            "reward/found": (0.1 + 1.0) / 2,
            "tools/failure_fraction": 0,
            "tools/failure_fraction/query": 0,
        }
    )


def test_ends_are_counted_each_by_itself(groups):
    ends = [Outcome.MAX_TURNS] + [Outcome.CONTEXT_OVERFLOW] * 2 + [Outcome.ACTION_LIMIT] * 3 + [Outcome.TERMINATED] * 4
    episode, task = groups[0].trajectories[0], groups[0].task
    ended = tuple(dataclasses.replace(episode, outcome=end, success=end is Outcome.ACTION_LIMIT) for end in ends)
    metrics = rollout_metrics([TrajectoryGroup(task, ended, 10)], seconds=1.0)
    names = ("max_turns_fraction", "context_overflow_fraction", "action_limit_fraction", "success_rate")
    assert [metrics[f"rollout/{name}"] for name in names] == [1 / 10, 2 / 10, 3 / 10, 3 / 10]


def test_a_fork_counts_in_its_own_number_and_its_new_tokens_alone(groups):
    episode, task = groups[0].trajectories[0], groups[0].task
    fork = dataclasses.replace(episode, success=True, forked_from=ForkPoint("t", 2))
    with_fork = [*groups, TrajectoryGroup(task, (fork,), 1)]
    new_tokens = sum(int((segment.turn_index == 2).sum()) for segment in episode.segments)  # of its third turn
    before = rollout_metrics(groups, seconds=2.0)
    counts = {"sampled_tokens": 6 + new_tokens, "sampled_tokens_per_second": (6 + new_tokens) / 2, "num_forks": 1}
    assert 0 < new_tokens < episode.num_actions
    expected = before | {f"rollout/{name}": number for name, number in counts.items()}
    assert rollout_metrics(with_fork, seconds=2.0) == expected
    assert uniform_metrics(with_fork) == uniform_metrics(groups)


def test_every_number_is_explained(groups):
    episode, task = groups[0].trajectories[0], groups[0].task
    groups.append(TrajectoryGroup(task, (dataclasses.replace(episode, forked_from=ForkPoint("t", 1)),), 1))
    names = {name for name in rollout_metrics(groups, seconds=1.0) if not name.startswith((TERM_PREFIX, TOOL_PREFIX))}
    assert names | set(uniform_metrics(groups)) == set(METRICS)


def test_reward_terms_and_environments_are_named_in_one_order_whichever_came_first(groups):
    episode, task = groups[0].trajectories[0], groups[0].task
    terms = {"zeal": 0.5, "aim": -1.0}
    turns = (dataclasses.replace(episode.turns[0], reward_terms=terms), *episode.turns[1:])
    episode = dataclasses.replace(episode, turns=turns)
    named = [name for name in rollout_metrics([TrajectoryGroup(task, (episode,), 1)], seconds=1.0) if "reward/" in name]
    assert named == sorted(named)
    assert {f"{TERM_PREFIX}aim", f"{TERM_PREFIX}zeal"} <= set(named)
    gone = (DroppedEpisode("x", Outcome.ENV_ERROR, "it broke"),)
    lost = [TrajectoryGroup(dataclasses.replace(task, env_id=env_id), (), 1, gone) for env_id in ("b", "a")]
    assert [name.split("/")[1] for name in source_metrics(lost)] == ["a"] * 3 + ["b"] * 3


def test_an_environment_that_never_declares_success_has_no_rate_of_it(groups):
    silent = [
        dataclasses.replace(group, trajectories=tuple(dataclasses.replace(t, success=None) for t in group.trajectories))
        for group in groups
    ]
    assert "rollout/success_rate" not in rollout_metrics(silent, seconds=1.0)


def test_a_success_rate_is_over_the_environments_that_declare_success(groups):
    declared = rollout_metrics(groups, seconds=1.0)["rollout/success_rate"]
    other = dataclasses.replace(groups[0].task, env_id="silent")
    silent = [
        dataclasses.replace(
            group,
            task=other,
            trajectories=tuple(dataclasses.replace(t, task=other, success=None) for t in group.trajectories),
        )
        for group in groups
    ]
    assert rollout_metrics([*groups, *silent], seconds=1.0)["rollout/success_rate"] == declared
    # of one that is known to declare it, episodes that were all cut off are no successes
    assert rollout_metrics(silent, seconds=1.0, success_of=("silent",))["rollout/success_rate"] == 0.0
    by_source = source_metrics([*groups, *silent])
    assert "source/silent/success_rate" not in by_source
    assert by_source[f"source/{groups[0].task.env_id}/success_rate"] == declared
    assert source_metrics(silent, success_of=("silent", "other"))["source/silent/success_rate"] == 0.0


def test_each_environment_of_a_mixture_has_its_own_numbers(groups):
    alone = rollout_metrics(groups, seconds=1.0)
    env_id = groups[0].task.env_id
    other = dataclasses.replace(groups[0].task, env_id="other")
    lost = [DroppedEpisode(f"g9/{k}", Outcome.ENV_ERROR, "gone") for k in range(2)]
    metrics = source_metrics([*groups, TrajectoryGroup(other, (), 2, tuple(lost))])
    for name in ("reward_mean", "success_rate", "turns_mean", "num_episodes", "num_dropped", "num_dropped_groups"):
        assert metrics.pop(f"source/{env_id}/{name}") == alone[f"rollout/{name}"]
    # All episodes of the other one were lost, so that there is no mean of anything.
    assert metrics == {
        "source/other/num_episodes": 0,
        "source/other/num_dropped": 2,
        "source/other/num_dropped_groups": 1,
    }


def test_calls_that_were_answered_with_an_error_are_a_share_of_all_and_of_each_tools(groups):
    def asked(name: str, answer: str) -> tuple[Message, Message]:
        call = ToolCall("call_0", name, {})
        return Message("assistant", "", (call,)), Message("tool", answer, tool_call_id="call_0")

    said = [("open", "error: it is locked"), ("look", "a door"), ("look", "error: KeyError: 'door'")]
    said += [("fly", "error: unknown tool 'fly'")]
    messages = tuple(message for name, answer in said for message in asked(name, answer))
    episode = dataclasses.replace(groups[0].trajectories[0], messages=messages)
    metrics = rollout_metrics([dataclasses.replace(groups[0], trajectories=(episode,), requested_size=2)], seconds=1.0)
    # in this order, whichever was called first, so that the lines of a run have one
    assert [(name, value) for name, value in metrics.items() if name.startswith("tools/")] == [
        ("tools/failure_fraction", 2 / 3),  # of two looks and an open; there is no tool fly
        ("tools/failure_fraction/look", 1 / 2),
        ("tools/failure_fraction/open", 1.0),
    ]
