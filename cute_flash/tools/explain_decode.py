"""`cute-flash explain` for the decode kernel: the keys of each CTA, bytes, and a lower bound of the time.

The kernel reads the lengths and divides the keys on the device. `device/scheduling/kv_splits.py` defines query tiles,
units and splits. The numbers here are those of a batch whose sequences all have the same number of keys.

With `value_dim` (MLA), the bytes of the cache count once, because its rows are keys and values. The query heads may be
divided into groups, which count as K/V heads in the division of the keys.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from cute_flash.errors import UnsupportedError
from cute_flash.planning.decode import CHUNK, UNIT_KEYS, DecodePlan, DecodeStatic, SplitSizes, plan_splits
from cute_flash.planning.decode_tiles import DecodeTile, LatentTile
from cute_flash.planning.latent_sm90 import WARPGROUPS, LatentTileSm90
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band, ceil_div
from cute_flash.spec.decode import GPU_DTYPES
from cute_flash.spec.dtypes import DTYPE_BYTES, ROW_ALIGN_BYTES
from cute_flash.spec.family import requested_family
from cute_flash.spec.latent import MAX_LATENT_DIM, MAX_VALUE_DIM
from cute_flash.spec.problem import HEAD_DIM_STEP, Problem, check_head_dim, check_heads
from cute_flash.tools.roofline import STATISTIC_BYTES, Bound
from cute_flash.tools.text import aligned

FP8 = "float8_e4m3fn"
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class DecodeShape:
    """A call of `attn_decode` whose sequences all have `keys` keys, or a call of `attn` with few queries."""

    batch: int
    heads: int
    heads_kv: int
    tokens: int
    keys: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: str = "bfloat16"
    cache_dtype: str = ""  # "": that of q
    page_size: int | None = None
    band: Band = CAUSAL
    num_splits: int | None = None
    is_attn: bool = False  # a call of `attn`, whose keys are split
    is_latent: bool = False  # one cache, whose first head_dim_v columns are the values

    @staticmethod
    def of(problem: Problem) -> DecodeShape:
        """The shape of a call of `attn`."""
        p = problem
        sizes = (p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v)
        return DecodeShape(*sizes, p.dtype, band=p.band, is_attn=True)

    def check(self) -> None:
        """Raise a ValueError for a call that has no kernel."""
        check_heads(self.heads, self.heads_kv)
        if self.is_latent:
            self._check_latent()
        else:
            check_head_dim(self.head_dim)
            check_head_dim(self.width_v)
        if self.dtype not in GPU_DTYPES:
            raise UnsupportedError(f"attn_decode in {self.dtype} on cuda: use one of {', '.join(GPU_DTYPES)}")
        widths = (self.head_dim,) if self.is_latent else (self.head_dim, self.width_v)
        if self.cache_dtype == FP8 and any(width % ROW_ALIGN_BYTES for width in widths):
            raise UnsupportedError(
                f"FP8 caches with head dims {' and '.join(map(str, widths))} on cuda: use multiples of "
                f"{ROW_ALIGN_BYTES}"
            )

    def _check_latent(self) -> None:
        if self.width_v > self.head_dim:
            raise ValueError(
                f"value_dim={self.width_v} with head_dim={self.head_dim}: the values are the first columns of the cache"
            )
        for name, width, most in (
            ("head_dim", self.head_dim, MAX_LATENT_DIM),
            ("value_dim", self.width_v, MAX_VALUE_DIM),
        ):
            if width % HEAD_DIM_STEP or width > most:
                raise UnsupportedError(
                    f"{name}={width} with one cache on cuda: kernels take multiples of {HEAD_DIM_STEP} up to {most}"
                )

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def static(self) -> DecodeStatic:
        page = self.page_size
        return DecodeStatic(
            dtype=self.dtype,
            head_dim=self.head_dim,
            cache_dtype=self.cache_dtype,
            head_dim_v=self.head_dim_v,
            has_left=self.band.has_left,
            has_right=self.band.has_right,
            has_chunk=self.band.chunk is not None,
            page_lookup="" if page is None else "row" if page % CHUNK else "chunk",
            heads_first=self.is_attn,
            has_seqlens=not self.is_attn,
            is_latent=self.is_latent,
        )

    @property
    def cached_width(self) -> int:
        """Numbers of a row of the caches: keys and values."""
        return self.head_dim if self.is_latent else self.head_dim + self.width_v


@dataclass(frozen=True)
class DecodeExplanation(Bound):
    shape: DecodeShape
    arch: ArchSpec
    plan: DecodePlan

    @staticmethod
    def of(shape: DecodeShape, arch: ArchSpec) -> DecodeExplanation:
        shape.check()
        sizes = SplitSizes(shape.batch, shape.tokens, shape.heads, shape.heads_kv, shape.keys)
        kernel = "fwd_split_kv" if shape.is_attn else "decode_latent" if shape.is_latent else "decode"
        plan = plan_splits(kernel, shape.static, sizes, arch, shape.num_splits, requested_family())
        return DecodeExplanation(shape, arch, plan)

    # ---- division of the keys

    @property
    def row_tiles(self) -> int:
        """Tiles of query rows of a sequence and K/V head; of all its head groups."""
        groups = self.plan.head_groups
        heads = self.shape.heads // self.shape.heads_kv // groups
        return groups * ceil_div(self.shape.tokens * heads, self.plan.tile.tile_m)

    @property
    def num_tiles(self) -> int:
        """Query tiles: (sequence, K/V head, row tile) triples."""
        return self.shape.batch * self.shape.heads_kv * self.row_tiles

    @property
    def visited_keys(self) -> int:
        """Keys of a sequence that at least one query sees."""
        return self.shape.keys - self.shape.band.lo(0, self.shape.tokens, self.shape.keys)

    @property
    def units(self) -> int:
        """Units into which the keys of a query tile are divided."""
        if self.plan.num_splits is not None:
            return self.plan.num_splits
        first = (self.shape.keys - self.visited_keys) // UNIT_KEYS
        return max(ceil_div(self.shape.keys, UNIT_KEYS) - first, 1)

    @property
    def tiles_at_once(self) -> int:
        """Query tiles whose units are numbered consecutively and divided among CTAs (`device/scheduling/kv_splits.py`).

        They are those of one K/V head if `heads_at_once` is the number of K/V heads, else those of all heads.
        """
        return self.num_tiles // self.plan.heads_at_once

    @cached_property
    def division(self) -> tuple[int, int]:
        """Units of a CTA, and units of a query tile including padding, as `KvSplits.divide` computes them."""
        units, num_tiles, num_intervals = self.units, self.tiles_at_once, self.plan.num_ctas // self.plan.heads_at_once
        per_cta = max(ceil_div(num_tiles * units, num_intervals), 1)
        if self.plan.num_splits is not None:
            return per_cta, units
        per_cta = max(per_cta, self.plan.tile.least_keys // UNIT_KEYS)
        most = per_cta + per_cta // 16 + 2
        if units < per_cta:
            whole_tiles = ceil_div(per_cta, units) * units
            return (whole_tiles if whole_tiles <= most else per_cta), units
        longest_split = ceil_div(units, units // per_cta)
        num_splits = ceil_div(units, longest_split)
        if longest_split <= most and num_tiles * num_splits <= num_intervals:
            return longest_split, num_splits * longest_split
        return per_cta, units

    @property
    def units_per_cta(self) -> int:
        return self.division[0]

    @property
    def keys_per_cta(self) -> int:
        """The most keys of a CTA."""
        if self.plan.num_splits is not None:
            return self.units_per_cta * ceil_div(ceil_div(self.visited_keys, UNIT_KEYS), self.units) * UNIT_KEYS
        return min(self.units_per_cta, self.tiles_at_once * self.units) * UNIT_KEYS

    @property
    def busy_ctas(self) -> int:
        """CTAs that have keys."""
        return ceil_div(self.tiles_at_once * self.division[1], self.units_per_cta) * self.plan.heads_at_once

    @cached_property
    def splits(self) -> tuple[int, int]:
        """The fewest and the most CTAs that share the keys of a query tile."""
        per_cta, per_tile = self.division
        firsts = (tile * per_tile for tile in range(self.tiles_at_once))
        counts = {(first + per_tile - 1) // per_cta - first // per_cta + 1 for first in firsts}
        return min(counts), max(counts)

    # ---- cost

    @property
    def kv_bytes(self) -> int:
        """K and V, each once; with one cache, its rows once."""
        shape = self.shape
        return shape.batch * shape.heads_kv * self.visited_keys * shape.cached_width * shape.static.cache_bytes

    @property
    def least_bytes(self) -> int:
        """Q, K, V, O and the LSE, each once."""
        shape = self.shape
        rows = shape.batch * shape.tokens * shape.heads
        width = (shape.head_dim + shape.width_v) * DTYPE_BYTES[shape.dtype] + STATISTIC_BYTES
        return self.kv_bytes + rows * width

    @property
    def workspace_bytes(self) -> int:
        """Outputs and statistics of splits."""
        tile = self.plan.tile
        return self.plan.num_slots * tile.tile_m * (tile.width_v + 2) * STATISTIC_BYTES

    @property
    def unit_seconds(self) -> dict[str, float]:
        """The time of the memory and of the tensor cores, if each runs alone and never waits.

        The tensor cores also compute the unused rows of query tiles.
        """
        tile = self.plan.tile
        flops = 2 * self.num_tiles * tile.tile_m * self.visited_keys * (tile.head_dim + tile.width_v)
        memory = self.least_bytes / (self.arch.hbm_tbps * 1e12)
        return {"memory": memory, "tensor": flops / (self.arch.tensor_tflops * 1e12)}

    # ---- text

    def lines(self) -> list[str]:
        shape, arch, tile, plan = self.shape, self.arch, self.plan.tile, self.plan
        widths = f"{shape.head_dim}" + ("" if shape.head_dim_v is None else f"/{shape.head_dim_v}")
        cache = shape.cache_dtype or shape.dtype
        pages = "contiguous" if shape.page_size is None else f"pages of {shape.page_size}"
        low, high = self.splits
        splits = f"{low}" if low == high else f"{low} to {high}"
        function = "attn, few queries: the keys are split among CTAs" if shape.is_attn else "attn_decode"
        groups = f"; {plan.head_groups} groups of heads" if plan.head_groups > 1 else ""
        groups += ", clusters of 2 CTAs" * plan.key.static.multicasts
        once = " in one cache" if shape.is_latent else ""
        times = ", ".join(f"{unit} {1e6 * seconds:.2f} us" for unit, seconds in self.unit_seconds.items())
        return aligned(
            [
                f"problem B={shape.batch} H={shape.heads} Hkv={shape.heads_kv} Sq={shape.tokens} Sk={shape.keys} "
                f"D={widths} {shape.dtype}, {shape.band}",
                f"call {function}",
                f"cache {cache}, {pages}" + (f", values: its first {shape.width_v} columns" * shape.is_latent),
                f"GPU {arch.gpu} ({arch.name}), {arch.num_sms} SMs",
                f"kernel {plan.key.kernel}",
                f"tile {tile.tile_m} rows x {tile.block_keys} keys, {_roles(tile)}, {tile.stages} stages",
                f"shared {tile.smem_bytes / 1024:.0f} KB of {arch.smem_per_cta / 1024:.0f} KB a CTA, "
                f"up to {tile.ctas_per_sm(arch)} CTA(s) an SM by shared memory",
                f"grid {plan.num_ctas} CTAs, {self.busy_ctas} have keys, at most {self.keys_per_cta} keys each",
                f"splits {splits} CTA(s) share the keys of a tile of query rows; {self.num_tiles} tiles{groups}",
                f"K/V {self.kv_bytes / 1e6:.3f} MB{once}, read by {self.row_tiles} tile(s) of rows",
                f"traffic {self.least_bytes / 1e6:.3f} MB if every tensor moves once; workspace "
                f"{self.workspace_bytes / 1e6:.3f} MB",
                f"units {times} at {arch.hbm_tbps:.2f} TB/s and {arch.tensor_tflops:.0f} TFLOP/s",
                f"time at least {1e6 * self.seconds:.2f} us, by {self.bound}",
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """The explanation for JSON, in bytes, seconds and counts. "blocks" is the number of CTAs of the grid."""
        plan, tile = self.plan, self.plan.tile
        return {
            "problem": asdict(self.shape) | {"band": self.shape.band.as_dict()},
            "gpu": self.arch.gpu,
            "arch": self.arch.name,
            "kernel": plan.key.kernel,
            "target": plan.key.target,
            "splits_keys": True,
            "tile": asdict(tile),
            "smem_bytes": tile.smem_bytes,
            "smem_limit_bytes": self.arch.smem_per_cta,
            "tiles": self.num_tiles,
            "blocks": plan.num_ctas,
            "busy_blocks": self.busy_ctas,
            "keys_per_block": self.keys_per_cta,
            "splits": list(self.splits),
            "head_groups": plan.head_groups,
            "kv_bytes": self.kv_bytes,
            "least_bytes": self.least_bytes,
            "workspace_bytes": self.workspace_bytes,
            "bound": self.bound,
            "seconds": self.seconds,
        }


def _roles(tile: DecodeTile) -> str:
    """The widths of a tile, and how its warps share the work."""
    if isinstance(tile, LatentTileSm90):
        return (
            f"D {tile.head_dim}/{tile.width_v}, {WARPGROUPS} warpgroups: a producer, scores, two halves of the output"
        )
    if isinstance(tile, LatentTile):
        return f"D {tile.head_dim}/{tile.width_v}, {tile.num_warps} warps, {tile.warps_per_row} share 16 rows"
    if tile.column_warps > 1:
        return (
            f"D {tile.head_dim}, {tile.num_teams} x {tile.column_warps} warps of {tile.tile_n} keys and "
            f"{tile.warp_columns} columns"
        )
    return f"D {tile.head_dim}, {tile.num_warps} warps of {tile.tile_n} keys"
