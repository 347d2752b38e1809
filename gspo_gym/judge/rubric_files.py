"""Read rubrics from files, ids, tables of a configuration and task_info, and merge them.

A judge's file has the parts `event` and `outcome`, each a rubric (or a bare list of criteria, as on the wire):

    outcome:
      version: v1
      goal_text: The customer is served within the policy.
      criteria:
        - {id: outcome.resolved, description: The request was settled rightly., scale: binary, weight: 3}

A task app's rubric is one such rubric without a part. Files are read strictly; a task app may send keys that are not
known here. No file or task app names code.

Every rubric is read as a patch: the lowest must be complete, one above it says only what it changes. Of a criterion
that both have, the upper's description, scale, bounds and required win, and the weights multiply: one of them at 1
leaves the other. Criteria that the upper does not name stay in place, new ones follow. From low to high: the rubric
file (or id), the configuration's overrides, the task's own rubric.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from gspo_gym.base.files import read_file
from gspo_gym.base.settings import Settings
from gspo_gym.errors import ConfigError, UnknownNameError, nearest_name, shortened
from gspo_gym.judge.base import Rubrics
from gspo_gym.judge.rubric import Aggregation, Criterion, Rubric, Scale

_PARTS = ("event", "outcome")
_SUFFIXES = (".yaml", ".yml", ".toml", ".json")
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)*[A-Za-z0-9][\w.@-]*", re.ASCII)
_BUNDLED = "gspo_gym_envs"
_BUNDLED_ID = re.compile(r"(?P<folder>\w+)/bundle@(?P<version>\w+)", re.ASCII)
_MAX_BYTES = 1_000_000


class CriterionPatch(Settings):
    """One entry of `criteria`, over a criterion; None keeps the lower one's value, or a `Criterion`'s default."""

    id: str
    description: str | None = None
    weight: float = 1.0
    scale: Scale | None = None
    required: bool | None = None
    threshold: float | None = None
    minimum: float | None = None
    maximum: float | None = None


class RubricPatch(Settings):
    """One rubric, over another; None changes nothing. "inherit" keeps the lower one's aggregation, too."""

    criteria: list[CriterionPatch] = Field(default=[])
    version: str | None = None
    goal_text: str | None = None
    aggregation: Aggregation | None = None
    track_weights: dict[str, float] | None = None


RubricsPatch = Mapping[str, RubricPatch]  # one source's changes, of "event", "outcome" or both


def load_rubrics(
    name: str | None,
    *,
    folders: Sequence[Path] = (),
    overrides: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
) -> Rubrics:
    """Read the rubrics of a file or id, the configuration's overrides over them and the task's own rubric over those.

    Args:
        name: a path or an id, see `find_rubrics`; None: there is none below.
        folders: where ids are looked for besides the bundled environments.
        overrides: [judge.options.rubric_overrides], read strictly.
        task: `rubric` of a task app's task_info, read leniently.

    Raises:
        ConfigError: a source is invalid; says which, where and what to do. UnknownNameError: there is no such id.
    """
    sources = [] if name is None else [read_rubrics(find_rubrics(name, folders))]
    if overrides is not None:
        sources.append(parse_rubrics(overrides, where="rubric_overrides"))
    if task is not None:
        sources.append(parse_task_rubrics(task, where="task_info.rubric"))
    return merge_rubrics(*sources)


def is_rubric_file(name: str) -> bool:
    """Return whether a name is a path, and no id."""
    return Path(name).suffix in _SUFFIXES


def find_rubrics(name: str, folders: Sequence[Path] = ()) -> Path:
    """Return the file of a path that ends in .yaml, .yml, .toml or .json, or of an id.

    The id "tone/strict@v2" is the file tone/strict@v2.yaml (or another suffix) in the first of the folders that has it;
    "support_desk/bundle@v1" is the rubric of a bundled environment, if it still has that version.

    Raises:
        ConfigError: an id of another form, for example with a way out of its folder.
        UnknownNameError: no folder has it.
    """
    if is_rubric_file(name):
        return Path(name)
    if not _ID.fullmatch(name):
        raise ConfigError(
            f"rubric {name!r}: expected a file that ends in {', '.join(_SUFFIXES)}, or an id such as "
            "support_desk/bundle@v1"
        )
    for folder in folders:
        paths = [path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()]
        # The form of an id rules out "..", but a link in the folder may lead out of it.
        if paths and not paths[0].resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"rubric {name!r}: {paths[0]} is a link out of {folder}")
        if paths:
            return paths[0]
    return _find_bundled(name, folders)


def read_rubrics(path: Path) -> RubricsPatch:
    """Read a judge's file.

    Raises:
        ConfigError: no such file, not of its format, or not a judge's rubrics; lists the faults.
    """
    values = _read(path)
    if "criteria" in values:
        raise ConfigError(
            f"{path}: this is a task app's rubric, with its criteria at the top; the judge expects the parts event and "
            "outcome. Put all of it under outcome (or under event, to judge every turn by it)"
        )
    return parse_rubrics(values, where=str(path))


def read_task_app_rubric(path: Path) -> Rubric:
    """Read a task app's rubric: version, goal_text, criteria and aggregation at the top of the file.

    Raises:
        ConfigError: as `read_rubrics`; or it is a judge's file.
    """
    values = _read(path)
    if "criteria" not in values and any(part in values for part in _PARTS):
        raise ConfigError(
            f"{path}: this is a judge's file, with the parts event and outcome; a task app's rubric has its criteria "
            "at the top. Take one of the parts"
        )
    patch = _parse_rubric(values, where=str(path))
    try:
        return merge_rubric(None, patch)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_rubrics(values: Mapping[str, Any], *, where: str) -> RubricsPatch:
    """Read the parts `event` and `outcome` of a table strictly; `where` begins every error.

    Raises:
        ConfigError: an unknown key or part, a value of another type, an id twice; or neither part is there.
    """
    unknown = sorted(set(values) - set(_PARTS))
    if unknown or not values:
        actual = f"{unknown[0]!r}; {nearest_name(unknown[0], _PARTS)}" if unknown else "nothing"
        raise ConfigError(f"{where}: expected the parts event and outcome, or one of them, got {actual}")
    return {part: _parse_part(values[part], where=f"{where}: {part}") for part in _PARTS if part in values}


def parse_task_rubrics(values: Mapping[str, Any], *, where: str) -> RubricsPatch:
    """Read the rubric of a task's task_info or of an app's info: parts `events` (or `event`) and `outcome`.

    Unknown keys are left out; known ones must be as in a file.
    """
    values_by_part = {"event": values.get("events", values.get("event")), "outcome": values.get("outcome")}
    return {
        part: _parse_part(_known_keys(value), where=f"{where}: {part}")
        for part, value in values_by_part.items()
        if value is not None and value != []  # which apps send for a part that is not judged
    }


def bundled_rubric_ids() -> list[str]:
    """Return the ids of the bundled environments' rubrics."""
    return [
        f"{path.parent.name}/bundle@{version}"
        for folder in _bundled_folders()
        for path in sorted(folder.glob("*/rubric.yaml"))
        for version in sorted(_versions(path))
    ]


def _find_bundled(name: str, folders: Sequence[Path]) -> Path:
    match = _BUNDLED_ID.fullmatch(name)
    if match is not None:
        for folder in _bundled_folders():
            path = folder / match["folder"] / "rubric.yaml"
            # An id must not silently get another version of the rubric.
            if path.is_file() and _versions(path) == {match["version"]}:
                return path
    ids = [*bundled_rubric_ids(), *_ids_in(folders)]
    raise UnknownNameError(f"no rubric has the id {name!r}; {nearest_name(name, ids)}")


def _ids_in(folders: Sequence[Path]) -> Iterator[str]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in _SUFFIXES:
                yield path.relative_to(folder).with_suffix("").as_posix()


def _bundled_folders() -> list[Path]:
    # Found without importing an environment, which may need packages that a judge does not.
    spec = importlib.util.find_spec(_BUNDLED)
    return [] if spec is None else [Path(location) for location in spec.submodule_search_locations or ()]


def _versions(path: Path) -> set[str]:
    return {str(part.version) for part in read_rubrics(path).values()}


def _read(path: Path) -> dict[str, Any]:
    if path.is_file() and path.stat().st_size > _MAX_BYTES:
        raise ConfigError(f"{path}: expected a rubric of at most {_MAX_BYTES:,} bytes, got {path.stat().st_size:,}")
    return read_file(path)


def _parse_part(value: Any, *, where: str) -> RubricPatch:
    return _parse_rubric({"criteria": value} if isinstance(value, list) else value, where=where)


def _parse_rubric(value: Any, *, where: str) -> RubricPatch:
    try:
        patch = RubricPatch.model_validate(value)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        if len(problems) == 1:
            raise ConfigError(f"{where}: {problems[0]}") from None
        raise ConfigError("\n  ".join([f"{where}: {len(problems)} problems:", *problems])) from None
    # Rubric checks this as well, but merging goes by id and would lose all but the last of them.
    counts = Counter(criterion.id for criterion in patch.criteria)
    if repeated_ids := sorted(id_ for id_, count in counts.items() if count > 1):
        raise ConfigError(f"{where}: {repeated_ids[0]!r} is the id of several criteria; give each one its own")
    return patch


def _problem(detail: Any) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    if detail["type"] == "extra_forbidden":
        table = CriterionPatch if len(detail["loc"]) > 1 else RubricPatch
        return f"{place}: there is no such key; {nearest_name(str(detail['loc'][-1]), table.model_fields)}"
    if detail["type"] == "missing":
        return f"{place}: required, but not given"
    input_text = shortened(json.dumps(detail["input"], default=str, ensure_ascii=False), 60)
    expectation = detail["msg"].removeprefix("Input should be ")
    if detail["type"] in ("model_type", "dict_type"):
        expectation = "a table"
    return f"{place + ': ' if place else ''}expected {expectation}, got {input_text}"


def _known_keys(value: Any) -> Any:
    # Anything but a table is left for the reader to refuse.
    table = {"criteria": value} if isinstance(value, list) else value
    if not isinstance(table, Mapping):
        return table
    values = _only(table, RubricPatch)
    if isinstance(values.get("criteria"), list):
        criteria = values["criteria"]
        values["criteria"] = [_only(c, CriterionPatch) if isinstance(c, Mapping) else c for c in criteria]
    return values


def _only(table: Mapping[str, Any], settings: type[Settings]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key in settings.model_fields and value is not None}


def merge_rubrics(*sources: RubricsPatch) -> Rubrics:
    """Merge all sources, given from the lowest to the highest: file, overrides, task.

    Raises:
        ConfigError: the result is no rubric: a description is missing, a threshold out of range, ...
    """
    parts: dict[str, Rubric] = {}
    for source in sources:
        for name, patch in source.items():
            try:
                parts[name] = merge_rubric(parts.get(name), patch)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    return Rubrics(**parts)


def merge_rubric(base: Rubric | None, patch: RubricPatch) -> Rubric:
    """Apply a patch to a rubric; on None it must be complete (else a ConfigError)."""
    over = {criterion.id: criterion for criterion in patch.criteria}
    below = [] if base is None else [_merge_criterion(c, over.pop(c.id)) if c.id in over else c for c in base.criteria]
    criteria = (*below, *(_merge_criterion(None, criterion) for criterion in over.values()))
    fields = patch.model_dump(include={"version", "goal_text", "aggregation", "track_weights"}, exclude_none=True)
    if base is None:
        return Rubric(criteria, **fields)
    if fields.get("aggregation") == "inherit":
        del fields["aggregation"]
    return replace(base, criteria=criteria, **fields)


def _merge_criterion(base: Criterion | None, patch: CriterionPatch) -> Criterion:
    own = patch.model_dump(exclude_none=True)
    if base is None:
        if patch.description is None:
            raise ConfigError(
                f"criterion {patch.id!r}: expected a description, because there is no criterion of that id below it"
            )
        base = Criterion(patch.id, patch.description)
    if not own.setdefault("required", base.required) and patch.threshold is not None:
        raise ConfigError(f"criterion {patch.id!r}: a threshold is for a required criterion; set required = true, too")
    # Another scale has other ends and another middle: the lower one's say nothing about it.
    fresh = Criterion(base.id, base.description)
    below = base if own.get("scale", base.scale) == base.scale else fresh
    ends = {name: getattr(below, name) for name in ("threshold", "minimum", "maximum")}
    if not own["required"]:  # required = false takes the lower threshold back
        ends["threshold"] = fresh.threshold
    # 1, the default of a patch, leaves the other weight.
    return replace(base, **{**ends, **own, "weight": base.weight * patch.weight})
