"""Law: a row's logits have the same bits whatever else is in the batch, and however it got there.

It holds for bf16 with oneDNN's prepacked operators and for float32 with MKL; elsewhere the start-up
check must say that it does not, and nothing here is claimed. Models: SmolLM2's shapes with four
random layers, a tiny one, and SmolLM2 itself where it is at hand. The full matrix is in
`benchmarks/numerics_matrix.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.bench.numerics import CHUNKS, Case, Laboratory, all_cases, pairwise
from ratoon.models import prepacked
from ratoon.models.hf_config import FAMILIES, family_config
from ratoon.models.hf_io import load_decoder
from ratoon.models.prepacked import prepacking_available
from ratoon.models.tiny import random_decoder
from ratoon.rollout.native import numerics
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.numerics import check_invariance

needs_prepacking = pytest.mark.skipif(
    not prepacking_available(), reason="this CPU has no bf16 kernels with prepacked weights"
)


def make_model(
    *,
    hidden_size: int = 576,
    intermediate_size: int = 1536,
    num_layers: int = 4,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    vocab_size: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    row_hint: int = prepacked.ROW_HINT,
    family: str = "llama",
) -> InferenceModel:
    """Random weights; by default SmolLM2's shapes with four layers and a small vocabulary."""
    config = family_config(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_positions=4096,
    )
    decoder = random_decoder(config, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in decoder.layers:
            # Random attention is nearly uniform, and hides in what order it was summed.
            layer.qkv_proj.weight.mul_(2)
        for name, parameter in decoder.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(0.0, 1.0, generator=generator)
    return InferenceModel(decoder, num_positions=2200, dtype=dtype, row_hint=row_hint)


def make_tiny_model(dtype: torch.dtype = torch.bfloat16, **shape: Any) -> InferenceModel:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 100,
        "num_layers": 2,
    }
    return make_model(**{**sizes, **shape}, dtype=dtype)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """The types in which bits hold on this machine."""
    dtype: torch.dtype = getattr(torch, request.param)
    if dtype == torch.bfloat16 and not prepacking_available():
        pytest.skip("this CPU has no bf16 kernels with prepacked weights")
    if dtype == torch.float32 and not check_invariance(make_model(num_layers=1, dtype=dtype)).holds:
        pytest.skip("float32 products depend on the number of rows here, and the check says so")
    return dtype


@pytest.fixture(scope="module")
def laboratory(dtype: torch.dtype) -> Laboratory:
    return Laboratory(make_model(dtype=dtype), (1, 63, 200, 2031), stride=128)


def test_a_tiny_model_keeps_its_bits_in_the_whole_matrix(dtype: torch.dtype) -> None:
    contexts = (1, 64, 200)
    laboratory = Laboratory(make_tiny_model(dtype), contexts)
    assert all(laboratory.keeps_keys(context, chunk) for context in contexts for chunk in CHUNKS)
    assert [case for case in all_cases(contexts) if not laboratory.keeps_logits(case)] == []


def test_large_matrices_keep_their_bits_up_to_2048_tokens(laboratory: Laboratory) -> None:
    cases = [
        case
        for case in pairwise(list(all_cases((1, 63, 200, 2031))))
        if case.chunk not in (1, 7) or case.context <= 200
    ]
    assert [case for case in cases if not laboratory.keeps_keys(case.context, case.chunk)] == []
    assert [case for case in cases if not laboratory.keeps_logits(case)] == []


def test_smollm2_keeps_its_bits_in_a_pairwise_slice(smollm2: Path, dtype: torch.dtype) -> None:
    model = InferenceModel(load_decoder(smollm2), num_positions=2200, dtype=dtype)
    short = pairwise(list(all_cases((1, 63, 100))))
    # The longest context in few cases and large portions, or this would take minutes.
    long = [
        Case(2031, None, 3, 2, "other lengths", "chain"),
        Case(2031, 128, 1, 16, "same length", "tree"),
        Case(2031, 128, 16, 1, "other lengths", "chain"),
    ]
    laboratory = Laboratory(model, (1, 63, 100, 2031), stride=128)
    for case in [*short, *long]:
        assert laboratory.keeps_keys(case.context, case.chunk), case
        assert laboratory.keeps_logits(case), case


def test_the_start_up_check_passes(dtype: torch.dtype) -> None:
    report = check_invariance(make_model(num_layers=2, dtype=dtype))
    assert report.holds
    assert report.failures == ()
    assert report.cases > 50


def test_a_key_width_that_is_not_rounded_is_caught(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    model = make_model(num_layers=2, dtype=dtype)
    case = Case(200, 64, 16, 8, "other lengths", "chain")
    monkeypatch.setattr(numerics, "attention_width", lambda length, dtype: length)
    failures = check_invariance(model).failures
    assert any("attention" in failure for failure in failures)
    assert any("batch" in failure for failure in failures)
    assert not Laboratory(model, (200,), stride=64).keeps_logits(case)


@needs_prepacking
@pytest.mark.parametrize("hint", [16, 64])
def test_another_prepacking_hint_is_caught(hint: int) -> None:
    report = check_invariance(make_model(num_layers=1, row_hint=hint))
    assert not report.holds
    assert any("qkv_proj" in failure for failure in report.failures)


@needs_prepacking
def test_more_than_128_rows_in_one_call_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "MAX_ROWS", 10_000)
    report = check_invariance(make_model(num_layers=1))
    assert report.failures == ("down_proj with 256 rows",)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_start_up_check_passes_for_every_family(family: str, dtype: torch.dtype) -> None:
    kv_heads = 4 if family == "gpt2" else 2
    model = make_tiny_model(dtype, family=family, num_kv_heads=kv_heads)
    assert check_invariance(model).failures == ()


@needs_prepacking
def test_a_bias_does_not_hide_what_it_is_added_to() -> None:
    report = check_invariance(make_tiny_model(hidden_size=576, family="gpt2", row_hint=16))
    assert any("qkv_proj" in failure for failure in report.failures)


def test_attention_of_a_single_query_is_computed_as_that_of_several(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As many key heads as query heads: a decode step has one query for each."""
    model = make_tiny_model(dtype, num_kv_heads=4)
    assert check_invariance(model).holds
    monkeypatch.setattr(numerics, "attend", _attend_singly)
    assert any("attention" in failure for failure in check_invariance(model).failures)


def _attend_singly(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, group: int) -> Tensor:
    folded = q.view(keys.shape[0], -1, keys.shape[1], keys.shape[3]).transpose(1, 2)
    mask = mask[:, :, : folded.shape[2]]
    attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return attended.transpose(1, 2)


@needs_prepacking
def test_wide_products_are_cut_into_as_many_rows_as_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPT-2's MLP of 3,072 neurons."""
    shape = {"hidden_size": 256, "intermediate_size": 3072, "num_layers": 1}
    assert check_invariance(make_tiny_model(**shape)).holds
    monkeypatch.setattr(prepacked, "_SURE_COLUMNS", 4096)
    failures = check_invariance(make_tiny_model(**shape)).failures
    assert "down_proj with 128 rows" in failures


def test_scattered_tree_slots_do_not_keep_the_bits(laboratory: Laboratory) -> None:
    """Why tokens selected beside the plain columns are confirmed before they are final."""
    differing = compared = 0
    for context in (63, 200):
        for batch in (1, 3, 16, 32):
            for neighbours in ("same length", "other lengths"):
                case = Case(context, 64, batch, 16, neighbours, "tree")
                found, of = laboratory.count_scattered(case)
                differing, compared = differing + found, compared + of
    assert differing > 0
    # Rounding to bf16 hides most differences.
    if laboratory.model.dtype == torch.bfloat16:
        assert differing < compared / 2


@needs_prepacking
@pytest.mark.parametrize("width", [32, 48])
def test_matrices_too_narrow_for_these_kernels_fail_the_check(width: int) -> None:
    report = check_invariance(make_tiny_model(hidden_size=width, num_heads=2, num_kv_heads=1))
    assert not report.holds
    assert any("qkv_proj" in failure for failure in report.failures)
    assert not any("down_proj" in failure for failure in report.failures)


def test_float32_products_of_few_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "EVEN_ROWS", 1)
    report = check_invariance(make_model(num_layers=1, dtype=torch.float32))
    assert any("qkv_proj" in failure for failure in report.failures)
    assert 0 < len(report.failures) <= report.cases


def test_without_prepacked_operators_the_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacked, "prepacking_available", lambda: False)
    assert not check_invariance(make_model(num_layers=1)).holds


def test_a_pairwise_slice_holds_every_pair_of_values() -> None:
    cases = list(all_cases((1, 64, 200)))
    chosen = pairwise(cases)
    assert len(chosen) < len(cases) / 10
    for case in cases:
        assert any(c.chunk == case.chunk and c.batch == case.batch for c in chosen)
        assert any(c.context == case.context and c.num_new == case.num_new for c in chosen)
        assert any(c.layout == case.layout and c.neighbours == case.neighbours for c in chosen)
