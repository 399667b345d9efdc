"""A worker's engine: built from the configuration, given new weights, rewound for a replay."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from ratoon.cluster.spec import DraftingSpec, WorkerSpec
from ratoon.config.speculation import Speculation
from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.compute_dtype import DTYPES
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine, positions_needed
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.latency import forward_seconds
from ratoon.rollout.native.numerics import InvarianceReport, check_invariance
from ratoon.speculation.bandit import BanditTuner
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.strategy import Strategy, StrategyTable
from ratoon.speculation.tuner import TableTuner, Tuner, never

Numerics = Literal["invariant", "tolerant"]
# Cost of one more row of a forward pass, in passes, for one live sequence; measured on a CPU.
MIN_CHANCE = 0.01
MAX_MIN_CHANCE = 0.2


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An engine's state before a step: what a replay of the step starts from."""

    model: InferenceModel
    policy_version: int
    drafting: dict[str, Any] | None
    served: Eagle3Drafter | None
    tuner: Tuner


class RolloutUnit:
    """The engine of one worker, with the drafters that the configuration names."""

    def __init__(self, spec: WorkerSpec, decoder: Decoder) -> None:
        assert spec.rollout is not None
        self._dtype = DTYPES[spec.model.dtype]
        self._drafting_spec = spec.drafting
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
        )
        self._tuner = self._make_tuner()
        self._recorded: _Recorded | None = None

    def serve(self, decoder: Decoder, version: int) -> None:
        """Decode with the decoder's weights from here on."""
        self.engine.use_model(self._build(decoder), version)

    def load_drafter(self, served: Eagle3Drafter) -> None:
        """Draft with these weights and the served policy's embedding."""
        assert self.drafting is not None
        self.drafting.load(served, self.engine.model.embedding)

    def begin(self, *, speculate: bool, collect: bool) -> None:
        """Prepare for a rollout: whether to guess ahead, whether to keep states for training."""
        self.engine.collect = collect
        self.engine.use_tuner(self._tuner if speculate else never())

    def record(self, served: Eagle3Drafter | None) -> None:
        """Keep the state as it is before a rollout, so that the rollout can be replayed."""
        kept = None
        if served is not None:
            kept = Eagle3Drafter(served.config)
            kept.load_state_dict(served.state_dict())
        drafting = self.drafting.state_dict() if self.drafting is not None else None
        model = self.engine.model
        self._recorded = _Recorded(
            model, self.engine.policy_version, drafting, kept, copy.deepcopy(self._tuner)
        )

    def rewind(self) -> None:
        """Go back to the recorded state; `serve` leads back to the present."""
        recorded = self._recorded
        if recorded is None:
            raise RuntimeError("nothing was recorded to rewind to")
        self.engine.use_model(recorded.model, recorded.policy_version)
        self._tuner = copy.deepcopy(recorded.tuner)
        if self.drafting is not None and recorded.drafting is not None:
            self.drafting.load_state_dict(recorded.drafting)
            if recorded.served is not None:
                self.drafting.load(recorded.served, recorded.model.embedding)

    def _build(self, decoder: Decoder) -> InferenceModel:
        return InferenceModel(
            decoder, num_positions=self._num_positions, dtype=self._dtype, taps=self._taps
        )

    def _make_tuner(self) -> Tuner:
        if self.drafting is None or self._drafting_spec is None:
            return never()
        settings = self._drafting_spec.speculation
        if settings.tuner == "table":
            return TableTuner(StrategyTable(tiers_of(settings), slack=settings.hysteresis))
        if settings.tuner == "bandit":
            return BanditTuner([(limit, _depths(tree)) for limit, tree in tiers_of(settings)])
        points = forward_seconds(self.engine.model, settings.max_rows)
        return CostModelTuner(largest_of(settings), settings.max_rows, Latency(points))

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


def largest_of(settings: Speculation) -> Strategy:
    """The configured tree; live sequences share their budgets."""
    return Strategy(
        depth=settings.depth,
        branching=settings.branching,
        beam=settings.beam,
        budget=settings.budget,
        cap=settings.budget,
        use_learned="learned" in settings.drafters,
        use_suffix="suffix" in settings.drafters,
        min_chance=MIN_CHANCE,
    )


def _depths(tree: Strategy) -> list[Strategy]:
    """The tree, and shallower ones with as many tokens to verify."""
    depths = {tree.depth, max(1, tree.depth // 2), 1}
    return [replace(tree, depth=depth) for depth in sorted(depths, reverse=True)]


def tiers_of(settings: Speculation) -> list[tuple[int, Strategy]]:
    """The configured tree for few live sequences, smaller ones for more (limit, strategy).

    A forward pass has at most about `max_rows` rows. A node must be visited with a chance near the
    cost of its row, which grows with the batch.
    """
    limits = []
    limit = 1
    while limit < settings.max_live_batch:
        limits.append(limit)
        limit *= 2
    tiers = []
    for limit in (*limits, settings.max_live_batch):
        budget = min(settings.budget, settings.max_rows // limit - 1)
        tree = replace(largest_of(settings), cap=None).within(budget, settings.depth)
        min_chance = min(MIN_CHANCE * limit, MAX_MIN_CHANCE)
        tiers.append((limit, replace(tree, min_chance=min_chance)))
    return tiers
