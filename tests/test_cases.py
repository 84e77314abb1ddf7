"""The calls that GPU tests make reach every row of the tile tables that a plain call can reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem
from tests import cases
from tests.gpu import feature_combinations
from tests.lock.cases import compile_key, reachable

FAMILIES = ("sm80", "sm90")
# The architecture of the GPU that runs the tests. Tiles of other architectures are compiled (`tests.lock`), not run.
ARCH = ARCHS["sm_90"]
# Direction, family, tile, and whether the mask has a bound.
Row = tuple[str, str, object, bool]


def row_of(direction: str, family: str, key: CompileKey) -> Row:
    return direction, family, key.tile, key.static.is_bounded


def gpu_problems() -> Iterator[Problem]:
    for case in cases.GPU:
        yield case.problem(torch.bfloat16)
    for head_dim, head_dim_v in cases.OTHER_WIDTHS:
        for band in cases.OTHER_WIDTH_BANDS:
            yield Problem(2, 8, 2, 200, 333, head_dim, head_dim_v=head_dim_v, band=band)


def rows_of(problems: list[Problem]) -> set[Row]:
    rows = set()
    for problem in problems:
        for family in FAMILIES:
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
    tested = rows_of(list(gpu_problems()))
    assert {name for row, name in reachable_rows().items() if row not in tested} == set()


@pytest.mark.parametrize("mask", ["", "r", "lr"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_random_calls_have_every_dtype_with_every_mask(mask: str, dtype: torch.dtype) -> None:
    kinds = [feature_combinations.kind_of(seed) for seed in range(300)]
    assert any(kind.mask == mask and kind.dtype == dtype for kind in kinds)
    # Including varlen batches.
    varlen = kinds[2::3]
    if mask == "r":
        assert any(kind.mask == mask and kind.dtype == dtype for kind in varlen)
