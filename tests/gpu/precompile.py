"""Compile the kernels that the GPU tests need, in parallel, before the first test waits for one.

python -m tests.gpu.precompile DIR [JOBS] [SET ...]
python -m pytest tests/gpu --kernel-cache=DIR

SET: plain, study, features, varlen, floats, mods, mods_bwd, fp32, decode; all of them by default.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey, plan_forward
from cute_flash.spec.arch import detect
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from cute_flash.tools.precompile import precompile_keys
from tests import cases, fp32_cases, mod_cases, mod_gradients
from tests.fakes.recording import backward_keys, forward_keys
from tests.gpu import (
    decode_cases,
    families,
    feature_cases,
    feature_combinations,
    float_cases,
    small_case,
    test_batch_invariance,
    varlen_cases,
)

DTYPES = (torch.bfloat16, torch.float16)
COMBINATIONS = 300  # the default of `--combinations`

Inputs = tuple[Tensor, Tensor, Tensor]


def call_keys(
    inputs: Inputs, args: AttentionArgs, forward: bool = True, deterministic: bool = False
) -> Iterator[CompileKey]:
    """The kernels of forward and gradients of one call, for every family that supports them."""
    for family in families.runnable():
        own = args._replace(kernel_family=family, deterministic=deterministic)
        try:
            if forward:
                yield from forward_keys(*inputs, own, detect(0))
            for has_dlse in (False, True):
                yield from backward_keys(*inputs, own, detect(0), has_dlse)
        except UnsupportedError:
            continue


def plain_keys() -> Iterator[CompileKey]:
    for case, dtype in itertools.product((*cases.GPU, *small_case.SMALL), DTYPES):
        inputs = cases.make_inputs(case, dtype)
        yield from call_keys(inputs, reference.plain_args(inputs[0], case.band))
    for widths, band, rows in itertools.product(cases.OTHER_WIDTHS, cases.OTHER_WIDTH_BANDS, (200, 3)):
        q, k, v = cases.other_width_inputs(widths)
        yield from call_keys((q[:, :, :rows].contiguous(), k, v), reference.plain_args(q, band))
    for case in (*cases.DETERMINISTIC, *small_case.SMALL):
        inputs = cases.make_inputs(case, torch.bfloat16)
        args = reference.plain_args(inputs[0], case.band)
        yield from call_keys(inputs, args, deterministic=True)
        yield from call_keys(inputs, args)
    for widths in ((128, 64), (192, 128)):
        inputs = cases.other_width_inputs(widths)
        args = reference.plain_args(inputs[0], Band(None, 0))
        yield from call_keys(inputs, args, forward=False, deterministic=True)


def varlen_keys() -> Iterator[CompileKey]:
    wanted = [(case, torch.bfloat16) for case in (*varlen_cases.CASES, *varlen_cases.OTHER_WIDTHS)]
    wanted += [(case, torch.float16) for case in varlen_cases.IN_FP16]
    for case, dtype in wanted:
        inputs = case.inputs(dtype, "cpu")
        args = case.args(inputs[0])
        yield from call_keys(inputs, args)
        if case.head_dim in varlen_cases.DETERMINISTIC_DIMS:
            yield from call_keys(inputs, args, forward=False, deterministic=True)
    yield from feature_combinations.varlen_cases_keys(detect(0), families.runnable())


def study_keys() -> Iterator[CompileKey]:
    """Kernels with other shared-memory layouts."""
    from profiling.counters.ncu_case import LAYOUTS
    from tests.gpu import test_banks

    for case in test_banks.PROFILED:
        if case.family in families.runnable():
            yield from case.keys(detect(0))
    for case, family in itertools.product(test_banks.STUDIED, families.runnable()):
        problem = case.problem(torch.bfloat16)
        tile = plan_forward(problem, detect(0), family).tile
        for layout in LAYOUTS[f"fwd-{family}"]:
            yield plan_forward(problem, detect(0), family, tile=replace(tile, layout=layout)).main


def feature_keys() -> Iterator[CompileKey]:
    """The kernels of the forward tests and of the gradient tests."""
    for case, family in itertools.product(feature_cases.CASES, families.runnable()):
        q, k, v, options = case.tensors("cpu")
        yield from forward_keys(q, k, v, case.args(q, options)._replace(kernel_family=family), detect(0))
    yield from feature_combinations.keys(detect(0), families.runnable(), COMBINATIONS)


def float_keys() -> Iterator[CompileKey]:
    return float_cases.keys(detect(0), families.runnable())


def mod_keys() -> Iterator[CompileKey]:
    """The kernels of the tests with user mods, a bias and block masks, and of batch invariance."""
    for case, family in itertools.product(mod_cases.cases("cpu"), families.runnable()):
        yield from forward_keys(*case.uninitialized_inputs(), case.args(kernel_family=family), detect(0))
    yield from test_batch_invariance.keys(detect(0), families.runnable())


def mod_bwd_keys() -> Iterator[CompileKey]:
    return mod_gradients.keys(detect(0), families.runnable())


def fp32_keys() -> Iterator[CompileKey]:
    return fp32_cases.keys(detect(0))


def decode_keys() -> Iterator[CompileKey]:
    return decode_cases.keys(detect(0), families.runnable())


SETS = {
    "plain": plain_keys,
    "study": study_keys,
    "features": feature_keys,
    "varlen": varlen_keys,
    "floats": float_keys,
    "mods": mod_keys,
    "mods_bwd": mod_bwd_keys,
    "fp32": fp32_keys,
    "decode": decode_keys,
}


def main() -> None:
    os.environ["CUTE_FLASH_CACHE_DIR"] = os.path.abspath(sys.argv[1])
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    chosen = sys.argv[3:] or list(SETS)
    wanted = list(dict.fromkeys(itertools.chain.from_iterable(SETS[name]() for name in chosen)))
    print(f"{precompile_keys(wanted, jobs)} of {len(wanted)} kernels compiled, {jobs} at a time")


if __name__ == "__main__":
    main()
