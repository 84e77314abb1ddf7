"""One host call launches the kernels of a plan: a chain passes an operand that several kernels take only once."""

from __future__ import annotations

from collections.abc import Iterator

from cute_flash.planning.launch import CompileKey, LaunchChain
from cute_flash.planning.plan import plan_backward
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.features import Operand
from cute_flash.spec.problem import Problem
from tests.lock.cases import Case, cases, plan_of


def chains() -> Iterator[LaunchChain]:
    """Of every call of the lock that launches several kernels by one host call."""
    for case in cases():
        if isinstance(case, Case) and case.name.endswith("/main"):
            yield from (call for call in plan_of(case).host_calls if isinstance(call, LaunchChain))


def meaning(operand: Operand, key: CompileKey) -> tuple:
    """Everything that the fake of an operand depends on, besides the names of its dimensions."""
    _layout, _, element = operand.type.partition(" ")
    tile = key.tile if operand.type == "dq_accum" else None
    dtype = key.static.element_dtype(element) if element in ("dtype", "out") else element
    return operand.type, operand.dims, dtype, key.static.varlen, tile


def test_kernels_of_a_chain_agree_on_their_operands() -> None:
    num_chains = 0
    for chain in chains():
        num_chains += 1
        seen: dict[str, tuple] = {}
        for key in chain.keys:
            for operand in key.parameters:
                if key.takes(operand) and not operand.type.startswith(("i32", "i64", "f32")):
                    expected = seen.setdefault(operand.name, meaning(operand, key))
                    assert meaning(operand, key) == expected, (operand.name, chain.kernel)
        names = [operand.name for operand in chain.parameters]
        assert len(set(names)) == len(names) and {*seen} <= {*names}
    assert num_chains > 100


def test_a_backward_is_one_host_call_unless_it_has_mods() -> None:
    problem = Problem(1, 2, 2, 100, 100, 64)
    plan = plan_backward(problem, ARCHS["sm_90"])
    (chain,) = plan.host_calls
    assert chain.keys == plan.launches
    assert chain.kernel == "bwd_preprocess_then_bwd_sm90_then_bwd_postprocess_sm90"
    plan = plan_of(backward_case("/full/score_mod"))
    assert plan.host_calls == plan.launches
    # A bias compiles no function of the user.
    plan = plan_of(backward_case("/full/bias"))
    assert plan.problem.mods is not None and plan.host_calls == (LaunchChain(plan.launches),)


def backward_case(part: str) -> Case:
    """A case of a Hopper backward by a part of its name."""
    return next(x for x in cases() if isinstance(x, Case) and x.name.startswith("bwd/sm90") and part in x.name)
