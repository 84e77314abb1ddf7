"""Which tile serves a problem: literal tables per GPU and head dimension, each row citing its measurement."""

from __future__ import annotations

from cute_flash.planning.tiles.bwd_sm80 import LONG_FUNCTION_64, SM80_BWD, SM80_BWD_SCORE, BwdTile
from cute_flash.planning.tiles.bwd_sm90 import (
    SM90_BWD,
    SM90_BWD_LIGHT,
    SM90_BWD_SCORE,
    BwdTileSm90,
    BwdTileSm90Wide,
)
from cute_flash.planning.tiles.common import divides_map
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, FwdTile
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, SM90_FWD_BIAS, SM90_FWD_DRAWS, FwdTileSm90
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Features, Problem, Static, UnsupportedError


def fwd_tile(family: str, arch: ArchSpec, problem: Problem) -> FwdTile | FwdTileSm90:
    """The tile of a family's forward on an architecture."""
    static = problem.static
    if family == "sm90":
        fetches = static.mods is not None and static.mods.bias_tma
        rows = SM90_FWD_DRAWS if static.features.dropout else SM90_FWD
        for wide in (*SM90_FWD_BIAS, *rows) if fetches and not static.features.dropout else rows:
            if wide.serves(problem) and wide.fits(arch):
                return wide
    else:
        bounds = static.has_left + static.has_right
        # The lengths of a packed batch are in registers; those of others are arguments.
        needs_lengths = static.features.varlen or static.features.batch_invariant
        bounds = min(bounds + needs_lengths, 2) if bounds else 0
        for tile in SM80_FWD[arch.name]:
            # Lists of blocks are read by all warps.
            weight = static.weight + static.features.block_map
            has_room = tile.max_weight >= weight and divides_map(tile, static)
            can_mask = tile.max_bounds >= bounds
            if tile.head_dim >= static.widest and can_mask and has_room and tile.fits(arch):
                return tile
    widths = f"head_dim={static.head_dim}"
    if static.head_dim_v is not None:
        widths += f" with values of {static.head_dim_v}"
    raise UnsupportedError(f"{widths}: no tile of {family} for {arch.name}")


# Operations of users' functions for every score that their registers serve; longer ones are left to mma.sync,
# on which the narrowest tile needs to be smaller for them.
MOST_INNER = (24, 10)
AnyBwdTile = BwdTile | BwdTileSm90 | BwdTileSm90Wide


def bwd_tile(family: str, arch: ArchSpec, problem: Problem, deterministic: bool = False) -> AnyBwdTile | None:
    """The tile of a family's gradients on an architecture; None if it has none."""
    static = problem.static
    weight = static.features.in_gradients.weight
    is_written, is_plain = static.features.is_written, weight == 0
    inner = 0 if static.mods is None else static.mods.bwd_ops_per_score
    rows: tuple[AnyBwdTile, ...]
    if family == "sm90":
        rows = SM90_BWD if is_plain else SM90_BWD_SCORE[2:] if is_written else SM90_BWD_SCORE
        rows = (SM90_BWD_LIGHT, *rows) if is_written and _is_light(static) else rows
        rows = tuple(row for row in rows if inner <= MOST_INNER[row.head_dim > 64])
    else:
        # What tells a packed sequence, and whose turn it is, would spill beside the larger ones.
        is_small = not is_plain or (deterministic and static.features.varlen)
        rows = (SM80_BWD_SCORE if is_small else SM80_BWD)[arch.name]
        rows = (LONG_FUNCTION_64, *rows) if inner > MOST_INNER[0] else rows
    for tile in rows:
        if static.features.varlen and isinstance(tile, BwdTileSm90Wide):
            continue
        if isinstance(tile, BwdTileSm90) and tile.max_weight < weight:
            continue
        if tile.head_dim >= static.widest and tile.fits(arch):
            return tile
    return None


def _is_light(static: Static) -> bool:
    """Whether functions leave registers for the tile of plain gradients."""
    features = static.features
    is_rare = features.block_map or not features.mask_mod
    has_more = features.bias or features.alibi or features.varlen
    return is_rare and not has_more and static.mods.has_cheap_bwd


def drops_none(tile: AnyBwdTile, features: Features) -> bool:
    """Whether a kernel is one with dropout, of which this is 0: beside the draws the compiler keeps in
    registers what it spills without them, of softcap and ALiBi in a packed batch.
    """
    asked = features.varlen and features.softcap and features.alibi and not features.dropout
    return asked and isinstance(tile, BwdTileSm90) and tile.head_dim > 64
