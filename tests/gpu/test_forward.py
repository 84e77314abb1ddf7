"""The forward kernels of every family on a GPU against the fp64 oracle."""

import math
import subprocess
import sys

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.spec.band import Band
from tests import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

DTYPES = (torch.bfloat16, torch.float16)
CAUSAL = Band(None, 0)


def attend(q, k, v, band, **options):
    return cute_flash.attn(q, k, v, window=(band.left, band.right), return_lse=True, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("case", cases.GPU, ids=lambda case: case.id)
def test_against_the_oracle(case, dtype):
    q, k, v = cases.make_inputs(case, dtype, "cuda")
    out, lse = attend(q, k, v, case.band)
    cases.assert_is_attention(out, lse, q, k, v, case.band)


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("growth", (1.0, 30.0, -30.0))
@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
@pytest.mark.parametrize("band", (Band(), CAUSAL), ids=("full", "causal"))
def test_scores_that_grow_along_the_keys(dtype, growth, head_dim, band):
    """Rising, falling and steeply rising maxima: every path of the rescaling, and of a speculative row max."""
    case = cases.Case(1, 2, 2, 300, 1500, head_dim, band)
    q, k, v = cases.make_inputs(case, dtype, "cuda")
    k = (k * torch.linspace(1, 1 + abs(growth), 1500, device="cuda", dtype=dtype)[:, None]).to(dtype)
    k = k.flip(2).contiguous() if growth < 0 else k
    out, lse = attend(q, k, v, band)
    cases.assert_is_attention(out, lse, q, k, v, band)


@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
@pytest.mark.parametrize("num_hidden", (100, 300))
def test_keys_that_score_minus_infinity(head_dim, num_hidden):
    """Scores of -inf in full blocks and in a part of a block, which kernels visit before the first finite score."""
    q, k, v = cases.make_inputs(cases.Case(1, 2, 2, 200, 600, head_dim, Band()), torch.bfloat16, "cuda")
    q[..., 0] = 1.0
    k[:, :, -num_hidden:, 0] = -torch.inf
    out, lse = attend(q, k, v, Band())
    shown = slice(0, 600 - num_hidden)
    cases.assert_is_attention(out, lse, q, k[:, :, shown], v[:, :, shown], Band())


def test_outliers():
    case = cases.Case(2, 4, 4, 512, 512, 64, CAUSAL)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(x):
        hit = torch.rand(x.shape, device="cuda", generator=generator) < 1e-3
        return (x + hit * 10 * torch.randn(x.shape, device="cuda", generator=generator)).to(torch.bfloat16)

    q, k, v = (draw(x.float()) for x in cases.make_inputs(case, torch.bfloat16, "cuda"))
    out, lse = attend(q, k, v, CAUSAL)
    cases.assert_is_attention(out, lse, q, k, v, CAUSAL)


@pytest.mark.parametrize("scale", (-0.3, 0.0, 1e-3, 2.5))
def test_any_finite_scale(scale):
    case = cases.Case(1, 2, 1, 130, 200, 64, CAUSAL)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    out, lse = attend(q, k, v, CAUSAL, scale=scale)
    oracle, oracle_lse = reference.dense(q, k, v, CAUSAL, scale)
    low, _ = reference.dense_low_precision(q, k, v, CAUSAL, scale)
    cases.assert_close(out, lse, oracle, oracle_lse, low)


@pytest.mark.parametrize("band", cases.OTHER_WIDTH_BANDS, ids=str)
@pytest.mark.parametrize("widths", cases.OTHER_WIDTHS, ids=str)
def test_dv_other_than_d(widths, band):
    q, k, v = cases.other_width_inputs(widths, "cuda")
    for rows in (200, 3):
        out, lse = attend(q[:, :, :rows].contiguous(), k, v, band)
        assert out.shape == (2, 8, rows, widths[1])
        cases.assert_is_attention(out, lse, q[:, :, :rows], k, v, band)


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
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("kind", ("bshd", "one of qkv", "odd rows", "odd start", "last dim strided"))
def test_strides(kind):
    case = cases.Case(2, 4, 2, 150, 260, 128, CAUSAL)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    expected, expected_lse = attend(q, k, v, CAUSAL)
    moved = [strided(kind, x) for x in (q, k, v)]
    assert all(torch.equal(a, b) for a, b in zip(moved, (q, k, v), strict=True))
    out, lse = attend(*moved, CAUSAL)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert out.stride() == torch.empty_like(moved[0]).stride()


def test_expanded_keys_and_values():
    case = cases.Case(1, 4, 4, 100, 300, 64, CAUSAL)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    k, v = (x[:, :1].expand(3, 4, -1, -1) for x in (k, v))
    q = q.expand(3, -1, -1, -1)
    out, lse = attend(q, k, v, CAUSAL)
    cases.assert_is_attention(out, lse, q, k, v, CAUSAL)


def test_layouts_and_smaller_ranks():
    case = cases.Case(2, 4, 2, 150, 260, 128, CAUSAL)
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    expected = cute_flash.attn(q, k, v, causal=True)
    bshd = cute_flash.attn(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, layout="bshd")
    assert torch.equal(bshd.transpose(1, 2), expected)
    assert torch.equal(cute_flash.attn(q[:, 0], k[:, 0], v[:, 0], causal=True), expected[:, 0])
    assert torch.equal(cute_flash.attn(q[1, 3], k[1, 1], v[1, 1], causal=True), expected[1, 3])


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
    "case",
    [
        cases.Case(2, 8, 2, 1000, 1000, 128, CAUSAL),
        # More tiles than SMs: the assignment of tiles to CTAs differs from run to run.
        cases.Case(4, 16, 4, 2000, 1500, 64, CAUSAL),
        cases.Case(4, 16, 16, 1500, 1500, 128, Band(300, 100)),
        cases.Case(4, 16, 16, 1500, 1500, 256, Band()),
    ],
    ids=lambda case: case.id,
)
def test_same_input_same_bits(case):
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    first, first_lse = attend(q, k, v, case.band)
    for _ in range(20):
        out, lse = attend(q, k, v, case.band)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


# A hanging kernel would block the GPU, so this runs in a separate process with a time limit.
NAN_INPUTS = """
import sys, torch, cute_flash
q, k, v = (torch.randn(1, 4, 700, int(sys.argv[1]), device="cuda").bfloat16() for _ in range(3))
q[:, 0], k[:, 1], v[:, 2] = torch.nan, torch.nan, torch.nan
with cute_flash.use_kernels(sys.argv[2]):
    for causal in (False, True):
        out = cute_flash.attn(q, k, v, causal=causal)
        print(int(out[:, :3].isnan().all()), int(out[:, 3].isfinite().all()))
"""


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
def test_nan_stays_in_its_head_and_hangs_nothing(head_dim, family):
    command = [sys.executable, "-c", NAN_INPUTS, str(head_dim), family]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["1"] * 4


def test_empty():
    q, k, v = (torch.randn(2, 3, 5, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = attend(q, k[:, :, :0], v[:, :, :0], Band())
    assert (out == 0).all() and (lse == -math.inf).all()
    assert cute_flash.attn(q[:0], k[:0], v[:0]).shape == (0, 3, 5, 64)
    assert cute_flash.attn(q[:, :, :0], k, v).shape == (2, 3, 0, 64)
