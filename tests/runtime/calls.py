"""Small calls, and their results on a fake GPU compared with those of the CPU path."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from cute_flash import ops
from cute_flash.reference import cpu
from cute_flash.runtime import launcher
from cute_flash.spec.args import AttentionArgs, to_schema

D, HEADS, BATCH = 16, 4, 2
# (left, right)
WINDOWS = [(None, None), (None, 0), (3, None), (4, 1)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def inputs(heads_kv: int = 2, sk: int = 9, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v of seven queries."""
    shapes = ((BATCH, HEADS, 7, D), (BATCH, heads_kv, sk, D), (BATCH, heads_kv, sk, D))
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def plain(scale: float = 0.3, left: int | None = None, right: int | None = None, **fields: Any) -> AttentionArgs:
    return AttentionArgs(scale=scale, window_left=left, window_right=right, **fields)


def layout(x: Tensor | None) -> Any:
    """Shape, strides and dtype; torch does not promise the strides of an empty tensor."""
    return None if x is None else (x.shape, x.stride() if x.numel() else None, x.dtype)


def run_forward(tensors: list[Tensor], args: AttentionArgs | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The launcher's results, equal to those of the CPU path; up to one rounding if an input is not contiguous.

    On some CPUs, torch's matrix products round differently for copies with other strides.
    """
    args = plain() if args is None else args
    held = _held(*tensors, args)
    before = [x.clone() for x in held]
    found, expected = launcher.forward(*tensors, args), cpu.forward(*tensors, args)
    for mine, theirs in zip(found, expected, strict=True):
        assert layout(mine) == layout(theirs)
        if mine is not None and theirs is not None:
            rounding = {"rtol": torch.finfo(mine.dtype).eps, "atol": 1e-6}
            exact = {"rtol": 0.0, "atol": 0.0}
            tolerance = exact if all(x.is_contiguous() for x in tensors) else rounding
            torch.testing.assert_close(mine, theirs, **tolerance)
    assert all(map(torch.equal, held, before)), "inputs were written"
    return found


def run_backward(
    tensors: list[Tensor],
    args: AttentionArgs | None = None,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    out: Tensor | None = None,
    rtol: float = 0.02,
    atol: float = 0.02,
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv and the gradients of `args.differentiable` of the launcher, close to those of the CPU path.

    `out` is memory for the output of the forward pass.
    """
    args = plain() if args is None else args
    made, lse, _max_logit = cpu.forward(*tensors, args)
    out = made if out is None else out.copy_(made)
    dout = normal(*out.shape, seed=5, dtype=out.dtype) if dout is None else dout
    call = (dout, dlse, *tensors, out, lse)
    held = _held(*(x for x in call if x is not None), args)
    before = [x.clone() for x in held]
    found, expected = (flat(backward(*call, args)) for backward in (launcher.backward, cpu.backward))
    promised = promised_layouts((*call, *to_schema(args)))
    for mine, theirs, fake in zip(found, expected, promised, strict=True):
        assert layout(mine) == layout(theirs) == (None if mine is None else fake)
        if mine is None or theirs is None:
            continue
        largest = theirs.abs().max().item() if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol * max(1.0, largest))
    unchanged = (torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(held, before, strict=True))
    assert all(unchanged), "inputs were written"
    return found


def flat(gradients: Any) -> tuple[Tensor | None, ...]:
    *qkv, others = gradients
    return *qkv, *others


def promised_layouts(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layouts of gradients that `attention_bwd` promises under fake tensors; computed once for equal arguments."""
    key = repr(tree_map_only(Tensor, lambda x: (x.shape, x.stride(), x.dtype, x.device, x.requires_grad), values))
    if key not in _promised:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _promised[key] = tuple(map(layout, flat(ops.attention_bwd(*values))))
    return _promised[key]


_promised: dict[str, tuple[Any, ...]] = {}


def _held(*values: Any) -> list[Tensor]:
    """All tensors of a call."""
    held: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            held.append(x)
        elif isinstance(x, tuple):
            held += _held(*x)
    return held
