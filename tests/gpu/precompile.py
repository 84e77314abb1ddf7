"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS] [SET ...]
python -m pytest tests/gpu --kernel-cache=DIR

SET: plain, study, features, packed, floats, mods, mods_bwd; all of them by default.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from cute_flash.jit.compile import precompile_all
from cute_flash.planning.plan import CompileKey, bwd_plan, plan
from cute_flash.spec.arch import detect
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import PLAIN, Problem, UnsupportedError
from profiling.ncu_case import LAYOUTS
from tests import cases, mod_cases, mod_gradients
from tests.gpu import (
    families,
    feature_cases,
    feature_combinations,
    float_cases,
    small_case,
    test_banks,
    test_batch_invariance,
    varlen_cases,
)

DTYPES = (torch.bfloat16, torch.float16)
COMBINATIONS = 300  # the default of `--combinations`


def problems() -> Iterator[Problem]:
    for case, dtype in itertools.product((*cases.GPU, *small_case.SMALL), DTYPES):
        yield case.problem(dtype)
    yield from deterministic_problems()
    for widths, band, rows in itertools.product(cases.OTHER_WIDTHS, cases.OTHER_WIDTH_BANDS, (200, 3)):
        head_dim, head_dim_v = widths
        yield Problem(2, 8, 2, rows, 333, head_dim, "bfloat16", band, head_dim_v)


def deterministic_problems() -> Iterator[Problem]:
    return (case.problem(torch.bfloat16) for case in cases.DETERMINISTIC)


def gradient_keys(problem: Problem, family: str, deterministic: bool = False) -> Iterator[CompileKey]:
    try:
        with use_kernels(family):
            gradients = bwd_plan(problem, detect(0), deterministic)
    except UnsupportedError:
        return
    yield from (gradients.before(False), gradients.before(True), gradients.main, gradients.after)


def packed_keys() -> Iterator[CompileKey]:
    arch = detect(0)
    wanted = [(case, torch.bfloat16) for case in (*varlen_cases.CASES, *varlen_cases.OTHER_WIDTHS)]
    wanted += [(case, torch.float16) for case in varlen_cases.IN_FP16]
    for case, dtype in wanted:
        problem = varlen_cases.problem_of(case, dtype)
        for family in families.runnable():
            try:
                with use_kernels(family):
                    forward = plan(problem, arch)
            except UnsupportedError:
                continue
            yield from (forward.prepare, forward.key)
            for deterministic in (False, True):
                if deterministic and case.head_dim not in varlen_cases.ORDERED_DIMS:
                    continue
                try:
                    with use_kernels(family):
                        gradients = bwd_plan(problem, arch, deterministic)
                except UnsupportedError:
                    # Those of wide heads are the other family's.
                    continue
                yield gradients.prepare
                yield from (gradients.before(False), gradients.before(True), gradients.main, gradients.after)
    yield from feature_combinations.packed_cases_keys(arch, families.runnable())


def keys() -> Iterator[CompileKey]:
    arch = detect(0)
    for problem in problems():
        if problem.is_empty:
            continue
        for family in families.runnable():
            try:
                with use_kernels(family):
                    yield plan(problem, arch, is_packable=True).key
            except UnsupportedError:
                continue
            if problem.features == PLAIN:
                yield from gradient_keys(problem, family)
    in_order = (case.problem(torch.bfloat16) for case in small_case.SMALL)
    widths = (
        Problem(2, 8, 2, 200, 333, d, "bfloat16", Band(None, 0), dv) for d, dv in ((128, 64), (192, 128))
    )
    wanted = (*deterministic_problems(), *in_order, *widths)
    for problem, family in itertools.product(wanted, families.runnable()):
        yield from gradient_keys(problem, family, deterministic=True)


def study_keys() -> Iterator[CompileKey]:
    """Kernels with other layouts of shared memory."""
    arch = detect(0)
    for case in test_banks.PROFILED:
        if case.family in families.runnable():
            yield from case.keys(arch)
    for case, family in itertools.product(test_banks.STUDIED, families.runnable()):
        with use_kernels(family):
            key = plan(case.problem(torch.bfloat16), arch).key
        for layout in LAYOUTS[f"fwd-{family}"]:
            yield replace(key, tile=replace(key.tile, layout=layout))


def feature_keys() -> Iterator[CompileKey]:
    """Those of the forward tests, and forward and backward of the tests of gradients."""
    arch = detect(0)
    for asked, family in itertools.product(feature_cases.CASES, families.runnable()):
        with use_kernels(family):
            yield plan(asked.problem(), arch, is_packable=True).key
    yield from feature_combinations.keys(arch, families.runnable(), COMBINATIONS)


def float_keys() -> Iterator[CompileKey]:
    return float_cases.keys(detect(0), families.runnable())


def mod_keys() -> Iterator[CompileKey]:
    """Those of the tests with functions, a bias and block maps, and of batch invariance; others are few."""
    arch = detect(0)
    for case, family in itertools.product(mod_cases.cases(), families.runnable()):
        problem, _given = case.problem()
        with use_kernels(family):
            yield plan(problem, arch).key
    yield from test_batch_invariance.keys(arch, families.runnable())


SETS = {
    "plain": keys,
    "study": study_keys,
    "features": feature_keys,
    "packed": packed_keys,
    "floats": float_keys,
    "mods": mod_keys,
    "mods_bwd": lambda: mod_gradients.keys(detect(0), families.runnable()),
}


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    chosen = sys.argv[3:] or list(SETS)
    wanted = list(dict.fromkeys(itertools.chain.from_iterable(SETS[name]() for name in chosen)))
    compiled = 0
    for done, is_new in enumerate(precompile_all(wanted, jobs), start=1):
        compiled += is_new
        if done % 20 == 0:
            print(f"{done} of {len(wanted)}", flush=True)
    print(f"{compiled} of {len(wanted)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
