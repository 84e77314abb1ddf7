"""`attn` with few queries over many keys: the decode kernel splits the keys. Against the CPU path in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cute_flash
from profiling.measure.launches import recorded_launches
from tests.gpu.decode_cases import SPLIT_CASES, WIDE_SPLIT_CASES, SplitCase

# Without the fixture `family`: a family that the caller chooses does not split keys.
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

DEVICE = "cuda"
# The error of a result relative to its largest element.
MAX_ERROR = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# Gradients of slopes and sinks are sums over all keys, whose terms nearly cancel.
MAX_SUM_ERROR = 4e-2


def results(case: SplitCase, tensors: dict[str, Tensor], dout: Tensor | None) -> dict[str, Tensor]:
    """out, lse and, with `dout`, the gradients of all tensors."""
    if dout is None:
        out, lse = cute_flash.attn(**tensors, layout=case.layout, return_lse=True, **case.numbers)
        return {"out": out, "lse": lse}
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    q, k, v, *_ = leaves.values()
    features = {name: x for name, x in leaves.items() if name not in "qkv"}
    out, lse = cute_flash.attn(q, k, v, layout=case.layout, return_lse=True, **features, **case.numbers)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": x for name, x in zip(leaves, grads)}}


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case.id)
def test_as_on_the_cpu(case: SplitCase) -> None:
    check(case, torch.randn(case.inputs("cpu")["q"].shape, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("case", WIDE_SPLIT_CASES, ids=lambda case: case.id)
def test_wide_heads_as_on_the_cpu(case: SplitCase) -> None:
    check(case, None)


def check(case: SplitCase, dout: Tensor | None) -> None:
    tensors = case.inputs(DEVICE)
    with recorded_launches() as launches:
        found = results(case, tensors, None if dout is None else dout.to(DEVICE, case.dtype))
    assert launches[0].key.kernel == "fwd_split_kv"
    exact_dout = None if dout is None else dout.to(case.dtype).double()
    expected = results(case, {name: x.double().cpu() for name, x in tensors.items()}, exact_dout)
    for name, exact in expected.items():
        mine = found[name].double().cpu()
        assert mine.shape == exact.shape
        largest = exact.abs().max().item()
        bound = {"lse": 1e-4, "dalibi": MAX_SUM_ERROR, "dsinks": MAX_SUM_ERROR}.get(name, MAX_ERROR[case.dtype])
        error = (mine - exact).abs().max().item() / largest
        assert error <= bound, f"{name}: {error:.2e} of {largest:.2e}"


def test_batch_invariant_does_not_split() -> None:
    case = SplitCase(tokens=2, batch=3)
    tensors = case.inputs(DEVICE)
    with recorded_launches() as launches:
        out = cute_flash.attn(*tensors.values(), batch_invariant=True)
    assert [one.key.kernel for one in launches if one.key.kernel == "fwd_split_kv"] == []
    alone = cute_flash.attn(*(x[1:2] for x in tensors.values()), batch_invariant=True)
    assert torch.equal(out[1:2], alone)
    torch.testing.assert_close(out, cute_flash.attn(*tensors.values()), rtol=2e-2, atol=2e-3)


def test_a_chosen_family_does_not_split() -> None:
    tensors = SplitCase().inputs(DEVICE)
    with cute_flash.use_kernels("sm80"), recorded_launches() as launches:
        cute_flash.attn(*tensors.values())
    assert [one.key.kernel for one in launches] == ["fwd_sm80"]
