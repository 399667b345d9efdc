"""Rows of a data set, wherever they lie: JSON lines, JSON, CSV, Parquet, the Hugging Face hub."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratoon.data.columns import Row
from ratoon.data.jsonl import read_lines_of
from ratoon.data.parquet import parquet_batches
from ratoon.errors import CapabilityError, DataError


@dataclass(frozen=True, slots=True)
class Rows:
    """A data set's short name, its rows with their index, and what errors call a row."""

    name: str
    rows: Iterator[tuple[int, Row]]
    where: Callable[[int], str]


def open_rows(kind: str, arguments: Mapping[str, Any]) -> Rows:
    """The rows that a configuration section of this kind describes, at most `limit` of them.

    A row's index is its place in the file and does not depend on what was read before.

    Raises (some when the first row is taken):
        DataError: a file is missing, damaged, or holds no row.
        CapabilityError: a package that the kind needs is missing.
    """
    if kind == "hub":
        source, name = str(arguments["name"]), str(arguments["name"]).rpartition("/")[2]
        found = _hub_rows(arguments)
    else:
        path = Path(arguments["path"])
        source, name = str(path), path.stem
        found = FILE_KINDS[kind](path)
    lines = " (line {})" if kind == "jsonl" else ""
    return Rows(
        name,
        _limited(found, arguments.get("limit"), source),
        lambda index: f"{source}, row {index}{lines.format(index + 1)}",
    )


def _limited(
    found: Iterator[tuple[int, Row]], limit: int | None, source: str
) -> Iterator[tuple[int, Row]]:
    rows = itertools.islice(found, limit)
    try:
        yield next(rows)
    except StopIteration:
        raise DataError(f"{source}: holds no rows.") from None
    yield from rows


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        values = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}: not valid JSON: {error.msg} in line {error.lineno}. For one JSON object a "
            "line say kind: jsonl."
        ) from None
    if not isinstance(values, list):
        raise DataError(f"{path}: holds a {type(values).__name__}, expected a list of objects.")
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(
                f"{path}, row {index}: holds a {type(value).__name__}, expected an object such as "
                '{"prompt": ..., "answer": ...}.'
            )
        yield index, value


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The first line names the columns; all values are text."""
    reader = csv.DictReader(io.StringIO(_read(path), newline=""), strict=True)
    try:
        for index, row in enumerate(reader):
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, row {index}: has not as many values as the first line has names "
                    f"({', '.join(reader.fieldnames or ())})."
                )
            yield index, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}.") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    rows = (row for batch in parquet_batches(path) for row in batch)
    return enumerate(rows)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: is not UTF-8 text (byte {error.object[error.start]:#04x}); "
            "save the file as UTF-8."
        ) from None


def _hub_rows(arguments: Mapping[str, Any]) -> Iterator[tuple[int, Row]]:
    try:
        import datasets
    except ImportError:
        raise CapabilityError(
            f"Data set {arguments['name']!r}: reading from the hub needs the package datasets, "
            'which is not installed: pip install "ratoon[hub]".'
        ) from None
    try:
        found = datasets.load_dataset(
            arguments["name"],
            arguments["subset"],
            split=arguments["split"],
            revision=arguments["revision"],
        )
    except Exception as error:
        # What it raises has no common base: no network, no such set, subset or split.
        raise DataError(
            f"Data set {arguments['name']!r}, subset {arguments['subset']!r}, split "
            f"{arguments['split']!r}: cannot be loaded ({type(error).__name__}: {error})."
        ) from error
    return enumerate(found)


FILE_KINDS: Mapping[str, Callable[[Path], Iterator[tuple[int, Row]]]] = {
    "jsonl": read_lines_of,
    "json": _json_rows,
    "csv": _csv_rows,
    "parquet": _parquet_rows,
}
KINDS = (*FILE_KINDS, "hub")
