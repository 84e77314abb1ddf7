"""The attention calls that compute the scores between the rows of one shard and the keys of another.

`attn` aligns a mask at the bottom right and takes bounds that are not negative. A query at position p sees the keys at
positions p - L to p + R. For a segment of Sq queries that starts o positions after a segment of Sk keys, the bounds
relative to the bottom right are

    left = L - o + Sk - Sq        right = R + o - Sk + Sq        left + right = L + R

If `left` is negative, the last -left queries see no key of the segment; without them, `left` is 0. If `right` is
negative, no query sees the last -right keys; without them, `right` is 0. So one call computes a band with any offset.

Full and causal masks need one call for each pair of zigzag shards. Dropout needs one call for each pair of segments,
because the kernels compute the dropout mask from the positions of the first row and the first key of a call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cute_flash.distributed.sharding import Segment
from cute_flash.spec.band import Band

Range = tuple[int, int]
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class BandCall:
    """One attention call on some rows of a shard and some keys of another.

    Attributes:
        rows: Begin and end of the queries.
        keys: Begin and end of the keys.
        band: The mask, aligned at the bottom right of `rows` and `keys`.
        is_aligned: Whether aligning the call at the bottom right gives each row and key their distance in the sequence,
            so that the kernel's ALiBi is correct.
        first: The positions of the first row and the first key in the sequence.
    """

    rows: Range
    keys: Range
    band: Band
    is_aligned: bool
    first: Range


@lru_cache(maxsize=4096)
def band_calls(
    rows: tuple[Segment, ...], keys: tuple[Segment, ...], band: Band, by_segment: bool = False
) -> tuple[BandCall, ...]:
    """The calls that cover all visible scores between two shards; none if the mask hides all of them.

    `by_segment`: each call has the rows of one segment and the keys of one segment, as dropout needs.
    """
    if by_segment:
        pairs = ((queries, segment) for queries in rows for segment in keys)
        return tuple(call for pair in pairs if (call := _call(*pair, band)) is not None)
    if rows == keys and rows and band == CAUSAL:
        # Positions ascend with rows, so the mask by position is the mask by row.
        both = rows[0].begin, rows[-1].end
        return (BandCall(both, both, CAUSAL, is_aligned=len(rows) == 1, first=(rows[0].start, rows[0].start)),)
    calls: list[BandCall] = []
    for queries in rows:
        line = [call for segment in keys if (call := _call(queries, segment, band)) is not None]
        calls += join_keys(line)
    return tuple(_joined(calls, by_rows=True))


def key_range(rows: tuple[Segment, ...], keys: tuple[Segment, ...], band: Band) -> Range | None:
    """The range from the first to the last key that `band_calls` uses; None: no key. It is faster than `band_calls`."""
    begins = [x.begin for x in keys if any(_sees(queries, x, band) for queries in rows)]
    if not begins:
        return None
    ends = [x.begin + _num_keys(queries, x, band) for queries in rows for x in keys if _sees(queries, x, band)]
    return min(begins), max(ends)


def _sees(queries: Segment, keys: Segment, band: Band) -> bool:
    if queries.length == 0 or keys.length == 0:
        return False
    # The smallest and the largest difference of a key's and a query's position.
    nearest, farthest = keys.start - (queries.stop - 1), keys.stop - 1 - queries.start
    return (band.right is None or nearest <= band.right) and (band.left is None or farthest >= -band.left)


def _num_keys(queries: Segment, keys: Segment, band: Band) -> int:
    """The number of keys of a segment, without those at its end that no query sees."""
    if band.right is None:
        return keys.length
    # The last query that sees a key of the segment.
    last = queries.stop - 1 if band.left is None else min(queries.stop - 1, keys.stop - 1 + band.left)
    return min(keys.length, last + band.right + 1 - keys.start)


def _call(queries: Segment, keys: Segment, band: Band) -> BandCall | None:
    if not _sees(queries, keys, band):
        return None
    sq, sk, (left, right) = queries.length, keys.length, band.bounds
    offset = queries.start - keys.start
    if left is not None:
        left += sk - sq - offset
    if right is not None:
        right -= sk - sq - offset
    if left is not None and left < 0:
        sq += left
        right = None if right is None else right + left
        left = 0
    if right is not None and right < 0:
        sk += right
        left = None if left is None else left + right
        right = 0
    # Bounds that mask nothing are left out, so that no kernel with bounds is compiled for them.
    left = None if left is None or left >= sk - 1 else left
    right = None if right is None or right >= sq - 1 else right
    return BandCall(
        (queries.begin, queries.begin + sq),
        (keys.begin, keys.begin + sk),
        Band(left, right),
        is_aligned=offset == sk - sq,
        first=(queries.start, keys.start),
    )


def join_keys(calls: list[BandCall]) -> list[BandCall]:
    """Join calls without a mask whose keys are adjacent."""
    return _joined(calls, by_rows=False)


def _joined(calls: list[BandCall], by_rows: bool) -> list[BandCall]:
    """Join calls without a mask that are adjacent, in rows or in keys."""
    joined: list[BandCall] = []
    for call in calls:
        for i, other in enumerate(joined):
            if call.band != Band() or other.band != Band():
                continue
            if by_rows and other.keys == call.keys and other.rows[1] == call.rows[0]:
                joined[i] = replace(other, rows=(other.rows[0], call.rows[1]), is_aligned=False)
                break
            if not by_rows and other.rows == call.rows and other.keys[1] == call.keys[0]:
                joined[i] = replace(other, keys=(other.keys[0], call.keys[1]), is_aligned=False)
                break
        else:
            joined.append(call)
    return joined
