"""Shapes of the forward's tiles, and what they need of a part. Tables: `tiles_fwd`, `tiles_bwd`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cute_flash.arch import ArchSpec
from cute_flash.problem import MAP_BLOCK, Problem, Static, UnsupportedError
from layouts.variants import HOPPER_VARIANTS, VARIANTS

if TYPE_CHECKING:
    from layouts.smem import SmemTile

ELEMENT_BYTES = 2
SMEM_ALIGN = 1024  # of every tile in shared memory: the period of its swizzle
WARP_ROWS = 16  # rows of one mma.sync m16n8k16
WARPGROUP_ROWS = 64  # rows of one wgmma
WARP_KEYS = 16  # keys of one ldmatrix.x4 of K or V
# How much a row has registers for beside plain attention (`Features.weight`): a sink; a slope; softcap, or a
# slope and a sink; dropout, or one of a bias and functions; all but those; everything.
ONE, LIGHT, MEDIUM, HEAVY, MOST, ANY_WEIGHT = 1, 2, 3, 4, 11, 99


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
    bias_stages: int = 0  # buffers of a bias that the copy engine fetches; 0: it does not
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
        if self.bias_stages not in (0, 1, 2, 4):
            raise ValueError(f"{self.bias_stages=} must be 0, 1, 2 or 4")
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
        bias = self.bias_stages * self.tile_m * self.tile_n * ELEMENT_BYTES
        barriers += 2 * self.bias_stages * self.num_warpgroups
        # Two tiles are written down, in 16 bytes each, from a multiple of 16 on.
        return columns * ELEMENT_BYTES + masks + bias + -(-8 * barriers // 16) * 16 + 32

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.width_v == self.head_dim else f"{self.head_dim}/{self.width_v}"
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}, {self.q_stages} of Q"
        stages += f", {self.bias_stages} of a bias" if self.bias_stages else ""
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
        # Which row it is may not depend on the length of others, nor on whether they are packed.
        is_fixed = static.features.batch_invariant
        is_short_enough = self.max_keys is None or (not is_fixed and problem.usual_keys <= self.max_keys)
        is_bounded = static.has_left or static.has_right
        is_meant = self.is_bounded is None or self.is_bounded == is_bounded
        has_room = self.max_weight >= static.weight and divides_map(self, static)
        return is_wide_enough and is_as_wide and is_short_enough and is_meant and has_room


def divides_map(tile: FwdTile | FwdTileSm90, static: Static) -> bool:
    return not (static.features.block_map and (MAP_BLOCK % tile.tile_m or MAP_BLOCK % tile.tile_n))
