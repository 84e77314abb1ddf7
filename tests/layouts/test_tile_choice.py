"""The tiles that follow from the size of shared memory, beside the rows of the tile tables."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from cute_flash.planning.plan import plan_forward
from cute_flash.planning.tiles.common import SMEM_ALIGN
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, FwdTileSm90
from cute_flash.spec.arch import ARCHS, KIB, SM_80, SM_86, SM_90, ArchSpec
from cute_flash.spec.problem import Problem
from cute_flash.tools import roofline
from cute_flash.tools.cli import main
from layouts.studies import tile_choice
from layouts.studies.tile_choice import Candidate, Choice, best, candidates, largest_keys

HEAD_DIMS = (32, 64, 96, 128, 192, 256)


def problem(head_dim: int, dtype: str = "bfloat16") -> Problem:
    return Problem(1, 16, 16, 4096, 4096, head_dim, dtype)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tile_choice.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_candidates_fit(arch: ArchSpec, head_dim: int, element_bytes: int) -> None:
    found = candidates(arch, head_dim, element_bytes)
    assert found and found[0] == best(arch, head_dim, element_bytes)
    for one in found:
        assert one.smem_bytes <= arch.smem_per_cta and one.ctas_per_sm >= 1
        assert one.accumulator_registers <= one.max_registers
        assert one.ctas_per_sm * one.smem_bytes <= arch.smem_per_sm
        assert one.ctas_per_sm * one.num_threads <= arch.max_threads_per_sm


@pytest.mark.parametrize("arch", [SM_80, SM_86, SM_90], ids=lambda arch: arch.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [64, 128])
def test_rules_are_solved_for_the_most_keys(arch: ArchSpec, head_dim: int, rows: int) -> None:
    """The most keys fit each rule, and one key more does not."""
    M, keys = arch.smem_per_cta, largest_keys(arch, head_dim, 2, rows)
    num_warps = max(tile_choice.warp_counts(arch, rows))

    def tile(count: int, stages: int) -> Candidate:
        return Candidate(arch, head_dim, 2, rows, count, num_warps, stages)

    for rule, is_within in {
        "FA1": lambda Bc: 4 * rows * head_dim + 8 * Bc * head_dim <= M,
        "papers": lambda Bc: roofline.sram_bytes(rows, Bc, head_dim, 2) <= M,
        "kernel, 1 stage": lambda Bc: tile(Bc, 1).smem_bytes <= M,
        "kernel, 2 stages": lambda Bc: tile(Bc, 2).smem_bytes <= M,
        "registers": lambda Bc: tile(Bc, 1).accumulator_registers <= tile(Bc, 1).max_accumulator_registers,
    }.items():
        assert is_within(keys[rule]) or keys[rule] == 0, rule
        # Registers are whole numbers: a few keys more may share the last one.
        assert not is_within(keys[rule] + (8 if rule == "registers" else 1)), rule


def test_the_inequality_of_fa1() -> None:
    one = Candidate(SM_80, 64, 2, 128, 64, 4, 2)
    assert one.fa1_bytes == 4 * 128 * 64 + 8 * 64 * 64
    assert replace(one, element_bytes=4).fa1_bytes == 2 * one.fa1_bytes
    # Q and O once, K and V double-buffered: the shared memory of the kernel, and O.
    assert one.fa1_bytes == one.smem_bytes + 128 * 64 * 2


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_rows_of_the_tables_obey_the_rules(arch: ArchSpec) -> None:
    """Shared memory and accumulators of a row are those of the row's own class, and its candidate fits."""
    rows = [*SM80_FWD[arch.name]] + ([row for row in SM90_FWD if row.head_dim_v is None] if arch.has_wgmma else [])
    for row in rows:
        # The mma.sync kernels run on Hopper too, where they are planned as on Ampere.
        of = arch if isinstance(row, FwdTileSm90) else replace(arch, name="sm_80")
        one = Candidate.of_row(row, of, 2)
        assert one.fits, (row, one.complaints())
        assert 0 <= one.smem_bytes - row.smem_bytes < tile_choice.BARRIER_BYTES or (
            isinstance(row, FwdTileSm80) and 0 <= row.smem_bytes - one.smem_bytes < 2 * SMEM_ALIGN
        )
        assert one.accumulator_registers == row.accumulator_registers
        assert one.num_threads == row.num_threads


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_row_of_the_table_is_shown_with_reasons(arch: ArchSpec, head_dim: int) -> None:
    choice = Choice.of(problem(head_dim), arch)
    assert choice.row == plan_forward(problem(head_dim), arch).tile
    ours, chosen = choice.table_candidate, choice.chosen
    text = "\n".join(choice.lines())
    assert str(choice.row) in text and tile_choice.as_row(chosen) in text
    is_same = (ours.Br, ours.Bc, ours.num_warps, ours.stages) == (chosen.Br, chosen.Bc, chosen.num_warps, chosen.stages)
    if is_same:
        assert all("registers" in why or "evidence" in why for why in choice.why)
    else:
        assert choice.why and choice.why[-1].endswith(choice.row.measured)


def test_rows_are_python() -> None:
    for arch in ARCHS.values():
        for head_dim in HEAD_DIMS:
            one = best(arch, head_dim, 2)
            row = eval(tile_choice.as_row(one), {"FwdTileSm80": FwdTileSm80, "FwdTileSm90": FwdTileSm90})
            assert row.fits(arch) and Candidate.of_row(row, arch, 2) == one
    assert "no table" in tile_choice.as_row(best(SM_80, 64, 4))


def test_bytes_depend_on_the_rows_alone() -> None:
    one = Candidate(SM_80, 64, 2, 128, 64, 4, 2)
    assert (
        one.bytes(problem(64))
        == replace(one, Bc=32, stages=1).bytes(problem(64))
        == roofline.fa_bytes(problem(64), 128)
    )
    assert one.tile_intensity == 128.0 and replace(one, element_bytes=4).tile_intensity == 64.0
    assert one.intensity(problem(64)) < one.tile_intensity


def test_a_gpu_that_no_table_has(capsys) -> None:
    argv = ("--gpu", "X1", "--smem-kb", "64", "--sms", "40", "--threads", "1024", "--head-dim", "64")
    assert main(["tiles", *argv]) == 0
    said = capsys.readouterr().out
    assert "no row: the tables have no rows for X1" in said and "FwdTileSm80(64," in said
    arch = tile_choice.arch_of(arguments(*argv))
    assert (arch.smem_per_cta, arch.smem_per_sm, arch.num_sms) == (64 * KIB, 65 * KIB, 40)
    assert best(arch, 64, 2).smem_bytes <= 64 * KIB


def test_a_known_gpu_with_less_shared_memory() -> None:
    """The table's row is the first that still fits."""
    arch = tile_choice.arch_of(arguments("--gpu", "A100", "--smem-kb", "99", "--smem-sm-kb", "100"))
    choice = Choice.of(problem(128), arch)
    assert choice.row is not None and choice.row.smem_bytes <= 99 * KIB
    assert choice.chosen.smem_bytes <= 99 * KIB


def test_fp32_has_candidates() -> None:
    choice = Choice.of(problem(64, "float32"), SM_80)
    assert choice.chosen.element_bytes == 4
    assert choice.row is not None and choice.row.pieces == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--sms", "40"), "--smem-kb"),
        (("--gpu", "V100"), "V100"),
        (("--smem-kb", "2"), "no tile fits"),
        (("--smem-kb", "64", "--smem-sm-kb", "32"), "at least a CTA"),
        (("--seqlen", "0"), "positive"),
        (("--smem-kb", "64", "--sms", "0"), "sizes must be positive"),
        (("--smem-kb", "0"), "sizes must be positive"),
    ],
)
def test_wrong_values(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiles", *argv]) == 2
    assert message in capsys.readouterr().err


def test_json(capsys) -> None:
    assert main("tiles --gpu H100 --causal --json".split()) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["row"]["row"].startswith("FwdTileSm90(128, 128, 128") and data["candidates"] and data["differs"]
    band = data["problem"]["band"]
    assert (band["left"], band["right"], band["chunk"]) == (None, 0, None)
