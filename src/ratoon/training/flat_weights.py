"""Masters, gradients and moments of pretraining, one piece of memory each, and what updates them.

One optimizer call treats all parameters, one all-reduce sums all gradients, one copy refreshes the
model that computes. Where only a part of the model took part in a step, only that part is touched.

Shape letters: P parameters of the model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ratoon.models.decoder import Decoder
from ratoon.training.data_parallel import DataParallel
from ratoon.training.update_checks import require_finite, require_muon, require_same

KINDS = ("master", "exp_avg", "exp_avg_sq")
# Norms are taken piece by piece, so that float32 sums stay short.
_NORM_PIECE = 1 << 20
# Rows that lie side by side are updated there if they hold so many values; shorter runs are faster
# as one copy than one by one.
_RUN_VALUES = 4096
# Newton-Schulz coefficients and steps of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, slots=True)
class Part:
    """Rows (`dim` 0) or columns (`dim` 1) of a parameter that took part in a step.

    `runs` are the same indices as spans from a first to before a last one.
    """

    dim: int
    indices: Tensor
    runs: tuple[tuple[int, int], ...]


# What took part in a step: names of parameters, each with its part or None for all of it.
Touched = Mapping[str, Part | None]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How gradients become updates, but for the learning rate.

    With `muon`, matrices of layers are updated by Muon with steps of AdamW's size, everything else
    by AdamW. Weight decay is decoupled and applies to matrices alone.

    Sources: AdamW: Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101. Muon: Jordan et al.
    2024; its step size: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
    """

    kind: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


class FlatWeights:
    """A decoder's parameters, moved into one tensor `[P]`.

    `master` holds the weights, and `decoder`'s parameters become views of it. `compute` is the
    module that computes: the decoder itself, or its copy in another type; its parameters get a
    `main_grad`, where gradients are summed. Matrices come first, layer by layer, then vectors.
    """

    def __init__(
        self, decoder: Decoder, compute: Decoder, rule: UpdateRule, workers: DataParallel
    ) -> None:
        if rule.kind == "muon":
            require_muon()
        self.rule = rule
        self._workers = workers
        named = dict(decoder.named_parameters())
        first = next(iter(named.values()))
        matrices = [name for name, p in named.items() if p.dim() >= 2]
        in_layers = [name for name in matrices if name.startswith("layers.")]
        order = dict.fromkeys([*in_layers, *matrices, *named])
        self._shapes = {name: named[name].shape for name in order}
        self._muon = set(in_layers) if rule.kind == "muon" else set()
        self._decays = set(matrices)
        inner = decoder.config.intermediate_size
        self._fused = {
            "qkv_proj.weight": decoder.config.qkv_sizes,
            "gate_up_proj.weight": (inner, inner),
        }
        self._starts: dict[str, int] = {}
        start = 0
        for name, shape in self._shapes.items():
            self._starts[name] = start
            start += shape.numel()
        # Updates that each parameter has had: what bias correction goes by.
        self.counts = dict.fromkeys(order, 0)
        self._flat = {
            kind: torch.zeros(start, dtype=first.dtype, device=first.device)
            for kind in (*KINDS, "grad")
        }
        self._views = {kind: dict(self._named(flat)) for kind, flat in self._flat.items()}
        for name, parameter in named.items():
            self._views["master"][name].copy_(parameter.detach())
            parameter.data = self._views["master"][name]
        self._compute: Tensor | None = None
        if compute is not decoder:
            self._compute = self._flat["master"].to(next(compute.parameters()).dtype)
        copies = None if self._compute is None else dict(self._named(self._compute))
        for name, parameter in compute.named_parameters():
            if copies is not None:
                parameter.data = copies[name]
            parameter.main_grad = self._views["grad"][name]  # type: ignore[attr-defined]
        self._parameters = list(compute.parameters())

    # Workers sum their gradients.
    loss_scale = 1.0

    @contextmanager
    def whole(self) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Masters and moments by name, to be changed in place."""
        yield self.tensors()
        self.refresh()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Views by name of masters and moments, for checkpoints and growth."""
        return {kind: self._views[kind] for kind in KINDS}

    def collect(self) -> None:
        """Add what autograd kept in `grad` to the sums; call it after each backward.

        Layers that are computed a second time in backward see copies of their parameters' tensors,
        which have no `main_grad`.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
                parameter.grad = None

    def step(self, lr: float, touched: Touched | None = None) -> Tensor:
        """One update, the same on all workers; returns the gradient norm before clipping.

        Parameters outside `touched` keep their bits, moments and counts; None touches all.
        Gradients are cleared. Host-device syncs: none; on a CPU a norm that is not finite is
        raised at once (NumericsError), elsewhere weights are then left as they are.
        """
        gradient = self._flat["grad"]
        self._workers.sum_(gradient)
        norm = self._norm()
        if norm.device.type == "cpu":
            require_finite(float(norm))
        too_long = (norm / self.rule.max_grad_norm).clamp(min=1.0)
        chosen: Touched = dict.fromkeys(self._shapes) if touched is None else touched
        for name in chosen:
            self.counts[name] += 1
        whole = [name for name in self._shapes if name in chosen and chosen[name] is None]
        parts = {name: part for name, part in chosen.items() if part is not None}
        self._update_whole(whole, lr, norm, too_long)
        self._update_parts(parts, lr, norm, too_long)
        self.refresh(chosen)
        for span in self._spans(chosen):
            gradient[span] = 0.0
        return norm

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Bring the computing copy up to date, for these parameters or all."""
        if self._compute is not None:
            for span in self._spans(self._shapes if names is None else names):
                self._compute[span].copy_(self._flat["master"][span])

    def discard_gradients(self) -> None:
        """Forget what has been summed since the last step."""
        self._flat["grad"].zero_()

    def reset_moments(self) -> None:
        """Forget both moments and all counts."""
        for kind in KINDS[1:]:
            self._flat[kind].zero_()
        self.counts = dict.fromkeys(self.counts, 0)

    def snapshot(self) -> Callable[[], None]:
        """Copy masters, moments and counts; calling what is returned puts them back."""
        kept = {kind: self._flat[kind].clone() for kind in KINDS}
        counts = dict(self.counts)

        def restore() -> None:
            for kind, values in kept.items():
                self._flat[kind].copy_(values)
            self.counts = dict(counts)
            self.refresh()

        return restore

    def load(self, stored: Mapping[str, Mapping[str, Tensor]], counts: Mapping[str, int]) -> None:
        """Copy what `tensors` and `counts` gave.

        Raises: CheckpointError if they are of another model.
        """
        shapes = {
            kind: {name: tuple(shape) for name, shape in self._shapes.items()} for kind in KINDS
        }
        require_same(shapes, stored, self.counts, counts)
        for kind, views in self.tensors().items():
            for name, view in views.items():
                view.copy_(stored[kind][name])
        self.counts = dict(counts)

    def follow(self) -> None:
        """Take over worker 0's masters, moments and counts. Called by all workers."""
        for kind in KINDS:
            self._workers.copy_first_(self._flat[kind])
        self.counts = json.loads(self._workers.broadcast(json.dumps(self.counts)))
        self.discard_gradients()
        self.refresh()

    def _norm(self) -> Tensor:
        pieces = self._flat["grad"].split(_NORM_PIECE)
        norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces])
        return norms.double().square().sum().sqrt().to(norms.dtype)

    def _update_whole(
        self, names: Sequence[str], lr: float, norm: Tensor, too_long: Tensor
    ) -> None:
        for name in (n for n in names if n in self._muon):
            rows = self._segments(name)
            for master, gradient, average, _ in zip(
                *(self._views[kind][name].split(rows) for kind in ("master", "grad", *KINDS[1:])),
                strict=True,
            ):
                self._muon_step([master, gradient, average], lr, norm, too_long)
        for decays in (True, False):
            chosen = [n for n in names if n not in self._muon and (n in self._decays) == decays]
            # One call for parameters that lie side by side and have had as many updates.
            runs: dict[int, list[str]] = {}
            for name in chosen:
                runs.setdefault(self.counts[name], []).append(name)
            for count, members in runs.items():
                spans = list(self._spans(members))
                pieces = [
                    [self._flat[kind][span] for span in spans]
                    for kind in ("master", "grad", *KINDS[1:])
                ]
                adamw_step(self.rule, pieces, count, lr, decays, norm, too_long)

    def _update_parts(
        self, parts: Mapping[str, Part], lr: float, norm: Tensor, too_long: Tensor
    ) -> None:
        for name, part in parts.items():
            views = [self._views[kind][name] for kind in ("master", "grad", *KINDS[1:])]
            if self._updates_in_place(name, part):
                runs = [[view[low:high] for low, high in part.runs] for view in views]
                decays = name in self._decays
                adamw_step(self.rule, runs, self.counts[name], lr, decays, norm, too_long)
                continue
            packed = [view.index_select(part.dim, part.indices) for view in views]
            if name in self._muon:
                bounds = torch.tensor([0, *self._segments(name)]).cumsum(0).tolist()
                sizes = [part.indices.numel()]
                if part.dim == 0:
                    sizes = [
                        int(((part.indices >= low) & (part.indices < high)).sum())
                        for low, high in itertools.pairwise(bounds)
                    ]
                cut = [p.split(sizes) if part.dim == 0 else (p,) for p in packed]
                for pieces in zip(*cut, strict=True):
                    self._muon_step(pieces[:3], lr, norm, too_long)
            else:
                decays = name in self._decays
                adamw_step(
                    self.rule, [[p] for p in packed], self.counts[name], lr, decays, norm, too_long
                )
            for view, value in zip((views[0], *views[2:]), (packed[0], *packed[2:]), strict=True):
                view.index_copy_(part.dim, part.indices, value)

    def _updates_in_place(self, name: str, part: Part) -> bool:
        """Whether AdamW takes the part's rows where they lie, and not copies of them."""
        if part.dim != 0 or name in self._muon:
            return False
        per_row = self._shapes[name].numel() // self._shapes[name][0]
        return part.indices.numel() * per_row >= _RUN_VALUES * len(part.runs)

    def _segments(self, name: str) -> list[int]:
        """Rows of the matrices stored on top of each other, which Muon takes one by one."""
        for ending, sizes in self._fused.items():
            if name.endswith(ending):
                return list(sizes)
        return [self._shapes[name][0]]

    def _muon_step(
        self, pieces: Sequence[Tensor], lr: float, norm: Tensor, too_long: Tensor
    ) -> None:
        from torch.optim._muon import muon

        master, gradient, average = pieces
        muon(
            [master],
            [torch.where(norm.isfinite(), gradient / too_long, 0.0)],
            [average],
            lr=lr,
            weight_decay=self.rule.weight_decay,
            momentum=self.rule.momentum,
            nesterov=True,
            ns_coefficients=_NEWTON_SCHULZ,
            ns_steps=_NEWTON_SCHULZ_STEPS,
            eps=1e-7,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )

    def _spans(self, names: Iterable[str]) -> Iterator[slice]:
        """The parameters' places, those side by side as one."""
        begin = end = -1
        for name in sorted(names, key=self._starts.__getitem__):
            start = self._starts[name]
            if start != end:
                if end > begin:
                    yield slice(begin, end)
                begin = start
            end = start + self._shapes[name].numel()
        if end > begin:
            yield slice(begin, end)

    def _named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, shape in self._shapes.items():
            start = self._starts[name]
            yield name, flat[start : start + shape.numel()].view(shape)


def adamw_step(
    rule: UpdateRule,
    pieces: Sequence[list[Tensor]],
    count: int,
    lr: float,
    decays: bool,
    norm: Tensor,
    too_long: Tensor,
) -> None:
    """AdamW for tensors that have had `count` updates, this one included.

    `pieces` are masters, gradients and both moments; gradients are divided by `too_long`, and
    nothing changes where `norm` is not finite. Host-device syncs: none.
    """
    masters, gradients, averages, squares = pieces
    beta1, beta2 = rule.betas
    adamw(
        masters,
        gradients,
        averages,
        squares,
        [],
        [torch.tensor(float(count - 1), device=norm.device) for _ in masters],
        fused=True,
        # The kernel takes these in float32 whatever the gradients are.
        grad_scale=too_long.float(),
        found_inf=(~norm.isfinite()).float(),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=rule.weight_decay if decays else 0.0,
        eps=rule.eps,
        maximize=False,
    )
