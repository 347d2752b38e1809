"""Findings in a page's data: whether the numbers of a step's episodes and tokens can belong together.

The other findings say how a run went; these look at what was recorded of single tokens, and find bugs in what made
them: each number follows from others on the page, by the learner's own functions. `page_findings` reads nothing but the
page's data. `gspo-gym verify` is sharper and independent: it computes the model again, without code of the learner.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from pydantic import ValidationError

from gspo_gym.diagnosis.alarms import MAX_GAP_FLOAT32, differ_on_purpose, disagreement
from gspo_gym.diagnosis.view import Array, Finding, Json, StepView
from gspo_gym.learning.advantages import batch_advantages
from gspo_gym.learning.credit import returns_of
from gspo_gym.learning.losses import Denominators, TeacherScores, policy_loss
from gspo_gym.learning.settings import AdvantageSettings, DistillationSettings, LossSettings, RewardSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.learning.tokens import Clip, Fate
from gspo_gym.types import FinishReason, Outcome, Sampling, Segment, Task, Trajectory, Turn

# Of a single token in 16 bits, in nats; old logprobs are computed as the present ones are, and differ by less.
_MAX_GAP_16_BITS, _MAX_OLD_GAP_16_BITS = 0.1, 0.02
# Nats: a logprob nearer to 0 fits to any computation. Fewer tokens, turns or pairs show nothing.
_INFORMATIVE, _MIN_COUNT = 0.05, 8
# Of the variance of gaps after the same text, by one temperature; the least that a temperature is off.
_EXPLAINED, _MIN_SLOPE = 0.9, 1e-3
# Of the turns that fit: an engine that computes otherwise does so everywhere.
_FITTING_TURNS = 0.25
# Nats: two episodes agree by chance with exp(-20) = 2e-9.
_IMPOSSIBLE = -20.0
# Of a ratio. Of a share of the loss, and of the largest one: float32 in another order.
_RATIO, _RELATIVE, _ABSOLUTE = 1e-5, 3e-5, 2e-6
# Nats: a ratio so near to a bound is at it.
_AT_A_BOUND = 3e-6

_VERIFY = "no setting does this: `gspo-gym verify` says where the numbers part from a second computation"
# Problem, key and suggestion of each finding; no key: no setting is at fault.
_TEXTS: Mapping[str, tuple[str, str, str]] = {
    "episodes_are_duplicated": (
        "An episode is there twice: what it did counts double, and its group is smaller than it seems.",
        "",
        "find what gives one episode two names, or samples two with one seed",
    ),
    "failed_episode_counts": (
        "An episode that failed is compared with its siblings and trained on, as if the policy had earned its return.",
        "",
        "a failure is played again or dropped: find what gives it an outcome and a reward",
    ),
    "mask_is_shifted": ("The mask of sampled tokens is not where the policy's tokens are.", "", _VERIFY),
    "weights_are_stale": (
        "Tokens were sampled under older weights than those that they count as.",
        "training.max_staleness",
        "find the update that never reached the engine, or the keys and values that it kept over one",
    ),
    "tokens_are_not_the_sampled_ones": (
        "Some turns hold other tokens than were sampled, as where a text was encoded again.",
        "",
        "keep the ids that the engine sampled: text may encode to others, and does not show all of them",
    ),
    "temperatures_differ": (
        "Engine and learner compute logprobs at different temperatures.",
        "rollout.temperature",
        "look for a temperature that the engine or the learner applies by itself",
    ),
    "precisions_differ": (
        "The engine computes logprobs in another precision than the learner, or with other kernels.",
        "vllm.dtype",
        'give both one dtype, or correct for it with correction.level = "token"',
    ),
    "old_logprobs_are_others": (
        "The old logprobs are not the old policy's, so that ratios begin elsewhere than at 1.",
        "correction.old_logprobs",
        'with "recompute" the learner has to score the batch itself before the update, and nothing else may',
    ),
    "judgement_is_anothers": (
        "The judge's score in an episode's reward is not the score of that episode.",
        "judge.reward_blend",
        "find where judgements and episodes are brought together: by their ids, and not by their order",
    ),
    "rewards_come_late": (
        "Rewards are credited one turn after the action that earned them.",
        "",
        "an environment's answer belongs to the action that it answers",
    ),
    "advantage_is_a_siblings": ("Episodes have the advantage of another of their group.", "", _VERIFY),
    "advantages_are_others": ("Advantages do not follow from the rewards.", "advantages.baseline", _VERIFY),
    "clip_sides_are_swapped": ("The two sides of the clip are swapped.", "loss.clip_low", _VERIFY),
    "denominators_are_others": (
        "The shares of the loss are divided by something else than loss.aggregation says.",
        "loss.aggregation",
        "look for a count of rows, turns or tokens, or of a micro-batch, where the optimizer step's is meant",
    ),
    "terms_are_others": (
        "Ratios, clips or shares of the loss do not follow from logprobs, advantages and [loss].",
        "",
        _VERIFY,
    ),
}
_Clue = tuple[str, str]  # the name in `_TEXTS` and the evidence


def page_findings(run: Mapping[str, Json], steps: Sequence[Mapping[str, Json]]) -> list[Finding]:
    """Return what contradicts itself in a page's data: the cause first, and each problem where it begins.

    Args:
        run: `page_data.run_values`.
        steps: `page_data.step_values`, of training steps and of others.
    """
    readable = [] if unknown_settings(run) else steps
    views = sorted((StepView(run, step) for step in readable), key=lambda view: view.step)
    findings: dict[str, Finding] = {}
    with np.errstate(all="ignore"):  # a damaged number is named, not warned of
        for check in CHECKS:
            clue = next((clue for view in views if (clue := check(view)) is not None), None)
            if clue is not None:
                name, evidence = clue
                problem, key, suggestion = _TEXTS[name]
                findings.setdefault(name, Finding("serious", problem, evidence, key, suggestion, name))
    return list(findings.values())


def unknown_settings(run: Mapping[str, Json]) -> list[str]:
    """Return the keys of a run of another version that its numbers follow from, and that are unknown here."""
    unknown: list[str] = []
    sections = {"loss": LossSettings, "advantages": AdvantageSettings, "rewards": RewardSettings}
    for name, settings in (sections | {"distillation": DistillationSettings}).items():
        try:
            if (values := run["rules"].get(name)) is not None:
                settings(**values)
        except ValidationError as error:
            unknown += [".".join(map(str, (name, *problem["loc"]))) for problem in error.errors()]
    return unknown


def episodes_are_duplicated(view: StepView) -> _Clue | None:
    """Find two episodes with the same sampled tokens and logprobs that chance does not make alike."""
    logprobs = view.column("rollout_logprob")
    first_with: dict[Json, int] = {}
    for number, episode in enumerate(view.episodes if view.is_training else ()):
        ids = tuple(tuple(part["ids"]) for part in episode["segments"])
        first_number = first_with.setdefault((episode["task"], ids), number)
        own, first_logprobs = logprobs[view.episode == number], logprobs[view.episode == first_number]
        if first_number == number or "fork" in episode:
            continue  # a fork is like its origin by design, at least in the turns that it repeats
        if not own.any() or np.abs(own - first_logprobs).max() > MAX_GAP_FLOAT32:
            continue  # an engine without logprobs has 0 for all
        first = view.episodes[first_number]
        if own.sum() < _IMPOSSIBLE or any(episode[name] == first[name] for name in ("seed", "seconds")):
            return "episodes_are_duplicated", (
                f"{view.values['name']}: {first['id']} and {episode['id']} have the same {len(own)} sampled tokens and "
                f"logprobs, of seeds {first['seed']} and {episode['seed']}; another sample would have them with "
                f"probability {np.exp(own.sum()):.2g}"
            )
    return None


def failed_episode_counts(view: StepView) -> _Clue | None:
    """Find an episode that failed and has an advantage all the same."""
    advantage = view.column("advantage")
    for number, episode in enumerate(view.episodes):
        has_failed = episode["error"] is not None and episode["outcome"] != Outcome.ACTION_LIMIT.value
        if has_failed and np.isfinite(advantage[view.episode == number]).any():
            return "failed_episode_counts", (
                f"{view.values['name']}: episode {episode['id']} failed ({str(episode['error'])[:120]}), and counts as "
                f"{episode['outcome']} with a return of {episode['return']}"
            )
    return None


def mask_is_not_the_actions(view: StepView) -> _Clue | None:
    """Find sampled tokens that are not those of the turns' actions."""
    for episode in view.episodes:
        for number, part in enumerate(episode["segments"]):
            spans = [set(range(*turn["action"])) for turn in episode["turns"] if turn["segment"] == number]
            actions, mask_at = set().union(*spans), set(part["sampled"])
            # A whole turn may be left out: an app can take part in an episode without being trained on.
            if mask_at <= actions and all(span <= mask_at or not span & mask_at for span in spans):
                continue
            shift = next((d for d in (-1, 1, -2, 2) if {position + d for position in actions} == mask_at), None)
            how = "is elsewhere" if shift is None else f"is theirs, shifted by {shift:+d}"
            return "mask_is_shifted", (
                f"{view.values['name']}, episode {episode['id']}: {len(actions)} tokens are the actions of its turns, "
                f"and the mask of {len(mask_at)} tokens {how}"
            )
    return None


def versions_are_impossible(view: StepView) -> _Clue | None:
    """Find tokens of weights that were not there yet, or that are older than training.max_staleness allows."""
    versions, max_staleness = view.column("weight_version"), view.rules["training"].get("max_staleness", 0)
    is_trained = view.is_training & (view.column("fate") <= Fate.OVERLONG) & (versions >= 0)
    wrong = is_trained & ((versions >= view.step) | (versions < view.step - 1 - max_staleness))
    if not wrong.any():
        return None
    token, place = view.first(wrong)
    return "weights_are_stale", (
        f"{place}: sampled under version {versions[token]:.0f}, where step {view.step} trains version {view.step - 1} "
        f"and training.max_staleness allows {max_staleness} before it ({wrong.sum()} such tokens)"
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """Logprobs [A] of engine and learner that are too far apart where both `are_known`; `evidence` says how far."""

    view: StepView
    engine: Array
    learner: Array
    are_known: Array
    limit: float
    evidence: str

    @property
    def fits(self) -> Array:
        return np.abs(self.engine - self.learner) <= self.limit

    @property
    def informative(self) -> Array:
        return self.are_known & (np.abs(self.learner) > _INFORMATIVE)


def engine_is_not_the_learner(view: StepView) -> _Clue | None:
    """Find logprobs of the engine that are not the learner's under the same weights, and say what makes them so."""
    max_gap = view.rules["correction"].get("max_engine_gap")
    engine = view.column("rollout_logprob")
    learner = view.before_update if view.takes_the_engines else view.column("old_logprob")
    are_known = np.isfinite(learner) & (engine != 0) & (view.column("weight_version") == view.step - 1)
    gap = np.where(are_known, engine - learner, 0.0)
    if not view.is_training or not are_known.any() or (max_gap is None and _differ_on_purpose(view)):
        return None
    kl = float(np.mean(np.expm1(-gap[are_known]) + gap[are_known]))
    if disagreement(float(np.abs(gap).max()), kl, max_gap=max_gap, has_16_bits=view.is_half) is None:
        return None
    token, place = view.first(np.abs(gap) == np.abs(gap).max())
    evidence = (
        f"{place}: the engine's logprob is {engine[token]:.4f}, the learner's {learner[token]:.4f}; in the mean of "
        f"{are_known.sum()} tokens they are {np.abs(gap[are_known]).mean():.2g} nats apart"
    )
    limit = max_gap or (_MAX_GAP_16_BITS if view.is_half else MAX_GAP_FLOAT32)
    apart = _Gap(view, engine, learner, are_known, limit, evidence)
    clues = (explain(apart) for explain in (_shift, _other_tokens, _temperature, _missed_update))
    return next((clue for clue in clues if clue is not None), ("precisions_differ", evidence))


def _differ_on_purpose(view: StepView) -> bool:
    rollout, training = dict(view.rules["rollout"]), view.rules["training"]
    is_rescored, min_tokens = rollout.pop("rescore", False), rollout.pop("min_output_tokens", 0)
    return is_rescored or differ_on_purpose(
        Sampling(**rollout, min_tokens=min_tokens),
        is_cut_when_scored=view.rules["scores_truncated"],
        dropout=training.get("lora", {}).get("dropout", 0.0),
    )


def _shift(gap: _Gap) -> _Clue | None:
    here, there = slice(None, -1), slice(1, None)
    view, informative = gap.view, gap.are_known & (np.abs(gap.engine) > _INFORMATIVE)
    neighbours = (view.episode[here] == view.episode[there]) & (view.turn[here] == view.turn[there])
    for way, mine, partner in ((1, here, there), (-1, there, here)):
        rows_to_test = neighbours & gap.are_known[mine] & informative[partner]
        fits = (np.abs(gap.engine[partner] - gap.learner[mine]) <= gap.limit)[rows_to_test]
        if len(fits) >= _MIN_COUNT and fits.mean() > 0.8 and gap.fits[mine][rows_to_test].mean() < 0.5:
            how = f"{fits.mean():.0%} of the learner's logprobs are the engine's of the token {way:+d} from theirs"
            return "mask_is_shifted", f"{gap.evidence}; {how}"
    return None


def _other_tokens(gap: _Gap) -> _Clue | None:
    keys = np.stack([gap.view.episode, gap.view.turn])[:, gap.informative]
    turns, of_token = np.unique(keys, axis=1, return_inverse=True)
    misfits = np.bincount(of_token, ~gap.fits[gap.informative], minlength=turns.shape[1])
    if not len(misfits) or np.mean(misfits == 0) < _FITTING_TURNS:
        return None
    how = f"in {(misfits == 0).sum()} of {len(misfits)} turns the two agree to {gap.limit:g}"
    return "tokens_are_not_the_sampled_ones", f"{gap.evidence}; {how}"


def _temperature(gap: _Gap) -> _Clue | None:
    # After the same text, logprobs at two temperatures differ by (T_learner / T_engine - 1) * logprob and a constant.
    _, of_token = np.unique(gap.view.contexts()[gap.are_known], return_inverse=True)
    values = gap.learner[gap.are_known], (gap.engine - gap.learner)[gap.are_known]
    x, y = (v - (np.bincount(of_token, v) / np.bincount(of_token))[of_token] for v in values)
    if (np.abs(x) > _INFORMATIVE).sum() < _MIN_COUNT or not y.any():
        return None
    slope = float(x @ y / (x @ x))
    explained_fraction = 1 - float(((y - slope * x) ** 2).sum() / (y @ y))
    if explained_fraction < _EXPLAINED or abs(slope) < _MIN_SLOPE:
        return None
    return "temperatures_differ", (
        f"{gap.evidence}; a temperature of the engine that is {1 / (1 + slope):.3g} times the learner's explains "
        f"{explained_fraction:.1%} of how these differ between tokens after the same text (rollout.temperature is "
        f"{gap.view.rules['rollout'].get('temperature', 1.0):g})"
    )


def _missed_update(gap: _Gap) -> _Clue | None:
    # Before the first update there was nothing that an engine could have missed.
    curves = gap.view.run["metrics"]
    gaps = zip(curves["step"], curves["values"].get("kl/rollout_max_gap", []), strict=False)
    step, value = next(((s, v) for s, v in gaps if v is not None), (gap.view.step, 0.0))
    if step >= gap.view.step or value > gap.limit:
        return None
    return "weights_are_stale", f"{gap.evidence}; in step {step} the largest gap was {value:.1g} (kl/rollout_max_gap)"


def old_logprobs_are_not_the_learners(view: StepView) -> _Clue | None:
    """Find old logprobs that are not those of the first pass, before any optimizer step, though they are recomputed."""
    old, engine = view.column("old_logprob"), view.column("rollout_logprob")
    are_known = np.isfinite(old - view.before_update)
    gap = np.where(are_known, np.abs(old - view.before_update), 0.0)
    if view.takes_the_engines or gap.max(initial=0.0) <= (_MAX_OLD_GAP_16_BITS if view.is_half else MAX_GAP_FLOAT32):
        return None
    token, place = view.first(gap == gap.max())
    return "old_logprobs_are_others", (
        f"{place}: the old logprob is {old[token]:.4f}, and the first optimizer step began with "
        f"{view.before_update[token]:.4f}; {np.mean(old[are_known] == engine[are_known]):.0%} of the old ones are bit "
        "by bit the engine's"
    )


def judgement_is_anothers(view: StepView) -> _Clue | None:
    """Find an episode whose judge's terms are not the weighted totals of its judgement."""
    episodes = [episode for episode in view.episodes if episode["judge"] is not None]
    for episode in episodes:
        terms = [turn["terms"] for turn in episode["turns"]]
        own = [(of_turn.get("judge_event", 0.0), of_turn.get("judge_outcome", 0.0)) for of_turn in terms]
        worth = _worth(episode["judge"], len(own))
        if np.allclose(own, worth, rtol=1e-5, atol=1e-5):
            continue
        like = [twin["id"] for twin in episodes if np.allclose(own, _worth(twin["judge"], len(own)), atol=1e-5)]
        return "judgement_is_anothers", (
            f"{view.values['name']}: the rewards of episode {episode['id']} have {np.sum(own):.4g} from the judge, its "
            f"judgement is worth {np.sum(worth):.4g}"
            + (f"; they are those of the judgement of {', '.join(like[:3])}" if like else "")
        )
    return None


def _worth(judge: Mapping[str, Json], num_turns: int) -> list[tuple[float, float]]:
    """Return the two terms of each turn that `blend` makes of a judgement; NaN where it is of other turns."""
    weights, events = judge["blend"], [review["total"] for review in judge["events"]]
    events = events if len(events) == num_turns else [np.nan] * num_turns
    outcomes = [0.0] * (num_turns - 1) + [0.0 if judge["outcome"] is None else judge["outcome"]["total"]]
    terms = zip(events, outcomes, strict=True)
    return [(weights["event"] * e if weights["event"] else 0.0, weights["outcome"] * o) for e, o in terms]


def rewards_follow_the_turn_before(view: StepView) -> _Clue | None:
    """Find rewards that follow from the action of the turn before: siblings that part in a turn earn alike in it."""
    between = sum(bool(turn["reward"]) for episode in view.episodes for turn in episode["turns"][:-1])
    pairs: list[tuple[bool, ...]] = []  # do they earn differently in the turn, in the next; does any sibling in it?
    for group in view.groups().values():
        rewards_of = {number: [turn["reward"] or 0.0 for turn in view.episodes[number]["turns"]] for number in group}
        for first, second in itertools.combinations(group, 2):
            k = _parting_turn(view.episodes[first], view.episodes[second])
            if k is not None and k + 1 < min(len(rewards_of[first]), len(rewards_of[second])):
                differs = (rewards_of[first][i] != rewards_of[second][i] for i in (k, k + 1))
                pairs.append((*differs, len({own[k] for own in rewards_of.values() if k + 1 < len(own)}) > 1))
    now, following, able = (sum(pair[i] for pair in pairs) for i in range(3))
    # With rewards at the end only, parting earns nothing at once either; nor in turns of thoughts, at a constant cost.
    if now or min(len(pairs), between, 2 * able) < _MIN_COUNT or following < 0.2 * len(pairs):
        return None
    return "rewards_come_late", (
        f"{view.values['name']}: of {len(pairs)} pairs of siblings that act differently for the first time in a turn "
        f"and go on, none earns differently in that turn, and {following} do in the next"
    )


def _parting_turn(first: Mapping[str, Json], second: Mapping[str, Json]) -> int | None:
    """Return the first turn in which two episodes have other tokens, if that is in their actions."""

    def ids(episode: Mapping[str, Json], k: int, span: str) -> Json:
        turn = episode["turns"][k]
        return episode["segments"][turn["segment"]]["ids"][slice(*turn[span])]

    for k in range(min(len(first["turns"]), len(second["turns"]))):
        if ids(first, k, "observation") != ids(second, k, "observation"):
            return None
        if ids(first, k, "action") != ids(second, k, "action"):
            return k
    return None


def advantages_are_others(view: StepView) -> _Clue | None:
    """Find advantages that do not follow from the rewards of the group."""
    settings, column = AdvantageSettings(**view.rules["advantages"]), view.column("advantage")
    is_shaped = settings.whiten != "none" or settings.kl_shaping_coef + view.rules["rewards"].get("kl_coef", 0) > 0
    is_shaped |= bool({settings.baseline, settings.scale, settings.level} & {"batch", "running", "role", "auto"})
    is_shaped |= bool(view.rules.get("has_forks"))  # pages of earlier versions do not say
    mode = view.rules["training"].get("step_rewards_mode", "env_sparse")
    if is_shaped or mode == "decision_stepwise":  # they follow from more than the page shows
        return None
    is_known = np.bincount(view.episode, np.isfinite(column), minlength=len(view.episodes)) > 0
    uncommitted_episodes = set(view.episode[view.column("fate") == Fate.UNCOMMITTED].tolist())
    for group in view.groups().values():
        rows = [n for n in group if view.episodes[n]["return"] is not None and n not in uncommitted_episodes]
        if not all(is_known[n] for n in rows):
            continue  # its episodes were compared, and some or all left out
        own = _advantages(view, rows, settings, mode)
        wrong = [n for n in rows if not _has(view, column, n, own[n])]
        if wrong:
            late = [_advantages(view, rows, settings, mode, late=way) for way in ("lost", "kept")]
            is_late = any(all(_has(view, column, n, way[n]) for n in rows) for way in late)
            return _wrong_advantages(view, column, wrong, own, is_late=is_late)
    return None


def _advantages(
    view: StepView, rows: Sequence[int], settings: AdvantageSettings, mode: str, *, late: str | None = None
) -> dict[int, Array]:
    """Return the advantages of a group's episodes, one a turn, from the rewards of their turns."""
    step_rewards, rewards = StepRewardSettings.model_validate({"mode": mode}), RewardSettings(**view.rules["rewards"])
    members = [_trajectory(view.episodes[n], late) for n in rows]
    returns = partial(returns_of, discount=settings.discount, rewards=rewards, step_rewards=step_rewards)
    values = batch_advantages([list(map(returns, members))], settings).values
    clip = settings.clip or np.inf
    return {n: v.clip(-clip, clip) for n, v in zip(rows, values, strict=True)}


def _trajectory(episode: Mapping[str, Json], late: str | None) -> Trajectory:
    """Return as much of an episode as its return needs.

    `late`: each turn has the reward of the one before, and the last reward is "lost", or "kept" on the last turn.
    """
    rewards = [turn["reward"] for turn in episode["turns"]]
    if late is not None:
        last = rewards[-1] if late == "kept" else None
        rewards = [0.0, *rewards[:-1]]
        rewards[-1] = (rewards[-1] or 0.0) + (last or 0.0)
    turns = tuple(
        Turn(k, 0, (0, 0), (0, 1), FinishReason(turn["finish"]), reward=reward)
        for k, (turn, reward) in enumerate(zip(episode["turns"], rewards, strict=True))
    )
    nothing = np.array([-1], np.int32)
    segments = (Segment(nothing, nothing >= 0, np.zeros(1, np.float32), nothing, nothing),)
    return Trajectory(episode["id"], 0, Task("", 0), 0, segments, turns, (), Outcome(episode["outcome"]))


def _of_tokens(view: StepView, episode: int, advantages: Array) -> tuple[Array, Array]:
    """Return the episode's tokens that are in a turn, and the advantage of each from those of its turns."""
    tokens = np.flatnonzero((view.episode == episode) & (view.turn >= 0))
    # A sibling's may be of fewer turns: the last one stands for those that it has not.
    return tokens, advantages[np.minimum(view.turn[tokens], len(advantages) - 1)]


def _has(view: StepView, recorded_advantages: Array, episode: int, advantages: Array) -> bool:
    tokens, own_advantages = _of_tokens(view, episode, advantages)
    return np.allclose(recorded_advantages[tokens], own_advantages, rtol=1e-4, atol=1e-4)


def _wrong_advantages(
    view: StepView, column: Array, wrong: Sequence[int], own: Mapping[int, Array], *, is_late: bool
) -> _Clue:
    tokens, values = _of_tokens(view, wrong[0], own[wrong[0]])
    worst = int(np.abs(column[tokens] - values).argmax())
    token, place = view.first(np.arange(len(column)) == tokens[worst])
    evidence = f"{place}: the advantage is {column[token]:.4g}, and the group's rewards make it {values[worst]:.4g}"
    if is_late:
        return "rewards_come_late", f"{evidence}; with each reward one turn later, all of the group's are right"
    num_like = sum(any(m != n and _has(view, column, n, own[m]) for m in own) for n in wrong)
    if 2 * num_like > len(wrong):
        return "advantage_is_a_siblings", f"{evidence}; {num_like} of {len(own)} in the group have a sibling's"
    return "advantages_are_others", f"{evidence} ({len(wrong)} of {len(own)} episodes of the group are wrong)"


def _loss(view: StepView, number: int, settings: LossSettings, *, shift: float = 0.0) -> dict[str, Array]:
    """Return [A] ratio, clip and share by the learner's loss of a pass's logprobs plus `shift`; NaN: not known."""
    update, step, recorded_share = view.values["update"], view.optimizer_step(number), view.column("share", number)
    distillation = _distillation(view)
    names = ("old_logprob", "advantage", "ref_logprob", "teacher_log_ratio", "teacher_kl")
    columns = {name: view.column(name) for name in names}
    columns |= {name: view.column(name, number) for name in ("logprob", "entropy", "correction", "teacher_divergence")}
    columns["correction"] = np.nan_to_num(columns["correction"], nan=1.0)  # a run without a correction has none
    are_known = np.isfinite(columns["logprob"] - columns["old_logprob"]) & (step >= 0) & (view.turn >= 0)
    terms = {name: np.full(len(step), np.nan) for name in ("ratio", "clip", "share")}
    for k in np.unique(step[are_known]).tolist():
        at = np.flatnonzero(are_known & (step == k))
        lay_out, mask, trajectory = _rows(view, at)
        episodes, turns, tokens = (update[name][k] for name in ("episodes", "turns", "tokens"))
        tensors = {name: lay_out(column) for name, column in columns.items()}
        is_taught = tensors["teacher_log_ratio"].isfinite() if distillation and distillation.is_self else None
        num_taught = None
        if is_taught is not None:  # pages of earlier versions count the shown ones only
            num_taught = update["taught"][k] if "taught" in update else int(is_taught[mask].sum())
        scores = *(tensors[f"teacher_{name}"] for name in ("log_ratio", "kl", "divergence")), is_taught
        of_tokens = policy_loss(
            tensors["logprob"] + shift,
            tensors["old_logprob"],
            action_mask=mask,
            turn_index=lay_out(view.turn).long(),
            trajectory_index=trajectory,
            advantages=tensors["advantage"],
            settings=settings,
            denominators=Denominators(episodes, turns, tokens, max(tokens, update["batch_tokens"]), num_taught),
            ref_logprobs=tensors["ref_logprob"],
            entropy=tensors["entropy"],
            correction=tensors["correction"],
            teacher=None if distillation is None else TeacherScores(distillation, *scores),
        ).tokens
        for name, term in terms.items():
            term[at] = getattr(of_tokens, name).numpy()
    was_taken = np.isin(step, step[recorded_share != 0])  # a step that was skipped leaves 0
    terms["share"] = np.where(was_taken, terms["share"] / (update["num_steps"] or np.nan), np.nan)
    return terms


def _distillation(view: StepView) -> DistillationSettings | None:
    settings = view.rules.get("distillation")  # pages of earlier versions have none
    return None if settings is None else DistillationSettings(**settings)


def _rows(view: StepView, at: Array) -> tuple[Callable[[Array], torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return how a column [A] is laid out for the tokens `at`, a row a segment; their mask; [B] the rows' episodes."""
    keys, row = np.unique(np.stack([view.episode, view.segment])[:, at], axis=1, return_inverse=True)
    place = np.arange(len(at)) - np.searchsorted(row, row)
    mask = torch.zeros(len(keys[0]), int(place.max()) + 1, dtype=torch.bool)
    mask[row, place] = True

    def lay_out(column: Array) -> torch.Tensor:
        table = mask.double()
        table[mask] = torch.from_numpy(column[at].astype(np.float64))
        return table

    return lay_out, mask, torch.from_numpy(keys[0])


def terms_are_others(view: StepView) -> _Clue | None:
    """Find a token whose ratio, clip or share is not what the learner's loss makes of its columns, or their sum."""
    update, settings = view.values.get("update"), LossSettings(**view.rules["loss"])
    for number in range(view.num_passes if update else 0):
        ratio, clip, share = (view.column(name, number) for name in ("ratio", "clip", "share"))
        # Float32 decides at a bound: either side of it is right.
        near = [_loss(view, number, settings, shift=shift) for shift in (0.0, -_AT_A_BOUND, _AT_A_BOUND)]
        own_terms = near[0]
        far = ~(np.abs(ratio - own_terms["ratio"]) <= _RATIO * np.maximum(1, own_terms["ratio"]))
        is_elsewhere = np.isfinite(own_terms["ratio"]) & far
        is_unlike = np.logical_and.reduce([np.isfinite(terms["clip"]) & (terms["clip"] != clip) for terms in near])
        is_unlike &= bool(update and update["num_steps"])
        is_other = np.logical_and.reduce([_differ(share, terms["share"]) for terms in near])
        if not (is_elsewhere | is_unlike | is_other).any():
            continue
        name, how = "terms_are_others", ""
        swapped_settings = settings.model_copy(update={"clip_low": settings.clip_high, "clip_high": settings.clip_low})
        factors = [(share / own_terms["share"])[is_other & (view.episode == n)] for n in set(view.episode[is_other])]
        if not is_elsewhere.any() and not _differ(share, _loss(view, number, swapped_settings)["share"]).any():
            name, how = "clip_sides_are_swapped", "; with the two swapped, all tokens are right"
        elif not (is_elsewhere | is_unlike).any() and all(np.ptp(factor) < 1e-3 for factor in factors):
            name = "denominators_are_others"  # the terms of an episode's tokens are divided by the same number
        first = next(wrong for wrong in (is_elsewhere, is_unlike, is_other) if wrong.any())
        token, place = view.first(first)
        return name, (
            f"{place}: ratio {ratio[token]:.6f}, by its {settings.unit}'s logprobs {own_terms['ratio'][token]:.6f}; "
            f"clip {Clip(int(clip[token])).name.lower()!r}; its share of the loss is {share[token]:.4g}, "
            f"{share[token] / (own_terms['share'][token] or np.nan):.4g} times that of the settings "
            f"({(is_elsewhere | is_unlike | is_other).sum()} of {len(share)} tokens){how}"
        )
    return _wrong_sum(view)


def _differ(values: Array, targets: Array) -> Array:
    largest = np.abs(values[np.isfinite(values)]).max(initial=0.0)
    # An estimate of KL near 0 is rounding alone: 1e-7 of a token's term.
    tolerance = _RELATIVE * np.maximum(np.abs(targets), np.abs(values)) + _ABSOLUTE * largest
    return np.isfinite(targets) & ~(np.abs(values - targets) < tolerance + 1e-7 / (len(values) + 1))


def _wrong_sum(view: StepView) -> _Clue | None:
    """Find a loss that is not the sum of its tokens' shares, to the rounding of their sizes: terms may cancel."""
    sums: Json = view.values.get("update") or {"shares": None}
    loss: Json = view.values.get("loss")
    if None in (sums["shares"], loss) or abs(sums["shares"] - loss) <= 1e-5 * max(1.0, abs(loss), sums["share_sizes"]):
        return None
    return (
        "terms_are_others",
        f"{view.values['name']}: all shares sum to {sums['shares']:.6g}, loss/total is {loss:.6g}",
    )


# From sampling to the loss: what breaks a link shows in those after it, too.
CHECKS: tuple[Callable[[StepView], _Clue | None], ...] = (
    episodes_are_duplicated,
    failed_episode_counts,
    mask_is_not_the_actions,
    versions_are_impossible,
    old_logprobs_are_not_the_learners,
    engine_is_not_the_learner,
    judgement_is_anothers,
    rewards_follow_the_turn_before,
    advantages_are_others,
    terms_are_others,
)
