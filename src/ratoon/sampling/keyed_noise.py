"""Noise that depends on nothing but the identity of the draw and the token id.

Every draw (a `DrawKey` and a position t) owns one uniform number per token id v,

    w(v) = (k(v) + 1/2) / 2**52,    k(v) in [0, 2**52),

made by integer arithmetic alone: no generator state, the same bits on every device, for every
batch and order. `E(v) = -log1p(-w(v))` is standard exponential and `-log E(v)` standard Gumbel
noise. 52 bits keep the tail: a token of probability 1e-12 is still drawn as often as it should be.

How k is made (ours):

1. `sequence_key`: blake2b of the whole `DrawKey`, 128 bits, once per response.
2. `row_keys`: a 64-bit mix of both words with t, 128 bits per position.
3. `noise_tables`: v is split into block i = v // 256 and column j = v % 256. Each block gets
   a word a_i, each column words b_j (odd) and c_j, mixed from both words of the row key:
   `mix((constant ^ key_0) * (key_1 | 1))`, a keyed mix, because a fixed mix of `key ^ v` or
   `key + v` would make rows of neighbouring keys permutations of each other.
4. `x = c_j + a_i * b_j` (mod 2**32) is exactly uniform and independent over any three ids; a
   quadratic permutation (the one of RC6), a xor-shift, a multiplication and a last xor-shift
   break what algebra is left among four and more ids. 31 bits come out.
5. Two such words from separate tables give k: 31 high bits and 21 low bits. A screen over the
   whole vocabulary needs only the high word (`high_bits`), at 32-bit speed.

Shapes: B rows, M ids, V vocabulary, G blocks = ceil(V / 256).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ratoon.records import DrawKey

# What the noise is for: selecting tokens.
DRAWS = b"ratoon.draw"

COLUMN_BITS = 8
COLUMNS = 1 << COLUMN_BITS
UNIFORM_BITS = 52
HIGH_BITS = 31
LOW_BITS = UNIFORM_BITS - HIGH_BITS

_CHUNK_IDS = 1 << 15

_GOLDEN = 0x9E3779B97F4A7C15
_ROW_0 = 0xD1342543DE82EF95
_ROW_1 = 0xAF251AF3B0F025B5


def _signed(word: int, bits: int = 64) -> int:
    """The two's complement value of an unsigned word, as torch's integer types hold it."""
    return word - (1 << bits) if word >> (bits - 1) else word


_MUL_32 = _signed(0x846CA68B, 32)


def sequence_key(key: DrawKey, purpose: bytes = DRAWS) -> tuple[int, int]:
    """The 128-bit key of one response, as two signed 64-bit words.

    Every field of the key takes part, so that responses that differ in any of them draw
    independent noise. The data set comes last: the fields before it are integers and cannot hold
    the separator. Noise of another `purpose` (at most 16 bytes) is independent of it all.
    """
    text = (
        f"{key.seed}|{int(key.stream)}|{key.round}|{key.row}|{key.sample}|{key.attempt}"
        f"|{key.dataset}"
    )
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=purpose).digest()
    return (
        int.from_bytes(digest[:8], "little", signed=True),
        int.from_bytes(digest[8:], "little", signed=True),
    )


def sequence_keys(keys: Iterable[DrawKey], device: torch.device | str = "cpu") -> Tensor:
    """`sequence_key` of many responses.

    Shapes: returns [B, 2] int64. Cost: about 3 microseconds per key, one copy to the device.
    """
    words = [sequence_key(key) for key in keys]
    return torch.tensor(words, dtype=torch.int64, device=device).reshape(-1, 2)


def row_keys(sequence_keys: Tensor, t: Tensor) -> Tensor:
    """The key of each row's position t: 128 bits per (response, position).

    For one response no two positions share either word, because each step is a permutation.

    Shapes: sequence_keys [B, 2] int64, t [B] int64 (index in the unpadded sequence, prompt
    included); returns [B, 2] int64. Cost: no host-device sync.
    """
    steps = _row_steps(sequence_keys.device)
    words = _mix64_(sequence_keys + t[:, None] * steps)
    return _mix64_(words.bitwise_xor_(sequence_keys.flip(-1)))


class NoiseTables(NamedTuple):
    """The words of B draws from which the noise of every id follows.

    Axis 1 is the word of k that an entry serves: 0 the high one, 1 the low one.
    Shapes: block [B, 2, G], factor [B, 2, 256] (odd), offset [B, 2, 256], all int32.
    """

    block: Tensor
    factor: Tensor
    offset: Tensor

    def rows(self, index: slice | Tensor) -> NoiseTables:
        """The tables of some draws."""
        return NoiseTables(self.block[index], self.factor[index], self.offset[index])


def noise_tables(row_keys: Tensor, num_ids: int) -> NoiseTables:
    """Tables for ids below `num_ids`.

    Entries do not depend on `num_ids`, only their number does: a smaller vocabulary sees the
    same noise. Shapes: row_keys [B, 2] int64. Cost: about 15 operations on [B, 512 + G] words,
    no host-device sync.
    """
    half_blocks = -(-num_ids // (2 * COLUMNS))
    words = _constants(half_blocks, row_keys.device) ^ row_keys[:, :1]
    words *= row_keys[:, 1:] | 1
    halves = _mix64_(words).view(torch.int32)
    factor = halves[:, : 2 * COLUMNS].bitwise_or_(1)
    offset = halves[:, 2 * COLUMNS : 4 * COLUMNS]
    block = halves[:, 4 * COLUMNS :]
    return NoiseTables(
        block=block.unflatten(1, (2, 2 * half_blocks)),
        factor=factor.unflatten(1, (2, COLUMNS)),
        offset=offset.unflatten(1, (2, COLUMNS)),
    )


def high_bits(tables: NoiseTables, out: Tensor, scratch: Tensor) -> Tensor:
    """The high 31 bits of k for all ids, written to `out`.

    Shapes: out and scratch [B, G, 256] int32, contiguous; id v lies at [v // 256, v % 256]. The
    tables may have more blocks. Cost: 8 passes of 32 bits, no host-device sync.
    """
    torch.addcmul(
        tables.offset[:, 0, None, :],
        tables.block[:, 0, : out.shape[1], None],
        tables.factor[:, 0, None, :],
        out=out,
    )
    return _finish(out, scratch)


def exponential_at(tables: NoiseTables, ids: Tensor) -> Tensor:
    """E of some ids in float64, from finished tables.

    Shapes: ids [M] (the same for all rows) or [B, M] int64; returns [B, M].
    Cost: about 20 operations on [B, M], no host-device sync.
    """
    words = _words_at(tables, ids)
    words[:, 1] >>= HIGH_BITS - LOW_BITS
    high, low = words.to(torch.float64).unbind(1)
    # (k + 1/2) / 2**21 has 53 bits, so every step up to the logarithm is exact.
    k = torch.add(high, low, alpha=2.0**-LOW_BITS).add_(2.0 ** -(LOW_BITS + 1))
    return k.mul_(-(2.0**-HIGH_BITS)).log1p_().neg_()


def exponential_estimate(tables: NoiseTables, ids: Tensor) -> Tensor:
    """E of some ids in float32, from the high 31 bits of k alone: for drafting.

    Its w is off by at most 2**-32 and float32's rounding; it is above zero and finite. Half the
    price of `exponential_at`. Shapes: as there.
    """
    shape = (len(tables.block), ids.shape[-1])
    block, column = (ids >> COLUMN_BITS).expand(shape), (ids & (COLUMNS - 1)).expand(shape)
    words = torch.addcmul(
        tables.offset[:, 0].gather(-1, column),
        tables.block[:, 0].gather(-1, block),
        tables.factor[:, 0].gather(-1, column),
    )
    w = _finish(words, torch.empty_like(words)).to(torch.float32)
    w.add_(0.5).mul_(2.0**-HIGH_BITS).clamp_(max=1.0 - 2.0**-24)
    return w.neg_().log1p_().neg_()


def exponential(
    row_keys: Tensor,
    ids: Tensor | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Standard exponential noise E of some ids, or of all: the noise that selection uses.

    `-exponential(...).log()` is the standard Gumbel noise. Computed in float64, then rounded to
    `dtype`; float32 keeps it above zero and finite.

    Shapes: row_keys [B, 2] int64; ids [M] (the same for all rows) or [B, M] int64, below
    `vocab_size`; returns [B, M], or [B, V] without ids.
    Cost: with ids but no `vocab_size`, one host-device sync for the largest id.
    """
    ids, vocab_size = _resolve(row_keys, ids, vocab_size)
    tables = noise_tables(row_keys, vocab_size)
    batch, num_ids = len(row_keys), ids.shape[-1]
    out = torch.empty(batch, num_ids, dtype=dtype, device=row_keys.device)
    # On a CPU in pieces whose temporaries stay in cache; a third faster.
    chunk_ids = _CHUNK_IDS if row_keys.device.type == "cpu" else batch * num_ids
    step = max(1, chunk_ids // max(1, num_ids))
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        out[rows] = exponential_at(tables.rows(rows), ids if ids.dim() == 1 else ids[rows])
    return out


def uniform_bits(
    row_keys: Tensor, ids: Tensor | None = None, vocab_size: int | None = None
) -> Tensor:
    """The integers k in [0, 2**52) behind `exponential`; shapes and cost are the same."""
    ids, vocab_size = _resolve(row_keys, ids, vocab_size)
    high, low = _words_at(noise_tables(row_keys, vocab_size), ids).to(torch.int64).unbind(1)
    return (high << LOW_BITS) | (low >> (HIGH_BITS - LOW_BITS))


def _resolve(row_keys: Tensor, ids: Tensor | None, vocab_size: int | None) -> tuple[Tensor, int]:
    """Ids and a bound of them, where one of the two may be left out."""
    if ids is None:
        if vocab_size is None:
            raise ValueError("keyed noise needs ids or vocab_size, got neither")
        return torch.arange(vocab_size, device=row_keys.device), vocab_size
    if vocab_size is None:
        vocab_size = int(ids.max()) + 1 if ids.numel() else 1
    return ids, vocab_size


def _words_at(tables: NoiseTables, ids: Tensor) -> Tensor:
    """The two 31-bit words of some ids, [B, 2, M] int32."""
    shape = (len(tables.block), 2, ids.shape[-1])
    block = (ids >> COLUMN_BITS).unsqueeze(-2).expand(shape)
    column = (ids & (COLUMNS - 1)).unsqueeze(-2).expand(shape)
    words = torch.addcmul(
        tables.offset.gather(-1, column),
        tables.block.gather(-1, block),
        tables.factor.gather(-1, column),
    )
    return _finish(words, torch.empty_like(words))


def _finish(words: Tensor, scratch: Tensor) -> Tensor:
    """31 uniform bits from 32, in place.

    x -> 2x^2 + x permutes the 32-bit words. torch shifts int32 arithmetically, hence the mask; in
    the last step the sign bit cancels itself, which is why 31 bits remain, evenly.
    """
    torch.addcmul(words, words, words, value=2, out=words)
    torch.bitwise_right_shift(words, 16, out=scratch)
    scratch.bitwise_and_(0xFFFF)
    words.bitwise_xor_(scratch).mul_(_MUL_32)
    torch.bitwise_right_shift(words, 15, out=scratch)
    return words.bitwise_xor_(scratch)


def _mix64_(words: Tensor) -> Tensor:
    """A permutation of 64-bit words in which every bit depends on every bit, in place.

    Source: Stafford's variant 13 of MurmurHash3's finaliser, as in SplitMix64.
    """
    scratch = torch.empty_like(words)
    _fold(words, 30, scratch).mul_(_signed(0xBF58476D1CE4E5B9))
    _fold(words, 27, scratch).mul_(_signed(0x94D049BB133111EB))
    return _fold(words, 31, scratch)


def _fold(words: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """In place `words ^= words >> shift`, logical; torch shifts arithmetically, hence the mask."""
    torch.bitwise_right_shift(words, shift, out=scratch)
    scratch.bitwise_and_((1 << (64 - shift)) - 1)
    return words.bitwise_xor_(scratch)


# Kept for good, like the constants below: a CUDA graph reads them where they lie.
@cache
def _row_steps(device: torch.device) -> Tensor:
    """What t is multiplied by in each of the two words of a row key."""
    return torch.tensor([_signed(_ROW_0), _signed(_ROW_1)], dtype=torch.int64, device=device)


@cache
def _constants(half_blocks: int, device: torch.device) -> Tensor:
    """One strong 64-bit constant per pair of 32-bit table entries.

    First those of the columns, then the high and the low words of the blocks, which start at fixed
    places so that they do not depend on the number of blocks.
    """
    columns = torch.arange(1, 2 * COLUMNS + 1, dtype=torch.int64, device=device)
    blocks = torch.arange(half_blocks, dtype=torch.int64, device=device)
    index = torch.cat((columns, blocks + (1 << 40), blocks + (1 << 41)))
    return _mix64_(index * _signed(_GOLDEN))
