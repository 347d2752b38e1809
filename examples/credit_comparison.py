"""Does credit that reaches the turns pay? Three methods learn GuessNumber under the same budget, five run seeds each.

All earn the same rewards: 1 for finding the number, -0.2 for each guess that an earlier hint had ruled out, -0.4 for an
answer that is no number. They differ in who is credited with them, and in the importance ratio.

Run: python examples/credit_comparison.py          (15 runs, 2 at a time: about 20 minutes on two CPU cores)
Runs that are complete are not done again, so an interrupted comparison goes on where it was.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The clips: of the quickstart for a ratio that a whole (short) episode shares, of the GSPO paper's GRPO runs for one
# per token. The rates: the best of 1e-3, 2e-3 and 4e-3 for each method after 140 iterations of run seed 100.
METHODS = {
    "GSPO-token, turn credit": {
        "algorithm.variety": "gspo_token",
        "advantages.level": "turn",
        "loss.clip_low": 3e-3,
        "loss.clip_high": 4e-3,
        "training.learning_rate": 2e-3,
    },
    "GSPO, pooled credit": {
        "algorithm.variety": "gspo",
        "advantages.level": "trajectory",
        "loss.clip_low": 3e-3,
        "loss.clip_high": 4e-3,
        "training.learning_rate": 4e-3,
    },
    "GRPO (token ratio), pooled credit": {
        "algorithm.variety": "grpo",
        "advantages.level": "trajectory",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.27,
        "training.learning_rate": 4e-3,
    },
}
BUDGET = {
    "rollout.episodes_per_batch": 64,
    "rollout.max_concurrent_rollouts": 64,
    "training.batch_size": 16,
    "training.update_epochs": 1,
    "loss.entropy_coef": 0,
    "training.iterations_per_epoch": 240,
    "training.stop_at_success_rate": 1.0,
    "evaluation.every_n_iters": 10,
    "warmup.num_episodes": 1024,
    "warmup.num_epochs": 4,
    "warmup.learning_rate": 2e-3,
    "warmup.batch_size": 64,
}
GOAL = 0.7  # success on the 200 held-out seeds; blind guessing reaches 0.41, consistent guessing 0.84, halving 1


def curve_of(method: str, seed: int, folder: Path, changes: list[str]) -> list[tuple[int, float]]:
    """Train once, in a process of its own, unless that has been done; [(iteration, success on held-out seeds), ...]."""
    label = f"{list(METHODS).index(method)}_{METHODS[method]['algorithm.variety']}_seed{seed}"
    summary = folder / label / "summary.json"
    if not summary.exists() or json.loads(summary.read_text())["status"] != "completed":
        settings = {**BUDGET, **METHODS[method], "run.seed": seed, "run.folder": folder, "model.label": label}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "gspo_gym.train", "configs/quickstart.toml"]
        done = subprocess.run(
            [*command, *overrides, *changes, "--set-aside"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{label}: {done.stderr}")
    return [(step, score) for step, score in json.loads(summary.read_text())["curve"]]


def steps_to_goal(curve: list[tuple[int, float]]) -> float:
    """The iteration of the first evaluation that reaches the goal; infinity if none does."""
    return next((step for step, score in curve if score >= GOAL), math.inf)


def table(curves: dict[str, list[list[tuple[int, float]]]]) -> str:
    """The result in Markdown: medians, and every run's value in the order of the seeds."""
    lines = [
        f"| method | iterations to success {GOAL:g}: median | each seed | final success: median | each seed |",
        "|---|---|---|---|---|",
    ]
    for method, runs in curves.items():
        steps, finals = [steps_to_goal(curve) for curve in runs], [curve[-1][1] for curve in runs]
        shown = [f"{value:g}" if value < math.inf else "not reached" for value in (statistics.median(steps), *steps)]
        rates = [f"{value:.3f}" for value in (statistics.median(finals), *finals)]
        lines.append(f"| {method} | {shown[0]} | {', '.join(shown[1:])} | {rates[0]} | {', '.join(rates[1:])} |")
    return "\n".join(lines)


def plot(curves: dict[str, list[list[tuple[int, float]]]], file: Path) -> None:
    """Every run as a thin line, the median of a method as a thick one."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "gspo_gym"  # the same curves give the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (method, runs) in zip(("tab:blue", "tab:orange", "tab:green"), curves.items(), strict=True):
        for run in runs:
            axes.plot(*zip(*run, strict=True), color=color, alpha=0.25, linewidth=0.8)
        steps = [step for step, _ in max(runs, key=len)]  # one that reached 1 has stopped, and stays where it was
        medians = [statistics.median(run[min(i, len(run) - 1)][1] for run in runs) for i in range(len(steps))]
        axes.plot(steps, medians, color=color, linewidth=2.2, label=method)
    axes.axhline(GOAL, color="gray", linestyle=":", linewidth=1)
    axes.set(xlabel="iterations of 64 episodes", ylabel="success on held-out seeds", ylim=(0, 1))
    axes.legend(loc="upper left", title=f"median and all of {len(runs)} run seeds")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Compare credit per turn with credit per episode.")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="over the settings of every run")
    parser.add_argument("--folder", type=Path, default=Path("runs/credit_comparison"))
    parser.add_argument("--num-seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--plot", type=Path, help="write a figure there (SVG or PNG); needs gspo-gym[plot]")
    options = parser.parse_intermixed_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        # seed by seed, so that an unfinished comparison is a comparison of fewer seeds
        running = {
            (method, seed): pool.submit(curve_of, method, seed, options.folder, options.changes)
            for seed in range(options.num_seeds)
            for method in METHODS
        }
        curves = {method: [running[method, seed].result() for seed in range(options.num_seeds)] for method in METHODS}
    print(table(curves))
    if options.plot is not None:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
