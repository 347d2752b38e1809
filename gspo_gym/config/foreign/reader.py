"""The reader of other trainers' configuration files: a table of keys for each, NAME.toml, and rules in NAME.py.

The tables say which version they were read from, and a row for every key of it. Translations, the hints about unknown
keys (`words.py`) and configs/recipes/PARAMETERS.md are made from the rows. Rules are functions for keys that depend on
each other; they run after the rows, and may change what these have set. `shared.toml` has rows of several systems.

A `Draft` records the keys that were read, the defaults of the other system that decided something, and changes of
meaning; it reports the keys that were not read. A default that is spelled out is the same as silence.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from gspo_gym.config.foreign import readings
from gspo_gym.config.services import SinkName
from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.settings import LENGTH_WEIGHTED, WIDE_CLIP

_TRUNCATION = ("top_p", "top_k", "min_p", "repetition_penalty")  # rows that set these leave values without effect out


@dataclass(frozen=True, slots=True)
class Row:
    """A key of another trainer, and its meaning here.

    Attributes:
        ours: our keys that together say the same; none: `note` says why.
        read: the type of the value that each of `ours` takes, a name in `readings.TYPES`.
        rule: the function that reads this key and others; with neither a rule nor `ours`, the row is a remark only.
        values: the value of `ours` for a foreign value; a list holds one for each of `ours`, and "" sets nothing.
        is_open: other values than `values` are of the other system, too, and are left out.
        off: values that change nothing here.
        when: foreign keys without which it has no effect, each with a value with which it has: a text is the only such
            value; true, a number or a list stands for any that is not empty, and false for those that are.
        advice: the text of a hint for a foreign value, or for all values, if `ours` = value would be wrong.
        also: our keys that change with it besides.
        note: the change of meaning, or the reason why there is no counterpart; translations say it, too.
        hint: the same, for the page and for hints only.
        default: its value if a file has none; None: a missing key changes nothing here.
    """

    ours: tuple[str, ...] = ()
    read: str = "any"
    rule: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    is_open: bool = False
    off: tuple[Any, ...] = ()
    when: Mapping[str, Any] = field(default_factory=dict)
    advice: Mapping[Any, str] | str = field(default_factory=dict)
    also: tuple[str, ...] = ()
    note: str = ""
    hint: str = ""
    default: Any = None

    @property
    def remark(self) -> str:
        """Return the text of the page and of hints."""
        return self.hint or self.note

    def assigned(self, value: Any) -> dict[str, Any]:
        """Return our keys with their values for one of `values`."""
        return self.distributed(self.values[value])

    def distributed(self, value: Any) -> dict[str, Any]:
        """Return our keys with the parts of a value; a list holds one for each if there are several."""
        parts = value if isinstance(value, list) and len(self.ours) > 1 else [value] * len(self.ours)
        return {key: part for key, part in zip(self.ours, parts, strict=True) if part not in (None, "", [])}


Rule = Callable[["Draft"], None]


@dataclass(frozen=True, slots=True)
class System:
    """Another trainer, as far as its settings are understood.

    Attributes:
        name: for messages.
        source: the version that was read.
        rows: its keys.
        without_counterpart: their other keys: default, and the reason why no key here answers to it.
        rules: see `Row.rule`; all of them run.
        flatten: takes nested tables apart, and reports what it loses to the draft.
        interpolates: whether its files hold `${...}`, which OmegaConf resolves.
        earlier: the table of an earlier version with files of another shape.
        is_own_file: whether a file has this version's shape.
    """

    name: str
    source: str
    rows: Mapping[str, Row]
    without_counterpart: Mapping[str, tuple[Any, str]]
    rules: tuple[Rule, ...] = ()
    flatten: Callable[[Draft, Mapping[str, Any]], dict[str, Any]] = lambda _, values: dict(values)
    interpolates: bool = False
    earlier: System | None = None
    is_own_file: Callable[[Mapping[str, Any]], bool] = lambda _: True

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the defaults of keys that decide something here."""
        return {key: row.default for key, row in self.rows.items() if row.default is not None}

    @property
    def tables(self) -> tuple[System, ...]:
        """Return this version and the earlier ones."""
        return (self, *(self.earlier.tables if self.earlier is not None else ()))

    def draft(self, values: Mapping[str, Any], *, model: str | None = None, devices: int = 1) -> Draft:
        """Return the draft of a file as read; `model` and `devices` count where it has none.

        Raises:
            ConfigError: a value has the wrong type, or the other system itself would refuse it.
        """
        system = next((table for table in self.tables if table.is_own_file(values)), None)
        if system is None:
            versions = " or ".join(table.source for table in self.tables)
            raise ConfigError(
                f"{self.name}: expected a file of {versions}, got one of neither: {', '.join(map(str, values))}"
            )
        options: dict[str, Any] = {"model": model, "devices": devices, "defaults": system.defaults}
        draft = Draft(name=system.name, entries={}, system=system, **options)
        if system.interpolates:
            draft.read |= readings.variables(values)
            values = readings.resolved(values)
        draft.entries = {str(key): value for key, value in system.flatten(draft, values).items()}
        draft.take()
        return draft


@dataclass(frozen=True, slots=True)
class Translation:
    """Our sections, and remarks for the reader.

    Attributes:
        values: sections as `RunConfig.from_dict` takes them.
        notes: the version that was read, changes of meaning, and foreign defaults that decided something.
        left_out: foreign keys with no counterpart here, each with the reason.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(kw_only=True)
class Draft(readings.Reading):
    """The translation of a file in progress: its keys are read, ours are set, changes of meaning are noted.

    Attributes:
        system: whose file it is.
        model: the model for a file that names none.
        devices: how many each have the sizes that the file gives per device.
    """

    system: System
    model: str | None = None
    devices: int = 1
    _ours: dict[str, Any] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)

    def get(self, theirs: str) -> Any:
        """Return their value or its default; a key that this version lacks is not read."""
        is_known = theirs in self.system.rows or theirs in self.system.without_counterpart
        return super().get(theirs) if is_known else None

    def take(self) -> None:
        """Read every key that the system has, and set ours."""
        for theirs, row in self.system.rows.items():
            value = None if row.rule else self._typed_value(theirs, row)
            if not row.rule and not self.missing(row):
                for ours, part in row.distributed(value).items():
                    self.set(ours, part)
        for rule in self.system.rules:
            rule(self)
        for theirs, row in self.system.rows.items():
            value = self.get(theirs)
            if self.is_default(theirs) or value in row.off or self.is_left_out(theirs):
                continue
            if missing := self.missing(row):
                self.note(
                    f"{theirs} = {readings.shown(value)} has no effect there: it acts with {in_words(missing)} only"
                )
            elif row.note:
                self.note(f"{theirs} = {readings.shown(value)}: {row.note}")
        for theirs, (default, why) in self.system.without_counterpart.items():
            self.leave_out(theirs, why, default=default)

    def _typed_value(self, theirs: str, row: Row) -> Any:
        """Return the value of ours for their value; None changes nothing."""
        if not row.values:
            value = readings.TYPES[row.read](self, theirs)
            return None if value in row.off else value
        if all(isinstance(value, bool) for value in row.values):
            return row.values.get(self.flag(theirs))
        value = self.get(theirs)
        if row.is_open and value is not None and (not isinstance(value, str) or value not in row.values):
            self.leave_out(theirs, f"expected one of {', '.join(row.values)}")
            return None
        return self.choice(theirs, row.values)

    def missing(self, row: Row) -> dict[str, Any]:
        """Return what a row acts with and the file lacks."""

        def is_there(value: Any, example: Any) -> bool:
            return value == example if isinstance(example, str) else bool(value) is bool(example)

        return {key: example for key, example in row.when.items() if not is_there(self.get(key), example)}

    def source_of(self, ours: str) -> str | None:
        """Return the key of the file that names our key, other than by its system's default."""
        keys = [key for key, row in self.system.rows.items() if ours in row.ours]
        return next((key for key in keys if not self.is_default(key)), None)

    def values(self, theirs: str) -> Mapping[Any, Any]:
        """Return the values of a row: ours for theirs."""
        return self.system.rows[theirs].values

    def set(self, ours: str, value: Any) -> None:
        """Give our key a value in place of its old one; None changes nothing."""
        if value is not None:
            self._ours[ours] = value

    def fill(self, ours: str, value: Any) -> bool:
        """Give our key a value unless it has one; return whether it had none."""
        is_missing = ours not in self._ours
        if is_missing:
            self._ours[ours] = value
        return is_missing

    def note(self, text: str) -> None:
        """Add a remark about a change of meaning."""
        self._notes.append(text)

    def is_left_out(self, theirs: str) -> bool:
        """Return whether the key was reported already."""
        return any(line.startswith(f"{theirs} = ") for line in self._left_out)

    def leave_out(self, theirs: str, why: str, *, default: Any = None) -> None:
        """Report a key without a counterpart, unless it is absent, has its default or switches off what is off."""
        self.read.add(theirs)
        value = self.entries.get(theirs)
        changes_nothing = self.is_default(theirs) or readings.same(value, default) or (value is False and not default)
        if not changes_nothing and not self.is_left_out(theirs):
            self.report(theirs, value, why)

    def report(self, theirs: str, value: Any, why: str) -> None:
        """Add a key with this value to those that are left out."""
        self._left_out.append(f"{theirs} = {readings.shown(value, name=theirs)}: {why}")

    def report_rest(self, theirs: str, part: readings.Reading, why: str) -> None:
        """Report the keys of their table that were not read."""
        for key in [key for key in part.entries if key not in part.read]:
            self.report(f"{theirs}.{key}", part.entries[key], why)

    def part(self, theirs: str, **defaults: Any) -> readings.Reading:
        """Return their table for reading, empty if it is absent."""
        return readings.Reading(f"{self.name}: {theirs}", self.table(theirs) or {}, defaults)

    def finish(self) -> Translation:
        """Return the sections; keys that were not read are left out, with the name that was probably meant."""
        for theirs, value in self.entries.items():
            if theirs not in self.read and value is not None:
                near = nearest_name(theirs, sorted(self.read))
                if not near.startswith("did you mean"):  # all of them: hundreds
                    near = "`gspo-gym config parameters` lists those that are"
                self.report(theirs, value, f"not a key that is known of {self.name}; {near}")
        self._fit()
        self._acknowledge()
        # These would be missed: the file does not show them, and our defaults differ.
        default_lines = [f"{key} = {self.defaults[key]!r}" for key in self.defaults if self.entries.get(key) is None]
        if default_lines:
            self._notes.append(f"defaults of {self.name}, since the file is silent: {', '.join(default_lines)}")
        version = (
            f"read as {self.system.source} means it: a key of another version that this one lacks is left out by name, "
            "and a default that another version has changed is this one's"
        )
        return Translation(_as_sections(self._ours), (version, *dict.fromkeys(self._notes)), tuple(self._left_out))

    def _fit(self) -> None:
        """Replace what they have and no policy here does, each with a line."""
        theirs, key = self.source_of("model.attn_implementation"), "model.attn_implementation"
        if theirs and self._ours.get(key) == "flash_attention_2" and "model.dtype" not in self._ours:
            self.report(
                theirs, self._ours.pop(key), "computes in 16 bits only, and weights that are trained stay float32"
            )
        if "tracking.report_to" not in self._ours:
            key = "tracking.wandb_project"
            if (value := self._ours.pop(key, None)) is not None:
                self.note(f"{self.source_of(key)} = {value!r} has no effect without a sink of metrics: report_to")

    def _acknowledge(self) -> None:
        """Name the departures from the paper that these settings make on purpose."""
        ours = self._ours
        is_sequence = ours.get("algorithm.variety", "gspo") != "grpo"
        low, high = ours.get("loss.clip_low", 0.0), ours.get("loss.clip_high", 0.0)
        aggregation = ours.get("loss.aggregation")
        truncation_names = [name for name in _TRUNCATION if f"rollout.{name}" in ours]
        departures = {
            "wide_clip": (
                is_sequence and max(low, high) >= WIDE_CLIP,
                "a sequence ratio stays within about 1e-3 of 1, so that a clip of "
                f"{low:g} / {high:g} never acts; the paper's is 3e-4 / 4e-4",
            ),
            "length_weighting": (
                is_sequence and aggregation in LENGTH_WEIGHTED,
                f"aggregation {aggregation!r} with a sequence ratio weighs an episode by its length; the paper's is "
                "'seq-mean-token-mean', in which each weighs one",
            ),
            "truncated_sampling": (
                bool(truncation_names),
                f"{', '.join(truncation_names)}: rollouts come from a changed distribution, which {self.name} does not "
                "score under; without the acknowledgement the learner does, for top_p, top_k and min_p",
            ),
        }
        if names := [name for name, (is_made, _) in departures.items() if is_made]:
            self.set("algorithm.acknowledge", names)
            self._notes += [departures[name][1] for name in names]
        step = ours.get("training.batch_size", 1)
        episodes = ours.get("rollout.episodes_per_batch", step)
        if max(1, episodes // step) * ours.get("training.update_epochs", 1) == 1:
            self.note(
                "each batch is used for one optimizer step, so that the ratio is 1 and no clip acts; lower "
                "training.batch_size (the paper takes 4 steps a batch)"
            )


def in_words(conditions: Mapping[str, Any]) -> str:
    """Return what a row acts with.

    >>> in_words({"use_vllm": True, "vllm_mode": "server", "beta": 0.04})
    "use_vllm and vllm_mode = 'server' and beta"
    """
    is_said = (str, bool)
    return " and ".join(
        key if value is True or not isinstance(value, is_said) else f"{key} = {value!r}"
        for key, value in conditions.items()
    )


def _as_sections(ours: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key, value in ours.items():
        *path, name = key.split(".")
        table = sections
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return sections


@functools.cache
def _table(stem: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{stem}.toml").read_text(encoding="utf-8"))


def read_system(stem: str, *rules: Rule, version: str | None = None, **more: Any) -> System:
    """Return the system of a table, with the functions that its rows name; `more` are fields of the system.

    A table has `name`, `source`, `defaults`, `shared` (keys of shared.toml that it has, too), `keys` (rows, of which a
    later one replaces what an earlier one has set) and `without` (reasons with their keys). What stands under
    `versions` is of one version.
    """
    table = _table(stem)
    parts = [table] if version is None else [table, table["versions"][version]]
    defaults = {key: value for part in parts for group in part.get("defaults", ()) for key, value in group.items()}
    entries = {key: _table("shared")["keys"][key] for part in parts for key in part.get("shared", ())}
    entries |= {key: entry for part in parts for key, entry in part.get("keys", {}).items()}
    rows = {key: _row(entry, defaults.pop(key, None)) for key, entry in entries.items()}
    assert not defaults, f"{stem}.toml: defaults of keys without a row: {defaults}"
    without: dict[str, tuple[Any, str]] = {}
    for why, keys in [item for part in parts for item in part.get("without", {}).items()]:
        for group in [{key: None} if isinstance(key, str) else key for key in keys]:
            without |= {key: (default, why) for key, default in group.items()}
    source = parts[-1].get("source", table["name"])
    rule_names = {row.rule for row in rows.values() if row.rule}
    row_rules = tuple(rule for rule in (*_SHARED_RULES, *rules) if rule.__name__ in rule_names)
    assert len(rule_names) == len(row_rules), f"{stem}.toml names other rules than {stem}.py has: {sorted(rule_names)}"
    return System(name=table["name"], source=source, rows=rows, without_counterpart=without, rules=row_rules, **more)


def _row(entry: Mapping[str, Any], default: Any) -> Row:
    row: dict[str, Any] = {**entry, "default": default}
    for name in ("ours", "also", "off"):
        if name in row:
            row[name] = (row[name],) if isinstance(row[name], str) else tuple(row[name])
    for name in ("values", "advice"):
        if isinstance(row.get(name), Mapping):  # TOML's keys are texts
            row[name] = {{"true": True, "false": False}.get(key, key): value for key, value in row[name].items()}
    assert set(row) <= {field.name for field in fields(Row)}, f"no such fields: {sorted(row)}"
    return Row(**row)


def betas(draft: Draft) -> None:
    """Set AdamW's moments; a missing one has transformers' default."""
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    if beta1 is not None or beta2 is not None:
        draft.set("optimizer.betas", [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2])


def warmup(draft: Draft) -> None:
    """Set the warm-up of the learning rate."""
    fraction, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    if steps and steps >= 1:
        draft.set("optimizer.warmup_steps", draft.count("warmup_steps"))
    elif steps or fraction:  # transformers 5 reads a number below 1 as a ratio, as here
        draft.set("optimizer.warmup_steps", steps or fraction)


def tracking(draft: Draft) -> None:
    """Set the sinks of metrics among theirs; the others are noted."""
    names = draft.names("report_to")
    if "wandb" in names and "wandb_project" in draft.system.rows and draft.get("wandb_project") is None:
        draft.note("report_to = 'wandb' logs nothing without wandb_project, there as here")
        names.remove("wandb")
    for name in names:
        if name not in ("none", *get_args(SinkName)):
            draft.note(f"report_to: {name!r} has no sink here; metrics are always in metrics.jsonl")
    draft.set("tracking.report_to", [name for name in names if name in get_args(SinkName)] or None)


def keep(draft: Draft) -> None:
    """Set which checkpoints are kept, from their largest number, which may include the best one."""
    theirs = "save_total_limit" if "save_total_limit" in draft.system.rows else "max_ckpt_to_keep"
    limit, keeps_best = draft.count(theirs), draft.flag("load_best_model_at_end")
    if limit is not None and limit > 0:
        draft.set("training.keep_last", max(1, limit - keeps_best))
        draft.set("training.keep_best", int(keeps_best))
    elif limit is not None:
        draft.note(f"{theirs} = {limit}: all checkpoints stay there; a large training.keep_last keeps all here")


_SHARED_RULES: tuple[Rule, ...] = (betas, warmup, tracking, keep)
