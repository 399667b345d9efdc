"""A target small enough that a drafter learns it in a second, and its trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.drafter.data_buffer import DataBuffer, Sample, Slice
from ratoon.drafter.micro_batch import MicroBatch
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.models.decoder import Decoder, DecoderConfig

VOCABULARY, WIDTH = 24, 32
TARGET = DecoderConfig("llama", VOCABULARY, WIDTH, 48, 8, 4, 2, 8)
OPTIONS = TrainerOptions(
    learning_rate=3e-3,
    warmup_steps=5,
    micro_tokens=40,
    batch_tokens=80,
    unroll=2,
    deep_stride=1,
    compute_dtype=torch.float32,
)


class Toy:
    """A target whose next token depends on the last one alone, so that a drafter can learn it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.hidden = 0.5 * torch.randn(VOCABULARY, WIDTH, generator=generator)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator)

    def sample(self, uid: int, version: int = 1, length: int = 24) -> Sample:
        generator = torch.Generator().manual_seed(uid)
        table = (self.hidden @ self.head.T).softmax(-1)
        ids = [uid % VOCABULARY]
        while len(ids) < length:
            ids.append(int(torch.multinomial(table[ids[-1]], 1, generator=generator)))
        tokens = torch.tensor(ids)
        states = self.embedding[tokens[:-1]].repeat(1, 3)
        return Sample((uid,), tokens, states, self.hidden[tokens[:-1]], 4, version)

    def buffer(self, num_samples: int = 40) -> DataBuffer:
        buffer = DataBuffer(10_000, seed=3)
        buffer.begin_step(1, self.head)
        for uid in range(num_samples):
            buffer.add(self.sample(uid))
        return buffer

    def trainer(self, options: TrainerOptions = OPTIONS) -> DrafterTrainer:
        torch.manual_seed(0)
        drafter = Eagle3Drafter.from_target(
            DrafterConfig.for_target(TARGET, VOCABULARY, 16),
            Decoder(TARGET),
            torch.arange(VOCABULARY),
        )
        trainer = DrafterTrainer(drafter, options)
        trainer.set_embedding(self.embedding)
        return trainer

    def batch(self, uid: int = 0) -> MicroBatch:
        sample = self.sample(uid)
        piece = Slice(sample, sample.first_query, sample.num_queries)
        return MicroBatch.build([piece], OPTIONS.unroll, 16)


def ignore(weights: dict[str, Tensor], version: int, checksum: str) -> None:
    """A publication that nobody reads."""


def steps_of(trainer: DrafterTrainer, buffer: DataBuffer, steps: int, **spot: int) -> SpotTrainer:
    session_of = SpotTrainer(
        trainer, buffer, ignore, publish_every=1000, deterministic_steps=steps, **spot
    )
    session_of.start(lambda: True).run()
    return session_of
