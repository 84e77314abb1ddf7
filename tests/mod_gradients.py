"""The gradients of `tests.mod_cases`: which are asked for, by which kernels, and the rule for them.

dq, dk, dv: that of `tests.feature_gradients`. Those of a bias, of tables and of sinks are sums, or dS itself:
they are held against the CPU path's of the same out and LSE, closer than either is to the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cute_flash import attn, backward_custom, custom
from cute_flash.planning.plan import BwdPlan, CompileKey, bwd_plan
from cute_flash.reference import tiled as reference
from cute_flash.spec.arch import ArchSpec
from cute_flash.spec.args import How
from cute_flash.spec.family import use_kernels
from cute_flash.spec.problem import UnsupportedError
from tests import cases, mod_cases
from tests.gradients import largest
from tests.mod_cases import Case

# Kernels of a kind and a family; cases that would need more are left out.
MOST_KERNELS = 2
YARDSTICK = 0.2
FLOOR = {torch.float32: 3e-3, torch.float16: 4e-3, torch.bfloat16: 1e-2}


def leaves_of(case: Case) -> dict[str, Tensor]:
    """What has a gradient, of those tensors that the case's options have."""
    found = dict(zip("qkv", case.inputs(), strict=True))
    return {name: x.requires_grad_() for name, x in found.items()} | others_of(case)


def others_of(case: Case) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in ("bias", "sinks"):
        if name in case.options:
            found[name] = case.options[name]
    _, asked = case.call()
    score = asked.graphs.score
    for i in range(0 if score is None else len(score.captures)):
        if asked.tables[i].is_floating_point():
            found[f"table {i}"] = asked.tables[i]
    return {name: x.requires_grad_() for name, x in found.items()}


def douts_of(case: Case) -> tuple[Tensor, Tensor]:
    """The gradients of out, which its dtype holds exactly, and of the LSE, of every other case."""
    s = case.sizes
    dout = case.make.normal(s.batch, s.heads, s.seqlen_q, case.kind.head_dim).to(case.kind.dtype)
    return dout, case.make.normal(s.batch, s.heads, s.seqlen_q) * (case.seed % 2)


def gradients(outs: Any, douts: tuple[Tensor, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    (out, lse), (dout, dlse) = outs, douts
    loss = (out * dout.to(out.dtype)).sum()
    loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), found, strict=True)
    }


def by_cpu(
    case: Case, leaves: dict[str, Tensor], outs: tuple[Tensor, Tensor], douts: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    """Those of the CPU path, wherever the tensors are."""
    how, asked = case.call()
    qkv = [leaves[name].detach() for name in "qkv"]
    out, lse = (x.detach() for x in outs)
    found = custom._bwd_cpu(douts[0], douts[1], *qkv, out, lse, *how, *asked)
    dq, dk, dv, _dalibi, dsinks, dbias, dtables = found
    named = {"q": dq, "k": dk, "v": dv, "sinks": dsinks, "bias": dbias}
    named |= {f"table {i}": x for i, x in enumerate(dtables)}
    return {name: named[name].view_as(x) for name, x in leaves.items()}


def assert_gradients(case: Case) -> dict[str, Tensor]:
    """Of the case's own device; they are returned."""
    leaves, douts = leaves_of(case), douts_of(case)
    q, k, v = (leaves[name] for name in "qkv")
    options = dict(case.options)
    has_logit = options.get("return_max_logit", False)
    outs = attn(q, k, v, **options, return_lse=True)
    outs = outs[:2] if has_logit else outs
    mine = gradients(outs, douts, leaves)
    fused = by_cpu(case, leaves, outs, douts)
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact_leaves = {**dict(zip("qkv", double)), **{n: x for n, x in leaves.items() if n not in "qkv"}}
    exact = gradients(reference.dense(*double, case.band, None, case.score()), douts, exact_leaves)
    low = reference.dense_low_precision(q, k, v, case.band, None, case.score())
    rough = gradients(low, douts, leaves)
    most = max(largest(exact[name]) for name in "qkv")
    for name, x in leaves.items():
        value, oracle = mine[name], exact[name]
        assert (value.shape, value.dtype) == (x.shape, x.dtype), f"d{name}: {value.shape} of {value.dtype}"
        assert torch.isfinite(value).all(), f"d{name}: not finite"
        if name not in "qkv":
            _assert_agrees(name, value, fused[name], oracle)
            continue
        errors = [(y[name].double() - oracle).abs() for y in (rough, fused)]
        assert all(error.isfinite().all() for error in errors), "a yardstick that is no number"
        if largest(oracle) <= 1e-12 * most:
            assert largest(value) <= 1e-4 * most + 2 * largest(errors[1]), f"d{name}: should be 0"
        else:
            cases.assert_error_within(f"d{name}", value, oracle, oracle + errors[0] + errors[1])
    return mine


def _assert_agrees(name: str, value: Tensor, fused: Tensor, oracle: Tensor) -> None:
    if not value.numel():
        return
    found, yardstick, size = (
        x.double().square().mean().sqrt().item() for x in (value - fused, fused - oracle, oracle)
    )
    allowed = YARDSTICK * yardstick + FLOOR[value.dtype] * size + 1e-4
    assert found <= allowed, f"d{name}: {found:.3e} from the CPU path's, allowed {allowed:.3e}"


def plan_of(case: Case, arch: ArchSpec, deterministic: bool = False) -> BwdPlan:
    """Of the family that was asked for; of its leaves all have a gradient."""
    others_of(case)
    how, asked = case.call()
    plain, _ = case.problem()
    problem, _, _ = backward_custom.described(asked, plain, deterministic)
    assert isinstance(how, How)
    return bwd_plan(problem, arch, deterministic)


def chosen(arch: ArchSpec, family: str, device: str) -> Iterator[tuple[Case, BwdPlan | None]]:
    """Cases that few kernels serve; None where the family has none for them."""
    kernels: dict[str, set[CompileKey]] = {}
    for case, described in zip(mod_cases.cases(device), mod_cases.cases("cpu"), strict=True):
        try:
            with use_kernels(family):
                plan = plan_of(described, arch)
        except UnsupportedError:
            yield case, None
            continue
        known = kernels.setdefault(case.kind.id, set())
        if plan.main in known or len(known) < MOST_KERNELS:
            known.add(plan.main)
            yield case, plan


def keys(arch: ArchSpec, runnable: list[str]) -> Iterator[CompileKey]:
    """Of the gradients; those of the forward are `mod_cases`' own."""
    for family in runnable:
        for _, plan in chosen(arch, family, "cpu"):
            if plan is not None:
                yield from (plan.before(True), plan.main, plan.after)
        for case in ordered():
            with use_kernels(family):
                try:
                    plan = plan_of(case, arch, True)
                except UnsupportedError:
                    continue
            yield from (plan.before(True), plan.main, plan.after)


def ordered(device: str = "cpu") -> list[Case]:
    """Whose gradients are also asked for bit by bit."""
    kinds = [kind for kind in mod_cases.KINDS if not kind.has_map and not kind.score and kind.head_dim <= 128]
    sizes = mod_cases.Sizes(2, 6, 3, 333, 640)
    return [Case(kind, sizes, 3, device) for kind in itertools.islice(kinds, 0, None, 2)]
