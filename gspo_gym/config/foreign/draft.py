"""A settings file of another trainer on its way to being one of ours.

A translator (`trl.py`, `roll.py`, ...) reads every key through a `Draft`, which remembers what was read, what came from
the other system's own defaults, and what changes in meaning. Whatever nobody read is reported: nothing gets lost
silently.

What several translators have in common: learning rates, optimizers, model and LoRA, sampling, reporting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo_gym.errors import ConfigError, nearest_name


@dataclass(frozen=True, slots=True)
class Translation:
    """Our sections, and what a reader must know about them.

    Attributes:
        values: sections as `RunConfig.from_dict` takes them (Any: unchecked).
        notes: where our key does not mean quite what theirs did, or a default of theirs decided.
        left_out: keys of theirs with no counterpart here, each with the reason.
    """

    values: dict[str, Any]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass
class Draft:
    """Their keys going, our keys coming.

    Attributes:
        system: whose settings these are, for messages.
        given: what the file says (Any: of all their types).
        defaults: what the system does where the file is silent, for keys that decide something here.
    """

    system: str
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    _ours: dict[str, Any] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)

    def get(self, theirs: str) -> Any:
        """Their value, or their system's default, or None (Any: of all types); None in a file is the default, too."""
        self._read.add(theirs)
        value = self.given.get(theirs)
        return self.defaults.get(theirs) if value is None else value

    def number(self, theirs: str) -> float | None:
        """Their number. Texts such as "5e-6" count: YAML 1.1 takes that for a text.

        Raises:
            ConfigError: something else.
        """
        value = self.get(theirs)
        if value is None:
            return None
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise TypeError
            return float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.system}: {theirs}: expected a number, got {value!r}") from None

    def require_number(self, theirs: str) -> float:
        """Their number, of a key that `defaults` holds. A 0 stays a 0: what is out of range is said by our checks."""
        value = self.number(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def require_count(self, theirs: str) -> int:
        """Their whole number, at least 1, of a key that `defaults` holds.

        Raises:
            ConfigError: something else.
        """
        value = self.first_count(theirs)
        assert value is not None, f"{theirs} needs a default"
        return value

    def first_count(self, *theirs: str) -> int | None:
        """The whole number, at least 1, of the first of several keys that has one; all of them count as read.

        Raises:
            ConfigError: something else.
        """
        values = [(key, value) for key in theirs if (value := self.count(key)) is not None]
        if wrong := [(key, value) for key, value in values if value < 1]:
            raise ConfigError(f"{self.system}: {wrong[0][0]}: expected at least 1, got {wrong[0][1]}")
        return values[0][1] if values else None

    def first(self, *theirs: str) -> Any:
        """The first value that several keys have (Any: of all types); all of them count as read."""
        return next((value for value in [self.get(key) for key in theirs] if value is not None), None)

    def count(self, theirs: str) -> int | None:
        """Their whole number.

        Raises:
            ConfigError: something else.
        """
        value = self.number(theirs)
        if value is not None and not value.is_integer():
            raise ConfigError(f"{self.system}: {theirs}: expected a whole number, got {value}")
        return None if value is None else int(value)

    def flag(self, theirs: str) -> bool:
        """Their truth value; absent is false.

        Raises:
            ConfigError: something else.
        """
        value = self.get(theirs)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise ConfigError(f"{self.system}: {theirs}: expected true or false, got {value!r}")

    def choice(self, theirs: str, meanings: Mapping[Any, Any]) -> Any:
        """What their value means here (Any: whatever `meanings` hold); None: absent.

        Raises:
            ConfigError: a value that is not in `meanings`.
        """
        value = self.get(theirs)
        if value is None:
            return None
        if value not in meanings:
            known = ", ".join(repr(name) for name in meanings)
            raise ConfigError(f"{self.system}: {theirs}: expected one of {known}, got {value!r}")
        return meanings[value]

    def set(self, ours: str, value: Any) -> None:
        """Give our key a value (Any: of its type), over what it had; None changes nothing."""
        if value is not None:
            self._ours[ours] = value

    def fill(self, ours: str, value: Any) -> bool:
        """Give our key a value (Any: of its type) unless it has one; says whether it did."""
        is_missing = ours not in self._ours
        if is_missing:
            self._ours[ours] = value
        return is_missing

    def acknowledge(self, departure: str) -> None:
        """Name a departure from the paper that these settings make on purpose."""
        named = self._ours.setdefault("algorithm.acknowledge", [])
        if departure not in named:
            named.append(departure)

    def note(self, text: str) -> None:
        """Something changes in meaning."""
        self._notes.append(text)

    def is_null(self, theirs: str) -> bool:
        """Return whether the file says that their key has no value, where that is not its default."""
        self._read.add(theirs)
        return theirs in self.given and self.given[theirs] is None

    def set_modules(self, modules: Any, where_silent: Sequence[str]) -> None:
        """Give training.lora.target_modules its value (Any: a name, several, or None), or what peft adapts then."""
        if modules is None:
            self.note(f"no target modules are named: peft chooses by the model, {' and '.join(where_silent)} for most")
            modules = list(where_silent)
        is_one = isinstance(modules, str) and modules != "all-linear"
        self.set("training.lora.target_modules", [modules] if is_one else modules)

    def leave_out(self, theirs: str, why: str, *, default: Any = None) -> None:
        """Say that their key has no counterpart here, unless the file leaves it off or at its default (Any: of all
        types)."""
        self._read.add(theirs)
        if self.given.get(theirs) not in (None, False, default, self.defaults.get(theirs)):
            self._left_out.append(f"{theirs} = {self.given[theirs]!r}: {why}")

    def leave_out_part(self, theirs: str, part: str, value: Any, why: str) -> None:
        """Say that a key of their table has no counterpart here (Any: its value, as read)."""
        self._left_out.append(f"{theirs}.{part} = {value!r}: {why}")

    def finish(self) -> Translation:
        """The sections; keys that no one has read are left out, with the name that was probably meant."""
        for theirs in self.given:
            if theirs not in self._read:
                near = nearest_name(theirs, sorted(self._read))
                self._left_out.append(
                    f"{theirs} = {self.given[theirs]!r}: not a key that is known of {self.system}; {near}"
                )
        decided = [f"{key} = {self.defaults[key]!r}" for key in self.defaults if self.given.get(key) is None]
        if decided:
            self._notes.append(f"defaults of {self.system}, since the file is silent: {', '.join(decided)}")
        return Translation(_as_sections(self._ours), tuple(self._notes), tuple(self._left_out))


def label_of(text: str) -> str:
    """A run label made of a path or a name.

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


# What peft adapts of most models (Qwen, Llama, Mistral, Gemma) where nobody names modules.
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
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}


def take_trainer_arguments(draft: Draft) -> None:
    """The keys of transformers' TrainingArguments that mean the same everywhere."""
    draft.set("training.learning_rate", draft.number("learning_rate"))
    beta1, beta2 = draft.number("adam_beta1"), draft.number("adam_beta2")
    if beta1 is not None or beta2 is not None:  # the one that is missing is transformers' default
        draft.set("optimizer.betas", [0.9 if beta1 is None else beta1, 0.999 if beta2 is None else beta2])
    draft.set("optimizer.eps", draft.number("adam_epsilon"))
    draft.set("optimizer.weight_decay", draft.number("weight_decay"))
    draft.set("optimizer.max_grad_norm", draft.number("max_grad_norm"))
    draft.set("optimizer.kind", draft.choice("optim", _OPTIMIZERS))
    take_schedule(draft)
    draft.set("training.log_interval", draft.count("logging_steps"))
    draft.set("training.checkpoint_every_n_iters", draft.count("save_steps"))
    draft.set("run.seed", draft.count("seed"))
    if draft.flag("gradient_checkpointing"):
        draft.set("model.gradient_checkpointing", True)


def take_schedule(draft: Draft) -> None:
    """Warm-up and decay of the learning rate."""
    schedule = draft.choice("lr_scheduler_type", _SCHEDULES)
    draft.set("optimizer.schedule", schedule)
    if schedule in ("linear", "cosine"):
        draft.set("optimizer.min_lr_fraction", 0.0)  # transformers' schedules end at 0; ours has 0.1 by default
    fraction, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    if steps is not None and 0 < steps < 1:  # transformers 5 takes a ratio under this name, too
        fraction, steps = steps, None
    if steps:
        draft.set("optimizer.num_warmup_steps", draft.count("warmup_steps"))
    elif fraction:
        draft.set("optimizer.warmup_fraction", fraction)


def take_policy_config(draft: Draft) -> None:
    """Take how the policy is asked: its system message, and what its chat template is told."""
    draft.set("rollout.policy_config.system_prompt", draft.get("system_prompt"))
    kwargs = draft.get("chat_template_kwargs")
    if isinstance(kwargs, str):  # as a command line takes it
        kwargs = _parsed(draft, "chat_template_kwargs", kwargs)
    draft.set("rollout.policy_config.chat_template_kwargs", kwargs or None)


def _parsed(draft: Draft, theirs: str, text: str) -> Any:
    """Return the JSON of a text (Any: as it is)."""
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError(f"{draft.system}: {theirs}: expected a table or its JSON, got {text!r}") from None


def take_reporting(draft: Draft) -> None:
    """Where metrics go."""
    report_to = draft.get("report_to")
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    for name in names:
        if name not in ("none", "wandb", "tensorboard"):
            draft.note(f"report_to: {name!r} has no sink here; metrics are always in metrics.jsonl")
    draft.set("tracking.report_to", [name for name in names if name in ("wandb", "tensorboard")] or None)
    draft.set("tracking.run_name", draft.get("run_name"))
    output = draft.get("output_dir")
    if output is not None:
        draft.set("model.label", label_of(str(output)))
        draft.note(f"output_dir = {str(output)!r} names the run: it is written to [run] folder / model.label")


def take_clip(draft: Draft, low: float, high: float, *, is_sequence: bool) -> None:
    """The clip range, as distances from 1."""
    from gspo_gym.config.rules.objective import WIDE_CLIP  # here: --help need not wait for pydantic

    draft.set("loss.clip_low", low)
    draft.set("loss.clip_high", high)
    if is_sequence and max(low, high) >= WIDE_CLIP:
        draft.acknowledge("wide_clip")
        draft.note(
            f"a sequence ratio stays within about 1e-3 of 1, so that a clip of {low:g} / {high:g} never acts; the "
            "paper's is 3e-4 / 4e-4"
        )


def take_aggregation(draft: Draft, aggregation: str, *, is_sequence: bool, norm_length: int | None = None) -> None:
    """How token terms become a loss."""
    from gspo_gym.config.rules.objective import LENGTH_WEIGHTED

    draft.set("loss.aggregation", aggregation)
    if aggregation in ("dr_grpo", "seq-mean-token-sum-norm"):
        draft.set("loss.norm_length", norm_length)
    if is_sequence and aggregation in LENGTH_WEIGHTED:
        draft.acknowledge("length_weighting")
        draft.note(
            f"aggregation {aggregation!r} with a sequence ratio weighs an episode by its length; the paper's is "
            "'seq-mean-token-mean', in which each weighs one"
        )


def take_sampling(draft: Draft) -> None:
    """temperature, top_p, top_k, min_p and repetition_penalty under their usual names."""
    draft.set("rollout.temperature", draft.number("temperature"))
    active: Mapping[str, float | None] = {
        "top_p": _unless(draft.number("top_p"), 1.0),
        "top_k": _unless(draft.number("top_k"), 0.0, -1.0),
        "min_p": _unless(draft.number("min_p"), 0.0),
        "repetition_penalty": _unless(draft.number("repetition_penalty"), 1.0),
    }
    for name, value in active.items():
        draft.set(f"rollout.{name}", int(value) if name == "top_k" and value is not None else value)
    cut = [name for name, value in active.items() if value is not None]
    if cut:
        draft.acknowledge("truncated_sampling")
        draft.note(
            f"{', '.join(cut)}: rollouts come from a changed distribution, which {draft.system} does not score under; "
            "training.score_truncated = true does, for top_p, top_k and min_p"
        )


def take_single_step_note(draft: Draft, *, num_steps: int) -> None:
    """Say it where old and present policy are the same in every update."""
    if num_steps == 1:
        draft.note(
            "each batch is used for one optimizer step, so that the ratio is 1 and no clip acts; lower "
            "training.batch_size (the paper takes 4 steps a batch)"
        )


def _unless(value: float | None, *off: float) -> float | None:
    return None if value is None or value in off else value
