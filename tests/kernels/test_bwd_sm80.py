"""The elements of shared memory that warps of the backward read and write, on the CPU.

A jit function that launches nothing runs on the host and computes the addresses of all threads. The tests model
ldmatrix and the MMA in Python.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory import ldmatrix
from cute_flash.device.memory.smem import byte_swizzle
from cute_flash.device.memory.views import as_mn
from cute_flash.device.scores.mask import column_offset
from cute_flash.kernels.sm80.bwd import BwdSm80
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.smem.tile import SmemTile
from cute_flash.spec.problem import Static
from layouts.layout import layout_of
from tests.device.tiles import accumulators, coordinates

# Traced functions have no annotations here: `from __future__ import annotations` makes them strings, but the DSL needs
# types. Without them, it uses the types of the arguments.

TILES = [
    BwdTileSm80(64, 128, 128, 2, 4, 4, 4),
    BwdTileSm80(96, 64, 128, 1, 8, 8, 4),
    BwdTileSm80(128, 32, 128, 1, 4, 4, 2),
    BwdTileSm80(192, 64, 96, 1, 2, 2, 2),
    BwdTileSm80(256, 32, 32, 1, 2, 1, 1, 4),
    BwdTileSm80(128, 32, 48, 1, 1, 1, 1, splits_kv=True, splits_s=True),
    BwdTileSm80(384, 16, 32, 1, 2, 1, 1, splits_kv=True, splits_s=True),
]
tiles = pytest.mark.parametrize("tile", TILES, ids=str)

# (operand, product, side, is it transposed, tile in shared memory)
OPERANDS = {
    "K of S": ("s", "a", False, "k"),
    "Q of S": ("s", "b", False, "q"),
    "dS of dK": ("kv", "a", False, "s"),
    "Q of dK": ("kv", "b", True, "q"),
    "dS of dQ": ("q", "a", True, "s"),
    "K of dQ": ("q", "b", True, "k"),
}
LANES = 32
ROW_VALUES = 8  # values of 16 bits of a row of an 8x8 matrix, whose address a thread passes to ldmatrix


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pointers by numbers, without memory."""
    monkeypatch.setattr(ldmatrix, "rederived", lambda value: value)


def kernel(tile: BwdTileSm80) -> BwdSm80:
    return BwdSm80(Static("bfloat16", tile.head_dim, True, True), tile)


def tensor_at_0(tile: SmemTile, stages: int):  # type: ignore[no-untyped-def]
    pointer = cute.make_ptr(cutlass.BFloat16, Int32(0), cutlass.AddressSpace.smem, assumed_align=1024)
    shape, stride = tile.staged(stages)
    pointer = cute.recast_ptr(pointer, byte_swizzle(tile), cutlass.BFloat16)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def coordinates_at(smem: SmemTile) -> torch.Tensor:
    """Element index -> (row, col)."""
    found = torch.full((smem.cosize, 2), -1)
    for row in range(smem.rows):
        for col in range(smem.cols):
            found[layout_of(smem)(row, col)] = torch.tensor((row, col))
    assert found.min() >= 0
    return found


def addresses(operand):  # type: ignore[no-untyped-def]
    """The elements that a thread addresses in all its loads, recorded while `operand` is traced."""
    found = []

    def note(_, source, target):  # type: ignore[no-untyped-def]
        assert cute.size(source) * cute.size(operand.view, mode=[0]) == ROW_VALUES * cute.size(target)
        for i in range(cute.size(source) // ROW_VALUES):
            element = cute.crd2idx(ROW_VALUES * i, source.layout)
            found.append(Int32(source.iterator.toint()) // 2 + element)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "copy", note)
        for k in range(cute.size(operand.view, mode=[2])):
            operand.load_k(k, 0)
    return found


def stores(store, fragment):  # type: ignore[no-untyped-def]
    """(number of a pair, its element) of all stores of a thread, recorded while `store` is traced."""
    found = []

    class Target:
        def __init__(self, pointer, layout):  # type: ignore[no-untyped-def]
            self.pointer, self.layout = pointer, layout

        def __setitem__(self, i, pair):  # type: ignore[no-untyped-def]
            found.append((pair, Int32(self.pointer.toint()) // 2 + 2 * cute.crd2idx(i, self.layout)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "make_tensor", Target)
        # The tensors hold numbers of pairs instead of values.
        patch.setattr(cute, "recast_tensor", lambda *_: range(cute.size(fragment) // 2))
        store.store(fragment)
    return found


@pytest.mark.kernels("bwd_sm80")
@pytest.mark.compiles
@tiles
@pytest.mark.parametrize("name", OPERANDS)
def test_ldmatrix_reads_what_the_product_needs(tile: BwdTileSm80, name: str) -> None:
    product, side, is_transposed, where = OPERANDS[name]
    bwd = kernel(tile)
    grid, smem = getattr(bwd, f"{product}_grid"), getattr(bwd, f"{where}_tile")
    shape = (smem.cols, smem.rows) if is_transposed else (smem.rows, smem.cols)
    sizes = {}

    def operand_of(mma, thread):  # type: ignore[no-untyped-def]
        return getattr(grid, side)(mma, thread, tensor_at_0(smem, 2), smem, is_transposed).shifted(1)

    @cute.jit
    def program(read, wanted):  # type: ignore[no-untyped-def]
        mma = grid.mma()
        for thread in range(LANES * grid.num_warps):
            # The address that each thread passes to ldmatrix, as an element of the tile.
            operand = operand_of(mma, Int32(thread))
            values, steps, last = (cute.size(operand.view, mode=[i]) for i in range(3))
            sizes.update(values=values, loads=steps, k=last)
            for index, address in enumerate(addresses(operand)):
                read[thread, index] = address - smem.cosize
            # The element that each register must hold, by the definition of the product.
            thr_mma = mma.get_slice(Int32(thread))
            held = getattr(thr_mma, f"partition_{side.upper()}")(cute.make_identity_tensor(shape))
            codes = cute.make_rmem_tensor(operand.fragment.layout, Int32)
            for i in cutlass.range_constexpr(cute.size(codes)):
                first, second = held[i]
                codes[i] = first * 1024 + second
            view = cute.make_tensor(codes.iterator, operand.view.layout)
            for k in cutlass.range_constexpr(last):
                for i in cutlass.range_constexpr(steps):
                    for v in cutlass.range_constexpr(values):
                        wanted[thread, k * steps + i, v] = view[v, i, k]

    most = 64
    read = torch.full((LANES * grid.num_warps, most), -1, dtype=torch.int32)
    wanted = torch.full((LANES * grid.num_warps, most, 8), -1, dtype=torch.int32)
    program(from_dlpack(read), from_dlpack(wanted))
    count = sizes["loads"] * sizes["k"]
    read, wanted = read[:, :count], wanted[:, :count]

    # ldmatrix.x4 or .x2: lane 8 r + i passes the address of row i of the 8x8 matrix r. Lane l gets its elements
    # (l / 4, 2 (l % 4) + j), or, transposed, (2 (l % 4) + j, l / 4).
    at = coordinates_at(smem)
    rows = read.view(grid.num_warps, LANES, count)
    lanes = torch.arange(LANES)
    for r in range(sizes["values"] // 2):
        for j in range(2):
            pair, other = 2 * (lanes % 4) + j, lanes // 4
            row, column = (pair, other) if is_transposed else (other, pair)
            element = rows[:, 8 * r + row] + column[None, :, None]
            found = at[element.long()]  # (warp, lane, load, coordinate)
            need = wanted.view(grid.num_warps, LANES, count, 8)[..., 2 * r + j]
            need = torch.stack((need // 1024, need % 1024), -1)
            assert torch.equal(found, need.flip(-1) if is_transposed else need)


@pytest.mark.compiles
@tiles
def test_scores_land_where_they_are_read(tile: BwdTileSm80) -> None:
    bwd = kernel(tile)
    smem = bwd.s_tile

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = bwd.s_grid.mma()
        for thread in range(LANES * tile.warps_per_score):
            held = coordinates(mma, Int32(thread), (tile.tile_n, tile.tile_m))
            store = bwd.s_grid.store(mma, Int32(thread), tensor_at_0(smem, 2), smem).shifted(1)
            fragment = accumulators(mma, Int32(thread), (tile.tile_n, tile.tile_m))
            for pair, element in stores(store, fragment):
                row, col = held[2 * pair]
                out[thread, pair, 0], out[thread, pair, 1] = row, col
                out[thread, pair, 2] = element - smem.cosize

    threads = LANES * tile.warps_per_score
    out = torch.full((threads, tile.tile_m * tile.tile_n // threads // 2, 3), -1)
    out = out.to(torch.int32)
    program(from_dlpack(out))
    at = coordinates_at(smem)
    assert torch.equal(at[out[..., 2].long()], out[..., :2].long())
    # The second element of a pair follows the first, and all elements of the tile are covered.
    assert torch.equal(
        at[out[..., 2].long() + 1] - at[out[..., 2].long()], torch.tensor((0, 1)).expand_as(out[..., :2])
    )
    assert sorted(out[..., 2].flatten().tolist()) == list(range(0, smem.cosize, 2))


@pytest.mark.compiles
@tiles
def test_queries_of_a_thread_lie_as_the_mask_says(tile: BwdTileSm80) -> None:
    bwd = kernel(tile)

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = bwd.s_grid.mma()
        for thread in range(LANES * tile.warps_per_score):
            coords = as_mn(coordinates(mma, Int32(thread), (tile.tile_n, tile.tile_m)))
            for c in cutlass.range_constexpr(cute.size(coords, mode=[1])):
                out[thread, c] = coords[0, c][1] - coords[0, 0][1]

    columns = tile.queries_per_warp // 4
    out = torch.full((LANES * tile.warps_per_score, columns), -1, dtype=torch.int32)
    program(from_dlpack(out))
    assert torch.equal(out, torch.tensor([column_offset(c) for c in range(columns)]).expand_as(out).int())


@pytest.mark.compiles
@tiles
@pytest.mark.parametrize("product", ["kv", "q"])
def test_gradients_leave_in_order(tile: BwdTileSm80, product: str) -> None:
    """The epilogue writes each accumulator to its own element of the tile."""
    bwd = kernel(tile)
    grid = getattr(bwd, f"{product}_grid")
    shape = (tile.tile_n if product == "kv" else tile.tile_m, tile.head_dim)

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = grid.mma()
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Int32), mma)
        for thread in range(LANES * grid.num_warps):
            thr_copy, held = copy.get_slice(Int32(thread)), coordinates(mma, Int32(thread), shape)
            codes = accumulators(mma, Int32(thread), shape, Int32)
            for i in cutlass.range_constexpr(cute.size(codes)):
                row, col = held[i]
                codes[i] = row * 1024 + col
            source = thr_copy.retile(codes)
            target = thr_copy.partition_D(cute.make_identity_tensor(shape))
            for i in cutlass.range_constexpr(cute.size(source)):
                row, col = target[i]
                out[row, col] = source[i]

    out = torch.full(shape, -1, dtype=torch.int32)
    program(from_dlpack(out))
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])
    assert torch.equal(out, (rows * 1024 + columns).int())
