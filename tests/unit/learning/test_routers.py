from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gspo_gym.errors import ConfigError
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.learning.settings import LossSettings, OptimizerSettings, UpdateSettings
from gspo_gym.learning.supervised import RouterLoad, Routers, find_routers
from gspo_gym.learning.update import Learner

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def identity_router():
    """A router whose logits are its input."""
    router = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    return router


def watch(router, hidden, mask, top_k=1):
    load = RouterLoad(Routers((router,), 4, top_k))
    with load.watching(mask):
        router(hidden)
    return load


def test_load_idle_experts_and_entropy_by_hand():
    """Four tokens, the last of them padding; the first three choose experts 0, 0 and 1, with logits ln 2 and 0."""
    logits = torch.tensor([[[math.log(3), 0, 0, 0], [math.log(3), 0, 0, 0]], [[0, math.log(3), 0, 0], [0, 0, 0, 9.0]]])
    metrics = watch(identity_router(), logits, torch.tensor([[True, True], [True, False]])).metrics()
    # loads 2, 1, 0, 0: the busiest has 2, the mean is 3/4; two of four idle
    assert metrics["router/load_max_over_mean"] == pytest.approx(2 / 0.75)
    assert metrics["router/idle_fraction"] == 0.5
    # each token's distribution is 1/2, 1/6, 1/6, 1/6
    assert metrics["router/entropy"] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(6), rel=1e-6)


def test_layers_are_averaged_and_passes_added():
    even, narrow = identity_router(), identity_router()
    load = RouterLoad(Routers((even, narrow), 4, 1))
    for k in range(4):
        with load.watching(torch.tensor([[True]])):
            even(torch.eye(4)[k].reshape(1, 1, 4))
            narrow(torch.eye(4)[0].reshape(1, 1, 4))
    metrics = load.metrics()
    assert metrics["router/load_max_over_mean"] == pytest.approx((1 + 4) / 2)
    assert metrics["router/idle_fraction"] == pytest.approx((0 + 3) / 8)


def test_outside_nothing_is_counted():
    router = identity_router()
    load = watch(router, torch.eye(4)[None, :1], torch.tensor([[True]]))
    before = load.metrics()
    router(torch.ones(1, 8, 4))
    assert load.metrics() == before
    assert not router._forward_hooks


def test_a_model_of_experts_is_watched_through_the_scorer(make_model):
    """The experts that its own routers name, whose output says which they chose."""
    model = make_model("qwen3_moe", **EXPERTS)
    routers = find_routers(model)
    assert (len(routers.modules), routers.num_experts, routers.top_k) == (2, 4, 2)
    chosen = []
    for router in routers.modules:
        router.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    attention = torch.arange(9) < torch.tensor([[9], [6]])
    sampled = attention.clone()
    sampled[:, 0] = False
    computer = LogprobComputer(model)
    chosen.clear()  # of the probe
    load = RouterLoad(routers)
    with load.watching(attention[:, :-1]):
        scores = computer.compute(ids, attention, sampled)
    scores.logprobs.sum().backward()
    is_token = attention[:, :-1].reshape(-1)
    counts = [torch.bincount(layer[is_token].reshape(-1), minlength=4).double() for layer in chosen]
    assert [int(layer.sum()) for layer in counts] == [2 * (8 + 6)] * 2
    expected = sum(float(layer.max() / layer.mean()) for layer in counts) / 2
    assert load.metrics()["router/load_max_over_mean"] == pytest.approx(expected)
    assert 0 < load.metrics()["router/entropy"] <= math.log(4)


def test_gradient_checkpointing_counts_no_token_twice(make_model):
    model = make_model("qwen3_moe", **EXPERTS)
    ids, everywhere = torch.full((1, 6), 7), torch.ones(1, 6, dtype=torch.bool)
    sampled = torch.tensor([[False] + [True] * 5])
    found = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        computer, load = LogprobComputer(model), RouterLoad(find_routers(model))
        with load.watching(everywhere[:, :-1]):
            scores = computer.compute(ids, everywhere, sampled)
        scores.logprobs.sum().backward()
        found.append(load.metrics())
    assert found[0] == pytest.approx(found[1])


def test_a_learner_of_experts_computes_rows_and_says_so_where_it_is_told_to_share(make_model):
    def make_learner(wanted):
        model = make_model("qwen3_moe", **EXPERTS)
        update = UpdateSettings(learning_rate=1e-3, share_prefixes=wanted)
        return Learner(model, optimizer=OptimizerSettings(), loss=LossSettings(), update=update)

    rows = torch.full((3, 4), 7)
    assert make_learner("auto")._computer.prefixes.shared(rows, rows > 0) is None
    with pytest.raises(ConfigError, match=r"training\.share_prefixes: the load of this model's routers"):
        make_learner(True)


def test_a_dense_model_has_no_routers(make_model):
    load = RouterLoad(find_routers(make_model()))
    with load.watching(torch.tensor([[True]])):
        pass
    assert load.metrics() == {}
    routers = find_routers(nn.Linear(2, 2))
    assert (routers.modules, routers.num_experts, routers.top_k) == ((), 0, 0)


def test_routers_are_known_by_their_name_and_by_a_logit_for_each_expert():
    class Model(nn.Module):
        def __init__(self, **config):
            super().__init__()
            self.config = SimpleNamespace(**config)
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleDict({"router": nn.Linear(8, 4, bias=False), "gate": nn.SiLU()})
            self.head = nn.Linear(8, 4)
            self.attention = nn.ModuleDict({"gate": nn.LayerNorm(4), "router": nn.Linear(4, 8)})

    model = Model(n_routed_experts=4, num_experts_per_tok=2)
    routers = find_routers(model)
    assert (routers.modules, routers.num_experts, routers.top_k) == ((model.gate, model.experts["router"]), 4, 2)
    for config in ({"num_experts": 4}, {"num_experts_per_tok": 2}):
        assert find_routers(Model(**config)).modules == ()
