"""Exact attention for NVIDIA Ampere and Hopper GPUs, in Python: `cute_flash.attn(q, k, v)`."""

import sys
from typing import TYPE_CHECKING, Any

from cute_flash.errors import LayoutWarning, NotCompiledError, NotRunWarning, TraceError, UnsupportedError
from cute_flash.version import __version__


def _is_command() -> bool:
    """Whether this process is the command `cute-flash` or `python -m cute_flash`, whose `--help` needs no torch."""
    # An embedded interpreter may have no argv.
    program, arguments = (getattr(sys, "argv", None) or [""])[0], sys.orig_argv
    if program == "-m":  # the value of argv[0] while Python locates the module
        module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
        return module.partition(".")[0] == __name__
    return program.rpartition("/")[2] == "cute-flash"


if TYPE_CHECKING or not _is_command():
    # Registers the operators `torch.ops.cute_flash`.
    from cute_flash.api import attn, attn_nested, attn_varlen, supports
    from cute_flash.decode import attn_decode, decode_supports
    from cute_flash.spec.checked import use_checks
    from cute_flash.spec.family import use_kernels
    from cute_flash.spec.problem import Support

if TYPE_CHECKING:
    from cute_flash import masks
    from cute_flash.integrations.flex_attention import flex_attention
    from cute_flash.integrations.install import install_as_flash_attn
    from cute_flash.jit.policy import use_jit
    from cute_flash.reference.merge import attention_probs, merge
    from cute_flash.score_mod.block_mask import BlockMask
    from cute_flash.tools.warmup import WarmUp, warmup

__all__ = [
    "BlockMask",
    "LayoutWarning",
    "NotCompiledError",
    "NotRunWarning",
    "Support",
    "TraceError",
    "UnsupportedError",
    "WarmUp",
    "__version__",
    "attention_probs",
    "attn",
    "attn_decode",
    "attn_nested",
    "attn_varlen",
    "decode_supports",
    "flex_attention",
    "install_as_flash_attn",
    "masks",
    "merge",
    "supports",
    "use_checks",
    "use_jit",
    "use_kernels",
    "warmup",
]

# Public names and their modules, which `__getattr__` imports on first use. The command `cute-flash` imports every name
# this way; other programs import this way only the names that are not imported above.
_MODULES = {
    "BlockMask": "score_mod.block_mask",
    "Support": "spec.problem",
    "WarmUp": "tools.warmup",
    "attention_probs": "reference.merge",
    "attn": "api",
    "attn_decode": "decode",
    "attn_nested": "api",
    "attn_varlen": "api",
    "decode_supports": "decode",
    "flex_attention": "integrations.flex_attention",
    "install_as_flash_attn": "integrations.install",
    "merge": "reference.merge",
    "supports": "api",
    "use_checks": "spec.checked",
    "use_jit": "jit.policy",
    "use_kernels": "spec.family",
    "warmup": "tools.warmup",
}


if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name == "masks":
            return import_module("cute_flash.masks")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"cute_flash.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
