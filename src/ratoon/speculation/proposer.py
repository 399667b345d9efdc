"""What a drafter must offer to take part in a draft tree, and how the noise reaches it.

A drafter knows nothing of noise: it offers either logits (`LogitsDrafter`) or retrieved candidates
with prior probabilities (`RetrievalDrafter`). The two adapters here couple what it offers to the
target's noise and turn it into a `Proposer`, which is all that `build_tree` knows.

Shape letters: B sequences, F frontier nodes, C children of a node, Vd draft vocabulary.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ratoon.sampling import keyed_noise
from ratoon.sampling.keyed_noise import NoiseTables
from ratoon.speculation import coupled


class Source(IntEnum):
    """Kinds of drafters that a tree can mix."""

    LEARNED = 0
    SUFFIX = 1


class StepNoise:
    """The target's noise for the positions that one draft step looks at, to drafting accuracy.

    `sequence_keys [B, 2]` are the responses' 128-bit keys; `t0 [B]` is the index, in the unpadded
    sequence, of the token that the root's children propose. The verifier draws from the same noise.
    `bias [V]` is what the target adds to each id's logit before temperature, if anything.
    """

    def __init__(
        self, sequence_keys: Tensor, t0: Tensor, temperature: float, bias: Tensor | None = None
    ) -> None:
        self.sequence_keys = sequence_keys
        self.t0 = t0
        self.temperature = temperature
        self._bias = bias
        self._tables: NoiseTables | None = None
        self._largest_id = 0

    @property
    def num_rows(self) -> int:
        """Number of sequences B."""
        return self.t0.shape[0]

    def prepare(self, num_depths: int, vocab_size: int) -> None:
        """Make the noise of `num_depths` positions from t0 on, for ids below `vocab_size`.

        `build_tree` calls this once: the tables are small and cost mostly their number of
        operations, which does not grow with the number of positions.
        """
        if self.temperature == 0:
            return
        positions = self.t0 + torch.arange(num_depths, device=self.t0.device)[:, None]
        keys = self.sequence_keys.repeat(num_depths, 1)
        row_keys = keyed_noise.row_keys(keys, positions.flatten())
        self._tables = keyed_noise.noise_tables(row_keys, vocab_size)
        self._largest_id = vocab_size - 1

    def bias_of(self, ids: Tensor) -> Tensor | None:
        """What the target adds to the logits of `ids`; None if that is nothing.

        Ids outside the vocabulary get some other id's.
        """
        return None if self._bias is None else self._bias[ids.clamp(0, len(self._bias) - 1)]

    def exponential(self, depth: int, ids: Tensor) -> Tensor | None:
        """Exponentials E of tokens `ids` (`[M]` or `[B, M]`) at position t0 + depth.

        Depth 0 is the position of the root's children. Ids outside the vocabulary get some other
        id's noise. Returns float32 `[B, M]`, or None at temperature 0, where there is no noise.
        """
        if self.temperature == 0:
            return None
        if self._tables is None:
            raise RuntimeError("the noise of this step is not made yet; call prepare() first")
        tables = self._tables.rows(slice(depth * self.num_rows, (depth + 1) * self.num_rows))
        return keyed_noise.exponential_estimate(tables, ids.clamp(0, self._largest_id))


class Proposals(NamedTuple):
    """Children that a drafter proposes for each node of a frontier.

    Shapes: `tokens` int64 and `chances` float32, both `[B, F, C]`. A chance is the estimated
    probability that the target picks this child, given that it reaches the node and given the
    noise; 0 means no proposal.
    """

    tokens: Tensor
    chances: Tensor


class Proposer(Protocol):
    """One drafter's view of one draft step over the live rows 0..B-1."""

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        """Children of the roots (F = 1). Starts a step; forgets the nodes of the last one."""
        ...

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        """Children of the next frontier, whose nodes have depth `depth`.

        Shapes: `tokens [B, F]` are the nodes' tokens, `parents [B, F]` index the frontier of the
        call before. Nodes may have been proposed by others, and some only fill up a row.
        """
        ...


class LogitsDrafter(Protocol):
    """A drafter that scores its whole draft vocabulary, such as a learned head."""

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 `[Vd]`."""
        ...

    def root(self, num_rows: int) -> Tensor:
        """Logits `[B, 1, Vd]` for the children of the roots of rows 0..B-1."""
        ...

    def advance(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[B, F, Vd]` for the children of the next frontier (see `Proposer.advance`)."""
        ...


class RetrievalDrafter(Protocol):
    """A drafter that looks continuations up, such as a suffix index."""

    def root(self, num_rows: int, num_children: int) -> tuple[Tensor, Tensor]:
        """Candidate tokens and their prior probabilities (0 = none), both `[B, 1, C]`."""
        ...

    def advance(self, parents: Tensor, tokens: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
        """The same for the next frontier, both `[B, F, C]` (see `Proposer.advance`)."""
        ...


class CoupledProposer:
    """Proposes what a `LogitsDrafter` holds likely under the target's noise."""

    def __init__(self, drafter: LogitsDrafter) -> None:
        self._drafter = drafter

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        """See `Proposer.root`."""
        return self._couple(self._drafter.root(noise.num_rows), noise, 0, num_children)

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        """See `Proposer.advance`."""
        logits = self._drafter.advance(parents, tokens)
        return self._couple(logits, noise, depth, num_children)

    def _couple(self, logits: Tensor, noise: StepNoise, depth: int, num_children: int) -> Proposals:
        draft_ids = self._drafter.draft_ids
        bias = noise.bias_of(draft_ids)
        if bias is not None:
            logits = logits + bias
        exponentials = noise.exponential(depth, draft_ids)
        indices, chances = coupled.propose(logits, exponentials, noise.temperature, num_children)
        return Proposals(draft_ids[indices], chances)


class RetrievedProposer:
    """Proposes what a `RetrievalDrafter` found, weighed by the target's noise."""

    def __init__(self, drafter: RetrievalDrafter) -> None:
        self._drafter = drafter

    def root(self, noise: StepNoise, num_children: int) -> Proposals:
        """See `Proposer.root`."""
        return self._weigh(*self._drafter.root(noise.num_rows, num_children), noise, 0)

    def advance(
        self, parents: Tensor, tokens: Tensor, noise: StepNoise, depth: int, num_children: int
    ) -> Proposals:
        """See `Proposer.advance`."""
        return self._weigh(*self._drafter.advance(parents, tokens, num_children), noise, depth)

    def _weigh(self, tokens: Tensor, priors: Tensor, noise: StepNoise, depth: int) -> Proposals:
        bias = noise.bias_of(tokens)
        if bias is not None:
            # A bias upwards leaves a prior as it is: it must stay a probability.
            priors = priors * bias.exp().clamp_max(1)
        exponentials = noise.exponential(depth, tokens.flatten(1))
        if exponentials is not None:
            exponentials = exponentials.view_as(tokens)
        return Proposals(tokens, coupled.retrieved_chances(priors, exponentials))
