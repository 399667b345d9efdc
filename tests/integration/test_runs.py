"""Whole runs: what they leave, and what may not change their tokens, rewards and weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lab import Faults, Lab, StopAt, equal_bits, metrics_of, parameters_of, responses_of
from safetensors.torch import load_file

from ratoon.bench import rl as bench_rl
from ratoon.cli.main import app
from ratoon.config import RLConfig, build_config
from ratoon.coordinator.versions import Publication, VersionLedger
from ratoon.drafter.checkpoint import load_drafter
from ratoon.errors import ConfigError
from ratoon.loop import rl_run, setup
from ratoon.loop.checkpoints import Checkpoint, restore
from ratoon.loop.open_run import open_folder
from ratoon.loop.run_context import RunContext
from ratoon.loop.setup import num_workers, with_machine
from ratoon.models.hf_io import load_decoder
from ratoon.observe.files import read_lines
from ratoon.observe.rollouts import read_rollouts
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import SUMMARY
from ratoon.observe.timeline import ACTIVITIES
from ratoon.stopping import Stop, Stopped


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
        assert metrics[step]["planner/over_least"] > 0
        assert (metrics[step]["planner/length_error"] is None) == (step == 1)
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


def test_every_rollout_tells_what_guessing_did(
    reference: RunFolder, plain: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    records = list(read_rollouts(reference.rollouts))
    told = [(record.split, record.step) for record in records]
    assert told == [("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3)]
    metrics = metrics_of(reference)
    for record in records[1:4]:
        tallies = [tally for worker in record.workers for tally in worker.tallies]
        assert len(record.workers) == 2
        assert sum(tally.steps for tally in tallies) == metrics[record.step]["rollout/decode_steps"]
        # A carried token that was refuted is known twice.
        assert sum(tally.tokens for tally in tallies) >= metrics[record.step]["rollout/tokens"]
        assert any(tally.guesses and tally.drafted for tally in tallies)
    for folder, words in ((reference, "tokens drafted"), (plain, "off by the configuration")):
        with pytest.raises(SystemExit):
            app(args=["explain", str(folder.path), "--step", "2"])
        output = capsys.readouterr().out
        assert output.startswith("train 2: ")
        assert words in output.splitlines()[0]
        assert "worker 1" in output


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
    (
        "both on one worker",
        ["workers.count=1", "speculation.depth=2", "rollout.planner=first_come"],
    ),
    ("learned", ["speculation.drafters=[learned]", "speculation.max_live_batch=3"]),
    ("cost model, split in advance", ["speculation.tuner=cost_model", "rollout.planner=static"]),
    ("bandit on one worker", ["speculation.tuner=bandit", "workers.count=1"]),
    (
        "both, no spot training, as they come",
        ["spot.enabled=false", "rollout.max_batch=3", "rollout.planner=first_come"],
    ),
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
def test_no_drafter_batch_planner_or_worker_count_changes_a_token(
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


def asking(stop: Stop, folder: Path) -> Callable[[VersionLedger, Publication], None]:
    """`VersionLedger.record` that asks for a stop in the second step."""
    record = VersionLedger.record

    def act(self: VersionLedger, publication: Publication) -> None:
        if any(row["step"] == 1 for row in read_lines(folder / "metrics.jsonl", "step")):
            stop.ask()
        return record(self, publication)

    return act


def restoring(own: dict[str, bytes]) -> Callable[[RunContext, Checkpoint], None]:
    """`restore` that notes, by file, what the workers would save right after it."""

    def act(run: RunContext, checkpoint: Checkpoint) -> None:
        restore(run, checkpoint)
        target = checkpoint.path.parent.parent / "again"
        target.mkdir()
        run.workers.call_all("save_own", folder=target)
        files = (path for path in target.rglob("*") if path.is_file())
        own.update({str(path.relative_to(target)): path.read_bytes() for path in files})

    return act


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    lab: Lab, faults: Faults, reference: RunFolder, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.hold_tail()
    # Stopped while worker 1 trains the drafter and worker 0 waits for it.
    seldom = ["steps=3", "checkpoint={every: 100, keep: 10}"]
    stop = Stop()
    with monkeypatch.context() as patch:
        patch.setattr(VersionLedger, "record", asking(stop, lab.folder / "resumed"))
        with pytest.raises(Stopped, match="stopped after step 1, which is saved"):
            lab.rl("resumed", *seldom, stop=stop)
    first = lab.folder / "resumed" / "checkpoints" / "step_000001"
    own: dict[str, bytes] = {}
    monkeypatch.setattr(rl_run, "restore", restoring(own))
    run = lab.rl("resumed", *seldom, resume=True)
    # What each worker alone knows was loaded: it would be saved again as it was.
    assert len(own) == 2 * 4
    for name, content in own.items():
        assert (first / name).read_bytes() == content, name
    metrics, expected = metrics_of(run), metrics_of(reference)
    assert sorted(metrics) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        same_tokens(reference, run, step, exact=exact)
        assert metrics[step]["reward/mean"] == expected[step]["reward/mean"]
        if exact:
            assert metrics[step]["policy/grad_norm"] == expected[step]["policy/grad_norm"]
    if exact:
        assert equal_bits(parameters_of(reference, 3), parameters_of(run, 3))
    # The drafter goes on from where it was, too, and keeps what it learned in the cut step.
    steps = sum(metrics[step]["drafter/optimizer_steps"] for step in (1, 2, 3))
    saved = json.loads((first / "drafter" / "trainer.json").read_text())["step"]
    assert saved > metrics[1]["drafter/optimizer_steps"]
    done = json.loads((run.drafter / "trainer.json").read_text())["step"]
    assert done == steps - metrics[1]["drafter/optimizer_steps"] + saved
    assert all(tensor.count_nonzero() for tensor in load_drafter(run.drafter).parameters())
    summary = json.loads(run.summary.read_text())
    before = json.loads(reference.summary.read_text())
    for key in ("reward_before", "reward_after", "reward_diff_stderr"):
        assert summary[key] == before[key]


FIXED = [
    "steps=4",
    "spot.deterministic_steps=3",
    "spot.buffer_tokens=1024",
    "rollout.max_batch=4",
    "workers.count=1",
    "algorithm.prompts_per_step=8",
    "evaluation.every=2",
    "checkpoint={every: 100, keep: 10}",
    # Times decide what is guessed, and so in which order responses arrive.
    "speculation.tuner=cost_model",
]


def test_a_run_that_is_stopped_at_random_moments_is_the_same_run(lab: Lab, exact: bool) -> None:
    """Tokens, rewards, policy, drafter, its data and its optimizer; records without a gap."""
    whole = lab.rl("whole", *FIXED)
    moments = random.Random(7)
    # In a rollout, and in an evaluation, which the resumed run repeats.
    for step, count in ((1, moments.randint(1, 20)), (2, 1)):
        stop = StopAt(lab.folder / "cut", step, count)
        with pytest.raises(Stopped, match=f"stopped after step {step}, which is saved"):
            lab.rl("cut", *FIXED, resume=step > 1, stop=stop)
    cut = lab.rl("cut", *FIXED, resume=True)
    saved = [path.name for path in sorted(cut.checkpoints.iterdir())]
    assert saved == ["step_000001", "step_000002", "step_000004"]
    metrics, expected = metrics_of(cut), metrics_of(whole)
    for step in range(5):
        assert metrics[step].keys() == expected[step].keys()
        if step:
            same_tokens(whole, cut, step, exact=exact)
            assert metrics[step]["reward/mean"] == expected[step]["reward/mean"]
            assert metrics[step]["drafter/tokens"] == expected[step]["drafter/tokens"] > 0
            assert metrics[step]["drafter/versions"] == expected[step]["drafter/versions"] == 3
    times = [row["time_s"] for row in read_lines(cut.metrics)]
    assert times == sorted(times)
    summary = json.loads(cut.summary.read_text())
    assert summary["spot_tokens"] == sum(metrics[step]["drafter/tokens"] for step in range(1, 5))
    assert summary["seconds"] >= times[-1]
    if exact:
        for part in (
            "policy/trainer",
            "drafter/model",
            "drafter/optimizer",
            "worker_0/buffer/samples",
        ):
            one, other = (
                load_file(run.checkpoints / "step_000004" / f"{part}.safetensors")
                for run in (whole, cut)
            )
            assert equal_bits(one, other), part


def test_another_number_of_workers_is_refused(
    tmp_path: Path, untrained: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path, untrained, dtype)
    config = lab.rl_config("run", "workers.count=null")
    assert with_machine(config).workers.count == num_workers(config.workers)
    open_folder(with_machine(config), resume=False)
    monkeypatch.setattr(setup, "num_workers", lambda workers: 99)
    with pytest.raises(ConfigError, match=r"`workers\.count` is 99 but was "):
        open_folder(setup.with_machine(config), resume=True)


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
