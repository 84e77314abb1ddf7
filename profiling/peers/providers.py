"""The providers of the benchmark: cute_flash and its peers, behind one interface.

    available(direction)            None, or the reason why the provider cannot run that direction here
    context()                       a context manager for its calls, such as a backend switch; entered outside the
                                    timed part
    prepare(q, k, v, ...)           returns a call without arguments that returns the output
    prepare_backward(q, k, v, ...)  runs the forward pass once; returns a call that returns dq, dk and dv

Inputs are (B, H, S, D) tensors, with heads before rows in memory (`bhsd`) or rows before heads (`bshd`). A provider
that takes (B, S, H, D) gets a contiguous tensor: a view of `bshd`, a copy of `bhsd`. Copies are not timed. A new peer
is one line in `registry`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling.peers import fa4_cache

Call = Callable[[], Tensor]
Gradients = tuple[Tensor, ...]  # dq, dk, dv
BackwardCall = Callable[[], Gradients]

KERNELS = ("auto", "sm80", "sm90")
LAYOUTS = ("bhsd", "bshd")
NO_GPU = "no CUDA device"


class Provider(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def is_ours(self) -> bool: ...

    @property
    def is_bshd(self) -> bool:
        """Whether its output is (B, S, H, D)."""
        ...

    def available(self, direction: str = "fwd") -> str | None: ...

    def context(self) -> AbstractContextManager[Any]: ...

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call: ...

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall: ...


def _missing(load: Callable[[], object]) -> str | None:
    """The reason why `load` fails, or None. Any exception of a peer's import counts."""
    if not torch.cuda.is_available():
        return NO_GPU
    try:
        load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _bshd(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in tensors]


def in_layout(x: Tensor, layout: str) -> Tensor:
    """A (B, H, S, D) tensor in the order of memory that `layout` names."""
    return x if layout == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def _through_autograd(forward: Forward, inputs: Sequence[Tensor], dout: Tensor) -> BackwardCall:
    """A call that computes the gradients of one forward pass again."""
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    # The benchmark runs under no_grad.
    with torch.enable_grad():
        out = forward(q, k, v)
    # In the stride order of the output, as the next layer's gradient would be, so that no provider copies it.
    dout = torch.empty_like(out).copy_(dout)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


@dataclass(frozen=True)
class CuteFlash:
    name: str = "cute_flash"
    kernels: str = "auto"
    is_ours: ClassVar[bool] = True
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        return _missing(lambda: importlib.import_module("cute_flash").attn)

    def context(self) -> AbstractContextManager[Any]:
        if self.kernels == "auto":
            return nullcontext()
        return importlib.import_module("cute_flash").use_kernels(self.kernels)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        attn = importlib.import_module("cute_flash").attn
        return lambda: attn(q, k, v, causal=causal)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return _through_autograd(lambda q, k, v: self.prepare(q, k, v, causal)(), (q, k, v), dout)


@dataclass(frozen=True)
class Sdpa:
    """One backend of `torch.nn.functional.scaled_dot_product_attention`, called as users call it."""

    name: str
    backend: SDPBackend
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        return None if torch.cuda.is_available() else NO_GPU

    def context(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(self.backend)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        is_grouped = q.shape[1] != k.shape[1]
        return lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=is_grouped)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return _through_autograd(lambda q, k, v: self.prepare(q, k, v, causal)(), (q, k, v), dout)


def _is_causal(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """FlexAttention's mask_mod; as many keys as queries."""
    return row >= col


def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention compiled for the shapes of one cell.

    Compilations of earlier cells are dropped, because torch runs a function uncompiled after eight recompilations.
    """
    flex_attention = importlib.import_module("torch.nn.attention.flex_attention").flex_attention
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class Flex:
    """FlexAttention of torch, compiled; making the block mask is not timed."""

    name: str = "flex"
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = False

    def available(self, direction: str = "fwd") -> str | None:
        # On a GPU it compiles to a Triton kernel.
        return _missing(lambda: importlib.import_module("triton"))

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = self._forward(q, k, causal)
        return lambda: forward(q, k, v)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        return _through_autograd(self._forward(q, k, causal), (q, k, v), dout)

    def _forward(self, q: Tensor, k: Tensor, causal: bool) -> Forward:
        flex, module = _compiled_flex(), importlib.import_module("torch.nn.attention.flex_attention")
        lengths, is_grouped = (q.shape[2], k.shape[2]), q.shape[1] != k.shape[1]
        mask = module.create_block_mask(_is_causal, None, None, *lengths, q.device) if causal else None
        return lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=is_grouped)


# Functions of the flash-attn family on (B, S, H, D) tensors. They take q, k, v and causal; for gradients q, k, v, dout
# and causal.
BshdForward = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
BshdPrepareBackward = Callable[[Tensor, Tensor, Tensor, Tensor, bool], BackwardCall]


@cache
def fa3_ops() -> Any:
    """FlashAttention-3's ops, from the folder FA3_DIR (`_C.so`) or from its Python package."""
    folder = os.environ.get("FA3_DIR")
    if folder and not (Path(folder) / "_C.so").exists():
        raise FileNotFoundError(
            f"FA3_DIR={folder} holds no _C.so; name the folder of FlashAttention-3's library, or unset it"
        )
    if folder:
        # The op links the CUDA runtime that it was built with, which may not be torch's.
        runtime = Path(folder) / "libcudart.so.12"
        if runtime.exists():
            ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(Path(folder) / "_C.so"))
    else:
        importlib.import_module("flash_attn_interface")
    return torch.ops.flash_attn_3


def _fa3_forward() -> BshdForward:
    op = fa3_ops().fwd

    def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return op(q, k, v, softmax_scale=q.shape[-1] ** -0.5, is_causal=causal, num_splits=1)[0]

    return forward


def _fa3_backward() -> BshdPrepareBackward:
    """The backward op: the forward op has no autograd formula."""
    forward, backward = fa3_ops().fwd, fa3_ops().bwd

    def prepare(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}
        out, lse = forward(q, k, v, num_splits=1, **options)[:2]

        def call() -> Gradients:
            # The gradients are passed to the op, as its package does: its return values differ between versions.
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, **options)
            return dq, dk, dv

        return call

    return prepare


def _fa4_forward() -> BshdForward:
    func = fa4_cache.imported("flash_attn.cute").flash_attn_func
    return lambda q, k, v, causal: func(q, k, v, causal=causal)[0]


def _fa2_forward() -> BshdForward:
    func = importlib.import_module("flash_attn").flash_attn_func
    return lambda q, k, v, causal: func(q, k, v, causal=causal)


@dataclass(frozen=True)
class FlashAttention:
    """A member of the flash-attn family: (B, S, H, D) in and out."""

    name: str
    load: Callable[[], BshdForward]
    load_backward: Callable[[], BshdPrepareBackward] | None = None  # None: by autograd
    is_ours: ClassVar[bool] = False
    is_bshd: ClassVar[bool] = True

    def available(self, direction: str = "fwd") -> str | None:
        return _missing((self.load_backward if direction == "bwd" else None) or self.load)

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        forward = self.load()
        Q, K, V = _bshd((q, k, v))
        return lambda: forward(Q, K, V, causal)

    def prepare_backward(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> BackwardCall:
        Q, K, V, dO = _bshd((q, k, v, dout))
        if self.load_backward is not None:
            return self.load_backward()(Q, K, V, dO, causal)
        forward = self.load()
        return _through_autograd(lambda Q, K, V: forward(Q, K, V, causal), (Q, K, V), dO)


def registry(kernels: str = "auto") -> dict[str, Provider]:
    """All providers by name, ours first. `kernels` is the family that `cute_flash` runs."""
    providers: list[Provider] = [
        CuteFlash(kernels=kernels),
        # By name only: to compare the families in one run.
        CuteFlash("cute_flash-sm80", "sm80"),
        CuteFlash("cute_flash-sm90", "sm90"),
        Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
        # By name only: it compiles for every cell.
        Flex(),
        FlashAttention("fa3", _fa3_forward, _fa3_backward),
        FlashAttention(fa4_cache.NAME, _fa4_forward),
        FlashAttention("flash_attn", _fa2_forward),
    ]
    return {provider.name: provider for provider in providers}


BY_NAME_ONLY = ("cute_flash-sm80", "cute_flash-sm90", "flex")
DEFAULT_NAMES = tuple(name for name in registry() if name not in BY_NAME_ONLY)


def select(names: Sequence[str], kernels: str = "auto") -> list[Provider]:
    known = registry(kernels)
    for name in names:
        if name not in known:
            raise ValueError(f"provider {name!r}: choose from {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def split_available(providers: Sequence[Provider], direction: str = "fwd") -> tuple[list[Provider], dict[str, str]]:
    """The providers that can run a direction here, and the reason for each of the others."""
    reasons = {provider.name: provider.available(direction) for provider in providers}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    return [provider for provider in providers if provider.name not in unavailable], unavailable


def as_bhsd(provider: Provider, out: Tensor) -> Tensor:
    """The output of any provider as a (B, H, S, D) view."""
    return out.transpose(1, 2) if provider.is_bshd else out
