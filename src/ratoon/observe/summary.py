"""`summary.json`: the figures that one run is judged by, each named once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratoon.observe.files import to_json, write_atomically

SUMMARY: dict[str, str] = {
    "reward_before": "Mean held-out reward before training",
    "reward_after": "Mean held-out reward after training",
    "reward_diff_stderr": "Standard error of the paired difference after - before, over prompts",
    "tokens_identical": "Whether the replay without speculation drew exactly the same tokens",
    "flips": "Tokens that rounding changed (0 in invariant numerics)",
    "numerics": "`invariant` or `tolerant`, as the engine ran",
    "rollout_speedup": "Rollout time without speculation / with, of the replayed step",
    "step_speedup": "Whole step time without speculation / with, of the replayed step",
    "rollout_share": "Share of a step that generation takes",
    "update_share": "Share of a step that the policy update takes",
    "reward_share": "Share of a step spent waiting for rewards",
    "idle_fraction": "Share of worker time in rollouts with nothing left to decode",
    "idle_fraction_filled": "Share of that time spent training the drafter",
    "spot_tokens": "Tokens the drafter was trained on in idle time",
    "spot_stop_ms_median": "Median time to stop spot training, milliseconds",
    "acceptance_length_first": "Tokens per verification in the first step that guessed ahead",
    "acceptance_length_last": "Tokens per verification in the last such step",
    "entropy_per_token": "Entropy of the policy over its own responses, nats per token",
    "seconds": "Wall-clock time of the run, seconds",
}
OPTIONAL: dict[str, str] = {
    "title": "What was trained on what, in one line",
    "steps": "RL steps",
    "workers": "Worker processes",
    "responses_compared": "Responses whose tokens were compared in the replay",
    "tokens_compared": "Tokens compared in the replay",
    "replays": "Timed cases, each {case, plain_s, ratoon_s, tokens, identical}, losses included",
    "notes": "Sentences that a reader of the figures must know",
}


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Write `summary.json`; a figure that was not measured is None.

    Raises:
        ValueError: a key is unknown or missing, or a value is NaN.
    """
    missing = sorted(SUMMARY.keys() - values.keys())
    unknown = sorted(values.keys() - SUMMARY.keys() - OPTIONAL.keys())
    if missing or unknown:
        raise ValueError(f"summary: missing keys {missing}, unknown keys {unknown}")
    ordered = {key: values[key] for key in (*SUMMARY, *OPTIONAL) if key in values}
    write_atomically(path, to_json(ordered, indent=2) + "\n")
