"""The native rollout engine: continuous batching with coupled speculation.

Each step does one thing: it prefills a chunk of a prompt, or it decodes all live rows, plainly or
with a draft tree per row, as the tuner says for the live batch. Switching needs nothing
but the next step: the target's keys and values are the same either way, and the drafter extends
over the features kept in its window.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ratoon.errors import CapabilityError, ConfigError
from ratoon.models.graph_pool import GraphPool
from ratoon.observe.rollouts import WorkerSteps
from ratoon.records import Completion, Request, SamplingParams
from ratoon.rollout.native.carry import main_path_first, num_final, with_chain
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.ends import End, Ends
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.passes import Passed, StaticPass, pass_nodes
from ratoon.rollout.native.prompts import PromptQueue
from ratoon.rollout.native.rows import Rows
from ratoon.rollout.native.step import Drafted, Outcome, Seen, on_host, step_record
from ratoon.sampling.keyed_noise import sequence_key
from ratoon.sampling.select import Selector
from ratoon.sampling.stop_strings import Decode
from ratoon.sampling.transforms import check_ids, check_params, reads_prefixes
from ratoon.speculation.account import StepAccount
from ratoon.speculation.strategy import Strategy
from ratoon.speculation.tree import root_only
from ratoon.speculation.tuner import Tuner, never
from ratoon.speculation.verify import Verified, walk


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished response and, when collected, the states of its tokens but the last.

    Shapes: `features [T, num_taps * D]`, `hidden [T, D]`, for the prompt and response together.
    """

    completion: Completion
    features: Tensor | None
    hidden: Tensor | None


@dataclass(slots=True)
class EngineStats:
    """Counts since the last `take_stats`. `steps` has times, too, by live batch and tree."""

    plain_steps: int = 0
    speculative_steps: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    rows_decoded: int = 0
    rows_speculated: int = 0
    tokens: int = 0
    tokens_speculated: int = 0
    nodes_drafted: int = 0
    live_batch: list[int] = field(default_factory=list)
    steps: WorkerSteps = field(default_factory=WorkerSteps, compare=False)


class RolloutEngine:
    """Generates responses for requests; `step` until `has_work` is false.

    `tuner` chooses the strategy of each decode step; None decodes plainly. Any tuner, and any
    drafter, gives the same tokens. `confirm` keeps the bits of plain decoding too, where the
    kernels allow it (see `carry`); without it, rounding may flip a near-tie. `decode` turns ids
    into text, for requests with stop strings.

    With `graphs`, which no other engine may use, a decode step has static shapes, and its passes
    are replayed. Then `model` is the engine's: `use_model` copies into it.

    Host-device syncs of a decode step: with graphs one, but for a suffix drafter's, and more where
    selection is not by temperature alone, a row's winner is not certain at once, or there are stop
    strings; without graphs 7, and with a learned drafter up to 20. A finished response is read by
    two more.
    """

    def __init__(
        self,
        model: InferenceModel,
        *,
        max_rows: int,
        max_length: int,
        vocab_limit: int,
        drafting: Drafting | None = None,
        tuner: Tuner | None = None,
        collect: bool = False,
        confirm: bool = True,
        prefill_chunk: int = 128,
        decode: Decode | None = None,
        graphs: GraphPool | None = None,
    ) -> None:
        config = model.config
        if max_length > config.max_positions:
            raise CapabilityError(
                f"max_length is {max_length}, but the model has {config.max_positions} "
                "positions; lower rollout.max_length"
            )
        self.model = model
        self.policy_version = 0
        self.collect = collect
        self._confirm = confirm
        self._drafting = drafting
        self._tuner = tuner or never()
        self._max_rows = max_rows
        self._max_length = max_length
        self._requests: list[Request] = []
        self._params = SamplingParams()
        self._prefilling = False
        self._stats = EngineStats()
        self._account = StepAccount()
        cache = model.make_cache(max_rows, positions_needed(max_length, drafting))
        keeps_states = collect or (drafting is not None and drafting.needs_features)
        self.rows = Rows(
            cache,
            num_slots=max_rows,
            feature_width=len(model.taps) * config.hidden_size if keeps_states else 0,
            hidden_width=config.hidden_size if keeps_states else 0,
            dtype=model.dtype,
            static=graphs is not None,
        )
        self._queue = PromptQueue(model, self.rows, prefill_chunk)
        device = cache.data.device
        self._selector = Selector(config.vocab_size, vocab_limit, device)
        self._ends = Ends(max_rows, decode, device)
        self._static_pass = None
        if graphs is not None:
            self._static_pass = StaticPass(model, self.rows, self._selector, graphs, max_length)
            if drafting is not None:
                drafting.use_graphs(graphs)

    @property
    def has_work(self) -> bool:
        """Whether any request is live or waiting."""
        return bool(self.rows.num_live or len(self._queue))

    @property
    def num_live(self) -> int:
        """Rows being decoded."""
        return self.rows.num_live

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises: ConfigError when it does not fit, or its sampling parameters make no sense.
        """
        total = len(request.prompt_ids) + request.max_tokens
        if not request.prompt_ids or request.max_tokens < 1 or total > self._max_length:
            raise ConfigError(
                f"a request of {len(request.prompt_ids)} prompt tokens and max_tokens "
                f"{request.max_tokens} does not fit rollout.max_length {self._max_length}; prompts "
                "need at least one token, responses at least one, and both together must fit"
            )
        self._ends.check(request)
        if request.params != self._params:
            self._use_params(request.params)
        self._queue.push(request)

    def _use_params(self, params: SamplingParams) -> None:
        if self.has_work:
            raise ConfigError(
                f"a request with {params} while others with {self._params} are live; one "
                "engine decodes one set of sampling parameters at a time"
            )
        check_params(params)
        check_ids(params, self._selector.vocab_limit)
        self._params = params

    @torch.inference_mode()
    def use_model(self, model: InferenceModel, version: int) -> None:
        """Serve other weights. Raises `RuntimeError` while requests are live or waiting."""
        if self.has_work:
            raise RuntimeError("the policy's weights change only between rollouts")
        if self._static_pass is None:
            self.model = model
        else:
            # Graphs read the memory that they were captured with.
            for target, source in zip(self.model.tensors(), model.tensors(), strict=True):
                target.copy_(source)
        self._queue.use_model(self.model)
        self.policy_version = version

    def use_tuner(self, tuner: Tuner) -> None:
        """Let another tuner choose from the next step on."""
        self._tuner = tuner

    @property
    def stats(self) -> EngineStats:
        """The counts since the last `take_stats`, which go on."""
        return self._stats

    def take_stats(self) -> EngineStats:
        """The counts since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.steps = self._account.result(self._tuner)
        self._account = StepAccount()
        return stats

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Do one unit of work; returns the responses that it finished."""
        if self._prefilling or (len(self._queue) and self.rows.num_live < self._max_rows):
            self._admit()
            return []
        if not self.rows.num_live:
            return []
        return self._decode()

    def _admit(self) -> None:
        slot = self.rows.num_live
        before = self._queue.computed_tokens
        request = self._queue.advance(slot, self._max_rows - slot)
        self._stats.prefill_steps += 1
        self._stats.prefill_tokens += self._queue.computed_tokens - before
        self._prefilling = request is None
        if request is None:
            return
        rows = self.rows
        last_position = len(request.prompt_ids) + request.max_tokens - 1
        rows.begin(slot, request.prompt_ids, last_position, sequence_key(request.key))
        self._ends.begin(slot, request)
        self._requests.append(request)
        rows.num_live += 1
        if self._drafting is not None:
            self._drafting.begin(slot, request)

    def _decode(self) -> list[Finished]:
        rows = self.rows
        num_live = rows.num_live
        strategy = self._tuner.choose(num_live)
        self._account.chosen(strategy, num_live, self._tuner)
        drafted = self._draft(strategy)
        started = time.perf_counter()
        passed = self._pass(drafted, strategy)
        outcome = self._outcome(drafted, passed)
        if not bool(outcome.seen.is_settled.all()):
            outcome = self._outcome(drafted, passed._replace(verified=None))
        verified, known, final, seen = outcome
        rows.commit(verified, known, final, passed.states, passed.places)
        rows.commit_on_host(seen.known, seen.final)
        if self._drafting is not None:
            self._drafting.committed(drafted.tree, verified, known, drafted.carried)
        self._count(strategy, int(seen.valid.sum()) - num_live, seen.final)
        finished = self._finish(seen)
        self._report(strategy, drafted, seen, time.perf_counter() - started)
        return finished

    def _outcome(self, drafted: Drafted, passed: Passed) -> Outcome:
        """What a step commits, and what of it the host must know."""
        rows, tree, verified = self.rows, drafted.tree, passed.verified
        num_live = rows.num_live
        if verified is None:
            prefixes = None
            if reads_prefixes(self._params):
                prefixes = rows.prefixes(num_live, tree.tokens.shape[1], self._ends.ids)
            verified = walk(
                tree,
                passed.logits,
                passed.places,
                rows.sequence_keys[:num_live],
                rows.lengths[:num_live] + 1,
                self._selector,
                self._params,
                prefixes,
            )
        known = self._ends.clip(rows, verified.tokens, verified.counts)
        final = num_final(verified.path, known) if self._confirm else known
        nothing = tree.chances.new_empty(0)
        seen = Seen(
            known=known,
            final=final,
            flags=self._ends.flags(rows, verified.tokens, final),
            tokens=verified.tokens,
            path=verified.path,
            counts=verified.counts,
            valid=tree.valid,
            depths=tree.depths,
            chances=tree.chances,
            carried=drafted.carried,
            promised=nothing if drafted.promised is None else drafted.promised,
            is_settled=known > 0 if passed.is_settled is None else passed.is_settled,
        )
        seen = Seen(*on_host(seen))
        levels = int(seen.counts.max())
        path, tokens, logprobs = (values[:, :levels] for values in verified[:3])
        return Outcome(Verified(path, tokens, logprobs, verified.counts), known, final, seen)

    def _report(self, strategy: Strategy, drafted: Drafted, seen: Seen, verify_s: float) -> None:
        """Tell the account and the tuner of the step."""
        record = step_record(strategy, drafted, seen, verify_s)
        fresh = torch.bincount((seen.known - seen.carried).clamp_min(0)).tolist()
        num_known = record.num_live + int(seen.carried.sum())
        self._account.made(record, record.rows - num_known, fresh)
        self._tuner.observe(record)

    def _draft(self, strategy: Strategy) -> Drafted:
        started = time.perf_counter()
        rows = self.rows
        num_live = rows.num_live
        carried = rows.carried[:num_live].clone()
        chain = rows.chain(num_live)
        roots = chain.gather(1, carried[:, None])[:, 0]
        promised = None
        if strategy.is_plain or self._drafting is None:
            tree = root_only(roots)
        else:
            tree = self._drafting.draft(
                strategy, roots, rows, self._params, self._tuner.promise_budget
            )
            promised = tree.promised
            if self._confirm:
                static = self._static_pass is not None
                tree = main_path_first(tree, strategy.depth if static else None)
        if chain.shape[1] > 1:
            tree = with_chain(tree, chain[:, :-1], carried)
        return Drafted(tree, carried, promised, time.perf_counter() - started)

    def _pass(self, drafted: Drafted, strategy: Strategy) -> Passed:
        """Let the target compute all nodes of the trees."""
        if self._static_pass is None:
            return pass_nodes(self.model, self.rows, drafted.tree)
        num_live = self.rows.num_live
        nodes = 1 if strategy.is_plain else 1 + strategy.budget
        most = num_live * nodes + int(self.rows.host_carried[:num_live].sum())
        return self._static_pass(drafted.tree, most, self._params)

    def _count(self, strategy: Strategy, num_drafted: int, counts: Tensor) -> None:
        stats = self._stats
        num_live = len(counts)
        committed = int(counts.sum())
        stats.tokens += committed
        stats.rows_decoded += num_live
        stats.live_batch.append(num_live)
        if strategy.is_plain:
            stats.plain_steps += 1
            return
        stats.speculative_steps += 1
        stats.rows_speculated += num_live
        stats.tokens_speculated += committed
        stats.nodes_drafted += num_drafted

    def _finish(self, seen: Seen) -> list[Finished]:
        over = self._ends.reached(seen.flags, seen.tokens, seen.final)
        finished = [self._completion(slot, over[slot]) for slot in sorted(over)]
        for slot in sorted(over, reverse=True):
            self._release(slot)
        return finished

    def _completion(self, slot: int, reason: End) -> Finished:
        rows = self.rows
        request = self._requests[slot]
        start, end = len(request.prompt_ids), int(rows.host_lengths[slot]) + 1
        completion = Completion(
            key=request.key,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(rows.tokens[slot, start:end].tolist()),
            logprobs=tuple(rows.logprobs[slot, start:end].tolist()),
            finish=reason.finish,
            policy_version=self.policy_version,
            stop_string=reason.stop_string,
        )
        if not self.collect:
            return Finished(completion, None, None)
        return Finished(
            completion,
            rows.features[slot, : end - 1].clone(),
            rows.hidden[slot, : end - 1].clone(),
        )

    def _release(self, slot: int) -> None:
        rows = self.rows
        rows.num_live -= 1
        last = rows.num_live
        if self._drafting is not None:
            self._drafting.release(slot, last)
        self._ends.release(slot, last)
        if slot != last:
            rows.move(last, slot)
            self._requests[slot] = self._requests[last]
        self._requests.pop()


def positions_needed(max_length: int, drafting: Drafting | None) -> int:
    """Cache positions for sequences of `max_length` tokens and the tree behind them."""
    return max_length + (2 * drafting.max_nodes if drafting is not None else 1)
