"""The shared-memory accesses of the forward kernels, and their bank conflicts per tile and per launch.

As in a profiler, only accesses through the load/store units count: ldmatrix, stmatrix, ld.shared, st.shared, and the
writes of cp.async. TMA and the operands of wgmma reach the banks in other ways, and no counter shows their conflicts.
In the Hopper kernel, only the epilogue and the coordinates of the next tile, which one warp publishes, count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import add
from typing import Protocol

from cute_flash.smem.tile import SmemTile
from layouts.banks import (
    BANK_BYTES,
    WARP,
    Access,
    Phase,
    cp_async_write,
    every_block,
    ldmatrix_a,
    ldmatrix_b,
    ldmatrix_v,
    load_rows,
    store_fragment,
)
from layouts.layout import layout_of, transposed

# All threads of a warp read one word.
BROADCAST = Access((Phase(BANK_BYTES, tuple((lane, 0) for lane in range(WARP))),))
ONE_THREAD = Access((Phase(BANK_BYTES, ((0, 0),)),))


class Sm80Tile(Protocol):
    """The properties of a tile that determine the accesses of the mma.sync kernel."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def num_warps(self) -> int: ...
    @property
    def q_steps(self) -> int: ...
    def smem(self, rows: int) -> SmemTile: ...


class Sm90Tile(Protocol):
    """The properties of a tile that determine the accesses of the wgmma kernel."""

    @property
    def num_warpgroups(self) -> int: ...
    @property
    def q_stages(self) -> int: ...
    def operand_smem(self, operand: str) -> SmemTile: ...


@dataclass(frozen=True)
class Work:
    """The size of a launch."""

    row_tiles: int
    key_blocks: int  # K/V blocks that all row tiles visit, in total


@dataclass(frozen=True)
class Count:
    """Numbers of warp instructions and of their wavefronts in shared memory."""

    instructions: int = 0
    wavefronts: int = 0
    conflicts: int = 0  # wavefronts beyond one per phase

    def __add__(self, other: Count) -> Count:
        return Count(
            self.instructions + other.instructions, self.wavefronts + other.wavefronts, self.conflicts + other.conflicts
        )

    def __mul__(self, times: int) -> Count:
        return Count(self.instructions * times, self.wavefronts * times, self.conflicts * times)


@dataclass(frozen=True)
class Use:
    """One kind of access of a CTA to a tile in shared memory."""

    operand: str  # Q, K, V or O; "tile": the published coordinates of the next tile
    instruction: str  # one of INSTRUCTIONS
    access: Access
    tile: SmemTile | None = None
    repeats: int = 1  # times per row tile or K/V block, such as the number of warps
    is_per_block: bool = False  # once per K/V block; else once per row tile

    @property
    def name(self) -> str:
        return f"{self.operand} {self.instruction}"

    @property
    def once(self) -> Count:
        """The counts of one row tile, or of one K/V block if `is_per_block`."""
        one = self.access
        return Count(one.instructions, one.wavefronts, one.conflicts) * self.repeats

    def launched(self, work: Work) -> Count:
        """The counts of a launch."""
        return self.once * (work.key_blocks if self.is_per_block else work.row_tiles)


INSTRUCTIONS = ("ldmatrix", "ld.shared", "st.shared", "stmatrix", "cp.async")


# Cached, because counting takes long, and the pictures of a kernel need all its variants.
@lru_cache(maxsize=16)
def sm80_uses(tile: Sm80Tile) -> tuple[Use, ...]:
    """The accesses of the mma.sync kernel, in program order."""
    tiles = sm80_tiles(tile)
    q, kv = tiles["Q"], tiles["K"]
    threads, register_cols = WARP * tile.num_warps, 16 * tile.q_steps
    kv_copy = cp_async_write(kv, threads)
    uses = [
        Use("Q", "cp.async", cp_async_write(q, threads), q),
        Use("K", "cp.async", kv_copy, kv, is_per_block=True),
        Use("V", "cp.async", kv_copy, kv, is_per_block=True),
    ]
    # Each warp reads all of K and V, and its own rows of Q. It reads the first
    # `register_cols` columns of Q once per tile.
    if register_cols:
        uses.append(Use("Q", "ldmatrix", every_block(q, layout_of(q), ldmatrix_a, range(register_cols)), q))
    if register_cols < q.cols:
        rest = every_block(q, layout_of(q), ldmatrix_a, range(register_cols, q.cols))
        uses.append(Use("Q", "ldmatrix", rest, q, is_per_block=True))
    k_access = every_block(kv, layout_of(kv), ldmatrix_b)
    v_access = every_block(kv, transposed(kv), ldmatrix_v)
    return (
        *uses,
        Use("K", "ldmatrix", k_access, kv, tile.num_warps, is_per_block=True),
        Use("V", "ldmatrix", v_access, kv, tile.num_warps, is_per_block=True),
        # Warps that share rows store other columns of them.
        Use("O", "st.shared", store_fragment(q, min(tile.num_warps, q.rows // 16)), q),
        Use("O", "ld.shared", load_rows(q, threads), q),
    )


def sm80_tiles(tile: Sm80Tile) -> dict[str, SmemTile]:
    """The tiles in shared memory by operand. O reuses the memory of Q."""
    q, kv = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
    return {"Q": q, "K": kv, "V": kv, "O": q}


def sm90_tiles(tile: Sm90Tile) -> dict[str, SmemTile]:
    """The tiles in shared memory by operand; for Q and O, those of one warpgroup."""
    return {operand: tile.operand_smem(operand) for operand in "QKVO"}


@lru_cache(maxsize=16)
def sm90_uses(tile: Sm90Tile) -> tuple[Use, ...]:
    """The accesses of the wgmma kernel: the epilogue, and the published coordinates of the next tile."""
    uses = []
    readers = 4 * tile.num_warpgroups + 1
    if tile.q_stages > 1:
        # With one stage of Q the output is stored to global memory from registers.
        o = sm90_tiles(tile)["O"]
        access = every_block(o, layout_of(o), ldmatrix_a)
        uses.append(Use("O", "stmatrix", access, o, tile.num_warpgroups))
        readers += 1
    # The m_block, head and batch index of a tile, written by stores of 8 and 4 bytes.
    uses.append(Use("tile", "ld.shared", BROADCAST, repeats=3 * readers))
    uses.append(Use("tile", "st.shared", ONE_THREAD, repeats=2))
    return tuple(uses)


def predict(uses: Iterable[Use], work: Work) -> dict[str, Count]:
    """The counts of a launch for each of INSTRUCTIONS."""
    uses = tuple(uses)
    return {
        name: reduce(add, (use.launched(work) for use in uses if use.instruction == name), Count())
        for name in INSTRUCTIONS
    }
