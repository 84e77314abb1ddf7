"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS] [SET ...]
python -m pytest tests/gpu --kernel-cache=DIR

SET: attention, random, features, wide, study, mods, fp32, decode, others; all of them by default.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

from cute_flash.planning.launch import CompileKey
from cute_flash.planning.plan import plan_forward
from cute_flash.spec.arch import detect
from cute_flash.tools.precompile import precompile_keys
from tests import fp32_cases
from tests.gpu import (
    calls,
    decode_cases,
    families,
    test_banks,
    test_batch_invariance,
    test_mods,
    test_races,
    test_random,
    test_wide_heads,
)

COMBINATIONS = 300  # the default of `--combinations`


def attention_keys() -> Iterator[CompileKey]:
    runnable = families.runnable()
    for call in (*calls.CALLS, *calls.FORWARD):
        if call.family in runnable:
            yield from call.keys(detect(0), has_gradients=call not in calls.FORWARD)


def random_keys() -> Iterator[CompileKey]:
    for seed, family in itertools.product(range(COMBINATIONS), families.runnable()):
        yield from calls.drawn(seed, family).keys(detect(0))


def study_keys() -> Iterator[CompileKey]:
    """Kernels with other shared-memory layouts."""
    from profiling.counters.ncu_case import LAYOUTS

    for profiled in test_banks.PROFILED:
        if profiled.family in families.runnable():
            yield from profiled.keys(detect(0))
    for case, family in itertools.product(test_banks.STUDIED, families.runnable()):
        problem = case.problem(calls.BF16)
        tile = plan_forward(problem, detect(0), family).tile
        for layout in LAYOUTS[f"fwd-{family}"]:
            yield plan_forward(problem, detect(0), family, tile=replace(tile, layout=layout)).main


SETS = {
    "attention": attention_keys,
    "random": random_keys,
    "features": lambda: test_random.keys(detect(0), families.runnable()),
    "wide": lambda: test_wide_heads.keys(detect(0), families.runnable()),
    "study": study_keys,
    "mods": lambda: test_mods.keys(detect(0), families.runnable()),
    "fp32": lambda: fp32_cases.keys(detect(0)),
    "decode": lambda: decode_cases.keys(detect(0), families.runnable()),
    "others": lambda: itertools.chain(
        test_batch_invariance.keys(detect(0), families.runnable()), test_races.keys(detect(0), families.runnable())
    ),
}


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    chosen = sys.argv[3:] or list(SETS)
    wanted = list(dict.fromkeys(itertools.chain.from_iterable(SETS[name]() for name in chosen)))
    print(f"{precompile_keys(wanted, jobs)} of {len(wanted)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
