from __future__ import annotations

import itertools
import json
from dataclasses import asdict, fields, replace

import pytest

from cute_flash.planning.plan import plan_forward
from cute_flash.planning.tiles.bwd_sm80 import BwdTileSm80
from cute_flash.planning.tiles.bwd_sm90 import BwdTileSm90, BwdTileSm90Wide
from cute_flash.planning.tiles.fwd_sm80 import FwdTileSm80
from cute_flash.planning.tiles.fwd_sm90 import FwdTileSm90
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.family import FAMILIES as KERNEL_FAMILIES
from cute_flash.spec.problem import UnsupportedError
from profiling.tune.variants import (
    FAMILIES,
    MAX_ACCUMULATORS,
    SM90_OTHER_REGISTERS,
    InfeasibleError,
    Selection,
    Variant,
    choose,
    expand,
    forward_keys,
    neighbours,
    parse,
    read,
    sample_problem,
    table_rows,
)

FAMILY, HOPPER = "fwd_sm80", "fwd_sm90"
BWD_SM80 = BwdTileSm80(head_dim=128, tile_m=64, tile_n=128, stages=2, warps_s=4, warps_kv=2, warps_q=2)
SM_80, SM_90 = ARCHS["sm_80"], ARCHS["sm_90"]
RUNNABLE = [(FAMILY, arch) for arch in ARCHS.values()] + [(HOPPER, SM_90)]
runnable = pytest.mark.parametrize(("family", "arch"), RUNNABLE, ids=[f"{f}-{a.name}" for f, a in RUNNABLE])


@pytest.mark.parametrize(
    ("family", "head_dim", "text", "tile"),
    [
        (FAMILY, 64, "128x64 w4 s2 q4", FwdTileSm80(64, 128, 64, 4, 2, q_steps=4)),
        (FAMILY, 128, "128x48 w4 s2", FwdTileSm80(128, 128, 48, 4, 2)),
        (FAMILY, 72, "64x32 w4 s1", FwdTileSm80(96, 64, 32, 4, 1)),
        (FAMILY, 160, "64x64 w4 s1 q12 d192", FwdTileSm80(192, 64, 64, 4, 1, q_steps=12)),
        (HOPPER, 64, "192x128 s4 q2", FwdTileSm90(64, 192, 128, 4, 2)),
        (HOPPER, 128, "128x176 s2", FwdTileSm90(128, 128, 176, 2)),
        (HOPPER, 128, "128x80 s2 q2 c1 t0", FwdTileSm90(128, 128, 80, 2, 2, True, False)),
        (HOPPER, 72, "64x64 s4 d128", FwdTileSm90(128, 64, 64, 4)),
        (HOPPER, 256, "128x64 s2 k1", FwdTileSm90(256, 128, 64, 2, skips_blocks=True)),
        ("bwd_sm80", 128, "64x128 s2 p4 k2 q2", BWD_SM80),
        ("bwd_sm80", 128, "64x128 s2 p4 k2 h1 q2", replace(BWD_SM80, splits_kv=True)),
        ("bwd_sm80", 128, "64x128 s2 p4 k2 x1 q2", replace(BWD_SM80, splits_s=True)),
        (
            "bwd_sm80",
            64,
            "64x64 s1 w4 p2 k2 q2",
            replace(BWD_SM80, head_dim=64, tile_n=64, stages=1, num_warps=4, warps_s=2),
        ),
        ("bwd_sm90", 64, "128x128 e1", BwdTileSm90(64, 128, 128, early_lse=True)),
        ("bwd_sm90", 96, "64x128", BwdTileSm90(128, 64, 128)),
        ("bwd_sm90_wide", 192, "64x64 p8", BwdTileSm90Wide(256, 64, 64, dq_pieces=8)),
    ],
)
def test_a_variant_is_read_and_written(family, head_dim, text, tile):
    variant = parse(text, family, head_dim)
    assert variant == Variant(family, head_dim, tile)
    assert variant.text == text and str(variant) == f"{head_dim}: {text}"


def test_flags_are_flags_to_the_compile_key():
    tile = parse("128x80 s2 q1 c1 t1", HOPPER, 128).tile
    # 1 == True, but the digest of a key is that of its text.
    assert json.dumps(asdict(tile)) == json.dumps(asdict(FwdTileSm90(128, 128, 80, 2, 1, True, True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_a_tile_can_be_written(family):
    """Otherwise a row of the table would be tuned as another tile than the one that runs.

    Exceptions: the conditions of a row, and fields that are not tuned (Dv, layouts, dropout, bias, fp32 pieces).
    """
    known = FAMILIES[family]
    others = {"max_bounds", "head_dim_v", "layout", "pieces"}
    others |= {"dropout_producer", "dropout_stages", "early_dropout", "bias_stages"}
    deciding = {f.name for f in fields(known.tile) if f.compare} - others
    assert {"tile_m", "tile_n", *known.letters.values()} == deciding
    assert set(known.choices) == deciding - {"head_dim"}
    assert known.kernels in KERNEL_FAMILIES


@pytest.mark.slow
@runnable
@pytest.mark.parametrize("head_dim", [32, 64, 72, 96, 128, 160, 192, 256])
def test_every_neighbour_survives_the_round_trip(family, arch, head_dim):
    found = neighbours(table_rows(family, head_dim, arch), arch)
    assert [parse(variant.text, family, head_dim) for variant in found] == found
    assert len({variant.text for variant in found}) == len(found)


def test_order_and_spaces_do_not_matter_and_defaults_may_be_written():
    expected = parse("128x64 w4 s2", FAMILY, 64)
    assert parse(" s2   128x64 q0 w4 d64 ", FAMILY, 64) == expected


@pytest.mark.parametrize(
    ("family", "head_dim", "text", "part"),
    [
        (FAMILY, 64, "128x64 w4 s2 z3", "nor a number after one of w, s, q, c, p, d, nor a file"),
        (FAMILY, 64, "tiles.txt", "'tiles.txt' is neither a shape"),
        (FAMILY, 64, "128x64 w s2", "'w' is neither a shape"),
        (FAMILY, 64, "128x64 s2", "w (num_warps) missing"),
        (FAMILY, 64, "w4 s2", "tile_m, tile_n missing"),
        (FAMILY, 64, "", "missing"),
        (FAMILY, 64, "128x64 w4 w8 s2", "given twice"),
        (FAMILY, 64, "128x64 64x64 w4 s2", "given twice"),
        (FAMILY, 64, "100x64 w4 s2", "self.tile_m=100 must be a multiple of 64"),
        (FAMILY, 64, "128x64 w4 s3", "self.stages=3 must be 1 or 2"),
        (FAMILY, 64, "128x64 w0 s2", "128x64 w0 s2"),
        (FAMILY, 64, "128x64 w4 s2 q5", "self.q_steps=5 must be 0 to 4"),
        (FAMILY, 64, "128x64 w4 s2 d32", "width 32 is less than head dim 64"),
        (HOPPER, 64, "128x64 w4 s2", "nor a number after one of s, q, c, l, t, k, d, nor a file"),
        (HOPPER, 64, "128x64", "s (stages) missing"),
        (HOPPER, 64, "128x64 s2 t2", "'t2': ping_pong is 0 or 1"),
        (HOPPER, 64, "128x64 s2 c3", "'c3': speculative_max is 0 or 1"),
        (HOPPER, 64, "96x64 s2", "self.tile_m=96 must be 64 times 1, 2 or 3"),
        (HOPPER, 64, "128x72 s2", "self.tile_n=72 must be a multiple of 16"),
        (HOPPER, 64, "128x64 s3", "self.stages=3"),
        ("bwd_sm80", 64, "64x128", "s (stages) missing"),
        ("bwd_sm80", 64, "64x128 s2 p3", "warps_s=3 must be 1, 2, 4 or 8"),
        ("bwd_sm90", 64, "64x64", "self.tile_n=64 must be 128: 64 keys per warpgroup"),
        ("bwd_sm90", 192, "64x128", "self.head_dim=192 must be 64 or 128"),
        ("bwd_sm90_wide", 256, "128x64", "self.tile_m=128"),
        ("bwd_sm90", 64, "128x128 s1", "self.stages=1 must be 2"),
        ("bwd_sm90_wide", 256, "64x64 q1", "self.q_stages=1 must be 2"),
        ("bwd_sm90_wide", 256, "64x64 p4", "self.dq_pieces=4 must be 7 or 8"),
    ],
)
def test_mistakes_are_named(family, head_dim, text, part):
    with pytest.raises(ValueError) as raised:
        parse(text, family, head_dim)
    assert repr(text) in str(raised.value) and part in str(raised.value)


def test_backward_families():
    for family in ("bwd_sm80", "bwd_sm90", "bwd_sm90_wide"):
        for head_dim in FAMILIES[family].head_dims:
            rows = table_rows(family, head_dim, SM_90)
            found = neighbours(rows, SM_90)
            assert found[0] in rows and len(found) > len(rows)
            assert [parse(variant.text, family, head_dim) for variant in found] == found
            assert all(variant.tile.fits(SM_90) for variant in found[len(rows) :])
            problem = sample_problem(head_dim, "causal", "bf16")
            plan, kernels = found[-1].plan(problem, SM_90), FAMILIES[family].kernels
            assert plan.tile == found[-1].tile
            assert [key.kernel for key in plan.launches] == ["bwd_preprocess", family, f"bwd_postprocess_{kernels}"]
            forward = forward_keys(family, (head_dim,), ("causal",), "bf16", SM_90)
            assert {key.kernel for key in forward} == {f"fwd_{kernels}"}
    assert forward_keys(FAMILY, (64,), ("full",), "bf16", SM_90) == []
    # One tile for short causal sequences, and one for long ones.
    assert len(forward_keys("bwd_sm90", (64,), ("causal",), "bf16", SM_90)) == 2
    with pytest.raises(ValueError, match="bwd_sm90 has no tile for head dim 256"):
        table_rows("bwd_sm90", 256, SM_90)


def test_sets_are_expanded():
    assert expand("128x64 w4 s2") == ["128x64 w4 s2"]
    assert expand("128x{48, 64} w4 s{1,2}") == ["128x48 w4 s1", "128x48 w4 s2", "128x64 w4 s1", "128x64 w4 s2"]


def test_files_and_expressions_are_read(tmp_path):
    path = tmp_path / "tiles.txt"
    path.write_text("# wide\n64: 128x64 w4 s2 q4  # the row\n\n 128x{32,48} w4 s1\n")
    written = read([str(path), "128: 64x64 w4 s1; 64x32 w4 s2"])
    assert [(one.head_dim, one.text) for one in written] == [
        (64, "128x64 w4 s2 q4"),
        (None, "128x{32,48} w4 s1"),
        (128, "64x64 w4 s1"),
        (None, "64x32 w4 s2"),
    ]
    # Longer than a file name may be.
    assert len(read([";".join(["128x64 w4 s2"] * 100)])) == 100


def test_what_is_written_is_chosen_after_the_rows():
    sources = ("64: 64x48 w4 s1", "64x32 w4 s2", "128: 64x64 w4 s1")
    chosen = choose(Selection(sources), FAMILY, SM_80)
    row_64, row_128 = (str(table_rows(FAMILY, head_dim, SM_80)[0]) for head_dim in (64, 128))
    assert [str(variant) for variant in chosen] == [
        row_64, "64: 64x48 w4 s1", "64: 64x32 w4 s2", row_128, "128: 64x32 w4 s2", "128: 64x64 w4 s1",
    ]  # fmt: skip
    # The file has rows of all head dims. Rows of head dims that are not tuned are ignored.
    only = choose(Selection(sources, head_dims=(128,)), FAMILY, SM_80)
    assert {variant.head_dim for variant in only} == {128} and len(only) == 3
    # A row that is also given as an expression appears once.
    assert choose(Selection((row_64,)), FAMILY, SM_80) == table_rows(FAMILY, 64, SM_80)


def test_what_cannot_run_is_refused_alone_and_left_out_of_a_set():
    with pytest.raises(InfeasibleError, match="stages=3"):
        choose(Selection(("64: 128x64 w4 s3",)), FAMILY, SM_80)
    with pytest.raises(InfeasibleError, match="192 KB of shared memory, sm_80 has 163 KB a CTA"):
        choose(Selection(("256: 128x64 w8 s2",)), FAMILY, SM_80)
    rows = table_rows(FAMILY, 256, SM_80)
    chosen = choose(Selection(("256: 128x{32,64} w8 s{1,2,3}",)), FAMILY, SM_80)
    feasible = {"128x32 w8 s1", "128x32 w8 s2", "128x64 w8 s1"}
    assert {variant.text for variant in chosen} == feasible | {row.text for row in rows}
    # Infeasible members of a set are left out, but a misspelt one raises an error.
    with pytest.raises(ValueError, match="'z1' is neither a shape"):
        choose(Selection(("256: 128x64 w8 {z1,z2}",)), FAMILY, SM_80)
    with pytest.raises(UnsupportedError, match="head_dim=300"):
        choose(Selection(head_dims=(300,)), FAMILY, SM_80)


@pytest.mark.slow
@runnable
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_neighbours_respect_the_limits_and_begin_with_the_rows(family, arch, head_dim):
    rows = table_rows(family, head_dim, arch)
    found = neighbours(rows, arch)
    assert found[: len(rows)] == sorted(rows, key=lambda row: row.text)
    assert len(found) > 30
    for variant in found[len(rows) :]:
        assert variant.tile.fits(arch)
        limit = MAX_ACCUMULATORS
        if family == HOPPER:
            limit = {64: 256, 128: 240, 192: 160}[variant.tile.tile_m] - SM90_OTHER_REGISTERS
            # Ping-pong needs two warpgroups.
            assert variant.tile.ping_pong or variant.tile.tile_m > 64
        assert variant.tile.accumulator_registers <= limit
    # The nearest differs in one field.
    nearest, names = found[len(rows)].tile, FAMILIES[family].choices
    assert 1 == min(sum(getattr(nearest, f) != getattr(row.tile, f) for f in names) for row in rows)
    capped = choose(Selection(head_dims=(head_dim,), max_neighbours=7), family, arch)
    assert capped == found[:7]


def test_registers_of_hopper_tiles():
    # 128 threads hold 64 rows: D / 2 and N / 2 in fp32, N / 4 in 16 bits.
    for text, registers in {"128x128 s2": 160, "128x80 s1": 124}.items():
        assert parse(text, HOPPER, 128).tile.accumulator_registers == registers
    # The limit agrees with ptxas: it serialises wgmma for 192x96, but not for 192x80.
    rows = [parse("128x80 s1", HOPPER, 128)]
    near = {(variant.tile.tile_m, variant.tile.tile_n) for variant in neighbours(rows, SM_90)}
    assert (192, 80) in near and (192, 96) not in near and (128, 192) in near


@runnable
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_are_those_of_every_length(family, arch, head_dim):
    rows = {(row.tile.tile_m, row.tile.tile_n) for row in table_rows(family, head_dim, arch)}
    for mask, length in itertools.product(("full", "causal"), (1, 512, 1024, 1025, 2048, 2049, 100_000)):
        problem = sample_problem(head_dim, mask, "bf16", length)
        tile = plan_forward(problem, arch, FAMILIES[family].kernels).tile
        assert (tile.tile_m, tile.tile_n) in rows


def test_a_family_that_the_gpu_cannot_run_is_refused():
    with pytest.raises(UnsupportedError, match="family 'sm90' does not run on sm_80"):
        choose(Selection(), HOPPER, SM_80)


def test_a_variant_is_planned_with_its_own_tile():
    variant = parse("64x32 w4 s1", FAMILY, 64)
    plan = variant.plan(sample_problem(64, "causal", "fp16"), SM_90)
    assert (plan.tile, plan.main.kernel, plan.main.target) == (variant.tile, FAMILY, "sm_90")
    assert plan.main.static.has_right and plan.main.static.dtype == "float16"
    hopper = parse("64x80 s4", HOPPER, 64)
    plan = hopper.plan(sample_problem(64, "full", "bf16"), SM_90)
    assert (plan.tile, plan.main.kernel, plan.main.target) == (hopper.tile, HOPPER, "sm_90a")
    # The grid is that of the variant's own tile.
    assert plan.sizes["num_tiles"] == plan.sizes["num_ctas"] == 1024 // 64
