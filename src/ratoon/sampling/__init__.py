"""Sampling: keyed noise, the transforms that make p from logits, and keyed selection."""

from ratoon.sampling.keyed_noise import exponential, row_keys, sequence_key, sequence_keys
from ratoon.sampling.select import Selector
from ratoon.sampling.transforms import check_params, transform

__all__ = [
    "Selector",
    "check_params",
    "exponential",
    "row_keys",
    "sequence_key",
    "sequence_keys",
    "transform",
]
