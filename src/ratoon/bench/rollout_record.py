"""What the rollout benchmark's cases say: ratios with intervals, and which bars they meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.bench.intervals import as_ratio, median_interval
from ratoon.bench.rollout_case import ASSISTED, PEERS, PROMPT_LOOKUP, Setting
from ratoon.bench.timing import ratio_interval

Row = dict[str, Any]
Rows = list[Row]

NOT_MEASURED = "not measured"
NOT_APPLICABLE = "not applicable: computes in float32"


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach by its lower end, or stay below by its upper one.

    It speaks of `least_live` to `most_live` live sequences and, where `only_bf16` says so, of
    machines that compute in bf16 alone.
    """

    figure: str
    limit: float
    at_most: bool = False
    only_bf16: bool = False
    least_live: int = 1
    most_live: int = 64

    def __str__(self) -> str:
        live = ""
        if self.least_live == self.most_live:
            live = f" at {self.most_live} live"
        elif self.most_live < 64:
            live = f" up to {self.most_live} live"
        return f"{self.figure} {'<=' if self.at_most else '>='} {self.limit:g}{live}"

    def verdict(self, rows: Rows, compute: str) -> bool | str:
        """Whether all rows of the figure meet it."""
        if self.only_bf16 and compute != "bfloat16":
            return NOT_APPLICABLE
        rows = [row for row in rows if self.least_live <= row["live_batch"] <= self.most_live]
        if not rows:
            return NOT_MEASURED
        if self.at_most:
            return bool(max(row["high"] for row in rows) <= self.limit)
        return bool(min(row["low"] for row in rows) >= self.limit)


BARS = (
    Bar("plain_vs_transformers", 1.5, only_bf16=True),
    Bar("plain_vs_vllm_cpu", 1.0),
    Bar("spec_vs_plain", 1.3, only_bf16=True, most_live=4),
    Bar("spec_vs_prompt_lookup", 1.0),
    Bar("spec_vs_assisted", 1.0),
    # With any drafter and at any live batch, guessing must not lose more than this.
    Bar("adaptive_vs_plain", 0.95),
    Bar("bandwidth_share", 0.7, only_bf16=True),
    Bar("selection_share", 0.08, at_most=True, least_live=8, most_live=8),
    Bar("switch_plain_to_speculative_steps", 1.0, at_most=True),
)


def summarise(
    setting: Setting, cells: Sequence[dict[str, Any]], switches: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """All figures by case; `rates` are tokens per second."""
    figures = {
        **_against_peers(cells),
        "spec_vs_plain": [_guessing(cell, "speculative") for cell in cells],
        "adaptive_vs_plain": [_guessing(cell, "adaptive") for cell in cells],
        "bandwidth_share": [_bandwidth(cell) for cell in cells if "read" in cell["rates"]],
        "selection_share": [
            {**cell["case"], **as_ratio(median_interval(cell["selection_share"]))} for cell in cells
        ],
        "switch_plain_to_speculative_steps": [_switch(cell) for cell in switches],
    }
    compute = cells[0]["compute"]
    return {
        "benchmark": "rollout",
        "model": setting.model.name,
        "drafters": "suffix and learned"
        if setting.drafter
        else "suffix only: no drafter was given",
        "rounds": setting.rounds,
        "compute": compute,
        "numerics": "invariant" if all(c["numerics"] == "invariant" for c in cells) else "tolerant",
        **figures,
        "milliseconds_of_a_step": [
            {**cell["case"], "step": step, **parts}
            for cell in cells
            for step, parts in cell["milliseconds"].items()
        ],
        "rows_that_differ": sum(cell["rows_that_differ"] for cell in cells),
        "rows_compared": sum(cell["rows_compared"] for cell in cells),
        "tokens_identical_across_threads": _same_across_threads(cells),
        "bars_met": {str(bar): bar.verdict(figures.get(bar.figure, []), compute) for bar in BARS},
    }


def _against_peers(cells: Sequence[dict[str, Any]]) -> dict[str, Rows]:
    figures: dict[str, Rows] = {}
    for peer in PEERS:
        for name, arm in (("plain", "plain"), ("spec", "speculative")):
            # Guessing is compared with those that guess, too.
            rows = [_ratio(cell, arm, peer) for cell in cells if peer in cell["rates"]]
            if rows and (name == "plain" or peer in (PROMPT_LOOKUP, ASSISTED)):
                figures[f"{name}_vs_{peer.replace('-', '_')}"] = rows
    return figures


def _ratio(cell: dict[str, Any], arm: str, other: str) -> Row:
    ours, theirs = cell["rates"][arm], cell["rates"][other]
    return {
        **cell["case"],
        f"{arm}_tokens_per_s": median_interval(ours)["median"],
        f"{other}_tokens_per_s": median_interval(theirs)["median"],
        **as_ratio(ratio_interval(ours, theirs)),
    }


def _guessing(cell: dict[str, Any], arm: str) -> Row:
    """Beside each ratio how sure the model is, without which it says little."""
    entropy = {"entropy_per_token": cell["entropy_per_token"]}
    return {**_ratio(cell, arm, "plain"), **entropy, **cell["guessed"][arm]}


def _bandwidth(cell: dict[str, Any]) -> Row:
    """What a plain step of one sequence must read, against what could be read in its time."""
    read = cell["rates"]["read"]
    needed = [rate * cell["step_bytes"] for rate in cell["rates"]["plain"]]
    return {
        **cell["case"],
        "step_megabytes": cell["step_bytes"] / 1e6,
        "read_gb_per_s": median_interval(read)["median"] / 1e9,
        **as_ratio(ratio_interval(needed, read)),
    }


def _switch(cell: dict[str, Any]) -> Row:
    """What the first speculative step costs more than the next ones, in plain steps."""
    rounds = cell["rounds"]
    extra = [one["first_s"] - one["steady_s"] for one in rounds]
    milliseconds = {
        f"{name}_ms": median_interval([one[f"{name}_s"] * 1e3 for one in rounds])["median"]
        for name in ("plain", "first", "steady")
    }
    plain = [one["plain_s"] for one in rounds]
    return {**cell["case"], **milliseconds, **as_ratio(ratio_interval(extra, plain))}


def _same_across_threads(cells: Sequence[dict[str, Any]]) -> bool | str:
    """Whether plain decoding says the same for any number of threads."""
    said: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    threads = set()
    for cell in cells:
        number, *case = cell["case"].values()
        threads.add(number)
        said[tuple(case)].add(cell["answers_sha256"])
    if len(threads) < 2:
        return NOT_MEASURED
    return all(len(answers) == 1 for answers in said.values())
