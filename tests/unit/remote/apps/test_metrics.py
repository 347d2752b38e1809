"""What the calls of apps came to, step by step: differences of counters, over all apps."""

from __future__ import annotations

from gspo_gym.remote.apps.episodes import AppCounters
from gspo_gym.remote.apps.metrics import AppMetrics
from gspo_gym.run.recording import METRICS


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
