"""Masters, gradients and moments in shards, by FSDP2: each worker holds its rows of everything.

Layers are whole only while they compute. A layer that no worker runs is neither gathered nor
reduced; draws are equal on all workers, so none waits for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ratoon.errors import ConfigError
from ratoon.models.decoder import Decoder
from ratoon.training.data_parallel import DataParallel
from ratoon.training.flat_weights import (
    KINDS,
    Part,
    Touched,
    UpdateRule,
    adamw_step,
)
from ratoon.training.update_checks import require_finite, require_same


class ShardedWeights:
    """The same as `FlatWeights`, for a decoder that is sharded in place over all workers.

    Gradients are reduced in the masters' type. Raises: ConfigError for Muon, which needs whole
    matrices, and without torchrun.
    """

    def __init__(
        self, decoder: Decoder, rule: UpdateRule, workers: DataParallel, compute: torch.dtype
    ) -> None:
        if rule.kind == "muon":
            raise ConfigError(
                "optimizer.kind = muon needs whole matrices, which update.shard = true does not "
                "keep; choose adamw, or update.shard = false"
            )
        if workers.group is None:
            raise ConfigError("update.shard = true needs processes that torchrun started")
        self.rule, self._workers, self._decoder = rule, workers, decoder
        weight = decoder.head_weight
        mesh = init_device_mesh(weight.device.type, (workers.size,))
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=weight.dtype)
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(decoder, mesh=mesh, mp_policy=policy)
        # FSDP2 takes means over workers.
        self.loss_scale = float(workers.size)
        self._parameters: dict[str, Any] = dict(decoder.named_parameters())
        self.counts = dict.fromkeys(self._parameters, 0)
        self._decays = {name for name, p in self._parameters.items() if p.dim() >= 2}
        self._local = {name: p.to_local().detach() for name, p in self._parameters.items()}
        self._loaded: Mapping[str, Mapping[str, Tensor]] = {}
        self._moments = {
            kind: {name: torch.zeros_like(local) for name, local in self._local.items()}
            for kind in KINDS[1:]
        }

    def collect(self) -> None:
        """Do nothing: gradients are where they belong."""

    @torch.no_grad()
    def step(self, lr: float, touched: Touched | None = None) -> Tensor:
        """See `FlatWeights.step`."""
        gradients = {
            name: torch.zeros_like(self._local[name]) if p.grad is None else p.grad.to_local()
            for name, p in self._parameters.items()
        }
        squares = [torch.linalg.vector_norm(g).double().square() for g in gradients.values()]
        norm = self._workers.sum_(torch.stack(squares).sum()).sqrt().to(squares[0].dtype).float()
        if norm.device.type == "cpu":
            require_finite(float(norm))
        too_long = (norm / self.rule.max_grad_norm).clamp(min=1.0)
        chosen: Touched = dict.fromkeys(self._parameters) if touched is None else touched
        for name, part in chosen.items():
            self.counts[name] += 1
            views = [self._local[name], gradients[name], *(m[name] for m in self._moments.values())]
            own = None if part is None else self._own(name, part)
            pieces = views if own is None else [v.index_select(own.dim, own.indices) for v in views]
            if pieces[0].numel():
                decays = name in self._decays
                adamw_step(
                    self.rule, [[p] for p in pieces], self.counts[name], lr, decays, norm, too_long
                )
            if own is not None:
                for place in (0, 2, 3):
                    views[place].index_copy_(own.dim, own.indices, pieces[place])
        self.discard_gradients()
        return norm

    def discard_gradients(self) -> None:
        """Forget what has been summed since the last step."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def refresh(self) -> None:
        """Forget whole weights that were gathered before a change."""
        for module in self._decoder.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def reset_moments(self) -> None:
        """Forget both moments and all counts."""
        for views in self._moments.values():
            for value in views.values():
                value.zero_()
        self.counts = dict.fromkeys(self.counts, 0)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Whole copies by name of masters and moments; all workers call this."""
        return {
            kind: {name: self._whole(name, value) for name, value in views.items()}
            for kind, views in self._shards().items()
        }

    @contextmanager
    def whole(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Whole masters and moments, whose changes go back to the shards."""
        tensors = self.tensors()
        yield tensors
        self._scatter(tensors)

    def snapshot(self) -> Callable[[], None]:
        """Copy this worker's shards; calling what is returned puts them back."""
        kept = {k: {n: v.clone() for n, v in views.items()} for k, views in self._shards().items()}
        counts = dict(self.counts)

        def restore() -> None:
            for kind, views in self._shards().items():
                for name, value in views.items():
                    value.copy_(kept[kind][name])
            self.counts = dict(counts)
            self.refresh()

        return restore

    def load(self, stored: Mapping[str, Mapping[str, Tensor]], counts: Mapping[str, int]) -> None:
        """Keep what `tensors` and `counts` gave, for `follow` to hand out.

        Raises: CheckpointError if they are of another model.
        """
        shapes = {
            kind: {name: tuple(p.shape) for name, p in self._parameters.items()} for kind in KINDS
        }
        require_same(shapes, stored, self.counts, counts)
        self._loaded = stored
        self.counts = dict(counts)

    def follow(self) -> None:
        """Take over what worker 0 has loaded. Called by all workers."""
        first = self._workers.rank == 0
        tensors: dict[str, dict[str, Tensor]] = {}
        for kind in KINDS:
            tensors[kind] = {}
            for name, parameter in self._parameters.items():
                local = self._local[name]
                value = local.new_empty(parameter.shape)
                if first:
                    value.copy_(self._loaded[kind][name])
                tensors[kind][name] = self._workers.copy_first_(value)
        self._loaded = {}
        self._scatter(tensors)
        self.counts = json.loads(self._workers.broadcast(json.dumps(self.counts)))
        self.discard_gradients()

    def _shards(self) -> dict[str, dict[str, Tensor]]:
        return {KINDS[0]: self._local, **self._moments}

    @torch.no_grad()
    def _scatter(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        for kind, views in self._shards().items():
            for name, value in views.items():
                value.copy_(tensors[kind][name][self._rows(name)])
        self.refresh()

    @torch.no_grad()
    def _whole(self, name: str, local: Tensor) -> Tensor:
        like = self._parameters[name]
        sharded = DTensor.from_local(
            local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )
        return sharded.full_tensor()

    def _rows(self, name: str) -> slice:
        """This worker's rows, by FSDP2's rule: chunks of equal size, rounded up."""
        rows = self._parameters[name].shape[0]
        chunk = -(-rows // self._workers.size)
        start = min(rows, self._workers.rank * chunk)
        return slice(start, min(rows, start + chunk))

    def _own(self, name: str, part: Part) -> Part:
        if part.dim != 0:
            return part
        rows = self._rows(name)
        mine = part.indices[(part.indices >= rows.start) & (part.indices < rows.stop)]
        return Part(0, mine - rows.start, ())
