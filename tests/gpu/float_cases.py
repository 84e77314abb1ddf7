"""Calls with fp32 outputs, for GPU tests and for compilation ahead of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import AttentionArgs
from cute_flash.spec.band import Band
from tests.cases import CAUSAL, FULL, Case, make_inputs
from tests.fakes.recording import backward_keys, forward_keys
from tests.gpu import varlen_cases
from tests.gpu.varlen_cases import VarlenCase

CASES = [
    Case(2, 4, 2, 257, 391, d, band) for d, band in itertools.product((64, 72, 128, 256), (FULL, CAUSAL, Band(100, 37)))
]
# More tiles than SMs, some without keys; few queries with GQA; rows without keys.
CASES += [Case(4, 40, 8, 300, 150, d, band) for d, band in itertools.product((64, 128, 256), (FULL, CAUSAL))]
CASES += [Case(2, 16, 2, 3, 700, 128, CAUSAL), Case(1, 2, 2, 999, 3, 64, CAUSAL)]
GRADIENTS = [case for case in CASES if case.batch == 2 and case.seqlen_q > 3]
VARLEN: list[VarlenCase] = [
    case for case in varlen_cases.CASES[:18] if case.head_dim in (64, 128) and case.band != varlen_cases.WINDOW
]


def calls() -> Iterator[tuple[Tensor, Tensor, Tensor, AttentionArgs]]:
    dense = [*CASES, Case(2, 4, 2, 400, 400, 64, CAUSAL)]
    dense += [Case(2, 4, 2, 400, keys, d, CAUSAL) for d in (64, 128) for keys in (100, 200, 400)]
    for case in dense:
        q, k, v = make_inputs(case, torch.bfloat16)
        yield q, k, v, reference.plain_args(q, case.band)
    q, k, _ = make_inputs(Case(2, 8, 2, 200, 333, 192), torch.bfloat16)
    _, _, v = make_inputs(Case(2, 8, 2, 200, 333, 128), torch.bfloat16)
    yield q, k, v, reference.plain_args(q, CAUSAL)
    for case in VARLEN:
        q, k, v = case.inputs(device="cpu")
        yield q, k, v, case.args(q)


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    for (q, k, v, args), family, out_fp32 in itertools.product(calls(), runnable, (True, False)):
        args = args._replace(kernel_family=family, out_fp32=out_fp32)
        yield from forward_keys(q, k, v, args, arch)
        for has_dlse in (False, True):
            yield from backward_keys(q, k, v, args, arch, has_dlse)
