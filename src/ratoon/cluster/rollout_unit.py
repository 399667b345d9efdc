"""A worker's engine: built from the configuration, given new weights, rewound for a replay."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ratoon.cluster.spec import DraftingSpec, WorkerSpec
from ratoon.cluster.stored_state import load_state, save_state
from ratoon.cluster.tuners import make_tuner
from ratoon.coordinator.pace import Report
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.tokenizer import Tokenizer
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine, positions_needed
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import InvarianceReport, check_invariance
from ratoon.speculation.tuner import StatefulTuner, never

Numerics = Literal["invariant", "tolerant"]


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An engine's state before a step: what a replay of the step starts from."""

    model: InferenceModel
    policy_version: int
    served: Eagle3Drafter | None
    learned: dict[str, Any]


class RolloutUnit:
    """The engine of one worker, with the drafters that the configuration names."""

    def __init__(self, spec: WorkerSpec, decoder: Decoder) -> None:
        assert spec.rollout is not None
        self._dtype = DTYPES[spec.model.dtype]
        self._path = spec.model.path
        rows, length = spec.rollout.max_batch, spec.rollout.max_length
        self.drafting = None
        self._taps: tuple[int, ...] = ()
        if spec.drafting is not None and spec.drafting.speculation.enabled:
            self.drafting = self._make_drafting(spec.drafting, decoder.config, rows, length, spec)
        self._num_positions = positions_needed(length, self.drafting)
        model = self._build(decoder)
        self.invariance: InvarianceReport | None = None
        if spec.rollout.numerics == "invariant":
            self.invariance = check_invariance(model)
        self.numerics: Numerics = (
            "invariant" if self.invariance is not None and self.invariance.holds else "tolerant"
        )
        self.engine = RolloutEngine(
            model,
            max_rows=rows,
            max_length=length,
            vocab_limit=spec.vocab_limit,
            drafting=self.drafting,
            confirm=self.numerics == "invariant",
            prefill_chunk=spec.rollout.prefill_chunk,
            decode=lambda ids: self._tokenizer.decode(ids),
        )
        self._tuner: StatefulTuner | None = None
        if spec.drafting is not None and self.drafting is not None:
            self._tuner = make_tuner(spec.drafting.speculation, model)
        self._recorded: _Recorded | None = None
        self._marked: dict[str, Any] = {}
        self._report = Report()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """Read where a response with stop strings asks for its text."""
        return Tokenizer.load(self._path)

    def serve(self, decoder: Decoder, version: int) -> None:
        """Decode with the decoder's weights from here on."""
        self.engine.use_model(self._build(decoder), version)

    def load_drafter(self, served: Eagle3Drafter) -> None:
        """Draft with these weights and the served policy's embedding."""
        assert self.drafting is not None
        self.drafting.load(served, self.engine.model.embedding)

    def begin(self, *, speculate: bool, collect: bool) -> None:
        """Prepare for a rollout: whether to guess ahead, whether to keep states for training."""
        self._report = Report()
        self.engine.collect = collect
        self.engine.use_tuner(self._tuner if speculate and self._tuner else never())

    def mark(self) -> None:
        """Keep the state that `abandon` goes back to."""
        self._marked = self.state_dict()

    def abandon(self) -> None:
        """Forget what rollouts taught since `mark`."""
        self.load_state_dict(self._marked)

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that rollouts taught: calibration, suffix index, and the tuner's state."""
        if self.drafting is None or self._tuner is None:
            return {}
        return {"drafting": self.drafting.state_dict(), "tuner": self._tuner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if self.drafting is not None and self._tuner is not None:
            self.drafting.load_state_dict(state["drafting"])
            self._tuner.load_state_dict(state["tuner"])

    def save(self, path: Path) -> None:
        """Write `state_dict`."""
        save_state(path, self.state_dict())

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        self.load_state_dict(load_state(path))

    def step(self) -> list[Finished]:
        """One step of the engine, measured."""
        stats, live = self.engine.stats, self.engine.num_live
        tokens, prompt_tokens = stats.tokens, stats.prefill_tokens
        started = time.perf_counter()
        finished = self.engine.step()
        seconds = time.perf_counter() - started
        made, report = stats.tokens - tokens, self._report
        if made:
            self._report = replace(
                report,
                seconds=report.seconds + seconds,
                row_seconds=report.row_seconds + live * seconds,
                tokens=report.tokens + made,
            )
        else:
            self._report = replace(
                report,
                prefill_seconds=report.prefill_seconds + seconds,
                prefill_tokens=report.prefill_tokens + stats.prefill_tokens - prompt_tokens,
            )
        return finished

    def take_report(self) -> Report:
        """What the steps since the last call took."""
        report, self._report = self._report, Report()
        return report

    def record(self, served: Eagle3Drafter | None) -> None:
        """Keep the state as it is before a rollout, so that the rollout can be replayed."""
        kept = None
        if served is not None:
            kept = Eagle3Drafter(served.config)
            kept.load_state_dict(served.state_dict())
        engine = self.engine
        self._recorded = _Recorded(engine.model, engine.policy_version, kept, self.state_dict())

    def rewind(self) -> None:
        """Go back to the recorded state; `serve` leads back to the present."""
        recorded = self._recorded
        if recorded is None:
            raise RuntimeError("nothing was recorded to rewind to")
        self.engine.use_model(recorded.model, recorded.policy_version)
        self.load_state_dict(recorded.learned)
        if self.drafting is not None and recorded.served is not None:
            self.drafting.load(recorded.served, recorded.model.embedding)

    def _build(self, decoder: Decoder) -> InferenceModel:
        return InferenceModel(
            decoder, num_positions=self._num_positions, dtype=self._dtype, taps=self._taps
        )

    def _make_drafting(
        self, spec: DraftingSpec, config: DecoderConfig, rows: int, length: int, worker: WorkerSpec
    ) -> Drafting:
        settings = spec.speculation
        learned = None
        if settings.uses_learned:
            shape = DrafterConfig.for_target(
                config, spec.drafter.draft_vocab_size, spec.drafter.window
            )
            self._taps = shape.taps
            learned = LearnedDrafter(
                shape,
                num_rows=rows,
                num_positions=length + settings.budget + settings.depth + 1,
                num_tree_slots=settings.beam * max(1, settings.depth - 1),
                dtype=self._dtype,
            )
        return Drafting(
            num_rows=rows,
            vocab_limit=worker.vocab_limit,
            max_nodes=settings.budget + 1,
            suffix=SuffixDrafter(rows) if "suffix" in settings.drafters else None,
            learned=learned,
        )

    @property
    def embedding(self) -> Tensor:
        """The served policy's token embedding `[V, D]`."""
        return self.engine.model.embedding
