"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS]
python -m pytest tests/gpu --kernel-cache=DIR
"""

import os
import sys

import torch

from cute_flash.arch import detect
from cute_flash.compile import precompile_all
from cute_flash.plan import plan
from tests import cases
from tests.gpu import small_case

DTYPES = (torch.bfloat16, torch.float16)


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    problems = [case.problem(dtype) for case in (*cases.GPU, *small_case.SMALL) for dtype in DTYPES]
    plans = {}
    for problem in problems:
        if not problem.is_empty:
            chosen = plan(problem, detect(0))
            plans[chosen.key] = chosen
    compiled = sum(precompile_all(list(plans.values()), jobs))
    print(f"{compiled} of {len(plans)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
