"""The tile list of a varlen batch: its layout, how many tiles there may be, and in which order they come.

Only the GPU knows the lengths of the sequences. A scheduler kernel (`kernels/common/varlen_scheduler.py`) lists
their tiles, and the other kernels read theirs from the list. A list is an int32 tensor (TILE_LIST_HEADER + tiles,
TILE_LIST_WIDTH): row 0 begins with the number of tiles, each further row is one tile:

    block, sequence, q_begin, q_len, k_begin, k_len

Sequences with the longest tiles come first. The tiles of a sequence are neighbours, so that they find its keys in
L2. Where a mask makes some of them shorter than half of the longest, those are listed among tiles of their own
length, so that short ones fill the end. Rows that belong to no sequence (those after the last offset, and keys
that are not used) are listed last as sequences without keys or queries; their tiles write zeros.

Functions that the scheduler kernel shares take the arithmetic of its traced integers from a `device.band.Band`.
"""

from __future__ import annotations

from collections.abc import Callable

from cute_flash.spec.band import Band, Index, ceil_div

TILE_LIST_WIDTH = 8
# Order of the tiles of a sequence: ascending, descending, or the longer end first with short tiles apart.
ASCENDING, DESCENDING, BY_LENGTH = 0, 1, 2
TILE_LIST_HEADER = 1
# Classes of tile length; each is one thread of the scheduler kernel.
NUM_LENGTH_CLASSES = 640
_EXACT_BITS, _MAX_BITS = 6, 24


def length_class(cost: Index, minimum: Callable[[Index, Index], Index] = min) -> Index:
    """The class of a tile with so many blocks: exact below 64, from there on 32 classes an octave."""
    shift = 0
    for bits in range(_EXACT_BITS, _MAX_BITS):
        shift = minimum(cost >> bits, 1) + shift
    return minimum(32 * shift + (cost >> shift), NUM_LENGTH_CLASSES - 1)


def longest_tile(band: Band, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index) -> Index:
    """Blocks of columns of the longest tile of a sequence, near enough to sort by."""
    last, sizes = band.maximum(ceil_div(rows, tile_rows), 1) - 1, (rows, columns, tile_rows, tile_columns)
    return band.maximum(num_blocks(band, last * 0, *sizes), num_blocks(band, last, *sizes))


def num_blocks(
    band: Band, block: Index, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index
) -> Index:
    """Blocks of columns of one tile."""
    found = band.blocks(block, tile_rows, tile_columns, rows, columns)
    return found.end - found.begin


def descends_by_length(
    band: Band, num: Index, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index
) -> Index:
    """Whether the last of `num` tiles is longer than the first, as DESCENDING or ASCENDING."""
    sizes = (rows, columns, tile_rows, tile_columns)
    more = num_blocks(band, num - 1, *sizes) - num_blocks(band, num * 0, *sizes)
    return band.minimum(band.maximum(more, ASCENDING), DESCENDING)


def max_tiles(total: int, tile_rows: int, batch: int, has_unused: bool = False) -> int:
    """Tiles that sequences of `total` rows together may have: each one's last may be a part of one.

    `has_unused`: each may have rows at its end that are not used.
    """
    sequences = (2 if has_unused else 1) * batch + 1
    return total // tile_rows + min(sequences, total)


def num_padded_blocks(total: int, tile_rows: int, batch: int) -> int:
    """Blocks of a workspace in which every sequence, and what comes after the last, begins with a new one."""
    return total // tile_rows + batch + 1


def padded_block(begin: Index, sequence: Index, tile_rows: int) -> Index:
    """The first one of a sequence: those before it, each padded to whole blocks, end before."""
    return begin // tile_rows + sequence
