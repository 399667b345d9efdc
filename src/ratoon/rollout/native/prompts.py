"""Prompts on their way into the slots: a group's prompt is computed once, short ones together.

All tokens of a prompt but the last are prefilled; the last is the root of the first decode step.
A pass takes a chunk of one long prompt, or several short prompts side by side: reading the weights
costs as much as computing a hundred tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import islice

import torch
from torch import Tensor

from ratoon.models.kv_cache import attention_width
from ratoon.records import Request
from ratoon.rollout.native.forward import InferenceModel, attention_mask
from ratoon.rollout.native.rows import Rows


class PromptQueue:
    """Requests that wait for a slot, in order, and the prompts that several of them share."""

    def __init__(self, model: InferenceModel, rows: Rows, chunk: int) -> None:
        """`chunk` bounds the tokens of a pass, padding included."""
        self._model = model
        self._rows = rows
        self._chunk = chunk
        self._waiting: deque[Request] = deque()
        self._siblings: Counter[tuple[int, ...]] = Counter()
        self._computed: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        self._done = 0
        self.computed_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Queue a request behind the others."""
        self._waiting.append(request)
        self._siblings[request.prompt_ids] += 1

    def use_model(self, model: InferenceModel) -> None:
        """Read other weights from here on; prompts computed with the old ones are forgotten."""
        self._model = model
        self._computed.clear()
        self._done = 0

    def advance(self, slot: int, num_free: int) -> Request | None:
        """Put the first waiting request into a free slot, with at most one pass of the model.

        Returns the request once its prompt is complete. `slot`, the first of `num_free` free ones,
        must stay the same until then.
        """
        request = self._waiting[0]
        prompt = request.prompt_ids
        stored = self._computed.get(prompt)
        if stored is not None:
            self._restore(slot, stored)
        elif not self._compute(slot, num_free):
            return None
        self._waiting.popleft()
        self._siblings[prompt] -= 1
        if self._siblings[prompt] == 0:
            del self._siblings[prompt]
            self._computed.pop(prompt, None)
        elif stored is None:
            self._store(slot, prompt)
        return request

    def _compute(self, slot: int, num_free: int) -> bool:
        """One pass; whether the first waiting prompt, which lies in `slot`, is complete."""
        prompts = self._next_prompts(num_free)
        length = max(len(prompt) for prompt in prompts) - 1
        end = min(self._done + self._chunk, length)
        if end > self._done:
            self._prefill(slot, prompts, self._done, end)
        for place, prompt in enumerate(prompts[1:], start=1):
            self._store(slot + place, prompt)
        self._done = end if end < length else 0
        return end == length

    def _next_prompts(self, num_free: int) -> list[tuple[int, ...]]:
        """The first waiting prompt, and different ones behind it that fit into the same pass."""
        prompts = [self._waiting[0].prompt_ids]
        longest = len(prompts[0])
        for request in islice(self._waiting, 1, num_free):
            prompt = request.prompt_ids
            longest = max(longest, len(prompt))
            if (longest - 1) * (len(prompts) + 1) > self._chunk:
                break
            if prompt not in self._computed and prompt not in prompts:
                prompts.append(prompt)
        return prompts

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

    def _prefill(self, slot: int, prompts: list[tuple[int, ...]], start: int, end: int) -> None:
        """Compute tokens `start` to `end - 1` of prompts in neighbouring slots.

        What is computed behind a shorter prompt's end is never read.
        """
        rows, model = self._rows, self._model
        device = rows.lengths.device
        num_rows, num_new = len(prompts), end - start
        self.computed_tokens += num_rows * num_new
        tokens = torch.tensor(
            [(prompt[start:end] + (0,) * num_new)[:num_new] for prompt in prompts], device=device
        )
        positions = torch.arange(start, end, device=device).expand(num_rows, -1)
        first_entries = (
            torch.arange(slot, slot + num_rows, device=device) * rows.cache.num_positions
        )
        group = model.config.num_heads // model.config.num_kv_heads
        chain = torch.ones(num_new, num_new, dtype=torch.bool, device=device).tril()
        mask = attention_mask(
            positions[:, 0],
            chain.expand(num_rows, -1, -1),
            attention_width(end, model.dtype),
            group,
            model.dtype,
        )
        hidden, features = model.forward(
            tokens,
            positions,
            (first_entries[:, None] + positions).reshape(-1),
            mask,
            rows.cache,
            first_slot=slot,
        )
        if rows.hidden.shape[-1]:
            slots = slice(slot, slot + num_rows)
            rows.features[slots, start:end] = features.view(num_rows, num_new, -1)
            rows.hidden[slots, start:end] = hidden.view(num_rows, num_new, -1)
