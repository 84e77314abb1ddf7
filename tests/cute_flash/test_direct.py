"""The short way of calls on CUDA: which take it, and that it leads where the operators lead.

On CPU tensors that say they are on CUDA; the operators' CPU kernels are those of CUDA meanwhile.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_flash import BlockMask, attn, backward_general, custom, forward, general, masks, ops
from cute_flash.jit import compile as compiling
from tests.cute_flash.test_bwd_launch import faked
from tests.fake_backward import FakeBackward
from tests.fake_gpu import normal

B, H, HKV, SQ, SK, D = 2, 4, 2, 20, 40, 16
NAMES = ("q", "k", "v", "bias", "table", "alibi", "sinks")


class Tapped:
    """Stands for a function, and tells that it was called."""

    def __init__(self, name: str, function: Callable, log: list[str]) -> None:
        self.name, self.function, self.log = name, function, log

    def __call__(self, *args: Any) -> Any:
        self.log.append(self.name)
        return self.function(*args)


@dataclass
class Watched:
    """A GPU of stand-ins, and what was called on the way to it."""

    gpu: FakeBackward
    log: list[str] = field(default_factory=list)

    def way(self, call: Callable[[], Any]) -> list[str]:
        self.log.clear()
        call()
        return list(self.log)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    fake = faked("sm_90", monkeypatch)
    found = Watched(fake)
    monkeypatch.setattr(compiling, "compiled", fake.compiled)
    monkeypatch.setattr(forward, "_launches", {})
    monkeypatch.setattr(backward_general, "_launches", {})
    monkeypatch.setattr(custom, "_checked", {})
    with contextlib.ExitStack() as stack:
        library = torch.library.Library("cute_flash", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that kernels are overridden
            for name, function in (
                ("general_fwd", general._fwd_cuda), ("custom_fwd", custom._fwd_cuda),
                ("custom_bwd", custom._bwd_cuda),
            ):  # fmt: skip
                library.impl(name, function, "CPU", allow_override=True)
        monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
        for module, name in (
            (general, "general_fwd"), (general, "fwd_cuda"), (custom, "custom_fwd"), (custom, "fwd_cuda"),
            (custom, "custom_bwd"), (custom, "bwd_cuda"),
        ):  # fmt: skip
            tapped = Tapped(name, getattr(module, name), found.log)
            monkeypatch.setattr(module, name, tapped)
        yield found


def leaves(*wanted: str) -> dict[str, Tensor]:
    """All tensors of a call that may have a gradient; `wanted`: do."""
    lengths = {"q": (H, SQ), "k": (HKV, SK), "v": (HKV, SK)}
    found = {name: normal(B, *shape, D, seed=i) for i, (name, shape) in enumerate(lengths.items())}
    found["bias"] = normal(B, H, SQ, SK, seed=3, dtype=torch.float32)
    found |= {name: normal(H, seed=i, dtype=torch.float32) for i, name in enumerate(NAMES[4:])}
    return {name: x.requires_grad_(name in wanted) for name, x in found.items()}


def call(x: dict[str, Tensor]) -> Tensor:
    table, shift = x["table"], 2.5
    block_map = BlockMask.of(masks.causal(SK - SQ), (B, H, SQ, SK))
    return attn(
        x["q"], x["k"], x["v"], bias=x["bias"], alibi=x["alibi"], sinks=x["sinks"], window=(30, None),
        score_mod=lambda score, b, h, q, kv: score * table[h] + shift, mask_mod=masks.causal(SK - SQ),
        block_map=block_map,
    )  # fmt: skip


def general_call(x: dict[str, Tensor]) -> Tensor:
    return attn(x["q"], x["k"], x["v"], softcap=2.0, alibi=x["alibi"], sinks=x["sinks"])


CALLS: dict[str, tuple[Callable[[dict[str, Tensor]], Tensor], list[str], list[str], tuple[str, ...]]] = {
    "custom": (call, ["fwd_cuda"], ["custom_fwd", "fwd_cuda"], NAMES),
    "general": (general_call, ["fwd_cuda"], ["general_fwd", "fwd_cuda"], ("q", "k", "v", "alibi", "sinks")),
}
each_call = pytest.mark.parametrize("kind", CALLS)


@each_call
def test_nothing_to_differentiate(watched: Watched, kind: str) -> None:
    make, direct, _, _ = CALLS[kind]
    assert watched.way(lambda: make(leaves())) == direct
    with torch.no_grad():
        assert watched.way(lambda: make(leaves(*NAMES))) == direct
    with torch.inference_mode():
        assert watched.way(lambda: make(leaves(*NAMES))) == direct


@each_call
def test_any_gradient_steps_over_them_too(watched: Watched, kind: str) -> None:
    make, direct, _, names = CALLS[kind]
    for name in names:
        assert watched.way(lambda name=name: make(leaves(name))) == direct, name


@each_call
def test_on_the_cpu_there_is_no_short_way(
    watched: Watched, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, _, by_operator, _ = CALLS[kind]
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: False))
    assert watched.way(lambda: make(leaves())) == by_operator


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Listening(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@each_call
def test_nobody_who_watches_is_stepped_over(
    watched: Watched, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, direct, by_operator, _ = CALLS[kind]
    x = leaves()
    for mode in (Passing(), Listening(), torch.profiler.profile()):
        with mode:
            assert watched.way(lambda: make(x)) == by_operator, type(mode).__name__
    with torch.autograd.forward_ad.dual_level():
        assert watched.way(lambda: make(x)) == direct, "no tangents: nobody who would miss them"
    assert watched.way(lambda: make(x)) == direct
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert watched.way(lambda: make(x)) == by_operator


def test_traces_and_transforms_see_the_operator(watched: Watched) -> None:
    x = leaves()
    trace = lambda q: general_call({**x, "q": q})  # noqa: E731
    assert watched.way(lambda: torch.jit.trace(trace, x["q"], check_trace=False))[0] == "general_fwd"
    with pytest.raises(RuntimeError, match="_fwd"):  # which has no rule for batches
        watched.way(lambda: torch.func.vmap(lambda q: call({**x, "q": q}))(x["q"][None]))
    assert watched.log[0] == "custom_fwd"


class Subclass(Tensor):
    pass


def imaginary(x: Tensor) -> Tensor:
    """The same values, negated when they are read."""
    return (
        torch.complex(x.float(), -x.float()).conj().imag if x.dtype == torch.float32 else torch._neg_view(-x)
    )


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": lambda x: x.as_subclass(Subclass), "lazily negated": imaginary
}  # fmt: skip


@each_call
@pytest.mark.parametrize("made", MAKERS)
def test_other_kinds_of_tensors_are_the_dispatchers(watched: Watched, kind: str, made: str) -> None:
    """Which unwraps them, and negates what is to be negated before a kernel reads it."""
    make, _, by_operator, names = CALLS[kind]
    plain = leaves()
    expected = make(plain)
    for name in names:
        x, found = {**plain, name: MAKERS[made](plain[name])}, []
        assert watched.way(lambda x=x, found=found: found.append(make(x))) == by_operator, name
        assert not any(isinstance(one, Tensor) and one.is_neg() for one in flat(watched.gpu.launches[-1]))
        assert torch.equal(found[0], expected), name


@each_call
def test_parameters_are_plain_tensors(watched: Watched, kind: str) -> None:
    make, direct, _, names = CALLS[kind]
    x = leaves()
    for name in names:
        x[name] = torch.nn.Parameter(x[name])
    with torch.no_grad():
        assert watched.way(lambda: make(x)) == direct


def flat(value: Any) -> list[Any]:
    """Tensors and numbers that a launch was given."""
    if hasattr(value, "plan"):
        parts = [getattr(value, name) for name in ("plan", "q", "k", "v", "out", "lse", "scale")]
        parts += [value.left, value.right, value.arguments, value.extras, value.given]
        return [one for part in parts for one in flat(part)]
    if isinstance(value, (tuple, list)):
        return [one for part in value for one in flat(part)]
    return [value]


def assert_same(found: Any, expected: Any) -> None:
    """One launch as another: numbers, and tensors of the same values in the same way in memory."""
    found, expected = flat(found), flat(expected)
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, Tensor):
            assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == other


@each_call
def test_both_ways_are_one_launch(watched: Watched, kind: str) -> None:
    make, direct, by_operator, _ = CALLS[kind]
    x, found = leaves(), []
    assert watched.way(lambda: found.append(make(x))) == direct
    with Passing():
        assert watched.way(lambda: found.append(make(x))) == by_operator
    first, second = watched.gpu.launches
    assert first.plan is second.plan, "prepared once"
    for name in "qkv":
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr() == x[name].data_ptr()
    assert_same(first, second)
    if kind == "custom":
        assert first.given is not None and first.given.tables is not None and first.given.lists is not None
        assert first.given.tables[0] is x["table"] and first.given.numbers == [2.5, SK - SQ]
        assert first.given.lists is second.given.lists, "made once"
    assert torch.equal(*found)


def gradients(x: dict[str, Tensor], **more: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(x).float().sum(), list(x.values()), **more)


def test_gradients_go_both_ways_to_the_same_launches(watched: Watched) -> None:
    x, found = leaves(*NAMES), []
    assert watched.way(lambda: found.append(gradients(x)))[-1] == "bwd_cuda"
    direct, watched.gpu.calls[:] = list(watched.gpu.calls), []
    with Passing():
        assert watched.way(lambda: found.append(gradients(x)))[-2] == "custom_bwd"
    assert [name for name, _ in watched.gpu.calls] == [name for name, _ in direct]
    assert "bwd_sm90_custom" in dict(direct)
    for (_, mine), (_, other) in zip(direct, watched.gpu.calls, strict=True):
        assert_same(mine, other)
    assert all(map(torch.equal, *found)) and all(grad.any() for grad in found[0])


def test_gradients_that_are_watched_are_the_operators(watched: Watched) -> None:
    """Also where only they are."""
    x = leaves("q")
    for mode in (Passing(), torch.profiler.profile()):
        out = call(x).float().sum()
        with mode:
            assert watched.way(out.backward)[0] == "custom_bwd", type(mode).__name__


def test_gradients_of_other_kinds_of_tensors_are_the_operators(watched: Watched) -> None:
    plain = leaves(*NAMES)
    expected = gradients(plain)
    for name in ("bias", "table", "alibi"):
        x = {**plain, name: imaginary(plain[name].detach()).requires_grad_()}
        found: list[tuple[Tensor, ...]] = []
        assert watched.way(lambda x=x, found=found: found.append(gradients(x)))[-2] == "custom_bwd", name
        assert all(map(torch.equal, found[0], expected)), name


def test_gradients_of_gradients_are_the_operators(watched: Watched) -> None:
    """Which torch warns about: on the short way it would not know of them."""
    x = leaves("q")
    out = call(x).float().sum()
    assert watched.way(lambda: torch.autograd.grad(out, x["q"], create_graph=True))[0] == "custom_bwd"


def test_compiled_calls_have_the_operator_in_their_graph() -> None:
    """By Dynamo itself, on the CPU: what it traces is not what eager calls do."""
    torch._dynamo.reset()
    seen = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    x = {name: one.float() for name, one in leaves().items()}
    q = x["q"]
    compiled = torch.compile(lambda q: attn(q, x["k"], x["v"], bias=x["bias"]), backend=backend)
    expected = attn(q, x["k"], x["v"], bias=x["bias"])
    torch.testing.assert_close(compiled(q), expected)
    assert "cute_flash.custom_fwd.default" in seen


def test_operators_are_themselves_again() -> None:
    """After the tests above: on the CPU, by the CPU's kernels."""
    x = {name: one.double() for name, one in leaves("q").items()}
    assert not ops.is_watched() and not x["q"].is_cuda
    assert call(x).dtype == torch.float64
