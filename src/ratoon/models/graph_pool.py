"""CUDA graphs of computations with static shapes, captured at first use, in one memory pool.

Launching the kernels of a decode step takes a GPU's host longer than computing them. A graph is
launched at once, but its shapes and addresses are fixed. So inputs are copied into buffers of a
*bucket*'s shape, which is a little larger, and what they leave free is filled with values that
change nothing.

Which buckets exist follows from use. A tuner that goes by the clock may take any tree for any live
batch, and takes few; a graph of each tree for each batch would mostly lie idle (TLT, section 4:
30 GB instead of 11 for four strategies of an 8B model).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ratoon.errors import CapabilityError

CudaGraphs = Literal["auto", "on", "off"]
Outputs = tuple[Tensor, ...]

# A bound on their memory; the least recently used goes first.
MAX_GRAPHS = 128
# Libraries choose kernels and allocate workspaces in their first calls.
_WARM_UPS = 2


def bucket(size: int, most: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that holds `size`; `most` at most."""
    power = 1 << (size - 1).bit_length()
    three_quarters = 3 * power // 4
    return min(three_quarters if size <= three_quarters else power, most)


class Padded(NamedTuple):
    """An input, the shape of its buffer, and what stands in the buffer around it."""

    values: Tensor
    shape: tuple[int, ...]
    fill: int = 0


class Captured(NamedTuple):
    """A computation that `replay` repeats: it reads and writes the same memory each time.

    `outputs` hold what the last replay left, `num_bytes` is the memory that the capture took.
    """

    replay: Callable[[], object]
    outputs: Outputs
    num_bytes: int


class Capture(Protocol):
    """Makes a computation repeatable; must leave its effects as if it had run at least once."""

    def __call__(self, work: Callable[[], Outputs]) -> Captured:
        """Capture `work`, which is run any number of times on the same inputs."""
        ...


class CudaCapture:
    """`torch.cuda.CUDAGraph`. All graphs of one object share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all, since libraries keep a workspace for each stream.
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Outputs]) -> Captured:
        """See `Capture`. Synchronises the device."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    work()
            current.wait_stream(self._stream)
            free = self._free_bytes()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                outputs = work()
            return Captured(graph.replay, outputs, max(0, free - self._free_bytes()))

    def _free_bytes(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


@dataclass(frozen=True, slots=True)
class GraphReport:
    """Graphs that exist and the bytes they took; how many were ever captured, and replayed."""

    graphs: int
    captures: int
    replays: int
    num_bytes: int


class _Graph(NamedTuple):
    buffers: list[Tensor]
    captured: Captured


class GraphPool:
    """The graphs of one engine: of its verification, and of its learned drafter."""

    def __init__(self, capture: Capture, max_graphs: int = MAX_GRAPHS) -> None:
        self._capture = capture
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._captures = self._replays = 0

    def run(
        self, name: Hashable, work: Callable[..., Outputs], inputs: Sequence[Padded]
    ) -> Outputs:
        """`work` of the padded inputs, by the graph of `name` and of their shapes.

        Whatever else `work` depends on must be part of `name`, or lie where it lay at the capture.
        It must not read a value on the host, nor make a shape of one, and running it twice on the
        same inputs must do what running it once does.

        The outputs are good until the next `run` of this pool: graphs share memory.
        Cost: a copy kernel for each input, a second one where it is padded. No host-device syncs,
        but where a graph is captured.
        """
        key = (name, tuple((item.shape, item.values.dtype) for item in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            buffers = [item.values.new_empty(item.shape) for item in inputs]
            _fill(buffers, inputs)
            graph = _Graph(buffers, self._capture(lambda: work(*buffers)))
            self._captures += 1
            self._graphs[key] = graph
            if len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
            _fill(graph.buffers, inputs)
        graph.captured.replay()
        self._replays += 1
        return graph.captured.outputs

    def drop(self) -> None:
        """Forget all graphs: what they read has moved."""
        self._graphs.clear()

    def report(self) -> GraphReport:
        """What the pool holds."""
        graphs = self._graphs.values()
        num_bytes = sum(graph.captured.num_bytes for graph in graphs)
        return GraphReport(len(graphs), self._captures, self._replays, num_bytes)


def _fill(buffers: Sequence[Tensor], inputs: Sequence[Padded]) -> None:
    for buffer, (values, shape, fill) in zip(buffers, inputs, strict=True):
        if values.shape == shape:
            buffer.copy_(values)
            continue
        buffer.fill_(fill)
        buffer[tuple(slice(size) for size in values.shape)].copy_(values)


def graph_pool(setting: CudaGraphs, device: torch.device) -> GraphPool | None:
    """A pool for an engine on `device`, or None: `auto` has one wherever there can be one.

    Raises: CapabilityError for `on` where there can be none.
    """
    if setting != "off" and device.type == "cuda":
        return GraphPool(CudaCapture(device))
    if setting == "on":
        raise CapabilityError(
            f"cuda_graphs = on, but the model is on {device.type}; CUDA graphs need a CUDA device: "
            "move the model there, or set auto or off"
        )
    return None
