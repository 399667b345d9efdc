"""Speed of the main loops on one device, as one JSON table: a GPU where there is one.

Random weights at the shapes of SmolLM2-135M and GPT-2, made in place; nothing is read. Seconds are
medians of rounds, with the device's queue empty before and after. Run:
`python benchmarks/device_table.py [--tiny] [--out FILE]`
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ratoon.bench.drafter import TARGET
from ratoon.bench.est import GPT2_SMALL
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.est.sampler import RandomSampler
from ratoon.est.subnetwork import Rates, Shape, Subnetwork
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.graph_pool import CudaGraphs, GraphPool, graph_pool
from ratoon.models.initialise import new_decoder
from ratoon.models.tiny import random_decoder
from ratoon.observe.files import write_atomically
from ratoon.observe.provenance import provenance
from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import decode
from ratoon.speculation.strategy import PLAIN, Strategy, StrategyTable
from ratoon.speculation.tuner import RuleTuner, TableTuner, Tuner
from ratoon.training.core import TrainerCore
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.optimizer import OptimizerSettings
from ratoon.training.policy_trainer import PolicyLossSettings, PolicyTrainer
from ratoon.training.pretrainer import Passes, Pretrainer
from ratoon.training.samples import Sample

LIVE = (1, 4, 16, 64)
NODES = (1, 8, 16)
CONTEXT = 256
TREE = Strategy(depth=4, branching=4, beam=4, budget=12, use_suffix=False)
TIERS = [(4, TREE), (12, TREE.within(4, 3)), (24, TREE.within(2, 2))]
ROUNDS = 7
STAGES = {"1": Rates(0.5, 0.5, 0.5), "2": Rates(1.0, 0.5, 0.5), "full": Rates()}
TINY: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_layers": 4,
    "num_heads": 4, "num_kv_heads": 4, "head_dim": 16,
}  # fmt: skip


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the script")
    parser.add_argument("--out", type=Path, help="also write the table into this file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[fast_dtype(cuda=device.type == "cuda")]
    small = TINY if options.tiny else {}
    table = {
        "benchmark": "device",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."),
        "tiny": options.tiny,
        **_decoding(replace(TARGET, **small), device, dtype),
        "policy_update": _update(replace(TARGET, **small), device, dtype, options.tiny),
        "pretraining": _pretraining(replace(GPT2_SMALL, **small), device, dtype, options.tiny),
        "provenance": provenance(0),
    }
    text = json.dumps(table, indent=2)
    print(text)
    if options.out is not None:
        write_atomically(options.out, text + "\n")


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median seconds of `work`, after one call that warms up."""
    found = []
    for number in range(ROUNDS + 1):
        _finish(device)
        started = time.perf_counter()
        work()
        _finish(device)
        if number:
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _decoding(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    decoder = random_decoder(config, seed=0).to(device)
    taps = DrafterConfig.for_target(config, 8192, 512).taps
    model = InferenceModel(decoder, num_positions=2 * CONTEXT, dtype=dtype, taps=taps)
    passes = []
    for live in LIVE:
        cache = model.make_cache(live, CONTEXT + max(NODES))
        for nodes in NODES:
            tokens = torch.zeros(live, nodes, dtype=torch.int64, device=device)
            with torch.inference_mode():
                took = seconds(
                    device,
                    lambda tokens=tokens, cache=cache, live=live: decode(
                        model, cache, tokens, [CONTEXT] * live
                    ),
                )
            passes.append({"live_batch": live, "nodes": nodes, "seconds": took})
    settings: tuple[CudaGraphs, ...] = ("off", "on") if device.type == "cuda" else ("off",)
    steps: dict[str, list[dict[str, Any]]] = {"plain_steps": [], "speculative_steps": []}
    rollouts = []
    for setting in settings:
        for live in LIVE:
            for rows, strategy in zip(steps.values(), (PLAIN, TREE), strict=True):
                graphs = graph_pool(setting, device)
                tuner = RuleTuner(lambda num_live, strategy=strategy: strategy)
                row = _steps(_engine(model, decoder, live, tuner, graphs), live)
                rows.append({"live_batch": live, "cuda_graphs": setting, **row})
        graphs = graph_pool(setting, device)
        tuner = TableTuner(StrategyTable(TIERS))
        row = _rollout(_engine(model, decoder, max(LIVE), tuner, graphs), graphs)
        rollouts.append({"live_batch": max(LIVE), "cuda_graphs": setting, **row})
    return {"forward_passes": passes, **steps, "rollouts": rollouts}


def _engine(
    model: InferenceModel, decoder: Decoder, live: int, tuner: Tuner, graphs: GraphPool | None
) -> RolloutEngine:
    """An engine with a drafter that was never trained: what guessing costs, not what it gains."""
    config, device = decoder.config, model.embedding.device
    shape = DrafterConfig.for_target(config, 8192, 512, model.taps)
    learned = LearnedDrafter(
        shape,
        num_rows=live,
        num_positions=2 * CONTEXT,
        num_tree_slots=TREE.beam * (TREE.depth - 1),
        dtype=model.dtype,
        device=device,
    )
    drafting = Drafting(
        num_rows=live,
        vocab_limit=config.vocab_size,
        max_nodes=TREE.budget + 1,
        learned=learned,
        device=device,
    )
    vocabulary = torch.arange(shape.draft_vocab_size, device=device)
    drafting.load(Eagle3Drafter.from_target(shape, decoder, vocabulary), model.embedding)
    return RolloutEngine(
        model,
        max_rows=live,
        max_length=CONTEXT,
        vocab_limit=config.vocab_size,
        drafting=drafting,
        tuner=tuner,
        confirm=False,
        graphs=graphs,
    )


def _submit(engine: RolloutEngine, max_tokens: Sequence[int]) -> None:
    for row, most in enumerate(max_tokens):
        key = DrawKey(0, Stream.TRAIN, 1, "device", row, 0)
        engine.submit(Request(key, (row % 7, 3, 5), most, ()))
    while engine.num_waiting:
        engine.step()
    engine.take_stats()


def _steps(engine: RolloutEngine, live: int) -> dict[str, float]:
    _submit(engine, [CONTEXT - 3] * live)
    took = seconds(engine.model.embedding.device, engine.step)
    stats = engine.take_stats()
    return {
        "seconds": took,
        "tokens_per_s": stats.tokens / (stats.plain_steps + stats.speculative_steps) / took,
    }


def _rollout(engine: RolloutEngine, graphs: GraphPool | None) -> dict[str, Any]:
    """Seconds of a whole rollout, the first of which captures, and the memory of its graphs.

    Naively there is a graph of each strategy for each live batch: of its pass, of showing the
    drafter what was committed, and of each drafted level but the first. Their bytes are those of as
    many graphs of average size.
    """
    live = max(LIVE)
    found: dict[str, Any] = {}
    for name in ("first_seconds", "seconds"):
        _submit(engine, [2 + row // 2 for row in range(live)])
        _finish(engine.model.embedding.device)
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        found[name] = time.perf_counter() - started
    if graphs is None:
        return found
    report = graphs.report()
    naive = live * (1 + sum(1 + strategy.depth for _, strategy in TIERS))
    mean = report.num_bytes // report.graphs
    return {**found, **asdict(report), "naive_graphs": naive, "naive_bytes": naive * mean}


def _update(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, tiny: bool
) -> dict[str, float]:
    source = random.Random(0)
    length = 20 if tiny else 200

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(config.vocab_size) for _ in range(count))

    samples = [Sample(ids(40), ids(length), source.gauss(0, 1), group=n // 8) for n in range(32)]
    core = TrainerCore(
        random_decoder(config, seed=0).to(device),
        OptimizerSettings(lr=1e-6),
        compute_dtype=dtype,
        micro_batch_tokens=2048,
        temperature=1.0,
    )
    trainer = PolicyTrainer(core, PolicyLossSettings())
    took = seconds(device, lambda: trainer.update(samples, minibatches=1))
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {"seconds": took, "tokens_per_s": tokens / took}


def _pretraining(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, tiny: bool
) -> list[dict[str, Any]]:
    count, length = (4, 32) if tiny else (16, 1024)
    sequences = np.random.default_rng(0).integers(0, config.vocab_size, (count, length + 1))
    shape = Shape.of(config, neuron_block=1 if tiny else 32)
    decoder: Decoder = new_decoder(config, 0).to(device)
    trainer = Pretrainer(
        decoder, UpdateRule(), Passes(max(1, count // 4)), shape=shape, compute_dtype=dtype
    )
    sampler = RandomSampler(shape, 0)
    rows = []
    for name, rates in STAGES.items():

        def draw(micro_batch: int, count: int, rates: Rates = rates) -> Subnetwork:
            return sampler.draw(rates, 0, micro_batch, count)

        took = seconds(device, lambda draw=draw: trainer.step(sequences, 1e-6, draw))
        rows.append({"stage": name, "seconds": took, "tokens_per_s": count * length / took})
    return rows


if __name__ == "__main__":
    main()
