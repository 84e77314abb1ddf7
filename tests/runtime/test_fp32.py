"""fp32 calls on a fake GPU: launched kernels, their arguments, and results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_flash.reference import cpu
from cute_flash.runtime import launcher
from cute_flash.runtime.gpu import use_gpu
from cute_flash.spec.args import AttentionArgs
from tests.fakes.gpu import FakeGpu
from tests.lengths import Lengths

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FEATURES = {
    "plain": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 5, "window_right": 3},
    "chunk": {"window_right": 0, "attention_chunk": 12},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": torch.linspace(0.1, 1, 4)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "dropout": {"dropout": 0.3, "rng": torch.tensor([7, 9])},
    "max_logit": {"return_max_logit": True},
    "bias": {"bias": torch.linspace(0, 1, 40 * 50).reshape(1, 1, 40, 50)},
}


def inputs(head_dim: int, head_dim_v: int | None = None, varlen: Lengths | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 4, 40), (2, 2, 50), (2, 2, 50)) if varlen is None else ((60, 4), (71, 2), (71, 2))
    widths = head_dim, head_dim, head_dim_v or head_dim
    return [torch.randn(*size, width, generator=generator) for size, width in zip(sizes, widths)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("name", FEATURES)
def test_as_on_the_cpu(arch: str, name: str) -> None:
    q, k, v = inputs(64)
    check(arch, q, k, v, AttentionArgs(scale=0.2, **FEATURES[name]))


@pytest.mark.parametrize("head_dim", [8, 40, 96, 128])
def test_head_dims(head_dim: int) -> None:
    check("sm_90", *inputs(head_dim), AttentionArgs(scale=0.2))
    check("sm_90", *inputs(64, head_dim), AttentionArgs(scale=-0.2, window_right=0))


def test_varlen() -> None:
    lengths = Lengths([20, 0, 40], [30, 11, 30])
    for options in ({}, {"window_right": 0, "softcap": 2.0}):
        check("sm_90", *inputs(64, varlen=lengths), AttentionArgs(scale=0.2, **options, **lengths.args()))


def test_an_outlier_has_a_head_of_its_own() -> None:
    """An outlier affects only its own head, because pieces are relative to the norm of the head."""
    q, k, v = inputs(64)
    q[0, 0] *= 1e15
    k[0, 0] *= 1e-15
    v[1, 1] *= 1e20
    check("sm_90", q, k, v, AttentionArgs(scale=0.2))


@pytest.mark.parametrize("garbage", [torch.inf, 1e30, torch.nan])
def test_rows_of_no_sequence_have_no_influence(garbage: float) -> None:
    """Padding and unused keys may be uninitialized. A huge value there must not reduce the precision of other rows."""
    lengths = Lengths([20, 0, 38], [30, 11, 27], used=[30, 5, 20])
    q, k, v = inputs(64, varlen=lengths)
    q[58:], k[68:], v[68:] = garbage, garbage, garbage
    k[35:41], v[61:68] = garbage, garbage
    args = AttentionArgs(scale=0.2, window_right=0, **lengths.args())
    with use_gpu(FakeGpu("sm_90")):
        out, _, _ = launcher.forward(q, k, v, args)
    clean = [x.nan_to_num(0, 0, 0).where(x.abs() < 1e20, 0.0) for x in (q, k, v)]
    expected, _, _ = cpu.forward(*(x.double() for x in clean), args)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_a_sequence_has_norms_of_its_own() -> None:
    lengths = Lengths([20, 0, 40], [30, 11, 30])
    q, k, v = inputs(64, varlen=lengths)
    q[:20] *= 1e15
    k[:30] *= 1e-15
    v[41:] *= 1e20
    out, expected = [], []
    args = AttentionArgs(scale=0.2, **lengths.args())
    with use_gpu(FakeGpu("sm_90")):
        out = launcher.forward(q, k, v, args)[0].double()
    expected = cpu.forward(q.double(), k.double(), v.double(), args)[0]
    for rows in (slice(0, 20), slice(20, 60)):
        scale = expected[rows].abs().max()
        torch.testing.assert_close(out[rows] / scale, expected[rows] / scale, **CLOSE)


def check(arch: str, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> None:
    """Compare results and gradients with the CPU in fp64; only fp32 kernels may be launched."""
    with use_gpu(FakeGpu(arch)) as gpu:
        out, lse, max_logit = launcher.forward(q, k, v, args)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        found = launcher.backward(dout, dlse, q, k, v, out, lse, args)
    kernels = {launch.kernel for launch in gpu.launches if not launch.kernel.startswith("varlen_scheduler")}
    of_backward = {"split_fp32_bwd", "bwd_preprocess_fp32", "bwd_sm80_fp32", "bwd_postprocess_sm80"}
    assert kernels == {"split_fp32_fwd", "fwd_sm80_fp32"} | of_backward
    doubles = args._replace(
        **{
            name: x.double()
            for name, x in args._asdict().items()
            if name in ("alibi", "sinks", "bias") and x is not None
        }
    )
    expected = cpu.forward(q.double(), k.double(), v.double(), doubles)
    pairs = list(zip((out, lse, max_logit), expected))
    grads = cpu.backward(dout.double(), dlse.double(), *(x.double() for x in (q, k, v)), *expected[:2], doubles)
    pairs += [*zip(found[:3], grads[:3]), *zip(found[3], grads[3])]
    for mine, theirs in pairs:
        if mine is not None:
            scale = theirs[theirs.isfinite()].abs().max().item()
            torch.testing.assert_close(mine.double() / scale, theirs.double() / scale, **CLOSE)
