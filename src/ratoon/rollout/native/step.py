"""The values of one decode step, and what of them is read on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import Tree, visited_nodes
from ratoon.speculation.tuner import StepRecord
from ratoon.speculation.verify import Verified


class Drafted(NamedTuple):
    """A step's trees, how many carried tokens each begins with, what was promised, and seconds."""

    tree: Tree
    carried: Tensor
    promised: Tensor | None
    seconds: float


class Seen(NamedTuple):
    """What the host must know of a step.

    Shapes: `known`, `final`, `carried` and `is_settled [B]`; `flags [B, 2]` of `Ends`; `promised`
    of the tree, or empty; the others as in `Verified` and `Tree`.
    """

    known: Tensor
    final: Tensor
    flags: Tensor
    tokens: Tensor
    path: Tensor
    counts: Tensor
    valid: Tensor
    depths: Tensor
    chances: Tensor
    carried: Tensor
    promised: Tensor
    is_settled: Tensor


class Outcome(NamedTuple):
    """What a step commits: `known [B]` tokens of each row, `final [B]` of them for good."""

    verified: Verified
    known: Tensor
    final: Tensor
    seen: Seen


def on_host(values: Sequence[Tensor]) -> list[Tensor]:
    """The same values on the CPU, by one host-device sync; tensors of the CPU themselves."""
    return list(values) if values[0].device.type == "cpu" else copied_at_once(values)


def copied_at_once(values: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by way of one float64 tensor: integers must be below 2**53."""
    flat = torch.cat([value.flatten().to(torch.float64) for value in values]).cpu()
    parts = flat.split([value.numel() for value in values])
    return [
        part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)
    ]


def step_record(strategy: Strategy, drafted: Drafted, seen: Seen, verify_s: float) -> StepRecord:
    """What a tuner is told of a step."""
    num_live = len(seen.known)
    record = StepRecord(
        strategy=strategy,
        num_live=num_live,
        rows=int(seen.valid.sum()),
        tokens=int((seen.known - seen.carried).clamp_min(0).sum()),
        draft_s=drafted.seconds,
        verify_s=verify_s,
    )
    if drafted.promised is None:
        return record
    is_drafted = seen.valid & (seen.depths > seen.carried[:, None])
    visited = visited_nodes(seen.valid, seen.path) & is_drafted
    return replace(
        record,
        expected=float((seen.chances * is_drafted).sum()) / num_live,
        visited=int(visited.sum()) / num_live,
        promised=seen.promised.tolist(),
    )
