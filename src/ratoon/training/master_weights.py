"""Master weights with their gradients and moments, in one piece each.

Workers of one machine share masters and moments: each sums the gradients of its own part over all
workers, updates that part, and all see it. Between machines, or where no memory can be shared,
every worker holds everything and sums gradients over the network.

Shape letters: P numbers of all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ratoon.errors import NumericsError
from ratoon.training.data_parallel import DataParallel
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.shared_memory import shared_tensors

# Norms are taken piece by piece, so that float32 sums stay short.
_NORM_PIECE = 1 << 20


class MasterWeights:
    """Named parameters, moved into one tensor `[P]`, and what updates them.

    Matrices come first, then vectors, which do not decay. `gradients` are views by name; sums over
    micro-batches go there.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        workers: DataParallel,
    ) -> None:
        self._settings = settings
        self._workers = workers
        first = next(iter(named.values()))
        matrices = {name: p for name, p in named.items() if p.dim() >= 2}
        order = {**matrices, **named}  # Keeps the order of `matrices`.
        self._shapes = {name: p.shape for name, p in order.items()}
        self._num_decaying = sum(p.numel() for p in matrices.values())
        numel = sum(p.numel() for p in named.values())
        self._own = slice(0, numel)
        self._others: list[Tensor] = []
        self._share(numel, first)
        if workers.rank == 0 or not self._others:
            for name, view in self._named(self._masters):
                view.copy_(named[name].detach())
        workers.barrier()
        views = dict(self._named(self._masters))
        self.gradients = dict(self._named(self._gradient))
        for name, parameter in named.items():
            parameter.data = views[name]
            parameter.grad = self.gradients[name]

    def _share(self, numel: int, like: Tensor) -> None:
        """Make the tensors, shared if that is possible, and settle which part is this worker's."""
        workers = self._workers
        shared = None
        if workers.size > 1 and like.device.type == "cpu":
            shared = shared_tensors(workers, 4 * numel, like.dtype)
        if shared is None:
            pieces = [torch.zeros(numel, dtype=like.dtype, device=like.device) for _ in range(4)]
        else:
            # The first worker's file holds what is common; the gradient is in each one's own.
            pieces = [*shared[0][: 3 * numel].split(numel), shared[workers.rank][3 * numel :]]
            self._others = [
                tensor[3 * numel :] for rank, tensor in enumerate(shared) if rank != workers.rank
            ]
            bounds = [part * numel // workers.size for part in range(workers.size + 1)]
            self._own = slice(bounds[workers.rank], bounds[workers.rank + 1])
        self._masters, self._average, self._square_average, self._gradient = pieces

    def step(self, lr: float, step: int) -> float:
        """One AdamW step, the same on all workers; returns the gradient norm before clipping.

        Clears the gradients. `step` counts from 0.
        Raises: NumericsError if the norm is not finite, on all workers; weights are then unchanged.
        """
        workers, own = self._workers, self._own
        if self._others:
            workers.barrier()  # All gradients are whole.
            for other in self._others:
                self._gradient[own].add_(other[own])
        else:
            workers.sum_(self._gradient)
        norm = self._norm()
        if not math.isfinite(norm):
            raise NumericsError(
                f"the gradient norm is {norm}; it must be finite. Weights are unchanged. Lower the "
                "learning rate, or look for broken weights or advantages."
            )
        if norm > self._settings.max_grad_norm:
            self._gradient[own].mul_(self._settings.max_grad_norm / norm)
        border = min(max(self._num_decaying, own.start), own.stop)
        self._update(slice(own.start, border), lr, step, self._settings.weight_decay)
        self._update(slice(border, own.stop), lr, step, 0.0)
        if self._others:
            workers.barrier()  # All masters are whole, and all gradients read.
        self._gradient.zero_()
        return norm

    def _norm(self) -> float:
        """Norm of the whole gradient. Host-device syncs: one."""
        pieces = self._gradient[self._own].split(_NORM_PIECE)
        norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
        total = norms.double().square().sum()
        if self._others:
            self._workers.sum_(total)
        return math.sqrt(float(total))

    def _update(self, part: slice, lr: float, step: int, weight_decay: float) -> None:
        if part.start == part.stop:
            return
        beta1, beta2 = self._settings.betas
        adamw(
            [self._masters[part]],
            [self._gradient[part]],
            [self._average[part]],
            [self._square_average[part]],
            [],
            [torch.tensor(float(step), device=self._masters.device)],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self._settings.eps,
            maximize=False,
        )

    def discard_gradients(self) -> None:
        """Forget what has been summed since the last step."""
        self._gradient.zero_()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Views by name of masters and moments, for checkpoints."""
        flat = {
            "master": self._masters,
            "exp_avg": self._average,
            "exp_avg_sq": self._square_average,
        }
        return {kind: dict(self._named(tensor)) for kind, tensor in flat.items()}

    def load(self, stored: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy what `tensors` gave. Every worker calls this with the same values."""
        for kind, views in self.tensors().items():
            for name, view in views.items():
                view.copy_(stored[kind][name])

    def _named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, shape in self._shapes.items():
            yield name, flat[start : start + shape.numel()].view(shape)
            start += shape.numel()
