"""What the rollout benchmark measures: a model, a drafter, prompts, and one arm's decoding."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ratoon.bench.intervals import median_interval
from ratoon.bench.timing import ratio_interval
from ratoon.cluster.tuners import tiers_of
from ratoon.config.speculation import Speculation
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.drafter.checkpoint import load_drafter
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.loop.quickstart import TASK
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.speculation.strategy import PLAIN, Strategy, StrategyTable
from ratoon.speculation.tuner import RuleTuner, Tuner

MAX_LENGTH = 448
MAX_TOKENS = 288
NUM_PROMPTS = 512
# Tokens of each row that one round of an arm decodes.
TOKENS_PER_ROW = 40


class Decoded(NamedTuple):
    """One arm's round: decode steps at full live batch."""

    tokens: int
    seconds: float
    rows: int
    nodes: int
    finished: dict[DrawKey, tuple[int, ...]]
    logprobs: list[float]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: model, prompts, and the drafters' strategy."""

    path: Path
    model: InferenceModel
    drafter: Eagle3Drafter | None
    prompts: Sequence[tuple[int, ...]]
    eos_ids: tuple[int, ...]
    vocab_limit: int
    settings: Speculation
    confirm: bool

    def strategy(self, live_batch: int) -> Strategy:
        """What the default configuration does at this live batch, if a drafter is at hand."""
        strategy, _ = StrategyTable(tiers_of(self.settings)).pick(live_batch, 0)
        return strategy

    def request(self, number: int, round_number: int, *, stop: bool, max_tokens: int) -> Request:
        """Another prompt for each number and round."""
        row = (97 * round_number + number) % len(self.prompts)
        key = DrawKey(1, Stream.EVAL, round_number, "bench", row, number)
        return Request(key, self.prompts[row], max_tokens, self.eos_ids if stop else ())

    def drafting(self, num_rows: int) -> Drafting:
        """Suffix drafter and, where one is given, the learned one."""
        nodes = self.settings.budget + 1
        learned = None
        if self.drafter is not None:
            learned = LearnedDrafter(
                self.drafter.config,
                num_rows=num_rows,
                num_positions=MAX_LENGTH + 2 * nodes,
                num_tree_slots=self.settings.beam * max(1, self.settings.depth - 1),
                dtype=self.model.dtype,
            )
        drafting = Drafting(
            num_rows=num_rows,
            vocab_limit=self.vocab_limit,
            max_nodes=nodes,
            suffix=SuffixDrafter(num_rows),
            learned=learned,
        )
        if self.drafter is not None:
            drafting.load(self.drafter, self.model.embedding)
        return drafting

    def engine(
        self, num_rows: int, drafting: Drafting | None = None, tuner: Tuner | None = None
    ) -> RolloutEngine:
        """An empty engine that drafts as the tuner says, or as for this live batch throughout."""
        strategy = PLAIN if drafting is None else self.strategy(num_rows)
        return RolloutEngine(
            self.model,
            max_rows=num_rows,
            max_length=MAX_LENGTH,
            vocab_limit=self.vocab_limit,
            drafting=drafting,
            tuner=tuner or RuleTuner(lambda num_live: strategy),
            confirm=self.confirm,
        )


def load_subject(path: Path, drafter_path: Path | None) -> Subject:
    """Read everything and prove the numerics of this machine.

    Raises: CheckpointError if model or drafter cannot be read.
    """
    decoder = load_decoder(path)
    tokenizer = Tokenizer.load(path)
    drafter = None if drafter_path is None else load_drafter(drafter_path)
    settings = Speculation(drafters=("suffix",) if drafter is None else ("suffix", "learned"))
    model = InferenceModel(
        decoder,
        num_positions=MAX_LENGTH + 2 * (settings.budget + 1),
        dtype=DTYPES[fast_dtype()],
        taps=() if drafter is None else drafter.config.taps,
    )
    style = PromptStyle(chat_template=False, max_tokens=MAX_LENGTH - MAX_TOKENS)
    prompts = load_prompts(
        {**TASK, "size": NUM_PROMPTS, "seed": 3}, tokenizer, split="eval", style=style
    )
    return Subject(
        path=path,
        model=model,
        drafter=drafter,
        prompts=[prompt.ids for prompt in prompts],
        eos_ids=tokenizer.eos_ids,
        vocab_limit=min(tokenizer.vocab_size, decoder.config.vocab_size),
        settings=settings,
        confirm=check_invariance(model).holds,
    )


def decode(
    subject: Subject,
    size: int,
    number: int,
    drafting: Drafting | None = None,
    tuner: Tuner | None = None,
) -> Decoded:
    """Decode at a constant live batch until so many tokens have come."""
    engine = subject.engine(size, drafting, tuner)
    numbers = itertools.count()
    finished: list[Finished] = []
    tokens = rows = nodes = 0
    seconds = 0.0
    while tokens < TOKENS_PER_ROW * size:
        while engine.num_live < size:
            if not engine.num_waiting:
                engine.submit(
                    subject.request(next(numbers), number, stop=True, max_tokens=MAX_TOKENS)
                )
            engine.step()
        engine.take_stats()
        start = time.perf_counter()
        finished += engine.step()
        seconds += time.perf_counter() - start
        stats = engine.take_stats()
        tokens, rows = tokens + stats.tokens, rows + stats.rows_decoded
        nodes += stats.nodes_drafted
    answers = {item.completion.key: item.completion.token_ids for item in finished}
    logprobs = [value for item in finished for value in item.completion.logprobs]
    return Decoded(tokens, seconds, rows, nodes, answers, logprobs)


def guessing_arm(
    subject: Subject, size: int, tuner: Tuner | None = None
) -> Callable[[int], Decoded]:
    """Decodes with both drafters, by the tuner or as for this live batch throughout."""
    drafting = subject.drafting(size)
    # The warm-up round calibrates; every later round starts from there.
    state: dict[str, Any] = {}

    def arm(number: int) -> Decoded:
        if state:
            drafting.load_state_dict(state)
        decoded = decode(subject, size, number, drafting, tuner)
        if not state:
            state.update(drafting.state_dict())
        return decoded

    return arm


def compared(
    size: int, plain: Sequence[Decoded], guessed: Sequence[Decoded], name: str
) -> dict[str, Any]:
    """Speeds of both arms by round as one row: medians, ratio with interval, what was guessed."""
    ratio = ratio_interval([d.rate for d in guessed], [d.rate for d in plain])
    num_rows = sum(d.rows for d in guessed)
    return {
        "live_batch": size,
        "plain_tokens_per_s": median_interval([d.rate for d in plain])["median"],
        f"{name}_tokens_per_s": median_interval([d.rate for d in guessed])["median"],
        "ratio": ratio["median"],
        "low": ratio["low"],
        "high": ratio["high"],
        "acceptance_length": sum(d.tokens for d in guessed) / num_rows,
        "nodes_per_row": sum(d.nodes for d in guessed) / num_rows,
    }
