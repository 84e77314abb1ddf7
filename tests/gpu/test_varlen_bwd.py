"""The gradients of `attn_varlen` on a GPU: each sequence against the oracle, by itself."""

import functools

import pytest
import torch

import cute_flash
from cute_flash.jit.compile import cache_info
from cute_flash.spec.band import Band
from tests import cases, combinations
from tests.combinations import VarlenCombination
from tests.feature_gradients import assert_feature_gradients, weights
from tests.gpu import varlen_cases
from tests.gpu.captured import Captured
from tests.gpu.feature_combinations import VARLEN_CASES
from tests.gpu.varlen_cases import CASES, CAUSAL, DETERMINISTIC_DIMS, IN_FP16, OTHER_WIDTHS, VarlenCase
from tests.gradients import gradients, largest, weighted
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


def douts_of(case: VarlenCase, with_lse: bool = False):
    """Gradients of out and of the LSE; those of rows that belong to no sequence are NaN."""
    generator = torch.Generator().manual_seed(7)
    total, real = case.lengths.totals[0], sum(case.lengths.queries)
    dout = torch.randn(total, case.heads, case.head_dim_v or case.head_dim, generator=generator)
    dlse = torch.randn(case.heads, total, generator=generator)
    dout[real:], dlse[:, real:] = torch.nan, torch.nan
    return dout.cuda(), dlse.cuda() if with_lse else None


def grads_of(attend, inputs, dout, dlse):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    if dlse is None:
        return torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse))


def check(case: VarlenCase, with_lse: bool = False, attend=None, dtype=torch.bfloat16) -> None:
    dout, dlse = douts_of(case, with_lse)
    real = sum(case.lengths.queries)
    inputs = case.inputs(dtype)
    clean = tuple(x.nan_to_num() for x in inputs)

    def cut(out, lse):
        flow = None if dlse is None else dlse[:, :real]
        return weighted(dout[:real], flow)(out[:real], lse[:, :real])

    mine = grads_of(attend or case.attend(), inputs, dout, dlse)
    wide = tuple(x.double() for x in clean)
    exact = gradients(lambda *x: varlen_cases.exact(case, *x), wide, cut)
    rough = gradients(lambda *x: varlen_cases.rough(case, *x), clean, cut)
    unused = case.lengths.unused_keys().cuda()
    assert not mine[0][real:].any(), "dq of padding"
    assert not mine[1][unused].any() and not mine[2][unused].any(), "dk, dv of keys that belong to no sequence"
    most = max(map(largest, exact))
    for name, value, oracle, low in zip("qkv", mine, exact, rough, strict=True):
        assert torch.isfinite(value).all(), f"d{name}"
        if largest(oracle) <= 1e-12 * most:
            assert largest(value) <= 1e-4 * most, f"d{name}: should be 0"
            continue
        cases.assert_error_within(f"d{name}", value, oracle, low)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case):
    check(case)


@pytest.mark.parametrize("case", OTHER_WIDTHS, ids=lambda case: f"{case.head_dim}.{case.head_dim_v}")
def test_dv_other_than_d(case):
    check(case, with_lse=True)


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(200, 100)), ids=str)
def test_more_than_512_keys_on_average(band):
    """The mma.sync backward has another tile there at D = 128."""
    check(VarlenCase(Lengths([300, 50, 420], [700, 10, 1000]), 4, 2, 128, band))


@pytest.mark.parametrize("case", IN_FP16, ids=lambda case: case.id)
def test_fp16(case):
    check(case, dtype=torch.float16)


@pytest.mark.parametrize("band", (Band(), CAUSAL), ids=str)
def test_through_the_lse(band):
    check(VarlenCase(Lengths([70, 0, 200, 33], [90, 5, 150, 40]), 4, 2, 64, band), with_lse=True)


def test_keys_without_queries_have_no_gradient():
    """They are exactly 0, even beside NaN."""
    case = VarlenCase(Lengths([100, 0, 0, 60], [90, 130, 1, 0], None, (9, 200)), 4, 2, 128, CAUSAL)
    q, k, v = (x.requires_grad_() for x in case.inputs())
    out, _ = case.attend()(q, k, v)
    out.backward(torch.full_like(out, torch.nan))
    assert not k.grad[90:].any() and not v.grad[90:].any()
    # Queries without keys, and padding.
    assert not q.grad[100:].any()


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("band", (Band(), CAUSAL), ids=str)
def test_a_sequence_does_not_depend_on_its_batch(head_dim, band):
    case = VarlenCase(Lengths([70, 200, 33], [90, 150, 40]), 4, 2, head_dim, band)
    inputs, attend = case.inputs(), case.attend()
    dout = torch.randn(303, 4, head_dim, device="cuda").bfloat16()

    def grads(tensors, dout):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        return torch.autograd.grad(attend(*leaves)[0], leaves, dout)

    expected, spans = grads(inputs, dout), list(case.lengths.spans())
    for kept, (queries, keys) in enumerate(spans):
        poisoned, flow = [x.clone() for x in inputs], dout.clone()
        for b, (other_queries, other_keys) in enumerate(spans):
            if b != kept:
                poisoned[0][other_queries], flow[other_queries] = torch.nan, torch.nan
                poisoned[1][other_keys], poisoned[2][other_keys] = torch.nan, torch.inf
        found = grads(poisoned, flow)
        for name, a, b, span in zip("qkv", found, expected, (queries, keys, keys), strict=True):
            # dQ is accumulated in no fixed order.
            close = {"rtol": 0.02, "atol": 0.01 * b.abs().max().item()}
            torch.testing.assert_close(a[span], b[span], **close, msg=lambda text, name=name: f"d{name}: {text}")


def test_new_lengths_neither_wait_nor_compile():
    def step(seed, most):
        case = VarlenCase(Lengths.drawn(seed, most), 4, 2, 64, CAUSAL)
        leaves = [x.nan_to_num().requires_grad_() for x in case.inputs()]
        attend, dout = case.attend(), torch.randn_like(leaves[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, _ = attend(*leaves)
            return torch.autograd.grad(out, leaves, dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for seed in range(1, 7):
        step(seed, 300)
    before = cache_info()
    for seed in range(100):
        step(seed, 700)
    after = cache_info()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


def test_a_graph_of_a_training_step_with_lengths_written_in_place():
    batches = (
        Lengths([200, 0, 56], [150, 30, 76]),
        Lengths([1, 250, 5], [1, 255, 0]),
        Lengths([10, 20, 30], [10, 20, 30], None, (196, 196)),
    )
    case = VarlenCase(batches[0], 4, 2, 128, CAUSAL)
    leaves = [x.nan_to_num().requires_grad_() for x in case.inputs()]
    cu_q, cu_k = batches[0].cu_q.cuda(), batches[0].cu_k.cuda()

    def step():
        out = cute_flash.attn_varlen(*leaves, cu_q, cu_k, causal=True)
        return torch.autograd.grad(out.float().square().sum(), leaves)

    captured = Captured.of(step)
    for lengths in batches:
        cu_q.copy_(lengths.cu_q)
        cu_k.copy_(lengths.cu_k)
        replayed = [x.clone() for x in captured.replay()]
        for a, b in zip(replayed, step(), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * b.abs().max().item() + 1e-6)


@pytest.mark.parametrize("head_dim", DETERMINISTIC_DIMS)
@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(200, 100)), ids=str)
def test_deterministic_gradients_have_the_same_bits(head_dim, band):
    # The sequences include one without queries and one without keys.
    case = VarlenCase(Lengths([1000, 3, 0, 200, 700, 333], [1000, 3, 50, 0, 900, 333]), 8, 2, head_dim, band)
    cu, window = (case.lengths.cu_q.cuda(), case.lengths.cu_k.cuda()), (band.left, band.right)

    def attend(*x):
        return cute_flash.attn_varlen(*x, *cu, window=window, return_lse=True, deterministic=True)

    inputs, loss = case.inputs(), weighted(douts_of(case)[0])
    first = gradients(attend, inputs, loss)
    for _ in range(20):
        again = gradients(attend, inputs, loss)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    check(case, attend=attend)


# Softcap, ALiBi, sinks and dropout


def on_gpu(case):
    return {name: x.cuda() for name, x in case.tensors().items()}


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("with_lse", (False, True), ids=("out", "out+lse"))
@pytest.mark.parametrize("case", VARLEN_CASES, ids=str)
def test_features_against_the_oracle(case, with_lse):
    tensors, douts = on_gpu(case), weights(case, "cuda", with_lse)
    found = assert_feature_gradients(case.attend, case, tensors, douts)
    real, unused = sum(case.lengths.queries), case.lengths.unused_keys().cuda()
    assert not found["q"][real:].any(), "dq of padding"
    assert not found["k"][unused].any() and not found["v"][unused].any(), "dk, dv of keys that belong to no sequence"


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("case", VARLEN_CASES[-2:], ids=str)
def test_deterministic_gradients_with_features_have_the_same_bits(case):
    attend = functools.partial(case.attend, deterministic=True)
    tensors, douts = on_gpu(case), weights(case, "cuda", True)
    first = assert_feature_gradients(attend, case, tensors, douts)
    for _ in range(5):
        again = combinations.gradients(attend, tensors, douts)
        assert all(torch.equal(again[name], first[name]) for name in tensors)


@pytest.mark.usefixtures("known_rng")
def test_slopes_and_sinks_have_the_same_bits_without_deterministic():
    case = VARLEN_CASES[-1]
    tensors, douts = on_gpu(case), weights(case, "cuda", True)
    first = combinations.gradients(case.attend, tensors, douts)
    for _ in range(5):
        again = combinations.gradients(case.attend, tensors, douts)
        assert all(torch.equal(again[name], first[name]) for name in ("alibi", "sinks"))


@pytest.mark.usefixtures("known_rng")
def test_gradients_of_slopes_do_not_depend_on_other_sequences():
    case = VARLEN_CASES[3]
    assert case.lengths.queries[3] and case.features["alibi"] == 2
    tensors, (dout, dlse) = on_gpu(case), weights(case, "cuda", True)
    expected = combinations.gradients(case.attend, tensors, (dout, dlse))["alibi"]
    queries, _ = next(case.lengths.spans())
    dout[queries] = torch.nan
    found = combinations.gradients(case.attend, tensors, (dout, dlse))["alibi"]
    assert found[0].isnan().all()
    assert torch.equal(found[1:], expected[1:])
    # Sequences without queries, or without keys.
    assert not found[2:4].any()


def test_new_lengths_with_features_neither_wait_nor_compile():
    """Also with slopes of each sequence, and with sinks beside padding."""
    one = VARLEN_CASES[3].one

    def step(seed):
        case = VarlenCombination(one, Lengths.drawn(seed, 300))
        leaves = {name: x.nan_to_num().cuda().requires_grad_() for name, x in case.tensors().items()}
        cu, used = (case.lengths.cu_q.cuda(), case.lengths.cu_k.cuda()), case.lengths.used_k
        used = None if used is None else used.cuda()
        options, dout = one.options(leaves), torch.randn_like(leaves["q"])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = cute_flash.attn_varlen(*(leaves[x] for x in "qkv"), *cu, seqused_k=used, **options)
            return torch.autograd.grad(out, list(leaves.values()), dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for seed in range(1, 7):
        step(seed)
    before = cache_info()
    for seed in range(30):
        assert all(x.isfinite().all() for x in step(seed))
    after = cache_info()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


def test_a_captured_training_step_with_features():
    """Each replay has a new dropout mask, and its gradients use this mask; checked by the linearity of out in v."""
    case = VARLEN_CASES[3]
    leaves = {name: x.nan_to_num().cuda().requires_grad_() for name, x in case.tensors().items()}
    cu, options = (case.lengths.cu_q.cuda(), case.lengths.cu_k.cuda()), case.one.options(leaves)

    def step():
        out = cute_flash.attn_varlen(*(leaves[x] for x in "qkv"), *cu, **options).float()
        return out.detach().sum(), *torch.autograd.grad(out.sum(), list(leaves.values()))

    captured, sums = Captured.of(step), []
    for _ in range(3):
        total, *grads = captured.replay()
        sums.append(total.item())
        assert all(x.isfinite().all() for x in grads)
        found = (grads[2].double() * leaves["v"].double()).sum().item()
        torch.testing.assert_close(found, sums[-1], rtol=0.02, atol=4.0)
    assert len(set(sums)) == 3


@pytest.mark.usefixtures("known_rng")
def test_jagged_tensors_with_features():
    one, lengths = VARLEN_CASES[3].one, Lengths([70, 200, 33], [70, 200, 33])
    case = VarlenCombination(one, lengths)
    tensors, douts = on_gpu(case), weights(case, "cuda", False)

    def nested(x):
        offsets = lengths.cu_q.long().cuda()
        q, k, v = (torch.nested.nested_tensor_from_jagged(x[name], offsets) for name in "qkv")
        out, lse = cute_flash.attn_nested(q, k, v, **one.options(x), return_lse=True)
        return out.values(), lse.values().transpose(0, 1)

    assert_feature_gradients(nested, case, tensors, douts)
