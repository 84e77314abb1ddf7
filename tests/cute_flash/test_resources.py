"""Compile gates: no kernel of the tables spills, all use the tensor cores, and launches are as planned."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from cute_flash.jit import resources as reading
from cute_flash.jit.resources import Resources, disassemble, nvdisasm, resources
from cute_flash.planning.plan import Plan, bwd_plan, plan
from cute_flash.planning.tiles import fwd_tile
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD, BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Problem
from tests.gates import kernel_resources
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


def serves_plain_calls(row: FwdTileSm90) -> bool:
    """Others are for features and functions: `test_feature_resources`, `test_mods_resources`."""
    # Narrower keys: values may be of another width, which that of the row is not.
    calls = itertools.product((512, 1536, 8192), (row.head_dim, row.head_dim - 8), (FULL, CAUSAL))
    problems = (
        Problem(2, 4, 4, keys, keys, head_dim, band=band, head_dim_v=row.head_dim_v)
        for keys, head_dim, band in calls
    )
    return any(fwd_tile("sm90", ARCHS["sm_90"], problem) is row for problem in problems)


# (row, mask, dtype, whether heads are packed) of the Hopper kernel. Every row with the masks that cost least
# and most, and causal ones where it is most used; fp16 there and where it is widest.
HOPPER_ROWS = [row for row in SM90_FWD if serves_plain_calls(row)]
HOPPER_GATES = [
    (row, band, "bfloat16", False)
    for row in HOPPER_ROWS
    for band in (
        (FULL, CAUSAL, WINDOW) if row.head_dim in (64, 128) and row.head_dim_v is None else (FULL, WINDOW)
    )
    if row.is_bounded in (None, band != FULL)
]
HOPPER_GATES += [
    (row, band, dtype, packs)
    for row in HOPPER_ROWS
    if row.head_dim_v is None
    for head_dim, band, dtype, packs in (
        (64, FULL, "float16", False),
        (128, CAUSAL, "float16", False),
        (128, CAUSAL, "bfloat16", True),
        (256, WINDOW, "float16", True),
    )
    if row.head_dim == head_dim and row.is_bounded in (None, band != FULL)
]


def plan_of(target: str, head_dim: int, band: Band, dtype: str) -> Plan:
    with use_kernels("sm80"):
        return plan(Problem(2, 8, 4, 1000, 1000, head_dim, dtype, band), ARCHS[target])


def hopper_plan(row: FwdTileSm90, band: Band, dtype: str, packs_heads: bool) -> Plan:
    # Of the same widths there is another row.
    head_dim = row.head_dim - 8 if row.head_dim_v == row.head_dim else row.head_dim
    queries = 30 if packs_heads else 1000
    sizes = (2, 8, 4, queries, row.max_keys or 1 << 20, head_dim)
    if band == WINDOW and row.max_keys is None:
        # A narrow one counts as a short sequence.
        band = Band(1 << 14, 64)
    found = plan(Problem(*sizes, dtype, band, row.head_dim_v), ARCHS["sm_90"], packs_heads)
    assert found.tile is row and found.packs_heads == packs_heads
    return found


MASKS = {FULL: "full", CAUSAL: "causal", WINDOW: "window", LEFT: "left"}


def gate_id(gate: tuple[str, int, Band, str]) -> str:
    target, head_dim, band, dtype = gate
    return f"{target}-d{head_dim}-{MASKS[band]}-{dtype}"


def hopper_gate_id(gate: tuple[FwdTileSm90, Band, str, bool]) -> str:
    row, band, dtype, packs = gate
    widths = f"d{row.head_dim}" + (f"v{row.head_dim_v}" if row.head_dim_v else "")
    return f"{widths}-{row.tile_m}x{row.tile_n}-{MASKS[band]}-{dtype}" + ("-packed" if packs else "")


@pytest.mark.compiles
@pytest.mark.parametrize("gate", GATES, ids=gate_id)
def test_kernel_keeps_everything_in_registers(gate: tuple[str, int, Band, str]) -> None:
    the_plan = plan_of(*gate)
    target, head_dim, _, dtype = gate
    found = kernel_resources(the_plan.key)
    arch, tile = the_plan.arch, the_plan.tile
    assert isinstance(tile, FwdTileSm80)
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
    assert isinstance(tile, FwdTileSm80)
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


@pytest.mark.compiles
@pytest.mark.parametrize("gate", HOPPER_GATES, ids=hopper_gate_id)
def test_hopper_kernel_keeps_everything_in_registers(gate: tuple[FwdTileSm90, Band, str, bool]) -> None:
    the_plan = hopper_plan(*gate)
    row, _, dtype, _ = gate
    found = kernel_resources(the_plan.key)
    assert found.target == "sm_90a"
    assert found.symbol.startswith(f"cute_flash_fwd_sm90_d{the_plan.problem.head_dim}")
    assert f"_{dtype}_" in found.symbol
    assert "cutlass" not in found.symbol
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    # Serialised wgmma waits after every instruction; an ignored setmaxnreg leaves the accumulators no room.
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= 227 << 10
    check_registers(found, row)
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    check_hopper_instructions(found, the_plan)


def check_registers(found: Resources, tile: FwdTileSm90) -> None:
    *for_others, for_mma = found.setmaxnreg
    assert len(for_others) == 1 + tile.dropout_producer
    # What the instruction takes.
    assert all(24 <= count <= 256 and count % 8 == 0 for count in found.setmaxnreg)
    # Given out by 8 to a thread. Warpgroups can only take what others gave: more would be waited for forever.
    at_launch = ceil_div(found.registers, 8) * 8
    warpgroups = tile.num_threads // 128
    assert sum(for_others) + tile.num_warpgroups * for_mma <= warpgroups * at_launch
    assert tile.num_threads * at_launch <= ARCHS["sm_90"].registers_per_sm
    assert tile.accumulator_registers < for_mma


def check_hopper_instructions(found: Resources, the_plan: Plan) -> None:
    tile, static = the_plan.tile, the_plan.problem.static
    assert isinstance(tile, FwdTileSm90)
    # 64 rows of a warpgroup at a time: one instruction for 16 columns of Q Kᵀ's sum, or 16 keys of P V's.
    qk, pv = tile.head_dim // 16, tile.tile_n // 16 * (tile.width_v // tile.columns_pv)
    # Every copy of the loop's body has Q Kᵀ of a block and P V of the one before. Slopes and a softcap have
    # one that asks of every block whether it is cut.
    asks = static.features.alibi or static.features.softcap
    bodies = 1 if asks else 1 + static.has_left + static.has_right
    # Q Kᵀ of a tile's first block and P V of its last; with room for the next Q, also one beside the other.
    ends = 1 + (tile.q_stages > 1)
    assert found.sass["HGMMA"] == (bodies + ends) * (qk + pv)
    # Q, K and V arrive by TMA; exp2 is on the special function unit.
    for name in ("UTMALDG", "MUFU", "USETMAXREG"):
        assert found.sass[name] > 0, name
    # The output leaves by TMA through the space of Q where the next Q has another.
    for name in ("UTMASTG", "STSM"):
        assert (found.sass[name] > 0) == (tile.q_stages > 1), name
    for name in ("HMMA", "LDSM", "LDGSTS", "LDL", "STL"):
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
    assert (found.setmaxnreg, found.mma) == ((), "2 HMMA")


def test_registers_that_move_are_read_from_the_ptx() -> None:
    ptx = "setmaxnreg.dec.sync.aligned.u32 \t24;\n" + 2 * "setmaxnreg.inc.sync.aligned.u32 \t240;\n"
    found = Resources("fwd", "sm_90a", 168, 0, 0, 0, 1024, (), Counter({"HGMMA": 48, "UTMALDG": 7}), ptx=ptx)
    assert found.setmaxnreg == (24, 240)
    assert found.mma == "48 HGMMA"
    text = "\n".join(found.lines())
    for part in ("168 at launch, then 24 or 240 a thread, 0 bytes", "HGMMA 48, UTMALDG 7", "fwd (sm_90a)"):
        assert part in text


def test_what_was_not_disassembled_was_not_counted() -> None:
    found = Resources("fwd", "sm_90a", 168, 0, 0, 0, 1024, ())
    assert found.mma == "MMAs not counted (no nvdisasm)"
    assert "pip install nvidia-cuda-nvdisasm" in "\n".join(found.lines())


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

REQUESTS = [
    Request("sm_80", 1, 2, 2, 64, 64, 64),
    Request("sm_80", 3, 6, 2, 300, 77, 64),
    Request("sm_80", 1, 1, 1, 1, 5000, 64),
    Request("sm_80", 17, 5, 1, 129, 33, 64),
    Request("sm_80", 2, 4, 2, 300, 77, 64, is_bshd=True),
    Request("sm_90", 2, 4, 2, 1000, 1000, 128, right=0),
    Request("sm_90", 1, 2, 2, 64, 64, 64, family="sm90"),
    Request("sm_90", 3, 6, 2, 5000, 77, 64, family="sm90"),
    Request("sm_90", 3, 6, 1, 300, 333, 64, family="sm90", is_bshd=True),
    Request("sm_90", 2, 4, 2, 1000, 1000, 128, right=0, family="sm90"),
    Request("sm_90", 17, 50, 10, 129, 33, 128, right=0, family="sm90", is_bshd=True),
    Request("sm_90", 17, 50, 10, 20, 33, 128, family="sm90", is_packed=True),
    Request("sm_90", 2, 4, 2, 300, 300, 128, family="sm90", head_dim_v=64),
]


# Numbers of stages and warpgroups that the table does not have; with an odd number of barriers, what follows
# them is aligned.
TILES = [
    {"head_dim": 32, "tile_m": 128, "tile_n": 16, "stages": 8, "q_stages": 2, "ping_pong": False},
    {"head_dim": 64, "tile_m": 64, "tile_n": 80, "stages": 4, "q_stages": 2},
    {"head_dim": 64, "tile_m": 64, "tile_n": 80, "stages": 4},
    {"head_dim": 96, "tile_m": 192, "tile_n": 48, "stages": 1, "head_dim_v": 192, "speculative_max": True},
]


@pytest.mark.compiles
@pytest.mark.skipif(not has_compiler(), reason="no C compiler for the stub of the CUDA runtime")
def test_launches_are_as_planned(tmp_path: Path) -> None:
    others = [Request("sm_90", 1, 2, 1, 300, 300, t["head_dim"], family="sm90", tile=t) for t in TILES]
    answers = capture(REQUESTS + others, tmp_path)
    for number, (request, answer) in enumerate(zip(REQUESTS, answers), start=1):
        the_plan = request.plan()
        tile = the_plan.tile
        tiles = len(range(0, request.seqlen_q, tile.tile_m)) * request.heads * request.batch
        # 5 heads of 20 rows in one tile.
        tiles = 10 * 17 if request.is_packed else tiles
        assert answer.launches == number
        assert answer.grid == (min(tiles, 132) if request.family == "sm90" else tiles, 1, 1)
        assert answer.block == (tile.num_threads, 1, 1)
        # The DSL does not diagnose an overflow of shared memory: what it asks for must be what the tile says.
        assert answer.smem_bytes == tile.smem_bytes <= the_plan.arch.smem_per_block
    for fields, answer in zip(TILES, answers[len(REQUESTS) :], strict=True):
        assert FwdTileSm90(**fields).smem_bytes == answer.smem_bytes


@pytest.mark.compiles
@pytest.mark.parametrize("band", [FULL, CAUSAL, WINDOW], ids=MASKS.get)
@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "added"])
@pytest.mark.parametrize(
    "row",
    [row for row in SM90_BWD if isinstance(row, BwdTileSm90)],
    ids=lambda row: f"d{row.head_dim}-{row.tile_m}x{row.tile_n}",
)
def test_hopper_backward_keeps_everything_in_registers(
    row: BwdTileSm90, deterministic: bool, band: Band
) -> None:
    dtype = "float16" if band == CAUSAL else "bfloat16"
    problem = Problem(2, 8, 4, 1000, 1000, row.head_dim, dtype, band)
    the_plan = bwd_plan(problem, ARCHS["sm_90"], deterministic)
    assert the_plan.is_ordered == deterministic
    assert the_plan.tile is row
    found = kernel_resources(the_plan.main)
    assert found.symbol.startswith(f"cute_flash_bwd_sm90_d{row.head_dim}_{dtype}_")
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= 227 << 10
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    # K Qᵀ and V dOᵀ of the first, of the second and of further blocks; dV and dK of those before, and of the
    # last; dQ of two blocks before, and of the last two.
    s, dkv = row.head_dim // 16, row.tile_m // 16
    dq = row.dq_part[0] // 64 * (row.tile_n // 16)
    assert found.num_mma == 3 * (2 * s + 2 * dkv + dq)


@pytest.mark.compiles
@pytest.mark.parametrize(("head_dim", "dtype"), [(256, "bfloat16"), (136, "float16")])
@pytest.mark.parametrize("band", [FULL, WINDOW], ids=MASKS.get)
def test_wide_hopper_backward_keeps_everything_in_registers(head_dim: int, dtype: str, band: Band) -> None:
    the_plan = bwd_plan(Problem(2, 8, 4, 1000, 1000, head_dim, dtype, band), ARCHS["sm_90"])
    row = the_plan.tile
    assert isinstance(row, BwdTileSm90Wide) and row in SM90_BWD
    found = kernel_resources(the_plan.main)
    assert found.symbol.startswith(f"cute_flash_bwd_sm90_wide_d{head_dim}_{dtype}_")
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    # Q Kᵀ and dO Vᵀ of the first and of further blocks; dV, dK and dQ of the block before, and of the last.
    s, dkv, dq = row.head_dim // 16, 2 * (row.tile_m // 16), 2 * (row.tile_n // 16)
    assert found.num_mma == 2 * (2 * s + 2 * dkv + dq)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("target", "head_dim"),
    [*itertools.product(("sm_80", "sm_90"), (64, 96, 128, 192, 256)), ("sm_86", 128), ("sm_86", 256)],
)
def test_backward_keeps_everything_in_registers(target: str, head_dim: int) -> None:
    band, dtype = (CAUSAL, "bfloat16") if head_dim % 128 else (WINDOW, "float16")
    with use_kernels("sm80"):
        the_plan = bwd_plan(Problem(2, 8, 4, 1000, 1000, head_dim, dtype, band), ARCHS[target])
    assert isinstance(the_plan.tile, BwdTileSm80) and the_plan.tile in SM80_BWD[target]
    found = kernel_resources(the_plan.main)
    assert found.target == target and found.symbol.startswith(f"cute_flash_bwd_sm80_d{head_dim}_{dtype}_")
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    assert the_plan.tile.accumulator_registers < found.registers <= 255
    assert found.smem_bytes <= the_plan.arch.smem_per_block
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    assert found.sass["HGMMA"] == 0 and found.sass["HMMA"] > 0 and found.sass["LDGSTS"] > 0
