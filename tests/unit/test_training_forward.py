"""The training forward's written-out gradients, against autograd on plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.models import fused
from ratoon.models.decoder import Decoder, DecoderConfig, rope_table
from ratoon.models.document_attention import document_attention, plan_documents
from ratoon.models.packing import PackedBatch

CONFIG = DecoderConfig(
    family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8,
)  # fmt: skip


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [3, 300])  # one block of rows, and several
@pytest.mark.parametrize(
    ("block", "plain", "shapes"),
    [
        (fused.linear, F.linear, [(6,), (4, 6)]),
        (fused.linear, F.linear, [(4,), (6, 4)]),
        (
            lambda x, w: fused.rms_norm(x, w, 1e-5),
            lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
            [(6,), (6,)],
        ),
        (
            fused.swiglu_linear,
            lambda x, w: F.linear(F.silu(x[:, :3]) * x[:, 3:], w),
            [(6,), (4, 3)],
        ),
        (
            fused.swiglu_linear,
            lambda x, w, b: F.linear(F.silu(x[:, :3]) * x[:, 3:], w, b),
            [(6,), (4, 3), (4,)],
        ),
        (fused.linear, F.linear, [(6,), (4, 6), (4,)]),
        (
            lambda x, w, b: fused.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
            [(6,), (6,), (6,)],
        ),
        (
            fused.gelu_linear,
            lambda x, w, b: F.linear(F.gelu(x, approximate="tanh"), w, b),
            [(6,), (4, 6), (4,)],
        ),
    ],
)
def test_values_and_gradients_equal_autograd(
    block: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    shapes: Sequence[tuple[int, ...]],
    rows: int,
) -> None:
    torch.manual_seed(0)
    inputs = [_randn(rows, *shapes[0]), *(_randn(*shape) for shape in shapes[1:])]
    ours, theirs = block(*inputs), plain(*inputs)
    weights = torch.randn_like(theirs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for mine, expected in zip(
        torch.autograd.grad(ours, inputs, weights),
        torch.autograd.grad(theirs, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)


def test_rotation_equals_the_complex_product_and_its_gradient_turns_back() -> None:
    torch.manual_seed(0)
    x = _randn(5, 3, 8)
    cos, sin = rope_table(CONFIG, 5, torch.float64).unsqueeze(2)
    rotated = fused.rotate(x, cos, sin)
    turn = torch.complex(cos[..., :4], sin[..., :4])
    expected = torch.view_as_real(torch.complex(x[..., :4], x[..., 4:]) * turn)
    expected = torch.cat([expected[..., 0], expected[..., 1]], dim=-1)
    torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad(y, x, weights) for y in (rotated, expected))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_gradients_are_summed_into_main_grad_in_its_own_type() -> None:
    torch.manual_seed(0)
    ids, weight = torch.tensor([1, 0, 1]), torch.randn(4, 6, dtype=torch.bfloat16)
    weight.requires_grad_().main_grad = torch.zeros(4, 6)  # type: ignore[attr-defined]
    for _ in range(2):
        x = fused.embed(ids, weight)
        fused.linear(x, weight).sum().backward()
    assert weight.grad is None
    plain = weight.detach().float().requires_grad_()
    (2 * F.linear(F.embedding(ids, plain), plain).sum()).backward()
    torch.testing.assert_close(weight.main_grad, plain.grad, rtol=0.02, atol=0.02)  # type: ignore[attr-defined]
    assert weight.main_grad.dtype == torch.float32  # type: ignore[attr-defined]


def _plain_attention(rotary: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    outs = []
    for r, v in zip(rotary.split(lengths), value.split(lengths), strict=True):
        query, key = r.transpose(0, 1).split((4, 2))
        key, v = (x.repeat_interleave(2, 0) for x in (key, v.transpose(0, 1)))
        scores = query @ key.transpose(1, 2) * 8**-0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs).flatten(1)


# 600 tokens make three segments of queries.
@pytest.mark.parametrize("lengths", [[5], [1, 33, 64, 7], [600, 31, 257]])
def test_attention_stays_within_documents_and_has_the_plain_gradient(lengths: list[int]) -> None:
    torch.manual_seed(0)
    rotary, value = _randn(sum(lengths), 6, 8), _randn(sum(lengths), 2, 8)
    plan = plan_documents(PackedBatch.of([[0] * length for length in lengths]), 4, 2)
    ours, theirs = (
        document_attention(rotary, value, plan),
        _plain_attention(rotary, value, lengths),
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    weights = torch.randn_like(theirs)
    for mine, expected in zip(
        torch.autograd.grad(ours, (rotary, value), weights),
        torch.autograd.grad(theirs, (rotary, value), weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-11)


def test_bf16_gradients_of_attention_are_as_close_to_exact_as_rounding_allows() -> None:
    torch.manual_seed(0)
    lengths = [90, 180, 300]
    plan = plan_documents(PackedBatch.of([[0] * length for length in lengths]), 4, 2)
    exact = [(2 * torch.randn(570, n, 8).bfloat16()).double().requires_grad_() for n in (6, 2)]
    rough = [x.detach().bfloat16().requires_grad_() for x in exact]
    weights = torch.randn(570, 32).bfloat16()
    expected = torch.autograd.grad(_plain_attention(*exact, lengths), exact, weights.double())
    found = torch.autograd.grad(document_attention(*rough, plan), rough, weights)
    for mine, gradient in zip(found, expected, strict=True):
        assert float((mine.double() - gradient).norm() / gradient.norm()) < 0.01


def test_documents_do_not_see_each_other_and_taps_are_inputs_of_layers() -> None:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG).double()
    documents = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
    hidden, tapped = decoder(PackedBatch.of(documents), taps=(0, 1))
    alone = [decoder(PackedBatch.of([document]))[0] for document in documents]
    torch.testing.assert_close(hidden, torch.cat(alone), rtol=0, atol=1e-12)
    ids = torch.tensor([token for document in documents for token in document])
    assert torch.equal(tapped[0], F.embedding(ids, decoder.embed_tokens.weight))
    assert tapped[1].shape == hidden.shape


# 300 tokens after a prompt make two segments of queries.
@pytest.mark.parametrize("branches", [[3, 1, 40], [300, 5]])
def test_a_shared_prompt_gives_what_repeating_it_gives(branches: list[int]) -> None:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG).double()
    prompt, other = list(range(7)), [5, 4, 3]
    ends = [torch.randint(0, 61, (length,)).tolist() for length in branches]
    shared = PackedBatch.of([other, prompt, *ends], (None, None, *(1 for _ in ends)))
    repeated = PackedBatch.of([other, *([*prompt, *end] for end in ends)])
    hidden, whole = decoder(shared)[0], decoder(repeated)[0]
    pieces = whole[3:].split([7 + length for length in branches])
    expected = torch.cat([whole[:3], pieces[0][:7], *(piece[7:] for piece in pieces)])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    parameters = list(decoder.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(hidden, parameters, weights),
        torch.autograd.grad(expected, parameters, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("width", [16, 64, 100, 576])
def test_a_rows_bits_do_not_depend_on_the_blocks(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, width).bfloat16(), torch.rand(width).bfloat16()
    gate_up, down = torch.randn(300, 2 * width).bfloat16(), torch.randn(8, width).bfloat16()

    def values() -> list[Tensor]:
        normed, mapped = x.clone().requires_grad_(), gate_up.clone().requires_grad_()
        y = fused.rms_norm(normed, weight.clone().requires_grad_(), 1e-5)
        z = fused.swiglu_linear(mapped, down)
        return [y, z, *torch.autograd.grad([y.float().sum() + z.float().sum()], [normed, mapped])]

    whole = values()
    assert torch.equal(whole[0], F.rms_norm(x, (width,), weight, 1e-5))
    monkeypatch.setattr(fused, "block_rows", lambda x: 37)
    assert all(map(torch.equal, values(), whole))


@pytest.mark.parametrize("width", [20, 64, 96])
def test_a_rows_gelu_does_not_depend_on_the_rows_beside_it(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, width).bfloat16() * 2
    alone = torch.cat([fused.gelu(row) for row in x.split(1)])
    assert torch.equal(fused.gelu(x), alone)
