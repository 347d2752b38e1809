"""What recording tokens costs a training step: `python -m benchmarks tokens`.

The quickstart is trained for a few steps. Then the update on its last step's episodes is repeated, in turn with and
without a record of the tokens, at a learning rate of 0 so that all updates do the same work. The record's whole cost
(in the update, packing, and the file on the disk) is compared with a step of that run. Medians.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from gspo_gym.cli.train import run_training
from gspo_gym.config.build.trainer import build_learner, build_plan, build_policy
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.learning.batching import build_batch
from gspo_gym.learning.tokens import TokenTable
from gspo_gym.rollout.episode_files import read_episodes
from gspo_gym.run.collect import Collected
from gspo_gym.run.recording import RunRecorder
from gspo_gym.run.records import read_metrics
from gspo_gym.run.tokens import open_tokens, pack_tokens, token_path
from gspo_gym.types import Trajectory, TrajectoryGroup

MAX_SHARE = 0.02
_QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.toml"


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds of a recorded step, an entry a repeat, and the sizes of its file.

    Attributes:
        step: median seconds of a step of the run.
        update: updates without a record.
        recorded: the updates beside them, with a record that is in its file at the end.
        num_bytes, column_bytes, num_tokens: of the file, and of its columns.
    """

    step: float
    update: list[float]
    recorded: list[float]
    num_bytes: int
    column_bytes: int
    num_tokens: int

    @property
    def seconds(self) -> float:
        """The median of the differences of each pair."""
        return statistics.median(b - a for a, b in zip(self.update, self.recorded, strict=True))

    @property
    def share(self) -> float:
        """The part of a step that recording it costs."""
        return self.seconds / self.step


def run_tokens(*, num_steps: int, repeats: int) -> int:
    """Measure and print; return 1 if recording costs more than the goal."""
    with tempfile.TemporaryDirectory(prefix="gspo_gym-benchmark-") as folder:
        config = quickstart(Path(folder), num_steps=num_steps)
        run_training(config)
        costs = measure(config, repeats=repeats)
    every, header = load_config(_QUICKSTART).run.log_tokens_every_n_iters, costs.num_bytes - costs.column_bytes
    update = statistics.median(costs.update)
    Console(width=200).print(
        f"quickstart: a step takes {costs.step:.3f} s, median of {num_steps}"
        f"; its update alone {update:.3f} s, median of {repeats} pairs\n"
        f"recording a step costs {1000 * costs.seconds:.2f} ms: {costs.share:.2%} of it (goal: at most {MAX_SHARE:.0%})"
        f"; recording every {every}th, as the quickstart does, {costs.share / every:.2%}\n"
        f"a file of {costs.num_tokens:,} tokens: {costs.column_bytes / costs.num_tokens:.1f} bytes a token (goal: "
        f"about 30), and {header:,} of a header with the names of the episodes",
        highlight=False,
    )
    return int(costs.share > MAX_SHARE)


def quickstart(folder: Path, *more: str, num_steps: int) -> RunConfig:
    """Return the quickstart's config for so many steps, all of them recorded, in a folder; `more` overrides it."""
    overrides = [
        f"run.folder={folder}",
        "run.log_tokens_every_n_iters=1",
        f"training.iterations_per_epoch={num_steps}",
        f"training.checkpoint_every_n_iters={num_steps}",
        f"evaluation.every_n_iters={num_steps}",
        "evaluation.seeds=0:16",
        *more,
    ]
    return load_config(_QUICKSTART, overrides=overrides)


def measure(config: RunConfig, *, repeats: int) -> TokenCosts:
    """Return the costs on the last step of a run that has ended; the first pair of updates is not counted."""
    folder, step = config.run_folder, config.training.iterations_per_epoch
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in read_episodes(folder / "episodes" / f"step_{step:06d}.jsonl.gz"):
        groups[trajectory.task.task_id].append(trajectory)
    played = tuple(TrajectoryGroup(each[0].task, tuple(each), len(each)) for each in groups.values())
    collected = Collected(played, played, num_dropped=0, num_refilled=0, failures=())
    plan = build_plan(config)
    built = build_batch(played, plan.advantages, rewards=plan.rewards, step_rewards=plan.step_rewards)
    assert built.batch is not None, "the quickstart's episodes differ in what they earn"
    policy = build_policy(config, str(folder / "checkpoints" / f"step_{step:06d}"))
    still = config.training.model_copy(update={"learning_rate": 1e-30})  # every update is of the same weights
    learner = build_learner(config.model_copy(update={"training": still}), policy)
    recorder = RunRecorder(folder, last_step=step)
    update: list[float] = []
    recorded: list[float] = []
    for number in range(repeats + 1):
        table = TokenTable()
        for is_recorded in (number % 2 == 0, number % 2 == 1):  # so that neither always comes first
            started = time.perf_counter()
            learner.update(built.batch, table if is_recorded else None)
            if is_recorded:
                recorder.tokens(step, pack_tokens(step, collected, built, table))
            (recorded if is_recorded else update).append(time.perf_counter() - started)
    path = token_path(folder, step)
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")  # the length of safetensors' JSON, and that
    return TokenCosts(
        step=statistics.median(line["time/step_seconds"] for line in read_metrics(folder)),
        update=update[1:],
        recorded=recorded[1:],
        num_bytes=path.stat().st_size,
        column_bytes=path.stat().st_size - header,
        num_tokens=open_tokens(folder, step).num_tokens,
    )
