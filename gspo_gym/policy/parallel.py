"""A model shared out over processes: how they meet, and tensor parallelism, where each holds a part of every layer.

There, it is cut by transformers' plan; a model without a plan, or with unequal parts, is refused. That is for forward
passes only. Every rank gets the whole logits.
"""

from __future__ import annotations

import copy
import importlib
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported where torch has it built in
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from gspo_gym.base.ranks import LOOPBACK, address_towards
from gspo_gym.errors import ConfigError

_SIOCGIFADDR = 0x8915  # of an interface, its IPv4 address (netdevice(7))
_WHOLE = "replicated_with_grad_allreduce"  # transformers' word for what every rank holds in full


def host_store(size: int, *, seconds: float, host: str = LOOPBACK) -> tuple[Store, int]:
    """Return a store by which so many ranks meet, and its port; they have so many seconds for it.

    Args:
        host: address of this machine, at which the ranks reach it. What else reaches it can read the store.
    """
    listener = socket.create_server((host, 0))  # a port that is free
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_group(store: Store | int, rank: int, size: int, device: str, *, seconds: float, host: str = LOOPBACK) -> None:
    """Make this process a rank of torch's process group: gloo on "cpu", NCCL on "cuda", where rank r is on GPU r.

    Args:
        store: of `host_store`, or its port.
        seconds: that a collective may take.
        host: of the store. The ranks talk by the network that leads there.
    """
    if (interface := _interface_to(host)) is not None:  # torch would take the one that the machine's name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # transformers asks these
    if isinstance(store, int):
        store = TCPStore(host, store, size, timeout=timedelta(seconds=seconds), is_master=False)
    # With "cuda" it was never run, because no machine had two GPUs.
    own = torch.device("cuda", rank) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "cpu:gloo,cuda:nccl",  # offloaded parameters are summed where they are
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        device_id=own,
    )


def _interface_to(host: str) -> str | None:
    """Return the name of the network interface that leads to a host; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    own = address_towards(host)
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = importlib.import_module("fcntl").ioctl(asking, _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def parallel_options(config: Any, tp: int) -> dict[str, Any]:
    """Return the options of transformers' `from_pretrained` (Any: untyped, as is the model's configuration).

    Embeddings and the output head stay whole on every rank if the size of the vocabulary does not divide.

    Raises:
        ConfigError: the model has no plan, or its heads cannot be shared out evenly.
    """
    kind = type(config).__name__.removesuffix("Config")
    _require_even_heads(config.get_text_config(), kind, tp)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # it writes into what it is given
    words = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    sizes = {
        name: module.weight.shape[0]
        for name, module in skeleton.named_modules()
        if any(module is either for either in words)
    }
    if not skeleton.tp_plan.keys() - sizes.keys():
        raise ConfigError(f"{kind}: transformers has no plan for sharing its layers out over {tp} ranks: set tp to 1")
    changes = {name: _WHOLE for name, size in sizes.items() if size % tp}
    try:
        sharing = transformers.distributed.DistributedConfig(tp_size=tp, tp_plan=changes or None)
    except TypeError as error:
        raise ConfigError(
            f"sharing a model out over {tp} ranks needs transformers 5.19 or newer, {transformers.__version__} is "
            f"installed: {error}"
        ) from error
    return {"distributed_config": sharing}


def _require_even_heads(config: Any, kind: str, tp: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise ConfigError(f"{kind}: {name} = {heads} cannot be shared out evenly over {tp} ranks: set another tp")


def require_even_parts(model: nn.Module) -> None:
    """Refuse a model with unequal parts: its layers would not fit together.

    Raises:
        ConfigError: names the parameter.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            axis = getattr(placement, "dim", None)  # None: whole
            if axis is not None and parameter.shape[axis] % (ranks * getattr(placement, "split_factor", 1)):
                raise ConfigError(
                    f"{type(model).__name__}: {name} {list(parameter.shape)} cannot be shared out evenly over {ranks} "
                    f"ranks along axis {axis}: set another tp"
                )


def copy_into(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Overwrite a parameter or buffer, or this rank's part if it is shared out. Nothing travels between ranks."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    parameter.to_local().copy_(part_of(whole.to(parameter.dtype), parameter).to_local())


def part_of(whole: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a tensor of a parameter's shape, shared out as that is. Nothing travels between ranks."""
    there = whole.to(parameter.device)
    return distribute_tensor(there, parameter.device_mesh, parameter.placements, src_data_rank=None)
