"""DRAM traffic of one launch, by a replay of its tile schedule through a least-recently-used cache.

Counting every tensor once gives a lower bound of the reads, and does not show when outputs leave L2. It misses two
effects:

* Outputs that are still in L2 when the kernel ends have not been written to DRAM.
* Not all CTAs of a head may run in one wave. Those of the next wave read Q and dO again and add to the sums of dQ
  again. Data that L2 evicted in between is read from DRAM again, and evicted sums were written to DRAM.

In each step of the replay, every CTA processes one block. Tiles are in the order of `StaticTileScheduler`. The cache
holds whole blocks. Caches are cold when it starts, as under `ncu --cache-control all`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from cute_flash.planning.plan import Plan
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES

FP32_BYTES = 4
# Share of L2 that behaves like one LRU cache. Fitted to the reports of S = 2048 on an H200, and not to those of other
# shapes.
L2_SHARE = 2 / 3
# `next` returns this at the end of a generator; a step of the replay is a None.
DONE = object()


@dataclass
class Cache:
    """A write-back cache of pieces of memory that evicts the least recently used piece first."""

    capacity: int
    read_bytes: int = 0
    written_bytes: int = 0
    used: int = 0
    pieces: OrderedDict[Hashable, tuple[int, bool]] = field(default_factory=OrderedDict)  # bytes, is dirty

    def read(self, key: Hashable, num_bytes: int) -> None:
        self._touch(key, num_bytes, is_dirty=False, fills=True)

    def add_to(self, key: Hashable, num_bytes: int) -> None:
        """A reduction: the piece is read if it is absent, and is dirty from then on."""
        self._touch(key, num_bytes, is_dirty=True, fills=True)

    def write(self, key: Hashable, num_bytes: int) -> None:
        """A store of whole sectors, for which nothing is read."""
        self._touch(key, num_bytes, is_dirty=True, fills=False)

    def _touch(self, key: Hashable, num_bytes: int, is_dirty: bool, fills: bool) -> None:
        if key in self.pieces:
            was_dirty = self.pieces.pop(key)[1]
            self.pieces[key] = num_bytes, is_dirty or was_dirty
            return
        if fills:
            self.read_bytes += num_bytes
        self.pieces[key] = num_bytes, is_dirty
        self.used += num_bytes
        while self.used > self.capacity:
            _, (evicted, was_dirty) = self.pieces.popitem(last=False)
            self.used -= evicted
            self.written_bytes += evicted if was_dirty else 0


@dataclass(frozen=True)
class _Tile:
    block: int  # of queries in the forward, of keys in the backward
    head: int  # over the batch; of queries in the forward, of keys in the backward


def _tiles(plan: Plan, num_blocks: int, heads: int, longest_first: bool) -> Iterator[_Tile]:
    """In the order of `StaticTileScheduler`."""
    group = plan.sizes["heads_per_l2_group"]
    for first in range(0, heads, group):
        for block in range(num_blocks):
            for head in range(first, min(first + group, heads)):
                yield _Tile(num_blocks - 1 - block if longest_first else block, head)


def dram_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that the main kernel of a plan reads from DRAM and writes to it until it ends."""
    cache = Cache(int(plan.arch.l2_bytes * L2_SHARE))
    tiles = _forward_tiles(plan, cache) if plan.main.kernel.startswith("fwd") else _backward_tiles(plan, cache)
    running = list(islice(tiles, plan.arch.num_sms * plan.ctas_per_sm))
    while running:
        still_running = []
        for steps in running:
            # A CTA that is done takes the next tile.
            tile: Iterator[None] | None = steps
            while tile is not None and next(tile, DONE) is DONE:
                tile = next(tiles, None)
            if tile is not None:
                still_running.append(tile)
        running = still_running
    return cache.read_bytes, cache.written_bytes


def _rows(block: int, tile_rows: int, seqlen: int) -> int:
    return min(tile_rows, seqlen - block * tile_rows)


def _forward_tiles(plan: Plan, cache: Cache) -> Iterator[Iterator[None]]:
    p, tile, size = plan.problem, plan.tile, DTYPE_BYTES[plan.problem.dtype]

    def steps(at: _Tile) -> Iterator[None]:
        rows = _rows(at.block, tile.tile_m, p.seqlen_q)
        cache.read(("Q", at), rows * p.head_dim * size)
        blocks = p.band.blocks(at.block, tile.tile_m, tile.tile_n, p.seqlen_q, p.seqlen_k)
        kv_head = at.head // p.group
        for n_block in range(blocks.begin, blocks.end):
            keys = _rows(n_block, tile.tile_n, p.seqlen_k)
            cache.read(("KV", kv_head, n_block), keys * (p.head_dim + p.width_v) * size)
            yield
        cache.write(("O", at), rows * (p.width_v * size + FP32_BYTES))

    num_blocks = ceil_div(p.seqlen_q, tile.tile_m)
    return map(steps, _tiles(plan, num_blocks, p.heads * p.batch, p.static.has_right))


def _backward_tiles(plan: Plan, cache: Cache) -> Iterator[Iterator[None]]:
    p, tile, size = plan.problem, plan.tile, DTYPE_BYTES[plan.problem.dtype]
    num_n_blocks = ceil_div(p.seqlen_k, tile.tile_n)
    of_keys = Band(p.band.right, p.band.left)
    # `BwdSm90` starts the tiles of an unmasked problem at different m_blocks.
    shifts = plan.main.kernel == "bwd_sm90" and not p.static.is_bounded and not isinstance(tile, BwdTileSm80)

    def steps(at: _Tile) -> Iterator[None]:
        keys = _rows(at.block, tile.tile_n, p.seqlen_k)
        cache.read(("KV", at), keys * (p.head_dim + p.width_v) * size)
        yield
        blocks = of_keys.blocks(at.block, tile.tile_n, tile.tile_m, p.seqlen_k, p.seqlen_q)
        num = blocks.end - blocks.begin
        first = at.block * num // num_n_blocks if shifts else 0
        for head in range(at.head * p.group, (at.head + 1) * p.group):
            for i in range(num):
                m_block = blocks.begin + (i + first) % num
                rows = _rows(m_block, tile.tile_m, p.seqlen_q)
                # Q, dO, LSE and delta
                cache.read(("Q", head, m_block), rows * ((p.head_dim + p.width_v) * size + 2 * FP32_BYTES))
                cache.add_to(("dQ", head, m_block), tile.tile_m * tile.head_dim * FP32_BYTES)
                yield
        cache.write(("dK", at), keys * (p.head_dim + p.width_v) * size)

    return map(steps, _tiles(plan, num_n_blocks, p.heads_kv * p.batch, p.static.has_left))
