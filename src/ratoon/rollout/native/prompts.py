"""Prompts on their way into the slots: a group's prompt is computed once, in chunks.

All tokens of a prompt but the last are prefilled; the last is the root of the first decode step.
"""

from __future__ import annotations

from collections import Counter, deque

import torch
from torch import Tensor

from ratoon.models.kv_cache import round_up_width
from ratoon.records import Request
from ratoon.rollout.native.forward import InferenceModel, attention_mask
from ratoon.rollout.native.rows import Rows


class PromptQueue:
    """Requests that wait for a slot, in order, and the prompts that several of them share."""

    def __init__(self, model: InferenceModel, rows: Rows, chunk: int) -> None:
        self._model = model
        self._rows = rows
        self._chunk = chunk
        self._waiting: deque[Request] = deque()
        self._siblings: Counter[tuple[int, ...]] = Counter()
        self._computed: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        self._done = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Queue a request behind the others."""
        self._waiting.append(request)
        self._siblings[request.prompt_ids] += 1

    def drop_all(self) -> list[Request]:
        """Take back everything that has not started."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._siblings.clear()
        self._computed.clear()
        self._done = 0
        return waiting

    def use_model(self, model: InferenceModel) -> None:
        """Read other weights from here on; prompts computed with the old ones are forgotten."""
        self._model = model
        self._computed.clear()
        self._done = 0

    def advance(self, slot: int) -> Request | None:
        """Prefill one chunk of the first waiting request into a free slot.

        Returns the request once its prompt is complete. `slot` must stay the same until then.
        """
        request = self._waiting[0]
        prompt = request.prompt_ids
        stored = self._computed.get(prompt)
        if stored is not None:
            self._restore(slot, stored)
        else:
            end = min(self._done + self._chunk, len(prompt) - 1)
            if end > self._done:
                self._prefill(slot, prompt, self._done, end)
                self._done = end
            if end < len(prompt) - 1:
                return None
        self._done = 0
        self._waiting.popleft()
        self._siblings[prompt] -= 1
        if self._siblings[prompt] == 0:
            del self._siblings[prompt]
            self._computed.pop(prompt, None)
        elif stored is None:
            self._store(slot, prompt)
        return request

    def _store(self, slot: int, prompt: tuple[int, ...]) -> None:
        length = len(prompt) - 1
        self._computed[prompt] = (
            self._rows.cache.read_row(slot, length),
            self._rows.features[slot, :length].clone(),
            self._rows.hidden[slot, :length].clone(),
        )

    def _restore(self, slot: int, stored: tuple[Tensor, Tensor, Tensor]) -> None:
        entries, features, hidden = stored
        self._rows.cache.write_row(slot, entries)
        self._rows.features[slot, : len(features)] = features
        self._rows.hidden[slot, : len(hidden)] = hidden

    def _prefill(self, slot: int, prompt: tuple[int, ...], start: int, end: int) -> None:
        rows, model = self._rows, self._model
        device = rows.lengths.device
        positions = torch.arange(start, end, device=device)
        num_new = end - start
        group = model.config.num_heads // model.config.num_kv_heads
        ancestors = torch.ones(1, num_new, num_new, dtype=torch.bool, device=device).tril()
        mask = attention_mask(
            torch.tensor([start], device=device),
            ancestors,
            round_up_width(end),
            group,
            model.dtype,
        )
        hidden, features = model.forward(
            torch.tensor([prompt[start:end]], device=device),
            positions[None],
            slot * rows.cache.num_positions + positions,
            mask,
            rows.cache,
            first_slot=slot,
        )
        if rows.hidden.shape[-1]:
            rows.features[slot, start:end] = features
            rows.hidden[slot, start:end] = hidden
