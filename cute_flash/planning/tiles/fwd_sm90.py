"""Tiles of the Hopper forward (TMA, wgmma), and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from cute_flash.planning.tiles.common import (
    COST_ALIBI,
    COST_ALL_SCORE_FEATURES,
    COST_ANY,
    COST_DROPOUT,
    COST_SOFTCAP,
    COST_USER_MOD,
    WARP_KEYS,
    WARPGROUP_ROWS,
    check_layout,
    divides_block_mask,
)
from cute_flash.smem.tile import HOPPER_VARIANTS, SmemTile
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.problem import Problem


@dataclass(frozen=True)
class FwdTileSm90:
    """`tile_m` query rows, 64 for each consumer warpgroup, against K/V blocks of `tile_n` keys.

    An SM runs one CTA. Fields with `compare=False` decide which row of the table is chosen; they do not change the
    kernel.
    """

    head_dim: int  # width of the tile; smaller head dims are padded to it
    tile_m: int
    tile_n: int
    stages: int  # of K, and of V
    q_stages: int = 1  # 2: the next tile starts while this one ends, and O is stored through Q's stage
    speculative_max: bool = False  # full blocks use the old row max and check row sums; S is kept until then
    ping_pong: bool = True  # warpgroups alternate in issuing MMAs, so that one computes softmax during the other's MMAs
    head_dim_v: int | None = None  # width of V and of the output; None: equal to head_dim
    speculative_max_masked: bool = False  # masked blocks use a speculative max too
    dropout_producer: bool = False  # an additional warpgroup writes dropout masks to shared memory
    dropout_stages: int = 1  # of dropout masks
    bias_stages: int = 0  # of a bias that TMA loads; 0: threads load the bias, or there is none
    layout: str = HOPPER_VARIANTS[0]  # of Q, K, V and O in shared memory; other layouts are for experiments
    element_bytes: int = 2  # of Q, K, V, O and their gradients
    max_keys: int | None = field(default=None, compare=False)  # only for problems with at most so many `usual_keys`
    is_bounded: bool | None = field(default=None, compare=False)  # only with a bound (True), or only without (False)
    max_feature_cost: int = field(default=COST_ANY, compare=False)  # see `common`; more would spill
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
        if self.dropout_producer and (self.num_warpgroups != 2 or self.tile_n % (2 * WARP_KEYS)):
            raise ValueError(f"{self.dropout_producer=}: for 2 warpgroups, and {self.tile_n=} a multiple of 32")
        if self.bias_stages not in (0, 1, 2, 4):
            raise ValueError(f"{self.bias_stages=} must be 0, 1, 2 or 4")
        check_layout(self.layout, HOPPER_VARIANTS, "TMA and wgmma use atoms of 8 rows, swizzled or not")

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def num_warpgroups(self) -> int:
        """Consumer (MMA) warpgroups, without the producer warpgroup and the dropout producer."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def num_threads(self) -> int:
        return 128 * (1 + self.num_warpgroups + self.dropout_producer)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producer warpgroup, and of the consumer warpgroups."""
        if self.dropout_producer:
            return 24, 216
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.num_warpgroups]

    @property
    def dropout_producer_registers(self) -> int:
        """Registers of a thread of the dropout producer."""
        return 56

    def operand_smem(self, operand: str) -> SmemTile:
        """The tile in shared memory of Q, K, V or O; for Q and O, that of one warpgroup."""
        rows = self.tile_n if operand in ("K", "V") else WARPGROUP_ROWS
        width = self.width_v if operand in ("V", "O") else self.head_dim
        return SmemTile(rows, width, self.element_bytes, self.layout)

    @property
    def columns_pv(self) -> int:
        """Columns of one wgmma of P V: half of them if all would need more registers than a thread has at launch."""
        return self.width_v // 2 if self.dropout_producer and self.width_v == 256 else self.width_v

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for O, S and P, without addresses, barriers and temporaries."""
        return self.width_v // 2 + self.tile_n // 2 + self.tile_n // 4

    @property
    def smem_bytes(self) -> int:
        columns = self.q_stages * self.tile_m * self.head_dim
        columns += self.stages * self.tile_n * (self.head_dim + self.width_v)
        barriers = 2 * (self.q_stages + 2 * self.stages) + self.q_stages * self.num_warpgroups
        masks = 0
        if self.dropout_producer:
            barriers += 2 * self.num_warpgroups * self.dropout_stages
            masks = self.dropout_stages * self.tile_m * self.tile_n * self.element_bytes
        bias = self.bias_stages * self.tile_m * self.tile_n * self.element_bytes
        barriers += 2 * self.bias_stages * self.num_warpgroups
        # Two slots of 16 bytes, aligned to 16, in which the producer publishes tiles.
        return columns * self.element_bytes + masks + bias + -(-8 * barriers // 16) * 16 + 32

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.width_v == self.head_dim else f"{self.head_dim}/{self.width_v}"
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}, {self.q_stages} of Q"
        stages += f", {self.bias_stages} of a bias" if self.bias_stages else ""
        ways = ", speculative max" * self.speculative_max + ", ping-pong" * self.ping_pong
        study = "" if self.layout == HOPPER_VARIANTS[0] else f", {self.layout}"
        groups = f"1 + {self.num_warpgroups}{' + 1' if self.dropout_producer else ''} warpgroups"
        return f"{self.tile_m}x{self.tile_n}x{width}, {groups}, {stages}{ways}{study}"

    def fits(self, arch: ArchSpec) -> bool:
        return arch.has_wgmma and self.smem_bytes <= arch.smem_per_block

    def serves(self, problem: Problem) -> bool:
        """Whether the row has the width, the length and the registers for a problem."""
        static = problem.static
        is_wide_enough = self.head_dim >= static.head_dim and self.width_v >= static.width_v
        is_as_wide = (self.head_dim_v is None) == (static.head_dim_v is None)
        # With batch_invariant the row must not depend on the lengths of other sequences, nor on varlen.
        is_fixed = static.batch_invariant
        is_short_enough = self.max_keys is None or (not is_fixed and problem.usual_keys <= self.max_keys)
        is_meant = self.is_bounded is None or self.is_bounded == static.is_bounded
        has_room = self.max_feature_cost >= static.feature_cost and divides_block_mask(self, static)
        return is_wide_enough and is_as_wide and is_short_enough and is_meant and has_room


_SWEEP = "H200, bf16, 16384 tokens, hidden 2048, S=512/1024/8192, sweeps of 2026-11-15, version 7: "
_SHORT_256 = _SWEEP + "523/610/706 TFLOP/s"
_BY_WIDTH = "not measured: like its neighbours, as far as registers and shared memory allow"
_FOR_FEATURES = "not measured: for features that would spill in the row before"
_FOR_MODS = "not measured: for user functions with a bias, which would spill in the rows before"
_FOR_BLOCK_MASKS = (
    "user functions and block masks: H200, bf16, B=4, S=4096, documents 1.80 ms; 192x128 1.98; 128x96 2.01"
)
_DROPOUT = "not measured: for dropout"
_DROPOUT_128 = "H200, bf16, B=4, S=4096, hidden 2048: 1.13 ms; with 2 stages of Q and 1 of dropout masks 1.25 ms"
_BIAS = "not measured: for a bias"
_BIAS_64 = "H200, bf16, B=4, S=4096, hidden 2048: bias of all pairs 1.53 ms, of each head 1.57; 128x128: 1.50, 1.68"
_BIAS_128 = "H200, bf16, B=4, S=4096, hidden 2048, bias of all pairs: 1.09 ms; 2 stages of Q and 1 of the bias 1.33"

# The first row that supports a problem and fits is chosen.
# fmt: off
SM90_FWD = (
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=128, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, max_keys=1024, is_bounded=True,
                max_feature_cost=COST_ALIBI, measured=_SWEEP + "causal 261/353/484 TFLOP/s"),
    FwdTileSm90(head_dim=64, tile_m=192, tile_n=128, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, max_feature_cost=COST_SOFTCAP,
                measured=_SWEEP + "432/471/577; causal 256/332/554 TFLOP/s"),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=128, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, max_feature_cost=COST_USER_MOD,
                measured=_FOR_BLOCK_MASKS),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=96, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=64, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_ALIBI, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=96, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_USER_MOD,
                measured=_SWEEP + "547/613/700; causal 357/491/719 TFLOP/s"),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=96, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=192, tile_m=128, tile_n=96, stages=2, q_stages=1,
                max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=192, tile_m=128, tile_n=64, stages=2, q_stages=1, measured=_FOR_MODS),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                is_bounded=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_SWEEP + "causal 363/492/690 TFLOP/s"),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                max_keys=2048, is_bounded=False, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_SHORT_256),
    # With a bound, 80 keys would spill.
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=80, stages=2, q_stages=1,
                is_bounded=False, max_feature_cost=COST_ALIBI, measured=_SWEEP + "507/605/712 TFLOP/s"),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                is_bounded=False, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=32, stages=2, q_stages=1, measured=_FOR_MODS),
    # V narrower or wider than K.
    FwdTileSm90(head_dim=64, head_dim_v=128, tile_m=128, tile_n=128, stages=2, q_stages=1,
                speculative_max=True, max_feature_cost=COST_SOFTCAP, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=64, head_dim_v=128, tile_m=128, tile_n=80, stages=2, q_stages=1,
                speculative_max=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=64, head_dim_v=128, tile_m=128, tile_n=64, stages=2, q_stages=1,
                speculative_max=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=128, head_dim_v=64, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_ALIBI, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=128, head_dim_v=64, tile_m=128, tile_n=96, stages=2, q_stages=2,
                speculative_max=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=128, head_dim_v=64, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=192, head_dim_v=128, tile_m=128, tile_n=128, stages=2, q_stages=1,
                speculative_max=True, max_feature_cost=COST_SOFTCAP, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=192, head_dim_v=128, tile_m=128, tile_n=80, stages=2, q_stages=1,
                speculative_max=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(head_dim=192, head_dim_v=128, tile_m=128, tile_n=64, stages=2, q_stages=1,
                speculative_max=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=256, head_dim_v=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_BY_WIDTH),
    FwdTileSm90(head_dim=256, head_dim_v=256, tile_m=128, tile_n=32, stages=2, q_stages=1,
                measured=_FOR_MODS),
)
# With dropout.
SM90_FWD_DROPOUT = (
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=128, stages=4, q_stages=2,
                speculative_max=True, speculative_max_masked=True, dropout_producer=True, dropout_stages=2,
                max_feature_cost=COST_DROPOUT + COST_ALIBI, measured=_DROPOUT),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=96, stages=4, q_stages=2,
                speculative_max=True, dropout_producer=True, dropout_stages=2,
                max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_DROPOUT),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=64, stages=4, q_stages=2,
                speculative_max=True, dropout_producer=True, dropout_stages=2, measured=_FOR_MODS),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_DROPOUT + COST_ALIBI,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=96, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, measured=_FOR_MODS),
    # Long tiles gain more from a second stage of dropout masks than from one of Q.
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=128, stages=2, q_stages=1,
                speculative_max=True, dropout_producer=True, dropout_stages=2, is_bounded=False,
                max_feature_cost=COST_DROPOUT + COST_ALIBI, measured=_DROPOUT_128),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_DROPOUT + COST_ALIBI,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=96, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=192, tile_m=128, tile_n=96, stages=2, q_stages=1,
                dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_DROPOUT),
    FwdTileSm90(head_dim=192, tile_m=128, tile_n=64, stages=2, q_stages=1,
                dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_DROPOUT),
    FwdTileSm90(head_dim=256, tile_m=128, tile_n=32, stages=2, q_stages=1,
                dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=64, head_dim_v=128, tile_m=128, tile_n=128, stages=2, q_stages=1,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=64, head_dim_v=128, tile_m=128, tile_n=64, stages=2, q_stages=1,
                speculative_max=True, dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=128, head_dim_v=64, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_DROPOUT),
    FwdTileSm90(head_dim=128, head_dim_v=64, tile_m=128, tile_n=64, stages=2, q_stages=2,
                speculative_max=True, dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=192, head_dim_v=128, tile_m=128, tile_n=96, stages=2, q_stages=1,
                dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_DROPOUT),
    FwdTileSm90(head_dim=192, head_dim_v=128, tile_m=128, tile_n=64, stages=2, q_stages=1,
                dropout_producer=True, measured=_FOR_MODS),
    FwdTileSm90(head_dim=256, head_dim_v=256, tile_m=128, tile_n=64, stages=2, q_stages=1,
                dropout_producer=True, max_feature_cost=COST_ALL_SCORE_FEATURES, measured=_DROPOUT),
    FwdTileSm90(head_dim=256, head_dim_v=256, tile_m=128, tile_n=32, stages=2, q_stages=1,
                dropout_producer=True, measured=_FOR_MODS),
)
# With a bias that TMA loads.
SM90_FWD_BIAS = (
    FwdTileSm90(head_dim=64, tile_m=192, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, bias_stages=2, max_feature_cost=COST_USER_MOD, measured=_BIAS_64),
    FwdTileSm90(head_dim=64, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, bias_stages=2, max_feature_cost=COST_ALL_SCORE_FEATURES,
                measured=_BIAS),
    FwdTileSm90(head_dim=96, tile_m=128, tile_n=128, stages=2, q_stages=2,
                speculative_max=True, bias_stages=2, max_feature_cost=COST_USER_MOD, measured=_BIAS),
    FwdTileSm90(head_dim=128, tile_m=128, tile_n=128, stages=2, q_stages=1,
                speculative_max=True, bias_stages=2, max_feature_cost=COST_USER_MOD, measured=_BIAS_128),
)
# fmt: on
