"""Documents for pretraining: plain text, JSON lines and Parquet, compressed or in an archive."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO, Any

from ratoon.data.parquet import parquet_batches
from ratoon.errors import DataError

# Modules that unpack, each with an `open` of its own.
_UNPACK: dict[str, Any] = {".xz": lzma, ".gz": gzip, ".bz2": bz2}
_JSONL = (".jsonl", ".ndjson")


def documents(paths: Sequence[Path], column: str = "text") -> Iterator[str]:
    """The documents of files and folders, in the order given; a folder's files by name.

    A text file is one document; each line of a JSONL file and each row of a Parquet file is one,
    its text in `column`. `.xz`, `.gz` and `.bz2` are unpacked; of a `.tar` (perhaps compressed)
    each file counts like one beside it. Empty documents are left out.

    Raises:
        DataError: a file is missing, damaged, not UTF-8, or lacks the column.
        CapabilityError: a Parquet file, and pyarrow is not installed.
    """
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file())
            if not found:
                raise DataError(f"{path}: holds no files; give files or folders of text")
            files = found
        else:
            files = [path]
        for file in files:
            for text in _of_file(file, column):
                if text.strip():
                    yield text


def _of_file(path: Path, column: str) -> Iterator[str]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    try:
        if suffixes[-1:] == [".parquet"]:
            yield from _of_parquet(path, column)
        elif ".tar" in suffixes[-2:] or suffixes[-1:] == [".tgz"]:
            yield from _of_archive(path, column)
        elif suffixes and suffixes[-1] in _UNPACK:
            with _UNPACK[suffixes[-1]].open(path, "rb") as file:
                yield from _of_stream(file, str(path), PurePath(path.stem), column)
        else:
            with path.open("rb") as file:
                yield from _of_stream(file, str(path), path, column)
    except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(f"{path}: cannot be read ({reason}); give a whole, readable file") from None


def _of_archive(path: Path, column: str) -> Iterator[str]:
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield from _of_stream(file, f"{path}/{member.name}", PurePath(member.name), column)


def _of_stream(file: IO[bytes], where: str, name: PurePath, column: str) -> Iterator[str]:
    if name.suffix.lower() not in _JSONL:
        yield _decoded(file.read(), where)
        return
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{where}, line {number}"
            yield _text_of(_decoded(line, place), place, column)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: is not UTF-8 text (byte {data[error.start]:#04x} at {error.start}: "
            f"{error.reason}); convert it first, for example with iconv"
        ) from None


def _text_of(line: str, where: str, column: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON: {error.msg}. Expected one JSON object a line."
        ) from None
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        found = ", ".join(map(repr, row)) if isinstance(row, dict) else repr(row)[:60]
        raise DataError(
            f"{where}: has no text in column {column!r}; found: {found}. Name the column that "
            "holds the text with --column."
        )
    return str(row[column])


def _of_parquet(path: Path, column: str) -> Iterator[str]:
    for batch in parquet_batches(path, [column]):
        for row in batch:
            value = row[column]
            if not isinstance(value, str):
                raise DataError(f"{path}: column {column!r} holds {value!r}, expected text.")
            yield value
