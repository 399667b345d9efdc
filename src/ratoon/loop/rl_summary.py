"""What `summary.json` says of an RL run, from its records: those of all its processes alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ratoon.evals.statistics import paired_difference
from ratoon.loop.replay import Replay
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.sinks import read_steps

Record = dict[str, Any]


@dataclass(slots=True)
class Findings:
    """What is not in the records: held-out rewards by prompt, and the replay of the last step."""

    before: tuple[float, ...] | None = None
    after: tuple[float, ...] | None = None
    replay: Replay | None = None


def step_records(folder: RunFolder) -> list[Record]:
    """The metrics of all RL steps, in their order."""
    records = read_steps(folder.metrics).values()
    return [record for record in records if "time/step_s" in record]


def figures_of(records: Sequence[Record], findings: Findings) -> dict[str, Any]:
    """The figures that training, evaluations and the replay give."""
    before, after, replayed = findings.before, findings.after, findings.replay
    difference = paired_difference(before, after) if before and after else None
    figures = {
        "reward_before": statistics.fmean(before) if before else None,
        "reward_after": statistics.fmean(after) if after else None,
        "reward_diff_stderr": difference[1] if difference else None,
        **_times(records),
        **_drafting(records),
        "entropy_per_token": records[-1]["policy/entropy"] if records else None,
        "tokens_identical": None,
        "flips": None,
        "rollout_speedup": None,
        "step_speedup": None,
    }
    if replayed is not None:
        figures |= _replay(replayed, records[-1])
    return figures


def _times(records: Sequence[Record]) -> dict[str, float | None]:
    """Shares of all steps' time, and of the workers' time in rollouts."""
    total, rollout = (sum(r[f"time/{part}_s"] for r in records) for part in ("step", "rollout"))
    shares = {
        f"{part}_share": sum(r[f"time/{part}_s"] for r in records) / total if total else None
        for part in ("rollout", "update", "reward")
    }
    idle = sum(r["idle/frac"] * r["time/rollout_s"] for r in records)
    filled = sum(
        r["idle/filled_frac"] * r["idle/frac"] * r["time/rollout_s"]
        for r in records
        if r["idle/filled_frac"] is not None
    )
    return {
        **shares,
        "idle_fraction": idle / rollout if rollout else None,
        "idle_fraction_filled": filled / idle if idle else None,
    }


def _drafting(records: Sequence[Record]) -> dict[str, float | None]:
    stops = [r["time/spot_stop_ms"] for r in records if r["time/spot_stop_ms"] is not None]
    accepted = [r["speculation/acceptance_length"] for r in records]
    lengths = [length for length in accepted if length is not None]
    return {
        "spot_tokens": sum(r["drafter/tokens"] for r in records),
        "spot_stop_ms_median": statistics.median(stops) if stops else None,
        "acceptance_length_first": lengths[0] if lengths else None,
        "acceptance_length_last": lengths[-1] if lengths else None,
    }


def _replay(replayed: Replay, last: Record) -> dict[str, Any]:
    rest = last["time/step_s"] - last["time/rollout_s"]
    return {
        "tokens_identical": replayed.flips == 0,
        "flips": replayed.flips,
        "rollout_speedup": replayed.rollout_speedup,
        "step_speedup": replayed.step_speedup(rest),
        "responses_compared": replayed.responses,
        "tokens_compared": replayed.tokens,
        "replays": [
            {
                "case": f"last step, round {index + 1}",
                "plain_s": plain,
                "ratoon_s": fast,
                "tokens": replayed.tokens,
                "identical": replayed.flips == 0,
            }
            for index, (plain, fast) in enumerate(
                zip(replayed.plain_s, replayed.speculative_s, strict=True)
            )
        ],
    }
