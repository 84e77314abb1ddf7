"""From a problem to a plan: which kernel, with which tile, in which order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from cute_flash.planning.tiles import AnyBwdTile, bwd_tile, fwd_tile, pads_with_dropout
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.common import ELEMENT_BYTES
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.planning.varlen import BUCKETS, max_items, num_padded_blocks
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.problem import (
    PLAIN,
    Features,
    Problem,
    Static,
    UnsupportedError,
    check_written,
    check_written_gradients,
)

# Kernel families in the order of preference, and the least architecture each needs.
FAMILIES = {"sm90": (9, 0), "sm80": (8, 0)}
# Share of L2 that the K and V of one section of heads may fill; the rest serves Q, O and what is in flight.
L2_SHARE = 0.4
# Blocks along y and z of a grid.
MAX_GRID_YZ = 65535
# Sums of two lengths and a window stay below 2^31.
MAX_SEQLEN = 1 << 29
# Persistent blocks count on past the last tile, by one for each block.
MAX_BLOCKS = (1 << 31) - (1 << 16)

_requested: ContextVar[str | None] = ContextVar("cute_flash_kernels", default=None)


@contextmanager
def use_kernels(family: str) -> Iterator[None]:
    """Choose the kernel family by hand, for study and tests: `with use_kernels("sm80"): attn(q, k, v)`.

    Its gradients are computed by the same family. The environment variable `CUTE_FLASH_KERNELS` does the same
    for a whole process, and is all that compiled functions and recomputed activations see in `backward()`.
    """
    _check_family(family)
    token = _requested.set(family)
    try:
        yield
    finally:
        _requested.reset(token)


# The family that `use_kernels` chose in this context, or None.
chosen_family = _requested.get


def requested_family() -> str | None:
    """The family asked for by `use_kernels` or `CUTE_FLASH_KERNELS`; None: the best one for the GPU."""
    return chosen_family() or os.environ.get("CUTE_FLASH_KERNELS") or None


def _check_family(family: str | None) -> None:
    if family not in (None, *FAMILIES):
        raise UnsupportedError(f"kernel family {family!r}: there is {', '.join(FAMILIES)}")


@dataclass(frozen=True)
class AnyTile:
    """That of a kernel to which the sizes of tiles are arguments: one that lists them."""

    @property
    def smem_bytes(self) -> int:
        """Classes, and sums of warps of them."""
        return 4 * (BUCKETS + BUCKETS // 32)


@dataclass(frozen=True)
class CompileKey:
    """All that determines the machine code, but the version of the code itself."""

    kernel: str
    static: Static
    tile: FwdTileSm80 | FwdTileSm90 | AnyBwdTile | AnyTile
    target: str


def prepare_key(kernel: str, problem: Problem, target: str) -> CompileKey:
    """Of a kernel that lists the tiles of a packed batch, whatever is in them."""
    features = Features(varlen=True, seqused_k=problem.features.seqused_k)
    return CompileKey(kernel, Static("bfloat16", 8, False, False, features=features), AnyTile(), target)


@dataclass(frozen=True)
class Plan:
    problem: Problem
    arch: ArchSpec
    family: str
    tile: FwdTileSm80 | FwdTileSm90
    section: int  # query heads whose K and V share L2, run side by side
    packs_heads: bool = False  # the query heads of a K/V head are rows of one tile

    @property
    def target(self) -> str:
        """wgmma belongs to one architecture alone, which the compiler spells with an "a"."""
        return self.arch.name + ("a" if self.is_persistent else "")

    @property
    def key(self) -> CompileKey:
        static = self.problem.static
        # Without a mask it does not matter which head and position a row is; the list of tiles knows what of
        # a sequence is used.
        is_bounded, features = static.has_left or static.has_right, replace(static.features, seqused_k=False)
        mods = None if static.mods is None else static.mods.in_forward
        packs = self.packs_heads and is_bounded
        static = replace(static, packs_heads=packs, features=features, mods=mods)
        variant = "_custom" if features.is_written else "_general" * (features != PLAIN)
        return CompileKey(f"fwd_{self.family}{variant}", static, self.tile, self.target)

    @property
    def prepare(self) -> CompileKey:
        """Of the kernel before, where the batch is packed."""
        early = "_early" if self.is_persistent else ""
        return prepare_key(f"prepare_fwd{early}", self.problem, self.target)

    @property
    def num_items(self) -> int:
        """Tiles of all heads that a packed batch may have."""
        return max_items(self.problem.seqlen_q, self.tile.tile_m, self.problem.batch)

    @property
    def is_persistent(self) -> bool:
        return isinstance(self.tile, FwdTileSm90)

    @property
    def num_tiles(self) -> int:
        """Tiles of the output; of a packed batch, as many as there may be."""
        p = self.problem
        if p.features.varlen:
            return self.num_items * p.heads
        if self.packs_heads:
            return ceil_div(p.group * p.seqlen_q, self.tile.tile_m) * p.heads_kv * p.batch
        return ceil_div(p.seqlen_q, self.tile.tile_m) * p.heads * p.batch

    @property
    def num_blocks(self) -> int:
        """Thread blocks of the launch."""
        return min(self.num_tiles, self.arch.num_sms) if self.is_persistent else self.num_tiles

    @property
    def draws_tiles(self) -> bool:
        """Whether blocks draw their tiles from a counter, the last argument of the launch."""
        static = self.problem.static
        differ = static.is_bounded or static.features.varlen or static.features.block_map
        return self.is_persistent and differ

    @property
    def launch_arguments(self) -> tuple[int, ...]:
        """What a launch takes besides tensors, scale, window, and the address of a counter if it draws."""
        if not self.is_persistent:
            return (self.section,)
        arguments = (self.section, self.num_blocks, self.problem.seqlen_q)
        return arguments if self.draws_tiles else (*arguments, 0)

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that shared memory and threads let live on one SM, registers aside."""
        by_smem = self.arch.smem_per_sm // (self.tile.smem_bytes + 1024)
        return min(by_smem, self.arch.max_threads_per_sm // self.tile.num_threads)

    def lines(self) -> list[str]:
        p, tile, arch = self.problem, self.tile, self.arch
        return [
            f"problem   B={p.batch} H={p.heads} Hkv={p.heads_kv} Sq={p.seqlen_q} Sk={p.seqlen_k} "
            f"D={p.head_dim}{'' if p.head_dim_v is None else f'/{p.head_dim_v}'} {p.dtype}, {p.band}",
            f"GPU       {arch.gpu} ({arch.name}), {arch.num_sms} SMs",
            f"kernel    {self.key.kernel}",
            f"tile      {tile}",
            f"shared    {tile.smem_bytes / 1024:.0f} KB of {arch.smem_per_block / 1024:.0f} KB a block, "
            f"up to {self.blocks_per_sm} block(s) an SM by shared memory",
            f"grid      {self.num_blocks} blocks, {self.num_tiles} tiles, sections of {self.section} head(s)"
            + (", the heads of a group packed" if self.packs_heads else ""),
        ]


@dataclass(frozen=True)
class BwdPlan:
    problem: Problem
    arch: ArchSpec
    family: str
    tile: AnyBwdTile
    section: int  # K/V heads whose queries and gradients share L2, run side by side
    is_ordered: bool  # tiles of keys add to dQ in turn

    def key(self, kernel: str, width: int | None = None) -> CompileKey:
        """Of a kernel in `compile.KERNELS`; `width`: of rows, which are all that the kernels around see."""
        static = self.problem.static
        features, mods = replace(static.features.in_gradients, seqused_k=False), static.mods
        static = replace(static, features=features, mods=None if mods is None else mods.in_gradients)
        if self.pads_with_dropout:
            static = replace(static, features=replace(static.features, dropout=True))
        if width is not None:
            static = Static(
                static.dtype, width, False, False, features=Features(varlen=static.features.varlen)
            )
        return CompileKey(kernel, static, self.tile, self.target)

    @property
    def target(self) -> str:
        return self.arch.name + "a" * (self.family == "sm90")

    @property
    def prepare(self) -> CompileKey:
        """Of the kernel before all others, where the batch is packed."""
        return prepare_key("prepare_bwd", self.problem, self.target)

    def before(self, has_dlse: bool) -> CompileKey:
        ordered, dlse = "_ordered" * self.is_ordered, "_dlse" * has_dlse
        found = self.key(f"bwd_preprocess{ordered}{dlse}", self.problem.width_v)
        features = replace(found.static.features, out_dtype=self.problem.features.out_dtype)
        return replace(found, static=replace(found.static, features=features))

    @property
    def main(self) -> CompileKey:
        variant = "_ordered" * self.is_ordered + "_wide" * isinstance(self.tile, BwdTileSm90Wide)
        features = self.problem.features.in_gradients
        more = "_custom" if features.is_written else "_general" * (features != PLAIN)
        return self.key(f"bwd_{self.family}{variant}{more}")

    @property
    def after(self) -> CompileKey:
        return self.key("bwd_postprocess" + "_sm80" * (self.family == "sm80"), self.problem.head_dim)

    @property
    def num_m_blocks(self) -> int:
        """Blocks of queries; of a packed batch, in which each sequence begins with a new one."""
        problem, tile_m = self.problem, self.tile.tile_m
        if problem.features.varlen:
            return num_padded_blocks(problem.seqlen_q, tile_m, problem.batch)
        return ceil_div(problem.seqlen_q, tile_m)

    @property
    def num_items(self) -> tuple[int, int]:
        """Tiles of keys of all heads that a packed batch may have, and blocks of queries."""
        problem, tile = self.problem, self.tile
        has_unused = problem.features.seqused_k
        return (
            max_items(problem.seqlen_k, tile.tile_n, problem.batch, has_unused),
            max_items(problem.seqlen_q, tile.tile_m, problem.batch),
        )

    @property
    def num_tiles(self) -> int:
        """Tiles of keys; of a packed batch, as many as there may be."""
        problem = self.problem
        if problem.features.varlen:
            return self.num_items[0] * problem.heads_kv
        return ceil_div(problem.seqlen_k, self.tile.tile_n) * problem.heads_kv * problem.batch

    @property
    def slope_sums(self) -> tuple[int, int]:
        """Parts of the gradient of a slope: tiles of keys, of a packed batch those of all sequences, each of
        which begins with a new one; and warps that multiply.
        """
        problem, tile_n = self.problem, self.tile.tile_n
        tiles = ceil_div(problem.seqlen_k, tile_n)
        if problem.features.varlen:
            tiles = num_padded_blocks(problem.seqlen_k, tile_n, problem.batch)
        return tiles, self.tile.num_warps if isinstance(self.tile, BwdTileSm80) else 2 * 4

    @property
    def pads_with_dropout(self) -> bool:
        return pads_with_dropout(self.tile, self.problem)

    @property
    def num_blocks(self) -> int:
        """Of a Hopper kernel: persistent ones, or one a tile; in order who is waited for must have begun."""
        return min(self.num_tiles, self.arch.num_sms) if self.is_persistent else self.num_tiles

    @property
    def is_persistent(self) -> bool:
        return isinstance(self.tile, BwdTileSm90) and not self.is_ordered

    @property
    def draws_tiles(self) -> bool:
        """Whether blocks draw their tiles from a counter, as tiles differ in length."""
        static = self.problem.static
        differs = static.is_bounded or static.features.varlen or static.features.block_map
        return self.is_persistent and differs


def bwd_plan(problem: Problem, arch: ArchSpec, deterministic: bool = False) -> BwdPlan:
    """The plan of the gradients; raises `UnsupportedError` if there is none."""
    problem.check("cuda")
    check_written_gradients(problem.features)
    asked = requested_family()
    _check_family(asked)
    for family, least in FAMILIES.items():
        if arch.capability < least or asked not in (None, family):
            continue
        tile = bwd_tile(family, arch, problem, deterministic)
        if tile is not None and not (deterministic and isinstance(tile, BwdTileSm90Wide)):
            _check_grid(problem, tile)
            check_written(problem, tile.tile_m, tile.tile_n, deterministic)
            return _bwd_plan(problem, arch, family, tile, deterministic)
    raise UnsupportedError(_missing_gradients(problem, arch, deterministic, asked))


def _missing_gradients(problem: Problem, arch: ArchSpec, deterministic: bool, asked: str | None) -> str:
    """Which gradients a family that was asked for does not compute; 'sm80' computes all."""
    of_values = "" if problem.head_dim_v is None else f" and values of {problem.head_dim_v}"
    is_packed = problem.features.varlen
    scores = replace(problem.features.in_gradients, varlen=False, seqused_k=False)
    names = "".join(f"{name} and " for name in scores.names)
    what = "deterministic gradients" if deterministic else "the gradient"
    least = "only on sm_90" + (", up to head_dim=128" if deterministic or is_packed or names else "")
    return (
        f"{what} of {'attn_varlen' if is_packed else 'attn'} with {names}head_dim={problem.head_dim}"
        f"{of_values} on {arch.name} by kernel family {asked!r}: it has no kernel for it ({least}); "
        "ask for 'sm80', or for no family"
    )


def _check_grid(problem: Problem, tile: AnyBwdTile) -> None:
    what, is_packed = "the gradient of attn with", problem.features.varlen
    for name, size in (("batch", 1 if is_packed else problem.batch), ("heads", problem.heads)):
        if size > MAX_GRID_YZ:
            raise UnsupportedError(f"{what} {name}={size}: at most {MAX_GRID_YZ}; split the call")
    most = ((1 << 32) - 1) // tile.head_dim
    rows = problem.seqlen_q + (problem.batch + 1) * tile.tile_m * is_packed
    if rows > most:
        raise UnsupportedError(f"{what} seqlen_q={rows}: at most {most}")


def _bwd_plan(
    problem: Problem, arch: ArchSpec, family: str, tile: AnyBwdTile, deterministic: bool
) -> BwdPlan:
    # What the blocks of a K/V head read and add to: Q, dO and the fp32 sums of dQ of its query heads.
    row_bytes = problem.head_dim * (ELEMENT_BYTES + 4) + problem.width_v * ELEMENT_BYTES
    head_bytes = problem.group * problem.seqlen_q * row_bytes
    return BwdPlan(problem, arch, family, tile, _fitting_heads(problem, arch, head_bytes), deterministic)


def plan(problem: Problem, arch: ArchSpec, is_packable: bool = False) -> Plan:
    """The plan for a problem on an architecture; raises `UnsupportedError` if there is none.

    `is_packable`: in memory, the rows of the query heads of a K/V head follow each other at one stride.
    """
    problem.check("cuda")
    family = requested_family() or next(name for name, least in FAMILIES.items() if arch.capability >= least)
    _check_family(family)
    if arch.capability < FAMILIES[family]:
        raise UnsupportedError(f"kernel family {family!r} needs more than {arch.name}")
    for name in ("seqlen_q", "seqlen_k"):
        if getattr(problem, name) > MAX_SEQLEN:
            raise UnsupportedError(f"{name}={getattr(problem, name)}: at most {MAX_SEQLEN}")
    tile = fwd_tile(family, arch, problem)
    check_written(problem, tile.tile_m, tile.tile_n)
    packs = is_packable and family == "sm90" and _pays_to_pack(problem, tile.tile_m)
    packs = packs and _treats_heads_alike(problem.features)
    section = _section(problem, arch) // (problem.group if packs else 1)
    chosen = Plan(problem, arch, family, tile, section, packs)
    if chosen.num_tiles > MAX_BLOCKS:
        raise UnsupportedError(f"{chosen.num_tiles} tiles: at most {MAX_BLOCKS}; split the batch")
    return chosen


def _pays_to_pack(problem: Problem, tile_m: int) -> bool:
    """Whether the few rows of the heads of a group fill fewer tiles together than apart."""
    rows, group = problem.seqlen_q, problem.group
    return rows < tile_m and ceil_div(group * rows, tile_m) < group


def _treats_heads_alike(features: Features) -> bool:
    """Whether a kernel needs to know which head a row belongs to for nothing but its mask."""
    return replace(features, softcap=False, out_dtype=False) == PLAIN


def _section(problem: Problem, arch: ArchSpec) -> int:
    """Query heads per section: those of as many K/V heads as fit a share of L2 and divide their number.

    Sections of equal size: a small one at the end would start the longest tiles when nothing is left to run
    beside them.
    """
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.width_v) * ELEMENT_BYTES
    return _fitting_heads(problem, arch, kv_bytes) * problem.group


def _fitting_heads(problem: Problem, arch: ArchSpec, head_bytes: int) -> int:
    """K/V heads of all batches that fit a share of L2 together and divide their number.

    Of a packed batch, heads of all sequences together.
    """
    kv_heads = problem.heads_kv * (1 if problem.features.varlen else problem.batch)
    if kv_heads == 0:
        return 1
    most = min(max(1, int(arch.l2_bytes * L2_SHARE) // max(1, head_bytes)), kv_heads)
    return next(n for n in range(most, 0, -1) if kv_heads % n == 0)
