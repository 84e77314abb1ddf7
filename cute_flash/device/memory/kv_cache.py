"""Asynchronous copies of K and V from a cache to the shared memory of one warp.

A cache is (B, S, Hkv, D), or pages (num_pages, page_size, Hkv, D) with a page table. A warp copies 16 keys at a
time. One instruction copies 128 bytes of each of four rows, with eight lanes per row. Keys before `first_key` and after
`last_key` are zero-filled and not read: they may be uninitialised, and 0 times NaN would be NaN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.planning.decode import CHUNK
from cute_flash.planning.decode_tiles import ATOM_BYTES

LANES_PER_ROW = 8
ROWS_AT_ONCE = 32 // LANES_PER_ROW
VECTOR_BYTES = 16


@dataclass(frozen=True)
class CacheHead:
    """The keys or values of one sequence and K/V head."""

    mX: cute.Tensor  # (num_pages, page_size, Hkv, D), or (B, S, Hkv, D)
    head_kv: Int32
    batch: Int32  # row of the page table, or batch index of the cache
    first_row: Int32 | None  # first row of the sequence, if all sequences share one cache; None: each has its own
    page_table: cute.Tensor | None  # (B, max_pages)
    page_size: cute.FastDivmodDivisorV2 | None
    lookup: cutlass.Constexpr  # `DecodeStatic.page_lookup`
    width: cutlass.Constexpr  # D or Dv
    element_bytes: cutlass.Constexpr

    def address(self, key: Int32) -> Int64:
        """The address of a key's row. The key must exist."""
        return self.address_in(self.page(key), self.row(key))

    @cute.jit
    def page(self, key: Int32) -> Int32:
        """The page of a key, from the page table; without pages the batch index. The key must exist."""
        page = Int32(0) if self.first_row is not None else self.batch
        if cutlass.const_expr(self.page_table is not None):
            page = self.page_table[self.batch, key // self.page_size]
        return page

    @cute.jit
    def row(self, key: Int32) -> Int32:
        """The row of a key in its page."""
        row = key if self.first_row is None else self.first_row + key
        if cutlass.const_expr(self.page_table is not None):
            row = key % self.page_size
        return row

    @cute.jit
    def address_in(self, page: Int32, row: Int32) -> Int64:
        """The address of a row of a page."""
        if cutlass.const_expr(self.page_table is not None):
            # Clamp, so that an invalid page stays within the tensor.
            page = cutlass.min(cutlass.max(page, 0), self.mX.shape[0] - 1)
        page_stride, row_stride, head_stride, _ = self.mX.stride
        offset = Int64(page) * page_stride + Int64(row) * row_stride + Int64(self.head_kv) * head_stride
        return self.mX.iterator.toint() + offset * self.element_bytes

    def row_stride(self) -> Int64:
        """Bytes from a row to the next."""
        return Int64(self.mX.stride[1]) * self.element_bytes


class CacheHeads(NamedTuple):
    """The keys and the values of one sequence and K/V head."""

    k: CacheHead
    v: CacheHead | None  # None: the keys hold the values (a latent cache)

    @property
    def present(self) -> tuple[CacheHead, ...]:
        return (self.k,) if self.v is None else (self.k, self.v)


@dataclass(frozen=True)
class WarpLoader:
    """Copies K and V of the same keys to a warp's stages, in chunks of 16 keys, or less if a warp loads less."""

    caches: CacheHeads
    tile: cutlass.Constexpr  # DecodeTile
    lane: Int32
    first_key: Int32  # the first and the last key that are read
    last_key: Int32
    key_offset: Int32  # of the warp's first key in a block
    stages: Int32  # address of the warp's first row in its stages: K, then V, of each
    # (stage, keys of a block): whether a key exists, if a page can be -1; None: all keys of a sequence exist
    sExists: cute.Tensor | None = None
    first_byte: Int32 | None = None  # the first byte of a row that the warp copies; None: 0

    @property
    def lookup(self) -> str:
        return self.caches.k.lookup

    @property
    def last_byte(self) -> int:
        """The largest `first_byte` of a warp."""
        return (self.tile.head_dim - self.tile.warp_columns) * self.tile.element_bytes

    @property
    def chunk(self) -> int:
        """Keys that are copied after one lookup in the page table."""
        return min(self.tile.load_keys, CHUNK)

    @cute.jit
    def look_up(self, block_key: Int32) -> cute.Tensor | None:
        """Start to read the pages of the warp's keys in the block that begins at `block_key`; None without pages.

        The loads of a page table take as long as those of keys, so they are issued one block earlier.
        """
        pages, key = None, block_key + self.key_offset
        if cutlass.const_expr(self.lookup != ""):
            pages = cute.make_rmem_tensor(self.tile.load_keys // self.chunk, Int32)
            for chunk in cutlass.range_constexpr(self.tile.load_keys // self.chunk):
                pages[chunk] = self.caches.k.page(self.existing(key + chunk * self.chunk))
        return pages

    @cute.jit
    def load_before(self, end: Int32, block_key: Int32, stage: Int32, pages: cute.Tensor | None):
        """`load` as one cp.async group, which is empty if the block begins at or after `end`, the end of the split."""
        if block_key < end:
            self.load(block_key, stage, pages)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load(self, block_key: Int32, stage: Int32, pages: cute.Tensor | None):
        """Start to copy the warp's keys in the block that begins at `block_key`. `pages`: from `look_up`."""
        smem, caches, chunk_keys = self.tile.kv_smem, self.caches.present, self.chunk
        key, memory = block_key + self.key_offset, self.stages + stage * self.tile.stage_bytes
        targets = tuple(memory + i * smem.bytes for i in range(len(caches)))
        lane_row, lane_chunk = self.lane // LANES_PER_ROW, self.lane % LANES_PER_ROW
        first_offset, num_keys = key - self.first_key + lane_row, cutlass.max(self.last_key - self.first_key + 1, 0)
        for chunk in cutlass.range_constexpr(self.tile.load_keys // chunk_keys):
            starts = self.chunk_addresses(key, chunk, pages)
            for i in cutlass.range_constexpr(chunk_keys // ROWS_AT_ONCE):
                row = chunk * chunk_keys + i * ROWS_AT_ONCE
                has_page = self.has_page(pages, chunk, i * ROWS_AT_ONCE)
                if cutlass.const_expr(has_page is not None):
                    if lane_chunk == 0:
                        self.sExists[stage, self.key_offset + row + lane_row] = Int32(has_page)
                # The swizzle of the tile: the 16-byte chunk c of row r is at c ^ (r mod 8).
                swizzled = (lane_chunk ^ ((i * ROWS_AT_ONCE + lane_row) % 8)) * VECTOR_BYTES
                for cache, start, target in zip(caches, starts, targets, strict=True):
                    row_bytes = cache.width * cache.element_bytes
                    source = self.row_address(cache, start, i * ROWS_AT_ONCE) + lane_chunk * VECTOR_BYTES
                    for segment in self.tile.row_segments:
                        for j in cutlass.range_constexpr(segment.num_bytes // ATOM_BYTES):
                            begin, key_offset = segment.source + j * ATOM_BYTES, first_offset + row
                            if cutlass.const_expr(has_page is not None):
                                key_offset = cutlass.select_(has_page, key_offset, Int32(-1))
                            if cutlass.const_expr(self.last_byte + begin + ATOM_BYTES > row_bytes):
                                # As an unsigned number -1 exceeds `num_keys`, so `copy_if_less` writes zeros.
                                exists = begin + lane_chunk * VECTOR_BYTES < row_bytes
                                if cutlass.const_expr(self.first_byte is not None):
                                    exists = begin + lane_chunk * VECTOR_BYTES < row_bytes - self.first_byte
                                key_offset = cutlass.select_(exists, key_offset, Int32(-1))
                            atom = segment.target + j * smem.rows * ATOM_BYTES
                            offset = atom + (row + lane_row) * ATOM_BYTES + swizzled
                            copy_if_less(target + offset, source + begin, key_offset, num_keys)
                        if cutlass.const_expr(segment.num_bytes == VECTOR_BYTES):
                            key_offset = first_offset + row
                            if cutlass.const_expr(has_page is not None):
                                key_offset = cutlass.select_(has_page, key_offset, Int32(-1))
                            # `target` is that of the warp's first row of an atom.
                            first = segment.target - self.key_offset * (ATOM_BYTES - VECTOR_BYTES)
                            if lane_chunk == 0:
                                offset = first + (row + lane_row) * VECTOR_BYTES
                                copy_if_less(target + offset, source + segment.source, key_offset, num_keys)

    @cute.jit
    def existing(self, first: Int32) -> Int32:
        """The key whose page this lane looks up: the chunk's first; with a lookup for every key, its key `lane % 16`.

        Keys that do not exist have no page, so the key is clamped to keys that exist.
        """
        key = first
        if cutlass.const_expr(self.lookup == "row"):
            key = first + self.lane % self.chunk
        return cutlass.max(cutlass.min(cutlass.max(key, self.first_key), self.last_key), 0)

    @cute.jit
    def has_page(
        self, pages: cute.Tensor | None, chunk: cutlass.Constexpr, row: cutlass.Constexpr
    ) -> cutlass.Boolean | None:
        """Whether row `row + lane // 8` of a chunk has a page; None if all rows have one."""
        if cutlass.const_expr(self.sExists is None):
            return None
        page = pages[chunk]
        if cutlass.const_expr(self.lookup == "row"):
            page = cute.arch.shuffle_sync(page, row + self.lane // LANES_PER_ROW)
        return page >= 0

    @cute.jit
    def chunk_addresses(self, key: Int32, chunk: cutlass.Constexpr, pages: cute.Tensor | None) -> list[Int64]:
        """The addresses in K and V of row `lane // 8` of a chunk; with a lookup for every key, of row `lane % 16`.

        The address of a key that does not exist is not used. With one lookup for a chunk, all its keys are in one page.
        """
        first = key + chunk * self.chunk
        if cutlass.const_expr(self.lookup == "row"):
            row = self.caches.k.row(self.existing(first))
        else:
            row = self.caches.k.row(first) + self.lane // LANES_PER_ROW
        if cutlass.const_expr(self.lookup != ""):
            page = pages[chunk]
        else:
            page = self.caches.k.page(first)
        addresses = [cache.address_in(page, row) for cache in self.caches.present]
        if cutlass.const_expr(self.first_byte is not None):
            addresses = [address + self.first_byte for address in addresses]
        return addresses

    @cute.jit
    def row_address(self, cache: CacheHead, start: Int64, row: cutlass.Constexpr) -> Int64:
        """The address of row `row + lane // 8` of a chunk, from `chunk_addresses`."""
        address = start
        if cutlass.const_expr(self.lookup == "row"):
            lane = row + self.lane // LANES_PER_ROW
            low = cute.arch.shuffle_sync(Int32(start), lane)
            high = cute.arch.shuffle_sync(Int32(start >> 32), lane)
            address = (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
        elif cutlass.const_expr(row > 0):
            address = start + row * cache.row_stride()
        return address


def copy_if_less(target: Int32, source: Int64, x: Int32, limit: Int32):
    """Copy 16 bytes from global to shared memory, bypassing L1, if x < limit as unsigned numbers; else write zeros."""
    text = (
        "{\n\t.reg .pred p;\n\tsetp.ge.u32 p, {$r2}, {$r3};\n\t"
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, p;\n\t}"
    )
    cute.arch.inline_ptx(text, read_only_args=[target, source, x, limit])
