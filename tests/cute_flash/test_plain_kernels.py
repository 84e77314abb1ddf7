"""Features cost plain attention nothing: its kernels have as many instructions as before there were any.

Counted at a67db28 by ptxas of the toolchain below; another one may choose others.
"""

from __future__ import annotations

from importlib import metadata

import pytest

pytest.importorskip("cutlass")

from cute_flash.jit.resources import nvdisasm
from cute_flash.planning.plan import bwd_plan, plan, use_kernels
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.problem import Problem
from tests.gates import kernel_resources

TOOLCHAIN = "4.8.1"
CAUSAL = Band(None, 0)
# (family, architecture, head dim, mask): instructions of the forward and of the backward.
KNOWN = {
    ("sm90", "sm_90", 128, CAUSAL): (4016, 3944),
    ("sm80", "sm_80", 128, CAUSAL): (2888, 2256),
}


@pytest.mark.compiles
@pytest.mark.skipif(nvdisasm() is None, reason="no disassembler")
@pytest.mark.skipif(metadata.version("nvidia-cutlass-dsl") != TOOLCHAIN, reason="another ptxas")
@pytest.mark.parametrize("kernel", KNOWN, ids=str)
def test_plain_kernels_are_what_they_were(kernel: tuple[str, str, int, Band]) -> None:
    family, target, head_dim, band = kernel
    problem = Problem(2, 8, 8, 4096, 4096, head_dim, "bfloat16", band)
    with use_kernels(family):
        forward = kernel_resources(plan(problem, ARCHS[target]).key)
        backward = kernel_resources(bwd_plan(problem, ARCHS[target]).main)
    found = tuple(sum(x.sass.values()) for x in (forward, backward))
    assert found == KNOWN[kernel]
