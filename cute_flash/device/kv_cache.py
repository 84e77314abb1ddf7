"""Asynchronous copies of K and V from a cache to the shared memory of one warp.

A cache is (B, S, Hkv, D), or pages (num_pages, page_size, Hkv, D) with a page table. A warp copies 16 keys at a
time. One instruction copies 128 bytes of each of four rows, with eight lanes per row. Keys outside [first_key, key_len)
are zero-filled and not read: they may be uninitialised, and 0 times NaN would be NaN.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_flash.planning.decode import ATOM_BYTES, CHUNK

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
    lookup: cutlass.Constexpr  # `DecodeStatic.page_lookup`
    width: cutlass.Constexpr  # D or Dv
    element_bytes: cutlass.Constexpr

    def address(self, key: Int32) -> Int64:
        """The address of a key's row. The key must exist."""
        return self.address_in(self.page(key), key)

    @cute.jit
    def page(self, key: Int32) -> Int32:
        """The page of a key, from the page table; without pages the batch index. The key must exist."""
        page = Int32(0) if self.first_row is not None else self.batch
        if cutlass.const_expr(self.page_table is not None):
            page = self.page_table[self.batch, key // self.mX.shape[1]]
        return page

    @cute.jit
    def address_in(self, page: Int32, key: Int32) -> Int64:
        """The address of a key's row, given its page."""
        row = key if self.first_row is None else self.first_row + key
        if cutlass.const_expr(self.page_table is not None):
            # Clamp, so that an invalid page stays within the tensor.
            page = cutlass.min(cutlass.max(page, 0), self.mX.shape[0] - 1)
            row = key % self.mX.shape[1]
        page_stride, row_stride, head_stride, _ = self.mX.stride
        offset = Int64(page) * page_stride + Int64(row) * row_stride + Int64(self.head_kv) * head_stride
        return self.mX.iterator.toint() + offset * self.element_bytes


@dataclass(frozen=True)
class WarpLoader:
    """Copies chunks of 16 keys of one cache to a warp's stages."""

    cache: CacheHead
    tile: cutlass.Constexpr  # DecodeTile
    lane: Int32
    first_key: Int32  # the first and the last key that are read
    last_key: Int32

    @cute.jit
    def look_up(self, key: Int32) -> cute.Tensor | None:
        """Start to read the pages of `tile_n` keys from `key` on, for `load`; None without pages.

        The loads of a page table take as long as those of keys, so they are issued one block earlier.
        """
        pages = None
        if cutlass.const_expr(self.cache.page_table is not None):
            pages = cute.make_rmem_tensor(self.tile.tile_n // CHUNK, Int32)
            for chunk in cutlass.range_constexpr(self.tile.tile_n // CHUNK):
                pages[chunk] = self.cache.page(self.existing(key + chunk * CHUNK))
        return pages

    @cute.jit
    def load(self, key: Int32, target: Int32, pages: cute.Tensor | None):
        """Start to copy `tile_n` keys from `key` on to the shared-memory address `target`."""
        smem, cache = self.tile.kv_smem, self.cache
        lane_row, lane_chunk = self.lane // LANES_PER_ROW, self.lane % LANES_PER_ROW
        row_bytes = cache.width * cache.element_bytes
        for chunk in cutlass.range_constexpr(self.tile.tile_n // CHUNK):
            first = key + chunk * CHUNK
            page = self.cache.page(first) if pages is None else pages[chunk]
            chunk_address = self.chunk_address(first, page)
            for i in cutlass.range_constexpr(CHUNK // ROWS_AT_ONCE):
                row = chunk * CHUNK + i * ROWS_AT_ONCE + lane_row
                source = self.row_address(chunk_address, i * ROWS_AT_ONCE + lane_row) + lane_chunk * VECTOR_BYTES
                exists = key + row >= self.first_key and key + row <= self.last_key
                # The swizzle of the tile: the 16-byte chunk c of row r is at c ^ (r mod 8).
                swizzled = (lane_chunk ^ ((i * ROWS_AT_ONCE + lane_row) % 8)) * VECTOR_BYTES
                for j in cutlass.range_constexpr(smem.cols * cache.element_bytes // ATOM_BYTES):
                    begin = j * ATOM_BYTES
                    num_bytes = Int32(VECTOR_BYTES) if exists else Int32(0)
                    if cutlass.const_expr(begin + ATOM_BYTES > row_bytes):
                        num_bytes = num_bytes if begin + lane_chunk * VECTOR_BYTES < row_bytes else Int32(0)
                    offset = j * smem.rows * ATOM_BYTES + row * ATOM_BYTES + swizzled
                    copy_async(target + offset, source + begin, num_bytes)

    @cute.jit
    def existing(self, first: Int32) -> Int32:
        """The key of a chunk whose page this lane reads: the first, or with a lookup for every key, key `lane % 16`.

        Keys that do not exist have no page, so the key is clamped to keys that exist.
        """
        key = first
        if cutlass.const_expr(self.cache.lookup == "row"):
            key = first + self.lane % CHUNK
        return cutlass.max(cutlass.min(cutlass.max(key, self.first_key), self.last_key), 0)

    @cute.jit
    def chunk_address(self, first: Int32, page: Int32) -> Int64:
        """The address of the chunk's first row; with a lookup for every key, the address of row `lane % 16`."""
        existing = self.existing(first)
        address = self.cache.address_in(page, existing)
        if cutlass.const_expr(self.cache.lookup != "row"):
            address -= Int64(existing - first) * self.row_stride()
        return address

    @cute.jit
    def row_address(self, chunk_address: Int64, row: Int32) -> Int64:
        """The address of a row of the chunk."""
        if cutlass.const_expr(self.cache.lookup == "row"):
            low = cute.arch.shuffle_sync(Int32(chunk_address), row)
            high = cute.arch.shuffle_sync(Int32(chunk_address >> 32), row)
            return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
        return chunk_address + Int64(row) * self.row_stride()

    def row_stride(self) -> Int64:
        """Bytes from a row to the next."""
        return Int64(self.cache.mX.stride[1]) * self.cache.element_bytes


def copy_async(target: Int32, source: Int64, num_bytes: Int32):
    """Copy 16 bytes from global to shared memory, bypassing L1; bytes from `num_bytes` on are zero-filled."""
    text = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, num_bytes])
