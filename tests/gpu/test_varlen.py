"""`attn_varlen` on a GPU: a sequence depends on no other sequence; jagged tensors; new lengths need no host work."""

import pytest
import torch

import cute_flash
from cute_flash.jit.compile import cache_info
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

    The first calls compile, and allocate counters that all streams share. Later ones may need a larger workspace.
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
    before = cache_info()
    for seed in range(100):
        assert all(x.isfinite().all() for x in step(seed, 700, "error"))
    after = cache_info()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)
