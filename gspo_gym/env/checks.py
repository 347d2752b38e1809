"""The single checks of `checker.check_env`; each plays real episodes through `EnvSession`, the way a rollout does.

Nothing here knows a particular environment. A check reports to `Findings` and returns nothing; `CHECKS` lists them in
the order in which they run.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from gspo_gym.env.core import PolicyFactory
from gspo_gym.env.playing import PlayerError, Playthrough, Watch, play_in, replaying
from gspo_gym.env.session import EnvSession, open_session
from gspo_gym.env.subject import TRIVIAL, Findings, Subject
from gspo_gym.env.workers import OwnThread
from gspo_gym.errors import EnvTimeoutError, GymError

_TOLERANCE = 1e-9  # returns are sums of a few floats


async def _constructs(subject: Subject, findings: Findings) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(subject.factory())
        return made[-1]

    for _ in range(2):
        session = await open_session(make, env_id=subject.name, step_timeout_seconds=subject.timeout)
        with suppress(GymError):  # the check "close" will say so
            await session.close()
    if made[0] is made[1]:
        findings.fail("expected a fresh instance from every call, got the same object twice")
    env = getattr(made[0], "unwrapped", made[0])
    subject.max_steps = getattr(getattr(made[0], "spec", None), "max_episode_steps", None)
    policies = getattr(env, "policies", {})
    if not isinstance(policies, Mapping) or not all(callable(policy) for policy in policies.values()):
        findings.fail(f"expected policies to map names to functions (env, rng) -> player, got {policies!r}")
    else:
        subject.policies = policies
    declared = getattr(env, "reward_range", subject.reward_range)
    try:
        low, high = map(float, declared)
        if not low <= high:
            raise ValueError
        subject.reward_range = (low, high)
    except (TypeError, ValueError):
        findings.fail(f"expected reward_range to be (smallest, largest return), got {declared!r}")


async def _plays(subject: Subject, findings: Findings) -> None:
    touched: list[str] = []
    for player, policy in subject.players.items():
        await _play_all_seeds(subject, findings, player, policy, touched)
    findings.check = "global randomness"
    for text in touched:
        findings.fail(text)


async def _play_all_seeds(
    subject: Subject, findings: Findings, player: str, policy: PolicyFactory, touched: list[str]
) -> None:
    for seed in subject.seeds:
        try:
            watch = _watching(f"{player}, seed {seed}", touched)
            subject.runs[player, seed] = await _play_alone(subject, policy, seed, watch)
        except (GymError, PlayerError) as error:
            findings.fail(f"{player}, seed {seed}: {type(error).__name__}: {error}")
            if isinstance(error, EnvTimeoutError):
                return  # one deadline a player is time enough spent on an environment that hangs


async def _play_alone(subject: Subject, policy: PolicyFactory, seed: int, watch: Watch) -> Playthrough:
    session = await subject.open()
    try:
        return await play_in(session, policy, seed=seed, max_turns=subject.max_turns, watch=watch)
    finally:
        await session.close()


async def _speaks(subject: Subject, findings: Findings) -> None:
    for (player, seed), run in subject.runs.items():
        where = f"{player}, seed {seed}"
        if run.opening[-1].role == "assistant":
            findings.fail(f"{where}: expected reset to end with something to answer, got an assistant message last")
        for turn, (action, answer) in enumerate(zip(run.actions, run.answers, strict=True)):
            asked = [call.id for call in action.tool_calls]
            answered = [message.tool_call_id for message in answer.messages if message.role == "tool"]
            if asked != answered:
                findings.fail(f"{where}, turn {turn}: expected tool messages for the calls {asked}, got {answered}")
            if any(message.role == "assistant" for message in answer.messages):
                findings.fail(f"{where}, turn {turn}: expected no assistant message from the environment, got one")


async def _is_deterministic(subject: Subject, findings: Findings) -> None:
    runs = [run for run in subject.runs.values() for _ in range(2)]
    again = await asyncio.gather(*(subject.replay(run.actions, run.seed) for run in runs), return_exceptions=True)
    for run, other in zip(runs, again, strict=True):
        if isinstance(other, BaseException):
            findings.fail(f"seed {run.seed}: played alone it worked, beside others {type(other).__name__}: {other}")
        elif (difference := run.difference_from(other)) is not None:
            findings.fail(f"seed {run.seed}: alone and beside others differ: {difference}")
    await _count_tasks(subject, findings)


async def _count_tasks(subject: Subject, findings: Findings) -> None:
    """Tasks are told apart by what the same actions do in them: those of all players under one seed."""
    spoken = [run.actions for run in subject.runs.values() if run.seed == subject.seeds[0]]
    played = await asyncio.gather(
        *(subject.replay(actions, seed) for seed in subject.seeds for actions in spoken), return_exceptions=True
    )
    texts = [repr((run.opening, run.answers) if isinstance(run, Playthrough) else run) for run in played]
    tasks = {tuple(texts[start : start + len(spoken)]) for start in range(0, len(texts), max(1, len(spoken)))}
    findings.notes.append(f"{len(subject.seeds)} seeds gave at least {len(tasks)} different tasks")


async def _resets(subject: Subject, findings: Findings) -> None:
    wanted = [run for run in subject.runs.values() if run.seed in subject.seeds[:2]]
    session = await subject.open()
    try:
        for run in [*wanted, *wanted[:1]]:
            again = await play_in(session, replaying(run.actions), seed=run.seed, max_turns=len(run.actions))
            if (difference := run.difference_from(again)) is not None:
                findings.fail(f"seed {run.seed}: a fresh instance and one that was reset differ: {difference}")
    finally:
        await session.close()


async def _rewards_in_range(subject: Subject, findings: Findings) -> None:
    low, high = subject.reward_range
    for (player, seed), run in subject.runs.items():
        total = run.episode_return
        if total is not None and not low - _TOLERANCE <= total <= high + _TOLERANCE:
            findings.fail(f"{player}, seed {seed}: expected a return in reward_range ({low}, {high}), got {total}")
    if all(run.episode_return is None for run in subject.runs.values()):
        findings.notes.append("no turn has a reward: only a judge can score these episodes")


async def _ends(subject: Subject, findings: Findings) -> None:
    limit = subject.max_steps
    for (player, seed), run in subject.runs.items():
        length = len(run.answers)
        if limit is not None and (length > limit or (length == limit and not run.is_over)):
            findings.fail(f"{player}, seed {seed}: expected the end within {limit} steps, the time limit, it went on")
    endless = [player for player in subject.players if any(not run.is_over for run in subject.runs_of(player))]
    if endless:
        findings.notes.append(
            f"{subject.max_turns} turns of {', '.join(endless)} were not the end; the rollout's max_turns must set it"
        )
    finished = [run for run in subject.runs.values() if run.is_over]
    if finished:
        await _step_after_the_end(subject, findings, finished[0])


async def _step_after_the_end(subject: Subject, findings: Findings, run: Playthrough) -> None:
    session = await subject.open()
    try:
        await play_in(session, replaying(run.actions), seed=run.seed, max_turns=len(run.actions))
        try:
            is_refused = (await session.step(run.actions[-1])).done
        except GymError:
            is_refused = True
        if not is_refused:  # a note: Gymnasium leaves it undefined, and a rollout never does it
            findings.notes.append("step() after the end goes on; raising there would show a caller's mistake")
        opening = (await session.reset(run.seed)).messages
        if opening != run.opening:
            findings.fail(f"seed {run.seed}: expected reset after the end to begin anew, got another observation")
    finally:
        await session.close()


async def _takes_invalid_actions(subject: Subject, findings: Findings) -> None:
    del findings  # whatever goes wrong is raised
    session = await subject.open()
    try:
        await session.reset(subject.seeds[0])
        if not (await session.invalid_action("unreadable: expected a tool call")).done:
            await session.step(next(iter(subject.runs.values())).actions[0])
    finally:
        await session.close()


async def _closes(subject: Subject, findings: Findings) -> None:
    del findings
    for is_played in (False, True):
        made: list[Any] = []

        def make(made: list[Any] = made) -> Any:
            made.append(subject.factory())
            return made[0]

        session = await open_session(make, env_id=subject.name, step_timeout_seconds=subject.timeout)
        if is_played:
            await session.reset(subject.seeds[0])
        await session.close()
        await EnvSession(made[0], env_id=subject.name, step_timeout_seconds=subject.timeout).close()


async def _reference_is_best(subject: Subject, findings: Findings) -> None:
    if subject.reference not in subject.policies:
        findings.notes.append(f"no policy {subject.reference!r}: whether the task can be solved was not checked")
        return
    top = subject.reward_range[1]
    for run in subject.runs_of(subject.reference):
        if run.success is False or not run.is_over:
            state = "failed" if run.is_over else f"was not done after {len(run.answers)} turns"
            findings.fail(f"seed {run.seed}: expected {subject.reference!r} to succeed, it {state}")
        elif math.isfinite(top) and not math.isclose(run.episode_return or 0.0, top, abs_tol=_TOLERANCE):
            findings.fail(f"seed {run.seed}: expected {subject.reference!r} to earn {top}, got {run.episode_return}")
    if not math.isfinite(top):
        findings.notes.append("reward_range has no largest return, so the reference's was not compared with it")
    if any(run.success is None for run in subject.runs_of(subject.reference)):
        findings.notes.append("no Reward(..., success=True) from the reference: there will be no success rate")


async def _trivial_play_is_worse(subject: Subject, findings: Findings) -> None:
    for player in TRIVIAL:
        for run in subject.runs_of(player):
            if run.success:
                findings.fail(f"seed {run.seed}: expected {player} to fail, it succeeded")
    if not subject.runs_of(subject.reference):
        return
    best = subject.mean_return(subject.reference)
    for player in (*TRIVIAL, subject.random):
        if subject.runs_of(player) and (mean := subject.mean_return(player)) >= best - _TOLERANCE:
            findings.fail(
                f"expected {player} to earn less than {subject.reference!r} ({best:g} on average), got {mean:g}"
            )


async def _gymnasium_agrees(subject: Subject, findings: Findings) -> None:
    def check() -> tuple[list[str], bool]:
        env = getattr(subject.factory(), "unwrapped", None)
        if not isinstance(env, gymnasium.Env):
            return [], False
        try:
            if inspect.iscoroutinefunction(env.step) or _is_awaitable(env.reset(seed=subject.seeds[0])):
                return [], False
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                gymnasium_check_env(env, skip_render_check=True)
            return sorted({str(warning.message) for warning in caught}), True
        finally:
            if not inspect.iscoroutinefunction(env.close):
                env.close()

    thread = OwnThread()
    try:
        returned = await thread.call_async(check, timeout_seconds=subject.timeout)
    except TimeoutError:
        thread.abandon()
        findings.fail(f"gymnasium.utils.env_checker.check_env did not come back within {subject.timeout:g} seconds")
        return
    thread.release()
    if returned.error is not None:
        findings.fail(f"{type(returned.error).__name__}: {returned.error}")
        return
    advice, is_applicable = returned.value
    findings.notes += [f"Gymnasium: {text}" for text in advice]
    if not is_applicable:
        findings.notes.append("not a gymnasium.Env with plain methods, so Gymnasium's own checker does not apply")


def _is_awaitable(answer: object) -> bool:
    if inspect.iscoroutine(answer):
        answer.close()  # it is not going to be awaited
        return True
    return inspect.isawaitable(answer)


def _watching(where: str, touched: list[str]) -> Watch:
    """A watch that notes which calls changed a random generator of the whole process."""

    @contextmanager
    def watch(method: str, turn: int) -> Iterator[None]:
        before = _global_states()
        yield
        for name, state in _global_states().items():
            if state != before[name]:
                place = f"{method}()" if turn < 0 else f"{method}(), turn {turn}"
                touched.append(
                    f"{where}: expected randomness from self.np_random only, but {place} changed the generator of "
                    f"{name}, which all episodes share"
                )

    return watch


def _global_states() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy.random": (kind, np.asarray(keys).tobytes(), *rest)}


Check = Callable[[Subject, Findings], Awaitable[None]]

# In order; if one of the first two fails, the rest has nothing to judge. "global randomness" is found while playing.
CHECKS: Mapping[str, tuple[str, Check | None]] = {
    "construction": ("every call of the factory makes a fresh, well-declared environment", _constructs),
    "play": ("reset and step answer in the agreed types and shapes, in time", _plays),
    "global randomness": ("no random generator of the whole process is touched", None),
    "messages": ("every tool call is answered, and nothing is said in the model's name", _speaks),
    "determinism": ("instances under one seed play alike while others run beside them", _is_deterministic),
    "reset": ("an instance that was played and reset plays like a fresh one", _resets),
    "reward range": ("returns stay in reward_range", _rewards_in_range),
    "end": ("time limits hold, and reset follows the end", _ends),
    "invalid action": ("text that could not be read is answered", _takes_invalid_actions),
    "close": ("closing twice is fine, before and after an episode", _closes),
    "reference": ("the reference policy earns the top score", _reference_is_best),
    "trivial play": ("saying nothing, echoing and random play do not", _trivial_play_is_worse),
    "gymnasium": ("Gymnasium's own checker accepts it", _gymnasium_agrees),
}
