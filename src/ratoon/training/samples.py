"""What the trainers learn from, and its packing into tensors.

Shape letters: T packed tokens, N tokens of the loss, S responses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratoon.models.packing import PackedBatch

# A prompt and its completion.
Example = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One response and how good it was.

    `token_ids` are the ids that were sampled, never text encoded again. `advantage` is one number
    for all of them, or one for each. `group` tells which responses share a prompt.
    `engine_logprobs` are the rollout engine's, to compare with the trainer's. A masked response is
    not learned from, and counts in no mean.

    Example: `Sample(prompt_ids=(5, 9), token_ids=(7, 2), advantage=0.5, group=("arith", 41))`
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    advantage: float | tuple[float, ...]
    group: Hashable = None
    engine_logprobs: tuple[float, ...] | None = None
    is_masked: bool = False

    @property
    def advantages(self) -> tuple[float, ...]:
        """One advantage for each token."""
        if isinstance(self.advantage, tuple):
            return self.advantage
        return (self.advantage,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Packed responses with the rows whose next token is learned.

    `rows [N]` index into the packed tokens, `targets [N]` are the ids that follow, both int64;
    `lengths` are the responses' numbers of such tokens. A row occurs once for each response that it
    begins.
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


def trained_length(prompt_ids: Sequence[int], *completions: Sequence[int]) -> int:
    """Tokens of a family that go through the model.

    Its completions share the prompt; their last tokens predict nothing.
    """
    return len(prompt_ids) + sum(len(token_ids) - 1 for token_ids in completions)


def families(
    examples: Sequence[Example], groups: Sequence[Hashable] | None, max_tokens: int
) -> list[list[int]]:
    """Indices of examples that are packed together because they share group and prompt.

    A family that would exceed `max_tokens` is cut, and its prompt repeated. Without `groups` each
    example is on its own.
    """
    if groups is None:
        return [[index] for index in range(len(examples))]
    found: list[list[int]] = []
    latest: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
    for index, ((prompt_ids, token_ids), group) in enumerate(zip(examples, groups, strict=True)):
        key = (group, tuple(prompt_ids))
        family = latest.get(key)
        if family is not None:
            completions = [examples[member][1] for member in family]
            if trained_length(prompt_ids, *completions, token_ids) <= max_tokens:
                family.append(index)
                continue
        latest[key] = [index]
        found.append(latest[key])
    return found


def pack(
    batch: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], device: torch.device
) -> TokenBatch:
    """Pack families, each a prompt with its completions; only completions are learned.

    Raises: ValueError if a prompt or a completion is empty.
    """
    pieces: list[Sequence[int]] = []
    parents: list[int | None] = []
    rows, targets = [], []
    start = 0
    for prompt_ids, completions in batch:
        if not prompt_ids or not all(completions):
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens has completions of "
                f"{[len(token_ids) for token_ids in completions]}; each needs at least one token"
            )
        parent = len(pieces)
        last_of_prompt = start + len(prompt_ids) - 1
        # A lone completion makes one piece with its prompt.
        pieces.append([*prompt_ids, *completions[0][:-1]] if len(completions) == 1 else prompt_ids)
        parents.append(None)
        start += len(prompt_ids)
        for token_ids in completions:
            length = len(token_ids) - 1
            rows.append(torch.tensor([last_of_prompt, *range(start, start + length)]))
            targets.append(torch.tensor(token_ids, dtype=torch.long))
            if len(completions) > 1 and length:
                pieces.append(token_ids[:-1])
                parents.append(parent)
            start += length
    return TokenBatch(
        packed=PackedBatch.of(pieces, parents).to(device),
        rows=torch.cat(rows).to(device),
        targets=torch.cat(targets).to(device),
        lengths=tuple(len(token_ids) for _, completions in batch for token_ids in completions),
    )
