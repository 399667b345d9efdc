"""Attention of sequences of one length is that of documents, bit for bit forward."""

from __future__ import annotations

import pytest
import torch

from ratoon.models.document_attention import document_attention, plan_documents
from ratoon.models.packing import PackedBatch


@pytest.mark.parametrize("length", [32, 256, 288])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float64, 1e-13)])
def test_sequences_attend_as_documents_do(
    length: int, heads: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """A short document more makes the other path compute the same sequences."""
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    width, count, more = 16, 2, 5
    tokens = count * length + more
    rotary = torch.randn(tokens, num_heads + num_kv_heads, width, dtype=dtype)
    value = torch.randn(tokens, num_kv_heads, width, dtype=dtype)
    grad = torch.randn(tokens, num_heads * width, dtype=dtype)
    grad[count * length :] = 0
    found = []
    for lengths in ([length] * count, [length] * count + [more]):
        plan = plan_documents(PackedBatch.of([[0] * each for each in lengths]), *heads)
        assert (plan.length is None) == (more in lengths)
        inputs = [x[: sum(lengths)].clone().requires_grad_() for x in (rotary, value)]
        out = document_attention(*inputs, plan)
        grads = torch.autograd.grad(out, inputs, grad[: sum(lengths)])
        found.append([x[: count * length] for x in (out, *grads)])
    for place, (one, other) in enumerate(zip(*found, strict=True)):
        if place == 0:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
