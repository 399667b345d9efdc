"""Selection: equal to the definition computed naively, alone or in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ratoon.errors import ConfigError, NumericsError
from ratoon.records import DrawKey, SamplingParams, Stream
from ratoon.sampling import keyed_noise, select
from ratoon.sampling.select import Selector
from ratoon.sampling.transforms import transform

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.5, top_k=20),
    SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def some_row_keys(num_rows: int, t: int = 5) -> Tensor:
    keys = keyed_noise.sequence_keys(
        DrawKey(seed=1, stream=Stream.SERVE, round=0, dataset="unit", row=i, sample=0)
        for i in range(num_rows)
    )
    return keyed_noise.row_keys(keys, torch.full((num_rows,), t))


def some_logits(num_rows: int, vocab: int) -> Tensor:
    """Flat, ordinary and peaked rows in turn."""
    generator = torch.Generator().manual_seed(vocab)
    scale = torch.tensor([0.01, 3.0, 12.0]).repeat(num_rows)[:num_rows, None]
    return torch.randn(num_rows, vocab, generator=generator) * scale


def naive(logits: Tensor, row_keys: Tensor, params: SamplingParams, limit: int) -> Tensor:
    """argmax(score + Gumbel noise) over all ids, in float64."""
    scores = transform(logits, params, limit).double()
    noise = keyed_noise.exponential(row_keys, vocab_size=logits.shape[1])
    return (scores - noise.log()).argmax(-1)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "limit"), [(1, 1), (7, 5), (256, 256), (1_000, 999), (9_000, 8_500), (49_152, 49_152)]
)
def test_the_token_is_the_argmax_of_score_plus_noise(
    vocab: int, limit: int, dtype: torch.dtype, params: SamplingParams
) -> None:
    num_rows = 7 if vocab > 9_000 else 60
    logits, row_keys = some_logits(num_rows, vocab).to(dtype), some_row_keys(num_rows)
    ids, logprobs = Selector(vocab, limit).select(logits, row_keys, params)
    assert torch.equal(ids, naive(logits, row_keys, params, limit))
    expected = torch.log_softmax(transform(logits, params, limit).double(), -1)
    torch.testing.assert_close(
        logprobs.double(), expected.gather(1, ids[:, None])[:, 0], atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocab", "limit"), [(49_152, 49_152), (5_000, 4_321)])
def test_logprobs_have_the_bits_of_torch_log_softmax(
    vocab: int, limit: int, temperature: float
) -> None:
    logits, row_keys = some_logits(9, vocab).bfloat16(), some_row_keys(9)
    params = SamplingParams(temperature=temperature)
    ids, logprobs = Selector(vocab, limit).select(logits, row_keys, params)
    expected = torch.log_softmax(logits[:, :limit].float() / temperature, -1)
    assert torch.equal(logprobs, expected.gather(1, ids[:, None])[:, 0])


@pytest.mark.parametrize("params", [*PARAMS, SamplingParams(temperature=0.0)])
@pytest.mark.parametrize("vocab", [700, 33_000])
def test_a_row_gets_the_same_bits_alone_and_in_any_company(
    vocab: int, params: SamplingParams
) -> None:
    logits, row_keys = some_logits(12, vocab).bfloat16(), some_row_keys(12)
    selector = Selector(vocab)
    ids, logprobs = selector.select(logits, row_keys, params)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    shuffled = selector.select(logits[order], row_keys[order], params)
    assert torch.equal(shuffled[0], ids[order])
    assert torch.equal(shuffled[1], logprobs[order])
    for i in range(12):
        row = slice(i, i + 1)
        one_id, one_logprob = selector.select(logits[row], row_keys[row], params)
        assert torch.equal(one_id, ids[row])
        assert torch.equal(one_logprob, logprobs[row])


def test_threads_change_no_bit() -> None:
    logits, row_keys = some_logits(3, 49_152).bfloat16(), some_row_keys(3)
    results = []
    previous = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(Selector(49_152).select(logits, row_keys, SamplingParams(temperature=0.8)))
    torch.set_num_threads(previous)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_rows_that_the_first_final_does_not_settle_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "_FINALISTS", 1)
    num_finals = []
    final = Selector._final

    def counted(self: Selector, *args: object) -> tuple[Tensor, Tensor]:
        num_finals.append(1)
        return final(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Selector, "_final", counted)
    logits, row_keys = some_logits(400, 3_000), some_row_keys(400)
    ids, _ = Selector(3_000).select(logits, row_keys, SamplingParams())
    assert len(num_finals) == 2
    assert torch.equal(ids, naive(logits, row_keys, SamplingParams(), 3_000))


def test_high_bits_of_zero_cost_time_but_no_exactness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero high bits bound nothing: their logarithm is minus infinity."""
    high_bits = keyed_noise.high_bits

    def often_zero(*args: Tensor) -> Tensor:
        words = high_bits(*args)  # type: ignore[arg-type]
        return words.masked_fill_(words % 50 == 0, 0)

    monkeypatch.setattr(keyed_noise, "high_bits", often_zero)
    logits, row_keys = some_logits(20, 3_000), some_row_keys(20)
    logits[:, ::3] = -torch.inf
    ids, _ = Selector(3_000).select(logits, row_keys, SamplingParams())
    assert torch.equal(ids, naive(logits, row_keys, SamplingParams(), 3_000))


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 50.0])
def test_extreme_logits_are_selected_by_the_same_rule(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits, row_keys = some_logits(60, 2_000) * 40 + 3_000, some_row_keys(60)
    ids, logprobs = Selector(2_000).select(logits, row_keys, params)
    assert torch.equal(ids, naive(logits, row_keys, params, 2_000))
    assert logprobs.isfinite().all()


def test_the_only_token_that_is_not_excluded_is_selected() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[torch.arange(3), torch.tensor([0, 431, 599])] = -7.0
    ids, logprobs = Selector(600).select(logits, some_row_keys(3), SamplingParams())
    assert ids.tolist() == [0, 431, 599]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]


def test_temperature_zero_takes_the_largest_logit_and_the_lowest_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 5.0, 7.0, 9.0]]).bfloat16()
    params = SamplingParams(temperature=0.0, top_k=1)
    ids, logprobs = Selector(4, vocab_limit=3).select(logits, some_row_keys(2), params)
    assert ids.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("params", [*PARAMS, SamplingParams(temperature=0.0)])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("vocab", [300, 9_000])
def test_logits_that_describe_no_distribution_are_an_error(
    vocab: int, fault: float, params: SamplingParams
) -> None:
    logits = some_logits(5, vocab)
    if fault == -torch.inf:
        logits[3] = fault
    else:
        logits[3, vocab // 2] = fault
    with pytest.raises(NumericsError, match="logits"):
        Selector(vocab).select(logits, some_row_keys(5), params)


def test_faults_beyond_the_vocabulary_limit_do_not_matter() -> None:
    logits = some_logits(5, 300)
    logits[:, 290:] = torch.nan
    ids, _ = Selector(300, vocab_limit=290).select(logits, some_row_keys(5), SamplingParams())
    assert (ids < 290).all()


def test_no_rows_select_no_tokens() -> None:
    for params in (*PARAMS, SamplingParams(temperature=0.0)):
        ids, logprobs = Selector(300).select(torch.empty(0, 300), some_row_keys(1)[:0], params)
        assert ids.shape == logprobs.shape == (0,)


def test_bad_parameters_and_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="top_p"):
        Selector(10).select(torch.zeros(1, 10), some_row_keys(1), SamplingParams(top_p=0.0))
    for limit in (0, 11):
        with pytest.raises(ValueError, match="vocab_limit"):
            Selector(10, vocab_limit=limit)
