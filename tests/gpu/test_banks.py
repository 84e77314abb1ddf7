"""Nsight Compute counters against the predictions of layouts.kernels; results with other shared-memory layouts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from cute_flash import reference
from cute_flash.jit.kernels import precompile
from cute_flash.planning.plan import plan_forward
from cute_flash.runtime import binder
from cute_flash.spec.arch import detect
from cute_flash.spec.band import Band
from profiling.counters.expect import expected
from profiling.counters.ncu import NotPermittedError, Tool
from profiling.counters.ncu_case import LAYOUTS, Case
from profiling.counters.ncu_metrics import Profile
from profiling.measure.shapes import Shape
from tests import cases
from tests.counter_checks import disagreements
from tests.gpu import families

pytestmark = pytest.mark.gpu

WIDE, RAGGED = Shape(1, 4, 4, 1024, 128, False), Shape(1, 2, 1, 1000, 96, True)
PROFILED = [Case("fwd-sm80", layout, shape) for shape in (WIDE, RAGGED) for layout in LAYOUTS["fwd-sm80"]]
PROFILED += [Case("fwd-sm90", layout, WIDE) for layout in LAYOUTS["fwd-sm90"]]
PROFILED += [Case(kernel, LAYOUTS[kernel][0], WIDE) for kernel in ("bwd-sm80", "bwd-sm90")]
PROFILED += [Case("bwd-sm90", LAYOUTS["bwd-sm90"][0], replace(WIDE, head_dim=256))]


@cache
def profile_of(case: Case) -> Profile:
    if shutil.which("ncu") is None:
        pytest.skip("no ncu on the path: install Nsight Compute")
    if reason := families.obstacle(case.family):
        pytest.skip(reason)
    for key in case.keys(detect(0)):
        precompile(key)
    with TemporaryDirectory(prefix="cute_flash_ncu_") as folder:
        try:
            return Tool(Path(folder)).profile(case)
        except NotPermittedError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("case", PROFILED, ids=lambda case: case.id)
def test_prediction_against_counters(case: Case) -> None:
    profile, predicted = profile_of(case), expected(case, detect(0)).metrics
    print({name: (profile[name], value) for name, value in predicted.items()})
    assert disagreements(case, profile.capability, profile.metrics, predicted) == []


@pytest.mark.parametrize("case", PROFILED[: len(LAYOUTS["fwd-sm80"])], ids=lambda case: case.id)
def test_every_input_is_read_once(case: Case) -> None:
    measured, predicted = profile_of(case)["dram_read_bytes"], expected(case, detect(0)).dram_read_bytes
    assert measured is not None and measured == pytest.approx(predicted, rel=0.1)


STUDIED = [
    cases.Case(2, 4, 2, 200, 333, 64, Band()),
    cases.Case(1, 2, 2, 129, 129, 96, Band(None, 0)),
    cases.Case(1, 3, 1, 257, 1027, 128, Band(100, 20)),
    cases.Case(1, 2, 1, 600, 77, 256, Band(None, 0)),
]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", STUDIED, ids=lambda case: case.id)
def test_layouts_do_not_change_a_bit(case: cases.Case, family: str) -> None:
    q, k, v = cases.make_inputs(case, torch.bfloat16, "cuda")
    args, problem = reference.plain_args(q, case.band), case.problem(torch.bfloat16)
    default = plan_forward(problem, detect(0), family).tile
    results = []
    for layout in LAYOUTS[f"fwd-{family}"]:
        plan = plan_forward(problem, detect(0), family, tile=replace(default, layout=layout))
        out, lse, _ = binder.bind_forward(plan, q.device, copies_inputs=False, copies_output=False)(q, k, v, args)
        results.append((out, lse))
    cases.assert_is_attention(*results[0], q, k, v, case.band)
    for (out, lse), layout in zip(results[1:], LAYOUTS[f"fwd-{family}"][1:], strict=True):
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]), layout
