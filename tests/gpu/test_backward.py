"""The gradients of `attn` on a GPU: sums in any order, strides of the output's gradient, checkpoints."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import cute_flash
from tests import cases
from tests.cases import CAUSAL
from tests.covering import covering
from tests.gradients import assert_gradients, gradients, weighted

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("family", "poisoned_memory")]


@pytest.mark.parametrize(
    ("head_dim", "causal", "seqlen", "heads_kv"),
    covering(
        [(d, c, s, h) for d in (64, 128, 256) for c in (False, True) for s in (1000, 1100) for h in (16, 4)], tuple
    ),
)
def test_many_tiles_that_add_to_the_same_rows(head_dim, causal, seqlen, heads_kv):
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


def test_checkpointed_training_step():
    inputs = cases.make_inputs(cases.Case(1, 4, 4, 200, 200, 128, CAUSAL), torch.bfloat16, "cuda")

    def attend(q, k, v):
        return cute_flash.attn(q, k, v, causal=True)

    grads = []
    for function in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        grads.append(torch.autograd.grad(function(*leaves).float().square().sum(), leaves))
    for once, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, once, rtol=0.02, atol=0.01 * once.abs().max().item())


def test_deterministic_gradients_by_torchs_own_switch():
    inputs = cases.make_inputs(cases.Case(1, 2, 2, 4000, 4000, 64), torch.bfloat16, "cuda")
    loss = weighted(torch.randn_like(inputs[0]))
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (gradients(lambda *x: cute_flash.attn(*x, return_lse=True), inputs, loss) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for again in others for a, b in zip(again, first, strict=True))
