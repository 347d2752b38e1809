"""A configuration to begin with, as commented TOML: what must be said is said, what may be is there as a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo_gym.config.run_config import RunConfig
from gspo_gym.config.words import bounds_of, inline, section_model, sections_of

# Written out, key by key; the others are named in a line each.
_WHOLE = ("run", "algorithm", "model", "rollout", "training", "loss", "advantages", "rewards", "evaluation", "warmup")
_OPTIONAL = ("rewards", "warmup")  # of these: commented out as a whole
_WIDTH = 100


def new_config(env_name: str, *, model: str, label: str) -> str:
    """Return the text of a configuration that trains `model` on the environment; it loads as it stands.

    Numbers are for a small model and short answers, so that a first run ends within minutes.
    """
    is_tiny = model.startswith("tiny:")
    given: dict[str, dict[str, Any]] = {
        "run": {"seed": 0},
        "algorithm": {"variety": "gspo_token"},
        "model": {"base": model, "label": label},
        "rollout": {
            "env_name": env_name,
            "max_turns": 8,
            "max_output_tokens": 64 if is_tiny else 512,
            "max_model_len": 2048 if is_tiny else 8192,
            "episodes_per_batch": 64,
        },
        "training": {
            "iterations_per_epoch": 100,
            "group_size": 8,
            "batch_size": 16,
            "learning_rate": 1e-3 if is_tiny else 1e-6,
        },
        "evaluation": {"instances": 100},
    }
    lines = [
        f"# Training on {env_name}. Lines that begin with '#' and a key hold its default; configs/README.md",
        "# (`gspo-gym config reference`) has every key, and `gspo-gym config check FILE` says what is wrong.",
        "",
    ]
    others = []
    for name, section in sections_of(RunConfig):
        if name in _WHOLE:
            lines += _section(name, section, given.get(name, {}))
        else:
            others.append(f"# [{name}] {_summary(section)}")
    return "\n".join([*lines, "# Further sections:", *others, ""])


def _section(name: str, section: type[BaseModel], given: dict[str, Any]) -> Iterator[str]:
    yield f"# {_summary(section)}"
    yield f"# [{name}]" if name in _OPTIONAL else f"[{name}]"
    for key, info in section.model_fields.items():
        if section_model(info.annotation) is None:
            yield from _comment(info)
            yield f"{key} = {inline(given[key])}" if key in given else _default(key, info)
    yield ""


def _comment(info: FieldInfo) -> list[str]:
    bounds = f" ({bounds_of(info)})" if bounds_of(info) else ""
    text = f"{info.description or ''}{bounds}"
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _default(key: str, info: FieldInfo) -> str:
    if info.is_required():
        return f"# {key} must be given"
    return f"# {key} is absent" if info.default is None else f"# {key} = {inline(info.default)}"


def _summary(section: type[BaseModel]) -> str:
    text = " ".join((section.__doc__ or "").split("\n\n")[0].split())
    return text.split(": ", 1)[-1]
