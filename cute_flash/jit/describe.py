"""Describes the key of a compiled function in one line, for messages and progress."""

from __future__ import annotations

from cute_flash.planning.launch import LaunchChain, LaunchKey
from cute_flash.planning.merge import MergeStatic
from cute_flash.planning.plan import SchedulerTile


def describe_key(key: LaunchKey) -> str:
    """One line about a kernel: name, head dims, dtype, bounds, features and tile; or about each kernel of a chain."""
    if isinstance(key, LaunchChain):
        return ", then ".join(map(describe_key, key.keys))
    static, tile = key.static, key.tile
    if isinstance(tile, SchedulerTile):
        return f"{key.kernel}{' seqused_k' if static.seqused_k else ''}"
    if isinstance(static, MergeStatic):
        return f"{key.kernel} {static.num_partials} D={static.head_dim} {static.dtype}"
    bounds = [name for name in ("left", "right") if getattr(static, f"has_{name}")]
    flags = [name for name in ("pack_gqa", "has_dlse") if getattr(static, name, False)]
    parts = [key.kernel, f"D={static.widths}", static.dtype, *bounds, *static.tags, *flags]
    return f"{' '.join(parts)} {tile.tile_m}x{tile.tile_n}"
