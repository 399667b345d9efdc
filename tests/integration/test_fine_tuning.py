"""Supervised fine-tuning from end to end."""

from __future__ import annotations

import torch
from lab import Lab, metrics_of

from ratoon.models.hf_io import load_decoder
from ratoon.models.tokenizer import Tokenizer
from ratoon.observe.run_folder import RunFolder


def test_the_loss_falls_on_two_workers_and_the_model_is_saved(fine_tuned: RunFolder) -> None:
    metrics = metrics_of(fine_tuned)
    last = max(metrics)
    assert sorted(metrics) == list(range(last + 1))
    assert metrics[last]["sft/loss"] < metrics[1]["sft/loss"] / 4
    assert metrics[last]["sft/eval_loss"] < metrics[0]["sft/eval_loss"] / 4
    decoder = load_decoder(fine_tuned.model)
    assert all(parameter.isfinite().all() for parameter in decoder.parameters())
    assert Tokenizer.load(fine_tuned.model).encode("1 + 2")


def test_a_resumed_run_ends_with_the_same_bits(lab: Lab) -> None:
    """It ends between two checkpoints, so that steps are done and recorded anew."""
    base = ["checkpoint.every=2", "workers.count=1", "optimizer.warmup_steps=0"]
    whole = lab.sft("whole", *base, "steps=5")
    lab.sft("resumed", *base, "steps=4")
    resumed = lab.sft("resumed", *base, "steps=5", resume=True)
    assert sorted(metrics_of(resumed)) == [0, 1, 2, 3, 4, 5]
    one, other = (load_decoder(run.model).state_dict() for run in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    for step, metrics in metrics_of(whole).items():
        expected = {name: value for name, value in metrics.items() if "/s" not in name}
        for name in ("sft/loss", "sft/grad_norm", "sft/lr"):
            assert metrics_of(resumed)[step].get(name) == expected.get(name)
