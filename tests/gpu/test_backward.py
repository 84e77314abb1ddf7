"""The gradients of `attn` on a GPU against those of the fp64 oracle."""

import pytest
import torch

import cute_flash
from cute_flash import reference
from cute_flash.band import Band
from tests import cases

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("everywhere", "poisoned_memory")]

DTYPES = (torch.bfloat16, torch.float16)
CAUSAL = Band(None, 0)
CASES = [case for case in cases.GPU if case.seqlen_q and case.seqlen_k]
DETERMINISTIC = (cases.Case(2, 8, 2, 1000, 1000, 64), cases.Case(1, 4, 4, 3000, 5000, 128))


@pytest.fixture
def everywhere(family, monkeypatch):
    """The family for autograd's threads too, which do not see `use_kernels`."""
    monkeypatch.setenv("CUTE_FLASH_KERNELS", family)


def gradients(attend, inputs, dout, dlse):
    """Of `attend(q, k, v) -> (out, lse)`; rows without keys have no LSE to speak of."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    total = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        visible = torch.isfinite(lse)
        total = total + (lse.masked_fill(~visible, 0.0) * dlse.to(lse.dtype) * visible).sum()
    total.backward()
    return [x.grad for x in leaves]


def check(case, dtype, with_lse=False, turn=lambda x: x):
    q, k, v = (turn(x) for x in cases.make_inputs(case, dtype, "cuda"))
    generator = torch.Generator("cuda").manual_seed(7)
    dout = torch.randn(q.shape, generator=generator, device="cuda").to(dtype)
    dlse = torch.randn(q.shape[:3], generator=generator, device="cuda") if with_lse else None
    window = (case.band.left, case.band.right)
    mine = gradients(lambda *x: cute_flash.attn(*x, window=window, return_lse=True), (q, k, v), dout, dlse)
    wide = (x.double() for x in (q, k, v))
    exact = gradients(lambda *x: reference.dense(*x, case.band), wide, dout, dlse)
    rough = gradients(lambda *x: reference.dense_low_precision(*x, case.band), (q, k, v), dout, None)
    for name, value, oracle, low in zip("qkv", mine, exact, rough, strict=True):
        assert torch.isfinite(value).all()
        if not oracle.any():
            # One visible key: dS = P (dP - D) is 0, of two sums in different orders.
            assert value.abs().max() < 1e-4 * dout.abs().max()
            continue
        cases.assert_error_within(f"d{name}", value, oracle, torch.nan_to_num(low))


def assert_roughly(value, expected):
    torch.testing.assert_close(value, expected, rtol=0.05, atol=0.02 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_against_the_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(100, 30)), ids=str)
def test_through_the_lse(band):
    check(cases.Case(2, 4, 2, 200, 333, 64, band), torch.bfloat16, with_lse=True)


def test_memory_as_bshd():
    case = cases.Case(2, 4, 2, 300, 200, 128, CAUSAL)
    check(case, torch.bfloat16, turn=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("scale", (-0.3, 0.05))
def test_scale(scale):
    q, k, v = cases.make_inputs(cases.Case(1, 2, 1, 150, 200, 64, Band()), torch.bfloat16, "cuda")
    dout = torch.randn_like(q)
    mine = gradients(lambda *x: cute_flash.attn(*x, scale=scale, return_lse=True), (q, k, v), dout, None)
    wide = (x.double() for x in (q, k, v))
    exact = gradients(lambda *x: reference.dense(*x, Band(), scale), wide, dout, None)
    for value, oracle in zip(mine, exact, strict=True):
        torch.testing.assert_close(value.double(), oracle, rtol=0.05, atol=0.02 * oracle.abs().max().item())


def test_expanded_and_strided_output_gradients():
    """A sum's gradient has strides of 0; a transposed output's has other ones."""
    q, k, v = cases.make_inputs(cases.Case(2, 4, 2, 150, 200, 64, CAUSAL), torch.bfloat16, "cuda")
    for turn in (
        lambda x: x.sum(),
        lambda x: (x.transpose(1, 2).contiguous() * 2).sum(),
        lambda x: x.mT.cos().sum(),
    ):
        grads = []
        for attend, leaves in (
            (lambda *x: cute_flash.attn(*x, causal=True), (q, k, v)),
            (lambda *x: reference.dense(*x, CAUSAL)[0], (q.double(), k.double(), v.double())),
        ):
            leaves = [x.detach().clone().requires_grad_() for x in leaves]
            grads.append(torch.autograd.grad(turn(attend(*leaves)), leaves))
        for value, oracle in zip(*grads, strict=True):
            torch.testing.assert_close(
                value.double(), oracle, rtol=0.05, atol=0.02 * oracle.abs().max().item()
            )


def test_rows_without_keys_have_no_gradient():
    inputs = cases.make_inputs(cases.Case(1, 2, 1, 300, 60, 64, CAUSAL), torch.bfloat16, "cuda")
    q, k, v = (x.requires_grad_() for x in inputs)
    cute_flash.attn(q, k, v, causal=True).sum().backward()
    assert not q.grad[:, :, :240].any()


def test_compiled_training_step_equals_eager():
    inputs = cases.make_inputs(cases.Case(2, 4, 2, 256, 256, 64, CAUSAL), torch.bfloat16, "cuda")

    def step(q, k, v):
        return cute_flash.attn(q, k, v, causal=True).float().square().mean()

    grads = []
    for function in (step, torch.compile(step, fullgraph=True)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        grads.append(torch.autograd.grad(function(*leaves), leaves))
    for eager, compiled in zip(*grads, strict=True):
        # dQ is added in no certain order, and the compiled mean is another one.
        torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0.02 * eager.abs().max().item())


def test_checkpointed_training_step():
    from torch.utils.checkpoint import checkpoint

    inputs = cases.make_inputs(cases.Case(1, 4, 4, 200, 200, 128, CAUSAL), torch.bfloat16, "cuda")

    def attend(q, k, v):
        return cute_flash.attn(q, k, v, causal=True)

    grads = []
    for function in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        grads.append(torch.autograd.grad(function(*leaves).float().square().sum(), leaves))
    for once, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, once, rtol=0.02, atol=0.01 * once.abs().max().item())


def test_captured_training_step():
    """Replayed with new inputs, a graph of forward and backward gives their gradients."""
    shape = cases.Case(2, 4, 2, 256, 320, 64, CAUSAL)
    leaves = [x.requires_grad_() for x in cases.make_inputs(shape, torch.bfloat16, "cuda")]

    def step():
        return torch.autograd.grad(cute_flash.attn(*leaves, causal=True).float().square().sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for replayed, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(replayed, expected, rtol=0.02, atol=0.01 * expected.abs().max().item())


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(200, 100)), ids=str)
@pytest.mark.parametrize(
    "case", (cases.Case(2, 8, 2, 1000, 1000, 64), cases.Case(1, 4, 4, 3000, 5000, 128)), ids=str
)
def test_deterministic_gradients_have_the_same_bits(case, band, family):
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    dout = torch.randn_like(inputs[0])
    window = (band.left, band.right)
    first = None
    for _ in range(50):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = cute_flash.attn(*leaves, window=window, deterministic=True)
        if family == "sm80":
            with pytest.raises(cute_flash.UnsupportedError, match="deterministic"):
                out.backward(dout)
            return
        grads = torch.autograd.grad(out, leaves, dout)
        first = grads if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(grads, first, strict=True))
    plain = torch.autograd.grad(cute_flash.attn(*leaves, window=window), leaves, dout)
    for value, expected in zip(first, plain, strict=True):
        assert_roughly(value, expected)


def test_torch_asks_for_deterministic_gradients(family):
    if family == "sm80":
        pytest.skip("no deterministic gradients by mma.sync")
    inputs = cases.make_inputs(cases.Case(1, 2, 2, 4000, 4000, 64), torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(True)
    try:
        grads = []
        for _ in range(5):
            leaves = [x.detach().requires_grad_() for x in inputs]
            grads.append(torch.autograd.grad(cute_flash.attn(*leaves).float().square().sum(), leaves))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for again in grads[1:] for a, b in zip(again, grads[0], strict=True))
