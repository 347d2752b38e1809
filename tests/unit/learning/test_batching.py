from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gspo_gym.errors import ConfigError, RecordError, UnscoredError
from gspo_gym.learning.advantages import RunningReturns
from gspo_gym.learning.batching import (
    BatchCounts,
    LabelledBatch,
    TrainBatch,
    batch_tokens,
    build_batch,
    select_trajectories,
    split_microbatches,
    split_minibatches,
)
from gspo_gym.learning.credit import Returns
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings
from gspo_gym.seeding import generator
from gspo_gym.types import Outcome

TURN = AdvantageSettings(level="turn", scale="none")


@pytest.fixture
def mixed_batch(make_trajectory):
    """Eleven trajectories of different lengths; 2, 5 and 8 have two or three segments."""
    trajectories = [
        make_trajectory(
            [0.0] * (1 + i % 4), action=1 + i % 3, observation=2 + i % 5, seed=i, num_segments=1 + i % 4 // 2
        )
        for i in range(11)
    ]
    return batch_tokens(trajectories), trajectories


def test_advantages_reach_the_tokens_of_their_turn_in_every_segment(make_trajectory, make_group):
    # returns-to-go (3, 2) and (0, 0), each the other's baseline
    first = make_trajectory([1.0, 2.0], observation=2, action=[1, 3], num_segments=2)
    second = make_trajectory([0.0, 0.0], observation=2, action=[2, 1])
    built = build_batch([make_group(first, second)], TURN)
    assert built.batch.advantages.tolist() == [[0, 0, 3, 0, 0, 0, 0], [0, 0, 2, 2, 2, 0, 0], [0, 0, -3, -3, 0, 0, -2]]
    assert built.batch.trajectory_index.tolist() == [0, 0, 1]
    assert built.batch.turn_index.tolist() == [
        [-1, -1, 0, -1, -1, -1, -1],
        [-1, -1, 1, 1, 1, -1, -1],
        [-1, -1, 0, 0, -1, -1, 1],
    ]


def test_rows_hold_what_was_sampled_and_end_with_the_last_sampled_token(make_trajectory, make_group):
    trajectory = make_trajectory([1.0, 2.0], observation=3, action=2)
    batch = build_batch([make_group(trajectory)], AdvantageSettings()).batch
    segment = trajectory.segments[0]
    assert len(segment) == 12, "two turns of 3 + 2, and 2 tokens after the last action"
    assert batch.token_ids.tolist() == [segment.token_ids[:10].tolist()]
    assert batch.rollout_logprobs.tolist() == [segment.rollout_logprobs[:10].tolist()]
    assert batch.action_mask.tolist() == [segment.action_mask[:10].tolist()]
    assert batch.attention_mask.all()


def test_a_trajectory_without_a_sampled_token_takes_part_in_nothing(make_trajectory, make_group):
    played = [make_trajectory([r], seed=i) for i, r in enumerate([1.0, 3.0])]
    silent = make_trajectory([], outcome=Outcome.CONTEXT_OVERFLOW)
    assert silent.num_actions == 0
    built = build_batch([make_group(played[0], silent, played[1])], AdvantageSettings())
    assert (built.counts.num_trajectories, built.counts.num_skipped) == (2, 1)
    # mean 2, std sqrt 2: as if the silent one did not exist
    assert built.batch.advantages[:, -1].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)


def test_a_trajectory_of_which_nothing_is_trained_on_counts_in_the_statistics_alone(make_trajectory, make_group):
    played = [make_trajectory([r], seed=i) for i, r in enumerate([1.0, 3.0])]
    masked = without_mask(make_trajectory([8.0]))
    assert masked.num_actions == 0
    built = build_batch([make_group(played[0], masked, played[1])], AdvantageSettings(scale="none"))
    counts = built.counts
    assert (counts.num_trajectories, counts.num_untrained, counts.num_skipped, counts.num_filtered) == (2, 1, 0, 0)
    # mean (1 + 8 + 3) / 3 = 4
    assert built.batch.advantages[:, -1].tolist() == [-3.0, -1.0]
    assert built.mean_return == 4.0


def test_a_batch_of_which_nothing_is_trained_on_is_no_batch(make_trajectory, make_group):
    built = build_batch([make_group(without_mask(make_trajectory([8.0])))], AdvantageSettings())
    assert (built.batch, built.counts.num_untrained, built.mean_return) == (None, 1, 8.0)


def without_mask(trajectory):
    """The same, with turns of which no token is to be trained on."""
    segments = []
    for segment in trajectory.segments:
        n = len(segment)
        nothing = {"action_mask": np.zeros(n, bool), "rollout_logprobs": np.zeros(n, np.float32)}
        nothing |= {name: np.full(n, -1, np.int32) for name in ("turn_index", "weight_version")}
        segments.append(dataclasses.replace(segment, **nothing))
    return dataclasses.replace(trajectory, segments=tuple(segments))


def test_groups_are_compared_within_themselves_and_constant_ones_are_counted(make_trajectory, make_group):
    groups = [make_group(*[make_trajectory([r]) for r in returns]) for returns in ([5.0, 5.0], [0.0, 2.0])]
    built = build_batch(groups, AdvantageSettings(scale="none"))
    assert built.batch.advantages[:, -1].tolist() == [0, 0, -1, 1]
    assert (built.counts.num_groups, built.counts.num_constant_groups) == (2, 1)


def test_a_batch_without_any_sampled_token_is_refused(make_trajectory, make_group):
    with pytest.raises(RecordError, match="at least one trajectory"):
        build_batch([make_group(make_trajectory([], outcome=Outcome.CONTEXT_OVERFLOW))], AdvantageSettings())


def test_every_trajectory_of_a_token_batch_needs_a_sampled_token(make_trajectory):
    for trajectories in ([], [make_trajectory([1.0]), without_mask(make_trajectory([1.0]))]):
        with pytest.raises(RecordError, match=f"got {len(trajectories)} trajectories, {len(trajectories) // 2} of"):
            batch_tokens(trajectories)


def test_a_token_of_a_turn_that_its_trajectory_does_not_have_is_refused(make_trajectory, make_group):
    trajectory = make_trajectory([1.0, 2.0])
    shorter = dataclasses.replace(trajectory, turns=trajectory.turns[:1])
    with pytest.raises(RecordError, match="names turn 1, but its trajectory has 1 turns"):
        build_batch([make_group(shorter)], AdvantageSettings())


def test_an_unscored_trajectory_is_refused(make_trajectory, make_group):
    with pytest.raises(UnscoredError):
        build_batch([make_group(make_trajectory([None]), make_trajectory([1.0]))], AdvantageSettings())


def test_filtered_trajectories_count_in_the_statistics_and_are_not_in_the_batch(make_trajectory, make_group):
    # returns 0, 1, 5: mean 2, so -2, -1, 3; and a constant group
    groups = [
        make_group(*[make_trajectory([r], seed=i) for i, r in enumerate([0.0, 1.0, 5.0])]),
        make_group(make_trajectory([1.0], seed=3), make_trajectory([1.0], seed=4)),
    ]
    built = build_batch(groups, AdvantageSettings(scale="none", filter_eps=1.0))
    assert built.batch is not None
    assert built.batch.advantages[:, -1].tolist() == [-2, 3]
    assert built.batch.trajectory_index.tolist() == [0, 1]
    assert (built.counts.num_trajectories, built.counts.num_filtered) == (2, 3)
    assert built.mean_return == pytest.approx(8 / 5)


def test_a_filter_of_zero_leaves_out_exactly_those_without_an_advantage(make_trajectory, make_group):
    groups = [make_group(*[make_trajectory([r]) for r in returns]) for returns in ([5.0, 5.0], [0.0, 2.0])]
    built = build_batch(groups, AdvantageSettings(scale="none", filter_eps=0.0))
    assert built.batch is not None
    assert built.batch.advantages[:, -1].tolist() == [-1, 1]


def test_a_trajectory_with_one_turn_beyond_the_filter_stays_whole(make_trajectory, make_group):
    # to go (1, 0) and (1, 1): the first turns are alike, the second ones differ by 1
    group = make_group(make_trajectory([1.0, 0.0]), make_trajectory([0.0, 1.0]))
    built = build_batch([group], AdvantageSettings(level="turn", scale="none", filter_eps=0.5))
    assert built.batch is not None
    assert built.batch.num_trajectories == 2


def test_a_batch_of_which_nothing_is_left_is_none_and_is_counted(make_trajectory, make_group):
    built = build_batch([make_group(make_trajectory([1.0]), make_trajectory([1.0]))], AdvantageSettings(filter_eps=0.0))
    assert built.batch is None
    assert (built.counts.num_constant_groups, built.counts.num_filtered) == (1, 2)
    assert built.running.count == 2
    empty = build_batch([], AdvantageSettings(), running=built.running)
    assert (empty.batch, empty.counts, empty.running) == (None, BatchCounts(*[0] * 7), built.running)


def test_masked_episodes_are_compared_and_marked_in_all_their_rows(make_trajectory, make_group):
    overlong = make_trajectory([1.0, 2.0], num_segments=2, outcome=Outcome.MAX_TURNS)
    group = make_group(make_trajectory([1.0]), overlong)
    built = build_batch([group], AdvantageSettings(scale="none"), rewards=RewardSettings(overlong="mask"))
    assert built.batch is not None
    assert built.batch.is_masked.tolist() == [False, True, True]
    # returns 1 and 3, mean 2: as if it were not marked, and it still counts in N
    assert [row[row != 0].unique().tolist() for row in built.batch.advantages] == [[-1], [1], [1]]
    assert (built.batch.num_trajectories, built.counts.num_overlong) == (2, 1)
    kept = build_batch([group], AdvantageSettings(scale="none"))
    assert kept.batch is not None
    assert not kept.batch.is_masked.any()
    assert kept.counts.num_overlong == 1


def test_selecting_and_splitting_carry_the_mark(make_trajectory, make_group):
    group = make_group(make_trajectory([1.0]), make_trajectory([2.0, 0.0], num_segments=2, outcome=Outcome.MAX_TURNS))
    batch = build_batch([group], AdvantageSettings(), rewards=RewardSettings(overlong="mask")).batch
    assert batch is not None
    assert select_trajectories(batch, [1, 0]).is_masked.tolist() == [False, True, True]
    assert sorted(part.is_masked.tolist() for part in split_microbatches(batch, 1)) == [[False], [True, True]]


def test_running_statistics_go_from_batch_to_batch(make_trajectory, make_group):
    settings = AdvantageSettings(baseline="running", scale="none")
    first = build_batch([make_group(make_trajectory([0.0]), make_trajectory([2.0]))], settings)
    second = build_batch([make_group(make_trajectory([4.0]))], settings, running=first.running)
    assert second.batch is not None
    # all three: mean 2
    assert second.batch.advantages[0, -1].item() == 2.0
    assert second.running == RunningReturns(count=3, mean=2.0, squared_deviations=8.0, magnitude=4.0)


def test_returns_that_are_known_are_not_computed_again(make_trajectory, make_group):
    # worth 1 by its turns: the known return of 5 is what the unknown 3 is compared with
    known, unknown = make_trajectory([1.0], name="known"), make_trajectory([3.0], name="unknown")
    returns = {"known": Returns(5.0, np.array([5.0]), 5.0)}
    built = build_batch([make_group(known, unknown)], AdvantageSettings(scale="none"), known_returns=returns)
    assert built.mean_return == 4.0
    assert built.batch.advantages[:, 3].tolist() == [1.0, -1.0]


def test_a_trajectory_whose_rows_disagree_about_the_mask_is_refused():
    fields = valid() | {"trajectory_index": torch.tensor([0, 0])}
    with pytest.raises(RecordError, match="all rows of a trajectory to agree"):
        TrainBatch(**fields)


def valid() -> dict[str, torch.Tensor]:
    """Two trajectories; the second row is one token shorter."""
    return {
        "token_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": torch.tensor([[True, True, True], [True, True, False]]),
        "action_mask": torch.tensor([[False, True, True], [False, True, False]]),
        "turn_index": torch.tensor([[-1, 0, 0], [-1, 0, -1]]),
        "trajectory_index": torch.tensor([0, 1]),
        "rollout_logprobs": torch.zeros(2, 3),
        "advantages": torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]]),
        "is_masked": torch.tensor([False, True]),
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention_mask", [[True, True, True], [False, True, True]], "padding on the right"),
        ("action_mask", [[True, True, True], [False, True, False]], "after position 0"),
        ("action_mask", [[False, True, True], [False, True, True]], "not in the padding"),
        ("turn_index", [[-1, 0, -1], [-1, 0, -1]], "exactly where action_mask"),
        ("trajectory_index", [0, 2], "0..N-1"),
        ("trajectory_index", [1, 1], "0..N-1"),
        ("trajectory_index", [0.0, 1.0], "int64"),
        ("token_ids", [[5, 6], [8, 9]], "expected"),
        ("token_ids", [5, 6, 7], r"non-empty \[B, T\], got \(3,\)"),
        ("token_ids", [[], []], r"non-empty \[B, T\], got \(2, 0\)"),
        ("advantages", [[0.0, 1.0, float("nan")], [0.0, -1.0, 0.0]], "finite"),
        ("advantages", [[0.5, 1.0, 1.0], [0.0, -1.0, 0.0]], "0 where action_mask is False"),
        ("advantages", [[0, 1, 1], [0, 1, 0]], "float"),
        ("is_masked", [[False], [True]], "expected"),
        ("is_masked", [0, 1], "bool"),
    ],
)
def test_a_batch_that_contradicts_itself_cannot_be_built(field, value, message):
    TrainBatch(**valid())
    with pytest.raises(RecordError, match=message):
        TrainBatch(**(valid() | {field: torch.tensor(value)}))


def test_a_scored_batch_is_checked_too():
    with pytest.raises(RecordError, match="old_logprobs"):
        LabelledBatch(**valid(), old_logprobs=torch.zeros(2, 2), ref_logprobs=None)


def test_a_trajectory_all_of_whose_rows_lack_sampled_tokens_is_refused():
    fields = valid() | {"action_mask": torch.tensor([[False, True, True], [False, False, False]])}
    fields |= {"turn_index": torch.tensor([[-1, 0, 0], [-1, -1, -1]]), "advantages": torch.zeros(2, 3)}
    with pytest.raises(RecordError, match="at least one sampled token"):
        TrainBatch(**fields)


def contents(batch):
    """Each trajectory of a batch as the set of its rows' (token, is sampled) pairs, without padding."""
    rows = {}
    for row, trajectory in enumerate(batch.trajectory_index.tolist()):
        n = int(batch.attention_mask[row].sum())
        tokens = zip(batch.token_ids[row, :n].tolist(), batch.action_mask[row, :n].tolist(), strict=True)
        rows.setdefault(trajectory, []).append(tuple(tokens))
    return [tuple(sorted(rows[i])) for i in range(batch.num_trajectories)]


def test_selected_trajectories_are_renumbered_in_the_order_asked_for(mixed_batch):
    batch, _ = mixed_batch
    before = contents(batch)
    chosen = select_trajectories(batch, [7, 2, 5])
    assert contents(chosen) == [before[7], before[2], before[5]]
    assert chosen.token_ids.shape[1] == int(chosen.attention_mask.sum(1).max()), "no column of padding alone"


def test_selecting_keeps_a_scored_batch_scored():
    scored = LabelledBatch(**valid(), old_logprobs=torch.arange(6.0).reshape(2, 3), ref_logprobs=None)
    chosen = select_trajectories(scored, [1])
    assert chosen.old_logprobs.tolist() == [[3.0, 4.0]]
    assert chosen.ref_logprobs is None


@pytest.mark.parametrize(("size", "expected"), [(11, [11]), (None, [11]), (10, [6, 5]), (4, [4, 4, 3]), (1, [1] * 11)])
def test_minibatches_partition_the_batch_evenly(mixed_batch, size, expected):
    batch, _ = mixed_batch
    parts = split_minibatches(batch, size, generator(0))
    assert [part.num_trajectories for part in parts] == expected
    assert sorted(t for part in parts for t in contents(part)) == sorted(contents(batch))
    if expected == [11]:
        assert parts == [batch], "not a copy of it"


def test_minibatches_depend_on_the_generator_alone(mixed_batch):
    batch, _ = mixed_batch

    def split(seed):
        return [contents(part) for part in split_minibatches(batch, 3, generator(seed))]

    assert split(1) == split(1)
    assert split(1) != split(2)


@pytest.mark.parametrize("max_tokens", [1, 20, 37, 64, 10_000])
def test_microbatches_keep_trajectories_whole_and_their_budget(mixed_batch, max_tokens):
    batch, _ = mixed_batch
    parts = split_microbatches(batch, max_tokens)
    assert sorted(t for part in parts for t in contents(part)) == sorted(contents(batch))
    for part in parts:
        assert part.token_ids.numel() <= max_tokens or part.num_trajectories == 1
        assert part.token_ids.shape[1] == int(part.attention_mask.sum(1).max())
    widths = [part.token_ids.shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True)


def test_microbatches_of_equal_rows_fill_their_budget(make_trajectory):
    # ten rows of 10 tokens, two turns of 3 + 2: a budget of 30 holds three
    batch = batch_tokens([make_trajectory([0.0, 0.0], seed=i) for i in range(10)])
    assert batch.token_ids.shape == (10, 10)
    assert [part.num_trajectories for part in split_microbatches(batch, 30)] == [3, 3, 3, 1]


def test_trajectories_that_begin_alike_stay_together_and_within_the_budget(make_trajectory):
    # three tasks in turn, whose episodes have one turn or two
    batch = batch_tokens([make_trajectory([0.0] * (1 + i // 3), seed=i % 3) for i in range(6)])
    assert batch.attention_mask.sum(1).tolist() == [5, 5, 5, 10, 10, 10]
    batch.token_ids[:, :3] = torch.tensor([[9, 7, 8], [9, 6, 8], [5, 7, 8]] * 2)
    parts = split_microbatches(batch, 20, keep_alike_together=True)
    assert sorted(t for part in parts for t in contents(part)) == sorted(contents(batch))
    for part in parts:
        assert part.token_ids.shape == (2, 10)
        assert part.token_ids[0, :3].tolist() == part.token_ids[1, :3].tolist()
    parts = split_microbatches(batch, 19, keep_alike_together=True)
    assert [part.num_trajectories for part in parts] == [1] * 6


def test_a_budget_of_no_tokens_is_refused(mixed_batch):
    with pytest.raises(ConfigError, match="max_tokens"):
        split_microbatches(mixed_batch[0], 0)


def test_batches_are_frozen(mixed_batch):
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixed_batch[0].token_ids = torch.zeros(1)


def test_demonstrations_keep_their_order_and_need_no_reward(make_trajectory):
    trajectories = [make_trajectory([None, None], seed=i) for i in range(3)]
    batch = batch_tokens(trajectories)
    assert np.array_equal(batch.token_ids[2].numpy(), trajectories[2].segments[0].token_ids[:10])
