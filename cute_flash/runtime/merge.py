"""Launches the kernel that merges partial outputs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cute_flash.planning.merge import MAX_PARTIALS, merge_key
from cute_flash.runtime import binder
from cute_flash.runtime.gpu import bound, current_gpu, remember
from cute_flash.runtime.suggest import suggesting

# The first row of a partial output, the output in fp32 (B, H, rows, Dv), and its LSE (B, H, rows).
Partial = tuple[int, Tensor, Tensor]


def merge_partials(out: Tensor, lse: Tensor, partials: Sequence[Partial]) -> None:
    """Write the merged output to `out` (B, H, S, Dv), in its dtype, and the LSE to `lse` (B, H, S), contiguous.

    `out` and `lse` must not be tensors of `partials`.
    """
    assert 0 < len(partials) <= MAX_PARTIALS and lse.is_contiguous()
    if not out.numel():
        return
    signature = "merge", out.dtype, out.shape[3], len(partials), out.get_device()
    launch = bound.get(signature)
    if launch is None:
        dtype, arch = str(out.dtype).removeprefix("torch."), current_gpu().arch(out.device.index)
        key = merge_key(dtype, out.shape[3], len(partials), arch)
        with suggesting(lambda: "the same call inside use_jit(True)"):
            launch = remember(signature, binder.bind_merge(key, out.device))
    firsts, outs, lses = zip(*partials)
    launch(out, lse, outs, lses, list(firsts))
