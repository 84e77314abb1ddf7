"""The peers of the benchmark: cute_flash and its peers, behind one interface.

    available(direction)            None, or the reason why the peer cannot run that direction here
    context()                       a context manager for its calls, such as a backend switch; entered outside the
                                    timed part
    takes(head_dim)                 whether it takes a head dim; if not, the cells of this head dim leave it out
    prepare(q, k, v, ...)           returns a call without arguments that returns the output
    prepare_backward(q, k, v, ...)  runs the forward pass once; returns a call that returns dq, dk and dv

Inputs are (B, H, S, D) tensors, with heads before rows in memory (`bhsd`) or rows before heads (`bshd`). A peer
that takes (B, S, H, D) gets a contiguous tensor: a view of `bshd`, a copy of `bhsd`. Copies are not timed. A new peer
is one line in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from profiling.measure.timing import TimedCall

Call = Callable[[], Tensor]
Gradients = tuple[Tensor, ...]  # dq, dk, dv
BackwardCall = Callable[[], Gradients]

KERNELS = ("auto", "sm80", "sm90")
LAYOUTS = ("bhsd", "bshd")
NO_GPU = "no CUDA device"
# The largest relative difference, ‖a - b‖ / ‖b‖, of two results of the same function in 16 bits.
AGREEMENT = 2e-2
UP_TO_256 = range(1, 257)  # the head dims of FlashAttention and of cuDNN


def missing(load: Callable[[], object], needs_gpu: bool = True) -> str | None:
    """The reason why `load` fails, or None. Any exception of a peer's import counts."""
    if needs_gpu and not torch.cuda.is_available():
        return NO_GPU
    try:
        load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def to_bshd(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in tensors]


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A (B, H, S, D) tensor in the order of memory that `layout` names."""
    return x if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


# q, k and whether the mask is causal -> the forward pass. It makes masks, which are not timed.
MakeForward = Callable[[Tensor, Tensor, bool], Forward]
# q, k, v, dout and whether the mask is causal -> the call that computes the gradients.
PrepareBackward = Callable[[Tensor, Tensor, Tensor, Tensor, bool], BackwardCall]


@dataclass(frozen=True)
class Peer:
    """A library, or cute_flash: its functions are loaded when they are needed, and raise an error if it is missing."""

    name: str
    load: Callable[[], MakeForward]
    load_backward: Callable[[], PrepareBackward] | None = None  # None: by autograd
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_ours: bool = False
    is_bshd: bool = False  # whether its tensors are (B, S, H, D)
    head_dims: range | None = None  # head dims that the library takes; None: any

    def takes(self, head_dim: int) -> bool:
        return self.head_dims is None or head_dim in self.head_dims

    def available(self, direction: str = "fwd") -> str | None:
        return missing((self.load_backward if direction == "bwd" else None) or self.load)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        Q, K, V = to_bshd((q, k, v)) if self.is_bshd else (q, k, v)
        forward = self.load()(Q, K, causal)
        return lambda: forward(Q, K, V)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        Q, K, V, dO = to_bshd((q, k, v, dout)) if self.is_bshd else (q, k, v, dout)
        if self.load_backward is not None:
            return self.load_backward()(Q, K, V, dO, causal)
        return gradients_of(self.load()(Q, K, causal), (Q, K, V), dO).call


def as_bhsd(peer: Peer, out: Tensor) -> Tensor:
    """The output of any peer as a (B, H, S, D) view."""
    return out.transpose(1, 2) if peer.is_bshd else out


def gradients_of(
    forward: Callable[..., Any], inputs: Sequence[Tensor], dout: Tensor | None = None, is_bshd: bool = False
) -> TimedCall:
    """A call that computes the gradients of one forward pass again.

    They are the gradients of the inputs, and of keyword arguments of a partial function that require one. Without
    `dout`, it is random, and the same for peers whose output is (B, H, S, D) and for those whose output `is_bshd`.
    """
    leaves = [x.detach().requires_grad_() for x in inputs]
    # The benchmark runs under no_grad.
    with torch.enable_grad():
        out = forward(*leaves)
    keywords = forward.keywords.values() if isinstance(forward, partial) else ()
    leaves += [x for x in keywords if isinstance(x, Tensor) and x.requires_grad]
    if dout is None:
        shape = out.transpose(1, 2).shape if is_bshd else out.shape
        generator = torch.Generator(out.device).manual_seed(1)
        dout = torch.randn(shape, generator=generator, device=out.device, dtype=out.dtype)
        dout = dout.transpose(1, 2) if is_bshd else dout
    # In the stride order of the output, as the next layer's gradient would be, so that no peer copies it.
    dout = torch.empty_like(out).copy_(dout)
    return TimedCall(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
