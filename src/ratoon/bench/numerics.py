"""Do logits keep their bits? The cases in which they must, and how one is run.

A case decodes the next tokens of a sequence in some batch, behind a context that was prefilled in
some portions, and compares them with the same sequence decoded alone, token by token.

Shape letters: B rows, N new tokens a row, T tokens of the sequence, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch
from torch import Tensor

from ratoon.records import DrawKey, Request, Stream
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import decode
from ratoon.rollout.native.prompts import PromptQueue
from ratoon.rollout.native.rows import Rows

Layout = Literal["chain", "tree"]
Neighbours = Literal["same length", "other lengths"]

BATCHES = (1, 3, 16, 32)
NEW_TOKENS = (1, 2, 8, 16)
CHUNKS = (1, 7, 64, None)
NEIGHBOURS: tuple[Neighbours, ...] = ("same length", "other lengths")
LAYOUTS: tuple[Layout, ...] = ("chain", "tree")


@dataclass(frozen=True, slots=True)
class Case:
    """One batch. `chunk` None prefills the context whole; "tree" is half path, half branches.

    Example: `Case(context=200, chunk=7, batch=3, num_new=8, neighbours="other lengths",
    layout="tree")`
    """

    context: int
    chunk: int | None
    batch: int
    num_new: int
    neighbours: Neighbours
    layout: Layout


def all_cases(contexts: Sequence[int]) -> Iterator[Case]:
    """The full matrix, cases of the same context and chunk in a row.

    A tree needs more than two tokens.
    """
    for values in itertools.product(contexts, CHUNKS, BATCHES, NEW_TOKENS, NEIGHBOURS, LAYOUTS):
        case = Case(*values)
        if case.layout == "chain" or case.num_new > 2:
            yield case


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A small part of `cases` in which any two values that occur together do so at least once.

    Source: greedy covering arrays (Cohen et al. 1997).
    """
    pairs = [frozenset(itertools.combinations(enumerate(astuple(case)), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [cases[index] for index in sorted(chosen)]


class Laboratory:
    """Runs cases on one model against one sequence of random tokens decoded alone."""

    def __init__(
        self, model: InferenceModel, contexts: Sequence[int], *, stride: int = 1, seed: int = 0
    ) -> None:
        """Decode the sequence alone, behind each of `contexts` token by token.

        The stretches between are decoded in portions of `stride`; 1 is plain decoding throughout.
        """
        self.model = model
        self._length = max(contexts) + max(NEW_TOKENS)
        generator = torch.Generator().manual_seed(seed)
        shape = (max(BATCHES), self._length)
        tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
        self._tokens = tokens.to(model.embedding.device)
        self._alone = model.make_cache(1, self._length)
        self._expected = self._decode_alone(contexts, stride)
        self._batch = model.make_cache(max(BATCHES), self._length)
        # What lies in slots but is masked must not matter; it only has to be finite.
        self._batch.data.normal_(generator=generator if self._batch.data.is_cpu else None)
        self._prefilled: tuple[int, int | None, Tensor] | None = None

    @torch.inference_mode()
    def keeps_keys(self, context: int, chunk: int | None) -> bool:
        """Whether prefilling in portions stores the keys and values of plain decoding."""
        return torch.equal(self._prefill(context, chunk), self._alone.read_row(0, context))

    @torch.inference_mode()
    def keeps_logits(self, case: Case) -> bool:
        """Whether the row in the middle of the batch gets the logits of plain decoding."""
        num_path = case.num_new if case.layout == "chain" else case.num_new // 2
        new = self._tokens[: case.batch, case.context : case.context + case.num_new].clone()
        row = case.batch // 2
        new[row, :num_path] = self._tokens[0, case.context : case.context + num_path]
        parents = [*range(-1, num_path - 1), *(node % num_path for node in range(num_path))]
        logits = self._decode(case, row, new, parents[: case.num_new])
        return torch.equal(logits[:num_path], self._expected[case.context][:num_path])

    @torch.inference_mode()
    def count_scattered(self, case: Case) -> tuple[int, int]:
        """How many logits of a path *beside* the plain columns differ, and of how many.

        The path hangs from the root behind half a tree of other tokens.
        """
        half = case.num_new // 2
        row = case.batch // 2
        new = self._tokens[: case.batch, case.context : case.context + case.num_new].clone()
        new[row, 0] = self._tokens[0, case.context]
        new[row, half:] = self._tokens[0, case.context + 1 : case.context + 1 + half]
        parents = [*range(-1, half - 1), 0, *range(half, case.num_new - 1)]
        logits = self._decode(case, row, new, parents)[half:]
        expected = self._expected[case.context][1 : 1 + half]
        return int((logits != expected).any(-1).sum()), half

    def _decode(self, case: Case, row: int, new: Tensor, parents: list[int]) -> Tensor:
        cache = self._batch
        cache.write_row(row, self._prefill(case.context, case.chunk))
        lengths = [case.context] * case.batch
        if case.neighbours == "other lengths":
            lengths = [(691 * n + 5) % max(1, self._length - 16) for n in range(case.batch)]
            lengths[row] = case.context
        ancestors = _ancestors(parents).to(new.device)
        return decode(self.model, cache, new, lengths, ancestors)[row]

    def _prefill(self, context: int, chunk: int | None) -> Tensor:
        """Keys and values of the context, computed by the engine's own prefill."""
        if self._prefilled is not None and self._prefilled[:2] == (context, chunk):
            return self._prefilled[2]
        cache = self.model.make_cache(1, self._length)
        rows = Rows(cache, num_slots=1, feature_width=0, hidden_width=0, dtype=self.model.dtype)
        queue = PromptQueue(self.model, rows, chunk or context)
        key = DrawKey(seed=0, stream=Stream.EVAL, round=0, dataset="numerics", row=0, sample=0)
        prompt = tuple(self._tokens[0, : context + 1].tolist())
        queue.push(Request(key, prompt, max_tokens=1, eos_ids=()))
        while queue.advance(0, 1) is None:
            pass
        entries = cache.read_row(0, context)
        self._prefilled = (context, chunk, entries)
        return entries

    @torch.inference_mode()
    def _decode_alone(self, contexts: Sequence[int], stride: int) -> dict[int, Tensor]:
        """Logits `[N, V]` behind each context."""
        stops = sorted({start + n for start in contexts for n in range(max(NEW_TOKENS))})
        logits, position = {}, 0
        for stop in stops:
            while position < stop:
                end = min(position + stride, stop)
                decode(self.model, self._alone, self._tokens[:1, position:end], [position])
                position = end
            new = self._tokens[:1, stop : stop + 1]
            logits[stop] = decode(self.model, self._alone, new, [stop])[0, 0]
            position = stop + 1
        return {
            start: torch.stack([logits[start + n] for n in range(max(NEW_TOKENS))])
            for start in contexts
        }


def _ancestors(parents: Sequence[int]) -> Tensor:
    """Ancestor or self, bool `[N, N]`."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask
