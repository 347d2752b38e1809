"""How the processes that share a model meet, and how a whole tensor becomes the part that one of them holds."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported where torch has it built in
from torch.distributed.tensor import DTensor, distribute_tensor

LOOPBACK = "127.0.0.1"
JOIN_SECONDS = 300.0  # until all ranks have met, which takes what importing torch takes
_SIOCGIFADDR = 0x8915  # of an interface, its IPv4 address (netdevice(7))


def address_towards(host: str) -> str:
    """Return this machine's own IPv4 address in the network that leads to a host. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # a datagram socket only looks up the way
        return str(asking.getsockname()[0])


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
    """Make this process a rank of torch's process group: gloo on "cpu", NCCL on "cuda", on its first GPU.

    Args:
        store: of `host_store`, or its port.
        seconds: that a collective may take.
        host: of the store. The ranks talk by the network that leads there.
    """
    if (interface := _interface_to(host)) is not None:  # torch would take the one that the machine's name leads to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if isinstance(store, int):
        store = TCPStore(host, store, size, timeout=timedelta(seconds=seconds), is_master=False)
    # With "cuda" it was never run, because no machine had two GPUs. Ray shows each process its own.
    own = torch.device("cuda", 0) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "cpu:gloo,cuda:nccl",  # tensors are summed where they are
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
