"""Compose a training from its configuration: hold the folder, build, warm up or restore, train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gspo_gym.cluster.actors import Cluster
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.compute import start_compute
from gspo_gym.config.build.continuation import find_restored, find_resumed
from gspo_gym.config.build.conversations import record_template, with_fixed_date, with_recorded_date
from gspo_gym.config.build.engines import build_weight_sync
from gspo_gym.config.build.estimate import estimate_step
from gspo_gym.config.build.feedback import build_feedback
from gspo_gym.config.build.judge import build_judging
from gspo_gym.config.build.preflight import require_ready
from gspo_gym.config.build.processes import launching, learning
from gspo_gym.config.build.reference import dedicated_reference
from gspo_gym.config.build.rollouts import Player, build_training_player, build_warmup, environment_notes
from gspo_gym.config.build.teacher import FoundTeacher, find_teacher
from gspo_gym.config.build.threads import computing_elsewhere
from gspo_gym.config.run_config import RunConfig
from gspo_gym.errors import ConfigError
from gspo_gym.learning.update import AnyLearner
from gspo_gym.policy.checkpoints import CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.policy.manifest import Origin, RetentionSettings
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.pool import RolloutPool
from gspo_gym.rollout.schedule import is_played_again
from gspo_gym.run.callbacks import STOPPED_BY, CallbackSink
from gspo_gym.run.collect import WarmupPlan, warm_up
from gspo_gym.run.feedback import Feedback
from gspo_gym.run.judging import Judging
from gspo_gym.run.process import Phases, holding
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import TEACHER_EVENT, read_run_id, read_summary, teacher_text
from gspo_gym.run.registry import folder_of_a_new_run, has_checkpoint, why_taken
from gspo_gym.run.report.progress import Progress
from gspo_gym.run.session import (
    Session,
    Start,
    close_recorder,
    record_lost_ranks,
    record_resumption,
    run_until_stopped,
    train_to_end,
)
from gspo_gym.run.sinks import Sink
from gspo_gym.run.steering import Steering


@dataclass(frozen=True, slots=True)
class Orders:
    """What the caller of a training decides besides its settings.

    Attributes:
        resume: go on from the newest checkpoint; "auto": begin where there is none.
        set_aside: move an earlier run of the same folder away.
        console: where progress is printed, with an estimate of a step that costs a second; None: nowhere.
        page: returns the page of a run's folder, with a status, as HTML.
        callbacks: called with the numbers of each step.
        sinks: of the caller, beside those of [tracking]; closed at the end.
    """

    resume: bool | Literal["auto"]
    set_aside: bool
    console: Console | None
    page: Callable[[Path, str], str]
    callbacks: CallbackSink | None = None
    sinks: tuple[Sink, ...] = ()


def execute(config: RunConfig, orders: Orders) -> dict[str, Any]:
    """Train and return the contents of summary.json; see `cli.train.run_training`."""
    folder = config.run_folder
    if orders.resume == "auto":
        # What an earlier start left without a checkpoint is nothing to go on from, and is kept all the same.
        is_resumed = has_checkpoint(folder)
        orders = replace(orders, resume=is_resumed, set_aside=orders.set_aside or not is_resumed)
    if not orders.resume and not orders.set_aside and (reason := why_taken(folder)):
        raise ConfigError(reason)
    steering = Steering(config.run.stop_grace_seconds, Phases(folder))
    callbacks = orders.callbacks
    if callbacks is not None:
        callbacks.request_stop = steering.stop
    try:
        return run_until_stopped(partial(_run, config, orders), steering, orders.console)
    except KeyboardInterrupt:
        if callbacks is None or steering.stopped_by != STOPPED_BY:
            raise
        if callbacks.error is not None:
            raise callbacks.error from None
        return read_summary(folder)


async def _run(config: RunConfig, orders: Orders, session: Session) -> dict[str, Any]:
    """Train; a new run that fails before its first evaluation leaves everything as it was."""
    folder, progress = config.run_folder, session.progress
    config, gpus = build.on_visible_gpus(config)
    if gpus is not None:
        progress.note(gpus)
    async with session.stack as stack:
        if not orders.resume:
            begin = stack.enter_context(folder_of_a_new_run(folder, progress))
            stack.enter_context(session.steering.heeding_files(folder))
            return await _train(config, orders, session, find_restored(config) or Start(), begin)
        if not (folder / "config.toml").exists():
            _checkpoints(config).load_latest()  # says what there is not
            raise ConfigError(f"{folder}: there is no run to resume (no config.toml)")
        begin = stack.enter_context(holding(folder, progress.note, has_begun=True))
        stack.enter_context(session.steering.heeding_files(folder))
        config = with_recorded_date(config)
        return await _train(config, orders, session, find_resumed(config, _checkpoints(config)), begin)


@dataclass(frozen=True, slots=True)
class _Players:
    """What plays and scores the episodes of a training.

    Attributes:
        config: of the run, with the date that its conversations show.
        cluster, num_threads: of the processes and threads that compute.
        judging: None: the environments score their episodes.
        teacher: None: there is none.
        feedback: of a teacher that reads it; None: there is no such teacher.
        warmup: None: there is none, or it is over.
        notes: for a person.
    """

    config: RunConfig
    cluster: Cluster | None
    num_threads: int
    policy: Policy
    player: Player
    judging: Judging | None
    teacher: FoundTeacher | None
    feedback: Feedback | None
    warmup: tuple[RolloutPool, WarmupPlan] | None
    notes: tuple[str, ...]


async def _train(
    config: RunConfig, orders: Orders, session: Session, start: Start, begin: Callable[[], None]
) -> dict[str, Any]:
    """Build all that trains, call `begin` when there is something to keep, and train."""
    progress = session.progress
    players = await _build_players(config, session, start)
    config, player = players.config, players.player
    callbacks = () if orders.callbacks is None else (orders.callbacks,)
    recorder = _build_recorder(config, start, (*orders.sinks, *callbacks))
    session.stack.callback(close_recorder, recorder, orders.page)
    for line in players.notes:
        progress.note(line)
    if start.is_resumed:
        interval = config.training.log_interval
        record_resumption(start, recorder, progress, _checkpoints(config), log_interval=interval)
    weight_sync = build_weight_sync(config, players.policy, player.engine, recorder)
    session.stack.callback(weight_sync.close)
    compute = await start_compute(
        config, player, num_threads=players.num_threads, recorder=recorder, progress=progress, stack=session.stack
    )
    player = replace(player, compute=compute)
    _record_who_samples(config, player, recorder, progress, step=start.step)
    if players.teacher is not None:
        recorder.event(TEACHER_EVENT, start.step, dict(players.teacher.facts))
        progress.note(f"taught by {teacher_text(players.teacher.facts)}")
    if not start.is_resumed:
        await weight_sync.attest()
        if orders.console is not None and (estimate := await estimate_step(config, player, compute)) is not None:
            progress.note(f"estimate: {estimate}")
        await _warm_up(replace(players, player=player), recorder, weight_sync, session)
    learner = _enter_learner(players, recorder, session)
    start.restore(learner)
    if start.is_resumed or start.step:
        await weight_sync.publish(start.step)
    start.record(recorder, progress)
    session.steering.attach()  # from here on, a stop saves what there is
    begin()
    trainer = build.build_trainer(
        config,
        player,
        learner=learner,
        recorder=recorder,
        checkpoints=_checkpoints(config, Origin.of_this_process(config.to_toml(), parent=start.parent)),
        progress=progress,
        state=start.state,
        weight_sync=weight_sync,
        judging=players.judging,
        feedback=players.feedback,
        steering=session.steering,
        is_saved=start.is_resumed,
    )
    return await train_to_end(
        trainer,
        recorder,
        session,
        judging=players.judging,
        rescored=config.rollout.rescore,
        step_timeout_seconds=config.limits.step_timeout_seconds,
    )


async def _build_players(config: RunConfig, session: Session, start: Start) -> _Players:
    """Build and start what plays and scores, closed with the session."""
    stack, progress = session.stack, session.progress
    notices = await require_ready(config, base=start.base)
    for line in () if start.is_resumed else notices:
        progress.note(line)
    cluster = stack.enter_context(launching(config))
    num_threads = stack.enter_context(computing_elsewhere(build.drivers_device(config)))
    policy = build.build_policy(config, start.base)
    # Before anything is played that it could not score.
    teacher = await find_teacher(config, policy, is_resumed=start.is_resumed)
    if not start.is_resumed and (dated_config := with_fixed_date(config, policy.tokenizer)) is not config:
        config, date = dated_config, dated_config.model.template_date
        progress.note(f"the chat template shows today's date, which is {date} for the whole run (model.template_date)")
    with session.steering.phases.during("starting the engine"):
        player = await build_training_player(config, policy, cluster)
    stack.push_async_callback(player.close)
    judging = build_judging(config, None if player.apps is None else player.apps.rubric_of)
    if judging is not None:
        stack.push_async_callback(judging.close)
    warmup = None
    if not start.is_resumed:
        warmup = await build_warmup(config, player, partial(session.steering.phases.advance, "warming up"))
    notes = list(await player.start())
    if not start.is_resumed:
        notes += await player.probe_apps()
    notes += await environment_notes(config, player.renderers)
    feedback = await build_feedback(config, player, judging)  # before a warm-up: it may refuse the chat template
    return _Players(config, cluster, num_threads, policy, player, judging, teacher, feedback, warmup, tuple(notes))


def _build_recorder(config: RunConfig, start: Start, more_sinks: Sequence[Sink]) -> RunRecorder:
    """Begin the records of a new run, or go on with those of a resumed one."""
    folder, name = config.run_folder, config.rollout.policy_name
    if not start.is_resumed:
        sinks = [*build.build_sinks(config), *more_sinks]
        recorder = RunRecorder.create(folder, config.to_toml(), policy_name=name, sinks=sinks)
        record_template(config)
        return recorder
    state = start.state
    assert state is not None
    played_again = partial(
        is_played_again, step=state.step, num_tasks=state.num_tasks, pending_tasks=state.pending_tasks
    )
    return RunRecorder.resume(
        folder,
        state.step,
        saved_seq=state.last_seq,
        is_played_again=played_again,
        policy_name=name,
        sinks=[*build.build_sinks(config, resume_step=state.step), *more_sinks],
    )


async def _warm_up(players: _Players, recorder: RunRecorder, weight_sync: WeightSync, session: Session) -> None:
    """Train on demonstrations, if the run has a warm-up, and make the engine sample with the weights."""
    if players.warmup is None:
        return
    phases = session.steering.phases
    pool, plan = players.warmup
    model, compute = players.policy.model, players.player.compute
    with phases.during("warming up"):
        report = await warm_up(model, pool, plan, session.progress, compute=compute, phases=phases)
    await weight_sync.publish(0)
    recorder.event("warmup", 0, {"epoch_losses": list(report.epoch_losses), "num_tokens": report.num_tokens})


def _enter_learner(players: _Players, recorder: RunRecorder, session: Session) -> AnyLearner:
    """Return the learner with its reference, both closed with the session."""
    config, policy, num_threads = players.config, players.policy, players.num_threads
    reference = session.stack.enter_context(
        dedicated_reference(config, policy, build.drivers_device(config), num_threads)
    )
    return session.stack.enter_context(
        learning(
            config,
            policy,
            reference,
            cluster=players.cluster,
            num_threads=num_threads,
            on_restart=partial(record_lost_ranks, recorder, session.progress),
            phases=session.steering.phases,
            teacher=players.teacher,
        )
    )


def _record_who_samples(
    config: RunConfig, player: Player, recorder: RunRecorder, progress: Progress, *, step: int
) -> None:
    """Record it if another model than the policy samples the training episodes."""
    if player.endpoint is None or config.services is None:
        return
    urls, mode = config.services.engine_urls, player.endpoint.capabilities.logprob_mode
    recorder.event("rescored", step, {"urls": list(urls), "logprob_mode": mode})
    progress.note(f"{', '.join(urls)} plays what is learned from, uncorrected; evaluations play the policy itself")


def _checkpoints(config: RunConfig, origin: Origin | None = None) -> CheckpointStore:
    return CheckpointStore(
        config.run_folder / "checkpoints",
        run_id=read_run_id(config.run_folder),
        origin=origin,
        retention=RetentionSettings.of(config.training),
    )
