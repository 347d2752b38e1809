"""`gspo-gym credit ENV`: how right each estimator of a turn's advantage is, in this environment and for this policy."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gspo_gym.base.files import require_writable, write_output
from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import parse_seeds
from gspo_gym.base.tables import table
from gspo_gym.cli.command_line import SCRIPTED, add_environment, base_of, env_config_of
from gspo_gym.credit.bench import BenchReport, BenchSettings, ScoreTurns, measure
from gspo_gym.credit.forks import Player, ScriptedPlayer
from gspo_gym.env.checks.checker import require_replayable
from gspo_gym.env.registry import resolve
from gspo_gym.env.session import EnvSession, looking_at
from gspo_gym.env.watchdog import seconds_until_frozen, watching
from gspo_gym.env.workers.isolation import isolated_factory
from gspo_gym.env.workers.threads import CallersThread
from gspo_gym.errors import UsageError
from gspo_gym.rollout.actors import policy_of
from gspo_gym.run.report.progress import counting
from gspo_gym.types import Trajectory

_MIN_CONTINUATIONS = 32
_STEP_TIMEOUT_SECONDS = 30.0
_ADVICE = 'The measurement is ended. Set isolation = "process" in the class of {env}: it then runs in worker processes.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit`."""
    add_environment(parser)
    parser.add_argument(
        "--policy",
        default="scripted:reference+random",
        metavar="POLICY",
        help="scripted:NAME, scripted:NAME+NAME (each turn one of them at random), a model (a run, tiny:qwen3-64, a "
        "folder, an id of the hub), or openai:MODEL[@BASE_URL] (default %(default)s)",
    )
    parser.add_argument("--seeds", default="0:24", help="tasks, a group of each (default %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of each task (default %(default)s)")
    parser.add_argument(
        "--continuations",
        type=int,
        default=_MIN_CONTINUATIONS,
        help="of each prefix, for the truth (default %(default)s, and no fewer)",
    )
    parser.add_argument("--discount", type=float, default=1.0, help="per turn (default 1)")
    parser.add_argument("--max-turns", type=int, default=50, help="actions per episode (default %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=1024, help="tokens per action of a model (default %(default)s)"
    )
    parser.add_argument("--concurrent", type=int, default=64, help="episodes of a model at once (default %(default)s)")
    parser.add_argument(
        "--judge", type=Path, metavar="FILE", help="a configuration whose [judge] scores every turn: an estimator, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores there for machines")
    parser.set_defaults(run=measure_credit)


def measure_credit(arguments: argparse.Namespace) -> int:
    """Refuse what cannot be replayed; print the scores, and write them."""
    from rich.console import Console

    if arguments.continuations < _MIN_CONTINUATIONS:
        raise UsageError(
            f"--continuations: expected at least {_MIN_CONTINUATIONS}, got {arguments.continuations}: with fewer, the "
            "truth is mostly noise"
        )
    seeds, env_config = parse_seeds(arguments.seeds), env_config_of(arguments.option)
    if len(seeds) < 2:
        raise UsageError(
            f"--seeds: expected at least 2 tasks, got {arguments.seeds}: intervals come of their difference"
        )
    if not 0 < arguments.discount <= 1:
        raise UsageError(f"--discount: expected 0 < discount <= 1, got {arguments.discount:g}")
    for option in ("max_turns", "max_tokens", "concurrent"):
        if (value := getattr(arguments, option)) < 1:
            raise UsageError(f"--{option.replace('_', '-')}: expected at least 1, got {value}")
    if arguments.json is not None:
        require_writable(arguments.json)
    env_id, start = resolve(arguments.name), time.monotonic()
    settings = BenchSettings(arguments.group_size, arguments.continuations, arguments.discount)
    limit = seconds_until_frozen(_STEP_TIMEOUT_SECONDS)
    with (
        watching(None, limit, advice=_ADVICE),
        counting(Console(stderr=True), len(seeds) * settings.group_size) as count,
    ):
        require_replayable(env_id, env_config=env_config, seeds=seeds, max_turns=arguments.max_turns)

        def count_group() -> None:
            for _ in range(settings.group_size):
                count()

        report = run_to_end(_measure(arguments, env_id, settings, count_group))
    print(as_table(report))
    if arguments.json is not None:
        request = {
            "environment": env_id,
            "env_config": env_config,
            "policy": arguments.policy,
            "seeds": arguments.seeds,
            "group_size": arguments.group_size,
            "continuations": arguments.continuations,
            "discount": arguments.discount,
            "max_turns": arguments.max_turns,
            "judge": None if arguments.judge is None else str(arguments.judge),
            "seconds": round(time.monotonic() - start, 1),
        }
        write_output(arguments.json, json.dumps(request | report.as_json()) + "\n")
    return 0


def as_table(report: BenchReport) -> str:
    """Return the scores as a table for the terminal, and what its columns mean."""
    head = ("estimator", "correlation", "95%", "slope", "offset", "signs")
    rows = [
        (
            s.name,
            f"{s.correlation:.2f}",
            f"{s.low:.2f} to {s.high:.2f}",
            f"{s.slope:.2f}{' biased' if s.is_biased else ''}",
            f"{s.offset:+.3f}{' *' if s.is_shifted else ''}",
            f"{s.right_signs:.2f}",
        )
        for s in report.scores
    ]
    return "\n".join(
        [
            table(head, rows),
            "",
            f"{report.num_turns} turns; no estimator can have a correlation above {report.ceiling:.2f}, for the errors "
            "of the truth.",
            'slope: 1 if unbiased; "biased": more than 4 standard errors from it. offset: mean of estimate less truth, '
            '"*" if more than 4 standard errors from 0. signs: the share that is right.',
        ]
    )


async def _measure(
    arguments: argparse.Namespace, env_id: str, settings: BenchSettings, on_group: Callable[[], None]
) -> BenchReport:
    seeds = parse_seeds(arguments.seeds)
    if arguments.judge is None:
        async with _open_player(arguments, env_id) as player:
            return await measure(player, seeds, settings, on_group)
    async with _open_judge(arguments.judge) as score_turns, _open_player(arguments, env_id) as player:
        return await measure(player, seeds, settings, on_group, score_turns=score_turns)


@asynccontextmanager
async def _open_judge(path: Path) -> AsyncIterator[ScoreTurns]:
    from gspo_gym.config.build.judge import build_rubrics, judge_variants
    from gspo_gym.config.run_config import load_config
    from gspo_gym.judge.base import JudgeRequest, Rubrics, all_or_none

    config = load_config(path, ["judge.enabled=true"])
    rubrics_of = build_rubrics(config)

    async with judge_variants(config) as judges:

        async def score_one(trajectory: Trajectory) -> tuple[float, ...]:
            event = (await rubrics_of(trajectory.task)).event
            if event is None:
                raise UsageError(f"--judge {path}: it scores no turns; set judge.options.event = true, with a rubric")
            request = JudgeRequest(trajectory, Rubrics(event=event), trajectory.task.env_id)
            return (await judges.judge.judge(request)).event_totals

        async def score_turns(trajectories: Sequence[Trajectory]) -> list[tuple[float, ...]]:
            return await all_or_none([score_one(trajectory) for trajectory in trajectories])

        yield score_turns


@asynccontextmanager
async def _open_player(arguments: argparse.Namespace, env_id: str) -> AsyncIterator[Player]:
    name, factory = base_of(arguments.policy), isolated_factory(env_id, env_config_of(arguments.option))
    if name.startswith(SCRIPTED):
        async with looking_at(factory, env_id) as sample:
            policy = policy_of(sample, name.removeprefix(SCRIPTED))
        session = EnvSession(factory(), env_id=env_id, thread=CallersThread())
        try:
            yield ScriptedPlayer(session, policy, max_turns=arguments.max_turns)
        finally:
            await session.close()
        return

    from gspo_gym.chat.renderer import RendererCache
    from gspo_gym.config.build.episode_collection import CollectSettings, open_player
    from gspo_gym.credit.models import ModelPlayer
    from gspo_gym.rollout.limits import EpisodeLimits

    settings = CollectSettings(max_output_tokens=arguments.max_tokens, max_concurrent=arguments.concurrent)
    async with open_player(name, settings) as model:
        limits = EpisodeLimits(
            max_turns=arguments.max_turns,
            max_output_tokens=arguments.max_tokens,
            max_model_len=model.longest,
            step_timeout_seconds=_STEP_TIMEOUT_SECONDS,
        )
        yield ModelPlayer(
            factory,
            model.act,
            RendererCache(model.tokenizer),
            env_id=env_id,
            limits=limits,
            max_concurrent=arguments.concurrent,
        )
