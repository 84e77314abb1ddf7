"""The model of the two loop orders against the loops of the reference, which count their bytes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from cute_flash.spec.arch import GPUS, SM_80, SM_90
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from cute_flash.tools.cli import main
from layouts.studies import loop_order
from layouts.studies.loops import tiled_kv_outer, tiled_q_outer
from tests.cases import Case, make_inputs

# B, H, Hkv, Sq, Sk, D
LARGE = Problem(1, 16, 16, 4096, 4096, 64, "bfloat16")


@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(20, 3), Band(0, None)], ids=str)
@pytest.mark.parametrize(("sq", "sk"), [(48, 80), (80, 48), (64, 64), (50, 75)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_and_steps_are_those_of_the_loops(band: Band, sq: int, sk: int, dtype: torch.dtype) -> None:
    case, Br, Bc = Case(2, 4, 2, sq, sk, 8, band), 16, 24
    inputs = make_inputs(case, dtype)
    problem = Problem(2, 4, 2, sq, sk, 8, str(dtype).removeprefix("torch."), band)
    models = loop_order.compare(problem, SM_80, Br, Bc)
    for model, loop in zip(models, (tiled_q_outer, tiled_kv_outer), strict=True):
        _, _, traffic = loop(*inputs, band, None, Br, Bc)
        assert (model.read_bytes, model.write_bytes) == (traffic.read_bytes, traffic.write_bytes)
        assert model.steps == traffic.blocks_visited
        assert traffic.rescales <= model.max_rescales


@pytest.mark.parametrize("block", [16, 64])
def test_rescales_of_random_scores_are_near_the_mean(block: int) -> None:
    case = Case(4, 4, 4, 256, 1024, 16, Band())
    problem = Problem(4, 4, 4, 256, 1024, 16, "float32")
    for model, loop in zip(loop_order.compare(problem, SM_80, 64, block), (tiled_q_outer, tiled_kv_outer), strict=True):
        _, _, traffic = loop(*make_inputs(case, torch.float32), Band(), None, 64, block)
        assert traffic.rescales == pytest.approx(model.mean_rescales, rel=0.05)
        assert model.max_rescales == 4 * 4 * 256 * (1024 // block - 1)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("head_dim", loop_order.HEAD_DIMS)
def test_k_v_outer_moves_more_and_takes_longer(gpu: str, head_dim: int) -> None:
    for length in loop_order.LENGTHS:
        problem = replace(LARGE, seqlen_q=length, seqlen_k=length, head_dim=head_dim)
        q_outer, kv_outer = loop_order.compare(problem, GPUS[gpu])
        assert q_outer.bytes < kv_outer.bytes and q_outer.max_rescales == kv_outer.max_rescales
        assert all(kv_outer.seconds(with_l2) > q_outer.seconds(with_l2) for with_l2 in (False, True))


def test_the_tile_is_that_of_the_kernel() -> None:
    assert loop_order.default_tile(LARGE, SM_90) == (192, 128)
    assert loop_order.default_tile(LARGE, SM_80) == (128, 64)
    (order, _) = loop_order.compare(LARGE, SM_80, Br=32)
    assert (order.Br, order.Bc) == (32, 64)


def test_time_is_that_of_the_slowest_unit() -> None:
    q_outer, kv_outer = loop_order.compare(LARGE, SM_80, 128, 64)
    assert kv_outer.write_bytes // q_outer.write_bytes == 65  # the example of `compare`
    # 124 FLOP/B is left of the ridge of 156: by the papers' count the memory decides, with L2 the tensor cores.
    assert q_outer.bound(with_l2=False) == "hbm" and q_outer.bound(with_l2=True) == "tensor"
    assert q_outer.unit_seconds["tensor"] == pytest.approx(4 * 16 * 4096 * 4096 * 64 / 312e12)
    assert q_outer.seconds(False) == pytest.approx(q_outer.bytes / 2e12)
    # 16 heads keep 16 of 108 SMs busy.
    assert kv_outer.busy_sms == 16 and q_outer.busy_sms == 108
    assert kv_outer.unit_seconds["tensor"] == pytest.approx(q_outer.unit_seconds["tensor"] * 108 / 16)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("loops --gpu A100 --seqlen 4096 --head-dim 64".split()) == 0
    said = capsys.readouterr().out
    assert "Q outer (FlashAttention-2)" in said and "K/V outer (FlashAttention)" in said and "A100" in said
    assert "K/V outer moves" in said
    assert main("loops --seqlen 512,1024 --head-dim 64,128 --json".split()) == 0
    entries = json.loads(capsys.readouterr().out)
    assert len(entries) == 8 and {entry["order"] for entry in entries} == set(loop_order.ORDERS)
    assert main("loops --markdown --causal".split()) == 0
    assert capsys.readouterr().out.count("\n") == 3


@pytest.mark.parametrize("wrong", ["--tile 64", "--tile 0x64", "--seqlen 0", "--seqlen 1k"])
def test_wrong_options(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["loops", *wrong.split()])
    assert wrong.split()[1] in capsys.readouterr().err


@pytest.mark.parametrize(("wrong", "message"), [("--gpu V100", "V100"), ("--batch 0", "batch=0")])
def test_wrong_values(wrong: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loops", *wrong.split()]) == 2
    assert message in capsys.readouterr().err
