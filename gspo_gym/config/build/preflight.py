"""Check the needs of a run besides a valid configuration, before anything is loaded.

They are the model's files, devices, packages, keys, environments and the judge. Training begins with `require_ready`,
and `gspo-gym config check` prints what `find_obstacles` finds, so both say the same. `rehearse` builds everything and
plays one scripted episode of each environment, and asks a teacher's endpoint. Nothing else here contacts a service.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gspo_gym.base.leftovers import in_temporary_folder
from gspo_gym.base.loops import Result
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.apps import check_apps, environment_ids
from gspo_gym.config.build.conversations import build_renderers, read_template
from gspo_gym.config.build.engines import check_context, check_engine
from gspo_gym.config.build.episode_collection import ENDPOINT, SCRIPTED, endpoint_settings
from gspo_gym.config.build.estimate import Estimate, estimate_step
from gspo_gym.config.build.feedback import build_feedback
from gspo_gym.config.build.judge import build_judging
from gspo_gym.config.build.processes import launching
from gspo_gym.config.build.reference import check_reference, check_teacher, dedicated_reference
from gspo_gym.config.build.rollouts import (
    Player,
    build_scripted_evaluate,
    build_training_player,
    build_warmup,
    check_warmup,
    environment_notes,
    local_play,
    looking_at_source,
)
from gspo_gym.config.build.teacher import find_teacher, teachers_model
from gspo_gym.config.build.threads import compute_in, computing_elsewhere
from gspo_gym.config.run_config import RunConfig, model_name
from gspo_gym.config.sections import TaskSource
from gspo_gym.config.services import refuse_to_run, refuse_to_train
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.env.chat_model import ChatModel
from gspo_gym.env.checks.checker import require_replayable
from gspo_gym.env.core import PolicyFactory
from gspo_gym.errors import ConfigError, GymError, TemplateError
from gspo_gym.learning.optimizer import check_kind
from gspo_gym.policy.bases import check_base, known_context
from gspo_gym.policy.options import check_options
from gspo_gym.policy.quantization import check_quantization
from gspo_gym.rollout.actors import ActRequest, ScriptedActor
from gspo_gym.rollout.episode import EpisodeRequest
from gspo_gym.run.models import find_model
from gspo_gym.run.sinks import check_sinks
from gspo_gym.seeding import FIRST_TRAINING_SEED, child_seed, training_seed
from gspo_gym.types import Completion, Message, Task, Trajectory


async def find_obstacles(config: RunConfig, *, base: str | None = None) -> list[GymError]:
    """Return the reasons why a run of this configuration would not start, as far as known without loading a model.

    `base` is loaded in place of the configuration's model: a checkpoint to go on from.
    """
    obstacles = await _failures(config, _checks(config, base))
    with _collecting(obstacles):
        await check_warmup(config)
    # It plays some episodes, which is not worth it for a run that cannot start.
    for source in config.sources if config.rollout.forks_per_episode and not obstacles else ():
        with _collecting(obstacles):
            require_replayable(
                source.env_name,
                env_config=source.env_config,
                seeds=[training_seed(config.run.seed, number) for number in range(2)],
                max_turns=config.training_limits.max_turns,
            )
    return _without_repeats(obstacles)


async def find_evaluation_obstacles(config: RunConfig, name: str) -> list[GymError]:
    """Return the reasons why an evaluation would not start, as far as known without loading a model.

    `name` is a player as for `evaluate --model`.
    """
    is_scripted, is_endpoint = name.startswith(SCRIPTED), name.startswith(ENDPOINT)
    if not is_scripted and not is_endpoint:
        return _without_repeats(await _failures(config, _evaluation_checks(config, name)))
    checks = (
        lambda: refuse_to_run(config.sections),
        lambda: check_base(model_name(config)),
        lambda: read_template(config),
    )
    obstacles = await _failures(config, checks)
    with _collecting(obstacles):
        renderers = build_renderers(config, None)  # no tokenizer: nothing is rendered
        await build_scripted_evaluate(config, renderers, name.removeprefix(SCRIPTED) if is_scripted else _greets)
    with _collecting(obstacles):
        if is_endpoint:
            await ChatModel(endpoint_settings(name, sampling=config.evaluation_sampling, max_tokens=1)).close()
    return _without_repeats(obstacles)


async def _failures(config: RunConfig, checks: Sequence[Callable[[], object]]) -> list[GymError]:
    # Besides, each environment here and the judge are made: they may raise as well.
    obstacles: list[GymError] = []
    for check in checks:
        with _collecting(obstacles):
            check()
    for source in [source for source in config.sources if source.task_url is None]:
        with _collecting(obstacles):
            async with looking_at_source(config, source):
                pass
    with _collecting(obstacles):
        if (judging := build_judging(config)) is not None:
            await judging.close()
    return obstacles


async def require_ready(config: RunConfig, *, base: str | None = None) -> tuple[str, ...]:
    """Refuse to start a run that would fail; return a line for each setting without effect.

    Raises:
        GymError: the only obstacle; or a ConfigError that lists several.
    """
    _raise_all(await find_obstacles(config, base=base))
    return tuple(f"{notice.key}: {notice.text}" for notice in config.notices)


async def require_ready_to_evaluate(config: RunConfig, names: Sequence[str]) -> None:
    """Refuse to start evaluations of these players if one of them would fail.

    Raises:
        GymError: as `require_ready`.
    """
    _raise_all(_without_repeats([o for name in names for o in await find_evaluation_obstacles(config, name)]))


def _raise_all(obstacles: Sequence[GymError]) -> None:
    if len(obstacles) == 1:
        raise obstacles[0]
    if obstacles:
        raise ConfigError(f"{len(obstacles)} things stand in the way:\n  " + "\n  ".join(map(str, obstacles)))


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of a rehearsal: lines about apps and environments, and a scripted episode of each environment here.

    `estimate`: of a step; None where a task app plays, or several processes share the work.
    """

    notes: tuple[str, ...]
    episodes: tuple[Trajectory, ...]
    estimate: Estimate | None


async def rehearse(config: RunConfig) -> Rehearsal:
    """Build all objects of a training, except the run's folder; play one scripted episode of each environment here.

    Task apps are checked, and play the probe rollouts with which training begins. A teacher behind an endpoint proves
    its vocabulary and scores a few tokens.

    Raises:
        GymError: as `require_ready`, or any error of building.
    """
    await require_ready(config)
    with in_temporary_folder("gspo_gym-rehearsal-") as folder:
        # A rehearsal leaves nothing behind, and may be made while the run's folder is in use.
        config = _moved(config, folder)
        async with contextlib.AsyncExitStack() as stack:
            num_threads = stack.enter_context(computing_elsewhere(build.drivers_device(config)))
            policy = build.build_policy(config)
            teacher = await find_teacher(config, policy)
            player = await build_training_player(config, policy, stack.enter_context(launching(config)))
            stack.push_async_callback(player.close)
            judging = build_judging(config, None if player.apps is None else player.apps.rubric_of)
            if judging is not None:
                stack.push_async_callback(judging.close)
            await build_warmup(config, player)
            await build_feedback(config, player, judging)
            notes = (
                *await player.start(),
                *await player.probe_apps(),
                *await environment_notes(config, player.renderers),
            )
            await compute_in(player.engine, policy.model, num_threads)
            compute = player.engine.compute if isinstance(player.engine, LocalEngine) else _here
            estimate = await estimate_step(config, player, compute)
            reference = stack.enter_context(
                dedicated_reference(config, policy, build.drivers_device(config), num_threads)
            )
            build.build_learner(config, policy, reference, teacher=teacher)
            results = [
                await _play_scripted(config, player, source, env_id)
                for env_id, source in zip(environment_ids(config), config.sources, strict=True)
                if source.task_url is None
            ]
    episodes = tuple(result for result in results if isinstance(result, Trajectory))
    return Rehearsal((*notes, *(result for result in results if isinstance(result, str))), episodes, estimate)


def _moved(config: RunConfig, folder: str) -> RunConfig:
    """Return the configuration of a run in another folder, with the models that it names by runs of its own folder."""
    found_model = {"base": model_name(config), "source": None, "revision": None}
    changes = {
        "run": config.run.model_copy(update={"folder": folder}),
        "model": config.model.model_copy(update=found_model),
    }
    if config.distillation is None or not config.distillation.is_model_here:
        return config.model_copy(update=changes)
    teacher = config.distillation.model_copy(update={"teacher": teachers_model(config).base})
    return config.model_copy(update={**changes, "distillation": teacher})


async def _here(work: Callable[[], Result], /) -> Result:
    return work()


def _checks(config: RunConfig, base: str | None) -> Sequence[Callable[[], object]]:
    model = config.model
    return (
        lambda: refuse_to_train(config.sections),
        lambda: check_reference(config),
        lambda: check_base(base or model_name(config)),
        lambda: check_teacher(config, base or model_name(config)),
        lambda: read_template(config),
        lambda: check_options(
            device=build.device_of(config),
            torch_compile=model.torch_compile,
            liger_kernels=model.liger_kernels,
            attn_implementation=model.attn_implementation,
        ),
        lambda: check_quantization(build.device_of(config)) if model.trainer_mode == "qlora" else None,
        lambda: check_kind(config.optimizer.kind, torch.device(build.device_of(config))),
        lambda: build.build_plan(config),
        lambda: check_engine(config),
        lambda: check_context(config, *known_context(base or model_name(config))),
        lambda: check_apps(config),
        lambda: check_sinks(config.tracking.report_to),
    )


def _evaluation_checks(config: RunConfig, name: str) -> Sequence[Callable[[], object]]:
    runs = Path(config.run.folder)
    return (
        lambda: refuse_to_run(config.sections),
        lambda: check_base(find_model(name, runs=runs).base),
        lambda: read_template(config),
        lambda: check_options(device=build.device_of(config), attn_implementation=config.model.attn_implementation),
        lambda: check_engine(config),
        lambda: check_context(config, *known_context(find_model(name, runs=runs).base)),
        lambda: check_apps(config),
    )


async def _play_scripted(config: RunConfig, player: Player, source: TaskSource, env_id: str) -> Trajectory | str:
    """Return a scripted episode, or a line that says why this model's template has no words for it.

    Training needs none, as the model speaks for itself; what a warm-up needs, `build_warmup` has checked.
    """
    async with looking_at_source(config, source) as env:
        # An environment without policies of its own is at least reset, answered once and closed.
        policies = getattr(env, "policies", None) or {"greeting": _greets}
        make_policy: PolicyFactory = next(iter(policies.values()))
    actor = _Speaker(make_policy)
    play = local_play(config, player.renderers, actor, source=source)
    task = Task(env_id, FIRST_TRAINING_SEED)
    trajectory = await play(EpisodeRequest("rehearsal", task, child_seed(config.run.seed, "rehearsal")))
    if trajectory.error is not None and actor.unsayable is not None:
        return f"{source.env_name}: no scripted episode was played: {actor.unsayable}"
    if trajectory.error is not None:
        raise ConfigError(
            f"{source.key}: a scripted episode of {source.env_name} ended as {trajectory.outcome.value}: "
            f"{trajectory.error}"
        )
    return trajectory


class _Speaker(ScriptedActor):
    """Scripted actor that keeps the template's refusal of a message in `unsayable`."""

    unsayable: TemplateError | None = None

    async def __call__(self, request: ActRequest) -> Completion:
        try:
            return await super().__call__(request)
        except TemplateError as error:
            self.unsayable = error
            raise


def _greets(env: object, generator: np.random.Generator) -> Callable[[Sequence[Message]], str]:
    del env, generator
    return lambda _messages: "Hello."


@contextlib.contextmanager
def _collecting(obstacles: list[GymError]) -> Iterator[None]:
    try:
        # All of them are wanted at once; other exceptions are bugs.
        yield
    except GymError as error:
        obstacles.append(error)


def _without_repeats(obstacles: Sequence[GymError]) -> list[GymError]:
    return list({str(error): error for error in reversed(obstacles)}.values())[::-1]
