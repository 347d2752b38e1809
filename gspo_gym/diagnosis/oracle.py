"""A second path to the numbers of a training step: all that `gspo-gym verify` computes, and nothing of the learner's.

In float64, with gradients by hand. For a sampled token with logprob p, old logprob o and advantage A:

    advantage  A = (R - mean R) / std R over the group              GSPO (arXiv 2507.18071) eq. 6, GRPO's eq. 3 there
    ratio      log s = mean over the unit of p - o                  eq. 7 and 14; unit "token": eq. 3
    loss       sum of a (-w min(s A, clip(s) A) + kl_coef KL - entropy_coef H)                          eq. 5 and 13
    gradient   d loss / d p = a (-w s A [no clip binds] + kl_coef dKL / dp)                            eq. 10 and 17
    KL         x = reference - p: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x          joschu.net/blog/kl-approx.html
    dual clip  for A < 0, s counts as at most dual_clip                                           arXiv 1912.09729
    surrogate  what stands in the place of min(s A, clip(s) A), and its slope in p                       SURROGATES
    teacher    what a divergence from it adds                                                    oracle_teacher.py

a is 1 over the aggregation's denominator, w the correction's weight. Rules of no paper are in configs/README.md.
The weights move by AdamW (arXiv 1711.05101, algorithm 2). `cli/verify.py` reads the files and compares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gspo_gym.diagnosis.oracle_forks import forked
from gspo_gym.diagnosis.oracle_teacher import divergence_of, taught
from gspo_gym.types import FinishReason, Outcome, Trajectory

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]
Spread = tuple[Floats, Bools, float]
Run = tuple[Spread, Floats]  # of all returns, and the moving means of roles before the step

TRAINED, LEFT_OUT, SKIPPED, NO_GRADIENT, OVERLONG, FILTERED, CONSTANT, UNCOMMITTED = range(8)  # fates
_LOW, _HIGH, _DUAL = 1, 2, 3  # bounds of the clip
_EDGE = 1e-6  # a ratio so near a bound may lie on either side of it
_MAX_LOG_RATIO = 20.0
_SHAPING = ("advantages.whiten", "advantages.kl_shaping_coef", "rewards.kl_coef")  # under which 0 may get an advantage


@dataclass(frozen=True, slots=True, eq=False)
class StepRecords:
    """What a run recorded of a step with A sampled tokens and N episodes.

    Attributes:
        config: by "section.key" (Any: TOML). columns: float64, see `run/tokens.py`; [A] those by trajectory, too.
        units: by "trajectory", "segment", "turn" and "token", [A] numbers of the tokens' units.
        turn: [A], of the episodes.
    """

    config: Mapping[str, Any]
    episodes: Sequence[Trajectory]
    columns: Mapping[str, Floats]
    units: Mapping[str, Indices]
    turn: Indices


class State(NamedTuple):
    """What a step inherits: of all returns the number, mean, sum of squared deviations and largest size; beta of KL;
    by environment the moving mean of RAE (arXiv 2506.24119), here b <- 0.95 b + 0.05 R after its use."""

    number: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    size: float = 0.0
    kl_coef: float = 0.0
    roles: tuple[tuple[str, float], ...] = ()


class Batch(NamedTuple):
    """[A] advantages, [N] fates without a pass over the episodes, [N] which count and are trained on, `State` after."""

    advantages: Floats
    fates: Indices
    is_counted: Bools
    is_trained: Bools
    state: State


def batch_of(records: StepRecords, state: State) -> Batch:
    """Return the advantages from the rewards and the state before the step."""
    config, owner, num_episodes = records.config, records.units["trajectory"], len(records.episodes)
    num_turns = np.array([len(episode.turns) for episode in records.episodes])
    values, sizes = _returns(records, num_turns)
    # Whether a token's weights were committed is known to the run alone.
    is_uncommitted = np.bincount(owner, records.columns["fate"] == UNCOMMITTED, minlength=num_episodes) > 0
    fates = np.where(is_uncommitted, UNCOMMITTED, FILTERED)
    groups: dict[str, list[int]] = {}
    for i in np.flatnonzero(num_turns).tolist():
        groups.setdefault(records.episodes[i].trajectory_id.rpartition("/")[0], []).append(i)
    kept_groups = []
    for members in groups.values():
        if config["training.constant_groups"] != "keep" and not _spread(values[members], sizes[members])[1].any():
            fates[members] = CONSTANT
        elif committed_members := [i for i in members if not is_uncommitted[i]]:
            kept_groups.append(committed_members)
    together = [i for members in kept_groups for i in members]
    is_turn = np.arange(values.shape[1]) < num_turns[:, None]
    counted = values[:, :1] if config["advantages.level"] == "auto" else values
    counted = counted[together][is_turn[together, : counted.shape[1]]]
    roles, means = [episode.task.env_id for episode in records.episodes], dict(state.roles)
    before = np.array([[means.get(role, 0.0)] for role in roles])
    for i in together if config["advantages.baseline"] == "role" else ():
        means[roles[i]] = 0.95 * means.get(roles[i], 0.0) + 0.05 * float(values[i, : num_turns[i]].mean())
    state, running = _with_returns(state._replace(roles=tuple(means.items())), counted, sizes[together, :1])
    if config["advantages.level"] == "auto":
        table = _quieter_level(config, values, sizes, kept_groups, is_turn)
    else:
        table = _table(config, values, sizes, kept_groups, (running, before))
    table[~is_turn] = 0.0
    if any(episode.forked_from for episode in records.episodes):
        table = forked(records.episodes, values[:, 0], table, kept_groups)
    advantages = table[owner, records.turn if table.shape[1] > 1 else 0]
    eps = config.get("advantages.filter_eps")
    is_kept = np.isin(np.arange(num_episodes), together) & (np.bincount(owner, minlength=num_episodes) > 0)
    is_kept &= np.abs(table).max(1) > (-1 if eps is None else eps)
    is_masked = _are_overlong(records) & (config["rewards.overlong"] == "mask")
    fates = np.where(is_kept, np.where(is_masked, OVERLONG, NO_GRADIENT), fates)
    shaped, state = _shape_advantages(records, advantages, np.flatnonzero((fates == NO_GRADIENT)[owner]), state)
    has_slope = np.bincount(owner, shaped.astype(np.float32) != 0, minlength=num_episodes) > 0
    has_slope &= config.get("distillation.reward", True)
    teacher = config.get("distillation.teacher")
    has_slope |= config["loss.kl_coef"] > 0 or config["loss.entropy_coef"] > 0 or teacher not in (None, "self")
    # Then it is seen if another of its minibatch has one.
    if teacher == "self" or any(config[key] not in (0, "none") for key in _SHAPING):
        has_slope |= records.columns["optimizer_step"].max(0) >= 0
    is_trained = (fates == NO_GRADIENT) & has_slope
    return Batch(np.where(is_trained[owner], shaped, advantages), fates, is_kept, is_trained, state)


def _shape_advantages(records: StepRecords, values: Floats, at: Indices, state: State) -> tuple[Floats, State]:
    """Return the advantages with KL to the reference, whitening and clip for the tokens `at`, and the next beta."""
    config, every, values = records.config, values, values[at]
    pool, sizes = _pools(records.units["trajectory"][at])
    beta, target = state.kl_coef, config.get("rewards.kl_target")
    if (config["rewards.kl_coef"] > 0 or config["advantages.kl_shaping_coef"] > 0) and len(at):
        kl = records.columns["old_logprob"][at] - records.columns["ref_logprob"][at]
        means, sums = np.bincount(pool, kl) / sizes, kl.cumsum()
        to_go = sums[sizes.cumsum() - 1][pool] - sums + kl
        values = values - beta * to_go + config["advantages.kl_shaping_coef"] * (means[pool] - kl)
        if target is not None:  # arXiv 1909.08593, section 2.2
            surplus = min(max(means.mean() / target - 1, -0.2), 0.2)
            state = state._replace(kl_coef=beta * (1 + surplus * min(len(sizes) / 10_000, 1.0)))
    whiten = config["advantages.whiten"]
    if whiten != "none" and len(values) > (whiten == "tokens"):
        weights = np.full(len(at), 1 / len(at)) if whiten == "tokens" else 1 / (len(sizes) * sizes[pool])
        residuals = values - weights @ values
        variance = weights @ residuals**2
        scale = np.sqrt(variance * len(at) / (len(at) - 1) + 1e-8) if whiten == "tokens" else np.sqrt(variance) + 1e-8
        values = residuals / scale if np.ptp(values) > 1e-6 * np.abs(values).max() else 0 * values
    limit = config.get("advantages.clip") or np.inf
    shaped_values = every.copy()
    shaped_values[at] = values.clip(-limit, limit)
    return shaped_values, state


def _scores_truncated(config: Mapping[str, Any]) -> bool:
    neutral = {"rollout.top_p": 1, "rollout.top_k": 0, "rollout.min_p": 0}
    is_cut = any(config.get(key, value) != value for key, value in neutral.items())
    return is_cut and "truncated_sampling" not in config.get("algorithm.acknowledge", ())


def _rewards(config: Mapping[str, Any], episode: Trajectory) -> list[float]:  # of its turns
    rewards = [turn.reward or 0.0 for turn in episode.turns]
    mode, at_end = config.get("training.step_rewards_mode"), [*[0.0] * (len(rewards) - 1), sum(rewards)]
    if mode == "off":
        return at_end
    if mode != "decision_stepwise" or config.get("judge.enabled"):  # a judge's blend contains them
        return rewards
    if not episode.reports_events:
        return at_end
    names = ("indicator_lambda", "beta", "strategy")
    factor, bonus, strategy = (config.get(f"training.step_rewards_{name}") or 0.0 for name in names)
    event_counts: Counter[str] = Counter()
    step_rewards = []
    for t, turn in enumerate(episode.turns):
        events, is_new = set(turn.events), any(not event_counts[name] for name in turn.events)
        counted = [e for e in events if not event_counts[e] or config.get("training.event_rewards_kind") == "absolute"]
        if strategy == "per_achievement":
            limits = {name: config.get(f"training.step_rewards_k_limits.{name}", 1) for name in events}
            credited_events = [name for name in events if limits[name] <= 0 or event_counts[name] < limits[name]]
            base = sum(config.get(f"training.step_rewards_weights.{name}", 1.0) for name in credited_events)
        else:
            base = bool(counted) if strategy == "consistent" else len(counted) + factor * is_new
        step_rewards.append((factor or 1.0 if strategy else 1.0) * base + bonus * (len(rewards) - t) * is_new)
        event_counts.update(events)
    if episode.outcome is Outcome.ACTION_LIMIT:
        step_rewards[-1] = min(0.0, sum(rewards)) - sum(step_rewards[:-1])
    return step_rewards


def _returns(records: StepRecords, num_turns: Indices) -> tuple[Floats, Floats]:
    """Return [N, K] returns-to-go of K turns, or returns (K is 1), and the sums of the sizes of their rewards."""
    config, rewards = records.config, np.zeros((len(num_turns), num_turns.max(initial=1)))
    for i in np.flatnonzero(num_turns).tolist():
        rewards[i, : num_turns[i]] = _rewards(config, records.episodes[i])
    if not isinstance(penalty := config["rewards.overlong"], str):
        rewards[np.arange(len(num_turns)), num_turns - 1] -= penalty * _are_overlong(records)
    values, sizes = rewards, np.abs(rewards)
    for k in reversed(range(rewards.shape[1] - 1)):  # of turn k, what it and those after it earn
        values[:, k] += config["advantages.discount"] * values[:, k + 1]
        sizes[:, k] += sizes[:, k + 1]
    if config["advantages.level"] == "trajectory":
        values, sizes = values[:, :1], sizes[:, :1]
    limit = config.get("rewards.clip") or np.inf
    return values.clip(-limit, limit), sizes


def _with_returns(state: State, values: Floats, sizes: Floats) -> tuple[State, Spread]:
    """Return the state with these returns, and the spread of all."""
    count = state.number + len(values)
    mean = (state.number * state.mean + values.sum()) / max(count, 1)
    squares = state.squares + state.number * (state.mean - mean) ** 2 + ((values - mean) ** 2).sum()
    size = float(sizes.max(initial=state.size))
    std = float(np.sqrt(squares / max(count - 1, 1)))
    varies = np.array([std > _rounding(np.array(size), np.array(mean))])
    return State(count, float(mean), float(squares), size, *state[4:]), (np.array([mean]), varies, std * varies[0])


def _are_overlong(records: StepRecords) -> Bools:  # [N]
    too_long = {Outcome.MAX_TURNS, Outcome.CONTEXT_OVERFLOW, FinishReason.LENGTH}
    ends = [{episode.outcome, *[turn.finish_reason for turn in episode.turns[-1:]]} for episode in records.episodes]
    return np.array([not too_long.isdisjoint(end) for end in ends], dtype=np.bool_)


def _spread(values: Floats, sizes: Floats) -> Spread:  # of [n, K]
    mean = values.mean(0)
    varies = np.ptp(values, axis=0) > _rounding(sizes.max(0), mean)
    return mean, varies, float(values[:, varies].std(0, ddof=1).max()) if varies.any() else 0.0


def _rounding(size: Floats, mean: Floats) -> Floats:
    return np.maximum(1e-6 * np.maximum(1.0, size - np.abs(mean)), 2.0**-44 * size)


def _table(
    config: Mapping[str, Any], values: Floats, sizes: Floats, groups: Sequence[Sequence[int]], run: Run | None = None
) -> Floats:
    """Return the advantages of values [N, K]; 0 for episodes of no group. `run` has the means of roles as [N, 1]."""
    table, together = np.zeros_like(values), [i for members in groups for i in members]
    for members in groups:
        parts = {"group": _spread(values[members], sizes[members]), "batch": _spread(values[together], sizes[together])}
        parts |= {"running": run[0], "role": (run[1][members], np.array([True]), 0.0)} if run else {}
        table[members] = _advantages(config, values[members], parts)
    return table


def _quieter_level(
    config: Mapping[str, Any], values: Floats, sizes: Floats, groups: Sequence[Sequence[int]], is_turn: Bools
) -> Floats:
    """Return the advantages of each group by returns, or by returns-to-go where those of other groups are smaller."""
    by_level: list[Floats] = []
    energies: list[list[float]] = []
    for end in (1, values.shape[1]):
        scaled, raw = (
            np.broadcast_to(
                _table({**config, "advantages.scale": scale}, values[:, :end], sizes[:, :end], groups), values.shape
            )
            for scale in (config["advantages.scale"], "none")
        )
        by_level.append(scaled)
        energies.append([(raw[members] ** 2 * is_turn[members]).sum() for members in groups])
    table, total = np.zeros_like(values), np.sum(energies, axis=1)
    for members, own in zip(groups, np.transpose(energies), strict=True):
        whole, turn = total - own
        table[members] = by_level[int(turn < (1 - 1e-6) * whole)][members]
    return table


def _advantages(config: Mapping[str, Any], values: Floats, parts: Mapping[str, Spread]) -> Floats:
    baseline, scale = config["advantages.baseline"], config["advantages.scale"]
    mean, varies, _ = parts[baseline if baseline in parts else "group"]
    if baseline == "leave_one_out":
        mean = (values.sum(0) - values) / max(len(values) - 1, 1)
    numerators = values if baseline == "none" else np.where(varies, values - mean, 0.0)
    divisor = {"none": 1.0, "mean": float(parts["group"][0][0])}.get(scale) or parts.get(scale, parts["group"])[2]
    return numerators / divisor if divisor > 0 else np.zeros_like(numerators)


def _pools(keys: Indices) -> tuple[Indices, Indices]:
    """Return the number of each token's pool, which are the tokens with an equal key, and the sizes of the pools."""
    _, pool, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    return pool, sizes


def _mean(keys: Indices, values: Floats) -> Floats:
    pool, sizes = _pools(keys)
    return (np.bincount(pool, values) / sizes)[pool]


def units_of_loss(records: StepRecords, is_member: Bools, num_batch_tokens: int) -> Floats:
    """Return [A] a, what one token weighs in the loss of an optimizer step on the tokens `is_member`."""
    episode, lengths = _pools(records.units["trajectory"][is_member])
    turn, turn_lengths = _pools(records.units["turn"][is_member])
    divisors: dict[str, Any] = {
        "seq-mean-token-mean": len(lengths) * lengths[episode],
        "turn-mean-token-mean": len(turn_lengths) * turn_lengths[turn],
        "token-mean": len(episode),
        "dapo": num_batch_tokens,
        "seq-mean-token-sum": len(lengths),
        "seq-mean-token-sum-norm": len(lengths) * (records.config.get("loss.norm_length") or 1),
    }
    same = {"grpo": "seq-mean-token-mean", "bnpo": "token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    name, units = records.config["loss.aggregation"], np.zeros(len(is_member))
    units[is_member] = 1 / divisors[same.get(name, name)]
    return units


class Ratios(NamedTuple):
    """[A] s, advantages, the tokens' own p - o, units, and where no bound binds; 1 - low, 1 + high, dual; taus."""

    s: Floats
    gain: Floats
    drift: Floats
    unit: Indices
    is_free: Bools
    ends: tuple[float, float, float]
    taus: tuple[float, float]


def _clip(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 1707.06347, eq. 7
    low, high, dual = r.ends
    value = np.where(r.gain < 0, r.s.clip(low, dual), r.s.clip(None, high)) * r.gain
    return value, r.is_free * r.s * r.gain


def _cispo(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 2506.13585
    weighted = np.minimum(r.s, r.ends[1]) * r.gain
    return weighted, weighted


def _sapo(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 2511.20347
    tau = np.where(r.gain > 0, *r.taus)
    gate = 1 / (1 + np.exp(-tau * (r.s - 1)))
    return 4 / tau * gate * r.gain, 4 * gate * (1 - gate) * r.s * r.gain


def _gmpo(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 2507.20673
    low, high = np.log(r.ends[0]), np.log(r.ends[1])
    cut = np.where(r.gain > 0, np.minimum(r.drift, high), np.maximum(r.drift, low))
    value = np.exp(_mean(r.unit, cut).clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)) * r.gain
    return value, r.is_free * value


def _dppo(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 2602.04879
    weighted = r.is_free * np.minimum(r.s, 20.0) * r.gain
    return weighted, weighted


def _vespo(r: Ratios) -> tuple[Floats, Floats]:  # arXiv 2602.10693
    pool, sizes = _pools(r.unit)
    w = np.exp((_mean(r.unit, r.drift) * sizes[pool]).clip(np.log(1e-8), 20.0))
    weighted = np.where(r.gain < 0, w**3 * np.exp(2 - 2 * w), w**2 * np.exp(3 - 3 * w)) * r.gain
    return weighted, weighted


# By loss.surrogate: the value that is maximised, and its slope in p.
SURROGATES: Mapping[str, Callable[[Ratios], tuple[Floats, Floats]]] = {
    surrogate.__name__[1:]: surrogate for surrogate in (_clip, _cispo, _sapo, _gmpo, _dppo, _vespo)
}


def terms_of(
    records: StepRecords, at: Indices, seen: Mapping[str, Floats], unit: Floats, num_steps: int, num_tokens: int
) -> dict[str, Floats]:
    """Return the terms of the loss of the tokens `at`, without `unit`, what each weighs in it; with it, its slopes.

    `seen` are the recorded columns of this pass over them, `num_steps` the optimizer steps whose mean the metrics are,
    `num_tokens` those of this optimizer step, with a teacher that reads feedback the taught ones, at least 1.
    """
    config, now, gain = records.config, seen["logprob"], records.columns["advantage"][at]
    drift = now - records.columns["old_logprob"][at]
    units = records.units[config["loss.unit"]][at]
    log_s = _mean(units, drift)
    s = np.exp(log_s.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    w = _correction(records, at, now, gain)
    gain = gain * config.get("distillation.reward", True)
    low, high = 1 - config["loss.clip_low"], 1 + config["loss.clip_high"]
    dual = config.get("loss.dual_clip") or np.inf
    loses, gains = (w > 0) & (gain < 0), (w > 0) & (gain > 0)
    # Bounds of others take no slope.
    places = {"clip": s, "gmpo": np.exp(drift), "dppo": 1 + np.exp(now) - np.exp(now - drift)}
    place = places.get(config["loss.surrogate"], np.ones(len(at)))
    clip = np.select([loses & (place > dual), loses & (place < low), gains & (place > high)], [_DUAL, _LOW, _HIGH])
    is_near = np.abs(place[:, None] - np.array([low, high, dual])).min(1) < _EDGE
    clip = np.where(is_near, seen["clip"], clip)
    terms = {"ratio": s, "correction": w, "clip": clip, "drift": drift, "H": seen["entropy"]}
    terms["fate"] = np.where(w > 0, TRAINED, LEFT_OUT)
    taus = tuple(config.get("loss.sapo_temperatures", (1.0, 1.05)))
    ratios = Ratios(s, gain, drift, units, clip == 0, (low, high, dual), taus)
    value, slope = SURROGATES[config["loss.surrogate"]](ratios)
    terms["loss/policy"], terms["slope"] = -w * value, -w * slope
    terms["loss/kl"] = np.zeros(len(at))
    if config["loss.kl_coef"] > 0:
        terms["to_reference"] = records.columns["ref_logprob"][at] - now
        kl, slope = _kl(config, terms["to_reference"], s)
        terms["loss/kl"] = config["loss.kl_coef"] * kl
        terms["slope"] += config["loss.kl_coef"] * slope
    terms["loss/entropy"] = -config["loss.entropy_coef"] * seen["entropy"]
    slopes = [terms["slope"], np.full(len(at), -config["loss.entropy_coef"])]
    if "distillation.teacher" in config:
        taught_terms, pull = taught(config, records.columns, at, seen, w / num_tokens / unit, s)
        terms, slopes = terms | taught_terms, [slopes[0] + pull[0], slopes[1], *pull[1:]]
    terms["loss/total"] = np.sum([term for name, term in terms.items() if name.startswith("loss/")], axis=0)
    terms["slopes"] = unit * np.stack(slopes)
    return terms | {"unit": unit / num_steps, "share": unit / num_steps * terms["loss/total"]}


def _correction(records: StepRecords, at: Indices, now: Floats, gain: Floats) -> Floats:  # w of the tokens `at`
    config, w, engine = records.config, np.ones(len(at)), records.columns["rollout_logprob"][at]
    if config["correction.level"] != "none":
        gap = records.columns["old_logprob"][at] - engine
        w = np.exp(_mean(records.units[config["correction.level"]][at], gap))
        low, high = config["correction.low"], config["correction.high"]
        is_mask = config["correction.mode"] == "mask"
        w = np.where((w < low) | (w > high), 0.0, w) if is_mask else np.minimum(w, high)
    if (limit := config.get("correction.off_policy_threshold")) is not None:
        drift = _mean(records.units["trajectory"][at], engine - now)
        w = np.where((drift > limit) & (gain < 0), 0.0, w)
    return w


def _kl(config: Mapping[str, Any], log_ratio: Floats, s: Floats) -> tuple[Floats, Floats]:  # and its slope in p
    x, limit = log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO), config["loss.kl_clamp"]
    estimates = {"k1": (-x, np.ones(len(x))), "k2": (x * x / 2, -x), "k3": (np.expm1(x) - x, -np.expm1(x))}
    value, slope = estimates[config["loss.kl_estimator"]]
    value, slope = value.clip(-limit, limit), np.where((x != log_ratio) | (np.abs(value) > limit), 0.0, slope)
    return (s * value, s * (value + slope)) if config["loss.kl_importance_weighted"] else (value, slope)


def metrics_of(records: StepRecords, taken: Mapping[str, Floats], norms: Floats) -> dict[str, tuple[float, float]]:
    """Return metrics of the step by name, and up to which size a difference counts by that size.

    `taken` are the `terms_of` and units of all optimizer steps, `norms` their gradient norms.
    """
    # Terms of a loss may cancel: their float32 sum is as exact as the sum of their sizes.
    parts = {name: taken[name] * taken["unit"] for name in taken if name.startswith("loss/")}
    metrics = {name: (part.sum(), max(1.0, np.abs(part).sum())) for name, part in parts.items()}
    sides = {"low": _LOW, "high": _HIGH, "dual": _DUAL}
    numbers = {f"clip/{name}_fraction": (taken["clip"] == side).mean() for name, side in sides.items()}
    numbers |= {"kl/old_k1": -taken["drift"].mean(), "policy/entropy": taken["H"].mean()}
    if "to_reference" in taken:
        x = taken["to_reference"].clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        numbers |= {"kl/ref_k1": -taken["to_reference"].mean(), "kl/ref_k3": (np.expm1(x) - x).mean()}
    numbers |= {name: np.nanmean(v) for name, v in taken.items() if name[:5] == "disti" and np.isfinite(v).any()}
    if "grad_norm" in records.columns:
        numbers |= {"optim/grad_norm": norms.mean(), "optim/grad_norm_max": norms.max()}
        numbers["optim/learning_rate"] = records.columns["learning_rate"][-1]
    numbers |= {"batch/trained_tokens": len(taken["clip"]), "optim/num_steps": len(norms)}
    return metrics | {name: (number, 1.0) for name, number in numbers.items()}


class Model:
    """A checkpoint in one precision, moved by `step`.

    Attributes:
        modules: of torch (Any: untyped): "policy" and, where the loss and the checkpoint have one, "reference".
        segments, row, position: all segments; of each sampled token, which one it is in, and where.

    Args:
        num_ids: of the tokenizer: ids from there on, of a padded vocabulary, are likely only where one was sampled.
    """

    def __init__(self, modules: Mapping[str, Any], moments: dict[str, Any], records: StepRecords, num_ids: int) -> None:
        # The moments are AdamW's, by "optimizer.exp_avg.NAME", ...
        self.modules, self._moments, self._num_ids = modules, moments, num_ids
        self._config, self.row = records.config, records.units["segment"]
        self.segments = [segment for episode in records.episodes for segment in episode.segments]
        self.position = np.concatenate([np.flatnonzero(segment.action_mask) for segment in self.segments])

    def forward(self, module: str, at: Indices, slopes: Floats | None = None, *, against: str = "") -> Floats:
        """Return [2, len(at)] logprobs and entropies, row by row; add up gradients by `slopes` of the loss in both.

        With a third row of slopes, divergences from the teacher, too. With another module `against`, instead
        log(other / module) and KL(module || other), at temperature 1.
        """
        import torch  # here: `verify --help` needs none

        scores = np.zeros((2 if slopes is None else len(slopes), len(at)))
        for row in np.unique(self.row[at]):
            here = np.flatnonzero(self.row[at] == row)
            position = torch.from_numpy(self.position[at[here]])
            ids = torch.from_numpy(self.segments[row].token_ids[: int(position.max()) + 1].astype(np.int64))
            with torch.set_grad_enabled(slopes is not None):
                own = self.log_softmax(module, ids, position, is_plain=against != "")
                every = self.log_softmax(against, ids, position, is_plain=True) - own if against else own
                mean = -(own.exp() * every.masked_fill(own.isneginf(), 0.0)).sum(-1)
                parts = [every.gather(-1, ids[position, None])[:, 0], mean]
                if len(scores) > 2:
                    pair = [self.log_softmax(name, ids, position, is_plain=True) for name in (module, "teacher")]
                    parts.append(divergence_of(self._config, pair[0], pair[1].detach()))
                if slopes is not None:
                    torch.autograd.backward(parts, [torch.from_numpy(slope[here]).to(own) for slope in slopes])
            scores[:, here] = torch.stack(parts).detach().numpy()
        return scores

    def log_softmax(self, module: str, ids: Any, position: Any, *, is_plain: bool) -> Any:
        """Return [n, V] logprobs at the positions; `is_plain`: at temperature 1 and not truncated."""
        raw = self.modules[module](input_ids=ids[None, :-1], use_cache=False).logits[0, position - 1]
        logits = (raw.double() if raw.itemsize == 8 else raw.float()) / (
            1 if is_plain else self._config["rollout.temperature"]
        )
        is_beyond = (ids.new_tensor(range(logits.shape[-1])) >= self._num_ids).expand_as(logits)
        logits = logits.masked_fill(is_beyond.scatter(-1, ids[position, None], value=False), -float("inf"))
        if _scores_truncated(self._config) and not is_plain:
            logits = logits.masked_fill(~self._kept_tokens(logits.detach(), ids[position, None]), -float("inf"))
        return logits.log_softmax(-1)

    def _kept_tokens(self, logits: Any, ids: Any) -> Any:
        # [n, V] bool: what min_p, top_k and top_p leave, and `ids` [n, 1]
        config, order = self._config, logits.argsort(dim=-1, descending=True, stable=True)
        sorted_logprobs = logits.gather(-1, order).log_softmax(-1)
        mask = sorted_logprobs.exp() >= config["rollout.min_p"] * sorted_logprobs[:, :1].exp()
        if config["rollout.top_k"] > 0:
            mask[:, config["rollout.top_k"] :] = False
        if config["rollout.top_p"] < 1:
            mass = sorted_logprobs.masked_fill(~mask, -float("inf")).softmax(-1)
            mask &= mass.cumsum(-1) - mass < config["rollout.top_p"]
        return mask.new_zeros(mask.shape).scatter(-1, order, mask).scatter(-1, ids, value=True)

    def grad_norm(self) -> float:
        """Return the L2 norm of all gradients."""
        gradients = [p.grad for p in self.modules["policy"].parameters() if p.grad is not None]
        return float(sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5)

    def step(self, rate: float, *, is_taken: bool) -> None:
        """Take a step of AdamW on the gradients, cut to optimizer.max_grad_norm, or none; and forget them."""
        (beta1, beta2), decay = self._config["optimizer.betas"], self._config["optimizer.weight_decay"]
        scale = min(1.0, self._config["optimizer.max_grad_norm"] / (self.grad_norm() + 1e-6))
        for name, parameter in self.modules["policy"].named_parameters():
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad * scale, None
            if not is_taken:
                continue
            keys = [f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq", "step")]
            mean, square, count = (self._moments.get(key, 0 * gradient) for key in keys)
            mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
            self._moments |= zip(keys, (mean, square, count := count.max() + 1), strict=True)
            if parameter.dim() >= 2:  # not norms, not biases
                parameter.data -= rate * decay * parameter.data
            root = (square / (1 - beta2**count)).sqrt() + self._config["optimizer.eps"]
            parameter.data -= rate * mean / (1 - beta1**count) / root
