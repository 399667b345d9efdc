"""Speed of decoding: plain against transformers, speculative against plain, and where time goes.

One thread in a process like a run's workers, the machine's fast format, temperature 1, prompts of
the quickstart's task (each once: no sibling's text helps), and speculation as `tuner: table`
has it for the live batch. Speculative and plain arms decode the same responses (the tokens are
compared) at a constant live batch: a finished row is replaced at once, and only decode steps count.
Each speculative arm starts from the same state of calibration and suffix index, which has never
seen its prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ratoon.bench.adaptive import BAR, against_plain
from ratoon.bench.intervals import median_interval
from ratoon.bench.subject import (
    MAX_TOKENS,
    Decoded,
    Subject,
    compared,
    decode,
    guessing_arm,
    load_subject,
)
from ratoon.bench.timing import Stopwatch, interleaved, ratio_interval, worker_pool
from ratoon.errors import CapabilityError
from ratoon.observe.provenance import provenance
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native.drafting import Drafting

TRANSFORMERS_BATCHES = (1, 4, 8)
LIVE_BATCHES = (1, 2, 4, 8, 16)
# Of these live batches the bar speaks; the others show where speculation stops to pay.
BARRED = (1, 2, 4)
PLAIN_BAR, SPECULATIVE_BAR, SELECTION_BAR = 1.5, 1.3, 0.08

GENERATED = 48
PROFILED_STEPS = 20


def run(
    model: Path, *, drafter: Path | None = None, rounds: int = 9, seed: int = 0
) -> dict[str, Any]:
    """Measure all cases in interleaved rounds; JSON values. About nine minutes for nine rounds.

    Without `drafter` only the suffix drafter guesses. Ratios are medians over rounds with a
    bootstrap interval; a bar is met by the lower end.

    Raises: CheckpointError if model or drafter cannot be read, CapabilityError without
    transformers.
    """
    with worker_pool() as process:
        measured = process.submit(_measure, model, drafter, rounds, seed).result()
    return {**measured, "provenance": provenance(seed)}


def _measure(model: Path, drafter: Path | None, rounds: int, seed: int) -> dict[str, Any]:
    subject = load_subject(model, drafter)
    against_transformers = _against_transformers(subject, rounds, seed)
    speculative, identical, entropy = _speculative(subject, rounds)
    adaptive = against_plain(subject, rounds)
    parts, selection = _parts(subject)
    barred = [row["low"] for row in speculative if row["live_batch"] in BARRED]
    return {
        "benchmark": "rollout",
        "model": model.name,
        "drafters": "suffix and learned" if drafter else "suffix only: no drafter was given",
        "speculation": subject.settings.model_dump(),
        "numerics": "invariant" if subject.confirm else "tolerant",
        "plain_against_transformers": against_transformers,
        "speculative_against_plain": speculative,
        "adaptive_against_plain": adaptive,
        "milliseconds_of_a_step": parts,
        "selection_share_at_8_rows": selection,
        "tokens_identical": identical,
        "entropy_per_token": entropy,
        "bars_met": {
            f"plain >= {PLAIN_BAR}x": min(r["low"] for r in against_transformers) >= PLAIN_BAR,
            f"speculative >= {SPECULATIVE_BAR}x": min(barred) >= SPECULATIVE_BAR,
            f"adaptive >= {BAR}x": min(row["low"] for row in adaptive) >= BAR,
            f"selection <= {SELECTION_BAR}": selection["high"] <= SELECTION_BAR,
        },
    }


# Plain against transformers


def _against_transformers(subject: Subject, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Whole calls, prefill included; the same prompts and number of tokens."""
    theirs = _transformers_arm(subject, seed)

    def ours(num_rows: int, number: int) -> float:
        engine = subject.engine(num_rows)
        for row in range(num_rows):
            engine.submit(subject.request(row, number, stop=False, max_tokens=GENERATED))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        return num_rows * GENERATED / (time.perf_counter() - start)

    arms: dict[str, Callable[[int], float]] = {}
    for size in TRANSFORMERS_BATCHES:
        arms[f"ratoon {size}"] = partial(ours, size)
        arms[f"transformers {size}"] = partial(theirs, size)
    rates = interleaved(arms, rounds)
    rows = []
    for size in TRANSFORMERS_BATCHES:
        mine, other = rates[f"ratoon {size}"], rates[f"transformers {size}"]
        ratio = ratio_interval(mine, other)
        rows.append(
            {
                "live_batch": size,
                "ratoon_tokens_per_s": median_interval(mine)["median"],
                "transformers_tokens_per_s": median_interval(other)["median"],
                "ratio": ratio["median"],
                "low": ratio["low"],
                "high": ratio["high"],
            }
        )
    return rows


def _transformers_arm(subject: Subject, seed: int) -> Callable[[int, int], float]:
    """Tokens per second of one call of `generate`, sampling at temperature 1."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CapabilityError(
            "The baseline needs transformers, which is not installed: pip install transformers."
        ) from None
    peer = AutoModelForCausalLM.from_pretrained(str(subject.path), dtype=subject.model.dtype).eval()
    torch.manual_seed(seed)

    def generate(num_rows: int, number: int) -> float:
        requests = [
            subject.request(row, number, stop=False, max_tokens=GENERATED)
            for row in range(num_rows)
        ]
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(num_rows, longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, longest - len(request.prompt_ids) :] = 1
        start = time.perf_counter()
        out = peer.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=GENERATED,
            max_new_tokens=GENERATED,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - start
        assert out.shape == (num_rows, longest + GENERATED)
        return num_rows * GENERATED / seconds

    return generate


# Speculative against plain


def _speculative(subject: Subject, rounds: int) -> tuple[list[dict[str, Any]], bool, float]:
    """Rows by live batch; whether all tokens compared were identical; entropy per token."""
    arms: dict[str, Callable[[int], Decoded]] = {}
    for size in LIVE_BATCHES:
        arms[f"plain {size}"] = partial(decode, subject, size)
        arms[f"speculative {size}"] = guessing_arm(subject, size)
    results = interleaved(arms, rounds)
    rows: list[dict[str, Any]] = []
    logprobs: list[float] = []
    identical = True
    for size in LIVE_BATCHES:
        plain, guessed = results[f"plain {size}"], results[f"speculative {size}"]
        rows.append(compared(size, plain, guessed, "speculative"))
        for one, other in zip(plain, guessed, strict=True):
            both = one.finished.keys() & other.finished.keys()
            identical &= all(one.finished[key] == other.finished[key] for key in both)
            logprobs += one.logprobs
    return rows, identical, -sum(logprobs) / max(1, len(logprobs))


# Where a step's time goes


def _parts(subject: Subject) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Median milliseconds by part of a step; the share of noise and selection at 8 rows."""
    table = []
    selection: dict[str, float] = {}
    for size, guess in ((1, False), (4, False), (8, False), (1, True), (4, True)):
        steps = _profiled(subject, size, subject.drafting(size) if guess else None)
        parts = {
            part: round(median_interval([step[part] * 1e3 for step in steps])["median"], 2)
            for part in steps[0]
        }
        table.append({"case": "speculative" if guess else "plain", "live_batch": size, **parts})
        if size == 8:
            selection = median_interval([step["selection"] / step["total"] for step in steps])
    return table, selection


def _profiled(subject: Subject, size: int, drafting: Drafting | None) -> list[dict[str, float]]:
    """Seconds by part of each of some decode steps."""
    engine = subject.engine(size, drafting)
    for row in range(size):
        engine.submit(subject.request(row, 0, stop=False, max_tokens=MAX_TOKENS))
    while engine.num_waiting:
        engine.step()
    parts: dict[str, tuple[Any, str]] = {
        "forward": (subject.model, "forward"),
        "head": (subject.model, "logits"),
        "selection": (engine_module, "walk"),
        "commit": (engine.rows, "commit"),
    }
    if drafting is not None:
        parts |= {"draft": (drafting, "draft"), "learn": (drafting, "committed")}
    names = ("draft", "forward", "head", "selection", "commit", "learn")
    steps = []
    with Stopwatch().around(parts) as watch:
        for number in range(PROFILED_STEPS + 2):
            start = time.perf_counter()
            engine.step()
            total = time.perf_counter() - start
            seconds = watch.take()
            if number < 2:
                continue
            step = {name: seconds.get(name, 0.0) for name in names}
            steps.append({**step, "rest": total - sum(seconds.values()), "total": total})
    return steps
