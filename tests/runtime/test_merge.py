"""The launch that merges partial outputs, on a fake GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_flash import merge
from cute_flash.planning.merge import MAX_PARTIALS
from cute_flash.runtime.merge import Partial, merge_partials
from tests.fakes.gpu import FakeGpu

BATCH, HEADS, ROWS, WIDTH = 2, 3, 50, 24


def partial(first: int, rows: int, seed: int, is_strided: bool = False) -> Partial:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(BATCH, HEADS, rows, WIDTH, generator=generator)
    if is_strided:
        out = torch.randn(BATCH, rows, HEADS, WIDTH, generator=generator).transpose(1, 2)
    lse = torch.randn(BATCH, HEADS, rows, generator=generator) * 5
    # A row without keys has output 0.
    lse[0, 1, rows // 2], out[0, 1, rows // 2] = -torch.inf, 0.0
    return first, out, lse


def expected(partials: list[Partial]) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for first, out, lse in partials:
        outs.append(torch.zeros(BATCH, HEADS, ROWS, WIDTH))
        lses.append(torch.full((BATCH, HEADS, ROWS), -torch.inf))
        rows = slice(first, first + out.shape[2])
        outs[-1][:, :, rows], lses[-1][:, :, rows] = out, lse
    return merge(outs, lses)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num", range(1, MAX_PARTIALS + 1))
def test_partial_outputs_of_some_rows(gpu: FakeGpu, num: int, dtype: torch.dtype) -> None:
    shapes = [(0, ROWS), (20, 30), (0, 10), (49, 1)][:num]
    partials = [partial(*shape, seed, seed == 1) for seed, shape in enumerate(shapes)]
    out = torch.empty(BATCH, HEADS, ROWS, WIDTH, dtype=dtype)
    lse = torch.empty(BATCH, HEADS, ROWS)
    merge_partials(out, lse, partials)
    (launch,) = gpu.launches
    assert launch.kernel == "merge_partials" and launch["first_rows"] == [first for first, _ in shapes]
    exact_out, exact_lse = expected(partials)
    torch.testing.assert_close(out, exact_out.to(dtype))
    torch.testing.assert_close(lse, exact_lse)


def test_rows_of_no_partial_output(gpu: FakeGpu) -> None:
    partials = [partial(10, 20, 0), partial(35, 5, 1)]
    out, lse = torch.empty(BATCH, HEADS, ROWS, WIDTH), torch.empty(BATCH, HEADS, ROWS)
    merge_partials(out, lse, partials)
    for rows in (slice(0, 10), slice(30, 35), slice(40, ROWS)):
        assert not out[:, :, rows].any() and (lse[:, :, rows] == -torch.inf).all()
    assert out[:, :, 10:30].any() and lse[:, :, 36].isfinite().all()


def test_nothing_to_merge(gpu: FakeGpu) -> None:
    merge_partials(torch.empty(0, 2, 5, 8), torch.empty(0, 2, 5), [(0, torch.empty(0, 2, 5, 8), torch.empty(0, 2, 5))])
    assert not gpu.launches


def test_calls_on_another_device(gpu: FakeGpu) -> None:
    gpu.device = 1
    out, lse = torch.empty(BATCH, HEADS, ROWS, WIDTH), torch.empty(BATCH, HEADS, ROWS)
    merge_partials(out, lse, [partial(0, ROWS, 0)])
    assert gpu.entered == [None] and len(gpu.launches) == 1
