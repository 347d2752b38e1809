"""The loop, with a real pool and recorder and a learner that only writes down what it is given.

Pinned here:
1. with dynamic sampling the batch is full of informative groups, and what is played does not depend on concurrency;
2. a step without an informative group takes no update, says so, and keeps the rhythm of evaluations and checkpoints;
3. a resumed run plays and compares what an uninterrupted one would have;
4. episodes are written as often as asked for;
5. played ahead, the same loop trains on every task once, within the bound, and says how old samples were;
6. requests from outside: a stop drops what is being played and saves, a pause waits, changes come between steps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judged_episodes import request

from gspo_gym.chat.renderer import RendererCache
from gspo_gym.env.rewards import Reward
from gspo_gym.errors import ConfigError, NonFiniteError, StuckError
from gspo_gym.judge.asking import AskingSettings
from gspo_gym.judge.base import CriterionScore, JudgeError, Judgement, JudgeRequest, review_of
from gspo_gym.judge.http import HttpJudge
from gspo_gym.judge.server import create_judge_app
from gspo_gym.judge.settings import JudgeOptions
from gspo_gym.learning.batching import TrainBatch
from gspo_gym.learning.settings import AdvantageSettings, RewardSettings
from gspo_gym.learning.step_rewards import StepRewardSettings
from gspo_gym.policy.load import tiny_tokenizer
from gspo_gym.remote.serving import BackgroundServer
from gspo_gym.rollout.actors import ActRequest
from gspo_gym.rollout.episode import episode_player
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.rollout.evaluation import Evaluation, EvaluationRow, ScoreUnit
from gspo_gym.rollout.limits import EpisodeLimits, PoolLimits
from gspo_gym.rollout.pool import RolloutPool
from gspo_gym.run.collect import Collector
from gspo_gym.run.journal import Journal
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_events, read_metrics
from gspo_gym.run.report.progress import QuietProgress
from gspo_gym.run.settings import EvaluationSettings, LoopSettings, RunSettings, RunSize, TrainPlan
from gspo_gym.run.state import Saver, TrainState
from gspo_gym.run.steering import Steering, StopRequested
from gspo_gym.run.trainer import Trainer
from gspo_gym.seeding import generator, training_seed
from gspo_gym.types import Completion, FinishReason, Outcome, Task

END = 258  # <|im_end|>
GROUP_SIZE = 3


class Letters:
    """One turn, worth what its letters add up to; where the seed is a multiple of `same_for`, 1 whatever is said."""

    def __init__(self, task: Task, same_for: int) -> None:
        self.is_constant = task.seed % same_for == 0

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "letters", {}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        worth = 1.0 if self.is_constant else sum(map(ord, action)) / 1000
        return "", Reward({"letters": worth}, events=("spoke",)), True, False, {}

    async def close(self) -> None:
        pass


class Babbler:
    """Says 1 to 8 letters drawn from the episode's sampling seed, after a few turns of the loop."""

    def __init__(self, weight_version: Callable[[], int]) -> None:
        self.weight_version = weight_version

    async def __call__(self, request: ActRequest) -> Completion:
        rng = generator(request.sampling_seed, "babble", request.turn_index)
        for _ in range(int(rng.integers(8))):
            await asyncio.sleep(0)
        ids = [*rng.integers(97, 123, size=int(rng.integers(1, 9))).tolist(), END]
        return Completion(ids, [-1.0] * len(ids), FinishReason.STOP, [self.weight_version()] * len(ids))  # type: ignore[arg-type]

    async def end_session(self, session_id: str) -> None:
        pass


@dataclass
class Parts:
    """What the trainer joins, each writing down how it was used; `version` samples now."""

    version: int = 0
    batches: list[TrainBatch] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    evaluations: list[str] = field(default_factory=list)
    saved: list[TrainState] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    episodes: Sequence[tuple[float, bool | None]] = ((1.0, None),)  # (return, success) of the only one, by evaluation
    grad_norms: Sequence[float] = ()  # of the first updates; others say nothing of theirs
    of_teacher: Mapping[str, float] = field(default_factory=dict)  # metrics of every update, if there is one
    judge_stops_at: int | None = None  # the number of the evaluation in which nothing can be scored any more
    at: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # called at that occasion, such as "publish 2"
    trainer: Any = None

    def now(self, occasion: str) -> None:
        self.log.append(occasion)
        self.at.get(occasion, lambda: None)()

    def update(self, batch: TrainBatch, sink: Any = None) -> Any:
        self.log.append("update")
        self.batches.append(batch)
        self.at.get(f"update {len(self.batches)}", lambda: None)()
        metrics = {"batch/trained_tokens": float(batch.num_actions), **self.of_teacher}
        if len(self.batches) <= len(self.grad_norms):
            metrics["optim/grad_norm_max"] = self.grad_norms[len(self.batches) - 1]
        return SimpleNamespace(metrics=metrics)

    def sampling_version(self) -> int:
        return self.version

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        self.log.append("sleep")
        yield
        self.log.append("wake up")

    async def publish(self, version: int) -> None:
        self.now(f"publish {version}")
        self.version = version
        self.versions.append(version)

    def copy_checkpoint(self, state: TrainState) -> Callable[[], Path]:
        self.saved.append(state)
        return Path

    async def forget_ended(self) -> None:
        self.log.append("forget")

    async def evaluate(self, label: str) -> Evaluation:
        number = len(self.evaluations)
        if number == self.judge_stops_at:
            raise JudgeError("the key is not accepted any more")
        self.log.append("evaluate")
        self.at.get(label, lambda: None)()
        if label in self.at:
            await asyncio.sleep(0)  # where a stop takes effect
        self.evaluations.append(label)
        earned, success = self.episodes[min(number, len(self.episodes) - 1)]
        outcome = Outcome.MAX_TURNS if success is None else Outcome.TERMINATED
        return Evaluation("test/Letters-v0", (EvaluationRow(0, earned, success, 1, outcome),))


class Told(QuietProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        super().__init__(self.calls.append)

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(f"stepped {step}")

    def finished(self) -> None:
        self.calls.append("finished")


def make_plan(
    *,
    num_steps: int = 4,
    groups_per_batch: int = 4,
    evaluate_every: int = 2,
    log_episodes_every_n_iters: int = 1,
    advantages: AdvantageSettings | None = None,
    rewards: RewardSettings | None = None,
    step_rewards: StepRewardSettings | None = None,
    mixture: Mapping[str, float] | None = None,
    forks_per_episode: int = 0,
    **loop: Any,
) -> TrainPlan:
    num_episodes = groups_per_batch * GROUP_SIZE
    return TrainPlan(
        env_id="test/Letters-v0",
        size=RunSize(
            1, num_steps, num_episodes, num_episodes, forks_per_episode=forks_per_episode, group_size=GROUP_SIZE
        ),
        run=RunSettings(log_episodes_every_n_iters=log_episodes_every_n_iters),
        loop=LoopSettings(**{"checkpoint_every_n_iters": 2, **loop}),
        evaluation=EvaluationSettings(every_n_iters=evaluate_every),
        advantages=advantages or AdvantageSettings(),
        rewards=rewards or RewardSettings(),
        step_rewards=step_rewards or StepRewardSettings(),
        mixture=mixture or {},
    )


def train(
    folder: Path,
    plan: TrainPlan,
    *,
    same_for: int = 2,
    concurrency: int = 8,
    state: TrainState | None = None,
    parts: Parts | None = None,
    progress: QuietProgress | None = None,
    is_committed: Callable[[int], bool] | None = None,
    steering: Steering | None = None,
    make_env: Callable[[Task], Letters] | None = None,
) -> tuple[Parts, TrainState]:
    """Run the plan, from `state` on; `same_for` 1: every group is constant."""
    parts = parts or Parts()
    parts.version = 0 if state is None else state.step
    pool = RolloutPool(
        play=episode_player(
            make_env=make_env or (lambda task: Letters(task, same_for)),
            act=Babbler(parts.sampling_version),
            renderers=RendererCache(tiny_tokenizer()),
            limits=EpisodeLimits(max_turns=4, max_output_tokens=16, max_model_len=256),
        ),
        pool_limits=PoolLimits(max_concurrent_rollouts=concurrency, max_attempts=1, min_group_fraction=0.75),
        run_seed=7,
    )
    is_new = state is None
    recorder = RunRecorder.create(folder, "") if is_new else RunRecorder.resume(folder, state.step)  # type: ignore[union-attr]
    ticks = iter(range(10_000))
    parts.trainer = trainer = Trainer(
        plan,
        collector=Collector(plan, pool, state, weight_version=lambda: parts.version, is_committed=is_committed),
        learner=parts,  # type: ignore[arg-type]
        publish=parts.publish,
        evaluate=parts.evaluate,
        saver=Saver(parts.copy_checkpoint, plan.loop, on_event=recorder.event, saved=state),
        journal=Journal(plan, recorder, progress or QuietProgress(lambda text: None), clock=lambda: float(next(ticks))),
        state=state,
        forget_ended=parts.forget_ended,
        while_learning=parts.asleep,
        steering=steering,
    )
    try:
        final = asyncio.run(trainer.run())
    finally:
        recorder.close()
    return parts, final


def contents(parts: Parts) -> list[tuple[list[Any], list[Any]]]:
    return [(batch.token_ids.tolist(), batch.advantages.tolist()) for batch in parts.batches]


def test_constant_groups_are_trained_on_by_default_and_counted(tmp_path: Path) -> None:
    parts, state = train(tmp_path, make_plan())
    assert [batch.num_trajectories for batch in parts.batches] == [12] * 4
    lines = read_metrics(tmp_path)
    constant = [
        1 - len({i for i, row in zip(b.trajectory_index.tolist(), b.advantages, strict=True) if row.any()}) / 12
        for b in parts.batches
    ]
    assert [line["batch/constant_group_fraction"] for line in lines] == pytest.approx(constant)
    assert sum(constant) > 0
    assert all(line["batch/refilled_groups"] == line["batch/dropped_constant_groups"] == 0 for line in lines)
    assert state.num_episodes == 48
    # every sampled token is trained on
    assert state.trained_tokens == state.sampled_tokens == sum(batch.num_actions for batch in parts.batches) > 0


def test_a_step_counts_as_a_gradient_step_if_some_gradient_was_not_zero(tmp_path: Path) -> None:
    parts = Parts(grad_norms=[0.5, 0.0, 0.25, 0.125])  # nothing is known of the fifth
    _, state = train(tmp_path, make_plan(num_steps=5), parts=parts)
    assert state.gradient_steps == 3


def test_a_runs_seconds_are_those_of_its_steps_and_evaluations(tmp_path: Path) -> None:
    _, state = train(tmp_path, make_plan(num_steps=5))
    # The clock ticks when asked: twice more in each of 5 steps, once more in each evaluation, of steps 0, 2, 4 and 5.
    assert state.wall_seconds == 5 * 2 + 4


def test_progress_is_told_of_every_step_and_evaluation_and_of_the_end(tmp_path: Path) -> None:
    progress = Told()
    train(tmp_path, make_plan(num_steps=3), progress=progress)
    told = [call for call in progress.calls if not call.startswith("step ")]
    assert told == ["training for 3 steps", "stepped 1", "stepped 2", "stepped 3", "finished"]
    evaluated = [call for call in progress.calls if call.startswith("step ") and call.endswith(" episodes")]
    assert evaluated == [f"step {step}: mean return 1.000, 1.00 turns, 1 episodes" for step in (0, 2, 3)]
    assert [event["step"] for event in read_events(tmp_path) if event["kind"] == "evaluation"] == [0, 2, 3]


def test_a_mixture_has_metrics_of_each_environment_and_a_single_one_has_none_beside_its_own(tmp_path: Path) -> None:
    other = {"mixture": {"test/Others-v0": 0.5}}
    for name, changes in (("one", {}), ("two", other)):
        train(tmp_path / name, make_plan(num_steps=1, **changes))
        (line,) = read_metrics(tmp_path / name)
        assert any("Others-v0" in key for key in line) == (name == "two")


def test_episodes_of_weights_that_were_never_committed_are_not_trained_on_and_entered(tmp_path: Path) -> None:
    class Torn(Parts):
        """One answer of the 12 of a step is of version 99."""

        num_answers = 0

        def sampling_version(self) -> int:
            self.num_answers += 1
            return 99 if self.num_answers % 12 == 0 else self.version

    parts, state = train(tmp_path, make_plan(), parts=Torn(), is_committed=lambda version: version != 99)
    events = [(e["step"], e["data"]) for e in read_events(tmp_path) if e["kind"] == "uncommitted"]
    assert events == [(step, {"num_episodes": 1}) for step in (1, 2, 3, 4)]
    assert [batch.num_trajectories for batch in parts.batches] == [11] * 4
    assert state.num_episodes == 44


def test_a_goal_is_not_reached_by_the_episodes_that_are_left_when_others_fail() -> None:
    # 3 of 3 scored episodes succeeded, and 13 of the 16 failed: 3 / 16 are shown, and no more.
    summary = {"step": 4, "success_rate": 1.0, "num_episodes": 3, "num_failed": 13}
    state = TrainState(step=4, final_eval=summary)
    assert not state.has_reached(0.19)
    assert state.has_reached(0.1875)
    assert TrainState(step=4, final_eval={**summary, "num_failed": 0}).has_reached(1.0)
    # Of a mixture only the environments that know success count: 10 of 10, and 10 of 15.
    unit = ScoreUnit("success_rate", ("game",))
    for failed_games, failed_chats, is_reached in ((0, 5, True), (5, 0, False)):
        parts = {
            "game": {"success_rate": 1.0, "num_episodes": 10, "num_failed": failed_games},
            "chat": {"success_rate": None, "num_episodes": 190, "num_failed": failed_chats},
        }
        mixed = {"step": 4, "success_rate": 1.0, "num_episodes": 200, "num_failed": 5, "parts": parts}
        assert TrainState(step=4, final_eval=mixed, score_unit=unit).has_reached(0.95) == is_reached


def test_all_scores_of_a_run_are_in_one_unit(tmp_path: Path) -> None:
    # every episode of the first two evaluations was cut off undecided, with a return of 2.0; later ones fail or succeed
    parts = Parts(episodes=[(2.0, None), (2.5, None), (0.3, False), (0.9, True)])
    progress = Told()
    _, state = train(tmp_path / "undecided", make_plan(num_steps=6), parts=parts, progress=progress)
    notes = [call for call in progress.calls if "undecided" in call or "cut off" in call]
    assert [note.split(":")[0] for note in notes] == ["step 0", "step 4"]  # once at first, and once it is decided
    assert "scores are the success rate, also of the 2 before it" in notes[1]
    assert state.curve == ((0, 0.0), (2, 0.0), (4, 0.0), (6, 1.0))  # success rates, all of them
    assert state.best_eval is not None
    assert state.best_eval["step"] == 6
    assert state.initial_eval is not None
    assert (state.initial_eval["score"], state.initial_eval["success_rate"]) == ("success_rate", 0.0)
    # a run of which no episode ever comes to an end has mean returns
    _, state = train(tmp_path / "never", make_plan(), parts=Parts(episodes=[(2.0, None), (3.0, None)]))
    assert (state.score_unit, state.curve) == (None, ((0, 2.0), (2, 3.0), (4, 3.0)))
    # a run that is to stop at a success rate has one from the start, and an undecided episode is no success
    parts = Parts(episodes=[(2.0, None), (0.9, True)])
    _, state = train(tmp_path / "goal", make_plan(stop_at_success_rate=1.0), parts=parts)
    assert state.curve == ((0, 0.0), (2, 1.0))
    assert state.best_eval is not None
    assert (state.best_eval["step"], state.best_eval["score"]) == (2, "success_rate")
    # what declares success at first has a success rate of 0, and not a mean return, when nothing is decided any more
    parts = Parts(episodes=[(0.5, True), (2.0, None)])
    _, state = train(tmp_path / "declared", make_plan(), parts=parts)
    assert state.curve == ((0, 1.0), (2, 0.0), (4, 0.0))


def test_a_resumed_run_keeps_the_unit_that_it_began_with(tmp_path: Path) -> None:
    parts = Parts(episodes=[(0.5, True), (0.5, True)])
    train(tmp_path, make_plan(num_steps=2), parts=parts)
    restored = TrainState.from_dict(json.loads(json.dumps(parts.saved[-1].to_dict())))
    _, state = train(tmp_path, make_plan(), state=restored, parts=Parts(episodes=[(2.0, None)]))
    assert state.curve == ((0, 1.0), (2, 1.0), (4, 0.0))
    # or decides it, where the evaluations before did not tell
    parts = Parts(episodes=[(2.0, None)])
    train(tmp_path / "undecided", make_plan(num_steps=2), parts=parts)
    restored = TrainState.from_dict(json.loads(json.dumps(parts.saved[-1].to_dict())))
    _, state = train(tmp_path / "undecided", make_plan(), state=restored, parts=Parts(episodes=[(0.9, True)]))
    assert state.curve == ((0, 0.0), (2, 0.0), (4, 1.0))


@pytest.mark.parametrize("stopped_at", [0, 1, 2])
def test_an_evaluation_in_which_the_judge_stopped_is_made_when_the_run_goes_on(tmp_path: Path, stopped_at: int) -> None:
    plan = make_plan(checkpoint_every_n_iters=3)
    whole, expected = train(tmp_path / "whole", plan)
    first = Parts(judge_stops_at=stopped_at)
    with pytest.raises(JudgeError, match="not accepted"):
        train(tmp_path / "parts", plan, parts=first)
    assert first.saved[-1].step == 2 * stopped_at  # evaluations are due at the steps 0, 2, 4
    restored = TrainState.from_dict(json.loads(json.dumps(first.saved[-1].to_dict())))
    second, state = train(tmp_path / "parts", plan, state=restored)
    assert first.evaluations + second.evaluations == whole.evaluations
    assert state.final_eval is not None
    assert state.final_eval["step"] == 4
    assert state.curve == expected.curve
    assert contents(first) + contents(second) == contents(whole)
    assert second.saved[-1] == state  # the last checkpoint holds the evaluation that was missing


def test_a_run_that_is_made_shorter_ends_with_an_evaluation_of_its_last_step(tmp_path: Path) -> None:
    parts, _ = train(tmp_path, make_plan(checkpoint_every_n_iters=1))
    at_three = parts.saved[4]  # twice before the first step, and after each
    assert at_three.step == 3
    later, state = train(tmp_path, make_plan(num_steps=2), state=at_three)
    assert (later.evaluations, later.saved) == (["eval_000003"], [state])


def test_what_samples_sleeps_while_the_learner_works_and_forgets_before_steps_and_evaluations(tmp_path: Path) -> None:
    parts, _ = train(tmp_path, make_plan(num_steps=2, constant_groups="drop"), same_for=2)
    learn = ["forget", "sleep", "update", "wake up"]
    assert parts.log == ["forget", "evaluate", *learn, "publish 1", *learn, "publish 2", "forget", "evaluate"]


def test_dropped_groups_are_played_and_counted_and_not_trained_on(tmp_path: Path) -> None:
    parts, state = train(tmp_path, make_plan(constant_groups="drop"))
    lines = read_metrics(tmp_path)
    num_kept = [4 - int(line["batch/dropped_constant_groups"]) for line in lines]
    assert [batch.num_trajectories // GROUP_SIZE for batch in parts.batches] == num_kept
    assert 0 < sum(num_kept) < 16
    assert all(batch.advantages.ne(0).any(1).all() for batch in parts.batches)
    assert [line["batch/constant_group_fraction"] for line in lines] == [1 - kept / 4 for kept in num_kept]
    assert [line["rollout/num_episodes"] for line in lines] == [12] * 4
    assert state.num_episodes == sum(num_kept) * GROUP_SIZE


def test_refilled_batches_are_full_of_groups_that_teach(tmp_path: Path) -> None:
    parts, _ = train(tmp_path, make_plan(constant_groups="refill"))
    assert [batch.num_trajectories for batch in parts.batches] == [12] * 4
    assert all(batch.advantages.ne(0).any(1).all() for batch in parts.batches)
    for line in read_metrics(tmp_path):
        assert line["batch/refilled_groups"] == line["batch/dropped_constant_groups"]  # each dropped one was replaced
        assert line["rollout/num_episodes"] == 12 + GROUP_SIZE * line["batch/refilled_groups"]


def test_tasks_are_counted_on_from_step_to_step_and_none_is_played_twice(tmp_path: Path) -> None:
    """Refilled groups take numbers, too; a run that is resumed goes on counting."""
    plan = make_plan(constant_groups="refill")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    parts, state = train(whole, plan)
    shutil.copytree(whole, resumed)
    train(resumed, plan, state=parts.saved[2])
    refilled = sum(int(line["batch/refilled_groups"]) for line in read_metrics(whole))
    assert refilled > 0
    assert state.num_tasks == 4 * 4 + refilled

    def seeds(folder: Path, steps: Sequence[int]) -> list[int]:
        files = (folder / "episodes" / f"step_{step:06d}.jsonl.gz" for step in steps)
        return sorted({episode.task.seed for file in files for episode in read_episodes(file)})

    first = training_seed(0, 0)
    assert seeds(whole, (1, 2, 3, 4)) == list(range(first, first + state.num_tasks))
    assert seeds(resumed, (3, 4)) == seeds(whole, (3, 4))


def test_what_is_trained_on_does_not_depend_on_concurrency(tmp_path: Path) -> None:
    one, _ = train(tmp_path / "1", make_plan(constant_groups="refill"), concurrency=1)
    many, _ = train(tmp_path / "64", make_plan(constant_groups="refill"), concurrency=64)
    assert contents(one) == contents(many)


def test_a_step_that_teaches_nothing_takes_no_update_and_the_run_goes_on(tmp_path: Path) -> None:
    plan = make_plan(constant_groups="refill")
    parts, state = train(tmp_path, plan, same_for=1)
    assert parts.batches == []
    assert parts.versions == [1, 2, 3, 4]  # the weights are the same and carry the step's number
    assert parts.evaluations == ["eval_000000", "eval_000002", "eval_000004"]
    assert [saved.step for saved in parts.saved] == [0, 0, 2, 4]
    assert (state.step, state.num_episodes, state.trained_tokens) == (4, 0, 0)
    assert state.sampled_tokens > 0
    events = [(e["step"], e["data"]) for e in read_events(tmp_path) if e["kind"] == "no_update"]
    assert events == [(step, {"num_groups": 44}) for step in (1, 2, 3, 4)]  # 4 and ten rounds of 4
    for line in read_metrics(tmp_path):
        assert line["batch/constant_group_fraction"] == 1.0
        assert line["batch/dropped_constant_groups"] == 44.0
        assert line["batch/refilled_groups"] == 40.0
        assert "batch/mean_return" not in line


def test_a_run_that_learns_nothing_for_ten_steps_in_a_row_ends_and_can_go_on(tmp_path: Path) -> None:
    plan, parts = make_plan(num_steps=30, checkpoint_every_n_iters=50), Parts()
    with pytest.raises(StuckError, match="in 10 iterations in a row, up to 10, no episode had an advantage"):
        train(tmp_path / "stuck", plan, same_for=1, parts=parts)
    assert parts.saved[-1].step == 10
    with pytest.raises(StuckError, match="up to 11"):  # the row is not broken by a new start
        train(tmp_path / "stuck", plan, same_for=1, state=parts.saved[-1])
    _, state = train(tmp_path / "stuck", plan, state=parts.saved[-1])
    assert (state.step, state.idle_steps) == (30, 0)


@pytest.mark.parametrize(
    ("of_teacher", "is_taught"),
    [
        ({"loss/distillation": -0.1}, True),
        ({"loss/distillation": -0.1, "distillation/taught_fraction": 0.25}, True),
        ({"loss/distillation": 0.0, "distillation/taught_fraction": 0.0}, False),  # no turn had feedback
    ],
)
def test_a_run_without_advantages_is_not_stuck_while_a_teacher_teaches(
    tmp_path: Path, of_teacher: Mapping[str, float], is_taught: bool
) -> None:
    parts = Parts(of_teacher=of_teacher)
    if is_taught:
        _, state = train(tmp_path, make_plan(num_steps=12), same_for=1, parts=parts)
        assert (state.step, state.idle_steps) == (12, 0)
    else:
        with pytest.raises(StuckError, match="up to 10, no episode had an advantage"):
            train(tmp_path, make_plan(num_steps=12), same_for=1, parts=parts)


def test_a_run_in_which_every_episode_succeeds_is_not_stuck(tmp_path: Path) -> None:
    class Solved(Letters):
        async def step(self, action: str) -> Any:
            text, _, *ended = await super().step(action)
            return text, Reward({"letters": 1.0}, success=True), *ended

    plan = make_plan(num_steps=12)
    _, state = train(tmp_path, plan, same_for=1, make_env=lambda task: Solved(task, 1))
    assert (state.step, state.idle_steps) == (12, 0)


def test_refilling_gives_up_after_ten_rounds_unless_told_otherwise(tmp_path: Path) -> None:
    train(tmp_path, make_plan(constant_groups="refill", groups_per_batch=1, num_steps=1), same_for=1)
    assert read_metrics(tmp_path)[0]["batch/refilled_groups"] == 10


def test_filtering_every_episode_is_no_update_either(tmp_path: Path) -> None:
    parts, _ = train(tmp_path, make_plan(num_steps=1, advantages=AdvantageSettings(filter_eps=0.0)), same_for=1)
    assert parts.batches == []
    assert read_metrics(tmp_path)[0]["batch/num_filtered"] == 12.0
    assert [e["kind"] for e in read_events(tmp_path)].count("no_update") == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"constant_groups": "refill"},
        {"advantages": AdvantageSettings(baseline="running")},
        {"advantages": AdvantageSettings(baseline="role")},
    ],
)
def test_a_resumed_run_trains_on_what_an_uninterrupted_one_would_have(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, final = train(tmp_path / "whole", make_plan(**changes))
    begun, halfway = train(tmp_path / "parts", make_plan(num_steps=2, **changes))
    saved = TrainState.from_dict(json.loads(json.dumps(halfway.to_dict())))
    assert saved == halfway
    rest, resumed = train(tmp_path / "parts", make_plan(**changes), state=saved)
    assert contents(begun) + contents(rest) == contents(whole)
    assert resumed.running == final.running  # bit for bit
    assert resumed.running.count == resumed.num_episodes == 48  # 4 steps of 4 groups of 3


def test_a_state_of_before_there_were_running_statistics_begins_them() -> None:
    values = TrainState(step=3).to_dict()
    del values["running"]
    assert TrainState.from_dict(values) == TrainState(step=3)


def test_step_rewards_and_reward_settings_reach_the_batch(tmp_path: Path) -> None:
    # every episode's one turn earns 1 for its event and lambda for its being new, and is clipped: all are alike
    plan = make_plan(
        num_steps=1,
        step_rewards=StepRewardSettings(mode="decision_stepwise", indicator_lambda=1.0),
        rewards=RewardSettings(clip=1.5),
    )
    parts, _ = train(tmp_path, plan)
    line = read_metrics(tmp_path)[0]
    assert (line["batch/mean_return"], line["batch/constant_group_fraction"]) == (1.5, 1.0)
    assert line["rollout/reward_mean"] != 1.5
    assert not parts.batches[0].advantages.any()


@pytest.mark.parametrize("changes", [{}, {"constant_groups": "refill"}, {"constant_groups": "drop"}])
def test_played_ahead_every_task_is_played_once_and_within_the_bound(tmp_path: Path, changes: dict[str, Any]) -> None:
    plan = make_plan(max_staleness=2, num_steps=8, **changes)
    parts, state = train(tmp_path, plan)
    lines = read_metrics(tmp_path)
    assert parts.versions == list(range(1, 9))
    assert all(0 <= line["rollout/staleness_mean"] <= line["rollout/staleness_max"] <= 2 for line in lines)
    assert lines[0]["rollout/staleness_max"] == 0
    taken = seeds_of(tmp_path, range(1, 9))
    assert len(taken) == len(set(taken)) == 32 + sum(int(line["batch/refilled_groups"]) for line in lines)
    num_late = sum(line["rollout/stale_dropped"] for line in lines) / GROUP_SIZE
    assert state.num_tasks == len(taken) + num_late + len(state.pending_tasks)
    if "constant_groups" not in changes:
        assert [batch.num_trajectories for batch in parts.batches] == [12] * 8
        assert state.pending_tasks == ()


@pytest.mark.parametrize(("max_staleness", "seconds"), [(0, "time/rollout_seconds"), (1, "time/step_seconds")])
def test_tokens_are_counted_over_the_time_in_which_episodes_were_played(
    tmp_path: Path, max_staleness: int, seconds: str
) -> None:
    # Played ahead, episodes go on while the learner works. Every sampled token is trained on here.
    train(tmp_path, make_plan(max_staleness=max_staleness))
    lines = read_metrics(tmp_path)
    assert len(lines) == 4
    for line in lines:
        assert line["rollout/sampled_tokens_per_second"] * line[seconds] == pytest.approx(line["batch/trained_tokens"])
        assert line["time/rollout_seconds"] < line["time/step_seconds"]
        assert ("rollout/staleness_max" in line) == (max_staleness > 0)


def test_a_run_played_ahead_says_what_was_pending_and_a_resumed_one_plays_it_first(tmp_path: Path) -> None:
    plan = make_plan(max_staleness=2, num_steps=6)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    parts, _ = train(whole, plan)
    saved = TrainState.from_dict(json.loads(json.dumps(parts.saved[2].to_dict())))
    assert saved == parts.saved[2]
    assert saved.step == 2
    before, first = seeds_of(whole, (1, 2)), training_seed(0, 0)
    pending = {first + number for number in saved.pending_tasks}
    assert len(pending) == 2 * 4  # two steps ahead
    assert sorted([*before, *pending]) == list(range(first, first + saved.num_tasks))
    shutil.copytree(whole, resumed)
    train(resumed, plan, state=saved)
    after = seeds_of(resumed, range(3, 7))
    num_late = sum(line["rollout/stale_dropped"] for line in read_metrics(resumed)[2:]) / GROUP_SIZE
    assert len(after) == len({*after} - {*before}) == 4 * 4
    assert len(pending - {*after}) <= num_late


def test_a_learner_that_fails_in_its_thread_ends_a_run_played_ahead(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(parts: Parts, batch: TrainBatch, sink: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        raise NonFiniteError("five steps in a row")

    monkeypatch.setattr(Parts, "update", fail)
    with pytest.raises(NonFiniteError, match="five steps in a row"):
        train(tmp_path, make_plan(max_staleness=1))


def test_a_cancelled_run_ends_after_the_update_that_its_thread_is_making(tmp_path: Path) -> None:
    class Cancelled(Parts):
        @asynccontextmanager
        async def asleep(self) -> AsyncIterator[None]:
            self.loop, self.run = asyncio.get_running_loop(), asyncio.current_task()
            yield

        def update(self, batch: TrainBatch, sink: Any = None) -> Any:
            may_end = threading.Event()
            assert self.run is not None
            self.loop.call_soon_threadsafe(self.run.cancel)
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.05, may_end.set)
            may_end.wait()
            return super().update(batch)

    class End(QuietProgress):
        def finished(self) -> None:
            parts.log.append("finished")

    parts = Cancelled()
    with pytest.raises(asyncio.CancelledError):
        train(tmp_path, make_plan(max_staleness=1), parts=parts, progress=End(lambda text: None))
    assert parts.log == ["forget", "evaluate", "forget", "update", "finished"]


def test_a_bound_that_is_missed_from_the_start_is_refused() -> None:
    make_plan(max_staleness=2, weight_sync_interval=3)
    with pytest.raises(ConfigError, match=r"max_staleness: expected at least .*weight_sync_interval - 1 = 2, .* got 1"):
        make_plan(max_staleness=1, weight_sync_interval=3)


def seeds_of(folder: Path, steps: Sequence[int]) -> list[int]:
    """The tasks of the groups that were trained on in these steps, group by group."""
    files = [folder / "episodes" / f"step_{step:06d}.jsonl.gz" for step in steps]
    return [seed for file in files for seed in {episode.task.seed for episode in read_episodes(file)}]


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4]), (3, [3])])
def test_training_episodes_are_written_as_often_as_asked_for(tmp_path: Path, every: int, expected: list[int]) -> None:
    train(tmp_path, make_plan(log_episodes_every_n_iters=every))
    written = sorted(path.name.removesuffix(".jsonl.gz") for path in (tmp_path / "episodes").glob("step_*"))
    assert written == [f"step_{step:06d}" for step in expected]


def test_metrics_are_written_every_so_many_steps_and_after_the_last(tmp_path: Path) -> None:
    train(tmp_path, make_plan(num_steps=5, log_interval=2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [2, 4, 5]


@pytest.mark.parametrize("baseline", ["batch", "running", "role", "none"])
@pytest.mark.parametrize("constant_groups", ["drop", "refill"])
def test_groups_that_teach_something_cannot_be_left_out_as_constant(baseline: Any, constant_groups: Any) -> None:
    with pytest.raises(ConfigError, match=f'constant_groups: "{constant_groups}"'):
        make_plan(constant_groups=constant_groups, advantages=AdvantageSettings(baseline=baseline))


class Generous:
    """A judge that gives every turn and every episode full marks."""

    name = "generous"

    async def judge(self, request: JudgeRequest) -> Judgement:
        event, outcome = (
            review_of(rubric, {id_: CriterionScore(1.0, "") for id_ in rubric.ids}, "")
            for rubric in request.rubrics.parts.values()
        )
        return Judgement(self.name, (event,) * len(request.trajectory.turns), outcome)

    async def close(self) -> None:
        pass


class Judged(Parts):
    """Its updates last until the judge, asked over HTTP when the learner begins, has answered in the event loop."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.answered = threading.Event()
        self.in_time: list[bool] = []

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        self.answered.clear()
        asking = asyncio.create_task(self.ask())
        yield
        await asking

    async def ask(self) -> None:
        judge = HttpJudge(self.url, JudgeOptions(event=True, outcome=True), asking=AskingSettings(timeout_seconds=30.0))
        try:
            await judge.judge(request("a heron", "dot"))
        finally:
            await judge.close()
        self.answered.set()

    def update(self, batch: TrainBatch, sink: Any = None) -> Any:
        self.in_time.append(self.answered.wait(10))
        return super().update(batch, sink)


def test_a_judge_answers_over_http_during_a_long_update(tmp_path: Path) -> None:
    with BackgroundServer(create_judge_app(Generous())) as server:
        parts = Judged(server.url)
        train(tmp_path, make_plan(num_steps=2), parts=parts)
    assert parts.in_time == [True, True]


class Hanging(Letters):
    """Never answers the first action, and asks for a stop meanwhile."""

    def __init__(self, task: Task, steering: Steering) -> None:
        super().__init__(task, 2)
        self.steering = steering

    async def step(self, action: str) -> Any:
        self.steering.stop("SIGTERM")
        await asyncio.Event().wait()


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize(
    ("occasion", "steps_done"),
    [("eval_000000", 0), ("update 2", 2), ("publish 2", 2), ("eval_000002", 2), ("step 3", 2)],
)
def test_a_stop_at_any_moment_leaves_a_checkpoint_that_goes_on_as_if_nothing_had_been(
    tmp_path: Path, occasion: str, steps_done: int, max_staleness: int
) -> None:
    plan = make_plan(max_staleness=max_staleness)
    whole, _ = train(tmp_path / "whole", plan)
    num_saved: list[int] = []

    class Noting(Steering):
        def saved(self) -> None:
            num_saved.append(len(parts.saved))
            super().saved()

    steering = Noting()
    parts = Parts(at={occasion: lambda: steering.stop("SIGTERM")})
    episodes: list[int] = []

    def make_env(task: Task) -> Letters:
        episodes.append(task.seed)
        hangs = occasion == "step 3" and parts.version == 2 and len(episodes) > 2 * 4 * GROUP_SIZE
        return Hanging(task, steering) if hangs else Letters(task, 2)

    with pytest.raises(StopRequested, match="stopped by SIGTERM"):
        train(tmp_path / "parts", plan, parts=parts, steering=steering, make_env=make_env)
    assert num_saved == [len(parts.saved)]  # told once, after the last checkpoint
    saved = parts.saved[-1]
    assert saved.step == len(parts.batches)
    assert saved.step == steps_done or (max_staleness == 1 and occasion == "step 3")  # its episodes hang ahead of it
    rest, final = train(tmp_path / "parts", plan, state=saved)
    assert final.step == 4
    assert [*parts.evaluations, *rest.evaluations] == whole.evaluations == ["eval_000000", "eval_000002", "eval_000004"]
    if max_staleness == 0:  # played ahead, samples are of other versions
        assert contents(parts) + contents(rest) == contents(whole)


@pytest.mark.parametrize(
    ("occasion", "steps"), [("update 1", [0, 0, 1, 2, 4]), ("eval_000002", [0, 0, 2, 4]), ("eval_000004", [0, 0, 2, 4])]
)
def test_requests_for_a_checkpoint_are_met_by_the_next_one_of_the_present_state(
    tmp_path: Path, occasion: str, steps: list[int]
) -> None:
    """Two at once; after the second step and after the last a checkpoint is due all the same."""
    steering, names = Steering(), ("checkpoint.request", "checkpoint.other.request")
    parts = Parts(at={occasion: lambda: [(tmp_path / name).touch() for name in names]})
    with steering.heeding_files(tmp_path):
        train(tmp_path, make_plan(), parts=parts, steering=steering)
    assert [state.step for state in parts.saved] == steps
    assert list(tmp_path.glob("*.request")) == []


def test_adaptive_tasks_are_those_that_teach_and_a_slice_of_all_is_logged(tmp_path: Path) -> None:
    """Of eight tasks, the four with an even seed are constant; of the eight groups of two steps one is uniform."""
    _, state = train(tmp_path, make_plan(num_steps=24, adaptive_tasks=8))
    first, seeds = training_seed(0, 0), seeds_of(tmp_path, range(13, 25))
    assert set(seeds) <= set(range(first, first + 8))
    assert sum(seed % 2 for seed in seeds) > 0.75 * len(seeds)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "rollout/uniform_reward_mean" in line] == list(range(1, 25, 2))
    (uniform,) = {
        episode.task.seed
        for episode in read_episodes(tmp_path / "episodes" / "step_000003.jsonl.gz")
        if episode.trajectory_id.startswith("step_000003/group_0000")
    }
    assert uniform == first + 1  # group 8 of the run, the second uniform one
    assert {choice for choice, _, _ in state.task_counts.counts} == set(range(8))
    assert all((informative > 0) == ((first + choice) % 2 == 1) for choice, informative, _ in state.task_counts.counts)


@pytest.mark.parametrize("changes", [{}, {"constant_groups": "refill"}, {"adaptive_tasks": 0}])
def test_a_resumed_run_chooses_the_tasks_of_an_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    mixture = {"test/Others-v0": 0.5} if changes.get("adaptive_tasks") == 0 else {}
    plan = make_plan(num_steps=6, mixture=mixture, **{"adaptive_tasks": 8, **changes})
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    parts, state = train(whole, plan)
    saved = TrainState.from_dict(json.loads(json.dumps(parts.saved[2].to_dict())))
    assert (saved, saved.step) == (parts.saved[2], 2)
    shutil.copytree(whole, resumed)
    parts_again, state_again = train(resumed, plan, state=saved)
    assert contents(parts_again) == contents(parts)[2:]
    assert state_again.task_counts == state.task_counts


def test_adaptive_tasks_played_ahead_are_counted_and_those_pending_are_played_again(tmp_path: Path) -> None:
    plan = make_plan(num_steps=6, max_staleness=1, adaptive_tasks=8)
    parts, _ = train(tmp_path, plan)
    saved = parts.saved[2]
    assert saved.pending_tasks == tuple(number for number, _ in saved.task_counts.in_play)
    assert sum(num for _, _, num in saved.task_counts.counts) > 0
    played_again = Collector(plan, SimpleNamespace(play_group=None), saved)  # type: ignore[arg-type]
    assert played_again.task_counts == saved.task_counts


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"adaptive_tasks": 0}, r"adaptive_tasks: 0 chooses from the environments of \[\[rollout.mixture\]\]"),
        (
            {"adaptive_tasks": 5, "advantages": AdvantageSettings(baseline="none")},
            '"none" the others teach',
        ),
    ],
)
def test_a_choice_of_tasks_that_means_nothing_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_plan(**changes)


class Words(Letters):
    """Two to four turns by what is said; worth the letters of all of them."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, same_for=1_000_000)
        self.words: list[str] = []

    async def step(self, action: str) -> Any:
        self.words.append(action)
        is_over = len(self.words) == 4 or (len(self.words) > 1 and action < "m")
        _, worth, *_ = await super().step("".join(self.words))
        return f"heard {action}", worth if is_over else 0.0, is_over, False, {}


FORKS = {
    "forks_per_episode": 2,
    "advantages": AdvantageSettings(level="trajectory", baseline="leave_one_out", scale="none"),
}


def test_a_resumed_run_forks_what_an_uninterrupted_one_would_have(tmp_path: Path) -> None:
    whole, final = train(tmp_path / "whole", make_plan(**FORKS), make_env=Words)
    begun, halfway = train(tmp_path / "parts", make_plan(num_steps=2, **FORKS), make_env=Words)
    saved = TrainState.from_dict(json.loads(json.dumps(halfway.to_dict())))
    rest, resumed = train(tmp_path / "parts", make_plan(**FORKS), state=saved, make_env=Words, concurrency=1)
    assert contents(begun) + contents(rest) == contents(whole)
    assert (resumed.sampled_tokens, resumed.num_episodes) == (final.sampled_tokens, final.num_episodes)
    lines = read_metrics(tmp_path / "whole")
    assert all(line["rollout/num_episodes"] == 12 < line["rollout/num_forks"] + 12 <= 36 for line in lines)
    for line, batch in zip(lines, whole.batches, strict=True):
        assert batch.num_trajectories == 12 + line["rollout/num_forks"]
        assert line["rollout/sampled_tokens"] < batch.num_actions  # replayed tokens are trained on, and counted once


def test_forks_played_ahead_are_as_old_as_the_turns_that_they_repeat(tmp_path: Path) -> None:
    train(tmp_path, make_plan(num_steps=6, max_staleness=1, **FORKS), make_env=Words)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert sum(line["rollout/num_forks"] for line in lines) > 12
    assert all(line["rollout/staleness_max"] <= 1 for line in lines)


def test_forks_that_are_not_compared_with_their_siblings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.forks_per_episode: .* set advantages.level = \"trajectory\", adv"):
        make_plan(forks_per_episode=1)
