"""What the calls of apps came to, step by step: differences of counters, over all apps."""

from __future__ import annotations

from gspo_gym.remote.apps.episodes import AppCounters
from gspo_gym.remote.apps.metrics import AppMetrics, return_metrics, take_returns
from gspo_gym.rollout.summary import PlayedReturns
from gspo_gym.run.recording import METRICS
from gspo_gym.types import DroppedEpisode, Outcome, Task, Trajectory, TrajectoryGroup


def test_a_step_has_what_was_counted_since_the_one_before() -> None:
    bank, shop, reader = AppCounters(), AppCounters(), AppMetrics()
    bank.num_attempts, bank.num_sampled_tokens, bank.num_trained_tokens = 3, 100, 80
    bank.calls.update({"trained": 5, "auxiliary": 1, "failed": 1, "not awaited": 1})
    shop.num_attempts, shop.num_sampled_tokens, shop.num_trained_tokens = 1, 50, 40
    shop.calls.update({"trained": 2, "other sampling": 1})
    shop.num_untrained_episodes = 1
    shop.warnings.update(["two returns"])
    first = reader.since_last([bank, shop])
    assert first == {
        "gateway/calls": 11,
        "gateway/untrained_calls": 4,
        "gateway/auxiliary_calls": 1,
        "gateway/not_awaited_calls": 1,
        "gateway/undelivered_calls": 0,
        "gateway/constrained_calls": 0,
        "gateway/other_sampling_calls": 1,
        "gateway/untrained_episodes": 1,
        "gateway/app_requests": 4,
        "gateway/app_warnings": 1,
        "gateway/trained_fraction": 0.8,  # 120 of 150
    }
    bank.num_attempts += 2
    bank.num_sampled_tokens += 10
    bank.num_trained_tokens += 1
    bank.calls.update({"trained": 1, "undelivered": 1})
    assert reader.since_last([bank, shop]) == dict.fromkeys(first, 0) | {
        "gateway/calls": 2,
        "gateway/untrained_calls": 1,
        "gateway/undelivered_calls": 1,
        "gateway/app_requests": 2,
        "gateway/trained_fraction": 0.1,
    }


def test_a_step_in_which_nothing_was_sampled_has_no_fraction() -> None:
    counters = AppCounters()
    counters.num_attempts = 4  # all of which failed
    metrics = AppMetrics().since_last([counters])
    assert metrics["gateway/app_requests"] == 4
    assert "gateway/trained_fraction" not in metrics


def test_every_number_is_explained() -> None:
    counters = AppCounters()
    counters.num_sampled_tokens = 1
    assert set(AppMetrics().since_last([counters])) <= set(METRICS)


def test_every_attempt_at_a_steps_episodes_counts_once_and_only_the_one_in_the_group_as_kept() -> None:
    counters = AppCounters()
    for trajectory_id, attempt, value in (("a", 0, 0.0), ("a", 1, 1.0), ("b", 0, 0.5), ("later", 0, 9.0)):
        counters.note_return(trajectory_id, attempt, value)
    task = Task("quiz", 1)
    kept = Trajectory("a", 1, task, 0, (), (), (), Outcome.TERMINATED)
    group = TrajectoryGroup(task, (kept,), 2, (DroppedEpisode("b", Outcome.TERMINATED, "its group was too small"),))
    returns = take_returns([counters], [group])
    assert (returns.kept, sorted(returns.lost)) == ((1.0,), [0.0, 0.5])
    assert return_metrics(returns) == {"gateway/played_return_mean": 0.5, "gateway/kept_return_mean": 1.0}
    assert counters.returns == {("later", 0): 9.0}
    assert take_returns([counters], [group]) == PlayedReturns()
