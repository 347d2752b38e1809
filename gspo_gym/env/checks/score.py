"""Checks of what is rewarded: the reference reaches the top, and neither chance nor a trick gets there."""

from __future__ import annotations

import math
import textwrap

from gspo_gym.env.checks.contract import TOLERANCE
from gspo_gym.env.checks.probes import probes
from gspo_gym.env.checks.subject import Findings, Subject, mean_return
from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, play_in
from gspo_gym.errors import GymError

_WIDTH = 100  # of the mean returns, which are many


async def reference_is_best(subject: Subject, findings: Findings) -> None:
    """The reference earns the largest return there is."""
    reference = subject.settings.reference
    if reference not in subject.policies:
        findings.notes.append(f"no policy {reference!r}: whether the task can be solved was not checked")
        return
    if not subject.reference_is_perfect:
        findings.tell(f"{reference!r} need not be perfect here: it only has to beat other play on average")
        return
    top = subject.reward_range[1]
    for run in subject.runs_of(reference):
        if run.success is False or not run.is_over:
            state = "failed" if run.is_over else f"was not done after {len(run.answers)} turns"
            findings.fail(f"seed {run.seed}: expected {reference!r} to succeed, it {state}")
        elif math.isfinite(top) and not math.isclose(run.episode_return or 0.0, top, abs_tol=TOLERANCE):
            findings.fail(f"seed {run.seed}: expected {reference!r} to earn {top}, got {run.episode_return}")
    if not math.isfinite(top):
        findings.notes.append("reward_range has no largest return, so the reference's was not compared with it")
    if any(run.success is None for run in subject.runs_of(reference)):
        findings.notes.append("no Reward(..., success=True) from the reference: there will be no success rate")


async def tricks_do_not_pay(subject: Subject, findings: Findings) -> None:
    """No trick succeeds, and neither a trick nor random play earns what the reference does on average.

    Without a reference, what they earn is compared with the largest return, if there is one.
    """
    settings = subject.settings
    returns = {}
    for player in (settings.random, settings.reference):
        if subject.runs_of(player):
            returns[player] = subject.mean_return(player)
    for player, policy in probes(_rubric(subject)).items():
        runs = await _played(subject, findings, player, policy)
        if not runs:
            continue
        returns[player] = mean_return(runs)
        for run in runs:
            if run.success and subject.reference_is_perfect:  # else it may be luck, and the average counts
                findings.fail(f"seed {run.seed}: expected {player} to fail, it succeeded")
    best, whose = returns.get(settings.reference, subject.reward_range[1]), "the largest return"
    if settings.reference in returns:
        whose = f"{settings.reference!r} on average"
    for player, mean in returns.items():
        if player != settings.reference and mean >= best - TOLERANCE and not _is_unscored(subject):
            findings.fail(f"expected {player} to earn less than {whose} ({best:g}), got {mean:g}")
    told = "mean return: " + ", ".join(f"{player} {mean:.3g}" for player, mean in returns.items())
    for line in textwrap.wrap(told, _WIDTH):
        findings.tell(line)
    findings.measurements["mean_returns"] = returns


async def _played(subject: Subject, findings: Findings, player: str, policy: PolicyFactory) -> list[Playthrough]:
    """The player's episodes, one after another; its first failure is a problem and the end of it."""
    runs = []
    for seed in subject.seeds:
        try:
            session = await subject.open()
            try:
                runs.append(await play_in(session, policy, seed=seed, max_turns=subject.settings.max_turns))
            finally:
                await session.close()
        except (GymError, PlayerError) as error:
            findings.fail(f"{player}, seed {seed}: {type(error).__name__}: {error}")
            break
    return runs


def _rubric(subject: Subject) -> str:
    """What the environment says of its grading, and the names of the terms that rewards had."""
    terms = {name for run in subject.runs.values() for answer in run.answers for name in answer.reward_terms}
    return "\n".join([subject.rubric, *sorted(terms)])


def _is_unscored(subject: Subject) -> bool:
    """Whether only a judge scores these episodes, so that returns say nothing."""
    return all(run.episode_return is None for run in subject.runs.values())
