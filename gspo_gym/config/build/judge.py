"""Build the objects of [judge]: judges, rubrics, the blend and the watch over it.

No judge is asked here. Missing rubrics, functions and keys are errors before a run begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.retries import RetrySettings
from gspo_gym.config.rules.judge import judge_kind
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.judge.asking import AskingSettings, BudgetLimits, JudgeBudget, JudgementCache
from gspo_gym.judge.base import Judge, JudgeError, Rubrics
from gspo_gym.judge.blend import EnvRewards, env_rewards
from gspo_gym.judge.gold import GoldWatch, against_judge, against_labels, labelled_episodes, read_labels
from gspo_gym.judge.http import HttpJudge
from gspo_gym.judge.model.judge import ModelJudge
from gspo_gym.judge.panel import PanelJudge, PythonJudge
from gspo_gym.judge.records import RubricsOf
from gspo_gym.judge.rubric_files import load_rubrics
from gspo_gym.judge.settings import GoldSettings, JudgeModelSettings, JudgeOptions, JudgeSettings, ModelJudgeSettings
from gspo_gym.learning.credit import turn_rewards
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.rollout.limits import ScoringLimits
from gspo_gym.run.judging import Judging, OnEventOfStep
from gspo_gym.seeding import child_seed
from gspo_gym.types import Task

if TYPE_CHECKING:  # the recorder loads torch, which a judge does not need
    from gspo_gym.run.recording import RunRecorder
    from gspo_gym.run.report.progress import Progress

# The rubric in a task's own task_info; None: it has none.
TaskRubric = Callable[[Task], Awaitable[Mapping[str, Any] | None]]

_DEFAULT_TIMEOUT_SECONDS = 30.0
_DEFAULT_CONCURRENCY = 8
MAX_ATTEMPTS = 4  # of a call; with the delays between them they outlast a short failure, and the run pauses after it
_COOL_DOWN_SECONDS = 1.0  # `PausingJudge` waits longer and longer by itself
_NUM_GOLD_EPISODES = 32  # of an iteration, that a gold judge scores: more than a handful, and few calls


def build_judging(config: RunConfig, task_rubric: TaskRubric | None = None) -> Judging | None:
    """Return the judge of a run, or None if [judge] is not enabled. The caller closes it.

    `task_rubric` finds a task app's rubric for a task, which replaces the configuration's.

    Raises:
        ConfigError, UnknownNameError: a rubric, a key, a function or the labels are missing or not valid.
        MissingExtraError: a package is not installed.
    """
    section = config.judge
    if section is None or not section.enabled:
        return None
    parts = _Parts(config, section)
    rubrics_of = build_rubrics(config, task_rubric)
    judging = Judging(
        parts.judge(cached=True),
        rubrics_of,
        section.blend,
        limits=ScoringLimits(),
        rewards=_env_rewards(config),
        budget=parts.budget,
        compares_groups=parts.options.mode == "group",
    )
    judging.close_too(parts.cache)
    if section.gold is not None:
        _watch(judging, parts, section.gold, rubrics_of)
    return judging


@dataclass(frozen=True, slots=True)
class JudgeVariants:
    """Judges of a configuration outside a run: as configured, and as an audit asks. They share one budget.

    Attributes:
        judge: as in training.
        repeats: further samples of it, without a cache.
        in_given_order: without a cache, and showing criteria in the rubric's order.
    """

    judge: Judge
    repeats: tuple[Judge, ...]
    in_given_order: Judge


@contextlib.asynccontextmanager
async def judge_variants(config: RunConfig, *, num_repeats: int = 0) -> AsyncIterator[JudgeVariants]:
    """Yield the judges of [judge], enabled or not, for commands that judge stored episodes; close them afterwards.

    Raises:
        ConfigError, MissingExtraError: as `build_judging`; or there is no [judge].
    """
    if config.judge is None:
        raise ConfigError("there is no [judge] in the configuration, so nobody to ask; add it with its options")
    parts = _Parts(config, config.judge)
    per_judge = parts.options.samples  # repeats are numbered after these
    repeats = [parts.judge(cached=False, first_sample=per_judge * (number + 1)) for number in range(num_repeats)]
    judge, in_given_order = parts.judge(cached=True), parts.judge(cached=False, shuffles_criteria=False)
    try:
        yield JudgeVariants(judge, tuple(repeats), in_given_order)
    finally:
        for variant in (judge, *repeats, in_given_order):
            await variant.close()


def rewards_of_turns(config: RunConfig) -> StepRewardSettings:
    """Return the step rewards that the learner computes: the file's, unless the blend contains them already."""
    is_blended = config.judge is not None and config.judge.enabled
    settings = config.step_reward_settings
    return StepRewardSettings() if is_blended and settings.mode == "decision_stepwise" else settings


def _env_rewards(config: RunConfig) -> EnvRewards:
    # Step rewards replace the environment's here, before the judge's part is added: the learner, which otherwise
    # computes them, would throw that part away.
    settings = config.step_reward_settings
    if settings.mode != "decision_stepwise":
        return env_rewards
    return lambda trajectory: turn_rewards(trajectory, settings)


def build_rubrics(config: RunConfig, task_rubric: TaskRubric | None = None) -> RubricsOf:
    """Return a function from a task to its rubrics: those of [judge.options], with the task's own in place of them.

    Raises:
        ConfigError, UnknownNameError: a rubric is missing or not valid.
    """
    section = config.judging
    options = section.options or JudgeOptions()
    judge_url = config.endpoints.judge_url
    is_asked_elsewhere = judge_kind(section, judge_url) == "synth"
    # Then what is laid over the rubric is sent with the id, and laid over it there.
    is_known_elsewhere = is_asked_elsewhere and options.known_rubric is not None

    def load(own: Mapping[str, Any] | None) -> Rubrics:
        rubrics = load_rubrics(
            options.rubric_file if is_asked_elsewhere else options.rubric_id,
            overrides=None if is_known_elsewhere else _as_read(options.rubric_overrides) or None,
            task=None if is_known_elsewhere else own,
        )
        return _of_options(rubrics, options, may_be_absent=is_asked_elsewhere)

    of_configuration = load(None)

    async def rubrics_of(task: Task) -> Rubrics:
        try:
            own = None if task_rubric is None else await task_rubric(task)
            return of_configuration if own is None else load(own)
        except (ServiceError, ConfigError) as error:
            # A task without its rubric cannot be scored: its episode is treated as after any failed judgement.
            raise JudgeError(f"the rubric of task {task.task_id} itself: {error}") from error

    return rubrics_of


def _as_read(value: Any) -> Any:
    # TOML's lists were made tuples for the strict fields; a rubric's own reader wants lists.
    if isinstance(value, Mapping):
        return {key: _as_read(entry) for key, entry in value.items()}
    return [_as_read(entry) for entry in value] if isinstance(value, list | tuple) else value


def _of_options(rubrics: Rubrics, options: JudgeOptions, *, may_be_absent: bool) -> Rubrics:
    for part, is_judged in (("event", options.event), ("outcome", options.outcome)):
        if is_judged and part not in rubrics.parts and not may_be_absent:
            raise ConfigError(
                f"judge.options.{part}: true, but the rubric has no part {part!r}; add one, for example under "
                f"judge.options.rubric_overrides.{part}, or set false"
            )
    own_rubrics = Rubrics(
        event=rubrics.event if options.event else None, outcome=rubrics.outcome if options.outcome else None
    )
    # A judge behind a URL may have a rubric of its own, and nothing to check is known here.
    if may_be_absent and not own_rubrics.parts:
        return own_rubrics
    return own_rubrics.only_tracks(options.tracks).with_track_weights(options.weights)


_NOTES = {
    "judge_paused": "the run is paused, because the judge {judge} is down; it goes on by itself. {reason}",
    "judge_resumed": "the judge {judge} is back after {seconds:.0f} seconds, and the run goes on",
    "judge_gold_failed": "the judge could not be compared with gold: {reason}",
    "judge_drift": "DRIFT of the judge: {reason}",
}


def tell_recorder(recorder: RunRecorder, progress: Progress) -> OnEventOfStep:
    """Return a function that writes the judge's events into the run's and shows the important ones."""

    def tell(kind: str, step: int, data: Mapping[str, Any]) -> None:
        recorder.event(kind, step, data)
        if kind in _NOTES:
            progress.note(_NOTES[kind].format(**data))

    return tell


class _Parts:
    """The objects that a configuration's judges share: the budget, the cache and the limits of asking."""

    def __init__(self, config: RunConfig, section: JudgeSettings) -> None:
        options = section.options or JudgeOptions()
        self.section = section
        self.options = options
        self.seed = child_seed(config.run.seed, "judge")
        self.judge_url = config.endpoints.judge_url
        self.policy_name = config.rollout.policy_name
        self.evaluation_interval = config.evaluation.every_n_iters
        self.budget = JudgeBudget(BudgetLimits(max_calls=options.max_calls, max_usd=options.max_cost_usd))
        self.cache = JudgementCache(None if options.cache is None else Path(options.cache))
        self.asking = AskingSettings(
            max_concurrency=options.max_concurrency or _DEFAULT_CONCURRENCY,
            timeout_seconds=section.timeout_s or _DEFAULT_TIMEOUT_SECONDS,
            retries=RetrySettings(max_attempts=MAX_ATTEMPTS, first_delay_seconds=0.5, max_delay_seconds=20.0),
            cool_down_seconds=_COOL_DOWN_SECONDS,
            seed=self.seed,
        )

    def judge(self, *, cached: bool, first_sample: int = 0, shuffles_criteria: bool = True) -> Judge:
        """Return the judge used in training; a panel if it has several members or samples."""
        options, section = self.options, self.section
        # The members differ, or the samples of one member.
        kind = judge_kind(section, self.judge_url)
        if kind == "synth":
            assert self.judge_url is not None  # the rules have seen to it
            return HttpJudge(
                self.judge_url,
                options,
                asking=self.asking,
                policy_name=self.policy_name,
                cache=self.cache if cached else None,
                budget=self.budget,
            )
        members: Sequence[JudgeModelSettings] = section.panel or (options,)
        judges = [
            self.one_judge(member, sample=first_sample + sample, cached=cached, shuffles_criteria=shuffles_criteria)
            for member in members
            for sample in range(1 if member.python else options.samples)
        ]
        return judges[0] if len(judges) == 1 else PanelJudge(judges)

    def one_judge(
        self, member: JudgeModelSettings, *, sample: int = 0, cached: bool, shuffles_criteria: bool = True
    ) -> Judge:
        """Return the judge of one member: a model or a function."""
        if member.python is not None:
            return PythonJudge(
                member.python,
                max_concurrency=self.asking.max_concurrency,
                timeout_seconds=self.asking.timeout_seconds,
            )

        settings = ModelJudgeSettings(
            member, self.options, shuffles_criteria=shuffles_criteria, sample=sample, seed=self.seed, asking=self.asking
        )
        return ModelJudge(settings, cache=self.cache if cached else None, budget=self.budget)


def _watch(judging: Judging, parts: _Parts, gold: GoldSettings, rubrics_of: RubricsOf) -> None:
    weights = parts.section.blend
    if gold.episodes is not None and gold.labels is not None:
        gold_episodes = labelled_episodes(read_episodes(Path(gold.episodes)), read_labels(Path(gold.labels)))
        # Not cached: a stored answer would hide a drift.
        judge = parts.judge(cached=False)
        compare = against_labels(judge, rubrics_of, weights, gold_episodes)
    else:
        judges = [parts.one_judge(member, cached=True) for member in gold.panel]
        judge = judges[0] if len(judges) == 1 else PanelJudge(judges)
        compare = against_judge(judge, rubrics_of, weights, _NUM_GOLD_EPISODES, parts.seed)
    stops = gold.on_drift == "stop"
    judging.watch(GoldWatch(compare, every=parts.evaluation_interval, stops=stops, on_event=judging.tell))
    judging.close_too(judge)
