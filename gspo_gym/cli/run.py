"""Run a whole training in its folder, fresh or resumed: build, warm up, train, summarize."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from gspo_gym.base.files import replace_file
from gspo_gym.base.loops import run_to_end
from gspo_gym.cluster.launcher import Fleet, Seat
from gspo_gym.config.build import trainer as build
from gspo_gym.config.build.compute import start_compute
from gspo_gym.config.build.conversations import (
    record_template,
    require_same_template,
    with_fixed_date,
    with_recorded_date,
)
from gspo_gym.config.build.engines import build_weight_sync
from gspo_gym.config.build.estimate import estimate_step
from gspo_gym.config.build.judge import build_judging
from gspo_gym.config.build.live import LiveSettings, Restored, find_restored, when_it_may_change
from gspo_gym.config.build.preflight import require_ready
from gspo_gym.config.build.processes import launching, learning
from gspo_gym.config.build.reference import serving_reference
from gspo_gym.config.build.rollouts import Player, build_training_player, build_warmup, environment_notes
from gspo_gym.config.build.threads import computing_elsewhere
from gspo_gym.config.reference import leaf_keys
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.words import look_up
from gspo_gym.errors import CheckpointError, ConfigError, GymError, ServiceError
from gspo_gym.learning.optimizer import scheduled_rate
from gspo_gym.learning.update import AnyLearner
from gspo_gym.policy.checkpoints import Checkpoint, CheckpointStore
from gspo_gym.policy.load import Policy
from gspo_gym.policy.manifest import Origin, RetentionSettings, read_manifest
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.schedule import is_played_again
from gspo_gym.rollout.watchdog import MARKER, TRAINING_ADVICE, read_frozen, seconds_until_frozen, watching
from gspo_gym.run.collect import warm_up
from gspo_gym.run.control import ControlServer
from gspo_gym.run.judging import Judging
from gspo_gym.run.process import Phases, holder_of, holding, refusal
from gspo_gym.run.recording import RunRecorder, missing_records
from gspo_gym.run.records import read_events, read_run_id, read_summary
from gspo_gym.run.registry import folder_of_a_new_run, is_left_by_a_start
from gspo_gym.run.report.progress import Progress, telling
from gspo_gym.run.state import TrainState
from gspo_gym.run.steering import Steering, StopRequested
from gspo_gym.run.trainer import Trainer

_NO_GRADIENT = (
    "NOTHING WAS LEARNED: in {} steps the optimizer took no step with a gradient, so that the weights are those of the "
    "beginning. `gspo-gym doctor` says why: most often all episodes of every group earn the same"
)
_INTERRUPTED = 128 + signal.SIGINT


def execute(
    config: RunConfig, seat: Seat | None, *, resume: bool | Literal["auto"], set_aside: bool, console: Console | None
) -> dict[str, Any]:
    """Run `train.run_training`."""
    if resume == "auto" and not (resume := _has_checkpoint(config)):
        set_aside = True  # what an earlier start left is nothing to go on from, and is kept all the same
    steering = Steering(config.run.stop_grace_seconds, Phases(config.run_folder))
    if not resume and not set_aside and (taken := folder_is_taken(config)):
        raise ConfigError(taken)
    begin = _resume if resume else partial(_start, estimates=console is not None)
    with steering.handling_signals(), telling(console, steering.phases) as progress:
        try:
            summary = run_to_end(begin(config, seat, progress, steering))
        except StopRequested as stop:
            progress.note(f"{stop}; go on with --resume" if steering.failure is None else str(stop))
        except GymError as error:
            # An error while the run stops is a consequence of the stop: it is told and does not fail the run.
            if steering.stopped_by is None:
                raise
            if steering.failure is None:
                progress.note(f"stopped by {steering.stopped_by}; {type(error).__name__}: {error}")
    if steering.stopped_by is None:
        return summary
    gc.collect()  # a notebook goes on, and errors of cancelled tasks hold the models, in cycles of asyncio's
    if steering.failure is not None:
        raise ServiceError(steering.failure)
    if steering.exit_code == _INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(steering.exit_code)


def _has_checkpoint(config: RunConfig) -> bool:
    # A kill while a checkpoint was being replaced leaves the older one under another name until it is loaded.
    folder = config.run_folder / "checkpoints"
    return bool(_checkpoints(config).steps()) or any(folder.glob(".replaced_*"))


def folder_is_taken(config: RunConfig) -> str | None:
    """Return a sentence about the run that is in the folder already, or None if a new one may begin there."""
    folder = config.run_folder
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if (holder := holder_of(folder)) is not None:
        return refusal(folder, holder)
    if is_left_by_a_start(folder) or _failed_without_a_step(config):
        return None
    go_on = "go on with it (--resume)" if _checkpoints(config).steps() else "it has no checkpoint to go on from"
    return f"{folder} already holds a run: {go_on}, move it away first (--set-aside), or choose another model.label"


async def _start(
    config: RunConfig, seat: Seat | None, progress: Progress, steering: Steering, *, estimates: bool
) -> dict[str, Any]:
    """Run from the beginning; a failure before the first evaluation leaves everything as it was.

    `estimates`: whether a line says what a step takes, which costs a second.
    """
    async with contextlib.AsyncExitStack() as stack:
        begin = stack.enter_context(folder_of_a_new_run(config.run_folder, progress))
        restored = find_restored(config)
        base, state = (None, None) if restored is None else (restored.base, restored.state)
        for notice in await require_ready(config, base=base):
            progress.note(notice)
        fleet = stack.enter_context(launching(config, seat, steering.fail))
        num_threads = stack.enter_context(computing_elsewhere(build.device_of(config)))
        policy = build.build_policy(config, base)
        config = _with_date(config, policy, progress)
        with steering.phases.during("starting the engine"):
            player = await build_training_player(config, policy, fleet)
        stack.push_async_callback(player.close)
        judging = await _enter_judging(config, player, stack)
        warmup = await build_warmup(config, player, partial(steering.phases.advance, "warming up"))
        notes = (*await player.start(), *await player.probe_apps(), *await environment_notes(config, player.renderers))
        sinks = build.build_sinks(config)
        name = config.rollout.policy_name
        recorder = RunRecorder.create(config.run_folder, config.to_toml(), policy_name=name, sinks=sinks)
        record_template(config)
        stack.callback(_close, recorder)
        control = _enter_control(recorder, progress, steering, stack)
        weight_sync = build_weight_sync(config, policy, player.engine, recorder)
        stack.callback(weight_sync.close)
        for line in notes:
            progress.note(line)
        compute = await start_compute(
            config, player, num_threads=num_threads, recorder=recorder, progress=progress, stack=stack
        )
        player = replace(player, compute=compute)
        _tell_who_samples(config, player, recorder, progress, step=0)
        await weight_sync.attest()
        if estimates and (estimate := await estimate_step(config, player, compute)) is not None:
            progress.note(f"estimate: {estimate}")
        if warmup is not None:
            pool, plan = warmup
            with steering.phases.during("warming up"):
                report = await warm_up(policy.model, pool, plan, progress, compute, steering.phases)
            await weight_sync.publish(0)
            recorder.event("warmup", 0, {"epoch_losses": list(report.epoch_losses), "num_tokens": report.num_tokens})
        learner = _enter_learner(config, policy, fleet, num_threads, recorder, progress, steering, stack)
        if restored is not None:
            await _begin_with(restored, learner, weight_sync, recorder, progress)
        parent = None if restored is None else restored.parent
        steering.attach()  # from here on, a stop saves what there is
        begin()
        return await _train(
            config, player, learner, recorder, progress, state, weight_sync, judging, control, parent, is_saved=False
        )


def _with_date(config: RunConfig, policy: Policy, progress: Progress) -> RunConfig:
    """Return the configuration with the date that the policy's template shows, if it shows one, and say so."""
    dated = with_fixed_date(config, policy.tokenizer)
    if dated is not config:
        date = dated.model.template_date
        progress.note(f"the chat template shows today's date, which is {date} for the whole run (model.template_date)")
    return dated


async def _begin_with(
    restored: Restored, learner: AnyLearner, weight_sync: WeightSync, recorder: RunRecorder, progress: Progress
) -> None:
    """Load parts of another run's checkpoint into the learner, and record their origin."""
    restored.restore(learner)
    if restored.state.step:
        await weight_sync.publish(restored.state.step)
    data = {"parts": list(restored.parts), "folder": str(restored.checkpoint.folder), **restored.parent}
    recorder.event("restored", restored.state.step, data)
    for sentence in restored.sentences():
        progress.note(sentence)


async def _resume(config: RunConfig, seat: Seat | None, progress: Progress, steering: Steering) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        if (config.run_folder / "config.toml").exists():  # else there is no run to hold
            stack.enter_context(holding(config.run_folder, progress.note, has_begun=True))
            config = with_recorded_date(config)
        return await _resume_held(config, seat, progress, steering)


async def _resume_held(config: RunConfig, seat: Seat | None, progress: Progress, steering: Steering) -> dict[str, Any]:
    checkpoints = _checkpoints(config)
    checkpoint = checkpoints.load_latest()
    # Refuse before the model is loaded.
    _require_named_run(config.run_folder, checkpoint.folder)
    num_optimizer_steps = int(checkpoint.learner_counters.get("optimizer.num_attempts", 0))
    began = _require_same_run(config, num_optimizer_steps=num_optimizer_steps)
    state = TrainState.from_dict(checkpoint.trainer_state)
    await require_ready(config, base=str(checkpoint.model_folder))
    async with contextlib.AsyncExitStack() as stack:
        fleet = stack.enter_context(launching(config, seat, steering.fail))
        num_threads = stack.enter_context(computing_elsewhere(build.device_of(config)))
        policy = build.build_policy(config, str(checkpoint.model_folder))
        with steering.phases.during("starting the engine"):
            player = await build_training_player(config, policy, fleet)
        stack.push_async_callback(player.close)
        judging = await _enter_judging(config, player, stack)
        for line in (*await player.start(), *await environment_notes(config, player.renderers)):
            progress.note(line)
        sinks = build.build_sinks(config, resume_step=state.step)
        name = config.rollout.policy_name
        recorder = RunRecorder.resume(
            config.run_folder,
            state.step,
            saved_seq=state.last_seq,
            is_played_again=partial(
                is_played_again, step=state.step, num_tasks=state.num_tasks, pending_tasks=state.pending_tasks
            ),
            policy_name=name,
            sinks=sinks,
        )
        stack.callback(_close, recorder)
        has_all_metrics = config.training.log_interval == began.training.log_interval == 1
        missing = missing_records(recorder.folder, state.step, state.last_seq, has_all_metrics=has_all_metrics)
        if missing:
            recorder.event("records_damaged", state.step, missing)
            progress.note(
                f"{recorder.folder}: records before the checkpoint are gone: {missing['num_events']} events, and "
                f"metrics of {len(missing['metrics_steps'])} steps. The training itself goes on exactly"
            )
        control = _enter_control(recorder, progress, steering, stack)
        _set_damaged_aside(checkpoints, checkpoint, recorder, progress)
        weight_sync = build_weight_sync(config, policy, player.engine, recorder)
        stack.callback(weight_sync.close)
        compute = await start_compute(
            config, player, num_threads=num_threads, recorder=recorder, progress=progress, stack=stack
        )
        player = replace(player, compute=compute)
        learner = _enter_learner(config, policy, fleet, num_threads, recorder, progress, steering, stack)
        learner.restore(checkpoint.learner_tensors, checkpoint.learner_counters)
        await weight_sync.publish(state.step)
        _tell_who_samples(config, player, recorder, progress, step=state.step)
        progress.note(f"resumed from {checkpoint.folder} after step {state.step}")
        _tell_what_froze(config, recorder, progress, step=state.step)
        return await _train(
            config, player, learner, recorder, progress, state, weight_sync, judging, control, checkpoint.origin.parent
        )


async def _train(
    config: RunConfig,
    player: Player,
    learner: AnyLearner,
    recorder: RunRecorder,
    progress: Progress,
    state: TrainState | None,
    weight_sync: WeightSync,
    judging: Judging | None,
    control: ControlServer,
    parent: Mapping[str, Any] | None,
    *,
    is_saved: bool = True,
) -> dict[str, Any]:
    """Train and write summary.json, also when the run fails: its status then names the failure."""
    steering = control.steering
    checkpoints = _checkpoints(config, Origin.of_this_process(config.to_toml(), parent=parent))
    trainer = build.build_trainer(
        config,
        player,
        learner=learner,
        recorder=recorder,
        checkpoints=checkpoints,
        progress=progress,
        state=state,
        weight_sync=weight_sync,
        judging=judging,
        steering=steering,
        is_saved=is_saved,
    )
    _let_change(config, control, trainer, learner, checkpoints, judging, recorder, progress)
    status, reason = "completed", None

    def record(status: str, reason: str | None) -> dict[str, Any]:
        step, error = trainer.state.step, {} if reason is None else {"error": reason}
        if steering.stopped_by is not None:
            recorder.event("stopped", step, {"by": steering.stopped_by})
        recorder.event("finished", step, {"status": status, **error})
        recorder.summary(summary := {"error": reason, **summary_of(status, trainer.state, config)})
        return summary

    steering.deadline.before_leaving = partial(record, "interrupted", None)  # the end of a grace skips the `finally`
    try:
        limit = seconds_until_frozen(config.limits.step_timeout_seconds)
        with watching(config.run_folder / MARKER, limit, advice=TRAINING_ADVICE):
            state = await trainer.run()
        if state.step and not state.gradient_steps:
            progress.note(_NO_GRADIENT.format(state.step))
        if judging is not None:
            await steering.unless_stopped(judging.finish())
    except BaseException as error:
        reason = _failure(error, steering)
        status = "interrupted" if reason is None else "failed"
        raise
    finally:
        steering.cancel_requests()
        summary = record(status, reason)
        steering.deadline.before_leaving = lambda: None  # it is told; only closing may hang now
    return summary


def _failure(error: BaseException, steering: Steering) -> str | None:
    """Return why a training failed; None if it was stopped."""
    is_stopped = isinstance(error, StopRequested | asyncio.CancelledError | KeyboardInterrupt | SystemExit)
    return steering.failure or (None if is_stopped else f"{type(error).__name__}: {error}")


def _enter_control(
    recorder: RunRecorder, progress: Progress, steering: Steering, stack: contextlib.AsyncExitStack
) -> ControlServer:
    """Return the run's control socket, closed with the stack; note it if the folder cannot hold one."""
    control = ControlServer(recorder.folder, steering, recorder)
    stack.callback(control.close)
    try:
        control.start()
    except OSError as error:
        progress.note(f"no control socket: {error.strerror or error}; `gspo-gym run` cannot steer this run")
    return control


def _let_change(
    config: RunConfig,
    control: ControlServer,
    trainer: Trainer,
    learner: AnyLearner,
    checkpoints: CheckpointStore,
    judging: Judging | None,
    recorder: RunRecorder,
    progress: Progress,
) -> None:
    """Make the run's settings changeable over its socket, and apply the changes of its earlier processes again."""
    settings = LiveSettings(
        config,
        trainer=trainer,
        learner=learner,
        checkpoints=checkpoints,
        judging=judging,
        steering=control.steering,
        recorder=recorder,
    )
    folder = recorder.folder
    for sentence in settings.restore(read_events(folder, after=0), load_config(folder / "config.toml")):
        progress.note(sentence)
    control.steering.apply = settings.apply
    control.attach(trainer, settings)


def _tell_who_samples(
    config: RunConfig, player: Player, recorder: RunRecorder, progress: Progress, *, step: int
) -> None:
    """Record it if another model than the policy samples the training episodes."""
    if player.endpoint is None or config.services is None:
        return
    urls, mode = config.services.engine_urls, player.endpoint.capabilities.logprob_mode
    recorder.event("rescored", step, {"urls": list(urls), "logprob_mode": mode})
    progress.note(f"{', '.join(urls)} plays what is learned from, uncorrected; evaluations play the policy itself")


def _tell_loss(recorder: RunRecorder, progress: Progress, num_updates: int, reason: str) -> None:
    """Record that the learner's ranks were lost."""
    recorder.event("ranks_lost", num_updates, {"reason": reason})
    progress.note(f"the learner's ranks were lost, and start again from the newest checkpoint: {reason}")


def _tell_what_froze(config: RunConfig, recorder: RunRecorder, progress: Progress, *, step: int) -> None:
    """Record it if an earlier start ended because an environment held the interpreter."""
    frozen = read_frozen(config.run_folder / MARKER)
    if frozen.env_ids:
        recorder.event("frozen", step, {"env_ids": list(frozen.env_ids), "seconds": frozen.seconds})
        names = ", ".join(frozen.env_ids)
        progress.note(f"{names}: held the interpreter for {frozen.seconds:g} seconds; runs in worker processes now")


def _close(recorder: RunRecorder) -> None:
    """Close the recorder; if the run is not to go on, its sinks first get its page."""
    folder = recorder.folder

    def write_page() -> Path:
        from gspo_gym.cli.report import page_of

        replace_file(folder / "report.html", page_of(folder, status=recorder.status).html)
        return folder / "report.html"

    try:
        if recorder.status != "interrupted":
            recorder.report(write_page)
    finally:
        recorder.close()


def _enter_learner(
    config: RunConfig,
    policy: Policy,
    fleet: Fleet,
    num_threads: int,
    recorder: RunRecorder,
    progress: Progress,
    steering: Steering,
    stack: contextlib.AsyncExitStack,
) -> AnyLearner:
    """Return the learner with its reference, both closed with the stack."""
    reference = stack.enter_context(serving_reference(config, policy, build.device_of(config), num_threads))
    return stack.enter_context(
        learning(
            config,
            policy,
            reference,
            fleet=fleet,
            num_threads=num_threads,
            on_restart=partial(_tell_loss, recorder, progress),
            phases=steering.phases,
        )
    )


async def _enter_judging(config: RunConfig, player: Player, stack: contextlib.AsyncExitStack) -> Judging | None:
    """Return the run's judge, closed with the stack; None if it has none."""
    judging = build_judging(config, None if player.apps is None else player.apps.rubric_of)
    if judging is not None:
        stack.push_async_callback(judging.close)
    return judging


def _checkpoints(config: RunConfig, origin: Origin | None = None) -> CheckpointStore:
    return CheckpointStore(
        config.run_folder / "checkpoints",
        run_id=read_run_id(config.run_folder),
        origin=origin,
        retention=RetentionSettings.of(config.training),
    )


def _set_damaged_aside(
    checkpoints: CheckpointStore, checkpoint: Checkpoint, recorder: RunRecorder, progress: Progress
) -> None:
    """Rename and record the checkpoints that were passed over, because their steps are taken again."""
    for folder, reason in checkpoint.damaged.items():
        moved = checkpoints.set_aside(folder)
        recorder.event(
            "checkpoint_damaged", checkpoint.step, {"folder": folder.name, "moved_to": moved.name, "reason": reason}
        )
        progress.note(f"passed over a checkpoint, which is {moved} now: {reason}")


def _require_named_run(folder: Path, checkpoint: Path) -> None:
    """Refuse to resume if the checkpoint names its run and the folder does not.

    Raises:
        CheckpointError: says what to restore.
    """
    run = read_manifest(checkpoint).run
    # Checkpoints of earlier versions name no run.
    if run is not None and read_run_id(folder) is None:
        raise CheckpointError(
            f"{checkpoint}: is of the run {run}, and {folder} does not say which run it holds: restore its "
            "config.toml, whose first line is the run's id, or its events.jsonl"
        )


def _require_same_run(config: RunConfig, *, num_optimizer_steps: int) -> RunConfig:
    """Return the settings with which the run began; refuse to go on under others, but for those that may change.

    Raises:
        ConfigError: names the keys that differ, or the schedule of the learning rate, which would jump after
            `num_optimizer_steps`.
    """
    path = config.run_folder / "config.toml"
    earlier = load_config(path)
    began, now = _flat(earlier), _flat(config)
    differing = [key for key in sorted(began.keys() | now.keys()) if began.get(key) != now.get(key)]
    if refused := [key for key in differing if not when_it_may_change(key).on_resume]:
        changes = "; ".join(f"{key}: {began.get(key)!r} became {now.get(key)!r}" for key in refused)
        raise ConfigError(f"{path}: a resumed run must go on as it began, but {changes}. Start another run instead")
    _require_same_rates(earlier, config, num_optimizer_steps)
    require_same_template(config)
    return earlier


def _require_same_rates(began: RunConfig, now: RunConfig, num_taken: int) -> None:
    totals = began.size.num_optimizer_steps, now.size.num_optimizer_steps
    for step in range(max(0, num_taken - 1), min(totals)):
        was, will_be = (
            scheduled_rate(step, peak=now.training.learning_rate, settings=now.optimizer, total_steps=total)
            for total in totals
        )
        if not math.isclose(was, will_be, rel_tol=1e-9):
            raise ConfigError(
                f"training.iterations_per_epoch, training.num_epochs: {began.size.num_iterations} iterations became "
                f"{now.size.num_iterations}, and with optimizer.schedule = {now.optimizer.schedule!r} the learning "
                f"rate would jump: optimizer step {step + 1} takes {was:g} in the run as it began, and would take "
                f"{will_be:g}. Resume with as many iterations as it began with, or begin another run from its "
                "checkpoint (model.base)"
            )


def _flat(config: RunConfig) -> dict[str, Any]:
    sections = config.model_dump(exclude_none=True)
    return {key: look_up(sections, key) for key in leaf_keys()}


def summary_of(status: str, state: TrainState, config: RunConfig) -> dict[str, Any]:
    """Return the values of summary.json but for `error`, which says why a run failed."""
    return {
        "status": status,
        "policy_name": config.rollout.policy_name,
        "rescored": config.rollout.rescore,
        "steps": state.step,
        "episodes": state.num_episodes,
        "wall_seconds": state.wall_seconds,
        "score": None if state.final_eval is None else state.final_eval["score"],
        "initial_eval": state.initial_eval,
        "final_eval": state.final_eval,
        "best_eval": state.best_eval,
        "sampled_tokens": state.sampled_tokens,
        "trained_tokens": state.trained_tokens,
        "gradient_steps": state.gradient_steps,
        "curve": [list(point) for point in state.curve],
    }


def _failed_without_a_step(config: RunConfig) -> bool:
    """Return whether the folder's run ended with nothing to go on from; another run may then take its place."""
    folder = config.run_folder
    steps = _checkpoints(config).steps()
    if not (folder / "summary.json").exists() or any(steps):
        return False
    # What failed before the first step fails again, as a rule; what was stopped there can go on.
    return read_summary(folder)["status"] in (("failed",) if steps else ("failed", "interrupted"))
