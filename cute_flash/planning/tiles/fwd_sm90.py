"""Tiles of the Hopper forward (TMA, wgmma), and the tables that choose one."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import (
    ANY_WEIGHT,
    ELEMENT_BYTES,
    HEAVY,
    LIGHT,
    MEDIUM,
    MOST,
    WARP_KEYS,
    WARPGROUP_ROWS,
    _check_layout,
    divides_map,
)
from cute_flash.smem.tile import HOPPER_VARIANTS, SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Problem


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

    def operand_smem(self, operand: str) -> SmemTile:
        """The tile in shared memory of Q, K, V or O; for Q and O, that of one warpgroup."""
        rows = self.tile_n if operand in ("K", "V") else WARPGROUP_ROWS
        width = self.width_v if operand in ("V", "O") else self.head_dim
        return SmemTile(rows, width, ELEMENT_BYTES, self.layout)

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


_WITH_ROOM = "not measured: for softcap and dropout, which would spill in the row before"
_FOR_MAPS = (
    "for functions and block maps: H200, bf16, B=4, S=4096, documents 1.80 ms; 192x128 1.98; 128x96 2.01"
)
_FOR_FUNCTIONS = "not measured: for functions and a bias together, which would spill in the rows before"
_SWEEP = "H200, bf16, 16384 tokens, hidden 2048, S=512/1024/8192, sweeps of 2026-11-15, version 7: "
_SHORT_256 = _SWEEP + "523/610/706 TFLOP/s"
_DRAWS = "not measured: for dropout"
_FETCHES = "not measured: for a bias"
_BIAS_64 = (
    "H200, bf16, B=4, S=4096, hidden 2048: of all pairs 1.53 ms, of each head 1.57; 128x128: 1.50, 1.68"
)
_BIAS_128 = "H200, bf16, B=4, S=4096, hidden 2048, of all pairs: 1.09 ms; 2 stages of Q: 1 of the bias 1.33"
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
    FwdTileSm90(64, 128, 128, 4, 2, True, checks_cut_sums=True, max_weight=HEAVY, measured=_FOR_MAPS),
    FwdTileSm90(64, 128, 96, 4, 2, True, checks_cut_sums=True, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(64, 128, 64, 4, 2, True, checks_cut_sums=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(96, 128, 128, 2, 2, True, max_weight=LIGHT, measured=_BY_WIDTH),
    FwdTileSm90(96, 128, 96, 2, 2, True, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(96, 128, 64, 2, 2, True, measured=_FOR_FUNCTIONS),
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
    FwdTileSm90(128, 128, 96, 2, 2, True, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(128, 128, 64, 2, 2, True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(192, 128, 96, 2, 1, max_weight=MOST, measured=_BY_WIDTH),
    FwdTileSm90(192, 128, 64, 2, 1, measured=_FOR_FUNCTIONS),
    FwdTileSm90(
        256, 128, 64, 2, 1, is_bounded=True, max_weight=MOST, measured=_SWEEP + "causal 363/492/690 TFLOP/s"
    ),
    FwdTileSm90(256, 128, 64, 2, 1, max_keys=2048, is_bounded=False, max_weight=MOST, measured=_SHORT_256),
    # 80 keys spill under a bound.
    FwdTileSm90(
        256, 128, 80, 2, 1, is_bounded=False, max_weight=LIGHT, measured=_SWEEP + "507/605/712 TFLOP/s"
    ),
    FwdTileSm90(256, 128, 64, 2, 1, is_bounded=False, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(256, 128, 32, 2, 1, measured=_FOR_FUNCTIONS),
    # Values narrower or wider than keys.
    FwdTileSm90(64, 128, 128, 2, 1, True, head_dim_v=128, max_weight=MEDIUM, measured=_BY_WIDTH),
    FwdTileSm90(64, 128, 80, 2, 1, True, head_dim_v=128, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(64, 128, 64, 2, 1, True, head_dim_v=128, measured=_FOR_FUNCTIONS),
    FwdTileSm90(128, 128, 128, 2, 2, True, head_dim_v=64, max_weight=LIGHT, measured=_BY_WIDTH),
    FwdTileSm90(128, 128, 96, 2, 2, True, head_dim_v=64, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(128, 128, 64, 2, 2, True, head_dim_v=64, measured=_FOR_FUNCTIONS),
    FwdTileSm90(192, 128, 128, 2, 1, True, head_dim_v=128, max_weight=MEDIUM, measured=_BY_WIDTH),
    FwdTileSm90(192, 128, 80, 2, 1, True, head_dim_v=128, max_weight=MOST, measured=_WITH_ROOM),
    FwdTileSm90(192, 128, 64, 2, 1, True, head_dim_v=128, measured=_FOR_FUNCTIONS),
    FwdTileSm90(256, 128, 64, 2, 1, head_dim_v=256, max_weight=MOST, measured=_BY_WIDTH),
    FwdTileSm90(256, 128, 32, 2, 1, head_dim_v=256, measured=_FOR_FUNCTIONS),
)
# The same with dropout.
SM90_FWD_DRAWS = (
    FwdTileSm90(
        64,
        128,
        128,
        4,
        2,
        True,
        checks_cut_sums=True,
        draws=True,
        draw_stages=2,
        max_weight=HEAVY + LIGHT,
        measured=_DRAWS,
    ),
    FwdTileSm90(64, 128, 96, 4, 2, True, draws=True, draw_stages=2, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(64, 128, 64, 4, 2, True, draws=True, draw_stages=2, measured=_FOR_FUNCTIONS),
    FwdTileSm90(96, 128, 128, 2, 2, True, draws=True, max_weight=HEAVY + LIGHT, measured=_DRAWS),
    FwdTileSm90(96, 128, 96, 2, 2, True, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(96, 128, 64, 2, 2, True, draws=True, measured=_FOR_FUNCTIONS),
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
    FwdTileSm90(128, 128, 96, 2, 2, True, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(128, 128, 64, 2, 2, True, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(192, 128, 96, 2, 1, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(192, 128, 64, 2, 1, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(256, 128, 64, 2, 1, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(256, 128, 32, 2, 1, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(64, 128, 128, 2, 1, True, head_dim_v=128, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(64, 128, 64, 2, 1, True, head_dim_v=128, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(128, 128, 128, 2, 2, True, head_dim_v=64, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(128, 128, 64, 2, 2, True, head_dim_v=64, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(192, 128, 96, 2, 1, head_dim_v=128, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(192, 128, 64, 2, 1, head_dim_v=128, draws=True, measured=_FOR_FUNCTIONS),
    FwdTileSm90(256, 128, 64, 2, 1, head_dim_v=256, draws=True, max_weight=MOST, measured=_DRAWS),
    FwdTileSm90(256, 128, 32, 2, 1, head_dim_v=256, draws=True, measured=_FOR_FUNCTIONS),
)
# With a bias that the copy engine fetches.
SM90_FWD_BIAS = (
    FwdTileSm90(64, 192, 128, 2, 2, True, bias_stages=2, max_weight=HEAVY, measured=_BIAS_64),
    FwdTileSm90(64, 128, 128, 2, 2, True, bias_stages=2, max_weight=MOST, measured=_FETCHES),
    FwdTileSm90(96, 128, 128, 2, 2, True, bias_stages=2, max_weight=HEAVY, measured=_FETCHES),
    FwdTileSm90(128, 128, 128, 2, 1, True, bias_stages=2, max_weight=HEAVY, measured=_BIAS_128),
)
