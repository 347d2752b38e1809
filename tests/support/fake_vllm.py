"""vLLM without vLLM: the part of its interface that `VllmEngine` uses, on a forward pass of transformers.

A test puts it into `sys.modules` under the names of `MODULES`; a program imports a copy that is named `vllm.py`.
`AsyncLLM.collective_rpc`, by which new weights are read, may be replaced to fail or to hang.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class AsyncEngineArgs(SimpleNamespace):
    """Settings by name."""


class SamplingParams(SimpleNamespace):
    """Settings of one request by name."""


def tokens_input(prompt: list[int], *, cache_salt: str) -> list[int]:
    assert cache_salt
    return prompt


class AsyncLLM:
    """Samples token by token; requests in flight take new weights over."""

    def __init__(self, args: Any) -> None:
        self._load(args.model)
        self.model_config = SimpleNamespace(get_vocab_size=lambda: self.model.config.vocab_size)
        self.input_processor = SimpleNamespace(generation_config_fields={})
        self.output_handler = asyncio.get_running_loop().create_task(asyncio.Event().wait())
        self.errored = False
        self.version = ""

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs) -> AsyncLLM:
        return cls(args)

    async def generate(self, prompt: list[int], params: Any, request_id: str, **_: Any) -> AsyncIterator[Any]:
        assert request_id
        rng, ids, logprobs = torch.Generator().manual_seed(params.seed), list[int](), list[float]()
        while len(ids) < params.max_tokens and not (ids and ids[-1] in params.stop_token_ids):
            with torch.no_grad():
                logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            for token, bias in getattr(params, "logit_bias", {}).items():
                logits[token] += bias
            now = torch.log_softmax(logits / (params.temperature or 1.0), -1)
            ids.append(int(torch.multinomial(now.exp(), 1, generator=rng) if params.temperature else now.argmax()))
            logprobs.append(float(now[ids[-1]]))
            await asyncio.sleep(0)
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=ids,
                    logprobs=SimpleNamespace(token_ids=ids, logprobs=logprobs),
                    finish_reason="stop" if ids[-1] in params.stop_token_ids else "length",
                    weight_versions=[SimpleNamespace(version=self.version, start=0, end=len(ids))],
                )
            ]
        )

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_whole_model"
        self._load(kwargs["weights_path"])

    async def update_weight_version(self, version: str) -> None:
        self.version = version

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        return reset_running_requests

    async def compute_weight_checksums(self) -> list[dict[str, str]]:
        return []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    def shutdown(self, _: float) -> None: ...

    def _load(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


RequestOutputKind = SimpleNamespace(FINAL_ONLY=None)
StructuredOutputsParams = dict
# The modules that the names above are imported from.
MODULES = ("vllm", "vllm.inputs", "vllm.sampling_params", "vllm.v1.engine.async_llm")
if __name__ == "vllm":
    sys.modules |= dict.fromkeys(MODULES, sys.modules[__name__])
