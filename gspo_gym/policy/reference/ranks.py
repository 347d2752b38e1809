"""The frozen model of a reference server, and the processes that share it: each holds a part of every layer.

Rank 0 is the server. It starts the others (`python -m gspo_gym.policy.reference.ranks`) and tells them what to do
through their standard input: frames of eight bytes that count and then JSON, or tensors as safetensors. All do the same
at once, and each answers when it is done. The parts talk through torch.distributed: gloo on processors, NCCL on GPUs.

If a rank ends, the server says which and ends; if the server ends, so do the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # exported where torch has it built in

from gspo_gym.base.leftovers import die_with_parent
from gspo_gym.errors import ConfigError, GymError, RecordError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.parallel import copy_into
from gspo_gym.policy.reference.wire import ScoringSettings

_JOIN_SECONDS = 300.0  # until all ranks have met, which takes what importing torch takes
_LAST_WORDS_SECONDS = 0.5  # a rank that dies breaks its connections a moment before it is gone


class Ranks:
    """The other ranks, as rank 0 sees them; see `start_ranks`.

    Args:
        others: their processes, by rank, from 1 on; none if the model is in this process alone.
        max_seconds: that a score or a change of weights may take; then a rank hangs, and the server ends.

    Attributes:
        size: of all ranks. pids: their processes, this one first.
    """

    def __init__(self, others: Sequence[subprocess.Popen[bytes]] = (), max_seconds: float = math.inf) -> None:
        self.size = 1 + len(others)
        self.pids = [os.getpid(), *(process.pid for process in others)]
        self._others = others
        self._max_seconds = max_seconds
        self._is_ending = threading.Lock()
        for rank, process in enumerate(others, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    @contextlib.contextmanager
    def together(
        self, order: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None, *, is_timed: bool = True
    ) -> Iterator[None]:
        """Let the other ranks do what the block does here; return when all are done.

        Where the block raises a GymError, every rank must have raised the same one. After any other error, or if the
        ranks do not agree, the server ends: a rank might wait forever.
        """
        if not self._others:
            yield
            return
        reason = f"the ranks were not done after {self._max_seconds:g} seconds"
        timer = threading.Timer(self._max_seconds, self._give_up, [reason])
        timer.daemon = True
        if is_timed:
            timer.start()
        try:
            frames = (json.dumps(order).encode(), save(dict(tensors or {})))
            for other in self._others:
                _write(_pipe(other.stdin), *frames)
            try:
                yield
            except GymError as error:
                self._collect(str(error))
                raise
            self._collect("")
        except GymError:
            raise
        except Exception as error:
            self._give_up(f"rank 0: {type(error).__name__}: {error}")
        finally:
            timer.cancel()

    def _collect(self, refusal: str) -> None:
        for rank, other in enumerate(self._others, start=1):
            theirs = json.loads(_read(_pipe(other.stdout)))["refusal"]
            if theirs != refusal:
                self._give_up(f"rank {rank} says {theirs or 'yes'!r} to what rank 0 says {refusal or 'yes'!r} to")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self._give_up(f"rank {rank} (process {process.pid}) has ended with status {code}")

    def _give_up(self, reason: str) -> NoReturn:
        # The others would not all notice by themselves: a collective may wait for ever.
        self._is_ending.acquire()  # never released: one reason is enough
        for other in self._others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.wait(_LAST_WORDS_SECONDS / len(self._others))
        ended = [
            f"rank {rank} (process {other.pid}) has ended with status {other.returncode}"
            for rank, other in enumerate(self._others, start=1)
            if other.poll() is not None
        ]
        print(f"reference server: {reason}", *(line for line in ended if line != reason), sep="; ", file=sys.stderr)
        sys.stderr.flush()
        for other in self._others:
            other.kill()
        os._exit(1)


def start_ranks(size: int, *, device: str, num_threads: int, max_seconds: float) -> Ranks:
    """Start the other ranks and meet them; this process is rank 0 from then on.

    Args:
        size: of all ranks, this one too.
        device: "cpu", or "cuda": rank r is on the r-th GPU that is visible.
        num_threads: of torch, in each rank.

    Raises:
        ConfigError: the device cannot be shared, or there are fewer GPUs than ranks.
    """
    _prepare_devices(size, device)
    listener = socket.create_server(("127.0.0.1", 0))  # only this machine can meet us, at a port that is free
    port = listener.getsockname()[1]
    options = {"size": size, "port": port, "device": device, "num-threads": num_threads, "parent": os.getpid()}
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "gspo_gym.policy.reference.ranks", f"--rank={rank}"]
            + [f"--{name}={value}" for name, value in options.items()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(1, size)
    ]
    ranks = Ranks(others, max_seconds)  # watches them from now on: one that never starts ends the wait
    store = TCPStore(
        "127.0.0.1",
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=_JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    _join(store, 0, size, device)
    return ranks


def _prepare_devices(size: int, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device: expected cpu or cuda for a model that {size} ranks share, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would put the parts on GPUs where there are any
    elif torch.cuda.device_count() < size:
        raise ConfigError(f"--tp: {size} ranks need a GPU each, and {torch.cuda.device_count()} are visible")
    if sys.platform == "linux":  # the machine's name may lead to its network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _join(store: Store, rank: int, size: int, device: str) -> None:
    # With "cuda" it was never run, because no machine had two GPUs.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))  # transformers asks these
    own = torch.device("cuda", rank) if device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "nccl",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_JOIN_SECONDS),
        device_id=own,
    )


def _write(stream: IO[bytes], *frames: bytes) -> None:
    for frame in frames:
        stream.write(len(frame).to_bytes(8) + frame)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes:
    # Frames, because one end writes JSON and tensors after each other.
    count = stream.read(8)
    frame = stream.read(int.from_bytes(count))
    if len(count) < 8 or len(frame) < int.from_bytes(count):
        raise EOFError("the other end is closed")
    return frame


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def main(argv: Sequence[str] | None = None) -> int:
    """Do what rank 0 does, until it is gone."""
    arguments = _parser().parse_args(argv)
    # `_listen` needs the interpreter's lock, which torch may keep while it waits for a rank that is gone.
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(arguments.num_threads)
    orders: queue.SimpleQueue[tuple[bytes, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        store = TCPStore(
            "127.0.0.1", arguments.port, arguments.size, timeout=timedelta(seconds=_JOIN_SECONDS), is_master=False
        )
        _join(store, arguments.rank, arguments.size, arguments.device)
        _follow(orders, answers, arguments.size)
    except Exception as error:  # one line: rank 0's log is read by its end
        first_line = str(error).partition("\n")[0]
        print(f"reference server: rank {arguments.rank}: {type(error).__name__}: {first_line}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # and not by way of destructors, which wait for the other ranks


def _listen(orders: queue.SimpleQueue[tuple[bytes, bytes]]) -> None:
    # If rank 0 ends while this rank waits in a collective, only this thread is told.
    with contextlib.suppress(EOFError):
        while True:
            orders.put((_read(sys.stdin.buffer), _read(sys.stdin.buffer)))
    os._exit(0)


def _follow(orders: queue.SimpleQueue[tuple[bytes, bytes]], answers: IO[bytes], size: int) -> NoReturn:
    model: FrozenModel | None = None
    while True:
        head, body = orders.get()
        order: dict[str, Any] = json.loads(head)  # Any: JSON values
        refusal = ""
        try:
            if order["do"] == "load":
                model = FrozenModel(order["base"], dtype=order["dtype"], device=order["device"], tp=size)
            elif order["do"] == "score":
                assert model is not None
                model.score(load(body), ScoringSettings.from_query(order["settings"]))
            else:
                assert model is not None
                model.replace(Path(order["file"]), order["version"])
        except GymError as error:
            refusal = str(error)
        _write(answers, json.dumps({"refusal": refusal}).encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m gspo_gym.policy.reference.ranks", description="Not for use by hand."
    )
    for name in ("--rank", "--size", "--port", "--num-threads", "--parent"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--device", required=True)
    return parser


class FrozenModel:
    """A model that scores, one request at a time; with tp > 1, every rank is asked the same at once."""

    def __init__(self, base: str, *, dtype: str, device: str, tp: int = 1) -> None:
        """Load what `models.load_policy` takes, and raise as it does."""
        policy = load_policy(base, dtype=dtype, device=device, tp=tp)
        self._model = policy.model.requires_grad_(False)
        self._computers: dict[ScoringSettings, LogprobComputer] = {}
        self.info: Mapping[str, Any] = {  # Any: JSON values
            "status": "ready",
            "model": policy.base,
            "pid": os.getpid(),
            "dtype": dtype,
            "tp": tp,
            "vocab_size": policy.model.get_input_embeddings().num_embeddings,
            "num_parameters": sum(parameter.numel() for parameter in policy.model.parameters()),  # of all ranks
            "version": 0,
        }

    @torch.no_grad()
    def score(self, tensors: Mapping[str, Tensor], settings: ScoringSettings) -> Tensor:
        """Return [B, T] logprobs, on the processor.

        Raises:
            RecordError, ConfigError: the request cannot be scored.
        """
        device = next(self._model.parameters()).device
        inputs = {name: tensor.to(device) for name, tensor in tensors.items()}
        if settings not in self._computers:
            self._computers[settings] = LogprobComputer(
                self._model, sampling=settings.sampling, logits_bytes=settings.logits_bytes
            )
        return self._computers[settings].compute(**inputs).logprobs.cpu()

    @torch.no_grad()
    def replace(self, file: Path, version: int) -> None:
        """Take other parameters, from a safetensors file that names them as the model does.

        Raises:
            RecordError: the file holds others, or cannot be read.
        """
        own = dict(self._model.named_parameters())
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
                if shapes != {name: tuple(parameter.shape) for name, parameter in own.items()}:
                    raise RecordError(f"/load: {file} holds other parameters than the model's {len(own)}")
                for name, parameter in own.items():
                    copy_into(parameter, tensors.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise RecordError(f"/load: {file} cannot be read: {error}") from error
        self.info = {**self.info, "version": version}


if __name__ == "__main__":
    sys.exit(main())
