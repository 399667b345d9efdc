"""Speed of the policy update, against Hugging Face transformers on the same responses.

Tokens are those of prompt and response of each response: what a step has to work off. Ratoon
computes a group's prompt once; `ratoon_repeated` is the arm without that, which computes every
token that is counted. One thread; shapes of SmolLM2-135M in bf16 with all parameters trained;
random weights and ids, since time does not depend on their values. All arms include the optimizer
step.

The baseline is transformers' own model and attention ("sdpa", or "eager") on right-padded
micro-batches of similar lengths, logits of completion tokens only, bf16 weights, fused AdamW.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.bench.drafter import TARGET
from ratoon.bench.intervals import median_interval
from ratoon.errors import CapabilityError
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import Decoder
from ratoon.models.packing import micro_batches
from ratoon.observe.provenance import provenance
from ratoon.training.core import TrainerCore
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.samples import Sample, trained_length

PROMPT_TOKENS = 60
GROUP_SIZE = 8
LR = 1e-6

# Its eager attention keeps all probabilities: more tokens at a time need more than 10 GB.
BASELINE_TOKENS = 1024

# transformers computes [rows, V] logits in float32, so its head takes fewer tokens at a time.
_HEAD_ROWS = 256


def run(
    rounds: int = 9,
    *,
    num_tokens: int = 8192,
    micro_batch_tokens: int = 4096,
    baseline: Literal["eager", "sdpa"] | None = "eager",
    seed: int = 0,
) -> dict[str, Any]:
    """Time `rounds` interleaved rounds of each arm, one optimizer step a round; JSON values.

    `tokens_per_s` of each arm has a bootstrap interval of the median, as has `speedup` of each of
    ours over the baseline in the same round. Without `baseline` ours are timed alone.

    Raises: CapabilityError if transformers is not installed and a baseline is asked for.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(rounds, num_tokens, micro_batch_tokens, baseline, seed)
    finally:
        torch.set_num_threads(threads)


def _run(
    rounds: int,
    num_tokens: int,
    micro_batch_tokens: int,
    baseline: Literal["eager", "sdpa"] | None,
    seed: int,
) -> dict[str, Any]:
    samples = make_samples(num_tokens, seed)
    lengths = [trained_length(sample.prompt_ids, sample.token_ids) for sample in samples]
    apart = [dataclasses.replace(sample, group=place) for place, sample in enumerate(samples)]
    trainer = _trainer(micro_batch_tokens, seed)
    arms: dict[str, Callable[[], object]] = {
        "ratoon": lambda: trainer.update(samples),
        "ratoon_repeated": lambda: trainer.update(apart),
    }
    if baseline is not None:
        arms["transformers"] = _transformers_arm(samples, baseline)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            arm()
            if number:  # The first round warms up.
                rates[name].append(sum(lengths) / (time.perf_counter() - started))
    result = {
        "benchmark": "update",
        "provenance": provenance(seed),
        "config": {
            "model": "SmolLM2-135M shapes",
            "responses": len(samples),
            "tokens": sum(lengths),
            "completion_tokens": sum(len(sample.token_ids) for sample in samples),
            "micro_batch_tokens": micro_batch_tokens,
            "baseline": baseline,
            "compute_dtype": fast_dtype(),
            "threads": 1,
            "compiler": False,
        },
        "tokens_per_s": {name: median_interval(values) for name, values in rates.items()},
    }
    if baseline is not None:
        base = rates.pop("transformers")
        result["speedup"] = {
            name: median_interval([a / b for a, b in zip(values, base, strict=True)])
            for name, values in rates.items()
        }
    return result


def make_samples(num_tokens: int, seed: int) -> list[Sample]:
    """Groups of responses of 30 to 300 tokens with a long tail (median 90), `num_tokens` in all."""
    source = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(TARGET.vocab_size) for _ in range(count))

    samples: list[Sample] = []
    prompt: tuple[int, ...] = ()
    while num_tokens > 0:
        if len(samples) % GROUP_SIZE == 0:
            prompt = ids(PROMPT_TOKENS)
        response = ids(min(300, max(30, round(source.lognormvariate(4.5, 0.6)))))
        advantage = source.choice([-1.0, 1.0])
        samples.append(Sample(prompt, response, advantage, len(samples) // GROUP_SIZE))
        num_tokens -= trained_length(prompt, response)
    return samples


def _trainer(micro_batch_tokens: int, seed: int) -> PolicyTrainer:
    torch.manual_seed(seed)
    decoder = Decoder(TARGET)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.02)
    core = TrainerCore(
        decoder,
        OptimizerSettings(lr=LR),
        compute_dtype=DTYPES[fast_dtype()],
        micro_batch_tokens=micro_batch_tokens,
    )
    return PolicyTrainer(core, PolicyLossSettings())


def _transformers_arm(samples: Sequence[Sample], attention: str) -> Callable[[], None]:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise CapabilityError(
            "the baseline needs transformers; install it, or ask for no baseline"
        ) from error
    config = LlamaConfig(
        vocab_size=TARGET.vocab_size,
        hidden_size=TARGET.hidden_size,
        intermediate_size=TARGET.intermediate_size,
        num_hidden_layers=TARGET.num_layers,
        num_attention_heads=TARGET.num_heads,
        num_key_value_heads=TARGET.num_kv_heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": TARGET.rope_theta},
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(DTYPES[fast_dtype()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    ordered = sorted(samples, key=lambda sample: len(sample.token_ids))
    lengths = [trained_length(sample.prompt_ids, sample.token_ids) for sample in ordered]
    count = len(micro_batches(lengths, BASELINE_TOKENS)[0])
    bounds = [part * len(ordered) // count for part in range(count + 1)]
    parts = [ordered[low:high] for low, high in itertools.pairwise(bounds)]
    num_loss_tokens = sum(len(sample.token_ids) for sample in samples)

    def step() -> None:
        for part in parts:
            (_padded_loss(model, part) / num_loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded_loss(model: Any, samples: Sequence[Sample]) -> Tensor:
    """Sum of the policy-gradient loss over a right-padded batch."""
    documents = [torch.tensor([*s.prompt_ids, *s.token_ids[:-1]]) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.zeros_like(ids)
    for row, document in zip(mask, documents, strict=True):
        row[: len(document)] = 1
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    rows = torch.cat(
        [
            h[len(s.prompt_ids) - 1 :][: len(s.token_ids)]
            for h, s in zip(hidden, samples, strict=True)
        ]
    )
    targets = torch.tensor([token for s in samples for token in s.token_ids])
    advantages = torch.tensor([s.advantage for s in samples for _ in s.token_ids])
    loss = torch.zeros(())
    for h, target, advantage in zip(
        rows.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), advantages.split(_HEAD_ROWS), strict=True
    ):
        nll = torch.utils.checkpoint.checkpoint(
            lambda x, y: F.cross_entropy(model.lm_head(x).float(), y, reduction="none"),
            h,
            target,
            use_reentrant=False,
        )
        loss = loss + (nll * advantage).sum()
    return loss
