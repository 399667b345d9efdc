"""How much memory pretraining needs, and whether this machine has it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from ratoon.config.pretrain import PretrainConfig
from ratoon.errors import CapabilityError
from ratoon.est.flops import num_mlp_matrices
from ratoon.models.decoder import Decoder, DecoderConfig

# Bytes of a parameter's float32 master, gradient and two moments.
_OPTIMIZER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Memory:
    """Estimated bytes of one process. Kernels' and the allocator's own memory is not counted.

    `optimizer` holds master weights, gradients and both moments; `compute` the copy that computes;
    `activations` what a micro-batch keeps for backward.
    """

    optimizer: int
    compute: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.optimizer + self.compute + self.activations


def estimate_memory(
    config: PretrainConfig, model: DecoderConfig, *, tokens: int, processes: int
) -> Memory:
    """What each of `processes` needs that trains on micro-batches of `tokens`."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(model).parameters())
    shards = processes if config.update.shard else 1
    item = 2 if config.model.dtype == "bfloat16" else 4
    optimizer = _OPTIMIZER_BYTES * parameters // shards
    if config.update.shard:
        # What is whole at a time: a layer, and embeddings with the head.
        width = model.hidden_size
        per_layer = width * (sum(model.qkv_sizes) + model.num_heads * model.head_dim)
        per_layer += num_mlp_matrices(model) * width * model.intermediate_size
        compute = item * (parameters - (model.num_layers - 1) * per_layer)
    else:
        compute = item * parameters if item == 2 else 0
    kept = activation_bytes(model, tokens, item, recompute=config.update.activation_checkpointing)
    return Memory(optimizer, compute, kept)


def require_memory(
    config: PretrainConfig, model: DecoderConfig, *, tokens: int, processes: int
) -> None:
    """Refuse a model whose weights and optimizer this machine's free memory cannot hold.

    Activations are left out: their estimate is too rough to refuse a run by.

    Raises:
        CapabilityError: saying what is needed and what is free.
    """
    memory = estimate_memory(config, model, tokens=tokens, processes=processes)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = here * (memory.optimizer + memory.compute)
    free = psutil.virtual_memory().available
    if needed > free:
        raise CapabilityError(
            f"the model's weights, gradients and moments need about {needed / 1e9:,.1f} GB of "
            f"memory, and {free / 1e9:,.1f} GB are free; choose a smaller model.shape or another "
            "machine, or spread it over machines with update.shard = true"
        )


def activation_bytes(model: DecoderConfig, tokens: int, item: int, *, recompute: bool) -> int:
    """What forward keeps of `tokens` for backward, in values of `item` bytes.

    Of a layer: the inputs of both norms and what they make, queries, keys and values before and
    after rotation, the attention's output, and the MLP's inner values; without recomputation of all
    layers, else of one layer and the inputs of the others.
    """
    width, heads = model.hidden_size, model.num_heads * model.head_dim
    projected = sum(model.qkv_sizes)
    rotated = projected - model.qkv_sizes[2] if model.positions == "rotary" else 0
    inner = 2 * model.intermediate_size
    layer = 4 * width + projected + rotated + heads + inner
    layers = model.num_layers
    kept = layer + (layers - 1) * width if recompute else layers * layer
    # The final norm's input and output.
    return item * tokens * (kept + 2 * width)
