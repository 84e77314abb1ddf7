"""Compile gates: kernels keep everything in registers, use the tensor cores, and fit an SM.

The gates cover the sample of the cubin lock (`tests.lock`) and the kernels nearest to the limits, where their sources
changed (`tests.lock.sources`). `make lock` compiles every kernel of the lock, and lists those that spill.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit.resources import Resources, nvdisasm
from cute_flash.planning.merge import MAX_PARTIALS, merge_key
from cute_flash.planning.plan import Plan
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90, FwdTileSm90Wide
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import ceil_div
from tests.jit.gates import kernel_resources
from tests.lock.cases import AMPERE, HOPPER, bwd, cases, compile_key, fwd, plan_of
from tests.lock.decode_cases import case as decode_case
from tests.lock.sample import SAMPLE

CASES = {case.name: case for case in cases()}

# The cases most likely to spill: rows of the tile tables whose earlier versions spilled, the mask and the feature that
# need the most registers in a row, and pairs of features that change how ptxas schedules.
RISKY = (
    "fwd/sm90/sm_90/d64/bf16/causal/k512/main",
    "fwd/sm90/sm_90/d128/bf16/window/plain/main",
    "fwd/sm90/sm_90/d256/bf16/window/plain/main",
    "fwd/sm90/sm_90/d96/bf16/window/plain/main",
    "fwd/sm90/sm_90/d64v128/bf16/window/plain/main",
    "fwd/sm90/sm_90/d192v128/bf16/full/plain/main",
    "fwd/sm90/sm_90/d128/bf16/causal/softcap/main",
    "fwd/sm90/sm_90/d128/bf16/full/dropout/main",
    "fwd/sm90/sm_90/d256/bf16/causal/softcap/main",
    "fwd/sm90/sm_90/d256/bf16/full/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d128/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d64/bf16/full/score_mod-gated+mask_mod-by_head/main",
    "fwd/sm90/sm_90/d128/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    "fwd/sm90/sm_90/d288/bf16/window/plain/main",
    "fwd/sm90/sm_90/d320/bf16/window/plain/main",
    "fwd/sm90/sm_90/d320/bf16/causal/out_dtype/main",
    "fwd/sm90/sm_90/d320/bf16/window/varlen+softcap+alibi+sinks+max_logit/main",
    "fwd/sm90/sm_90/d320/bf16/window/varlen+alibi+mask_mod-hashed/main",
    "fwd/sm90/sm_90/d512/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d576v512/bf16/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm90/sm_90/d512/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    "fwd/sm80/sm_80/d64/bf16/window/plain/main",
    "fwd/sm80/sm_80/d256/bf16/window/plain/main",
    "fwd/sm80/sm_90/d128/bf16/causal/plain/main",
    "fwd/sm80/sm_90/d256/bf16/window/plain/main",
    # Warps share rows: the most registers for O and Q, and all features.
    "fwd/sm80/sm_80/d512/bf16/window/plain/main",
    "fwd/sm80/sm_86/d384/bf16/window/plain/main",
    "fwd/sm80/sm_86/d512/bf16/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_90/d448/bf16/window/varlen+alibi/main",
    "fwd/sm80/sm_90/d512/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_90/d512/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    "fwd/sm80/sm_80/d128/bf16/chunk/plain/main",
    "fwd/sm80/sm_80/d128/bf16/window/varlen+softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_86/d192/bf16/full/score_mod-capped+mask_mod-prefix+bias-fp16-bhqk-pairs/main",
    "bwd/sm90/sm_90/d64/bf16/window/plain/main",
    "bwd/sm90/sm_90/d256/bf16/window/plain/main",
    "bwd/sm90/sm_90/d128/bf16/window/varlen+deterministic/main",
    "bwd/sm90/sm_90/d256/bf16/causal/softcap/main",
    "bwd/sm90/sm_90/d256/bf16/causal/alibi/main",
    "bwd/sm90/sm_90/d256/bf16/window/alibi+dropout/main",
    "bwd/sm90/sm_90/d256/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm90/sm_90/d256/bf16/causal/varlen+softcap+alibi+dropout+deterministic/main",
    "bwd/sm90/sm_90/d192/bf16/window/varlen+deterministic/main",
    "bwd/sm90/sm_90/d128/bf16/chunk/varlen+deterministic/main",
    "bwd/sm90/sm_90/d256/bf16/chunk/deterministic/main",
    "bwd/sm90/sm_90/d512/bf16/window/plain/main",
    "bwd/sm90/sm_90/d512/bf16/window/softcap+alibi/main",
    "bwd/sm90/sm_90/d512/bf16/full/alibi+dropout/main",
    "bwd/sm90/sm_90/d320/bf16/window/softcap+alibi/main",
    "bwd/sm90/sm_90/d320/bf16/full/alibi+dropout/main",
    "bwd/sm90/sm_90/d320/bf16/window/varlen+deterministic/main",
    "bwd/sm90/sm_90/d384/bf16/window/softcap+alibi/main",
    "bwd/sm90/sm_90/d384/bf16/full/alibi+dropout/main",
    "bwd/sm90/sm_90/d384/bf16/window/varlen+deterministic/main",
    # Compiled with dropout, without which it spills more.
    "bwd/sm90/sm_90/d128/bf16/causal/varlen+softcap+alibi/main",
    "bwd/sm90/sm_90/d128/bf16/window/softcap+alibi+dropout/main",
    "bwd/sm90/sm_90/d128/bf16/causal/softcap+alibi+dropout+deterministic/main",
    "bwd/sm90/sm_90/d64/bf16/full/mask_mod-document+block_map/main",
    "bwd/sm90/sm_90/d128/bf16/causal/bias-bf16-hqk-pairs/main",
    "bwd/sm90/sm_90/d128/bf16/causal/varlen+score_mod-relative+table_gradients/main",
    "bwd/sm90/sm_90/d128/bf16/causal/mask_mod-document+block_map+deterministic/main",
    "bwd/sm80/sm_80/d96/bf16/window/plain/main",
    "bwd/sm80/sm_80/d96/bf16/chunk/plain/main",
    "bwd/sm80/sm_80/d128/bf16/window/plain/main",
    "bwd/sm80/sm_80/d192/bf16/causal/plain/main",
    "bwd/sm80/sm_90/d256/bf16/window/softcap+alibi+dropout/main",
    # The large tile would spill.
    "bwd/sm80/sm_80/d128/bf16/window/varlen+deterministic/main",
    "bwd/sm80/sm_80/d128/bf16/full/deterministic/main",
    "bwd/sm80/sm_80/d64/bf16/causal/deterministic/main",
    "bwd/sm80/sm_86/d192/bf16/left/deterministic/main",
    "bwd/sm80/sm_90/d256/bf16/causal/deterministic/main",
    "bwd/sm80/sm_80/d128/bf16/window/score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    # Wide heads: the rows with the most registers, and those with features.
    "bwd/sm80/sm_80/d320/fp16/chunk/plain/main",
    "bwd/sm80/sm_80/d384/bf16/window/plain/main",
    "bwd/sm80/sm_90/d384/bf16/window/plain/main",
    "bwd/sm80/sm_80/d512/bf16/window/varlen+softcap+alibi+dropout+deterministic/main",
    "bwd/sm80/sm_90/d512/bf16/window/softcap+alibi+dropout+score_mod-alibi+mask_mod-window+bias-bf16-bhqk-pairs/main",
    "bwd/sm80/sm_86/d512/bf16/window/varlen+softcap+alibi+dropout+deterministic/main",
    "bwd/sm80/sm_86/d512/bf16/causal/score_mod-relative+table_gradients+deterministic/main",
    # fp32: the rows with every feature; `make lock` compiles the others.
    "fwd/sm80/sm_80/d64/fp32/window/softcap+alibi+sinks+dropout+max_logit/main",
    "fwd/sm80/sm_80/d128/fp32/window/softcap+alibi+sinks+dropout+max_logit/main",
    "bwd/sm80/sm_80/d64/fp32/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_80/d128/fp32/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_80/d128/fp32/window/varlen+deterministic/main",
    "fwd/sm80/sm_80/d128/fp32/causal/score_mod-relative/main",
    "bwd/sm80/sm_86/d128/fp32/window/softcap+alibi+dropout/main",
    "bwd/sm80/sm_90/d128/fp32/window/softcap+alibi+dropout/main",
    "fwd/sm80/sm_90/d64/fp32/window/softcap+alibi+sinks+dropout+max_logit/main",
)
# Decode kernels: tiles of 32 rows, the widest heads, lookups of pages by row, and all score features.
RISKY_DECODE = {
    case.name: case
    for case in (
        decode_case(("sm90", "sm_90"), 128, "page16"),
        decode_case(("sm90", "sm_90"), 256),
        decode_case(("sm90", "sm_90"), 128, "rows32"),
        decode_case(("sm90", "sm_90"), 128, "rows32", "fp8", "softcap", "alibi", "sinks", mask="window"),
        decode_case(("sm80", "sm_80"), 128, "page16", "append", "rotary_halves"),
        decode_case(("sm80", "sm_80"), 128, "rows32"),
        decode_case(("sm80", "sm_80"), 128, "page16", "append", "rotary_halves", mask="chunk"),
        decode_case(("sm80", "sm_86"), 128, "rows32", "fp8", "page1", "softcap", "alibi", "sinks", mask="window"),
        decode_case(("sm80", "sm_86"), 128, "softcap", "alibi", "sinks", mask="window"),
        decode_case(("sm90", "sm_90"), 512, "page16", "append", "rotary_halves", mask="chunk"),
        decode_case(("sm80", "sm_80"), 512, "fp8", "page1", "softcap", "alibi", "sinks", mask="window"),
        decode_case(("sm80", "sm_89"), 512, "page1", "softcap", "alibi", "sinks", mask="window"),
    )
}
# Decode of a latent cache by wgmma: the most features of the scores warpgroup, and of the producer.
WGMMA_DECODE = {
    case.name: case
    for case in (
        decode_case(("sm90", "sm_90"), 576, "rows32", value_dim=512),
        decode_case(
            ("sm90", "sm_90"), 576, "rows32", "page1", "softcap", "alibi", "sinks", mask="chunk", value_dim=512
        ),
        decode_case(("sm90", "sm_90"), 576, "rows32", "page1", "append", "ragged", mask="window", value_dim=512),
        decode_case(("sm90", "sm_90"), 320, "rows32", "page16", dtype="fp16", value_dim=256),
    )
}
# Bytes that kernels are known to spill: stores and loads together. They must not become more.
SPILLS = {
    "fwd/sm80/sm_90/d128/bf16/causal/plain/main": 104,
    "bwd/sm90/sm_90/d128/bf16/causal/varlen+softcap+alibi/main": 40,
    "bwd/sm90/sm_90/d128/bf16/causal/bias-bf16-hqk-pairs/main": 64,
    "bwd/sm90/sm_90/d256/bf16/window/softcap+alibi+dropout/main": 44,
    "bwd/sm90/sm_90/d256/bf16/causal/varlen+softcap+alibi+dropout+deterministic/main": 8,
    "bwd/sm90/sm_90/d256/bf16/chunk/deterministic/main": 32,
}


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.parametrize("name", [name for name in (*SAMPLE, *RISKY) if not name.startswith("decode/")])
def test_a_kernel_keeps_everything_in_registers(name: str) -> None:
    plan, key = plan_of(CASES[name]), compile_key(CASES[name])
    found = kernel_resources(key)
    assert found.target == key.target
    # The name that profilers show.
    assert found.symbol.startswith("cute_flash_") and "cutlass" not in found.symbol
    assert found.spill_bytes <= SPILLS.get(name, 0)
    assert found.stack_bytes == 0 or found.spill_bytes
    # Serialised wgmma waits after every instruction. An ignored setmaxnreg leaves the accumulators no room.
    assert found.serialised_wgmma == ()
    assert found.smem_bytes <= plan.arch.smem_per_cta
    assert found.registers <= 255
    if key != plan.main:
        return
    kernel = key.kernel.removesuffix("_fp32")  # the symbol has the dtype after the head dim
    assert found.symbol.startswith(f"cute_flash_{kernel}_d{key.static.widths}_{key.static.dtype}_")
    assert all(f"_{tag}" in found.symbol for tag in key.static.tags)
    if isinstance(plan.tile, FwdTileSm90 | FwdTileSm90Wide):
        check_setmaxnreg(found, plan.tile)
    elif isinstance(plan.tile, (FwdTileSm80, BwdTileSm80)):
        check_registers(found, plan)
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    CHECKS[type(plan.tile)](found, plan)
    # A load or store of local memory is also a spill.
    assert found.spill_bytes or found.sass["LDL"] == found.sass["STL"] == 0


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.parametrize("name", RISKY_DECODE)
def test_a_decode_kernel_keeps_everything_in_registers(name: str) -> None:
    case = RISKY_DECODE[name]
    key, arch = compile_key(case), ARCHS[case.arch]
    found = kernel_resources(key)
    assert found.symbol.startswith(f"cute_flash_decode_d{case.head_dim}_{key.static.dtype}_")
    assert all(f"_{tag}" in found.symbol for tag in key.static.tags)
    assert found.spill_bytes == found.stack_bytes == 0
    assert found.smem_bytes <= min(key.tile.smem_bytes, arch.smem_per_cta)
    # As many CTAs on an SM as the plan counts.
    per_cta = key.tile.num_warps * ceil_div(32 * found.registers, 256) * 256
    assert min(key.tile.ctas_per_sm(arch), 4) * per_cta <= arch.registers_per_sm
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    assert found.sass["HMMA"] > 0 and found.sass["HGMMA"] == 0
    assert found.sass["LDGSTS"] > 0 and found.sass["MUFU"] > 0
    assert found.sass["LDL"] == found.sass["STL"] == 0


@pytest.mark.compiles
@pytest.mark.kernels
@pytest.mark.parametrize("name", WGMMA_DECODE)
def test_decode_by_wgmma_keeps_everything_in_registers(name: str) -> None:
    case = WGMMA_DECODE[name]
    key, arch = compile_key(case), ARCHS[case.arch]
    found, tile = kernel_resources(key), key.tile
    assert found.symbol.startswith(f"cute_flash_decode_latent_sm90_d{case.head_dim}v{case.value_dim}_")
    assert found.spill_bytes == found.stack_bytes == 0 and found.serialised_wgmma == ()
    assert found.smem_bytes == tile.smem_bytes <= arch.smem_per_cta
    # The warpgroups take no more registers than they have at launch.
    producer, scores, output = tile.registers
    assert found.setmaxnreg == tuple(sorted({producer, scores, output}))
    assert producer + scores + 2 * output <= tile.num_threads // 128 * found.registers
    assert tile.num_threads * found.registers <= arch.registers_per_sm
    if nvdisasm() is None:
        pytest.skip("no disassembler: the instructions were not counted")
    # One loop over the blocks of a split: Q Kᵀ, and P V in parts of 128 columns.
    assert found.sass["HGMMA"] == tile.head_dim // 16 + tile.tile_n // 16 * tile.columns // 128
    assert found.sass["HMMA"] == found.sass["LDL"] == found.sass["STL"] == 0
    assert found.sass["LDGSTS"] > 0 and found.sass["STSM"] > 0


# Mods that compare int64 per score, whose rows and keys take twice the registers.
INT64 = {
    case.name: case
    for case in (
        fwd(HOPPER, 128, mask="window", mask_mod="hashed"),
        fwd(HOPPER, 64, mask="full", score_mod="same_document"),
        fwd(AMPERE, 128, mask="full", mask_mod="hashed", dtype="fp32"),
        bwd(HOPPER, 128, mask="causal", mask_mod="hashed_causal", block_map=True),
        bwd(AMPERE, 128, mask="window", score_mod="same_document", has_table_gradients=True),
    )
}


@pytest.mark.compiles
@pytest.mark.kernels("fwd_sm80", "fwd_sm90", "bwd_sm80", "bwd_sm90")
@pytest.mark.parametrize("name", INT64)
def test_mods_with_int64_keep_everything_in_registers(name: str) -> None:
    found = kernel_resources(compile_key(INT64[name]))
    assert found.spill_bytes == found.stack_bytes == 0 and found.serialised_wgmma == ()


@pytest.mark.compiles
@pytest.mark.kernels("merge_partials")
@pytest.mark.parametrize(("arch", "dtype", "width"), [("sm_80", "bfloat16", 128), ("sm_90", "float32", 256)])
def test_a_merge_keeps_everything_in_registers(arch: str, dtype: str, width: int) -> None:
    found = kernel_resources(merge_key(dtype, width, MAX_PARTIALS, ARCHS[arch]))
    assert found.symbol.startswith(f"cute_flash_merge_{MAX_PARTIALS}_d{width}_{dtype}")
    assert found.spill_bytes == found.stack_bytes == found.smem_bytes == 0
    # At least two CTAs per SM.
    assert 256 * found.registers <= ARCHS[arch].registers_per_sm // 2


# ---- registers


def check_registers(found: Resources, plan: Plan) -> None:
    assert plan.tile.accumulator_registers < found.registers
    # A warp gets registers in units of 256; all registers of a CTA must fit in an SM.
    per_cta = plan.tile.num_warps * ceil_div(32 * found.registers, 256) * 256
    assert per_cta <= plan.arch.registers_per_sm


def check_setmaxnreg(found: Resources, tile: FwdTileSm90 | FwdTileSm90Wide) -> None:
    """Warpgroups take no more registers than others release; otherwise they would wait forever."""
    *for_others, for_mma = found.setmaxnreg
    assert len(for_others) == 1 + tile.dropout_producer
    # The operands that the instruction accepts.
    assert all(24 <= count <= 256 and count % 8 == 0 for count in found.setmaxnreg)
    # A thread gets registers in units of 8.
    at_launch = ceil_div(found.registers, 8) * 8
    assert sum(for_others) + tile.num_warpgroups * for_mma <= tile.num_threads // 128 * at_launch
    assert tile.num_threads * at_launch <= ARCHS["sm_90"].registers_per_sm
    assert tile.accumulator_registers < for_mma


# ---- instructions


def check_fwd_sm80(found: Resources, plan: Plan) -> None:
    tile = plan.tile
    # One m16n8k16 of each warp per 16 x 8 x 16 of Q Kᵀ and of P V, in each copy of the main loop's body.
    of_body = 2 * tile.tile_m * tile.tile_n * tile.head_dim // (16 * 8 * 16 * tile.num_warps)
    # fp32: three MMAs per product of pieces.
    of_body *= 3 if plan.problem.static.is_fp32 else 1
    bodies, rest = divmod(found.sass["HMMA"], of_body)
    assert bodies >= 2, "masked and full blocks"
    assert rest == 0
    assert found.sass["HGMMA"] == 0
    # cp.async loads K and V, and ldmatrix reads them; exp2 is a MUFU instruction.
    assert all(found.sass[name] > 0 for name in ("LDGSTS", "LDSM", "MUFU"))


def check_fwd_sm90(found: Resources, plan: Plan) -> None:
    tile, static = plan.tile, plan.problem.static
    # A wgmma has 64 rows and k = 16: 16 columns of Q and K, or 16 keys of P and V.
    qk, pv = tile.head_dim // 16, tile.tile_n // 16 * (tile.width_v // tile.columns_pv)
    bodies, rest = divmod(found.sass["HGMMA"], qk + pv)
    assert rest == 0
    # Q Kᵀ of a tile's first block and P V of its last block; with two stages of Q, also both overlapped.
    ends = 1 + (tile.q_stages > 1)
    if not static.has_mods:
        # Every copy of the loop body has Q Kᵀ of a block and P V of the previous block. With ALiBi or softcap there is
        # one copy, which tests for every block whether it is masked.
        has_one = "alibi" in static.features or "softcap" in static.features
        assert bodies - ends == (1 if has_one else 1 + static.has_left + static.has_right)
    # TMA loads Q, K and V; exp2 is a MUFU instruction.
    assert all(found.sass[name] > 0 for name in ("UTMALDG", "MUFU", "USETMAXREG"))
    if not static.varlen:
        # With two stages of Q, TMA stores the output from the stage of Q.
        assert all((found.sass[name] > 0) == (tile.q_stages > 1) for name in ("UTMASTG", "STSM"))
    assert all(found.sass[name] == 0 for name in ("HMMA", "LDGSTS"))


def check_fwd_sm90_wide(found: Resources, plan: Plan) -> None:
    tile = plan.tile
    # Q Kᵀ of the first block of a tile and of further blocks; P V of the block before, and of the last.
    assert found.sass["HGMMA"] == 2 * (tile.head_dim // 16 + tile.tile_n // 16)
    assert all(found.sass[name] > 0 for name in ("UTMALDG", "MUFU", "USETMAXREG"))
    check_philox(found, plan, copies=1)


def check_bwd_sm80(found: Resources, plan: Plan) -> None:
    assert found.sass["HGMMA"] == 0 and found.sass["HMMA"] > 0 and found.sass["LDGSTS"] > 0
    # With a semaphore, one thread waits and one thread arrives, without TMA.
    for instruction in (r"ld\.acquire\.gpu", r"st\.release\.gpu"):
        assert len(re.findall(instruction, found.ptx)) == plan.main.static.deterministic
    assert "fence.proxy" not in found.ptx
    check_philox(found, plan, copies=1)


def check_bwd_sm90(found: Resources, plan: Plan) -> None:
    tile = plan.tile
    # The code has three copies of each product. K Qᵀ and V dOᵀ: for the first, the second and all later blocks. dV and
    # dK of the block before: beside the second block, beside later blocks, and after the last block. dQ of two blocks
    # before: beside later blocks, and twice after the last block.
    s, dkv = tile.head_dim // 16, tile.tile_m // 16
    dq = tile.dq_part[0] // 64 * (tile.tile_n // 16)
    assert found.sass["HGMMA"] == 3 * (2 * s + 2 * dkv + dq)
    check_philox(found, plan, copies=3)


def check_bwd_sm90_wide(found: Resources, plan: Plan) -> None:
    tile = plan.tile
    # Q Kᵀ and dO Vᵀ of the first and of further blocks; dV, dK and dQ of the block before, and of the last. Without a
    # cluster, dV and dK are computed transposed, in two products.
    s, dkv = tile.cta_head_dim // 16, (2 if tile.cluster == 1 else 1) * (tile.tile_m // 16)
    dq = tile.dq_products * (tile.tile_n // 16)
    assert found.sass["HGMMA"] == 2 * (2 * s + 2 * dkv + dq)
    # Partial sums of S and dP for the other CTA of a cluster, 16 bytes at a time.
    sent = (tile.cluster > 1) * 2 * (tile.tile_m * tile.tile_n // 256 // 4)
    assert found.sass["STAS"] == 2 * sent
    check_philox(found, plan, copies=2)


def check_philox(found: Resources, plan: Plan, copies: int) -> None:
    """Every copy of the loop has at least one Philox call: seven rounds of two products, and four products of words."""
    if "dropout" in plan.main.static.features:
        assert found.sass["IMAD"] >= 18 * copies


CHECKS = {
    FwdTileSm80: check_fwd_sm80,
    FwdTileSm90: check_fwd_sm90,
    FwdTileSm90Wide: check_fwd_sm90_wide,
    BwdTileSm80: check_bwd_sm80,
    BwdTileSm90: check_bwd_sm90,
    BwdTileSm90Wide: check_bwd_sm90_wide,
}


def test_no_kernel_of_fp32_on_sm_80_may_spill() -> None:
    assert not [name for name in SPILLS if "/sm_80/" in name and "/fp32/" in name]


# ---- the list of gates


def test_gates_are_different_kernels_of_every_kind() -> None:
    keys = [compile_key(CASES[name]) for name in (*SAMPLE, *RISKY)]
    assert len(set(keys)) == len(keys)
    assert {type(key.tile) for key in keys} >= set(CHECKS)
    assert set(SPILLS) <= set(RISKY)
