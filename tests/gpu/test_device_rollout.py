"""The engine on the device at hand: the tokens of the CPU in float32, up to counted ties."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

from ratoon.drafter.learned import LearnedDrafter
from ratoon.drafter.model import DrafterConfig, Eagle3Drafter
from ratoon.drafter.suffix import SuffixDrafter
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.graph_pool import CudaGraphs, GraphPool, graph_pool
from ratoon.models.tiny import random_decoder
from ratoon.records import Completion, DrawKey, Request, SamplingParams, Stream
from ratoon.rollout.native.drafting import Drafting
from ratoon.rollout.native.engine import Finished, RolloutEngine
from ratoon.rollout.native.forward import InferenceModel
from ratoon.rollout.native.latency import forward_seconds
from ratoon.speculation.cost_model import CostModelTuner, Latency
from ratoon.speculation.strategy import PLAIN, RandomStrategies, Strategy
from ratoon.speculation.tuner import RuleTuner, TableTuner, Tuner

CONFIG = DecoderConfig("llama", 96, 64, 128, 4, num_heads=4, num_kv_heads=2, head_dim=16)
ROWS, LENGTH, MAX_NODES = 8, 96, 12
TREE = Strategy(depth=4, branching=3, beam=3, budget=MAX_NODES - 1, min_chance=1e-6)
SHARED = Strategy(depth=4, branching=3, beam=3, budget=3, cap=MAX_NODES - 1)
# Devices sum in different orders: a near-tie may fall the other way, and what follows is another
# text. So few responses may differ.
MAX_FLIPPED = 2
PARAMS = [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(0.8, 20, 0.9, 0.01)]


def requests(params: SamplingParams) -> list[Request]:
    return [
        Request(
            key=DrawKey(3, Stream.TRAIN, 1, "gpu", row, 0),
            prompt_ids=tuple((5 * row + place) % 90 for place in range(3 + row % 9)),
            max_tokens=20 + 3 * row % 60,
            eos_ids=(1,),
            params=params,
        )
        for row in range(20)
    ]


@pytest.fixture(params=["off", "on"], ids=["no graphs", "graphs"])
def cuda_graphs(request: pytest.FixtureRequest, device: torch.device) -> CudaGraphs:
    setting: CudaGraphs = request.param
    if setting == "on" and device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU; tests/laws/test_graphs.py records on the CPU")
    return setting


def make_model(decoder: Decoder, device: torch.device) -> InferenceModel:
    target = Decoder(decoder.config)
    target.load_state_dict(decoder.state_dict())
    taps = DrafterConfig.for_target(CONFIG, 8192, 48).taps
    return InferenceModel(
        target.to(device), num_positions=LENGTH + 64, dtype=torch.float32, taps=taps
    )


def make_engine(
    decoder: Decoder,
    device: torch.device,
    tuner: Tuner | None = None,
    graphs: GraphPool | None = None,
    *,
    suffix: bool = True,
) -> RolloutEngine:
    model = make_model(decoder, device)
    drafter_config = DrafterConfig.for_target(CONFIG, 8192, 48)
    drafting = None
    if tuner is not None:
        slots = TREE.beam * TREE.depth
        drafting = Drafting(
            num_rows=ROWS,
            vocab_limit=90,
            max_nodes=MAX_NODES,
            suffix=SuffixDrafter(ROWS, capacity=4096, device=device) if suffix else None,
            learned=LearnedDrafter(
                drafter_config,
                num_rows=ROWS,
                num_positions=LENGTH + 64,
                num_tree_slots=slots,
                dtype=torch.float32,
                device=device,
            ),
            device=device,
        )
        drafter = Eagle3Drafter.from_target(drafter_config, decoder, torch.arange(96))
        drafting.load(drafter, model.embedding)
    return RolloutEngine(
        model,
        max_rows=ROWS,
        max_length=LENGTH,
        vocab_limit=90,
        drafting=drafting,
        tuner=tuner,
        collect=tuner is not None,
        prefill_chunk=8,
        graphs=graphs,
    )


def answers(
    decoder: Decoder,
    device: torch.device,
    params: SamplingParams,
    tuner: Tuner | None = None,
    graphs: GraphPool | None = None,
) -> dict[DrawKey, Completion]:
    return finish(make_engine(decoder, device, tuner, graphs), params)


def finish(engine: RolloutEngine, params: SamplingParams) -> dict[DrawKey, Completion]:
    for request in requests(params):
        engine.submit(request)
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    return {item.completion.key: item.completion for item in finished}


def flipped(one: dict[DrawKey, Completion], other: dict[DrawKey, Completion]) -> Sequence[DrawKey]:
    assert one.keys() == other.keys()
    return [key for key in one if one[key].token_ids != other[key].token_ids]


@pytest.mark.parametrize("params", PARAMS, ids=["temperature 1", "temperature 0", "transformed"])
def test_plain_and_speculative_decoding_say_what_the_cpu_says(
    device: torch.device, params: SamplingParams, cuda_graphs: CudaGraphs
) -> None:
    decoder = random_decoder(CONFIG, seed=0)
    expected = answers(decoder, torch.device("cpu"), params)
    plain = answers(decoder, device, params, graphs=graph_pool(cuda_graphs, device))
    assert len(flipped(plain, expected)) <= MAX_FLIPPED
    for key in plain.keys() - set(flipped(plain, expected)):
        torch.testing.assert_close(
            torch.tensor(plain[key].logprobs),
            torch.tensor(expected[key].logprobs),
            atol=1e-3,
            rtol=0,
        )
    changing = TableTuner(RandomStrategies([PLAIN, TREE, SHARED], seed=1))
    graphs = graph_pool(cuda_graphs, device)
    drafted = answers(decoder, device, params, changing, graphs)
    assert len(flipped(drafted, plain)) <= MAX_FLIPPED
    if graphs is not None:
        report = graphs.report()
        assert report.captures < report.replays
        assert report.num_bytes > 0


def test_new_weights_are_those_that_are_served(
    device: torch.device, cuda_graphs: CudaGraphs
) -> None:
    old, new = (random_decoder(CONFIG, seed=seed) for seed in (0, 1))
    engine = make_engine(old, device, graphs=graph_pool(cuda_graphs, device))
    finish(engine, PARAMS[0])
    engine.use_model(make_model(new, device), version=1)
    expected = answers(new, torch.device("cpu"), PARAMS[0])
    assert len(flipped(finish(engine, PARAMS[0]), expected)) <= MAX_FLIPPED


@pytest.mark.parametrize("strategy", [PLAIN, TREE], ids=["plain", "tree"])
def test_with_graphs_a_step_waits_for_the_device_once(
    device: torch.device, strategy: Strategy
) -> None:
    graphs = graph_pool("auto", device)
    if graphs is None:
        pytest.skip("only a GPU is waited for")
    tuner = RuleTuner(lambda num_live: strategy)
    engine = make_engine(random_decoder(CONFIG, seed=0), device, tuner, graphs, suffix=False)
    for request in requests(PARAMS[0])[:ROWS]:
        engine.submit(request)
    while engine.num_waiting:
        engine.step()
    waits = []
    for _ in range(12):
        captures = graphs.report().captures
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                finished = engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not finished and graphs.report().captures == captures:
            waits.append([str(warning.message) for warning in caught])
    assert waits
    assert all(len(messages) <= 1 for messages in waits), waits


def test_the_tuner_that_goes_by_the_clock_measures_the_device(device: torch.device) -> None:
    decoder = random_decoder(CONFIG, seed=0)
    model = InferenceModel(decoder.to(device), num_positions=256, dtype=torch.float32)
    points = forward_seconds(model, 64)
    assert [size for size, _ in points] == [1, 2, 4, 8, 16, 32, 64]
    assert min(seconds for _, seconds in points) > 0
    tuner = CostModelTuner(SHARED, 64, Latency(points))
    expected = answers(random_decoder(CONFIG, seed=0), device, PARAMS[0])
    graphs = graph_pool("auto", device)
    found = answers(random_decoder(CONFIG, seed=0), device, PARAMS[0], tuner, graphs)
    assert len(flipped(found, expected)) <= MAX_FLIPPED
