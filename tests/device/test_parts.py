"""Parts of the kernels on the CPU: a jit function that launches nothing is compiled for the host, and runs.

While a test traces, GPU-only instructions are replaced by their effect on a single thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory.copies import RowTiles, plain_row_copy
from cute_flash.device.memory.rotary import VECTOR, Rotary
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.scheduling.tile_scheduler import StaticTileScheduler
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask, column_offset
from cute_flash.device.softmax.softmax import LN_2, LOG2_E, THREADS_PER_ROW, Softmax
from cute_flash.kernels.sm80.bwd import BwdSm80
from cute_flash.kernels.sm80.fwd import FwdSm80
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.reference.decode import rotated
from cute_flash.spec import band as spec
from cute_flash.spec.problem import Static
from tests.device.bands import SIDES, band_of
from tests.device.tiles import accumulators, coordinates, store

# Traced functions have no annotations here: `from __future__ import annotations` makes them strings, but the DSL needs
# types. Without them, it uses the types of the arguments.

# Two tiles that differ in rows per warp, warps and columns.
TILES = [FwdTileSm80(64, 128, 32, 4, 1), FwdTileSm80(96, 128, 64, 8, 1)]
tiles = pytest.mark.parametrize("tile", TILES, ids=["4 warps", "8 warps"])


def tiled_mma(tile: FwdTileSm80):  # type: ignore[no-untyped-def]
    return FwdSm80(Static("bfloat16", tile.head_dim, True, True), tile).grids.s.mma()


# The grid


def tile_coords(
    shape: tuple[int, int, int], heads_per_l2_group: int, longest_first: bool, batch_is_inner: bool
) -> list[tuple[int, int, int]]:
    """(m_block, head, batch) of every CTA of the grid, in launch order."""
    num_m_blocks, heads, batch = shape

    @cute.jit
    def program(out, num_m_blocks, heads, batch, group, is_inner):  # type: ignore[no-untyped-def]
        scheduler = StaticTileScheduler(num_m_blocks, heads, batch, group, longest_first, is_inner == 1)
        for i in range(out.shape[0]):
            m_block, head, (batch_index,) = scheduler.tile_coord(Int32(i))
            out[i, 0], out[i, 1], out[i, 2] = m_block, head, batch_index

    out = torch.full((num_m_blocks * heads * batch, 3), -1, dtype=torch.int32)
    program(from_dlpack(out), *map(Int32, (num_m_blocks, heads, batch, heads_per_l2_group, batch_is_inner)))
    return [tuple(row) for row in out.tolist()]


def expected_order(
    shape: tuple[int, int, int], heads_per_l2_group: int, longest_first: bool, batch_is_inner: bool
) -> list[tuple[int, int, int]]:
    """L2 groups one after the other; in a group, m_blocks one after the other, and for each m_block all heads.

    `batch_is_inner`: heads are ordered by head, then by batch.
    """
    num_m_blocks, heads, batch = shape
    pairs = [(head, b) for b in range(batch) for head in range(heads)]
    pairs = sorted(pairs) if batch_is_inner else pairs
    tiles = range(num_m_blocks)[::-1] if longest_first else range(num_m_blocks)
    return [
        (m_block, head, b)
        for first in range(0, len(pairs), heads_per_l2_group)
        for m_block in tiles
        for head, b in pairs[first : first + heads_per_l2_group]
    ]


@pytest.mark.compiles
@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize("batch_is_inner", [False, True])
@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((3, 4, 2), (1, 3, 4, 5, 8)), ((1, 1, 1), (1,)), ((5, 3, 3), (2, 9)), ((2, 7, 1), (7, 4))]
)
def test_grid_order(
    shape: tuple[int, int, int], groups: tuple[int, ...], longest_first: bool, batch_is_inner: bool
) -> None:
    for group in groups:
        found = tile_coords(shape, group, longest_first, batch_is_inner)
        assert found == expected_order(shape, group, longest_first, batch_is_inner)
        assert sorted(found) == sorted(itertools.product(*map(range, shape)))


# Views of accumulators


@pytest.mark.compiles
@tiles
def test_accumulators_as_rows_and_columns(tile: FwdTileSm80) -> None:
    """A row of the (m, n) view is a row of the tile, and all threads together hold every element once."""

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = tiled_mma(tile)
        for thread in range(tile.num_threads):
            coords = as_mn(coordinates(mma, Int32(thread), (tile.tile_m, tile.tile_n)))
            for r in cutlass.range_constexpr(cute.size(coords, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(coords, mode=[1])):
                    out[thread, r, c, 0], out[thread, r, c, 1] = coords[r, c]

    rows = tile.tile_m // tile.num_warps // 8
    cols = tile.tile_n // THREADS_PER_ROW
    out = torch.full((tile.num_threads, rows, cols, 2), -1, dtype=torch.int32)
    program(from_dlpack(out))
    assert torch.equal(out[..., 0], out[:, :, :1, 0].expand(-1, -1, cols))
    assert torch.equal(out[..., 1], out[:, :1, :, 1].expand(-1, rows, -1))
    held = sorted(map(tuple, out.view(-1, 2).tolist()))
    assert held == list(itertools.product(range(tile.tile_m), range(tile.tile_n)))
    # Neighbouring threads share rows; the reductions of the softmax rely on this.
    by_row = out[:, :, 0, 0].view(-1, THREADS_PER_ROW, rows)
    assert torch.equal(by_row, by_row[:, :1].expand_as(by_row))
    # A column is the thread's first column plus the offset that the mask computes.
    offsets = [column_offset(c) for c in range(cols)]
    assert torch.equal(out[:, 0, :, 1] - out[:, 0, :1, 1], torch.tensor(offsets).expand(tile.num_threads, -1))


# Tiles of the forward: Q K^T, then P V. A tile of the backward: S^T, then dV; it keeps P in registers.
BWD = BwdSm80(Static("bfloat16", 96, True, True), BwdTileSm80(96, 64, 128, 1, 8, 8, 4))
OPERANDS_A = {
    **{str(tile): (tile.tile_m, tile.tile_n, tile.num_threads, *[partial(tiled_mma, tile)] * 2) for tile in TILES},
    "bwd": (BWD.tile.tile_n, BWD.tile.tile_m, BWD.tile.num_threads, BWD.s_grid.mma, BWD.kv_grid.mma),
}


@pytest.mark.compiles
@pytest.mark.parametrize(("rows", "columns", "threads", "mma_s", "mma_next"), OPERANDS_A.values(), ids=OPERANDS_A)
def test_accumulators_are_operand_a(rows: int, columns: int, threads: int, mma_s: Any, mma_next: Any) -> None:
    """P stays in registers: a thread holds the elements that the next product needs as operand A, in the same order."""

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        first, following = mma_s(), mma_next()
        for thread in range(threads):
            held = as_operand_a(coordinates(first, Int32(thread), (rows, columns)))
            wanted = following.get_slice(Int32(thread)).partition_A(cute.make_identity_tensor((rows, columns)))
            for i in cutlass.range_constexpr(cute.size(wanted)):
                out[0, thread, i, 0], out[0, thread, i, 1] = held[i]
                out[1, thread, i, 0], out[1, thread, i, 1] = wanted[i]

    out = torch.full((2, threads, rows * columns // threads, 2), -1, dtype=torch.int32)
    program(from_dlpack(out))
    assert out.min() >= 0
    assert torch.equal(out[0], out[1])


# The mask


def masked_tile(tile: FwdTileSm80, sides: str, wraps: bool = False) -> Callable[..., torch.Tensor]:
    """`f(sq, sk, left, right, chunk, first_row, first_col)`: a tile of ones after all threads have masked theirs."""

    @cute.jit
    def program(out, sq, sk, left, right, chunk, first_row, first_col):  # type: ignore[no-untyped-def]
        mma = tiled_mma(tile)
        band = band_of(Band, sides, left, right, chunk)
        for thread in range(tile.num_threads):
            tScS = coordinates(mma, Int32(thread), (tile.tile_m, tile.tile_n))
            acc_S = accumulators(mma, Int32(thread), (tile.tile_m, tile.tile_n))
            acc_S.fill(1.0)
            Mask(band, sq, sk, first_row, tScS, wraps).apply(as_mn(acc_S), first_col)
            store(acc_S, tScS, out)

    empty = torch.full((tile.tile_m, tile.tile_n), torch.nan)
    compiled = cute.compile(program, from_dlpack(empty), *map(Int32, (0,) * 7))

    def run(*numbers: int) -> torch.Tensor:
        out = torch.full((tile.tile_m, tile.tile_n), torch.nan)
        compiled(from_dlpack(out), *map(Int32, numbers))
        return out

    return run


@pytest.mark.compiles
@tiles
@pytest.mark.parametrize("sides", SIDES)
def test_mask_is_the_band(tile: FwdTileSm80, sides: str) -> None:
    run = masked_tile(tile, sides)
    for sq, sk, left, right, chunk in (
        (300, 500, 20, 30, 70), (500, 300, 0, 0, 1), (128, 64, 500, 7, 50), (129, 65, 1, 200, 16),
        (250, 350, 400, 0, 100),
    ):  # fmt: skip
        band = band_of(spec.Band, sides, left, right, chunk)
        for m_block, n_block in itertools.product(range(-(-sq // tile.tile_m)), range(-(-sk // tile.tile_n))):
            first_row, first_col = m_block * tile.tile_m, n_block * tile.tile_n
            rows = torch.arange(first_row, first_row + tile.tile_m).tolist()
            lo = torch.tensor([band.lo(i, sq, sk) for i in rows])[:, None]
            hi = torch.tensor([band.hi(i, sq, sk) for i in rows])[:, None]
            columns = torch.arange(first_col, first_col + tile.tile_n)
            expected = torch.where((lo <= columns) & (columns < hi), 1.0, -torch.inf)
            found = run(sq, sk, left, right, chunk, first_row, first_col)
            # Rows past the last query are never stored.
            assert torch.equal(found[: sq - first_row], expected[: sq - first_row])


@pytest.mark.compiles
def test_mask_with_pack_gqa_restarts_at_each_head() -> None:
    """The rows of a tile belong to several heads, one after the other, and the band restarts at each head."""
    tile = TILES[0]
    run, band = masked_tile(tile, "lrc", wraps=True), spec.Band(20, 9, 13)
    for sq, sk, group in ((1, 90, 200), (50, 90, 5), (100, 33, 3)):
        for m_block, n_block in itertools.product(range(-(-group * sq // tile.tile_m)), range(-(-sk // 32))):
            first_row, first_col = m_block * tile.tile_m, n_block * tile.tile_n
            positions = [row % sq for row in range(first_row, min(first_row + tile.tile_m, group * sq))]
            lo = torch.tensor([band.lo(i, sq, sk) for i in positions])[:, None]
            hi = torch.tensor([band.hi(i, sq, sk) for i in positions])[:, None]
            columns = torch.arange(first_col, first_col + tile.tile_n)
            expected = torch.where((lo <= columns) & (columns < hi), 1.0, -torch.inf)
            found = run(sq, sk, 20, 9, 13, first_row, first_col)
            assert torch.equal(found[: len(positions)], expected)


# Rotary embedding


@pytest.mark.compiles
@pytest.mark.parametrize("kind", ["halves", "pairs"])
@pytest.mark.parametrize("table", [torch.float32, torch.float16], ids=str)
def test_rotary_has_the_bits_of_the_cpu_path(kind: str, table: torch.dtype) -> None:
    """The CPU path and the kernels round the same products, so they append the same rows."""
    tokens, head_dim, rotary_dim = 50, 64, 48

    @cute.jit
    def program(rows, cos, sin, out):  # type: ignore[no-untyped-def]
        rotary, x = Rotary(cos, sin, kind, rotary_dim), cute.make_rmem_tensor(VECTOR, Float32)
        for token in cutlass.range(tokens, unroll=1):
            for vector in cutlass.range_constexpr(head_dim // VECTOR):
                rotary.load(rows[token, None], Int32(vector), Int32(token), x)
                for i in cutlass.range_constexpr(VECTOR):
                    out[token, vector * VECTOR + i] = x[i]

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, head_dim, generator=generator).half()
    angles = 6 * torch.rand(tokens, rotary_dim // 2, generator=generator)
    cos, sin = angles.cos().to(table), angles.sin().to(table)
    out = torch.full(rows.shape, torch.nan)
    program(*(from_dlpack(x, assumed_align=16) for x in (rows, cos, sin, out)))
    expected = rotated(rows.float()[:, None], torch.arange(tokens), cos, sin, kind == "pairs")[:, 0]
    assert torch.equal(out, expected)


# The softmax

ROWS, COLS, WIDTH = 2, 4, 3


def online_softmax(
    scores: torch.Tensor, values: torch.Tensor, scale: float, keys_per_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of blocks of scores (block, ROWS, COLS) and values (block, COLS, WIDTH), on one thread.

    `keys_per_block`: the number by which the count of seen keys grows with each block.
    """

    @cute.jit
    def program(scores, values, out, lse, scale_log2):  # type: ignore[no-untyped-def]
        acc_O = cute.make_rmem_tensor(cute.make_layout((ROWS, WIDTH)), Float32)
        acc_S = cute.make_rmem_tensor(cute.make_layout((ROWS, COLS)), Float32)
        acc_O.fill(0.0)
        softmax = Softmax.start(acc_O, scale_log2)
        for block in cutlass.range(scores.shape[0], unroll=1):
            for r, c in itertools.product(range(ROWS), range(COLS)):
                acc_S[r, c] = scores[block, r, c]
            softmax.step(acc_S, acc_O, block * keys_per_block)
            for r, d, c in itertools.product(range(ROWS), range(WIDTH), range(COLS)):
                acc_O[r, d] = acc_O[r, d] + acc_S[r, c] * values[block, c, d]
        row_lse = cute.make_rmem_tensor(ROWS, Float32)
        softmax.finish(acc_O, row_lse)
        for r in cutlass.range_constexpr(ROWS):
            lse[r] = row_lse[r]
            for d in cutlass.range_constexpr(WIDTH):
                out[r, d] = acc_O[r, d]

    out, lse = torch.full((ROWS, WIDTH), torch.nan), torch.full((ROWS,), torch.nan)
    program(*map(from_dlpack, (scores, values, out, lse)), Float32(scale * LOG2_E))
    return out, lse


def block_scores(name: str) -> torch.Tensor:
    scores = torch.randn((6, ROWS, COLS), generator=torch.Generator().manual_seed(3))
    ramp = torch.arange(6.0)[:, None, None]
    if name == "slowly rising":
        # Below the threshold, m lags behind and nothing is rescaled.
        return scores * 0.1 + ramp
    if name == "steeply rising":
        return scores + 40 * ramp
    if name == "falling":
        return scores - 40 * ramp
    if name == "first blocks hidden":
        scores[:3] = -torch.inf
    if name == "holes":
        scores[scores < 0.3] = -torch.inf
    if name == "one row hidden":
        scores[:, 1] = -torch.inf
    return scores


@pytest.mark.compiles
@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize("scale", [1.0, 0.37])
# The result is the same whether every rise of the maximum rescales, or only large ones.
@pytest.mark.parametrize("keys_per_block", [0, 1 << 20])
@pytest.mark.parametrize(
    "name", ["random", "slowly rising", "steeply rising", "falling", "first blocks hidden", "holes", "one row hidden"]
)
def test_online_softmax(name: str, keys_per_block: int, scale: float) -> None:
    scores = block_scores(name)
    values = torch.randn((6, COLS, WIDTH), generator=torch.Generator().manual_seed(4))
    out, lse = online_softmax(scores, values, scale, keys_per_block)
    S = scale * scores.double().permute(1, 0, 2).flatten(1)
    is_empty = (S == -torch.inf).all(-1)
    expected_lse = S.logsumexp(-1)
    # The four threads of a row hold the same scores, so the sum of the row is four times that of a thread, whose
    # output has a quarter of the weight.
    expected = (S - expected_lse[:, None]).exp() @ values.double().flatten(0, 1) / THREADS_PER_ROW
    torch.testing.assert_close(out[~is_empty].double(), expected[~is_empty], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        lse[~is_empty].double(), expected_lse[~is_empty] + math.log(THREADS_PER_ROW), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(out[is_empty], torch.zeros_like(out[is_empty]))
    assert torch.all(lse[is_empty] == -torch.inf)


def test_constants_of_the_softmax() -> None:
    assert pytest.approx(1 / math.log(2), rel=1e-15) == LOG2_E
    assert pytest.approx(math.log(2), rel=1e-15) == LN_2


# Copies


@pytest.mark.compiles
@pytest.mark.parametrize("check_rows", [False, True])
@pytest.mark.parametrize(("tile", "head_dim"), [(TILES[0], 64), (TILES[0], 40), (TILES[1], 72), (TILES[1], 8)])
def test_copies_stay_inside_the_matrix(tile: FwdTileSm80, head_dim: int, check_rows: bool) -> None:
    """Each vector of the tile belongs to one thread, and is copied if it is inside the matrix."""
    row_elements = 64 if tile.head_dim % 64 == 0 else 32
    vectors = tile.head_dim // 8

    @cute.jit
    def program(out, rows_left):  # type: ignore[no-untyped-def]
        copy = plain_row_copy(tile.num_threads, row_elements, cutlass.BFloat16)
        for thread in range(tile.num_threads):
            rows = RowTiles(copy, Int32(thread), tile.tile_m, tile.head_dim, head_dim)
            thr_copy = copy.get_slice(Int32(thread))
            tXcX = thr_copy.partition_S(cute.make_identity_tensor((tile.tile_m, tile.head_dim)))
            pred = rows.predicates(thr_copy, tXcX, rows_left, check_rows)
            for m in cutlass.range_constexpr(cute.size(tXcX, mode=[1])):
                for k in cutlass.range_constexpr(cute.size(tXcX, mode=[2])):
                    row, col = tXcX[(0, 0), m, k]
                    out[row, col // 8] = out[row, col // 8] + 1 + Int32(pred[0, m, k])

    for rows_left in (1, 77, tile.tile_m, 1000):
        out = torch.zeros((tile.tile_m, vectors), dtype=torch.int32)
        program(from_dlpack(out), Int32(rows_left))
        inside = (torch.arange(vectors) * 8 < head_dim).expand(tile.tile_m, -1)
        if check_rows:
            inside = inside & (torch.arange(tile.tile_m) < rows_left)[:, None]
        # 1: a vector that was not copied; 2: copied.
        assert torch.equal(out, 1 + inside.int())
