"""The ids at which a model ends an answer, as its configuration files say, noted on its tokenizer.

transformers and vLLM stop at all of them, while a tokenizer has one eos. The renderer of its chat template reads the
note, so that whatever samples for messages stops there, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from gspo_gym.chat.renderer import MODEL_STOPS
from gspo_gym.policy.bases import parse_hub_id

_FILES = ("generation_config.json", "config.json")


def note_stops(tokenizer: Any, stops: tuple[int, ...]) -> None:
    """Note on a tokenizer (Any: untyped) at which ids its model stops, besides its eos."""
    setattr(tokenizer, MODEL_STOPS, stops)


def stops_of_model(model: Any) -> tuple[int, ...]:
    """Return the eos ids of a loaded model (Any: untyped), with those of its generation config first."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    configs = (getattr(base, "generation_config", None), getattr(base, "config", None))
    return eos_ids(getattr(config, "eos_token_id", None) for config in configs)


def stops_of_files(base: str) -> tuple[int, ...]:
    """Return the eos ids that the configuration files of a model say: in its folder, or on the hub.

    Those that cannot be read say none: what needs them says why when it loads the model.
    """
    return eos_ids(_read(base, name).get("eos_token_id") for name in _FILES)


def hub_file(base: str, name: str) -> Path | None:
    """Return a file of a model of the hub, downloaded; None: it has none, or cannot be reached, or is no such model."""
    if (hub := parse_hub_id(base)) is None:
        return None
    # With these the hub is asked once, and what fails is None.
    quiet = dict.fromkeys(("missing_entries", "connection_errors", "gated_repo"), False)
    options = {f"_raise_exceptions_for_{kind}": value for kind, value in quiet.items()}
    path = cached_file(hub.name, name, revision=hub.revision, **options)
    return None if path is None else Path(path)


def eos_ids(stated: Iterable[Any]) -> tuple[int, ...]:
    """Return the ids that configurations state, each once: one has an id, a list of them, or null.

    >>> eos_ids([7, [3, 7], None])
    (7, 3)
    """
    lists = [value if isinstance(value, list | tuple) else [value] for value in stated]
    return tuple(dict.fromkeys(token for ids in lists for token in ids if type(token) is int))


def _read(base: str, name: str) -> dict[str, Any]:
    folder = Path(base).expanduser()
    try:
        path = folder / name if folder.is_dir() else hub_file(base, name)
        values = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
