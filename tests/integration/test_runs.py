"""Whole runs: what they leave, and what may not change their tokens, rewards and weights."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from lab import Faults, Lab, equal_bits, metrics_of, parameters_of, responses_of

from ratoon.bench import rl as bench_rl
from ratoon.config import RLConfig, build_config
from ratoon.drafter.checkpoint import load_drafter
from ratoon.models.hf_io import load_decoder
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import SUMMARY
from ratoon.observe.timeline import ACTIVITIES


def same_tokens(one: RunFolder, other: RunFolder, step: int, *, exact: bool) -> None:
    """All responses of a step are equal: keys, ids and, where bits hold, log-probabilities."""
    for a, b in zip(responses_of(one, step), responses_of(other, step), strict=True):
        if not exact:
            assert a.pop("logprobs") == pytest.approx(b.pop("logprobs"), abs=1e-4)
        assert a == b


def test_a_run_leaves_everything_that_it_should(reference: RunFolder) -> None:
    config = build_config(RLConfig, yaml.safe_load(reference.config.read_text()))
    assert config.steps == 3
    metrics = metrics_of(reference)
    assert sorted(metrics) == [0, 1, 2, 3]
    assert "eval/reward" in metrics[0]
    assert "eval/reward" in metrics[3]
    for step in (1, 2, 3):
        assert metrics[step]["response/count"] == 16
        assert metrics[step]["policy/tokens"] > 0
        assert len(responses_of(reference, step)) == 16
    assert len(responses_of(reference, 0, "eval")) == 6
    assert len(responses_of(reference, 3, "eval")) == 6
    names = [folder.name for folder in sorted(reference.checkpoints.iterdir())]
    assert names == ["step_000001", "step_000002", "step_000003"]
    assert not list(reference.path.rglob("*.part"))
    assert not list(reference.path.rglob("*.tmp"))


def test_the_trained_model_and_drafter_can_be_used_elsewhere(reference: RunFolder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(reference.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reference.model)
    ids = torch.tensor([tokenizer("1 + 2").input_ids])
    assert model(ids).logits.isfinite().all()
    saved = dict(load_decoder(reference.model).named_parameters())
    trained = parameters_of(reference, 3)
    # The model is stored in bfloat16, or in the type that it came in.
    assert all(
        torch.equal(value.to(saved[name.removeprefix("master.")].dtype).float(), value)
        or torch.allclose(saved[name.removeprefix("master.")].float(), value, atol=1e-2)
        for name, value in trained.items()
    )
    drafter = load_drafter(reference.drafter)
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())
    assert any(parameter.count_nonzero() for parameter in drafter.parameters())


def test_the_timeline_is_a_trace_of_both_workers(reference: RunFolder) -> None:
    events = json.loads(reference.timeline.read_text())
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(lanes) == {"worker 0", "worker 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["name"] for span in spans} <= set(ACTIVITIES)
    trained = [span for span in spans if span["name"] == "drafter_training"]
    assert {span["tid"] for span in trained} == {lanes["worker 1"]}
    assert {span["args"]["step"] for span in trained} == {1, 2, 3}
    for lane in lanes.values():
        mine = sorted((s for s in spans if s["tid"] == lane), key=lambda span: span["ts"])
        ends = [span["ts"] + span["dur"] for span in mine]
        assert all(span["ts"] >= end - 2 for span, end in zip(mine[1:], ends, strict=False))


def test_the_summary_names_every_figure(reference: RunFolder, exact: bool) -> None:
    summary = json.loads(reference.summary.read_text())
    assert summary.keys() >= SUMMARY.keys()
    unmeasured = {key for key in SUMMARY if summary[key] is None}
    assert unmeasured == {"tokens_identical", "flips", "rollout_speedup", "step_speedup"}
    assert summary["numerics"] == ("invariant" if exact else "tolerant")
    assert summary["spot_tokens"] > 0
    assert 0 < summary["idle_fraction"] < 1


@pytest.fixture(scope="session")
def plain(reference: RunFolder, once, fine_tuned: RunFolder, dtype: str) -> RunFolder:
    """Two steps on two workers without speculation."""
    return RunFolder(
        once(
            "plain",
            lambda path: Lab(path.parent, fine_tuned.model, dtype).rl(
                path.name, "speculation.enabled=false"
            ),
        )
    )


CASES = [
    (
        "suffix on one worker",
        ["speculation.drafters=[suffix]", "drafter={}", "spot.enabled=false", "workers.count=1"],
    ),
    ("both on one worker", ["workers.count=1", "speculation.depth=2", "speculation.beam=1"]),
    ("learned", ["speculation.drafters=[learned]", "speculation.max_live_batch=3"]),
    ("cost model", ["speculation.tuner=cost_model"]),
    ("bandit on one worker", ["speculation.tuner=bandit", "workers.count=1"]),
    ("both, no spot training", ["spot.enabled=false", "rollout.max_batch=3"]),
]


def test_speculation_changes_no_token_and_no_weight(
    reference: RunFolder, plain: RunFolder, exact: bool
) -> None:
    for step in (1, 2):
        same_tokens(reference, plain, step, exact=exact)
    same_tokens_of_evaluation = responses_of(reference, 0, "eval") == responses_of(plain, 0, "eval")
    assert same_tokens_of_evaluation or not exact
    if exact:
        assert equal_bits(parameters_of(reference, 2), parameters_of(plain, 2))
    assert metrics_of(reference)[1]["speculation/share"] > 0
    assert metrics_of(plain)[1]["speculation/share"] == 0


@pytest.mark.parametrize("overrides", [c for _, c in CASES], ids=[name for name, _ in CASES])
def test_no_drafter_no_batch_and_no_worker_count_changes_a_token(
    lab: Lab, plain: RunFolder, exact: bool, overrides: list[str]
) -> None:
    """With another number of workers the update's float sums differ, so step 1 is compared."""
    other = lab.rl("other", *overrides)
    same_tokens(plain, other, 1, exact=exact)
    if "workers.count=1" not in overrides:
        same_tokens(plain, other, 2, exact=exact)
        # Spot training on and off among them: the policy's weights have the same bits.
        assert not exact or equal_bits(parameters_of(plain, 2), parameters_of(other, 2))


def test_without_a_learning_rate_nothing_is_learned(
    lab: Lab, fine_tuned: RunFolder, plain: RunFolder
) -> None:
    run = lab.rl("still", "optimizer.lr=0", "algorithm.minibatches=2", "workers.count=1")
    for step in (1, 2):
        metrics = metrics_of(run)[step]
        assert metrics["policy/ratio_mean"] == 1.0
        assert metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/clip_frac"] == 0.0
    start = dict(load_decoder(fine_tuned.model).named_parameters())
    after = parameters_of(run, 2)
    assert all(torch.equal(after[f"master.{name}"], value) for name, value in start.items())
    # The noise is another one in each step, so that a policy that stands still still explores.
    texts = [[row["token_ids"] for row in responses_of(run, step)] for step in (1, 2)]
    assert texts[0] != texts[1]


def test_unusual_sizes_work_together(lab: Lab) -> None:
    """Fewer prompts than a step needs, a batch of one, one worker, two passes, KL, entropy."""
    run = lab.rl(
        "odd",
        "data.train.size=2",
        "algorithm={name: dr_grpo, prompts_per_step: 3, group_size: 3, minibatches: 3, epochs: 2}",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_in=reward",
        "algorithm.entropy_coef=0.01",
        "rollout.max_batch=1",
        "rollout.prefill_chunk=3",
        "spot.buffer_tokens=1024",
        "workers.count=1",
        "steps=1",
        "data.eval=null",
        "evaluation={}",
    )
    rows = responses_of(run, 1)
    assert len({row["row"] for row in rows}) == 2
    keys = {(row["row"], row["sample"]) for row in rows}
    assert len(keys) == 9
    twice = [row for row in rows if sum(r["row"] == row["row"] for r in rows) == 6]
    assert sorted(row["sample"] for row in twice) == [0, 1, 2, 3, 4, 5]
    assert len({tuple(row["token_ids"]) for row in twice}) > 1
    assert metrics_of(run)[1]["policy/kl"] == 0.0
    assert metrics_of(run)[1]["policy/ratio_max"] > 1.0


def test_a_step_of_several_rounds_is_complete_trains_the_drafter_and_can_be_replayed(
    lab: Lab, exact: bool
) -> None:
    run = lab.rl(
        "rounds",
        "algorithm={name: dapo, prompts_per_step: 4, group_size: 4, max_sampling_rounds: 2}",
        "rewards=[{kind: number}]",
        "spot.deterministic_steps=2",
        "replay_last_step=true",
    )
    position = 0
    for step in (1, 2):
        metrics, rows = metrics_of(run)[step], responses_of(run, step)
        drawn = 4 + metrics["sampling/resampled_groups"]
        assert len(rows) == 4 * drawn
        assert max(row["attempt"] for row in rows) == metrics["sampling/rounds"] - 1 == 1
        position += drawn
    state = json.loads((run.checkpoints / "step_000002" / "state.json").read_text())
    assert state["prompts_drawn"] == position
    assert metrics_of(run)[2]["drafter/optimizer_steps"] == 2
    assert json.loads(run.summary.read_text())["tokens_identical"] or not exact


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    lab: Lab, faults: Faults, reference: RunFolder, exact: bool
) -> None:
    faults.hold_tail()
    lab.rl("resumed", "steps=1")
    run = lab.rl("resumed", "steps=3", resume=True)
    metrics, expected = metrics_of(run), metrics_of(reference)
    assert sorted(metrics) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        same_tokens(reference, run, step, exact=exact)
        assert metrics[step]["reward/mean"] == expected[step]["reward/mean"]
        if exact:
            assert metrics[step]["policy/grad_norm"] == expected[step]["policy/grad_norm"]
    if exact:
        assert equal_bits(parameters_of(reference, 3), parameters_of(run, 3))
    # The drafter goes on from where it was, too.
    steps = sum(metrics[step]["drafter/optimizer_steps"] for step in (1, 2, 3))
    assert json.loads((run.drafter / "trainer.json").read_text())["step"] == steps
    assert all(tensor.count_nonzero() for tensor in load_drafter(run.drafter).parameters())
    summary = json.loads(run.summary.read_text())
    before = json.loads(reference.summary.read_text())
    for key in ("reward_before", "reward_after", "reward_diff_stderr"):
        assert summary[key] == before[key]
    assert "steps 2 to 3" in summary["notes"][0]


def test_a_fixed_number_of_drafter_steps_gives_the_same_drafter_twice(lab: Lab) -> None:
    fixed = ["spot.deterministic_steps=3", "rollout.max_batch=4"]
    runs = [lab.rl(name, *fixed) for name in ("one", "other")]
    assert metrics_of(runs[0])[2]["drafter/optimizer_steps"] == 3
    one, other = (load_drafter(run.drafter).state_dict() for run in runs)
    assert equal_bits(one, other)


def test_arms_of_a_benchmark_do_equal_work_and_are_not_run_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = lab.rl_config("arms", "steps=1").model_dump(mode="json", exclude_unset=True)
    results = lab.folder / "arms"
    wanted = bench_rl.Comparison(values, ("plain", "tlt"), 1, results, results / "unfinished")
    said: list[str] = []
    record = bench_rl.run(wanted, said.append)
    assert len(said) == 3
    assert record["steps"] == 1
    assert record["tokens_identical"] or record["numerics"] == ["tolerant"]
    assert [row["arm"] for row in record["rows"]] == ["plain", "tlt"]
    assert not list((results / "unfinished").iterdir())
    monkeypatch.setattr(bench_rl, "run_rl", None)
    assert bench_rl.run(wanted, said.append) == record
    assert len(said) == 3


def test_adapters_alone_are_trained_and_saved(lab: Lab) -> None:
    run = lab.rl(
        "adapters", "steps=1", "lora.rank=4", "optimizer.lr=1e-2", "data.eval=null", "evaluation={}"
    )
    assert metrics_of(run)[1]["policy/grad_norm"] > 0
    start, trained = (
        dict(load_decoder(path).named_parameters()) for path in (lab.model, run.model)
    )
    assert len(parameters_of(run, 1)) == 2 * 7 * load_decoder(lab.model).config.num_layers
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert changed == {name for name in start if name.startswith("layers.") and "proj" in name}
    assert (run.adapter / "adapter_model.safetensors").is_file()


def test_stop_strings_cut_the_text_and_an_evaluation_may_sample_otherwise(
    lab: Lab, plain: RunFolder, exact: bool
) -> None:
    run = lab.rl(
        "stops",
        *("steps=1", "workers.count=1", 'sampling.stop_strings=["\\nAns"]'),
        "evaluation.sampling={temperature: 0, repetition_penalty: 1.1, suppress_tokens: [9, 23]}",
    )
    cut = 0
    for found, whole in zip(responses_of(run, 1), responses_of(plain, 1), strict=True):
        assert "\nAns" not in found["response"]
        if exact:
            assert found["response"] == whole["response"].partition("\nAns")[0]
            assert found["token_ids"] == whole["token_ids"][: len(found["token_ids"])]
            assert found["logprobs"] == whole["logprobs"][: len(found["logprobs"])]
            cut += len(found["token_ids"]) < len(whole["token_ids"])
    assert cut > 3 or not exact
    for found in responses_of(run, 1, "eval"):
        assert set(found["logprobs"]) == {0.0}
        assert not {9, 23} & set(found["token_ids"])
