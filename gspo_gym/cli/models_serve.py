"""`gspo-gym models serve MODEL`: serve a model in OpenAI's protocol until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo_gym.base.leftovers import in_temporary_folder
from gspo_gym.base.loops import run_to_end
from gspo_gym.base.settings import read_key
from gspo_gym.errors import MissingExtraError

if TYPE_CHECKING:
    from gspo_gym.engine.base import Engine
    from gspo_gym.engine.local.engine import LocalEngine
    from gspo_gym.engine.vllm.settings import VllmSettings
    from gspo_gym.learning.logprobs import LogprobComputer
    from gspo_gym.run.models import Model
    from gspo_gym.types import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `models serve`, besides the model."""
    parser.add_argument("--engine", choices=["local", "vllm"], default="local", help="what samples (default local)")
    where = parser.add_argument_group("where it listens")
    where.add_argument("--host", default="127.0.0.1", help="another than loopback needs --api-key-env")
    where.add_argument("--port", type=int, default=8000, help="0 takes any that is free (default 8000)")
    where.add_argument("--name", help="what requests call the model (default: RUN@STEP, or the name as given)")
    where.add_argument("--api-key-env", metavar="NAME", help="environment variable with a key that clients must send")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of answers that ask for no limit (default 1024)")
    add_sampling(parser)
    parser.add_argument("--device", default="cpu", help="for the local engine: cpu, cuda, ... (default cpu)")
    add_engine_arguments(
        parser.add_argument_group("how it runs the model; from --tensor-parallel-size on, with --engine vllm only")
    )
    parser.set_defaults(run=serve)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `sampling_for` reads."""
    its_own = "(default: as the model's generation_config says, else 1)"
    parser.add_argument("--temperature", type=float, metavar="T", help=f"where no request says so; 0: greedy {its_own}")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help=f"keep the fewest tokens of this probability {its_own}"
    )


def sampling_for(model: Model, arguments: argparse.Namespace) -> Sampling:
    """Return how the model answers: as its generation config states, but for what the command line does.

    Raises:
        ConfigError: a value is out of range.
    """
    from gspo_gym.policy.facts import generation_config_of, sampling_of

    return with_options(sampling_of(generation_config_of(model.base)), arguments)


def with_options(stated: Mapping[str, Any], arguments: argparse.Namespace) -> Sampling:
    """Return the stated fields of `Sampling`, but for those of the command line.

    Raises:
        ConfigError: a value is out of range.
    """
    from gspo_gym.types import Sampling

    options = {"temperature": arguments.temperature, "top_p": arguments.top_p}
    return Sampling(**{**stated, **{name: value for name, value in options.items() if value is not None}})


def serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; print the URL once clients may connect.

    Raises:
        ConfigError: the address, or a setting of the engine.
        MissingExtraError: uvicorn, or vLLM, is not installed.
    """
    try:
        import gspo_gym.remote.serving  # noqa: F401  # before a model is loaded
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
    from gspo_gym.engine.local.engine import LocalEngine
    from gspo_gym.policy.endpoint import WEIGHTS
    from gspo_gym.remote.gateway.model_app import Served, create_model_app
    from gspo_gym.remote.serving import LoopServer, bind
    from gspo_gym.run.models import find_model

    key = read_key(arguments.api_key_env, "--api-key-env")
    # An address that cannot be served on is refused before a model is loaded.
    bind(arguments.host, arguments.port, has_key=key is not None).close()
    model = find_model(arguments.model, runs=arguments.folder)
    async with running_engine(model, arguments) as (engine, tokenizer):
        name = arguments.name or model.name
        sampling = sampling_for(model, arguments)
        rollout = model.config.get("rollout", {})
        kwargs = rollout.get("policy_config", {}).get("chat_template_kwargs", {})
        tools_in = rollout.get("tools_in", "auto")
        score = PromptScorer(engine) if isinstance(engine, LocalEngine) else None
        facts = facts_of(model, tokenizer)
        model_service = Served(
            *(engine, tokenizer, name, arguments.max_tokens, sampling, kwargs, tools_in),
            score=score,
            facts={**facts, "max_model_len": engine.capabilities.max_model_len},
            fingerprint=facts.get(WEIGHTS) or facts["root"],
        )
        app = create_model_app(model_service, api_key=key)
        server = LoopServer(app, host=arguments.host, port=arguments.port, has_key=key is not None)
        await server.start()
        print(f"serving {name} at {server.url}/v1", flush=True)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await server.stop()


def facts_of(model: Model, tokenizer: Any) -> dict[str, str]:
    """Return what a learner asks of its teacher: where it is from, and digests of vocabulary and weights.

    Any: transformers is untyped. Without weights in safetensors, as of a tiny model, the name stands for them.
    """
    from gspo_gym.policy.endpoint import VOCABULARY, WEIGHTS
    from gspo_gym.policy.load import folder_of, vocabulary_digest
    from gspo_gym.policy.manifest import weights_digest

    folder = folder_of(model.base)
    digest = None if folder is None else weights_digest(folder)
    facts = {"root": model.base, VOCABULARY: vocabulary_digest(tokenizer)}
    return facts if digest is None else facts | {WEIGHTS: digest}


class PromptScorer:
    """Computes the logprobs of a prompt's tokens, as a learner does, between two steps of the engine."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._computer: LogprobComputer | None = None  # made when first asked: it tries the model out

    async def __call__(self, token_ids: Sequence[int]) -> list[float]:
        """Return the logprob of each token at temperature 1, of the whole vocabulary; nats, 0 of the first.

        Raises:
            ConfigError: the model cannot be scored. EngineError: a token is not in the vocabulary.
        """
        from gspo_gym.engine.base import require_vocabulary

        require_vocabulary(min(token_ids), max(token_ids), self._engine.vocab_size)
        return await self._engine.compute(lambda: self._score(token_ids))

    def _score(self, token_ids: Sequence[int]) -> list[float]:
        import torch

        from gspo_gym.learning.logprobs import LogprobComputer

        model = self._engine.model
        if self._computer is None:
            self._computer = LogprobComputer(model)
        ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
        is_token = torch.ones_like(ids, dtype=torch.bool)
        is_scored = is_token.clone()
        is_scored[:, 0] = False
        with torch.no_grad():
            logprobs: list[float] = self._computer.compute(ids, is_token, is_scored).logprobs[0].tolist()
        return logprobs


@contextlib.asynccontextmanager
async def running_engine(model: Model, arguments: argparse.Namespace) -> AsyncIterator[tuple[Engine, Any]]:
    """Yield an engine with the model's weights, and its tokenizer (Any: untyped); close the engine after the block.

    Raises:
        ConfigError, EngineError, MissingExtraError: see the engines.
    """
    from gspo_gym.config.build.threads import compute_in, computing_elsewhere
    from gspo_gym.policy.load import load_policy, load_tokenizer

    if arguments.engine == "local":
        from gspo_gym.engine.local.engine import LocalEngine

        dtype = model.dtype if arguments.dtype == "auto" else arguments.dtype
        with computing_elsewhere(arguments.device) as num_threads:
            policy = load_policy(model.base, dtype=dtype, device=arguments.device)
            longest = getattr(policy.model.config, "max_position_embeddings", None) or arguments.max_model_len
            length = min(arguments.max_model_len, longest)
            local = LocalEngine(policy.model, max_model_len=length, max_batch_size=arguments.max_num_seqs)
            try:
                await compute_in(local, policy.model, num_threads)
                yield local, policy.tokenizer
            finally:
                await local.close()
        return
    from gspo_gym.engine.vllm.engine import VllmEngine
    from gspo_gym.policy.bases import layout_of
    from gspo_gym.policy.export import export

    with in_temporary_folder("gspo_gym-serve-") as temporary:
        folder = Path(temporary) / "model"
        # vLLM is given a whole model: a LoRA checkpoint is merged into its base.
        is_merged = layout_of(Path(model.base)) == "peft"
        with computing_elsewhere("cpu"):
            await asyncio.to_thread(
                export, model.base, folder, describe=lambda _: "", is_merged=is_merged, load_dtype=model.dtype
            )
        settings = replace(settings_of(arguments), model=str(folder))
        engine = await VllmEngine.start(settings)
        try:
            yield engine, load_tokenizer(str(folder))
        finally:
            await engine.close()


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
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="compute a turn's earlier tokens again",
    )
    group.add_argument(
        "--structured-output",
        action="store_true",
        help="with the model's tokenizer: chat routes and JSON schemas, for a judge or task apps",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def settings_of(arguments: argparse.Namespace) -> VllmSettings:
    """Return the engine's settings from the command line."""
    from gspo_gym.engine.vllm.settings import VllmSettings

    names = {field.name for field in fields(VllmSettings)} & set(vars(arguments))
    return VllmSettings(**{name: getattr(arguments, name) for name in names})
