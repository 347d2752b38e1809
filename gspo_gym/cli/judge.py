"""`gspo-gym judge ...`: rubrics and judges from the command line. No command loads torch.

`check` describes a rubric, `score` rejudges stored episodes, `audit` measures how reliable a judge is. `serve` offers a
judging model or a function under the hosted trainer's judge contract. `fake` serves an OpenAI-compatible endpoint with
verdicts by a fixed rule (`judge/server.py`), to rehearse a configuration without cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from gspo_gym.base.files import require_writable, write_output
from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import read_key
from gspo_gym.base.tables import table
from gspo_gym.cli.command_line import run_or_path
from gspo_gym.config.build.judge import build_rubrics, judge_variants
from gspo_gym.config.run_config import RunConfig, load_config
from gspo_gym.config.words import find_problems
from gspo_gym.errors import ConfigError, MissingExtraError
from gspo_gym.judge.asking import AskingSettings, BudgetLimits, JudgeBudget, JudgementCache
from gspo_gym.judge.attacks import attacks
from gspo_gym.judge.audit import AuditReport, AuditSettings, JudgeAudit
from gspo_gym.judge.gold import labelled_episodes, read_labels
from gspo_gym.judge.model.judge import ModelJudge
from gspo_gym.judge.panel import PythonJudge
from gspo_gym.judge.records import JudgementRecorder
from gspo_gym.judge.rescoring import Rescored, new_file, rescore, side_by_side, stored_episodes, stored_judgements
from gspo_gym.judge.rubric import Rubric, strict_problems
from gspo_gym.judge.rubric_files import find_rubrics, load_rubrics, read_rubrics, read_task_app_rubric
from gspo_gym.judge.settings import JudgeOptions, ModelJudgeSettings

if TYPE_CHECKING:
    from gspo_gym.judge.base import Judge, Rubrics
    from gspo_gym.remote.guard import App
    from gspo_gym.types import Trajectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `judge`."""
    commands = parser.add_subparsers(dest="judge_command", required=True, metavar="COMMAND")
    _add_check(commands)
    _add_servers(commands)
    _add_score(commands)
    _add_audit(commands)


def _add_check(commands: Any) -> None:
    check = commands.add_parser("check", help="say everything that is wrong with a rubric, or what it will do")
    check.add_argument("rubric", help="a YAML, TOML or JSON file, or an id such as support_desk/bundle@v1")
    check.add_argument(
        "--folder", action="append", default=[], type=Path, metavar="DIR", help="where ids are looked for, too"
    )
    check.add_argument("--task-app", action="store_true", help="a task app's rubric: one, without event and outcome")
    check.add_argument(
        "--strict", action="store_true", help="also ask for what hosted judges ask for; exit status 1 without it"
    )
    check.set_defaults(run=check_rubric)


def check_rubric(arguments: argparse.Namespace) -> int:
    """Print VALID, the criteria and notes; an invalid rubric raises one error that lists all its problems."""
    path = find_rubrics(arguments.rubric, arguments.folder)
    parts = {"rubric": read_task_app_rubric(path)} if arguments.task_app else load_rubrics(str(path)).parts
    print(f"VALID: {path}")
    for name, rubric in parts.items():
        print("\n".join(describe_rubric(name, rubric)))
    for name, rubric in parts.items():
        for note in rubric_notes(rubric, is_event=name == "event"):
            print(f"note: {name}: {note}")
    if not arguments.task_app and len(parts) == 1:
        (name,) = parts
        other_part = "outcome" if name == "event" else "event"
        print(f"note: there is no {other_part} part, so judge.reward_blend.{other_part} must be 0")
    if not arguments.strict:
        return 0
    problems = [f"{name}: {problem}" for name, rubric in parts.items() for problem in strict_problems(rubric)]
    print("STRICT: yes" if not problems else "\n  ".join([f"STRICT: no, {len(problems)} problems:", *problems]))
    return 1 if problems else 0


def describe_rubric(name: str, rubric: Rubric) -> Iterator[str]:
    """Yield lines about a part of the rubric: its goal, and its criteria with their shares of the total."""
    yield f"{name}: version {rubric.version}, {rubric.aggregation}, total {_range_of(rubric)}"
    if rubric.goal_text:
        yield f"  goal: {' '.join(rubric.goal_text.split())}"
    rows = []
    weights = sum(criterion.weight for criterion in rubric.criteria)
    for c in rubric.criteria:
        scale = f"custom {c.minimum:g} to {c.maximum:g}" if c.scale == "custom" else c.scale
        share = f"{c.weight / weights:.1%}" if rubric.aggregation in ("weighted_sum", "inherit") else "-"
        threshold_text = f"at least {c.threshold:g}" if c.required else ""
        rows.append((c.id, scale, f"{c.weight:g}", share, threshold_text))
    yield from table(("criterion", "scale", "weight", "share", "required"), rows).splitlines()


def rubric_notes(rubric: Rubric, *, is_event: bool) -> Iterator[str]:
    """Yield a sentence for each setting that is allowed but perhaps not intended."""
    graded_ids = [c.id for c in rubric.criteria if c.scale in ("bounded", "custom")]
    if graded_ids:
        yield f"judges agree with themselves better on yes or no: split into binary criteria {', '.join(graded_ids)}"
    counts = [c.id for c in rubric.criteria if c.scale == "count"]
    if counts:
        yield f"a count has no upper end, so neither has the total: {', '.join(counts)}"
    if rubric.aggregation == "sum" and len({c.weight for c in rubric.criteria}) > 1:
        yield "under sum weights count for nothing"
    if is_event and len(rubric.criteria) > 1 and not any(c.required for c in rubric.criteria):
        yield (
            "totals of turns are added up, and no criterion is required, so a turn that does nothing may earn and "
            "longer episodes earn more; make the criterion of progress required"
        )


def _range_of(rubric: Rubric) -> str:
    """Format the lowest and the highest total, as far as they are known."""
    low = rubric.total(rubric.lowest_scores)
    highest = {c.id: c.highest for c in rubric.criteria if c.highest is not None}
    return f"{low:g} to {rubric.total(highest):g}" if len(highest) == len(rubric.criteria) else f"{low:g} and up"


_SOURCE = "a run's folder, its name in runs/, the start of its id, or a .jsonl or .jsonl.gz file"


def _add_score(commands: Any) -> None:
    score = commands.add_parser("score", help="judge a run's stored episodes again, with another rubric or judge")
    score.add_argument("source", type=Path, metavar="RUN", help=_SOURCE)
    _add_judge_arguments(score)
    score.add_argument("--episodes", default="", metavar="PREFIX", help="only files of it that begin so: eval_000010")
    score.add_argument("--label", default="rescored", help="the answers go into judgements-LABEL.jsonl (rescored)")
    score.add_argument("--rows", type=int, default=30, help="episodes to show, those that changed most (default 30)")
    score.set_defaults(run=score_run)


def _add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `_load_judge_config` and `_load_judge_rubrics` read."""
    parser.add_argument("--rubric", metavar="FILE_OR_ID", help="instead of the configuration's; judges all its parts")
    parser.add_argument("--folder", action="append", default=[], type=Path, metavar="DIR", help="where ids are found")
    parser.add_argument("--config", type=Path, metavar="FILE", help="whose [judge] is asked; absent: RUN/config.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")


def score_run(arguments: argparse.Namespace) -> int:
    """Rejudge stored episodes, write the judgements and print them beside the old; return 1 if one got no score."""
    source = run_or_path(arguments.source)
    episodes = stored_episodes(source, arguments.episodes)
    path = new_file(source, arguments.label)
    config = _load_judge_config(source, arguments)
    rubrics = _load_judge_rubrics(config, arguments, episodes)
    assert config.judge is not None  # it was enabled
    # Parts that the rubric does not have weigh nothing.
    missing = {part: 0.0 for part in ("event", "outcome") if part not in rubrics.parts}
    weights = config.judge.blend.model_copy(update=missing)

    async def rejudge() -> list[Rescored]:
        before, write = stored_judgements(source), JudgementRecorder(path)
        async with judge_variants(config) as judges:
            return await rescore(judges.judge, rubrics, episodes, weights, before=before, on_judged=write)

    rescored_episodes = run_to_end(rejudge())
    print("\n".join(side_by_side(rescored_episodes, max_rows=arguments.rows)))
    print(f"written to {path}")
    return 0 if all(episode.after is not None for episode in rescored_episodes) else 1


def _load_judge_config(source: Path, arguments: argparse.Namespace) -> RunConfig:
    """Load the configuration with `judge.enabled=true`, which checks all settings of the judge.

    Raises:
        ConfigError: there is no configuration, or it is not valid.
    """
    path: Path | None = arguments.config
    if path is None:
        path = source / "config.toml"
        if not path.is_file():
            raise ConfigError(f"{source}: there is no config.toml that would say who judges; name one by --config")
    return load_config(path, [*arguments.overrides, "judge.enabled=true"])


def _load_judge_rubrics(config: RunConfig, arguments: argparse.Namespace, episodes: Sequence[Trajectory]) -> Rubrics:
    """Load the rubric named on the command line, or the configuration's.

    Raises:
        ConfigError, UnknownNameError: it is not valid, or only the judge at services.judge_url knows it.
    """
    if arguments.rubric is not None:
        return load_rubrics(arguments.rubric, folders=arguments.folder)
    rubrics_of = build_rubrics(config)

    async def of_first() -> Rubrics:  # without a task app all tasks have the same
        return await rubrics_of(episodes[0].task)

    rubrics = run_to_end(of_first())
    if not rubrics.parts:
        raise ConfigError("the rubric is known only to the judge at services.judge_url; name one by --rubric")
    return rubrics


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser("audit", help="compare a judge with gold labels; look for biases; attack it")
    audit.add_argument("episodes", type=Path, metavar="EPISODES", help=_SOURCE)
    audit.add_argument(
        "--gold",
        type=Path,
        required=True,
        metavar="LABELS",
        help="JSON lines with a trajectory_id and outcome, events or both: gspo_gym/judge/README.md",
    )
    _add_judge_arguments(audit)
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
    if arguments.json is not None:
        require_writable(arguments.json)
    source, labels = run_or_path(arguments.episodes), read_labels(arguments.gold)
    labelled_pairs = labelled_episodes(stored_episodes(source), labels)
    config = _load_judge_config(source, arguments)
    rubrics = _load_judge_rubrics(config, arguments, [trajectory for trajectory, _ in labelled_pairs])
    settings = AuditSettings(
        num_repeats=arguments.repeats,
        num_position_episodes=arguments.position_episodes,
        num_attacked_episodes=arguments.attacked_episodes,
        seed=arguments.seed,
    )

    async def audit() -> AuditReport:
        async with judge_variants(config, num_repeats=settings.num_repeats) as judges:
            return await JudgeAudit(
                judges.judge, rubrics, settings, judges.repeats, judges.in_given_order, attacks(rubrics)
            ).run(labelled_pairs)

    report = run_to_end(audit())
    print(report)
    if arguments.json is not None:
        write_output(arguments.json, json.dumps(report.as_json(), indent=2, allow_nan=False) + "\n")
    return 0 if report.num_unscored == 0 else 1


_MAX_BODY_BYTES = 16_000_000  # a long episode, as JSON


def _add_servers(commands: Any) -> None:
    _add_serve(commands.add_parser("serve", help="a judge over HTTP, for other trainers"))
    fake = commands.add_parser("fake", help="an OpenAI-compatible model that judges by a rule, for rehearsals")
    _add_address(fake, port=9101)
    fake.set_defaults(run=serve_fake)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="the judging model's name at its endpoint")
    parser.add_argument("--provider", choices=["openai", "groq", "gemini", "local"], default="local")
    parser.add_argument("--base-url", help="of a local endpoint, such as http://127.0.0.1:8000/v1")
    parser.add_argument(
        "--model-key-env", metavar="NAME", help="variable with the endpoint's key, if not the usual one"
    )
    parser.add_argument("--python", metavar="MODULE:FUNCTION", help="a function judges, and no model")
    parser.add_argument("--rubric", metavar="FILE_OR_ID", help="for requests that bring none")
    parser.add_argument("--rubric-folder", action="append", default=[], type=Path, help="where rubrics are found by id")
    parser.add_argument("--mode", choices=["auto", "episode", "turn"], default="auto", help="calls for an episode")
    parser.add_argument("--max-concurrency", type=int, default=8, help="requests to the model at once (default 8)")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="for each of them (default 60)")
    parser.add_argument("--max-calls", type=int, help="requests to the model in all, and then none")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="where answers are kept")
    _add_address(parser, port=9100)
    parser.set_defaults(run=serve)


def _add_address(parser: argparse.ArgumentParser, *, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    parser.add_argument("--port", type=int, default=port, help=f"0 takes any that is free (default {port})")
    parser.add_argument("--api-key-env", metavar="NAME", help="variable with the key that clients must send")


def serve(arguments: argparse.Namespace) -> int:
    """Serve the judge until told to stop; print the URL once clients may connect.

    Raises:
        ConfigError, UnknownNameError: the judge, the rubric, the address or a key.
        MissingExtraError: FastAPI, uvicorn or openai is not installed.
    """
    try:
        from gspo_gym.judge.server import create_judge_app
    except ImportError as error:
        raise MissingExtraError("serving a judge needs: pip install 'gspo-gym[serve,openai]'") from error
    folders = tuple(arguments.rubric_folder)
    default = read_rubrics(find_rubrics(arguments.rubric, folders)) if arguments.rubric else None
    judge = _judge(arguments)

    def find(name: str) -> Any:
        if Path(name).suffix:  # a path: only the operator names files
            raise ConfigError(f"options.rubric_id: expected an id, got {name!r}")
        return read_rubrics(find_rubrics(name, folders))

    app = create_judge_app(judge, default=default, find_rubrics=find)
    return _serve(app, arguments, subject=f"the judge {judge.name}", path="/judge/v1/score")


def serve_fake(arguments: argparse.Namespace) -> int:
    """Serve the fake model until told to stop; print the URL once clients may connect.

    Raises:
        ConfigError: the address or the key. MissingExtraError: FastAPI or uvicorn is not installed.
    """
    try:
        from gspo_gym.judge.server import create_fake_judge_app
    except ImportError as error:
        raise MissingExtraError("serving a judge needs: pip install 'gspo-gym[serve]'") from error
    return _serve(create_fake_judge_app(), arguments, subject="a fake judging model that follows a rule", path="/v1")


def _judge(arguments: argparse.Namespace) -> Judge:
    if (arguments.model is None) == (arguments.python is None):
        raise ConfigError("judge serve: expected --model or --python, one of them")
    limits = {"max_concurrency": arguments.max_concurrency, "timeout_seconds": arguments.timeout_seconds}
    if arguments.python is not None:
        return PythonJudge(arguments.python, **limits)
    values = {"model": arguments.model, "provider": arguments.provider, "base_url": arguments.base_url}
    values |= {"api_key_env": arguments.model_key_env, "mode": arguments.mode}
    try:
        options = JudgeOptions(**values)
    except ValidationError as error:
        problems = find_problems(error, JudgeOptions, values)
        raise ConfigError("; ".join(f"judge serve: {problem.key}: {problem.text}" for problem in problems)) from error
    settings = ModelJudgeSettings(options, options, asking=AskingSettings(**limits))
    budget = JudgeBudget(BudgetLimits(max_calls=arguments.max_calls))
    return ModelJudge(settings, cache=JudgementCache(arguments.cache), budget=budget)


def _serve(app: App, arguments: argparse.Namespace, *, subject: str, path: str) -> int:
    from gspo_gym.remote.guard import Guard
    from gspo_gym.remote.serving import bind, serve_until_stopped, server_for

    key = read_key(arguments.api_key_env, "--api-key-env")
    server_socket = bind(arguments.host, arguments.port, has_key=key is not None)
    server = server_for(Guard(app, api_key=key, max_body_bytes=_MAX_BODY_BYTES))
    return serve_until_stopped(server, server_socket, subject=subject, path=path)
