"""The arithmetic of the roofline against brute force, the loop orders' byte counters and worked examples."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import ARCHS, SM_80, SM_90, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from layouts.studies.loops import tiled_q_outer
from tests.cases import Case, make_inputs

# B, H, Hkv, Sq, Sk, D
LARGE = Problem(2, 16, 4, 4096, 4096, 128, "bfloat16")


def test_visible_pairs_are_exact() -> None:
    sides = (None, 0, 1, 3, 20)
    for sq, sk, left, right, chunk in itertools.product(range(9), range(9), sides, sides, (None, 1, 4, 20)):
        pairs = [(i + sk - sq, j) for i in range(sq) for j in range(sk)]
        expected = sum(
            (left is None or j >= own - left)
            and (right is None or j <= own + right)
            and (chunk is None or own // chunk == j // chunk)
            for own, j in pairs
        )
        problem = Problem(1, 1, 1, sq, sk, 8, band=Band(left, right, chunk))
        assert roofline.visible_pairs(problem) == expected, problem


def test_flops_of_worked_examples() -> None:
    every_pair = 4 * 2 * 16 * 4096 * 4096 * 128
    assert roofline.flops(LARGE) == roofline.flops_nominal(LARGE) == every_pair
    causal = replace(LARGE, band=Band(None, 0))
    # The diagonal belongs to the triangle: a little more than half.
    assert roofline.flops(causal) == 4 * 2 * 16 * 128 * (4096 * 4097 // 2)
    assert roofline.flops_nominal(causal) == every_pair // 2
    window = replace(LARGE, band=Band(0, 0))
    assert roofline.flops(window) == 4 * 2 * 16 * 128 * 4096
    # A right bound of 0 halves the count, whatever the left bound; other windows count every pair.
    for band in (Band(0, 0), Band(100, 0)):
        assert roofline.flops_nominal(replace(LARGE, band=band)) == every_pair // 2
    for band in (Band(0, None), Band(100, 5), Band(None, 5)):
        assert roofline.flops_nominal(replace(LARGE, band=band)) == every_pair
    assert roofline.exp_count(causal) == 2 * 16 * (4096 * 4097 // 2)


def test_least_and_unfused_bytes() -> None:
    tensors = 2 * (2 * 16 * 4096 * 128 + 2 * 4 * 4096 * 128) * 2
    lse = 2 * 16 * 4096 * 4
    assert roofline.hbm_bytes(LARGE) == tensors + lse
    # Twice Q, K, V and O, but the LSE once.
    assert roofline.hbm_bytes_backward(LARGE) == 2 * tensors + lse
    assert roofline.standard_bytes(LARGE) == tensors + 4 * 2 * 16 * 4096 * 4096 * 2


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(20, 3), Band(0, None)])
@pytest.mark.parametrize(("sq", "sk"), [(48, 80), (80, 48), (64, 64)])
def test_fa_bytes_are_what_the_loop_moves(band: Band, sq: int, sk: int) -> None:
    case = Case(2, 4, 2, sq, sk, 8, band)
    q, k, v = make_inputs(case, torch.float16)
    # Blocks of one key, so that the loop reads exactly the keys that a tile sees.
    _, _, traffic = tiled_q_outer(q, k, v, band, None, 16, 1)
    # The loop does not read Q tiles that see no key.
    unread = sum(band.hi(row + 15, sq, sk) == 0 for row in range(0, sq, 16)) * 2 * 4 * 16 * 8 * 2
    found = roofline.fa_bytes(case.problem(torch.float16), tile_m=16)
    assert found == traffic.read_bytes + traffic.write_bytes + unread


def test_max_rescales_bounds_what_the_loop_does() -> None:
    band, sq, sk = Band(100, 0), 96, 160
    # Ever growing scores rescale each row at each block that it visits after its first.
    q = torch.ones(1, 1, sq, 1, dtype=torch.float64)
    k = torch.arange(sk, dtype=torch.float64).view(1, 1, sk, 1)
    _, _, traffic = tiled_q_outer(q, k, k, band, 1.0, 1, 16)
    per_row = [(i + 64) // 16 - max(0, i + 64 - 100) // 16 for i in range(sq)]
    assert traffic.rescales == sum(per_row)
    assert roofline.max_rescales(Problem(1, 1, 1, sq, sk, 8, band=band), 1, 16) == max(per_row) == 7
    assert roofline.max_rescales(Problem(1, 1, 1, 0, 0, 8), 64, 64) == 0


def test_sram_formula() -> None:
    # 64 x 64 tiles of 64 halves: four of 8 KB, S of 8 KB, m and l of 256 B each.
    assert roofline.sram_bytes(64, 64, 64, 2) == 5 * 8192 + 512
    # 128 x 64 tiles of d = 128: Q and O 32 KB each, K, V and S 16 KB each, m and l 512 B each.
    assert roofline.sram_bytes(128, 64, 128, 2) == (2 * 32 + 3 * 16 + 1) * 1024


def test_long_sequences_are_bound_by_the_tensor_cores() -> None:
    found = roofline.roofline(LARGE, SM_80)
    assert found.bound == "tensor"
    assert found.seconds == found.unit_seconds["tensor"] == pytest.approx(roofline.flops(LARGE) / 312e12)
    assert found.attainable_tflops == pytest.approx(312.0)
    assert found.intensity == pytest.approx(roofline.flops(LARGE) / roofline.hbm_bytes(LARGE))


def test_fp32_takes_three_mmas_per_product_and_moves_pieces() -> None:
    half, single = (replace(LARGE, dtype=dtype) for dtype in ("bfloat16", "float32"))
    found, expected = roofline.roofline(single, SM_80), roofline.roofline(half, SM_80)
    assert found.flops == expected.flops and found.exps == expected.exps
    assert found.unit_seconds["tensor"] == pytest.approx(3 * expected.unit_seconds["tensor"])
    assert found.attainable_tflops == pytest.approx(312.0 / 3) and found.ridge == pytest.approx(SM_80.ridge / 3)
    assert any(line.endswith("at 104 TFLOP/s, 3 MMAs per product") for line in found.lines())
    tensors = 2 * (2 * 16 * 4096 * 128 + 2 * 4 * 4096 * 128) * 4
    assert roofline.hbm_bytes(single) == tensors + 2 * 16 * 4096 * 4
    # Q, K and V are read twice and written once as two fp16 pieces, which are read in their place.
    assert roofline.piece_bytes(single) == 3 * (2 * 16 * 4096 * 128 + 2 * 2 * 4 * 4096 * 128) * 4
    assert roofline.piece_bytes(half) == 0
    occupancy = occupancy_of(single, SM_80)
    seconds, tile = occupancy.unit_seconds, occupancy.plan.tile
    products = 4 * 128 * tile.tile_m * tile.tile_n * occupancy.busiest_sm_blocks
    assert seconds["tensor"] == pytest.approx(3 * products / (312e12 / 108))
    moved = roofline.hbm_bytes(single) + roofline.piece_bytes(single)
    assert seconds["memory"] == pytest.approx(moved / (SM_80.hbm_tbps * 1e12))


def test_small_head_dims_on_hopper_are_bound_by_exponentials() -> None:
    # 4 d FLOPs a pair at 989 TFLOP/s against one exp2 a pair at 16 x 132 x 1.83 G/s: equal at d = 64.
    found = roofline.roofline(replace(LARGE, head_dim=32), SM_90)
    assert found.bound == "exp2"
    assert found.unit_seconds["exp2"] == pytest.approx(roofline.exp_count(LARGE) / (16 * 132 * 1.83e9))
    assert found.unit_seconds["exp2"] / found.unit_seconds["tensor"] == pytest.approx(2.0, rel=0.01)
    assert found.attainable_tflops == pytest.approx(989 / 2.0, rel=0.01)


def test_decoding_is_bound_by_memory() -> None:
    decode = Problem(8, 32, 8, 1, 8192, 128)
    found = roofline.roofline(decode, SM_90)
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(roofline.hbm_bytes(decode) / 3.35e12)
    assert found.intensity < SM_90.ridge


def occupancy_of(problem: Problem, arch: ArchSpec) -> roofline.Occupancy:
    return roofline.Occupancy(plan_forward(problem, arch, can_pack_gqa=True))


def test_few_ctas_reach_a_part_of_the_gpu() -> None:
    keys, tile_m = 8192, 128
    found = occupancy_of(Problem(1, 4, 4, 1, keys, 128), SM_90)
    assert (found.busy_sms, found.used_rows) == (4, 1 / tile_m)
    seconds = found.unit_seconds
    # Each CTA computes a whole tile against all keys, with the units of one SM.
    assert seconds["tensor"] == pytest.approx(4 * 128 * tile_m * keys / (989e12 / 132))
    assert seconds["exp2"] == pytest.approx(tile_m * keys / (16 * 1.83e9))
    assert seconds["load"] == pytest.approx(2 * 128 * 2 * keys / (64 * 1.83e9))
    assert seconds["memory"] == roofline.roofline(found.plan.problem, SM_90).unit_seconds["memory"]
    assert found.seconds == max(seconds.values()) > 10 * roofline.roofline(found.plan.problem, SM_90).seconds
    # With as many heads as SMs, each SM has one tile; with one head more, an SM has two.
    assert found.busiest_sm_blocks == keys // 128
    assert occupancy_of(Problem(1, 132, 132, 1, keys, 128), SM_90).busiest_sm_blocks == keys // 128
    assert occupancy_of(Problem(1, 133, 133, 1, keys, 128), SM_90).busiest_sm_blocks == 2 * keys // 128


def test_pack_gqa_shares_the_reads_of_keys() -> None:
    problem = Problem(2, 32, 4, 3, 4096, 128, band=Band(1000, 0))
    found = occupancy_of(problem, SM_90)
    # 8 heads of 3 queries in each tile of 128 rows.
    assert found.plan.pack_gqa and found.busy_sms == 8 and found.used_rows == 24 / 128
    # The first query sees the keys from 4096 - 3 - 1000 on, which is in block 24 of 32.
    assert found.busiest_sm_blocks == 32 - 24
    rows = 32 * 3 + 4 * 1003
    assert roofline.fa_bytes(problem, 128, pack_gqa=True) == 2 * rows * 2 * 128 * 2 + 2 * 32 * 3 * 4


def test_the_longest_tile_bounds_the_time() -> None:
    # Causal: the four tiles of a head visit 1, 2, 3 and 4 blocks, each on its own SM.
    assert occupancy_of(Problem(1, 1, 1, 512, 512, 128, band=Band(None, 0)), SM_90).busiest_sm_blocks == 4


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(1000, 0)], ids=str)
def test_full_gpus_take_about_the_roofline(band: Band, arch: ArchSpec) -> None:
    problem = replace(LARGE, batch=8, band=band)
    found, least = occupancy_of(problem, arch), roofline.roofline(problem, arch)
    assert found.busy_sms == arch.num_sms and found.bound == least.bound
    # Blocks at the edge of the band are computed whole.
    assert least.seconds <= found.seconds <= (1.25 if band.left else 1.1) * least.seconds


def test_tile_adds_traffic_and_rescales() -> None:
    # Q and O once, K and V of each of the 16 heads 32 times.
    assert roofline.fa_bytes(LARGE, 128) == 2 * 16 * 4096 * 128 * 2 * (2 + 2 * 32) + 2 * 16 * 4096 * 4
    assert roofline.max_rescales(LARGE, 128, 64) == 4096 // 64 - 1


@pytest.mark.parametrize("shape", [(0, 4, 4, 8, 8, 16), (1, 4, 4, 0, 8, 16), (1, 4, 4, 8, 0, 16)])
def test_empty_problems_cost_no_work(shape: tuple[int, int, int, int, int, int]) -> None:
    problem = Problem(*shape, band=Band(3, 0))
    found = roofline.roofline(problem, SM_80)
    assert (found.flops, found.exps, roofline.max_rescales(problem, 64, 64)) == (0, 0, 0)
    assert found.attainable_tflops == 0.0
    assert len(found.lines()) == 7
