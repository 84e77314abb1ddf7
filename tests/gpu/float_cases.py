"""Calls whose output is fp32, for the tests of them on a GPU and for compiling ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from cute_flash.planning.plan import CompileKey, bwd_plan, plan
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.band import Band
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import Problem
from tests.cases import CAUSAL, FULL, Case
from tests.gpu import varlen_cases
from tests.gpu.varlen_cases import Packed

CASES = [
    Case(2, 4, 2, 257, 391, d, band)
    for d, band in itertools.product((64, 72, 128, 256), (FULL, CAUSAL, Band(100, 37)))
]
# More tiles than SMs, some of which see no key; few rows of heads that share keys; rows without keys.
CASES += [Case(4, 40, 8, 300, 150, d, band) for d, band in itertools.product((64, 128, 256), (FULL, CAUSAL))]
CASES += [Case(2, 16, 2, 3, 700, 128, CAUSAL), Case(1, 2, 2, 999, 3, 64, CAUSAL)]
GRADIENTS = [case for case in CASES if case.batch == 2 and case.seqlen_q > 3]
PACKED: list[Packed] = [
    case
    for case in varlen_cases.CASES[:18]
    if case.head_dim in (64, 128) and case.band != varlen_cases.WINDOW
]


def problems() -> Iterator[Problem]:
    """With the output in fp32."""
    plain = [case.problem(torch.bfloat16) for case in (*CASES, Case(2, 4, 2, 400, 400, 64, CAUSAL))]
    plain += [Problem(2, 4, 2, 400, keys, d, band=CAUSAL) for d in (64, 128) for keys in (100, 200, 400)]
    plain += [Problem(2, 8, 2, 200, 333, 192, "bfloat16", CAUSAL, 128)]
    plain += [varlen_cases.problem_of(case, torch.bfloat16) for case in PACKED]
    for problem in plain:
        yield replace(problem, features=replace(problem.features, out_dtype=True))


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    for problem, family in itertools.product(problems(), runnable):
        rounded = replace(problem, features=replace(problem.features, out_dtype=False))
        with use_kernels(family):
            for one in (problem, rounded):
                is_packed = problem.features.varlen
                forward, gradients = plan(one, arch, is_packable=not is_packed), bwd_plan(one, arch)
                yield from (forward.key, gradients.before(False), gradients.before(True), gradients.main)
                yield gradients.after
                if is_packed:
                    yield from (forward.prepare, gradients.prepare)
