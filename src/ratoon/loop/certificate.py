"""`certificate.json`: that a run's stored responses are what its keys and weights give.

Every token is selected again under its key with the stored weights of the policy that drew it, one
forward pass a response; and the uniformity of the tokens' integral transforms is tested, which
knows nothing of keys.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ratoon.config import RLConfig, load_config
from ratoon.errors import CheckpointError, DataError
from ratoon.loop.reselection import (
    Claim,
    StepCheck,
    Tolerance,
    Wrong,
    check_step,
    measure_tolerance,
)
from ratoon.loop.setup import load_tokenizer
from ratoon.loop.stored_weights import (
    StoredWeights,
    served_checksum,
    stored_weights,
    version_of,
)
from ratoon.models.compute_dtype import DTYPES, with_dtype
from ratoon.models.decoder import Decoder
from ratoon.observe.completions import Split, completions_path, read_completions, stored_steps
from ratoon.observe.files import to_json, write_atomically
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import kernels, versions
from ratoon.observe.rollouts import RolloutRecord, read_rollouts
from ratoon.observe.run_folder import RunFolder
from ratoon.records import DrawKey
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance
from ratoon.sampling.uniformity import kolmogorov_smirnov

# Below this p-value tokens are not taken for samples of p: one honest run in 100,000.
SIGNIFICANCE = 1e-5

# Responses whose log-probabilities are computed in two formats to measure the rounding.
_MEASURED = 32

Work = tuple[Split, int]


@dataclass(frozen=True, slots=True)
class Checked:
    """One step's check, with the weights it was made with and whether bits had to agree."""

    check: StepCheck
    weights: StoredWeights
    checksum: str
    tolerance: Tolerance | None


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was checked, and what was found; the weights of `unchecked` steps are not stored."""

    checked: tuple[Checked, ...]
    unchecked: tuple[Work, ...]
    dtype: str

    @property
    def uniforms(self) -> list[float]:
        """Integral transforms of all tokens; a key that was used twice counts once."""
        return [value for item in self.checked for value in item.check.uniforms]

    @property
    def uniformity(self) -> tuple[float, float]:
        """Kolmogorov-Smirnov statistic and p-value."""
        return kolmogorov_smirnov(self.uniforms) if self.uniforms else (0.0, 1.0)

    @property
    def first_wrong(self) -> tuple[StepCheck, Wrong] | None:
        """The first response that is wrong, in the order in which they were drawn."""
        return next(((c.check, c.check.wrong[0]) for c in self.checked if c.check.wrong), None)

    @property
    def holds(self) -> bool:
        """Whether everything that was checked is as it was claimed to be."""
        return self.first_wrong is None and self.uniformity[1] >= SIGNIFICANCE

    def total(self, name: str) -> int:
        """A count of `StepCheck`, summed over all steps."""
        return sum(getattr(item.check, name) for item in self.checked)


def verify_run(
    folder: RunFolder, observer: Observer, *, step: int | None = None, limit: int | None = None
) -> Certificate:
    """Check what a run stores: all responses, or those of one step; at most `limit` of each file.

    Raises:
        DataError: there are no responses, or they are damaged.
        CheckpointError: nothing can be checked, because no weights of the steps are stored.
    """
    work = _work(folder, step)
    config = with_dtype(load_config(RLConfig, folder.config, may_miss=None))
    # As each worker had: sums of some kernels depend on it.
    torch.set_num_threads(config.workers.threads)
    weights = stored_weights(folder, config)
    possible = [item for item in work if version_of(*item) in weights]
    unchecked = tuple(item for item in work if item not in possible)
    if not possible:
        raise CheckpointError(
            f"nothing in {folder.path} can be checked: {'; '.join(told(unchecked))}. Weights are "
            "kept in model/ after the last step, before the first in the model to start from, "
            f"{config.model.path}, and between in checkpoints/ (`checkpoint.every`, "
            "`checkpoint.keep`), which are read into that model"
        )
    checker = _Checker(folder, config, observer, limit)
    observer.phase("verifying", len(possible))
    checked = tuple(checker.check(possible, weights))
    return Certificate(checked, unchecked, config.model.dtype)


def _work(folder: RunFolder, step: int | None) -> list[Work]:
    if not folder.config.is_file():
        raise DataError(f"{folder.path} holds no run: there is no {folder.config.name}")
    stored = stored_steps(folder.completions)
    if not stored:
        raise DataError(f"{folder.completions} holds no responses; give the folder of an `rl` run")
    work = [item for item in stored if step is None or item[1] == step]
    if not work:
        steps = sorted({number for _, number in stored})
        raise DataError(
            f"--step {step}: no responses of it are stored; there are those of steps {steps[0]} to "
            f"{steps[-1]}"
        )
    return work


def told(unchecked: Sequence[Work]) -> Iterator[str]:
    """Which steps cannot be checked and why, neighbouring ones together."""
    spans: list[tuple[Split, int, int]] = []
    for split, step in sorted(unchecked):
        if spans and spans[-1][0] == split and spans[-1][2] == step - 1:
            spans[-1] = (split, spans[-1][1], step)
        else:
            spans.append((split, step, step))
    for split, first, last in spans:
        if first == last:
            why = f"the weights after step {version_of(split, first)} are not stored"
            yield f"{split} {first}: {why}"
        else:
            low, high = version_of(split, first), version_of(split, last)
            why = f"the weights after steps {low} to {high} are not stored"
            yield f"{split} {first} to {last}: {why}"


class _Checker:
    """Checks steps one after the other, keeping the model of the last version."""

    def __init__(
        self, folder: RunFolder, config: RLConfig, observer: Observer, limit: int | None
    ) -> None:
        start = config.model.path
        self._tokenizer = load_tokenizer(start if start.is_dir() else folder.model)
        self._folder, self._config, self._observer, self._limit = folder, config, observer, limit
        records = read_rollouts(folder.rollouts)
        self._records = {(record.split, record.step): record for record in records}
        self._seen: set[DrawKey] = set()
        self._tolerance: Tolerance | None = None

    def check(self, work: Sequence[Work], weights: dict[int, StoredWeights]) -> Iterator[Checked]:
        """Check the steps, weights by weights, in the order of the rollouts."""
        decoder, version, checksum, holds = None, None, "", None
        for done, (split, step) in enumerate(
            sorted(work, key=lambda item: (version_of(*item), item[0] == "train")), start=1
        ):
            source = weights[version_of(split, step)]
            if decoder is None or version != source.version:
                decoder, version = source.load(self._config, self._tokenizer), source.version
                checksum = served_checksum(decoder, self._config.model.dtype)
                model = self._model(decoder, DTYPES[self._config.model.dtype])
                # Kernels go by shapes; a run proves them once, too.
                holds = check_invariance(model).holds if holds is None else holds
            exact = bool(holds) and _proved_here(self._records.get((split, step)))
            found = self._check_step(split, step, decoder, model, exact=exact)
            self._observer.metrics(done, {})
            yield Checked(found, source, checksum, None if exact else self._tolerance)

    def _check_step(
        self, split: Split, step: int, decoder: Decoder, model: InferenceModel, *, exact: bool
    ) -> StepCheck:
        claim = Claim(self._config, split, step, self._tokenizer)
        rows = read_completions(self._folder.completions, split, step)
        if len(rows) < claim.least_responses:
            raise DataError(
                f"{completions_path(self._folder.completions, split, step)} holds {len(rows)} "
                f"responses, but the run drew at least {claim.least_responses}: the file was cut"
            )
        rows = rows[: self._limit]
        if not exact and self._tolerance is None:
            wide = self._wide(decoder)
            every = max(1, len(rows) // _MEASURED)
            self._tolerance = measure_tolerance(claim, rows[::every], model, wide)
        return check_step(claim, rows, model, None if exact else self._tolerance, self._seen)

    def _model(self, decoder: Decoder, dtype: torch.dtype) -> InferenceModel:
        return InferenceModel(decoder, num_positions=self._config.rollout.max_length, dtype=dtype)

    def _wide(self, decoder: Decoder) -> InferenceModel:
        """The same weights, computed with twice as many bits."""
        dtype = DTYPES[self._config.model.dtype]
        rounded = copy.deepcopy(decoder).to(dtype)
        return self._model(rounded, torch.float64 if dtype == torch.float32 else torch.float32)


def _proved_here(record: RolloutRecord | None) -> bool:
    """Whether the rollout had invariant numerics, with the kernels of this machine."""
    return record is not None and record.numerics == "invariant" and record.kernels == kernels()


def write_certificate(folder: RunFolder, certificate: Certificate) -> Path:
    """Write `certificate.json` into the run's folder; replaces that of an earlier check."""
    values = as_json(folder, certificate)
    write_atomically(folder.certificate, to_json(values, indent=2) + "\n")
    return folder.certificate


def as_json(folder: RunFolder, certificate: Certificate) -> dict[str, Any]:
    """What `certificate.json` holds; see docs/verify.md."""
    statistic, p_value = certificate.uniformity
    first = certificate.first_wrong
    return {
        "verdict": "verified" if certificate.holds else "not verified",
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "responses": certificate.total("responses"),
        "tokens": certificate.total("tokens"),
        "flips": certificate.total("flips"),
        "equal_bits": certificate.total("equal_bits"),
        "first_wrong": None
        if first is None
        else {
            "file": _file(folder, first[0]),
            "line": first[1].line,
            **first[1].broken._asdict(),
        },
        "uniformity": {
            "ks_statistic": statistic,
            "p_value": p_value,
            "tokens": len(certificate.uniforms),
            "significance": SIGNIFICANCE,
        },
        "dtype": certificate.dtype,
        "kernels": kernels(),
        "versions": versions(),
        "checked": [_checked_json(folder, item) for item in certificate.checked],
        "unchecked": [
            {"split": split, "step": step, "missing_weights_after_step": version_of(split, step)}
            for split, step in certificate.unchecked
        ],
    }


def _file(folder: RunFolder, check: StepCheck) -> str:
    path = completions_path(folder.completions, check.split, check.step)
    return str(path.relative_to(folder.path))


def _checked_json(folder: RunFolder, item: Checked) -> dict[str, Any]:
    check, tolerance = item.check, item.tolerance
    return {
        "split": check.split,
        "step": check.step,
        "weights": {
            "after_step": item.weights.version,
            "path": str(item.weights.path),
            "sha256": item.checksum,
        },
        "responses": check.responses,
        "tokens": check.tokens,
        "equal_bits": check.equal_bits,
        "flips": check.flips,
        "largest_gap": check.largest_gap,
        "largest_difference": check.largest_difference,
        "wrong_responses": len(check.wrong),
        "numerics": "the same bits" if tolerance is None else "within rounding",
        "tolerance": None
        if tolerance is None
        else {
            "measured": tolerance.measured,
            "tokens": tolerance.tokens,
            "logprob": tolerance.logprob,
            "gap": tolerance.gap,
        },
    }
