"""Differentiable calls that step over the dispatcher do what the operators do: see `tests.recorded`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash import BlockMask, attn, attn_varlen, custom, general, ops, use_kernels
from cute_flash.spec.family import requested_family
from tests.fake_gpu import normal
from tests.recorded import Recorded, assert_same, by_operators, on_cpu

B, H, HKV, S, D = 2, 4, 2, 150, 64
IDS = torch.arange(S) // 40
WAYS = {"operators": by_operators, "direct": contextlib.nullcontext}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return on_cpu(monkeypatch)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(*shape, seed=seed, dtype=dtype).requires_grad_()


def documents(b, h, q, kv):
    return IDS[q] == IDS[kv]


@dataclass
class Call:
    """What `attn` is called with: the leaves by name, and all else."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    score: Callable[..., Callable] | None = None  # of the leaf "table"
    is_packed: bool = False
    width: int = D

    def tensors(self) -> dict[str, Tensor]:
        sizes = zip("qkv", (H, HKV, HKV), (D, D, self.width))
        shapes = {x: (B * S, n, d) if self.is_packed else (B, n, S, d) for x, n, d in sizes}
        qkv = {
            name: leaf(*shape, seed=i, dtype=torch.bfloat16) for i, (name, shape) in enumerate(shapes.items())
        }
        return qkv | {name: x.detach().clone().requires_grad_() for name, x in self.leaves.items()}

    def __call__(self, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
        options = {**leaves, **self.rest, "return_lse": True}
        if self.score is not None:
            options["score_mod"] = self.score(options.pop("table"))
        return (attn_varlen if self.is_packed else attn)(**options)  # type: ignore[return-value]


def added(table: Tensor) -> Callable:
    return lambda score, b, h, q, kv: score + table[h]


OFFSETS = torch.tensor([0, 100, 100, B * S], dtype=torch.int32)
PACKED = {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, "causal": True}
SLOPES, SINKS = leaf(H), leaf(H, seed=1)
MAPPED = {"mask_mod": documents, "block_map": BlockMask.of(documents, (B, H, S, S))}
CALLS = {
    "plain": Call(),
    "plain, window": Call(rest={"window": (30, 2), "deterministic": True, "scale": -0.3}),
    "plain, other width": Call(width=40),
    "softcap": Call(rest={"softcap": 3.0, "causal": True}),
    "slopes and sinks": Call({"alibi": SLOPES, "sinks": SINKS}),
    "slopes by batch": Call({"alibi": leaf(B, H, dtype=torch.float64)}),
    "largest logit": Call(rest={"return_max_logit": True, "out_dtype": torch.float32}),
    "dropout": Call({"sinks": SINKS}, {"dropout": 0.3}),
    "map": Call(rest=MAPPED),
    "full bias": Call({"bias": leaf(B, H, S, S, dtype=torch.bfloat16)}),
    "bias of keys": Call({"bias": leaf(S)}, {"softcap": 2.0}),
    "frozen bias": Call(rest={"bias": normal(H, S, S)}),
    "table": Call({"table": leaf(H)}, score=added),
    "all": Call({"table": leaf(H), "bias": leaf(H, 1, S), "alibi": SLOPES, "sinks": SINKS}, MAPPED, added),
    "packed": Call(rest=PACKED, is_packed=True),
    "packed, all": Call(
        {"alibi": SLOPES, "sinks": SINKS}, {**PACKED, "softcap": 2.0, "dropout": 0.2}, is_packed=True
    ),
}
SMALL = {name: CALLS[name] for name in ("plain", "softcap", "table", "packed")}


def run(call: Call, wanted: tuple[bool, bool] = (True, True)) -> list[Tensor | None]:
    """Outputs and gradients; `wanted`: whether anything flows into out and into the LSE."""
    torch.manual_seed(5)
    leaves = call.tensors()
    found = call(leaves)
    into = [x for x, is_wanted in zip(found, wanted) if is_wanted]
    flow = [normal(*x.shape, seed=7, dtype=x.dtype) for x in into]
    assert all(x.requires_grad for x in found[:2]) and not any(x.requires_grad for x in found[2:])
    grads = torch.autograd.grad(into, list(leaves.values()), flow, allow_unused=True)
    assert all(grad is not None for grad in grads)
    return [*found, *grads]


# The same


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=["both", "out", "lse"])
@pytest.mark.parametrize("name", CALLS)
def test_what_operators_launch(gpu: Recorded, name: str, wanted: tuple[bool, bool]) -> None:
    with by_operators():
        expected = run(CALLS[name], wanted)
    launches, gpu.launches = gpu.launches, []
    assert gpu.num_direct == 0
    found = run(CALLS[name], wanted)
    assert gpu.num_direct == 1
    assert_same(gpu.launches, launches)
    assert_same([(x, x.stride()) for x in found], [(x, x.stride()) for x in expected])  # type: ignore[union-attr]


@pytest.mark.parametrize("name", CALLS)
def test_what_operators_keep(gpu: Recorded, name: str) -> None:
    """In their order: a call may be recomputed the other way."""
    kept = {way: kept_by(CALLS[name], way) for way in WAYS}
    assert_same(kept["direct"], kept["operators"])


def kept_by(call: Call, way: str) -> list[tuple]:
    torch.manual_seed(5)
    kept: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with WAYS[way](), hooks:
        call(call.tensors())[0].sum().backward()
    return [(x.detach(), x.stride()) for x in kept]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_errors(gpu: Recorded, call: Call, way: str) -> None:
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
    assert (gpu.num_direct > 0) == (way == "direct")


@pytest.mark.parametrize("way", WAYS)
def test_changes_of_what_has_no_gradient(gpu: Recorded, way: str) -> None:
    with WAYS[way]():
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given = {**PACKED, name: OFFSETS.clone()}
            out = Call(rest=given, is_packed=True)(CALLS["packed"].tensors())[0]
            given[name].zero_()  # type: ignore[attr-defined]
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        made = BlockMask.of(documents, (B, H, S, S))
        out = Call(rest={"mask_mod": documents, "block_map": made})(CALLS["map"].tensors())[0]
        made.partial_kv.num_blocks.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_gradients_of_gradients(gpu: Recorded, call: Call, way: str) -> None:
    with WAYS[way](), pretend_operators():
        leaves = call.tensors()
        out = call(leaves)[0]
        grads = torch.autograd.grad(out.sum(), list(leaves.values()), create_graph=True)
        assert all(x.requires_grad for x in grads)
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            again = torch.autograd.grad(grads[0].sum(), list(leaves.values()), allow_unused=True)
        assert all(x is None for x in again)


@contextlib.contextmanager
def pretend_operators() -> Iterator[None]:
    """Their kernels for the CPU are those for CUDA."""
    direct = ops.is_direct
    with by_operators():
        ops.is_direct = direct
        yield


@pytest.mark.parametrize("way", WAYS)
def test_outputs_may_be_changed(gpu: Recorded, way: str) -> None:
    with WAYS[way]():
        for call in SMALL.values():
            for out in call(call.tensors()):
                out.mul_(2)
                assert out.grad_fn is not None


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_nothing_to_differentiate(gpu: Recorded, call: Call) -> None:
    frozen = {name: x.detach() for name, x in call.tensors().items()}
    assert not any(x.requires_grad for x in call(frozen))
    with torch.no_grad():
        assert not any(x.requires_grad for x in call(call.tensors()))
    assert gpu.num_direct == 0
    for name in frozen:
        one = {**frozen, name: frozen[name].clone().requires_grad_()}
        call(one)[0].sum().backward()
        assert one[name].grad is not None
        assert all(x.grad is None for other, x in one.items() if other != name)
    assert gpu.num_direct == len(frozen)


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_nothing_flows_back(gpu: Recorded, call: Call) -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    leaves = call.tensors()
    found = Stops.apply(call(leaves)[0])
    gpu.launches.clear()
    found.sum().backward()
    assert gpu.launches == [] and all(x.grad is None for x in leaves.values())


def test_family_of_the_forward(gpu: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("softcap", general), ("table", custom), ("plain", ops)):
        seen = []
        found = module.bwd_cuda

        def watched(*args: Any, found: Any = found, seen: list = seen) -> Any:
            seen.append(requested_family())
            return found(*args)

        monkeypatch.setattr(module, "bwd_cuda", watched)
        with use_kernels("sm80"):
            out = CALLS[name](CALLS[name].tensors())[0]
        out.sum().backward()
        assert seen == ["sm80"] and requested_family() is None


def test_parameters_and_autocast(gpu: Recorded) -> None:
    leaves = CALLS["slopes and sinks"].tensors()
    leaves = {name: torch.nn.Parameter(x.detach()) for name, x in leaves.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = CALLS["slopes and sinks"](leaves)
    out.sum().backward()
    assert gpu.num_direct == 1 and (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert all(x.grad is not None and x.grad.dtype == x.dtype for x in leaves.values())


def test_checkpoints(gpu: Recorded) -> None:
    """Recomputed the other way, too."""
    from torch.utils.checkpoint import checkpoint

    for call in (CALLS["plain"], CALLS["all"]):
        leaves = call.tensors()
        outs = [checkpoint(call, leaves, use_reentrant=False)[0] for _ in range(2)]
        outs[0].sum().backward()
        with by_operators():
            outs[1].sum().backward()
    assert gpu.num_direct == 6


# What keeps the operators


class Wrapped(Tensor):
    pass


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def fake_call(call: Call, leaves: dict[str, Tensor]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call({name: mode.from_tensor(x) for name, x in leaves.items()})


def in_mode(mode: Callable[[], Any]) -> Callable[[Call, dict[str, Tensor]], None]:
    def run(call: Call, leaves: dict[str, Tensor]) -> None:
        with mode():
            call(leaves)[0].sum().backward()

    return run


def compiled(call: Call, leaves: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: call(x)[0], backend="aot_eager")(leaves).sum().backward()


def transformed(transform: Callable) -> Callable[[Call, dict[str, Tensor]], None]:
    def run(call: Call, leaves: dict[str, Tensor]) -> None:
        # Torch has no rule for all of them.
        with contextlib.suppress(RuntimeError):
            transform(lambda q: call({**leaves, "q": q})[0].sum())(leaves["q"][None])

    return run


def with_key(change: Callable[[Tensor], Tensor]) -> Callable[[Call, dict[str, Tensor]], None]:
    return lambda call, leaves: call({**leaves, "k": change(leaves["k"])})[0].sum().backward()


OTHERS: dict[str, Callable[[Call, dict[str, Tensor]], None]] = {
    "mode": in_mode(Listening),
    "profiler": in_mode(torch.profiler.profile),
    "fake tensors": fake_call,
    "compile": compiled,
    "func.grad": transformed(lambda f: torch.func.grad(lambda q: f(q[0]))),
    "func.vmap": transformed(torch.func.vmap),
    "subclass": with_key(lambda x: x.as_subclass(Wrapped)),
    "lazily negated": with_key(torch._neg_view),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("name", ["plain", "softcap", "bias of keys"])
def test_what_keeps_operators(gpu: Recorded, name: str, other: Callable[[Call, Any], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other(CALLS[name], CALLS[name].tensors())
    # The CPU's own kernels have computed.
    assert gpu.num_direct == 0 and gpu.launches == []


@pytest.mark.parametrize("call", SMALL.values(), ids=SMALL)
def test_gradients_that_keep_operators(gpu: Recorded, call: Call) -> None:
    """What flows back may be listened to where the call was not."""
    leaves = call.tensors()
    out = call(leaves)[0]
    launches = len(gpu.launches)
    ones = torch.ones_like(out)
    out.backward(torch._neg_view(ones), retain_graph=True)
    with Listening():
        out.backward(ones, retain_graph=True)
    out.backward(torch._efficientzerotensor(out.shape, dtype=out.dtype), retain_graph=True)
    assert len(gpu.launches) == launches
    out.backward(ones)
    assert len(gpu.launches) > launches
