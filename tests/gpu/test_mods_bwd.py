"""Gradients with score_mod, mask_mod, bias and block masks on a GPU, against the fp64 oracle, the CPU path and
torch's FlexAttention.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import cute_flash
from cute_flash.spec.arch import detect
from tests import mod_cases, mod_gradients
from tests.gpu.captured import Captured
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


def test_sampled_cases(family, record_property):
    """Many calls; all failures are reported at the end."""
    count, refused, failed = 0, 0, []
    for case, kernels in mod_gradients.chosen(detect(0), family, "cuda"):
        if not kernels:
            refused += 1
            continue
        count += 1
        try:
            mod_gradients.assert_gradients(case)
        except AssertionError as error:
            failed.append(f"{case.id}: {error}")
    ran = f"{family}: {count} gradients, {refused} refused, {len(failed)} failed"
    print(ran)
    record_property("mod gradients", ran)
    assert not failed, "\n".join([ran, *failed[:20]])


def has_kernel(case, family, deterministic=False):
    try:
        return bool(mod_gradients.keys_of(replace(case, device="cpu"), detect(0), family, deterministic))
    except cute_flash.UnsupportedError:
        return False


@pytest.mark.parametrize("case", mod_cases.varlen_cases(), ids=lambda case: case.id)
def test_varlen_cases(case, family):
    """Odd lengths, empty sequences, padding, grouped heads; rows that belong to no sequence hold NaN."""
    if not has_kernel(case, family):
        # Long score_mods.
        assert family == "sm90" and case.kind.score in ("gated", "hiding")
        with pytest.raises(cute_flash.UnsupportedError, match="the gradient of attn_varlen with score_mod"):
            mod_gradients.assert_gradients(case)
        return
    found = mod_gradients.assert_gradients(case)
    real, unused = sum(case.lengths.queries), case.lengths.unused_keys().cuda()
    assert not found["q"][real:].any(), "dq of padding"
    assert not found["k"][unused].any() and not found["v"][unused].any(), "dk, dv of keys that belong to no sequence"


def test_a_table_by_sequence_gets_nothing_from_other_sequences(family):
    """NaN in one sequence reaches its own entry of the table, and no other."""
    lengths = Lengths([100, 0, 257, 31], [90, 4, 300, 0])
    q, k, v = (torch.randn(n, 2, 64, device="cuda").bfloat16() for n in (388, 394, 394))
    table = torch.randn(4, 2, device="cuda")

    def grads(dout):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, table)]
        gate = leaves[3]
        options = {**lengths.args("cuda"), "score_mod": lambda score, b, h, q, kv: score * gate[b, h]}
        out = cute_flash.attn_varlen(*leaves[:3], **options)
        return torch.autograd.grad(out, leaves, dout)

    dout = torch.randn_like(q)
    *_, expected = grads(dout)
    poisoned = dout.clone()
    poisoned[100:] = torch.nan
    dq, dk, dv, found = grads(poisoned)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    assert found[2].isnan().all() and expected[0].any() and expected[2].any()
    # Sequences without queries, or without keys.
    assert not expected[1].any() and not expected[3].any() and not found[1].any() and not found[3].any()
    assert all(x[:90].isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("case", mod_gradients.deterministic_cases("cuda"), ids=lambda case: case.id)
def test_deterministic_gradients_have_the_same_bits(case, family):
    if not has_kernel(case, family, deterministic=True):
        # Gradients of captured tensors, and long score_mods.
        assert family == "sm90" and case.kind.score
        with pytest.raises(cute_flash.UnsupportedError, match="deterministic"):
            mod_gradients.assert_gradients(case, deterministic=True)
        return
    mod_gradients.assert_gradients(case, deterministic=True)
    leaves, douts = mod_gradients.leaves_of(case), mod_gradients.douts_of(case)
    first = None
    for _ in range(5):
        outs = case.attend(*(leaves[name] for name in "qkv"), deterministic=True)
        found = mod_gradients.gradients(outs, douts, leaves)
        first = first or found
        assert all(torch.equal(found[name], first[name]) for name in leaves)


@pytest.mark.parametrize("index", [0, 1, 2, 6])
def test_as_flex_attention(index, family):
    """The same mods, within the rounding errors of 16-bit products and sums."""
    case = mod_cases.Case(mod_cases.KINDS[index], mod_cases.Sizes(2, 4, 4, 384, 384), 2)
    leaves, (dout, _) = mod_gradients.leaves_of(case), mod_gradients.douts_of(case)
    options, names = case.options, [name for name in leaves if name in "qkv" or name.startswith("capture")]
    qkv = [leaves[name] for name in "qkv"]
    score_mod, mask_mod = options.get("score_mod"), options.get("mask_mod")
    right = options["window"][1]
    if right is not None:
        band = lambda b, h, q, kv: kv <= q + right  # noqa: E731
        seen = band if mask_mod is None else lambda b, h, q, kv: band(b, h, q, kv) & mask_mod(b, h, q, kv)
    else:
        seen = mask_mod
    block_mask = None if seen is None else create_block_mask(seen, 2, 4, 384, 384, device="cuda")
    theirs = flex_attention(*(x.float() for x in qkv), score_mod=score_mod, block_mask=block_mask)
    of = [leaves[name] for name in names]
    expected = torch.autograd.grad((theirs * dout.float()).sum(), of)
    mine = cute_flash.attn(*qkv, **options)
    found = torch.autograd.grad((mine * dout).sum(), of)
    for name, x, y in zip(names, found, expected, strict=True):
        size = y.double().square().mean().sqrt().item()
        error = (x.double() - y.double()).square().mean().sqrt().item()
        assert error <= 0.02 * size + 1e-4, f"d{name}: {error:.3e} of {size:.3e}"


def test_rows_without_keys(family):
    """dq and the gradient of the bias are exactly 0 in rows without visible keys."""
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    bias = torch.randn(1, 2, 200, 200, device="cuda", requires_grad=True)
    out = cute_flash.attn(q, k, v, bias=bias, mask_mod=lambda b, h, q, kv: (q % 3 > 0) & (kv < 150))
    dq, dk, dv, dbias = torch.autograd.grad(out.float().square().sum(), (q, k, v, bias))
    assert not dq[:, :, ::3].any() and not dbias[:, :, ::3].any() and not dbias[..., 150:].any()
    assert not dk[:, :, 150:].any() and not dv[:, :, 150:].any()
    assert dq[:, :, 1::3].any() and dbias.isfinite().all()


def test_captured_training_step(family):
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    table = torch.randn(4, 64, device="cuda", requires_grad=True)
    mask = cute_flash.masks.causal()
    block_mask = cute_flash.BlockMask.of(mask, (2, 4, 300, 300), device="cuda")

    def score_mod(score, b, h, q, kv):
        return score + table[h, (q - kv).abs()]

    def step():
        out = cute_flash.attn(q, k, v, score_mod=score_mod, mask_mod=mask, block_mask=block_mask)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v, table))

    expected, captured = step(), Captured.of(step)
    for _ in range(2):
        for x, y in zip(captured.replay(), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item())


def test_captured_varlen_training_step(family):
    """A graph of a step with a learned table; offsets are written in place between replays."""
    batches = Lengths([200, 0, 56], [150, 30, 76]), Lengths([1, 250, 5], [1, 255, 0])
    q, k, v = (torch.randn(256, 4, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    table = torch.randn(4, 64, device="cuda", requires_grad=True)
    cu_q, cu_k = batches[0].cu_q.cuda(), batches[0].cu_k.cuda()

    def score_mod(score, b, h, q, kv):
        return score + table[h, (q - kv).abs()]

    def step():
        out = cute_flash.attn_varlen(q, k, v, cu_q, cu_k, score_mod=score_mod, causal=True)
        return torch.autograd.grad(out.float().square().sum(), (q, k, v, table))

    captured = Captured.of(step)
    for lengths in batches:
        cu_q.copy_(lengths.cu_q)
        cu_k.copy_(lengths.cu_k)
        replayed = [x.clone() for x in captured.replay()]
        for x, y in zip(replayed, step(), strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item() + 1e-6)


@pytest.mark.parametrize("shape", [(4, 300, 300), (3, 1, 1, 300), (1, 300)], ids=str)
def test_bias_of_varlen_batches(shape, family):
    """The bias of each sequence's own positions, with its gradient, as on the CPU in fp64."""
    lengths = Lengths([100, 300, 31], [90, 257, 300])
    sizes = ((431, 4), (647, 2), (647, 2))
    tensors = [torch.randn(*size, 64, device="cuda").bfloat16() for size in sizes]
    tensors.append(torch.randn(shape, device="cuda"))
    dout = torch.randn(431, 4, 64, device="cuda").bfloat16()

    def gradients(device, dtype):
        leaves = [x.to(device, dtype or x.dtype).requires_grad_() for x in tensors]
        q, k, v, bias = leaves
        bounds = {"max_seqlen_q": 300, "max_seqlen_k": 300}
        options = {**lengths.args(device), **bounds, "bias": bias, "causal": True}
        out = cute_flash.attn_varlen(q, k, v, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(device, dtype or dout.dtype))]

    for found, expected in zip(gradients("cuda", None), gradients("cpu", torch.float64), strict=True):
        error = (found.double().cpu() - expected).abs().max().item()
        assert error <= 0.02 * expected.abs().max().item()


WINDOWS = ((None, 0), (100, 30), (None, 5), (64, None), (None, None))
SIZES = (
    (2, 4, 4, 512, 512), (1, 4, 2, 1000, 1000), (2, 2, 1, 256, 1024), (1, 2, 2, 1024, 256), (3, 1, 1, 1024, 256),
    (2, 4, 2, 64, 640),
)  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
def test_the_gradient_of_a_bias_is_written_everywhere(head_dim, size, window, family):
    """Blocks that a band excludes have a gradient of 0; K/V tiles without queries, grouped heads, shared biases."""
    batch, heads, heads_kv, sq, sk = size
    generator = torch.Generator("cuda").manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, dout = normal(batch, heads, sq, head_dim), normal(batch, heads, sq, head_dim).detach()
    k, v = normal(batch, heads_kv, sk, head_dim), normal(batch, heads_kv, sk, head_dim)
    for bias_batch, bias_heads in ((batch, heads), (1, heads), (batch, 1), (1, 1)):
        bias = normal(bias_batch, bias_heads, sq, sk)
        scores = torch.einsum("bhqd,bhkd->bhqk", q.double(), k.double().repeat_interleave(heads // heads_kv, 1))
        scores = scores * head_dim**-0.5 + bias.double()
        offset = torch.arange(sk, device="cuda")[None] - torch.arange(sq, device="cuda")[:, None] - (sk - sq)
        left, right = window
        hidden = torch.zeros_like(offset, dtype=torch.bool)
        hidden |= offset < -left if left is not None else False
        hidden |= offset > right if right is not None else False
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("bhqk,bhkd->bhqd", weights, v.double().repeat_interleave(heads // heads_kv, 1))
        leaves = q, k, v, bias
        expected = torch.autograd.grad(out, leaves, dout.double())
        found = torch.autograd.grad(cute_flash.attn(q, k, v, bias=bias, window=window), leaves, dout)
        for x, y in zip(found, expected, strict=True):
            assert (x - y).abs().max() <= 0.02 * y.abs().max()
        assert not found[3][..., hidden].any()
