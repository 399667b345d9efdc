"""Retrieval drafting: continue as a sibling, an earlier round or the row itself once did.

Committed tokens go into one bounded store. A hashed table maps the last n tokens of a response,
together with its prompt's uid, to the places in the store where the same n tokens were followed by
something. A row's longest match yields pointers into the store; drafting follows them token by
token. Every operation is vectorised over rows.

Shape letters: B live rows, R all rows, K tokens of a row, F frontier nodes, C children, P pointers
of a node, S store capacity, L match lengths looked up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ratoon.errors import ConfigError

# Match lengths that are looked up, the longest first.
GRAMS = (8, 5, 3)
MAX_LENGTH = 24
# Continuations remembered for one match: the latest ones.
NUM_POINTERS = 8
MIN_CAPACITY = 4096
# Positions are 32-bit; the index starts over before they run out.
LAST_POSITION = 2**31 - 2**27
# The share of the vote that goes to "none of these".
DISSENT = 1.0
# Reliability of a match before anything is known, and how many steps it is remembered.
PRIOR_TRIALS = 20.0
DECAY = 0.999


class _Level(NamedTuple):
    """What a step proposed at one depth, kept until the outcome is known.

    Shapes: `nodes` and `parents [B, F]` as given by the caller; `tokens` and `shares [B, F, C]`
    (votes before reliability is applied); `lengths [B, F]` of the matches.
    """

    nodes: Tensor
    parents: Tensor
    tokens: Tensor
    shares: Tensor
    lengths: Tensor


def _uid_hash(prompt_uid: tuple[str, int]) -> int:
    """A signed 64-bit name of a prompt, the same in every process."""
    dataset, row = prompt_uid
    digest = hashlib.blake2b(f"{row}/{dataset}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class SuffixDrafter:
    """Drafts from what was generated before; a `RetrievalDrafter` of the speculation package.

    Only responses and prompts of the same prompt uid are ever matched. Priors are votes among the
    pointers, scaled by a reliability per match length that is learned from the outcomes.
    """

    def __init__(
        self, num_rows: int, *, capacity: int = 2**18, device: torch.device | str = "cpu"
    ) -> None:
        """`capacity` tokens are kept, at 172 bytes each; the oldest are overwritten.

        Raises: ConfigError where the capacity is too small or no power of two.
        """
        if capacity < MIN_CAPACITY or capacity & (capacity - 1):
            raise ConfigError(
                f"the suffix index's capacity is {capacity}; "
                f"allowed: powers of two from {MIN_CAPACITY} on"
            )
        self._capacity = capacity
        self._device = torch.device(device)
        self._store = self._filled(capacity)
        self._following = self._filled(capacity)
        num_buckets = 4 * capacity
        self._keys = torch.zeros(num_buckets, dtype=torch.int64, device=device)
        self._places = self._filled(num_buckets, NUM_POINTERS)
        self._cursors = torch.zeros(num_buckets, dtype=torch.uint8, device=device)
        # Tokens stored so far: token number p lies in slot p % capacity.
        self._head = 0
        # Where each prompt was stored, oldest first.
        self._prompts: dict[int, int] = {}
        self._hits = torch.zeros(MAX_LENGTH + 1, device=device)
        self._expected = torch.zeros(MAX_LENGTH + 1, device=device)

        longest = GRAMS[0]
        self._tails = torch.full((num_rows, longest), -1, device=device)
        self._uids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._has_prompt = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._last_places = torch.full((num_rows,), -1, device=device)
        self._pointers = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        self._levels: list[_Level] = []

        generator = torch.Generator().manual_seed(0)
        odd = torch.randint(-(2**62), 2**62, (longest,), generator=generator) * 2 + 1
        self._multipliers = odd.to(device)
        self._grams = torch.tensor(GRAMS, device=device)

    def _filled(self, *shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=self._device)

    # Rows

    def begin(self, row: int, prompt_uid: tuple[str, int], prompt_ids: Sequence[int]) -> None:
        """Start a response in a row; `prompt_uid` is the prompt's data set and row there.

        The prompt is stored once, not once per sibling.
        """
        uid = _uid_hash(prompt_uid)
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self._device)
        self._store_prompt(uid, prompt)
        self._tails[row] = self._tail_of(prompt)
        self._uids[row] = uid
        self._has_prompt[row] = True
        self._last_places[row] = -1

    def release(self, row: int) -> None:
        """End a row's response; what it stored stays."""
        self._has_prompt[row] = False

    def move_row(self, source: int, target: int) -> None:
        """Copy a row's state to another row."""
        for state in (self._tails, self._uids, self._has_prompt, self._last_places):
            state[target] = state[source]

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Store what rows 0..B-1 committed, and learn how good the last step's proposals were.

        Shapes: `tokens [B, K]`, padded; `counts [B]`, 0 allowed.
        Cost: about 100 small operations; a few host-device syncs.
        """
        num_rows = len(counts)
        self._judge(tokens, counts)
        tails, last_places = self._tails[:num_rows], self._last_places[:num_rows]
        stored = self._insert(self._uids[:num_rows], tails, tokens, counts, last_places)
        last_places.copy_(torch.where(counts > 0, stored, last_places))
        kept = counts[:, None] + torch.arange(GRAMS[0], device=self._device)
        tails.copy_(torch.cat([tails, tokens], dim=1).gather(1, kept))

    def add(
        self, prompt_uid: tuple[str, int], prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Store a whole response that was generated elsewhere."""
        uid = _uid_hash(prompt_uid)
        prompt = torch.tensor(prompt_ids, dtype=torch.int64, device=self._device)
        self._store_prompt(uid, prompt)
        self._insert_one(uid, self._tail_of(prompt), token_ids)

    # Drafting

    def root(self, num_rows: int, num_children: int) -> tuple[Tensor, Tensor]:
        """Candidates for the token after each of rows 0..B-1: tokens and priors `[B, 1, C]`."""
        keys = self._keys_of(self._tails[:num_rows], self._uids[:num_rows])
        buckets = self._buckets_of(keys)
        places = self._places[buckets].long()
        is_alive = (self._keys[buckets] == keys) & self._has_prompt[:num_rows, None]
        is_alive = is_alive.unsqueeze(2) & (places >= max(0, self._head - self._capacity))
        is_match = is_alive.any(dim=2)
        longest = is_match.to(torch.uint8).argmax(dim=1, keepdim=True)
        places = torch.where(is_alive, places, -1)
        pick = longest.unsqueeze(2).expand(-1, -1, NUM_POINTERS)
        self._pointers = places.gather(1, pick)
        self._levels = []
        lengths = self._grams[longest]
        nodes = torch.zeros_like(longest)
        return self._propose(nodes, nodes, lengths, num_children)

    def advance(self, parents: Tensor, tokens: Tensor, num_children: int) -> tuple[Tensor, Tensor]:
        """Candidates for the children of the next frontier: tokens and priors `[B, F, C]`.

        Shapes: `tokens [B, F]`; `parents [B, F]` index the frontier before.
        """
        pick = parents.unsqueeze(2).expand(-1, -1, NUM_POINTERS)
        pointers = self._pointers.gather(1, pick)
        slots = pointers % self._capacity
        following = self._following[slots].long()
        is_match = (pointers >= 0) & (self._store[slots] == tokens.unsqueeze(2))
        is_match &= following >= max(0, self._head - self._capacity)
        self._pointers = torch.where(is_match, following, -1)
        lengths = (self._levels[-1].lengths.gather(1, parents) + 1).clamp_max(MAX_LENGTH)
        return self._propose(tokens, parents, lengths, num_children)

    def _propose(
        self, nodes: Tensor, parents: Tensor, lengths: Tensor, num_children: int
    ) -> tuple[Tensor, Tensor]:
        """Votes of the pointers, one candidate per token, those with most votes first."""
        pointers = self._pointers
        is_alive = pointers >= 0
        # A dead pointer gets a name of its own, so that it votes for nobody.
        nobody = -1 - torch.arange(NUM_POINTERS, device=pointers.device)
        tokens = torch.where(is_alive, self._store[pointers % self._capacity].long(), nobody)
        is_same = tokens.unsqueeze(3) == tokens.unsqueeze(2)
        is_repeated = is_same.tril(-1).any(dim=3)
        votes = torch.where(is_alive & ~is_repeated, is_same.sum(dim=3), 0)
        shares = votes / (is_alive.sum(dim=2, keepdim=True) + DISSENT)
        shares, best = shares.topk(min(num_children, NUM_POINTERS), dim=2)
        tokens = tokens.gather(2, best)
        self._levels.append(_Level(nodes, parents, tokens, shares, lengths))
        return tokens.clamp_min(0), shares * self._reliability()[lengths].unsqueeze(2)

    def _reliability(self) -> Tensor:
        """How often a match of each length is right, against its share of the vote; at most 1."""
        return ((self._hits + PRIOR_TRIALS) / (self._expected + PRIOR_TRIALS)).clamp_max(1.0)

    def _judge(self, tokens: Tensor, counts: Tensor) -> None:
        """Compare the last step's proposals with the tokens that were committed."""
        levels, self._levels = self._levels, []
        if not levels or levels[0].nodes.shape[0] != len(counts):
            return
        rows = torch.arange(len(counts), device=self._device)
        is_on = counts > 0
        place = torch.zeros_like(rows)
        self._hits *= DECAY
        self._expected *= DECAY
        for depth, level in enumerate(levels[: tokens.shape[1]]):
            if depth > 0:
                # Follow the committed token of the depth before to its place in this frontier.
                reached = level.nodes == tokens[:, depth - 1, None]
                reached &= level.parents == place[:, None]
                is_on = is_on & reached.any(dim=1) & (depth < counts)
                place = reached.to(torch.uint8).argmax(dim=1)
            shares = level.shares[rows, place]
            picked = (level.tokens[rows, place] == tokens[:, depth, None]) & (shares > 0)
            lengths = level.lengths[rows, place]
            self._expected.index_add_(0, lengths, shares.sum(dim=1) * is_on)
            self._hits.index_add_(0, lengths, (is_on & picked.any(dim=1)).float())

    # Storing

    def _store_prompt(self, uid: int, prompt: Tensor) -> None:
        oldest = self._head - self._capacity
        while self._prompts and next(iter(self._prompts.values())) < oldest:
            del self._prompts[next(iter(self._prompts))]
        if uid in self._prompts:
            return
        self._prompts[uid] = self._head
        nothing = torch.full((GRAMS[0],), -1, device=self._device)
        self._insert_one(uid, nothing, prompt)

    def _tail_of(self, tokens: Tensor) -> Tensor:
        longest = GRAMS[0]
        padding = tokens.new_full((longest,), -1)
        return torch.cat([padding, tokens])[-longest:]

    def _insert_one(self, uid: int, tail: Tensor, token_ids: Tensor | Sequence[int]) -> None:
        tokens = torch.as_tensor(token_ids, dtype=torch.int64, device=self._device)
        # A sequence longer than the store would overwrite itself.
        tokens = tokens[-self._capacity // 2 :][None]
        uids = torch.tensor([uid], device=self._device)
        counts = torch.tensor([tokens.shape[1]], device=self._device)
        self._insert(uids, tail[None], tokens, counts, torch.full_like(uids, -1))

    def _insert(
        self, uids: Tensor, tails: Tensor, tokens: Tensor, counts: Tensor, last_places: Tensor
    ) -> Tensor:
        """Store `counts [R]` of `tokens [R, K]` that follow `tails`; places of the last `[R]`."""
        num_tokens = int(counts.sum())
        if num_tokens == 0:
            return last_places
        if self._head + num_tokens > LAST_POSITION:
            self._start_over()
            last_places = torch.full_like(last_places, -1)
        steps = torch.arange(tokens.shape[1], device=self._device)
        is_token = steps < counts[:, None]
        places = self._head + (counts.cumsum(0) - counts)[:, None] + steps
        self._head += num_tokens
        before = torch.cat([last_places[:, None], places[:, :-1]], dim=1)
        is_linked = is_token & (before >= max(0, self._head - self._capacity))

        slots = (places % self._capacity)[is_token]
        self._store[slots] = tokens[is_token].int()
        self._following[slots] = -1
        self._following[(before % self._capacity)[is_linked]] = places[is_linked].int()

        grams = torch.cat([tails, tokens], dim=1).unfold(1, GRAMS[0], 1)[:, : tokens.shape[1]]
        keys = self._keys_of(grams, uids[:, None])[is_token]
        self._remember(keys.flatten(), places[is_token].repeat_interleave(len(GRAMS)))
        return places.gather(1, (counts - 1).clamp_min(0)[:, None]).squeeze(1)

    def _remember(self, keys: Tensor, places: Tensor) -> None:
        """Enter `places [M]` under `keys [M]`; among all places of a key the latest ones stay."""
        buckets, order = self._buckets_of(keys).sort(stable=True)
        keys, places = keys[order], places[order]
        is_other = self._keys[buckets] != keys
        self._places[buckets[is_other]] = -1
        self._keys[buckets] = keys
        # Of two keys that meet in a bucket within this call, one has just lost it.
        is_owner = self._keys[buckets] == keys
        buckets, places = buckets[is_owner], places[is_owner]
        index = torch.arange(len(buckets), device=self._device)
        rank = index - torch.searchsorted(buckets, buckets)
        # More entries than pointers: let the last ones win.
        size = torch.searchsorted(buckets, buckets, right=True) - (index - rank)
        is_latest = rank >= size - NUM_POINTERS
        buckets, places, rank = buckets[is_latest], places[is_latest], rank[is_latest]
        cursors = self._cursors[buckets].long() + rank
        self._places[buckets, cursors % NUM_POINTERS] = places.int()
        last = torch.ones_like(buckets, dtype=torch.bool)
        last[:-1] = buckets[1:] != buckets[:-1]
        self._cursors[buckets[last]] = ((cursors[last] + 1) % NUM_POINTERS).to(torch.uint8)

    def _keys_of(self, grams: Tensor, uids: Tensor) -> Tensor:
        """64-bit keys `[..., L]` of the last 8, 5 and 3 tokens of `grams [..., 8]`."""
        # Oldest token first, so sums from the right cover the last n tokens.
        products = (grams + 2) * self._multipliers
        sums = products.flip(-1).cumsum(-1)
        keys = sums[..., self._grams - 1] + self._grams * self._multipliers[0]
        keys = (keys ^ uids.unsqueeze(-1)) * self._multipliers[1]
        keys = keys ^ ((keys >> 32) & 0xFFFFFFFF)
        return keys * self._multipliers[2]

    def _buckets_of(self, keys: Tensor) -> Tensor:
        """High bits of the keys: the best mixed ones."""
        bits = self._keys.shape[0].bit_length() - 1
        return (keys >> (64 - bits)) & (self._keys.shape[0] - 1)

    def _start_over(self) -> None:
        self._following.fill_(-1)
        self._places.fill_(-1)
        self._head = 0
        self._prompts.clear()
        self._last_places.fill_(-1)

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that was stored and learned; rows are not part of it. Empty places neither.

        A replay must start from the state before the recorded step, or it would find its own
        answers in the index.
        """
        used = slice(min(self._head, self._capacity))
        buckets = self._keys.nonzero()[:, 0]
        prompts = torch.tensor(list(self._prompts.items()), dtype=torch.int64).view(-1, 2)
        state: dict[str, Any] = {"capacity": self._capacity, "head": self._head}
        state |= {"prompts": prompts, "buckets": buckets}
        state |= {name: getattr(self, f"_{name}")[used].clone() for name in _BY_TOKEN}
        state |= {name: getattr(self, f"_{name}")[buckets] for name in _BY_BUCKET}
        return state | {name: getattr(self, f"_{name}").clone() for name in _BY_LENGTH}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; all rows are released.

        Raises: ConfigError where the state is of an index of another capacity.
        """
        if state["capacity"] != self._capacity:
            raise ConfigError(
                f"the saved suffix index holds {state['capacity']} tokens and this one "
                f"{self._capacity}; use the same capacity"
            )
        self._head = state["head"]
        self._prompts = dict(state["prompts"].tolist())
        for name in _BY_TOKEN:
            getattr(self, f"_{name}")[: len(state[name])] = state[name]
        for name, empty in _BY_BUCKET.items():
            getattr(self, f"_{name}").fill_(empty)[state["buckets"]] = state[name]
        for name in _BY_LENGTH:
            getattr(self, f"_{name}").copy_(state[name])
        self._has_prompt.fill_(False)
        self._levels = []


# What the state is made of: by stored token, by bucket of the table (and what an empty one holds),
# and by length of a match.
_BY_TOKEN = ("store", "following")
_BY_BUCKET = {"keys": 0, "places": -1, "cursors": 0}
_BY_LENGTH = ("hits", "expected")
