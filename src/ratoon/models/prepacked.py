"""Linear layers whose weights are laid out once for inference.

On CPUs with oneDNN's bf16 kernels the weight is reordered into oneDNN's own blocked format: faster,
and, with the hint used here, each row's result has the same bits whatever the number of rows.
Elsewhere the plain linear is used; in float32 on a CPU it gets as many rows as it needs for that.
"""

# ruff: noqa: SLF001 - torch offers these operators under private names only

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# With a hint of one row oneDNN picks a format whose kernels reduce in the same order for every
# number of rows; hints of 16 and more pick one that does not from 64 rows on.
ROW_HINT = 1

# Beyond this many rows the kernel blocks, and so sums, in another way; more rows go in pieces.
MAX_ROWS = 128

# Products with more columns than this are cut by the kernel in ways that differ from width to
# width, so these are tried out; half as many rows help for some widths (3,072), not for all.
_SURE_COLUMNS = 2048
_TRIED_ROWS = (MAX_ROWS, MAX_ROWS // 2)

# MKL sums a float32 product of fewer rows in another order.
EVEN_ROWS = 4


def prepacking_available() -> bool:
    """Whether this build of torch has the operators and this CPU the bf16 kernels."""
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def rows_at_once(num_outputs: int, num_columns: int, row_hint: int = ROW_HINT) -> int:
    """The most rows of one call for which a row has the bits that it has alone.

    `MAX_ROWS` too where no number of rows keeps them; the start-up check then says so.
    """
    if num_columns <= _SURE_COLUMNS:
        return MAX_ROWS
    return _tried_rows(num_outputs, num_columns, row_hint)


@cache
def _tried_rows(num_outputs: int, num_columns: int, row_hint: int) -> int:
    """Tried once for each shape: a tenth of a second for 768 by 3,072."""
    generator = torch.Generator().manual_seed(0)
    half = num_columns // 2
    weight = torch.randn(num_outputs, half, generator=generator).bfloat16()
    x = torch.randn(MAX_ROWS, half, generator=generator).bfloat16()
    # Two halves that nearly cancel lift the last bits of the sums up to where rounding shows them.
    weight = F.pad(torch.cat([weight, weight], dim=1), (0, num_columns - 2 * half))
    x = F.pad(torch.cat([x, x * -(1 - 2**-6)], dim=1), (0, num_columns - 2 * half))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, row_hint)

    def in_pieces(count: int) -> Tensor:
        pieces = x[: MAX_ROWS // count * count].split(count)
        return torch.cat([_multiply(piece, packed, None) for piece in pieces])

    alone = in_pieces(1)
    for most in _TRIED_ROWS:
        counts = (2, 17, most // 2 + 1, most - 1, most)
        if all(torch.equal(y, alone[: len(y)]) for y in map(in_pieces, counts)):
            return most
    return MAX_ROWS


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product


class PackedLinear:
    """`x [R, in] -> x @ weight.T + bias [R, out]` with a weight copied and reordered once.

    The copy does not follow later changes of `weight`; make a new object after each update
    (0.1 to 0.3 s for 135M parameters).
    """

    __slots__ = ("_bias", "_even", "_max_rows", "_packed", "_weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, row_hint: int = ROW_HINT
    ) -> None:
        self._packed = (
            weight.device.type == "cpu"
            and weight.dtype == torch.bfloat16
            and prepacking_available()
        )
        dense = weight.detach().clone(memory_format=torch.contiguous_format)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(dense, row_hint) if self._packed else dense
        )
        self._max_rows = (
            rows_at_once(weight.shape[0], weight.shape[1], row_hint) if self._packed else MAX_ROWS
        )
        # Only float32 sums can be made even by more rows.
        self._even = weight.device.type == "cpu" and weight.dtype == torch.float32
        self._bias = None if bias is None else bias.detach().clone()

    @property
    def bias(self) -> Tensor | None:
        """What is added to each row `[out]`, if anything."""
        return self._bias

    def tensors(self) -> list[Tensor]:
        """What the product reads."""
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def without_bias(self) -> PackedLinear:
        """The same product of the same packed weight, nothing added."""
        plain: PackedLinear = object.__new__(PackedLinear)
        plain._packed, plain._weight, plain._bias = self._packed, self._weight, None
        plain._max_rows, plain._even = self._max_rows, self._even
        return plain

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the rows of `x`."""
        if not (self._packed or self._even):
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] <= self._max_rows:
            return self._multiply(x)
        return torch.cat([self._multiply(piece) for piece in x.split(self._max_rows)])

    def _multiply(self, x: Tensor) -> Tensor:
        if self._packed:
            return _multiply(x, self._weight, self._bias)
        num_rows = x.shape[0]
        if num_rows < EVEN_ROWS:
            x = F.pad(x, (0, 0, 0, EVEN_ROWS - num_rows))
        return F.linear(x, self._weight, self._bias)[:num_rows]
