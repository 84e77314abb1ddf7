"""The tile tables: every row fits its GPU, every head dim finds one, and a wrong one cannot be written."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest

from cute_flash import tiles
from cute_flash.arch import ARCHS, ArchSpec
from cute_flash.band import Band
from cute_flash.plan import FAMILIES, plan, use_kernels
from cute_flash.problem import Problem, UnsupportedError
from cute_flash.tiles import FwdTile

# Registers a thread can have at most, and those that addresses, loop counters and row statistics take.
MAX_REGISTERS, OTHER_REGISTERS = 255, 30


Entry = tuple[str, ArchSpec, FwdTile]


def all_rows() -> list[Entry]:
    """(name of the table, architecture, row) of every table {architecture: rows} in the module."""
    tables = {name: table for name, table in vars(tiles).items() if re.fullmatch(r"SM\d+_FWD", name)}
    return [
        (name, ARCHS[arch], row) for name, table in tables.items() for arch in table for row in table[arch]
    ]


ROWS = all_rows()
MASKS = (Band(), Band(None, 0), Band(5, None), Band(100, 100))


def row_id(entry: Entry) -> str:
    name, arch, row = entry
    return f"{name}-{arch.name}-{row.head_dim}-{row.tile_m}x{row.tile_n}"


def test_there_is_a_table_for_every_architecture() -> None:
    assert {arch.name for name, arch, _ in ROWS if name == "SM80_FWD"} == set(ARCHS)
    # Tried in order: a row after a wider one of the same size would never be taken.
    for arch in ARCHS.values():
        widths = [row.head_dim for name, spec, row in ROWS if (name, spec) == ("SM80_FWD", arch)]
        assert widths == sorted(widths)
        assert widths[-1] == 256


@pytest.mark.parametrize("entry", ROWS, ids=row_id)
def test_row_cites_its_measurement_or_says_that_there_is_none(entry: Entry) -> None:
    measured = entry[2].measured
    assert "TFLOP/s" in measured or "not measured" in measured


@pytest.mark.parametrize("entry", ROWS, ids=row_id)
def test_row_fits_the_shared_memory_and_registers_of_its_table(entry: Entry) -> None:
    _, arch, row = entry
    q, k, v = row.tile_m, row.stages * row.tile_n, row.stages * row.tile_n
    assert row.smem_bytes == 2 * row.head_dim * (q + k + v)
    assert row.smem_bytes <= arch.smem_per_block
    assert row.num_threads <= arch.max_threads_per_sm
    assert row.smem_bytes + 1024 <= arch.smem_per_sm
    # 16 x 8 accumulators over 32 threads are 4 registers; those of O and S must leave room for the rest.
    fragments = row.tile_m // row.num_warps // 16 * (row.head_dim + row.tile_n) // 8 * 4
    assert row.accumulator_registers >= fragments
    assert row.accumulator_registers + OTHER_REGISTERS <= MAX_REGISTERS
    assert row.num_threads * row.accumulator_registers <= arch.registers_per_sm


@pytest.mark.parametrize("band", MASKS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_every_head_dim_finds_a_row_that_fits(arch: ArchSpec, family: str, band: Band) -> None:
    if arch.capability < FAMILIES[family]:
        pytest.skip(f"{family} kernels do not run on {arch.name}")
    for head_dim in range(8, 257, 8):
        with use_kernels(family):
            tile = plan(Problem(1, 1, 1, 1000, 1000, head_dim, band=band), arch).tile
        assert tile.head_dim >= head_dim
        assert tile.fits(arch)
        assert tile.smem_bytes <= arch.smem_per_block, f"head_dim={head_dim} on {arch.name}"


def test_no_row_is_taken_that_does_not_fit() -> None:
    found = {}
    for kib in range(1, 164):
        small = dataclasses.replace(ARCHS["sm_80"], smem_per_block=kib << 10)
        with contextlib.suppress(UnsupportedError), use_kernels("sm80"):
            found[kib] = plan(Problem(1, 1, 1, 100, 100, 64), small).tile.smem_bytes
    assert all(smem_bytes <= kib << 10 for kib, smem_bytes in found.items())
    # From some size on there always is one.
    assert list(found) == list(range(min(found), 164))
    with use_kernels("sm80"), pytest.raises(UnsupportedError, match=r"head_dim=64: no tile .*sm_80"):
        plan(Problem(1, 1, 1, 100, 100, 64), dataclasses.replace(ARCHS["sm_80"], smem_per_block=1024))


@pytest.mark.parametrize(
    ("head_dim", "tile_m", "tile_n", "num_warps", "stages", "message"),
    [
        (64, 96, 64, 4, 1, "tile_m=96 must be a multiple of 64: 4 warps of 16 rows"),
        (64, 64, 64, 8, 1, "tile_m=64 must be a multiple of 128"),
        (64, 64, 24, 4, 1, "tile_n=24 must be a positive multiple of 16"),
        (64, 64, 0, 4, 1, "tile_n=0 must be a positive multiple of 16"),
        (64, 64, -16, 4, 1, "tile_n=-16 must be a positive multiple of 16"),
        (72, 64, 64, 4, 1, "head_dim=72 must be a multiple of 32 up to 256"),
        (288, 64, 64, 4, 1, "head_dim=288 must be a multiple of 32 up to 256"),
        (0, 64, 64, 4, 1, "head_dim=0 must be a multiple of 32 up to 256"),
        # 256 threads copy 32 rows of 128 bytes, or 64 of 64 bytes, at a time.
        (64, 128, 48, 8, 1, "must be multiples of 32, the rows one copy covers"),
        (96, 128, 96, 8, 1, "must be multiples of 64, the rows one copy covers"),
        (64, 64, 64, 4, 0, "stages=0 must be 1 or 2"),
        (64, 64, 64, 4, 3, "stages=3 must be 1 or 2"),
    ],
)
def test_a_wrong_tile_names_the_value(
    head_dim: int, tile_m: int, tile_n: int, num_warps: int, stages: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FwdTile(head_dim, tile_m, tile_n, num_warps, stages)


@pytest.mark.parametrize(
    ("tile", "threads", "copy_rows", "smem_bytes", "registers"),
    [
        (FwdTile(64, 128, 64, 4, 2), 128, 16, 48 << 10, 128),
        (FwdTile(96, 64, 32, 4, 1), 128, 32, 24 << 10, 64),
        (FwdTile(128, 128, 64, 8, 1), 256, 32, 64 << 10, 96),
        (FwdTile(256, 64, 64, 4, 2), 128, 16, 160 << 10, 160),
    ],
    ids=str,
)
def test_derived_numbers(
    tile: FwdTile, threads: int, copy_rows: int, smem_bytes: int, registers: int
) -> None:
    assert tile.num_threads == threads
    assert tile.copy_rows == copy_rows
    assert tile.smem_bytes == smem_bytes
    assert tile.accumulator_registers == registers


def test_fits_is_exact() -> None:
    tile = FwdTile(128, 128, 64, 4, 1)
    arch = ARCHS["sm_80"]
    assert tile.fits(dataclasses.replace(arch, smem_per_block=tile.smem_bytes))
    assert not tile.fits(dataclasses.replace(arch, smem_per_block=tile.smem_bytes - 1))


def test_evidence_is_not_part_of_a_tile() -> None:
    tile = FwdTile(64, 128, 64, 4, 2)
    cited = dataclasses.replace(tile, measured="H200, bf16, 16 K, 700 TFLOP/s")
    assert cited == tile
    assert hash(cited) == hash(tile)
