"""How often cp.async writes to shared memory, as Hopper counts it: by lines of both memories, not by threads.

The bytes of a warp's instruction arrive by lines of global memory, 128 bytes each. A wavefront carries bytes
of one such line into one line of shared memory, and of each sector of 32 bytes into one sector. A swizzle
moves sectors within a line, and chunks within a sector: that costs nothing. Padding does: a line straddles
two, and if it is moved by 16 bytes, a sector straddles two as well. Phases of eight threads, by which `banks`
counts what loads and stores do, do not tell this.

On an H200 the counts agree to the last one where all rows exist. Rows beyond the end, which bring nothing,
are counted with one wavefront a line, whatever the layout: a little less than is said here.
"""

from __future__ import annotations

from layouts.banks import WARP
from layouts.smem import CHUNK_BYTES, WAVEFRONT_BYTES, SmemTile

SECTOR_BYTES = 32


def copied_chunks(tile: SmemTile, num_threads: int) -> list[list[tuple[int, int]]]:
    """Every instruction of a warp that fills the tile: (address in global memory, address in the tile).

    Rows follow each other in global memory. Neighbouring threads cover `copy_cols`, then the next row.
    """
    threads_per_row = tile.copy_cols // tile.chunk_cols
    rows_per_pass = num_threads // threads_per_row
    instructions = []
    for col0 in range(0, tile.cols, tile.copy_cols):
        for row0 in range(0, tile.rows, rows_per_pass):
            for first in range(0, num_threads, WARP):
                chunks = []
                for thread in range(first, first + WARP):
                    row, chunk = divmod(thread, threads_per_row)
                    at = (row0 + row, col0 + chunk * tile.chunk_cols)
                    if at[0] < tile.rows:
                        index = at[0] * tile.cols + at[1]
                        chunks.append((index * tile.element_bytes, tile.layout(*at) * tile.element_bytes))
                if chunks:
                    instructions.append(chunks)
    return instructions


def cp_async_wavefronts(chunks: list[tuple[int, int]]) -> int:
    """Of one instruction of a warp, 16 bytes a thread: (address in global memory, in shared memory)."""
    lines: dict[tuple[int, int], dict[int, set[int]]] = {}
    for source, target in chunks:
        if source % CHUNK_BYTES or target % CHUNK_BYTES:
            raise ValueError(f"addresses {source}, {target}: must be multiples of {CHUNK_BYTES}")
        line = lines.setdefault((source // WAVEFRONT_BYTES, target // WAVEFRONT_BYTES), {})
        line.setdefault(source // SECTOR_BYTES, set()).add(target // SECTOR_BYTES)
    return sum(max(len(targets) for targets in line.values()) for line in lines.values())


def fill_wavefronts(tile: SmemTile, num_threads: int) -> int:
    """Of filling the whole tile."""
    return sum(map(cp_async_wavefronts, copied_chunks(tile, num_threads)))
