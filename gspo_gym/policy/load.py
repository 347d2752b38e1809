"""A name becomes a policy: a model and its tokenizer, from the hub, a folder, or built from nothing (`tiny:NAME`).

Also quantizes frozen weights for QLoRA, fits LoRA adapters, and writes a policy into a folder that `load_policy` reads
back. Not for resuming a run, which needs the optimizer and the random state too (`checkpoints.py`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from gspo_gym.base.files import writing
from gspo_gym.base.leftovers import in_temporary_folder
from gspo_gym.errors import CheckpointError, ConfigError, GymError, UnknownNameError, shortened
from gspo_gym.learning.saved import SavedTensors, copy_tensors, rows_of
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.lora import ADAPTER, adapt_lora, is_adapter, load_lora
from gspo_gym.policy.manifest import MANIFEST, Manifest, verify
from gspo_gym.policy.parallel import copy_into, parallel_options, require_even_parts
from gspo_gym.policy.stops import note_stops, stops_of_files, stops_of_model
from gspo_gym.policy.tiny import TINY_PREFIX, build_tiny, list_tiny, parse_tiny, tiny_skeleton, tiny_tokenizer

Quantization = Literal["as_saved", "nf4", "int8"]

_QUANTIZATION_FILE = "quantization.json"  # beside an adapter: the form of the weights below it
# Of a folder: nothing is downloaded, and code in it is not run (transformers would ask at the terminal).
_OWN_FILES = {"local_files_only": True, "trust_remote_code": False}
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
    tp: int  # so many of torch's ranks share each layer


def load_policy(
    base: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    quantization: Quantization = "as_saved",
    tp: int = 1,
) -> Policy:
    """Load the policy that `base` names, in eval mode.

    An adapter comes as it was saved, in float32 on a base of that dtype, and on quantized weights if it was trained on
    such. `adapt_policy` makes it trainable again.

    Args:
        base: a folder (transformers or PEFT layout), `tiny:NAME`, `tiny:NAME@SEED`, or a model id of the hub.
        dtype: float32, bfloat16 or float16; of all parameters but an adapter's and quantized ones.
        device: a torch device string.
        seed: decides a tiny model's weights, unless the name does; nothing else is random.
        quantization: "nf4" loads the linear layers in 4 bits (QLoRA), "int8" in 8; "as_saved" leaves them as they come.
        tp: ranks of torch's default process group that share each layer, all of them; see `policy/parallel.py`.

    Raises:
        UnknownNameError: there is no such tiny model, folder or hub model.
        CheckpointError: the folder is there but holds no model that loads, or is a checkpoint of a run and damaged.
        ConfigError: an unknown dtype; quantized weights where bitsandbytes or its support of the device is missing, or
            other ones than the adapter was trained on; a model that cannot be shared out over `tp` ranks.

    >>> load_policy("tiny:qwen3-64", seed=7).base
    'tiny:qwen3-64@7'
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    check_base(base)
    form = _Form(_DTYPES[dtype], device, quantization, tp)
    if quantization != "as_saved":
        check_quantization(device)
    if base.startswith(TINY_PREFIX):
        policy = _load_tiny(base, seed, form)
    elif Path(base).expanduser().is_dir():
        _require_sound(Path(base).expanduser())
        policy = _load_folder(Path(base).expanduser(), form)
    else:
        policy = _load_hub(base, form)
    if tp > 1:
        _require_plain(policy)
        require_even_parts(policy.model)
    _note_padding(policy.model, policy.tokenizer)
    note_stops(policy.tokenizer, stops_of_model(policy.model))
    keep_differentiable(policy.model)
    if not is_quantized(policy.model):  # transformers refuses to move them
        policy.model.to(device)
    policy.model.eval()
    return policy


def load_skeleton(base: str, *, dtype: str = "float32") -> Policy:
    """Return the policy that `base` names without its weights, which are of the device "meta" and take no memory.

    Buffers that no file holds, such as rotary frequencies, are on the CPU. There is no tokenizer (None). A tiny model
    is built from its configuration, and draws nothing; of an adapter's folder, only its shape is kept.

    Raises:
        UnknownNameError, CheckpointError: as `load_policy`.
    """
    from accelerate import init_empty_weights  # peft needs it, too

    check_base(base)
    folder = Path(base).expanduser()
    if (folder / "adapter_config.json").is_file():
        below = folder / "base"
        policy = load_skeleton(str(below) if below.is_dir() else _base_name(folder), dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter", UserWarning)
            return Policy(load_lora(policy.model, folder, "cpu"), None, str(folder.resolve()))
    with init_empty_weights(include_buffers=False):
        if base.startswith(TINY_PREFIX):
            model = tiny_skeleton(parse_tiny(base)[0])
        else:
            options: dict[str, Any] = _OWN_FILES if folder.is_dir() else {}
            config = AutoConfig.from_pretrained(folder if folder.is_dir() else base, **options)
            model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # each name has got an empty tensor of its own
    for parameter in model.parameters():
        parameter.data = parameter.data.to(_DTYPES[dtype])
    _note_padding(model, load_tokenizer(base))
    return Policy(model.eval(), None, base)


@torch.no_grad()
def read_weights(model: Any, folder: Path) -> None:
    """Overwrite the trained parameters of a model (Any: untyped) by those that a policy's folder holds.

    Of a parameter that ranks share, this rank's rows are read and no others, if the files name it as the model does.
    Of others, such as experts that transformers fuses, the whole policy is loaded first.

    Raises:
        CheckpointError: the folder's policy has other parameters.
    """
    saved = SavedTensors(folder, sorted(folder.glob("*.safetensors")))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = {name: re.sub(rf"\.{ADAPTER}(?=\.|$)", "", name) if is_adapter(model) else name for name in trained}
    if all(names[name] in saved and saved.shape(names[name]) == tuple(p.shape) for name, p in trained.items()):
        for name, parameter in trained.items():
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(saved.rows(names[name], rows_of(parameter)))
            else:
                parameter.copy_(saved[names[name]])
        return
    whole = dict(load_policy(str(folder)).model.named_parameters())
    for name, parameter in trained.items():
        if name not in whole or whole[name].shape != parameter.shape:
            raise CheckpointError(f"model folder {folder}: expected {name} of {list(parameter.shape)}")
        copy_into(parameter, whole[name])


def check_base(base: str) -> None:
    """Refuse what cannot be a model: an unknown tiny one, a folder without one, or a text that is no id of the hub.

    Weights are not read, and the hub is not asked.

    Raises:
        UnknownNameError: there is no such tiny model or folder, and it does not look like one of the hub's ids.
        CheckpointError: the folder is there but holds no model, or the weights under its adapter are not there.
    """
    if base.startswith(TINY_PREFIX):
        parse_tiny(base)
        return
    folder = Path(base).expanduser()
    if not folder.is_dir():
        if not _may_be_hub_id(base):
            raise _unknown_model(base, "it does not look like one of the hub's ids, which are OWNER/NAME")
        return
    if (folder / "adapter_config.json").is_file():
        if not (folder / "base").is_dir():
            check_base(_base_name(folder))
        return
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model folder {folder}: expected config.json (transformers) or adapter_config.json (PEFT), found "
            f"{', '.join(sorted(p.name for p in folder.iterdir())[:8]) or 'nothing'}"
        )


def known_context(base: str) -> tuple[str, int | None]:
    """Return the name of the model and the most tokens that it reads, where a folder here says so; None elsewhere."""
    base = _model_of(base)
    folder = Path(base).expanduser()
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return base, None
    return base, said if isinstance(said, int) else None


def adapt_policy(policy: Policy, settings: LoraSettings, seed: int) -> Policy:
    """Return the policy with the trainable LoRA adapter that `settings` describe, a new one or the one it has.

    An adapter of another shape is an error, or widened; see `adapt_lora`. The given policy must not be used after that.

    Raises:
        ConfigError: the settings do not fit the model or its adapter.
    """
    model = adapt_lora(policy.model, settings, seed)
    model.eval()
    return Policy(model=model, tokenizer=policy.tokenizer, base=policy.base)


def load_tokenizer(base: str) -> Any:
    """Load the tokenizer of the policy that `base` names, without the model (Any: transformers is untyped).

    The ids at which the model stops are noted on it, as by `load_policy`; see `policy/stops.py`.

    Raises:
        UnknownNameError, CheckpointError: as `load_policy`.
    """
    tokenizer = _read_tokenizer(base)
    if not (model := _model_of(base)).startswith(TINY_PREFIX):  # whose only stop is the tokenizer's eos
        note_stops(tokenizer, stops_of_files(model))
    return tokenizer


def _read_tokenizer(base: str) -> Any:
    if base.startswith(TINY_PREFIX):
        return tiny_tokenizer(parse_tiny(base)[0])
    folder = Path(base).expanduser()
    if not folder.is_dir():
        return _from_hub(base, AutoTokenizer.from_pretrained)
    if (folder / "adapter_config.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        return _read_tokenizer(_base_name(folder))
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"model folder {folder}: its tokenizer cannot be loaded: {error}") from error


def _model_of(base: str) -> str:
    """Return what names the whole model: `base` itself, or what is below the adapter in that folder."""
    folder = Path(base).expanduser()
    if not (folder / "adapter_config.json").is_file():
        return base
    return _model_of(str(folder / "base") if (folder / "base").is_dir() else _base_name(folder))


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
    elif _base_name(folder).startswith(TINY_PREFIX):
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


def _load_tiny(base: str, seed: int, form: _Form) -> Policy:
    name, own_seed = parse_tiny(base)
    model = build_tiny(name, seed if own_seed is None else own_seed)
    policy = Policy(model=model, tokenizer=tiny_tokenizer(name), base=model.name_or_path)
    if form.quantization != "as_saved":  # transformers quantizes what it reads from files
        with in_temporary_folder("gspo_gym-tiny-") as folder:
            save_policy(policy, Path(folder))
            quantized = _load_folder(Path(folder), form).model
        quantized.name_or_path = policy.base
        return Policy(model=quantized, tokenizer=policy.tokenizer, base=policy.base)
    if form.tp > 1:
        options = _options(form, lambda: model.config)
        with no_progress_bars():
            shared = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **options)
        return Policy(model=shared, tokenizer=policy.tokenizer, base=policy.base)
    for parameter in model.parameters():  # and not the buffers: rotary frequencies need float32
        parameter.data = parameter.data.to(form.dtype)
    return policy


def _note_padding(model: Any, tokenizer: Any) -> None:
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
        if (folder / "adapter_config.json").is_file():
            return _load_adapter(folder, form)
        with no_progress_bars():
            options = _options(form, lambda: AutoConfig.from_pretrained(folder, **_OWN_FILES))
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
    if (saved := folder / _QUANTIZATION_FILE).is_file():
        trained_on = json.loads(saved.read_text(encoding="utf-8"))["base"]
        if quantization not in ("as_saved", trained_on):
            raise ConfigError(f"{folder}: the adapter was trained on {trained_on} weights, expected {quantization}")
        quantization = trained_on
    below = folder / "base"
    base = load_policy(
        str(below) if below.is_dir() else _base_name(folder),
        dtype=str(form.dtype).removeprefix("torch."),
        device=form.device,
        quantization=quantization,
    )
    model = load_lora(base.model, folder, form.device)
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else base.tokenizer
    return Policy(model=model, tokenizer=tokenizer, base=str(folder.resolve()))


def _load_hub(base: str, form: _Form) -> Policy:
    tokenizer = _from_hub(base, AutoTokenizer.from_pretrained)
    options = _options(form, lambda: _from_hub(base, AutoConfig.from_pretrained))
    model = _from_hub(base, AutoModelForCausalLM.from_pretrained, **options)
    return Policy(model=model, tokenizer=tokenizer, base=base)


def _options(form: _Form, read_config: Callable[[], Any]) -> dict[str, Any]:
    quantized = (
        {} if form.quantization == "as_saved" else quantization_options(form.quantization, form.dtype, form.device)
    )
    shared = {} if form.tp == 1 else parallel_options(read_config(), form.tp)
    return {"dtype": form.dtype, **quantized, **shared}


def _require_plain(policy: Policy) -> None:
    if is_adapter(policy.model) or is_quantized(policy.model):
        raise ConfigError(
            f"{policy.base}: an adapter or quantized weights cannot be shared out over ranks: set tp to 1"
        )


def _from_hub(base: str, load: Callable[..., Any], **options: Any) -> Any:
    # Refused at once if it cannot be an id, not after the retries of a dead network.
    check_base(base)
    try:
        return load(base, **options)
    except (OSError, ValueError) as error:
        raise _unknown_model(base, error) from error


def _unknown_model(base: str, reason: object) -> UnknownNameError:
    return UnknownNameError(
        f"model {base!r}: not a folder here ({Path(base).expanduser().absolute()}), not a tiny model "
        f"({', '.join(list_tiny())}), and the hub has no such model or cannot be reached: {reason}"
    )


def _may_be_hub_id(base: str) -> bool:
    # The hub also has models without an owner; one of them must not be loaded in place of a run or a misspelt folder.
    # `runs/policy` with a folder `runs` here is a misspelt path.
    owner, _, _ = base.partition("/")
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", base) is not None and not Path(owner).is_dir()


def _base_name(folder: Path) -> str:
    name = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise CheckpointError(f"{folder}/adapter_config.json: expected base_model_name_or_path, got {name!r}")
    return str(name)


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


_DEVICES = ("cpu", "cuda", "xpu")


def check_quantization(device: str) -> None:
    """Require bitsandbytes and a device that it supports, before anything is downloaded.

    Raises:
        ConfigError: bitsandbytes is not installed, or does not support the device.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "quantized weights (qlora) need bitsandbytes, which is not installed: pip install 'gspo-gym[quant]', or "
            "train a LoRA on weights of 16 or 32 bits (lora)"
        )
    if torch.device(device).type not in _DEVICES:
        raise ConfigError(
            f"quantized weights (qlora): expected a device among {', '.join(_DEVICES)}, got {device!r}: bitsandbytes "
            "supports no other"
        )


def quantization_options(kind: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the options of transformers' `from_pretrained` for "nf4" or "int8" (Any: untyped).

    int8 is LLM.int8 (arXiv 2208.07339) without its outlier columns. It rounds activations to 8 bits, too: a difference
    in rounding becomes 1/127 of a token's largest activation, and logprobs agree less well.
    """
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        # 0: no outlier columns. All tokens of a batch choose them, and a logprob would depend on its neighbours.
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_not_about_casting)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            # The paper computes in bfloat16; in the dtype of the other weights, scored and sampled logprobs agree as
            # closely as that dtype allows.
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": config, "device_map": {"": device}}


def _is_not_about_casting(record: logging.LogRecord) -> bool:
    # bitsandbytes logs this in every forward of every layer although all is well.
    return "inputs will be cast" not in record.msg


def quantization_of(model: Any) -> str:
    """Return the kind of a quantized model, "nf4" or "int8" (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "int8" if base.hf_quantizer.quantization_config.load_in_8bit else "nf4"


def is_quantized(model: Any) -> bool:
    """Return whether the model, or the one under its adapter, has quantized weights (Any: untyped)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "hf_quantizer", None) is not None


def dequantize(model: Any) -> None:
    """Replace quantized layers by plain ones with the weights that they compute with, in place (Any: untyped).

    An adapter stays where it is. The layers agree up to rounding, except that int8 ones also round their inputs.
    """
    import bitsandbytes as bnb

    for path, layer in list(model.named_modules()):
        if not isinstance(layer, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            continue
        weight = layer.weight
        if isinstance(layer, bnb.nn.Linear4bit):
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:  # scales of the rows: the layer takes them over from the weight at its first forward
            scales = weight.SCB if layer.state.SCB is None else layer.state.SCB
            values = weight.data.float() * scales.float().view(-1, 1) / 127
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        plain.weight = torch.nn.Parameter(values, requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(path, plain)


def keep_differentiable(model: Any) -> None:
    """Forbid bitsandbytes to repack weights on a CPU.

    On a CPU with AVX512-BF16, the first forward in eval mode and without gradients would rearrange the weights for a
    kernel that has no backward pass: from then on no gradient reaches an adapter below, and nothing but a warning says
    so. Policies are sampled from and scored in just that mode.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
