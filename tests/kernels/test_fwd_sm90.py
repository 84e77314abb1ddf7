"""Steps of the Hopper forward on the CPU, as in `tests/device`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.kernels.sm90.fwd import FwdSm90
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
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
