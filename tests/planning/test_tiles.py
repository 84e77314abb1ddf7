"""The tile tables: every row fits its GPU, every head dim has a row, and invalid rows raise an error."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest

from cute_flash.planning.plan import plan_forward
from cute_flash.planning.tiles import bwd_tile, fwd_tile
from cute_flash.planning.tiles.bwd_sm80 import SM80_BWD, BwdTileSm80
from cute_flash.planning.tiles.fwd_sm80 import SM80_FWD, FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import SM90_FWD, SM90_FWD_DROPOUT, FwdTileSm90
from cute_flash.spec.arch import ARCHS, ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.family import FAMILIES
from cute_flash.spec.features import feature_cost
from cute_flash.spec.problem import Problem, UnsupportedError

# The most registers of a thread, and the number for addresses, loop counters and row statistics.
MAX_REGISTERS, OTHER_REGISTERS = 255, 30
# With 24 left, ptxas serialises wgmma.
OTHER_HOPPER_REGISTERS = 28


SM_90 = ARCHS["sm_90"]
Tile = FwdTileSm80 | FwdTileSm90
# (name of the table, architecture, row) of every table.
Entry = tuple[str, ArchSpec, Tile]
AMPERE: list[tuple[str, ArchSpec, FwdTileSm80]] = [
    ("SM80_FWD", ARCHS[arch], row) for arch, rows in SM80_FWD.items() for row in rows
]
HOPPER: list[tuple[str, ArchSpec, FwdTileSm90]] = [("SM90_FWD", SM_90, row) for row in (*SM90_FWD, *SM90_FWD_DROPOUT)]
ROWS: list[Entry] = [*AMPERE, *HOPPER]
MASKS = (Band(), Band(None, 0), Band(5, None), Band(100, 100))
# The widest tile of each kernel family.
WIDEST = {"sm80": 512, "sm90": 256}
RUNNABLE = [(f, a.name) for f, runs_on in FAMILIES.items() for a in ARCHS.values() if runs_on(a)]


def row_id(entry: Entry) -> str:
    name, arch, row = entry
    dropout = isinstance(row, FwdTileSm90) and row.dropout_producer
    return f"{name}-{arch.name}-{row.head_dim}-{row.tile_m}x{row.tile_n}{'-dropout' * dropout}"


def test_there_is_a_table_for_every_architecture() -> None:
    assert set(SM80_FWD) == set(ARCHS)
    # Rows are tried in order; a row after a wider one would never be used.
    equal_widths = [[row for row in rows if row.head_dim_v is None] for rows in (SM90_FWD, SM90_FWD_DROPOUT)]
    for rows in (*SM80_FWD.values(), *equal_widths):
        widths = [row.head_dim for row in rows]
        assert widths == sorted(widths)
    assert {rows[-1].head_dim for rows in SM80_FWD.values()} == {WIDEST["sm80"]}
    assert {rows[-1].head_dim for rows in equal_widths} == {WIDEST["sm90"]}
    # Any Dv with any D.
    for rows in (SM90_FWD, SM90_FWD_DROPOUT):
        assert max((row.head_dim, row.width_v) for row in rows if row.head_dim_v) == (256, 256)
    assert all(row.dropout_producer for row in SM90_FWD_DROPOUT)
    assert not any(row.dropout_producer for row in SM90_FWD)


# Features of every cost, and whether there is a block mask, whose blocks not all tiles divide.
FEATURES: tuple[tuple[tuple[str, ...], bool], ...] = (
    (("alibi",), False),
    (("return_max_logit",), False),
    (("softcap",), False),
    (("softcap",), True),
    (("dropout",), False),
    (("sinks", "dropout"), False),
    (("softcap", "dropout"), False),
    (("softcap", "alibi"), False),
    (("softcap", "sinks"), False),
    (("score_mod",), False),
    (("mask_mod",), True),
    (("score_mod", "mask_mod"), False),
    (("dropout", "score_mod", "mask_mod"), False),
    (("dropout", "mask_mod"), True),
)


def problem_of(head_dim: int, band: Band, keys: int = 1000, head_dim_v: int | None = None) -> Problem:
    return Problem(1, 1, 1, 1000, keys, head_dim, band=band, head_dim_v=head_dim_v)


@pytest.mark.parametrize("entry", ROWS, ids=row_id)
def test_every_row_is_taken_by_its_own_head_dim(entry: Entry) -> None:
    name, arch, row = entry
    head_dim_v = row.head_dim_v if isinstance(row, FwdTileSm90) else None
    # Another row has the same widths.
    head_dim = row.head_dim - 8 if head_dim_v == row.head_dim else row.head_dim
    family = {"SM80_FWD": "sm80", "SM90_FWD": "sm90"}[name]
    problems = [
        dataclasses.replace(problem_of(head_dim, band, keys, head_dim_v), seqlen_q=queries)
        for band, keys, queries in itertools.product(MASKS, (100, 1 << 20), (1, 1000))
    ]
    taken = [fwd_tile(family, arch, problem) for problem in problems]
    for features, block_sparse in FEATURES:
        cost = feature_cost(features, block_sparse)
        for problem in problems:
            tile = fwd_tile(family, arch, dataclasses.replace(problem, features=features, block_sparse=block_sparse))
            assert tile.max_cost >= cost, "registers for the features"
            taken.append(tile)
    assert any(one is row for one in taken)


@pytest.mark.parametrize("entry", ROWS, ids=row_id)
def test_row_cites_its_measurement_or_says_that_there_is_none(entry: Entry) -> None:
    measured = entry[2].measured
    assert "TFLOP/s" in measured or " ms" in measured or "not measured" in measured


@pytest.mark.parametrize("entry", AMPERE, ids=row_id)
def test_row_fits_the_shared_memory_and_registers_of_its_table(entry: tuple[str, ArchSpec, FwdTileSm80]) -> None:
    _, arch, row = entry
    q, k, v = row.tile_m, row.stages * row.tile_n, row.stages * row.tile_n
    # Warps that share rows exchange P, and statistics of the threads of each row.
    exchanged = row.tile_m * (2 * row.tile_n + 4 * 4 * row.row_warps) if row.row_warps > 1 else 0
    assert row.smem_bytes == 2 * row.head_dim * (q + k + v) + exchanged
    assert row.smem_bytes <= arch.smem_per_cta
    assert row.num_threads <= arch.max_threads_per_sm
    assert row.smem_bytes + 1024 <= arch.smem_per_sm
    # 16 x 8 accumulators over 32 threads are 4 registers; those of O and S must leave room for the rest.
    fragments = row.tile_m * (row.head_dim + row.tile_n) // (16 * 8 * row.num_warps) * 4
    assert row.accumulator_registers >= fragments
    assert row.accumulator_registers + OTHER_REGISTERS <= MAX_REGISTERS
    assert row.num_threads * row.accumulator_registers <= arch.registers_per_sm


@pytest.mark.parametrize("entry", HOPPER, ids=row_id)
def test_hopper_row_fits_shared_memory_and_registers(entry: tuple[str, ArchSpec, FwdTileSm90]) -> None:
    _, arch, row = entry
    keys = row.stages * row.tile_n
    matrices = 2 * (row.head_dim * (row.q_stages * row.tile_m + keys) + row.width_v * keys)
    matrices += 2 * row.tile_m * row.tile_n * row.dropout_producer * row.dropout_stages
    # Barriers are small beside them.
    assert matrices < row.smem_bytes < matrices + 1024
    assert row.smem_bytes <= arch.smem_per_cta
    assert row.smem_bytes + 1024 <= arch.smem_per_sm
    assert row.num_threads <= 1024
    # 64 x 8 accumulators over 128 threads are 4 registers; P, in 16 bits, lives beside the next S.
    registers = row.width_v // 2 + row.tile_n // 2 + row.tile_n // 4
    assert row.accumulator_registers == registers
    for_others = 128 * (24 + row.dropout_producer * row.dropout_producer_registers)
    room = (arch.registers_per_sm - for_others) // (128 * row.num_warpgroups)
    assert registers + OTHER_HOPPER_REGISTERS <= min(room, MAX_REGISTERS)


@pytest.mark.parametrize("band", MASKS, ids=str)
@pytest.mark.parametrize(("family", "name"), RUNNABLE)
def test_every_head_dim_finds_a_row_that_fits(family: str, name: str, band: Band) -> None:
    arch = ARCHS[name]
    for head_dim, keys in itertools.product(range(8, WIDEST[family] + 1, 8), (1, 1000, 1 << 20)):
        tile = plan_forward(problem_of(head_dim, band, keys), arch, family).tile
        assert tile.head_dim >= head_dim
        assert not isinstance(tile, FwdTileSm90) or tile.head_dim_v is None
        assert tile.fits(arch)
        assert tile.smem_bytes <= arch.smem_per_cta, f"head_dim={head_dim} on {arch.name}"


@pytest.mark.parametrize(("family", "name"), RUNNABLE)
def test_no_row_is_taken_that_does_not_fit(family: str, name: str) -> None:
    found = {}
    sizes = range(1, ARCHS[name].smem_per_cta // 1024 + 1)
    for kib in sizes:
        small = dataclasses.replace(ARCHS[name], smem_per_cta=kib << 10)
        with contextlib.suppress(UnsupportedError):
            found[kib] = plan_forward(Problem(1, 1, 1, 100, 100, 64), small, family).tile.smem_bytes
    assert all(smem_bytes <= kib << 10 for kib, smem_bytes in found.items())
    # From some size of shared memory on, there is always a row.
    assert list(found) == list(range(min(found), sizes.stop))
    refusal = f"^head_dim=64: no tile of {family} for {name}$"
    with pytest.raises(UnsupportedError, match=refusal):
        plan_forward(Problem(1, 1, 1, 100, 100, 64), dataclasses.replace(ARCHS[name], smem_per_cta=1024), family)


def test_a_family_without_a_tile_is_not_replaced() -> None:
    # More shared memory does not replace wgmma.
    roomy = dataclasses.replace(ARCHS["sm_80"], smem_per_cta=1 << 20)
    with pytest.raises(UnsupportedError, match=r"^head_dim=128: no tile of sm90 for sm_80$"):
        fwd_tile("sm90", roomy, problem_of(128, Band(None, 0)))
    for family in FAMILIES:
        with pytest.raises(
            UnsupportedError, match=f"^head_dim=520: no tile of {family} for sm_90 .above 512 only by 'sm90'"
        ):
            fwd_tile(family, SM_90, problem_of(520, Band()))


@pytest.mark.parametrize("band", MASKS, ids=str)
def test_dv_other_than_d_has_a_row(band: Band) -> None:
    widths = range(8, 257, 24)
    for head_dim, head_dim_v in itertools.product(widths, widths):
        if head_dim == head_dim_v:
            continue
        problem = problem_of(head_dim, band, head_dim_v=head_dim_v)
        tile = fwd_tile("sm90", SM_90, problem)
        assert isinstance(tile, FwdTileSm90)
        assert tile.head_dim >= head_dim and tile.width_v >= head_dim_v and tile.fits(SM_90)
        for arch in ARCHS.values():
            # The tile is wide enough for both.
            both = problem_of(max(head_dim, head_dim_v), band)
            assert fwd_tile("sm80", arch, problem) is fwd_tile("sm80", arch, both)


@pytest.mark.parametrize("band", MASKS, ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_wide_heads_have_a_row_for_the_exact_row_max(arch: str, band: Band) -> None:
    """Above head dim 256, warps share rows, with a speculative row max where it may be."""
    for head_dim, head_dim_v in ((264, None), (320, 64), (328, None), (256, 392), (512, None), (512, 256)):
        plain = problem_of(head_dim, band, head_dim_v=head_dim_v)
        tile = fwd_tile("sm80", ARCHS[arch], plain)
        assert tile.head_dim == -(-max(head_dim, head_dim_v or 0) // 64) * 64
        assert tile.speculative_max and tile.row_warps > 1
        for features, block_sparse in FEATURES[1:]:
            problem = dataclasses.replace(plain, features=features, block_sparse=block_sparse)
            exact = fwd_tile("sm80", ARCHS[arch], problem)
            assert exact == dataclasses.replace(tile, speculative_max=False, q_steps=0)
        for field in ("batch_invariant", "varlen"):
            other = fwd_tile("sm80", ARCHS[arch], dataclasses.replace(plain, **{field: True}))
            assert other.speculative_max == (field == "varlen") and other.tile_m == tile.tile_m


def test_rows_for_short_sequences_and_for_masks() -> None:
    row = FwdTileSm90(64, 128, 128, 2, max_keys=1024, is_bounded=True)
    causal, full = Band(None, 0), Band()
    static = problem_of(64, causal).static
    assert row.serves(static) and row.serves(problem_of(40, Band(3, None)).static)
    assert not row.serves(dataclasses.replace(static, batch_invariant=True))
    assert not row.serves(problem_of(64, full).static)
    assert not row.serves(problem_of(72, causal).static)
    assert not row.serves(problem_of(64, causal, head_dim_v=32).static)
    whole = dataclasses.replace(row, is_bounded=False, max_keys=None)
    assert whole.serves(problem_of(64, full).static) and not whole.serves(static)
    assert whole.serves(dataclasses.replace(problem_of(64, full).static, batch_invariant=True))
    wide = dataclasses.replace(row, is_bounded=None, max_keys=None, head_dim_v=128)
    for head_dim_v in (8, 128, None, 136):
        assert wide.serves(problem_of(64, full, head_dim_v=head_dim_v).static) == (head_dim_v in (8, 128))
    softcap = dataclasses.replace(whole, only="softcap")
    for features in ((), ("softcap",), ("softcap", "sinks"), ("alibi",)):
        with_features = dataclasses.replace(problem_of(64, full), features=features).static
        assert softcap.serves(with_features) == (features == ("softcap",))
        assert not softcap.serves(dataclasses.replace(with_features, block_sparse=True))
    first = fwd_tile("sm90", SM_90, problem_of(64, causal, 1024))
    assert first.max_keys == 1024 and fwd_tile("sm90", SM_90, problem_of(64, causal, 1025)).max_keys is None


SM80, SM90, BWD = FwdTileSm80(64, 64, 64, 4, 1), FwdTileSm90(64, 128, 64, 2), BwdTileSm80(128, 64, 128, 2, 4, 4, 2)
PAIR = FwdTileSm80(256, 64, 64, 4, 1, speculative_max=True, row_warps=2)
# A good tile, the fields that make it a wrong one, and the error.
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (SM80, {"tile_m": 96}, "tile_m=96 must be a multiple of 64: 4 warps of 16 rows"),
    (SM80, {"num_warps": 8}, "tile_m=64 must be a multiple of 128"),
    *((SM80, {"tile_n": n}, f"tile_n={n} must be a positive multiple of 16") for n in (24, 0, -16)),
    *((SM80, {"head_dim": d}, f"head_dim={d} must be a multiple of 32 up to 512") for d in (72, 544, 0)),
    # 256 threads copy 32 rows of 128 bytes, or 64 of 64 bytes, at a time.
    (SM80, {"tile_m": 128, "tile_n": 48, "num_warps": 8}, "must be multiples of 32, the rows one copy covers"),
    (
        SM80,
        {"head_dim": 96, "tile_m": 128, "tile_n": 96, "num_warps": 8},
        "must be multiples of 64, the rows one copy covers",
    ),
    *((SM80, {"stages": n}, f"stages={n} must be 1 or 2") for n in (0, 3)),
    *((PAIR, {"row_warps": n}, f"row_warps={n} must be 1, 2 or 4") for n in (0, 3, 8)),
    (PAIR, {"num_warps": 1}, "row_warps=2 must be 1, 2 or 4, and at most self.num_warps=1"),
    (PAIR, {"stages": 2}, "row_warps=2 needs one stage"),
    (PAIR, {"head_dim": 224}, "row_warps=2 needs a multiple of 64 columns"),
    *((PAIR, {"row_warps": w, "tile_n": n}, "16, 32, 64 or 128 times as many keys") for w, n in ((2, 96), (4, 32))),
    (PAIR, {"pieces": 2}, "speculative_max=True and self.row_warps=2 are not implemented for fp32"),
    (SM80, {"pieces": 2, "row_warps": 2, "tile_m": 32}, "row_warps=2 are not implemented for fp32"),
    *((SM90, {"tile_m": m}, f"tile_m={m} must be 64 times 1, 2 or 3") for m in (96, 0, -64, 256)),
    *((SM90, {"tile_n": n}, f"tile_n={n} must be a multiple of 16 up to 256") for n in (24, 0, 272)),
    *((SM90, {"head_dim": d}, f"head_dim={d} must be a multiple of 32 up to 320") for d in (72, 0, 352)),
    *((SM90, {"head_dim_v": d}, f"head_dim_v={d} must be a multiple of 32 up to 320") for d in (8, 72, 352)),
    # Powers of two, so that the stage index is the low bits of the iteration.
    *((SM90, {"stages": n}, f"stages={n} must be 1, 2, 4 or 8") for n in (0, 3)),
    *((SM90, {"q_stages": n}, f"q_stages={n} 1 to 4") for n in (0, 5)),
    (SM90, {"q_stages": 2, "head_dim_v": 128}, "an output of width 128 does not fit Q's stage"),
    *(
        (SM90, {"dropout_producer": True, "tile_m": m, "tile_n": n}, "for 2 warpgroups, and .* a multiple of 32")
        for m, n in ((64, 64), (192, 64), (128, 80))
    ),
    (BWD, {"num_warps": 6}, "num_warps"),
    (BWD, {"stages": 3}, "stages"),
    (BWD, {"tile_m": 48}, "tile_m"),
    *((BWD, {"head_dim": d}, f"head_dim={d} must be a multiple of 32 up to 512") for d in (100, 544)),
    (BWD, {"warps_s": 3}, "warps_s"),
    (BWD, {"warps_kv": 1, "head_dim": 96}, "warps_kv"),
    (BWD, {"splits_kv": True, "warps_kv": 8}, "up to 4 warps"),
    (BWD, {"splits_kv": True, "warps_s": 8, "pieces": 2}, "not implemented for fp32"),
    (BWD, {"splits_s": True, "pieces": 2}, "not implemented for fp32"),
    (BWD, {"splits_s": True, "warps_s": 8}, "up to 4 warps"),
    (BWD, {"splits_s": True, "warps_s": 1, "tile_m": 16}, "not 1x4 parts of 16x8"),
    (BWD, {"tile_m": 16, "warps_q": 2}, "warps_s"),
    # 256 threads copy 16 rows of 128 columns, or 32 of 64.
    (
        BWD,
        {"head_dim": 320, "tile_m": 32, "tile_n": 48, "splits_s": True, "warps_s": 1, "splits_kv": True, "warps_kv": 1},
        "rows of one copy",
    ),
    (BWD, {"warps_q": 8}, "warps_q"),
    (BWD, {"tile_n": 40}, "warps_s"),
    (BWD, {"head_dim": 96, "tile_m": 32, "warps_q": 2, "warps_s": 4}, "rows of one copy|warps_q"),
]


@pytest.mark.parametrize(
    ("good", "fields", "message"), WRONG, ids=lambda x: x.__class__.__name__ if dataclasses.is_dataclass(x) else str(x)
)
def test_a_wrong_tile_names_the_value(good: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **fields)


def test_a_speculative_row_max_is_for_plain_calls() -> None:
    """Calls that need the exact row max, or a feature that the speculative path lacks, have other tiles."""
    problem = problem_of(256, Band())
    assert fwd_tile("sm80", SM_90, problem).row_warps == 2
    others = [{"features": (name,)} for name in ("dropout", "return_max_logit", "bias", "score_mod", "mask_mod")]
    for fields in (*others, {"batch_invariant": True}, {"block_sparse": True}, {"dtype": "float32"}):
        head_dim = 128 if "dtype" in fields else 256
        assert not fwd_tile("sm80", SM_90, dataclasses.replace(problem, head_dim=head_dim, **fields)).speculative_max


# Barriers of 8 bytes: two for each stage, one for each warpgroup and stage of Q; 16 bytes for each of two
# tiles, at multiples of 16. `test_launches` compares this with the kernel.
@pytest.mark.parametrize(
    ("tile", "threads", "smem_bytes"),
    [
        (FwdTileSm80(96, 64, 32, 4, 1), 128, 24 << 10),
        (FwdTileSm80(128, 128, 64, 8, 1), 256, 64 << 10),
        # Q, K and V, then P, then a value of each thread and row.
        (FwdTileSm80(512, 32, 32, 4, 1, row_warps=2), 128, (96 << 10) + (2 << 10) + (1 << 10)),
        (FwdTileSm80(512, 64, 32, 8, 1, row_warps=2), 256, (128 << 10) + (4 << 10) + (2 << 10)),
        (FwdTileSm80(384, 64, 64, 8, 1, row_warps=4), 256, (144 << 10) + (8 << 10) + (4 << 10)),
        (FwdTileSm90(64, 192, 128, 4, 2), 512, (176 << 10) + 8 * (2 * 10 + 6) + 32),
        (FwdTileSm90(256, 128, 80, 2), 384, (224 << 10) + 8 * (2 * 5 + 2) + 32),
        (FwdTileSm90(32, 64, 256, 1, 2, ping_pong=False), 256, (40 << 10) + 8 * (2 * 4 + 2) + 32),
        (FwdTileSm90(64, 64, 64, 2), 256, (40 << 10) + 8 * (2 * 5 + 1 + 1) + 32),
        (FwdTileSm90(192, 128, 128, 2, 1, head_dim_v=128), 384, (208 << 10) + 8 * (2 * 5 + 2) + 32),
        (FwdTileSm90(320, 128, 48, 2, 1), 384, (200 << 10) + 8 * (2 * 5 + 2) + 32),
        # A slot for each of three tiles.
        (FwdTileSm90(128, 128, 128, 2, 3), 384, (224 << 10) + 8 * (2 * 7 + 6) + 48),
        # Two bytes per score, and two more barriers per warpgroup.
        (FwdTileSm90(128, 128, 128, 2, 2, dropout_producer=True), 512, (224 << 10) + 8 * (2 * 8 + 4) + 32),
    ],
    ids=str,
)
def test_threads_and_shared_memory(tile: Tile, threads: int, smem_bytes: int) -> None:
    assert (tile.num_threads, tile.smem_bytes) == (threads, smem_bytes)
    arch = SM_90 if isinstance(tile, FwdTileSm90) else ARCHS["sm_80"]
    assert tile.fits(dataclasses.replace(arch, smem_per_cta=smem_bytes))
    assert not tile.fits(dataclasses.replace(arch, smem_per_cta=smem_bytes - 1))
    assert tile.fits(ARCHS["sm_89"]) == (not isinstance(tile, FwdTileSm90) and smem_bytes <= 99 << 10)


def test_hopper_tiles_say_what_they_are() -> None:
    text = str(FwdTileSm90(128, 192, 80, 2, 2))
    for part in ("192x80x128,", "1 + 3 warpgroups", "2 K/V stages, 2 of Q", "ping-pong"):
        assert part in text
    assert "1 + 2 + 1 warpgroups" in str(FwdTileSm90(64, 128, 64, 2, dropout_producer=True))
    plain = str(FwdTileSm90(128, 64, 80, 1, ping_pong=False, speculative_max=True, head_dim_v=64))
    assert "64x80x128/64," in plain and "1 K/V stage, 1 of Q" in plain
    assert "ping-pong" not in plain and "speculative max" in plain and "speculative max" not in text
    assert "skips blocks" in str(FwdTileSm90(256, 128, 64, 2, skips_blocks=True)) and "skips blocks" not in text


# The backward on mma.sync


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_has_a_backward_tile_that_fits(arch: str) -> None:
    assert set(SM80_BWD) == set(ARCHS)
    for head_dim in range(8, 513, 8):
        tile = bwd_tile("sm80", ARCHS[arch], problem_of(head_dim, Band()))
        assert isinstance(tile, BwdTileSm80) and tile in SM80_BWD[arch]
        assert tile.head_dim >= head_dim
        assert tile.fits(ARCHS[arch])
        # It is the narrowest row that is wide enough.
        assert tile.head_dim == min(row.head_dim for row in SM80_BWD[arch] if row.head_dim >= head_dim)
        # dK and dV stay in registers, beside S and dP, and later beside dQ. Without a semaphore ptxas moves the atomic
        # additions of dQ between its MMAs, so only a part of dQ is in registers at a time.
        dq = tile.tile_m * tile.head_dim // tile.num_threads if tile.allows_deterministic else 0
        kept = 2 * tile.tile_n * tile.head_dim // tile.num_threads
        assert max(tile.accumulator_registers, kept + dq) <= MAX_REGISTERS - OTHER_REGISTERS
        # Deterministic gradients and fp16 have a tile of the same width.
        for dtype, deterministic in (("bfloat16", True), ("float16", False), ("float16", True)):
            problem = dataclasses.replace(problem_of(head_dim, Band()), dtype=dtype)
            other = bwd_tile("sm80", ARCHS[arch], problem, deterministic)
            assert isinstance(other, BwdTileSm80) and other.head_dim == tile.head_dim
            assert other.allows(dtype, deterministic)
        # So have features, varlen and a block mask.
        for fields in ({"features": ("softcap", "alibi", "dropout")}, {"varlen": True}, {"block_sparse": True}):
            problem = dataclasses.replace(problem_of(head_dim, Band()), **fields)
            for deterministic in (False, True):
                other = bwd_tile("sm80", ARCHS[arch], problem, deterministic)
                assert isinstance(other, BwdTileSm80) and other.head_dim == tile.head_dim and other.fits(ARCHS[arch])
                assert other.divides_block_mask(problem.static)
        # So have few keys.
        few = bwd_tile("sm80", ARCHS[arch], problem_of(head_dim, Band(), keys=512))
        assert isinstance(few, BwdTileSm80) and few.head_dim == tile.head_dim
    for widths in ((128, 64), (64, 128)):
        wider = bwd_tile("sm80", ARCHS[arch], problem_of(widths[0], Band(), head_dim_v=widths[1]))
        assert wider is bwd_tile("sm80", ARCHS[arch], problem_of(128, Band()))
