"""The gradients of `tests.mod_cases`: the tensors that have one, the kernels that compute them, and the error rule.

The rules are those of `tests.gradients`. Gradients of a bias, of captured tensors and of sinks are sums, or dS itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cute_flash import reference
from cute_flash.errors import UnsupportedError
from cute_flash.planning.plan import CompileKey
from cute_flash.spec.arch import ArchSpec
from tests import mod_cases
from tests.fakes.recording import backward_keys, main_key
from tests.feature_gradients import assert_outputs
from tests.gradients import SumTolerance, assert_like_cpu_path, loss_of
from tests.mod_cases import Case, Kind

# The largest number of kernels to compile for a kind and a family; cases that need other kernels are skipped.
MOST_KERNELS = 2
# Tolerances for a bias, captured tensors and sinks: factors of the CPU path's distance from the oracle, and of the
# gradient's size.
YARDSTICK = 0.2
FLOOR = {torch.float32: 3e-3, torch.float16: 4e-3, torch.bfloat16: 1e-2}
# Kinds for tests of gradients only: the forward has no separate kernel for wide heads.
WIDE_KINDS = [
    Kind(256, score="alibi", bounds=(False, True)),
    Kind(192, score="capped", bounds=(True, True)),
    Kind(192, score="relative", mask="document", dtype=torch.float16),
    Kind(256, mask="document_causal", has_block_mask=True),
    Kind(256, mask="padding", bounds=(True, True), has_block_mask=True),
    Kind(192, mask="window", has_block_mask=True, dtype=torch.float16),
    Kind(256, score="alibi", mask="window", bias=torch.bfloat16),
    Kind(192, bias=torch.float32, bounds=(False, True)),
    Kind(256, bias=torch.bfloat16, has_pairs=False),
    Kind(136, mask="prefix", more={"softcap": 4.0, "sinks": True}),
    Kind(256, score="alibi", bias=torch.bfloat16, more={"softcap": 4.0}),
    Kind(192, score="alibi", bounds=(False, True), head_dim_v=128),
    Kind(192, bias=torch.bfloat16, is_aligned=True, bounds=(True, True), head_dim_v=128),
    Kind(192, mask="document", bias=torch.bfloat16, is_aligned=True, has_block_mask=True),
    Kind(256, score="capped", bias=torch.bfloat16, is_aligned=True),
    Kind(256, bias=torch.bfloat16, is_aligned=True, more={"softcap": 4.0}),
]
# TMA stores the gradient of the bias, in the smaller tile at D = 64 and with a block mask inside a band.
TMA_KINDS = [
    Kind(64, score="alibi", bias=torch.bfloat16, is_aligned=True),
    Kind(128, score="alibi", bias=torch.float16, is_aligned=True, dtype=torch.float16),
    Kind(64, mask="document", bias=torch.bfloat16, is_aligned=True, has_block_mask=True, bounds=(False, True)),
]
# int64 ids, which differ only above bit 32.
INT64_KINDS = [
    Kind(64, score="same_document", mask="hashed"),
    Kind(128, mask="hashed_causal", has_block_mask=True),
    Kind(128, mask="hashed", bounds=(False, True), dtype=torch.float16),
    Kind(64, mask="hashed_near"),
    Kind(128, score="same_document"),
    Kind(192, mask="hashed", bias=torch.bfloat16),
]
KINDS = mod_cases.KINDS + WIDE_KINDS + TMA_KINDS + INT64_KINDS


def leaves_of(case: Case) -> dict[str, Tensor]:
    """The tensors that require grad: q, k, v, bias, sinks and captured tensors."""
    qkv = dict(zip("qkv", case.inputs(), strict=True))
    return {name: x.requires_grad_() for name, x in qkv.items()} | others_of(case)


def others_of(case: Case) -> dict[str, Tensor]:
    others = {name: case.options[name] for name in ("bias", "sinks") if name in case.options}
    args = case.args()
    score = args.mods.score
    for i in range(0 if score is None else len(score.captures)):
        if args.captures[i].is_floating_point():
            others[f"capture {i}"] = args.captures[i]
    return {name: x.requires_grad_() for name, x in others.items()}


def douts_of(case: Case) -> tuple[Tensor, Tensor]:
    """Random gradients of out, exact in its dtype, and of the LSE, which are 0 for even seeds."""
    dout = case.make.normal(*case.out_shape).to(case.kind.dtype)
    return dout, case.make.normal(*case.row_shape) * (case.seed % 2)


def gradients(outs: Any, douts: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss_of(outs, douts), list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), found, strict=True)
    }


def by_cpu(
    case: Case, leaves: dict[str, Tensor], outs: tuple[Tensor, Tensor], douts: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """The gradients that the CPU path computes from these outputs, on the device of the tensors."""
    q, k, v = (leaves[name].detach() for name in "qkv")
    out, lse = (x.detach() for x in outs)
    with torch.no_grad():
        *grads, others = reference.backward(*douts, q, k, v, out, lse, case.args())
    _dalibi, dsinks, dbias, *dcaptures = others
    named = dict(zip("qkv", grads)) | {"sinks": dsinks, "bias": dbias}
    named |= {f"capture {i}": x for i, x in enumerate(dcaptures)}
    return {name: named[name].view_as(x) for name, x in leaves.items()}


def assert_gradients(case: Case, **more: Any) -> dict[str, Tensor]:
    """Check out, LSE and all gradients of a case on its device, and return the gradients.

    `more` has further keywords of the call.
    """
    leaves, douts = leaves_of(case), douts_of(case)
    q, k, v = (leaves[name] for name in "qkv")
    outs = case.attend(q, k, v, **more)
    mine = gradients(outs, douts, leaves)
    fused = by_cpu(case, leaves, outs, douts)
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_leaves = {**dict(zip("qkv", double)), **{n: x for n, x in leaves.items() if n not in "qkv"}}
    exact_outs = reference.dense(*double, args=case.args())
    exact = gradients(exact_outs, douts, exact_leaves)
    low = reference.dense_low_precision(q, k, v, args=case.args())
    assert_outputs(outs, exact_outs, low)
    rough = gradients(low, douts, leaves)
    absolute = rounding_of_one_key(case, v, douts[0]) if case.sizes.seqlen_k == 1 else 1e-4

    def tolerance(name: str) -> SumTolerance:
        return SumTolerance(YARDSTICK, FLOOR[mine[name].dtype], absolute)

    assert_like_cpu_path(mine, leaves, exact, rough, fused, tolerance)
    return mine


def rounding_of_one_key(case: Case, v: Tensor, dout: Tensor) -> float:
    """The expected rounding error of the gradient of a bias or captured tensor in a call with a single key.

    The exact gradient is 0. P is 1, and dS = P (dP - Δ) is the difference of two equal sums of dO V, each with rounding
    errors of fp32. The derivative of a score by a captured element is at most the distance of query and key (ALiBi).
    Errors of different rows are independent.
    """
    sizes = case.sizes
    rows = sizes.batch * sizes.heads * sizes.seqlen_q
    sum_of_products = float(dout.abs().mean()) * float(v.detach().abs().mean()) * v.shape[-1]
    return 2.0**-24 * sum_of_products * sizes.seqlen_q * rows**0.5


def keys_of(
    case: Case, arch: ArchSpec, family: str = "", deterministic: bool = False, has_dlse: bool = True
) -> list[CompileKey]:
    """The kernels that compute all gradients of a case, whose device must be the CPU."""
    others_of(case)
    args = case.args(kernel_family=family, deterministic=deterministic)
    return backward_keys(*case.uninitialized_inputs(), args, arch, has_dlse)


def chosen(
    arch: ArchSpec, family: str, device: str, kinds: list[Kind] = KINDS
) -> Iterator[tuple[Case, list[CompileKey]]]:
    """Cases that need at most `MOST_KERNELS` kernels per kind, with their kernels: [] if the family has none."""
    known: dict[str, set[CompileKey]] = {}
    for case, on_cpu in zip(mod_cases.cases(device, kinds), mod_cases.cases("cpu", kinds), strict=True):
        try:
            found = keys_of(on_cpu, arch, family)
        except UnsupportedError:
            yield case, []
            continue
        kernels, main = known.setdefault(case.kind.id, set()), main_key(found)
        if main in kernels or len(kernels) < MOST_KERNELS:
            kernels.add(main)
            yield case, found


def deterministic_cases(device: str = "cpu") -> list[Case]:
    """Cases whose gradients are also compared bit by bit: with and without a block mask, with gradients of captured
    tensors, and varlen.
    """
    kinds = [kind for kind in mod_cases.KINDS if not kind.has_block_mask and not kind.score and kind.head_dim <= 128]
    sizes = mod_cases.Sizes(2, 6, 3, 333, 640)
    wide = [kind for kind in WIDE_KINDS if not kind.has_block_mask and not kind.score]
    dense = [Case(kind, sizes, 3, device) for kind in (*itertools.islice(kinds, 0, None, 2), *wide)]
    # More tiles than SMs.
    sizes = mod_cases.Sizes(2, 16, 8, 1000, 2000)
    kinds = [kind for kind in (*mod_cases.KINDS, *WIDE_KINDS[3:5]) if kind.has_block_mask and not kind.score]
    dense += [Case(kind, sizes, 3, device) for kind in kinds]
    sizes = mod_cases.Sizes(2, 6, 3, 333, 640)
    dense += [Case(kind, sizes, 3, device) for kind in mod_cases.KINDS if kind.score]
    kinds = [kind for kind in mod_cases.VARLEN_KINDS if not kind.score]
    return dense + [case for case in mod_cases.varlen_cases(device, kinds) if not case.lengths.used]
