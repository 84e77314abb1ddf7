"""Tiles of the forward: one literal table per architecture, each row checked against shared memory and citing
its measurement.
"""

from __future__ import annotations

from cute_flash.arch import ArchSpec
from cute_flash.problem import Problem, UnsupportedError
from cute_flash.tiles import HEAVY, LIGHT, MEDIUM, MOST, FwdTile, FwdTileSm90, divides_map

_H200 = "H200, bf16, 16384 tokens, hidden 2048, S=512/2048/16384 full; causal: "
_WITH_ROOM = "not measured: for softcap and dropout, which would spill in the row before"
_FOR_MAPS = (
    "for functions and block maps: H200, bf16, B=4, S=4096, documents 1.80 ms; 192x128 1.98; 128x96 2.01"
)
_FOR_FUNCTIONS = "not measured: for functions and a bias together, which would spill in the rows before"
_BY_RULE = "not measured on this part: chosen by the rules above the table"

# Rows are tried in order; the first one that is wide enough, fits and can mask is taken. Rules for parts that
# are not at hand: two blocks of four warps on an SM if shared memory allows, 32 rows a warp while O and S fit
# in registers (the fewer rows, the more shared memory is read per MMA), no spills.
_SM_80 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(64, 64, 64, 4, 2, q_steps=4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 2, q_steps=2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(96, 64, 64, 4, 2, measured=_FOR_FUNCTIONS),
    FwdTile(128, 128, 48, 4, 2, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(128, 128, 32, 4, 2, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 2, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=12, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(192, 64, 64, 4, 1, q_steps=6, max_weight=MOST, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(256, 128, 64, 8, 1, max_weight=MOST, measured=_BY_RULE),
    FwdTile(256, 128, 32, 8, 1, measured=_FOR_FUNCTIONS),
)
# 99 KB a block and 100 KB an SM: smaller key blocks keep two blocks alive.
_SM_86 = (
    FwdTile(64, 128, 64, 4, 2, q_steps=4, max_weight=LIGHT, measured=_BY_RULE),
    FwdTile(64, 128, 64, 4, 2, q_steps=2, max_weight=MOST, measured=_BY_RULE),
    FwdTile(64, 64, 64, 4, 2, q_steps=4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(96, 128, 32, 4, 1, max_weight=MOST, measured=_BY_RULE),
    FwdTile(96, 64, 64, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(128, 128, 32, 4, 1, max_weight=HEAVY, measured=_BY_RULE),
    FwdTile(128, 64, 64, 4, 1, q_steps=8, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, q_steps=12, max_weight=MOST, measured=_BY_RULE),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
    FwdTile(256, 128, 32, 8, 1, measured=_BY_RULE),
)
_SM_90 = (
    FwdTile(64, 128, 64, 4, 2, 4, max_weight=LIGHT, measured=_H200 + "296/344/363; 207/308/356 TFLOP/s"),
    FwdTile(64, 128, 64, 4, 2, 2, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(64, 64, 32, 4, 2, 4, measured=_FOR_FUNCTIONS),
    FwdTile(96, 128, 64, 4, 2, 2, max_weight=LIGHT, measured=_H200 + "307/358/387; 211/316/383 TFLOP/s"),
    FwdTile(96, 128, 64, 4, 2, max_weight=HEAVY, measured=_WITH_ROOM),
    FwdTile(96, 128, 32, 4, 2, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(96, 64, 64, 4, 2, measured=_FOR_FUNCTIONS),
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
    FwdTile(192, 64, 64, 4, 1, 6, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(192, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
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
    FwdTile(256, 64, 64, 4, 1, max_weight=MOST, measured=_WITH_ROOM),
    FwdTile(256, 64, 32, 4, 1, measured=_FOR_FUNCTIONS),
)
SM80_FWD = {"sm_80": _SM_80, "sm_86": _SM_86, "sm_89": _SM_86, "sm_90": _SM_90}


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


def fwd_tile(family: str, arch: ArchSpec, problem: Problem) -> FwdTile | FwdTileSm90:
    """The tile of a family's forward on an architecture."""
    static = problem.static
    if family == "sm90":
        fetches = static.mods is not None and static.mods.is_aligned
        rows = SM90_FWD_DRAWS if static.features.dropout else SM90_FWD
        for wide in (*SM90_FWD_BIAS, *rows) if fetches and not static.features.dropout else rows:
            if wide.serves(problem) and wide.fits(arch):
                return wide
    else:
        bounds = static.has_left + static.has_right
        # The lengths of a packed batch are in registers; those of others are arguments.
        needs_lengths = static.features.varlen or static.features.batch_invariant
        bounds = min(bounds + needs_lengths, 2) if bounds else 0
        for tile in SM80_FWD[arch.name]:
            # Lists of blocks are read by all warps.
            weight = static.weight + static.features.block_map
            has_room = tile.max_weight >= weight and divides_map(tile, static)
            can_mask = tile.max_bounds >= bounds
            if tile.head_dim >= static.widest and can_mask and has_room and tile.fits(arch):
                return tile
    widths = f"head_dim={static.head_dim}"
    if static.head_dim_v is not None:
        widths += f" with values of {static.head_dim_v}"
    raise UnsupportedError(f"{widths}: no tile of {family} for {arch.name}")
