"""Seconds of an optimizer step in each stage of an evolving run, against counted operations.

A step is that of `ratoon pretrain`: draw, forward, loss, backward, clipping, AdamW over what
took part, refreshed bf16 weights. Each round draws a new subnetwork, and the arms take turns. One
thread; GPT-2's smallest shape with its tied head; random weights and ids, since time does not
depend on their values.

The bar: a stage's time over the full step's is at most `BAR` times the ratio of counted
operations, output head and optimizer included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ratoon.bench.intervals import median_interval
from ratoon.bench.timing import interleaved, ratio_interval
from ratoon.est.flops import layer_ratio, optimizer_flops, token_flops
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.observe.provenance import provenance
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.pretrainer import Passes, Pretrainer

GPT2_SMALL = DecoderConfig(
    family="gpt2",
    vocab_size=50_257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=1024,
    norm="layer",
    positions="learned",
    activation="gelu_tanh",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
BAR = 1.10
LR = 1e-6
NEURON_BLOCK = 32

# The paper's stages at one half; the last one is the full model, which all are compared with.
_STAGES = {"1": Rates(0.5, 0.5, 0.5), "2": Rates(1.0, 0.5, 0.5)}


def run(
    rounds: int = 5,
    *,
    num_tokens: int = 8192,
    document_tokens: int = 1024,
    micro_batch_tokens: int = 4096,
    config: DecoderConfig = GPT2_SMALL,
    seed: int = 0,
) -> dict[str, Any]:
    """Time `rounds` interleaved rounds, one optimizer step an arm and round; JSON values.

    `stage_time_ratio` has the median over rounds of each arm's time over the full step's in the
    same round, with its bootstrap interval; `stage_flops_ratio` what was counted; `time_over_flops`
    the quotient, whose bar is `bar`. `cpu_time_over_flops` is the same with the process's own
    seconds, which other work on the machine disturbs less.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _run(rounds, num_tokens, document_tokens, micro_batch_tokens, config, seed)
    finally:
        torch.set_num_threads(threads)


def _run(
    rounds: int,
    num_tokens: int,
    document_tokens: int,
    micro_batch_tokens: int,
    config: DecoderConfig,
    seed: int,
) -> dict[str, Any]:
    source = np.random.default_rng(seed)
    num_documents = num_tokens // document_tokens
    micro_batch = max(1, micro_batch_tokens // document_tokens)
    sequences = source.integers(config.vocab_size, size=(num_documents, document_tokens + 1))
    shape = Shape.of(config, neuron_block=NEURON_BLOCK)
    trainer = _trainer(config, shape, micro_batch, seed)
    samplers: dict[str, Sampler] = {
        "random": RandomSampler(shape, seed),
        "nested": NestedSampler(shape),
        "sequences": RandomSampler(shape, seed, depth="sequences"),
    }
    arms: dict[str, tuple[Sampler, Rates]] = {"full": (samplers["nested"], Rates())}
    for kind, sampler in samplers.items():
        for stage, rates in _STAGES.items():
            # Without skipped layers it does not matter how they are skipped.
            if kind != "sequences" or rates.layers < 1.0:
                arms[f"{kind}_{stage}"] = sampler, rates

    def timed(sampler: Sampler, rates: Rates) -> Callable[[int], tuple[float, float]]:
        def step(number: int) -> tuple[float, float]:
            started = time.perf_counter(), time.process_time()
            trainer.step(
                sequences,
                LR,
                lambda place, count: sampler.draw(rates, number, place, count),
            )
            return time.perf_counter() - started[0], time.process_time() - started[1]

        return step

    both = interleaved({name: timed(*arm) for name, arm in arms.items()}, rounds)
    seconds, cpu_seconds = (
        {name: [pair[place] for pair in pairs] for name, pairs in both.items()} for place in (0, 1)
    )
    tokens = num_documents * document_tokens
    drawn = {
        name: sampler.draw(rates, 0, 0, micro_batch) for name, (sampler, rates) in arms.items()
    }
    counted = {
        name: tokens * token_flops(config, each, document_tokens).training
        + optimizer_flops(_updated_shapes(trainer, each), "adamw")
        for name, each in drawn.items()
    }
    flops_ratio = {name: counted[name] / counted["full"] for name in arms if name != "full"}
    return {
        "benchmark": "est",
        "provenance": provenance(seed),
        "config": {
            "model": f"{config.family} of {config.num_layers} layers, width {config.hidden_size}",
            "tokens": tokens,
            "document_tokens": document_tokens,
            "micro_batch_tokens": micro_batch * document_tokens,
            "rates": {stage: rates.values for stage, rates in _STAGES.items()},
            "optimizer": "adamw, float32 masters, what took no part is left alone",
            "compute_dtype": fast_dtype(),
            "threads": 1,
        },
        "bar": BAR,
        "step_s": {name: median_interval(values) for name, values in seconds.items()},
        "step_flops": counted,
        "stage_time_ratio": {
            name: ratio_interval(seconds[name], seconds["full"]) for name in flops_ratio
        },
        "stage_flops_ratio": flops_ratio,
        "stage_flops_ratio_paper": {
            name: layer_ratio(config, drawn[name], drawn["full"]) for name in flops_ratio
        },
        "time_over_flops": _over(seconds, flops_ratio),
        "cpu_time_over_flops": _over(cpu_seconds, flops_ratio),
    }


def _over(
    seconds: Mapping[str, Sequence[float]], flops_ratio: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Time ratios within a round, over what was counted."""
    return {
        name: ratio_interval(seconds[name], [ratio * each for each in seconds["full"]])
        for name, ratio in flops_ratio.items()
    }


def _trainer(config: DecoderConfig, shape: Shape, micro_batch: int, seed: int) -> Pretrainer:
    torch.manual_seed(seed)
    decoder = Decoder(config)
    for parameter in decoder.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    dtype = DTYPES[fast_dtype()]
    return Pretrainer(decoder, UpdateRule(), Passes(micro_batch), shape=shape, compute_dtype=dtype)


def _updated_shapes(trainer: Pretrainer, subnetwork: Subnetwork) -> list[tuple[int, ...]]:
    """Shapes of what the optimizer updates: parameters, and rows or columns of them."""
    layout, named = trainer.layout, dict(trainer.decoder.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in named.items()}
    for layer, part in enumerate(subnetwork.layers):
        prefix = layout.prefix.format(layer)
        for name in layout.names(named, layer):
            if part is None and name.removeprefix(prefix) not in layout.output_biases:
                shapes[name] = [0]
        for piece in layout.slices:
            name = prefix + piece.parameter
            if part is not None and piece.offset == 0:
                shapes[name][piece.dim] = 0
        for piece in layout.slices:
            if part is not None:
                kept = len(layout.units(piece.axis, part)) * piece.size
                shapes[prefix + piece.parameter][piece.dim] += kept
    return [tuple(shape) for shape in shapes.values()]
