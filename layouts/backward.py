"""Shared-memory accesses of the backward kernels, and the bank conflicts that follow from their addresses.

As in `layouts.kernels`, these are the instructions of the load/store units: ldmatrix and stmatrix, ld.shared and
st.shared, and the writes of cp.async. TMA, the operands of wgmma, cp.reduce.async.bulk and mbarriers are not among
them. A CTA has one tile of keys and visits blocks of queries, so `Use.is_per_block` means "for every block of queries".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from cute_flash.smem.tile import CHUNK_BYTES, WAVEFRONT_BYTES, SmemTile
from layouts.banks import (
    WARP,
    Access,
    CopyPhase,
    Phase,
    Vector,
    cp_async_write,
    every_block,
    join,
    ldmatrix_a,
    ldmatrix_a_transposed,
    ldmatrix_b,
    ldmatrix_b_by_tiles,
    ldmatrix_v,
    load_rows,
    store_fragment,
    warp_access,
)
from layouts.kernels import BROADCAST, ONE_THREAD, Use
from layouts.layout import Layout, layout_of, transposed

FP32_BYTES = 4
WARPGROUP_WARPS = 4
NUM_WARPGROUPS = 2
MATRIX = 8
# Halves of a warpgroup's columns, which the kernel for wide heads computes one after the other.
HALVES = 2


class Sm90BwdTile(Protocol):
    """The fields of a tile that determine the accesses of the wgmma kernel."""

    @property
    def head_dim(self) -> int: ...
    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...


class Sm80BwdTile(Sm90BwdTile, Protocol):
    """The same for the mma.sync kernel, with its warp grids."""

    @property
    def num_warps(self) -> int: ...
    @property
    def warps_s(self) -> int: ...
    @property
    def warps_kv(self) -> int: ...
    @property
    def warps_q(self) -> int: ...
    @property
    def warps_per_score(self) -> int: ...
    @property
    def queries_per_warp(self) -> int: ...
    @property
    def splits_s(self) -> bool: ...
    @property
    def warps_per_gradient(self) -> int: ...
    @property
    def p_in_registers(self) -> bool: ...


class Sm90WideBwdTile(Sm90BwdTile, Protocol):
    """The same for the wgmma kernel for wide heads."""

    @property
    def dq_pieces(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def cta_head_dim(self) -> int: ...


@lru_cache(maxsize=16)
def bwd_sm80_uses(tile: Sm80BwdTile, variant: str = "swizzled") -> tuple[Use, ...]:
    """Uses of the mma.sync kernel in the order of the code. Only `swizzled` is built; the others are predictions."""
    kv, q, s = (
        SmemTile(rows, cols, variant=variant)
        for rows, cols in ((tile.tile_n, tile.head_dim), (tile.tile_m, tile.head_dim), (tile.tile_n, tile.tile_m))
    )
    threads, warps = WARP * tile.num_warps, tile.num_warps
    uses = [
        *(Use(name, "cp.async", cp_async_write(kv, threads), kv) for name in "KV"),
        *(Use(name, "cp.async", cp_async_write(q, threads), q, is_per_block=True) for name in ("Q", "dO")),
        *(Use(name, "cp.async", copy_statistic(tile.tile_m), is_per_block=True) for name in ("LSE", "D")),
    ]

    def reads(name: str, smem: SmemTile, access: Access, repeats: int) -> Use:
        return Use(name, "ldmatrix", access, smem, repeats, is_per_block=True)

    # The warps form a grid over a product: each column of the grid reads all of operand A, and each row reads all of B.
    # The grid has `warps_s`, `warps_kv` or `warps_q` rows. Half of the warps may compute S, and the others dP; half of
    # them dK, and the others dV.
    load_b = ldmatrix_b_by_tiles if tile.queries_per_warp == MATRIX else ldmatrix_b
    for a, b in (("K", "Q"), ("V", "dO")):
        uses.append(reads(a, kv, every_block(kv, layout_of(kv), ldmatrix_a), tile.warps_per_score // tile.warps_s))
        uses.append(reads(b, q, every_block(q, layout_of(q), load_b), tile.warps_s))
    if tile.splits_s:
        # The second half passes dP to the first.
        half = join([contiguous_warp()] * (FP32_BYTES * tile.tile_n * tile.tile_m // (CHUNK_BYTES * WARP)))
        uses += [Use("dP", instruction, half, is_per_block=True) for instruction in ("st.shared", "ld.shared")]
    statistic = column_statistic(tile.queries_per_warp)
    uses += [
        Use(name, "ld.shared", statistic, repeats=tile.warps_per_score, is_per_block=True) for name in ("LSE", "D")
    ]
    stored = ("dS",) if tile.p_in_registers else ("P", "dS")
    uses += [Use(name, "st.shared", store_fragment(s), s, is_per_block=True) for name in stored]
    if not tile.p_in_registers:
        for name in stored:
            uses.append(
                reads(name, s, every_block(s, layout_of(s), ldmatrix_a), tile.warps_per_gradient // tile.warps_kv)
            )
    for name in ("dO^T", "Q^T"):
        uses.append(reads(name, q, every_block(q, transposed(q), ldmatrix_v), tile.warps_kv))
    ds_access = every_block(s, transposed(s), ldmatrix_a_transposed)
    uses.append(reads("dS^T", s, ds_access, warps // tile.warps_q))
    uses.append(reads("K^T", kv, every_block(kv, transposed(kv), ldmatrix_v), tile.warps_q))
    for name in ("dK", "dV"):
        uses.append(Use(name, "st.shared", store_fragment(kv), kv))
        uses.append(Use(name, "ld.shared", load_rows(kv, threads), kv))
    return tuple(uses)


@lru_cache(maxsize=16)
def bwd_sm90_uses(tile: Sm90BwdTile) -> tuple[Use, ...]:
    """Uses of the wgmma kernel: row statistics, dS, dQ before cp.reduce.async.bulk, and the published coordinates."""
    ds, warps = SmemTile(tile.tile_n, tile.tile_m), NUM_WARPGROUPS * WARPGROUP_WARPS
    statistic = column_statistic(tile.tile_m)
    pieces = tile.tile_m * tile.head_dim // (4 * WARP * warps)  # stores of a warp, 4 registers per thread
    return (
        *(Use(name, "ld.shared", statistic, repeats=warps, is_per_block=True) for name in ("LSE", "D")),
        Use("dS", "stmatrix", every_block(ds, layout_of(ds), ldmatrix_a), ds, is_per_block=True),
        Use("dQ", "st.shared", join([contiguous_warp()] * pieces), repeats=warps, is_per_block=True),
        # Coordinates, read by the MMA warps and the warp that adds dQ, and written by stores of 8 and 4 bytes.
        Use("tile", "ld.shared", BROADCAST, repeats=warps + 1),
        Use("tile", "st.shared", ONE_THREAD, repeats=2),
    )


@lru_cache(maxsize=16)
def bwd_sm90_wide_uses(tile: Sm90WideBwdTile) -> tuple[Use, ...]:
    """Uses of the wgmma kernel for wide heads, in one CTA.

    P and dS are stored by stmatrix.trans; dK and dV too, but in a cluster by stmatrix, without a transposition.
    """
    warps = NUM_WARPGROUPS * WARPGROUP_WARPS
    score, out = SmemTile(tile.tile_n, tile.tile_m), SmemTile(tile.tile_n, tile.cta_head_dim)
    keys = tile.tile_n // NUM_WARPGROUPS
    scores = join([store_transposed(score, first, keys, 0) for first in range(0, tile.tile_n, keys)])
    if tile.cluster > 1:
        part = SmemTile(tile.tile_n, tile.cta_head_dim // NUM_WARPGROUPS)
        gradient = join([every_block(part, layout_of(part), ldmatrix_a)] * NUM_WARPGROUPS)
    else:
        columns = range(0, tile.cta_head_dim, WAVEFRONT_BYTES // 2)
        gradient = join([store_transposed(out, 0, tile.tile_n, column) for column in columns])
    halves = join([contiguous_warp()] * (HALVES * tile.dq_pieces))
    # A thread has two rows of S, eight rows apart.
    rows = join([row_statistic(first) for first in (0, MATRIX)])
    return (
        *(Use(name, "ld.shared", rows, repeats=warps, is_per_block=True) for name in ("LSE", "D")),
        *(Use(name, "stmatrix", scores, score, is_per_block=True) for name in ("P", "dS")),
        Use("dQ", "st.shared", halves, repeats=warps, is_per_block=True),
        *(Use(name, "stmatrix", gradient, out) for name in ("dV", "dK")),
    )


def copy_statistic(rows: int) -> Access:
    """cp.async of an fp32 value per row by one warp, 16 bytes per thread."""
    phases = []
    per_line = WAVEFRONT_BYTES // CHUNK_BYTES
    for first in range(0, rows * FP32_BYTES // CHUNK_BYTES, per_line):
        lanes = tuple((lane, lane * CHUNK_BYTES) for lane in range(first, first + per_line))
        phases.append(CopyPhase(CHUNK_BYTES, lanes, tuple(address for _, address in lanes)))
    return Access(tuple(phases))


def column_statistic(columns: int) -> Access:
    """A warp's loads of an fp32 value per column of its accumulators: 8 bytes, the same for the eight rows of lanes."""
    row = Layout((1, columns), (columns, 1))
    vector = Vector(2 * FP32_BYTES, FP32_BYTES)
    loads = [[(0, first + lane % 4 * 2) for lane in range(WARP)] for first in range(0, columns, MATRIX)]
    return join([warp_access(row, list(coords), vector) for coords in loads])


def row_statistic(first: int) -> Access:
    """A warp's load of an fp32 value per row of its accumulators: the four lanes of a row read one word."""
    vector = Vector(FP32_BYTES, FP32_BYTES)
    return warp_access(
        Layout((1, 2 * MATRIX), (2 * MATRIX, 1)), [(0, first + lane // 4) for lane in range(WARP)], vector
    )


def contiguous_warp() -> Access:
    """A warp's store of 16 contiguous bytes per thread, neighbouring threads side by side."""
    per_phase = WAVEFRONT_BYTES // CHUNK_BYTES
    phases = [
        Phase(CHUNK_BYTES, tuple((lane, lane * CHUNK_BYTES) for lane in range(first, first + per_phase)))
        for first in range(0, WARP, per_phase)
    ]
    return Access(tuple(phases))


def store_transposed(tile: SmemTile, first_row: int, rows: int, first_column: int) -> Access:
    """stmatrix.trans of a warpgroup: `rows` rows of 64 columns, two 8 x 8 matrices (16 columns) per warp.

    A lane passes the address of 8 columns of one row, as `device/memory/stmatrix.py` computes it. If `rows` is an odd
    multiple of 8, the last instruction stores two matrices instead of four.
    """
    accesses = []
    for warp in range(WARPGROUP_WARPS):
        for first in range(0, rows, 2 * MATRIX):
            coords: list[tuple[int, int] | None] = []
            for lane in range(WARP):
                row = first + lane // (2 * MATRIX) * MATRIX + lane % MATRIX
                column = first_column + 2 * MATRIX * warp + lane // MATRIX % 2 * MATRIX
                coords.append((first_row + row, column) if row < rows else None)
            accesses.append(warp_access(layout_of(tile), coords, first_thread=WARP * warp))
    return join(accesses)
