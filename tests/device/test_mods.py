"""A bias, user mods and block-sparse indices as the forward kernels compute them, on the CPU as in `test_score`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack

from cute_flash import BlockMask
from cute_flash.device.memory.views import as_mn, as_operand_a
from cute_flash.device.scheduling.block_sparse import BlockIndices, BlockSparseIterator
from cute_flash.device.scheduling.seqlen import HeadBlock
from cute_flash.device.scores.band import Band
from cute_flash.device.scores.mask import Mask
from cute_flash.device.scores.mods import ModParams, ScoreFactors
from cute_flash.device.softmax.exp2 import ProbBlock
from cute_flash.device.softmax.softmax import LOG2_E
from cute_flash.reference.user_mods import UserMods
from cute_flash.spec.describe import describe
from cute_flash.spec.features import BIAS, capture_operand
from tests.device.test_score import SHAPES, shapes
from tests.device.tiles import FOR_HOPPER, coordinates, load, store
from tests.mod_cases import Case, Kind, Sizes

pytestmark = pytest.mark.usefixtures("conversion_to_bf16", "on_one_thread")

BATCH, HEAD, SCALE = 1, 2, 0.25
# The sequences end inside the tile that starts at FIRST.
FIRST, SIZES = (64, 96), Sizes(2, 3, 3, 64 + 50, 96 + 30)


@cute.jit
def exponentiate(head: Any, mask: Any, first: Any, bias: Any, acc: Any) -> None:
    """Replace the products in `acc` by P, relative to the largest score of the thread's part of each row.

    If mods change scores, products are multiplied by SCALE first; otherwise SCALE is folded into exp2.
    """
    factors = ScoreFactors(Float32(SCALE), Float32(LOG2_E))
    factors = factors if head.params.changes_scores else ScoreFactors(None, Float32(SCALE * LOG2_E))
    block = ProbBlock(acc, cute.make_fragment_like(acc), *(cute.make_rmem_tensor(2, Float32) for _ in range(2)))
    fused = head.fused_exp2(mask, first, factors, bias, True)
    fused.find_max(None, block)
    largest = [cutlass.select_(block.block_max[r] > -Float32.inf, block.block_max[r], Float32(0.0)) for r in range(2)]
    block.block_sum.fill(0.0)
    steps = cute.size(as_operand_a(acc), mode=[2])
    for part in (range(1), range(1, steps)):
        fused.exponentiate_steps(block, part, tuple(x * factors.log2 for x in largest))
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = block.acc_P[i]


def of_threads(
    shape: Any, case: Case, S: torch.Tensor, first: tuple[int, int], is_full: bool, is_fused: bool = False
) -> torch.Tensor:
    """A tile of scores after all threads transformed and masked their part; with `is_fused`, P of products."""
    rows, columns, threads, mma_of = shape
    args, sizes = case.args(), case.sizes
    problem = describe(*case.inputs(), args)
    mods = problem.mods

    @cute.jit
    def program(out, S, bias, captures, scalars):  # type: ignore[no-untyped-def]
        mma = mma_of()
        arguments = (None if x is None else tuple(x) for x in (captures, scalars))
        head = ModParams(mods, bias, *arguments).for_head(Int32(HEAD), Int32(BATCH))
        for thread in range(threads):
            tScS = coordinates(mma, Int32(thread), (rows, columns))
            acc = load(mma, Int32(thread), S, (rows, columns))
            mask = Mask(Band(), Int32(sizes.seqlen_q), Int32(sizes.seqlen_k), Int32(first[0]), tScS)
            block_bias = head.load_bias(mask, Int32(first[1]), is_full)
            if cutlass.const_expr(is_fused):
                exponentiate(head, mask, Int32(first[1]), block_bias, acc)
            else:
                head.transform(as_mn(acc), mask, Int32(first[1]), block_bias)
                head.apply_mask(as_mn(acc), mask, Int32(first[1]))
            store(acc, tScS, out)

    def passed(x: Any) -> Any:
        if x is None or isinstance(x, (int, float)):
            return x if x is None else Float32(x) if isinstance(x, float) else Int32(x)
        return list(map(passed, x)) if isinstance(x, list) else from_dlpack(x)

    out = torch.full((rows, columns), torch.nan)
    bias = None if args.bias is None else BIAS.value(args, problem)
    kinds = [kind for graph in (args.mods.score, args.mods.mask) if graph is not None for kind in graph.scalars]
    scalars = [int(x) if kind == "int" else x for kind, x in zip(kinds, args.scalars)]
    operands = bias, list(map(capture_operand, args.captures)) or None, scalars or None
    arguments = (from_dlpack(out), from_dlpack(S), *map(passed, operands))
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
    Kind(64, score="stepped"),
]


@pytest.mark.kernels("fwd_sm80", "fwd_sm90")
@pytest.mark.compiles
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
@shapes
def test_scores_of_a_tile(shape: Any, kind: Kind) -> None:
    rows, columns, *_ = shape
    case = Case(kind, SIZES, seed=3, device="cpu")
    S = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    for first, is_full in ((FIRST, False), ((0, 0), True)):
        found = of_threads(shape, case, S, first, is_full)
        shown = min(rows, SIZES.seqlen_q - first[0]), min(columns, SIZES.seqlen_k - first[1])
        ranges = [range(start, start + size) for start, size in zip(first, shown, strict=True)]
        expected = by_torch(case, S[: shown[0], : shown[1]], *ranges)
        torch.testing.assert_close(found[: shown[0], : shown[1]].double(), expected, rtol=1e-5, atol=1e-5)


FUSED = [
    Kind(64, score="alibi"),
    Kind(64, mask="window"),
    Kind(64, bias=torch.bfloat16),
    Kind(64, score="capped", mask="document", bias=torch.float16),
]


@pytest.mark.compiles
@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.id)
def test_fused_pass_of_a_tile(kind: Kind) -> None:
    """P from products by `device/softmax/fused_exp2.py`."""
    shape = SHAPES["wgmma"]
    rows, columns, *_ = shape
    case = Case(kind, SIZES, seed=3, device="cpu")
    S = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    found = of_threads(shape, case, S / SCALE, (0, 0), True, is_fused=True)
    expected = by_torch(case, S, range(rows), range(columns)).view(rows, -1, 4, 2)
    expected = (expected - expected.amax((1, 3), keepdim=True)).exp().nan_to_num(0.0)
    torch.testing.assert_close(found.double(), expected.flatten(1), rtol=1e-4, atol=1e-6)


@pytest.mark.compiles
@pytest.mark.parametrize("parts", (1, 2))
def test_iterator_of_a_block_mask(parts: int) -> None:
    """Full blocks come first, then partial ones. A block of the mask has `parts` K/V blocks of the kernel."""
    status = torch.randint(3, (1, 2, 3, 7), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    status[..., -1].clamp_(max=1)
    block_mask = BlockMask.of_status(status, 8, 8, 24, 55)
    most = 7 * parts

    @cute.jit
    def program(out, indices, head, block):  # type: ignore[no-untyped-def]
        indices, coord = BlockIndices(*indices), HeadBlock(Int32(0), head, block)
        block_iter = BlockSparseIterator(indices, coord, indices.counts(coord), parts)
        out[0], out[1] = block_iter.num, block_iter.full_end
        for i in cutlass.range(block_iter.num, unroll=1):
            out[2 + i] = block_iter.block(i)

    both = block_mask.full_kv, block_mask.partial_kv
    lists = [from_dlpack(x) for one in both for x in (one.num_blocks, one.indices)]
    for head in range(2):
        for block in range(3):
            out = torch.full((2 + most,), -1, dtype=torch.int32)
            program(from_dlpack(out), lists, Int32(head), Int32(block))
            own = status[0, head, block].tolist()
            chosen = [[j for j, x in enumerate(own) if x == value] for value in (2, 1)]
            expected = [j * parts + i for group in chosen for j in group for i in range(parts)]
            num, full_end, *blocks = out.tolist()
            assert (num, full_end) == (len(expected), len(chosen[0]) * parts)
            assert blocks[:num] == expected and all(x == -1 for x in blocks[num:])
