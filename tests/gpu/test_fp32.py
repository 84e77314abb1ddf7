"""fp32 inputs on a GPU, which kernels split into fp16 pieces, against fp64 on the CPU and torch's fp32."""

import itertools

import pytest
import torch

import cute_flash
from tests import fp32_cases
from tests.covering import covering
from tests.definition import attention
from tests.gpu.captured import Captured
from tests.lengths import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory", "known_rng")]

MAX_ERROR = 4e-6  # relative to the largest element; measured up to 2.1e-6 for out


def results(case, tensors, dout, dlse):
    """out, lse and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out, lse = case.attend(leaves)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": x for name, x in zip(leaves, grads)}}


@pytest.mark.parametrize("case", fp32_cases.CASES, ids=lambda case: case.id)
def test_as_fp64(case):
    tensors = case.inputs("cuda")
    with torch.no_grad():
        out, lse = case.attend(tensors)
    dout, dlse = torch.randn_like(out), torch.where(lse.isfinite(), torch.randn_like(lse), 0.0)
    found = results(case, tensors, dout, dlse)
    doubles = {name: x.double().cpu() for name, x in tensors.items()}
    expected = results(case, doubles, dout.double().cpu(), dlse.double().cpu())
    assert found["out"].dtype == torch.float32
    for name, x in expected.items():
        mine, is_finite = found[name].double().cpu(), x.isfinite()
        assert torch.equal(mine[~is_finite], x[~is_finite])
        largest = x[is_finite].abs().max().item()
        error = (mine - x)[is_finite].abs().max().item() / max(largest, 1e-300)
        assert error <= MAX_ERROR, f"{name}: {error:.2e} of {largest:.2e}"


CALLS = list(itertools.product(["normal", "3 sigma", "outliers"], [64, 128], [False, True]))


@pytest.mark.parametrize(("kind", "head_dim", "causal"), covering(CALLS, tuple), ids=str)
def test_error_is_at_most_twice_that_of_torch(kind, head_dim, causal):
    """Largest errors of the output and the gradients beside those of fp32 matrix products, without TF32."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 2048, head_dim, device="cuda") for _ in range(4))
    if kind == "3 sigma":
        q, k, v = (3 * x for x in (q, k, v))
    if kind == "outliers":
        q, k, v = (torch.where(torch.rand_like(x) < 1e-3, 30 * x, x) for x in (q, k, v))
    exact = by_torch(*(x.double() for x in (q, k, v, dout)), causal)
    theirs = by_torch(q, k, v, dout, causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cute_flash.attn(*leaves, causal=causal)
    ours = out.detach(), *torch.autograd.grad(out, leaves, dout)
    for name, x, mine, other in zip(("out", "dq", "dk", "dv"), exact, ours, theirs, strict=True):
        errors = [(y.double() - x).abs().max().item() for y in (mine, other)]
        assert errors[0] <= 2 * errors[1] + 1e-6 * x.abs().max().item(), f"{name}: {errors}"
        if name == "out" and kind == "normal":
            assert errors[0] <= 1e-5


MODS = {
    "tanh": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "exp, log": lambda s, b, h, i, j: s - torch.log(1 + torch.exp(-s.abs())) + 0.3 * torch.exp2(-(i - j).abs() / 8.0),
    # The argument of sin is exact in fp32.
    "sin, cos": lambda s, b, h, i, j: s + torch.sin(i * 0.5 + j) * torch.cos(s),
    "sigmoid, sqrt": lambda s, b, h, i, j: s * torch.sigmoid(s) + torch.sqrt(s * s + 1) - torch.rsqrt(s * s + 2),
}


@pytest.mark.parametrize("magnitude", [1.0, 5.0])
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
def test_functions_of_mods_have_the_accuracy_of_fp32(mod, magnitude):
    assert_as_exact_as_torch(magnitude, {"score_mod": mod, "causal": True}, has_gradients=False)


@pytest.mark.parametrize("magnitude", [1.0, 4.0])
@pytest.mark.parametrize("softcap", [2.0, 30.0, 50.0])
@pytest.mark.parametrize("others", [{}, {"alibi": torch.tensor([0.3, 0.05])}], ids=["alone", "alibi"])
def test_softcap_has_the_accuracy_of_fp32(softcap, magnitude, others):
    """Also where tanh is nearly 1 for many scores."""
    others = {name: x.cuda() for name, x in others.items()}
    assert_as_exact_as_torch(magnitude, {"softcap": softcap, "causal": True, **others}, has_gradients=True)


def assert_as_exact_as_torch(magnitude, options, has_gradients):
    """Errors are at most three times those of torch in fp32, plus rounding."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 2, 200, 64, device="cuda") * magnitude for _ in range(4))

    def results(attend, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_(has_gradients) for x in (q, k, v)]
        out, lse = attend(*leaves)
        grads = torch.autograd.grad(out, leaves, dout.to(dtype)) if has_gradients else ()
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads)))

    found = results(lambda *x: cute_flash.attn(*x, **options, return_lse=True), torch.float32)
    theirs, exact = (results(lambda *x: attention(*x, options), dtype) for dtype in (torch.float32, torch.float64))
    for name, x in exact.items():
        errors = [(y[name].double() - x).abs().max().item() for y in (found, theirs)]
        assert errors[0] <= 3 * errors[1] + 1e-6 * x.abs().max().item(), f"{name}: {errors}"


def by_torch(q, k, v, dout, causal):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def test_graph_and_deterministic_gradients():
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", requires_grad=True) for _ in range(3))

    def step():
        out = cute_flash.attn(q, k, v, causal=True, deterministic=True)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = step()
    captured = Captured.of(step)
    for _ in range(3):
        assert all(map(torch.equal, captured.replay(), expected))


@pytest.mark.parametrize("garbage", [torch.inf, 1e30, torch.nan])
def test_rows_of_no_sequence_have_no_influence(garbage):
    """Padding and unused keys may be uninitialized. A huge value there must not reduce the precision of other rows."""
    lengths = Lengths([100, 0, 257, 31], [90, 4, 300, 40], used=[90, 2, 211, 0], padding=(9, 130))
    total_q, total_k = lengths.totals
    q, k, v = (torch.randn(n, 4, 64, device="cuda") for n in (total_q, total_k, total_k))
    unused = lengths.unused_keys().cuda()
    clean = [q, k.masked_fill(unused[:, None, None], 0.0), v.masked_fill(unused[:, None, None], 0.0)]
    dirty = [x.clone() for x in clean]
    dirty[0][-9:], dirty[1][unused], dirty[2][unused] = garbage, garbage, garbage
    results = []
    for tensors in (clean, dirty):
        leaves = [x.requires_grad_() for x in tensors]
        out = cute_flash.attn_varlen(*leaves, **lengths.args("cuda"), causal=True, deterministic=True)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    assert all(map(torch.equal, *results))


def test_a_sequence_does_not_depend_on_the_others():
    """The pieces of a sequence are relative to its own norms."""
    lengths = Lengths([100, 31, 257], [90, 40, 300])
    q, k, v = (torch.randn(n, 4, 64, device="cuda") for n in (*lengths.totals, lengths.totals[1]))
    (q_rows, k_rows), *_ = lengths.spans()
    expected = cute_flash.attn_varlen(q, k, v, **lengths.args("cuda"))
    q[q_rows], k[k_rows], v[k_rows] = 1e15 * q[q_rows], 1e-15 * k[k_rows], 1e20 * v[k_rows]
    found = cute_flash.attn_varlen(q, k, v, **lengths.args("cuda"))
    assert torch.equal(found[100:], expected[100:])
    torch.testing.assert_close(found[:100] / 1e20, expected[:100], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_keys_that_are_not_finite_do_not_scale_their_head(value):
    """Query tiles that do not see such a key keep their bits."""
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda") for _ in range(3))
    k[..., -1, :] = 0.0
    expected = cute_flash.attn(q, k, v, causal=True)
    k[0, 0, -1, 5] = value
    found = cute_flash.attn(q, k, v, causal=True)
    assert torch.equal(found[:, :, :384], expected[:, :, :384]) and found[0, 0, -1].isnan().all()


def test_nan_stays_in_its_head():
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda") for _ in range(3))
    expected = cute_flash.attn(q, k, v)
    k[0, 1, 7, 3] = torch.nan
    found = cute_flash.attn(q, k, v)
    assert found[0, 1].isnan().all()
    found[0, 1] = expected[0, 1]
    assert torch.equal(found, expected)
