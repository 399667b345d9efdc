"""AdamW over one flat buffer, a cache-sized piece at a time.

A piece's gradient is made wide, scaled, applied, and the new weights copied down, while the piece
is in cache: memory sees each number once, and no wide gradient of the whole buffer exists.
Compiled, all of that is one loop and takes two thirds of the time.

Shape letters: P trainable numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ratoon.errors import ConfigError
from ratoon.models.compiling import has_compiler

MOMENTS = ("exp_avg", "exp_avg_sq")

# Numbers at a time on a CPU: 512 KB of float32, of which a few fit a core's L2.
_PIECE = 1 << 17

_EPSILON = 1e-8


class FlatAdamW:
    """Optimizer of `master [P]` whose results are also written to `compute [P]`, in its dtype.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, in torch's fused kernel or,
    with `compiled`, in a loop that torch.compile makes here and now (`has_compiler` tells whether
    it can). The two agree up to rounding.

    Raises: ConfigError if `compiled` is asked for on a CPU without a compiler.
    """

    def __init__(
        self,
        master: Tensor,
        compute: Tensor,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        compiled: bool = False,
    ) -> None:
        self._master = master
        self._compute = compute
        self._betas = betas
        self._weight_decay = weight_decay
        self._piece = _PIECE if master.device.type == "cpu" else len(master)
        self._scratch = master.new_empty(min(self._piece, len(master)))
        self._step = torch.zeros((), dtype=torch.float32, device=master.device)
        self._moments = {name: torch.zeros_like(master) for name in MOMENTS}
        self._fused: Callable[..., None] | None = None
        self._squares: Callable[[Tensor, torch.dtype], Tensor] | None = None
        if compiled:
            if master.device.type == "cpu" and not has_compiler():
                raise ConfigError(
                    "A compiled drafter optimizer needs a C++ compiler: none is at $CXX or g++. "
                    "Install one, or leave `compiled` off."
                )
            self._fused = torch.compile(_update, dynamic=False)
            self._squares = torch.compile(_sum_of_squares, dynamic=False)
            self._compile()

    @property
    def moments(self) -> dict[str, Tensor]:
        """First and second moment `[P]`, by name; empty before the first step."""
        return dict(self._moments) if self._step > 0 else {}

    def restart(self, step: int) -> dict[str, Tensor]:
        """Count from `step` on with moments of zero, which are returned to be filled."""
        self._step.fill_(step)
        for moment in self._moments.values():
            moment.zero_()
        return dict(self._moments)

    @torch.no_grad()
    def norm(self, gradient: Tensor) -> float:
        """Euclidean norm of `gradient [P]`, summed in the master's dtype."""
        if self._squares is not None:
            return math.sqrt(float(self._squares(gradient, self._master.dtype)))
        parts = [torch.linalg.vector_norm(self._wide(part)) for part in gradient.split(self._piece)]
        return float(torch.linalg.vector_norm(torch.stack(parts)))

    @torch.no_grad()
    def step(self, gradient: Tensor, scale: float, learning_rate: float) -> None:
        """Apply `scale * gradient [P]`; a gradient of the master's dtype is scaled in place."""
        self._step += 1
        buffers = (self._master, *self._moments.values(), gradient, self._compute)
        if self._fused is not None:
            self._fused(*buffers, self._factors(scale, learning_rate), self._betas)
            return
        pieces = zip(*(buffer.split(self._piece) for buffer in buffers), strict=True)
        for master, exp_avg, exp_avg_sq, narrow, compute in pieces:
            # What torch.optim.AdamW(fused=True) calls; its Python costs a tenth of the step here.
            torch._fused_adamw_(
                [master],
                [self._wide(narrow).mul_(scale)],
                [exp_avg],
                [exp_avg_sq],
                [],
                [self._step],
                lr=learning_rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._weight_decay,
                eps=_EPSILON,
                amsgrad=False,
                maximize=False,
            )
            compute.copy_(master)

    @torch.no_grad()
    def _compile(self) -> None:
        """A step that changes nothing: compilation takes seconds, which nobody waits for later."""
        still = torch.zeros_like(self._compute)
        self.norm(still)
        assert self._fused is not None
        factors = self._master.new_tensor([0.0, 1.0, 0.0, 1.0])
        self._fused(
            self._master, *self._moments.values(), still, self._compute, factors, self._betas
        )

    def _factors(self, scale: float, learning_rate: float) -> Tensor:
        """What `_update` multiplies by in this step: a tensor, or it would be compiled anew."""
        biases = [1 - beta ** float(self._step) for beta in self._betas]
        keep = 1 - learning_rate * self._weight_decay
        return self._master.new_tensor(
            [scale, keep, learning_rate / biases[0], 1 / math.sqrt(biases[1])]
        )

    def _wide(self, part: Tensor) -> Tensor:
        """A piece of a gradient in the master's dtype, valid until the next call."""
        if part.dtype == self._master.dtype:
            return part
        return self._scratch[: len(part)].copy_(part)


def _sum_of_squares(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return gradient.to(dtype).square().sum()


def _update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    compute: Tensor,
    factors: Tensor,
    betas: tuple[float, float],
) -> None:
    """One AdamW step in place; `factors` as in `FlatAdamW._factors`."""
    scale, keep, rate, inverse_root = factors.unbind()
    scaled = gradient.to(master.dtype) * scale
    mean = exp_avg + (1 - betas[0]) * (scaled - exp_avg)
    square = betas[1] * exp_avg_sq + (1 - betas[1]) * scaled * scaled
    weights = keep * master - rate * mean / (square.sqrt() * inverse_root + _EPSILON)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    master.copy_(weights)
    compute.copy_(weights)
