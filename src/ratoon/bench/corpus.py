"""What the benchmarks of drafting draw responses to: open text, or the quickstart's task."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.drafter.model import DrafterConfig
from ratoon.errors import DataError
from ratoon.loop.quickstart import TASK
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.offline.material import beginnings
from ratoon.offline.recorded import Ids, Source
from ratoon.rollout.native.forward import InferenceModel

OPEN_TEXT, TASK_PROMPTS = "open text", "the quickstart's task"
MAX_LENGTH = 192


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is drawn from a model: to which prompts, and how much.

    Prompts are beginnings of the documents of `text`, or the quickstart's task. Drafters are
    compared on `responses` and trained on as many others as `train_responses`, for `steps`
    optimizer steps.
    """

    text: Path | None = None
    responses: int = 48
    train_responses: int = 192
    steps: int = 300

    @property
    def prompts(self) -> str:
        """What the prompts are, in words."""
        return TASK_PROMPTS if self.text is None else OPEN_TEXT


def open_source(
    path: Path, text: Path | None, count: int, taps: Sequence[int] | None = None
) -> Source:
    """A model with `count` prompts: beginnings from the documents of `text`, or the quickstart's.

    `taps` are the layers whose states are kept; None = a drafter's default.

    Raises: CheckpointError if the model cannot be read, DataError if there are too few prompts.
    """
    decoder, tokenizer = load_decoder(path), Tokenizer.load(path)
    if taps is None:
        taps = DrafterConfig.for_target(decoder.config, decoder.config.vocab_size, 1).taps
    model = InferenceModel(
        decoder, num_positions=2 * MAX_LENGTH, dtype=DTYPES[fast_dtype()], taps=taps
    )
    if text is None:
        prompts = _task_prompts(tokenizer, count)
    else:
        prompts = list(itertools.islice(beginnings(tokenizer, text), count))
    if len(prompts) < count:
        raise DataError(f"{text}: {len(prompts)} documents are long enough, but {count} are needed")
    return Source(
        decoder=decoder,
        model=model,
        prompts=prompts,
        eos_ids=tokenizer.eos_ids,
        vocab_limit=min(tokenizer.vocab_size, decoder.config.vocab_size),
        max_tokens=MAX_LENGTH - max(map(len, prompts)),
    )


def _task_prompts(tokenizer: Tokenizer, count: int) -> list[Ids]:
    style = PromptStyle(chat_template=False, max_tokens=MAX_LENGTH // 2)
    found = load_prompts({**TASK, "size": count, "seed": 5}, tokenizer, split="eval", style=style)
    return [prompt.ids for prompt in found]
