"""The learned drafter: EAGLE-3, tensor for tensor as SGLang, SpecForge and vLLM load it.

One layer that reads, for each token t, the target's three tapped states of t ("features") and the
embedding of token t+1, and predicts token t+2:

    h      = fc(features[t])                      or the layer's own output of the step before
    x      = [ input_layernorm(embed(token)) ; hidden_norm(h) ]
    out    = layer(x), with h (not normed) as the residual stream
    logits = lm_head(norm(out)),  next h = out

Logits are on the target's scale: divide them by the sampling temperature as the target's are. The
target's embedding is no parameter; every call takes the live one.

Shape letters: T pairs (feature of t, embedding of t+1), D drafter width, H query heads, G
key/value heads, E head width, I MLP width, V vocabulary, Vd draft vocabulary.
Source: EAGLE-3 (arXiv 2503.01840); layout of the SpecForge checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ratoon.errors import CapabilityError, ConfigError
from ratoon.models.decoder import (
    Block,
    Decoder,
    DecoderConfig,
    RMSNorm,
    rope_table,
)

FULL_VOCABULARY_BELOW = 8192


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs feed the drafter: `(2, L//2, L-3)`, spread evenly where L < 7.

    Raises: CapabilityError for fewer than three layers.
    """
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    if num_layers >= 4:
        return 1, num_layers // 2, num_layers - 1
    if num_layers == 3:
        return 0, 1, 2
    raise CapabilityError(
        f"A learned drafter reads three different layers of the target, which has {num_layers}. "
        "Use a target with at least 3 layers, or switch the learned drafter off."
    )


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of an EAGLE-3 drafter.

    `taps` are the target's layers whose inputs are read. `window` bounds the context: the query
    of pair t sees the pairs j with t - window < j <= t, and the steps drafted from t itself.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, int, int]
    window: int

    def __post_init__(self) -> None:
        """Refuse shapes that cannot work."""
        if self.window < 1:
            raise ConfigError(f"The drafter's window is {self.window}; it must be at least 1.")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(
                f"The draft vocabulary has {self.draft_vocab_size} tokens; allowed are 1 to the "
                f"target's {self.vocab_size}."
            )
        if len(set(self.taps)) != 3 or list(self.taps) != sorted(self.taps):
            raise ConfigError(
                f"taps = {list(self.taps)}; three different layer indices in rising order are "
                "needed."
            )

    @staticmethod
    def for_target(
        target: DecoderConfig,
        draft_vocab_size: int,
        window: int,
        taps: Sequence[int] | None = None,
    ) -> DrafterConfig:
        """The shape that fits `target`: one of its own layers, with a wider attention input.

        Targets with fewer than 8192 tokens get the full vocabulary, others at most
        `draft_vocab_size`.
        """
        first, middle, last = default_taps(target.num_layers) if taps is None else taps
        if not 0 <= first < target.num_layers or not 0 <= last < target.num_layers:
            raise ConfigError(
                f"taps = {[first, middle, last]}; the target has layers 0 to "
                f"{target.num_layers - 1}."
            )
        small = target.vocab_size < FULL_VOCABULARY_BELOW
        return DrafterConfig(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=target.rope_scaling,
            vocab_size=target.vocab_size,
            draft_vocab_size=(
                target.vocab_size if small else min(draft_vocab_size, target.vocab_size)
            ),
            taps=(first, middle, last),
            window=window,
        )

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of the query, key and value parts of the fused projection."""
        kv = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv, kv

    def rope_table(self, num_positions: int, dtype: torch.dtype) -> Tensor:
        """Cosines and sines `[2, num_positions, E]`, the target's own; pair t has position t."""
        decoder = DecoderConfig(
            family="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
        )
        return rope_table(decoder, num_positions, dtype)


class DrafterWeights(NamedTuple):
    """The trainable tensors, matrices of the same input fused, in one dtype.

    Shapes: fc `[D, 3*Dt]`, qkv `[(H+2G)*E, 2D]`, o `[D, H*E]`, gate_up `[2I, D]`, down `[D, I]`,
    head `[Vd, D]`, norms `[D]`.
    """

    fc: Tensor
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    head: Tensor
    input_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    norm: Tensor


# Which state-dict tensors each fused tensor stacks, top to bottom.
FUSED: dict[str, tuple[str, ...]] = {
    "fc": ("fc.weight",),
    "qkv": tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"),
    "o": ("midlayer.self_attn.o_proj.weight",),
    "gate_up": ("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"),
    "down": ("midlayer.mlp.down_proj.weight",),
    "head": ("lm_head.weight",),
    "input_norm": ("midlayer.input_layernorm.weight",),
    "hidden_norm": ("midlayer.hidden_norm.weight",),
    "post_norm": ("midlayer.post_attention_layernorm.weight",),
    "norm": ("norm.weight",),
}


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query, key, value = config.qkv_sizes
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, query, bias=False)
        self.k_proj = nn.Linear(width, key, bias=False)
        self.v_proj = nn.Linear(width, value, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)


class Eagle3Drafter(nn.Module):
    """Parameters of the drafter under their checkpoint names.

    `drafter.unroll` computes with them in training, `drafter.learned` when serving; a test holds
    the two together. Buffers: `d2t [Vd]` int64 with target id = draft id + d2t[draft id]; `t2d [V]`
    bool, True for target ids in the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # The first ids, until `set_vocabulary` says better. No values are read: works on "meta".
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    @property
    def draft_ids(self) -> Tensor:
        """Target ids `[Vd]` of the draft vocabulary, rising."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, ids: Tensor) -> None:
        """Make `ids [Vd]` (int64, strictly rising) the draft vocabulary.

        Raises: ConfigError if the ids do not fit the configuration.
        """
        config = self.config
        ids = ids.to(self.d2t.device)
        if ids.shape != self.d2t.shape or bool((ids.diff() <= 0).any()):
            raise ConfigError(
                f"The draft vocabulary must be {config.draft_vocab_size} different ids in rising "
                f"order; got {len(ids)}."
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
            raise ConfigError(
                f"The draft vocabulary spans ids {int(ids[0])} to {int(ids[-1])}; the target has "
                f"0 to {config.vocab_size - 1}."
            )
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    def teacher_rows(self, head: Tensor) -> Tensor:
        """The rows `[Vd, D]` of the target's `head [V, D]` for the draft vocabulary, a copy."""
        return head.detach()[self.draft_ids.to(head.device)]

    def fused(self, dtype: torch.dtype) -> DrafterWeights:
        """Copies of the trainable tensors in `dtype`, fused, without gradient."""
        named = dict(self.named_parameters())
        return DrafterWeights(
            **{
                fused: torch.cat([named[name].detach() for name in names]).to(dtype)
                for fused, names in FUSED.items()
            }
        )

    @staticmethod
    def from_target(config: DrafterConfig, target: Decoder, vocabulary: Tensor) -> Eagle3Drafter:
        """A drafter that starts as the target's last layer and head, in float32.

        It reads the last tap unchanged and ignores the embedding until training says otherwise.
        Parts that the target has not (a gated MLP), or has in another shape, start as small normal
        noise; biases and norms of queries and keys are left out.
        """
        drafter = Eagle3Drafter(config).to(target.head_weight.device)
        drafter.set_vocabulary(vocabulary)
        _initialise(drafter, target)
        return drafter


def choose_draft_vocabulary(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """The `size` most frequent ids, rising, with the ids of `always` among them.

    Shapes: counts `[V]`; returns int64 `[size]`. Among equal counts the lowest ids win, so the
    choice is the same on every worker.

    Raises: ConfigError if `always` has more than `size` ids or ids outside the vocabulary.
    """
    forced = sorted(set(always))
    if len(forced) > size or size > len(counts):
        raise ConfigError(
            f"A draft vocabulary of {size} ids must hold {len(forced)} forced ids and cannot "
            f"exceed the target's {len(counts)}."
        )
    if forced and not 0 <= forced[0] <= forced[-1] < len(counts):
        raise ConfigError(
            f"Forced ids {forced} are outside the vocabulary of {len(counts)} tokens."
        )
    rank = counts.to(torch.float64).clone()
    rank[forced] = torch.inf
    order = torch.sort(rank, descending=True, stable=True).indices
    return order[:size].sort().values


@torch.no_grad()
def _initialise(drafter: Eagle3Drafter, target: Decoder) -> None:
    config, source = drafter.config, cast(Block, target.layers[-1]).weights()
    width = config.hidden_size
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.02)
    if config.target_hidden_size == width:
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -width:] = torch.eye(width, device=drafter.fc.weight.device)
        _take(drafter.midlayer.hidden_norm.weight, source.input_norm)
        _take(drafter.midlayer.post_attention_layernorm.weight, source.post_norm)
        _take(drafter.norm.weight, target.norm.weight)
        _take(drafter.lm_head.weight, target.head_weight[drafter.draft_ids])
    attention = drafter.midlayer.self_attn
    parts = torch.split(source.qkv, list(target.config.qkv_sizes))
    heads = (attention.q_proj, attention.k_proj, attention.v_proj)
    for linear, part in zip(heads, parts, strict=True):
        if linear.weight[:, width:].shape == part.shape:
            linear.weight.zero_()
            linear.weight[:, width:] = part
    _take(attention.o_proj.weight, source.out)
    if target.config.activation == "swiglu":
        gate, up = source.up.chunk(2)
        _take(drafter.midlayer.mlp.gate_proj.weight, gate)
        _take(drafter.midlayer.mlp.up_proj.weight, up)
        _take(drafter.midlayer.mlp.down_proj.weight, source.down)


def _take(into: Tensor, value: Tensor) -> None:
    if into.shape == value.shape:
        into.copy_(value)
