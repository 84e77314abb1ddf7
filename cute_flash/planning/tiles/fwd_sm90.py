"""Tiles of the Hopper forward (TMA, wgmma), and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from cute_flash.planning.tiles.common import (
    COST_ALIBI,
    COST_ALL_SCORE_FEATURES,
    COST_DROPOUT,
    COST_SINKS,
    COST_SOFTCAP,
    COST_USER_MOD,
    ELEMENT_BYTES,
    WARP_KEYS,
    WARPGROUP_ROWS,
    Tile,
    check_layout,
)
from cute_flash.smem.tile import HOPPER_VARIANTS, SmemTile
from cute_flash.spec.problem import Static

MAX_INSTRUCTION_COLUMNS = 256  # of one wgmma


PLAIN = "plain"  # `FwdTileSm90.only`


@dataclass(frozen=True)
class FwdTileSm90(Tile):
    """`tile_m` query rows, 64 for each consumer warpgroup, against K/V blocks of `tile_n` keys. An SM runs one CTA."""

    stages: int  # of K, and of V
    q_stages: int = 1  # more: the next tile starts while this one ends, and O is stored through Q's stage
    speculative_max: bool = False  # full blocks use the old row max, and keep S until their row sums are checked
    ping_pong: bool = True  # warpgroups alternate in issuing MMAs, so that one computes softmax during the other's MMAs
    head_dim_v: int | None = None  # width of V and of the output; None: equal to head_dim
    speculative_max_masked: bool = False  # masked blocks use a speculative max too
    dropout_producer: bool = False  # an additional warpgroup writes dropout masks to shared memory
    dropout_stages: int = 1  # of dropout masks
    bias_stages: int = 0  # of a bias that TMA loads; 0: threads load the bias, or there is none
    layout: str = HOPPER_VARIANTS[0]  # of Q, K, V and O in shared memory; other layouts are for experiments
    skips_blocks: bool = False  # a warpgroup skips blocks in which its own rows see no key
    # A feature: the row is only for calls with this feature and no other, without a block mask. `PLAIN`: only for dense
    # calls without features and without a left bound.
    only: str = field(default="", compare=False)

    needs_wgmma: ClassVar[bool] = True
    dropout_producer_registers: ClassVar[int] = 56  # of a thread

    def __post_init__(self) -> None:
        if self.tile_m % WARPGROUP_ROWS or not 1 <= self.num_warpgroups <= 3:
            raise ValueError(f"{self.tile_m=} must be {WARPGROUP_ROWS} times 1, 2 or 3")
        if self.tile_n % WARP_KEYS or not 0 < self.tile_n <= 256:
            raise ValueError(f"{self.tile_n=} must be a multiple of {WARP_KEYS} up to 256")
        for name, width in (("head_dim", self.head_dim), ("head_dim_v", self.width_v)):
            if width % 32 or not 32 <= width <= 320:
                raise ValueError(f"{name}={width} must be a multiple of 32 up to 320")
        if self.stages not in (1, 2, 4, 8) or not 1 <= self.q_stages <= 4:
            raise ValueError(f"{self.stages=} must be 1, 2, 4 or 8, and {self.q_stages=} 1 to 4")
        if self.q_stages > 1 and self.width_v > self.head_dim:
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
    def most_skipped(self) -> int:
        """The most blocks that a warpgroup skips after its last own block."""
        return -(-(self.tile_m - WARPGROUP_ROWS) // self.tile_n)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the producer warpgroup, and of the consumer warpgroups."""
        if self.dropout_producer:
            return 24, 216
        return {1: (56, 256), 2: (24, 240), 3: (32, 160)}[self.num_warpgroups]

    def operand_smem(self, operand: str) -> SmemTile:
        """The tile in shared memory of Q, K, V or O; for Q and O, that of one warpgroup."""
        rows = self.tile_n if operand in ("K", "V") else WARPGROUP_ROWS
        width = self.width_v if operand in ("V", "O") else self.head_dim
        smem = SmemTile(rows, width, ELEMENT_BYTES, self.layout)
        if operand == "V" and self.columns_pv % smem.atom_cols:
            # An instruction of P V reads whole atoms. These have 32 columns.
            return SmemTile(rows, width, ELEMENT_BYTES, "swizzled64")
        return smem

    @property
    def columns_pv(self) -> int:
        """Columns of one wgmma of P V: all, if an instruction may have so many. Otherwise they are a multiple of 32.

        With a dropout producer, 256 columns would need more registers than a thread has at launch.
        """
        if self.width_v > MAX_INSTRUCTION_COLUMNS:
            return self.width_v // (3 if self.width_v % 64 else 2)
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
        # Stages of one element for each score: dropout masks and the bias.
        score_stages = self.dropout_stages * self.dropout_producer + self.bias_stages
        barriers += 2 * self.num_warpgroups * score_stages
        elements = columns + score_stages * self.tile_m * self.tile_n
        # Slots of 16 bytes, aligned to 16, in which the producer publishes tiles.
        return elements * ELEMENT_BYTES + -(-8 * barriers // 16) * 16 + 16 * max(2, self.q_stages)

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.width_v == self.head_dim else f"{self.head_dim}/{self.width_v}"
        stages = f"{self.stages} K/V stage{'s' if self.stages > 1 else ''}, {self.q_stages} of Q"
        stages += f", {self.bias_stages} of a bias" if self.bias_stages else ""
        ways = ", speculative max" * self.speculative_max + ", ping-pong" * self.ping_pong
        ways += ", skips blocks" * self.skips_blocks
        study = "" if self.layout == HOPPER_VARIANTS[0] else f", {self.layout}"
        groups = f"1 + {self.num_warpgroups}{' + 1' if self.dropout_producer else ''} warpgroups"
        return f"{self.tile_m}x{self.tile_n}x{width}, {groups}, {stages}{ways}{study}"

    def serves(self, static: Static) -> bool:
        """Whether the row has the width and the registers for a problem."""
        is_wide_enough = self.head_dim >= static.head_dim and self.width_v >= static.width_v
        is_as_wide = (self.head_dim_v is None) == (static.head_dim_v is None)
        is_for_features = not self.only or (static.features == (self.only,) and not static.block_sparse)
        if self.only == PLAIN:
            has_others = static.features or static.block_sparse or static.has_left
            is_for_features = not (has_others or static.varlen or static.pack_gqa)
        has_masks = self.dropout_producer == ("dropout" in static.features)
        has_room = self.max_cost >= _cost(static) and self.divides_block_mask(static)
        return is_wide_enough and is_as_wide and is_for_features and has_masks and has_room and self.is_for(static)


def _cost(static: Static) -> int:
    """`Static.feature_cost`, and the registers of positions in int64."""
    # An int64 of a row or a key takes two registers. With a block mask, most blocks do not evaluate the mask_mod.
    has_int64 = static.mods is not None and static.mods.has_int64 and not static.block_sparse
    return static.feature_cost + has_int64


PIECE_STAGES = 8  # of `FwdTileSm90Wide`, each with a piece of K or of V


@dataclass(frozen=True)
class FwdTileSm90Wide(Tile):
    """`tile_m` query rows, 64 for each CTA of a cluster of two, against K/V blocks of `tile_n` keys.

    It is for outputs that need two warpgroups, and for features that leave one warpgroup too few registers. Each of two
    consumer warpgroups of a CTA computes S for half of the keys, and half of the columns of O. K and V are loaded in
    pieces, once for both CTAs (`kernels/sm90/fwd_wide_storage.py`).
    """

    head_dim_v: int | None = None  # width of V and of the output; None: equal to head_dim
    layout: str = HOPPER_VARIANTS[0]

    needs_wgmma: ClassVar[bool] = True
    num_warpgroups: ClassVar[int] = 2
    num_threads: ClassVar[int] = 128 * 3
    registers: ClassVar[tuple[int, int]] = 40, 232  # per thread of the producer, and of the consumer warpgroups
    k_columns: ClassVar[int] = 64  # of a piece of K
    v_keys: ClassVar[int] = 32  # of a piece of V
    cluster: ClassVar[int] = 2  # CTAs; each loads one part of every piece for all
    # `Config` and `Params`, which both Hopper forwards use, read these.
    bias_stages: ClassVar[int] = 0
    dropout_producer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.tile_m != 2 * WARPGROUP_ROWS or self.tile_n != 128:
            raise ValueError(f"{self.tile_m=} and {self.tile_n=} must be 128: 64 rows per CTA, 64 keys per warpgroup")
        if self.head_dim % self.k_columns or not 256 < self.head_dim <= 576:
            raise ValueError(f"{self.head_dim=} must be a multiple of {self.k_columns} above 256, up to 576")
        if self.width_v % 128 or not 128 <= self.width_v <= 512:
            raise ValueError(f"head_dim_v={self.width_v} must be a multiple of 128 up to 512")

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def columns_pv(self) -> int:
        """Columns of the output of one warpgroup."""
        return self.width_v // 2

    @property
    def k_pieces(self) -> int:
        """Pieces of K of a block."""
        return self.head_dim // self.k_columns

    @property
    def p_buffers(self) -> int:
        """Buffers of P. With one, a warpgroup waits for the other's P V before it stores P of the next block."""
        return 1 if self.head_dim > 512 else 2

    @property
    def v_chunks(self) -> int:
        """Pieces of V of a block for one warpgroup."""
        return self.tile_n // self.v_keys

    @property
    def block_pieces(self) -> int:
        """Pieces of K and V of a block."""
        return self.k_pieces + 2 * self.v_chunks

    def operand_smem(self, operand: str) -> SmemTile:
        """The tile in shared memory of Q, and of a part of a piece of K or V."""
        sizes = {
            "Q": (WARPGROUP_ROWS, self.head_dim),
            "K": (self.tile_n // self.cluster, self.k_columns),
            "V": (self.v_keys // self.cluster, self.columns_pv),
        }
        return SmemTile(*sizes[operand], ELEMENT_BYTES, self.layout)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a pipeline stage: those of a piece of K. A piece of V is not larger."""
        return self.cluster * self.operand_smem("K").bytes

    @property
    def smem_p_half(self) -> SmemTile:
        """P of the keys of one warpgroup."""
        return SmemTile(WARPGROUP_ROWS, self.tile_n // 2, ELEMENT_BYTES, self.layout)

    @property
    def accumulator_registers(self) -> int:
        """Registers of a thread for O, S and P, without addresses, barriers and temporaries."""
        return self.columns_pv // 2 + self.tile_n // 4 + self.tile_n // 8

    @property
    def smem_bytes(self) -> int:
        tiles = self.operand_smem("Q").bytes + PIECE_STAGES * self.stage_bytes
        tiles += 2 * self.p_buffers * self.smem_p_half.bytes
        statistics, barriers = 2 * 2 * 4 * WARPGROUP_ROWS, 2 * (2 + PIECE_STAGES)
        # Two slots of up to 32 bytes in which the producer publishes tiles, and one for an index of the scheduler.
        return tiles + statistics + 8 * barriers + 64 + 16

    def serves(self, static: Static) -> bool:
        """Whether the row has the width and the registers for a problem."""
        is_wide_enough = self.head_dim >= static.head_dim and self.width_v >= static.width_v
        return is_wide_enough and self.max_cost >= _cost(static) and self.is_for(static)

    def __str__(self) -> str:
        width = f"{self.head_dim}" if self.width_v == self.head_dim else f"{self.head_dim}/{self.width_v}"
        return (
            f"{self.tile_m}x{self.tile_n}x{width}, clusters of 2 CTAs of 1 + 2 warpgroups, {PIECE_STAGES} pieces of K/V"
        )


# Versions are those of profiling/notes/fwd_sm90.md.
_SWEEP = "H200, bf16, 16384 tokens, hidden 2048, kernel version 7, 2026-11-15, TFLOP/s of S=512/1024/8192: "
_SWEEP_NOV_18 = "H200, bf16, 16384 tokens, hidden 2048, 2026-11-18, TFLOP/s of S=1024/4096/16384: "
_SWEEP_192 = _SWEEP_NOV_18 + "567/678/735; causal 450/630/719 (128x112: 555/691/748; causal 438/654/722)"
_SHORT_PLAIN = "H200, bf16, 16384 tokens, hidden 2048, 2026-11-20, TFLOP/s of S=512/1024: "
_FEATURES = "H200, bf16, B=4, S=4096, hidden 2048, 2026-11-18, ms of full; causal: "
_SHORT = "H200, bf16, B=32, S=512, hidden 2048, 2026-11-18, ms of full; causal: "
_BY_WIDTH = "not measured: like its neighbours, as far as registers and shared memory allow"
_FOR_FEATURES = "not measured: for features that would spill in the row before"
_FOR_MODS = "not measured: for mods and features that would spill in the rows before"
_FOR_BLOCK_MASKS = "user mods and block masks: H200, bf16, B=4, S=4096, documents 1.80 ms; 192x128 1.98; 128x96 2.01"
_DROPOUT_128 = "H200, bf16, B=4, S=4096, hidden 2048: 1.13 ms; with 2 stages of Q and 1 of dropout masks 1.25 ms"
_BIAS_64 = "H200, bf16, B=4, S=4096, hidden 2048: bias (B, H, S, S) 1.53 ms, (1, H, S, S) 1.57; 128x128: 1.50, 1.68"
_BIAS_128 = "H200, bf16, B=4, S=4096, hidden 2048, bias (B, H, S, S): 1.09 ms; 2 stages of Q and 1 of the bias 1.33"
_BIAS_192 = "the same with bias (1, H, S, S): 0.86 ms, causal 0.45; without speculation 0.89, 0.47"
_BIAS_256 = "the same: 0.87 ms, causal 0.45; 128x32 without TMA 1.08, 0.55"

_with_dropout = partial(FwdTileSm90, dropout_producer=True, measured="not measured: for dropout")
_with_bias = partial(FwdTileSm90, bias_stages=2, measured="not measured: for a bias")

# The first row that supports a problem and fits is chosen. Columns: head_dim, tile_m, tile_n, stages, q_stages,
# speculative_max.
# fmt: off
SM90_FWD = (
    FwdTileSm90( 64, 192, 128, 4, 3, True, speculative_max_masked=True, skips_blocks=True, only=PLAIN, is_bounded=True,
                max_keys=1024,
                measured=_SHORT_PLAIN + "277/369 with 2 stages of Q, 292/376 with 3 and prefetches; 128x128 245/338"),
    FwdTileSm90( 64, 192, 128, 4, 2, True, speculative_max_masked=True, skips_blocks=True, only=PLAIN, is_bounded=False,
                max_keys=1024, measured=_SHORT_PLAIN + "428/473; without skips_blocks 410/450"),
    FwdTileSm90( 64, 128, 128, 4, 2, True, speculative_max_masked=True, max_keys=1024, is_bounded=True,
                max_cost=COST_ALIBI, measured=_SWEEP + "causal 261/353/484"),
    FwdTileSm90( 64, 192, 128, 4, 2, True, speculative_max_masked=True, max_cost=COST_SOFTCAP,
                measured=_SWEEP + "432/471/577; causal 256/332/554"),
    FwdTileSm90( 64, 128, 128, 4, 2, True, speculative_max_masked=True, max_cost=COST_USER_MOD,
                measured=_FOR_BLOCK_MASKS),
    FwdTileSm90( 64, 128,  96, 4, 2, True, speculative_max_masked=True, max_cost=COST_ALL_SCORE_FEATURES,
                measured=_FOR_FEATURES),
    FwdTileSm90( 64, 128,  64, 4, 2, True, speculative_max_masked=True, measured=_FOR_MODS),
    FwdTileSm90( 96, 128, 128, 2, 2, True, only="softcap", is_bounded=True,
                measured=_FEATURES + "0.61 causal; 128x96 0.68"),
    FwdTileSm90( 96, 128, 128, 2, 2, True, only="softcap", is_bounded=False, max_keys=1024,
                measured=_SHORT + "0.180 full; 192x112 0.203. S=1024: 0.315; 192x112 0.377"),
    FwdTileSm90( 96, 192, 112, 2, 2, True, only="softcap", is_bounded=False,
                measured=_FEATURES + "1.12 full; 128x128 1.17, 128x96 1.27"),
    FwdTileSm90( 96, 128, 128, 2, 2, True, max_keys=1024, is_bounded=False, max_cost=COST_ALIBI,
                measured=_SWEEP_NOV_18 + "534/597/618"),
    FwdTileSm90( 96, 128, 128, 2, 2, True, max_keys=2048, is_bounded=True, max_cost=COST_ALIBI,
                measured=_SWEEP_NOV_18 + "causal 422/585/621"),
    FwdTileSm90( 96, 192, 112, 2, 2, True, speculative_max_masked=True, max_cost=COST_SINKS,
                measured=_SWEEP_NOV_18 + "488/702/749; causal 367/596/710"),
    FwdTileSm90( 96, 128, 128, 2, 2, True, max_cost=COST_ALIBI, measured=_FEATURES + "ALiBi 0.97; 0.52"),
    FwdTileSm90( 96, 128,  96, 2, 2, True, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90( 96, 128,  64, 2, 2, True, measured=_FOR_MODS),
    FwdTileSm90(128, 128, 128, 2, 3, True, speculative_max_masked=True, only=PLAIN, is_bounded=True, max_keys=1024,
                measured=_SHORT_PLAIN + "362/461; 2 stages of Q, exact max in masked blocks 322/447"),
    FwdTileSm90(128, 128, 128, 2, 2, True, max_cost=COST_USER_MOD, measured=_SWEEP + "547/613/700; causal 357/491/719"),
    FwdTileSm90(128, 128,  96, 2, 2, True, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(128, 128,  64, 2, 2, True, measured=_FOR_MODS),
    FwdTileSm90(192, 128,  64, 2, 1, True, only="softcap", max_keys=512,
                measured=_SHORT + "0.158; 0.105; 128x112 0.158; 0.114"),
    FwdTileSm90(192, 128, 112, 2, 1, True, only="softcap",
                measured=_FEATURES + "0.85; 0.45; 128x96 without speculation 0.97; 0.51"),
    FwdTileSm90(192, 128,  96, 2, 1, True, only="alibi",
                measured=_FEATURES + "0.78; 0.41; without speculation 0.82; 0.43"),
    FwdTileSm90(192, 128,  96, 2, 1, max_cost=COST_ALL_SCORE_FEATURES, measured=_SWEEP_192),
    FwdTileSm90(192, 128,  64, 2, 1, measured=_FOR_MODS),
    FwdTileSm90(256, 128,  64, 2, 1, True, only="softcap", max_keys=1024,
                measured=_SHORT + "0.144; 0.101; 128x80 0.153; 0.110. S=1024: 0.249; 0.157; 128x80 0.244; 0.164"),
    FwdTileSm90(256, 128,  80, 2, 1, True, only="softcap",
                measured=_FEATURES + "0.84; 0.46; 128x64 without speculation 0.93; 0.49"),
    FwdTileSm90(256, 128,  80, 2, 1, only="score_mod", max_cost=COST_USER_MOD,
                measured=_FEATURES + "0.88; 0.46; 128x64 0.93; 0.48"),
    FwdTileSm90(256, 128,  64, 2, 1, skips_blocks=True, only=PLAIN, is_bounded=True, max_keys=1024,
                measured=_SHORT_PLAIN + "358/477; without skips_blocks 349/468"),
    FwdTileSm90(256, 128,  64, 2, 1, is_bounded=True, max_cost=COST_ALL_SCORE_FEATURES,
                measured=_SWEEP + "causal 363/492/690"),
    FwdTileSm90(256, 128,  64, 2, 1, max_keys=2048, is_bounded=False, max_cost=COST_ALL_SCORE_FEATURES,
                measured=_SWEEP + "523/610/706"),
    # With a bound and an exact max, 80 keys would spill.
    FwdTileSm90(256, 128,  80, 2, 1, is_bounded=False, max_cost=COST_ALIBI, measured=_SWEEP + "507/605/712"),
    FwdTileSm90(256, 128,  64, 2, 1, is_bounded=False, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(256, 128,  32, 2, 1, measured=_FOR_MODS),
    # V narrower or wider than K.
    FwdTileSm90( 64, 128, 128, 2, 1, True, head_dim_v=128, max_cost=COST_SOFTCAP, measured=_BY_WIDTH),
    FwdTileSm90( 64, 128,  80, 2, 1, True, head_dim_v=128, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90( 64, 128,  64, 2, 1, True, head_dim_v=128, measured=_FOR_MODS),
    FwdTileSm90(128, 128, 128, 2, 2, True, head_dim_v=64, max_cost=COST_ALIBI, measured=_BY_WIDTH),
    FwdTileSm90(128, 128,  96, 2, 2, True, head_dim_v=64, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(128, 128,  64, 2, 2, True, head_dim_v=64, measured=_FOR_MODS),
    FwdTileSm90(192, 128, 128, 2, 1, True, head_dim_v=128, max_cost=COST_SOFTCAP, measured=_BY_WIDTH),
    FwdTileSm90(192, 128,  80, 2, 1, True, head_dim_v=128, max_cost=COST_ALL_SCORE_FEATURES, measured=_FOR_FEATURES),
    FwdTileSm90(192, 128,  64, 2, 1, True, head_dim_v=128, measured=_FOR_MODS),
    FwdTileSm90(256, 128,  64, 2, 1, head_dim_v=256, max_cost=COST_ALL_SCORE_FEATURES, measured=_BY_WIDTH),
    FwdTileSm90(256, 128,  32, 2, 1, head_dim_v=256, measured=_FOR_MODS),
)
# With dropout.
SM90_FWD_DROPOUT = (
    _with_dropout( 64, 128, 128, 2, 2, True, speculative_max_masked=True, dropout_stages=4, max_cost=COST_DROPOUT,
                  measured=_FEATURES + "1.53; 0.79; 4 stages of K and V, 2 of masks: 1.60; 0.82"),
    _with_dropout( 64, 128, 128, 4, 2, True, speculative_max_masked=True, dropout_stages=2,
                  max_cost=COST_DROPOUT + COST_ALIBI),
    _with_dropout( 64, 128,  96, 4, 2, True, dropout_stages=2, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout( 64, 128,  64, 4, 2, True, dropout_stages=2, measured=_FOR_MODS),
    _with_dropout( 96, 128, 128, 2, 2, True, max_cost=COST_DROPOUT + COST_ALIBI),
    _with_dropout( 96, 128,  96, 2, 2, True, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout( 96, 128,  64, 2, 2, True, measured=_FOR_MODS),
    # Long tiles gain more from a second stage of dropout masks than from one of Q.
    _with_dropout(128, 128, 128, 2, 1, True, dropout_stages=2, is_bounded=False, max_cost=COST_DROPOUT + COST_ALIBI,
                  measured=_DROPOUT_128),
    _with_dropout(128, 128, 128, 2, 2, True, max_cost=COST_DROPOUT + COST_ALIBI),
    _with_dropout(128, 128,  96, 2, 2, True, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(128, 128,  64, 2, 2, True, measured=_FOR_MODS),
    _with_dropout(192, 128,  64, 2, 1, True, dropout_stages=2, max_cost=COST_DROPOUT,
                  measured=_FEATURES + "0.91; 0.49; 128x96, 1 stage, without speculation: 0.98; 0.53"),
    _with_dropout(192, 128,  96, 2, 1, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(192, 128,  64, 2, 1, measured=_FOR_MODS),
    _with_dropout(256, 128,  64, 2, 1, True, max_cost=COST_DROPOUT,
                  measured=_FEATURES + "0.87; 0.47; without speculation 0.91; 0.48"),
    _with_dropout(256, 128,  64, 2, 1, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(256, 128,  32, 2, 1, measured=_FOR_MODS),
    _with_dropout( 64, 128, 128, 2, 1, True, head_dim_v=128, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout( 64, 128,  64, 2, 1, True, head_dim_v=128, measured=_FOR_MODS),
    _with_dropout(128, 128, 128, 2, 2, True, head_dim_v=64, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(128, 128,  64, 2, 2, True, head_dim_v=64, measured=_FOR_MODS),
    _with_dropout(192, 128,  64, 2, 1, True, head_dim_v=128, dropout_stages=2, max_cost=COST_DROPOUT,
                  measured=_FEATURES + "1.32; 0.68 with 16 heads; 128x96: 1.35; 0.72"),
    _with_dropout(192, 128,  96, 2, 1, True, head_dim_v=128, dropout_stages=2, max_cost=COST_DROPOUT + COST_ALIBI),
    _with_dropout(192, 128,  96, 2, 1, head_dim_v=128, dropout_stages=2, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(192, 128,  64, 2, 1, head_dim_v=128, measured=_FOR_MODS),
    _with_dropout(256, 128,  64, 2, 1, head_dim_v=256, max_cost=COST_ALL_SCORE_FEATURES),
    _with_dropout(256, 128,  32, 2, 1, head_dim_v=256, measured=_FOR_MODS),
)
# With a bias that TMA loads.
SM90_FWD_BIAS = (
    _with_bias( 64, 192, 128, 2, 2, True, max_cost=COST_USER_MOD, measured=_BIAS_64),
    _with_bias( 64, 128, 128, 2, 2, True, max_cost=COST_ALL_SCORE_FEATURES),
    _with_bias( 96, 128, 128, 2, 2, True, max_cost=COST_USER_MOD),
    _with_bias(128, 128, 128, 2, 1, True, max_cost=COST_USER_MOD, measured=_BIAS_128),
    _with_bias(192, 128,  96, 2, 1, True, bias_stages=1, max_cost=COST_USER_MOD, measured=_BIAS_192),
    _with_bias(256, 128,  64, 2, 1, max_cost=COST_USER_MOD, measured=_BIAS_256),
    _with_bias(192, 128,  96, 2, 1, True, head_dim_v=128, max_cost=COST_USER_MOD),
)
# fmt: on

_ONE_BATCH = "H200, bf16, B=1, H=32, 2026-11-19, TFLOP/s of S=4096/16384 full; causal: "
# All score features but dropout. Two user mods, and a user mod with softcap and ALiBi, would spill.
_MAX_COST_WIDE = COST_ALL_SCORE_FEATURES - COST_DROPOUT
# Head dims above 256. The first row that supports a problem is taken. Beside an output of 384 columns a warpgroup has
# registers for 16 keys, whose products would need shared memory 1.75 times as long as the tensor cores.
# fmt: off
SM90_FWD_WIDE = (
    FwdTileSm90(288, 128,  64, 2, 1, max_cost=COST_SOFTCAP, measured=_BY_WIDTH),
    FwdTileSm90(288, 128,  48, 2, 1, max_cost=_MAX_COST_WIDE, measured=_FOR_FEATURES),
    FwdTileSm90(320, 128,  48, 2, 1, max_cost=_MAX_COST_WIDE, measured=_BY_WIDTH),
    FwdTileSm90(320, 128,  64, 2, 1, head_dim_v=256, max_cost=_MAX_COST_WIDE, measured=_BY_WIDTH),
    FwdTileSm90(320, 128,  48, 2, 1, head_dim_v=320, max_cost=_MAX_COST_WIDE, measured=_BY_WIDTH),
    FwdTileSm90Wide(320, 128, 128, head_dim_v=384, measured=_ONE_BATCH + "491/517; 549/593"),
    FwdTileSm90Wide(384, 128, 128, measured=_ONE_BATCH + "556/559; 591/646"),
    FwdTileSm90Wide(320, 128, 128, head_dim_v=512, measured=_BY_WIDTH),
    FwdTileSm90Wide(448, 128, 128, head_dim_v=512, measured=_BY_WIDTH),
    FwdTileSm90Wide(512, 128, 128, head_dim_v=256, measured=_BY_WIDTH),
    FwdTileSm90Wide(512, 128, 128, measured=_ONE_BATCH + "618/615; 653/740"),
    FwdTileSm90Wide(576, 128, 128, head_dim_v=512, measured=_BY_WIDTH),
)
# fmt: on
