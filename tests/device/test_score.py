"""Softcap, ALiBi and sinks as the kernels compute them, on the CPU as in `test_parts`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import from_dlpack

from cute_flash.device.memory.views import as_mn
from cute_flash.device.mma.wgmma import make_mma
from cute_flash.device.scores.alibi_step import SIGNS, fits
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.formula import ScoreTile
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.score import Score
from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.softmax import LN_2, LOG2_E, THREADS_PER_ROW, Softmax
from cute_flash.kernels.sm80.fwd import FwdSm80
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.spec.problem import Static
from tests.device.tiles import FOR_HOPPER, coordinates, load, store

# (rows, columns, threads, MMA) of a tile of scores: mma.sync with one and two row tiles per warp, and wgmma.
ONE, TWO = FwdTileSm80(64, 64, 32, 4, 1), FwdTileSm80(64, 128, 48, 4, 1)
SHAPES: dict[str, tuple[int, int, int, Callable[[], Any]]] = {
    "one row tile": (64, 32, 128, lambda: FwdSm80(Static("bfloat16", 64, True, True), ONE).grids.s.mma()),
    "two row tiles": (128, 48, 128, lambda: FwdSm80(Static("bfloat16", 64, True, True), TWO).grids.s.mma()),
    "wgmma": (
        64, 80, 128,
        lambda: make_mma(cutlass.BFloat16, 80, True, OperandMajorMode.K, OperandMajorMode.K),
    ),
}  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


pytestmark = pytest.mark.usefixtures("on_one_thread")

# Scores

SCALE = 0.37


@functools.cache
def scoring(shape: Any, has_softcap: bool, has_slope: bool, reference: float | None, is_exact: bool = False) -> Any:
    """The compiled program that `scores` runs; scale, softcap, slope and sizes are run-time arguments."""
    rows, columns, threads, mma_of = shape

    @cute.jit
    def program(out, products, numbers, sizes):  # type: ignore[no-untyped-def]
        mma = mma_of()
        score = Score.of(numbers[0], numbers[1] if has_softcap else None, is_exact=is_exact)
        score = score.for_head(numbers[2] if has_slope else None)
        for thread in range(threads):
            tScS = coordinates(mma, Int32(thread), (rows, columns))
            acc = load(mma, Int32(thread), products, (rows, columns))
            mask, acc_mn = Mask(Band(), sizes[0], sizes[1], sizes[2], tScS), as_mn(acc)
            if cutlass.const_expr(reference is None):
                score.apply(acc_mn, mask, sizes[3])
            else:
                coords = as_mn(tScS)
                of_rows = (Float32(coords[r, 0][0]) for r in range(cute.size(acc_mn, mode=[0])))
                references = tuple((row + Float32(reference)) * LOG2_E for row in of_rows)
                score.apply_relative(acc_mn, ScoreTile(mask, sizes[3], rows, columns), references)
            store(acc, tScS, out, LN_2)

    tile = torch.zeros(rows, columns)
    some = map(from_dlpack, (tile, tile, torch.zeros(3), torch.zeros(4, dtype=torch.int32)))
    return cute.compile(program, *some, options=FOR_HOPPER)


def scores(
    shape: Any, products: torch.Tensor, softcap: float | None, slope: float | None,
    sizes: tuple[int, ...], reference: float | None = None, is_exact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The scores of a tile of products, in natural units, from all threads.

    With `reference`, (reference + row) is subtracted from each row.
    """
    out = torch.full(shape[:2], torch.nan)
    numbers = torch.tensor([SCALE, softcap or 0.0, slope or 0.0])
    program = scoring(shape, softcap is not None, slope is not None, reference, is_exact)
    program(*map(from_dlpack, (out, products, numbers, torch.tensor(sizes, dtype=torch.int32))))
    return out


def exact_scores(
    products: torch.Tensor, softcap: float | None, slope: float | None, sizes: tuple[int, ...]
) -> torch.Tensor:
    found, (sq, sk, first_row, first_column) = SCALE * products.double(), sizes
    if softcap is not None:
        found = softcap * (found / softcap).tanh()
    if slope is not None:
        i = torch.arange(first_row, first_row + len(products))[:, None] + sk - sq
        found = found - slope * (i - torch.arange(first_column, first_column + products.shape[1])).abs()
    return found


@pytest.mark.compiles
@shapes
@pytest.mark.parametrize(("softcap", "slope"), [(None, 0.3), (30.0, None), (0.5, -0.7), (2.0, 0.01)], ids=str)
def test_scores(shape: Any, softcap: float | None, slope: float | None) -> None:
    rows, columns, *_ = shape
    generator = torch.Generator().manual_seed(1)
    products = torch.randn(rows, columns, generator=generator) * 30
    products[0, :4] = torch.tensor([0.0, torch.inf, -torch.inf, 1e30])
    sq, sk, first_row, first_column = 300, 333, 64, 48
    found = scores(shape, products, softcap, slope, (sq, sk, first_row, first_column))
    expected = exact_scores(products, softcap, slope, (sq, sk, first_row, first_column))
    # A score and a bias of opposite signs may nearly cancel.
    atol = 3e-7 * (softcap or 0.0) + (1e-5 if slope is not None else 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=atol)


@pytest.mark.compiles
@pytest.mark.parametrize("size", [1e-4, 0.5, 30.0, 1e4])
def test_softcap_of_fp32_calls(size: float) -> None:
    """Each score has an error of a few units in the last place, also near 0 and where tanh is nearly 1."""
    shape = SHAPES["one row tile"]
    products = torch.randn(*shape[:2], generator=torch.Generator().manual_seed(1)) * size
    products[0, :3] = torch.tensor([0.0, torch.inf, -torch.inf])
    found, expected = (
        scores(shape, products, 50.0, None, (300, 333, 64, 48), is_exact=True).double(),
        exact_scores(products, 50.0, None, (300, 333, 64, 48)),
    )
    torch.testing.assert_close(found, expected, rtol=4e-7, atol=0.0)


@pytest.mark.compiles
@shapes
@pytest.mark.parametrize("place", ["touching", "across", "after", "far after"])
@pytest.mark.parametrize(("softcap", "slope"), [(None, 0.3), (30.0, None), (2.0, -0.7)], ids=str)
def test_scores_less_a_reference(shape: Any, softcap: float | None, slope: float | None, place: str) -> None:
    """Blocks on one side of the diagonal, where ALiBi is linear, and blocks across it."""
    rows, columns, *_ = shape
    generator = torch.Generator().manual_seed(1)
    products = torch.randn(rows, columns, generator=generator) * 10
    products[0, :4] = torch.tensor([0.0, torch.inf, -torch.inf, 1e30])
    sq, sk, first_row = 300, 333, 128
    position = first_row + sk - sq
    first_column = {
        "touching": position - columns + 1,
        "across": position - columns + 2,
        "after": position + rows - 1,
        "far after": position + rows + 40,
    }[place]
    found = scores(shape, products, softcap, slope, (sq, sk, first_row, first_column), -3.5)
    expected = exact_scores(products, softcap, slope, (sq, sk, first_row, first_column))
    expected = expected - (torch.arange(rows)[:, None] - 3.5)
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=4e-5)


@pytest.mark.kernels("fwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("softcap", "slope", "place", "step"),
    [
        *((None, 0.03, place, step) for place in ("touching", "across", "after") for step in ("", "k-step")),
        *((None, slope, "across", "causal k-step") for slope in (0.03, 6.0)),
        *((x, None, "across", "") for x in (30.0, 5.0)),
    ],
    ids=str,
)
def test_fused_exp2_of_products(softcap: float | None, slope: float | None, place: str, step: str) -> None:
    """P and row maxima by the fused pass. Only the first columns have products near 0; some scores are masked.

    `step`: whether the products have the k-step of ALiBi, which a slope of 6 is too large for.
    """
    rows, _, threads, _ = SHAPES["wgmma"]
    columns = 96
    sq, sk, first_row = 300, 333, 128
    position = first_row + sk - sq
    first_column = {"touching": 1 - columns, "across": 2 - columns, "after": rows - 1}[place] + position
    products = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 2
    products[:, 64:] *= 4
    sign = {"touching": 1, "across": int(step == "causal k-step" and slope == 0.03), "after": -1}[place]
    if step:
        # As the tensor cores compute it: blocks across the diagonal have the step if the mask is causal.
        multiplied = products + sign * slope / SCALE * (torch.arange(columns) - columns // 2)
    else:
        multiplied = products

    @cute.jit
    def program(out, largest, sums, signs, products, numbers, sizes):  # type: ignore[no-untyped-def]
        mma = make_mma(cutlass.BFloat16, columns, True, OperandMajorMode.K, OperandMajorMode.K)
        score = Score.of(numbers[0], None if softcap is None else numbers[1])
        score = score.for_head(None if slope is None else numbers[2])
        for thread in range(threads):
            tScS = coordinates(mma, Int32(thread), (rows, columns))
            acc = load(mma, Int32(thread), products, (rows, columns))
            band = Band(None, Int32(0)) if cutlass.const_expr(step == "causal k-step") else Band()
            mask, acc_P = Mask(band, sizes[0], sizes[1], sizes[2], tScS), cute.make_fragment_like(acc)
            tile = ScoreTile(mask, sizes[3], rows, columns, has_alibi_step=step != "")
            if cutlass.const_expr(step != ""):
                word = cutlass.select_(fits(score.alibi.slope_log2, score.scale_log2), Int32(1), Int32(0))
                signs[0] = score.alibi.step_word(word, tile)
            fused = score.fused_exp2(as_mn(acc), tile)
            for i in cutlass.range_constexpr(cute.size(acc)):
                row, column = tScS[i]
                acc[i] = -Float32.inf if row + column == 9 else acc[i]
            if cutlass.const_expr(step == "causal k-step"):
                mask.apply(as_mn(acc), sizes[3])
            block = ProbBlock(acc, acc_P, *(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
            fused.find_max(None, block)
            block.block_sum.fill(0.0)
            row_max, steps = (Float32(1.5), Float32(-0.5)), columns // 16
            for part in (range(3), range(3, steps)):
                fused.exponentiate_steps(block, part, row_max)
            store(acc_P, tScS, out)
            for r in cutlass.range_constexpr(2):
                row, column = as_mn(tScS)[r, 0]
                largest[row, column // 2] = block.block_max[r] * LN_2
                sums[row, column // 2] = block.block_sum[r]

    out = torch.full((rows, columns), torch.nan)
    largest, sums = torch.full((rows, 4), torch.nan), torch.full((rows, 4), torch.nan)
    numbers, sizes = torch.tensor([SCALE, softcap or 0.0, slope or 0.0]), (sq, sk, first_row, first_column)
    signs = torch.zeros(1, dtype=torch.int32)
    tensors = (out, largest, sums, signs, multiplied, numbers, torch.tensor(sizes, dtype=torch.int32))
    arguments = [*map(from_dlpack, tensors)]
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    if step:
        assert signs.item() == {1: 1, 0: 0, -1: 1 ^ SIGNS}[sign]

    expected = exact_scores(products, softcap, slope, sizes)
    expected[torch.arange(rows)[:, None] + torch.arange(columns) == 9] = -torch.inf
    if step == "causal k-step":
        hidden = torch.arange(columns) + first_column > torch.arange(rows)[:, None] + position
        assert hidden.any()
        expected[hidden] = -torch.inf
    of_threads = expected.view(rows, -1, 4, 2).transpose(1, 2).flatten(2)
    torch.testing.assert_close(largest.double(), of_threads.amax(2), rtol=1e-5, atol=1e-4)
    lowest = torch.tensor([1.5, -0.5]).repeat_interleave(8).repeat(rows // 16)[:, None].double()
    P = (expected * LOG2_E - lowest).exp2()
    torch.testing.assert_close(out.double(), P, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        sums.double(), P.view(rows, -1, 4, 2).transpose(1, 2).flatten(2).sum(2), rtol=1e-4, atol=1e-5
    )


@pytest.mark.compiles
@pytest.mark.parametrize("most", [0.1, 0.5], ids=["by a polynomial", "by both ways"])
@pytest.mark.parametrize("softcap", [0.1, 50.0, 16384.0])
def test_small_scores_keep_their_digits(softcap: float, most: float) -> None:
    """Both for threads with small scores only, and for threads that also have large ones."""
    shape = SHAPES["wgmma"]
    products = torch.linspace(-most, most, 64 * 80).view(80, 64).T.contiguous() * softcap / 0.37
    found = scores(shape, products, softcap, None, (64, 80, 0, 0))
    expected = softcap * (0.37 * products.double() / softcap).tanh()
    error = (found - expected).abs()
    assert (error <= 2.0**-19 * expected.abs() + (most > 0.1) * softcap * 2.0**-22).all()


@pytest.mark.compiles
def test_a_steep_cap_has_no_polynomial() -> None:
    products = torch.linspace(-1e-6, 1e-6, 64 * 80).view(64, 80)
    found = scores(SHAPES["wgmma"], products, 1e-6, None, (64, 80, 0, 0))
    torch.testing.assert_close(found.double(), 1e-6 * (0.37e6 * products.double()).tanh(), rtol=1e-6, atol=3e-13)


# Sinks


@pytest.mark.compiles
@pytest.mark.parametrize("sink", [-torch.inf, -50.0, 0.3, 2.0, 300.0])
@pytest.mark.parametrize("dropout_scale", [None, 2.5])
def test_sinks(sink: float, dropout_scale: float | None) -> None:
    """A row with scores and a row without keys. All four threads of a row have the same scores."""
    columns = 8

    @cute.jit
    def program(scores, out, lse, sink, dropout_scale):  # type: ignore[no-untyped-def]
        acc_O = cute.make_rmem_tensor(cute.make_layout((2, 1)), Float32)
        acc_S = cute.make_rmem_tensor(cute.make_layout((2, columns)), Float32)
        acc_O.fill(0.0)
        softmax = Softmax.start(acc_O, Float32(LOG2_E), True)
        for r, c in itertools.product(range(2), range(columns)):
            acc_S[r, c] = scores[r, c]
        softmax.step(acc_S, acc_O, Int32(0))
        for r, c in itertools.product(range(2), range(columns)):
            acc_O[r, 0] = acc_O[r, 0] + acc_S[r, c]
        rows = cute.make_rmem_tensor(2, Float32)
        softmax.finish(acc_O, rows, sink, dropout_scale)
        for r in cutlass.range_constexpr(2):
            out[r], lse[r], lse[r + 2] = acc_O[r, 0], rows[r], softmax.max_score[r]

    scores = torch.randn(2, columns, generator=torch.Generator().manual_seed(0)) * 3
    scores[1] = -torch.inf
    out, lse = torch.full((2,), torch.nan), torch.full((4,), torch.nan)
    scale = None if dropout_scale is None else Float32(dropout_scale)
    program(*map(from_dlpack, (scores, out, lse)), Float32(sink), scale)
    keys = scores[0].double().exp().sum()
    total = THREADS_PER_ROW * keys + torch.tensor(sink).double().exp()
    torch.testing.assert_close(out[0].double(), (dropout_scale or 1.0) * keys / total, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(lse[0].double(), total.log() if sink < 300 else torch.tensor(300.0).double())
    # These values are exact.
    assert out[1] == 0 and lse[1] == sink
    assert lse[2] == scores[0].max() and lse[3] == -torch.inf
