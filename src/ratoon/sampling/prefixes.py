"""The tokens before each draw, for the transforms that look at them.

Shapes: B rows, R of them, P positions, E end ids, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """Prompt and response so far of each row.

    What a transform asks for is counted from these tokens anew at every draw. So nothing has to be
    rolled back where a draft is refuted, and siblings in a draft tree cannot see each other.

    Shapes: `tokens [B, P]` int64 (anything behind a row's length); `lengths [B]` and
    `prompt_lengths [B]`; `end_ids [B, E]`, the ids that end a row, padded with -1.
    """

    tokens: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    end_ids: Tensor

    def at(self, rows: Tensor) -> Prefixes:
        """A copy of some rows `[R]`."""
        return Prefixes(
            self.tokens[rows], self.lengths[rows], self.prompt_lengths[rows], self.end_ids[rows]
        )

    def append(self, rows: Tensor, ids: Tensor) -> None:
        """Lengthen different rows `[R]` by one token each, in place."""
        self.tokens[rows, self.lengths[rows]] = ids
        self.lengths[rows] += 1

    @property
    def num_new(self) -> Tensor:
        """Response tokens so far, `[B]`."""
        return self.lengths - self.prompt_lengths

    def counts(self, like: Tensor, *, of_prompt: bool) -> Tensor:
        """How often each id stands in the response, or in prompt and response; like `[B, V]`."""
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        counted = positions < self.lengths[:, None]
        if not of_prompt:
            counted &= positions >= self.prompt_lengths[:, None]
        return torch.zeros_like(like).scatter_add_(1, self.tokens, counted.to(like.dtype))
