"""What benchmarks of decoding measure: a model, a drafter and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.speculation.strategy import PLAIN, Strategy, StrategyTable
from ratoon.speculation.tuner import RuleTuner, Tuner

MAX_LENGTH = 448
MAX_TOKENS = 288
NUM_PROMPTS = 512


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
    max_length: int = MAX_LENGTH

    def strategy(self, live_batch: int) -> Strategy:
        """What the default configuration does at this live batch, if a drafter is at hand."""
        strategy, _ = StrategyTable(tiers_of(self.settings)).pick(live_batch, 0)
        return strategy

    def drafting(self, num_rows: int) -> Drafting:
        """Suffix drafter and, where one is given, the learned one."""
        nodes = self.settings.budget + 1
        learned = None
        if self.drafter is not None:
            learned = LearnedDrafter(
                self.drafter.config,
                num_rows=num_rows,
                num_positions=self.max_length + 2 * nodes,
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
            max_length=self.max_length,
            vocab_limit=self.vocab_limit,
            drafting=drafting,
            tuner=tuner or RuleTuner(lambda num_live: strategy),
            confirm=self.confirm,
        )


def load_subject(path: Path, drafter_path: Path | None, max_length: int = MAX_LENGTH) -> Subject:
    """Read everything and prove the numerics of this machine, for prompt and response together.

    Raises: CheckpointError if model or drafter cannot be read.
    """
    decoder = load_decoder(path)
    tokenizer = Tokenizer.load(path)
    drafter = None if drafter_path is None else load_drafter(drafter_path)
    settings = Speculation(drafters=("suffix",) if drafter is None else ("suffix", "learned"))
    model = InferenceModel(
        decoder,
        num_positions=max_length + 2 * (settings.budget + 1),
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
        max_length=max_length,
    )
