"""Parts of the Hopper kernels on the CPU, as in `test_parts`: accumulators of wgmma, scheduler, pipelines."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory.epilogue import store_rows
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline, WarpgroupOrder
from cute_flash.device.scheduling.tile_scheduler import PersistentTileScheduler
from cute_flash.device.scores.mask import column_offset
from cute_flash.device.softmax.exact import ExactMax
from cute_flash.device.softmax.exp2 import PlainExp2, ProbBlock
from cute_flash.device.softmax.softmax import LOG2_E, THREADS_PER_ROW, Softmax
from cute_flash.device.softmax.speculative import MAX_BLOCK_SUM, SpeculativeMax
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from tests.device.tiles import FOR_HOPPER, coordinates

# Widths N of m64nN: powers of two, and one other.
widths = pytest.mark.parametrize("width", [16, 80, 128])
THREADS = torch.arange(WARPGROUP_THREADS)


def tiled_mma(width: int):  # type: ignore[no-untyped-def]
    """The tiled MMA of Q Kᵀ with `width` keys."""
    return make_mma(cutlass.BFloat16, width, True, OperandMajorMode.K, OperandMajorMode.K)


# Views of accumulators


@pytest.mark.compiles
@widths
def test_accumulators_as_rows_and_columns(width: int) -> None:
    """The (m, n) view has the layout of fragment D of wgmma m64nN in the PTX manual."""

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = tiled_mma(width)
        for thread in range(WARPGROUP_THREADS):
            coords = as_mn(coordinates(mma, Int32(thread), (WARPGROUP_ROWS, width)))
            for r in cutlass.range_constexpr(cute.size(coords, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(coords, mode=[1])):
                    out[thread, r, c, 0], out[thread, r, c, 1] = coords[r, c]

    rows, cols = 2, width // THREADS_PER_ROW
    out = torch.full((WARPGROUP_THREADS, rows, cols, 2), -1, dtype=torch.int32)
    cute.compile(program, from_dlpack(out), options=FOR_HOPPER)(from_dlpack(out))
    warp, lane = THREADS // 32, THREADS % 32
    row = (lane // 4 + 16 * warp)[:, None] + torch.tensor([8 * i for i in range(rows)])
    col = (lane % 4 * 2)[:, None] + torch.tensor([j + 8 * t for t in range(width // 8) for j in (0, 1)])
    assert torch.equal(out[..., 0], row[:, :, None].expand(-1, -1, cols).int())
    assert torch.equal(out[..., 1], col[:, None, :].expand(-1, rows, -1).int())
    # The mask relies on these offsets.
    offsets = torch.tensor([column_offset(c) for c in range(cols)])
    assert torch.equal(col - col[:, :1], offsets.expand(WARPGROUP_THREADS, -1))


@pytest.mark.compiles
@widths
def test_accumulators_are_operand_a(width: int) -> None:
    """P stays in registers: viewed by `as_operand_a`, an accumulator has the layout of fragment A in the PTX manual."""

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        mma = tiled_mma(width)
        for thread in range(WARPGROUP_THREADS):
            held = as_operand_a(coordinates(mma, Int32(thread), (WARPGROUP_ROWS, width)))
            for k in cutlass.range_constexpr(cute.size(held, mode=[2])):
                for i in cutlass.range_constexpr(cute.size(held, mode=[0])):
                    out[thread, k, i, 0], out[thread, k, i, 1] = held[i, 0, k]

    steps = width // 16
    out = torch.full((WARPGROUP_THREADS, steps, 8, 2), -1, dtype=torch.int32)
    cute.compile(program, from_dlpack(out), options=FOR_HOPPER)(from_dlpack(out))
    warp, lane = THREADS // 32, THREADS % 32
    # a0 a1: this row; a2 a3: 8 rows below; a4 to a7: the same, 8 columns to the right.
    i = torch.arange(8)
    row = (lane // 4 + 16 * warp)[:, None] + 8 * (i // 2 % 2)
    col = (lane % 4 * 2)[:, None] + i % 2 + 8 * (i // 4)
    k = 16 * torch.arange(steps)[:, None]
    assert torch.equal(out[..., 0], row[:, None].expand(-1, steps, -1).int())
    assert torch.equal(out[..., 1], (col[:, None] + k).int())


# Outputs that are stored from registers


@pytest.mark.compiles
@pytest.mark.parametrize(("width", "head_dim"), [(64, 64), (64, 40), (256, 200)])
def test_only_rows_and_columns_of_the_output_are_stored(
    monkeypatch: pytest.MonkeyPatch, width: int, head_dim: int
) -> None:
    """Each pair of columns holds its own number. Rows and columns past the end are not written."""
    now: dict[str, Any] = {}

    def from_neighbour(value: Any, offset: int) -> Any:
        # Two neighbouring lanes exchange one pair each: a lane gives a pair of one n8 tile and gets one of the other.
        assert offset == 1
        return value - 3 + 6 * (now["lane"] % 2)

    monkeypatch.setattr(cute.arch, "lane_idx", lambda: now["lane"])
    monkeypatch.setattr(cute.arch, "shuffle_sync_bfly", from_neighbour)

    @cute.jit
    def program(out, rows_left):  # type: ignore[no-untyped-def]
        mma = tiled_mma(width)
        for thread in range(WARPGROUP_THREADS):
            now["lane"] = Int32(thread) % 32
            coords = as_mn(coordinates(mma, Int32(thread), (WARPGROUP_ROWS, width)))
            packed = cute.make_rmem_tensor((2, width // 8), Int32)
            for r, t in itertools.product(range(2), range(width // 8)):
                row, col = coords[r, 2 * t]
                packed[r, t] = row * (width // 2) + col // 2
            store_rows(packed, out, coords, head_dim, rows_left)

    out = torch.zeros(WARPGROUP_ROWS, width, dtype=torch.bfloat16)
    compiled = cute.compile(program, from_dlpack(out), Int32(0), options=FOR_HOPPER)
    for rows_left in (1, 33, WARPGROUP_ROWS, 1000):
        out.view(torch.int32).fill_(-1)
        compiled(from_dlpack(out), Int32(rows_left))
        expected = torch.arange(WARPGROUP_ROWS * width // 2, dtype=torch.int32).view(WARPGROUP_ROWS, -1)
        expected[rows_left:] = -1
        expected[:, head_dim // 2 :] = -1
        assert torch.equal(out.view(torch.int32), expected)


# Softmax, step by step


@pytest.mark.compiles
@pytest.mark.usefixtures("on_one_thread")
@pytest.mark.parametrize("speculative_max", [False, True])
@pytest.mark.parametrize("slope", [0.0, 0.5, 60.0, -60.0])
def test_softmax_in_steps(slope: float, speculative_max: bool) -> None:
    """As in the main loop.

    With a speculative row max, P is computed again if the block sums show that the max was too small.
    """
    rows, cols, steps = 2, 8, 2

    @cute.jit
    def program(scores, out, lse, sums, scale_log2):  # type: ignore[no-untyped-def]
        acc_O, row_lse = (cute.make_rmem_tensor(rows, Float32) for _ in range(2))
        acc_O_mn = cute.make_tensor(acc_O.iterator, cute.make_layout((rows, 1)))
        acc_S = cute.make_rmem_tensor(((2, 2, 2 * steps), 1, 1), Float32)
        acc_O.fill(0.0)
        softmax, exp2 = Softmax.start(acc_O_mn, scale_log2), PlainExp2()
        probs = ProbBlock.of(acc_S, softmax)
        for block in cutlass.range(scores.shape[0], unroll=1):
            for r, c in itertools.product(range(rows), range(cols)):
                as_mn(acc_S)[r, c] = scores[block, r, c]
            probs.block_sum.fill(0.0)
            row_max = SpeculativeMax(softmax) if speculative_max else ExactMax(softmax, block * cols)
            grew = row_max.raise_before_exp2(probs, exp2)
            for k in cutlass.range_constexpr(steps):
                exp2.exponentiate(softmax, probs, range(k, k + 1), row_max.maybe_empty)
            row_max.correct_after_exp2(probs, exp2, acc_O_mn, lambda: None)
            softmax.add_sums(probs.block_sum)
            if grew:
                softmax.scale_rows(acc_O_mn, softmax.alpha)
            for r in cutlass.range_constexpr(rows):
                # The values of V are 1 in even rows (keys) and 2 in odd ones.
                for c in cutlass.range_constexpr(cols):
                    acc_O[r] = acc_O[r] + as_mn(probs.acc_P)[r, c] * (1 + c % 2)
                sums[block, r] = probs.block_sum[r]
        softmax.finish(acc_O_mn, row_lse)
        for r in cutlass.range_constexpr(rows):
            out[r], lse[r] = acc_O[r], row_lse[r]

    num_blocks = 300 if abs(slope) < 1 else 5  # slow slopes need many blocks; steep ones overflow after a few
    scores = torch.randn((num_blocks, rows, cols), generator=torch.Generator().manual_seed(1))
    scores += slope * torch.arange(num_blocks)[:, None, None]
    out, lse, sums = torch.zeros(rows), torch.zeros(rows), torch.zeros(num_blocks, rows)
    program(*map(from_dlpack, (scores, out, lse, sums)), Float32(LOG2_E))
    S = scores.double().permute(1, 0, 2)
    # As in `test_parts`, the four threads of a row have the same scores.
    expected_lse = S.flatten(1).logsumexp(-1)
    weights = torch.arange(cols).double() % 2 + 1
    expected = ((S - expected_lse[:, None, None]).exp() * weights).sum((1, 2)) / THREADS_PER_ROW
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse + math.log(THREADS_PER_ROW), rtol=1e-5, atol=1e-5)
    # P in 16 bits must not overflow with any maximum that the kernel uses.
    assert sums.max() <= MAX_BLOCK_SUM


# Tiles of persistent CTAs


@pytest.fixture
def scheduler_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[..., int]]:
    """`scheduler_step(is_dynamic)(counter, num_tiles, grid, cta, index)`: lane 0 fetches the next tile.

    Returns the next index; with index -1, the first one.
    """
    now: dict[str, Any] = {}

    def atomic_add(pointer: Any, value: Any, sem: str, scope: str) -> Any:
        number = cute.make_tensor(pointer, cute.make_layout(1))
        old = number[0]
        number[0] = old + value
        return old

    monkeypatch.setattr(cute.arch, "grid_dim", lambda: (now["grid"], 1, 1))
    monkeypatch.setattr(cute.arch, "block_idx", lambda: (now["block"], 0, 0))
    monkeypatch.setattr(cute.arch, "lane_idx", lambda: Int32(0))
    monkeypatch.setattr(cute.arch, "shuffle_sync", lambda value, lane: value)
    monkeypatch.setattr(cute.arch, "atomic_add", atomic_add)

    def compile_step(is_dynamic: bool) -> Callable[..., int]:
        @cute.jit
        def program(out, address, num_tiles, grid, block, index):  # type: ignore[no-untyped-def]
            now.update(grid=grid, block=block)
            scheduler = PersistentTileScheduler(num_tiles, address, is_dynamic)
            if index < 0:
                out[0] = scheduler.first_tile()
            else:
                following = scheduler.next_tile(index)
                out[0] = following
                if following >= num_tiles:
                    scheduler.finish(following)

        out = torch.zeros(1, dtype=torch.int32)
        compiled = cute.compile(program, from_dlpack(out), Int64(0), *map(Int32, (0, 0, 0, 0)))

        def step(counter: torch.Tensor, *numbers: int) -> int:
            compiled(from_dlpack(out), Int64(counter.data_ptr()), *map(Int32, numbers))
            return int(out[0])

        return step

    return compile_step


@pytest.mark.compiles
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_persistent_ctas_compute_every_tile_once(scheduler_step: Any, is_dynamic: bool) -> None:
    """In any order in which CTAs become free. The counter is 0 afterwards."""
    step = scheduler_step(is_dynamic)
    counter = torch.zeros(1, dtype=torch.int32)
    order = random.Random(0)
    for num_tiles, most in itertools.product((1, 2, 3, 7, 20, 41), (1, 2, 3, 5, 8, 19, 132)):
        grid = min(num_tiles, most)
        blocks = {block: step(counter, num_tiles, grid, block, -1) for block in range(grid)}
        assert blocks == {block: block for block in range(grid)}
        done = []
        while blocks:
            block = order.choice(list(blocks))
            done.append(blocks[block])
            blocks[block] = step(counter, num_tiles, grid, block, blocks[block])
            if blocks[block] >= num_tiles:
                del blocks[block]
        assert sorted(done) == list(range(num_tiles))
        assert counter.item() == 0


@pytest.mark.compiles
def test_a_fast_cta_takes_the_tiles_of_a_slow_one(scheduler_step: Any) -> None:
    step, counter = scheduler_step(True), torch.zeros(1, dtype=torch.int32)
    num_tiles, grid, index, done = 10, 2, 0, []
    while index < num_tiles:
        done.append(index)
        index = step(counter, num_tiles, grid, 0, index)
    # CTA 1 is still at its first tile.
    assert done == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert counter.item() == 9
    assert step(counter, num_tiles, grid, 1, 1) == 11
    assert counter.item() == 0


# Pipelines


class Barrier:
    """An mbarrier as in the PTX manual: a wait returns when the phase of its parity is complete."""

    def __init__(self) -> None:
        self.phases = 0

    def passes(self, parity: int) -> bool:
        return self.phases % 2 != parity


@pytest.fixture
def pipeline_waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Callable[[int], list[int]]]:
    """`pipeline_waits(stages)(iteration)`: the stage, and the barriers and phases that consumer and producer wait for.

    Barriers are numbered: full ones from 100 on, empty ones from 200 on.
    """
    asked: list[Any] = []
    monkeypatch.setattr(cute.arch, "mbarrier_wait", lambda barrier, parity: asked.extend((barrier, parity)))

    def compile_pipeline(stages: int) -> Callable[[int], list[int]]:
        @cute.jit
        def program(out, iteration):  # type: ignore[no-untyped-def]
            asked.clear()
            pipeline = Pipeline(Int32(100), Int32(200), stages)
            pipeline.wait_full(iteration)
            pipeline.wait_empty(iteration)
            for i, value in enumerate((pipeline.stage(iteration), *asked)):
                out[i] = Int32(value)

        out = torch.zeros(5, dtype=torch.int32)
        compiled = cute.compile(program, from_dlpack(out), Int32(0))

        def waits(iteration: int) -> list[int]:
            compiled(from_dlpack(out), Int32(iteration))
            return out.tolist()

        return waits

    return compile_pipeline


@pytest.mark.compiles
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_pipelines_wait_for_their_own_iteration_and_no_other(pipeline_waits: Any, stages: int) -> None:
    waits = pipeline_waits(stages)
    full, empty = ([Barrier() for _ in range(stages)] for _ in range(2))
    for iteration in range(4 * stages + 1):
        stage, full_barrier, full_parity, empty_barrier, empty_parity = waits(iteration)
        assert (stage, full_barrier, empty_barrier) == (iteration % stages, 100 + stage, 200 + stage)
        # In the first round the producer does not wait; later it waits for the consumers of its stage.
        assert empty[stage].passes(empty_parity)
        # Consumers see the bytes of this iteration, not those of the previous round.
        assert not full[stage].passes(full_parity)
        full[stage].phases += 1
        assert full[stage].passes(full_parity)
        next_empty_parity = waits(iteration + stages)[4]
        assert not empty[stage].passes(next_empty_parity)
        empty[stage].phases += 1
        assert empty[stage].passes(next_empty_parity)


# The order of warpgroups


def order_events(monkeypatch: pytest.MonkeyPatch, num_warpgroups: int) -> list[list[int]]:
    """For each warpgroup the barriers at which it arrives when it starts, waits, and arrives afterwards.

    -1: none.
    """
    now: dict[str, Any] = {}

    def record(barrier_id: Any, number_of_threads: int) -> None:
        assert number_of_threads == 2 * WARPGROUP_THREADS
        now["out"][now["warpgroup"], now["event"]] = Int32(barrier_id)

    monkeypatch.setattr(cute.arch, "barrier", record)
    monkeypatch.setattr(cute.arch, "barrier_arrive", record)

    @cute.jit
    def program(out, warpgroup):  # type: ignore[no-untyped-def]
        order = WarpgroupOrder(1, num_warpgroups, warpgroup)
        for event, method in enumerate((order.start, order.wait, order.arrive)):
            now.update(out=out, warpgroup=warpgroup, event=event)
            method()

    out = torch.full((num_warpgroups, 3), -1, dtype=torch.int32)
    for warpgroup in range(num_warpgroups):
        program(from_dlpack(out), Int32(warpgroup))
    return out.tolist()


@pytest.mark.compiles
@pytest.mark.parametrize("num_warpgroups", [2, 3])
def test_warpgroups_pass_in_order(monkeypatch: pytest.MonkeyPatch, num_warpgroups: int) -> None:
    events = order_events(monkeypatch, num_warpgroups)
    begins, waits, passes = zip(*events, strict=True)
    # Each warpgroup has its own barrier. Barrier 0 belongs to all threads.
    assert sorted(waits) == list(range(1, num_warpgroups + 1))
    # One warpgroup passes at a time, in cyclic order.
    assert [begun for begun in begins if begun != -1] == [waits[0]]
    barrier, order = waits[0], []
    for _ in range(3 * num_warpgroups):
        order.append(waits.index(barrier))
        barrier = passes[order[-1]]
    assert order == list(range(num_warpgroups)) * 3


@pytest.mark.compiles
def test_a_warpgroup_alone_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert order_events(monkeypatch, 1) == [[-1, -1, -1]]
