from __future__ import annotations

import math

import pytest
import torch

from gspo_gym.engine.local.sampling import RowSampling, sampling_logprobs
from gspo_gym.errors import ConfigError
from gspo_gym.learning.head import truncate
from gspo_gym.learning.logprobs import LogprobComputer
from gspo_gym.types import Sampling

HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()


def probabilities(sampling, target, logits=HALVES):
    kept = truncate(logits.expand(1, -1), torch.tensor([target]), sampling)
    return [round(p, 12) for p in kept.softmax(-1)[0].tolist()]


def test_top_k_keeps_the_likeliest_and_the_lower_id_of_equals():
    assert probabilities(Sampling(top_k=2), 0) == [round(2 / 3, 12), round(1 / 3, 12), 0, 0]
    assert probabilities(Sampling(top_k=3), 0) == [round(4 / 7, 12), round(2 / 7, 12), round(1 / 7, 12), 0]


def test_top_p_keeps_the_token_that_reaches_it():
    assert probabilities(Sampling(top_p=0.5), 0) == [1, 0, 0, 0]
    assert probabilities(Sampling(top_p=0.51), 0) == [round(2 / 3, 12), round(1 / 3, 12), 0, 0]
    assert probabilities(Sampling(top_p=1e-9), 0) == [1, 0, 0, 0], "the likeliest is always kept"
    assert probabilities(Sampling(top_p=0.5), 0, logits=torch.zeros(1, 2)) == [1, 0], "exactly a half is enough"


def test_top_p_of_a_large_vocabulary_keeps_what_the_engine_keeps_and_float64_says():
    # in float32 softmax is off by 3e-5 at this size, the mass of one token more than the share allows
    logits = 4 * torch.randn(1, 151936, generator=torch.Generator().manual_seed(0))
    mass = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    expected = int((mass < 0.95).sum()) + 1
    learner = truncate(logits, logits.argmax(-1), Sampling(top_p=0.95))
    engine = sampling_logprobs(logits, RowSampling(torch.tensor([0.5]), top_p=torch.tensor([0.95])))
    assert [int(kept.isfinite().sum()) for kept in (learner, engine)] == [expected, expected]


def test_top_p_is_of_what_top_k_left():
    # of the two, the first has 2/3, which reaches 0.6; of all four it has 1/2, which does not
    assert probabilities(Sampling(top_k=2, top_p=0.6), 0) == [1, 0, 0, 0]


def test_min_p_is_a_share_of_the_likeliest():
    # 0.25 is half of 0.5 (kept at 0.49), 0.125 a quarter
    assert probabilities(Sampling(min_p=0.49), 0) == [round(2 / 3, 12), round(1 / 3, 12), 0, 0]
    assert probabilities(Sampling(min_p=0.24), 0) == [0.5, 0.25, 0.125, 0.125]
    assert probabilities(Sampling(min_p=1.0), 3) == [0.8, 0, 0, 0.2], "the likeliest has all of its own probability"


def test_top_p_is_of_what_min_p_left():
    # without the eighths, the first has 2/3
    assert probabilities(Sampling(min_p=0.3, top_p=0.6), 0) == [1, 0, 0, 0]


def test_the_sampled_token_is_kept_in_any_case():
    # 1/2 and the sampled 1/8 remain: 4/5 and 1/5
    assert probabilities(Sampling(top_k=1), 3) == [0.8, 0, 0, 0.2]


@pytest.mark.parametrize(
    "setting", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"min_p": 0.02, "top_k": 20, "top_p": 0.7}]
)
def test_the_learner_scores_what_the_engine_samples_from(setting):
    """Logits with ties, at a temperature; for every token that the engine may sample, the two logprobs agree."""
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(50, 61, generator=generator)).round(decimals=1)
    rows = RowSampling(
        uniforms=torch.zeros(50, dtype=torch.float64),
        temperature=torch.full((50,), 0.7),
        min_p=torch.full((50,), setting.get("min_p", 0.0)),
        top_k=torch.full((50,), setting.get("top_k", 0)),
        top_p=torch.full((50,), setting.get("top_p", 1.0)),
    )
    expected = sampling_logprobs(logits, rows)
    for token in range(61):
        targets = torch.full((50,), token)
        scored = truncate(logits / 0.7, targets, Sampling(**setting)).log_softmax(-1)[:, token]
        may_sample = expected[:, token].isfinite()
        torch.testing.assert_close(scored[may_sample], expected[:, token][may_sample], rtol=0, atol=1e-6)


def test_logprobs_entropy_and_gradients_are_those_of_the_truncated_softmax(make_model):
    """A model with a head that is read off: uniform over 61 tokens, so top-k keeps ids 0 to 9 and the sampled one."""
    model = make_model(dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    token_ids = torch.tensor([[5, 3, 40]])
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    sampled = torch.tensor([[False, True, True]])
    computer = LogprobComputer(model, sampling=Sampling(top_k=10), entropy_has_gradient=True)
    scores = computer.compute(token_ids, everywhere, sampled)
    assert scores.logprobs[0].tolist() == pytest.approx([0, -math.log(10), -math.log(11)])
    assert scores.entropy[0].tolist() == pytest.approx([0, math.log(10), math.log(11)])
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    moved = model.lm_head.weight.grad.abs().sum(1).nonzero().squeeze(1).tolist()
    assert moved == [*range(10), 40], "a truncated token has no gradient, and none is NaN"


def test_truncation_that_keeps_all_is_the_whole_softmax(make_model):
    model = make_model()
    ids, everywhere = torch.tensor([[5, 3, 40]]), torch.ones(1, 3, dtype=torch.bool)
    sampled = torch.tensor([[False, True, True]])
    plain, same = (LogprobComputer(model, sampling=t).compute(ids, everywhere, sampled) for t in (None, Sampling()))
    assert torch.equal(plain.logprobs, same.logprobs)
    assert not Sampling().is_truncated
    assert all(Sampling(**setting).is_truncated for setting in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}))


def test_a_top_p_of_one_keeps_what_is_too_unlikely_to_count():
    """In float32 the first of the two has all the probability, and the second is kept all the same."""
    kept = truncate(torch.tensor([[0.0, -200.0, -300.0]]), torch.tensor([0]), Sampling(top_k=2))
    assert kept.tolist() == [[0.0, -200.0, -math.inf]]


@pytest.mark.parametrize("setting", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 1.1}])
def test_values_out_of_range_are_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Sampling(**setting)


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_the_entropys_gradient_is_that_of_its_definition(make_model, num_tokens):
    """dH/dz_v = -p_v (log p_v + H), brought to the head's weights by the hidden state; H from full logits."""
    model = make_model(dtype=torch.float64)
    ids, everywhere = torch.tensor([[5, 3, 40, 7]]), torch.ones(1, 4, dtype=torch.bool)
    sampled = torch.tensor([[False, True, False, True]])
    computer = LogprobComputer(model, logits_bytes=num_tokens * 2 * 8 * 61, entropy_has_gradient=True)
    computer.compute(ids, everywhere, sampled).entropy.sum().backward()
    output = model(input_ids=ids, output_hidden_states=True)
    expected = torch.zeros_like(model.lm_head.weight)
    for t in (0, 2):
        logp = output.logits[0, t].detach().log_softmax(-1)
        entropy = -(logp.exp() * logp).sum()
        expected += (-logp.exp() * (logp + entropy))[:, None] * output.hidden_states[-1][0, t].detach()
    # hidden states pass through float32 norms and rotary angles in transformers
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=0, atol=1e-6)
