"""Exact attention for NVIDIA Ampere and Hopper GPUs, in Python: `cute_flash.attn(q, k, v)`."""

from typing import TYPE_CHECKING, Any

from cute_flash.api import attn, attn_nested, attn_varlen, supports
from cute_flash.errors import TraceError, UnsupportedError
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Support
from cute_flash.version import __version__

if TYPE_CHECKING:
    from cute_flash import masks
    from cute_flash.reference.merge import attention_probs, merge
    from cute_flash.score_mod.block_mask import BlockMask
    from cute_flash.score_mod.block_mask import BlockMask as BlockMap

__all__ = [
    "BlockMap",
    "BlockMask",
    "Support",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "attention_probs",
    "attn",
    "attn_nested",
    "attn_varlen",
    "masks",
    "merge",
    "supports",
    "use_kernels",
]

# Imported on first use, so that `import cute_flash` stays light.
_ON_DEMAND = {"BlockMask": "score_mod.block_mask", "attention_probs": "reference.merge", "merge": "reference.merge"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "BlockMap":  # the former name of BlockMask, for one release
        name = "BlockMask"
    if name == "masks":
        return import_module("cute_flash.masks")
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"cute_flash.{_ON_DEMAND[name]}"), name)
    return value
