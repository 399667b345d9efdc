"""Building blocks of the training forward, with backward passes written out.

Each does what autograd would, in fewer passes over memory: intermediate values live in blocks of
rows that fit a core's cache, float32 is used inside a block only, and nothing is saved that is
cheap to compute again. All of them work in any floating type and on any device.

Weight gradients go to `weight.main_grad` where that attribute is set (a tensor of the weight's
shape, in the type that gradients are summed in), else to autograd. With `main_grad` the sum over
micro-batches is in float32 though the products are bf16, and costs one pass. The name is
Megatron-LM's.

Shape letters: T packed tokens, D width, M width of the MLP, N outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows at a time on a CPU: a float32 block of width 576 is 300 KB, and three of them fit the L2.
# Narrower blocks hold as many values in more rows, or Python would take longer than the sums.
_BLOCK_ROWS = 128
_BLOCK_VALUES = 128 * 576

# oneDNN sums a bf16 product over more than so many columns in another order for few rows than for
# one row or many.
_ONE_SUM_COLUMNS = 384
_EVEN_ROWS = 1024

# Factors of a weight's gradient, 2,048 tokens long, up to which a transposed copy does not pay.
_NARROW = 512

# What torch's loops over two AVX-512 vectors of bf16 take at once.
_VECTOR_VALUES = 64


def block_rows(x: Tensor) -> int:
    """Rows of `x [T, D]` to treat at once: a cache-sized block on a CPU, all of them elsewhere.

    A compiler makes loops of its own, and would make a copy of its code for each block.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return max(1, x.shape[0])
    return max(_BLOCK_ROWS, _BLOCK_VALUES // x.shape[1])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over values of `dtype` are taken in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def transposed(x: Tensor) -> Tensor:
    """A contiguous copy `[N, T]` of `x [T, N]`, block by block: twice as fast as in one go."""
    out = x.new_empty(x.shape[1], x.shape[0])
    whole = x.device.type != "cpu" or torch.compiler.is_compiling()
    size = max(1, x.shape[0]) if whole else _BLOCK_ROWS
    for source, target in zip(x.split(size), out.split(size, dim=1), strict=True):
        target.copy_(source.t())
    return out


def deliver_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Add `grad` to `weight.main_grad` if there is one; else return it, for autograd to keep."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad.to(weight.dtype)
    main_grad.add_(grad)
    return None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x [T, D] @ weight [N, D].T`, plus `bias [N]`."""
    return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


def even_product(
    x: Tensor, weight: Tensor, even_rows: int = _EVEN_ROWS, bias: Tensor | None = None
) -> Tensor:
    """`x [T, D] @ weight [N, D].T` plus `bias [N]`; in bf16 on a CPU a row's bits ignore T.

    Few rows are computed as many, which is what the rollout engine's prepacked product is equal to.
    """
    num_rows, width = x.shape
    is_even = num_rows >= even_rows or width <= _ONE_SUM_COLUMNS
    if is_even or x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    padded = x.new_zeros(even_rows, width)
    padded[:num_rows] = x
    return F.linear(padded, weight, bias)[:num_rows]


class _Linear(torch.autograd.Function):
    """Linear map; see `even_product` and `_weight_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return even_product(x, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight, bias = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = _weight_grad(grad, x, weight) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, _bias_grad(grad, bias)


def _bias_grad(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    """Deliver the sum `[N]` over the rows of `grad [T, N]`."""
    return None if bias is None else deliver_grad(bias, grad.sum(0))


def _weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Deliver `grad [T, N].T @ x [T, D]`.

    oneDNN's bf16 product with a transposed left factor runs at half speed (0.5 against
    1.0 TFLOP/s on one AMX core); a copy of the narrower factor, transposed, costs a tenth of that,
    but more than it saves where both factors are narrow.
    """
    if x.device.type != "cpu" or max(grad.shape[1], x.shape[1]) <= _NARROW:
        product = grad.t() @ x
    elif grad.shape[1] <= x.shape[1]:
        product = transposed(grad) @ x
    else:
        product = transposed(transposed(x) @ grad)
    return deliver_grad(weight, product)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis; each row has the bits of `F.rms_norm`.

    Source: Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    rows = x.reshape(-1, x.shape[-1])
    normed = cast(Tensor, _RMSNorm.apply(rows, weight, eps))  # type: ignore[no-untyped-call]
    return normed.view(x.shape)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / rms(x); dx = r (g w) - x r^3 mean(g w x), dw = sum of g x r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, size = sum_dtype(x.dtype), block_rows(x)
        wide_weight = weight.to(dtype)
        out = torch.empty_like(x)
        scale = x.new_empty(x.shape[0], 1, dtype=dtype)
        for block, target, block_scale in zip(
            x.split(size), out.split(size), scale.split(size), strict=True
        ):
            wide = block.to(dtype, copy=True)
            torch.mean(wide * wide, dim=-1, keepdim=True, out=block_scale)
            wide.mul_(block_scale.add_(eps).rsqrt_()).mul_(wide_weight)
            target.copy_(wide)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        dtype, size = scale.dtype, block_rows(x)
        wide_weight = weight.to(dtype)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(wide_weight)
        for block, block_grad, block_scale, target in zip(
            x.split(size), grad.split(size), scale.split(size), grad_x.split(size), strict=True
        ):
            wide, wide_grad = block.to(dtype), block_grad.to(dtype, copy=True)
            products = wide * wide_grad
            grad_weight.addmv_(products.t(), block_scale[:, 0])
            mean = torch.mv(products, wide_weight)[:, None].div_(-x.shape[1])
            wide_grad.mul_(wide_weight).addcmul_(wide, mean.mul_(block_scale).mul_(block_scale))
            target.copy_(wide_grad.mul_(block_scale))
        return grad_x, deliver_grad(weight, grad_weight), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm over the last axis; each row has the bits of `F.layer_norm`.

    Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450.
    """
    return cast(Tensor, _LayerNorm.apply(x, weight, bias, eps))  # type: ignore[no-untyped-call]


def layer_norm_dtype(x: Tensor) -> torch.dtype:
    """The type of weights with which torch keeps a layer norm's mean and deviation in float32.

    On a CPU it keeps them in the weights' type; elsewhere always wide, and all types must be equal.
    """
    return sum_dtype(x.dtype) if x.device.type == "cpu" else x.dtype


class _LayerNorm(torch.autograd.Function):
    """torch's kernels; see `layer_norm_dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide_weight, wide_bias = (part.to(layer_norm_dtype(x)) for part in (weight, bias))
        out, mean, scale = torch.native_layer_norm(x, x.shape[-1:], wide_weight, wide_bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        wide_weight, wide_bias = (part.to(layer_norm_dtype(x)) for part in (weight, bias))
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[-1:], mean, scale, wide_weight, wide_bias, [True, True, True]
        )
        return grad_x, deliver_grad(weight, grad_weight), deliver_grad(bias, grad_bias), None


def swiglu_linear(gate_up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`(silu(gate) * up) @ weight [N, M].T` of `gate_up [T, 2 M]`, the two halves side by side.

    Plus `bias [N]`. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    return cast(Tensor, _SwiGLULinear.apply(gate_up, weight, bias))  # type: ignore[no-untyped-call]


class _SwiGLULinear(torch.autograd.Function):
    """Saves `gate_up` and not the product, which backward makes again in passing."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight, bias)
        size = block_rows(gate_up)
        hidden = gate_up.new_empty(gate_up.shape[0], weight.shape[1])
        for block, target in zip(gate_up.split(size), hidden.split(size), strict=True):
            gate, up = block.chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=target)
        return even_product(hidden, weight, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        gate_up, weight, bias = ctx.saved_tensors
        grad_hidden = grad @ weight
        if torch.compiler.is_compiling():
            # It traces no results in parts of a tensor.
            gate, up = gate_up.chunk(2, dim=-1)
            active, grad_active = F.silu(gate), grad_hidden * up
            grad_gate = torch.ops.aten.silu_backward(grad_active, gate)
            grad_gate_up = torch.cat([grad_gate, active * grad_hidden], dim=-1)
            grad_weight = _weight_grad(grad, active * up, weight)
            return grad_gate_up, grad_weight, _bias_grad(grad, bias)
        size = block_rows(gate_up)
        grad_gate_up = torch.empty_like(gate_up)
        for block, hidden, target in zip(
            gate_up.split(size), grad_hidden.split(size), grad_gate_up.split(size), strict=True
        ):
            gate, up = block.chunk(2, dim=-1)
            grad_gate, grad_up = target.chunk(2, dim=-1)
            active = F.silu(gate)
            torch.mul(active, hidden, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(hidden * up, gate, grad_input=grad_gate)
            # From here on the block holds the layer's product, not its gradient.
            torch.mul(active, up, out=hidden)
        return grad_gate_up, _weight_grad(grad, grad_hidden, weight), _bias_grad(grad, bias)


def gelu(x: Tensor) -> Tensor:
    """GELU in the tanh form of `x [T, M]`; a row's bits do not depend on T.

    torch computes the last values of a tensor, beyond whole vectors, by another tanh.
    Source: Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2.
    """
    beyond = -x.shape[-1] % _VECTOR_VALUES
    if beyond == 0:
        return F.gelu(x, approximate="tanh")
    return F.gelu(F.pad(x, (0, beyond)), approximate="tanh")[..., :-beyond]


def gelu_linear(up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`gelu(up [T, M]) @ weight [N, M].T` plus `bias [N]`.

    The activation is kept for backward: its tanh costs more than the memory's way.
    """
    return linear(gelu(up), weight, bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x [..., heads, E]` by `cos, sin [..., 1, E]`, whose two halves are equal.

    Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, in the half-split layout.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _rotated(x, cos, sin, 1)
    return cast(Tensor, _Rotate.apply(x, cos, sin))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    """Rotation; backward rotates the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return out


def embed(ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `ids [T]` of `weight [V, D]`."""
    return cast(Tensor, _Embed.apply(ids, weight))  # type: ignore[no-untyped-call]


class _Embed(torch.autograd.Function):
    """Look-up whose gradient touches the rows looked up only, where there is a `main_grad`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        ids, weight = ctx.saved_tensors
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None:
            main_grad.index_add_(0, ids, grad.to(main_grad.dtype))
            return None, None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype(weight.dtype))
        grad_weight.index_add_(0, ids, grad.to(grad_weight.dtype))
        return None, grad_weight.to(weight.dtype)
