"""A pretraining step is the plain mathematics, and touches only what took part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ratoon.errors import NumericsError
from ratoon.est.sampler import RandomSampler
from ratoon.est.subnetwork import LayerPart, Rates, Shape, Subnetwork
from ratoon.loop.switches import second_order_excess, subnetwork_loss
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.models.hf_config import FAMILIES
from ratoon.models.initialise import new_decoder
from ratoon.models.packing import PackedBatch
from ratoon.training import flat_weights
from ratoon.training.flat_weights import UpdateRule
from ratoon.training.lm_loss import next_token_loss, token_losses
from ratoon.training.pretrainer import Draw, Passes, Pretrainer

VOCABULARY, LENGTH = 50, 32
HALVES = Rates(0.5, 0.5, 0.5)


def make_decoder(family: str = "llama") -> Decoder:
    config = DecoderConfig(
        family=family, vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_layers=4,
        num_heads=4, num_kv_heads=4, head_dim=4, max_positions=64, **FAMILIES[family].traits,
    )  # fmt: skip
    return new_decoder(config, 1).double()


def make_trainer(decoder: Decoder, *, micro_batch: int = 8, **more: Any) -> Pretrainer:
    rule = more.pop("rule", UpdateRule(max_grad_norm=1e9))
    passes = Passes(micro_batch, more.pop("recompute", False))
    return Pretrainer(decoder, rule, passes, compute_dtype=torch.float64, **more)


def sequences(count: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, LENGTH + 1))


def mean_loss(decoder: Decoder, ids: np.ndarray[Any, Any]) -> torch.Tensor:
    batch = PackedBatch.of([list(row) for row in ids[:, :-1]])
    logits = decoder(batch)[0] @ decoder.head_weight.t()
    return F.cross_entropy(logits, torch.tensor(ids[:, 1:].ravel()))


def weights(trainer: Pretrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}


# Loss


@pytest.mark.parametrize("tokens", [1, 7, 1500])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(tokens: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, 8, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, VOCABULARY, (tokens,))
    expected = F.cross_entropy(hidden @ head.t(), ids)
    wanted = torch.autograd.grad(expected, (hidden, head))
    found = next_token_loss(hidden, head, ids, 1 / tokens)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, (hidden, head)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    each = token_losses(hidden, head, ids)
    torch.testing.assert_close(each.mean(), expected.to(each.dtype))
    head.main_grad = torch.ones_like(head)  # type: ignore[attr-defined]
    next_token_loss(hidden, head, ids, 1 / tokens).backward()
    torch.testing.assert_close(head.main_grad - 1, wanted[1], rtol=1e-10, atol=1e-12)


def drawn(trainer: Pretrainer, step: int) -> Draw:
    sampler = RandomSampler(trainer.shape, 7)
    return lambda number, count: sampler.draw(HALVES, step, number, count)


# Whole steps


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_steps_are_those_of_autograd_and_adamw(family: str) -> None:
    decoder, plain = make_decoder(family), make_decoder(family)
    trainer = make_trainer(decoder, rule=UpdateRule(max_grad_norm=0.1))
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for _ in range(3):
        result = trainer.step(sequences(), 1e-2)
        optimizer.zero_grad()
        loss = mean_loss(plain, sequences())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm > 0.1
        optimizer.step()
        torch.testing.assert_close(result.loss.double(), loss.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=1e-6)
    for one, other in zip(decoder.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("draws", [None, HALVES])
def test_cuts_and_recomputation_change_nothing(draws: Rates | None) -> None:
    results = []
    for micro_batch, recompute in ((8, False), (2, False), (3, True)):
        trainer = make_trainer(make_decoder(), micro_batch=micro_batch, recompute=recompute)
        for step in range(2):
            trainer.step(sequences(), 1e-2, drawn(trainer, step) if draws is not None else None)
        results.append(weights(trainer))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-11)


def test_bf16_steps_stay_near_float32_ones() -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        decoder = make_decoder().float()
        trainer = Pretrainer(decoder, UpdateRule(), Passes(8), compute_dtype=dtype)
        losses.append([float(trainer.step(sequences(), 1e-2).loss) for _ in range(4)])
        copy = dict(trainer.compute.named_parameters())
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter.to(dtype), copy[name])
    assert losses[0][-1] < losses[0][0] - 0.05
    np.testing.assert_allclose(losses[0], losses[1], atol=0.02)


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing() -> None:
    decoder = make_decoder().float()
    trainer = Pretrainer(decoder, UpdateRule(), Passes(8), compute_dtype=torch.float32)
    before = weights(trainer)
    trainer.weights.tensors()["master"]["norm.weight"][0] = torch.inf
    with pytest.raises(NumericsError, match="gradient norm is"):
        trainer.step(sequences(), 1e-2)
    after = weights(trainer)
    assert all(torch.equal(before[n], after[n]) for n in before if n != "norm.weight")


# Parts


def moved(trainer: Pretrainer, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value != before[name] for name, value in weights(trainer).items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("micro_batch", [8, 4])
def test_frozen_weights_keep_their_bits_and_moments(
    family: str, kind: Any, micro_batch: int
) -> None:
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("needs torch 2.9 or later")
    decoder = make_decoder(family)
    trainer = make_trainer(decoder, micro_batch=micro_batch, rule=UpdateRule(kind=kind))
    sampler = RandomSampler(trainer.shape, 7, per="micro_batch")
    trainer.step(sequences(), 1e-2)  # Moments are not zero any more.
    before = weights(trainer)
    moments = {n: v.clone() for n, v in trainer.weights.tensors()["exp_avg"].items()}
    made: list[Subnetwork] = []

    def draw(number: int, count: int) -> Subnetwork:
        made.append(sampler.draw(HALVES, 1, number, count))
        return made[-1]

    trainer.step(sequences(), 1e-2, draw)
    changed = moved(trainer, before)
    active = {layer for each in made for layer in each.active_layers}
    for layer in range(4):
        mine = {n: c for n, c in changed.items() if n.startswith(f"layers.{layer}.")}
        if layer not in active:
            biases = ("o_proj.bias", "down_proj.bias")
            assert not any(c.any() for n, c in mine.items() if not n.endswith(biases))
            continue
        parts = [each.layers[layer] for each in made]
        heads = {h for part in parts if part is not None for h in part.heads or range(4)}
        neurons = {b for part in parts if part is not None for b in part.blocks or range(24)}
        rows = mine[f"layers.{layer}.qkv_proj.weight"].view(3, 4, 4, 16).any(-1).any(2).any(0)
        assert set(rows.nonzero()[:, 0].tolist()) == heads
        columns = mine[f"layers.{layer}.down_proj.weight"].any(0)
        assert set(columns.nonzero()[:, 0].tolist()) == neurons
        up = "up_proj" if family == "gpt2" else "gate_up_proj"
        rows = mine[f"layers.{layer}.{up}.weight"].view(-1, 24, 16).any(-1).any(0)
        assert set(rows.nonzero()[:, 0].tolist()) == neurons
    for name, value in trainer.weights.tensors()["exp_avg"].items():
        still = ~changed[name]
        assert torch.equal(value[still], moments[name][still]) or not name.startswith("layers.")


def test_without_freezing_momentum_and_decay_go_on() -> None:
    trainer = make_trainer(make_decoder(), freezes=False)
    trainer.step(sequences(), 1e-2)
    before = weights(trainer)
    trainer.step(sequences(), 1e-2, drawn(trainer, 1))
    assert all(changed.any() for changed in moved(trainer, before).values())


def test_a_part_is_updated_as_by_adamw_on_that_part_alone() -> None:
    """Against dense steps whose gradient outside the part is zero: inside, updates are equal."""
    one, other = (make_trainer(make_decoder(), freezes=freezes) for freezes in (True, False))
    before = weights(one)
    for trainer in (one, other):
        trainer.step(sequences(), 1e-2, drawn(trainer, 0))
    changed = moved(one, before)
    for name, value in weights(one).items():
        expected = weights(other)[name]
        torch.testing.assert_close(value[changed[name]], expected[changed[name]])


def test_a_subnetworks_loss_is_evaluated_as_it_is_trained() -> None:
    trainer = make_trainer(make_decoder())
    sampler = RandomSampler(Shape.of(trainer.decoder.config), 7)
    subnetwork = sampler.draw(HALVES, 0, 0, 8)
    losses = (trainer.evaluate(sequences(), subnetwork), trainer.evaluate(sequences()))
    trained = trainer.step(sequences(), 0.0, lambda *_: subnetwork)
    assert float(trained.loss) == pytest.approx(losses[0], rel=1e-6)
    whole = mean_loss(trainer.decoder, sequences()).item()
    assert losses[1] == pytest.approx(whole, rel=1e-6)
    assert losses[0] != pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_excess_loss_of_small_deviations_is_the_second_order_one(family: str) -> None:
    """Outputs scaled up and down by a little: first orders cancel, third ones are too small."""
    trainer = make_trainer(make_decoder(family))
    for _ in range(5):
        trainer.step(sequences(), 1e-2)
    shape = trainer.shape
    draws = [
        Subnetwork(shape, (LayerPart(attention_scale=1 + step, mlp_scale=1 + step / 2),) * 4)
        for step in (-0.1, 0.1)
    ]
    expected = subnetwork_loss(trainer, sequences(), draws) - trainer.evaluate(sequences())
    assert second_order_excess(trainer, sequences(), draws) == pytest.approx(expected, rel=0.05)


# Updates of parts


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_are_updated_where_they_lie_as_if_they_had_been_copied(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of rows that are adjacent, at the ends and in between."""
    ids, found = sequences(), []
    shape = Shape(4, 4, 4, 24, neuron_block=4)
    sampler = RandomSampler(shape, 0)
    for run_values in (1, 1 << 40):
        monkeypatch.setattr(flat_weights, "_RUN_VALUES", run_values)
        trainer = make_trainer(make_decoder(family), shape=shape)
        for step in range(3):

            def draw(number: int, count: int, at: int = step) -> Subnetwork:
                return sampler.draw(HALVES, at, number, count)

            trainer.step(ids, 1e-2, draw)
        found.append({kind: dict(each) for kind, each in trainer.weights.tensors().items()})
    for kind, values in found[0].items():
        for name, value in values.items():
            torch.testing.assert_close(value, found[1][kind][name], rtol=1e-12, atol=1e-15)
