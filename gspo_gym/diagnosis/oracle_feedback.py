"""A teacher with feedback, recomputed from the recorded prompts and a checkpoint's weights, for `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from gspo_gym.diagnosis.oracle import Floats, Indices, Model, StepRecords


class Taught(Protocol):
    """A turn's record in tokens/step_NNNNNN.feedback.jsonl."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def turn(self) -> int: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...


def taught_log_ratios(model: Model, records: StepRecords, turns: Sequence[Taught], at: Indices) -> Floats:
    """Return [len(at)] log(teacher / policy) of the sampled tokens `at`, both at temperature 1; NaN: not taught.

    The teacher is the policy behind a prompt of `turns`; those without ids were refused.
    """
    log_ratios, is_asked = np.full(len(records.turn), np.nan), np.isin(np.arange(len(records.turn)), at)
    number_by_id = {episode.trajectory_id: number for number, episode in enumerate(records.episodes)}
    for turn in turns:
        owner = number_by_id.get(turn.trajectory_id, -1)
        tokens = np.flatnonzero((records.units["trajectory"] == owner) & (records.turn == turn.turn) & is_asked)
        if len(tokens) and len(turn.prompt_token_ids):
            log_ratios[tokens] = _log_ratios(model, turn.prompt_token_ids, tokens)
    return log_ratios[at]


def _log_ratios(model: Model, prompt: Sequence[int], tokens: Indices) -> Floats:
    """Return [n] log(policy behind the prompt / policy) of the sampled tokens of one turn."""
    import torch  # here: `verify --help` needs none

    segment, positions = model.segments[model.row[tokens[0]]], model.position[tokens]
    first, stop = int(positions[0]), int(positions[-1]) + 1
    pair = []
    for before, place in ((prompt, positions + len(prompt) - first), (segment.token_ids[:first], positions)):
        ids = torch.from_numpy(np.concatenate([np.asarray(before), segment.token_ids[first:stop]]).astype(np.int64))
        at = torch.from_numpy(place)
        with torch.no_grad():
            logprobs = model.log_softmax("policy", ids, at, is_plain=True)
        pair.append(logprobs.gather(-1, ids[at, None])[:, 0].numpy())
    log_ratios: Floats = pair[0] - pair[1]
    return log_ratios
