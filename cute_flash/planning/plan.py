"""Plans a problem on a GPU: workspace, launches with their kernels, tiles and grids, and finalizers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.planning import varlen
from cute_flash.planning.bias import with_dbias
from cute_flash.planning.decode import plan_split_kv, splits_keys
from cute_flash.planning.launch import CompileKey, LaunchChain, LaunchKey
from cute_flash.planning.tiles import (
    MAX_NARROW_HEAD_DIM,
    AnyBwdTile,
    bwd_tile,
    find_fwd_tile,
    fwd_tile,
    max_mod_ops,
    pads_with_dropout,
)
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90Wide
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import ceil_div
from cute_flash.spec.dtypes import DTYPE_BYTES
from cute_flash.spec.family import FAMILIES, check_family
from cute_flash.spec.features import Buffer, BwdFacts, Gradient, backward_features, gradients_of
from cute_flash.spec.problem import Problem, Static, check_tile_fits_mods

# Fraction of L2 for one L2 group of heads: K and V in the forward, Q, dO and dQ in the backward. The rest is for the
# other tensors and data in flight. Some backward passes have larger shares (`_bwd_l2_group`).
L2_SHARE = 0.4
# CUDA's limit of CTAs along y and z of a grid.
MAX_GRID_YZ = 65535
# Keeps the sum of two lengths and a window below 2^31.
MAX_SEQLEN = 1 << 29
# Less than 2^31, because each persistent CTA fetches one tile index past the last tile.
MAX_TILES = (1 << 31) - (1 << 16)
# The largest workspace of a backward pass that the calls on a stream share.
MAX_SHARED_BYTES = 8 << 20
# The largest captured tensor with a gradient: kernels index its elements with 32 bits.
MAX_CAPTURE_ELEMENTS = (1 << 31) - 1


@dataclass(frozen=True)
class SchedulerTile:
    """The tile of varlen scheduler kernels. It has no fields: tile sizes are run-time arguments of these kernels."""

    @property
    def smem_bytes(self) -> int:
        """A counter for each length class, and a sum for each warp."""
        return 4 * (varlen.NUM_LENGTH_CLASSES + varlen.NUM_LENGTH_CLASSES // 32)


@dataclass(frozen=True)
class SumTile:
    """The tile of `bwd_sum_dbias`: a block of the main kernel of the backward."""

    tile_m: int
    tile_n: int
    num_threads: int = 256

    smem_bytes = 0


@dataclass(frozen=True)
class Plan:
    """The steps of one call: allocate `workspace`, run `launches`, then `finalizers`, in this order.

    `sizes` are integer arguments of the launches, by name: grids, lengths, tile sizes. They are not compiled in.
    """

    problem: Problem
    arch: ArchSpec
    family: str
    tile: Any
    launches: tuple[CompileKey, ...]
    workspace: tuple[Buffer, ...]
    sizes: dict[str, int]
    pack_gqa: bool = False
    is_dynamic: bool = False  # dynamic tile scheduler: CTAs fetch tile indices from a counter in global memory
    deterministic: bool = False
    finalizers: tuple[Gradient, ...] = ()  # gradients of score features

    @property
    def main(self) -> CompileKey:
        """The launch of the kernel that computes attention, or its gradients."""
        return self.launch("fwd_sm", "bwd_sm", "fwd_split_kv")

    def launch(self, *prefixes: str) -> CompileKey:
        """The launch whose kernel name starts with one of these, such as "bwd_preprocess" or "varlen_scheduler"."""
        return next(key for key in self.launches if key.kernel.startswith(prefixes))

    @property
    def host_calls(self) -> tuple[LaunchKey, ...]:
        """The compiled functions that the host calls: one for all launches.

        Kernels with user mods are launched one by one, because each mod is compiled on its first call, and a chain
        would compile the other kernels again.
        """
        mods = self.problem.mods
        if len(self.launches) == 1 or (mods is not None and mods.graphs.present):
            return self.launches
        return (LaunchChain(self.launches),)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that fit on one SM by shared memory and threads; registers may allow fewer."""
        by_smem = self.arch.smem_per_sm // (self.tile.smem_bytes + 1024)
        return min(by_smem, self.arch.max_threads_per_sm // self.tile.num_threads)

    def lines(self) -> list[str]:
        p, tile, arch, sizes = self.problem, self.tile, self.arch, self.sizes
        return [
            f"problem   B={p.batch} H={p.heads} Hkv={p.heads_kv} Sq={p.seqlen_q} Sk={p.seqlen_k} "
            f"D={p.head_dim}{'' if p.head_dim_v is None else f'/{p.head_dim_v}'} {p.dtype}, {p.band}",
            f"GPU       {arch.gpu} ({arch.name}), {arch.num_sms} SMs",
            f"kernel    {self.main.kernel}",
            f"tile      {self.main.tile_text}",
            f"shared    {tile.smem_bytes / 1024:.0f} KB of {arch.smem_per_cta / 1024:.0f} KB a CTA, "
            f"up to {self.ctas_per_sm} CTA(s) an SM by shared memory",
            f"grid      {sizes['num_ctas']} CTAs, {sizes['num_tiles']} tiles, "
            f"L2 groups of {sizes['heads_per_l2_group']} head(s)"
            + (", query heads of a group packed (pack_gqa)" if self.pack_gqa else ""),
        ]


# ---- forward
# ----------------------------------------------------------------------------------------------------------


def plan_attention(problem: Problem, arch: ArchSpec, family: str = "", can_pack_gqa: bool = False) -> Plan:
    """Plan a call of `attn` or `attn_varlen`; raise `UnsupportedError` if no kernel supports the problem.

    With few queries over many keys, the kernel "fwd_split_kv" splits the keys among CTAs, unless the caller requests a
    kernel family. `plan_forward` plans all other calls, and has the other arguments.
    """
    if family or not splits_keys(problem, arch):
        return plan_forward(problem, arch, family, can_pack_gqa)
    problem.check("cuda")
    splits = plan_split_kv(problem, arch)
    return Plan(
        problem=problem,
        arch=arch,
        family="sm80",
        tile=splits.tile,
        launches=splits.launches,
        workspace=splits.workspace,
        sizes=splits.sizes,
    )


def plan_forward(
    problem: Problem, arch: ArchSpec, family: str = "", can_pack_gqa: bool = False, tile: Any = None
) -> Plan:
    """Plan a forward pass; raise `UnsupportedError` if no kernel supports the problem.

    `can_pack_gqa`: the strides of q and out allow a view in which the query heads of a K/V head are rows of one matrix.
    `tile`: replaces the row of the tile tables, for tuning.
    """
    problem.check("cuda")
    family = _family(problem, arch, family)
    if problem.static.is_fp32:
        _check_grid(problem, "attn in float32 with")
    if not FAMILIES[family](arch):
        raise UnsupportedError(f"kernel family {family!r} does not run on {arch.name}")
    for name in ("seqlen_q", "seqlen_k"):
        if getattr(problem, name) > MAX_SEQLEN:
            raise UnsupportedError(f"{name}={getattr(problem, name)}: at most {MAX_SEQLEN}")
    tile = tile or fwd_tile(family, arch, problem)
    check_tile_fits_mods(problem, tile.tile_m, tile.tile_n)
    pack_gqa = can_pack_gqa and family == "sm90" and _packing_pays(problem, tile.tile_m)
    # Query heads that share a tile.
    packed_heads = problem.group if pack_gqa else 1
    head_tiles = _num_tiles(problem, packed_heads * problem.seqlen_q, tile.tile_m)
    num_tiles = head_tiles * (problem.heads // packed_heads) * problem.batch_dim
    if num_tiles > MAX_TILES:
        raise UnsupportedError(f"{num_tiles} tiles: at most {MAX_TILES}; split the batch")
    is_sm90, static = family == "sm90", problem.static
    kv_bytes = problem.seqlen_k * (problem.head_dim + problem.width_v) * DTYPE_BYTES[problem.dtype]
    sizes = {
        # Query heads whose K and V fit into L2 together.
        "heads_per_l2_group": _equal_groups(problem, _heads_in_l2(arch, kv_bytes)) * problem.group // packed_heads,
        "num_tiles": num_tiles,
        "num_ctas": _num_ctas(num_tiles, arch, tile) if is_sm90 else num_tiles,
        "seqlen_q": problem.seqlen_q,
    }
    workspace = []
    if static.is_fp32:
        keys = problem.heads_kv, problem.seqlen_k
        workspace += _pieces(problem, tile, ("q", problem.heads, problem.seqlen_q), ("k", *keys), ("v", *keys))
    if problem.varlen:
        workspace.append(_tile_list("q_tile_list", head_tiles))
        sizes |= _scheduler_sizes(problem, tile, varlen.BY_LENGTH if static.is_bounded else varlen.ASCENDING)
    if "return_max_logit" in problem.features:
        workspace.append(Buffer("max_logit", (problem.heads,), init="-inf"))
    return Plan(
        problem=problem,
        arch=arch,
        family=family,
        tile=tile,
        launches=_fwd_launches(static, problem.seqused_k, tile, family, _target(arch, family), pack_gqa),
        workspace=tuple(workspace),
        sizes=sizes,
        pack_gqa=pack_gqa,
        is_dynamic=is_sm90 and _tiles_differ(static),
    )


def _num_ctas(num_tiles: int, arch: ArchSpec, tile: Any) -> int:
    """The persistent CTAs of a Hopper forward: at most one for each SM, in whole clusters."""
    ctas_per_tile = getattr(tile, "cluster", 1)
    return min(num_tiles, arch.num_sms // ctas_per_tile) * ctas_per_tile


def _family(problem: Problem, arch: ArchSpec, family: str) -> str:
    """The requested kernel family, or the newest one that has a kernel for the problem on the architecture."""
    check_family(family)
    if problem.static.is_fp32:
        if family == "sm90":
            raise UnsupportedError(
                "float32 by kernel family 'sm90': there is no such kernel; call use_kernels with 'sm80', or with ''"
            )
        return "sm80"
    if family:
        return family
    candidates = [name for name, runs_on in FAMILIES.items() if runs_on(arch)]
    return next((name for name in candidates if find_fwd_tile(name, arch, problem) is not None), candidates[-1])


def _pieces(problem: Problem, tile: Any, *heads_and_rows: tuple[str, int, int]) -> list[Buffer]:
    """The workspace of fp32 calls: the fp16 pieces of the tensors, and the norms that set the scale of the pieces."""
    batch, width = problem.batch_dim, 2 * tile.head_dim
    buffers = [Buffer(f"{name}_pieces", (batch, heads, rows, width), "float16") for name, heads, rows in heads_and_rows]
    # Norms of each tensor, then the largest |Δ| of the backward. In a varlen batch, padding is one more sequence.
    num_sequences = problem.batch + 1 if problem.varlen else batch
    return [*buffers, Buffer("norms", (len(buffers) + 1, num_sequences, problem.heads), init="zeros")]


@lru_cache
def _fwd_launches(
    static: Static, seqused_k: bool, tile: Any, family: str, target: str, pack_gqa: bool
) -> tuple[CompileKey, ...]:
    is_sm90 = family == "sm90"
    # Without a mask the kernel does not use the positions of rows, so pack_gqa does not change it. `seqused_k` stays
    # False, because the kernel reads lengths from the tile list.
    compiled = replace(
        static, pack_gqa=pack_gqa and static.is_bounded, mods=None if static.mods is None else static.mods.for_forward
    )
    scheduler = _scheduler("varlen_scheduler_fwd", static, seqused_k, target, overlaps_next=is_sm90)
    if not static.is_fp32:
        kind = "_wide" if isinstance(tile, FwdTileSm90Wide) else ""
        return *scheduler, CompileKey.of(f"fwd_{family}{kind}", compiled, tile, target)
    split = CompileKey.of("split_fp32_fwd", _rows_only(static, seqused_k), tile, target)
    return *scheduler, split, CompileKey.of(f"fwd_{family}_fp32", compiled, tile, target)


def _rows_only(static: Static, seqused_k: bool) -> Static:
    """The static without mask and features, for kernels that work row by row."""
    return Static(
        static.dtype, static.head_dim, head_dim_v=static.head_dim_v, varlen=static.varlen, seqused_k=seqused_k
    )


def _target(arch: ArchSpec, family: str) -> str:
    """The architecture to compile for. wgmma needs "sm_90a"."""
    return "sm_90a" if family == "sm90" else arch.target


def _tiles_differ(static: Static) -> bool:
    """Whether tiles differ in length, so that a dynamic tile scheduler balances them."""
    return static.is_bounded or static.varlen or static.block_sparse


def _num_tiles(problem: Problem, seqlen: int, tile_rows: int, has_unused: bool = False) -> int:
    """The number of tiles of a head; for a varlen batch, an upper bound."""
    if problem.varlen:
        return varlen.max_tiles(seqlen, tile_rows, problem.batch, has_unused)
    return ceil_div(seqlen, tile_rows)


def _packing_pays(problem: Problem, tile_m: int) -> bool:
    """Whether pack_gqa reduces the number of tiles, and no feature depends on the head of a row."""
    rows, group = problem.seqlen_q, problem.group
    if problem.varlen or problem.batch_invariant or problem.block_sparse or set(problem.features) - {"softcap"}:
        return False
    return rows < tile_m and ceil_div(group * rows, tile_m) < group


def _heads_in_l2(arch: ArchSpec, head_bytes: int, share: float = L2_SHARE) -> int:
    """The number of K/V heads that fit into a share of L2."""
    return int(arch.l2_bytes * share) // max(1, head_bytes)


def _equal_groups(problem: Problem, most: int) -> int:
    """The largest number of K/V heads up to `most`, and at least 1, that divides all K/V heads into equal groups.

    Heads are counted over the batch; a head of a varlen batch has the keys of all sequences. Groups are equal because a
    small last group would start its longest tiles with no other tiles to overlap.
    """
    kv_heads = problem.heads_kv * problem.batch_dim
    if kv_heads == 0:
        return 1
    return next(n for n in range(min(max(1, most), kv_heads), 0, -1) if kv_heads % n == 0)


def _heads_of_waves(arch: ArchSpec, waves: int, head_ctas: int) -> int:
    """The smallest number of heads whose CTAs fill `waves` waves; a wave is one CTA for every SM."""
    return ceil_div(waves * arch.num_sms, max(1, head_ctas))


def _bwd_l2_group(
    problem: Problem, arch: ArchSpec, tile: AnyBwdTile, deterministic: bool, head_bytes: int, head_ctas: int
) -> int:
    """The number of K/V heads in an L2 group of the backward. `head_ctas`: CTAs for the K/V tiles of a head.

    Some calls are faster with larger groups, although Q, dO and dQ then take more of L2; measured in
    `profiling/notes/bwd_sm90.md`, "L2 groups":

    - deterministic: the tiles of a head start at different times, and wait less for each other;
    - wide heads, or head dims up to 64, with a bounded mask: long tiles overlap short tiles of more heads.
    """
    heads = _heads_in_l2(arch, head_bytes)
    is_wide, is_bounded = isinstance(tile, BwdTileSm90Wide), problem.static.is_bounded
    if problem.varlen or not tile.needs_wgmma:
        return _equal_groups(problem, heads)
    two_waves, four_waves = (_heads_of_waves(arch, waves, head_ctas) for waves in (2, 4))
    # With more heads, fewer tiles of a head would run at a time and share Q and dO in L2.
    most = arch.num_sms // (8 if is_wide else 4)
    if deterministic and is_wide:
        heads = max(heads, min(four_waves, most, _heads_in_l2(arch, head_bytes, 0.9)))
    if deterministic or (is_bounded and is_wide):
        heads = max(heads, min(two_waves, most, _heads_in_l2(arch, head_bytes, 1.1)))
    elif is_bounded and tile.head_dim == 64:
        heads = max(heads, min(four_waves, _heads_in_l2(arch, head_bytes, 0.7)))
    return _equal_groups(problem, heads)


# ---- varlen
# ----------------------------------------------------------------------------------------------------------


def _scheduler(
    kernel: str, static: Static, seqused_k: bool, target: str, overlaps_next: bool = False
) -> tuple[CompileKey, ...]:
    """The launch of the varlen scheduler kernel, which is the same for all dtypes and head dims; () if dense."""
    if not static.varlen:
        return ()
    static = Static(
        "bfloat16", 8, varlen=True, seqused_k=seqused_k, overlaps_next=overlaps_next, has_chunk=static.has_chunk
    )
    return (CompileKey.of(kernel, static, SchedulerTile(), target),)


def _tile_list(name: str, num_tiles: int) -> Buffer:
    return Buffer(name, (varlen.TILE_LIST_HEADER + num_tiles, varlen.TILE_LIST_WIDTH), "int32")


def _scheduler_sizes(problem: Problem, tile: Any, tile_order: int) -> dict[str, int]:
    return {
        "total_q": problem.seqlen_q,
        "total_k": problem.seqlen_k,
        "tile_m": tile.tile_m,
        "tile_n": tile.tile_n,
        "tile_order": tile_order,
    }


# ---- backward
# ----------------------------------------------------------------------------------------------------------


def plan_backward(
    problem: Problem,
    arch: ArchSpec,
    deterministic: bool = False,
    has_dlse: bool = False,
    family: str = "",
    tile: AnyBwdTile | None = None,
) -> Plan:
    """Plan a backward pass; raise `UnsupportedError` if no kernel supports the problem.

    Without a requested family, the first family with a tile for the problem is chosen. `tile`: replaces the row of the
    family's tile tables, for tuning.
    """
    problem.check("cuda")
    check_family(family)
    if tile is not None and not family:
        raise ValueError("a tile needs a kernel family")
    if problem.static.is_fp32:
        family = _family(problem, arch, family)
    problem.check_gradients("cuda")
    _check_captures(problem)
    described = problem
    for name, runs_on in FAMILIES.items():
        if not runs_on(arch) or family not in ("", name):
            continue
        problem, chosen = _with_tile(described, arch, name, deterministic, tile)
        if chosen is not None:
            _check_grid(problem, "the gradient of attn with")
            _check_dq_rows(problem, chosen)
            check_tile_fits_mods(problem, chosen.tile_m, chosen.tile_n, deterministic)
            return _plan_backward(problem, arch, name, chosen, deterministic, has_dlse)
    raise UnsupportedError(_missing_gradients(problem, arch, deterministic, family))


def _with_tile(
    problem: Problem, arch: ArchSpec, family: str, deterministic: bool, tile: AnyBwdTile | None
) -> tuple[Problem, AnyBwdTile | None]:
    """The tile, and the problem with the gradient of the bias in the form that a kernel with this tile writes."""
    with_tma = with_dbias(problem, deterministic)
    chosen = tile or bwd_tile(family, arch, with_tma, deterministic)
    if with_tma.mods is None or not with_tma.mods.dbias_tma or getattr(chosen, "bias_stages", 0) > 0:
        return with_tma, chosen
    # The tile has no stages for a bias, so TMA does not store the gradient either.
    problem = with_dbias(problem, deterministic, allows_tma=False)
    return problem, tile or bwd_tile(family, arch, problem, deterministic)


def _plan_backward(
    problem: Problem, arch: ArchSpec, family: str, tile: Any, deterministic: bool, has_dlse: bool
) -> Plan:
    static, batch = problem.static, problem.batch_dim
    num_m_blocks = _num_blocks(problem, problem.seqlen_q, tile.tile_m)
    num_kv_tiles = _num_tiles(problem, problem.seqlen_k, tile.tile_n, problem.seqused_k)
    num_tiles = num_kv_tiles * problem.heads_kv * batch
    ctas_per_tile = getattr(tile, "cluster", 1)
    # CTAs of an L2 group read Q and dO, and add to the fp32 dQ, of their query heads.
    element_bytes = DTYPE_BYTES[problem.dtype]
    row_bytes = problem.head_dim * (element_bytes + 4) + problem.width_v * element_bytes
    l2_bytes = problem.group * problem.seqlen_q * row_bytes
    # With a semaphore there is one CTA per tile, because a tile waits for others, which must have started.
    is_persistent = isinstance(tile, BwdTileSm90) and not deterministic
    rows = batch, problem.heads, num_m_blocks * tile.tile_m
    # Otherwise the preprocess kernel zeroes dQ, or a K/V tile stores its first terms.
    is_zeroed = deterministic and tile.needs_wgmma and not tile.first_tile_stores(static)
    dq_init = "zeros" if is_zeroed else "empty"
    workspace = [
        Buffer("lse_log2", rows),
        Buffer("delta", rows),
        Buffer("dq_accum", (batch, problem.heads, num_m_blocks, tile.tile_m * tile.head_dim), init=dq_init),
    ]
    if static.is_fp32:
        queries, keys = (problem.heads, problem.seqlen_q), (problem.heads_kv, problem.seqlen_k)
        workspace += _pieces(problem, tile, ("q", *queries), ("k", *keys), ("v", *keys), ("dout_cast", *queries))
    if deterministic or tile.needs_wgmma:
        # Zeros in a varlen batch: with wrong offsets, the preprocess kernel may not reset all of it, and CTAs would
        # wait for a claim of an earlier call.
        init = "zeros" if problem.varlen else "empty"
        workspace.append(Buffer("dq_progress", (batch, problem.heads, num_m_blocks), "int32", init))
    workspace = _shared_if_small(workspace)
    sizes = {
        "dalibi_warps": tile.dalibi_warps,
        "heads_per_l2_group": _bwd_l2_group(problem, arch, tile, deterministic, l2_bytes, num_kv_tiles * ctas_per_tile),
        "num_tiles": num_tiles,
        "num_ctas": min(num_tiles, arch.num_sms) if is_persistent else num_tiles * ctas_per_tile,
    }
    if problem.varlen:
        workspace.append(_tile_list("kv_tile_list", num_kv_tiles))
        workspace.append(_tile_list("q_tile_list", _num_tiles(problem, problem.seqlen_q, tile.tile_m)))
        # With a semaphore a tile waits for the later K/V tiles of its sequence, so those come first.
        order = varlen.DESCENDING if deterministic else varlen.BY_LENGTH if static.is_bounded else varlen.ASCENDING
        sizes |= _scheduler_sizes(problem, tile, order)
    gradients = gradients_of(problem)
    facts = BwdFacts(problem, tile, deterministic, _num_blocks(problem, problem.seqlen_k, tile.tile_n))
    for gradient in gradients:
        workspace += gradient.buffers(facts)
    return Plan(
        problem=problem,
        arch=arch,
        family=family,
        tile=tile,
        launches=_bwd_launches(static, problem.seqused_k, tile, family, _target(arch, family), deterministic, has_dlse),
        workspace=tuple(workspace),
        sizes=sizes,
        is_dynamic=is_persistent and _tiles_differ(static),
        deterministic=deterministic,
        finalizers=gradients,
    )


@lru_cache
def _bwd_launches(
    static: Static, seqused_k: bool, tile: Any, family: str, target: str, deterministic: bool, has_dlse: bool
) -> tuple[CompileKey, ...]:
    features = backward_features(static.features)
    if pads_with_dropout(tile, static):
        features = (*features, "dropout")
    mods = None if static.mods is None else static.mods.for_backward(uses_tma=getattr(tile, "bias_stages", 0) > 0)
    sums: tuple[CompileKey, ...] = ()
    if mods is not None and mods.dbias_terms:
        sums = (_sum_dbias(static, tile, target),)
        # `dbias_terms` changes only kernels that skip blocks: they write no zeros there.
        mods = replace(mods, dbias_terms=sums[0].static.is_bounded)
    main = replace(
        static, features=features, mods=mods, out_fp32=False, batch_invariant=False, deterministic=deterministic
    )
    # Preprocess and postprocess do not depend on mask and features.
    rows = Static(static.dtype, static.head_dim, varlen=static.varlen, deterministic=deterministic)
    preprocess = replace(rows, head_dim=static.width_v, out_fp32=static.out_fp32, has_dlse=has_dlse)
    # The mma.sync backward always zeroes dQ first, so its postprocess kernel is the same for all calls.
    postprocess = replace(rows, deterministic=deterministic and tile.needs_wgmma)
    kind = "_fp32" * static.is_fp32
    if isinstance(tile, BwdTileSm90Wide):
        kind = "_cluster" if tile.cluster > 1 else "_wide"
    split = (CompileKey.of("split_fp32_bwd", _rows_only(static, seqused_k), tile, target),) if static.is_fp32 else ()
    return (
        *_scheduler("varlen_scheduler_bwd", static, seqused_k, target),
        *split,
        CompileKey.of("bwd_preprocess" + "_fp32" * static.is_fp32, preprocess, tile, target),
        CompileKey.of(f"bwd_{family}{kind}", main, tile, target),
        CompileKey.of(f"bwd_postprocess_{family}", postprocess, tile, target),
        *sums,
    )


def _sum_dbias(static: Static, tile: Any, target: str) -> CompileKey:
    """The launch that sums the terms of the gradient of a bias. With a block mask, all terms exist."""
    rows = Static(static.dtype, 8)
    if not static.block_sparse:
        rows = replace(rows, has_left=static.has_left, has_right=static.has_right, has_chunk=static.has_chunk)
    return CompileKey.of("bwd_sum_dbias", rows, SumTile(tile.tile_m, tile.tile_n), target)


def _shared_if_small(buffers: list[Buffer]) -> list[Buffer]:
    """The buffers, shared by all calls on a stream if they are small.

    Allocating the four buffers takes more host time than a launch. Kernels write each element before they read it, so
    the memory needs no zeros; buffers of zeros are not shared.
    """
    num_bytes = sum(math.prod(buffer.shape) * DTYPE_BYTES[buffer.dtype] for buffer in buffers)
    if num_bytes > MAX_SHARED_BYTES or any(buffer.init != "empty" for buffer in buffers):
        return buffers
    return [buffer._replace(is_shared=True) for buffer in buffers]


def _num_blocks(problem: Problem, seqlen: int, tile_rows: int) -> int:
    """The number of workspace blocks of a head. In a varlen batch each sequence starts with a new block."""
    if problem.varlen:
        return varlen.num_padded_blocks(seqlen, tile_rows, problem.batch)
    return ceil_div(seqlen, tile_rows)


def _missing_gradients(problem: Problem, arch: ArchSpec, deterministic: bool, family: str) -> str:
    """The message for gradients that the requested family does not compute; 'sm80' computes all."""
    of_values = "" if problem.head_dim_v is None else f" and values of {problem.head_dim_v}"
    blocks = ("block_mask",) if problem.block_sparse else ()
    names = "".join(f"{name} and " for name in (*backward_features(problem.features), *blocks))
    what = "deterministic gradients" if deterministic else "the gradient"
    least = "only on sm_90"
    if problem.mods is not None and problem.mods.bwd_ops_per_score > max_mod_ops(problem.static):
        least += f", with at most {max_mod_ops(problem.static)} operations per score in score_mod and mask_mod"
    if deterministic and problem.mods is not None and problem.mods.captures_needing_grad:
        least += ", and without gradients of captured tensors"
    if problem.static.widest > MAX_NARROW_HEAD_DIM:
        least += (
            f"; above head dim {MAX_NARROW_HEAD_DIM} without a bias, tensors captured by score_mod, and deterministic "
            "dropout, and with few features at a time"
        )
    return (
        f"{what} of {'attn_varlen' if problem.varlen else 'attn'} with {names}head_dim={problem.head_dim}"
        f"{of_values} on {arch.name} by kernel family {family!r}: there is no such kernel ({least}); "
        "call use_kernels with 'sm80', or with ''"
    )


def _check_grid(problem: Problem, what: str) -> None:
    """Raise `UnsupportedError` if a kernel with batch and heads along y and z of its grid cannot be launched."""
    for name, size in (("batch", problem.batch_dim), ("heads", problem.heads)):
        if size > MAX_GRID_YZ:
            raise UnsupportedError(f"{what} {name}={size}: at most {MAX_GRID_YZ}; split the call")


def _check_captures(problem: Problem) -> None:
    """Raise `UnsupportedError` if a captured tensor is too large for the kernel that adds to its gradient."""
    for i in problem.mods.captures_needing_grad if problem.mods is not None else ():
        shape = problem.capture_shapes[i]
        if math.prod(shape) > MAX_CAPTURE_ELEMENTS:
            raise UnsupportedError(
                f"the gradient of a captured tensor of shape {shape} on cuda: give it at most "
                f"{MAX_CAPTURE_ELEMENTS} elements, or detach it"
            )


def _check_dq_rows(problem: Problem, tile: AnyBwdTile) -> None:
    """Raise `UnsupportedError` if the fp32 dQ of one head has 2^32 elements or more."""
    most = ((1 << 32) - 1) // tile.head_dim
    rows = problem.seqlen_q + (problem.batch + 1) * tile.tile_m * problem.varlen
    if rows > most:
        most -= rows - problem.seqlen_q  # a varlen batch has padding
        raise UnsupportedError(f"the gradient of attn with seqlen_q={problem.seqlen_q}: at most {most}; split the call")
