"""What the forward kernels do to shared memory, and the bank conflicts that follow: for a tile, for a launch.

Counted is what goes through the load/store units, whose counters a profiler reads: ldmatrix and stmatrix,
ld.shared and st.shared, and the writes of cp.async. The copy engine (TMA) and the operands of wgmma take
other ways to the same banks, and no counter tells their conflicts: of the Hopper kernel that leaves the
epilogue.
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

# Where all threads of a warp read one word.
BROADCAST = Access((Phase(BANK_BYTES, tuple((lane, 0) for lane in range(WARP))),))
ONE_THREAD = Access((Phase(BANK_BYTES, ((0, 0),)),))


class Sm80Tile(Protocol):
    """What decides the accesses of the mma.sync kernel."""

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
    """What decides those of the wgmma kernel."""

    @property
    def num_warpgroups(self) -> int: ...
    @property
    def q_stages(self) -> int: ...
    def operand_smem(self, operand: str) -> SmemTile: ...


@dataclass(frozen=True)
class Work:
    """How much a launch does."""

    row_tiles: int
    key_blocks: int  # that tiles of rows visit, all together


@dataclass(frozen=True)
class Count:
    """Instructions of warps, and the wavefronts that they take in shared memory."""

    instructions: int = 0
    wavefronts: int = 0
    conflicts: int = 0  # wavefronts beyond what as many bytes, or lines of cp.async, need

    def __add__(self, other: Count) -> Count:
        return Count(
            self.instructions + other.instructions, self.wavefronts + other.wavefronts, self.conflicts + other.conflicts
        )

    def __mul__(self, times: int) -> Count:
        return Count(self.instructions * times, self.wavefronts * times, self.conflicts * times)


@dataclass(frozen=True)
class Use:
    """One way in which a thread block touches a tile in shared memory."""

    operand: str  # Q, K, V or O; "tile": the list of tiles to do
    instruction: str  # of INSTRUCTIONS
    access: Access
    tile: SmemTile | None = None
    repeats: int = 1  # warps that each do all of it
    is_per_block: bool = False  # once for every block of keys; else once for every tile of rows

    @property
    def name(self) -> str:
        return f"{self.operand} {self.instruction}"

    @property
    def once(self) -> Count:
        one = self.access
        return Count(one.instructions, one.wavefronts, one.conflicts) * self.repeats

    def launched(self, work: Work) -> Count:
        return self.once * (work.key_blocks if self.is_per_block else work.row_tiles)


INSTRUCTIONS = ("ldmatrix", "ld.shared", "st.shared", "stmatrix", "cp.async")


# Pictures of one kernel ask for the uses of all its variants; each takes long to count.
@lru_cache(maxsize=16)
def sm80_uses(tile: Sm80Tile) -> tuple[Use, ...]:
    """Of the mma.sync kernel, in the order of its life."""
    tiles = sm80_tiles(tile)
    q, kv = tiles["Q"], tiles["K"]
    threads, kept = WARP * tile.num_warps, 16 * tile.q_steps
    kv_copy = cp_async_write(kv, threads)
    uses = [
        Use("Q", "cp.async", cp_async_write(q, threads), q),
        Use("K", "cp.async", kv_copy, kv, is_per_block=True),
        Use("V", "cp.async", kv_copy, kv, is_per_block=True),
    ]
    # Each warp reads its own rows of Q, some columns of them only once; and all of K and V.
    if kept:
        uses.append(Use("Q", "ldmatrix", every_block(q, layout_of(q), ldmatrix_a, range(kept)), q))
    if kept < q.cols:
        rest = every_block(q, layout_of(q), ldmatrix_a, range(kept, q.cols))
        uses.append(Use("Q", "ldmatrix", rest, q, is_per_block=True))
    k_access = every_block(kv, layout_of(kv), ldmatrix_b)
    v_access = every_block(kv, transposed(kv), ldmatrix_v)
    return (
        *uses,
        Use("K", "ldmatrix", k_access, kv, tile.num_warps, is_per_block=True),
        Use("V", "ldmatrix", v_access, kv, tile.num_warps, is_per_block=True),
        Use("O", "st.shared", store_fragment(q, tile.num_warps), q),
        Use("O", "ld.shared", load_rows(q, threads), q),
    )


def sm80_tiles(tile: Sm80Tile) -> dict[str, SmemTile]:
    """The tiles in shared memory by operand. O takes the place of Q."""
    q, kv = tile.smem(tile.tile_m), tile.smem(tile.tile_n)
    return {"Q": q, "K": kv, "V": kv, "O": q}


def sm90_tiles(tile: Sm90Tile) -> dict[str, SmemTile]:
    """The tiles in shared memory by operand; Q and O of one warpgroup."""
    return {operand: tile.operand_smem(operand) for operand in "QKVO"}


@lru_cache(maxsize=16)
def sm90_uses(tile: Sm90Tile) -> tuple[Use, ...]:
    """Of the wgmma kernel: the epilogue, and the words that tell the warps which tile is next."""
    uses = []
    readers = 4 * tile.num_warpgroups + 1
    if tile.q_stages > 1:
        # With one stage of Q the output goes straight to global memory.
        o = sm90_tiles(tile)["O"]
        access = every_block(o, layout_of(o), ldmatrix_a)
        uses.append(Use("O", "stmatrix", access, o, tile.num_warpgroups))
        readers += 1
    # The rows, the head and the batch of a tile; written in two pieces, of 8 and 4 bytes.
    uses.append(Use("tile", "ld.shared", BROADCAST, repeats=3 * readers))
    uses.append(Use("tile", "st.shared", ONE_THREAD, repeats=2))
    return tuple(uses)


def predict(uses: Iterable[Use], work: Work) -> dict[str, Count]:
    """Instruction -> what a launch counts of it; all of INSTRUCTIONS."""
    uses = tuple(uses)
    return {
        name: reduce(add, (use.launched(work) for use in uses if use.instruction == name), Count())
        for name in INSTRUCTIONS
    }
