"""The calls that GPU tests make reach every row of the tile tables that a plain call can reach."""

from __future__ import annotations

import pytest
import torch

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.family import FAMILIES
from tests.gpu import calls, test_wide_heads
from tests.gpu.calls import Call
from tests.lock.cases import compile_key, reachable

PLAIN = [*calls.PLAIN, *calls.WIDTHS, *test_wide_heads.CALLS]
# The architecture of the GPU that runs the tests. Tiles of other architectures are compiled (`tests.lock`), not run.
ARCH = ARCHS["sm_90"]
# Direction, family, tile, and whether the mask has a bound.
Row = tuple[str, str, object, bool]


def row_of(direction: str, family: str, key: CompileKey) -> Row:
    return direction, family, key.tile, key.static.is_bounded


def rows_of(calls: list[Call]) -> set[Row]:
    rows = set()
    for call in calls:
        problem, family = call.case.problem, call.family
        rows.add(row_of("fwd", family, plan_forward(problem, ARCH, family).main))
        try:
            rows.add(row_of("bwd", family, plan_backward(problem, ARCH, family=family).main))
        except UnsupportedError:
            continue
    return rows


def reachable_rows() -> dict[Row, str]:
    """Row -> the name of a plain call that takes it. Deterministic gradients have the same tiles and are left out."""
    wanted = [case for case in reachable() if case.arch == ARCH.name and not case.deterministic]
    return {row_of(case.direction, case.family, compile_key(case)): case.name for case in wanted}


@pytest.mark.slow
def test_every_row_that_a_plain_call_can_take_has_a_case() -> None:
    tested = rows_of(PLAIN)
    assert {name for row, name in reachable_rows().items() if row not in tested} == set()


@pytest.mark.slow
def test_a_missing_case_is_noticed() -> None:
    """The unmasked tile of D = 256 for more than 2048 keys."""
    few_keys = [call for call in PLAIN if call.one.seqlen_k <= 2048]
    tested = rows_of(few_keys)
    missing = [row for row in reachable_rows() if row not in tested]
    assert any(getattr(tile, "tile_n", 0) == 80 for _, _, tile, _ in missing)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mask", ["", "r", "lr"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_calls_have_every_dtype_with_every_mask(mask: str, dtype: torch.dtype, family: str) -> None:
    kinds = [calls.kind_of(seed, family) for seed in range(300)]
    assert any(kind.mask == mask and kind.dtype == dtype for kind in kinds)
    # Including varlen batches.
    varlen = kinds[2::3]
    if mask == "r":
        assert any(kind.mask == mask and kind.dtype == dtype for kind in varlen)
