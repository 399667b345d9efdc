"""Whole rollouts, from a full batch to the last response: what each tuner makes of the tail.

One worker's share of an RL step: groups of responses to prompts of the quickstart's task, their
real lengths, no slot filled again. Every arm decodes the same responses under the same keys, and
starts each round from the same calibration, suffix index and tuner, which have seen one rollout of
other prompts. Rounds take turns with a few rollouts. The oracle was told, for each live batch,
which of many fixed trees was fastest in this very rollout.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ratoon.bench.intervals import as_ratio, median_interval
from ratoon.bench.subject import MAX_TOKENS, Subject, load_subject
from ratoon.bench.timing import interleaved, ratio_interval, worker_pool
from ratoon.cluster.tuners import largest_of, make_tuner
from ratoon.config.speculation import Speculation
from ratoon.observe.provenance import provenance
from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import RuleTuner, StepRecord, Tuner, Why, never

BATCHES = (8, 16, 64)
GROUP_SIZE = 8
MAX_ROWS = 128
TUNERS = ("cost_model", "bandit", "table")
# Rollouts that rounds take turns with.
NUM_ROLLOUTS = 3
# What the default tuner must gain on plain decoding, by the rollout's first live batch, and how
# near it must come to the oracle.
BARS = {8: 1.9, 16: 1.6, 64: 1.25}
ORACLE_BAR = 0.95
# Trees that the oracle chooses from, as (budget, depth).
_SHAPES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 4), (8, 4), (12, 4), (1, 4), (2, 4))


def run(
    model: Path, *, drafter: Path | None = None, rounds: int = 9, batches: Sequence[int] = BATCHES
) -> dict[str, Any]:
    """Measure all arms in interleaved rounds; JSON values. Ratios above 1 are faster than plain.

    Raises: CheckpointError if model or drafter cannot be read.
    """
    with worker_pool() as process:
        measured = process.submit(_measure, model, drafter, rounds, batches).result()
    return {**measured, "provenance": provenance(0)}


def _measure(
    model: Path, drafter: Path | None, rounds: int, batches: Sequence[int]
) -> dict[str, Any]:
    subject = load_subject(model, drafter)
    rows, against_oracle, identical = [], [], True
    for size in batches:
        results = interleaved(_arms(subject, size), rounds)
        answers = {
            str(sorted(rollout.answers.items())) for arm in results.values() for rollout in arm
        }
        identical &= len(answers) == rounds
        seconds = {name: [one.seconds for one in arm] for name, arm in results.items()}
        rows += [_row(size, name, results[name], seconds) for name in results]
        ratio = ratio_interval(seconds["oracle"], seconds["cost_model"])
        against_oracle.append({"live_batch": size, **as_ratio(ratio)})
    gained = {row["live_batch"]: row["low"] for row in rows if row["tuner"] == "cost_model"}
    return {
        "benchmark": "trace",
        "model": model.name,
        "drafters": "suffix and learned" if drafter else "suffix only: no drafter was given",
        "numerics": "invariant" if subject.confirm else "tolerant",
        "trace_against_plain": rows,
        "trace_adaptive_against_oracle": against_oracle,
        "tokens_identical": identical,
        "bars_met": {
            **{f"from {size}: >= {BARS[size]}x": gained[size] >= BARS[size] for size in gained},
            f"oracle >= {ORACLE_BAR}": min(row["low"] for row in against_oracle) >= ORACLE_BAR,
        },
    }


def _row(
    size: int, name: str, rollouts: Sequence[Rollout], seconds: dict[str, list[float]]
) -> dict[str, Any]:
    tokens = sum(rollout.tokens for rollout in rollouts)
    return {
        "live_batch": size,
        "tuner": name,
        "seconds": median_interval(seconds[name])["median"],
        **as_ratio(ratio_interval(seconds["plain"], seconds[name])),
        "tokens_per_row": tokens / sum(rollout.rows for rollout in rollouts),
    }


class Rollout:
    """One rollout: what was said, how long it took, and each decode step's record."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, ...]] = {}
        self.seconds = 0.0
        self.tokens = self.rows = 0
        self.steps: list[StepRecord] = []


class _Watched:
    """A tuner whose steps are kept."""

    def __init__(self, tuner: Tuner, steps: list[StepRecord]) -> None:
        self._tuner, self._steps = tuner, steps
        self.promise_budget = tuner.promise_budget

    @property
    def why(self) -> Why:
        """See `Tuner.why`."""
        return self._tuner.why

    def seconds(self, strategy: Strategy, num_live: int) -> float | None:
        """See `Tuner.seconds`."""
        return self._tuner.seconds(strategy, num_live)

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        return self._tuner.choose(num_live)

    def observe(self, record: StepRecord) -> None:
        """See `Tuner.observe`."""
        self._steps.append(record)
        self._tuner.observe(record)


def roll_out(
    subject: Subject, size: int, number: int, drafting: Drafting | None, tuner: Tuner
) -> Rollout:
    """Decode `size` responses to their ends; `number` chooses the prompts."""
    rollout = Rollout()
    engine = subject.engine(size, drafting, _Watched(tuner, rollout.steps))
    started = time.perf_counter()
    for place in range(size):
        row = (size * number + place // GROUP_SIZE) % len(subject.prompts)
        key = DrawKey(1, Stream.TRAIN, number, "trace", row, place % GROUP_SIZE)
        engine.submit(Request(key, subject.prompts[row], MAX_TOKENS, subject.eos_ids))
    finished = []
    while engine.has_work:
        finished += engine.step()
    rollout.seconds = time.perf_counter() - started
    stats = engine.take_stats()
    rollout.tokens, rollout.rows = stats.tokens, stats.rows_decoded
    rollout.answers = {str(done.completion.key): done.completion.token_ids for done in finished}
    return rollout


def _arms(subject: Subject, size: int) -> dict[str, Callable[[int], Rollout]]:
    guess = _Guessing(subject, size)

    def plain(number: int) -> Rollout:
        return roll_out(subject, size, _turn(number), None, never())

    def guessing(tuner: Tuner, number: int) -> Rollout:
        return guess(_turn(number), copy.deepcopy(tuner))

    arms: dict[str, Callable[[int], Rollout]] = {"plain": plain}
    for name in TUNERS:
        # Limits that the table and the bandit go by are the configuration's own.
        values = {"drafters": subject.settings.drafters, "max_rows": MAX_ROWS, "tuner": name}
        tuner = make_tuner(Speculation.model_validate(values), subject.model)
        guess(0, tuner)
        arms[name] = partial(guessing, tuner)
    tables = {number: _best_trees(subject, guess, number) for number in range(1, NUM_ROLLOUTS + 1)}

    def oracle(number: int) -> Rollout:
        best = tables[_turn(number)]
        return guess(_turn(number), RuleTuner(lambda num_live: best[num_live.bit_length()]))

    return arms | {"oracle": oracle}


def _turn(number: int) -> int:
    return number % NUM_ROLLOUTS + 1


class _Guessing:
    """Rollouts with both drafters, each from where one of other prompts left them."""

    def __init__(self, subject: Subject, size: int) -> None:
        self._subject, self._size = subject, size
        self._drafting = subject.drafting(size)
        warm_up = RuleTuner(lambda num_live: subject.strategy(num_live))
        roll_out(subject, size, 0, self._drafting, warm_up)
        self._state = self._drafting.state_dict()

    def __call__(self, number: int, tuner: Tuner) -> Rollout:
        self._drafting.load_state_dict(self._state)
        return roll_out(self._subject, self._size, number, self._drafting, tuner)


def _best_trees(subject: Subject, guess: _Guessing, number: int) -> dict[int, Strategy]:
    """The fastest tree of a rollout by the bits of the live batch, each tried on all of it."""
    largest = largest_of(subject.settings)
    rates: dict[int, dict[Strategy, tuple[float, float]]] = {}
    for tree in (PLAIN, *(largest.within(*shape) for shape in _SHAPES)):
        for step in guess(number, RuleTuner(partial(_if_it_fits, tree))).steps:
            found = rates.setdefault(step.num_live.bit_length(), {})
            tokens, seconds = found.get(step.strategy, (0.0, 0.0))
            took = step.draft_s + step.verify_s
            found[step.strategy] = (tokens + step.tokens, seconds + took)
    return {
        bits: max(found, key=lambda tree: found[tree][0] / found[tree][1])
        for bits, found in rates.items()
    }


def _if_it_fits(tree: Strategy, num_live: int) -> Strategy:
    fits = tree.is_plain or num_live * (tree.budget + 1) <= MAX_ROWS
    return tree if fits else PLAIN
