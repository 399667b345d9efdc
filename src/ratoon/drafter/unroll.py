"""The drafter's training forward: several drafted steps at once for every column.

At step 0 a column's query attends causally to the pairs of its own document within the window. At
step i it attends to the same pairs and to its own column's keys of steps 1 to i, just as a chain
drafted from that pair does when serving.

Shape letters: as in `micro_batch`; T rows, D drafter width, H query heads, G key/value heads, E
head width.
Source: training-time test of EAGLE-3 (arXiv 2503.01840), Llama scheme.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.model import DrafterConfig, DrafterWeights
from ratoon.drafter.training_ops import TrainedLinear, attend
from ratoon.models.decoder import apply_rope
from ratoon.models.fused import rms_norm


class TrainedDrafter:
    """The drafter's computation up to its head, over compute copies of its tensors.

    Norm weights get `.grad`; the matrices collect theirs (see `TrainedLinear`). The head's
    gradient is the loss's business (see `HeadLoss`).
    """

    def __init__(self, config: DrafterConfig, weights: DrafterWeights) -> None:
        self.config = config
        # The order of DrafterWeights: five matrices, the head, the norms.
        self._matrices = tuple(TrainedLinear(weight) for weight in weights[:5])
        self._norms = tuple(norm.detach().requires_grad_() for norm in weights[6:])
        self.fc, self.qkv, self.o, self.gate_up, self.down = self._matrices
        self.head = weights.head.detach()
        self.input_norm, self.hidden_norm, self.post_norm, self.norm = self._norms

    def head_inputs(self, embedding: Tensor, batch: MicroBatch, rope: Tensor) -> Tensor:
        """What the draft head reads, `[R, D]`: all columns at step 0, then the deep ones.

        `embedding [V, D]` is the target's, in the dtype of the weights; `rope [2, P, E]` must
        reach the last position plus the number of unroll steps.
        """
        queries = batch.step_rows[0]
        hidden = self.fc(batch.features.to(self.fc.weight.dtype))
        query, key, value = self._project(
            _embed(embedding, batch.next_ids), hidden, _at(rope, batch.positions)
        )
        bias = _bias(batch.attention_mask(self.config.window), hidden.dtype)
        hidden = self._finish(attend(query[:queries], key, value, bias), hidden[:queries])
        outputs = [hidden]
        deep_ids = batch.deep_ids if len(batch.deep_columns) else batch.deep_ids[:0]
        if len(deep_ids):
            hidden = hidden.index_select(0, batch.deep_columns)
            bias = bias[batch.deep_columns]
            positions = batch.positions[batch.deep_columns]
            own = _bias(torch.eye(len(positions), dtype=torch.bool, device=bias.device), bias.dtype)
        for step, ids in enumerate(deep_ids, start=1):
            query, own_key, own_value = self._project(
                _embed(embedding, ids), hidden, _at(rope, positions + step)
            )
            key, value = torch.cat([key, own_key]), torch.cat([value, own_value])
            bias = torch.cat([bias, own], dim=1)
            hidden = self._finish(attend(query, key, value, bias), hidden)
            outputs.append(hidden)
        return rms_norm(torch.cat(outputs), self.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def write_gradients(self, out: DrafterWeights) -> None:
        """Fill `out`, all but its head, with the gradients gathered, and forget them."""
        for matrix, view in zip(self._matrices, out[:5], strict=True):
            matrix.write_gradient(view)
        for norm, view in zip(self._norms, out[6:], strict=True):
            view.copy_(cast(Tensor, norm.grad))
            norm.grad = None

    def discard_gradients(self) -> None:
        """Forget the gradients gathered so far."""
        for matrix in self._matrices:
            matrix.discard()
        for norm in self._norms:
            norm.grad = None

    def _project(
        self, embedded: Tensor, hidden: Tensor, rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[T, H, E]`, rotated keys and values `[T, G, E]`.

        `embedded`, `hidden` `[T, D]`; `rope [2, T, 1, E]` holds each row's cosines and sines.
        """
        config, eps = self.config, self.config.rms_norm_eps
        left = rms_norm(embedded, self.input_norm, eps)
        joined = torch.cat([left, rms_norm(hidden, self.hidden_norm, eps)], dim=-1)
        parts = self.qkv(joined).view(len(joined), -1, config.head_dim)
        rotated, value = torch.split(
            parts, [config.num_heads + config.num_kv_heads, config.num_kv_heads], 1
        )
        rotated = apply_rope(rotated, rope[0], rope[1])
        query, key = torch.split(rotated, [config.num_heads, config.num_kv_heads], 1)
        return query, key, value

    def _finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """From attention's result `[T, H*E]` and the residual `[T, D]` to the layer's output."""
        x = hidden + self.o(attended)
        gate_up = self.gate_up(rms_norm(x, self.post_norm, self.config.rms_norm_eps))
        gate, up = gate_up.chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `mask` is True, else -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _embed(embedding: Tensor, ids: Tensor) -> Tensor:
    """Embeddings of `ids`, outside the graph: the target learns nothing from the drafter."""
    return embedding.detach()[ids]


def _at(rope: Tensor, positions: Tensor) -> Tensor:
    return rope[:, positions].unsqueeze(2)
