"""Sums over the tokens of one policy update, kept on the device until its end.

Shape letters: N tokens of the loss in one micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratoon.rl.kl import kl_divergence
from ratoon.rl.losses import PolicyLoss
from ratoon.training.data_parallel import DataParallel

_SUMS = (
    "loss", "trained_tokens", "tokens", "ratio", "clipped_low", "clipped_high", "entropy",
    "change", "kl", "kl_tokens", "difference", "equal", "compared",
    "mismatch", "capped", "weighted",
)  # fmt: skip
_MAXIMA = ("ratio", "difference")


class PolicyMetrics:
    """Adds up micro-batches; `summary` reduces over workers. Host-device syncs: `summary` alone."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(self, policy: PolicyLoss, loss: Tensor, num_trained_tokens: int) -> None:
        """One micro-batch: its token losses and share of the loss."""
        self._add("loss", loss.detach())
        self._add("trained_tokens", num_trained_tokens)
        self._add("tokens", len(policy.ratios))
        self._add("ratio", policy.ratios.sum())
        self._add("clipped_low", policy.clipped_low.sum())
        self._add("clipped_high", policy.clipped_high.sum())
        self._maximum("ratio", policy.ratios.max())

    def add_distribution(
        self, logprobs: Tensor, old_logprobs: Tensor, entropies: Tensor | None
    ) -> None:
        """Log-probabilities `[N]` now and before the update; exact entropies `[N]` if known."""
        now = logprobs.detach()
        self._add("entropy", (-now if entropies is None else entropies.detach()).sum())
        self._add("change", kl_divergence(old_logprobs, now, "k3").sum())

    def add_mismatch(self, weights: Tensor, cap: float) -> None:
        """Weights `[N]` of the tokens by engine and trainer, cut at `cap`."""
        self._add("mismatch", weights.sum())
        self._add("capped", (weights == cap).sum())
        self._add("weighted", len(weights))

    def add_divergence(self, divergence: Tensor) -> None:
        """Estimated divergence from the reference `[N]`."""
        self._add("kl", divergence.detach().sum())
        self._add("kl_tokens", len(divergence))

    def compare(self, logprobs: Tensor, engine_logprobs: Tensor) -> None:
        """Log-probabilities `[N]` of the trainer and of the engine; NaN where there is none."""
        ours, theirs = logprobs.detach().float(), engine_logprobs.float()
        is_known = ~theirs.isnan()
        difference = torch.where(is_known, (ours - theirs).abs(), 0.0)
        self._add("difference", difference.sum())
        self._add("equal", (ours == theirs).sum())
        self._add("compared", is_known.sum())
        self._maximum("difference", difference.max())

    def summary(self, workers: DataParallel, num_steps: int) -> dict[str, float]:
        """Means over the tokens of all workers; keys with nothing to measure are left out."""
        total = dict(zip(_SUMS, workers.sum_(self._sums.clone()).tolist(), strict=True))
        largest = dict(zip(_MAXIMA, workers.max_(self._maxima.clone()).tolist(), strict=True))
        summary = {
            "policy/loss": total["loss"] / num_steps,
            "policy/tokens": total["trained_tokens"],
        }
        if total["tokens"]:
            summary |= {
                "policy/ratio_mean": total["ratio"] / total["tokens"],
                "policy/ratio_max": largest["ratio"],
                "policy/clip_frac": (total["clipped_low"] + total["clipped_high"])
                / total["tokens"],
                "policy/clip_low_frac": total["clipped_low"] / total["tokens"],
                "policy/clip_high_frac": total["clipped_high"] / total["tokens"],
                "policy/approx_kl": total["change"] / total["tokens"],
                "policy/entropy": total["entropy"] / total["tokens"],
            }
        if total["kl_tokens"]:
            summary["policy/kl"] = total["kl"] / total["kl_tokens"]
        if total["compared"]:
            summary |= {
                "policy/engine_logprob_diff_mean": total["difference"] / total["compared"],
                "policy/engine_logprob_diff_max": largest["difference"],
                "policy/engine_logprob_equal_frac": total["equal"] / total["compared"],
            }
        if total["weighted"]:
            summary |= {
                "policy/mismatch_weight_mean": total["mismatch"] / total["weighted"],
                "policy/mismatch_capped_frac": total["capped"] / total["weighted"],
            }
        return summary

    def _add(self, name: str, value: Tensor | float) -> None:
        self._sums[_SUMS.index(name)] += value

    def _maximum(self, name: str, value: Tensor) -> None:
        place = _MAXIMA.index(name)
        self._maxima[place] = torch.maximum(self._maxima[place], value.double())
