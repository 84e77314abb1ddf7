"""The cost model of MLA decode, and the tables of profiling/notes/mla.md, which it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layouts.studies import mla_cost
from layouts.studies.mla_cost import (
    A100,
    HOPPER,
    L40S,
    MERGE,
    START,
    Cell,
    alternating,
    bodies,
    body_for,
    head_groups,
    mean_ratio,
    mma_sync,
    rate,
    serial,
    split_roles,
    tables,
)

PROFILING = Path(__file__).parents[2] / "profiling"
NOTE = (PROFILING / "notes/mla.md").read_text()


@pytest.mark.parametrize("index", range(len(tables())))
def test_tables_of_the_note(index: int) -> None:
    assert tables()[index] in NOTE


def test_means_of_the_note() -> None:
    assert f"{mean_ratio(False):.2f} without multicast and {mean_ratio(True):.2f} with it" in NOTE


def test_constants_give_the_measured_times_of_the_decode_kernel() -> None:
    """Calls of `attn_decode` whose caches do not stay in L2."""
    cells = json.loads((PROFILING / "results/h200/2026-11-17-decode.json").read_text())["cells"]
    bounded_by_hbm = [cell for cell in cells if cell["bytes"] > HOPPER.arch.l2_bytes]
    assert len(bounded_by_hbm) >= 8
    for cell in bounded_by_hbm:
        predicted = 1e6 * (START + cell["bytes"] / HOPPER.hbm + MERGE)
        assert predicted == pytest.approx(cell["sides"]["cute_flash"]["us"], rel=0.05)


def test_products_take_the_flops_of_a_block() -> None:
    """64 keys, 4096 FLOP a clock by wgmma."""
    for body in (split_roles(0), split_roles(6), serial(), alternating()):
        assert body.mma == 2 * 64 * 64 * (576 + 512) / 4096
    # 68 HMMA of a warp with 16 rows; each scheduler has two of the eight warps.
    assert mma_sync(16, 6.4, 36).mma == pytest.approx(2 * 68 * 6.4)


def test_tiles_of_q_in_registers_save_reads_of_shared_memory() -> None:
    assert split_roles(0).smem - split_roles(1).smem == 2 * 4 * 64 * 16 * 2 / 128
    assert split_roles(6).clocks < split_roles(4).clocks < serial().clocks


def test_groups_of_heads_fill_a_tile() -> None:
    assert [head_groups(heads, 1, 64) for heads in (1, 16, 20, 64, 128)] == [1, 1, 1, 1, 2]
    assert head_groups(128, 2, 64) == 4 and head_groups(16, 8, 64) == 2 and head_groups(20, 4, 64) == 2
    # A prime number of heads, or a chunk of a prompt: one group with several tiles.
    assert head_groups(127, 1, 64) == head_groups(16, 512, 64) == 1
    assert rate(HOPPER, 127, 1).tiles == 2 and rate(HOPPER, 16, 512).tiles == 128


def test_smallest_tile_with_all_rows() -> None:
    assert [body_for(HOPPER, rows).rows for rows in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 64]
    assert [body_for(L40S, rows).rows for rows in (16, 17, 64)] == [16, 32, 32]


def test_two_tiles_of_32_rows_are_faster_than_one_of_64_by_mma_sync() -> None:
    assert 2 * bodies(A100)[-1].clocks < mma_sync(64, A100.hmma, 0, 32).clocks


def test_units_that_bound_a_call() -> None:
    assert rate(HOPPER, 16, 1).bound == rate(HOPPER, 64, 1).bound == "HBM"
    assert rate(HOPPER, 128, 1).bound == "L2"
    assert rate(HOPPER, 128, 1, multicast=2, body=split_roles(6)).bound == "power"
    assert rate(A100, 64, 1).bound == "SM"


def test_a_cell_is_divided_as_the_kernel_divides_it() -> None:
    cell = Cell(HOPPER, 128, 128, 4096, split_roles(4))
    assert cell.groups == 2 and cell.division.splits == (1, 1) and cell.workspace_bytes == 0
    short = replace(cell, batch=1, keys=8192)
    assert short.division.busy_ctas == 128 and short.workspace_bytes == 128 * 64 * 512 * 4


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    mla_cost.main()
    assert capsys.readouterr().out.startswith(tables()[0])
