"""Play probe rollouts of a task app, with the real gateway and a scripted model, and report what cannot be trained on.

The script answers as models do: plausible words, the same word for ever, nonsense, nothing; or the model is down, or
the trainer hangs up. Each time the app must end with a result that can be trained on, or with none, and go on. Nothing
is trained here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gspo_gym.chat.renderer import Renderer
from gspo_gym.engine.scripted import ScriptedEngine
from gspo_gym.errors import EngineError
from gspo_gym.policy.tiny import tiny_tokenizer
from gspo_gym.remote.apps.client import AppKeys, TaskAppClient
from gspo_gym.remote.apps.contracts import AppError
from gspo_gym.remote.apps.episodes import AppCounters, AppEpisodes, AppEpisodeSettings
from gspo_gym.remote.apps.rewards import AppRollout
from gspo_gym.remote.gateway.app import create_gateway_app
from gspo_gym.remote.gateway.session import Gateway, GatewaySessionSettings
from gspo_gym.remote.serving import LoopServer
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.types import Outcome, Task, Trajectory

NO_RETURN = "no return: expected metrics.mean_return, outcome_score or step rewards, got none of them"
_TOLERANCE = 1e-6  # of the larger one: below it, two returns are the same


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The report on one probe.

    Attributes:
        name: of the probe. asked: what the app had to cope with.
        outcome, error: the end of the episode.
        app_return: the app's return; None: none. episode_return: the sum of the turns' rewards; None if it is not
            scored.
        step_rewards: how many of the app's steps have a positive, zero, negative or null reward.
        num_decisions: listed by the app. num_turns: captured. calls: of the model, by their use.
        num_sampled_tokens, num_trained_tokens: sampled for the calls, and trained on.
        reports_events: the app reports what its decisions achieved.
        problems: to be mended before training. notices: allowed, but perhaps not intended.
    """

    name: str
    asked: str
    outcome: str
    error: str | None = None
    app_return: float | None = None
    episode_return: float | None = None
    step_rewards: Mapping[str, int] = field(default_factory=dict)
    num_decisions: int = 0
    num_turns: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    num_sampled_tokens: int = 0
    num_trained_tokens: int = 0
    reports_events: bool = False
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"ok": not self.problems, **asdict(self)}


def report_of(
    name: str, asked: str, trajectory: Trajectory, counters: AppCounters, rollout: AppRollout | None
) -> ProbeReport:
    """Report on one attempt that was played with new counters; `rollout` is the app's answer, None if none came."""
    problems, notices = _findings(trajectory, counters, rollout)
    return ProbeReport(
        name=name,
        asked=asked,
        outcome=trajectory.outcome.value,
        error=trajectory.error,
        app_return=None if rollout is None else rollout.episode_return,
        episode_return=trajectory.reward if trajectory.is_scored else None,
        step_rewards=_kinds_of(rollout),
        num_decisions=0 if rollout is None else len(rollout.decisions),
        num_turns=len(trajectory.turns),
        calls=dict(counters.calls),
        num_sampled_tokens=counters.num_sampled_tokens,
        num_trained_tokens=counters.num_trained_tokens,
        reports_events=rollout is not None and rollout.reports_events,
        problems=tuple(problems),
        notices=tuple(notices),
    )


def _findings(trajectory: Trajectory, counters: AppCounters, rollout: AppRollout | None) -> tuple[list[str], list[str]]:
    """Return problems and notices."""
    if trajectory.error is not None:
        return [f"the episode is a failure and would be played again: {trajectory.error}"], []
    problems: list[str] = []
    app_return = None if rollout is None else rollout.episode_return
    if app_return is None:
        problems.append(NO_RETURN)
    # The turns' rewards are what is learned from.
    elif not trajectory.is_scored or abs(trajectory.reward - app_return) > _TOLERANCE * max(1.0, abs(app_return)):
        reward_sum = trajectory.reward if trajectory.is_scored else None
        problems.append(
            f"returns do not reconcile: the app says {app_return:g}, and the turns' rewards sum to {reward_sum}"
        )
    num_masked = sum(int(segment.action_mask.sum()) for segment in trajectory.segments)
    if num_masked != counters.num_trained_tokens:
        problems.append(f"tokens do not reconcile: {num_masked} in masks, {counters.num_trained_tokens} counted")
    count_by_reason = {why: count for why, count in counters.calls.items() if why != "trained"}
    told_calls = ", ".join(f"{count} {why}" for why, count in sorted(count_by_reason.items()))
    if counters.num_trained_tokens == 0:
        # With nothing to train on, notices about single calls are of no use.
        problems.append(f"nothing to train on: no token of the model's calls can be trained on ({told_calls})")
        return problems, []
    notices = [f"calls that are not trained on: {told_calls}"] if count_by_reason else []
    notices += list(counters.first_warnings.values())
    return problems, notices


def _kinds_of(rollout: AppRollout | None) -> dict[str, int]:
    rewards = () if rollout is None else rollout.turn_rewards
    scored_rewards = [reward for reward in rewards if reward is not None]
    return {
        "positive": sum(reward > 0 for reward in scored_rewards),
        "zero": sum(not reward for reward in scored_rewards),
        "negative": sum(reward < 0 for reward in scored_rewards),
        "null": len(rewards) - len(scored_rewards),
    }


def is_result(report: ProbeReport) -> bool:
    """Return whether the app finished the episode; otherwise it tells nothing about the app's contract."""
    return report.error is None and report.outcome not in _FAILURES


_FAILURES = frozenset(outcome.value for outcome in Outcome if outcome.is_infrastructure_failure)


MAX_MODEL_LEN = 400_000  # a token is a byte here, and a prompt may be long
_MAX_OUTPUT_TOKENS = 512
_WORDS = ("1", "2", "7", "yes", "no", "A", "left", "look", "hello", "42")
_TOOL = re.compile(r"^([A-Za-z_][\w.-]*)\((.*?)\)", re.MULTILINE)  # as the tiny models' template lists it
_OPENED = re.compile(r'"arguments":\s*$')  # a prompt that begins the call itself
_VALUES: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """Settings of the probes.

    Attributes:
        env_name: the app's name of the environment. env_config: passed to the app unchanged.
        policy_name: the app's name of the policy.
        seed: of the task. max_turns: decisions of an episode.
        timeout_seconds: of one rollout.
        gateway_host: the address that the gateway listens at. gateway_url: its URL for the app; None: the same address.
    """

    env_name: str
    env_config: Mapping[str, Any] = field(default_factory=dict)
    policy_name: str = "policy"  # as in [rollout]
    seed: int = 0
    max_turns: int = 4
    timeout_seconds: float = 60.0
    gateway_host: str = "127.0.0.1"
    gateway_url: str | None = None


class Script:
    """A scripted model; `mode` is "words", "repeats", "nonsense", "nothing", "fails once" or "is down".

    `has_begun` is set when a call arrives.
    """

    def __init__(self) -> None:
        self.mode = "words"
        self.has_begun = asyncio.Event()
        self._tokenizer = tiny_tokenizer()
        self._stop = Renderer(self._tokenizer).stop_token_ids[0]
        self._num_calls = 0

    def begin(self, mode: str) -> None:
        """Switch to another mode."""
        self.mode, self._num_calls = mode, 0
        self.has_begun.clear()

    def reply(self, prompt: tuple[int, ...], _turn: int) -> Sequence[int]:
        """Return the ids of the next answer.

        Raises:
            EngineError: the mode says so.
        """
        number = self._num_calls
        self._num_calls += 1
        self.has_begun.set()
        if self.mode == "is down" or (self.mode == "fails once" and number == 0):
            raise EngineError("app check: the model fails on purpose")
        text = self._text(self._tokenizer.decode(list(prompt)), number)
        return [*self._tokenizer.encode(text, add_special_tokens=False), self._stop]

    def _text(self, prompt: str, number: int) -> str:
        if self.mode == "nothing":
            return ""
        if self.mode == "nonsense":
            return "?!" * 20
        word = _WORDS[0] if self.mode == "repeats" else _WORDS[number % len(_WORDS)]
        tools = _TOOL.findall(prompt.partition("Tools, used as")[2].partition("<|im_end|>")[0])
        if not tools:
            return word
        name, parameters = tools[0 if self.mode == "repeats" else number % len(tools)]
        call_opening = _OPENED.search(prompt)
        if call_opening:
            tool_name = re.findall(r'"name":\s*"([^"]+)"', prompt)[-1]
            parameters = dict(tools).get(tool_name, parameters)
        arguments = json.dumps(_arguments(parameters, word))
        return f"{arguments}}}\n</tool_call>" if call_opening else _call_text(name, arguments)


# As models are trained to write calls, so the app's own parser reads them.
def _call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _arguments(parameters: str, word: str) -> dict[str, Any]:
    # From the tiny models' template, which lists tools as `name(parameter: type, ...)`.
    parameter_types = re.findall(r"([\w.-]+)(?::\s*([\w\[\]', ]+?))?(?:,\s|$)", parameters)
    return {name: _VALUES.get(kind, word) for name, kind in parameter_types}


@dataclass(frozen=True, slots=True)
class _Probe:
    name: str
    mode: str
    description: str
    judge: Callable[[ProbeReport], ProbeReport] = lambda report: report


def _may_give_up(report: ProbeReport) -> ProbeReport:
    # Not asking again and failing costs an attempt, and is no mistake.
    if is_result(report):
        return report
    return replace(report, problems=(), notices=("the app gives up when a call of the model fails once (HTTP 503)",))


def _must_have_no_result(report: ProbeReport) -> ProbeReport:
    # A return without a model would be learned from as if the policy had earned it.
    if report.episode_return is not None:
        return replace(report, problems=("the model was never there, and the episode has a return all the same",))
    app_return = report.app_return
    notices = (
        ()
        if app_return is None
        else (f"the app makes up a return of {app_return:g} without a model; it is not believed",)
    )
    return replace(report, problems=(), notices=notices)


_PROBES = (
    _Probe("words", "words", "a model that says another plausible word in every turn"),
    _Probe("repeats", "repeats", "a model that says the same in every turn"),
    _Probe("nonsense", "nonsense", "a model that says what means nothing"),
    _Probe("nothing", "nothing", "a model that says nothing at all"),
    _Probe("model fails once", "fails once", "a model whose first call fails with 503", _may_give_up),
    _Probe("model is down", "is down", "a model of which every call fails with 503", _must_have_no_result),
)


async def check_app(url: str, settings: CheckSettings, *, keys: AppKeys | None = None) -> tuple[ProbeReport, ...]:
    """Play all probes against the app at `url`, one after another; `keys` are sent to it.

    Raises:
        AppError: the app cannot be reached, or refuses our calls. ConfigError: the gateway cannot listen.
    """
    script = Script()
    engine = ScriptedEngine(script.reply, max_model_len=MAX_MODEL_LEN)
    gateway = Gateway(engine, tiny_tokenizer())
    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(TaskAppClient(url, keys=keys))
        await app.health()
        server = LoopServer(create_gateway_app(gateway), host=settings.gateway_host, port=0, has_key=True)
        await server.start()
        stack.push_async_callback(server.stop)
        stack.push_async_callback(gateway.close)
        checker = _Checker(app, gateway, script, settings, settings.gateway_url or server.url)
        reports = [await checker.probe(probe) for probe in _PROBES]
        return (*reports, await checker.hang_up())


class _Checker:
    def __init__(
        self, app: TaskAppClient, gateway: Gateway, script: Script, settings: CheckSettings, gateway_url: str
    ) -> None:
        self._app, self._gateway, self._script, self._settings = app, gateway, script, settings
        session = GatewaySessionSettings(
            "", sampling_seed=0, max_output_tokens=_MAX_OUTPUT_TOKENS, max_model_len=MAX_MODEL_LEN
        )
        self._episodes = AppEpisodeSettings(
            env_name=settings.env_name,
            session=session,
            model="policy",
            gateway_url=gateway_url,
            policy_name=settings.policy_name,
            max_turns=settings.max_turns,
            env_config=settings.env_config,
            episode_timeout_seconds=settings.timeout_seconds,
            max_tries=1,
        )

    async def probe(self, probe: _Probe) -> ProbeReport:
        self._script.begin(probe.mode)
        answers: list[AppRollout] = []
        episodes = AppEpisodes(self._app, self._gateway, self._episodes, on_answer=answers.append)
        task = Task(self._settings.env_name, self._settings.seed)
        name = f"app-check/{probe.mode.replace(' ', '-')}"
        trajectory = await episodes.play(EpisodeRequest(name, task, sampling_seed=0))
        report = report_of(
            probe.name, probe.description, trajectory, episodes.counters, answers[-1] if answers else None
        )
        if is_result(report):
            return probe.judge(report)
        if (death := await self._death()) is not None:
            return replace(report, problems=(death,))
        # An app that never called the model failed by another cause than the probe's.
        return probe.judge(report) if self._script.has_begun.is_set() else report

    async def _death(self) -> str | None:
        try:
            await self._app.health()
        except AppError as error:
            return f"the app has died: {error}"
        return None

    async def hang_up(self) -> ProbeReport:
        """Leave in the middle of a rollout, and play another one."""
        description = "a trainer that hangs up in the middle of a rollout and then asks for another one"
        again = _Probe("trainer hangs up", "words", description)
        leaving = asyncio.ensure_future(self.probe(again))
        first_call = asyncio.ensure_future(self._script.has_begun.wait())
        await asyncio.wait([leaving, first_call], return_when=asyncio.FIRST_COMPLETED)
        # Both, because the app may be dead and never call.
        for task in (leaving, first_call):
            task.cancel()
        await asyncio.gather(leaving, first_call, return_exceptions=True)
        if (death := await self._death()) is not None:
            return ProbeReport(again.name, description, "env_error", death, problems=(death,))
        return await self.probe(again)
