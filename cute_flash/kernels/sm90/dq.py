"""Additions and stores of dQ, from registers and shared memory to global memory.

In global memory the fp32 accumulators of an m_block are in register order: (warpgroup's part, group of four registers,
thread, register of the four). A warp therefore accesses contiguous memory, 16 bytes per thread.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_flash.device.gradients.dq_claims import DQClaim
from cute_flash.device.memory.copies import row_tile
from cute_flash.device.memory.epilogue import store_rows
from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import convert
from cute_flash.device.ptx import rederived
from cute_flash.device.scheduling.pipeline import Pipeline
from cute_flash.device.scheduling.seqlen import SeqlenInfo
from cute_flash.planning.tiles.common import WARPGROUP_ROWS

THREADS = 128  # of a warpgroup


def bulk_add(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start to add `num_bytes` of fp32 in shared memory to global memory. Called by one thread."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes)],
    )


def bulk_store(target: cute.Pointer, source: cute.Pointer, num_bytes: int):
    """Start to copy `num_bytes` from shared to global memory. Called by one thread."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes)],
    )


def bulk_add_or_store(target: cute.Pointer, source: cute.Pointer, num_bytes: int, rank: Int32):
    """`bulk_store` if the rank is 0, else `bulk_add`. Predicates take fewer registers than a branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred is_first; setp.eq.s32 is_first, {$r3}, 0;"
        "@is_first cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};"
        "@!is_first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2}; }",
        read_only_args=[target.toint(), source.toint(), Int32(num_bytes), rank],
    )


class StagedPiece(NamedTuple):
    """A piece of dQ in shared memory."""

    source: cute.Pointer
    iteration: Int32  # of the dq pipeline


@dataclass(frozen=True)
class DQPart:
    """A part of the accumulators of an m_block: what one adder warp adds for a K/V tile."""

    mdQ_accum: cute.Tensor  # (B, H, m_blocks, elements of a tile)
    mClaims: cute.Tensor  # (B, H, m_blocks)
    block: Int32  # index of the m_block in both tensors
    part: Int32 | int
    num_parts: cutlass.Constexpr  # of an m_block
    uses_claims: Boolean  # the first CTA stores the part; otherwise it is 0 before the first addition

    def claim(self) -> DQClaim:
        # The address is computed at each use, for lack of registers.
        return DQClaim((self.mClaims.iterator + rederived(self.block)).toint())

    @cute.jit
    def add_or_store(self, pieces: tuple[StagedPiece, ...], num_bytes: cutlass.Constexpr, pipeline: Pipeline):
        """Add or store each piece of a part of dQ when it is in shared memory. Called by a warp."""
        is_first = Int32(0)
        if self.uses_claims:
            is_first = self.claim().claim_or_wait(self.part)
        elements = cute.size(self.mdQ_accum, mode=[3]) // (self.num_parts * len(pieces))
        for i in cutlass.range_constexpr(len(pieces)):
            source, iteration = pieces[i]
            pipeline.wait_full(iteration)
            if cute.arch.lane_idx() == 0:
                index = (Int64(rederived(self.block)) * self.num_parts + self.part) * len(pieces) + i
                target = self.mdQ_accum.iterator + index * elements
                if is_first != 0:
                    bulk_store(target, source, num_bytes)
                else:
                    bulk_add(target, source, num_bytes)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                pipeline.release_per_thread(iteration)
            cute.arch.sync_warp()
        if is_first != 0:
            if cute.arch.lane_idx() == 0:
                cute.arch.cp_async_bulk_wait_group(0)
                self.claim().set_stored(self.part)
            cute.arch.sync_warp()


@cute.jit
def add_accumulators(gdQ: cute.Tensor, acc: cute.Tensor, wg: Int32, thread: Int32):
    """Add the accumulators in global memory to this thread's registers. Loads bypass L1, which is not coherent."""
    part = THREADS * cute.size(acc)
    for i in cutlass.range_constexpr(cute.size(acc) // 4):
        address = (gdQ.iterator + (wg * part + (i * THREADS + thread) * 4)).toint()
        values = cute.arch.inline_ptx(
            "ld.global.cg.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
        for j in cutlass.range_constexpr(4):
            acc[4 * i + j] = acc[4 * i + j] + values[j]


@cute.jit
def add_four(first: cute.Pointer, four: cute.Tensor, part: Int32, piece: cutlass.Constexpr, thread: Int32):
    """Add four registers per thread to the accumulators of the m_block at `first`.

    `part`: index of half of a warpgroup's dQ, 32 registers per thread; `piece`: index of the four among them, 0 to 7.
    """
    address = first + ((part * 8 + piece) * (4 * THREADS) + thread * 4)
    cute.arch.inline_ptx(
        "red.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address.toint(), *(four[j] for j in range(4))],
    )


@cute.jit
def store_dq(
    acc: cute.Tensor,
    mdQ: cute.Tensor,
    m_block: Int32,
    head: Int32,
    seqlen: SeqlenInfo,
    tiled_mma: cute.TiledMma,
    head_dim: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    wg: Int32,
    thread: Int32,
):
    """Store a warpgroup's part of dQ of an m_block as rows in the dtype of q.

    `tile`: of the backward kernel. `head_dim`: the number of columns that exist.
    """
    rows, columns = tile.dq_part
    by_rows = rows < tile.tile_m
    first_row = m_block * tile.tile_m + (wg * rows if by_rows else 0)
    first_column = 0 if by_rows else wg * columns
    rdQ = cute.make_fragment_like(acc, mdQ.element_type)
    convert(acc, rdQ)
    # (2 rows of each m64 tile, n8 tiles)
    tiles = columns // 8
    layout = cute.make_layout(((2, rows // WARPGROUP_ROWS), tiles), stride=((1, 2 * tiles), 2))
    packed = cute.make_tensor(cute.recast_tensor(rdQ, Int32).iterator, layout)
    gRows = row_tile(seqlen.slice_head(mdQ, head), seqlen.q_row(first_row), rows, tile.head_dim)
    gPart = cute.make_tensor((gRows.iterator + first_column).align(16), gRows.layout)
    coords = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, columns)))
    store_rows(packed, gPart, as_mn(coords), head_dim - first_column, seqlen.q_len - first_row)
