"""A name becomes a policy: a model and its tokenizer, from the hub, a folder, a GGUF file, or built from nothing.

Also fits LoRA adapters, and writes a policy into a folder that `load_policy` reads back. Not for resuming a run, which
needs the optimizer and the random state too (`checkpoints.py`).
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import in_temporary_folder
from gspo_gym.errors import CheckpointError, ConfigError, GymError, shortened
from gspo_gym.learning.saved import SavedTensors, copy_tensors, rows_of
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.bases import (
    SMOLLM2,
    TINY_PREFIX,
    below_adapter,
    check_base,
    gguf_of,
    is_adapter_folder,
    parse_hub_id,
    parse_tiny,
    unknown_model,
    whole_model_of,
)
from gspo_gym.policy.gguf import converted
from gspo_gym.policy.lora import ADAPTER, adapt_lora, is_adapter, load_lora
from gspo_gym.policy.manifest import MANIFEST, Manifest, verify
from gspo_gym.policy.parallel import copy_into
from gspo_gym.policy.quantization import (
    Quantization,
    check_quantization,
    is_quantized,
    keep_differentiable,
    quantization_of,
    quantization_options,
)
from gspo_gym.policy.stops import note_stops, stops_of_files, stops_of_model
from gspo_gym.policy.tiny import build_tiny, tiny_skeleton, tiny_tokenizer

_QUANTIZATION_FILE = "quantization.json"  # beside an adapter: the form of the weights below it
# Code beside a model is not run: without this, transformers asks at the terminal whether to do it.
_NO_CODE = {"trust_remote_code": False}
_OWN_FILES = {"local_files_only": True, **_NO_CODE}  # of a folder: nothing is downloaded
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model and its tokenizer.

    A model with more logits than its tokenizer has ids (a padded vocabulary) says so in an attribute `num_token_ids`:
    ids from there on mean nothing, and are neither sampled nor scored.

    Attributes:
        model: a transformers `PreTrainedModel` or a `PeftModel` around one. Any, because both packages are untyped.
        tokenizer: a transformers tokenizer with a chat template, on which the model's stops are noted
            (`policy/stops.py`). Any for the same reason.
        base: what it was loaded from, in a form that `load_policy` takes; a tiny model's names its seed.
    """

    model: Any
    tokenizer: Any
    base: str


@dataclass(frozen=True, slots=True)
class _Form:
    dtype: torch.dtype
    device: str
    quantization: Quantization
    attention: str | None


def load_policy(
    base: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    quantization: Quantization = "as_saved",
    attn_implementation: str | None = None,
) -> Policy:
    """Load the policy that `base` names, in eval mode.

    An adapter comes as it was saved, in float32 on a base of that dtype, and on quantized weights if it was trained on
    such. `adapt_policy` makes it trainable again.

    Args:
        base: see `policy/bases.py`. Weights of a GGUF file are dequantized, once: see `policy/gguf.py`.
        dtype: float32, bfloat16 or float16; of all parameters but an adapter's and quantized ones.
        device: a torch device string.
        seed: decides a tiny model's weights, unless the name does; nothing else is random.
        quantization: "nf4" loads the linear layers in 4 bits (QLoRA), "int8" in 8; "as_saved" leaves them as they come.
        attn_implementation: as of transformers, which chooses if None: "sdpa", "eager" or "flash_attention_2".

    Raises:
        UnknownNameError: there is no such tiny model, folder or hub model.
        MissingExtraError: what reads GGUF files, or holds the model `smollm2`, is not installed.
        CheckpointError: the folder is there but holds no model that loads, or is a checkpoint of a run and damaged.
        ConfigError: an unknown dtype; quantized weights where bitsandbytes or its support of the device is missing, or
            other ones than the adapter was trained on; a model without that attention.

    >>> load_policy("tiny:qwen3-64", seed=7).base
    'tiny:qwen3-64@7'
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    check_base(base)
    form = _Form(_DTYPES[dtype], device, quantization, attn_implementation)
    if quantization != "as_saved":
        check_quantization(device)
    if base.startswith(TINY_PREFIX):
        policy = _load_tiny(base, seed, form)
    elif (folder := folder_of(base)) is not None:
        _require_sound(folder)
        policy = _load_folder(folder, form)
        if (name := _name_of_file(base)) is not None:
            policy = _under_name(policy, name)
    else:
        policy = _load_hub(base, form)
    _note_ids(policy.model, policy.tokenizer)
    _set_attention(policy, attn_implementation)
    keep_differentiable(policy.model)
    if not is_quantized(policy.model):  # transformers refuses to move them
        policy.model.to(device)
    policy.model.eval()
    return policy


def load_skeleton(base: str, *, dtype: str = "float32", attn_implementation: str | None = None) -> Policy:
    """Return the policy that `base` names without its weights, which are of the device "meta" and take no memory.

    Buffers that no file holds, such as rotary frequencies, are on the CPU. There is no tokenizer (None). A tiny model
    is built from its configuration, and draws nothing; of an adapter's folder, only its shape is kept.

    Raises:
        UnknownNameError, CheckpointError: as `load_policy`.
    """
    from accelerate import init_empty_weights  # peft needs it, too

    check_base(base)
    folder = folder_of(base)
    if folder is not None and is_adapter_folder(folder):
        below = folder / "base"
        name = str(below) if below.is_dir() else below_adapter(folder)
        policy = load_skeleton(name, dtype=dtype, attn_implementation=attn_implementation)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
            return Policy(load_lora(policy.model, folder, "cpu"), None, str(folder.resolve()))
    with init_empty_weights(include_buffers=False):
        if base.startswith(TINY_PREFIX):
            model = tiny_skeleton(parse_tiny(base)[0])
        else:
            config = (
                _from_hub(base, AutoConfig.from_pretrained)
                if folder is None
                else AutoConfig.from_pretrained(folder, **_OWN_FILES)
            )
            model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # each name has got an empty tensor of its own
    for parameter in model.parameters():
        parameter.data = parameter.data.to(_DTYPES[dtype])
    _note_ids(model, load_tokenizer(base))
    policy = Policy(model.eval(), None, base)
    _set_attention(policy, attn_implementation)
    return policy


@torch.no_grad()
def read_weights(model: Any, folder: Path) -> None:
    """Overwrite the trained parameters of a model (Any: untyped) by those that a policy's folder holds.

    Of a parameter that ranks share, this rank's rows are read and no others, if the files name it as the model does.
    Of others, such as experts that transformers fuses, the whole policy is loaded first.

    Raises:
        CheckpointError: the folder's policy has other parameters.
    """
    saved_tensors = SavedTensors(folder, sorted(folder.glob("*.safetensors")))
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name: re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name) if is_adapter(model) else name for name in parameters}
    if all(
        names[name] in saved_tensors and saved_tensors.shape(names[name]) == tuple(p.shape)
        for name, p in parameters.items()
    ):
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(saved_tensors.rows(names[name], rows_of(parameter)))
            else:
                parameter.copy_(saved_tensors[names[name]])
        return
    whole = dict(load_policy(str(folder)).model.named_parameters())
    for name, parameter in parameters.items():
        if name not in whole or whole[name].shape != parameter.shape:
            raise CheckpointError(f"model folder {folder}: expected {name} of {list(parameter.shape)}")
        copy_into(parameter, whole[name])


def adapt_policy(policy: Policy, settings: LoraSettings, seed: int) -> Policy:
    """Return the policy with the trainable LoRA adapter that `settings` describe, a new one or the one it has.

    An adapter of another shape is an error, or widened; see `adapt_lora`. The given policy must not be used after that.

    Raises:
        ConfigError: the settings do not fit the model or its adapter.
    """
    revision = policy.model.peft_config[ADAPTER].revision if is_adapter(policy.model) else _revision_of(policy.base)
    model = adapt_lora(policy.model, settings, seed)
    model.peft_config[ADAPTER].revision = revision  # of the weights below it, which its folder has to name
    model.eval()
    return Policy(model=model, tokenizer=policy.tokenizer, base=policy.base)


def load_tokenizer(base: str) -> Any:
    """Load the tokenizer of the policy that `base` names, without the model (Any: transformers is untyped).

    The ids at which the model stops are noted on it, as by `load_policy`; see `policy/stops.py`.

    Raises:
        UnknownNameError, CheckpointError: as `load_policy`.
    """
    tokenizer = _read_tokenizer(base)
    if not (model := whole_model_of(base)).startswith(TINY_PREFIX):  # whose only stop is the tokenizer's eos
        note_stops(tokenizer, stops_of_files(str(folder_of(model) or model)))
    return tokenizer


def vocabulary_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of what a tokenizer's ids mean: its tokens by id, and its merges in their order.

    Two tokenizers of any name with the same digest cut and number texts by the same tables (Any: untyped).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: written in Python, whose merges no file here shows
    merges = [] if backend is None else json.loads(backend.to_str())["model"].get("merges", [])
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps([tokens, pairs]).encode()).hexdigest()


def _read_tokenizer(base: str) -> Any:
    if base.startswith(TINY_PREFIX):
        return tiny_tokenizer(parse_tiny(base)[0])
    folder = folder_of(base)
    if folder is None:
        return _from_hub(base, AutoTokenizer.from_pretrained)
    if is_adapter_folder(folder) and not (folder / "tokenizer_config.json").is_file():
        return _read_tokenizer(below_adapter(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **_OWN_FILES)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"model folder {folder}: its tokenizer cannot be loaded: {error}") from error
    if (name := _name_of_file(base)) is not None:
        tokenizer.name_or_path = name
    return tokenizer


def save_policy(policy: Policy, folder: Path) -> None:
    """Write the policy; `load_policy(folder)` gives it back, weights bit for bit.

    A full model is written in the transformers layout, an adapter in the PEFT layout. The base of a tiny model's
    adapter exists nowhere else, so it is written beside it, into `base/`; but not a quantized one, which its name and
    seed give again. The folder is made; files in it are overwritten. Not crash-safe: `checkpoints.py` writes to a
    temporary folder and renames.

    Raises:
        StorageError: the disk refuses (full, read-only).
    """
    _write_policy(policy, _trained_tensors(policy), folder)


def copy_policy(policy: Policy) -> Callable[[Path], None]:
    """Copy the tensors that training changes, and return what writes the policy of this moment, as `save_policy`.

    It may be called in another thread, while the policy is trained on.
    """
    tensors = copy_tensors(_trained_tensors(policy))
    return lambda folder: _write_policy(policy, tensors, folder)


def _trained_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return what is written of a policy, live: all of a model, or its adapter (a base below it is frozen)."""
    if is_adapter(policy.model):
        parameters = policy.model.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in parameters if "lora_" in name}
    return dict(policy.model.state_dict())


def _write_policy(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        policy.tokenizer.save_pretrained(folder)
        if is_adapter(policy.model):
            _save_adapter(policy, tensors, folder)
            return
        with no_progress_bars():
            policy.model.save_pretrained(folder, state_dict=tensors)


def _save_adapter(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    # The vocabulary is never resized; told so, PEFT need not look the base up (on the hub, if it finds no folder).
    policy.model.save_pretrained(folder, state_dict=tensors, save_embedding_layers=False, selected_adapters=[ADAPTER])
    if is_quantized(policy.model):
        (folder / _QUANTIZATION_FILE).write_text(
            json.dumps({"base": quantization_of(policy.model)}) + "\n", encoding="utf-8"
        )
    elif below_adapter(folder).startswith(TINY_PREFIX):
        save_base(policy, folder / "base")


def save_base(policy: Policy, folder: Path) -> None:
    """Write the frozen weights under a policy's adapter as a full model: the adapter is left out, not merged.

    Raises:
        StorageError: the disk refuses (full, read-only).
    """
    base = policy.model.get_base_model()
    weights = {
        re.sub(r"(\.base_layer)+\.", ".", name): tensor.detach().clone()
        for name, tensor in base.state_dict().items()
        if "lora_" not in name
    }
    with writing(folder):
        with no_progress_bars():
            base.save_pretrained(folder, state_dict=weights)
        policy.tokenizer.save_pretrained(folder)


def folder_of(base: str) -> Path | None:
    """Return the folder here that holds the base, a GGUF file's in the cache; None: it is one of the hub, or tiny."""
    with no_progress_bars():
        folder = converted(base) or Path(base).expanduser()
    return folder if folder.is_dir() else None


def for_other_programs(base: str) -> str:
    """Return what transformers loads for a base that only we name: a folder; other bases as they are.

    Raises:
        CheckpointError, MissingExtraError: see `gguf_of`.
        UnknownNameError: the hub has no such revision, or cannot be reached.
    """
    if (folder := converted(base)) is not None:
        return str(folder)
    hub = None if folder_of(base) is not None else parse_hub_id(base)
    if hub is None or hub.revision is None:
        return base
    try:
        return str(huggingface_hub.snapshot_download(hub.name, revision=hub.revision))
    except (OSError, ValueError) as error:
        raise unknown_model(base, error) from error


def _name_of_file(base: str) -> str | None:
    """Return a name of the GGUF file that `base` means, for `load_policy` from anywhere; None: it means none."""
    file = gguf_of(base)
    return None if file is None else SMOLLM2 if base == SMOLLM2 else str(file)


def _under_name(policy: Policy, name: str) -> Policy:
    # PEFT copies it into adapter_config.json: the cache may be emptied, and another machine has its own.
    policy.model.name_or_path = policy.tokenizer.name_or_path = name
    return Policy(policy.model, policy.tokenizer, name)


def _revision_of(base: str) -> str | None:
    hub = None if folder_of(base) is not None else parse_hub_id(base)
    return None if hub is None else hub.revision


def _set_attention(policy: Policy, implementation: str | None) -> None:
    if implementation is None:
        return
    model = policy.model.get_base_model() if is_adapter(policy.model) else policy.model
    try:
        model.set_attn_implementation(implementation)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"attn_implementation: {policy.base} does not run with {implementation!r}: {error}"
        ) from error
    if (actual := model.config._attn_implementation) != implementation:  # of some, transformers only warns
        raise ConfigError(
            f"attn_implementation: {type(model).__name__} has {actual!r} and no other, got {implementation!r}"
        )


def _load_tiny(base: str, seed: int, form: _Form) -> Policy:
    name, own_seed = parse_tiny(base)
    model = build_tiny(name, seed if own_seed is None else own_seed)
    policy = Policy(model=model, tokenizer=tiny_tokenizer(name), base=model.name_or_path)
    if form.quantization != "as_saved":  # transformers quantizes what it reads from files
        with in_temporary_folder("gspo_gym-tiny-") as folder:
            save_policy(policy, Path(folder))
            quantized_model = _load_folder(Path(folder), form).model
        quantized_model.name_or_path = policy.base
        return Policy(model=quantized_model, tokenizer=policy.tokenizer, base=policy.base)
    for parameter in model.parameters():  # and not the buffers: rotary frequencies need float32
        parameter.data = parameter.data.to(form.dtype)
    return policy


def _note_ids(model: Any, tokenizer: Any) -> None:  # which ids are the tokenizer's, and at which the model stops
    note_stops(tokenizer, stops_of_model(model))
    base = model.get_base_model() if is_adapter(model) else model
    head = base.get_output_embeddings()
    num_token_ids = 1 + max(tokenizer.get_vocab().values())
    if head is not None and num_token_ids < head.weight.shape[0]:
        base.num_token_ids = num_token_ids


def _require_sound(folder: Path) -> None:
    # A folder of another origin has no manifest to compare with.
    if (folder / MANIFEST).is_file() and (folder / "resume").is_dir():
        _require_own_parts(folder, verify(folder))


def _require_own_parts(folder: Path, manifest: Manifest) -> None:
    """Refuse an index of a model in parts that names a file outside the folder, which is not verified.

    Raises:
        CheckpointError: names it.
    """
    for name in manifest.files:
        if not name.endswith(".index.json"):
            continue
        try:
            parts = set(json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error}") from error
        if strangers := parts - set(manifest.files):
            raise CheckpointError(f"{folder / name}: names {min(strangers)!r}, which is no file of the checkpoint")


def _load_folder(folder: Path, form: _Form) -> Policy:
    try:
        if is_adapter_folder(folder):
            return _load_adapter(folder, form)
        with no_progress_bars():
            options = _options(form)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, output_loading_info=True, **_OWN_FILES, **options
            )
        if (folder / MANIFEST).is_file():
            # Copied out of a checkpoint's files, which stay mapped otherwise: it may be removed while it is in use.
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
        if report["missing_keys"]:  # transformers would go on with random numbers in their place
            raise CheckpointError(f"model folder {folder}: weights are missing: {sorted(report['missing_keys'])[:5]}")
        tokenizer = AutoTokenizer.from_pretrained(folder, **_OWN_FILES)
    except GymError:
        raise
    except Exception as error:  # whatever transformers, tokenizers and torch make of such files
        reason = shortened(f"{type(error).__name__}: {error}", 1000)
        raise CheckpointError(f"model folder {folder}: cannot be loaded: {reason}") from error
    return Policy(model=model, tokenizer=tokenizer, base=str(folder.resolve()))


def _load_adapter(folder: Path, form: _Form) -> Policy:
    quantization = form.quantization
    if (quantization_file := folder / _QUANTIZATION_FILE).is_file():
        trained_on = json.loads(quantization_file.read_text(encoding="utf-8"))["base"]
        if quantization not in ("as_saved", trained_on):
            raise ConfigError(f"{folder}: the adapter was trained on {trained_on} weights, expected {quantization}")
        quantization = trained_on
    below = folder / "base"
    base = load_policy(
        str(below) if below.is_dir() else below_adapter(folder),
        dtype=str(form.dtype).removeprefix("torch."),
        device=form.device,
        quantization=quantization,
        attn_implementation=form.attention,
    )
    # PEFT copies it into adapter_config.json: under the folder's name, what is saved later would need this folder.
    base.model.name_or_path = below_adapter(folder)
    model = load_lora(base.model, folder, form.device)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder, **_OWN_FILES) if has_tokenizer else base.tokenizer
    return Policy(model=model, tokenizer=tokenizer, base=str(folder.resolve()))


def _load_hub(base: str, form: _Form) -> Policy:
    tokenizer = _from_hub(base, AutoTokenizer.from_pretrained)
    options = _options(form)
    model = _from_hub(base, AutoModelForCausalLM.from_pretrained, **options)
    return Policy(model=model, tokenizer=tokenizer, base=base)


def _options(form: _Form) -> dict[str, Any]:
    quantization = (
        {} if form.quantization == "as_saved" else quantization_options(form.quantization, form.dtype, form.device)
    )
    return {"dtype": form.dtype, **quantization}


def _from_hub(base: str, load: Callable[..., Any], **options: Any) -> Any:
    # Refused at once if it cannot be an id, not after the retries of a dead network.
    check_base(base)
    hub = parse_hub_id(base)
    assert hub is not None, base  # or it was refused
    try:
        return load(hub.name, **options, **_NO_CODE, **({} if hub.revision is None else {"revision": hub.revision}))
    except (OSError, ValueError) as error:
        raise unknown_model(base, error) from error


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch off transformers' bars, which would run through the trainer's display at every checkpoint."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()
