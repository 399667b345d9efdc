"""Keyed selection: which token a row of logits yields under the noise of its key.

    y = argmax over v of ( log p(v) + g(v) )  =  argmin over v of E(v) / p(v)

with E the exponential and g = -log E the Gumbel noise of `keyed_noise`. y is an exact sample of p
and a function of (logits, key) alone.

The race is run in two stages. The *screen* bounds score(v) - log E(v) from above for all ids, in
float32, by the high 31 of the 52 noise bits and E >= w. The *final* computes exact values in
float64 for the few groups of ids with the highest bounds; if no other group's bound reaches the
winner, it has won, and otherwise all groups enter the final. The screen decides nothing, so its
rounding is of no consequence.

Shapes: B rows, V vocabulary. The vocabulary is padded to S strips of H blocks of 256 ids; the ids
at the same place in the H blocks of a strip form a group: 256 S groups of H ids.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.errors import NumericsError
from ratoon.records import SamplingParams
from ratoon.sampling import keyed_noise
from ratoon.sampling.keyed_noise import COLUMN_BITS, COLUMNS, HIGH_BITS, NoiseTables
from ratoon.sampling.prefixes import Prefixes
from ratoon.sampling.transforms import (
    change_logits,
    changes_logits,
    check_params,
    is_temperature_only,
    scale_,
    transform,
)

# Bytes that the screen touches per id, and how many of them stay within a core's L2 cache.
_BYTES_PER_ID = 14
_CHUNK_BYTES = 3 << 19
_CHUNK_ROWS_OFF_CPU = 64

# Groups of at most 64 ids where there are many blocks; one strip where padding would show.
_MAX_STRIPS = 4
_MIN_BLOCKS_FOR_STRIPS = 32

# With 4, fewer than 1 row in 1,000 needs a second final.
_FINALISTS = 4

# A bound that reaches the winner within these is not trusted to lose: far above float32 rounding.
_MARGIN = 1e-3
_RELATIVE_MARGIN = 1e-6


class _Screened(NamedTuple):
    """What the screen leaves of B rows, all float32.

    group_bound [B, 256 S]: the highest score - log(high bits) in each group. max_score [B].
    log_total [B]: log of the sum of exp(score - max_score).
    """

    group_bound: Tensor
    max_score: Tensor
    log_total: Tensor


class Selector:
    """Selects tokens by keyed noise; owns the buffers that this needs.

    Guarantees: a row's token and log-probability do not depend on the other rows, their number or
    their order. Not thread-safe: one selector per thread.

    Source: the Gumbel-max trick (Gumbel 1954) as an exponential race; keys and screen are ours.
    """

    def __init__(
        self,
        vocab_size: int,
        vocab_limit: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare for logits of `vocab_size` columns of which the first `vocab_limit` count.

        Raises ValueError if the limit is not between 1 and `vocab_size`.
        """
        limit = vocab_size if vocab_limit is None else vocab_limit
        if not 1 <= limit <= vocab_size:
            raise ValueError(f"vocab_limit is {limit}; it must lie between 1 and {vocab_size}")
        self.vocab_size = vocab_size
        self.vocab_limit = limit
        self.device = torch.device(device)
        num_blocks = -(-limit // COLUMNS)
        self._strips = _MAX_STRIPS if num_blocks >= _MIN_BLOCKS_FOR_STRIPS else 1
        self._group_size = -(-num_blocks // self._strips)
        width = self._strips * self._group_size * COLUMNS
        fitting = max(1, _CHUNK_BYTES // (_BYTES_PER_ID * width))
        self._chunk_rows = fitting if self.device.type == "cpu" else _CHUNK_ROWS_OFF_CPU
        self._steps = torch.arange(0, self._group_size << COLUMN_BITS, COLUMNS, device=self.device)
        shape = (self._chunk_rows, width)
        # Ids from the limit to the end of the last strip keep a score of minus infinity.
        self._scores = torch.full(shape, -torch.inf, device=self.device)
        self._words = torch.empty(shape, dtype=torch.int32, device=self.device)
        self._scratch = torch.empty(shape, dtype=torch.int32, device=self.device)

    @torch.no_grad()
    def select(
        self,
        logits: Tensor,
        row_keys: Tensor,
        params: SamplingParams,
        prefixes: Prefixes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The token of each row and its natural log-probability under p.

        At temperature 0 the token is the largest logit's (lowest id on ties), after what changes
        logits, and its log-probability is 0: p is then a point mass.
        With temperature alone, on a CPU, the log-probability has the bits of
        `torch.log_softmax(logits[:, :vocab_limit].float() / temperature, -1)`.

        Shapes: logits [B, V] bfloat16, float16, float32 or float64; row_keys [B, 2] int64 from
        `keyed_noise.row_keys`; `prefixes` of B rows, read only where `reads_prefixes` says so;
        returns ids [B] int64 and log-probabilities [B] float32.
        Raises: NumericsError if a row holds NaN or plus infinity or excludes all tokens; and as
        `transform` does.
        Cost: 17 passes of 32 bits over [B, V] in cache; one host-device sync, a second one where
        the first final does not settle a row; `transform` on top for all but temperature.
        """
        check_params(params)
        if params.temperature == 0.0:
            if changes_logits(params):
                logits = change_logits(logits, params, self.vocab_limit, prefixes)
            values, ids = logits[:, : self.vocab_limit].max(dim=-1)
            _check_finite(values)
            return ids, torch.zeros(ids.shape, device=ids.device)
        temperature = params.temperature
        if not is_temperature_only(params):
            logits, temperature = transform(logits, params, self.vocab_limit, prefixes), 1.0
        tables = keyed_noise.noise_tables(row_keys, self._scores.shape[1])
        screened = self._screen(logits, temperature, tables)
        ids = self._settle(logits, temperature, tables, screened.group_bound)
        return ids, _logprobs(logits, ids, temperature, screened)

    @torch.no_grad()
    def select_settled(
        self, logits: Tensor, row_keys: Tensor, params: SamplingParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`select` as far as the first final goes, at temperature alone; no host-device sync.

        Returns ids and log-probabilities as `select` does, and which rows they hold for, bool [B]:
        all others are to be given to `select`, which goes on or raises.
        """
        temperature = params.temperature
        if temperature == 0.0:
            values, ids = logits[:, : self.vocab_limit].max(dim=-1)
            return ids, torch.zeros(ids.shape, device=ids.device), values.isfinite()
        tables = keyed_noise.noise_tables(row_keys, self._scores.shape[1])
        screened = self._screen(logits, temperature, tables)
        ids, is_settled = self._first_final(logits, temperature, tables, screened.group_bound)
        # A row of NaN has no winner, and is not settled.
        ids.clamp_(max=self.vocab_limit - 1)
        return ids, _logprobs(logits, ids, temperature, screened), is_settled

    def _screen(self, logits: Tensor, temperature: float, tables: NoiseTables) -> _Screened:
        """Bounds per group and the normaliser of each row, chunk by chunk."""
        num_rows = logits.shape[0]
        group_bound = torch.empty(num_rows, self._strips, COLUMNS, device=logits.device)
        max_score, log_total = torch.empty(2, num_rows, device=logits.device).unbind(0)
        for start in range(0, num_rows, self._chunk_rows):
            rows = slice(start, min(start + self._chunk_rows, num_rows))
            size = rows.stop - start
            scores, words, scratch = self._scores[:size], self._words[:size], self._scratch[:size]
            blocks = (size, -1, COLUMNS)
            scores[:, : self.vocab_limit].copy_(logits[rows, : self.vocab_limit])
            scale_(scores, temperature)
            keyed_noise.high_bits(tables.rows(rows), words.view(blocks), scratch.view(blocks))
            bound = scratch.view(torch.float32)
            bound.copy_(words).log_()
            torch.sub(scores, bound, out=bound)
            grid = bound.view(size, self._strips, self._group_size, COLUMNS)
            torch.amax(grid, 2, out=group_bound[rows])
            # log_softmax rather than a sum: its kernel gives a row the same bits in any batch.
            logprobs = torch.log_softmax(scores, -1, out=words.view(torch.float32))
            torch.amax(scores, -1, out=max_score[rows])
            torch.amax(logprobs, -1, out=log_total[rows])
        return _Screened(group_bound.flatten(1), max_score, log_total.neg_())

    def _settle(
        self, logits: Tensor, temperature: float, tables: NoiseTables, group_bound: Tensor
    ) -> Tensor:
        """The winner of each row, [B] int64."""
        ids, is_settled = self._first_final(logits, temperature, tables, group_bound)
        if bool(is_settled.all()):
            return ids
        rows = torch.nonzero(~is_settled).squeeze(-1)
        groups = torch.arange(group_bound.shape[1], device=rows.device).expand(len(rows), -1)
        best, ids[rows] = self._final(logits[rows], temperature, tables.rows(rows), groups)
        _check_finite(best)
        return ids

    def _first_final(
        self, logits: Tensor, temperature: float, tables: NoiseTables, group_bound: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The winner among the groups of highest bounds, and whether no other group reaches it."""
        bounds, groups = group_bound.topk(_FINALISTS + 1, dim=-1)
        best, ids = self._final(logits, temperature, tables, groups[:, :-1])
        rival = bounds[:, -1].double() + HIGH_BITS * math.log(2.0)
        return ids, rival < best - best.abs() * _RELATIVE_MARGIN - _MARGIN

    def _final(
        self, logits: Tensor, temperature: float, tables: NoiseTables, groups: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The highest exact score - log E among whole groups, and the lowest id that has it.

        Shapes: groups [B, C]; returns [B] float64 and [B] int64.
        """
        strip, column = groups >> COLUMN_BITS, groups & (COLUMNS - 1)
        first = (strip * self._group_size << COLUMN_BITS) + column
        ids = (first[:, :, None] + self._steps).flatten(1)
        ids.clamp_(max=self.vocab_limit - 1)
        score = logits.gather(-1, ids)
        if score.dtype != torch.float64:
            score = score.to(torch.float32)
        value = scale_(score, temperature) - keyed_noise.exponential_at(tables, ids).log_()
        best = value.amax(-1)
        ids.masked_fill_(value != best[:, None], self.vocab_size)
        return best, ids.amin(-1)


def _logprobs(logits: Tensor, ids: Tensor, temperature: float, screened: _Screened) -> Tensor:
    """Log-probabilities [B] of `ids [B]`."""
    score = logits.gather(-1, ids[:, None]).to(torch.float32).squeeze(-1)
    # The order in which torch's own log_softmax subtracts.
    return scale_(score, temperature) - screened.max_score - screened.log_total


def _check_finite(row_max: Tensor) -> None:
    """Raise `NumericsError` unless each row's largest value is a number. One host-device sync."""
    if bool(row_max.isfinite().all()):
        return
    value = float(row_max[~row_max.isfinite()][0])
    raise NumericsError(
        f"a row of logits has {value} as its largest value; it must be a finite number. NaN or"
        " infinity comes from the model, or from a temperature too small for its logits; minus"
        " infinity means that every token is excluded."
    )
