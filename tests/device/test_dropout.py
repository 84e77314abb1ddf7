"""Dropout as the kernels compute it, on the CPU as in `test_score`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory.views import as_operand_a
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scores.dropout_mask import DropoutMaskPipeline
from cute_flash.device.scores.philox import Dropout, DropoutOrigin, FourWords, PhiloxKey, batch_head_index, philox_4x32
from cute_flash.device.scores.position import TilePosition
from cute_flash.reference import dropout as philox
from cute_flash.runtime.operands import dropout_origin_operands
from cute_flash.spec.dropout import threshold as dropout_threshold
from tests.combinations import RNG
from tests.device.test_score import shapes
from tests.device.tiles import FOR_HOPPER, accumulators, coordinates, store
from tests.reference.test_dropout import KNOWN, words

pytestmark = pytest.mark.usefixtures("on_one_thread")


@pytest.mark.compiles
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    @cute.jit
    def program(out, counter, key):  # type: ignore[no-untyped-def]
        found = philox_4x32(FourWords(*(counter[i] for i in range(4))), PhiloxKey(key[0], key[1]))
        for i in cutlass.range_constexpr(4):
            out[i] = found[i]

    out = torch.zeros(4, dtype=torch.uint32)
    given = (torch.tensor(words(text), dtype=torch.uint32) for text in (counter, key))
    program(from_dlpack(out), *map(from_dlpack, given))
    assert out.tolist() == words(expected)


Draw = tuple[tuple[int, int], float]  # the first row and column, and the probability


def after_dropout(shape: Any, draws: list[Draw], origin: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """A tile of sevens after dropout, for each of `draws`: batch 1, head 3 of 5; of a shard if `origin` is given."""
    rows, columns, threads, mma_of = shape

    @cute.jit
    def program(out, rng, first_row, first_column, threshold, origin):  # type: ignore[no-untyped-def]
        mma = mma_of()
        shard = None if origin is None else DropoutOrigin(*origin)
        dropout = Dropout.read(rng, threshold, shard)
        batch_head = batch_head_index(shard, Int32(1), Int32(3), Int32(5))
        for thread in range(threads):
            tScS = coordinates(mma, Int32(thread), (rows, columns))
            rP = accumulators(mma, Int32(thread), (rows, columns), cutlass.BFloat16)
            rP.fill(7.0)
            position = TilePosition(batch_head, first_row, first_column, tScS)
            masks, packed = dropout.masks_of(as_operand_a(rP), position), cute.recast_tensor(rP, Int32)
            for i in cutlass.range_constexpr(cute.size(packed)):
                packed[i] = packed[i] & masks[i]
            store(rP, tScS, out)

    compiled = None
    shard = tuple(map(Int32, dropout_origin_operands(origin))) if origin else None
    for first, p in draws:
        out = torch.full((rows, columns), torch.nan)
        threshold = Int32(dropout_threshold(p) * 0x10001)
        arguments = (from_dlpack(out), from_dlpack(torch.tensor(RNG)), *map(Int32, first), threshold, shard)
        compiled = compiled or cute.compile(program, *arguments, options=FOR_HOPPER)
        compiled(*arguments)
        yield out


@pytest.mark.compiles
@shapes
@pytest.mark.parametrize("origin", [(), (96, 48, 2, 9)], ids=["whole call", "shard"])
def test_every_score_has_its_random_number(shape: Any, origin: tuple[int, ...]) -> None:
    """For tiles of queries x keys; `test_score_bwd` tests keys x queries. A shard has the mask of the full call."""
    draws = [((0, 0), 0.5), ((64, 32), 0.3), ((128, 48), 0.8)]
    for (first, p), found in zip(draws, after_dropout(shape, draws, origin), strict=True):
        mask = philox.Dropout(p, torch.tensor(RNG), *((9, origin[:3]) if origin else (5,)))
        ranges = [range(start, start + size) for start, size in zip(first, shape[:2], strict=True)]
        kept = mask.keep_mask(range(1, 2), range(3, 4), *ranges)[0, 0]
        assert torch.equal(found, torch.where(kept, 7.0, 0.0))


STEPS = 6  # of 16 keys


def produced_masks(draws: list[Draw]) -> Iterator[torch.Tensor]:
    """The tiles of two warpgroups, filled with 1, after the masks of four producer warps in the second stage."""
    columns = 16 * STEPS

    @cute.jit
    def program(out, words, rng, first_row, first_column, threshold):  # type: ignore[no-untyped-def]
        dropout = Dropout.read(rng, threshold)
        pipeline = DropoutMaskPipeline(words, None, 2)
        for thread in cutlass.range(128, unroll=1):
            for w in cutlass.range_constexpr(2):
                rectangle = (first_row + 64 * w) // 32
                warp, lane = thread // 32, thread % 32
                pipeline.produce(dropout, Int32(8), rectangle, first_column, 1, w, warp, lane)
        mma = make_mma(cutlass.BFloat16, columns, True, OperandMajorMode.K, OperandMajorMode.K)
        for thread in cutlass.range(128, unroll=1):
            tScS = coordinates(mma, thread, (64, columns))
            for w in cutlass.range_constexpr(2):
                rP = accumulators(mma, thread, (64, columns), cutlass.BFloat16)
                rP.fill(1.0)
                for steps in (range(2), range(2, STEPS)):
                    pipeline.apply(cute.recast_tensor(rP, Int32), steps, w, thread, Int32(3))
                for i in cutlass.range_constexpr(cute.size(rP)):
                    row, col = tScS[i]
                    out[64 * w + row, col] = rP[i].to(Float32)

    compiled = None
    for first, p in draws:
        out = torch.full((128, columns), torch.nan)
        # The first mode is contiguous.
        words = torch.zeros(2, 2, STEPS, 128, 4, dtype=torch.int32).permute(4, 3, 2, 1, 0)
        threshold = Int32(dropout_threshold(p) * 0x10001)
        given = (from_dlpack(out), from_dlpack(words, assumed_align=16), from_dlpack(torch.tensor(RNG)))
        arguments = (*given, *map(Int32, first), threshold)
        compiled = compiled or cute.compile(program, *arguments, options=FOR_HOPPER)
        compiled(*arguments)
        yield out


@pytest.mark.compiles
def test_every_score_has_its_mask() -> None:
    draws = [((0, 0), 0.3), ((256, 192), 0.8)]
    for (first, p), found in zip(draws, produced_masks(draws), strict=True):
        rows, keys = range(first[0], first[0] + 128), range(first[1], first[1] + 16 * STEPS)
        kept = philox.Dropout(p, torch.tensor(RNG), 5).keep_mask(range(1, 2), range(3, 4), rows, keys)[0, 0]
        assert torch.equal(found, kept.float())
