"""The bank conflicts of the mma.sync rungs, predicted from their tiles in shared memory by `layouts`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from cute_flash.smem.tile import SmemTile
from layouts.banks import Access, cp_async_write, every_block, ldmatrix_a, ldmatrix_b, ldmatrix_v, store_fragment
from layouts.layout import layout_of, transposed


@dataclass(frozen=True)
class Use:
    """What a CTA does with a tile: wavefronts and conflicts of all its warps."""

    name: str
    tile: SmemTile
    access: Access
    warps: int = 1  # that do the same

    @property
    def wavefronts(self) -> int:
        return self.warps * self.access.wavefronts

    @property
    def conflicts(self) -> int:
        return self.warps * self.access.conflicts


def uses(rung: Any) -> list[Use]:
    """The accesses of one CTA to shared memory for one block of keys, and the copy of Q."""
    module, variant = sys.modules[type(rung).__module__], rung.variant
    tile_m, tile_n, warps, threads = module.TILE_M, module.TILE_N, module.NUM_WARPS, module.NUM_THREADS
    q, kv = (SmemTile(rows, rung.head_dim, variant=variant) for rows in (tile_m, tile_n))
    p = SmemTile(tile_m, tile_n, variant=variant)
    found = [
        Use("copy of Q", q, cp_async_write(q, threads)),
        Use("copy of K", kv, cp_async_write(kv, threads)),
        Use("copy of V", kv, cp_async_write(kv, threads)),
        Use("ldmatrix of Q", q, every_block(q, layout_of(q), ldmatrix_a)),
        Use("ldmatrix of K", kv, every_block(kv, layout_of(kv), ldmatrix_b), warps),
        Use("ldmatrix of V", kv, every_block(kv, transposed(kv), ldmatrix_v), warps),
    ]
    if hasattr(module, "LOG2_E"):  # from rung 5 on, P stays in registers
        return found
    return [
        *found,
        Use("store of P", p, store_fragment(p, warps)),
        Use("ldmatrix of P", p, every_block(p, layout_of(p), ldmatrix_a)),
    ]


def totals(rung: Any, heads: int, seqlen: int) -> dict[str, int]:
    """Wavefronts and conflicts of a launch without a mask, by the names of the counters."""
    module = sys.modules[type(rung).__module__]
    blocks = seqlen // module.TILE_N
    found = dict.fromkeys(("sass_ldsm_wavefronts", "sass_ldsm_conflicts", "sass_ldgsts_conflicts", "st_conflicts"), 0)
    for use in uses(rung):
        once = use.name == "copy of Q" or (use.name == "ldmatrix of Q" and hasattr(module, "LOG2_E"))
        times = heads * (seqlen // module.TILE_M) * (1 if once else blocks)
        if use.name.startswith("ldmatrix"):
            found["sass_ldsm_wavefronts"] += times * use.wavefronts
            found["sass_ldsm_conflicts"] += times * use.conflicts
        elif use.name.startswith("copy"):
            found["sass_ldgsts_conflicts"] += times * use.conflicts
        else:
            found["st_conflicts"] += times * use.conflicts
    return found


def report(rung: Any) -> str:
    """The tiles of a rung and their wavefronts, as text."""
    lines = [f"D={rung.head_dim}, one CTA, one block of keys: wavefronts (conflicts)"]
    for use in uses(rung):
        tile = use.tile
        size = f"{tile.rows} x {tile.cols} {tile.variant}"
        lines.append(f"  {use.name:14} {size:20} {use.wavefronts:6} ({use.conflicts})")
    return "\n".join(lines)
