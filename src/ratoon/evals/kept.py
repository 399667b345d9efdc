"""Responses on disk as they finish."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ratoon.observe.files import read_lines, to_json, write_lines
from ratoon.records import Completion, DrawKey, Request


class KeptResponses:
    """Responses on disk as they finish, so that none is drawn twice.

    Attributes:
        found: all that are there, by their keys.
        missing: groups, or the rest of them, that were not there at the start.
    """

    def __init__(self, path: Path, groups: Sequence[tuple[Request, ...]]) -> None:
        requests = {(r.key.row, r.key.sample): r for group in groups for r in group}
        lines = list(read_lines(path, "row", "sample", "token_ids")) if path.is_file() else []
        # Without what was cut at the end.
        write_lines(path, lines)
        self.found: dict[DrawKey, Completion] = {}
        for line in lines:
            request = requests[line["row"], line["sample"]]
            self.found[request.key] = Completion(
                request.key,
                request.prompt_ids,
                tuple(line["token_ids"]),
                tuple(line["logprobs"]),
                line["finish"],
                line["policy_version"],
            )
        left = [tuple(r for r in group if r.key not in self.found) for group in groups]
        self.missing = [group for group in left if group]
        self._file = path.open("a", encoding="utf-8")

    def add(self, completion: Completion) -> None:
        """Keep one more."""
        self.found[completion.key] = completion
        line = {
            "row": completion.key.row,
            "sample": completion.key.sample,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs,
            "finish": completion.finish,
            "policy_version": completion.policy_version,
        }
        self._file.write(to_json(line) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
