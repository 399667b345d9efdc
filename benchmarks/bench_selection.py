"""Cost of noise and selection, one thread: prints one JSON record.

Milliseconds per row, median and spread (10th and 90th percentile) over interleaved rounds:

- `select`: keys of the position, noise and selection from bfloat16 logits over 49,152 ids;
- `exponential` and `exponential_estimate`: the noise of 8,192 draft ids;
- `log_softmax`: torch's own on the same logits in float32, to judge the machine by.

Usage: `python benchmarks/bench_selection.py [--rounds N]`
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ratoon.observe.provenance import provenance
from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import keyed_noise
from ratoon.sampling.select import Selector

VOCAB = 49_152
DRAFT_IDS = 8_192
ROWS = (1, 8, 64)
PARAMS = {
    "temperature_1": SamplingParams(),
    "temperature_0.7": SamplingParams(temperature=0.7),
    "temperature_0": SamplingParams(temperature=0.0),
    "top_k_50": SamplingParams(top_k=50),
    "top_p_0.9": SamplingParams(temperature=0.7, top_p=0.9),
}


def make_cases(num_rows: int, seed: int) -> dict[str, Callable[[], object]]:
    """What is timed for one number of rows."""
    generator = torch.Generator().manual_seed(seed)
    # A standard deviation of 3 gives about the entropy of a language model's open text.
    logits = torch.randn(num_rows, VOCAB, generator=generator).mul_(3.0).bfloat16()
    draft_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_IDS].sort().values
    keys = keyed_noise.sequence_keys(
        DrawKey(seed=seed, stream=Stream.TRAIN, round=1, dataset="bench", row=i, sample=0)
        for i in range(num_rows)
    )
    t = torch.full((num_rows,), 300)
    selector = Selector(VOCAB)
    wide = logits.float()

    def noise_tables() -> keyed_noise.NoiseTables:
        return keyed_noise.noise_tables(keyed_noise.row_keys(keys, t), VOCAB)

    def select(params: SamplingParams) -> object:
        return selector.select(logits, keyed_noise.row_keys(keys, t), params)

    cases: dict[str, Callable[[], object]] = {
        f"select {name}": partial(select, params) for name, params in PARAMS.items()
    }
    cases["exponential"] = lambda: keyed_noise.exponential(
        keyed_noise.row_keys(keys, t), draft_ids, VOCAB, torch.float32
    )
    cases["exponential_estimate"] = lambda: keyed_noise.exponential_estimate(
        noise_tables(), draft_ids
    )
    cases["log_softmax"] = lambda: torch.log_softmax(wide, dim=-1)
    return cases


def measure(cases: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; the cases take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(num_rounds + 2):
        for name, case in cases.items():
            start = time.perf_counter()
            case()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Measure for each number of rows and print the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds for each number of rows")
    num_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    seed = 0
    results = {}
    for num_rows in ROWS:
        seconds = measure(make_cases(num_rows, seed), num_rounds)
        results[f"{num_rows} rows"] = {
            name: {
                "median": round(float(np.median(values)) * 1e3 / num_rows, 4),
                "p10": round(float(np.quantile(values, 0.1)) * 1e3 / num_rows, 4),
                "p90": round(float(np.quantile(values, 0.9)) * 1e3 / num_rows, 4),
            }
            for name, values in seconds.items()
        }
    record = {
        "benchmark": "selection",
        "unit": "milliseconds per row",
        "config": {"vocab": VOCAB, "draft_ids": DRAFT_IDS, "threads": 1, "rounds": num_rounds},
        "results": results,
        **provenance(seed),
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
