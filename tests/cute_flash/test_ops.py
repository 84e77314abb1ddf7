"""The torch operators: registration, compilation, gradients, and what fake tensors promise."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cute_flash import UnsupportedError, api, attn, ops, reference, supports
from cute_flash.planning.plan import chosen_family, use_kernels
from cute_flash.spec import arch
from cute_flash.spec.band import Band


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(
    sq: int, sk: int, dtype: torch.dtype = torch.float64, heads: int = 4, heads_kv: int = 2
) -> list[Tensor]:
    """q, k, v that want gradients."""
    shapes = ((2, heads, sq, 8), (2, heads_kv, sk, 8), (2, heads_kv, sk, 8))
    return [normal(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


# Registration


def transposed_heads() -> list[Tensor]:
    return [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs(5, 6)]


def transposed_columns() -> list[Tensor]:
    return [x.detach().mT.contiguous().mT.requires_grad_() for x in inputs(5, 6)]


def expanded() -> list[Tensor]:
    return [x.detach()[:, :1].expand(-1, 4, -1, -1) for x in inputs(5, 6)]


OPCHECKS = {
    "full": (lambda: inputs(5, 6), None, None),
    "causal, longer q": (lambda: inputs(9, 4), None, 0),
    "window": (lambda: inputs(7, 7), 2, 1),
    "fp32": (lambda: inputs(5, 6, torch.float32), 3, None),
    "bf16": (lambda: [x.detach() for x in inputs(5, 6, torch.bfloat16)], None, None),
    "no keys": (lambda: inputs(5, 0), None, None),
    "heads transposed": (transposed_heads, None, 0),
    "columns transposed": (transposed_columns, None, 0),
    "heads expanded": (expanded, None, None),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck_fwd(name: str) -> None:
    make, left, right = OPCHECKS[name]
    results = torch.library.opcheck(ops.fwd, (*make(), 0.3, left, right))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPCHECKS)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_bwd(name: str, with_dlse: bool) -> None:
    make, left, right = OPCHECKS[name]
    q, k, v = (x.detach() for x in make())
    out, lse = ops.fwd(q, k, v, 0.3, left, right)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse) if with_dlse else None
    results = torch.library.opcheck(ops.bwd, (dout, dlse, q, k, v, out, lse, 0.3, left, right))
    assert set(results.values()) == {"SUCCESS"}


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wants_grad", [False, True])
def test_the_dispatcher_sees_one_operator_each_way(wants_grad: bool) -> None:
    q, k, v = (x.detach().requires_grad_(wants_grad) for x in inputs(5, 6))
    with Seen() as seen:
        out = attn(q, k, v, causal=True)
        if wants_grad:
            out.sum().backward()
    ours = [name for name in seen.names if name.startswith("cute_flash")]
    assert ours == ["cute_flash.fwd.default", "cute_flash.bwd.default"][: 1 + wants_grad]


class Listening(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_nobody_who_listens_is_stepped_over() -> None:
    assert not ops.is_watched()
    heard = {}

    def listen(name: str, x: Tensor) -> Tensor:
        heard[name] = ops.is_watched()
        return x

    x = torch.ones(2)
    for mode in (Seen(), Listening(), torch.profiler.profile(), FakeTensorMode()):
        with mode:
            listen(type(mode).__name__, x)
    torch.func.vmap(lambda x: listen("vmap", x))(x)
    torch.func.grad(lambda x: listen("grad", x).sum())(x)
    torch.jit.trace(lambda x: listen("trace", x * 2), x, check_trace=False)
    assert heard == dict.fromkeys(
        ("Seen", "Listening", "profile", "FakeTensorMode", "vmap", "grad", "trace"), True
    )
    assert not ops.is_watched()


def test_only_what_backward_needs_is_kept() -> None:
    q, k, v = inputs(50, 60)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out, lse = attn(q, k, v, return_lse=True)
    # Nothing of size Sq x Sk.
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in (q, k, v, out, lse)]


# torch.compile and torch.export


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]
) -> tuple[Tensor, Tensor]:
    out, lse = attn(q, k, v, window=window, return_lse=True)
    return 2 * out, lse


def with_gradients(function: Any, tensors: list[Tensor], *args: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves, *args)
    finite = torch.where(lse == -torch.inf, 0, lse)
    grads = torch.autograd.grad((out.sin().sum() + finite.cos().sum()), leaves)
    return [out, lse, *grads]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_compiled_once_for_all_lengths_and_windows() -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=backend)
    for sq, sk, window in ((7, 12, (3, 2)), (12, 7, (4, 5)), (31, 33, (6, 7)), (100, 5, (2, 3))):
        tensors = inputs(sq, sk)
        found = with_gradients(compiled, tensors, window)
        assert_all_close(found, with_gradients(attention, tensors, window))
    assert backend.frame_count == 1


@pytest.mark.parametrize("window", [(None, None), (None, 0), (0, None)])
def test_compiled_with_open_windows(window: tuple[int | None, int | None]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for sq, sk in ((7, 12), (12, 7)):
        tensors = inputs(sq, sk)
        found = with_gradients(compiled, tensors, window)
        assert_all_close(found, with_gradients(attention, tensors, window))


def test_compiled_by_inductor_and_without_gradients() -> None:
    torch._dynamo.reset()

    def layer(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 8)).unbind(-3)
        # Views only around it: arithmetic would have Inductor call a C++ compiler, for many seconds.
        return attn(q, k, v, causal=True, layout="bshd").flatten(-2)

    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        for length in (9, 17, 23):
            x = normal(2, length, 96, dtype=torch.float32)
            torch.testing.assert_close(compiled(x), layer(x))


def test_export_keeps_the_operator() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attn(q, k, v, causal=True)

    q, k, v = (x.detach() for x in inputs(5, 6))
    exported = torch.export.export(Layer(), (q, k, v))
    assert torch.ops.cute_flash.fwd.default in [node.target for node in exported.graph.nodes]
    torch.testing.assert_close(exported.module()(q, k, v), attn(q, k, v, causal=True))


# Gradients


@pytest.mark.parametrize(
    ("sq", "sk", "heads_kv", "window", "scale"),
    [
        (3, 3, 4, (None, None), None),
        (3, 5, 2, (None, 0), None),
        (5, 3, 1, (None, 0), 0.9),  # two rows see no key
        (4, 4, 2, (1, 1), -0.4),
        (2, 6, 4, (0, 3), 0.0),
    ],
)
def test_gradcheck(sq: int, sk: int, heads_kv: int, window: Any, scale: float | None) -> None:
    tensors = [x[:1, :, :, :3].detach().requires_grad_() for x in inputs(sq, sk, heads_kv=heads_kv)]

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attn(q, k, v, window=window, scale=scale, return_lse=True)
        # Finite differences of -inf are NaN.
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(both, tensors)


@pytest.mark.parametrize("layout", ["bshd", "3-D", "2-D"])
def test_gradients_in_other_layouts(layout: str) -> None:
    q, k, v = inputs(5, 6, heads=1, heads_kv=1)
    reorder = {"bshd": lambda x: x.transpose(1, 2), "3-D": lambda x: x[:, 0], "2-D": lambda x: x[0, 0]}[
        layout
    ]
    named = {"layout": "bshd"} if layout == "bshd" else {}
    weights = reorder(normal(2, 1, 5, 8, seed=7))
    found = torch.autograd.grad((attn(*map(reorder, (q, k, v)), **named) * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((reorder(attn(q, k, v)) * weights).sum(), (q, k, v))
    assert_all_close(list(found), list(expected))


def test_rows_and_keys_outside_the_band_have_zero_gradients() -> None:
    q, k, v = inputs(9, 4)
    out = attn(q, k, v, causal=True)
    # Poison where nothing may flow back: the first 5 rows see no key.
    weights = normal(*out.shape, seed=5)
    weights[:, :, :5] = torch.nan
    (out * weights).sum().backward()
    assert torch.equal(q.grad[:, :, :5], torch.zeros(2, 4, 5, 8, dtype=torch.float64))
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert q.grad[:, :, 6:].abs().min() > 0

    q, k, v = inputs(3, 8)
    attn(q, k, v, window=(1, 0)).sum().backward()
    # Rows 0, 1, 2 stand at keys 5, 6, 7 and see one key before: keys 0 .. 3 are seen by nobody.
    assert torch.equal(v.grad[:, :, :4], torch.zeros(2, 2, 4, 8, dtype=torch.float64))
    assert v.grad[:, :, 4:].abs().min() > 0


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_of_some_inputs(wanted: tuple[int, ...]) -> None:
    tensors = inputs(5, 6)
    expected = torch.autograd.grad(attn(*tensors).sin().sum(), tensors)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(tensors)]
    attn(*some).sin().sum().backward()
    for i, x in enumerate(some):
        assert (x.grad is not None) == (i in wanted)
        assert x.grad is None or torch.equal(x.grad, expected[i])


def test_gradient_of_the_lse_alone() -> None:
    q, k, v = inputs(5, 6)
    _, lse = attn(q, k, v, return_lse=True)
    lse.sum().backward()
    scores = (q.detach().requires_grad_() @ k.detach().repeat_interleave(2, 1).mT) / math.sqrt(8)
    torch.testing.assert_close(q.grad, scores.softmax(-1) @ k.detach().repeat_interleave(2, 1) / math.sqrt(8))
    assert torch.equal(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    leaves = inputs(5, 6)
    out, lse = checkpoint(attention, *leaves, (2, 0), use_reentrant=use_reentrant)
    (out.sin().sum() + lse.cos().sum()).backward()
    found = [out, lse, *(x.grad for x in leaves)]
    assert_all_close(found, with_gradients(attention, leaves, (2, 0)))


def test_inference_mode_and_no_grad() -> None:
    q, k, v = inputs(5, 6)
    expected = attn(q, k, v).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = attn(q, k, v)
        assert not out.requires_grad
        assert torch.equal(out, expected)


@pytest.mark.parametrize("family", ["sm80", None])
def test_gradients_are_by_the_family_of_the_forward(
    family: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread that does not see what was chosen, as autograd's are for a GPU."""
    found = []

    def bwd(*args: Any) -> Any:
        found.append(chosen_family())
        return torch.ops.cute_flash.bwd.default(*args)

    monkeypatch.setattr(ops, "bwd", bwd)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with use_kernels(family) if family else contextlib.nullcontext():
        out = attn(q, q, q)
    thread = threading.Thread(target=out.sum().backward)
    thread.start()
    thread.join()
    assert found == [family] and q.grad is not None and chosen_family() is None


def test_the_cpu_takes_deterministic_for_what_it_is() -> None:
    q, k, v = inputs(5, 6)
    grads = [
        torch.autograd.grad(attn(q, k, v, deterministic=asked).sum(), (q, k, v)) for asked in (True, False)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert supports(q, k, v, deterministic=True)


# Fake tensors


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)])
def test_fake_results_are_like_real_ones(device: str, dtype: torch.dtype, order: tuple[int, ...]) -> None:
    def made(heads: int, length: int, where: str) -> Tensor:
        shape = (2, heads, length, 16)
        back = [order.index(i) for i in range(4)]
        return torch.zeros([shape[i] for i in order], dtype=dtype, device=where).permute(back)

    real, real_lse = attn(made(4, 5, "cpu"), made(2, 7, "cpu"), made(2, 7, "cpu"), return_lse=True)
    with FakeTensorMode():
        q, k, v = made(4, 5, device), made(2, 7, device), made(2, 7, device)
        out, lse = attn(q, k, v, return_lse=True)
        dq, dk, dv = ops.bwd(out, None, q, k, v, out, lse, 0.3, None, None)
    for fake, like in ((out, real), (lse, real_lse)):
        assert (fake.shape, fake.stride(), fake.dtype) == (like.shape, like.stride(), like.dtype)
        assert fake.device.type == device
    for grad, like in ((dq, q), (dk, k), (dv, v)):
        assert (grad.shape, grad.stride(), grad.dtype) == (like.shape, like.stride(), like.dtype)
        assert grad.device.type == device


def test_fake_cuda_tensors_meet_the_limits_of_the_kernels() -> None:
    with FakeTensorMode():
        wide = torch.empty(1, 1, 4, 264, dtype=torch.float16, device="cuda")
        with pytest.raises(UnsupportedError, match="head_dim=264"):
            attn(wide, wide, wide)
        single = torch.empty(1, 1, 4, 64, device="cuda")
        with pytest.raises(UnsupportedError, match="dtype float32 on cuda: use one of float16, bfloat16"):
            attn(single, single, single)


def test_supports_asks_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def detect(index: int) -> arch.ArchSpec:
        asked.append(index)
        if index == 1:
            raise UnsupportedError("GPU 1 (NVIDIA B200) is sm_100")
        return arch.ARCHS["sm_80"]

    monkeypatch.setattr(api, "detect", detect)
    with FakeTensorMode():
        fine = torch.empty(1, 2, 4, 64, dtype=torch.float16, device="cuda:0")
        assert supports(fine, fine, fine, causal=True)
        elsewhere = torch.empty(1, 2, 4, 64, dtype=torch.float16, device="cuda:1")
        assert supports(elsewhere, elsewhere, elsewhere).reason == "GPU 1 (NVIDIA B200) is sm_100"
        assert asked == [0, 1]
        odd = torch.empty(1, 2, 4, 60, dtype=torch.float16, device="cuda:0")
        assert "the nearest is 64" in supports(odd, odd, odd).reason


def test_cpu_kernels_are_the_reference() -> None:
    q, k, v = (x.detach() for x in inputs(9, 11))
    out, lse = ops.fwd(q, k, v, 0.3, 4, 1)
    expected = reference.dense(q, k, v, Band(4, 1), 0.3)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-13)
