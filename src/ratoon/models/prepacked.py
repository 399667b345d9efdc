"""Linear layers whose weights are laid out once for inference.

On CPUs with oneDNN's bf16 kernels the weight is reordered into oneDNN's own blocked format: faster,
and, with the hint used here, each row's result has the same bits whatever the number of rows.
Elsewhere (Arm, macOS, CUDA, float32) the plain linear is used.
"""

# ruff: noqa: SLF001 - torch offers these operators under private names only

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# With a hint of one row oneDNN picks a format whose kernels reduce in the same order for every
# number of rows; hints of 16 and more pick one that does not from 64 rows on.
ROW_HINT = 1

# Beyond this many rows the kernel blocks, and so sums, in another way; more rows go in pieces.
MAX_ROWS = 128


def prepacking_available() -> bool:
    """Whether this build of torch has the operators and this CPU the bf16 kernels."""
    return bool(
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class PackedLinear:
    """`x [R, in] -> x @ weight.T + bias [R, out]` with a weight copied and reordered once.

    The copy does not follow later changes of `weight`; make a new object after each update
    (0.1 to 0.3 s for 135M parameters).
    """

    __slots__ = ("_bias", "_packed", "_weight")

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
        self._bias = None if bias is None else bias.detach().clone()

    @property
    def bias(self) -> Tensor | None:
        """What is added to each row `[out]`, if anything."""
        return self._bias

    def without_bias(self) -> PackedLinear:
        """The same product of the same packed weight, nothing added."""
        plain: PackedLinear = object.__new__(PackedLinear)
        plain._packed, plain._weight, plain._bias = self._packed, self._weight, None
        return plain

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply the rows of `x`."""
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        if x.shape[0] <= MAX_ROWS:
            return self._multiply(x)
        return torch.cat([self._multiply(piece) for piece in x.split(MAX_ROWS)])

    def _multiply(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product
