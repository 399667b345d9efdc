"""What is simulated: how long responses are, what a step costs, and what goes wrong."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ratoon.errors import ConfigError, DataError
from ratoon.observe.files import read_lines

# Seconds of a decode step by rows: SmolLM2-135M in bf16 on a core with AMX, contexts of 256 tokens.
CPU_COSTS = (
    (1, 0.041),
    (2, 0.043),
    (4, 0.048),
    (8, 0.053),
    (16, 0.071),
    (32, 0.097),
    (64, 0.154),
    (256, 0.248),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of responses: log-normal, prompts differ, and there is a bump at the cap.

    `prompt_spread` and `response_spread` are standard deviations of the logarithm; `cap_share` of
    all responses never end by themselves, more of them to prompts with long ones. `growth`
    multiplies the median from step to step.
    """

    median: float = 700.0
    prompt_spread: float = 0.8
    response_spread: float = 0.5
    cap: int = 4096
    cap_share: float = 0.02
    growth: float = 1.0

    def draw(self, seed: int, step: int, prompt: int, size: int) -> list[int]:
        """Lengths of the responses to a prompt in a step."""
        character = random.Random(f"{seed}/{prompt}").gauss(0.0, 1.0)
        source = random.Random(f"{seed}/{prompt}/{step}")
        endless = self.cap_share * (1.0 + math.erf(character / math.sqrt(2)))
        middle = math.log(self.median * self.growth**step) + self.prompt_spread * character
        drawn = []
        for _ in range(size):
            length = math.exp(middle + self.response_spread * source.gauss(0.0, 1.0))
            ends = source.random() >= endless
            drawn.append(max(1, min(self.cap, round(length))) if ends else self.cap)
        return drawn


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a run's stored responses, by prompt; each step draws from a prompt's own.

    A simulation with more prompts than were recorded takes them in turn.
    """

    by_prompt: Sequence[Sequence[int]]
    cap: int

    def draw(self, seed: int, step: int, prompt: int, size: int) -> list[int]:
        """Lengths of the responses to a prompt in a step."""
        source = random.Random(f"{seed}/{prompt}/{step}")
        return source.choices(self.by_prompt[prompt % len(self.by_prompt)], k=size)


@dataclass(frozen=True, slots=True)
class Drafter:
    """How often the first guess is right at the start and at best, and what moves it.

    `stale` of it is lost at each update of the policy; training on `scale` tokens brings it back by
    63 %.
    """

    start: float = 0.5
    best: float = 0.7
    stale: float = 0.1
    scale: float = 200_000.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of rollout. Sizes are per worker, so that it can be simulated with any number.

    `slow_share` of the workers, at least one, take twice as long for everything; `crash_share` of
    them, at least one, is lost in each step and back in the next.
    """

    name: str
    meaning: str
    lengths: Lengths | Recorded = Lengths()
    drafter: Drafter = Drafter()
    prompts_per_worker: int = 32
    group_size: int = 8
    slots: int = 32
    prompt_tokens: int = 128
    prefill_s: float = 0.0005
    costs: Sequence[tuple[int, float]] = CPU_COSTS
    slow_share: float = 0.0
    crash_share: float = 0.0

    def slowness(self, num_workers: int) -> list[float]:
        """Seconds each worker takes for what a fast one does in one; the first ones are slow."""
        slow = min(num_workers - 1, max(1, round(self.slow_share * num_workers)))
        return [2.0 if self.slow_share and w < slow else 1.0 for w in range(num_workers)]

    def crashes(self, seed: int, step: int, num_workers: int) -> list[tuple[float, int]]:
        """Who is lost in a step, and after which part of its shortest time; one worker stays."""
        if not self.crash_share:
            return []
        source = random.Random(f"{seed}/crash/{step}")
        count = min(num_workers - 1, max(1, round(self.crash_share * num_workers)))
        return sorted(
            (source.random(), worker) for worker in source.sample(range(num_workers), count)
        )


_ALL = (
    Scenario("published", "log-normal lengths and a bump at the cap"),
    Scenario(
        "drift",
        "responses grow by a tenth and the drafter ages by a quarter each step",
        lengths=Lengths(median=500.0, growth=1.1),
        drafter=Drafter(stale=0.25),
    ),
    Scenario(
        "bad_drafter",
        "no guess is ever right, and training does not help",
        drafter=Drafter(start=0.0, best=0.0),
    ),
    Scenario("unequal_workers", "one worker, or one of sixteen, at half speed", slow_share=1 / 16),
    Scenario(
        "crash_storm",
        "one worker, or one of ten, is lost in every step; others draw what it had",
        crash_share=0.1,
    ),
)
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def named(name: str) -> Scenario:
    """A scenario by name. Raises: ConfigError."""
    if name not in SCENARIOS:
        raise ConfigError(f"scenario {name!r} is unknown; there are: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def with_costs(base: Scenario, path: Path) -> Scenario:
    """The same with another table of costs.

    Raises: DataError if the file does not hold ascending pairs of rows and seconds.
    """
    try:
        points = [(int(rows), float(seconds)) for rows, seconds in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"{path}: must be JSON such as [[1, 0.041], [8, 0.053]] ({error})"
        ) from None
    ascending = all(low[0] < high[0] for low, high in pairwise(points))
    are_times = all(0 < seconds < math.inf for _, seconds in points)
    if not points or not ascending or points[0][0] != 1 or not are_times:
        raise DataError(
            f"{path}: rows must ascend from 1, and seconds be positive, as in "
            "[[1, 0.041], [8, 0.053]]"
        )
    return replace(base, costs=tuple(points))


def with_recorded(base: Scenario, run: Path) -> Scenario:
    """The same with the lengths of a run's training responses, and of its prompts.

    Raises: DataError if the run's folder holds none, or they are damaged.
    """
    by_prompt: dict[tuple[str, int], list[int]] = {}
    prompts = []
    for path in sorted((run / "completions").glob("train_*.jsonl")):
        for row in read_lines(path, "dataset", "row", "prompt_ids", "token_ids"):
            prompt, response = row["prompt_ids"], row["token_ids"]
            if not all(isinstance(ids, list) and ids for ids in (prompt, response)):
                raise DataError(f"{path}: prompt_ids and token_ids must be lists of ids, not empty")
            by_prompt.setdefault((row["dataset"], row["row"]), []).append(len(response))
            prompts.append(len(prompt))
    if not by_prompt:
        raise DataError(
            f"{run}: no training responses in completions/; give the folder of a run of `ratoon rl`"
        )
    lengths = tuple(tuple(found) for found in by_prompt.values())
    cap = max(max(found) for found in lengths)
    return replace(
        base, lengths=Recorded(lengths, cap), prompt_tokens=round(statistics.fmean(prompts))
    )
