"""Stands in for CUDA graphs on a CPU: operations are recorded once, and repeated on their memory.

What Python decides is fixed by the recording, as a graph fixes it. What a graph cannot hold (a
value read on the host, a shape that depends on values) is refused, and what graphs in one memory
pool do to each other's results is done on purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratoon.models.graph_pool import Captured, GraphPool, Outputs

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default}
SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


def asks_device(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation makes the host wait for the values of a tensor."""
    if func in READS or func in SHAPED_BY_VALUES:
        return True
    return func in INDEXING and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert not asks_device(func, args), f"{func} cannot be captured"
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """A `Capture` for the CPU."""

    def __init__(self) -> None:
        self._outputs: list[Outputs] = []

    def __call__(self, work: Callable[[], Outputs]) -> Captured:
        work()
        tape = _Tape()
        with tape:
            outputs = work()
        self._outputs.append(outputs)

        def replay() -> None:
            for others in self._outputs:
                for values in others:
                    spoil(values)
            tape.replay()

        return Captured(replay, outputs, 1000)


def spoil(values: Tensor) -> None:
    """Make sure that nobody can use these."""
    if values.dtype.is_floating_point:
        values.fill_(torch.nan)
    else:
        values.fill_(True if values.dtype == torch.bool else 10**6)


def recorded_pool(**options: Any) -> GraphPool:
    return GraphPool(Recorder(), **options)
