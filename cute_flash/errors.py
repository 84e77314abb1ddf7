"""The exceptions for valid arguments that no kernel supports, for missing packages and kernels, and warnings.

Invalid arguments raise a plain `ValueError`.
"""

from __future__ import annotations


class UnsupportedError(ValueError):
    """No kernel supports the arguments. The message names the argument and, if there is one, an alternative.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.empty(1, 1, 8, 16, dtype=torch.float16)
        >>> try:
        ...     cute_flash.attn(x, x, x, out_dtype=torch.bfloat16)
        ... except cute_flash.UnsupportedError as error:
        ...     print(error)
        out_dtype=torch.bfloat16: use None, torch.float32, or torch.float16, the dtype of q
    """


class TraceError(UnsupportedError):
    """A score_mod or mask_mod cannot be compiled into a kernel. The message names the operation, the file and the line.

    Examples:
        >>> import torch, cute_flash
        >>> x = torch.empty(1, 1, 8, 16)
        >>> try:
        ...     cute_flash.attn(x, x, x, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx)
        ... except cute_flash.TraceError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        mask_mod: it returns an int: return a bool, such as the result of a comparison (...)
    """


class InstallationError(ModuleNotFoundError):
    """A package that compiles or loads kernels is not installed. The message has the command that installs it."""


class NotCompiledError(RuntimeError):
    """A call needs a kernel that was not compiled before, and `CUTE_FLASH_JIT=0` or `use_jit(False)` forbids it.

    The message names the kernel, and the call of `cute_flash.warmup` that compiles it.

    Examples:
        >>> with cute_flash.use_jit(False):  # doctest: +SKIP
        ...     cute_flash.attn(q, k, v, causal=True)
        NotCompiledError: fwd_sm90 D=128 bfloat16 right 128x128 for sm_90a is not compiled, and the JIT is off \
(CUTE_FLASH_JIT=0 or use_jit(False)): compile it before with cute_flash.warmup(q_shape=(8, 32, 4096, 128), \
dtype=torch.bfloat16, causal=True)
    """


class NotRunWarning(UserWarning):
    """Kernels are compiled for the architecture of a GPU, but have not been run on it (docs/hardware.md).

    The first call on such a GPU raises it, once per process.

    Examples:
        >>> import warnings, cute_flash
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", cute_flash.NotRunWarning)  # turns it off
    """


class LayoutWarning(UserWarning):
    """The tensors of a call look like (B, S, H, D), but `layout="bshd"` is missing.

    To turn it off for a call that is right: `warnings.filterwarnings("ignore", category=cute_flash.LayoutWarning)`.

    Examples:
        >>> import torch, warnings, cute_flash
        >>> q, kv = torch.empty(1, 128, 8, 32), torch.empty(1, 128, 2, 32)  # 128 tokens, 8 heads, 2 K/V heads
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     out = cute_flash.attn(q, kv, kv)
        >>> print(caught[0].message)
        q (1, 128, 8, 32) and k (1, 128, 2, 32) are read as 128 heads, with 8 queries and 2 keys each; for tensors of \
shape (B, S, H, D), pass layout="bshd"
    """
