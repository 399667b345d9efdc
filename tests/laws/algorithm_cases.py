"""Every algorithm on the same tiny step: responses with rewards, as the loop would learn from them.

Modules beside this file can be imported by name, also in worker processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ratoon.cluster.training_unit import loss_settings
from ratoon.config.algorithm import Algorithm
from ratoon.loop.learning import make_samples, with_advantages
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.records import Completion, DrawKey, Stream
from ratoon.training.core import TrainerCore
from ratoon.training.policy_trainer import PolicyTrainer
from ratoon.training.samples import Sample

CONFIG = DecoderConfig(
    family="llama", vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=8,
)  # fmt: skip
MAX_TOKENS = 20
# Settings without which a case would not show what it is about.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo of the paper": {"reduction": "sequence_mean", "kl_coef": 0.1},
    "grpo, batch scale, KL in reward": {
        "scale_rewards": "batch", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k2",
    },
    "dr_grpo": {},
    "dapo": {"mask_truncated_completions": True},
    "gspo": {"clip_low": 0.01, "clip_high": 0.02},
    "rloo": {"kl_coef": 0.1, "kl_estimator": "k1"},
    "reinforce_plus_plus": {"kl_coef": 0.1},
    "raft": {"entropy_coef": 0.01},
}  # fmt: skip


def algorithm(case: str, **settings: Any) -> Algorithm:
    """The algorithm of a case, for two passes over two prompts' responses, three to each."""
    values = {"prompts_per_step": 2, "group_size": 3, "epochs": 2, **CASES[case], **settings}
    return Algorithm(name=case.split(maxsplit=1)[0].rstrip(","), **values)  # type: ignore[arg-type]


def make_decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(CONFIG).double()
    torch.nn.init.normal_(decoder.embed_tokens.weight, std=0.3)
    return decoder


def make_step(settings: Algorithm, seed: int = 0) -> tuple[list[Completion], list[float]]:
    """Responses to the step's prompts, some of them cut, and their rewards."""
    source = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(source.randrange(61) for _ in range(source.randint(low, high)))

    completions, rewards = [], []
    for row in range(settings.prompts_per_step):
        prompt = ids(1, 6)
        for sample in range(settings.group_size):
            token_ids = ids(1, MAX_TOKENS)
            completions.append(
                Completion(
                    key=DrawKey(0, Stream.TRAIN, 1, "data", row, sample),
                    prompt_ids=prompt,
                    token_ids=token_ids,
                    logprobs=tuple(-source.randrange(1000) / 64 for _ in token_ids),
                    finish="length" if sample == 1 else "stop",
                    policy_version=0,
                )
            )
            rewards.append(source.choice([0.0, 0.5, 1.0, 2.0]))
    return completions, rewards


def make_trainer(core: TrainerCore, settings: Algorithm) -> PolicyTrainer:
    """A trainer with another policy as its reference."""
    reference = make_decoder(seed=9).to(core.compute.head_weight.dtype)
    return PolicyTrainer(core, loss_settings(settings, MAX_TOKENS), reference=reference)


def samples_of(
    trainer: PolicyTrainer,
    settings: Algorithm,
    completions: Sequence[Completion],
    rewards: Sequence[float],
) -> list[Sample]:
    samples = make_samples(completions, settings)
    divergences = None
    if settings.penalises_rewards:
        divergences = trainer.divergences(samples, settings.kl_estimator)
    return with_advantages(samples, rewards, settings, divergences)


def learn(
    core: TrainerCore, settings: Algorithm, *, backwards: bool = False
) -> tuple[dict[str, float], list[Tensor]]:
    """Metrics of a step's update, and the parameters after it; responses also in reverse order."""
    completions, rewards = make_step(settings)
    order = -1 if backwards else 1
    trainer = make_trainer(core, settings)
    samples = samples_of(trainer, settings, completions, rewards)[::order]
    metrics = trainer.update(samples, minibatches=settings.minibatches, epochs=settings.epochs)
    return metrics, [parameter.detach().clone() for parameter in core.decoder.parameters()]
