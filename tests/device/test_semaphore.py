"""The order in which K/V tiles add to m_blocks of dQ: it is complete, and no tile waits forever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.scheduling.block_iterator import BlockIterator
from cute_flash.device.scheduling.semaphore import DQSemaphore
from cute_flash.device.scores.band import Band
from cute_flash.kernels.sm90.bwd_storage import KVTile
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD, SM80_BWD_SCORE
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD, SM90_BWD_SCORE
from cute_flash.score_mod.block_mask import BlockMask
from cute_flash.score_mod.block_sparse import HEAD_SHIFT, M_BLOCK_SHIFT, query_block_indices
from cute_flash.spec.band import FAR, BlockRange, ceil_div

Ask = Callable[..., list[int]]


def compiled_order(band: Band, tile_m: int, tile_n: int) -> Ask:
    """`ask(n_block, m_block, sq, sk, i)` -> rank, the number of m_blocks of n_block, and the i-th of these m_blocks."""

    @cute.jit
    def program(out, n_block, m_block, sq, sk, i):  # type: ignore[no-untyped-def]
        semaphore = DQSemaphore(out, band, sq, sk, tile_m, tile_n)
        rank = semaphore.rank(n_block, m_block)
        blocks = band.of_keys.blocks(n_block, tile_n, tile_m, sk, sq)
        block_iter = BlockIterator.of(blocks, ascends=True)
        out[0], out[1], out[2] = rank, block_iter.num, block_iter.block(i)

    found = torch.zeros(3, dtype=torch.int32)
    compiled = cute.compile(program, from_dlpack(found), *(Int32(1) for _ in range(5)))

    def ask(*numbers: int) -> list[int]:
        compiled(from_dlpack(found), *map(Int32, numbers))
        return found.tolist()

    return ask


BANDS = [
    *(Band(), Band(None, FAR), Band(None, 0), Band(100, 30), Band(5, None)),
    *(Band(FAR, FAR, 200), Band(FAR, 0, 130), Band(40, 100, 50)),
]
# All (tile_m, tile_n) of the kernels.
TILES = sorted(
    {
        (row.tile_m, row.tile_n)
        for rows in (SM90_BWD[:-1], SM90_BWD_SCORE, *SM80_BWD.values(), *SM80_BWD_SCORE.values())
        for row in rows
    }
)


@pytest.mark.compiles
@pytest.mark.parametrize(("tile_m", "tile_n"), TILES)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_every_tile_adds_once_and_none_waits_forever(band: Band, tile_m: int, tile_n: int) -> None:
    ask = compiled_order(band, tile_m, tile_n)
    for sq, sk in itertools.product((1, 100, 512, 700), (1, 130, 512, 900)):
        num_m, num_n = ceil_div(sq, tile_m), ceil_div(sk, tile_n)
        visits = []
        for n in range(num_n):
            num = ask(n, 0, sq, sk, 0)[1]
            visits.append([ask(n, 0, sq, sk, i)[2] for i in range(num)])
            assert len(set(visits[n])) == num
        ranks = {(n, m): ask(n, m, sq, sk, 0)[0] for n in range(num_n) for m in visits[n]}
        for m in range(num_m):
            here = [ranks[n, m] for n in range(num_n) if m in visits[n]]
            assert sorted(here) == list(range(len(here)))
        for slots in (1, 2, num_n):
            steps = simulated_steps(visits, ranks, slots)
            assert steps is not None, f"deadlock at {sq} x {sk}, {slots} at a time"
        if sq == sk and band == Band(None, 0) and tile_m <= tile_n:
            # No tile waits: there are no more steps than m_blocks of the longest tile.
            assert simulated_steps(visits, ranks, num_n) == max(map(len, visits))


@pytest.mark.parametrize("seed", range(12))
def test_no_tile_of_a_block_mask_waits_forever(seed: int) -> None:
    """Each listed m_block gets ranks 0, 1, ... without a gap, for any set of empty blocks."""
    pick = random.Random(seed)
    batch, heads, heads_kv = pick.choice(((1, 1, 1), (2, 4, 2), (2, 6, 1)))
    tile, shape = (
        pick.choice(((64, 128), (128, 128), (64, 32))),
        (pick.choice((1, heads)), *pick.choices(range(1, 9), k=2)),
    )
    status = torch.randint(0, 3, (1, *shape), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    mask = BlockMask.of_status(status, 128, 128, shape[1] * 128 - pick.randrange(128), shape[2] * 128)
    sizes = {"batch": batch, "heads": heads, "heads_kv": heads_kv, "tile": tile}
    num, entries, ranks = query_block_indices(mask.tensors, mask.sizes, **sizes, has_ranks=True)
    group = heads // heads_kv
    for b, head_kv in itertools.product(range(batch), range(heads_kv)):
        visits: list[list[tuple[int, int]]] = []
        for listed, many in zip(entries[b, head_kv].tolist(), num[b, head_kv].tolist(), strict=True):
            in_list = [(x >> HEAD_SHIFT, (x & ((1 << HEAD_SHIFT) - 1)) >> M_BLOCK_SHIFT) for x in listed[:many]]
            visits.append([(head_kv * group + head, m) for head, m in in_list])
        found = {(n, at): int(ranks[b, at[0], at[1], n]) for n, visited in enumerate(visits) for at in visited}
        for at in {at for visited in visits for at in visited}:
            here = [found[n, at] for n, visited in enumerate(visits) if at in visited]
            assert here == list(reversed(range(len(here)))), "the last tile first"
        for slots in (1, 2, len(visits)):
            assert simulated_steps(visits, found, slots) is not None


def simulated_steps(visits: list[list[Any]], ranks: dict[tuple[int, Any], int], slots: int) -> int | None:
    """Steps until all K/V tiles are done, if `slots` tiles run at a time and the last tile starts first."""
    done, passed, steps = [0] * len(visits), dict.fromkeys((m for visited in visits for m in visited), 0), 0
    waiting, running = list(reversed(range(len(visits)))), []
    while waiting or running:
        running = [n for n in running if done[n] < len(visits[n])]
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        active = [n for n in running if done[n] < len(visits[n])]
        due = [n for n in active if ranks[n, visits[n][done[n]]] == passed[visits[n][done[n]]]]
        if active and not due:
            return None
        for n in due:
            passed[visits[n][done[n]]] += 1
            done[n] += 1
        steps += bool(active)
    return steps


@pytest.mark.compiles
@pytest.mark.parametrize(("num_tiles", "num_blocks"), [(1, 1), (4, 4), (3, 7), (64, 128), (103, 128), (5, 2)])
def test_tiles_without_a_mask_begin_at_different_blocks(num_tiles: int, num_blocks: int) -> None:
    blocks = BlockRange(0, 0, num_blocks, num_blocks)
    found = []

    @cute.jit
    def program(out, n_block, i):  # type: ignore[no-untyped-def]
        block_iter = BlockIterator.of(blocks, ascends=True)
        shift = n_block * num_blocks // num_tiles
        tile = KVTile(Int32(0), Int32(0), n_block, Int32(0), Int32(0), blocks, block_iter, shift)
        out[0] = tile.m_block(i)

    out = torch.zeros(1, dtype=torch.int32)
    compiled = cute.compile(program, from_dlpack(out), Int32(0), Int32(0))
    for n in range(num_tiles):
        visited = []
        for i in range(num_blocks):
            compiled(from_dlpack(out), Int32(n), Int32(i))
            visited.append(int(out[0]))
        assert sorted(visited) == list(range(num_blocks))
        found.append(visited[0])
    assert len(set(found)) == min(num_tiles, num_blocks)
