"""Divides the keys of all sequences of a decode call among the CTAs of the grid, on the device.

An *item* is a sequence, a K/V head and a tile of query rows. Its visible keys are divided into *units* of 32 keys, or
into `num_splits` equal parts if the caller fixes their number. Units of all items form one line, and each CTA computes
an equal interval of it. A CTA's part of one item is a *piece*. Lengths are read on the device, so the host neither
synchronizes nor plans again when they change.

Every warp of a CTA computes the same values, without shared memory: a lane reads the length of one sequence, and a
prefix sum over the lanes finds the sequence of a unit.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_flash.planning.decode import UNIT_KEYS

LANES = 32


@dataclass(frozen=True)
class Piece:
    """A CTA's part of an item."""

    batch: Int32
    head_kv: Int32
    row_tile: Int32
    item: Int32  # index of the item among all items
    begin: Int32  # keys, multiples of `UNIT_KEYS`; the last piece of an item may end after its last key
    end: Int32
    next_unit: Int32  # the first unit after the piece
    first_cta: Int32  # CTAs that compute pieces of the item: first_cta ... last_cta
    last_cta: Int32
    is_first: cutlass.Boolean  # the piece starts at the item's first unit


@dataclass(frozen=True)
class Sequence:
    """The lengths of one sequence."""

    key_len: Int32  # keys, including those that the call appends
    tokens: Int32  # queries
    first_key: Int32  # the first key that a query sees


@dataclass(frozen=True)
class KvSplits:
    """The lengths of all sequences, and the sizes of units."""

    cache_seqlens: cute.Tensor | None  # (B); None: every sequence fills its cache
    cu_seqlens_k: cute.Tensor | None  # (B + 1): sequences are one after the other in one cache; None: each has its own
    num_sequences: Int32
    cu_seqlens_q: cute.Tensor | None  # (B + 1); None: every sequence has `tokens` queries
    leftpad: cute.Tensor | None  # (B)
    tokens: Int32
    new_tokens: Int32 | None  # keys that the call appends to each sequence; None: none, or as many as queries if ragged
    appends: cutlass.Constexpr
    window_left: Int32 | None
    capacity: Int32  # keys that fit into the cache of a sequence
    group: Int32  # query heads of a K/V head
    heads_kv: Int32
    num_splits: Int32  # 0: units have `UNIT_KEYS` keys
    num_ctas: Int32
    max_items: Int32  # counters of the workspace
    tile_m: cutlass.Constexpr
    least_units: cutlass.Constexpr  # of a CTA, so that all its warps have keys

    def first_token(self, batch: Int32) -> Int32:
        """The first query of a sequence among those of a ragged batch, which has `tokens` in all."""
        return cutlass.min(cutlass.max(self.cu_seqlens_q[batch], 0), self.tokens)

    def old_len(self, batch: Int32) -> Int32:
        """The number of keys before the call appends some."""
        length = self.capacity
        if self.cu_seqlens_k is not None:
            first = self.first_row(batch)
            length = cutlass.max(cutlass.min(self.cu_seqlens_k[batch + 1], self.capacity) - first, 0)
        if self.cache_seqlens is not None:
            # `sequence` limits the length to the capacity.
            used = cutlass.max(self.cache_seqlens[batch], 0)
            length = used if self.cu_seqlens_k is None else cutlass.min(used, length)
        return length

    def first_row(self, batch: Int32) -> Int32:
        """The row of a sequence's first key in the cache that all sequences share."""
        return cutlass.max(self.cu_seqlens_k[batch], 0)

    @cute.jit
    def sequence(self, batch: Int32) -> Sequence:
        """The lengths of a sequence, limited to the tensors."""
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
        if cutlass.const_expr(self.leftpad is not None):
            first_key = cutlass.max(first_key, cutlass.max(self.leftpad[batch], 0))
        return Sequence(key_len, tokens, first_key)

    def first_unit(self, sequence: Sequence) -> Int32:
        """The first `UNIT_KEYS` keys to visit. Appended keys are always visited, because a visit appends them."""
        first = sequence.first_key
        if self.appends:
            new = sequence.tokens if self.new_tokens is None else self.new_tokens
            first = cutlass.min(first, cutlass.max(sequence.key_len - new, 0))
        return first // UNIT_KEYS

    def num_units(self, sequence: Sequence) -> Int32:
        """Units of `UNIT_KEYS` keys to visit; at least one, in which a sequence without keys writes its output."""
        return cutlass.max((sequence.key_len + UNIT_KEYS - 1) // UNIT_KEYS - self.first_unit(sequence), 1)

    def row_tiles(self, sequence: Sequence) -> Int32:
        return (sequence.tokens * self.group + self.tile_m - 1) // self.tile_m

    @cute.jit
    def item_counts(self, batch: Int32) -> tuple[Int32, Int32]:
        """Items and units of a sequence; 0 past the last sequence."""
        items, units = Int32(0), Int32(0)
        if batch < self.num_sequences:
            sequence = self.sequence(batch)
            items = self.row_tiles(sequence) * self.heads_kv
            per_item = self.num_splits
            if per_item == 0:
                per_item = self.num_units(sequence)
            units = items * per_item
        return items, units

    @cute.jit
    def units_per_cta(self) -> Int32:
        """Units of all items divided by the number of CTAs, rounded up; at least `least_units`."""
        lane, total = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, self.num_sequences, LANES, unroll=1):
            total += self.item_counts(first + lane)[1]
        for step in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        least = Int32(self.least_units) if self.num_splits == 0 else Int32(1)
        return cutlass.max((total + self.num_ctas - 1) // self.num_ctas, least)

    @cute.jit
    def piece(self, unit: Int32, end_unit: Int32, per_cta: Int32) -> tuple[cutlass.Boolean, Piece]:
        """The piece that begins at a unit and ends at `end_unit` or with its item; and whether it exists.

        Wrong offsets of queries may give more items than the workspace has counters; those do not exist.
        """
        lane, num_sequences = cute.arch.lane_idx(), self.num_sequences
        first, batch = Int32(0), Int32(-1)  # the sequences of the lanes; the sequence of the unit
        items_before, units_before = Int32(0), Int32(0)
        while batch < 0 and first < num_sequences:
            items, units = self.item_counts(first + lane)
            items_end, units_end = items, units
            for step in cutlass.range_constexpr(5):
                other_items = cute.arch.shuffle_sync_up(items_end, offset=1 << step)
                other_units = cute.arch.shuffle_sync_up(units_end, offset=1 << step)
                if lane >= 1 << step:
                    items_end, units_end = items_end + other_items, units_end + other_units
            is_past = vote_count(unit >= units_before + units_end)
            # Lanes whose units all come before: their number is the lane of the unit.
            if is_past < LANES:
                batch = first + is_past
                items_before += cute.arch.shuffle_sync(items_end - items, is_past)
                units_before += cute.arch.shuffle_sync(units_end - units, is_past)
            else:
                items_before += cute.arch.shuffle_sync(items_end, LANES - 1)
                units_before += cute.arch.shuffle_sync(units_end, LANES - 1)
                first += LANES
        is_found = batch >= 0 and batch < num_sequences
        sequence = self.sequence(cutlass.max(cutlass.min(batch, num_sequences - 1), 0))
        num_units, row_tiles = self.num_units(sequence), cutlass.max(self.row_tiles(sequence), 1)
        per_item = num_units
        if self.num_splits > 0:
            per_item = self.num_splits
        item = (unit - units_before) // per_item
        item_unit = units_before + item * per_item
        next_unit = cutlass.min(end_unit, item_unit + per_item)
        begin, end = unit - item_unit, next_unit - item_unit
        if self.num_splits > 0:
            begin, end = begin * num_units // per_item, end * num_units // per_item
        first_unit = self.first_unit(sequence)
        return is_found and items_before + item < self.max_items, Piece(
            batch=batch,
            head_kv=item // row_tiles,
            row_tile=item % row_tiles,
            item=items_before + item,
            begin=(first_unit + begin) * UNIT_KEYS,
            end=(first_unit + end) * UNIT_KEYS,
            next_unit=next_unit,
            first_cta=item_unit // per_cta,
            last_cta=(item_unit + per_item - 1) // per_cta,
            is_first=unit == item_unit,
        )


def vote_count(condition: cutlass.Boolean) -> Int32:
    """The number of lanes for which a condition holds."""
    return cute.arch.popc(cute.arch.vote_ballot_sync(condition))
