"""AdamW over one flat buffer, a cache-sized piece at a time.

A piece's gradient is made wide, scaled, applied, and the new weights copied down, while the piece
is in cache: memory sees each number once, and no wide gradient of the whole buffer exists.

Shape letters: P trainable numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

# Numbers at a time on a CPU: 512 KB of float32, of which a few fit a core's L2.
_PIECE = 1 << 17


class FlatAdamW:
    """Optimizer of `master [P]` whose results are also written to `compute [P]`, in its dtype.

    Source: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, in torch's fused kernel.
    """

    def __init__(
        self, master: Tensor, compute: Tensor, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._master = master
        self._compute = compute
        self._betas = betas
        self._weight_decay = weight_decay
        self._piece = _PIECE if master.device.type == "cpu" else len(master)
        self._scratch = master.new_empty(min(self._piece, len(master)))
        self._step = torch.zeros((), dtype=torch.float32, device=master.device)
        self._moments = {name: torch.zeros_like(master) for name in MOMENTS}

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

    def norm(self, gradient: Tensor) -> float:
        """Euclidean norm of `gradient [P]`, summed in the master's dtype."""
        parts = [torch.linalg.vector_norm(self._wide(part)) for part in gradient.split(self._piece)]
        return float(torch.linalg.vector_norm(torch.stack(parts)))

    @torch.no_grad()
    def step(self, gradient: Tensor, scale: float, learning_rate: float) -> None:
        """Apply `scale * gradient [P]`; a gradient of the master's dtype is scaled in place."""
        self._step += 1
        buffers = (self._master, *self._moments.values(), gradient, self._compute)
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
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            compute.copy_(master)

    def _wide(self, part: Tensor) -> Tensor:
        """A piece of a gradient in the master's dtype, valid until the next call."""
        if part.dtype == self._master.dtype:
            return part
        return self._scratch[: len(part)].copy_(part)
