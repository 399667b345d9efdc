"""Log-probabilities of given tokens, without logits of all tokens in float32.

Each row's log-probability has the bits that the rollout engine's selection gives, provided that the
hidden state has: the same product, the same scaling, the same softmax kernel.

Shape letters: R rows (tokens of the loss), D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ratoon.models.fused import even_product, sum_dtype, transposed
from ratoon.sampling.keyed_noise import COLUMNS

# Rows of one product with the head where no gradient is needed, so that logits fit in memory.
_PRODUCT_ROWS = 1024

# A product with the head has its final bits from this many rows on; see `even_product`.
_EVEN_ROWS = 512

# Rows of one float32 softmax: 1.5 MB at a vocabulary of 49,152, which stays in cache.
_SOFTMAX_ROWS = 8

# Columns of one product for the head's gradient.
_GRAD_COLUMNS = 4096


def token_log_probs(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
) -> Tensor:
    """Natural log-probability of `ids` under softmax(hidden @ head_weight.T / temperature).

    Ids from `vocab_limit` on have probability zero. The gradient with respect to `head_weight`
    goes to its `main_grad` where that is set.

    Shapes: `hidden [R, D]`, `head_weight [V, D]`, `ids [R]` int64; returns `[R]` float32 (float64
    for float64).
    Cost: with gradient, one `[R, V]` buffer in `hidden`'s type, which holds logits, then
    probabilities, and is kept for backward: reading it again is cheaper than multiplying again.
    Host-device syncs: none.
    """
    limit = head_weight.shape[0] if vocab_limit is None else vocab_limit
    if not torch.is_grad_enabled():
        pieces = [
            _forward(piece, head_weight, piece_ids, temperature, limit, keep=False)[0]
            for piece, piece_ids in zip(
                hidden.split(_PRODUCT_ROWS), ids.split(_PRODUCT_ROWS), strict=True
            )
        ]
        return torch.cat(pieces)
    return cast(
        Tensor,
        _TokenLogProbs.apply(hidden, head_weight, ids, temperature, limit),  # type: ignore[no-untyped-call]
    )


def token_log_probs_and_entropies(
    hidden: Tensor,
    head_weight: Tensor,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    vocab_limit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`token_log_probs` with the exact entropy in nats of each row's distribution, both `[R]`.

    Arguments, bits and cost as there; backward reads the buffer once more.
    """
    limit = head_weight.shape[0] if vocab_limit is None else vocab_limit
    both = _TokenLogProbsAndEntropies.apply(hidden, head_weight, ids, temperature, limit)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], both)


class _TokenLogProbs(torch.autograd.Function):
    """d log p(id) / d logits = (onehot(id) - p) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, limit: int
    ) -> Tensor:
        logprobs, probs = _forward(hidden, weight, ids, temperature, limit, keep=True)
        ctx.save_for_backward(hidden, weight, ids, logprobs, probs)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, ids, logprobs, difference = ctx.saved_tensors
        # p - onehot: p(id) - 1 in float32 before rounding, or it is lost for tokens near certainty.
        rows = torch.arange(len(ids), device=ids.device)
        difference[rows, ids] = logprobs.expm1().to(difference.dtype)
        scale = grad.div(-ctx.temperature)[:, None]
        grad_hidden = None
        if ctx.needs_input_grad[0]:
            grad_hidden = (difference @ weight).mul_(scale.to(hidden.dtype))
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_grad(difference, (hidden * scale).to(hidden.dtype), weight)
        return grad_hidden, grad_weight, None, None, None


class _TokenLogProbsAndEntropies(torch.autograd.Function):
    """As `_TokenLogProbs`, and d H / d logits = -p (log p + H) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        entropies = torch.empty(ids.shape, dtype=sum_dtype(hidden.dtype), device=hidden.device)
        logprobs, probs = _forward(
            hidden, weight, ids, temperature, limit, keep=True, entropies=entropies
        )
        ctx.save_for_backward(hidden, weight, ids, logprobs, entropies, probs)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, ids, logprobs, entropies, buffer = ctx.saved_tensors
        blocks = [
            part.split(_SOFTMAX_ROWS)
            for part in (buffer, ids, logprobs, entropies, grad, grad_entropies)
        ]
        for block, block_ids, logp, entropy, to_logp, to_entropy in zip(*blocks, strict=True):
            probs = block.to(logprobs.dtype)
            wide = torch.xlogy(probs, probs).addcmul_(probs, entropy[:, None])
            wide.mul_(-to_entropy[:, None]).addcmul_(probs, -to_logp[:, None])
            at_id = -to_logp * logp.expm1() - to_entropy * logp.exp() * (logp + entropy)
            wide.scatter_(1, block_ids[:, None], at_id[:, None])
            block.copy_(wide.div_(ctx.temperature))
        grad_hidden = buffer @ weight if ctx.needs_input_grad[0] else None
        grad_weight = _weight_grad(buffer, hidden, weight) if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None, None


def _forward(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    limit: int,
    *,
    keep: bool,
    entropies: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[R]` and the `[R, V]` buffer: probabilities if `keep`, else logits.

    `entropies [R]` are written if given.
    """
    dtype = sum_dtype(hidden.dtype)
    buffer = even_product(hidden, weight, _EVEN_ROWS)
    logprobs = torch.empty(ids.shape, dtype=dtype, device=hidden.device)
    # Selection pads its rows to whole columns of noise; as wide here, sums have the same bits.
    width = -(-limit // COLUMNS) * COLUMNS
    rows = min(_SOFTMAX_ROWS, max(1, len(ids)))
    scores = buffer.new_full((rows, width), -torch.inf, dtype=dtype)
    wide = torch.empty_like(scores)
    start = 0
    for logits, block_ids, target in zip(
        buffer.split(rows), ids.split(rows), logprobs.split(rows), strict=True
    ):
        block, out = scores[: len(logits)], wide[: len(logits)]
        block[:, :limit].copy_(logits[:, :limit])
        if temperature != 1.0:
            block.div_(temperature)
        torch.log_softmax(block, dim=-1, out=out)
        target.copy_(out.gather(1, block_ids[:, None])[:, 0])
        if entropies is not None:
            known = out[:, :limit]
            entropies[start : start + len(block)] = -(known.exp() * known).sum(dim=-1)
            start += len(block)
        if keep:
            logits[:, :limit].copy_(out.exp_()[:, :limit])
            logits[:, limit:] = 0
    return logprobs, buffer


def _weight_grad(difference: Tensor, scaled: Tensor, weight: Tensor) -> Tensor | None:
    """`difference [R, V].T @ scaled [R, D]`, column block by column block."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    grad_weight = torch.empty_like(weight) if main_grad is None else None
    left = transposed(scaled)
    for start in range(0, weight.shape[0], _GRAD_COLUMNS):
        columns = slice(start, start + _GRAD_COLUMNS)
        product = transposed(left @ difference[:, columns])
        if main_grad is None:
            assert grad_weight is not None
            grad_weight[columns] = product
        else:
            main_grad[columns].add_(product)
    return grad_weight
