"""`gspo-gym env collect NAME --policy POLICY --out FILE`: write a data set of episodes, as JSON lines or Parquet."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.cli.command_line import add_environment, env_config_of
from gspo_gym.seeding import FIRST_TRAINING_SEED

if TYPE_CHECKING:
    from gspo_gym.config.build.episode_collection import CollectedEpisodes
    from gspo_gym.types import Trajectory


def add_command(subparsers: Any) -> None:  # Any: argparse does not name the type of what add_subparsers gives
    """Add `collect` to the commands of `env`."""
    parser = subparsers.add_parser("collect", help="play episodes with any policy and keep them in a file")
    add_environment(parser)
    parser.add_argument(
        "--policy",
        required=True,
        metavar="WHO",
        help="scripted:NAME, a model (tiny:qwen3-64, a folder, a hub id), or openai:MODEL[@BASE_URL]",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="a new file, .jsonl or .parquet")
    parser.add_argument(
        "--seeds",
        default=f"{FIRST_TRAINING_SEED}:{FIRST_TRAINING_SEED + 100}",
        help='which tasks, such as "3,5,8" (default: the first 100 training tasks, %(default)s; below 2**31 are '
        "the tasks of evaluations)",
    )
    parser.add_argument("--per-seed", type=int, default=1, help="episodes of each (default 1)")
    parser.add_argument("--max-turns", type=int, default=50, help="actions per episode (default 50)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens per action (default 1024)")
    parser.add_argument("--concurrent", type=int, default=16, help="episodes at once (default 16)")
    parser.add_argument(
        "--step-timeout-seconds", type=float, default=30.0, help="for each call of the environment (default 30)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of a model's sampling (default 1)")
    parser.add_argument("--only-successes", action="store_true", help="keep episodes in which the task was achieved")
    parser.add_argument(
        "--resume", action="store_true", help="go on with what an interrupted command left in FILE.part"
    )
    parser.set_defaults(run=collect)


def collect(arguments: argparse.Namespace) -> int:
    """Collect and write; return 0 if every requested episode was played, else 1.

    Each episode is in FILE.part as soon as it is over. Ctrl-C leaves that file for `--resume` and returns 130. An
    environment that holds the interpreter ends the process and leaves it, too (`watchdog.py`).
    """
    from rich.console import Console

    from gspo_gym.base.files import PartFile
    from gspo_gym.base.settings import parse_seeds
    from gspo_gym.config.build.episode_collection import CollectSettings, collect_episodes
    from gspo_gym.rollout.episode_files import require_writable, save_episodes, trajectory_from_json, trajectory_to_json
    from gspo_gym.run.report.progress import counting

    require_writable(arguments.out)
    seeds, env_config = parse_seeds(arguments.seeds), env_config_of(arguments.option)
    settings = CollectSettings(
        episodes_per_seed=arguments.per_seed,
        max_turns=arguments.max_turns,
        max_output_tokens=arguments.max_tokens,
        max_concurrent=arguments.concurrent,
        step_timeout_seconds=arguments.step_timeout_seconds,
        temperature=arguments.temperature,
    )
    asked = {"env": arguments.name, "env_config": env_config, "policy": arguments.policy, "settings": asdict(settings)}
    part = PartFile(arguments.out, work="collection", asked=asked, resumes=arguments.resume)
    found = part.read(trajectory_from_json)
    num_asked = len(seeds) * settings.episodes_per_seed
    if found:
        print(f"{len(found)} episodes are there already, in {part.path}", file=sys.stderr)
    try:
        with counting(Console(stderr=True), num_asked, done=len(found)) as count:

            def keep(trajectory: Trajectory) -> None:
                part.append(trajectory_to_json(trajectory))
                count()

            collected = collect_episodes(
                arguments.name,
                arguments.policy,
                seeds=seeds,
                env_config=env_config,
                settings=settings,
                already=found,
                on_episode=keep,
                out=arguments.out,
            )
    except KeyboardInterrupt:
        told = f"stopped: {part.num_items} of {num_asked} episodes are in {part.path}; go on with --resume"
        print(told, file=sys.stderr)
        return 130
    finally:
        part.remove_if_empty()
    kept = [t for t in collected.trajectories if t.success or not arguments.only_successes]
    save_episodes(arguments.out, kept, policy_name=collected.policy_name, tools=collected.tools)
    part.remove()
    _tell(arguments.out, kept, collected)
    return 1 if collected.dropped else 0


def _tell(out: Path, kept: Sequence[Trajectory], collected: CollectedEpisodes) -> None:
    returns = [trajectory.reward for trajectory in kept if trajectory.is_scored]
    mean = f", mean return {sum(returns) / len(returns):.3f}" if returns else ""
    print(f"{len(kept)} episodes of {collected.env_id} by {collected.policy_name}{mean} -> {out}")
    if left_out := len(collected.trajectories) - len(kept):
        print(f"{left_out} without success left out")
    for reason, count in Counter(dropped.reason for dropped in collected.dropped).most_common():
        print(f"{count} could not be played: {reason}", file=sys.stderr)
