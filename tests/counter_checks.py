"""Counters of Nsight Compute against the predictions of `layouts`, on a GPU and in the checked-in reports."""

from __future__ import annotations

from collections.abc import Mapping

from profiling.counters.ncu_case import BEYOND_L2, LAYOUTS, Case
from profiling.counters.ncu_metrics import ABSENT

# Counted by instruction, so other users of the banks do not add to them.
EXACT = ("ldsm_instructions", "ldgsts_instructions", "sass_ldsm_conflicts", "sass_ldsm_wavefronts")
# Conflicts of cp.async are 0 in every layout, but the GPU counts some for rows past the end of a sequence, which are
# zero-filled: 216 of 115,200 wavefronts with 1,000 keys. One conflict in each instruction would be 6.7 %.
ZERO_FILLED_SHARE = 0.005
# Counters of the load/store unit -> the predicted wavefronts to compare with.
CONFLICTS = {"ld_conflicts": "ld_wavefronts", "st_conflicts": "st_wavefronts"}
WAVEFRONTS = ("ld_wavefronts", "st_wavefronts", "sass_ldgsts_wavefronts")
# Share of the predicted wavefronts by which a counter may differ. One address conflict in each instruction of a kind
# would be 100 %. Counters that are not by instruction include other traffic of the banks. It is frequent in Hopper's
# backward kernels and narrow layouts (TMA, bulk additions, mbarriers; up to 18 % in the reports), and in the epilogue
# of a CTA whose neighbour on the SM is in its main loop (14 % of the stores, for several waves of CTAs). For loads of
# the mma.sync backward the counter is 11 % above the sum over instructions; the cause is not known.
TOLERANCE, BWD_SM80_LOADS, BUSY_TOLERANCE = 0.05, 0.15, 0.25


def tolerance(case: Case, name: str) -> float:
    if case.kernel == "bwd-sm80" and name.startswith("ld_"):
        return BWD_SM80_LOADS
    is_busy = case.family == "sm90" and (case.direction == "bwd" or case.layout != LAYOUTS[case.kernel][0])
    has_waves = all(getattr(case.shape, size) == value for size, value in BEYOND_L2.items())
    return BUSY_TOLERANCE if is_busy or (has_waves and name.startswith("st_")) else TOLERANCE


def disagreements(
    case: Case, capability: str, measured: Mapping[str, float | None], predicted: Mapping[str, float]
) -> list[str]:
    """Counters that differ from their prediction, or that have no value although the GPU has them."""
    wrong = []

    def check(name: str, allowed: float) -> None:
        value = measured[name]
        if value is None:
            if name not in ABSENT.get(capability, ()):
                wrong.append(f"{name}: no value")
        elif abs(value - predicted[name]) > allowed:
            wrong.append(f"{name}: {value:.0f}, predicted {predicted[name]:.0f}")

    for name in EXACT:
        check(name, 0)
    is_ragged = case.shape.seqlen % 128 != 0
    check("sass_ldgsts_conflicts", ZERO_FILLED_SHARE * predicted["sass_ldgsts_wavefronts"] if is_ragged else 0)
    for name, wavefronts in CONFLICTS.items():
        check(name, tolerance(case, name) * max(predicted[name], predicted[wavefronts]))
    # Wavefronts of the Hopper kernels include barriers and bulk copies.
    for name in WAVEFRONTS if case.family == "sm80" else ():
        check(name, tolerance(case, name) * predicted[name])
    return wrong
