"""`gspo-gym judge score RUN`: rejudge stored episodes and print the scores beside the run's own; no model plays.

The run's own files stay as they are. Loads no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_gym.config.run_config import RunConfig
    from gspo_gym.judge.base import Rubrics
    from gspo_gym.judge.blend import RewardBlend
    from gspo_gym.judge.records import JudgedEpisode
    from gspo_gym.judge.rescoring import Rescored
    from gspo_gym.types import Trajectory


def add_command(commands: Any) -> None:
    """Add `score` to the commands of `judge`."""
    score = commands.add_parser("score", help="judge a run's stored episodes again, with another rubric or judge")
    score.add_argument("source", type=Path, metavar="RUN", help="a run's folder; or a .jsonl file of episodes")
    add_judge_arguments(score)
    score.add_argument("--episodes", default="", metavar="PREFIX", help="only files of it that begin so: eval_000010")
    score.add_argument("--label", default="rescored", help="the answers go into judgements-LABEL.jsonl (rescored)")
    score.add_argument("--rows", type=int, default=30, help="episodes to show, those that changed most (default 30)")
    score.set_defaults(run=score_run)


def add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_judge_config` and `load_judge_rubrics` read."""
    parser.add_argument("--rubric", metavar="FILE_OR_ID", help="instead of the configuration's; judges all its parts")
    parser.add_argument("--folder", action="append", default=[], type=Path, metavar="DIR", help="where ids are found")
    parser.add_argument("--config", type=Path, metavar="FILE", help="whose [judge] is asked; absent: RUN/config.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")


def score_run(arguments: argparse.Namespace) -> int:
    """Rejudge, write, and print both side by side; return 1 if an episode got no score."""
    from gspo_gym.base.loops import run_to_end
    from gspo_gym.judge.records import JudgementRecorder
    from gspo_gym.judge.rescoring import new_file, side_by_side, stored_episodes

    source: Path = arguments.source
    episodes = stored_episodes(source, arguments.episodes)
    path = new_file(source, arguments.label)
    config = load_judge_config(source, arguments)
    rubrics = load_judge_rubrics(config, arguments, episodes)
    weights = parts_only(config, rubrics)
    rescored = run_to_end(_ask(config, rubrics, weights, episodes, source, JudgementRecorder(path)))
    print("\n".join(side_by_side(rescored, max_rows=arguments.rows)))
    print(f"written to {path}")
    return 0 if all(each.after is not None for each in rescored) else 1


def load_judge_config(source: Path, arguments: argparse.Namespace) -> RunConfig:
    """Load the configuration with its judge enabled, which checks all settings of the judge.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    from gspo_gym.config.run_config import load_config
    from gspo_gym.errors import ConfigError

    path: Path | None = arguments.config
    if path is None:
        path = source / "config.toml"
        if not path.is_file():
            raise ConfigError(f"{source}: there is no config.toml that would say who judges; name one by --config")
    return load_config(path, [*arguments.overrides, "judge.enabled=true"])


def load_judge_rubrics(config: RunConfig, arguments: argparse.Namespace, episodes: Sequence[Trajectory]) -> Rubrics:
    """Load the rubric that the command line names, or the configuration's.

    Raises:
        ConfigError, UnknownNameError: it is not valid.
    """
    from gspo_gym.base.loops import run_to_end
    from gspo_gym.config.build.judge import build_rubrics
    from gspo_gym.errors import ConfigError
    from gspo_gym.judge.rubric_files import load_rubrics

    if arguments.rubric is not None:
        rubrics = load_rubrics(arguments.rubric, folders=arguments.folder)
        rubrics.require_totals()
        return rubrics
    rubrics_of = build_rubrics(config)

    async def of_first() -> Rubrics:  # without a task app all tasks have the same
        return await rubrics_of(episodes[0].task)

    rubrics = run_to_end(of_first())
    if not rubrics.parts:
        raise ConfigError("the rubric is known only to the judge at services.judge_url; name one by --rubric")
    return rubrics


def parts_only(config: RunConfig, rubrics: Rubrics) -> RewardBlend:
    """Return the configuration's blend without the parts that the rubric does not have."""
    assert config.judge is not None  # it was enabled
    weights = config.judge.blend
    return weights.model_copy(update={part: 0.0 for part in ("event", "outcome") if part not in rubrics.parts})


async def _ask(
    config: RunConfig,
    rubrics: Rubrics,
    weights: RewardBlend,
    episodes: Sequence[Trajectory],
    source: Path,
    write: Callable[[JudgedEpisode], None],
) -> list[Rescored]:
    from gspo_gym.config.build.judge import build_judge_variants
    from gspo_gym.judge.rescoring import rescore, stored_judgements

    judges = build_judge_variants(config)
    try:
        before = stored_judgements(source)
        return await rescore(judges.judge, rubrics, episodes, weights, before=before, on_judged=write)
    finally:
        await judges.close()
