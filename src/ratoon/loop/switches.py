"""What happens to the losses where one stage of a growing model follows another.

Random subnetworks keep the full model's outputs in the mean, so their loss exceeds the full
model's by what the spread of outputs costs. To second order in the units' outputs that is half the
mean of d'Hd over draws, with d the units' factors less one and H the Hessian of the loss in these
factors. It vanishes at once when all units take part: part of the sudden drop at a switch is not
learning.

Source: the expansion is ours, after the paper's section on loss dynamics,
https://arxiv.org/abs/2406.06962; it is that of dropout as a regulariser (Wei, Kakade & Ma 2020,
https://arxiv.org/abs/2002.12915).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ratoon.config.evolve import Evolve
from ratoon.est.adapters import Layout
from ratoon.est.sampler import Sampler
from ratoon.est.subnetwork import Rates, Subnetwork
from ratoon.models.decoder import Decoder, DecoderConfig
from ratoon.training.pretrainer import Ids, Pretrainer

# Of the central difference; draws change factors by about one, so this is a tenth of a unit.
_STEP = 0.1


def switch_losses(
    trainer: Pretrainer, sampler: Sampler, evolve: Evolve, sequences: Ids, rates: Rates, step: int
) -> dict[str, float]:
    """Losses of the whole model and of subnetworks at `rates`, measured before `step`."""
    random = evolve.method == "random"
    count = evolve.switch_draws if random and not rates.is_full else 1
    draws = [
        sampler.draw(rates, step, number, trainer.passes.micro_batch) for number in range(count)
    ]
    losses = {
        "full_loss": trainer.evaluate(sequences),
        "subnetwork_loss": subnetwork_loss(trainer, sequences, draws),
    }
    if random:
        losses["excess"] = second_order_excess(trainer, sequences, draws)
    return losses


def subnetwork_loss(trainer: Pretrainer, sequences: Ids, draws: Sequence[Subnetwork]) -> float:
    """Mean loss over draws, in nats per token."""
    return sum(trainer.evaluate(sequences, draw) for draw in draws) / len(draws)


def second_order_excess(trainer: Pretrainer, sequences: Ids, draws: Sequence[Subnetwork]) -> float:
    """What these draws' loss exceeds the whole model's by, to second order, in nats per token.

    Central differences along each draw's factors, in the type of the masters. Worker by worker the
    same, on sequences that are shared out.
    """
    masters = trainer.weights.tensors()["master"]
    whole = trainer.evaluate(sequences, decoder=_copy(trainer.decoder.config, masters))
    total = 0.0
    for draw in draws:
        losses = []
        for sign in (-1, 1):
            moved = _copy(trainer.decoder.config, masters)
            scale_units(moved, trainer.layout, draw, sign * _STEP)
            losses.append(trainer.evaluate(sequences, decoder=moved))
        total += 0.5 * (sum(losses) - 2 * whole) / _STEP**2
    return total / len(draws)


def switch_metrics(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """As recorded: losses before and after, the drop, and the drop that was to be expected."""
    values = {}
    for name in ("full_loss", "subnetwork_loss"):
        values[f"switch/{name}_before"], values[f"switch/{name}_after"] = before[name], after[name]
    values["switch/drop"] = before["subnetwork_loss"] - after["subnetwork_loss"]
    if "excess" in before:
        values["switch/predicted_drop"] = before["excess"] - after["excess"]
    return values


@torch.no_grad()
def scale_units(decoder: Decoder, layout: Layout, draw: Subnetwork, step: float) -> None:
    """Move each unit's factor from one towards what the draw makes of it, by a share `step`.

    The draw multiplies outputs of its units by its scales, and those of all others by zero. It may
    not name sequences.
    """
    parameters = dict(decoder.named_parameters())
    for layer, part in enumerate(draw.layers):
        for piece in layout.slices:
            if piece.role != "output":
                continue
            weight = parameters[layout.prefix.format(layer) + piece.parameter]
            factors = torch.full((weight.shape[piece.dim],), 1.0 - step, dtype=weight.dtype)
            if part is not None:
                for unit in layout.units(piece.axis, part):
                    first = piece.offset + unit * piece.size
                    factors[first : first + piece.size] += step * layout.scale(piece, part)
            factors = factors.to(weight.device)
            weight.mul_(factors if piece.dim == 1 else factors[:, None])


def _copy(config: DecoderConfig, masters: Mapping[str, Tensor]) -> Decoder:
    """A decoder of its own memory, whole also where the trainer's is sharded."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict({name: value.clone() for name, value in masters.items()}, assign=True)
    return decoder
