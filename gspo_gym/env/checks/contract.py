"""Checks of what an environment declares and answers: construction, messages, rewards, end, errors and close.

Each plays episodes through `EnvSession`, as a rollout does, and reports to `Findings`.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

import gymnasium
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from gspo_gym.env.checks.subject import PROBE, Findings, Subject
from gspo_gym.env.core import CALL_FAILED, Isolation
from gspo_gym.env.playing import Playthrough, play_in, replaying
from gspo_gym.env.session import EnvSession, declared_reward_range, open_session
from gspo_gym.env.workers.threads import OwnThread
from gspo_gym.errors import ContractError, GymError

# The CALL_FAILED text of an exception begins with its class name; that of a ToolError does not.
_RAISED = re.compile(rf"{CALL_FAILED}\w+(Error|Exception): ")
TOLERANCE = 1e-9  # returns are sums of a few floats


async def constructs(subject: Subject, findings: Findings) -> None:
    """Check that two calls make two objects, and read their declarations into `subject`."""
    envs: list[Any] = []
    for _ in range(2):
        session = await _open_noting(subject, envs)
        with suppress(GymError):  # reported by the check "close"
            await session.close()
    if envs[0] is envs[1]:
        findings.fail("expected a fresh instance from every call, got the same object twice")
    subject.max_steps = getattr(getattr(envs[0], "spec", None), "max_episode_steps", None)
    env = getattr(envs[0], "unwrapped", envs[0])
    _read_policies(subject, findings, getattr(env, "policies", {}))
    _read_reward_range(subject, findings, envs[0])
    subject.reference_is_perfect = bool(getattr(env, "reference_is_perfect", True))
    subject.rubric = rubric_of(env)
    if (confinement := getattr(env, "confinement", None)) is not None:
        findings.tell(f"code that the model wrote is {confinement}")
    subject.isolation = getattr(env, "isolation", None)
    if subject.isolation not in (None, *get_args(Isolation)):
        findings.fail(f"expected isolation to be 'thread', 'process' or None, got {subject.isolation!r}")


def rubric_of(env: Any) -> str:
    """Return the environment's `rubric` (a text, or an object with a `text`), else its class docstring."""
    rubric = getattr(env, "rubric", None)
    rubric = getattr(rubric, "text", rubric)
    return rubric if isinstance(rubric, str) else inspect.getdoc(type(env)) or ""


def _read_policies(subject: Subject, findings: Findings, policies: Any) -> None:
    if not isinstance(policies, Mapping) or not all(callable(policy) for policy in policies.values()):
        findings.fail(f"expected policies to map names to functions (env, rng) -> player, got {policies!r}")
    else:
        subject.policies = policies


def _read_reward_range(subject: Subject, findings: Findings, env: Any) -> None:
    try:
        subject.reward_range = declared_reward_range(env, where=subject.name)
    except ContractError as error:
        findings.fail(str(error))


async def speaks(subject: Subject, findings: Findings) -> None:
    """Check that the environment answers every tool call and never speaks as the assistant."""
    _tools_answer(subject, findings)
    for (player, seed), run in subject.runs.items():
        where = f"{player}, seed {seed}"
        if run.opening[-1].role == "assistant":
            findings.fail(f"{where}: expected reset to end with something to answer, got an assistant message last")
        for turn, (action, answer) in enumerate(zip(run.actions, run.answers, strict=True)):
            call_ids = [call.id for call in action.tool_calls]
            answered_ids = [message.tool_call_id for message in answer.messages if message.role == "tool"]
            if call_ids != answered_ids:
                findings.fail(
                    f"{where}, turn {turn}: expected tool messages for the calls {call_ids}, got {answered_ids}"
                )
            if any(message.role == "assistant" for message in answer.messages):
                findings.fail(f"{where}, turn {turn}: expected no assistant message from the environment, got one")


def _tools_answer(subject: Subject, findings: Findings) -> None:
    answers: dict[tuple[str, bool], list[str]] = {}  # by tool, and whether a hand-written player called it
    for (player, _), run in subject.runs.items():
        for action, answer in zip(run.actions, run.answers, strict=True):
            content_by_id = {
                message.tool_call_id: message.content for message in answer.messages if message.role == "tool"
            }
            for call in action.tool_calls:
                answers.setdefault((call.name, player != PROBE), []).append(content_by_id.get(call.id, ""))
    not_seen_to_work = []
    # A hand-written player knows the task, so any failure counts. Arbitrary arguments may be refused, but not raise.
    for (name, is_written), texts in sorted(answers.items()):
        if not all(text.startswith(CALL_FAILED) for text in texts) or (not is_written and (name, True) in answers):
            continue
        if is_written or all(map(_RAISED.match, texts)):
            callers = "hand-written players" if is_written else "arguments that fit its schema"
            findings.fail(f"tool {name}: expected an answer to {callers}, got in all {len(texts)} calls: {texts[0]}")
        else:
            not_seen_to_work.append(name)
    if not_seen_to_work:
        findings.tell(f"called by no hand-written player, and not seen to work: {', '.join(not_seen_to_work)}")


async def rewards_in_range(subject: Subject, findings: Findings) -> None:
    """Check that no return leaves `reward_range`, and that a negative one can be expected from it."""
    low, high = subject.reward_range
    for (player, seed), run in subject.runs.items():
        total = run.episode_return
        if total is not None and not low - TOLERANCE <= total <= high + TOLERANCE:
            findings.fail(f"{player}, seed {seed}: expected a return in reward_range ({low}, {high}), got {total}")
    returns = {(p, s): run.episode_return for (p, s), run in subject.runs.items() if run.episode_return is not None}
    player, seed = min(returns, key=returns.__getitem__, default=("", 0))
    if low == -math.inf and returns and (worst := returns[player, seed]) < -TOLERANCE:
        findings.fail(
            f"{player}, seed {seed} earned {worst:g}: expected reward_range to declare the smallest return; without it "
            "unreadable text and a cut-off episode earn 0, and an action that hangs -1"
        )
    if not returns:
        findings.notes.append("no turn has a reward: only a judge can score these episodes")


async def ends(subject: Subject, findings: Findings) -> None:
    """Check that the time limit holds and that `reset` works after the end."""
    limit = subject.max_steps
    for (player, seed), run in subject.runs.items():
        length = len(run.answers)
        if limit is not None and (length > limit or (length == limit and not run.is_over)):
            findings.fail(f"{player}, seed {seed}: expected the end within {limit} steps, the time limit, it went on")
    endless = [player for player in subject.players if any(not run.is_over for run in subject.runs_of(player))]
    if endless:
        findings.notes.append(
            f"{subject.settings.max_turns} turns of {', '.join(endless)} were not the end; the rollout's max_turns "
            "must set it"
        )
    finished_runs = [run for run in subject.runs.values() if run.is_over]
    if finished_runs:
        await _step_after_the_end(subject, findings, finished_runs[0])


async def _step_after_the_end(subject: Subject, findings: Findings, run: Playthrough) -> None:
    session = await subject.open()
    try:
        await play_in(session, replaying(run.actions), seed=run.seed, max_turns=len(run.actions))
        try:
            is_refused = (await session.step(run.actions[-1])).done
        except GymError:
            is_refused = True
        if not is_refused:  # only a note: Gymnasium leaves it undefined, and a rollout never does it
            findings.notes.append("step() after the end goes on; raising there would show a caller's mistake")
        opening = (await session.reset(run.seed)).messages
        if opening != run.opening:
            findings.fail(f"seed {run.seed}: expected reset after the end to begin anew, got another observation")
    finally:
        await session.close()


async def takes_invalid_actions(subject: Subject, findings: Findings) -> None:
    """Check that an episode goes on after an action that could not be parsed."""
    del findings  # a failure is raised
    session = await subject.open()
    try:
        await session.reset(subject.seeds[0])
        if not (await session.invalid_action("unreadable: expected a tool call")).done:
            await session.step(next(iter(subject.runs.values())).actions[0])
    finally:
        await session.close()


async def closes(subject: Subject, findings: Findings) -> None:
    """Check that closing twice works, before and after an episode."""
    del findings
    # In this process: the exit of a worker would hide the second close.
    for is_played in (False, True):
        envs: list[Any] = []
        session = await _open_noting(subject, envs)
        if is_played:
            await session.reset(subject.seeds[0])
        await session.close()
        timeout = subject.settings.step_timeout_seconds
        await EnvSession(envs[0], env_id=subject.name, step_timeout_seconds=timeout).close()


async def _open_noting(subject: Subject, envs: list[Any]) -> EnvSession:

    def make() -> Any:
        envs.append(subject.factory())
        return envs[-1]

    seconds = subject.settings.step_timeout_seconds
    return await open_session(make, env_id=subject.name, step_timeout_seconds=seconds, checks_returns=False)


async def gymnasium_agrees(subject: Subject, findings: Findings) -> None:
    """Run Gymnasium's own checker where it applies."""
    seconds = subject.settings.step_timeout_seconds
    # The checker is synchronous and may hang, so it gets a thread that can be abandoned.
    thread = OwnThread()
    try:
        outcome = await thread.call_async(lambda: _gymnasium_advice(subject), timeout_seconds=seconds)
    except TimeoutError:
        thread.abandon()
        findings.fail(f"gymnasium.utils.env_checker.check_env did not come back within {seconds:g} seconds")
        return
    thread.release()
    if outcome.error is not None:
        text = f"{type(outcome.error).__name__}: {outcome.error}"
        if subject.needs_worker:  # Gymnasium does not seed process-wide state, a worker process does
            findings.notes.append(f"Gymnasium: {text}")
        else:
            findings.fail(text)
        return
    if outcome.value is None:
        findings.notes.append("not a gymnasium.Env with plain methods, so Gymnasium's own checker does not apply")
    else:
        findings.notes += [f"Gymnasium: {text}" for text in outcome.value]


def _gymnasium_advice(subject: Subject) -> list[str] | None:
    """Return the warnings of Gymnasium's checker; None if it does not apply. Raises what the checker objects to."""
    env = getattr(subject.factory(), "unwrapped", None)
    if not isinstance(env, gymnasium.Env):
        return None
    try:
        # The checker calls plain methods only, and would take a coroutine for the answer.
        if inspect.iscoroutinefunction(env.step) or _is_awaitable(env.reset(seed=subject.seeds[0])):
            return None
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            gymnasium_check_env(env, skip_render_check=True)
        return sorted({str(warning.message) for warning in records})
    finally:
        if not inspect.iscoroutinefunction(env.close):
            env.close()


def _is_awaitable(answer: object) -> bool:
    if inspect.iscoroutine(answer):
        answer.close()  # else Python warns that it was never awaited
        return True
    return inspect.isawaitable(answer)
