"""The torch operators: `cute_flash::attention_fwd` and `cute_flash::attention_bwd`.

    attention_fwd(q, k, v, *AttentionArgs) -> (out, lse, max_logit)
    attention_bwd(dout, dlse, q, k, v, out, lse, *AttentionArgs) -> (dq, dk, dv, gradients)

q, k and v are (B, H, S, D) or, with `cu_seqlens_q`, (T, H, D), of any strides. `out` is dense; a 4-D `out` has the
stride order of q, a 3-D one is contiguous. `lse` is the natural logarithm, (B, H, Sq) or (H, T), fp32 (fp64 for fp64
inputs). `gradients` has an entry for each of `AttentionArgs.differentiable`: alibi, sinks, bias and captured tensors.
Results that a call does not need are empty tensors.

Both operators have dispatcher kernels for CPU (`reference`), CUDA (`runtime.launcher`), Autograd, fake tensors and
vmap. The Autograd kernel of `attention_bwd` raises on a second backward. Autograd is registered with `Library.impl`,
because `torch.library.register_autograd` takes time quadratic in the number of arguments.

`api.py` calls `attention`, which bypasses the dispatcher for CUDA calls unless `is_observed`: it calls the CUDA
implementation with the same arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.autograd.function import _SingleLevelFunction

from cute_flash.errors import UnsupportedError
from cute_flash.spec.args import SAVED, SCHEMA, AttentionArgs, from_schema, needs_grad, to_schema
from cute_flash.spec.checked import CudaFunctions, on_host
from cute_flash.spec.describe import describe, refusing_at_forward
from cute_flash.spec.layout import warn_if_swapped
from cute_flash.spec.shapes import outputs

# Module globals, because looking a function up in torch._C takes as long as calling it.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiling = torch._C._autograd._profiler_enabled
_tracing = torch._C._get_tracing_state
_autocasting = torch._C._is_any_autocast_enabled
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
# Types without __torch_function__ or __torch_dispatch__ overrides.
PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))

LIBRARY = torch.library.Library("cute_flash", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(f"attention_fwd(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor, Tensor)", tags=_TAGS)
LIBRARY.define(
    f"attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
    tags=_TAGS,
)
attention_fwd = torch.ops.cute_flash.attention_fwd.default
attention_bwd = torch.ops.cute_flash.attention_bwd.default

# Operators of torch whose CUDA kernels an integration overrides, and these kernels. `cute_flash.warmup` calls them with
# fake tensors, for which torch calls no CUDA kernel.
OVERRIDDEN: dict[Any, Callable[..., Any]] = {}

Outputs = tuple[Tensor, Tensor, Tensor | None]


def _check_forward(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, is_recorded: bool = False) -> None:
    """Raise `ValueError` if offsets or lengths of a varlen call are wrong."""
    from cute_flash.reference.varlen import sequences

    if args.cu_seqlens_q is not None:
        describe(q, k, v, args, "cuda")
        sequences(q, k, on_host(args))


def _check_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
    """The same for the backward, because the offsets may have been written to since the forward."""
    _out, _lse, args = others
    _check_forward(q, k, v, args)


_cuda = CudaFunctions("cute_flash.runtime.launcher", forward=_check_forward, backward=_check_backward)


# ---- the entry point of api.py
# ----------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, returns_lse: bool = True
) -> tuple[Tensor, Any, Tensor | None]:
    """Compute out, lse and max_logit, which is None or empty unless `args.return_max_logit`.

    Without `returns_lse`, lse may be None: autograd is faster with one output.
    """
    if _is_dynamo_compiling() or not is_direct(q, k, v, args):
        return _observed_attention(q, k, v, args)
    if not _is_grad_enabled():
        return _cuda.forward(q, k, v, args)
    if args.tensors:
        others = args.differentiable
        if _requires_grad(q, k, v, *others):
            return _apply(_cuda.forward, args, q, k, v, *others)
    elif q.requires_grad or k.requires_grad or v.requires_grad:
        if returns_lse or args.return_max_logit:
            return _apply(_cuda.forward, args, q, k, v)
        return _apply_plain(_cuda.forward, args, q, k, v), None, None
    return _cuda.forward(q, k, v, args)


def is_direct(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> bool:
    """Whether the dispatcher can be bypassed, because it would only call the operator's CUDA implementation.

    This holds if the tensors are on CUDA, none is a subclass with overrides or has the negative bit, and `is_observed`
    is false.
    """
    # The negative bit (torch's lazy negation) of q, k and v needs no check: such tensors are views of imaginary parts,
    # with an element stride of 2, and the launch copies tensors with that stride.
    if (
        not q.is_cuda
        or is_observed()
        or type(q) not in PLAIN_TYPES
        or type(k) not in PLAIN_TYPES
        or type(v) not in PLAIN_TYPES
    ):
        return False
    return not args.tensors or is_plain(*args.tensors)


def is_observed() -> bool:
    """Whether a mode, a functorch transform, autocast, forward-mode AD, a profiler or torch.jit.trace is active."""
    return bool(
        _dispatch_modes()
        or _function_modes()
        or _transform() is not None
        or _autocasting()
        or _profiling()
        or forward_ad._current_level >= 0
        or _tracing() is not None
    )


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether no tensor is a subclass with overrides or has the negative bit."""
    for x in tensors:
        if x is not None and (type(x) not in PLAIN_TYPES or x.is_neg()):
            return False
    return True


def is_recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> bool:
    """Whether autograd records a call of `attention`."""
    return _is_grad_enabled() and _requires_grad(q, k, v, *args.differentiable)


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _observed_attention(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Outputs:
    """Call the operator through the dispatcher, after two steps that the dispatcher does not do.

    These are autocast, and the check that `vmap` does not map a tensor in a list.
    """
    if _autocasting():
        q, k, v = autocast(q, k, v)
    if not _is_dynamo_compiling() and _transform() is not None:
        _refuse_mapped(*args.captures, *args.block_mask)
    return attention_fwd(q, k, v, *to_schema(args))


def autocast(q: Tensor, k: Tensor, v: Tensor, device: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """If autocast is enabled on a device, by default that of q, cast tensors to `autocast_dtype`."""
    device = device or q.device.type
    return q.to(autocast_dtype(q, device)), k.to(autocast_dtype(k, device)), v.to(autocast_dtype(v, device))


def autocast_dtype(x: Tensor, device: str) -> torch.dtype:
    """The dtype of x after autocast on a device: floating-point tensors except fp64 are cast, as in torch's SDPA."""
    # Compared with names, because Dynamo of torch 2.9 does not trace `torch.amp.is_autocast_available`.
    is_enabled = device in ("cuda", "cpu") and torch.is_autocast_enabled(device)
    if not is_enabled or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(device)


def _refuse_tangents(*inputs: Tensor | None) -> None:
    """Raise `UnsupportedError` for forward-mode tangents, which torch would silently drop, as if they were 0."""
    if has_tangents(*inputs):
        raise UnsupportedError("forward-mode differentiation of attn: use reverse mode, such as out.backward()")


def has_tangents(*inputs: Tensor | None) -> bool:
    """Whether a tensor has a tangent at the current level of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    return any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs)


def _refuse_mapped(*tensors: Tensor) -> None:
    """Raise `UnsupportedError` if `vmap` maps a tensor of a mod or block mask: vmap does not unwrap lists."""
    for x in tensors:
        if is_mapped(x):
            raise UnsupportedError(
                "vmap over a tensor that score_mod, mask_mod or a block_mask captures, or over the bias of "
                "attn_varlen: call the function in a loop, or give the tensor a batch dimension and index it with b"
            )


def is_mapped(x: Tensor) -> bool:
    """Whether `vmap` maps a dimension of the tensor."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


# ---- autograd
# ----------------------------------------------------------------------------------------------------------


class Attention(Function):
    """The autograd Function of attention, for calls that bypass the dispatcher and for the Autograd kernel."""

    @staticmethod
    def forward(ctx: Any, run: Any, args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        """Compute attention and save tensors for the backward.

        Args:
            run: The function that computes the results, with the parameters of `runtime.launcher.forward`.
            args: The call's arguments.
            q: Queries.
            k: Keys.
            v: Values.
            *others: `args.differentiable`, so that autograd records them; left out if `args` has no tensors.
        """
        results = run(q, k, v, args, True)
        _save(ctx, args, (q, k, v), others, results)
        return results

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _max_logit: Any) -> Any:
        if dout is None and dlse is None:
            return (None,) * (5 + ctx.num_others)
        q, k, v, out, lse, *saved = ctx.saved_tensors
        args = _with_saved(ctx.args, saved, ctx.num_others) if saved else ctx.args
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, grads = gradients(dout, dlse, q, k, v, out, lse, args)
        return None, None, dq, dk, dv, *grads[: ctx.num_others]


class PlainAttention(Function):
    """`Attention` of calls that return only `out` and have no tensors besides q, k and v."""

    @staticmethod
    def forward(ctx: Any, run: Any, args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = run(q, k, v, args, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.args = args
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv, _ = gradients(dout, None, q, k, v, out, lse, ctx.args)
        return None, None, dq, dk, dv


class TransformedAttention(_SingleLevelFunction):
    """`Attention` for functorch transforms, which require a separate `setup_context`. It records one level of grad."""

    @staticmethod
    def forward(run: Any, args: AttentionArgs, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        return run(q, k, v, args, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _run, args, q, k, v, *others = inputs
        _save(ctx, args, (q, k, v), tuple(others), output)

    backward = Attention.backward


# The C++ `apply`, without the checks of `Function.apply` for functorch transforms. They are not needed: `is_direct` is
# false inside a transform, and `_fwd_autograd` checks for transforms itself.
_apply, _apply_plain = super(Function, Attention).apply, super(Function, PlainAttention).apply


def _save(ctx: Any, args: AttentionArgs, qkv: tuple[Tensor, ...], others: tuple[Any, ...], results: Any) -> None:
    """Save q, k, v, out, lse and the tensors of `args` for the backward. `ctx.args` keeps the rest of `args`."""
    out, lse, max_logit = results
    ctx.set_materialize_grads(False)
    if max_logit is not None:
        ctx.mark_non_differentiable(max_logit)
    if args.tensors:
        saved = [getattr(args, name) for name in SAVED]
        ctx.save_for_backward(*qkv, out, lse, *others, *saved, *args.block_mask)
        empty: dict[str, Any] = dict.fromkeys((*SAVED, "alibi", "sinks", "bias"))
        args = args._replace(captures=(), block_mask=(), **empty)
    else:
        ctx.save_for_backward(*qkv, out, lse)
    ctx.args, ctx.num_others = args, len(others)


def _with_saved(args: AttentionArgs, saved: list[Any], num_others: int) -> AttentionArgs:
    """Put the tensors that `_save` saved back into `args`."""
    alibi, sinks, bias, *captures = saved[:num_others]
    rest = saved[num_others:]
    named: dict[str, Any] = dict(zip(SAVED, rest))
    return args._replace(
        alibi=alibi, sinks=sinks, bias=bias, captures=tuple(captures), block_mask=tuple(rest[len(SAVED) :]), **named
    )


def gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, args: AttentionArgs
) -> tuple[Any, ...]:
    """Compute dq, dk, dv and the gradients of `args.differentiable`, bypassing the dispatcher if possible."""
    # With grad mode on (create_graph=True), autograd must record the operator, whose own backward raises. ZeroTensors,
    # which autograd may pass, have no memory; the dispatcher materializes them.
    can_bypass = not _is_grad_enabled() and is_direct(q, k, v, args) and is_plain(dout, dlse)
    if can_bypass and not (dout._is_zerotensor() or (dlse is not None and dlse._is_zerotensor())):
        return _cuda.backward(dout, dlse, q, k, v, out, lse, args)
    dq, dk, dv, grads = attention_bwd(dout, dlse, q, k, v, out, lse, *to_schema(args))
    return dq, dk, dv, [grad if needed else None for grad, needed in zip(grads, _has_gradient(args))]


def _has_gradient(args: AttentionArgs) -> list[bool]:
    """Which of `args.differentiable` get a gradient."""
    captures = args.captures_needing_grad
    return [
        args.alibi is not None,
        args.sinks is not None,
        args.bias_needs_grad,
        *(i in captures for i in range(len(args.captures))),
    ]


# ---- dispatcher kernels of the operators
# ----------------------------------------------------------------------------------------------------------


def _filled(results: Any, q: Tensor) -> list[Tensor]:
    """Replace None by an empty tensor, because operators return only tensors."""
    return [q.new_empty(0) if x is None else x for x in results]


class _Recording(threading.local):
    """Whether autograd records the call whose kernel runs, which the kernels of the dispatcher cannot see."""

    is_active = False


_recording = _Recording()


@contextmanager
def _recorded(is_recorded: bool) -> Iterator[None]:
    """Tell the kernels inside the block if autograd records the call at this level. Outer levels may record it too."""
    before = _recording.is_active
    _recording.is_active = before or is_recorded
    try:
        yield
    finally:
        _recording.is_active = before


def _check(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> None:
    """Check a call of the CPU or of fake tensors. On CUDA, `runtime.launcher` checks more."""
    problem = describe(q, k, v, args)
    if _recording.is_active:
        with refusing_at_forward():
            problem.check_gradients("cpu" if q.device.type in ("cpu", "meta") else "cuda")


def _fwd_cuda(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
    return tuple(_filled(_cuda.forward(q, k, v, from_schema(values), _recording.is_active), q))


def _bwd_cuda(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *values: Any
) -> Any:
    dq, dk, dv, grads = _cuda.backward(dout, dlse, q, k, v, out, lse, from_schema(values))
    return dq, dk, dv, _filled(grads, q)


def _fwd_cpu(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
    from cute_flash.reference import cpu

    args = from_schema(values)
    _check(q, k, v, args)
    if args.cu_seqlens_q is None:
        warn_if_swapped(q, k)
    with without_autocast():
        return tuple(_filled(cpu.forward(q, k, v, args), q))


def _bwd_cpu(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *values: Any
) -> Any:
    from cute_flash.reference import cpu

    with without_autocast():
        dq, dk, dv, grads = cpu.backward(dout, dlse, q, k, v, out, lse, from_schema(values))
    return dq, dk, dv, _filled(grads, q)


def without_autocast() -> AbstractContextManager:
    """Disable autocast, which would round the fp32 matrix products of the CPU path."""
    return torch.autocast("cpu", enabled=False) if _autocasting() else nullcontext()


def report(q: Tensor, call: str, *arguments: Any) -> bool:
    """If `cute_flash.warmup` made the fake mode of q, record the call there.

    Return whether the call was planned for a GPU, which also checks it.
    """
    recorder = getattr(getattr(q, "fake_mode", None), "cute_flash_recorder", None)
    return recorder is not None and getattr(recorder, call)(*arguments)


def _fwd_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
    args = from_schema(values)
    if not report(q, "forward", q, k, v, args, _recording.is_active):
        _check(q, k, v, args)
    return tuple(_filled(outputs(q, v, args), q))


def _bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *values: Any
) -> Any:
    args = from_schema(values)
    report(q, "backward", dlse, q, k, v, args)
    pairs = zip(args.differentiable, _has_gradient(args))
    grads = [torch.empty_like(x) if x is not None and needed else None for x, needed in pairs]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _filled(grads, q)


def _fwd_autograd(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
    args, modes = from_schema(values), _grad_modes()
    _refuse_tangents(q, k, v, *args.differentiable)

    def below_autograd(q: Tensor, k: Tensor, v: Tensor, _args: AttentionArgs, is_recorded: bool = False) -> Any:
        with torch._C._AutoDispatchBelowAutograd(), _in_modes(*modes), _recorded(is_recorded):
            return attention_fwd(q, k, v, *values)

    if not is_recorded(q, k, v, args):
        return below_autograd(q, k, v, args)
    # A tensor that requires no gradient for the caller may require one here: vmap and inner levels of `torch.func.grad`
    # wrap it.
    args = args._replace(needs_grad=needs_grad(args.bias, args.captures))
    if _transform() is None:
        return _apply(below_autograd, args, q, k, v, *args.differentiable)
    with _one_level_of_autograd():
        return TransformedAttention.apply(below_autograd, args, q, k, v, *args.differentiable)  # type: ignore[attr-defined]


def _grad_modes() -> tuple[bool, bool]:
    """Whether reverse mode and forward mode are enabled."""
    return _is_grad_enabled(), torch._C._is_fwd_grad_enabled()


@contextmanager
def _in_modes(reverse: bool, forward: bool) -> Iterator[None]:
    """Restore the caller's modes for outer levels of nested transforms: a Function disables both while it runs."""
    if _transform() is None:
        yield
    else:
        with torch.set_grad_enabled(reverse), forward_ad._set_fwd_grad_enabled(forward):
            yield


def _one_level_of_autograd() -> AbstractContextManager:
    """Allow a Function to record one level of grad: functorch runs an Autograd kernel once for each level."""
    from torch._functorch.autograd_function import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


class NoDoubleBackward(_SingleLevelFunction):
    """Computes `attention_bwd`. Its own backward raises; without it, second derivatives would silently be 0."""

    @staticmethod
    def forward(run: Any, *tensors: Any) -> Any:
        return run()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(
            "second derivatives of attn: only first derivatives are implemented; use torch's SDPA with SDPBackend.MATH"
        )


def _bwd_autograd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *values: Any
) -> Any:
    tensors, modes = (dout, dlse, q, k, v, *from_schema(values).differentiable), _grad_modes()
    _refuse_tangents(*tensors)

    def below_autograd() -> Any:
        with torch._C._AutoDispatchBelowAutograd(), _in_modes(*modes):
            dq, dk, dv, grads = attention_bwd(dout, dlse, q, k, v, out, lse, *values)
        return dq, dk, dv, *grads

    if _is_grad_enabled() and _requires_grad(*tensors):
        with nullcontext() if _transform() is None else _one_level_of_autograd():
            dq, dk, dv, *grads = NoDoubleBackward.apply(below_autograd, *tensors)  # type: ignore[attr-defined]
    else:
        dq, dk, dv, *grads = below_autograd()
    return dq, dk, dv, grads


# ---- vmap
# ----------------------------------------------------------------------------------------------------------


def _vmap(op: Any, info: Any, in_dims: tuple[Any, ...], values: tuple[Any, ...]) -> tuple[Any, Any]:
    """Call an operator once per element of the mapped dimension, for any arguments."""

    def element(x: Any, dim: Any, i: int) -> Any:
        if isinstance(x, (list, tuple)):
            return [element(y, d, i) for y, d in zip(x, dim or [None] * len(x))]
        return x if dim is None else x.select(dim, i)

    calls = [op(*(element(x, dim, i) for x, dim in zip(values, in_dims, strict=True))) for i in range(info.batch_size)]
    stacked = [
        [torch.stack(y) for y in zip(*x)] if isinstance(x[0], (list, tuple)) else torch.stack(x) for x in zip(*calls)
    ]
    return tuple(stacked), tuple([0] * len(x) if isinstance(x, list) else 0 for x in stacked)


def _fwd_vmap(info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, *values: Any) -> Any:
    args, dims = from_schema(values), in_dims[:3]
    if q.dim() - (dims[0] is not None) != 4 or args.tensors or args.return_max_logit:
        return _vmap(attention_fwd, info, in_dims, (q, k, v, *values))
    # A plain dense call: the mapped dimension becomes part of the batch.
    Q, K, V = (_front(x, dim, info.batch_size).flatten(0, 1) for x, dim in zip((q, k, v), dims))
    out, lse, max_logit = attention_fwd(Q, K, V, *values)
    out, lse = (x.unflatten(0, (info.batch_size, -1)) for x in (out, lse))
    return (out, lse, max_logit.expand(info.batch_size, 0)), (0, 0, 0)


def _front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Move the mapped dimension to the front, or add one if the tensor is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _bwd_vmap(info: Any, in_dims: Any, *values: Any) -> Any:
    return _vmap(attention_bwd, info, in_dims, values)


def refuse_sparse(*_: Any) -> Any:
    """The kernel of sparse tensors."""
    raise UnsupportedError("a tensor of the call is sparse: call to_dense() on it")


# Dispatch keys of sparse tensors.
SPARSE_KEYS = ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")
for _key in SPARSE_KEYS:
    LIBRARY.impl("attention_fwd", refuse_sparse, _key)
LIBRARY.impl("attention_fwd", _fwd_cpu, "CPU")
LIBRARY.impl("attention_fwd", _fwd_cuda, "CUDA")
LIBRARY.impl("attention_fwd", _fwd_autograd, "Autograd")
LIBRARY.impl("attention_bwd", _bwd_cpu, "CPU")
LIBRARY.impl("attention_bwd", _bwd_cuda, "CUDA")
LIBRARY.impl("attention_bwd", _bwd_autograd, "Autograd")
torch.library.register_fake("cute_flash::attention_fwd", _fwd_fake, lib=LIBRARY)
torch.library.register_fake("cute_flash::attention_bwd", _bwd_fake, lib=LIBRARY)
torch.library.register_vmap("cute_flash::attention_fwd", _fwd_vmap, lib=LIBRARY)
torch.library.register_vmap("cute_flash::attention_bwd", _bwd_vmap, lib=LIBRARY)
