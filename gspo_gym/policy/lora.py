"""LoRA adapters (arXiv 2106.09685): put on a model, or fitted to the settings of the run that goes on with them.

An adapter is known here by its layout: which matrices it adapts, with which rank and scale. Only the adapter called
"default" is looked at; a learner may keep others.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gspo_gym.errors import ConfigError, nearest_name
from gspo_gym.learning.adapters import quicken_adapters
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.seeding import child_seed

_log = logging.getLogger(__name__)
ADAPTER = "default"  # PEFT's own name for the only adapter of a model
_LINEAR = (nn.Linear, Conv1D)  # the layers of bitsandbytes are nn.Linear too
_UNKNOWN_TO_SETTINGS = ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices", "layer_replication")


@dataclass(frozen=True, slots=True)
class _Targets:
    modules: tuple[str, ...]  # names in PEFT's sense: of every module, or parameter, that has this name or ending
    parameters: tuple[str, ...]
    matrices: frozenset[str]  # the full names of the modules and parameters meant


@dataclass(frozen=True, slots=True)
class _Shape:
    rank: int  # rows of A, for each expert if there are some
    scale: float  # delta = scale * B @ A


def is_adapter(model: Any) -> bool:
    """Return whether PEFT has put an adapter on the model (Any: untyped)."""
    return hasattr(model, "peft_config")


def moving_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that training can change: an adapter's, or all of a model without one (Any: untyped)."""
    is_full = not is_adapter(model)
    return {name: p for name, p in model.named_parameters() if is_full or p.requires_grad}


def add_lora(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Return the model with a trainable LoRA adapter; the model's weights are frozen in place.

    The adapter changes nothing before it is trained (B starts at zero); `seed` draws A. The global generator is left as
    it was. Adapter weights are float32 in models of any dtype. Models are Any: transformers and peft are untyped.

    The experts of a mixture are one fused parameter a layer, and no modules: each expert is adapted with rank r.
    Routers are left alone unless they are named (`gate.weight`).

    Raises:
        ConfigError: a target that names nothing in the model (PEFT would pass over it if another does), or dropout on
            fused experts, for which PEFT has none.
    """
    # Here: it takes seconds to load, and full training needs none of it.
    from peft import LoraConfig, get_peft_model

    targets = _find_targets(model, settings.target_modules)
    if targets.parameters and settings.dropout > 0:
        raise ConfigError(
            f"lora.dropout: there is none for the fused parameters {', '.join(targets.parameters)}: expected 0, got "
            f"{settings.dropout}; or name other lora.target_modules"
        )
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        task_type="CAUSAL_LM",
    )
    # PEFT draws from the global generator, which is left as it was.
    with torch.random.fork_rng(devices=[]), _without_wrong_warnings():
        torch.default_generator.manual_seed(child_seed(seed, "lora"))
        try:
            adapted_model = get_peft_model(model, config, adapter_name=ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora: {error}") from error
    # PEFT adapts every module of a name's ending: more than was meant, if a name occurs twice.
    if differing := sorted(targets.matrices ^ _layout(adapted_model).keys()):
        raise ConfigError(
            f"lora.target_modules: PEFT cannot tell {differing[0]!r} (and {len(differing) - 1} more) from others of "
            "its name in this model; name fewer modules"
        )
    quicken_adapters(adapted_model)
    return adapted_model


def load_lora(base: Any, folder: Path, device: str) -> Any:
    """Return the base with the adapter in `folder`, trainable (Any: transformers and peft are untyped)."""
    from peft import PeftModel

    with _without_wrong_warnings():
        model = PeftModel.from_pretrained(base, folder, adapter_name=ADAPTER, is_trainable=True, torch_device=device)
    quicken_adapters(model)
    return model


@contextmanager
def _without_wrong_warnings() -> Iterator[None]:
    """Leave out warnings about what PEFT does by itself, which nobody who loads an adapter can change."""
    with warnings.catch_warnings():
        # For experts adapted as two matrices that are fused today, PEFT doubles the rank, and then says that it did
        # not, because it looks for them among modules only.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        # PEFT 0.21 asks for it in `PeftModel.__init__`, where transformers 5.24 has another name.
        warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def adapt_lora(model: Any, settings: LoraSettings, seed: int) -> Any:
    """Return the model with the adapter that `settings` describe, a new one or the one it has.

    The adapter's function is kept; its dropout becomes `settings.dropout`. If rank, scale (alpha / r) or targets
    differ, it is widened: to the larger rank and the targets of both, with the old factors in the first ranks and the
    adapter's scale, so that alpha becomes that times the new rank. (AgileRL 2.7
    keeps alpha instead, which changes the function: from rank 8 to 16 it halves it.) New factors start as in
    `add_lora`. The given model must not be used after that.

    Raises:
        ConfigError: an adapter that LoRA settings cannot describe, or of another shape and of several scales.
    """
    if not is_adapter(model):
        return add_lora(model, settings, seed)
    _require_plain_lora(model)
    layout, factors, names = _layout(model), _factors(model), _target_names(model)
    fresh = add_lora(model.unload(), settings, seed)
    new_layout = _layout(fresh)
    if new_layout != layout:
        shapes = _describe(layout), _describe(new_layout)
        _log.warning("model.base is an adapter with %s, and training.lora asks for %s: it is widened", *shapes)
        # Both adapters' targets: what one did not adapt begins with B = 0.
        names |= _target_names(fresh)
        fresh = add_lora(fresh.unload(), _merge_settings(settings, layout, new_layout, names), seed)
    _put(fresh, factors)
    return fresh


def untie(model: Any) -> None:
    """Give the output head weights of its own if it shares them with the embeddings and either is adapted.

    A merge changes one of the two. In place; the function stays the same (Any: untyped).
    """
    base = model.get_base_model()
    embeddings, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not _is_adapted(embeddings) and not _is_adapted(head):
        return
    embedding_ids = {id(parameter) for parameter in embeddings.parameters()}
    for layer in head.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in embedding_ids:
                setattr(layer, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    base.config.tie_word_embeddings = base.config.get_text_config().tie_word_embeddings = False


def _is_adapted(layer: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper)


def require_deltas(model: Any) -> None:
    """Refuse an adapter that is more than `weight + scale * B @ A` on weights of one use (Any: untyped).

    Raises:
        ConfigError: names what it is besides, or that two layers share what it is on.
    """
    if extras := _extras(model):
        raise ConfigError(
            f"the adapter has {', '.join(extras)}, which is no sum of matrices: merge it into a model of its own "
            "(gspo-gym models merge) and use that"
        )
    base = model.get_base_model()
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    if base.config.get_text_config().tie_word_embeddings and any(map(_is_adapted, ends)):
        raise ConfigError(
            "the adapter is on embeddings or an output head that share their weights, of which an engine has one copy: "
            "leave them out of training.lora.target_modules, hand over the adapter itself, or merge it into a model of "
            "its own (gspo-gym models merge) and go on from there"
        )


def _extras(model: Any) -> list[str]:
    """Return what the adapter has besides two factors for each matrix, by PEFT's names."""
    from peft.tuners.lora import LoraLayer

    config = model.peft_config[ADAPTER]
    extras = {name for name in _UNKNOWN_TO_SETTINGS if getattr(config, name, None)}
    for module in model.get_base_model().modules():
        if isinstance(module, LoraLayer) and (variant := getattr(module, "lora_variant", {}).get(ADAPTER)):
            extras.add(type(variant).__name__)  # such as aLoRA; their list grows with PEFT
        elif _is_adapted(module) and not isinstance(module, LoraLayer):
            extras.add(type(module).__name__)
    return sorted(extras)


def _find_targets(model: Any, targets: tuple[str, ...] | str) -> _Targets:
    # By full name: PEFT passes over a name that means nothing if another means something.
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (*_LINEAR, nn.Embedding))}
    layer_parameters = {f"{name}.{parameter}" for name in layers for parameter in ("weight", "bias")}
    fused_axes = {
        name: p.ndim for name, p in model.named_parameters() if name not in layer_parameters and p.ndim in (2, 3)
    }
    if isinstance(targets, str):
        # The head is left alone: its delta would have a row for each token.
        head = model.get_output_embeddings()
        linear_names = [name for name, layer in layers.items() if isinstance(layer, _LINEAR) and layer is not head]
        experts = [name for name, num_axes in fused_axes.items() if num_axes == 3]
        return _Targets(_short(linear_names), _short(experts), frozenset([*linear_names, *experts]))
    for target in targets:
        if not any(_is_called(name, target) for name in (*layers, *fused_axes)):
            possible_names = sorted({*_short(layers), *_short(fused_axes)})
            raise ConfigError(
                f"lora.target_modules: the model has no {target!r}; {nearest_name(target, possible_names)}"
            )
    modules, parameters = (
        tuple(t for t in targets if any(_is_called(n, t) for n in names)) for names in (layers, fused_axes)
    )
    matrices = (name for name in (*layers, *fused_axes) if any(_is_called(name, target) for target in targets))
    return _Targets(modules, parameters, frozenset(matrices))


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _short(names: Iterable[str]) -> tuple[str, ...]:
    # Of `mlp.gate.weight` the last two parts, because "weight" alone names everything.
    parts = [name.rsplit(".", 2) for name in names]
    return tuple(sorted({".".join(part[-2:]) if part[-1] == "weight" else part[-1] for part in parts}))


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    for path, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.r:
            name = re.sub(r"(\.base_layer)+$", "", path)  # wrappers of several parameters of a module are nested
            parameter = getattr(layer, "parameter_name", None)
            yield (name if parameter is None else f"{name}.{parameter}"), layer


def _layout(model: Any) -> dict[str, _Shape]:
    return {name: _Shape(layer.r[ADAPTER], layer.scaling[ADAPTER]) for name, layer in _layers(model)}


def _target_names(model: Any) -> set[str]:
    config = model.peft_config[ADAPTER]
    return {*(config.target_modules or ()), *(config.target_parameters or ())}


def _weights(layer: Any) -> tuple[Tensor, Tensor]:
    # Views, as A [experts, rank, in] and B [out, rank, experts], in PEFT's layout.
    experts, rank = getattr(layer, "num_experts", 1), layer.r[ADAPTER]
    if ADAPTER in layer.lora_embedding_A:
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    return a.detach().view(experts, rank, -1), b.detach().view(-1, rank, experts)


def _factors(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (a.clone(), b.clone()) for name, layer in _layers(model) for a, b in [_weights(layer)]}


def _put(model: Any, factors: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    # In the other ranks B is zero as drawn: they add nothing.
    for name, layer in _layers(model):
        if name in factors:
            (a, b), (old_a, old_b) = _weights(layer), factors[name]
            a[:, : old_a.shape[1]] = old_a
            b[:, : old_b.shape[1]] = old_b


def _merge_settings(
    settings: LoraSettings, layout: Mapping[str, _Shape], new_layout: Mapping[str, _Shape], names: Iterable[str]
) -> LoraSettings:
    # One alpha holds for all matrices, so several scales cannot be kept.
    scales = {shape.scale for shape in layout.values()}
    if len(scales) > 1:
        raise ConfigError(
            f"training.lora: an adapter with one scale (alpha / r) can be widened, got {sorted(scales)}: set its shape"
        )
    rank = max(shape.rank for shape in (*layout.values(), *new_layout.values()))
    return LoraSettings(
        r=rank, alpha=scales.pop() * rank, dropout=settings.dropout, target_modules=tuple(sorted(names))
    )


def _require_plain_lora(model: Any) -> None:
    from peft import LoraConfig

    config, extras = model.peft_config[ADAPTER], _extras(model)
    extras += ["bias"] if getattr(config, "bias", "none") != "none" else []
    if not isinstance(config, LoraConfig) or extras or isinstance(config.target_modules, str):
        kind = getattr(config.peft_type, "value", config.peft_type)
        fault = ", ".join(extras) or f"target_modules {config.target_modules!r}"
        raise ConfigError(
            f"model.base: expected a LoRA adapter that [training.lora] can describe, got one of kind {kind} "
            f"with {fault}"
        )


def _describe(layout: Mapping[str, _Shape]) -> str:
    # Such as "r 8, alpha 16 on 4 matrices (q_proj, v_proj)".
    shapes = sorted({(shape.rank, shape.scale * shape.rank) for shape in layout.values()})
    sizes = " and ".join(f"r {rank}, alpha {alpha:g}" for rank, alpha in shapes)
    return f"{sizes} on {len(layout)} matrices ({', '.join(_short(layout))})"
