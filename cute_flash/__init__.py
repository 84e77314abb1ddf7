"""Exact attention for NVIDIA Ampere and Hopper GPUs, in Python: `cute_flash.attn(q, k, v)`."""

from cute_flash.api import attn, supports
from cute_flash.partial import attention_probs, merge
from cute_flash.plan import use_kernels
from cute_flash.problem import Support, UnsupportedError
from cute_flash.version import __version__

__all__ = [
    "Support",
    "UnsupportedError",
    "__version__",
    "attention_probs",
    "attn",
    "merge",
    "supports",
    "use_kernels",
]
