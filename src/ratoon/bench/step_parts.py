"""Where the time of a decode step goes."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from ratoon.bench.intervals import median_interval
from ratoon.bench.timing import Stopwatch
from ratoon.models.prepacked import PackedLinear
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native import forward as forward_module
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel

STEPS = 12
PARTS = ("draft", "linears", "attention", "between", "head", "selection", "commit", "learn", "rest")


def step_parts(engine: RolloutEngine, drafting: Drafting | None = None) -> list[dict[str, float]]:
    """Seconds by part of each of some steps, and their `total`.

    A forward pass is `linears`, `attention` and what lies `between` them; `head` makes the logits.
    Clocks on these cost a microsecond each, so steps that are compared run without.
    """
    model = _ClockedModel(engine.model)
    # Only the parts that the engine asks of a model are used.
    engine.model = model  # type: ignore[assignment]
    parts: dict[str, tuple[Any, str]] = {
        "forward": (model, "forward"),
        "head": (model, "logits"),
        "selection": (engine_module, "walk"),
        "commit": (engine.rows, "commit"),
    }
    if drafting is not None:
        parts |= {"draft": (drafting, "draft"), "learn": (drafting, "committed")}
    steps = []
    with Stopwatch().around(parts) as watch:
        for number in range(STEPS + 2):
            started = time.perf_counter()
            engine.step()
            total = time.perf_counter() - started
            seconds = watch.take() | model.watch.take()
            # The first ones fill caches.
            if number >= 2:
                steps.append(_separate(seconds, total))
    return steps


class _ClockedModel:
    """A model with clocks within its forward pass; a drafter's own products are not seen."""

    def __init__(self, model: InferenceModel) -> None:
        self._model = model
        self.watch = Stopwatch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """As the model's."""
        parts = {"linears": (PackedLinear, "__call__"), "attention": (forward_module, "attend")}
        with self.watch.around(parts):
            return self._model.forward(*arguments, **named)


def _separate(seconds: dict[str, float], total: float) -> dict[str, float]:
    """Parts that do not overlap, though linears and attention lie within the forward pass."""
    step = {name: seconds.get(name, 0.0) for name in PARTS}
    step["between"] = seconds["forward"] - step["linears"] - step["attention"]
    step["rest"] = total - sum(step.values())
    return {**step, "total": total}


def milliseconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of each part."""
    return {
        part: round(median_interval([step[part] * 1e3 for step in steps])["median"], 3)
        for part in (*PARTS, "total")
    }
