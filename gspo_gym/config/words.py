"""Text about a configuration: its problems, a value as one line of TOML, and the values that a key takes.

A problem names the key, what was expected, what was given, and the nearest name. Problems come from pydantic's errors,
from other trainers' names (`SYSTEMS`, and names that only a hint knows) and from secrets in a file.
"""

from __future__ import annotations

import difflib
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gspo_gym.config.foreign.agilerl import AGILERL
from gspo_gym.config.foreign.reader import Row, System
from gspo_gym.config.foreign.roll import ROLL
from gspo_gym.config.foreign.stateset import STATESET
from gspo_gym.config.foreign.trl import TRL
from gspo_gym.errors import nearest_name, shortened

_NOUNS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
_MAX_SHOWN = 60  # characters of a wrong value
_PASSED_ON = ("env_config", "policy_config")  # to environments and apps, which may take any text
# Names and values that a key would have; the prefixes are those of OpenAI, Groq, Hugging Face, xAI, GitHub and W&B.
_SECRET = re.compile(
    r"(^|_)(api_?keys?|secret(_key)?|password|passwd|(access|auth|bearer|hf|hub|wandb)_?token)$|^token$", re.I
)
_SECRET_VALUE = re.compile(r"(sk|gsk|hf|xai|ghp|wandb)[-_][A-Za-z0-9_-]{16,}|AIza[A-Za-z0-9_-]{20,}")
_VARIABLES = {
    "openai": "OPENAI_API_KEY",
    "groq": "GROQ_API_KEY",
    "gemini": "GEMINI_API_KEY",
    "wandb": "WANDB_API_KEY",
    "tracking": "WANDB_API_KEY",
    "hf": "HF_TOKEN",
    "hub": "HF_TOKEN",
    "environment": "ENVIRONMENT_API_KEY",
    "task": "ENVIRONMENT_API_KEY",
    "services": "ENVIRONMENT_API_KEY",
    "judge": "JUDGE_API_KEY",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the dotted key (a section's name, where a whole section is meant) and a sentence."""

    key: str
    text: str


def field_of(key: str) -> str:
    """Return the key that a file gives a value to, where `key` may be of an entry of a list of tables.

    >>> field_of("rollout.mixture.0.share"), field_of("rollout.top_p")
    ('rollout.mixture', 'rollout.top_p')
    """
    return re.split(r"\.\d+(?:\.|$)", key)[0]


def show(value: Any) -> str:
    """Return a value as a user would write it, shortened.

    >>> show("five"), show(True), show([1, 2])
    ('"five"', 'true', '[1, 2]')
    """
    return shortened(json.dumps(value, default=str, ensure_ascii=False), _MAX_SHOWN)


def look_up(values: Any, key: str, default: Any = None) -> Any:
    """Return the value at a dotted key, or the default where tables do not lead there.

    >>> look_up({"model": {"base": "m"}}, "model.base"), look_up({"model": 3}, "model.base")
    ('m', None)
    """
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def with_known_spelling(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return `values` with the names of a `Literal` spelled as there, in any case."""
    # The hosted trainer's files write some names in capitals. Other texts, such as paths, stay as they are.
    result = dict(values)
    for key, value in values.items():
        info = model.model_fields.get(key)
        if info is None:
            continue
        section, entry = section_model(info.annotation), entry_model(info.annotation)
        if section is not None and isinstance(value, Mapping):
            result[key] = with_known_spelling(value, section)
        elif entry is not None and isinstance(value, list | tuple):
            entries = [with_known_spelling(item, entry) if isinstance(item, Mapping) else item for item in value]
            result[key] = type(value)(entries)
        elif names := _names_of(info.annotation):
            is_list = isinstance(value, list | tuple)  # of names, such as algorithm.acknowledge
            result[key] = type(value)(_spell(item, names) for item in value) if is_list else _spell(value, names)
    return result


def _names_of(annotation: Any) -> dict[str, str]:
    if get_origin(annotation) is Literal:
        return {name.lower(): name for name in get_args(annotation) if isinstance(name, str)}
    return {low: name for part in get_args(annotation) for low, name in _names_of(part).items()}


def _spell(value: Any, names: Mapping[str, str]) -> Any:
    return names.get(value.strip().lower(), value) if isinstance(value, str) else value


def sections_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sections of a settings model by dotted name, nested ones after their parents."""
    for name, info in model.model_fields.items():
        if (section := section_model(info.annotation)) is not None:
            yield prefix + name, section
            yield from sections_of(section, f"{prefix}{name}.")


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class in an annotation like `X` or `X | None`."""
    candidates = get_args(annotation) if _is_union(annotation) else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def entry_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class of the entries in an annotation like `tuple[X, ...]`, a list of tables."""
    parts = get_args(annotation) if get_origin(annotation) is tuple else ()
    return section_model(parts[0]) if parts else None


def describe(info: FieldInfo | None) -> str:
    """Return the values that a field takes, such as "an integer > 0" or "'full' or 'lora'"."""
    if info is None:
        return "something else"
    bounds = bounds_of(info)
    noun = _noun(info.annotation)
    if any(getattr(m, "min_length", 0) for m in info.metadata):
        noun = noun.replace("a ", "a non-empty ", 1)
    return f"{noun} {bounds}".rstrip()


def bounds_of(info: FieldInfo) -> str:
    """Return the range of a field, such as "> 0 and <= 1"; empty: any value."""
    return bounds_in_words({name: getattr(m, name) for m in info.metadata for name in _SIGNS if hasattr(m, name)})


def bounds_in_words(bounds: Mapping[str, Any]) -> str:
    """Return pydantic's names of bounds in words; other names are left out.

    >>> bounds_in_words({"ge": 0, "lt": 1.0})
    '>= 0 and < 1'
    """
    return " and ".join(f"{sign} {bounds[name]:g}" for name, sign in _SIGNS.items() if name in bounds)


def _noun(annotation: Any) -> str:
    if _is_union(annotation):
        return " or ".join(_noun(part) for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        *first_values, last = [f'"{value}"' for value in get_args(annotation)]
        return f"{', '.join(first_values)} or {last}" if first_values else last
    if get_origin(annotation) is Annotated:
        return _noun(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        kind, *item_types = get_args(annotation)
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind  # numbers with a range
        if section_model(kind) is not None:
            return "a list of tables"
        count = "" if item_types == [...] else f"{1 + len(item_types)} "
        return f"a list of {count}{_PLURALS[kind] if kind in _PLURALS else _noun(kind)}"
    if get_origin(annotation) is dict and get_args(annotation)[1] in _PLURALS:
        return f"a table of {_PLURALS[get_args(annotation)[1]]}"
    return _NOUNS.get(annotation, "a table")


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def inline(value: Any) -> str:
    """Return a value as TOML on one line, which `tomli_w` spreads over several.

    >>> inline({"a": (1, 2.5), "b c": {"d": True}})
    '{ a = [1, 2.5], "b c" = { d = true } }'
    """
    if isinstance(value, Mapping):
        # A dumped key has quotes where it needs them.
        keys = [tomli_w.dumps({key: 0}).removesuffix(" = 0\n") for key in value]
        entries = [f"{key} = {inline(entry)}" for key, entry in zip(keys, value.values(), strict=True)]
        return "{ " + ", ".join(entries) + " }" if entries else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(entry) for entry in value) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")


def find_problems(error: ValidationError, model: type[BaseModel], values: Mapping[str, Any]) -> list[Problem]:
    """Return pydantic's errors about `values` as problems, one a key, in the order of the file's sections."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        if not detail["loc"]:  # of a validator of the whole model: `find_contradictions` finds these one by one
            continue
        key, parent, info = _locate(model, detail["loc"])
        if detail["type"] == "extra_forbidden":
            text = explain(key, _nearest_value(values, key)) or _unknown(key, parent, model)
        elif detail["type"] == "value_error":
            key, text = _blame(key, str(detail["ctx"]["error"]), info)
        # Deeper, a missing part is a wrong value of the key, such as a list that is too short.
        elif detail["type"] == "missing" and key.count(".") + 1 == len(detail["loc"]):
            meaning = f" ({info.description})" if info is not None and info.description else ""
            text = f"required, but not given: expected {describe(info)}{meaning}"
        else:
            expectation = describe(info)
            # The bounds of the whole are in the description; here an entry of a list is out of its own.
            if isinstance(detail["loc"][-1], int) and (bounds := bounds_in_words(detail.get("ctx", {}))):
                expectation += f", each {bounds}"
            text = f"expected {expectation}, got {show(_nearest_value(values, key))}"
        problems.setdefault(key, Problem(key, text))  # of a union, pydantic reports every branch; the first is enough
    return list(problems.values())


def find_secrets(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each key or value, however deep, that looks like an API key or a password."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from find_secrets(value, f"{key}.")
        elif value not in (None, "") and (text := secret_problem(key, value)) is not None:
            yield Problem(key, text)
        elif isinstance(value, list | tuple):
            # Entries are named by their number, as pydantic names them.
            yield from find_secrets(dict(enumerate(value)), f"{key}.")  # type: ignore[arg-type]


def find_nul(values: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for each key with a text that holds the NUL character, which no path, name or URL may have."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from () if name in _PASSED_ON else find_nul(value, f"{key}.")
        elif isinstance(value, list | tuple):
            yield from find_nul({str(number): entry for number, entry in enumerate(value)}, f"{key}.")
        elif isinstance(value, str) and "\0" in value:
            yield Problem(key, f"expected a text without the character NUL, got {show(value)}")


def explain(key: str, value: Any) -> str | None:
    """Return what to write instead of an unknown key with this value, None if no trainer has such a key.

    >>> explain("loss.epsilon_high", 4e-4)
    'epsilon_high is what TRL calls it: write loss.clip_high = 0.0004'
    """
    name = key.rsplit(".", 1)[-1]
    if (remedy := RETIRED.get(key)) is not None:
        return f"{name} is of an earlier version: {remedy}"
    origin, row = HINTS.get(name, ("", None))
    if row is None:
        return None
    is_name = isinstance(value, str | bool | None)  # 1 == True: a number must not be looked up
    if isinstance(row.advice, str):
        return f"{name} is of {origin}: {row.advice}"
    if is_name and value in row.advice:
        instead = row.advice[value]
    elif is_name and value in row.values:
        instead = ", ".join(f"{ours} = {show(part)}" for ours, part in row.assigned(value).items())
    elif value is False and True in (*row.values, *row.advice):
        instead = "nothing: it is off"
    elif not row.ours:
        is_advice = "write " in row.remark or row.remark.endswith("remove it")
        return f"{name} is of {origin}: {row.remark}" + ("" if is_advice else ": remove it")
    elif row.values or row.advice or isinstance(value, Mapping | list | tuple):
        instead = " and ".join(row.ours)
    else:
        instead = ", ".join(f"{ours} = {show(value)}" for ours in row.ours)
    return f"{name} is what {origin} calls it: write {instead}" + (f" ({row.remark})" if row.remark else "")


def secret_problem(key: str, value: Any) -> str | None:
    """Return why a key with this value must not be in a file, without showing the value; None if it is no secret.

    >>> secret_problem("judge.options.openai_api_key", "...").rsplit(" ", 1)[-1]
    'OPENAI_API_KEY'
    """
    *above, name = key.lower().split(".")
    # Of a text, its words: a note may name a key among others.
    is_value = isinstance(value, str) and any(map(_SECRET_VALUE.fullmatch, value.split()))
    if not _SECRET.search(re.sub(r"\W+", "_", name)) and not is_value:
        return None
    # The key's own name says most, then the nearest table.
    hints = [variable for hint, variable in _VARIABLES.items() if hint in name]
    hints += [variable for part in reversed(above) for hint, variable in _VARIABLES.items() if hint in part]
    variable = hints[0] if hints else re.sub(r"\W", "_", name).upper()
    return (
        "a secret does not belong into a configuration, which is copied beside the run: set the environment variable "
        f"{variable}"
    )


def _locate(model: type[BaseModel], location: Sequence[str | int]) -> tuple[str, type[BaseModel], FieldInfo | None]:
    """Return the dotted key of an error without the parts below a field, its model, and the field."""
    parts: list[str] = []
    info: FieldInfo | None = None
    for part in location:
        parts.append(str(part))
        if isinstance(part, int):  # an entry of a list of tables, whose keys come next
            continue
        info = model.model_fields.get(part)
        inner_model = None if info is None else section_model(info.annotation) or entry_model(info.annotation)
        if inner_model is None or len(parts) == len(location):  # below a field are pydantic's own parts: indices, types
            break
        model = inner_model
    return ".".join(parts), model, info


def _blame(key: str, text: str, info: FieldInfo | None) -> tuple[str, str]:
    section = section_model(info.annotation) if info is not None else None
    match = re.match(r"(\w+)(: )?", text)
    # A validator of a section begins its sentence with the field's name, because pydantic reports the section.
    if section is None or match is None or match[1] not in section.model_fields:
        return key, text.removeprefix("seeds: ")
    return f"{key}.{match[1]}", text[match.end() :] if match[2] else text


def _unknown(key: str, parent: type[BaseModel], root: type[BaseModel]) -> str:
    *above, name = key.split(".")
    everywhere = [(field, f"{section}.{field}") for section, model in sections_of(root) for field in model.model_fields]
    # A key of another section beats a similar one of this section: it was spelled right.
    guess = name if name in dict(everywhere) else ""
    if not guess and above and not difflib.get_close_matches(name, parent.model_fields):
        guess = next(iter(difflib.get_close_matches(name, dict(everywhere))), "")
    if guess:
        return f"unknown key; did you mean {' or '.join(repr(full) for field, full in everywhere if field == guess)}?"
    return f"unknown {'key' if above else 'section'}; {nearest_name(name, parent.model_fields)}"


def _nearest_value(values: Any, key: str) -> Any:
    """Return the value at a dotted key, or the first value on the way that is not a table."""
    for part in key.split("."):
        if isinstance(values, list | tuple) and part.isdecimal():
            values = values[int(part)]
            continue
        if not isinstance(values, Mapping) or part not in values:
            break
        values = values[part]
    return values


# Keys of an earlier version whose names other sections have, and what to do instead.
RETIRED: Mapping[str, str] = {
    **dict.fromkeys(
        (f"judge.gold.{name}" for name in ("provider", "model", "base_url", "api_key_env", "python", "temperature")),
        "write it into [[judge.gold.panel]]",
    ),
    "judge.gold.max_gap_change": "a change of the gap that is larger than chance and a tenth alarms: remove it",
    "judge.options.max_attempts": "a call that fails is tried several times, and the run then waits: remove it",
    "judge.options.rubric_folder": "write the file into judge.options.rubric_id: remove it",
    "judge.options.send_temperature": "an endpoint that refuses a temperature is sent none: remove it",
    "training.keep_best_direction": "the largest is the best: remove it",
    "training.score_truncated": "it is true unless algorithm.acknowledge names truncated_sampling: remove it",
    "gateway.max_calls": "a rollout makes at most 1000 calls: remove it",
    "judge.on_unscored": "an episode without a score is played again: remove it",
    "judge.options.max_transcript_chars": "a judge reads 60000 characters: remove it",
    "judge.options.rubric_file": "write the file into judge.options.rubric_id",
    "judge.options.structured_output": "an endpoint that refuses a schema is asked without: remove it",
    **dict.fromkeys(
        (f"judge.options.usd_per_million_{side}_tokens" for side in ("input", "output")),
        "write judge.options.usd_per_million_tokens = [INPUT, OUTPUT]",
    ),
    "limits.max_attempts": "a sample is tried three times: remove it",
    **dict.fromkeys(
        ("optimizer.num_warmup_steps", "optimizer.warmup_fraction"),
        "write optimizer.warmup_steps, in which a number below 1 is a fraction of all steps",
    ),
    "model.device": "write compute.gpu_count = 0 for the processor, or 1",
    "training.keep_best_metric": "the best is that of the best score: remove it",
    "training.keep_every": "write a larger training.keep_last",
    **dict.fromkeys(
        ("training.logits_memory_mib", "training.scoring_chunk_tokens"),
        "logits take at most 512 MiB at once: remove it",
    ),
    "training.max_idle_iters": "a run ends after ten iterations in which nothing was learned: remove it",
    "training.max_nonfinite_steps": "a run ends after five skipped steps in a row: remove it",
    "training.weight_sync.in_flight": "vLLM keeps its calls, the local engine waits for them: remove it",
    "tracking.run_name": "W&B calls a run by model.label: remove it",
    "tracking.wandb_tags": "run.tags are the tags in W&B: write them there, such as { a = true }",
    "vllm.enforce_eager": "vLLM compiles on GPUs, and never on a processor: remove it",
    "gateway.host": 'write gateway.address = "HOST:PORT"',
    "gateway.port": 'write gateway.address = "HOST:PORT"',
    "judge.gold.every_n_iters": "gold scores as often as the run evaluates, evaluation.every_n_iters: remove it",
    "judge.gold.num_episodes": "gold scores 32 episodes of an iteration: remove it",
    "judge.options.aggregate": "the score of several judges or samples is their mean: remove it",
    "judge.options.rubric_aggregate": "a total is a sum or a weighted mean, as the rubric says: remove it",
    "judge.options.show_reasoning": "a judge does not read what the policy thought: remove it",
    "learner.cpu_offload": "what learns stays on its GPU: remove it, or share the model by topology.gpus_for_training",
    **dict.fromkeys(
        (f"loss.sapo_temperature_{sign}" for sign in ("pos", "neg")),
        "write loss.sapo_temperatures = [POSITIVE, NEGATIVE]",
    ),
    "rewards.kl_horizon": "beta is adapted over 10000 trajectories: remove it",
    "rewards.overlong_penalty": "write it as rewards.overlong, a number",
    "topology.ray_address": "set the environment variable RAY_ADDRESS",
    "training.lora.on_mismatch": "an adapter of another shape is widened: remove it",
    "training.must_save_by": "a run that is asked to stop by SIGTERM saves: have it sent early enough, and remove this",
    "training.weight_sync.transfer": "write it as training.weight_sync.direct",
    "vllm.block_size": "it is 32 tokens on a processor, and vLLM's own on a GPU: remove it",
    "vllm.data_parallel_size": "copies fill compute.gpu_count, or topology.gpus_for_vllm: remove it",
    "vllm.structured_output": "schemas are obeyed where apps play and rollout.min_output_tokens is 0: remove it",
}
SYSTEMS: Mapping[str, System] = {"trl": TRL, "roll": ROLL, "agilerl": AGILERL, "stateset": STATESET}

_CLIPS = Row(("loss.clip_low", "loss.clip_high"))
_IMAGES = Row(note="policies here read and write text, so that images are refused: remove it")
_SWITCH_SCALE = Row(("advantages.scale",), values={True: "group", False: "none"})


def _renamed(ours: str) -> Row:
    return Row((ours,))


# Names that no translated file has, by origin. "Form" is a file format.
OTHERS: Mapping[str, Mapping[str, Row]] = {
    "verl": {
        "n_sample": _renamed("training.group_size"),
        "ppo_mini_batch_size": _renamed("training.batch_size"),
        "clip_ratio": _CLIPS,
        "clip_ratio_low": _renamed("loss.clip_low"),
        "clip_ratio_high": _renamed("loss.clip_high"),
        "clip_ratio_c": _renamed("loss.dual_clip"),
        "kl_loss_type": Row(("loss.kl_estimator",), values={"low_var_kl": "k3", "kl": "k1", "mse": "k2"}),
    },
    "an earlier version": {
        "normalize_std": _SWITCH_SCALE,
        "max_refill_rounds": Row(note="groups are refilled in at most ten rounds: remove it"),
        "min_group_fraction": Row(note="a group that keeps less than 3/4 of its episodes is dropped: remove it"),
        "action_limit_return": Row(note="the environment's reward_range says the lowest return: remove it"),
        "max_unscored": Row(note="at most 256 episodes wait for their score: remove it"),
    },
    "the paper": {"G": _renamed("training.group_size")},
    "others": {
        "gradient_accumulation": Row(("training.batch_size",), hint="times batch_size"),
        "epsilon_low": _renamed("loss.clip_low"),
        "clip_range": _CLIPS,
        "kl_penalty": _renamed("loss.kl_coef"),
        "gamma": _renamed("advantages.discount"),
        "dynamic_sampling": Row(("training.constant_groups",), values={True: "refill"}),
        "seed_count": _renamed("evaluation.seeds"),
    },
    "transformers": {
        "max_new_tokens": _renamed("rollout.max_output_tokens"),
        "torch_dtype": _renamed("model.dtype"),
    },
    "Unsloth": {"max_seq_length": _renamed("rollout.max_model_len")},
    "AgileRL": {
        "old_logprobs_source": Row(
            ("correction.old_logprobs",),
            values={"trainer": "recompute", "recompute": "recompute", "rollout": "rollout", "sampler": "rollout"},
        ),
        "warmup_proportion": _renamed("optimizer.warmup_steps"),
        "merge_lora_configs": Row(note="an adapter of another shape is widened here: remove it"),
    },
    "stateset-agents": {
        "num_gradient_updates": _renamed("training.update_epochs"),
        "objective": _renamed("algorithm.variety"),
    },
    "the hosted trainer": {
        "smoke": Row(note="settings of its smoke command: remove it"),
        **dict.fromkeys(("supports_vision", "max_images_per_message", "limit_mm_per_prompt"), _IMAGES),
    },
    "the hosted trainer's old form": {
        "num_inner_steps": _renamed("training.update_epochs"),
        "clip_epsilon": _CLIPS,
        "update_reference_interval": _renamed("reference.update_every_n_iters"),
        "group_normalization": Row(("advantages.baseline",), values={True: "group", False: "none"}),
        "advantage_normalization": _SWITCH_SCALE,
        "max_completion_tokens": _renamed("rollout.max_output_tokens"),
        "data": Row(note="write what the app reads into [rollout.env_config]"),
        "inference_url": Row(note="each rollout is told its own URL: remove it"),
        "hyperparams": Row(note="write [training] and [loss]"),
        "step_rewards": Row(note="write training.step_rewards_mode and so on"),
        "checkpoint": Row(note="write training.checkpoint_every_n_iters"),
    },
    "the hosted trainer's later form": {"verifier": Row(note="write [judge]")},
}  # fmt: skip
# Names without a counterpart that are ours in another section, or nearly ours.
_NEARLY_OURS = (
    "batch_size", "device", "entropy_coef", "gradient_accumulation_steps", "num_episodes", "num_epochs", "reference",
    "reward", "rewards", "seed", "validation",
)  # fmt: skip


def _hints() -> Iterator[tuple[str, tuple[str, Row]]]:
    tables = list(OTHERS.items())
    for system in [table for newest in SYSTEMS.values() for table in newest.tables]:
        reasons = {key: Row(note=why) for key, (_, why) in system.without_counterpart.items()}
        tables.append((system.name, {**system.rows, **reasons}))
    for origin, rows in reversed(tables):  # the last wins in the dict: of a name in several systems, the first
        for key, row in rows.items():
            # A dotted key is of a section that has our names, too.
            if "." not in key and key not in _NEARLY_OURS and key not in {ours.rpartition(".")[2] for ours in row.ours}:
                yield key, (origin, row)


# Name -> its origin and its row. Names that are also ours are left out.
HINTS: Mapping[str, tuple[str, Row]] = dict(_hints())
