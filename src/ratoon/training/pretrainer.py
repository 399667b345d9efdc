"""One optimizer step of pretraining, whole or with a part of the model.

Master weights, gradient sums and moments are float32 (float64 for laws); the model computes with a
bf16 copy of the masters.

Shape letters: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ratoon.errors import CheckpointError
from ratoon.est.adapters import decoder_layout
from ratoon.est.sliced_forward import hidden_states
from ratoon.est.subnetwork import Shape, Subnetwork
from ratoon.models.compiling import compile_layers
from ratoon.models.decoder import Decoder
from ratoon.models.packing import PackedBatch
from ratoon.training.data_parallel import DataParallel
from ratoon.training.flat_weights import FlatWeights, UpdateRule
from ratoon.training.lm_loss import next_token_loss, token_losses
from ratoon.training.sharded_weights import ShardedWeights
from ratoon.training.touched import touched_parameters

Ids = npt.NDArray[np.int64]
# The subnetwork of a micro-batch, from its number in the step and its number of sequences.
Draw = Callable[[int, int], Subnetwork]


class StepResult(NamedTuple):
    """Of one step: mean loss in nats per token and gradient norm, on the trainer's device."""

    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True, slots=True)
class Passes:
    """How forward and backward passes are made; changes memory and speed only.

    `micro_batch` sequences go through the model at a time. With `recompute` layers keep their
    inputs only. With `compiled` they are compiled, and evaluation takes whole micro-batches.
    """

    micro_batch: int
    recompute: bool = False
    compiled: bool = False


class Pretrainer:
    """A decoder in pretraining. `decoder` holds the master weights and is updated in place.

    `shape` says what a subnetwork may leave out. Where `freezes`, weights outside a step's
    subnetworks are not touched; else their gradient is zero, and momentum and decay go on. With
    `shard`, each worker holds its part of weights and moments; else all of them.
    """

    def __init__(
        self,
        decoder: Decoder,
        rule: UpdateRule,
        passes: Passes,
        *,
        shape: Shape | None = None,
        freezes: bool = True,
        compute_dtype: torch.dtype = torch.bfloat16,
        workers: DataParallel | None = None,
        shard: bool = False,
    ) -> None:
        self.decoder = decoder
        self.passes = passes
        self.workers = workers or DataParallel()
        self.shape = shape or Shape.of(decoder.config)
        self.layout = decoder_layout(decoder, self.shape)
        self.freezes = freezes
        self.device = decoder.head_weight.device
        self.compute = decoder
        self.weights: FlatWeights | ShardedWeights
        if shard:
            self.weights = ShardedWeights(decoder, rule, self.workers, compute_dtype)
        else:
            if compute_dtype != decoder.head_weight.dtype:
                self.compute = copy.deepcopy(decoder).to(compute_dtype)
            self.weights = FlatWeights(decoder, self.compute, rule, self.workers)
        if passes.compiled:
            compile_layers(self.compute, "update.compile = true")
        self._full = Subnetwork.full(self.shape)
        self._positions: dict[tuple[int, int], Tensor] = {}

    def step(self, sequences: Ids, lr: float, draw: Draw | None = None) -> StepResult:
        """Learn from this worker's `sequences [B, T + 1]`, the same number on each worker.

        All workers give the same `lr` and draws.
        Host-device syncs: none, but for what `FlatWeights.step` says.
        """
        num_tokens = len(sequences) * (sequences.shape[1] - 1) * self.workers.size
        total = torch.zeros((), device=self.device)
        subnetworks = []
        for number, piece in enumerate(np.split(sequences, self._num_pieces(len(sequences)))):
            subnetwork = self._full if draw is None else draw(number, len(piece))
            subnetworks.append(subnetwork)
            batch, targets = self._packed(piece)
            hidden = hidden_states(self.compute, batch, subnetwork, recompute=self.passes.recompute)
            weight = self.weights.loss_scale / num_tokens
            loss = next_token_loss(hidden, self.compute.head_weight, targets, weight)
            loss.backward()
            self.weights.collect()
            total += loss.detach() / self.weights.loss_scale
        touched = None
        if self.freezes and draw is not None:
            touched = touched_parameters(self.layout, self.weights.counts, subnetworks, self.device)
        norm = self.weights.step(lr, touched)
        return StepResult(total, norm)

    @torch.no_grad()
    def evaluate(
        self,
        sequences: Ids,
        subnetwork: Subnetwork | None = None,
        decoder: Decoder | None = None,
    ) -> float:
        """Mean loss in nats per token of these sequences, which workers share out.

        Same arguments on all workers. Without a subnetwork it is the whole model's; with a decoder,
        that one's.
        """
        model = self.compute if decoder is None else decoder
        length = sequences.shape[1] - 1
        # As many passes on each worker: where weights are sharded, all gather them together.
        per_worker = -(-len(sequences) // self.workers.size)
        first = self.workers.rank * per_worker
        mine = sequences[first : first + per_worker]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, per_worker, self.passes.micro_batch):
            piece = mine[start : start + self.passes.micro_batch]
            # What is compiled takes whole micro-batches.
            missing = self.passes.micro_batch - len(piece) if self.passes.compiled else 0
            fill = np.repeat(sequences[:1], max(missing, 1 - len(piece)), axis=0)
            batch, targets = self._packed(np.concatenate([piece, fill]))
            hidden = hidden_states(model, batch, subnetwork or self._full)
            losses = token_losses(hidden, model.head_weight, targets)
            total += losses[: len(piece) * length].sum(dtype=torch.float64)
        num_tokens = len(sequences) * length
        mean: float = self.workers.sum_(total).item() / num_tokens
        return mean

    def state(self) -> tuple[Mapping[str, Mapping[str, Tensor]], dict[str, Any]]:
        """Tensors (views, not copies) and plain values that `load_state` continues from."""
        return self.weights.tensors(), {"counts": self.weights.counts}

    def load_state(
        self, tensors: Mapping[str, Mapping[str, Tensor]] | None, values: Mapping[str, Any]
    ) -> None:
        """Continue where `state` was taken, with the same bits.

        All workers call this; worker 0 gives the state, the others None.

        Raises: CheckpointError if the tensors are not this decoder's, or of another kind of run.
        """
        if tensors is not None and "counts" not in values:
            raise CheckpointError(
                "the checkpoint's trainer state is not of pretraining: it counts no updates by "
                "parameter; resume with the command that made it"
            )
        if tensors is not None:
            self.weights.load(tensors, values["counts"])
        self.weights.follow()

    def _num_pieces(self, count: int) -> int:
        """The fewest equal micro-batches that are small enough."""
        pieces = -(-count // self.passes.micro_batch)
        while count % pieces:
            pieces += 1
        return pieces

    def _packed(self, sequences: Ids) -> tuple[PackedBatch, Tensor]:
        """A micro-batch, each sequence a document, and its targets `[B * T]`."""
        ids = torch.from_numpy(sequences).to(self.device, non_blocking=True)
        count, length = sequences.shape[0], sequences.shape[1] - 1
        positions = self._positions.get((count, length))
        if positions is None:
            positions = torch.arange(length, device=self.device).repeat(count)
            self._positions[count, length] = positions
        batch = PackedBatch(ids[:, :-1].reshape(-1), positions, (length,) * count, (None,) * count)
        return batch, ids[:, 1:].reshape(-1)
