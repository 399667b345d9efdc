"""What ends the response in each slot: end ids, stop strings, and the last position.

Shape letters: S slots, B live rows, E end ids, L tokens that a step selected.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ratoon.errors import ConfigError
from ratoon.records import Request
from ratoon.rollout.native.rows import Rows
from ratoon.sampling.stop_strings import Decode, StopWatch, check_stop_strings


class End(NamedTuple):
    """Why a response is over, and the stop string, if it was one."""

    finish: Literal["stop", "length"]
    stop_string: str | None


class Ends:
    """The ends of the live rows; slots move as those of `Rows` do.

    `ids [S, E]` are the end ids of each slot, padded with -1.
    """

    def __init__(self, num_slots: int, decode: Decode | None, device: torch.device) -> None:
        self.ids = torch.empty(num_slots, 0, dtype=torch.int64, device=device)
        self._decode = decode
        self._watches: dict[int, StopWatch] = {}
        self._found: dict[int, tuple[int, str]] = {}

    def check(self, request: Request) -> None:
        """Raise `ConfigError` for stop strings that cannot be watched for."""
        check_stop_strings(request.stop_strings)
        if request.stop_strings and self._decode is None:
            raise ConfigError("a request with stop_strings needs an engine that was given `decode`")

    def begin(self, slot: int, request: Request) -> None:
        """A request took this slot."""
        eos_ids = request.eos_ids
        missing = len(eos_ids) - self.ids.shape[1]
        if missing > 0:
            self.ids = torch.nn.functional.pad(self.ids, (0, missing), value=-1)
        self.ids[slot] = -1
        self.ids[slot, : len(eos_ids)] = torch.tensor(eos_ids, device=self.ids.device)
        if request.stop_strings:
            assert self._decode is not None
            strings, immune = request.stop_strings, request.params.min_new_tokens
            self._watches[slot] = StopWatch(strings, self._decode, immune)

    def release(self, slot: int, last: int) -> None:
        """The response in `slot` is finished; the last live row takes its place."""
        self._watches.pop(slot, None)
        if slot != last:
            self.ids[slot] = self.ids[last]
            if last in self._watches:
                self._watches[slot] = self._watches.pop(last)

    def clip(self, rows: Rows, tokens: Tensor, counts: Tensor) -> Tensor:
        """How many of a step's `tokens [B, L]` to keep: none behind the end of a response.

        Cost: rows with stop strings are looked at one by one, after one host-device sync.
        """
        num_live, depth = tokens.shape
        is_end = (tokens[:, :, None] == self.ids[:num_live, None]).any(-1)
        levels = torch.arange(depth, device=tokens.device)
        first_end = torch.where(is_end, levels, depth).amin(1)
        room = rows.last_positions[:num_live] - rows.lengths[:num_live]
        known = torch.minimum(torch.minimum(counts, first_end + 1), room)
        self._found.clear()
        if self._watches:
            ids, kept = tokens.tolist(), known.tolist()
            for slot, watch in self._watches.items():
                found = watch.first_end(ids[slot][: kept[slot]])
                if found is not None:
                    self._found[slot] = found
                    known[slot] = found[0]
        return known

    def flags(self, rows: Rows, tokens: Tensor, final: Tensor) -> Tensor:
        """Whether the first `final [B]` of the tokens end in an end id, and leave no room.

        Shape `[B, 2]`. The tokens are not committed yet.
        """
        num_live = len(final)
        last = tokens.gather(1, final[:, None] - 1)
        stopped = (last == self.ids[:num_live]).any(1)
        full = rows.lengths[:num_live] + final >= rows.last_positions[:num_live]
        return torch.stack([stopped, full], 1)

    def reached(self, flags: Tensor, tokens: Tensor, final: Tensor) -> dict[int, End]:
        """Which responses are over now that the first `final [B]` of the tokens are committed.

        `flags` as above; all are on the CPU.
        """
        over = {
            slot: End("stop" if is_stopped else "length", None)
            for slot, (is_stopped, is_full) in enumerate(flags.tolist())
            if is_stopped or is_full
        }
        if self._watches:
            ids, counts = tokens.tolist(), final.tolist()
            for slot, watch in self._watches.items():
                # What was found among carried tokens is looked for again when they are confirmed.
                count, string = self._found.get(slot, (0, ""))
                if counts[slot] == count:
                    over[slot] = End("stop", string)
                watch.append(ids[slot][: counts[slot]])
        return over
