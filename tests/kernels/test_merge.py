"""The arithmetic of the kernel that merges partial outputs, on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import arith
from cutlass.cute.runtime import from_dlpack

from cute_flash import merge
from cute_flash.kernels.common.merge import VECTOR, MergePartials, Params
from cute_flash.planning.merge import MergeStatic, MergeTile

NAN, INF = torch.nan, torch.inf


def fmax(a: Float32, b: Float32, nan: bool = False) -> Float32:
    """The instruction of the GPU: NaN if an operand is NaN, or without `nan` the other operand."""
    return Float32((arith.maximumf if nan else arith.maxnumf)(a.ir_value(), b.ir_value()))


def exp2(x: Float32, fastmath: bool) -> Float32:
    """The instruction of the GPU: NaN if the operand is NaN. On a CPU, LLVM may assume that fastmath sees no NaN."""
    return accurate_exp2(x)


accurate_exp2 = cute.math.exp2


def merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial outputs (num, rows, VECTOR), row by row, with the code of one thread of the kernel."""
    num, rows = lses.shape
    kernel = MergePartials(MergeStatic("float32", VECTOR, num), MergeTile())

    @cute.jit
    def program(out, lse, partials, partial_lses):  # type: ignore[no-untyped-def]
        p = Params(out, lse, tuple(partials), tuple(partial_lses), (Int32(0),) * num)
        head = Int32(0), Int32(0)
        for row in cutlass.range(rows, unroll=1):
            kernel.store(p, *head, row, Int32(0), kernel.load(p, *head, row, Int32(0)))

    def passed(x: torch.Tensor) -> Any:
        return from_dlpack(x, assumed_align=16)

    out, lse = torch.full((1, 1, rows, VECTOR), 7.0), torch.full((1, 1, rows), 7.0)
    partials, partial_lses = ([passed(x[None, None].clone()) for x in each] for each in (outs, lses))
    program(passed(out), passed(lse), partials, partial_lses)
    return out[0, 0], lse[0, 0]


@pytest.mark.compiles
@pytest.mark.parametrize("num", [1, 2, 3])
def test_all_combinations_of_special_lses(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The LSE is that of `merge`, also if some LSEs are -inf, inf or NaN. Only a NaN or inf gives a NaN output."""
    monkeypatch.setattr(cute.arch, "fmax", fmax)
    monkeypatch.setattr(cute.math, "exp2", exp2)
    lses = torch.tensor(list(itertools.product((-INF, -80.0, 0.5, 3.0, INF, NAN), repeat=num))).T.contiguous()
    outs = torch.randn(*lses.shape, VECTOR, generator=torch.Generator().manual_seed(0))
    out, lse = merged(outs, lses)
    exact_out, exact_lse = merge(outs.double()[:, None, None], lses.double()[:, None, None])
    torch.testing.assert_close(lse.double(), exact_lse[0, 0], rtol=1e-6, atol=1e-6, equal_nan=True)
    is_nan = (lses.isnan() | (lses == INF)).any(dim=0)
    assert out[is_nan].isnan().all()
    torch.testing.assert_close(out[~is_nan].double(), exact_out[0, 0, ~is_nan], rtol=1e-6, atol=1e-6)
