"""`gspo-gym serve --engine vllm MODEL`: serve vLLM's own server, set up for training, until SIGTERM or Ctrl-C.

A run that names its URL samples from it and changes its weights. To serve an environment: `gspo-gym env serve`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gspo_gym.cli.command_line import interrupted_by_signals
from gspo_gym.engine.vllm.server import VllmServer
from gspo_gym.engine.vllm.settings import VllmSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("model", metavar="MODEL", help="folder in transformers layout, or a name that vLLM knows")
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="what serves it (default vllm)")
    where = parser.add_argument_group("where it listens; other machines never reach it")
    where.add_argument("--host", default="127.0.0.1", help="a loopback address (default 127.0.0.1)")
    where.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    where.add_argument("--uds", metavar="PATH", help="a Unix socket instead of a port")
    where.add_argument("--name", default="policy", help="what requests call the model (default policy)")
    where.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key for samples")
    where.add_argument("--start-seconds", type=float, default=900.0, help="it must answer within (default 900)")
    where.add_argument("--log", type=Path, metavar="FILE", help="for its output (default: shown if it fails)")
    add_engine_arguments(parser.add_argument_group("how it runs the model"))
    parser.set_defaults(run=serve)


def add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the arguments that `settings_of` reads, except the model."""
    group.add_argument("--max-model-len", type=int, default=4096, help="longest prompt + completion (default 4096)")
    group.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="default: as in the files"
    )
    group.add_argument("--max-num-seqs", type=int, default=256, help="requests in work at once (default 256)")
    group.add_argument("--tensor-parallel-size", type=int, default=1, help="devices that share each layer (default 1)")
    group.add_argument("--data-parallel-size", type=int, default=1, help="copies of the model (default 1)")
    group.add_argument(
        "--device-ids", type=_numbers, default=(), metavar="N,N", help="the GPUs for these (default: the first)"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, help="fraction of a GPU's memory (default 0.9)"
    )
    group.add_argument("--kv-cache-gib", type=float, help="for keys and values; to be set on a CPU")
    group.add_argument("--enforce-eager", action="store_true", help="no compilation; what a CPU needs")
    group.add_argument("--no-prefix-caching", action="store_true", help="compute a turn's earlier tokens again")
    group.add_argument(
        "--structured-output",
        action="store_true",
        help="with the model's tokenizer: chat routes and JSON schemas, for a judge or task apps",
    )
    group.add_argument("--max-lora-rank", type=int, default=0, help="> 0: weights arrive as LoRA adapters (default 0)")
    group.add_argument("--max-loras", type=int, default=2, help="adapters in work at once (default 2)")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; print the URL once clients may connect. Return 1 if the server ended unasked.

    Raises:
        ConfigError: other machines could reach it, or a size is wrong.
        EngineError: it did not start; the message ends with the tail of the log.
        MissingExtraError: vLLM is not installed.
    """
    server = VllmServer(
        settings_of(arguments),
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        name=arguments.name,
        api_key_env=arguments.api_key_env,
        log=arguments.log,
        start_seconds=arguments.start_seconds,
    )
    with interrupted_by_signals(), server:
        print(f"serving {arguments.model} with vLLM at {server.url}", flush=True)
        # SIGTERM and Ctrl-C raise here: wait() returns only if vLLM ended unasked.
        status = server.wait()
        print(f"vLLM ended with status {status}. Its log:\n{server.log_tail()}", file=sys.stderr)
    return 1


def settings_of(arguments: argparse.Namespace) -> VllmSettings:
    """Return the engine's settings from the command line."""
    return VllmSettings(
        model=arguments.model,
        max_model_len=arguments.max_model_len,
        dtype=arguments.dtype,
        max_num_seqs=arguments.max_num_seqs,
        tensor_parallel_size=arguments.tensor_parallel_size,
        data_parallel_size=arguments.data_parallel_size,
        device_ids=arguments.device_ids,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_gib=arguments.kv_cache_gib,
        enforce_eager=arguments.enforce_eager,
        max_lora_rank=arguments.max_lora_rank,
        max_loras=arguments.max_loras,
        enable_prefix_caching=not arguments.no_prefix_caching,
        structured_output=arguments.structured_output,
    )
