"""Divides the keys of a decode call among the CTAs, on the device.

A *query tile* is a tile of query rows of one sequence and K/V head. Its visible keys are divided into *units*: 32 keys
each, or `num_splits` equal parts if the caller passes `num_splits`. The units of all query tiles are numbered
consecutively, and each CTA computes an interval of them; all intervals have the same length. A CTA's part of one query
tile is a *split*. The device reads the lengths, so the host neither synchronizes nor plans again when they change.

`heads_at_once` is 1 or the number of K/V heads. In the second case only the units of one head are numbered, and every
head has its own CTA for each interval.

A CTA with splits of two query tiles ends later than other CTAs, and delays the merges of both. To avoid this,
`KvSplits.aligned` makes the intervals slightly longer if then each CTA has one split, or only complete query tiles.

Every warp of a CTA computes this division by itself, without shared memory: each lane reads the length of one sequence,
and a prefix sum over the lanes finds the sequence of a unit.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from cute_flash.device.scores.band import modulo
from cute_flash.planning.decode import MAX_COUNT, UNIT_KEYS

LANES = 32


@dataclass(frozen=True)
class Split:
    """A CTA's part of the keys of a query tile."""

    batch: Int32
    head_kv: Int32
    row_tile: Int32
    query_tile: Int32  # index among all query tiles
    begin: Int32  # range of keys, multiples of `UNIT_KEYS`; the end may be after the last key of the sequence
    end: Int32
    unit_end: Int32  # the first unit after the split
    tile_unit_begin: Int32  # the first unit of the query tile
    tile_unit_end: Int32  # the first unit after the query tile
    is_first: cutlass.Boolean  # the split starts at the first unit of the query tile

    @staticmethod
    def none() -> "Split":
        return Split(*(Int32(0) for _ in range(9)), cutlass.Boolean(False))


class TileCounts(NamedTuple):
    """The query tiles of a sequence, and the units of each."""

    tiles: Int32
    units: Int32


@dataclass(frozen=True)
class Division:
    """How the numbered units are divided among the CTAs."""

    head: Int32  # this CTA's index among the `heads_at_once` heads
    interval: Int32  # the index of this CTA's interval
    per_cta: Int32  # units of a CTA
    # A query tile has a multiple of this number of units; the units that rounding up adds have no keys. 1: no change.
    # `per_cta`: every query tile begins at a new CTA, so no CTA has units of two query tiles.
    multiple: Int32
    first_counts: TileCounts  # of the first sequences, one per lane


@dataclass(frozen=True)
class TileCtas:
    """The CTAs that compute splits of a query tile: first ... last."""

    first: Int32
    last: Int32
    num_final: Int32  # CTAs of these whose interval does not continue after the query tile: all, or all but the last


@dataclass(frozen=True)
class Lengths:
    """The lengths of one sequence."""

    key_len: Int32  # keys in the cache after the append
    tokens: Int32  # queries
    first_key: Int32  # the first key that any query sees

    @staticmethod
    def none() -> "Lengths":
        return Lengths(Int32(0), Int32(0), Int32(0))


@dataclass(frozen=True)
class KvSplits:
    """The lengths of all sequences, and the division of their keys among CTAs."""

    cache_seqlens: cute.Tensor | None  # (B); None: every sequence fills its cache
    cu_seqlens_k: cute.Tensor | None  # (B + 1): all sequences share one cache; None: each has its own
    num_sequences: Int32
    cu_seqlens_q: cute.Tensor | None  # (B + 1); None: every sequence has `tokens` queries
    leftpad: cute.Tensor | None  # (B)
    tokens: Int32  # queries of each sequence; with cu_seqlens_q, of all sequences together
    new_tokens: Int32 | None  # keys appended to each sequence; None: no keys, or with cu_seqlens_q one per query
    appends: cutlass.Constexpr
    window_left: Int32 | None
    chunk: Int32 | None
    capacity: Int32  # keys that fit into the cache of a sequence
    group: cute.FastDivmodDivisorV2  # query heads of a K/V head
    heads_at_once: Int32  # K/V heads whose CTAs have the same intervals
    head_groups: Int32  # K/V heads divided by `heads_at_once`
    num_splits: Int32  # units of a query tile, if the caller fixes their number; 0: units have `UNIT_KEYS` keys
    num_intervals: cute.FastDivmodDivisorV2  # CTAs divided by `heads_at_once`
    max_query_tiles: Int32  # the number of arrival counters in the workspace
    tile_m: cutlass.Constexpr
    least_units: cutlass.Constexpr  # the minimum number of units per CTA, so that all its warps have keys

    def first_token(self, batch: Int32) -> Int32:
        """The index of a sequence's first query in a varlen batch, clamped to [0, `tokens`]."""
        return cutlass.min(cutlass.max(self.cu_seqlens_q[batch], 0), self.tokens)

    def old_len(self, batch: Int32) -> Int32:
        """The number of keys of a sequence before the call appends new ones."""
        length = self.capacity
        if self.cu_seqlens_k is not None:
            first = self.first_row(batch)
            length = cutlass.max(cutlass.min(self.cu_seqlens_k[batch + 1], self.capacity) - first, 0)
        if self.cache_seqlens is not None:
            used = cutlass.min(cutlass.max(self.cache_seqlens[batch], 0), self.capacity)
            length = used if self.cu_seqlens_k is None else cutlass.min(used, length)
        return length

    def first_row(self, batch: Int32) -> Int32:
        """The row of a sequence's first key in the cache that all sequences share."""
        return cutlass.max(self.cu_seqlens_k[batch], 0)

    @cute.jit
    def sequence(self, batch: Int32) -> Lengths:
        """The lengths of a sequence, clamped to the sizes of the tensors."""
        tokens = self.tokens
        if cutlass.const_expr(self.cu_seqlens_q is not None):
            tokens = cutlass.max(self.first_token(batch + 1) - self.first_token(batch), 0)
        new = Int32(0)
        if cutlass.const_expr(self.appends):
            new = tokens if self.new_tokens is None else self.new_tokens
        key_len = cutlass.min(self.old_len(batch) + new, self.capacity)
        first_key = Int32(0)
        if cutlass.const_expr(self.window_left is not None):
            first_key = cutlass.max(key_len - tokens - self.window_left, 0)
        if cutlass.const_expr(self.chunk is not None):
            first_key = cutlass.max(first_key, self.chunk_begin(batch, key_len - tokens))
        if cutlass.const_expr(self.leftpad is not None):
            first_key = cutlass.max(first_key, self.padding(batch))
        return Lengths(key_len, tokens, first_key)

    def padding(self, batch: Int32) -> Int32:
        """The number of rows to skip at the start of a sequence."""
        return cutlass.min(self.leftpad[batch], self.capacity)

    def chunk_begin(self, batch: Int32, position: Int32) -> Int32:
        """The first row of the chunk of a position. Chunks begin after the padding. It may be negative."""
        first = 0 if self.leftpad is None else self.padding(batch)
        return position - modulo(position - first, self.chunk)

    def first_unit(self, sequence: Lengths) -> Int32:
        """The first unit of `UNIT_KEYS` keys to visit. New keys are always visited, because the visit appends them."""
        first = sequence.first_key
        if self.appends:
            new = sequence.tokens if self.new_tokens is None else self.new_tokens
            first = cutlass.min(first, cutlass.max(sequence.key_len - new, 0))
        return quotient(first, UNIT_KEYS)

    def num_units(self, sequence: Lengths) -> Int32:
        """Units of `UNIT_KEYS` keys to visit; at least one, so that a sequence without keys writes its output."""
        return cutlass.max(quotient(sequence.key_len + UNIT_KEYS - 1, UNIT_KEYS) - self.first_unit(sequence), 1)

    def row_tiles(self, sequence: Lengths) -> Int32:
        return quotient(sequence.tokens * self.group.divisor + self.tile_m - 1, self.tile_m)

    @cute.jit
    def tile_counts(self, batch: Int32) -> TileCounts:
        """The counts of a sequence; 0 past the last sequence."""
        tiles, units = Int32(0), Int32(0)
        if batch < self.num_sequences:
            sequence = self.sequence(batch)
            tiles = self.row_tiles(sequence) * self.head_groups
            units = self.num_splits
            if units == 0:
                units = self.num_units(sequence)
        return TileCounts(tiles, units)

    @cute.jit
    def divide(self, cta: Int32) -> Division:
        """Divide the units of all query tiles equally among the CTAs.

        Without `num_splits`, each CTA gets at least `least_units` units.
        """
        # CTAs of one head have consecutive indices: `merge_splits.arrive` relies on it.
        head, interval = divmod(cta, self.num_intervals)
        lane = cute.arch.lane_idx()
        first_counts = self.tile_counts(lane)
        tiles, largest = first_counts
        total, smallest = tiles * largest, largest
        if tiles == 0:
            smallest, largest = Int32(MAX_COUNT), Int32(0)
        for first in cutlass.range(LANES, self.num_sequences, LANES, unroll=1):
            more_tiles, units = self.tile_counts(first + lane)
            tiles, total = tiles + more_tiles, total + more_tiles * units
            if more_tiles > 0:
                smallest, largest = cutlass.min(smallest, units), cutlass.max(largest, units)
        total = cute.arch.warp_redux_sync(total, "add")
        per_cta, multiple = (total + self.num_intervals.divisor - 1) // self.num_intervals, Int32(1)
        if self.num_splits == 0:
            per_cta = cutlass.max(per_cta, self.least_units)
            num_splits = quotient(largest, per_cta)
            if cute.arch.vote_any_sync(num_splits * per_cta != largest):
                per_cta, multiple = self.aligned(per_cta, num_splits, tiles, smallest, largest)
        return Division(
            head=head, interval=interval, per_cta=cutlass.max(per_cta, 1), multiple=multiple, first_counts=first_counts
        )

    @cute.jit
    def aligned(
        self, per_cta: Int32, num_splits: Int32, tiles: Int32, smallest: Int32, largest: Int32
    ) -> tuple[Int32, Int32]:
        """Lengthen the intervals by up to 1/16 plus two units, if each CTA then has one split or complete query tiles.

        Returns `Division.per_cta` and `Division.multiple`. Without a change these are `per_cta` and 1.

        Args:
            per_cta: units of a CTA, without regard to query tiles.
            num_splits: the number of such intervals that fit into this lane's largest query tile.
            tiles: query tiles of this lane.
            smallest: the fewest units of one of these query tiles.
            largest: the most units of one of them.
        """
        multiple = Int32(1)
        most = per_cta + quotient(per_cta, 16) + 2
        longest = cute.arch.warp_redux_sync(largest, "max")
        are_equal = cute.arch.warp_redux_sync(smallest, "min") == longest
        if are_equal and longest < per_cta:
            # Each CTA computes complete query tiles.
            whole_tiles = rounded_up(per_cta, longest)
            per_cta = whole_tiles if whole_tiles <= most else per_cta
        elif are_equal or self.num_sequences <= LANES:
            # Each lane has at most one sequence, or all sequences have equal lengths. All intervals get the length of
            # the longest split.
            num_splits = cutlass.max(num_splits, 1)
            longest_split = cute.arch.warp_redux_sync(quotient(largest + num_splits - 1, num_splits), "max")
            longest_split = cutlass.max(longest_split, per_cta)
            num_splits = cute.arch.warp_redux_sync(tiles * quotient(largest + longest_split - 1, longest_split), "add")
            if longest_split <= most and num_splits <= self.num_intervals.divisor:
                per_cta, multiple = longest_split, longest_split
        return per_cta, multiple

    def ctas(self, split: Split, division: Division) -> TileCtas:
        """The CTAs that compute the splits of `split`'s query tile."""
        per_cta, base = division.per_cta, division.head * self.num_intervals.divisor
        first, last = quotient(split.tile_unit_begin, per_cta), quotient(split.tile_unit_end - 1, per_cta)
        continues = cutlass.select_(split.tile_unit_end < (last + 1) * per_cta, Int32(1), Int32(0))
        return TileCtas(base + first, base + last, last - first + 1 - continues)

    @cute.jit
    def split(self, unit: Int32, cta_unit_end: Int32, division: Division) -> tuple[cutlass.Boolean, Split, Lengths]:
        """Find the split that begins at `unit`. It ends at `cta_unit_end` or with its query tile.

        Returns whether there is such a split, the split, and the lengths of its sequence. Invalid `cu_seqlens_q` may
        give more query tiles than the workspace has counters; the surplus is ignored.
        """
        lane, num_sequences, multiple = cute.arch.lane_idx(), self.num_sequences, division.multiple
        first, batch = Int32(0), Int32(-1)  # the sequence of lane 0; the sequence of `unit`, -1 until it is found
        tiles_before, units_before = Int32(0), Int32(0)
        while batch < 0 and first < num_sequences:
            tiles, units = division.first_counts
            if first > 0:
                tiles, units = self.tile_counts(first + lane)
            units = tiles * rounded_up(units, multiple)
            tiles_end, units_end = tiles, units
            for step in cutlass.range_constexpr(5):
                if num_sequences > 1 << step:
                    other_tiles = cute.arch.shuffle_sync_up(tiles_end, offset=1 << step)
                    other_units = cute.arch.shuffle_sync_up(units_end, offset=1 << step)
                    if lane >= 1 << step:
                        tiles_end, units_end = tiles_end + other_tiles, units_end + other_units
            # Exclude lanes past the last sequence: their prefix sums are incomplete.
            num_past = vote_count(first + lane < num_sequences and unit >= units_before + units_end)
            # The sequences of the first `num_past` lanes end before `unit`, so `unit` belongs to lane `num_past`.
            if num_past < cutlass.min(num_sequences - first, LANES):
                batch = first + num_past
                tiles_before += cute.arch.shuffle_sync(tiles_end - tiles, num_past)
                units_before += cute.arch.shuffle_sync(units_end - units, num_past)
            else:
                tiles_before += cute.arch.shuffle_sync(tiles_end, LANES - 1)
                units_before += cute.arch.shuffle_sync(units_end, LANES - 1)
                first += LANES
        is_found = batch >= 0 and batch < num_sequences
        sequence = self.sequence(cutlass.max(cutlass.min(batch, num_sequences - 1), 0))
        num_units, row_tiles = self.num_units(sequence), self.row_tiles(sequence)
        per_tile = num_units
        if self.num_splits > 0:
            per_tile = self.num_splits
        padded_units = rounded_up(per_tile, multiple)
        index = quotient(unit - units_before, padded_units)
        head_kv, row_tile = index, Int32(0)
        if row_tiles > 1:
            head_kv = quotient(index, row_tiles)
            row_tile = index - head_kv * row_tiles
        tile_unit_begin = units_before + index * padded_units
        unit_end = cutlass.min(cta_unit_end, tile_unit_begin + padded_units)
        begin, end = unit - tile_unit_begin, cutlass.min(unit_end - tile_unit_begin, per_tile)
        if self.num_splits > 0:
            begin, end = quotient(begin * num_units, per_tile), quotient(end * num_units, per_tile)
        first_unit = self.first_unit(sequence)
        split = Split(
            batch=batch,
            head_kv=head_kv + division.head,
            row_tile=row_tile,
            query_tile=(tiles_before + index) * self.heads_at_once + division.head,
            begin=(first_unit + begin) * UNIT_KEYS,
            end=(first_unit + end) * UNIT_KEYS,
            unit_end=unit_end,
            tile_unit_begin=tile_unit_begin,
            tile_unit_end=tile_unit_begin + padded_units,
            is_first=unit == tile_unit_begin,
        )
        return is_found and split.query_tile < self.max_query_tiles, split, sequence


@cute.jit
def rounded_up(x: Int32, multiple: Int32) -> Int32:
    """x rounded up to a multiple of `multiple`. Neither is negative."""
    result = x
    if multiple > 1:
        result = quotient(x + multiple - 1, multiple) * multiple
    return result


def quotient(x: Int32, y: Int32) -> Int32:
    """x // y of numbers that are not negative. An unsigned division takes fewer instructions than a signed one."""
    return Int32(Uint32(x) // Uint32(y))


def vote_count(condition: cutlass.Boolean) -> Int32:
    """The number of lanes for which a condition holds."""
    return cute.arch.popc(cute.arch.vote_ballot_sync(condition))
