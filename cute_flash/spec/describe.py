"""Checks the tensors and arguments of a call, and describes it as a `Problem`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cute_flash.errors import UnsupportedError
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.bias import BiasLayout
from cute_flash.spec.dropout import RECT_KEYS, RECT_ROWS
from cute_flash.spec.features import features_of
from cute_flash.spec.layout import layout_remedy, mixed_layouts
from cute_flash.spec.problem import CPU_DTYPES, Problem, check_dropout, check_heads, check_softcap
from cute_flash.spec.shapes import lse_dtype
from cute_flash.spec.values import check_range


def describe(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, device: str = "") -> Problem:
    """Check a call and return its `Problem`.

    Args:
        q: (B, H, Sq, D), or (Tq, H, D) with `args.cu_seqlens_q`.
        k: (B, Hkv, Sk, D) or (Tk, Hkv, D).
        v: (B, Hkv, Sk, Dv) or (Tk, Hkv, Dv).
        args: All other arguments.
        device: "cuda" or "cpu", the implementation that will run; by default that of q's device.

    Raises:
        ValueError: Arguments are invalid.
        UnsupportedError: The device has no kernel for the arguments.
    """
    varlen = args.cu_seqlens_q is not None
    _check_tensors(q, k, v, 3 if varlen else 4)
    _check_numbers(q, args)
    if varlen:
        batch, seqlen_q, seqlen_k = _check_offsets(q, k, args), q.shape[0], k.shape[0]
    else:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[2], k.shape[2]
    heads, heads_kv = q.shape[1], k.shape[1]
    try:
        check_heads(heads, heads_kv)
    except ValueError as error:
        raise ValueError(f"{error}{'' if varlen else layout_remedy(q, k)}") from None
    check_per_head("alibi", args.alibi, q, [(heads,), (batch, heads)])
    check_per_head("sinks", args.sinks, q, [(heads,)])
    sizes = batch, heads, seqlen_q, seqlen_k
    bias = None
    if args.has_mods:
        _check_mods(q, args, sizes)
        bias = None if args.bias is None else BiasLayout.of(args.bias, sizes)
    problem = Problem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=q.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        band=args.band,
        head_dim_v=None if v.shape[-1] == q.shape[-1] else v.shape[-1],
        features=features_of(args),
        mods=_mod_spec(args, bias) if args.has_mods else None,
        varlen=varlen,
        seqused_k=args.seqused_k is not None,
        block_sparse=bool(args.block_mask),
        out_fp32=args.out_fp32,
        batch_invariant=args.batch_invariant,
        dropout_origin=bool(args.dropout and args.dropout_origin),
        bias=bias,
        capture_shapes=tuple([tuple(x.shape) for x in args.captures]),
    )
    device = device or ("cpu" if q.device.type in ("cpu", "meta") else "cuda")
    problem.check(device)
    if device == "cuda":
        check_softcap(args.softcap)
        check_dropout(args.dropout)
        _check_alignment(args)
    return problem


def _mod_spec(args: AttentionArgs, bias: BiasLayout | None) -> Any:
    """The `ModSpec` of a call. `planning.bias` adds the fields about the gradient of the bias."""
    from cute_flash.score_mod.mod_spec import ModSpec

    loads: dict[str, Any] = {}
    if bias is not None:
        loads = {
            "bias_dtype": bias.dtype,
            "bias_paired_loads": bias.has_paired_loads,
            # TMA changes the tile, and the strides of a bias may differ from batch to batch.
            "bias_tma": bias.fits_tma and not args.batch_invariant,
            "bias_varies_by_row": bias.varies_by_row,
        }
    sizes = args.block_mask_sizes
    return ModSpec(
        **loads,
        graphs=args.mods,
        block_mask_tile=(sizes[0], sizes[1]) if args.block_mask else None,
        bias_needs_grad=args.bias_needs_grad,
        captures_needing_grad=args.captures_needing_grad,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rank: int) -> None:
    expected = "(B, H, S, D)" if rank == 4 else "(T, H, D), the concatenated sequences"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {expected}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must agree")
        check_device(name, x, q)
    if k.shape[:-1] != v.shape[:-1]:
        remedy = mixed_layouts(k, v) if rank == 4 else ""
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v has {tuple(v.shape)}: all dimensions but the last must agree{remedy}"
        )
    if q.shape[-1] != k.shape[-1] or (rank == 4 and q.shape[0] != k.shape[0]):
        raise ValueError(f"q has shape {tuple(q.shape)} and k has {tuple(k.shape)}: batch and head dim must agree")


def check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}: they must agree")


def _check_numbers(q: Tensor, args: AttentionArgs) -> None:
    if not math.isfinite(args.scale):
        raise ValueError(f"scale={args.scale} is not finite: use a finite number")
    if not 0 <= args.softcap < math.inf:
        raise ValueError(f"softcap={args.softcap}: use a positive number, or None for no cap")
    for name in ("scale", "softcap"):
        check_range(name, getattr(args, name), lse_dtype(q.dtype))
    if not 0 <= args.dropout < 1:
        raise ValueError(f"dropout={args.dropout}: use a probability from 0 up to, not including, 1")
    rng = args.rng
    if rng is not None:
        if rng.dtype != torch.int64 or rng.shape != (2,):
            raise ValueError(f"rng is {rng.dtype} of shape {tuple(rng.shape)}: expected int64, (2)")
        check_device("rng", rng, q)
    origin = args.dropout_origin
    if origin and (len(origin) != 4 or min(origin) < 0 or origin[2] + q.shape[1] > origin[3]):
        raise ValueError(f"dropout_origin={origin}: give the first row, key and head, and the number of heads")
    if origin and args.cu_seqlens_q is not None:
        raise UnsupportedError("dropout_origin with cu_seqlens_q: leave out dropout_origin, or call attn per sequence")


def _check_alignment(args: AttentionArgs) -> None:
    """Raise `UnsupportedError` if a shard does not begin with a Philox rectangle (`spec.dropout`)."""
    if args.dropout and args.dropout_origin:
        row, key, *_ = args.dropout_origin
        if row % RECT_ROWS or key % RECT_KEYS:
            raise UnsupportedError(
                f"dropout on cuda of a shard that begins at row {row} and key {key}: the row must be a multiple of "
                f"{RECT_ROWS} and the key a multiple of {RECT_KEYS}; use chunks of a multiple of {RECT_ROWS} tokens, "
                "or method='ulysses'"
            )


@contextmanager
def refusing_at_forward() -> Iterator[None]:
    """Add a remedy to errors about gradients that the forward raises, for calls that need no gradient."""
    try:
        yield
    except UnsupportedError as error:
        raise type(error)(f"{error}; if you need no gradient, call it under torch.no_grad()") from None


def check_rng(args: AttentionArgs) -> None:
    """Raise `ValueError` for dropout without a seed, which `describe` accepts because `supports` draws no seed."""
    if args.dropout and args.rng is None:
        raise ValueError(f"dropout={args.dropout} needs rng: give (seed, offset), int64, of shape (2)")


def _check_offsets(q: Tensor, k: Tensor, args: AttentionArgs) -> int:
    """Check the offsets of a varlen batch and return the number of sequences."""
    cu_q, cu_k = args.cu_seqlens_q, args.cu_seqlens_k
    assert cu_q is not None
    if cu_k is None:
        raise ValueError("cu_seqlens_q without cu_seqlens_k: give both")
    check_int32("cu_seqlens_q", cu_q, q, "B + 1")
    check_int32("cu_seqlens_k", cu_k, q, "B + 1")
    batch = cu_q.shape[0] - 1
    if cu_k.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_q has {batch + 1} offsets and cu_seqlens_k has {cu_k.shape[0]}: they must agree")
    if args.seqused_k is not None:
        check_int32("seqused_k", args.seqused_k, q, "B")
        if args.seqused_k.shape[0] != batch:
            raise ValueError(
                f"seqused_k has {args.seqused_k.shape[0]} lengths: expected {batch}, one for each sequence"
            )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ValueError(f"{name}={value} is negative: use an upper bound of the lengths, or None")
    return batch


def check_int32(name: str, x: Tensor, q: Tensor, size: str) -> None:
    if x.dim() != 1 or (size == "B + 1" and x.shape[0] == 0):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({size})")
    if x.dtype != torch.int32:
        raise ValueError(f"{name} is {x.dtype}: use torch.int32")
    check_device(name, x, q)


def check_per_head(name: str, x: Tensor | None, q: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: give a tensor with a value for each query head")
    if tuple(x.shape) not in shapes:
        choices = " or ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {choices}, a value for each query head")
    check_device(name, x, q)
    check_float(name, x)


def check_float(name: str, x: Tensor) -> None:
    if str(x.dtype).removeprefix("torch.") not in CPU_DTYPES:
        raise UnsupportedError(f"{name} is {x.dtype}: use one of {', '.join(CPU_DTYPES)}")


def _check_tables(args: AttentionArgs, sizes: tuple[int, int, int, int]) -> None:
    """Raise `ValueError` if a captured tensor is indexed by b, h, q_idx or kv_idx and has too few elements."""
    known = dict(zip(("b", "h", "q", "kv"), sizes))
    if args.cu_seqlens_q is not None:
        # Positions count within a sequence, and the host does not know its length.
        del known["q"], known["kv"]
    first = 0
    for graph in filter(None, (args.mods.score, args.mods.mask, args.mods.bwd)):
        for node in graph.nodes:
            for dim, index in enumerate(node.args if node.op == "load" else ()):
                table, name = args.captures[first + node.value], graph.nodes[index].value
                if graph.nodes[index].op == "input" and table.shape[dim] < known.get(name, 0):
                    name, least = {"q": "q_idx", "kv": "kv_idx"}.get(name, name), known[name]
                    raise ValueError(
                        f"a captured tensor of shape {tuple(table.shape)} is indexed by {name} in dimension {dim}: it "
                        f"needs at least {least} elements there"
                    )
        first += len(graph.captures)


def _check_precision(args: AttentionArgs, dtype: torch.dtype) -> None:
    """Raise `UnsupportedError` if a mod's result may depend on bits of a float64 tensor that fp32 does not have."""
    for graph in args.mods.present:
        if graph.rounded_operation is not None:
            raise UnsupportedError(
                f"{graph.rounded_operation} of elements of a captured float64 tensor with {dtype} inputs: mods compute "
                "in fp32, and the rounding could change the result; capture x.float(), or x as int64, which is exact"
            )


def _check_mods(q: Tensor, args: AttentionArgs, sizes: tuple[int, int, int, int]) -> None:
    if args.cu_seqlens_q is not None:
        for name, present in (("bias", args.bias is not None), ("block_mask", bool(args.block_mask))):
            if present:
                raise UnsupportedError(f"{name} in a varlen batch: use score_mod and mask_mod, or attn")
    bias = args.bias
    if bias is not None:
        if any(bias_size not in (1, size) for bias_size, size in zip(bias.shape, sizes, strict=True)):
            raise ValueError(f"bias has shape {tuple(bias.shape)}: it does not broadcast with (B, H, Sq, Sk) = {sizes}")
        check_device("bias", bias, q)
        check_float("bias", bias)
    for x in args.captures:
        check_device("a captured tensor", x, q)
    _check_tables(args, sizes)
    if q.dtype != torch.float64:
        _check_precision(args, q.dtype)
    if args.block_mask:
        from cute_flash.score_mod.block_mask import BlockMask

        mask = BlockMask.of_tensors(list(args.block_mask), list(args.block_mask_sizes))
        mask.check(*sizes, q.device, args.mods.mask)
