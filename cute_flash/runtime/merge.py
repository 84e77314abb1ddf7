"""Launches the kernel that merges partial outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from cute_flash.planning.merge import MAX_PARTIALS, merge_key
from cute_flash.planning.plan import CompileKey
from cute_flash.runtime.gpu import current_gpu
from cute_flash.runtime.operands import ensure_aligned

# The first row of a partial output, the output in fp32 (B, H, rows, Dv), and its LSE (B, H, rows).
Partial = tuple[int, Tensor, Tensor]


def merge_partials(out: Tensor, lse: Tensor, partials: Sequence[Partial]) -> None:
    """Write the merged output to `out` (B, H, S, Dv), in its dtype, and the LSE to `lse` (B, H, S), contiguous.

    `out` and `lse` must not be tensors of `partials`.
    """
    assert 0 < len(partials) <= MAX_PARTIALS and lse.is_contiguous()
    if not out.numel():
        return
    gpu, index = current_gpu(), out.device.index
    if gpu.current_device() != index:
        gpu.on_device(index, merge_partials, out, lse, partials)
        return
    key = _key(str(out.dtype).removeprefix("torch."), out.shape[3], len(partials), index)
    firsts, outs, lses = zip(*partials)
    gpu.kernel(key)(out, lse, [ensure_aligned(x) for x in outs], [x.contiguous() for x in lses], list(firsts))


@lru_cache(maxsize=256)
def _key(dtype: str, width: int, num: int, index: int | None) -> CompileKey:
    return merge_key(dtype, width, num, current_gpu().arch(index))
