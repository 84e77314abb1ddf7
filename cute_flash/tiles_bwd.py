"""Tiles of the backward kernels, and the tables that choose one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.arch import ArchSpec
from cute_flash.problem import Features, Problem, Static
from cute_flash.tiles import (
    ANY_WEIGHT,
    ELEMENT_BYTES,
    HEAVY,
    MEDIUM,
    WARP_KEYS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    copy_rows,
)

_BY_RULE = "not measured: chosen by the rules above the table"


@dataclass(frozen=True)
class BwdTileSm90:
    """`tile_n` keys, 64 to each of two warpgroups, against blocks of `tile_m` queries."""

    head_dim: int
    tile_m: int
    tile_n: int
    stages: int = 2  # buffers of Q, and of dO
    early_lse: bool = False  # LSE is read while S^T is made; its registers are D's later
    early_draws: bool = False  # dropout's, before S^T and dP^T take registers
    max_weight: int = field(default=ANY_WEIGHT, compare=False)  # of features; with more it would spill
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup multiplies: half of the rows, if there are
        enough; narrow instructions would read dS from shared memory more often than the tensor cores wait.
        """
        rows = 2 * WARPGROUP_ROWS
        return (self.tile_m // 2, self.head_dim) if self.tile_m == rows else (self.tile_m, self.head_dim // 2)

    @property
    def smem_bytes(self) -> int:
        rows = 2 * self.tile_n + 2 * self.stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        floats = self.tile_m * self.head_dim + 2 * self.stages * self.tile_m
        # Two tiles are written down, in 16 bytes each.
        return 2 * halves + 4 * floats + 32 + 8 * (16 + 4 * self.stages)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block

    def fetches_bias_early(self, inner: int) -> bool:
        """Whether there are registers for a block of it while S is made, beside functions of that length."""
        return inner <= 10


@dataclass(frozen=True)
class BwdTileSm90Wide:
    """`tile_n` keys, half of them to each of two warpgroups, against blocks of `tile_m` queries; each has
    half of the columns of dK, dV and dQ.
    """

    head_dim: int
    tile_m: int
    tile_n: int
    q_stages: int = 2  # buffers of Q
    do_stages: int = 1  # buffers of dO
    dq_pieces: int = 7  # of 8 of a half of dQ that leave through shared memory; 2 KB a warpgroup each
    measured: str = field(default="", compare=False)

    @property
    def num_threads(self) -> int:
        return 3 * 128

    @property
    def registers(self) -> tuple[int, int]:
        """What a thread of the copying warps, and one of the others, may use."""
        return 24, 240

    @property
    def dq_part(self) -> tuple[int, int]:
        """Rows and columns of a block of dQ that each warpgroup multiplies."""
        return self.tile_m, self.head_dim // 2

    @property
    def smem_bytes(self) -> int:
        stages = self.q_stages + self.do_stages
        rows = 2 * self.tile_n + stages * self.tile_m
        halves = rows * self.head_dim + 2 * self.tile_m * self.tile_n
        staged = 2 * 2048 * self.dq_pieces
        return 2 * halves + staged + 4 * stages * self.tile_m + 8 * (4 + 2 * stages + 4)

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block


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

_GRADIENTS = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/8192, sweep of 2026-11-15, version 2: "
_GRADIENTS_256 = "H200, bf16, 16384 tokens, hidden 2048, S=1024/8192: 387/505; causal 296/458 TFLOP/s"
SM90_BWD = (
    BwdTileSm90(
        64, 128, 128, early_lse=True, measured=_GRADIENTS + "311/469/542; causal 187/370/480 TFLOP/s"
    ),
    BwdTileSm90(128, 64, 128, measured=_GRADIENTS + "329/502/572; causal 219/410/547 TFLOP/s"),
    # The most keys for which dK and dV leave registers for dQ, and shared memory for two buffers of Q.
    BwdTileSm90Wide(256, 64, 80, measured=_GRADIENTS_256),
)
# With softcap, ALiBi or dropout. Wide heads have no registers for them: they are left to mma.sync.
SM90_BWD_SCORE = (
    BwdTileSm90(64, 128, 128, early_lse=True, max_weight=MEDIUM, measured=_BY_RULE),
    BwdTileSm90(64, 128, 128, early_lse=True, early_draws=True, max_weight=HEAVY, measured=_BY_RULE),
    BwdTileSm90(64, 64, 128, measured=_BY_RULE),
    SM90_BWD[1],
)
# With a block map, whose mask_mod is asked in few blocks, or with a score_mod: not both, and light ones.
_OF_FUNCTIONS = "H200, bf16, B=4, S=4096, hidden 2048: ALiBi 2.52 ms, causal 1.41; 64 queries: 3.29, 1.73"
SM90_BWD_LIGHT = BwdTileSm90(64, 128, 128, early_lse=True, max_weight=HEAVY, measured=_OF_FUNCTIONS)
# Operations of users' functions for every score that their registers serve; longer ones are left to mma.sync,
# on which the narrowest tile needs to be smaller for them.
MOST_INNER = (24, 10)
LONG_FUNCTION_64 = BwdTile(64, 64, 64, 2, 4, 4, 4, measured=_BY_RULE)
AnyBwdTile = BwdTile | BwdTileSm90 | BwdTileSm90Wide


def bwd_tile(family: str, arch: ArchSpec, problem: Problem, deterministic: bool = False) -> AnyBwdTile | None:
    """The tile of a family's gradients on an architecture; None if it has none."""
    static = problem.static
    weight = static.features.in_gradients.weight
    is_written, is_plain = static.features.is_written, weight == 0
    inner = 0 if static.mods is None else static.mods.gradient_inner
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
    return is_rare and not has_more and static.mods.has_light_gradient


def drops_none(tile: AnyBwdTile, features: Features) -> bool:
    """Whether a kernel is one with dropout, of which this is 0: beside the draws the compiler keeps in
    registers what it spills without them, of softcap and ALiBi in a packed batch.
    """
    asked = features.varlen and features.softcap and features.alibi and not features.dropout
    return asked and isinstance(tile, BwdTileSm90) and tile.head_dim > 64
