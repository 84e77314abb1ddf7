"""Stand-ins for the kernels of packed batches: the list of tiles by `tests.packed_model`, and each tile of it
computed by the reference, from nothing but what the list and the arguments say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cute_flash import arch, reference
from cute_flash.band import Band
from cute_flash.plan import CompileKey, Plan
from tests import packed_model
from tests.fake_gpu import COUNTER


@dataclass
class FakePacked:
    name: str
    keys: list[CompileKey] = field(default_factory=list)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def detect(self, index: int | None) -> arch.ArchSpec:
        return arch.ARCHS[self.name]

    def compiled(self, plan: Plan) -> Callable[..., None]:
        return self.compiled_kernel(plan.key)

    def compiled_kernel(self, key: CompileKey) -> Callable[..., None]:
        self.keys.append(key)
        by_name = {"prepare_fwd": _prepare_fwd, "prepare_fwd_early": _prepare_fwd}
        by_name |= {"fwd_sm80": _forward, "fwd_sm90": _forward}

        def launch(*args: Any) -> None:
            self.calls.append((key.kernel, args))
            by_name[key.kernel](key, *args)

        return launch

    def arguments(self, prefix: str) -> tuple[Any, ...]:
        """Of the last launch of a kernel whose name begins so."""
        return next(args for name, args in reversed(self.calls) if name.startswith(prefix))


def check_rows(key: CompileKey, *tensors: Tensor) -> None:
    """What the kernels are compiled for: see `kernels/arguments.py`."""
    for x in tensors:
        row, head, element = x.stride()
        assert element == 1 and row % 8 == head % 8 == 0 and 0 <= row * 512 < 1 << 31
        assert x.data_ptr() % 16 == 0
        assert str(x.dtype) == f"torch.{key.static.dtype}"


def check_items(items: Tensor) -> None:
    assert items.dtype == torch.int32 and items.is_contiguous() and items.data_ptr() % 16 == 0


def _prepare_fwd(
    key, cu_q, cu_k, used, items, total_q, total_k, tile_m, tile_n, left, right, descends
) -> None:
    assert (used is not None) == key.static.features.seqused_k
    check_items(items)
    runs = packed_model.runs(cu_q, cu_k, used, (total_q, total_k), False)
    found = packed_model.items(runs, Band(left, right), (tile_m, tile_n), False, bool(descends))
    packed_model.write(items, list(found))


def _forward(key, q, k, v, out, lse, scale, left, right, *rest) -> None:
    *arguments, items = rest
    static = key.static
    assert static.features.varlen and not static.features.seqused_k and not static.packs_heads
    assert len(arguments) == (4 if key.kernel == "fwd_sm90" else 1)
    assert key.kernel == "fwd_sm80" or arguments[-1] == COUNTER
    assert arguments[0] >= 1 and q.shape[1] % arguments[0] == 0, "sections of query heads"
    check_rows(key, q, k, v, out)
    check_items(items)
    assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q)) and 0 < scale < math.inf
    band = Band(left if static.has_left else None, right if static.has_right else None)
    for item in packed_model.read(items):
        keys = slice(item.k_begin, item.k_begin + item.k_len)
        queries = slice(item.q_begin, item.q_begin + item.q_len)
        sequence = (x[span].transpose(0, 1)[None] for x, span in ((q, queries), (k, keys), (v, keys)))
        found, found_lse = reference.forward(*sequence, band, scale)
        first, tile_m = item.block * key.tile.tile_m, key.tile.tile_m
        rows = slice(item.q_begin + first, min(item.q_begin + first + tile_m, queries.stop))
        out[rows] = found[0, :, first : first + tile_m].transpose(0, 1)
        lse[:, rows] = found_lse[0, :, first : first + tile_m]
