from __future__ import annotations

import html.parser
import json
import math
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ratoon.clock import ManualClock
from ratoon.errors import DataError
from ratoon.observe.completions import StoredCompletion
from ratoon.observe.observer import Observer
from ratoon.observe.provenance import provenance
from ratoon.observe.run_folder import RunFolder
from ratoon.observe.summary import write_summary
from ratoon.report import write_report
from ratoon.report.load import load_run
from ratoon.report.svg import Series, column_chart, line_chart, nice_ticks, number

HOSTILE = "</script><script>alert(1)</script> & <b>"


def summary(**changes: Any) -> dict[str, Any]:
    values = {
        "reward_before": 0.14,
        "reward_after": 0.586,
        "reward_diff_stderr": 0.046,
        "tokens_identical": True,
        "flips": 0,
        "numerics": "invariant",
        "rollout_speedup": 1.43,
        "step_speedup": 1.21,
        "rollout_share": 0.55,
        "update_share": 0.41,
        "reward_share": 0.01,
        "idle_fraction": 0.27,
        "idle_fraction_filled": 0.88,
        "spot_tokens": 412_000,
        "spot_stop_ms_median": 21.0,
        "acceptance_length_first": 1.31,
        "acceptance_length_last": 2.44,
        "entropy_per_token": 0.41,
        "seconds": 842.0,
        "title": "SmolLM2-135M learns to add, GRPO",
        "steps": 24,
        "workers": 2,
        "responses_compared": 64,
        "tokens_compared": 8231,
        "replays": [
            {
                "case": "step 12, live batch 1 to 4",
                "plain_s": 9.4,
                "ratoon_s": 5.9,
                "tokens": 2210,
                "identical": True,
            },
            {
                "case": "step 12, whole rollout",
                "plain_s": 21.9,
                "ratoon_s": 15.3,
                "tokens": 8231,
                "identical": True,
            },
            {
                "case": "live batch 32, speculation forced on",
                "plain_s": 11.0,
                "ratoon_s": 12.4,
                "tokens": 5400,
                "identical": True,
            },
        ],
        "notes": ["The weights are 4-bit values dequantised, not the published ones."],
    }
    return values | changes


def completion(row: int, reward: float, response: str, prompt: str) -> StoredCompletion:
    return StoredCompletion(
        seed=0,
        stream="eval",
        round=0,
        dataset="arithmetic",
        row=row,
        sample=0,
        attempt=0,
        policy_version=0,
        prompt=prompt,
        response=response,
        answer="21",
        reward=reward,
        finish="stop",
        prompt_ids=(),
        token_ids=(),
        logprobs=(),
    )


def make_run(path: Path, steps: int = 24) -> RunFolder:
    """A run folder as `ratoon rl` leaves one, with plausible numbers."""
    rng = random.Random(0)
    folder = RunFolder.create(
        path, config_yaml="name: demo\nseed: 0\n", provenance=provenance(0), free_bytes=0
    )
    clock = ManualClock(1000.0)
    with Observer(folder, clock=clock) as observer:
        now = 1000.0
        for worker in ("worker 0", "worker 1"):
            observer.span(worker, "loading", now, now + 12, step=0)
            observer.span(worker, "evaluation", now + 12, now + 40, step=0)
        now += 40
        observer.metrics(0, {"eval/reward": 0.14, "eval/reward_stderr": 0.03})
        for step in range(1, steps + 1):
            now = one_step(observer, rng, now, step, steps)
            clock.advance(now - clock.now())
        prompt = "What is 3 + 7 + 11?"
        before = [completion(i, float(i % 7 == 0), "The sum is 20.", prompt) for i in range(40)]
        after = [
            completion(i, float(i % 3 != 0), f"3 + 7 = 10, 10 + 11 = 21. {HOSTILE}", HOSTILE)
            for i in range(40)
        ]
        observer.completions("eval", 0, before)
        observer.completions("eval", steps, after)
    write_summary(folder.summary, summary())
    return folder


def one_step(observer: Observer, rng: random.Random, now: float, step: int, steps: int) -> float:
    long, short = rng.uniform(12, 18), rng.uniform(7, 11)
    observer.span("worker 0", "rollout", now, now + long, step=step)
    observer.span("worker 1", "rollout", now, now + short, step=step)
    observer.span("worker 1", "idle", now + short, now + short + 0.3, step=step)
    observer.span("worker 1", "drafter_training", now + short + 0.3, now + long, step=step)
    update = rng.uniform(9, 12)
    for worker in ("worker 0", "worker 1"):
        observer.span(worker, "update", now + long, now + long + update, step=step)
    done = 1 - math.exp(-3 * step / steps)
    values = {
        "reward/mean": 0.14 + 0.45 * done + rng.uniform(-0.06, 0.06),
        "response/tokens_mean": 96 - 30 * done + rng.uniform(-5, 5),
        "response/tokens_max": 250 - 40 * rng.random(),
        "speculation/acceptance_length": 1.3 + 1.1 * done + rng.uniform(-0.05, 0.05),
        "policy/entropy": 0.9 - 0.5 * done,
        "policy/grad_norm": rng.uniform(0.4, 1.1),
        "idle/frac": (long - short) / long / 2,
        "idle/filled_frac": rng.uniform(0.8, 0.95),
        "time/rollout_s": long,
        "time/reward_s": 0.2,
        "time/update_s": update,
        "time/weights_s": 0.6,
        "time/step_s": long + update + 0.8,
    }
    if step % 6 == 0:
        values |= {"eval/reward": 0.14 + 0.45 * done, "eval/reward_stderr": 0.03}
        values["time/evaluation_s"] = 8.0
        for worker in ("worker 0", "worker 1"):
            start = now + long + update + 0.6
            observer.span(worker, "evaluation", start, start + 8, step=step)
        now += 8
    observer.metrics(step, values)
    return now + long + update + 0.8


class Checker(html.parser.HTMLParser):
    """Collects tags and proves that they nest."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [v or "" for k, v in attrs if k in ("href", "src")]
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert checker.stack == []
    return checker


def test_the_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    report = write_report(make_run(tmp_path / "demo").path)
    page = report.read_text(encoding="utf-8")
    checker = check(page)
    assert checker.links == []
    assert "http" not in page
    assert "url(" not in page
    assert "Left out" not in page
    assert checker.counts["script"] == 1


def test_the_page_shows_gains_losses_and_what_was_compared(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    text = re.sub(r"<[^>]+>", " ", write_report(folder.path).read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", text)
    for words in ("0.14 → 0.586", "+0.446 ± 0.046", "clear of noise", "1.43× faster", "identical"):
        assert words in text
    for words in ("8,231 tokens of 64 responses compared", "27%", "88% of it", "1.31 → 2.44"):
        assert words in text
    assert "0.89×" in text, "a case that lost is shown as a loss"


def test_figures_that_are_bad_or_absent_are_not_dressed_up(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    write_summary(
        folder.summary,
        summary(
            reward_after=0.15,
            rollout_speedup=0.8,
            step_speedup=None,
            tokens_identical=False,
            replays=[],
        ),
    )
    page = write_report(folder.path).read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in ("within noise", "1.25× slower", "differ", "not measured", "no step was replayed"):
        assert words in text


def test_a_certificate_stands_in_for_a_replay(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo")
    write_summary(folder.summary, summary(tokens_identical=None, replays=[]))
    folder.certificate.write_text(
        json.dumps({"verdict": "not verified", "tokens": 1810, "responses": 48})
    )
    page = write_report(folder.path).read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "Tokens, selected again not verified 1,810 tokens of 48 responses" in text


def test_text_from_the_model_cannot_break_out(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path / "demo").path).read_text(encoding="utf-8")
    assert "alert(1)" in page
    assert "<script>alert" not in page


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ("summary.json", "summary.json is missing"),
        ("timeline.json", "timeline.json is missing"),
        ("metrics.jsonl", "metrics.jsonl is missing"),
        ("provenance.json", "provenance.json is missing"),
        ("config.resolved.yaml", "config.resolved.yaml is missing"),
        ("completions/eval_000000.jsonl", "fewer than two held-out evaluations"),
    ],
)
def test_a_missing_piece_leaves_out_its_section_and_says_so(
    tmp_path: Path, gone: str, words: str
) -> None:
    folder = make_run(tmp_path / "demo", steps=2)
    (folder.path / gone).unlink()
    page = write_report(folder.path).read_text(encoding="utf-8")
    check(page)
    assert words in page


def test_a_folder_without_a_run_or_with_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        write_report(tmp_path / "gone")
    with pytest.raises(DataError, match="holds no run"):
        write_report(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is no folder"):
        write_report(tmp_path / "file")
    folder = make_run(tmp_path / "demo", steps=1)
    folder.summary.write_text("{")
    with pytest.raises(DataError, match=r"summary\.json: not JSON"):
        load_run(folder.path)


def test_a_fine_tuning_run_shows_its_losses(tmp_path: Path) -> None:
    folder = RunFolder.create(
        tmp_path / "sft", config_yaml="name: sft\n", provenance=provenance(0), free_bytes=0
    )
    with Observer(folder) as observer:
        observer.metrics(0, {"sft/eval_loss": 2.5})
        for step in (1, 2, 3):
            observer.metrics(step, {"sft/loss": 2.0 / step, "sft/tokens_per_s": 400.0})
            observer.metrics(step, {"time/step_s": 1.5})
        observer.metrics(3, {"sft/eval_loss": 0.75})
    page = write_report(folder.path).read_text(encoding="utf-8")
    check(page)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    for words in ("2.500 → 0.750", "2.000 → 0.667", "400 tokens per second", "held out"):
        assert words in text
    assert "has not ended" not in text
    assert "no step times" not in text
    assert "update 100%" in text


def test_later_records_of_a_step_complete_earlier_ones(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "demo", steps=1)
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": 1, "time_s": 1, "reward/std": 0.5, "reward/mean": None}))
        file.write("\n")
    values = load_run(folder.path).metrics[1]
    assert values["reward/std"] == 0.5
    assert "reward/mean" in values


def test_ticks_are_round_and_span_the_data() -> None:
    for low, high in (
        (0, 0.3),
        (0, 1),
        (3, 17),
        (-2, 5),
        (0, 123456),
        (4, 4),
        (0, 0),
        (1e-5, 3e-5),
    ):
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low
        assert ticks[-1] >= high
        assert 2 <= len(ticks) <= 8
        steps = {round(b - a, 9) for a, b in pairwise(ticks)}
        assert len(steps) == 1


def test_a_chart_survives_one_point_and_equal_values() -> None:
    for points in ([(0, 0.0)], [(3, 1.5)], [(1, 0.0), (2, 0.0)]):
        for chart in (line_chart, column_chart):
            picture = chart([Series("a", "rollout", points)], label="a")
            assert "nan" not in picture
            check(picture)


def test_numbers_are_short() -> None:
    shown = [number(x) for x in (0, 1, 0.25, 0.12345, 12345, 2_100_000, 1234.5)]
    assert shown == ["0", "1", "0.25", "0.123", "12.3k", "2.1M", "1234"]
