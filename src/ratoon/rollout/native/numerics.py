"""Do logits keep their bits whatever else is in the batch? Proved on the machine at hand.

Speculation changes how many rows a forward pass has. With kernels that sum in the same order for
every number of rows, speculative and plain decoding give the same bits and so the same tokens;
elsewhere near-ties may flip, and the engine says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.models.kv_cache import KVCache, attention_width
from ratoon.models.prepacked import PackedLinear
from ratoon.rollout.native.forward import InferenceModel, attend, attention_mask

ROW_COUNTS = (2, 3, 8, 16, 17, 33, 64, 127, 128, 129, 256)
BATCHES = ((3, 1), (3, 5), (16, 8), (2, 70))
# Attention kernels block by the number of query rows, of which a prefill has many.
PREFILLS = ((1, 128), (1, 512))
NUM_COMPARED = 8
NUM_ALONE = 33
MAX_ORTHOGONAL = 512
# How much smaller, as a share, a value is than the one that it nearly cancels.
CANCELLING = 1 - 2**-6


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """What the start-up check found. `failures` names the cases whose bits differed."""

    cases: int
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all cases kept their bits."""
        return not self.failures


@torch.inference_mode()
def check_invariance(model: InferenceModel) -> InvarianceReport:
    """Compare each weight shape over row counts, attention over batches, and whole forwards.

    Sums in another order differ in the last bits of float32, and hardly ever round to another
    bf16: one product in 20,000. So most of what is summed here cancels, which lifts those bits up:
    one in 50 differs.

    Cost: about three seconds for a model of 135M parameters; rows and tokens are random.
    """
    cases, failures = 0, []
    checks = (*_check_linears(model), *_check_attention(model), *_check_batches(model))
    for name, same in checks:
        cases += 1
        if not same:
            failures.append(name)
    return InvarianceReport(cases, tuple(failures))


def _check_linears(model: InferenceModel) -> Iterator[tuple[str, bool]]:
    generator = torch.Generator().manual_seed(0)
    for name, linear, width in model.linears():
        x = _cancelling_rows(model, linear, width, generator)
        alone = torch.cat([linear(row) for row in x[:NUM_ALONE].split(1)])
        for count in ROW_COUNTS:
            rows = torch.roll(x[:count], count // 2, 0)
            back = torch.roll(linear(rows), -(count // 2), 0)
            shown = min(count, NUM_ALONE)
            yield f"{name} with {count} rows", torch.equal(back[:shown], alone[:shown])


def _cancelling_rows(
    model: InferenceModel, linear: PackedLinear, width: int, generator: torch.Generator
) -> Tensor:
    """Rows, the most that are needed, whose products with many of the weight's rows nearly vanish.

    They are orthogonal to these but for their rounding to the model's type; a bias is cancelled by
    one more row, so that it does not hide the bits that it is added to.
    """
    device = model.embedding.device
    weight = linear.without_bias()(torch.eye(width, dtype=model.dtype, device=device)).t()
    chosen = torch.randperm(len(weight), generator=generator)[: min(width // 2, MAX_ORTHOGONAL)]
    chosen = chosen.to(device)
    basis, triangle = torch.linalg.qr(weight[chosen].float().t())
    x = torch.randn(max(ROW_COUNTS), width, generator=generator).to(device)
    x -= (x @ basis) @ basis.t()
    if linear.bias is not None:
        against = linear.bias[chosen].float()[:, None]
        x -= (basis @ torch.linalg.solve_triangular(triangle.t(), against, upper=False)).t()
    return x.to(model.dtype)


def _check_attention(model: InferenceModel) -> Iterator[tuple[str, bool]]:
    """The last row of a batch against its tokens one by one; values of distant keys cancel."""
    generator = torch.Generator().manual_seed(2)
    device, config = model.embedding.device, model.config
    half, context = 90, 180
    for num_rows, num_new in (*BATCHES, *PREFILLS):
        longest = attention_width(2 * context + num_new, model.dtype)
        shape = (num_rows, config.num_kv_heads, longest, config.head_dim)
        keys, values = torch.randn(2, *shape, generator=generator).to(device, model.dtype)
        keys[:, :, half:context] = keys[:, :, :half]
        values[:, :, half:context] = values[:, :, :half] * -CANCELLING
        shape = (num_rows, num_new, config.num_heads, config.head_dim)
        query = torch.randn(shape, generator=generator).to(device, model.dtype)
        lengths = [(37 * row) % (2 * context) + 1 for row in range(num_rows - 1)] + [context]
        together = _attend_chain(query, keys, values, lengths)[-1]
        alone = [
            _attend_chain(query[-1:, n : n + 1], keys[-1:], values[-1:], [context + n])[0, 0]
            for n in range(num_new)
        ]
        name = f"attention of {num_rows} rows with {num_new} new tokens each"
        yield name, torch.equal(together, torch.stack(alone))


def _attend_chain(query: Tensor, keys: Tensor, values: Tensor, lengths: list[int]) -> Tensor:
    """Attention `[B, N, H, E]` of `query [B, N, H, E]` over the first columns of each row."""
    num_new = query.shape[1]
    width = attention_width(max(lengths) + num_new, query.dtype)
    group = query.shape[2] // keys.shape[1]
    chain = torch.ones(num_new, num_new, dtype=torch.bool, device=query.device).tril()
    starts = torch.tensor(lengths, device=query.device)
    mask = attention_mask(starts, chain.expand(len(lengths), -1, -1), width, group, query.dtype)
    return attend(query.flatten(0, 1), keys[:, :, :width], values[:, :, :width], mask, group)


def _check_batches(model: InferenceModel) -> Iterator[tuple[str, bool]]:
    """The last row of a ragged batch against the same tokens decoded one by one, alone."""
    generator = torch.Generator().manual_seed(1)
    num_slots = max(rows for rows, _ in BATCHES)
    longest = max(new for _, new in BATCHES)
    context = min(180, model.num_positions // 2 - longest)
    if context < 1:
        return
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary, (num_slots, context + longest), generator=generator)
    tokens = tokens.to(model.embedding.device)
    alone = model.make_cache(1, context + longest)
    decode(model, alone, tokens[:1, :context], [0])
    expected = torch.cat(
        [
            decode(model, alone, tokens[:1, i : i + 1], [i])[0]
            for i in range(context, context + NUM_COMPARED)
        ]
    )
    for num_rows, num_new in BATCHES:
        cache = model.make_cache(num_rows, 2 * context + longest)
        lengths = [(37 * row) % (2 * context - 1) + 1 for row in range(num_rows - 1)] + [context]
        cache.data[:, :, num_rows - 1, :context] = alone.data[:, :, 0, :context]
        new = tokens[:num_rows, :num_new].clone()
        new[-1] = tokens[0, context : context + num_new]
        logits = decode(model, cache, new, lengths)[-1, :NUM_COMPARED]
        name = f"a batch of {num_rows} rows with {num_new} new tokens each"
        yield name, torch.equal(logits, expected[:num_new])


def decode(
    model: InferenceModel,
    cache: KVCache,
    tokens: Tensor,
    lengths: list[int],
    ancestors: Tensor | None = None,
) -> Tensor:
    """Logits `[B, N, V]` of new tokens `[B, N]` behind `lengths` cached ones.

    The new tokens form a chain, or the tree of `ancestors [N, N]` (ancestor or self).
    """
    num_rows, num_new = tokens.shape
    device = tokens.device
    starts = torch.tensor(lengths, device=device)
    if ancestors is None:
        ancestors = torch.ones(num_new, num_new, dtype=torch.bool, device=device).tril()
    group = model.config.num_heads // model.config.num_kv_heads
    width = attention_width(max(lengths) + num_new, model.dtype)
    mask = attention_mask(starts, ancestors.expand(num_rows, -1, -1), width, group, model.dtype)
    positions = starts[:, None] + ancestors.sum(1) - 1
    slots = torch.arange(num_rows, device=device)[:, None] * cache.num_positions
    entries = slots + starts[:, None] + torch.arange(num_new, device=device)
    hidden, _ = model.forward(tokens, positions, entries.reshape(-1), mask, cache)
    return model.logits(hidden).view(num_rows, num_new, -1)
