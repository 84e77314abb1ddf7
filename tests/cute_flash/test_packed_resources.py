"""Compile gates of kernels for packed sequences: no spills, no serialised wgmma, shared memory that fits."""

from __future__ import annotations

import pytest

from cute_flash.planning.plan import CompileKey, bwd_plan, plan
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Features, Problem
from tests.gates import kernel_resources

FULL, CAUSAL, WINDOW = Band(), Band(None, 0), Band(128, 64)
# What a told tile takes more than one of a batch.
MORE_SMEM = 32

# (family, target, head dim, mask): those that cost most registers, and the most used.
FORWARD = [
    ("sm80", "sm_80", 128, WINDOW),
    ("sm90", "sm_90", 64, FULL),
    ("sm90", "sm_90", 128, CAUSAL),
    ("sm90", "sm_90", 256, WINDOW),
]
BACKWARD = [
    ("sm80", "sm_80", 64, WINDOW),
    ("sm80", "sm_90", 256, CAUSAL),
    ("sm90", "sm_90", 64, WINDOW),
    ("sm90", "sm_90", 128, FULL),
    ("sm90", "sm_90", 128, CAUSAL),
]

ALL = {"softcap": True, "alibi": True, "dropout": True}
# With them.
SCORES = [
    ("sm80", "sm_80", 128, WINDOW),
    ("sm80", "sm_90", 256, WINDOW),
    ("sm90", "sm_90", 128, WINDOW),
]


def problem(head_dim: int, band: Band, **asked: bool) -> Problem:
    features = Features(varlen=True, **asked)
    return Problem(3, 8, 4, 1000, 1000, head_dim, "bfloat16", band, features=features)


def check(key: CompileKey, smem_per_block: int) -> None:
    found = kernel_resources(key)
    assert (found.spill_bytes, found.stack_bytes) == (0, 0)
    assert found.serialised_wgmma == ()
    assert found.smem_bytes + MORE_SMEM <= smem_per_block


@pytest.mark.compiles
@pytest.mark.parametrize("gate", FORWARD, ids=str)
def test_forward(gate: tuple[str, str, int, Band]) -> None:
    family, target, head_dim, band = gate
    with use_kernels(family):
        found = plan(problem(head_dim, band), ARCHS[target])
    check(found.key, found.arch.smem_per_block)
    check(found.prepare, found.arch.smem_per_block)


@pytest.mark.compiles
@pytest.mark.parametrize("gate", BACKWARD, ids=str)
def test_backward(gate: tuple[str, str, int, Band]) -> None:
    family, target, head_dim, band = gate
    with use_kernels(family):
        found = bwd_plan(problem(head_dim, band), ARCHS[target])
    for key in (found.main, found.before(True), found.after):
        check(key, found.arch.smem_per_block)


@pytest.mark.compiles
@pytest.mark.parametrize("gate", SCORES, ids=str)
def test_backward_with_features(gate: tuple[str, str, int, Band]) -> None:
    family, target, head_dim, band = gate
    with use_kernels(family):
        found = bwd_plan(problem(head_dim, band, **ALL), ARCHS[target])
    assert found.main.kernel == f"bwd_{family}_general"
    check(found.main, found.arch.smem_per_block)


@pytest.mark.compiles
def test_in_order() -> None:
    found = bwd_plan(problem(128, WINDOW, seqused_k=True), ARCHS["sm_90"], deterministic=True)
    for key in (found.prepare, found.main, found.before(False)):
        check(key, found.arch.smem_per_block)
