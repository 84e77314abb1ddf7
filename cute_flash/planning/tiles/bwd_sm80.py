"""Tiles of the mma.sync backward, and the tables that choose one per GPU and head dimension."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import (
    ELEMENT_BYTES,
    WARP_KEYS,
    WARP_ROWS,
    copy_rows,
)
from cute_flash.spec.arch import ArchSpec


@dataclass(frozen=True)
class BwdTile:
    """`tile_n` keys against blocks of `tile_m` queries, on mma.sync.

    The warps share the tile of each product in their own way: so many along its rows, the others along its
    columns. Where all lie along the keys, P and dS pass from product to product in registers; else through
    shared memory, and fewer operands are read twice.
    """

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    stages: int  # buffers of Q, and of dO; with 1 their copies overlap with dQ only
    warps_s: int = 8  # along the keys of S^T and dP^T (keys x queries)
    warps_kv: int = 8  # along the keys of dK and dV (keys x head_dim)
    warps_q: int = 4  # along the queries of dQ (queries x head_dim)
    num_warps: int = 8
    measured: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.num_warps not in (4, 8) or self.stages not in (1, 2):
            raise ValueError(f"{self.num_warps=} must be 4 or 8, and {self.stages=} 1 or 2")
        if self.tile_m not in (32, 64, 128):
            raise ValueError(f"{self.tile_m=} must be 32, 64 or 128")
        if self.head_dim % 32 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to 256")
        for name, rows, columns in (
            ("warps_s", self.tile_n, self.tile_m),
            ("warps_kv", self.tile_n, self.head_dim),
            ("warps_q", self.tile_m, self.head_dim),
        ):
            along = getattr(self, name)
            if along not in (1, 2, 4, 8) or along > self.num_warps:
                raise ValueError(f"{name}={along} must be 1, 2, 4 or 8, up to {self.num_warps=}")
            across = self.num_warps // along
            if rows % (WARP_ROWS * along) or columns % (WARP_KEYS * across) or rows <= 0:
                raise ValueError(f"{name}={along}: {rows}x{columns} is not {along}x{across} parts of 16x16")
        at_once = copy_rows(self.head_dim, self.num_threads)
        if self.tile_n % at_once or self.tile_m % at_once:
            raise ValueError(
                f"{self.tile_m=}, {self.tile_n=} must be multiples of {at_once}: rows of one copy"
            )

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def keeps_p(self) -> bool:
        """P and dS are operands of dV and dK where they are made, in registers."""
        return self.warps_s == self.warps_kv == self.num_warps

    @property
    def smem_bytes(self) -> int:
        """K and V, stages of Q and dO with their fp32 statistics, dS and, unless it stays in registers, P."""
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        scores = (1 if self.keeps_p else 2) * self.tile_m * self.tile_n
        statistics = 2 * self.stages * self.tile_m
        return (rows * self.head_dim + scores) * ELEMENT_BYTES + 4 * statistics

    @property
    def accumulator_registers(self) -> int:
        """fp32 registers a thread needs for dK, dV, S and dP."""
        return 2 * self.tile_n * (self.head_dim + self.tile_m) // self.num_threads

    def fits(self, arch: ArchSpec) -> bool:
        return self.smem_bytes <= arch.smem_per_block

    def fetches_bias_early(self, inner: int) -> bool:
        """As that of `BwdTileSm90`."""
        return inner <= 24

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''} of Q and dO"
        where = "P in registers" if self.keeps_p else "P in shared memory"
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {self.num_warps} warps, {stages}, {where}"


_BY_RULE = "not measured: chosen by the rules above the table"
# Rules for the backward on mma.sync, timed on sm_90 only, and not against other tiles: many keys (a tile of
# them reads all of Q and dO, and adds to all of dQ), warps arranged to read little shared memory per MMA, two
# stages where they fit, no spills.
_BWD_163 = (
    BwdTile(64, 128, 128, 2, 4, 4, 4, measured=_BY_RULE),
    BwdTile(96, 64, 128, 2, 4, 4, 4, measured=_BY_RULE),
    BwdTile(128, 64, 128, 2, 4, 4, 2, measured=_BY_RULE),
    BwdTile(192, 64, 64, 2, 4, 2, 2, measured=_BY_RULE),
    BwdTile(256, 64, 64, 1, 4, 2, 2, measured=_BY_RULE),
)
_BWD_99 = (
    BwdTile(64, 64, 128, 2, 4, 4, 4, measured=_BY_RULE),
    BwdTile(96, 64, 128, 1, 8, 8, 4, measured=_BY_RULE),
    BwdTile(128, 32, 128, 1, 4, 4, 2, measured=_BY_RULE),
    BwdTile(192, 32, 64, 1, 4, 2, 2, measured=_BY_RULE),
    BwdTile(256, 32, 32, 1, 2, 1, 1, 4, measured=_BY_RULE),
)
SM80_BWD = {"sm_80": _BWD_163, "sm_86": _BWD_99, "sm_89": _BWD_99, "sm_90": _BWD_163}
# With softcap, ALiBi or dropout, and in order where the batch is packed: smaller tiles, to spill nothing.
_SCORE_163 = (
    _BWD_99[0],
    BwdTile(96, 64, 64, 2, 4, 4, 4, measured=_BY_RULE),
    BwdTile(128, 64, 64, 2, 4, 2, 2, measured=_BY_RULE),
    BwdTile(192, 32, 64, 2, 4, 2, 2, measured=_BY_RULE),
    BwdTile(256, 64, 32, 1, 2, 2, 2, measured=_BY_RULE),
)
_SCORE_99 = (
    *_SCORE_163[:2],
    BwdTile(128, 64, 64, 1, 4, 2, 2, measured=_BY_RULE),
    BwdTile(192, 32, 64, 1, 4, 2, 2, measured=_BY_RULE),
    BwdTile(256, 64, 16, 1, 1, 1, 2, 4, measured=_BY_RULE),
)
SM80_BWD_SCORE = {"sm_80": _SCORE_163, "sm_86": _SCORE_99, "sm_89": _SCORE_99, "sm_90": _SCORE_163}
LONG_FUNCTION_64 = BwdTile(64, 64, 64, 2, 4, 4, 4, measured=_BY_RULE)
