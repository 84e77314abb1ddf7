"""A bias, users' functions and lists of blocks as the forward kernels compute them, on the CPU as in
`test_device_features`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cute_flash.device.block_list import BlockLists, ListWalk
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash import BlockMask
from cute_flash.device.mask import Mask
from cute_flash.device.softmax import LOG2_E
from cute_flash.device.views import as_mn, as_operand_a
from cute_flash.device.written import Written
from cute_flash.reference.user_mods import UserMods
from cute_flash.spec.band import Band
from tests.cute_flash.test_device_features import FOR_HOPPER, SHAPES, shapes
from tests.mod_cases import Case, Kind, Sizes

BATCH, HEAD, SCALE = 1, 2, 0.25
# The last row and key lie within the tile that begins at FIRST.
FIRST, SIZES = (64, 96), Sizes(2, 3, 3, 64 + 50, 96 + 30)


@pytest.fixture(autouse=True)
def on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the instructions mean that only a GPU has."""
    monkeypatch.setattr(cute.arch, "make_warp_uniform", lambda value: value)
    monkeypatch.setattr(cute.arch, "fmin", lambda a, b, nan=False: cutlass.min(a, Float32(b)))
    monkeypatch.setattr(cute.arch, "fmax", lambda a, b, nan=False: cutlass.max(a, b))
    monkeypatch.setattr(cute.arch, "rcp_approx", lambda value: Float32(1.0) / value)


@cute.jit
def exponentiate(head: Any, mask: Any, first: Any, bias: Any, acc: Any) -> None:
    """Products, of which SCALE makes natural scores where something is added to them, become P relative to
    the largest score of a thread's part of a row, if it has one.
    """
    factors = (Float32(SCALE), Float32(LOG2_E))
    factors = factors if head.written.changes_scores else (None, Float32(SCALE * LOG2_E))
    acc_P = cute.make_fragment_like(acc)
    block_max, block_sum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
    formula = head.formula(mask, first, factors, bias, True)
    formula.block_max(as_operand_a(acc), block_max)
    largest = [cutlass.select_(block_max[r] > -Float32.inf, block_max[r], Float32(0.0)) for r in range(2)]
    block_sum.fill(0.0)
    steps = cute.size(as_operand_a(acc), mode=[2])
    for part in (range(1), range(1, steps)):
        row_max = tuple(x * factors[1] for x in largest)
        formula.exponentiate((as_operand_a(acc), as_operand_a(acc_P), block_sum), part, row_max)
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = acc_P[i]


def of_threads(
    shape: Any, case: Case, S: torch.Tensor, first: tuple[int, int], is_whole: bool, by_formula: bool = False
) -> torch.Tensor:
    """A tile of scores after all threads transformed and hid theirs, or P of products by a formula."""
    rows, columns, threads, mma_of = shape
    problem, given = case.problem()
    mods, sizes = problem.mods, case.sizes

    @cute.jit
    def program(out, S, bias, tables, numbers):  # type: ignore[no-untyped-def]
        mma = mma_of()
        of_functions = (None if x is None else tuple(x) for x in (tables, numbers))
        head = Written(mods, bias, *of_functions).of_head(Int32(HEAD), Int32(BATCH))
        for thread in range(threads):
            thr_mma = mma.get_slice(Int32(thread))
            tScS = thr_mma.partition_C(cute.make_identity_tensor((rows, columns)))
            acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((rows, columns)), Float32)
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = S[tScS[i]]
            mask = Mask(Band(), Int32(sizes.seqlen_q), Int32(sizes.seqlen_k), Int32(first[0]), tScS)
            found = head.load_bias(mask, Int32(first[1]), is_whole)
            if cutlass.const_expr(by_formula):
                exponentiate(head, mask, Int32(first[1]), found, acc)
            else:
                head.transform(as_mn(acc), mask, Int32(first[1]), found)
                head.hide(as_mn(acc), mask, Int32(first[1]))
            for i in cutlass.range_constexpr(cute.size(acc)):
                out[tScS[i]] = acc[i]

    def passed(x: Any) -> Any:
        if x is None or isinstance(x, (int, float)):
            return x if x is None else Float32(x) if isinstance(x, float) else Int32(x)
        return list(map(passed, x)) if isinstance(x, list) else from_dlpack(x)

    out = torch.full((rows, columns), torch.nan)
    bias, tables, numbers, _lists = map(passed, given)
    arguments = (from_dlpack(out), from_dlpack(S), bias, tables, numbers)
    cute.compile(program, *arguments, options=FOR_HOPPER)(*arguments)
    return out


def by_torch(case: Case, S: torch.Tensor, rows: range, keys: range) -> torch.Tensor:
    mods = UserMods(case.args(), range(BATCH, BATCH + 1), range(HEAD, HEAD + 1), (1, 1), torch.float64)
    block, _ = mods.apply(S.double()[None, None, None], rows, keys)
    mask = mods.visible(rows, keys, S.device)
    return (block if mask is None else block.masked_fill(~mask, -torch.inf))[0, 0, 0]


KINDS = [
    Kind(64, score="gated", mask="by_head", bias=torch.bfloat16),
    Kind(64, score="relative", mask="document"),
    Kind(64, mask="padding", bias=torch.float32, has_pairs=False),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
@shapes
def test_scores_of_a_tile(shape: Any, kind: Kind) -> None:
    rows, columns, *_ = shape
    case = Case(kind, SIZES, seed=3, device="cpu")
    S = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    for first, is_whole in ((FIRST, False), ((0, 0), True)):
        found = of_threads(shape, case, S, first, is_whole)
        shown = min(rows, SIZES.seqlen_q - first[0]), min(columns, SIZES.seqlen_k - first[1])
        ranges = [range(start, start + size) for start, size in zip(first, shown, strict=True)]
        expected = by_torch(case, S[: shown[0], : shown[1]], *ranges)
        torch.testing.assert_close(found[: shown[0], : shown[1]].double(), expected, rtol=1e-5, atol=1e-5)


FORMULAS = [
    Kind(64, score="alibi"),
    Kind(64, mask="window"),
    Kind(64, bias=torch.bfloat16),
    Kind(64, score="capped", mask="document", bias=torch.float16),
]


@pytest.mark.parametrize("kind", FORMULAS, ids=lambda kind: kind.id)
def test_formula_of_a_tile(kind: Kind) -> None:
    """The same by `device/exponents`, from products."""
    shape = SHAPES["wgmma"]
    rows, columns, *_ = shape
    case = Case(kind, SIZES, seed=3, device="cpu")
    S = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    found = of_threads(shape, case, S / SCALE, (0, 0), True, by_formula=True)
    expected = by_torch(case, S, range(rows), range(columns)).view(rows, -1, 4, 2)
    expected = (expected - expected.amax((1, 3), keepdim=True)).exp().nan_to_num(0.0)
    torch.testing.assert_close(found.double(), expected.flatten(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parts", (1, 2))
def test_walk_of_a_list(parts: int) -> None:
    """Full blocks first, then partial ones, each in as many parts as a kernel makes of it."""
    status = torch.randint(3, (1, 2, 3, 7), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    status[..., -1].clamp_(max=1)
    block_map = BlockMask.of_status(status, 8, 8, 24, 55)
    most = 7 * parts

    @cute.jit
    def program(out, lists, head, block):  # type: ignore[no-untyped-def]
        found = BlockLists(*lists)
        place = Int32(0), head, block
        walk = ListWalk(found, place, found.numbers(*place), parts)
        out[0], out[1] = walk.num, walk.whole_end
        for i in cutlass.range(walk.num, unroll=1):
            out[2 + i] = walk.block(i)

    both = block_map.full_kv, block_map.partial_kv
    lists = [from_dlpack(x) for one in both for x in (one.num_blocks, one.indices)]
    for head in range(2):
        for block in range(3):
            out = torch.full((2 + most,), -1, dtype=torch.int32)
            program(from_dlpack(out), lists, Int32(head), Int32(block))
            own = status[0, head, block].tolist()
            chosen = [[j for j, x in enumerate(own) if x == value] for value in (2, 1)]
            expected = [j * parts + i for group in chosen for j in group for i in range(parts)]
            num, whole_end, *blocks = out.tolist()
            assert (num, whole_end) == (len(expected), len(chosen[0]) * parts)
            assert blocks[:num] == expected and all(x == -1 for x in blocks[num:])


def test_shapes_are_those_of_both_families() -> None:
    assert {"wgmma", "two row tiles"} <= set(SHAPES)
