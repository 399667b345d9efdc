"""The learned drafter at inference: drafting on a bounded window, over many rows at once.

It computes what training computes (`drafter.model`), on prepacked weights: pair t reads the feature
of token t and the embedding of token t+1, at position t. Nodes drafted from pair t follow at
positions t+1, t+2, ... and read the drafter's own output of their parent in place of a feature.

Shape letters: B live rows, R all rows, M pairs of a row, F frontier nodes, D drafter width, G
key/value heads, E head width, S slots, Vd draft vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ratoon.drafter.model import DrafterConfig, DrafterWeights, Eagle3Drafter
from ratoon.errors import CapabilityError
from ratoon.models.decoder import apply_rope
from ratoon.models.graph_pool import GraphPool, Outputs, Padded, bucket
from ratoon.models.prepacked import PackedLinear

# Pairs of a row that one pass extends by. The ring has as many slots beyond the window, so that a
# pass never overwrites what its first pair still reads.
CHUNK = 64


class _Weights(NamedTuple):
    fc: PackedLinear
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    head: PackedLinear
    input_norm: Tensor
    hidden_norm: Tensor
    post_norm: Tensor
    norm: Tensor
    embedding: Tensor

    def tensors(self) -> list[Tensor]:
        """All of them but the embedding, which is the target's."""
        parts = [part.tensors() if isinstance(part, PackedLinear) else [part] for part in self[:-1]]
        return [tensor for tensors in parts for tensor in tensors]


class LearnedDrafter:
    """Drafts with an EAGLE-3 head; a `LogitsDrafter` of the speculation package.

    Keys and values of a row's committed pairs lie in a ring over positions; those of drafted nodes
    lie in front of it, newest first, and are dropped when the next step begins. Live rows are
    0..B-1. All memory is allocated at construction.

    A row's context may have gaps: pairs that were not observed are simply not attended to.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        num_rows: int,
        num_positions: int,
        num_tree_slots: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_tree_slots` bounds the nodes that get children: beam * (depth - 1)."""
        self.config = config
        self._dtype = dtype
        self._graphs: GraphPool | None = None
        self._tree_slots = num_tree_slots
        self._ring = config.window + CHUNK
        # One more slot takes what is written for padding.
        num_slots = num_tree_slots + self._ring + 1
        shape = (num_rows, config.num_kv_heads, num_slots, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._slot_positions = torch.full((num_rows, self._ring + 1), -1, device=device)
        self._last_positions = torch.full((num_rows,), -1, device=device)
        self._last_outputs = torch.zeros(num_rows, config.hidden_size, dtype=dtype, device=device)
        self._rope = config.rope_table(num_positions, dtype).to(device)
        self._weights: _Weights | None = None
        self._draft_ids = torch.zeros(0, dtype=torch.int64, device=device)
        # The tree being drafted: outputs of the frontier, who attends to which tree slot, and the
        # ring's mask, which all nodes share.
        self._outputs = self._last_outputs[:, None]
        self._ancestors = torch.zeros(0, 0, 0, dtype=torch.bool, device=device)
        self._context = torch.zeros(0, 0, 0, dtype=torch.bool, device=device)
        self._depth = 0

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 `[Vd]`."""
        return self._draft_ids

    def use_graphs(self, graphs: GraphPool) -> None:
        """Replay passes whose shapes were met before; their memory must not move from here on."""
        self._graphs = graphs

    @torch.no_grad()
    def load(self, drafter: Eagle3Drafter, embedding: Tensor) -> None:
        """Take new weights and the target's live `embedding [V, D]` (kept by reference).

        The context of all rows is forgotten, since keys of other weights mislead the new ones:
        observe the window's pairs again, or draft nothing until new ones come.
        Cost: a copy and a reordering of all matrices (about 20 ms for 10M parameters).
        """
        device = self._keys.device
        fused = DrafterWeights(*(tensor.to(device) for tensor in drafter.fused(self._dtype)))
        weights = _Weights(
            fc=PackedLinear(fused.fc),
            qkv=PackedLinear(fused.qkv),
            o=PackedLinear(fused.o),
            gate_up=PackedLinear(fused.gate_up),
            down=PackedLinear(fused.down),
            head=PackedLinear(fused.head),
            input_norm=fused.input_norm,
            hidden_norm=fused.hidden_norm,
            post_norm=fused.post_norm,
            norm=fused.norm,
            embedding=embedding.detach(),
        )
        if self._graphs is None:
            self._weights = weights
        else:
            self._load_in_place(weights, self._graphs)
        self._draft_ids = drafter.draft_ids.to(device)
        for row in range(self._keys.shape[0]):
            self.reset_row(row)

    def _load_in_place(self, weights: _Weights, graphs: GraphPool) -> None:
        """Graphs read the memory that they were captured with, the target's embedding too."""
        old = self._weights
        if old is None or old.embedding.data_ptr() != weights.embedding.data_ptr():
            self._weights = weights
            graphs.drop()
            return
        with torch.inference_mode():
            for target, source in zip(old.tensors(), weights.tensors(), strict=True):
                target.copy_(source)

    def reset_row(self, row: int) -> None:
        """Forget a row's context, before another response takes the row."""
        # Masked slots are multiplied by zero, so what they hold must be finite.
        self._keys[row] = 0
        self._values[row] = 0
        self._slot_positions[row] = -1
        self._last_positions[row] = -1
        self._last_outputs[row] = 0

    def move_row(self, source: int, target: int) -> None:
        """Copy a row's context to another row."""
        for state in (
            self._keys,
            self._values,
            self._slot_positions,
            self._last_positions,
            self._last_outputs,
        ):
            state[target] = state[source]

    @torch.no_grad()
    def observe(
        self,
        features: Tensor,
        next_tokens: Tensor,
        positions: Tensor,
        counts: Tensor,
        longest: int | None = None,
    ) -> None:
        """Extend the context of rows 0..B-1 by committed pairs, oldest first.

        A step's new tokens and the catch-up after a plain phase are the same call; in a catch-up
        the pairs of the last `window` tokens are enough.

        Shapes: `features [B, M, 3 * Dt]`, `next_tokens [B, M]`, `positions [B, M]` (of the
        features' tokens, rising along a row), `counts [B]`: pairs of each row, the rest is padding.
        `longest` is the largest of `counts`, if known.
        Cost: one pass of the layer per 64 pairs of the longest row. Host-device syncs: one for the
        width, none with graphs, which see the whole ring; one where `longest` is not known.
        """
        if longest is None:
            longest = int(counts.max())
        if longest == 0:
            return
        width = self._width(positions[:, :longest])
        for start in range(0, longest, CHUNK):
            part = slice(start, min(start + CHUNK, longest))
            pairs = (features[:, part], next_tokens[:, part], positions[:, part], counts - start)
            if self._graphs is None:
                self._observe_chunk(width, *pairs)
                continue
            shape = (self._bucket_of(len(counts)), bucket(part.stop - start, CHUNK))
            padded = [Padded(x, (*shape, *x.shape[2:])[: x.dim()]) for x in pairs]
            self._graphs.run("observe", partial(self._observe_chunk, width), padded)

    @torch.no_grad()
    def root(self, num_rows: int) -> Tensor:
        """Logits `[B, 1, Vd]` for the children of the roots of rows 0..B-1.

        They come from each row's last observed pair; a row without one has logits -inf.
        Cost: the head over B rows, one host-device sync; with graphs none.
        """
        last = self._last_positions[:num_rows]
        width = self._width(last)
        self._outputs = self._last_outputs[:num_rows, None]
        self._context = self._visible(last[:, None], width)
        self._ancestors = last.new_zeros((num_rows, 1, 0), dtype=torch.bool)
        self._depth = 0
        return self._logits(self._outputs).masked_fill((last < 0)[:, None, None], -torch.inf)

    @torch.no_grad()
    def advance(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[B, F, Vd]` for the children of the next frontier.

        Shapes: `tokens [B, F]`; `parents [B, F]` index the frontier before (the root at first).
        Cost: one pass of the layer and the head over B * F rows; no host-device syncs. There is a
        graph for each level, number of nodes and bucket of rows.
        Raises: CapabilityError where the tree outgrows `num_tree_slots`.
        """
        num_rows, num_nodes = tokens.shape
        used = self._ancestors.shape[2]
        if used + num_nodes > self._tree_slots:
            raise CapabilityError(
                f"the draft tree expands {used + num_nodes} nodes, but this drafter has "
                f"{self._tree_slots} tree slots; make the strategy's beam * (depth - 1) smaller"
            )
        self._depth += 1
        positions = (self._last_positions[:num_rows] + self._depth).clamp_min(0)
        inputs = (self._outputs, self._ancestors, self._context, positions, parents, tokens)
        if self._graphs is None:
            logits, self._outputs, self._ancestors = self._expand(*inputs)
            return logits
        size = self._bucket_of(num_rows)
        padded = [Padded(x, (size, *x.shape[1:])) for x in inputs]
        outputs = self._graphs.run("expand", self._expand, padded)
        logits, self._outputs, self._ancestors = (x[:num_rows] for x in outputs)
        return logits

    def _expand(
        self,
        outputs: Tensor,
        ancestors: Tensor,
        context: Tensor,
        positions: Tensor,
        parents: Tensor,
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the next frontier, and what becomes of `outputs` and `ancestors`."""
        num_rows, num_nodes = tokens.shape
        used = ancestors.shape[2]
        hidden = outputs.gather(1, parents.unsqueeze(2).expand(-1, -1, outputs.shape[2]))
        query, key, value = self._project(hidden, tokens, positions[:, None].expand(-1, num_nodes))

        first = self._tree_slots - used - num_nodes
        self._keys[:num_rows, :, first : first + num_nodes] = key.transpose(1, 2)
        self._values[:num_rows, :, first : first + num_nodes] = value.transpose(1, 2)
        itself = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device)
        inherited = ancestors.gather(1, parents.unsqueeze(2).expand(-1, -1, used))
        ancestors = torch.cat([itself.expand(num_rows, -1, -1), inherited], dim=2)
        mask = torch.cat([ancestors, context.expand(-1, num_nodes, -1)], dim=2)

        outputs = self._finish(hidden, query, mask, first)
        return self._logits(outputs), outputs, ancestors

    def _bucket_of(self, num_rows: int) -> int:
        return bucket(num_rows, self._keys.shape[0])

    def _width(self, positions: Tensor) -> int:
        """Ring slots in use up to `positions`; with graphs, whose shapes must be few, all."""
        if self._graphs is not None:
            return self._ring
        return min(self._ring, int(positions.max()) + 1)

    def _observe_chunk(
        self, width: int, features: Tensor, next_tokens: Tensor, positions: Tensor, counts: Tensor
    ) -> Outputs:
        """One pass over `[B, M]` pairs, M at most CHUNK; `counts` may be negative or above M."""
        num_rows, num_pairs = next_tokens.shape
        rows = torch.arange(num_rows, device=counts.device)[:, None]
        is_pair = torch.arange(num_pairs, device=counts.device) < counts[:, None]
        positions = torch.where(is_pair, positions, 0)
        hidden = self._loaded.fc(features.flatten(0, 1).to(self._dtype))
        hidden = hidden.unflatten(0, (num_rows, num_pairs))
        query, key, value = self._project(hidden, next_tokens.clamp_min(0), positions)

        slots = torch.where(is_pair, positions % self._ring, self._ring)
        self._keys[rows, :, self._tree_slots + slots] = key
        self._values[rows, :, self._tree_slots + slots] = value
        self._slot_positions[rows, slots] = positions

        # Padding must attend to something, or its softmax would be over nothing.
        mask = self._visible(positions, width) | ~is_pair.unsqueeze(2)
        outputs = self._finish(hidden, query, mask, self._tree_slots)
        last = (counts - 1).clamp(0, num_pairs - 1)
        is_new = counts > 0
        self._last_outputs[:num_rows] = torch.where(
            is_new[:, None], outputs[rows[:, 0], last], self._last_outputs[:num_rows]
        )
        self._last_positions[:num_rows] = torch.where(
            is_new, positions[rows[:, 0], last], self._last_positions[:num_rows]
        )
        return ()

    def _visible(self, positions: Tensor, width: int) -> Tensor:
        """Which ring slots the pairs at `positions [B, M]` see, bool `[B, M, width]`."""
        slots = self._slot_positions[: positions.shape[0], None, :width]
        positions = positions.unsqueeze(2)
        return (slots >= 0) & (slots <= positions) & (slots > positions - self.config.window)

    def _project(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries `[B, M, H, E]`, rotated keys and values `[B, M, G, E]`."""
        config, weights = self.config, self._loaded
        size, eps = (config.hidden_size,), config.rms_norm_eps
        embedded = F.embedding(tokens, weights.embedding).to(self._dtype)
        joined = torch.cat(
            [
                F.rms_norm(embedded, size, weights.input_norm, eps),
                F.rms_norm(hidden, size, weights.hidden_norm, eps),
            ],
            dim=-1,
        )
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        parts = weights.qkv(joined.flatten(0, 1)).view(*tokens.shape, sum(heads), config.head_dim)
        query, key, value = parts.split(heads, dim=2)
        cosines, sines = self._rope[:, positions].unsqueeze(3)
        return apply_rope(query, cosines, sines), apply_rope(key, cosines, sines), value

    def _finish(self, hidden: Tensor, query: Tensor, mask: Tensor, first_slot: int) -> Tensor:
        """Attention over the slots from `first_slot` on, then the MLP: outputs `[B, M, D]`."""
        config, weights = self.config, self._loaded
        num_rows, num_pairs = query.shape[:2]
        slots = slice(first_slot, first_slot + mask.shape[2])
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            self._keys[:num_rows, :, slots],
            self._values[:num_rows, :, slots],
            attn_mask=mask.unsqueeze(1),
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        x = hidden.flatten(0, 1) + weights.o(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        normed = F.rms_norm(x, (config.hidden_size,), weights.post_norm, config.rms_norm_eps)
        gate, up = weights.gate_up(normed).chunk(2, dim=-1)
        x = x + weights.down(F.silu(gate) * up)
        return x.view(num_rows, num_pairs, -1)

    def _logits(self, outputs: Tensor) -> Tensor:
        weights = self._loaded
        size = (self.config.hidden_size,)
        normed = F.rms_norm(outputs.flatten(0, 1), size, weights.norm, self.config.rms_norm_eps)
        return weights.head(normed).view(*outputs.shape[:2], -1)

    @property
    def _loaded(self) -> _Weights:
        if self._weights is None:
            raise RuntimeError("the learned drafter has no weights; call load() first")
        return self._weights
