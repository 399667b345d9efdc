"""Updates on the device at hand: those of the CPU in float32, within rounding."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ratoon.drafter.data_buffer import DataBuffer
from ratoon.drafter.data_buffer import Sample as DrafterSample
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import family_config
from ratoon.models.initialise import new_decoder
from ratoon.models.tiny import random_decoder
from ratoon.training.core import TrainerCore
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.pretrainer import Passes, Pretrainer
from ratoon.training.samples import Sample

CONFIG = DecoderConfig("llama", 61, 32, 48, 8, num_heads=4, num_kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


def close(one: Decoder | Eagle3Drafter, other: Decoder | Eagle3Drafter) -> None:
    found = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), found[name].detach().cpu(), atol=2e-4, rtol=1e-3, msg=name
        )


def test_a_policy_update_is_that_of_the_cpu(device: torch.device) -> None:
    source = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(61) for _ in range(count))

    samples = [Sample(ids(4), ids(6 + n), source.gauss(0, 1), group=n // 2) for n in range(8)]

    def updated(where: torch.device) -> Decoder:
        core = TrainerCore(
            random_decoder(CONFIG, seed=0).to(where),
            OptimizerSettings(lr=1e-3),
            compute_dtype=torch.float32,
            micro_batch_tokens=64,
            temperature=1.0,
        )
        metrics = PolicyTrainer(core, PolicyLossSettings()).update(samples, minibatches=2)
        assert all(np.isfinite(value) for value in metrics.values())
        return core.decoder

    close(updated(CPU), updated(device))


@pytest.mark.parametrize("method", ["random", "nested", "sequences"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_step_on_a_subnetwork_is_that_of_the_cpu(
    device: torch.device, family: str, method: str
) -> None:
    ids = np.random.default_rng(0).integers(0, 50, (8, 33))
    rates = Rates(0.5, 1.0, 1.0) if method == "sequences" else Rates(0.5, 0.5, 0.5)
    config = family_config(
        family,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        max_positions=64,
    )
    shape = Shape.of(config)
    sampler: Sampler = (
        NestedSampler(shape)
        if method == "nested"
        else RandomSampler(shape, 3, depth="sequences" if method == "sequences" else "layers")
    )

    def trained(where: torch.device) -> tuple[float, Decoder]:
        decoder = new_decoder(config, 1).to(where)
        trainer = Pretrainer(
            decoder, UpdateRule(), Passes(4), shape=shape, compute_dtype=torch.float32
        )

        def draw(micro_batch: int, count: int) -> Subnetwork:
            return sampler.draw(rates, 0, micro_batch, count)

        losses = [float(trainer.step(ids, 1e-3, draw).loss) for _ in range(2)]
        return losses[-1], decoder

    (expected, on_cpu), (found, on_device) = trained(CPU), trained(device)
    assert found == pytest.approx(expected, rel=1e-4)
    close(on_cpu, on_device)


def test_drafter_training_is_that_of_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    target = random_decoder(CONFIG, seed=0)
    config = DrafterConfig.for_target(CONFIG, 61, 16)
    states = [(torch.randn(23, 96), torch.randn(23, 32)) for _ in range(6)]
    ids = [torch.randint(0, 61, (24,)) for _ in range(6)]

    def trained(where: torch.device) -> Eagle3Drafter:
        drafter = Eagle3Drafter.from_target(config, target, torch.arange(61)).to(where)
        options = TrainerOptions(
            compute_dtype=torch.float32, micro_tokens=64, batch_tokens=64, unroll=3
        )
        trainer = DrafterTrainer(drafter, options)
        trainer.set_embedding(target.embed_tokens.weight.to(where))
        buffer = DataBuffer(1000, seed=0)
        buffer.begin_step(0, target.head_weight.detach().to(where))
        for uid, (text, (features, hidden)) in enumerate(zip(ids, states, strict=True)):
            buffer.add(
                DrafterSample((uid,), text.to(where), features.to(where), hidden.to(where), 4, 0)
            )
        spot = SpotTrainer(trainer, buffer, lambda *_: None, publish_every=100)
        spot.start(lambda: trainer.step >= 4).run()
        return drafter

    torch.manual_seed(1)
    on_cpu = trained(CPU)
    torch.manual_seed(1)
    close(on_cpu, trained(device))
