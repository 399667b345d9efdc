"""What reinforcement learning and fine-tuning share: weights, gradients, optimizer steps.

Master weights, gradient sums and moments are float32 (float64 for laws); the model computes with a
bf16 copy of the masters, made once per optimizer step.

Shape letters: N tokens of the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ratoon.errors import CheckpointError
from ratoon.models.decoder import Decoder
from ratoon.models.fused import sum_dtype
from ratoon.models.packing import micro_batches
from ratoon.training.data_parallel import DataParallel
from ratoon.training.logprobs import token_log_probs, token_log_probs_and_entropies
from ratoon.training.lora import LoRASettings, LoRAWeights
from ratoon.training.master_weights import MasterWeights
from ratoon.training.optimizer import OptimizerSettings, learning_rate
from ratoon.training.samples import Example, TokenBatch, families, pack, trained_length


class StepStats(NamedTuple):
    """Of one optimizer step: gradient norm before clipping, and learning rate."""

    grad_norm: float
    lr: float


class TrainerCore:
    """A decoder under training. `decoder` holds the master weights and is updated in place.

    With `lora` its layers' matrices are trained by adapters alone, which begin as `seed` has it.
    With `freeze_embeddings` the embedding and the output head stay as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: OptimizerSettings,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        micro_batch_tokens: int = 4096,
        temperature: float = 1.0,
        vocab_limit: int | None = None,
        workers: DataParallel | None = None,
        lora: LoRASettings | None = None,
        freeze_embeddings: bool = False,
        seed: int = 0,
    ) -> None:
        self.decoder = decoder
        self.settings = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.vocab_limit = vocab_limit
        self.workers = workers or DataParallel()
        self.steps_done = 0
        self._masters: MasterWeights | LoRAWeights
        if lora is None:
            trained = dict(decoder.named_parameters())
            if freeze_embeddings:
                trained = {name: p for name, p in trained.items() if not _is_embedding(name)}
            self._masters = MasterWeights(trained, optimizer, self.workers)
        else:
            self._masters = LoRAWeights(decoder, optimizer, lora, self.workers, seed)
        dtype, self.device = decoder.head_weight.dtype, decoder.head_weight.device
        self.compute = decoder
        if compute_dtype != dtype:
            self.compute = copy.deepcopy(decoder).to(compute_dtype)
        for name, parameter in self.compute.named_parameters():
            gradient = self._masters.gradients.get(name)
            parameter.requires_grad_(gradient is not None)
            parameter.main_grad = gradient  # type: ignore[attr-defined]

    @property
    def sum_dtype(self) -> torch.dtype:
        """The type of log-probabilities and losses."""
        return sum_dtype(self.compute.head_weight.dtype)

    def micro_batches(
        self, examples: Sequence[Example], groups: Sequence[Hashable] | None = None
    ) -> Iterator[tuple[list[int], TokenBatch]]:
        """This worker's share of the examples of all workers, cut and packed.

        Yields, for each micro-batch, which example each of its responses is, and its tensors on the
        trainer's device. Examples of one group and prompt are packed together and hold the
        prompt once. The cut is a function of the arguments and the number of workers alone.
        """
        size = self.workers.size
        max_tokens = self.micro_batch_tokens
        if size > 1:
            # No family may be so large that one worker waits for another.
            total = sum(trained_length(*example) for example in examples)
            max_tokens = min(max_tokens, -(-total // (2 * size)))
        members = families(examples, groups, max_tokens)
        lengths = [
            trained_length(examples[family[0]][0], *(examples[index][1] for index in family))
            for family in members
        ]
        cut = micro_batches(lengths, self.micro_batch_tokens, size)[self.workers.rank]
        for places in cut:
            chosen = [members[place] for place in places]
            batch = [
                (examples[family[0]][0], [examples[index][1] for index in family])
                for family in chosen
            ]
            yield [index for family in chosen for index in family], pack(batch, self.device)

    def log_probs(self, batch: TokenBatch, decoder: Decoder | None = None) -> Tensor:
        """Log-probabilities `[N]` of the batch's targets under the policy, or another decoder."""
        return token_log_probs(
            *self._predictions(batch, self.compute if decoder is None else decoder),
            temperature=self.temperature,
            vocab_limit=self.vocab_limit,
        )

    def log_probs_and_entropies(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """The policy's log-probabilities, and the entropies `[N]` of the same predictions."""
        return token_log_probs_and_entropies(
            *self._predictions(batch, self.compute),
            temperature=self.temperature,
            vocab_limit=self.vocab_limit,
        )

    def _predictions(self, batch: TokenBatch, model: Decoder) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[N, D]` that predict, the head, and what came `[N]`."""
        hidden, _ = model(batch.packed)
        return hidden.index_select(0, batch.rows), model.head_weight, batch.targets

    def step(self) -> StepStats:
        """Sum gradients over workers, clip, update the masters and the compute copy.

        Raises: NumericsError if a gradient is not finite; weights are then unchanged.
        """
        lr = learning_rate(self.settings, self.steps_done)
        grad_norm = self._masters.step(lr, self.steps_done)
        self._refresh_compute()
        self.steps_done += 1
        return StepStats(grad_norm, lr)

    def discard_gradients(self) -> None:
        """Forget what has been summed since the last step."""
        self._masters.discard_gradients()

    def save_adapter(self, folder: Path, base_model: str) -> None:
        """Write the adapters as PEFT reads them; only where there are some."""
        assert isinstance(self._masters, LoRAWeights)
        self._masters.save(folder, base_model)

    def state_dict(self) -> dict[str, Any]:
        """Masters, moments and step; views, not copies."""
        return {"tensors": self._masters.tensors(), "steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken, with the same bits. On all workers alike.

        Raises: CheckpointError if the tensors are not this decoder's.
        """
        expected, found = (
            _shapes(tensors) for tensors in (self._masters.tensors(), state["tensors"])
        )
        if expected != found:
            wrong = sorted(expected ^ found)[:4]
            raise CheckpointError(
                f"the trainer's state is of another model: {wrong} are on one side only; give the "
                "checkpoint of the configured model"
            )
        self._masters.load(state["tensors"])
        self.steps_done = int(state["steps_done"])
        self.discard_gradients()
        self._refresh_compute()

    @torch.no_grad()
    def _refresh_compute(self) -> None:
        if self.compute is not self.decoder:
            for parameter, master in zip(
                self.compute.parameters(), self.decoder.parameters(), strict=True
            ):
                # What is frozen is still as it was copied at the start.
                if parameter.requires_grad:
                    parameter.copy_(master)


def _is_embedding(name: str) -> bool:
    return name.startswith(("embed_", "lm_head."))


def _shapes(tensors: Mapping[str, Mapping[str, Tensor]]) -> set[tuple[str, tuple[int, ...]]]:
    return {
        (f"{kind}.{name}", tuple(value.shape))
        for kind, views in tensors.items()
        for name, value in views.items()
    }
