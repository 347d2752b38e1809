"""Suites: files that name several evaluations, which `evaluate` plays one after another and shows in one table.

[evaluations.guess]
config = "quickstart"                    # beside the suite, from here, or of the package
[evaluations.guess-eight]
config = "quickstart"
evaluation = { samples_per_task = 8 }    # goes over what the configuration says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_gym.base.files import flat_items, read_file
from gspo_gym.base.tables import table
from gspo_gym.config.run_config import RunConfig, config_file, load_config
from gspo_gym.config.sections import is_safe_label
from gspo_gym.config.words import inline
from gspo_gym.errors import ConfigError
from gspo_gym.rollout.comparison import Comparison
from gspo_gym.rollout.evaluation import Evaluation, evaluation_table, pass_table
from gspo_gym.rollout.statistics import as_text


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """A named evaluation: the file of its configuration, and `section.key=value` texts that go over it.

    `where` names the entry in errors.
    """

    where: str
    config: str
    overrides: tuple[str, ...] = ()

    def load(self, overrides: Sequence[str]) -> RunConfig:
        """Return the configuration, with further overrides over the entry's own.

        Raises:
            ConfigError: see `load_config`.
        """
        try:
            return load_config(self.config, [*self.overrides, *overrides])
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def read_suite(name: str) -> dict[str, SuiteEntry] | None:
    """Return the evaluations of a suite by name; None for the file of a configuration.

    Raises:
        ConfigError: there is no such file, or an evaluation of it has no usable name or no configuration.
    """
    path = config_file(name)
    values = read_file(path)
    if "evaluations" not in values:
        return None
    entries = values["evaluations"]
    if not isinstance(entries, Mapping) or not entries or len(values) > 1:
        raise ConfigError(f"{path}: expected tables [evaluations.NAME] and nothing else, got {sorted(values)}")
    return {entry_name: _entry(path, entry_name, entry) for entry_name, entry in entries.items()}


def _entry(path: Path, name: str, values: Any) -> SuiteEntry:  # Any: unchecked
    where = f"{path}: evaluations.{name}"
    if not is_safe_label(name):
        raise ConfigError(f"{where}: expected a name of at most 64 letters, digits, '.', '_' or '-': it names a folder")
    config = values.get("config") if isinstance(values, Mapping) else None
    if not isinstance(config, str):
        raise ConfigError(f'{where}: expected config = "FILE", the configuration to evaluate, got {config!r}')
    beside = path.parent / config
    sections = {key: value for key, value in values.items() if key != "config"}
    overrides = tuple(f"{key}={inline(value)}" for key, value in flat_items(sections))
    return SuiteEntry(where, str(beside) if beside.is_file() else config, overrides)


def suite_text(
    evaluations: Mapping[str, Mapping[str, Evaluation]], comparisons: Mapping[str, Comparison], *, against: str | None
) -> str:
    """Return the tables of a suite: its evaluations, the pass rates if any, and how two models compare.

    Args:
        evaluations: by name, then by model.
        comparisons: by name; empty for one model.
        against: name of the first side of the comparisons.
    """
    rows = {
        name if len(results) == 1 else f"{name}: {model}": result
        for name, results in evaluations.items()
        for model, result in results.items()
    }
    return "\n\n".join(filter(None, [evaluation_table(rows), pass_table(rows), _comparisons(comparisons, against)]))


def _comparisons(comparisons: Mapping[str, Comparison], against: str | None) -> str:
    head = (f"against {against}", "tasks", "return", "95%", "better", "worse", "p-value")
    rows = [
        (
            name,
            str(one.num_pairs),
            f"{one.mean_difference:+.3f}",
            as_text(one.difference_interval),
            "-" if one.num_only_second is None else str(one.num_only_second),
            "-" if one.num_only_first is None else str(one.num_only_first),
            "-" if one.success_p_value is None else f"{one.success_p_value:.4g}",
        )
        for name, one in comparisons.items()
    ]
    return table(head, rows) if rows else ""
