"""The integral transform is uniform under p exactly, and sees other distributions."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import keyed_noise
from ratoon.sampling.select import Selector
from ratoon.sampling.transforms import transform
from ratoon.sampling.uniformity import hash_uniforms, integral_transform, kolmogorov_smirnov

VOCAB, TOKENS = 40, 800
PLAIN = SamplingParams()


def key_of(sample: int) -> DrawKey:
    return DrawKey(3, Stream.TRAIN, 1, "uniform", 0, sample)


def drawn(seed: int, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of `TOKENS` contexts, tokens drawn from `params` by keyed selection, and row keys."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(TOKENS, VOCAB, generator=generator)
    words = torch.tensor([keyed_noise.sequence_key(key_of(seed))]).expand(TOKENS, -1)
    keys = keyed_noise.row_keys(words, torch.arange(TOKENS))
    ids, _ = Selector(VOCAB).select(logits, keys, params)
    return logits, ids, keys


def p_value(seed: int, params: SamplingParams) -> float:
    logits, ids, _ = drawn(seed, params)
    w = hash_uniforms(key_of(seed), torch.arange(TOKENS))
    u, _ = integral_transform(logits, ids, w)
    return kolmogorov_smirnov(u.tolist())[1]


@pytest.mark.parametrize("params", [PLAIN, SamplingParams(0.7, top_k=5), SamplingParams(2.0)])
def test_the_transforms_of_all_ids_tile_the_unit_interval(params: SamplingParams) -> None:
    """Each id's interval is as long as its probability, so u is uniform whatever p is."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = logits[0, 3]
    scores = transform(logits, params)
    ids = torch.arange(VOCAB)
    low, high = (
        integral_transform(scores.expand(VOCAB, -1), ids, torch.full((VOCAB,), w).double())
        for w in (0.0, 1.0)
    )
    p = torch.softmax(scores[0].double(), 0)
    assert torch.allclose(high[0] - low[0], p, atol=1e-12)
    assert torch.allclose(low[1].exp(), p, atol=1e-12)
    order = torch.argsort(-p, stable=True)
    assert torch.allclose(low[0][order][1:], high[0][order][:-1], atol=1e-12)
    assert float(low[0].min()) == 0
    assert float(high[0].max()) == pytest.approx(1)


@pytest.mark.parametrize("count", [5, 40, 3000])
def test_the_test_is_that_of_scipy(count: int) -> None:
    values = torch.rand(count, generator=torch.Generator().manual_seed(count)).double() ** 1.1
    expected = stats.kstest(values.numpy(), "uniform")
    statistic, p = kolmogorov_smirnov(values.tolist())
    assert statistic == pytest.approx(expected.statistic, abs=1e-12)
    assert p == pytest.approx(expected.pvalue, abs=0.02)


def test_a_test_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        kolmogorov_smirnov([])


def test_samples_of_p_raise_no_alarm_over_seeds() -> None:
    """And the p-values are uniform themselves: neither liberal nor blind."""
    found = [p_value(seed, PLAIN) for seed in range(80)]
    assert min(found) > 1e-4
    assert kolmogorov_smirnov(found)[1] > 1e-3


@pytest.mark.parametrize(
    "params", [SamplingParams(1.3), SamplingParams(0.75), SamplingParams(top_p=0.85)], ids=str
)
def test_another_distribution_is_found(params: SamplingParams) -> None:
    assert all(p_value(seed, params) < 1e-5 for seed in range(4))


def test_the_hash_must_be_independent_of_the_noise_that_selects() -> None:
    """The mutation: w from the selected token's own noise, which is small because it won."""
    logits, ids, keys = drawn(0, PLAIN)
    own = keyed_noise.uniform_bits(keys, ids[:, None], VOCAB)[:, 0].double()
    u, _ = integral_transform(logits, ids, own * 2.0**-52)
    assert kolmogorov_smirnov(u.tolist())[1] < 1e-5


def test_a_key_position_and_purpose_have_a_hash_of_their_own() -> None:
    t = torch.arange(50)
    one = hash_uniforms(key_of(0), t)
    assert torch.equal(one[20:], hash_uniforms(key_of(0), t[20:]))
    assert len({*one.tolist(), *hash_uniforms(key_of(1), t).tolist()}) == 100
    assert keyed_noise.sequence_key(key_of(0)) != keyed_noise.sequence_key(key_of(0), b"other")
