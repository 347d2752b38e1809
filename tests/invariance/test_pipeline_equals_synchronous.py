"""Pipelined and synchronous training are the same loop: with a bound of 0 versions, bit for bit.

Real engines, learners and environments on a tiny model in float32.

Pinned here:
1. `max_staleness` 0: weights, samples, metrics and ledger are those of a loop written out by hand;
2. `max_staleness` 1: every token is within the bound, and the engine's copy of the weights is the learner's at the end;
3. a learner in its thread and episodes in play end with the run, however it ends;
4. a run from a config, stopped and resumed, trains on every task once.
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import small_run

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.cli.train import run_training
from gspo_gym.config.build import trainer as build
from gspo_gym.config.run_config import RunConfig
from gspo_gym.engine.local.engine import LocalEngine
from gspo_gym.errors import EnginePoisonedError
from gspo_gym.learning.batching import build_batch
from gspo_gym.policy.weight_sync import WeightSync
from gspo_gym.rollout.actors import ActRequest, EngineActor
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow
from gspo_gym.rollout.ledger import Dispatched, Ledger, imbalances, read_ledger
from gspo_gym.rollout.limits import PoolLimits
from gspo_gym.rollout.pool import GroupRequest, RolloutPool
from gspo_gym.rollout.schedule import oldest_version
from gspo_gym.rollout.summary import rollout_metrics
from gspo_gym.run.collect import Collector
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_metrics
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.state import Saver, TrainState
from gspo_gym.run.trainer import Trainer
from gspo_gym.seeding import training_seed
from gspo_gym.types import Completion, Outcome, Task, TrajectoryGroup

STEPS, GROUPS, SIZE = 4, 2, 4
ENV_ID = "gspo_gym/GuessNumber-v0"
BASE = small_run(
    rollout={"max_turns": 3, "episodes_per_batch": GROUPS * SIZE},
    training={"iterations_per_epoch": STEPS, "group_size": SIZE, "learning_rate": 1e-2},
    evaluation={"seeds": "0:2", "every_n_iters": 2},
)


def make_config(folder: Path, **training: Any) -> RunConfig:
    values: dict[str, Any] = copy.deepcopy(BASE)
    values["run"] = {"folder": str(folder)}
    values["training"] |= training
    if training.get("max_staleness"):
        values["correction"] = {"old_logprobs": "rollout"}
    return RunConfig.from_dict(values)


class Letters:
    """Three turns, each worth an eighth for every different character that was said: random text earns something."""

    def __init__(self) -> None:
        self.num_turns = 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return f"letters {seed}", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        self.num_turns += 1
        return "more", len(set(action)) / 8, self.num_turns == 3, False, {}

    async def close(self) -> None:
        pass


class NotingActor(EngineActor):
    """Writes down whose turns are done, for a thread that waits for one."""

    def __init__(self, engine: LocalEngine) -> None:
        super().__init__(engine)
        self.played = threading.Condition()
        self.sessions: set[str] = set()

    async def __call__(self, request: ActRequest) -> Completion:
        completion = await super().__call__(request)
        with self.played:
            self.sessions.add(request.session_id)
            self.played.notify_all()
        return completion

    def wait_for_group(self, number: int) -> None:
        with self.played:
            assert self.played.wait_for(lambda: any(s.startswith(f"group_{number:06d}/") for s in self.sessions), 60)


class Run:
    """The parts of a run, real but for evaluation and checkpoints."""

    def __init__(self, config: RunConfig, folder: Path, *, concurrency: int = 64) -> None:
        self.concurrency = concurrency
        self.config, self.folder = config, folder
        self.policy = build.build_policy(config)
        is_ahead = config.training.max_staleness > 0
        self.copy = copy.deepcopy(self.policy.model) if is_ahead else self.policy.model
        self.engine = LocalEngine(self.copy, max_model_len=256, source=self.policy.model if is_ahead else None)
        self.actor = NotingActor(self.engine)
        self.learner = build.build_learner(config, self.policy)
        self.ledger = Ledger(keeps_entries=True)
        self.saved: list[TrainState] = []

    def pool(self) -> RolloutPool:
        return RolloutPool(
            play=episode_player(
                make_env=lambda task: Letters(),
                act=self.actor,
                renderers=RendererCache(self.policy.tokenizer),
                limits=self.config.episode_limits,
            ),
            pool_limits=PoolLimits(max_concurrent_rollouts=self.concurrency, max_attempts=1, min_group_fraction=0.75),
            run_seed=7,
            ledger=self.ledger,
        )

    def copy_checkpoint(self, state: TrainState) -> Callable[[], Path]:
        self.saved.append(state)
        return Path

    async def train(self, publish: Callable[[int], Any] | None = None) -> TrainState:
        recorder = RunRecorder.create(self.folder, "")

        async def evaluate(label: str) -> Evaluation:
            return Evaluation(ENV_ID, (EvaluationRow(0, 1.0, None, 1, Outcome.TERMINATED),))

        plan = build.build_plan(self.config)
        trainer = Trainer(
            plan,
            collector=Collector(plan, self.pool(), weight_version=lambda: self.engine.weight_version),
            learner=self.learner,
            publish=publish or WeightSync(self.engine).publish,
            evaluate=evaluate,
            saver=Saver(self.copy_checkpoint, plan.loop, on_event=recorder.event),
            journal=Journal(plan, recorder, QuietProgress(lambda text: None)),
        )
        try:
            return await trainer.run()
        finally:
            recorder.close()
            await self.engine.close()

    async def train_by_hand(self) -> tuple[list[tuple[TrajectoryGroup, ...]], list[dict[str, float]]]:
        """The synchronous loop: collect, learn, publish. Returns what was collected and what it came to."""
        plan, pool, publish = build.build_plan(self.config), self.pool(), WeightSync(self.engine).publish
        collected, lines, running = [], [], TrainState().running
        for step in range(1, STEPS + 1):
            requests = [
                GroupRequest(
                    f"step_{step:06d}/group_{group:04d}",
                    Task(ENV_ID, training_seed(plan.run.seed, GROUPS * (step - 1) + group)),
                    SIZE,
                )
                for group in range(GROUPS)
            ]
            groups = await pool.collect(requests)
            built = build_batch(
                groups, plan.advantages, rewards=plan.rewards, step_rewards=plan.step_rewards, running=running
            )
            running = built.running
            assert built.batch is not None
            learned = self.learner.update(built.batch).metrics
            await publish(step)
            collected.append(groups)
            lines.append({**rollout_metrics(groups, seconds=1.0), **learned})
        await self.engine.close()
        return collected, lines

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.policy.model.state_dict().items()}


def is_timed(name: str) -> bool:
    return "second" in name


def num_threads() -> int:
    return sum("engine" in thread.name or "asyncio" in thread.name for thread in threading.enumerate())


def test_a_bound_of_0_is_the_synchronous_run_bit_for_bit(tmp_path: Path) -> None:
    """One episode at a time: the shape of an engine's batch depends on time, and the last bit of a logprob on that."""
    config = make_config(tmp_path)
    by_hand, trained = Run(config, tmp_path / "a", concurrency=1), Run(config, tmp_path / "b", concurrency=1)
    started = by_hand.weights()
    collected, expected = asyncio.run(by_hand.train_by_hand())
    state = asyncio.run(trained.train())

    ends = by_hand.weights(), trained.weights()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert any(not torch.equal(started[name], ends[0][name]) for name in started)  # it has learned something
    assert by_hand.ledger.entries == trained.ledger.entries
    assert (state.num_tasks, state.pending_tasks) == (STEPS * GROUPS, ())
    lines = read_metrics(tmp_path / "b")
    for line, wanted in zip(lines, expected, strict=True):
        assert {name: line[name] for name in wanted if not is_timed(name)} == {
            name: value for name, value in wanted.items() if not is_timed(name)
        }
    for step, groups in enumerate(collected, start=1):
        episodes = read_episodes(tmp_path / "b" / "episodes" / f"step_{step:06d}.jsonl.gz")
        kept = [trajectory for group in groups for trajectory in group.trajectories]
        assert [e.trajectory_id for e in episodes] == [t.trajectory_id for t in kept]
        for episode, wanted_episode in zip(episodes, kept, strict=True):
            for segment, wanted_segment in zip(episode.segments, wanted_episode.segments, strict=True):
                assert segment.token_ids.tolist() == wanted_segment.token_ids.tolist()
                assert segment.rollout_logprobs.tolist() == wanted_segment.rollout_logprobs.tolist()
                assert segment.weight_version.tolist() == wanted_segment.weight_version.tolist()


def test_a_bound_of_1_holds_for_every_token_and_the_engine_ends_with_the_learners_weights(tmp_path: Path) -> None:
    run = Run(make_config(tmp_path, max_staleness=1), tmp_path / "run")
    before, update = num_threads(), run.learner.update

    def update_after_a_turn_of_the_next_batch(*given: Any) -> Any:
        step = run.engine.weight_version + 1
        if step < STEPS:
            run.actor.wait_for_group(step * GROUPS)
        return update(*given)

    run.learner.update = update_after_a_turn_of_the_next_batch  # type: ignore[method-assign]
    state = asyncio.run(run.train())
    assert num_threads() == before - 1  # the engine's
    ages = []
    for step in range(1, STEPS + 1):
        for episode in read_episodes(run.folder / "episodes" / f"step_{step:06d}.jsonl.gz"):
            ages.append(step - 1 - oldest_version(episode))
    assert len(ages) == STEPS * GROUPS * SIZE
    assert {0, 1} == set(ages)
    lines = read_metrics(run.folder)
    # the first step's are fresh, and of each later batch some were played while the learner worked
    assert [line["rollout/staleness_max"] for line in lines] == [0.0, 1.0, 1.0, 1.0]
    assert all(line["rollout/stale_dropped"] == 0 for line in lines)
    assert (state.num_tasks, state.pending_tasks) == (STEPS * GROUPS, ())
    run.ledger.assert_balanced()
    held, learned = run.copy.state_dict(), run.policy.model.state_dict()
    assert all(torch.equal(held[name], learned[name]) for name in learned)
    assert all(held[name].data_ptr() != learned[name].data_ptr() for name in learned)


def test_a_cancelled_run_waits_for_its_learner_and_leaves_nothing_running(tmp_path: Path) -> None:
    run = Run(make_config(tmp_path, max_staleness=2), tmp_path / "run")
    update, has_begun, may_go_on, has_ended = run.learner.update, threading.Event(), threading.Event(), []

    def held_update(*given: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(60)
        result = update(*given)
        has_ended.append(True)
        return result

    run.learner.update = held_update  # type: ignore[method-assign]

    async def main() -> set[str]:
        training = asyncio.create_task(run.train())
        await asyncio.to_thread(has_begun.wait, 60)
        training.cancel()
        for _ in range(100):  # turns of the loop: a trainer that did not wait would be done
            await asyncio.sleep(0)
        assert not training.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert has_ended == [True]
        return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]

    assert asyncio.run(main()) == set()
    run.ledger.assert_balanced()
    assert run.ledger.num_in_flight == 0
    assert not any("engine" in thread.name for thread in threading.enumerate())


def test_an_engine_that_is_poisoned_behind_the_learners_back_ends_the_run(tmp_path: Path) -> None:
    run = Run(make_config(tmp_path, max_staleness=1), tmp_path / "run")
    publish = WeightSync(run.engine).publish

    async def half(version: int) -> None:
        if version == 2:
            run.engine.poison("half an update")  # and nobody tells the trainer
        else:
            await publish(version)

    with pytest.raises(EnginePoisonedError, match="half an update"):
        asyncio.run(run.train(half))
    run.ledger.assert_balanced()
    assert not any("engine" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_a_pipelined_run_that_was_stopped_goes_on_with_the_tasks_that_were_in_play(tmp_path: Path) -> None:
    """Stopped after step 2 of 4 with two steps ahead: four of the eight groups so far are in play."""
    config = make_config(tmp_path, max_staleness=2, checkpoint_every_n_iters=2)
    run_training(config)
    folder = config.run_folder
    undisturbed = seeds_played(folder)
    shutil.rmtree(folder / "checkpoints" / "step_000004")  # as if it had been killed before
    saved = json.loads((folder / "checkpoints" / "step_000002" / "resume" / "state.json").read_text(encoding="utf-8"))
    first = training_seed(0, 0)
    pending = [first + number for number in saved["trainer"]["pending_tasks"]]
    assert saved["trainer"]["num_tasks"] == 2 * len(pending) == STEPS * GROUPS
    assert sorted([*seeds_trained_on(folder, (1, 2)), *pending]) == list(range(first, first + STEPS * GROUPS))

    summary = run_training(config, resume=True)
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert sorted(seeds_trained_on(folder, (3, 4))) == pending  # all of them, and nothing else
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4]
    # What was in play is played again from the same seeds, with weights that are at most as old as they may be. They
    # may be newer than those that it was first played with, so that the tokens are not the same.
    assert seeds_played(folder) == undisturbed
    assert imbalances(read_ledger(folder / "ledger.jsonl")) == []
    assert all(line["rollout/staleness_max"] <= 2 for line in read_metrics(folder))
    assert not any("engine" in thread.name for thread in threading.enumerate())


def seeds_played(folder: Path) -> list[tuple[str, int, int, int]]:
    begun = [entry for entry in read_ledger(folder / "ledger.jsonl") if isinstance(entry, Dispatched)]
    return sorted((each.trajectory_id, each.attempt, each.env_seed, each.sampling_seed) for each in begun)


def seeds_trained_on(folder: Path, steps: tuple[int, ...]) -> list[int]:
    files = [folder / "episodes" / f"step_{step:06d}.jsonl.gz" for step in steps]
    return [seed for file in files for seed in {episode.task.seed for episode in read_episodes(file)}]
