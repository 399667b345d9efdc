"""What the trainers learn from, and its packing into tensors.

Shape letters: T packed tokens, N tokens of the loss, S responses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.models.packing import PackedBatch


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and how good it was.

    `token_ids` are the ids that were sampled, never text encoded again. `group` tells which
    responses share a prompt. `engine_logprobs` are the rollout engine's, to compare with the
    trainer's.

    Example: `Sample(prompt_ids=(5, 9), token_ids=(7, 2), advantage=0.5, group=("arith", 41))`
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    advantage: float
    group: Hashable = None
    engine_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed responses with the rows whose next token is learned.

    `rows [N]` index into the packed tokens, `targets [N]` are the ids that follow, both int64;
    `lengths` are the responses' numbers of such tokens.
    """

    packed: PackedBatch
    rows: Tensor
    targets: Tensor
    lengths: tuple[int, ...]

    def per_token(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """One value per response, repeated for each of its tokens: `[N]`."""
        device = self.rows.device
        repeats = torch.tensor(self.lengths, device=device)
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(
            repeats, output_size=sum(self.lengths)
        )


def trained_length(prompt_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """Tokens that go through the model: all but the last, which predicts nothing."""
    return len(prompt_ids) + len(token_ids) - 1


def pack(
    examples: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
) -> TokenBatch:
    """Pack pairs of prompt and completion; only completions are learned.

    Raises: ValueError if a prompt or a completion is empty.
    """
    documents, rows, targets = [], [], []
    start = 0
    for index, (prompt_ids, token_ids) in enumerate(examples):
        if not prompt_ids or not token_ids:
            raise ValueError(
                f"example {index} has {len(prompt_ids)} prompt and {len(token_ids)} completion "
                "tokens; it needs at least one of each"
            )
        documents.append([*prompt_ids, *token_ids[:-1]])
        first = start + len(prompt_ids) - 1
        rows.append(torch.arange(first, first + len(token_ids)))
        targets.append(torch.tensor(token_ids, dtype=torch.long))
        start += len(documents[-1])
    return TokenBatch(
        packed=PackedBatch.of(documents).to(device),
        rows=torch.cat(rows).to(device),
        targets=torch.cat(targets).to(device),
        lengths=tuple(len(token_ids) for _, token_ids in examples),
    )
