"""Steps of the Hopper kernel on the CPU, as in `test_device`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cute_flash.kernels.fwd_sm90 import FwdSm90
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.problem import Static

# The DSL takes dataclasses apart: these have of the kernel's what `look_ahead` asks for.


@dataclass(frozen=True)
class Softmax:
    scale_log2: Float32


@dataclass(frozen=True)
class Ring:
    """Writes down the fill that is waited for."""

    waited: cute.Tensor

    def wait_full(self, fill: Any) -> None:
        self.waited[0] = fill


@dataclass(frozen=True)
class Shared:
    k: Ring


@dataclass(frozen=True)
class Main:
    softmax: Softmax
    shared: Shared


@dataclass(frozen=True)
class Steps:
    num: Int32


@dataclass(frozen=True)
class Tile:
    walk: Steps
    fill: Int32


class Kernel(FwdSm90):
    """With one stage of Q, which every warp gives back after the last block."""

    def __init__(self) -> None:
        super().__init__(Static("bfloat16", 256, False, False), FwdTileSm90(256, 128, 64, 2, 1))

    def release_q(self, main: Any, tile: Any) -> None:
        main.shared.k.waited[1] = Int32(1)


NOT_A_NUMBER = [math.nan, math.nan]


@pytest.mark.parametrize("sums", [[1.0, 2.0], [0.0, 0.0], [math.inf, math.inf], NOT_A_NUMBER], ids=str)
def test_q_is_given_back_whatever_the_scores(monkeypatch: pytest.MonkeyPatch, sums: list[float]) -> None:
    """After the last block, once: without it the kernel would hang. Before it, the next block's K is waited
    for, or left to the block itself if the sums are no numbers.
    """
    monkeypatch.setattr(cute.arch, "vote_any_sync", lambda predicate: predicate)
    kernel = Kernel()

    @cute.jit
    def program(out, sums, following):  # type: ignore[no-untyped-def]
        block_sum = cute.make_rmem_tensor(2, Float32)
        for r in range(2):
            block_sum[r] = sums[r]
        main = Main(Softmax(Float32(0.1)), Shared(Ring(out)))
        kernel.look_ahead(main, Tile(Steps(Int32(5)), Int32(100)), following, block_sum)

    # The five blocks are fills 100 ... 104.
    for following, expected in ((102, [102, -1]), (104, [104, -1]), (105, [-1, 1])):
        out = torch.full((2,), -1, dtype=torch.int32)
        program(from_dlpack(out), from_dlpack(torch.tensor(sums)), Int32(following))
        waited = -1 if sums is NOT_A_NUMBER else expected[0]
        assert out.tolist() == [waited, expected[1]]
