"""The tile list of a varlen batch: its layout, an upper bound of its size, and the order of its tiles.

The host does not know the lengths of the sequences. A scheduler kernel (`kernels/common/varlen_scheduler.py`) lists
their tiles, and the other kernels read their tiles from the list. A list is an int32 tensor (TILE_LIST_HEADER + tiles,
TILE_LIST_WIDTH). Row 0 begins with the number of tiles; each further row is one tile, padded with zeros:

    block, sequence, q_begin, q_len, k_begin, k_len     (begin and len: in rows of the varlen tensors)

The length of a tile is the number of K/V blocks that it visits; for a K/V tile, the number of query blocks. Sequences
with the longest tiles come first. The tiles of a sequence are neighbours, so that they share its keys in L2. If a mask
makes a tile shorter than half of the sequence's longest tile, it is listed with tiles of its own length instead, so
that short tiles fill the last wave. Rows without a sequence (rows after the last offset, and unused keys) are listed
last, as sequences without keys or queries; their tiles write zeros.

In this module rows are the side that is tiled (queries, or keys in a list of K/V tiles), columns the other side.

The scheduler kernel calls some of these functions with traced integers. Minimum and maximum then come from the
`device.scores.band.Band` that is passed.
"""

from __future__ import annotations

from collections.abc import Callable

from cute_flash.spec.band import Band, Index, ceil_div

TILE_LIST_WIDTH = 8
# Order of the tiles of a sequence. BY_LENGTH is descending if the last tile is longer than the first, else ascending,
# and lists short tiles separately.
ASCENDING, DESCENDING, BY_LENGTH = 0, 1, 2
TILE_LIST_HEADER = 1
# Classes of tile length; each is one thread of the scheduler kernel.
NUM_LENGTH_CLASSES = 640
# Lengths below 2^_EXACT_BITS have a class each; lengths from 2^_MAX_BITS on share the last class.
_EXACT_BITS, _MAX_BITS = 6, 24


def length_class(cost: Index, minimum: Callable[[Index, Index], Index] = min) -> Index:
    """The length class of a tile that visits `cost` blocks: one class per length below 64, then 32 per power of two."""
    shift = 0
    for bits in range(_EXACT_BITS, _MAX_BITS):
        shift = minimum(cost >> bits, 1) + shift
    return minimum(32 * shift + (cost >> shift), NUM_LENGTH_CLASSES - 1)


def longest_tile(band: Band, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index) -> Index:
    """Column blocks that the longer of a sequence's first and last tile visits: an estimate of its longest tile.

    With chunks, also a tile of the last complete chunk: the first and the last chunk may have few queries and keys.
    """
    last, sizes = band.maximum(ceil_div(rows, tile_rows), 1) - 1, (rows, columns, tile_rows, tile_columns)
    longest = band.maximum(num_blocks(band, last * 0, *sizes), num_blocks(band, last, *sizes))
    if band.chunk is None:
        return longest
    row = band.minimum(band.maximum(band.longest_row(rows, columns), 0), rows - 1)
    return band.maximum(longest, num_blocks(band, row // tile_rows, *sizes))


def num_blocks(band: Band, block: Index, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index) -> Index:
    """Column blocks that one tile visits."""
    visited = band.blocks(block, tile_rows, tile_columns, rows, columns)
    return visited.end - visited.begin


def descends_by_length(
    band: Band, num: Index, rows: Index, columns: Index, tile_rows: Index, tile_columns: Index
) -> Index:
    """DESCENDING if the last of `num` tiles is longer than the first, otherwise ASCENDING."""
    sizes = (rows, columns, tile_rows, tile_columns)
    difference = num_blocks(band, num - 1, *sizes) - num_blocks(band, num * 0, *sizes)
    return band.minimum(band.maximum(difference, ASCENDING), DESCENDING)


def max_tiles(total: int, tile_rows: int, batch: int, has_unused: bool = False) -> int:
    """An upper bound of the tiles of a varlen batch of `total` rows. Each sequence may end with a partial tile.

    `has_unused`: sequences may end with unused rows, which are listed as another sequence.
    """
    sequences = (2 if has_unused else 1) * batch + 1
    return total // tile_rows + min(sequences, total)


def num_padded_blocks(total: int, tile_rows: int, batch: int) -> int:
    """Blocks of a workspace in which every sequence, and the padding after the last, starts with a new block."""
    return total // tile_rows + batch + 1


def padded_block(begin: Index, sequence: Index, tile_rows: int) -> Index:
    """The first block of a sequence in the workspace of `num_padded_blocks`. Earlier sequences end before it."""
    return begin // tile_rows + sequence
