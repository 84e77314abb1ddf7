"""The checked-in speeds and counters of the ladder show what docs/ladder.md says of each rung."""

from __future__ import annotations

from typing import Any

import pytest

from profiling.documents import sources
from profiling.documents.doc_ladder import hbm_bytes, speeds, wavefronts

SPEEDS, COUNTERS = sources.read(sources.LADDER), sources.read(sources.LADDER_COUNTERS)


def counters(name: str) -> dict[str, Any]:
    """The counters of a rung with one kernel, or of the first of several."""
    return next(iter(COUNTERS["rungs"][name].values()))


def test_the_bytes_of_rung_0_grow_with_the_square_and_those_of_rung_1_do_not() -> None:
    moved: dict[str, list[float]] = {}
    for rung, _, predicted, measured in hbm_bytes(COUNTERS).rows:
        ours, theirs = (float(x.replace(",", "")) for x in (measured, predicted))
        # What is written last may still be in L2, and is then not counted.
        assert 0.75 * theirs <= ours <= 1.02 * theirs, rung
        moved.setdefault(rung, []).append(ours)
    assert moved["0"][1] / moved["0"][0] == pytest.approx(4, rel=0.05)
    assert moved["1"][1] / moved["1"][0] == pytest.approx(2, rel=0.15)


def test_fmas_limit_rung_1() -> None:
    rung = counters("1")
    busy = {name: rung[f"{name}_percent"] for name in ("fma", "lsu_data", "alu", "xu", "tensor")}
    assert max(busy, key=lambda name: busy[name]) == "fma" and busy["fma"] > 50


def test_the_counted_wavefronts_are_those_that_the_addresses_predict() -> None:
    pytest.importorskip("cutlass")
    from examples.ladder.counters import predictions

    predicted = predictions([name for name in COUNTERS["rungs"] if " S=" not in name])
    assert predicted == COUNTERS["predicted"] and {"2", "3", "3 padded", "4", "5", "B1", "B2", "B3"} == set(predicted)
    for name, wanted in predicted.items():
        assert wanted.items() <= counters(name).items(), name
    shown = {row[0] for row in wavefronts(COUNTERS).rows}
    assert shown == {"2", "3", "3 padded", "4", "5", "B1 dK, dV", "B1 dQ", "B2", "B3"}


def test_a_swizzle_removes_conflicts_and_padding_slows_copies() -> None:
    plain, swizzled, padded = map(counters, ("2", "3", "3 padded"))
    assert plain["sass_ldsm_conflicts"] == 7 / 8 * plain["sass_ldsm_wavefronts"]
    assert swizzled["sass_ldsm_conflicts"] == padded["sass_ldsm_conflicts"] == 0
    assert padded["sass_ldgsts_wavefronts"] > 2 * swizzled["sass_ldgsts_wavefronts"]
    assert counters("B2")["sass_ldsm_conflicts"] > 0 == counters("B3")["sass_ldsm_conflicts"]


def test_double_buffering_hides_loads() -> None:
    before, after = (counters(name)["stalls"]["long_scoreboard"] for name in ("3", "4"))
    assert after < before / 3.5
    # Addresses depend on the stage, so the kernel executes more instructions.
    assert counters("4")["instructions"] / counters("3")["instructions"] == pytest.approx(1.13, abs=0.01)
    assert counters("4")["issue_percent"] / counters("3")["issue_percent"] == pytest.approx(1.15, abs=0.01)
    assert counters("B3")["instructions"] / counters("B2")["instructions"] == pytest.approx(1.6, abs=0.02)


def test_loads_limit_rung_0() -> None:
    assert COUNTERS["rungs"]["0"]["rung_0_scores_0"]["lsu_data_percent"] > 99


def test_one_kernel_of_the_backward_loads_less_than_two() -> None:
    two = sum(kernel["sass_ldsm_wavefronts"] for kernel in COUNTERS["rungs"]["B1"].values())
    assert counters("B2")["sass_ldsm_wavefronts"] / two == pytest.approx(0.7, abs=0.01)


def test_instructions_fall_and_tensor_cores_get_busier() -> None:
    instructions = [counters(name)["instructions"] for name in ("4", "5", "6", "7", "8", "9")]
    assert instructions == sorted(instructions, reverse=True)
    # TMA and wgmma: no ldmatrix.
    assert counters("5")["ldsm_instructions"] > 0 == counters("6")["ldsm_instructions"]
    # mma.sync occupies the tensor cores for longer than wgmma does for the same product.
    for names in ("12345", "6789"):
        busy = [counters(name)["tensor_percent"] for name in names]
        assert busy == sorted(busy)


def test_no_rung_is_slower_than_the_one_before() -> None:
    """At D = 128. At D = 64, several CTAs of rung 6 share an SM, and rungs 7 and 8 are slower."""
    for i, case in enumerate(SPEEDS["cases"]):
        for names in ("012345678" if case.startswith("128") else "0123456", ("B1", "B2", "B3", "B4")):
            tflops = [SPEEDS["rungs"][name]["tflops"][i] for name in names]
            assert tflops == sorted(tflops), case


def test_the_share_of_the_product() -> None:
    case = SPEEDS["cases"].index("128 full")
    speed = {name: found["tflops"][case] for name, found in SPEEDS["rungs"].items()}
    assert speed["8"] >= 0.75 * speed["9"] and speed["5"] >= 0.8 * speed["9 sm80"]
    assert SPEEDS["seqlen"] == 4096 and len(speeds(SPEEDS).rows) == len(speed)
