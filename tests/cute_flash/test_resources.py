"""Compile gates: no kernel of the tables spills, all use the tensor cores, and launches are as planned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cute_flash import resources as reading
from cute_flash.arch import ARCHS
from cute_flash.band import Band, ceil_div
from cute_flash.plan import Plan, plan, use_kernels
from cute_flash.problem import Problem
from cute_flash.resources import Resources, disassemble, nvdisasm, resources
from tests.launch_capture import Request, capture, has_compiler

FULL, CAUSAL, WINDOW, LEFT = Band(), Band(None, 0), Band(128, 64), Band(128, None)

# (target, head dim, mask, dtype). Every row of sm_80's table, with the masks that cost most registers where
# it is widest; a padded head dim; the rows of the other targets that differ from sm_80's.
GATES = [
    ("sm_80", 64, FULL, "bfloat16"),
    ("sm_80", 64, WINDOW, "bfloat16"),
    ("sm_80", 72, LEFT, "bfloat16"),
    ("sm_80", 96, CAUSAL, "bfloat16"),
    ("sm_80", 128, FULL, "bfloat16"),
    ("sm_80", 128, CAUSAL, "float16"),
    ("sm_80", 128, WINDOW, "bfloat16"),
    ("sm_80", 192, CAUSAL, "bfloat16"),
    ("sm_80", 256, FULL, "bfloat16"),
    ("sm_80", 256, WINDOW, "bfloat16"),
    ("sm_86", 128, WINDOW, "bfloat16"),
    ("sm_86", 192, CAUSAL, "bfloat16"),
    ("sm_86", 256, CAUSAL, "bfloat16"),
    ("sm_90", 96, CAUSAL, "bfloat16"),
    ("sm_90", 128, WINDOW, "bfloat16"),
    ("sm_90", 256, WINDOW, "bfloat16"),
]


def plan_of(target: str, head_dim: int, band: Band, dtype: str) -> Plan:
    with use_kernels("sm80"):
        return plan(Problem(2, 8, 4, 1000, 1000, head_dim, dtype, band), ARCHS[target])


def gate_id(gate: tuple[str, int, Band, str]) -> str:
    target, head_dim, band, dtype = gate
    mask = {FULL: "full", CAUSAL: "causal", WINDOW: "window", LEFT: "left"}[band]
    return f"{target}-d{head_dim}-{mask}-{dtype}"


@pytest.mark.compiles
@pytest.mark.parametrize("gate", GATES, ids=gate_id)
def test_kernel_keeps_everything_in_registers(gate: tuple[str, int, Band, str]) -> None:
    the_plan = plan_of(*gate)
    target, head_dim, _, dtype = gate
    found = resources(the_plan)
    arch, tile = the_plan.arch, the_plan.tile
    assert found.target == target
    # What a profiler shows, and what steers ptxas: see `FwdSm80.name`.
    assert found.symbol.startswith(f"cute_flash_fwd_sm80_d{head_dim}_{dtype}_")
    assert "cutlass" not in found.symbol
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert tile.accumulator_registers < found.registers <= 255
    # Registers are given out by 256 to a warp; those of a block must fit an SM.
    per_block = tile.num_warps * ceil_div(32 * found.registers, 256) * 256
    assert per_block <= arch.registers_per_sm
    assert found.smem_bytes <= arch.smem_per_block
    assert found.cubin_bytes > 4096
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    check_instructions(found, the_plan)


def check_instructions(found: Resources, the_plan: Plan) -> None:
    tile = the_plan.tile
    # One m16n8k16 of each warp per 16 x 8 x 16 of Q Kᵀ and of P V, in each copy of the main loop's body.
    per_block = 2 * (tile.tile_m // tile.num_warps // 16) * (tile.tile_n // 8) * (tile.head_dim // 16)
    bodies, rest = divmod(found.num_mma, per_block)
    assert bodies >= 2, "masked blocks and whole ones"
    assert rest == 0
    assert found.sass["HGMMA"] == 0
    # K and V arrive by cp.async and leave through ldmatrix; exp2 is on the special function unit.
    for name in ("LDGSTS", "LDSM", "MUFU"):
        assert found.sass[name] > 0, name
    # A load or store of local memory is a spill by another name.
    for name in ("LDL", "STL"):
        assert found.sass[name] == 0, name


REMARKS = """\x1b[1minfo\x1b[0m    : 0 bytes gmem
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
    Used 168 registers, used 1 barriers
    (C7510) wgmma was serialised
"""


class FakeKernel:
    __cubin__ = b"x" * 5000
    __ptx__ = ".visible .entry cute_flash_fwd_test(\n"


def test_what_ptxas_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_with_remarks(key: object, options: str) -> FakeKernel:
        assert "remarks{ptx}" in options
        print(REMARKS, file=reading.contextlib.sys.stderr)
        return FakeKernel()

    monkeypatch.setattr(reading.compiling, "cute_compile", compile_with_remarks)
    monkeypatch.setattr(reading, "disassemble", lambda cubin: SASS)
    the_plan = plan_of("sm_80", 64, FULL, "bfloat16")
    found = resources(the_plan)
    assert (found.registers, found.stack_bytes, found.spill_bytes) == (168, 8, 28)
    assert found.serialised_wgmma == ("C7510",)
    assert (found.symbol, found.cubin_bytes) == ("cute_flash_fwd_test", 5000)
    assert found.sass == Counter({"HMMA": 2, "MUFU": 1, "BRA": 1, "UIADD3": 1})
    text = "\n".join(found.lines())
    for part in ("168 a thread, 28 bytes spilled", "HMMA 2", "cute_flash_fwd_test (sm_80)"):
        assert part in text


SASS = """
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0020*/               @P1 MUFU.EX2 R3, R3 ;
        /*0030*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*10040*/                  BRA `(.L_1) ;
.L_1:
"""


def test_silence_of_ptxas_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.compiling, "cute_compile", lambda key, options: FakeKernel())
    with pytest.raises(RuntimeError, match="ptxas printed no resource usage"):
        resources(plan_of("sm_80", 64, FULL, "bfloat16"))


def test_without_a_disassembler_there_are_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "nvdisasm", lambda: None)
    assert disassemble(b"cubin") == ""


# Launches


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_launches_are_as_planned(tmp_path: Path) -> None:
    requests = [
        Request("sm_80", 1, 2, 2, 64, 64, 64),
        Request("sm_80", 3, 6, 2, 300, 77, 64),
        Request("sm_80", 1, 1, 1, 1, 5000, 64),
        Request("sm_80", 17, 5, 1, 129, 33, 64),
        Request("sm_90", 2, 4, 2, 1000, 1000, 128, right=0),
    ]
    for number, (request, answer) in enumerate(
        zip(requests, capture(requests, tmp_path), strict=True), start=1
    ):
        the_plan = request.plan()
        tile = the_plan.tile
        rows = len(range(0, request.seqlen_q, tile.tile_m))
        assert answer.launches == number
        assert answer.grid == (rows * request.heads * request.batch, 1, 1)
        assert answer.block == (tile.num_threads, 1, 1)
        # The DSL does not diagnose an overflow of shared memory: what it asks for must be what the tile says.
        assert answer.smem_bytes == tile.smem_bytes <= the_plan.arch.smem_per_block
