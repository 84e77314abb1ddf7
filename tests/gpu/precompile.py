"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS]
python -m pytest tests/gpu --kernel-cache=DIR
"""

import itertools
import os
import sys
from collections.abc import Iterator

import torch

from cute_flash.arch import detect
from cute_flash.compile import precompile_all
from cute_flash.plan import CompileKey, bwd_plan, plan, use_kernels
from cute_flash.problem import Problem, UnsupportedError
from tests import cases
from tests.gpu import families, small_case

DTYPES = (torch.bfloat16, torch.float16)


def problems() -> Iterator[Problem]:
    for case, dtype in itertools.product((*cases.GPU, *small_case.SMALL), DTYPES):
        yield case.problem(dtype)
    for widths, band, rows in itertools.product(cases.OTHER_WIDTHS, cases.OTHER_WIDTH_BANDS, (200, 3)):
        head_dim, head_dim_v = widths
        yield Problem(2, 8, 2, rows, 333, head_dim, "bfloat16", band, head_dim_v)


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
        try:
            gradients = bwd_plan(problem, arch)
        except UnsupportedError:
            continue
        yield from (gradients.before(False), gradients.before(True), gradients.main, gradients.after)


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    wanted = list(dict.fromkeys(keys()))
    compiled = sum(precompile_all(wanted, jobs))
    print(f"{compiled} of {len(wanted)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
