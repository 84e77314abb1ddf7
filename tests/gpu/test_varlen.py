"""`attn_varlen` on a GPU: a sequence depends on no other sequence; jagged tensors; new lengths need no host work."""

import subprocess
import sys

import pytest
import torch

import cute_flash
from cute_flash.jit.kernels import cache_info
from cute_flash.spec.band import Band
from tests.cases import CAUSAL, FULL
from tests.combinations import VarlenCombination, gradients
from tests.feature_gradients import assert_feature_gradients, weights
from tests.gpu.calls import ALL, BF16, BUSY, RAGGED, dense, varlen
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

THREE = Lengths([70, 200, 33], [90, 150, 40])
WIDTHS_AND_BANDS = ((64, FULL), (128, CAUSAL), (256, CAUSAL), (64, Band(50, 9)))
# All features, with slopes of each sequence.
FEATURES = varlen(RAGGED, 2, 2, 128, BF16, CAUSAL, ALL)


def on_gpu(case):
    return {name: x.cuda() for name, x in case.tensors().items()}


@pytest.mark.parametrize(("head_dim", "band"), WIDTHS_AND_BANDS, ids=str)
def test_a_sequence_does_not_depend_on_its_batch(head_dim, band):
    """A sequence has the same bits if its neighbours are finite, NaN or infinite, and close gradients."""
    case = varlen(THREE, 2, 2, head_dim, BF16, band)
    clean, (dout, dlse) = on_gpu(case), weights(case, "cuda", False)

    def results(x, dout):
        out, lse = case.attend(x)
        return out, lse, gradients(case.attend, x, (dout, dlse))

    out, lse, expected = results(clean, dout)
    spans = list(THREE.spans())
    for kept, (queries, keys) in enumerate(spans):
        for value in (torch.nan, torch.inf):
            x, flow = {name: tensor.clone() for name, tensor in clean.items()}, dout.clone()
            for b, (other_queries, other_keys) in enumerate(spans):
                if b != kept:
                    x["q"][other_queries], flow[other_queries] = value, torch.nan
                    x["k"][other_keys], x["v"][other_keys] = value, value
            found_out, found_lse, found = results(x, flow)
            assert torch.equal(found_out[queries], out[queries])
            assert torch.equal(found_lse[:, queries], lse[:, queries])
            for name, span in zip("qkv", (queries, keys, keys), strict=True):
                # dQ is accumulated in no fixed order.
                close = {"rtol": 0.02, "atol": 0.01 * expected[name].abs().max().item()}
                torch.testing.assert_close(found[name][span], expected[name][span], **close)


@pytest.mark.parametrize(("head_dim", "band"), WIDTHS_AND_BANDS, ids=str)
def test_equal_lengths_are_a_batch(head_dim, band):
    case = varlen(Lengths([300] * 3, [300] * 3), 2, 2, head_dim, BF16, band)
    x = on_gpu(case)
    batch = [x[name].unflatten(0, (3, 300)).transpose(1, 2) for name in "qkv"]
    out, lse = case.attend(x)
    expected, expected_lse = cute_flash.attn(*batch, window=band.bounds, return_lse=True)
    torch.testing.assert_close(out.unflatten(0, (3, 300)).transpose(1, 2), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.unflatten(1, (3, 300)).transpose(0, 1), expected_lse, rtol=1e-4, atol=1e-4)


def test_keys_without_queries_have_no_gradient():
    """They are exactly 0, even beside NaN."""
    case = varlen(Lengths([100, 0, 0, 60], [90, 130, 1, 0], None, (9, 200)), 2, 2, 128, BF16, CAUSAL)
    q, k, v = (x.requires_grad_() for x in on_gpu(case).values())
    out, _ = case.attend({"q": q, "k": k, "v": v})
    out.backward(torch.full_like(out, torch.nan))
    assert not k.grad[90:].any() and not v.grad[90:].any()
    # Queries without keys, and padding.
    assert not q.grad[100:].any()


@pytest.mark.usefixtures("known_rng")
def test_gradients_of_slopes_do_not_depend_on_other_sequences():
    tensors, (dout, dlse) = on_gpu(FEATURES), weights(FEATURES, "cuda", True)
    expected = gradients(FEATURES.attend, tensors, (dout, dlse))["alibi"]
    queries, _ = next(RAGGED.spans())
    dout[queries] = torch.nan
    found = gradients(FEATURES.attend, tensors, (dout, dlse))["alibi"]
    assert found[0].isnan().all()
    assert torch.equal(found[1:], expected[1:])
    # Sequences without queries, or without keys.
    assert not found[2:4].any()


@pytest.mark.usefixtures("known_rng")
def test_slopes_and_sinks_have_the_same_bits_without_deterministic():
    case = varlen(BUSY, 4, 3, 128, BF16, CAUSAL, ALL)
    tensors, douts = on_gpu(case), weights(case, "cuda", True)
    first = gradients(case.attend, tensors, douts)
    for _ in range(5):
        again = gradients(case.attend, tensors, douts)
        assert all(torch.equal(again[name], first[name]) for name in ("alibi", "sinks"))


@pytest.mark.usefixtures("known_rng")
@pytest.mark.parametrize("features", ({}, ALL), ids=("plain", "features"))
def test_jagged_tensors(features):
    lengths = Lengths([70, 200, 33], [70, 200, 33])
    case = varlen(lengths, 2, 2, 128, BF16, CAUSAL, features)
    offsets = lengths.cu_q.long().cuda()

    def nested(x):
        q, k, v = (torch.nested.nested_tensor_from_jagged(x[name], offsets) for name in "qkv")
        out, lse = cute_flash.attn_nested(q, k, v, **case.one.options(x), return_lse=True)
        return out.values(), lse.values().transpose(0, 1)

    assert_feature_gradients(nested, case, on_gpu(case), weights(case, "cuda", False))


@pytest.mark.parametrize("features", ({}, ALL), ids=("plain", "features"))
def test_new_lengths_neither_wait_nor_compile(features):
    """Forward and backward of random batches, also with slopes of each sequence, and with sinks beside padding.

    The first calls compile, and allocate counters that all streams share. Later ones may need a larger workspace. Some
    tiles have other kernels for long batches, which the first fifty of the later calls load.
    """
    one = dense(1, 2, 2, 1, 1, 128, BF16, CAUSAL, features)

    def step(seed, longest, sync_mode):
        case = VarlenCombination(one, Lengths.drawn(seed, longest))
        leaves = {name: x.nan_to_num().requires_grad_() for name, x in on_gpu(case).items()}
        lengths, options, dout = case.lengths.args("cuda"), one.options(leaves), torch.randn_like(leaves["q"])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(sync_mode)
        try:
            out = cute_flash.attn_varlen(*(leaves[name] for name in "qkv"), **lengths, **options)
            return torch.autograd.grad(out, list(leaves.values()), dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for seed in range(1, 7):
        step(seed, 300, "default")
    for seed in range(150):
        if seed == 50:
            before = cache_info()
        assert all(x.isfinite().all() for x in step(seed, 700, "error"))
    after = cache_info()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


# A hanging kernel would block the GPU, so this runs in a separate process with a time limit.
DECREASING = """
import sys, torch, cute_flash
from tests.fakes.gpu import poisoned_memory

def ints(offsets):
    return torch.tensor(offsets, device="cuda", dtype=torch.int32)

right = [0, 1000, 1300, 1500]
wrong = ([0, 1000, 300, 1500], [0, 1400, 90, 1300, 200, 1500], [900, 0, 1500], [0, 1500, 0])
with cute_flash.use_kernels(sys.argv[1]), poisoned_memory():
    for head_dim, deterministic in ((64, True), (128, True), (256, True), (256, False)):
        q, k, v = (torch.randn(1500, h, head_dim, device="cuda").bfloat16().requires_grad_() for h in (4, 2, 2))
        for offsets in (*wrong, right):
            aligned = right if len(offsets) == 4 else offsets
            for cu_q, cu_k in ((offsets, aligned), (aligned, offsets), (offsets, offsets)):
                options = dict(causal=True, deterministic=deterministic, return_lse=True)
                out, lse = cute_flash.attn_varlen(q, k, v, ints(cu_q), ints(cu_k), **options)
                grads = torch.autograd.grad(out.float().sum(), (q, k, v))
                if offsets is right:
                    print(int(all(x.isfinite().all() and x.any() for x in (out, lse, *grads))))
                else:
                    print(int((lse == -torch.inf).all()), int(not any(x.any() for x in (out, *grads))))
# Few queries: keys are split among CTAs, which wait for each other.
q, k, v = (torch.randn(length, 2, 128, device="cuda").bfloat16() for length in (6, 20000, 20000))
cute_flash.attn_varlen(q, k, v, ints([0, 4, 2, 6]), ints([0, 15000, 300, 20000]))
torch.cuda.synchronize()
print("end")
"""


def test_decreasing_offsets_are_padding_and_hang_nothing(family):
    """Sequences would overlap. So all tokens count as tokens after the last sequence, and the kernels end."""
    command = [sys.executable, "-c", DECREASING, family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.split() == ["1"] * (4 * (4 * 3 * 2 + 3)) + ["end"]


def test_checks_read_offsets_before_the_launch():
    case = varlen(THREE, 2, 2, 128, BF16, CAUSAL)
    x, wrong = on_gpu(case), THREE.cu_k.clone().cuda()
    expected = case.attend(x)
    wrong[2] = wrong[1] - 1
    offsets = {"cu_seqlens_q": THREE.cu_q.cuda(), "cu_seqlens_k": wrong}
    with cute_flash.use_checks():
        found = case.attend(x)
        with pytest.raises(ValueError, match=r"cu_seqlens_k\[2\]=89 is less than cu_seqlens_k\[1\]=90"):
            cute_flash.attn_varlen(x["q"], x["k"], x["v"], **offsets)
        # The operator, as in a compiled function.
        with pytest.raises(ValueError, match="offsets may not decrease"), torch.autocast("cuda", dtype=torch.bfloat16):
            cute_flash.attn_varlen(x["q"], x["k"], x["v"], **offsets)
    assert all(map(torch.equal, found, expected))
    cute_flash.attn_varlen(x["q"], x["k"], x["v"], **offsets)
