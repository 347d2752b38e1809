"""From logits to tokens: the distribution that `SamplingParams` describe, and a draw from it by inverse CDF.

One uniform number decides one token, so a request's tokens depend on its seed and logits and on nothing else in the
batch. Pure functions of tensors. B = rows, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MAX_CDF_ELEMENTS = 1 << 24  # 128 MiB of float64 at once; a large vocabulary is drawn from in groups of rows
_FIRST_RANKS = 1024  # top-p usually ends among so many of the largest logits; a flatter row is sorted


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Rows' earlier tokens: `history` [B, L] int64 token ids, repeated to fill a row; `penalty` [B] float32 > 0."""

    history: torch.Tensor
    penalty: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForbiddenTokens:
    """Tokens of probability 0 as pairs: `rows` [F] and `token_ids` [F], int64."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling of each row. None means that no row asks for it, which spares the work.

    Attributes:
        uniforms: [B] float64 in [0, 1).
        temperature: [B] float32 > 0, or None if all are 1.
        is_greedy: [B] bool, or None. Greedy rows have temperature 1 and no truncation here.
        top_k: [B] int64 (0 keeps all), or None.
        top_p: [B] float32 in (0, 1], or None.
        min_p: [B] float32 in [0, 1], or None.
        repetition, forbidden: or None. Greedy rows obey both.
    """

    uniforms: torch.Tensor
    temperature: torch.Tensor | None = None
    is_greedy: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: RepetitionPenalty | None = None
    forbidden: ForbiddenTokens | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token a row: `token_ids` [B] int64, and `logprobs` [B] float32 under the distribution really sampled from.

    A logprob that is not finite says that the row's logits were not.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor


def sample(logits: torch.Tensor, rows: RowSampling) -> SampledTokens:
    """Draw a token for every row of `logits` [B, V], in any floating dtype; computed in float32, the CDF in float64."""
    distribution = sampling_logprobs(logits, rows)
    token_ids = _inverse_cdf(distribution, rows.uniforms)
    # Both are computed, because the rows of a batch may be greedy or not.
    if rows.is_greedy is not None:
        token_ids = torch.where(rows.is_greedy, distribution.argmax(-1), token_ids)
    logprobs = distribution.gather(-1, token_ids[:, None])[:, 0]
    return SampledTokens(token_ids=token_ids, logprobs=logprobs)


def sampling_logprobs(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Return the distribution sampled from: [B, V] float32 log-probabilities, -inf where truncated.

    In vLLM's order: forbidden tokens, repetition penalty, temperature, min-p, top-k, top-p of what those left.
    """
    scaled_logits = logits.float()
    if rows.forbidden is not None:
        scaled_logits = _forbid(scaled_logits, rows.forbidden)
    if rows.repetition is not None:
        scaled_logits = _penalise(scaled_logits, rows.repetition)
    if rows.temperature is not None:
        scaled_logits = scaled_logits / rows.temperature[:, None]
    # Before the truncations by rank: as in vLLM, these act on what min-p leaves.
    if rows.min_p is not None:
        least = scaled_logits.amax(dim=-1) + rows.min_p.log()  # log 0 is -inf: nothing is below it
        scaled_logits = scaled_logits.masked_fill(scaled_logits < least[:, None], float("-inf"))
    if rows.top_k is not None or rows.top_p is not None:
        scaled_logits = _truncate(scaled_logits, rows)
    return torch.log_softmax(scaled_logits, dim=-1)


def _forbid(logits: torch.Tensor, forbidden: ForbiddenTokens) -> torch.Tensor:
    # Stop tokens that the model has no logit for cannot be sampled anyway.
    has_logit = forbidden.token_ids < logits.shape[-1]
    minus_infinity = torch.full((), float("-inf"), device=logits.device)
    return logits.index_put((forbidden.rows[has_logit], forbidden.token_ids[has_logit]), minus_infinity)


def _penalise(logits: torch.Tensor, repetition: RepetitionPenalty) -> torch.Tensor:
    # Each token once, however often it was said: all its places write the same number.
    penalty = repetition.penalty[:, None]
    history_logits = logits.gather(-1, repetition.history)
    return logits.scatter(
        -1, repetition.history, torch.where(history_logits > 0, history_logits / penalty, history_logits * penalty)
    )


def _truncate(scaled_logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    if rows.top_k is not None:
        scaled_logits = _keep_largest(scaled_logits, rows.top_k)
    return scaled_logits if rows.top_p is None else _keep_mass(scaled_logits, rows.top_p)


def _keep_largest(scaled_logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    # From the few largest logits: sorting a large vocabulary takes several times as long as all else in sampling.
    is_limited = (top_k > 0) & (top_k < scaled_logits.shape[-1])
    limit = torch.where(is_limited, top_k, 1)
    largest = scaled_logits.detach().topk(int(limit.max()), dim=-1).values
    return _hide_beyond(scaled_logits, limit, largest.gather(-1, limit[:, None] - 1), is_limited)


def _keep_mass(scaled_logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    constant_logits = scaled_logits.detach()
    # Of the whole row, so that both ways below give the same mass.
    log_total = constant_logits.logsumexp(-1, keepdim=True)
    num_ranks = min(_FIRST_RANKS, scaled_logits.shape[-1])
    largest = constant_logits.topk(num_ranks, dim=-1).values
    limit, mass = _num_within(largest, log_total, top_p)
    least = largest.gather(-1, limit[:, None] - 1)
    # Row by row: the other rows of a batch must not change how a row is sampled.
    flat = ((mass < top_p) & (top_p < 1.0) & (num_ranks < scaled_logits.shape[-1])).nonzero()[:, 0]
    if len(flat):
        largest = constant_logits[flat].sort(dim=-1, descending=True).values
        limit[flat], _ = _num_within(largest, log_total[flat], top_p[flat])
        least[flat] = largest.gather(-1, limit[flat][:, None] - 1)
    # A row that keeps all mass is left alone: its rounded mass may reach 1 before its last tokens.
    return _hide_beyond(scaled_logits, limit, least, (top_p < 1.0) & (limit < scaled_logits.shape[-1]))


def _num_within(
    largest: torch.Tensor, log_total: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many of the largest logits [B, R] top-p keeps, at least one, and the mass of all R."""
    # Not softmax, which is off by 3e-5 at 150,000 logits in float32: a token or two at the end of the mass.
    probs = (largest - log_total).exp_()
    mass = probs.cumsum(dim=-1)
    # The mass before a token and not up to it: the token that crosses top_p is kept.
    num = (mass - probs < top_p[:, None]).sum(dim=-1)
    return num.clamp_(min=1), mass[:, -1]  # one even if a tiny top_p is rounded to 0


def _hide_beyond(
    scaled_logits: torch.Tensor, limit: torch.Tensor, least: torch.Tensor, is_limited: torch.Tensor
) -> torch.Tensor:
    """Hide all but the `limit` [B] largest logits of the limited rows; `least` [B, 1] is the smallest of these."""
    is_hidden = scaled_logits < least  # never true of NaN, which must reach the logprobs
    is_least = scaled_logits == least
    room = limit[:, None] - (scaled_logits > least).sum(dim=-1, keepdim=True)
    if (is_least.sum(dim=-1, keepdim=True) > room).any():
        is_hidden |= is_least & (is_least.cumsum(dim=-1) > room)  # of equal logits, the lower token ids are kept
    return scaled_logits.masked_fill(is_hidden & is_limited[:, None], float("-inf"))


def _inverse_cdf(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    # The first token with a cumulative probability above the row's uniform number, so one of probability 0 is never
    # returned. Rows that hold NaN get an arbitrary valid id.
    rows_at_once = max(1, _MAX_CDF_ELEMENTS // logprobs.shape[-1])
    token_ids = []
    for start in range(0, len(logprobs), rows_at_once):
        rows = slice(start, start + rows_at_once)
        cdf = logprobs[rows].double().exp_().cumsum_(dim=-1)
        total = cdf[:, -1]
        # Scaled by the total, which rounding keeps from being 1; and below it, or the index would be V.
        target = torch.minimum(uniforms[rows] * total, torch.nextafter(total, torch.zeros_like(total)))
        token_ids.append(torch.searchsorted(cdf, target[:, None], right=True)[:, 0])
    return torch.cat(token_ids).clamp_(max=logprobs.shape[-1] - 1)
