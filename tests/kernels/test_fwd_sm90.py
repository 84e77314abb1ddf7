"""Steps of the Hopper forward on the CPU, as in `tests/device`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.kernels.sm90.fwd import FwdSm90
from cute_flash.kernels.sm90.fwd_storage import Config, Params
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Static

# Stand-ins for the kernel's state, with the fields that `look_ahead` reads. The DSL flattens dataclasses.


@dataclass(frozen=True)
class Softmax:
    scale_log2: Float32


@dataclass(frozen=True)
class Pipeline:
    """Records the iteration that is waited for."""

    waited: cute.Tensor

    def wait_full(self, iteration: Any) -> None:
        self.waited[0] = iteration


@dataclass(frozen=True)
class Storage:
    k: Pipeline


@dataclass(frozen=True)
class State:
    softmax: Softmax
    storage: Storage


@dataclass(frozen=True)
class Blocks:
    num: Int32


@dataclass(frozen=True)
class Tile:
    block_iter: Blocks
    iteration: Int32


class Kernel(FwdSm90):
    """A kernel with one stage of Q, which every warp releases after the last block."""

    def __init__(self) -> None:
        super().__init__(Static("bfloat16", 256, False, False), FwdTileSm90(256, 128, 64, 2, 1))

    def release_q(self, state: Any, tile: Any) -> None:
        state.storage.k.waited[1] = Int32(1)


NOT_A_NUMBER = [math.nan, math.nan]


@pytest.mark.compiles
@pytest.mark.parametrize("sums", [[1.0, 2.0], [0.0, 0.0], [math.inf, math.inf], NOT_A_NUMBER], ids=str)
def test_q_is_released_once_for_all_scores(monkeypatch: pytest.MonkeyPatch, sums: list[float]) -> None:
    """Q is released once, after the last block; otherwise the kernel would hang.

    Each earlier block waits for the K of the next block, unless its sums are NaN: then the next block waits itself.
    """
    monkeypatch.setattr(cute.arch, "vote_any_sync", lambda predicate: predicate)
    kernel = Kernel()

    @cute.jit
    def program(out, sums, following):  # type: ignore[no-untyped-def]
        block_sum = cute.make_rmem_tensor(2, Float32)
        for r in range(2):
            block_sum[r] = sums[r]
        state = State(Softmax(Float32(0.1)), Storage(Pipeline(out)))
        kernel.look_ahead(state, Tile(Blocks(Int32(5)), Int32(100)), following, block_sum)

    # The five blocks are iterations 100 ... 104.
    for following, expected in ((102, [102, -1]), (104, [104, -1]), (105, [-1, 1])):
        out = torch.full((2,), -1, dtype=torch.int32)
        program(from_dlpack(out), from_dlpack(torch.tensor(sums)), Int32(following))
        waited = -1 if sums is NOT_A_NUMBER else expected[0]
        assert out.tolist() == [waited, expected[1]]


SKIPPING = (
    FwdTileSm90(64, 192, 128, 4, 2, skips_blocks=True),
    FwdTileSm90(128, 192, 64, 4, 2, skips_blocks=True),
    FwdTileSm90(128, 192, 80, 2, 2, skips_blocks=True),
    FwdTileSm90(256, 128, 64, 2, 1, skips_blocks=True),
)
CAUSAL = Static("bfloat16", 64, False, True)


@dataclass(frozen=True)
class DenseParams:
    """Stand-in for `Params` of a dense batch, on Python integers."""

    config: Config
    band: Band

    def seqlen_q_of(self, seqlen: Any) -> int:
        return seqlen.q_len

    warpgroup_blocks = Params.warpgroup_blocks


LENGTHS = ((512, 512), (1024, 1024), (1, 1), (64, 640), (200, 333), (600, 77), (257, 1027), (193, 0))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("right", [None, 0, 100])
@pytest.mark.parametrize("tile", SKIPPING, ids=str)
def test_a_warpgroup_visits_the_blocks_in_which_its_rows_see_keys(
    tile: FwdTileSm90, right: int | None, lengths: tuple[int, int]
) -> None:
    """They are the first ones of the tile, in its order; the others fit into the other stages of V."""
    (sq, sk), n, band = lengths, tile.tile_n, Band(None, right)
    params = DenseParams(Config(replace(CAUSAL, has_right=right is not None), tile), band)
    seqlen = SimpleNamespace(q_len=sq, k_len=sk)
    for m_block in range(-(-sq // tile.tile_m)):
        blocks = band.blocks(m_block, tile.tile_m, n, sq, sk)
        visits = list(range(blocks.begin, blocks.end))
        visits = visits if right is not None else visits[::-1]
        for warpgroup in range(tile.num_warpgroups):
            found = params.warpgroup_blocks(m_block, warpgroup, seqlen)
            own = [found.block(i) for i in range(found.num)]
            assert own == visits[: len(own)]
            first = m_block * tile.tile_m + warpgroup * WARPGROUP_ROWS
            ends = [band.hi(row, sq, sk) for row in range(first, min(first + WARPGROUP_ROWS, sq))]
            assert set(own) == {block for block in visits if any(end > block * n for end in ends)}
            is_full = [all(end >= (block + 1) * n for end in ends) for block in own]
            assert is_full == [not found.is_masked(i) for i in range(found.num)]
            if own and right is not None:
                assert len(visits) - len(own) <= tile.most_skipped


@pytest.mark.parametrize(
    "static",
    [replace(CAUSAL, has_left=True), replace(CAUSAL, pack_gqa=True), replace(CAUSAL, features=("alibi",))],
    ids=["left bound", "packed heads", "alibi"],
)
def test_tiles_with_another_order_skip_no_blocks(static: Static) -> None:
    assert Config(CAUSAL, SKIPPING[0]).skips_blocks and not Config(static, SKIPPING[0]).skips_blocks
    # A warpgroup may skip two blocks of 80 keys, which leaves no stage for V of its last own block.
    assert not Config(CAUSAL, SKIPPING[2]).skips_blocks
    assert Config(replace(CAUSAL, has_right=False), SKIPPING[2]).skips_blocks
