"""Files of token ids that are mapped into memory, and the order in which training reads them.

The first 4,096 bytes of a file are one JSON object, filled up with spaces and ended by a newline;
then come the ids, little-endian, without gaps. So a file is opened at once whatever its size, and
`head -c 4096` says what it holds.

Shape letters: T tokens of a sequence, B sequences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ratoon.errors import DataError

FORMAT = "ratoon-tokens-1"
_HEADER_BYTES = 4096
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# How many ids are looked at together: what fits into a processor's cache.
_IDS_AT_ONCE = 1 << 20
# A stream of its own for each epoch's order; apart from all other uses of a run's seed.
_ORDER_KEY = 0x546F6B656E73

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What a token file holds.

    `count` ids below `vocab_size`; `documents` texts, each closed by `document_end`. `tokenizer`
    is the SHA-256 of the tokenizer that made the ids, `sha256` that of the ids' bytes.
    """

    dtype: Literal["uint16", "uint32"]
    count: int
    vocab_size: int
    document_end: int
    documents: int
    tokenizer: str
    sha256: str = ""
    format: str = FORMAT


class TokenWriter:
    """Writes a token file: `add` documents, then `close`. A file that is not closed is refused.

    Ids are two bytes wide where the vocabulary allows it, else four.
    """

    def __init__(self, path: Path, *, vocab_size: int, document_end: int, tokenizer: str) -> None:
        dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.header = TokenHeader(dtype, 0, vocab_size, document_end, 0, tokenizer)
        self._hash = hashlib.sha256()
        self._file = path.open("wb")
        self._file.write(b"\0" * _HEADER_BYTES)

    def add(self, ids: Sequence[int]) -> None:
        """Append one document and the id that ends it.

        Raises:
            DataError: an id is not below the vocabulary's size.
        """
        values = np.asarray([*ids, self.header.document_end], dtype=np.int64)
        if values.min() < 0 or values.max() >= self.header.vocab_size:
            raise DataError(
                f"document {self.header.documents}: has ids from {values.min()} to {values.max()}, "
                f"but the tokenizer has {self.header.vocab_size}; it does not fit its own "
                "vocabulary, give another tokenizer"
            )
        data = values.astype(_DTYPES[self.header.dtype]).tobytes()
        self._hash.update(data)
        self._file.write(data)
        self.header = replace(
            self.header,
            count=self.header.count + len(values),
            documents=self.header.documents + 1,
        )

    def close(self) -> TokenHeader:
        """Write the header, which makes the file whole, and return it."""
        self.header = replace(self.header, sha256=self._hash.hexdigest())
        text = json.dumps(asdict(self.header)).encode()
        self._file.seek(0)
        self._file.write(text.ljust(_HEADER_BYTES - 1) + b"\n")
        self._file.close()
        return self.header

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        self._file.close()


class TokenFile:
    """An open token file, cut into sequences of `length` tokens and the one that follows each.

    Sequence i holds the tokens `i * length .. (i + 1) * length`, the last of which is only a
    target, and the first of the next sequence. What is left over at the end is not used.
    """

    def __init__(self, path: Path | str, length: int) -> None:
        """Map a file into memory.

        Raises:
            DataError: it is missing, no token file, truncated, or shorter than one sequence.
        """
        self.path = Path(path)
        self.length = length
        self.header = read_header(self.path)
        dtype = _DTYPES[self.header.dtype]
        expected = _HEADER_BYTES + self.header.count * dtype.itemsize
        found = self.path.stat().st_size
        if found != expected:
            raise DataError(
                f"{self.path}: is truncated or has been changed: {found:,} bytes, but its header "
                f"promises {self.header.count:,} tokens in {expected:,} bytes; prepare it again"
            )
        if len(self) < 1:
            raise DataError(
                f"{self.path}: holds {self.header.count:,} tokens, fewer than one sequence of "
                f"{length} and the token after it; give more text or shorter sequences"
            )
        self._ids: npt.NDArray[Any] = np.memmap(
            self.path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(self.header.count,)
        )

    def __len__(self) -> int:
        """Number of whole sequences."""
        return (self.header.count - 1) // self.length

    def sequences(self, indices: npt.NDArray[np.int64]) -> Ids:
        """Sequences `[B, T + 1]` of these indices: inputs are `[:, :-1]`, targets `[:, 1:]`."""
        places = indices[:, None] * self.length + np.arange(self.length + 1)
        found: Ids = self._ids[places].astype(np.int64)
        return found

    def check_ids(self) -> None:
        """Look at every id once; 60 million of two bytes take 0.02 s in memory.

        Raises:
            DataError: one is not below the vocabulary's size.
        """
        limit = self.header.vocab_size
        for start in range(0, self.header.count, _IDS_AT_ONCE):
            piece = self._ids[start : start + _IDS_AT_ONCE]
            if piece.max() >= limit:
                place = int((piece >= limit).argmax())
                raise DataError(
                    f"{self.path}: token {start + place:,} has the id {piece[place]}, but its "
                    f"header promises ids below vocab_size = {limit}; it has been changed, "
                    "prepare it again"
                )

    def first(self, count: int) -> Ids:
        """The first sequences, `count` or as many as there are."""
        return self.sequences(np.arange(min(count, len(self))))


class SequenceOrder:
    """Which sequence comes when: epoch after epoch, each in an order of its own.

    A pure function of the seed and the number of sequences, so any position can be resumed at.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        self._num = num_sequences
        self._seed = seed
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def take(self, start: int, count: int) -> Ids:
        """Indices `[count]` of the sequences from position `start` of the endless order."""
        pieces = []
        while count > 0:
            epoch, place = divmod(start, self._num)
            piece = self._of_epoch(epoch)[place : place + count]
            pieces.append(piece)
            start, count = start + len(piece), count - len(piece)
        return np.concatenate(pieces)

    def _of_epoch(self, epoch: int) -> Ids:
        if epoch != self._epoch:
            bits = np.random.SeedSequence([_ORDER_KEY, self._seed, epoch])
            generator = np.random.Generator(np.random.Philox(bits))
            self._order = generator.permutation(self._num)
            self._epoch = epoch
        return self._order


def read_header(path: Path) -> TokenHeader:
    """Read what a token file says of itself.

    Raises:
        DataError: it is missing, or no token file.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_HEADER_BYTES)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); make it with `ratoon data prepare`"
        ) from None
    try:
        values = json.loads(text)
        if values.get("format") != FORMAT or str(values.get("dtype")) not in _DTYPES:
            raise ValueError(f"format {values.get('format')!r}, dtype {values.get('dtype')!r}")
        header = TokenHeader(**{field.name: values[field.name] for field in fields(TokenHeader)})
        _check_header(header)
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path}: is no token file of format {FORMAT}, or was not written to its end "
            f"({error or 'no header'}); make it with `ratoon data prepare`"
        ) from None
    return header


def _check_header(header: TokenHeader) -> None:
    """Raise ValueError for a value that no writer makes."""
    smallest = {"count": 0, "vocab_size": 1, "document_end": 0, "documents": 0}
    for key, least in smallest.items():
        value = getattr(header, key)
        if type(value) is not int or value < least:
            raise ValueError(f"{key} {value!r}, expected a whole number >= {least}")
    for key in ("tokenizer", "sha256"):
        if not isinstance(getattr(header, key), str):
            raise ValueError(f"{key} {getattr(header, key)!r}, expected text")
    if header.document_end >= header.vocab_size:
        raise ValueError(
            f"document_end {header.document_end}, expected less than vocab_size {header.vocab_size}"
        )
