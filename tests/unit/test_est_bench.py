"""The benchmark of stages, on a model of no size."""

from __future__ import annotations

import pytest

from ratoon.bench.est import run
from ratoon.models.decoder import DecoderConfig

CONFIG = DecoderConfig(
    family="gpt2", vocab_size=64, hidden_size=16, intermediate_size=64, num_layers=4, num_heads=4,
    num_kv_heads=4, head_dim=4, max_positions=16, norm="layer", positions="learned",
    activation="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip


def test_every_stage_is_timed_and_counted_against_the_full_step() -> None:
    found = run(1, num_tokens=64, document_tokens=16, micro_batch_tokens=32, config=CONFIG)
    stages = {"random_1", "random_2", "nested_1", "nested_2", "sequences_1"}
    assert set(found["step_s"]) == {"full", *stages}
    for key in ("stage_time_ratio", "stage_flops_ratio", "time_over_flops"):
        assert set(found[key]) == stages
    ratios = found["stage_flops_ratio"]
    assert found["stage_flops_ratio_paper"]["random_1"] == pytest.approx(0.25)
    assert 0.25 < ratios["random_1"] < ratios["random_2"] < 1.0
    for name in stages:
        assert found["stage_time_ratio"][name]["median"] == pytest.approx(
            ratios[name] * found["time_over_flops"][name]["median"]
        )
