"""The gradients of `attn` on a GPU against those of the fp64 oracle."""

import pytest
import torch

import cute_flash
from cute_flash.spec.band import Band
from tests import cases
from tests.gpu.captured import Captured
from tests.gradients import assert_gradients, gradients, weighted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]

DTYPES = (torch.bfloat16, torch.float16)
CAUSAL = Band(None, 0)


def check(case, dtype, with_lse=False, turn=lambda x: x, scale=None):
    inputs = tuple(turn(x) for x in cases.make_inputs(case, dtype, "cuda"))
    generator = torch.Generator("cuda").manual_seed(7)
    dout = torch.randn(inputs[0].shape, generator=generator, device="cuda")
    dlse = torch.randn(inputs[0].shape[:3], generator=generator, device="cuda") if with_lse else None
    options = {"window": case.band.bounds, "scale": scale, "return_lse": True}
    assert_gradients(lambda *x: cute_flash.attn(*x, **options), inputs, case.band, weighted(dout, dlse), scale)


def check_widths(widths, band, keys, with_lse):
    inputs = cases.other_width_inputs(widths, "cuda", keys)
    generator = torch.Generator("cuda").manual_seed(7)
    dout = torch.randn(2, 8, 200, widths[1], generator=generator, device="cuda")
    dlse = torch.randn(2, 8, 200, generator=generator, device="cuda") if with_lse else None
    options = {"window": band.bounds, "return_lse": True}
    assert_gradients(lambda *x: cute_flash.attn(*x, **options), inputs, band, weighted(dout, dlse))


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("case", cases.GPU, ids=lambda case: case.id)
def test_against_the_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("band", cases.OTHER_WIDTH_BANDS, ids=str)
@pytest.mark.parametrize("widths", cases.OTHER_WIDTHS, ids=str)
def test_dv_other_than_d(widths, band):
    check_widths(widths, band, keys=333, with_lse=True)


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(200, None), Band(300, 100)), ids=str)
@pytest.mark.parametrize("widths", ((128, 128), (104, 128), (128, 72)), ids=str)
def test_more_than_512_keys(widths, band):
    """The mma.sync backward has another tile there at D = 128."""
    check_widths(widths, band, keys=700, with_lse=False)


@pytest.mark.parametrize("band", (Band(), CAUSAL, Band(100, 30)), ids=str)
def test_through_the_lse(band):
    check(cases.Case(2, 4, 2, 200, 333, 64, band), torch.bfloat16, with_lse=True)


def test_memory_as_bshd():
    case = cases.Case(2, 4, 2, 300, 200, 128, CAUSAL)
    check(case, torch.bfloat16, turn=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))


@pytest.mark.parametrize("heads_kv", (16, 4))
@pytest.mark.parametrize("seqlen", (1000, 1100), ids=lambda n: f"s{n}")
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_many_tiles_that_add_to_the_same_rows(head_dim, causal, seqlen, heads_kv, family):
    """CTAs claim blocks of dQ in any order; every order gives the gradients of `deterministic=True`.

    Above head dim 128 they claim only up to 1024 queries.
    """
    generator = torch.Generator("cuda").manual_seed(3)
    shapes = [(8, heads, seqlen, head_dim) for heads in (16, heads_kv, heads_kv, 16)]
    *qkv, dout = (torch.randn(x, generator=generator, device="cuda", dtype=torch.bfloat16) for x in shapes)
    for x in qkv:
        x.requires_grad_()
    expected = torch.autograd.grad(cute_flash.attn(*qkv, causal=causal, deterministic=True), qkv, dout)
    out = cute_flash.attn(*qkv, causal=causal)
    for _ in range(10):
        found = torch.autograd.grad(out, qkv, dout, retain_graph=True)
        for x, y in zip(found, expected, strict=True):
            # fp32 sums in another order, rounded to bf16.
            assert (x - y).abs().max() <= 2**-7 * y.abs().max()


@pytest.mark.parametrize("scale", (-0.3, 0.05))
def test_scale(scale):
    check(cases.Case(1, 2, 1, 150, 200, 64, Band()), torch.bfloat16, scale=scale)


LOSSES = {
    "strides of 0": lambda out, lse: out.sum(),
    "transposed": lambda out, lse: (out.transpose(1, 2).contiguous() * 2).sum(),
    "last dimension strided": lambda out, lse: out.mT.contiguous().cos().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_strides_of_the_output_gradient(loss):
    inputs = cases.make_inputs(cases.Case(2, 4, 2, 150, 200, 64, CAUSAL), torch.bfloat16, "cuda")
    assert_gradients(lambda *x: cute_flash.attn(*x, causal=True, return_lse=True), inputs, CAUSAL, loss)


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
        # dQ is accumulated in no fixed order, and the compiled mean rounds differently.
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

    captured = Captured.of(step)
    with torch.no_grad():
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf))
    for _ in range(3):
        captured.replay()
    for replayed, expected in zip(captured.results, step(), strict=True):
        torch.testing.assert_close(replayed, expected, rtol=0.02, atol=0.01 * expected.abs().max().item())


@pytest.mark.parametrize("case", cases.DETERMINISTIC, ids=lambda case: case.id)
def test_deterministic_gradients_have_the_same_bits(case):
    inputs = cases.make_inputs(case, torch.bfloat16, "cuda")
    loss = weighted(torch.randn_like(inputs[0]))
    options = {"window": case.band.bounds, "return_lse": True}

    def attend(*x):
        return cute_flash.attn(*x, deterministic=True, **options)

    first = gradients(attend, inputs, loss)
    for _ in range(50):
        again = gradients(attend, inputs, loss)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert_gradients(attend, inputs, case.band, loss)
    # By default the order of additions is not fixed.
    assert_gradients(lambda *x: cute_flash.attn(*x, **options), inputs, case.band, loss)


def test_deterministic_gradients_by_torchs_own_switch():
    inputs = cases.make_inputs(cases.DETERMINISTIC[-1], torch.bfloat16, "cuda")
    loss = weighted(torch.randn_like(inputs[0]))
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradients(lambda *x: cute_flash.attn(*x, return_lse=True), inputs, loss) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for again in others for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("widths", ((128, 64), (192, 128)), ids=str)
def test_deterministic_gradients_with_dv_other_than_d(widths):
    inputs = cases.other_width_inputs(widths, "cuda")
    loss = weighted(torch.randn(2, 8, 200, widths[1], device="cuda"))

    def attend(*x):
        return cute_flash.attn(*x, causal=True, return_lse=True, deterministic=True)

    first = gradients(attend, inputs, loss)
    for _ in range(20):
        again = gradients(attend, inputs, loss)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
    assert_gradients(attend, inputs, CAUSAL, loss)
