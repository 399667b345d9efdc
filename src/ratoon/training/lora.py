"""Low-rank adapters: W = W0 + (alpha / rank) B A, with A and B trained and W0 left as it is.

The decoder always holds the whole W. So the forward, the rollout engine and their bits are those of
any other policy, and a step follows the gradient of W by the chain rule: dA = s B^T dW and
dB = s dW A^T. What is saved is memory (moments of A and B alone) and the optimizer's time, not the
forward and backward pass.

Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685. Names and files are those of PEFT.

Shape letters: N outputs, D inputs of a matrix; R rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ratoon.errors import ConfigError
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.directories import whole_directory
from ratoon.models.hf_config import FAMILIES
from ratoon.models.hf_io import stacked_parts
from ratoon.training.data_parallel import DataParallel
from ratoon.training.master_weights import MasterWeights
from ratoon.training.optimizer import OptimizerSettings

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LoRASettings:
    """Rank and scale, and which matrices of the layers, by their names in Hugging Face's model.

    Example: `LoRASettings(rank=16, alpha=32, targets=("q_proj", "v_proj"))`
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def scale(self) -> float:
        """What the product B A is multiplied with."""
        return self.alpha / self.rank


def layer_matrices(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """The decoder's parameters that can be adapted, with their modules in Hugging Face's model."""
    with torch.device("meta"):
        decoder = Decoder(config)
    return {
        ours: tuple(name.removesuffix(".weight") for name in theirs)
        for ours, theirs in FAMILIES[config.family].tensor_names(config).items()
        if ours.startswith("layers.") and decoder.get_parameter(ours).dim() == 2
    }


def check_targets(config: DecoderConfig, targets: Sequence[str]) -> None:
    """Raise ConfigError if a target is no matrix of such a decoder's layers."""
    known = {_short(name) for theirs in layer_matrices(config).values() for name in theirs}
    unknown = sorted(set(targets) - known - {ALL_LINEAR})
    if unknown:
        raise ConfigError(
            f"lora.targets: {', '.join(unknown)} is no matrix of this model's layers; give any of "
            f"{', '.join(sorted(known))}, or {ALL_LINEAR}"
        )


def _short(module: str) -> str:
    return module.rpartition(".")[2]


class _Target(NamedTuple):
    """One adapted matrix `[N, D]`, what it was before, and its gradient."""

    name: str
    weight: Tensor
    base: Tensor
    gradient: Tensor


class LoRAWeights:
    """A decoder's adapters, and what updates them; stands where `MasterWeights` does.

    `gradients` are those of the whole adapted parameters, by the decoder's names: sums over
    micro-batches go there.

    Raises: ConfigError as `check_targets` does.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: OptimizerSettings,
        lora: LoRASettings,
        workers: DataParallel,
        seed: int,
    ) -> None:
        check_targets(decoder.config, lora.targets)
        self.gradients: dict[str, Tensor] = {}
        self._lora = lora
        self._targets = list(self._chosen(decoder))
        generator = torch.Generator().manual_seed(seed)
        adapters: dict[str, nn.Parameter] = {}
        for target in self._targets:
            rows, columns = target.weight.shape
            # PEFT's start: A as a linear layer's weight, B zero, so that W is W0.
            bound = 1.0 / math.sqrt(columns)
            a = torch.empty(lora.rank, columns).uniform_(-bound, bound, generator=generator)
            adapters[f"{target.name}.lora_A"] = nn.Parameter(a.to(target.weight))
            b = target.weight.new_zeros(rows, lora.rank)
            adapters[f"{target.name}.lora_B"] = nn.Parameter(b)
        self._adapters = adapters
        self._masters = MasterWeights(adapters, settings, workers)

    def _chosen(self, decoder: Decoder) -> Iterator[_Target]:
        config, targets = decoder.config, self._lora.targets
        for ours, theirs in layer_matrices(config).items():
            wanted = [targets == (ALL_LINEAR,) or _short(name) in targets for name in theirs]
            if not any(wanted):
                continue
            weight = decoder.get_parameter(ours).data
            gradient = self.gradients[ours] = torch.zeros_like(weight)
            parts = (stacked_parts(config, ours, len(theirs), t) for t in (weight, gradient))
            for name, is_wanted, part, part_gradient in zip(theirs, wanted, *parts, strict=True):
                if is_wanted:
                    yield _Target(name, part, part.clone(), part_gradient)

    @torch.no_grad()
    def step(self, lr: float, step: int) -> float:
        """One AdamW step of the adapters, the same on all workers; returns the gradient norm.

        The norm is that of the adapters' gradients before clipping. Clears the gradients.
        Raises: NumericsError if the norm is not finite, on all workers; weights are then unchanged.
        """
        for target in self._targets:
            a, b = self._pair(target)
            assert a.grad is not None
            assert b.grad is not None
            torch.mm(b.T, target.gradient, out=a.grad).mul_(self._lora.scale)
            torch.mm(target.gradient, a.T, out=b.grad).mul_(self._lora.scale)
        norm = self._masters.step(lr, step)
        self._merge()
        self.discard_gradients()
        return norm

    def discard_gradients(self) -> None:
        """Forget what has been summed since the last step."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Views by name of adapters and moments, for checkpoints."""
        return self._masters.tensors()

    def load(self, stored: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy what `tensors` gave. Every worker calls this with the same values."""
        self._masters.load(stored)
        self._merge()

    def save(self, folder: Path, base_model: str) -> None:
        """Write the adapters as PEFT reads them.

        Raises: CheckpointError if the folder holds something or the disk is full.
        """
        names = sorted({_short(target.name) for target in self._targets})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": names,
            # transformers keeps GPT-2's matrices transposed.
            "fan_in_fan_out": any(name.startswith("c_") for name in names),
            "inference_mode": True,
        }
        tensors = {
            f"base_model.model.{name}.weight": parameter.detach().cpu().contiguous()
            for name, parameter in self._adapters.items()
        }
        with whole_directory(folder, sum(tensor.nbytes for tensor in tensors.values())) as draft:
            save_file(tensors, draft / "adapter_model.safetensors", metadata={"format": "pt"})
            text = json.dumps(config, indent=2)
            (draft / "adapter_config.json").write_text(text + "\n", encoding="utf-8")

    @torch.no_grad()
    def _merge(self) -> None:
        for target in self._targets:
            a, b = self._pair(target)
            torch.addmm(target.base, b, a, alpha=self._lora.scale, out=target.weight)

    def _pair(self, target: _Target) -> tuple[nn.Parameter, nn.Parameter]:
        return (
            self._adapters[f"{target.name}.lora_A"],
            self._adapters[f"{target.name}.lora_B"],
        )
