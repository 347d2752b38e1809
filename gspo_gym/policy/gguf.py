"""GGUF files become ordinary folders: converted once, in float32, into a cache of this user.

    $XDG_CACHE_HOME/gspo-gym/models/NAME-DIGEST/   (~/.cache where the variable is not set)
        config.json, model.safetensors, ...        transformers layout: as `load_policy` reads any folder
        gguf.json                                  the file that it was made from, and what its weights were before

A folder is complete or not there, and of several processes that want the same one converts. The weights are those that
the file holds, dequantized: of a file of 4 bits, not those that the model was published with.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from gspo_gym.base.files import make_folder, sync_tree, take_lock, writing
from gspo_gym.base.leftovers import remove_folder, temporary_folder
from gspo_gym.errors import CheckpointError, GymError, shortened
from gspo_gym.policy.bases import SMOLLM2, gguf_of

ORIGIN_FILE = "gguf.json"
_FORM = b"1"  # of what is written here; a folder of another one is made anew
_POLL_SECONDS = 0.2
# A GGUF file holds no sampling parameters. Those of SmolLM2's own example of chatting with an instruct model:
# https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
_SAMPLING: dict[str, dict[str, Any]] = {SMOLLM2: {"do_sample": True, "temperature": 0.2, "top_p": 0.9}}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GgufOrigin:
    """The file that a folder was converted from.

    Attributes:
        name: of the model, as the file states it; None: it states none.
        license: likewise.
        types: of the file's matrices before they were dequantized, the most frequent first, such as ["Q4_1", "Q8_0"].
    """

    file: str
    sha256: str
    name: str | None
    license: str | None
    types: list[str]


def converted(base: str) -> Path | None:
    """Return the folder with the model of the GGUF file that `base` names; None if it names none.

    Raises:
        CheckpointError: transformers cannot read the file; or see `gguf_of`.
        MissingExtraError: see `gguf_of`.
        StorageError: the cache cannot be written.
    """
    file = gguf_of(base)
    if file is None:
        return None
    about = file.stat()
    digest = _digest(file, about.st_size, about.st_mtime_ns)
    key = hashlib.sha256(_FORM + digest.encode() + base.encode() * (base in _SAMPLING)).hexdigest()
    folder = cache_folder() / f"{file.stem}-{key[:16]}"
    if not folder.is_dir():
        publish(folder, lambda draft: _convert(file, digest, draft, _SAMPLING.get(base, {})))
    return folder


def origin_of(folder: Path) -> GgufOrigin | None:
    """Return what a folder was converted from; None: it is another folder."""
    path = folder / ORIGIN_FILE
    return GgufOrigin(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def cache_folder() -> Path:
    """Return the folder of converted models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gspo-gym" / "models"


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a draft, and rename that to `folder`; nothing is done if it is there once others are done.

    Raises:
        StorageError: the disk refuses.
    """
    make_folder(folder.parent)
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return
        with writing(folder):
            draft = Path(temporary_folder(f".{folder.name}-", folder.parent))
            try:
                write(draft)
                draft.chmod(0o755)  # mkdtemp's folder is its owner's alone
                sync_tree(draft)
                draft.rename(folder)
            finally:
                remove_folder(draft)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait for the lock of a path, and hold it for the block."""
    with writing(path):
        while (lock := take_lock(path)) is None:
            time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # first: a process that got the file before looks whether it is there still
        os.close(lock)


@functools.cache
def _digest(file: Path, _size: int, _changed_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _convert(file: Path, digest: str, folder: Path, sampling: dict[str, Any]) -> None:
    _log.warning("%s: its weights are dequantized to float32 once, into a folder in %s", file.name, folder.parent)
    try:
        options = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
        read, report = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, output_loading_info=True, **options
        )
        if report["missing_keys"]:  # transformers would go on with random numbers in their place
            raise CheckpointError(f"{file}: weights are missing: {sorted(report['missing_keys'])[:5]}")
        origin = _origin(file, digest)
    except GymError:
        raise
    except Exception as error:  # whatever transformers, tokenizers and gguf make of such a file
        reason = shortened(f"{type(error).__name__}: {error}", 1000)
        raise CheckpointError(f"{file}: transformers cannot read this GGUF file: {reason}") from error
    config = read.config
    del config.quantization_config  # of the file; with it, transformers refuses to save the weights
    with torch.device("meta"):
        model = type(read)(config)
    model.generation_config = GenerationConfig(**{**read.generation_config.to_diff_dict(), **sampling})
    model.save_pretrained(folder, state_dict=read.state_dict())
    length = getattr(config, "max_position_embeddings", None)
    tokenizer.model_max_length = min(tokenizer.model_max_length, length or tokenizer.model_max_length)
    tokenizer.save_pretrained(folder)
    (folder / ORIGIN_FILE).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")


def _origin(file: Path, digest: str) -> GgufOrigin:
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {
        key: reader.fields[key].contents() for key in ("general.name", "general.license") if key in reader.fields
    }
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    return GgufOrigin(
        file=str(file),
        sha256=digest,
        name=metadata.get("general.name"),
        license=metadata.get("general.license"),
        types=[name for name, _ in types.most_common()],
    )
