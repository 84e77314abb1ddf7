"""A counter of the bank conflicts of warp-wide shared-memory accesses, from their addresses.

Shared memory has 32 banks of 4 bytes; the word at byte address `a` is in bank `a / 4 mod 32`. An access of a warp is
served in phases of 128 bytes: 32 threads of 4 bytes, 16 of 8, or 8 of 16. Each 8x8 matrix of an ldmatrix is such a
phase: 8 rows of 16 bytes. In a phase each bank delivers one word per wavefront. Threads that touch the same word share
it; n different words in one bank take n wavefronts. Loads and stores count in the same way. Writes of cp.async follow
another rule (`CopyPhase`).

The access patterns are those of `mma.m16n8k16` with 2-byte elements. stmatrix has the addresses of ldmatrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from cute_flash.smem.tile import CHUNK_BYTES, WAVEFRONT_BYTES, SmemTile
from layouts.layout import AnyLayout, layout_of, transposed

NUM_BANKS = 32
BANK_BYTES = 4
WARP = 32
SECTOR_BYTES = 32

# Side of the block that one ldmatrix.x4 reads, and of its four matrices.
_BLOCK = 16
_MATRIX = 8

Coord = tuple[int, int]


@dataclass(frozen=True)
class Phase:
    """Threads that are served together, `width` bytes each. `lanes`: (thread, byte address)."""

    width: int
    lanes: tuple[tuple[int, int], ...]

    @property
    def banks(self) -> dict[int, list[tuple[int, int]]]:
        """bank -> [(thread, address of the word that it accesses there)], in the order of the banks."""
        accesses: dict[int, list[tuple[int, int]]] = {}
        for thread, address in self.lanes:
            for word in range(address, address + self.width, BANK_BYTES):
                accesses.setdefault(word // BANK_BYTES % NUM_BANKS, []).append((thread, word))
        return dict(sorted(accesses.items()))

    @property
    def wavefronts(self) -> int:
        """The largest number of different words in one bank."""
        return max(len({word for _, word in accesses}) for accesses in self.banks.values())

    @property
    def wavefront_words(self) -> list[list[tuple[int, int]]]:
        """For each wavefront: [(thread, address of the word that it gets)]."""
        result: list[list[tuple[int, int]]] = [[] for _ in range(self.wavefronts)]
        for accesses in self.banks.values():
            words = list(dict.fromkeys(word for _, word in accesses))
            for thread, word in accesses:
                result[words.index(word)].append((thread, word))
        return result


@dataclass(frozen=True)
class CopyPhase(Phase):
    """Threads of a cp.async whose bytes come from one 128-byte line of global memory, at the addresses `sources`.

    A wavefront writes to one 128-byte line of shared memory, and the bytes of one source sector (32 bytes) to one
    sector. Permuting sectors within a line, or chunks within a sector, is free, and a swizzle does only that.
    In a padded tile a source line straddles two lines and, if it is shifted by 16 bytes, a source sector two sectors.
    The wavefront counts of an H200 follow this rule exactly, except for rows past the end of a tensor, which always
    take one wavefront per line.
    """

    sources: tuple[int, ...] = ()

    @property
    def wavefronts(self) -> int:
        return len(self.wavefront_words)

    @property
    def wavefront_words(self) -> list[list[tuple[int, int]]]:
        by_wavefront: dict[tuple[int, int], list[tuple[int, int]]] = {}
        sectors: dict[tuple[int, int], list[int]] = {}
        for (thread, target), source in zip(self.lanes, self.sources, strict=True):
            line, sector = target // WAVEFRONT_BYTES, target // SECTOR_BYTES
            seen = sectors.setdefault((line, source // SECTOR_BYTES), [])
            if sector not in seen:
                seen.append(sector)
            words = range(target, target + self.width, BANK_BYTES)
            by_wavefront.setdefault((line, seen.index(sector)), []).extend((thread, word) for word in words)
        return [by_wavefront[key] for key in sorted(by_wavefront)]


@dataclass(frozen=True)
class Access:
    """The phases of one or more warp instructions, in order."""

    phases: tuple[Phase, ...]

    @cached_property
    def wavefronts(self) -> int:
        return sum(phase.wavefronts for phase in self.phases)

    @property
    def ideal(self) -> int:
        """Wavefronts without conflicts: one per phase, because 32 banks deliver the 128 bytes of a phase at once."""
        return len(self.phases)

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal

    @property
    def instructions(self) -> int:
        """The number of warp instructions, if the first lane of every warp takes part."""
        return sum(1 for phase in self.phases if phase.lanes[0][0] % WARP == 0)


def join(accesses: Sequence[Access]) -> Access:
    return Access(tuple(phase for access in accesses for phase in access.phases))


@dataclass(frozen=True)
class Vector:
    """The access of one lane: `width` bytes of elements that are neighbours in the mode `along`."""

    width: int
    element_bytes: int = 2
    along: int = 1

    def __post_init__(self) -> None:
        if self.width not in (4, 8, 16):
            raise ValueError(f"width={self.width}: a lane touches 4, 8 or 16 bytes")
        if self.element_bytes < 1 or self.width % self.element_bytes:
            raise ValueError(f"element_bytes={self.element_bytes}: must divide width={self.width}")
        if self.along not in (0, 1):
            raise ValueError(f"along={self.along}: the modes of a tile are 0 and 1")

    def address(self, layout: AnyLayout, coord: Coord) -> int:
        """The byte address of the vector at `coord`; ValueError if its bytes are not contiguous and aligned."""
        return _address(self, layout, coord)


# Cached, because warps and blocks of keys access the same vectors again and again.
@lru_cache(maxsize=1 << 16)
def _address(vector: Vector, layout: AnyLayout, coord: Coord) -> int:
    i, j = coord
    length = vector.width // vector.element_bytes
    coords = [(i + step, j) if vector.along == 0 else (i, j + step) for step in range(length)]
    if min(coord) < 0 or any(at >= extent for at, extent in zip(coords[-1], layout.extents, strict=True)):
        raise ValueError(f"{vector.width} bytes from {coord} leave the layout {layout}")
    indices = [layout(at) for at in coords]
    if indices[0] % length or indices != list(range(indices[0], indices[0] + length)):
        raise ValueError(f"layout {layout} does not hold {vector.width} aligned contiguous bytes at {coord}")
    return indices[0] * vector.element_bytes


_CHUNK = Vector(CHUNK_BYTES)
_PAIR = Vector(BANK_BYTES)


def warp_access(
    layout: AnyLayout, coords: Sequence[Coord | None], vector: Vector = _CHUNK, first_thread: int = 0
) -> Access:
    """One instruction of a warp: lane i accesses the vector at `coords[i]`; None: the lane is idle."""
    if len(coords) != WARP:
        raise ValueError(f"{len(coords)} coordinates: give one for each of the {WARP} lanes, None for an idle one")
    lanes_per_phase = WAVEFRONT_BYTES // vector.width
    phases = []
    for begin in range(0, WARP, lanes_per_phase):
        group = enumerate(coords[begin : begin + lanes_per_phase], first_thread + begin)
        lanes = tuple((thread, vector.address(layout, coord)) for thread, coord in group if coord is not None)
        if lanes:
            phases.append(Phase(vector.width, lanes))
    return Access(tuple(phases))


def ldmatrix_a(layout: AnyLayout, row0: int, col0: int) -> Access:
    """ldmatrix.x4 of Q: 16 rows x 16 columns; its matrices are ordered down the rows first."""
    coords = [(row0 + lane % _BLOCK, col0 + lane // _BLOCK * _MATRIX) for lane in range(WARP)]
    return warp_access(layout, coords)


def ldmatrix_b(layout: AnyLayout, row0: int, col0: int) -> Access:
    """ldmatrix.x4 of K: 16 keys x 16 columns; its matrices are ordered along the columns first."""
    coords = [
        (row0 + lane // _BLOCK * _MATRIX + lane % _MATRIX, col0 + lane // _MATRIX % 2 * _MATRIX) for lane in range(WARP)
    ]
    return warp_access(layout, coords)


def ldmatrix_b_by_tiles(layout: AnyLayout, row0: int, col0: int) -> Access:
    """The same block of K by two ldmatrix.x2 of 8 keys, of different warps. Half of the lanes pass no address."""
    lanes = [(lane % _MATRIX, col0 + lane // _MATRIX * _MATRIX) for lane in range(_BLOCK)]
    tiles = [[(row + key, col) for key, col in lanes] for row in (row0, row0 + _MATRIX)]
    return join([warp_access(layout, [*tile, *[None] * (WARP - _BLOCK)]) for tile in tiles])


def ldmatrix_v(layout: AnyLayout, d0: int, key0: int) -> Access:
    """ldmatrix.x4.trans of V, viewed as (d, keys) by `layout.transposed`: 16 columns of 16 keys.

    A lane still supplies the address of 16 contiguous bytes, which are 8 columns of one key. The instruction transposes
    them on the way to the registers.
    """
    coords = [(d0 + lane // _BLOCK * _MATRIX, key0 + lane % _BLOCK) for lane in range(WARP)]
    return warp_access(layout, coords, Vector(CHUNK_BYTES, along=0))


def ldmatrix_a_transposed(layout: AnyLayout, row0: int, col0: int) -> Access:
    """ldmatrix.x4.trans of an operand A, viewed as (rows, k) by `layout.transposed`: 16 rows x 16 columns of k."""
    coords = [
        (row0 + lane // _MATRIX % 2 * _MATRIX, col0 + lane // _BLOCK * _MATRIX + lane % _MATRIX) for lane in range(WARP)
    ]
    return warp_access(layout, coords, Vector(CHUNK_BYTES, along=0))


def _check_mma_tile(tile: SmemTile) -> None:
    if tile.element_bytes != 2:
        raise ValueError(f"element_bytes={tile.element_bytes}: the mma.m16n8k16 accesses are of 2-byte elements")
    if tile.rows % _BLOCK:
        raise ValueError(f"rows={tile.rows}: the mma.m16n8k16 accesses need a multiple of {_BLOCK}")


def every_block(
    tile: SmemTile, layout: AnyLayout, load: Callable[[AnyLayout, int, int], Access], cols: range | None = None
) -> Access:
    """`load` of every 16 x 16 block of `layout`, a view of the tile. `cols`: only the blocks of these columns."""
    _check_mma_tile(tile)
    rows, width = layout.extents
    columns = range(width) if cols is None else cols
    return join([load(layout, row, col) for row in range(0, rows, _BLOCK) for col in columns[::_BLOCK]])


def _copy_coords(tile: SmemTile, num_threads: int) -> Iterator[tuple[int, list[Coord | None]]]:
    """Each 16-byte chunk of the tile once: neighbouring threads cover `copy_cols` of a row, then of the next row.

    Yields the first thread of a warp, and the coordinates of its lanes.
    """
    if num_threads < WARP or num_threads % WARP:
        raise ValueError(f"num_threads={num_threads}: must be a positive multiple of {WARP}")
    threads_per_row = tile.copy_cols // tile.chunk_cols
    rows_per_pass = num_threads // threads_per_row
    for col0 in range(0, tile.cols, tile.copy_cols):
        for row0 in range(0, tile.rows, rows_per_pass):
            for first in range(0, num_threads, WARP):
                spots = [divmod(thread, threads_per_row) for thread in range(first, first + WARP)]
                coords: list[Coord | None] = [
                    (row0 + row, col0 + chunk * tile.chunk_cols) if row0 + row < tile.rows else None
                    for row, chunk in spots
                ]
                yield first, coords


def cp_async_write(tile: SmemTile, num_threads: int = 128) -> Access:
    """The 16-byte cp.async writes that fill a tile, from rows that are contiguous in global memory."""
    vector = Vector(CHUNK_BYTES, tile.element_bytes)
    phases = []
    for first, coords in _copy_coords(tile, num_threads):
        lines: dict[int, list[tuple[tuple[int, int], int]]] = {}
        for thread, coord in enumerate(coords, first):
            if coord is not None:
                source = (coord[0] * tile.cols + coord[1]) * tile.element_bytes
                lane = (thread, vector.address(layout_of(tile), coord))
                lines.setdefault(source // WAVEFRONT_BYTES, []).append((lane, source))
        for line in lines.values():
            lanes, sources = zip(*line, strict=True)
            phases.append(CopyPhase(CHUNK_BYTES, lanes, sources))
    return Access(tuple(phases))


def load_rows(tile: SmemTile, num_threads: int = 128) -> Access:
    """The 16-byte loads with which the epilogue reads a tile, row by row, to store it to global memory."""
    vector = Vector(CHUNK_BYTES, tile.element_bytes)
    return join([warp_access(layout_of(tile), at, vector, first) for first, at in _copy_coords(tile, num_threads)])


def store_fragment(tile: SmemTile, num_warps: int = 1) -> Access:
    """The 4-byte stores with which the epilogue writes m16n8 accumulators, as pairs of 2-byte elements, to a tile.

    Lane t holds columns 2 (t mod 4) and 2 (t mod 4) + 1 of rows t / 4 and t / 4 + 8; each warp has 16 rows.
    """
    _check_mma_tile(tile)
    if num_warps < 1 or tile.rows % (_BLOCK * num_warps):
        raise ValueError(f"num_warps={num_warps}: {_BLOCK} rows per warp must divide rows={tile.rows}")
    accesses = []
    for block in range(tile.rows // _BLOCK):
        for col0 in range(0, tile.cols, _MATRIX):
            for row0 in (block * _BLOCK, block * _BLOCK + _MATRIX):
                coords = [(row0 + lane // 4, col0 + lane % 4 * 2) for lane in range(WARP)]
                accesses.append(warp_access(layout_of(tile), coords, _PAIR, block % num_warps * WARP))
    return join(accesses)


# The accesses of the kernels, each over a full tile.
ACCESSES: dict[str, Callable[[SmemTile], Access]] = {
    "ldmatrix_a": lambda tile: every_block(tile, layout_of(tile), ldmatrix_a),
    "ldmatrix_b": lambda tile: every_block(tile, layout_of(tile), ldmatrix_b),
    "ldmatrix_v": lambda tile: every_block(tile, transposed(tile), ldmatrix_v),
    "cp_async_write": cp_async_write,
    "store_fragment": store_fragment,
    "load_rows": load_rows,
}


def tile_report(tile: SmemTile) -> dict[str, Access]:
    """Each kind of access over the full tile."""
    return {name: access(tile) for name, access in ACCESSES.items()}
