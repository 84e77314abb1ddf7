from __future__ import annotations

from collections import Counter

import pytest

from profiling.bench.suites import SUITES
from profiling.measure.shapes import Shape


def test_paper_is_the_papers_setting():
    shapes = SUITES["paper"].shapes()
    assert len(shapes) == len({shape.id for shape in shapes}) == 36
    assert {shape.batch * shape.seqlen for shape in shapes} == {16384}
    assert {shape.heads * shape.head_dim for shape in shapes} == {2048}
    assert all(shape.heads == shape.heads_kv for shape in shapes)
    assert Counter(shape.head_dim for shape in shapes) == {64: 12, 128: 12, 256: 12}
    assert Counter(shape.causal for shape in shapes) == {False: 18, True: 18}
    assert sorted({shape.seqlen for shape in shapes}) == [512, 1024, 2048, 4096, 8192, 16384]


def test_quick_is_part_of_paper():
    quick = set(SUITES["quick"].shapes())
    assert 0 < len(quick) < 12
    assert quick < set(SUITES["paper"].shapes())


def test_wide_heads():
    shapes = SUITES["wide"].shapes()
    assert len(shapes) == 12 and Shape(1, 32, 32, 16384, 512, True) in shapes
    assert {(shape.batch, shape.heads, shape.heads_kv) for shape in shapes} == {(1, 32, 32)}
    assert {shape.head_dim for shape in shapes} == {320, 384, 512}
    assert {shape.seqlen for shape in shapes} == {4096, 16384}


def test_flops_are_the_papers():
    full, causal = (Shape(2, 16, 16, 8192, 128, causal) for causal in (False, True))
    assert full.flops() == 4 * 2 * 16 * 8192**2 * 128
    assert causal.flops() == full.flops() / 2
    # Five matrix products instead of two.
    assert causal.flops("bwd") == 5 * 2 * 16 * 8192**2 * 128


def test_bytes_of_both_directions_with_grouped_heads():
    shape = Shape(batch=2, heads=6, heads_kv=2, seqlen=100, head_dim=32, causal=True)
    q, k, lse = 2 * 6 * 100 * 32 * 2, 2 * 2 * 100 * 32 * 2, 2 * 6 * 100 * 4
    assert shape.hbm_bytes("bf16") == 2 * q + 2 * k + lse
    # Q, O, dO, dQ; K, V, dK, dV.
    assert shape.hbm_bytes("bf16", "bwd") == 4 * q + 4 * k + lse


def test_narrowed_keeps_tokens_and_hidden_size():
    (shape,) = SUITES["paper"].narrowed(lengths=[256], head_dims=[32], masks=["causal"]).shapes()
    assert shape == Shape(64, 64, 64, 256, 32, True)


def test_a_batch_and_a_number_of_heads_take_the_place_of_tokens_and_hidden_size():
    one = {"lengths": [8192], "head_dims": [128], "masks": ["causal"]}
    assert SUITES["quick"].narrowed(**one, batch=2, heads=32).shapes() == [Shape(2, 32, 32, 8192, 128, True)]
    assert SUITES["gqa"].narrowed(**one, heads=16).shapes() == [Shape(2, 16, 4, 8192, 128, True)]
    with pytest.raises(ValueError, match="30 heads: the suite needs a multiple of 4"):
        SUITES["gqa"].narrowed(heads=30).shapes()


def test_sizes_that_do_not_divide_are_rounded_down_to_whole_sequences_and_heads():
    shapes = SUITES["quick"].narrowed(lengths=[1000, 100_000], head_dims=[96], masks=["full"]).shapes()
    assert [(shape.batch, shape.heads) for shape in shapes] == [(16, 21), (1, 21)]


@pytest.mark.parametrize(
    "narrow", [{"masks": ["diagonal"]}, {"lengths": [0]}, {"head_dims": [-8]}, {"batch": 0}, {"heads": -4}]
)
def test_nonsense_is_refused(narrow):
    with pytest.raises(ValueError, match=r"diagonal|length 0|head dim -8|batch 0|-4 heads"):
        SUITES["quick"].narrowed(**narrow).shapes()


def test_grouped_heads():
    for name, shape in {"gqa": Shape(2, 32, 8, 8192, 128, False), "gqa8": Shape(4, 64, 8, 4096, 128, True)}.items():
        shapes = SUITES[name].shapes()
        assert shape in shapes
        assert {one.batch * one.seqlen for one in shapes} == {16384}
        assert {one.heads / one.heads_kv for one in shapes} == {shape.heads / shape.heads_kv}


def test_short_sequences_are_as_many_tokens():
    shapes = SUITES["short"].shapes()
    assert {shape.seqlen for shape in shapes} == {64, 128, 256, 512, 1024}
    assert all(shape.batch * shape.seqlen == 16384 for shape in shapes)
    assert all(shape.heads * shape.head_dim == 2048 for shape in shapes)
