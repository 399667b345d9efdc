"""One step's stored responses, selected again: is each token what its key and the policy give?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ratoon.config.rl import RLConfig
from ratoon.loop.evaluation import evaluation_params
from ratoon.loop.stored_weights import version_of
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.completions import Split, StoredCompletion, key_of
from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.teacher_forcing import Known, Reselected, reselect
from ratoon.sampling.stop_strings import StopWatch

# Two computations of one log-probability lie twice as far apart as each from the exact one, and a
# few of many tokens further than those that were measured.
_TIMES_MEASURED = 4


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far log-probabilities may differ where bits need not agree, in nats.

    `measured` is the largest difference, over `tokens`, between the run's format and one of twice
    its width; a log-probability may differ by four times as much. A token may be another than the
    selected one if it loses by no more than two such differences.
    """

    measured: float
    tokens: int

    @property
    def logprob(self) -> float:
        """The largest difference of a log-probability that is put down to rounding."""
        return _TIMES_MEASURED * self.measured

    @property
    def gap(self) -> float:
        """The largest loss against the selected token that is put down to rounding."""
        return 2 * self.logprob


class Broken(NamedTuple):
    """The first thing wrong with a response; `position` counts its tokens from 0."""

    position: int | None
    what: str
    expected: float | str
    stored: float | str


class Wrong(NamedTuple):
    """A response that is wrong, by its line (from 1) in the file of its step."""

    line: int
    broken: Broken


@dataclass(slots=True)
class StepCheck:
    """What was found of one step's responses; `uniforms` are of those with fresh keys."""

    split: Split
    step: int
    responses: int = 0
    tokens: int = 0
    equal_bits: int = 0
    flips: int = 0
    largest_gap: float = 0.0
    largest_difference: float = 0.0
    wrong: list[Wrong] = field(default_factory=list)
    uniforms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a run says of the responses of one step, beside what each stores."""

    config: RLConfig
    split: Split
    step: int
    tokenizer: Tokenizer

    @property
    def params(self) -> SamplingParams:
        """The distribution that was drawn from."""
        if self.split == "eval":
            return evaluation_params(self.config)
        return SamplingParams(temperature=self.config.sampling.temperature)

    @property
    def least_responses(self) -> int:
        """How many responses there are at least; evaluations may have had fewer prompts."""
        algorithm = self.config.algorithm
        if self.split == "eval":
            return self.config.evaluation.samples
        return algorithm.prompts_per_step * algorithm.group_size

    def reselect(
        self, model: InferenceModel, rows: Sequence[StoredCompletion], params: SamplingParams
    ) -> Iterator[tuple[int, Reselected]]:
        """Select the tokens of the rows again; see `teacher_forcing.reselect`."""
        ends = self.tokenizer.eos_ids
        known = [Known(key_of(row), row.prompt_ids, row.token_ids, ends) for row in rows]
        return reselect(model, known, params, self.tokenizer.vocab_size)

    def broken(self, row: StoredCompletion) -> Broken | None:
        """What is wrong with a response for which no forward pass is needed."""
        train = self.split == "train"
        stream = (Stream.TRAIN if train else Stream.EVAL).name.lower()
        version = version_of(self.split, self.step)
        for what, expected, stored in (
            ("seed of the key", self.config.seed, row.seed),
            ("stream of the key", stream, row.stream),
            ("round of the key", self.step if train else 0, row.round),
            ("policy version", version, row.policy_version),
            ("number of log-probabilities", len(row.token_ids), len(row.logprobs)),
        ):
            if stored != expected:
                return Broken(None, what, expected, stored)
        return self._broken_text(row)

    def _broken_text(self, row: StoredCompletion) -> Broken | None:
        ids_below = self.tokenizer.vocab_size
        limit, longest = self.config.sampling.max_tokens, self.config.rollout.max_length
        length = len(row.token_ids)
        if not row.prompt_ids or not length or len(row.prompt_ids) + length > longest:
            return Broken(None, "tokens", f"1 to {longest} with the prompt", length)
        for position, token in enumerate(row.token_ids):
            if not 0 <= token < ids_below:
                return Broken(position, "token", f"below {ids_below}", token)
        if any(not 0 <= token < ids_below for token in row.prompt_ids):
            return Broken(None, "prompt", f"below {ids_below}", max(row.prompt_ids))
        end = self._end_of(row.token_ids)
        if end is not None and end < length:
            return Broken(end, "token", "nothing behind an end", row.token_ids[end])
        finish = "length" if end is None else "stop"
        if row.finish != finish:
            return Broken(length - 1, "reason to end", finish, row.finish)
        if length > limit or (end is None and length < limit):
            return Broken(length - 1, "length of the response", limit, length)
        return None

    def _end_of(self, token_ids: Sequence[int]) -> int | None:
        """How many of the tokens end the response; None if nothing in them does."""
        eos_ids, strings = self.tokenizer.eos_ids, self.config.sampling.stop_strings
        ends = [place for place, token in enumerate(token_ids, start=1) if token in eos_ids]
        if strings:
            watch = StopWatch(strings, self.tokenizer.decode, self.params.min_new_tokens)
            found = watch.first_end(token_ids)
            ends += [found[0]] if found is not None else []
        return min(ends, default=None)


def check_step(
    claim: Claim,
    rows: Sequence[StoredCompletion],
    model: InferenceModel,
    tolerance: Tolerance | None,
    seen: set[DrawKey],
) -> StepCheck:
    """Select every token of the rows again.

    `tolerance` is None where log-probabilities must have the same bits. `seen` are keys whose
    uniforms are known from another step, as those of held-out prompts are; new ones are added.
    """
    check = StepCheck(claim.split, claim.step, len(rows))
    keys: set[DrawKey] = set()
    sound: list[int] = []
    for index, row in enumerate(rows):
        broken = claim.broken(row)
        if broken is None and key_of(row) in keys:
            broken = Broken(None, "key", "another than those of the lines before", "one of them")
        if broken is None:
            keys.add(key_of(row))
            sound.append(index)
        else:
            check.wrong.append(Wrong(index + 1, broken))
    chosen = [rows[index] for index in sound]
    for place, found in claim.reselect(model, chosen, claim.params):
        row = chosen[place]
        broken = _compare(row, found, check, tolerance)
        if broken is not None:
            check.wrong.append(Wrong(sound[place] + 1, broken))
        if key_of(row) not in seen:
            seen.add(key_of(row))
            check.uniforms.extend(found.uniforms)
    check.wrong.sort(key=lambda wrong: wrong.line)
    return check


def _compare(
    row: StoredCompletion, found: Reselected, check: StepCheck, tolerance: Tolerance | None
) -> Broken | None:
    """Count what agrees; returns the first thing that is wrong."""
    first = None
    check.tokens += len(row.token_ids)
    for position, (stored, token, gap) in enumerate(
        zip(row.token_ids, found.token_ids, found.gaps, strict=True)
    ):
        if stored != token:
            check.flips += 1
            check.largest_gap = _larger(check.largest_gap, gap)
            if first is None and (tolerance is None or gap > tolerance.gap):
                first = Broken(position, "token", token, stored)
        given, logprob = row.logprobs[position], found.logprobs[position]
        check.equal_bits += given == logprob
        difference = abs(given - logprob)
        check.largest_difference = _larger(check.largest_difference, difference)
        allowed = 0.0 if tolerance is None else tolerance.logprob
        if first is None and not difference <= allowed:
            first = Broken(position, "log-probability", logprob, given)
    return first


def _larger(largest: float, value: float) -> float:
    """The larger one. A token that p excludes is infinitely far off, and wrong whatever is said."""
    return max(largest, value) if math.isfinite(value) else largest


def measure_tolerance(
    claim: Claim, rows: Sequence[StoredCompletion], model: InferenceModel, wide: InferenceModel
) -> Tolerance:
    """Log-probabilities of some responses in the run's format against a format twice as wide."""
    sound = [row for row in rows if claim.broken(row) is None]
    params = claim.params
    if params.temperature == 0.0:
        # There log-probabilities are 0; how far logits differ shows in those at temperature 1.
        params = replace(params, temperature=1.0)
    narrow, exact = (dict(claim.reselect(each, sound, params)) for each in (model, wide))
    pairs = [
        abs(a - b)
        for index in narrow
        for a, b in zip(narrow[index].logprobs, exact[index].logprobs, strict=True)
    ]
    return Tolerance(max(pairs, default=0.0), len(pairs))
