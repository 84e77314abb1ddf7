"""Predictions for the tiles of the backward kernels, against SASS and against the counters that are checked in."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import plan_backward
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD, SM80_BWD_SCORE, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import SM90_BWD, SM90_BWD_SCORE, BwdTileSm90, BwdTileSm90Wide
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import ceil_div
from cute_flash.spec.problem import Problem
from layouts import Use, Work, predict
from layouts.backward import bwd_sm80_uses, bwd_sm90_uses, bwd_sm90_wide_uses
from profiling.counters.expect import expected
from profiling.counters.ncu_case import case_of
from profiling.counters.ncu_source import read_tables
from profiling.documents.sources import BY_INSTRUCTION, COUNTERS, read
from tests.jit.gates import kernel_resources

ONE = Work(row_tiles=1, key_blocks=1)
PTX = {"LDSM": "ldmatrix", "LDS": "ld.shared", "STSM": "stmatrix", "STS": "st.shared", "LDGSTS": "cp.async"}
SM80_ROWS = dict.fromkeys(row for table in (SM80_BWD, SM80_BWD_SCORE) for rows in table.values() for row in rows)


def uses_of(tile: Any) -> tuple[Use, ...]:
    if isinstance(tile, BwdTileSm80):
        return bwd_sm80_uses(tile)
    return bwd_sm90_uses(tile) if isinstance(tile, BwdTileSm90) else bwd_sm90_wide_uses(tile)


@pytest.mark.slow
@pytest.mark.parametrize("row", [*SM80_ROWS, *SM90_BWD, *SM90_BWD_SCORE], ids=str)
def test_the_tables_have_no_conflicts(row: Any) -> None:
    found = predict(uses_of(row), ONE)
    assert not any(count.conflicts for count in found.values())
    assert sum(count.instructions for count in found.values()) > 0


@cache
def cases() -> dict[str, Any]:
    return read(COUNTERS)["cases"]


BACKWARD = [name for name, case in cases().items() if case["kernel"].startswith("bwd")]


def test_every_backward_kernel_has_a_report() -> None:
    found = {(cases()[name]["kernel"], cases()[name]["shape"]["head_dim"]) for name in BACKWARD}
    assert found == {("bwd-sm80", 128), ("bwd-sm90", 128), ("bwd-sm90", 256)}


def skipped_loads(heads: int) -> int:
    """In the last tile of keys of a head, which has 32 of 96 keys, each warp skips one load of the epilogue."""
    return 8 * heads


@pytest.mark.parametrize("name", BACKWARD)
def test_loads_and_stores_are_those_of_the_reports(name: str) -> None:
    """`tests/profiling/test_reports.py` compares the counters of ldmatrix and cp.async."""
    case = cases()[name]
    kernel, shape, measured, predicted = (case[key] for key in ("kernel", "shape", "measured", "predicted_shared"))
    # Each persistent CTA also publishes and reads an end marker: 3 instructions of the writer, 9 of the readers.
    is_persistent = kernel == "bwd-sm90" and shape["head_dim"] == 128
    assert 0 <= measured["st_instructions"] - predicted["st.shared"]["instructions"] <= 2 * 132 * is_persistent
    loads = measured["ld_instructions"] - predicted["ld.shared"]["instructions"]
    # Before cp.async, ptxas puts three loads whose predicate is never true; the counter counts them. They occur in each
    # block of 128 queries, for each of 8 warps and for the statistics.
    heads = shape["batch"] * shape["heads"]
    ctas, blocks = heads * ceil_div(shape["seqlen"], 96), shape["seqlen"] // 128
    never_true = ctas * blocks * 3 * (8 + 1)
    assert loads == {"bwd-sm80": never_true - skipped_loads(heads)}.get(kernel, 9 * 132 * is_persistent)


def test_no_instruction_of_the_backward_kernels_conflicts() -> None:
    """For each instruction, measured wavefronts equal the ideal and the predicted number."""
    counted = read_tables(read(BY_INSTRUCTION))
    assert len(counted) == 3
    for case_id, opcodes in counted.items():
        assert all(count.wavefronts == count.ideal for count in opcodes.values())
        shared = expected(case_of(case_id), ARCHS["sm_90"]).shared
        predicted = {name: count.wavefronts for name, count in shared.items() if count.wavefronts}
        if "bwd-sm80" in case_id:
            predicted["ld.shared"] -= 4 * skipped_loads(heads=16)
        found = dict.fromkeys(predicted, 0)
        for opcode, count in opcodes.items():
            if count.wavefronts:
                found[PTX[opcode.partition(".")[0]]] += count.wavefronts
        # Persistent CTAs also read the end marker; a tile takes two wavefronts.
        assert found == pytest.approx(predicted, rel=0.003 if "sm90-swizzled-d128" in case_id else 0)


def test_plain_rows_of_256_bytes_meet_in_the_same_banks() -> None:
    """As in the forward: eight wavefronts instead of one down a column, and no more along a row."""
    (tile,) = (row for row in SM80_BWD["sm_80"] if row.head_dim == 128)
    for swizzled, plain in zip(bwd_sm80_uses(tile), bwd_sm80_uses(tile, "plain"), strict=True):
        goes_down = swizzled.instruction in ("ldmatrix", "st.shared")
        assert plain.once.wavefronts == (8 if goes_down else 1) * swizzled.once.wavefronts, swizzled.name


@pytest.mark.kernels("bwd_sm80", "bwd_sm90", "bwd_sm90_wide", "layouts")
@pytest.mark.compiles
@pytest.mark.skipif(nvdisasm() is None, reason="no nvdisasm")
@pytest.mark.parametrize(("family", "head_dim"), [("sm80", 128), ("sm90", 128), ("sm90", 256)])
def test_the_code_has_the_instructions_that_are_counted(family: str, head_dim: int) -> None:
    key = plan_backward(Problem(2, 8, 8, 2048, 2048, head_dim), ARCHS["sm_90"], family=family).main
    found = kernel_resources(key)
    per_warp = {
        (use.name, use.instruction): use.once.instructions // 8 for use in uses_of(key.tile) if use.operand != "tile"
    }
    block = {name: count for name, count in per_warp.items() if name[0].split()[0] not in ("dK", "dV")}
    if isinstance(key.tile, BwdTileSm80):
        assert found.sass["LDSM"] == sum(count for (_, name), count in per_warp.items() if name == "ldmatrix")
        assert found.sass["STS"] == sum(count for (_, name), count in per_warp.items() if name == "st.shared")
    elif isinstance(key.tile, BwdTileSm90):
        # The code has three copies of a block: the first block, the second, and all later blocks.
        assert found.sass["STSM"] == 3 * per_warp["dS stmatrix", "stmatrix"]
    else:
        assert isinstance(key.tile, BwdTileSm90Wide)
        # P and dS of the first block and of the others.
        staged = sum(count for (_, name), count in block.items() if name == "stmatrix")
        outputs = sum(count for (_, name), count in per_warp.items() if name == "stmatrix") - staged
        assert found.sass["STSM"] == 2 * staged + outputs
