"""Calls that bypass the dispatcher: which calls do, and that they give the same results as the operators.

The tensors are CPU tensors that claim to be on CUDA (`tests.fakes.cuda`). A launch on the fake GPU shows that a call
bypassed the dispatcher.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cute_flash import BlockMask, UnsupportedError, attn, attn_varlen, use_kernels
from cute_flash.spec.family import requested_family
from tests.fakes.cuda import claiming_cuda, launching_operators
from tests.fakes.gpu import FakeGpu, Launch, fake_gpu
from tests.runtime.calls import normal

B, H, HKV, S, D = 2, 4, 2, 150, 64
IDS = torch.arange(S) // 40


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def through_operators() -> Iterator[None]:
    """Send calls through the operators, by an active mode; the operators launch on the fake GPU, too."""
    with launching_operators(), Passing():
        yield


WAYS = {"operators": through_operators, "direct": nullcontext}


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu("sm_90") as gpu, claiming_cuda():
        yield gpu


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


@dataclass
class Call:
    """A call of `attn`: its leaves by name, and its other arguments."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    score_mod: Callable[..., Callable] | None = None  # of the leaf "table"
    is_varlen: bool = False
    width: int = D
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> dict[str, Tensor]:
        sizes = zip("qkv", (H, HKV, HKV), (D, D, self.width))
        shapes = {x: (B * S, n, d) if self.is_varlen else (B, n, S, d) for x, n, d in sizes}
        qkv = {name: leaf(*shape, seed=i, dtype=self.dtype) for i, (name, shape) in enumerate(shapes.items())}
        return qkv | {name: x.detach().clone().requires_grad_() for name, x in self.leaves.items()}

    def __call__(self, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        options = {**leaves, **self.rest, "return_lse": True}
        if self.score_mod is not None:
            options["score_mod"] = self.score_mod(options.pop("table"))
        return (attn_varlen if self.is_varlen else attn)(**options)  # type: ignore[return-value]


def added(table: Tensor) -> Callable:
    return lambda score, b, h, q, kv: score + table[h]


OFFSETS = torch.tensor([0, 100, 100, B * S], dtype=torch.int32)
VARLEN = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "causal": True}
SLOPES, SINKS = leaf(H), leaf(H, seed=1)
BLOCK_SPARSE = {"mask_mod": documents, "block_mask": BlockMask.of(documents, (B, H, S, S))}
CALLS = {
    "plain": Call(),
    "plain, window": Call(rest={"window": (30, 2), "deterministic": True, "scale": -0.3}),
    "plain, other width": Call(width=40),
    "softcap": Call(rest={"softcap": 3.0, "causal": True}),
    "slopes and sinks": Call({"alibi": SLOPES, "sinks": SINKS}),
    "slopes by batch": Call({"alibi": leaf(B, H, dtype=torch.float64)}),
    "max_logit": Call(rest={"return_max_logit": True, "out_dtype": torch.float32}),
    "dropout": Call({"sinks": SINKS}, {"dropout": 0.3}),
    "block mask": Call(rest=BLOCK_SPARSE),
    "full bias": Call({"bias": leaf(B, H, S, S, dtype=torch.bfloat16)}),
    "bias of keys": Call({"bias": leaf(S)}, {"softcap": 2.0}),
    "frozen bias": Call(rest={"bias": normal(H, S, S)}),
    "table": Call({"table": leaf(H)}, score_mod=added),
    "all": Call({"table": leaf(H), "bias": leaf(H, 1, S), "alibi": SLOPES, "sinks": SINKS}, BLOCK_SPARSE, added),
    "varlen": Call(rest=VARLEN, is_varlen=True),
    "varlen, all": Call({"alibi": SLOPES, "sinks": SINKS}, {**VARLEN, "softcap": 2.0, "dropout": 0.2}, is_varlen=True),
    "fp32": Call(rest={"causal": True, "out_dtype": torch.float32}, dtype=torch.float32),
    "fp32, all": Call(
        {"bias": leaf(H, 1, S), "alibi": SLOPES, "sinks": SINKS},
        {**BLOCK_SPARSE, "softcap": 2.0, "dropout": 0.2, "deterministic": True},
        width=40,
        dtype=torch.float32,
    ),
    "fp32, varlen": Call({"sinks": SINKS}, VARLEN, is_varlen=True, dtype=torch.float32),
}
SMALL = {name: CALLS[name] for name in ("plain", "softcap", "table", "varlen")}


def run(call: Call, wanted: str) -> list[Tensor]:
    """The outputs and gradients of a call. `wanted`: differentiate through "out", "lse", or "both"."""
    torch.manual_seed(5)
    leaves = call.tensors()
    outputs = call(leaves)
    differentiated = outputs[:2] if wanted == "both" else [outputs[wanted == "lse"]]
    douts = [normal(*x.shape, seed=7, dtype=x.dtype) for x in differentiated]
    assert all(x.requires_grad for x in outputs[:2]) and not any(x.requires_grad for x in outputs[2:])
    grads = torch.autograd.grad(differentiated, list(leaves.values()), douts, allow_unused=True)
    assert all(grad is not None for grad in grads)
    return [*outputs, *grads]


def assert_same(mine: Any, other: Any) -> None:
    """Assert that values are equal; for tensors, dtypes and strides too."""
    assert type(mine) is type(other)
    if isinstance(mine, dict):
        assert_same(list(mine.items()), list(other.items()))
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(other)
        for one, another in zip(mine, other):
            assert_same(one, another)
    elif isinstance(mine, Launch):
        assert (mine.kernel, mine.key) == (other.kernel, other.key)
        assert_same(mine.arguments, other.arguments)
    elif isinstance(mine, Tensor):
        assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    else:
        assert mine == other


# ---- the same as the operators


@pytest.mark.parametrize(
    ("name", "wanted"), [(name, wanted) for i, name in enumerate(CALLS) for wanted in ("both", ("out", "lse")[i % 2])]
)
def test_results_and_launches_are_those_of_the_operators(gpu: FakeGpu, name: str, wanted: str) -> None:
    with through_operators():
        expected = run(CALLS[name], wanted)
    launches, gpu.launches = gpu.launches, []
    found = run(CALLS[name], wanted)
    assert_same(found, expected)
    assert launches and len(gpu.keys) == len(launches), "signatures are shared"
    assert_same(gpu.launches, launches)


@pytest.mark.parametrize("name", CALLS)
def test_saved_tensors_are_those_of_the_operators(gpu: FakeGpu, name: str) -> None:
    """Their order is the same too, because a checkpoint may recompute a direct call through the operators."""
    saved = {way: saved_by(CALLS[name], way) for way in WAYS}
    assert_same(saved["direct"], saved["operators"])


def saved_by(call: Call, way: str) -> list[Tensor]:
    torch.manual_seed(5)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with WAYS[way](), hooks:
        call(call.tensors())[0].sum().backward()
    return [x.detach() for x in saved]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_errors(gpu: FakeGpu, call: Call, way: str) -> None:
    with WAYS[way]():
        leaves = call.tensors()
        out = call(leaves)[0]
        out.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            out.sum().backward()
        for name in leaves:
            leaves = call.tensors()
            out = call(leaves)[0]
            with torch.no_grad():
                leaves[name].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        out = call(call.tensors())[0]
        twice = out * 1
        out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            twice.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_changes_of_tensors_without_a_gradient_are_errors_too(gpu: FakeGpu, way: str) -> None:
    with WAYS[way]():
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            options = {**VARLEN, name: OFFSETS.clone()}
            out = Call(rest=options, is_varlen=True)(CALLS["varlen"].tensors())[0]
            options[name].zero_()  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        block_mask = BlockMask.of_status(BLOCK_SPARSE["block_mask"].status, 128, 128, S, S)  # type: ignore[attr-defined]
        out = Call(rest={"mask_mod": documents, "block_mask": block_mask})(CALLS["plain"].tensors())[0]
        block_mask.partial_kv.num_blocks.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_gradients_of_gradients_are_not_silently_zero(gpu: FakeGpu, call: Call) -> None:
    with launching_operators():
        leaves = call.tensors()
        out = call(leaves)[0]
        grads = torch.autograd.grad(out.sum(), list(leaves.values()), create_graph=True)
        assert all(x.requires_grad for x in grads)
        with pytest.raises(UnsupportedError, match="second derivatives of attn"):
            torch.autograd.grad(grads[0].sum(), list(leaves.values()), allow_unused=True)


def long(table: Tensor) -> Callable:
    def mod(score, b, h, q, kv):
        for _ in range(20):
            score = torch.sin(score)
        return score

    return mod


def floors(table: Tensor) -> Callable:
    return lambda score, b, h, q, kv: score // 0.5


# Calls whose forward has a kernel and whose backward has none: (kernel family, call, message).
WITHOUT_BACKWARD = {
    "fp32 score_mod": ("", Call(score_mod=added, dtype=torch.float32), "the gradient of a score_mod, .* in float32"),
    "fp32 bias, varlen": (
        "",
        Call({"bias": leaf(3, 1, 1, 1)}, VARLEN, is_varlen=True, dtype=torch.float32),
        "attn_varlen with a bias, in float32",
    ),
    "deterministic table": (
        "sm90",
        Call({"table": leaf(H)}, {"deterministic": True}, added),
        "without gradients of captured tensors",
    ),
    "deterministic table, varlen": (
        "",
        Call({"table": leaf(H)}, {**VARLEN, "deterministic": True}, added, is_varlen=True),
        "deterministic gradients of tensors that score_mod captures, of attn_varlen",
    ),
    "many operations": ("sm90", Call(score_mod=long), "operations per score"),
    "no derivative": ("", Call(score_mod=floors), "has no derivative"),
    "blocks narrower than a tile of the backward": (
        "sm80",
        Call(rest={"mask_mod": documents, "block_mask": BlockMask.of(documents, (B, H, S, S), tile=(128, 64))}),
        "use blocks that are multiples",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "call", "message"), WITHOUT_BACKWARD.values(), ids=WITHOUT_BACKWARD)
def test_the_forward_refuses_gradients_that_no_kernel_computes(
    gpu: FakeGpu, family: str, call: Call, message: str, way: str
) -> None:
    """It refuses before a launch, and only if a gradient is needed, whichever call comes first."""
    leaves = {"table": leaf(H), **call.tensors()} if call.score_mod is not None else call.tensors()
    for _ in range(2):
        with use_kernels(family), WAYS[way]():
            with pytest.raises(
                UnsupportedError, match=message + ".*if you need no gradient, call it under torch.no_grad"
            ):
                call(leaves)
            assert gpu.launches == []
            with torch.no_grad():
                call(leaves)
            call({name: x.detach() for name, x in leaves.items()})
            assert gpu.launches
        gpu.launches.clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_outputs_may_be_changed_in_place(gpu: FakeGpu, call: Call, way: str) -> None:
    with WAYS[way]():
        for x in call(call.tensors()):
            x.mul_(2)
            assert x.grad_fn is not None


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_only_tensors_that_require_a_gradient_get_one(gpu: FakeGpu, call: Call) -> None:
    frozen = {name: x.detach() for name, x in call.tensors().items()}
    assert not any(x.requires_grad for x in call(frozen))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not any(x.requires_grad for x in call(call.tensors()))
    assert len(gpu.launches) == 3 * (1 + call.is_varlen)
    for name in frozen:
        one = {**frozen, name: frozen[name].clone().requires_grad_()}
        call(one)[0].sum().backward()
        assert one[name].grad is not None
        assert all(x.grad is None for other, x in one.items() if other != name)


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_no_gradient_launches_nothing(gpu: FakeGpu, call: Call) -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    leaves = call.tensors()
    out = Stops.apply(call(leaves)[0])
    gpu.launches.clear()
    out.sum().backward()
    assert gpu.launches == [] and all(x.grad is None for x in leaves.values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["plain", "softcap", "table"])
def test_the_family_of_the_forward_computes_the_gradients(gpu: FakeGpu, name: str, way: str) -> None:
    """This holds in another thread, which does not see the context variable, as autograd's GPU threads do not."""
    with launching_operators():
        with WAYS[way](), use_kernels("sm80"):
            out = CALLS[name](CALLS[name].tensors())[0]
        assert requested_family() == ""
        thread = threading.Thread(target=out.sum().backward)
        thread.start()
        thread.join()
    assert gpu.kernels == ["fwd_sm80", "bwd_preprocess", "bwd_sm80", "bwd_postprocess_sm80"]


def test_parameters_and_autocast(gpu: FakeGpu) -> None:
    call = CALLS["slopes and sinks"]
    leaves = {name: torch.nn.Parameter(x.detach().float()) for name, x in call.tensors().items()}
    with launching_operators(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = call(leaves)
    assert gpu.main["q"].dtype == torch.bfloat16 and (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out.sum().backward()
    assert gpu.kernels[-1] == "bwd_postprocess_sm90"
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves.values())


@pytest.mark.parametrize("name", ["plain", "all"])
def test_checkpoints(gpu: FakeGpu, name: str) -> None:
    """A direct call may be recomputed through the operators."""
    call = CALLS[name]
    expected = torch.autograd.grad(call(leaves := call.tensors())[0].sum(), list(leaves.values()))
    for way in WAYS.values():
        leaves = call.tensors()
        out = checkpoint(call, leaves, use_reentrant=False)[0]
        with way():
            grads = torch.autograd.grad(out.sum(), list(leaves.values()))
        assert_same(grads, expected)


# ---- calls that go through the operators


class Subclass(Tensor):
    pass


def with_mode(mode: Callable[[], Any]) -> Callable[[Call, dict[str, Tensor]], None]:
    def observed(call: Call, leaves: dict[str, Tensor]) -> None:
        with mode():
            call(leaves)[0].sum().backward()

    return observed


def fake_tensors(call: Call, leaves: dict[str, Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call({name: mode.from_tensor(x) for name, x in leaves.items()})


def compiled(call: Call, leaves: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: call(x)[0], backend="aot_eager")(leaves).sum().backward()


def traced(call: Call, leaves: dict[str, Tensor]) -> None:
    frozen = {name: x.detach() for name, x in leaves.items()}
    with suppress(RuntimeError):  # it takes no lists of bools
        torch.jit.trace(lambda q: call({**frozen, "q": q})[0], frozen["q"], check_trace=False)


def heard(call: Call, leaves: dict[str, Tensor]) -> None:
    """Run the forward only, because the function mode would also see `backward`."""
    with Listening():
        call(leaves)


def transformed(transform: Callable) -> Callable[[Call, dict[str, Tensor]], None]:
    def observed(call: Call, leaves: dict[str, Tensor]) -> None:
        with suppress(RuntimeError):  # torch has no rule for all of them
            transform(lambda q: call({**leaves, "q": q})[0].sum())(leaves["q"][None])

    return observed


OBSERVERS: dict[str, Callable[[Call, dict[str, Tensor]], None]] = {
    "dispatch mode": with_mode(Passing),
    "function mode": heard,
    "profiler": with_mode(torch.profiler.profile),
    "forward-mode differentiation": with_mode(torch.autograd.forward_ad.dual_level),
    "autocast": with_mode(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "fake tensors": fake_tensors,
    "compile": compiled,
    "jit.trace": traced,
    "func.grad": transformed(lambda f: torch.func.grad(lambda q: f(q[0]))),
    "func.vmap": transformed(torch.func.vmap),
}
OBSERVER_PARAMS = [
    pytest.param(observer, id=name, marks=[pytest.mark.compiles] if observer is compiled else [])
    for name, observer in OBSERVERS.items()
]


@pytest.mark.parametrize("observer", OBSERVER_PARAMS)
@pytest.mark.parametrize("name", ["plain", "softcap", "bias of keys", "all", "fp32"])
def test_observed_calls_go_through_the_operators(gpu: FakeGpu, name: str, observer: Callable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer(CALLS[name], CALLS[name].tensors())
    # The operators ran on the CPU.
    assert gpu.launches == []


def test_cpu_tensors_go_through_the_operators() -> None:
    with fake_gpu("sm_90") as gpu:
        call = CALLS["softcap"]
        call(call.tensors())[0].sum().backward()
        assert gpu.launches == []


def imaginary(x: Tensor) -> Tensor:
    """The same values with the negative bit, like the imaginary part of a conjugate: the element stride is 2."""
    return torch._neg_view(torch.stack([x, -x], dim=-1)[..., 1])


@pytest.mark.parametrize("make", [lambda x: x.as_subclass(Subclass), imaginary], ids=["subclass", "lazily negated"])
@pytest.mark.parametrize("name", ["softcap", "all"])
def test_tensors_with_a_dispatch_of_their_own(gpu: FakeGpu, name: str, make: Callable[[Tensor], Tensor]) -> None:
    """The dispatcher unwraps subclasses and resolves the negative bit. Only q, k and v with the negative bit bypass the
    dispatcher, because the launch copies them.
    """
    call, plain = CALLS[name], {name: x.detach() for name, x in CALLS[name].tensors().items()}
    expected = call(plain)
    for leaf_name, x in plain.items():
        num, other = len(gpu.launches), {**plain, leaf_name: make(x)}
        call(other)
        is_copied = leaf_name in "qkv" and make is imaginary
        assert len(gpu.launches) == num + is_copied
        with launching_operators():
            for mine, theirs in zip(call(other), expected, strict=True):
                assert torch.equal(mine.as_subclass(Tensor), theirs)


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_observed_gradients_go_through_the_operators(gpu: FakeGpu, call: Call) -> None:
    """The forward may have bypassed the dispatcher."""
    out = call(call.tensors())[0]
    num, ones = len(gpu.launches), torch.ones_like(out)
    out.backward(torch._neg_view(ones), retain_graph=True)
    for mode in (Passing, torch.profiler.profile):
        with mode():
            out.backward(ones, retain_graph=True)
    # A ZeroTensor, which has no memory; the dispatcher materializes it.
    out.backward(torch._efficientzerotensor(out.shape, dtype=out.dtype), retain_graph=True)
    assert len(gpu.launches) == num
    out.backward(ones)
    assert len(gpu.launches) > num
