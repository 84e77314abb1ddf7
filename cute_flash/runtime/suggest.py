"""Writes the call of `cute_flash.warmup` that compiles a missing kernel, for the message of `NotCompiledError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cute_flash.errors import NotCompiledError
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.decode import TENSOR_FIELDS, DecodeArgs


@contextmanager
def suggesting(warmup: Callable[[], str]) -> Iterator[None]:
    """Add the call of `warmup` to the error for a kernel that is not compiled."""
    try:
        yield
    except NotCompiledError as error:
        raise NotCompiledError(f"{error}: compile it before with {warmup()}") from None


def attn_warmup(
    q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs, has_backward: bool, has_dlse: bool = False
) -> str:
    """The warm-up of a call of `attn` or `attn_varlen`. Tensors and mods have the names of their keywords."""
    options = _attn_options(args)
    if has_dlse:
        options.append("return_lse=True")
    if has_backward and torch.are_deterministic_algorithms_enabled() and not args.deterministic:
        options.append("deterministic=True")
    if args.cu_seqlens_q is not None:
        call = f"cute_flash.attn_varlen({', '.join(['q', 'k', 'v', 'cu_seqlens_q', 'cu_seqlens_k', *options])})"
        return _of_step(call, args.kernel_family, has_backward, has_dlse)
    shapes = {"q": q, "k": k, "v": v}
    if not q.is_contiguous() and q.transpose(1, 2).is_contiguous():
        shapes = {name: x.transpose(1, 2) for name, x in shapes.items()}
        options.append('layout="bshd"')
    if shapes["v"].shape == shapes["k"].shape:
        del shapes["v"]
    if shapes["k"].shape == shapes["q"].shape:
        del shapes["k"]
    sizes = [f"{name}_shape={tuple(x.shape)}" for name, x in shapes.items()]
    options = [*sizes, f"dtype={q.dtype}", *options, *["backward=True"] * has_backward]
    return _in_family(f"cute_flash.warmup({', '.join(options)})", args.kernel_family)


def decode_warmup(q: Tensor, args: DecodeArgs) -> str:
    """The warm-up of a call of `attn_decode`."""
    options = [f"{name}={name}" for name in TENSOR_FIELDS if getattr(args, name) is not None]
    options += [] if args.window_right == 0 else ["causal=False"]
    options += _window(args.window_left, args.window_right)
    options += [
        f"{name}={value!r}"
        for name in ("value_dim", "scale", "attention_chunk", "softcap", "num_splits")
        if (value := getattr(args, name)) is not None and (name != "scale" or args.value_dim is not None)
    ]
    options += ["rotary_interleaved=True"] * args.rotary_interleaved
    caches = ("q", "k_cache", "v_cache") if args.value_dim is None else ("q", "k_cache")
    return _of_step(f"cute_flash.attn_decode({', '.join([*caches, *options])})", "", False, False)


def _of_step(call: str, family: str, has_backward: bool, has_dlse: bool) -> str:
    """The warm-up of a step that makes a call."""
    if has_dlse:
        call = f"sum(x.sum() for x in {call})"
    elif has_backward:
        call = f"{call}.sum()"
    return _in_family(f"cute_flash.warmup(lambda: {call}{'.backward()' * has_backward})", family)


def _in_family(call: str, family: str) -> str:
    return f"with cute_flash.use_kernels({family!r}): {call}" if family else call


def _attn_options(args: AttentionArgs) -> list[str]:
    """The keywords of `attn` that select a kernel, as text."""
    options = ["causal=True"] * (args.window_right == 0) + _window(args.window_left, args.window_right)
    options += [f"attention_chunk={args.attention_chunk}"] * (args.attention_chunk is not None)
    options += [f"{name}={value}" for name in ("softcap", "dropout") if (value := getattr(args, name))]
    options += [f"{name}=True" for name in ("return_max_logit", "batch_invariant") if getattr(args, name)]
    options += ["deterministic=True"] * (args.deterministic and not args.batch_invariant)
    options += ["out_dtype=torch.float32"] * args.out_fp32
    options += [f"{name}={name}" for name in ("alibi", "sinks", "bias", "seqused_k") if getattr(args, name) is not None]
    graphs = args.mods
    mods = {"score_mod": graphs.score, "mask_mod": graphs.mask, "score_mod_bwd": graphs.bwd}
    if args.block_mask:
        mods["mask_mod"] = None  # the block mask has it
        options.append("block_mask=block_mask")
    return options + [f"{name}={name}" for name, graph in mods.items() if graph is not None]


def _window(left: int | None, right: int | None) -> list[str]:
    """The keyword `window`, beside `causal`."""
    right = right or None
    return [] if left is None and right is None else [f"window={(left, right)}"]
