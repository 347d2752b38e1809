"""`gspo-gym evaluate CONFIG.toml --model MODEL --seeds 0:100`: evaluate a model over seeded episodes.

The config gives environment and limits, `--model` the weights: a checkpoint's folder, a hub id, tiny:NAME,
`scripted:NAME` for a policy of the environment, or `openai:MODEL@URL` for a model behind an OpenAI-compatible chat
route. `--against` plays a second model on the same seeds and compares pair by pair.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.files import PartFile, make_folder, require_same_request, require_writable, write_output
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli.command_line import (
    ENDPOINT,
    SCRIPTED,
    base_of,
    exit_code_of,
    importing,
    interrupted_by_signals,
)
from gspo_gym.cli.suites import read_suite, suite_text
from gspo_gym.cli.train import add_task_url
from gspo_gym.config.build.apps import environment_ids
from gspo_gym.config.build.judge import build_judging
from gspo_gym.config.run_config import RunConfig, load_config, model_name
from gspo_gym.config.sections import is_safe_label, with_task_url
from gspo_gym.config.services import refuse_to_run
from gspo_gym.env.chat_model import ChatModel
from gspo_gym.env.registry import resolve
from gspo_gym.env.watchdog import marker_beside, read_frozen, seconds_until_frozen, watching
from gspo_gym.errors import ConfigError, RecordError, UsageError
from gspo_gym.policy.manifest import MANIFEST
from gspo_gym.rollout.comparison import Comparison, compare, comparison_table
from gspo_gym.rollout.episode_files import trajectory_from_json, trajectory_to_json
from gspo_gym.rollout.evaluation import (
    Evaluation,
    KeptRows,
    PlayedRow,
    evaluation_of_rows,
    evaluation_table,
    in_one_unit,
    pass_table,
)
from gspo_gym.rollout.pool import member_of
from gspo_gym.run.folders import run_name
from gspo_gym.run.process import LOCK_FILE, PROCESS_FILE, holding
from gspo_gym.run.records import EVENTS_FILE
from gspo_gym.run.report.progress import counting, print_episode, shortened
from gspo_gym.seeding import child_seed
from gspo_gym.types import Trajectory

if TYPE_CHECKING:
    from gspo_gym.env.core import PolicyFactory

# Of --save: what is over so far is in the file of this name with .part, and in the end all of it in the other.
_PART, _FINISHED = "evaluation", "evaluation.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    config = (
        "the TOML file that names the environment and its limits, the name of one that the package holds (quickstart), "
        "or a suite of evaluations with such files; of a run, RUN/config.toml"
    )
    parser.add_argument("config", help=config)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over what the file says")
    usage = "a run, a folder, an id of the hub (OWNER/NAME), scripted:NAME of the environment, or openai:MODEL[@URL]"
    parser.add_argument("--model", metavar="BASE", help=f"{usage}; without it, model.base of the config")
    parser.add_argument("--against", metavar="BASE", help="a second model on the same seeds, compared pair by pair")
    parser.add_argument("--seeds", metavar="SEEDS", help='such as "0:100"; without it, those of [evaluation]')
    add_task_url(parser)
    parser.add_argument("--json", metavar="FILE", dest="json_file", help='write all results there; "-" prints them')
    save = "keep the episodes there as a run does, for `episodes`, `report` and `view`; with --against, as two runs"
    parser.add_argument("--save", metavar="FOLDER", type=Path, help=save)
    resume = "go on with what an interrupted evaluation left in FILE.part or FOLDER: only missing seeds are played"
    parser.add_argument("--resume", action="store_true", help=resume)
    parser.set_defaults(run=run_command)


class _StoppedError(Exception):
    """An evaluation was interrupted, and said how to go on; holds the exit status."""


@dataclass(frozen=True, slots=True, eq=False)
class _Result:
    """A finished evaluation of one configuration.

    Attributes:
        evaluations: by model.
        comparison: with the model of --against, or None.
        worst: the episode of the first model that did worst of those without success; None: there is none, or the
            evaluation was finished before.
    """

    evaluations: Mapping[str, Evaluation]
    comparison: Comparison | None
    worst: Trajectory | None = None

    @classmethod
    def of(
        cls, evaluations: Mapping[str, Evaluation], *, against: str | None, worst: Trajectory | None = None
    ) -> _Result:
        first = next(iter(evaluations))
        return cls(evaluations, compare(evaluations[against], evaluations[first]) if against else None, worst)

    def to_dict(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"evaluations": {name: result.to_dict() for name, result in self.evaluations.items()}}
        return answer if self.comparison is None else answer | {"comparison": self.comparison.to_dict()}


def run_command(arguments: argparse.Namespace) -> int:
    """Evaluate every named model, on each configuration of a suite; return 0 when all were evaluated.

    With `--json FILE` every row is appended to FILE.part when its episode ends, with `--save FOLDER` also the episode,
    to a file there. Ctrl-C and SIGTERM keep that file for `--resume` and return 130 and 143. An environment that holds
    the interpreter ends the process (`watchdog.py`); the next command with the same FILE or FOLDER runs it in worker
    processes.
    """
    if arguments.json_file not in (None, "-"):
        require_writable(Path(arguments.json_file))
    overrides = list(arguments.overrides)
    if arguments.seeds is not None:
        overrides += [f"evaluation.seeds={json.dumps(arguments.seeds)}"]
    overrides = with_task_url(overrides, arguments.task_url, os.environ)
    suite = read_suite(arguments.config)
    try:
        if suite is not None:
            return _run_suite(arguments, {name: entry.load(overrides) for name, entry in suite.items()})
        result = _evaluate_config(arguments, load_config(arguments.config, overrides))
    except _StoppedError as stop:
        return int(stop.args[0])
    if arguments.json_file == "-":
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _show(arguments, result)
    return 0


def _run_suite(arguments: argparse.Namespace, configs: Mapping[str, RunConfig]) -> int:
    """Evaluate on each configuration, in a folder of its name in that of `--save`, and show all of them.

    Raises:
        UsageError: there is no `--save`.
        ConfigError: the folder holds something, and `--resume` is not said.
    """
    folder: Path | None = arguments.save
    if folder is None:
        raise UsageError(f"{arguments.config} names several evaluations: expected --save FOLDER, where each is kept")
    if not arguments.resume and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is not empty; go on with what it holds by --resume, or choose another folder")
    results: dict[str, _Result] = {}
    for name, config in configs.items():  # else the last of them might be refused after hours
        if not (folder / name / _FINISHED).exists():
            _require_ready(config, _models(arguments, config))
    for name, config in configs.items():
        print(f"{name}:", file=sys.stderr)
        own = folder / name
        has_begun = any((own / file_name).exists() for file_name in (_FINISHED, f"{_PART}.part"))
        own_arguments = {**vars(arguments), "save": own, "json_file": None, "resume": has_begun}
        results[name] = _evaluate_config(argparse.Namespace(**own_arguments), config)
    answer = json.dumps({name: result.to_dict() for name, result in results.items()}, indent=2)
    if arguments.json_file == "-":
        print(answer)
        return 0
    evaluations = {name: result.evaluations for name, result in results.items()}
    comparisons = {name: one.comparison for name, one in results.items() if one.comparison is not None}
    print(suite_text(evaluations, comparisons, against=arguments.against))
    if arguments.json_file is not None:
        write_output(Path(arguments.json_file), answer + "\n")
    return 0


def _models(arguments: argparse.Namespace, config: RunConfig) -> list[str]:
    names = [arguments.model or model_name(config)] + ([arguments.against] if arguments.against else [])
    return list(dict.fromkeys(names))  # --against may name the same model


def _evaluate_config(arguments: argparse.Namespace, config: RunConfig) -> _Result:
    """Evaluate every named model on one configuration, unless `--resume` names a folder in which that was finished."""
    names = _models(arguments, config)
    request = {"models": {name: _weights_of(config, name) for name in names}, "config": config.model_dump(mode="json")}
    if arguments.save is not None and arguments.resume:
        finished = _read_finished(arguments.save / _FINISHED, request, against=arguments.against)
        if finished is not None:
            _write_answer(arguments, finished)
            return finished
    with importing():
        from gspo_gym.config.build import preflight  # noqa: F401  # and all that it needs
    with contextlib.nullcontext() if arguments.save is None else _holding(arguments.save):
        return _evaluate_and_keep(arguments, config, names, request)


def _read_finished(path: Path, request: Mapping[str, Any], *, against: str | None) -> _Result | None:
    """Return the result of an evaluation that was finished before; None if there is none.

    Raises:
        ConfigError: it is of another request. RecordError: it is damaged.
    """
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = values["request"]
        evaluations = {name: Evaluation.from_dict(one) for name, one in values["evaluations"].items()}
    except (ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{path}: {type(error).__name__}: {error}") from error
    require_same_request(path, _PART, request, kept)
    print(f"{path}: all episodes are there already", file=sys.stderr)
    return _Result.of(in_one_unit(evaluations), against=against)


def _evaluate_and_keep(
    arguments: argparse.Namespace, config: RunConfig, names: Sequence[str], request: Mapping[str, Any]
) -> _Result:
    start_seconds = time.monotonic()
    part = _part_file(arguments, request)
    marker = None if part is None else marker_beside(part.out)
    worst: dict[str, Trajectory] = {}
    try:
        with interrupted_by_signals(config.run.stop_grace_seconds), _watch(config, marker):
            results = in_one_unit(
                _evaluate_all(_unfrozen(config, marker), names, part, worst, arguments.save is not None)
            )
    except KeyboardInterrupt as interrupt:
        # There is nothing to resume.
        if part is None or part.num_items == 0:
            raise
        progress_text = f"stopped: {part.num_items} of {_num_asked(config, names)} episodes are in {part.path}"
        print(f"{progress_text}; go on with --resume", file=sys.stderr)
        raise _StoppedError(exit_code_of(interrupt)) from None
    finally:
        if part is not None:
            part.remove_if_empty()
    result = _Result.of(results, against=arguments.against, worst=worst.get(names[0]))
    if arguments.save is not None and part is not None:
        seconds = time.monotonic() - start_seconds
        _save(arguments.save, config, results, part.read(_episode_of), seconds=seconds)
        kept = json.dumps({"request": request, **result.to_dict()}, indent=2)
        write_output(arguments.save / _FINISHED, kept + "\n")
    _write_answer(arguments, result)
    if part is not None:
        part.remove()
    if marker is not None:
        # It ended well: the next evaluation is an ordinary one again.
        marker.unlink(missing_ok=True)
    return result


def _write_answer(arguments: argparse.Namespace, result: _Result) -> None:
    if arguments.json_file not in (None, "-"):
        write_output(Path(arguments.json_file), json.dumps(result.to_dict(), indent=2) + "\n")


def _show(arguments: argparse.Namespace, result: _Result) -> None:
    """Print the results, an episode that did not succeed, and why others could not be scored."""
    from rich.console import Console

    console, results, worst = Console(), result.evaluations, result.worst
    print(evaluation_table(results))
    if rates := pass_table(results):
        print(f"\n{rates}")
    if result.comparison is not None:
        print(f"\n{comparison_table(result.comparison, first=arguments.against, second=next(iter(results)))}")
    if worst is not None:
        print_episode(console, "failed" if worst.success is False else "lowest return", worst, is_shortened=True)
    errors = Counter(row.error for result in results.values() for row in result.rows if row.error is not None)
    for error, count in errors.most_common(1):
        line = f"{count} of {errors.total()} failed episodes: {shortened(error, 400)}"
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    if arguments.save is not None:
        for folder in _folders(arguments.save, results):
            line = f"the episodes are in {folder}: gspo-gym episodes {shlex.quote(run_name(folder))} --failed"
            console.print(line, soft_wrap=True, markup=False, highlight=False)


def _watch(config: RunConfig, marker: Path | None = None) -> contextlib.AbstractContextManager[None]:
    """Return the context that ends this process if an environment holds the interpreter."""
    resume_advice = "Set rollout.isolation to process, where a deadline ends what hangs."
    if marker is not None:
        resume_advice = "What is over is kept: go on with --resume, which runs {env} in worker processes."
    limit = seconds_until_frozen(config.limits.step_timeout_seconds)
    return watching(marker, limit, advice=f"The evaluation is ended. {resume_advice}")


def _unfrozen(config: RunConfig, marker: Path | None) -> RunConfig:
    """Return the config; with isolation "process" if one of its environments held the interpreter before."""
    frozen = () if marker is None else read_frozen(marker).env_ids
    # A task app plays elsewhere: its environments cannot hold this interpreter.
    if not any(source.task_url is None and resolve(source.env_name) in frozen for source in config.sources):
        return config
    print(f"{', '.join(frozen)}: held the interpreter before, says {marker}; runs in worker processes", file=sys.stderr)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"isolation": "process"})})


def _part_file(arguments: argparse.Namespace, request: Mapping[str, Any]) -> PartFile | None:
    """Open the file of rows played so far; return None if there is no `--json` file.

    Raises:
        UsageError: `--resume` without such a file.
    """
    out = None if arguments.json_file in (None, "-") else Path(arguments.json_file)
    if arguments.save is not None:
        out = arguments.save / _PART
    if out is None or (out.exists() and not out.is_file()):  # a device or a pipe keeps nothing
        if arguments.resume:
            options = "--json FILE, the file that was wanted, or --save FOLDER"
            raise UsageError(f"--resume: expected {options}, got --json {arguments.json_file}")
        return None
    return PartFile(out, work=_PART, asked=request, resumes=arguments.resume)


def _weights_of(config: RunConfig, name: str) -> str:
    """Return folder and digest of the weights, to notice that a run has a newer checkpoint."""
    checkpoint = base_of(name, Path(config.run.folder))
    manifest = Path(checkpoint) / MANIFEST
    return f"{checkpoint} ({sha256(manifest.read_bytes()).hexdigest()})" if manifest.is_file() else checkpoint


def _num_asked(config: RunConfig, names: Sequence[str]) -> int:
    return len(names) * config.num_evaluation_episodes


def _evaluate_all(
    config: RunConfig,
    names: Sequence[str],
    part: PartFile | None,
    worst: dict[str, Trajectory],
    keeps_episodes: bool,
) -> dict[str, Evaluation]:
    """Evaluate each model; append each new row to `part`, and do not play rows again that it holds.

    `worst` gets of each model the episode that did worst of those without success.
    """
    from rich.console import Console

    rows_by_model: dict[str, list[PlayedRow]] = {name: [] for name in names}
    for name, row, episode in [] if part is None else part.read(_line_of):
        rows_by_model[name].append(row)
        if episode is not None:
            _note_worst(worst, name, episode)
    num_found = sum(len(rows) for rows in rows_by_model.values())
    if part is not None and num_found:
        print(f"{num_found} episodes are there already, in {part.path}", file=sys.stderr)
    # A model with all its rows needs no weights or endpoint any more.
    missing = [name for name in names if _complete_evaluation(config, rows_by_model[name]) is None]
    _require_ready(config, missing)
    results = {}
    with counting(Console(stderr=True), _num_asked(config, names), done=num_found) as count:

        def add(name: str, row: PlayedRow, episode: Trajectory) -> None:
            if part is not None:
                episode_entry = {"episode": trajectory_to_json(episode, policy_name=name)} if keeps_episodes else {}
                part.append({"model": name, **row.to_json(), **episode_entry})
            _note_worst(worst, name, episode)
            count()

        for name in names:
            rows = KeptRows(tuple(rows_by_model[name]), functools.partial(add, name))
            results[name] = _evaluate(config, name, rows, tell=functools.partial(print, file=sys.stderr))
    return results


def _note_worst(worst: dict[str, Trajectory], name: str, episode: Trajectory) -> None:
    """Keep the episode if it did not succeed and is worse than the one before; a failure is worse than undecided."""

    def rank(candidate: Trajectory) -> tuple[bool, float, int]:
        return candidate.success is not False, candidate.reward, candidate.task.seed

    if episode.success is not True and (name not in worst or rank(episode) < rank(worst[name])):
        worst[name] = episode


def _line_of(line: dict[str, Any]) -> tuple[str, PlayedRow, Trajectory | None]:
    name, episode = line.pop("model"), line.pop("episode", None)
    return name, PlayedRow.from_json(line), None if episode is None else trajectory_from_json(episode)


def _episode_of(line: dict[str, Any]) -> tuple[str, Trajectory]:
    return line["model"], trajectory_from_json(line["episode"])


@contextlib.contextmanager
def _holding(folder: Path) -> Iterator[None]:
    """Hold the folder of `--save`; if nothing came into it, remove it.

    Raises:
        ConfigError: it holds something else than what an interrupted evaluation left, or another process holds it.
        StorageError: nothing can be written there.
    """
    own = {LOCK_FILE, PROCESS_FILE}

    def foreign_names() -> set[str]:
        return {path.name for path in folder.iterdir()} - own

    if folder.is_dir() and (there := foreign_names()) and f"{_PART}.part" not in there:
        content = "holds a run or an evaluation already" if "config.toml" in there else "is not empty"
        raise ConfigError(f"{folder}: {content}; choose another folder for --save, or remove it")
    make_folder(folder)
    try:
        with holding(folder, lambda text: print(text, file=sys.stderr), has_begun=True):
            yield
    finally:
        if not foreign_names():
            shutil.rmtree(folder, ignore_errors=True)


def _folders(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the folder of each model's run."""
    return [folder] if len(names) == 1 else [folder / "model", folder / "against"]


def _save(
    folder: Path,
    config: RunConfig,
    results: Mapping[str, Evaluation],
    named_episodes: Sequence[tuple[str, Trajectory]],
    *,
    seconds: float,
) -> None:
    """Write each evaluation as a run without a step, whose first evaluation it is."""
    from gspo_gym.policy.load import load_tokenizer  # here and not above: these load torch
    from gspo_gym.run.recording import RunRecorder
    from gspo_gym.run.session import summary_of
    from gspo_gym.run.state import TrainState

    order = {name: number for number, name in enumerate(environment_ids(config))}
    for target, (name, evaluation) in zip(_folders(folder, results), results.items(), strict=True):
        for file_name in ("config.toml", EVENTS_FILE):  # by a process that was killed here
            (target / file_name).unlink(missing_ok=True)
        own = _config_of(target, config, name)
        recorder = RunRecorder.create(target, own.to_toml(), policy_name=name)
        episodes = [episode for player, episode in named_episodes if player == name]
        episodes.sort(key=lambda t: (order[t.task.env_id], t.task.seed, member_of(t.trajectory_id)))
        recorder.episodes("eval_000000", episodes)
        recorder.event("evaluation", 0, evaluation.to_dict())
        recorder.event("finished", 0, {"status": "completed"})
        state = replace(TrainState().after_evaluation(evaluation, evaluation.unit), wall_seconds=seconds)
        summary = summary_of("completed", state, policy_name=name, rescored=own.rollout.rescore)
        recorder.summary({"error": None, **summary})
        recorder.close()
        load_tokenizer(model_name(own)).backend_tokenizer.save(str(target / "tokenizer.json"))


def _config_of(folder: Path, config: RunConfig, name: str) -> RunConfig:
    """Return the settings of a saved evaluation of one player; the model of one that has no tokens counts them."""
    is_model = not name.startswith((SCRIPTED, ENDPOINT))
    base = {"base": base_of(name, Path(config.run.folder)), "source": None} if is_model else {}
    label = {"label": folder.name} if is_safe_label(folder.name) else {}
    run = config.run.model_copy(update={"folder": str(folder.parent)})
    return config.model_copy(update={"model": config.model.model_copy(update=base | label), "run": run})


def _require_ready(config: RunConfig, names: Sequence[str]) -> None:
    from gspo_gym.config.build.preflight import require_ready_to_evaluate

    run_to_end(require_ready_to_evaluate(config, names))


def _complete_evaluation(config: RunConfig, rows: Sequence[PlayedRow]) -> Evaluation | None:
    """Return the evaluation if all its rows were found, else None."""
    if not rows:
        return None
    num_samples = config.evaluation.samples_per_task
    return evaluation_of_rows(environment_ids(config), config.evaluation_seeds, rows, samples_per_task=num_samples)


def run_evaluation(config: RunConfig, model: str | None = None, *, rows: KeptRows | None = None) -> Evaluation:
    """Evaluate a model over the config's evaluation seeds.

    Args:
        config: environment, seeds and limits.
        model: a run, a folder, an id, `scripted:NAME` or `openai:MODEL[@URL]`; None: the config's model.
        rows: holds rows that were played before, which are not played again, and receives new ones.

    Raises:
        UnknownNameError: no such model or scripted policy.
        GymError: what `preflight.require_ready_to_evaluate` finds.
        RolloutError: no episode could be scored.
    """
    rows = rows or KeptRows()
    name = model or model_name(config)
    if _complete_evaluation(config, rows.found) is None:
        _require_ready(config, [name])
    return _evaluate(config, name, rows)


def _evaluate(
    config: RunConfig, model: str, rows: KeptRows, *, tell: Callable[[str], None] = lambda _: None
) -> Evaluation:
    """Evaluate after the checks have passed; `tell` is given lines about the environments here."""
    if evaluation := _complete_evaluation(config, rows.found):
        return evaluation
    name = base_of(model, Path(config.run.folder))
    with _watch(config):
        if name.startswith((SCRIPTED, ENDPOINT)):
            return run_to_end(_play_without_engine(config, name, rows))
        return run_to_end(_play_with_engine(config, name, rows, tell))


async def _play_with_engine(config: RunConfig, name: str, rows: KeptRows, tell: Callable[[str], None]) -> Evaluation:
    from gspo_gym.config.build import rollouts
    from gspo_gym.config.build.threads import compute_in, computing_elsewhere
    from gspo_gym.config.build.trainer import device_of
    from gspo_gym.policy.load import load_policy

    # A checkpoint's own files say how it is quantized.
    is_untrained_qlora = config.model.trainer_mode == "qlora" and name == model_name(config)
    async with contextlib.AsyncExitStack() as stack:
        num_threads = stack.enter_context(computing_elsewhere(device_of(config)))
        policy = load_policy(
            name,
            dtype=config.model.dtype,
            device=device_of(config),
            seed=child_seed(config.run.seed, "model"),
            quantization=config.model.quantization if is_untrained_qlora else "as_saved",
            attn_implementation=config.model.attn_implementation,
        )
        player = await rollouts.build_player(config, policy)
        stack.push_async_callback(player.close)
        await compute_in(player.engine, policy.model, num_threads)
        judging = build_judging(config, None if player.apps is None else player.apps.rubric_of)
        if judging is not None:
            stack.push_async_callback(judging.close)
        await player.start()
        for note in await rollouts.environment_notes(config, player.renderers):  # refuses what cannot be read back
            tell(note)
        return await rollouts.build_evaluate(config, player, judging=judging, rows=rows)(name)


async def _play_without_engine(config: RunConfig, name: str, rows: KeptRows) -> Evaluation:
    """Evaluate a player that takes messages: a scripted policy, or a model behind a chat route."""
    from gspo_gym.config.build import rollouts
    from gspo_gym.config.build.conversations import build_renderers, use_template
    from gspo_gym.config.build.episode_collection import chat_policy, endpoint_settings
    from gspo_gym.policy.load import load_tokenizer

    refuse_to_run(config.sections)
    tokenizer = load_tokenizer(model_name(config))  # counts tokens for the limits
    use_template(config, tokenizer)
    renderers = build_renderers(config, tokenizer)
    async with contextlib.AsyncExitStack() as stack:
        judging = build_judging(config)
        if judging is not None:
            stack.push_async_callback(judging.close)
        policy: str | PolicyFactory = name.removeprefix(SCRIPTED)
        if not name.startswith(SCRIPTED):
            limit = config.rollout.max_output_tokens
            model = ChatModel(endpoint_settings(name, sampling=config.evaluation_sampling, max_tokens=limit))
            stack.push_async_callback(model.close)
            policy = chat_policy(model)
        evaluate = await rollouts.build_scripted_evaluate(config, renderers, policy, judging, rows=rows)
        return await evaluate(name)
