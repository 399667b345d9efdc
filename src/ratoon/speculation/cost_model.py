"""The tuner that weighs what a tree is expected to gain against what it is measured to cost.

    tokens per second of a strategy = live · (1 + expected visits) / (draft + verify seconds)

Seconds of a forward pass by its rows are measured at start, and each step corrects them. Expected
visits are what the drafters' candidates promise by their calibrated chances (`promised_visits`), so
that one step tells of all smaller trees, and none has to be tried to be known.
Source: ours; TLT (section 4.2) explores with a bandit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ratoon.speculation.strategy import PLAIN, Strategy
from ratoon.speculation.tuner import PROBE, StepRecord, Why

# A correction follows a change within some ten steps; a step that was interrupted counts little.
_FOLLOW = 0.1
_MAX_SURPRISE = math.log(2.0)
# Weight of one sequence's step against what was seen long before, and of many sequences at most.
_FORGET = 0.02
_MAX_FORGET = 0.3
# Promises are sums of many chances; whether they come true is seen of few nodes, and slowly.
_MAX_TRUTH_FORGET = 0.05
_MAX_TRUTH = 2.0
# What no tree has shown lately drifts by so much a step to this share of what comes before it.
_DRIFT = 0.01
_LIKE_BEFORE = 0.8
# A drafter that was never seen is taken for a good one, since large trees tell most, and its first
# steps count much.
_FIRST_GUESS = 0.7
# Drafting one level costs about one layer of the target, which has some dozen.
_DRAFT_SHARE = 0.08
# Another strategy must promise so much more; a choice holds for some steps.
_HYSTERESIS = 1.03
_HOLD_STEPS = 4
# While decoding is plain, one step in so many guesses all the same: the drafter may have improved.
_PROBE_STEPS = 48
# And the other way: what a plain step costs is known only of plain steps.
_PLAIN_PROBE_STEPS = 64
_MIN_CHANCE = 0.01
_MAX_CHANCE = 0.5


class Latency:
    """Seconds by size, linear between measured points and beyond the last.

    Each observation corrects the points beside it, and all others half as much: what makes one
    size slower, a longer context or a busy machine, mostly makes all so.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points` are (size, seconds) in ascending order of size."""
        self._sizes = [size for size, _ in points]
        self._seconds = [seconds for _, seconds in points]
        self._corrections = [0.0] * len(points)

    def __call__(self, size: int) -> float:
        """Expected seconds."""
        low, high, share = self._between(size)
        return self._at(low) * (1 - share) + self._at(high) * share

    def observe(self, size: int, seconds: float) -> None:
        """A measurement."""
        surprise = math.log(max(seconds, 1e-9) / self(size))
        moved = _FOLLOW * max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        low, high, share = self._between(size)
        share = min(1.0, share)
        for place in range(len(self._sizes)):
            near = (place == low) * (1 - share) + (place == high) * share
            self._corrections[place] += moved * (0.5 + 0.5 * near)

    def state_dict(self) -> dict[str, Any]:
        """What was measured, and corrected since."""
        return {"seconds": list(self._seconds), "corrections": list(self._corrections)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned for the same sizes."""
        self._seconds, self._corrections = list(state["seconds"]), list(state["corrections"])

    def _between(self, size: int) -> tuple[int, int, float]:
        """The points around `size`, and how far it lies from the first towards the second."""
        sizes = self._sizes
        if len(sizes) == 1 or size <= sizes[0]:
            return 0, 0, 0.0
        high = min(bisect_left(sizes, size), len(sizes) - 1)
        return high - 1, high, (size - sizes[high - 1]) / (sizes[high] - sizes[high - 1])

    def _at(self, place: int) -> float:
        return self._seconds[place] * math.exp(self._corrections[place])


class Gains:
    """Visits that trees of a budget and a depth can expect, per sequence.

    What the candidates of the last steps promised, times how far such promises came true. A step
    tells of all budgets and depths up to its own. Of larger ones it tells that a further node, or
    level, gains no more than the one before; up to a little less than that, estimates drift, so
    that larger trees are tried again: the drafter is being trained.
    """

    def __init__(self, budget: int, depth: int) -> None:
        nodes = [_FIRST_GUESS * _LIKE_BEFORE**rank for rank in range(budget)]
        levels = [_FIRST_GUESS * _LIKE_BEFORE**level for level in range(depth)]
        self._promised = [
            [min(sum(nodes[: b + 1]), sum(levels[: d + 1])) for b in range(budget)]
            for d in range(depth)
        ]
        self._truth = 1.0
        self._seen = 0

    def expected(self, budget: int, depth: int) -> float:
        """Nodes that the target visits in a tree of so many nodes and levels."""
        return self._truth * self._promised[depth - 1][budget - 1]

    def observe(self, record: StepRecord) -> None:
        """Learn from a step that guessed."""
        self._seen += record.num_live
        weight = record.num_live / self._seen
        follow = min(_MAX_FORGET, max(_FORGET * record.num_live, weight))
        if record.expected > 0:
            truth = min(_MAX_TRUTH, record.visited / record.expected)
            self._truth += min(follow, _MAX_TRUTH_FORGET) * (truth - self._truth)
        known_depth, known_budget = record.strategy.depth, record.strategy.budget
        for depth, row in enumerate(self._promised):
            found = record.promised[min(depth, known_depth - 1)]
            for place in range(len(row)):
                if depth < known_depth and place < known_budget:
                    row[place] += follow * (found[place] - row[place])
                else:
                    self._extrapolate(depth, place, deeper=depth >= known_depth)

    def state_dict(self) -> dict[str, Any]:
        """All estimates, and how much they rest on."""
        promised = [list(row) for row in self._promised]
        return {"promised": promised, "truth": self._truth, "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned for the same budget and depth."""
        self._promised = [list(row) for row in state["promised"]]
        self._truth, self._seen = state["truth"], state["seen"]

    def _extrapolate(self, depth: int, place: int, *, deeper: bool) -> None:
        """Move the estimate of a tree that the step told nothing of, by what smaller ones gain."""

        def gain(steps: int) -> float:
            """Of the tree that is smaller by so many levels, or else nodes."""
            d, b = (depth - steps, place) if deeper else (depth, place - steps)
            return self._promised[d][b] if min(d, b) >= 0 else 0.0

        row = self._promised[depth]
        last = max(0.0, gain(1) - gain(2))
        row[place] += _DRIFT * max(0.0, gain(1) + _LIKE_BEFORE * last - row[place])
        row[place] = max(gain(1), min(gain(1) + last, row[place]))


@dataclass(slots=True)
class _Choice:
    """What was chosen for a live batch, and for how many steps it still holds.

    `best` is the tree that promised most; `gain` tokens of it per token of a plain step and `cost`
    of its step per plain step are what spoke for it, or against it.
    """

    strategy: Strategy
    num_live: int
    steps: int
    best: Strategy = PLAIN
    gain: float = 1.0
    cost: float = 1.0

    def switched(self, other: _Choice) -> bool:
        """Whether one guesses and the other does not."""
        return self.strategy.is_plain != other.strategy.is_plain


class CostModelTuner:
    """Chooses the tree, or none, that promises the most tokens per second.

    `largest` bounds depth, branching, beam and budget, names the drafters, and says whether live
    sequences share their budgets (`cap`); all together have at most `max_rows` rows. `verify` is
    the measured cost of a forward pass by rows.
    """

    def __init__(self, largest: Strategy, max_rows: int, verify: Latency) -> None:
        self._largest = largest
        self._max_rows = max_rows
        self._verify = verify
        sizes = [2**power for power in range(max(1, max_rows.bit_length() - 1))]
        # Of one level, by live sequences.
        self._draft = Latency([(n, _DRAFT_SHARE * verify(2 * n)) for n in sizes])
        self._gains = Gains(largest.budget, largest.depth)
        self.promise_budget = largest.budget
        self._trees = _trees(largest)
        self._choice = self._before = self._since = _Choice(PLAIN, 0, 0)
        self._probes = False
        self._plain_steps = self._guessing_steps = 0

    def choose(self, num_live: int) -> Strategy:
        """See `Tuner.choose`."""
        choice = self._choice
        if choice.num_live != num_live or choice.steps == 0:
            self._choose_again(num_live)
            choice = self._choice
        choice.steps -= 1
        self._probes = False
        if not choice.strategy.is_plain:
            self._plain_steps = 0
            self._guessing_steps = (self._guessing_steps + 1) % _PLAIN_PROBE_STEPS
            self._probes = self._guessing_steps == 0
            return PLAIN if self._probes else choice.strategy
        self._plain_steps += 1
        if self._plain_steps < _PROBE_STEPS:
            return PLAIN
        trees = self._fitting(num_live)
        if not trees:
            return PLAIN
        self._plain_steps = 0
        self._probes = True
        return self._pruned(max(trees, key=lambda tree: self._rate(tree, num_live)), num_live)

    @property
    def why(self) -> Why:
        """See `Tuner.why`. Acceptance or cost: which moved the tree more that was best before."""
        now, then = self._choice, self._since
        if self._probes:
            return Why(PROBE, "one step to learn what the other way costs or gains")
        if now.best.is_plain:
            return Why("live batch", f"no tree fits {self._max_rows} rows at {now.num_live} live")
        text = (
            f"{now.best.budget} x {now.best.depth} promises {now.gain:.2f} times the tokens for "
            f"{now.cost:.2f} times the time"
        )
        if now.num_live != self._before.num_live:
            return Why("live batch", text)
        gained = math.log(self._gain(then.best) / then.gain)
        dearer = math.log(self._cost(then.best, now.num_live) / then.cost)
        return Why("acceptance" if abs(gained) >= abs(dearer) else "cost", text)

    def seconds(self, strategy: Strategy, num_live: int) -> float:
        """See `Tuner.seconds`."""
        if strategy.is_plain:
            return self._verify(num_live)
        verify_s = self._verify(num_live * (strategy.budget + 1))
        return verify_s + strategy.depth * self._draft(num_live)

    def observe(self, record: StepRecord) -> None:
        """See `Tuner.observe`."""
        self._verify.observe(record.rows, record.verify_s)
        if not record.strategy.is_plain:
            self._draft.observe(record.num_live, record.draft_s / record.strategy.depth)
        # Without a drafter at hand, a step that would guess promises nothing.
        if record.promised:
            self._gains.observe(record)

    def state_dict(self) -> dict[str, Any]:
        """See `StatefulTuner.state_dict`."""
        return {
            "verify": self._verify.state_dict(),
            "draft": self._draft.state_dict(),
            "gains": self._gains.state_dict(),
            "choice": asdict(self._choice),
            "plain_steps": self._plain_steps,
            "guessing_steps": self._guessing_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StatefulTuner.load_state_dict`."""
        self._verify.load_state_dict(state["verify"])
        self._draft.load_state_dict(state["draft"])
        self._gains.load_state_dict(state["gains"])
        trees = {name: Strategy(**state["choice"][name]) for name in ("strategy", "best")}
        self._choice = self._before = self._since = _Choice(**{**state["choice"], **trees})
        self._plain_steps = state["plain_steps"]
        self._guessing_steps = state["guessing_steps"]

    def _choose_again(self, num_live: int) -> None:
        before = self._before = self._choice
        if before.num_live != self._since.num_live or before.switched(self._since):
            self._since = before
        self._choice = self._best(num_live)

    def _best(self, num_live: int) -> _Choice:
        candidates = [PLAIN, *self._fitting(num_live)]
        rates = {tree: self._rate(tree, num_live) for tree in candidates}
        current = replace(self._choice.strategy, min_chance=self._largest.min_chance)
        if current.is_plain:
            current = PLAIN
        if current in rates:
            rates[current] *= _HYSTERESIS
        chosen = self._pruned(max(candidates, key=rates.__getitem__), num_live)
        if len(candidates) == 1:
            return _Choice(chosen, num_live, _HOLD_STEPS)
        best = max(candidates[1:], key=rates.__getitem__)
        gain, cost = self._gain(best), self._cost(best, num_live)
        return _Choice(chosen, num_live, _HOLD_STEPS, best, gain, cost)

    def _gain(self, strategy: Strategy) -> float:
        """Expected tokens per token of a plain step."""
        if strategy.is_plain:
            return 1.0
        return 1.0 + self._gains.expected(strategy.budget, strategy.depth)

    def _cost(self, strategy: Strategy, num_live: int) -> float:
        """Expected seconds per second of a plain step."""
        return self.seconds(strategy, num_live) / self.seconds(PLAIN, num_live)

    def _fitting(self, num_live: int) -> list[Strategy]:
        return [tree for tree in self._trees if num_live * (tree.budget + 1) <= self._max_rows]

    def _rate(self, strategy: Strategy, num_live: int) -> float:
        """Expected tokens per second."""
        return num_live * self._gain(strategy) / self.seconds(strategy, num_live)

    def _pruned(self, strategy: Strategy, num_live: int) -> Strategy:
        """Without nodes that gain less than the time of their row is worth."""
        if strategy.is_plain:
            return PLAIN
        more = num_live * strategy.budget
        per_row = (self._verify(num_live + more) - self._verify(num_live)) / more
        chance = per_row * self._rate(strategy, num_live)
        return replace(strategy, min_chance=max(_MIN_CHANCE, min(_MAX_CHANCE, chance)))


def _trees(largest: Strategy) -> list[Strategy]:
    """Budgets and depths in steps that are small where it matters."""
    budgets = sorted(
        {n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if n < largest.budget}
    )
    depths = [n for n in (1, 2, 3, 4, 6, 8, 12) if n < largest.depth]
    return [
        largest.within(budget, depth)
        for budget in (*budgets, largest.budget)
        for depth in (*depths, largest.depth)
        if depth <= (largest.cap or budget)
    ]
