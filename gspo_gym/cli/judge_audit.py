"""`gspo-gym judge audit EPISODES --gold LABELS`: measure how far a judge can be believed (`judge/audit/audit.py`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.files import require_writable, write_output
from gspo_gym.cli.judge_score import add_judge_arguments, load_judge_config, load_judge_rubrics

if TYPE_CHECKING:
    from gspo_gym.config.run_config import RunConfig
    from gspo_gym.judge.audit.audit import AuditSettings
    from gspo_gym.judge.audit.labels import Label
    from gspo_gym.judge.audit.report import AuditReport
    from gspo_gym.judge.base import Rubrics
    from gspo_gym.types import Trajectory


def add_command(commands: Any) -> None:
    """Add `audit` to the commands of `judge`."""
    audit = commands.add_parser("audit", help="compare a judge with gold labels; look for biases; attack it")
    audit.add_argument("episodes", type=Path, metavar="EPISODES", help="a run's folder; or a .jsonl file of episodes")
    audit.add_argument("--gold", type=Path, required=True, metavar="LABELS", help="a label a line, see judge/labels.py")
    add_judge_arguments(audit)
    audit.add_argument("--repeats", type=int, default=2, help="further judgements of every episode (default 2)")
    audit.add_argument(
        "--position-episodes", type=int, default=8, help="episodes to look for position bias in (default 8)"
    )
    audit.add_argument(
        "--attacked-episodes", type=int, default=2, help="episodes that the battery is tried on (default 2)"
    )
    audit.add_argument("--seed", type=int, default=0, help="of the orders of criteria (default 0)")
    audit.add_argument("--json", type=Path, metavar="FILE", help="write the report there for machines")
    audit.set_defaults(run=audit_episodes)


def audit_episodes(arguments: argparse.Namespace) -> int:
    """Print the report; return 1 if an episode got no score."""
    from gspo_gym.base.loops import run_to_end
    from gspo_gym.judge.audit.audit import AuditSettings
    from gspo_gym.judge.audit.labels import labelled_episodes, read_labels
    from gspo_gym.judge.rescoring import stored_episodes

    if arguments.json is not None:
        require_writable(arguments.json)
    labels = read_labels(arguments.gold)
    labelled = labelled_episodes(stored_episodes(arguments.episodes), labels)
    config = load_judge_config(arguments.episodes, arguments)
    rubrics = load_judge_rubrics(config, arguments, [trajectory for trajectory, _ in labelled])
    settings = AuditSettings(
        num_repeats=arguments.repeats,
        num_position_episodes=arguments.position_episodes,
        num_attacked_episodes=arguments.attacked_episodes,
        seed=arguments.seed,
    )
    report = run_to_end(_audit(config, rubrics, settings, labelled))
    print(report)
    if arguments.json is not None:
        write_output(arguments.json, json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n")
    return 0 if report.num_unscored == 0 else 1


async def _audit(
    config: RunConfig, rubrics: Rubrics, settings: AuditSettings, labelled: Sequence[tuple[Trajectory, Label]]
) -> AuditReport:
    from gspo_gym.config.build.judge import build_judge_variants
    from gspo_gym.judge.audit.attacks import attacks
    from gspo_gym.judge.audit.audit import JudgeAudit

    judges = build_judge_variants(config, num_repeats=settings.num_repeats)
    audit = JudgeAudit(
        judges.judge,
        rubrics,
        settings=settings,
        repeats=judges.repeats,
        in_given_order=judges.in_given_order,
        attacks=attacks(rubrics),
    )
    try:
        return await audit.run(labelled)
    finally:
        await judges.close()
