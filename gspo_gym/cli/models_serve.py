"""`gspo-gym models serve MODEL`: serve a model over OpenAI's protocol with the local engine or vLLM.

This is for people and programs. `gspo-gym serve` is for training runs, which sample by token ids and change weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.keys import read_key
from gspo_gym.base.leftovers import in_temporary_folder
from gspo_gym.base.loops import run_to_end
from gspo_gym.cli import serve_engine
from gspo_gym.errors import MissingExtraError
from gspo_gym.types import Sampling

if TYPE_CHECKING:
    from gspo_gym.engine.base import Engine
    from gspo_gym.run.models import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models serve`, besides the model."""
    parser.add_argument("--engine", choices=["local", "vllm"], default="local", help="what samples (default local)")
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    where.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    where.add_argument("--name", help="what requests call the model (default: RUN@STEP, or the name as given)")
    where.add_argument("--api-key-env", metavar="NAME", help="environment variable with a key that clients must send")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of answers that ask for no limit (default 1024)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of requests that name none (default 1)")
    parser.add_argument("--device", default="cpu", help="for the local engine: cpu, cuda, ... (default cpu)")
    serve_engine.add_engine_arguments(parser.add_argument_group("how it runs the model; from the fourth on, with vLLM"))
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; print the URL once clients may connect.

    Raises:
        ConfigError: the address, or a setting of the engine.
        MissingExtraError: uvicorn, or vLLM, is not installed.
    """
    try:
        import gspo_gym.remote.gateway.loop_server  # noqa: F401  # before a model is loaded
    except ImportError as error:
        raise MissingExtraError("serving a model needs: pip install 'gspo-gym[serve]'") from error
    run_to_end(_serve(arguments))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    serving, loop = asyncio.ensure_future(_serve_model(arguments)), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):  # from the start: vLLM's processes and files end with this one
        loop.add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _serve_model(arguments: argparse.Namespace) -> None:
    """Serve until cancelled."""
    from gspo_gym.remote.gateway.loop_server import LoopServer
    from gspo_gym.remote.gateway.model_app import Served, create_model_app
    from gspo_gym.remote.serving import bind
    from gspo_gym.run.models import find_model

    key = read_key(arguments.api_key_env, "--api-key-env")
    # An address that cannot be served on is refused before a model is loaded.
    bind(arguments.host, arguments.port, has_key=key is not None).close()
    model = find_model(arguments.model, runs=arguments.folder)
    async with running_engine(model, arguments) as (engine, tokenizer):
        name = arguments.name or model.name
        sampling = Sampling(temperature=arguments.temperature)
        kwargs = model.config.get("rollout", {}).get("policy_config", {}).get("chat_template_kwargs", {})
        served = Served(engine, tokenizer, name, arguments.max_tokens, sampling, kwargs)
        app = create_model_app(served, api_key=key)
        server = LoopServer(app, host=arguments.host, port=arguments.port, has_key=key is not None)
        await server.start()
        print(f"serving {name} at {server.url}/v1", flush=True)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await server.stop()


@contextlib.asynccontextmanager
async def running_engine(model: Model, arguments: argparse.Namespace) -> AsyncIterator[tuple[Engine, Any]]:
    """Yield an engine with the model's weights, and its tokenizer (Any: untyped); close the engine after the block.

    Raises:
        ConfigError, EngineError, MissingExtraError: see the engines.
    """
    from gspo_gym.policy.load import load_policy, load_tokenizer

    if arguments.engine == "local":
        from gspo_gym.engine.local.engine import LocalEngine

        dtype = model.dtype if arguments.dtype == "auto" else arguments.dtype
        policy = load_policy(model.base, dtype=dtype, device=arguments.device)
        longest = getattr(policy.model.config, "max_position_embeddings", None) or arguments.max_model_len
        length = min(arguments.max_model_len, longest)
        local = LocalEngine(policy.model, max_model_len=length, max_batch_size=arguments.max_num_seqs)
        try:
            yield local, policy.tokenizer
        finally:
            await local.close()
        return
    from gspo_gym.engine.vllm.engine import VllmEngine
    from gspo_gym.policy.export import export, layout_of

    with in_temporary_folder("gspo_gym-serve-") as temporary:
        folder = Path(temporary) / "model"
        # vLLM is given a whole model: a LoRA checkpoint is merged into its base.
        is_merged = layout_of(Path(model.base)) == "peft"
        await asyncio.to_thread(
            export, model.base, folder, describe=lambda _: "", is_merged=is_merged, load_dtype=model.dtype
        )
        settings = replace(serve_engine.settings_of(arguments), model=str(folder))
        engine = await VllmEngine.start(settings)
        try:
            yield engine, load_tokenizer(str(folder))
        finally:
            await engine.close()
