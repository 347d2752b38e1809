"""The oracle of `gspo-gym verify` against the learner's loss, under every choice that the settings of the loss have.

Neither has code of the other, so that what both say of the same tokens is right or wrong in two ways at once. A choice
that is added to the learner, such as another surrogate, is taken up here by itself and fails until the oracle has it.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from gspo_gym.base.settings import Settings
from gspo_gym.cli.verify import _KNOWN
from gspo_gym.diagnosis import oracle
from gspo_gym.diagnosis.oracle import State, StepRecords, batch_of, terms_of, units_of_loss
from gspo_gym.learning import losses
from gspo_gym.learning.advantages import batch_advantages
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.credit import Returns
from gspo_gym.learning.losses import TeacherScores, count_denominators, policy_loss
from gspo_gym.learning.settings import AdvantageSettings, DistillationSettings, LossSettings
from gspo_gym.learning.surrogate_keys import SURROGATE_KEYS, SURROGATE_UNITS
from gspo_gym.types import FinishReason, ForkPoint, Outcome, Segment, Task, Trajectory, TrajectoryGroup, Turn

# Beside the choices: wide enough that all bounds bind and none binds everywhere.
NUMBERS: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4, "kl_coef": 0.1, "kl_clamp": 0.9}
NUMBERS |= {"entropy_coef": 0.01, "norm_length": 7, "sapo_temperatures": (1.5, 2.5)}
NO_CORRECTION = {"correction.level": "none", "correction.off_policy_threshold": None}

# Rows (segments) of episodes 0, 0, 1 and 2, and of their sampled tokens the turns; the second row goes on with a turn.
OWNERS = [0, 0, 1, 2]
TURNS = [[0, 0, 1, 1, 1], [1, 2], [0, 1, 1], [0, 0, 0, 0]]


def choices_of(name: str) -> list[Any]:
    """The values of a field that has choices, or its one number."""
    annotation = LossSettings.model_fields[name].annotation
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    if annotation is bool:
        return [False, True]
    return [NUMBERS[name], None] if name == "dual_clip" else [NUMBERS[name]]


def every_pair_of_choices() -> list[LossSettings]:
    """Every choice of a key beside every choice of another one, the others at their first."""
    fields = {name: choices_of(name) for name in LossSettings.model_fields}
    first = {name: choices[0] for name, choices in fields.items()}
    made: list[LossSettings] = []
    for one, other in itertools.combinations(fields, 2):
        for values in itertools.product(fields[one], fields[other]):
            given = fitting(first | dict(zip((one, other), values, strict=True)))
            made += [settings] if (settings := LossSettings(**given)) not in made else []
    return made


def fitting(given: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that the aggregation or the surrogate does not read, and with a unit that the latter has."""
    idle = {name for names in SURROGATE_KEYS.values() for name in names} - set(SURROGATE_KEYS[given["surrogate"]])
    if given["aggregation"] not in ("seq-mean-token-sum-norm", "dr_grpo"):
        idle.add("norm_length")
    units = SURROGATE_UNITS.get(given["surrogate"], (given["unit"],))
    unit = given["unit"] if given["unit"] in units else units[0]
    return {name: value for name, value in given.items() if name not in idle} | {"unit": unit}


class Tokens:
    """Random tokens, as tensors [B, T] and as the columns [A] of a file."""

    def __init__(self) -> None:
        draws = np.random.default_rng(6)
        count, width = sum(map(len, TURNS)), max(map(len, TURNS))
        self.mask = torch.tensor([[t < len(row) for t in range(width)] for row in TURNS])
        row = np.repeat(np.arange(len(TURNS)), [len(each) for each in TURNS])
        owner, turn = np.array(OWNERS)[row], np.concatenate(TURNS)
        self.units = {"trajectory": owner, "segment": row, "turn": 10 * owner + turn, "token": np.arange(count)}
        self.turn, self.columns = turn, {"old_logprob": -draws.uniform(0.2, 2, count)}
        self.columns["logprob"] = self.columns["old_logprob"] + draws.normal(0, 0.5, count)
        self.columns["ref_logprob"] = self.columns["logprob"] + draws.normal(0, 1.0, count)
        self.columns["rollout_logprob"] = self.columns["old_logprob"]
        self.columns |= {"entropy": draws.uniform(0, 2, count), "advantage": draws.normal(0, 1, count)}
        self.columns |= {"clip": np.zeros(count), "correction": np.ones(count)}

    def laid(self, column: np.ndarray[Any, Any]) -> torch.Tensor:
        table = torch.zeros(self.mask.shape, dtype=torch.from_numpy(column).dtype)
        table[self.mask] = torch.from_numpy(column)
        return table


OF_TEACHER = ("log_ratio", "kl", "divergence")


def learned(
    tokens: Tokens, settings: LossSettings, distillation: DistillationSettings | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """What the learner makes of the tokens, with the gradients of its loss."""
    now, entropy = (tokens.laid(tokens.columns[name]).requires_grad_() for name in ("logprob", "entropy"))
    turns, owners = tokens.laid(tokens.turn), torch.tensor(OWNERS)
    counted = count_denominators(tokens.mask, turns, owners, num_batch_tokens=20)
    constants = {name: tokens.laid(tokens.columns[name]) for name in ("old_logprob", "advantage", "ref_logprob")}
    teacher = None
    if distillation is not None:
        teacher = TeacherScores(distillation, *(tokens.laid(tokens.columns[f"teacher_{n}"]) for n in OF_TEACHER))
        teacher.divergence.requires_grad_()
    output = policy_loss(
        now,
        constants["old_logprob"],
        action_mask=tokens.mask,
        turn_index=turns,
        trajectory_index=owners,
        advantages=constants["advantage"],
        settings=settings,
        denominators=counted,
        ref_logprobs=constants["ref_logprob"],
        entropy=entropy,
        teacher=teacher,
    )
    output.loss.backward()
    inputs = {"slope": now, "slope of entropy": entropy}
    if distillation is not None and distillation.divergence != "sampled":
        inputs["slope of divergence"] = teacher.divergence
    terms = {"ratio": output.tokens.ratio, "clip": output.tokens.clip, "share": output.tokens.share}
    for name, given in inputs.items():
        terms[name] = (torch.zeros_like(given) if given.grad is None else given.grad)[tokens.mask]
    return {name: value.numpy(force=True).astype(np.float64) for name, value in terms.items()}


def recomputed(
    tokens: Tokens, settings: LossSettings, distillation: DistillationSettings | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """The same, by the oracle."""
    config = {f"loss.{name}": value for name, value in settings.model_dump().items()} | NO_CORRECTION
    if distillation is not None:
        config |= {f"distillation.{name}": value for name, value in distillation.model_dump().items()}
    records = StepRecords(config, (), tokens.columns, tokens.units, tokens.turn)
    every = np.arange(len(tokens.turn))
    unit = units_of_loss(records, every >= 0, 20)
    terms = terms_of(records, every, tokens.columns, unit, 1, len(every))
    names = ("slope", "slope of entropy", "slope of divergence")[: len(terms["slopes"])]
    slopes = dict(zip(names, terms["slopes"], strict=True))
    return {name: terms[name] for name in ("ratio", "clip", "share")} | slopes


def differences(every: Sequence[LossSettings]) -> list[tuple[str, LossSettings]]:
    """Each quantity, and under which settings the two say otherwise of it."""
    tokens, found = Tokens(), []
    for settings in every:
        own, other = learned(tokens, settings), recomputed(tokens, settings)
        found += [(name, settings) for name in own if not np.allclose(own[name], other[name], rtol=1e-9, atol=1e-12)]
    return found


def test_the_oracle_has_a_line_for_every_surrogate() -> None:
    assert set(oracle.SURROGATES) == set(losses.SURROGATES)
    chosen = {settings.surrogate for settings in every_pair_of_choices()}
    assert chosen == set(losses.SURROGATES), "a surrogate that no setting chooses is compared with nothing"


@pytest.mark.parametrize(
    ("section", "settings"),
    [("loss", LossSettings), ("advantages", AdvantageSettings), ("distillation", DistillationSettings)],
)
def test_the_oracle_knows_every_key_and_every_choice(section: str, settings: type[Settings]) -> None:
    assert {f"{section}.{name}" for name in settings.model_fields} <= set(_KNOWN)
    for name, field in settings.model_fields.items():
        if typing.get_origin(field.annotation) is Literal:
            assert set(typing.get_args(field.annotation)) == set(_KNOWN[f"{section}.{name}"] or ())


def test_oracle_and_learner_agree_under_every_choice_of_the_loss() -> None:
    assert differences(every_pair_of_choices()) == []
    first = {name: choices_of(name)[0] for name in LossSettings.model_fields}
    for surrogate, binding in {"clip": {0, 1, 2, 3}, "gmpo": {0, 1, 2}, "dppo": {0, 1, 2}, "cispo": {0}}.items():
        settings = LossSettings(**fitting(first | {"surrogate": surrogate, "unit": "token"}))
        assert set(learned(Tokens(), settings)["clip"].tolist()) == binding, "every bound binds somewhere"


@pytest.mark.parametrize("choice", [{}, {"baseline": True}, {"divergence": "reverse_kl"}, {"divergence": "forward_kl"}])
@pytest.mark.parametrize("reward", [False, True])
def test_oracle_and_learner_agree_about_a_teacher(choice: dict[str, Any], reward: bool) -> None:
    distillation = DistillationSettings(teacher="t", coefficient=0.3, reward=reward, **choice)
    tokens = Tokens()
    draws = np.random.default_rng(8)
    tokens.columns["teacher_log_ratio"] = draws.normal(0, 1, len(tokens.turn))
    tokens.columns["teacher_kl"] = draws.uniform(0, 1, len(tokens.turn)) * ("baseline" in choice)
    tokens.columns["teacher_divergence"] = draws.uniform(0, 1, len(tokens.turn))
    fallen = np.exp(tokens.columns["old_logprob"]) - np.exp(tokens.columns["logprob"]) > 0.2
    assert 0 < fallen.sum() < len(fallen), "some are dropped"
    first = {name: choices_of(name)[0] for name in LossSettings.model_fields}
    for unit, aggregation in itertools.product(("trajectory", "token"), ("seq-mean-token-mean", "dapo")):
        settings = LossSettings(**fitting(first | {"unit": unit, "aggregation": aggregation}))
        own, other = learned(tokens, settings, distillation), recomputed(tokens, settings, distillation)
        assert ("slope of divergence" in own) == ("divergence" in choice)
        for name, values in own.items():
            np.testing.assert_allclose(other[name], values, rtol=1e-9, atol=1e-12, err_msg=f"{name}: {settings}")


def test_a_surrogate_of_the_learner_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_clip(ratios: losses.Ratios, _: LossSettings) -> torch.Tensor:
        return ratios.s * ratios.advantage

    monkeypatch.setitem(losses.SURROGATES, "clip", without_clip)
    assert {name for name, _ in differences(every_pair_of_choices()[:1])} == {"share", "slope"}


def test_the_oracle_divides_by_a_groups_success_rate_as_the_learner_does() -> None:
    config = {"advantages.baseline": "group", "advantages.scale": "mean"}
    for returns, expected in (([1, 0, 0, 0], [3, -1, -1, -1]), ([0, 0], [0, 0]), ([1, 1], [0, 0])):
        values = np.array(returns, dtype=np.float64)[:, None]
        spreads = {"group": oracle._spread(values, np.abs(values))}
        assert oracle._advantages(config, values, spreads)[:, 0].tolist() == expected


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_oracle_and_learner_choose_the_same_level(baseline: str, scale: str) -> None:
    settings = AdvantageSettings.model_validate({"level": "auto", "baseline": baseline, "scale": scale})
    draws, chosen = np.random.default_rng(3), set()
    for late in (0.0, 3.0, 0.5):  # rewards that fall at any turn, at the end, and between
        lengths = draws.integers(1, 5, size=(3, 4))
        rewards = np.zeros((12, 4))
        for i, n in enumerate(lengths.ravel()):
            rewards[i, :n] = draws.normal(size=n)
            rewards[i, n - 1] += late * draws.normal()
        to_go = rewards[:, ::-1].cumsum(axis=1)[:, ::-1]
        sizes = np.abs(rewards)[:, ::-1].cumsum(axis=1)[:, ::-1]
        groups = [list(range(4 * g, 4 * g + 4)) for g in range(3)]
        is_turn = np.arange(4) < lengths.reshape(-1, 1)
        config = {"advantages.baseline": baseline, "advantages.scale": scale}
        table = oracle._quieter_level(config, to_go, sizes, groups, is_turn)
        returns = [
            [Returns(to_go[i, 0], to_go[i, : is_turn[i].sum()], sizes[i, 0]) for i in members] for members in groups
        ]
        for i, values in enumerate(batch_advantages(returns, settings).values):
            assert table[i, is_turn[i]] == pytest.approx(values, abs=1e-6)
            chosen.add(len(set(values.tolist())) > 1)
    assert chosen == {True, False}, "both levels were chosen"


def forked_episode(name: str, num_turns: int, earned: float, fork: tuple[str, int] | None = None) -> Trajectory:
    """An episode of two tokens a turn, of which the second is sampled."""
    at = np.arange(2 * num_turns)
    mask = at % 2 == 1
    turn_index, versions = np.where(mask, at // 2, -1), np.where(mask, 0, -1)
    segment = Segment(at, mask, np.where(mask, -1.0, 0.0), turn_index, versions)
    turns = tuple(
        Turn(k, 0, (2 * k, 2 * k + 1), (2 * k + 1, 2 * k + 2), FinishReason.STOP, reward=earned / num_turns)
        for k in range(num_turns)
    )
    point = None if fork is None else ForkPoint(*fork)
    return Trajectory(name, 0, Task("test", 1), 0, (segment,), turns, (), Outcome.TERMINATED, forked_from=point)


def test_oracle_and_learner_agree_on_forks() -> None:
    """Random trees: of one to three leaves, without their origin, in groups that are constant or of one tree."""
    draws, settings = np.random.default_rng(8), AdvantageSettings(baseline="leave_one_out", scale="none")
    groups: list[list[Trajectory]] = []
    for g in range(12):
        group = []
        for i in range(1 if g == 0 else 4):
            earned = draws.normal(size=3) * (g != 1)
            length, turn = int(draws.integers(2, 5)), int(draws.integers(1, 5))
            group.append(forked_episode(f"{g}/{i}", length, float(earned[0])))
            for copy in range(int(draws.integers(3)) if turn < length else 0):
                name = f"{g}/{4 + 2 * i + copy}"
                group.append(forked_episode(name, turn + 1 + copy, float(earned[1 + copy]), (f"{g}/{i}", turn)))
        groups.append(group[1:] if g == 2 else group)
    task = groups[0][0].task
    built = build_batch([TrajectoryGroup(task, tuple(group), len(group)) for group in groups], settings)
    assert built.batch is not None
    episodes = [episode for group in groups for episode in group]
    lengths = [len(episode.turns) for episode in episodes]
    config = {f"advantages.{name}": value for name, value in settings.model_dump().items()}
    config |= {"training.constant_groups": "keep", "rewards.overlong": "keep", "rewards.kl_coef": 0.0}
    config |= {"loss.kl_coef": 0.0, "loss.entropy_coef": 0.0}
    owner, count = np.repeat(np.arange(len(episodes)), lengths), sum(lengths)
    columns = {"fate": np.zeros(count), "optimizer_step": np.zeros((1, len(episodes)))}
    turn_of_token = np.concatenate([np.arange(n) for n in lengths])
    records = StepRecords(config, episodes, columns, {"trajectory": owner}, turn_of_token)
    batch = batch_of(records, State())
    advantages = built.batch.advantages[built.batch.action_mask].numpy()
    np.testing.assert_allclose(batch.advantages, advantages, rtol=1e-5, atol=1e-6)
    assert sum(episode.forked_from is not None for episode in episodes) > 12
    is_constant = np.array([episode.trajectory_id.startswith("1/") for episode in episodes])
    assert not batch.advantages[is_constant[owner]].any()
