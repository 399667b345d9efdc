"""Law: decoding by graphs of fixed shapes gives the tokens of decoding without them.

On a CPU, with recorded operations in place of CUDA graphs: what shapes, padding, reuse of buffers
and new weights can do wrong, they do wrong here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding_world import (
    CHAIN,
    DRAFTERS,
    MAX_LENGTH,
    MAX_NODES,
    PARAMS,
    SHARED,
    TREE,
    World,
    completions,
    guided,
    make_requests,
    rule_of,
    run,
    tiny_decoder,
)
from recorded_graphs import asks_device, recorded_pool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.errors import CapabilityError, NumericsError
from ratoon.models import graph_pool as graph_pool_module
from ratoon.models.graph_pool import GraphPool, Padded, bucket, graph_pool
from ratoon.records import SamplingParams
from ratoon.rollout.native import engine as engine_module
from ratoon.rollout.native import passes
from ratoon.rollout.native.engine import RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.step import copied_at_once
from ratoon.sampling import select as select_module
from ratoon.speculation.strategy import PLAIN, Strategy

STRATEGIES = [PLAIN, CHAIN, TREE, SHARED] + [
    replace(shape, use_learned=learned, use_suffix=suffix)
    for shape in (CHAIN, TREE, SHARED)
    for learned, suffix in DRAFTERS.values()
]


def make_float_world(seed: int = 0) -> World:
    decoder = tiny_decoder(seed)
    taps = DrafterConfig.for_target(decoder.config, draft_vocab_size=8192, window=48).taps
    positions = MAX_LENGTH + 2 * MAX_NODES
    model = InferenceModel(decoder, num_positions=positions, dtype=torch.float32, taps=taps)
    return World(decoder, model, exact=False)


@pytest.fixture(scope="module")
def world() -> World:
    return make_float_world()


def engine_with(
    world: World, graphs: GraphPool, max_rows: int, params: SamplingParams, **options: Any
) -> RolloutEngine:
    return world.engine(
        max_rows=max_rows,
        drafting=guided(world, make_requests(params), max_rows),
        rule=rule_of(STRATEGIES, max_rows),
        graphs=graphs,
        **options,
    )


@pytest.mark.parametrize(
    ("name", "max_rows", "confirm"),
    [
        ("temperature 1", 3, True),
        ("temperature 1", 7, False),
        ("top-p and min-p", 3, False),
        ("temperature 0", 2, True),
    ],
)
def test_graphs_change_no_token(
    world: World, name: str, max_rows: int, confirm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice on one engine, so that graphs are used again, with other rows in them."""
    monkeypatch.setattr(passes, "FIRST_WIDTH", 64)
    requests = make_requests(PARAMS[name])[3:12]
    graphs = recorded_pool()
    engine = engine_with(world, graphs, max_rows, PARAMS[name], confirm=confirm)
    for order in (requests, requests[::-1]):
        world.check(completions(run(engine, order)), requests)
        assert engine.take_stats().speculative_steps > 0
    report = graphs.report()
    assert report.graphs == report.captures < report.replays
    assert report.num_bytes == 1000 * report.graphs


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)]
)
def test_graphs_change_nothing_of_stop_strings_and_penalties(
    world: World, params: SamplingParams
) -> None:
    requests = [replace(r, stop_strings=("aab",), eos_ids=()) for r in make_requests(params)[3:12]]

    def text_of(ids: Sequence[int]) -> str:
        return "".join("abc"[token % 3] for token in ids)

    plain = world.engine(max_rows=1, decode=text_of)
    engine = world.engine(
        max_rows=3,
        drafting=world.drafting(3),
        rule=rule_of(STRATEGIES),
        graphs=recorded_pool(),
        decode=text_of,
    )
    expected, found = (completions(run(which, requests)) for which in (plain, engine))
    assert {key: replace(a, logprobs=()) for key, a in found.items()} == {
        key: replace(a, logprobs=()) for key, a in expected.items()
    }
    assert any(answer.stop_string for answer in found.values())


def test_no_more_graphs_are_kept_than_allowed(world: World) -> None:
    graphs = recorded_pool(max_graphs=3)
    engine = engine_with(world, graphs, 3, PARAMS["temperature 1"])
    requests = make_requests()[:4]
    world.check(completions(run(engine, requests)), requests)
    report = graphs.report()
    assert report.graphs == 3 < report.captures


@pytest.mark.parametrize("broken", ["nothing", "buffers", "names"])
def test_a_graph_that_keeps_old_inputs_is_found(
    world: World, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mutations: inputs are not copied into a graph's buffers; constants do not name it."""
    monkeypatch.setattr(passes, "FIRST_WIDTH", 64)
    requests = [replace(request, eos_ids=()) for request in make_requests()[:6]]
    engine = world.engine(max_rows=3, graphs=recorded_pool())
    captured = GraphPool.run

    def nameless(pool: GraphPool, name: Any, work: Any, inputs: Any) -> Any:
        return captured(pool, "one", work, inputs)

    if broken == "names":
        monkeypatch.setattr(GraphPool, "run", nameless)
    answers = completions(run(engine, requests[:1]))
    if broken == "buffers":
        monkeypatch.setattr(graph_pool_module, "_fill", lambda buffers, inputs: None)
    if broken == "nothing":
        answers |= completions(run(engine, requests[1:]))
        world.check(answers, requests)
        return
    with pytest.raises((AssertionError, IndexError, NumericsError, RuntimeError)):
        world.check(answers | completions(run(engine, requests[1:])), requests)


def test_new_weights_are_those_that_graphs_compute_with(world: World) -> None:
    """They are copied to where graphs read; a pass by old ones would say something else."""
    other = make_float_world(seed=7)
    requests = make_requests()[:6]
    first = make_float_world()
    graphs = recorded_pool()
    engine = first.engine(max_rows=3, graphs=graphs)
    first.check(completions(run(engine, requests)), requests)
    captures = graphs.report().captures
    engine.use_model(other.model, version=1)
    answers = completions(run(engine, requests))
    other.check(answers, requests)
    assert {answer.policy_version for answer in answers.values()} == {1}
    assert graphs.report().captures <= captures + 2
    engine.use_model(world.model, version=2)
    world.check(completions(run(engine, requests)), requests)


def test_weights_that_do_not_reach_the_graphs_are_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_float_world(seed=7)
    requests = make_requests()[:6]
    engine = make_float_world().engine(max_rows=3, graphs=recorded_pool())
    run(engine, requests)
    monkeypatch.setattr(InferenceModel, "tensors", lambda model: [model.embedding])
    engine.use_model(other.model, version=1)
    with pytest.raises(AssertionError):
        other.check(completions(run(engine, requests)), requests)


def test_a_drafter_by_graphs_says_what_it_says_without(world: World) -> None:
    """Through growing contexts, fewer rows, new weights, and an embedding elsewhere."""
    config = DrafterConfig.for_target(world.decoder.config, draft_vocab_size=8192, window=48)
    vocabulary = torch.arange(config.draft_vocab_size)
    one = Eagle3Drafter.from_target(config, world.decoder, vocabulary)
    two = Eagle3Drafter.from_target(config, tiny_decoder(5), vocabulary)
    plain, graphed = (
        LearnedDrafter(
            config, num_rows=5, num_positions=300, num_tree_slots=12, dtype=torch.float32
        )
        for _ in range(2)
    )
    graphs = recorded_pool()
    graphed.use_graphs(graphs)
    generator = torch.Generator().manual_seed(0)
    embedding = world.model.embedding

    def steps(rows: int, start: int, lengths: list[int]) -> None:
        features = torch.randn(rows, max(lengths), 3 * config.hidden_size, generator=generator)
        tokens = torch.randint(90, (rows, max(lengths) + 8), generator=generator)
        positions = torch.arange(start, start + max(lengths)).expand(rows, -1)
        parents = torch.randint(2, (rows, 3), generator=generator)
        counts = torch.tensor(lengths)
        said = []
        for drafter in (plain, graphed):
            drafter.observe(features, tokens[:, : max(lengths)], positions, counts)
            root = drafter.root(rows).clone()
            level = drafter.advance(torch.zeros_like(parents[:, :2]), tokens[:, :2]).clone()
            said.append([root, level, drafter.advance(parents, tokens[:, 2:5]).clone()])
        for expected, found in zip(*said, strict=True):
            torch.testing.assert_close(found, expected)

    for drafter in (plain, graphed):
        drafter.load(one, embedding)
    with torch.inference_mode():
        steps(5, 0, [7, 1, 3, 100, 0])
        steps(3, 100, [2, 3, 1])
        steps(3, 103, [2, 1, 1])
    captures = graphs.report().captures
    for drafter in (plain, graphed):
        drafter.load(two, embedding)
    with torch.inference_mode():
        steps(3, 105, [2, 3, 1])
    assert graphs.report().captures == captures
    for drafter in (plain, graphed):
        drafter.load(one, embedding + 1)
    with torch.inference_mode():
        steps(4, 110, [2, 3, 1, 1])
        steps(3, 113, [2, 3, 1])
    assert graphs.report().captures > captures


def test_rows_that_were_not_settled_are_selected_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select_module, "_MARGIN", 1.5)
    again = []
    walk = engine_module.walk

    def counted(*arguments: Any) -> Any:
        again.append(True)
        return walk(*arguments)

    requests = make_requests()[:9]
    expected = world.answers(requests)
    monkeypatch.setattr(engine_module, "walk", counted)
    engine = engine_with(world, recorded_pool(), 3, PARAMS["temperature 1"])
    found = completions(run(engine, requests))
    assert {key: a.token_ids for key, a in found.items()} == {
        key: a.token_ids for key, a in expected.items()
    }
    stats = engine.take_stats()
    assert 0 < len(again) < stats.plain_steps + stats.speculative_steps


def test_logits_that_are_no_numbers_are_an_error(world: World) -> None:
    broken = make_float_world()
    engine = broken.engine(max_rows=3, graphs=recorded_pool())
    requests = make_requests()[:3]
    world.check(completions(run(engine, requests)), requests)
    broken.model.tensors()[-1].fill_(torch.nan)
    with pytest.raises(NumericsError, match="nan"):
        run(engine, requests)


class _DeviceReads(TorchDispatchMode):
    """Counts what would make the host wait for a device that held all but the known tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {values.untyped_storage()._cdata: values for values in known}
        self.count = 0

    def is_known(self, values: Tensor) -> bool:
        return values.untyped_storage()._cdata in self._known

    def know(self, values: Tensor) -> None:
        self._known[values.untyped_storage()._cdata] = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        on_host = bool(inputs) and all(map(self.is_known, inputs))
        self.count += asks_device(func, args) and not on_host
        result = func(*args, **(kwargs or {}))
        if on_host:
            for values in tree_leaves(result):
                if isinstance(values, Tensor):
                    self.know(values)
        return result


@pytest.mark.parametrize(
    "strategy", [PLAIN, replace(TREE, use_suffix=False)], ids=["plain", "tree"]
)
def test_a_step_waits_for_the_device_once(
    world: World, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [replace(r, max_tokens=30, eos_ids=()) for r in make_requests()[:3]]

    def reads(graphs: GraphPool | None) -> tuple[int, int]:
        drafting = world.drafting(3, suffix=False)
        engine = world.engine(
            max_rows=3, drafting=drafting, rule=lambda num_live: strategy, graphs=graphs
        )
        for request in requests:
            engine.submit(request)
        while engine.num_waiting:
            engine.step()
        for _ in range(3):
            engine.step()
        rows = engine.rows
        mode = _DeviceReads([rows.host_lengths, rows.host_carried, drafting._host_observed])
        copies = []

        def copied(values: Any) -> list[Tensor]:
            copies.append(True)
            found = [value.clone() for value in values]
            for value in found:
                mode.know(value)
            return found

        tolist = Tensor.tolist

        def listed(values: Tensor) -> Any:
            mode.count += not mode.is_known(values)
            return tolist(values)

        with monkeypatch.context() as patched:
            patched.setattr(engine_module, "on_host", copied)
            patched.setattr(Tensor, "tolist", listed)
            with mode:
                engine.step()
        return len(copies), mode.count

    assert reads(recorded_pool()) == (1, 0)
    assert reads(None)[1] >= 5


def test_what_is_copied_together_is_what_was_there() -> None:
    values = [
        torch.tensor([[2**52, -1]]),
        torch.rand(3, 2),
        torch.tensor([True, False]),
        torch.zeros(0),
    ]
    for expected, found in zip(values, copied_at_once(values), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_buckets_are_few_and_little_larger() -> None:
    sizes = [bucket(size, 100) for size in range(1, 101)]
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert all(size <= found <= 1.5 * size for size, found in enumerate(sizes, start=1))


def test_graphs_that_cannot_be_are_an_error() -> None:
    cpu = torch.device("cpu")
    assert graph_pool("auto", cpu) is None
    assert graph_pool("off", cpu) is None
    with pytest.raises(CapabilityError, match="auto or off"):
        graph_pool("on", cpu)


def test_padding_is_filled_again_where_a_larger_input_lay() -> None:
    graphs = recorded_pool()

    def run_sum(values: Tensor) -> Tensor:
        (total,) = graphs.run("sum", lambda x: (x.sum(0),), [Padded(values, (4,), fill=10)])
        return total.clone()

    found = [int(run_sum(torch.ones(size, dtype=torch.int64))) for size in (4, 2, 3, 4)]
    assert found == [4, 22, 13, 4]
    assert graphs.report().captures == 1
