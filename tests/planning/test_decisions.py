"""Decisions of plans that change speed or a workspace, not results: schedulers, tiles of decode, lengths of tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_flash.planning import varlen
from cute_flash.planning.decode import DecodeStatic, plan_split_kv, splits_keys
from cute_flash.planning.decode_tiles import decode_tile
from cute_flash.planning.plan import Plan, plan_backward, plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.problem import Problem

SM90 = ARCHS["sm_90"]
DENSE = Problem(2, 8, 2, 512, 4096, 128)
VARLEN = replace(DENSE, varlen=True)


def init_of(plan: Plan, name: str) -> str:
    return next(buffer.init for buffer in plan.workspace if buffer.name == name)


def test_tiles_of_a_varlen_batch_differ_in_length() -> None:
    """A dynamic scheduler balances them; without a mask, tiles of a dense batch are equal."""
    assert plan_forward(VARLEN, SM90).is_dynamic and not plan_forward(DENSE, SM90).is_dynamic
    assert plan_backward(VARLEN, SM90).is_dynamic and not plan_backward(DENSE, SM90).is_dynamic


def test_workspaces_that_no_kernel_may_reset_begin_with_zeros() -> None:
    """With wrong offsets of a varlen batch, the preprocess kernel may not reset all claims."""
    assert init_of(plan_backward(VARLEN, SM90), "dq_progress") == "zeros"
    assert init_of(plan_backward(DENSE, SM90), "dq_progress") == "empty"


def test_dropout_pads_the_kernel_that_would_spill() -> None:
    features = ("softcap", "alibi")
    assert plan_backward(replace(VARLEN, features=features), SM90).main.static.features == (*features, "dropout")
    with_dropout = (*features, "dropout")
    assert plan_backward(replace(VARLEN, features=with_dropout), SM90).main.static.features == with_dropout
    assert plan_backward(replace(DENSE, features=features), SM90).main.static.features == features


def test_the_length_of_a_tile_is_the_number_of_blocks_that_it_visits() -> None:
    rows, columns, tile_rows, tile_columns = 700, 900, 64, 48
    band = Band(100, 30)
    for block in range(ceil_div(rows, tile_rows)):
        keys = {
            key // tile_columns
            for row in range(block * tile_rows, min((block + 1) * tile_rows, rows))
            for key in range(band.lo(row, rows, columns), band.hi(row, rows, columns))
        }
        assert varlen.num_blocks(band, block, rows, columns, tile_rows, tile_columns) == len(keys)


# ---- decode


@pytest.mark.parametrize(("head_dim", "rows", "tile_m"), [(128, 16, 16), (128, 17, 32), (64, 40, 32), (256, 40, 16)])
def test_rows_of_decode_tiles(head_dim: int, rows: int, tile_m: int) -> None:
    """32 rows share the loads of K and V; with head dim 256 their accumulators would spill."""
    assert decode_tile(DecodeStatic("bfloat16", head_dim), rows, 8, SM90).tile_m == tile_m


@pytest.mark.parametrize("lengths", [[1] * 9, [40, 1, 1], [17, 0, 33]])
def test_query_tiles_of_a_ragged_batch_are_bounded(lengths: list[int]) -> None:
    group, heads_kv = 4, 2
    problem = Problem(len(lengths), group * heads_kv, heads_kv, sum(lengths), 4096, 128, varlen=True)
    plan = plan_split_kv(problem, SM90)
    assert plan.num_query_tiles >= heads_kv * sum(ceil_div(group * length, plan.tile.tile_m) for length in lengths)


@pytest.mark.parametrize(
    ("fields", "splits"),
    [
        ({}, True),
        ({"seqlen_q": 17}, False),  # 68 rows of a K/V head
        ({"seqlen_k": 511}, False),
        ({"batch": 200}, False),  # enough tiles for all SMs
        ({"features": ("dropout",)}, False),
        ({"features": ("softcap", "sinks")}, True),
        ({"batch_invariant": True}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_few_queries_split_the_keys(fields: dict, splits: bool) -> None:
    problem = Problem(1, 8, 2, 16, 4096, 128, band=Band(None, 0))
    assert splits_keys(replace(problem, **fields), SM90) == splits
