"""A second path to the numbers of a training step. It shares no code with the learner; `cli/verify.py` reads the files.

In float64, with gradients by hand. For a sampled token with logprob p, old logprob o and advantage A:

    advantage  A = (R - mean R) / std R over the group              GSPO (arXiv 2507.18071) eq. 6, GRPO's eq. 3 there
    ratio      log s = mean over the unit of p - o                  eq. 7 and 14; unit "token": eq. 3
    loss       sum of a (-w min(s A, clip(s) A) + kl_coef KL - entropy_coef H)                          eq. 5 and 13
    gradient   d loss / d p = a (-w s A [no clip binds] + kl_coef dKL / dp)                            eq. 10 and 17
    KL         x = reference - p: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x          joschu.net/blog/kl-approx.html
    dual clip  for A < 0, s counts as at most dual_clip                                           arXiv 1912.09729

a is 1 over the aggregation's denominator, w the correction's weight. Rules of no paper are in configs/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo_gym.types import FinishReason, Outcome, Trajectory

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]
Spread = tuple[Floats, Bools, float]

_MAX_LOG_RATIO = 20.0
_TRAINED, _LEFT_OUT, _SKIPPED, _NO_GRADIENT, _OVERLONG, _FILTERED, _CONSTANT, _UNCOMMITTED = range(8)
_LOW, _HIGH, _DUAL = 1, 2, 3
_EDGE = 1e-6  # a ratio so near a bound of the clip may lie on either side of it


@dataclass(frozen=True, slots=True, eq=False)
class StepRecords:
    """What a run recorded of a step with A sampled tokens and N episodes.

    Attributes:
        config: by "section.key" (Any: TOML). columns: float64, see `run/tokens.py`. metrics: None: they have no line.
        starts: [N + 1] the first token of each episode. turn, rollout_logprob, weight_version: [A], of the episodes.
        units: by "trajectory", "segment", "turn" and "token", [A] numbers of the tokens' units.
        weights: from before the step (Any: `cli.verify.Weights`); None: unknown.
    """

    config: Mapping[str, Any]
    episodes: Sequence[Trajectory]
    columns: Mapping[str, Floats]
    metrics: Mapping[str, float] | None
    starts: Indices
    units: Mapping[str, Indices]
    turn: Indices
    rollout_logprob: Floats
    weight_version: Floats
    weights: Any


class SecondPath:
    """The numbers of one step, recomputed in order: each from recorded ones that were compared before.

    `compare(quantity, recorded, recomputed, at, unit, slack, **place)` is called for each: `at` are the tokens, up to
    `unit` (1) a difference counts by it, and `slack` is allowed beyond the tolerance.
    """

    def __init__(self, records: StepRecords, compare: Callable[..., None]) -> None:
        self.records, self.compare = records, compare
        self.config, self.columns, self.owner = records.config, records.columns, records.units["trajectory"]

    def follow(self) -> None:
        """Recompute and compare everything."""
        records, every = self.records, np.arange(len(self.owner))
        for name in ("rollout_logprob", "weight_version"):
            self.compare(name, self.columns[name], getattr(records, name), every)
        for episode in records.episodes:
            for turn in (turn for turn in episode.turns if turn.reward is not None and turn.reward_terms):
                place = {"episode": episode.trajectory_id, "turn": turn.index}
                self.compare("reward", turn.reward, sum(turn.reward_terms.values()), **place)
        advantages, fates = self._from_rewards()
        in_batch = np.isin(fates, (_NO_GRADIENT, _OVERLONG))
        others = self.config["loss.kl_coef"] > 0 or self.config["loss.entropy_coef"] > 0
        is_trained = (fates == _NO_GRADIENT) & (self._any(advantages.astype(np.float32) != 0) | others)
        self.compare("advantage", self.columns["advantage"], np.where(in_batch[self.owner], advantages, np.nan), every)
        at = np.flatnonzero(is_seen := is_trained[self.owner])
        for epoch, counted in enumerate(self.columns["optimizer_step"][:, self.owner]):
            wanted = np.where(is_seen, np.maximum(counted, 0), np.where(in_batch[self.owner], counted, -1))
            self.compare("optimizer_step", counted, wanted, every, epoch=epoch)
        weights, old = records.weights, self.columns["old_logprob"][at]
        if self.config["correction.old_logprobs"] == "rollout":
            self.compare("old_logprob", old, records.rollout_logprob[at], at)
        elif weights is not None:
            self.compare("old_logprob", old, weights.score(at), at, slack=weights.rounding)
        if weights is not None and weights.reference is not None:
            reference = self.columns["ref_logprob"][at]
            self.compare("ref_logprob", reference, weights.score_reference(at), at, slack=weights.rounding)
        self._check_updates(is_seen, int(in_batch[self.owner].sum()), fates[self.owner])

    def _any(self, tokens: Bools) -> Bools:  # [N] whether one of an episode's tokens is so
        return np.bincount(self.owner, tokens, minlength=len(self.records.episodes)) > 0

    def _from_rewards(self) -> tuple[Floats, Indices]:
        """Return [A] advantages from the rewards, and [N] fates of the episodes without a pass over them."""
        config, episodes, starts = self.config, self.records.episodes, self.records.starts
        values, sizes = (np.zeros((len(episodes), max(1, *(len(e.turns) for e in episodes)))) for _ in range(2))
        groups: dict[str, list[int]] = {}
        for i, episode in enumerate(episodes):
            if episode.turns:
                groups.setdefault(episode.trajectory_id.rpartition("/")[0], []).append(i)
                own = _compared_by(episode, config)
                values[i, : len(own[0])], sizes[i, : len(own[0])] = own
        is_uncommitted = self._any(self.columns["fate"] == _UNCOMMITTED)  # known to the run alone
        fates = np.where(is_uncommitted, _UNCOMMITTED, _FILTERED)
        kept = []
        for members in groups.values():
            if config["training.constant_groups"] != "keep" and not _spread(values[members], sizes[members])[1].any():
                fates[members] = _CONSTANT
            elif left := [i for i in members if not is_uncommitted[i]]:
                kept.append(left)
        advantages = np.zeros(len(self.owner))
        together = [i for members in kept for i in members]
        spreads = {"batch": _spread(values[together], sizes[together])} if kept else {}
        eps, by_turn = config.get("advantages.filter_eps"), config["advantages.level"] == "turn"
        for members in kept:
            spreads["group"] = _spread(values[members], sizes[members])
            table = _advantages(values[members], config["advantages.baseline"], config["advantages.scale"], spreads)
            for i, row in zip(members, table, strict=True):
                of_turn = row[: len(episodes[i].turns)] if by_turn else np.repeat(row[0], len(episodes[i].turns))
                advantages[starts[i] : starts[i + 1]] = of_turn[self.records.turn[starts[i] : starts[i + 1]]]
                if starts[i] < starts[i + 1] and (eps is None or np.abs(of_turn).max() > eps):
                    is_masked = config["rewards.overlong"] == "mask" and _is_overlong(episodes[i])
                    fates[i] = _OVERLONG if is_masked else _NO_GRADIENT
        limit, is_left_out = config.get("advantages.clip") or np.inf, (fates == _OVERLONG)[self.owner]
        return np.where(is_left_out, advantages, advantages.clip(-limit, limit)), fates

    def _check_updates(self, is_seen: Bools, num_batch_tokens: int, fates: Indices) -> None:
        """Compare what each optimizer step computed, in order, then the rest and the metrics.

        `is_seen` [A] are the tokens that are trained on; `fates` [A] are those of the others, and are changed.
        """
        weights, counted = self.records.weights, self.columns["optimizer_step"][:, self.owner]
        norms = self.columns.get("grad_norm", np.zeros(int(counted.max(initial=-1)) + 1))  # older files have none
        num_taken, entropy_coef = int((~np.isnan(norms)).sum()), self.config["loss.entropy_coef"]
        taken: list[dict[str, Floats]] = []
        self.compare("number of optimizer steps", counted.max(initial=-1) + 1, len(norms))
        for update, is_taken in enumerate((~np.isnan(norms)).tolist()):
            epochs = np.flatnonzero((counted == update).any(1))
            self.compare("passes of an optimizer step", len(epochs), 1, update=update)
            epoch, place = int(epochs[0]), {"update": update, "epoch": int(epochs[0])}
            at = np.flatnonzero((counted[epoch] == update) & is_seen)
            seen = {name: column[epoch][at] for name, column in self.columns.items() if column.shape == counted.shape}
            unit = self._units_of_loss(counted[epoch] == update, num_batch_tokens)[at]
            terms = self._terms(at, seen)
            if weights is not None:
                scores, entropy = weights.backward(at, unit * terms["slope"], unit * -entropy_coef)
                for name, values in (("logprob", scores), ("entropy", entropy)):
                    self.compare(name, seen[name], values, at, slack=weights.rounding, **place)
            recorded = {"correction": np.ones(len(at))} | seen
            for name in ("ratio", "correction", "clip"):
                self.compare(name, recorded[name], terms[name], at, **place)
            share = unit / max(num_taken, 1)
            self.compare("share", seen["share"], is_taken * share * terms["loss/total"], at, share, **place)
            fate = np.where(terms["correction"] > 0, _TRAINED, _LEFT_OUT) if is_taken else _SKIPPED
            fates[at] = np.minimum(fates[at], fate)
            if is_taken:
                taken.append(terms | {"unit": share})
            if is_taken and weights is not None:
                norm = weights.grad_norm()
                self.compare("grad_norm", norms[update], norm, slack=weights.rounding, **place)
                weights.step(rate=self.columns["learning_rate"][update], norm=norm)
        others = np.flatnonzero(~is_seen)
        for name, value in (("logprob", np.nan), ("entropy", np.nan), ("ratio", np.nan), ("clip", 0.0), ("share", 0.0)):
            for epoch, column in enumerate(self.columns[name]):
                self.compare(name, column[others], np.full(len(others), value), others, epoch=epoch)
        self.compare("fate", self.columns["fate"], fates, np.arange(len(fates)))
        if taken and self.records.metrics is not None:
            joined = {name: np.concatenate([each[name] for each in taken]) for name in taken[0]}
            self._check_metrics(self.records.metrics, joined, norms[~np.isnan(norms)])

    def _units_of_loss(self, is_member: Bools, num_batch_tokens: int) -> Floats:
        """Return [A] what one token weighs in the loss of an optimizer step on these tokens."""
        episodes, turns = (_Pools(self.records.units[name][is_member]) for name in ("trajectory", "turn"))
        num_episodes, num_turns, num_tokens = len(episodes.sizes), len(turns.sizes), len(episodes.of)
        divisors: dict[str, Any] = {
            "seq-mean-token-mean": num_episodes * episodes.sizes[episodes.of],
            "turn-mean-token-mean": num_turns * turns.sizes[turns.of],
            "token-mean": num_tokens,
            "dapo": num_batch_tokens,
            "seq-mean-token-sum": num_episodes,
            "seq-mean-token-sum-norm": num_episodes * (self.config.get("loss.norm_length") or 1),
        }
        same = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
        name, units = self.config["loss.aggregation"], np.zeros(len(is_member))
        units[is_member] = 1 / divisors[same.get(name, name)]
        return units

    def _terms(self, at: Indices, seen: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return what the tokens `at` add to the loss, times their denominators, and its slope in their logprobs."""
        config, now, gain = self.config, seen["logprob"], self.columns["advantage"][at]
        drift = now - self.columns["old_logprob"][at]
        log_s = _Pools(self.records.units[config["loss.unit"]][at]).mean(drift)
        s = np.exp(log_s.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
        w = self._correction(at, now, gain)
        low, high = 1 - config["loss.clip_low"], 1 + config["loss.clip_high"]
        dual = config.get("loss.dual_clip") or np.inf
        loses, gains = (w > 0) & (gain < 0), (w > 0) & (gain > 0)
        clip = np.select([loses & (s > dual), loses & (s < low), gains & (s > high)], [_DUAL, _LOW, _HIGH])
        is_near = np.abs(s[:, None] - np.array([low, high, dual])).min(1) < _EDGE
        clip = np.where(is_near, seen["clip"], clip)
        policy = -w * np.minimum(np.minimum(s, dual) * gain, s.clip(low, high) * gain)
        terms = {"ratio": s, "correction": w, "clip": clip, "drift": drift, "H": seen["entropy"]}
        terms |= {"loss/policy": policy, "slope": np.where(clip == 0, -w * s * gain, 0.0), "loss/kl": np.zeros(len(at))}
        if config["loss.kl_coef"] > 0:
            terms["to_reference"] = self.columns["ref_logprob"][at] - now
            kl, slope = self._kl(terms["to_reference"], s)
            terms["loss/kl"] = config["loss.kl_coef"] * kl
            terms["slope"] += config["loss.kl_coef"] * slope
        terms["loss/entropy"] = -config["loss.entropy_coef"] * seen["entropy"]
        return terms | {"loss/total": policy + terms["loss/kl"] + terms["loss/entropy"]}

    def _correction(self, at: Indices, now: Floats, gain: Floats) -> Floats:  # [len(at)] w of each token
        config, w = self.config, np.ones(len(at))
        if config["correction.level"] != "none":
            gap = self.columns["old_logprob"][at] - self.records.rollout_logprob[at]
            w = np.exp(_Pools(self.records.units[config["correction.level"]][at]).mean(gap))
            low, high = config["correction.low"], config["correction.high"]
            is_mask = config["correction.mode"] == "mask"
            w = np.where((w < low) | (w > high), 0.0, w) if is_mask else np.minimum(w, high)
        if (limit := config.get("correction.off_policy_threshold")) is not None:
            drift = _Pools(self.owner[at]).mean(self.records.rollout_logprob[at] - now)
            w = np.where((drift > limit) & (gain < 0), 0.0, w)
        return w

    def _kl(self, log_ratio: Floats, s: Floats) -> tuple[Floats, Floats]:  # the estimates and their slopes
        x, limit = log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO), self.config["loss.kl_clamp"]
        estimates = {"k1": (-x, np.ones(len(x))), "k2": (x * x / 2, -x), "k3": (np.expm1(x) - x, -np.expm1(x))}
        value, slope = estimates[self.config["loss.kl_estimator"]]
        value, slope = value.clip(-limit, limit), np.where((x != log_ratio) | (np.abs(value) > limit), 0.0, slope)
        return (s * value, s * (value + slope)) if self.config["loss.kl_importance_weighted"] else (value, slope)

    def _check_metrics(self, metrics: Mapping[str, float], taken: Mapping[str, Floats], norms: Floats) -> None:
        numbers = {name: (taken[name] * taken["unit"]).sum() for name in taken if name.startswith("loss/")}
        for name, side in (("low", _LOW), ("high", _HIGH), ("dual", _DUAL)):
            numbers[f"clip/{name}_fraction"] = (taken["clip"] == side).mean()
        numbers |= {"kl/old_k1": -taken["drift"].mean(), "policy/entropy": taken["H"].mean()}
        if "to_reference" in taken:
            x = taken["to_reference"].clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            numbers |= {"kl/ref_k1": -taken["to_reference"].mean(), "kl/ref_k3": (np.expm1(x) - x).mean()}
        if "grad_norm" in self.columns:
            numbers |= {"optim/grad_norm": norms.mean(), "optim/grad_norm_max": norms.max()}
            numbers["optim/learning_rate"] = self.columns["learning_rate"][-1]
        numbers |= {"batch/trained_tokens": len(taken["clip"]), "optim/num_steps": len(norms)}
        for name, number in numbers.items():
            size = np.abs(taken[name] * taken["unit"]).sum() if name in taken else 0.0  # terms of a loss may cancel
            self.compare(name, metrics.get(name, np.nan), number, unit=max(1.0, size))


class _Pools:
    """Tokens with equal keys: `of` is the pool of each token, `sizes` their numbers of tokens."""

    def __init__(self, keys: Indices) -> None:
        _, self.of, self.sizes = np.unique(keys, return_inverse=True, return_counts=True)

    def mean(self, values: Floats) -> Floats:
        return (np.bincount(self.of, values) / self.sizes)[self.of]


def _compared_by(episode: Trajectory, config: Mapping[str, Any]) -> tuple[Floats, Floats]:
    """Return an episode's return, or its return-to-go from each turn, and the sums of the rewards' sizes."""
    rewards = [turn.reward or 0.0 for turn in episode.turns]
    if config.get("training.step_rewards_mode") == "off" or config.get("training.step_rewards_enabled") is False:
        rewards = [0.0] * (len(rewards) - 1) + [sum(rewards)]
    if config["rewards.overlong"] == "penalize" and _is_overlong(episode):
        rewards[-1] -= config["rewards.overlong_penalty"]
    firsts = range(len(rewards)) if config["advantages.level"] == "turn" else [0]
    gamma, limit = config["advantages.discount"], config.get("rewards.clip") or np.inf
    sums = [sum(gamma**n * reward for n, reward in enumerate(rewards[k:])) for k in firsts]
    return np.array(sums).clip(-limit, limit), np.array([sum(map(abs, rewards[k:])) for k in firsts])


def _is_overlong(episode: Trajectory) -> bool:
    is_cut = bool(episode.turns) and episode.turns[-1].finish_reason is FinishReason.LENGTH
    return is_cut or episode.outcome in (Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW)


def _spread(values: Floats, sizes: Floats) -> Spread:
    """Return [K] means, whether values [n, K] differ by more than rounding, and the largest std of those that do."""
    size, mean = sizes.max(0), values.mean(0)
    rounding = np.maximum(1e-6 * np.maximum(1.0, size - np.abs(mean)), 2.0**-44 * size)
    varies = np.ptp(values, axis=0) > rounding
    return mean, varies, float(values[:, varies].std(0, ddof=1).max()) if varies.any() else 0.0


def _advantages(values: Floats, baseline: str, scale: str, spreads: Mapping[str, Spread]) -> Floats:
    mean, varies, _ = spreads["batch" if baseline == "batch" else "group"]
    if baseline == "leave_one_out":
        mean = (values.sum(0) - values) / max(len(values) - 1, 1)
    compared = values if baseline == "none" else np.where(varies, values - mean, 0.0)
    divisor = 1.0 if scale == "none" else spreads[scale][2]
    return compared / divisor if divisor > 0 else np.zeros_like(compared)
