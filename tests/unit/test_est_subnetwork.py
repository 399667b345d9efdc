"""Shapes, rates and draws of subnetworks."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter

import pytest

from ratoon.errors import ConfigError
from ratoon.est.sampler import NestedSampler, RandomSampler, Sampler
from ratoon.est.subnetwork import LayerPart, Normalisation, Rates, Shape, Subnetwork, output_scale
from ratoon.models.decoder import DecoderConfig

SHAPE = Shape(num_layers=6, num_heads=8, num_kv_heads=8, num_neurons=24, neuron_block=4)
GROUPED = Shape(6, 8, 2, 24, 4, "within_group")
WHOLE_GROUPS = Shape(6, 16, 8, 24, 4, "group")
HALVES = Rates(0.5, 0.5, 0.5)


def _parts(subnetwork: Subnetwork) -> list[LayerPart]:
    return [part for part in subnetwork.layers if part is not None]


@pytest.mark.parametrize("rates", [(0.0, 1, 1), (1, -0.1, 1), (1, 1, 1.5), (math.nan, 1, 1)])
def test_rates_outside_their_range_are_refused(rates: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError, match=r"\(0, 1\]"):
        Rates(*rates)


def test_rates_that_leave_nothing_are_refused() -> None:
    for rates in (Rates(0.05, 1, 1), Rates(1, 0.05, 1), Rates(1, 1, 0.05)):
        for sampler in (RandomSampler(SHAPE, 0), NestedSampler(SHAPE)):
            with pytest.raises(ConfigError, match="leaves none of"):
                sampler.check(rates, 4)
    with pytest.raises(ConfigError, match="leaves none of 2 sequences"):
        RandomSampler(SHAPE, 0, depth="sequences").check(Rates(0.2, 1, 1), 2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups"):
        Shape(2, 6, 4, 8)
    with pytest.raises(ConfigError, match="divisor"):
        Shape(2, 6, 6, 8, neuron_block=3)
    with pytest.raises(ConfigError, match="within_group"):
        Shape(2, 6, 6, 8, head_unit="within_group")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "unit"),
    [(12, 12, "group"), (4, 4, "group"), (32, 4, "within_group"), (64, 8, "group")],
)
def test_few_groups_are_kept_whole_by_default(heads: int, kv_heads: int, unit: str) -> None:
    config = DecoderConfig("llama", 100, 64, 128, 2, heads, kv_heads, 16)
    assert Shape.of(config).head_unit == unit


@pytest.mark.parametrize("shape", [SHAPE, GROUPED, WHOLE_GROUPS])
@pytest.mark.parametrize("share", [False, True])
def test_a_random_draw_has_the_size_asked_for(shape: Shape, share: bool) -> None:
    sampler = RandomSampler(shape, 1, share_indices=share)
    for step in range(20):
        drawn = sampler.draw(HALVES, step, 0, 4)
        assert len(drawn.active_layers) == 3
        for part in _parts(drawn):
            assert part.heads is not None
            assert part.blocks is not None
            assert len(part.heads) == shape.num_heads // 2
            assert len(part.blocks) == 3
            assert list(part.heads) == sorted(set(part.heads))
            groups = Counter(head // shape.group_size for head in part.heads)
            kept = range(shape.num_kv_heads) if part.kv_heads is None else part.kv_heads
            assert sorted(groups) == list(kept)
            assert len(set(groups.values())) == 1
        assert (len({part.heads for part in _parts(drawn)}) == 1) == share


def test_all_subsets_come_up_equally_often() -> None:
    shape = Shape(1, 4, 4, 4)
    sampler = RandomSampler(shape, 3)
    counts: Counter[object] = Counter()
    for step in range(3000):
        part = sampler.draw(Rates(1, 0.5, 1), step, 0, 1).layers[0]
        assert part is not None
        counts[part.heads] += 1
    assert set(counts) == set(itertools.combinations(range(4), 2))
    # Chi-square with 5 degrees of freedom; 20.5 has chance 0.001.
    assert sum((count - 500) ** 2 / 500 for count in counts.values()) < 20.5


def test_a_draw_depends_on_seed_step_and_micro_batch_as_asked() -> None:
    by_step = RandomSampler(SHAPE, 0)
    by_micro_batch = RandomSampler(SHAPE, 0, per="micro_batch")
    first = by_step.draw(HALVES, 5, 0, 4)
    assert by_step.draw(HALVES, 5, 3, 4) == first
    assert by_step.draw(HALVES, 6, 0, 4) != first
    assert RandomSampler(SHAPE, 1).draw(HALVES, 5, 0, 4) != first
    assert by_micro_batch.draw(HALVES, 5, 0, 4) == first
    assert by_micro_batch.draw(HALVES, 5, 1, 4) != first


def test_a_draw_is_the_same_in_another_process() -> None:
    program = (
        "from ratoon.est.sampler import RandomSampler;"
        "from ratoon.est.subnetwork import Rates, Shape;"
        "print(RandomSampler(Shape(6, 8, 8, 24, 4), 7).draw(Rates(.5, .5, .5), 11, 0, 4))"
    )
    other = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert other.strip() == str(RandomSampler(SHAPE, 7).draw(HALVES, 11, 0, 4))


def test_draws_are_fixed_for_all_time() -> None:
    """A resumed run, or a repeated one, must draw the same after any update of a library."""
    part = RandomSampler(Shape(2, 8, 8, 8), 0).draw(Rates(1, 0.5, 0.25), 0, 0, 1).layers[1]
    assert part is not None
    assert (part.heads, part.blocks) == ((2, 5, 6, 7), (0, 1))


def test_pinned_layers_always_run_unscaled_and_count_among_those_kept() -> None:
    sampler = RandomSampler(SHAPE, 0, pinned_layers=(0, -1))
    between = set()
    for step in range(40):
        drawn = sampler.draw(HALVES, step, 0, 4)
        assert len(drawn.active_layers) == 3
        first, last = drawn.layers[0], drawn.layers[-1]
        assert first is not None
        assert last is not None
        assert first.layer_scale == last.layer_scale == 1.0
        (middle,) = set(drawn.active_layers) - {0, 5}
        part = drawn.layers[middle]
        assert part is not None
        assert part.layer_scale == 4.0
        between.add(middle)
    assert between == {1, 2, 3, 4}


def test_pinning_that_leaves_other_layers_out_for_good_is_refused() -> None:
    with pytest.raises(ConfigError, match="no other layer would ever run"):
        RandomSampler(SHAPE, 0, pinned_layers=(0, 1, 2)).check(HALVES, 4)
    with pytest.raises(ConfigError, match="does not exist"):
        RandomSampler(SHAPE, 0, pinned_layers=(6,))
    everything = tuple(range(SHAPE.num_layers))
    with pytest.raises(ConfigError, match=r"no effect because all .* layers are pinned"):
        RandomSampler(SHAPE, 0, pinned_layers=everything).check(HALVES, 4)


def test_per_sample_depth_runs_each_layer_on_its_own_share_of_the_sequences() -> None:
    sampler = RandomSampler(SHAPE, 0, depth="sequences", pinned_layers=(0,))
    drawn = sampler.draw(Rates(0.5, 1, 1), 3, 0, 8)
    first, *others = _parts(drawn)
    assert drawn.num_sequences == 8
    assert first == LayerPart()
    assert all(part.sequences is not None and len(part.sequences) == 4 for part in others)
    assert all(part.layer_scale == 2.0 for part in others)
    assert len({part.sequences for part in others}) > 1


@pytest.mark.parametrize("shape", [SHAPE, GROUPED, WHOLE_GROUPS])
def test_a_nested_draw_is_one_prefix_inside_every_larger_one(shape: Shape) -> None:
    sampler = NestedSampler(shape)
    small = sampler.draw(HALVES, 0, 0, 4)
    assert small == sampler.draw(HALVES, 17, 2, 9)
    assert small.active_layers == (0, 1, 2)
    assert not small.adds_skipped_biases
    large = sampler.draw(Rates(0.8, 0.75, 0.75), 0, 0, 4)
    for part, outer in zip(_parts(small), large.layers, strict=False):
        assert outer is not None
        assert part.heads is not None
        assert part.blocks is not None
        assert outer.blocks is not None
        assert set(part.heads) < set(range(shape.num_heads) if outer.heads is None else outer.heads)
        assert set(part.blocks) < set(outer.blocks)
        assert (part.attention_scale, part.mlp_scale, part.layer_scale) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "sampler", [RandomSampler(SHAPE, 0), RandomSampler(SHAPE, 0, depth="sequences"),
                NestedSampler(SHAPE)]
)  # fmt: skip
def test_full_rates_are_the_full_model(sampler: Sampler) -> None:
    drawn = sampler.draw(Rates(), 3, 1, 4)
    assert drawn.is_full
    assert drawn == Subnetwork.full(SHAPE)
    assert hash(drawn) == hash(Subnetwork.full(SHAPE))


def test_scales_follow_the_numbers_that_are_kept() -> None:
    assert output_scale("inv_p", 3, 8) == 8 / 3
    assert output_scale("inv_sqrt_p", 2, 8) == 2.0
    assert output_scale("none", 2, 8) == 1.0
    # 0.45 of 8 heads are 4 whole ones, so the scale is 2 and not 1 / 0.45.
    drawn = RandomSampler(SHAPE, 0, Normalisation("inv_p", "none", "inv_sqrt_p")).draw(
        Rates(0.5, 0.45, 0.5), 0, 0, 4
    )
    for part in _parts(drawn):
        assert (part.attention_scale, part.mlp_scale) == (2.0, 1.0)
        assert part.layer_scale == math.sqrt(2.0)
