"""The forward kernels of every family on a GPU: strides, large addresses, infinities and NaN, repeated calls."""

import math
import subprocess
import sys

import pytest
import torch

import cute_flash
from cute_flash.spec.band import Band
from tests import cases
from tests.cases import CAUSAL, FULL

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


def attend(q, k, v, band, **options):
    return cute_flash.attn(q, k, v, window=band.bounds, return_lse=True, **options)


@pytest.mark.parametrize(("head_dim", "num_hidden"), [(64, 100), (128, 300), (192, 100), (256, 300)])
def test_keys_that_score_minus_infinity(head_dim, num_hidden):
    """Scores of -inf in full blocks and in a part of a block, which kernels visit before the first finite score."""
    q, k, v = cases.make_inputs(cases.Case(1, 2, 2, 200, 600, head_dim), torch.bfloat16, "cuda")
    q[..., 0] = 1.0
    k[:, :, -num_hidden:, 0] = -torch.inf
    out, lse = attend(q, k, v, FULL)
    shown = slice(0, 600 - num_hidden)
    cases.assert_is_attention(out, lse, q, k[:, :, shown], v[:, :, shown], FULL)


def test_outliers():
    case = cases.Case(2, 4, 4, 512, 512, 64, CAUSAL)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(x):
        hit = torch.rand(x.shape, device="cuda", generator=generator) < 1e-3
        return (x + hit * 10 * torch.randn(x.shape, device="cuda", generator=generator)).to(torch.bfloat16)

    q, k, v = (draw(x.float()) for x in cases.make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = attend(q, k, v, CAUSAL)
    cases.assert_is_attention(out, lse, q, k, v, CAUSAL)


def strided(kind: str, x: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    batch, heads, seqlen, dim = x.shape
    if kind == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "one of qkv":
        qkv = torch.randn(batch, seqlen, 3, heads, dim, device="cuda").to(x.dtype)
        qkv[:, :, 1] = x.transpose(1, 2)
        return qkv[:, :, 1].transpose(1, 2)
    if kind == "odd rows":
        room = torch.randn(batch, heads, seqlen, dim + 3, device="cuda").to(x.dtype)
        room[..., :dim] = x
        return room[..., :dim]
    if kind == "odd start":
        room = torch.randn(x.numel() + 1, device="cuda").to(x.dtype)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)
    assert kind == "last dim strided"
    return x.mT.contiguous().mT


@pytest.mark.parametrize("kind", ("bshd", "one of qkv", "odd rows", "odd start", "last dim strided"))
def test_strides(kind):
    qkv = cases.make_inputs(cases.Case(2, 4, 2, 150, 260, 128, CAUSAL), torch.bfloat16, "cuda")
    expected, expected_lse = attend(*qkv, CAUSAL)
    moved = [strided(kind, x) for x in qkv]
    assert all(torch.equal(a, b) for a, b in zip(moved, qkv, strict=True))
    out, lse = attend(*moved, CAUSAL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert out.stride() == torch.empty_like(moved[0]).stride()


def test_layouts_smaller_ranks_and_expanded_tensors():
    q, k, v = qkv = cases.make_inputs(cases.Case(2, 4, 2, 150, 260, 128, CAUSAL), torch.bfloat16, "cuda")
    expected = cute_flash.attn(q, k, v, causal=True)
    bshd = cute_flash.attn(*(x.transpose(1, 2) for x in qkv), causal=True, layout="bshd")
    assert torch.equal(bshd.transpose(1, 2), expected)
    assert torch.equal(cute_flash.attn(q[:, 0], k[:, 0], v[:, 0], causal=True), expected[:, 0])
    assert torch.equal(cute_flash.attn(q[1, 3], k[1, 1], v[1, 1], causal=True), expected[1, 3])
    # All batches and heads read the same keys and values.
    q, (k, v) = q[:1].expand(3, -1, -1, -1), (x[:1, :1].expand(3, 4, -1, -1) for x in (k, v))
    cases.assert_is_attention(*attend(q, k, v, CAUSAL), q, k, v, CAUSAL)


def test_addresses_beyond_32_bits():
    """Rows of one head that lie 2^31 elements apart in a (B, S, H, D) tensor of 4.6 GB."""
    seqlen, heads, dim = 70_000, 256, 128
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    torch.use_deterministic_algorithms(False)  # no NaN fill of gigabytes
    room = torch.empty(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16)
    far = room[:, :, 254:].transpose(1, 2)
    assert far.stride(2) * (seqlen - 1) >= 2**31
    far.copy_(torch.randn(far.shape, device="cuda", dtype=torch.bfloat16))
    near = far.contiguous()
    q_far, q_near = far[:, :, -200:], near[:, :, -200:]
    out, lse = attend(q_far, far, far, CAUSAL)
    expected, expected_lse = attend(q_near, near, near, CAUSAL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    cases.assert_is_attention(out, lse, q_near, near, near, CAUSAL)
    # Two batches 2^31 elements apart in the same memory.
    apart = room.view(-1).as_strided((2, 1, 200, dim), (2**31, 200 * dim, dim, 1))
    apart.copy_(torch.randn(apart.shape, device="cuda", dtype=torch.bfloat16))
    close = apart.contiguous()
    assert torch.equal(cute_flash.attn(apart, apart, apart), cute_flash.attn(close, close, close))


def test_output_beyond_32_bits():
    """256 heads of 70,000 rows: an output of 4.6 GB in (B, S, H, D) order."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    torch.use_deterministic_algorithms(False)  # no NaN fill of gigabytes
    q = torch.empty(1, 70_000, 256, 128, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    kv = torch.randn(1, 1, 200, 128, device="cuda", dtype=torch.bfloat16)
    out = cute_flash.attn(q, kv, kv)
    assert out.stride() == q.stride() and out.stride(2) * (out.shape[2] - 1) >= 2**31
    for rows in (slice(0, 64), slice(-64, None)):
        # The warp has other rows, so rescaling happens at other blocks, which rounds differently.
        alone = cute_flash.attn(q[:, :, rows].contiguous(), kv, kv)
        torch.testing.assert_close(out[:, :, rows], alone, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (cases.Case(2, 8, 2, 1000, 1000, 128, CAUSAL), {}),
        # More tiles than SMs: the assignment of tiles to CTAs differs from run to run.
        (cases.Case(4, 16, 4, 2000, 1500, 64, CAUSAL), {}),
        (cases.Case(4, 16, 16, 1500, 1500, 128, Band(300, 100)), {}),
        (cases.Case(4, 16, 16, 1500, 1500, 256), {}),
        (cases.Case(4, 16, 4, 700, 500, 128, CAUSAL), {"softcap": 5.0, "alibi": 0.05, "return_max_logit": True}),
    ],
    ids=("few tiles", "d64", "window", "d256", "features"),
)
def test_same_input_same_bits(case, options):
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    if "alibi" in options:
        options = {**options, "alibi": torch.full((case.heads,), options["alibi"], device="cuda")}
    first = attend(q, k, v, case.band, **options)
    for _ in range(20):
        assert all(map(torch.equal, attend(q, k, v, case.band, **options), first))


# A hanging kernel would block the GPU, so this runs in a separate process with a time limit.
NAN_INPUTS = """
import sys, torch, cute_flash
with cute_flash.use_kernels(sys.argv[1]):
    for head_dim in (64, 96, 128, 192, 256):
        q, k, v = (torch.randn(1, 4, 700, head_dim, device="cuda").bfloat16() for _ in range(3))
        q[:, 0], k[:, 1], v[:, 2] = torch.nan, torch.nan, torch.nan
        for causal in (False, True):
            out = cute_flash.attn(q, k, v, causal=causal)
            print(int(out[:, :3].isnan().all()), int(out[:, 3].isfinite().all()))
"""


def test_nan_stays_in_its_head_and_hangs_nothing(family):
    command = [sys.executable, "-c", NAN_INPUTS, family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split() == ["1"] * 20


def test_empty():
    q, k, v = (torch.randn(2, 3, 5, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], FULL)
    assert (out == 0).all() and (lse == -math.inf).all()
    assert cute_flash.attn(q[:0], k[:0], v[:0]).shape == (0, 3, 5, 64)
    assert cute_flash.attn(q[:, :, :0], k, v).shape == (2, 3, 0, 64)
