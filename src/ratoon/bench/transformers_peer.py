"""The same weights decoded by transformers: `generate`, prompt lookup, assisted generation."""

from __future__ import annotations

import inspect
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratoon.bench.live import TOKENS, LiveRows
from ratoon.errors import CapabilityError

PROMPT_LOOKUP_TOKENS = 10


class TransformersPeer:
    """Tokens per second of `generate`, from its first step's end to its last one's.

    So neither prefill nor an assistant's start counts. `generate` itself goes on from keys and
    values that were computed before; its assisted modes do not know how to, and prefill.
    """

    def __init__(self, model: Path, dtype: torch.dtype, assistant: Path | None = None) -> None:
        """Raises: CapabilityError without transformers."""
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError:
            raise CapabilityError(
                "The peers need transformers, which is not installed: pip install transformers."
            ) from None
        # It warns of its own settings for assistants, and draws bars.
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        load = AutoModelForCausalLM.from_pretrained
        self._model = load(str(model), dtype=dtype).eval()
        # A response goes on behind an end of sequence, as ours do.
        self._model.generation_config.eos_token_id = None
        self._assistant = None if assistant is None else load(str(assistant), dtype=dtype).eval()

    def generate(self, live: LiveRows, size: int, temperature: float, number: int) -> float:
        """Plain decoding of the first `size` rows."""
        return self._rate(live, size, temperature, number, **self.behind(live, size))

    def prompt_lookup(self, live: LiveRows, temperature: float, number: int) -> float:
        """The first row, guessing by repeats of its own last tokens."""
        return self._rate(
            live, 1, temperature, number, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS
        )

    def assisted(self, live: LiveRows, temperature: float, number: int) -> float:
        """The first row, guessing by the assistant."""
        return self._rate(live, 1, temperature, number, assistant_model=self._assistant)

    def behind(self, live: LiveRows, size: int) -> dict[str, Any]:
        """The argument, under its name in this version, that spares the prefill."""
        parameters = inspect.signature(type(self._model).forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        return {name: _their_cache(live, size)}

    def _rate(
        self, live: LiveRows, size: int, temperature: float, number: int, **mode: Any
    ) -> float:
        stamps = _Stamps()
        ids = torch.tensor(live.prompts[:size])
        chosen: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            chosen |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=TOKENS,
                pad_token_id=0,
                stopping_criteria=[stamps],
                **chosen,
                **mode,
            )
        (started, first), (ended, last) = stamps.seen[0], stamps.seen[-1]
        return size * (last - first) / (ended - started)


class _Stamps:
    """When each step of `generate` ended, and how long the sequences then were; stops nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.seen.append((time.perf_counter(), input_ids.shape[1]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _their_cache(live: LiveRows, size: int) -> Any:
    """All but the last token of the prompts, as our own engine has computed them.

    Views, which `generate` does not write to; prompts must be of one length.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    data = live.rows.cache.data[:, :, :size, : len(live.prompts[0]) - 1].transpose(3, 4)
    for layer, (keys, values) in enumerate(data.unbind(1)):
        cache.update(keys, values, layer)
    return cache
