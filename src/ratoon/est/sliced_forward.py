"""The forward of a part of a decoder: absent heads, neurons and layers cost nothing.

Rows and columns of weights are gathered and the layers compute with what was gathered, so that
forward and backward are those of a narrower model. Gradients return to the rows they came from.
Scales are folded into the gathered output matrices: biases are added unscaled. No masks exist.

Host-device syncs: none of its own; one copy per index table and draw.

Shape letters: T packed tokens, D width, H query heads, G key/value heads, E head width, M MLP
neurons, U units of a dimension, K of them kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial

from ratoon.est.subnetwork import LayerPart, Shape, Subnetwork
from ratoon.models.decoder import Block, BlockWeights, Decoder
from ratoon.models.document_attention import DocumentPlan, plan_documents
from ratoon.models.fused import block_rows, deliver_grad, sum_dtype
from ratoon.models.packing import PackedBatch

# Columns of fewer entries are added faster row by row than unit by unit: on a CPU, `[768, 3072]` in
# units of 1, 8 and 32 takes 3.0, 1.7 and 3.4 ms instead of 11.1, 5.6 and 2.4.
_NARROW_UNIT = 16


def hidden_states(
    decoder: Decoder, batch: PackedBatch, subnetwork: Subnetwork, *, recompute: bool = False
) -> Tensor:
    """Final-norm states `[T, D]` of the tokens, by a part of the decoder.

    The full subnetwork is the decoder's own forward, bit for bit. With `recompute` layers keep
    their inputs only, and backward computes them a second time.
    """
    if subnetwork.is_full and not recompute:
        return cast(Tensor, decoder(batch)[0])
    run = _Run(decoder, batch, subnetwork, recompute)
    per_sample = any(part and part.sequences is not None for part in subnetwork.layers)
    through = run.by_sequence if per_sample else run.whole
    return cast(Tensor, decoder(batch, through=through)[0])


class _Run:
    """One forward: the tables that its layers share."""

    def __init__(
        self, decoder: Decoder, batch: PackedBatch, subnetwork: Subnetwork, recompute: bool
    ) -> None:
        self.batch = batch
        self.subnetwork = subnetwork
        self.blocks: list[Block] = list(decoder.layers)  # type: ignore[arg-type]
        self.selections = _selections(subnetwork, decoder.config.head_dim, batch.ids.device)
        self.recompute = recompute
        self._decoder = decoder
        self._plans: dict[tuple[int, int, tuple[int, ...]], DocumentPlan] = {}

    def whole(self, x: Tensor) -> Tensor:
        """All tokens through the active layers."""
        rope = self._decoder.rope(self.batch, x.dtype)
        skipped: list[Tensor] = []
        for block, selection in zip(self.blocks, self.selections, strict=True):
            if selection is None:
                skipped += self._skipped_biases(block, x.dtype)
                continue
            x = self._layer(block, selection, _with_biases(x, skipped), rope, self.batch)
            skipped = []
        return _with_biases(x, skipped)

    def by_sequence(self, x: Tensor) -> Tensor:
        """Each layer on its own sequences; the others pass by and nothing of theirs is copied."""
        batch, count = self.batch, self.subnetwork.num_sequences
        if len(batch.lengths) != count or any(parent is not None for parent in batch.parents):
            raise ValueError(
                f"a subnetwork of {count} sequences needs as many documents, none continuing "
                f"another; the batch has {len(batch.lengths)}"
            )
        rope = self._decoder.rope(batch, x.dtype)
        pieces = list(x.split(batch.lengths))
        skipped: list[list[Tensor]] = [[] for _ in pieces]
        everyone = tuple(range(len(pieces)))
        for block, selection in zip(self.blocks, self.selections, strict=True):
            chosen: tuple[int, ...] = ()
            if selection is not None:
                chosen = everyone if selection.sequences is None else selection.sequences
                inputs = [_with_biases(pieces[place], skipped[place]) for place in chosen]
                part = self._some(chosen)
                turned = None if rope is None else _some_rows(rope, batch.lengths, chosen)
                outputs = self._layer(block, selection, torch.cat(inputs), turned, part)
                for place, output in zip(chosen, outputs.split(part.lengths), strict=True):
                    pieces[place], skipped[place] = output, []
            if len(chosen) < len(everyone):
                biases = self._skipped_biases(block, x.dtype)
                for place in set(everyone).difference(chosen):
                    skipped[place] = skipped[place] + biases
        return torch.cat([_with_biases(*both) for both in zip(pieces, skipped, strict=True)])

    def _some(self, chosen: tuple[int, ...]) -> PackedBatch:
        """The batch of some sequences; attention's tables need no more than their lengths."""
        lengths = tuple(self.batch.lengths[place] for place in chosen)
        ids = self.batch.ids[: sum(lengths)]
        return PackedBatch(ids, ids, lengths, (None,) * len(chosen))

    def _layer(
        self,
        block: Block,
        selection: _Selection,
        x: Tensor,
        rope: Tensor | None,
        batch: PackedBatch,
    ) -> Tensor:
        plan = self._plan(selection, batch)
        select = None if selection.is_whole else selection
        if self.recompute and torch.is_grad_enabled():
            return cast(
                Tensor,
                torch.utils.checkpoint.checkpoint(
                    block, x, rope, plan, select, use_reentrant=False, preserve_rng_state=False
                ),
            )
        return cast(Tensor, block(x, rope, plan, select))

    def _plan(self, selection: _Selection, batch: PackedBatch) -> DocumentPlan:
        """Attention's tables: one for each number of heads and each cut into documents."""
        key = (selection.num_heads, selection.num_kv_heads, batch.lengths)
        if key not in self._plans:
            self._plans[key] = plan_documents(batch, *key[:2])
        return self._plans[key]

    def _skipped_biases(self, block: Block, dtype: torch.dtype) -> list[Tensor]:
        """What a token that skips a layer still gets of it."""
        if not self.subnetwork.adds_skipped_biases:
            return []
        weights = block.weights()
        biases = [bias for bias in (weights.out_bias, weights.down_bias) if bias is not None]
        return [_unsharded(bias, dtype) for bias in biases]


@dataclass(frozen=True, slots=True)
class _Selection:
    """A layer's part as index tables. None keeps a dimension as it is."""

    num_heads: int
    num_kv_heads: int
    sequences: tuple[int, ...] | None
    head_dim: int
    neuron_block: int
    # In heads of `qkv [(H + 2 G), E, D]`, and of `out [D, H, E]`.
    qkv_units: Tensor | None
    out_units: Tensor | None
    # In blocks of neurons of `up`, gated or not, and of `down`.
    gated_units: Tensor | None
    neuron_units: Tensor | None
    attention_scale: float
    mlp_scale: float

    @property
    def is_whole(self) -> bool:
        """Whether the layer's weights are taken as they are."""
        units = (self.qkv_units, self.out_units, self.neuron_units)
        scales = (self.attention_scale, self.mlp_scale)
        return all(each is None for each in units) and scales == (1.0, 1.0)

    def __call__(self, weights: BlockWeights) -> BlockWeights:
        """The weights that the layer computes with."""
        gated = weights.up.shape[0] == 2 * weights.down.shape[1]
        up_units = self.gated_units if gated else self.neuron_units
        head, block = self.head_dim, self.neuron_block
        return weights._replace(
            qkv=_taken(weights.qkv, self.qkv_units, 0, head),
            qkv_bias=_taken_bias(weights.qkv_bias, self.qkv_units, head),
            out=_taken(weights.out, self.out_units, 1, head, self.attention_scale),
            up=_taken(weights.up, up_units, 0, block),
            up_bias=_taken_bias(weights.up_bias, up_units, block),
            down=_taken(weights.down, self.neuron_units, 1, block, self.mlp_scale),
        )


@lru_cache(maxsize=16)
def _selections(
    subnetwork: Subnetwork, head_dim: int, device: torch.device
) -> tuple[_Selection | None, ...]:
    """Index tables of a draw, made once; layers with equal parts share them."""
    made: dict[LayerPart, _Selection] = {}
    for part in subnetwork.layers:
        if part is not None and part not in made:
            made[part] = _selection(subnetwork.shape, part, head_dim, device)
    return tuple(None if part is None else made[part] for part in subnetwork.layers)


def _selection(shape: Shape, part: LayerPart, head_dim: int, device: torch.device) -> _Selection:
    num_heads = shape.num_heads if part.heads is None else len(part.heads)
    num_kv_heads = shape.num_kv_heads if part.kv_heads is None else len(part.kv_heads)

    def table(*ranges: Sequence[int]) -> Tensor:
        return torch.tensor(list(itertools.chain(*ranges)), dtype=torch.long).to(device)

    qkv = out = gated = neurons = None
    if part.heads is not None:
        kv = range(shape.num_kv_heads) if part.kv_heads is None else part.kv_heads
        keys = [shape.num_heads + head for head in kv]
        values = [shape.num_heads + shape.num_kv_heads + head for head in kv]
        qkv, out = table(part.heads, keys, values), table(part.heads)
    if part.blocks is not None:
        ups = [shape.num_blocks + block for block in part.blocks]
        gated, neurons = table(part.blocks, ups), table(part.blocks)
    return _Selection(
        num_heads,
        num_kv_heads,
        part.sequences,
        head_dim,
        shape.neuron_block,
        qkv,
        out,
        gated,
        neurons,
        part.attention_scale * part.layer_scale,
        part.mlp_scale * part.layer_scale,
    )


def _some_rows(rope: Tensor, lengths: tuple[int, ...], chosen: tuple[int, ...]) -> Tensor:
    """Columns of `rope [2, T, 1, E]` that belong to some sequences."""
    pieces = rope.split(lengths, dim=1)
    return torch.cat([pieces[place] for place in chosen], dim=1)


def _taken(weight: Tensor, units: Tensor | None, dim: int, size: int, scale: float = 1.0) -> Tensor:
    """Units `units [K]` of `size` entries along `dim`, times `scale`."""
    if units is None and scale == 1.0:
        return weight
    return cast(
        Tensor,
        _Take.apply(weight, units, dim, size, scale),  # type: ignore[no-untyped-call]
    )


def _taken_bias(bias: Tensor | None, units: Tensor | None, size: int) -> Tensor | None:
    return None if bias is None else _taken(bias, units, 0, size)


class _Take(torch.autograd.Function):
    """Gather and scale; backward adds to the rows gathered from, of `main_grad` where it exists."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, units: Tensor | None, dim: int, size: int, scale: float
    ) -> Tensor:
        ctx.weight, ctx.units, ctx.cut = weight, units, (dim, size, scale)
        if units is None:
            return weight * scale
        taken = _in_units(weight, dim, size).index_select(dim, units).flatten(dim, dim + 1)
        return taken if scale == 1.0 else taken.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        weight: Tensor = ctx.weight
        units: Tensor | None = ctx.units
        dim, size, scale = ctx.cut
        target: Tensor | None = getattr(weight, "main_grad", None)
        result = None
        if target is None:
            result = target = torch.zeros_like(weight)
        if units is None:
            target.add_(grad, alpha=scale)
        elif dim == 1 and size < _NARROW_UNIT and target.device.type == "cpu":
            columns = (units[:, None] * size + torch.arange(size)).flatten()
            source = grad.to(target.dtype) if scale == 1.0 else grad.to(target.dtype) * scale
            target.scatter_add_(1, columns.expand(len(target), -1), source)
        else:
            source = _in_units(grad, dim, size).to(target.dtype)
            _in_units(target, dim, size).index_add_(dim, units, source, alpha=scale)
        return result, None, None, None, None


def _in_units(x: Tensor, dim: int, size: int) -> Tensor:
    """A view with `dim` split into `[U, size]`."""
    return cast(Tensor, x.unflatten(dim, (-1, size)))


def _unsharded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A whole bias in `dtype` of one that FSDP2 shards, whose layer is not called; else itself."""
    if not isinstance(bias, DTensor):
        return bias
    return cast(Tensor, _Unsharded.apply(bias, dtype))  # type: ignore[no-untyped-call]


class _Unsharded(torch.autograd.Function):
    """Gathers; backward takes the mean over workers, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, bias: DTensor, dtype: torch.dtype) -> Tensor:
        ctx.bias = bias
        return bias.full_tensor().to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        bias: DTensor = ctx.bias
        mean = grad.to(bias.dtype) / bias.device_mesh.size()
        total = DTensor.from_local(mean, bias.device_mesh, [Partial()], run_check=False)
        return total.redistribute(placements=bias.placements), None


def _with_biases(x: Tensor, biases: Sequence[Tensor]) -> Tensor:
    """`x [T, D]` plus the sum of `biases`, each `[D]`."""
    if not biases:
        return x
    return cast(Tensor, _AddBiases.apply(x, *biases))  # type: ignore[no-untyped-call]


class _AddBiases(torch.autograd.Function):
    """One pass over the rows for any number of biases, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *biases: Tensor) -> Tensor:
        ctx.biases = biases
        total = torch.stack(biases).sum(0, dtype=sum_dtype(x.dtype))
        return x + total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = grad.new_zeros(grad.shape[1], dtype=sum_dtype(grad.dtype))
        for block in grad.split(block_rows(grad)):
            total += block.sum(0, dtype=total.dtype)
        return grad, *(deliver_grad(bias, total) for bias in ctx.biases)
