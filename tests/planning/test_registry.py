"""The kernels by name: classes that exist, and operands that are told apart by name."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from cute_flash.planning.plan import CompileKey, plan_backward, plan_forward
from cute_flash.planning.registry import KERNELS
from cute_flash.spec.arch import ARCHS
from cute_flash.spec.problem import Problem

SCALARS = ("f32", "i32", "i64")
LAYOUTS = ("rows", "statistics", "compact", "strided")
KINDS = (
    "tile_list", "dq_accum", "bias", "dbias", "captures", "scalars", "dcaptures", "fwd_block_indices",
    "bwd_block_indices",
)  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_operands_have_unique_names_and_known_types(name: str) -> None:
    kernel = KERNELS[name]
    assert len(set(kernel.names)) == len(kernel.operands)
    for operand in kernel.operands:
        layout, _, element = operand.type.partition(" ")
        assert layout in (LAYOUTS if element else (*SCALARS, *KINDS)), operand
        assert bool(operand.dims) or layout not in LAYOUTS


def test_an_operand_has_one_type_in_all_kernels() -> None:
    types: dict[str, str] = {}
    for kernel in KERNELS.values():
        for operand in kernel.operands:
            if operand.name != "block_indices":  # the forward has K/V blocks, the backward m_blocks
                assert types.setdefault(operand.name, operand.type) == operand.type


@pytest.mark.parametrize("name", KERNELS)
def test_the_launch_of_a_kernel_takes_its_operands_by_these_names(name: str) -> None:
    """And then the stream; read from the source, as the DSL takes seconds to import."""
    module, class_name = KERNELS[name].path.split(":")
    spec = find_spec(f"cute_flash.kernels.{module}")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    # The class, and those of the same module that it may inherit `__call__` from.
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    names = [class_name, *(base.id for base in classes[class_name].bases if isinstance(base, ast.Name))]
    methods = [node for one in names for node in classes[one].body if isinstance(node, ast.FunctionDef)]
    call = next(node for node in methods if node.name == "__call__")
    _self, *parameters, stream = [argument.arg for argument in call.args.args]
    assert tuple(parameters) == KERNELS[name].names and stream == "stream"


@pytest.mark.parametrize("arch", ARCHS)
def test_the_order_of_operands_is_in_the_compile_key(arch: str) -> None:
    """Else a kernel from an old cache could take one argument for another."""
    problem = Problem(2, 4, 2, 100, 200, 64)
    for plan in (plan_forward(problem, ARCHS[arch]), plan_backward(problem, ARCHS[arch])):
        for key in plan.launches:
            assert key.operands == KERNELS[key.kernel].names
            other = CompileKey(key.kernel, key.static, key.tile, key.target, key.operands[::-1])
            assert other != key
