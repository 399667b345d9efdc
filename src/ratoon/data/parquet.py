"""Parquet files, by pyarrow (extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratoon.errors import CapabilityError, DataError

_ROWS_AT_ONCE = 256


def parquet_batches(path: Path, columns: list[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file, some at a time, with these columns or all.

    Raises:
        DataError: the file is missing, damaged, or lacks a column.
        CapabilityError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CapabilityError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; run "
            "`pip install 'ratoon[parquet]'`, or give JSON lines"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names: list[str] = file.schema_arrow.names
        for column in columns or ():
            if column not in names:
                raise DataError(
                    f"{path}: has no column {column!r}; found: {', '.join(map(repr, names))}. Name "
                    "the column that holds the text with --column."
                )
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
            yield batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: is damaged or no Parquet file ({error}).") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be read ({reason}); give a whole, readable file") from None
