"""Merging partial outputs by one kernel, against torch in fp64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import cute_flash
from cute_flash.planning.merge import MAX_PARTIALS
from cute_flash.runtime.merge import merge_partials
from tests import cases
from tests.covering import covering
from tests.gradients import gradients, weighted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]
DEVICE = "cuda"


def made(sizes, shapes, seed):
    """Partial outputs of some rows, every other one with (B, S, H, D) memory. Rows without keys have output 0."""
    batch, heads, width = sizes
    generator = torch.Generator(DEVICE).manual_seed(seed)
    partials = []
    for i, (first, rows) in enumerate(shapes):
        shape = (batch, rows, heads, width) if i % 2 else (batch, heads, rows, width)
        out = torch.randn(shape, device=DEVICE, generator=generator)
        out = out.transpose(1, 2) if i % 2 else out
        lse = torch.randn(batch, heads, rows, device=DEVICE, generator=generator) * 20
        hidden = torch.rand(batch, heads, rows, device=DEVICE, generator=generator) < 0.2
        lse[hidden], out[hidden] = -torch.inf, 0.0
        partials.append((first, out, lse))
    return partials


def exact(sizes, num_rows, partials):
    batch, heads, width = sizes
    lse = torch.full((batch, heads, num_rows), -torch.inf, dtype=torch.float64, device=DEVICE)
    for first, _, x in partials:
        rows = slice(first, first + x.shape[2])
        lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], x.double())
    out = torch.zeros(batch, heads, num_rows, width, dtype=torch.float64, device=DEVICE)
    for first, y, x in partials:
        rows = slice(first, first + x.shape[2])
        out[:, :, rows] += (x - lse[:, :, rows]).exp().nan_to_num(nan=0.0)[..., None] * y
    return out, lse


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = covering(list(itertools.product(range(1, MAX_PARTIALS + 1), (8, 72, 128, 256), DTYPES)), tuple)


@pytest.mark.parametrize(("num", "width", "dtype"), CASES, ids=str)
def test_random(num, width, dtype):
    sizes, num_rows = (2, 3, width), 333
    shapes = [(0, 333), (100, 233), (0, 17), (332, 1)][:num]
    partials = made(sizes, shapes, num)
    out = torch.empty(2, num_rows, 3, width, device=DEVICE, dtype=dtype).transpose(1, 2)
    lse = torch.empty(2, 3, num_rows, device=DEVICE)
    merge_partials(out, lse, partials)
    exact_out, exact_lse = exact(sizes, num_rows, partials)
    tolerance = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 3e-6}[dtype]
    torch.testing.assert_close(out.double(), exact_out, rtol=tolerance, atol=3e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


def test_nan_stays_in_its_row():
    """Rows of no partial output, and other rows, are not reached by NaN at the ends of a partial output."""
    partials = made((1, 2, 64), [(0, 200), (50, 100)], 0)
    out, lse = torch.empty(1, 2, 220, 64, device=DEVICE), torch.empty(1, 2, 220, device=DEVICE)
    for row in (0, 99):
        partials[1][1][:, :, row] = torch.nan
        partials[1][2][:, :, row] = 3.0
    merge_partials(out, lse, partials)
    is_nan = out.isnan().any(dim=-1)
    assert is_nan[:, :, [50, 149]].all() and int(is_nan.sum()) == 4
    assert not out[:, :, 200:].any() and (lse[:, :, 200:] == -torch.inf).all()


@pytest.mark.parametrize("num", range(1, MAX_PARTIALS + 1))
def test_nan_lse(num):
    """A row with a NaN among its LSEs has output and LSE NaN, whichever partial output it is in."""
    partials = made((1, 2, 64), [(0, 9)] * num, 0)
    for i in range(num):
        partials[i][2][:, :, i] = torch.nan
    out, lse = torch.empty(1, 2, 9, 64, device=DEVICE), torch.empty(1, 2, 9, device=DEVICE)
    merge_partials(out, lse, partials)
    assert lse[:, :, :num].isnan().all() and out[:, :, :num].isnan().all()
    assert not lse[:, :, num:].isnan().any() and not out[:, :, num:].isnan().any()


@pytest.mark.parametrize("head_dim", (64, 128))
def test_merged_parts_have_the_gradients_of_the_whole(head_dim, family):
    """Keys in three parts. A query sees its own part and earlier ones."""
    inputs = cases.make_inputs(cases.Case(2, 4, 2, 400, 400, head_dim, cases.CAUSAL), torch.bfloat16, DEVICE)
    attend = functools.partial(cute_flash.attn, return_lse=True, out_dtype=torch.float32)

    def ring(q, k, v):
        found = []
        for a, b in ((0, 100), (100, 300), (300, 400)):
            found.append(attend(q, k[:, :, a:b], v[:, :, a:b], window=(None, 400 - b)))
        return cute_flash.merge([out for out, _ in found], [lse for _, lse in found])

    whole, lse = attend(*inputs, causal=True)
    merged, merged_lse = ring(*inputs)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, whole, rtol=0.01, atol=2e-3)
    loss = weighted(torch.randn(whole.shape, device=DEVICE))
    expected = gradients(functools.partial(attend, causal=True), inputs, loss)
    for found, x in zip(gradients(ring, inputs, loss), expected, strict=True):
        torch.testing.assert_close(found, x, rtol=0.03, atol=0.02 * x.abs().max().item())
