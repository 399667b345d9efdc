"""What grades say about a model: means with standard errors, pass@k, paired differences.

Samples of one prompt are not independent, so errors are clustered by prompt: every prompt has
equally many samples, and then the clustered standard error of the mean is that of the prompts'
means.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def paired_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of after - before over prompts."""
    gains = [b - a for a, b in zip(before, after, strict=True)]
    return statistics.fmean(gains), standard_error(gains)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` responses is right.

    Of all ways to pick k of the samples, the share that holds a right one. Source: Chen et al.
    2021, https://arxiv.org/abs/2107.03374, equation 1.

    Example: `pass_at_k(4, 1, 2)` gives 0.5.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
