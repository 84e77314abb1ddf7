"""The torch operator of decoding with a K/V cache: `cute_flash::decode`.

    decode(q, k_cache, v_cache or None, *DecodeArgs) -> (out, lse)

It writes k_new and v_new into the caches, and the output into `args.out` if the caller provides it. An operator must
not return its argument, so the first result is then empty. The operator has dispatcher kernels for CPU
(`reference.decode`), CUDA (`runtime.decode`), fake tensors, and Autograd, which refuses tensors that require grad.

`runtime.decode.run` checks a call with `describe_decode`, as the CPU and fake kernels do.

`cute_flash.decode` calls `decode`, which bypasses the dispatcher for CUDA calls unless `ops.is_observed`, as
`ops.attention` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.ops import (
    LIBRARY,
    PLAIN_TYPES,
    SPARSE_KEYS,
    has_tangents,
    is_mapped,
    is_observed,
    is_plain,
    refuse_sparse,
    report,
    without_autocast,
)
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.checked import CudaFunctions, on_host
from cute_flash.spec.decode import SCHEMA, TENSOR_FIELDS, DecodeArgs, decode_outputs, describe_decode, tensors_of
from cute_flash.spec.overlap import check_append

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_TENSOR_NAMES = ("q", "k_cache", "v_cache", *TENSOR_FIELDS)
_DIRECT_TYPES = PLAIN_TYPES | {bool, int, float}

LIBRARY.define(
    f"decode(Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, {SCHEMA}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
decode_op = torch.ops.cute_flash.decode.default


def _check_values(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, return_lse: bool = True
) -> None:
    """Raise `ValueError` if lengths, offsets, page indices or positions are wrong."""
    from cute_flash.reference.decode import read_sequences

    describe_decode(q, k_cache, v_cache, args, "cuda")
    read_sequences(q, k_cache, on_host(args))


_cuda = CudaFunctions("cute_flash.runtime.decode", run=_check_values)


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, return_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """Append to the caches, and compute out and lse. Without `return_lse`, the values of lse are undefined."""
    if torch.is_grad_enabled():
        refuse_grad(q, k_cache, v_cache, args)
    if not _is_dynamo_compiling() and is_direct(q, k_cache, v_cache, args):
        return _cuda.run(q, k_cache, v_cache, args, return_lse)
    if not _is_dynamo_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        _refuse_mapped(q, k_cache, v_cache, args)
    out, lse = decode_op(q, k_cache, v_cache, *args)
    return (out if args.out is None else args.out), lse


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs, arch: ArchSpec | None = None) -> None:
    """Raise an error if `decode` would not support the call, on the device of q or on a GPU. Nothing is launched."""
    if torch.is_grad_enabled():
        refuse_grad(q, k_cache, v_cache, args)
    if arch is not None or q.is_cuda:
        _cuda.plan_call(q, k_cache, v_cache, args, arch)
    else:
        describe_decode(q, k_cache, v_cache, args)
        if type(k_cache) in PLAIN_TYPES and (v_cache is None or type(v_cache) in PLAIN_TYPES):
            check_append(k_cache, v_cache, args)


def is_direct(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> bool:
    """Whether the dispatcher can be bypassed, because it would only call the operator's CUDA implementation."""
    if not q.is_cuda or is_observed():
        return False
    if type(q) not in PLAIN_TYPES or type(k_cache) not in PLAIN_TYPES:
        return False
    if v_cache is not None and type(v_cache) not in PLAIN_TYPES:
        return False
    for x in args:
        if x is not None and type(x) not in _DIRECT_TYPES:
            return False
    # Only these tensors can have the negative bit (torch's lazy negation): tensors with it have an element stride of 2,
    # and the others are integers or have contiguous rows.
    return is_plain(args.rotary_cos, args.rotary_sin, args.alibi, args.sinks, args.k_scale, args.v_scale)


def refuse_grad(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    """Raise `UnsupportedError` for a tensor that requires grad."""
    for name, x in zip(_TENSOR_NAMES, (q, k_cache, v_cache, *tensors_of(args))):
        if x is not None and x.requires_grad:
            raise UnsupportedError(
                f"{name} requires grad, but attn_decode computes no gradients: use attn, or call attn_decode under "
                "torch.no_grad()"
            )


def _refuse_mapped(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, args: DecodeArgs) -> None:
    """Raise `UnsupportedError` if `vmap` maps a tensor."""
    for name, x in zip(_TENSOR_NAMES, (q, k_cache, v_cache, *tensors_of(args))):
        if x is not None and is_mapped(x):
            raise UnsupportedError(
                f"vmap over {name} of attn_decode, which writes to its caches: call it in a loop, or make the mapped "
                "dimension a part of the batch"
            )


# ---- dispatcher kernels
# ----------------------------------------------------------------------------------------------------------


def _results(out: Tensor, lse: Tensor, args: DecodeArgs) -> tuple[Tensor, Tensor]:
    return (out if args.out is None else out.new_empty(0)), lse


def _decode_cuda(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *values: Any) -> Any:
    args = DecodeArgs(*values)
    out, lse = _cuda.run(q, k_cache, v_cache, args)
    return _results(out, lse, args)


def _decode_cpu(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *values: Any) -> Any:
    from cute_flash.reference import decode as reference

    args = DecodeArgs(*values)
    describe_decode(q, k_cache, v_cache, args)
    check_append(k_cache, v_cache, args)
    with without_autocast():
        return _results(*reference.forward(q, k_cache, v_cache, args), args)


def _decode_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *values: Any) -> Any:
    args = DecodeArgs(*values)
    describe_decode(q, k_cache, v_cache, args)
    report(q, "decode", q, k_cache, v_cache, args)
    return _results(*decode_outputs(q, v_cache, args), args)


def _decode_autograd(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *values: Any) -> Any:
    args = DecodeArgs(*values)
    if has_tangents(q, k_cache, v_cache, *tensors_of(args)):
        raise UnsupportedError(
            "forward-mode differentiation of attn_decode, which computes no gradients: use attn, in reverse mode"
        )
    if torch.is_grad_enabled():
        refuse_grad(q, k_cache, v_cache, args)
    with torch._C._AutoDispatchBelowAutograd():
        return decode_op(q, k_cache, v_cache, *values)


for _key in SPARSE_KEYS:
    LIBRARY.impl("decode", refuse_sparse, _key)
LIBRARY.impl("decode", _decode_cpu, "CPU")
LIBRARY.impl("decode", _decode_cuda, "CUDA")
LIBRARY.impl("decode", _decode_autograd, "Autograd")
torch.library.register_fake("cute_flash::decode", _decode_fake, lib=LIBRARY)
