"""A reference server whose model is shared out over two processes on the CPU.

Pinned here:
1. it scores as one process does, but for rounding: dense, mixtures, heads tied and not, before and after new weights;
2. requests that come together are answered one after the other;
3. what cannot be shared out evenly is refused by name;
4. a rank that dies or hangs ends the server, with words that name it, and no process is left.

The tolerance: a layer's output is the sum of two parts, each rounded on its own, where one process takes the sum in one
go. Each of these sums is off by a few roundings of float32 (2^-24 = 6e-8), relative to terms of order 1, and logprobs
of about -6 come out of some twenty such sums: 20 * 6e-8 * 6 = 7e-6.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GPT2Config, Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM

from gspo_gym.errors import ConfigError, ServiceError
from gspo_gym.learning.batching import TokenBatch
from gspo_gym.learning.head import truncate
from gspo_gym.learning.settings import LoraSettings
from gspo_gym.policy.load import adapt_policy, load_policy, save_policy
from gspo_gym.policy.parallel import parallel_options, require_even_parts
from gspo_gym.policy.reference.client import ReferenceClient, ReferenceProcess
from gspo_gym.policy.reference.wire import ScoringSettings
from gspo_gym.types import Sampling

ROUNDING = 2e-5  # nats: 20 steps of float32 (1.2e-7 each) of a logprob of -8; sums in another order took 20 of -5
PLAIN = ScoringSettings(Sampling(temperature=1.0), 1024)
SETTINGS = [
    PLAIN,
    ScoringSettings(Sampling(temperature=0.7), 3),
    ScoringSettings(Sampling(temperature=1.3, top_k=40, top_p=0.9), 5),
]


def make_batch(seed: int) -> TokenBatch:
    """Two rows of 12 and 7 tokens; what follows the fourth one was sampled."""
    attention_mask = torch.arange(12) < torch.tensor([[12], [7]])
    action_mask = attention_mask & (torch.arange(12) >= 4)
    return TokenBatch(
        token_ids=torch.randint(3, 200, (2, 12), generator=torch.Generator().manual_seed(seed)) * attention_mask,
        attention_mask=attention_mask,
        action_mask=action_mask,
        turn_index=action_mask.long() - 1,
        trajectory_index=torch.arange(2),
        rollout_logprobs=torch.zeros(2, 12),
    )


@torch.no_grad()
def plain_logprobs(model: Any, batch: TokenBatch, settings: ScoringSettings) -> torch.Tensor:
    """What the model's own forward gives in this process, without the code that scores."""
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    logits = logits / settings.sampling.temperature
    targets = batch.token_ids[:, 1:]
    if settings.sampling.is_truncated:
        logits = truncate(logits.flatten(0, 1), targets.flatten(), settings.sampling).view(logits.shape)
    logprobs = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    return torch.cat([torch.zeros(2, 1), logprobs], dim=1).where(batch.action_mask, 0.0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(model: str, log: Path, *more: str) -> Iterator[ReferenceClient]:
    port = free_port()
    arguments = ["--model", model, "--port", str(port), "--tp", "2", "--num-threads", "2", *more]
    process = ReferenceProcess(arguments, log=log)
    client = ReferenceClient(f"http://127.0.0.1:{port}", token=process.token)
    try:
        client.wait_until_healthy(
            max_wait_seconds=120, interval_seconds=0.05, require_alive=process.require_alive, pid=process.pid
        )
        yield client
    finally:
        process.close()


class Fifo:
    """A log that is at its end when the last process that could write it is gone."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self._end, True)

    def read(self) -> str:
        with os.fdopen(self._end) as end:
            return end.read()


def health_of(client: ReferenceClient) -> Mapping[str, Any]:
    health = client.health()
    assert health is not None
    return health


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceClient]:
    """Four heads, two of keys and values; tied embeddings of 263 rows, which two ranks cannot halve."""
    with serving("tiny:qwen3-128@5", tmp_path_factory.mktemp("dense") / "log") as client:
        yield client


@pytest.mark.parametrize("settings", SETTINGS)
def test_two_ranks_score_as_one_process_does(settings: ScoringSettings, dense: ReferenceClient) -> None:
    batch = make_batch(1)
    expected = plain_logprobs(load_policy("tiny:qwen3-128@5").model, batch, settings)
    actual = dense.score(batch, settings)
    assert expected[batch.action_mask].max() < -0.5  # far from where all models agree
    torch.testing.assert_close(actual, expected, rtol=0, atol=ROUNDING)


def test_health_is_that_of_the_whole_model(dense: ReferenceClient) -> None:
    health = health_of(dense)
    whole = sum(parameter.numel() for parameter in load_policy("tiny:qwen3-128").model.parameters())
    assert (health["tp"], health["num_parameters"], health["vocab_size"]) == (2, whole, 263)
    assert health["pid"] == health["pids"][0] != health["pids"][1]


def test_new_weights_reach_both_ranks_and_other_ones_are_refused(dense: ReferenceClient, tmp_path: Path) -> None:
    batch, others = make_batch(2), {}
    for seed in (6, 5):  # the last are those that it had
        others[seed] = load_policy(f"tiny:qwen3-128@{seed}").model
        file = tmp_path / f"{seed}.safetensors"
        save_file({name: p.detach().contiguous() for name, p in others[seed].named_parameters()}, file)
        dense.load(file, seed)
        assert health_of(dense)["version"] == seed
        expected = plain_logprobs(others[seed], batch, PLAIN)
        torch.testing.assert_close(dense.score(batch, PLAIN), expected, rtol=0, atol=ROUNDING)
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ServiceError, match="holds other parameters"):
        dense.load(tmp_path / "other.safetensors", 9)
    with pytest.raises(ServiceError, match=r"ConfigError: LogprobComputer\.temperature"):
        dense.score(batch, ScoringSettings(Sampling(temperature=0.0), 1024))
    assert health_of(dense)["version"] == 5
    torch.testing.assert_close(dense.score(batch, PLAIN), expected, rtol=0, atol=ROUNDING)  # it still serves


def test_requests_that_come_together_get_each_its_own_answer(dense: ReferenceClient) -> None:
    batches = [make_batch(seed) for seed in range(12)]
    alone = [dense.score(batch, PLAIN) for batch in batches]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: dense.score(batch, PLAIN), batches))
    assert all(one.equal(other) for one, other in zip(alone, together, strict=True))
    assert len({one.sum().item() for one in alone}) == 12


@pytest.mark.slow
def test_a_mixture_of_experts_with_a_head_of_its_own_is_shared_out(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=264,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer = load_policy("tiny:qwen3-64").tokenizer
    assert tokenizer.add_tokens(["<|another|>"]) == 1  # as many ids as the model has rows, which halve
    tokenizer.save_pretrained(tmp_path / "model")
    batch = make_batch(3)
    with serving(str(tmp_path / "model"), tmp_path / "log") as client:
        for scale in (1.0, 3.0):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(scale)
            save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, tmp_path / "new")
            client.load(tmp_path / "new", 1)
            for settings in SETTINGS:
                expected = plain_logprobs(model, batch, settings)
                torch.testing.assert_close(client.score(batch, settings), expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen3Config(num_attention_heads=6, num_key_value_heads=2), "Qwen3: num_attention_heads = 6 .* 4 ranks"),
        (Qwen3Config(num_attention_heads=8, num_key_value_heads=2), "Qwen3: num_key_value_heads = 2 .* 4 ranks"),
        (GPT2Config(n_head=4), "GPT2: transformers has no plan"),
    ],
)
def test_models_that_cannot_be_shared_out_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallel_options(config, 4)


@pytest.fixture
def first_of_two() -> Iterator[None]:
    """This process as rank 0 of two, of which there is no other: nothing can be sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("first_of_two")
def test_a_rank_holds_half_of_every_matrix_that_can_be_halved() -> None:
    model = load_policy("tiny:qwen3-128", tp=2).model
    sizes = [(p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()]
    attention = 128 * 128 + 2 * 64 * 128 + 128 * 128  # q, k and v, o
    norms = 2 * 128 + 2 * 32
    assert sum(sizes) == 263 * 128 + 4 * ((attention + 3 * 384 * 128) // 2 + norms) + 128


@pytest.mark.usefixtures("first_of_two")
def test_parts_that_are_not_equal_are_refused_by_name() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layers = {"even": nn.Linear(4, 6, bias=False), "odd": nn.Linear(4, 7, bias=False)}
    for layer in layers.values():
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)], src_data_rank=None))
    require_even_parts(nn.ModuleDict({"even": layers["even"]}))
    with pytest.raises(ConfigError, match=r"odd\.weight \[7, 4\] cannot be shared out evenly over 2 ranks"):
        require_even_parts(nn.ModuleDict(layers))


@pytest.mark.slow
def test_an_adapter_is_not_shared_out(tmp_path: Path) -> None:
    adapted = adapt_policy(load_policy("tiny:qwen3-128"), LoraSettings(r=2), seed=0)
    save_policy(adapted, tmp_path)
    with pytest.raises(ConfigError, match="an adapter or quantized weights cannot be shared out"):
        load_policy(str(tmp_path), tp=2)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_server_which_names_it(tmp_path: Path) -> None:
    log = Fifo(tmp_path / "log")
    with serving("tiny:qwen3-128@5", log.path) as client:
        _, other = health_of(client)["pids"]
        os.kill(other, signal.SIGSTOP)  # so that the request waits for it
        caught: list[str] = []

        def ask() -> None:
            try:
                client.score(make_batch(1), PLAIN)
            except ServiceError as error:
                caught.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        os.kill(other, signal.SIGKILL)
        asking.join(30)
        assert not asking.is_alive()
        assert "does not answer /score" in caught[0]
        assert f"rank 1 (process {other}) has ended with status -9" in log.read()  # so both are gone


@pytest.mark.nightly
def test_a_rank_that_hangs_ends_the_server(tmp_path: Path) -> None:
    log = Fifo(tmp_path / "log")
    with serving("tiny:qwen3-128@5", log.path, "--max-request-s", "1.5") as client:
        client.score(make_batch(1), PLAIN)
        other = health_of(client)["pids"][1]
        os.kill(other, signal.SIGSTOP)
        with pytest.raises(ServiceError, match="does not answer /score"):
            client.score(make_batch(1), PLAIN)
    assert "the ranks were not done after 1.5 seconds" in log.read()


@pytest.mark.nightly
def test_no_rank_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    log, port = Fifo(tmp_path / "log"), free_port()
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from pathlib import Path\n"
            "from gspo_gym.policy.reference.client import ReferenceProcess\n"
            f"_ = ReferenceProcess(['--model', 'tiny:qwen3-128', '--tp', '2', '--port', '{port}'], "
            "log=Path(sys.argv[1])); time.sleep(600)",
            str(log.path),
        ]
    )
    client = ReferenceClient(f"http://127.0.0.1:{port}")
    client.wait_until_healthy(max_wait_seconds=120, interval_seconds=0.05)
    run.kill()
    run.wait()
    log.read()  # comes to an end
    assert client.health() is None
