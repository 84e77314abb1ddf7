"""The exceptions for valid arguments that no kernel supports. Invalid arguments raise a plain `ValueError`."""

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
