"""How a drafter fares on recorded responses: accepted drafts by depth, tokens per verification.

Responses to one prompt are alike, so intervals resample prompts with all their responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ratoon.drafter.model import Eagle3Drafter
from ratoon.offline.recorded import Source, entropy
from ratoon.offline.rejection import token_reach
from ratoon.offline.responses import Counts, Responses, wide_tree
from ratoon.rollout.native.engine import Finished
from ratoon.speculation.calibration import Calibration
from ratoon.speculation.proposer import CoupledProposer

_RESAMPLES = 10_000


def acceptance(
    source: Source,
    drafter: Eagle3Drafter,
    finished: Sequence[Finished],
    temperature: float,
    nodes: int,
) -> list[dict[str, Any]]:
    """A row for a coupled tree of `nodes` and one for a chain, as JSON values.

    The chain is verified by rejection sampling, token by token, as serving engines do. At each
    depth `accepted` is the share of drafts accepted there of those tried: the ones before them were
    accepted, and the response goes on; None where none was tried.
    """
    responses = Responses(source, drafter, finished, temperature)
    tree = responses.tree_step(CoupledProposer, wide_tree(nodes), Calibration())
    chain = responses.chain_step(token_reach) if temperature else responses.greedy_chain_step()
    prompts = [item.completion.prompt_ids for item in finished]
    shared = {
        "temperature": temperature,
        "responses": len(finished),
        "prompts": len(set(prompts)),
        "entropy_per_token": entropy(finished),
    }
    return [
        shared | {"way": way} | _figures(responses.walk(step), prompts)
        for way, step in (("tree", tree), ("chain", chain))
    ]


def _figures(counts: Counts, prompts: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    found = _ratio(counts.tokens, counts.steps, prompts)
    assert found is not None
    mean, low, high = found
    depths = zip(counts.accepted.unbind(1), counts.tried.unbind(1), strict=True)
    shares = [_ratio(accepted, tried, prompts) for accepted, tried in depths]
    return {
        "tokens": int(counts.tokens.sum()),
        "tokens_per_verification": mean,
        "low": low,
        "high": high,
        "tried": counts.tried.sum(0).tolist(),
        "accepted": [None if share is None else share[0] for share in shares],
        "accepted_low": [None if share is None else share[1] for share in shares],
        "accepted_high": [None if share is None else share[2] for share in shares],
    }


def _ratio(
    above: Tensor, below: Tensor, prompts: Sequence[tuple[int, ...]]
) -> tuple[float, float, float] | None:
    """Ratio of sums `[B]` with its 95 % bootstrap interval over prompts; None without any."""
    if not below.any():
        return None
    _, cluster = np.unique([hash(prompt) for prompt in prompts], return_inverse=True)
    sums = np.stack([np.bincount(cluster, weights=part.numpy()) for part in (above, below)])
    count = sums.shape[1]
    draws = np.random.default_rng(0).integers(0, count, size=(_RESAMPLES, count))
    tops, bottoms = sums[:, draws].sum(axis=2)
    low, high = np.quantile(tops[bottoms > 0] / bottoms[bottoms > 0], [0.025, 0.975])
    return float(above.sum() / below.sum()), float(low), float(high)
