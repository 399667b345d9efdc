"""Same tokens, same bits, on real weights: all drafters, shapes, batches and one or two workers.

The reference is plain decoding, one response after the other. Every cell of the matrix decodes the
same responses another way, with two workers each half of them in its own process, and compares
token ids and the bits of log-probabilities. Writes one JSON record.

Usage: `python benchmarks/same_tokens_matrix.py MODEL OUT.json [--drafter DIR]` (about half an hour)
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.drafter.checkpoint import load_drafter
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.loop.quickstart import TASK
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.provenance import provenance
from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.speculation.strategy import PLAIN, RandomStrategies, Strategy
from ratoon.speculation.tuner import RuleTuner

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS, MAX_LENGTH = 8, 3, 40, 160
BATCHES = (1, 3, 16)
WORKERS = (1, 2)
CHAIN = Strategy(depth=4, branching=1, beam=1, budget=4, min_chance=1e-4)
TREE = Strategy(depth=4, branching=4, beam=4, budget=11, min_chance=1e-4)
USES = {"suffix": (False, True), "learned": (True, False), "merged": (True, True)}
SHAPES = {
    f"{name} {shape}": replace(strategy, use_learned=learned, use_suffix=suffix)
    for (name, (learned, suffix)), (shape, strategy) in itertools.product(
        USES.items(), {"chain": CHAIN, "tree": TREE}.items()
    )
}
ARMS: dict[str, list[Strategy]] = {
    "plain": [PLAIN],
    **{name: [strategy] for name, strategy in SHAPES.items()},
    "changing at random": [PLAIN, *SHAPES.values()],
}
Answers = dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]


class Bench:
    """One worker: model, drafter and requests."""

    def __init__(self, path: Path, drafter_path: Path | None) -> None:
        torch.set_num_threads(1)
        decoder = load_decoder(path)
        tokenizer = Tokenizer.load(path)
        if drafter_path is None:
            config = DrafterConfig.for_target(decoder.config, 8192, window=256)
            vocabulary = torch.arange(config.draft_vocab_size)
            self.drafter = Eagle3Drafter.from_target(config, decoder, vocabulary)
        else:
            self.drafter = load_drafter(drafter_path)
        self.model = InferenceModel(
            decoder,
            num_positions=MAX_LENGTH + 2 * (TREE.budget + 1),
            dtype=torch.bfloat16,
            taps=self.drafter.config.taps,
        )
        self.vocab_limit = tokenizer.vocab_size
        prompts = load_prompts(
            {**TASK, "size": NUM_PROMPTS, "seed": 5},
            tokenizer,
            split="eval",
            style=PromptStyle(chat_template=False, max_tokens=MAX_LENGTH - MAX_TOKENS),
        )
        self.requests = [
            Request(
                DrawKey(2, Stream.EVAL, 1, prompt.dataset, prompt.row, sample),
                prompt.ids,
                MAX_TOKENS,
                tokenizer.eos_ids,
            )
            for prompt in prompts
            for sample in range(NUM_SAMPLES)
        ]

    def decode(self, arm: str, batch: int, part: slice) -> tuple[Answers, int, int]:
        """Answers to some requests, tokens committed by speculative steps, and rows of those."""
        strategies = RandomStrategies(ARMS[arm], seed=batch)
        state = 0

        def rule(num_live: int) -> Strategy:
            nonlocal state
            strategy, state = strategies.pick(num_live, state)
            return strategy

        engine = RolloutEngine(
            self.model,
            max_rows=batch,
            max_length=MAX_LENGTH,
            vocab_limit=self.vocab_limit,
            drafting=None if arm == "plain" else self._drafting(batch),
            tuner=RuleTuner(rule),
        )
        answers: Answers = {}
        waiting = list(reversed(self.requests[part]))
        while waiting or engine.has_work:
            # At batch 1 the reference decodes one response after the other anyway.
            while waiting and engine.num_waiting + engine.num_live < 2 * batch:
                engine.submit(waiting.pop())
            for item in engine.step():
                done = item.completion
                answers[done.key.row, done.key.sample] = (done.token_ids, done.logprobs)
        stats = engine.take_stats()
        return answers, stats.tokens_speculated, stats.rows_speculated

    def _drafting(self, num_rows: int) -> Drafting:
        drafting = Drafting(
            num_rows=num_rows,
            vocab_limit=self.vocab_limit,
            max_nodes=TREE.budget + 1,
            suffix=SuffixDrafter(num_rows),
            learned=LearnedDrafter(
                self.drafter.config,
                num_rows=num_rows,
                num_positions=MAX_LENGTH + 2 * (TREE.budget + 1),
                num_tree_slots=TREE.beam * TREE.depth,
            ),
        )
        drafting.load(self.drafter, self.model.embedding)
        return drafting


_worker: list[Bench] = []


def start_worker(path: Path, drafter_path: Path | None) -> None:
    """Load everything once per process."""
    _worker.append(Bench(path, drafter_path))


def decode_in_worker(arm: str, batch: int, part: slice) -> tuple[Answers, int, int]:
    """`Bench.decode` of this process."""
    return _worker[0].decode(arm, batch, part)


def compare(found: Answers, expected: Answers) -> dict[str, Any]:
    """How many responses have other tokens, or other bits of log-probabilities."""
    assert found.keys() == expected.keys()
    return {
        "responses": len(found),
        "other_tokens": sum(found[key][0] != expected[key][0] for key in found),
        "other_logprobs": sum(found[key][1] != expected[key][1] for key in found),
    }


def main() -> None:
    """Run all cells and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--drafter", type=Path, help="a trained drafter; else the initial one")
    arguments = parser.parse_args()
    start_worker(arguments.model, arguments.drafter)
    invariant = check_invariance(_worker[0].model).holds
    expected, _, _ = decode_in_worker("plain", 1, slice(None))
    cells = []
    with ProcessPoolExecutor(
        max_workers=max(WORKERS),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(arguments.model, arguments.drafter),
    ) as pool:
        for arm, batch, workers in itertools.product(ARMS, BATCHES, WORKERS):
            parts = [slice(start, None, workers) for start in range(workers)]
            if workers == 1:
                results = [decode_in_worker(arm, batch, parts[0])]
            else:
                jobs = [pool.submit(decode_in_worker, arm, batch, part) for part in parts]
                results = [job.result() for job in jobs]
            found = {key: answer for answers, _, _ in results for key, answer in answers.items()}
            rows = sum(num_rows for _, _, num_rows in results)
            cell = {"arm": arm, "batch": batch, "workers": workers, **compare(found, expected)}
            if rows:
                cell["acceptance_length"] = sum(tokens for _, tokens, _ in results) / rows
            cells.append(cell)
            print(cell, flush=True)
    record = {
        "benchmark": "same_tokens_matrix",
        "model": arguments.model.name,
        "drafter": "trained" if arguments.drafter else "untrained: the target's last layer",
        "numerics": "invariant" if invariant else "tolerant",
        "different_responses": len(expected),
        "tokens": sum(len(tokens) for tokens, _ in expected.values()),
        "responses_compared": sum(cell["responses"] for cell in cells),
        "other_tokens": sum(cell["other_tokens"] for cell in cells),
        "other_logprobs": sum(cell["other_logprobs"] for cell in cells),
        "cells": cells,
        **provenance(0),
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
