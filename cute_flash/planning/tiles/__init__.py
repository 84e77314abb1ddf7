"""Chooses the tile of a problem. Each kernel has a table of tiles, whose rows state how they were measured."""

from __future__ import annotations

from functools import lru_cache

from cute_flash.errors import UnsupportedError
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD, SM80_BWD_FP32, SM80_BWD_LONG_MOD, SM80_BWD_SCORE, BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import (
    SM90_BWD,
    SM90_BWD_BIAS,
    SM90_BWD_CHEAP_MOD,
    SM90_BWD_FEWER_KEYS,
    SM90_BWD_SCORE,
    BwdTileSm90,
    BwdTileSm90Wide,
)
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, SM80_FWD_FP32, FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import (
    SM90_FWD,
    SM90_FWD_BIAS,
    SM90_FWD_DROPOUT,
    SM90_FWD_WIDE,
    FwdTileSm90,
    FwdTileSm90Wide,
)
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.features import backward_features, feature_cost
from cute_flash.spec.problem import MAX_HEAD_DIM, TOO_WIDE, Problem, Static

AnyFwdTile = FwdTileSm80 | FwdTileSm90 | FwdTileSm90Wide
AnyBwdTile = BwdTileSm80 | BwdTileSm90 | BwdTileSm90Wide

# User mods with more operations per score than this, or than `max_mod_ops` of the Hopper tile, run on the mma.sync
# kernel, which then has a smaller tile at head dims up to 64.
MAX_MOD_OPS = 24
# Wider heads have tiles of their own on Hopper.
MAX_NARROW_HEAD_DIM = 256


def fwd_tile(family: str, arch: ArchSpec, problem: Problem) -> AnyFwdTile:
    """`find_fwd_tile`; raise `UnsupportedError` if there is no such row."""
    row = find_fwd_tile(family, arch, problem)
    if row is not None:
        return row
    widths = f"head_dim={problem.head_dim}"
    if problem.static.head_dim_v is not None:
        widths += f" with values of {problem.head_dim_v}"
    if problem.block_sparse:
        widths += " with a block mask"
    hint = ""
    if problem.head_dim > MAX_HEAD_DIM:
        hint = f" (above {MAX_HEAD_DIM} only by 'sm90', without gradients, block masks and fp32); {TOO_WIDE}"
    elif family == "sm90" and problem.block_sparse:
        hint = "; call use_kernels with 'sm80', or with ''"
    raise UnsupportedError(f"{widths}: no tile of {family} for {arch.name}{hint}")


def find_fwd_tile(family: str, arch: ArchSpec, problem: Problem) -> AnyFwdTile | None:
    """The first row that supports the problem and fits the architecture; None if there is none."""
    for row in _fwd_rows(family, arch, problem.static):
        if row.max_keys is None or problem.usual_keys <= row.max_keys:
            return row
    return None


@lru_cache
def _fwd_rows(family: str, arch: ArchSpec, static: Static) -> tuple[AnyFwdTile, ...]:
    """The rows that support the problem, apart from `max_keys`, and fit the architecture."""
    rows: tuple[AnyFwdTile, ...] = SM90_FWD
    if family != "sm90":
        rows = (SM80_FWD_FP32 if static.is_fp32 else SM80_FWD)[arch.name]
    elif static.widest > MAX_NARROW_HEAD_DIM:
        # Most rows have no registers for the index lists of a block mask, or 48 keys, which do not divide its blocks.
        rows = () if static.block_sparse else SM90_FWD_WIDE
    elif "dropout" in static.features:
        rows = SM90_FWD_DROPOUT
    elif static.mods is not None and static.mods.bias_tma:
        # A much wider tile would be slower than one whose threads load the bias.
        near = tuple(row for row in SM90_FWD_BIAS if row.head_dim - static.head_dim < 64)
        rows = (*near, *SM90_FWD)
    return tuple(row for row in rows if row.serves(static) and row.fits(arch))


def bwd_tile(family: str, arch: ArchSpec, problem: Problem, deterministic: bool = False) -> AnyBwdTile | None:
    """The first row of a family's backward that supports the problem and fits the architecture; None if none does."""
    for row in _bwd_rows(family, arch, problem.static, deterministic):
        if row.max_keys is None or problem.usual_keys <= row.max_keys:
            return row
    return None


@lru_cache
def _bwd_rows(family: str, arch: ArchSpec, static: Static, deterministic: bool) -> tuple[AnyBwdTile, ...]:
    """The rows that support the problem, apart from `max_keys`, and fit the architecture."""
    cost = feature_cost(backward_features(static.features), static.block_sparse)
    rows = _bwd_table(family, arch, static, cost, deterministic)
    wide_enough = [row for row in rows if row.max_cost >= cost and row.head_dim >= static.widest]
    return tuple(row for row in wide_enough if row.is_for(static) and row.fits(arch))


def _bwd_table(family: str, arch: ArchSpec, static: Static, cost: int, deterministic: bool) -> tuple[AnyBwdTile, ...]:
    mod_ops = 0 if static.mods is None else static.mods.bwd_ops_per_score
    if static.is_fp32:
        return SM80_BWD_FP32[arch.name] if family == "sm80" else ()
    if family != "sm90":
        # The large tiles would spill with features, and with the semaphore of a varlen batch.
        is_small = cost > 0 or (deterministic and static.varlen)
        rows = (SM80_BWD_SCORE if is_small else SM80_BWD)[arch.name]
        rows = tuple(row for row in rows if row.allows(static.dtype, deterministic))
        return (SM80_BWD_LONG_MOD, *rows) if mod_ops > MAX_MOD_OPS else rows
    if deterministic and static.mods is not None and static.mods.captures_needing_grad:
        # Storing each score's term of a captured tensor's gradient takes too many registers.
        return ()
    candidates: tuple[BwdTileSm90 | BwdTileSm90Wide, ...] = SM90_BWD_SCORE if cost else SM90_BWD
    if not cost and (static.varlen or deterministic):
        candidates = SM90_BWD_FEWER_KEYS
    if cost and static.has_mods:
        # The first two rows have no registers for user mods.
        candidates = SM90_BWD_SCORE[2:]
        if _has_cheap_mod(static):
            candidates = (SM90_BWD_CHEAP_MOD, *candidates)
        if static.mods.bias_tma and not static.varlen:
            candidates = (*SM90_BWD_BIAS, *candidates)
    # A wider tile than necessary would be slower than mma.sync.
    candidates = tuple(row for row in candidates if row.head_dim == _hopper_width(static))
    return tuple(row for row in candidates if row.allows(static, deterministic))


def _hopper_width(static: Static) -> int:
    """The width of the narrowest tile of the Hopper backward that holds the head dim; 0: none."""
    return min((row.head_dim for row in SM90_BWD if row.head_dim >= static.widest), default=0)


def max_mod_ops(static: Static) -> int:
    """The most operations per score of user mods for which the Hopper backward has enough registers."""
    return next((row.max_mod_ops for row in SM90_BWD if row.head_dim == _hopper_width(static)), 0)


def _has_cheap_mod(static: Static) -> bool:
    """Whether user mods leave enough registers for the tile of plain attention."""
    features = static.features
    masks_few_blocks = static.block_sparse or "mask_mod" not in features
    has_others = "bias" in features or "alibi" in features or static.varlen
    return masks_few_blocks and not has_others and static.mods.has_cheap_bwd


def pads_with_dropout(tile: AnyBwdTile, static: Static) -> bool:
    """Whether a call without dropout runs a kernel that is compiled with dropout, with probability 0.

    With softcap and ALiBi in a varlen batch, ptxas spills registers unless the kernel also has dropout.
    """
    features = static.features
    would_spill = "softcap" in features and "alibi" in features and "dropout" not in features
    return static.varlen and would_spill and isinstance(tile, BwdTileSm90) and tile.head_dim > 64
