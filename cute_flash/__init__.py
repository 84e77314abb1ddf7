"""Exact attention for NVIDIA Ampere and Hopper GPUs, in Python: `cute_flash.attn(q, k, v)`."""

from typing import TYPE_CHECKING, Any

from cute_flash.api import attn, supports
from cute_flash.plan import use_kernels
from cute_flash.problem import Support, UnsupportedError
from cute_flash.version import __version__

if TYPE_CHECKING:
    from cute_flash.partial import attention_probs, merge
    from cute_flash.varlen import attn_nested, attn_varlen

__all__ = [
    "Support",
    "UnsupportedError",
    "__version__",
    "attention_probs",
    "attn",
    "attn_nested",
    "attn_varlen",
    "merge",
    "supports",
    "use_kernels",
]

# Imported when first asked for, so that `import cute_flash` stays light.
_ON_DEMAND = {
    "attention_probs": "partial",
    "merge": "partial",
    "attn_nested": "varlen",
    "attn_varlen": "varlen",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = found = getattr(import_module(f"cute_flash.{_ON_DEMAND[name]}"), name)
    return found
