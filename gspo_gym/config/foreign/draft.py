"""The draft of a translated settings file, and the rows of the table of foreign keys.

Each system (`trl.py`, `roll.py`, ...) has a `Row` for every known key. Translations, the hints about unknown keys
(`words.py`) and configs/recipes/PARAMETERS.md are made from the rows. A `Draft` records the keys that were read, the
defaults of the other system that decided something, and changes of meaning; it reports the keys that were not read.

Rows shared by several systems stand at the end: learning rate, optimizer, sampling, reporting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.settings import LENGTH_WEIGHTED, WIDE_CLIP


@dataclass(frozen=True, slots=True)
class Row:
    """A key of another trainer, and its meaning here.

    Attributes:
        ours: our keys that together say the same; none: `note` says why.
        read: reads the value that each of `ours` takes.
        together: reads this key and others, which depend on each other; with neither, the row is a hint only.
        values: the value of `ours` for a foreign value; a tuple holds one for each of `ours`.
        advice: the text of a hint for a foreign value, or for all values, if `ours` = value would be wrong.
        also: our keys that change with it besides.
        beside: foreign keys without which it has no effect.
        note: the change of meaning, or the reason why there is no counterpart.
        default: its value if a file has none; None: a missing key changes nothing here.
    """

    ours: tuple[str, ...] = ()
    read: Callable[[Draft, str], Any] | None = None
    together: Callable[[Draft], None] | None = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    advice: Mapping[Any, str] | str = field(default_factory=dict)
    also: tuple[str, ...] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    default: Any = None

    def assigned(self, value: Any) -> dict[str, Any]:
        """Return our keys with their values for one of `values`."""
        meant = self.values[value]
        parts = meant if isinstance(meant, tuple) else (meant,) * len(self.ours)
        return {key: part for key, part in zip(self.ours, parts, strict=True) if part is not None}


@dataclass(frozen=True, slots=True)
class System:
    """Another trainer, as far as its settings are understood.

    Attributes:
        name: for messages.
        rows: its keys.
        without_counterpart: their other keys: default, and the reason why no key here answers to it.
        flatten: takes nested tables apart.
    """

    name: str
    rows: Mapping[str, Row]
    without_counterpart: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    flatten: Callable[[Mapping[str, Any]], dict[str, Any]] = dict

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the defaults of keys that decide something here."""
        return {key: row.default for key, row in self.rows.items() if row.default is not None}

    def draft(self, values: Mapping[str, Any], *, model: str | None = None) -> Draft:
        """Return the draft of a file as read, in which nothing is translated yet; `model` goes over the file's."""
        return Draft(self.name, self.flatten(values), self.defaults, model)


@dataclass(frozen=True, slots=True)
class Translation:
    """Our sections, and remarks for the reader.

    Attributes:
        values: sections as `RunConfig.from_dict` takes them.
        notes: changes of meaning, and foreign defaults that decided something.
        left_out: foreign keys with no counterpart here, each with the reason.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass
class Draft:
    """The translation of a file in progress: its keys are read, ours are set, changes of meaning are noted.

    Every method that reads a key raises a ConfigError that names system, key and value if the value is of a wrong type.

    Attributes:
        system: its name, for messages.
        given: the file's keys.
        defaults: see `System.defaults`.
        model: the model that the translation is for; None: that of the file.
    """

    system: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    model: str | None = None
    _ours: dict[str, Any] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def take(self, system: System) -> None:
        """Read every key that the system has, and set ours."""
        # Once each, although it stands in several rows: it reads all its keys together.
        for together in dict.fromkeys(row.together for row in system.rows.values() if row.together is not None):
            together(self)
        for theirs, row in system.rows.items():
            if row.read is not None:
                value = row.read(self, theirs)
                parts = value if isinstance(value, tuple) else (value,) * len(row.ours)
                for ours, part in zip(row.ours, parts, strict=True):
                    self.set(ours, part)
        for theirs, (default, why) in system.without_counterpart.items():
            self.leave_out(theirs, why, default=default)

    def get(self, theirs: str) -> Any:
        """Return their value, or the default of their system if the file has none or None."""
        self._read.add(theirs)
        value = self.given.get(theirs)
        # YAML's null is a key that is not set.
        return self.defaults.get(theirs) if value is None else value

    def number(self, theirs: str) -> float | None:
        """Return their number, None if it is absent."""
        value = self.get(theirs)
        return None if value is None else self.as_number(theirs, value)

    def as_number(self, theirs: str, value: Any) -> float:
        """Return the value of a key as a number, or of a text such as "5e-6", which YAML 1.1 takes for no number."""
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.system}: {theirs}: expected a number, got {value!r}") from None

    def names(self, theirs: str) -> list[str]:
        """Return their list of names, one name as a list, [] if it is absent or false."""
        value = self.get(theirs)
        names = [value] if isinstance(value, str) else value or []
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{self.system}: {theirs}: expected a list of names, got {value!r}")
        return list(names)

    def table(self, theirs: str) -> Mapping[str, Any] | None:
        """Return their table, None if it is absent."""
        value = self.get(theirs)
        if value is None or isinstance(value, Mapping):
            return value
        raise ConfigError(f"{self.system}: {theirs}: expected a table, got {value!r}")

    def require_number(self, theirs: str) -> float:
        """Return the number of a key that `defaults` holds."""
        value = self.number(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def require_count(self, theirs: str) -> int:
        """Return the whole number, at least 1, of a key that `defaults` holds."""
        value = self.first_count(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def first_count(self, *theirs: str) -> int | None:
        """Return the first whole number, at least 1, that several keys have; all of them count as read."""
        values = [(key, value) for key in theirs if (value := self.count(key)) is not None]
        if wrong := [(key, value) for key, value in values if value < 1]:
            raise ConfigError(f"{self.system}: {wrong[0][0]}: expected at least 1, got {wrong[0][1]}")
        return values[0][1] if values else None

    def first(self, *theirs: str) -> Any:
        """Return the first value that several keys have; all of them count as read."""
        return next((value for value in [self.get(key) for key in theirs] if value is not None), None)

    def count(self, theirs: str) -> int | None:
        """Return their whole number."""
        value = self.number(theirs)
        if value is not None and not value.is_integer():
            raise ConfigError(f"{self.system}: {theirs}: expected a whole number, got {value}")
        return None if value is None else int(value)

    def flag(self, theirs: str) -> bool:
        """Return their truth value, false if it is absent."""
        value = self.get(theirs)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise ConfigError(f"{self.system}: {theirs}: expected true or false, got {value!r}")

    def choice(self, theirs: str, meanings: Mapping[Any, Any]) -> Any:
        """Return the meaning of their value, None if it is absent."""
        value = self.get(theirs)
        if value is None:
            return None  # an absent key changes nothing here
        if isinstance(value, Mapping | list) or value not in meanings:  # a list cannot be looked up
            known = ", ".join(repr(name) for name in meanings)
            raise ConfigError(f"{self.system}: {theirs}: expected one of {known}, got {value!r}")
        return meanings[value]

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

    def acknowledge(self, departure: str) -> None:
        """Add a departure from the paper that these settings make on purpose."""
        named = self._ours.setdefault("algorithm.acknowledge", [])
        if departure not in named:
            named.append(departure)

    def note(self, text: str) -> None:
        """Add a remark about a change of meaning."""
        self._notes.append(text)

    def is_null(self, theirs: str) -> bool:
        """Return whether the file gives their key the value None."""
        self._read.add(theirs)
        # An explicit null may mean another thing than an absent key, which has the default.
        return theirs in self.given and self.given[theirs] is None

    def set_modules(self, modules: Any) -> None:
        """Set training.lora.target_modules to a name, several, or, for None, the modules that peft chooses."""
        if modules is None:
            self.note(f"no target modules are named: peft chooses by the model, {' and '.join(PEFT_MODULES)} for most")
            modules = list(PEFT_MODULES)
        is_one = isinstance(modules, str) and modules != "all-linear"
        self.set("training.lora.target_modules", [modules] if is_one else modules)

    def leave_out(self, theirs: str, why: str, *, default: Any = None) -> None:
        """Report a key without a counterpart, unless it is absent, has its default or switches off what is off."""
        self._read.add(theirs)
        value = self.given.get(theirs)
        changes_nothing = value in (None, default, self.defaults.get(theirs)) or (value is False and not default)
        if not changes_nothing:
            self._left_out.append(f"{theirs} = {value!r}: {why}")

    def leave_out_part(self, theirs: str, part: str, value: Any, why: str) -> None:
        """Report a key of their table that has no counterpart here."""
        self._left_out.append(f"{theirs}.{part} = {value!r}: {why}")

    def finish(self) -> Translation:
        """Return the sections; keys that were not read are left out, with the name that was probably meant."""
        for theirs in self.given:
            # Misspelt there, too, or of a newer version: the reader decides.
            if theirs not in self._read:
                near = nearest_name(theirs, sorted(self._read))
                self._left_out.append(
                    f"{theirs} = {self.given[theirs]!r}: not a key that is known of {self.system}; {near}"
                )
        # These would be missed: the file does not show them, and our defaults differ.
        decided = [f"{key} = {self.defaults[key]!r}" for key in self.defaults if self.given.get(key) is None]
        if decided:
            self._notes.append(f"defaults of {self.system}, since the file is silent: {', '.join(decided)}")
        return Translation(_as_sections(self._ours), tuple(self._notes), tuple(self._left_out))


def label_of(text: str) -> str:
    """Return a run label made of a path or a name.

    >>> label_of("./outputs/my run")
    'my-run'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text.rstrip("/").rsplit("/", 1)[-1]).strip("-._")
    return name[:64] or "run"


def _as_sections(ours: Mapping[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    for key, value in ours.items():
        *path, name = key.split(".")
        table = sections
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return sections


def number(*ours: str, default: float | None = None) -> Row:
    """Return the row of a number that ours take as it is."""
    return Row(ours, Draft.number, default=default)


def count(*ours: str, default: int | None = None) -> Row:
    """Return the row of a whole number that ours take as it is."""
    return Row(ours, Draft.count, default=default)


def plain(*ours: str) -> Row:
    """Return the row of a value of any type that ours take as it is."""
    return Row(ours, Draft.get)


def revision() -> Row:
    """Return the row of a revision of the model; the main branch is loaded anyway, and a folder has none."""
    return Row(("model.revision",), lambda draft, theirs: None if draft.get(theirs) == "main" else draft.get(theirs))


def choice(values: Mapping[Any, Any], *ours: str, default: Any = None) -> Row:
    """Return the row of a name with a table from names to our values."""
    return Row(ours, lambda draft, theirs: draft.choice(theirs, values), values=values, default=default)


def switch(ours: str, on: Any, *, default: bool | None = None) -> Row:
    """Return the row of a truth value that gives our key a value if it is true."""
    return Row((ours,), lambda draft, theirs: on if draft.flag(theirs) else None, values={True: on}, default=default)


def by(together: Callable[[Draft], None], *ours: str, **more: Any) -> Row:
    """Return the row of a key that a function reads, perhaps with others."""
    return Row(ours, together=together, **more)


def with_defaults(rows: Mapping[str, Row], **defaults: Any) -> dict[str, Row]:
    """Return rows that several systems share with the defaults of one of them."""
    return {key: replace(row, default=defaults.get(key)) for key, row in rows.items()}


def without(why: str, *absent: str, **defaults: Any) -> dict[str, tuple[Any, str]]:
    """Return keys that have no counterpart for one reason, with their defaults."""
    return {key: (default, why) for key, default in {**dict.fromkeys(absent), **defaults}.items()}


# Defaults of an adapter in TRL and stateset-agents.
LORA_DEFAULTS: Mapping[str, Any] = {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": None}
OF_BATCHES = "one prompt has training.group_size episodes, so multiply by that"

# What peft adapts of most models (Qwen, Llama, Mistral, Gemma) if no modules are named.
PEFT_MODULES = ("q_proj", "v_proj")

_OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw_fused",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "paged_adamw_8bit",
}
_SCHEDULES = {  # transformers' schedules end at 0; ours has 0.1 by default
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "cosine_with_min_lr": ("cosine", 0.0),
}


def _take_betas(draft: Draft) -> None:
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    if beta1 is not None or beta2 is not None:  # a missing one has transformers' default
        draft.set("optimizer.betas", [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2])


def _take_warmup(draft: Draft) -> None:
    fraction, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    if steps is not None and 0 < steps < 1:  # transformers 5 reads a number below 1 as a ratio
        fraction, steps = steps, None
    if steps:
        draft.set("optimizer.num_warmup_steps", draft.count("warmup_steps"))
    elif fraction:
        draft.set("optimizer.warmup_fraction", fraction)


def _take_template_arguments(draft: Draft) -> None:
    kwargs = draft.get("chat_template_kwargs")
    if isinstance(kwargs, str):  # as a command line takes it
        try:
            kwargs = json.loads(kwargs)
        except ValueError:
            raise ConfigError(
                f"{draft.system}: chat_template_kwargs: expected a table or its JSON, got {kwargs!r}"
            ) from None
    draft.set("rollout.policy_config.chat_template_kwargs", kwargs or None)


def take_sinks(draft: Draft, names: Sequence[str]) -> None:
    """Set the sinks of metrics among names of sinks; the others are noted."""
    for name in names:
        if name not in ("none", "wandb", "tensorboard"):
            draft.note(f"report_to: {name!r} has no sink here; metrics are always in metrics.jsonl")
    draft.set("tracking.report_to", [name for name in names if name in ("wandb", "tensorboard")] or None)


def _take_folder(draft: Draft) -> None:
    output = draft.get("output_dir")
    if output is not None:
        draft.set("model.label", label_of(str(output)))
        draft.note(f"output_dir = {str(output)!r} names the run: it is written to [run] folder / model.label")


def take_clip(draft: Draft, low: float, high: float, *, is_sequence: bool) -> None:
    """Set the clip range, as distances from 1."""
    draft.set("loss.clip_low", low)
    draft.set("loss.clip_high", high)
    if is_sequence and max(low, high) >= WIDE_CLIP:
        draft.acknowledge("wide_clip")
        draft.note(
            f"a sequence ratio stays within about 1e-3 of 1, so that a clip of {low:g} / {high:g} never acts; the "
            "paper's is 3e-4 / 4e-4"
        )


def take_aggregation(draft: Draft, aggregation: str, *, is_sequence: bool, norm_length: int | None = None) -> None:
    """Set how token terms are aggregated into a loss."""
    draft.set("loss.aggregation", aggregation)
    if aggregation in ("dr_grpo", "seq-mean-token-sum-norm"):
        draft.set("loss.norm_length", norm_length)
    if is_sequence and aggregation in LENGTH_WEIGHTED:
        draft.acknowledge("length_weighting")
        draft.note(
            f"aggregation {aggregation!r} with a sequence ratio weighs an episode by its length; the paper's is "
            "'seq-mean-token-mean', in which each weighs one"
        )


# Sampling settings that change the distribution, and the values with which they change nothing.
TRUNCATION: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0.0, -1.0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
}


def take_truncation(draft: Draft, *names: str) -> None:
    """Set these of `TRUNCATION` (default: all), and acknowledge that rollouts come from a changed distribution."""
    active = {name: _unless(draft.number(name), *TRUNCATION[name]) for name in names or TRUNCATION}
    for name, value in active.items():
        draft.set(f"rollout.{name}", int(value) if name == "top_k" and value is not None else value)
    cut = [name for name, value in active.items() if value is not None]
    if cut:
        draft.acknowledge("truncated_sampling")
        draft.note(
            f"{', '.join(cut)}: rollouts come from a changed distribution, which {draft.system} does not score under; "
            "training.score_truncated = true does, for top_p, top_k and min_p"
        )


def take_kept(draft: Draft, theirs: str, *, keeps_best: bool = False) -> None:
    """Set which checkpoints are kept, from their largest number, which may include the best one."""
    limit = draft.count(theirs)
    if limit is not None and limit > 0:
        draft.set("training.keep_last", max(1, limit - keeps_best))
        draft.set("training.keep_best", int(keeps_best))
    elif limit is not None:
        draft.note(f"{theirs} = {limit}: all checkpoints stay there; training.keep_every = 1 keeps all here")


def take_single_step_note(draft: Draft, *, num_steps: int) -> None:
    """Add a remark if the old and the present policy are the same in every update."""
    if num_steps == 1:
        draft.note(
            "each batch is used for one optimizer step, so that the ratio is 1 and no clip acts; lower "
            "training.batch_size (the paper takes 4 steps a batch)"
        )


def _unless(value: float | None, *off: float) -> float | None:
    return None if value is None or value in off else value


_BETAS = by(_take_betas, "optimizer.betas", advice="write optimizer.betas = [adam_beta1, adam_beta2]")
# Keys of transformers' TrainingArguments, which mean the same in every system.
TRAINER_ARGUMENTS: Mapping[str, Row] = {
    "learning_rate": number("training.learning_rate"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": number("optimizer.eps"),
    "weight_decay": number("optimizer.weight_decay"),
    "max_grad_norm": number("optimizer.max_grad_norm"),
    "optim": choice(_OPTIMIZERS, "optimizer.kind"),
    "lr_scheduler_type": choice(_SCHEDULES, "optimizer.schedule", "optimizer.min_lr_fraction"),
    "warmup_ratio": by(_take_warmup, "optimizer.warmup_fraction"),
    "warmup_steps": by(
        _take_warmup,
        "optimizer.num_warmup_steps",
        also=("optimizer.warmup_fraction",),
        note="a number below 1 is a fraction",
    ),
    "logging_steps": count("training.log_interval"),
    "save_steps": count("training.checkpoint_every_n_iters"),
    "seed": count("run.seed"),
    "gradient_checkpointing": switch("model.gradient_checkpointing", True),
}
# Sinks of metrics, and the run's name.
REPORTING: Mapping[str, Row] = {
    "report_to": by(lambda draft: take_sinks(draft, draft.names("report_to")), "tracking.report_to"),
    "run_name": plain("tracking.run_name"),
    "output_dir": by(_take_folder, "model.label", note="a run is written into run.folder / model.label"),
}
# System message, arguments of the chat template, and sampling.
POLICY: Mapping[str, Row] = {
    "system_prompt": plain("rollout.policy_config.system_prompt"),
    "chat_template_kwargs": by(_take_template_arguments, "rollout.policy_config.chat_template_kwargs"),
    "temperature": number("rollout.temperature"),
    **{name: by(take_truncation, f"rollout.{name}") for name in TRUNCATION},
}
