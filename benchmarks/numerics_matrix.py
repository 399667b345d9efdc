"""The full invariance matrix on real weights, and what breaks it: writes one JSON record.

Every case compares the logits of one row of a batch with the same tokens decoded alone, one by one,
bit for bit: batch x new tokens x neighbours x prefill portions x tree or chain x context. The
mutations are what must break it, and do; `narrow_and_wide` runs the start-up check on other shapes.

Usage: `python benchmarks/numerics_matrix.py MODEL OUT.json` (10 to 20 minutes on one thread)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ratoon.bench.numerics import CHUNKS, Case, Laboratory, all_cases
from ratoon.models import prepacked
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import random_decoder
from ratoon.observe.provenance import provenance
from ratoon.rollout.native import numerics
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance

CONTEXTS = (1, 63, 64, 65, 200, 1000, 2031)
NUM_POSITIONS = 2112
# Hidden size, MLP width, query heads, key/value heads.
SHAPES = {
    "hidden 32": (32, 64, 2, 1),
    "hidden 48": (48, 96, 3, 1),
    "hidden 64": (64, 128, 4, 2),
    "hidden 96": (96, 192, 6, 2),
    "SmolLM2-360M": (960, 2560, 15, 5),
    "TinyLlama-1.1B": (2048, 5632, 32, 4),
    "Llama-3.2-1B": (2048, 8192, 32, 8),
}


def served(decoder: Decoder, **changes: Any) -> InferenceModel:
    """The model as the engine runs it."""
    options = {"num_positions": NUM_POSITIONS, "dtype": torch.bfloat16, **changes}
    return InferenceModel(decoder, **options)


def run_matrix(laboratory: Laboratory) -> dict[str, Any]:
    """All cases, and the keys and values of all prefills."""
    prefills = [(context, chunk) for context in CONTEXTS for chunk in CHUNKS]
    cases = list(all_cases(CONTEXTS))
    failures = [str(case) for case in cases if not laboratory.keeps_logits(case)]
    changed = [prefill for prefill in prefills if not laboratory.keeps_keys(*prefill)]
    return {
        "cases": len(cases),
        "failures": failures,
        "prefills": len(prefills),
        "prefills_with_other_keys": changed,
    }


def run_mutations(decoder: Decoder) -> dict[str, Any]:
    """What the start-up check finds without each of the three precautions."""
    with mock.patch.object(numerics, "attention_width", lambda length, dtype: length):
        unrounded = check_invariance(served(decoder))
    with mock.patch.object(prepacked, "MAX_ROWS", 1 << 20):
        unsplit = check_invariance(served(decoder))
    hint = check_invariance(served(decoder, row_hint=16))
    return {
        "key width not rounded": unrounded.failures,
        "more than 128 rows in one call": unsplit.failures,
        "prepacked for 16 rows": hint.failures,
    }


def count_scattered(laboratory: Laboratory) -> dict[str, Any]:
    """Share of the rows beside the plain columns whose logits differ."""
    differing = compared = 0
    for context in CONTEXTS:
        for batch in (1, 3, 16, 32):
            for num_new in (8, 16):
                case = Case(context, 64, batch, num_new, "other lengths", "tree")
                found, of = laboratory.count_scattered(case)
                differing, compared = differing + found, compared + of
    return {"differing": differing, "compared": compared}


def check_shape(hidden: int, inner: int, heads: int, kv_heads: int) -> list[str]:
    """Failures of the start-up check on one random layer."""
    config = DecoderConfig(
        family="llama",
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
    )
    return list(check_invariance(served(random_decoder(config, seed=0))).failures)


def main() -> None:
    """Run everything and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("out", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    decoder = load_decoder(arguments.model)
    laboratory = Laboratory(served(decoder), CONTEXTS)
    report = check_invariance(served(decoder))
    record = {
        "benchmark": "numerics_matrix",
        "model": arguments.model.name,
        "contexts": CONTEXTS,
        "start_up_check": {"cases": report.cases, "failures": report.failures},
        "matrix": run_matrix(laboratory),
        "mutations": run_mutations(decoder),
        "scattered_tree_slots": count_scattered(laboratory),
        "narrow_and_wide": {name: check_shape(*shape) for name, shape in SHAPES.items()},
        **provenance(0),
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
