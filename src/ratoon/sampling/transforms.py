"""From logits to the scores whose softmax is the distribution p that tokens are drawn from.

The only place of these, applied in this order, which is that of Hugging Face's `generate`:

1. vocabulary limit
2. logit bias
3. repetition penalty, then frequency and presence penalties, which Hugging Face lacks, as vLLM does
4. suppressed tokens, end ids that come too early
5. a logits processor of the user's
6. temperature
7. top-k, top-p, min-p

A token is kept or dropped by its score alone: at the border of top-k and of top-p all tokens of
equal score are kept together. The result then depends neither on a sorting algorithm nor on
how many rows are transformed at once. Hugging Face keeps ties at the border of top-k too, and cuts
through them at the border of top-p.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ratoon.errors import ConfigError
from ratoon.records import SamplingParams
from ratoon.sampling.prefixes import Prefixes

_FIRST_PREFIX = 64
_PREFIX_GROWTH = 8


def check_params(params: SamplingParams) -> None:
    """Raise `ConfigError` for parameters that describe no distribution."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise ConfigError(
            f"temperature is {params.temperature}; it must be 0 (argmax) or a positive number"
        )
    if params.top_k < 0:
        raise ConfigError(f"top_k is {params.top_k}; it must be 0 (off) or a positive integer")
    if not 0.0 < params.top_p <= 1.0:
        raise ConfigError(f"top_p is {params.top_p}; it must be above 0 and at most 1 (off)")
    if not 0.0 <= params.min_p <= 1.0:
        raise ConfigError(f"min_p is {params.min_p}; it must lie between 0 (off) and 1")
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0.0):
        raise ConfigError(
            f"repetition_penalty is {params.repetition_penalty}; it must be a positive number, "
            "1 = off"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise ConfigError(f"{name} is {getattr(params, name)}; it must be finite, 0 = off")
    if params.min_new_tokens < 0:
        raise ConfigError(f"min_new_tokens is {params.min_new_tokens}; it must be 0 or more")


def check_ids(params: SamplingParams, vocab_limit: int) -> None:
    """Raise `ConfigError` where `logit_bias` or `suppress_tokens` names an id that is never drawn.

    Also raised for an id that is biased twice, and for a bias that is not finite.
    """
    biased = [token for token, _ in params.logit_bias]
    for name, ids in (("logit_bias", biased), ("suppress_tokens", params.suppress_tokens)):
        for token in ids:
            if not 0 <= token < vocab_limit:
                raise ConfigError(
                    f"{name} names id {token}; ids of this model are 0 to {vocab_limit - 1}"
                )
    if len(set(biased)) < len(biased):
        raise ConfigError("logit_bias names an id twice; each id has one bias")
    for token, value in params.logit_bias:
        if not abs(value) <= torch.finfo(torch.float32).max:
            raise ConfigError(
                f"logit_bias of id {token} is {value}; it must be a finite float32. To exclude the "
                "id, name it in suppress_tokens"
            )


def is_temperature_only(params: SamplingParams) -> bool:
    """Whether p is the softmax of scaled logits, with no token changed or excluded."""
    is_cut = params.top_k != 0 or params.top_p != 1.0 or params.min_p != 0.0
    return not is_cut and not changes_logits(params)


def changes_logits(params: SamplingParams) -> bool:
    """Whether anything is done to the logits before temperature."""
    return bool(params.logit_bias or params.suppress_tokens or reads_prefixes(params))


def reads_prefixes(params: SamplingParams) -> bool:
    """Whether p depends on the tokens before the draw by more than the logits."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.min_new_tokens != 0
        or params.logits_processor is not None
    )


def scale_(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature, in place; temperature 1 touches nothing."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def transform(
    logits: Tensor,
    params: SamplingParams,
    vocab_limit: int | None = None,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """Scores whose softmax is p: changed and temperature-scaled logits, excluded tokens at -inf.

    Shapes: logits [B, V] of any floating type; returns a fresh [B, V] tensor, float64 for float64
    logits and float32 otherwise. Ids from `vocab_limit` on are excluded.
    Raises: ConfigError at temperature 0, which describes no scores, and as `change_logits` does.
    Cost: with temperature alone two passes and no host-device sync. top-p syncs at least once; it
    sorts only a prefix of the vocabulary, grown until it covers the nucleus.
    """
    if params.temperature == 0.0:
        raise ConfigError("temperature is 0, which takes the largest logit; there are no scores")
    scores = change_logits(logits, params, vocab_limit, prefixes)
    scale_(scores, params.temperature)
    if 0 < params.top_k < scores.shape[-1]:
        border = scores.topk(params.top_k, dim=-1).values[:, -1:]
        scores.masked_fill_(scores < border, -torch.inf)
    if params.top_p < 1.0:
        scores.masked_fill_(scores < _nucleus_border(scores, params.top_p), -torch.inf)
    if params.min_p > 0.0:
        border = scores.amax(-1, keepdim=True) + math.log(params.min_p)
        scores.masked_fill_(scores < border, -torch.inf)
    return scores


def change_logits(
    logits: Tensor,
    params: SamplingParams,
    vocab_limit: int | None = None,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """The logits after all that comes before temperature: a fresh tensor, as `transform` returns.

    `prefixes` holds the tokens before each row's draw; it is needed where `reads_prefixes` says so.
    Raises: ConfigError as `check_ids` does, or where a logits processor returns another shape;
    ValueError without the prefixes that are needed.
    Cost: about three passes for each penalty, and one over the prefixes. A logits processor is
    called row by row, after one host-device sync.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scores = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    scores.copy_(logits)
    limit = scores.shape[-1] if vocab_limit is None else vocab_limit
    scores[:, limit:] = -torch.inf
    bias = token_bias(params, limit, dtype, scores.device)
    if bias is not None:
        scores[:, :limit].add_(bias)
    if not reads_prefixes(params):
        return scores
    if prefixes is None:
        raise ValueError("these sampling parameters need the tokens before each draw")
    _penalise_(scores, params, prefixes)
    if params.min_new_tokens:
        _exclude_early_ends_(scores, params.min_new_tokens, prefixes)
    if params.logits_processor is not None:
        _call_processor_(scores, params, prefixes)
        scores[:, limit:] = -torch.inf
    return scores


def token_bias(
    params: SamplingParams, vocab_limit: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What is added to each id's logit wherever it stands: its bias, -inf for a suppressed token.

    Shape `[vocab_limit]`; None where that would be nothing. The tensor is shared: do not change it.
    A suppressed token stays at -inf under any penalty, so both may be applied at once.
    Raises: ConfigError as `check_ids` does.
    """
    if not params.logit_bias and not params.suppress_tokens:
        return None
    return _token_bias(params.logit_bias, params.suppress_tokens, vocab_limit, dtype, device)


@lru_cache(maxsize=8)
def _token_bias(
    logit_bias: tuple[tuple[int, float], ...],
    suppress_tokens: tuple[int, ...],
    vocab_limit: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    check_ids(SamplingParams(logit_bias=logit_bias, suppress_tokens=suppress_tokens), vocab_limit)
    bias = torch.zeros(vocab_limit, dtype=dtype, device=device)
    for token, value in logit_bias:
        bias[token] = value
    bias[list(suppress_tokens)] = -torch.inf
    return bias


def _penalise_(scores: Tensor, params: SamplingParams, prefixes: Prefixes) -> None:
    """Repetition penalty (Keskar et al. 2019), then OpenAI's frequency and presence penalties."""
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        seen = prefixes.counts(scores, of_prompt=True) > 0
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        torch.where(seen, penalised, scores, out=scores)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = prefixes.counts(scores, of_prompt=False)
        # Not `sub_(alpha=...)`: whether that rounds once or twice depends on where a row lies.
        scores.sub_(counts * params.frequency_penalty)
        scores.sub_(counts.clamp_max_(1).mul_(params.presence_penalty))


def _exclude_early_ends_(scores: Tensor, min_new_tokens: int, prefixes: Prefixes) -> None:
    """-inf for the end ids of rows with too few response tokens."""
    size = scores.shape[1]
    is_id = (prefixes.end_ids >= 0) & (prefixes.end_ids < size)
    is_early = (prefixes.num_new < min_new_tokens)[:, None] & is_id
    most = torch.full(is_early.shape, torch.inf, dtype=scores.dtype, device=scores.device)
    most.masked_fill_(is_early, -torch.inf)
    scores.scatter_reduce_(1, prefixes.end_ids.clamp(0, size - 1), most, "amin")


def _call_processor_(scores: Tensor, params: SamplingParams, prefixes: Prefixes) -> None:
    """Let the user's logits processor change one row after the other."""
    assert params.logits_processor is not None
    for row, length in enumerate(prefixes.lengths.tolist()):
        before = scores[row : row + 1]
        changed = params.logits_processor(prefixes.tokens[row : row + 1, :length], before.clone())
        if not isinstance(changed, Tensor) or changed.shape != before.shape:
            shape = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ConfigError(
                f"the logits processor returned {shape}; it must return logits of shape "
                f"{tuple(before.shape)}, as it was given"
            )
        before.copy_(changed)


def _nucleus_border(scores: Tensor, top_p: float) -> Tensor:
    """The lowest score in each row's nucleus, [B, 1].

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p`; a token
    belongs to it if the tokens before it have less, so the crossing token is in.
    """
    # log_softmax, not a sum of our own: its kernel gives a row the same bits for any row count.
    log_total = (scores.amax(-1) - torch.log_softmax(scores, dim=-1).amax(-1)).double()
    size = scores.shape[-1]
    prefix = min(_FIRST_PREFIX, size)
    while True:
        top = scores.topk(prefix, dim=-1).values
        mass = (top.double() - log_total[:, None]).exp_().cumsum(-1)
        if prefix == size or not bool((mass[:, -1] < top_p).any()):
            break
        prefix = min(prefix * _PREFIX_GROWTH, size)
    num_kept = (mass < top_p).sum(-1, keepdim=True).add_(1).clamp_(max=prefix)
    return top.gather(-1, num_kept - 1)
