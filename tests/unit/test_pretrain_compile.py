"""Pretraining with compiled layers: the same numbers, and few graphs.

What is tested is which graphs there are, so layers are traced but run by torch's own operators.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from ratoon.errors import ConfigError
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.subnetwork import Rates, Shape
from ratoon.models import compiling
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import family_config
from ratoon.training import pretrainer
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.pretrainer import Passes, Pretrainer

STAGES = (Rates(0.5, 0.5, 0.5), Rates(1, 0.5, 0.5), Rates())
SEQUENCES = np.random.default_rng(0).integers(20, size=(4, 33))
HELD_OUT = np.random.default_rng(1).integers(20, size=(5, 33))


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def traced(decoder: Decoder, setting: str) -> None:
        compiling.compile_layers(decoder, setting, backend="aot_eager")

    monkeypatch.setattr(pretrainer, "compile_layers", traced)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _config(family: str) -> DecoderConfig:
    return family_config(
        family, vocab_size=20, hidden_size=16, intermediate_size=64, num_layers=4, num_heads=4,
        num_kv_heads=4 if family == "gpt2" else 2, head_dim=4, max_positions=32,
    )  # fmt: skip


def _trainers(family: str, dtype: torch.dtype, recompute: bool) -> tuple[Pretrainer, Pretrainer]:
    """One as written, and one that is compiled."""
    config = _config(family)
    torch.manual_seed(0)
    decoder = Decoder(config)
    shape = Shape.of(config, neuron_block=16)
    plain, compiled = (
        Pretrainer(
            copy.deepcopy(decoder),
            UpdateRule(),
            Passes(2, recompute, is_compiled),
            shape=shape,
            compute_dtype=dtype,
        )
        for is_compiled in (False, True)
    )
    return plain, compiled


def _trained(trainer: Pretrainer, sampler: Sampler) -> list[float]:
    """Losses of steps and evaluations through all stages."""
    found = []
    for stage, rates in enumerate(STAGES):
        for place in range(2):
            step = 2 * stage + place

            def draw(number: int, count: int, at: int = step, rates: Rates = rates):  # type: ignore[no-untyped-def]
                return sampler.draw(rates, at, number, count)

            result = trainer.step(SEQUENCES, 1e-2, draw)
            found += [float(result.loss), float(result.grad_norm)]
        found.append(trainer.evaluate(HELD_OUT))
    return found


def _sampler(kind: str, shape: Shape) -> Sampler:
    if kind == "nested":
        return NestedSampler(shape)
    depth = "sequences" if kind == "sequences" else "layers"
    return RandomSampler(shape, 0, depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("family", "kind", "dtype", "recompute"),
    [
        ("gpt2", "random", torch.float32, True),
        ("gpt2", "sequences", torch.bfloat16, False),
        ("llama", "random", torch.bfloat16, False),
        ("llama", "nested", torch.float32, True),
    ],
)
def test_compiled_layers_learn_the_same_with_two_shapes_a_stage(
    family: str, kind: str, dtype: torch.dtype, recompute: bool
) -> None:
    plain, compiled = _trainers(family, dtype, recompute)
    expected = _trained(plain, _sampler(kind, plain.shape))
    found = _trained(compiled, _sampler(kind, compiled.shape))
    tight = 1e-4 if dtype == torch.float32 else 2e-2
    assert found == pytest.approx(expected, rel=tight)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    # One graph for the steps of each stage, and one for evaluation; nested layers without scales
    # do not tell the first two stages apart.
    assert counters["stats"]["unique_graphs"] == (3 if kind == "nested" else 4)


def test_a_stage_that_a_probe_has_tried_is_not_compiled_again() -> None:
    _, compiled = _trainers("llama", torch.float32, recompute=False)
    sampler = NestedSampler(compiled.shape)
    _trained(compiled, sampler)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    restore = compiled.weights.snapshot()
    _trained(compiled, sampler)
    restore()
    _trained(compiled, sampler)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"update\.compile = true needs a C\+\+ compiler"):
        _trainers("llama", torch.float32, recompute=False)
