"""The frozen model of a reference server, and the processes that share it: each holds a part of every layer.

Rank 0 is the server. It starts the others (`python -m gspo_gym.policy.reference.ranks`) and tells them what to do; see
`base/ranks.py`. All do the same at once, and each answers when it is done. The parts talk through torch.distributed:
gloo on processors, NCCL on GPUs.

If a rank ends, the server says which and ends; if the server ends, so do the others.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from gspo_gym.base.ranks import JOIN_SECONDS, LocalProcess, Rank, Ranks, RanksLostError
from gspo_gym.errors import ConfigError, GymError, RecordError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.policy.load import load_policy
from gspo_gym.policy.lora import moving_parameters
from gspo_gym.policy.parallel import copy_into, host_store, join_group
from gspo_gym.policy.reference.wire import ScoringSettings


class OtherRanks:
    """The other ranks, as rank 0 sees them; see `start_ranks`.

    Args:
        others: from rank 1 on; None: the model is in this process alone.
        max_seconds: that a score or a change of weights may take; then a rank hangs, and the server ends.

    Attributes:
        size: of all ranks. pids: their processes, this one first.
    """

    def __init__(self, others: Ranks | None = None, max_seconds: float = math.inf) -> None:
        handles = [] if others is None else others.handles
        self.size = 1 + len(handles)
        self.pids = [os.getpid(), *(handle.pid for handle in handles if isinstance(handle, LocalProcess))]
        self._others = others
        self._max_seconds = max_seconds

    @contextlib.contextmanager
    def together(
        self, order: Mapping[str, object], tensors: Mapping[str, Tensor] | None = None, *, is_timed: bool = True
    ) -> Iterator[None]:
        """Let the other ranks do what the block does here; return when all are done.

        Where the block raises a GymError, every rank must have raised the same one. After any other error, or if the
        ranks do not agree, the server ends: a rank might wait forever.
        """
        if self._others is None:
            yield
            return
        reason = f"the ranks were not done after {self._max_seconds:g} seconds"
        timer = threading.Timer(self._max_seconds, self._others.give_up, [reason])
        timer.daemon = True
        if is_timed:
            timer.start()
        try:
            self._others.send(order, [save(dict(tensors or {}))], num_bodies=1)
            try:
                yield
            except GymError as error:
                self._collect(str(error))
                raise
            self._collect("")
        except RanksLostError:
            _wait_for_the_end()
        except GymError:
            raise
        except Exception as error:
            self._others.give_up(f"rank 0: {type(error).__name__}: {error}")
            _wait_for_the_end()
        finally:
            timer.cancel()

    def _collect(self, refusal: str) -> None:
        assert self._others is not None
        for rank in range(1, self.size):
            theirs = self._others.receive(rank)[0]["refusal"]
            if theirs != refusal:
                self._others.give_up(
                    f"rank {rank} says {theirs or 'yes'!r} to what rank 0 says {refusal or 'yes'!r} to"
                )
                _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    threading.Event().wait()  # `_end` comes, in another thread
    raise AssertionError


def _end(reason: str) -> None:
    print(f"reference server: {reason}", file=sys.stderr, flush=True)
    os._exit(1)  # a collective may wait for ever


def start_ranks(size: int, *, device: str, num_threads: int, max_seconds: float) -> OtherRanks:
    """Start the other ranks and meet them; this process is rank 0 from then on.

    Args:
        size: of all ranks, this one too.
        device: "cpu", or "cuda": rank r is on the r-th GPU that is visible.
        num_threads: of torch, in each rank.

    Raises:
        ConfigError: the device cannot be shared, or there are fewer GPUs than ranks.
    """
    _prepare_devices(size, device)
    store, port = host_store(size, seconds=JOIN_SECONDS)
    options = {"size": size, "port": port, "device": device, "num-threads": num_threads}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    others = Ranks(
        [partial(LocalProcess, "gspo_gym.policy.reference.ranks", arguments)] * (size - 1), first=1, on_loss=_end
    )
    join_group(store, 0, size, device, seconds=JOIN_SECONDS)
    return OtherRanks(others, max_seconds)


def _prepare_devices(size: int, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device: expected cpu or cuda for a model that {size} ranks share, got {device!r}")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would put the parts on GPUs where there are any
    elif torch.cuda.device_count() < size:
        raise ConfigError(f"--tp: {size} ranks need a GPU each, and {torch.cuda.device_count()} are visible")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Do what rank 0 does, until it is gone."""
    arguments = _parser().parse_args(argv)
    rank = Rank.here()
    torch.set_num_threads(arguments.num_threads)
    try:
        join_group(arguments.port, rank.rank, arguments.size, arguments.device, seconds=JOIN_SECONDS)
        _follow(rank, arguments.size)
    except Exception as error:
        rank.end(f"{type(error).__name__}: {error}")


def _follow(rank: Rank, size: int) -> NoReturn:
    model: FrozenModel | None = None
    while True:
        order, bodies = rank.receive()
        body, refusal = next(bodies), ""
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
        rank.send({"refusal": refusal})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m gspo_gym.policy.reference.ranks", description="Not for use by hand."
    )
    for name in ("--size", "--port", "--num-threads"):
        parser.add_argument(name, required=True, type=int)
    parser.add_argument("--device", required=True)
    return parser


class FrozenModel:
    """A model that scores, one request at a time; with tp > 1, every rank is asked the same at once."""

    def __init__(self, base: str, *, dtype: str, device: str, tp: int = 1) -> None:
        """Load what `models.load_policy` takes, and raise as it does."""
        policy = load_policy(base, dtype=dtype, device=device, tp=tp)
        self._moving = moving_parameters(policy.model)
        self._model = policy.model.requires_grad_(False)
        self._computers: dict[ScoringSettings, LogprobComputer] = {}
        self.info: Mapping[str, Any] = {  # Any: JSON values
            "status": "ready",
            "model": policy.base,
            "pid": os.getpid(),
            "dtype": dtype,
            "tp": tp,
            "vocab_size": policy.model.get_input_embeddings().weight.shape[0],
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
        """Take other parameters, of an adapter if the model has one, from a safetensors file with the model's names.

        Raises:
            RecordError: the file holds others, or cannot be read.
        """
        own = self._moving
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
    main()
