"""What the drafter trains on: finished responses with the target's states, bounded in tokens.

The buffer holds this step's finished responses and the long ones of the step before (those that
finish first are short; without last step's long ones the drafter would forget the tail). A sample
comes from exactly one policy version, and so does every draw: the teacher's head rows that fit a
sample's hidden states are kept per version for as long as a sample of that version lives.

Shape letters: n tokens of a sample, D target width, Vd draft vocabulary.
Source: TLT (arXiv 2511.16665), one-step-offset sampling; the coverage rule is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from ratoon.errors import ConfigError, DataError, StaleVersionError

# A draw with less room than this is full.
SMALLEST_SLICE = 16

# Queries of a sample, and its uid: an order without ties within a step.
_Length = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One finished response and the target's states of its tokens.

    `ids [n]` int64 is prompt and response; `features [n-1, 3D]` are the tapped states and
    `hidden [n-1, D]` the final-norm states of all tokens but the last, which never passes through
    the target. `uid` orders samples that are otherwise equal; it is unique within a step.
    """

    uid: tuple[int, ...]
    ids: Tensor
    features: Tensor
    hidden: Tensor
    prompt_len: int
    policy_version: int

    @property
    def first_query(self) -> int:
        """The pair that predicts the first response token (pair t predicts token t+2)."""
        return max(self.prompt_len - 2, 0)

    @property
    def num_queries(self) -> int:
        """Pairs that predict a response token."""
        return len(self.ids) - 2 - self.first_query

    @property
    def num_tokens(self) -> int:
        """Rows of features held."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """Pairs `first` to `first + count - 1` of a sample, to be trained on.

    `phase` counts the passes through the sample before this one: what is done for a share of the
    pairs only can take turns.
    """

    sample: Sample
    first: int
    count: int
    phase: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """A live sample: how often it was drawn whole, and how many queries of it since."""

    sample: Sample
    passes: int = 0
    drawn: int = 0

    def take(self, longest: int, room: int) -> Slice:
        """Draw the next slice of at most `room` queries; what is left is cut into equal slices."""
        left = self.sample.num_queries - self.drawn
        count = min(room, -(-left // -(-left // longest)))
        piece = Slice(self.sample, self.sample.first_query + self.drawn, count, self.passes)
        self.drawn += count
        if count == left:
            self.passes += 1
            self.drawn = 0
        return piece


@dataclass(slots=True)
class _Version:
    """A policy version's head rows and samples; `dropped` is the longest that had no room."""

    head_rows: Tensor
    entries: list[_Entry] = field(default_factory=list)
    dropped: _Length | None = None

    @property
    def tokens(self) -> int:
        return sum(entry.sample.num_tokens for entry in self.entries)


class DataBuffer:
    """Bounded store of samples with a deterministic, length-stratified draw.

    Draws go through the samples in passes, each pass in an order of its own that depends on `seed`
    and the samples' uids, not on their order of arrival. Draws begin in turn with a sample of each
    of `num_strata` groups of about equal token counts, from short to long responses, and are filled
    up; the last sample of a draw is cut to fit and goes on in a later one. A sample that arrives
    during a pass joins that pass.
    """

    def __init__(
        self, max_tokens: int, *, seed: int, long_share: float = 0.5, num_strata: int = 4
    ) -> None:
        if max_tokens < 1 or num_strata < 1 or not 0 <= long_share < 1:
            raise ConfigError(
                f"Drafter data buffer: max_tokens = {max_tokens} and num_strata = {num_strata} "
                f"must be at least 1, long_share = {long_share} in [0, 1)."
            )
        self.max_tokens = max_tokens
        self.long_share = long_share
        self.num_strata = num_strata
        self.seed = seed
        self._versions: dict[int, _Version] = {}
        self._current: int | None = None
        self._strata: list[list[_Entry]] | None = None

    def __len__(self) -> int:
        """Number of live samples."""
        return sum(len(version.entries) for version in self._versions.values())

    @property
    def tokens(self) -> int:
        """Rows of features held; never above `max_tokens`."""
        return sum(version.tokens for version in self._versions.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """Policy versions with live samples, and the current one, oldest first."""
        return tuple(self._versions)

    def head_rows(self, version: int) -> Tensor:
        """The target's head rows of the draft vocabulary `[Vd, D]` at `version`."""
        return self._versions[version].head_rows

    def samples(self) -> Iterator[Sample]:
        """All live samples, oldest version first."""
        return (entry.sample for entry in self._entries())

    def begin_step(self, policy_version: int, head_rows: Tensor) -> None:
        """Start a step: keep the long samples of the last one, forget everything older.

        Long means at least the median response length; the longest are kept first, up to
        `long_share` of the buffer. `head_rows [Vd, D]` is detached, not copied.

        Raises: StaleVersionError unless versions rise.
        """
        previous = self._current
        if previous is not None and policy_version <= previous:
            raise StaleVersionError(
                f"The drafter's buffer is at policy version {previous} and was asked to begin "
                f"version {policy_version}; versions must rise."
            )
        kept = {} if previous is None else {previous: self._long_part(self._versions[previous])}
        self._versions = {number: part for number, part in kept.items() if part.entries}
        self._versions[policy_version] = _Version(head_rows.detach())
        self._current = policy_version
        self._strata = None

    def add(self, sample: Sample) -> bool:
        """Store a finished response of the current step; return False if it teaches nothing.

        A sample that predicts no token (a response of zero tokens, or fewer than three tokens in
        all) is not stored. If the buffer is full, the shortest samples go, last step's first. What
        is kept in the end does not depend on the order of arrival.

        Raises: StaleVersionError for another policy version; DataError for tensors that do not fit
        together or a sample above the buffer's bound.
        """
        if self._current is None or sample.policy_version != self._current:
            raise StaleVersionError(
                f"A sample of policy version {sample.policy_version} was added to the drafter's "
                f"buffer at version {self._current}; add samples to the step that made them."
            )
        _check_sample(sample, self.max_tokens)
        if sample.num_queries < 1 or sample.prompt_len >= len(sample.ids):
            return False
        version, entry = self._versions[self._current], _Entry(sample, self._lowest_pass())
        if version.dropped is not None and _length(entry) < version.dropped:
            return False
        version.entries.append(entry)
        while self.tokens > self.max_tokens:
            self._evict()
        self._strata = None
        return True

    def draw(self, max_rows: int, max_keys: int, window: int, *, unroll: int = 1) -> list[Slice]:
        """Slices of one policy version that fill a micro-batch of `max_rows` teacher rows.

        A slice takes one row per query and `unroll - 1` more. Its keys are its queries and up to
        `window - 1` pairs of context before them; slices are added until their keys reach
        `max_keys`. No sample occurs twice. Empty if the buffer is.

        Cost: a few passes over the live samples in Python.
        """
        extra = unroll - 1
        longest = max(max_rows - extra, 1)
        slices: list[Slice] = []
        room, keys = longest, 0
        entry = self._first_entry()
        while entry is not None:
            piece = entry.take(longest, room)
            slices.append(piece)
            room -= piece.count + extra
            keys += piece.count + min(window - 1, piece.first)
            is_full = room < min(SMALLEST_SLICE, longest) or keys >= max_keys
            entry = None if is_full else self._next_entry(slices)
        return slices

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a resumed run needs to draw the same slices: tensors, and JSON values.

        The tensors are the buffer's own, which never change; between two steps, equal contents give
        equal states, in whatever order they arrived.
        """
        tensors: dict[str, Tensor] = {}
        versions = []
        for number, version in self._versions.items():
            tensors[f"{number}.head_rows"] = version.head_rows
            entries = []
            for index, entry in enumerate(sorted(version.entries, key=_length)):
                sample, prefix = entry.sample, f"{number}.{index}"
                tensors[f"{prefix}.ids"] = sample.ids
                tensors[f"{prefix}.features"] = sample.features
                tensors[f"{prefix}.hidden"] = sample.hidden
                entries.append([list(sample.uid), sample.prompt_len, entry.passes, entry.drawn])
            versions.append({"version": number, "entries": entries})
        return tensors, {"versions": versions, "seed": self.seed}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state from `state`; bounds stay those of this buffer."""
        self._versions, self._current = {}, None
        for item in values["versions"]:
            number = item["version"]
            version = _Version(tensors[f"{number}.head_rows"])
            for index, (uid, prompt_len, passes, drawn) in enumerate(item["entries"]):
                ids, features, hidden = (
                    tensors[f"{number}.{index}.{name}"] for name in ("ids", "features", "hidden")
                )
                sample = Sample(tuple(uid), ids, features, hidden, prompt_len, number)
                version.entries.append(_Entry(sample, passes, drawn))
            self._versions[number] = version
            self._current = number
        self.seed = values["seed"]
        self._strata = None

    def _long_part(self, version: _Version) -> _Version:
        """The long samples of a step, coverage forgotten."""
        by_length = sorted(version.entries, key=_length, reverse=True)
        if not by_length:
            return version
        threshold = median(entry.sample.num_queries for entry in by_length)
        kept, tokens = [], 0
        for entry in by_length:
            tokens += entry.sample.num_tokens
            if entry.sample.num_queries < threshold or tokens > self.long_share * self.max_tokens:
                break
            kept.append(_Entry(entry.sample))
        return _Version(version.head_rows, kept)

    def _evict(self) -> None:
        """Drop one sample: the shortest of the last step, else of this one."""
        oldest = next(iter(self._versions))
        version = self._versions[oldest]
        shortest = min(version.entries, key=_length)
        version.entries.remove(shortest)
        version.dropped = _length(shortest)
        if not version.entries and oldest != self._current:
            del self._versions[oldest]

    def _first_entry(self) -> _Entry | None:
        """Who is drawn from next: the current pass of the stratum least covered in it."""
        if self._strata is None:
            self._strata = _stratify(self._entries(), self.num_strata)
        lowest = self._lowest_pass()
        for stratum in sorted(self._strata, key=_coverage):
            able = [entry for entry in stratum if entry.passes == lowest]
            if able:
                return min(able, key=self._place)
        return None

    def _next_entry(self, slices: list[Slice]) -> _Entry | None:
        """Who fills the draw up: the current pass, or else one pass ahead; never further."""
        lowest = self._lowest_pass()
        used = {id(piece.sample) for piece in slices}
        able = [
            entry
            for entry in self._versions[slices[0].sample.policy_version].entries
            if entry.passes <= lowest + 1 and id(entry.sample) not in used
        ]
        return min(able, key=lambda entry: (entry.passes, self._place(entry)), default=None)

    def _entries(self) -> Iterator[_Entry]:
        return (entry for version in self._versions.values() for entry in version.entries)

    def _lowest_pass(self) -> int:
        return min((entry.passes for entry in self._entries()), default=0)

    def _place(self, entry: _Entry) -> int:
        """Place in the order of a pass, another one in each pass."""
        sample = entry.sample
        return hash((self.seed, entry.passes, sample.policy_version, *sample.uid))


def _coverage(stratum: list[_Entry]) -> float:
    """How often a sample of the stratum was drawn, on average."""
    return sum(entry.passes + (entry.drawn > 0) / 2 for entry in stratum) / max(1, len(stratum))


def _length(entry: _Entry) -> _Length:
    return entry.sample.num_queries, entry.sample.uid


def _stratify(entries: Iterable[_Entry], num_strata: int) -> list[list[_Entry]]:
    """Groups of about equal numbers of queries, from short to long responses."""
    ordered = sorted(entries, key=lambda e: (*_length(e), e.sample.policy_version))
    total = sum(entry.sample.num_queries for entry in ordered)
    strata: list[list[_Entry]] = [[] for _ in range(num_strata)]
    before = 0.0
    for entry in ordered:
        middle = before + entry.sample.num_queries / 2
        strata[int(middle * num_strata / total)].append(entry)
        before += entry.sample.num_queries
    return strata


def _check_sample(sample: Sample, max_tokens: int) -> None:
    rows = len(sample.ids) - 1
    if len(sample.features) != rows or len(sample.hidden) != rows:
        raise DataError(
            f"Sample {sample.uid}: {len(sample.ids)} tokens need {rows} rows of features and "
            f"hidden states (the last token has none); got {len(sample.features)} and "
            f"{len(sample.hidden)}."
        )
    if rows > max_tokens:
        raise DataError(
            f"Sample {sample.uid} has {rows} tokens; the drafter's buffer holds {max_tokens}. "
            "Raise its max_tokens above the longest prompt and response."
        )
