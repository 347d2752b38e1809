"""The control of a vLLM server's weights, over the routes of its development mode.

Those routes run any method of the workers and no key protects them, so this client speaks to loopback or a Unix socket
only. It tries nothing twice: half of a failed update may have been applied, which cannot be seen from outside, so the
caller poisons the engine.

The routes are those of vLLM 0.32, tried on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gspo_gym.base.settings import is_loopback
from gspo_gym.engine.base import PauseMode
from gspo_gym.engine.endpoint.wire import EngineClient, shorten
from gspo_gym.engine.vllm.worker import RELOAD_METHOD, WORKER_EXTENSION
from gspo_gym.errors import ConfigError, EngineError

# sha256 of nothing. On the CPU vLLM repacks linear layers and empties the original, so their digests say nothing.
EMPTY_DIGEST = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The settings that a server was started with.

    Attributes:
        dtype: "float32", "bfloat16" or "float16".
        logprobs_mode: training needs "processed_logprobs".
        max_lora_rank: of the adapters that it takes; 0 if it takes none.
        loads_adapters: while it runs.
        reuses_prefixes: keys and values of earlier requests are kept.
        model_folder: its model's, None if it is a name; read on the server's machine, which is this one.
        device: "cpu", "cuda", ...
        has_our_workers: its workers were extended by `engine/vllm/worker.py`.
        has_own_end_tokens: it knows end tokens of the model that no request names, and withholds them, too, where
            `min_tokens` asks for a longer completion.
        has_tokenizer: it can obey schemas.
    """

    dtype: str
    logprobs_mode: str
    max_lora_rank: int
    loads_adapters: bool
    reuses_prefixes: bool
    model_folder: Path | None
    device: str
    has_our_workers: bool
    has_own_end_tokens: bool
    has_tokenizer: bool


class VllmControl:
    """The server's weights, caches and scheduler. Use it within one event loop, and close it.

    Args:
        url: "http://127.0.0.1:8000", or "unix:/path" of a socket.
        api_key: of the server, which asks for it where adapters are loaded.
        timeout_seconds: for one step; a large model takes minutes to read.

    Every method raises EngineError if the server does not answer, refuses, or contradicts itself afterwards.

    Raises:
        ConfigError: the URL is not this machine's.

    >>> VllmControl("http://10.0.0.7:8000")
    Traceback (most recent call last):
    gspo_gym.errors.ConfigError: http://10.0.0.7:8000: vLLM's control routes have no protection, ...
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_seconds: float = 900.0) -> None:
        # Separate connections, which no queue of samples can block, and a fresh one for each step: one that the server
        # closes meanwhile would lose a step, and no step is tried twice.
        self._client = client_of(
            require_local(address_of(url)), api_key=api_key, timeout_seconds=timeout_seconds, reuses_connections=False
        )

    async def server_info(self) -> ServerInfo:
        """Return the settings that the server was started with.

        Raises:
            RefusedError: it is not in development mode.
            EngineError: it does not answer, or not as vLLM 0.32 does.
        """
        return _server_info(await self._client.get("/server_info", {"config_format": "json"}))

    async def pause(self, mode: PauseMode) -> None:
        """Let requests in flight end ("wait") or freeze them ("keep"). Their caches stay: see `reset_prefix_cache`."""
        await self._client.post("/pause", params={"mode": mode, "clear_cache": "false"})
        # The server answers 200 also to what it does not do.
        if not await self.is_paused():
            raise EngineError("pause: the server says that it is not paused")

    async def resume(self) -> None:
        """Let the scheduler run; fine if it runs."""
        await self._client.post("/resume")
        if await self.is_paused():
            raise EngineError("resume: the server says that it is still paused")

    async def is_paused(self) -> bool:
        """Return whether the scheduler waits."""
        return bool(_member(await self._client.get("/is_paused"), "is_paused", bool))

    async def reload_weights(self, folder: Path, *, has_our_workers: bool) -> None:
        """Read a whole model (transformers layout) into the served one, and drop the caches of older weights.

        `folder` is absolute, and a fresh one each time.

        Raises:
            EngineError: the server may now hold half of the new weights, or keys and values of the old ones.
        """
        await self._client.post(
            # vLLM's method without our workers; ours repacks copies of weights, too.
            "/collective_rpc",
            {"method": RELOAD_METHOD if has_our_workers else "reload_weights", "kwargs": {"weights_path": str(folder)}},
        )
        # Running requests are reset, too: frozen ones are computed again when they go on.
        answer = await self._client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not _member(answer, "success", bool):
            raise EngineError("vLLM kept blocks of its prefix cache that were computed under earlier weights")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter (PEFT layout) under a name that was never used before; `folder` is absolute."""
        # "In place", vLLM 0.32 would read it again at every step.
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": False}
        await self._client.post("/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Forget a name. Requests in flight keep the adapter; its memory is used again for a later one."""
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def set_version(self, label: str) -> None:
        """Name the weights that the server holds; it repeats the name with every token that they sample."""
        await self._client.post("/update_weight_version", {"new_version": label})
        if (found := await self.version()) != label:
            raise EngineError(f"update_weight_version: the server calls its weights {found!r}, expected {label!r}")

    async def version(self) -> str:
        """Return the name of the weights that the server holds; "default" if they were never named."""
        return str(_member(await self._client.get("/weight_info"), "weight_version", str))

    async def checksums(self) -> Mapping[str, str]:
        """Return the sha256 of each tensor by rank and vLLM's name, except digests of nothing, which attest nothing."""
        answer = await self._client.post("/weight_checker", {"action": "checksum"})
        digests = _member(answer, "checksums", dict)
        return {str(name): str(digest) for name, digest in digests.items() if digest != EMPTY_DIGEST}

    async def close(self) -> None:
        """Give the connections back."""
        await self._client.close()


@dataclass(frozen=True, slots=True)
class Address:
    """The place where a server is reached.

    Attributes:
        url: as it was given, without a slash at the end.
        base_url: where requests are sent, over `uds` if that is not None.
        uds: path of a Unix socket.
        is_local: only programs of this machine can be behind it: loopback, or a Unix socket.
    """

    url: str
    base_url: str
    uds: str | None
    is_local: bool


def address_of(url: str) -> Address:
    """Read "http://host:port" or "unix:/absolute/path".

    Raises:
        ConfigError: it is neither.

    >>> address_of("http://127.0.0.1:8000/").is_local, address_of("http://node7:8000").is_local
    (True, False)
    >>> address_of("unix:/run/vllm.sock").uds
    '/run/vllm.sock'
    """
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX)
        if not path.startswith("/"):
            raise ConfigError(f"vLLM server: expected unix:/absolute/path, got {url!r}")
        return Address(url=url, base_url="http://localhost", uds=path, is_local=True)
    parts = urlsplit(url)
    # A path or a query would be dropped by the routes that are appended.
    is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain or parts.path not in ("", "/"):
        raise ConfigError(f"vLLM server: expected http://host:port or unix:/absolute/path, got {url!r}")
    base = url.rstrip("/")
    return Address(url=base, base_url=base, uds=None, is_local=is_loopback(parts.hostname))


def client_of(
    address: Address, *, api_key: str | None, timeout_seconds: float, reuses_connections: bool = True
) -> EngineClient:
    """Return connections to the server at an address; see `HttpClient`."""
    return EngineClient(
        address.base_url,
        uds=address.uds,
        api_key=api_key,
        timeout_seconds=timeout_seconds,
        reuses_connections=reuses_connections,
    )


def require_local(address: Address) -> Address:
    """Return the address, if only programs of this machine are behind it.

    Raises:
        ConfigError: it may be another machine's.
    """
    if not address.is_local:
        raise ConfigError(
            f"{address.url}: vLLM's control routes have no protection, so they are spoken to on loopback (127.0.0.1) "
            "or a Unix socket (unix:/path) only; bring another machine's here with: ssh -L 8000:127.0.0.1:8000 HOST"
        )
    return address


def _server_info(answer: Any) -> ServerInfo:
    config = _member(answer, "vllm_config", dict)
    model = _member(config, "model_config", dict)
    lora = config.get("lora_config") or {}
    folder = Path(_member(model, "model", str))
    return ServerInfo(
        dtype=_member(model, "dtype", str).removeprefix("torch."),
        logprobs_mode=_member(model, "logprobs_mode", str),
        max_lora_rank=int(lora.get("max_lora_rank", 0)),
        loads_adapters=bool(_member(answer, "vllm_env", dict).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")),
        reuses_prefixes=bool(_member(config, "cache_config", dict).get("enable_prefix_caching")),
        model_folder=folder if folder.is_dir() else None,
        device=str((config.get("device_config") or {}).get("device")),
        has_our_workers=_member(config, "parallel_config", dict).get("worker_extension_cls") == WORKER_EXTENSION,
        has_own_end_tokens=_has_own_end_tokens(model),
        has_tokenizer=not model.get("skip_tokenizer_init"),
    )


def _has_own_end_tokens(model: Mapping[str, Any]) -> bool:
    # vLLM takes them from its tokenizer and, unless `--generation-config FOLDER` says otherwise, the model's files.
    return not model.get("skip_tokenizer_init") or model.get("generation_config") in (None, "auto", "vllm")


def _member(value: Any, name: str, kind: type[Any]) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise EngineError(f"vLLM server: expected {name} ({kind.__name__}), got {shorten(value)}")
    return found
