"""The bank conflicts of the mma.sync rungs, predicted from their tiles in shared memory by `layouts`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from cute_flash.smem.tile import SmemTile
from layouts.banks import (
    Access,
    cp_async_write,
    every_block,
    ldmatrix_a,
    ldmatrix_a_transposed,
    ldmatrix_b,
    ldmatrix_v,
    store_fragment,
)
from layouts.draw import text_picture
from layouts.layout import layout_of, transposed


@dataclass(frozen=True)
class Use:
    """One kind of access to a tile, such as its ldmatrix, by all warps of a CTA."""

    name: str
    tile: SmemTile
    access: Access
    warps: int = 1  # that do the same, times the number of such tiles

    @property
    def wavefronts(self) -> int:
        return self.warps * self.access.wavefronts

    @property
    def conflicts(self) -> int:
        return self.warps * self.access.conflicts


def uses(rung: Any) -> list[Use]:
    """How one CTA copies and reads its tiles in shared memory: its own tile, and one block of the loop.

    For B1, this is the kernel that computes dK and dV.
    """
    return _forward(rung) if type(rung).__name__ == "Forward" else _backward(rung)


def _read(name: str, tile: SmemTile, access: Any, warps: int = 1, is_transposed: bool = False) -> Use:
    layout = transposed(tile) if is_transposed else layout_of(tile)
    return Use(f"ldmatrix of {name}", tile, every_block(tile, layout, access), warps)


def _forward(rung: Any) -> list[Use]:
    module, variant = sys.modules[type(rung).__module__], rung.variant
    tile_m, tile_n, warps, threads = module.TILE_M, module.TILE_N, module.NUM_WARPS, module.NUM_THREADS
    q, kv = (SmemTile(rows, rung.head_dim, variant=variant) for rows in (tile_m, tile_n))
    found = [
        Use("copy of Q", q, cp_async_write(q, threads)),
        Use("copy of K", kv, cp_async_write(kv, threads)),
        Use("copy of V", kv, cp_async_write(kv, threads)),
        _read("Q", q, ldmatrix_a),
        _read("K", kv, ldmatrix_b, warps),
        _read("V", kv, ldmatrix_v, warps, is_transposed=True),
    ]
    if getattr(rung, "keeps_p", False):
        return found
    p = SmemTile(tile_m, tile_n, variant=variant)
    return [*found, Use("store of P", p, store_fragment(p, warps)), _read("P", p, ldmatrix_a)]


def _backward(rung: Any) -> list[Use]:
    module, variant = sys.modules[type(rung).__module__], rung.variant
    warps, threads = module.NUM_WARPS, module.NUM_THREADS
    q, kv = (SmemTile(rows, rung.head_dim, variant=variant) for rows in (module.TILE_M, module.TILE_N))
    ds = SmemTile(module.TILE_N, module.TILE_M, variant=variant)
    found = [
        Use("copy of K, V", kv, cp_async_write(kv, threads), 2),
        Use("copy of Q, dO", q, cp_async_write(q, threads), 2),
        _read("K, V for S, dP", kv, ldmatrix_a, 2),
        _read("Q, dO for S, dP", q, ldmatrix_b, 2 * warps),
        _read("Q, dO for dK, dV", q, ldmatrix_v, 2 * warps, is_transposed=True),
    ]
    if not getattr(rung, "adds_dq", False):  # dQ has a kernel of its own
        return found
    return [
        *found,
        Use("store of dS", ds, store_fragment(ds, warps)),
        _read("dS for dQ", ds, ldmatrix_a_transposed, is_transposed=True),
        _read("K for dQ", kv, ldmatrix_v, warps, is_transposed=True),
    ]


def totals(rung: Any, heads: int, seqlen: int) -> dict[str, int]:
    """Wavefronts of a launch without a mask, by the names of the counters; for B1, of its first kernel."""
    module, is_forward = sys.modules[type(rung).__module__], type(rung).__name__ == "Forward"
    tiles, blocks = -(-seqlen // module.TILE_M), -(-seqlen // module.TILE_N)
    if not is_forward:  # a CTA has a tile of keys, and a block is of queries
        tiles, blocks = blocks, tiles
    once = ("copy of Q", *(("ldmatrix of Q",) if getattr(rung, "keeps_q", False) else ()))
    found = {"sass_ldsm_wavefronts": 0, "sass_ldsm_conflicts": 0}
    # Those of a backward also copy the LSE and delta, which `uses` leaves out.
    found |= {"sass_ldgsts_wavefronts": 0} if is_forward else {}
    for use in uses(rung):
        times = heads * tiles * (1 if use.name in once else blocks)
        if use.name.startswith("ldmatrix"):
            found["sass_ldsm_wavefronts"] += times * use.wavefronts
            found["sass_ldsm_conflicts"] += times * use.conflicts
        elif use.name.startswith("copy") and is_forward:
            found["sass_ldgsts_wavefronts"] += times * use.wavefronts
    return found


def picture(rung: Any) -> str:
    """The banks of the first rows of the tile of K, and the accesses of one phase of ldmatrix."""
    use = next(use for use in uses(rung) if use.name.startswith("ldmatrix of K"))
    return text_picture(use.tile, use.access.phases[0], num_rows=8)


def report(rung: Any) -> str:
    """The tiles of a rung and their wavefronts, as text."""
    lines = [f"D={rung.head_dim}, one CTA, one block of keys: wavefronts (conflicts)"]
    for use in uses(rung):
        tile = use.tile
        size = f"{tile.rows} x {tile.cols} {tile.variant}"
        lines.append(f"  {use.name:28} {size:20} {use.wavefronts:6} ({use.conflicts})")
    return "\n".join(lines)
