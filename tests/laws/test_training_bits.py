"""Engine and trainer give the same log-probabilities, bit for bit, where numerics are invariant."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ratoon.models.decoder import Decoder
from ratoon.models.hf_config import FAMILIES, family_config
from ratoon.records import DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.samples import Sample

# SmolLM2-135M's shapes, but for depth and vocabulary.
SHAPE = {
    "vocab_size": 4096, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 2,
    "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "rope_theta": 100_000.0,
}  # fmt: skip
NARROW = SHAPE | {
    "hidden_size": 128, "intermediate_size": 300, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32
}  # fmt: skip
VOCAB_LIMIT = 4001
TEMPERATURE = 0.9


def _rollout(model: InferenceModel) -> list[Sample]:
    """Four responses to each of three prompts, with the engine's log-probabilities."""
    source = random.Random(0)
    engine = RolloutEngine(model, max_rows=12, max_length=256, vocab_limit=VOCAB_LIMIT)
    for row in range(3):
        prompt = tuple(source.randrange(VOCAB_LIMIT) for _ in range(source.randint(30, 70)))
        for member in range(4):
            key = DrawKey(0, Stream.TRAIN, 1, "bits", row, member)
            length = source.randint(60, 160)
            engine.submit(Request(key, prompt, length, (), SamplingParams(TEMPERATURE)))
    samples = []
    while engine.has_work:
        for finished in engine.step():
            done = finished.completion
            samples.append(
                Sample(done.prompt_ids, done.token_ids, 1.0, done.key.row, done.logprobs)
            )
    return samples


# One of GPT-2's products of these widths needs more rows to be even: see docs/numerics.md.
CASES = [(family, SHAPE) for family in FAMILIES if family != "gpt2"]
CASES += [(family, NARROW) for family in FAMILIES]


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_engine_and_trainer_agree_to_the_bit_shared_prompts_included(
    family: str, shape: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    decoder = Decoder(family_config(family, **shape))
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.05)
        elif name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model = InferenceModel(decoder, num_positions=256, dtype=torch.bfloat16)
    if not check_invariance(model).holds:
        pytest.skip("numerics are not invariant on this machine")
    samples = _rollout(model)
    core = TrainerCore(
        decoder, OptimizerSettings(lr=0.0), temperature=TEMPERATURE, vocab_limit=VOCAB_LIMIT
    )
    trainer = PolicyTrainer(core, PolicyLossSettings())
    for part in (samples, samples[:1], samples[4:8]):
        metrics = trainer.update(part)
        assert metrics["policy/engine_logprob_equal_frac"] == 1.0
        assert metrics["policy/engine_logprob_diff_max"] == 0.0
