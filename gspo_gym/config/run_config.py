"""RunConfig: the file that a user writes, read strictly.

Files are TOML or YAML with the sections of `sections.py` and `services.py`, flat or in the hosted trainer's nested
form; `section.key=value` on the command line goes over them. Unknown and foreign keys, wrong types, values out of range
and contradictions are found before anything heavy loads, and all are reported at once. Nothing here imports torch;
`config/build/trainer.py` turns a RunConfig into live objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import PrivateAttr, ValidationError, model_validator

from gspo_gym.base.files import packaged_file, read_file
from gspo_gym.config.nested import INSERTED, Flat, apply_override, flatten, take_hosted_only
from gspo_gym.config.record import RunRecord, partial_record
from gspo_gym.config.rules.objective import with_derived_defaults
from gspo_gym.config.rules.rules import find_contradictions, find_notices
from gspo_gym.config.sections import parse_source
from gspo_gym.config.words import (
    Problem,
    field_of,
    find_nul,
    find_problems,
    find_secrets,
    look_up,
    show,
    with_known_spelling,
)
from gspo_gym.errors import ConfigError, nearest_name

__all__ = ["RunConfig", "load_config", "load_sections", "model_name", "read_file"]


class RunConfig(RunRecord):
    """Settings of a whole run, with the numbers and records that follow from them.

    Build it with `load_config` or `from_dict`: their errors name every problem; the constructor takes the same values
    and raises pydantic's error.
    """

    _of_the_file: tuple[Problem, ...] = PrivateAttr(())  # notices of how it is written, which is no setting

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and dict(self) == dict(other)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | Flat, *, source: str = "configuration") -> RunConfig:
        """Return the configuration of these sections (Any: unchecked), flat already or not.

        Errors name `source` as their origin.

        Raises:
            ConfigError: lists everything that is wrong.
        """
        return _check(values if isinstance(values, Flat) else flatten(values), lambda _: source, ())

    def to_toml(self) -> str:
        """Return every key with the value that is used, as TOML that reads back to an equal RunConfig."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @property
    def notices(self) -> tuple[Problem, ...]:
        """Return the keys that have no effect, or another effect than they seem to."""
        return (*self._of_the_file, *find_notices(self))

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:  # Any: pydantic hands over whatever it was given
        if not isinstance(values, Mapping):
            return values
        return with_derived_defaults(with_known_spelling(values, cls), _required_sections())

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        # Also for a RunConfig that was constructed directly; `_check` asks again to report the problems one by one.
        if problems := find_contradictions(self):
            raise ValueError("; ".join(f"{problem.key}: {problem.text}" for problem in problems))
        return self


def config_file(name: str | Path) -> Path:
    """Return the file that `name` means: its path, or `quickstart` for the quickstart.toml that the package holds.

    A path in configs/ or examples/ that is not here is that of the package, too.

    Raises:
        ConfigError: it has no suffix, and neither a file nor a configuration of the package has this name.
    """
    path = Path(name)
    if path.suffix or path.exists():
        return packaged_file(path)
    files_by_name = {file.stem: file for file in Path(str(files("gspo_gym_configs"))).glob("*.toml")}
    if str(name) not in files_by_name:
        of_a_run = Path("runs", path, "config.toml")
        hint = f"the run's is {of_a_run}" if of_a_run.is_file() else nearest_name(str(name), files_by_name)
        raise ConfigError(f"{name}: there is no such file, and the package holds no configuration of that name; {hint}")
    return files_by_name[str(name)]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML, YAML or JSON file, with `section.key=value` texts going over it in order.

    `path` may name a configuration that the package holds (`config_file`). A value is TOML (`7`, `true`, `[1, 2]`,
    `"text"`); anything else is taken as text: names and paths need no quotes.

    Raises:
        ConfigError: there is no such file, it is not of that format, or its content is wrong: then everything that is.
    """
    flat, overridden, problems = _read(config_file(path), overrides)

    def source_of(key: str) -> str:
        # A key of a table that was given, or a table with a key that was given.
        on_command_line = any(f"{key}.".startswith(f"{o}.") or f"{o}.".startswith(f"{key}.") for o in overridden)
        return "command line" if on_command_line else str(path)

    return _check(flat, source_of, problems)


def load_sections(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sections of file and command line, in the flat form and unchecked.

    Raises:
        ConfigError: there is no such file, or its format is wrong.
    """
    return _read(config_file(path), overrides)[0].values


# Returns the file with the overrides applied, the keys that these set, and the problems with them.
def model_name(config: RunConfig) -> str:
    """Return the model name for `load_policy`, from model.base or model.source.

    Raises:
        ConfigError: model.source names a run or a checkpoint that is not there.
    """
    if config.model.base is not None:
        revision = config.model.revision
        return config.model.base if revision is None else f"{config.model.base}@{revision}"
    label, step = parse_source(config.model.source or "")
    folder = Path(config.run.folder) / label / "checkpoints"
    # A checkpoint without a manifest was not finished.
    step_folders = sorted(path.name for path in folder.glob("step_*") if (path / "manifest.json").is_file())
    if not step_folders or (step is not None and step not in step_folders):
        there = f"the checkpoints there are {', '.join(step_folders)}" if step_folders else "there is none"
        raise ConfigError(f"model.source: {config.model.source!r}: expected a checkpoint in {folder}; {there}")
    return str(folder / (step or step_folders[-1]))


def _read(path: Path, overrides: Sequence[str]) -> tuple[Flat, list[str], list[Problem]]:
    flat = flatten(read_file(path))
    overridden: list[str] = []
    problems: list[Problem] = []
    for text in overrides:
        key, problem = apply_override(flat.values, text)
        overridden.append(key)
        problems += [] if problem is None else [problem]
    return flat, overridden, problems


def _check(flat: Flat, source_of: Callable[[str], str], earlier: Sequence[Problem]) -> RunConfig:
    flat.values = with_known_spelling(flat.values, RunConfig)
    take_hosted_only(flat)
    flat_values = {
        name: _as_tuples(section) for name, section in with_derived_defaults(flat.values, _required_sections()).items()
    }
    problems = [*earlier, *flat.problems, *find_secrets(flat.values), *find_nul(flat.values)]
    config = None
    try:
        config = RunConfig.model_validate(flat_values)
    except ValidationError as error:
        secret = {problem.key for problem in problems}  # these are not repeated: pydantic's sentences show values
        problems += [p for p in find_problems(error, RunConfig, flat.values) if p.key not in secret]
        wrong = frozenset(field_of(problem.key) for problem in problems)
        problems += find_contradictions(partial_record(RunRecord, flat_values, wrong))
    if config is None or problems:
        lines = [f"{source_of(p.key)}: {flat.name(p.key)}: {p.text}" for p in problems]
        problem_list = f"{len(lines)} problems in the configuration:\n  " + "\n  ".join(lines)
        raise ConfigError(lines[0] if len(lines) == 1 else problem_list)
    config._of_the_file = (*_find_inserted(flat, config), *flat.notices)
    return config


def _find_inserted(flat: Flat, config: RunConfig) -> Iterator[Problem]:
    for key, nested_key in flat.inserted.items():
        value = look_up(config.model_dump(), key)
        if look_up(flat.values, key) is None and value != INSERTED[key]:
            text = f"{show(INSERTED[key])}, which a client inserts, counts as absent: {key} is {show(value)}"
            yield Problem(nested_key, text)


def _required_sections() -> list[str]:
    """Return the sections that always exist: their missing keys are reported one by one."""
    return [name for name, info in RunConfig.model_fields.items() if info.is_required()]


def _as_tuples(value: Any) -> Any:
    # A strict tuple field takes no list, and TOML has nothing else.
    if isinstance(value, dict):
        return {key: _as_tuples(entry) for key, entry in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
