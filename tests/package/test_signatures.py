"""Signatures in kernels/ and device/: values that travel together have a name, and functions have few parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "cute_flash"
# Folders that are checked.
FOLDERS = ("kernels", "device")
MAX_PARAMETERS = 12
# Parameters without a type: the receiver, those that the DSL fills in, and the operands of `Kernel.__call__`, which
# planning/registry.py names.
UNTYPED = {"self", "cls", "loc", "ip", "operands"}

FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> list[ast.arg]:
    """All parameters of a function but its receiver."""
    args = function.args
    several = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    all_of_them = [*args.posonlyargs, *args.args, *args.kwonlyargs, *several]
    return [arg for arg in all_of_them if arg.arg not in ("self", "cls")]


def bare_tuples(annotation: ast.expr) -> Iterator[str]:
    """Tuples and lists in a type that do not say what they hold, and tuples of values with different meanings.

    `tuple[Int32, ...]` and `list[Int32]` are sequences, and fine. `tuple[Int32, Int32]` should have a name.
    """
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        yield from bare_tuples(ast.parse(annotation.value, mode="eval").body)
    elif isinstance(annotation, ast.Name):
        if annotation.id in ("tuple", "list"):
            yield annotation.id
    elif isinstance(annotation, ast.Subscript):
        elements = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        is_tuple = isinstance(annotation.value, ast.Name) and annotation.value.id == "tuple"
        if is_tuple and not (isinstance(elements[-1], ast.Constant) and elements[-1].value is ...):
            yield ast.unparse(annotation)
        for element in elements:
            yield from bare_tuples(element)
    else:
        for child in ast.iter_child_nodes(annotation):
            if isinstance(child, ast.expr):
                yield from bare_tuples(child)


def faults(tree: ast.AST) -> Iterator[str]:
    """What is wrong with the functions and the fields of a module."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            found = parameters(node)
            if len(found) > MAX_PARAMETERS:
                yield f"{node.name} has {len(found)} parameters"
            for arg in found:
                if arg.annotation is None:
                    if arg.arg not in UNTYPED:
                        yield f"{node.name}: {arg.arg} has no type, and may be a tuple"
                else:
                    yield from (f"{node.name}: {arg.arg} is a {text}" for text in bare_tuples(arg.annotation))
        elif isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    name = f"{node.name}.{ast.unparse(field.target)}"
                    yield from (f"{name} is a {text}" for text in bare_tuples(field.annotation))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            yield from (f"{ast.unparse(node.targets[0])} is a {text}" for text in bare_tuples(node.value))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_signatures_name_what_they_take(path: Path) -> None:
    assert list(faults(ast.parse(path.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def f(block: tuple): ...", "f: block is a tuple"),
        ("def f(block: 'tuple | None' = None): ...", "f: block is a tuple"),
        ("def f(rows: list): ...", "f: rows is a list"),
        ("def f(coord: tuple[int, int]): ...", "f: coord is a tuple[int, int]"),
        ("def f(coords: list[tuple[int, int]]): ...", "f: coords is a tuple[int, int]"),
        ("def f(x): ...", "f: x has no type, and may be a tuple"),
        ("def f(*thread): ...", "f: thread has no type, and may be a tuple"),
        ("class State:\n    visible: tuple", "State.visible is a tuple"),
        ("Halves = tuple[Tensor, Tensor]", "Halves is a tuple[Tensor, Tensor]"),
        (f"def f(self, {', '.join(f'x{i}: int' for i in range(13))}): ...", "f has 13 parameters"),
    ],
)
def test_faults_are_found(source: str, fault: str) -> None:
    assert list(faults(ast.parse(source))) == [fault]


@pytest.mark.parametrize(
    "source",
    [
        "def f(self, rows: list[int], dims: tuple[str, ...] | None, *, loc=None): ...",
        f"def f(self, {', '.join(f'x{i}: int' for i in range(12))}): ...",
        "def __call__(self, stream: CUstream, **operands): ...",
        "class State:\n    parts: tuple[Part, ...]",
        "Values = tuple[Int32, ...]",
    ],
)
def test_sequences_are_fine(source: str) -> None:
    assert list(faults(ast.parse(source))) == []
