"""torch's SDPA with the kernels of cute_flash: `with sdpa():` around calls of `scaled_dot_product_attention`.

torch 2.10 and later can replace the implementation of their flash attention operators. `register` adds the
implementation "CUTE_FLASH", and `activate` overrides the CUDA kernels of the five aten operators in
`sdpa_kernels.KERNELS`. These operators compute SDPA if its backend is FLASH_ATTENTION, SDPA on jagged NestedTensors,
and `torch.nn.attention.varlen`. docs/integrations/sdpa.md lists their arguments.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

from cute_flash.integrations.sdpa_kernels import KERNELS
from cute_flash.ops import OVERRIDDEN

NAME = "CUTE_FLASH"


def register() -> str:
    """Register cute_flash as an implementation of torch's flash attention. A second call has no effect.

    Returns:
        "CUTE_FLASH", the name for `torch.nn.attention.activate_flash_attention_impl`.

    Raises:
        ImportError: torch is older than 2.10.
    """
    _attention().register_flash_attention_impl(NAME, register_fn=_Overrides)
    return NAME


def activate() -> None:
    """Run torch's flash attention operators with the kernels of cute_flash, in all threads, until `restore`.

    SDPA uses them if it selects the backend FLASH_ATTENTION. On sm_90 it prefers cuDNN, unless `sdpa_kernel` or `sdpa`
    selects another backend.

    Raises:
        ImportError: torch is older than 2.10.
    """
    _switch_to(register())


def restore() -> None:
    """Restore the kernels of torch's flash attention operators. No effect if "CUTE_FLASH" is not active."""
    if _attention().current_flash_attention_impl() == NAME:
        _switch_to(None)


@contextmanager
def sdpa() -> Iterator[None]:
    """A context manager that runs SDPA on CUDA with the kernels of cute_flash, in all threads.

    It activates "CUTE_FLASH", enables the backend FLASH_ATTENTION and moves it to the front of SDPA's priority order.
    The exit restores the previous implementation, flag and order. Calls that torch's flash attention does not take,
    such as those with an `attn_mask`, go to the next backend. Call `backward()` inside too. Nest
    `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` inside to get an error instead of another backend.

    Raises:
        ImportError: torch is older than 2.10.

    Examples:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from cute_flash.integrations.sdpa import sdpa
        >>> x = torch.randn(1, 4, 16, 32)
        >>> with sdpa():
        ...     out = scaled_dot_product_attention(x, x, x, is_causal=True)
        ...     print(torch.nn.attention.current_flash_attention_impl())
        CUTE_FLASH
    """
    attention, flags = _attention(), torch.backends.cuda
    with ExitStack() as on_exit:
        on_exit.callback(flags.enable_flash_sdp, flags.flash_sdp_enabled())
        flags.enable_flash_sdp(True)
        _initialize_priority_order()
        order = torch._C._get_sdp_priority_order()
        on_exit.callback(torch._C._set_sdp_priority_order, order)
        on_exit.callback(_switch_to, attention.current_flash_attention_impl())
        flash = int(attention.SDPBackend.FLASH_ATTENTION)
        torch._C._set_sdp_priority_order([flash, *(x for x in order if x != flash)])
        activate()
        yield


@cache
def _initialize_priority_order() -> None:
    """Make torch choose a backend once: its first choice on CUDA resets the priority order to the default."""
    if torch.cuda.is_available():
        with _disable_current_modes():  # fake tensors would not reset the order
            x = torch.empty(1, 1, 1, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(x, x, x)


def _attention() -> Any:
    """`torch.nn.attention`, if it has a registry of implementations."""
    import torch.nn.attention as attention

    if not hasattr(attention, "register_flash_attention_impl"):
        raise ImportError(
            f"cute_flash.integrations.sdpa needs torch 2.10 or later, and {torch.__version__} is installed"
        )
    return attention


def _switch_to(name: str | None) -> None:
    """Activate an implementation; None: torch's own kernels."""
    attention = _attention()
    if attention.current_flash_attention_impl() == name:
        return
    if name is not None:
        attention.activate_flash_attention_impl(name)
    elif hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()
    else:  # torch 2.10
        _Overrides.remove()
        attention._registry._FLASH_ATTENTION_ACTIVE = None


class _Overrides:
    """The handle of an activation, which torch's registry keeps."""

    libraries: ClassVar[list[Library]] = []

    def __init__(self) -> None:
        library = Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # about the overrides
            for name, kernel in KERNELS.items():
                if hasattr(torch.ops.aten, name):  # not all are in torch 2.10
                    library.impl(name, kernel)
                    OVERRIDDEN[getattr(torch.ops.aten, name).default] = kernel
        self.libraries.append(library)

    @classmethod
    def remove(cls) -> None:
        cls.libraries.clear()  # a Library that is freed removes its kernels
        OVERRIDDEN.clear()
