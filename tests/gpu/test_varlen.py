"""`attn_varlen` on a GPU: each sequence against the oracle, by itself, forward and backward."""

import pytest
import torch

import cute_flash
from cute_flash.jit.compile import cache_info
from cute_flash.spec.band import Band
from tests import cases
from tests.gpu import varlen_cases
from tests.gpu.captured import Captured
from tests.gpu.varlen_cases import CASES, CAUSAL, IN_FP16, OTHER_WIDTHS, VarlenCase
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


def check(case: VarlenCase, out, lse, inputs) -> None:
    clean = [x.nan_to_num() for x in inputs]
    oracle, oracle_lse = varlen_cases.exact(case, *(x.double() for x in clean))
    low, _ = varlen_cases.rough(case, *clean)
    cases.assert_lse_close(lse, oracle_lse)
    cases.assert_error_within("out", out, oracle, low)
    empty = (oracle_lse == -torch.inf).transpose(0, 1)
    assert (out[empty] == 0).all(), "rows that see no key, and padding, must be exactly 0"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case):
    inputs = case.inputs()
    check(case, *case.attend()(*inputs), inputs)


@pytest.mark.parametrize("case", IN_FP16, ids=lambda case: case.id)
def test_fp16(case):
    inputs = case.inputs(torch.float16)
    check(case, *case.attend()(*inputs), inputs)


@pytest.mark.parametrize("case", OTHER_WIDTHS, ids=lambda case: f"{case.head_dim}.{case.head_dim_v}")
def test_dv_other_than_d(case):
    inputs = case.inputs()
    check(case, *case.attend()(*inputs), inputs)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("band", (Band(), CAUSAL), ids=str)
def test_a_sequence_does_not_depend_on_its_batch(head_dim, band):
    """A sequence has the same bits if its neighbours are finite, NaN or infinite."""
    case = VarlenCase(Lengths([70, 200, 33], [90, 150, 40]), 4, 2, head_dim, band)
    inputs, attend = case.inputs(), case.attend()
    out, lse = attend(*inputs)
    spans = list(case.lengths.spans())
    for kept, (queries, _) in enumerate(spans):
        for value in (torch.nan, torch.inf):
            poisoned = [x.clone() for x in inputs]
            for b, (other_queries, other_keys) in enumerate(spans):
                if b != kept:
                    poisoned[0][other_queries] = value
                    poisoned[1][other_keys], poisoned[2][other_keys] = value, value
            found, found_lse = attend(*poisoned)
            assert torch.equal(found[queries], out[queries])
            assert torch.equal(found_lse[:, queries], lse[:, queries])


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(50, 9)), ids=str)
def test_equal_lengths_are_a_batch(head_dim, band):
    case = VarlenCase(Lengths([300] * 3, [300] * 3), 4, 2, head_dim, band)
    flat = case.inputs()
    batch = [x.unflatten(0, (3, 300)).transpose(1, 2) for x in flat]
    out, lse = case.attend()(*flat)
    expected, expected_lse = cute_flash.attn(*batch, window=band.bounds, return_lse=True)
    torch.testing.assert_close(out.unflatten(0, (3, 300)).transpose(1, 2), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.unflatten(1, (3, 300)).transpose(0, 1), expected_lse, rtol=1e-4, atol=1e-4)


def test_new_lengths_neither_wait_nor_compile():
    """200 random batches without a host sync; nothing is compiled after six warm-up batches."""
    warm = [VarlenCase(Lengths.drawn(seed), 4, 2, 64, CAUSAL) for seed in (1, 2, 3, 4, 5, 6)]
    for case in warm:
        case.attend()(*case.inputs())
    before = cache_info()
    compiled, built = before.compiles, before.disk_hits
    for seed in range(200):
        case = VarlenCase(Lengths.drawn(seed, longest=700), 4, 2, 64, CAUSAL)
        inputs, attend = case.inputs(), case.attend()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse = attend(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if seed % 10 == 0:
            check(case, out, lse, inputs)
    assert (cache_info().compiles, cache_info().disk_hits) == (compiled, built)


def test_a_graph_with_lengths_written_in_place():
    first, *others = (
        Lengths([200, 0, 56], [150, 30, 76]),
        Lengths([1, 250, 5], [1, 255, 0]),
        Lengths([0, 0, 256], [100, 56, 100]),
        Lengths([10, 20, 30], [10, 20, 30], None, (196, 196)),
    )
    case = VarlenCase(first, 4, 2, 128, CAUSAL)
    inputs = tuple(x.nan_to_num() for x in case.inputs())
    cu_q, cu_k = first.cu_q.cuda(), first.cu_k.cuda()

    def attend():
        return cute_flash.attn_varlen(*inputs, cu_q, cu_k, causal=True, return_lse=True)

    captured = Captured.of(attend)
    for lengths in (first, *others):
        cu_q.copy_(lengths.cu_q)
        cu_k.copy_(lengths.cu_k)
        check(VarlenCase(lengths, 4, 2, 128, CAUSAL), *captured.replay(), inputs)


@pytest.mark.parametrize("scale", (-0.3, 0.0, 2.5))
def test_any_finite_scale(scale):
    case = VarlenCase(Lengths([70, 129], [70, 200]), 2, 2, 64)
    q, k, v = case.inputs()
    cu = case.lengths.cu_q.cuda(), case.lengths.cu_k.cuda()
    found = cute_flash.attn_varlen(q, k, v, *cu, scale=scale)
    expected = cute_flash.attn_varlen(q.cpu(), k.cpu(), v.cpu(), *(x.cpu() for x in cu), scale=scale)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_jagged_tensors():
    case = VarlenCase(Lengths([70, 200, 33], [70, 200, 33]), 4, 2, 64, CAUSAL)
    flat, offsets = case.inputs(), case.lengths.cu_q.long().cuda()
    jagged = [torch.nested.nested_tensor_from_jagged(x, offsets) for x in flat]
    out = cute_flash.attn_nested(*jagged, causal=True)
    assert torch.equal(out.values(), case.attend()(*flat)[0])
