"""Responses that the target drew, with its states: what drafters are trained and compared on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ratoon.data.documents import documents
from ratoon.data.prompts import PromptStyle, load_prompts
from ratoon.drafter.data_buffer import DataBuffer, Sample
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter, choose_draft_vocabulary
from ratoon.drafter.spot_trainer import SpotTrainer
from ratoon.drafter.trainer import DrafterTrainer, TrainerOptions
from ratoon.errors import DataError
from ratoon.loop.quickstart import TASK
from ratoon.models.compute_dtype import DTYPES, fast_dtype
from ratoon.models.decoder import Decoder
from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.records import DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel

OPEN_TEXT, TASK_PROMPTS = "open text", "the quickstart's task"
PROMPT_TOKENS = 48
MAX_LENGTH = 192
MAX_LIVE = 32
# Documents are read from their middle on: beginnings are titles and lists of contents.
_SKIPPED_CHARACTERS = 2000
_READ_CHARACTERS = 8 * PROMPT_TOKENS

Ids = tuple[int, ...]


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


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A model and prompts for it."""

    decoder: Decoder
    model: InferenceModel
    prompts: Sequence[Ids]
    eos_ids: Ids
    vocab_limit: int

    @property
    def max_tokens(self) -> int:
        """Tokens of a response behind the longest prompt."""
        return MAX_LENGTH - max(map(len, self.prompts))

    def with_taps(self, taps: Sequence[int]) -> Source:
        """The same, keeping the inputs of these layers."""
        if tuple(taps) == self.model.taps:
            return self
        model = InferenceModel(
            self.decoder,
            num_positions=self.model.num_positions,
            dtype=self.model.dtype,
            taps=taps,
        )
        return replace(self, model=model)


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
    prompts = _task_prompts(tokenizer, count) if text is None else _beginnings(tokenizer, text)
    if len(prompts) < count:
        raise DataError(f"{text}: {len(prompts)} documents are long enough, but {count} are needed")
    return Source(
        decoder=decoder,
        model=model,
        prompts=prompts[:count],
        eos_ids=tokenizer.eos_ids,
        vocab_limit=min(tokenizer.vocab_size, decoder.config.vocab_size),
    )


def _task_prompts(tokenizer: Tokenizer, count: int) -> list[Ids]:
    style = PromptStyle(chat_template=False, max_tokens=MAX_LENGTH // 2)
    found = load_prompts({**TASK, "size": count, "seed": 5}, tokenizer, split="eval", style=style)
    return [prompt.ids for prompt in found]


def _beginnings(tokenizer: Tokenizer, text: Path) -> list[Ids]:
    cut = [
        document[_SKIPPED_CHARACTERS : _SKIPPED_CHARACTERS + _READ_CHARACTERS]
        for document in documents([text])
        if len(document) >= 2 * _SKIPPED_CHARACTERS
    ]
    return [tokenizer.encode(part)[:PROMPT_TOKENS] for part in cut]


def record(source: Source, rows: range, temperature: float) -> list[Finished]:
    """Responses to the prompts of `rows`, plainly decoded, with their states."""
    engine = RolloutEngine(
        source.model,
        max_rows=min(MAX_LIVE, len(rows)),
        max_length=MAX_LENGTH,
        vocab_limit=source.vocab_limit,
        collect=True,
    )
    params = SamplingParams(temperature=temperature)
    for row in rows:
        key = DrawKey(1, Stream.EVAL, 1, "recorded", row, 0)
        prompt = source.prompts[row]
        engine.submit(Request(key, prompt, source.max_tokens, source.eos_ids, params))
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    return sorted(finished, key=lambda item: item.completion.key.row)


def select_taps(
    finished: Sequence[Finished], recorded: Sequence[int], taps: Sequence[int]
) -> list[Finished]:
    """Responses recorded with some layers' states, with those of `taps` alone."""
    places = [list(recorded).index(tap) for tap in taps]
    kept = []
    for item in finished:
        assert item.features is not None
        parts = item.features.chunk(len(recorded), dim=-1)
        kept.append(replace(item, features=torch.cat([parts[place] for place in places], dim=-1)))
    return kept


def entropy(finished: Sequence[Finished]) -> float:
    """Nats per token, estimated by the log-probabilities of what was drawn."""
    drawn = [value for item in finished for value in item.completion.logprobs]
    return -sum(drawn) / max(1, len(drawn))


def _fast(options: TrainerOptions) -> TrainerOptions:
    return replace(options, compute_dtype=DTYPES[fast_dtype()])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a drafter is made: its shape, its start, and its training; `taps` None = the default."""

    vocabulary: int = 8192
    window: int = 512
    steps: int = 400
    taps: tuple[int, ...] | None = None
    from_target: bool = True
    options: TrainerOptions = field(default_factory=lambda: _fast(TrainerOptions()))


def train(source: Source, finished: Sequence[Finished], recipe: Recipe) -> DrafterTrainer:
    """A drafter trained on recorded responses; it proposes their most frequent tokens."""
    config = DrafterConfig.for_target(
        source.decoder.config, recipe.vocabulary, recipe.window, source.model.taps
    )
    counts = torch.zeros(config.vocab_size, dtype=torch.int64)
    for item in finished:
        counts += torch.tensor(item.completion.token_ids).bincount(minlength=config.vocab_size)
    ids = choose_draft_vocabulary(counts, config.draft_vocab_size, source.eos_ids)
    torch.manual_seed(0)
    drafter = Eagle3Drafter.from_target(config, source.decoder, ids)
    if not recipe.from_target:
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(std=0.02)
    trainer = DrafterTrainer(drafter, recipe.options)
    trainer.set_embedding(source.model.embedding)
    buffer = DataBuffer(sum(map(_num_tokens, finished)) + 1, seed=0)
    buffer.begin_step(0, source.decoder.head_weight[ids].to(source.model.dtype))
    for item in finished:
        buffer.add(_sample(item))
    spot = SpotTrainer(trainer, buffer, lambda *_: None, publish_every=recipe.steps + 1)
    spot.start(lambda: trainer.step >= recipe.steps).run()
    return trainer


def _num_tokens(item: Finished) -> int:
    return len(item.completion.prompt_ids) + len(item.completion.token_ids)


def all_ids(item: Finished) -> Tensor:
    """Prompt and response `[n]`."""
    return torch.tensor(item.completion.prompt_ids + item.completion.token_ids)


def _sample(item: Finished) -> Sample:
    assert item.features is not None
    assert item.hidden is not None
    return Sample(
        uid=(item.completion.key.row,),
        ids=all_ids(item),
        features=item.features,
        hidden=item.hidden,
        prompt_len=len(item.completion.prompt_ids),
        policy_version=0,
    )
