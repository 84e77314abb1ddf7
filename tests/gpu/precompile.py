"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS]
python -m pytest tests/gpu --kernel-cache=DIR
"""

import itertools
import os
import sys

import torch

from cute_flash.arch import detect
from cute_flash.compile import precompile_all
from cute_flash.plan import plan, use_kernels
from tests import cases
from tests.gpu import families, small_case

DTYPES = (torch.bfloat16, torch.float16)


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    problems = [case.problem(dtype) for case in (*cases.GPU, *small_case.SMALL) for dtype in DTYPES]
    plans = {}
    for family, problem in itertools.product(families.runnable(), problems):
        if not problem.is_empty:
            with use_kernels(family):
                chosen = plan(problem, detect(0), is_packable=True)
            plans[chosen.key] = chosen
    compiled = sum(precompile_all(list(plans.values()), jobs))
    print(f"{compiled} of {len(plans)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
