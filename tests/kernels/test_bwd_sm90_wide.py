"""The wide Hopper backward: orders of elements of dQ, P and dS, and the turns of the warps that add dQ."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory.stmatrix import MATRIX, MATRIX_BYTES, store_transposed
from cute_flash.device.scheduling.pipeline import WARPGROUP_THREADS, Pipeline
from cute_flash.kernels.sm90.bwd_storage import NUM_WARPGROUPS
from cute_flash.kernels.sm90.bwd_wide_storage import DETERMINISTIC_ADDERS, DETERMINISTIC_HALVES
from cute_flash.planning.tiles.common import WARPGROUP_ROWS
from cute_flash.smem.tile import SmemTile
from layouts.banks import Phase
from layouts.layout import layout_of
from tests.device.test_hopper_parts import tiled_mma
from tests.device.tiles import FOR_HOPPER
from tests.jit.gates import kernel_resources
from tests.lock.cases import HOPPER, bwd, compile_key


@pytest.mark.compiles
def test_halves_of_accumulators_have_the_order_of_the_whole() -> None:
    """dQ is added in halves, and postprocess reads it as one tile."""

    @cute.jit
    def program(out):  # type: ignore[no-untyped-def]
        for thread in range(WARPGROUP_THREADS):
            for whole in cutlass.range_constexpr(2):
                shape = (WARPGROUP_ROWS, 64 * (1 + whole))
                mma = tiled_mma(shape[1]).get_slice(Int32(thread))
                coords = mma.partition_C(cute.make_identity_tensor(shape))
                for i in cutlass.range(cute.size(coords), unroll_full=True):
                    out[thread, whole, i, 0], out[thread, whole, i, 1] = coords[i]

    out = torch.full((WARPGROUP_THREADS, 2, 64, 2), -1, dtype=torch.int32)
    cute.compile(program, from_dlpack(out), options=FOR_HOPPER)(from_dlpack(out))
    half, whole = out[:, 0, :32], out[:, 1]
    assert torch.equal(torch.cat((half, half + torch.tensor([0, 64])), 1), whole)


@pytest.mark.compiles
@pytest.mark.parametrize("width", [32, 40, 64, 80])
def test_accumulators_are_stored_transposed(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Every element of every n8 tile is stored at its place in the swizzled tile, without bank conflicts."""
    now: dict[str, Any] = {}

    def record(text: str, read_only_args: list[Any]) -> None:
        address, *registers = read_only_args
        assert f".x{len(registers)}.trans" in text
        now["out"][now["thread"], now["number"], 0] = Int32(address)
        for i, register in enumerate(registers, start=1):
            now["out"][now["thread"], now["number"], i] = Int32(register)
        now["number"] += 1

    monkeypatch.setattr(cute.arch, "inline_ptx", record)

    class Pointer:
        def toint(self) -> Int32:
            return Int32(0)

    @cute.jit
    def program(out, thread):  # type: ignore[no-untyped-def]
        now.update(out=out, thread=thread, number=0)
        packed = cute.make_rmem_tensor(width // 4, Int32)
        for i in cutlass.range_constexpr(width // 4):
            packed[i] = Int32(i)
        store_transposed(packed, Pointer(), thread)

    instructions = -(-width // 16)
    out = torch.full((WARPGROUP_THREADS, instructions, 5), -1, dtype=torch.int32)
    compiled = cute.compile(program, from_dlpack(out), Int32(0))
    for thread in range(WARPGROUP_THREADS):
        compiled(from_dlpack(out), Int32(thread))
    found: dict[int, tuple[int, int]] = {}
    for warp, number in itertools.product(range(4), range(instructions)):
        lanes = out[32 * warp : 32 * warp + 32, number].tolist()
        for matrix, register in enumerate(lanes[0][1:]):
            if register == -1:
                continue
            addresses = [lanes[MATRIX * matrix + j][0] for j in range(MATRIX)]
            assert Phase(16, tuple(enumerate(addresses))).wavefronts == 1
            tile, half = divmod(register, 2)
            for lane, pair in itertools.product(range(32), range(2)):
                column = lane % 4 * 2 + pair
                element = (16 * warp + 8 * half + lane // 4, 8 * tile + column)
                found[addresses[column] + 2 * (lane // 4)] = element
    layout = layout_of(SmemTile(width, WARPGROUP_ROWS))
    elements = itertools.product(range(WARPGROUP_ROWS), range(width))
    assert found == {2 * layout((column, row)): (row, column) for row, column in elements}
    assert max(found) < width // 8 * MATRIX_BYTES


@pytest.mark.parametrize("seed", range(50))
def test_every_adder_adds_the_half_whose_turn_it_is(seed: int) -> None:
    """Barriers of the deterministic kernel, under a random schedule: a wait only knows the parity of a phase."""
    pick, total = random.Random(seed), 23
    pipeline = Pipeline(None, None, NUM_WARPGROUPS * DETERMINISTIC_HALVES)
    full, empty = [0] * pipeline.stages, [0] * pipeline.stages  # completed phases
    memory, added = [-1] * NUM_WARPGROUPS, []

    def passes(barrier: list[int], j: int) -> Callable[[], bool]:
        return lambda: barrier[pipeline.stage(j)] % 2 != pipeline.phase(j)

    def mma(wg: int) -> Iterator[Callable[[], bool]]:
        for half in range(total):
            j = half * NUM_WARPGROUPS + wg
            yield passes(empty, j - NUM_WARPGROUPS)
            memory[wg] = half
            yield lambda: True
            full[pipeline.stage(j)] += 1

    def adder(number: int) -> Iterator[Callable[[], bool]]:
        for half in range(number, total, DETERMINISTIC_ADDERS):
            yield lambda: True  # the semaphore
            for wg in range(NUM_WARPGROUPS):
                yield passes(full, half * NUM_WARPGROUPS + wg)
                added.append((wg, half, memory[wg]))
            for wg in range(NUM_WARPGROUPS):
                yield lambda: True  # the memory has been read
                empty[pipeline.stage(half * NUM_WARPGROUPS + wg)] += 1

    warps = [*map(mma, range(NUM_WARPGROUPS)), *map(adder, range(DETERMINISTIC_ADDERS))]
    running = {number: next(warp) for number, warp in enumerate(warps)}
    speed = [pick.choice((1, 1, 20)) for _ in warps]
    while running:
        ready = [number for number, condition in running.items() if condition()]
        assert ready, "deadlock"
        number = pick.choices(ready, [speed[i] for i in ready])[0]
        del running[number]
        for condition in itertools.islice(warps[number], 1):
            running[number] = condition
    assert sorted(added) == [(wg, half, half) for wg in range(NUM_WARPGROUPS) for half in range(total)]


@pytest.mark.kernels("bwd_sm90_wide")
@pytest.mark.compiles
def test_halves_have_semaphores_of_their_own() -> None:
    found = kernel_resources(compile_key(bwd(HOPPER, 256, mask="full", deterministic=True)))
    for instruction in ("ld.acquire.gpu.global.u16", "st.release.gpu.global.u16"):
        assert len(re.findall(instruction, found.ptx)) == 1
    # One addition for each warpgroup.
    assert len(re.findall(r"cp\.reduce\.async\.bulk", found.ptx)) == NUM_WARPGROUPS
