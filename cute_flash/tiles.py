"""Tile shapes: one literal table per architecture, each row checked against shared memory and citing its
measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cute_flash.arch import ArchSpec
from cute_flash.problem import Problem, UnsupportedError
from layouts.variants import HOPPER_VARIANTS, VARIANTS

if TYPE_CHECKING:
    from layouts.smem import SmemTile

ELEMENT_BYTES = 2
SMEM_ALIGN = 1024  # of every tile in shared memory: the period of its swizzle
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARPGROUP_ROWS = 64  # rows of one wgmma
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V
# How much a row has registers for beside plain attention (`Features.weight`): a sink; a slope; softcap, or a
# slope and a sink; dropout; everything.
ONE, LIGHT, MEDIUM, HEAVY, ANY_WEIGHT = 1, 2, 3, 4, 99


def copy_rows(head_dim: int, num_threads: int) -> int:
    """Rows that all threads copy at once: 16 bytes each, 128 or 64 bytes of a row side by side."""
    return num_threads * 16 // (128 if head_dim % 64 == 0 else 64)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SMEM_ALIGN) * SMEM_ALIGN


def _check_layout(layout: str, possible: tuple[str, ...], why: str) -> None:
    if layout not in possible:
        raise UnsupportedError(f"{layout=}: {why}; choose one of {', '.join(possible)}")


@dataclass(frozen=True)
class FwdTile:
    """`tile_m` query rows, in `num_warps` warps stacked along them, against blocks of `tile_n` keys."""

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    num_warps: int
    stages: (
        int  # K/V buffers; 1 overlaps K's copy with P V and V's with Q K^T, 2 prefetch a whole block ahead
    )
    q_steps: int = (
        0  # steps of 16 columns whose Q fragments stay in registers instead of being re-read for every block
    )
    max_bounds: int = 2  # sides of the band it can mask; with more the registers would spill
    layout: str = VARIANTS[0]  # of Q, K, V and O in shared memory; others only for study
    max_weight: int = field(default=ANY_WEIGHT, compare=False)  # of features; with more it would spill
    measured: str = field(default="", compare=False)  # evidence: GPU, dtype, shape, TFLOP/s

    def __post_init__(self) -> None:
        if self.num_warps not in (1, 2, 4, 8):
            raise ValueError(f"{self.num_warps=} must be 1, 2, 4 or 8")
        rows = WARP_ROWS * self.num_warps
        if self.tile_m % rows or self.tile_m <= 0:
            raise ValueError(
                f"{self.tile_m=} must be a multiple of {rows}: {self.num_warps} warps of {WARP_ROWS} rows"
            )
        if self.tile_n % WARP_KEYS or self.tile_n <= 0:
            raise ValueError(f"{self.tile_n=} must be a positive multiple of {WARP_KEYS}")
        if self.head_dim % 32 or not 32 <= self.head_dim <= 256:
            raise ValueError(f"{self.head_dim=} must be a multiple of 32 up to 256")
        if self.tile_n % self.copy_rows or self.tile_m % self.copy_rows:
            raise ValueError(
                f"{self.tile_m=} and {self.tile_n=} must be multiples of {self.copy_rows}, "
                "the rows one copy covers"
            )
        if self.stages not in (1, 2):
            raise ValueError(f"{self.stages=} must be 1 or 2")
        if not 0 <= self.q_steps <= self.head_dim // 16:
            raise ValueError(f"{self.q_steps=} must be 0 to {self.head_dim // 16}, the steps of 16 columns")
        _check_layout(self.layout, VARIANTS, "not among those that mma.sync kernels are built with")

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def copy_rows(self) -> int:
        return copy_rows(self.head_dim, self.num_threads)

    def smem(self, rows: int) -> SmemTile:
        """A tile of Q, K or V in shared memory."""
        from layouts.smem import SmemTile

        return SmemTile(rows, self.head_dim, ELEMENT_BYTES, self.layout)

    @property
    def smem_bytes(self) -> int:
        """Q (whose space O takes over at the end) + K and V stages."""
        q, kv = self.smem(self.tile_m).bytes, self.stages * self.smem(self.tile_n).bytes
        return _aligned(q) + _aligned(kv) + kv

    @property
    def accumulator_registers(self) -> int:
        """fp32 registers a thread needs for O and S; with Q's fragments if they stay."""
        rows = self.tile_m // self.num_warps
        registers = rows * (self.head_dim + self.tile_n) // 32
        return registers + rows * self.q_steps // 4

    def fits(self, arch: ArchSpec) -> bool:
        return self.smem_bytes <= arch.smem_per_block

    def __str__(self) -> str:
        regs = f", {self.q_steps} of {self.head_dim // 16} steps of Q in registers" if self.q_steps else ""
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}"
        study = "" if self.layout == VARIANTS[0] else f", {self.layout}"
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, {self.num_warps} warps, {stages}{regs}{study}"


@dataclass(frozen=True)
class FwdTileSm90:
    """`tile_m` query rows, 64 to a warpgroup, against blocks of `tile_n` keys; one block an SM.

    What does not compare says when a row of the table is taken, and why; it is no part of the kernel.
    """

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    stages: int  # buffers of K, and of V
    q_stages: int = 1  # 2: the next tile begins beside the end of this one; O leaves through Q's stage
    checks_sums: bool = False  # whole blocks look at sums instead of maxima; S stays in registers until then
    takes_turns: bool = True  # warpgroups issue their MMAs one after the other, so that softmaxes alternate
    head_dim_v: int | None = None  # width of V and of the output, where it is another one
    checks_cut_sums: bool = False  # so do the last blocks, which a bound cuts
    draws: bool = False  # a warpgroup more draws for dropout, and leaves masks in shared memory
    draw_stages: int = 1  # buffers of those masks
    layout: str = HOPPER_VARIANTS[0]  # of Q, K, V and O in shared memory; others only for study
    max_keys: int | None = field(default=None, compare=False)  # for shorter sequences only
    is_bounded: bool | None = field(default=None, compare=False)  # only with a bound, or only without
    max_weight: int = field(default=ANY_WEIGHT, compare=False)  # of features; with more it would spill
    measured: str = field(default="", compare=False)  # evidence: GPU, dtype, shape, TFLOP/s

    def __post_init__(self) -> None:
        if self.tile_m % WARPGROUP_ROWS or not 1 <= self.num_warpgroups <= 3:
            raise ValueError(f"{self.tile_m=} must be {WARPGROUP_ROWS} times 1, 2 or 3")
        if self.tile_n % WARP_KEYS or not 0 < self.tile_n <= 256:
            raise ValueError(f"{self.tile_n=} must be a multiple of {WARP_KEYS} up to 256")
        for name, width in (("head_dim", self.head_dim), ("head_dim_v", self.width_v)):
            if width % 32 or not 32 <= width <= 256:
                raise ValueError(f"{name}={width} must be a multiple of 32 up to 256")
        if self.stages not in (1, 2, 4, 8) or self.q_stages not in (1, 2):
            raise ValueError(f"{self.stages=} must be 1, 2, 4 or 8, and {self.q_stages=} 1 or 2")
        if self.q_stages == 2 and self.width_v > self.head_dim:
            raise ValueError(f"{self.q_stages=}: an output of width {self.width_v} does not fit Q's stage")
        if self.draws and (self.num_warpgroups != 2 or self.tile_n % (2 * WARP_KEYS)):
            raise ValueError(f"{self.draws=}: for 2 warpgroups, and {self.tile_n=} a multiple of 32")
        _check_layout(self.layout, HOPPER_VARIANTS, "TMA and wgmma know atoms of 8 rows, swizzled or not")

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def num_warpgroups(self) -> int:
        """Those that multiply; one more loads and stores, and one may draw."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def num_threads(self) -> int:
        return 128 * (1 + self.num_warpgroups + self.draws)

    @property
    def registers(self) -> tuple[int, int]:
        """What a thread of the loading warpgroup, and one of those that multiply, may use."""
        if self.draws:
            return 24, 216
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.num_warpgroups]

    @property
    def registers_to_draw(self) -> int:
        """The same of those that draw."""
        return 56

    @property
    def columns_pv(self) -> int:
        """Of an instruction of P V: all, unless they take more than the registers a thread has at launch."""
        return self.width_v // 2 if self.draws and self.width_v == 256 else self.width_v

    @property
    def accumulator_registers(self) -> int:
        """Registers a thread for O, S and P; addresses, barriers and temporaries come on top."""
        return self.width_v // 2 + self.tile_n // 2 + self.tile_n // 4

    @property
    def smem_bytes(self) -> int:
        columns = self.q_stages * self.tile_m * self.head_dim
        columns += self.stages * self.tile_n * (self.head_dim + self.width_v)
        barriers = 2 * (self.q_stages + 2 * self.stages) + self.q_stages * self.num_warpgroups
        masks = 0
        if self.draws:
            barriers += 2 * self.num_warpgroups * self.draw_stages
            masks = self.draw_stages * self.tile_m * self.tile_n * ELEMENT_BYTES
        # Two tiles are written down, in 16 bytes each, from a multiple of 16 on.
        return columns * ELEMENT_BYTES + masks + -(-8 * barriers // 16) * 16 + 32

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.width_v == self.head_dim else f"{self.head_dim}/{self.width_v}"
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}, {self.q_stages} of Q"
        ways = (", sums checked" if self.checks_sums else "") + (", in turns" if self.takes_turns else "")
        study = "" if self.layout == HOPPER_VARIANTS[0] else f", {self.layout}"
        groups = f"1 + {self.num_warpgroups}{' + 1' if self.draws else ''} warpgroups"
        return f"{self.tile_m}x{self.tile_n}x{width}, {groups}, {stages}{ways}{study}"

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block

    def serves(self, problem: Problem) -> bool:
        """Whether this row of the table is meant for a problem."""
        static = problem.static
        is_wide_enough = self.head_dim >= static.head_dim and self.width_v >= static.width_v
        is_as_wide = (self.head_dim_v is None) == (static.head_dim_v is None)
        is_short_enough = self.max_keys is None or problem.usual_keys <= self.max_keys
        is_bounded = static.has_left or static.has_right
        is_meant = self.is_bounded is None or self.is_bounded == is_bounded
        has_room = self.max_weight >= static.features.weight
        return is_wide_enough and is_as_wide and is_short_enough and is_meant and has_room


_H200 = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/16384 full; causal: "
_WITH_ROOM = "not measured: for softcap and dropout, which would spill in the row before"
_BY_RULE = "not measured on this part: chosen by the rules above the table"

# Rows are tried in order; the first one that is wide enough, fits and can mask is taken. Rules for parts that
# are not at hand: two blocks of four warps on an SM if shared memory allows, 32 rows a warp while O and S fit
# in registers (the fewer rows, the more shared memory is read per MMA), no spills.
_SM_80 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, measured=_BY_RULE),
    FwdTile(96, 128, 64, 4, 2, q_steps=2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 2, measured=_BY_RULE),
    FwdTile(128, 128, 48, 4, 2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(128, 128, 32, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 2, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=12, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=6, measured=_BY_RULE),
    FwdTile(256, 128, 64, 8, 1, measured=_BY_RULE),
)
# 99 KB a block and 100 KB an SM: smaller key blocks keep two blocks alive.
_SM_86 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, measured=_BY_RULE),
    FwdTile(96, 128, 64, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 1, measured=_BY_RULE),
    FwdTile(128, 128, 32, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 1, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, q_steps=12, measured=_BY_RULE),
    FwdTile(256, 128, 32, 8, 1, measured=_BY_RULE),
)
_SM_90 = (
    FwdTile(64, 128, 64, 4, 2, 4, max_weight=LIGHT, measured=_H200 + "296/344/363; 207/308/356 TFLOP/s"),
    FwdTile(64, 128, 64, 4, 2, 2, measured=_WITH_ROOM),
    FwdTile(96, 128, 64, 4, 2, 2, max_weight=LIGHT, measured=_H200 + "307/358/387; 211/316/383 TFLOP/s"),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_WITH_ROOM),
    FwdTile(96, 128, 32, 4, 2, measured=_WITH_ROOM),
    FwdTile(
        128,
        128,
        48,
        4,
        2,
        max_bounds=1,
        max_weight=LIGHT,
        measured=_H200 + "310/376/398; 221/322/408 TFLOP/s",
    ),
    FwdTile(128, 128, 32, 4, 2, max_weight=HEAVY, measured=_H200 + "309/371/390; 216/316/397 TFLOP/s"),
    FwdTile(128, 64, 64, 4, 2, q_steps=8, measured=_WITH_ROOM),
    FwdTile(192, 64, 64, 4, 1, 12, max_weight=LIGHT, measured=_H200 + "289/329/346; 221/304/364 TFLOP/s"),
    FwdTile(192, 64, 64, 4, 1, 6, measured=_WITH_ROOM),
    FwdTile(
        256,
        64,
        64,
        4,
        1,
        6,
        1,
        max_weight=LIGHT,
        measured=f"q_steps=8: {_H200}274/322/344; 213/282/339 TFLOP/s",
    ),
    FwdTile(256, 64, 64, 4, 1, 4, max_weight=LIGHT, measured=_H200 + "271/314/339; 208/280/327 TFLOP/s"),
    FwdTile(256, 64, 64, 4, 1, measured=_WITH_ROOM),
)
SM80_FWD = {"sm_80": _SM_80, "sm_86": _SM_86, "sm_89": _SM_86, "sm_90": _SM_90}


_SWEEP = "H200, bf16, 16384 tokens, hidden 2048, S=512/1024/8192, sweeps of 2026-11-15, version 7: "
_DRAWS = "not measured: for dropout"
_BY_WIDTH = "not measured: as its neighbours, as far as registers and shared memory allow"
# Rows are tried in order, the first that serves is taken.
SM90_FWD = (
    FwdTileSm90(
        64,
        128,
        128,
        4,
        2,
        True,
        checks_cut_sums=True,
        max_keys=1024,
        is_bounded=True,
        max_weight=LIGHT,
        measured=_SWEEP + "causal 261/353/484 TFLOP/s",
    ),
    FwdTileSm90(
        64,
        192,
        128,
        4,
        2,
        True,
        checks_cut_sums=True,
        max_weight=MEDIUM,
        measured=_SWEEP + "432/471/577; causal 256/332/554 TFLOP/s",
    ),
    FwdTileSm90(64, 128, 128, 4, 2, True, checks_cut_sums=True, max_weight=HEAVY, measured=_WITH_ROOM),
    FwdTileSm90(64, 128, 96, 4, 2, True, checks_cut_sums=True, measured=_WITH_ROOM),
    FwdTileSm90(96, 128, 128, 2, 2, True, max_weight=LIGHT, measured=_BY_WIDTH),
    FwdTileSm90(96, 128, 96, 2, 2, True, measured=_WITH_ROOM),
    FwdTileSm90(
        128,
        128,
        128,
        2,
        2,
        True,
        max_weight=HEAVY,
        measured=_SWEEP + "547/613/700; causal 357/491/719 TFLOP/s",
    ),
    FwdTileSm90(128, 128, 96, 2, 2, True, measured=_WITH_ROOM),
    FwdTileSm90(192, 128, 96, 2, 1, measured=_BY_WIDTH),
    FwdTileSm90(256, 128, 64, 2, 1, is_bounded=True, measured=_SWEEP + "causal 363/492/690 TFLOP/s"),
    FwdTileSm90(256, 128, 64, 2, 1, max_keys=2048, is_bounded=False, measured=_SWEEP + "523/610/706 TFLOP/s"),
    # 80 keys spill under a bound.
    FwdTileSm90(
        256, 128, 80, 2, 1, is_bounded=False, max_weight=LIGHT, measured=_SWEEP + "507/605/712 TFLOP/s"
    ),
    FwdTileSm90(256, 128, 64, 2, 1, is_bounded=False, measured=_WITH_ROOM),
    # Values narrower or wider than keys.
    FwdTileSm90(64, 128, 128, 2, 1, True, head_dim_v=128, max_weight=MEDIUM, measured=_BY_WIDTH),
    FwdTileSm90(64, 128, 80, 2, 1, True, head_dim_v=128, measured=_WITH_ROOM),
    FwdTileSm90(128, 128, 128, 2, 2, True, head_dim_v=64, max_weight=LIGHT, measured=_BY_WIDTH),
    FwdTileSm90(128, 128, 96, 2, 2, True, head_dim_v=64, measured=_WITH_ROOM),
    FwdTileSm90(192, 128, 128, 2, 1, True, head_dim_v=128, max_weight=MEDIUM, measured=_BY_WIDTH),
    FwdTileSm90(192, 128, 80, 2, 1, True, head_dim_v=128, measured=_WITH_ROOM),
    FwdTileSm90(256, 128, 64, 2, 1, head_dim_v=256, measured=_BY_WIDTH),
)
# The same with dropout.
SM90_FWD_DRAWS = (
    FwdTileSm90(64, 128, 128, 4, 2, True, checks_cut_sums=True, draws=True, draw_stages=2, measured=_DRAWS),
    FwdTileSm90(96, 128, 128, 2, 2, True, draws=True, max_weight=HEAVY + LIGHT, measured=_DRAWS),
    FwdTileSm90(96, 128, 96, 2, 2, True, draws=True, measured=_DRAWS),
    # A second stage of masks is worth more than one of Q where tiles are long.
    FwdTileSm90(
        128,
        128,
        128,
        2,
        1,
        True,
        draws=True,
        draw_stages=2,
        is_bounded=False,
        max_weight=HEAVY + LIGHT,
        measured="H200, bf16, B=4, S=4096, hidden 2048: 1.13 ms; 2 stages of Q and 1 of masks: 1.25 ms",
    ),
    FwdTileSm90(128, 128, 128, 2, 2, True, draws=True, max_weight=HEAVY + LIGHT, measured=_DRAWS),
    FwdTileSm90(128, 128, 96, 2, 2, True, draws=True, measured=_DRAWS),
    FwdTileSm90(192, 128, 96, 2, 1, draws=True, measured=_DRAWS),
    FwdTileSm90(256, 128, 64, 2, 1, draws=True, measured=_DRAWS),
    FwdTileSm90(64, 128, 128, 2, 1, True, head_dim_v=128, draws=True, measured=_DRAWS),
    FwdTileSm90(128, 128, 128, 2, 2, True, head_dim_v=64, draws=True, measured=_DRAWS),
    FwdTileSm90(192, 128, 96, 2, 1, head_dim_v=128, draws=True, measured=_DRAWS),
    FwdTileSm90(256, 128, 64, 2, 1, head_dim_v=256, draws=True, measured=_DRAWS),
)


def fwd_tile(family: str, arch: ArchSpec, problem: Problem) -> FwdTile | FwdTileSm90:
    """The tile of a family's forward on an architecture."""
    static = problem.static
    if family == "sm90":
        for wide in SM90_FWD_DRAWS if static.features.dropout else SM90_FWD:
            if wide.serves(problem) and wide.fits(arch):
                return wide
    else:
        bounds = static.has_left + static.has_right
        # The lengths of a packed batch are in registers; those of others are arguments.
        bounds = min(bounds + static.features.varlen, 2) if bounds else 0
        for tile in SM80_FWD[arch.name]:
            has_room = tile.max_weight >= static.features.weight
            can_mask = tile.max_bounds >= bounds
            if tile.head_dim >= static.widest and can_mask and has_room and tile.fits(arch):
                return tile
    widths = f"head_dim={static.head_dim}"
    if static.head_dim_v is not None:
        widths += f" with values of {static.head_dim_v}"
    raise UnsupportedError(f"{widths}: no tile of {family} for {arch.name}")
