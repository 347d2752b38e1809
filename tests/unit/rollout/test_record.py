"""What of an episode's record needs no environment: which ids can have been sampled, and an episode without any."""

from __future__ import annotations

import numpy as np
import pytest

from gspo_gym.errors import RecordError
from gspo_gym.rollout.record import OpenEpisode, require_possible

END = 9


@pytest.mark.parametrize("ids", [[0], [8], [END], [1, 2, END], [1, 2, 3]])
def test_a_sample_may_end_anywhere_and_with_a_stop_token(ids: list[int]) -> None:
    require_possible(np.array(ids, dtype=np.int32), max_tokens=3, stop_token_ids=[END])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "expected 1 to 3 sampled ids in this turn, got 0"),
        ([1, 2, 3, 4], "expected 1 to 3 sampled ids in this turn, got 4"),
        ([1, -1], "expected ids of at least 0, got -1"),
        ([END, 1, 2], "token 0 is the stop token 9, but 2 more follow"),
        ([1, END, 2], "token 1 is the stop token 9, but 1 more follow"),
        ([1, END, END], "token 1 is the stop token 9, but 1 more follow"),
    ],
)
def test_ids_that_no_sampler_can_have_come_to_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        require_possible(np.array(ids, dtype=np.int32), max_tokens=3, stop_token_ids=[END])


def test_an_episode_without_tokens_fits_any_length() -> None:
    padded = OpenEpisode().freeze(pad_id=0).padded(0)
    assert (padded.ids.shape, padded.action_mask.shape, padded.turn_index.shape) == ((0, 0),) * 3
    assert padded.rewards.shape == (0,)
